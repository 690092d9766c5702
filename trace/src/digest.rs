//! A digest of a step for agents, in at most [`BYTES_MAX`] bytes: where the time went, by op and by layer, the longest
//! waits with their producers, and where workers were idle.

use std::collections::HashMap;
use std::fmt::Write;

use crate::attribution::Path;
use crate::timeline::{Sums, Task, Timeline};

/// A length that fits a small context window.
pub const BYTES_MAX: usize = 6 * 1024;

/// Rows of each table.
const CAUSES: usize = 10;
const OPS: usize = 12;
const LAYERS: usize = 6;
const PAIRS: usize = 8;
const WAITS: usize = 10;
const WORKERS: usize = 5;
/// Longer names are cut, and longer titles, which hold the path of a schedule.
const NAME: usize = 16;
const TITLE: usize = 200;

/// Writes the digest. `title` is a line.
pub fn write(timeline: &Timeline, title: &str) -> String {
    let mut out = format!("# {}\n", title.chars().take(TITLE).collect::<String>());
    let total = timeline.total();
    whole(timeline, &total, &mut out);
    causes(timeline, &mut out);
    ops(timeline, &total, &mut out);
    layers(timeline, &mut out);
    waits(timeline, &mut out);
    bubbles(timeline, &total, &mut out);
    assert!(out.len() <= BYTES_MAX, "{} bytes of digest", out.len());
    out
}

/// The sum over all workers in nanoseconds, as µs of an average worker.
fn mean(timeline: &Timeline, ns: i64) -> f64 {
    ns as f64 / 1000.0 / timeline.workers.len().max(1) as f64
}

fn cut(name: &str) -> String {
    name.chars().take(NAME).collect()
}

// Writing to a string does not fail.
macro_rules! row {
    ($out:expr, $($format:tt)+) => {
        let _ = writeln!($out, $($format)+);
    };
}

fn whole(timeline: &Timeline, total: &Sums, out: &mut String) {
    let us = |ns| mean(timeline, ns);
    row!(
        out,
        "span {:.1} us x {} workers, {} tasks; us of an average worker from here on",
        timeline.span() as f64 / 1000.0,
        timeline.workers.len(),
        total.tasks
    );
    row!(
        out,
        "bound {:.1} + excess {:.1} + waiting {:.1} + bubble {:.1} = {:.1}",
        us(total.bound),
        us(total.excess),
        us(total.waiting),
        us(total.bubbles()),
        us(total.sum())
    );
    out.push_str("bound: the step's bytes at the full bandwidth. excess: at work beyond that (below zero: bytes arrived while waiting). waiting: for what others hand over. bubble: no task.\n");
}

/// The critical path by cause and op. The rows, with that of the others, add up to the span.
fn causes(timeline: &Timeline, out: &mut String) {
    let rows = Path::new(timeline).table(timeline);
    let us = |ns: u64| ns as f64 / 1000.0;
    let share = |ns: u64| 100.0 * ns as f64 / timeline.span().max(1) as f64;
    out.push_str("\n## critical path\ncause\top\tus\t% of span\n");
    for &(cause, op, ns) in rows.iter().take(CAUSES) {
        let name = cut(&timeline.names[op]);
        row!(out, "{}\t{name}\t{:.1}\t{:.1}", cause.name(), us(ns), share(ns));
    }
    let rest: u64 = rows.iter().skip(CAUSES).map(|row| row.2).sum();
    row!(out, "others\t\t{:.1}\t{:.1}", us(rest), share(rest));
}

fn table_row(timeline: &Timeline, name: &str, s: &Sums, out: &mut String) {
    let us = |ns| mean(timeline, ns);
    let sum = us(s.bound + s.excess + s.waiting);
    row!(
        out,
        "{}\t{}\t{:.1}\t{:.1}\t{:.1}\t{sum:.1}",
        cut(name),
        s.tasks,
        us(s.bound),
        us(s.excess),
        us(s.waiting)
    );
}

/// Rows sorted by time, longest first.
fn by_time<K>(sums: HashMap<K, Sums>, key: impl Fn(&K) -> u64) -> Vec<(K, Sums)> {
    let mut rows: Vec<(K, Sums)> = sums.into_iter().collect();
    rows.sort_by_key(|(name, s)| (-(s.bound + s.excess + s.waiting), key(name)));
    rows
}

fn ops(timeline: &Timeline, total: &Sums, out: &mut String) {
    out.push_str("\n## by op\nop\ttasks\tbound\texcess\twaiting\tsum\n");
    let rows = by_time(timeline.by(|task| task.name), |&name| name as u64);
    let (shown, rest) = rows.split_at(rows.len().min(OPS));
    for (name, sums) in shown {
        table_row(timeline, &timeline.names[*name], sums, out);
    }
    if !rest.is_empty() {
        let mut others = Sums::default();
        rest.iter().for_each(|(_, sums)| others.add(sums));
        table_row(timeline, &format!("{} others", rest.len()), &others, out);
    }
    row!(out, "bubble\t\t\t\t\t{:.1}", mean(timeline, total.bubbles()));
}

fn layers(timeline: &Timeline, out: &mut String) {
    let rows = by_time(timeline.by(|task| task.layer), |&layer| u64::from(layer));
    row!(
        out,
        "\n## by layer: the {} of {} with the most time, and the middle one",
        rows.len().min(LAYERS),
        rows.len()
    );
    out.push_str("layer\ttasks\tbound\texcess\twaiting\tsum\n");
    for (layer, sums) in rows.iter().take(LAYERS) {
        table_row(timeline, &layer.to_string(), sums, out);
    }
    if let Some((layer, sums)) = rows.get(rows.len() / 2).filter(|_| rows.len() > LAYERS) {
        table_row(timeline, &format!("{layer} (middle)"), sums, out);
    }
}

fn place(timeline: &Timeline, task: &Task) -> String {
    format!("w{} l{} {}", task.worker, task.layer, cut(timeline.name(task)))
}

fn waited(task: &Task) -> u64 {
    task.arrived - task.begin
}

fn waits(timeline: &Timeline, out: &mut String) {
    let mut pairs: HashMap<(usize, Option<usize>), [u64; 2]> = HashMap::new();
    for task in &timeline.tasks {
        let producer = task.producer.map(|producer| timeline.tasks[producer].name);
        let [count, sum] = pairs.entry((task.name, producer)).or_default();
        *count += 1;
        *sum += waited(task);
    }
    let mut pairs: Vec<_> = pairs.into_iter().collect();
    pairs.sort_by_key(|&(pair, [_, sum])| (std::cmp::Reverse(sum), pair));
    out.push_str("\n## waits by who waits for whom\nwaits\tfor\ttasks\tus\n");
    for ((name, producer), [count, sum]) in pairs.into_iter().take(PAIRS) {
        let producer = producer.map_or("-".to_owned(), |name| cut(&timeline.names[name]));
        row!(
            out,
            "{}\t{producer}\t{count}\t{:.1}",
            cut(&timeline.names[name]),
            mean(timeline, sum as i64)
        );
    }
    longest(timeline, out);
}

/// Tasks of one kind that wait for the same task.
#[derive(Clone, Copy, Default)]
struct Waiters {
    /// The longest wait, and its task.
    longest: u64,
    who: usize,
    count: u64,
}

/// Writes the longest waits. Tasks that wait for the same producer share one line, which names the longest wait.
fn longest(timeline: &Timeline, out: &mut String) {
    let mut groups: HashMap<(Option<usize>, u16, usize), Waiters> = HashMap::new();
    for (index, task) in timeline.tasks.iter().enumerate() {
        let group = groups.entry((task.producer, task.layer, task.name)).or_default();
        if group.count == 0 || waited(task) > group.longest {
            (group.longest, group.who) = (waited(task), index);
        }
        group.count += 1;
    }
    let mut groups: Vec<Waiters> = groups.into_values().collect();
    groups.sort_by_key(|group| (std::cmp::Reverse(group.longest), group.who));
    out.push_str("\n## the longest waits: us, who, for the last of whom, which ended so long after the wait began, how many wait for it\n");
    for Waiters { longest, who, count } in groups.into_iter().take(WAITS) {
        let task = &timeline.tasks[who];
        let late = task.producer.map(|producer| &timeline.tasks[producer]).map_or_else(
            || "-\t-".to_owned(),
            |from| {
                let late = (from.end as i64 - task.begin as i64) as f64 / 1000.0;
                format!("{}\t{late:.2}", place(timeline, from))
            },
        );
        let us = longest as f64 / 1000.0;
        row!(out, "{us:.2}\t{}\t{late}\t{count}", place(timeline, task));
    }
}

fn bubbles(timeline: &Timeline, total: &Sums, out: &mut String) {
    let us = |ns| mean(timeline, ns);
    let [before, between, after] = total.bubble;
    row!(
        out,
        "\n## bubbles: {:.1} before a worker's first task, {:.1} between tasks, {:.1} after the last",
        us(before),
        us(between),
        us(after)
    );
    let mut workers: Vec<(i64, usize)> =
        (0..timeline.workers.len()).map(|w| (timeline.worker(w).bubbles(), w)).collect();
    workers.sort_by_key(|&(bubble, worker)| (-bubble, worker));
    out.push_str("worker\ttasks\tbubble us\n");
    for (bubble, worker) in workers.into_iter().take(WORKERS) {
        let tasks = timeline.workers[worker].len();
        let worker = timeline.worker_name(worker);
        row!(out, "{worker}\t{tasks}\t{:.1}", bubble as f64 / 1000.0);
    }
}
