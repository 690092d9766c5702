// Prefill: memory layout of the vectors of many tokens, and the ops on them that have no matrix.
//
// Vectors that are multiplied are f16: [64 columns][token][64 columns], so that a block of tokens is one run of bytes for 64 columns. A
// token's row of 128 bytes is in the form that the tensor cores read: its 16-byte chunks are permuted by the token's number. Columns after the
// last one are zero: they are never written after the memory was zeroed.
// The residual stream and the rows of q, k and v, which are not multiplied, are f32, one row per token.
#pragma once

static_assert(AMK_DTYPE != AMK_DTYPE_F32, "chunks of a prompt are multiplied with 16-bit weights");

constexpr uint32_t X_COLS = 64, X_ROW_BYTES = X_COLS * 2;
constexpr uint32_t PREFILL_THREADS = AMK_PREFILL_THREADS; // threads per block of the kernels without a matrix
static_assert(X_COLS == 2 * UNIT_COLS, "two units of a matrix go with a row");

extern __shared__ __align__(1024) char prefill_memory[];

// Converts two weights to f16: bf16 exactly from 2^-17 on, and below that within 2^-25.
__device__ __forceinline__ uint32_t to_f16(uint32_t pair) {
#if AMK_DTYPE == AMK_DTYPE_BF16
  float2 const v = pair_values(pair);
  return half_pair(v.x, v.y);
#else
  return pair;
#endif
}

// Place of a column among the 64 of a row. A thread has 8 neighbouring elements of a weights' row of 32: elements 0 and 1 of each thread are
// columns 0 to 7 of the first product, elements 2 and 3 its columns 8 to 15, and so on.
__device__ __forceinline__ uint32_t x_column(uint32_t column) {
  uint32_t const at = unit_column(column), thread = at / 8;
  return column % X_COLS / UNIT_COLS * UNIT_COLS + at % 8 / 2 * 8 + thread * 2 + at % 2;
}

// Address of a token's column; `pitch` is the number of tokens from 64 columns to the next.
__device__ __forceinline__ char* x_place(char* x, uint32_t pitch, uint32_t token, uint32_t column) {
  uint32_t const at = x_column(column);
  return x + ((uint64_t)(column / X_COLS) * pitch + token) * X_ROW_BYTES + (at / 8 ^ token % 8) * 16 + at % 8 * 2;
}

// Writes two neighbouring columns, the first of them even; values out of range are clamped.
__device__ __forceinline__ void x_write2(char* x, uint32_t pitch, uint32_t token, uint32_t column, float a, float b) {
  *(uint32_t*)x_place(x, pitch, token, column) = cache_pair(a, b);
}

// Copies tokens' embeddings into the residual stream, one block per token. Rows are `stride` long, a multiple of 8.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_embed(float* residual, char const* embedding, uint32_t const* tokens, uint32_t stride, uint32_t units,
                                                                               float scale) {
  uint32_t const token = tokens[blockIdx.x];
  float* out = residual + (uint64_t)blockIdx.x * stride;
  for (uint32_t e = threadIdx.x * 2; e < stride; e += PREFILL_THREADS * 2) {
    char const* const at = embedding_place(embedding, units, token, e);
#if EMBEDDING_F32
    float2 const v = *(float2 const*)at;
#else
    float2 const v = pair_values(*(uint32_t const*)at);
#endif
    *(float2*)(out + e) = make_float2(embed_scaled(v.x, scale), embed_scaled(v.y, scale));
  }
}

__device__ __forceinline__ float vec4_square(float4 v, float sum) { return fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum)))); }

// Sum over the threads of a block. All threads.
__device__ __forceinline__ float block_sum(float v) {
  static __shared__ float sums[PREFILL_THREADS / 32];
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = v;
  }
  __syncthreads();
  v = 0.f;
  for (uint32_t i = 0; i < PREFILL_THREADS / 32; ++i) {
    v += sums[i];
  }
  return v;
}

// The factor that normalises a row of `columns`, which are followed by zeros up to `stride`. All threads of a block.
__device__ __forceinline__ float rms_factor(float const* row, uint32_t stride, uint32_t columns, float eps) {
  float square = 0.f;
#pragma unroll 2
  for (uint32_t e = threadIdx.x * 4; e < stride; e += PREFILL_THREADS * 4) {
    square = vec4_square(*(float4 const*)(row + e), square);
  }
  return rsqrtf(block_sum(square) / (float)columns + eps);
}

// Normalises rows of the residual stream into the layout that is multiplied: one block per token. Blocks whose norm is behind them have none here.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_norm(char* x, float const* residual, float const* norm, uint32_t stride, uint32_t pitch, uint32_t columns,
                                                                             float eps) {
  float const* row = residual + (uint64_t)blockIdx.x * stride;
  bool const plain = has_feature(AMK_FEATURE_POST_NORM) && norm == nullptr;
  float const scale = plain ? 1.f : rms_factor(row, stride, columns, eps);
#pragma unroll 2
  for (uint32_t e = threadIdx.x * 4; e < stride; e += PREFILL_THREADS * 4) {
    float4 const v = *(float4 const*)(row + e), n = plain ? make_float4(1.f, 1.f, 1.f, 1.f) : *(float4 const*)(norm + e);
    x_write2(x, pitch, blockIdx.x, e, v.x * scale * n.x, v.y * scale * n.y);
    x_write2(x, pitch, blockIdx.x, e + 2, v.z * scale * n.z, v.w * scale * n.w);
  }
}

#if AMK_FEATURES >> AMK_FEATURE_POST_NORM & 1
// Adds the normalised results of a block to the residual stream: one block per token.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_post_norm(float* residual, float const* results, float const* norm, uint32_t stride, uint32_t columns, float eps) {
  float const* row = results + (uint64_t)blockIdx.x * stride;
  float* to = residual + (uint64_t)blockIdx.x * stride;
  float const scale = rms_factor(row, stride, columns, eps);
#pragma unroll 2
  for (uint32_t e = threadIdx.x * 4; e < stride; e += PREFILL_THREADS * 4) {
    float4 const v = *(float4 const*)(row + e), n = *(float4 const*)(norm + e), r = *(float4 const*)(to + e);
    *(float4*)(to + e) = make_float4(fmaf(v.x * n.x, scale, r.x), fmaf(v.y * n.y, scale, r.y), fmaf(v.z * n.z, scale, r.z), fmaf(v.w * n.w, scale, r.w));
  }
}
#endif

#if AMK_FEATURES >> AMK_FEATURE_NORM & 1
// Normalises the queries of all heads together, and the keys, where they are: a block for each of a token's two rows. `norm` has the weights of the
// queries and, behind them, of the keys.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_norm_heads(float* qkv, float const* norm, uint32_t stride, uint32_t q_width, uint32_t k_width, float eps) {
  bool const keys = (blockIdx.x & 1) != 0;
  float* row = qkv + (uint64_t)(blockIdx.x / 2) * stride + (keys ? q_width : 0);
  uint32_t const width = keys ? k_width : q_width;
  float const scale = rms_factor(row, width, width, eps);
  norm += keys ? q_width : 0;
#pragma unroll 2
  for (uint32_t e = threadIdx.x * 4; e < width; e += PREFILL_THREADS * 4) {
    float4 const v = *(float4 const*)(row + e), n = *(float4 const*)(norm + e);
    *(float4*)(row + e) = make_float4(v.x * scale * n.x, v.y * scale * n.y, v.z * scale * n.z, v.w * scale * n.w);
  }
}
#endif

// Writes four elements of a key or a value to its row of the cache, in the layout of key_append and value_append; `e` is a multiple of 4.
__device__ __forceinline__ void cache_write4(char* row, uint32_t position, uint32_t e, float const (&v)[4]) {
  char* to = row + (e / 8 ^ row_swizzle(position)) * 16 + e % 8 * 2;
  *(uint2*)to = make_uint2(cache_pair(v[0], v[1]), cache_pair(v[2], v[3]));
}
// The same of a row of codes.
__device__ __forceinline__ void codes_write4(char* row, uint32_t e, float const (&v)[4], float inverse) {
  *(uint32_t*)(row + e) = codes_of(half_values(cache_pair(v[0], v[1])), half_values(cache_pair(v[2], v[3])), inverse);
}
// The scale of a row, of which each of HEAD_LANES lanes has these elements. All lanes.
__device__ __forceinline__ RowScale lanes_scale(float const (&x)[4], float const (&y)[4]) {
  float most = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < 4; i += 2) {
    most = greater(greater(most, half_values(cache_pair(x[i], x[i + 1]))), half_values(cache_pair(y[i], y[i + 1])));
  }
#pragma unroll
  for (uint32_t o = 1; o < HEAD_LANES; o *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  }
  return scale_for(most);
}

// Splits the rows of q, k and v of each token. Queries are normalised, rotated and scaled into `queries`, [token][head][head_dim] of f16;
// keys (normalised and rotated) and values go into the pages of the layer and session. HEAD_LANES threads per head, of which HEAD_PARTS have elements.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_heads(char* queries, char* cache, uint16_t const* pages, float const* qkv, float const* angles,
                                                                              float const* q_norm, float const* k_norm, uint32_t tokens, uint32_t stride, uint32_t kv_heads,
                                                                              uint32_t start, float eps, float scale) {
  uint32_t const heads = kv_heads * AMK_GROUP, all = heads + 2 * kv_heads;
  uint64_t const index = (uint64_t)blockIdx.x * PREFILL_THREADS + threadIdx.x;
  uint32_t const part = (uint32_t)(index % HEAD_LANES), token = (uint32_t)(index / HEAD_LANES / all), head = (uint32_t)(index / HEAD_LANES % all);
  bool const mine = token < tokens && head_lane(part); // the other lanes take part in the sums over lanes
  uint32_t const position = start + token;
  float x[4] = {}, y[4] = {};
  Shapes s = {};
  if (mine) {
    float const* from = qkv + (uint64_t)token * stride + head * AMK_HEAD_DIM + part * 4;
    float4 const a = *(float4 const*)from, b = *(float4 const*)(from + AMK_HEAD_DIM / 2);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, y[0] = b.x, y[1] = b.y, y[2] = b.z, y[3] = b.w;
    float const* turn = angles + (uint64_t)position * AMK_HEAD_DIM + part * 8;
    s.angles[0] = *(float4 const*)turn, s.angles[1] = *(float4 const*)(turn + 4);
#if AMK_QK_NORM
    float const* norm = (head < heads ? q_norm : k_norm) + part * 4;
    s.norm[0] = *(float4 const*)norm, s.norm[1] = *(float4 const*)(norm + AMK_HEAD_DIM / 2);
#endif
  }
  float u[4] = {x[0], x[1], x[2], x[3]}, v[4] = {y[0], y[1], y[2], y[3]};
  shape_head(u, v, s, 0, eps); // called by all lanes, even if the values do not change
  RowScale row_scale = {};
  if constexpr (KV_CODES) {
    float kept[4], rest[4]; // chosen first: all lanes take part in the maximum
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      kept[i] = head < heads + kv_heads ? u[i] : x[i], rest[i] = head < heads + kv_heads ? v[i] : y[i];
    }
    row_scale = lanes_scale(kept, rest);
  }
  if (!mine) {
    return;
  }
  if (head < heads) {
    char* to = queries + ((uint64_t)token * heads + head) * HEAD_BYTES + part * 8;
    float const factor = scale * LOG2_E;
    *(uint2*)to = make_uint2(cache_pair(u[0] * factor, u[1] * factor), cache_pair(u[2] * factor, u[3] * factor));
    *(uint2*)(to + AMK_HEAD_DIM) = make_uint2(cache_pair(v[0] * factor, v[1] * factor), cache_pair(v[2] * factor, v[3] * factor)); // half a row further on
    return;
  }
  uint32_t const run = head - heads; // the keys of each head, then the values
  uint32_t const run_bytes = PAGE_KEYS * ROW_BYTES;
  char* row = cache + paged_row(pages[position / PAGE_KEYS], kv_heads * run_bytes, position) + run * run_bytes;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    x[i] = run < kv_heads ? u[i] : x[i], y[i] = run < kv_heads ? v[i] : y[i];
  }
  if constexpr (KV_CODES) {
    codes_write4(row, part * 4, x, row_scale.inverse);
    codes_write4(row, AMK_HEAD_DIM / 2 + part * 4, y, row_scale.inverse);
    if (part == 0) {
      *(uint4*)(row + AMK_HEAD_DIM) = make_uint4(row_scale.bits, 0, 0, 0);
    }
  } else {
    cache_write4(row, position, part * 4, x);
    cache_write4(row, position, AMK_HEAD_DIM / 2 + part * 4, y);
  }
}

// Logits of one token: each warp takes a tile of 8 rows at a time.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_logits(float* logits, char const* weights, char const* x, uint32_t pitch, uint32_t token, uint32_t units,
                                                                                uint32_t rows, float cap) {
  uint32_t const lane = threadIdx.x % 32, warp = (blockIdx.x * PREFILL_THREADS + threadIdx.x) / 32, warps = gridDim.x * (PREFILL_THREADS / 32);
  for (uint32_t tile = warp; tile * AMK_UNIT_ROWS < rows; tile += warps) {
    float sum = 0.f;
#pragma unroll 4
    for (uint32_t unit = 0; unit < units; ++unit) {
      uint4 const w = *(uint4 const*)(weights + ((uint64_t)tile * units + unit) * AMK_UNIT_BYTES + lane * 16);
      char const* at = x + ((uint64_t)(unit / 2) * pitch + token) * X_ROW_BYTES + lane % 4 * 4;
      uint32_t const a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        float2 const p = pair_values(a[i]), q = half_values(*(uint32_t const*)(at + (unit % 2 * 4 + i ^ token % 8) * 16));
        sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    uint32_t const out = tile * AMK_UNIT_ROWS + lane / 4;
    if (lane % 4 == 0 && out < rows) {
      logits[out] = logit_capped(sum, cap);
    }
  }
}
