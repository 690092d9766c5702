//! The two levels of `amk`'s representation: the model [`graph`] with a schedule for it, and the program that they are
//! lowered to.
//!
//! **Promises.** Everything here is pure: no IO, clock, threads, environment or hash-order dependence. `validate`
//! checks user input and lists every violation; `verify` checks generated programs. Both return proof types with
//! private constructors.

mod block;
pub mod format;
mod graph;
mod id;
mod kv;
mod nearest;
mod phase;
pub mod program;
pub mod sampling;
pub mod schedule;
pub mod target;
pub mod text;
mod violation;
mod weights;

pub use abi::{CodeBlock, EXPERTS_MAX, GROUP_MAX, SLOTS_MAX, Scalar, Scales, UNIT_ROWS};
pub use block::{Attention, Block, Clamped, Experts, FeedForward, Gated, Layer, Shared};
pub use format::{Format, TILE_ROWS};
pub use graph::{Activation, DType, Graph, Linear, Tensor};
pub use id::{BufferId, CounterId, MatrixId, TensorId, WorkerId};
pub use kv::KvDtype;
pub use nearest::nearest;
pub use phase::PhaseClass;
pub use schedule::{KernelConfig, Knob, ScheduleConfig, Valid};
pub use target::Target;
pub use violation::{At, Level, Rule, Violation, Violations};
pub use weights::{FileRange, Weights, decode, e2m1, e4m3, e8m0};
