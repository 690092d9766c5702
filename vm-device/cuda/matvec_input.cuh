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
  bool digits; // staged as integers
  DigitForm form;
};
constexpr uint32_t TURN_UNITS = 32 / UNIT_VEC4S; // units that a warp loads at once
constexpr uint32_t TURN_COLS = TURN_UNITS * UNIT_COLS * AMK_WARPS;

__device__ __forceinline__ VectorUnits vector_units(Worker const& w, uint32_t units, uint32_t unpack) {
  uint32_t const log2 = unpacked_log2(unpack), lane = w.thread % 32, mine = lane / UNIT_VEC4S;
  uint32_t const unit = ((w.thread / 32 + (mine >> log2) * AMK_WARPS) << log2) + (mine & ((1u << log2) - 1));
  return VectorUnits{log2, (units << log2) * UNIT_COLS, unit * UNIT_COLS + lane % UNIT_VEC4S * 4, has_digits(unpack), digit_form(unpack)};
}
// Stages 4 elements from element `e` on, if they are of whole units. In a kernel of integers `stage_turns` does, for all turns together.
__device__ __forceinline__ void stage_turn(Worker const& w, VectorUnits const& u, uint32_t e, float4 v) {
  if (!SOME_DIGITS && e < u.elements) {
    stage_x4(w, e, v);
  }
}
// All lanes of a warp: each stages 4 elements in each of N turns.
template <uint32_t N> __device__ __forceinline__ void stage_turns(Worker const& w, VectorUnits const& u, uint32_t e, float4 const (&v)[N]) {
  if (!SOME_DIGITS) {
    return;
  }
  if (u.digits) {
    uint32_t const unit = e / UNIT_COLS >> (u.form.bytes ? 1 : 2), units = u.form.bytes ? TURN_COLS / 64 : TURN_COLS / 128; // the lane's, and of a turn
    stage_digits<N>(w.x + unit * u.form.size, units * u.form.size, w.thread % 32, u.form, e, TURN_COLS, u.elements, v);
    return;
  }
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
    if (e + n * TURN_COLS < u.elements) {
      stage_x4(w, e + n * TURN_COLS, v[n]);
    }
  }
}
__device__ __forceinline__ void stage_units(Worker const& w, VectorUnits const& u, uint32_t e, float4 v) {
  float4 const one[1] = {v};
  stage_turn(w, u, e, v);
  stage_turns<1>(w, u, e, one);
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
#if AMK_UNPACK & 3312 // INTEGERS
    static_assert(INTEGERS == 3312, "the formats whose vectors are staged as digits");
    __syncwarp(); // lanes leave a wait one by one, and would stage digits one by one, which takes long
#endif
    stage_units(w, u, e, x);
  }
}

// One warp: stages its columns of the token's embedding, times the norm; returns the lane's sum of squares.
__device__ __forceinline__ float stage_embedding(Worker const& w, ResolvedBuffer const& in, float const* norm, amk_matvec_params const& p, VectorUnits const& u) {
  float square = 0.f;
#pragma unroll 1
  for (uint32_t e = u.first; (SOME_DIGITS ? e - u.first : e) < u.elements; e += TURN_COLS) { // padding is zero in the matrix
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f), n = x;
    if (!MIXED || e < p.k_len) { // the units of the embedding are shorter
      x = embedding_read4(w, in, e), n = __ldg((float4 const*)(norm + e));
      square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    stage_units(w, u, e, make_float4(x.x * n.x, x.y * n.y, x.z * n.z, x.w * n.w));
  }
  return square;
}

constexpr uint32_t LONGEST_UNIT = UNIT_COLS << (SCALED_UNITS ? 2 : MIXED ? 1 : 0); // columns that some unit of a matrix has
constexpr uint32_t TURN_BYTES = TURN_COLS / UNIT_COLS * X_BYTES; // of the activation buffer
constexpr bool WHOLE_HEADS = TURN_COLS % AMK_HEAD_DIM == 0; // a turn begins where a head does, so that each is as far from the one before

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
      at[i] = SPARE_REGISTERS && WHOLE_HEADS ? at0 + (first / TURN_COLS + i) * step : e + (e / AMK_HEAD_DIM + 1) * skip;
      n[i] = NORM && (norm != nullptr || (SPARE_REGISTERS && WIDTH != 0)) && wanted[i] ? __ldg((float4 const*)(norm + e)) : make_float4(1.f, 1.f, 1.f, 1.f);
    }
    vec4s_wait(w, words, at, wanted, v);
#if AMK_UNPACK & 3312 || defined(LOOKS_AT_ONE) // INTEGERS, as above; long vectors of floats
    __syncwarp();
#endif
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      uint32_t const e = first + i * TURN_COLS + u.first;
      float4 const x = vec4_value(words, v[i]);
      if (NORM) {
        square = fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, fmaf(x.w, x.w, square))));
      }
      n[i] = make_float4(x.x * n[i].x, x.y * n[i].y, x.z * n[i].z, x.w * n[i].w);
      if (!SPARE_REGISTERS) {
        stage_turn(w, u, e, n[i]);
      } else if ((ALL && (i + 1) * TURN_COLS <= WIDTH) || e < whole) {
        x4_store(place + (first / TURN_COLS + i) * TURN_BYTES, n[i]);
      }
    }
    stage_turns<N>(w, u, first + u.first, n);
    if (ALL) {
      break;
    }
  }
  return square;
}

#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
// The residual stream before a block, which is the embedding table or words.
struct Residual {
  ResolvedBuffer buffer;
  Words words;
};
__device__ __forceinline__ Residual residual_of(Worker const& w, StagedTask const& st) { return Residual{st.buffer[3], buffer_words(w, st.buffer[3])}; }
// Requests 4 elements. Words may be too old: their block's result may arrive before them, since neither orders the other.
__device__ __forceinline__ uint4 residual_load(Worker const& w, Residual const& r, uint32_t e) {
  if (r.buffer.kind == AMK_BUFFER_EMBEDDING) {
    float4 const v = embedding_read4(w, r.buffer, e);
    return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
  }
  return load_u32x4(r.words.at + e);
}

// The elements of the stream after a block that a task stores: those of its tiles. Same as ir::program::stream_part.
struct StreamPart {
  Words words;
  uint32_t begin, end;
  __device__ __forceinline__ void store(uint32_t e, float4 v) const {
    if (e >= begin && e < end) {
      word_write(words, e, v.x), word_write(words, e + 1, v.y), word_write(words, e + 2, v.z), word_write(words, e + 3, v.w);
    }
  }
};
__device__ __forceinline__ StreamPart stream_part(Worker const& w, StagedTask const& st, amk_matvec_params const& p) {
  ResolvedBuffer const& to = st.buffer[AMK_READS_STAGED + 1];
  if (p.epilogue == AMK_EPILOGUE_LOGITS || to.address == 0) { // the second output is another, or there is none
    return StreamPart{Words{}, 0, 0};
  }
  uint32_t const groups = (p.k_len + 3) / 4, tiles = (p.rows + AMK_UNIT_ROWS - 1) / AMK_UNIT_ROWS, each = (groups + tiles - 1) / tiles * 4;
  uint32_t const begin = p.tile0 * each, end = begin + p.tiles * each;
  return StreamPart{buffer_words(w, to), begin, end < p.k_len ? end : p.k_len};
}

// The weights of the norm that ends a block; those of the next block's norm lie behind them, if it has one.
struct PostNorm {
  float const* first;
  float const* second;
};
__device__ __forceinline__ PostNorm post_norm_of(StagedTask const& st, amk_matvec_params const& p) {
  float const* const first = (float const*)st.buffer[1].address;
  return PostNorm{first, st.buffer[1].units > p.k_len ? first + p.k_len : nullptr};
}
__device__ __forceinline__ float4 post_normed(float4 sum, float4 weight, float factor, float4 residual) {
  return make_float4(fmaf(sum.x * weight.x, factor, residual.x), fmaf(sum.y * weight.y, factor, residual.y), fmaf(sum.z * weight.z, factor, residual.z), fmaf(sum.w * weight.w, factor, residual.w));
}
__device__ __forceinline__ float vec4_squares(float4 v, float sum) { return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum)))); }

#if AMK_SEQS == 1
// Sum over all threads. Its scratch is free until the candidates of the task: every warp has read it before the task's barrier, and what a
// task writes there next is behind that.
__device__ __forceinline__ float consumers_sum(Worker const& w, float v) {
  v = warp_sum(v);
  if (w.thread % 32 == 0) {
    w.shared->best_value[w.thread / 32] = v;
  }
  consumers_sync();
  float sum = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    sum += w.shared->best_value[i];
  }
  return sum;
}

// One warp: stages its columns of the stream after a block, times the next norm if there is one; stores the task's part of it; returns the
// lane's sum of squares. The block's result is read twice if registers do not hold all of it: its norm is a sum over the whole vector.
template <uint32_t WIDTH, uint32_t MOST>
__device__ __forceinline__ float stage_post_norm(Worker const& w, ResolvedBuffer const& in, StagedTask const& st, amk_matvec_params const& p, VectorUnits const& u) {
  constexpr uint32_t N = turns_at_once(WIDTH, MOST);
  constexpr bool ONCE = N == turns_of(WIDTH);
  Words const sums = buffer_words(w, in);
  Residual const residual = residual_of(w, st);
  PostNorm const norm = post_norm_of(st, p);
  StreamPart const part = stream_part(w, st, p);
  uint32_t at[N];
  bool wanted[N];
  uint4 v[N], r[N];
  float4 n[N], m[N];
  auto const place = [&](uint32_t first) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      at[i] = first + i * TURN_COLS + u.first;
      wanted[i] = at[i] < WIDTH;
    }
  };
  // Requests what is there before the block's result is.
  auto const early = [&] {
    float4 const ones = make_float4(1.f, 1.f, 1.f, 1.f);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      r[i] = wanted[i] ? residual_load(w, residual, at[i]) : make_uint4(0, 0, 0, 0);
      n[i] = wanted[i] ? load_constant(norm.first + at[i]) : ones;
      m[i] = wanted[i] && norm.second != nullptr ? load_constant(norm.second + at[i]) : ones;
    }
  };
  float square = 0.f;
#pragma unroll 1
  for (uint32_t first = 0; first < WIDTH; first += N * TURN_COLS) {
    place(first);
    if (ONCE) {
      early();
    }
    vec4s_wait(w, sums, at, wanted, v);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      square = vec4_squares(vec4_value(sums, v[i]), square);
    }
  }
  float const factor = rsqrtf(fmaf(consumers_sum(w, square), __fdividef(1.f, (float)WIDTH), p.eps));
  square = 0.f;
#pragma unroll 1
  for (uint32_t first = 0; first < WIDTH; first += N * TURN_COLS) {
    if (!ONCE) {
      place(first);
      early();
      vec4s_wait(w, sums, at, wanted, v);
    }
    bool late = false;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      late |= wanted[i] && !vec4_here(residual.words, r[i]);
    }
    if (__builtin_expect(late, 0)) {
      vec4s_wait(w, residual.words, at, wanted, r);
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      float4 const x = post_normed(vec4_value(sums, v[i]), n[i], factor, vec4_value(residual.words, r[i]));
      square = vec4_squares(x, square);
      part.store(at[i], x);
      m[i] = make_float4(x.x * m[i].x, x.y * m[i].y, x.z * m[i].z, x.w * m[i].w); // beyond the vector they are zero
      stage_turn(w, u, at[i], m[i]);
    }
    stage_turns<N>(w, u, at[0], m);
  }
  return square;
}
#endif
#endif

// Whether the staged vector is a norm's but for its factor, which the products are multiplied by.
__device__ __forceinline__ bool is_normed(StagedTask const& st, amk_matvec_params const& p) {
#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
  if (p.prologue == AMK_PROLOGUE_POST_NORM) {
    return post_norm_of(st, p).second != nullptr;
  }
#endif
  return p.prologue == AMK_PROLOGUE_RMS;
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
#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1 && AMK_SEQS == 1
  if (p.prologue == AMK_PROLOGUE_POST_NORM) {
    return stage_post_norm<AMK_HIDDEN, 4>(w, in, st, p, u);
  }
#endif
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
