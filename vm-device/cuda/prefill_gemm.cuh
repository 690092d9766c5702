// Prefill: the vectors of many tokens times a matrix, on the tensor cores.
//
// A block has 128 tokens by 64 * COLUMNS rows of the matrix, each warp 64 tokens by 64 rows. It goes along the columns a unit (32 of them) at
// a time, STAGES of which are on their way or landed. Weights and vectors have the same layout, so a lane's 16 bytes of a unit of 8 rows are its
// part of a right operand for two products, and its 16 bytes of two units of 8 tokens are its part of a left one. The columns are
// then not in the order that the instruction has in mind, but in the same order in both.
#pragma once

constexpr uint32_t GEMM_TOKENS = 128, WARP_TOKENS = 64, WARP_ROWS = 64;
constexpr uint32_t TOKEN_TILES = WARP_TOKENS / 16, ROW_TILES = WARP_ROWS / AMK_UNIT_ROWS; // of a warp

// What becomes of the products.
enum Epilogue : uint32_t { EPILOGUE_STORE, EPILOGUE_RESIDUAL, EPILOGUE_SILU_MUL };

struct Gemm {
  char const* x;       // vectors
  char const* weights; // of `tiles` tiles of 8 rows
  char* out;           // f32 rows of `stride`, or for silu_mul vectors of `stride` units
  float const* bias;   // or null
  uint32_t units, tiles, tokens, stride;
};

// c += a . b for a 16x16 a and a 16x8 b. Not volatile, so that products and loads can be interleaved.
__device__ __forceinline__ void mma_elements(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if AMK_DTYPE == 2
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <uint32_t COLUMNS> struct GemmShape {
  static constexpr uint32_t THREADS = 2 * COLUMNS * 32;
  static constexpr uint32_t ROWS = COLUMNS * WARP_ROWS;
  static constexpr uint32_t X_BYTES_STAGE = GEMM_TOKENS / AMK_UNIT_ROWS * X_UNIT_BYTES;
  static constexpr uint32_t STAGE_BYTES = X_BYTES_STAGE + ROWS / AMK_UNIT_ROWS * AMK_UNIT_BYTES;
};

// One unit of all tokens and rows of the block on its way into a stage.
template <uint32_t COLUMNS> __device__ __forceinline__ void gemm_copy(Gemm const& g, uint32_t token_tile, uint32_t row_tile, uint32_t unit, char* stage) {
  using Shape = GemmShape<COLUMNS>;
  constexpr uint32_t X_PIECES = X_UNIT_BYTES / 16, W_PIECES = AMK_UNIT_BYTES / 16; // of a tile
  constexpr uint32_t X_COPIES = GEMM_TOKENS / AMK_UNIT_ROWS * X_PIECES / Shape::THREADS, W_COPIES = Shape::ROWS / AMK_UNIT_ROWS * W_PIECES / Shape::THREADS;
  uint32_t const t = threadIdx.x, to = shared_address(stage) + t * 16;
#pragma unroll
  for (uint32_t i = 0; i < X_COPIES; ++i) {
    uint32_t const piece = i * Shape::THREADS + t;
    uint64_t const from = (uint64_t)(token_tile + piece / X_PIECES) * g.units + unit;
    piece_copy(to + i * Shape::THREADS * 16, g.x + from * X_UNIT_BYTES + piece % X_PIECES * 16, 16);
  }
#pragma unroll
  for (uint32_t i = 0; i < W_COPIES; ++i) {
    uint32_t const piece = i * Shape::THREADS + t, tile = row_tile + piece / W_PIECES;
    uint64_t const from = (uint64_t)(tile < g.tiles ? tile : 0) * g.units + unit;
    piece_copy(to + Shape::X_BYTES_STAGE + i * Shape::THREADS * 16, g.weights + from * AMK_UNIT_BYTES + piece % W_PIECES * 16, tile < g.tiles ? 16 : 0);
  }
}

// A warp's products of one unit. `x` and `weights`: this lane's 16 bytes of its first tiles.
__device__ __forceinline__ void gemm_multiply(float (&c)[TOKEN_TILES][ROW_TILES][4], char const* x, char const* weights) {
  uint4 b[ROW_TILES];
#pragma unroll
  for (uint32_t j = 0; j < ROW_TILES; ++j) {
    b[j] = *(uint4 const*)(weights + j * AMK_UNIT_BYTES);
  }
#pragma unroll
  for (uint32_t i = 0; i < TOKEN_TILES; ++i) {
#pragma unroll
    for (uint32_t half = 0; half < X_HALVES; ++half) {
      uint4 const p = *(uint4 const*)(x + 2 * i * X_UNIT_BYTES + half * AMK_UNIT_BYTES);
      uint4 const q = *(uint4 const*)(x + (2 * i + 1) * X_UNIT_BYTES + half * AMK_UNIT_BYTES);
#pragma unroll
      for (uint32_t j = 0; j < ROW_TILES; ++j) {
        mma_elements(c[i][j], p.x, q.x, p.y, q.y, b[j].x, b[j].y);
      }
#pragma unroll
      for (uint32_t j = 0; j < ROW_TILES; ++j) {
        mma_elements(c[i][j], p.z, q.z, p.w, q.w, b[j].z, b[j].w);
      }
    }
  }
}

__device__ __forceinline__ float2 bias_of(Gemm const& g, uint32_t row) { return g.bias != nullptr ? *(float2 const*)(g.bias + row) : make_float2(0.f, 0.f); }

// Two rows' products of a token, `row` being even and of tile `j` of the warp's.
template <Epilogue KIND> __device__ __forceinline__ void gemm_store(Gemm const& g, uint32_t token, uint32_t row, float2 v) {
  float* at = (float*)g.out + (uint64_t)token * g.stride + row;
  float2 const bias = bias_of(g, row);
  v.x += bias.x, v.y += bias.y;
  if (KIND == EPILOGUE_RESIDUAL) {
    float2 const r = *(float2 const*)at;
    v.x += r.x, v.y += r.y;
  }
  *(float2*)at = v;
}
__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }

// A warp's products to where they belong; its first token and tile of rows.
template <Epilogue KIND> __device__ __forceinline__ void gemm_finish(Gemm const& g, float const (&c)[TOKEN_TILES][ROW_TILES][4], uint32_t token0, uint32_t tile0) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < TOKEN_TILES; ++i) {
#pragma unroll
    for (uint32_t upper = 0; upper < 2; ++upper) {
      uint32_t const token = token0 + i * 16 + upper * 8 + lane / 4;
      if (token >= g.tokens) {
        continue;
      }
      if constexpr (KIND == EPILOGUE_SILU_MUL) { // tiles of gate and up alternate
#pragma unroll
        for (uint32_t j = 0; j < ROW_TILES; j += 2) {
          uint32_t const row = (tile0 + j) * AMK_UNIT_ROWS + lane % 4 * 2;
          if (tile0 + j < g.tiles) {
            float2 const a = bias_of(g, row), b = bias_of(g, row + AMK_UNIT_ROWS);
            float const v0 = silu_mul(c[i][j][2 * upper] + a.x, c[i][j + 1][2 * upper] + b.x);
            float const v1 = silu_mul(c[i][j][2 * upper + 1] + a.y, c[i][j + 1][2 * upper + 1] + b.y);
            x_write2(g.out, g.stride, token, (tile0 + j) / 2 * AMK_UNIT_ROWS + lane % 4 * 2, v0, v1);
          }
        }
      } else {
#pragma unroll
        for (uint32_t j = 0; j < ROW_TILES; ++j) {
          if (tile0 + j < g.tiles) {
            gemm_store<KIND>(g, token, (tile0 + j) * AMK_UNIT_ROWS + lane % 4 * 2, make_float2(c[i][j][2 * upper], c[i][j][2 * upper + 1]));
          }
        }
      }
    }
  }
}

// A block's part: tokens first, so that blocks which run at the same time share weights.
template <uint32_t COLUMNS, uint32_t STAGES, Epilogue KIND> __device__ __forceinline__ void gemm(Gemm const& g) {
  using Shape = GemmShape<COLUMNS>;
  uint32_t const token_blocks = (g.tokens + GEMM_TOKENS - 1) / GEMM_TOKENS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t const token0 = blockIdx.x % token_blocks * GEMM_TOKENS, tile0 = blockIdx.x / token_blocks * (Shape::ROWS / AMK_UNIT_ROWS);
  uint32_t const warp_tokens = warp % 2 * WARP_TOKENS, warp_tiles = warp / 2 * ROW_TILES;
  uint32_t const x_at = warp_tokens / AMK_UNIT_ROWS * X_UNIT_BYTES + lane * 16, weights_at = Shape::X_BYTES_STAGE + warp_tiles * AMK_UNIT_BYTES + lane * 16;
  float c[TOKEN_TILES][ROW_TILES][4] = {};
#pragma unroll
  for (uint32_t s = 0; s < STAGES - 1; ++s) {
    if (s < g.units) {
      gemm_copy<COLUMNS>(g, token0 / AMK_UNIT_ROWS, tile0, s, prefill_memory + s * Shape::STAGE_BYTES);
    }
    pieces_group();
  }
  uint32_t at = 0, next = STAGES - 1;
#pragma unroll 1
  for (uint32_t unit = 0; unit < g.units; ++unit) {
    pieces_wait<STAGES - 2>();
    __syncthreads(); // the unit is there, and everybody is done with the one before, whose stage is filled next
    if (unit + STAGES - 1 < g.units) {
      gemm_copy<COLUMNS>(g, token0 / AMK_UNIT_ROWS, tile0, unit + STAGES - 1, prefill_memory + next * Shape::STAGE_BYTES);
    }
    pieces_group();
    gemm_multiply(c, prefill_memory + at * Shape::STAGE_BYTES + x_at, prefill_memory + at * Shape::STAGE_BYTES + weights_at);
    at = at + 1 == STAGES ? 0 : at + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
  gemm_finish<KIND>(g, c, token0 + warp_tokens, tile0 + warp_tiles);
}

// Two shapes of blocks: `wide` ones read less, two `narrow` ones fit on a multiprocessor and leave less over.
#define AMK_PREFILL_GEMM(NAME, COLUMNS, STAGES, BLOCKS_SM, KIND)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(GemmShape<COLUMNS>::THREADS, BLOCKS_SM)                                                                                \
      NAME(char* out, char const* x, char const* weights, float const* bias, uint32_t units, uint32_t tiles, uint32_t tokens, uint32_t stride) {                       \
    gemm<COLUMNS, STAGES, KIND>(Gemm{x, weights, out, bias, units, tiles, tokens, stride});                                                                            \
  }
AMK_PREFILL_GEMM(amk_prefill_store_wide, 4, 6, 1, EPILOGUE_STORE)
AMK_PREFILL_GEMM(amk_prefill_residual_wide, 4, 6, 1, EPILOGUE_RESIDUAL)
AMK_PREFILL_GEMM(amk_prefill_silu_wide, 4, 6, 1, EPILOGUE_SILU_MUL)
AMK_PREFILL_GEMM(amk_prefill_store_narrow, 2, 4, 2, EPILOGUE_STORE)
AMK_PREFILL_GEMM(amk_prefill_residual_narrow, 2, 4, 2, EPILOGUE_RESIDUAL)
AMK_PREFILL_GEMM(amk_prefill_silu_narrow, 2, 4, 2, EPILOGUE_SILU_MUL)
