// What follows a matvec's products: the residual, the activation or the best of the rows.
#pragma once

// A running best: greater value wins, then the smaller row.
struct Best {
  float value;
  uint32_t row;
};
__device__ __forceinline__ Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.row < a.row) ? b : a; }
__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    b = better(b, Best{__shfl_xor_sync(~0u, b.value, o), __shfl_xor_sync(~0u, b.row, o)});
  }
  return b;
}

// The epilogue's addends for a thread's row, loaded while the products are computed.
__device__ __forceinline__ Addends addends(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t row, MatvecPlan const& plan) {
  bool const pairs = p.epilogue == AMK_EPILOGUE_SILU_MUL;
  Addends a = {0, 0.f, 0.f, 1.f, 1.f};
  if (row >= p.rows) {
    return a;
  }
  if (plan.residual) {
    a.residual = load_relaxed((uint32_t const*)buffer_address(w, st.buffer[3]) + row);
  }
  float const* constants = (float const*)st.buffer[2].address;
  if (MIXED && st.task.unpack != AMK_UNPACK_NONE) { // the biases lie behind the scales; rows that alternate have none without a route
    uint32_t const at = scale_row(st, p, row);
    a.scale = __ldg(constants + at), a.scale_up = pairs ? __ldg(constants + at + AMK_UNIT_ROWS) : 1.f;
    a.bias = st.buffer[2].units > p.rows && !has_route(st) ? __ldg(constants + p.rows + row) : 0.f;
  } else if (plan.biased) {
    a.bias = __ldg(constants + row), a.bias_up = pairs ? __ldg(constants + row + AMK_UNIT_ROWS) : 0.f;
  }
  if (has_route(st) && !pairs) {
    a.bias = sum_addends(w, st, p, row);
  }
  return a;
}

// The residual of a row, after the task's barrier. A flag-in-data word (`flagged`) that was read too early is waited for, if it was not needed before.
__device__ __forceinline__ float residual_value(Worker const& w, StagedTask const& st, uint32_t row, uint32_t word, bool flagged) {
  if (!flagged) {
    return buffer_read(w, st.buffer[3], row);
  }
  Words const words = buffer_words(w, st.buffer[3]);
  return word_here(words, word) ? word_value(words, word) : word_wait(w, words, row);
}
// The factor of a row's products: that of the vector, and in a kernel that unpacks weights the row's own.
__device__ __forceinline__ float scale_of(float vector, float row) { return MIXED ? vector * row : vector; }

// Finishes a thread's row of a group of tiles: sum over the warps, scale, bias, then the epilogue. `units`: words in the buffer that is written.
__device__ __forceinline__ void epilogue(Worker const& w, StagedTask const& st, amk_matvec_params const& p, Words const& out, uint32_t units, RowParts<SPARE_REGISTERS> const& parts, uint32_t row, float scale,
                                         Addends add, bool flagged, Best& best) {
  if (has_route(st) && p.epilogue == AMK_EPILOGUE_SILU_MUL && !rows_follow(st, p)) { // nothing before waits for the route
    row_addends(w, st, p, row, false, add);
  }
  float v = parts.row_sum() * scale_of(scale, add.scale) + add.bias;
  if (p.epilogue == AMK_EPILOGUE_SILU_MUL) {
    float const up = parts.up_sum() * scale_of(scale, add.scale_up) + add.bias_up;
    float const weight = row_weight(w, st, p, row, add.residual);
    bool const second = w.thread / AMK_UNIT_ROWS % 2 != 0;
    row = row / (2 * AMK_UNIT_ROWS) * AMK_UNIT_ROWS + row % AMK_UNIT_ROWS;
    if (second || row >= units) { // padding rows are dropped
      return;
    }
    v = gated(v, up, p.activation, p.cap) * weight;
  } else if (p.epilogue == AMK_EPILOGUE_RESIDUAL) {
    v += residual_value(w, st, row, add.residual, flagged);
  } else if (p.epilogue == AMK_EPILOGUE_LOGITS) {
    v = logit_capped(v, p.cap);
    best = better(best, Best{v, row});
    store_f32((float*)out.at + (size_t)w.shared->step.logits_row * p.rows + row, v);
    return;
  }
  word_write(out, row, v);
}

// Writes the best row of this worker as candidate `index`.
__device__ __forceinline__ void write_candidate(Worker const& w, StagedTask const& st, uint32_t index, Best best) {
  uint32_t const t = w.thread;
  best = warp_best(best);
  if (t % 32 == 0) {
    w.shared->best_value[t / 32] = best.value;
    w.shared->best_row[t / 32] = best.row;
  }
  consumers_sync();
  if (t == 0) {
    for (uint32_t i = 1; i < AMK_WARPS; ++i) {
      best = better(best, Best{w.shared->best_value[i], w.shared->best_row[i]});
    }
    // The candidate is the last word that this worker writes in the step. Flag-in-data words order nothing else, so the signal after it releases
    // what it wrote without a signal before (keys and values, logits); pairs with the wait before op_sample.
    uint32_t* out = (uint32_t*)st.buffer[AMK_READS_STAGED + 1].address + (size_t)index * 2;
    store_u32(out, __float_as_uint(best.value));
    store_u32(out + 1, best.row);
  }
}
