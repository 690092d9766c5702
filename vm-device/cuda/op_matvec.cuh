// matvec: rows of a streamed matrix times a vector, with the norm or the attention merge in front and the residual, activation or
// argmax behind. Same stages as reference-vm/src/ops/matvec.rs.
#pragma once

#if AMK_MMA
// c += a . b for a 16x16 a (rows 0 and 1 used) and a 16x8 b.
__device__ __forceinline__ void mma(float* c, uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
#if AMK_DTYPE == 2
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
#endif
}
#endif

// Element e..e+4 of the vector into the activation buffer, in the form that the consumer multiplies: f32, or for the tensor cores
// the high and the low 16-bit half of each element, 64 bytes of each per unit (about 16 bits of precision for bf16).
__device__ __forceinline__ void stage_x4(Worker const& w, uint32_t e, float4 v) {
#if AMK_MMA
  char* p = w.x + (e / UNIT_COLS) * (2 * AMK_UNIT_ROW_BYTES) + (e % UNIT_COLS) * 2;
  float const in[4] = {v.x, v.y, v.z, v.w};
  uint32_t hi[4], lo[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    hi[i] = element_bits(in[i]);
#if AMK_DTYPE == 2
    float const back = __uint_as_float(hi[i] << 16);
#else
    float back;
    asm("cvt.f32.f16 %0, %1;" : "=f"(back) : "h"((uint16_t)hi[i]));
#endif
    lo[i] = element_bits(in[i] - back);
  }
  *(uint2*)p = make_uint2(hi[0] | hi[1] << 16, hi[2] | hi[3] << 16);
  *(uint2*)(p + AMK_UNIT_ROW_BYTES) = make_uint2(lo[0] | lo[1] << 16, lo[2] | lo[3] << 16);
#else
  *(float4*)(w.x + (size_t)e * 4) = v;
#endif
}

// One unit: 8 rows by UNIT_COLS columns. Each lane holds 16 bytes of row lane / 4.
struct Accumulator {
#if AMK_MMA
  float c[4];
#else
  float c[2];
#endif
};

struct UnitData {
  uint4 weights;
#if AMK_MMA
  uint4 x;
#else
  float x[LANE_COLS];
#endif
};

__device__ __forceinline__ UnitData unit_load(char const* unit, char const* x, uint32_t lane) {
  UnitData d;
  d.weights = *(uint4 const*)(unit + lane * 16);
#if AMK_MMA
  d.x = lane < 8 ? *(uint4 const*)(x + (lane >> 2) * AMK_UNIT_ROW_BYTES + (lane & 3) * 16) : make_uint4(0, 0, 0, 0);
#else
#pragma unroll
  for (uint32_t i = 0; i < LANE_COLS; i += 4) {
    float4 const v = *(float4 const*)(x + ((lane & 3) * LANE_COLS + i) * 4);
    d.x[i] = v.x, d.x[i + 1] = v.y, d.x[i + 2] = v.z, d.x[i + 3] = v.w;
  }
#endif
  return d;
}

__device__ __forceinline__ void unit_multiply(Accumulator& a, UnitData const& d) {
#if AMK_MMA
  mma(a.c, d.x.x, d.x.y, d.weights.x, d.weights.y);
  mma(a.c, d.x.z, d.x.w, d.weights.z, d.weights.w);
#else
  float v[8];
  unpack(d.weights, v);
#pragma unroll
  for (uint32_t i = 0; i < LANE_COLS; i += 2) {
    a.c[0] = fmaf(v[i], d.x[i], a.c[0]);
    a.c[1] = fmaf(v[i + 1], d.x[i + 1], a.c[1]);
  }
#endif
}

// This warp's share of a tile: units warp, warp + WARPS, ... of `units`, the tile's first unit being `first` of the step's stream.
__device__ __forceinline__ void tile_multiply(Worker const& w, Cursor& c, uint32_t first, uint32_t units, float* part) {
  uint32_t const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t const stage_units = c.stage_units;
  constexpr uint32_t X_BYTES = UNIT_COLS * 4; // staged bytes of a unit's columns, in either form
  Accumulator acc[AMK_UNROLL] = {};
  uint32_t u = warp;
  while (u < units) {
    cursor_seek(w, c, first + u);
    // Units of this tile in the current stage.
    uint32_t const left = c.base + stage_units - first;
    uint32_t const end = left < units ? left : units;
    char const* stage = w.ring + (size_t)c.stage * stage_units * AMK_UNIT_BYTES + (int32_t)(first - c.base) * (int32_t)AMK_UNIT_BYTES;
    for (; u + (AMK_UNROLL - 1) * AMK_WARPS < end; u += AMK_UNROLL * AMK_WARPS) {
      UnitData d[AMK_UNROLL];
#pragma unroll
      for (uint32_t i = 0; i < AMK_UNROLL; ++i) {
        uint32_t const v = u + i * AMK_WARPS;
        d[i] = unit_load(stage + v * AMK_UNIT_BYTES, w.x + v * X_BYTES, lane);
      }
#pragma unroll
      for (uint32_t i = 0; i < AMK_UNROLL; ++i) {
        unit_multiply(acc[i], d[i]);
      }
    }
    for (; u < end; u += AMK_WARPS) {
      UnitData const d = unit_load(stage + u * AMK_UNIT_BYTES, w.x + u * X_BYTES, lane);
      unit_multiply(acc[0], d);
    }
  }
  // Also a warp without a share in the last stages frees them: in a narrow matrix the others need the ring while it would wait.
  cursor_pass(w, c, first + units);
#if AMK_MMA
  float r0 = 0.f, r1 = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_UNROLL; ++i) {
    r0 += acc[i].c[0];
    r1 += acc[i].c[1];
  }
  r0 += __shfl_down_sync(~0u, r0, 4); // row 0 holds the high halves' products, row 1 the low halves'
  r1 += __shfl_down_sync(~0u, r1, 4);
  if (lane < 4) {
    *(float2*)(part + lane * 2) = make_float2(r0, r1);
  }
#else
  float r = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_UNROLL; ++i) {
    r += acc[i].c[0] + acc[i].c[1];
  }
  r += __shfl_xor_sync(~0u, r, 1);
  r += __shfl_xor_sync(~0u, r, 2);
  if ((lane & 3) == 0) {
    part[lane / 4] = r;
  }
#endif
}

// Fills the activation buffer with the prologue's result and leaves the sum of squares in `sums`.
__device__ __forceinline__ void stage_input(Worker const& w, StagedTask const& st, amk_matvec_params const& p) {
  uint32_t const t = threadIdx.x, padded = p.units * UNIT_COLS;
  ResolvedSlot const in = st.slot[0];
  uint32_t const generation = st.task.read_generation[0];
  float square = 0.f;
  bool const rms = p.prologue == AMK_PROLOGUE_RMS, merge = p.prologue == AMK_PROLOGUE_MERGE;
  float const* norm = (float const*)st.slot[1].address;
  float* weights = (float*)(w.x + (size_t)padded * 4);
  MergeShape m = {};
  if (merge) {
    m = merge_shape(w, p.k_len / p.head_dim, 0, p.head_dim, p.splits, p.kv_block, p.window);
    merge_weights(w, in, generation, m, p.k_len / p.head_dim, weights);
  }
  for (uint32_t e0 = t * 4; e0 < padded; e0 += INPUT_BATCH * CONSUMERS * 4) {
    float4 v[INPUT_BATCH], n[INPUT_BATCH];
    uint32_t e[INPUT_BATCH];
    bool wanted[INPUT_BATCH];
#pragma unroll
    for (uint32_t i = 0; i < INPUT_BATCH; ++i) {
      e[i] = e0 + i * CONSUMERS * 4;
      wanted[i] = e[i] + 4 <= p.k_len;
      n[i] = rms && e[i] < padded ? __ldg((float4 const*)(norm + e[i])) : make_float4(1.f, 1.f, 1.f, 1.f); // padded with zeros
    }
    if (merge) {
      merge_read_batch(w, in, generation, m, e, wanted, weights, v);
    } else {
      slot_read_batch<INPUT_BATCH, true>(w, in, generation, e, wanted, v);
    }
#pragma unroll
    for (uint32_t i = 0; i < INPUT_BATCH; ++i) {
      if (e[i] >= padded) {
        continue;
      }
      if (!wanted[i] && !merge) {
        v[i] = slot_read4(w, in, generation, e[i], p.k_len); // the ragged end
      }
      square += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
      stage_x4(w, e[i], make_float4(v[i].x * n[i].x, v[i].y * n[i].y, v[i].z * n[i].z, v[i].w * n[i].w));
    }
  }
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    square += __shfl_xor_sync(~0u, square, o);
  }
  if (t % 32 == 0) {
    w.shared->sums[t / 32] = square;
  }
  consumers_sync();
}

// A running best: greater value wins, then the smaller row.
struct Best {
  float value;
  uint32_t row;
};
__device__ __forceinline__ Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.row < a.row) ? b : a; }
__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    b = better(b, Best{__shfl_xor_sync(~0u, b.value, o), __shfl_xor_sync(~0u, b.row, o)});
  }
  return b;
}

// Rows of `nt` tiles from `tile` on: sums over the warps, scale, bias, then what the epilogue says.
__device__ __forceinline__ void epilogue(Worker const& w, StagedTask const& st, amk_matvec_params const& p, uint32_t tile, uint32_t nt, float scale, float residual,
                                         float bias, float bias_up, Best& best) {
  uint32_t const t = threadIdx.x, row = tile * AMK_UNIT_ROWS + t;
  if (t >= nt * AMK_UNIT_ROWS || row >= p.rows) {
    return;
  }
  float v = 0.f;
#pragma unroll
  for (uint32_t i = 0; i < AMK_WARPS; ++i) {
    v += w.shared->part[i][t];
  }
  v = v * scale + bias;
  if (p.epilogue == AMK_EPILOGUE_SILU_MUL) {
    if ((t / AMK_UNIT_ROWS) % 2 == 0) {
      float up = 0.f;
#pragma unroll
      for (uint32_t i = 0; i < AMK_WARPS; ++i) {
        up += w.shared->part[i][t + AMK_UNIT_ROWS];
      }
      up = up * scale + bias_up;
      uint32_t const out = row / (2 * AMK_UNIT_ROWS) * AMK_UNIT_ROWS + row % AMK_UNIT_ROWS;
      if (out < st.slot[AMK_READS_MAX].units) { // words of the slot: padding rows are dropped
        slot_write(w, st.slot[AMK_READS_MAX], st.task.write_generation[0], out, v / (1.f + expf(-v)) * up);
      }
    }
    return;
  }
  if (p.epilogue == AMK_EPILOGUE_LOGITS) {
    best = better(best, Best{v, row});
    store_f32((float*)st.slot[AMK_READS_MAX].address + (size_t)w.shared->step.logits_row * p.rows + row, v);
    return;
  }
  slot_write(w, st.slot[AMK_READS_MAX], st.task.write_generation[0], row, v + residual);
}

// Leaves the best row of this worker as candidate `index`.
__device__ __forceinline__ void write_candidate(Worker const& w, StagedTask const& st, uint32_t index, Best best) {
  uint32_t const t = threadIdx.x;
  best = warp_best(best);
  if (t % 32 == 0) {
    w.shared->best_value[t / 32] = best.value;
    w.shared->best_row[t / 32] = best.row;
  }
  consumers_sync();
  if (t == 0) {
    for (uint32_t i = 1; i < AMK_WARPS; ++i) {
      best = better(best, Best{w.shared->best_value[i], w.shared->best_row[i]});
    }
    ResolvedSlot const& out = st.slot[AMK_READS_MAX + 1];
    // The candidate is the last word of this worker in the step. Tagged words order nothing else, so what it wrote before without a
    // signal (keys and values, logits) is released here; pairs with the fence in op_sample.
    acquire_release_fence();
    slot_write(w, out, st.task.write_generation[1], index * 2, best.value);
    slot_write(w, out, st.task.write_generation[1], index * 2 + 1, __uint_as_float(best.row));
  }
}

// Optional constant of a row: the bias.
__device__ __forceinline__ float constant_or_zero(ResolvedSlot const& s, uint32_t i) { return s.address != 0 ? __ldg((float const*)s.address + i) : 0.f; }

__device__ __forceinline__ void op_matvec(Worker const& w, StagedTask const& st, Cursor& c, uint32_t& unit) {
  amk_matvec_params const p = *(amk_matvec_params const*)st.task.params;
  uint32_t const t = threadIdx.x, warp = t / 32;
  stage_input(w, st, p);
  *(volatile uint32_t*)&w.shared->near = 0;
  float scale = 1.f;
  if (p.prologue == AMK_PROLOGUE_RMS) {
    float sum = 0.f;
#pragma unroll
    for (uint32_t i = 0; i < AMK_WARPS; ++i) {
      sum += w.shared->sums[i];
    }
    scale = 1.f / sqrtf(sum / (float)p.k_len + p.eps);
  }
  Best best = {-__int_as_float(0x7f800000), 0xffffffffu};
  uint32_t const near_units = 4 * c.stage_units;
  for (uint32_t done = 0; done < p.tiles; done += TILES_BUF) {
    uint32_t const nt = p.tiles - done < TILES_BUF ? p.tiles - done : TILES_BUF;
    uint32_t const tile = p.tile0 + done, row = tile * AMK_UNIT_ROWS + t;
    // What the epilogue adds is on its way while the products are computed.
    bool const mine = t < nt * AMK_UNIT_ROWS && row < p.rows;
    float const residual = mine && p.epilogue == AMK_EPILOGUE_RESIDUAL ? slot_read(w, st.slot[3], st.task.read_generation[3], row) : 0.f;
    float const bias = mine ? constant_or_zero(st.slot[2], row) : 0.f;
    float const bias_up = mine && p.epilogue == AMK_EPILOGUE_SILU_MUL ? constant_or_zero(st.slot[2], row + AMK_UNIT_ROWS) : 0.f;
    for (uint32_t i = 0; i < nt; ++i) {
      if (t == 0 && (p.tiles - done - i) * p.units <= near_units) {
        *(volatile uint32_t*)&w.shared->near = 1;
      }
      tile_multiply(w, c, unit, p.units, &w.shared->part[warp][i * AMK_UNIT_ROWS]);
      unit += p.units;
    }
    consumers_sync();
    epilogue(w, st, p, tile, nt, scale, residual, bias, bias_up, best);
    if (done + TILES_BUF < p.tiles) {
      consumers_sync(); // the sums are about to be overwritten
    }
  }
  if (p.epilogue == AMK_EPILOGUE_LOGITS) {
    write_candidate(w, st, p.candidate, best);
  }
}
