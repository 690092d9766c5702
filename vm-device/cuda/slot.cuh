// Reading and writing slots by kind.
#pragma once

#if AMK_DTYPE == 0
constexpr uint32_t ELEMENT_BYTES = 4;
#else
constexpr uint32_t ELEMENT_BYTES = 2;
#endif
constexpr uint32_t UNIT_COLS = AMK_UNIT_ROW_BYTES / ELEMENT_BYTES; // 16 or 32
constexpr uint32_t LANE_COLS = UNIT_COLS / 4;                      // elements of a row that one lane holds: 4 or 8

// 16 bytes of f16 as 8 floats.
__device__ __forceinline__ void unpack_f16(uint4 v, float* out) {
  uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(out[2 * i]), "=f"(out[2 * i + 1]) : "r"(words[i]));
  }
}

// 16 bytes of stored elements as floats (4 or 8 of them).
__device__ __forceinline__ void unpack(uint4 v, float* out) {
#if AMK_DTYPE == 0
  out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y), out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
#elif AMK_DTYPE == 1
  unpack_f16(v, out);
#else
  uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
#endif
}

// One float as a stored element, in the low bits.
__device__ __forceinline__ uint32_t element_bits(float v) {
#if AMK_DTYPE == 0
  return __float_as_uint(v);
#elif AMK_DTYPE == 2
  uint16_t r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
#else
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
#endif
}

__device__ __forceinline__ uint32_t slot_tag(Worker const& w, uint32_t generation) { return w.epoch * AMK_GENERATIONS_MAX + generation; }

// The value of a tagged word once its tag is right. Pairs with tagged_store in slot_write.
__device__ __forceinline__ float tagged_wait(Worker const& w, uint64_t const* word, uint32_t tag) {
  for (uint32_t spin = 1;; ++spin) {
    uint64_t const x = tagged_load(word);
    if ((uint32_t)(x >> 32) == tag || is_dead(w.shared)) {
      return __uint_as_float((uint32_t)x);
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)word >> 3), (uint32_t)(x >> 32), tag);
    }
    poll_pause();
  }
}
__device__ __forceinline__ float2 tagged_wait2(Worker const& w, uint64_t const* word, uint32_t tag) {
  for (uint32_t spin = 1;; ++spin) {
    uint64_t a, b;
    tagged_load2(word, a, b);
    if (((uint32_t)(a >> 32) == tag && (uint32_t)(b >> 32) == tag) || is_dead(w.shared)) {
      return make_float2(__uint_as_float((uint32_t)a), __uint_as_float((uint32_t)b));
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)word >> 3), (uint32_t)(a >> 32), tag);
    }
    poll_pause();
  }
}

// Address of element `e` of the token's embedding row; runs of 4 elements are contiguous.
__device__ __forceinline__ char const* embedding_address(Worker const& w, ResolvedSlot const& s, uint32_t e) {
  uint32_t const token = w.shared->step.token;
  uint64_t const unit = (uint64_t)(token / AMK_UNIT_ROWS) * s.units + e / UNIT_COLS;
  return (char const*)s.address + unit * AMK_UNIT_BYTES + (token % AMK_UNIT_ROWS) * AMK_UNIT_ROW_BYTES + (e % UNIT_COLS) * ELEMENT_BYTES;
}

// Elements e..e+4 (e a multiple of 4) of the token's embedding row.
__device__ __forceinline__ float4 embedding_read4(Worker const& w, ResolvedSlot const& s, uint32_t e) {
  char const* p = embedding_address(w, s, e);
  float v[8];
#if AMK_DTYPE == 0
  unpack(__ldg((uint4 const*)p), v);
#else
  uint2 const half = __ldg((uint2 const*)p);
  unpack(make_uint4(half.x, half.y, 0, 0), v);
#endif
  return make_float4(v[0], v[1], v[2], v[3]);
}

// Element i of a slot. Waits if the slot is tagged.
__device__ __forceinline__ float slot_read(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t i) {
  if (s.kind == AMK_SLOT_TAGGED) {
    return tagged_wait(w, (uint64_t const*)s.address + i, slot_tag(w, generation));
  }
  if (s.kind == AMK_SLOT_EMBEDDING) {
    float4 const v = embedding_read4(w, s, i & ~3u);
    return (i & 2) ? ((i & 1) ? v.w : v.z) : ((i & 1) ? v.y : v.x);
  }
  return load_f32((float const*)s.address + i);
}
// Elements i, i+1 (i even).
__device__ __forceinline__ float2 slot_read2(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t i) {
  if (s.kind == AMK_SLOT_TAGGED) {
    return tagged_wait2(w, (uint64_t const*)s.address + i, slot_tag(w, generation));
  }
  return load_f32x2((float const*)s.address + i);
}
// Elements i..i+4 (i a multiple of 4); those at or past `len` are zero and are not waited for.
__device__ __forceinline__ float4 slot_read4(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t i, uint32_t len) {
  if (i + 4 <= len) {
    if (s.kind == AMK_SLOT_TAGGED) {
      uint64_t const* word = (uint64_t const*)s.address + i;
      float2 const a = tagged_wait2(w, word, slot_tag(w, generation));
      float2 const b = tagged_wait2(w, word + 2, slot_tag(w, generation));
      return make_float4(a.x, a.y, b.x, b.y);
    }
    return s.kind == AMK_SLOT_EMBEDDING ? embedding_read4(w, s, i) : load_f32x4((float const*)s.address + i);
  }
  float v[4] = {0.f, 0.f, 0.f, 0.f};
  for (uint32_t j = 0; j < 4 && i + j < len; ++j) {
    v[j] = slot_read(w, s, generation, i + j);
  }
  return make_float4(v[0], v[1], v[2], v[3]);
}

// Writes element i. Pairs with slot_read of whoever waits for the signal (plain) or for the tag.
__device__ __forceinline__ void slot_write(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t i, float v) {
  if (s.kind == AMK_SLOT_TAGGED) {
    tagged_store((uint64_t*)s.address + i, v, slot_tag(w, generation));
  } else {
    store_f32((float*)s.address + i, v);
  }
}

// Elements that a thread asks for before it uses the first: each trip to L2 is long, so they are taken together.
constexpr uint32_t INPUT_BATCH = 4;

// Words first[i]..first[i]+4 of a slot for each i that is wanted, else zero. All of them are asked for before the first is used. The
// words start at even places (ALIGNED: at multiples of 4).
template <uint32_t N, bool ALIGNED>
__device__ __forceinline__ void slot_read_batch(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t const (&first)[N], bool const (&wanted)[N],
                                                float4 (&out)[N]) {
  if (s.kind == AMK_SLOT_TAGGED) {
    uint64_t const* words = (uint64_t const*)s.address;
    uint32_t const tag = slot_tag(w, generation);
    for (bool here = false; !here;) {
      here = true;
#pragma unroll
      for (uint32_t i = 0; i < N; ++i) {
        uint64_t a = (uint64_t)tag << 32, b = a, c = a, d = a;
        if (wanted[i]) {
          tagged_load2(words + first[i], a, b);
          tagged_load2(words + first[i] + 2, c, d);
        }
        out[i] = make_float4(__uint_as_float((uint32_t)a), __uint_as_float((uint32_t)b), __uint_as_float((uint32_t)c), __uint_as_float((uint32_t)d));
        here &= (uint32_t)(a >> 32) == tag && (uint32_t)(b >> 32) == tag && (uint32_t)(c >> 32) == tag && (uint32_t)(d >> 32) == tag;
      }
      if (!here) {
        if (is_dead(w.shared)) {
          return;
        }
        note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)words >> 3), 0, tag);
        poll_pause();
      }
    }
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (wanted[i]) {
      float const* p = (float const*)s.address + first[i];
      if (s.kind == AMK_SLOT_EMBEDDING) {
        out[i] = embedding_read4(w, s, first[i]);
      } else if (ALIGNED) {
        out[i] = load_f32x4(p);
      } else {
        float2 const a = load_f32x2(p), b = load_f32x2(p + 2);
        out[i] = make_float4(a.x, a.y, b.x, b.y);
      }
    }
  }
}

// One warp: before everybody reads a tagged range, waits for a sample of its words. Many pollers of the payload itself would
// congest L2 for the producers; the readers still validate every word.
__device__ __forceinline__ void tagged_presample(Worker const& w, ResolvedSlot const& s, uint32_t generation, uint32_t start, uint32_t len) {
  if (s.kind != AMK_SLOT_TAGGED || len == 0) {
    return;
  }
  uint32_t const lane = threadIdx.x % 32, tag = slot_tag(w, generation);
  uint64_t const* const words = (uint64_t const*)s.address + start;
  for (uint32_t spin = 1;; ++spin) {
    bool here = true;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) { // the last word of each of 128 equal parts
      uint64_t const x = tagged_load(words + ((uint64_t)(j * 32 + lane + 1) * len - 1) / 128);
      here &= (uint32_t)(x >> 32) == tag;
    }
    if (__all_sync(~0u, here || is_dead(w.shared))) {
      return;
    }
    if (spin % SPINS_PER_NOTE == 0 && !here) {
      note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)(((uint64_t)words + lane) >> 3), 0, tag);
    }
    poll_pause();
  }
}
