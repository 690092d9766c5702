// The addresses of pages.cuh as host C++: prints the source addresses of the loader's copies of runs of keys, row by row. The input file has
// the tables, then one run per line (session, first key, keys, bytes of the head). Compiled by vm-host/src/pages/tests.rs.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define AMK_WARPS 8
#define AMK_GROUP 1
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint32_t __fdividef(float a, float b) { return (uint32_t)(a / b); }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline uint32_t load_relaxed(uint32_t const* p) { return *p; }
// Shared memory is the single PageLines of this program. A copy takes effect at once, but is read only after `wait`.
extern char* shared_memory;
inline uint32_t shared_address(void const* p) { return (uint32_t)((char const*)p - shared_memory); }
struct Copy {
  uint32_t to;
  void const* from;
};
inline std::vector<Copy> asked;
inline void piece_copy(uint32_t to, void const* from, uint32_t) { asked.push_back(Copy{to, from}); }
inline void pieces_group() {}
template <int> inline void pieces_wait() {
  for (Copy const& c : asked) {
    std::memcpy(shared_memory + c.to, c.from, 16);
  }
  asked.clear();
}
// Of a kernel whose units have no scales behind them.
constexpr bool SCALED_UNITS = false;
#include "device.hpp"

static PageLines lines;
char* shared_memory = (char*)&lines;

// As loader_rows in stream.cuh.
static void rows_of(uint64_t head, uint32_t values, uint32_t key, uint32_t rows) {
  uint32_t const here = rows_of_page(key, rows);
  for (uint32_t i = 0; i < here; ++i) {
    std::printf("%llu ", (unsigned long long)(head + paged_row(page_kept(lines, key), values, key) + i * ROW_BYTES));
  }
  for (uint32_t i = 0; i < rows - here; ++i) {
    std::printf("%llu ", (unsigned long long)(head + paged_row(page_kept(lines, key + here), values, key + here) + i * ROW_BYTES));
  }
}

int main(int, char** names) {
  std::FILE* in = std::fopen(names[1], "r");
  uint32_t sessions = 0, stride = 0, values = 0;
  if (in == nullptr || std::fscanf(in, "%u %u %u", &sessions, &stride, &values) != 3) {
    return 2;
  }
  std::vector<uint4> memory(sessions * stride / 8 + 1);
  uint16_t* tables = (uint16_t*)memory.data();
  for (uint32_t i = 0; i < sessions * stride; ++i) {
    unsigned page = 0;
    if (std::fscanf(in, "%u", &page) != 1) {
      return 2;
    }
    tables[i] = (uint16_t)page;
  }
  lines_forget(lines, 0);
  uint32_t session = 0, first = 0, count = 0;
  unsigned long long head = 0;
  while (std::fscanf(in, "%u %u %u %llu", &session, &first, &count, &head) == 4) {
    uint32_t const key = paged_key(session, stride, first);
    lines_begin(lines, (uint64_t)tables, key);
    pieces_wait<0>();
    for (uint32_t at = 0; at < count; at += BLOCK_KEYS) {
      lines_ahead(lines, (uint64_t)tables, key + at);
      uint32_t const rows = block_stages(count - at < BLOCK_KEYS ? count - at : BLOCK_KEYS, 1u << 14).copied;
      for (uint32_t i = 0; i < rows; ++i) { // each by itself and all at once: the tables must agree
        if (page_kept(lines, key + at + i) != page_ask((uint64_t)tables, key + at + i)) {
          return 3;
        }
      }
      rows_of(head, values, key + at, rows);
    }
    std::printf("\n");
  }
  return 0;
}
