// A choice of a token by the threads of one worker, as decision 015 defines it and `ir::sampling` computes it. How: decision 017.
//
// Nothing here depends on the number of threads or on their order: sums are of integers, and what is sought is found by counting. No sort:
// a number is found digit by digit, from a histogram of those that share the digits found so far.
#pragma once

constexpr uint32_t DIGIT_BITS = 9, BUCKETS = 1u << DIGIT_BITS;
constexpr uint32_t ID_BITS = 22;
static_assert(AMK_SAMPLED_VOCAB_MAX == 1u << ID_BITS, "a token fits behind its rank");
constexpr uint32_t QUADS = 8;                  // groups of 4 tokens that a lane has in hand, and as many on their way
constexpr uint32_t BLOCK_IDS = 32 * 4 * QUADS; // tokens that a warp has in hand: neighbours
constexpr uint32_t SAMPLING_WORDS = sizeof(amk_sampling) / 16;
constexpr float GREATEST_F32 = 3.402823466e38f;

// A token that may be drawn. Rank: how far its logit is below the highest, in steps of an f32; equals have the same.
struct alignas(16) Listed {
  uint32_t rank, id, low, high;
};

// What the threads share while they choose: in shared memory that is free at the end of a step.
struct Draw {
  uint32_t count[BUCKETS], low[BUCKETS], high[BUCKETS]; // tokens and their weight, by digit
  amk_sampling settings;
  uint64_t sums[AMK_WARPS];
  uint64_t before, weight_before, weight, key; // what the last digit found
  uint32_t bucket, alone, found;
  uint32_t ranks; // of all listed tokens, or-ed
};
static_assert(sizeof(Draw) <= sizeof(Shared::part), "the sums of products are not needed any more");

// A row of logits, after penalty and bias. What is not a number fails every comparison and weighs nothing.
struct Row {
  float const* logits;
  uint32_t vocab;
  float highest, scale;
};

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

constexpr float LIGHTEST = -41.f; // what is as far down or farther weighs nothing

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
// In 40 binary places.
__device__ __forceinline__ uint64_t token_weight(float t) {
  Power const p = power_of_two(t);
  return (uint64_t)p.mantissa << 16 >> p.halvings;
}
// How far down a logit is, in octaves; what weighs nothing is at LIGHTEST.
__device__ __forceinline__ float distance(Row const& r, float logit) { return fmaxf(__fmul_rn(__fsub_rn(logit, r.highest), r.scale), LIGHTEST); }

constexpr float LIGHT = -16.f; // from here down a weight has 24 bits at most: that is most tokens
// The weight of four tokens.
__device__ __forceinline__ uint64_t quad_weight(float const (&t)[4]) {
  Power p[4];
  uint32_t light = 0;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    p[k] = power_of_two(t[k]);
    light += p[k].mantissa >> ((p[k].halvings - 16) & 31);
  }
  if (fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3])) <= LIGHT) {
    return light;
  }
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    sum += (uint64_t)p[k].mantissa << 16 >> p[k].halvings;
  }
  return sum;
}

// An f32 as a number with the same order; zeros are equal.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t const bits = __float_as_uint(__fadd_rn(x, 0.f));
  return (int32_t)bits < 0 ? ~bits : bits | 0x80000000u;
}

// Four neighbouring logits.
__device__ __forceinline__ uint4 quad_load(float const* logits, uint32_t vocab, uint32_t id) {
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
__device__ __forceinline__ void quad_distances(Row const& r, uint4 q, float (&t)[4]) {
  t[0] = distance(r, __uint_as_float(q.x));
  t[1] = distance(r, __uint_as_float(q.y));
  t[2] = distance(r, __uint_as_float(q.z));
  t[3] = distance(r, __uint_as_float(q.w));
}

// Goes over the row once: body(id, logits) for the quads of each warp's blocks, those of the next block on their way meanwhile; then
// block_end(block), by all lanes.
template <typename Body, typename End> __device__ __forceinline__ void row_pass(float const* logits, uint32_t vocab, uint32_t thread, Body const& body, End const& block_end) {
  uint32_t const blocks = (vocab + BLOCK_IDS - 1) / BLOCK_IDS;
  uint4 next[QUADS];
  uint32_t block = thread / 32, first = block * BLOCK_IDS + thread % 32 * 4;
#pragma unroll
  for (uint32_t j = 0; j < QUADS; ++j) {
    next[j] = quad_load(logits, vocab, first + j * 128);
  }
#pragma unroll 1
  for (; block < blocks; block += AMK_WARPS) {
    uint4 now[QUADS];
    uint32_t const id = first;
    first += AMK_WARPS * BLOCK_IDS;
#pragma unroll
    for (uint32_t j = 0; j < QUADS; ++j) {
      now[j] = next[j];
      next[j] = quad_load(logits, vocab, first + j * 128);
    }
#pragma unroll
    for (uint32_t j = 0; j < QUADS; ++j) {
      body(id + j * 128, now[j]);
    }
    block_end(block);
  }
}

__device__ __forceinline__ uint64_t warp_sum64(uint64_t v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    v += __shfl_xor_sync(~0u, v, o);
  }
  return v;
}

// Of all threads, for all threads.
__device__ __forceinline__ uint64_t block_sum64(Worker const& w, Draw& d, uint64_t v) {
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

// What changes logits: zero where nothing does.
struct Changes {
  uint32_t const *seen, *biased;
  amk_bias const* bias;
  uint32_t bias_len;
  float penalty;
};

// The bias of a token that has one.
__device__ __forceinline__ float bias_of(Changes const& c, uint32_t id) {
  uint32_t low = 0, high = c.bias_len;
  while (low + 1 < high) {
    uint32_t const middle = (low + high) / 2;
    (load_relaxed(&c.bias[middle].token) <= id ? low : high) = middle;
  }
  return __uint_as_float(load_relaxed((uint32_t const*)&c.bias[low].value));
}

// The row after penalty and bias, what is not a number banned, into `changed`; and its highest logit, the first of equals: of this thread's
// tokens.
__device__ __forceinline__ Best change_row(float const* logits, uint32_t vocab, Changes const& c, float* changed, uint32_t thread) {
  Best best = {-__int_as_float(0x7f800000), AMK_NONE};
#pragma unroll 4
  for (uint32_t id = thread * 4; id < vocab; id += AMK_WARPS * 128) {
    uint4 const q = quad_load(logits, vocab, id);
    uint32_t const seen = c.seen != 0 ? load_relaxed(c.seen + id / 32) >> id % 32 & 15 : 0;
    uint32_t const biased = c.biased != 0 ? load_relaxed(c.biased + id / 32) >> id % 32 & 15 : 0;
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

// Each thread's own tokens: nobody else reads them. They lie in the activation buffer as far as they fit, and behind that in device memory.
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
// Entries from..from+4 of this thread's part; those that are not there weigh nothing.
__device__ __forceinline__ void list_load(List const& l, uint32_t thread, uint32_t from, Listed (&e)[4]) {
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t const i = (from + k) * AMK_WARPS * 32 + thread;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (from + k < l.len) {
      v = i < l.fits ? l.near[i] : load_u32x4(l.far + i);
    }
    e[k] = Listed{v.x, v.y, v.z, v.w};
  }
}

// One pass that lists the tokens of a band of distances. With `whole` also the weight of this thread's tokens, listed or not.
__device__ __forceinline__ uint64_t list_band(Worker const& w, Draw& d, List& l, Row const& r, float low, float high, bool whole) {
  uint64_t sum = 0;
  uint32_t ranks = 0;
  row_pass(
      r.logits, r.vocab, w.thread,
      [&](uint32_t id, uint4 q) {
        float t[4];
        quad_distances(r, q, t);
        if (whole) {
          sum += quad_weight(t);
        }
        if (fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3])) < low) {
          return;
        }
#pragma unroll 1
        for (uint32_t k = 0; k < 4; ++k) {
          float const at = k < 2 ? (k == 0 ? t[0] : t[1]) : (k == 2 ? t[2] : t[3]);
          uint32_t const logit = k < 2 ? (k == 0 ? q.x : q.y) : (k == 2 ? q.z : q.w);
          uint64_t const weight = at >= low && at < high ? token_weight(at) : 0;
          if (weight > 0) {
            uint32_t const rank = ordered(r.highest) - ordered(__uint_as_float(logit));
            ranks |= rank;
            list_add(l, w.thread, Listed{rank, id + k, (uint32_t)weight, (uint32_t)(weight >> 32)});
          }
        }
      },
      [](uint32_t) {});
  block_or(&d.ranks, ranks);
  return sum;
}

// What is sought in the list: the smallest key up to which the tokens are so many, or weigh so much. The key is the id, or the rank with
// the id behind it.
struct Sought {
  bool by_id, by_weight;
  uint64_t limit; // the last rank and id that count
  uint64_t least; // the least weight that counts
  uint64_t need;
  uint32_t bits; // of the longest key
};
struct Found {
  bool there;
  uint64_t key;
  uint64_t before, upto; // weight of what comes before it, and with it; of all if it is not there
};

__device__ __forceinline__ uint64_t listed_weight(Listed const& e, Sought const& s) {
  uint64_t const weight = (uint64_t)e.high << 32 | e.low;
  bool const counts = ((uint64_t)e.rank << ID_BITS | e.id) <= s.limit && weight >= s.least;
  return counts ? weight : 0;
}

__device__ __forceinline__ uint64_t key_of(Listed const& e, Sought const& s) { return s.by_id ? e.id : (uint64_t)e.rank << ID_BITS | e.id; }

// Warp 0: the bucket in which the sum reaches what is left to find.
__device__ __forceinline__ void find_bucket(Draw& d, uint32_t lane, bool by_weight, uint64_t need) {
  constexpr uint32_t EACH = BUCKETS / 32;
  uint64_t count = 0, weight = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < EACH; ++i) {
    uint32_t const b = lane * EACH + (i + lane) % EACH; // not all lanes in one bank
    count += d.count[b];
    weight += (uint64_t)d.high[b] << 32 | d.low[b];
  }
  uint64_t counts = count, weights = weight;
#pragma unroll
  for (uint32_t o = 1; o < 32; o <<= 1) {
    uint64_t const c = __shfl_up_sync(~0u, counts, o), v = __shfl_up_sync(~0u, weights, o);
    counts += lane >= o ? c : 0;
    weights += lane >= o ? v : 0;
  }
  uint64_t const sum = by_weight ? weights : counts;
  uint32_t const reached = __ballot_sync(~0u, sum >= need);
  if (reached == 0) {
    if (lane == 31) {
      d.found = 0;
      d.weight = weights;
    }
    return;
  }
  if (lane != (uint32_t)__ffs(reached) - 1) {
    return;
  }
  counts -= count;
  weights -= weight;
  for (uint32_t b = lane * EACH;; ++b) {
    count = d.count[b];
    weight = (uint64_t)d.high[b] << 32 | d.low[b];
    if ((by_weight ? weights + weight : counts + count) >= need || b + 1 == (lane + 1) * EACH) {
      d.found = 1;
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

// A listed token into the histogram of its digit, if it counts and has the digits found so far.
__device__ __forceinline__ void add_digit(Draw& d, Listed const& e, Sought const& s, uint32_t shift, uint32_t width, uint64_t prefix) {
  uint64_t const key = key_of(e, s), weight = listed_weight(e, s);
  if (weight == 0 || key >> shift >> width != prefix >> shift >> width) {
    return;
  }
  uint32_t const b = (uint32_t)(key >> shift) & ((1u << width) - 1), low = (uint32_t)weight;
  block_add(&d.count[b], 1);
  uint32_t const old = block_add(&d.low[b], low);
  uint32_t const high = (uint32_t)(weight >> 32) + (old + low < old);
  if (high != 0) {
    block_add(&d.high[b], high);
  }
}

// The key of the only listed token that counts and has these digits in front.
__device__ __forceinline__ uint64_t list_alone(Worker const& w, Draw& d, List const& l, Sought const& s, uint64_t digits, uint32_t shift) {
#pragma unroll 1
  for (uint32_t i = 0; i < l.len; i += 4) {
    Listed e[4];
    list_load(l, w.thread, i, e);
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
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

__device__ __forceinline__ Found list_find(Worker const& w, Draw& d, List const& l, Sought const& s) {
  uint64_t prefix = 0, need = s.need, before = 0;
  uint32_t width = s.bits < DIGIT_BITS ? s.bits : DIGIT_BITS, shift = s.bits - width;
#pragma unroll 1
  for (;;) {
    for (uint32_t b = w.thread; b < BUCKETS; b += AMK_WARPS * 32) {
      d.count[b] = d.low[b] = d.high[b] = 0;
    }
    consumers_sync();
#pragma unroll 1
    for (uint32_t i = 0; i < l.len; i += 4) {
      Listed e[4];
      list_load(l, w.thread, i, e);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        add_digit(d, e[k], s, shift, width, prefix);
      }
    }
    consumers_sync();
    if (w.thread < 32) {
      find_bucket(d, w.thread, s.by_weight, need);
    }
    consumers_sync();
    uint64_t const weight = d.weight;
    bool const there = d.found != 0, alone = d.alone != 0;
    if (there) {
      prefix |= (uint64_t)d.bucket << shift;
      need -= d.before;
      before += d.weight_before;
    }
    consumers_sync();
    if (!there) {
      return Found{false, 0, 0, weight};
    }
    if (shift == 0) { // keys are different: it is alone
      return Found{true, prefix, before, before + weight};
    }
    if (alone) {
      return Found{true, list_alone(w, d, l, s, prefix >> shift, shift), before, before + weight};
    }
    width = shift < DIGIT_BITS ? shift : DIGIT_BITS;
    shift -= width;
  }
}

__device__ __forceinline__ uint32_t bits_of(uint32_t v) { return 32 - __clz(v); }

// Weight of the listed tokens that count.
__device__ __forceinline__ uint64_t list_sum(Worker const& w, Draw& d, List const& l, Sought const& s) {
  uint64_t sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < l.len; i += 4) {
    Listed e[4];
    list_load(l, w.thread, i, e);
    sum += listed_weight(e[0], s) + listed_weight(e[1], s) + listed_weight(e[2], s) + listed_weight(e[3], s);
  }
  return block_sum64(w, d, sum);
}

// ceil(weight * share / 2^32), one at least.
__device__ __forceinline__ uint64_t share_of(uint64_t weight, uint64_t share) {
  uint64_t const low = weight * share, need = __umul64hi(weight, share) << 32 | low >> 32;
  uint64_t const up = need + ((uint32_t)low != 0);
  return up > 0 ? up : 1;
}

// The weights of four tokens that weigh at least so much.
__device__ __forceinline__ uint64_t quad_weight_from(float const (&t)[4], uint64_t least) {
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint64_t const weight = token_weight(t[k]);
    sum += weight >= least ? weight : 0;
  }
  return sum;
}

// No filter by rank: weights of whole blocks of neighbours, then the tokens of the block that was drawn.
__device__ __forceinline__ uint32_t draw_from_row(Worker const& w, Draw& d, List& l, Row const& r, uint64_t least, uint64_t bits) {
  uint64_t sum = 0, block_weight = 0;
  bool const all = least <= 1;
  row_pass(
      r.logits, r.vocab, w.thread,
      [&](uint32_t, uint4 q) {
        float t[4];
        quad_distances(r, q, t);
        if (all) {
          block_weight += quad_weight(t);
        } else if (fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3])) > LIGHTEST) {
          block_weight += quad_weight_from(t, least);
        }
      },
      [&](uint32_t block) {
        sum += block_weight;
        uint64_t const weight = warp_sum64(block_weight);
        if (w.thread % 32 == block / AMK_WARPS % 32) {
          list_add(l, w.thread, Listed{0, block, (uint32_t)weight, (uint32_t)(weight >> 32)});
        }
        block_weight = 0;
      });
  uint64_t const total = block_sum64(w, d, sum), place = __umul64hi(bits, total);
  uint32_t const blocks = (r.vocab + BLOCK_IDS - 1) / BLOCK_IDS;
  Found const block = list_find(w, d, l, Sought{true, true, ~0ull, 1, place + 1, bits_of(blocks)});
  uint32_t const first = (uint32_t)block.key * BLOCK_IDS;
  l.len = 0;
#pragma unroll 1
  for (uint32_t i = w.thread; i < BLOCK_IDS / 4; i += AMK_WARPS * 32) {
    float t[4];
    quad_distances(r, quad_load(r.logits, r.vocab, first + i * 4), t);
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      uint64_t const weight = token_weight(t[k]);
      list_add(l, w.thread, Listed{0, i * 4 + k, (uint32_t)weight, (uint32_t)(weight >> 32)});
    }
  }
  Found const token = list_find(w, d, l, Sought{true, true, ~0ull, least > 1 ? least : 1, place + 1 - block.before, bits_of(BLOCK_IDS - 1)});
  return first + (uint32_t)token.key;
}

constexpr float FIRST_BAND = -12.f, SECOND_BAND = -24.f;
constexpr uint32_t LIST_WISH = 2048; // tokens that are soon gone through

// How far down the first band goes: as far as there are about LIST_WISH tokens, by a look at one token of many. A bad guess costs time only.
__device__ __forceinline__ float first_band(Worker const& w, Draw& d, Row const& r) {
  constexpr uint32_t THREADS = AMK_WARPS * 32, LOOKS = 2;
  uint32_t const quads = (r.vocab + 3) / 4, step = quads / (THREADS * LOOKS) + 1;
  if (w.thread < 32) {
    d.count[w.thread] = 0;
  }
  consumers_sync();
#pragma unroll
  for (uint32_t j = 0; j < LOOKS; ++j) {
    float t[4];
    quad_distances(r, quad_load(r.logits, r.vocab, (j * THREADS + w.thread) * step * 4), t);
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      if (t[k] > FIRST_BAND) {
        block_add(&d.count[(uint32_t)-t[k]], 1);
      }
    }
  }
  consumers_sync();
  uint32_t octave = 0;
  for (uint32_t tokens = 0; octave < (uint32_t)-FIRST_BAND; ++octave) {
    tokens += d.count[octave] * step;
    if (tokens > LIST_WISH) {
      break;
    }
  }
  consumers_sync();
  return -(float)(octave > 0 ? octave : 1);
}

// Top-k, then top-p, then min-p. The likeliest tokens are listed, more of them as long as they do not suffice: most rows need one band.
__device__ __forceinline__ uint32_t draw_from_list(Worker const& w, Draw& d, List& l, Row const& r, uint64_t bits) {
  uint64_t const share = d.settings.share, least = d.settings.least > 1 ? d.settings.least : 1;
  uint32_t const top_k = d.settings.top_k;
  bool const nucleus = share < 1ull << 32;
  float low = first_band(w, d, r), high = __int_as_float(0x7f800000);
  uint64_t total = 0;
  Found found = {};
  Sought sought = {false, top_k == 0, ~0ull, 1, top_k, 0};
#pragma unroll 1
  for (;;) {
    bool const whole = top_k == 0 && total == 0;
    uint64_t const sum = list_band(w, d, l, r, low, high, whole);
    if (whole) {
      total = block_sum64(w, d, sum);
      sought.need = share_of(total, share);
    } else {
      consumers_sync();
    }
    sought.bits = ID_BITS + bits_of(d.ranks);
    found = list_find(w, d, l, sought);
    if (found.there || low == LIGHTEST) {
      break;
    }
    high = low;
    low = low > FIRST_BAND ? FIRST_BAND : low > SECOND_BAND ? SECOND_BAND : LIGHTEST;
  }
  sought.least = least;
  if (found.there) {
    sought.limit = found.key;
  }
  if (top_k > 0 && nucleus) {
    Sought share_sought = sought;
    share_sought.least = 1;
    share_sought.by_weight = true;
    share_sought.need = share_of(found.upto, share);
    found = list_find(w, d, l, share_sought);
    sought.limit = found.key;
  }
  uint64_t const kept = least > 1 ? list_sum(w, d, l, sought) : found.upto;
  sought.by_id = sought.by_weight = true;
  sought.need = __umul64hi(bits, kept) + 1;
  sought.bits = bits_of(r.vocab - 1);
  return (uint32_t)list_find(w, d, l, sought).key;
}

// The highest of the threads' best, for all of them.
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

// The token for `position`, by all threads of the worker and for all of them; AMK_NONE if every token is banned. `highest` is the candidate
// of the row as it came. The settings are in d.
__device__ __forceinline__ uint32_t sample_row(Worker const& w, Draw& d, float const* logits, Best highest, uint32_t vocab, uint32_t position) {
  amk_sampling const& s = d.settings;
  List l = {(uint4*)w.x, (uint4*)s.list, w.shared->program.x_bytes / 16, 0};
  if (w.thread == 0) {
    d.ranks = 0;
  }
  // An infinite logit is as high as the greatest number: so it is put into the row.
  if (s.penalty != 1.f || s.bias_len != 0 || highest.value > GREATEST_F32) {
    Changes const c = {s.penalty != 1.f ? (uint32_t const*)s.seen : 0, s.bias_len != 0 ? (uint32_t const*)s.biased : 0, (amk_bias const*)s.bias, s.bias_len, s.penalty};
    highest = block_best(w, change_row(logits, vocab, c, (float*)s.changed, w.thread));
    logits = (float const*)s.changed;
  }
  consumers_sync();
  bool const none = !(highest.value >= -GREATEST_F32);
  if (none || s.greedy != 0) {
    return none ? AMK_NONE : highest.row;
  }
  Row const r = {logits, vocab, highest.value, s.scale};
  uint64_t const bits = philox_bits(s.seed, position);
  if (s.top_k == 0 && s.share >= 1ull << 32) {
    return draw_from_row(w, d, l, r, s.least, bits);
  }
  return draw_from_list(w, d, l, r, bits);
}
