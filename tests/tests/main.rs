//! The cross-crate tests, in one binary.

mod filetest;
mod generate;
mod lowering;
