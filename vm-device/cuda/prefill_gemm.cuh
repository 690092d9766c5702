// Prefill: the vectors of many tokens times a matrix, on the tensor cores.
//
// Weights are the first operand of the warpgroup products (wgmma) and come from registers: a thread's 16 bytes of a unit of 8 rows are its part
// of the operand for two products, and are converted from bf16 to f16 there. Vectors are the second operand and come from shared memory; their
// columns are in the order that this gives (x_column). Producer warps fill a ring of stages with bulk copies, 64 columns each; the consumer
// warpgroups take 64 rows each. Blocks are persistent, so the first stages of the next tile arrive during the epilogue.
#pragma once

// What is done with the products.
enum Epilogue : uint32_t { EPILOGUE_STORE, EPILOGUE_RESIDUAL, EPILOGUE_SILU_MUL };

struct Gemm {
  char const* x;       // vectors, `pitch` tokens apart from 64 columns to the next
  char const* weights; // of `tiles` tiles of 8 rows
  char* out;           // f32 rows of `stride`, or for silu_mul vectors
  float const* bias;   // or null
  float const* factors; // of the rows, or null: their scales, where the weights are codes
  uint32_t* clamped;   // set if an element of the hidden layer is out of range
  uint32_t units, tiles, tokens, stride, pitch;
  float scale; // of the products
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  // Of experts: the number of the first block of tokens of each, and the blocks, or null (prefill_route.cuh). `weights` begin with the first of
  // `experts` experts, `bias` with expert 0; each has `tiles` tiles.
  uint32_t const* first_block;
  uint4 const* blocks;
  uint32_t first_expert, experts;
  float limit; // of a clamped activation, or 0
#endif
};

// Shape of a block: TOKENS by 64 rows for each of GROUPS warpgroups. Two of them take registers from the producer's warpgroup.
template <uint32_t TOKENS_, uint32_t GROUPS, uint32_t STAGES_> struct GemmShape {
  static constexpr uint32_t TOKENS = TOKENS_, STAGES = STAGES_, CONSUMERS = GROUPS * 128, PRODUCERS = GROUPS == 2 ? 4 : 1, THREADS = CONSUMERS + PRODUCERS * 32;
  static constexpr uint32_t TILES = GROUPS * 8, X_BYTES = TOKENS * X_ROW_BYTES;
  static constexpr uint32_t STAGE_BYTES = X_BYTES + TILES * 2 * AMK_UNIT_BYTES;
};

struct GemmTile {
  uint32_t token0, tile0;
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
  uint32_t expert = 0, end = 0; // of the expert's tokens
#endif
};

// Work of a block: tiles of the product, over tokens first, so that blocks which run at the same time share weights.
template <typename Shape> __device__ __forceinline__ GemmTile gemm_tile(Gemm const& g, uint32_t index) {
  uint32_t const token_blocks = (g.tokens + Shape::TOKENS - 1) / Shape::TOKENS;
  return GemmTile{index % token_blocks * Shape::TOKENS, index / token_blocks * Shape::TILES};
}
template <typename Shape> __device__ __forceinline__ uint32_t gemm_tiles(Gemm const& g) {
  return (g.tokens + Shape::TOKENS - 1) / Shape::TOKENS * ((g.tiles + Shape::TILES - 1) / Shape::TILES);
}

// The work of all blocks, and the product that a tile of it belongs to.
template <typename Shape, bool EXPERTS> struct GemmWork {
  Gemm const& g;
  __device__ __forceinline__ explicit GemmWork(Gemm const& all) : g(all) {}
  __device__ __forceinline__ uint32_t tiles() const { return gemm_tiles<Shape>(g); }
  __device__ __forceinline__ GemmTile tile(uint32_t index) const { return gemm_tile<Shape>(g, index); }
  __device__ __forceinline__ Gemm const& of(GemmTile const&) const { return g; }
};
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
// Of experts over rows first: an expert has few blocks of tokens, which share its weights and are near each other all the same.
template <typename Shape> struct GemmWork<Shape, true> {
  Gemm const& g;
  uint32_t row_blocks, first = 0, count;
  __device__ __forceinline__ explicit GemmWork(Gemm const& all) : g(all), row_blocks((all.tiles + Shape::TILES - 1) / Shape::TILES) {
    if (g.blocks != nullptr) {
      first = g.first_block[g.first_expert];
      count = (g.first_block[g.first_expert + g.experts] - first) * row_blocks;
    } else {
      count = gemm_tiles<Shape>(g);
    }
  }
  __device__ __forceinline__ uint32_t tiles() const { return count; }
  __device__ __forceinline__ GemmTile tile(uint32_t index) const {
    if (g.blocks == nullptr) {
      return gemm_tile<Shape>(g, index);
    }
    uint4 const block = g.blocks[first + index / row_blocks];
    return GemmTile{block.y, index % row_blocks * Shape::TILES, block.x, block.z};
  }
  __device__ __forceinline__ Gemm of(GemmTile const& place) const {
    Gemm one = g;
    if (g.blocks != nullptr) {
      one.weights += (uint64_t)(place.expert - g.first_expert) * g.tiles * g.units * AMK_UNIT_BYTES;
      one.bias += g.bias != nullptr ? (uint64_t)place.expert * g.tiles * AMK_UNIT_ROWS : 0;
      one.tokens = place.end;
    }
    return one;
  }
};
#endif
// Experts' products are stored and summed later, none is added to the residual stream.
constexpr bool of_experts(Epilogue kind) { return ROUTES && kind != EPILOGUE_RESIDUAL; }

// Place in the ring of stages. Stages are followed by their barriers: `full`, then `empty`.
template <typename Shape> struct Stages {
  uint32_t at = 0, parity = 0;
  __device__ __forceinline__ uint32_t memory() const { return shared_address(prefill_memory) + at * Shape::STAGE_BYTES; }
  __device__ __forceinline__ uint32_t full() const { return shared_address(prefill_memory) + Shape::STAGES * Shape::STAGE_BYTES + at * 16; }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
  __device__ __forceinline__ uint32_t before() const { return at == 0 ? empty() + (Shape::STAGES - 1) * 16 : empty() - 16; } // `empty` of the stage before
  __device__ __forceinline__ void next() {
    at = at + 1 == Shape::STAGES ? 0 : at + 1;
    parity ^= at == 0;
  }
};

// Waits for a phase of a barrier. A wait is over in microseconds; the trap ends a kernel whose copies never complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#pragma unroll 1
  for (uint32_t tries = 0; !barrier_try_at(barrier, parity); ++tries) {
    if (tries == 1u << 24) {
      __trap();
    }
  }
}

// A producer warp: one of its threads copies two units of each of its tiles of rows, and the columns of its part of the tokens. Copies of
// several threads of a warp would be started one after the other by a loop, 50 cycles and more each.
template <typename Shape, Epilogue KIND> __device__ __forceinline__ void gemm_produce(Gemm const& all) {
  constexpr uint32_t TILES = Shape::TILES / Shape::PRODUCERS, X_PART = Shape::X_BYTES / Shape::PRODUCERS;
  uint32_t const warp = __shfl_sync(~0u, threadIdx.x / 32 - Shape::CONSUMERS / 32, 0);
  bool const elected = warp_elect();
  GemmWork<Shape, of_experts(KIND)> const work(all);
  Stages<Shape> stage;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < work.tiles(); index += gridDim.x) {
    GemmTile const place = work.tile(index);
    Gemm const& g = work.of(place);
    uint32_t const tile0 = place.tile0 + warp * TILES, left = tile0 < g.tiles ? g.tiles - tile0 : 0, tiles = left < TILES ? left : TILES;
    char const* x = g.x + (uint64_t)place.token0 * X_ROW_BYTES + warp * X_PART;
    char const* weights = g.weights + (uint64_t)tile0 * g.units * AMK_UNIT_BYTES;
    uint64_t const next = (uint64_t)g.units * AMK_UNIT_BYTES;
#pragma unroll 1
    for (uint32_t unit = 0; unit < g.units; unit += 2) {
      uint32_t const bytes = (g.units - unit < 2 ? 1 : 2) * AMK_UNIT_BYTES, to = stage.memory() + Shape::X_BYTES + warp * TILES * 2 * AMK_UNIT_BYTES;
      barrier_wait(stage.empty(), stage.parity ^ 1);
      if (elected) {
        stage_expect_at(stage.full(), X_PART + tiles * bytes);
        stage_copy_at(stage.memory() + warp * X_PART, (uint64_t)x, X_PART, stage.full(), 0);
#pragma unroll
        for (uint32_t t = 0; t < TILES; ++t) {
          if (t < tiles) {
            stage_copy_at(to + t * 2 * AMK_UNIT_BYTES, (uint64_t)(weights + t * next), bytes, stage.full(), 0);
          }
        }
      }
      x += (uint64_t)g.pitch * X_ROW_BYTES;
      weights += 2 * AMK_UNIT_BYTES;
      stage.next();
    }
  }
}

// A thread's part of a stage's weights: two rows of 16 by 16 columns for each of four products.
struct Weights {
  uint32_t a[4][4];
};

// Rows of a warp's 16 that a thread has in its two registers: for silu_mul row i of the gate and of up; else a pair of neighbours, in an
// order that spreads a quarter of the warp's loads over all banks.
template <Epilogue KIND> __device__ __forceinline__ uint32_t first_row(uint32_t i) { return KIND == EPILOGUE_SILU_MUL ? i : 2 * i + (i & 1); }
template <Epilogue KIND> __device__ __forceinline__ uint32_t second_row(uint32_t i) { return KIND == EPILOGUE_SILU_MUL ? i + 8 : first_row<KIND>(i) ^ 1; }
__device__ __forceinline__ uint32_t weights_row(uint32_t row) { return row / 8 * 2 * AMK_UNIT_BYTES + row % 8 * AMK_UNIT_ROW_BYTES; }

template <Epilogue KIND> __device__ __forceinline__ void weights_load(Weights& w, uint32_t memory, bool both) {
  uint32_t const lane = threadIdx.x % 32, at = memory + threadIdx.x / 32 * 4 * AMK_UNIT_BYTES + lane % 4 * 16;
  uint32_t const first = at + weights_row(first_row<KIND>(lane / 4)), second = at + weights_row(second_row<KIND>(lane / 4));
#pragma unroll
  for (uint32_t u = 0; u < 2; ++u) {
    bool const there = u == 0 || both;
    uint4 const zero = make_uint4(0, 0, 0, 0);
    uint4 const p = there ? stage_load(shared_place(first + u * AMK_UNIT_BYTES)) : zero, q = there ? stage_load(shared_place(second + u * AMK_UNIT_BYTES)) : zero;
    w.a[2 * u][0] = to_f16(p.x), w.a[2 * u][1] = to_f16(q.x), w.a[2 * u][2] = to_f16(p.y), w.a[2 * u][3] = to_f16(q.y);
    w.a[2 * u + 1][0] = to_f16(p.z), w.a[2 * u + 1][1] = to_f16(q.z), w.a[2 * u + 1][2] = to_f16(p.w), w.a[2 * u + 1][3] = to_f16(q.w);
  }
}

// A row's products as they are meant.
__device__ __forceinline__ float row_factor(Gemm const& g, uint32_t row) { return g.factors != nullptr ? g.factors[row] : 1.f; }

// A limit of 0 clamps nothing.
__device__ __forceinline__ float silu_mul(float gate, float up, float limit) {
  if constexpr (has_feature(AMK_FEATURE_CLAMPED_SILU)) {
    return gated(gate, up, limit != 0.f ? AMK_ACTIVATION_CLAMPED_SILU : AMK_ACTIVATION_SILU, limit);
  }
  return gated(gate, up, has_feature(AMK_FEATURE_GELU_TANH) ? AMK_ACTIVATION_GELU_TANH : AMK_ACTIVATION_SILU, 0.f);
}

// Stores the hidden layer's elements of a tile of gate rows and one of up rows. Threads of neighbouring rows exchange one of two tokens, to
// write neighbouring columns.
template <uint32_t TOKEN_TILES> __device__ __forceinline__ void finish_silu(Gemm const& g, float const (&c)[TOKEN_TILES][4], uint32_t token0, uint32_t tile) {
  uint32_t const lane = threadIdx.x % 32, i = lane / 4, odd = i & 1, row = tile * AMK_UNIT_ROWS + i, token = token0 + lane % 4 * 2 + odd;
  if (tile >= g.tiles) {
    return; // the whole warp
  }
  float const gate = g.bias != nullptr ? g.bias[row] : 0.f, up = g.bias != nullptr ? g.bias[row + AMK_UNIT_ROWS] : 0.f;
  float const of_gate = row_factor(g, row), of_up = row_factor(g, row + AMK_UNIT_ROWS);
  char* const to = x_place(g.out, g.stride, token, tile / 2 * AMK_UNIT_ROWS + (i & 6));
  bool beyond = false;
#if AMK_FEATURES >> AMK_FEATURE_CLAMPED_SILU & 1
  float const limit = g.limit;
#else
  constexpr float limit = 0.f;
#endif
#pragma unroll
  for (uint32_t j = 0; j < TOKEN_TILES; ++j) {
    float const v0 = silu_mul(c[j][0] * of_gate + gate, c[j][2] * of_up + up, limit) * g.scale, v1 = silu_mul(c[j][1] * of_gate + gate, c[j][3] * of_up + up, limit) * g.scale;
    float const other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4), low = odd ? other : v0, high = odd ? v1 : other;
    if (token + j * 8 < g.tokens) {
      beyond |= !(fmaxf(fabsf(low), fabsf(high)) <= 65504.f);
      *(uint32_t*)(to + j * 8 * X_ROW_BYTES) = cache_pair(low, high);
    }
  }
  if (beyond) {
    *g.clamped = 1;
  }
}

// Stores rows of f32, two neighbours per thread and token. All addends of a batch are loaded first: loads after stores would wait for one another.
template <Epilogue KIND, uint32_t TOKEN_TILES> __device__ __forceinline__ void finish_rows(Gemm const& g, float const (&c)[TOKEN_TILES][4], uint32_t token0, uint32_t row0) {
  constexpr uint32_t BATCH = 8; // of 4 tokens per warp
  uint32_t const lane = threadIdx.x % 32, i = lane / 4, row = row0 + 2 * i, token = token0 + lane % 4 * 2;
  if (row >= g.tiles * AMK_UNIT_ROWS) {
    return;
  }
  float2 const bias = g.bias != nullptr ? *(float2 const*)(g.bias + row) : make_float2(0.f, 0.f);
  float const first = g.scale * row_factor(g, row), second = g.scale * row_factor(g, row + 1);
  float* to = (float*)g.out + (uint64_t)token * g.stride + row;
  uint64_t const tile = 8 * g.stride;
#pragma unroll
  for (uint32_t j0 = 0; j0 < 2 * TOKEN_TILES; j0 += BATCH) {
    float2 before[BATCH] = {};
    if (KIND == EPILOGUE_RESIDUAL) {
#pragma unroll
      for (uint32_t k = 0; k < BATCH; ++k) {
        if (token + (j0 + k) / 2 * 8 + k % 2 < g.tokens) {
          before[k] = *(float2 const*)(to + k / 2 * tile + k % 2 * g.stride);
        }
      }
    }
#pragma unroll
    for (uint32_t k = 0; k < BATCH; ++k) {
      float const a = c[(j0 + k) / 2][k % 2], b = c[(j0 + k) / 2][2 + k % 2];
      if (token + (j0 + k) / 2 * 8 + k % 2 < g.tokens) {
        *(float2*)(to + k / 2 * tile + k % 2 * g.stride) = make_float2(fmaf(i & 1 ? b : a, first, bias.x + before[k].x), fmaf(i & 1 ? a : b, second, bias.y + before[k].y));
      }
    }
    to += BATCH / 2 * tile;
  }
}

// One stage: starts its products, and meanwhile gives the stage before back and loads the weights of the next one.
template <typename Shape, Epilogue KIND, uint32_t TOKEN_TILES>
__device__ __forceinline__ void gemm_step(Gemm const& g, float (&c)[TOKEN_TILES][4], Weights const& now, Weights& next, Stages<Shape>& stage, uint32_t unit) {
  group_fence();
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    group_multiply(c, now.a[k], operand<X_ROW_BYTES>(stage.memory() + k * 32));
  }
  group_commit();
  uint32_t const before = stage.before();
  stage.next();
  group_wait<1>();
  if (unit != 0 && threadIdx.x % 32 == 0) {
    barrier_arrive((uint64_t*)shared_place(before));
  }
  if (unit + 2 < g.units) {
    barrier_wait(stage.full(), stage.parity);
    weights_load<KIND>(next, stage.memory() + Shape::X_BYTES, unit + 3 < g.units);
  }
}

template <typename Shape, Epilogue KIND> __device__ __forceinline__ void gemm_consume(Gemm const& all) {
  uint32_t const warp = threadIdx.x / 32;
  GemmWork<Shape, of_experts(KIND)> const work(all);
  Stages<Shape> stage;
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < work.tiles(); index += gridDim.x) {
    GemmTile const place = work.tile(index);
    Gemm const& g = work.of(place);
    float c[Shape::TOKENS / 8][4] = {};
    Weights even, odd;
    barrier_wait(stage.full(), stage.parity);
    weights_load<KIND>(even, stage.memory() + Shape::X_BYTES, g.units > 1);
#pragma unroll 1
    for (uint32_t unit = 0; unit < g.units; unit += 4) {
      gemm_step<Shape, KIND>(g, c, even, odd, stage, unit);
      if (unit + 2 < g.units) {
        gemm_step<Shape, KIND>(g, c, odd, even, stage, unit + 2);
      }
    }
    group_wait<0>();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive((uint64_t*)shared_place(stage.before()));
    }
    if constexpr (KIND == EPILOGUE_SILU_MUL) {
      finish_silu(g, c, place.token0, place.tile0 + warp * 2);
    } else {
      finish_rows<KIND>(g, c, place.token0, place.tile0 * AMK_UNIT_ROWS + warp * 16);
    }
  }
}

template <typename Shape, Epilogue KIND> __device__ __forceinline__ void gemm_block(Gemm const& g) {
  if (threadIdx.x == 0) {
    for (uint32_t s = 0; s < Shape::STAGES; ++s) {
      uint64_t* const full = (uint64_t*)(prefill_memory + Shape::STAGES * Shape::STAGE_BYTES + s * 16);
      barrier_init(full, Shape::PRODUCERS);
      barrier_init(full + 1, Shape::CONSUMERS / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Shape::CONSUMERS) {
    if (Shape::THREADS % 128 == 0) {
      registers_give<40>();
    }
    gemm_produce<Shape, KIND>(g);
  } else {
    if (Shape::THREADS % 128 == 0) {
      registers_take<232>();
    }
    gemm_consume<Shape, KIND>(g);
  }
}

using WideShape = GemmShape<256, 2, 4>;
using MiddleShape = GemmShape<128, 2, 6>;
using SmallShape = GemmShape<64, 1, 4>; // for short prompts: more blocks, each of which reads less

#if AMK_UNPACK != 1 || AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
#define AMK_FACTORS_PARAMETER , float const* factors
#define AMK_FACTORS factors
#else
#define AMK_FACTORS_PARAMETER
#define AMK_FACTORS nullptr
#endif
#if AMK_FEATURES >> AMK_FEATURE_ROUTE & 1
#define AMK_EXPERTS_PARAMETERS , uint32_t const *first_block, uint4 const *blocks, uint32_t first_expert, uint32_t experts, float limit
#define AMK_EXPERTS , first_block, blocks, first_expert, experts, limit
#else
#define AMK_EXPERTS_PARAMETERS
#define AMK_EXPERTS
#endif
#define AMK_PREFILL_GEMM(NAME, SHAPE, BLOCKS_SM, KIND)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, BLOCKS_SM)                                                                                              \
      NAME(char* out, char const* x, char const* weights, float const* bias, uint32_t* clamped, uint32_t units, uint32_t tiles, uint32_t tokens, uint32_t stride,      \
           uint32_t pitch, float scale AMK_FACTORS_PARAMETER AMK_EXPERTS_PARAMETERS) {                                                                                    \
    gemm_block<SHAPE, KIND>(Gemm{x, weights, out, bias, AMK_FACTORS, clamped, units, tiles, tokens, stride, pitch, scale AMK_EXPERTS});                                  \
  }
#define AMK_PREFILL_GEMMS(SHAPE, NAME, BLOCKS_SM)                                                                                                                       \
  AMK_PREFILL_GEMM(amk_prefill_store_##NAME, SHAPE, BLOCKS_SM, EPILOGUE_STORE)                                                                                         \
  AMK_PREFILL_GEMM(amk_prefill_residual_##NAME, SHAPE, BLOCKS_SM, EPILOGUE_RESIDUAL)                                                                                   \
  AMK_PREFILL_GEMM(amk_prefill_silu_##NAME, SHAPE, BLOCKS_SM, EPILOGUE_SILU_MUL)
AMK_PREFILL_GEMMS(WideShape, wide, 1)
AMK_PREFILL_GEMMS(MiddleShape, middle, 1)
AMK_PREFILL_GEMMS(SmallShape, small, 3)
