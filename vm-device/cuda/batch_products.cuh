// Products of a unit of weights with the vectors of several sequences, in every format: which elements of its sequence's vector a thread holds, how
// they are operands, and how a warp multiplies its units of a tile by them.
//
// Of the A operand's 16 rows 8 are the high halves of the sequences' elements and 8 the low halves; the 8 rows of a unit are the columns of the B
// operand. A unit of codes makes two or four of operands (unpack_operand). A warp takes the units of its vectors in groups as long as the longest
// unit of the kernel: group w, w + 8, ... of a part. So a thread's place in the vectors is the same for all formats.
#pragma once

#if AMK_SEQS > 1
// Base-two logarithms: of the units of operands in a group (above), and of those whose vector elements are summed together (SeqInput::sum).
constexpr bool HALF_CODES = MIXED && (has_unpack(AMK_UNPACK_INT4_G128) || has_unpack(AMK_UNPACK_INT4_G128_ZERO) || has_unpack(AMK_UNPACK_INT4_G32) || has_unpack(AMK_UNPACK_INT4_K) || has_unpack(AMK_UNPACK_MXFP4));
constexpr bool EXCESS_CODES = HALF_CODES && (has_unpack(AMK_UNPACK_INT4_G128) || has_unpack(AMK_UNPACK_INT4_G128_ZERO) || has_unpack(AMK_UNPACK_INT4_G32) || has_unpack(AMK_UNPACK_INT4_K));
constexpr uint32_t GROUP_LOG2 = HALF_CODES ? 2 : MIXED ? 1 : 0, GROUP_MASK = (1u << GROUP_LOG2) - 1;
constexpr uint32_t SUM_LOG2 = has_unpack(AMK_UNPACK_INT4_G32) || has_unpack(AMK_UNPACK_INT4_K) ? 0 : 2;

// Distance from a warp's group to its next, and from its first unit of operands to number `unit`.
constexpr uint32_t STEP_UNITS = AMK_WARPS << GROUP_LOG2, STEP_ELEMENTS = STEP_UNITS * UNIT_COLS, GROUP_ELEMENTS = UNIT_COLS << GROUP_LOG2;
__device__ __forceinline__ constexpr uint32_t unit_step(uint32_t unit) { return (unit >> GROUP_LOG2) * STEP_UNITS + (unit & GROUP_MASK); }
__device__ __forceinline__ constexpr uint32_t unit_elements(uint32_t unit) { return (unit >> GROUP_LOG2) * STEP_ELEMENTS + (unit & GROUP_MASK) * UNIT_COLS; }
// Whether neither a group nor a head ends inside the other, and a warp's groups begin at the same place of a head: then a unit is at a fixed distance
// from the first, in heads too. Else its head is worked out.
constexpr bool SAME_PLACE = STEP_ELEMENTS % AMK_HEAD_DIM == 0 && (GROUP_ELEMENTS % AMK_HEAD_DIM == 0 || AMK_HEAD_DIM % GROUP_ELEMENTS == 0);
// Words before the head of an element, of WORDS for each head, and the element's place in its head. `first` is of the first unit, the element of `unit`.
template <uint32_t WORDS> __device__ __forceinline__ constexpr uint32_t head_words(uint32_t first, uint32_t unit) {
  uint32_t const group = (unit >> GROUP_LOG2) * (STEP_ELEMENTS / AMK_HEAD_DIM * WORDS), in_group = (unit & GROUP_MASK) * UNIT_COLS / AMK_HEAD_DIM * WORDS;
  return SAME_PLACE ? first / AMK_HEAD_DIM * WORDS + (group + in_group) : (first + unit_elements(unit)) / AMK_HEAD_DIM * WORDS;
}
__device__ __forceinline__ constexpr uint32_t place_in_head(uint32_t first, uint32_t unit) {
  return SAME_PLACE ? first % AMK_HEAD_DIM + (unit & GROUP_MASK) * UNIT_COLS % AMK_HEAD_DIM : (first + unit_elements(unit)) % AMK_HEAD_DIM;
}
// The word of an element where each head has SKIP words before it.
template <uint32_t SKIP> __device__ __forceinline__ constexpr uint32_t element_word(uint32_t first, uint32_t unit) {
  return first + unit_elements(unit) + head_words<SKIP>(first, unit) + SKIP;
}

// Number of this warp's units of operands in a part of `units` units of a matrix, each of which makes 1 << log2.
__device__ __forceinline__ uint32_t operand_share(Worker const& w, uint32_t units, uint32_t log2) {
  if (GROUP_LOG2 == 0) {
    return warp_share(w, units);
  }
  uint32_t const all = units << log2, groups = all >> GROUP_LOG2;
  return (warp_share(w, groups) << GROUP_LOG2) + (groups % AMK_WARPS == w.thread / 32 ? all & GROUP_MASK : 0);
}

// This warp's first unit of operands in a part. Index of a thread's first element in a unit: it needs two groups of 4 elements, SECOND apart, which
// go with its 16 bytes of weights (unit_column). Two loads fetch them, and in each load the two threads of a pair read a whole sector.
constexpr uint32_t SECOND = 8;
__device__ __forceinline__ uint32_t warp_unit(Worker const& w) { return w.thread / 32 << GROUP_LOG2; }
__device__ __forceinline__ uint32_t operand_element(Worker const& w, uint32_t unit) { return unit * UNIT_COLS + unit_column(w.thread % 4 * 8); }
static_assert(unit_column(4) == SECOND && AMK_HEAD_DIM % 16 == 0, "both groups belong to one head");

// This thread's A operands: for one sequence, the 8 elements that go with its 8 weights in each unit of its warp, as two products take them. Beside
// codes of 4 bits also the sums of these vectors' elements over a group of columns, in all threads of the sequence.
struct SeqInput {
  uint4 half[SHARE][2];
  float sum[EXCESS_CODES ? SHARE >> SUM_LOG2 : 1];
};

// Splits four elements into high halves, two words, and low halves.
__device__ __forceinline__ uint4 vec4_halves(float4 v) {
  if (VECTOR_FACTOR != 1.f) {
    v = make_float4(v.x * VECTOR_FACTOR, v.y * VECTOR_FACTOR, v.z * VECTOR_FACTOR, v.w * VECTOR_FACTOR);
  }
  uint32_t const h0 = element_pair(v.x, v.y), h1 = element_pair(v.z, v.w);
  float2 const b0 = pair_values(h0), b1 = pair_values(h1);
  return make_uint4(h0, h1, low_pair(v.x - b0.x, v.y - b0.y), low_pair(v.z - b1.x, v.w - b1.y));
}

// Of an operand's rows, 8 are high halves and 8 low. One product takes pairs 0 and 1 of a thread's four and the other the rest; in kernels with codes
// pairs 0 and 2, and 1 and 3, since codes of 4 bits differ between these by a factor (unpack8).
__device__ __forceinline__ void operand_of(uint4 first, uint4 second, uint4 (&half)[2]) {
  half[0] = MIXED ? make_uint4(first.x, first.z, second.x, second.z) : make_uint4(first.x, first.z, first.y, first.w);
  half[1] = MIXED ? make_uint4(first.y, first.w, second.y, second.w) : make_uint4(second.x, second.z, second.y, second.w);
}
__device__ __forceinline__ void operand_multiply(float (&a)[4], float (&b)[4], uint4 const (&half)[2], uint4 weights) {
  mma(a, a, half[0], weights.x, MIXED ? weights.z : weights.y);
  mma(b, b, half[1], MIXED ? weights.y : weights.z, weights.w);
}

// What codes of 4 bits are more than they mean is subtracted from their sums (groups_multiply): here the sums of the vectors for that.
__device__ __forceinline__ void operand_sums(SeqInput& x) {
  uint32_t const ones = 0x3c003c00u;
#pragma unroll
  for (uint32_t s = 0; s < SHARE >> SUM_LOG2; ++s) {
    float c[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < 2u << SUM_LOG2; ++i) {
      mma(c, c, x.half[(s << SUM_LOG2) + i / 2][i % 2], ones, ones);
    }
    x.sum[EXCESS_CODES ? s : 0] = rows_sum(c[0], c[2]);
  }
}

// A warp's units of a tile, with the scales of a thread's rows of the result: 2t and 2t + 1.
template <uint32_t UNPACK> struct BatchShare {
  static constexpr uint32_t LOG2 = unpacked_log2(UNPACK), UNITS = SHARE >> LOG2, WORDS = scale_pair_words(UNPACK);
  uint4 weights[UNITS];
  uint32_t scales[WORDS == 0 ? 1 : UNITS * WORDS];
};

// Loads them from the ring. FULL: there are SHARE units of operands, else `mine`.
template <uint32_t UNPACK, bool FULL> __device__ __forceinline__ void batch_take(Worker const& w, char const* tile, uint32_t mine, BatchShare<UNPACK>& v) {
  using V = BatchShare<UNPACK>;
  constexpr uint32_t IN = GROUP_LOG2 - V::LOG2; // units of a group: base-two logarithm
  char const* const unit = tile + (w.thread / 32 << IN) * unit_bytes(UNPACK);
#pragma unroll
  for (uint32_t n = 0; n < V::UNITS; ++n) {
    char const* const at = unit + ((n >> IN) * (AMK_WARPS << IN) + (n & ((1u << IN) - 1))) * unit_bytes(UNPACK);
    bool const there = FULL || n << V::LOG2 < mine;
    v.weights[n] = there ? stage_load(at + w.thread % 32 * 16) : make_uint4(0, 0, 0, 0);
    if constexpr (V::WORDS > 0) {
#pragma unroll
      for (uint32_t i = 0; i < V::WORDS; ++i) {
        v.scales[n * V::WORDS + i] = 0;
      }
      if (there) {
        scale_pair_load<UNPACK>(w, at, v.scales + n * V::WORDS);
      }
    }
  }
}

// A thread's two rows of a warp's products with a tile's part: of the high halves and of the low.
template <uint32_t UNPACK, bool FULL> __device__ __forceinline__ float2 batch_rows(BatchShare<UNPACK> const& v, SeqInput const& x, uint32_t mine) {
  constexpr uint32_t LOG2 = BatchShare<UNPACK>::LOG2;
  float c[4][4] = {}; // independent chains of products
#pragma unroll
  for (uint32_t j = 0; j < SHARE; ++j) {
    if (FULL || j < mine) {
      operand_multiply(c[j % 2 * 2], c[j % 2 * 2 + 1], x.half[j], unpack_operand<UNPACK>(v.weights[j >> LOG2], j & ((1u << LOG2) - 1)));
    }
  }
  return make_float2(rows_sum((c[0][0] + c[1][0]) + (c[2][0] + c[3][0]), (c[0][2] + c[1][2]) + (c[2][2] + c[3][2])),
                     rows_sum((c[0][1] + c[1][1]) + (c[2][1] + c[3][1]), (c[0][3] + c[1][3]) + (c[2][3] + c[3][3])));
}

// Sum of a sequence's elements over the columns of the threads with `has_group`, in all of them.
__device__ __forceinline__ float pair_group_sum(uint4 const (&half)[2], bool has_group) {
  uint32_t const ones = has_group ? 0x3c003c00u : 0;
  float c[4] = {};
  mma(c, c, half[0], ones, ones);
  mma(c, c, half[1], ones, ones);
  return rows_sum(c[0], c[2]);
}

// The same where groups of columns have scales: the sums of each are scaled before they are added. The products of two units alternate.
template <uint32_t UNPACK, bool FULL> __device__ __forceinline__ float2 batch_scaled_rows(Worker const& w, BatchShare<UNPACK> const& v, SeqInput const& x, uint32_t mine) {
  using V = BatchShare<UNPACK>;
  constexpr uint32_t PAIRS = has_pair_groups(UNPACK) ? 2 : 1, GROUPS = unit_groups(UNPACK) * PAIRS; // of a unit
  constexpr uint32_t LOG2 = V::LOG2, STEP = (PAIRS << LOG2) / GROUPS, ONCE = V::UNITS < 2 ? V::UNITS : 2;
  float sum[2] = {}, excess[2] = {};
#pragma unroll
  for (uint32_t g = 0; g < V::UNITS * GROUPS; g += ONCE) { // of `ONCE` units in turn
    uint32_t const first = g / ONCE / GROUPS * ONCE, group = g / ONCE % GROUPS;
    bool const has_group = PAIRS == 1 || w.thread / 2 % 2 == group % 2; // else its columns are of another group
    float c[ONCE][2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < STEP * ONCE; ++i) {
      uint32_t const n = i % ONCE, operand = group / PAIRS * STEP + i / ONCE, j = (first + n << LOG2) + operand;
      if (FULL || j < mine) {
        uint4 const weights = unpack_operand<UNPACK>(v.weights[first + n], operand);
        operand_multiply(c[n][0], c[n][1], x.half[j], has_group ? weights : make_uint4(0, 0, 0, 0));
      }
    }
    float meant[ONCE] = {}; // of a group of 16 columns
    if constexpr (has_pair_groups(UNPACK)) {
#pragma unroll
      for (uint32_t n = 0; n < ONCE; ++n) {
        meant[n] = pair_group_sum(x.half[(first + n << LOG2) + group / PAIRS], has_group);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 2 * ONCE; ++i) {
      uint32_t const n = i / 2, row = i % 2, j = (first + n << LOG2) + group / PAIRS * STEP;
      uint32_t const* const scales = v.scales + (first + n) * V::WORDS;
      float const scale = pair_scale<UNPACK>(scales, row, group);
      float const(&a)[4] = c[n][0], (&b)[4] = c[n][1];
      if constexpr (has_pair_groups(UNPACK)) {
        sum[row] = fmaf(scale, rows_sum(a[row] + b[row], a[2 + row] + b[2 + row]), sum[row]);
        excess[row] = fmaf(scaled_excess<UNPACK>(pair_row<UNPACK>(scales, row), scale, group), meant[n], excess[row]);
      } else if constexpr (has_excess(UNPACK)) {
        sum[row] = fmaf(scale, fmaf(rows_sum(b[row], b[2 + row]), HIGH_CODE / LOW_CODE, rows_sum(a[row], a[2 + row])), sum[row]);
        float sums = x.sum[j >> SUM_LOG2];
#pragma unroll
        for (uint32_t k = 1; k < STEP >> SUM_LOG2; ++k) {
          sums += x.sum[(j >> SUM_LOG2) + k];
        }
        excess[row] = fmaf(scaled_excess<UNPACK>(pair_row<UNPACK>(scales, row), scale, group), sums, excess[row]);
      } else {
        sum[row] = fmaf(scale, rows_sum(a[row] + b[row], a[2 + row] + b[2 + row]), sum[row]);
      }
    }
  }
  constexpr float CODE = low_code(UNPACK), MORE = has_excess(UNPACK) ? excess_unit(UNPACK) : 0.f;
  return make_float2(fmaf(sum[0], CODE, -MORE * excess[0]), fmaf(sum[1], CODE, -MORE * excess[1]));
}

// Multiplies a warp's units of a tile's part by the sequences' vectors; stores its sums, or adds to those of the parts before. A thread has rows 2t and
// 2t + 1 of the unit for the sequence of its operands.
template <uint32_t UNPACK, bool FULL> __device__ __forceinline__ void batch_multiply(Worker const& w, BatchShare<UNPACK> const& v, SeqInput const& x, uint32_t mine, float* sums, bool first) {
  float2 r;
  if constexpr (has_scales(UNPACK)) {
    r = batch_scaled_rows<UNPACK, FULL>(w, v, x, mine);
  } else {
    r = batch_rows<UNPACK, FULL>(v, x, mine);
  }
  uint32_t const row = w.thread % 32 / 4;
  if (row < SEQS) {
    float2* to = (float2*)(sums + row * AMK_UNIT_ROWS + w.thread % 4 * 2);
    if (!first) {
      float2 const before = *to;
      r.x += before.x, r.y += before.y;
    }
    *to = r;
  }
}
#endif
