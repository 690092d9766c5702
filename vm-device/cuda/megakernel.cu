// The persistent kernel: one block per multiprocessor, a loader warp, consumer warps, and in the first block a poller.
//
//   host ring -> poller -> step state -> every worker: its task queue, fed by its own weight stream -> sample -> next step

// Task prefetcher: one warp that stages tasks and their resolved buffers a few tasks ahead of the consumers, because each staging takes
// two round trips to L2. It loops over the queue, which repeats every step, until it is halted.
__device__ __forceinline__ void prefetcher_run(Worker const& w) {
  Shared* sh = w.shared;
  uint32_t const lane = threadIdx.x % 32, tasks = sh->queue.tasks;
  uint32_t const word = lane < AMK_READS_STAGED + AMK_WRITES_MAX ? 3 + lane : ASIDE && lane == ASIDE_LANE ? AMK_OFFSETOF(amk_task, aside) / 4 : 3;
  amk_task const* queue = (amk_task const*)sh->program.tasks + sh->queue.task0;
  uint32_t index = 0;
  for (uint32_t k = AMK_FIRST_TASK; tasks > 0; ++k) {
    while (!may_stage(k, flag_load(&sh->done))) {
      if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
        return;
      }
      __nanosleep(200); // tasks are staged long before they are due
    }
    if (flag_load(&sh->halt) != 0) {
      return;
    }
    uint4 record = make_uint4(0, 0, 0, 0);
    if (lane < AMK_TASK_BYTES / 16) {
      record = load_u32x4((char const*)(queue + index) + lane * 16);
    }
    // Lane j < 6 extracts buffer index j from the record (words 3..9 of the task) and loads its descriptor; lane ASIDE_LANE that of the fifth read.
    uint32_t const x = __shfl_sync(~0u, record.x, word / 4), y = __shfl_sync(~0u, record.y, word / 4);
    uint32_t const z = __shfl_sync(~0u, record.z, word / 4), v = __shfl_sync(~0u, record.w, word / 4);
    uint32_t const buffer = word % 4 == 0 ? x : word % 4 == 1 ? y : word % 4 == 2 ? z : v;
    StagedTask& st = sh->staged[k % STAGED];
    if (lane < AMK_READS_STAGED + AMK_WRITES_MAX || (ASIDE && lane == ASIDE_LANE)) {
      uint4 resolved = make_uint4(0, 0, 0, 0);
      if (buffer < sh->program.buffer_len) {
        uint4 const head = load_u32x4((amk_buffer const*)sh->program.buffers + buffer);
        uint4 const tail = load_u32x4((char const*)((amk_buffer const*)sh->program.buffers + buffer) + 16);
        uint32_t const kind = AMK_DEVICES > 1 && tail.y != 0 ? head.z | REPLICATED : head.z;
        resolved = make_uint4(head.x, head.y, kind, head.z == AMK_BUFFER_EMBEDDING ? tail.x : head.w);
      }
      (ASIDE && lane == ASIDE_LANE ? (uint4*)&st.task + ASIDE_PIECE : (uint4*)st.buffer + lane)[0] = resolved;
    }
    if (lane < AMK_TASK_BYTES / 16 && !(ASIDE && lane == ASIDE_PIECE)) {
      ((uint4*)&st.task)[lane] = record;
    }
    __syncwarp();
    if (lane == 0 && st.task.opcode == AMK_OP_MATVEC) {
      plan_store(st, matvec_plan(st));
    }
    block_fence();
    __syncwarp();
    if (lane == 0) {
      flag_store(&sh->fetched, k + 1);
    }
    index = index + 1 == tasks ? 0 : index + 1;
  }
}

// Waits until the prefetcher has staged this warp's next task.
__device__ __forceinline__ StagedTask const& staged_task(Worker const& w) {
  while (!is_staged(w.task, flag_acquire(&w.shared->fetched)) && !is_dead(w.shared)) {
  }
  return w.shared->staged[w.task % STAGED];
}

// Runs one step of this worker: its tasks in order. Returns false when the worker is to leave.
__device__ __forceinline__ bool run_step(Worker& w, Cursor& c) {
  Shared* sh = w.shared;
  uint32_t const tasks = sh->queue.tasks;
  for (uint32_t i = 0; i < tasks; ++i) {
    StagedTask const& st = staged_task(w);
    uint4 const head = stage_load(&st.task); // one load: opcode, waits, signal
    trace_begin(w, i);
    if ((head.y & 0xff) > 0) {
      if (w.thread == 0) {
        wait_counters(w, st.task);
      }
      consumers_sync();
    }
    trace_ready(w);
    dispatch(w, st, head.x & 0xffff, c);
    if (head.z != AMK_NONE) {
      consumers_sync();
      if (w.thread == 0) {
        counter_signal((uint32_t*)sh->program.counters + (size_t)head.z * 8);
      }
    }
    trace_end(w, st.task);
    ++w.task;
    if (w.thread == 0) {
      flag_store(&sh->task, i + 1);
      flag_store(&sh->done, w.task);
    }
    if (left(w)) {
      return false;
    }
  }
  return true;
}

// Sets the addresses of the activation buffer and the ring from the program.
__device__ __forceinline__ void worker_ring(Worker& w) {
  amk_program const& p = w.shared->program;
  w.x = (char*)w.shared + p.x_offset;
  w.ring = w.x + p.x_bytes;
  w.stages = p.stages;
  w.stage_bytes = p.stage_bytes;
}

// Consumers: makes `program` current. The loader must be halted and drained, and the prefetcher halted.
__device__ __forceinline__ void adopt_program(Worker& w, Cursor& c, uint64_t program) {
  Shared* sh = w.shared;
  uint32_t const t = threadIdx.x;
  if (t < sizeof(amk_program) / 16) {
    ((uint4*)&sh->program)[t] = load_u32x4((char const*)program + t * 16);
  }
  consumers_sync();
  if (t < sizeof(amk_queue) / 16) {
    ((uint4*)&sh->queue)[t] = load_u32x4((char const*)sh->program.queues + (size_t)(AMK_DEVICES > 1 ? sh->index : blockIdx.x) * sizeof(amk_queue) + t * 16);
  }
  if (t == 32) {
#pragma unroll 1
    for (uint32_t s = 0; s < AMK_STAGES_MAX; ++s) {
      barrier_invalidate(&sh->full[s]);
      barrier_invalidate(&sh->empty[s]);
      barrier_init(&sh->full[s], 1);
      barrier_init(&sh->empty[s], AMK_WARPS);
    }
    barrier_init_fence();
    sh->halt = 0;
    sh->near = 0;
    sh->fetched = AMK_FIRST_TASK;
    sh->done = AMK_FIRST_TASK;
    flag_store(&sh->started, 0); // the worker heartbeat's warp reads it at any time
  }
  consumers_sync();
  worker_ring(w);
  w.task = AMK_FIRST_TASK;
  c = Cursor{0, 0};
  worker_sync(); // releases loader and prefetcher
}

// One thread: waits until the next action is published. There is no deadline, since the host may leave the device idle.
__device__ __forceinline__ void wait_action(Worker const& w, uint32_t go) {
  amk_step const* step = (amk_step const*)w.shared->launch->step;
  while ((int32_t)(load_relaxed(&step->go) - go) < 0) {
    if (is_dead(w.shared)) {
      return;
    }
    poll_pause();
  }
  devices_fence();
}

__device__ __forceinline__ void consumer_run(Worker& w) {
  Shared* sh = w.shared;
  Cursor c;
  adopt_program(w, c, sh->launch->program);
  for (uint32_t go = 1;; ++go) {
    if (threadIdx.x == 0) {
      wait_action(w, go);
    }
    consumers_sync();
    if (threadIdx.x < STEP_BYTES / 16) {
      ((uint4*)&sh->step)[threadIdx.x] = load_u32x4((char const*)sh->launch->step + threadIdx.x * 16);
    }
    task_barrier(w);
    bool leaving = left(w);
    if (!leaving && sh->step.action == AMK_ACTION_CHOOSE) {
      amk_launch const& l = *sh->launch;
      sampler_help(w, sampler_of(l), (amk_sampling const*)l.sampling + sh->step.session, sh->program.vocab, sh->index, l.workers, first_number(sh->step.go));
      consumers_sync(); // as after a step
      continue;
    }
    if (!leaving && sh->step.action == AMK_ACTION_STEP) {
      w.epoch = sh->step.epoch;
      if (threadIdx.x == 0) {
        flag_store(&sh->epoch, w.epoch);
        flag_store(&sh->active, 1);
        uint32_t const started = flag_load(&sh->started);
        note_started(sh, started);
        block_fence();
        flag_store(&sh->started, started + 1);
      }
      leaving = !run_step(w, c);
      if (threadIdx.x == 0) {
        flag_store(&sh->active, 0);
        go = sh->step.go; // this worker may have published more steps
      }
      if (!leaving) {
        consumers_sync(); // the step's state is overwritten next
        continue;
      }
    }
    if (threadIdx.x == 0) {
      flag_store(&sh->halt, 1);
    }
    worker_sync(); // after it the loader has drained and the prefetcher has stopped
    if (leaving || sh->step.action != AMK_ACTION_SWITCH) {
      if (threadIdx.x == 0) {
        flag_store(&sh->halt, 2);
      }
      worker_sync(); // the helpers return after it
      if (threadIdx.x == 0) {
        flag_store(&sh->gone, 1);
        claim(&((amk_done*)sh->launch->done)->left);
      }
      return;
    }
    adopt_program(w, c, sh->step.program);
    if (threadIdx.x == 0) {
      devices_fence(); // orders this worker's last reads of the old program before the host overwrites it
      claim(&((amk_done*)sh->launch->done)->switched);
    }
  }
}

// Main loop of the loader's warp and of the prefetcher's.
__device__ __forceinline__ void helper_life(Worker w, bool loader) {
  for (;;) {
    worker_sync(); // a program has been adopted, or the block is leaving
    if (flag_load(&w.shared->halt) == 2) {
      return;
    }
    worker_ring(w);
    if (!loader) {
      prefetcher_run(w);
    } else if (threadIdx.x % 32 == 0) {
      loader_run(w);
    }
    __syncwarp();
    // Lanes without work wait here for the consumers.
    worker_sync();
  }
}

// One helper warp of every block: writes the worker's heartbeat until the consumers have left.
__device__ __forceinline__ void worker_heartbeat_run(Shared* sh) {
  while (flag_load(&sh->gone) == 0) {
    worker_heartbeat(sh, now_ns());
    __nanosleep(20000);
  }
}

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
constexpr uint32_t RANK_SLEEP_NS = 100, RANK_TURNS = 128; // the loader asks long before the logits are there; turns between two looks at the clock

// The same warp in a kernel with routes, all of its lanes: it also finds the experts for the loader.
__device__ __forceinline__ void ranks_run(Shared* sh) {
  uint32_t const lane = threadIdx.x % 32;
  auto const heartbeat = [&] {
    if (lane == 0) {
      worker_heartbeat(sh, now_ns());
    }
    __syncwarp();
  };
  for (uint32_t turn = 0; __shfl_sync(~0u, flag_load(&sh->gone), 0) == 0; ++turn) {
    if (!experts_serve(sh, lane, heartbeat)) {
      __nanosleep(RANK_SLEEP_NS);
    }
    if (turn % RANK_TURNS == 0) {
      heartbeat();
    }
  }
}
#endif

// The third helper warp of every block: the watchdog, until the consumers have left. In block 0 it runs the poller first.
__device__ __forceinline__ void watchdog_run(Shared* sh) {
  while (flag_load(&sh->gone) == 0) {
#if AMK_DEVICES > 1
    if (sh->index == 0 && sh->device != 0) {
      device_look(sh);
    }
#endif
    watchdog_check(sh);
    __nanosleep(20000);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + HELPERS, 1) amk_megakernel(__grid_constant__ amk_launch const launch) {
  extern __shared__ __align__(128) char memory[];
  uint32_t base, thread;
  asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"((uint32_t)__cvta_generic_to_shared(memory)));
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  Shared* sh = (Shared*)__cvta_shared_to_generic(base);
  Worker w = {sh};
  w.thread = thread;
  uint32_t const warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    sh->dead = 0;
    sh->halt = 0;
    sh->near = 0;
    sh->leave[0] = sh->leave[1] = sh->gone = sh->active = sh->progress = sh->wait_code = sh->fault_code = 0;
    sh->seen_progress = 0;
    sh->seen_ns = 0;
    sh->watermark = sh->seen_watermark = sh->weight_stream_idle = 0;
    sh->epoch = 0;
    sh->task = 0;
    sh->issued = sh->started = 0;
    sh->worker_heartbeat_ns = 0;
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
    sh->rank_asked = 0;
#pragma unroll 1
    for (uint16_t& expert : sh->slot_expert) { // a worker that is to leave waits for no stage: what it reads must be some expert's number
      expert = 0;
    }
#endif
#if AMK_DEVICES > 1
    device_find(sh, launch);
#else
    sh->index = blockIdx.x;
    sh->launch = &launch;
#endif
#pragma unroll 1
    for (uint32_t s = 0; s < AMK_STAGES_MAX; ++s) { // so that the first program has barriers to invalidate
      barrier_init(&sh->full[s], 1);
      barrier_init(&sh->empty[s], AMK_WARPS);
    }
  }
  __syncthreads();
  if (warp < AMK_WARPS) {
    consumer_registers();
    consumer_run(w);
    return;
  }
  helper_registers();
  if (warp < AMK_WARPS + 2) {
    helper_life(w, warp == AMK_WARPS);
  } else if (threadIdx.x == CONSUMERS + 64) {
#if AMK_DEVICES > 1
    if (sh->index == 0 && sh->device != 0) {
      device_report(sh);
    } else if (sh->index == 0) {
      poller_run(w);
    }
#else
    if (blockIdx.x == 0) {
      poller_run(w);
    }
#endif
    watchdog_run(sh);
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  } else if (threadIdx.x >= CONSUMERS + 96) {
    ranks_run(sh);
#else
  } else if (threadIdx.x == CONSUMERS + 96) {
    worker_heartbeat_run(sh);
#endif
  }
}

// Reports the hash of the header that this build was compiled with, for the handshake at boot.
extern "C" __global__ void amk_abi_probe(uint64_t* out) { *out = AMK_ABI_HASH; }

// Reads `bytes` once with the same bulk copies as the loader; timing it gives the bandwidth that a weight stream can reach on this card.
extern "C" __global__ void __launch_bounds__(32, 1) amk_bandwidth(char const* source, uint64_t bytes, uint32_t stage_bytes, uint32_t stages) {
  extern __shared__ __align__(128) char memory[];
  uint64_t* full = (uint64_t*)memory;
  char* ring = memory + 1024;
  if (threadIdx.x != 0) {
    return;
  }
  for (uint32_t s = 0; s < stages; ++s) {
    barrier_init(&full[s], 1);
  }
  barrier_init_fence();
  uint64_t const share = bytes / gridDim.x / stage_bytes, policy = evict_first_policy();
  char const* mine = source + (uint64_t)blockIdx.x * share * stage_bytes;
  uint64_t const start = now_ns();
  for (uint64_t k = 0; k < share + stages; ++k) {
    uint32_t const s = (uint32_t)(k % stages);
    if (k >= stages) {
      while (!barrier_try(&full[s], (uint32_t)(k / stages - 1) & 1)) {
        if (now_ns() - start > 2000000000ull) {
          return;
        }
      }
    }
    if (k < share) {
      stage_expect_at(shared_address(&full[s]), stage_bytes);
      stage_copy_at(shared_address(ring + (size_t)s * stage_bytes), (uint64_t)(mine + k * stage_bytes), stage_bytes, shared_address(&full[s]), policy);
    }
  }
}

// One thread on each of two GPUs: sends `rounds` words there and back, `first` from here. The first one reports the nanoseconds of all of them;
// nothing, if the other did not answer in time.
extern "C" __global__ void amk_hop(uint32_t* mine, uint32_t* theirs, uint32_t first, uint32_t rounds, uint64_t deadline_ns, uint64_t* out) {
  if (threadIdx.x != 0) {
    return;
  }
  uint64_t start = now_ns();
  for (uint32_t round = 1; round <= rounds + 1; ++round) {
    if (first != 0) {
      host_store(theirs, round);
    }
    for (uint64_t const since = now_ns(); host_load(mine) != round;) {
      if (now_ns() - since > deadline_ns) {
        return;
      }
    }
    if (first == 0) {
      host_store(theirs, round);
    }
    if (round == 1) { // both are running
      start = now_ns();
    }
  }
  if (first != 0) {
    *out = now_ns() - start;
  }
}
