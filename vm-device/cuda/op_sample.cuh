// sample: picks the token of a step and ends the step. Greedy as in reference-vm/src/ops/sample.rs, or by the session's settings. Of several
// devices the first one alone samples, and has the settings of the sessions.
#pragma once

// Ends the step: publishes the next one, or reports the end of the command to the poller. `preempted`: the host asks for the machine.
__device__ __forceinline__ void finish_step(Worker const& w, uint32_t chosen, bool preempted) {
  amk_step const& s = w.shared->step;
  amk_step* next_step = (amk_step*)w.shared->launch->step;
  amk_done* done = (amk_done*)w.shared->launch->done;
  uint32_t const next = s.position + 1, ran = s.index + 1;
  uint32_t* tokens = session_tokens(*w.shared->launch, s.session);
  bool const reports = device_of(w.shared) == 0;
  if (reports) {
    host_store(tokens + w.shared->launch->token_stride + s.position, chosen); // forced or not: the gate compares it with the logits
  }
  bool const forced = next < s.forced;
  uint32_t const token = forced ? host_load(tokens + next) : chosen;
  bool const known = token < w.shared->program.vocab;
  uint32_t ending = preempted && ran < s.steps ? AMK_ENDING_YIELD : AMK_ENDING_LENGTH;
  if (!known) { // ends this session's command only: no other session has read the token
    ending = forced ? AMK_ENDING_BAD_TOKEN : AMK_ENDING_NO_TOKEN;
  } else if (!forced) {
    for (uint32_t i = 0; i < s.stop_len && i < AMK_STOP_TOKENS_MAX; ++i) {
      ending = s.stop[i] == token ? AMK_ENDING_STOP : ending;
    }
    if (reports) {
      host_store(tokens + next, token);
    }
  }
  if (ran >= s.steps || ending != AMK_ENDING_LENGTH) {
    store_relaxed(&done->steps, ran);
    store_relaxed(&done->token, token);
    store_relaxed(&done->ending, ending);
    host_fence(); // the tokens must be on their way to the host before the poller reports the end
    word_publish(&done->sequence, load_relaxed(&done->sequence) + 1);
    return;
  }
  store_relaxed(&next_step->token, token);
  store_relaxed(&next_step->position, next);
  store_relaxed(&next_step->index, ran);
  store_relaxed(&next_step->epoch, s.epoch + 1);
  store_relaxed(&next_step->logits_row, (s.flags & AMK_FLAG_KEEP_LOGITS) != 0 ? s.logits_row + 1 : s.logits_row);
  word_publish(&next_step->go, s.go + 1);
}

// All threads: adds the sequence's tokens up to this step's to the session's set of seen tokens. Those of steps that were not sampled, or not
// run here, are in the host's buffer. The set is cleared when a sequence starts anew.
__device__ __forceinline__ void see_tokens(Worker const& w, amk_sampling const& settings, amk_sampling* session) {
  uint32_t const vocab = w.shared->program.vocab, position = seq_position(w);
  uint32_t* seen = (uint32_t*)settings.seen;
  uint32_t const* tokens = session_tokens(*w.shared->launch, seq_session(w));
  bool const anew = position < settings.upto;
  uint32_t const from = anew ? 0 : settings.upto;
  if (from == 0) {
    for (uint32_t i = w.thread; i < (vocab + 31) / 32; i += CONSUMERS) {
      store_relaxed(seen + i, 0);
    }
    consumers_sync();
  }
  for (uint32_t i = from + w.thread; i <= position; i += CONSUMERS) {
    uint32_t const token = i == position ? seq_token(w) : host_load(tokens + i);
    if (token < vocab) {
      set_bits(seen + token / 32, 1u << token % 32);
    }
  }
  if (w.thread == 0) {
    store_relaxed(&session->upto, position + 1);
  }
  consumers_sync();
}


// The cooperative sampler's memory: after the settings of the sessions.
__device__ __forceinline__ CooperativeSampler* sampler_of(amk_launch const& l) {
  return (CooperativeSampler*)((l.sampling + (uint64_t)l.sessions * sizeof(amk_sampling) + alignof(CooperativeSampler) - 1) / alignof(CooperativeSampler) * alignof(CooperativeSampler));
}
// Number before the first request of an action. Numbers of different actions are disjoint.
__device__ __forceinline__ uint32_t first_number(uint32_t go) { return go * 16; }

// One thread: wakes the other workers from their wait for the next step and sends them to sampler_help.
__device__ __forceinline__ void sampler_wake(Worker const& w) {
  amk_step* step = (amk_step*)w.shared->launch->step;
  w.shared->step.go += 1;
#if AMK_SEQS > 1
  store_relaxed(&step->session, seq_session(w)); // they load its settings
#endif
  store_relaxed(&step->action, AMK_ACTION_CHOOSE);
  word_publish(&step->go, w.shared->step.go);
}

#if AMK_MASKS
// One thread: waits for the mask of the token at a position, which the host writes while the step runs. False if it does not come in time, the
// host wants the command to end, or the device is leaving: then the step has no token, and the host may run its position again.
__device__ __forceinline__ bool mask_wait(Worker const& w, uint32_t const* mask, uint32_t position) {
  amk_launch const& l = *w.shared->launch;
  uint64_t const start = now_ns();
  while (host_load(mask) != position) {
    bool const preempted = load_relaxed(&((amk_step const*)l.step)->preempt) == w.shared->step.command;
    if (preempted || is_dead(w.shared) || now_ns() - start > l.deadline_ns / AMK_MASK_DEADLINE_PART) {
      return false;
    }
    poll_pause();
  }
  host_fence(); // pairs with masks.rs: give
  return true;
}

// All threads: whether the token after this step may be sampled: the session has no masks, or this one has come.
__device__ __forceinline__ bool mask_ready(Worker const& w, SamplerScratch& d) {
  if ((d.settings.greedy & AMK_SAMPLING_MASKED) == 0) {
    return true;
  }
  if (w.thread == 0) {
    d.leaves = !mask_wait(w, (uint32_t const*)d.settings.biased - AMK_MASK_HEAD_WORDS, seq_position(w) + 1);
  }
  consumers_sync();
  return d.leaves == 0;
}
#endif

// All threads: the token by the session's settings. The tasks that wrote the candidates stored the logits before their signals, for which the
// sampling task has waited. So the logits are ordered as the candidates are, also for the helpers, which are woken later. Loads bypass L1.
__device__ __forceinline__ uint32_t sampled_token(Worker const& w, Best highest) {
  amk_launch const& l = *w.shared->launch;
  SamplerScratch& d = *(SamplerScratch*)&w.shared->part;
  amk_sampling* session = (amk_sampling*)l.sampling + seq_session(w);
  settings_load(w, d, session);
#if AMK_MASKS
  if (!mask_ready(w, d)) {
    return AMK_NONE;
  }
#endif
  if (d.settings.penalty != 1.f) {
    see_tokens(w, d.settings, session);
  }
  uint32_t const vocab = w.shared->program.vocab;
  CooperativeSampler* const choice = sampler_of(l);
  SampleRequester a = {choice, w.shared->index, l.workers - 1, first_number(w.shared->step.go + 1), load_relaxed(&choice->done), false};
  uint32_t const token = sample_row(w, d, a, (float const*)d.settings.logits + (size_t)seq_logits_row(w) * vocab, highest, vocab, seq_position(w) + 1);
  if (w.thread == 0) {
    store_relaxed(&((amk_step*)l.step)->action, AMK_ACTION_STEP); // the next action of the other workers
  }
  return token;
}

__device__ __forceinline__ void op_sample(Worker& w, StagedTask const& st) {
  amk_sample_params const p = *(amk_sample_params const*)st.task.params;
  amk_step const& s = w.shared->step;
  uint32_t const t = w.thread;
  uint32_t preempted = 0;
  if (t == 0) { // overlaps with the loads of the candidates
    preempted = load_relaxed(&((amk_step const*)w.shared->launch->step)->preempt);
  }
  Best best = {-__int_as_float(0x7f800000), AMK_NONE};
  for (uint32_t i = t; i < p.candidates; i += CONSUMERS) {
    float2 const c = load_f32x2((float const*)st.buffer[0].address + (size_t)i * 2); // the counter has been waited for
    best = better(best, Best{c.x, __float_as_uint(c.y)});
  }
  best = warp_best(best);
  if (t % 32 == 0) {
    w.shared->best_value[t / 32] = best.value;
    w.shared->best_row[t / 32] = best.row;
  }
  task_barrier(w);
  bool const sampled = (s.flags & AMK_FLAG_SAMPLE) != 0 && s.position + 1 >= s.forced;
  if (!sampled && t != 0) {
    return;
  }
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    best = better(best, Best{w.shared->best_value[i], w.shared->best_row[i]});
  }
#if AMK_DEVICES > 1
  uint32_t const go = s.go; // sampling adds to it
  if (sampled && !left(w)) {
    exchange_gather(w, best);
  }
#endif
  if (sampled && !left(w) && device_of(w.shared) == 0) {
    consumers_sync(); // best_value and best_row are reused next
    best.row = sampled_token(w, best);
  }
  if (t == 0 && !is_dead(w.shared)) {
    bool yields = preempted == s.command;
#if AMK_DEVICES > 1
    if (!(sampled ? exchange_token(w, go, best.row, yields) : exchange_best(w, best, yields))) {
      return;
    }
#endif
    finish_step(w, best.row, yields);
  }
}
