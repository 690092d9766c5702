// Numbering of tasks, shared by the task prefetcher and the consumers. Numbers continue from one step to the next and wrap at 2^32, after
// hours of decoding, so every comparison is a difference.
#pragma once

constexpr uint32_t STAGED = 8; // tasks staged in shared memory at once

// Number of a program's first task. A test starts shortly before the wrap.
#ifndef AMK_FIRST_TASK
#define AMK_FIRST_TASK 0u
#endif

// Returns whether the prefetcher may overwrite the place of task `next` when all tasks before `done` are announced as done. Once task n is
// announced, every warp has finished those before n - 1, so the place of n - 1 may still be read.
__device__ constexpr bool may_stage(uint32_t next, uint32_t done) { return next - done <= STAGED - 3; }

// Returns whether task `number` has been staged, when all before `staged` have been.
__device__ constexpr bool is_staged(uint32_t number, uint32_t staged) { return (int32_t)(staged - number) > 0; }
