// Products of a warpgroup (group_products.cuh) for emulated threads, warp by warp. Include simt.hpp and tensor.hpp before.
#pragma once

// As wgmma reads a second operand whose rows have 128, 64 or 32 bytes.
template <uint32_t ROW> uint64_t operand(uint32_t at) { return (uint64_t)ROW << 32 | at; }
inline void group_fence() {}
inline void group_commit() {}
template <uint32_t LEFT> void group_wait() {}
template <uint32_t COUNT> void registers_give() {}
template <uint32_t COUNT> void registers_take() {}
inline bool warp_elect() { return fibers.running % 32 == 0; }
inline float second_operand(uint64_t b, uint32_t row, uint32_t column) {
  uint32_t const of_row = (uint32_t)(b >> 32), at = (uint32_t)b + row * of_row + column * 2;
  return half_value(*(uint16_t const*)(prefill_memory + (at ^ (at >> 7 & of_row / 16 - 1) << 4)));
}
template <bool TRANSPOSED = false, uint32_t TILES> void group_multiply(float (&c)[TILES][4], uint32_t const (&a)[4], uint64_t b) {
  WarpWords const* of = warp_share(WarpWords{a[0], a[1], a[2], a[3]});
  uint32_t const lane = fibers.running % 32;
  for (uint32_t i = 0; i < TILES * 4; ++i) {
    uint32_t const row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      c[i / 4][i % 4] += first_operand(of, row, k) * (TRANSPOSED ? second_operand(b, k, column) : second_operand(b, column, k));
    }
  }
  warp_shared();
}

// The threads of a block meet, which may be fewer than are emulated.
inline uint32_t block_threads, block_waiting, block_round;
inline void __syncthreads() {
  uint32_t const round = block_round;
  if (++block_waiting == block_threads) {
    block_waiting = 0;
    ++block_round;
  }
  while (block_round == round) {
    next_fiber();
  }
}
