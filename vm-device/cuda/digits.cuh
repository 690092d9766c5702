// Products of 4-bit codes in groups of 128 columns, as integers: the tensor cores multiply bytes at twice the rate of 16-bit floats, and codes become
// bytes in fewer instructions than floats.
//
// Elements of a group of the vector are scaled and rounded to integers of 15 bits and a sign, which are staged as two digits of a byte: high * 256 + low,
// each of -128..127. A unit of codes has one group of 8 rows. Sums are exact up to the end of the group, where they are multiplied by its scales and
// added to those of the groups before.
//
// Of the left operand's 16 rows, the first 8 are the codes in the lower halves of a thread's bytes, and the others those in the upper halves, of the
// same 8 rows. So of the results, columns with digits of `low` elements, those that go with lower halves, are meant in the first 8 rows and columns
// with digits of `high` elements in the others; the rest mixes the wrong ones and is never read.
#pragma once

// Whether a format is multiplied so. A step of several sequences has vectors in registers (batch_products.cuh).
__device__ constexpr bool has_digits(uint32_t unpack) { return AMK_DTYPE == AMK_DTYPE_F16 && AMK_SEQS == 1 && (unpack == AMK_UNPACK_INT4_G128 || unpack == AMK_UNPACK_INT4_G128_ZERO); }
constexpr bool SOME_DIGITS = has_digits(AMK_UNPACK_INT4_G128) && (has_unpack(AMK_UNPACK_INT4_G128) || has_unpack(AMK_UNPACK_INT4_G128_ZERO));

// A group as it is staged: planes of 64 bytes with the high and the low digits of the low elements, then of the high ones, 16 bytes for each thread of
// four, a word for each word of its codes; then its factor and its sum.
constexpr uint32_t DIGIT_GROUP = 128, DIGIT_PLANE = 64, DIGIT_FACTOR = 4 * DIGIT_PLANE, DIGIT_BYTES = DIGIT_FACTOR + 16;

// The group's scale is this times a power of two: the greatest element becomes at most 127 * 256, so that its high digit fits when it is rounded up.
constexpr float DIGIT_SCALE = 1.984375f;
constexpr uint32_t EXPONENTS = 0x7f800000u, DIGIT_SCALE_BITS = 267u << 23 | 0x7e0000, DIGIT_LEAST = 14 << 23; // less an exponent it is the scale

// A float with an integer of 22 bits in its mantissa: 1.5 * 2^23 and as much more.
constexpr uint32_t WHOLE_BITS = 0x4b400000u;
constexpr float WHOLE = 12582912.f;

// The greater magnitude; no number if one is none.
__device__ __forceinline__ float magnitudes_max(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(fabsf(a)), "f"(fabsf(b)));
  return r;
#else
  return !(fabsf(a) <= fabsf(b)) ? fabsf(a) : fabsf(b);
#endif
}

// All lanes of a warp stage a group, 4 consecutive elements each; `group`: its place. Lanes of a pair, 2 apart, hold the first and the second four of
// the elements that go with a word of codes. Lower halves are elements 0 and 1 of both, and upper halves 2 and 3 (half_column in ir/src/format.rs).
// NaNs and infinities make the group's factor, and so every sum, no number.
__device__ __forceinline__ void stage_digits(char* group, uint32_t lane, float4 v) {
  uint32_t const found = __reduce_max_sync(~0u, __float_as_uint(magnitudes_max(magnitudes_max(v.x, v.y), magnitudes_max(v.z, v.w)))), most = (found > DIGIT_LEAST ? found : DIGIT_LEAST) & EXPONENTS;
  float const scale = __uint_as_float(DIGIT_SCALE_BITS - most);
  constexpr float MORE = WHOLE + 128.f; // half a high digit more rounds it, and makes the low one what it is with its sign flipped
  uint32_t const x = __float_as_uint(fmaf(v.x, scale, MORE)), y = __float_as_uint(fmaf(v.y, scale, MORE)), z = __float_as_uint(fmaf(v.z, scale, MORE)), t = __float_as_uint(fmaf(v.w, scale, MORE));
  bool const second = (lane & 2) != 0;
  uint32_t const front = __byte_perm(x, y, 0x5410), back = __byte_perm(z, t, 0x5410), mine = second ? back : front;
  uint32_t const other = __shfl_xor_sync(~0u, second ? front : back, 2);
  char* const at = group + (second ? 2 * DIGIT_PLANE : 0) + ((lane & 1) | (lane >> 1 & 2)) * 16 + lane / 8 * 4;
  *(uint32_t*)at = __byte_perm(mine, other, second ? 0x3715 : 0x7351);
  *(uint32_t*)(at + DIGIT_PLANE) = __byte_perm(mine, other, second ? 0x2604 : 0x6240) ^ 0x80808080u;
  float const factor = most == EXPONENTS ? __uint_as_float(0x7fc00000u) : __uint_as_float(most - (13 << 23)) * (1.f / DIGIT_SCALE);
  if constexpr (has_unpack(AMK_UNPACK_INT4_G128_ZERO)) {
    int const sum = (int)__reduce_add_sync(~0u, x + y + z + t - 4 * (WHOLE_BITS + 128));
    if (lane == 0) {
      *(float2*)(group + DIGIT_FACTOR) = make_float2(factor, factor * (float)sum);
    }
  } else if (lane == 0) {
    *(float*)(group + DIGIT_FACTOR) = factor;
  }
}

// A thread's part of a staged group: its column's digits, for two products, and the group's factor and sum.
struct DigitGroup {
  uint4 digits;
  float factor, sum;
};
template <uint32_t UNPACK> __device__ __forceinline__ DigitGroup digits_load(Worker const& w, char const* group) {
  uint32_t const lane = w.thread % 32;
  DigitGroup v;
  v.digits = stage_load(group + (lane / 4 * DIGIT_PLANE + lane % 4 * 16) % DIGIT_FACTOR); // columns 4 to 7 are those of 0 to 3 again
  if constexpr (has_zeros(UNPACK)) {
    uint2 const both = stage_load8(group + DIGIT_FACTOR);
    v.factor = __uint_as_float(both.x), v.sum = __uint_as_float(both.y);
  } else {
    v.factor = __uint_as_float(stage_load4(group + DIGIT_FACTOR)), v.sum = 0.f;
  }
  return v;
}

#ifdef __CUDA_ARCH__
// c += a . b for a 16x32 a and a 32x8 b of bytes with signs.
__device__ __forceinline__ void mma_bytes(uint32_t (&c)[4], uint4 a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#endif

// Sixteen codes as bytes with signs: 16 times what they mean (8 less than they are), those of lower halves in x and z.
constexpr float DIGIT_CODE = 1.f / 16;
__device__ __forceinline__ uint32_t upper_bytes(uint32_t v) {
  uint32_t const mask = 0xf0f0f0f0u, flip = 0x80808080u;
#ifdef __CUDA_ARCH__
  uint32_t r; // a single instruction, of which the compiler makes two
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(v), "r"(mask), "r"(flip));
  return r;
#else
  return (v & mask) ^ flip;
#endif
}
__device__ __forceinline__ uint4 code_bytes(uint32_t first, uint32_t second) {
  return make_uint4(upper_bytes(first << 4), upper_bytes(first), upper_bytes(second << 4), upper_bytes(second));
}

// Multiplies N units by their groups, unit n into a chain of tile n / EACH. A thread adds to c[0][0] and c[0][1] the results of its two columns, in the
// rows that are meant; c[0][2] is what zero points are more than 8.
template <uint32_t UNPACK, uint32_t EACH, uint32_t N, typename TileSums, typename Group>
__device__ __forceinline__ void digits_multiply(Worker const& w, TileSums& sums, Group const (&vector)[EACH], uint4 const* weights, uint32_t const* scales) {
  float const high = w.thread & 1 ? 1.f : 0.f, low = 1.f - high;
  uint32_t c[N][4];
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    c[n][0] = c[n][1] = c[n][2] = c[n][3] = WHOLE_BITS;
    mma_bytes(c[n], code_bytes(weights[n].x, weights[n].y), vector[n % EACH].digits.x, vector[n % EACH].digits.y);
  }
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    mma_bytes(c[n], code_bytes(weights[n].z, weights[n].w), vector[n % EACH].digits.z, vector[n % EACH].digits.w);
  }
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    float(&sum)[4] = sums[n / EACH].c[0];
    uint32_t const* const mine = scales + n * scale_words(UNPACK);
    float const plain = group_scale<UNPACK>(mine, 0), scale = plain * vector[n % EACH].factor;
    // Multiplied by 0 or 1, which takes no instruction to choose.
    float const first = fmaf(__uint_as_float(c[n][2]), high, fmaf(__uint_as_float(c[n][0]), low, -WHOLE));
    float const second = fmaf(__uint_as_float(c[n][3]), high, fmaf(__uint_as_float(c[n][1]), low, -WHOLE));
    sum[0] = fmaf(scale, first, sum[0]), sum[1] = fmaf(scale, second, sum[1]);
    if constexpr (has_zeros(UNPACK)) {
      sum[2] = fmaf(scaled_excess<UNPACK>(mine, plain, 0) - 8.f * plain, vector[n % EACH].sum, sum[2]);
    }
  }
}

// A thread's part of a row's sum, whose four threads' parts are to be added.
template <uint32_t UNPACK> __device__ __forceinline__ float digits_sum(Worker const& w, float const (&c)[4]) {
  float const sum = (w.thread & 2) != 0 ? 0.f : fmaf(c[0], 256.f, c[1]); // columns 4 to 7 say nothing new
  constexpr float ONE = DIGIT_CODE * VECTOR_FACTOR; // as if the vector had been multiplied by that
  return has_zeros(UNPACK) && (w.thread & 3) == 0 ? fmaf(sum, ONE, -VECTOR_FACTOR * c[2]) : sum * ONE;
}
