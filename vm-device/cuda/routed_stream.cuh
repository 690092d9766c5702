// The loader's part of a route: where the units of a load lie among the experts (amk_routed).
#pragma once

// The worker's list of loads. Recomputed once per run and not kept: the loader's registers are all taken.
__device__ __forceinline__ amk_load const* loader_list(Shared* sh) { return (amk_load const*)sh->program.loads + sh->queue.load0; }

#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// A loader's position among the slots of a load.
struct SlotWalk {
  uint64_t experts, expert_bytes; // address of the first expert, and bytes of each
  uint32_t segment, slots;        // as amk_routed has them
  uint32_t slot;                  // of the next unit
  uint32_t at;                    // of the next unit in its segment
  uint32_t unit;                  // first unit of the segment in its expert
};

// While the loader waits for a route it brings into L2 what comes behind the loads that the route decides, up to those of the next route: the ring
// cannot take it, since it is consumed in order, and memory would stand still. As much as the ring has; for each look at the route, which takes a
// trip to L2, so much that 132 workers need less than the bandwidth. Else the experts' bytes would queue behind it.
constexpr uint32_t L2_AHEAD_BYTES = 8192;

// Begins with load `next` of the list.
__device__ __forceinline__ void l2_ahead_begin(RouteWait& a, uint32_t next, uint32_t most) { a.next = next, a.most = most, a.bytes = 0, a.plain = 0; }

__device__ __forceinline__ void l2_ahead(Shared* sh, RouteWait& a) {
  if (a.bytes == 0) {
    if (a.next == sh->queue.loads) {
      return;
    }
    char const* const load = (char const*)loader_list(sh) + a.next * sizeof(amk_load);
    uint4 const run = load_u32x4(load);
    uint32_t const kind = run.w & 0xff, size = SCALED_UNITS ? load_u32x4(load + 16).y : AMK_UNIT_BYTES;
    a.next = kind == AMK_LOAD_ROUTED && a.plain != 0 ? sh->queue.loads : a.next + 1;
    if (kind == AMK_LOAD_WEIGHTS) {
      a.address = (uint64_t)run.y << 32 | run.x, a.bytes = run.z * size, a.plain = 1;
    }
  }
  uint32_t const left = a.bytes < a.most ? a.bytes : a.most, n = left < L2_AHEAD_BYTES ? left : L2_AHEAD_BYTES;
  if (n != 0) {
    prefetch_l2(a.address, n);
    a.address += n, a.bytes -= n, a.most -= n;
  }
}

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
__device__ __forceinline__ bool route_wait(Shared* sh, uint32_t const* route, uint32_t slots, uint32_t last, RouteWait& wait) {
  uint32_t const tag = flag_load(&sh->epoch) * AMK_TAG_RUNS & TAG_MASK;
#pragma unroll 1
  for (uint32_t slot = 0; slot < slots && slot < AMK_SLOTS_MAX; slot += 8) {
    uint32_t const left = slots - slot, second = left > 4 ? 4 : 0; // without a second four, the first is loaded twice
    uint4 a = load_u32x4(route + slot), b = load_u32x4(route + slot + second);
    while ((tags_missing(a, left, tag) | tags_missing(b, left - second, tag)) != 0) {
      if (flag_load(&sh->halt) != 0 || is_dead(sh)) {
        return false;
      }
      l2_ahead(sh, wait);
      a = load_u32x4(route + slot), b = load_u32x4(route + slot + second);
    }
    slot_keep(sh, slot, a.x, last), slot_keep(sh, slot + 1, a.y, last), slot_keep(sh, slot + 2, a.z, last), slot_keep(sh, slot + 3, a.w, last);
    slot_keep(sh, slot + second, b.x, last), slot_keep(sh, slot + second + 1, b.y, last), slot_keep(sh, slot + second + 2, b.z, last), slot_keep(sh, slot + second + 3, b.w, last);
  }
  return true;
}

// Begins a load that follows a route: knows the experts of its slots then. Those of a layer's second load are the first one's. Returns false
// when the loader is to stop.
__device__ __forceinline__ bool slots_wait(Shared* sh, SlotWalk& walk, amk_routed const* routed, uint32_t size, uint32_t wrap, RouteWait& wait) {
  uint4 const head = load_u32x4(routed), middle = load_u32x4((char const*)routed + 16), tail = load_u32x4((char const*)routed + 32);
  uint32_t const segment = middle.y, unit0 = middle.z, slots = middle.w;
  if (wait.wrap != wrap || wait.route != head.x) {
    if (!route_wait(sh, (uint32_t const*)((uint64_t)head.y << 32 | head.x), slots, tail.x - 1, wait)) {
      return false;
    }
    wait.wrap = wrap, wait.route = head.x;
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
