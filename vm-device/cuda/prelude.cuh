// Compile-time knobs and their defaults. Each is set by -D from ir::schedule's kernel knobs and the model's element type.
#pragma once
#ifndef AMK_DTYPE // of the matrices and the key/value cache: 0 f32, 1 f16, 2 bf16
#define AMK_DTYPE 2
#endif
#ifndef AMK_MMA // 1: tensor cores, 0: plain multiply-adds
#define AMK_MMA 0
#endif
#ifndef AMK_WARPS // consumer warps
#define AMK_WARPS 8
#endif
#ifndef AMK_UNROLL // units in flight per consumer warp
#define AMK_UNROLL 2
#endif
#ifndef AMK_POLL_SLEEP_NS
#define AMK_POLL_SLEEP_NS 20
#endif
#ifndef AMK_EVICT_FIRST
#define AMK_EVICT_FIRST 0
#endif
#ifndef AMK_KV_F32 // 1: the key/value cache holds f32, 0: f16
#define AMK_KV_F32 1
#endif
static_assert(AMK_DTYPE != 0 || AMK_MMA == 0, "the tensor cores multiply 16-bit weights");
