// Weights that are still on their way while the kernel runs. The host copies packed units in landing order on a stream of its own and raises
// `landed` behind each copy (vm-host/src/landing/); who needs units that are not there waits here. docs/protocol.md, "Landing".
#pragma once

__device__ __forceinline__ amk_landing* landing_of(Shared* sh) { return (amk_landing*)sh->launch->landing; }

// The loader, before the first stage of a run: until the run's units have landed, counting to `need` in landing order. What was seen is
// kept in the worker's `landed`, so that nothing is asked once everything is there. When the rest is abandoned, a step that has begun is let through: its answer is
// void. One that has not begun waits on, so that no stage of a later step holds bytes that never came. False when the loader is to stop.
__device__ __forceinline__ bool landing_wait(Shared* sh, uint32_t need, uint32_t lap) {
  amk_landing* landing = landing_of(sh);
  uint64_t since = 0;
  for (;;) {
    uint32_t const landed = load_relaxed(&landing->landed);
    if (landed == AMK_LANDED_ABANDONED) {
      if ((int32_t)(flag_load(&sh->begun) - lap) > 0) {
        break;
      }
    } else if (landed >= need) {
      flag_store(&sh->landed, landed);
      break;
    }
    if (since == 0) {
      since = now_ns();
      claim(&landing->waits);
    }
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      claim(&landing->resumed);
      return false;
    }
    __nanosleep(500);
  }
  acquire_release_fence(); // pairs with the fence in front of the write of `landed`
  copies_see_stores();
  if (since != 0) {
    add_relaxed(&landing->waited_us, (uint32_t)((now_ns() - since) / 1000));
    claim(&landing->resumed);
  }
  return true;
}

// The watchdog, when a worker has finished nothing for the deadline: whether weights on their way excuse it. They do while something lands, and
// for so many deadlines in a row in which nothing does.
__device__ __forceinline__ bool landing_excuses(Shared* sh) {
  amk_landing* landing = landing_of(sh);
  uint32_t const landed = load_relaxed(&landing->landed);
  if (landed >= AMK_LANDED_ABANDONED) {
    sh->landing_idle = 0;
    return false;
  }
  sh->landing_idle = landed == sh->seen_landed ? sh->landing_idle + 1 : 0;
  sh->seen_landed = landed;
  return sh->landing_idle <= load_relaxed(&landing->patience);
}

// Says to the host whether the command under way waits for weights.
__device__ __forceinline__ void landing_report(Shared* sh, uint32_t sequence) {
  amk_landing const* landing = landing_of(sh);
  bool const waits = load_relaxed(&landing->waits) != load_relaxed(&landing->resumed);
  host_store(&((amk_ring_indices*)sh->launch->indices)->waiting, waits ? sequence : 0);
}
