// The persistent kernel: one block per multiprocessor, a loader warp, consumer warps, and in the first block a poller.
//
//   host ring -> poller -> step state -> every worker: its task queue, fed by its own weight stream -> sample -> next step

// Fetches the next task and its slots while the current one runs: both are trips to L2, and neither may be waited for.
struct Fetch {
  uint4 record; // 16 bytes of the task, lanes 0..8
  uint4 slot;   // slot descriptor, lanes 0..6
};

__device__ __forceinline__ void fetch_task(Worker const& w, Fetch& f, uint32_t index) {
  uint32_t const lane = threadIdx.x % 32;
  if (lane < AMK_TASK_BYTES / 16) {
    amk_task const* task = (amk_task const*)w.shared->program.tasks + w.shared->queue.task0 + index;
    f.record = load_u32x4((char const*)task + lane * 16);
  }
}

// Lane j < 6 picks slot index j out of the record and asks for its descriptor: words 3..9 of the task.
__device__ __forceinline__ void fetch_slots(Worker const& w, Fetch& f) {
  uint32_t const lane = threadIdx.x % 32, word = 3 + (lane < 6 ? lane : 0);
  uint32_t const x = __shfl_sync(~0u, f.record.x, word / 4), y = __shfl_sync(~0u, f.record.y, word / 4);
  uint32_t const z = __shfl_sync(~0u, f.record.z, word / 4), v = __shfl_sync(~0u, f.record.w, word / 4);
  uint32_t const index = word % 4 == 0 ? x : word % 4 == 1 ? y : word % 4 == 2 ? z : v;
  f.slot = make_uint4(0, 0, 0, 0);
  if (lane < AMK_READS_MAX + AMK_WRITES_MAX && index < w.shared->program.slot_len) {
    amk_slot const* slot = (amk_slot const*)w.shared->program.slots + index;
    uint4 const head = load_u32x4(slot);
    uint4 const tail = load_u32x4((char const*)slot + 16);
    f.slot = make_uint4(head.x, head.y, head.z, head.z == AMK_SLOT_EMBEDDING ? tail.x : head.w);
  }
}

__device__ __forceinline__ void fetch_commit(Worker const& w, Fetch const& f, uint32_t index) {
  uint32_t const lane = threadIdx.x % 32;
  StagedTask& st = w.shared->staged[index & 1];
  if (lane < AMK_TASK_BYTES / 16) {
    ((uint4*)&st.task)[lane] = f.record;
  }
  if (lane < AMK_READS_MAX + AMK_WRITES_MAX) {
    ((uint4*)st.slot)[lane] = f.slot;
  }
}

// Warp 0, before an op reads tagged inputs: a sample of their words.
__device__ __forceinline__ void presample(Worker const& w, StagedTask const& st) {
  ResolvedSlot const& in = st.slot[0];
  if (in.kind != AMK_SLOT_TAGGED) {
    return;
  }
  uint32_t const generation = st.task.read_generation[0], position = w.shared->step.position;
  if (st.task.opcode == AMK_OP_MATVEC) {
    amk_matvec_params const& p = *(amk_matvec_params const*)st.task.params;
    uint32_t len = p.k_len;
    if (p.prologue == AMK_PROLOGUE_MERGE) {
      len = active_splits(attended(position, p.window), p.kv_block, p.splits) * (p.k_len / p.head_dim) * (p.head_dim + 2);
    }
    tagged_presample(w, in, generation, 0, len);
  } else if (st.task.opcode == AMK_OP_ATTENTION) {
    amk_attention_params const& p = *(amk_attention_params const*)st.task.params;
    if (p.split < active_splits(attended(position, p.window), p.kv_block, p.splits)) {
      tagged_presample(w, in, generation, p.kv_head * p.group * p.head_dim, p.group * p.head_dim);
    }
  }
}

// One step of this worker: its tasks in order.
__device__ __forceinline__ void run_step(Worker& w, Cursor& c) {
  Shared* sh = w.shared;
  uint32_t const warp = threadIdx.x / 32, tasks = sh->queue.tasks;
  uint32_t unit = 0;
  for (uint32_t i = 0; i < tasks; ++i) {
    if (threadIdx.x == 0) {
      sh->task = i;
    }
    StagedTask const& st = sh->staged[i & 1];
    Fetch next;
    bool const fetching = warp == AMK_WARPS - 1;
    uint32_t const following = i + 1 == tasks ? 0 : i + 1;
    if (fetching) {
      fetch_task(w, next, following);
    }
    if (threadIdx.x == 0) {
      wait_counters(w, st.task);
    }
    if (warp == 0) {
      __syncwarp();
      presample(w, st);
    }
    consumers_sync();
    if (fetching) {
      fetch_slots(w, next);
    }
    dispatch(w, st, c, unit);
    if (fetching) {
      fetch_commit(w, next, i + 1);
    }
    if (threadIdx.x == 0) {
      sh->leave = is_dead(sh);
      *(volatile uint32_t*)&sh->progress = sh->progress + 1;
    }
    consumers_sync();
    if (threadIdx.x == 0 && st.task.signal != AMK_NONE) {
      counter_signal((uint32_t*)sh->program.counters + (size_t)st.task.signal * 8);
    }
    if (sh->leave != 0) {
      return;
    }
  }
  // An odd queue leaves the first task of the next step in the other buffer.
  if ((tasks & 1) != 0) {
    if (threadIdx.x < sizeof(StagedTask) / 16) {
      ((uint4*)&sh->staged[0])[threadIdx.x] = ((uint4*)&sh->staged[1])[threadIdx.x];
    }
  }
  cursor_end_step(w, c, sh->queue.units);
  consumers_sync();
}

// Consumers: makes `program` current. The loader is halted and drained.
__device__ __forceinline__ void adopt_program(Worker& w, Cursor& c, uint64_t program) {
  Shared* sh = w.shared;
  uint32_t const t = threadIdx.x, warp = t / 32;
  if (t < sizeof(amk_program) / 16) {
    ((uint4*)&sh->program)[t] = load_u32x4((char const*)program + t * 16);
  }
  consumers_sync();
  if (t < sizeof(amk_queue) / 16) {
    ((uint4*)&sh->queue)[t] = load_u32x4((char const*)sh->program.queues + (size_t)blockIdx.x * sizeof(amk_queue) + t * 16);
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
  }
  consumers_sync();
  if (warp == AMK_WARPS - 1) {
    Fetch first;
    fetch_task(w, first, 0);
    fetch_slots(w, first);
    fetch_commit(w, first, 0);
  }
  w.ring = (char*)sh + sh->program.x_offset + sh->program.x_bytes;
  w.x = (char*)sh + sh->program.x_offset;
  c = Cursor{0, 0, 0, false, sh->program.stages, sh->program.stage_units};
  worker_sync(); // the loader may start
}

// One thread: until the next action is announced. Idle time has no deadline; the host may be thinking.
__device__ __forceinline__ void wait_action(Worker const& w, uint32_t go) {
  amk_step const* step = (amk_step const*)w.launch->step;
  while ((int32_t)(load_relaxed(&step->go) - go) < 0) {
    if (is_dead(w.shared)) {
      return;
    }
    poll_pause();
  }
  acquire_release_fence();
}

__device__ __forceinline__ void consumer_run(Worker& w) {
  Shared* sh = w.shared;
  amk_done* done = (amk_done*)w.launch->done;
  Cursor c;
  adopt_program(w, c, w.launch->program);
  for (uint32_t go = 1;; ++go) {
    if (threadIdx.x == 0) {
      wait_action(w, go);
    }
    consumers_sync();
    if (threadIdx.x < sizeof(amk_step) / 16) {
      ((uint4*)&sh->step)[threadIdx.x] = load_u32x4((char const*)w.launch->step + threadIdx.x * 16);
    }
    if (threadIdx.x == 0) {
      sh->leave = is_dead(sh);
    }
    consumers_sync();
    if (sh->leave == 0 && sh->step.action == 1) {
      w.epoch = sh->step.epoch;
      if (threadIdx.x == 0) {
        sh->epoch = w.epoch;
        *(volatile uint32_t*)&sh->active = 1;
      }
      run_step(w, c);
      if (threadIdx.x == 0) {
        *(volatile uint32_t*)&sh->active = 0;
      }
      if (sh->leave == 0) {
        continue;
      }
    }
    if (threadIdx.x == 0) {
      *(volatile uint32_t*)&sh->halt = 1;
    }
    worker_sync(); // the loader has drained
    if (sh->leave != 0 || sh->step.action != 2) {
      if (threadIdx.x == 0) {
        *(volatile uint32_t*)&sh->halt = 2;
      }
      worker_sync(); // the loader leaves
      if (threadIdx.x == 0) {
        *(volatile uint32_t*)&sh->gone = 1;
        claim(&done->left);
      }
      return;
    }
    adopt_program(w, c, sh->step.program);
    if (threadIdx.x == 0) {
      claim(&done->switched);
    }
  }
}

__device__ __forceinline__ void loader_life(Worker const& w) {
  for (;;) {
    worker_sync(); // a program has been adopted, or it is time to leave
    if (*(volatile uint32_t*)&w.shared->halt == 2) {
      return;
    }
    if (threadIdx.x % 32 == 0) {
      Worker mine = w;
      mine.ring = (char*)w.shared + w.shared->program.x_offset + w.shared->program.x_bytes;
      loader_run(mine);
    }
    __syncwarp();
    // Without a stream there is nothing to halt: wait for the consumers here.
    worker_sync();
  }
}

// The last warp of every block, once the poller (if it has one) is done: until the consumers have left.
__device__ __forceinline__ void watchdog_run(Shared* sh) {
  while (*(volatile uint32_t*)&sh->gone == 0) {
    watchdog_check(sh);
    __nanosleep(20000);
  }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, 1) amk_megakernel(__grid_constant__ amk_launch const launch) {
  extern __shared__ __align__(128) char memory[];
  Shared* sh = (Shared*)memory;
  Worker w = {&launch, sh, nullptr, nullptr, 0};
  uint32_t const warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    sh->dead = 0;
    sh->halt = 0;
    sh->near = 0;
    sh->leave = sh->gone = sh->active = sh->progress = sh->wait_code = 0;
    sh->seen_progress = 0;
    sh->seen_ns = 0;
    sh->index = blockIdx.x;
    sh->epoch = 0;
    sh->task = 0;
    sh->launch = &launch;
#pragma unroll 1
    for (uint32_t s = 0; s < AMK_STAGES_MAX; ++s) { // so that the first program finds barriers to invalidate
      barrier_init(&sh->full[s], 1);
      barrier_init(&sh->empty[s], AMK_WARPS);
    }
  }
  __syncthreads();
  if (warp < AMK_WARPS) {
    consumer_run(w);
  } else if (warp == AMK_WARPS) {
    loader_life(w);
  } else if (threadIdx.x % 32 == 0) {
    if (blockIdx.x == 0) {
      poller_run(w);
    }
    watchdog_run(sh);
  }
}

// Reports the layout that this build was compiled with, for the handshake at boot.
extern "C" __global__ void amk_abi_probe(uint32_t* out) {
  uint32_t const values[] = {
#define X(v) (uint32_t)(v),
      AMK_FOR_EACH_PROBE(X)
#undef X
  };
  static_assert(sizeof(values) / 4 == AMK_PROBE_LEN, "the probe covers every struct and field");
  out[0] = (uint32_t)AMK_ABI_HASH;
  out[1] = (uint32_t)(AMK_ABI_HASH >> 32);
  for (uint32_t i = 0; i < AMK_PROBE_LEN; ++i) {
    out[2 + i] = values[i];
  }
}

// Packs rows of a row-major matrix into units, from tile `tile0` on; with `stride_tiles` 2 the source's tiles of 8 rows go to every other tile (gate and up alternate). Runs before the kernel is resident.
extern "C" __global__ void amk_pack(char* packed, char const* source, uint32_t rows, uint32_t cols, uint32_t tile0, uint32_t stride_tiles, uint32_t units) {
  uint64_t const index = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  uint64_t const total = (uint64_t)rows * units * 4; // 16-byte pieces: 4 to a row of a unit
  if (index >= total) {
    return;
  }
  uint32_t const piece = (uint32_t)(index % 4), unit = (uint32_t)(index / 4 % units), row = (uint32_t)(index / 4 / units);
  uint32_t const tile = tile0 + row / AMK_UNIT_ROWS * stride_tiles;
  uint32_t const col0 = unit * UNIT_COLS + piece * LANE_COLS;
  char* out = packed + ((uint64_t)tile * units + unit) * AMK_UNIT_BYTES + (row % AMK_UNIT_ROWS) * AMK_UNIT_ROW_BYTES + piece * 16;
  for (uint32_t i = 0; i < LANE_COLS; ++i) {
    uint32_t const col = col0 + i;
#if AMK_DTYPE == 0
    ((uint32_t*)out)[i] = col < cols ? ((uint32_t const*)source)[(uint64_t)row * cols + col] : 0u;
#else
    ((uint16_t*)out)[i] = col < cols ? ((uint16_t const*)source)[(uint64_t)row * cols + col] : (uint16_t)0;
#endif
  }
}

// Reads `bytes` once and leaves how fast: the ceiling that a stream can reach on this card, by the same copies that the loader uses.
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
      stage_expect(&full[s], stage_bytes);
      stage_copy(ring + (size_t)s * stage_bytes, (uint64_t)(mine + k * stage_bytes), stage_bytes, &full[s], policy);
    }
  }
}
