// A cache of keys and values, and the definition of attention over it in f64, for programs that run op_attention.cuh. Include device.hpp before.
#pragma once

constexpr uint32_t HEAD = AMK_HEAD_DIM, GROUP = AMK_GROUP, KV_HEADS = 2, HEADS = GROUP * KV_HEADS, ROWS = HEADS + 2 * KV_HEADS, PAGES = 4;
constexpr uint32_t POSITIONS = (PAGES - 1) * PAGE_KEYS, KV_BLOCK = 64;
#ifndef SPLITS_OF_TEST
#define SPLITS_OF_TEST 2
#endif
constexpr uint32_t SPLITS = SPLITS_OF_TEST;
constexpr uint32_t SEQ_WORDS = ROWS * HEAD > SPLITS * HEADS * PARTIAL_WORDS ? ROWS * HEAD : SPLITS * HEADS * PARTIAL_WORDS; // of a sequence, in either buffer
static Worker worker;
static Shared shared;
static StagedTask staged;
static amk_launch launch;
alignas(16) static char cache[PAGES * 2 * KV_HEADS * PAGE_KEYS * ROW_BYTES];
alignas(16) static uint32_t words[SEQS * SEQ_WORDS], partials[SEQS * SEQ_WORDS];
alignas(16) static float angles[POSITIONS * HEAD], norms[2][HEAD];
static uint16_t pages[8] = {3, 1, 2, 0};
static double keys[KV_HEADS][POSITIONS][HEAD], values[KV_HEADS][POSITIONS][HEAD], queries[HEADS][HEAD];
constexpr float EPS = 1e-5f, SCALE = 0.3f;

// A row of the words of a position, normalised and rotated as the definition says.
static void shaped(uint32_t position, uint32_t row, float const* norm, double* out) {
  double square = 0, factor = 1;
  for (uint32_t i = 0; i < HEAD; ++i) {
    out[i] = noise(position * ROWS + row, i);
    square += out[i] * out[i];
  }
  if (AMK_QK_NORM) {
    factor = 1 / std::sqrt(square / HEAD + EPS);
  }
  for (uint32_t i = 0; i < HEAD; ++i) {
    out[i] *= AMK_QK_NORM ? factor * norm[i] : 1;
  }
  for (uint32_t i = 0; i < HEAD / 2; ++i) {
    double const c = angles[position * HEAD + 2 * i], s = angles[position * HEAD + 2 * i + 1], a = out[i], b = out[i + HEAD / 2];
    out[i] = a * c - b * s, out[i + HEAD / 2] = b * c + a * s;
  }
}
static void append(uint32_t position) {
  for (uint32_t h = 0; h < KV_HEADS; ++h) {
    shaped(position, HEADS + h, norms[1], keys[h][position]);
    for (uint32_t i = 0; i < HEAD; ++i) {
      keys[h][position][i] = half_value(half_bits((float)keys[h][position][i]));
      values[h][position][i] = half_value(half_bits(noise(position * ROWS + HEADS + KV_HEADS + h, i)));
    }
    if (KV_CODES) {
      kept_row(keys[h][position], HEAD);
      kept_row(values[h][position], HEAD);
    }
  }
}
// Writes a position's rows into the cache, for positions that have no step.
static void cached(uint32_t position) {
  for (uint32_t run = 0; run < 2 * KV_HEADS; ++run) {
    double const* from = run < KV_HEADS ? keys[run][position] : values[run - KV_HEADS][position];
    char* row = cache + paged_row(pages[position / PAGE_KEYS], KV_HEADS * PAGE_KEYS * ROW_BYTES, position) + run * PAGE_KEYS * ROW_BYTES;
    float most = 0;
    for (uint32_t i = 0; i < HEAD; ++i) {
      most = std::fmax(most, (float)std::fabs(from[i]));
    }
    RowScale const scale = KV_CODES ? scale_for(most) : RowScale{};
    for (uint32_t i = 0; i < HEAD; ++i) {
      if (KV_CODES) {
        row[i] = (char)e4m3_code((float)from[i] * scale.inverse);
      } else {
        ((uint16_t*)row)[(i / 8 ^ row_swizzle(position)) * 8 + i % 8] = half_bits((float)from[i]);
      }
    }
    if (KV_CODES) {
      *(uint16_t*)(row + HEAD) = (uint16_t)scale.bits;
    }
  }
}

// Fills the stages of a split from `stage` on, as loader_block of stream.cuh does. Returns the stage behind them.
static uint32_t load(uint32_t kv_head, uint32_t key, uint32_t count, uint32_t stage) {
  char const* head = cache + kv_head * PAGE_KEYS * ROW_BYTES;
  for (uint32_t left = count; left > 0;) {
    uint32_t const rows = left < BLOCK_KEYS ? left : BLOCK_KEYS;
    BlockStages const b = block_stages(rows, worker.stage_bytes);
    if (b.rows % TILE_KEYS != 0 || b.rows * ROW_BYTES > worker.stage_bytes) {
      std::exit(4); // a tile lies in one stage
    }
    for (uint32_t part = 0; part < 2; ++part) {
      for (uint32_t i = 0; i < b.copied; ++i) {
        uint32_t const at = key + i;
        char const* from = head + paged_row(pages[at / PAGE_KEYS], KV_HEADS * PAGE_KEYS * ROW_BYTES, at) + part * KV_HEADS * PAGE_KEYS * ROW_BYTES;
        char* to = worker.ring + (stage + i / b.rows) * worker.stage_bytes + i % b.rows * ROW_BYTES + part * b.values;
        if (to + ROW_BYTES > prefill_memory + sizeof prefill_memory) {
          std::exit(5);
        }
        std::memcpy(to, from, ROW_BYTES);
      }
      stage += b.values != 0 ? part : stages_of_rows(b.copied, b.rows);
    }
    key += rows, left -= rows;
  }  return stage;
}

// The words of queries, keys and values that a sequence of a step has at a position.
static void step_words(uint32_t seq, uint32_t position) {
  for (uint32_t i = 0; i < ROWS * HEAD; ++i) {
    words[seq * SEQ_WORDS + i] = __float_as_uint(noise(position * ROWS + i / HEAD, i % HEAD));
  }
}

// The greatest error of a sequence's merged results at a position, against the definition.
static double error_of(uint32_t seq, uint32_t position, uint32_t window) {
  uint32_t const oldest = position + 1 - attended(position, window);
  double worst = 0;
  for (uint32_t h = 0; h < HEADS; ++h) {
    double q[HEAD], top = -1e300, sum = 0, out[HEAD] = {}, weight[POSITIONS];
    shaped(position, h, norms[0], q);
    for (uint32_t k = oldest; k <= position; ++k) {
      weight[k] = 0;
      for (uint32_t i = 0; i < HEAD; ++i) {
        weight[k] += SCALE * q[i] * keys[h / GROUP][k][i];
      }
      top = std::fmax(top, weight[k]);
    }
    for (uint32_t k = oldest; k <= position; ++k) {
      double const e = std::exp(weight[k] - top);
      sum += e;
      for (uint32_t i = 0; i < HEAD; ++i) {
        out[i] += e * values[h / GROUP][k][i];
      }
    }
    Merged merged[HEAD / 4];
    for (Merged& of : merged) {
      of = merged_empty();
    }
    for (uint32_t split = 0; split < SPLITS; ++split) {
      float const* of = (float const*)partials + seq * SEQ_WORDS + partial_word(split, HEADS, h);
      for (uint32_t i = 0; i < HEAD / 4; ++i) {
        merged_add(merged[i], of[0], of[1], *(float4 const*)(of + PARTIAL_HEAD + 4 * i));
      }
    }
    for (uint32_t i = 0; i < HEAD; ++i) {
      float4 const v = merged_value(merged[i / 4]);
      float const got[4] = {v.x, v.y, v.z, v.w};
      double const error = std::fabs(got[i % 4] - out[i] / sum);
      worst = error <= worst ? worst : error; // of NaN too
    }
  }
  return worst;
}

// What all tasks share.
static void begin() {
  heads_shape(angles, POSITIONS, norms);
  launch.pages = (uint64_t)pages;
  launch.page_stride = 4;
  shared.launch = &launch;
  shared.program.kv_values = KV_HEADS * PAGE_KEYS * ROW_BYTES;
  uint64_t const read[AMK_READS_STAGED + 2] = {(uint64_t)words, (uint64_t)norms[0], (uint64_t)norms[1], (uint64_t)angles, (uint64_t)partials, (uint64_t)cache};
  for (uint32_t i = 0; i < AMK_READS_STAGED + 2; ++i) {
    staged.buffer[i] = ResolvedBuffer{read[i], 0, 0};
  }
}
