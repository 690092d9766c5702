// The weight stream of a worker: the loader fills stages in order, each consumer warp walks them in order.
#pragma once

// A consumer warp's place in the ring. Every warp passes every stage, in order, so that a parity cannot be mistaken for another
// lap's: a warp never waits for a stage that it has not seen the phase before of.
struct Cursor {
  uint32_t stage;  // ring index of the current stage
  uint32_t parity; // of its full barrier
};

// Where the current stage is.
__device__ __forceinline__ char const* cursor_place(Worker const& w, Cursor const& c) { return w.ring + (size_t)c.stage * w.stage_bytes; }

// The current stage, once it has landed.
__device__ __forceinline__ char const* cursor_land(Worker const& w, Cursor const& c) {
  uint32_t const since = tape_clock();
  wait_stage(w.shared, &w.shared->full[c.stage], c.parity, c.stage);
  tape_starved(w, since);
  return cursor_place(w, c);
}

// Whether the current stage has landed, without waiting for it. All lanes agree.
__device__ __forceinline__ bool cursor_landed(Worker const& w, Cursor const& c) { return __all_sync(~0u, barrier_try(&w.shared->full[c.stage], c.parity)) != 0; }

// The same, or until it has.
__device__ __forceinline__ bool cursor_ready(Worker const& w, Cursor const& c, bool wait) {
  if (wait) {
    cursor_land(w, c);
    return true;
  }
  return cursor_landed(w, c);
}

// Frees the current stage and steps to the next. All lanes have read what they need.
__device__ __forceinline__ void cursor_next(Worker const& w, Cursor& c) {
  __syncwarp();
  if (w.thread % 32 == 0) {
    barrier_arrive(&w.shared->empty[c.stage]);
  }
  if (++c.stage == w.stages) {
    c.stage = 0;
    c.parity ^= 1;
  }
}

// Passes stages until it has passed `to`, all of which have landed by then.
__device__ __forceinline__ void cursor_pass(Worker const& w, Cursor& c, uint32_t& passed, uint32_t to) {
#pragma unroll 1
  for (; passed < to; ++passed) {
    cursor_land(w, c);
    cursor_next(w, c);
  }
}

// What the loader knows of the ring. Its loop runs once a stage and must be far faster than a stage lands, so places are shared addresses
// and everything is in registers.
struct Loader {
  uint32_t full, empty;    // the barriers of stage 0
  uint32_t ring;           // stage 0
  uint32_t stages, stage_bytes;
  uint32_t stage, parity;  // next stage to issue; parity that its empty barrier waits for
  uint32_t units_far, units_near; // units that may be on their way, and near a handoff
  uint32_t cap_far, cap_near;     // the same in stages of the run
  uint32_t in_flight;      // stages on their way
  uint32_t oldest, oldest_parity; // the first of them
  bool lapped;             // whether every stage has been used once
  uint64_t policy;
  uint32_t seen;           // steps of which what was stored before is visible to copies
};

// The oldest stage on its way has landed.
__device__ __forceinline__ void loader_landed(Loader& l) {
  --l.in_flight;
  if (++l.oldest == l.stages) {
    l.oldest = 0;
    l.oldest_parity ^= 1;
  }
}

// Until the phase of a barrier is over. False when the loader is to stop.
__device__ __forceinline__ bool loader_wait(Shared* sh, uint32_t barrier, uint32_t parity) {
  while (!barrier_try_at(barrier, parity)) {
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      return false;
    }
  }
  return true;
}

// Nothing may be on its way into shared memory when the barriers are made anew or the block ends.
__device__ __forceinline__ void loader_drain(Worker const& w, Loader& l) {
  uint64_t const start = now_ns();
  while (l.in_flight != 0) {
    while (!barrier_try_at(l.full + l.oldest * 8, l.oldest_parity)) {
      if (now_ns() - start > w.shared->launch->deadline_ns) {
        return;
      }
    }
    loader_landed(l);
  }
}

// How many stages of so many units may be on their way: one at least, and never more than there are. With more, the oldest would be a
// whole lap behind, and its barrier's parity that of another phase.
__device__ __forceinline__ uint32_t stages_of(Loader const& l, uint32_t units, uint32_t stage_units) {
  uint32_t const n = units / stage_units;
  return n == 0 ? 1 : n < l.stages ? n : l.stages;
}
__device__ __forceinline__ void loader_caps(Loader& l, uint32_t stage_units) {
  l.cap_far = stages_of(l, l.units_far, stage_units);
  l.cap_near = stages_of(l, l.units_near, stage_units);
}

// The next stage, once it has been freed by every consumer warp and few enough bytes are on their way: the messages of a handoff queue
// behind them. False when the loader is to stop.
__device__ __forceinline__ bool loader_claim(Shared* sh, Loader& l, LoaderWaits& waits) {
  uint32_t const near = flag_load(&sh->near), halt = flag_load(&sh->halt);
  uint32_t const cap = near != 0 ? l.cap_near : l.cap_far, t0 = tape_clock();
  if (halt != 0 || (l.lapped && !loader_wait(sh, l.empty + l.stage * 8, l.parity))) {
    return false;
  }
  uint32_t const t1 = tape_clock();
  while (l.in_flight >= cap) {
    if (!loader_wait(sh, l.full + l.oldest * 8, l.oldest_parity)) {
      return false;
    }
    loader_landed(l);
  }
  waits.free += t1 - t0;
  waits.cap += tape_clock() - t1;
  return true;
}

// The claimed stage has been issued.
__device__ __forceinline__ void loader_issued(Loader& l) {
  ++l.in_flight;
  if (++l.stage == l.stages) {
    l.stage = 0;
    l.parity ^= 1;
    if (!l.lapped) {
      l.lapped = true;
      l.parity = 0;
    }
  }
}

// A stage of one run of bytes, or of two, the second `gap` bytes behind the start of the first. False when the loader is to stop.
__device__ __forceinline__ bool loader_issue(Shared* sh, Loader& l, uint64_t from, uint32_t bytes, uint64_t then, uint32_t gap, LoaderWaits& waits) {
  if (!loader_claim(sh, l, waits)) {
    return false;
  }
  uint32_t const full = l.full + l.stage * 8, place = l.ring + l.stage * l.stage_bytes;
  stage_expect_at(full, then != 0 ? 2 * bytes : bytes);
  stage_copy_at(place, from, bytes, full, l.policy);
  if (then != 0) {
    stage_copy_at(place + gap, then, bytes, full, l.policy);
  }
  loader_issued(l);
  return true;
}

// Units that the loader has asked for, once a run and not once a stage; in shared memory, because its registers are all taken.
__device__ __forceinline__ void loader_count(Shared* sh, uint32_t units) { flag_store(&sh->issued, flag_load(&sh->issued) + units); }

#if AMK_LANES > 1
// Tiles that are longer than a stage, for several lanes: a part of all tiles of an epilogue, then the next part of them, so that each part of
// the lanes' vectors is brought once for all. `units` of a tile.
__device__ __forceinline__ bool loader_parts(Shared* sh, Loader& l, uint64_t address, uint32_t all, uint32_t part, uint32_t units, LoaderWaits& waits) {
#pragma unroll 1
  for (uint32_t done = 0; done < all; done += LANE_TILES * units) {
    uint32_t const end = all - done < LANE_TILES * units ? all : done + LANE_TILES * units;
#pragma unroll 1
    for (uint32_t first = 0; first < units; first += part) {
      uint32_t const n = units - first < part ? units - first : part;
#pragma unroll 1
      for (uint32_t at = done + first; at < end; at += units) {
        if (!loader_issue(sh, l, address + (uint64_t)at * AMK_UNIT_BYTES, n * AMK_UNIT_BYTES, 0, 0, waits)) {
          return false;
        }
      }
    }
  }
  return true;
}
#endif

// A run of units of a matrix, once `need` units have landed.
__device__ __forceinline__ bool loader_weights(Shared* sh, Loader& l, uint4 run, uint32_t need, uint32_t lap, LoaderWaits& waits) {
  if (need > flag_load(&sh->landed) && !landing_wait(sh, need, lap)) {
    return false;
  }
  uint64_t address = (uint64_t)run.y << 32 | run.x;
  uint32_t const stage_units = run.w & 0xffff, period = run.w >> 16;
  uint32_t place = 0;
  loader_count(sh, run.z);
  loader_caps(l, stage_units);
#if AMK_LANES > 1
  if (period > stage_units) {
    return loader_parts(sh, l, address, run.z, stage_units, period, waits);
  }
#endif
  for (uint32_t left = run.z; left > 0;) { // z: units of the run
    uint32_t const most = period - place < stage_units ? period - place : stage_units;
    uint32_t const units = left < most ? left : most;
    if (!loader_issue(sh, l, address, units * AMK_UNIT_BYTES, 0, 0, waits)) {
      return false;
    }
    left -= units;
    address += units * AMK_UNIT_BYTES;
    place = place + units == period ? 0 : place + units;
  }
  return true;
}

// Rows of keys or of values of one block.
__device__ __forceinline__ bool loader_rows(Shared* sh, Loader& l, uint32_t most, uint64_t from, uint32_t rows, LoaderWaits& waits) {
#pragma unroll 1
  for (uint32_t at = 0; at < rows; at += most) {
    uint32_t const n = rows - at < most ? rows - at : most;
    if (!loader_issue(sh, l, from + at * ROW_BYTES, n * ROW_BYTES, 0, 0, waits)) {
      return false;
    }
  }
  return true;
}

// A lane's keys and values of an attention task, if its split has some.
__device__ __forceinline__ bool loader_split(Shared* sh, Loader& l, uint4 run, uint4 more, uint32_t lap, uint32_t lane, uint32_t position, uint32_t session, LoaderWaits& waits) {
  if (l.seen != lap + 1) {
    l.seen = lap + 1;
    copies_see_stores();
  }
  uint32_t const keys = attended(position, more.z), active = active_splits(keys, more.y, more.w >> 16), split = lane_split(more.w & 0xffff, more.w >> 16, lane);
  if (split >= active) {
    return true;
  }
  loader_caps(l, l.stage_bytes / AMK_UNIT_BYTES);
  uint32_t const first = split_start(keys, more.y, active, split), count = split_start(keys, more.y, active, split + 1) - first;
  uint64_t const start = ((uint64_t)run.y << 32 | run.x) + (uint64_t)session * 2 * more.x + (uint64_t)(position + 1 - keys + first) * ROW_BYTES;
  loader_count(sh, ROUNDS * count * 2 * ROW_BYTES / AMK_UNIT_BYTES);
#pragma unroll 1
  for (uint32_t k = 0; k < ROUNDS * count;) {
    uint32_t const at = k % count, rows = count - at < BLOCK_KEYS ? count - at : BLOCK_KEYS;
    uint64_t const from = start + at * ROW_BYTES;
    BlockStages const b = block_stages(rows, l.stage_bytes);
    bool const on = b.values != 0 ? loader_issue(sh, l, from, b.values, from + more.x, b.values, waits)
                                  : loader_rows(sh, l, b.rows, from, b.copied, waits) && loader_rows(sh, l, b.rows, from + more.x, b.copied, waits);
    if (!on) {
      return false;
    }
    k += rows;
  }
  return true;
}

// Keys and values of an attention task, once the step that they are for has begun: what earlier steps have written is here then. The row
// of the step's own key is read as it was before; the op knows better. `more`: values, kv_block, window, split and splits.
__device__ __forceinline__ bool loader_keys(Shared* sh, Loader& l, uint4 run, uint4 more, uint32_t lap, LoaderWaits& waits) {
  while ((int32_t)(flag_load(&sh->begun) - lap) <= 0) {
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      return false;
    }
  }
  block_fence();
#pragma unroll 1
  for (uint32_t lane = 0; lane < begun_lanes(sh, lap); ++lane) {
    uint32_t const position = flag_load(&sh->begun_position[lap % 2 * LANES + lane]), session = flag_load(&sh->begun_session[lap % 2 * LANES + lane]);
    block_fence();
    if (flag_load(&sh->begun) - lap >= 2) { // that step is over, without these keys: the split had none
      return true;
    }
    if (!loader_split(sh, l, run, more, lap, lane, position, session, waits)) {
      return false;
    }
  }
  return true;
}

// The loader: one thread, endless, until halted. Every run starts on a stage of its own.
__device__ __forceinline__ void loader_run(Worker const& w) {
  Shared* sh = w.shared;
  uint32_t const loads = sh->queue.loads;
#if AMK_LANES > 1
  // Lanes take registers: what is asked for once a run is found again.
  auto const list_at = [&](uint32_t i) { return (amk_load const*)*(uint64_t volatile const*)&sh->program.loads + flag_load(&sh->queue.load0) + i; };
#else
  amk_load const* list = (amk_load const*)sh->program.loads + sh->queue.load0;
  auto const list_at = [&](uint32_t i) { return list + i; };
#endif
  Loader l = {};
  l.full = shared_address(sh->full), l.empty = shared_address(sh->empty), l.ring = shared_address(w.ring);
  l.stages = w.stages, l.stage_bytes = w.stage_bytes;
  l.units_far = sh->program.in_flight * sh->program.stage_units, l.units_near = sh->program.in_flight_near * sh->program.stage_units;
  l.policy = evict_first_policy();
  LoaderWaits waits = {0, 0, tape_clock()};
  uint32_t load = 0, lap = 0;
  uint4 run = make_uint4(0, 0, 0, 0), more = run;
  if (loads > 0) {
    run = load_u32x4(list_at(0)), more = load_u32x4((char const*)list_at(0) + 16);
  }
  while (loads > 0) {
    load = load + 1 == loads ? 0 : load + 1;
    uint4 const next = load_u32x4(list_at(load)), next_more = load_u32x4((char const*)list_at(load) + 16); // a whole run ahead: a trip to L2
    bool const on = run.z != 0 ? loader_weights(sh, l, run, more.x, lap, waits) : loader_keys(sh, l, run, more, lap, waits);
    if (!on) {
      loader_drain(w, l);
      return;
    }
    run = next, more = next_more;
    if (load == 0) {
      ++lap;
      tape_loader(w, waits);
    }
  }
}
