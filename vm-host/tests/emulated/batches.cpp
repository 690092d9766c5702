// Commands of batches as host C++: the poller (poller.cuh) and the end of a step (sample_batch.cuh) run as on the device, and a model stands for
// the steps between. The input file has cases: the numbers of a command, then per sequence its session, its position, and the tokens in its
// buffer from there on. Prints the completion and the windows, then per sequence the tokens that its steps had, and the tokens in its buffer afterwards.
// Compiled by vm-host/src/emulated_tests.rs.
#define WORKERS 2
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
};
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
inline void devices_store(Shared*, uint32_t* p, uint32_t v) { *p = v; }
inline void devices_publish(Shared*, uint32_t* p, uint32_t v) { *p = v; }
inline void flag_store(uint32_t* p, uint32_t v) { *p = v; }
inline uint32_t flag_load(uint32_t const* p) { return *p; }
inline void __nanosleep(uint32_t) { next_fiber(); }
inline void __syncwarp() { meet(fibers.running / 32); }
inline uint32_t __reduce_or_sync(uint32_t, uint32_t v) {
  for (int o = 16; o > 0; o >>= 1) {
    v |= __shfl_xor_sync(~0u, v, o);
  }
  return v;
}
inline uint64_t now_ns() { return 0; }
inline void trap(Shared*, uint32_t code, uint32_t, uint32_t, uint32_t, uint64_t) { std::exit((int)(100 + code)); }
inline void watchdog_check(Shared*) {}
inline void weight_stream_report(Shared*, uint32_t) {}
inline uint32_t paged_key(uint32_t session, uint32_t stride, uint32_t key) { return session * stride + key; }
inline uint32_t page_ask(uint64_t, uint32_t) { return 1; }
inline uint32_t* session_tokens(amk_launch const& l, uint32_t session) { return (uint32_t*)l.tokens + (size_t)session * 2 * l.token_stride; }
inline float2 load_f32x2(float const* p) { return float2{p[0], p[1]}; }
inline Best better(Best a, Best b) { return b.value > a.value ? b : a; }
inline Best warp_best(Best b) { return b; }
inline bool is_dead(Shared*) { return false; }
inline bool left(Worker const&) { return false; }
inline void task_barrier(Worker&) { consumers_sync(); }
inline uint32_t sampled_token(Worker const&, Best) { return 0; }

#include "device.hpp"

constexpr uint32_t STRIDE = 128, SESSIONS = 16;
static uint32_t tokens[SESSIONS * 2 * STRIDE];
static amk_submission submissions[AMK_RING_ENTRIES];
static amk_completion completions[AMK_RING_ENTRIES];
static amk_ring_indices indices;
static amk_program program;
static struct {
  amk_step step;
  amk_seqs seqs;
} state;
static amk_done done;
static amk_weight_stream weights;
static amk_launch launch;
static Shared shared[WORKERS];
static std::vector<uint32_t> ran[SEQS];

// The next token of a sequence depends on all that it has been fed in this command, and on where.
static uint32_t chosen(uint32_t seq, uint32_t position) {
  uint32_t sum = position;
  for (uint32_t token : ran[seq]) {
    sum = sum * 5 + token;
  }
  return sum % program.vocab;
}

static void run(uint32_t worker, uint32_t thread) {
  Worker w = {&shared[worker], thread, 0, 0};
  if (worker == 0) {
    if (thread == 0) {
      poller_run(w);
    }
    return;
  }
  if (thread >= 32) {
    return;
  }
  for (uint32_t go = 1;; ++go) {
    while (load_relaxed(&state.step.go) != go) {
      next_fiber();
    }
    if (state.step.action == AMK_ACTION_LEAVE) {
      return;
    }
    if (thread == 0) {
      shared[1].step = state.step;
      shared[1].seqs = state.seqs;
    }
    __syncwarp();
    uint32_t token = 0;
    if (thread < seqs_running(w)) {
      Worker const of = in_seq(w, thread);
      ran[thread].push_back(seq_token(of));
      token = chosen(thread, seq_position(of));
    }
    finish_seqs(w, token, false);
  }
}

// Reads a case; false at the end of the file.
static bool read_case(std::FILE* in, uint32_t* session, uint32_t* position) {
  amk_submission& s = submissions[0];
  if (std::fscanf(in, "%u %u %u %u", &program.vocab, &s.seqs, &s.steps, &s.stop[0]) != 4) {
    return false;
  }
  for (uint32_t i = 0; i < s.seqs; ++i) {
    uint32_t count = 0;
    if (std::fscanf(in, "%u %u %u", &session[i], &position[i], &count) != 3) {
      std::exit(2);
    }
    uint32_t* const words = session_tokens(launch, session[i]) + position[i];
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
  state = {};
  done = {};
  program = {};
  submissions[0].command = AMK_COMMAND_DECODE;
  submissions[0].stop_len = 1;
  submissions[0].sequence = 1;
  submissions[1].command = AMK_COMMAND_STOP;
  submissions[1].sequence = 2;
  program.kv_capacity = STRIDE - 1;
  program.logits_rows = 1;
  weights.watermark = AMK_WATERMARK_ALL;
  launch.submissions = (uint64_t)submissions;
  launch.completions = (uint64_t)completions;
  launch.indices = (uint64_t)&indices;
  launch.tokens = (uint64_t)tokens;
  launch.token_stride = STRIDE;
  launch.step = (uint64_t)&state;
  launch.done = (uint64_t)&done;
  launch.weight_stream = (uint64_t)&weights;
  launch.program = (uint64_t)&program;
  launch.sessions = SESSIONS;
  launch.page_count = 2;
  for (std::vector<uint32_t>& of : ran) {
    of.clear();
  }
}

int main(int, char** names) {
  std::FILE* in = std::fopen(names[1], "r");
  if (in == nullptr) {
    return 2;
  }
  uint32_t session[SEQS], position[SEQS];
  for (begin(); read_case(in, session, position); begin()) {
    for (Shared& of : shared) {
      of.launch = &launch;
      of.program = program;
    }
    run_workers(run);
    amk_completion const& c = completions[0];
    amk_submission const& s = submissions[0];
    std::printf("%u %u %u %u %x\n", c.trap, c.steps, c.ending, c.seq_endings, state.seqs.windows);
    for (uint32_t i = 0; i < s.seqs; ++i) {
      for (uint32_t token : ran[i]) {
        std::printf("%u ", token);
      }
      std::printf("|");
      for (uint32_t j = 0; j <= s.steps; ++j) {
        std::printf(" %u", session_tokens(launch, session[i])[position[i] + j]);
      }
      std::printf("\n");
    }
  }
  return 0;
}
