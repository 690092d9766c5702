// Several devices in one step. Each has its own tables, counters and step word, and a copy of every replicated buffer, at one distance from
// those of another device. A replicated word is stored to all of them and polled by each in its own copy; at the end of a step the devices
// exchange their best candidates. In a kernel of one device nothing of this is compiled.
#pragma once

// Added to the kind of a staged buffer if it is replicated.
constexpr uint32_t REPLICATED = 0x100;
__device__ __forceinline__ bool is_flag_in_data(ResolvedBuffer const& s) { return (AMK_DEVICES > 1 ? s.kind & ~REPLICATED : s.kind) == AMK_BUFFER_FLAG_IN_DATA; }

template <typename T> __device__ __forceinline__ T* at_distance(T* p, uint64_t distance) { return (T*)((uint64_t)p + distance); }

// Stores a word of all devices.
__device__ __forceinline__ void devices_store(Shared* sh, uint32_t* word, uint32_t v) {
  store_relaxed(word, v);
#if AMK_DEVICES > 1
#pragma unroll 1
  for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
    store_relaxed(at_distance(word, sh->peers[i]), v);
  }
#endif
}
// The same as a release, after the data that it announces, which is on all devices too.
__device__ __forceinline__ void devices_publish(Shared* sh, uint32_t* word, uint32_t v) {
  word_publish(word, v);
#if AMK_DEVICES > 1
#pragma unroll 1
  for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
    word_publish(at_distance(word, sh->peers[i]), v);
  }
#endif
}

// Number of this device. The first one alone talks to the host.
__device__ __forceinline__ uint32_t device_of(Shared* sh) {
#if AMK_DEVICES > 1
  return sh->device;
#else
  return 0;
#endif
}

#if AMK_DEVICES > 1
// One thread of each block, first of all: which device the block belongs to, and how far the others' copies are.
__device__ __forceinline__ void device_find(Shared* sh, amk_launch const& launch) {
  sh->device = launch.device + blockIdx.x / launch.workers;
  sh->index = blockIdx.x % launch.workers;
  amk_launch const* all = (amk_launch const*)launch.launches;
  sh->launch = all + sh->device;
  for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
    sh->peers[i] = all[i < sh->device ? i : i + 1].step - all[sh->device].step;
  }
}

__device__ __forceinline__ amk_exchange* exchange_of(Shared* sh) { return (amk_exchange*)sh->launch->exchange; }
// Distance from this device's memory to that of another one.
__device__ __forceinline__ uint64_t distance_to(Shared* sh, uint32_t device) { return sh->peers[device < sh->device ? device : device - 1]; }

// The poller's thread of each other device: tells the first one that this kernel is running.
__device__ __forceinline__ void device_report(Shared* sh) { store_relaxed(at_distance(&exchange_of(sh)->here[sh->device], distance_to(sh, 0)), 1); }
// The poller, before the first command: waits until the kernels of all devices are running, since a step's deadline does not wait for a launch.
__device__ __forceinline__ bool devices_wait(Shared* sh) {
  uint64_t const start = now_ns();
#pragma unroll 1
  for (uint32_t device = 1; device < AMK_DEVICES; ++device) {
    while (load_relaxed(&exchange_of(sh)->here[device]) == 0) {
      if (now_ns() - start > 2 * sh->launch->deadline_ns) {
        trap(sh, AMK_TRAP_DEVICE_DEADLINE, device, 0, 1, now_ns() - start);
        return false;
      }
      if (host_load(&((amk_ring_indices*)sh->launch->indices)->abort) != 0) {
        trap(sh, AMK_TRAP_ABORTED, 0, 0, 0, 0);
      }
      if (load_relaxed(&((amk_done*)sh->launch->done)->abort) != 0) {
        return false;
      }
      __nanosleep(500);
    }
  }
  return true;
}
// The least of all devices' watermarks; of an abandoned stream, that it is, as soon as one device has heard of it.
__device__ __forceinline__ uint32_t devices_watermark(Shared* sh) {
  amk_weight_stream* const own = (amk_weight_stream*)sh->launch->weight_stream;
  uint32_t least = load_relaxed(&own->watermark);
#pragma unroll 1
  for (uint32_t i = 0; i < AMK_DEVICES - 1 && least != AMK_WATERMARK_ABANDONED; ++i) {
    uint32_t const there = load_relaxed(&at_distance(own, sh->peers[i])->watermark);
    least = there == AMK_WATERMARK_ABANDONED || there < least ? there : least;
  }
  return least;
}
// The same thread of each other device, now and then: the host may ask this device to leave although the first one does not answer.
__device__ __forceinline__ void device_look(Shared* sh) {
  amk_ring_indices* indices = (amk_ring_indices*)sh->launch->indices;
  host_store(&indices->heartbeat, (uint32_t)now_ns());
  if (host_load(&indices->abort) != 0 && !is_dead(sh)) {
    trap(sh, AMK_TRAP_ABORTED, 0, 0, 0, 0);
  }
}
#endif
