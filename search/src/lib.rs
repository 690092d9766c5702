//! Propose, gate, measure, keep or revert.
//!
//! A trial in one line: a schedule is **proposed**, **validated**, **lowered** and **verified**, agrees with the graph
//! on the **reference VM**, agrees on the **device**, is **timed** against the incumbent, and is **kept**, **reverted**
//! or found **inconclusive**. Without a device, predictions of the cost model are compared instead. Measured and
//! predicted latencies are never compared with each other.
//!
//! **Promises.** Pure: no IO, clock or environment. Seeds and time are arguments, so equal inputs give equal trials,
//! with any number of threads of the caller's `rayon` pool and any number of helpers. No latency without agreement:
//! [`Latency`] and [`Contender`] are made from an `Agreement<Device>`, which is made from an `Agreement<Reference>`,
//! and from nothing else. Nothing here depends on the driver behind [`Device`].

#[cfg(test)]
extern crate self as search;

mod ahead;
pub mod assess;
mod audit;
mod budget;
mod bundle;
pub mod calibrate;
pub mod checks;
mod clocks;
mod cpu;
mod decide;
mod device;
mod device_worker;
mod diverge;
mod divergence;
mod effort;
mod enough;
mod equals;
mod evidence;
mod expected;
mod follow;
mod gate;
mod history;
mod measure;
pub mod measured_grid;
mod propose;
pub mod provenance;
mod rejection;
pub mod replay;
mod run;
mod worker_pool;
// The unit tests of this crate use the scripted device of the crate `tests` too.
#[cfg(test)]
#[path = "../../tests/src/scripted.rs"]
pub mod scripted;
mod settings;
mod settled;
pub mod stability;
pub mod strategy;
mod trial;
mod verdict;

pub use assess::{Assessed, Timing};
pub use audit::{Audit, RooflineBound, StepBytes, Terms};
pub use budget::{BadBudget, Budget};
pub use bundle::{BUNDLE_SCHEMA, Bundle, Proof, Refusal};
pub use clocks::{ClockReadings, Clocks};
pub use corpus::Conditions;
pub use cpu::{Candidate, KernelId};
pub use decide::{Decision, decide_measured, decide_predicted, predicted_gain};
pub use device::{
    Contender, Costs, Device, DeviceError, DeviceInfo, Handle, Plan, ROUND, Ran, Samples, Side,
    run, time,
};
pub use diverge::left_in;
pub use divergence::{DivergenceClass, FirstDivergence, TaskAt, place_name};
pub use effort::{Interim, StoppingRule, spread};
pub use enough::{Enough, saved};
pub use equals::{Equal, Equals, equals};
pub use evidence::{Build, Evidence};
pub use expected::{Expected, POSITIONS_MAX, device_positions, draw_tokens, why_fewer_positions};
pub use gate::{Gate, TIMED_TOKENS};
pub use measure::{
    BelowBound, Interval, Latency, Predicted, gain, median, median_interval, noise_floor,
};
pub use propose::{Change, Origin, TrialRecord, TrialRecords, changes, fit_caps, generator};
pub use rejection::{BitsDiffer, ExpectedError, Rejection};
pub use run::{LastGate, Search, SearchError, Step, StoppedBy, WastedSpeculation};
pub use settings::{Clock, Settings};
pub use settled::searched_values;
pub use trial::{
    Beside, Confirmation, LeftOut, Outcome, PROTOCOL, Row, Skipped, SkippedProposal, Spent, Trial,
};
pub use verdict::{GateReport, LatencyKind, VERDICT_SCHEMA, Verdict};
pub use worker_pool::{Opener, WorkerPool};
