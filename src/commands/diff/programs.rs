//! The difference of two programs. A task is identified by what it computes: its opcode, its layer and its parameters.
//! Tasks in both programs may still differ in the worker that runs them, in their buffers and in their waits; all other
//! tasks were added or removed.

use std::collections::BTreeMap;

use ir::BufferId;
use ir::program::{Program, Task};
use schemars::JsonSchema;
use serde::Serialize;

use crate::report;

/// Tasks of each opcode that are named; the rest are counted.
const EXAMPLES_MAX: u64 = 2;

/// How two programs differ.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProgramDiff {
    /// Sizes that differ: name to first and second.
    sizes: BTreeMap<&'static str, [u64; 2]>,
    /// All tasks.
    tasks: Counts,
    /// By opcode, those opcodes whose tasks differ.
    by_opcode: BTreeMap<&'static str, Counts>,
    /// Names of buffers that only the second has.
    buffers_added: Vec<String>,
    /// Names of buffers that only the first has.
    buffers_removed: Vec<String>,
    /// The first tasks of each opcode that differ, each in a line.
    examples: Vec<String>,
    /// Differing tasks that are not among the examples.
    more: u64,
    /// Examples of each opcode.
    #[serde(skip)]
    named: BTreeMap<&'static str, u64>,
}

/// Tasks of two programs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema, derive_more::AddAssign,
)]
pub(super) struct Counts {
    /// In the first.
    a: u64,
    /// In the second.
    b: u64,
    /// In both, equal in everything.
    same: u64,
    /// In both, on another worker.
    moved: u64,
    /// In both, with other buffers.
    buffers: u64,
    /// In both, with other waits or signals.
    sync: u64,
    /// In the second only.
    added: u64,
    /// In the first only.
    removed: u64,
}

/// What a task computes: opcode, layer, parameters.
type Work = (&'static str, u16, [u32; 16]);

/// Where a task runs and how it synchronizes. Every lowering numbers counters anew, so the number of waits and their counts are compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Form {
    worker: usize,
    reads: Vec<String>,
    writes: Vec<String>,
    waits: Vec<u32>,
    signals: bool,
}

/// The tasks of a program by what they compute, and the forms of each.
fn tasks(program: &Program) -> BTreeMap<Work, Vec<Form>> {
    let mut found: BTreeMap<Work, Vec<Form>> = BTreeMap::new();
    for (worker, queue) in program.workers.iter().enumerate() {
        for task in &queue.tasks {
            let work = (task.opcode.info().name, task.layer, task.params);
            found.entry(work).or_default().push(form(program, worker, task));
        }
    }
    for forms in found.values_mut() {
        forms.sort();
    }
    found
}

fn form(program: &Program, worker: usize, task: &Task) -> Form {
    let name = |id: &BufferId| match program.buffers.get(id.index()) {
        Some(buffer) => format!("{} ({})", buffer.name, buffer.kind.name()),
        None => id.to_string(),
    };
    Form {
        worker,
        reads: task.reads.iter().flatten().map(name).collect(),
        writes: task.writes.iter().flatten().map(name).collect(),
        waits: task.waits.iter().map(|wait| wait.count).collect(),
        signals: task.signal.is_some(),
    }
}

impl ProgramDiff {
    pub(super) fn of(a: &Program, b: &Program) -> Self {
        let (in_a, in_b) = (tasks(a), tasks(b));
        let works: std::collections::BTreeSet<&Work> = in_a.keys().chain(in_b.keys()).collect();
        let mut diff = Self {
            sizes: sizes(a, b),
            tasks: Counts::default(),
            by_opcode: BTreeMap::new(),
            buffers_added: only(b, a),
            buffers_removed: only(a, b),
            examples: Vec::new(),
            more: 0,
            named: BTreeMap::new(),
        };
        let none = Vec::new();
        for work in works {
            let pair = [in_a.get(work).unwrap_or(&none), in_b.get(work).unwrap_or(&none)];
            diff.compare(work, pair);
        }
        let all = std::mem::take(&mut diff.by_opcode);
        for counts in all.values() {
            diff.tasks += *counts;
        }
        let differs = |counts: &Counts| counts.same != counts.a || counts.same != counts.b;
        diff.by_opcode = all.into_iter().filter(|(_, counts)| differs(counts)).collect();
        diff
    }

    /// Compares the tasks that compute one thing: most often one in each program.
    fn compare(&mut self, work: &Work, [a, b]: [&Vec<Form>; 2]) {
        let mut counts = Counts { a: a.len() as u64, b: b.len() as u64, ..Counts::default() };
        // Equal ones first, so that a changed task is not paired with the equal of another task.
        let mut left: Vec<&Form> = b.iter().collect();
        let mut others = Vec::new();
        for form in a {
            match left.iter().position(|other| *other == form) {
                Some(place) => {
                    left.swap_remove(place);
                    counts.same += 1;
                }
                None => others.push(form),
            }
        }
        left.sort();
        let mut left = left.into_iter();
        for form in others {
            match left.next() {
                Some(other) => {
                    counts.moved += u64::from(form.worker != other.worker);
                    counts.buffers +=
                        u64::from((&form.reads, &form.writes) != (&other.reads, &other.writes));
                    counts.sync +=
                        u64::from((&form.waits, form.signals) != (&other.waits, other.signals));
                    self.example(work.0, || format!("{}: {}", said(work), changes(form, other)));
                }
                None => {
                    counts.removed += 1;
                    self.example(work.0, || {
                        format!("{}: removed from worker {}", said(work), form.worker)
                    });
                }
            }
        }
        for form in left {
            counts.added += 1;
            self.example(work.0, || format!("{}: added on worker {}", said(work), form.worker));
        }
        *self.by_opcode.entry(work.0).or_default() += counts;
    }

    fn example(&mut self, opcode: &'static str, line: impl FnOnce() -> String) {
        let named = self.named.entry(opcode).or_default();
        if *named < EXAMPLES_MAX {
            *named += 1;
            self.examples.push(line());
        } else {
            self.more += 1;
        }
    }

    pub(super) fn say(&self) {
        for (name, [a, b]) in &self.sizes {
            report::say(&format!("  {name}: {a} -> {b}"));
        }
        let line = |name: &str, c: &Counts| {
            format!(
                "  {name}: {} -> {} tasks; {} same, {} added, {} removed; of those in both {} on another worker, {} with other buffers, {} that wait or signal otherwise",
                c.a, c.b, c.same, c.added, c.removed, c.moved, c.buffers, c.sync
            )
        };
        report::say(&line("all", &self.tasks));
        for (opcode, counts) in &self.by_opcode {
            report::say(&line(opcode, counts));
        }
        for example in &self.examples {
            report::say(&format!("    {example}"));
        }
        if self.more > 0 {
            report::say(&format!("    and {} more", self.more));
        }
    }
}

fn said((opcode, layer, params): &Work) -> String {
    let used = params.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
    let words: Vec<String> = params[..used].iter().map(ToString::to_string).collect();
    format!("{opcode} of layer {layer} [{}]", words.join(" "))
}

fn changes(a: &Form, b: &Form) -> String {
    let mut found = Vec::new();
    if a.worker != b.worker {
        found.push(format!("worker {} -> {}", a.worker, b.worker));
    }
    for (what, a, b) in [("reads", &a.reads, &b.reads), ("writes", &a.writes, &b.writes)] {
        if a != b {
            found.push(format!("{what} {} -> {}", a.join(", "), b.join(", ")));
        }
    }
    if a.waits != b.waits {
        found.push(format!("waits for {:?} -> {:?} arrivals", a.waits, b.waits));
    }
    if a.signals != b.signals {
        found.push(if b.signals { "signals now" } else { "signals no more" }.to_owned());
    }
    found.join("; ")
}

fn sizes(a: &Program, b: &Program) -> BTreeMap<&'static str, [u64; 2]> {
    let facts = |program: &Program| {
        let p = &program.pipeline;
        [
            ("workers", program.workers.len() as u64),
            ("counters", u64::from(program.counters)),
            ("buffers", program.buffers.len() as u64),
            ("matrices", program.matrices.len() as u64),
            ("arena_bytes", program.arena_bytes),
            ("stream_bytes", program.stream_bytes()),
            ("kv_capacity", u64::from(program.kv_capacity)),
            ("ring.stage_units", u64::from(p.stage_units)),
            ("ring.stages", u64::from(p.stages)),
            ("ring.in_flight", u64::from(p.in_flight)),
            ("ring.in_flight_before_wait", u64::from(p.in_flight_before_wait)),
        ]
    };
    let pairs = facts(a).into_iter().zip(facts(b));
    pairs.filter(|(a, b)| a != b).map(|((name, a), (_, b))| (name, [a, b])).collect()
}

/// Buffers that the first has and the second has not.
fn only(a: &Program, b: &Program) -> Vec<String> {
    let has =
        |program: &Program, name: &str| program.buffers.iter().any(|buffer| buffer.name == name);
    let names = a.buffers.iter().map(|buffer| &buffer.name);
    names.filter(|name| !has(b, name)).cloned().collect()
}
