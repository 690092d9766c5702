// Prefill: experts. Each token of a chunk chooses its own, with the ranks and weights of route.cuh. Then tokens are grouped by expert: a choice, a
// token's slot, has a place among the vectors that are multiplied, where an expert's follow one another. The products (prefill_gemm.cuh) take an
// expert's places as their tokens, and a token's sum takes its choices in the order of the slots, so results do not depend on the other tokens.
//
// Launches follow each other without the host: it knows how many choices there are, and room for all of them is set aside, not which experts
// they are of.
#pragma once

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
constexpr uint32_t PREFILL_WARPS = PREFILL_THREADS / 32;
// An expert's places begin with a multiple: the permutation of a vector's chunks goes by its place among eight.
constexpr uint32_t PLACES = 8;
// Words of shared memory that a token's warp has: keys of the logits, then the chosen logits.
__device__ __forceinline__ uint32_t route_keys(uint32_t experts) { return 32 * lane_experts(experts); }

// Ranks the experts of each token, a warp per token. Writes the numbers of the chosen experts and their weights by slot, and behind a token's weights
// that of the shared expert, if there is one: its logit follows those of the others.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_route(uint32_t* chosen, float* weights, float const* logits, uint32_t tokens, uint32_t stride,
                                                                              uint32_t experts, uint32_t slots, uint32_t scoring, uint32_t shared) {
  uint32_t const lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x * PREFILL_WARPS + warp, padded = route_keys(experts);
  if (token >= tokens) {
    return; // the whole warp
  }
  float const* const row = logits + (uint64_t)token * stride;
  uint32_t* const keys = (uint32_t*)prefill_memory + warp * (padded + AMK_SLOTS_MAX);
  float* const best = (float*)(keys + padded); // by slot
  for (uint32_t i = lane; i < padded; i += 32) {
    keys[i] = i < experts ? order_key(row[i]) : 0; // the least key pads: it comes before none
  }
  __syncwarp();
  uint32_t const* const mine = keys + lane * lane_experts(experts);
  auto const four = [&](uint32_t i) { return *(uint4 const*)(mine + i); };
  warp_rank(lane, experts, slots, four(0), four, [&](uint32_t rank, uint32_t expert, uint32_t key) {
    best[rank] = key_value(key);
    chosen[(uint64_t)token * slots + rank] = expert;
  });
  __syncwarp();
  uint32_t const among = scoring == AMK_SCORING_ALL ? experts : slots;
  float sum = 0.f;
  for (uint32_t i = lane; i < among; i += 32) {
    sum += __expf((scoring == AMK_SCORING_ALL ? key_value(keys[i]) : best[i]) - best[0]);
  }
  sum = warp_sum(sum);
  float* const out = weights + (uint64_t)token * (slots + shared);
  if (lane < slots) {
    out[lane] = chosen_weight(scoring, best[lane], best[0], sum);
  }
  if (lane < shared) {
    out[slots] = chosen_weight(AMK_SCORING_SIGMOID, row[experts], 0.f, 1.f);
  }
}

// Numbers the choices of an expert, a block per expert, in their order: each warp has as many choices, counts its own and adds those of the warps
// before it.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_rank(uint32_t* ranks, uint32_t* counts, uint32_t const* chosen, uint32_t choices) {
  uint32_t* const of_warps = (uint32_t*)prefill_memory;
  uint32_t const lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (choices + PREFILL_THREADS - 1) / PREFILL_THREADS * 32;
  uint32_t const* const from = chosen + warp * part;
  uint32_t const mine = warp * part < choices ? choices - warp * part : 0;
  uint32_t count = 0;
#pragma unroll 4
  for (uint32_t i = lane; i < part; i += 32) {
    count += i < mine && from[i] == blockIdx.x ? 1 : 0;
  }
  count = __reduce_add_sync(~0u, count);
  if (lane == 0) {
    of_warps[warp] = count;
  }
  __syncthreads();
  uint32_t rank = 0, all = 0;
  for (uint32_t i = 0; i < PREFILL_WARPS; ++i) {
    rank += i < warp ? of_warps[i] : 0;
    all += of_warps[i];
  }
  if (threadIdx.x == 0) {
    counts[blockIdx.x] = all;
  }
#pragma unroll 4
  for (uint32_t i = lane; i < part; i += 32) {
    bool const is = i < mine && from[i] == blockIdx.x;
    uint32_t const bits = __ballot_sync(~0u, is);
    if (is) {
      ranks[warp * part + i] = rank + __popc(bits & (1u << lane) - 1);
    }
    rank += __popc(bits);
  }
}

// One block: the first place of each expert, and the blocks of at most `block` of its tokens that the products take. A block of tokens is its
// expert, its first place and the end of the expert's places. `first_block` has a word more than there are experts.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_blocks(uint32_t* first_place, uint32_t* first_block, uint4* blocks, uint32_t const* counts,
                                                                               uint32_t experts, uint32_t block) {
  uint32_t* const all = (uint32_t*)prefill_memory;
  for (uint32_t e = threadIdx.x; e < experts; e += PREFILL_THREADS) {
    all[e] = counts[e];
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e <= experts; e += PREFILL_THREADS) {
    uint32_t place = 0, number = 0;
    for (uint32_t i = 0; i < e; ++i) {
      place += (all[i] + PLACES - 1) / PLACES * PLACES;
      number += (all[i] + block - 1) / block;
    }
    first_block[e] = number;
    if (e < experts) {
      first_place[e] = place;
      for (uint32_t token = 0; token < all[e]; token += block) {
        blocks[number++] = make_uint4(e, place + token, place + all[e], 0);
      }
    }
  }
}

// Copies each token's vector to the places of its choices, one block per token. `groups`: of 64 columns.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_gather(char* out, uint32_t* places, char const* x, uint32_t const* chosen, uint32_t const* ranks,
                                                                               uint32_t const* first_place, uint32_t slots, uint32_t groups, uint32_t pitch,
                                                                               uint32_t out_pitch) {
  uint32_t* const to = (uint32_t*)prefill_memory; // of its slots
  uint32_t const token = blockIdx.x;
  if (threadIdx.x < slots) {
    uint64_t const choice = (uint64_t)token * slots + threadIdx.x;
    to[threadIdx.x] = places[choice] = first_place[chosen[choice]] + ranks[choice];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < groups * 8; i += PREFILL_THREADS) {
    uint32_t const group = i / 8, chunk = i % 8;
    uint4 const v = *(uint4 const*)(x + ((uint64_t)group * pitch + token) * X_ROW_BYTES + (chunk ^ token % 8) * 16);
    for (uint32_t slot = 0; slot < slots; ++slot) {
      *(uint4*)(out + ((uint64_t)group * out_pitch + to[slot]) * X_ROW_BYTES + (chunk ^ to[slot] % 8) * 16) = v;
    }
  }
}

// Adds the products of a token's experts to its row of the residual stream, times their weights and in the order of the slots; then those of the
// shared expert, if there are any. One block per token. Of several GPUs each adds to its `columns` only, where all pointers begin.
#ifdef AMK_PARTS
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_combine(float* residual, float const* products, float const* shared, uint32_t const* places,
                                                                                float const* weights, uint32_t slots, uint32_t stride, uint32_t columns) {
  uint32_t const token = blockIdx.x, all = slots + (shared != nullptr ? 1 : 0);
  for (uint32_t e = threadIdx.x * 4; e < columns; e += PREFILL_THREADS * 4) {
#else
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_combine(float* residual, float const* products, float const* shared, uint32_t const* places,
                                                                                float const* weights, uint32_t slots, uint32_t stride) {
  uint32_t const token = blockIdx.x, all = slots + (shared != nullptr ? 1 : 0);
  for (uint32_t e = threadIdx.x * 4; e < stride; e += PREFILL_THREADS * 4) {
#endif
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (uint32_t slot = 0; slot < all; ++slot) {
      float const* const from = slot < slots ? products + (uint64_t)places[(uint64_t)token * slots + slot] * stride : shared + (uint64_t)token * stride;
      float4 const v = *(float4 const*)(from + e);
      float const w = weights[(uint64_t)token * all + slot];
      sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
    }
    float4* const to = (float4*)(residual + (uint64_t)token * stride + e);
    float4 const before = *to;
    *to = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
  }
}
#endif
