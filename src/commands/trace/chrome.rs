//! A timeline in Chrome's JSON format, for viewers that read nothing else. Times are microseconds there.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::counters::Counter;
use super::perfetto::{Flows, arrow};
use super::timeline::Timeline;

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

/// Writes the file, an event a line.
pub(super) fn write(
    out: &mut impl Write,
    timeline: &Timeline,
    counters: &[Counter],
    title: &str,
) -> io::Result<()> {
    let flows = Flows::new(timeline);
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
    for (worker, tasks) in timeline.workers.iter().enumerate() {
        put(&meta("thread_name", worker, &format!("worker {worker}")))?;
        for index in tasks.clone() {
            let task = &timeline.tasks[index];
            put(&json!({
                "ph": "X", "pid": 1, "tid": worker, "ts": us(task.begin), "dur": us(task.end - task.begin),
                "name": timeline.name(task),
                "args": {
                    "layer": task.layer, "task": index, "bytes": task.bytes, "floor_ns": task.floor,
                    "wait_ns": task.arrived - task.begin, "starved_ns": task.starved,
                },
            }))?;
            let flow = |ph: &str, id: u64, at: u64| json!({"ph": ph, "pid": 1, "tid": worker, "ts": us(at), "id": id, "name": "handoff", "cat": "handoff", "bp": "e"});
            for &id in flows.leave(index) {
                put(&flow("s", id, task.multiplied))?;
            }
            if arrow(timeline, task).is_some() {
                put(&flow("f", index as u64 + 1, task.arrived))?;
            }
        }
    }
    out.write_all(b"\n]}\n")
}
