// The numbering of tasks that the task prefetcher and the consumers share. A task's number counts on from one step to the next and wraps
// at 2^32, after hours of decoding: every comparison is a difference.
#pragma once

constexpr uint32_t STAGED = 8; // tasks in shared memory at once

// Number of a program's first task. A test starts shortly before the wrap.
#ifndef AMK_FIRST_TASK
#define AMK_FIRST_TASK 0u
#endif

// Whether the prefetcher may overwrite the place of task `next`, with all tasks before `done` announced as done. Once task n is announced,
// every warp has finished those before n - 1, so the place of n - 1 may still be read.
__device__ constexpr bool may_stage(uint32_t next, uint32_t done) { return next - done <= STAGED - 3; }

// Whether task `number` has been staged, with all before `staged` there.
__device__ constexpr bool is_staged(uint32_t number, uint32_t staged) { return (int32_t)(staged - number) > 0; }
