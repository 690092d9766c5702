// Memory order inside the GPU: counters, flag-in-data words, the step word. All accesses to words that another worker writes or reads
// concurrently are here; each names the function it pairs with. Scope is .gpu, or .sys for words that another GPU may write or read, in a
// kernel of several devices; the host's words are in ring.cuh.
#pragma once

// Scope of words that other devices have a copy of.
#if AMK_DEVICES > 1
#define AMK_SCOPE "sys"
#else
#define AMK_SCOPE "gpu"
#endif

// A 64-bit nanosecond clock for deadlines and reports.
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Polls without ordering; after a success, call acquire_release_fence. Pairs with counter_signal, word_publish.
__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.relaxed." AMK_SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t v) {
  asm volatile("st.relaxed." AMK_SCOPE ".global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
}

// After a successful poll: makes visible what the signalling worker wrote before its release; with the CTA barrier that follows, to every
// thread of this worker. Before a relaxed publication: releases this worker's earlier writes to readers that fence after seeing it.
__device__ __forceinline__ void acquire_release_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The same for an edge that may lead to another device: the step word, its fields, and candidates.
__device__ __forceinline__ void devices_fence() { asm volatile("fence.acq_rel." AMK_SCOPE ";" ::: "memory"); }

// Signals a counter once. A reader of the new value sees everything this worker wrote before (ordered by the preceding CTA barrier). Pairs
// with load_relaxed + acquire_release_fence in wait_counter.
__device__ __forceinline__ void counter_signal(uint32_t* counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Release store of a word, after the data that it announces. Pairs with load_relaxed + acquire_release_fence of its pollers.
__device__ __forceinline__ void word_publish(uint32_t* word, uint32_t v) {
  asm volatile("st.release." AMK_SCOPE ".global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
}

// Adds one and returns the old value. For claims; orders nothing.
__device__ __forceinline__ uint32_t claim(uint32_t* word) {
  uint32_t v;
  asm volatile("atom.relaxed." AMK_SCOPE ".global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(word) : "memory");
  return v;
}

#if AMK_DEVICES > 1
// A word and its tag in one access: a reader that sees the tag has the word. Relaxed: devices_fence orders what they announce.
__device__ __forceinline__ void pair_store(uint32_t* pair, uint32_t word, uint32_t tag) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(pair), "l"((uint64_t)tag << 32 | word) : "memory");
}
__device__ __forceinline__ uint2 pair_load(uint32_t const* pair) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(pair) : "memory");
  return make_uint2((uint32_t)v, (uint32_t)(v >> 32));
}
#endif

// Adds. For sums that are read only after all additions.
__device__ __forceinline__ void add_relaxed(uint32_t* word, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory");
}

__device__ __forceinline__ void add_relaxed64(uint64_t* word, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}

// Loads of activations. They bypass L1, which is not coherent between multiprocessors.
__device__ __forceinline__ float2 load_f32x2(float const* p) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_u32x4(void const* p) {
  uint4 v;
  asm volatile("ld.relaxed." AMK_SCOPE ".global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_f32(float* p, float v) { asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }

// Stores a word of a buffer. A flag-in-data word holds value and tag in this one access: a reader that sees the tag has the value, with no
// fence on either side. Pairs with load_u32x4 and load_relaxed in buffer.cuh.
__device__ __forceinline__ void store_u32(uint32_t* p, uint32_t v) { asm volatile("st.relaxed." AMK_SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

__device__ __forceinline__ void store_u32x4(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Sets bits of a word whose other bits other threads of this worker set concurrently; orders nothing.
__device__ __forceinline__ void set_bits(uint32_t* word, uint32_t bits) { asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory"); }

// Loads data that is constant while the kernel runs. Volatile, so that the load is issued where it is written.
__device__ __forceinline__ float4 load_constant(float const* p) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}

// Prefetches a line of constant data into L1.
__device__ __forceinline__ void prefetch_l1(void const* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// Orders shared-memory data before the flag that announces it, in the writing warp, and after it in the readers.
__device__ __forceinline__ void block_fence() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
