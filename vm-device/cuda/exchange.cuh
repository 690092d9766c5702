// The end of a step on several devices: each passes its best candidate on to the others, and all choose the same token.
#pragma once

#if AMK_DEVICES > 1
// Slots of a device's candidate. Steps are counted by `go`, which is equal on all devices: two that are compared differ by one at most.
__device__ __forceinline__ uint32_t* exchange_slot(Shared* sh, uint32_t go, uint32_t device) {
  return exchange_of(sh)->slots + (go % AMK_EXCHANGE_STEPS * AMK_DEVICES_MAX + device) * AMK_EXCHANGE_WORDS;
}

// One thread, when this device's candidates have been waited for: passes on the best of them, and takes the best of all. `preempted` is the
// first device's decision, which holds for all. The fences make everything that any device has done in the step happen before what any does
// in the next. Returns false when the device is leaving.
__device__ __forceinline__ bool exchange_best(Worker const& w, Best& best, bool& preempted) {
  Shared* sh = w.shared;
  uint32_t const go = sh->step.go, mine = sh->device;
  uint32_t* slot = exchange_slot(sh, go, mine);
  uint32_t const value = __float_as_uint(best.value), row = best.row, control = preempted;
  devices_fence();
#pragma unroll 1
  for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
    uint32_t* const to = at_distance(slot, sh->peers[i]);
    pair_store(to, value, go << 1);
    pair_store(to + 2, row, go << 1 | control);
  }
#pragma unroll 1
  for (uint32_t device = 0; device < AMK_DEVICES; ++device) {
    if (device == mine) {
      continue;
    }
    uint32_t const* const from = exchange_slot(sh, go, device);
    uint2 first, second;
    for (uint32_t spin = 1;; ++spin) {
      first = pair_load(from), second = pair_load(from + 2);
      if (first.y == go << 1 && (second.y & ~1u) == go << 1) {
        break;
      }
      if (is_dead(sh)) {
        return false;
      }
      if (spin % SPINS_PER_NOTE == 0) {
        note_wait(sh, AMK_TRAP_DEVICE_DEADLINE, device, second.y >> 1, go);
      }
      poll_pause();
    }
    best = better(best, Best{__uint_as_float(first.x), second.x});
    preempted = device == 0 ? (second.y & 1) != 0 : preempted;
  }
  devices_fence();
  return true;
}
#endif
