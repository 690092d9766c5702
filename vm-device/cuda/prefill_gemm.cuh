// Prefill: the vectors of many tokens times a matrix, on the tensor cores.
//
// A block walks along the columns one unit (32 of them) at a time, several of which are in flight or arrived. Weights and vectors have the same
// layout, so a lane's 16 bytes of a unit of 8 rows are its part of a B operand for two products, and its 16 bytes of two units of 8 tokens
// are its part of an A operand. The columns are then not in the instruction's order, but in the same order in both operands.
#pragma once

// What is done with the products.
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
#if AMK_DTYPE == AMK_DTYPE_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Shape of a block: two warps by COLUMNS, each with TOKENS16 tiles of 16 tokens and TILES tiles of 8 rows.
template <uint32_t TOKENS16, uint32_t TILES, uint32_t COLUMNS, uint32_t STAGES> struct GemmShape {
  static constexpr uint32_t WARP_TOKENS16 = TOKENS16, WARP_TILES = TILES, STAGES_HELD = STAGES;
  static constexpr uint32_t THREADS = 2 * COLUMNS * 32;
  static constexpr uint32_t TOKENS = 2 * TOKENS16 * 16, BLOCK_TILES = COLUMNS * TILES;
  static constexpr uint32_t STAGE_X_BYTES = TOKENS / AMK_UNIT_ROWS * X_UNIT_BYTES;
  static constexpr uint32_t STAGE_BYTES = STAGE_X_BYTES + BLOCK_TILES * AMK_UNIT_BYTES;
};

// Starts the copies of one unit of all tokens and rows of the block into a stage. SWIZZLED: the four chunks of a row are permuted by the row's
// number, the 64-byte swizzle of products that read shared memory directly (wgmma).
template <typename Shape, bool SWIZZLED> __device__ __forceinline__ void gemm_copy(Gemm const& g, uint32_t token_tile, uint32_t row_tile, uint32_t unit, char* stage) {
  constexpr uint32_t X_PIECES = X_UNIT_BYTES / 16, W_PIECES = AMK_UNIT_BYTES / 16; // of a tile
  constexpr uint32_t X_COPIES = Shape::TOKENS / AMK_UNIT_ROWS * X_PIECES / Shape::THREADS, W_COPIES = Shape::BLOCK_TILES * W_PIECES / Shape::THREADS;
  static_assert(X_COPIES > 0 && W_COPIES > 0, "every thread copies");
  uint32_t const t = threadIdx.x, to = shared_address(stage) + (SWIZZLED ? t ^ (t >> 3 & 3) : t) * 16;
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
    piece_copy(to + Shape::STAGE_X_BYTES + i * Shape::THREADS * 16, g.weights + from * AMK_UNIT_BYTES + piece % W_PIECES * 16, tile < g.tiles ? 16 : 0);
  }
}

// A warp's products of one unit. `x` and `weights` point to this lane's 16 bytes of the warp's first tiles.
template <uint32_t TOKENS16, uint32_t TILES> __device__ __forceinline__ void gemm_multiply(float (&c)[TOKENS16][TILES][4], char const* x, char const* weights) {
  uint4 b[TILES];
#pragma unroll
  for (uint32_t j = 0; j < TILES; ++j) {
    b[j] = *(uint4 const*)(weights + j * AMK_UNIT_BYTES);
  }
#pragma unroll
  for (uint32_t i = 0; i < TOKENS16; ++i) {
#pragma unroll
    for (uint32_t half = 0; half < X_HALVES; ++half) {
      uint4 const p = *(uint4 const*)(x + 2 * i * X_UNIT_BYTES + half * AMK_UNIT_BYTES);
      uint4 const q = *(uint4 const*)(x + (2 * i + 1) * X_UNIT_BYTES + half * AMK_UNIT_BYTES);
#pragma unroll
      for (uint32_t j = 0; j < TILES; ++j) {
        mma_elements(c[i][j], p.x, q.x, p.y, q.y, b[j].x, b[j].y);
      }
#pragma unroll
      for (uint32_t j = 0; j < TILES; ++j) {
        mma_elements(c[i][j], p.z, q.z, p.w, q.w, b[j].z, b[j].w);
      }
    }
  }
}

__device__ __forceinline__ float2 bias_of(Gemm const& g, uint32_t row) { return g.bias != nullptr ? *(float2 const*)(g.bias + row) : make_float2(0.f, 0.f); }

// Stores the products of some tiles for a token, two rows each; `at` is the first tile's address. All addends are loaded first: loads after
// stores would wait for one another.
template <Epilogue KIND, uint32_t TILES> __device__ __forceinline__ void gemm_store(Gemm const& g, float* at, uint32_t row, uint32_t tile, float2 const (&v)[TILES]) {
  float2 bias[TILES] = {}, before[TILES] = {};
#pragma unroll
  for (uint32_t j = 0; j < TILES; ++j) {
    if (tile + j < g.tiles) {
      bias[j] = bias_of(g, row + j * AMK_UNIT_ROWS);
      if (KIND == EPILOGUE_RESIDUAL) {
        before[j] = *(float2 const*)(at + j * AMK_UNIT_ROWS);
      }
    }
  }
#pragma unroll
  for (uint32_t j = 0; j < TILES; ++j) {
    if (tile + j < g.tiles) {
      *(float2*)(at + j * AMK_UNIT_ROWS) = make_float2(v[j].x + bias[j].x + before[j].x, v[j].y + bias[j].y + before[j].y);
    }
  }
}
__device__ __forceinline__ float silu_mul(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }

// Stores a warp's products. `token0` and `tile0` are its first token and tile of rows.
template <Epilogue KIND, uint32_t TOKENS16, uint32_t TILES>
__device__ __forceinline__ void gemm_finish(Gemm const& g, float const (&c)[TOKENS16][TILES][4], uint32_t token0, uint32_t tile0) {
  uint32_t const lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < TOKENS16; ++i) {
#pragma unroll
    for (uint32_t upper = 0; upper < 2; ++upper) {
      uint32_t const token = token0 + i * 16 + upper * 8 + lane / 4;
      if (token >= g.tokens) {
        continue;
      }
      if constexpr (KIND == EPILOGUE_SILU_MUL) { // tiles of gate and up alternate
#pragma unroll
        for (uint32_t j = 0; j < TILES; j += 2) {
          uint32_t const row = (tile0 + j) * AMK_UNIT_ROWS + lane % 4 * 2;
          if (tile0 + j < g.tiles) {
            float2 const a = bias_of(g, row), b = bias_of(g, row + AMK_UNIT_ROWS);
            float const v0 = silu_mul(c[i][j][2 * upper] + a.x, c[i][j + 1][2 * upper] + b.x);
            float const v1 = silu_mul(c[i][j][2 * upper + 1] + a.y, c[i][j + 1][2 * upper + 1] + b.y);
            x_write2(g.out, g.stride, token, (tile0 + j) / 2 * AMK_UNIT_ROWS + lane % 4 * 2, v0, v1);
          }
        }
      } else {
        constexpr uint32_t AT_ONCE = TILES <= 4 ? TILES : 1; // eight at once in a warpgroup were slower with 1 000 tokens, when all do it together
        uint32_t const row = tile0 * AMK_UNIT_ROWS + lane % 4 * 2;
        float* const at = (float*)g.out + (uint64_t)token * g.stride + row;
#pragma unroll
        for (uint32_t j = 0; j < TILES; j += AT_ONCE) {
          float2 v[AT_ONCE];
#pragma unroll
          for (uint32_t k = 0; k < AT_ONCE; ++k) {
            v[k] = make_float2(c[i][j + k][2 * upper], c[i][j + k][2 * upper + 1]);
          }
          gemm_store<KIND>(g, at + j * AMK_UNIT_ROWS, row + j * AMK_UNIT_ROWS, tile0 + j, v);
        }
      }
    }
  }
}

// A block's work. Block indices vary over tokens first, so that blocks which run at the same time share weights.
template <typename Shape, Epilogue KIND> __device__ __forceinline__ void gemm_warps(Gemm const& g) {
  constexpr uint32_t STAGES = Shape::STAGES_HELD;
  uint32_t const token_blocks = (g.tokens + Shape::TOKENS - 1) / Shape::TOKENS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t const token0 = blockIdx.x % token_blocks * Shape::TOKENS, tile0 = blockIdx.x / token_blocks * Shape::BLOCK_TILES;
  uint32_t const warp_tokens = warp % 2 * Shape::WARP_TOKENS16 * 16, warp_tiles = warp / 2 * Shape::WARP_TILES;
  uint32_t const x_at = warp_tokens / AMK_UNIT_ROWS * X_UNIT_BYTES + lane * 16, weights_at = Shape::STAGE_X_BYTES + warp_tiles * AMK_UNIT_BYTES + lane * 16;
  float c[Shape::WARP_TOKENS16][Shape::WARP_TILES][4] = {};
#pragma unroll
  for (uint32_t s = 0; s < STAGES - 1; ++s) {
    if (s < g.units) {
      gemm_copy<Shape, false>(g, token0 / AMK_UNIT_ROWS, tile0, s, prefill_memory + s * Shape::STAGE_BYTES);
    }
    pieces_group();
  }
  uint32_t at = 0, next = STAGES - 1;
#pragma unroll 1
  for (uint32_t unit = 0; unit < g.units; ++unit) {
    pieces_wait<STAGES - 2>();
    __syncthreads(); // the unit has arrived, and all warps are done with the one before, whose stage is refilled next
    if (unit + STAGES - 1 < g.units) {
      gemm_copy<Shape, false>(g, token0 / AMK_UNIT_ROWS, tile0, unit + STAGES - 1, prefill_memory + next * Shape::STAGE_BYTES);
    }
    pieces_group();
    gemm_multiply(c, prefill_memory + at * Shape::STAGE_BYTES + x_at, prefill_memory + at * Shape::STAGE_BYTES + weights_at);
    at = at + 1 == STAGES ? 0 : at + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
  gemm_finish<KIND>(g, c, token0 + warp_tokens, tile0 + warp_tiles);
}

// The same with warpgroup products (wgmma), which read both operands from shared memory: 64 tokens by 256 rows each, two of them per block.
using GroupShape = GemmShape<4, 8, 4, 6>;
constexpr uint32_t GROUP_TILES = GroupShape::BLOCK_TILES; // each group takes all rows of the block and half of its tokens

// wgmma descriptor of a swizzled operand: groups of 8 rows of 64 bytes, `stride` bytes apart.
__device__ __forceinline__ uint64_t operand(uint32_t at, uint32_t stride) { return (uint64_t)(at >> 4) | 1ull << 16 | (uint64_t)(stride >> 4) << 32 | 2ull << 62; }

__device__ __forceinline__ void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <uint32_t LEFT> __device__ __forceinline__ void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// c += a . b for a 64x16 a and a 16x256 b. A warp has 16 rows of c, in tiles of 8 columns as mma_elements has them.
__device__ __forceinline__ void group_multiply(float (&c)[1][GROUP_TILES][4], uint64_t a, uint64_t b) {
#define AMK_TILE(J) "+f"(c[0][J][0]), "+f"(c[0][J][1]), "+f"(c[0][J][2]), "+f"(c[0][J][3])
#if AMK_DTYPE == AMK_DTYPE_BF16
#define AMK_TYPES "bf16.bf16"
#else
#define AMK_TYPES "f16.f16"
#endif
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." AMK_TYPES " "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
      "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
      "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
      "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
      "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
      "%128, %129, 1, 1, 1, 0, 0;"
      : AMK_TILE(0), AMK_TILE(1), AMK_TILE(2), AMK_TILE(3), AMK_TILE(4), AMK_TILE(5), AMK_TILE(6), AMK_TILE(7),
        AMK_TILE(8), AMK_TILE(9), AMK_TILE(10), AMK_TILE(11), AMK_TILE(12), AMK_TILE(13), AMK_TILE(14), AMK_TILE(15),
        AMK_TILE(16), AMK_TILE(17), AMK_TILE(18), AMK_TILE(19), AMK_TILE(20), AMK_TILE(21), AMK_TILE(22), AMK_TILE(23),
        AMK_TILE(24), AMK_TILE(25), AMK_TILE(26), AMK_TILE(27), AMK_TILE(28), AMK_TILE(29), AMK_TILE(30), AMK_TILE(31)
      : "l"(a), "l"(b));
#undef AMK_TYPES
#undef AMK_TILE
}

template <Epilogue KIND> __device__ __forceinline__ void gemm_group(Gemm const& g) {
  using Shape = GroupShape;
  constexpr uint32_t STAGES = Shape::STAGES_HELD, AHEAD = STAGES - 2; // the products of the unit before the last may still be reading
  uint32_t const token_blocks = (g.tokens + Shape::TOKENS - 1) / Shape::TOKENS, warp = threadIdx.x / 32, group = warp / 4;
  uint32_t const token0 = blockIdx.x % token_blocks * Shape::TOKENS, tile0 = blockIdx.x / token_blocks * Shape::BLOCK_TILES;
  uint32_t const memory = shared_address(prefill_memory), x_at = memory + group * (Shape::TOKENS / 2 / AMK_UNIT_ROWS) * X_UNIT_BYTES, weights_at = memory + Shape::STAGE_X_BYTES;
  float c[1][GROUP_TILES][4] = {};
#pragma unroll
  for (uint32_t s = 0; s < AHEAD; ++s) {
    if (s < g.units) {
      gemm_copy<Shape, true>(g, token0 / AMK_UNIT_ROWS, tile0, s, prefill_memory + s * Shape::STAGE_BYTES);
    }
    pieces_group();
  }
  uint32_t at = 0, next = AHEAD;
#pragma unroll 1
  for (uint32_t unit = 0; unit < g.units; ++unit) {
    pieces_wait<AHEAD - 1>();
    products_see_pieces();
    __syncthreads(); // the unit has arrived, and all products of the one before the last are done, whose stage is refilled next
    if (unit + AHEAD < g.units) {
      gemm_copy<Shape, true>(g, token0 / AMK_UNIT_ROWS, tile0, unit + AHEAD, prefill_memory + next * Shape::STAGE_BYTES);
    }
    pieces_group();
    group_fence();
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
      for (uint32_t half = 0; half < X_HALVES; ++half) {
        uint32_t const stage = at * Shape::STAGE_BYTES + k * 32;
        group_multiply(c, operand(x_at + stage + half * AMK_UNIT_BYTES, X_UNIT_BYTES), operand(weights_at + stage, AMK_UNIT_BYTES));
      }
    }
    group_commit();
    group_wait<1>();
    at = at + 1 == STAGES ? 0 : at + 1;
    next = next + 1 == STAGES ? 0 : next + 1;
  }
  group_wait<0>();
  gemm_finish<KIND>(g, c, token0 + warp * 16, tile0);
}

using SmallShape = GemmShape<2, 4, 2, 4>;  // 64 by 64, for short prompts: more blocks, each of which reads less

#define AMK_PREFILL_GEMM(NAME, SHAPE, BLOCKS_SM, RUN)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(SHAPE::THREADS, BLOCKS_SM)                                                                                              \
      NAME(char* out, char const* x, char const* weights, float const* bias, uint32_t units, uint32_t tiles, uint32_t tokens, uint32_t stride) {                       \
    RUN(Gemm{x, weights, out, bias, units, tiles, tokens, stride});                                                                                                    \
  }
AMK_PREFILL_GEMM(amk_prefill_store_group, GroupShape, 1, (gemm_group<EPILOGUE_STORE>))
AMK_PREFILL_GEMM(amk_prefill_residual_group, GroupShape, 1, (gemm_group<EPILOGUE_RESIDUAL>))
AMK_PREFILL_GEMM(amk_prefill_silu_group, GroupShape, 1, (gemm_group<EPILOGUE_SILU_MUL>))
AMK_PREFILL_GEMM(amk_prefill_store_small, SmallShape, 4, (gemm_warps<SmallShape, EPILOGUE_STORE>))
AMK_PREFILL_GEMM(amk_prefill_residual_small, SmallShape, 4, (gemm_warps<SmallShape, EPILOGUE_RESIDUAL>))
AMK_PREFILL_GEMM(amk_prefill_silu_small, SmallShape, 4, (gemm_warps<SmallShape, EPILOGUE_SILU_MUL>))
