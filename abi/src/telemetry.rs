//! Telemetry of a running machine: a heartbeat of each worker, written by the device, and the page that other processes read.
//!
//! The page is a file that the writing process maps and others map for reading ([docs/reference/telemetry.md]). A sequence word guards it: odd
//! during a write, and changed afterwards. Times are nanoseconds since 1970 by the host's clock unless a field states otherwise; sums only
//! grow while the process lives.
//!
//! [docs/reference/telemetry.md]: https://github.com/amk/amk/blob/main/docs/reference/telemetry.md

use crate::layout::{StructLayout, wire_struct};
use crate::op::wire_enum;

wire_struct! {
    /// A worker's heartbeat. One of its warps writes it to mapped host memory, between a few times and a thousand times per second. Each
    /// word is independent: two words may be of two neighbouring writes.
    amk_worker_heartbeat align(16) size(48)
    pub struct WorkerHeartbeat {
        /// The device's clock at the last write, in units of 1 024 ns; it wraps.
        pub beat: u32,
        /// Nonzero while a step is running.
        pub active: u32,
        /// Tasks done since the launch; it wraps.
        pub progress: u32,
        /// The current step, or the last one, counted since the launch or the load of the program.
        pub epoch: u32,
        /// Position of that step.
        pub position: u32,
        /// Tasks of its queue that the worker has done in that step.
        pub task: u32,
        /// Bytes that the loader has requested since the launch, in units of 512; it wraps.
        pub issued: u32,
        /// Reason of a long wait: a `Trap` as it would be reported, or zero.
        pub wait: u32,
        /// Counter, buffer or stage waited for.
        pub object: u32,
        /// Value that it held.
        pub have: u32,
        /// Value that was needed.
        pub need: u32,
        /// Zero.
        pub reserved: u32,
    }
}

wire_enum! {
    /// How a sequence ended.
    SequenceEnd {
        /// A stop token was generated.
        Stop = 0 "stop",
        /// It reached its requested length.
        Length = 1 "length",
        /// Its client disconnected.
        Cancelled = 2 "cancelled",
        /// The machine failed.
        Failed = 3 "failed",
        /// The process was shutting down.
        Leaving = 4 "leaving",
    }
}

wire_enum! {
    /// What the writing process is doing.
    Activity {
        /// There is nothing to do.
        Idle = 0 "idle",
        /// The machine runs positions.
        Running = 1 "running",
        /// It is between two commands: samples tokens, accepts requests, loads programs.
        Between = 2 "between",
        /// Loads a model or a program onto the machine.
        Loading = 3 "loading",
        /// Has ended.
        Ended = 4 "ended",
    }
}

wire_enum! {
    /// What the search of a server that tunes itself is doing, or why it stopped.
    TuneState {
        /// There is none.
        Off = 0 "off",
        /// It has not begun: the graph is being evaluated.
        Waiting = 1 "waiting",
        /// It is tuning.
        Tuning = 2 "tuning",
        /// It ended with an error.
        Failed = 3 "failed",
        /// It reached its goal.
        Goal = 4 "goal",
        /// It is as near to the bound as was asked.
        Bound = 5 "bound",
        /// It has done its trials.
        Trials = 6 "trials",
        /// Its time was up.
        Time = 7 "time",
        /// It found no new schedule.
        Exhausted = 8 "exhausted",
        /// The server ended.
        Interrupted = 9 "interrupted",
    }
}

wire_enum! {
    /// Why a GPU's clocks are held down. An idle GPU and clocks that were set on purpose are not among the reasons.
    ThrottleReason {
        /// The driver keeps to the power limit.
        PowerCap = 0 "power cap",
        /// The hardware slows down, for any of its reasons.
        Hardware = 1 "hardware slowdown",
        /// It keeps to the clocks of the group that it boosts with.
        SyncBoost = 2 "sync boost",
        /// The driver slows a hot GPU down.
        DriverThermal = 3 "thermal slowdown by the driver",
        /// The hardware slows a hot GPU down.
        HardwareThermal = 4 "thermal slowdown by the hardware",
        /// The power supply asks for less.
        PowerBrake = 5 "power brake",
    }
}

wire_struct! {
    /// Head of the page: its process, what it has done, and how long it took.
    amk_telemetry align(64) size(1984)
    pub struct Telemetry {
        /// `AMKTELEM`, the file's magic.
        pub magic: [u8; 8],
        /// Version of the layout.
        pub version: u32,
        /// Bytes of the page.
        pub size: u32,
        /// Odd during a write; changed after each write.
        pub sequence: u64,
        /// The process.
        pub pid: u32,
        /// What it is doing, an `Activity`.
        pub activity: u32,
        /// The command that it runs, as text that ends with zeros.
        pub command: [u8; 32],
        /// The model.
        pub model: [u8; 64],
        /// Device of the model: `cpu`, `eval` or the name of the card.
        pub device: [u8; 64],
        /// When the page was made.
        pub started_ns: u64,
        /// When it was last written.
        pub beat_ns: u64,
        /// Writes.
        pub writes: u64,
        /// Time spent writing, including the monitor thread's.
        pub write_ns: u64,
        /// Workers of the machine; further entries of the page are meaningless.
        pub workers: u32,
        /// Sequences that can be open at once.
        pub places: u32,
        /// Positions of a sequence, at most.
        pub capacity: u32,
        /// Requests that wait for a place.
        pub waiting: u32,
        /// Places by the state of their command, an `EntryState` each.
        pub occupancy: [u32; 8],
        /// Commands published to the machine: entries of its ring.
        pub published: u64,
        /// Commands that it has completed.
        pub drained: u64,
        /// Completed commands that the monitor missed between two samples: their positions and times are not counted.
        pub unseen: u64,
        /// Times that a sequence's command entered each state, by `EntryState`. Claimed: a turn; wait_io: a turn whose weights
        /// had not arrived.
        pub entered: [u64; 8],
        /// Commands of a kernel that trapped.
        pub traps: u64,
        /// Sequences that were opened.
        pub opened: u64,
        /// Sequences that ended, by `SequenceEnd`.
        pub endings: [u64; 8],
        /// Positions run.
        pub positions: u64,
        /// Tokens chosen.
        pub tokens: u64,
        /// Positions run, by priority: low, normal, high.
        pub priority_positions: [u64; 4],
        /// Tokens chosen, by priority.
        pub priority_tokens: [u64; 4],
        /// When its current activity began.
        pub activity_ns: u64,
        /// Time spent so far, by `Activity`, without the current one.
        pub spent_ns: [u64; 8],
        /// The current command: positions, at most.
        pub command_positions: u32,
        /// Its first position.
        pub command_first: u32,
        /// Time from starting a command to completing it, by the device's clock.
        pub device_running_ns: u64,
        /// Time from completing a command to starting the next one, by the device's clock.
        pub device_idle_ns: u64,
        /// Histogram of step times: eight buckets per octave from 16.4 microseconds on; the last one has no end.
        pub steps: [u64; 128],
        /// Sum of the times of these steps.
        pub steps_ns: u64,
        /// Bytes of weights that a step reads.
        pub step_bytes: u64,
        /// Measured bandwidth of the card in bytes per second; zero if it was not measured.
        pub bandwidth: u64,
        /// Bytes of weights and caches on the device.
        pub resident_bytes: u64,
        /// Bytes of weights that must arrive.
        pub weights_bytes: u64,
        /// Bytes of weights that have arrived.
        pub arrived_bytes: u64,
        /// Bytes that loaders requested: weights, keys and values.
        pub streamed_bytes: u64,
        /// Bytes copied to the device.
        pub uploaded_bytes: u64,
        /// Bytes not copied because they were on the device already.
        pub avoided_bytes: u64,
        /// Times that a kernel was launched.
        pub launches: u64,
        /// Programs loaded.
        pub loads: u64,
        /// Workers that are suspected now: no progress for longer than the limit while a step is running.
        pub suspected: u32,
        /// The first of them.
        pub suspect: u32,
        /// Times that a worker became suspected.
        pub suspicions: u64,
        /// Pages of keys and values on the device.
        pub kv_pages: u32,
        /// Pages of these that sequences have.
        pub kv_held: u32,
        /// Pages that sequences have or were promised.
        pub kv_promised: u32,
        /// Zero.
        pub reserved: u32,
        /// Commands that ran several sequences at once.
        pub batches: u64,
        /// Turns of sequences in these commands.
        pub batched: u64,
        /// Windows: steps of one sequence that checked guessed tokens.
        pub windows: u64,
        /// Tokens that were guessed for them.
        pub guessed: u64,
        /// Of these, tokens that were right, and behind right ones only.
        pub accepted: u64,
        /// Events of the trace ring, since the start; the last `TELEMETRY_EVENTS` of them are in it.
        pub events: u64,
        /// How each family of figures is known, an `Evidence` by `EvidenceFamily`.
        pub evidence: [u32; 4],
        /// Memory of the card that this process uses, as the driver's library reports it; zero if it does not.
        pub device_used_bytes: u64,
        /// The GPU's clock of multiprocessors in megahertz, read once a second; zero while nothing was read. Of the next words, all ones
        /// stand for what the GPU cannot tell.
        pub gpu_sm_mhz: u32,
        /// Clock of its memory in megahertz.
        pub gpu_memory_mhz: u32,
        /// Power that it draws, in milliwatts.
        pub gpu_power_mw: u32,
        /// Power that it may draw, in milliwatts.
        pub gpu_power_limit_mw: u32,
        /// Temperature of the chip in degrees Celsius.
        pub gpu_temperature_c: u32,
        /// Percent of the driver's last sampling period in which a kernel ran; a resident kernel that waits counts.
        pub gpu_busy_percent: u32,
        /// Memory errors since the driver was loaded that were not corrected.
        pub gpu_ecc_errors: u32,
        /// NVLinks that are up.
        pub gpu_links: u32,
        /// Why the clocks are held down: a bit for each `ThrottleReason`.
        pub gpu_throttled: u32,
        /// Trials of a search so far.
        pub search_trials: u32,
        /// The trial that leads.
        pub search_best: u32,
        /// Its latency in nanoseconds per token; zero while nothing is correct.
        pub search_best_ns: u32,
        /// What the search of a server that tunes itself is doing, a `TuneState`.
        pub tune_state: u32,
        /// Its trials.
        pub tune_trials: u32,
        /// Of these, those that it kept.
        pub tune_kept: u32,
        /// Better schedules that failed the gate before a switch, and never served.
        pub tune_refused: u32,
        /// Better schedules that were taken back: these, and those that the confirmation reverted.
        pub tune_rolled_back: u32,
        /// What the current schedule saves of the first one's time, in parts of a million: the low end of the interval.
        pub tune_gain_low: u32,
        /// The high end.
        pub tune_gain_high: u32,
        /// Longest wait of a request for the search, in microseconds.
        pub tune_wait_us: u32,
        /// Id of the current schedule.
        pub tune_schedule: u64,
        /// Of sequences that have left: `required` of their windows.
        pub left_required: u64,
        /// `lookahead` of these.
        pub left_lookahead: u64,
        /// `accepted` of these.
        pub left_accepted: u64,
        /// Zero.
        pub reserved_words: [u64; 5],
    }
}

wire_struct! {
    /// A sequence in its place.
    amk_telemetry_session align(64) size(128)
    pub struct SessionWords {
        /// Number among all opened sequences, from one; zero if the place is free.
        pub serial: u64,
        /// 0 low, 1 normal, 2 high.
        pub priority: u32,
        /// State of its command, an `EntryState`.
        pub state: u32,
        /// Positions run.
        pub positions: u64,
        /// Positions that it may run, at most.
        pub goal: u64,
        /// Tokens chosen.
        pub tokens: u64,
        /// When it was opened.
        pub opened_ns: u64,
        /// When it last had a turn.
        pub turn_ns: u64,
        /// When its client was last sent tokens; before the first ones, when its request arrived.
        pub told_ns: u64,
        /// Positions that its windows had to run, one of each.
        pub required: u64,
        /// Positions that they ran for guesses.
        pub lookahead: u64,
        /// Of both, positions that stand.
        pub stood: u64,
        /// Of both, positions that are run again: their guess was wrong, or behind a wrong one.
        pub rerun: u64,
        /// Guesses that were right, and behind right ones only.
        pub accepted: u64,
        /// Zero.
        pub reserved: [u64; 3],
    }
}

wire_struct! {
    /// A program that the machine runs: how often, and the tasks of each op in one pass of its queues.
    amk_telemetry_program align(64) size(8320)
    pub struct ProgramWords {
        /// The beginning of its id, as text.
        pub id: [u8; 16],
        /// Passes of its queues: positions of a sequence or of a batch.
        pub passes: u64,
        /// Its workers.
        pub workers: u32,
        /// Zero.
        pub reserved: u32,
        /// Tasks of one pass by opcode, of all workers.
        pub all: [u64; 8],
        /// Tasks of one pass by worker and opcode, eight words per worker.
        pub tasks: [u32; 2048],
        /// Zero.
        pub reserved_words: [u64; 4],
    }
}

wire_enum! {
    /// The track of an event: what its time was spent on.
    EventTrack {
        /// A client waited: from its request, or its last tokens, until it was sent tokens.
        Client = 0 "client",
        /// A sequence had its turn.
        Turn = 1 "turn",
        /// A command was under way: from publishing it until its completion was read.
        Command = 2 "command",
        /// The machine ran a command, by its own clock.
        Device = 3 "device",
    }
}

wire_struct! {
    /// An entry of the trace ring. Its sequence word guards it, as the page's guards the page.
    amk_telemetry_event align(64) size(64)
    pub struct EventWords {
        /// Odd during a write; twice the number of events that this entry has held.
        pub sequence: u64,
        /// When it began.
        pub begin_ns: u64,
        /// When it ended; later than its begin.
        pub end_ns: u64,
        /// Number of the sequence (client, turn) or of the command (command, device), from one.
        pub number: u64,
        /// Of a turn: positions of all sequences until then, its own included.
        pub total: u64,
        /// An `EventTrack`.
        pub track: u32,
        /// Place of the sequence, or of the first one of a command.
        pub place: u32,
        /// Its first position.
        pub first: u32,
        /// Positions run; of a batch, those of each sequence.
        pub positions: u32,
        /// Tokens chosen or sent.
        pub tokens: u32,
        /// Sequences of the command.
        pub sequences: u32,
    }
}

wire_enum! {
    /// How a figure is known.
    Evidence {
        /// There is no source for it.
        Missing = 0 "missing",
        /// Computed from other figures.
        Derived = 1 "derived",
        /// Counted or timed where it happens.
        Measured = 2 "measured",
    }
}

wire_enum! {
    /// What a runtime must show of itself.
    EvidenceFamily {
        /// States of the ring's entries, and commands published and completed.
        Ring = 0 "ring",
        /// What the process and its machine are doing.
        Control = 1 "control",
        /// Bytes copied to the device.
        Copy = 2 "copy",
        /// Bytes resident on the device.
        Residency = 3 "residency",
    }
}

wire_struct! {
    /// A worker as the monitor thread saw it: its heartbeat, and since when it has not changed.
    amk_telemetry_worker align(64) size(64)
    pub struct WorkerWords {
        /// As in `WorkerHeartbeat`.
        pub beat: u32,
        /// As in `WorkerHeartbeat`.
        pub active: u32,
        /// As in `WorkerHeartbeat`.
        pub progress: u32,
        /// As in `WorkerHeartbeat`.
        pub epoch: u32,
        /// As in `WorkerHeartbeat`.
        pub position: u32,
        /// As in `WorkerHeartbeat`.
        pub task: u32,
        /// As in `WorkerHeartbeat`.
        pub issued: u32,
        /// As in `WorkerHeartbeat`.
        pub wait: u32,
        /// As in `WorkerHeartbeat`.
        pub object: u32,
        /// As in `WorkerHeartbeat`.
        pub have: u32,
        /// As in `WorkerHeartbeat`.
        pub need: u32,
        /// Nonzero while it is suspected.
        pub suspected: u32,
        /// When its progress was last seen to change, or its step to have ended.
        pub moved_ns: u64,
        /// When its heartbeat was last seen to change.
        pub beat_ns: u64,
    }
}

/// First bytes of a page.
pub const TELEMETRY_MAGIC: [u8; 8] = *b"AMKTELEM";
/// Bumped on every change of the page.
pub const TELEMETRY_VERSION: u32 = 6;
/// Programs of the page: the one for batches, and the one for a lone sequence.
pub const TELEMETRY_PROGRAMS: usize = 2;
/// Opcodes that the page counts.
pub const TELEMETRY_OPS: usize = 8;
/// Entries of the trace ring, which follows the page.
pub const TELEMETRY_EVENTS: usize = 4096;

const _: () = assert!(crate::Opcode::ALL.len() <= TELEMETRY_OPS);
const _: () = assert!(crate::WORKERS_MAX as usize * TELEMETRY_OPS == 2048);

/// The parts of the page, for its documentation. They are host-only: the device's header has only the heartbeat.
#[must_use]
pub fn telemetry_structs() -> Vec<StructLayout> {
    vec![
        Telemetry::LAYOUT,
        SessionWords::LAYOUT,
        WorkerWords::LAYOUT,
        ProgramWords::LAYOUT,
        EventWords::LAYOUT,
    ]
}
