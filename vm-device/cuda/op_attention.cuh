// attention: one key/value head's query group over one split of the keys. Same stages as reference-vm/src/ops/attention.rs.
#pragma once

constexpr uint32_t GROUP_BUF = 4;                       // query heads worked on at once: ir::program::smem::ATTENTION_GROUP
constexpr uint32_t CACHE_BYTES = AMK_KV_F32 ? 4 : 2;   // of an element of the key/value cache
constexpr uint32_t CHUNK_ELEMENTS = 16 / CACHE_BYTES;  // elements of a 16-byte chunk: 4 or 8

// The attention scratch in the activation buffer.
struct AttentionScratch {
  float* q;      // [GROUP_BUF][head_dim]
  float* key;    // [head_dim], the newest key
  float* scores; // [GROUP_BUF][kv_block]
  float* out;    // [AMK_WARPS][GROUP_BUF][head_dim]
  float* m;      // [GROUP_BUF] running maximum
  float* l;      // [GROUP_BUF] running sum
  float* alpha;  // [GROUP_BUF] factor on what was accumulated before this block
};

__device__ __forceinline__ AttentionScratch attention_scratch(Worker const& w, uint32_t group, uint32_t head_dim, uint32_t kv_block) {
  AttentionScratch s;
  s.q = (float*)w.x;
  s.key = s.q + group * head_dim;
  s.scores = s.key + head_dim;
  s.out = s.scores + group * kv_block;
  s.m = s.out + AMK_WARPS * group * head_dim;
  s.l = s.m + GROUP_BUF;
  s.alpha = s.l + GROUP_BUF;
  return s;
}

// One warp: a head of qkv, normalised (norm may be null) and rotated, times `factor`, into `out`.
__device__ __forceinline__ void rotate_head(Worker const& w, ResolvedSlot const& qkv, uint32_t generation, uint32_t word0, uint32_t head_dim, float const* norm, float eps,
                                            float const* rope, float factor, float* out) {
  uint32_t const lane = threadIdx.x % 32, half = head_dim / 2;
  float a[AMK_HEAD_DIM_MAX / 64], b[AMK_HEAD_DIM_MAX / 64];
  float square = 0.f;
#pragma unroll
  for (uint32_t j = 0; j < AMK_HEAD_DIM_MAX / 64; ++j) {
    uint32_t const i = lane + j * 32;
    a[j] = b[j] = 0.f;
    if (i < half) {
      a[j] = slot_read(w, qkv, generation, word0 + i);
      b[j] = slot_read(w, qkv, generation, word0 + half + i);
    }
    square += a[j] * a[j] + b[j] * b[j];
  }
  float inverse = 1.f;
  if (norm != nullptr) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      square += __shfl_xor_sync(~0u, square, o);
    }
    inverse = 1.f / sqrtf(square / (float)head_dim + eps);
  }
#pragma unroll
  for (uint32_t j = 0; j < AMK_HEAD_DIM_MAX / 64; ++j) {
    uint32_t const i = lane + j * 32;
    if (i < half) {
      float const x = a[j] * inverse * (norm != nullptr ? __ldg(norm + i) : 1.f);
      float const y = b[j] * inverse * (norm != nullptr ? __ldg(norm + half + i) : 1.f);
      float2 const cs = __ldg((float2 const*)rope + i); // cosine, sine of this position
      out[i] = (x * cs.x - y * cs.y) * factor;
      out[half + i] = (y * cs.x + x * cs.y) * factor;
    }
  }
}

// Address of a key (which = 0) or value (1) row of this session's cache.
__device__ __forceinline__ char* cache_row(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p, uint32_t which, uint32_t position) {
  // Sessions are 4 bytes a word apart in every kernel variant, so that variants of either precision can take turns.
  uint64_t const session = (uint64_t)w.shared->step.session * kv.units * 4; // units: words of one session
  uint64_t const row = ((uint64_t)which * p.kv_heads + p.kv_head) * w.shared->program.kv_capacity + position;
  return (char*)kv.address + session + row * p.head_dim * CACHE_BYTES;
}

// f16 and not bf16, whatever the weights: bf16 would cost ten times the error for the same bytes, and keys and values are far inside
// f16's range (they are clamped to it all the same).
__device__ __forceinline__ void cache_store(char* row, uint32_t i, float v) {
#if AMK_KV_F32
  *(float*)(row + i * 4) = v;
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(fminf(fmaxf(v, -65504.f), 65504.f)));
  *(uint16_t*)(row + i * 2) = bits;
#endif
}
__device__ __forceinline__ void cache_unpack(uint4 v, float* out) {
#if AMK_KV_F32
  out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y), out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
#else
  unpack_f16(v, out);
#endif
}

// The newest key and value, by the split that owns them.
__device__ __forceinline__ void append(Worker const& w, StagedTask const& st, amk_attention_params const& p, float const* rope, AttentionScratch const& s) {
  uint32_t const warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = w.shared->step.position;
  uint32_t const heads = p.kv_heads * p.group, generation = st.task.read_generation[0];
  ResolvedSlot const& kv = st.slot[AMK_READS_MAX + 1];
  if (warp == AMK_WARPS - 1) {
    uint32_t const word0 = (heads + p.kv_head) * p.head_dim;
    rotate_head(w, st.slot[0], generation, word0, p.head_dim, (float const*)st.slot[2].address, p.eps, rope, 1.f, s.key);
    __syncwarp();
    char* row = cache_row(w, kv, p, 0, position);
    for (uint32_t i = lane; i < p.head_dim; i += 32) {
      cache_store(row, i, s.key[i]);
    }
  } else if (warp == AMK_WARPS - 2) {
    uint32_t const word0 = (heads + p.kv_heads + p.kv_head) * p.head_dim;
    char* row = cache_row(w, kv, p, 1, position);
    for (uint32_t i = lane; i < p.head_dim; i += 32) {
      cache_store(row, i, slot_read(w, st.slot[0], generation, word0 + i));
    }
  }
}

// How the lanes of a warp share rows: `lanes` (a power of two) per row, each with 16-byte chunks lane, lane + lanes, ...
struct RowShare {
  uint32_t chunks; // of a row
  uint32_t lanes;
  uint32_t row;   // of this lane within the warp's rows
  uint32_t chunk; // first chunk of this lane
  uint32_t rows;  // per warp
};
__device__ __forceinline__ RowShare row_share(uint32_t head_dim) {
  RowShare r;
  r.chunks = head_dim * CACHE_BYTES / 16;
  r.lanes = r.chunks >= 32 ? 32 : 1u << (32 - __clz(r.chunks - 1));
  uint32_t const lane = threadIdx.x % 32;
  r.row = lane / r.lanes;
  r.chunk = lane % r.lanes;
  r.rows = 32 / r.lanes;
  return r;
}

constexpr uint32_t LANE_CHUNKS = (AMK_HEAD_DIM_MAX * CACHE_BYTES / 16 + 31) / 32; // 1 for 16-bit elements, 2 for f32

// Rows that a lane asks for before it uses the first.
constexpr uint32_t ROW_BATCH = LANE_CHUNKS > 1 ? 2 : 4;

// 16-byte chunks of up to ROW_BATCH rows of the cache: rows k, k + step, ... below `keys`.
__device__ __forceinline__ void rows_load(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p, uint32_t which, uint32_t key0, uint32_t k, uint32_t step,
                                          uint32_t keys, uint32_t chunk, uint4 (&out)[ROW_BATCH]) {
#pragma unroll
  for (uint32_t i = 0; i < ROW_BATCH; ++i) {
    out[i] = make_uint4(0, 0, 0, 0);
    if (k + i * step < keys) {
      out[i] = load_u32x4(cache_row(w, kv, p, which, key0 + k + i * step) + chunk * 16);
    }
  }
}

// Scores of the block's keys, into s.scores[g][key].
__device__ __forceinline__ void block_scores(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p, AttentionScratch const& s, uint32_t group, uint32_t key0,
                                             uint32_t keys) {
  RowShare const r = row_share(p.head_dim);
  uint32_t const step = AMK_WARPS * r.rows;
  for (uint32_t k0 = threadIdx.x / 32 * r.rows; k0 < keys; k0 += ROW_BATCH * step) {
    float dot[ROW_BATCH][GROUP_BUF] = {};
#pragma unroll
    for (uint32_t c = 0; c < LANE_CHUNKS; ++c) {
      uint32_t const chunk = r.chunk + c * 32;
      if (chunk < r.chunks) {
        uint4 rows[ROW_BATCH];
        rows_load(w, kv, p, 0, key0, k0 + r.row, step, keys, chunk, rows);
#pragma unroll
        for (uint32_t g = 0; g < GROUP_BUF; ++g) {
          if (g < group) {
            float q[CHUNK_ELEMENTS];
#pragma unroll
            for (uint32_t i = 0; i < CHUNK_ELEMENTS; i += 4) {
              float4 const v = *(float4 const*)(s.q + g * p.head_dim + chunk * CHUNK_ELEMENTS + i);
              q[i] = v.x, q[i + 1] = v.y, q[i + 2] = v.z, q[i + 3] = v.w;
            }
#pragma unroll
            for (uint32_t j = 0; j < ROW_BATCH; ++j) {
              float v[8];
              cache_unpack(rows[j], v);
#pragma unroll
              for (uint32_t i = 0; i < CHUNK_ELEMENTS; ++i) {
                dot[j][g] = fmaf(q[i], v[i], dot[j][g]);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < ROW_BATCH; ++j) {
      uint32_t const k = k0 + r.row + j * step;
#pragma unroll
      for (uint32_t g = 0; g < GROUP_BUF; ++g) {
        float d = dot[j][g];
        for (uint32_t o = r.lanes / 2; o > 0; o >>= 1) {
          d += __shfl_xor_sync(~0u, d, o);
        }
        if (g < group && k < keys && r.chunk == 0) {
          s.scores[g * p.kv_block + k] = d;
        }
      }
    }
  }
}

// Warp g of the group: running maximum and sum, and the block's scores become exp(score - maximum).
__device__ __forceinline__ void block_softmax(amk_attention_params const& p, AttentionScratch const& s, uint32_t group, uint32_t keys) {
  uint32_t const lane = threadIdx.x % 32;
  for (uint32_t g = threadIdx.x / 32; g < group; g += AMK_WARPS) {
    float* scores = s.scores + g * p.kv_block;
    float top = s.m[g];
    for (uint32_t k = lane; k < keys; k += 32) {
      top = fmaxf(top, scores[k]);
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    }
    float sum = 0.f;
    for (uint32_t k = lane; k < keys; k += 32) {
      float const e = expf(scores[k] - top);
      scores[k] = e;
      sum += e;
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, o);
    }
    __syncwarp();
    if (lane == 0) {
      float const alpha = expf(s.m[g] - top); // zero in the first block
      s.alpha[g] = alpha;
      s.l[g] = s.l[g] * alpha + sum;
      s.m[g] = top;
    }
  }
}

// The first values of a block, asked for before the scores are known: they do not depend on them.
__device__ __forceinline__ void values_ahead(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p, uint32_t key0, uint32_t keys,
                                             uint4 (&ahead)[LANE_CHUNKS][ROW_BATCH]) {
  RowShare const r = row_share(p.head_dim);
#pragma unroll
  for (uint32_t c = 0; c < LANE_CHUNKS; ++c) {
    uint32_t const chunk = r.chunk + c * 32, none = chunk < r.chunks ? keys : 0;
    rows_load(w, kv, p, 1, key0, threadIdx.x / 32 * r.rows + r.row, AMK_WARPS * r.rows, none, chunk, ahead[c]);
  }
}

// Adds the block's weighted values to this lane's accumulators.
__device__ __forceinline__ void block_values(Worker const& w, ResolvedSlot const& kv, amk_attention_params const& p, AttentionScratch const& s, uint32_t group, uint32_t key0,
                                             uint32_t keys, uint4 (&ahead)[LANE_CHUNKS][ROW_BATCH], float (&acc)[GROUP_BUF][LANE_CHUNKS * CHUNK_ELEMENTS]) {
  RowShare const r = row_share(p.head_dim);
  uint32_t const step = AMK_WARPS * r.rows, first = threadIdx.x / 32 * r.rows + r.row;
#pragma unroll
  for (uint32_t g = 0; g < GROUP_BUF; ++g) {
    float const alpha = g < group ? s.alpha[g] : 0.f;
#pragma unroll
    for (uint32_t i = 0; i < LANE_CHUNKS * CHUNK_ELEMENTS; ++i) {
      acc[g][i] *= alpha;
    }
  }
  for (uint32_t k0 = first; k0 < keys; k0 += ROW_BATCH * step) {
#pragma unroll
    for (uint32_t c = 0; c < LANE_CHUNKS; ++c) {
      uint32_t const chunk = r.chunk + c * 32;
      if (k0 != first) {
        rows_load(w, kv, p, 1, key0, k0, step, chunk < r.chunks ? keys : 0, chunk, ahead[c]);
      }
#pragma unroll
      for (uint32_t j = 0; j < ROW_BATCH; ++j) {
        uint32_t const k = k0 + j * step;
        float v[8];
        cache_unpack(ahead[c][j], v); // zeros where there is no row
#pragma unroll
        for (uint32_t g = 0; g < GROUP_BUF; ++g) {
          float const weight = g < group && k < keys ? s.scores[g * p.kv_block + k] : 0.f;
#pragma unroll
          for (uint32_t i = 0; i < CHUNK_ELEMENTS; ++i) {
            acc[g][c * CHUNK_ELEMENTS + i] = fmaf(weight, v[i], acc[g][c * CHUNK_ELEMENTS + i]);
          }
        }
      }
    }
  }
}

// Sums the accumulators over the rows of each warp, then over the warps, and writes m, l and the normalised outputs.
__device__ __forceinline__ void write_partials(Worker const& w, StagedTask const& st, amk_attention_params const& p, AttentionScratch const& s, uint32_t g0, uint32_t group,
                                               float (&acc)[GROUP_BUF][LANE_CHUNKS * CHUNK_ELEMENTS]) {
  RowShare const r = row_share(p.head_dim);
  uint32_t const warp = threadIdx.x / 32, t = threadIdx.x;
#pragma unroll
  for (uint32_t g = 0; g < GROUP_BUF; ++g) {
#pragma unroll
    for (uint32_t i = 0; i < LANE_CHUNKS * CHUNK_ELEMENTS; ++i) {
      float v = acc[g][i];
      for (uint32_t o = r.lanes; o < 32; o <<= 1) {
        v += __shfl_xor_sync(~0u, v, o);
      }
      uint32_t const chunk = r.chunk + i / CHUNK_ELEMENTS * 32;
      if (g < group && r.row == 0 && chunk < r.chunks) {
        s.out[(warp * group + g) * p.head_dim + chunk * CHUNK_ELEMENTS + i % CHUNK_ELEMENTS] = v;
      }
    }
  }
  consumers_sync();
  ResolvedSlot const& out = st.slot[AMK_READS_MAX];
  uint32_t const generation = st.task.write_generation[0];
  uint32_t const heads = p.kv_heads * p.group, head = p.kv_head * p.group + g0;
  for (uint32_t i = t; i < group * p.head_dim; i += CONSUMERS) {
    uint32_t const g = i / p.head_dim, d = i % p.head_dim;
    float v = 0.f;
#pragma unroll
    for (uint32_t j = 0; j < AMK_WARPS; ++j) {
      v += s.out[(j * group + g) * p.head_dim + d];
    }
    slot_write(w, out, generation, partial_word(p.split, heads, head + g, p.head_dim) + 2 + d, v / s.l[g]);
  }
  if (t < group) {
    uint32_t const word = partial_word(p.split, heads, head + t, p.head_dim);
    slot_write(w, out, generation, word, s.m[t]);
    slot_write(w, out, generation, word + 1, s.l[t]);
  }
}

__device__ __forceinline__ void op_attention(Worker const& w, StagedTask const& st) {
  amk_attention_params const p = *(amk_attention_params const*)st.task.params;
  uint32_t const position = w.shared->step.position, t = threadIdx.x, warp = t / 32;
  uint32_t const keys = attended(position, p.window), active = active_splits(keys, p.kv_block, p.splits);
  if (p.split >= active) {
    return;
  }
  uint32_t const first = position + 1 - keys;
  uint32_t const start = first + split_start(keys, p.kv_block, active, p.split), end = first + split_start(keys, p.kv_block, active, p.split + 1);
  ResolvedSlot const kv = st.slot[AMK_READS_MAX + 1];
  float const* rope = (float const*)st.slot[3].address + (size_t)position * p.head_dim; // [position][head_dim / 2][2]
  for (uint32_t g0 = 0; g0 < p.group; g0 += GROUP_BUF) {
    uint32_t const group = p.group - g0 < GROUP_BUF ? p.group - g0 : GROUP_BUF;
    AttentionScratch const s = attention_scratch(w, group, p.head_dim, p.kv_block);
    for (uint32_t g = warp; g < group; g += AMK_WARPS) {
      uint32_t const word0 = (p.kv_head * p.group + g0 + g) * p.head_dim;
      rotate_head(w, st.slot[0], st.task.read_generation[0], word0, p.head_dim, (float const*)st.slot[1].address, p.eps, rope, p.scale, s.q + g * p.head_dim);
    }
    if (g0 == 0 && p.split == active - 1) {
      append(w, st, p, rope, s);
    }
    if (t < group) {
      s.m[t] = -__int_as_float(0x7f800000);
      s.l[t] = 0.f;
    }
    consumers_sync();
    float acc[GROUP_BUF][LANE_CHUNKS * CHUNK_ELEMENTS] = {};
    for (uint32_t key0 = start; key0 < end; key0 += p.kv_block) {
      uint32_t const count = end - key0 < p.kv_block ? end - key0 : p.kv_block;
      uint4 ahead[LANE_CHUNKS][ROW_BATCH];
      values_ahead(w, kv, p, key0, count, ahead);
      block_scores(w, kv, p, s, group, key0, count);
      consumers_sync();
      block_softmax(p, s, group, count);
      consumers_sync();
      block_values(w, kv, p, s, group, key0, count, ahead, acc);
      consumers_sync(); // the scores are about to be overwritten
    }
    write_partials(w, st, p, s, g0, group, acc);
    consumers_sync(); // the scratch may be overwritten
  }
}
