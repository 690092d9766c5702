// Reads cases from the given file, and prints the token that cooperative_sampler.cuh picks in each. Compiled by tests/sampling.rs.
#ifdef __CUDACC__
#include "card.hpp"
#else
#include "simt.hpp"
inline uint32_t host_load(uint32_t const* p) { return *p; }
#endif
#include "amk_abi.h"

// The parts of other device files that the two files need.
struct Best {
  float value;
  uint32_t row;
};
__device__ static Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.row < a.row) ? b : a; }
__device__ static Best warp_best(Best b) {
  for (int o = 16; o > 0; o >>= 1) {
    b = better(b, Best{__shfl_xor_sync(~0u, b.value, o), __shfl_xor_sync(~0u, b.row, o)});
  }
  return b;
}
struct Shared {
  struct {
    uint32_t x_bytes;
  } program;
  alignas(16) float part[2][8][128];
  float best_value[AMK_WARPS];
  uint32_t best_row[AMK_WARPS];
};
struct Worker {
  Shared* shared;
  char* x;
  uint32_t thread;
};

__device__ static bool is_dead(Shared*) { return false; }

#include "sampling.cuh"
#include "cooperative_sampler.cuh"

__device__ void sampler_wake(Worker const&) {} // the others are waiting in sampler_help

struct alignas(16) Case {
  amk_sampling settings; // addresses are zero
  float candidate;
  uint32_t candidate_row, vocab, position, x_bytes, biases, seen, repeats;
  uint32_t masked, unused[3]; // nonzero: a mask follows the biases, and `biased` is that
};

static std::vector<float> row;
static Case now;

#ifdef __CUDACC__
// The same on a card: one worker sends requests, the others help; also measures the time.
__global__ void __launch_bounds__(AMK_WARPS * 32) choose(Case const* now, float const* row, CooperativeSampler* choice, uint32_t* chosen, uint32_t repeats, uint64_t* ns) {
  extern __shared__ __align__(128) char memory[];
  Shared& shared = *(Shared*)memory;
  Worker const w = {&shared, memory + sizeof(Shared) / 128 * 128 + 128, threadIdx.x};
  SamplerScratch& d = *(SamplerScratch*)&shared.part;
  bool const asked = now->settings.penalty != 1.f || now->settings.bias_len != 0 || now->candidate > GREATEST_F32 ||
                     (now->settings.greedy == 0 && now->candidate >= -GREATEST_F32); // else no helper is woken
  uint32_t const asker = now->vocab % gridDim.x; // any worker
  uint32_t token = 0;
  for (uint32_t i = 0; i < repeats; ++i) {
    if (blockIdx.x != asker) {
      if (asked) {
        sampler_help(w, choice, &now->settings, now->vocab, blockIdx.x, gridDim.x, i * 16);
      }
      consumers_sync();
      continue;
    }
    uint64_t start;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    if (threadIdx.x == 0) {
      shared.program.x_bytes = now->x_bytes;
    }
    settings_load(w, d, &now->settings);
    SampleRequester a = {choice, asker, gridDim.x - 1, i * 16, load_relaxed(&choice->done), false};
    token = sample_row(w, d, a, row, Best{now->candidate, now->candidate_row}, now->vocab, now->position);
    consumers_sync();
    uint64_t end;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
    if (threadIdx.x == 0) {
      ns[i] = end - start;
    }
    chosen[threadIdx.x] = token;
  }
}

template <typename T> static T* on_device(std::vector<T> const& v) {
  void* p = 0;
  if (cudaMalloc(&p, (v.size() + 4) * sizeof(T) + 1024) != cudaSuccess) {
    std::exit(4);
  }
  cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
  return (T*)p;
}

static uint32_t run(std::vector<uint32_t>& seen, std::vector<uint32_t>& biased, std::vector<amk_bias> const& bias, std::vector<uint4>& far, std::vector<float>& changed) {
  uint32_t const repeats = now.repeats != 0 ? now.repeats : 1;
  std::vector<uint32_t> chosen(AMK_WARPS * 32);
  std::vector<uint64_t> ns(repeats);
  uint32_t* tokens = on_device(chosen);
  uint64_t* times = on_device(ns);
  now.settings.seen = (uint64_t)on_device(seen);
  now.settings.biased = (uint64_t)on_device(biased);
  now.settings.bias = (uint64_t)on_device(bias);
  now.settings.list = (uint64_t)on_device(far);
  now.settings.changed = (uint64_t)on_device(changed);
  Case* const here = on_device(std::vector<Case>{now});
  float* const logits = on_device(row);
  CooperativeSampler* const choice = on_device(std::vector<CooperativeSampler>(1));
  uint32_t const bytes = sizeof(Shared) + 256 + now.x_bytes;
  cudaFuncSetAttribute(choose, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
  choose<<<WORKERS, AMK_WARPS * 32, bytes>>>(here, logits, choice, tokens, repeats, times);
  cudaMemcpy(chosen.data(), tokens, chosen.size() * 4, cudaMemcpyDeviceToHost);
  cudaError_t const error = cudaMemcpy(ns.data(), times, ns.size() * 8, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(5);
  }
  for (void* p : {(void*)tokens, (void*)times, (void*)now.settings.seen, (void*)now.settings.biased, (void*)now.settings.bias, (void*)now.settings.list, (void*)now.settings.changed, (void*)here, (void*)logits, (void*)choice}) {
    cudaFree(p);
  }
  for (uint32_t t : chosen) {
    if (t != chosen[0]) {
      std::printf("threads disagree\n");
    }
  }
  if (repeats > 1) {
    std::sort(ns.begin(), ns.end());
    std::fprintf(stderr, "%u logits, top_k %u, share %llu, penalty %g, %u biases, greedy %u: median %.2f us, least %.2f, most %.2f\n", now.vocab, now.settings.top_k,
                 (unsigned long long)now.settings.share, now.settings.penalty, now.settings.bias_len, now.settings.greedy, ns[repeats / 2] / 1e3, ns[0] / 1e3, ns[repeats - 1] / 1e3);
  }
  return chosen[0];
}
#else
static Shared shared[WORKERS];
static CooperativeSampler choice;
static std::vector<uint4> near_memory[WORKERS];
static uint32_t chosen[THREADS_OF_WORKER], number; // number of the last request before this case

static void choose(uint32_t worker, uint32_t thread) {
  Worker const w = {&shared[worker], (char*)near_memory[worker].data(), thread};
  SamplerScratch& d = *(SamplerScratch*)&shared[worker].part;
  uint32_t const asker = now.vocab % WORKERS;
  if (worker != asker) {
    bool const asked = now.settings.penalty != 1.f || now.settings.bias_len != 0 || now.candidate > GREATEST_F32 ||
                       (now.settings.greedy == 0 && now.candidate >= -GREATEST_F32); // else no helper is woken
    if (asked) {
      sampler_help(w, &choice, &now.settings, now.vocab, worker, WORKERS, number);
    }
    return;
  }
  settings_load(w, d, &now.settings);
  SampleRequester a = {&choice, asker, WORKERS - 1, number, choice.done, false};
  chosen[thread] = sample_row(w, d, a, row.data(), Best{now.candidate, now.candidate_row}, now.vocab, now.position);
}

static uint32_t run(std::vector<uint32_t>& seen, std::vector<uint32_t>& biased, std::vector<amk_bias> const& bias, std::vector<uint4>& far, std::vector<float>& changed) {
  for (uint32_t i = 0; i < WORKERS; ++i) {
    near_memory[i].assign(now.x_bytes / 16 + 1, uint4{});
    shared[i].program.x_bytes = now.x_bytes;
    std::memset(shared[i].part, 0x77, sizeof shared[i].part);
  }
  now.settings.seen = (uint64_t)seen.data();
  now.settings.biased = (uint64_t)biased.data();
  now.settings.bias = (uint64_t)bias.data();
  now.settings.list = (uint64_t)far.data();
  now.settings.changed = (uint64_t)changed.data();
  number = choice.number;
  run_workers(choose);
  for (uint32_t t : chosen) {
    if (t != chosen[0]) {
      std::printf("threads disagree\n");
    }
  }
  return chosen[0];
}
#endif

template <typename T> static std::vector<T> read(FILE* file, size_t count) {
  std::vector<T> v(count);
  if (count > 0 && std::fread(v.data(), sizeof(T), count, file) != count) {
    std::fprintf(stderr, "the file ends early\n");
    std::exit(2);
  }
  return v;
}

int main(int, char** arguments) {
  FILE* file = std::fopen(arguments[1], "rb");
  while (file != 0 && std::fread(&now, sizeof now, 1, file) == 1) {
    row = read<float>(file, now.vocab);
    std::vector<uint32_t> const tokens = read<uint32_t>(file, now.seen);
    std::vector<amk_bias> const bias = read<amk_bias>(file, now.biases);
    std::vector<uint32_t> seen((now.vocab + 31) / 32), biased(seen.size());
    for (uint32_t token : tokens) {
      seen[token / 32] |= 1u << token % 32;
    }
    for (amk_bias const& b : bias) {
      biased[b.token / 32] |= 1u << b.token % 32;
    }
    if (now.masked != 0) {
      biased = read<uint32_t>(file, biased.size());
    }
    std::vector<uint4> far(now.vocab + 16384);
    std::vector<float> changed(now.vocab + 4);
    std::printf("%u\n", run(seen, biased, bias, far, changed));
  }
  return file == 0;
}
