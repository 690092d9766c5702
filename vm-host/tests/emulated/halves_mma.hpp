// A product of the tensor cores with 16-bit operands, computed from the registers of all lanes of a warp. Include simt.hpp and codes.hpp before.
#pragma once

// The lanes' parts of the operands of a product. Of a 16 by 16 left one a lane has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of rows g and g + 8, of the
// right one the same rows of column g, and of the result columns 2t and 2t + 1 of rows g and g + 8.
struct Operands {
  uint4 a[32];
  uint32_t b[32][2];
};
static Operands operands[THREADS_OF_WORKER / 32];
inline float part(uint32_t word, uint32_t k) { return half_value(k % 2 == 0 ? word & 0xffff : word >> 16); }
inline void mma(float (&c)[4], float const (&from)[4], uint4 a, uint32_t b0, uint32_t b1) {
  uint32_t const warp = fibers.running / 32, lane = fibers.running % 32;
  Operands& o = operands[warp];
  o.a[lane] = a, o.b[lane][0] = b0, o.b[lane][1] = b1;
  meet(warp);
  float r[4];
  for (uint32_t i = 0; i < 4; ++i) {
    double sum = from[i];
    for (uint32_t k = 0; k < 16; ++k) {
      uint4 const row = o.a[lane / 4 * 4 + k % 8 / 2];
      uint32_t const column = lane % 4 * 2 + i % 2, left = i < 2 ? (k < 8 ? row.x : row.z) : (k < 8 ? row.y : row.w);
      sum += (double)part(left, k) * part(o.b[column * 4 + k % 8 / 2][k / 8], k);
    }
    r[i] = (float)sum;
  }
  meet(warp);
  for (uint32_t i = 0; i < 4; ++i) {
    c[i] = r[i];
  }
}
