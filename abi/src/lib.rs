//! Everything that crosses the boundary between host and device, and nothing else.
//!
//! Opcodes, task parameters, wire structs, limits, trap codes and ring states are declared here **once**. The C header that the
//! device compiles ([`c_header`]) is generated from the same tables, so the two sides cannot drift: every struct's size is asserted on
//! both sides, every field's offset in a test, and [`abi_hash`] is compared at boot with the hash that the compiled kernel reports.
//!
//! **Promises.** Little-endian, `repr(C)`, no padding, reserved words are zero. This crate holds layout, never policy.

mod gpu;
mod header;
mod layout;
mod limits;
mod op;
mod ring;
mod status;
mod task;
mod telemetry;
mod transition;

pub use gpu::GpuState;
pub use header::{abi_hash, c_field_asserts, c_header, program_hash};
pub use layout::{Field, StructLayout, WireType, structs};
pub use limits::*;
pub use op::{
    Activation, AttentionMergeParams, AttentionParams, EmbedParams, Epilogue, Feature,
    MatvecParams, NopParams, NormParams, OpInfo, Opcode, Params, Prologue, RouteParams,
    SampleParams, Scoring,
};
pub use ring::{
    Bias, Command, Completion, Ending, EntryState, RingIndices, SessionSampling, Submission,
};
pub use status::{Status, Trap};
pub use task::{
    Action, BufferDesc, BufferKind, CodeBlock, DType, Done, Exchange, Launch, Load, LoadKind,
    LoaderRecord, ProgramHeader, Queue, Routed, Scalar, Scales, SeqStates, StepState, Task,
    TaskRecord, Unpack, WeightStream,
};
pub use telemetry::{
    Activity, EventTrack, EventWords, Evidence, EvidenceFamily, ProgramWords, SequenceEnd,
    SessionWords, TELEMETRY_EVENTS, TELEMETRY_MAGIC, TELEMETRY_OPS, TELEMETRY_PROGRAMS,
    TELEMETRY_VERSION, Telemetry, ThrottleReason, TuneState, WorkerHeartbeat, WorkerWords,
    telemetry_structs,
};
pub use transition::{CHANGES, Change, Side, Transition, transition};
