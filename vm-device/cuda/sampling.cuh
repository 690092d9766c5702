// Building blocks of sampling, as decision 015 defines it and `ir::sampling` computes it: weights, histograms, lists. The division of work is in
// cooperative_sampler.cuh.
//
// The result does not depend on the number or order of workers and threads: sums are of integers, and searches count. There is no sort:
// a number is found digit by digit, from a histogram of the tokens that share the digits found so far.
#pragma once

constexpr uint32_t DIGIT_BITS = 9, BUCKETS = 1u << DIGIT_BITS;
constexpr uint32_t ID_BITS = 22;
static_assert(AMK_SAMPLED_VOCAB_MAX == 1u << ID_BITS, "a token fits behind its rank");
constexpr uint32_t THREADS = AMK_WARPS * 32;
constexpr uint32_t SAMPLING_WORDS = sizeof(amk_sampling) / 16;
constexpr float GREATEST_F32 = 3.402823466e38f;

// A token that may be drawn. Rank: how far its logit is below the highest, in steps of an f32; equal logits have equal ranks.
struct alignas(16) Listed {
  uint32_t rank, id, low, high;
};

// Data that the threads of a worker share while sampling, in shared memory that is free at the end of a step.
struct SamplerScratch {
  uint32_t count[BUCKETS], low[BUCKETS], high[BUCKETS]; // tokens and their weight, by digit or bucket
  amk_sampling settings;
  uint64_t sums[AMK_WARPS];
  uint32_t counts[AMK_WARPS];
  uint64_t before, weight_before, weight, key; // result of the last digit
  uint32_t bucket, alone;
  uint32_t ranks;  // the bits in which listed tokens' ranks differ
  uint32_t leaves; // `dead` as one thread saw it
};
static_assert(sizeof(SamplerScratch) <= sizeof(Shared::part), "the sums of products are not needed any more");

// A row of logits, after penalty and bias. NaN fails every comparison and weighs nothing.
struct Row {
  float const* logits;
  uint32_t vocab;
  float highest, scale;
};

// A range of neighbouring tokens of a row; the first is a multiple of four.
struct Span {
  uint32_t first, end;
};
__device__ __forceinline__ uint32_t part_tokens(uint32_t vocab, uint32_t helpers) { return ((vocab + helpers - 1) / helpers + 3) / 4 * 4; }
__device__ __forceinline__ Span part_of(uint32_t vocab, uint32_t helpers, uint32_t helper) {
  uint32_t const each = part_tokens(vocab, helpers), first = helper * each < vocab ? helper * each : vocab;
  return Span{first, vocab - first < each ? vocab : first + each};
}

// Philox 4x32-10: the 64 random bits of a position under a seed. Same as ir/src/sampling/philox.rs.
__device__ __forceinline__ uint64_t philox_bits(uint64_t seed, uint32_t position) {
  uint32_t word[4] = {position, 0, 0, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
#pragma unroll 1
  for (uint32_t round = 0; round < 10; ++round) {
    uint64_t const a = (uint64_t)word[0] * 0xd2511f53u, b = (uint64_t)word[2] * 0xcd9e8d57u;
    word[0] = (uint32_t)(b >> 32) ^ word[1] ^ key[0];
    word[1] = (uint32_t)b;
    word[2] = (uint32_t)(a >> 32) ^ word[3] ^ key[1];
    word[3] = (uint32_t)a;
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
  return (uint64_t)word[1] << 32 | word[0];
}

constexpr float LIGHTEST = -41.f; // at this distance or farther the weight is zero

// The mantissa of 2^t in 24 binary places and what it is halved by, for t in [LIGHTEST, 0]. Same as ir/src/sampling/weight.rs, bit for
// bit, without its slow conversions: adding 3 * 2^22 and rounding up leaves the whole part in the lowest bits, and the bits of a number
// just below one are its mantissa.
struct Power {
  uint32_t mantissa, halvings;
};
__device__ __forceinline__ Power power_of_two(float t) {
  float const base = 12582912.f, whole = __fadd_ru(t, base);
  float const f = __fsub_rn(t, __fsub_rn(whole, base)); // exact: in (-1, 0]
  float p = __uint_as_float(0x38f1012eu);
  p = __fmaf_rn(p, f, __uint_as_float(0x3aa94c24u));
  p = __fmaf_rn(p, f, __uint_as_float(0x3c1d3ce2u));
  p = __fmaf_rn(p, f, __uint_as_float(0x3d635329u));
  p = __fmaf_rn(p, f, __uint_as_float(0x3e75fdd4u));
  p = __fmaf_rn(p, f, __uint_as_float(0x3f317218u));
  p = __fmaf_rn(p, f, 1.f);
  return Power{__float_as_uint(p) - 0x3e800000u, __float_as_uint(base) - __float_as_uint(whole)}; // p is in [0.5, 1]
}
// Weight of a token, in 40 binary places.
__device__ __forceinline__ uint64_t token_weight(float t) {
  Power const p = power_of_two(t);
  return (uint64_t)p.mantissa << 16 >> p.halvings;
}
// Distance of a logit below the highest, in octaves, clamped to LIGHTEST, where the weight is zero.
__device__ __forceinline__ float distance(Row const& r, float logit) { return fmaxf(__fmul_rn(__fsub_rn(logit, r.highest), r.scale), LIGHTEST); }

// Maps an f32 to an integer with the same order; both zeros are equal.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t const bits = __float_as_uint(__fadd_rn(x, 0.f));
  return (int32_t)bits < 0 ? ~bits : bits | 0x80000000u;
}

// Loads four neighbouring logits.
__device__ __forceinline__ uint4 vec4_load(float const* logits, uint32_t vocab, uint32_t id) {
  uint32_t const banned = 0xff800000u;
  uint4 q = make_uint4(banned, banned, banned, banned);
  if (id >= vocab) {
    return q;
  }
  uint32_t const* p = (uint32_t const*)logits + id;
  if (vocab % 4 == 0) {
    return load_u32x4(p);
  }
  q.x = load_relaxed(p); // rows are not aligned
  q.y = id + 1 < vocab ? load_relaxed(p + 1) : banned;
  q.z = id + 2 < vocab ? load_relaxed(p + 2) : banned;
  q.w = id + 3 < vocab ? load_relaxed(p + 3) : banned;
  return q;
}

// Buckets divide the distance, so every row has its tokens in many of them; ranks are steps of a float, nearly all in a few octaves. Buckets
// are small where filters end: no more than a thousand or two of a flat row's tokens are in one.
constexpr float NEAR_OCTAVES = 16.f, NEAR_BUCKETS = 28.f, FAR_BUCKETS = 2.5f; // buckets per octave
static_assert(NEAR_OCTAVES * NEAR_BUCKETS + (-LIGHTEST - NEAR_OCTAVES) * FAR_BUCKETS < BUCKETS, "every weight has a bucket");
__device__ __forceinline__ uint32_t bucket_of(float t) {
  float const near = __fmul_rn(fminf(-t, NEAR_OCTAVES), NEAR_BUCKETS), far = __fmul_rn(fmaxf(__fsub_rn(-t, NEAR_OCTAVES), 0.f), FAR_BUCKETS);
  return (uint32_t)__fadd_rn(near, far);
}

// Visits a span once: calls body(id, logit, distance, weight) for the tokens whose weight is not zero.
template <typename Body> __device__ __forceinline__ void span_visit(Row const& r, Span span, uint32_t thread, Body const& body) {
#pragma unroll 1
  for (uint32_t id = span.first + thread * 4; id < span.end; id += THREADS * 4) {
    uint4 const q = vec4_load(r.logits, r.vocab, id);
    uint32_t const logit[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      float const t = distance(r, __uint_as_float(logit[k]));
      uint64_t const weight = token_weight(t);
      if (weight > 0) {
        body(id + k, logit[k], t, weight);
      }
    }
  }
}
__device__ __forceinline__ uint32_t rank_of(Row const& r, uint32_t logit) { return ordered(r.highest) - ordered(__uint_as_float(logit)); }

// Adds a token to the histogram.
__device__ __forceinline__ void bucket_add(SamplerScratch& d, uint32_t b, uint64_t weight) {
  uint32_t const low = (uint32_t)weight;
  block_add(&d.count[b], 1);
  uint32_t const old = block_add(&d.low[b], low);
  uint32_t const high = (uint32_t)(weight >> 32) + (old + low < old);
  if (high != 0) {
    block_add(&d.high[b], high);
  }
}
__device__ __forceinline__ void buckets_clear(Worker const& w, SamplerScratch& d) {
  for (uint32_t b = w.thread; b < BUCKETS; b += THREADS) {
    d.count[b] = d.low[b] = d.high[b] = 0;
  }
  consumers_sync();
}

// Sum over a warp, in three parts whose sums fit into words. The total is below 2^62.
__device__ __forceinline__ uint64_t warp_sum64(uint64_t v) {
  uint32_t const mask = (1u << 26) - 1;
  uint64_t const low = __reduce_add_sync(~0u, (uint32_t)v & mask), middle = __reduce_add_sync(~0u, (uint32_t)(v >> 26) & mask), high = __reduce_add_sync(~0u, (uint32_t)(v >> 52));
  return low + (middle << 26) + (high << 52);
}

// Sum over all threads, returned in all of them.
__device__ __forceinline__ uint64_t block_sum64(Worker const& w, SamplerScratch& d, uint64_t v) {
  v = warp_sum64(v);
  if (w.thread % 32 == 0) {
    d.sums[w.thread / 32] = v;
  }
  consumers_sync();
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    sum += d.sums[i];
  }
  consumers_sync();
  return sum;
}

// Changes to the logits; zero where there are none.
struct Changes {
  uint32_t const *seen, *biased;
  amk_bias const* bias;
  uint32_t bias_len;
  float penalty;
};

// The bias of a token, zero if it has none.
__device__ __forceinline__ float bias_of(Changes const& c, uint32_t id) {
  uint32_t low = 0, high = c.bias_len;
  while (low + 1 < high) {
    uint32_t const middle = (low + high) / 2;
    (load_relaxed(&c.bias[middle].token) <= id ? low : high) = middle;
  }
  return __uint_as_float(load_relaxed((uint32_t const*)&c.bias[low].value));
}

// Writes a span of the row with penalty and bias to `changed`, NaN becoming a ban. Returns its highest logit, the first of equals, among this
// thread's tokens.
__device__ __forceinline__ Best change_row(float const* logits, uint32_t vocab, Span span, Changes const& c, float* changed, uint32_t thread) {
  Best best = {-__int_as_float(0x7f800000), AMK_NONE};
#pragma unroll 1
  for (uint32_t id = span.first + thread * 4; id < span.end; id += THREADS * 4) {
    uint4 const q = vec4_load(logits, vocab, id);
    uint32_t const seen = c.seen != 0 ? load_relaxed(c.seen + id / 32) >> id % 32 & 15 : 0;
#if AMK_MASKS
    uint32_t const biased = c.biased != 0 ? host_load(c.biased + id / 32) >> id % 32 & 15 : 0; // of a mask, which the host has just written
#else
    uint32_t const biased = c.biased != 0 ? load_relaxed(c.biased + id / 32) >> id % 32 & 15 : 0;
#endif
    uint32_t bits[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      float x = __uint_as_float(bits[k]);
      if (seen >> k & 1) {
        x = x > 0.f ? __fdiv_rn(x, c.penalty) : __fmul_rn(x, c.penalty);
      }
      if (biased >> k & 1) {
        x = __fadd_rn(x, bias_of(c, id + k));
      }
      x = fminf(fmaxf(x, -__int_as_float(0x7f800000)), GREATEST_F32);
      bits[k] = __float_as_uint(x);
      if (x > best.value) {
        best = Best{x, id + k};
      }
    }
    store_u32x4(changed + id, make_uint4(bits[0], bits[1], bits[2], bits[3]));
  }
  return best;
}

// The highest of the threads' bests, returned in all of them.
__device__ __forceinline__ Best block_best(Worker const& w, Best best) {
  best = warp_best(best);
  if (w.thread % 32 == 0) {
    w.shared->best_value[w.thread / 32] = best.value;
    w.shared->best_row[w.thread / 32] = best.row;
  }
  consumers_sync();
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    best = better(best, Best{w.shared->best_value[i], w.shared->best_row[i]});
  }
  return best;
}

// A list with a part per thread, which no other thread reads. It is in the activation buffer as far as it fits, and the rest in device memory.
struct List {
  uint4* near;
  uint4* far;
  uint32_t fits;
  uint32_t len; // of this thread's part
};
__device__ __forceinline__ void list_add(List& l, uint32_t thread, Listed e) {
  uint32_t const i = l.len * AMK_WARPS * 32 + thread;
  uint4 const v = make_uint4(e.rank, e.id, e.low, e.high);
  if (i < l.fits) {
    l.near[i] = v;
  } else {
    store_u32x4(l.far + i, v);
  }
  ++l.len;
}
// Loads entries from..from+2 of this thread's part; absent ones weigh nothing.
__device__ __forceinline__ void list_load(List const& l, uint32_t thread, uint32_t from, Listed (&e)[2]) {
#pragma unroll
  for (uint32_t k = 0; k < 2; ++k) {
    uint32_t const i = (from + k) * AMK_WARPS * 32 + thread;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (from + k < l.len) {
      v = i < l.fits ? l.near[i] : load_u32x4(l.far + i);
    }
    e[k] = Listed{v.x, v.y, v.z, v.w};
  }
}

// A search in the list: the smallest key up to which the tokens reach a number or a weight. The key is the id, or the rank followed by
// the id.
struct Sought {
  bool by_id, by_weight;
  uint64_t limit; // the last rank and id that pass
  uint64_t least; // the least weight that passes
  uint64_t need;
  uint32_t bits;   // of the longest key, or those in which keys differ
  uint64_t prefix; // the keys' common prefix
};
struct Found {
  bool there;
  uint64_t key;
  uint64_t before, upto; // weight before it, and including it; the total if it is not found
};

__device__ __forceinline__ uint64_t listed_weight(Listed const& e, Sought const& s) {
  uint64_t const weight = (uint64_t)e.high << 32 | e.low;
  bool const counts = ((uint64_t)e.rank << ID_BITS | e.id) <= s.limit && weight >= s.least;
  return counts ? weight : 0;
}

__device__ __forceinline__ uint64_t key_of(Listed const& e, Sought const& s) { return s.by_id ? e.id : (uint64_t)e.rank << ID_BITS | e.id; }

// Adds a listed token to the histogram of its digit, if it passes and has the digits found so far.
__device__ __forceinline__ void add_digit(SamplerScratch& d, Listed const& e, Sought const& s, uint32_t shift, uint32_t width, uint64_t prefix) {
  uint64_t const key = key_of(e, s), weight = listed_weight(e, s);
  if (weight == 0 || key >> shift >> width != prefix >> shift >> width) {
    return;
  }
  bucket_add(d, (uint32_t)(key >> shift) & ((1u << width) - 1), weight);
}

// The key of the only listed token that passes and has these leading digits.
__device__ __forceinline__ uint64_t list_alone(Worker const& w, SamplerScratch& d, List const& l, Sought const& s, uint64_t digits, uint32_t shift) {
#pragma unroll 1
  for (uint32_t i = 0; i < l.len; i += 2) {
    Listed e[2];
    list_load(l, w.thread, i, e);
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      uint64_t const key = key_of(e[k], s);
      if (key >> shift == digits && listed_weight(e[k], s) > 0) {
        d.key = key;
      }
    }
  }
  consumers_sync();
  uint64_t const key = d.key;
  consumers_sync();
  return key;
}

// The bucket in which a count or a weight reaches the searched value, in all threads.
struct Bucket {
  bool found, alone;
  uint32_t bucket;
  uint64_t before, weight_before; // of the searched quantity, and the weight, in the buckets before
  uint64_t weight;                // of the bucket; the total if it is not found
};

// In the warp that holds it: finds the bucket among those of the lane before whose end the value is reached.
__device__ __forceinline__ void bucket_find_lane(Worker const& w, SamplerScratch& d, uint32_t each, uint64_t count, uint64_t weight, uint64_t counts, uint64_t weights, bool by_weight, uint64_t need) {
  uint32_t const lane = w.thread % 32;
  uint64_t count_upto = count, weight_upto = weight;
#pragma unroll 1
  for (uint32_t o = 1; o < 32; o <<= 1) {
    uint64_t const c = __shfl_up_sync(~0u, count_upto, o), v = __shfl_up_sync(~0u, weight_upto, o);
    count_upto += lane >= o ? c : 0;
    weight_upto += lane >= o ? v : 0;
  }
  counts += count_upto - count;
  weights += weight_upto - weight;
  uint32_t const reached = __ballot_sync(~0u, (by_weight ? weights + weight : counts + count) >= need);
  if (lane != (uint32_t)__ffs(reached) - 1) {
    return;
  }
#pragma unroll 1
  for (uint32_t b = w.thread * each;; ++b) {
    count = d.count[b];
    weight = (uint64_t)d.high[b] << 32 | d.low[b];
    if ((by_weight ? weights + weight : counts + count) >= need || b + 1 == (w.thread + 1) * each) {
      d.bucket = b;
      d.alone = count == 1;
      d.before = by_weight ? weights : counts;
      d.weight_before = weights;
      d.weight = weight;
      return;
    }
    counts += count;
    weights += weight;
  }
}

__device__ __forceinline__ Bucket bucket_find(Worker const& w, SamplerScratch& d, bool by_weight, uint64_t need) {
  constexpr uint32_t EACH = (BUCKETS + THREADS - 1) / THREADS;
  consumers_sync();
  uint32_t count = 0;
  uint64_t weight = 0;
#pragma unroll 2
  for (uint32_t b = w.thread * EACH; b < (w.thread + 1) * EACH && b < BUCKETS; ++b) {
    count += d.count[b];
    weight += (uint64_t)d.high[b] << 32 | d.low[b];
  }
  uint32_t const warp = w.thread / 32, counts_here = __reduce_add_sync(~0u, count);
  uint64_t const weights_here = warp_sum64(weight);
  if (w.thread % 32 == 0) {
    d.counts[warp] = counts_here;
    d.sums[warp] = weights_here;
  }
  consumers_sync();
  uint64_t counts = 0, weights = 0, all_counts = 0, all_weights = 0;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    counts = i == warp ? all_counts : counts;
    weights = i == warp ? all_weights : weights;
    all_counts += d.counts[i];
    all_weights += d.sums[i];
  }
  uint64_t const before = by_weight ? weights : counts, here = by_weight ? weights_here : counts_here;
  if (before < need && need <= before + here) {
    bucket_find_lane(w, d, EACH, count, weight, counts, weights, by_weight, need);
  }
  consumers_sync();
  bool const found = need <= (by_weight ? all_weights : all_counts);
  return Bucket{found, d.alone != 0, d.bucket, d.before, d.weight_before, found ? d.weight : all_weights};
}

__device__ __forceinline__ Found list_find(Worker const& w, SamplerScratch& d, List const& l, Sought const& s) {
  uint64_t prefix = s.prefix, need = s.need, before = 0;
  uint32_t width = s.bits < DIGIT_BITS ? s.bits : DIGIT_BITS, shift = s.bits - width;
#pragma unroll 1
  for (;;) {
    buckets_clear(w, d);
#pragma unroll 1
    for (uint32_t i = 0; i < l.len; i += 2) {
      Listed e[2];
      list_load(l, w.thread, i, e);
#pragma unroll
      for (uint32_t k = 0; k < 2; ++k) {
        add_digit(d, e[k], s, shift, width, prefix);
      }
    }
    Bucket const b = bucket_find(w, d, s.by_weight, need);
    if (!b.found) {
      return Found{false, 0, 0, b.weight};
    }
    prefix |= (uint64_t)b.bucket << shift;
    need -= b.before;
    before += b.weight_before;
    if (shift == 0) { // keys are distinct: it is the only one
      return Found{true, prefix, before, before + b.weight};
    }
    if (b.alone) {
      return Found{true, list_alone(w, d, l, s, prefix >> shift, shift), before, before + b.weight};
    }
    width = shift < DIGIT_BITS ? shift : DIGIT_BITS;
    shift -= width;
  }
}

__device__ __forceinline__ uint32_t bits_of(uint32_t v) { return 32 - __clz(v); }

// Total weight of the listed tokens that pass.
__device__ __forceinline__ uint64_t list_sum(Worker const& w, SamplerScratch& d, List const& l, Sought const& s) {
  uint64_t sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < l.len; i += 2) {
    Listed e[2];
    list_load(l, w.thread, i, e);
    sum += listed_weight(e[0], s) + listed_weight(e[1], s);
  }
  return block_sum64(w, d, sum);
}

// ceil(weight * share / 2^32), at least one.
__device__ __forceinline__ uint64_t share_of(uint64_t weight, uint64_t share) {
  uint64_t const low = weight * share, need = __umul64hi(weight, share) << 32 | low >> 32;
  uint64_t const up = need + ((uint32_t)low != 0);
  return up > 0 ? up : 1;
}
