// Commands of batches as host C++: the poller (poller.cuh) and the end of a step (sample_batch.cuh) run as on the device, and a model stands for
// the steps between. The input file has cases: the numbers of a command, then per sequence its session, its position, and the tokens in its
// buffer from there on. Prints the completion and the windows, then per sequence the tokens that its steps had, and the tokens in its buffer afterwards.
// Of several devices each has a worker that samples (devices.cuh, exchange.cuh). Their accesses are delayed at random, and each command runs
// twice, so that a device may be late for the second one. Compiled by vm-host/src/emulated_tests.rs.
#define WORKERS (1 + AMK_DEVICES)
#include <random>
#include "simt.hpp"
#include "amk_abi.h"

// What the two files need of the others.
constexpr uint32_t SEQS = AMK_SEQS, CONSUMERS = AMK_WARPS * 32;
struct float2 {
  float x, y;
};
struct Best {
  float value;
  uint32_t row;
};
struct ResolvedBuffer {
  uint64_t address;
  uint32_t kind;
};
struct Shared {
  amk_launch const* launch;
  amk_program program;
  amk_step step;
  amk_seqs seqs;
  float best_value[AMK_WARPS];
  uint32_t best_row[AMK_WARPS], dead, started_position[2 * SEQS], started_session[2 * SEQS], started_seqs[2];
  uint32_t device, index;
  uint64_t peers[AMK_DEVICES];
};
constexpr uint32_t SPINS_PER_NOTE = 256;
struct StagedTask {
  amk_task task;
  ResolvedBuffer buffer[AMK_READS_STAGED];
};
struct Worker {
  Shared* shared;
  uint32_t thread, seq, leaving;
};
inline uint32_t host_load(uint32_t const* p) { return *p; }
inline void host_store(uint32_t* p, uint32_t v) { *p = v; }
inline void host_fence() {}
inline uint32_t ring_acquire(uint32_t const* p) {
  next_fiber();
  return *p;
}
inline void ring_release(uint32_t* p, uint32_t v) { *p = v; }
inline void devices_fence() {}
inline void flag_store(uint32_t* p, uint32_t v) { *p = v; }
inline uint32_t flag_load(uint32_t const* p) { return *p; }
inline void weights_arrive();
inline void __nanosleep(uint32_t) {
  weights_arrive();
  next_fiber();
}
inline void __syncwarp() { meet(fibers.running / 32); }
inline uint32_t __reduce_or_sync(uint32_t, uint32_t v) {
  for (int o = 16; o > 0; o >>= 1) {
    v |= __shfl_xor_sync(~0u, v, o);
  }
  return v;
}
inline bool __all_sync(uint32_t mask, bool v) { return !__any_sync(mask, !v); }
inline uint64_t now_ns() { return 0; }
inline void note_wait(Shared*, uint32_t, uint32_t, uint32_t, uint32_t) {}
struct {
  uint32_t x;
} const blockIdx = {0};
struct uint2 {
  uint32_t x, y;
};
// Delays: a thread of a device waits for a random number of turns of the others, rarely for many.
static std::mt19937 draw;
inline void delay() {
  uint32_t const drawn = AMK_DEVICES > 1 ? draw() % 64 : 9;
  for (uint32_t turns = drawn == 0 ? 300 : drawn < 8 ? drawn : 0; turns > 0; --turns) {
    next_fiber();
  }
}
inline void pair_store(uint32_t* pair, uint32_t word, uint32_t tag) {
  delay();
  pair[0] = word, pair[1] = tag;
}
inline uint2 pair_load(uint32_t const* pair) {
  delay();
  return uint2{pair[0], pair[1]};
}
inline void trap(Shared*, uint32_t code, uint32_t, uint32_t, uint32_t, uint64_t) { std::exit((int)(100 + code)); }
inline void watchdog_check(Shared*) {}
inline void weight_stream_report(Shared*, uint32_t) {}
inline uint32_t paged_key(uint32_t session, uint32_t stride, uint32_t key) { return session * stride + key; }
inline uint32_t page_ask(uint64_t, uint32_t) { return 1; }
inline uint32_t* session_tokens(amk_launch const& l, uint32_t session) { return (uint32_t*)l.tokens + (size_t)session * 2 * l.token_stride; }
inline float2 load_f32x2(float const* p) { return float2{p[0], p[1]}; }
inline Best better(Best a, Best b) { return b.value > a.value ? b : a; }
inline Best warp_best(Best b) {
  for (int o = 16; o > 0; o >>= 1) {
    b = better(b, Best{__shfl_xor_sync(~0u, b.value, o), __shfl_xor_sync(~0u, b.row, o)});
  }
  return b;
}
inline bool is_dead(Shared*) { return false; }
inline bool left(Worker const&) { return false; }
inline void task_barrier(Worker&) { consumers_sync(); }
inline uint32_t sampled_token(Worker const& w, Best highest);

#include "device.hpp"

constexpr uint32_t STRIDE = 128, SESSIONS = 16;
static uint32_t tokens[SESSIONS * 2 * STRIDE];
static amk_submission submissions[AMK_RING_ENTRIES];
static amk_completion completions[AMK_RING_ENTRIES];
static amk_ring_indices indices;
static amk_program program;
constexpr uint32_t EMBEDDING = 4; // units of weights
constexpr uint32_t CANDIDATES = 3;
// The memory of a device.
struct Memory {
  struct {
    amk_step step;
    amk_seqs seqs;
  } state;
  amk_done done;
  amk_exchange exchange[SEQS];
  float candidates[SEQS][CANDIDATES][2];
  uint32_t logits[SEQS]; // the step that they are of, counted from the launch
  amk_weight_stream weights;
};
static Memory memory[AMK_DEVICES];
static amk_launch launch[AMK_DEVICES];
static Shared shared[WORKERS];
static uint32_t steps_of[AMK_DEVICES];                   // begun since the launch
static std::vector<uint32_t> ran[AMK_DEVICES][SEQS];     // the tokens of the steps of this command
static std::vector<uint32_t> ran_ever[AMK_DEVICES][SEQS]; // and of all
static uint32_t wrong;

// Weights come to several devices unit by unit while the first waits, to one of them a unit at a time.
inline void weights_arrive() {
  uint32_t& at = memory[AMK_DEVICES > 1 ? draw() % AMK_DEVICES : 0].weights.watermark;
  at = at < 2 * EMBEDDING ? at + 1 : AMK_WATERMARK_ALL;
}

// The next token of a sequence depends on all that it has been fed in this command, and on where.
static uint32_t chosen(uint32_t device, uint32_t seq, uint32_t position) {
  uint32_t sum = position;
  for (uint32_t token : ran[device][seq]) {
    sum = sum * 5 + token;
  }
  return sum % program.vocab;
}

// Sampling takes the token after the highest, reads the logits of all devices, and takes some actions.
inline uint32_t sampled_token(Worker const& w, Best highest) {
  consumers_sync();
  if (w.thread == 0) {
    wrong += w.shared->device != 0;
    for (Memory const& of : memory) {
      next_fiber();
      wrong += of.logits[w.seq] != steps_of[0];
    }
    w.shared->step.go += w.seq % 3; // as sampler_wake
    word_publish(&memory[0].state.step.go, w.shared->step.go);
  }
  consumers_sync();
  return (highest.row + 1) % program.vocab;
}

// The first warp: notes what a step is fed, and returns in thread `seq` the token that it gives.
static uint32_t step_of(Worker const& w) {
  uint32_t const device = w.shared->device;
  uint32_t token = 0;
  if (w.thread < seqs_running(w)) {
    Worker const of = in_seq(w, w.thread);
    if (w.shared->step.index == 0) {
      ran[device][w.thread].clear();
    }
    ran[device][w.thread].push_back(seq_token(of));
    ran_ever[device][w.thread].push_back(seq_token(of));
    token = chosen(device, w.thread, seq_position(of));
  }
  return token;
}

// The end of a step of several devices, by all threads: the token is a candidate of one device, and the others have lower ones.
static void end_step(Worker& w, uint32_t token) {
  uint32_t const device = w.shared->device;
  if (w.thread == 0) {
    ++steps_of[device];
  }
  consumers_sync();
  if (w.thread < seqs_running(w)) {
    for (uint32_t i = 0; i < CANDIDATES; ++i) {
      bool const best = (steps_of[device] + w.thread) % AMK_DEVICES == device && i == w.thread % CANDIDATES;
      memory[device].candidates[w.thread][i][0] = best ? 2.f : 1.f / (1 + i);
      memory[device].candidates[w.thread][i][1] = __uint_as_float(best ? token : (token + 1 + i) % program.vocab);
    }
    memory[device].logits[w.thread] = steps_of[device];
  }
  StagedTask st = {};
  st.buffer[0] = ResolvedBuffer{(uint64_t)memory[device].candidates, AMK_BUFFER_PLAIN};
  ((amk_sample_params*)st.task.params)->candidates = CANDIDATES;
  consumers_sync();
  op_sample_batch(w, st);
  consumers_sync();
}

static void run(uint32_t worker, uint32_t thread) {
  Worker w = {&shared[worker], thread, 0, 0};
  if (worker == 0) {
    if (thread == 0) {
      poller_run(w);
    }
    return;
  }
  uint32_t const device = worker - 1;
  if (AMK_DEVICES == 1 && thread >= 32) {
    return;
  }
#if AMK_DEVICES > 1
  if (device > 0 && thread == 0) {
    device_report(w.shared);
  }
#endif
  for (uint32_t go = 1;; ++go) {
    while ((AMK_DEVICES == 1 || thread == 0) && (int32_t)(load_relaxed(&memory[device].state.step.go) - go) < 0) {
      next_fiber();
    }
    __syncwarp();
    if (AMK_DEVICES > 1) {
      consumers_sync();
    }
    if (memory[device].state.step.action == AMK_ACTION_LEAVE) {
      return;
    }
    if (thread == 0) {
      wrong += memory[device].weights.watermark < EMBEDDING; // it reads its embedding
      w.shared->step = memory[device].state.step;
      w.shared->seqs = memory[device].state.seqs;
    }
    __syncwarp();
    if (AMK_DEVICES > 1) {
      consumers_sync();
    }
    uint32_t const token = thread < 32 ? step_of(w) : 0;
    if (AMK_DEVICES == 1) {
      finish_seqs(w, token, false);
    } else {
      end_step(w, token);
    }
    go = w.shared->step.go;
  }
}

// Reads a case; false at the end of the file.
static bool read_case(std::FILE* in, uint32_t* session, uint32_t* position) {
  amk_submission& s = submissions[0];
  uint32_t sample = 0; // a bit for each sequence
  if (std::fscanf(in, "%u %u %u %u %u", &program.vocab, &s.seqs, &s.steps, &s.stop[0], &sample) != 5) {
    return false;
  }
  s.seq_sample = sample;
  s.flags = s.seqs == 1 && sample != 0 ? AMK_FLAG_SAMPLE : 0;
  for (uint32_t i = 0; i < s.seqs; ++i) {
    uint32_t count = 0;
    if (std::fscanf(in, "%u %u %u", &session[i], &position[i], &count) != 3) {
      std::exit(2);
    }
    uint32_t* const words = session_tokens(launch[0], session[i]) + position[i];
    for (uint32_t j = 0; j < count; ++j) {
      if (std::fscanf(in, "%u", words + j) != 1) {
        std::exit(2);
      }
    }
    if (s.seqs == 1) {
      s.session = session[i];
      s.position = position[i];
      s.forced = position[i] + count;
      return true;
    }
    s.seq_session[i / 4] |= session[i] << i % 4 * 8;
    s.seq_position[i] = position[i];
    s.seq_forced[i / 4] |= (count - 1) << i % 4 * 8;
  }
  return true;
}

// As a kernel that has just been launched.
static void begin() {
  std::memset(tokens, 0, sizeof tokens);
  std::memset(submissions, 0, sizeof submissions);
  std::memset(completions, 0, sizeof completions);
  std::memset(memory, 0, sizeof memory);
  program = {};
  submissions[0].command = AMK_COMMAND_DECODE;
  submissions[0].stop_len = 1;
  submissions[0].sequence = 1;
  submissions[1].command = AMK_COMMAND_STOP;
  submissions[1].sequence = 2;
  program.seq_bytes = sizeof memory[0].candidates[0];
  program.kv_capacity = STRIDE - 1;
  program.logits_rows = 1;
  for (uint32_t d = 0; d < AMK_DEVICES; ++d) {
    amk_launch& l = launch[d];
    l.submissions = (uint64_t)submissions;
    l.completions = (uint64_t)completions;
    l.indices = (uint64_t)&indices;
    l.tokens = (uint64_t)tokens;
    l.token_stride = STRIDE;
    l.step = (uint64_t)&memory[d].state;
    l.done = (uint64_t)&memory[d].done;
    l.exchange = (uint64_t)memory[d].exchange;
    memory[d].weights.watermark = AMK_DEVICES > 1 ? 0 : AMK_WATERMARK_ALL;
    memory[d].weights.embedding = EMBEDDING;
    l.weight_stream = (uint64_t)&memory[d].weights;
    l.program = (uint64_t)&program;
    l.deadline_ns = 1;
    l.sessions = SESSIONS;
    l.page_count = 2;
    steps_of[d] = 0;
    for (uint32_t seq = 0; seq < SEQS; ++seq) {
      ran[d][seq].clear();
      ran_ever[d][seq].clear();
    }
  }
}

int main(int, char** names) {
  std::FILE* in = std::fopen(names[1], "r");
  if (in == nullptr) {
    return 2;
  }
  uint32_t session[SEQS], position[SEQS];
  for (begin(); read_case(in, session, position); begin()) {
    for (uint32_t worker = 0; worker < WORKERS; ++worker) {
      Shared& of = shared[worker];
      of.device = worker == 0 ? 0 : worker - 1;
      of.index = worker == 0 ? 1 : 0;
      of.launch = &launch[of.device];
      of.program = program;
      for (uint32_t i = 0; i + 1 < AMK_DEVICES; ++i) {
        of.peers[i] = (uint64_t)&memory[i < of.device ? i : i + 1] - (uint64_t)&memory[of.device];
      }
    }
    if (AMK_DEVICES > 1) {
      submissions[1] = submissions[0];
      submissions[1].sequence = 2;
      submissions[2].command = AMK_COMMAND_STOP;
      submissions[2].sequence = 3;
    }
    run_workers(run);
    for (uint32_t d = 1; d < AMK_DEVICES; ++d) {
      for (uint32_t seq = 0; seq < SEQS; ++seq) {
        wrong += ran_ever[d][seq] != ran_ever[0][seq];
      }
    }
    if (wrong != 0) {
      std::printf("the devices differ\n");
      return 0;
    }
    amk_completion const& c = completions[AMK_DEVICES > 1];
    amk_submission const& s = submissions[0];
    std::printf("%u %u %u %u %x\n", c.trap, c.steps, c.ending, c.seq_endings, memory[AMK_DEVICES - 1].state.seqs.windows);
    for (uint32_t i = 0; i < s.seqs; ++i) {
      for (uint32_t token : ran[0][i]) {
        std::printf("%u ", token);
      }
      std::printf("|");
      for (uint32_t j = 0; j <= s.steps; ++j) {
        std::printf(" %u", session_tokens(launch[0], session[i])[position[i] + j]);
      }
      std::printf("\n");
    }
  }
  return 0;
}
