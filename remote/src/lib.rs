//! A device in a process of its own: it can hang, die or lose its driver, and the search goes on with a new one.
//!
//! [`Remote`] is a [`search::Device`]. It starts a process, asks it one thing at a time over a socket, and waits for each answer
//! for so long and no longer ([`Limits`]). A process that does not answer in time, answers nonsense or ends is killed, and the next
//! request starts another; programs are loaded into it anew. [`serve()`] is the other side: it drives whatever implements [`Served`].
//!
//! **Promises.** Every wait of the parent has a deadline that is declared in `limits.rs`. A program travels under a seal, which only
//! verified ones get, with a key that parent and child alone have. Logits never pass through the socket: both sides map the same memory, in
//! which the child also notes what it is doing, so that the parent can say after a kill who waited for what. The child ends when
//! the parent does. Timing takes a proof of agreement on the parent's side ([`search::Contender`]); that the child is asked by handles
//! is a matter between the two.

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
