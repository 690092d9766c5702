/* The shared stats segment of a running amk (docs/reference/telemetry.md). Generated from abi/src/telemetry.rs by the tests
(BLESS=1 cargo test -p tests docs). Each field's comment begins with its offset. */
#include <stdint.h>

/* 1792 bytes. */
struct amk_telemetry {
  uint8_t magic[8];                    /* 0: `AMKTELEM`, the file's magic. */
  uint32_t version;                    /* 8: Version of the layout. */
  uint32_t size;                       /* 12: Bytes of the page. */
  uint64_t sequence;                   /* 16: Odd during a write; changed after each write. */
  uint32_t pid;                        /* 24: The process. */
  uint32_t activity;                   /* 28: What it is doing, an `Activity`. */
  uint8_t command[32];                 /* 32: The command that it runs, as text that ends with zeros. */
  uint8_t model[64];                   /* 64: The model. */
  uint8_t device[64];                  /* 128: Device of the model: `cpu`, `eval` or the name of the card. */
  uint64_t started_ns;                 /* 192: When the page was made. */
  uint64_t beat_ns;                    /* 200: When it was last written. */
  uint64_t writes;                     /* 208: Writes. */
  uint64_t write_ns;                   /* 216: Time spent writing, including the monitor thread's. */
  uint32_t workers;                    /* 224: Workers of the machine; further entries of the page are meaningless. */
  uint32_t places;                     /* 228: Sequences that can be open at once. */
  uint32_t capacity;                   /* 232: Positions of a sequence, at most. */
  uint32_t waiting;                    /* 236: Requests that wait for a place. */
  uint32_t occupancy[8];               /* 240: Places by the state of their command, an `EntryState` each. */
  uint64_t published;                  /* 272: Commands published to the machine: entries of its ring. */
  uint64_t drained;                    /* 280: Commands that it has completed. */
  uint64_t unseen;                     /* 288: Completed commands that the monitor missed between two samples: their positions and times are not counted. */
  uint64_t turns;                      /* 296: Turns given to sequences. */
  uint64_t yields;                     /* 304: Turns after which a sequence yielded. */
  uint64_t requeues;                   /* 312: Times that a sequence was queued again. */
  uint64_t io_waits;                   /* 320: Turns whose weights had not arrived. */
  uint64_t faults;                     /* 328: Times that a sequence's command failed. */
  uint64_t traps;                      /* 336: Commands of a kernel that trapped. */
  uint64_t opened;                     /* 344: Sequences that were opened. */
  uint64_t endings[8];                 /* 352: Sequences that ended, by `SequenceEnd`. */
  uint64_t positions;                  /* 416: Positions run. */
  uint64_t tokens;                     /* 424: Tokens chosen. */
  uint64_t priority_positions[4];      /* 432: Positions run, by priority: low, normal, high. */
  uint64_t priority_tokens[4];         /* 464: Tokens chosen, by priority. */
  uint64_t activity_ns;                /* 496: When its current activity began. */
  uint64_t spent_ns[8];                /* 504: Time spent so far, by `Activity`, without the current one. */
  uint32_t command_positions;          /* 568: The current command: positions, at most. */
  uint32_t command_first;              /* 572: Its first position. */
  uint64_t device_running_ns;          /* 576: Time from starting a command to completing it, by the device's clock. */
  uint64_t device_idle_ns;             /* 584: Time from completing a command to starting the next one, by the device's clock. */
  uint64_t steps[128];                 /* 592: Histogram of step times: eight buckets per octave from 16.4 microseconds on; the last one has no end. */
  uint64_t steps_ns;                   /* 1616: Sum of the times of these steps. */
  uint64_t step_bytes;                 /* 1624: Bytes of weights that a step reads. */
  uint64_t bandwidth;                  /* 1632: Measured bandwidth of the card in bytes per second; zero if it was not measured. */
  uint64_t resident_bytes;             /* 1640: Bytes of weights and caches on the device. */
  uint64_t weights_bytes;              /* 1648: Bytes of weights that must arrive. */
  uint64_t arrived_bytes;              /* 1656: Bytes of weights that have arrived. */
  uint64_t streamed_bytes;             /* 1664: Bytes that loaders requested: weights, keys and values. */
  uint64_t uploaded_bytes;             /* 1672: Bytes copied to the device. */
  uint64_t avoided_bytes;              /* 1680: Bytes not copied because they were on the device already. */
  uint64_t launches;                   /* 1688: Times that a kernel was launched. */
  uint64_t loads;                      /* 1696: Programs loaded. */
  uint32_t suspected;                  /* 1704: Workers that are suspected now: no progress for longer than the limit while a step is running. */
  uint32_t suspect;                    /* 1708: The first of them. */
  uint64_t suspicions;                 /* 1712: Times that a worker became suspected. */
  uint32_t kv_pages;                   /* 1720: Pages of keys and values on the device. */
  uint32_t kv_held;                    /* 1724: Pages of these that sequences have. */
  uint32_t kv_promised;                /* 1728: Pages that sequences have or were promised. */
  uint32_t reserved;                   /* 1732: Zero. */
  uint64_t batches;                    /* 1736: Commands that ran several sequences at once. */
  uint64_t batched;                    /* 1744: Turns of sequences in these commands. */
  uint32_t gpu_sm_mhz;                 /* 1752: The GPU's clock of multiprocessors in megahertz, read once a second; zero while nothing was read. Of the next words, all ones */
  uint32_t gpu_memory_mhz;             /* 1756: Clock of its memory in megahertz. */
  uint32_t gpu_power_mw;               /* 1760: Power that it draws, in milliwatts. */
  uint32_t gpu_power_limit_mw;         /* 1764: Power that it may draw, in milliwatts. */
  uint32_t gpu_temperature_c;          /* 1768: Temperature of the chip in degrees Celsius. */
  uint32_t gpu_busy_percent;           /* 1772: Percent of the driver's last sampling period in which a kernel ran; a resident kernel that waits counts. */
  uint32_t gpu_ecc_errors;             /* 1776: Memory errors since the driver was loaded that were not corrected. */
  uint32_t gpu_links;                  /* 1780: NVLinks that are up. */
  uint32_t gpu_throttled;              /* 1784: Why the clocks are held down: a bit for each `ThrottleReason`. */
  uint32_t gpu_reserved;               /* 1788: Zero. */
};

/* 64 bytes. */
struct amk_telemetry_session {
  uint64_t serial;                     /* 0: Number among all opened sequences, from one; zero if the place is free. */
  uint32_t priority;                   /* 8: 0 low, 1 normal, 2 high. */
  uint32_t state;                      /* 12: State of its command, an `EntryState`. */
  uint64_t positions;                  /* 16: Positions run. */
  uint64_t goal;                       /* 24: Positions that it may run, at most. */
  uint64_t tokens;                     /* 32: Tokens chosen. */
  uint64_t opened_ns;                  /* 40: When it was opened. */
  uint64_t turn_ns;                    /* 48: When it last had a turn. */
  uint64_t reserved;                   /* 56: Zero. */
};

/* 64 bytes. */
struct amk_telemetry_worker {
  uint32_t beat;                       /* 0: As in `WorkerHeartbeat`. */
  uint32_t active;                     /* 4: As in `WorkerHeartbeat`. */
  uint32_t progress;                   /* 8: As in `WorkerHeartbeat`. */
  uint32_t epoch;                      /* 12: As in `WorkerHeartbeat`. */
  uint32_t position;                   /* 16: As in `WorkerHeartbeat`. */
  uint32_t task;                       /* 20: As in `WorkerHeartbeat`. */
  uint32_t issued;                     /* 24: As in `WorkerHeartbeat`. */
  uint32_t wait;                       /* 28: As in `WorkerHeartbeat`. */
  uint32_t object;                     /* 32: As in `WorkerHeartbeat`. */
  uint32_t have;                       /* 36: As in `WorkerHeartbeat`. */
  uint32_t need;                       /* 40: As in `WorkerHeartbeat`. */
  uint32_t suspected;                  /* 44: Nonzero while it is suspected. */
  uint64_t moved_ns;                   /* 48: When its progress was last seen to change, or its step to have ended. */
  uint64_t beat_ns;                    /* 56: When its heartbeat was last seen to change. */
};
