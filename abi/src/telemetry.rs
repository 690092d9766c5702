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
    amk_telemetry align(64) size(1792)
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
        /// Turns given to sequences.
        pub turns: u64,
        /// Turns after which a sequence yielded.
        pub yields: u64,
        /// Times that a sequence was queued again.
        pub requeues: u64,
        /// Turns whose weights had not arrived.
        pub io_waits: u64,
        /// Times that a sequence's command failed.
        pub faults: u64,
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
        /// Zero.
        pub gpu_reserved: u32,
    }
}

wire_struct! {
    /// A sequence in its place.
    amk_telemetry_session align(64) size(64)
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
        /// Zero.
        pub reserved: u64,
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
pub const TELEMETRY_VERSION: u32 = 3;

/// The parts of the page, for its documentation. They are host-only: the device's header has only the heartbeat.
#[must_use]
pub fn telemetry_structs() -> Vec<StructLayout> {
    vec![Telemetry::LAYOUT, SessionWords::LAYOUT, WorkerWords::LAYOUT]
}
