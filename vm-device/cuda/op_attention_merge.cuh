// attention_merge, and the same arithmetic as the prologue of a matvec: combines the partial results of the active splits.
#pragma once

// Layout of a head's partials: greatest score, sum of exponentials, two words of padding, then the outputs.
constexpr uint32_t PARTIAL_HEAD = AMK_PARTIAL_HEADER;
constexpr uint32_t PARTIAL_WORDS = AMK_HEAD_DIM + PARTIAL_HEAD;
__device__ __forceinline__ uint32_t partial_word(uint32_t split, uint32_t heads_total, uint32_t head) { return (split * heads_total + head) * PARTIAL_WORDS; }

// Running merge of softmax parts: greatest score, sum, weighted outputs.
struct Merged {
  float m, l;
  float4 v;
};
__device__ __forceinline__ Merged merged_empty() { return Merged{-__int_as_float(0x7f800000), 0.f, make_float4(0.f, 0.f, 0.f, 0.f)}; }

// Adds a part with sum of exponentials l, whose outputs are normalised.
__device__ __forceinline__ void merged_add(Merged& a, float m, float l, float4 v) {
  float const top = fmaxf(a.m, m);
  float const old = a.l > 0.f ? __expf(a.m - top) : 0.f, now = l > 0.f ? l * __expf(m - top) : 0.f;
  a.m = top;
  a.l = a.l * old + now;
  a.v.x = a.v.x * old + now * v.x, a.v.y = a.v.y * old + now * v.y, a.v.z = a.v.z * old + now * v.z, a.v.w = a.v.w * old + now * v.w;
}
__device__ __forceinline__ float4 merged_value(Merged const& a) {
  float const k = 1.f / a.l;
  return make_float4(a.v.x * k, a.v.y * k, a.v.z * k, a.v.w * k);
}

// One warp, all lanes: waits for elements e..e+4 of the merged vector and returns them; zeros for AMK_NONE.
__device__ __forceinline__ float4 merge_wait(Worker const& w, Words const& s, uint32_t heads, uint32_t active, uint32_t e) {
  constexpr uint32_t SPLITS = 4; // requested at once
  Merged a = merged_empty();
#pragma unroll 1
  for (uint32_t split = 0; split < active; split += SPLITS) {
    uint32_t at[2 * SPLITS];
    bool wanted[2 * SPLITS];
    uint4 v[2 * SPLITS];
#pragma unroll
    for (uint32_t j = 0; j < SPLITS; ++j) {
      uint32_t const word = partial_word(split + j, heads, e / AMK_HEAD_DIM);
      at[2 * j] = word;
      at[2 * j + 1] = word + PARTIAL_HEAD + e % AMK_HEAD_DIM;
      wanted[2 * j] = wanted[2 * j + 1] = e != AMK_NONE && split + j < active;
    }
    vec4s_wait(w, s, at, wanted, v);
#pragma unroll
    for (uint32_t j = 0; j < SPLITS; ++j) {
      if (wanted[2 * j]) {
        merged_add(a, word_value(s, v[2 * j].x), word_value(s, v[2 * j].y), vec4_value(s, v[2 * j + 1]));
      }
    }
  }
  return e != AMK_NONE ? merged_value(a) : a.v;
}

// Threads share a head: each takes 4 elements of every n-th split, then their sums are combined in shared memory.
__device__ __forceinline__ void merge_heads(Worker const& w, StagedTask const& st, amk_attention_merge_params const& p) {
  constexpr uint32_t VEC4S = AMK_HEAD_DIM / 4, SHARES = CONSUMERS / VEC4S;
  uint32_t const t = threadIdx.x, vec4 = t % VEC4S, share = t / VEC4S;
  Words const in = buffer_words(w, st.buffer[0]), out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  uint32_t const active = active_splits(attended(seq_position(w), p.window), p.kv_block, p.splits);
  Merged* sums = (Merged*)w.x;
  trace_staged(w);
#pragma unroll 1
  for (uint32_t h = 0; h < p.heads; ++h) {
    uint32_t const head = p.head0 + h;
    Merged a = merged_empty();
#pragma unroll 1
    for (uint32_t split = 0; split < active; split += SHARES) {
      uint32_t const word = partial_word(split + share, p.heads_total, head);
      uint32_t const at[2] = {word, word + PARTIAL_HEAD + vec4 * 4};
      bool const mine = share < SHARES && split + share < active, wanted[2] = {mine, mine};
      uint4 v[2];
      vec4s_wait(w, in, at, wanted, v);
      if (mine) {
        merged_add(a, word_value(in, v[0].x), word_value(in, v[0].y), vec4_value(in, v[1]));
      }
    }
    if (share < SHARES) {
      sums[share * VEC4S + vec4] = a;
    }
    consumers_sync();
    if (t < VEC4S) {
      Merged all = merged_empty();
#pragma unroll 1
      for (uint32_t i = 0; i < SHARES; ++i) {
        Merged const part = sums[i * VEC4S + t];
        if (part.l > 0.f) {
          merged_add(all, part.m, part.l, merged_value(part));
        }
      }
      float4 const v = merged_value(all);
      uint32_t const e = head * AMK_HEAD_DIM + t * 4;
      input_write(out, e, v.x);
      input_write(out, e + 1, v.y);
      input_write(out, e + 2, v.z);
      input_write(out, e + 3, v.w);
    }
    consumers_sync(); // the sums are overwritten next
  }
}

__device__ __forceinline__ void op_attention_merge(Worker& w, StagedTask const& st) {
  amk_attention_merge_params const p = *(amk_attention_merge_params const*)st.task.params;
  for_seqs(w, [&] { merge_heads(w, st, p); });
  trace_multiplied(w);
  task_barrier(w);
}
