// Cooperative sampler: all workers pick a token together. The worker that ends the step sends requests; the others, idle at that time,
// each process their part of the row. How and why: decision 017.
#pragma once

// Work that a request asks of a helper, on its part of the row.
enum SampleWork : uint32_t {
  SAMPLE_WORK_CHANGE, // rewrite it with penalty and bias, and find its best
  SAMPLE_WORK_COUNT,  // histogram of its tokens and their weights, by bucket
  SAMPLE_WORK_LIST,   // list its tokens of some buckets
  SAMPLE_WORK_WEIGH,  // sum the weights of its tokens that pass the filters
  SAMPLE_WORK_END,    // nothing more
};
struct alignas(16) SampleRequest {
  uint32_t what;
  uint32_t last;  // nonzero: the last request
  uint32_t asker; // the requesting worker
  float highest;  // highest logit of the row
  uint64_t logits;
  uint64_t limit; // the last rank and id that pass, or the first and the last bucket
  uint64_t least; // the least weight that passes
  uint64_t unused;
};
static_assert(sizeof(SampleRequest) == 48, "three words of 16 bytes");

// State in device memory that the workers share while a token is sampled. Requests are numbered, and each helper that has done its part adds
// one to `done`; the next request is sent only after all have.
struct CooperativeSampler {
  alignas(128) uint32_t number;
  alignas(128) SampleRequest ask;
  alignas(128) uint32_t done;
  alignas(128) uint32_t listed; // number of listed tokens
  alignas(128) uint64_t weight[BUCKETS];
  uint32_t count[BUCKETS];
  uint4 left[AMK_WORKERS_MAX]; // per helper: its best (value, token), or a weight (low, high)
};
static_assert(sizeof(CooperativeSampler) == AMK_SAMPLER_BYTES && alignof(CooperativeSampler) == AMK_SAMPLER_ALIGN, "the host allots it");

// Waits until a word of another worker reaches `need`. Pairs with word_publish in sampler_ask and counter_signal in sampler_help.
__device__ __forceinline__ void sampler_wait(Worker const& w, uint32_t const* word, uint32_t need) {
  while ((int32_t)(load_relaxed(word) - need) < 0) {
    if (is_dead(w.shared)) {
      return;
    }
    poll_pause();
  }
  acquire_release_fence();
}

__device__ __forceinline__ void settings_load(Worker const& w, SamplerScratch& d, amk_sampling const* settings) {
  if (w.thread < SAMPLING_WORDS) {
    ((uint4*)&d.settings)[w.thread] = load_u32x4((char const*)settings + w.thread * 16);
  }
  consumers_sync();
}

__device__ __forceinline__ void help_change(Worker const& w, SamplerScratch const& d, CooperativeSampler* c, float const* logits, uint32_t vocab, Span span, uint32_t helper) {
  amk_sampling const& s = d.settings;
  Changes const changes = {s.penalty != 1.f ? (uint32_t const*)s.seen : 0, s.bias_len != 0 ? (uint32_t const*)s.biased : 0, (amk_bias const*)s.bias, s.bias_len, s.penalty};
  Best const best = block_best(w, change_row(logits, vocab, span, changes, (float*)s.changed, w.thread));
  if (w.thread == 0) {
    store_u32x4(&c->left[helper], make_uint4(__float_as_uint(best.value), best.row, 0, 0));
  }
}

// Adds this part's histogram to the shared one.
__device__ __forceinline__ void buckets_share(Worker const& w, SamplerScratch const& d, CooperativeSampler* c) {
  for (uint32_t b = w.thread; b < BUCKETS; b += THREADS) {
    if (d.count[b] != 0) {
      add_relaxed(&c->count[b], d.count[b]);
      add_relaxed64(&c->weight[b], (uint64_t)d.high[b] << 32 | d.low[b]);
    }
  }
}

// Counts, lists or weighs. One loop over the tokens for all three, so that later requests of a step find its code in the cache.
__device__ __forceinline__ void help_visit(Worker const& w, SamplerScratch& d, CooperativeSampler* c, Row const& r, Span span, uint32_t what, uint64_t limit, uint64_t least, uint32_t helper) {
  uint32_t const from = (uint32_t)limit, to = (uint32_t)(limit >> 32); // buckets
  uint4* const list = (uint4*)d.settings.list;
  uint64_t sum = 0;
  buckets_clear(w, d);
  span_visit(r, span, w.thread, [&](uint32_t id, uint32_t logit, float t, uint64_t weight) {
    uint32_t const rank = rank_of(r, logit), bucket = bucket_of(t);
    if (what == SAMPLE_WORK_WEIGH) {
      sum += ((uint64_t)rank << ID_BITS | id) <= limit && weight >= least ? weight : 0;
    } else if (what == SAMPLE_WORK_COUNT) {
      bucket_add(d, bucket, weight);
    } else if (bucket >= from && bucket <= to) {
      uint32_t const at = claim(&c->listed);
      if (at < r.vocab) { // always, unless the device is leaving
        store_u32x4(list + at, make_uint4(rank, id, (uint32_t)weight, (uint32_t)(weight >> 32)));
      }
    }
  });
  sum = block_sum64(w, d, sum);
  if (what == SAMPLE_WORK_COUNT) {
    buckets_share(w, d, c);
  } else if (what == SAMPLE_WORK_WEIGH && w.thread == 0) {
    store_u32x4(&c->left[helper], make_uint4((uint32_t)sum, (uint32_t)(sum >> 32), 0, 0));
  }
}

// All threads of a helper: serves the requests after `number`, until the last one or until the device is leaving.
__device__ __forceinline__ void sampler_help(Worker const& w, CooperativeSampler* c, amk_sampling const* settings, uint32_t vocab, uint32_t worker, uint32_t workers, uint32_t number) {
  SamplerScratch& d = *(SamplerScratch*)&w.shared->part;
  settings_load(w, d, settings);
#pragma unroll 1
  for (;;) {
    ++number;
    if (w.thread == 0) {
      sampler_wait(w, &c->number, number);
      d.leaves = is_dead(w.shared);
    }
    consumers_sync();
    if (d.leaves != 0) {
      return;
    }
    uint4 const a = load_u32x4(&c->ask), b = load_u32x4((char const*)&c->ask + 16), e = load_u32x4((char const*)&c->ask + 32);
    uint32_t const helper = worker - (worker > a.z);
    Span const span = part_of(vocab, workers - 1, helper);
    uint64_t const logits = (uint64_t)b.y << 32 | b.x, least = (uint64_t)e.y << 32 | e.x;
    Row const r = {(float const*)logits, vocab, __uint_as_float(a.w), d.settings.scale};
    if (a.x == SAMPLE_WORK_CHANGE) {
      help_change(w, d, c, r.logits, vocab, span, helper);
    } else if (a.x != SAMPLE_WORK_END) {
      help_visit(w, d, c, r, span, a.x, (uint64_t)b.w << 32 | b.z, least, helper);
    }
    consumers_sync();
    if (w.thread == 0) {
      counter_signal(&c->done);
    }
    if (a.y != 0) {
      return;
    }
  }
}

// The requesting worker's state.
struct SampleRequester {
  CooperativeSampler* choice;
  uint32_t worker, helpers;
  uint32_t number; // of the last request
  uint32_t done;   // total of parts done by then
  bool waiting;    // the helpers wait for more requests
};

__device__ __forceinline__ void sampler_wake(Worker const& w); // op_sample.cuh: sends the others to sampler_help

// All threads: sends a request and waits until all helpers are done. Orders this worker's earlier stores before their work, and theirs after.
__device__ __forceinline__ void sampler_ask(Worker const& w, SampleRequester& a, SampleWork what, bool last, Row const& r, uint64_t limit, uint64_t least) {
  consumers_sync();
  ++a.number;
  a.done += a.helpers;
  if (w.thread == 0) {
    uint64_t const logits = (uint64_t)r.logits;
    store_u32x4(&a.choice->ask, make_uint4(what, last, a.worker, __float_as_uint(r.highest)));
    store_u32x4((char*)&a.choice->ask + 16, make_uint4((uint32_t)logits, (uint32_t)(logits >> 32), (uint32_t)limit, (uint32_t)(limit >> 32)));
    store_u32x4((char*)&a.choice->ask + 32, make_uint4((uint32_t)least, (uint32_t)(least >> 32), 0, 0));
    word_publish(&a.choice->number, a.number);
    if (!a.waiting) {
      sampler_wake(w);
    }
    sampler_wait(w, &a.choice->done, a.done);
  }
  a.waiting = !last;
  consumers_sync();
}

// Takes over the list that the helpers wrote, a part per thread; copies as much of it as fits to shared memory. Returns the rank of its first
// token, and in d.ranks the bits in which others differ from it.
__device__ __forceinline__ uint32_t list_take(Worker const& w, SamplerScratch& d, List& l, uint32_t tokens) {
  uint32_t const rank = load_u32x4(l.far).x;
  if (w.thread == 0) {
    d.ranks = 0;
  }
  consumers_sync();
  l.len = tokens > w.thread ? (tokens - w.thread + THREADS - 1) / THREADS : 0;
  uint32_t ranks = 0;
#pragma unroll 4
  for (uint32_t i = w.thread; i < tokens; i += THREADS) {
    uint4 const v = load_u32x4(l.far + i);
    ranks |= v.x ^ rank;
    if (i < l.fits) {
      l.near[i] = v;
    }
  }
  block_or(&d.ranks, ranks);
  consumers_sync();
  return rank;
}

// Loads the helpers' histogram; returns the total weight.
__device__ __forceinline__ uint64_t buckets_take(Worker const& w, SamplerScratch& d, CooperativeSampler const* c) {
  uint64_t sum = 0;
  for (uint32_t b = w.thread; b < BUCKETS; b += THREADS) {
    d.count[b] = load_relaxed(&c->count[b]);
    d.low[b] = load_relaxed((uint32_t const*)&c->weight[b]);
    d.high[b] = load_relaxed((uint32_t const*)&c->weight[b] + 1);
    sum += (uint64_t)d.high[b] << 32 | d.low[b];
  }
  return block_sum64(w, d, sum);
}
__device__ __forceinline__ void buckets_forget(Worker const& w, CooperativeSampler* c) {
  for (uint32_t b = w.thread; b < BUCKETS; b += THREADS) {
    store_relaxed(&c->count[b], 0);
    store_relaxed((uint32_t*)&c->weight[b], 0);
    store_relaxed((uint32_t*)&c->weight[b] + 1, 0);
  }
}

// The result of the filters by rank.
struct Kept {
  uint64_t limit;  // the last rank and id that pass
  uint64_t weight; // total weight of those
  bool listed;     // they are on the list
};

constexpr uint32_t LIST_WISH = 2048; // tokens that a list search goes through quickly

// Has the helpers list the tokens among which the last one that passes is searched. If all that pass are a few buckets' tokens, those are
// listed and no further request is needed; else only those of its bucket. False if every token passes. `before`: weight before the listed ones.
__device__ __forceinline__ bool list_likeliest(Worker const& w, SamplerScratch& d, SampleRequester& a, List& l, Row const& r, Sought& sought, Kept& kept, bool first, uint64_t& before) {
  uint64_t const total = buckets_take(w, d, a.choice);
  if (first) {
    kept.weight = total;
    sought.need = sought.by_weight ? share_of(total, d.settings.share) : sought.need;
  }
  Bucket const b = bucket_find(w, d, sought.by_weight, sought.need);
  uint32_t const to = b.found ? b.bucket : BUCKETS - 1;
  uint64_t tokens = 0;
  for (uint32_t i = w.thread; i <= to; i += THREADS) {
    tokens += d.count[i];
  }
  kept.listed = block_sum64(w, d, tokens) <= LIST_WISH && first;
  if (!b.found && !kept.listed) {
    return false;
  }
  if (w.thread == 0) {
    store_relaxed(&a.choice->listed, 0);
  }
  sampler_ask(w, a, SAMPLE_WORK_LIST, kept.listed, r, (uint64_t)to << 32 | (kept.listed ? 0 : to), 0);
  uint32_t const listed = load_relaxed(&a.choice->listed), rank = list_take(w, d, l, listed < r.vocab ? listed : r.vocab);
  uint32_t const bits = bits_of(d.ranks);
  sought.bits = ID_BITS + bits;
  sought.prefix = (uint64_t)(bits < 32 ? rank >> bits << bits : 0) << ID_BITS;
  before = kept.listed ? 0 : b.weight_before;
  sought.need -= kept.listed ? 0 : b.before;
  return true;
}

// Lists the tokens of a helper's part that pass.
__device__ __forceinline__ void list_span(Worker const& w, List& l, Row const& r, Span span, Kept const& kept, uint64_t least) {
  l.len = 0;
  span_visit(r, span, w.thread, [&](uint32_t id, uint32_t logit, float, uint64_t weight) {
    uint32_t const rank = rank_of(r, logit);
    if (((uint64_t)rank << ID_BITS | id) <= kept.limit && weight >= least) {
      list_add(l, w.thread, Listed{0, id - span.first, (uint32_t)weight, (uint32_t)(weight >> 32)});
    }
  });
}

// Prepares the draw: among the listed tokens, or among the weights of the helpers' parts, which it puts on the list. Returns true for parts.
__device__ __forceinline__ bool draw_begin(Worker const& w, SamplerScratch& d, SampleRequester& a, List& l, Row const& r, Sought& sought, Kept& kept, uint64_t least, uint64_t bits) {
  sought = Sought{true, true, kept.limit, least, 0, bits_of(r.vocab - 1), 0};
  if (!kept.listed) {
    sampler_ask(w, a, SAMPLE_WORK_WEIGH, true, r, kept.limit, least);
    l.len = 0;
    uint64_t sum = 0;
    if (w.thread < a.helpers) { // there are at most as many helpers as threads
      uint4 const v = load_u32x4(&a.choice->left[w.thread]);
      list_add(l, w.thread, Listed{0, w.thread, v.x, v.y});
      sum = (uint64_t)v.y << 32 | v.x;
    }
    kept.weight = block_sum64(w, d, sum);
    sought.limit = ~0ull, sought.least = 1, sought.bits = bits_of(a.helpers);
  } else if (least > 1) {
    kept.weight = list_sum(w, d, l, sought);
  }
  sought.need = __umul64hi(bits, kept.weight) + 1;
  return !kept.listed;
}

// Top-k, then top-p, then the draw: from the list, or first by the weights of the helpers' parts and then among one part's tokens. All
// searches are one call site, so that its code is cold only once.
__device__ __forceinline__ uint32_t draw(Worker const& w, SamplerScratch& d, SampleRequester& a, List& l, Row const& r, uint64_t bits) {
  uint64_t const share = d.settings.share, least = d.settings.least > 1 ? d.settings.least : 1;
  uint32_t const top_k = d.settings.top_k;
  bool const nucleus = share < 1ull << 32, filtered = top_k != 0 || nucleus;
  Sought sought = {false, top_k == 0, ~0ull, 1, top_k, 0, 0};
  Kept kept = {~0ull, 0, false};
  bool first = true, parts = false;
  uint32_t id = 0;
  if (filtered) {
    buckets_forget(w, a.choice);
    sampler_ask(w, a, SAMPLE_WORK_COUNT, false, r, 0, 0);
  }
#pragma unroll 1
  for (;; first = false) {
    uint64_t before = 0;
    bool seek = true;
    if (!sought.by_id && !kept.listed) {
      seek = filtered && list_likeliest(w, d, a, l, r, sought, kept, first, before);
    }
    Found found = {};
    if (seek) {
      found = list_find(w, d, l, sought);
    }
    if (parts) {
      Span const span = part_of(r.vocab, a.helpers, (uint32_t)found.key);
      id = span.first;
      list_span(w, l, r, span, kept, least);
      sought.need -= found.before;
      sought.bits = bits_of(span.end - span.first);
      parts = false;
      continue;
    }
    if (sought.by_id) {
      return id + (uint32_t)found.key;
    }
    if (seek) {
      kept.limit = found.there ? found.key : kept.limit;
      kept.weight = before + found.upto;
    }
    if (!sought.by_weight && nucleus) {
      sought.by_weight = true;
      sought.need = share_of(kept.weight, share);
      sought.limit = kept.limit;
      continue;
    }
    parts = draw_begin(w, d, a, l, r, sought, kept, least, bits);
  }
}

// The token for `position`; called and returned in all threads of the requesting worker. AMK_NONE if every token is banned. `highest` is the
// candidate of the unchanged row. The settings are in d.
__device__ __forceinline__ uint32_t sample_row(Worker const& w, SamplerScratch& d, SampleRequester& a, float const* logits, Best highest, uint32_t vocab, uint32_t position) {
  amk_sampling const& s = d.settings;
#if AMK_MASKS
  bool const greedy = (s.greedy & 1) != 0;
#else
  bool const greedy = s.greedy != 0;
#endif
  Row r = {logits, vocab, highest.value, s.scale};
  // An infinite logit counts as the greatest number; rewriting the row stores it so.
  if (s.penalty != 1.f || s.bias_len != 0 || highest.value > GREATEST_F32) {
    sampler_ask(w, a, SAMPLE_WORK_CHANGE, greedy, r, 0, 0);
    highest = Best{-__int_as_float(0x7f800000), AMK_NONE};
    for (uint32_t i = w.thread; i < a.helpers; i += THREADS) {
      uint4 const v = load_u32x4(&a.choice->left[i]);
      highest = better(highest, Best{__uint_as_float(v.x), v.y});
    }
    highest = block_best(w, highest);
    r.logits = (float const*)s.changed;
    r.highest = highest.value;
  }
  bool const none = !(highest.value >= -GREATEST_F32);
  if (none || greedy) {
    if (a.waiting) {
      sampler_ask(w, a, SAMPLE_WORK_END, true, r, 0, 0);
    }
    return none ? AMK_NONE : highest.row;
  }
  List l = {(uint4*)w.x, (uint4*)s.list, w.shared->program.x_bytes / 16, 0};
  return draw(w, d, a, l, r, philox_bits(s.seed, position));
}
