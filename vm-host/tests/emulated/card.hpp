// What sampling.cuh needs of the other device files, for a build by nvcc: the same instructions as sync.cuh and stage.cuh have.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define AMK_WARPS 8

__device__ inline uint32_t load_relaxed(uint32_t const* word) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
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
__device__ inline uint32_t block_add(uint32_t* word, uint32_t v) { return atomicAdd(word, v); }
__device__ inline void block_or(uint32_t* word, uint32_t v) { atomicOr(word, v); }
__device__ inline void consumers_sync() { __syncthreads(); }
