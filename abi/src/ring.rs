//! The host ring: submissions, completions, indices, and the states that an entry moves through.
//!
//! Both rings live in host-mapped memory. Every word has one writer. A submission's `sequence` is written last with release
//! (`ring.rs: publish` on the host), the device acquires it (`ring.cuh: ring_poll`); completions run the other way.

use crate::layout::wire_struct;
use crate::limits::{SEQS_MAX, STOP_TOKENS_MAX};
use crate::op::wire_enum;

wire_enum! {
    /// What a submission does.
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
        /// `FLAG_KEEP_LOGITS`, `FLAG_SAMPLE`.
        pub flags: u32,
        /// Stop tokens in use.
        pub stop_len: u32,
        /// Sequences of a decode command; 0 and 1: it runs `session` at `position`.
        /// More: it is a batch (decision 022). `session`, `position` and `forced` are zero, each sequence starts with the token at its
        /// position in its session's buffer and goes on with `seq_forced` more from there, and `stop` holds for all.
        /// A command of one step may have windows: neighbours with one session, each at the position after the one before it.
        pub seqs: u32,
        /// Address of the `amk_program`, for `load_program`.
        pub program: u64,
        /// A generated token among these ends the command.
        pub stop: [u32; STOP_TOKENS_MAX],
        /// Sessions of the sequences, a byte each, sequence 0 lowest.
        pub seq_session: [u32; 2],
        /// First position of each sequence.
        pub seq_position: [u32; SEQS_MAX],
        /// A bit per sequence: `FLAG_SAMPLE` for that sequence.
        pub seq_sample: u32,
        /// Tokens after its first that each sequence takes from its session's buffer, a byte each, sequence 0 lowest.
        pub seq_forced: [u32; 2],
        /// Index of the entry plus one; written last.
        pub sequence: u32,
    }
}

wire_struct! {
    /// The completion of a command.
    amk_completion align(64) size(64)
    pub struct Completion {
        /// A `Trap`; zero is success.
        pub trap: u32,
        /// Positions that were run.
        pub steps: u32,
        /// The last token that was chosen.
        pub token: u32,
        /// An `Ending`.
        pub ending: u32,
        /// Device nanoseconds when the command was started.
        pub start_ns: u64,
        /// Device nanoseconds when it was completed.
        pub end_ns: u64,
        /// Batches: the `Ending` of each sequence, `SEQ_ENDING_BITS` each, sequence 0 lowest.
        /// `ending` and `token` are then zero. A batch ends for all sequences as soon as it ends for one: `length` with fewer than the
        /// requested steps is a sequence that can continue.
        pub seq_endings: u32,
        /// Zero.
        pub reserved: [u32; 6],
        /// Index of the entry plus one; written last.
        pub sequence: u32,
    }
}

wire_enum! {
    /// How a decode command ended that did not trap. Whatever the ending, the positions that were run are valid, and a command that
    /// starts after them continues as if there had been no end.
    Ending {
        /// All positions were run.
        Length = 0 "length",
        /// A stop token was generated.
        Stop = 1 "stop",
        /// The host asked it to yield.
        Yield = 2 "yield",
        /// Every token was banned or not a number.
        NoToken = 3 "no_token",
        /// A token of the prompt is outside the vocabulary: it and the tokens after it were not run.
        BadToken = 4 "bad_token",
    }
}

wire_struct! {
    /// Sampling settings of a session, in device memory (decision 017). The host writes them between two commands of the session, all in
    /// fixed point or as the f32 that the arithmetic of decision 015 takes; the device maintains `upto`.
    amk_sampling align(16) size(96)
    pub struct SessionSampling {
        /// Address of the rows of logits.
        pub logits: u64,
        /// Address of a bit per token of the vocabulary: it has occurred in the sequence.
        pub seen: u64,
        /// Address of a bit per token of the vocabulary: it has a bias.
        pub biased: u64,
        /// `amk_bias[bias_len]`, by token.
        pub bias: u64,
        /// Scratch: 16 bytes for each token of the vocabulary, and for each thread of a worker.
        pub list: u64,
        /// Scratch: a row after penalty and bias, whole groups of 4 logits.
        pub changed: u64,
        /// Seed of the random numbers.
        pub seed: u64,
        /// `top_p` in 32 binary places, rounded up; `2^32` for no limit.
        pub share: u64,
        /// The least weight that passes `min_p`.
        pub least: u64,
        /// Factor on the differences to the highest logit.
        pub scale: f32,
        /// Repetition penalty; 1 for none.
        pub penalty: f32,
        /// `top_k`: only this many likeliest tokens; 0 for no limit.
        pub top_k: u32,
        /// Number of biases.
        pub bias_len: u32,
        /// Bit 0: greedy, the highest logit after penalty and bias. [`SAMPLING_MASKED`](crate::SAMPLING_MASKED): `biased` is
        /// the mask of one position, in host memory.
        pub greedy: u32,
        /// Positions whose tokens are in `seen`; the host writes zero when a sequence begins.
        pub upto: u32,
    }
}

wire_struct! {
    /// The bias of a token's logit.
    amk_bias align(8) size(8)
    pub struct Bias {
        /// Token.
        pub token: u32,
        /// Value added to its logit.
        pub value: f32,
    }
}

wire_struct! {
    /// Words of the ring that are not entries, each on a line of its own.
    amk_ring_indices align(128) size(384)
    pub struct RingIndices {
        /// Written by the host: nonzero makes every worker leave.
        pub abort: u32,
        /// Written by the host: sequence of the command that must yield after the current step.
        pub preempt: u32,
        /// Zero.
        pub reserved0: [u32; 30],
        /// Written by the device: changes while the poller runs.
        pub heartbeat: u32,
        /// Zero.
        pub reserved1: [u32; 31],
        /// Written by the device: submissions consumed.
        pub head: u32,
        /// Written by the device: sequence of the current command while it waits for weights (`wait_io`), else zero.
        pub waiting: u32,
        /// Zero.
        pub reserved2: [u32; 30],
    }
}

wire_enum! {
    /// State of a ring entry.
    EntryState {
        /// Free.
        Empty = 0 "empty",
        /// Visible to the device.
        Published = 1 "published",
        /// Being executed.
        Claimed = 2 "claimed",
        /// Finished.
        Done = 3 "done",
        /// Waits for weights that have not arrived.
        WaitIo = 4 "wait_io",
        /// Yielded at a token boundary.
        Yield = 5 "yield",
        /// Queued again.
        Requeue = 6 "requeue",
        /// Failed.
        Fault = 7 "fault",
    }
}
