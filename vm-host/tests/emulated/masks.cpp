// Waits for masks by mask_wait and mask_ready of op_sample.cuh: the time and all words are scripted. Prints a line for each case of the given
// file: whether the token may be sampled, and the time at which that was known.
#include <cstdint>
#include <cstdio>

#define __device__
#define __forceinline__ inline
#include "amk_abi.h"

struct Shared {
  amk_launch const* launch;
  amk_step step;
};
struct Worker {
  Shared* shared;
  uint32_t thread;
};
struct SamplerScratch {
  amk_sampling settings;
  uint32_t leaves;
};

constexpr uint32_t COMMAND = 7, POSITION = 41;
static uint64_t now, comes, stops, dies; // a time of 0 is never
static bool fenced;
static amk_step published;
static uint32_t mask[AMK_MASK_HEAD_WORDS + 4];

static bool reached(uint64_t at) { return at != 0 && now >= at; }
inline uint64_t now_ns() { return now; }
inline void poll_pause() { now += 10; }
inline bool is_dead(Shared*) { return reached(dies); }
inline uint32_t host_load(uint32_t const* word) { return reached(comes) ? *word : POSITION - 1; } // until then that of the token before
inline uint32_t load_relaxed(uint32_t const* word) { return word == &published.preempt && reached(stops) ? COMMAND : COMMAND - 1; }
inline void host_fence() { fenced = true; }
inline void consumers_sync() {}
inline uint32_t seq_position(Worker const&) { return POSITION - 1; }

#include "device.hpp"

int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "r");
  unsigned long long at[4];
  while (file != 0 && std::fscanf(file, "%llu %llu %llu %llu", &at[0], &at[1], &at[2], &at[3]) == 4) {
    amk_launch launch = {};
    launch.deadline_ns = at[3];
    launch.step = (uint64_t)&published;
    now = 1000, comes = at[0], stops = at[1], dies = at[2], fenced = false;
    Shared shared = {&launch, {}};
    shared.step.command = COMMAND;
    SamplerScratch scratch = {};
    scratch.settings.greedy = comes == 1 ? 1 : AMK_SAMPLING_MASKED; // 1: no masks, and greedy
    scratch.settings.biased = (uint64_t)(mask + AMK_MASK_HEAD_WORDS);
    mask[0] = POSITION;
    bool const ready = mask_ready(Worker{&shared, 0}, scratch);
    std::printf("%d %llu %d\n", ready, (unsigned long long)now, fenced);
  }
  return file == 0;
}
