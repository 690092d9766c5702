//! The cross-crate tests, in one binary.

mod attacks;
mod calibration;
mod defaults;
mod device_bound;
mod device_script;
mod docs;
mod explore;
mod gate;
mod generate;
mod growth;
mod operands;
mod race;
mod shipped;
mod tidy;

mod together;
mod words;
