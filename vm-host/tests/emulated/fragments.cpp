// The loops that multiply a task's fragments (fragments.cuh) as host C++: the threads of a worker are fibers, and the ring is as long as the task, so
// that every stage is read where it lies. What no unit of the matrix fills is no number. Prints the rows of each task, or what was read or given
// back wrongly. Compiled by vm-host/src/fragments_tests.rs.
#define WORKERS 1
#include "simt.hpp"
#undef AMK_WARPS
constexpr uint32_t TILES_BUF = 16, ROWS_BUF = 128;
struct Shared {
  alignas(16) float part[2][HOST_SPARE ? ROWS_BUF + 8 : 8][HOST_SPARE ? 8 : ROWS_BUF + 8], sums[2][8]; // a row that has no other is read with the next
  uint32_t near, sink;
};
#define WORKER_MEMBERS \
  char* x;             \
  Shared* shared;      \
  char const* ring;    \
  uint32_t stages, stage_bytes;
#include "codes.hpp"

constexpr uint32_t UNIT_COLS = 32, X_BYTES = 128;
constexpr float VECTOR_FACTOR = 1.f / 16;
constexpr uint32_t unit_column(uint32_t column) { return (column % UNIT_COLS & ~12u) | (column & 4) << 1 | (column & 8) >> 1; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
#include "halves_mma.hpp"
#include "bytes_mma.hpp"

[[noreturn]] static void wrong(char const* what, uint32_t stage) {
  std::printf("%s stage %u\n", what, stage);
  std::exit(0);
}
static uint32_t freed[256]; // warps that have given a stage back
struct Cursor {
  uint32_t stage;
};
inline char const* cursor_place(Worker const& w, Cursor const& c) { return w.ring + (size_t)c.stage * w.stage_bytes; }
inline char const* cursor_land(Worker const& w, Cursor const& c) {
  if (c.stage >= w.stages) {
    wrong("waits for", c.stage);
  }
  return cursor_place(w, c);
}
inline bool cursor_here(Worker const& w, Cursor const& c) { return c.stage % 2 == 0; } // either answer
inline void cursor_step(Worker const&, Cursor& c) { ++c.stage; }
inline void cursor_free(Worker const& w, uint32_t stage) {
  meet(fibers.running / 32);
  uint32_t const bit = 1u << w.thread / 32;
  if (w.thread % 32 == 0) {
    if (stage >= w.stages || (freed[stage] & bit) != 0) {
      wrong("gives back", stage);
    }
    freed[stage] |= bit;
  }
}
inline void cursor_next(Worker const& w, Cursor& c) {
  cursor_free(w, c.stage);
  cursor_step(w, c);
}
inline void stage_read(uint32_t, uint32_t*) {}

struct ResolvedBuffer {
  uint64_t address;
  uint32_t units, kind;
};
struct amk_task;
struct StagedTask;
bool is_flag_in_data(ResolvedBuffer const&);
bool has_route(StagedTask const&);
struct MatvecPlan {
  uint32_t shares, chunks;
  bool held, biased, residual;
};
#define STAGED_TASK       \
  struct StagedTask {     \
    amk_task task;        \
    ResolvedBuffer buffer[8]; \
  };
#include "device.hpp"
bool is_flag_in_data(ResolvedBuffer const&) { return false; }
bool has_route(StagedTask const&) { return false; }

// A task: its tiles in their stages, and the vector.
struct Task {
  uint32_t unpack, columns, units, stage_units, stage_tiles, warp_units, tiles, stage_bytes, stages;
  std::vector<float> vector;
  std::vector<uint4> ring;
  explicit Task(CaseFile from) : unpack(from.number()), columns(from.number()), units(from.number()), stage_units(from.number()), stage_tiles(from.number()), warp_units(from.number()), tiles(from.number()), stage_bytes(from.number()) {
    vector.resize(columns);
    for (float& v : vector) {
      v = __uint_as_float(from.number());
    }
    std::vector<uint8_t> different[3];
    for (auto& tile : different) { // of which the tiles are, in turns
      tile.resize(from.number());
      for (uint8_t& byte : tile) {
        byte = (uint8_t)from.number();
      }
    }
    uint32_t const unit = (uint32_t)different[0].size() / units, chunks = (units + stage_units - 1) / stage_units;
    stages = stage_tiles > 1 || chunks == 1 ? (tiles + stage_tiles - 1) / stage_tiles : tiles * chunks;
    ring.assign((stages + 2) * (size_t)stage_bytes / 16, make_uint4(~0u, ~0u, ~0u, ~0u));
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      auto const& from = different[tile % 3];
      if (stage_tiles > 1 || chunks == 1) {
        std::memcpy((char*)ring.data() + tile / stage_tiles * (size_t)stage_bytes + tile % stage_tiles * from.size(), from.data(), from.size());
        continue;
      }
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        uint32_t const first = chunk * stage_units, count = units - first < stage_units ? units - first : stage_units;
        std::memcpy((char*)ring.data() + (tile * chunks + chunk) * (size_t)stage_bytes, from.data() + first * unit, count * unit);
      }
    }
  }
};
static Task const* asked;
static Shared shared;
alignas(16) static char staged[160 * 320];
static float rows[64 * 8];

// Stages the vector as the format's products take it.
template <uint32_t UNPACK> void stage(Worker const& w) {
  uint32_t const cols = asked->units * UNIT_COLS << unpacked_log2(UNPACK);
  float const* v = asked->vector.data();
  auto const four = [&](uint32_t e) { return e < asked->columns ? make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]) : make_float4(0, 0, 0, 0); };
  if constexpr (has_digits(UNPACK)) {
    for (uint32_t unit = w.thread / 32; unit < asked->units; unit += 8) {
      uint32_t const e = unit * 128 + w.thread % 32 * 4;
      float4 const once[1] = {four(e)};
      stage_digits(w.x + unit * digit_bytes(UNPACK), 0, w.thread % 32, digit_form(UNPACK), e, 0, cols, once);
    }
  } else {
    for (uint32_t e = w.thread * 4; e < cols; e += 4 * THREADS_OF_WORKER) {
      stage_x4(w, e, four(e));
    }
  }
}

// What op_matvec does between the stages of the ring and the sums of rows.
template <uint32_t UNPACK> void run_thread(Worker const& w) {
  StagedTask st = {};
  st.task.unpack = UNPACK, st.task.warp_units = asked->warp_units, st.task.stage_units = asked->stage_units, st.task.stage_tiles = asked->stage_tiles;
  amk_matvec_params p = {};
  p.units = asked->units, p.tiles = asked->tiles;
  std::memcpy(st.task.params, &p, sizeof p);
  MatvecPlan const plan = matvec_plan(st);
  Tiles const k = task_tiles(st, p, plan);
  stage<UNPACK>(w);
  consumers_sync();
  Cursor c = {0};
  Share v[TAKE];
  std::memset(&v, 0xff, sizeof v);
  with_share(k, [&](auto number) {
    constexpr uint32_t UNITS = decltype(number)::value;
    uint32_t const ahead = k.shares < TAKE ? k.shares : TAKE;
    share_load<UNPACK, UNITS, 0>(w, c, k, 0, k.parts == 1 || ahead == 1, v[0]);
    if (ahead > 1) {
      share_load<UNPACK, UNITS, SPLIT ? 1 : 0>(w, c, k, k.chunks == 1 || k.parts == 2 ? 0 : 1, true, v[TAKE - 1]);
    }
    for (uint32_t stage = 0; stage < c.stage; ++stage) {
      cursor_free(w, stage);
    }
    float square = 0.f;
    for (uint32_t done = 0; done < k.count; done += TILES_BUF) {
      uint32_t const nt = k.count - done < TILES_BUF ? k.count - done : TILES_BUF;
      float* const part = warp_parts(w, 0);
      if constexpr (SPLIT) {
        if constexpr (MAY_HOLD && UNITS < FRAGMENT) {
          if (k.held) {
            held_at_once<UNPACK, UNITS>(w, k, v, part, square);
          }
        }
        if (!k.held) {
          multiply_pairs<UNPACK, UNITS>(w, c, k, done, nt, v, part, square);
        }
      } else if (k.held) {
        if constexpr (SPARE_REGISTERS) {
          multiply_held<UNPACK, UNITS>(w, c, k, v, part, square);
        } else {
          held_in_turn<UNPACK, UNITS>(w, c, k, v, part, square);
        }
      } else {
        multiply_shares<UNPACK, UNITS>(w, c, k, done, nt, v, part);
      }
      consumers_sync();
      if (w.thread < nt * 8) {
        float sum = 0.f;
        for (uint32_t warp = 0; warp < 8; ++warp) {
          sum += HOST_SPARE ? shared.part[0][w.thread][warp] : shared.part[0][warp][w.thread];
        }
        rows[done * 8 + w.thread] = sum / VECTOR_FACTOR;
      }
      consumers_sync();
    }
  });
}
template <uint32_t UNPACK = 0> void run_format(Worker const& w) {
  if constexpr (UNPACK <= AMK_UNPACK_INT8_K) {
    if constexpr (has_unpack(UNPACK)) {
      if (asked->unpack == UNPACK) {
        return run_thread<UNPACK>(w);
      }
    }
    run_format<UNPACK + 1>(w);
  }
}

int main(int, char** arguments) {
  CaseFile file = {std::fopen(arguments[1], "r")};
  for (uint32_t left = file.number(); left > 0; --left) {
    Task const one(file);
    asked = &one;
    std::memset(freed, 0, sizeof freed);
    std::memset(staged, 0, sizeof staged);
    run_workers([](uint32_t, uint32_t thread) {
      Worker w = {thread};
      w.x = staged, w.shared = &shared, w.ring = (char const*)asked->ring.data(), w.stages = asked->stages, w.stage_bytes = asked->stage_bytes;
      run_format(w);
    });
    for (uint32_t stage = 0; stage < one.stages; ++stage) {
      if (freed[stage] != 255) {
        wrong("keeps", stage);
      }
    }
    for (uint32_t row = 0; row < one.tiles * 8; ++row) {
      std::printf("%.9g ", rows[row]);
    }
    std::printf("\n");
  }
  return 0;
}
