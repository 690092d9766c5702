// Routes: which experts a step reads. Same as reference-vm/src/ops/route.rs, and the routed part of reference-vm/src/ops/matvec.rs.
#pragma once

constexpr bool ROUTES = has_feature(AMK_FEATURE_ROUTE);

// Whether a product follows a route.
__device__ __forceinline__ bool has_route(StagedTask const& st) { return ROUTES && aside(st).address != 0; }

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// The experts of a route's slots, then their weights.
struct RouteWords {
  Words words;
  uint32_t slots;
  __device__ __forceinline__ uint32_t expert(Worker const& w, uint32_t slot) const { return (uint32_t)word_wait(w, words, slot); }
  __device__ __forceinline__ float weight(Worker const& w, uint32_t slot) const { return word_wait(w, words, slots + slot); }
  // Words first.. of `n` slots, at most four, all requested at once. Words of other slots are the first one's.
  __device__ __forceinline__ float4 four(Worker const& w, uint32_t first, uint32_t n) const {
    uint32_t const* const at = words.at + first;
    for (;;) {
      uint4 const v = make_uint4(load_relaxed(at), load_relaxed(at + (n > 1 ? 1 : 0)), load_relaxed(at + (n > 2 ? 2 : 0)), load_relaxed(at + (n > 3 ? 3 : 0)));
      if (vec4_here(words, v) || is_dead(w.shared)) {
        return vec4_value(words, v);
      }
      poll_pause();
    }
  }
};
__device__ __forceinline__ RouteWords route_words(Worker const& w, StagedTask const& st) { return RouteWords{buffer_words(w, aside(st)), aside(st).units / 2}; }

// Weight of an expert with the logit `mine`; `total` is the sum of exponentials, all relative to the best logit.
__device__ __forceinline__ float chosen_weight(uint32_t scoring, float mine, float best, float total) {
  return scoring == AMK_SCORING_SIGMOID ? __fdividef(1.f, 1.f + __expf(-mine)) : __fdividef(__expf(mine - best), total);
}

// Ranks the experts: the rank of one is its slot. One warp does, as for the loaders, so that both choose the same.
__device__ __forceinline__ void route_choose(Worker const& w, StagedTask const& st, amk_route_params const& p) {
  Words const in = buffer_words(w, st.buffer[0]), out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t const each = lane_experts(p.experts), padded = 32 * each;
  uint32_t* const keys = (uint32_t*)w.x;         // of the logits, in the activation buffer
  float* const chosen = (float*)(keys + padded); // logits by slot
  float* const sums = chosen + p.slots;          // of each warp
  for (uint32_t i = w.thread; i < padded; i += CONSUMERS) {
    keys[i] = i < p.experts ? order_key(word_wait(w, in, p.first + i)) : 0;
  }
  trace_staged(w);
  consumers_sync();
  if (w.thread < 32) {
    uint32_t const* const mine = keys + w.thread * each;
    auto const four = [&](uint32_t i) { return *(uint4 const*)(mine + i); };
    warp_rank(w.thread, p.experts, p.slots, four(0), four, [&](uint32_t rank, uint32_t expert, uint32_t key) {
      chosen[rank] = key_value(key);
      word_write(out, rank, (float)expert);
    });
  }
  consumers_sync();
  float const best = chosen[0];
  float sum = 0.f;
  uint32_t const among = p.scoring == AMK_SCORING_ALL ? p.experts : p.scoring == AMK_SCORING_CHOSEN ? p.slots : 0;
  for (uint32_t i = w.thread; i < among; i += CONSUMERS) {
    sum += __expf((p.scoring == AMK_SCORING_ALL ? key_value(keys[i]) : chosen[i]) - best);
  }
  sum = warp_sum(sum);
  if (w.thread % 32 == 0) {
    sums[w.thread / 32] = sum;
  }
  consumers_sync();
  float total = 0.f;
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    total += sums[i];
  }
  if (w.thread < p.slots) {
    word_write(out, p.slots + w.thread, chosen_weight(p.scoring, chosen[w.thread], best, total));
  }
}

__device__ __forceinline__ void op_route(Worker& w, StagedTask const& st) {
  amk_route_params const p = *(amk_route_params const*)st.task.params;
  consumers_sync(); // the scratch may hold sums of the task before
  for_seqs(w, [&] { route_choose(w, st, p); });
  trace_multiplied(w);
  task_barrier(w);
}
#endif

// Rows of an expert: those of a product that has rows of all slots are as many for each.
__device__ __forceinline__ uint32_t expert_rows(StagedTask const& st, amk_matvec_params const& p) {
  return p.epilogue == AMK_EPILOGUE_SILU_MUL ? p.rows / (aside(st).units / 2) : p.rows;
}
// The scale of a row's codes. Experts have the same for a row, whichever is chosen.
__device__ __forceinline__ uint32_t scale_row(StagedTask const& st, amk_matvec_params const& p, uint32_t row) { return has_route(st) ? row % expert_rows(st, p) : row; }

// Whether the rows of a product are those of alternating experts, which may be multiplied only once their route is known: their weights follow it. A
// shared expert's do not; its route has one slot, which is its weight.
__device__ __forceinline__ bool rows_follow(StagedTask const& st, amk_matvec_params const& p) { return has_route(st) && p.epilogue == AMK_EPILOGUE_SILU_MUL && aside(st).units > 2; }

// Biases of experts lie behind the scales of one; null without any.
__device__ __forceinline__ float const* expert_biases(StagedTask const& st, amk_matvec_params const& p) {
  float const* const constants = (float const*)st.buffer[2].address;
  if (!MIXED || st.task.unpack == AMK_UNPACK_NONE) {
    return constants;
  }
  uint32_t const scales = expert_rows(st, p);
  return st.buffer[2].units > scales ? constants + scales : nullptr;
}
// The epilogue's addends for a thread's row, loaded while the products are computed. A flag-in-data residual is kept as it was read, ready or
// not. A plain one may be read only after the inputs of all warps have arrived, since they order it.
struct Addends {
  uint32_t residual; // in a row of an expert that is gated, which has none: the word of the expert's weight, ready or not
  float bias, bias_up;
  float scale, scale_up; // of the codes of a row; 1 of operands
};

// The biases of a row of the expert that it is of, and the expert's weight. Rows that follow a route have the expert that the loader chose, whose first
// stage is here, and the weight's word as it is, ready or not: `route` may still be at it. Others wait for both.
__device__ __forceinline__ void row_addends(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t row, bool follow, Addends& add) {
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  RouteWords const route = route_words(w, st);
  uint32_t const each = p.rows / route.slots, slot = row / each;
  float const* const biases = expert_biases(st, p);
  if (biases != nullptr) {
    uint32_t const expert = follow ? *(volatile uint16_t*)&w.shared->slot_expert[slot] : route.expert(w, slot);
    float const* const at = biases + (size_t)expert * each + row % each;
    add.bias = __ldg(at);
    add.bias_up = row / AMK_UNIT_ROWS % 2 == 0 ? __ldg(at + AMK_UNIT_ROWS) : 0.f;
  }
  add.residual = load_relaxed(route.words.at + route.slots + slot);
#endif
}
// The weight of the expert that a row is of, whose word was read before. Waits for the route if that was too early.
__device__ __forceinline__ float row_weight(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t row, uint32_t word) {
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  if (has_route(st)) {
    RouteWords const route = route_words(w, st);
    return word_here(route.words, word) ? word_value(route.words, word) : route.weight(w, row / (p.rows / route.slots));
  }
#endif
  return 1.f;
}
// The biases of a row that all experts of a route add to, times their weights. Waits for the route.
__device__ __forceinline__ float sum_addends(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t row) {
  float sum = 0.f;
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  RouteWords const route = route_words(w, st);
  float const* const biases = expert_biases(st, p);
#pragma unroll 1
  for (uint32_t slot = 0; biases != nullptr && slot < route.slots; slot += 4) { // four at once, of which some may be missing
    uint32_t const n = route.slots - slot;
    float4 const experts = route.four(w, slot, n), weights = route.four(w, route.slots + slot, n);
    auto const of = [&](float expert, uint32_t i) { return i < n ? __ldg(biases + (size_t)(uint32_t)expert * p.rows + row) : 0.f; };
    float const a = of(experts.x, 0), b = of(experts.y, 1), c = of(experts.z, 2), d = of(experts.w, 3);
    sum = fmaf(weights.w, d, fmaf(weights.z, c, fmaf(weights.y, b, fmaf(weights.x, a, sum))));
  }
#endif
  return sum;
}
