//! A timeline as trace events in JSON, which Perfetto and Chrome read: one track per worker, one slice per task with
//! its parts, an arrow from its producer, counters. Times are in microseconds.

use std::io::{self, Write};

use serde_json::{Value, json};

use crate::counters::Counter;
use crate::timeline::{Task, Timeline};

/// The parts of a task, inside its slice.
const PARTS: [&str; 4] = ["wait", "input", "products", "output"];

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// The start of the arrow to a task. None from its own worker, and none if by the clocks of the two workers the data
/// arrived before it was sent.
fn arrow<'a>(timeline: &'a Timeline, task: &Task) -> Option<&'a Task> {
    let from = task.producer.map(|producer| &timeline.tasks[producer]);
    from.filter(|from| from.worker != task.worker && from.multiplied <= task.arrived)
}

/// A slice on a worker's track. A nested slice comes after the slice that contains it.
fn slice(worker: u32, name: &str, [begin, end]: [u64; 2], args: &Value) -> Value {
    let (ts, dur) = (us(begin), us(end - begin));
    json!({"ph": "X", "pid": 1, "tid": worker, "ts": ts, "dur": dur, "name": name, "args": args})
}

/// Writes the file, one event per line.
pub fn write(
    out: &mut impl Write,
    timeline: &Timeline,
    counters: &[Counter],
    title: &str,
) -> io::Result<()> {
    let meta = |name: &str, tid: usize, value: &str| json!({"ph": "M", "pid": 1, "tid": tid, "name": name, "args": {"name": value}});
    let mut between = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
    let mut put = |event: &Value| write!(out, "{}{event}", std::mem::replace(&mut between, ",\n"));
    put(&meta("process_name", 0, title))?;
    for counter in counters {
        for &(at, value) in &counter.samples {
            let args = json!({counter.unit: value});
            put(&json!({"ph": "C", "pid": 1, "ts": us(at), "name": counter.name, "args": args}))?;
        }
    }
    for worker in 0..timeline.workers.len() {
        put(&meta("thread_name", worker, &timeline.worker_name(worker)))?;
    }
    for (index, task) in timeline.tasks.iter().enumerate() {
        let about = json!({
            "layer": task.layer, "task": index, "bytes": task.bytes, "bound_ns": task.bound,
            "starved_ns": task.starved,
        });
        put(&slice(task.worker, timeline.name(task), [task.begin, task.end], &about))?;
        let marks = [task.begin, task.arrived, task.staged, task.multiplied, task.end];
        for (part, ends) in PARTS.into_iter().zip(marks.windows(2)) {
            put(&slice(task.worker, part, [ends[0], ends[1]], &json!({})))?;
        }
    }
    // After all slices: an arrow binds to the innermost slice that is open at its end.
    for (index, task) in timeline.tasks.iter().enumerate() {
        let Some(from) = arrow(timeline, task) else { continue };
        for (ph, worker, at) in
            [("s", from.worker, from.multiplied), ("f", task.worker, task.arrived)]
        {
            put(
                &json!({"ph": ph, "pid": 1, "tid": worker, "ts": us(at), "id": index, "name": "handoff", "cat": "handoff", "bp": "e"}),
            )?;
        }
    }
    out.write_all(b"\n]}\n")
}
