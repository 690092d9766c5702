// Compile-time knobs and their defaults. Each is set by -D from ir::schedule's kernel knobs and the model's element type.
#pragma once
#ifndef AMK_DTYPE // of the matrices and the key/value cache: 0 f32, 1 f16, 2 bf16
#define AMK_DTYPE 2
#endif
#ifndef AMK_HEAD_DIM // elements of a head
#define AMK_HEAD_DIM 64
#endif
#ifndef AMK_GROUP // query heads of a key/value head
#define AMK_GROUP 4
#endif
#ifndef AMK_QK_NORM // 1: queries and keys are normalised
#define AMK_QK_NORM 0
#endif
constexpr unsigned AMK_WARPS = 8; // consumer warps: ir::program::smem::CONSUMER_WARPS
#ifndef AMK_POLL_SLEEP_NS
#define AMK_POLL_SLEEP_NS 20
#endif
#ifndef AMK_EVICT_FIRST
#define AMK_EVICT_FIRST 0
#endif
#ifndef AMK_TRACE // 1: every task leaves an amk_record
#define AMK_TRACE 0
#endif
