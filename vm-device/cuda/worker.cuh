// What the roles of a worker share: its shared memory, its barriers, how it gives up.
#pragma once

constexpr uint32_t CONSUMERS = AMK_WARPS * 32;
constexpr uint32_t TILES_BUF = 16;                       // tiles whose sums are kept before an epilogue
constexpr uint32_t ROWS_BUF = TILES_BUF * AMK_UNIT_ROWS; // 128
constexpr uint32_t FIXED_BYTES = 12 * 1024;              // ir::program::smem::FIXED_BYTES
constexpr uint32_t SPINS_PER_CHECK = 256;

// A slot as a task uses it: resolved when the task is fetched.
struct alignas(16) ResolvedSlot {
  uint64_t address;
  uint32_t kind;
  uint32_t units;
};

// A task with its slots, as staged in shared memory.
struct alignas(16) StagedTask {
  amk_task task;
  ResolvedSlot slot[AMK_READS_MAX + AMK_WRITES_MAX];
};

// The fixed part of a worker's shared memory.
struct Shared {
  uint64_t full[AMK_STAGES_MAX];
  uint64_t empty[AMK_STAGES_MAX];
  StagedTask staged[2];
  amk_program program;
  amk_queue queue;
  amk_step step;
  float part[AMK_WARPS][ROWS_BUF];
  float sums[AMK_WARPS];
  float best_value[AMK_WARPS];
  uint32_t best_row[AMK_WARPS];
  uint32_t dead; // nonzero: every wait returns at once and the worker leaves at the next task boundary
  uint32_t halt; // nonzero: the loader stops issuing
  uint32_t near; // nonzero: the loader keeps to the lower cap
  uint32_t leave; // `dead` as one thread saw it before a barrier, so that all decide alike after it
  uint32_t index; // of the worker
  uint32_t epoch; // for reports
  uint32_t task;  // index in the queue, for reports
  amk_launch const* launch;
};
static_assert(sizeof(Shared) <= FIXED_BYTES, "the fixed part holds the shared state");

// Everything that a role needs to hand. Lives in registers: it is never passed by address to a function that is not inlined.
struct Worker {
  amk_launch const* launch;
  Shared* shared;
  char* x;    // activation buffer
  char* ring; // stages
  uint32_t epoch;
};

__device__ __forceinline__ bool is_dead(Shared* sh) { return *(volatile uint32_t*)&sh->dead != 0; }

// Barrier among the consumer warps. Every path of every op passes the same barriers, dead or not.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
// Barrier among consumers and loader, at a program switch and at the end.
__device__ __forceinline__ void worker_sync() { asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS + 32) : "memory"); }

// Asks the whole device to leave, and writes who waited for what. The first reporter wins.
__device__ __noinline__ void trap(Shared* sh, uint32_t code, uint32_t object, uint32_t have, uint32_t need, uint64_t waited) {
  *(volatile uint32_t*)&sh->dead = 1;
  amk_done* done = (amk_done*)sh->launch->done;
  if (claim(&done->reporter) == 0) {
    amk_status* s = (amk_status*)sh->launch->status;
    host_store(&s->trap, code);
    host_store(&s->worker, sh->index);
    host_store(&s->task, sh->task);
    host_store(&s->opcode, sh->staged[sh->task & 1].task.opcode);
    host_store(&s->object, object);
    host_store(&s->have, have);
    host_store(&s->need, need);
    host_store(&s->epoch, sh->epoch);
    host_store((uint32_t*)&s->waited_ns, (uint32_t)waited);
    host_store((uint32_t*)&s->waited_ns + 1, (uint32_t)(waited >> 32));
    ring_release(&s->valid, 1);
  }
  word_publish(&done->abort, 1);
}

constexpr uint64_t GIVE_UP = ~0ull;

// For spin loops: called every so many turns with the time of its first call (zero before that). Returns that time, or GIVE_UP when
// the device is leaving or the deadline has passed; then the trap has been reported.
__device__ __noinline__ uint64_t give_up(Shared* sh, uint64_t since, uint32_t code, uint32_t object, uint32_t have, uint32_t need) {
  if (is_dead(sh)) {
    return GIVE_UP;
  }
  if (load_relaxed(&((amk_done*)sh->launch->done)->abort) != 0) {
    *(volatile uint32_t*)&sh->dead = 1;
    return GIVE_UP;
  }
  uint64_t const now = now_ns();
  if (since != 0 && code != AMK_TRAP_NONE && now - since > sh->launch->deadline_ns) {
    trap(sh, code, object, have, need, now - since);
    return GIVE_UP;
  }
  return since == 0 ? now : since;
}

__device__ __forceinline__ void poll_pause() {
#if AMK_POLL_SLEEP_NS > 0
  __nanosleep(AMK_POLL_SLEEP_NS);
#endif
}

// One thread: until the counter holds epoch * count. Pairs with counter_signal.
__device__ __forceinline__ bool wait_counter(Worker const& w, uint32_t counter, uint32_t count) {
  uint32_t const* word = (uint32_t const*)w.shared->program.counters + (size_t)counter * 8;
  uint32_t const need = w.epoch * count;
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    uint32_t const have = load_relaxed(word);
    if ((int32_t)(have - need) >= 0) {
      acquire_release_fence();
      return true;
    }
    if (spin % SPINS_PER_CHECK == 0 && (since = give_up(w.shared, since, AMK_TRAP_COUNTER_DEADLINE, counter, have, need)) == GIVE_UP) {
      return false;
    }
    poll_pause();
  }
}

// Until a phase of a stage barrier is over.
__device__ __forceinline__ bool wait_stage(Worker const& w, uint64_t* barrier, uint32_t parity, uint32_t stage, uint32_t code) {
  if (barrier_try(barrier, parity)) {
    return true;
  }
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    if (barrier_try(barrier, parity)) {
      return true;
    }
    if (spin % 16 == 0 && (since = give_up(w.shared, since, code, stage, 0, parity)) == GIVE_UP) {
      return false;
    }
  }
}

// One thread: the waits of the staged task. The caller follows with consumers_sync.
__device__ __forceinline__ void wait_counters(Worker const& w, amk_task const& task) {
  for (uint32_t i = 0; i < task.wait_len && i < AMK_WAITS_MAX; ++i) {
    if (!wait_counter(w, task.wait_counter[i], task.wait_count[i])) {
      return;
    }
  }
}
