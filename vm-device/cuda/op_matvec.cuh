// matvec: rows of a streamed matrix times a vector, with the norm or the attention merge before and the residual, activation or argmax after. Same
// stages as reference-vm/src/ops/matvec.rs.
// A warp waits for its units of the vector, stages them and starts; the warps first meet when all sums of the task are done.
#pragma once

// The same for tiles of any length, without fragments.
template <uint32_t UNPACK> __device__ __forceinline__ void multiply_chunks(Worker const& w, Cursor& c, Tiles const& k, uint32_t tile0, uint32_t tiles, float* part) {
  uint32_t const warp = w.thread / 32, first = warp * unit_bytes(UNPACK);
  uint32_t in_stage = tile0 % k.per_stage;
#pragma unroll 1
  for (uint32_t i = 0; i < tiles; ++i) {
    note_near(w, (k.count - tile0 - i) * k.units, 4 * SHARE * AMK_WARPS);
    Sums<4> s = {};
#pragma unroll 1
    for (uint32_t unit = 0; unit < k.units; unit += k.stage_units) {
      char const* stage = cursor_land(w, c) + in_stage * k.units * unit_bytes(UNPACK);
      uint32_t const units = k.units - unit < k.stage_units ? k.units - unit : k.stage_units;
      chunk_multiply<UNPACK>(w, stage + first, w.x + (unit + warp) * group_bytes(UNPACK), warp_share(w, units), s);
      if (in_stage + 1 == k.per_stage || tile0 + i + 1 == k.count) {
        cursor_next(w, c);
      }
    }
    in_stage = in_stage + 1 == k.per_stage ? 0 : in_stage + 1;
    tiles_finish<UNPACK>(w, (Sums<4> const (&)[1])s, part + i * TILE_PARTS);
  }
}

// The fragments that wait in registers while the vector arrives: how many there will be, and how many have been loaded.
struct Ahead {
  uint32_t want, taken;
};

// Loads the current fragment, a stage that holds chunk `chunk`, and steps to the next stage. Returns the word to wait for.
__device__ __forceinline__ uint32_t share_of_task(Worker const& w, StagedTask const& st, Cursor& c, Tiles const& k, uint32_t chunk, Share& v, bool wanted) {
  uint32_t read = 0;
  with_units(st.task.unpack, [&](auto unpack) {
    with_share(k, [&](auto units) { read = share_load<decltype(unpack)::value, decltype(units)::value, 0>(w, c, k, chunk, true, v, wanted); });
  });
  return read;
}

// Loads up to TAKE fragments without waiting, and the epilogue's addends. In a straight line: what has not arrived is loaded in vain.
__device__ __forceinline__ Ahead take_ahead(Worker& w, StagedTask const& st, amk_matvec_params const& p, Tiles const& k, Cursor& c, uint32_t row, MatvecPlan const& plan, Share (&v)[TAKE],
                                            Addends& add) {
  Cursor const first = c;
  uint32_t const here = k.shares > 0 && cursor_arrived(w, c);
  uint32_t last = share_of_task(w, st, c, k, 0, v[0], k.shares > 0);
  Cursor const second = c;
  uint32_t const both = here != 0 && k.shares > 1 && cursor_arrived(w, c);
  last |= share_of_task(w, st, c, k, k.chunks == 1 ? 0 : 1, v[TAKE - 1], k.shares > 1);
  add = addends(w, st, p, row, plan);
  barrier_announce(w);
  stage_read(last, &w.shared->sink); // of both; they overlap with the code in between
  __syncwarp();
  if (w.thread % 32 == 0) { // frees them
    if (here != 0) {
      barrier_arrive(&w.shared->empty[first.stage]);
    }
    if (both != 0) {
      barrier_arrive(&w.shared->empty[second.stage]);
    }
  }
  c = both != 0 ? c : here != 0 ? second : first;
  return Ahead{k.shares < TAKE ? k.shares : TAKE, here + both};
}
// Loads the rest of them, once they have arrived.
__device__ __forceinline__ void take_rest(Worker const& w, StagedTask const& st, Tiles const& k, Cursor& c, Ahead ahead, Share (&v)[TAKE]) {
#pragma unroll 1
  for (; ahead.taken < ahead.want; ++ahead.taken) {
    cursor_land(w, c);
    uint32_t const stage = c.stage;
    uint32_t const last = ahead.taken == 0 ? share_of_task(w, st, c, k, 0, v[0], true) : share_of_task(w, st, c, k, k.chunks == 1 ? 0 : 1, v[TAKE - 1], true);
    stage_read(last, &w.shared->sink);
    cursor_free(w, stage);
  }
}

// Does what is possible before the vector arrives, then stages the vector in the activation buffer: loads up to TAKE fragments into
// registers, which are there on return in any case, and the epilogue's addends of `row`. Returns the lane's sum of squares.
__device__ __forceinline__ float take_and_stage(Worker& w, StagedTask const& st, amk_matvec_params const& p, Tiles const& k, Cursor& c, uint32_t row, MatvecPlan const& plan, Share (&v)[TAKE],
                                                Addends& add) {
  Input const in = input_of(st, p);
  Ahead const ahead = take_ahead(w, st, p, k, c, row, plan, v, add);
  float const square = stage_input(w, in, st, p);
  __syncwarp();
  if (w.thread == 0) {
    flag_store(&w.shared->near, k.held); // its last fragments have been loaded already
  }
  trace_staged(w);
  if (__builtin_expect(ahead.taken != ahead.want, 0)) {
    take_rest(w, st, k, c, ahead, v);
  }
  return square;
}
// The same where registers are short: one piece of code that runs twice if needed, before the vector is there, for the stages that have
// arrived, whose fragments then wait in registers while the stream continues; and afterwards for the rest.
__device__ __forceinline__ float take_in_turn(Worker& w, StagedTask const& st, amk_matvec_params const& p, Tiles const& k, Cursor& c, uint32_t row, MatvecPlan const& plan, Share (&v)[TAKE],
                                              Addends& add) {
  uint32_t const ahead = k.shares < TAKE ? k.shares : TAKE;
  float square = 0.f;
  uint32_t taken = 0;
#pragma unroll 1
  for (bool late = false;; late = true) {
    uint32_t const before = taken;
    uint32_t stage = c.stage, last = 0;
    auto const load = [&](uint32_t chunk, bool whole, Share& share, auto part) {
      with_units(st.task.unpack, [&](auto unpack) {
        with_share(k, [&](auto units) { last |= share_load<decltype(unpack)::value, decltype(units)::value, decltype(part)::value>(w, c, k, chunk, whole, share); });
      });
    };
    if (taken == 0 && ahead > 0 && cursor_ready(w, c, late)) {
      load(0, k.parts == 1 || ahead == 1, v[0], Number<0>());
      taken = 1;
    }
    if (taken == 1 && ahead > 1 && (k.parts == 2 || cursor_ready(w, c, late))) {
      load(k.chunks == 1 || k.parts == 2 ? 0 : 1, true, v[TAKE - 1], Number<1>());
      taken = 2;
    }
    if (!late) {
      add = addends(w, st, p, row, plan);
      barrier_announce(w);
    }
    stage_read(last, &w.shared->sink); // both; they overlap with the code in between
#pragma unroll 1
    for (uint32_t i = before; i < taken; i += k.parts) {
      cursor_free(w, stage);
      stage = stage + 1 == w.stages ? 0 : stage + 1;
    }
    if (late) {
      return square;
    }
    square = stage_input(w, input_of(st, p), st, p);
    __syncwarp();
    if (w.thread == 0) {
      flag_store(&w.shared->near, k.held); // its last fragments have been loaded already
    }
    trace_staged(w);
    if (taken == ahead) {
      return square;
    }
  }
}

__device__ __forceinline__ void op_matvec(Worker& w, StagedTask const& st, Cursor& c) {
  amk_matvec_params const p = *(amk_matvec_params const*)st.task.params;
  uint32_t const t = w.thread, warp = t / 32;
  MatvecPlan const plan = plan_of(st);
  Tiles const k = task_tiles(st, p, plan);
  ResolvedBuffer const written = buffer_of(st, AMK_READS_STAGED);
  Words const out = buffer_words(w, written);
  Share v[TAKE];
  Addends add;
  if (!SPARE_REGISTERS) { // else all are loaded in any case
    v[0] = v[TAKE - 1] = Share{}, add = Addends{};
  }
  float inverse = __fdividef(1.f, (float)p.k_len);
  if (SPARE_REGISTERS) {
    asm volatile("" : "+f"(inverse)); // computed here, not where it is used
  }
  bool const rms = is_normed(st, p);
  uint32_t row = p.tile0 * AMK_UNIT_ROWS + t;
  bool mine = t < p.tiles * AMK_UNIT_ROWS && t < ROWS_BUF && row < p.rows;
  float square = SPARE_REGISTERS ? take_and_stage(w, st, p, k, c, mine ? row : p.rows, plan, v, add) : take_in_turn(w, st, p, k, c, mine ? row : p.rows, plan, v, add);
  if (rows_follow(st, p)) {
    if (k.shares == 0) { // else it is here
      cursor_land(w, c);
    }
    if (mine) {
      row_addends(w, st, p, row, true, add);
    }
  }
  Best best = {-__int_as_float(0x7f800000), 0xffffffffu};
  // Finishes the rows of up to TILES_BUF tiles, after their products.
  auto const rows_finish = [&](uint32_t buffer) {
    if (t % 32 == 0) {
      w.shared->sums[buffer][warp] = square;
    }
    trace_multiplied(w);
    barrier_meet(w);
    if (mine) {
      RowParts<SPARE_REGISTERS> const parts(w, buffer);
      float const scale = SPARE_REGISTERS || rms ? rms_scale(parts, inverse, p.eps) : 1.f;
      epilogue(w, st, p, out, written.units, parts, row, (rms ? scale : 1.f) / VECTOR_FACTOR, add, plan.residual, best);
    }
  };
  if (MAY_HOLD && k.held) {
    with_unpack(st.task.unpack, [&](auto unpack) {
      with_share(k, [&](auto units) {
        constexpr uint32_t UNPACK = decltype(unpack)::value, UNITS = decltype(units)::value;
        if constexpr (SPLIT) {
          if constexpr (UNITS < FRAGMENT) {
            held_at_once<UNPACK, UNITS>(w, k, v, warp_parts(w, w.parity), square);
          }
        } else if constexpr (SPARE_REGISTERS) {
          multiply_held<UNPACK, UNITS>(w, c, k, v, warp_parts(w, w.parity), square);
        } else {
          held_in_turn<UNPACK, UNITS>(w, c, k, v, warp_parts(w, w.parity), square);
        }
      });
    });
    rows_finish(w.parity);
    return;
  }
  if (FRAGMENT == SHARE || k.shares == 0) {
    square = warp_sum(square);
  }
#pragma unroll 1
  for (uint32_t done = 0;;) {
    uint32_t const buffer = w.parity, nt = p.tiles - done < TILES_BUF ? p.tiles - done : TILES_BUF;
    float* part = warp_parts(w, buffer);
    with_unpack(st.task.unpack, [&](auto unpack) {
      constexpr uint32_t UNPACK = decltype(unpack)::value;
      if (k.shares > 0) {
        with_share(k, [&](auto units) {
          if constexpr (SPLIT) {
            multiply_pairs<UNPACK, decltype(units)::value>(w, c, k, done, nt, v, part, square);
          } else {
            multiply_shares<UNPACK, decltype(units)::value>(w, c, k, done, nt, v, part);
          }
        });
      } else {
        multiply_chunks<UNPACK>(w, c, k, done, nt, part);
      }
    });
    rows_finish(buffer);
    done += TILES_BUF;
    if (done >= p.tiles) {
      break;
    }
    row += ROWS_BUF;
    mine = t < ROWS_BUF && t + done * AMK_UNIT_ROWS < p.tiles * AMK_UNIT_ROWS && row < p.rows;
    barrier_announce(w);
    add = mine ? addends(w, st, p, row, plan) : Addends{};
    if (mine && rows_follow(st, p)) {
      row_addends(w, st, p, row, true, add);
    }
  }
  if (p.epilogue == AMK_EPILOGUE_LOGITS) {
    write_candidate(w, st, p.candidate, best);
  }
}
