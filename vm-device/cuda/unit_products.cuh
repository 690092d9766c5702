// Products of units of weights with the staged vector: their operands, their sums, those of a tile over the lanes of a warp, and of rows over the
// warps.
#pragma once

constexpr uint32_t SHARE = AMK_STAGE_UNITS_MAX / AMK_WARPS; // most units of a chunk per warp
constexpr uint32_t TAKE = 2;                                 // fragments that wait in registers

#if AMK_DTYPE != AMK_DTYPE_F32 && defined(__CUDA_ARCH__)
// c = a . b + from for a 16x16 a and a 16x8 b.
__device__ __forceinline__ void mma(float (&c)[4], float const (&from)[4], uint4 a, uint32_t b0, uint32_t b1) {
#if AMK_DTYPE == AMK_DTYPE_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
#endif
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]));
}
#endif

// Place of elements e..e+4 of the vector in the activation buffer. They are staged in the form that is multiplied: f32, or for the tensor cores
// the high and the low 16-bit half of each element, 64 bytes of each per unit (about 16 bits of precision for bf16), or the high one alone. Of
// the 8 elements that go with 16 bytes of weights, pairs 0 and 2 are in words 0 and 1, and pairs 1 and 3 in words 2 and 3 (see unit_multiply).
__device__ __forceinline__ char* x4_place(Worker const& w, uint32_t e) {
  return w.x + (AMK_DTYPE == AMK_DTYPE_F32 ? e * 4 : e / UNIT_COLS * X_BYTES + unit_column(e) / 8 * 16 + unit_column(e) % 8);
}
__device__ __forceinline__ void x4_store(char* place, float4 v) {
#if AMK_DTYPE == AMK_DTYPE_F32
  *(float4*)place = v;
#else
  if (VECTOR_FACTOR != 1.f) {
    v = make_float4(v.x * VECTOR_FACTOR, v.y * VECTOR_FACTOR, v.z * VECTOR_FACTOR, v.w * VECTOR_FACTOR);
  }
  uint32_t* p = (uint32_t*)place;
  uint32_t const h0 = element_pair(v.x, v.y), h1 = element_pair(v.z, v.w);
  p[0] = h0, p[2] = h1;
  if (ONE_HALF) {
    return;
  }
  float2 const b0 = pair_values(h0), b1 = pair_values(h1);
  p += AMK_UNIT_ROW_BYTES / 4;
  p[0] = element_pair(v.x - b0.x, v.y - b0.y), p[2] = element_pair(v.z - b1.x, v.w - b1.y);
#endif
}
__device__ __forceinline__ void stage_x4(Worker const& w, uint32_t e, float4 v) { x4_store(x4_place(w, e), v); }

// A thread's part of the staged vector for a unit.
#if AMK_DTYPE == AMK_DTYPE_F32
using Vector = uint4;
__device__ __forceinline__ Vector x_load(Worker const& w, char const* x) { return stage_load(x + (w.thread & 3) * 16); }
#else
using Vector = uint2;
// Of columns 0 and 1 of the right operand, and so on in turns of four, the high and the low halves of a thread's pairs 0 and 2; of columns 2
// and 3 those of pairs 1 and 3. Of high halves alone, both columns are the same.
__device__ __forceinline__ Vector x_load(Worker const& w, char const* x) {
  return stage_load8(x + (w.thread & 3) * 16 + (ONE_HALF ? 0 : (w.thread & 4) * 16) + (w.thread & 8));
}
#endif

// What the halves of a vector's elements make of a row.
__device__ __forceinline__ float halves_sum(float high, float low) { return ONE_HALF ? high : high + low; }

// Accumulators of 8 rows: independent chains of products.
template <uint32_t CHAINS> struct Sums {
  float c[CHAINS][4];
};

// Adds a thread's products of its n-th unit. The 16 bytes that it loaded are its part of a left operand: pairs 0 and 2 of a row, and pairs 1
// and 3 of the same row 8 rows further down. So of the result, columns 0 and 1 of the first 8 rows are meant, and columns 2 and 3 of the
// others; the rest mixes the wrong pairs and is never read.
template <uint32_t CHAINS> __device__ __forceinline__ void unit_multiply(Sums<CHAINS>& s, uint32_t n, Vector x, uint4 weights) {
  float(&c)[4] = s.c[n % CHAINS];
#if AMK_DTYPE == AMK_DTYPE_F32
  c[0] = fmaf(__uint_as_float(weights.x), __uint_as_float(x.x), c[0]);
  c[1] = fmaf(__uint_as_float(weights.y), __uint_as_float(x.y), c[1]);
  c[2] = fmaf(__uint_as_float(weights.z), __uint_as_float(x.z), c[2]);
  c[3] = fmaf(__uint_as_float(weights.w), __uint_as_float(x.w), c[3]);
#else
  mma(c, c, weights, x.x, x.y);
#endif
}

// A warp fragment: this warp's units of a stage, with their scales. In a kernel of codes in groups, of half a stage: a unit of them makes two or four
// of operands, and its part of the vector waits in registers beside the scales.
constexpr uint32_t FRAGMENT = SCALED_UNITS ? SHARE / 2 : SHARE;
struct Share {
  uint4 weights[FRAGMENT];
  uint32_t scales[SCALE_WORDS == 0 ? 1 : FRAGMENT * SCALE_WORDS];
};

// A thread's part of the vector for a unit of weights that are unpacked: of all units of operands that it makes.
template <uint32_t UNPACK, bool = has_digits(UNPACK)> struct VectorGroup {
  static constexpr uint32_t OPERANDS = 1 << unpacked_log2(UNPACK), GROUPS = has_scales(UNPACK) ? unit_groups(UNPACK) : 1;
  Vector x[OPERANDS];
};
template <uint32_t UNPACK> struct VectorGroup<UNPACK, true> : DigitGroup<UNPACK> {};
template <uint32_t UNPACK> __device__ __forceinline__ VectorGroup<UNPACK> halves_load(Worker const& w, char const* x) {
  VectorGroup<UNPACK> v = {};
#pragma unroll
  for (uint32_t i = 0; i < v.OPERANDS; ++i) {
    v.x[i] = x_load(w, x + i * X_BYTES);
  }
  return v;
}

// Bytes of the staged vector for a unit.
__device__ __forceinline__ constexpr uint32_t group_bytes(uint32_t unpack) { return has_digits(unpack) ? digit_bytes(unpack) : X_BYTES << unpacked_log2(unpack); }

template <uint32_t UNPACK> __device__ __forceinline__ VectorGroup<UNPACK> group_load(Worker const& w, char const* x) {
  if constexpr (has_digits(UNPACK)) {
    return VectorGroup<UNPACK>{digits_load<UNPACK>(w, x)};
  } else {
    return halves_load<UNPACK>(w, x);
  }
}

// Multiplies N units by their parts of the vector, unit n into a chain of tile n / EACH. Where groups of columns have scales, the sums
// of each are scaled before they are added: those of rows are c[0][0] and c[0][2].
// The products of the units alternate, so that one need not wait for the one before.
template <uint32_t UNPACK, uint32_t EACH, uint32_t N, uint32_t TILES, uint32_t CHAINS>
__device__ __forceinline__ void halves_multiply(Sums<CHAINS> (&sums)[TILES], VectorGroup<UNPACK> const (&vector)[EACH], uint4 const* weights, uint32_t const* scales) {
  using V = VectorGroup<UNPACK>;
  constexpr uint32_t STEP = V::OPERANDS / V::GROUPS, WORDS = scale_words(UNPACK);
#pragma unroll
  for (uint32_t g = 0; g < V::GROUPS; ++g) {
    Sums<1> group[N] = {};
#pragma unroll
    for (uint32_t i = g * STEP; i < (g + 1) * STEP; ++i) {
#pragma unroll
      for (uint32_t n = 0; n < N; ++n) {
        uint4 const operand = unpack_operand<UNPACK>(weights[n], i);
        if constexpr (has_scales(UNPACK)) {
          unit_multiply(group[n], 0, vector[n % EACH].x[i], operand);
        } else {
          unit_multiply(sums[n / EACH], V::OPERANDS * (n % EACH) + i, vector[n % EACH].x[i], operand);
        }
      }
    }
    if constexpr (has_scales(UNPACK)) {
#pragma unroll
      for (uint32_t n = 0; n < N; ++n) {
        float(&sum)[4] = sums[n / EACH].c[0], (&c)[4] = group[n].c[0];
        float const scale = group_scale<UNPACK>(scales + n * WORDS, g);
        sum[0] = fmaf(scale, halves_sum(c[0], c[1]), sum[0]);
        sum[2] = fmaf(scale, halves_sum(c[2], c[3]), sum[2]);
      }
    }
  }
}

template <uint32_t UNPACK, uint32_t EACH, uint32_t N, uint32_t TILES, uint32_t CHAINS>
__device__ __forceinline__ void groups_multiply(Worker const& w, Sums<CHAINS> (&sums)[TILES], VectorGroup<UNPACK> const (&vector)[EACH], uint4 const* weights, uint32_t const* scales) {
  if constexpr (has_digits(UNPACK)) {
    digits_multiply<UNPACK, EACH, N>(w, sums, vector, weights, scales);
  } else {
    halves_multiply<UNPACK, EACH, N, TILES, CHAINS>(sums, vector, weights, scales);
  }
}

// Multiplies this warp's `mine` units of a chunk by the vector in the activation buffer. `unit`: the first of them.
template <uint32_t UNPACK> __device__ __forceinline__ void chunk_multiply(Worker const& w, char const* unit, char const* x, uint32_t mine, Sums<4>& s) {
  uint32_t j = 0;
  char const* weights = unit + w.thread % 32 * 16;
  if constexpr (UNPACK == AMK_UNPACK_NONE) {
    constexpr uint32_t BATCH = 4;
#pragma unroll 1
    for (; j + BATCH <= mine; j += BATCH) {
      uint4 v[BATCH];
      Vector f[BATCH];
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i) {
        v[i] = stage_load(weights + (j + i) * AMK_WARPS * AMK_UNIT_BYTES);
        f[i] = x_load(w, x + (j + i) * AMK_WARPS * X_BYTES);
      }
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i) {
        unit_multiply(s, i, f[i], v[i]);
      }
    }
#pragma unroll 1
    for (; j < mine; ++j) {
      unit_multiply(s, 0, x_load(w, x + j * AMK_WARPS * X_BYTES), stage_load(weights + j * AMK_WARPS * AMK_UNIT_BYTES));
    }
  } else {
    OwnScales<UNPACK> const own(w, unit);
#pragma unroll(SCALED_UNITS ? 1 : 2)
    for (; j < mine; ++j) {
      constexpr uint32_t STEP = AMK_WARPS * unit_bytes(UNPACK), X_STEP = AMK_WARPS * group_bytes(UNPACK);
      uint32_t scales[SCALE_WORDS == 0 ? 1 : SCALE_WORDS];
      own.load(j * STEP, scales);
      uint4 const operand = stage_load(weights + j * STEP);
      VectorGroup<UNPACK> const v[1] = {group_load<UNPACK>(w, x + j * X_STEP)};
      groups_multiply<UNPACK, 1, 1, 1, 4>(w, (Sums<4>(&)[1])s, v, &operand, scales);
    }
  }
}

// Sum over the lanes of a warp.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    x += __shfl_xor_sync(~0u, x, o);
  }
  return x;
}

constexpr uint32_t ROW_PARTS = SPARE_REGISTERS ? AMK_WARPS : 1, TILE_PARTS = AMK_UNIT_ROWS * ROW_PARTS; // from a row's sums to the next
// Reduces the sums of N tiles' 8 rows each over the lanes, into this warp's places at `part`.
template <uint32_t UNPACK, uint32_t N, uint32_t CHAINS> __device__ __forceinline__ void tiles_finish(Worker const& w, Sums<CHAINS> const (&s)[N], float* part) {
  constexpr bool ALL = AMK_DTYPE == AMK_DTYPE_F32 || has_digits(UNPACK); // all four threads of a row have a part of its sum
  uint32_t const lane = w.thread % 32;
  float first[N], second[N]; // of the first eight rows of results, and of the others
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    if constexpr (has_digits(UNPACK)) {
      first[n] = digits_sum<UNPACK>(w, s[n].c[0]), second[n] = 0.f;
    } else if constexpr (has_scales(UNPACK)) {
      float const(&c)[4] = s[n].c[0];
      first[n] = c[0], second[n] = c[2];
      if (is_half(UNPACK)) {
        first[n] *= E2M1_CODE, second[n] *= E2M1_CODE;
      }
    } else {
      first[n] = halves_sum(s[n].c[0][0], s[n].c[0][1]), second[n] = halves_sum(s[n].c[0][2], s[n].c[0][3]);
#pragma unroll
      for (uint32_t i = 1; i < CHAINS; ++i) {
        first[n] += halves_sum(s[n].c[i][0], s[n].c[i][1]), second[n] += halves_sum(s[n].c[i][2], s[n].c[i][3]);
      }
    }
  }
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    if (ALL) {
      first[n] = has_digits(UNPACK) ? first[n] : first[n] + second[n];
      first[n] += __shfl_xor_sync(~0u, first[n], 1);
      if (!has_digits(UNPACK) || digit_threads(UNPACK) == 4) {
        first[n] += __shfl_xor_sync(~0u, first[n], 2);
      }
    } else {
      second[n] = __shfl_down_sync(~0u, second[n], 1);
    }
  }
  if ((lane & 3) == 0) {
#pragma unroll
    for (uint32_t n = 0; n < N; ++n) {
      part[n * TILE_PARTS + lane / 4 * ROW_PARTS] = ALL ? first[n] : first[n] + second[n];
    }
  }
}
// This warp's places for the sums of rows.
__device__ __forceinline__ float* warp_parts(Worker const& w, uint32_t buffer) {
  uint32_t const warp = w.thread / 32;
  return &w.shared->part[buffer][SPARE_REGISTERS ? 0 : warp][SPARE_REGISTERS ? warp : 0];
}

// The warps' sums of a thread's row and of the one that alternates with it, and of the squares of the vector. `buffer` is the parity under
// which they were written. All of them are requested before the first is used, unless registers are short. The sums of a row that has no other
// are followed by words that are not used.
template <bool SPARE> struct RowParts {
  float4 row[AMK_WARPS / 4], up[AMK_WARPS / 4], squares[AMK_WARPS / 4];
  __device__ __forceinline__ RowParts(Worker const& w, uint32_t buffer) {
    float const* const at = w.shared->part[buffer][w.thread];
    auto const load = [](float const* at) {
      uint4 const v = stage_load(at);
      return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    };
#pragma unroll
    for (uint32_t i = 0; i < AMK_WARPS / 4; ++i) {
      row[i] = load(at + 4 * i), squares[i] = load(&w.shared->sums[buffer][4 * i]), up[i] = load(at + TILE_PARTS + 4 * i);
    }
  }
  static __device__ __forceinline__ float sum(float4 const (&parts)[AMK_WARPS / 4]) {
    float v = 0.f;
#pragma unroll
    for (float4 const& four : parts) {
      v = (((v + four.x) + four.y) + four.z) + four.w;
    }
    return v;
  }
  __device__ __forceinline__ float row_sum() const { return sum(row); }
  __device__ __forceinline__ float up_sum() const { return sum(up); }
  __device__ __forceinline__ float4 square(uint32_t i) const { return squares[i]; }
};
template <> struct RowParts<false> {
  Worker const& w;
  uint32_t buffer;
  __device__ __forceinline__ RowParts(Worker const& worker, uint32_t parity) : w(worker), buffer(parity) {}
  __device__ __forceinline__ float sum(uint32_t row) const {
    float v = 0.f;
#pragma unroll
    for (uint32_t i = 0; i < AMK_WARPS; ++i) {
      v += w.shared->part[buffer][i][row];
    }
    return v;
  }
  __device__ __forceinline__ float row_sum() const { return sum(w.thread); }
  __device__ __forceinline__ float up_sum() const { return sum(w.thread + AMK_UNIT_ROWS); }
  __device__ __forceinline__ float4 square(uint32_t i) const { return *(float4 const*)&w.shared->sums[buffer][4 * i]; }
};
// The factor of a normalised vector's rows.
__device__ __forceinline__ float rms_scale(RowParts<SPARE_REGISTERS> const& parts, float inverse, float eps) {
  float4 const a = parts.square(0), b = parts.square(1);
  return rsqrtf(fmaf(((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)), inverse, eps));
}
