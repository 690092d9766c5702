// Reading and writing buffers by kind.
#pragma once

#if AMK_DTYPE == AMK_DTYPE_F32
constexpr uint32_t ELEMENT_BYTES = 4;
#else
constexpr uint32_t ELEMENT_BYTES = 2;
#endif
constexpr uint32_t UNIT_COLS = AMK_UNIT_ROW_BYTES / ELEMENT_BYTES; // 16 or 32
constexpr uint32_t X_BYTES = UNIT_COLS * (ONE_HALF ? 2 : 4);       // staged bytes of a unit's columns, in either form
constexpr uint32_t UNIT_VEC4S = UNIT_COLS / 4;                     // groups of 4 elements of a unit's columns

// Position of a column in its row of a unit; it is its own inverse. Of 16 columns of 16 bits, the second and the third group of four are
// swapped. So a thread's 16 bytes go with elements 0..4 and 8..12 of 16, and its neighbour's with the others: two threads that load f32 of
// the vector read whole sectors of 32 bytes with each load (matvec_batch.cuh). Same as ir::program::exchange_vec4s.
__device__ __forceinline__ constexpr uint32_t unit_column(uint32_t column) {
  return AMK_DTYPE == AMK_DTYPE_F32 ? column % UNIT_COLS : (column % UNIT_COLS & ~12u) | (column & 4) << 1 | (column & 8) >> 1;
}

// The words of a buffer. A flag-in-data word (NCCL's LL protocol) is an f32 whose lowest AMK_TAG_BITS bits are the tag: value and tag are one
// access, so a reader that sees the tag has the value, and it costs no more than a plain word. A plain word has no tag bits.
struct Words {
  uint32_t* at;
  uint32_t tag;
  uint32_t mask;
#if AMK_DEVICES > 1
  Shared* everywhere; // set if stores go to all devices' copies
#endif
};

constexpr uint32_t TAG_MASK = (1u << AMK_TAG_BITS) - 1;

__device__ __forceinline__ Words buffer_words(Worker const& w, ResolvedBuffer const& s) {
  bool const flag_in_data = is_flag_in_data(s);
  return Words{(uint32_t*)buffer_address(w, s), flag_in_data ? (w.epoch * AMK_TAG_RUNS + seq_run(w)) & TAG_MASK : 0, flag_in_data ? TAG_MASK : 0
#if AMK_DEVICES > 1
               ,
               (s.kind & REPLICATED) != 0 ? w.shared : nullptr
#endif
  };
}
__device__ __forceinline__ bool word_here(Words const& s, uint32_t word) { return ((word ^ s.tag) & s.mask) == 0; }
__device__ __forceinline__ float word_value(Words const& s, uint32_t word) { return __uint_as_float(word & ~s.mask); }

// Stores the bits of a word, to all devices if they have a copy.
__device__ __forceinline__ void word_store(Words const& s, uint32_t* at, uint32_t bits) {
#if AMK_DEVICES > 1
  if (s.everywhere != nullptr) {
    devices_store(s.everywhere, at, bits);
    return;
  }
#endif
  store_u32(at, bits);
}

// Writes a word. Rounds to nearest, ties away from zero; NaN stays NaN. Same as reference-vm/src/memory.rs.
__device__ __forceinline__ void word_write(Words const& s, uint32_t i, float v) {
  uint32_t const bits = __float_as_uint(v);
  uint32_t const rounded = v != v ? 0x7fc00000u : bits + ((s.mask + 1) >> 1);
  word_store(s, s.at + i, s.mask != 0 ? (rounded & ~s.mask) | s.tag : bits);
}

// Writes a word of a vector that is multiplied directly (without a norm or merge before it). In a kernel of several sequences it holds the
// high 16-bit half of the element above the low one, which loses the bits that the tag takes. Every worker reads all of these vectors while a
// thread writes only a few words, so the writer does the split.
__device__ __forceinline__ void input_write(Words const& s, uint32_t i, float v) {
#if AMK_SEQS > 1
  v = VECTOR_FACTOR != 1.f ? v * VECTOR_FACTOR : v;
  uint32_t const word = element_pair(LOW_FACTOR != 1.f ? (v - pair_values(element_pair(v, 0.f)).x) * LOW_FACTOR : v - pair_values(element_pair(v, 0.f)).x, v);
  word_store(s, s.at + i, (word & ~s.mask) | s.tag);
#else
  word_write(s, i, v);
#endif
}

__device__ __forceinline__ float4 vec4_value(Words const& s, uint4 v) {
  return make_float4(word_value(s, v.x), word_value(s, v.y), word_value(s, v.z), word_value(s, v.w));
}
__device__ __forceinline__ bool vec4_here(Words const& s, uint4 const& v) {
  return (((v.x ^ s.tag) | (v.y ^ s.tag) | (v.z ^ s.tag) | (v.w ^ s.tag)) & s.mask) == 0;
}

#if AMK_UNPACK == 1 && AMK_FFN > 10240 // floats of long vectors: short ones and codes gain nothing by it
#define LOOKS_AT_ONE 1
// One look at the groups that are missing; returns whether some still are. A worker's look at the half of a long vector that it waits for reads 28 KB,
// which compete with the weights in the L2 cache. So while more than 4 are missing the next looks are at the first of them `alone`, until it has come.
template <uint32_t N> __device__ __forceinline__ bool vec4s_look(Words const& s, uint32_t const (&at)[N], bool (&missing)[N], uint4 (&out)[N], bool& alone) {
  bool asked = false, came = false;
  uint32_t left = 0;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    if (missing[i] && !(N > 4 && alone && asked)) {
      out[i] = load_u32x4(s.at + at[i]);
      asked = true;
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    bool const was = missing[i];
    missing[i] = was && !vec4_here(s, out[i]);
    came |= was && !missing[i];
    left += missing[i];
  }
  alone = N > 4 && left > 4 && !(alone && came);
  return left != 0;
}
#endif

// Waits for groups of 4 words of a buffer: loads all together, and again until all have arrived. `at[i]` is the first word of group i; groups
// that are not `wanted` are zero.
template <uint32_t N> __device__ __forceinline__ void vec4s_wait(Worker const& w, Words const& s, uint32_t const (&at)[N], bool const (&wanted)[N], uint4 (&out)[N]) {
  bool missing[N];
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    missing[i] = wanted[i];
    out[i] = make_uint4(0, 0, 0, 0);
  }
#ifdef LOOKS_AT_ONE
  bool alone = false;
#endif
#pragma unroll 1
  for (uint32_t spin = 1;; ++spin) {
#ifdef LOOKS_AT_ONE
    bool const any = vec4s_look(s, at, missing, out, alone);
#else
    bool any = false;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      if (missing[i]) {
        out[i] = load_u32x4(s.at + at[i]);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      missing[i] = missing[i] && !vec4_here(s, out[i]);
      any |= missing[i];
    }
#endif
    if (!any) {
      return;
    }
    if (spin % SPINS_PER_LOOK == 0) { // seldom: every instruction between two looks at the words makes them arrive later
      if (is_dead(w.shared)) {
        return;
      }
      note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)s.at >> 3), 0, s.tag);
    }
    poll_pause();
  }
}

// Waits for one word.
__device__ __forceinline__ float word_wait(Worker const& w, Words const& s, uint32_t i) {
  for (uint32_t spin = 1;; ++spin) {
    uint32_t const word = load_relaxed(s.at + i);
    if (word_here(s, word) || is_dead(w.shared)) {
      return word_value(s, word);
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)(s.at + i) >> 3), word & s.mask, s.tag);
    }
    poll_pause();
  }
}

// Whether an embedding has elements of f32, which are not permuted, and where element e of a row is.
#define EMBEDDING_F32 (AMK_DTYPE == AMK_DTYPE_F32 || (AMK_FEATURES >> AMK_FEATURE_F32_ROWS & 1))
__device__ __forceinline__ char const* embedding_place(char const* embedding, uint32_t units, uint32_t row, uint32_t e) {
  constexpr uint32_t BYTES = EMBEDDING_F32 ? 4 : ELEMENT_BYTES, COLS = AMK_UNIT_ROW_BYTES / BYTES;
  uint64_t const unit = (uint64_t)(row / AMK_UNIT_ROWS) * units + e / COLS;
  return embedding + unit * AMK_UNIT_BYTES + (row % AMK_UNIT_ROWS) * AMK_UNIT_ROW_BYTES + (EMBEDDING_F32 ? e % COLS : unit_column(e)) * BYTES;
}

// Loads elements e..e+4 (e a multiple of 4) of the token's embedding row.
__device__ __forceinline__ float4 embedding_read4(Worker const& w, ResolvedBuffer const& s, uint32_t e) {
  uint32_t const token = seq_token(w);
  char const* p = embedding_place((char const*)s.address, s.units, token, e);
#if EMBEDDING_F32
  return __ldg((float4 const*)p);
#else
  uint2 const half = __ldg((uint2 const*)p);
  float2 const a = pair_values(half.x), b = pair_values(half.y);
  return make_float4(a.x, a.y, b.x, b.y);
#endif
}

// Reads element i of the residual stream: from the embedding, or from a buffer once it has arrived.
__device__ __forceinline__ float buffer_read(Worker const& w, ResolvedBuffer const& s, uint32_t i) {
  if (s.kind == AMK_BUFFER_EMBEDDING) {
    float4 const v = embedding_read4(w, s, i & ~3u);
    return (i & 2) ? ((i & 1) ? v.w : v.z) : ((i & 1) ? v.y : v.x);
  }
  return word_wait(w, buffer_words(w, s), i);
}
