//! Why a candidate gets no latency.

use ir::Violations;
use lower::LowerError;
use reference_vm::MachineError;
use reference_vm::compare::Disagreement;
use reference_vm::eval::EvalError;
use reference_vm::machine::Run;

use crate::device::DeviceError;
use crate::measure::BelowBound;

/// Why a candidate is rejected. Every such end is data for the ledger, not a failure of the search.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Rejection {
    /// The schedule breaks rules.
    #[error("{}", joined(.0))]
    Rejected(Violations),
    /// The schedule is legal and cannot be lowered.
    #[error("{0}")]
    Unloadable(LowerError),
    /// The reference VM cannot run the lowered program.
    #[error("the reference VM cannot run it: {0}")]
    Unrunnable(#[from] MachineError),
    /// The graph gives no values to compare with on these tokens.
    #[error("the graph cannot be evaluated: {0}")]
    Unevaluated(ExpectedError),
    /// The program trapped, got stuck or used up its fuel on the reference VM.
    #[error("on the reference VM: {}", ended(.0))]
    Halted(Run),
    /// The program chose another token than the most likely one of its own logits.
    #[error("token {got} was chosen at position {position} where the logits say {want}")]
    Sampled {
        /// The position.
        position: usize,
        /// The token chosen.
        got: u32,
        /// The most likely one.
        want: u32,
    },
    /// Values differ from the evaluated graph's.
    #[error("{by} disagrees with the graph: {at}")]
    Disagreed {
        /// `reference`, `device` or `timed`.
        by: &'static str,
        /// Where.
        at: Disagreement,
    },
    /// Two runs on the device agree with the graph and differ in their bits: the program races, or whatever runs it does.
    #[error("{0}")]
    Unrepeatable(BitsDiffer),
    /// The device gave no result.
    #[error(transparent)]
    Failed(#[from] DeviceError),
    /// It was faster than reading its bytes allows.
    #[error(transparent)]
    BelowBound(#[from] BelowBound),
}

/// Why a graph gives no values to compare with.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ExpectedError {
    /// The graph cannot be evaluated on these tokens.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// No logit differs from another: a program that computes nothing would agree.
    #[error(
        "all its logits are equal at every position, so that a program which computes nothing would agree; are its weights zero?"
    )]
    Flat,
    /// The routes of a long context are not followed.
    #[error(
        "the routes of a model with experts are followed over the gate's own tokens only, so contexts of up to {most} tokens can be timed"
    )]
    Routes {
        /// The longest context.
        most: usize,
    },
}

/// The first word of the logits in which two runs of a device differ.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "two runs on the device differ: word {word} of the logits at position {position} is {} ({:#010x}) once and {} ({:#010x}) the second time",
    values[0], values[0].to_bits(), values[1], values[1].to_bits()
)]
pub struct BitsDiffer {
    /// The position.
    pub position: usize,
    /// The word of its logits.
    pub word: usize,
    /// The values of the first run and of the second one.
    pub values: [f32; 2],
}

fn joined(violations: &Violations) -> String {
    let all: Vec<String> = violations.list().iter().map(ToString::to_string).collect();
    all.join(" | ")
}

fn ended(run: &Run) -> String {
    match run {
        Run::Finished(_) => "finished".to_owned(),
        Run::Trapped(trap) => trap.to_string(),
        Run::Stuck { waiting } => match waiting.first() {
            Some(first) => format!("stuck, {} workers wait: {first}", waiting.len()),
            None => "stuck".to_owned(),
        },
    }
}
