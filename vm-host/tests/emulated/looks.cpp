// One lane's wait for the groups of a vector (vec4s_wait of buffer.cuh), whose words arrive one by one at random. Prints `right` if it ends with all
// that was wanted, and if each look was at the groups that it should be at: all that are missing, but one of more than 4 in a long vector.
// Compiled by vm-host/src/looks_tests.rs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#define __device__
#define __forceinline__ inline
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4{x, y, z, w}; }

constexpr uint32_t SPINS_PER_LOOK = 16, AMK_TRAP_PAYLOAD_DEADLINE = 0, LAST_TURN = 40, TAG = 5, MASK = 31, GAP = 8; // GAP: words from a group to the next
struct Shared {};
struct Worker {
  Shared* shared;
};
struct Words {
  uint32_t* at;
  uint32_t tag, mask;
};

static std::mt19937 draw;
static uint32_t memory[8 * GAP], arrives[8 * GAP], turn; // the look in which a word is there
static std::vector<uint32_t> looked[LAST_TURN + 9];       // the groups of each look
static bool vec4_here(Words const& s, uint4 const& v) { return (((v.x ^ s.tag) | (v.y ^ s.tag) | (v.z ^ s.tag) | (v.w ^ s.tag)) & s.mask) == 0; }
static uint32_t word(uint32_t i) { return turn >= arrives[i] ? memory[i] : 0; }
static uint4 load_u32x4(uint32_t const* at) {
  uint32_t const i = at - memory;
  looked[turn].push_back(i / GAP);
  return make_uint4(word(i), word(i + 1), word(i + 2), word(i + 3));
}
static void poll_pause() {
  if (++turn > LAST_TURN + 8) {
    std::puts("waits for what is there");
    std::exit(0);
  }
}
static bool is_dead(Shared*) { return false; }
static void note_wait(Shared*, uint32_t, uint32_t, uint32_t, uint32_t) {}

#include "device.hpp"

static bool here(uint32_t group) {
  auto const* first = arrives + group * GAP;
  return turn >= *std::max_element(first, first + 4);
}
template <uint32_t N> void wrong(char const* what) {
  std::printf("%u groups: %s in look %u\n", N, what, turn);
  std::exit(0);
}
template <uint32_t N> void run() {
  uint32_t at[N];
  bool wanted[N], missing[N];
  uint4 got[N];
  uint32_t const late = draw() % LAST_TURN; // of some vectors all is there at once, of others it comes over many looks
  for (uint32_t i = 0; i < N; ++i) {
    at[i] = i * GAP, missing[i] = wanted[i] = draw() % 8 != 0;
    for (uint32_t j = 0; j < 4; ++j) {
      memory[at[i] + j] = (uint32_t)draw() & ~MASK | TAG, arrives[at[i] + j] = late == 0 ? 0 : draw() % late;
    }
  }
  for (auto& look : looked) {
    look.clear();
  }
  turn = 0;
  Shared shared;
  vec4s_wait(Worker{&shared}, Words{memory, TAG, MASK}, at, wanted, got);
  uint32_t const looks = turn;
  for (uint32_t i = 0; i < N; ++i) {
    uint4 const expected = wanted[i] ? make_uint4(memory[at[i]], memory[at[i] + 1], memory[at[i] + 2], memory[at[i] + 3]) : make_uint4(0, 0, 0, 0);
    if (got[i].x != expected.x || got[i].y != expected.y || got[i].z != expected.z || got[i].w != expected.w) {
      wrong<N>("another value");
    }
  }
  bool alone = false;
  for (turn = 0; turn <= looks; ++turn) {
    std::vector<uint32_t> expected;
    for (uint32_t i = 0; i < N && !(alone && expected.size() == 1); ++i) {
      if (missing[i]) {
        expected.push_back(i);
      }
    }
    if (looked[turn] != expected) {
      wrong<N>(alone ? "more than one group" : "not all that is missing");
    }
    for (uint32_t const i : expected) {
      missing[i] = !here(i);
    }
    bool const came = !expected.empty() && !missing[expected[0]];
    alone = LONG_VECTOR && N > 4 && std::count(missing, missing + N, true) > 4 && !(alone && came);
  }
}

int main() {
  for (uint32_t i = 0; i < 2000; ++i) {
    run<1>(), run<4>(), run<5>(), run<7>(), run<8>();
  }
  std::puts("right");
  return 0;
}
