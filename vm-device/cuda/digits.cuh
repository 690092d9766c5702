// Products of integer codes in groups of columns, as integers: the tensor cores multiply bytes at twice the rate of 16-bit floats, codes of 8 bits are
// operands as they are, and codes of 4 bits become bytes in fewer instructions than floats.
//
// The elements of the vector that go with a unit's columns are scaled and rounded to integers of 15 bits and a sign, which are staged as two digits of a
// byte: high * 256 + low, each of -128..127. Sums are exact up to the end of a group of columns, where they are multiplied by its scales and added to
// those of the groups before.
//
// Of a product's left operand, the first 8 of 16 rows are a unit's 8 rows by one half of its columns, and the others the same rows by the other half. Of
// the right operand, pairs of columns hold the high and the low digits of the vector, where they go with a group and with its half of the rows; the sums
// that mix others are never read. So that a thread has the sums of one group:
//
//   groups of a unit          pair of columns n, and of threads, is                              products of a unit
//   1, of 128 codes           half n % 2; the others are the same again                          2, one after the other
//   4, of 32 codes            half n % 2 in product n / 2, and zeros in the other: group n       2
//   2, of 32 bytes            half n % 2; the others are the same again                          1
//   4, of 16 bytes            half n % 2, zeros for the threads that have not half n / 2 of it   1
#pragma once

constexpr bool SOME_DIGITS = (AMK_UNPACK & INTEGERS) != 0 && has_digits(AMK_UNPACK_INT4_G128);
constexpr bool BYTE_DIGITS = has_unpack(AMK_UNPACK_INT8_G32) || has_unpack(AMK_UNPACK_INT8_K), HALF_DIGITS = (AMK_UNPACK & INTEGERS & ~(1u << AMK_UNPACK_INT8_G32 | 1u << AMK_UNPACK_INT8_K)) != 0;

// The format of a matrix that has digits: in a kernel with one such format it is known when the kernel is compiled.
__device__ constexpr uint32_t only_digits(uint32_t formats) {
  uint32_t number = 0;
  for (; formats > 1; formats >>= 1) {
    ++number;
  }
  return number;
}
constexpr uint32_t DIGIT_FORMATS = AMK_UNPACK & INTEGERS;
__device__ __forceinline__ uint32_t digit_format(uint32_t unpack) { return (DIGIT_FORMATS & (DIGIT_FORMATS - 1)) == 0 ? only_digits(DIGIT_FORMATS) : unpack; }

// Whether sums of the vector's elements are needed: for zero points, and for offsets.
__device__ constexpr bool has_digit_sums(uint32_t unpack) { return has_zeros(unpack) || has_factors(unpack); }
constexpr bool DIGIT_SUMS = has_unpack(AMK_UNPACK_INT4_G128_ZERO) || has_unpack(AMK_UNPACK_INT4_K) || has_unpack(AMK_UNPACK_INT8_K);
// Groups of a unit's row.
__device__ constexpr uint32_t digit_groups(uint32_t unpack) { return unit_groups(unpack) * (has_pair_groups(unpack) ? 2 : 1); }

// The part of the vector that goes with a unit, as it is staged: 8 bytes for each word of a thread's codes or, of bytes, pair of words, of which there are
// `digit_parts`; for each digit; and for each of four threads. Then for each group the vector's factor and the sum of the group's elements.
__device__ constexpr uint32_t digit_parts(uint32_t unpack) { return is_half(unpack) ? 4 : 2; }
constexpr uint32_t DIGIT_PART = 64;
__device__ constexpr uint32_t digit_bytes(uint32_t unpack) { return digit_parts(unpack) * DIGIT_PART + (has_factors(unpack) ? 32 : 16); }
__device__ __forceinline__ uint32_t digit_place(uint32_t part, uint32_t digit, uint32_t thread) { return part * DIGIT_PART + digit * 32 + thread * 8; }

// The vector's scale is this times a power of two: the greatest element becomes at most 127 * 256, so that its high digit fits when it is rounded up.
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

// The greatest magnitude of a unit's elements, as bits. A warp has one unit of codes of 4 bits, and two of bytes.
__device__ __forceinline__ uint32_t unit_magnitude(uint32_t lane, bool bytes, uint32_t mine) {
  if (!BYTE_DIGITS) {
    return __reduce_max_sync(~0u, mine);
  }
  bool const upper = lane >= 16;
  uint32_t const first = __reduce_max_sync(~0u, upper ? 0 : mine), second = __reduce_max_sync(~0u, upper ? mine : 0);
  uint32_t const one = upper ? second : first;
  return HALF_DIGITS && !bytes ? (first > second ? first : second) : one;
}

// How a unit's part of the vector is staged: whether its codes are bytes, how many groups need their sums, and its staged bytes.
struct DigitForm {
  bool bytes;
  uint32_t sums, size;
};
__device__ __forceinline__ DigitForm digit_form(uint32_t unpack) {
  uint32_t const format = digit_format(unpack);
  return DigitForm{BYTE_DIGITS && (!HALF_DIGITS || !is_half(format)), !DIGIT_SUMS ? 0u : has_factors(format) ? 4u : has_zeros(format) ? 1u : 0u, digit_bytes(format)};
}

// The sum over the lanes of a group, in all of them: 32, 8 or 4.
__device__ __forceinline__ int group_sum(DigitForm form, int sum) {
  constexpr bool FACTORS = has_unpack(AMK_UNPACK_INT4_K) || has_unpack(AMK_UNPACK_INT8_K);
  if (has_unpack(AMK_UNPACK_INT4_G128_ZERO) && (!FACTORS || form.sums == 1)) {
    return __reduce_add_sync(~0u, sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
  int const other = has_unpack(AMK_UNPACK_INT4_K) ? __shfl_xor_sync(~0u, sum, 4) : 0;
  return form.bytes ? sum : sum + other;
}

// All lanes of a warp stage 4 consecutive elements of the vector in each of N turns, if they are before `end`; the turns side by side, so that their
// exchanges overlap. `unit`: the lane's first; `stride`: bytes to that of the next turn; `e`: the lane's first element; `turn`: elements of a turn.
// Of codes of 4 bits, lanes of a pair, 2 apart, hold the first and the second four of the elements that go with a word. Lower halves are elements 0 and 1
// of both, and upper halves 2 and 3 (half_column in ir/src/format.rs). Of bytes a lane's elements go with one word (byte_column).
// NaNs and infinities make the unit's factor, and so every sum, no number.
template <uint32_t N>
__device__ __forceinline__ void stage_digits(char* unit, uint32_t stride, uint32_t lane, DigitForm form, uint32_t e, uint32_t turn, uint32_t end, float4 const (&v)[N]) {
  constexpr float MORE = WHOLE + 128.f; // half a high digit more rounds it, and makes the low one what it is with its sign flipped
  asm volatile("" : "+r"(lane)); // what follows from it is worked out here, and held in no registers while the vector is waited for
  bool const second = (lane & 2) != 0;
  uint32_t found[N], front[N], back[N], other[N];
  int sum[N];
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    found[n] = unit_magnitude(lane, form.bytes, __float_as_uint(magnitudes_max(magnitudes_max(v[n].x, v[n].y), magnitudes_max(v[n].z, v[n].w))));
  }
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    found[n] = (found[n] > DIGIT_LEAST ? found[n] : DIGIT_LEAST) & EXPONENTS;
    float const scale = __uint_as_float(DIGIT_SCALE_BITS - found[n]);
    uint32_t const x = __float_as_uint(fmaf(v[n].x, scale, MORE)), y = __float_as_uint(fmaf(v[n].y, scale, MORE));
    uint32_t const z = __float_as_uint(fmaf(v[n].z, scale, MORE)), t = __float_as_uint(fmaf(v[n].w, scale, MORE));
    front[n] = __byte_perm(x, y, 0x5410), back[n] = __byte_perm(z, t, 0x5410);
    other[n] = HALF_DIGITS ? __shfl_xor_sync(~0u, second ? front[n] : back[n], 2) : 0;
    sum[n] = (int)(x + y + z + t - 4 * (WHOLE_BITS + 128));
  }
  if constexpr (DIGIT_SUMS) {
#pragma unroll
    for (uint32_t n = 0; n < N; ++n) {
      sum[n] = group_sum(form, sum[n]);
    }
  }
  uint32_t const part = form.bytes ? lane / 8 % 2 : lane / 8, group = form.sums == 1 ? 0 : form.bytes ? lane % 16 / 4 : lane / 8;
  uint32_t const highs = form.bytes ? 0x7531 : second ? 0x3715 : 0x7351, lows = form.bytes ? 0x6420 : second ? 0x2604 : 0x6240;
  char* const place = unit + digit_place(part, 0, (lane & 1) | (lane >> 1 & 2)) + (lane & 2) * 2;
  char* const behind = unit + digit_parts(form.bytes ? AMK_UNPACK_INT8_K : AMK_UNPACK_INT4_K) * DIGIT_PART + (DIGIT_SUMS && form.sums != 0 ? group * 8 : 0);
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    bool const there = e + n * turn < end;
    uint32_t const mine = form.bytes || !second ? front[n] : back[n], beside = form.bytes ? back[n] : other[n];
    store_if(there, place + n * stride, __byte_perm(mine, beside, highs));
    store_if(there, place + n * stride + digit_place(0, 1, 0), __byte_perm(mine, beside, lows) ^ 0x80808080u);
    float const factor = found[n] == EXPONENTS ? __uint_as_float(0x7fc00000u) : __uint_as_float(found[n] - (13 << 23)) * (1.f / DIGIT_SCALE);
    bool const first = there && lane % 4 == 0; // lanes with the same store the same
    store_if(first, behind + n * stride, __float_as_uint(factor));
    if (DIGIT_SUMS) {
      store_if(first && form.sums != 0, behind + n * stride + 4, __float_as_uint(factor * (float)sum[n]));
    }
  }
}

// A thread's part of what is staged: its column's digits for each product, the vector's factor, and the sum of its group.
template <uint32_t UNPACK> struct DigitGroup {
  static constexpr uint32_t PRODUCTS = digit_parts(UNPACK) / 2;
  uint2 digits[PRODUCTS];
  float factor, sum;
};
template <uint32_t UNPACK> __device__ __forceinline__ DigitGroup<UNPACK> digits_load(Worker const& w, char const* unit) {
  constexpr uint32_t PRODUCTS = DigitGroup<UNPACK>::PRODUCTS;
  constexpr bool APART = digit_groups(UNPACK) == 4; // columns have zeros where they do not go with their group
  uint32_t const lane = w.thread % 32, column = lane / 4, half = column / 2 % 2, upper = column / 4, t = lane % 4;
  DigitGroup<UNPACK> v;
  if constexpr (PRODUCTS == 2 && APART) {
    uint2 const own = stage_load8(unit + digit_place(column / 2, column % 2, t));
    v.digits[0] = upper == 0 ? own : make_uint2(0, 0), v.digits[1] = upper == 0 ? make_uint2(0, 0) : own;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < PRODUCTS; ++i) {
      v.digits[i] = stage_load8(unit + digit_place(2 * i + half, column % 2, t));
    }
    if (APART && upper != t / 2) {
      v.digits[0] = make_uint2(0, 0);
    }
  }
  char const* const behind = unit + digit_parts(UNPACK) * DIGIT_PART;
  if constexpr (has_digit_sums(UNPACK)) {
    uint2 const both = stage_load8(behind + own_group<UNPACK>(w) * 8);
    v.factor = __uint_as_float(both.x), v.sum = __uint_as_float(both.y);
  } else {
    v.factor = __uint_as_float(stage_load4(behind)), v.sum = 0.f;
  }
  return v;
}

#ifdef __CUDA_ARCH__
// c += a . b for a 16x32 a and a 32x8 b of bytes; those of b have signs, and those of a if SIGNED.
template <bool SIGNED> __device__ __forceinline__ void mma_bytes(uint32_t (&c)[4], uint4 a, uint2 b) {
  if constexpr (SIGNED) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  } else {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
  }
}
#endif

// Codes of 4 bits as bytes, times 16: with signs what they mean, 8 less than they are; or, where a group has an offset, as they are.
constexpr float HALF_CODE = 1.f / 16;
__device__ constexpr bool has_signs(uint32_t unpack) { return unpack != AMK_UNPACK_INT4_K; }
template <bool SIGNED> __device__ __forceinline__ uint32_t upper_bytes(uint32_t v) {
  uint32_t const mask = 0xf0f0f0f0u, flip = 0x80808080u;
  if constexpr (!SIGNED) {
    return v & mask;
  }
#ifdef __CUDA_ARCH__
  uint32_t r; // a single instruction, of which the compiler makes two
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(v), "r"(mask), "r"(flip));
  return r;
#else
  return (v & mask) ^ flip;
#endif
}
// A thread's part of the left operand of product `i`, of its 16 bytes of a unit: of the first word of codes x and z.
template <uint32_t UNPACK> __device__ __forceinline__ uint4 code_bytes(uint4 v, uint32_t i) {
  if constexpr (!is_half(UNPACK)) {
    return make_uint4(v.x, v.z, v.y, v.w);
  } else {
    constexpr bool SIGNED = has_signs(UNPACK);
    uint32_t const first = i == 0 ? v.x : v.z, second = i == 0 ? v.y : v.w;
    return make_uint4(upper_bytes<SIGNED>(first << 4), upper_bytes<SIGNED>(second << 4), upper_bytes<SIGNED>(first), upper_bytes<SIGNED>(second));
  }
}

// What a group's sums have too much of, for each of the vector's elements: offsets, and what zero points are not 8. `scale`: the group's.
template <uint32_t UNPACK> __device__ __forceinline__ float digits_excess(uint32_t const* scales, float scale) {
  return scaled_excess<UNPACK>(scales, scale, 0) - (has_zeros(UNPACK) ? 8.f * scale : 0.f);
}

// Multiplies N units by their parts of the vector, unit n into a chain of tile n / EACH. A thread adds to c[0][0] and c[0][1] the results of its two
// columns, in the rows that are meant; c[0][2] is what they have too much of.
template <uint32_t UNPACK, uint32_t EACH, uint32_t N, typename TileSums, typename Group>
__device__ __forceinline__ void digits_multiply(Worker const& w, TileSums& sums, Group const (&vector)[EACH], uint4 const* weights, uint32_t const* scales) {
  float const high = w.thread & 1 ? 1.f : 0.f, low = 1.f - high;
  uint32_t c[N][4];
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    c[n][0] = c[n][1] = c[n][2] = c[n][3] = WHOLE_BITS;
    mma_bytes<has_signs(UNPACK)>(c[n], code_bytes<UNPACK>(weights[n], 0), vector[n % EACH].digits[0]);
  }
#pragma unroll
  for (uint32_t n = 0; n < N * (DigitGroup<UNPACK>::PRODUCTS - 1); ++n) {
    mma_bytes<has_signs(UNPACK)>(c[n], code_bytes<UNPACK>(weights[n], 1), vector[n % EACH].digits[DigitGroup<UNPACK>::PRODUCTS - 1]);
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
    if constexpr (has_digit_sums(UNPACK)) {
      sum[2] = fmaf(digits_excess<UNPACK>(mine, plain), vector[n % EACH].sum, sum[2]);
    }
  }
}

// Threads of a row whose parts are added: where a unit has one group or two, the other two threads have the same again.
__device__ constexpr uint32_t digit_threads(uint32_t unpack) { return digit_groups(unpack) < 4 ? 2 : 4; }
// A thread's part of a row's sum.
template <uint32_t UNPACK> __device__ __forceinline__ float digits_sum(Worker const& w, float const (&c)[4]) {
  constexpr float ONE = (is_half(UNPACK) ? HALF_CODE : 1.f) * VECTOR_FACTOR; // as if the vector had been multiplied by that
  constexpr uint32_t GROUPS = digit_groups(UNPACK);
  float const sum = fmaf(c[0], 256.f, c[1]) * ONE;
  float const excess = (w.thread & digit_threads(UNPACK) - 1) < GROUPS ? -VECTOR_FACTOR : 0.f;
  return has_digit_sums(UNPACK) ? fmaf(c[2], excess, sum) : sum;
}
