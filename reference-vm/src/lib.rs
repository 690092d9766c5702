//! The CPU oracle: the reference semantics of model graphs and lowered programs, in code that is simple enough to check
//! by reading.
//!
//! There are two executors. [`eval`] runs the model graph with no schedule and gives the expected values; [`machine`]
//! runs the lowered program. [`compare`] decides whether the two of them, or one and the device, agree, and returns the
//! proof; [`accuracy`] measures the difference.
//!
//! **Promises.** Deterministic: the same graph, weights and tokens give the same bits on every CPU, with any number of
//! threads, fed one at a time or together. Pure: no IO, clock, environment or hash-order dependence; threads come from
//! the caller's `rayon` pool. Inputs never cause a panic: an input that cannot be evaluated gives an error. Arithmetic
//! is in `f32` on the stored (rounded) weights; sums of norms are in `f64`; dot products run in 32 fixed `f32` lanes
//! joined in `f64`, attention in blocks of `f32` sums joined in `f64`.
//!
//! **Independent.** This crate shares no code with `lower`, `vm-device` or `vm-host`: an oracle must not share code
//! with what it judges.

pub mod accuracy;
mod codes;
pub mod compare;
mod defect;
pub mod divergence;
pub mod eval;
pub mod machine;
mod math;
mod memory;
mod ops;
mod order;
mod packed;
mod products;
pub mod routes;
mod trace;
mod trap;
mod wave;

pub use defect::{Defect, WindowDefect};
pub use math::argmax;
pub use order::Order;
pub use products::Products;
pub use trace::{Appended, Fired, Stored};
pub use trap::{Fault, InputError, MachineError, Trap};
