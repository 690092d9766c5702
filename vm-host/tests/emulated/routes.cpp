// Routes as host C++, with the device's own code (route.cuh, routed_stream.cuh): the threads of a worker rank experts by their logits; the loader
// waits for the words of a route, which arrive one by one. The input file has a case per line. Compiled by vm-host/src/route_tests.rs.
#define WORKERS 1
#include "simt.hpp"

constexpr uint32_t CONSUMERS = THREADS_OF_WORKER, TAG_MASK = 15;
constexpr bool MIXED = false;
struct float4 {
  float x, y, z, w;
};
struct RouteRead {
  uint32_t route, wrap;
};
struct Shared {
  uint32_t epoch, halt;
  uint16_t slot_expert[16];
};
struct Worker {
  Shared* shared;
  char* x;
  uint32_t thread;
};
struct Words {
  uint32_t* at;
};
struct ResolvedBuffer {
  uint64_t address;
  uint32_t kind, units;
};
struct Record {
  uint32_t params[16], unpack;
};
struct StagedTask {
  Record task;
  ResolvedBuffer buffer[6], fifth;
};
inline ResolvedBuffer const& aside(StagedTask const& st) { return st.fifth; }
inline Words buffer_words(Worker const&, ResolvedBuffer const& b) { return Words{(uint32_t*)b.address}; }
inline float word_wait(Worker const&, Words const& s, uint32_t i) { return __uint_as_float(s.at[i]); }
inline void word_write(Words const& s, uint32_t i, float v) { s.at[i] = __float_as_uint(v); }
inline bool vec4_here(Words const&, uint4 const&) { return true; }
inline float4 vec4_value(Words const&, uint4 v) { return float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}; }
inline bool is_dead(Shared*) { return false; }
inline float __ldg(float const* p) { return *p; }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
using std::fmaf;
inline float warp_sum(float v) {
  for (int o = 16; o > 0; o /= 2) {
    v += __shfl_xor_sync(~0u, v, o);
  }
  return v;
}
inline void trace_staged(Worker const&) {}
inline void trace_multiplied(Worker const&) {}
inline void task_barrier(Worker const&) { consumers_sync(); }
template <typename F> void for_seqs(Worker&, F const& f) { f(); }
constexpr bool has_feature(uint32_t) { return true; }

// A look of the loader that finds a word missing reads `halt`: then the next word arrives.
static Shared shared;
static RouteRead kept;
static std::vector<uint32_t> arriving; // places of words, in the order in which they arrive
static uint32_t route[48], looks;
inline uint32_t flag_load(uint32_t const* word) {
  if (word == &shared.halt) {
    if (looks >= arriving.size()) {
      std::printf("waits for ever\n");
      std::exit(0);
    }
    uint32_t& here = route[arriving[looks++]];
    here = (here & ~TAG_MASK) | (shared.epoch * 4 & TAG_MASK);
  }
  return *word;
}

#include "device.hpp"

static StagedTask st;
static std::vector<char> scratch(1 << 14);
static void rank_experts(uint32_t, uint32_t thread) {
  Worker w = {&shared, scratch.data(), thread};
  op_route(w, st);
}

static void route_case(std::FILE* in) {
  amk_route_params p = {};
  (void)!std::fscanf(in, "%u %u %u %u", &p.first, &p.experts, &p.slots, &p.scoring);
  std::vector<uint32_t> logits(p.first + p.experts), out(2 * p.slots);
  for (uint32_t& logit : logits) {
    (void)!std::fscanf(in, "%u", &logit);
  }
  std::memcpy(st.task.params, &p, sizeof p);
  st.buffer[0].address = (uint64_t)logits.data(), st.buffer[AMK_READS_STAGED].address = (uint64_t)out.data();
  run_workers(rank_experts);
  for (uint32_t i = 0; i < out.size(); ++i) {
    std::printf("%u ", i < p.slots ? (uint32_t)__uint_as_float(out[i]) : out[i]);
  }
}

// The numbers of the slots, and places of words of numbers and weights in the order of their arrival.
static void wait_case(std::FILE* in) {
  uint32_t slots = 0, experts = 0;
  (void)!std::fscanf(in, "%u %u", &slots, &experts);
  arriving.resize(2 * slots), looks = 0;
  shared.epoch += 1;
  for (uint32_t i = 0; i < 48; ++i) { // of the step before, and behind the route anything
    route[i] = (__float_as_uint(1e9f) & ~TAG_MASK) | ((shared.epoch - 1) * 4 & TAG_MASK);
  }
  for (uint32_t i = 0; i < slots; ++i) {
    uint32_t number = 0;
    (void)!std::fscanf(in, "%u", &number);
    route[i] = (__float_as_uint((float)number) & ~TAG_MASK) | (route[i] & TAG_MASK);
  }
  for (uint32_t& place : arriving) {
    (void)!std::fscanf(in, "%u", &place);
  }
  SlotWalk walk;
  amk_routed routed = {(uint64_t)route, 0, 1, 1, 0, slots, experts, {}};
  slots_wait(&shared, walk, &routed, 512, shared.epoch, kept);
  uint32_t const first = looks;
  arriving.clear(), looks = 0;
  for (uint32_t& word : route) {
    word ^= TAG_MASK;
  }
  slots_wait(&shared, walk, &routed, 512, shared.epoch, kept); // the second load of the layer does not look
  std::printf("%u %u", first, looks);
  for (uint32_t i = 0; i < slots; ++i) {
    std::printf(" %u", shared.slot_expert[i]);
  }
}

int main(int, char** names) {
  std::FILE* in = std::fopen(names[1], "r");
  for (char kind = 0; in != nullptr && std::fscanf(in, " %c", &kind) == 1;) {
    kind == 'r' ? route_case(in) : wait_case(in);
    std::printf("\n");
  }
  return 0;
}
