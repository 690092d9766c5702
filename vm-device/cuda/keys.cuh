// Which keys a task attends to, and how keys and values lie in the cache and in the ring. The loader and the attention op must agree.
//
// The cache holds rows of f16, [2][kv_heads][capacity][head_dim] for a session. They come through the ring as the weights do, in blocks of
// 128 keys, the keys of a block in front of its values; a consumer warp has a tile of 32 keys of every other block. The 16-byte chunks of
// a row are permuted by the key's number, so that neither the rows of a tile's keys nor those of its values meet in the same banks of
// shared memory.
#pragma once

constexpr uint32_t TILE_KEYS = 32;
constexpr uint32_t BLOCK_KEYS = TILE_KEYS * AMK_WARPS / 2;
constexpr uint32_t ROW_BYTES = AMK_HEAD_DIM * 2;
constexpr uint32_t ROW_CHUNKS = ROW_BYTES / 16;
constexpr uint32_t GROUP_BUF = AMK_GROUP <= 7 ? AMK_GROUP : 4; // query heads worked on at once: rows 0.. of the operand; then the new key
constexpr uint32_t ROUNDS = (AMK_GROUP + GROUP_BUF - 1) / GROUP_BUF; // times that a task goes over its keys
static_assert((AMK_HEAD_DIM & (AMK_HEAD_DIM - 1)) == 0 && AMK_HEAD_DIM >= 16 && AMK_HEAD_DIM <= 128, "rows are whole chunks, a power of two of them");

// Keys attended to, and how many splits have some. Same as ir::program::{attended, active_splits, split_range}.
__device__ __forceinline__ uint32_t attended(uint32_t position, uint32_t window) { return window == 0 || position + 1 < window ? position + 1 : window; }
__device__ __forceinline__ uint32_t active_splits(uint32_t keys, uint32_t kv_block, uint32_t splits) {
  uint32_t const blocks = (keys + kv_block - 1) / kv_block;
  return blocks < splits ? blocks : splits;
}
__device__ __forceinline__ uint32_t split_start(uint32_t keys, uint32_t kv_block, uint32_t active, uint32_t split) {
  uint32_t const blocks = (keys + kv_block - 1) / kv_block;
  uint32_t const start = blocks * split / active * kv_block;
  return start < keys ? start : keys;
}

// What chunk c of a row is exchanged with: chunk c lies at c ^ row_swizzle(key).
__device__ __forceinline__ uint32_t row_swizzle(uint32_t key) {
  if (ROW_CHUNKS < 8) {
    return key / (8 / ROW_CHUNKS) % ROW_CHUNKS;
  }
  return (key & 1) << 2 | (key & 6) >> 1;
}

// How a block of so many rows lies in stages. Whole tiles are brought: what lies behind the last key is multiplied by zero.
struct BlockStages {
  uint32_t copied; // rows
  uint32_t rows;   // of a stage
  uint32_t values; // bytes in front of the values where one stage has the whole block, else 0
};
__device__ __forceinline__ BlockStages block_stages(uint32_t rows, uint32_t stage_bytes) {
  uint32_t const copied = (rows + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS, values = copied * ROW_BYTES;
  return BlockStages{copied, stage_bytes / ROW_BYTES, 2 * values <= stage_bytes ? values : 0};
}
