// The end of a step on several devices: all get the same token. In a greedy step each device passes its best candidate on to all others. In
// a sampled step they pass it to the first device, which has all logits, samples, and passes the token back. Each sequence of a batch has an
// exchange of its own, by a thread of its own: all of them take one hop, or two if any sequence samples.
#pragma once

#if AMK_DEVICES > 1
// Slots of a device's words for the worker's sequence. Steps are counted by `go`, which is equal on all devices when a step begins: two that are
// compared differ by one step at most. Sampling adds to it on the first device, whose token brings the new count.
__device__ __forceinline__ uint32_t* exchange_slot(Worker const& w, uint32_t go, uint32_t device) {
  return exchange_of(w.shared)[seq_of(w)].slots + (go % AMK_EXCHANGE_STEPS * AMK_DEVICES_MAX + device) * AMK_EXCHANGE_WORDS;
}

// Two words of the step `go`, with a bit of the first device's: whether it is preempted.
struct Exchanged {
  uint32_t first, second;
  bool control;
};

// Stores them to a slot, perhaps of another device.
__device__ __forceinline__ void exchange_store(uint32_t* slot, uint32_t go, Exchanged const& e) {
  pair_store(slot, e.first, go << 1);
  pair_store(slot + 2, e.second, go << 1 | e.control);
}

// Waits for those of a device in a slot of this one. Returns false when the device is leaving.
__device__ __forceinline__ bool exchange_wait(Worker const& w, uint32_t const* slot, uint32_t go, uint32_t device, Exchanged& e) {
  for (uint32_t spin = 1;; ++spin) {
    uint2 const first = pair_load(slot), second = pair_load(slot + 2);
    if (first.y == go << 1 && (second.y & ~1u) == go << 1) {
      e = Exchanged{first.x, second.x, (second.y & 1) != 0};
      return true;
    }
    if (is_dead(w.shared)) {
      return false;
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(w.shared, AMK_TRAP_DEVICE_DEADLINE, device, second.y >> 1, go);
    }
    poll_pause();
  }
}

// One thread: takes the best candidate of this device and all others, which pass theirs on to it. `preempted` becomes the first device's. Returns
// false when the device is leaving.
__device__ __forceinline__ bool exchange_take(Worker const& w, uint32_t go, Best& best, bool& preempted) {
#pragma unroll 1
  for (uint32_t device = 0; device < AMK_DEVICES; ++device) {
    if (device == w.shared->device) {
      continue;
    }
    Exchanged e;
    if (!exchange_wait(w, exchange_slot(w, go, device), go, device, e)) {
      return false;
    }
    best = better(best, Best{__uint_as_float(e.first), e.second});
    preempted = device == 0 ? e.control : preempted;
  }
  return true;
}

// One thread per sequence, at the end of a greedy step, when this device's candidates have been waited for: passes on the best of them, and takes
// the best of all. `preempted` is the first device's decision, which holds for all. The fences make everything that any device has done in the
// step happen before what any does in the next. Returns false when the device is leaving.
__device__ __forceinline__ bool exchange_best(Worker const& w, Best& best, bool& preempted) {
  Shared* sh = w.shared;
  uint32_t const go = sh->step.go;
  uint32_t* slot = exchange_slot(w, go, sh->device);
  Exchanged const own = {__float_as_uint(best.value), best.row, preempted};
  devices_fence();
#pragma unroll 1
  for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
    exchange_store(at_distance(slot, sh->peers[i]), go, own);
  }
  bool const all = exchange_take(w, go, best, preempted);
  devices_fence();
  return all;
}

// One thread per sequence, in a sampled step, when this device's candidates have been waited for: the first device takes the best of all, and with
// it all logits: each device passes its candidate on after its own have been stored. On a device that is leaving the result has no meaning.
__device__ __forceinline__ void exchange_collect(Worker const& w, Best& best) {
  Shared* sh = w.shared;
  uint32_t const go = sh->step.go;
  bool preempted = false;
  if (sh->device == 0) {
    exchange_take(w, go, best, preempted);
    devices_fence();
  } else {
    devices_fence();
    exchange_store(at_distance(exchange_slot(w, go, sh->device), distance_to(sh, 0)), go, Exchanged{__float_as_uint(best.value), best.row, false});
  }
}

// All threads, in a sampled step of one sequence.
__device__ __forceinline__ void exchange_gather(Worker const& w, Best& best) {
  Shared* sh = w.shared;
  consumers_sync(); // best_value and best_row have been read
  if (w.thread == 0) {
    exchange_collect(w, best);
    sh->best_value[0] = best.value;
    sh->best_row[0] = best.row;
  }
  consumers_sync();
  best = Best{sh->best_value[0], sh->best_row[0]};
}

// One thread per sequence, at the end of a sampled step that began with the count `go`: the first device passes the token on, with the new count,
// to the slot of each device's own number there, which nobody else writes. The others take it. What all have done in the step happens before the
// next one, by way of the first device. Returns false when the device is leaving.
__device__ __forceinline__ bool exchange_token(Worker const& w, uint32_t go, uint32_t& token, bool& preempted) {
  Shared* sh = w.shared;
  if (sh->device == 0) {
    devices_fence();
#pragma unroll 1
    for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
      exchange_store(at_distance(exchange_slot(w, go, i + 1), sh->peers[i]), go, Exchanged{token, sh->step.go, preempted});
    }
    return true;
  }
  Exchanged e = {token, go, false};
  bool const met = exchange_wait(w, exchange_slot(w, go, sh->device), go, 0, e);
  devices_fence();
  token = e.first, sh->step.go = e.second, preempted = e.control;
  return met;
}
#endif
