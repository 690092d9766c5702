// Compile-time knobs and their defaults. Each is set by -D from ir::schedule's kernel knobs and the model's element type.
#pragma once
#ifndef AMK_DTYPE // element type that matrices are multiplied in
#define AMK_DTYPE AMK_DTYPE_BF16
#endif
#ifndef AMK_UNPACK // bit n: some matrix of the model has the AMK_UNPACK of number n
#define AMK_UNPACK 1
#endif
#ifndef AMK_HEAD_DIM // elements of a head
#define AMK_HEAD_DIM 64
#endif
#ifndef AMK_GROUP // query heads per key/value head
#define AMK_GROUP 4
#endif
#ifndef AMK_QK_NORM // 1: queries and keys are normalised
#define AMK_QK_NORM 0
#endif
#ifndef AMK_FEATURES // bit n: the model needs the AMK_FEATURE of number n
#define AMK_FEATURES 0
#endif
constexpr unsigned AMK_WARPS = AMK_CONSUMER_WARPS;
#ifndef AMK_CONSUMER_REGISTERS // registers per thread; set from the architecture's row (vm-device/src/lib.rs)
#define AMK_CONSUMER_REGISTERS 224
#define AMK_HELPER_REGISTERS 56
#endif
#ifndef AMK_POLL_SLEEP_NS
#define AMK_POLL_SLEEP_NS 20
#endif
#ifndef AMK_EVICT_FIRST
#define AMK_EVICT_FIRST 0
#endif
#ifndef AMK_HIDDEN // elements of the residual stream; then of all query heads, and of the hidden layer
#define AMK_HIDDEN 2048
#endif
#ifndef AMK_Q_WIDTH
#define AMK_Q_WIDTH 2048
#endif
#ifndef AMK_FFN
#define AMK_FFN 8192
#endif
#ifndef AMK_SHARES // bit n: some matrix of the model is taken in warp fragments of n units
#define AMK_SHARES 256
#endif
#ifndef AMK_SEQS // sessions that a step may run at once: 1, or 2, 4 or 8
#define AMK_SEQS 1
#endif
#ifndef AMK_DEVICES // devices that run a step together
#define AMK_DEVICES 1
#endif
#ifndef AMK_TRACE // 1: every task writes an amk_record; 2: it also spins as long as the host wrote into it
#define AMK_TRACE 0
#endif

static_assert(AMK_DEVICES >= 1 && AMK_DEVICES <= AMK_DEVICES_MAX, "a device has a number below");

// A number as a type, for code that is instantiated per value.
template <uint32_t N> struct Number {
  static constexpr uint32_t value = N;
};

// Whether some matrix is unpacked, and whether some matrix has units with scales behind them (unpack.cuh).
constexpr bool MIXED = AMK_UNPACK != 1u << AMK_UNPACK_NONE, SCALED_UNITS = AMK_UNPACK >> AMK_UNPACK_E4M3_G64 != 0;

// Whether vectors are staged as the high 16-bit half of each element, without the low one: as f16, where two halves of the longest vector would
// leave a short ring. A mixture's route would be another too often. Same as ir::program::Dims::one_half, which makes long vectors of bf16 f16.
constexpr uint32_t LONGEST_VECTOR = AMK_FFN > AMK_HIDDEN ? (AMK_FFN > AMK_Q_WIDTH ? AMK_FFN : AMK_Q_WIDTH) : (AMK_HIDDEN > AMK_Q_WIDTH ? AMK_HIDDEN : AMK_Q_WIDTH);
#if AMK_DTYPE == AMK_DTYPE_F16 && AMK_UNPACK == 1 // floats alone; the other form is theirs too, and stays so that measured kernels keep their text
constexpr bool ONE_HALF = (AMK_FEATURES >> AMK_FEATURE_ROUTE & 1) == 0 && LONGEST_VECTOR > AMK_TWO_HALVES_MAX;
#else
constexpr bool ONE_HALF = MIXED && (AMK_FEATURES >> AMK_FEATURE_ROUTE & 1) == 0 && LONGEST_VECTOR > AMK_TWO_HALVES_MAX;
#endif

// Whether registers are left over: the scales of codes and wide heads take them all, and what else is kept in some would be spilled.
constexpr bool SPARE_REGISTERS = !MIXED && AMK_HEAD_DIM <= 128;
