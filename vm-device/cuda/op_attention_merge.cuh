// attention_merge, and the same arithmetic as the prologue of a matvec: combines the partial results of the active splits.
#pragma once

// Keys attended to, and how many splits have some. Same as ir::program::{attended, active_splits, split_range}.
__device__ __forceinline__ uint32_t attended(uint32_t position, uint32_t window) { return window == 0 || position + 1 < window ? position + 1 : window; }
__device__ __forceinline__ uint32_t active_splits(uint32_t keys, uint32_t kv_block, uint32_t splits) {
  uint32_t const blocks = (keys + kv_block - 1) / kv_block;
  return blocks < splits ? blocks : splits;
}
__device__ __forceinline__ uint32_t split_start(uint32_t keys, uint32_t kv_block, uint32_t active, uint32_t split) {
  uint32_t const blocks = (keys + kv_block - 1) / kv_block;
  uint32_t const start = blocks * split / active * kv_block;
  return start < keys ? start : keys;
}

// Word of the partials: m, l, then the outputs of a head.
__device__ __forceinline__ uint32_t partial_word(uint32_t split, uint32_t heads_total, uint32_t head, uint32_t head_dim) {
  return (split * heads_total + head) * (head_dim + 2);
}

// The weight of each split of each head, normalised, into `weights[head][split]`. Nothing to do for a single active split.
__device__ __forceinline__ void merge_weights(Worker const& w, ResolvedSlot const& in, uint32_t generation, uint32_t heads_total, uint32_t heads, uint32_t head0,
                                              uint32_t head_dim, uint32_t splits, uint32_t kv_block, uint32_t window, float* weights) {
  uint32_t const active = active_splits(attended(w.shared->step.position, window), kv_block, splits);
  if (active == 1) {
    return;
  }
  for (uint32_t h = threadIdx.x; h < heads; h += CONSUMERS) {
    float top = -__int_as_float(0x7f800000), total = 0.f;
    for (uint32_t s = 0; s < active; ++s) {
      float2 const ml = slot_read2(w, in, generation, partial_word(s, heads_total, head0 + h, head_dim));
      float const m = fmaxf(top, ml.x);
      total = total * expf(top - m) + ml.y * expf(ml.x - m);
      top = m;
    }
    for (uint32_t s = 0; s < active; ++s) {
      float2 const ml = slot_read2(w, in, generation, partial_word(s, heads_total, head0 + h, head_dim));
      weights[h * splits + s] = ml.y * expf(ml.x - top) / total;
    }
  }
  consumers_sync();
}

// Elements e..e+4 of the merged vector, e counted from head0's first.
__device__ __forceinline__ float4 merge_read4(Worker const& w, ResolvedSlot const& in, uint32_t generation, uint32_t heads_total, uint32_t head0, uint32_t e,
                                              uint32_t head_dim, uint32_t splits, uint32_t kv_block, uint32_t window, float const* weights) {
  uint32_t const active = active_splits(attended(w.shared->step.position, window), kv_block, splits);
  uint32_t const head = e / head_dim, d = e % head_dim;
  float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
  for (uint32_t s = 0; s < active; ++s) {
    uint32_t const word = partial_word(s, heads_total, head0 + head, head_dim) + 2 + d;
    float2 const a = slot_read2(w, in, generation, word), b = slot_read2(w, in, generation, word + 2);
    float const k = active == 1 ? 1.f : weights[head * splits + s];
    out.x = fmaf(k, a.x, out.x), out.y = fmaf(k, a.y, out.y), out.z = fmaf(k, b.x, out.z), out.w = fmaf(k, b.y, out.w);
  }
  return out;
}

__device__ __forceinline__ void op_attention_merge(Worker const& w, StagedTask const& st) {
  amk_attention_merge_params const p = *(amk_attention_merge_params const*)st.task.params;
  float* weights = (float*)w.x;
  ResolvedSlot const in = st.slot[0];
  uint32_t const generation = st.task.read_generation[0];
  merge_weights(w, in, generation, p.heads_total, p.heads, p.head0, p.head_dim, p.splits, p.kv_block, p.window, weights);
  for (uint32_t e = threadIdx.x * 4; e < p.heads * p.head_dim; e += CONSUMERS * 4) {
    float4 const v = merge_read4(w, in, generation, p.heads_total, p.head0, e, p.head_dim, p.splits, p.kv_block, p.window, weights);
    uint32_t const out = p.head0 * p.head_dim + e;
    uint32_t const g = st.task.write_generation[0];
    slot_write(w, st.slot[AMK_READS_MAX], g, out, v.x);
    slot_write(w, st.slot[AMK_READS_MAX], g, out + 1, v.y);
    slot_write(w, st.slot[AMK_READS_MAX], g, out + 2, v.z);
    slot_write(w, st.slot[AMK_READS_MAX], g, out + 3, v.w);
  }
  consumers_sync(); // the weights may be overwritten
}
