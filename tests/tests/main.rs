//! The cross-crate tests, in one binary.

mod calibration;
mod docs;
mod filetest;
mod gate;
mod generate;
mod lowering;
mod shipped;
mod tidy;
