// Products of a warp on the tensor cores, and what makes their operands.
#pragma once

// 2 to the power of x. Scores are scaled by log2(e), so that this is the softmax's exponential.
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// c += a . b for a 16x16 a and a 16x8 b.
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
// Transposes an 8x8 matrix: a lane has two elements of row lane / 4 before, two of that column after.
__device__ __forceinline__ uint32_t transposed(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ float2 half_values(uint32_t v) {
  float2 r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(r.x), "=f"(r.y) : "r"(v));
  return r;
}
// Loads four 8x8 matrices of 16-bit elements from shared memory, transposed. `row`: of lane l, row l % 8 of matrix l / 8.
__device__ __forceinline__ uint4 matrices_transposed(char const* row) {
  uint4 a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "r"(shared_address(row)) : "memory");
  return a;
}
// The same of two matrices, the rows of the second one from lanes 8 to 15.
__device__ __forceinline__ uint2 two_matrices_transposed(char const* row) {
  uint2 a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a.x), "=r"(a.y) : "r"(shared_address(row)) : "memory");
  return a;
}
