// Prefill: memory layout of the vectors of many tokens, and the ops on them that have no matrix.
//
// Vectors that are multiplied are laid out as the weights are: tiles of 8 tokens, units of 8 tokens by 64 bytes along a vector. Each unit of
// high 16-bit halves is followed by the unit of low ones (X_HALVES 2). So a lane's 16 bytes are part of an operand without shuffling, and a
// block reads one run of bytes per tile. Columns after the last one are zero: they are never written after the memory was zeroed.
// The residual stream and the rows of q, k and v, which are not multiplied, are f32, one row per token.
#pragma once

#ifndef AMK_PREFILL_HALVES // 2: vectors are multiplied as sums of two 16-bit halves; 1: as one
#define AMK_PREFILL_HALVES 2
#endif
static_assert(AMK_DTYPE != AMK_DTYPE_F32, "chunks of a prompt are multiplied with 16-bit weights");

constexpr uint32_t X_HALVES = AMK_PREFILL_HALVES;
constexpr uint32_t X_UNIT_BYTES = AMK_UNIT_BYTES * X_HALVES; // of 8 tokens
constexpr uint32_t PREFILL_THREADS = AMK_PREFILL_THREADS;     // threads per block of the kernels without a matrix

extern __shared__ __align__(1024) char prefill_memory[];

// Address of a token's column in its unit of high halves.
__device__ __forceinline__ char* x_place(char* x, uint32_t units, uint32_t token, uint32_t column) {
  uint64_t const unit = (uint64_t)(token / AMK_UNIT_ROWS) * units + column / UNIT_COLS;
  return x + unit * X_UNIT_BYTES + token % AMK_UNIT_ROWS * AMK_UNIT_ROW_BYTES + unit_column(column) * ELEMENT_BYTES;
}

// Writes two neighbouring columns; the first one is even.
__device__ __forceinline__ void x_write2(char* x, uint32_t units, uint32_t token, uint32_t column, float a, float b) {
  char* to = x_place(x, units, token, column);
  uint32_t const high = element_pair(a, b);
  *(uint32_t*)to = high;
  if (X_HALVES == 2) {
    float2 const back = pair_values(high);
    *(uint32_t*)(to + AMK_UNIT_BYTES) = element_pair(a - back.x, b - back.y);
  }
}

// Copies tokens' embeddings into the residual stream, one block per token. Rows are `stride` long, a multiple of 8.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_embed(float* residual, char const* embedding, uint32_t const* tokens, uint32_t stride, uint32_t units) {
  uint32_t const token = tokens[blockIdx.x];
  float* out = residual + (uint64_t)blockIdx.x * stride;
  for (uint32_t e = threadIdx.x * 2; e < stride; e += PREFILL_THREADS * 2) {
    uint64_t const unit = (uint64_t)(token / AMK_UNIT_ROWS) * units + e / UNIT_COLS;
    char const* at = embedding + unit * AMK_UNIT_BYTES + token % AMK_UNIT_ROWS * AMK_UNIT_ROW_BYTES + unit_column(e) * ELEMENT_BYTES;
    *(float2*)(out + e) = pair_values(*(uint32_t const*)at);
  }
}

// Normalises rows of the residual stream into the layout that is multiplied: one block per token.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_norm(char* x, float const* residual, float const* norm, uint32_t stride, uint32_t units, uint32_t columns,
                                                                             float eps) {
  __shared__ float sums[PREFILL_THREADS / 32];
  float const* row = residual + (uint64_t)blockIdx.x * stride;
  float square = 0.f;
  for (uint32_t e = threadIdx.x * 2; e < stride; e += PREFILL_THREADS * 2) {
    float2 const v = *(float2 const*)(row + e); // zero after the last column
    square = fmaf(v.x, v.x, fmaf(v.y, v.y, square));
  }
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = square;
  }
  __syncthreads();
  square = 0.f;
  for (uint32_t i = 0; i < PREFILL_THREADS / 32; ++i) {
    square += sums[i];
  }
  float const scale = rsqrtf(square / (float)columns + eps);
  for (uint32_t e = threadIdx.x * 2; e < stride; e += PREFILL_THREADS * 2) {
    float2 const v = *(float2 const*)(row + e), n = *(float2 const*)(norm + e);
    x_write2(x, units, blockIdx.x, e, v.x * scale * n.x, v.y * scale * n.y);
  }
}

// Writes four elements of a key or a value to its row of the cache, in the layout of key_append and value_append; `e` is a multiple of 4.
__device__ __forceinline__ void cache_write4(char* row, uint32_t position, uint32_t e, float const (&v)[4]) {
  char* to = row + (e / 8 ^ row_swizzle(position)) * 16 + e % 8 * 2;
  *(uint2*)to = make_uint2(cache_pair(v[0], v[1]), cache_pair(v[2], v[3]));
}

// Splits the rows of q, k and v of each token. Queries are normalised, rotated and scaled into `queries`, [token][head][half][head_dim] of f16;
// keys (normalised and rotated) and values go into the pages of the layer and session. HEAD_LANES threads per head.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_heads(char* queries, char* cache, uint16_t const* pages, float const* qkv, float const* angles,
                                                                              float const* q_norm, float const* k_norm, uint32_t tokens, uint32_t stride, uint32_t kv_heads,
                                                                              uint32_t start, float eps, float scale) {
  uint32_t const heads = kv_heads * AMK_GROUP, all = heads + 2 * kv_heads;
  uint64_t const index = (uint64_t)blockIdx.x * PREFILL_THREADS + threadIdx.x;
  uint32_t const part = (uint32_t)(index % HEAD_LANES), token = (uint32_t)(index / HEAD_LANES / all), head = (uint32_t)(index / HEAD_LANES % all);
  bool const mine = token < tokens; // the other lanes take part in the sums over lanes
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
  if (!mine) {
    return;
  }
  if (head < heads) {
    char* to = queries + ((uint64_t)token * heads + head) * 2 * ROW_BYTES + part * 8;
    head_stage(to, u, scale * LOG2_E);
    head_stage(to + AMK_HEAD_DIM, v, scale * LOG2_E); // half a row further on
    return;
  }
  uint32_t const run = head - heads; // the keys of each head, then the values
  uint32_t const run_bytes = PAGE_KEYS * ROW_BYTES;
  char* row = cache + paged_row(pages[position / PAGE_KEYS], kv_heads * run_bytes, position) + run * run_bytes;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    x[i] = run < kv_heads ? u[i] : x[i], y[i] = run < kv_heads ? v[i] : y[i];
  }
  cache_write4(row, position, part * 4, x);
  cache_write4(row, position, AMK_HEAD_DIM / 2 + part * 4, y);
}

// Logits of one token: each warp takes a tile of 8 rows at a time. `x` is the first unit of the token's tile, `row` the token in it.
extern "C" __global__ void __launch_bounds__(PREFILL_THREADS) amk_prefill_logits(float* logits, char const* weights, char const* x, uint32_t row, uint32_t units, uint32_t rows) {
  uint32_t const lane = threadIdx.x % 32, warp = (blockIdx.x * PREFILL_THREADS + threadIdx.x) / 32, warps = gridDim.x * (PREFILL_THREADS / 32);
  for (uint32_t tile = warp; tile * AMK_UNIT_ROWS < rows; tile += warps) {
    float sum = 0.f;
#pragma unroll 4
    for (uint32_t unit = 0; unit < units; ++unit) {
      uint4 const w = *(uint4 const*)(weights + ((uint64_t)tile * units + unit) * AMK_UNIT_BYTES + lane * 16);
      char const* at = x + (uint64_t)unit * X_UNIT_BYTES + row * AMK_UNIT_ROW_BYTES + lane % 4 * 16;
#pragma unroll
      for (uint32_t half = 0; half < X_HALVES; ++half) {
        uint4 const v = *(uint4 const*)(at + half * AMK_UNIT_BYTES);
        uint32_t const a[4] = {w.x, w.y, w.z, w.w}, b[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          float2 const p = pair_values(a[i]), q = pair_values(b[i]);
          sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
      }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    uint32_t const out = tile * AMK_UNIT_ROWS + lane / 4;
    if (lane % 4 == 0 && out < rows) {
      logits[out] = sum;
    }
  }
}
