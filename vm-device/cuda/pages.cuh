// Where a session's keys and values are. Here and nowhere else a session becomes addresses.
//
// A layer's cache is [pages][2][kv_heads][AMK_KV_PAGE][head_dim]; a page has as many positions as a block of keys, so a copy of the loader that
// begins with a page never leaves it. amk_launch.pages names the pages of each session in the order of its positions, in words of 16 bits. The
// host writes a session's words between two of its commands, before it publishes the one that needs them; the device only reads them. Page
// zero is nobody's and holds zeros: a word that names no page of the session names that one. docs/decisions/021-paged-key-value-caches.md.
#pragma once

constexpr uint32_t PAGE_KEYS = AMK_KV_PAGE;
static_assert(PAGE_KEYS == BLOCK_KEYS && PAGE_KEYS % TILE_KEYS == 0, "a block of keys lies in two pages at most");

// A key's number among those of all sessions, `stride` being the words of a session: PAGE_KEYS numbers to a word.
__device__ __forceinline__ uint32_t paged_key(uint32_t session, uint32_t stride, uint32_t key) { return session * stride * PAGE_KEYS + key; }

// Bytes from a head's keys in page 0 to the row of such a key, which is in `page`; `values` is the distance of a page's keys of a head from its values.
__device__ __forceinline__ uint64_t paged_row(uint32_t page, uint32_t values, uint32_t key) { return (uint64_t)page * (2 * values) + key % PAGE_KEYS * ROW_BYTES; }

// How many of `rows` rows from a key on are in its page; the rest begins the next.
__device__ __forceinline__ uint32_t rows_of_page(uint32_t key, uint32_t rows) {
  uint32_t const left = PAGE_KEYS - key % PAGE_KEYS;
  return rows < left ? rows : left;
}

// The page of a key, out of the tables.
__device__ __forceinline__ uint32_t page_ask(uint64_t pages, uint32_t key) {
  uint32_t const word = key / PAGE_KEYS, both = load_relaxed((uint32_t const*)pages + word / 2);
  return word % 2 != 0 ? both >> 16 : both & 0xffff;
}

// What the loader has of the tables in the step that it is in: lines of 16 bytes, each in the place that its number gives it.
constexpr uint32_t PAGE_LINES = 8, LINE_KEYS = 8 * PAGE_KEYS;
struct PageLines {
  uint4 line[PAGE_LINES];
  uint32_t number[PAGE_LINES];
  uint32_t wrap;                // the step that they are of
  uint32_t key, count, rounds; // where the run of keys begins that is being brought, how long it is, and how often it is to come still
};

// Has a key's line brought, if it is not there. Needs no register until it is looked at.
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
// Before the blocks of a run of keys that begins at one: the lines of the first block and of what it may have of the next page are there then.
__device__ __forceinline__ void lines_begin(PageLines& p, uint64_t pages, uint32_t key) {
#pragma unroll 1
  for (uint32_t i = 0; i < 2; ++i) {
    line_ask(p, pages, key + i * PAGE_KEYS);
  }
}
// Before each block of the run: a line is asked for two blocks ahead, and waited for one ahead. Most blocks have nothing to do here.
__device__ __forceinline__ void lines_ahead(PageLines& p, uint64_t pages, uint32_t key) {
  if (key / PAGE_KEYS % 8 >= 6) {
    pieces_wait<0>();
    line_ask(p, pages, key + 2 * PAGE_KEYS);
  }
}
// The page of a key whose line is there.
__device__ __forceinline__ uint32_t page_kept(PageLines const& p, uint32_t key) { return ((uint16_t const*)p.line)[key / PAGE_KEYS % (8 * PAGE_LINES)]; }
