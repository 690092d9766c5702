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

// What a merge of some heads works on.
struct MergeShape {
  uint32_t heads_total;
  uint32_t head0;
  uint32_t head_dim;
  uint32_t splits;
  uint32_t active;
};
__device__ __forceinline__ MergeShape merge_shape(Worker const& w, uint32_t heads_total, uint32_t head0, uint32_t head_dim, uint32_t splits, uint32_t kv_block,
                                                  uint32_t window) {
  return MergeShape{heads_total, head0, head_dim, splits, active_splits(attended(w.shared->step.position, window), kv_block, splits)};
}

// The weight of each split of each of `heads` heads, normalised, into `weights[head][split]`. Nothing to do for one active split.
// One thread a split, neighbouring lanes for the splits of a head.
__device__ __forceinline__ void merge_weights(Worker const& w, ResolvedSlot const& in, uint32_t generation, MergeShape const& m, uint32_t heads, float* weights) {
  if (m.active == 1) {
    return;
  }
  uint32_t const width = 1u << (32 - __clz(m.active - 1)); // lanes of a head, a power of two
  uint32_t const total = (heads * width + 31) / 32 * 32;
  for (uint32_t i = threadIdx.x; i < total; i += CONSUMERS) { // whole warps
    uint32_t const h = i / width, s = i % width;
    bool const mine = h < heads && s < m.active;
    float2 ml = make_float2(-__int_as_float(0x7f800000), 0.f);
    if (mine) {
      ml = slot_read2(w, in, generation, partial_word(s, m.heads_total, m.head0 + h, m.head_dim));
    }
    float top = ml.x;
    for (uint32_t o = width / 2; o > 0; o >>= 1) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    }
    float const weight = mine ? ml.y * expf(ml.x - top) : 0.f;
    float sum = weight;
    for (uint32_t o = width / 2; o > 0; o >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, o);
    }
    if (mine) {
      weights[h * m.splits + s] = weight / sum;
    }
  }
  consumers_sync();
}

// Elements e[i]..e[i]+4 of the merged vector, counted from head0's first, for each i that is wanted.
template <uint32_t N>
__device__ __forceinline__ void merge_read_batch(Worker const& w, ResolvedSlot const& in, uint32_t generation, MergeShape const& m, uint32_t const (&e)[N],
                                                 bool const (&wanted)[N], float const* weights, float4 (&out)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) {
    out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  for (uint32_t s = 0; s < m.active; ++s) {
    uint32_t word[N];
    float4 v[N];
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      word[i] = partial_word(s, m.heads_total, m.head0 + e[i] / m.head_dim, m.head_dim) + 2 + e[i] % m.head_dim;
    }
    slot_read_batch<N, false>(w, in, generation, word, wanted, v);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      float const k = m.active == 1 || !wanted[i] ? 1.f : weights[e[i] / m.head_dim * m.splits + s];
      out[i].x = fmaf(k, v[i].x, out[i].x), out[i].y = fmaf(k, v[i].y, out[i].y), out[i].z = fmaf(k, v[i].z, out[i].z), out[i].w = fmaf(k, v[i].w, out[i].w);
    }
  }
}

__device__ __forceinline__ void op_attention_merge(Worker const& w, StagedTask const& st) {
  amk_attention_merge_params const p = *(amk_attention_merge_params const*)st.task.params;
  float* weights = (float*)w.x;
  ResolvedSlot const in = st.slot[0], target = st.slot[AMK_READS_MAX];
  uint32_t const generation = st.task.read_generation[0], g = st.task.write_generation[0];
  MergeShape const m = merge_shape(w, p.heads_total, p.head0, p.head_dim, p.splits, p.kv_block, p.window);
  merge_weights(w, in, generation, m, p.heads, weights);
  for (uint32_t i = threadIdx.x * 4; i < p.heads * p.head_dim; i += CONSUMERS * 4) {
    uint32_t const e[1] = {i};
    bool const wanted[1] = {true};
    float4 v[1];
    merge_read_batch(w, in, generation, m, e, wanted, weights, v);
    uint32_t const out = p.head0 * p.head_dim + i;
    slot_write(w, target, g, out, v[0].x);
    slot_write(w, target, g, out + 1, v[0].y);
    slot_write(w, target, g, out + 2, v[0].z);
    slot_write(w, target, g, out + 3, v[0].w);
  }
  consumers_sync(); // the weights may be overwritten
}
