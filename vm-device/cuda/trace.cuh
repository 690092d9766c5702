// Timestamps of each task, in the traced variant only. One thread of a worker takes them, so only that thread pays for it.
#pragma once

#if AMK_TRACE
__device__ __forceinline__ uint32_t trace_clock() { return (uint32_t)clock64(); }
#else
__device__ __forceinline__ uint32_t trace_clock() { return 0; }
#endif

#if AMK_TRACE == 2
// Spins, so that a test knows why a task is slow. The host keeps `cycles` short.
__device__ __forceinline__ void trace_spin(uint32_t cycles) {
  uint32_t const since = trace_clock();
  while (trace_clock() - since < cycles) {
  }
}
#endif

__device__ __forceinline__ void trace_begin(Worker const& w, uint32_t index) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
    TraceBuffer& t = w.shared->trace;
    t.at = w.shared->queue.task0 + index;
    t.delays[0] = t.delays[1] = 0;
#if AMK_TRACE == 2
    amk_launch const& l = *w.shared->launch;
    if (l.records != 0 && t.at < l.record_len) {
      amk_record const volatile* const record = (amk_record const*)l.records + t.at;
      t.delays[0] = record->delays[0];
      t.delays[1] = record->delays[1];
    }
#endif
    t.begin_ns = now_ns();
    t.begin = t.ready = t.staged = t.multiplied = trace_clock();
    t.starved = 0;
  }
#endif
}

// The task's waits are over.
__device__ __forceinline__ void trace_ready(Worker const& w) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
    w.shared->trace.ready = w.shared->trace.staged = w.shared->trace.multiplied = trace_clock();
  }
#endif
}
// The input vector is staged in shared memory.
__device__ __forceinline__ void trace_staged(Worker const& w) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
    w.shared->trace.staged = w.shared->trace.multiplied = trace_clock();
  }
#endif
}
// The products are done.
__device__ __forceinline__ void trace_multiplied(Worker const& w) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
#if AMK_TRACE == 2
    trace_spin(w.shared->trace.delays[0]);
#endif
    w.shared->trace.multiplied = trace_clock();
#if AMK_TRACE == 2
    trace_spin(w.shared->trace.delays[1]);
#endif
  }
#endif
}
// The first consumer warp has waited for weights since `since`.
__device__ __forceinline__ void trace_starved(Worker const& w, uint32_t since) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
    w.shared->trace.starved += trace_clock() - since;
  }
#endif
}

__device__ __forceinline__ void trace_end(Worker const& w, amk_task const& task) {
#if AMK_TRACE
  if (threadIdx.x == 0) {
    TraceBuffer const& t = w.shared->trace;
    amk_launch const& l = *w.shared->launch;
    if (l.records != 0 && t.at < l.record_len) {
      ((amk_record*)l.records)[t.at] =
          amk_record{t.begin_ns, t.ready - t.begin, t.staged - t.begin, t.multiplied - t.begin, trace_clock() - t.begin, t.starved, blockIdx.x, t.at, task.opcode, {t.delays[0], t.delays[1]}};
    }
  }
#endif
}

// Cycles that a loader waited in this step, for a free stage and for the cap on bytes in flight; and when the step began.
struct LoaderWaits {
  uint32_t free, cap, start;
};
__device__ __forceinline__ void trace_loader(Worker const& w, LoaderWaits& waits) {
#if AMK_TRACE
  amk_launch const& l = *w.shared->launch;
  if (l.records != 0) {
    amk_loader_record* const all = (amk_loader_record*)((amk_record*)l.records + l.record_len);
    all[blockIdx.x] = amk_loader_record{now_ns(), waits.free, waits.cap, trace_clock() - waits.start, blockIdx.x, {0, 0}};
  }
  waits = LoaderWaits{0, 0, trace_clock()};
#endif
}
