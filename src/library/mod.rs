//! The front of the library: what a program calls, and what `amk loop` and `amk generate` are made of.

pub mod bindings;
mod engine;
mod search;

pub use engine::{Engine, Generated, Prompt, Request};
pub use search::Search;
