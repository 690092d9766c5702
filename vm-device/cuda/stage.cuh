// Shared memory between the roles of a block: flags, and the ring of arrived weights, whose bulk copies complete on `full` and which
// consumers free on `empty`.
#pragma once

// Flags in shared memory: words that one role of a block writes and others poll, without a barrier. Other data that they announce is ordered
// by a block_fence on both sides.
__device__ __forceinline__ uint32_t flag_load(uint32_t const* word) { return *(volatile uint32_t const*)word; }
__device__ __forceinline__ void flag_store(uint32_t* word, uint32_t v) { *(volatile uint32_t*)word = v; }

// The same, and what was written before the flag is visible afterwards. Pairs with a block_fence before the flag's store.
__device__ __forceinline__ uint32_t flag_acquire(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"((uint32_t)__cvta_generic_to_shared(word)) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t shared_address(void const* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// The inverse; the compiler can tell that the result points to shared memory.
__device__ __forceinline__ char* shared_place(uint32_t address) { return (char*)__cvta_shared_to_generic(address); }

// Adds to a word of shared memory, or sets bits in it, atomically within the block. The barrier that follows orders it.
__device__ __forceinline__ uint32_t block_add(uint32_t* word, uint32_t v) {
  uint32_t old;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(shared_address(word)), "r"(v) : "memory");
  return old;
}
__device__ __forceinline__ void block_or(uint32_t* word, uint32_t v) { asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(shared_address(word)), "r"(v) : "memory"); }

__device__ __forceinline__ void barrier_init(uint64_t* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_invalidate(uint64_t* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory"); }

// Returns whether the phase of this parity has completed; acquires. Pairs with barrier_arrive (empty) and the copy's completion (full).
__device__ __forceinline__ bool barrier_try_at(uint32_t b, uint32_t parity) {
  uint32_t ok;
  asm volatile(
      "{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
      : "=r"(ok)
      : "r"(b), "r"(parity)
      : "memory");
  return ok != 0;
}
// The same at once: a try may wait a while for the answer to become yes.
__device__ __forceinline__ bool barrier_test(uint64_t* b, uint32_t parity) {
  uint32_t ok;
  asm volatile(
      "{ .reg .pred q; mbarrier.test_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
      : "=r"(ok)
      : "r"(shared_address(b)), "r"(parity)
      : "memory");
  return ok != 0;
}
__device__ __forceinline__ bool barrier_try(uint64_t* b, uint32_t parity) { return barrier_try_at(shared_address(b), parity); }
__device__ __forceinline__ void barrier_arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory"); }

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Loads 16 bytes of an arrived stage or of the staged vector. Volatile, so that a batch of loads stays ahead of the products that use it.
__device__ __forceinline__ uint4 stage_load(void const* p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)));
  return v;
}
// The same for 2, 4 and 8 bytes.
__device__ __forceinline__ uint32_t stage_load2(void const* p) {
  uint32_t v;
  asm volatile("{ .reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(v) : "r"(shared_address(p)));
  return v;
}
__device__ __forceinline__ uint32_t stage_load4(void const* p) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)));
  return v;
}
__device__ __forceinline__ uint2 stage_load8(void const* p) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared_address(p)));
  return v;
}

// Waits until a stage's loads are in registers: this instruction depends on `read`, all of their words joined, since the compiler chooses the order of
// loads. They can queue behind loads of vectors for longer than refilling a freed stage takes, and nothing else waits for them: not the arrival on a
// barrier, nor the compiler before it. It may write `sink`, which nobody reads.
__device__ __forceinline__ void stage_read(uint32_t read, uint32_t* sink) {
  asm volatile("{ .reg .pred q; setp.eq.u32 q, %0, 0x7fedcba9; @q st.shared.u32 [%1], %0; }" ::"r"(read), "r"(shared_address(sink)) : "memory");
}

__device__ __forceinline__ void stage_store(void* p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Stores a word in shared memory if `wanted`, without a branch: what stands before and behind it then overlaps.
__device__ __forceinline__ void store_if(bool wanted, void* at, uint32_t v) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; @q st.shared.u32 [%0], %1; }" ::"r"(shared_address(at)), "r"(v), "r"((uint32_t)wanted) : "memory");
}

// Orders global stores that threads have made, and this one has observed, before the bulk copies that follow. Takes about a microsecond.
__device__ __forceinline__ void copies_see_stores() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Orders this thread's stores to a stage before the bulk copy that refills it.
__device__ __forceinline__ void stage_given_back() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Announces `bytes` on the full barrier of a stage, before the copies that bring them. Operands are shared addresses, to keep the loader's
// loop short.
__device__ __forceinline__ void stage_expect_at(uint32_t full, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
}
// Starts a bulk copy of `bytes` (a multiple of 16) into a stage.
__device__ __forceinline__ void stage_copy_at(uint32_t stage, uint64_t address, uint32_t bytes, uint32_t full, uint64_t policy) {
#if AMK_EVICT_FIRST
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(stage),
      "l"(address), "r"(bytes), "r"(full), "l"(policy)
      : "memory");
#else
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage), "l"(address),
               "r"(bytes), "r"(full)
               : "memory");
#endif
}

// cp.async copies of 16 bytes per thread, for kernels that fill shared memory without bulk copies: `bytes` of them are read, the rest of the
// 16 is zero. They complete in groups: pieces_wait leaves at most LEFT of this thread's groups in flight, and a block barrier after it makes
// the data visible to the other threads.
__device__ __forceinline__ void piece_copy(uint32_t target, void const* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void pieces_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t LEFT> __device__ __forceinline__ void pieces_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// Orders the data of this thread's copies before products that read shared memory through the async proxy (wgmma).
__device__ __forceinline__ void products_see_pieces() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
