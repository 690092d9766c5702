// Prefill: causal attention of many tokens over the keys and values in the cache, including their own.
//
// A block is a warpgroup: it processes 64 tokens of one query head over the keys in blocks of 64, two of which are in flight or arrived. Queries
// and softmax weights are the first operands of warpgroup products, from registers; keys and values are the second ones, from shared memory.
// The cache's permutation of the chunks of a row (keys.cuh) is the hardware's swizzle of as many bytes, after the rows are permuted within
// eights if they have 8 chunks or more (key_row). All are f16; codes are put there as the cache would have them if it were of f16.
#pragma once

constexpr uint32_t ATTEND_TOKENS = AMK_ATTEND_TOKENS, ATTEND_KEYS = AMK_ATTEND_KEYS, ATTEND_THREADS = ATTEND_TOKENS / 16 * 32;
constexpr uint32_t ATTEND_BLOCK_BYTES = ATTEND_KEYS * HEAD_BYTES; // keys only, or values only
static_assert(PAGE_KEYS % ATTEND_KEYS == 0, "a block of keys is of one page");
static_assert(ATTEND_THREADS == 128 && AMK_HEAD_DIM <= 256, "a warpgroup; a thread has all sums of its two rows");
constexpr uint32_t KEY_TILES = ATTEND_KEYS / 8;
// A head is processed in parts: the chunks that are permuted among themselves. In shared memory a part of all keys follows another.
constexpr uint32_t PART_CHUNKS = HEAD_SWIZZLED, PART_DIM = PART_CHUNKS * 8, PARTS = AMK_HEAD_DIM / PART_DIM, PART_ROW = PART_DIM * 2;
constexpr uint32_t PART_BYTES = ATTEND_KEYS * PART_ROW, PART_TILES = PART_DIM / 8, PART_STEPS = PART_DIM / 16;

// Row of a key in shared memory, and its inverse: the key of a row.
__device__ __forceinline__ uint32_t key_row(uint32_t key) { return HEAD_SWIZZLED < 8 ? key : (key & ~7u) | head_swizzle(key); }
__device__ __forceinline__ uint32_t row_key(uint32_t row) { return HEAD_SWIZZLED < 8 ? row : (row & ~7u) | (row & 4) >> 2 | (row & 3) << 1; }

struct Attend {
  char* out;           // vectors, `pitch` tokens apart from 64 columns to the next
  char const* queries; // as amk_prefill_heads writes them
  char const* keys;    // of the head, in page 0
  uint16_t const* pages;
  uint32_t values;     // byte distance from a head's keys in a page to its values
  uint32_t pitch, tokens, heads, head, start, window;
  float cap; // of the scores, or 0
#if AMK_FEATURES >> AMK_FEATURE_SINKS & 1
  float const* sinks; // of the heads, or null
#endif
};

// A thread's part of its warp's 16 queries: the first operand of STEPS products. It is kept in shared memory, behind the keys and values, and
// loaded for each block of keys: of an operand in registers the assembler (13.0) takes the first loop's products for the last that read it.
constexpr uint32_t STEPS = PARTS * PART_STEPS, QUERIES_AT = 2 * 2 * ATTEND_BLOCK_BYTES;
// Steps whose operands are in registers at once: beside the sums of wide heads there is no room for more than 8.
__device__ constexpr uint32_t steps_once(uint32_t most) { return STEPS % most == 0 ? most : steps_once(most - 1); }
constexpr uint32_t STEPS_ONCE = steps_once(STEPS < 8 ? STEPS : 8);
__device__ __forceinline__ char* queries_place(uint32_t step) { return prefill_memory + QUERIES_AT + (step * ATTEND_THREADS + threadIdx.x) * 16; }

__device__ __forceinline__ void queries_keep(Attend const& a, uint32_t token0) {
  uint32_t const lane = threadIdx.x % 32, first = token0 + lane / 4, second = first + 8;
  char const* head = a.queries + (uint64_t)a.head * HEAD_BYTES + lane % 4 * 4;
  char const* p = head + (uint64_t)(first < a.tokens ? first : 0) * a.heads * HEAD_BYTES;
  char const* q = head + (uint64_t)(second < a.tokens ? second : 0) * a.heads * HEAD_BYTES;
#pragma unroll
  for (uint32_t k = 0; k < STEPS; ++k, p += 32, q += 32) {
    stage_store(queries_place(k), make_uint4(*(uint32_t const*)p, *(uint32_t const*)q, *(uint32_t const*)(p + 16), *(uint32_t const*)(q + 16)));
  }
}

// Starts the copies of keys first..first + 64, all in `page`, and of their values; rows from `end` on become zero. A thread copies the same chunks
// of every ROWS_APART-th row: one of every ROW_LANES, a power of two that divides those of a row.
constexpr uint32_t ROW_LANES = (HEAD_CHUNKS & (0 - HEAD_CHUNKS)) < 16 ? HEAD_CHUNKS & (0 - HEAD_CHUNKS) : 16, ROWS_APART = ATTEND_THREADS / ROW_LANES;
static_assert(HEAD_CHUNKS == ROW_LANES || ROW_LANES % PART_CHUNKS == 0, "as many chunks of each part, or one of the row");
static_assert(ROWS_APART % 8 == 0 && ATTEND_KEYS % ROWS_APART == 0, "rows of a thread are permuted alike");
__device__ __forceinline__ void rows_copy(Attend const& a, uint32_t page, uint32_t first, uint32_t end, char* stage) {
  uint32_t const row = threadIdx.x / ROW_LANES, chunk = threadIdx.x % ROW_LANES;
  uint32_t const to = shared_address(stage) + chunk / PART_CHUNKS * PART_BYTES + key_row(row) * PART_ROW + chunk % PART_CHUNKS * 16;
  char const* from = a.keys + paged_row(page, a.values, first) + (HEAD_CHUNKS == ROW_LANES ? threadIdx.x * 16 : row * HEAD_BYTES + chunk * 16);
#pragma unroll
  for (uint32_t i = 0; i < ATTEND_KEYS / ROWS_APART; ++i) {
    uint32_t const bytes = first + row + i * ROWS_APART < end ? 16 : 0;
#pragma unroll
    for (uint32_t j = 0; j < HEAD_CHUNKS / ROW_LANES; ++j) {
      uint32_t const place = j * (ROW_LANES / PART_CHUNKS) * PART_BYTES + i * ROWS_APART * PART_ROW, chunks = i * ROWS_APART * HEAD_BYTES + j * ROW_LANES * 16;
      piece_copy(to + place, from + chunks, bytes);
      piece_copy(to + ATTEND_BLOCK_BYTES + place, from + a.values + chunks, bytes);
    }
  }
}

// The same of rows of codes, which become f16 on the way and are there at once: 16 codes at a time.
__device__ __forceinline__ void codes_copy(Attend const& a, uint32_t page, uint32_t first, uint32_t end, char* stage) {
  constexpr uint32_t PIECES = AMK_HEAD_DIM / 16;
#pragma unroll
  for (uint32_t i = 0; i < 2 * ATTEND_KEYS * PIECES / ATTEND_THREADS; ++i) {
    uint32_t const all = i * ATTEND_THREADS + threadIdx.x, piece = all % PIECES, row = all / PIECES % ATTEND_KEYS, run = all / (ATTEND_KEYS * PIECES);
    char const* from = a.keys + paged_row(page, a.values, first + row) + run * a.values;
    bool const has = first + row < end;
    uint4 const v = has ? *(uint4 const*)(from + piece * 16) : make_uint4(0, 0, 0, 0);
    uint32_t const scale = has ? *(uint16_t const*)(from + AMK_HEAD_DIM) * 0x10001u : 0;
    char* const to = stage + run * ATTEND_BLOCK_BYTES + key_row(row) * PART_ROW;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t const chunk = (2 * piece + half) ^ head_swizzle(row);
      uint2 const codes = half == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
      stage_store(to + chunk / PART_CHUNKS * PART_BYTES + chunk % PART_CHUNKS * 16, codes_take(codes, scale));
    }
  }
}
__device__ __forceinline__ void keys_copy(Attend const& a, uint32_t page, uint32_t first, uint32_t end, char* stage) {
  if constexpr (KV_CODES) {
    codes_copy(a, page, first, end, stage);
  } else {
    rows_copy(a, page, first, end, stage);
  }
}

// Scores of 64 queries and 64 keys: a thread has rows lane / 4 and lane / 4 + 8 of the warp's, and the keys of rows 8 * j + lane % 4 * 2 and the next.
__device__ __forceinline__ void scores(uint32_t keys, float (&s)[KEY_TILES][4]) {
#pragma unroll
  for (uint32_t j = 0; j < KEY_TILES; ++j) {
    s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
  }
#pragma unroll
  for (uint32_t first = 0; first < STEPS; first += STEPS_ONCE) {
    uint32_t q[STEPS_ONCE][4];
#pragma unroll
    for (uint32_t k = 0; k < STEPS_ONCE; ++k) {
      uint4 const v = stage_load(queries_place(first + k));
      q[k][0] = v.x, q[k][1] = v.y, q[k][2] = v.z, q[k][3] = v.w;
    }
    group_fence();
#pragma unroll
    for (uint32_t k = 0; k < STEPS_ONCE; ++k) {
      uint32_t const step = first + k;
      group_multiply(s, q[k], operand<PART_ROW>(keys + step / PART_STEPS * PART_BYTES + step % PART_STEPS * 32));
    }
    group_commit();
    group_wait<0>();
  }
}

// Running softmax of a warp's 16 tokens: rows lane / 4 and lane / 4 + 8. Sums cover this lane's keys only.
struct Summed {
  float m[2], l[2];
  float out[PARTS][PART_TILES][4];
};

__device__ __forceinline__ void scores_cap(float (&s)[KEY_TILES][4], float cap) {
  if constexpr (has_feature(AMK_FEATURE_SCORE_CAP)) {
#pragma unroll
    for (uint32_t j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        s[j][i] = score_capped(s[j][i], cap);
      }
    }
  }
}

// Masks the keys of a block that a token does not attend to: those after it and those before its window.
__device__ __forceinline__ void scores_mask(float (&s)[KEY_TILES][4], uint32_t first, uint32_t position, uint32_t window) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t j = 0; j < KEY_TILES; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t const key = first + row_key(j * 8 + lane % 4 * 2 + i % 2), at = position + lane / 4 + i / 2 * 8;
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
    for (uint32_t d = 0; d < PARTS * PART_TILES; ++d) {
      float(&out)[4] = r.out[d / PART_TILES][d % PART_TILES];
      out[2 * upper] *= old, out[2 * upper + 1] *= old;
    }
#pragma unroll
    for (uint32_t j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (uint32_t i = 2 * upper; i < 2 * upper + 2; ++i) {
        float const p = exp2_fast(s[j][i] - top); // 0 of a masked score, even if a row has no visible key in its first block
        s[j][i] = p;
        r.l[upper] += p;
      }
    }
  }
}

// Adds 64 values, weighted.
__device__ __forceinline__ void values_add(Summed& r, float const (&s)[KEY_TILES][4], uint32_t values) {
  uint32_t p[KEY_TILES / 2][4];
#pragma unroll
  for (uint32_t k = 0; k < KEY_TILES; ++k) {
    p[k / 2][k % 2 * 2] = half_pair(s[k][0], s[k][1]), p[k / 2][k % 2 * 2 + 1] = half_pair(s[k][2], s[k][3]);
  }
  group_fence();
#pragma unroll
  for (uint32_t k = 0; k < KEY_TILES / 2; ++k) {
#pragma unroll
    for (uint32_t part = 0; part < PARTS; ++part) {
      group_multiply<true>(r.out[part], p[k], operand<PART_ROW>(values + part * PART_BYTES + k * 16 * PART_ROW));
    }
  }
  group_commit();
  group_wait<0>();
}

__device__ __forceinline__ void attend_finish(Attend const& a, Summed& r, uint32_t token0) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t upper = 0; upper < 2; ++upper) {
    float l = r.l[upper];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
#if AMK_FEATURES >> AMK_FEATURE_SINKS & 1
    l += a.sinks != nullptr ? exp2_fast(__ldg(a.sinks + a.head) * LOG2_E - r.m[upper]) : 0.f; // infinity leaves nothing of the values, rightly
#endif
    float const inverse = 1.f / l;
    uint32_t const token = token0 + upper * 8 + lane / 4;
    if (token < a.tokens) {
#pragma unroll
      for (uint32_t d = 0; d < PARTS * PART_TILES; ++d) {
        float const(&out)[4] = r.out[d / PART_TILES][d % PART_TILES];
        x_write2(a.out, a.pitch, token, a.head * AMK_HEAD_DIM + d * 8 + lane % 4 * 2, out[2 * upper] * inverse, out[2 * upper + 1] * inverse);
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
  queries_keep(a, token0);
  Summed r = {};
  r.m[0] = r.m[1] = LOWEST / 2;
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
    products_see_pieces();
    __syncthreads();
    uint32_t const keys = shared_address(prefill_memory) + stage * 2 * ATTEND_BLOCK_BYTES;
    float s[KEY_TILES][4];
    scores(keys, s);
    scores_cap(s, a.cap);
    if (first + ATTEND_KEYS > position + 1 || (a.window != 0 && position + 16 > first + a.window)) {
      scores_mask(s, first, position, a.window);
    }
    weigh(r, s);
    values_add(r, s, keys + ATTEND_BLOCK_BYTES);
    __syncthreads(); // the stage is refilled next
    stage ^= 1;
  }
  attend_finish(a, r, token0);
}

#if AMK_FEATURES >> AMK_FEATURE_SINKS & 1
#define AMK_SINKS_PARAMETER , float const* sinks
#define AMK_SINKS , sinks
#else
#define AMK_SINKS_PARAMETER
#define AMK_SINKS
#endif
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, AMK_HEAD_DIM <= 64 ? 4 : AMK_HEAD_DIM <= 128 ? 2 : 1) amk_prefill_attention(char* out, char const* queries, char const* cache, uint16_t const* pages, uint32_t pitch, uint32_t tokens,
                                                                                    uint32_t kv_heads, uint32_t start, uint32_t window, float cap AMK_SINKS_PARAMETER) {
  uint32_t const heads = kv_heads * AMK_GROUP, head = blockIdx.x % heads, run_bytes = PAGE_KEYS * ROW_BYTES;
  attend_block(Attend{out, queries, cache + head / AMK_GROUP * run_bytes, pages, kv_heads * run_bytes, pitch, tokens, heads, head, start, window, cap AMK_SINKS}, blockIdx.x / heads);
}
