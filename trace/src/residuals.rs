//! Residuals: recorded steps against expected ones, task by task, and the causes of what differs.
//!
//! The expected steps are those of the cost model, or recorded before something changed. Each part of each task has a
//! residual: the median of the recorded steps less that of the expected ones. [`Finding`]s are groups of tasks (an op, a
//! worker, a layer, or several of these at once) of which one part takes longer by about the same time; one counts only
//! if it repeats from step to step. [`Residuals::causes`] splits the growth of the span between them by replay, so what
//! waits downstream of a cause is charged to it; the rows add up to the growth, which is asserted.

use std::cmp::Reverse;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::attribution::Cause;
use crate::parts::{PARTS, Parts, recorded};
use crate::replay;
use crate::timeline::Timeline;

/// Findings at most.
const FINDINGS: usize = 8;
/// Groups that are examined for each of them, from the one that explains most.
const CANDIDATES: usize = 64;
/// A finding takes longer by at least this many nanoseconds a task, and by this share of what is expected.
const LEAST_NS: f64 = 60.0;
const LEAST_SHARE: f64 = 0.05;
/// A difference counts if it is this many times its standard error, and one time more for each property beyond the
/// first that the group is picked out by: there are some hundred ops, workers and layers, and ten thousands of tasks.
const STANDARD_ERRORS: f64 = 6.0;
/// No part is known better than this: the resolution of the device's clocks.
const RESOLUTION_NS: f64 = 20.0;

/// The tasks that a finding is about: those with each of the given properties. None given: all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Group {
    /// Index in the timeline's names.
    pub op: Option<usize>,
    /// A worker.
    pub worker: Option<u32>,
    /// A layer.
    pub layer: Option<u16>,
}

/// A part of a group's tasks that takes longer than expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finding {
    /// The part.
    pub cause: Cause,
    /// The tasks.
    pub group: Group,
    /// Number of tasks.
    pub tasks: usize,
    /// Mean nanoseconds beyond those expected, and their standard error over the steps.
    pub mean_ns: f64,
    /// The standard error.
    pub error_ns: f64,
}

/// A row of the growth of the span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Index of a finding; `None` for what is left of a cause.
    pub finding: Option<usize>,
    /// The cause.
    pub cause: Cause,
    /// Nanoseconds of the span's growth.
    pub ns: i64,
}

/// Recorded steps against expected ones.
#[derive(Clone, Debug)]
pub struct Residuals {
    /// From the one that explains most.
    pub findings: Vec<Finding>,
    /// Findings first, then what is left of each cause. They add up to `growth_ns`.
    pub causes: Vec<Share>,
    /// Median span of the recorded steps less that of the expected ones.
    pub growth_ns: i64,
    expected: Arc<Steps>,
    recorded: Steps,
}

/// What steps are compared with: runs of one program that were recorded at different times. The more runs, the better it is
/// known how much tasks differ from run to run.
#[derive(Clone, Debug)]
pub struct Expected {
    middle: Timeline,
    steps: Arc<Steps>,
    /// Mean of each part of each task, by run.
    runs: Vec<[Vec<f64>; PARTS.len()]>,
    /// Variance of a group's mean from run to run, by the keys of the group and part: the mean over all such groups.
    between: [[f64; PARTS.len()]; 8],
}

impl Expected {
    /// Prepares the runs.
    ///
    /// # Panics
    /// If there is none, or one has no step.
    #[must_use]
    pub fn new(runs: &[&[Timeline]]) -> Self {
        let middle = middle_step(runs[0]).clone();
        let steps: Vec<Steps> = runs.iter().map(|run| Steps::new(run)).collect();
        let means = |run: &Steps| {
            PARTS.map(|part| (0..middle.tasks.len()).map(|t| run.mean_of(&[t], part).0).collect())
        };
        let runs: Vec<[Vec<f64>; PARTS.len()]> = steps.iter().map(means).collect();
        let between = std::array::from_fn(|keys| {
            std::array::from_fn(|part| between_runs(&runs, &middle, keys as u32, part))
        });
        Self { middle, steps: Arc::new(Steps::together(steps)), runs, between }
    }

    /// Variance of the mean of a part of these tasks from run to run: theirs or that of other groups of the same keys,
    /// whichever is greater.
    fn between(&self, group: &Group, tasks: &[usize], part: usize) -> f64 {
        let mean = |run: &[Vec<f64>; PARTS.len()]| {
            tasks.iter().map(|&task| run[part][task]).sum::<f64>() / tasks.len() as f64
        };
        variance(&self.runs.iter().map(mean).collect::<Vec<_>>())
            .max(self.between[group.keys() as usize][part])
    }
}

impl Residuals {
    /// Compares recorded steps with those expected of the same program.
    ///
    /// # Panics
    /// If there is no step, or the causes do not add up to the growth of the span.
    #[must_use]
    pub fn new(expected: &Expected, recorded: &[Timeline]) -> Self {
        let (before, after) = (&expected.middle, middle_step(recorded));
        let mut residuals = Self {
            findings: Vec::new(),
            causes: Vec::new(),
            growth_ns: after.span() as i64 - before.span() as i64,
            expected: Arc::clone(&expected.steps),
            recorded: Steps::new(recorded),
        };
        residuals.find(expected);
        residuals.rank(before);
        residuals.causes = shares(before, after, &residuals.findings);
        let sum: i64 = residuals.causes.iter().map(|share| share.ns).sum();
        assert_eq!(sum, residuals.growth_ns, "the causes add up to the growth of the span");
        residuals
    }

    /// Puts those findings first that make the step longest on their own and are large in each task. What a cause drags
    /// along may be in more tasks than the cause, but is off the critical path or smaller.
    fn rank(&mut self, before: &Timeline) {
        let longer = |finding: &Finding| {
            let mut parts = recorded(before);
            let of = before.tasks.iter().zip(&mut parts).filter(|(t, _)| finding.group.holds(t));
            of.for_each(|(_, parts)| *parts.get_mut(finding.cause) += finding.mean_ns);
            replay::run(before, &parts).span - before.span() as f64
        };
        self.findings.sort_by_cached_key(|finding| {
            Reverse((longer(finding).max(1.0) * finding.mean_ns).round() as i64)
        });
    }

    fn find(&mut self, expected: &Expected) {
        let timeline = &expected.middle;
        let mut left: Vec<Left> = PARTS.iter().map(|&cause| self.left(timeline, cause)).collect();
        while self.findings.len() < FINDINGS {
            let mut candidates: Vec<_> = left.iter().flat_map(|l| l.groups(timeline)).collect();
            candidates.sort_by(|a, b| b.explains.total_cmp(&a.explains));
            candidates.truncate(CANDIDATES);
            let found = candidates.iter().find_map(|c| self.judged(expected, &left, c));
            let Some(finding) = found else { return };
            for of in left.iter_mut().filter(|left| left.cause == finding.cause) {
                let Left { ns, explained, .. } = of;
                for (task, (ns, explained)) in
                    timeline.tasks.iter().zip(ns.iter_mut().zip(explained))
                {
                    if finding.group.holds(task) {
                        *ns -= finding.mean_ns;
                        *explained += finding.mean_ns;
                    }
                }
            }
            self.findings.push(finding);
        }
    }

    /// The residuals of a part, with the weights that noise leaves them.
    fn left(&self, timeline: &Timeline, cause: Cause) -> Left {
        let noise = |steps: &Steps| steps.noise(timeline, cause);
        let (expected, recorded) = (noise(&self.expected), noise(&self.recorded));
        let of = |(index, task): (usize, &crate::timeline::Task)| {
            let median = |steps: &Steps| steps.median(index, cause);
            let both = Option::zip(median(&self.expected), median(&self.recorded));
            let variance = expected[task.name] + recorded[task.name] + RESOLUTION_NS.powi(2);
            both.map_or((0.0, 0.0), |(expected, recorded)| (recorded - expected, 1.0 / variance))
        };
        let (ns, weights) = timeline.tasks.iter().enumerate().map(of).unzip();
        Left { cause, ns, explained: vec![0.0; timeline.tasks.len()], weights }
    }

    /// A candidate as a finding, if it is long enough and repeats: both by the tasks' medians, which single steps cannot
    /// move, and by their means, which do not jump where a task takes one of two times.
    fn judged(&self, runs: &Expected, left: &[Left], of: &Candidate) -> Option<Finding> {
        let (cause, group) = (of.cause, of.group);
        let residuals = left.iter().find(|left| left.cause == cause)?;
        let part = PARTS.iter().position(|&part| part == cause)?;
        let in_group = |&index: &usize| {
            group.holds(&runs.middle.tasks[index]) && residuals.weights[index] > 0.0
        };
        let tasks: Vec<usize> = (0..runs.middle.tasks.len()).filter(in_group).collect();
        let count = tasks.len() as f64;
        let mean = |values: &[f64]| tasks.iter().map(|&task| values[task]).sum::<f64>() / count;
        let (expected, one) = self.expected.mean_of(&tasks, cause);
        let (recorded, other) = self.recorded.mean_of(&tasks, cause);
        // Few steps may all take the same of two times, and then seem to vary less than they do.
        let steps = [&self.expected, &self.recorded].map(|steps| steps.steps.len() as f64);
        let spread = (one * one * steps[0]).max(other * other * steps[1]);
        let by_means = recorded - expected - mean(&residuals.explained);
        let mean_ns = mean(&residuals.ns).min(by_means);
        let between = runs.between(&group, &tasks, part).max(RESOLUTION_NS.powi(2) / count);
        let error_ns = (spread / steps[0] + spread / steps[1] + between).sqrt();
        let counts = mean_ns >= LEAST_NS.max(LEAST_SHARE * expected)
            && mean_ns >= (STANDARD_ERRORS + group.picked()) * error_ns;
        counts.then_some(Finding { cause, group, tasks: tasks.len(), mean_ns, error_ns })
    }

    /// The document: findings, causes, and the residuals of each part by op, layer and worker.
    #[must_use]
    pub fn document(&self, timeline: &Timeline) -> Value {
        let by = |key: &dyn Fn(&crate::timeline::Task) -> Value| self.rows(timeline, key);
        json!({
            "growth_ns": self.growth_ns,
            "expected": {"steps": self.expected.steps.len(), "span_ns": self.expected.span},
            "recorded": {"steps": self.recorded.steps.len(), "span_ns": self.recorded.span},
            "findings": self.findings.iter().map(|f| f.document(timeline)).collect::<Vec<_>>(),
            "causes": self.causes.iter().map(|share| json!({
                "cause": share.cause.name(), "finding": share.finding, "ns": share.ns,
            })).collect::<Vec<_>>(),
            "by_op": by(&|task| json!({"op": timeline.names[task.name]})),
            "by_layer": by(&|task| json!({"layer": task.layer})),
            "by_worker": by(&|task| json!({"worker": task.worker})),
        })
    }

    /// For each key, mean nanoseconds a task of each part: expected and recorded.
    fn rows(&self, timeline: &Timeline, key: &dyn Fn(&crate::timeline::Task) -> Value) -> Value {
        let mut groups: Vec<(Value, Vec<usize>)> = Vec::new();
        let mut places = FxHashMap::default();
        for (index, task) in timeline.tasks.iter().enumerate() {
            let key = key(task);
            let place = *places.entry(key.to_string()).or_insert_with(|| {
                groups.push((key, Vec::new()));
                groups.len() - 1
            });
            groups[place].1.push(index);
        }
        let row = |(mut key, tasks): (Value, Vec<usize>)| {
            key["tasks"] = tasks.len().into();
            for cause in PARTS {
                let (expected, _) = self.expected.mean_of(&tasks, cause);
                let (recorded, error) = self.recorded.mean_of(&tasks, cause);
                key[cause.name()] =
                    json!({"expected_ns": expected, "recorded_ns": recorded, "error_ns": error});
            }
            key
        };
        groups.into_iter().map(row).collect()
    }
}

impl Group {
    /// Whether a task is one of them. Idle tasks are in no group: what slows a phase does not slow them.
    #[must_use]
    pub fn holds(&self, task: &crate::timeline::Task) -> bool {
        !task.idle
            && self.op.is_none_or(|op| op == task.name)
            && self.worker.is_none_or(|worker| worker == task.worker)
            && self.layer.is_none_or(|layer| layer == task.layer)
    }

    /// Properties beyond the first.
    fn picked(&self) -> f64 {
        f64::from(self.keys().count_ones().saturating_sub(1))
    }

    /// Which properties are given, as bits.
    fn keys(&self) -> u32 {
        let bit = |given: bool, place: u32| u32::from(given) << place;
        bit(self.op.is_some(), 0) | bit(self.worker.is_some(), 1) | bit(self.layer.is_some(), 2)
    }

    /// The group of a task with the properties that are bits of `keys`.
    fn of(task: &crate::timeline::Task, keys: u32) -> Self {
        Self {
            op: (keys & 1 > 0).then_some(task.name),
            worker: (keys & 2 > 0).then_some(task.worker),
            layer: (keys & 4 > 0).then_some(task.layer),
        }
    }
}

impl Finding {
    /// It in words.
    #[must_use]
    pub fn say(&self, timeline: &Timeline) -> String {
        let Group { op, worker, layer } = self.group;
        let mut text =
            format!("{} of {}", self.cause.name(), op.map_or("all ops", |op| &timeline.names[op]));
        if let Some(worker) = worker {
            text += &format!(" on {}", timeline.worker_name(worker as usize));
        }
        if let Some(layer) = layer {
            text += &format!(" in layer {layer}");
        }
        format!(
            "{text}: {:+.2} us (+-{:.2}) in each of {} tasks",
            self.mean_ns / 1e3,
            self.error_ns / 1e3,
            self.tasks
        )
    }

    fn document(&self, timeline: &Timeline) -> Value {
        json!({
            "cause": self.cause.name(), "op": self.group.op.map(|op| &timeline.names[op]),
            "worker": self.group.worker, "layer": self.group.layer, "tasks": self.tasks,
            "mean_ns": self.mean_ns, "error_ns": self.error_ns,
        })
    }
}

/// What the findings so far leave of a part of each task.
struct Left {
    cause: Cause,
    ns: Vec<f64>,
    /// What the findings took.
    explained: Vec<f64>,
    /// Inverse variances; zero where a part is not known.
    weights: Vec<f64>,
}

struct Candidate {
    cause: Cause,
    group: Group,
    /// By how much the sum of squares falls, in units of its variance.
    explains: f64,
}

impl Left {
    /// Groups that take longer than expected. Of groups of the same tasks, that with the fewest keys comes first.
    fn groups(&self, timeline: &Timeline) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for keys in [0, 1, 2, 4, 3, 5, 6, 7] {
            let mut sums = FxHashMap::<Group, [f64; 2]>::default();
            let all = timeline.tasks.iter().zip(&self.ns).zip(&self.weights);
            for ((task, ns), weight) in all.filter(|((task, _), _)| !task.idle) {
                let [sum, all] = sums.entry(Group::of(task, keys)).or_default();
                *sum += ns * weight;
                *all += weight;
            }
            for (group, [sum, all]) in sums {
                let longer = all > 0.0 && sum / all >= LEAST_NS;
                if longer {
                    let explains = sum * sum / all / (1.0 + f64::from(keys.count_ones()) * 1e-6);
                    candidates.push(Candidate { cause: self.cause, group, explains });
                }
            }
        }
        candidates
    }
}

/// Parts of the tasks in several steps.
#[derive(Clone, Debug)]
struct Steps {
    /// For each step, the parts of each task, and whether its hand-off was recorded (else its look was).
    steps: Vec<(Vec<Parts>, Vec<bool>)>,
    /// Median span.
    span: u64,
}

impl Steps {
    fn new(timelines: &[Timeline]) -> Self {
        let of = |timeline: &Timeline| {
            let waited = (0..timeline.tasks.len()).map(|task| timeline.hand_off(task).is_some());
            (recorded(timeline), waited.collect())
        };
        Self { steps: timelines.iter().map(of).collect(), span: middle_step(timelines).span() }
    }

    /// The steps of several runs as one list; the span is the first run's.
    fn together(mut runs: Vec<Self>) -> Self {
        let mut all = runs.remove(0);
        all.steps.extend(runs.into_iter().flat_map(|run| run.steps));
        all
    }

    /// A part of a task in the steps in which it was recorded.
    fn values(&self, task: usize, cause: Cause) -> impl Iterator<Item = f64> {
        let known = move |waited: bool| {
            (cause != Cause::HandOff || waited) && (cause != Cause::Look || !waited)
        };
        self.steps.iter().filter(move |step| known(step.1[task])).map(move |s| s.0[task].get(cause))
    }

    /// Its median, if it was recorded in most steps.
    fn median(&self, task: usize, cause: Cause) -> Option<f64> {
        let mut values: Vec<f64> = self.values(task, cause).collect();
        (values.len() * 2 > self.steps.len()).then(|| median(&mut values))
    }

    /// Variance of the median of a part of a task, by op: from the median distance of single steps.
    fn noise(&self, timeline: &Timeline, cause: Cause) -> Vec<f64> {
        let mut distances: Vec<Vec<f64>> = vec![Vec::new(); timeline.names.len()];
        for (index, task) in timeline.tasks.iter().enumerate() {
            if let Some(middle) = self.median(index, cause) {
                distances[task.name].extend(self.values(index, cause).map(|v| (v - middle).abs()));
            }
        }
        let steps = self.steps.len() as f64;
        let variance = |of: &mut Vec<f64>| (1.4826 * median(of)).powi(2) * 1.57 / steps;
        distances.iter_mut().map(variance).collect()
    }

    /// Mean of a part over tasks, and its standard error over the steps.
    fn mean_of(&self, tasks: &[usize], cause: Cause) -> (f64, f64) {
        let of = |(parts, _): &(Vec<Parts>, Vec<bool>)| {
            tasks.iter().map(|&task| parts[task].get(cause)).sum::<f64>() / tasks.len() as f64
        };
        let means: Vec<f64> = self.steps.iter().map(of).collect();
        let count = means.len() as f64;
        (means.iter().sum::<f64>() / count, (variance(&means) / count).sqrt())
    }
}

/// Variance of the mean of a part of a group from run to run: the mean over all groups with these keys.
fn between_runs(
    runs: &[[Vec<f64>; PARTS.len()]],
    timeline: &Timeline,
    keys: u32,
    part: usize,
) -> f64 {
    let mut groups = FxHashMap::<Group, (Vec<f64>, f64)>::default();
    for (index, task) in timeline.tasks.iter().enumerate().filter(|(_, task)| !task.idle) {
        let empty = || (vec![0.0; runs.len()], 0.0);
        let (sums, count) = groups.entry(Group::of(task, keys)).or_insert_with(empty);
        sums.iter_mut().zip(runs).for_each(|(sum, run)| *sum += run[part][index]);
        *count += 1.0;
    }
    let all: f64 = groups.values().map(|(sums, count)| variance(sums) / (count * count)).sum();
    all / groups.len().max(1) as f64
}

/// The variance of a sample; zero for less than two values.
fn variance(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    if values.len() > 1 { squares / (count - 1.0) } else { 0.0 }
}

/// The median, and zero of nothing.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The step of the median span.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn middle_step(timelines: &[Timeline]) -> &Timeline {
    let mut order: Vec<&Timeline> = timelines.iter().collect();
    order.sort_by_key(|timeline| timeline.span());
    order[order.len() / 2]
}

/// The growth of the span between findings and causes: one after the other takes the parts of the second step.
fn shares(before: &Timeline, after: &Timeline, findings: &[Finding]) -> Vec<Share> {
    let mut parts = recorded(before);
    let new = recorded(after);
    let mut span = before.span() as i64;
    let mut rows = Vec::new();
    // What is left of a cause is that of all tasks, idle ones too, which are in no group.
    let everything = PARTS.map(|cause| (None, cause, None));
    let found = findings.iter().enumerate().map(|(i, f)| (Some(i), f.cause, Some(f.group)));
    for (finding, cause, group) in found.chain(everything) {
        for ((task, old), new) in before.tasks.iter().zip(&mut parts).zip(&new) {
            if group.is_none_or(|group| group.holds(task)) {
                *old.get_mut(cause) = new.get(cause);
            }
        }
        let now = replay::run(before, &parts).span.round() as i64;
        rows.push(Share { finding, cause, ns: now - span });
        span = now;
    }
    let boundary = |timeline: &Timeline| {
        let last = timeline.tasks.iter().map(|task| task.end).max().unwrap_or(timeline.start);
        (timeline.end - last) as i64
    };
    let ns = boundary(after) - boundary(before);
    rows.push(Share { finding: None, cause: Cause::StepBoundary, ns });
    rows
}
