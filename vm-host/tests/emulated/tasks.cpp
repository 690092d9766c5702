// The task prefetcher and its consumers as host C++, with the device's own comparisons (tasks.cuh): the prefetcher stages as far ahead as it
// may, the consumers run one task at a time. Prints the number of the first task that ran with another's record, or "right".
// Compiled by vm-host/src/emulated_tests.rs.
#include <cstdint>
#include <cstdio>

#define __device__
#include "device.hpp"

int main() {
  uint32_t place[STAGED] = {}, next = AMK_FIRST_TASK, staged = AMK_FIRST_TASK, done = AMK_FIRST_TASK;
  for (uint32_t number = AMK_FIRST_TASK; number != AMK_FIRST_TASK + 64; ++number) {
    for (int turn = 0; turn < 16 && may_stage(next, done); ++turn) {
      place[next % STAGED] = next;
      staged = ++next;
    }
    if (!is_staged(number, staged) || place[number % STAGED] != number) {
      std::printf("%u\n", number);
      return 0;
    }
    done = number + 1;
  }
  std::printf("right\n");
  return 0;
}
