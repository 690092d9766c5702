// attention: one key/value head's query group over one split of the keys. Same stages as reference-vm/src/ops/attention.rs.
//
// Keys and values come through the ring, in blocks (keys.cuh), asked for long before the queries are there. Each warp works alone on its
// tiles of 32 keys, with the tensor cores: scores are queries times keys, the heads of the group being rows of the left
// operand; the weights of the keys become the left operand of the product with the values. Queries and weights are split into a high
// and a low half (22 bits), keys and values are f16 as in the cache. The warps meet once, to add up.
#pragma once

constexpr uint32_t BLOCKS = (AMK_HEAD_DIM + 31) / 32;          // of 32 elements of a head, 8 for each of 4 lanes
constexpr uint32_t HALVES = TILE_KEYS / 16;                    // of a tile: keys of one product with the values
constexpr float LOWEST = -1e30f;                               // below every score, and finite, so that differences are numbers
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// 2 to the x. Scores are kept in units in which this is the softmax's exponential.
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// c += a . b for a 16x16 a and a 16x8 b. Rows 0..8 of a are the high halves of some rows and rows 8..16 their low halves, so one product
// does for both, and their sum is c[0] + c[2] and c[1] + c[3]. A lane's words of a: high and low of one pair, high and low of another.
__device__ __forceinline__ void mma_f16(float (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
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
  uint64_t const session = (uint64_t)w.shared->step.session * kv.units * 2; // units: elements of one session
  uint64_t const capacity = w.shared->program.kv_capacity;
  char* keys = (char*)kv.address + session + p.kv_head * capacity * ROW_BYTES;
  return CacheRows{keys, keys + p.kv_heads * capacity * ROW_BYTES};
}

// 16 keys in registers: lane / 4 is the key of each 8 of them, lane % 4 the part of a block.
struct KeyTile {
  uint4 bits[2][BLOCKS];
};

__device__ __forceinline__ bool block_lane() { return threadIdx.x % 4 * 8 < AMK_HEAD_DIM; } // false only where a head is half a block

// Out of the ring; `key0` is the number of the first key.
__device__ __forceinline__ void keys_take(KeyTile& tile, char const* rows, uint32_t key0) {
  uint32_t const lane = threadIdx.x % 32, swizzle = row_swizzle(key0 + lane / 4); // of both halves
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      char const* at = rows + (h * 8 + lane / 4) * ROW_BYTES + ((b * 4 + lane % 4) ^ swizzle) * 16;
      tile.bits[h][b] = block_lane() ? stage_load(at) : make_uint4(0, 0, 0, 0);
    }
  }
}

// The right operand for two chunks of 8 elements over 16 keys.
__device__ __forceinline__ void values_pick(char const* rows, uint32_t swizzle, uint32_t chunk, uint32_t (&b)[4]) {
  uint32_t const lane = threadIdx.x % 32;
  uint32_t const at = shared_address(rows + lane % 16 * ROW_BYTES + ((chunk + lane / 16) ^ swizzle) * 16);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}

// What a lane knows of the queries: a part of the row of lane / 4. Rows GROUP_BUF and above are of no query, and nobody reads their results.
struct Queries {
  uint4 quads[BLOCKS][2]; // left operands as they are: of 4 elements each
};

// A head's place in the scratch of the warps: maximum, sum, padding, then its sums.
constexpr uint32_t SCRATCH_HEAD = AMK_HEAD_DIM + 4;
__device__ __forceinline__ float* scratch_head(Worker const& w, uint32_t warp, uint32_t g) { return (float*)w.x + (warp * GROUP_BUF + g) * SCRATCH_HEAD; }
// Behind it the step's new key and value as they go into the cache, where they are this worker's.
__device__ __forceinline__ uint4* fresh_key(Worker const& w) { return (uint4*)scratch_head(w, AMK_WARPS, 0); }
__device__ __forceinline__ uint4* fresh_value(Worker const& w) { return fresh_key(w) + ROW_CHUNKS; }

// How a warp brings heads into shape: so many lanes share a head, each with 4 elements of its first half and the 4 that they are rotated with.
constexpr uint32_t HEAD_LANES = AMK_HEAD_DIM / 8;
constexpr uint32_t HEADS_ONCE = 32 / HEAD_LANES;
constexpr uint32_t TURNS = (GROUP_BUF + HEADS_ONCE) / HEADS_ONCE; // for the queries and the new key

// What the elements are shaped with, in registers before they are there: two cosines and sines each, and norms.
struct Shapes {
  float4 angles[2];
#if AMK_QK_NORM
  float4 norm[2 * TURNS];
#endif
};

// Four elements of a head and the four half a head further on: normalised (QK_NORM) and rotated. All lanes.
__device__ __forceinline__ void shape_head(float (&x)[4], float (&y)[4], Shapes const& s, uint32_t turn, float eps) {
#if AMK_QK_NORM
  float square = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    square = fmaf(x[i], x[i], fmaf(y[i], y[i], square));
  }
#pragma unroll
  for (uint32_t o = 1; o < HEAD_LANES; o *= 2) {
    square += __shfl_xor_sync(~0u, square, o);
  }
  float const inverse = rsqrtf(fmaf(square, 1.f / (float)AMK_HEAD_DIM, eps));
  float4 const n = s.norm[2 * turn], m = s.norm[2 * turn + 1];
  x[0] *= inverse * n.x, x[1] *= inverse * n.y, x[2] *= inverse * n.z, x[3] *= inverse * n.w;
  y[0] *= inverse * m.x, y[1] *= inverse * m.y, y[2] *= inverse * m.z, y[3] *= inverse * m.w;
#endif
  float const c[4] = {s.angles[0].x, s.angles[0].z, s.angles[1].x, s.angles[1].z}, d[4] = {s.angles[0].y, s.angles[0].w, s.angles[1].y, s.angles[1].w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    float const a = x[i], b = y[i];
    x[i] = a * c[i] - b * d[i];
    y[i] = b * c[i] + a * d[i];
  }
}

// Two numbers as f16, and what rounding left of them.
__device__ __forceinline__ uint2 halves(float a, float b) {
  uint32_t const high = half_pair(a, b);
  float2 const back = half_values(high);
  return make_uint2(high, half_pair(a - back.x, b - back.y));
}
__device__ __forceinline__ uint4 quad_halves(float (&x)[4], float scale) {
  uint2 const a = halves(x[0] * scale, x[1] * scale), b = halves(x[2] * scale, x[3] * scale);
  return make_uint4(a.x, a.y, b.x, b.y);
}

// One warp: waits for the queries, and for the new key and value if `newest`, and brings them into shape. They change lanes by way of the
// warp's scratch, 16 bytes for 4 elements.
__device__ __forceinline__ void heads_wait(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, bool newest, Queries& q) {
  constexpr uint32_t N = 2 * TURNS + 1;
  uint32_t const lane = w.thread % 32, part = lane % HEAD_LANES, heads = p.kv_heads * p.group, position = w.shared->step.position;
  Words const in = slot_words(w, st.slot[0], st.task.read_generation[0]);
  uint32_t at[N];
  bool wanted[N];
  uint4 v[N];
  Shapes shapes;
  float4 const* angles = (float4 const*)((float const*)st.slot[3].address + (size_t)position * AMK_HEAD_DIM + part * 8);
  shapes.angles[0] = __ldg(angles), shapes.angles[1] = __ldg(angles + 1);
#pragma unroll
  for (uint32_t i = 0; i < TURNS; ++i) {
    uint32_t const row = i * HEADS_ONCE + lane / HEAD_LANES;
    bool const query = row < GROUP_BUF && g0 + row < AMK_GROUP;
    at[2 * i] = (query ? p.kv_head * p.group + g0 + row : heads + p.kv_head) * AMK_HEAD_DIM + part * 4;
    at[2 * i + 1] = at[2 * i] + AMK_HEAD_DIM / 2;
    wanted[2 * i] = wanted[2 * i + 1] = query || (row == GROUP_BUF && newest);
#if AMK_QK_NORM
    float4 const* norm = (float4 const*)st.slot[query ? 1 : 2].address + part;
    shapes.norm[2 * i] = __ldg(norm), shapes.norm[2 * i + 1] = __ldg(norm + AMK_HEAD_DIM / 8);
#endif
  }
  at[N - 1] = (heads + p.kv_heads + p.kv_head) * AMK_HEAD_DIM + lane * 4;
  wanted[N - 1] = newest && lane < AMK_HEAD_DIM / 4;
  quads_wait(w, in, at, wanted, v);
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < TURNS; ++i) {
    uint32_t const row = i * HEADS_ONCE + lane / HEAD_LANES;
    float4 const a = quad_value(in, v[2 * i]), b = quad_value(in, v[2 * i + 1]);
    float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    shape_head(x, y, shapes, i, p.eps);
    if (row < GROUP_BUF) {
      uint4* to = (uint4*)scratch_head(w, w.thread / 32, row) + part;
      to[0] = quad_halves(x, p.scale * LOG2_E);
      to[HEAD_LANES] = quad_halves(y, p.scale * LOG2_E);
    } else if (row == GROUP_BUF && newest) {
      uint2* key = (uint2*)fresh_key(w) + part;
      key[0] = make_uint2(cache_pair(x[0], x[1]), cache_pair(x[2], x[3]));
      key[HEAD_LANES] = make_uint2(cache_pair(y[0], y[1]), cache_pair(y[2], y[3]));
    }
  }
  if (wanted[N - 1]) {
    float4 const f = quad_value(in, v[N - 1]);
    ((uint2*)fresh_value(w))[lane] = make_uint2(cache_pair(f.x, f.y), cache_pair(f.z, f.w));
  }
  __syncwarp();
  uint32_t const row = lane / 4 < GROUP_BUF ? lane / 4 : GROUP_BUF - 1;
  uint4 const* mine = (uint4 const*)scratch_head(w, w.thread / 32, row) + lane % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < 2 * BLOCKS; ++i) {
    q.quads[i / 2][i % 2] = block_lane() ? stage_load(mine + i / 2 * 8 + i % 2) : make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

// The new key into the cache, and into the 16 keys that it belongs to, if `row` is one of them.
__device__ __forceinline__ void key_append(Worker const& w, CacheRows const& cache, uint32_t position, uint32_t row, bool store, KeyTile& keys) {
  uint32_t const lane = threadIdx.x % 32;
  if (store && lane < ROW_CHUNKS) {
    *(uint4*)(cache.keys + (uint64_t)position * ROW_BYTES + (lane ^ row_swizzle(position)) * 16) = fresh_key(w)[lane];
  }
#pragma unroll
  for (uint32_t i = 0; i < 2 * BLOCKS; ++i) {
    if (i / BLOCKS * 8 + lane / 4 == row && block_lane()) {
      keys.bits[i / BLOCKS][i % BLOCKS] = fresh_key(w)[i % BLOCKS * 4 + lane % 4];
    }
  }
}

// The new value into the cache, and into the tile that it belongs to.
__device__ __forceinline__ void value_append(Worker const& w, CacheRows const& cache, uint32_t position, char* row, bool store) {
  uint32_t const lane = threadIdx.x % 32;
  if (lane < ROW_CHUNKS) {
    uint32_t const place = (lane ^ row_swizzle(position)) * 16;
    uint4 const v = fresh_value(w)[lane];
    stage_store(row + place, v);
    if (store) {
      *(uint4*)(cache.values + (uint64_t)position * ROW_BYTES + place) = v;
    }
  }
  __syncwarp();
}

// A row's softmax over the keys that this lane has seen (the sum), that the warp has seen (the rest).
struct Running {
  float m, l;
  float out[ROW_CHUNKS][4];
};

// Scores of 16 keys: of this lane's row, keys lane % 4 * 2 and the one behind it, of each half.
// In four chains of products that do not wait for each other.
__device__ __forceinline__ void tile_scores(Queries const& q, KeyTile const& keys, float (*s)[2]) {
  float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
  for (uint32_t b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      mma_f16(even[h], q.quads[b][0], keys.bits[h][b].x, keys.bits[h][b].y);
      mma_f16(odd[h], q.quads[b][1], keys.bits[h][b].z, keys.bits[h][b].w);
    }
  }
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      s[h][j] = (even[h][j] + odd[h][j]) + (even[h][j + 2] + odd[h][j + 2]);
    }
  }
}

// Adds a tile of `count` keys with its values.
__device__ __forceinline__ void tile_add(Running& r, float (&s)[2 * HALVES][2], uint32_t count, char const* values, uint32_t swizzle, bool first) {
  uint32_t const column = threadIdx.x % 4 * 2;
  float top = r.m;
#pragma unroll
  for (uint32_t i = 0; i < 4 * HALVES; ++i) {
    float& x = s[i / 2][i % 2];
    x = i / 2 * 8 + column + i % 2 < count ? x : LOWEST;
    top = fmaxf(top, x);
  }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  float const old = exp2_fast(r.m - top);
  r.m = top;
  r.l *= old;
  uint2 weights[2 * HALVES];
#pragma unroll
  for (uint32_t h = 0; h < 2 * HALVES; ++h) {
    float const a = exp2_fast(s[h][0] - top), b = exp2_fast(s[h][1] - top);
    r.l += a + b;
    weights[h] = halves(a, b);
  }
  if (!first) { // else they are zero
#pragma unroll
    for (uint32_t c = 0; c < ROW_CHUNKS; ++c) {
      r.out[c][0] *= old, r.out[c][1] *= old, r.out[c][2] *= old, r.out[c][3] *= old;
    }
  }
#pragma unroll
  for (uint32_t half = 0; half < HALVES; ++half) {
    uint2 const even = weights[2 * half], odd = weights[2 * half + 1];
    uint4 const a = make_uint4(even.x, even.y, odd.x, odd.y);
#pragma unroll
    for (uint32_t c = 0; c < ROW_CHUNKS; c += 2) {
      uint32_t v[4];
      values_pick(values + half * 16 * ROW_BYTES, swizzle, c, v);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        mma_f16(r.out[c + j], a, v[2 * j], v[2 * j + 1]);
      }
    }
  }
}

// Leaves what the warp has summed in the scratch.
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
      *(float2*)(to + 4 + c * 8 + lane % 4 * 2) = make_float2(r.out[c][0] + r.out[c][2], r.out[c][1] + r.out[c][3]);
    }
  }
}

// After the barrier: the partial result of `group` heads from the warps' scratch.
__device__ __forceinline__ void write_partials(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, uint32_t group) {
  Words const out = slot_words(w, st.slot[AMK_READS_MAX], st.task.write_generation[0]);
  uint32_t const first = partial_word(p.split, p.kv_heads * p.group, p.kv_head * p.group + g0);
#pragma unroll 1
  for (uint32_t i = threadIdx.x * 2; i < group * AMK_HEAD_DIM; i += CONSUMERS * 2) {
    uint32_t const g = i / AMK_HEAD_DIM, d = i % AMK_HEAD_DIM;
    float2 stats[AMK_WARPS], values[AMK_WARPS];
    float top = LOWEST;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      stats[j] = *(float2 const*)scratch_head(w, j, g);
      values[j] = *(float2 const*)(scratch_head(w, j, g) + 4 + d);
      top = fmaxf(top, stats[j].x);
    }
    float sum = 0.f, v0 = 0.f, v1 = 0.f;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      float const factor = exp2_fast(stats[j].x - top);
      sum = fmaf(factor, stats[j].y, sum);
      v0 = fmaf(factor, values[j].x, v0);
      v1 = fmaf(factor, values[j].y, v1);
    }
    uint32_t const word = first + g * PARTIAL_WORDS;
    word_write(out, word + PARTIAL_HEAD + d, __fdividef(v0, sum));
    word_write(out, word + PARTIAL_HEAD + d + 1, __fdividef(v1, sum));
    if (d < PARTIAL_HEAD) {
      word_write(out, word + d, d == 0 ? top * LN_2 : 0.f);
      word_write(out, word + d + 1, d == 0 ? sum : 0.f);
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
__device__ __forceinline__ void attend(Worker const& w, StagedTask const& st, amk_attention_params const& p, Cursor& c, uint32_t g0, uint32_t start, uint32_t count, bool owns) {
  uint32_t const position = w.shared->step.position, newest_tile = (count - 1) / TILE_KEYS * TILE_KEYS;
  uint32_t const mine = threadIdx.x / 32 * TILE_KEYS; // this warp's tiles begin here in every two blocks
  bool const newest = owns && newest_tile % (2 * BLOCK_KEYS) == mine;
  // Before the wait, so that it is not behind it.
  Running r;
  r.m = LOWEST;
  r.l = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < ROW_CHUNKS; ++i) {
    r.out[i][0] = r.out[i][1] = r.out[i][2] = r.out[i][3] = 0.f;
  }
  Queries q;
  heads_wait(w, st, p, g0, newest, q);
  tape_staged(w);
  CacheRows const cache = cache_rows(w, st.slot[AMK_READS_MAX + 1], p);
  uint32_t const swizzle = row_swizzle(start + threadIdx.x % 16); // of the row of values that this lane picks from, in every tile
#pragma unroll 1
  for (uint32_t block = 0; block < count; block += BLOCK_KEYS) {
    uint32_t const keys = count - block < BLOCK_KEYS ? count - block : BLOCK_KEYS;
    uint32_t const tile = block / (2 * BLOCK_KEYS) * (2 * BLOCK_KEYS) + mine, first = tile - block; // in this block, if less than `keys`
    BlockStages const in = block_stages(keys, w.stage_bytes);
    bool const here = first < keys, fresh_here = newest && tile == newest_tile;
    float s[2 * HALVES][2];
#pragma unroll 1
    for (uint32_t at = 0; at < in.copied; at += in.rows) {
      char const* stage = cursor_land(w, c);
      if (here && first - at < in.rows) {
#pragma unroll
        for (uint32_t half = 0; half < HALVES; ++half) {
          KeyTile k;
          keys_take(k, stage + (first - at + half * 16) * ROW_BYTES, start + tile + half * 16);
          if (fresh_here) {
            key_append(w, cache, position, count - 1 - tile - half * 16, g0 == 0 && half == 0, k);
          }
          tile_scores(q, k, s + 2 * half);
        }
      }
      if (in.values == 0) {
        cursor_next(w, c);
      }
    }
#pragma unroll 1
    for (uint32_t at = 0; at < in.copied; at += in.rows) {
      char* stage = w.ring + (cursor_land(w, c) - w.ring) + in.values;
      if (here && first - at < in.rows) {
        char* rows = stage + (first - at) * ROW_BYTES;
        if (fresh_here) {
          value_append(w, cache, position, rows + (count - 1 - tile) * ROW_BYTES, g0 == 0);
        }
        tile_add(r, s, count - tile, rows, swizzle, tile == mine);
        if (fresh_here) {
          stage_given_back(); // to the copies
        }
      }
      cursor_next(w, c);
    }
  }
  warp_finish(w, r);
}

__device__ __forceinline__ void op_attention(Worker& w, StagedTask const& st, Cursor& c) {
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
    attend(w, st, p, c, g0, first + start, end - start, p.split + 1 == active);
    tape_multiplied(w);
    consumers_sync();
    write_partials(w, st, p, g0, AMK_GROUP - g0 < GROUP_BUF ? AMK_GROUP - g0 : GROUP_BUF);
    if (g0 + GROUP_BUF < AMK_GROUP) {
      consumers_sync(); // the scratch is about to be overwritten
    }
  }
  task_barrier(w);
}
