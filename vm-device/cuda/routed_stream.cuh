// The loader's part of a route: where the units of a load lie among the experts (amk_routed).
#pragma once

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// A loader's position among the slots of a load.
struct SlotWalk {
  uint64_t experts, expert_bytes; // address of the first expert, and bytes of each
  uint32_t segment, slots;        // as amk_routed has them
  uint32_t slot;                  // of the next unit
  uint32_t at;                    // of the next unit in its segment
  uint32_t unit;                  // first unit of the segment in its expert
};

// Bits in which the tags of the first `wanted` of four words are not `tag`.
__device__ __forceinline__ uint32_t tags_missing(uint4 const& words, uint32_t wanted, uint32_t tag) {
  uint32_t missing = words.x ^ tag;
  missing |= wanted > 1 ? words.y ^ tag : 0;
  missing |= wanted > 2 ? words.z ^ tag : 0;
  missing |= wanted > 3 ? words.w ^ tag : 0;
  return missing & TAG_MASK;
}
// Keeps the expert of a slot.
__device__ __forceinline__ void slot_keep(Shared* sh, uint32_t slot, uint32_t word, uint32_t last) {
  uint32_t const number = (uint32_t)__uint_as_float(word & ~TAG_MASK);
  *(volatile uint16_t*)&sh->slot_expert[slot] = (uint16_t)(number < last ? number : last);
}

// Waits for the route's words of the step that has begun, and keeps the experts of its slots; `last`: the last expert. All words are requested at once,
// since each trip to L2 is time in which nothing streams. Returns false when the loader is to stop: the watchdog sets `dead` if the consumers
// wait too long for what it does not load. A tag is of this step or of one of the last few, each of which has written every word.
__device__ __forceinline__ bool route_wait(Shared* sh, uint32_t const* route, uint32_t slots, uint32_t last) {
  uint32_t const tag = flag_load(&sh->epoch) * AMK_TAG_RUNS & TAG_MASK;
#pragma unroll 1
  for (uint32_t slot = 0; slot < slots && slot < AMK_SLOTS_MAX; slot += 8) {
    uint32_t const left = slots - slot, second = left > 4 ? 4 : 0; // without a second four, the first is loaded twice
    uint4 a = load_u32x4(route + slot), b = load_u32x4(route + slot + second);
    while ((tags_missing(a, left, tag) | tags_missing(b, left - second, tag)) != 0) {
      if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
        return false;
      }
      a = load_u32x4(route + slot), b = load_u32x4(route + slot + second);
    }
    slot_keep(sh, slot, a.x, last), slot_keep(sh, slot + 1, a.y, last), slot_keep(sh, slot + 2, a.z, last), slot_keep(sh, slot + 3, a.w, last);
    slot_keep(sh, slot + second, b.x, last), slot_keep(sh, slot + second + 1, b.y, last), slot_keep(sh, slot + second + 2, b.z, last), slot_keep(sh, slot + second + 3, b.w, last);
  }
  return true;
}

// Begins a load that follows a route: knows the experts of its slots then. Those of a layer's second load are the first one's. Returns false
// when the loader is to stop.
__device__ __forceinline__ bool slots_wait(Shared* sh, SlotWalk& walk, amk_routed const* routed, uint32_t size, uint32_t wrap, RouteRead& read) {
  uint4 const head = load_u32x4(routed), middle = load_u32x4((char const*)routed + 16), tail = load_u32x4((char const*)routed + 32);
  uint32_t const segment = middle.y, unit0 = middle.z, slots = middle.w;
  if (read.wrap != wrap || read.route != head.x) {
    if (!route_wait(sh, (uint32_t const*)((uint64_t)head.y << 32 | head.x), slots, tail.x - 1)) {
      return false;
    }
    read.wrap = wrap, read.route = head.x;
  }
  uint32_t const whole = unit0 / segment;
  walk = SlotWalk{(uint64_t)head.w << 32 | head.z, (uint64_t)middle.x * size, segment, slots, whole % slots, unit0 % segment, whole / slots * segment};
  return true;
}

// Units that lie one after the other from here on, at most `wanted`.
__device__ __forceinline__ uint32_t slot_units(SlotWalk const& walk, uint32_t wanted) {
  uint32_t const left = walk.segment - walk.at;
  return left < wanted ? left : wanted;
}
__device__ __forceinline__ uint64_t slot_address(Shared* sh, SlotWalk const& walk, uint32_t size) {
  return walk.experts + *(volatile uint16_t*)&sh->slot_expert[walk.slot] * walk.expert_bytes + (uint64_t)(walk.unit + walk.at) * size;
}
__device__ __forceinline__ void slot_step(SlotWalk& walk, uint32_t units) {
  walk.at += units;
  if (walk.at == walk.segment) {
    walk.at = 0;
    if (++walk.slot == walk.slots) {
      walk.slot = 0;
      walk.unit += walk.segment;
    }
  }
}
#endif
