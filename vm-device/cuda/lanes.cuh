// Lanes: the sessions that a step runs at once (decision 022). Every task is done for each of them; what belongs to one lies in its own copy
// of the scratch slots. In a kernel of one lane all of this is what it was without lanes.
#pragma once

static_assert(LANES == 1 || LANES == 2 || LANES == 4 || LANES == AMK_LANES_MAX, "rows of a product's left operand");
constexpr uint32_t LANE_TILES = AMK_LANE_TILES;

#if AMK_LANES > 1
constexpr uint32_t STEP_BYTES = sizeof(amk_step) + sizeof(amk_lanes);
static_assert(AMK_OFFSETOF(Shared, lanes) == AMK_OFFSETOF(Shared, step) + sizeof(amk_step), "both are copied as one");

__device__ __forceinline__ uint32_t lanes_running(Worker const& w) { return w.shared->lanes.lanes; }
// The same worker, at work for another lane.
__device__ __forceinline__ Worker in_lane(Worker const& w, uint32_t lane) {
  Worker other = w;
  other.lane = lane;
  return other;
}
__device__ __forceinline__ uint32_t lane_of(Worker const& w) { return w.lane; }
__device__ __forceinline__ uint32_t lane_token(Worker const& w) { return w.shared->lanes.token[w.lane]; }
__device__ __forceinline__ uint32_t lane_position(Worker const& w) { return w.shared->step.index + w.shared->lanes.position[w.lane]; }
__device__ __forceinline__ uint32_t lane_session(Worker const& w) { return w.shared->lanes.session[w.lane]; }
__device__ __forceinline__ uint32_t lane_logits_row(Worker const& w) { return w.lane * w.shared->program.logits_rows + w.shared->step.logits_row; }
// The run of a lane, part of its tags.
__device__ __forceinline__ uint32_t lane_run(Worker const& w) { return w.shared->lanes.runs >> 2 * w.lane & 3; }
// Where a slot is. The activations are there once for each lane.
__device__ __forceinline__ uint64_t slot_address(Worker const& w, ResolvedSlot const& s) {
  bool const own = s.kind == AMK_SLOT_TAGGED || s.kind == AMK_SLOT_PLAIN;
  return s.address + (own ? (uint64_t)w.lane * w.shared->program.lane_bytes : 0);
}
// The split that a task of `split` works on in a lane. Every rotation of a verified program verifies (ir/src/program/verify/together.rs).
__device__ __forceinline__ uint32_t lane_split(uint32_t split, uint32_t splits, uint32_t lane) { return (split + lane) % splits; }

// The lanes of an attention task are taken in turn from the one in which it has the first split: of short contexts this is the only one with keys,
// and nothing is in front of it.
__device__ __forceinline__ uint32_t first_lane(uint32_t split, uint32_t splits, uint32_t running) {
  uint32_t const lane = split == 0 ? 0 : splits - split;
  return lane < running ? lane : 0;
}

// All threads: `f` for each lane in turn.
template <typename F> __device__ __forceinline__ void for_lanes(Worker& w, F const& f) {
  consumers_sync(); // scratch may hold sums of the matvec in front
#pragma unroll 1
  for (w.lane = 0; w.lane < lanes_running(w); ++w.lane) {
    f();
  }
  w.lane = 0;
}

// One thread, when step `begun` begins: what the loader needs of it.
__device__ __forceinline__ void note_begun(Shared* sh, uint32_t begun) {
  uint32_t const at = begun % 2 * LANES;
#pragma unroll
  for (uint32_t i = 0; i < LANES; ++i) {
    flag_store(&sh->begun_position[at + i], sh->step.index + sh->lanes.position[i]);
    flag_store(&sh->begun_session[at + i], sh->lanes.session[i]);
  }
  flag_store(&sh->begun_lanes[begun % 2], sh->lanes.lanes);
}
__device__ __forceinline__ uint32_t begun_lanes(Shared* sh, uint32_t lap) { return flag_load(&sh->begun_lanes[lap % 2]); }
#else
constexpr uint32_t STEP_BYTES = sizeof(amk_step);

__device__ __forceinline__ uint32_t lane_of(Worker const&) { return 0; }
__device__ __forceinline__ uint32_t lane_token(Worker const& w) { return w.shared->step.token; }
__device__ __forceinline__ uint32_t lane_position(Worker const& w) { return w.shared->step.position; }
__device__ __forceinline__ uint32_t lane_session(Worker const& w) { return w.shared->step.session; }
__device__ __forceinline__ uint32_t lane_logits_row(Worker const& w) { return w.shared->step.logits_row; }
__device__ __forceinline__ uint32_t lane_run(Worker const&) { return 0; }
__device__ __forceinline__ uint64_t slot_address(Worker const&, ResolvedSlot const& s) { return s.address; }
__device__ __forceinline__ uint32_t lane_split(uint32_t split, uint32_t, uint32_t) { return split; }
__device__ __forceinline__ uint32_t first_lane(uint32_t, uint32_t, uint32_t) { return 0; }
template <typename F> __device__ __forceinline__ void for_lanes(Worker&, F const& f) { f(); }
__device__ __forceinline__ void note_begun(Shared* sh, uint32_t begun) {
  flag_store(&sh->begun_position[begun % 2], sh->step.position);
  flag_store(&sh->begun_session[begun % 2], sh->step.session);
}
__device__ __forceinline__ uint32_t begun_lanes(Shared*, uint32_t) { return 1; }
#endif
