// attention: a part of one key/value head's query group, at most four heads, over one split of the keys. Same stages as reference-vm/src/ops/attention.rs.
//
// Keys and values come through the ring, in blocks (keys.cuh), requested long before the queries arrive. Each warp works alone on its
// tiles of 32 keys, with the tensor cores: scores are keys times queries, the columns of the B operand being the high halves of the
// heads and then their low halves (22 bits together); the softmax weights become the B operand of the product
// with the values, in the same columns. Keys and values are f16, as in the cache or from its codes (cache_rows.cuh). The warps meet once, to add up.
#pragma once

constexpr uint32_t BLOCKS = (AMK_HEAD_DIM + 31) / 32;          // of 32 elements of a head, 8 for each of 4 lanes; the last may be half
constexpr uint32_t HALVES = TILE_KEYS / 16;                    // of a tile: 16 keys per product with the values
constexpr float LOWEST = -1e30f;                               // below every score, and finite, so that differences are numbers
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// The split of a head that a task works on, for this sequence.
__device__ __forceinline__ uint32_t task_split(Worker const& w, amk_attention_params const& p) { return seq_split(p.split, p.splits, seq_of(w)); }

// The task's first query head, counted within the group, and how many it has. Same as ir::program::part_heads.
__device__ __forceinline__ uint32_t first_head(amk_attention_params const& p) { return AMK_GROUP <= GROUP_BUF ? 0 : p.part * GROUP_BUF; }
__device__ __forceinline__ uint32_t heads_of(amk_attention_params const& p) {
  return AMK_GROUP % GROUP_BUF == 0 || AMK_GROUP - first_head(p) >= GROUP_BUF ? GROUP_BUF : AMK_GROUP % GROUP_BUF;
}

// The index of the step's own key among all sessions' (paged_key).
__device__ __forceinline__ uint32_t fresh_paged(Worker const& w) { return paged_key(seq_session(w), w.shared->launch->page_stride, seq_position(w)); }
__device__ __forceinline__ uint32_t fresh_page(Worker const& w) { return page_ask(w.shared->launch->pages, fresh_paged(w)); }
// Byte distance from the row of the step's key, in the cache of this task's head, to the row of its value. One of several devices has only
// its own heads there.
__device__ __forceinline__ uint32_t fresh_values(Worker const& w, amk_attention_params const& p) {
  return AMK_DEVICES > 1 ? w.shared->program.kv_values : p.kv_heads * PAGE_KEYS * ROW_BYTES;
}
__device__ __forceinline__ char* fresh_row(Worker const& w, ResolvedBuffer const& kv, amk_attention_params const& p, uint32_t page) {
  return (char*)kv.address + paged_row(page, fresh_values(w, p), seq_position(w)) + p.kv_head * (PAGE_KEYS * ROW_BYTES);
}

// 16 keys in registers: lane / 4 is the key within each 8 of them, lane % 4 the part of a block.
struct KeyTile {
  uint4 bits[2][BLOCKS];
};

// Whether a lane has elements of a block: false only in half a block.
__device__ __forceinline__ bool block_lane(uint32_t block) { return AMK_HEAD_DIM % 32 == 0 || block * 32 + threadIdx.x % 4 * 8 < AMK_HEAD_DIM; }

// Loads 16 keys from the ring; `key0` is the number of the first key.
__device__ __forceinline__ void keys_take(KeyTile& tile, char const* rows, uint32_t key0) {
  uint32_t const lane = threadIdx.x % 32, swizzle = row_swizzle(key0 + lane / 4); // of both halves
#pragma unroll
  for (uint32_t h = 0; h < 2; ++h) {
    uint32_t const row = h * 8 + lane / 4, scale = KV_CODES ? row_scale(rows + row * ROW_BYTES) : 0;
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      tile.bits[h][b] = block_lane(b) ? row_take(rows, row, b * 4 + lane % 4, swizzle, scale) : make_uint4(0, 0, 0, 0);
    }
  }
}

// A lane's part of the queries: 8 elements of each block of its column, which is lane / 4.
struct Queries {
  uint4 bits[BLOCKS];
};
constexpr uint32_t COLUMN_HEADS = 4; // columns from here on are low halves

// Words per head in the scratch of the warps: maximum, sum, padding, then its sums.
constexpr uint32_t SCRATCH_HEAD = AMK_HEAD_DIM + 4;
__device__ __forceinline__ float* scratch_head(Worker const& w, uint32_t warp, uint32_t g) { return (float*)w.x + (warp * GROUP_BUF + g) * SCRATCH_HEAD; }
#if AMK_SEQS > 1
// The new key and value of each sequence as they go into the cache, if this worker needs them. Between matvecs, the sums of products are not needed.
static_assert(sizeof(Shared::part) >= AMK_FRESH_BYTES, "room for new keys and values");
__device__ __forceinline__ uint4* fresh_key_of(Worker const& w, uint32_t seq) { return (uint4*)&w.shared->part + seq % FRESH_ROWS * (2 * HEAD_CHUNKS); }
__device__ __forceinline__ uint4* fresh_key(Worker const& w) { return fresh_key_of(w, w.seq); }
#else
// After the warps' scratch: the step's new key and value as they go into the cache, if they are this worker's.
__device__ __forceinline__ uint4* fresh_key(Worker const& w) { return (uint4*)scratch_head(w, AMK_WARPS, 0); }
#endif
__device__ __forceinline__ uint4* fresh_value(Worker const& w) { return fresh_key(w) + HEAD_CHUNKS; }
// Elements 8 * chunk and on of one of them; and elements 2 * pair and the next.
__device__ __forceinline__ uint4 fresh_take(uint4 const* row, uint32_t chunk) {
  if constexpr (KV_CODES) {
    return row_take((char const*)row, 0, chunk, 0, row_scale((char const*)row));
  } else {
    return row[chunk];
  }
}
__device__ __forceinline__ float2 fresh_pair(uint4 const* row, uint32_t pair) {
  if constexpr (KV_CODES) {
    return half_values(halves_times(e4m3_halves(stage_load2((char const*)row + pair * 2)).x, row_scale((char const*)row)));
  } else {
    return half_values(((uint32_t const*)row)[pair]);
  }
}

// Lanes that normalise and rotate a head together, each with 4 elements of its first half and the 4 that they are rotated with.
// Their number is a power of two: lanes beyond the head have zeros.
constexpr uint32_t HEAD_PARTS = AMK_HEAD_DIM / 8, HEAD_LANES = power_up(HEAD_PARTS);
constexpr uint32_t HEADS_ONCE = 32 / HEAD_LANES;
constexpr uint32_t TURNS = (GROUP_BUF + HEADS_ONCE) / HEADS_ONCE; // for the queries and the new key
constexpr uint32_t VALUE_TURNS = (AMK_HEAD_DIM + 127) / 128;       // for the new value, 4 elements per lane

// Operands of the normalisation and rotation, loaded before the elements arrive: two cosines and sines each, and norms.
struct Shapes {
  float4 angles[2];
#if AMK_QK_NORM
  float4 norm[2 * TURNS];
#endif
};

// Normalises (QK_NORM) and rotates four elements of a head and the four half a head further on. All lanes.
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

// Two numbers as f16, and their rounding errors as f16.
__device__ __forceinline__ uint2 halves(float a, float b) {
  uint32_t const high = half_pair(a, b);
  float2 const back = half_values(high);
  return make_uint2(high, half_pair(a - back.x, b - back.y));
}
// Writes four elements of a head to its rows of high and of low halves.
__device__ __forceinline__ void head_stage(char* to, float (&x)[4], float scale) {
  uint2 const a = halves(x[0] * scale, x[1] * scale), b = halves(x[2] * scale, x[3] * scale);
  *(uint2*)to = make_uint2(a.x, b.x);
  *(uint2*)(to + HEAD_BYTES) = make_uint2(a.y, b.y);
}

__device__ __forceinline__ bool head_lane(uint32_t lane) { return HEAD_PARTS == HEAD_LANES || lane % HEAD_LANES < HEAD_PARTS; }

// The requested words of the queries and, if `newest`, of the new key and value: where a lane's are, and their shapes.
struct HeadsAsked {
  static constexpr uint32_t N = 2 * TURNS + VALUE_TURNS;
  uint32_t at[N];
  bool wanted[N];
  Shapes shapes;
};
__device__ __forceinline__ HeadsAsked heads_ask(Worker const& w, StagedTask const& st, amk_attention_params const& p, uint32_t g0, bool newest) {
  HeadsAsked a;
  uint32_t const lane = w.thread % 32, heads = p.kv_heads * p.group, position = seq_position(w);
  bool const has = head_lane(lane);
  uint32_t const part = has ? lane % HEAD_LANES : 0; // the others read what is there
  float const* angles = (float const*)st.buffer[3].address + (size_t)position * AMK_HEAD_DIM + part * 8;
  a.shapes.angles[0] = load_constant(angles), a.shapes.angles[1] = load_constant(angles + 4);
#pragma unroll
  for (uint32_t i = 0; i < TURNS; ++i) {
    uint32_t const row = i * HEADS_ONCE + lane / HEAD_LANES;
    bool const query = row < GROUP_BUF && g0 + row < AMK_GROUP;
    a.at[2 * i] = (query ? p.kv_head * p.group + g0 + row : heads + p.kv_head) * AMK_HEAD_DIM + part * 4;
    a.at[2 * i + 1] = a.at[2 * i] + AMK_HEAD_DIM / 2;
    a.wanted[2 * i] = a.wanted[2 * i + 1] = has && (query || (row == GROUP_BUF && newest));
#if AMK_QK_NORM
    float const* norm = (float const*)st.buffer[query ? 1 : 2].address + part * 4;
    a.shapes.norm[2 * i] = load_constant(norm), a.shapes.norm[2 * i + 1] = load_constant(norm + AMK_HEAD_DIM / 2);
#endif
  }
#pragma unroll
  for (uint32_t i = 0; i < VALUE_TURNS; ++i) {
    a.at[2 * TURNS + i] = (heads + p.kv_heads + p.kv_head) * AMK_HEAD_DIM + (i * 32 + lane) * 4;
    a.wanted[2 * TURNS + i] = newest && i * 32 + lane < AMK_HEAD_DIM / 4;
  }
  return a;
}

// One warp: waits for the queries, and for the new key and value if `newest`, and normalises and rotates them. They are redistributed over the
// lanes through the warp's scratch.
__device__ __forceinline__ void heads_wait(Worker const& w, StagedTask const& st, amk_attention_params const& p, HeadsAsked const& asked, bool newest, Queries& q) {
  constexpr uint32_t N = HeadsAsked::N;
  uint32_t const lane = w.thread % 32, part = lane % HEAD_LANES;
  Words const in = buffer_words(w, st.buffer[0]);
  uint4 v[N];
  vec4s_wait(w, in, asked.at, asked.wanted, v);
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < TURNS; ++i) {
    if (AMK_HEAD_DIM <= 128 && i * HEADS_ONCE >= GROUP_BUF && !newest) { // nothing but the new key; wider heads have no registers left
      break;
    }
    uint32_t const row = i * HEADS_ONCE + lane / HEAD_LANES;
    float4 const a = vec4_value(in, v[2 * i]), b = vec4_value(in, v[2 * i + 1]);
    float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    shape_head(x, y, asked.shapes, i, p.eps);
    if (!head_lane(lane)) {
      continue;
    }
    if (row < GROUP_BUF) {
      char* to = (char*)scratch_head(w, w.thread / 32, row) + part * 8;
      head_stage(to, x, p.scale * LOG2_E);
      head_stage(to + AMK_HEAD_DIM, y, p.scale * LOG2_E); // half a row further on
    } else if (row == GROUP_BUF && newest) {
      uint2* key = (uint2*)fresh_key(w) + part;
      key[0] = make_uint2(cache_pair(x[0], x[1]), cache_pair(x[2], x[3]));
      key[HEAD_PARTS] = make_uint2(cache_pair(y[0], y[1]), cache_pair(y[2], y[3]));
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < VALUE_TURNS; ++i) {
    if (asked.wanted[2 * TURNS + i]) {
      float4 const f = vec4_value(in, v[2 * TURNS + i]);
      ((uint2*)fresh_value(w))[i * 32 + lane] = make_uint2(cache_pair(f.x, f.y), cache_pair(f.z, f.w));
    }
  }
  __syncwarp();
  if (KV_CODES && newest) {
    row_encode(fresh_key(w));
    row_encode(fresh_value(w));
  }
  uint32_t const column = lane / 4, head = column % COLUMN_HEADS < GROUP_BUF ? column % COLUMN_HEADS : 0; // the result of other columns is never read
  char const* mine = (char const*)scratch_head(w, w.thread / 32, head) + column / COLUMN_HEADS * HEAD_BYTES + lane % 4 * 16;
#pragma unroll
  for (uint32_t i = 0; i < BLOCKS; ++i) {
    q.bits[i] = block_lane(i) ? stage_load(mine + i * 64) : make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

// Writes the new key to its row of the cache, and into this tile of 16 keys if `row` is one of them.
__device__ __forceinline__ void key_append(Worker const& w, char* to, uint32_t position, uint32_t row, bool store, KeyTile& keys) {
  uint32_t const lane = threadIdx.x % 32;
  if (store && lane < ROW_CHUNKS) {
    *(uint4*)(to + (lane ^ row_swizzle(position)) * 16) = fresh_key(w)[lane];
  }
#pragma unroll
  for (uint32_t i = 0; i < 2 * BLOCKS; ++i) {
    if (i / BLOCKS * 8 + lane / 4 == row && block_lane(i % BLOCKS)) {
      keys.bits[i / BLOCKS][i % BLOCKS] = fresh_take(fresh_key(w), i % BLOCKS * 4 + lane % 4);
    }
  }
}

// Writes the new value to its row of the cache, and into its tile.
__device__ __forceinline__ void value_append(Worker const& w, char* to, uint32_t position, char* row, bool store) {
  uint32_t const lane = threadIdx.x % 32;
  if (lane < ROW_CHUNKS) {
    uint32_t const place = (lane ^ row_swizzle(position)) * 16;
    uint4 const v = fresh_value(w)[lane];
    stage_store(row + place, v);
    if (store) {
      *(uint4*)(to + place) = v;
    }
  }
  __syncwarp();
}

// Running softmax of a lane's two heads, 2 * (lane % 2) and the next: sums over the keys that this lane has seen, maxima over the warp's keys.
// Lanes whose column is a low half have the same values as the lanes two below, except for `out`.
struct Running {
  float m[2], l[2];
  float out[HEAD_CHUNKS / 2][4]; // 16 elements of the head: two columns of row lane / 4, two of row lane / 4 + 8
};

// Scores of 16 keys: keys lane / 4 and lane / 4 + 8, for this lane's two heads. Two independent chains of products.
__device__ __forceinline__ void tile_scores(Queries const& q, KeyTile const& keys, float cap, float (&s)[2][2]) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (uint32_t b = 0; b < BLOCKS; ++b) {
    uint4 const x = keys.bits[0][b], y = keys.bits[1][b];
    mma_f16(even, make_uint4(x.x, y.x, x.y, y.y), q.bits[b].x, q.bits[b].y);
    mma_f16(odd, make_uint4(x.z, y.z, x.w, y.w), q.bits[b].z, q.bits[b].w);
  }
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    float const half = even[i] + odd[i];
    s[i / 2][i % 2] = score_capped(half + __shfl_xor_sync(~0u, half, 2), cap); // high halves plus low halves
  }
}

// Adds a tile of `count` keys with its values. `s`: for each 8 keys, this lane's two heads.
__device__ __forceinline__ void tile_add(Worker const& w, Running& r, float (&s)[HALVES][2][2], uint32_t count, char const* values, uint32_t swizzle, bool first) {
  uint32_t const key = w.thread % 32 / 4;
  float old[2];
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
    float top = r.m[j];
#pragma unroll
    for (uint32_t i = 0; i < 2 * HALVES; ++i) {
      float& x = s[i / 2][i % 2][j];
      x = i * 8 + key < count ? x : LOWEST;
      top = fmaxf(top, x);
    }
#pragma unroll
    for (uint32_t o = 4; o < 32; o *= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    }
    old[j] = exp2_fast(r.m[j] - top);
    r.m[j] = top;
    r.l[j] *= old[j];
  }
  uint32_t weights[2 * HALVES];
#pragma unroll
  for (uint32_t i = 0; i < 2 * HALVES; ++i) {
    float const a = exp2_fast(s[i / 2][i % 2][0] - r.m[0]), b = exp2_fast(s[i / 2][i % 2][1] - r.m[1]);
    r.l[0] += a, r.l[1] += b;
    uint2 const both = halves(a, b);
    weights[i] = transposed(w.thread % 4 < 2 ? both.x : both.y);
  }
  if (!first) { // else the sums are zero
#pragma unroll
    for (uint32_t c = 0; c < HEAD_CHUNKS / 2; ++c) {
      r.out[c][0] *= old[0], r.out[c][1] *= old[1], r.out[c][2] *= old[0], r.out[c][3] *= old[1];
    }
  }
#pragma unroll
  for (uint32_t half = 0; half < HALVES; ++half) {
    uint2 const scales = value_scales(values + half * 16 * ROW_BYTES, w.thread % 32);
#pragma unroll
    for (uint32_t c = 0; c < HEAD_CHUNKS / 2; ++c) {
      mma_f16(r.out[c], values_take(values + half * 16 * ROW_BYTES, w.thread % 32, swizzle, c, scales), weights[2 * half], weights[2 * half + 1]);
    }
  }
}

// Writes the warp's sums to the scratch. Lanes 0 and 1 of each four write the first of their two heads, the others the second.
__device__ __forceinline__ void warp_finish(Worker const& w, Running& r) {
  uint32_t const lane = w.thread % 32, second = lane % 4 / 2, g = lane % 2 * 2 + second;
  float* to = scratch_head(w, w.thread / 32, g);
#pragma unroll
  for (uint32_t j = 0; j < 2; ++j) {
#pragma unroll
    for (uint32_t o = 4; o < 32; o *= 2) {
      r.l[j] += __shfl_xor_sync(~0u, r.l[j], o);
    }
  }
  if (lane < 4 && g < GROUP_BUF) {
    *(float2*)to = make_float2(second ? r.m[1] : r.m[0], second ? r.l[1] : r.l[0]);
  }
#pragma unroll
  for (uint32_t i = 0; i < HEAD_CHUNKS; ++i) {
    float const x = r.out[i / 2][i % 2 * 2], y = r.out[i / 2][i % 2 * 2 + 1];
    float const sum = (second ? y : x) + __shfl_xor_sync(~0u, second ? x : y, 2);
    if (g < GROUP_BUF) {
      to[4 + sum_element(lane, i)] = sum;
    }
  }
}

// Takes a head's sink into a maximum, in the split that has the newest key. Returns what it adds to the sum of exponentials.
__device__ __forceinline__ float sink_add(StagedTask const& st, uint32_t head, bool owns, float& top) {
  if constexpr (has_feature(AMK_FEATURE_SINKS)) {
    if (owns && aside(st).address != 0) {
      float const sink = __ldg((float const*)aside(st).address + head) * 1.4426950408889634f; // scores are in units of log 2
      top = fmaxf(top, sink);
      return exp2_fast(sink - top);
    }
  }
  return 0.f;
}

// After the barrier: combines the warps' scratch into the partial results of the task's heads.
__device__ __forceinline__ void write_partials(Worker const& w, StagedTask const& st, amk_attention_params const& p, bool owns) {
  Words const out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t const head0 = p.kv_head * p.group + first_head(p), first = partial_word(task_split(w, p), p.kv_heads * p.group, head0);
#pragma unroll 1
  for (uint32_t i = threadIdx.x * 2; i < heads_of(p) * AMK_HEAD_DIM; i += CONSUMERS * 2) {
    uint32_t const g = i / AMK_HEAD_DIM, d = i % AMK_HEAD_DIM;
    float2 stats[AMK_WARPS], values[AMK_WARPS];
    float top = LOWEST;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      stats[j] = *(float2 const*)scratch_head(w, j, g);
      values[j] = *(float2 const*)(scratch_head(w, j, g) + 4 + d);
      top = fmaxf(top, stats[j].x);
    }
    float sum = sink_add(st, head0 + g, owns, top), v0 = 0.f, v1 = 0.f;
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

// For a split without keys: still writes words of this step, so that no stale word can be mistaken for a later step's.
__device__ __forceinline__ void write_nothing(Worker const& w, StagedTask const& st, amk_attention_params const& p) {
  Words const out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t const first = partial_word(task_split(w, p), p.kv_heads * p.group, p.kv_head * p.group + first_head(p));
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < heads_of(p) * PARTIAL_WORDS; i += CONSUMERS) {
    word_write(out, first + i, 0.f);
  }
}

// A warp's position in the stages of an attention task.
struct KeyWalk {
  uint32_t start, count, of_block; // first key and number of keys; stages of a whole block
  uint32_t stages;                 // stages of all keys and values
  uint32_t passed;
};

#if AMK_SEQS > 1
// One warp: normalises and rotates the new key of the worker's sequence, as heads_wait does it, and places it with the new value.
__device__ __forceinline__ void fresh_take_words(Worker const& w, StagedTask const& st, amk_attention_params const& p) {
  constexpr uint32_t N = 2 + VALUE_TURNS;
  uint32_t const lane = w.thread % 32, heads = p.kv_heads * p.group;
  bool const has = lane < HEAD_PARTS;
  uint32_t const part = has ? lane : 0;
  float const* angles = (float const*)st.buffer[3].address + (size_t)seq_position(w) * AMK_HEAD_DIM + part * 8;
  Shapes s;
  s.angles[0] = load_constant(angles), s.angles[1] = load_constant(angles + 4);
#if AMK_QK_NORM
  float const* norm = (float const*)st.buffer[2].address + part * 4;
  s.norm[0] = load_constant(norm), s.norm[1] = load_constant(norm + AMK_HEAD_DIM / 2);
#endif
  uint32_t at[N];
  bool wanted[N];
  at[0] = (heads + p.kv_head) * AMK_HEAD_DIM + part * 4, at[1] = at[0] + AMK_HEAD_DIM / 2;
  wanted[0] = wanted[1] = has;
#pragma unroll
  for (uint32_t i = 0; i < VALUE_TURNS; ++i) {
    at[2 + i] = (heads + p.kv_heads + p.kv_head) * AMK_HEAD_DIM + (i * 32 + lane) * 4;
    wanted[2 + i] = i * 32 + lane < AMK_HEAD_DIM / 4;
  }
  Words const in = buffer_words(w, st.buffer[0]);
  uint4 v[N];
  vec4s_wait(w, in, at, wanted, v);
  __syncwarp();
  float4 const a = vec4_value(in, v[0]), b = vec4_value(in, v[1]);
  float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  shape_head(x, y, s, 0, p.eps);
  if (has) {
    uint2* key = (uint2*)fresh_key(w) + part;
    key[0] = make_uint2(cache_pair(x[0], x[1]), cache_pair(x[2], x[3]));
    key[HEAD_PARTS] = make_uint2(cache_pair(y[0], y[1]), cache_pair(y[2], y[3]));
  }
#pragma unroll
  for (uint32_t i = 0; i < VALUE_TURNS; ++i) {
    if (wanted[2 + i]) {
      float4 const f = vec4_value(in, v[2 + i]);
      ((uint2*)fresh_value(w))[i * 32 + lane] = make_uint2(cache_pair(f.x, f.y), cache_pair(f.z, f.w));
    }
  }
  __syncwarp();
  if (KV_CODES) {
    row_encode(fresh_key(w));
    row_encode(fresh_value(w));
  }
}

// The new keys and values of all sequences of a step with a window: a sequence attends to those of the sequences before it in its window, whose
// rows of the cache have not arrived. All of them are written by the tasks that write its own. A warp for each.
__device__ __forceinline__ void fresh_take_all(Worker const& w, StagedTask const& st, amk_attention_params const& p) {
  static_assert(SEQS <= AMK_WARPS, "a warp for each sequence");
  uint32_t const seq = w.thread / 32;
  if (seq < seqs_running(w)) {
    fresh_take_words(in_seq(w, seq), st, p);
  }
  consumers_sync();
}

// Writes the new key and value of the worker's sequence to their rows of the cache.
__device__ __forceinline__ void fresh_store(Worker const& w, amk_attention_params const& p, char* to) {
  uint32_t const lane = threadIdx.x % 32, place = (lane ^ row_swizzle(seq_position(w))) * 16;
  if (lane < ROW_CHUNKS) {
    *(uint4*)(to + place) = fresh_key(w)[lane];
    *(uint4*)(to + fresh_values(w, p) + place) = fresh_value(w)[lane];
  }
}

// In a step with a window, one warp: replaces rows of a tile in its stage, of keys (`part` 0) or of values (HEAD_CHUNKS), that are of this step: those
// of the worker's sequence and of the sequences before it in its window. `count`: keys of the split.
__device__ __forceinline__ void rows_renew(Worker const& w, KeyWalk const& walk, uint32_t count, uint32_t tile, char* rows, uint32_t part) {
  uint32_t const lane = threadIdx.x % 32, position = seq_position(w), first = position - seqs_before(w) - walk.start; // of the new ones, counted from the split's first
  uint32_t const from = (int32_t)first > (int32_t)tile ? first : tile, end = count - tile < TILE_KEYS ? count : tile + TILE_KEYS;
#pragma unroll 1
  for (uint32_t key = from; (int32_t)key < (int32_t)end; ++key) {
    if (lane < ROW_CHUNKS) {
      uint4 const* row = fresh_key_of(w, w.seq + walk.start + key - position) + part;
      stage_store(rows + (key - tile) * ROW_BYTES + (lane ^ row_swizzle(walk.start + key)) * 16, row[lane]);
    }
    stage_given_back(); // the stage may be filled again before the task ends
  }
  __syncwarp();
}
#endif
// Position of a tile of keys.
struct TilePlace {
  uint32_t at, values_at; // stages before its keys and before its values
  uint32_t row, values;   // first row in the stage; bytes before the values
};
__device__ __forceinline__ TilePlace tile_place(Worker const& w, KeyWalk const& walk, uint32_t tile) {
  uint32_t const block = tile / BLOCK_KEYS, first = tile % BLOCK_KEYS, keys = walk.count - block * BLOCK_KEYS;
  BlockStages const in = block_stages(keys < BLOCK_KEYS ? keys : BLOCK_KEYS, w.stage_bytes);
  uint32_t const at = block * walk.of_block + (first >> (31 - __clz(in.rows)));
  return TilePlace{at, at + (in.values == 0 ? stages_of_rows(in.copied, in.rows) : 0), first & (in.rows - 1), in.values};
}
// Loads the keys of a tile into registers, once they have arrived.
__device__ __forceinline__ void tile_take(Worker const& w, Cursor& c, KeyWalk& walk, TilePlace const& place, uint32_t tile, KeyTile (&k)[HALVES]) {
  cursor_pass(w, c, walk.passed, place.at);
  char const* rows = cursor_land(w, c) + place.row * ROW_BYTES;
#pragma unroll
  for (uint32_t half = 0; half < HALVES; ++half) {
    keys_take(k[half], rows + half * 16 * ROW_BYTES, walk.start + tile + half * 16);
  }
}
#if AMK_SEQS > 1
// In a step with a window: the same, when the rows of this step have replaced the stale ones.
__device__ __forceinline__ void tile_take_renewed(Worker const& w, Cursor& c, KeyWalk& walk, TilePlace const& place, uint32_t tile, uint32_t count, KeyTile (&k)[HALVES]) {
  cursor_pass(w, c, walk.passed, place.at);
  char const* rows = cursor_land(w, c) + place.row * ROW_BYTES;
  rows_renew(w, walk, count, tile, w.ring + (rows - w.ring), 0);
  tile_take(w, c, walk, place, tile, k);
}
#endif

// One warp that has no other key: the step's own, whose weight is one, goes into the warp's scratch as in warp_finish, and into the cache.
__device__ __forceinline__ void newest_alone(Worker const& w, amk_attention_params const& p, Queries const& q, char* to, bool store) {
  uint32_t const lane = w.thread % 32, warp = w.thread / 32, place = (lane ^ row_swizzle(seq_position(w))) * 16;
  KeyTile key; // the first of 16
#pragma unroll
  for (uint32_t i = 0; i < 2 * BLOCKS; ++i) {
    key.bits[i / BLOCKS][i % BLOCKS] = i < BLOCKS && lane < 4 && block_lane(i) ? fresh_take(fresh_key(w), i * 4 + lane) : make_uint4(0, 0, 0, 0);
  }
  if (store && lane < ROW_CHUNKS) {
    *(uint4*)(to + place) = fresh_key(w)[lane];
    *(uint4*)(to + fresh_values(w, p) + place) = fresh_value(w)[lane];
  }
  float s[2][2];
  tile_scores(q, key, p.cap, s);
  uint32_t const head = lane % 2 * 2 + lane / 2;
  if (lane < 4 && head < GROUP_BUF) {
    *(float2*)scratch_head(w, warp, head) = make_float2(lane < 2 ? s[0][0] : s[0][1], 1.f);
  }
#pragma unroll
  for (uint32_t i = 0; i < (AMK_HEAD_DIM / 2 + 31) / 32; ++i) {
    uint32_t const pair = i * 32 + lane;
    if (pair < AMK_HEAD_DIM / 2) {
      float2 const v = fresh_pair(fresh_value(w), pair);
#pragma unroll
      for (uint32_t g = 0; g < GROUP_BUF; ++g) {
        *(float2*)(scratch_head(w, warp, g) + 4 + 2 * pair) = v;
      }
    }
  }
}

// One warp: attention of the task's query heads, from g0 of the group on, over this warp's tiles of keys. With `owns` the last of them has the step's own key. For few keys the last warp
// has no tile, and takes that key alone. The keys of the first tile are in registers before the queries arrive. Stages are passed only as far as
// needed before the warps meet.
#if AMK_SEQS > 1
template <bool WINDOW>
#endif
__device__ __forceinline__ void attend(Worker const& w, StagedTask const& st, amk_attention_params const& p, Cursor& c, uint32_t g0, KeyWalk& walk, bool owns) {
  uint32_t const mine = w.thread / 32 * TILE_KEYS; // this warp's tiles begin here in every two blocks
  bool const apart = AMK_HEAD_DIM <= 128 && owns && walk.count - 1 <= (AMK_WARPS - 1) * TILE_KEYS, alone = apart && w.thread / 32 == AMK_WARPS - 1;
  uint32_t const position = seq_position(w), count = walk.count - apart, newest_tile = (count - 1) / TILE_KEYS * TILE_KEYS;
#if AMK_SEQS > 1
  bool const last = owns && !apart && newest_tile % (2 * BLOCK_KEYS) == mine, newest = last && !WINDOW; // a window has taken the new keys
#else
  bool const newest = owns && !apart && newest_tile % (2 * BLOCK_KEYS) == mine;
#endif
  Running r;
  r.m[0] = r.m[1] = LOWEST;
  r.l[0] = r.l[1] = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < HEAD_CHUNKS / 2; ++i) {
    r.out[i][0] = r.out[i][1] = r.out[i][2] = r.out[i][3] = 0.f;
  }
  if (alone) {
    uint32_t const page = fresh_page(w); // requested long before it is used
    Queries q;
#if AMK_SEQS > 1
    HeadsAsked const asked = heads_ask(w, st, p, g0, !WINDOW);
    char* const to = fresh_row(w, st.buffer[AMK_READS_STAGED + 1], p, page);
    heads_wait(w, st, p, asked, !WINDOW, q);
#else
    HeadsAsked const asked = heads_ask(w, st, p, g0, true);
    char* const to = fresh_row(w, st.buffer[AMK_READS_STAGED + 1], p, page);
    heads_wait(w, st, p, asked, true, q);
#endif
    newest_alone(w, p, q, to, g0 == 0);
  } else if (mine < count) {
    uint32_t const swizzle = row_swizzle(walk.start + w.thread % 8); // of the rows of values that this lane reads, in every tile
    uint32_t const page = newest ? fresh_page(w) : 0; // requested long before it is used
    Queries q;
    KeyTile k[HALVES];
    HeadsAsked const asked = heads_ask(w, st, p, g0, newest);
    TilePlace place = tile_place(w, walk, mine);
#if AMK_SEQS > 1
    if (!WINDOW)
#endif
    tile_take(w, c, walk, place, mine, k);
    char* const to = fresh_row(w, st.buffer[AMK_READS_STAGED + 1], p, page); // overlaps with the wait for the queries
    heads_wait(w, st, p, asked, newest, q);
    trace_staged(w);
#if AMK_SEQS > 1
    if (WINDOW && last && g0 == 0) {
      fresh_store(w, p, fresh_row(w, st.buffer[AMK_READS_STAGED + 1], p, fresh_page(w)));
    }
#endif
#pragma unroll 1
    for (uint32_t tile = mine;;) {
      bool const fresh_here = newest && tile == newest_tile;
      float s[HALVES][2][2];
#if AMK_SEQS > 1
      if (WINDOW) { // one place in the code, since registers are short
        tile_take_renewed(w, c, walk, place, tile, count, k);
      }
#endif
#pragma unroll
      for (uint32_t half = 0; half < HALVES; ++half) {
        if (fresh_here) {
          key_append(w, to, position, count - 1 - tile - half * 16, g0 == 0 && half == 0, k[half]);
        }
        tile_scores(q, k[half], p.cap, s[half]);
      }
      cursor_pass(w, c, walk.passed, place.values_at);
      char* values = w.ring + (cursor_land(w, c) - w.ring) + place.values + place.row * ROW_BYTES;
      if (fresh_here) {
        value_append(w, to + fresh_values(w, p), position, values + (count - 1 - tile) * ROW_BYTES, g0 == 0);
      }
#if AMK_SEQS > 1
      if (WINDOW) {
        rows_renew(w, walk, count, tile, values, HEAD_CHUNKS);
      }
#endif
      tile_add(w, r, s, count - tile, values, swizzle, tile == mine);
      tile += 2 * BLOCK_KEYS;
      if (tile >= count) {
        break;
      }
      place = tile_place(w, walk, tile);
#if AMK_SEQS > 1
      if (!WINDOW)
#endif
      tile_take(w, c, walk, place, tile, k);
    }
  }
  // The remaining stages can be passed after the result is written, except those beyond the ring's size: other warps need what comes after them.
  cursor_pass(w, c, walk.passed, walk.stages > w.stages ? walk.stages - w.stages : 0);
  if (!alone) {
    warp_finish(w, r);
  }
}

// Attends to a sequence's keys of this task's split, at least one.
#if AMK_SEQS > 1
template <bool WINDOW>
#endif
__device__ __forceinline__ void attend_split(Worker const& w, StagedTask const& st, amk_attention_params const& p, Cursor& c, uint32_t keys, uint32_t active) {
  uint32_t const first = seq_position(w) + 1 - keys;
  uint32_t const start = split_start(keys, p.kv_block, active, task_split(w, p)), end = split_start(keys, p.kv_block, active, task_split(w, p) + 1);
  uint32_t const count = end - start, last = count % BLOCK_KEYS, of_block = stages_of_block(BLOCK_KEYS, w.stage_bytes);
  uint32_t const stages = count / BLOCK_KEYS * of_block + (last != 0 ? stages_of_block(last, w.stage_bytes) : 0);
  KeyWalk walk = {first + start, count, of_block, stages, 0};
#if AMK_SEQS > 1
  attend<WINDOW>(w, st, p, c, first_head(p), walk, task_split(w, p) + 1 == active);
#else
  attend(w, st, p, c, first_head(p), walk, task_split(w, p) + 1 == active);
#endif
  trace_multiplied(w);
  consumers_sync();
  write_partials(w, st, p, task_split(w, p) + 1 == active);
  stage_given_back(); // orders the stores of the thread that put the new value there before the next copy
  cursor_pass(w, c, walk.passed, stages);
}

#if AMK_SEQS > 1
// For a split without keys, at the beginning of a command: writes words that belong to no step, as poisoned ones. Splits gain keys while a
// command runs and never lose any, so the command's later steps need not write.
__device__ __forceinline__ void write_never(Worker const& w, StagedTask const& st, amk_attention_params const& p) {
  Words const words = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t* const out = words.at + partial_word(task_split(w, p), p.kv_heads * p.group, p.kv_head * p.group + first_head(p));
#pragma unroll 1
  for (uint32_t i = w.thread; i < heads_of(p) * PARTIAL_WORDS; i += CONSUMERS) {
    word_store(words, out + i, AMK_NONE);
  }
}

// Whether the task has keys of any sequence.
__device__ __forceinline__ bool attends(Worker const& w, amk_attention_params const& p) {
  bool any = false;
#pragma unroll 1
  for (uint32_t seq = 0; seq < seqs_running(w); ++seq) {
    uint32_t const keys = attended(seq_position(in_seq(w, seq)), p.window);
    any |= seq_split(p.split, p.splits, seq) < active_splits(keys, p.kv_block, p.splits);
  }
  return any;
}

// Processes the sequences in the order in which the loader brings their keys. The splits of a head rotate from sequence to sequence (seq_split),
// so that short sequences do not queue up on the workers of the first split.
template <bool WINDOW> __device__ __forceinline__ void attend_seqs(Worker& w, StagedTask const& st, amk_attention_params const& p, Cursor& c) {
  w.seq = first_seq(p.split, p.splits, seqs_running(w));
#pragma unroll 1
  for (uint32_t turn = 0; turn < seqs_running(w); ++turn) {
    uint32_t const keys = attended(seq_position(w), p.window), active = active_splits(keys, p.kv_block, p.splits);
    if (task_split(w, p) < active) {
      attend_split<WINDOW>(w, st, p, c, keys, active);
      consumers_sync(); // the scratch is overwritten next
    } else if (w.shared->step.index == 0) {
      write_never(w, st, p);
    }
    w.seq = w.seq + 1 == seqs_running(w) ? 0 : w.seq + 1;
  }
  w.seq = 0;
}

// Windows have a copy of the code, so that they cost other batches nothing.
__device__ __forceinline__ void op_attention(Worker& w, StagedTask const& st, Cursor& c) {
  amk_attention_params const& p = *(amk_attention_params const*)st.task.params; // read again where it is used
  consumers_sync(); // the scratch may hold sums of the preceding matvec
  if (seqs_windows(w) == 0) {
    attend_seqs<false>(w, st, p, c);
  } else {
    if (attends(w, p)) { // a task without keys takes none: nobody waits for it in this step
      fresh_take_all(w, st, p);
    }
    attend_seqs<true>(w, st, p, c);
  }
  task_barrier(w);
}
#else
__device__ __forceinline__ void op_attention(Worker& w, StagedTask const& st, Cursor& c) {
  amk_attention_params const p = *(amk_attention_params const*)st.task.params;
  uint32_t const keys = attended(seq_position(w), p.window), active = active_splits(keys, p.kv_block, p.splits);
  if (p.split >= active) {
    write_nothing(w, st, p);
  } else {
    attend_split(w, st, p, c, keys, active);
  }
  task_barrier(w);
}
#endif
