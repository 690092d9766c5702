// Emulates the threads of some workers on one CPU thread: each is a fiber that runs until its next barrier, warp exchange, or turn of a wait.
// It covers the part of CUDA that sampling.cuh and cooperative_sampler.cuh use; they are compiled unchanged. Memory order is not tested: a
// fiber sees what those before it have stored.
#pragma once
#undef _FORTIFY_SOURCE // its longjmp takes another stack for an error
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline

#ifndef AMK_WARPS // any number of them
#define AMK_WARPS 8
#endif
#ifndef WORKERS // one sends requests, the others help
#define WORKERS 4
#endif
constexpr uint32_t THREADS_OF_WORKER = AMK_WARPS * 32, ALL_THREADS = WORKERS * THREADS_OF_WORKER;
constexpr uint32_t WARPS = WORKERS * AMK_WARPS, GROUPS = WARPS + WORKERS; // groups of threads that meet: warps, then workers
constexpr uint32_t STACK = 128u << 10;

struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }
template <typename T, typename F> T bits_as(F v) {
  static_assert(sizeof(T) == sizeof(F), "as many bits");
  T r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }
inline float __int_as_float(int32_t v) { return bits_as<float>(v); }
inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_ru(float a, float b) {
  float const near = a + b;
  double const low = (double)near - (double)b; // exact where it is used: b is 3 * 2^22 and a small
  return (double)a > low ? std::nextafter(near, INFINITY) : near;
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs((int)v); }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
using std::fmaxf;

// The fibers.
struct Fibers {
  ucontext_t first[ALL_THREADS]; // where a fiber begins
  jmp_buf home, of[ALL_THREADS];
  std::unique_ptr<char[]> stacks{new char[(size_t)ALL_THREADS * STACK]};
  bool begun[ALL_THREADS], done[ALL_THREADS];
  uint32_t group[ALL_THREADS], since[ALL_THREADS]; // what a fiber waits for: a group, plus one, to leave this round
  uint32_t running, waiting[GROUPS], round[GROUPS], size[GROUPS];
  uint64_t word[ALL_THREADS];
  void (*body)(uint32_t worker, uint32_t thread);
};
inline Fibers fibers;
// Switches with _setjmp, since swapcontext makes a system call each time, which was most of the time of these programs.
__attribute__((noinline)) inline void next_fiber() {
  if (_setjmp(fibers.of[fibers.running]) == 0) {
    _longjmp(fibers.home, 1);
  }
}
// Runs a fiber until it leaves.
__attribute__((noinline)) inline void enter_fiber(uint32_t t) {
  fibers.running = t;
  if (_setjmp(fibers.home) != 0) {
    return;
  }
  if (fibers.begun[t]) {
    _longjmp(fibers.of[t], 1);
  }
  fibers.begun[t] = true;
  setcontext(&fibers.first[t]);
}
// Waits until all threads of a group have arrived.
inline void meet(uint32_t group) {
  uint32_t const round = fibers.round[group];
  if (++fibers.waiting[group] == fibers.size[group]) {
    fibers.waiting[group] = 0;
    ++fibers.round[group];
    return;
  }
  uint32_t const t = fibers.running;
  fibers.group[t] = group + 1;
  fibers.since[t] = round;
  while (fibers.round[group] == round) {
    next_fiber();
  }
  fibers.group[t] = 0;
}
inline void fiber_main() {
  fibers.body(fibers.running / THREADS_OF_WORKER, fibers.running % THREADS_OF_WORKER);
  fibers.done[fibers.running] = true;
  next_fiber();
}
inline void run_workers(void (*body)(uint32_t, uint32_t)) {
  fibers.body = body;
  for (uint32_t g = 0; g < GROUPS; ++g) {
    fibers.waiting[g] = 0;
    fibers.size[g] = g < WARPS ? 32 : THREADS_OF_WORKER;
  }
  for (uint32_t t = 0; t < ALL_THREADS; ++t) {
    fibers.begun[t] = fibers.done[t] = false;
    fibers.group[t] = 0;
    getcontext(&fibers.first[t]);
    fibers.first[t].uc_stack.ss_sp = fibers.stacks.get() + (size_t)t * STACK;
    fibers.first[t].uc_stack.ss_size = STACK;
    fibers.first[t].uc_link = nullptr; // a fiber that is done leaves for good
    makecontext(&fibers.first[t], fiber_main, 0);
  }
  for (uint32_t left = ALL_THREADS, idle = 0; left > 0;) {
    for (uint32_t t = 0; t < ALL_THREADS; ++t) {
      uint32_t const group = fibers.group[t];
      if (fibers.done[t] || (group != 0 && fibers.round[group - 1] == fibers.since[t])) {
        continue;
      }
      enter_fiber(t);
      if (fibers.done[t]) {
        --left;
        idle = 0;
      }
    }
    if (++idle > 20000000 / ALL_THREADS) {
      std::fprintf(stderr, "the threads do not meet\n");
      std::exit(3);
    }
  }
}
inline void consumers_sync() { meet(WARPS + fibers.running / THREADS_OF_WORKER); }
inline void poll_pause() { next_fiber(); }

template <typename T> T from_lane(T v, uint32_t lane) {
  uint32_t const t = fibers.running, warp = t / 32;
  fibers.word[t] = 0;
  std::memcpy(&fibers.word[t], &v, sizeof v);
  meet(warp);
  T r;
  std::memcpy(&r, &fibers.word[warp * 32 + lane % 32], sizeof r);
  meet(warp);
  return r;
}
template <typename T> T __shfl_xor_sync(uint32_t, T v, int o) { return from_lane(v, fibers.running % 32 ^ (uint32_t)o); }
template <typename T> T __shfl_up_sync(uint32_t, T v, uint32_t o) {
  uint32_t const lane = fibers.running % 32;
  return from_lane(v, lane >= o ? lane - o : lane);
}
template <typename T> T __shfl_down_sync(uint32_t, T v, uint32_t o) {
  uint32_t const lane = fibers.running % 32;
  return from_lane(v, lane + o < 32 ? lane + o : lane);
}
template <typename T> T __shfl_sync(uint32_t, T v, int lane) { return from_lane(v, (uint32_t)lane); }
// Folds the words of a warp's lanes.
template <typename F> uint32_t reduce(uint32_t v, F const& fold) {
  uint32_t const t = fibers.running, warp = t / 32;
  fibers.word[t] = v;
  meet(warp);
  uint32_t all = 0;
  for (uint32_t i = 0; i < 32; ++i) {
    all = fold(all, (uint32_t)fibers.word[warp * 32 + i]);
  }
  meet(warp);
  return all;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t v) {
  return reduce(v, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t v) {
  return reduce(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
// Ballot: each lane adds its own bit.
inline uint32_t __ballot_sync(uint32_t mask, bool v) { return __reduce_add_sync(mask, (uint32_t)v << fibers.running % 32); }
inline bool __any_sync(uint32_t mask, bool v) { return __ballot_sync(mask, v) != 0; }

inline uint32_t load_relaxed(uint32_t const* p) { return *p; }
inline void store_relaxed(uint32_t* p, uint32_t v) { *p = v; }
inline void word_publish(uint32_t* p, uint32_t v) { *p = v; }
inline void acquire_release_fence() {}
inline void counter_signal(uint32_t* p) { ++*p; }
inline void add_relaxed(uint32_t* p, uint32_t v) { *p += v; }
inline void add_relaxed64(uint64_t* p, uint64_t v) { *p += v; }
inline uint32_t claim(uint32_t* p) { return (*p)++; }
inline uint4 load_u32x4(void const* p) {
  uint4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_u32x4(void* p, uint4 v) { std::memcpy(p, &v, sizeof v); }
inline uint32_t block_add(uint32_t* word, uint32_t v) {
  uint32_t const old = *word;
  *word += v;
  return old;
}
inline void block_or(uint32_t* word, uint32_t v) { *word |= v; }
