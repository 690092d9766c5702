// The parts of other device files that sampling.cuh and cooperative_sampler.cuh need, for nvcc: the same instructions as sync.cuh and stage.cuh.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define AMK_WARPS 8
#define WORKERS 132 // of an H100 and an H200

__device__ inline uint32_t load_relaxed(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
__device__ inline uint32_t host_load(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
  return v;
}
__device__ inline uint4 load_u32x4(void const* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_u32x4(void* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline void store_relaxed(uint32_t* word, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory"); }
__device__ inline void word_publish(uint32_t* word, uint32_t v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory"); }
__device__ inline void acquire_release_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void counter_signal(uint32_t* word) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(word) : "memory");
}
__device__ inline void add_relaxed(uint32_t* word, uint32_t v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(v) : "memory"); }
__device__ inline void add_relaxed64(uint64_t* word, uint64_t v) { asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory"); }
__device__ inline uint32_t claim(uint32_t* word) {
  uint32_t v;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(word) : "memory");
  return v;
}
__device__ inline void poll_pause() { __nanosleep(20); }
__device__ inline uint32_t block_add(uint32_t* word, uint32_t v) { return atomicAdd(word, v); }
__device__ inline void block_or(uint32_t* word, uint32_t v) { atomicOr(word, v); }
__device__ inline void consumers_sync() { __syncthreads(); }
