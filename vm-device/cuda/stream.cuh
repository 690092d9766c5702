// The weight stream of a worker: the loader fills stages in order, each consumer warp walks them in order.
#pragma once

// A consumer warp's place in the ring. Every warp passes every stage, in order, so that a parity cannot be mistaken for another
// lap's: a warp never waits for a stage that it has not seen the phase before of.
struct Cursor {
  uint32_t stage;  // ring index of the current stage
  uint32_t parity; // of its full barrier
};

// The current stage, once it has landed.
__device__ __forceinline__ char const* cursor_land(Worker const& w, Cursor const& c) {
  uint32_t const since = tape_clock();
  wait_stage(w.shared, &w.shared->full[c.stage], c.parity, c.stage);
  tape_starved(w, since);
  return w.ring + (size_t)c.stage * w.stage_bytes;
}

// Whether the current stage has landed, without waiting for it. All lanes agree.
__device__ __forceinline__ bool cursor_landed(Worker const& w, Cursor const& c) { return __all_sync(~0u, barrier_try(&w.shared->full[c.stage], c.parity)) != 0; }

// Frees the current stage and steps to the next. All lanes have read what they need.
__device__ __forceinline__ void cursor_next(Worker const& w, Cursor& c) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(&w.shared->empty[c.stage]);
  }
  if (++c.stage == w.stages) {
    c.stage = 0;
    c.parity ^= 1;
  }
}

// What the loader knows of the ring. Its loop runs once a stage and must be far faster than a stage lands, so places are shared addresses
// and everything is in registers.
struct Loader {
  uint32_t full, empty;    // the barriers of stage 0
  uint32_t ring;           // stage 0
  uint32_t stages, stage_bytes;
  uint32_t stage, parity;  // next stage to issue; parity that its empty barrier waits for
  uint32_t in_flight;      // stages on their way
  uint32_t oldest, oldest_parity; // the first of them
  bool lapped;             // whether every stage has been used once
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
    if (*(volatile uint32_t*)&sh->halt != 0 || is_dead(sh)) {
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
      if (now_ns() - start > w.launch->deadline_ns) {
        return;
      }
    }
    loader_landed(l);
  }
}

// Issues a stage once it has been freed by every consumer warp and few enough bytes are on their way: the messages of a handoff queue
// behind them. False when the loader is to stop.
__device__ __forceinline__ bool loader_issue(Shared* sh, Loader& l, uint64_t from, uint32_t bytes, uint32_t cap, uint64_t policy, LoaderWaits& waits) {
  uint32_t const t0 = tape_clock();
  if (l.lapped && !loader_wait(sh, l.empty + l.stage * 8, l.parity)) {
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
  stage_expect_at(l.full + l.stage * 8, bytes);
  stage_copy_at(l.ring + l.stage * l.stage_bytes, from, bytes, l.full + l.stage * 8, policy);
  ++l.in_flight;
  if (++l.stage == l.stages) {
    l.stage = 0;
    l.parity ^= 1;
    if (!l.lapped) {
      l.lapped = true;
      l.parity = 0;
    }
  }
  return true;
}

// The loader: one thread, endless, until halted. Every run of units starts on a stage of its own.
__device__ __forceinline__ void loader_run(Worker const& w) {
  Shared* sh = w.shared;
  uint32_t const loads = sh->queue.loads, cap_far = sh->program.in_flight, cap_near = sh->program.in_flight_near;
  amk_load const* list = (amk_load const*)sh->program.loads + sh->queue.load0;
  uint64_t const policy = evict_first_policy();
  Loader l = {};
  l.full = shared_address(sh->full), l.empty = shared_address(sh->empty), l.ring = shared_address(w.ring);
  l.stages = w.stages, l.stage_bytes = w.stage_bytes;
  LoaderWaits waits = {0, 0, tape_clock()};
  uint32_t load = 0;
  uint4 run = loads > 0 ? load_u32x4(list) : make_uint4(0, 0, 0, 0);
  while (loads > 0) {
    load = load + 1 == loads ? 0 : load + 1;
    uint4 const next = load_u32x4(list + load); // asked for a whole run ahead: it is a trip to L2
    uint64_t address = (uint64_t)run.y << 32 | run.x;
    uint32_t const stage_units = run.w & 0xffff, period = run.w >> 16;
    uint32_t place = 0;
    for (uint32_t left = run.z; left > 0;) { // z: units of the run
      uint32_t const near = *(volatile uint32_t*)&sh->near, halt = *(volatile uint32_t*)&sh->halt;
      uint32_t const most = period - place < stage_units ? period - place : stage_units;
      uint32_t const units = left < most ? left : most;
      if (halt != 0 || !loader_issue(sh, l, address, units * AMK_UNIT_BYTES, near != 0 ? cap_near : cap_far, policy, waits)) {
        loader_drain(w, l);
        return;
      }
      left -= units;
      address += units * AMK_UNIT_BYTES;
      place = place + units == period ? 0 : place + units;
    }
    run = next;
    if (load == 0) {
      tape_loader(w, waits);
    }
  }
}
