// The host ring, device side. Scope is .sys throughout. Every word has one writer; the GPU never does a read-modify-write on host
// memory (it would not be atomic towards the CPU). Pairs with vm-host/src/ring.rs, function by function.
#pragma once

// Pairs with ring.rs: publish.
__device__ __forceinline__ uint32_t ring_acquire(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}

// Pairs with ring.rs: poll_completion, heartbeat and status readers.
__device__ __forceinline__ void ring_release(uint32_t* word, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
}

// Accesses that order nothing: token buffers, abort requests, payloads published by a later release.
__device__ __forceinline__ uint32_t host_load(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
__device__ __forceinline__ void host_store(uint32_t* word, uint32_t v) { asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory"); }

// Stores four independent words in one write over the bus. Pairs with ring.rs: worker_heartbeat.
__device__ __forceinline__ void host_store_u32x4(void* words, uint32_t x, uint32_t y, uint32_t z, uint32_t v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(words), "r"(x), "r"(y), "r"(z), "r"(v) : "memory");
}

// Orders host_store words before the publication that the poller forwards to the host.
__device__ __forceinline__ void host_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
