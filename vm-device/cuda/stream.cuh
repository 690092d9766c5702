// The weight stream of a worker: the loader fills stages in order, and each consumer warp walks them in order.
#pragma once

// A consumer warp's position in the ring. Every warp passes every stage, in order, so that a parity cannot be mistaken for another wrap's: a
// warp never waits on a barrier whose preceding phase it has not observed.
struct Cursor {
  uint32_t stage;  // ring index of the current stage
  uint32_t parity; // of its full barrier
};

// Address of the current stage.
__device__ __forceinline__ char const* cursor_place(Worker const& w, Cursor const& c) { return w.ring + (size_t)c.stage * w.stage_bytes; }

// Waits until the current stage has arrived; returns its address.
__device__ __forceinline__ char const* cursor_land(Worker const& w, Cursor const& c) {
  uint32_t const since = trace_clock();
  wait_stage(w.shared, &w.shared->full[c.stage], c.parity, c.stage);
  trace_starved(w, since);
  return cursor_place(w, c);
}

constexpr bool ROUTED = (AMK_FEATURES >> AMK_FEATURE_ROUTE & 1) != 0; // some stages are behind a route

// Returns whether the current stage has arrived. All lanes agree. A try may wait a while for it, which costs less than a fragment that is taken late; but
// a stage behind a route comes after the vector that is to be staged meanwhile.
__device__ __forceinline__ bool cursor_arrived(Worker const& w, Cursor const& c) {
  uint64_t* const full = &w.shared->full[c.stage];
  return __all_sync(~0u, ROUTED ? barrier_test(full, c.parity) : barrier_try(full, c.parity)) != 0;
}

// The same of a lane's own answer. A stage that has arrived stays so until all warps have freed it.
__device__ __forceinline__ bool cursor_here(Worker const& w, Cursor const& c) { return barrier_test(&w.shared->full[c.stage], c.parity); }

// The same, but waits if `wait` is set.
__device__ __forceinline__ bool cursor_ready(Worker const& w, Cursor const& c, bool wait) {
  if (wait) {
    cursor_land(w, c);
    return true;
  }
  return cursor_arrived(w, c);
}

// Frees a stage that this warp has stepped past. All lanes have read what they need: used it, or waited for it (stage_read).
__device__ __forceinline__ void cursor_free(Worker const& w, uint32_t stage) {
  __syncwarp();
  if (w.thread % 32 == 0) {
    barrier_arrive(&w.shared->empty[stage]);
  }
}
__device__ __forceinline__ void cursor_step(Worker const& w, Cursor& c) {
  if (++c.stage == w.stages) {
    c.stage = 0;
    c.parity ^= 1;
  }
}
// Frees the current stage and steps to the next.
__device__ __forceinline__ void cursor_next(Worker const& w, Cursor& c) {
  cursor_free(w, c.stage);
  cursor_step(w, c);
}

// Passes stages until it has passed `to`; all of them have arrived by then.
__device__ __forceinline__ void cursor_pass(Worker const& w, Cursor& c, uint32_t& passed, uint32_t to) {
#pragma unroll 1
  for (; passed < to; ++passed) {
    cursor_land(w, c);
    cursor_next(w, c);
  }
}

// The loader's state of the ring. Its loop runs once per stage and must be far faster than a stage arrives, so addresses are shared addresses
// and everything is in registers.
struct Loader {
  uint32_t full;           // shared address of stage 0's full barrier
  uint32_t ring;           // shared address of stage 0
  uint32_t stages, stage_bytes;
  uint32_t stage, parity;  // next stage to issue; parity to wait for on its empty barrier: initially that of the phase before a new barrier's first
  uint32_t cap_far, cap_near; // stages that may be in flight: normally, and before a hand-off
  uint32_t in_flight;      // stages in flight
  uint32_t oldest, oldest_parity; // the oldest of them
  uint64_t policy;
};

constexpr uint32_t EMPTY_BEHIND = AMK_OFFSETOF(Shared, empty) - AMK_OFFSETOF(Shared, full);

// The oldest stage in flight has arrived.
__device__ __forceinline__ void loader_arrived(Loader& l) {
  --l.in_flight;
  if (++l.oldest == l.stages) {
    l.oldest = 0;
    l.oldest_parity ^= 1;
  }
}

// Waits until the phase of a barrier has completed. Returns false when the loader is to stop.
__device__ __forceinline__ bool loader_wait(Shared* sh, uint32_t barrier, uint32_t parity) {
  while (!barrier_try_at(barrier, parity)) {
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      return false;
    }
  }
  return true;
}

// Waits for all copies in flight: none may write shared memory when the barriers are initialised again or the block ends.
__device__ __forceinline__ void loader_drain(Worker const& w, Loader& l) {
  uint64_t const start = now_ns();
  while (l.in_flight != 0) {
    while (!barrier_try_at(l.full + l.oldest * 8, l.oldest_parity)) {
      if (now_ns() - start > w.shared->launch->deadline_ns) {
        return;
      }
    }
    loader_arrived(l);
  }
}

// Cap in stages for `units` units in flight: at least one, and never more than there are stages. With more, the oldest would be a whole wrap
// behind, and its barrier's parity that of another phase.
__device__ __forceinline__ uint32_t stages_of(Loader const& l, uint32_t units, uint32_t stage_units) {
  uint32_t const n = units / stage_units;
  return n == 0 ? 1 : n < l.stages ? n : l.stages;
}
__device__ __forceinline__ void loader_caps(Loader& l, amk_program const& p, uint32_t stage_units) {
  l.cap_far = stages_of(l, p.in_flight * p.stage_units, stage_units);
  l.cap_near = stages_of(l, p.in_flight_before_wait * p.stage_units, stage_units);
}

// Claims the next stage: waits until every consumer warp has freed it and few enough bytes are in flight, since a hand-off's messages queue
// behind them. Returns false when the loader is to stop.
__device__ __forceinline__ bool loader_claim(Shared* sh, Loader& l, LoaderWaits& waits) {
  uint32_t const near = flag_load(&sh->near), halt = flag_load(&sh->halt);
  uint32_t const cap = near != 0 ? l.cap_near : l.cap_far, t0 = trace_clock();
  if (halt != 0 || !loader_wait(sh, l.full + l.stage * 8 + EMPTY_BEHIND, l.parity)) {
    return false;
  }
  uint32_t const t1 = trace_clock();
  while (l.in_flight >= cap) {
    if (!loader_wait(sh, l.full + l.oldest * 8, l.oldest_parity)) {
      return false;
    }
    loader_arrived(l);
  }
  waits.free += t1 - t0;
  waits.cap += trace_clock() - t1;
  return true;
}

// Accounts for the claimed stage, which has been issued.
__device__ __forceinline__ void loader_issued(Loader& l) {
  ++l.in_flight;
  if (++l.stage == l.stages) {
    l.stage = 0;
    l.parity ^= 1;
  }
}

// Loads a stage from one run of bytes. Returns false when the loader is to stop.
__device__ __forceinline__ bool loader_issue(Shared* sh, Loader& l, uint64_t from, uint32_t bytes, LoaderWaits& waits) {
  if (!loader_claim(sh, l, waits)) {
    return false;
  }
  uint32_t const full = l.full + l.stage * 8, place = l.ring + l.stage * l.stage_bytes;
  stage_expect_at(full, bytes);
  stage_copy_at(place, from, bytes, full, l.policy);
  loader_issued(l);
  return true;
}

// Counts the units that the loader has requested, once per run rather than per stage; in shared memory, to save registers.
__device__ __forceinline__ void loader_count(Shared* sh, uint32_t units) { flag_store(&sh->issued, flag_load(&sh->issued) + units); }

#if AMK_SEQS > 1
// The part of their tiles that a task multiplies in a turn, for the tiles of the epilogue that begins with tile `tile`. With codes every other epilogue
// takes them from the last to the first, so that one part of the vectors stays in registers: it has as many bytes as the weights that it is for.
__device__ __forceinline__ uint32_t batch_part(uint32_t tile, uint32_t turn, uint32_t parts) { return MIXED && tile / BATCH_TILES % 2 != 0 ? parts - 1 - turn : turn; }

// Loads a stage with a part of `bytes` of each of `left` tiles, but of no more than `most`. `next`: bytes from a tile's to the next one's.
__device__ __forceinline__ bool loader_shared(Shared* sh, Loader& l, uint64_t from, uint32_t left, uint32_t most, uint32_t bytes, uint32_t next, LoaderWaits& waits) {
  if (!loader_claim(sh, l, waits)) {
    return false;
  }
  uint32_t const full = l.full + l.stage * 8, place = l.ring + l.stage * l.stage_bytes, end = (left < most ? left : most) * bytes;
  stage_expect_at(full, end);
#pragma unroll 1
  for (uint32_t to = 0; to < end; to += bytes, from += next) {
    stage_copy_at(place + to, from, bytes, full, l.policy);
  }
  loader_issued(l);
  return true;
}

// Tiles that are longer than a stage, for several sequences: one part of all tiles of an epilogue, then the next part of them, so that each
// part of the sequences' vectors is loaded once for all. `units`: per tile; `unit`: bytes of one. Parts of codes are short, so `tiles` share a stage.
__device__ __forceinline__ bool loader_parts(Shared* sh, Loader& l, uint64_t address, uint32_t all, uint32_t part, uint32_t units, uint32_t unit, uint32_t tiles, LoaderWaits& waits) {
#pragma unroll 1
  for (uint32_t done = 0; done < all; done += BATCH_TILES * units) {
    uint32_t const end = all - done < BATCH_TILES * units ? all : done + BATCH_TILES * units;
#pragma unroll 1
    for (uint32_t turn = 0; turn < units; turn += part) {
      uint32_t const first = MIXED ? batch_part(done / units, turn / part, (units + part - 1) / part) * part : turn, n = units - first < part ? units - first : part;
#pragma unroll 1
      for (uint32_t at = done + first; at < end; at += MIXED ? tiles * units : units) {
        if (!(MIXED ? loader_shared(sh, l, address + (uint64_t)at * unit, (end - at + units - 1) / units, tiles, n * unit, units * unit, waits)
                    : loader_issue(sh, l, address + (uint64_t)at * AMK_UNIT_BYTES, n * AMK_UNIT_BYTES, waits))) {
          return false;
        }
      }
    }
  }
  return true;
}
#endif

// Loads a run of units of a matrix, once `need` units have arrived. `size`: bytes of a unit. `tiles`: whose parts share a stage.
__device__ __forceinline__ bool loader_weights(Shared* sh, Loader& l, uint4 run, uint32_t need, uint32_t size, uint32_t tiles, uint32_t wrap, LoaderWaits& waits) {
  uint32_t const unit = SCALED_UNITS ? size : AMK_UNIT_BYTES;
  if (need > flag_load(&sh->watermark) && !weight_stream_wait(sh, need, wrap)) {
    return false;
  }
  uint64_t address = (uint64_t)run.y << 32 | run.x;
  uint32_t const stage_units = run.w >> 8 & 0xff, period = run.w >> 16;
  uint32_t place = 0;
  loader_count(sh, run.z);
#if AMK_SEQS > 1
  loader_caps(l, sh->program, MIXED && period > stage_units ? stage_units * tiles : stage_units);
  if (period > stage_units) {
    return loader_parts(sh, l, address, run.z, stage_units, period, unit, tiles, waits);
  }
#else
  loader_caps(l, sh->program, stage_units);
#endif
  for (uint32_t left = run.z; left > 0;) { // z: units of the run
    uint32_t const most = period - place < stage_units ? period - place : stage_units;
    uint32_t const units = left < most ? left : most;
    if (!loader_issue(sh, l, address, units * unit, waits)) {
      return false;
    }
    left -= units;
    address += units * unit;
    place = place + units == period ? 0 : place + units;
  }
  return true;
}

// Waits until the step that the loader is in has begun. Returns false when the loader is to stop.
__device__ __forceinline__ bool loader_step(Shared* sh, uint32_t wrap) {
  while ((int32_t)(flag_load(&sh->started) - wrap) <= 0) {
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      return false;
    }
  }
  block_fence();
  return true;
}

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// Loads units of the experts that the router chooses, once its logits have been written in the step that has begun. A stage may have units of several. Returns
// false when the loader is to stop.
__device__ __forceinline__ bool loader_routed(Shared* sh, Loader& l, uint4 run, uint32_t need, uint32_t size, uint32_t wrap, LoaderWaits& waits) {
  if (need > flag_load(&sh->watermark) && !weight_stream_wait(sh, need, wrap)) {
    return false;
  }
  uint32_t const stage_units = run.w >> 8 & 0xff, period = run.w >> 16;
  loader_caps(l, sh->program, stage_units); // before the wait: its divisions would delay the first load
  SlotWalk walk;
  if (!loader_step(sh, wrap) || !slots_wait(sh, walk, (amk_routed const*)((uint64_t)run.y << 32 | run.x), size)) {
    return false;
  }
  uint32_t place = 0;
  loader_count(sh, run.z);
  for (uint32_t left = run.z; left > 0;) {
    uint32_t const most = period - place < stage_units ? period - place : stage_units;
    uint32_t const units = left < most ? left : most;
    if (!loader_claim(sh, l, waits)) {
      return false;
    }
    uint32_t const full = l.full + l.stage * 8;
    uint32_t to = l.ring + l.stage * l.stage_bytes;
    stage_expect_at(full, units * size);
    for (uint32_t wanted = units; wanted > 0;) {
      uint32_t const n = slot_units(walk, wanted);
      stage_copy_at(to, slot_address(sh, walk, size), n * size, full, l.policy);
      to += n * size, wanted -= n;
      slot_step(walk, n);
    }
    loader_issued(l);
    left -= units;
    place = place + units == period ? 0 : place + units;
  }
  return true;
}
#endif

// Loads a block of keys and their values: into one stage, or into stages of their own. `head`: address of the head's keys in page 0. A copy
// has rows of one page; a stage takes two copies if the block does not begin with a page. Returns false when the loader is to stop.
__device__ __forceinline__ bool loader_block(Shared* sh, Loader& l, uint64_t head, uint32_t key, uint32_t keys, LoaderWaits& waits) {
  BlockStages const b = block_stages(keys, l.stage_bytes);
  uint32_t const values = sh->program.kv_values;
#pragma unroll 1
  for (uint32_t at = 0; at < 2 * b.copied;) { // rows of keys, then of values
    bool const behind = at >= b.copied;
    uint32_t const row = behind ? at - b.copied : at, in = row & (b.rows - 1), left = b.copied - row;
    uint32_t const most = left < b.rows - in ? left : b.rows - in, rows = rows_of_page(key + row, most);
    // Computed before the stage is free: after the claim, every cycle is one with nothing in flight.
    uint64_t const from = head + paged_row(page_kept(sh->pages, key + row), values, key + row) + (behind ? values : 0);
    if (in == 0 && !(behind && b.values != 0)) {
      if (!loader_claim(sh, l, waits)) {
        return false;
      }
      stage_expect_at(l.full + l.stage * 8, (b.values != 0 ? 2 : 1) * most * ROW_BYTES);
    }
    uint32_t const full = l.full + l.stage * 8, place = l.ring + l.stage * l.stage_bytes + in * ROW_BYTES;
    stage_copy_at(place + (behind ? b.values : 0), from, rows * ROW_BYTES, full, l.policy);
    at += rows;
    if (b.values != 0 && rows == b.copied && !behind) { // all from one page, and the values go into the same stage
      stage_copy_at(place + b.values, from + values, rows * ROW_BYTES, full, l.policy);
      at += rows;
    }
    if (rows == most && (at > b.copied || b.values == 0)) {
      loader_issued(l);
    }
  }
  return true;
}

// Loads a sequence's keys and values for an attention task, in the step that has begun. What earlier steps wrote is visible then. The row of
// the step's own key is stale; the op replaces it. `more`: kv_block, window, split and splits after its first word.
__device__ __forceinline__ bool loader_seq(Shared* sh, Loader& l, uint4 run, uint4 more, uint32_t wrap, uint32_t seq, LoaderWaits& waits) {
  uint32_t const position = flag_load(&sh->started_position[wrap % 2 * SEQS + seq]), keys = attended(position, more.z);
  uint32_t const active = active_splits(keys, more.y, more.w >> 16), split = seq_split(more.w & 0xffff, more.w >> 16, seq);
  uint32_t const start = split < active ? split_start(keys, more.y, active, split) : 0;
  uint32_t const count = split < active ? split_start(keys, more.y, active, split + 1) - start : 0;
  uint32_t key = paged_key(flag_load(&sh->started_session[wrap % 2 * SEQS + seq]), sh->launch->page_stride, position + 1 - keys + start);
  block_fence();
  if (flag_load(&sh->started) - wrap >= 2) { // that step ended without these keys: the split had none
    return true;
  }
  if (SEQS > 1 && count == 0) {
    return true;
  }
  pieces_wait<0>(); // of the run before: two lines must not be in flight to one place
  bool const first = sh->pages.wrap != wrap;
  if (first) {
    lines_forget(sh->pages, wrap);
  }
  lines_begin(sh->pages, sh->launch->pages, key);
  if (first) {
    copies_see_stores(); // takes as long as the round trip for the lines
  }
  loader_caps(l, sh->program, sh->program.stage_units);
  loader_count(sh, count * 2 * ROW_BYTES / AMK_UNIT_BYTES);
  pieces_wait<0>();
#pragma unroll 1
  for (uint32_t left = count; left > 0;) {
    uint32_t const rows = left < BLOCK_KEYS ? left : BLOCK_KEYS;
    lines_ahead(sh->pages, sh->launch->pages, key);
    if (!loader_block(sh, l, (uint64_t)run.y << 32 | run.x, key, rows, waits)) {
      return false;
    }
    key += rows, left -= rows;
  }
  return true;
}

// Loads keys and values of an attention task, once the step that they are for has begun.
__device__ __forceinline__ bool loader_keys(Shared* sh, Loader& l, uint4 run, uint4 more, uint32_t wrap, LoaderWaits& waits) {
  if (!loader_step(sh, wrap)) {
    return false;
  }
  uint32_t const running = started_seqs(sh, wrap);
  uint32_t seq = first_seq(more.w & 0xffff, more.w >> 16, running);
#pragma unroll 1
  for (uint32_t turn = 0; turn < running; ++turn) {
    if (!loader_seq(sh, l, run, more, wrap, seq, waits)) {
      return false;
    }
    seq = seq + 1 == running ? 0 : seq + 1;
  }
  return true;
}

// The worker's list of loads. Recomputed once per run and not kept: the loader's registers are all taken.
__device__ __forceinline__ amk_load const* loader_list(Shared* sh) { return (amk_load const*)sh->program.loads + sh->queue.load0; }

// Main loop of the loader: one thread, until halted. Every run starts on a new stage.
__device__ __forceinline__ void loader_run(Worker const& w) {
  Shared* sh = w.shared;
  Loader l = {};
  l.full = shared_address(sh->full), l.ring = shared_address(w.ring), l.parity = 1;
  l.stages = w.stages, l.stage_bytes = w.stage_bytes;
  sh->pages.wrap = AMK_NONE;
  l.policy = evict_first_policy();
  LoaderWaits waits = {0, 0, trace_clock()};
  uint32_t load = 0, wrap = 0;
  uint4 run = make_uint4(0, 0, 0, 0), more = run;
  if (sh->queue.loads > 0) {
    amk_load const* list = loader_list(sh);
    run = load_u32x4(list), more = load_u32x4((char const*)list + 16);
  }
  while (sh->queue.loads > 0) {
    load = load + 1 == sh->queue.loads ? 0 : load + 1;
    amk_load const* at = loader_list(sh) + load;
    uint4 const next = load_u32x4(at), next_more = load_u32x4((char const*)at + 16); // a whole run ahead: a round trip to L2
    bool on;
    if ((run.w & 0xff) == AMK_LOAD_CACHE) {
      on = loader_keys(sh, l, run, more, wrap, waits);
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
    } else if ((run.w & 0xff) == AMK_LOAD_ROUTED) {
      on = loader_routed(sh, l, run, more.x, more.y, wrap, waits);
#endif
    } else {
      on = loader_weights(sh, l, run, more.x, more.y, more.w & 0xffff, wrap, waits);
    }
    if (!on) {
      loader_drain(w, l);
      return;
    }
    run = next, more = next_more;
    if (load == 0) {
      ++wrap;
      trace_loader(w, waits);
    }
  }
}
