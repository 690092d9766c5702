//! The first divergence reported for candidates that a gate rejects, on devices that are the reference VM with a defect.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::{KernelConfig, ScheduleConfig};
use ir::{BufferId, Graph, Target, Weights};
use model::Model;
use reference_vm::machine::Machine;
use reference_vm::{Defect, Order};

use super::*;
use crate::assess::evaluate;
use crate::device::{Contender, DeviceInfo, Handle, Plan, Ran, Samples};
use crate::{Timing, Verdict};

const KV_CAPACITY: u32 = 24;
const POSITIONS: usize = 12;

/// The defect of a device.
#[derive(Clone, Copy)]
enum Wrong {
    Nothing,
    /// The same in every run.
    Always(Defect, Option<u16>),
    /// In every second run.
    Sometimes(Defect),
    /// The last bit of a logit, in every second run.
    Bits,
}

/// A device that is the reference VM.
struct Copy<'a> {
    graph: &'a Graph,
    weights: &'a dyn Weights,
    wrong: Wrong,
    program: Option<Arc<Verified<Program>>>,
    buffers: Vec<Vec<f32>>,
    runs: usize,
    looked: usize,
}

impl Device for Copy<'_> {
    fn describe(&self) -> DeviceInfo {
        let name = "copy".to_owned();
        DeviceInfo { name, bandwidth: Some(1e15), cache_bytes: 0, ..DeviceInfo::default() }
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        _: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.program = Some(program.clone());
        Ok(Handle(0))
    }

    fn run(&mut self, _: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        let program = self.program.clone().unwrap();
        let machine = Machine::new(&program, self.graph, self.weights).unwrap();
        self.runs += usize::from(first == 0);
        let odd = self.runs % 2 == 1;
        let mut machine = match self.wrong {
            Wrong::Always(defect, layer) => machine.with_defect(defect, layer),
            Wrong::Sometimes(defect) if odd => machine.with_defect(defect, None),
            Wrong::Sometimes(_) | Wrong::Nothing | Wrong::Bits => machine,
        };
        let ran = machine.run(tokens, Order::Waves).unwrap().finished().unwrap();
        let buffer = |id| machine.buffer(BufferId(id)).unwrap_or_default();
        self.buffers = (0..program.buffers.len() as u32).map(buffer).collect();
        let mut rows = ran.logits;
        if matches!(self.wrong, Wrong::Bits) && odd {
            rows[0][0] = rows[0][0].next_up();
        }
        let chosen = rows.iter().map(|row| reference_vm::argmax(row)).skip(first).collect();
        Ok(Ran { logits: rows.split_off(first), chosen, ..Ran::default() })
    }

    fn buffers(
        &mut self,
        _: Handle,
        which: &[ir::BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        self.looked += 1;
        Ok(Some(which.iter().map(|id| self.buffers[id.index()].clone()).collect()))
    }

    fn time(&mut self, _: [Contender<'_>; 2], plan: &Plan<'_>) -> Result<Samples, DeviceError> {
        let last = self.run(Handle(0), plan.tokens, plan.tokens.len() - 1)?.logits.remove(0);
        let last_logits = [last.clone(), last];
        let rounds = vec![[100.0; 4]; plan.rounds];
        let last_chosen = last_logits.each_ref().map(|logits| reference_vm::argmax(logits));
        Ok(Samples { rounds, last_logits, last_chosen, ..Samples::default() })
    }

    fn release(&mut self, _: &Arc<Verified<Program>>, _: &KernelConfig) {}
}

/// The verdict on the neutral schedule on such a device, and how often its buffers were read.
fn verdict(wrong: Wrong) -> (Verdict, usize) {
    let model = model::preset("toy-2l").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let mut device =
        Copy { graph, weights, wrong, program: None, buffers: Vec::new(), runs: 0, looked: 0 };
    let (config, target) = neutral(&model);
    let expected = Expected::new(graph, weights, KV_CAPACITY, 1, Some(POSITIONS)).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let mut gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected);
    let timing = Timing { rounds: 1, warmup: 0 };
    let (verdict, _) = evaluate(&mut gate, Some(&mut device), &config, timing, 1);
    (verdict, device.looked)
}

fn neutral(model: &Model) -> (ScheduleConfig, Target) {
    let target = Target::by_name("h200").unwrap();
    (ir::schedule::neutral_config(&model.graph, &target), target)
}

fn found(verdict: &Verdict) -> &FirstDivergence {
    verdict.first_divergence.as_ref().unwrap_or_else(|| panic!("nothing was found: {verdict:?}"))
}

#[test]
fn what_passes_costs_nothing_more() {
    let (verdict, looked) = verdict(Wrong::Nothing);
    assert!(verdict.correct, "{verdict:?}");
    assert_eq!((verdict.first_divergence, looked), (None, 0));
}

#[test]
fn the_first_wrong_task_of_a_device_is_named() {
    let layer = Some(1);
    for (defect, buffer) in [
        (Defect::Relu, "layers.1.h"),
        (Defect::TwiceResidual, "layers.1.x"),
        (Defect::LateQueries, "layers.1.partials"),
        (Defect::NoNormScale, "layers.1.qkv"),
    ] {
        let (verdict, _) = verdict(Wrong::Always(defect, layer));
        let at = found(&verdict);
        assert!(!verdict.correct);
        assert_eq!((at.class, &*at.by), (DivergenceClass::Wrong, "device"), "{at:?}");
        assert_eq!(at.buffer.as_deref(), Some(buffer), "{at:?}");
        assert_eq!(at.task.as_ref().unwrap().layer, 1, "{at:?}");
        assert!(at.ulp.unwrap() > 100 && at.words.unwrap() > 0 && at.got != at.want, "{at:?}");
        // It goes through JSON, as in a ledger.
        let text = serde_json::to_string(&verdict).unwrap();
        assert_eq!(serde_json::from_str::<Verdict>(&text).unwrap(), verdict);
    }
}

#[test]
fn repeats_that_differ_are_a_race() {
    let (wrong, _) = verdict(Wrong::Sometimes(Defect::Relu));
    let at = found(&wrong);
    assert_eq!(at.class, DivergenceClass::Race, "{at:?}");
    // The program is verified: no two of its tasks race, and the detail says so.
    assert!(at.unordered.is_empty() && at.detail.contains("in what runs it"), "{at:?}");
    // Runs that differ in bits within the tolerance are rejected too, and the first differing word is named.
    let (other, _) = verdict(Wrong::Bits);
    assert!(!other.correct && other.latency_us.is_none(), "{other:?}");
    let at = found(&other);
    let place = (at.class, at.position, at.buffer.as_deref(), at.index);
    assert_eq!(place, (DivergenceClass::Race, Some(0), Some("logits"), Some(0)), "{at:?}");
}

/// Weights of which a whole tensor is zero.
struct Zeroed<'a>(&'a dyn Weights, ir::TensorId, Vec<u8>);

impl Weights for Zeroed<'_> {
    fn bytes(&self, tensor: ir::TensorId) -> &[u8] {
        if tensor == self.1 { &self.2 } else { self.0.bytes(tensor) }
    }
}

#[test]
fn a_machine_and_a_graph_that_were_given_other_weights_name_no_task() {
    let model = model::preset("toy-2l").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let up = graph.layers[1].gated().expect("an MLP").up.weight;
    let zeroed = Zeroed(weights, up, vec![0; weights.bytes(up).len()]);
    let (config, target) = neutral(&model);
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    // The expected values use the right weights; the gate's reference VM and the examiner of its tasks use the zeroed ones.
    let expected = Expected::new(graph, weights, KV_CAPACITY, 1, None).unwrap();
    let mut gate = Gate::new(graph, &zeroed, &target, options, &KernelConfig::id, expected);
    let (refused, _) = evaluate(&mut gate, None, &config, Timing::default(), 1);
    let at = found(&refused);
    assert!(at.task.is_none() && at.detail.contains("no single task"), "{at:?}");
    // A reference VM with the zeroed weights and an examiner with the right ones: the product with those weights is named.
    let program = lower::lower(
        &ir::schedule::validate(config, graph, &target).unwrap(),
        graph,
        &target,
        options,
    )
    .unwrap();
    let examiner = Examiner::new(graph, weights).unwrap();
    let mut machine = Machine::new(&program, graph, &zeroed).unwrap();
    let at = gate.expected().diverges(&examiner, &mut machine, None).unwrap();
    let task = &program.workers[at.worker.index()].tasks[at.task as usize];
    let buffer = &program.buffers[task.writes[0].unwrap().index()];
    assert_eq!((task.layer, &*buffer.name), (1, "layers.1.h"), "{at:?}");
}

#[test]
fn what_was_overwritten_is_not_judged_and_counted() {
    let model = model::preset("toy-2l").unwrap();
    let (config, target) = neutral(&model);
    let valid = ir::schedule::validate(config, &model.graph, &target).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let program = lower::lower(&valid, &model.graph, &target, options).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let (_, fired) = machine.traced(3, Order::Waves).unwrap();
    let buffers: Vec<Vec<f32>> = (0..program.buffers.len() as u32)
        .map(|id| machine.buffer(BufferId(id)).unwrap_or_default())
        .collect();
    let (left, overwritten) = left_in(&program, &fired, &buffers, None);
    let writes = |all: &[Fired]| all.iter().map(|fired| fired.writes.len()).sum::<usize>();
    assert_eq!((left.len(), overwritten), (fired.len(), 0));
    // All but the logits, which are not in a buffer of the arena.
    let logits = fired.iter().filter(|fired| fired.writes.len() == 2).count();
    assert_eq!(writes(&left), writes(&fired) - logits);
    // The residual after the last layer shares the bytes of the first: the first one's values are overwritten.
    let mut shared = (*program).clone();
    let place = |name: &str| program.buffers.iter().position(|buffer| buffer.name == name).unwrap();
    shared.buffers[place("x.2")].offset = shared.buffers[place("x.0")].offset;
    let (left, overwritten) = left_in(&shared, &fired, &buffers, None);
    assert!(overwritten > 0);
    assert_eq!(writes(&left), writes(&fired) - logits - overwritten);
}
