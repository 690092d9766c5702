//! The cross-crate tests, in one binary.

mod calibration;
mod docs;
mod explore;
mod filetest;
mod generate;
mod lowering;
mod shipped;
mod tidy;
