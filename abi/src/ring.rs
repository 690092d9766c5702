//! The host ring: submissions, completions, indices, and the states that an entry moves through.
//!
//! Both rings live in host-mapped memory. Every word has one writer. A submission's `sequence` is written last with release
//! (`ring.rs: publish` on the host), the device acquires it (`ring.cuh: ring_poll`); completions run the other way.

use crate::layout::wire_struct;
use crate::limits::STOP_TOKENS_MAX;
use crate::op::wire_enum;

wire_enum! {
    /// What a submission asks for.
    Command {
        /// Nothing; completes at once. Measures the ring.
        Ping = 1 "ping",
        /// Runs positions of a session: prompt tokens first, then generated ones.
        Decode = 2 "decode",
        /// Switches every worker to another loaded program.
        LoadProgram = 3 "load_program",
        /// Completes when everything before it has.
        Fence = 4 "fence",
        /// Ends the kernel.
        Stop = 5 "stop",
    }
}

wire_struct! {
    /// A command from host to device.
    amk_submission align(64) size(128)
    pub struct Submission {
        /// A `Command`.
        pub command: u32,
        /// Session.
        pub session: u32,
        /// First position to run.
        pub position: u32,
        /// Positions to run, at most.
        pub steps: u32,
        /// Positions below this one take their token from the session's token buffer.
        pub forced: u32,
        /// Bit 0: write the logits of each step to its own row.
        pub flags: u32,
        /// Stop tokens in use.
        pub stop_len: u32,
        /// Zero.
        pub reserved0: u32,
        /// Address of the `amk_program`, for `load_program`.
        pub program: u64,
        /// A generated token among these ends the command.
        pub stop: [u32; STOP_TOKENS_MAX],
        /// Zero.
        pub reserved1: [u32; 13],
        /// Index of the entry plus one; written last.
        pub sequence: u32,
    }
}

wire_struct! {
    /// The device's answer.
    amk_completion align(64) size(64)
    pub struct Completion {
        /// A `Trap`; zero is success.
        pub trap: u32,
        /// Positions that were run.
        pub steps: u32,
        /// The last token that was chosen.
        pub token: u32,
        /// Whether a stop token ended the command.
        pub stopped: u32,
        /// Device nanoseconds when the command was taken up.
        pub start_ns: u64,
        /// Device nanoseconds when it was done.
        pub end_ns: u64,
        /// Zero.
        pub reserved: [u32; 7],
        /// Index of the entry plus one; written last.
        pub sequence: u32,
    }
}

wire_struct! {
    /// Words of the ring that are not entries, each on a line of its own.
    amk_ring_indices align(128) size(384)
    pub struct RingIndices {
        /// Written by the host: nonzero asks every worker to leave.
        pub abort: u32,
        /// Zero.
        pub reserved0: [u32; 31],
        /// Written by the device: increases while the poller lives.
        pub heartbeat: u32,
        /// Zero.
        pub reserved1: [u32; 31],
        /// Written by the device: submissions taken up.
        pub head: u32,
        /// Written by the device: sequence of the command under way while it waits for weights (`wait_io`), else zero.
        pub waiting: u32,
        /// Zero.
        pub reserved2: [u32; 30],
    }
}

wire_enum! {
    /// Where a ring entry is in its life.
    EntryState {
        /// Free.
        Empty = 0 "empty",
        /// Visible to the device.
        Published = 1 "published",
        /// Being worked on.
        Claimed = 2 "claimed",
        /// Finished.
        Done = 3 "done",
        /// Waits for weights that are still on their way.
        WaitIo = 4 "wait_io",
        /// Gave way at a token boundary.
        Yield = 5 "yield",
        /// Back in line.
        Requeue = 6 "requeue",
        /// Failed.
        Fault = 7 "fault",
    }
}
