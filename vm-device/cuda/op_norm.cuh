// norm: normalises the parts of a vector. Same as reference-vm/src/ops/norm.rs.
#pragma once

#if AMK_FEATURES >> AMK_FEATURE_NORM & 1
// Elements i..i+4 of the vector, once they have arrived. A vector's width is a multiple of 4.
__device__ __forceinline__ float4 norm_read(Worker const& w, Words const& in, uint32_t i, bool wanted) {
  uint32_t const at[1] = {i};
  bool const mine[1] = {wanted};
  uint4 v[1];
  vec4s_wait(w, in, at, mine, v);
  return vec4_value(in, v[0]);
}

// Every worker sums the squares of both parts, then writes its elements. Groups of 4 elements are of one part: their ends are multiples of 4.
__device__ __forceinline__ void norm_vector(Worker const& w, StagedTask const& st, amk_norm_params const& p) {
  Words const in = buffer_words(w, st.buffer[0]), out = buffer_words(w, st.buffer[AMK_READS_STAGED]);
  float const* norm = (float const*)st.buffer[1].address;
  uint32_t const t = threadIdx.x, normed = p.first + p.second;
  float2* sums = (float2*)w.x; // of each warp, in the activation buffer
  float2 square = make_float2(0.f, 0.f);
#pragma unroll 1
  for (uint32_t i = t * 4; i < normed; i += CONSUMERS * 4) {
    float4 const v = norm_read(w, in, i, true);
    float const s = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w)));
    (i < p.first ? square.x : square.y) += s;
  }
  square = make_float2(warp_sum(square.x), warp_sum(square.y));
  if (t % 32 == 0) {
    sums[t / 32] = square;
  }
  trace_staged(w);
  consumers_sync();
  square = make_float2(0.f, 0.f);
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    square.x += sums[i].x, square.y += sums[i].y;
  }
  float const first = rsqrtf(__fdividef(square.x, (float)p.first) + p.eps);
  float const second = p.second != 0 ? rsqrtf(__fdividef(square.y, (float)p.second) + p.eps) : 0.f;
#pragma unroll 1
  for (uint32_t i = p.offset + t; i < p.offset + p.len; i += CONSUMERS) {
    float v = word_wait(w, in, i);
    if (i < normed) {
      v = v * __ldg(norm + i) * (i < p.first ? first : second);
    }
    word_write(out, i, v);
  }
  consumers_sync(); // the sums are overwritten next
}

__device__ __forceinline__ void op_norm(Worker& w, StagedTask const& st) {
  amk_norm_params const p = *(amk_norm_params const*)st.task.params;
  consumers_sync(); // the scratch may hold sums of the task before
  for_seqs(w, [&] { norm_vector(w, st, p); });
  trace_multiplied(w);
  task_barrier(w);
}
#endif
