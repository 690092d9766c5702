// Page tables of the sessions' keys and values. Only this file turns a session into addresses.
//
// A layer's cache is [pages][2][kv_heads][AMK_KV_PAGE] rows of ROW_BYTES. A page has as many positions as one block of keys, or two of wide heads, so a
// copy by the loader that starts at a page never leaves it. amk_launch.pages lists the pages of each session in the order of its positions, as 16-bit words. The
// host writes a session's words between two of its commands, before it publishes the one that needs them; the device only reads them. Page
// zero belongs to no session and holds zeros: table words without a page contain it. docs/decisions/021-paged-key-value-caches.md.
#pragma once

constexpr uint32_t PAGE_KEYS = AMK_KV_PAGE;
static_assert(PAGE_KEYS % BLOCK_KEYS == 0 && PAGE_KEYS % TILE_KEYS == 0, "a block of keys lies in two pages at most");

// Index of a key among those of all sessions. `stride` is the table words per session: PAGE_KEYS indices per word.
__device__ __forceinline__ uint32_t paged_key(uint32_t session, uint32_t stride, uint32_t key) { return session * stride * PAGE_KEYS + key; }

// Byte offset of a key's row in `page` from the head's keys in page 0. `values` is the distance from a head's keys in a page to its values.
__device__ __forceinline__ uint64_t paged_row(uint32_t page, uint32_t values, uint32_t key) { return (uint64_t)page * (2 * values) + key % PAGE_KEYS * ROW_BYTES; }

// Number of `rows` rows from `key` on that are in its page; the rest is in the next page.
__device__ __forceinline__ uint32_t rows_of_page(uint32_t key, uint32_t rows) {
  uint32_t const left = PAGE_KEYS - key % PAGE_KEYS;
  return rows < left ? rows : left;
}

// Reads the page of a key from the tables.
__device__ __forceinline__ uint32_t page_ask(uint64_t pages, uint32_t key) {
  uint32_t const word = key / PAGE_KEYS, both = load_relaxed((uint32_t const*)pages + word / 2);
  return word % 2 != 0 ? both >> 16 : both & 0xffff;
}

// The loader's cache of the page tables during a step: lines of 16 bytes, direct-mapped by line number.
constexpr uint32_t PAGE_LINES = 8, LINE_KEYS = 8 * PAGE_KEYS;
struct PageLines {
  uint4 line[PAGE_LINES];
  uint32_t number[PAGE_LINES];
  uint32_t wrap;                // the step that they belong to
};

// Starts the copy of a key's line unless it is cached. Needs no register until the line is read.
__device__ __forceinline__ void line_ask(PageLines& p, uint64_t pages, uint32_t key) {
  uint32_t const number = key / LINE_KEYS, place = number % PAGE_LINES;
  if (p.number[place] != number) {
    p.number[place] = number;
    piece_copy(shared_address(&p.line[place]), (uint4 const*)pages + number, 16);
    pieces_group();
  }
}
__device__ __forceinline__ void lines_forget(PageLines& p, uint32_t wrap) {
  p.wrap = wrap;
#pragma unroll
  for (uint32_t i = 0; i < PAGE_LINES; ++i) {
    p.number[i] = AMK_NONE;
  }
}
// Called before a run of keys: requests the lines of its first block and of the next page, which that block may reach into.
__device__ __forceinline__ void lines_begin(PageLines& p, uint64_t pages, uint32_t key) {
#pragma unroll 1
  for (uint32_t i = 0; i < 2; ++i) {
    line_ask(p, pages, key + i * PAGE_KEYS);
  }
}
// Called before each block of the run: requests a line two blocks ahead and waits for it one block ahead. Does nothing for most blocks.
__device__ __forceinline__ void lines_ahead(PageLines& p, uint64_t pages, uint32_t key) {
  if (key / PAGE_KEYS % 8 >= 6) {
    pieces_wait<0>();
    line_ask(p, pages, key + 2 * PAGE_KEYS);
  }
}
// Returns the page of a key whose line is cached.
__device__ __forceinline__ uint32_t page_kept(PageLines const& p, uint32_t key) { return ((uint16_t const*)p.line)[key / PAGE_KEYS % (8 * PAGE_LINES)]; }
