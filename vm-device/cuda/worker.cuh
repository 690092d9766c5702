// State shared by the roles of a worker: its shared memory, its barriers, its traps.
#pragma once

constexpr uint32_t CONSUMERS = AMK_WARPS * 32;
constexpr uint32_t HELPERS = AMK_HELPER_WARPS * 32; // threads: loader, prefetcher, watchdog, and the heartbeat's writer, which also ranks experts; registers move by whole groups of 4 warps
constexpr uint32_t TILES_BUF = 16;                       // tiles whose sums are kept before an epilogue
constexpr uint32_t ROWS_BUF = TILES_BUF * AMK_UNIT_ROWS; // 128
constexpr uint32_t SEQS = AMK_SEQS;
constexpr uint32_t PART_ROWS = SEQS == 1 ? ROWS_BUF : 112; // with several sequences the sums are elsewhere, and this is scratch
constexpr uint32_t SPINS_PER_NOTE = 256;                 // spins of a wait before it publishes its reason
constexpr uint32_t SPINS_PER_LOOK = 64;                  // the same where each spin is a trip to L2; then it also checks `dead`

// A buffer as a task uses it, resolved when the task is prefetched.
struct alignas(16) ResolvedBuffer {
  uint64_t address;
  uint32_t kind;
  uint32_t units;
};

// A task with its resolved buffers, as staged in shared memory.
struct alignas(16) StagedTask {
  amk_task task;
  ResolvedBuffer buffer[AMK_READS_STAGED + AMK_WRITES_MAX];
};

// The fifth read, staged by kernels whose tasks have one. It takes the place of indices of other buffers, which are resolved too.
constexpr bool ASIDE = (AMK_FEATURES >> AMK_FEATURE_ROUTE & 1) != 0 || (AMK_FEATURES >> AMK_FEATURE_SINKS & 1) != 0;
constexpr uint32_t ASIDE_PIECE = 1, ASIDE_LANE = 8; // 16 bytes of the task, and the prefetcher's lane
static_assert(AMK_OFFSETOF(amk_task, reads) <= 16 && AMK_OFFSETOF(amk_task, tile_parts) >= 32, "only indices of buffers");
__device__ __forceinline__ ResolvedBuffer const& aside(StagedTask const& st) { return ((ResolvedBuffer const*)&st.task)[ASIDE_PIECE]; }

// What the task prefetcher works out about a matvec (fragments.cuh). In the place of the numbers of two other buffers.
struct MatvecPlan {
  uint32_t shares, chunks; // see Tiles
  bool held;               // see Tiles
  bool biased, residual;   // rows have a bias; they are added to flag-in-data words
};
static_assert(AMK_OFFSETOF(amk_task, reads) + 4 <= 16 * ASIDE_PIECE && AMK_OFFSETOF(amk_task, writes) + 4 >= 16 * (ASIDE_PIECE + 1), "a plan is beside the fifth read");
__device__ __forceinline__ void plan_store(StagedTask& st, MatvecPlan const& plan) {
  st.task.reads[0] = plan.chunks << 3 | plan.held << 2 | plan.biased << 1 | plan.residual;
  st.task.writes[1] = plan.shares;
}
__device__ __forceinline__ MatvecPlan plan_of(StagedTask const& st) {
  uint32_t const word = st.task.reads[0];
  return MatvecPlan{st.task.writes[1], word >> 3, (word & 4) != 0, (word & 2) != 0, (word & 1) != 0};
}

#if AMK_TRACE
// Timestamps of the current task, in cycles, and the loader's waits in this step.
struct TraceBuffer {
  uint64_t begin_ns;
  uint32_t begin, ready, staged, multiplied, starved;
  uint32_t at, delays[2]; // index of the record, and cycles to spin before and after the mark of the products
};
#endif

// The fixed part of a worker's shared memory.
struct Shared {
  uint64_t full[AMK_STAGES_MAX];
  uint64_t empty[AMK_STAGES_MAX];
  StagedTask staged[STAGED];
  amk_program program;
  amk_queue queue;
  amk_step step;
#if AMK_SEQS > 1
  amk_seqs seqs; // directly after the step, as in device memory
#endif
  // Sums of rows by warp, double-buffered by barrier: fast warps may be one ahead. Those of a row lie together, unless registers are short.
  alignas(16) float part[2][SPARE_REGISTERS ? PART_ROWS : AMK_WARPS][SPARE_REGISTERS ? AMK_WARPS : PART_ROWS];
  alignas(16) float sums[2][AMK_WARPS];
  float best_value[AMK_WARPS];
  uint32_t best_row[AMK_WARPS];
  uint32_t dead; // nonzero: every wait returns at once and the worker leaves at the next task boundary
  uint32_t halt; // nonzero: the loader stops issuing
  uint32_t sink; // of stage_read
  uint32_t near; // nonzero: the loader keeps to the lower cap
  uint32_t leave[2]; // `dead` as one thread read it before a barrier, so that all decide alike after it
  uint32_t fetched;  // number of the next task to stage (tasks.cuh)
  uint32_t done;     // number of the first task that has not ended
  uint32_t gone;  // nonzero: the consumers are leaving, and so must the watchdog
  uint32_t started;    // steps begun since the program was adopted; the loader may be one behind, so the last two are kept:
  uint32_t started_position[2 * SEQS], started_session[2 * SEQS]; // per sequence
#if AMK_SEQS > 1
  uint32_t started_seqs[2];
#endif
  uint32_t active;   // nonzero while a step is running
  uint32_t progress; // tasks done, ever
  uint32_t wait_code, wait_object, wait_have, wait_need; // the reason of the longest current wait
  uint32_t fault_code, fault_object, fault_have, fault_need; // an error that a consumer found, for the watchdog to report
  uint32_t index; // of the worker, in its device
  uint32_t epoch; // for reports
  uint32_t task;  // index in the queue, for reports
  uint32_t issued; // units that the loader has requested, ever
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  uint32_t rank_asked; // nonzero: the loader waits for experts (rank.cuh); the place of its load's record behind the program's loads
#endif
  uint32_t seen_progress; // the watchdog's: progress at its last change, and the time of that
  uint64_t seen_ns;
  uint32_t watermark; // units that have arrived, as last read by the loader: in shared memory, to save registers
  uint32_t seen_watermark, weight_stream_idle; // the watchdog's: arrived units at its last check, and deadlines since they changed
  uint64_t worker_heartbeat_ns; // when the worker's heartbeat was last written
  alignas(16) PageLines pages; // the loader's
  amk_launch const* launch;
#if AMK_DEVICES > 1
  uint32_t device;                 // of the worker
  uint64_t peers[AMK_DEVICES - 1]; // distances in bytes from this device's memory to that of each other device
#endif
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  uint16_t slot_expert[AMK_SLOTS_MAX]; // of the route whose weights the loader is at
#endif
#if AMK_TRACE
  TraceBuffer trace;
#endif
};
static_assert(sizeof(Shared) <= AMK_FIXED_BYTES, "the fixed part holds the shared state");

// State that a role keeps in registers. It is never passed by address to a function that is not inlined.
struct Worker {
  Shared* shared;
  char* x;    // activation buffer
  char* ring; // stages
  uint32_t epoch;
  uint32_t stages, stage_bytes;
  uint32_t task;   // tasks begun since the program was adopted
  uint32_t parity; // of the next barrier
  uint32_t progress; // barriers announced, ever
  uint32_t leaving;  // `leave` of the last barrier
  uint32_t thread;   // threadIdx.x, which the compiler would otherwise reread at every use
#if AMK_SEQS > 1
  uint32_t seq; // sequence that the op is working on
#endif
};

__device__ __forceinline__ bool is_dead(Shared* sh) { return flag_load(&sh->dead) != 0; }

// Moves registers from the helpers to the consumers (setmaxnreg), in whole groups of 4 warps. A block starts with what the launch gave it, and
// a request for more than the others have given back waits forever.
constexpr uint32_t CONSUMER_REGISTERS = AMK_CONSUMER_REGISTERS, HELPER_REGISTERS = AMK_HELPER_REGISTERS;
constexpr uint32_t LAUNCH_REGISTERS = 65536 / (CONSUMERS + HELPERS) / 8 * 8; // per thread
static_assert(CONSUMERS * CONSUMER_REGISTERS + HELPERS * HELPER_REGISTERS <= (CONSUMERS + HELPERS) * LAUNCH_REGISTERS, "registers are only moved");
__device__ __forceinline__ void consumer_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS)); }
__device__ __forceinline__ void helper_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS)); }

// Barrier among the consumer warps. Every path of every op passes the same barriers, dead or not.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
// Barrier among consumers, loader and prefetcher, at a program switch and at the end. The unaligned form: the roles reach it on different
// paths, and the aligned one requires one instruction for all.
__device__ __forceinline__ void worker_sync() { asm volatile("barrier.sync 2, %0;" ::"n"(CONSUMERS + 64) : "memory"); }

// The barrier of a task, after which the warps' results are combined. Each task passes it once or more; afterwards `left` tells whether all
// are to leave, and the parity of the buffers has changed. It has two parts, to keep one thread's decision off the critical path: announced
// before the products, met after them.
__device__ __forceinline__ void barrier_announce(Worker& w) {
  ++w.progress;
  if (w.thread == 0) {
    w.shared->leave[w.parity] = is_dead(w.shared);
    flag_store(&w.shared->progress, w.progress);
  }
}
__device__ __forceinline__ void barrier_meet(Worker& w) {
  consumers_sync();
  w.leaving = w.shared->leave[w.parity]; // long before it is used
  w.parity ^= 1;
}
__device__ __forceinline__ void task_barrier(Worker& w) {
  barrier_announce(w);
  barrier_meet(w);
}
__device__ __forceinline__ bool left(Worker const& w) { return w.leaving != 0; }

// Address of a session's tokens; the token chosen after each is `token_stride` words further on.
__device__ __forceinline__ uint32_t* session_tokens(amk_launch const& l, uint32_t session) {
  return (uint32_t*)l.tokens + (size_t)session * 2 * l.token_stride;
}

__device__ __forceinline__ uint32_t device_of(Shared* sh);                                  // devices.cuh
__device__ __forceinline__ void devices_publish(Shared* sh, uint32_t* word, uint32_t v); // devices.cuh

// Makes all devices leave and writes the reason to the status block. The first reporter of a device wins.
__device__ __forceinline__ void trap(Shared* sh, uint32_t code, uint32_t object, uint32_t have, uint32_t need, uint64_t waited_ns) {
  flag_store(&sh->dead, 1);
  amk_done* done = (amk_done*)sh->launch->done;
  if (claim(&done->reporter) == 0) {
    amk_status* s = (amk_status*)sh->launch->status;
    host_store(&s->trap, code);
    host_store(&s->worker, device_of(sh) * sh->launch->workers + sh->index);
    host_store(&s->task, flag_load(&sh->task));
    host_store(&s->opcode, sh->staged[flag_load(&sh->done) % STAGED].task.opcode);
    host_store(&s->object, object);
    host_store(&s->have, have);
    host_store(&s->need, need);
    host_store(&s->epoch, sh->epoch);
    host_store((uint32_t*)&s->waited_ns, (uint32_t)waited_ns);
    host_store((uint32_t*)&s->waited_ns + 1, (uint32_t)(waited_ns >> 32));
    ring_release(&s->valid, 1);
  }
  devices_publish(sh, &done->abort, 1);
}

// One consumer thread: records an error that makes the step void. The watchdog reports it, so that the ops need no code for that.
__device__ __forceinline__ void fault(Shared* sh, uint32_t code, uint32_t object, uint32_t have, uint32_t need) {
  flag_store(&sh->fault_object, object);
  flag_store(&sh->fault_have, have);
  flag_store(&sh->fault_need, need);
  block_fence();
  flag_store(&sh->fault_code, code);
}

__device__ __forceinline__ bool weight_stream_excuses(Shared* sh); // weight_stream.cuh

// Writes the worker's heartbeat for other processes, rarely and from a warp of its own. It crosses the bus, so it is three writes.
__device__ __forceinline__ void worker_heartbeat(Shared* sh, uint64_t now) {
  if (now - sh->worker_heartbeat_ns < sh->launch->worker_heartbeat_ns) {
    return;
  }
  sh->worker_heartbeat_ns = now;
  uint32_t const started = flag_load(&sh->started), position = started != 0 ? flag_load(&sh->started_position[(started - 1) % 2 * SEQS]) : 0;
  char* words = (char*)((amk_worker_heartbeat*)sh->launch->worker_heartbeats + sh->index);
  host_store_u32x4(words, (uint32_t)(now >> 10), flag_load(&sh->active), flag_load(&sh->progress), flag_load(&sh->epoch));
  host_store_u32x4(words + 16, position, flag_load(&sh->task), flag_load(&sh->issued), flag_load(&sh->wait_code));
  host_store_u32x4(words + 32, flag_load(&sh->wait_object), flag_load(&sh->wait_have), flag_load(&sh->wait_need), 0);
}

// Watchdog of a worker. Every wait inside a step polls only `dead`, which is fast; this thread sets it. It checks the device-wide abort word,
// and it traps when no task has been finished for the deadline.
__device__ __forceinline__ void watchdog_check(Shared* sh) {
  if (load_relaxed(&((amk_done*)sh->launch->done)->abort) != 0) {
    flag_store(&sh->dead, 1);
  }
  uint64_t const now = now_ns();
  uint32_t const progress = flag_load(&sh->progress), found = flag_load(&sh->fault_code);
  if (found != 0 && !is_dead(sh)) {
    block_fence();
    trap(sh, found, flag_load(&sh->fault_object), flag_load(&sh->fault_have), flag_load(&sh->fault_need), 0);
  } else if (flag_load(&sh->active) == 0 || progress != sh->seen_progress || sh->seen_ns == 0) {
    sh->seen_progress = progress;
    sh->seen_ns = now;
    flag_store(&sh->wait_code, 0);
  } else if (now - sh->seen_ns > sh->launch->deadline_ns && !is_dead(sh)) {
    if (weight_stream_excuses(sh)) {
      sh->seen_ns = now;
    } else {
      uint32_t const code = sh->weight_stream_idle != 0 ? AMK_TRAP_WEIGHTS_DEADLINE : flag_load(&sh->wait_code);
      trap(sh, code != 0 ? code : AMK_TRAP_STALLED, flag_load(&sh->wait_object), flag_load(&sh->wait_have), flag_load(&sh->wait_need), now - sh->seen_ns);
    }
  }
}

// Publishes the reason of a long wait, for the watchdog's report.
__device__ __forceinline__ void note_wait(Shared* sh, uint32_t code, uint32_t object, uint32_t have, uint32_t need) {
  flag_store(&sh->wait_object, object);
  flag_store(&sh->wait_have, have);
  flag_store(&sh->wait_need, need);
  flag_store(&sh->wait_code, code);
}

__device__ __forceinline__ void poll_pause() {
#if AMK_POLL_SLEEP_NS > 0
  __nanosleep(AMK_POLL_SLEEP_NS);
#endif
}

// One thread: waits until the counter holds epoch * count. Pairs with counter_signal.
__device__ __forceinline__ bool wait_counter(Worker const& w, uint32_t counter, uint32_t count) {
  uint32_t const* word = (uint32_t const*)w.shared->program.counters + (size_t)counter * 8;
  uint32_t const need = w.epoch * count;
  for (uint32_t spin = 1;; ++spin) {
    uint32_t const have = load_relaxed(word);
    if ((int32_t)(have - need) >= 0) {
      acquire_release_fence();
      return true;
    }
    if (is_dead(w.shared)) {
      return false;
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(w.shared, AMK_TRAP_COUNTER_DEADLINE, counter, have, need);
    }
    poll_pause();
  }
}

// Waits until a phase of a stage barrier has completed.
__device__ __forceinline__ bool wait_stage(Shared* sh, uint64_t* barrier, uint32_t parity, uint32_t stage) {
  for (uint32_t spin = 1; !barrier_try(barrier, parity); ++spin) {
    if (is_dead(sh)) {
      return false;
    }
    if (spin % SPINS_PER_NOTE == 0) {
      note_wait(sh, AMK_TRAP_STAGE_DEADLINE, stage, 0, parity);
    }
  }
  return true;
}

// One thread: the waits of the staged task. The caller follows with consumers_sync.
__device__ __forceinline__ void wait_counters(Worker const& w, amk_task const& task) {
  for (uint32_t i = 0; i < task.wait_len && i < AMK_WAITS_MAX; ++i) {
    if (!wait_counter(w, task.wait_counter[i], task.wait_count[i])) {
      return;
    }
  }
}
