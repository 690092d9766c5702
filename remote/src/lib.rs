//! A device in a process of its own: it can hang, die or lose its driver, and the search continues with a new one.
//!
//! [`Remote`] is a [`search::Device`]. It starts a process, sends it one request at a time over a socket, and waits for
//! each answer up to a deadline ([`Limits`]). A process that does not answer in time, sends nonsense or ends is killed;
//! the next request starts another, into which programs are loaded again. [`serve()`] is the other side: it drives an
//! implementation of [`Served`].
//!
//! **Promises.** Every wait of the parent has a deadline that is declared in `limits.rs`. A program is sent with a
//! seal, which only verified programs get, made with a key that only parent and child have. Logits never pass through
//! the socket: both sides map the same memory. The child also records there what it is doing, so that the parent can
//! report after a kill which task waited for what. The child ends when the parent does. Timing takes a proof of
//! agreement on the parent's side ([`search::Contender`]); between parent and child, programs are identified by
//! handles.

mod limits;
mod process;
mod remote;
mod serve;
mod shared;
mod wire;

pub use limits::Limits;
pub use remote::{Launcher, ReadClocks, Remote, Room};
pub use serve::{NotAChild, Served, Watch, serve};
pub use shared::{Board, Last, Phase};
