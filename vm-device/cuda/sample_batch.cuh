// sample for several sequences: picks the token of each and ends the step for all. For greedy sequences, one warp does what op_sample does
// with all threads; each sequence with random sampling takes all threads, one sequence after the other. Of several devices the first one samples,
// and each device finishes its step with the tokens of all sequences (exchange.cuh).
#pragma once

#if AMK_SEQS > 1
static_assert(SEQS <= AMK_WARPS, "a warp for each sequence");

// Best candidate of a warp's sequence, loading BATCH groups at once. The caller has waited for the counter.
__device__ __forceinline__ Best seq_best(Worker const& w, StagedTask const& st, uint32_t candidates) {
  constexpr uint32_t BATCH = 4;
  float const* from = (float const*)buffer_address(w, st.buffer[0]);
  Best best = {-__int_as_float(0x7f800000), AMK_NONE};
#pragma unroll 1
  for (uint32_t i = w.thread % 32; i < candidates; i += 32 * BATCH) {
    float2 c[BATCH];
#pragma unroll
    for (uint32_t j = 0; j < BATCH; ++j) {
      c[j] = load_f32x2(from + (size_t)(i + j * 32 < candidates ? i + j * 32 : i) * 2);
    }
#pragma unroll
    for (uint32_t j = 0; j < BATCH; ++j) {
      best = better(best, Best{c[j].x, __float_as_uint(c[j].y)});
    }
  }
  return warp_best(best);
}

// How a sequence's step ended: an Ending, and the token of the next step.
struct SeqEnd {
  uint32_t ending, token;
};
// One thread per sequence: writes its tokens to the host, on the first device, and picks the next step's. Those of a prompt come from the host.
__device__ __forceinline__ SeqEnd seq_finish(Worker const& w, uint32_t chosen) {
  amk_step const& s = w.shared->step;
  uint32_t const position = seq_position(w), next = position + 1;
  uint32_t* tokens = session_tokens(*w.shared->launch, seq_session(w));
  bool const reports = device_of(w.shared) == 0;
  if (reports) {
    host_store(tokens + w.shared->launch->token_stride + position, chosen);
  }
  bool const forced = next < seq_forced(w);
  uint32_t const token = forced ? host_load(tokens + next) : chosen;
  uint32_t ending = AMK_ENDING_LENGTH;
  if (token >= w.shared->program.vocab) {
    ending = forced ? AMK_ENDING_BAD_TOKEN : AMK_ENDING_NO_TOKEN;
  } else if (!forced) {
    for (uint32_t i = 0; i < s.stop_len && i < AMK_STOP_TOKENS_MAX; ++i) {
      ending = s.stop[i] == token ? AMK_ENDING_STOP : ending;
    }
    if (reports) {
      host_store(tokens + next, token);
    }
  }
  return SeqEnd{ending, token};
}

// The first warp: ends the step; thread l holds the token of sequence l. A batch continues only if every sequence does.
__device__ __forceinline__ void finish_seqs(Worker const& w, uint32_t chosen, bool preempted) {
  amk_step const& s = w.shared->step;
  amk_step* next_step = (amk_step*)w.shared->launch->step;
  amk_done* done = (amk_done*)w.shared->launch->done;
  uint32_t const seq = w.thread, seqs = seqs_running(w), ran = s.index + 1;
  SeqEnd end = {AMK_ENDING_LENGTH, 0};
  if (seq < seqs) {
    end = seq_finish(in_seq(w, seq), chosen);
#if AMK_DEVICES == 1
    store_relaxed(&((amk_seqs*)(next_step + 1))->token[seq], end.token);
#endif
    if (end.ending == AMK_ENDING_LENGTH && preempted && ran < s.steps) {
      end.ending = AMK_ENDING_YIELD;
    }
  }
  bool const over = __any_sync(~0u, ran >= s.steps || end.ending != AMK_ENDING_LENGTH);
  uint32_t const endings = __reduce_or_sync(~0u, seq < seqs ? end.ending << seq * AMK_SEQ_ENDING_BITS : 0);
  if (over) {
    host_fence(); // the tokens must be on their way to the host before the poller reports the end
  }
#if AMK_DEVICES > 1
  if (seq < seqs && !over) { // else the first device may have ended the command, and its poller be writing the next one's tokens
    store_relaxed(&((amk_seqs*)(next_step + 1))->token[seq], end.token);
  }
#endif
  __syncwarp();
  if (seq != 0) {
    return;
  }
  if (over) {
    store_relaxed(&done->steps, ran);
    store_relaxed(&done->token, seqs == 1 ? end.token : 0);
    store_relaxed(&done->ending, seqs == 1 ? end.ending : AMK_ENDING_LENGTH);
    store_relaxed(&done->seq_endings, seqs == 1 ? 0 : endings);
    host_fence();
    word_publish(&done->sequence, load_relaxed(&done->sequence) + 1);
    return;
  }
  store_relaxed(&next_step->index, ran);
  store_relaxed(&next_step->epoch, s.epoch + 1);
  store_relaxed(&next_step->logits_row, (s.flags & AMK_FLAG_KEEP_LOGITS) != 0 ? s.logits_row + 1 : s.logits_row);
  word_publish(&next_step->go, s.go + 1);
}

// Whether the token after this step of a sequence is sampled: the session's settings ask for it, and it is not one of a prompt. All devices agree.
__device__ __forceinline__ bool is_sampled(Worker const& w) { return (w.shared->seqs.sample >> w.seq & 1) != 0 && seq_position(w) + 1 >= seq_forced(w); }

#if AMK_DEVICES > 1
__device__ __forceinline__ bool any_sampled(Worker const& w) {
  bool any = false;
#pragma unroll 1
  for (uint32_t seq = 0; seq < seqs_running(w); ++seq) {
    any |= is_sampled(in_seq(w, seq));
  }
  return any;
}

// All threads, in a step where some sequence samples: exchange_gather for each sequence. Thread `seq` of a warp has the candidate of sequence `seq`.
__device__ __forceinline__ void gather_seqs(Worker const& w, Best& best) {
  Shared* sh = w.shared;
  uint32_t const own = w.thread % 32, seq = own < seqs_running(w) ? own : 0;
  consumers_sync(); // best_value and best_row have been read
  if (w.thread < seqs_running(w)) {
    exchange_collect(in_seq(w, w.thread), best);
    sh->best_value[w.thread] = best.value;
    sh->best_row[w.thread] = best.row;
  }
  consumers_sync();
  best = Best{sh->best_value[seq], sh->best_row[seq]};
}

// The first warp, at the end of a step that began with the count `go`: thread l exchanges the token of sequence l with the other devices. Returns
// false when the device is leaving.
__device__ __forceinline__ bool exchange_seqs(Worker const& w, bool sampled, uint32_t go, Best& chosen, bool& preempted) {
  bool met = true;
  if (w.thread < seqs_running(w)) {
    Worker const of = in_seq(w, w.thread);
    met = sampled ? exchange_token(of, go, chosen.row, preempted) : exchange_best(of, chosen, preempted);
  }
  return __all_sync(~0u, met);
}
#endif

__device__ __forceinline__ void op_sample_batch(Worker& w, StagedTask const& st) {
  amk_sample_params const p = *(amk_sample_params const*)st.task.params;
  uint32_t const warp = w.thread / 32, seqs = seqs_running(w);
  uint32_t preempted = 0;
  if (warp == 0) { // overlaps with the loads of the candidates
    preempted = load_relaxed(&((amk_step const*)w.shared->launch->step)->preempt);
  }
  if (warp < seqs) {
    Best const best = seq_best(in_seq(w, warp), st, p.candidates);
    if (w.thread % 32 == 0) {
      w.shared->best_value[warp] = best.value;
      w.shared->best_row[warp] = best.row;
    }
  }
  task_barrier(w);
  // Kept in thread `seq` for each sequence, since sampling with all threads reuses those words.
  Best chosen = {w.shared->best_value[w.thread % 32 % AMK_WARPS], w.shared->best_row[w.thread % 32 % AMK_WARPS]};
#if AMK_DEVICES > 1
  uint32_t const go = w.shared->step.go; // sampling adds to it
  bool const any = any_sampled(w);
  if (any && !left(w)) {
    gather_seqs(w, chosen);
  }
#endif
#pragma unroll 1
  for (w.seq = 0; w.seq < seqs; ++w.seq) {
    if (is_sampled(w) && !left(w) && device_of(w.shared) == 0) {
      consumers_sync(); // the words of the sequence before are reused next
      uint32_t const row = sampled_token(w, Best{__shfl_sync(~0u, chosen.value, w.seq), __shfl_sync(~0u, chosen.row, w.seq)});
      if (w.thread == w.seq) {
        chosen.row = row;
      }
    }
  }
  w.seq = 0;
  if (warp == 0 && !__any_sync(~0u, is_dead(w.shared))) {
    bool yields = __shfl_sync(~0u, preempted, 0) == w.shared->step.command;
#if AMK_DEVICES > 1
    if (!exchange_seqs(w, any, go, chosen, yields)) {
      return;
    }
#endif
    finish_seqs(w, chosen.row, yields);
  }
}
#endif
