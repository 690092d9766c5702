// A product of the tensor cores with operands of bytes, computed from the registers of all lanes of a warp. Include simt.hpp and codes.hpp before.
#pragma once

// Of a 16 by 32 left operand a lane has columns 4t.. and 16 + 4t.. of rows g and g + 8, of the right one the same rows of column g, and of the result
// columns 2t and 2t + 1 of rows g and g + 8.
struct ByteOperands {
  uint4 a[32];
  uint32_t b[32][2];
};
static ByteOperands byte_operands[THREADS_OF_WORKER / 32];
inline int byte_at(uint32_t word, uint32_t k) { return (int8_t)(word >> k % 4 * 8 & 255); }
template <bool SIGNED> void mma_bytes(uint32_t (&c)[4], uint4 a, uint2 b) {
  uint32_t const warp = fibers.running / 32, lane = fibers.running % 32;
  ByteOperands& o = byte_operands[warp];
  o.a[lane] = a, o.b[lane][0] = b.x, o.b[lane][1] = b.y;
  meet(warp);
  for (uint32_t i = 0; i < 4; ++i) {
    for (uint32_t k = 0; k < 32; ++k) {
      uint4 const row = o.a[lane / 4 * 4 + k % 16 / 4];
      uint32_t const column = lane % 4 * 2 + i % 2, left = i < 2 ? (k < 16 ? row.x : row.z) : (k < 16 ? row.y : row.w);
      c[i] += (uint32_t)((SIGNED ? byte_at(left, k) : byte_at(left, k) & 255) * byte_at(o.b[column * 4 + k % 16 / 4][k / 16], k));
    }
  }
  meet(warp);
}
