//! Planted causes: a step that is slow for a known reason, to try what explains it.

use std::fmt;
use std::str::FromStr;

use abi::TaskRecord;
use ir::program::{Program, Verified};
use ir::{KernelConfig, Target};
use lower::{Delay, Disturbance, Predictor, Rates};

use crate::attribution::Cause;
use crate::predicted;
use crate::residuals::{Finding, Group};
use crate::timeline::{Clock, Task, Timeline, idle_tasks};

/// Mean noise of a task in nanoseconds: of its output, and of its hand-off.
const NOISE_NS: f64 = 25.0;
/// As on a card, some tasks take one of two times from step to step: this share of them, and the distance.
const TWO_TIMES_SHARE: f64 = 0.1;
const TWO_TIMES_NS: f64 = 600.0;

/// A planted cause: a part of some tasks takes longer, or fewer stages may be in flight.
#[derive(Clone, Debug, PartialEq)]
pub enum Plant {
    /// Tasks take longer.
    Tasks {
        /// Products, output or hand-off.
        cause: Cause,
        /// Phase, such as `down`; `None` for all.
        op: Option<String>,
        /// Worker.
        worker: Option<u32>,
        /// Layer.
        layer: Option<u16>,
        /// Nanoseconds for each task.
        ns: f64,
    },
    /// Stages in flight at most.
    InFlight(u32),
    /// Nothing is planted, and nothing should be found.
    Nothing,
}

const CAUSES: [Cause; 3] = [Cause::Products, Cause::Output, Cause::HandOff];

impl Plant {
    /// A plant for a seed: an op, an op of a worker, a layer, and then a hand-off or a cap on the stages in flight; without
    /// a cap, as on a device, a task or a worker.
    #[must_use]
    pub fn draw(seed: u64, timeline: &Timeline, in_flight: Option<u32>) -> Self {
        let number = |stream: u64, below: usize| {
            (unit(seed.wrapping_mul(7) + stream, 0, 0, 0) * below as f64) as usize
        };
        // Ops without products or input are short and alone: nothing is behind them to be named.
        let of_interest = |task: &&Task| task.bytes > 0 && task.producer.is_some();
        let work: Vec<&Task> = timeline.tasks.iter().filter(of_interest).collect();
        let task = work[number(1, work.len())];
        let op = Some(timeline.names[task.name].clone());
        let ns = 1000.0 + 250.0 * number(2, 9) as f64;
        let cause = CAUSES[number(3, 2)];
        let (worker, layer) = (Some(task.worker), Some(task.layer));
        match (seed % 5, in_flight) {
            (0, _) => Self::Tasks { cause, op, worker: None, layer: None, ns },
            (1, _) => Self::Tasks { cause, op, worker, layer: None, ns },
            (2, _) => Self::Tasks { cause, op: None, worker: None, layer, ns },
            (3, None) => Self::Tasks { cause, op, worker, layer, ns },
            (_, None) => Self::Tasks { cause, op: None, worker, layer: None, ns },
            (3, Some(_)) => {
                Self::Tasks { cause: Cause::HandOff, op, worker: None, layer: None, ns }
            }
            (_, Some(cap)) => Self::InFlight((cap / 3).max(1)),
        }
    }

    /// Whether the findings name it first.
    #[must_use]
    pub fn is_named(&self, findings: &[Finding], timeline: &Timeline) -> bool {
        let Some(first) = findings.first() else { return *self == Self::Nothing };
        match self {
            Self::Nothing => false,
            Self::InFlight(_) => first.cause == Cause::Starved,
            Self::Tasks { cause, op, worker, layer, .. } => {
                let op = op.as_deref();
                let op = op.map(|op| timeline.names.iter().position(|name| name == op));
                let group = |op| Group { op, worker: *worker, layer: *layer };
                // The same tasks may have several names: those of the last layer with products are those of one op.
                let has = |task: &&Task| *cause != Cause::Products || task.bytes > 0;
                let same = |group: Group| {
                    let mut tasks = timeline.tasks.iter().filter(has);
                    tasks.all(|task| group.holds(task) == first.group.holds(task))
                };
                *cause == first.cause
                    && op.map_or_else(|| same(group(None)), |op| op.is_some() && same(group(op)))
            }
        }
    }

    /// Extra nanoseconds of a task.
    fn extra(&self, program: &Program, worker: usize, place: usize) -> Option<(Cause, f64)> {
        let Self::Tasks { cause, op, worker: of_worker, layer, ns } = self else { return None };
        let task = &program.workers[worker].tasks[place];
        let holds = op.as_deref().is_none_or(|op| op == program.phase_name(task))
            && of_worker.is_none_or(|of| of as usize == worker)
            && layer.is_none_or(|layer| layer == task.layer);
        holds.then_some((*cause, *ns))
    }

    /// What to write into the records of the traced kernel so that it spins: cycles before and after the mark of the
    /// products, for each task in the program's order.
    ///
    /// # Errors
    /// If the device cannot be made to do it.
    pub fn delays(&self, program: &Program, ns_per_cycle: f64) -> Result<Vec<[u32; 2]>, String> {
        let cycles = |ns: f64| (ns / ns_per_cycle).round() as u32;
        if matches!(self, Self::InFlight(_) | Self::Tasks { cause: Cause::HandOff, .. }) {
            return Err(format!("{self}: on a device only products and output can be delayed"));
        }
        let mut delays = Vec::with_capacity(program.task_len());
        for (worker, queue) in program.workers.iter().enumerate() {
            delays.extend((0..queue.tasks.len()).map(|place| {
                match self.extra(program, worker, place) {
                    Some((Cause::Products, ns)) => [cycles(ns), 0],
                    Some((_, ns)) => [0, cycles(ns)],
                    None => [0, 0],
                }
            }));
        }
        Ok(delays)
    }
}

/// Simulated steps with noise, and with a planted cause.
#[must_use]
pub fn simulated(
    program: &Verified<Program>,
    kernel: &KernelConfig,
    (target, position): (&Target, u32),
    plant: &Plant,
    (seed, steps): (u64, u32),
) -> Vec<Timeline> {
    let predictor = Predictor::new(program, kernel, target, position);
    let bytes = predictor.task_bytes();
    let idle = idle_tasks(program, &bytes);
    let in_flight = match plant {
        Plant::InFlight(stages) => Some(*stages),
        Plant::Tasks { .. } | Plant::Nothing => None,
    };
    let mut all: Vec<Timeline> = Vec::new();
    for step in 0..steps {
        let noise = |worker, place, part| {
            -NOISE_NS / 1000.0 * (1.0 - unit(seed, u64::from(step), worker, place * 2 + part)).ln()
        };
        let tasks = |worker: usize, place: usize| {
            let (at, in_step) = (place as u64, u64::from(step) + 1);
            let two = unit(0, 0, worker as u64, at) < TWO_TIMES_SHARE;
            let late = two && unit(!seed, in_step, worker as u64, at) < 0.5;
            let mut delay = Delay {
                products: if late { TWO_TIMES_NS / 1000.0 } else { 0.0 },
                output: noise(worker as u64, place as u64, 0),
                hand_off: noise(worker as u64, place as u64, 1),
            };
            match plant.extra(program, worker, place).filter(|_| !idle[worker][place]) {
                Some((Cause::Products, ns)) => delay.products += ns / 1000.0,
                Some((Cause::HandOff, ns)) => delay.hand_off += ns / 1000.0,
                Some((_, ns)) => delay.output += ns / 1000.0,
                None => {}
            }
            delay
        };
        let step = predictor.disturbed(Rates::shipped(), &Disturbance { tasks: &tasks, in_flight });
        let records: Vec<TaskRecord> = predicted::records(program, &step);
        let span = Some([0, (step.us * 1000.0).round() as u64]);
        let clock = Clock { ns_per_cycle: 1.0, span, per_device: false, polls_after_ready: false };
        let timeline = match all.first() {
            Some(first) => first.again(program, &records, &bytes, target.total_bandwidth(), clock),
            None => Timeline::new(program, &records, &bytes, target.total_bandwidth(), clock),
        };
        all.push(timeline);
    }
    all
}

/// A number in 0 to 1 that depends on its arguments only (the finaliser of SplitMix64).
fn unit(seed: u64, step: u64, worker: u64, place: u64) -> f64 {
    let mut bits = seed;
    for word in [step, worker, place] {
        bits = (bits ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
    }
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InFlight(stages) => write!(f, "in_flight={stages}"),
            Self::Nothing => f.write_str("nothing"),
            Self::Tasks { cause, op, worker, layer, ns } => {
                write!(f, "{}.{}", op.as_deref().unwrap_or("*"), cause.name())?;
                worker.map_or(Ok(()), |worker| write!(f, "@w{worker}"))?;
                layer.map_or(Ok(()), |layer| write!(f, "@l{layer}"))?;
                write!(f, "=+{}us", ns / 1000.0)
            }
        }
    }
}

impl FromStr for Plant {
    type Err = String;

    /// `OP.CAUSE@wN@lN=+TIMEus` (`*` for all ops, `.output` if no cause is given) or `in_flight=STAGES`.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no planted cause: write in_flight=STAGES or OP[.CAUSE][@wWORKER][@lLAYER]=+TIMEus, with an op or *, and products, output or hand_off"
            )
        };
        if text == "nothing" {
            return Ok(Self::Nothing);
        }
        let (what, amount) = text.split_once('=').ok_or_else(wrong)?;
        if what == "in_flight" {
            return amount.parse().ok().filter(|&n| n > 0).map(Self::InFlight).ok_or_else(wrong);
        }
        let us = amount.trim_start_matches('+').strip_suffix("us").and_then(|us| us.parse().ok());
        let us: f64 = us.filter(|us| (0.0..1e6).contains(us)).ok_or_else(wrong)?;
        let mut keys = what.split('@');
        let (op, cause) =
            keys.next().map(|op| op.split_once('.').unwrap_or((op, "output"))).ok_or_else(wrong)?;
        let cause = CAUSES.into_iter().find(|c| c.name() == cause).ok_or_else(wrong)?;
        let (mut worker, mut layer) = (None, None);
        for key in keys {
            match key.split_at_checked(1).ok_or_else(wrong)? {
                ("w", number) => worker = Some(number.parse().map_err(|_| wrong())?),
                ("l", number) => layer = Some(number.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            }
        }
        let op = (op != "*").then(|| op.to_owned());
        Ok(Self::Tasks { cause, op, worker, layer, ns: us * 1000.0 })
    }
}
