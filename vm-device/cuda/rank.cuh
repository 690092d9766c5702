// Ranks of experts. One warp finds the largest logits, in two places: in the op `route`, for the weights, and in every worker, for its loader, which
// so waits for the logits and not for a route that is made of them.
#pragma once

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// Key whose order is that of f32 in total: NaN has a place in it too, so that no two experts have the same rank.
__device__ __forceinline__ uint32_t order_key(float v) {
  uint32_t const bits = __float_as_uint(v);
  return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}
// The inverse.
__device__ __forceinline__ float key_value(uint32_t key) { return __uint_as_float(key ^ ((uint32_t)((int32_t)~key >> 31) | 0x80000000u)); }

// How many experts a lane has, one after the other: a multiple of four, at most 32.
__device__ __forceinline__ uint32_t lane_experts(uint32_t experts) { return (experts + 127) / 128 * 4; }
static_assert(AMK_EXPERTS_MAX <= 32 * 32, "a lane has a bit for each of its experts");

// The greatest key of a lane so far, and its place among the lane's experts.
struct Leader {
  uint32_t key, at;
};
// Compares it with four keys from place `at` on, of which some are taken. Of equal ones the first leads.
__device__ __forceinline__ void lead(Leader& leader, uint4 keys, uint32_t taken, uint32_t at) {
  keys.x = taken & 1 ? 0 : keys.x, keys.y = taken & 2 ? 0 : keys.y, keys.z = taken & 4 ? 0 : keys.z, keys.w = taken & 8 ? 0 : keys.w;
  uint32_t const a = keys.x > keys.y ? keys.x : keys.y, b = keys.z > keys.w ? keys.z : keys.w, most = a > b ? a : b;
  if (most > leader.key) {
    leader = Leader{most, at + (keys.x == most ? 0 : keys.y == most ? 1 : keys.z == most ? 2 : 3)};
  }
}

// A warp: calls `chosen(rank, expert, key)` in one lane for each of the `slots` greatest keys, the greatest first; of equal ones the first expert's.
// Lanes have the experts in order, so the first lane of those with the greatest key is right. `head`: keys of a lane's first four experts;
// `keys(i)`: of the four from its i-th on. Zero, which no word with a tag gives, is the key of what is no expert.
template <typename K, typename C>
__device__ __forceinline__ void warp_rank(uint32_t lane, uint32_t experts, uint32_t slots, uint4 head, K const& keys, C const& chosen) {
  uint32_t const each = lane_experts(experts), own = 1u << lane, upto = own | (own - 1); // bits of this lane, and of those up to it
  uint32_t taken = 0;
#pragma unroll 1
  for (uint32_t rank = 0; rank < slots; ++rank) {
    Leader mine = {0, 0};
    lead(mine, head, taken, 0);
#pragma unroll 1
    for (uint32_t i = 4; i < each; i += 4) {
      lead(mine, keys(i), taken >> i, i);
    }
    uint32_t const most = __reduce_max_sync(~0u, mine.key);
    uint32_t const tied = __ballot_sync(~0u, mine.key == most);
    if ((tied & upto) == own) { // three times as fast as the number of the lowest bit
      taken |= 1u << mine.at;
      chosen(rank, lane * each + mine.at, most);
    }
  }
}

// Bits in which the tags of the first `wanted` of four words are not `tag`.
__device__ __forceinline__ uint32_t tags_missing(uint4 const& words, uint32_t wanted, uint32_t tag) {
  uint32_t missing = wanted > 0 ? words.x ^ tag : 0;
  missing |= wanted > 1 ? words.y ^ tag : 0;
  missing |= wanted > 2 ? words.z ^ tag : 0;
  missing |= wanted > 3 ? words.w ^ tag : 0;
  return missing & TAG_MASK;
}
// Keys of the first `wanted` of four words.
__device__ __forceinline__ uint4 words_keys(uint4 const& words, uint32_t wanted) {
  auto const key = [](uint32_t word) { return order_key(__uint_as_float(word & ~TAG_MASK)); };
  return make_uint4(wanted > 0 ? key(words.x) : 0, wanted > 1 ? key(words.y) : 0, wanted > 2 ? key(words.z) : 0, wanted > 3 ? key(words.w) : 0);
}

// A warp: waits for the logits of the step that has begun, and keeps the experts of the slots for the loader. All words are requested at once, since
// each trip to L2 is time in which nothing streams. Stops when the loader is to stop: the watchdog sets `dead` if the consumers wait too long for
// what it does not load. `seldom()` is called during a long wait. A tag is of this step or of one of the last few, each of which has
// written every word.
template <typename S> __device__ __forceinline__ void experts_find(Shared* sh, amk_routed const* routed, uint32_t lane, S const& seldom) {
  uint4 const head = load_u32x4(routed), middle = load_u32x4((char const*)routed + 16), tail = load_u32x4((char const*)routed + 32);
  uint32_t const experts = tail.x, each = lane_experts(experts), first = lane * each, mine = first < experts ? experts - first : 0;
  uint32_t const* const logits = (uint32_t const*)((uint64_t)head.y << 32 | head.x) + first;
  uint32_t const tag = flag_load(&sh->epoch) * AMK_TAG_RUNS & TAG_MASK;
  uint4 words = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (uint32_t look = 1;; ++look) {
    uint32_t missing = 0;
#pragma unroll 1
    for (uint32_t i = each; i > 0;) { // the first four last: they are kept
      i -= 4;
      if (i < mine) {
        words = load_u32x4(logits + i);
        missing |= tags_missing(words, mine - i, tag);
      }
    }
    if (!__any_sync(~0u, missing != 0)) {
      break;
    }
    if (look % SPINS_PER_LOOK == 0) { // every instruction between two looks makes the words arrive later
      if (__any_sync(~0u, flag_load(&sh->halt) != 0 || is_dead(sh))) {
        return;
      }
      seldom();
    }
  }
  auto const keys = [&](uint32_t i) { return i < mine ? words_keys(load_u32x4(logits + i), mine - i) : make_uint4(0, 0, 0, 0); };
  warp_rank(lane, experts, middle.w, words_keys(words, mine), keys, [&](uint32_t rank, uint32_t expert, uint32_t) { *(volatile uint16_t*)&sh->slot_expert[rank] = (uint16_t)expert; });
}

// A turn of the warp that ranks for the loader. Returns whether the loader has asked.
template <typename S> __device__ __forceinline__ bool experts_serve(Shared* sh, uint32_t lane, S const& seldom) {
  uint32_t const asked = __shfl_sync(~0u, flag_load(&sh->rank_asked), 0);
  if (asked == 0) {
    return false;
  }
  block_fence();
  experts_find(sh, (amk_routed const*)(sh->program.loads + asked), lane, seldom);
  block_fence();
  __syncwarp();
  if (lane == 0) {
    flag_store(&sh->rank_asked, 0);
  }
  __syncwarp(); // no lane asks again before
  return true;
}

// The loader: has the ranking warp find the experts of a load's slots. Returns false when the loader is to stop. What it writes orders the
// stages that it issues afterwards, so a consumer that has seen one of them may read the experts too.
__device__ __forceinline__ bool experts_wait(Shared* sh, amk_routed const* routed) {
  flag_store(&sh->rank_asked, (uint32_t)((uint64_t)routed - sh->program.loads)); // records lie behind the loads, so never zero
  while (flag_load(&sh->rank_asked) != 0) {
  }
  block_fence();
  return flag_load(&sh->halt) == 0 && !is_dead(sh);
}
#endif
