// What op_attention.cuh needs of the other files, for one sequence or several (batch.cuh) on one device. Include simt.hpp, tensor.hpp and amk_abi.h before.
#pragma once

constexpr uint32_t SEQS = AMK_SEQS, CONSUMERS = AMK_WARPS * 32;
constexpr bool SCALED_UNITS = false;
#define AMK_DEVICES 1
struct {
  struct {
    operator uint32_t() const { return fibers.running % THREADS_OF_WORKER; }
  } x;
} threadIdx;
struct ResolvedBuffer {
  uint64_t address;
  uint32_t kind, units;
};
struct Shared {
  amk_launch const* launch;
  amk_program program;
#if AMK_SEQS > 1
  amk_step step;
  amk_seqs seqs;
  alignas(16) float part[2][112][AMK_WARPS];
  uint32_t started_position[2 * SEQS], started_session[2 * SEQS], started_seqs[2];
#endif
  uint32_t epoch, halt, rank_asked; // these and the experts are named in rank.cuh, and not used here
  uint16_t slot_expert[AMK_SLOTS_MAX];
};
struct Worker {
  Shared* shared;
  char* x;
  char* ring;
  uint32_t thread, stage_bytes, stages;
#if AMK_SEQS > 1
  uint32_t seq;
#endif
};
struct StagedTask {
  amk_task task;
  ResolvedBuffer buffer[AMK_READS_STAGED + 2];
};
struct Cursor {
  uint32_t stage;
};
struct Words {
  uint32_t* at;
};
#if AMK_SEQS > 1
inline void flag_store(uint32_t* p, uint32_t v) { *p = v; }
inline uint32_t flag_load(uint32_t const* p) { return *p; }
inline void word_store(Words const&, uint32_t* p, uint32_t v) { *p = v; }
constexpr uint32_t REPLICATED = 0; // of several devices
inline bool is_flag_in_data(ResolvedBuffer const& s) { return s.kind == AMK_BUFFER_FLAG_IN_DATA; }
inline uint64_t buffer_address(Worker const& w, ResolvedBuffer const& s);
inline Words buffer_words(Worker const& w, ResolvedBuffer const& s) { return Words{(uint32_t*)buffer_address(w, s)}; }
#else
static uint32_t now; // position of the step
inline uint32_t seq_position(Worker const&) { return now; }
inline uint32_t seq_session(Worker const&) { return 0; }
inline uint32_t seq_of(Worker const&) { return 0; }
inline uint32_t seq_split(uint32_t split, uint32_t, uint32_t) { return split; }
inline uint32_t seqs_windows(Worker const&) { return 0; }
inline Words buffer_words(Worker const&, ResolvedBuffer const& s) { return Words{(uint32_t*)s.address}; }
template <typename F> void for_seqs(Worker&, F const& f) { f(); }
#endif
inline float word_value(Words const&, uint32_t v) { return __uint_as_float(v); }
inline float4 vec4_value(Words const&, uint4 v) { return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)); }
inline void word_write(Words const& s, uint32_t i, float v) { s.at[i] = __float_as_uint(v); }
inline void input_write(Words const& s, uint32_t i, float v) { word_write(s, i, v); }
template <uint32_t N> void vec4s_wait(Worker const&, Words const& s, uint32_t const (&at)[N], bool const (&wanted)[N], uint4 (&out)[N]) {
  for (uint32_t i = 0; i < N; ++i) {
    out[i] = wanted[i] ? load_u32x4(s.at + at[i]) : make_uint4(0, 0, 0, 0);
  }
}
template <typename T> float4 load_constant(T const* p) { return *(float4 const*)p; }
inline ResolvedBuffer aside(StagedTask const&) { return ResolvedBuffer{}; }
inline void cursor_pass(Worker const&, Cursor& c, uint32_t& passed, uint32_t to) {
  if (to > passed) {
    c.stage += to - passed, passed = to;
  }
}
inline char* cursor_land(Worker const& w, Cursor const& c) { return w.ring + c.stage * w.stage_bytes; }
inline void stage_given_back() {}
inline void trace_staged(Worker const&) {}
inline void trace_multiplied(Worker const&) {}
inline void task_barrier(Worker&) { consumers_sync(); }
inline void piece_copy(uint32_t to, void const* from, uint32_t bytes) {
  std::memset(prefill_memory + to, 0, 16);
  std::memcpy(prefill_memory + to, from, bytes);
}
inline void pieces_group() {}
template <int> inline void pieces_wait() {}
