// Prefill: causal attention of many tokens over the keys and values in the cache, including their own.
//
// A block processes 64 tokens of one query head, a warp 16 of them, over the keys in blocks of 64, two of which are in flight or arrived. They
// keep the cache's layout: the permuted chunks of its rows (keys.cuh) avoid bank conflicts here too. Queries and softmax weights are
// multiplied as f16, as keys and values are.
#pragma once

constexpr uint32_t ATTEND_TOKENS = AMK_ATTEND_TOKENS, ATTEND_KEYS = AMK_ATTEND_KEYS, ATTEND_THREADS = ATTEND_TOKENS / 16 * 32;
constexpr uint32_t ATTEND_BLOCK_BYTES = ATTEND_KEYS * ROW_BYTES; // keys only, or values only
static_assert(PAGE_KEYS % ATTEND_KEYS == 0, "a block of keys is of one page");
constexpr uint32_t KEY_TILES = ATTEND_KEYS / 8, DIM_TILES = AMK_HEAD_DIM / 8;

struct Attend {
  char* out;           // vectors, `pitch` tokens apart from 64 columns to the next
  char const* queries; // as amk_prefill_heads writes them
  char const* keys;    // of the head, in page 0
  uint16_t const* pages;
  uint32_t values;     // byte distance from a head's keys in a page to its values
  uint32_t pitch, tokens, heads, head, start, window;
};

// A warp's 16 queries: per lane, rows lane / 4 and lane / 4 + 8, 8 elements of each block of 32.
struct WarpQueries {
  uint4 bits[BLOCKS][2];
};

__device__ __forceinline__ void queries_load(Attend const& a, WarpQueries& q, uint32_t token0) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t upper = 0; upper < 2; ++upper) {
    uint32_t const token = token0 + upper * 8 + lane / 4;
    char const* row = a.queries + ((uint64_t)(token < a.tokens ? token : 0) * a.heads + a.head) * ROW_BYTES + lane % 4 * 16;
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      q.bits[b][upper] = block_lane() ? *(uint4 const*)(row + b * 64) : make_uint4(0, 0, 0, 0);
    }
  }
}

// Starts the copies of keys first..first + 64, all in `page`, and of their values; rows from `end` on become zero.
__device__ __forceinline__ void keys_copy(Attend const& a, uint32_t page, uint32_t first, uint32_t end, char* stage) {
  uint32_t const to = shared_address(stage);
  char const* keys = a.keys + paged_row(page, a.values, first);
#pragma unroll
  for (uint32_t piece = threadIdx.x; piece < ATTEND_KEYS * ROW_CHUNKS; piece += ATTEND_THREADS) {
    uint32_t const key = first + piece / ROW_CHUNKS, bytes = key < end ? 16 : 0;
    char const* from = keys + (key < end ? piece * 16 : 0);
    piece_copy(to + piece * 16, from, bytes);
    piece_copy(to + ATTEND_BLOCK_BYTES + piece * 16, from + a.values, bytes);
  }
}

// Scores of 16 queries and 64 keys: rows lane / 4 and lane / 4 + 8, keys 8 * j + lane % 4 * 2 and the next.
__device__ __forceinline__ void scores(WarpQueries const& q, char const* keys, float (&s)[KEY_TILES][4]) {
  uint32_t const lane = threadIdx.x % 32, swizzle = row_swizzle(lane / 4); // rows begin at multiples of 8
#pragma unroll
  for (uint32_t j = 0; j < KEY_TILES; ++j) {
    s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
#pragma unroll
    for (uint32_t b = 0; b < BLOCKS; ++b) {
      char const* at = keys + (j * 8 + lane / 4) * ROW_BYTES + ((b * 4 + lane % 4) ^ swizzle) * 16;
      uint4 const k = block_lane() ? *(uint4 const*)at : make_uint4(0, 0, 0, 0);
      uint4 const x = q.bits[b][0], y = q.bits[b][1];
      mma_f16(s[j], make_uint4(x.x, y.x, x.y, y.y), k.x, k.y);
      mma_f16(s[j], make_uint4(x.z, y.z, x.w, y.w), k.z, k.w);
    }
  }
}

// Running softmax of a warp's 16 tokens: rows lane / 4 and lane / 4 + 8. Sums cover this lane's keys only.
struct Summed {
  float m[2], l[2];
  float out[DIM_TILES][4];
};

// Masks the keys of a block that a token does not attend to: those after it and those before its window.
__device__ __forceinline__ void scores_mask(float (&s)[KEY_TILES][4], uint32_t first, uint32_t position, uint32_t window) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t j = 0; j < KEY_TILES; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t const key = first + j * 8 + lane % 4 * 2 + i % 2, at = position + lane / 4 + i / 2 * 8;
      bool const seen = key <= at && (window == 0 || at - key < window);
      s[j][i] = seen ? s[j][i] : LOWEST;
    }
  }
}

// Turns scores into softmax weights and rescales the running sums to the new maximum.
__device__ __forceinline__ void weigh(Summed& r, float (&s)[KEY_TILES][4]) {
#pragma unroll
  for (uint32_t upper = 0; upper < 2; ++upper) {
    float top = r.m[upper];
#pragma unroll
    for (uint32_t j = 0; j < KEY_TILES; ++j) {
      top = fmaxf(top, fmaxf(s[j][2 * upper], s[j][2 * upper + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float const old = exp2_fast(r.m[upper] - top);
    r.m[upper] = top;
    r.l[upper] *= old;
#pragma unroll
    for (uint32_t d = 0; d < DIM_TILES; ++d) {
      r.out[d][2 * upper] *= old, r.out[d][2 * upper + 1] *= old;
    }
#pragma unroll
    for (uint32_t j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (uint32_t i = 2 * upper; i < 2 * upper + 2; ++i) {
        float const p = s[j][i] > LOWEST ? exp2_fast(s[j][i] - top) : 0.f; // a row may have no visible key in its first block
        s[j][i] = p;
        r.l[upper] += p;
      }
    }
  }
}

// Loads two chunks of 8 elements of 16 values, transposed by ldmatrix, as the B operands of two products.
__device__ __forceinline__ uint4 values_pair(char const* values, uint32_t chunk) {
  uint32_t const lane = threadIdx.x % 32, swizzle = row_swizzle(lane % 8);
  uint32_t const at = shared_address(values + lane % 16 * ROW_BYTES + ((chunk + lane / 16) ^ swizzle) * 16);
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

// Adds 64 values, weighted.
__device__ __forceinline__ void values_add(Summed& r, float const (&s)[KEY_TILES][4], char const* values) {
#pragma unroll
  for (uint32_t k = 0; k < KEY_TILES; k += 2) {
    uint4 const p = make_uint4(half_pair(s[k][0], s[k][1]), half_pair(s[k][2], s[k][3]), half_pair(s[k + 1][0], s[k + 1][1]), half_pair(s[k + 1][2], s[k + 1][3]));
#pragma unroll
    for (uint32_t chunk = 0; chunk < DIM_TILES; chunk += 2) {
      uint4 const v = values_pair(values + k * 8 * ROW_BYTES, chunk);
      mma_f16(r.out[chunk], p, v.x, v.y);
      mma_f16(r.out[chunk + 1], p, v.z, v.w);
    }
  }
}

__device__ __forceinline__ void attend_finish(Attend const& a, Summed& r, uint32_t token0) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t upper = 0; upper < 2; ++upper) {
    float l = r.l[upper];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    float const inverse = 1.f / l;
    uint32_t const token = token0 + upper * 8 + lane / 4;
    if (token < a.tokens) {
#pragma unroll
      for (uint32_t d = 0; d < DIM_TILES; ++d) {
        x_write2(a.out, a.pitch, token, a.head * AMK_HEAD_DIM + d * 8 + lane % 4 * 2, r.out[d][2 * upper] * inverse, r.out[d][2 * upper + 1] * inverse);
      }
    }
  }
}

// A block's work. The last tokens, which attend to the most keys, are scheduled first.
__device__ __forceinline__ void attend_block(Attend const& a, uint32_t block) {
  uint32_t const warp = threadIdx.x / 32, token_blocks = (a.tokens + ATTEND_TOKENS - 1) / ATTEND_TOKENS;
  uint32_t const block0 = (token_blocks - 1 - block) * ATTEND_TOKENS, token0 = block0 + warp * 16, position = a.start + token0;
  uint32_t const tokens = a.tokens - block0 < ATTEND_TOKENS ? a.tokens - block0 : ATTEND_TOKENS, end = a.start + block0 + tokens;
  uint32_t const oldest = a.start + block0 + 1; // number of the first token's keys
  uint32_t const begin = a.window != 0 && oldest > a.window ? (oldest - a.window) / ATTEND_KEYS * ATTEND_KEYS : 0;
  WarpQueries q;
  queries_load(a, q, token0);
  Summed r = {};
  r.m[0] = r.m[1] = LOWEST;
  keys_copy(a, a.pages[begin / PAGE_KEYS], begin, end, prefill_memory);
  pieces_group();
  uint32_t stage = 0, page = a.pages[(begin + ATTEND_KEYS) / PAGE_KEYS]; // page of the next block; a session's table has a word after its last page
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += ATTEND_KEYS) {
    if (first + ATTEND_KEYS < end) {
      keys_copy(a, page, first + ATTEND_KEYS, end, prefill_memory + (stage ^ 1) * 2 * ATTEND_BLOCK_BYTES);
      page = a.pages[(first + 2 * ATTEND_KEYS) / PAGE_KEYS];
    }
    pieces_group();
    pieces_wait<1>();
    __syncthreads();
    if (first <= position + 15 && token0 < a.tokens) { // else no token of the warp attends to any of these keys
      char const* keys = prefill_memory + stage * 2 * ATTEND_BLOCK_BYTES;
      float s[KEY_TILES][4];
      scores(q, keys, s);
      if (first + ATTEND_KEYS > position + 1 || (a.window != 0 && position + 16 > first + a.window)) {
        scores_mask(s, first, position, a.window);
      }
      weigh(r, s);
      values_add(r, s, keys + ATTEND_BLOCK_BYTES);
    }
    __syncthreads(); // the stage is refilled next
    stage ^= 1;
  }
  attend_finish(a, r, token0);
}

extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, AMK_HEAD_DIM <= 64 ? 3 : 2) amk_prefill_attention(char* out, char const* queries, char const* cache, uint16_t const* pages, uint32_t pitch, uint32_t tokens,
                                                                                    uint32_t kv_heads, uint32_t start, uint32_t window) {
  uint32_t const heads = kv_heads * AMK_GROUP, head = blockIdx.x % heads, run_bytes = PAGE_KEYS * ROW_BYTES;
  attend_block(Attend{out, queries, cache + head / AMK_GROUP * run_bytes, pages, kv_heads * run_bytes, pitch, tokens, heads, head, start, window}, blockIdx.x / heads);
}
