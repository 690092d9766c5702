// The poller: one thread of the first worker that polls the host ring and reports for the device. No other thread reads host memory while
// waiting, but for the one that waits for a mask (op_sample.cuh).
#pragma once

constexpr uint32_t POLLS_PER_LOOK = 32; // polls of a running command per check for a preemption request: about 40 us

struct Poller {
  Worker const* worker;
  uint32_t head;     // submissions consumed
  uint32_t go;       // actions published
  uint32_t finished; // commands finished by the workers
  uint32_t switched; // expected number of workers that have switched, ever
  uint32_t epoch;    // epochs of the current program so far
  uint64_t program;
  bool weight_stream; // weights may still be in flight
};

__device__ __forceinline__ void post_completion(Poller& p, uint32_t trap_code, uint32_t steps, uint32_t token, uint32_t ending, uint32_t seq_endings, uint64_t start) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_completion* c = (amk_completion*)l.completions + (p.head & (AMK_RING_ENTRIES - 1));
  uint64_t const end = now_ns();
  host_store(&c->trap, trap_code);
  host_store(&c->steps, steps);
  host_store(&c->token, token);
  host_store(&c->ending, ending);
#if AMK_SEQS > 1
  host_store(&c->seq_endings, seq_endings);
#endif
  host_store((uint32_t*)&c->start_ns, (uint32_t)start);
  host_store((uint32_t*)&c->start_ns + 1, (uint32_t)(start >> 32));
  host_store((uint32_t*)&c->end_ns, (uint32_t)end);
  host_store((uint32_t*)&c->end_ns + 1, (uint32_t)(end >> 32));
  ring_release(&c->sequence, p.head + 1);
  ++p.head;
  ring_release(&((amk_ring_indices*)l.indices)->head, p.head);
}

// Waits until a word that the workers increment reaches `need`. Returns false when the device is leaving.
__device__ __forceinline__ bool poller_wait(Poller& p, uint32_t const* word, uint32_t need) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_done* done = (amk_done*)l.done;
  amk_ring_indices* indices = (amk_ring_indices*)l.indices;
  for (uint32_t spin = 1;; ++spin) {
    if ((int32_t)(load_relaxed(word) - need) >= 0) {
      devices_fence();
      return true;
    }
    if (load_relaxed(&done->abort) != 0) {
      return false;
    }
    if (spin % POLLS_PER_LOOK == 0 && host_load(&indices->preempt) == p.head + 1) { // pairs with ring.rs: preempt
      store_relaxed(&((amk_step*)l.step)->preempt, p.finished); // the sampling worker checks it in every step
    }
    if (spin % 512 == 0) { // a read of host memory takes about 1 us: rare, so that a finished command is seen at once
      if (host_load(&indices->abort) != 0) {
        trap(p.worker->shared, AMK_TRAP_ABORTED, 0, 0, 0, 0);
        return false;
      }
      host_store(&indices->heartbeat, (uint32_t)now_ns());
      watchdog_check(p.worker->shared);
      if (p.weight_stream) {
        weight_stream_report(p.worker->shared, p.head + 1);
      }
    }
    __nanosleep(100);
  }
}

// Waits until the embedding has arrived or the weight stream is abandoned. Returns false when the device is leaving.
__device__ __forceinline__ bool poller_wait_embedding(Poller& p) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_weight_stream* weight_stream = (amk_weight_stream*)l.weight_stream;
  amk_ring_indices* indices = (amk_ring_indices*)l.indices;
  uint32_t const need = load_relaxed(&weight_stream->embedding);
#if AMK_DEVICES > 1
  while (devices_watermark(p.worker->shared) < need) { // each device reads its own
#else
  while (load_relaxed(&weight_stream->watermark) < need) { // AMK_WATERMARK_ABANDONED is above any number of units
#endif
    if (load_relaxed(&((amk_done*)l.done)->abort) != 0) {
      return false;
    }
    if (host_load(&indices->abort) != 0) {
      trap(p.worker->shared, AMK_TRAP_ABORTED, 0, 0, 0, 0);
      return false;
    }
    host_store(&indices->heartbeat, (uint32_t)now_ns());
    host_store(&indices->waiting, p.head + 1);
    __nanosleep(500);
  }
  acquire_release_fence(); // pairs with the fence before the write of `watermark`
  host_store(&indices->waiting, 0);
  return true;
}

// Rereads the watermark into p.weight_stream. Returns true when the rest of the weights was abandoned.
__device__ __forceinline__ bool poller_abandoned(Poller& p) {
#if AMK_DEVICES > 1
  uint32_t const watermark = devices_watermark(p.worker->shared);
#else
  uint32_t const watermark = load_relaxed(&((amk_weight_stream*)p.worker->shared->launch->weight_stream)->watermark);
#endif
  acquire_release_fence();
  p.weight_stream = watermark != AMK_WATERMARK_ALL;
  return watermark == AMK_WATERMARK_ABANDONED;
}

__device__ __forceinline__ void publish_action(Poller& p, uint32_t action) {
  amk_step* step = (amk_step*)p.worker->shared->launch->step;
  devices_store(p.worker->shared, &step->action, action);
  devices_publish(p.worker->shared, &step->go, ++p.go);
}

// Writes a field of the next action.
__device__ __forceinline__ void step_store(Poller& p, uint32_t* field, uint32_t v) { devices_store(p.worker->shared, field, v); }

// Prepares the remaining steps of a command whose first step ran alone, as the next action.
__device__ __forceinline__ uint32_t prepare_rest(Poller& p, uint32_t position, uint32_t steps, uint32_t flags) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_step* step = (amk_step*)l.step;
  amk_done* done = (amk_done*)l.done;
  uint32_t const token = load_relaxed(&done->token), vocab = load_relaxed(&((amk_program const*)p.program)->vocab);
  if (token >= vocab) {
    trap(p.worker->shared, AMK_TRAP_BAD_INDEX, token, token, vocab, 0);
    return AMK_TRAP_BAD_INDEX;
  }
  step_store(p, &step->epoch, p.epoch + 2);
  step_store(p, &step->token, token);
  step_store(p, &step->position, position + 1);
  step_store(p, &step->index, 1);
  step_store(p, &step->logits_row, flags & 1);
  step_store(p, &step->steps, steps);
#if AMK_SEQS > 1 && AMK_DEVICES > 1
  amk_seqs* const to = (amk_seqs*)(step + 1); // no device has stored the next tokens, since its command was over
  uint32_t const seqs = load_relaxed(&to->seqs);
#pragma unroll 1
  for (uint32_t i = 0; i < seqs; ++i) {
    step_store(p, &to->token[i], host_load(session_tokens(l, load_relaxed(&to->session[i])) + load_relaxed(&to->position[i]) + 1));
  }
#endif
  return AMK_TRAP_NONE;
}

// Returns whether a session has a page for a position. The host allots pages from the first on, so all earlier positions have one too.
__device__ __forceinline__ bool has_page(amk_launch const& l, uint32_t session, uint32_t position) {
  uint32_t const page = page_ask(l.pages, paged_key(session, l.page_stride, position));
  return page != 0 && page < l.page_count;
}

#if AMK_SEQS > 1
// Starts a new run for each sequence that was not part of the command before: its old words may be of any epoch, so their tags could match
// this run's. Runs cycle through three values; the fourth marks poisoned buffers.
__device__ __forceinline__ void begin_runs(Poller& p, amk_seqs* to, uint32_t seqs) {
  amk_program* const program = (amk_program*)p.program;
  uint32_t runs = load_relaxed(&program->seq_runs);
#pragma unroll 1
  for (uint32_t seq = load_relaxed(&program->last_seqs); seq < seqs; ++seq) {
    uint32_t const run = runs >> 2 * seq & 3;
    runs += run == 2 ? 0u - (2u << 2 * seq) : 1u << 2 * seq;
  }
  step_store(p, &to->runs, runs);
  store_relaxed(&program->seq_runs, runs);
  store_relaxed(&program->last_seqs, seqs);
}

// Writes the sequences of a decode command after the step of every device. Returns false if they are invalid. A plain decode is a batch of one that starts
// at `position` with `token`.
__device__ __forceinline__ bool begin_seqs(Poller& p, amk_submission const* s, uint32_t seqs, uint32_t session, uint32_t position, uint32_t steps, uint32_t capacity, uint32_t flags, uint32_t token) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_seqs* to = (amk_seqs*)((amk_step*)l.step + 1);
  uint32_t const vocab = load_relaxed(&((amk_program const*)p.program)->vocab);
  step_store(p, &to->seqs, seqs <= 1 ? 1 : seqs);
  if (seqs <= 1) {
    step_store(p, &to->token[0], token);
    step_store(p, &to->position[0], position);
    step_store(p, &to->session[0], session);
    step_store(p, &to->forced[0], host_load(&s->forced));
    step_store(p, &to->sample, (flags & AMK_FLAG_SAMPLE) != 0);
    step_store(p, &to->windows, 0);
    begin_runs(p, to, 1);
    return token < vocab;
  }
  uint64_t taken = 0; // one bit per session
  bool bad = false;
  uint32_t windows = 0, before = 0, last_session = AMK_NONE, last_position = 0;
  step_store(p, &to->sample, host_load(&s->seq_sample));
#pragma unroll 1
  for (uint32_t i = 0; i < seqs; i += 2) { // a load of host memory takes about 1 us: two sequences at once
    uint32_t const sessions = host_load(&s->seq_session[i / 4]) >> i % 4 * 8, forced = host_load(&s->seq_forced[i / 4]) >> i % 4 * 8;
    uint32_t const position[2] = {host_load(&s->seq_position[i]), host_load(&s->seq_position[i + 1])};
    uint32_t word[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      uint32_t const of = sessions >> j * 8 & 0xff;
      before = steps == 1 && of == last_session && position[j] == last_position + 1 ? before + 1 : 0;
      bool const here = i + j < seqs, right = of < l.sessions && position[j] < capacity && steps <= capacity - position[j] && has_page(l, of, position[j] + steps - 1) && (before != 0 || (taken >> (of & 63) & 1) == 0);
      windows |= here ? before << 4 * (i + j) : 0;
      last_session = of, last_position = position[j];
      bad |= here && !right;
      taken |= here ? 1ull << (of & 63) : 0;
      word[j] = here && right ? host_load(session_tokens(l, of) + position[j]) : 0;
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) { // values of sequences that do not run are never read
      bad |= word[j] >= vocab;
      step_store(p, &to->token[i + j], word[j]);
      step_store(p, &to->position[i + j], position[j]);
      step_store(p, &to->session[i + j], sessions >> j * 8 & 0xff);
      step_store(p, &to->forced[i + j], position[j] + 1 + (forced >> j * 8 & 0xff));
    }
  }
  step_store(p, &to->windows, windows);
  bad |= windows != 0 && seqs > FRESH_ROWS;
  if (!bad) {
    begin_runs(p, to, seqs);
  }
  return !bad;
}
#else
__device__ __forceinline__ bool begin_seqs(Poller& p, amk_submission const*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t token) {
  return token < load_relaxed(&((amk_program const*)p.program)->vocab);
}
#endif

__device__ __forceinline__ uint32_t run_decode(Poller& p, amk_submission const* s, uint64_t start) {
  amk_launch const& l = *p.worker->shared->launch;
  amk_step* step = (amk_step*)l.step;
  amk_done* done = (amk_done*)l.done;
  amk_program const* program = (amk_program const*)p.program;
  uint32_t const session = host_load(&s->session), position = host_load(&s->position), steps = host_load(&s->steps);
  uint32_t const flags = host_load(&s->flags), stop_len = host_load(&s->stop_len), seqs = host_load(&s->seqs);
  uint32_t const capacity = load_relaxed(&program->kv_capacity);
  uint32_t const rows = load_relaxed(&program->logits_rows);
  bool const bad = session >= l.sessions || steps == 0 || position >= capacity || steps > capacity - position || stop_len > AMK_STOP_TOKENS_MAX ||
                   ((flags & AMK_FLAG_KEEP_LOGITS) != 0 && steps > rows) || seqs > SEQS || (seqs > 1 && (session | position) != 0);
  uint32_t const token = bad || seqs > 1 ? 0 : host_load(session_tokens(l, session) + position);
  if (bad || (seqs <= 1 && !has_page(l, session, position + steps - 1)) || !begin_seqs(p, s, seqs, session, position, steps, capacity, flags, token)) {
    post_completion(p, AMK_TRAP_BAD_COMMAND, 0, 0, 0, 0, start);
    return AMK_TRAP_NONE;
  }
  if (p.weight_stream) {
    if (!poller_wait_embedding(p)) {
      return AMK_TRAP_ABORTED;
    }
    if (poller_abandoned(p)) {
      post_completion(p, AMK_TRAP_WEIGHTS, 0, 0, 0, 0, start);
      return AMK_TRAP_NONE;
    }
  }
  // While weights are in flight the first step runs alone: after it either all of them have arrived or its result is void. So workers never check.
  bool const alone = p.weight_stream;
  step_store(p, &step->epoch, p.epoch + 1);
  step_store(p, &step->token, token);
  step_store(p, &step->position, position);
  step_store(p, &step->index, 0);
  step_store(p, &step->session, session);
  step_store(p, &step->logits_row, 0);
  step_store(p, &step->steps, alone ? 1 : steps);
  step_store(p, &step->forced, seqs > 1 ? 0 : host_load(&s->forced));
  step_store(p, &step->flags, flags);
  step_store(p, &step->stop_len, stop_len);
  step_store(p, &step->command, p.finished + 1);
  for (uint32_t i = 0; i < AMK_STOP_TOKENS_MAX; ++i) {
    step_store(p, &step->stop[i], host_load(&s->stop[i]));
  }
  bool lost = false;
#pragma unroll 1
  for (bool first = alone;; first = false) { // one wait in the code for both parts, to save registers
    publish_action(p, AMK_ACTION_STEP);
    if (!poller_wait(p, &done->sequence, ++p.finished)) {
      return AMK_TRAP_ABORTED;
    }
    p.go = load_relaxed(&step->go); // the sampling worker published the steps after the first, and its sampling requests
    if (!first) {
      break;
    }
    host_store(&((amk_ring_indices*)l.indices)->waiting, 0);
    lost = poller_abandoned(p);
    static_assert(AMK_ENDING_LENGTH == 0, "no sequence has ended");
    if (lost || steps == 1 || (load_relaxed(&done->ending) | load_relaxed(&done->seq_endings)) != 0) {
      break;
    }
    uint32_t const result = prepare_rest(p, position, steps, flags);
    if (result != AMK_TRAP_NONE) {
      return result;
    }
  }
  uint32_t const ran = load_relaxed(&done->steps);
  p.epoch += ran;
  store_relaxed(&((amk_program*)p.program)->epoch, p.epoch); // the program's counters are at this epoch: a later reload continues from it
  if (lost) {
    post_completion(p, AMK_TRAP_WEIGHTS, 0, 0, 0, 0, start);
  } else {
    post_completion(p, AMK_TRAP_NONE, ran, load_relaxed(&done->token), load_relaxed(&done->ending), load_relaxed(&done->seq_endings), start);
  }
  return AMK_TRAP_NONE;
}

__device__ __forceinline__ uint32_t run_load_program(Poller& p, amk_submission const* s, uint64_t start) {
  amk_launch const& l = *p.worker->shared->launch;
  uint64_t const program = (uint64_t)host_load((uint32_t const*)&s->program + 1) << 32 | host_load((uint32_t const*)&s->program);
  amk_step* step = (amk_step*)l.step;
  store_relaxed((uint32_t*)&step->program, (uint32_t)program);
  store_relaxed((uint32_t*)&step->program + 1, (uint32_t)(program >> 32));
#if AMK_DEVICES > 1
#pragma unroll 1
  for (uint64_t const distance : p.worker->shared->peers) { // each device has its tables at the same place
    uint32_t* const to = at_distance((uint32_t*)&step->program, distance);
    store_relaxed(to, (uint32_t)(program + distance));
    store_relaxed(to + 1, (uint32_t)((program + distance) >> 32));
  }
#endif
  p.program = program;
  p.epoch = load_relaxed(&((amk_program const*)program)->epoch);
  p.switched += l.workers;
  p.weight_stream = true; // the program may use other weights
  publish_action(p, AMK_ACTION_SWITCH);
  if (!poller_wait(p, &((amk_done*)l.done)->switched, p.switched)) {
    return AMK_TRAP_ABORTED;
  }
#if AMK_DEVICES > 1
#pragma unroll 1
  for (uint64_t const distance : p.worker->shared->peers) {
    if (!poller_wait(p, at_distance(&((amk_done*)l.done)->switched, distance), p.switched)) {
      return AMK_TRAP_ABORTED;
    }
  }
#endif
  post_completion(p, AMK_TRAP_NONE, 0, 0, 0, 0, start);
  return AMK_TRAP_NONE;
}

// Main loop of the poller. Ends at a stop command or when the device leaves.
__device__ __forceinline__ void poller_run(Worker const& w) {
  amk_launch const& l = *w.shared->launch;
  Poller p = {&w, 0, 0, 0, 0, load_relaxed(&((amk_program const*)l.program)->epoch), l.program, true};
  amk_ring_indices* indices = (amk_ring_indices*)l.indices;
#if AMK_DEVICES > 1
  if (!devices_wait(w.shared)) {
    return;
  }
#endif
  for (;;) {
    amk_submission const* s = (amk_submission const*)l.submissions + (p.head & (AMK_RING_ENTRIES - 1));
    if (ring_acquire(&s->sequence) != p.head + 1) { // pairs with ring.rs: publish
      if (host_load(&indices->abort) != 0) {
        trap(w.shared, AMK_TRAP_ABORTED, 0, 0, 0, 0);
        return;
      }
      if (load_relaxed(&((amk_done*)l.done)->abort) != 0) {
        return;
      }
      host_store(&indices->heartbeat, (uint32_t)now_ns());
      continue;
    }
    uint64_t const start = now_ns();
    uint32_t const command = host_load(&s->command);
    uint32_t result = AMK_TRAP_NONE;
    if (command == AMK_COMMAND_DECODE) {
      result = run_decode(p, s, start);
    } else if (command == AMK_COMMAND_LOAD_PROGRAM) {
      result = run_load_program(p, s, start);
    } else if (command == AMK_COMMAND_STOP) {
      publish_action(p, AMK_ACTION_LEAVE);
      post_completion(p, AMK_TRAP_NONE, 0, 0, 0, 0, start);
      return;
    } else { // ping and fence: all earlier commands have finished, since commands run one after the other
      bool const known = command == AMK_COMMAND_PING || command == AMK_COMMAND_FENCE;
      post_completion(p, known ? AMK_TRAP_NONE : AMK_TRAP_BAD_COMMAND, 0, 0, 0, 0, start);
    }
    if (result != AMK_TRAP_NONE) {
      post_completion(p, result, 0, 0, 0, 0, start); // the status block holds the reason
      return;
    }
  }
}
