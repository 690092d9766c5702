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

// Begins a load that follows a route: knows the experts of its slots then. Those of a layer's second load are the first one's. Returns false
// when the loader is to stop.
__device__ __forceinline__ bool slots_wait(Shared* sh, SlotWalk& walk, amk_routed const* routed, uint32_t size) {
  uint4 const head = load_u32x4(routed), middle = load_u32x4((char const*)routed + 16), tail = load_u32x4((char const*)routed + 32);
  uint32_t const segment = middle.y, unit0 = middle.z, slots = middle.w, whole = unit0 / segment;
  walk = SlotWalk{(uint64_t)head.w << 32 | head.z, (uint64_t)middle.x * size, segment, slots, whole % slots, unit0 % segment, whole / slots * segment};
  return tail.y != 0 || experts_wait(sh, routed);
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
