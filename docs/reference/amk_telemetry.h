/* The shared stats segment of a running amk (docs/reference/telemetry.md). Generated from abi/src/telemetry.rs by the tests
(BLESS=1 cargo test -p tests docs). Each field's comment begins with its offset. */
#include <stdint.h>

/* 1984 bytes. */
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
  uint64_t entered[8];                 /* 296: Times that a sequence's command entered each state, by `EntryState`. Claimed: a turn; wait_io: a turn whose weights */
  uint64_t traps;                      /* 360: Commands of a kernel that trapped. */
  uint64_t opened;                     /* 368: Sequences that were opened. */
  uint64_t endings[8];                 /* 376: Sequences that ended, by `SequenceEnd`. */
  uint64_t positions;                  /* 440: Positions run. */
  uint64_t tokens;                     /* 448: Tokens chosen. */
  uint64_t priority_positions[4];      /* 456: Positions run, by priority: low, normal, high. */
  uint64_t priority_tokens[4];         /* 488: Tokens chosen, by priority. */
  uint64_t activity_ns;                /* 520: When its current activity began. */
  uint64_t spent_ns[8];                /* 528: Time spent so far, by `Activity`, without the current one. */
  uint32_t command_positions;          /* 592: The current command: positions, at most. */
  uint32_t command_first;              /* 596: Its first position. */
  uint64_t device_running_ns;          /* 600: Time from starting a command to completing it, by the device's clock. */
  uint64_t device_idle_ns;             /* 608: Time from completing a command to starting the next one, by the device's clock. */
  uint64_t steps[128];                 /* 616: Histogram of step times: eight buckets per octave from 16.4 microseconds on; the last one has no end. */
  uint64_t steps_ns;                   /* 1640: Sum of the times of these steps. */
  uint64_t step_bytes;                 /* 1648: Bytes of weights that a step reads. */
  uint64_t bandwidth;                  /* 1656: Measured bandwidth of the card in bytes per second; zero if it was not measured. */
  uint64_t resident_bytes;             /* 1664: Bytes of weights and caches on the device. */
  uint64_t weights_bytes;              /* 1672: Bytes of weights that must arrive. */
  uint64_t arrived_bytes;              /* 1680: Bytes of weights that have arrived. */
  uint64_t streamed_bytes;             /* 1688: Bytes that loaders requested: weights, keys and values. */
  uint64_t uploaded_bytes;             /* 1696: Bytes copied to the device. */
  uint64_t avoided_bytes;              /* 1704: Bytes not copied because they were on the device already. */
  uint64_t launches;                   /* 1712: Times that a kernel was launched. */
  uint64_t loads;                      /* 1720: Programs loaded. */
  uint32_t suspected;                  /* 1728: Workers that are suspected now: no progress for longer than the limit while a step is running. */
  uint32_t suspect;                    /* 1732: The first of them. */
  uint64_t suspicions;                 /* 1736: Times that a worker became suspected. */
  uint32_t kv_pages;                   /* 1744: Pages of keys and values on the device. */
  uint32_t kv_held;                    /* 1748: Pages of these that sequences have. */
  uint32_t kv_promised;                /* 1752: Pages that sequences have or were promised. */
  uint32_t reserved;                   /* 1756: Zero. */
  uint64_t batches;                    /* 1760: Commands that ran several sequences at once. */
  uint64_t batched;                    /* 1768: Turns of sequences in these commands. */
  uint64_t windows;                    /* 1776: Windows: steps of one sequence that checked guessed tokens. */
  uint64_t guessed;                    /* 1784: Tokens that were guessed for them. */
  uint64_t accepted;                   /* 1792: Of these, tokens that were right, and behind right ones only. */
  uint64_t events;                     /* 1800: Events of the trace ring, since the start; the last `TELEMETRY_EVENTS` of them are in it. */
  uint32_t evidence[4];                /* 1808: How each family of figures is known, an `Evidence` by `EvidenceFamily`. */
  uint64_t device_used_bytes;          /* 1824: Memory of the card that this process uses, as the driver's library reports it; zero if it does not. */
  uint32_t gpu_sm_mhz;                 /* 1832: The GPU's clock of multiprocessors in megahertz, read once a second; zero while nothing was read. Of the next words, all ones */
  uint32_t gpu_memory_mhz;             /* 1836: Clock of its memory in megahertz. */
  uint32_t gpu_power_mw;               /* 1840: Power that it draws, in milliwatts. */
  uint32_t gpu_power_limit_mw;         /* 1844: Power that it may draw, in milliwatts. */
  uint32_t gpu_temperature_c;          /* 1848: Temperature of the chip in degrees Celsius. */
  uint32_t gpu_busy_percent;           /* 1852: Percent of the driver's last sampling period in which a kernel ran; a resident kernel that waits counts. */
  uint32_t gpu_ecc_errors;             /* 1856: Memory errors since the driver was loaded that were not corrected. */
  uint32_t gpu_links;                  /* 1860: NVLinks that are up. */
  uint32_t gpu_throttled;              /* 1864: Why the clocks are held down: a bit for each `ThrottleReason`. */
  uint32_t search_trials;              /* 1868: Trials of a search so far. */
  uint32_t search_best;                /* 1872: The trial that leads. */
  uint32_t search_best_ns;             /* 1876: Its latency in nanoseconds per token; zero while nothing is correct. */
  uint32_t tune_state;                 /* 1880: What the search of a server that tunes itself is doing, a `TuneState`. */
  uint32_t tune_trials;                /* 1884: Its trials. */
  uint32_t tune_kept;                  /* 1888: Of these, those that it kept. */
  uint32_t tune_refused;               /* 1892: Better schedules that failed the gate before a switch, and never served. */
  uint32_t tune_rolled_back;           /* 1896: Better schedules that were taken back: these, and those that the confirmation reverted. */
  uint32_t tune_gain_low;              /* 1900: What the current schedule saves of the first one's time, in parts of a million: the low end of the interval. */
  uint32_t tune_gain_high;             /* 1904: The high end. */
  uint32_t tune_wait_us;               /* 1908: Longest wait of a request for the search, in microseconds. */
  uint64_t tune_schedule;              /* 1912: Id of the current schedule. */
  uint64_t left_required;              /* 1920: Of sequences that have left: `required` of their windows. */
  uint64_t left_lookahead;             /* 1928: `lookahead` of these. */
  uint64_t left_accepted;              /* 1936: `accepted` of these. */
  uint64_t reserved_words[5];          /* 1944: Zero. */
};

/* 128 bytes. */
struct amk_telemetry_session {
  uint64_t serial;                     /* 0: Number among all opened sequences, from one; zero if the place is free. */
  uint32_t priority;                   /* 8: 0 low, 1 normal, 2 high. */
  uint32_t state;                      /* 12: State of its command, an `EntryState`. */
  uint64_t positions;                  /* 16: Positions run. */
  uint64_t goal;                       /* 24: Positions that it may run, at most. */
  uint64_t tokens;                     /* 32: Tokens chosen. */
  uint64_t opened_ns;                  /* 40: When it was opened. */
  uint64_t turn_ns;                    /* 48: When it last had a turn. */
  uint64_t told_ns;                    /* 56: When its client was last sent tokens; before the first ones, when its request arrived. */
  uint64_t required;                   /* 64: Positions that its windows had to run, one of each. */
  uint64_t lookahead;                  /* 72: Positions that they ran for guesses. */
  uint64_t stood;                      /* 80: Of both, positions that stand. */
  uint64_t rerun;                      /* 88: Of both, positions that are run again: their guess was wrong, or behind a wrong one. */
  uint64_t accepted;                   /* 96: Guesses that were right, and behind right ones only. */
  uint64_t reserved[3];                /* 104: Zero. */
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

/* 8320 bytes. */
struct amk_telemetry_program {
  uint8_t id[16];                      /* 0: The beginning of its id, as text. */
  uint64_t passes;                     /* 16: Passes of its queues: positions of a sequence or of a batch. */
  uint32_t workers;                    /* 24: Its workers. */
  uint32_t reserved;                   /* 28: Zero. */
  uint64_t all[8];                     /* 32: Tasks of one pass by opcode, of all workers. */
  uint32_t tasks[2048];                /* 96: Tasks of one pass by worker and opcode, eight words per worker. */
  uint64_t reserved_words[4];          /* 8288: Zero. */
};

/* 64 bytes. */
struct amk_telemetry_event {
  uint64_t sequence;                   /* 0: Odd during a write; twice the number of events that this entry has held. */
  uint64_t begin_ns;                   /* 8: When it began. */
  uint64_t end_ns;                     /* 16: When it ended; later than its begin. */
  uint64_t number;                     /* 24: Number of the sequence (client, turn) or of the command (command, device), from one. */
  uint64_t total;                      /* 32: Of a turn: positions of all sequences until then, its own included. */
  uint32_t track;                      /* 40: An `EventTrack`. */
  uint32_t place;                      /* 44: Place of the sequence, or of the first one of a command. */
  uint32_t first;                      /* 48: Its first position. */
  uint32_t positions;                  /* 52: Positions run; of a batch, those of each sequence. */
  uint32_t tokens;                     /* 56: Tokens chosen or sent. */
  uint32_t sequences;                  /* 60: Sequences of the command. */
};
