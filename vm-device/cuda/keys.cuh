// Which keys a task attends to, and the layout of keys and values in the cache and in the ring. The loader and the attention op must agree.
//
// The cache holds rows of f16, or of codes (cache_rows.cuh), in pages (pages.cuh). They stream through the ring as the weights do, in blocks of 128 keys (64 of wide heads), the keys of a block
// before its values; a consumer warp takes a tile of 32 (16) keys of every other block. The 16-byte chunks of a row are permuted by the key's
// number, so that the rows of a tile's values do not conflict in shared-memory banks, nor, but for heads of an odd multiple of 16, those of its keys.
#pragma once

constexpr uint32_t TILE_KEYS = AMK_HEAD_DIM > 128 ? 16 : 32; // wide keys take twice the registers
constexpr uint32_t BLOCK_KEYS = TILE_KEYS * AMK_WARPS / 2;
constexpr bool KV_CODES = (AMK_FEATURES >> AMK_FEATURE_KV_E4M3 & 1) != 0;
constexpr uint32_t HEAD_BYTES = AMK_HEAD_DIM * 2, HEAD_CHUNKS = HEAD_BYTES / 16; // of a head as f16
constexpr uint32_t ROW_BYTES = KV_CODES ? AMK_HEAD_DIM + AMK_KV_SCALE_BYTES : HEAD_BYTES;
constexpr uint32_t ROW_CHUNKS = ROW_BYTES / 16;
__device__ constexpr uint32_t power_up(uint32_t n, uint32_t power = 1) { return power < n ? power_up(n, 2 * power) : power; } // the next power of two, or n
constexpr uint32_t ROW_ROOM = power_up(ROW_BYTES); // bytes counted for a row when a stage is filled, so that its rows are a power of two
// Chunks that are permuted among themselves: the greatest power of two that divides those of a row, and no more than the banks have room for.
// Rows of codes are not permuted: most have an odd number of chunks, so they begin in different banks.
constexpr uint32_t HEAD_SWIZZLED = (HEAD_CHUNKS & (0 - HEAD_CHUNKS)) < 8 ? HEAD_CHUNKS & (0 - HEAD_CHUNKS) : 8;
constexpr uint32_t GROUP_BUF = AMK_GROUP <= AMK_ATTENTION_GROUP ? AMK_GROUP : AMK_ATTENTION_GROUP; // query heads of a task: columns of the B operand
static_assert(AMK_HEAD_DIM % AMK_HEAD_DIM_STEP == 0 && AMK_HEAD_DIM > 0 && AMK_HEAD_DIM <= AMK_HEAD_DIM_MAX, "rows are pairs of chunks");

// a / b for a < 2^24, in a third of the time of an integer division.
__device__ __forceinline__ uint32_t quotient(uint32_t a, uint32_t b) {
  uint32_t q = (uint32_t)__fdividef((float)a, (float)b); // off by one at most
  q -= q * b > a;
  return q + (a - q * b >= b);
}

// Number of keys attended to, and number of splits that have any. Same as ir::program::{attended, active_splits, split_range}.
__device__ __forceinline__ uint32_t attended(uint32_t position, uint32_t window) { return window == 0 || position + 1 < window ? position + 1 : window; }
__device__ __forceinline__ uint32_t active_splits(uint32_t keys, uint32_t kv_block, uint32_t splits) {
  uint32_t const blocks = quotient(keys + kv_block - 1, kv_block);
  return blocks < splits ? blocks : splits;
}
__device__ __forceinline__ uint32_t split_start(uint32_t keys, uint32_t kv_block, uint32_t active, uint32_t split) {
  uint32_t const blocks = quotient(keys + kv_block - 1, kv_block);
  uint32_t const start = quotient(blocks * split, active) * kv_block;
  return start < keys ? start : keys;
}

// XOR mask of a row's chunks: chunk c is stored at c ^ row_swizzle(key). Rows begin in 8 / HEAD_SWIZZLED different banks in turn.
__device__ __forceinline__ uint32_t head_swizzle(uint32_t key) {
  if (HEAD_SWIZZLED < 8) {
    return key / (8 / HEAD_SWIZZLED) % HEAD_SWIZZLED;
  }
  return (key & 1) << 2 | (key & 6) >> 1;
}
__device__ __forceinline__ uint32_t row_swizzle(uint32_t key) { return KV_CODES ? 0 : head_swizzle(key); }

// Layout of a block of `rows` rows in stages. Whole tiles are copied: rows after the last key are multiplied by zero.
struct BlockStages {
  uint32_t copied; // rows
  uint32_t rows;   // rows per stage
  uint32_t values; // byte offset of the values if the whole block fits in one stage, else 0
};
__device__ __forceinline__ BlockStages block_stages(uint32_t rows, uint32_t stage_bytes) {
  uint32_t const copied = (rows + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS, values = copied * ROW_BYTES;
  // A stage of units with scales is a little longer than a power of two.
  uint32_t const room = SCALED_UNITS ? 1u << (31 - __clz(stage_bytes)) : stage_bytes;
  return BlockStages{copied, room / ROW_ROOM, 2 * values <= room ? values : 0};
}

// Stages needed for `rows` rows of a block. Stages and rows are powers of two.
__device__ __forceinline__ uint32_t stages_of_rows(uint32_t rows, uint32_t of_stage) { return (rows + of_stage - 1) >> (31 - __clz(of_stage)); }
// Stages needed for a block of `keys` keys with their values.
__device__ __forceinline__ uint32_t stages_of_block(uint32_t keys, uint32_t stage_bytes) {
  BlockStages const b = block_stages(keys, stage_bytes);
  return b.values != 0 ? 1 : 2 * stages_of_rows(b.copied, b.rows);
}
