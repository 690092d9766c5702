// The vector of a matvec: each warp waits for the columns of its units of the matrix and stages them in the activation buffer, normalised or merged
// from the splits of an attention. Same stages as reference-vm/src/ops/matvec.rs.
#pragma once

// Number of this warp's units among `units` consecutive ones: every 8th, starting at the warp's number.
__device__ __forceinline__ uint32_t warp_share(Worker const& w, uint32_t units) {
  uint32_t const warp = w.thread / 32;
  return warp < units ? (units - warp + AMK_WARPS - 1) / AMK_WARPS : 0;
}

// The vector of a matvec, in units of operands: a warp stages those of its units of the matrix, in turns of 4 elements per lane.
struct VectorUnits {
  uint32_t log2; // units of operands in a unit of the matrix: base-two logarithm
  uint32_t elements; // staged: whole units
  uint32_t first; // the lane's first element; each turn is TURN_COLS further on
};
constexpr uint32_t TURN_UNITS = 32 / UNIT_VEC4S; // units that a warp loads at once
constexpr uint32_t TURN_COLS = TURN_UNITS * UNIT_COLS * AMK_WARPS;

__device__ __forceinline__ VectorUnits vector_units(Worker const& w, uint32_t units, uint32_t unpack) {
  uint32_t const log2 = unpacked_log2(unpack), lane = w.thread % 32, mine = lane / UNIT_VEC4S;
  uint32_t const unit = ((w.thread / 32 + (mine >> log2) * AMK_WARPS) << log2) + (mine & ((1u << log2) - 1));
  return VectorUnits{log2, (units << log2) * UNIT_COLS, unit * UNIT_COLS + lane % UNIT_VEC4S * 4};
}

// Turns in which a warp stages a vector of `elements` elements; and how many of them at once if that may be `most`: an equal part.
__device__ constexpr uint32_t turns_of(uint32_t elements) { return (elements + TURN_COLS - 1) / TURN_COLS; }
__device__ constexpr uint32_t turns_at_once(uint32_t elements, uint32_t most) {
  uint32_t const parts = (turns_of(elements) + most - 1) / most;
  return (turns_of(elements) + parts - 1) / parts;
}

// One warp: stages its columns of the attention's result, merged from several splits, in the activation buffer.
__device__ __forceinline__ void stage_merged(Worker const& w, Words const& words, amk_matvec_params const& p, VectorUnits const& u, uint32_t active) {
  uint32_t const turns = ((warp_share(w, p.units) << u.log2) + TURN_UNITS - 1) / TURN_UNITS, end = SPARE_REGISTERS ? u.elements : turns * TURN_COLS;
#pragma unroll 1
  for (uint32_t first = 0; first < end; first += TURN_COLS) { // all lanes take every turn
    uint32_t const e = first + u.first;
    float4 const x = merge_wait(w, words, p.k_len / AMK_HEAD_DIM, active, e < p.k_len ? e : AMK_NONE);
    if (e < u.elements) {
      stage_x4(w, e, x);
    }
  }
}

// One warp: stages its columns of the token's embedding, times the norm; returns the lane's sum of squares.
__device__ __forceinline__ float stage_embedding(Worker const& w, ResolvedBuffer const& in, float const* norm, amk_matvec_params const& p, VectorUnits const& u) {
  float square = 0.f;
#pragma unroll 1
  for (uint32_t e = u.first; e < u.elements; e += TURN_COLS) { // padding is zero in the matrix
    if (MIXED && e >= p.k_len) { // the units of the embedding are shorter
      stage_x4(w, e, make_float4(0.f, 0.f, 0.f, 0.f));
      continue;
    }
    float4 const x = embedding_read4(w, in, e), n = __ldg((float4 const*)(norm + e));
    square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    stage_x4(w, e, make_float4(x.x * n.x, x.y * n.y, x.z * n.z, x.w * n.w));
  }
  return square;
}

constexpr uint32_t LONGEST_UNIT = UNIT_COLS << (SCALED_UNITS ? 2 : MIXED ? 1 : 0); // columns that some unit of a matrix has
constexpr uint32_t TURN_BYTES = TURN_COLS / UNIT_COLS * X_BYTES; // of the activation buffer
static_assert(TURN_COLS % AMK_HEAD_DIM == 0, "a turn begins where a head does");

// One warp: stages its columns of a vector, times the norm if there is one; returns the lane's sum of squares. WIDTH: elements of the vector,
// or 0 if they are not known when the kernel is compiled. `skip`: words before the elements of each head. Up to MOST turns at once.
template <uint32_t WIDTH, uint32_t MOST, bool NORM>
__device__ __forceinline__ float stage_vector(Worker const& w, Words const& words, float const* norm, amk_matvec_params const& p, VectorUnits const& u, uint32_t skip) {
  constexpr uint32_t N = WIDTH == 0 ? 1 : turns_at_once(WIDTH, MOST);
  constexpr bool ALL = SPARE_REGISTERS && N == turns_of(WIDTH);
  uint32_t const length = WIDTH == 0 || !SPARE_REGISTERS ? p.k_len : WIDTH, whole = !SPARE_REGISTERS || WIDTH % LONGEST_UNIT != 0 || WIDTH == 0 ? u.elements : WIDTH;
  uint32_t const at0 = u.first + (u.first / AMK_HEAD_DIM + 1) * skip, step = TURN_COLS + TURN_COLS / AMK_HEAD_DIM * skip;
  char* const place = x4_place(w, u.first);
  float square = 0.f;
#pragma unroll 1
  for (uint32_t first = 0; first < whole; first += N * TURN_COLS) { // once, if N is all turns
    uint32_t at[N];
    bool wanted[N];
    float4 n[N];
    uint4 v[N];
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      uint32_t const turn = first + i * TURN_COLS, e = turn + u.first;
      wanted[i] = (ALL && (i + 1) * TURN_COLS <= WIDTH) || e < length;
      at[i] = SPARE_REGISTERS ? at0 + (first / TURN_COLS + i) * step : e + (e / AMK_HEAD_DIM + 1) * skip;
      n[i] = NORM && (norm != nullptr || (SPARE_REGISTERS && WIDTH != 0)) && wanted[i] ? __ldg((float4 const*)(norm + e)) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
    vec4s_wait(w, words, at, wanted, v);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      uint32_t const e = first + i * TURN_COLS + u.first;
      float4 const x = vec4_value(words, v[i]);
      if (NORM) {
        square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, square))));
      }
      if ((ALL && (i + 1) * TURN_COLS <= WIDTH) || e < whole) {
        float4 const product = make_float4(x.x * n[i].x, x.y * n[i].y, x.z * n[i].z, x.w * n[i].w);
        x4_store(SPARE_REGISTERS ? place + (first / TURN_COLS + i) * TURN_BYTES : x4_place(w, e), product);
      }
    }
    if (ALL) {
      break;
    }
  }
  return square;
}

// A buffer of a task. In one load, which is before those of the fragments: otherwise it would have to wait for them.
__device__ __forceinline__ ResolvedBuffer buffer_of(StagedTask const& st, uint32_t number) {
  if constexpr (SPARE_REGISTERS) {
    uint4 const v = stage_load(&st.buffer[number]);
    return ResolvedBuffer{(uint64_t)v.y << 32 | v.x, v.z, v.w};
  }
  return st.buffer[number];
}

// A matvec's vector, and the weights that normalise it or null.
struct Input {
  ResolvedBuffer vector;
  float const* norm;
};
__device__ __forceinline__ Input input_of(StagedTask const& st, amk_matvec_params const& p) {
  bool const rms = p.prologue == AMK_PROLOGUE_RMS;
  return Input{buffer_of(st, 0), rms ? (float const*)buffer_of(st, 1).address : nullptr};
}

// One warp: stages its columns of the prologue's result in the activation buffer; returns the lane's sum of squares, if it is normalised.
__device__ __forceinline__ float stage_input(Worker const& w, Input const& input, StagedTask const& st, amk_matvec_params const& p) {
  ResolvedBuffer const& in = input.vector;
  float const* const norm = input.norm;
  VectorUnits const u = vector_units(w, p.units, st.task.unpack);
  if (in.kind == AMK_BUFFER_EMBEDDING) {
    return stage_embedding(w, in, norm, p, u);
  }
  Words const words = buffer_words(w, in);
  uint32_t skip = 0;
  if (p.prologue == AMK_PROLOGUE_MERGE) {
    uint32_t const keys = attended(seq_position(w), p.window);
    if (SPARE_REGISTERS ? p.splits > 1 && keys > p.kv_block : active_splits(keys, p.kv_block, p.splits) > 1) { // the same, and sooner known
      stage_merged(w, words, p, u, active_splits(keys, p.kv_block, p.splits));
      return 0.f;
    }
    skip = PARTIAL_HEAD; // with one split, the partials are the result
  }
  if (norm != nullptr && (!SPARE_REGISTERS || p.k_len == AMK_HIDDEN)) {
    return stage_vector<AMK_HIDDEN, 4, true>(w, words, norm, p, u, 0); // the norm's weights take as many registers as the vector
  }
  if (norm == nullptr && (p.k_len == AMK_FFN || (!SPARE_REGISTERS && (p.k_len != AMK_Q_WIDTH || turns_at_once(AMK_Q_WIDTH, 8) == turns_at_once(AMK_FFN, 8))))) {
    return stage_vector<AMK_FFN, 8, false>(w, words, norm, p, u, AMK_Q_WIDTH == AMK_FFN || !SPARE_REGISTERS ? skip : 0);
  }
  if (norm == nullptr && p.k_len == AMK_Q_WIDTH) {
    return stage_vector<AMK_Q_WIDTH, 8, false>(w, words, norm, p, u, skip);
  }
  return stage_vector<0, 1, true>(w, words, norm, p, u, skip);
}
