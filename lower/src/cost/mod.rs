//! Predicts the time of a step: a deterministic simulation of every worker's two streams.
//!
//! A prediction ranks schedules and says where the time goes; it never competes with a measurement and is never below
//! the floor (bytes over bandwidth). The numbers come from one H200, see `rates`.
//!
//! Each worker loads at its share of the bandwidth, limited by the bytes in flight, until the ring is full; loads run ahead of
//! the tasks and over the end of the step. A task starts when its inputs have arrived, which takes longer the more bytes are on
//! their way to its worker; it ends when its weights have landed and been multiplied. A few steps are run and the last is reported.

mod rates;
mod simulate;

use ir::program::{Program, Verified};
use ir::{KernelConfig, Target};
use serde::Serialize;

use simulate::Simulation;

/// What a step costs, as far as we can tell without running it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Microseconds of a step. Never below `bound_us`.
    pub latency_us: f64,
    /// The floor: all bytes at the target's full bandwidth.
    pub bound_us: f64,
    /// Weight bytes that a step streams.
    pub stream_bytes: u64,
    /// Key/value bytes that the step at this position reads.
    pub kv_bytes: u64,
    /// Phases that hand over to another, one after the other.
    pub handoffs: u32,
    /// Where the time goes, by kind of phase, in the order of the step. The times add up to the simulated step.
    pub phases: Vec<PhaseTime>,
}

/// The phases of one kind, all layers together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseTime {
    /// Such as `gate_up`.
    pub phase: String,
    /// Tasks.
    pub tasks: u32,
    /// Weight bytes that they multiply.
    pub stream_bytes: u64,
    /// Microseconds from the end of the phases before them to their own.
    pub us: f64,
}

/// Predicts one step at `position` (keys `0..=position` are there).
#[must_use]
pub fn predict(
    program: &Verified<Program>,
    kernel: &KernelConfig,
    target: &Target,
    position: u32,
) -> Prediction {
    let mut simulation = Simulation::new(program, kernel, target, position);
    let step = simulation.run();
    let stream_bytes = program.stream_bytes();
    let kv_bytes = simulation.kv_bytes();
    let bound_us = (stream_bytes + kv_bytes) as f64 / target.bandwidth as f64 * 1e6;
    Prediction {
        latency_us: step.us.max(bound_us),
        bound_us,
        stream_bytes,
        kv_bytes,
        handoffs: simulation.handoffs(),
        phases: step.phases,
    }
}
