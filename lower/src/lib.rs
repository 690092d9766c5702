//! Lowers a valid schedule to a verified program, and predicts the program's step time.
//!
//! **Passes**, each a function of the results of those before it:
//!
//! | pass | result | holds afterwards |
//! |---|---|---|
//! | `ir::program::PackedModel` | the packed matrices | they depend on the graph alone |
//! | `flow` | the phases of a step, and the values between them | a value has one writer; no later pass knows the model |
//! | `devices` | the items of each device | a device has whole heads; a row has one device |
//! | `assign` | each worker's ranges of items | every item of every phase is assigned once, a worker's part is one range |
//! | `emit::counters` | the counters | one per value that is handed over by counter; arrivals are its writer's tasks |
//! | `order` | which phases happen before which | a task waits for every counter that it needs |
//! | `buffers` | the buffers | one scratch buffer per value, written once per step |
//! | `pages` | arena offsets | buffers share no bytes |
//! | `emit` | tasks | `sample` waits for every worker |
//! | `ir::program::verify` | the proof | the program gives one result in every order |
//!
//! **Promises.** Pure and deterministic: the same schedule, graph, target and options give the same program, byte for
//! byte. A schedule that `validate` accepted for this graph and target can be lowered, unless it exceeds a limit of the
//! ABI. A result that does not verify is a bug of this crate and is reported as such.

mod assign;
mod buffers;
mod cost;
mod devices;
mod emit;
mod error;
mod flow;
mod order;
mod pages;

use ir::program::{Dims, PackedModel, Pipeline, Program, Topology, Verified, Worker};
use ir::schedule::{Valid, validate};
use ir::{Experts, FeedForward, Graph, ScheduleConfig, Target};

pub use cost::{
    Delay, Disturbance, PhaseTime, Prediction, Predictor, RateFile, Rates, SimulatedStep,
    TaskTimes, predict,
};
pub use error::{Limit, LowerError};

use crate::devices::Device;
use crate::error::within;

/// Inputs of lowering besides schedule, graph and target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Tokens of a session's key/value cache.
    pub kv_capacity: u32,
}

/// Lowers a schedule to a program that is proven to give one result in every order of execution.
///
/// # Errors
/// [`LowerError`]: a limit of the ABI, a schedule that was validated for something else, or a bug of this crate.
pub fn lower(
    config: &Valid<ScheduleConfig>,
    graph: &Graph,
    target: &Target,
    options: Options,
) -> Result<Verified<Program>, LowerError> {
    let program = build(config, graph, target, options)?;
    ir::program::verify(program).map_err(LowerError::Internal)
}

/// The work of a schedule at each position, without a proof of its program: for rankings of proposals, which decide
/// nothing. Verifying takes most of the time of a prediction.
///
/// # Errors
/// Those of [`lower`], but for programs that do not verify.
pub fn unverified_work(
    config: &Valid<ScheduleConfig>,
    graph: &Graph,
    target: &Target,
    options: Options,
    positions: &[u32],
) -> Result<Vec<Predictor>, LowerError> {
    let program = build(config, graph, target, options)?;
    let at = |&at: &u32| Predictor::unverified(&program, &config.kernel, target, at);
    Ok(positions.iter().map(at).collect())
}

/// The program before it is verified.
pub(crate) fn build(
    config: &Valid<ScheduleConfig>,
    graph: &Graph,
    target: &Target,
    options: Options,
) -> Result<Program, LowerError> {
    // A `Valid` config does not record its graph and target.
    validate(**config, graph, target).map_err(LowerError::NotValidHere)?;
    within(Limit::KvCapacity, abi::KV_CAPACITY_MAX.into(), options.kv_capacity.into())?;
    within(Limit::MatrixRows, 1 << 28, rows_max(graph))?;
    let config: &ScheduleConfig = config;
    let kv_words = 2 * u64::from(graph.kv_width()) * u64::from(options.kv_capacity);
    within(Limit::KvWords, u32::MAX.into(), kv_words)?;
    let packed = PackedModel::new(graph);
    let flow = flow::Flow::new(config, graph, &packed, kv_words as u32);
    let all = (0..target.devices).map(|index| Device { index, of: target.devices });
    let shares: Vec<_> =
        all.map(|device| assign::assign(&flow, config.sm_assignment, target.sms, device)).collect();
    let (mut buffers, replicated) = buffers::buffers(&flow, &shares)?;
    let arena_bytes = pages::pages(&mut buffers);
    let (mut workers, mut counters) = (Vec::new(), 0);
    for shares in &shares {
        let (queues, used) = device_workers(&flow, shares, target.sms);
        workers.extend(queues);
        counters = counters.max(used);
    }
    within(Limit::Counters, abi::COUNTERS_MAX.into(), u64::from(counters.max(1)))?;
    let program = Program {
        model: graph.name.clone(),
        dims: Dims::from(graph),
        kv_capacity: options.kv_capacity,
        pipeline: pipeline(config),
        matrices: packed.matrices,
        buffers,
        counters,
        arena_bytes,
        workers,
        topology: Topology { devices: target.devices, replicated },
    };
    within(Limit::Tasks, abi::TASKS_MAX.into(), program.task_len() as u64)?;
    Ok(program)
}

/// The queues of a device's workers, and the number of counters in use.
fn device_workers(flow: &flow::Flow, shares: &[assign::Shares], sms: u32) -> (Vec<Worker>, u32) {
    let counters = emit::counters(flow, shares);
    let order = order::PhaseOrder::new(flow, shares);
    let plan = emit::Plan { flow, shares, counters: &counters, order: &order };
    let mut workers = plan.emit(sms as usize);
    let phase_counters = counters.iter().flatten().count() as u32;
    let after = flow.phases.last().map_or(0, |last| last.layer);
    let counters = emit::join_stragglers(&mut workers, after, phase_counters);
    (workers, counters)
}

/// The ring in units and stages. `validate` has refused sizes that do not divide.
fn pipeline(config: &ScheduleConfig) -> Pipeline {
    let knobs = config.pipeline;
    Pipeline {
        stage_units: knobs.stage_bytes / abi::UNIT_BYTES,
        stages: knobs.stages,
        in_flight: knobs.in_flight_bytes / knobs.stage_bytes,
        in_flight_before_wait: knobs.in_flight_before_wait_bytes / knobs.stage_bytes,
    }
}

/// Rows of the widest packed matrix: the sum of padded parts must fit into a row number.
fn rows_max(graph: &Graph) -> u64 {
    let qkv = u64::from(graph.heads) + 2 * u64::from(graph.kv_heads);
    let gate_up = 2 * u64::from(graph.ffn).next_multiple_of(u64::from(abi::UNIT_ROWS));
    let experts = graph.layers.iter().filter_map(|layer| match &layer.mlp.body {
        FeedForward::Experts(experts) => Some(&**experts),
        FeedForward::Gated(_) => None,
    });
    let rows = |experts: &Experts| {
        let ffn = 2 * u64::from(graph.expert_width(experts));
        experts.experts.len() as u64 * ffn.max(graph.hidden.into())
    };
    let experts = experts.map(rows).max().unwrap_or(0);
    (qkv * u64::from(graph.head_dim)).max(gate_up).max(u64::from(graph.vocab)).max(experts)
}

#[cfg(test)]
mod tests;
