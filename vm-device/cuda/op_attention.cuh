// attention: one key/value head's query group over one split of the keys. Same stages as reference-vm/src/ops/attention.rs.
//
// Each warp works alone on tiles of 16 keys, with the tensor cores: scores are queries times keys, the heads of the group being rows of
// the left operand; the weights of the keys become the left operand of the product with the values. Queries and weights are split into
// a high and a low half (22 bits), keys and values are f16 as in the cache. The first tile is asked for before the queries are there.
// The warps meet once, to add up.
#pragma once

constexpr uint32_t GROUP_BUF = AMK_GROUP <= 7 ? AMK_GROUP : 4; // query heads worked on at once: rows 0.. of the operand; then the new key
constexpr uint32_t BLOCKS = (AMK_HEAD_DIM + 31) / 32;          // of 32 elements of a head, 8 for each of 4 lanes
constexpr uint32_t LOW_BLOCKS = BLOCKS > 1 ? BLOCKS / 2 : 1;   // that have rotary angles of their own
constexpr uint32_t TILE_KEYS = 16;
constexpr uint32_t STEP_KEYS = TILE_KEYS * AMK_WARPS;
constexpr uint32_t ROW_CHUNKS = AMK_HEAD_DIM / 8;              // of 16 bytes
constexpr uint32_t TILE_LOADS = TILE_KEYS * ROW_CHUNKS / 32 > 0 ? TILE_KEYS * ROW_CHUNKS / 32 : 1; // of 16 bytes by each lane, for a tile of values
constexpr bool EARLY_VALUES = AMK_HEAD_DIM <= 64;              // else there are no registers for them while the queries are waited for
constexpr uint32_t ROW_BYTES = AMK_HEAD_DIM * 2;
constexpr float LOWEST = -1e30f;                               // below every score, and finite, so that differences are numbers
static_assert((AMK_HEAD_DIM & (AMK_HEAD_DIM - 1)) == 0 && AMK_HEAD_DIM >= 16 && AMK_HEAD_DIM <= 128, "heads are whole blocks, or parts of one");

// c += a . b for the first 8 rows of a 16x16 a and a 16x8 b. The other rows are zero, and so is what comes of them.
__device__ __forceinline__ void mma_f16(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float none0, none1;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(none0), "=f"(none1)
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(0.f), "f"(0.f));
}
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 half_values(uint32_t v) {
  float2 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(v));
  return r;
}
// As it is kept in the cache: clamped to what f16 holds.
__device__ __forceinline__ uint32_t cache_pair(float low, float high) {
  return half_pair(fminf(fmaxf(low, -65504.f), 65504.f), fminf(fmaxf(high, -65504.f), 65504.f));
}

// The cache of this task's head and session: rows of keys, rows of values.
struct CacheRows {
  char* keys;
  char* values;
};
__device__ __forceinline__ CacheRows cache_rows(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p) {
  uint64_t const session = (uint64_t)w.shared->step.session * kv.units * 4; // units: words of one session, 4 bytes apart
  uint64_t const capacity = w.shared->program.kv_capacity;
  char* keys = (char*)kv.address + session + p.kv_head * capacity * ROW_BYTES;
  return CacheRows{keys, keys + p.kv_heads * capacity * ROW_BYTES};
}

// A tile in registers. Keys: lane / 4 is the key of each half of the tile, lane % 4 the part of a block. Values: 16-byte chunks
// lane, lane + 32, ... of the tile's rows.
struct KeyTile {
  uint4 bits[2][BLOCKS];
};
struct ValueTile {
  uint4 bits[TILE_LOADS];
};

__device__ __forceinline__ bool block_lane() { return threadIdx.x % 4 * 8 < AMK_HEAD_DIM; } // false only where a head is half a block

__device__ __forceinline__ void keys_ask(KeyTile& tile, char const* keys, uint32_t key0, uint32_t count) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    uint32_t const key = key0 + h * 8 + lane / 4;
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      tile.bits[h][b] = make_uint4(0, 0, 0, 0);
      if (key < count && block_lane()) {
        tile.bits[h][b] = load_u32x4(keys + (uint64_t)key * ROW_BYTES + b * 64 + lane % 4 * 16);
      }
    }
  }
}
__device__ __forceinline__ void values_ask(ValueTile& tile, char const* values, uint32_t key0, uint32_t count) {
#pragma unroll
  for (uint32_t i = 0; i < TILE_LOADS; ++i) {
    uint32_t const chunk = threadIdx.x % 32 + i * 32, key = key0 + chunk / ROW_CHUNKS;
    tile.bits[i] = make_uint4(0, 0, 0, 0);
    if (key < count && chunk < TILE_KEYS * ROW_CHUNKS) {
      tile.bits[i] = load_u32x4(values + (uint64_t)key * ROW_BYTES + chunk % ROW_CHUNKS * 16);
    }
  }
}

// Place of a chunk of a row of values in the warp's part of the activation buffer: rotated, so that 8 rows of one chunk lie in
// different banks.
__device__ __forceinline__ char* value_place(Worker const& w, uint32_t row, uint32_t chunk) {
  return w.x + threadIdx.x / 32 * (TILE_KEYS * ROW_BYTES) + row * ROW_BYTES + (chunk ^ (row & (ROW_CHUNKS < 8 ? ROW_CHUNKS - 1 : 7))) * 16;
}
__device__ __forceinline__ void values_stage(Worker const& w, ValueTile const& tile) {
#pragma unroll
  for (uint32_t i = 0; i < TILE_LOADS; ++i) {
    uint32_t const chunk = threadIdx.x % 32 + i * 32;
    if (chunk < TILE_KEYS * ROW_CHUNKS) {
      *(uint4*)value_place(w, chunk / ROW_CHUNKS, chunk % ROW_CHUNKS) = tile.bits[i];
    }
  }
}

// The right operand for two chunks of 8 elements over the tile's 16 keys.
__device__ __forceinline__ void values_pick(Worker const& w, uint32_t chunk, uint32_t (&b)[4]) {
  uint32_t const lane = threadIdx.x % 32, row = lane % 16, c = chunk + lane / 16;
  uint32_t const at = shared_address(value_place(w, row, c < ROW_CHUNKS ? c : 0));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}

// What a lane knows of the queries: rows GROUP_BUF and above are zero.
struct Queries {
  uint4 high[BLOCKS], low[BLOCKS];
};

// This lane's 8 elements of every block of a head: normalised (QK_NORM) and rotated.
__device__ __forceinline__ void shape_head(float (&v)[BLOCKS][8], float const* norm, float eps, float4 const (&rope)[LOW_BLOCKS][4]) {
  uint32_t const lane = threadIdx.x % 32;
#if AMK_QK_NORM
  float square = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS * 8; ++i) {
    square = fmaf(v[i / 8][i % 8], v[i / 8][i % 8], square);
  }
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  float const inverse = rsqrtf(square / (float)AMK_HEAD_DIM + eps);
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS * 2; ++i) {
    float4 const n = block_lane() ? __ldg((float4 const*)(norm + i / 2 * 32 + lane % 4 * 8) + i % 2) : make_float4(0.f, 0.f, 0.f, 0.f);
    float* x = &v[i / 2][i % 2 * 4];
    x[0] *= inverse * n.x, x[1] *= inverse * n.y, x[2] *= inverse * n.z, x[3] *= inverse * n.w;
  }
#endif
#pragma unroll
  for (uint32_t i = 0; i < LOW_BLOCKS * 8; ++i) {
    uint32_t const b = i / 8, e = i % 8;
    float const c = e % 2 == 0 ? rope[b][e / 2].x : rope[b][e / 2].z, s = e % 2 == 0 ? rope[b][e / 2].y : rope[b][e / 2].w;
    if (BLOCKS > 1) { // both of a pair are this lane's
      float const x = v[b][e], y = v[b + BLOCKS / 2][e];
      v[b][e] = x * c - y * s;
      v[b + BLOCKS / 2][e] = y * c + x * s;
    } else {
      constexpr uint32_t STEP = AMK_HEAD_DIM / 16; // lanes to the other half
      float const other = __shfl_xor_sync(~0u, v[b][e], STEP);
      v[b][e] = (lane & STEP) == 0 ? v[b][e] * c - other * s : v[b][e] * c + other * s;
    }
  }
}

// Cosines and sines of this lane's elements: [position][head_dim / 2][2].
__device__ __forceinline__ float4 const* rope_row(float const* table, uint32_t position, uint32_t block) {
  uint32_t const element = (block * 32 + threadIdx.x % 4 * 8) % (AMK_HEAD_DIM / 2);
  return (float4 const*)(table + (size_t)position * AMK_HEAD_DIM + element * 2);
}
__device__ __forceinline__ void rope_load(float const* table, uint32_t position, float4 (&rope)[LOW_BLOCKS][4]) {
#pragma unroll
  for (uint32_t i = 0; i < LOW_BLOCKS * 4; ++i) {
    rope[i / 4][i % 4] = __ldg(rope_row(table, position, i / 4) + i % 4);
  }
}

// The step's new key and value where they are this warp's.
struct Newest {
  uint4 key[BLOCKS]; // in the lanes of row GROUP_BUF
  uint4 value;       // this lane's chunk of a row
};

// One warp: waits for the queries, and for the new key and value if `newest`, and brings them into shape.
__device__ __forceinline__ void heads_wait(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, bool newest,
                                           Queries& q, Newest& fresh) {
  constexpr uint32_t N = BLOCKS * 2 + 2;
  uint32_t const lane = threadIdx.x % 32, row = lane / 4, heads = p.kv_heads * p.group;
  Words const in = slot_words(w, st.slot[0], st.task.read_generation[0]);
  bool const query = row < GROUP_BUF && g0 + row < AMK_GROUP, key = row == GROUP_BUF && newest;
  uint32_t const first = (query ? p.kv_head * p.group + g0 + row : heads + p.kv_head) * AMK_HEAD_DIM + lane % 4 * 8;
  uint32_t at[N];
  bool wanted[N];
  uint4 v[N];
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS * 2; ++i) {
    at[i] = first + i / 2 * 32 + i % 2 * 4;
    wanted[i] = (query || key) && block_lane();
  }
  at[N - 2] = (heads + p.kv_heads + p.kv_head) * AMK_HEAD_DIM + lane % ROW_CHUNKS * 8;
  at[N - 1] = at[N - 2] + 4;
  wanted[N - 2] = wanted[N - 1] = newest;
  quads_wait(w, in, at, wanted, v);
  __syncwarp();
  float x[BLOCKS][8];
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS * 2; ++i) {
    float4 const f = quad_value(in, v[i]);
    float* to = &x[i / 2][i % 2 * 4];
    to[0] = f.x, to[1] = f.y, to[2] = f.z, to[3] = f.w;
  }
  float4 rope[LOW_BLOCKS][4];
  rope_load((float const*)st.slot[3].address, w.shared->step.position, rope);
  shape_head(x, (float const*)st.slot[query ? 1 : 2].address, p.eps, rope);
  float4 const a = quad_value(in, v[N - 2]), b = quad_value(in, v[N - 1]);
  fresh.value = make_uint4(cache_pair(a.x, a.y), cache_pair(a.z, a.w), cache_pair(b.x, b.y), cache_pair(b.z, b.w));
  float const scale = query ? p.scale : 0.f;
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS; ++i) {
    fresh.key[i] = make_uint4(cache_pair(x[i][0], x[i][1]), cache_pair(x[i][2], x[i][3]), cache_pair(x[i][4], x[i][5]), cache_pair(x[i][6], x[i][7]));
    uint32_t high[4], low[4];
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      float const s = x[i][2 * j] * scale, t = x[i][2 * j + 1] * scale;
      high[j] = half_pair(s, t);
      float2 const back = half_values(high[j]);
      low[j] = half_pair(s - back.x, t - back.y);
    }
    q.high[i] = make_uint4(high[0], high[1], high[2], high[3]);
    q.low[i] = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// The new key and value into the cache, and into the tile that they belong to.
__device__ __forceinline__ void append(CacheRows const& cache, uint32_t newest, uint32_t key0, bool store, Newest const& fresh, KeyTile& keys, ValueTile& values) {
  uint32_t const lane = threadIdx.x % 32, row = newest - key0;
#pragma unroll
  for (uint32_t b = 0; b < BLOCKS; ++b) {
    if (store && lane / 4 == GROUP_BUF && block_lane()) {
      *(uint4*)(cache.keys + (uint64_t)newest * ROW_BYTES + b * 64 + lane % 4 * 16) = fresh.key[b];
    }
    uint32_t const from = GROUP_BUF * 4 + lane % 4;
    uint4 const k = make_uint4(__shfl_sync(~0u, fresh.key[b].x, from), __shfl_sync(~0u, fresh.key[b].y, from), __shfl_sync(~0u, fresh.key[b].z, from),
                               __shfl_sync(~0u, fresh.key[b].w, from));
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      if (h * 8 + lane / 4 == row && block_lane()) {
        keys.bits[h][b] = k;
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < TILE_LOADS; ++i) {
    if ((lane + i * 32) / ROW_CHUNKS == row) {
      values.bits[i] = fresh.value;
      if (store) {
        *(uint4*)(cache.values + (uint64_t)newest * ROW_BYTES + lane % ROW_CHUNKS * 16) = fresh.value;
      }
    }
  }
}

// A row's softmax over the keys that this lane has seen (the sum), that the warp has seen (the rest).
struct Running {
  float m, l;
  float out[ROW_CHUNKS][2];
};

// Scores of the tile: of this lane's row, keys lane % 4 * 2 and the one behind it, of each half.
__device__ __forceinline__ void tile_scores(Queries const& q, KeyTile const& keys, float (&s)[2][2]) {
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    s[h][0] = s[h][1] = 0.f;
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      uint4 const k = keys.bits[h][b];
      mma_f16(s[h], q.high[b].x, q.high[b].y, k.x, k.y);
      mma_f16(s[h], q.high[b].z, q.high[b].w, k.z, k.w);
      mma_f16(s[h], q.low[b].x, q.low[b].y, k.x, k.y);
      mma_f16(s[h], q.low[b].z, q.low[b].w, k.z, k.w);
    }
  }
}

// Adds a tile of `count` keys whose values are staged.
__device__ __forceinline__ void tile_add(Worker const& w, Running& r, float (&s)[2][2], uint32_t count) {
  uint32_t const column = threadIdx.x % 4 * 2;
  float top = r.m;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    float& x = s[i / 2][i % 2];
    x = i / 2 * 8 + column + i % 2 < count ? x : LOWEST;
    top = fmaxf(top, x);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  float const old = __expf(r.m - top);
  r.m = top;
  r.l *= old;
  uint32_t high[2], low[2];
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    float const a = s[h][0] > LOWEST ? __expf(s[h][0] - top) : 0.f, b = s[h][1] > LOWEST ? __expf(s[h][1] - top) : 0.f;
    r.l += a + b;
    high[h] = half_pair(a, b);
    float2 const back = half_values(high[h]);
    low[h] = half_pair(a - back.x, b - back.y);
  }
#pragma unroll
  for (uint32_t c = 0; c < ROW_CHUNKS; c += 2) {
    uint32_t v[4];
    values_pick(w, c, v);
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      float(&out)[2] = r.out[c + j];
      out[0] *= old, out[1] *= old;
      mma_f16(out, high[0], high[1], v[2 * j], v[2 * j + 1]);
      mma_f16(out, low[0], low[1], v[2 * j], v[2 * j + 1]);
    }
  }
}

// A head's place in the scratch of the warps, behind their values: maximum, sum, padding, then its sums.
constexpr uint32_t SCRATCH_HEAD = AMK_HEAD_DIM + 4;
__device__ __forceinline__ float* scratch_head(Worker const& w, uint32_t warp, uint32_t g) {
  return (float*)(w.x + AMK_WARPS * TILE_KEYS * ROW_BYTES) + (warp * GROUP_BUF + g) * SCRATCH_HEAD;
}
__device__ __forceinline__ void warp_finish(Worker const& w, Running& r) {
  uint32_t const lane = threadIdx.x % 32, g = lane / 4;
  r.l += __shfl_xor_sync(~0u, r.l, 1);
  r.l += __shfl_xor_sync(~0u, r.l, 2);
  if (g < GROUP_BUF) {
    float* to = scratch_head(w, threadIdx.x / 32, g);
    if (lane % 4 == 0) {
      *(float2*)to = make_float2(r.m, r.l);
    }
#pragma unroll
    for (uint32_t c = 0; c < ROW_CHUNKS; ++c) {
      *(float2*)(to + 4 + c * 8 + lane % 4 * 2) = make_float2(r.out[c][0], r.out[c][1]);
    }
  }
}

// After the barrier: the partial result of `group` heads from the warps' scratch.
__device__ __forceinline__ void write_partials(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, uint32_t group) {
  Words const out = slot_words(w, st.slot[AMK_READS_MAX], st.task.write_generation[0]);
  uint32_t const first = partial_word(p.split, p.kv_heads * p.group, p.kv_head * p.group + g0);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < group * AMK_HEAD_DIM; i += CONSUMERS) {
    uint32_t const g = i / AMK_HEAD_DIM, d = i % AMK_HEAD_DIM;
    float2 stats[AMK_WARPS];
    float top = LOWEST;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      stats[j] = *(float2 const*)scratch_head(w, j, g);
      top = fmaxf(top, stats[j].x);
    }
    float sum = 0.f, v = 0.f;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      float const factor = __expf(stats[j].x - top);
      sum = fmaf(factor, stats[j].y, sum);
      v = fmaf(factor, scratch_head(w, j, g)[4 + d], v);
    }
    uint32_t const word = first + g * PARTIAL_WORDS;
    word_write(out, word + PARTIAL_HEAD + d, __fdividef(v, sum));
    if (d < PARTIAL_HEAD) {
      word_write(out, word + d, d == 0 ? top : d == 1 ? sum : 0.f);
    }
  }
}

// A split without keys: words of this step all the same, so that no stale one can be mistaken for a later step's.
__device__ __forceinline__ void write_nothing(Worker const& w, StagedTask const& st, amk_attention_params const& p) {
  Words const out = slot_words(w, st.slot[AMK_READS_MAX], st.task.write_generation[0]);
  uint32_t const first = partial_word(p.split, p.kv_heads * p.group, p.kv_head * p.group);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < p.group * PARTIAL_WORDS; i += CONSUMERS) {
    word_write(out, first + i, 0.f);
  }
}

// One warp: queries g0.. of the group over its tiles of the keys start..start + count, the last of which is the step's if `owns`.
__device__ __forceinline__ void attend(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, uint32_t start, uint32_t count, bool owns) {
  uint32_t const warp = threadIdx.x / 32, position = w.shared->step.position;
  CacheRows cache = cache_rows(w, st.slot[AMK_READS_MAX + 1], p);
  cache.keys += (uint64_t)start * ROW_BYTES;
  cache.values += (uint64_t)start * ROW_BYTES;
  uint32_t const cached = owns ? count - 1 : count; // the newest is not in the cache yet
  uint32_t key0 = warp * TILE_KEYS;
  KeyTile keys;
  ValueTile values;
  keys_ask(keys, cache.keys, key0, cached);
  if (EARLY_VALUES) {
    values_ask(values, cache.values, key0, cached);
  }
#pragma unroll
  for (uint32_t b = 0; b < LOW_BLOCKS; ++b) { // not into registers: they are short until the queries are in shape
    prefetch_l1(rope_row((float const*)st.slot[3].address, position, b));
  }
  uint32_t const newest_tile = (count - 1) / TILE_KEYS;
  bool const newest = owns && newest_tile % AMK_WARPS == warp;
  Queries q;
  Newest fresh;
  heads_wait(w, st, p, g0, newest, q, fresh);
  if (!EARLY_VALUES) {
    values_ask(values, cache.values, key0, cached);
  }
  tape_staged(w);
  Running r;
  r.m = LOWEST;
  r.l = 0.f;
#pragma unroll
  for (uint32_t c = 0; c < ROW_CHUNKS; ++c) {
    r.out[c][0] = r.out[c][1] = 0.f;
  }
#pragma unroll 1
  for (; key0 < count; key0 += STEP_KEYS) {
    if (newest && key0 / TILE_KEYS == newest_tile) {
      append(cache, count - 1, key0, g0 == 0, fresh, keys, values);
    }
    float s[2][2];
    tile_scores(q, keys, s);
    __syncwarp(); // the values before these have been read
    values_stage(w, values);
    keys_ask(keys, cache.keys, key0 + STEP_KEYS, cached);
    values_ask(values, cache.values, key0 + STEP_KEYS, cached);
    __syncwarp();
    tile_add(w, r, s, count - key0);
  }
  warp_finish(w, r);
}

__device__ __forceinline__ void op_attention(Worker& w, StagedTask const& st) {
  amk_attention_params const p = *(amk_attention_params const*)st.task.params;
  uint32_t const position = w.shared->step.position;
  uint32_t const keys = attended(position, p.window), active = active_splits(keys, p.kv_block, p.splits);
  if (p.split >= active) {
    write_nothing(w, st, p);
    task_barrier(w);
    return;
  }
  uint32_t const first = position + 1 - keys;
  uint32_t const start = split_start(keys, p.kv_block, active, p.split), end = split_start(keys, p.kv_block, active, p.split + 1);
#pragma unroll 1
  for (uint32_t g0 = 0; g0 < AMK_GROUP; g0 += GROUP_BUF) {
    attend(w, st, p, g0, first + start, end - start, p.split + 1 == active);
    tape_multiplied(w);
    consumers_sync();
    write_partials(w, st, p, g0, AMK_GROUP - g0 < GROUP_BUF ? AMK_GROUP - g0 : GROUP_BUF);
    if (g0 + GROUP_BUF < AMK_GROUP) {
      consumers_sync(); // the scratch is about to be overwritten
    }
  }
  task_barrier(w);
}
