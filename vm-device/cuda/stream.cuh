// The weight stream of a worker: the loader fills stages in order, each consumer warp walks them in order.
#pragma once

// A consumer warp's place in the ring. Every warp passes every stage, in order, so that a parity cannot be mistaken for another
// lap's: a warp never waits for a stage that it has not seen the phase before of.
struct Cursor {
  uint32_t stage;  // ring index of the current stage
  uint32_t parity; // of its full barrier
  uint32_t base;   // first unit of the current stage, counted from the start of the step
  bool landed;     // whether the current stage has been waited for
  uint32_t stages; // of the ring
  uint32_t stage_units;
};

__device__ __forceinline__ void cursor_land(Worker const& w, Cursor& c) {
  if (!c.landed) {
    wait_stage(w.shared, &w.shared->full[c.stage], c.parity, c.stage);
    c.landed = true;
  }
}

// Frees the current stage and steps to the next. All lanes have read what they need.
__device__ __forceinline__ void cursor_next(Worker const& w, Cursor& c) {
  cursor_land(w, c);
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(&w.shared->empty[c.stage]);
  }
  c.base += c.stage_units;
  c.landed = false;
  if (++c.stage == c.stages) {
    c.stage = 0;
    c.parity ^= 1;
  }
}

// Frees every stage that ends at or before unit n.
__device__ __forceinline__ void cursor_pass(Worker const& w, Cursor& c, uint32_t n) {
  while (n - c.base >= c.stage_units) {
    cursor_next(w, c);
  }
}

// Makes the stage of unit n current and landed.
__device__ __forceinline__ void cursor_seek(Worker const& w, Cursor& c, uint32_t n) {
  cursor_pass(w, c, n);
  cursor_land(w, c);
}

// The step's stream is over: its last stage may be partly filled, the next step starts on a fresh one.
__device__ __forceinline__ void cursor_end_step(Worker const& w, Cursor& c, uint32_t units) {
  while (c.base < units) {
    cursor_next(w, c);
  }
  c.base = 0;
}

// The loader: one thread, endless, until halted. Issues stage k when it is free and stage k - cap has landed, so that the bytes on
// their way stay few: the messages of a handoff queue behind them.
__device__ __forceinline__ void loader_run(Worker const& w) {
  Shared* sh = w.shared;
  uint32_t const stages = sh->program.stages, stage_units = sh->program.stage_units;
  uint32_t const units = sh->queue.units;
  amk_load const* loads = (amk_load const*)sh->program.loads + sh->queue.load0;
  uint64_t const policy = evict_first_policy();
  uint32_t issued = 0;           // stages issued since the program was loaded
  uint32_t landed = 0;           // of these, stages known to have landed
  uint32_t stage = 0, lap = 0;   // place of the next stage to issue
  uint32_t landed_stage = 0, landed_parity = 0;
  auto settle = [&](uint32_t target) { // until at most `target` stages are on their way
    while (issued - landed > target) {
      if (!wait_stage(sh, &sh->full[landed_stage], landed_parity, landed_stage)) {
        return false;
      }
      ++landed;
      if (++landed_stage == stages) {
        landed_stage = 0;
        landed_parity ^= 1;
      }
    }
    return true;
  };
  while (units > 0) {
    uint32_t load = 0, taken = 0; // place in the step's loads
    amk_load run = {0, 0, 0};
    for (uint32_t done = 0; done < units;) {
      uint32_t const want = units - done < stage_units ? units - done : stage_units;
      if (lap > 0) { // the stage must have been freed by every consumer warp
        while (!barrier_try(&sh->empty[stage], (lap - 1) & 1)) {
          if (*(volatile uint32_t*)&sh->halt != 0 || is_dead(sh)) {
            goto drain;
          }
        }
      }
      if (*(volatile uint32_t*)&sh->halt != 0) {
        goto drain;
      }
      {
        uint32_t const cap = *(volatile uint32_t*)&sh->near != 0 ? sh->program.in_flight_near : sh->program.in_flight;
        if (!settle(cap - 1)) {
          goto drain;
        }
      }
      stage_expect(&sh->full[stage], want * AMK_UNIT_BYTES);
      for (uint32_t got = 0; got < want;) {
        if (taken == run.units) {
          uint4 const r = load_u32x4(loads + load);
          run.address = (uint64_t)r.y << 32 | r.x;
          run.units = r.z;
          taken = 0;
          ++load;
        }
        uint32_t const part = run.units - taken < want - got ? run.units - taken : want - got;
        stage_copy(w.ring + (size_t)(stage * stage_units + got) * AMK_UNIT_BYTES, run.address + (uint64_t)taken * AMK_UNIT_BYTES, part * AMK_UNIT_BYTES,
                   &sh->full[stage], policy);
        taken += part;
        got += part;
      }
      ++issued;
      done += want;
      if (++stage == stages) {
        stage = 0;
        ++lap;
      }
    }
  }
drain: // nothing may be on its way into shared memory when the barriers are made anew or the block ends
  while (issued != landed) {
    uint64_t const start = now_ns();
    while (!barrier_try(&sh->full[landed_stage], landed_parity)) {
      if (now_ns() - start > w.launch->deadline_ns) {
        return;
      }
    }
    ++landed;
    if (++landed_stage == stages) {
      landed_stage = 0;
      landed_parity ^= 1;
    }
  }
}
