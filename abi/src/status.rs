//! Trap codes, and the block in which the device reports why it stopped.

use crate::layout::wire_struct;
use crate::op::wire_enum;

wire_enum! {
    /// Why the device stopped.
    Trap {
        /// It has not stopped.
        None = 0 "none",
        /// The host asked it to leave.
        Aborted = 1 "aborted",
        /// A counter did not reach its threshold before the deadline.
        CounterDeadline = 2 "counter_deadline",
        /// A flag-in-data word did not arrive before the deadline.
        PayloadDeadline = 3 "payload_deadline",
        /// A weight stage did not arrive before the deadline.
        StageDeadline = 4 "stage_deadline",
        /// No task was finished before the deadline, although the worker waited for nothing.
        Stalled = 5 "stalled",
        /// An opcode outside the table.
        BadOpcode = 6 "bad_opcode",
        /// A buffer, counter or token outside its table.
        BadIndex = 7 "bad_index",
        /// A submission that is invalid.
        BadCommand = 8 "bad_command",
        /// Weights that the command needs will not arrive. The kernel continues.
        Weights = 9 "weights",
        /// No weights arrived for as long as a worker may wait for them.
        WeightsDeadline = 10 "weights_deadline",
        /// Another device of the program did not end the step, or did not start, before the deadline.
        DeviceDeadline = 11 "device_deadline",
    }
}

wire_struct! {
    /// Report of a trap: which worker waited for what. The first writer wins.
    amk_status align(64) size(64)
    pub struct Status {
        /// A `Trap`.
        pub trap: u32,
        /// Worker that reported, counted over all devices.
        pub worker: u32,
        /// Its task, by index in its queue.
        pub task: u32,
        /// Opcode of the task.
        pub opcode: u32,
        /// Counter, buffer, stage or device waited for.
        pub object: u32,
        /// Value that it held.
        pub have: u32,
        /// Value that was needed.
        pub need: u32,
        /// Epoch.
        pub epoch: u32,
        /// Nanoseconds waited.
        pub waited_ns: u64,
        /// Workers that have left.
        pub left: u32,
        /// Zero.
        pub reserved: [u32; 4],
        /// Written last: nonzero when the block is complete.
        pub valid: u32,
    }
}
