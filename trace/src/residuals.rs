//! Residuals: recorded steps against expected ones, task by task, and the causes of what differs.
//!
//! The expected steps are those of the cost model, or recorded before something changed. Each part of each task has a
//! residual: the median of the recorded steps less that of the expected ones. [`Finding`]s are groups of tasks (an op, a
//! worker, a layer, or several of these at once) of which one part takes longer by about the same time; one counts only
//! if it repeats from step to step. [`Residuals::causes`] splits the growth of the span between them by replay, so what
//! waits downstream of a cause is charged to it; the rows add up to the growth, which is asserted.

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
/// A difference counts if it is this many times its standard error.
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
    expected: Steps,
    recorded: Steps,
    /// Variance of a task's mean from run to run, by part.
    between: [f64; PARTS.len()],
}

impl Residuals {
    /// Compares steps of one program: those expected, in runs that were recorded at different times, and those recorded.
    /// The more runs, the better it is known how much a task differs from run to run. No list is empty.
    ///
    /// # Panics
    /// If a list is empty, or the causes do not add up to the growth of the span.
    #[must_use]
    pub fn new(expected: &[&[Timeline]], recorded: &[Timeline]) -> Self {
        let (before, after) = (middle_step(expected[0]), middle_step(recorded));
        let runs: Vec<Steps> = expected.iter().map(|run| Steps::new(run)).collect();
        let between = between_runs(&runs, before.tasks.len());
        let expected = Steps::together(runs);
        let mut residuals = Self {
            findings: Vec::new(),
            causes: Vec::new(),
            growth_ns: after.span() as i64 - before.span() as i64,
            expected,
            recorded: Steps::new(recorded),
            between,
        };
        residuals.find(before);
        residuals.causes = shares(before, after, &residuals.findings);
        let sum: i64 = residuals.causes.iter().map(|share| share.ns).sum();
        assert_eq!(sum, residuals.growth_ns, "the causes add up to the growth of the span");
        residuals
    }

    fn find(&mut self, timeline: &Timeline) {
        let mut left: Vec<Left> = PARTS.iter().map(|&cause| self.left(timeline, cause)).collect();
        while self.findings.len() < FINDINGS {
            let mut candidates: Vec<_> = left.iter().flat_map(|l| l.groups(timeline)).collect();
            candidates.sort_by(|a, b| b.explains.total_cmp(&a.explains));
            candidates.truncate(CANDIDATES);
            let found = candidates.iter().find_map(|c| self.judged(timeline, &left, c));
            let Some(finding) = found else { return };
            for of in left.iter_mut().filter(|left| left.cause == finding.cause) {
                for (task, ns) in timeline.tasks.iter().zip(&mut of.ns) {
                    if finding.group.holds(task) {
                        *ns -= finding.mean_ns;
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
        Left { cause, ns, weights }
    }

    /// A candidate as a finding, if it is long enough and repeats.
    fn judged(&self, timeline: &Timeline, left: &[Left], of: &Candidate) -> Option<Finding> {
        let residuals = left.iter().find(|left| left.cause == of.cause)?;
        let in_group = |&index: &usize| {
            of.group.holds(&timeline.tasks[index]) && residuals.weights[index] > 0.0
        };
        let tasks: Vec<usize> = (0..timeline.tasks.len()).filter(in_group).collect();
        let mean = tasks.iter().map(|&task| residuals.ns[task]).sum::<f64>() / tasks.len() as f64;
        let (expected, one) = self.expected.mean_of(&tasks, of.cause);
        let (_, other) = self.recorded.mean_of(&tasks, of.cause);
        let between =
            PARTS.iter().position(|&part| part == of.cause).map_or(0.0, |p| self.between[p]);
        let own = between.max(RESOLUTION_NS.powi(2)) / tasks.len() as f64;
        let error = one.hypot(other).hypot(own.sqrt());
        let counts =
            mean >= LEAST_NS.max(LEAST_SHARE * expected) && mean >= STANDARD_ERRORS * error;
        let (cause, group) = (of.cause, of.group);
        counts.then_some(Finding {
            cause,
            group,
            tasks: tasks.len(),
            mean_ns: mean,
            error_ns: error,
        })
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
    /// Whether a task is one of them.
    #[must_use]
    pub fn holds(&self, task: &crate::timeline::Task) -> bool {
        self.op.is_none_or(|op| op == task.name)
            && self.worker.is_none_or(|worker| worker == task.worker)
            && self.layer.is_none_or(|layer| layer == task.layer)
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
            text += &format!(" on worker {worker}");
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
            for ((task, ns), weight) in timeline.tasks.iter().zip(&self.ns).zip(&self.weights) {
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
        let mean = means.iter().sum::<f64>() / count;
        let squares = means.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
        (mean, if count > 1.0 { (squares / (count - 1.0) / count).sqrt() } else { 0.0 })
    }
}

/// How much a task's mean differs from run to run, by part: the mean square over all tasks. Zero for a single run.
fn between_runs(runs: &[Steps], tasks: usize) -> [f64; PARTS.len()] {
    let count = runs.len() as f64;
    PARTS.map(|cause| {
        let variance = |task: usize| {
            let means: Vec<f64> = runs.iter().map(|run| run.mean_of(&[task], cause).0).collect();
            let mean = means.iter().sum::<f64>() / count;
            means.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0)
        };
        let sum = if runs.len() > 1 { (0..tasks).map(variance).sum::<f64>() } else { 0.0 };
        sum / tasks.max(1) as f64
    })
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
    let everything = PARTS.map(|cause| (None, cause, Group::default()));
    let found = findings.iter().enumerate().map(|(i, f)| (Some(i), f.cause, f.group));
    for (finding, cause, group) in found.chain(everything) {
        for ((task, old), new) in before.tasks.iter().zip(&mut parts).zip(&new) {
            if group.holds(task) {
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
