//! The cross-crate tests, in one binary.

mod attacks;
mod calibration;
mod docs;
mod filetest;
mod generate;
mod lowering;
mod shipped;
mod tidy;
