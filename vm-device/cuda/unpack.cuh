// Weights of 8 bits: what is done to them between the ring and the tensor cores. A unit of 8-bit elements has the columns of two units of
// 16-bit elements, and a thread's 16 bytes are what it would multiply of the first and of the second (ir/src/format.rs: `byte_column`). So
// unpacking makes two units of one, and all code behind it is the same for every format.
#pragma once

__device__ constexpr bool has_unpack(uint32_t unpack) { return (AMK_UNPACK >> unpack & 1) != 0; }
constexpr bool MIXED = AMK_UNPACK != 1u << AMK_UNPACK_NONE; // some matrix is unpacked

// Base-two logarithm of the units of operands that a unit of a matrix makes.
__device__ __forceinline__ uint32_t unpacked_log2(uint32_t unpack) { return MIXED && unpack != AMK_UNPACK_NONE ? 1 : 0; }

#if AMK_DTYPE == AMK_DTYPE_F16
// Four elements as two pairs of f16. Exact. Zero is zero, as padding must be.
template <uint32_t UNPACK> __device__ __forceinline__ uint2 unpack4(uint32_t v) {
  uint2 r;
  if constexpr (UNPACK == AMK_UNPACK_E4M3) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }" : "=r"(r.x), "=r"(r.y) : "r"(v));
  } else {
    // With its sign bit flipped an element is 128 more, and 0x6400 | u is 1024 + u in f16.
    uint32_t const u = v ^ 0x80808080u, most = 0x64806480u; // 1152 twice
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r.x) : "r"(__byte_perm(u, 0x64646464u, 0x4140)), "r"(most));
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r.y) : "r"(__byte_perm(u, 0x64646464u, 0x4342)), "r"(most));
  }
  return r;
}
// A thread's 16 bytes of a unit as its 16 bytes of the first and of the second unit of operands.
template <uint32_t UNPACK> __device__ __forceinline__ void unpack16(uint4 v, uint4 (&out)[2]) {
  uint2 const a = unpack4<UNPACK>(v.x), b = unpack4<UNPACK>(v.y), c = unpack4<UNPACK>(v.z), d = unpack4<UNPACK>(v.w);
  out[0] = make_uint4(a.x, a.y, b.x, b.y);
  out[1] = make_uint4(c.x, c.y, d.x, d.y);
}
#endif
