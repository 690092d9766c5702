// nop, embed and sample: the ops that do little. Same as the files of these names in reference-vm/src/ops/.
#pragma once

__device__ __forceinline__ void op_embed(Worker& w, StagedTask const& st) {
  amk_embed_params const p = *(amk_embed_params const*)st.task.params;
  Words const out = slot_words(w, st.slot[AMK_READS_MAX], st.task.write_generation[0]);
  for (uint32_t i = threadIdx.x; i < p.len; i += CONSUMERS) {
    word_write(out, p.offset + i, slot_read(w, st.slot[0], 0, p.offset + i));
  }
  task_barrier(w);
}

// Ends the step: chooses the token, then announces the next step, or the end of the command to the poller.
__device__ __forceinline__ void finish_step(Worker const& w, uint32_t chosen) {
  amk_step const& s = w.shared->step;
  amk_step* next_step = (amk_step*)w.shared->launch->step;
  amk_done* done = (amk_done*)w.shared->launch->done;
  uint32_t const next = s.position + 1;
  uint32_t* tokens = session_tokens(*w.shared->launch, s.session);
  host_store(tokens + w.shared->launch->token_stride + s.position, chosen); // forced or not: the gate compares it with the logits
  bool const forced = next < s.forced;
  uint32_t const token = forced ? host_load(tokens + next) : chosen;
  bool stopped = false;
  if (!forced) {
    for (uint32_t i = 0; i < s.stop_len && i < AMK_STOP_TOKENS_MAX; ++i) {
      stopped |= s.stop[i] == token;
    }
    host_store(tokens + next, token);
  }
  if (next >= s.end || stopped) {
    store_relaxed(&done->steps, next - s.first);
    store_relaxed(&done->token, token);
    store_relaxed(&done->stopped, stopped);
    host_fence(); // the tokens are on their way to the host before the poller may say so
    word_publish(&done->sequence, load_relaxed(&done->sequence) + 1);
    return;
  }
  if (token >= w.shared->program.vocab) {
    fault(w.shared, AMK_TRAP_BAD_INDEX, token, token, w.shared->program.vocab);
    return;
  }
  store_relaxed(&next_step->token, token);
  store_relaxed(&next_step->position, next);
  store_relaxed(&next_step->epoch, s.epoch + 1);
  store_relaxed(&next_step->logits_row, (s.flags & 1) != 0 ? s.logits_row + 1 : s.logits_row);
  word_publish(&next_step->go, s.go + 1);
}

__device__ __forceinline__ void op_sample(Worker& w, StagedTask const& st) {
  amk_sample_params const p = *(amk_sample_params const*)st.task.params;
  uint32_t const t = threadIdx.x;
  Best best = {-__int_as_float(0x7f800000), 0xffffffffu};
  for (uint32_t i = t; i < p.candidates; i += CONSUMERS) {
    float2 const c = load_f32x2((float const*)st.slot[0].address + (size_t)i * 2); // the counter has been waited for
    best = better(best, Best{c.x, __float_as_uint(c.y)});
  }
  best = warp_best(best);
  if (t % 32 == 0) {
    w.shared->best_value[t / 32] = best.value;
    w.shared->best_row[t / 32] = best.row;
  }
  task_barrier(w);
  if (t == 0 && !is_dead(w.shared)) {
    for (uint32_t i = 1; i < AMK_WARPS; ++i) {
      best = better(best, Best{w.shared->best_value[i], w.shared->best_row[i]});
    }
    finish_step(w, best.row);
  }
}
