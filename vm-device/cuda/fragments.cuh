// Fragments: the parts of a matvec's tiles that a warp loads into registers at once, and their products with its part of the vector.
// A stage of the ring holds up to eight whole tiles, or a part (chunk) of a tile that is longer than a stage; the last chunk may be shorter.
// Warp w multiplies units w, w + 8, ... of every chunk, and chunks begin at multiples of 8, so it needs only units w, w + 8, ... of the vector. A
// fragment (Share) is up to UNITS units of a chunk, of one tile or of several. Their sizes are compiled in (AMK_SHARES has bit n for fragments of
// n UNITS, and bit 0 if chunks have any length); tiles of any other length are multiplied without fragments.
#pragma once

// Layout of a task's tiles in the ring.
struct Tiles {
  uint32_t units;       // per tile
  uint32_t stage_units; // per chunk if a tile is longer than a stage; else per the tiles of a stage
  uint32_t per_stage;   // tiles per stage; 1 if a tile has several chunks
  uint32_t count;       // tiles of the task
  uint32_t warp_units;  // units per fragment, or 0 if tiles are not taken in fragments
  uint32_t chunk;       // units of a chunk that is a fragment
  uint32_t last;        // units of a tile's last chunk
  uint32_t chunks;      // chunks per tile that are fragments
  uint32_t parts;       // fragments of a stage
  uint32_t shares;      // fragments of the task
  bool held;            // they wait in registers, except one at most, and are multiplied in one pass
};
// Tiles per fragment. The host's stages have a multiple of it (ir/src/program/staging.rs).
__device__ constexpr uint32_t share_tiles_log2(uint32_t warp_units) { return SCALED_UNITS && warp_units == 1 ? 2 : 2 * warp_units <= FRAGMENT ? 1 : 0; }
__device__ constexpr uint32_t share_tiles(uint32_t warp_units) { return 1u << share_tiles_log2(warp_units); }
// A fragment: its units of each tile, and its tiles. Where fragments are half as long as a stage (see Share), a stage has one or two of them: of all
// units of a half of the tiles, or of a half of each warp's units.
template <uint32_t UNPACK, uint32_t UNITS> struct Fragment {
  static constexpr bool HALVES = UNITS > FRAGMENT;
  static constexpr uint32_t EACH = HALVES ? (UNITS + 1) / 2 : UNITS, TILES = share_tiles(UNITS);
  // Independent chains of a tile's products: enough of them that a product need not wait for the one before. Sums that are scaled need none.
  static constexpr uint32_t CHAINS = has_scales(UNPACK) ? 1 : TILES == 1 ? 4 : 2;
};
__device__ constexpr bool has_share(uint32_t warp_units) { return (AMK_SHARES >> warp_units & 1) != 0; }
constexpr bool RAGGED = has_share(0); // chunks have any length: else all of a tile have the same, and those of SHARE are full stages
constexpr bool ASKS_EARLY = SCALE_WORDS < 2; // whether the next stage is asked for before the products: beside two words of scales registers are short
constexpr bool SPLIT = FRAGMENT < SHARE; // whether a stage may be two fragments
// Whether some task's fragments may all wait in registers (MatvecPlan). Longer ones of units with scales hold too few rows for that.
constexpr bool MAY_HOLD = !SPLIT || (AMK_SHARES & ((1u << FRAGMENT) - 2)) != 0;
__device__ __forceinline__ uint32_t stage_fragments(amk_task const& task) {
  return !SPLIT ? 1 : task.warp_units > FRAGMENT ? 2 : task.stage_tiles >> share_tiles_log2(task.warp_units);
}

// The task prefetcher: works out the fragments of a matvec.
__device__ __forceinline__ MatvecPlan matvec_plan(StagedTask const& st) {
  amk_task const& task = st.task;
  amk_matvec_params const& p = *(amk_matvec_params const*)task.params;
  MatvecPlan plan = {0, 1, false, false, false};
  if (task.warp_units > SHARE / 2) { // a stage has one tile, or a part of it
    plan.chunks = (p.units + task.stage_units - 1) / task.stage_units;
    plan.shares = p.tiles * plan.chunks * stage_fragments(task);
  } else if (task.warp_units > 0) {
    uint32_t const log2 = SPLIT ? share_tiles_log2(task.warp_units) : 1;
    plan.shares = (p.tiles + (1u << log2) - 1) >> log2;
  }
  bool const held = SPLIT ? task.warp_units < FRAGMENT && plan.shares <= TAKE : stage_fragments(task) == 1 && plan.shares <= TAKE + 1 && (plan.chunks == 1 || plan.chunks == plan.shares);
  plan.held = MAY_HOLD && held && plan.shares > 0 && p.epilogue != AMK_EPILOGUE_LOGITS;
  plan.biased = st.buffer[2].address != 0 && !has_route(st); // with a route they are of the experts that are chosen
  plan.residual = p.epilogue == AMK_EPILOGUE_RESIDUAL && is_flag_in_data(st.buffer[3]);
  return plan;
}
__device__ __forceinline__ Tiles task_tiles(StagedTask const& st, amk_matvec_params const& p, MatvecPlan const& plan) {
  amk_task const& task = st.task;
  uint32_t const chunk = task.warp_units > SHARE / 2 ? task.stage_units : SPARE_REGISTERS && plan.shares == 0 ? 0 : p.units;
  return Tiles{p.units, task.stage_units, task.stage_tiles, p.tiles, task.warp_units, chunk, p.units - (plan.chunks - 1) * chunk, plan.chunks, stage_fragments(task), plan.shares, plan.held};
}
// Announces that the task's last stages are close, so that the loader keeps little in flight when the next hand-off comes.
__device__ __forceinline__ void note_near(Worker const& w, uint32_t left, uint32_t enough) { store_if(w.thread == 0 && left <= enough, &w.shared->near, 1); }
// Units of chunk `chunk` of a tile.
__device__ __forceinline__ uint32_t chunk_units(Tiles const& k, uint32_t chunk) { return RAGGED && chunk + 1 == k.chunks ? k.last : k.chunk; }
// Returns whether unit j of this warp's is in a chunk of `units` units. Without ragged chunks all but the last always are.
template <uint32_t UNITS> __device__ __forceinline__ bool share_has(Worker const& w, uint32_t units, uint32_t j) {
  return (!RAGGED && (UNITS == SHARE || j + 1 < UNITS)) || j * AMK_WARPS + w.thread / 32 < units;
}

// Loads this warp's fragment number PART of the current stage, which has arrived and holds chunk `chunk` of a tile; steps to the next stage after
// the `last` one. Returns the word that stage_read waits for before the stage is freed: it depends on all loads, whose order the compiler chooses. In
// place of a unit that is missing, whose part of the vector is zero, it loads the first. Tiles may be missing at the end of a task: what is read then
// is multiplied for nothing. If it is not `wanted`, all lanes load the same words, since that sets the registers at the least cost.
template <uint32_t UNPACK, uint32_t UNITS, uint32_t PART>
__device__ __forceinline__ uint32_t share_load(Worker const& w, Cursor& c, Tiles const& k, uint32_t chunk, bool last, Share& v, bool wanted = true) {
#ifdef AMK_FORMAT_SHARES
  if constexpr (!is_taken(UNPACK, UNITS)) { return 0; }
#endif
  using F = Fragment<UNPACK, UNITS>;
  constexpr uint32_t FIRST = F::HALVES ? PART * F::EACH : 0, EACH = F::HALVES && PART != 0 ? UNITS - F::EACH : F::EACH;
  uint32_t const units = chunk_units(k, chunk);
  char const* unit = cursor_place(w, c) + (w.thread / 32 + FIRST * AMK_WARPS) * unit_bytes(UNPACK);
  if (!F::HALVES && PART != 0 && k.parts == 2) {
    unit += F::TILES * k.chunk * unit_bytes(UNPACK);
  }
  char const* const mine = wanted ? unit + w.thread % 32 * 16 : (char const*)w.shared;
  OwnScales<UNPACK> const own(w, unit);
  uint32_t read = 0;
#pragma unroll
  for (uint32_t i = 0; i < F::TILES * F::EACH; ++i) {
    uint32_t const tile = i / F::EACH, j = i % F::EACH;
    if (j < EACH) {
#if AMK_SHARES & 3 // a warp may have no unit of a chunk, and what lies in its place may be no number
      bool const there = share_has<UNITS>(w, units, FIRST + j);
      uint32_t const at = (tile * k.chunk + j * AMK_WARPS) * unit_bytes(UNPACK);
      v.weights[i] = there ? stage_load(mine + at) : make_uint4(0, 0, 0, 0);
      read |= v.weights[i].x;
      if constexpr (has_scales(UNPACK)) {
        uint32_t* const scales = v.scales + i * scale_words(UNPACK);
#pragma unroll
        for (uint32_t word = 0; word < scale_words(UNPACK); ++word) {
          scales[word] = 0;
        }
        if (there) {
          own.load(at, scales);
        }
        read |= has_factors(UNPACK) ? scales[0] | scales[1] : scales[0];
      }
#else
      uint32_t const at = share_has<UNITS>(w, units, FIRST + j) ? (tile * k.chunk + j * AMK_WARPS) * unit_bytes(UNPACK) : 0;
      v.weights[i] = stage_load(mine + at);
      read |= v.weights[i].x;
      if constexpr (has_scales(UNPACK)) {
        uint32_t* const scales = v.scales + i * scale_words(UNPACK);
        own.load(at, scales);
        read |= has_factors(UNPACK) ? scales[0] | scales[1] : scales[0];
      }
#endif
    }
  }
  if (last) {
    cursor_step(w, c);
  }
  return read;
}
// The same of a whole stage, and frees it.
template <uint32_t UNPACK, uint32_t UNITS> __device__ __forceinline__ void share_take(Worker const& w, Cursor& c, Tiles const& k, uint32_t chunk, Share& v) {
  uint32_t const stage = c.stage, read = share_load<UNPACK, UNITS, 0>(w, c, k, chunk, true, v);
  stage_read(read, &w.shared->sink);
  cursor_free(w, stage);
}
// Calls f<UNITS>() for the task's fragment size, which is one of those compiled in.
template <uint32_t UNITS = 1, typename F> __device__ __forceinline__ void with_share(Tiles const& k, F const& f) {
  if constexpr (UNITS <= SHARE) {
    if constexpr (has_share(UNITS)) {
      bool const last = SPARE_REGISTERS && AMK_SHARES >> UNITS == 1;
      if (last || k.warp_units == UNITS) {
        f(Number<UNITS>());
        if (SPARE_REGISTERS) {
          return;
        }
      }
    }
    with_share<UNITS + 1>(k, f);
  }
}
// Calls f<UNPACK>() for what is done to the task's weights.
template <typename F> __device__ __forceinline__ void with_unpack(uint32_t unpack, F const& f) {
  if constexpr (!MIXED) {
    f(Number<AMK_UNPACK_NONE>());
  } else {
    auto const of = [&](auto number) {
      if constexpr (has_unpack(decltype(number)::value)) {
        if (unpack == decltype(number)::value) {
          f(number);
        }
      }
    };
    of(Number<AMK_UNPACK_NONE>()), of(Number<AMK_UNPACK_E4M3>()), of(Number<AMK_UNPACK_INT8>()), of(Number<AMK_UNPACK_E4M3_G64>());
    of(Number<AMK_UNPACK_INT8_G32>()), of(Number<AMK_UNPACK_INT4_G128>()), of(Number<AMK_UNPACK_INT4_G128_ZERO>()), of(Number<AMK_UNPACK_INT4_G32>()), of(Number<AMK_UNPACK_E4M3_G64_ROW>()), of(Number<AMK_UNPACK_MXFP4>());
    of(Number<AMK_UNPACK_INT4_K>()), of(Number<AMK_UNPACK_INT8_K>());
  }
}
// The same for how units lie in a stage, which does not depend on it if none has scales.
template <typename F> __device__ __forceinline__ void with_units(uint32_t unpack, F const& f) {
  if constexpr (SCALED_UNITS) {
    with_unpack(unpack, f);
  } else {
    f(Number<AMK_UNPACK_NONE>());
  }
}
// This warp's part of the vector for a fragment, and its products with it: in registers, but for units of codes in whole stages. There it would take
// two registers for one of weights, and is read from the activation buffer where it is multiplied.
template <uint32_t UNPACK, uint32_t UNITS> struct VectorPart {
  using F = Fragment<UNPACK, UNITS>;
  static constexpr bool HELD = UNPACK == AMK_UNPACK_NONE || FRAGMENT < SHARE;
  static constexpr uint32_t STEP = AMK_WARPS * group_bytes(UNPACK);
  // Whether both halves of a chunk's units are held, so that tiles of one chunk read them once. With 5 or 8 units a step is 1.4 to 2.3% shorter (70B,
  // 32B); with 7, of tiles of several chunks, it was 2.4% longer.
  static constexpr bool BOTH = UNPACK != AMK_UNPACK_NONE && F::HALVES && (UNITS == 5 || UNITS == 8);
  static constexpr uint32_t UNITS_HELD = BOTH ? UNITS : F::EACH;
  VectorGroup<UNPACK> x[HELD ? UNITS_HELD : 1]; // or where it is, and the units of the chunk
  char const* place;
  uint32_t first, there;
  template <uint32_t PART> __device__ __forceinline__ void load(Worker const& w, Tiles const& k, uint32_t chunk) {
    if (BOTH && PART == 1) {
      return; // came with the first
    }
    constexpr uint32_t FIRST = F::HALVES && !BOTH ? PART * F::EACH : 0;
    uint32_t const units = chunk_units(k, chunk);
    char const* from = w.x + (w.thread / 32 + chunk * k.chunk) * group_bytes(UNPACK);
    if constexpr (HELD) {
#pragma unroll
      for (uint32_t j = 0; j < UNITS_HELD; ++j) {
        char const* at = MIXED ? from + (FIRST + j) * STEP : w.x + (w.thread / 32 + chunk * k.chunk + j * AMK_WARPS) * X_BYTES;
        x[j] = FIRST + j < UNITS && share_has<UNITS>(w, units, FIRST + j) ? group_load<UNPACK>(w, at) : VectorGroup<UNPACK>{};
      }
    } else {
      place = from + FIRST * STEP, first = FIRST, there = units;
    }
  }
  template <uint32_t PART = 0> __device__ __forceinline__ void multiply(Worker const& w, Sums<F::CHAINS> (&s)[F::TILES], Share const& share) const {
    if constexpr (HELD) {
      constexpr uint32_t EACH = F::HALVES && PART != 0 ? UNITS - F::EACH : F::EACH;
      VectorGroup<UNPACK> const(&part)[EACH] = (VectorGroup<UNPACK> const(&)[EACH])x[BOTH ? PART * F::EACH : 0];
      groups_multiply<UNPACK, EACH, F::TILES * EACH, F::TILES, F::CHAINS>(w, s, part, share.weights, share.scales);
    } else {
      constexpr uint32_t ONCE = !has_scales(UNPACK) && F::TILES == 1 && F::EACH > 1 ? 2 : 1; // units of a tile
#pragma unroll
      for (uint32_t j = 0; j < F::EACH; j += ONCE) {
        if (first + j >= UNITS || !share_has<UNITS>(w, there, first + j)) {
          continue;
        }
        if (ONCE == 2 && (j + 1 == F::EACH || first + j + 1 >= UNITS || !share_has<UNITS>(w, there, first + j + 1))) {
          units_multiply<1>(w, s, share, j);
        } else {
          units_multiply<ONCE>(w, s, share, j);
        }
      }
    }
  }
  // Multiplies ONCE units of each tile, from unit j on.
  template <uint32_t ONCE> __device__ __forceinline__ void units_multiply(Worker const& w, Sums<F::CHAINS> (&s)[F::TILES], Share const& share, uint32_t j) const {
    VectorGroup<UNPACK> once[ONCE];
    constexpr uint32_t WORDS = scale_words(UNPACK);
    uint4 weights[ONCE * F::TILES];
    uint32_t scales[WORDS == 0 ? 1 : ONCE * F::TILES * WORDS];
#pragma unroll
    for (uint32_t n = 0; n < ONCE * F::TILES; ++n) {
      uint32_t const from = n / ONCE * F::EACH + j + n % ONCE;
      weights[n] = share.weights[from];
#pragma unroll
      for (uint32_t i = 0; i < WORDS; ++i) {
        scales[n * WORDS + i] = share.scales[from * WORDS + i];
      }
    }
#pragma unroll
    for (uint32_t n = 0; n < ONCE; ++n) {
      once[n] = group_load<UNPACK>(w, place + (j + n) * STEP);
    }
    groups_multiply<UNPACK, ONCE, ONCE * F::TILES, F::TILES, F::CHAINS>(w, s, once, weights, scales);
  }
  // The same of operands; calls `after` with the number of each product. Numbers continue up to five.
  template <typename A> __device__ __forceinline__ void multiply(Worker const&, Sums<F::CHAINS> (&s)[F::TILES], Share const& share, A const& after) const {
#pragma unroll
    for (uint32_t i = 0; i < F::TILES * F::EACH || i < 5; ++i) {
      if (i < F::TILES * F::EACH) {
        unit_multiply(s[i / F::EACH], i % F::EACH, x[i % F::EACH].x[0], share.weights[i]);
      }
      after(i);
    }
  }
};
// Reduces the sums of a fragment's tiles into `part` and clears them: those of half a stage together, so that their steps overlap.
template <uint32_t UNPACK, uint32_t TILES, uint32_t CHAINS> __device__ __forceinline__ void sums_finish(Worker const& w, Sums<CHAINS> (&s)[TILES], float* part) {
  constexpr uint32_t N = FRAGMENT < SHARE ? TILES : 1;
#pragma unroll
  for (uint32_t i = 0; i < TILES; i += N) {
    tiles_finish<UNPACK>(w, (Sums<CHAINS> const (&)[N])s[i], part + i * TILE_PARTS);
#pragma unroll
    for (uint32_t n = 0; n < N; ++n) {
      s[i + n] = Sums<CHAINS>{};
    }
  }
}
// This warp's products of tiles `tile0`.. of a task whose fragments are stages. `v` holds the next two fragments, also on return if the task has them.
template <uint32_t UNPACK, uint32_t UNITS>
__device__ __forceinline__ void multiply_shares(Worker const& w, Cursor& c, Tiles const& k, uint32_t tile0, uint32_t tiles, Share (&v)[TAKE], float* part) {
  using F = Fragment<UNPACK, UNITS>;
  uint32_t chunk = 0, left = k.shares - tile0 / F::TILES * k.chunks; // of the vector; fragments
  uint32_t next = k.chunks > TAKE ? TAKE : 0; // the chunk that is loaded next
  VectorPart<UNPACK, UNITS> x;
  x.template load<0>(w, k, 0);
  Sums<F::CHAINS> s[F::TILES] = {};
  auto stage = [&](Share& weights) {
    note_near(w, left, 4);
    bool const here = cursor_here(w, c); // the products take longer than the answer
    x.multiply(w, s, weights);
    if (left > TAKE) {
      if (!here) {
        cursor_land(w, c);
      }
      share_take<UNPACK, UNITS>(w, c, k, next, weights);
      if (RAGGED) {
        next = next + 1 == k.chunks ? 0 : next + 1;
      }
    }
    --left;
    if (++chunk == k.chunks) {
      sums_finish<UNPACK>(w, s, part);
      part += F::TILES * TILE_PARTS;
      chunk = 0;
    }
    if (k.chunks > 1) {
      x.template load<0>(w, k, chunk);
    }
  };
#pragma unroll 1
  for (uint32_t n = (tiles + F::TILES - 1) / F::TILES * k.chunks; n > 0; n -= 2) {
    stage(v[0]);
    if (n == 1) {
      break;
    }
    stage(v[TAKE - 1]);
  }
}
// The same where a stage is two fragments, or one if it is short: both in a straight line, so that one asks for the stage, frees it and adds up rows, and
// loads, products and exchanges of both overlap. With the first tiles it also sums `square` over the lanes.
template <uint32_t UNPACK, uint32_t UNITS>
__device__ __forceinline__ void multiply_pairs(Worker const& w, Cursor& c, Tiles const& k, uint32_t tile0, uint32_t tiles, Share (&v)[TAKE], float* part, float& square) {
#ifdef AMK_FORMAT_SHARES
  if constexpr (!is_taken(UNPACK, UNITS)) { return; }
#endif
  using F = Fragment<UNPACK, UNITS>;
  static_assert(TILES_BUF % (2 * F::TILES) == 0, "a fragment that is missing at the end has a place for its sums");
  constexpr uint32_t SETS = F::HALVES ? 1 : 2; // of sums: halves of a chunk have the same
  uint32_t const parts = F::HALVES ? 2 * k.chunks : 1; // fragments of a tile
  uint32_t chunk = 0, left = k.shares - tile0 / F::TILES * parts; // of the vector; fragments
  uint32_t next = F::HALVES && k.chunks > 1 ? 1 : 0; // the chunk that is loaded next
  bool const one = UNITS <= 2 && k.parts == 1; // longer ones have two
  VectorPart<UNPACK, UNITS> x;
  x.template load<0>(w, k, 0);
  if (tile0 == 0) {
    square = warp_sum(square);
  }
  Sums<F::CHAINS> s[SETS][F::TILES] = {};
  auto const free = [&](uint32_t read) {
    stage_read(read, &w.shared->sink);
    cursor_next(w, c);
  };
#pragma unroll 1
  for (uint32_t n = (tiles + F::TILES - 1) / F::TILES * parts;; n -= 2) {
    note_near(w, left, one ? 4 : 8);
    bool const here = ASKS_EARLY && cursor_here(w, c); // the products take longer than the answer
    x.multiply(w, s[0], v[0]);
    if (F::HALVES) {
      x.template load<1>(w, k, chunk);
    }
    if (left > TAKE && !here) {
      cursor_land(w, c);
    }
    // What is loaded beyond the task's end is not used; a branch around it would keep it apart from the products.
    uint32_t read = share_load<UNPACK, UNITS, 0>(w, c, k, next, false, v[0]);
    if (one && left > TAKE) {
      free(read);
      if (left > TAKE + 1) {
        cursor_land(w, c);
      }
      read = 0;
    }
    x.template multiply<1>(w, s[SETS - 1], v[TAKE - 1]);
    read |= share_load<UNPACK, UNITS, 1>(w, c, k, next, false, v[TAKE - 1]);
    if (!F::HALVES) {
      tiles_finish<UNPACK>(w, (Sums<F::CHAINS> const (&)[SETS * F::TILES])s, part);
      part += SETS * F::TILES * TILE_PARTS;
#pragma unroll
      for (uint32_t i = 0; i < SETS * F::TILES; ++i) {
        s[i / F::TILES][i % F::TILES] = Sums<F::CHAINS>{};
      }
    } else {
      if (++chunk == k.chunks) {
        sums_finish<UNPACK>(w, s[0], part);
        part += F::TILES * TILE_PARTS;
        chunk = 0;
      }
      if (!VectorPart<UNPACK, UNITS>::BOTH || k.chunks > 1) {
        x.template load<0>(w, k, chunk);
      }
    }
    if (left > TAKE + (one ? 1 : 0)) {
      free(read);
      if (RAGGED && F::HALVES) {
        next = next + 1 == k.chunks ? 0 : next + 1;
      }
    }
    if (n <= 2) {
      return;
    }
    left -= 2;
  }
}

// The same in one pass, for a task whose fragments are stages and wait in registers, except one at most; it also sums `square` over the lanes. This is
// the path between one hand-off and the next, so every instruction counts. Where registers are short, one fragment is finished after the other.
template <uint32_t UNPACK, uint32_t UNITS> __device__ __forceinline__ void held_in_turn(Worker const& w, Cursor& c, Tiles const& k, Share (&v)[TAKE], float* part, float& square) {
  using F = Fragment<UNPACK, UNITS>;
  VectorPart<UNPACK, UNITS> x;
  Sums<F::CHAINS> s[F::TILES] = {};
  auto const next = [&](uint32_t chunk) {
    if (k.chunks > 1) {
      x.template load<0>(w, k, chunk);
      return;
    }
    sums_finish<UNPACK>(w, s, part);
    part += F::TILES * TILE_PARTS;
  };
  x.template load<0>(w, k, 0);
  x.multiply(w, s, v[0]);
  square = warp_sum(square);
  if (k.shares > 1) {
    if (k.shares > TAKE) {
      cursor_land(w, c);
      share_take<UNPACK, UNITS>(w, c, k, k.chunks == 1 ? 0 : 2, v[0]); // the third of one tile, or the next tile
    }
    next(1);
    x.multiply(w, s, v[TAKE - 1]);
    if (k.shares > TAKE) {
      next(2);
      x.multiply(w, s, v[0]);
    }
  }
  sums_finish<UNPACK>(w, s, part);
}
// The same of units with scales, whose fragments are whole tiles that wait in registers, all of them.
template <uint32_t UNPACK, uint32_t UNITS> __device__ __forceinline__ void held_at_once(Worker const& w, Tiles const& k, Share const (&v)[TAKE], float* part, float& square) {
#ifdef AMK_FORMAT_SHARES
  if constexpr (!is_taken(UNPACK, UNITS)) { return; }
#endif
  using F = Fragment<UNPACK, UNITS>;
  VectorPart<UNPACK, UNITS> x;
  x.template load<0>(w, k, 0);
  Sums<F::CHAINS> s[TAKE][F::TILES] = {};
  x.multiply(w, s[0], v[0]);
  square = warp_sum(square);
  if (k.shares == 1) {
    tiles_finish<UNPACK>(w, s[0], part);
    return;
  }
  x.multiply(w, s[1], v[1]);
  tiles_finish<UNPACK>(w, (Sums<F::CHAINS> const (&)[TAKE * F::TILES])s, part);
}
// Two fragments are finished together: their last steps overlap, as those of the sum of squares do with the first products.
template <uint32_t UNPACK, uint32_t UNITS> __device__ __forceinline__ void multiply_held(Worker const& w, Cursor& c, Tiles const& k, Share (&v)[TAKE], float* part, float& square) {
  using F = Fragment<UNPACK, UNITS>;
  constexpr uint32_t TILES = F::TILES;
  VectorPart<UNPACK, UNITS> x;
  Sums<F::CHAINS> s[2][TILES] = {};
  x.template load<0>(w, k, 0);
  x.multiply(w, s[0], v[0], [&](uint32_t i) {
    if (i < 5) {
      square += __shfl_xor_sync(~0u, square, 16 >> i);
    }
  });
  if (k.shares > TAKE) {
    cursor_land(w, c);
    share_take<UNPACK, UNITS>(w, c, k, k.chunks == 1 ? 0 : 2, v[0]); // the third of one tile, or the next tile
  }
  if (TILES == 1 && k.chunks > 1) { // of one tile
    x.template load<0>(w, k, 1);
    x.multiply(w, s[0], v[TAKE - 1]);
    if (k.shares > TAKE) {
      x.template load<0>(w, k, 2);
      x.multiply(w, s[0], v[0]);
    }
  } else if (k.shares > 1) {
    x.multiply(w, s[1], v[TAKE - 1]);
    tiles_finish<UNPACK>(w, (Sums<F::CHAINS> const (&)[2 * TILES])s, part);
    if (k.shares <= TAKE) {
      return;
    }
    part += 2 * TILES * TILE_PARTS;
#pragma unroll
    for (uint32_t i = 0; i < TILES; ++i) {
      s[0][i] = Sums<F::CHAINS>{};
    }
    x.multiply(w, s[0], v[0]);
  }
  tiles_finish<UNPACK>(w, s[0], part);
}
