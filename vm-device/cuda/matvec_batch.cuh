// matvec for several sequences: rows of a streamed matrix times one vector per sequence; the weights are read once.
//
// The vectors are the A operand of the products (batch_products.cuh), so 8 sequences take as many products as one. Warp w multiplies units w,
// w + 8, ... of a part of the rows, and its columns of all sequences stay in its registers: they are loaded from L2 straight into the operands'
// places, not through shared memory. A row that is longer than the registers hold is processed in parts: one part of all tiles whose sums are
// kept, then the next part of them (loader_parts in stream.cuh; ir/src/program/staging.rs sets the length of a part).
#pragma once

#if AMK_SEQS > 1
#if AMK_DTYPE == AMK_DTYPE_F32
#error "several sequences share the products of 16-bit weights; with f32 weights a kernel has one sequence"
#endif

constexpr uint32_t SEQ_SUMS = AMK_UNIT_ROWS * SEQS;                            // per tile and warp
constexpr uint32_t SEQ_VEC4S = 2 * SHARE;                                       // groups of 4 elements per thread
constexpr uint32_t OUT_ONCE = CONSUMERS / SEQ_SUMS;                             // tiles whose rows the threads finish at once
constexpr uint32_t OUT_TURNS = (BATCH_TILES + OUT_ONCE - 1) / OUT_ONCE;           // turns until all are finished
static_assert(CONSUMERS % SEQ_SUMS == 0, "a thread finishes rows of one sequence");

// What the warps exchange besides the sums of products. It is in the shared memory where kernels of one sequence keep those sums.
struct BatchScratch {
  float squares[2][SEQS][AMK_WARPS]; // double-buffered by barrier
#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
  float sums[SEQS][AMK_WARPS]; // of squares of a block's result
#endif
  float best_value[CONSUMERS / AMK_UNIT_ROWS];
  uint32_t best_row[CONSUMERS / AMK_UNIT_ROWS];
};
static_assert(sizeof(BatchScratch) <= sizeof(Shared::part), "the scratch of several sequences");
__device__ __forceinline__ BatchScratch& batch_scratch(Worker const& w) { return *(BatchScratch*)&w.shared->part; }

// A warp's sums for a tile: those of sequence l begin at word l * AMK_UNIT_ROWS. Double-buffered by barrier.
__device__ __forceinline__ float* seq_sums(Worker const& w, uint32_t buffer, uint32_t tile, uint32_t warp) {
  return (float*)w.x + ((buffer * BATCH_TILES + tile) * AMK_WARPS + warp) * SEQ_SUMS;
}

// The sequence of this thread's rows of the A operand. Rows of sequences that do not run are copies of the first; their sums are never read.
__device__ __forceinline__ uint32_t operand_seq(Worker const& w) {
  uint32_t const row = w.thread % 32 / 4 % SEQS;
  return row < seqs_running(w) ? row : 0;
}

// A whole warp: loads groups of 4 words of a buffer until all that are `wanted` (one bit each) have this step's tag. `at(i)` is the first word
// of group i; the others are zero. All are requested at once. After that each thread polls a single missing group until it arrives, since the
// sequences' vectors are as many bytes as a stage of weights and use the same path to the multiprocessor.
// WHOLE: all groups are wanted.
template <bool WHOLE, uint32_t N, typename At> __device__ __forceinline__ void batch_wait(Worker const& w, Words const& s, At const& at, uint32_t wanted, uint4 (&out)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    out[i] = make_uint4(s.tag, s.tag, s.tag, s.tag); // a zero of this step
    if (WHOLE || (wanted >> i & 1) != 0) {
      out[i] = load_u32x4(s.at + at(i));
    }
  }
#pragma unroll 1
  for (;;) {
    uint4 off = make_uint4(0, 0, 0, 0); // four independent chains
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      off.x |= out[i].x ^ s.tag, off.y |= out[i].y ^ s.tag, off.z |= out[i].z ^ s.tag, off.w |= out[i].w ^ s.tag;
    }
    if (__all_sync(~0u, ((off.x | off.y | off.z | off.w) & s.mask) == 0) || __any_sync(~0u, is_dead(w.shared))) {
      return;
    }
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      missing |= vec4_here(s, out[i]) ? 0 : 1u << i;
    }
    uint32_t const* one = s.at + at(missing != 0 ? 31 - __clz(missing) : 0);
    for (uint32_t spin = 1;; ++spin) {
      bool const here = missing == 0 || vec4_here(s, load_u32x4(one));
      if (__all_sync(~0u, here) || __any_sync(~0u, is_dead(w.shared))) {
        break;
      }
      if (spin % SPINS_PER_NOTE == 0 && !here) {
        note_wait(w.shared, AMK_TRAP_PAYLOAD_DEADLINE, (uint32_t)((uint64_t)one >> 3), 0, s.tag);
      }
      poll_pause();
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      if ((missing >> i & 1) != 0) {
        out[i] = load_u32x4(s.at + at(i));
      }
    }
  }
}

// Splits four elements into high halves, two words, and low halves, of words that are split already (input_write).
__device__ __forceinline__ uint4 vec4_split(Words const& s, uint4 v) {
  uint32_t const bare = ~(s.mask | s.mask << 16);
  return make_uint4(__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632), __byte_perm(v.x, v.y, 0x5410) & bare, __byte_perm(v.z, v.w, 0x5410) & bare);
}

__device__ __forceinline__ void vec4_square(float4 v, float4& sum) { sum = make_float4(fmaf(v.x, v.x, sum.x), fmaf(v.y, v.y, sum.y), fmaf(v.z, v.z, sum.z), fmaf(v.w, v.w, sum.w)); }
__device__ __forceinline__ float vec4_sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }
__device__ __forceinline__ float4 vec4_times(float4 v, float4 n) { return make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w); }

// How a vector's elements become operands: values, values times a norm, or halves already (input_write).
enum class Form { VALUES, NORMED, SPLIT };

// Loads the `wanted` groups of 4 words from `first` on into the operands.
template <Form FORM, uint32_t SKIP, bool WHOLE>
__device__ __forceinline__ float batch_stage_words(Worker const& w, Words const& words, float const* norm, uint32_t first, uint32_t wanted, SeqInput& x) {
  uint4 v[SEQ_VEC4S];
  batch_wait<WHOLE>(w, words, [&](uint32_t i) { return element_word<SKIP>(first, i / 2) + i % 2 * SECOND; }, wanted, v);
  float4 square = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (uint32_t j = 0; j < SHARE; ++j) {
    if (FORM == Form::SPLIT) {
      operand_of(vec4_split(words, v[2 * j]), vec4_split(words, v[2 * j + 1]), x.half[j]);
      continue;
    }
    float4 a = vec4_value(words, v[2 * j]), b = vec4_value(words, v[2 * j + 1]);
    if (FORM == Form::NORMED) {
      vec4_square(a, square);
      vec4_square(b, square);
      // A group that is not wanted is zero, and so is its product with the norm's first weights.
      float const* n = norm + (WHOLE || (wanted >> 2 * j & 1) != 0 ? first + unit_elements(j) : 0);
      float const* m = norm + (WHOLE || (wanted >> (2 * j + 1) & 1) != 0 ? first + unit_elements(j) + SECOND : 0);
      a = vec4_times(a, load_constant(n)), b = vec4_times(b, load_constant(m));
    }
    operand_of(vec4_halves(a), vec4_halves(b), x.half[j]);
  }
  return vec4_sum(square);
}

// Loads units of operands `unit0`.. of the sequences' vectors, `mine` of which are this warp's.
template <Form FORM, uint32_t SKIP>
__device__ __forceinline__ float batch_stage_vector(Worker const& w, Words const& words, float const* norm, amk_matvec_params const& p, uint32_t unit0, uint32_t mine, SeqInput& x) {
  uint32_t const first = operand_element(w, unit0 + warp_unit(w));
  uint32_t wanted = 0;
#pragma unroll
  for (uint32_t i = 0; i < SEQ_VEC4S; ++i) {
    wanted |= i / 2 < mine && first + unit_elements(i / 2) + i % 2 * SECOND < p.k_len ? 1u << i : 0;
  }
  if (FORM == Form::NORMED && w.thread % 32 < mine) {
    prefetch_l1(norm + (unit0 + warp_unit(w) + unit_step(w.thread % 32)) * UNIT_COLS);
  }
  if (__all_sync(~0u, wanted == (1u << SEQ_VEC4S) - 1)) {
    return batch_stage_words<FORM, SKIP, true>(w, words, norm, first, wanted, x);
  }
  return batch_stage_words<FORM, SKIP, false>(w, words, norm, first, wanted, x);
}

// The same for the tokens' embeddings, times the norm.
__device__ __forceinline__ float batch_stage_embedding(Worker const& w, ResolvedBuffer const& in, float const* norm, amk_matvec_params const& p, uint32_t unit0, uint32_t mine,
                                                       SeqInput& x) {
  float4 square = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (uint32_t j = 0; j < SHARE; ++j) {
    float4 v[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      uint32_t const e = operand_element(w, unit0 + warp_unit(w) + unit_step(j)) + i * SECOND;
      v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (j < mine && e < p.k_len) {
        v[i] = embedding_read4(w, in, e);
        vec4_square(v[i], square);
        v[i] = norm != nullptr ? vec4_times(v[i], load_constant(norm + e)) : v[i];
      }
    }
    operand_of(vec4_halves(v[0]), vec4_halves(v[1]), x.half[j]);
  }
  return vec4_sum(square);
}

// The same for the attention's result, merged from `active` splits: 1 or more, different in each sequence, `most` in any.
__device__ __forceinline__ void batch_stage_merged(Worker const& w, Words const& words, amk_matvec_params const& p, uint32_t active, uint32_t most, uint32_t unit0, uint32_t mine,
                                                   SeqInput& x) {
  constexpr uint32_t ONCE = 2, SPLITS = 2; // units and splits that are requested at once
  uint32_t const first = operand_element(w, unit0 + warp_unit(w)), split_words = p.k_len / AMK_HEAD_DIM * PARTIAL_WORDS;
#pragma unroll
  for (uint32_t j0 = 0; j0 < SHARE; j0 += ONCE) {
    float4 const none = make_float4(0.f, 0.f, 0.f, 0.f);
    Merged a[ONCE];
    float4 b[ONCE];
#pragma unroll
    for (uint32_t j = 0; j < ONCE; ++j) {
      a[j] = merged_empty(), b[j] = none;
    }
#pragma unroll 1
    for (uint32_t split = 0; split < most; split += SPLITS) {
      uint32_t wanted = 0;
#pragma unroll
      for (uint32_t i = 0; i < ONCE * SPLITS; ++i) {
        wanted |= split + i % SPLITS < active && j0 + i / SPLITS < mine && first + unit_elements(j0 + i / SPLITS) < p.k_len ? 7u << 3 * i : 0;
      }
      uint4 v[3 * ONCE * SPLITS];
      batch_wait<false>(
          w, words,
          [&](uint32_t i) {
            uint32_t const unit = j0 + i / 3 / SPLITS, word = split * split_words + head_words<PARTIAL_WORDS>(first, unit) + i / 3 % SPLITS * split_words;
            return i % 3 == 0 ? word : word + PARTIAL_HEAD + place_in_head(first, unit) + (i % 3 - 1) * SECOND;
          },
          wanted, v);
#pragma unroll
      for (uint32_t i = 0; i < ONCE * SPLITS; ++i) {
        if ((wanted >> 3 * i & 1) == 0) {
          continue;
        }
        Merged& to = a[i / SPLITS];
        float4& second = b[i / SPLITS];
        float const m = word_value(words, v[3 * i].x), l = active == 1 ? 1.f : word_value(words, v[3 * i].y); // with one split, the partials are the result
        Merged other = Merged{to.m, to.l, second};
        merged_add(other, m, l, vec4_value(words, v[3 * i + 2]));
        merged_add(to, m, l, vec4_value(words, v[3 * i + 1]));
        second = other.v;
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < ONCE; ++j) {
      bool const some = a[j].l > 0.f;
      operand_of(vec4_halves(some ? merged_value(a[j]) : none), vec4_halves(some ? merged_value(Merged{a[j].m, a[j].l, b[j]}) : none), x.half[j0 + j]);
    }
  }
}

#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
// Sums the squares of a sequence's elements over the four threads of a warp that hold them; the first of these has the sum.
__device__ __forceinline__ bool batch_sum_squares(Worker const& w, float& square) {
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  return w.thread % 4 == 0 && w.thread % 32 / 4 < SEQS;
}

// The groups of 4 words of COUNT units of this warp that the vector has, from its unit `from` on: a bit each. `first`: its first element.
template <uint32_t COUNT> __device__ __forceinline__ uint32_t batch_wanted(uint32_t first, uint32_t from, uint32_t mine, uint32_t k_len) {
  uint32_t wanted = 0;
#pragma unroll
  for (uint32_t i = 0; i < 2 * COUNT; ++i) {
    wanted |= from + i / 2 < mine && first + unit_elements(from + i / 2) + i % 2 * SECOND < k_len ? 1u << i : 0;
  }
  return wanted;
}

// All warps: the factor of a block's result in the norm that ends the block, in the sequence of this thread's operands. The whole result is
// read for it, before the parts of it become operands.
__device__ __forceinline__ float batch_post_factor(Worker const& w, StagedTask const& st, amk_matvec_params const& p) {
  constexpr uint32_t ONCE = 4; // units
  Worker const own = in_seq(w, operand_seq(w));
  Words const words = buffer_words(own, st.buffer[0]);
  uint32_t const warp = w.thread / 32, first = operand_element(w, warp_unit(w)), mine = operand_share(w, p.units, unpacked_log2(st.task.unpack));
  float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (uint32_t j = 0; j < mine; j += ONCE) {
    uint4 v[2 * ONCE];
    batch_wait<false>(own, words, [&](uint32_t i) { return first + unit_elements(j + i / 2) + i % 2 * SECOND; }, batch_wanted<ONCE>(first, j, mine, p.k_len), v);
#pragma unroll
    for (uint32_t i = 0; i < 2 * ONCE; ++i) {
      vec4_square(vec4_value(words, v[i]), four);
    }
  }
  float square = vec4_sum(four);
  BatchScratch& scratch = batch_scratch(w);
  if (batch_sum_squares(w, square)) {
    scratch.sums[w.thread % 32 / 4][warp] = square;
  }
  consumers_sync();
  float const* s = scratch.sums[own.seq];
  float sum = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    sum += s[i];
  }
  return rsqrtf(fmaf(sum, __fdividef(1.f, (float)p.k_len), p.eps));
}

// Loads units of operands `unit0`.. of the stream after a block, in which its result has this factor; stores the task's part of it if `stores`. The
// result has arrived.
__device__ __forceinline__ float batch_stage_post_norm(Worker const& own, StagedTask const& st, amk_matvec_params const& p, uint32_t unit0, uint32_t mine, float factor, bool stores, SeqInput& x) {
  constexpr uint32_t ONCE = 4; // units
  Words const sums = buffer_words(own, st.buffer[0]);
  Residual const residual = residual_of(own, st);
  PostNorm const norm = post_norm_of(st, p);
  StreamPart part = stream_part(own, st, p);
  if (!stores || own.thread % 32 / 4 >= seqs_running(own)) {
    part.end = 0;
  }
  uint32_t const first = operand_element(own, unit0 + warp_unit(own));
  float4 square = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (uint32_t j = 0; j < SHARE; j += ONCE) {
    auto const at = [&](uint32_t i) { return first + unit_elements(j + i / 2) + i % 2 * SECOND; };
    uint32_t const wanted = batch_wanted<ONCE>(first, j, mine, p.k_len);
    uint4 v[2 * ONCE], r[2 * ONCE];
#pragma unroll
    for (uint32_t i = 0; i < 2 * ONCE; ++i) {
      v[i] = (wanted >> i & 1) != 0 ? load_u32x4(sums.at + at(i)) : make_uint4(0, 0, 0, 0);
    }
    if (residual.buffer.kind == AMK_BUFFER_EMBEDDING) {
#pragma unroll
      for (uint32_t i = 0; i < 2 * ONCE; ++i) {
        r[i] = (wanted >> i & 1) != 0 ? residual_load(own, residual, at(i)) : make_uint4(0, 0, 0, 0);
      }
    } else {
      batch_wait<false>(own, residual.words, at, wanted, r);
    }
    float4 y[2 * ONCE];
#pragma unroll
    for (uint32_t i = 0; i < 2 * ONCE; ++i) {
      // A group that is not wanted is zero, and so is its product with the norms' first weights.
      uint32_t const e = (wanted >> i & 1) != 0 ? at(i) : 0;
      y[i] = post_normed(vec4_value(sums, v[i]), load_constant(norm.first + e), factor, vec4_value(residual.words, r[i]));
      vec4_square(y[i], square);
      if ((wanted >> i & 1) != 0) {
        part.store(e, y[i]);
      }
      y[i] = norm.second != nullptr ? vec4_times(y[i], load_constant(norm.second + e)) : y[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < ONCE; ++i) {
      operand_of(vec4_halves(y[2 * i]), vec4_halves(y[2 * i + 1]), x.half[j + i]);
    }
  }
  return vec4_sum(square);
}
#endif

// Layout of a task's tiles in the ring.
struct BatchTiles {
  uint32_t units, part;      // per tile; per part of it, except the last
  uint32_t parts, per_stage; // per tile; tiles, or parts of them, per stage: a divisor of BATCH_TILES, and 1 for parts without codes
};

// Loads units of operands `unit0`.. of the prologue's result, for all sequences, into registers. Returns the thread's part of its sequence's sum of squares.
// `factor`, `stores`: see batch_stage_post_norm.
__device__ __forceinline__ float batch_stage(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t unit0, uint32_t mine, float factor, bool stores, SeqInput& x) {
  Worker const own = in_seq(w, operand_seq(w));
  ResolvedBuffer const& in = st.buffer[0];
#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
  if (p.prologue == AMK_PROLOGUE_POST_NORM) {
    return batch_stage_post_norm(own, st, p, unit0, mine, factor, stores, x);
  }
#endif
  float const* norm = p.prologue == AMK_PROLOGUE_RMS ? (float const*)st.buffer[1].address : nullptr;
  if (in.kind == AMK_BUFFER_EMBEDDING) {
    return batch_stage_embedding(own, in, norm, p, unit0, mine, x);
  }
  Words const words = buffer_words(own, in);
  if (p.prologue == AMK_PROLOGUE_MERGE) {
    uint32_t const active = active_splits(attended(seq_position(own), p.window), p.kv_block, p.splits), most = __reduce_max_sync(~0u, active);
    if (most > 1) {
      batch_stage_merged(own, words, p, active, most, unit0, mine, x);
      return 0.f;
    }
    return batch_stage_vector<Form::VALUES, PARTIAL_HEAD>(own, words, nullptr, p, unit0, mine, x); // with one split, the partials are the result
  }
  if (norm == nullptr) {
    return batch_stage_vector<Form::SPLIT, 0>(own, words, norm, p, unit0, mine, x);
  }
  return batch_stage_vector<Form::NORMED, 0>(own, words, norm, p, unit0, mine, x);
}

// All products of this warp for a part of `tiles` tiles, of `units` units each. `left`: stages left in the task.
template <uint32_t UNPACK, bool FULL>
__device__ __forceinline__ void batch_products(Worker const& w, Cursor& c, BatchTiles const& k, uint32_t& left, SeqInput const& x, uint32_t buffer, uint32_t tiles, uint32_t units, uint32_t mine, bool first) {
  float* sums = seq_sums(w, buffer, 0, w.thread / 32);
  char const* place = nullptr;
#pragma unroll 1
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    uint32_t const in_stage = tile & (k.per_stage - 1);
    if (in_stage == 0) {
      note_near(w, left, 4);
      place = cursor_land(w, c);
    }
    BatchShare<UNPACK> v;
    batch_take<UNPACK, FULL>(w, place + in_stage * (MIXED ? units : k.units) * unit_bytes(UNPACK), mine, v); // without codes, tiles that share a stage are whole
    batch_multiply<UNPACK, FULL>(w, v, x, mine, sums, first);
    if (in_stage + 1 == k.per_stage || tile + 1 == tiles) {
      cursor_next(w, c); // after the products: what is multiplied has been read
      --left;
    }
    sums += AMK_WARPS * SEQ_SUMS;
  }
}

// Sum of a row of a sequence over the warps.
__device__ __forceinline__ float batch_row_sum(Worker const& w, uint32_t buffer, uint32_t tile, uint32_t at) {
  float v = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    v += seq_sums(w, buffer, tile, i)[at];
  }
  return v;
}

// The rows that a thread finishes out of up to BATCH_TILES tiles: row `thread % 8` for one sequence, of every OUT_ONCE-th tile, or pair of
// tiles if gate and up alternate.
struct SeqOut {
  uint32_t tile0, tiles; // first tile in the task, and number of tiles
  uint32_t every;        // 2 for pairs
  bool running;          // the sequence runs
};
__device__ __forceinline__ uint32_t out_seq(Worker const& w) { return w.thread / AMK_UNIT_ROWS % SEQS; }
__device__ __forceinline__ uint32_t out_tile(Worker const& w, SeqOut const& o, uint32_t turn) { return (turn * OUT_ONCE + w.thread / SEQ_SUMS) * o.every; }
__device__ __forceinline__ uint32_t out_row(Worker const& w, SeqOut const& o, uint32_t turn) { return (o.tile0 + out_tile(w, o, turn)) * AMK_UNIT_ROWS + w.thread % AMK_UNIT_ROWS; }
__device__ __forceinline__ bool out_mine(Worker const& w, SeqOut const& o, amk_matvec_params const& p, uint32_t turn) {
  return o.running && out_tile(w, o, turn) < o.tiles && out_row(w, o, turn) < p.rows;
}

// Finishes a thread's rows: sums over the warps, scale, bias, then the epilogue. `w` is set to the sequence of its rows.
__device__ __forceinline__ void batch_epilogue(Worker const& w, StagedTask const& st, amk_matvec_params const& p, SeqOut const& o, uint32_t buffer, float scale,
                                               Addends const (&add)[OUT_TURNS], Best& best) {
  Words const out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t const at = w.thread % SEQ_SUMS;
#pragma unroll
  for (uint32_t turn = 0; turn < OUT_TURNS; ++turn) {
    if (!out_mine(w, o, p, turn)) {
      continue;
    }
    uint32_t const tile = out_tile(w, o, turn);
    uint32_t row = out_row(w, o, turn);
    float v = batch_row_sum(w, buffer, tile, at) * scale_of(scale, add[turn].scale) + add[turn].bias;
    if (p.epilogue == AMK_EPILOGUE_LOGITS) {
      v = logit_capped(v, p.cap);
      best = better(best, Best{v, row});
      store_f32((float*)out.at + (size_t)seq_logits_row(w) * p.rows + row, v);
      continue;
    }
    if (p.epilogue == AMK_EPILOGUE_SILU_MUL) {
      float const up = batch_row_sum(w, buffer, tile + 1, at) * scale_of(scale, add[turn].scale_up) + add[turn].bias_up;
      row = row / (2 * AMK_UNIT_ROWS) * AMK_UNIT_ROWS + row % AMK_UNIT_ROWS;
      if (row >= st.buffer[AMK_READS_STAGED].units) { // words of the buffer: padding rows are dropped
        continue;
      }
      input_write(out, row, activated(v, p.activation) * up);
      continue;
    }
    if (p.epilogue == AMK_EPILOGUE_RESIDUAL) {
      v += residual_value(w, st, row, add[turn].residual, is_flag_in_data(st.buffer[3]));
    }
    word_write(out, row, v);
  }
}

// Writes the best row of this worker as candidate `index`, in each sequence.
__device__ __forceinline__ void batch_candidates(Worker const& w, StagedTask const& st, uint32_t index, Best best) {
  BatchScratch& scratch = batch_scratch(w);
#pragma unroll
  for (int o = 4; o > 0; o >>= 1) {
    best = better(best, Best{__shfl_xor_sync(~0u, best.value, o), __shfl_xor_sync(~0u, best.row, o)});
  }
  uint32_t const entry = w.thread / AMK_UNIT_ROWS;
  if (w.thread % AMK_UNIT_ROWS == 0) {
    scratch.best_value[entry] = best.value;
    scratch.best_row[entry] = best.row;
  }
  consumers_sync();
  if (w.thread < seqs_running(w)) {
    best = Best{scratch.best_value[w.thread], scratch.best_row[w.thread]};
    for (uint32_t i = SEQS; i < CONSUMERS / AMK_UNIT_ROWS; i += SEQS) {
      best = better(best, Best{scratch.best_value[w.thread + i], scratch.best_row[w.thread + i]});
    }
    // As in write_candidate: the last words of this worker in the step.
    uint32_t* out = (uint32_t*)buffer_address(in_seq(w, w.thread), st.buffer[AMK_READS_STAGED + 1]) + (size_t)index * 2;
    store_u32(out, __float_as_uint(best.value));
    store_u32(out + 1, best.row);
  }
}

// Sums the squares of a sequence's elements over the threads that hold them, for use after the barrier.
__device__ __forceinline__ void batch_leave_squares(Worker const& w, uint32_t buffer, float square) {
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  uint32_t const row = w.thread % 32 / 4;
  if (w.thread % 4 == 0 && row < SEQS) {
    batch_scratch(w).squares[buffer][row][w.thread / 32] = square;
  }
}
__device__ __forceinline__ float batch_scale(Worker const& w, uint32_t buffer, amk_matvec_params const& p) {
  float const* s = batch_scratch(w).squares[buffer][out_seq(w)];
  float4 const a = *(float4 const*)s, b = *(float4 const*)(s + 4);
  return rsqrtf(fmaf(((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)), __fdividef(1.f, (float)p.k_len), p.eps));
}

__device__ __forceinline__ void op_matvec_batch(Worker& w, StagedTask const& st, Cursor& c) {
  amk_matvec_params const& p = *(amk_matvec_params const*)st.task.params; // read again where it is used: registers are for vectors
  BatchTiles const k = {p.units, st.task.tile_parts == 1 ? p.units : st.task.stage_units, st.task.tile_parts, st.task.stage_tiles};
  bool const rms = is_normed(st, p);
  uint32_t const log2 = unpacked_log2(st.task.unpack);
  Worker const out = in_seq(w, out_seq(w));
  SeqInput x;
  uint32_t left = MIXED ? (p.tiles + k.per_stage - 1) / k.per_stage * k.parts : k.parts > 1 ? p.tiles * k.parts : (p.tiles + k.per_stage - 1) / k.per_stage; // stages left in the task
  Best best = {-__int_as_float(0x7f800000), 0xffffffffu};
  float scale = 1.f / VECTOR_FACTOR, square = 0.f, factor = 1.f;
#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
  if (p.prologue == AMK_PROLOGUE_POST_NORM) {
    factor = batch_post_factor(w, st, p);
  }
#endif
#pragma unroll 1
  for (uint32_t done = 0; done < p.tiles; done += BATCH_TILES) {
    uint32_t const buffer = w.parity, tiles = p.tiles - done < BATCH_TILES ? p.tiles - done : BATCH_TILES;
    SeqOut const o = {p.tile0 + done, tiles, p.epilogue == AMK_EPILOGUE_SILU_MUL ? 2u : 1u, out_seq(w) < seqs_running(w)};
    Addends add[OUT_TURNS];
    barrier_announce(w);
#pragma unroll 1
    for (uint32_t turn = 0; turn < k.parts; ++turn) {
      uint32_t const part = batch_part(done, turn, k.parts), unit0 = part * k.part, units = k.units - unit0 < k.part ? k.units - unit0 : k.part, mine = operand_share(w, units, log2);
      if (done == 0 || (MIXED ? turn > 0 : k.parts > 1)) { // else it is in registers
        square += batch_stage(w, st, p, unit0 << log2, mine, factor, done == 0, x);
        if constexpr (EXCESS_CODES) {
          operand_sums(x);
        }
        if (w.thread == 0) {
          flag_store(&w.shared->near, left <= 3); // its last stages have arrived already
        }
        trace_staged(w);
      }
      if (turn + 1 == k.parts) { // overlaps with the products
#pragma unroll
        for (uint32_t turn = 0; turn < OUT_TURNS; ++turn) {
          add[turn] = addends(out, st, p, out_mine(w, o, p, turn) ? out_row(w, o, turn) : p.rows, plan_of(st));
        }
      }
      with_unpack(st.task.unpack, [&](auto unpack) {
        if (mine == SHARE) {
          batch_products<decltype(unpack)::value, true>(w, c, k, left, x, buffer, tiles, units, mine, turn == 0);
        } else {
          batch_products<decltype(unpack)::value, false>(w, c, k, left, x, buffer, tiles, units, mine, turn == 0);
        }
      });
    }
    if (done == 0) {
      batch_leave_squares(w, buffer, square);
    }
    trace_multiplied(w);
    barrier_meet(w);
    if (rms && done == 0) {
      scale = batch_scale(w, buffer, p) / VECTOR_FACTOR;
    }
    batch_epilogue(out, st, p, o, buffer, scale, add, best);
  }
  if (p.epilogue == AMK_EPILOGUE_LOGITS) {
    batch_candidates(w, st, p.candidate, best);
  }
}
#endif
