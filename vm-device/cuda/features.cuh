// What only some models need. Without its feature, each function is the identity or what every other model has, so that their kernels do not
// change.
#pragma once

__device__ constexpr bool has_feature(uint32_t feature) { return (AMK_FEATURES >> feature & 1) != 0; }

// tanh x; 2 ulp or so. expf overflows to infinity, which gives 1.
__device__ __forceinline__ float tanh_fast(float x) {
  float const t = __expf(-2.f * fabsf(x));
  return copysignf(__fdividef(1.f - t, 1.f + t), x);
}

// The function between the halves of the MLP.
__device__ __forceinline__ float activated(float v, uint32_t activation) {
  if constexpr (has_feature(AMK_FEATURE_GELU_TANH)) {
    if (activation == AMK_ACTIVATION_GELU_TANH) {
      return 0.5f * v * (1.f + tanh_fast(0.7978845608028654f * fmaf(0.044715f * v * v, v, v)));
    }
  }
  return __fdividef(v, 1.f + __expf(-v));
}

// The product of an MLP's halves.
__device__ __forceinline__ float gated(float gate, float up, uint32_t activation, float limit) {
  if constexpr (has_feature(AMK_FEATURE_CLAMPED_SILU)) {
    if (activation == AMK_ACTIVATION_CLAMPED_SILU) {
      gate = fminf(gate, limit);
      return __fdividef(gate, 1.f + __expf(-1.702f * gate)) * (fminf(fmaxf(up, -limit), limit) + 1.f);
    }
  }
  return activated(gate, activation) * up;
}

// cap * tanh(v / cap); v itself if there is no cap.
__device__ __forceinline__ float capped(float v, float cap) { return cap != 0.f ? cap * tanh_fast(__fdividef(v, cap)) : v; }
__device__ __forceinline__ float logit_capped(float v, float cap) { return has_feature(AMK_FEATURE_LOGIT_CAP) ? capped(v, cap) : v; }

// Scores are in units of log 2, and their caps too.
__device__ __forceinline__ float score_capped(float v, float cap) { return has_feature(AMK_FEATURE_SCORE_CAP) ? capped(v, cap * 1.4426950408889634f) : v; }

__device__ __forceinline__ float embed_scaled(float v, float scale) { return has_feature(AMK_FEATURE_EMBED_SCALE) && scale != 0.f ? v * scale : v; }
