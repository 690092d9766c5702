// What kernels of a prompt's chunk take besides the threads of a worker: blocks of threads, one after the other, and the layout of f16 weights. Include
// simt.hpp, tensor.hpp, group.hpp, amk_abi.h and attention.hpp before, device.hpp after.
#pragma once
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define AMK_DTYPE AMK_DTYPE_F16
struct {
  uint32_t x;
} blockIdx, gridDim;
constexpr uint32_t UNIT_COLS = 32, ELEMENT_BYTES = 2;
inline uint32_t unit_column(uint32_t e) { return e % UNIT_COLS; }
// Where element e of an embedding's row of 16-bit elements is (buffer.cuh): units of 8 rows of 64 bytes.
inline char const* embedding_place(char const* embedding, uint32_t units, uint32_t row, uint32_t e) {
  return embedding + ((uint64_t)(row / 8) * units + e / UNIT_COLS) * 512 + row % 8 * 64 + unit_column(e) * ELEMENT_BYTES;
}
inline float2 pair_values(uint32_t v) { return half_values(v); }
