// Runs greedy and sampled steps of several devices by exchange.cuh, one thread of each device, in a random order of their accesses. Prints
// `right` if all devices get the right token and the same count of actions in each step. Memory order is not tested.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
struct uint2 {
  uint32_t x, y;
};
#include "amk_abi.h"

constexpr uint32_t STEPS = 200, SPINS_PER_NOTE = 256, STACK = 128u << 10, TURNS_MAX = 400000, DONE = ~0u;
struct Best {
  float value;
  uint32_t row;
};
static Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.row < a.row) ? b : a; }
struct Shared {
  uint32_t device;
  uint64_t peers[AMK_DEVICES - 1];
  struct {
    uint32_t go;
  } step;
  float best_value[1];
  uint32_t best_row[1];
  bool dead;
};
struct Worker {
  Shared* shared;
  uint32_t thread;
};
static uint32_t seq_of(Worker const&) { return 0; }

// The fibers, one per device.
static ucontext_t home, fiber[AMK_DEVICES];
static uint32_t running, turns;
static std::mt19937 draw;
static void turn() { swapcontext(&fiber[running], &home); }
static void poll_pause() { turn(); }
static void consumers_sync() {}
static void devices_fence() {}
static bool is_dead(Shared* sh) { return sh->dead; }
static void note_wait(Shared*, uint32_t, uint32_t, uint32_t, uint32_t) {}
static uint32_t __float_as_uint(float v) { return (uint32_t)v; } // the values are small numbers
static float __uint_as_float(uint32_t v) { return (float)v; }

static amk_exchange memory[AMK_DEVICES];
static amk_exchange* exchange_of(Shared* sh) { return &memory[sh->device]; }
template <typename T> static T* at_distance(T* p, uint64_t distance) { return (T*)((uint64_t)p + distance); }
static uint64_t distance_to(Shared* sh, uint32_t device) { return sh->peers[device < sh->device ? device : device - 1]; }
static void pair_store(uint32_t* pair, uint32_t word, uint32_t tag) {
  turn();
  pair[0] = word, pair[1] = tag;
}
static uint2 pair_load(uint32_t const* pair) {
  turn();
  return uint2{pair[0], pair[1]};
}

#include "device.hpp"

static Shared shared[AMK_DEVICES];
static uint32_t published[AMK_DEVICES], logits[AMK_DEVICES]; // the last action of each device, and the step that its logits are of
static uint32_t wrong;
static void expect(bool right) { wrong += !right; }

// What happens in a step, for all devices alike.
static uint32_t mixed(uint32_t step, uint32_t salt) { return (step * 2654435761u ^ salt * 40503u) >> 7; }
static bool is_sampled(uint32_t step) { return mixed(step / 5, 1) % 2 == 1; }
static bool begins_command(uint32_t step) { return step == 0 || mixed(step, 2) % 4 == 0; }
static uint32_t wakes(uint32_t step) { return mixed(step, 3) % 3; }
static Best candidate(uint32_t step, uint32_t device) { return Best{(float)(mixed(step, 10 + device) % 4), step * AMK_DEVICES + device}; }

// The first device's sampling: it reads the logits of all devices again and again.
static uint32_t sampled(Shared* sh, uint32_t step, Best best) {
  for (uint32_t look = 0; look < 8; ++look) {
    for (uint32_t const& of : logits) {
      turn();
      expect(of == step + 1 || sh->dead);
    }
  }
  sh->step.go += wakes(step);
  return best.row + 1;
}

// The poller, which publishes an action to all devices.
static void publish(uint32_t go) {
  for (uint32_t& of : published) {
    turn();
    of = go;
  }
}

static void run_device() {
  uint32_t const device = running;
  Shared* sh = &shared[device];
  Worker const w = {sh, 0};
  for (uint32_t step = 0; step < STEPS && !sh->dead; ++step) {
    if (begins_command(step) && device == 0) {
      publish(sh->step.go + 1);
    }
    while ((int32_t)(published[device] - sh->step.go) <= 0 && !sh->dead) {
      turn();
    }
    uint32_t const go = sh->step.go = published[device];
    logits[device] = step + 1;
    Best best = candidate(step, device), right = candidate(step, 0);
    for (uint32_t of = 1; of < AMK_DEVICES; ++of) {
      right = better(right, candidate(step, of));
    }
    bool yields = device == 0 && mixed(step, 4) % 2 == 1;
    bool met = true;
    if (is_sampled(step)) {
      exchange_gather(w, best);
      best.row = device == 0 ? sampled(sh, step, best) : best.row;
      met = exchange_token(w, go, best.row, yields);
    } else {
      met = exchange_best(w, best, yields);
    }
    expect(met || sh->dead);
    if (sh->dead) {
      break;
    }
    expect(best.row == right.row + is_sampled(step));
    expect(yields == (mixed(step, 4) % 2 == 1));
    expect(sh->step.go == go + (is_sampled(step) ? wakes(step) : 0));
    if (!begins_command(step + 1)) { // finish_step
      published[device] = sh->step.go + 1;
    }
  }
  for (;;) {
    sh->best_row[0] = DONE;
    turn();
  }
}

// Runs all devices; with `dies` the last one takes no part after that many turns, and the others have to leave.
static bool run(uint32_t seed, uint32_t dies) {
  draw.seed(seed);
  std::unique_ptr<char[]> stacks{new char[(size_t)AMK_DEVICES * STACK]};
  for (uint32_t d = 0; d < AMK_DEVICES; ++d) {
    memory[d] = amk_exchange{};
    shared[d] = Shared{};
    shared[d].device = d;
    published[d] = logits[d] = 0;
    for (uint32_t i = 0; i < AMK_DEVICES - 1; ++i) {
      shared[d].peers[i] = (uint64_t)&memory[i < d ? i : i + 1] - (uint64_t)&memory[d];
    }
    getcontext(&fiber[d]);
    fiber[d].uc_stack.ss_sp = stacks.get() + (size_t)d * STACK;
    fiber[d].uc_stack.ss_size = STACK;
    makecontext(&fiber[d], run_device, 0);
  }
  for (turns = 0; turns < TURNS_MAX; ++turns) {
    uint32_t left = 0;
    for (Shared const& sh : shared) {
      left += sh.best_row[0] != DONE;
    }
    if (left == 0) {
      return true;
    }
    running = draw() % AMK_DEVICES;
    for (Shared& sh : shared) {
      sh.dead = dies != 0 && turns >= dies + 10000; // the watchdogs
    }
    if (dies != 0 && turns >= dies && running == AMK_DEVICES - 1) {
      shared[running].best_row[0] = DONE;
      continue;
    }
    for (uint32_t burst = 1 + draw() % 12; burst > 0; --burst) {
      swapcontext(&home, &fiber[running]);
    }
  }
  return false;
}

int main() {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    if (!run(seed, seed % 4 == 3 ? 500 + seed * 97 : 0)) {
      std::printf("the devices do not meet\n");
      return 0;
    }
  }
  std::printf(wrong == 0 ? "right\n" : "wrong\n");
}
