// Weights of 8 and of 4 bits: what is done to them between the ring and the tensor cores. A unit of them has the columns of two or of four
// units of 16-bit elements, and a thread's 16 bytes are what it would multiply of each (ir/src/format.rs: `byte_column`, `half_column`). So
// unpacking makes several units of one, and all code behind it is the same for every format.
//
// Behind a unit whose groups of columns have scales lie those of its 8 rows, row after row, or one that they share.
#pragma once

__device__ constexpr bool has_unpack(uint32_t unpack) { return (AMK_UNPACK >> unpack & 1) != 0; }
#ifdef AMK_FORMAT_SHARES // AMK_SHARES of each format, by its AMK_UNPACK: loops for what no matrix of a format is taken in are left out
constexpr uint32_t FORMAT_SHARES[] = {AMK_FORMAT_SHARES};
__device__ constexpr bool is_taken(uint32_t unpack, uint32_t warp_units) { return (FORMAT_SHARES[unpack] >> warp_units & 1) != 0; }
#endif
__device__ constexpr bool has_scales(uint32_t unpack) { return unpack >= AMK_UNPACK_E4M3_G64; }
__device__ constexpr bool is_half(uint32_t unpack) { return unpack >= AMK_UNPACK_INT4_G128 && unpack != AMK_UNPACK_INT8_K && (!has_unpack(AMK_UNPACK_E4M3_G64_ROW) || unpack != AMK_UNPACK_E4M3_G64_ROW); }
// Whether scale and offset of a unit's rows have factors for each group.
__device__ constexpr bool has_factors(uint32_t unpack) { return unpack == AMK_UNPACK_INT4_K || unpack == AMK_UNPACK_INT8_K; }
// Whether something is subtracted from the sums of a group: what codes are more than they mean, or an offset.
__device__ constexpr bool has_excess(uint32_t unpack) { return (is_half(unpack) && unpack != AMK_UNPACK_MXFP4) || unpack == AMK_UNPACK_INT8_K; }
// Whether the two pairs of a row's threads have groups of their own: 16 columns of a unit of operands.
__device__ constexpr bool has_pair_groups(uint32_t unpack) { return unpack == AMK_UNPACK_INT8_K; }
__device__ constexpr bool is_e4m3(uint32_t unpack) { return unpack == AMK_UNPACK_E4M3 || unpack == AMK_UNPACK_E4M3_G64 || unpack == AMK_UNPACK_E4M3_G64_ROW; }
__device__ constexpr bool has_zeros(uint32_t unpack) { return unpack == AMK_UNPACK_INT4_G128_ZERO; }
// Whether a format is multiplied as integers (digits.cuh): codes in groups that are integers. A step of several sequences has vectors in registers.
constexpr uint32_t INTEGERS = 1u << AMK_UNPACK_INT8_G32 | 1u << AMK_UNPACK_INT4_G128 | 1u << AMK_UNPACK_INT4_G128_ZERO | 1u << AMK_UNPACK_INT4_G32 | 1u << AMK_UNPACK_INT4_K | 1u << AMK_UNPACK_INT8_K;
__device__ constexpr bool has_digits(uint32_t unpack) { return AMK_DTYPE == AMK_DTYPE_F16 && AMK_SEQS == 1 && (INTEGERS >> unpack & 1) != 0; }

// Groups of a row of a unit that a thread multiplies.
__device__ constexpr uint32_t unit_groups(uint32_t unpack) {
  return unpack == AMK_UNPACK_INT4_G32 || unpack == AMK_UNPACK_MXFP4 || unpack == AMK_UNPACK_INT4_K ? 4 : unpack == AMK_UNPACK_INT8_G32 || unpack == AMK_UNPACK_INT8_K ? 2 : 1;
}
// Bytes from a row's scales to those of the next; 0 where the rows share one, which takes 16.
__device__ constexpr uint32_t scale_stride(uint32_t unpack) { return unpack == AMK_UNPACK_E4M3_G64 ? 0 : has_factors(unpack) ? 12 : unit_groups(unpack) * (has_zeros(unpack) ? 4 : unpack == AMK_UNPACK_MXFP4 ? 1 : 2); }
// Bytes of a unit with its scales.
__device__ constexpr uint32_t unit_bytes(uint32_t unpack) {
  return AMK_UNIT_BYTES + (!has_scales(unpack) ? 0 : scale_stride(unpack) == 0 ? 16 : AMK_UNIT_ROWS * scale_stride(unpack));
}
// Words that hold a thread's scales of a unit: of its row, or where groups are multiplied as integers, of its group (digits.cuh).
__device__ constexpr uint32_t scale_words(uint32_t unpack) { return !has_scales(unpack) ? 0 : has_factors(unpack) ? 2 : 1; }
constexpr uint32_t SCALE_WORDS = !SCALED_UNITS ? 0 : has_unpack(AMK_UNPACK_INT4_K) || has_unpack(AMK_UNPACK_INT8_K) ? 2 : 1; // at most, in this kernel

// Base-two logarithm of the units of operands that a unit of a matrix makes.
__device__ __forceinline__ constexpr uint32_t unpacked_log2(uint32_t unpack) { return !MIXED || unpack == AMK_UNPACK_NONE ? 0 : SCALED_UNITS && is_half(unpack) ? 2 : 1; }

// Number of the group whose sums a thread has (digits.cuh). Of units with one group or two, the threads beyond have the same again.
template <uint32_t UNPACK> __device__ __forceinline__ uint32_t own_group(Worker const& w) {
  uint32_t const t = w.thread % 4;
  return has_pair_groups(UNPACK) ? t % 2 * 2 + t / 2 : t % unit_groups(UNPACK);
}

// Where a thread's scales lie behind a unit: those of its row, and of its group.
template <uint32_t UNPACK> struct OwnScales {
  char const* row;
  char const* group;
  __device__ __forceinline__ OwnScales(Worker const& w, char const* unit) {
    row = unit + AMK_UNIT_BYTES + w.thread % 32 / 4 * scale_stride(UNPACK);
    group = row + (has_factors(UNPACK) ? 4 : 0) + (UNPACK == AMK_UNPACK_INT8_G32 || UNPACK == AMK_UNPACK_INT4_G32 || has_factors(UNPACK) ? own_group<UNPACK>(w) * 2 : 0);
  }
  // Loads them for the unit that lies `bytes` behind the one that this was made for.
  __device__ __forceinline__ void load(uint32_t bytes, uint32_t* scales) const {
    if constexpr (has_factors(UNPACK)) {
      scales[0] = stage_load4(row + bytes), scales[1] = stage_load2(group + bytes);
    } else if constexpr (has_scales(UNPACK) && (scale_stride(UNPACK) == 0 || has_zeros(UNPACK) || UNPACK == AMK_UNPACK_MXFP4)) {
      scales[0] = stage_load4(row + bytes);
    } else if constexpr (has_scales(UNPACK)) {
      scales[0] = stage_load2(group + bytes);
    }
  }
};

// What a byte is more than `base`.
__device__ __forceinline__ float byte_value(uint32_t word, uint32_t at, float base) { return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + at)) - (8388608.f + base); }
// Factors of a group: of the scale, and of the offset.
__device__ __forceinline__ float scale_factor(uint32_t const* scales, uint32_t group) { return byte_value(scales[1 + group / 2], group % 2 * 2, 128.f); }
__device__ __forceinline__ float offset_factor(uint32_t const* scales, uint32_t group) { return byte_value(scales[1 + group / 2], group % 2 * 2 + 1, 0.f); }

// The scale of a group.
template <uint32_t UNPACK> __device__ __forceinline__ float group_scale(uint32_t const* scales, uint32_t group) {
  if constexpr (has_factors(UNPACK)) {
    return half_value(scales[0]) * scale_factor(scales, group);
  } else if constexpr (UNPACK == AMK_UNPACK_E4M3_G64) {
    return __uint_as_float(scales[0]);
  } else if constexpr (UNPACK == AMK_UNPACK_MXFP4) { // a byte is an exponent; the least, 2^-127, is taken for zero
    return __uint_as_float((group < 3 ? scales[0] << (23 - 8 * group) : scales[0] >> 1) & 0x7f800000u);
  } else {
    return half_value(group % 2 == 0 ? scales[group / 2] : scales[group / 2] >> 16);
  }
}

// The scales of two neighbouring rows, for results whose rows a thread has in pairs (batch_products.cuh): words of both, those of lanes' rows 2t and
// 2t + 1, and one row's of them. Rows whose scale is half a word share the word.
__device__ constexpr uint32_t scale_pair_words(uint32_t unpack) { return !has_scales(unpack) ? 0 : scale_stride(unpack) == 0 ? 1 : scale_stride(unpack) / 2; }
template <uint32_t UNPACK> __device__ __forceinline__ void scale_pair_load(Worker const& w, char const* unit, uint32_t* scales) {
  char const* at = unit + AMK_UNIT_BYTES + w.thread % 4 * 2 * scale_stride(UNPACK);
  if constexpr (has_factors(UNPACK)) {
#pragma unroll
    for (uint32_t i = 0; i < scale_pair_words(UNPACK); i += 2) {
      uint2 const both = stage_load8(at + 4 * i);
      scales[i] = both.x, scales[i + 1] = both.y;
    }
  } else if constexpr (scale_pair_words(UNPACK) == 4) {
    uint4 const all = stage_load(at);
    scales[0] = all.x, scales[1] = all.y, scales[2] = all.z, scales[3] = all.w;
  } else if constexpr (scale_pair_words(UNPACK) == 2) {
    uint2 const both = stage_load8(at);
    scales[0] = both.x, scales[1] = both.y;
  } else {
    scales[0] = stage_load4(at);
  }
}
template <uint32_t UNPACK> __device__ __forceinline__ uint32_t const* pair_row(uint32_t const* scales, uint32_t row) { return scales + row * scale_stride(UNPACK) / 4; }
template <uint32_t UNPACK> __device__ __forceinline__ float pair_scale(uint32_t const* scales, uint32_t row, uint32_t group) {
  return scale_stride(UNPACK) == 2 ? group_scale<UNPACK>(scales, row) : group_scale<UNPACK>(pair_row<UNPACK>(scales, row), group);
}

// What sums of codes in lower and in upper halves of bytes are multiplied with (see unpack8).
constexpr float LOW_CODE = 16777216.f, HIGH_CODE = 1048576.f;
// The same of sums of e2m1 (see unpack_e2m1).
constexpr float E2M1_CODE = 16384.f;
// What sums of a format's codes are multiplied with: of those in lower and in upper halves of bytes, where these differ.
__device__ constexpr float low_code(uint32_t unpack) { return !is_half(unpack) ? 1.f : unpack == AMK_UNPACK_MXFP4 ? E2M1_CODE : LOW_CODE; }
// The offset of a group, or what its codes are more than they mean, times their scale: an eighth of it where that is 8 for all.
template <uint32_t UNPACK> __device__ __forceinline__ float scaled_excess(uint32_t const* scales, float scale, uint32_t group) {
  if constexpr (has_factors(UNPACK)) {
    return upper_half_value(scales[0]) * offset_factor(scales, group);
  } else if constexpr (has_zeros(UNPACK)) {
    return scale * upper_half_value(scales[0]);
  } else {
    return scale;
  }
}
// What sums of the vector's elements are multiplied with before they meet it.
__device__ constexpr float excess_unit(uint32_t unpack) { return has_zeros(unpack) || has_factors(unpack) ? 1.f : 8.f; }

#if AMK_DTYPE == AMK_DTYPE_F16
// Four elements as two pairs of f16. Exact. Zero is zero, as padding must be.
template <uint32_t UNPACK> __device__ __forceinline__ uint2 unpack4(uint32_t v) {
  if constexpr (is_e4m3(UNPACK)) {
    return e4m3_halves(v);
  } else {
    // With its sign bit flipped an element is 128 more, and 0x6400 | u is 1024 + u in f16.
    uint32_t const u = v ^ 0x80808080u, most = 0x64806480u; // 1152 twice
    return make_uint2(halves_minus(__byte_perm(u, 0x64646464u, 0x4140), most), halves_minus(__byte_perm(u, 0x64646464u, 0x4342), most));
  }
}
// Eight elements of 4 bits as four pairs. Codes are operands as they are: bits 0 to 3 of a half are a small (subnormal) f16, code * 2^-24, and
// bits 4 to 7 are code * 2^-20. What a code is more than it means is subtracted from their sums (groups_multiply).
__device__ __forceinline__ uint4 unpack8(uint32_t v) {
  uint32_t const low = 0x000f000fu, high = 0x00f000f0u, above = v >> 8;
  return make_uint4(v & low, v & high, above & low, above & high);
}
// Eight e2m1 as four pairs, in nine instructions. Exponent and mantissa are at bits 9 to 11 of a half and the sign at bit 15, so a half is the
// code's value * 2^-14, and 0.5 is subnormal. Two pairs are masked out of the word, as it lies and shifted; what is left of it is turned into
// another such word (code_bits in ir/src/format.rs).
__device__ __forceinline__ uint32_t e2m1_rest(uint32_t v) {
  uint32_t const shifted = v >> 3, turned = v >> 1 | v << 31, mask = 0x0e0e0e0eu;
#ifdef __CUDA_ARCH__
  uint32_t r; // bits of the one or of the other: a single instruction, of which the compiler makes two
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(shifted), "r"(turned));
  return r;
#else
  return (shifted & mask) | (turned & ~mask);
#endif
}
__device__ __forceinline__ uint4 unpack_e2m1(uint32_t v) {
  uint32_t const mask = 0x8e008e00u, rest = e2m1_rest(v);
  return make_uint4(v & mask, v << 8 & mask, rest & mask, rest << 8 & mask);
}
// A thread's 16 bytes of the i-th unit of operands, of its 16 bytes of a unit.
template <uint32_t UNPACK> __device__ __forceinline__ uint4 unpack_operand(uint4 v, uint32_t i) {
  if constexpr (UNPACK == AMK_UNPACK_NONE) {
    return v;
  } else if constexpr (is_half(UNPACK)) {
    uint32_t const word = i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    return has_excess(UNPACK) ? unpack8(word) : unpack_e2m1(word);
  } else {
    uint2 const a = unpack4<UNPACK>(i == 0 ? v.x : v.z), b = unpack4<UNPACK>(i == 0 ? v.y : v.w);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
}
#else
template <uint32_t> __device__ __forceinline__ uint4 unpack_operand(uint4 v, uint32_t) { return v; }
#endif
