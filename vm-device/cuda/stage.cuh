// Shared memory between the roles of a block: flags, and the ring of arrived weights, whose bulk copies complete on `full` and which
// consumers free on `empty`.
#pragma once

// Words by which the roles of a block tell each other things without a barrier: written and read again and again. What else was written
// before is ordered by a block_fence on both sides.
__device__ __forceinline__ uint32_t flag_load(uint32_t const* word) { return *(volatile uint32_t const*)word; }
__device__ __forceinline__ void flag_store(uint32_t* word, uint32_t v) { *(volatile uint32_t*)word = v; }

__device__ __forceinline__ uint32_t shared_address(void const* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// And back: the compiler sees that what is there is shared memory.
__device__ __forceinline__ char* shared_place(uint32_t address) { return (char*)__cvta_shared_to_generic(address); }

// Adds to a word of shared memory, or sets bits of it, beside other threads of the block; what orders them is the barrier behind.
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

// Whether the phase of this parity is over. Pairs with barrier_arrive (empty) and the copy's completion (full); acquires.
__device__ __forceinline__ bool barrier_try_at(uint32_t b, uint32_t parity) {
  uint32_t ok;
  asm volatile(
      "{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
      : "=r"(ok)
      : "r"(b), "r"(parity)
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

// 16 bytes of a arrived stage or of the staged vector. Volatile, so that a batch of them stays in front of the products that use it.
__device__ __forceinline__ uint4 stage_load(void const* p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared_address(p)));
  return v;
}

// What a stage was read for is in registers before anything that follows is issued: here is an instruction that needs `last`, a word of the last load,
// and a warp's loads from shared memory return in order. They queue up with loads of vectors, for longer than it takes to fill a stage that was
// given back, and nobody else waits for them: not the arrival on a barrier, nor the compiler in front of it. Nothing can be seen of it, whatever
// the word is.
__device__ __forceinline__ void stage_read(uint32_t last) {
  asm volatile("{ .reg .pred q; setp.eq.u32 q, %0, 0x7fedcba9; @q nanosleep.u32 0; }" ::"r"(last) : "memory");
}

__device__ __forceinline__ void stage_store(void* p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// What threads have stored in global memory, and this one has seen, comes before the copies that follow. Takes a microsecond.
__device__ __forceinline__ void copies_see_stores() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// What this thread has stored in a stage comes before the copy that fills it again.
__device__ __forceinline__ void stage_given_back() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Announces `bytes` on the barrier of a stage. The copies that bring them follow. Places are shared addresses here: the loader's loop is
// short on purpose.
__device__ __forceinline__ void stage_expect_at(uint32_t full, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(bytes) : "memory");
}
// Brings `bytes` (a multiple of 16) into a stage.
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

// Copies of 16 bytes by threads, for kernels that fill shared memory without the copy engine: `bytes` of them are read, the rest of the 16 is
// zero. They land in groups: waiting leaves at most LEFT of this thread's groups on their way, and a block barrier behind it shows the
// others what has arrived.
__device__ __forceinline__ void piece_copy(uint32_t target, void const* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void pieces_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <uint32_t LEFT> __device__ __forceinline__ void pieces_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// What this thread's copies have brought comes before products that read shared memory by themselves.
__device__ __forceinline__ void products_see_pieces() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
