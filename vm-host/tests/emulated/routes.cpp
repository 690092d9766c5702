// Routes as host C++, with the device's own code (rank.cuh, route.cuh, routed_stream.cuh): a worker makes a route of logits; the loader waits for the
// warp that ranks experts by logits that arrive a few at a time. The input file has a case per line. Compiled by vm-host/src/route_tests.rs.
#define WORKERS 1
#include "simt.hpp"

constexpr uint32_t CONSUMERS = THREADS_OF_WORKER, TAG_MASK = 15, SPINS_PER_LOOK = 1;
constexpr bool MIXED = false;
struct float4 {
  float x, y, z, w;
};
struct Shared {
  uint32_t epoch, halt, rank_asked;
  uint16_t slot_expert[16];
  struct {
    uint64_t loads;
  } program;
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
inline bool word_here(Words const&, uint32_t) { return true; }
inline float word_value(Words const&, uint32_t word) { return __uint_as_float(word); }
inline bool vec4_here(Words const&, uint4 const&) { return true; }
inline float4 vec4_value(Words const&, uint4 v) { return float4{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}; }
inline bool is_dead(Shared*) { return false; }
inline void block_fence() {}
inline void __syncwarp() { meet(fibers.running / 32); }
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

// A look that finds a logit missing reads `halt`: then the next ones arrive, `every` at a time and the last one alone.
static Shared shared;
static std::vector<uint32_t> arriving; // places of logits, in the order in which they arrive
static std::vector<float> values;
static uint32_t logits[1024 + 64], looks, every, arrived, halt_at;
inline uint32_t flag_load(uint32_t const* word) {
  if (word == &shared.rank_asked) {
    next_fiber();
  }
  if (word == &shared.halt && fibers.running == 0) { // one lane's look is that of all
    if (arrived >= arriving.size()) {
      std::printf("waits for ever\n");
      std::exit(0);
    }
    shared.halt = ++looks == halt_at;
    uint32_t const last = (uint32_t)arriving.size() - 1, end = arrived == last ? last + 1 : arrived + every < last ? arrived + every : last;
    for (; arrived < end; ++arrived) {
      logits[arriving[arrived]] = (__float_as_uint(values[arriving[arrived]]) & ~TAG_MASK) | (shared.epoch * 4 & TAG_MASK);
    }
  }
  return *word;
}
inline void flag_store(uint32_t* word, uint32_t v) { *word = v; }

#include "device.hpp"

static StagedTask st;
alignas(16) static char scratch[1 << 14];
static void rank_experts(uint32_t, uint32_t thread) {
  Worker w = {&shared, scratch, thread};
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

// Threads of the first warp rank for the loader, which is the thread after them and has two loads.
static amk_routed routed[3]; // the first is of no load
static uint32_t first_looks;
static bool first_on, second_on, loaded;
static void rank_for_loader(uint32_t, uint32_t thread) {
  if (thread < 32) {
    while (!__shfl_sync(~0u, loaded, 0)) {
      experts_serve(&shared, thread, [] {});
    }
  } else if (thread == 32) {
    SlotWalk walk;
    first_on = slots_wait(&shared, walk, routed + 1, 512), first_looks = looks;
    if (first_on) {
      arriving.clear(), arrived = 0;
      for (uint32_t& word : logits) {
        word ^= TAG_MASK;
      }
      second_on = slots_wait(&shared, walk, routed + 2, 512); // does not look
    }
    loaded = true;
  }
}

// Logits, the look at which the loader is halted or 0, how many arrive at a time, and their places in the order of their arrival.
static void wait_case(std::FILE* in) {
  uint32_t slots = 0, experts = 0;
  (void)!std::fscanf(in, "%u %u %u %u", &slots, &experts, &halt_at, &every);
  arriving.resize(experts), values.resize(experts), looks = arrived = 0, shared.halt = 0, loaded = false;
  shared.epoch += 1;
  for (uint32_t& word : logits) { // of the step before; so are those behind the experts', for ever
    word = (__float_as_uint(1e9f) & ~TAG_MASK) | ((shared.epoch - 1) * 4 & TAG_MASK);
  }
  for (float& value : values) {
    uint32_t bits = 0;
    (void)!std::fscanf(in, "%u", &bits);
    value = __uint_as_float(bits);
  }
  for (uint32_t& place : arriving) {
    (void)!std::fscanf(in, "%u", &place);
  }
  shared.program.loads = (uint64_t)routed;
  routed[1] = {(uint64_t)logits, 0, 1, 1, 0, slots, experts, 0, {}};
  routed[2] = {(uint64_t)logits, 0, 1, 1, 0, slots, experts, 1, {}};
  run_workers(rank_for_loader);
  if (!first_on) {
    std::printf("halted");
    return;
  }
  std::printf("%u %u %u", second_on, first_looks, looks - first_looks);
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
