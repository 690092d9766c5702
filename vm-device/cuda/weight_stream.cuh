// Streamed weight loading while the kernel runs. The host copies packed units in stream order on a stream of its own and raises
// `watermark` after each copy (vm-host/src/weight_stream/); readers of units that have not arrived wait here. docs/explanation/protocol.md.
#pragma once

__device__ __forceinline__ amk_weight_stream* weight_stream_of(Shared* sh) { return (amk_weight_stream*)sh->launch->weight_stream; }

#if AMK_DEVICES > 1
// Whether a loader of some device waits for weights.
__device__ __forceinline__ bool devices_wait_for_weights(Shared* sh) {
  bool waits = load_relaxed(&weight_stream_of(sh)->waits) != load_relaxed(&weight_stream_of(sh)->resumed);
#pragma unroll 1
  for (uint64_t const distance : sh->peers) {
    amk_weight_stream* const there = at_distance(weight_stream_of(sh), distance);
    waits |= load_relaxed(&there->waits) != load_relaxed(&there->resumed);
  }
  return waits;
}
#endif

// The loader, before the first stage of a run: waits until the run's units have arrived, `need` in stream order. The value read is kept in the
// worker's `watermark`, so that nothing is polled once everything has arrived. If the rest is abandoned, a step that has begun continues: its
// result is void. One that has not begun keeps waiting, so that no stage of a later step holds bytes that never arrived. Returns false when
// the loader is to stop.
__device__ __forceinline__ bool weight_stream_wait(Shared* sh, uint32_t need, uint32_t wrap) {
  amk_weight_stream* weight_stream = weight_stream_of(sh);
  uint64_t since = 0;
  for (;;) {
    uint32_t const watermark = load_relaxed(&weight_stream->watermark);
    if (watermark == AMK_WATERMARK_ABANDONED) {
      if ((int32_t)(flag_load(&sh->started) - wrap) > 0) {
        break;
      }
    } else if (watermark >= need) {
      flag_store(&sh->watermark, watermark);
      break;
    }
    if (since == 0) {
      since = now_ns();
      claim(&weight_stream->waits);
    }
    if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
      claim(&weight_stream->resumed);
      return false;
    }
    __nanosleep(500);
  }
  acquire_release_fence(); // pairs with the fence before the write of `watermark`
  copies_see_stores();
  if (since != 0) {
    add_relaxed(&weight_stream->waited_us, (uint32_t)((now_ns() - since) / 1000));
    claim(&weight_stream->resumed);
  }
  return true;
}

// The watchdog, when a worker has finished nothing for the deadline: returns whether weights in flight are the reason. They are while some
// arrive, and for a limited number of deadlines in a row in which none do.
__device__ __forceinline__ bool weight_stream_excuses(Shared* sh) {
  amk_weight_stream* weight_stream = weight_stream_of(sh);
  uint32_t const watermark = load_relaxed(&weight_stream->watermark);
  if (watermark >= AMK_WATERMARK_ABANDONED) {
    sh->weight_stream_idle = 0;
    return false;
  }
  sh->weight_stream_idle = watermark == sh->seen_watermark ? sh->weight_stream_idle + 1 : 0;
  sh->seen_watermark = watermark;
  return sh->weight_stream_idle <= load_relaxed(&weight_stream->patience);
}

// Reports to the host whether the current command waits for weights.
__device__ __forceinline__ void weight_stream_report(Shared* sh, uint32_t sequence) {
#if AMK_DEVICES > 1
  bool const waits = devices_wait_for_weights(sh);
#else
  amk_weight_stream const* weight_stream = weight_stream_of(sh);
  bool const waits = load_relaxed(&weight_stream->waits) != load_relaxed(&weight_stream->resumed);
#endif
  host_store(&((amk_ring_indices*)sh->launch->indices)->waiting, waits ? sequence : 0);
}
