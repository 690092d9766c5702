//! `amk trace --pid`: what a running process spends its time on, from the trace ring behind its telemetry page. The
//! process does not know that it is watched; what it wrote faster than this one read is counted as dropped.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use abi::{Activity, EventTrack, EventWords};
use serde_json::{Map, Value, json};
use telemetry::{Page, Tail, ops, text};

use super::{Fill, write_files};
use crate::cli::TraceArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::process::{Look, Process, programs};
use crate::report;
use crate::spinner::Spinner;

/// The interval of reads: the ring holds the events of some hundred commands.
const READ_EVERY: Duration = Duration::from_micros(500);
/// The most workers that the digest lists.
const WORKERS: usize = 16;

/// What a process did between two looks at its page.
struct Capture {
    before: Look,
    after: Look,
    events: Vec<EventWords>,
    dropped: u64,
    /// `events`, `time` or `end`, the process's own.
    stopped_by: &'static str,
}

pub(super) fn run(args: &TraceArgs, pid: u32) -> Outcome {
    let process = Process::find(&telemetry::folder(), Some(pid))?;
    let working = Spinner::on(format!("capturing process {pid}"));
    let limit = Duration::from_secs_f64(args.live.seconds);
    let capture = Capture::new(&process, limit, args.live.max_events as usize)?;
    drop(working);
    let title = capture.title();
    let digest = capture.digest(&title);
    let files: [(_, &Fill<'_>); 2] = [
        (&args.digest, &|out| std::io::Write::write_all(out, digest.as_bytes())),
        (&args.perfetto, &|out| trace::live::write(out, &capture.events, &title)),
    ];
    write_files(&files)?;
    report::say(&title);
    report::table(&capture.rows());
    report::document(&capture.document())?;
    if !capture.events.is_empty() {
        return Ok(Exit::Yes);
    }
    report::say("nothing happened: the process is idle, or in one long command");
    Ok(Exit::Missing)
}

impl Capture {
    fn new(process: &Process, limit: Duration, most: usize) -> Result<Self, Failure> {
        let before = process.look()?;
        let began = Instant::now();
        let mut tail = Tail::new(&process.reader, before.page.head.events);
        let mut events: Vec<EventWords> = Vec::new();
        let mut add = |event: &EventWords| {
            events.push(*event);
            events.len() < most
        };
        let (after, stopped_by) = loop {
            let mut full = false;
            let mut each = |event: &EventWords| {
                full = !add(event);
                !full
            };
            if began.elapsed() < limit {
                tail.follow(&mut each);
                if full {
                    break (process.look()?, "events");
                }
                if process.reader.ended() {
                    break (process.look()?, "end");
                }
                std::thread::sleep(READ_EVERY.min(limit.saturating_sub(began.elapsed())));
                continue;
            }
            // Up to this look: its counts are those of exactly these events.
            let after = process.look()?;
            tail.follow_to(after.page.head.events, &mut each);
            break (after, if full { "events" } else { "time" });
        };
        let dropped = tail.dropped();
        Ok(Self { before, after, events, dropped, stopped_by })
    }

    fn track(&self, track: EventTrack) -> impl Iterator<Item = &EventWords> {
        self.events.iter().filter(move |event| event.track == track as u32)
    }

    /// Positions that all sequences had run before, and after the last event, as `/metrics` counts them.
    fn totals(&self) -> [u64; 2] {
        let total = |page: &Page| page.head.priority_positions.iter().sum::<u64>();
        let before = total(&self.before.page);
        let after = match self.stopped_by {
            "events" => self.track(EventTrack::Turn).map(|turn| turn.total).last(),
            _ => Some(total(&self.after.page)),
        };
        [before, after.unwrap_or(before)]
    }

    fn sum(&self, track: EventTrack, of: fn(&EventWords) -> u32) -> u64 {
        self.track(track).map(|event| u64::from(of(event))).sum()
    }

    fn seconds(&self) -> f64 {
        self.after.at_ns.saturating_sub(self.before.at_ns) as f64 / 1e9
    }

    fn title(&self) -> String {
        let head = &self.after.page.head;
        format!(
            "amk {}: {} on {}, process {}",
            text(&head.command),
            text(&head.model),
            text(&head.device),
            head.pid
        )
    }

    fn document(&self) -> Value {
        let head = &self.after.page.head;
        let track = |track: &EventTrack| {
            let ns = |event: &EventWords| event.end_ns.saturating_sub(event.begin_ns);
            let (slices, ns) =
                (self.track(*track).count(), self.track(*track).map(ns).sum::<u64>());
            (track.name().to_owned(), json!({"slices": slices, "ns": ns}))
        };
        let [before, after] = self.totals();
        json!({
            "schema": "amk.trace_live.v1",
            "pid": head.pid,
            "command": text(&head.command),
            "model": text(&head.model),
            "device": text(&head.device),
            "activity": Activity::new(head.activity).map_or("unknown", Activity::name),
            "seconds": self.seconds(),
            "stopped_by": self.stopped_by,
            "empty_trace": self.events.is_empty(),
            "events": self.events.len(),
            "dropped": self.dropped,
            "tracks": EventTrack::ALL.iter().map(track).collect::<Map<String, Value>>(),
            "positions": self.sum(EventTrack::Turn, |turn| turn.positions),
            "tokens": self.sum(EventTrack::Turn, |turn| turn.tokens),
            "metrics": {"positions_before": before, "positions_after": after, "positions": after - before},
            "ops": self.ops(),
        })
    }

    /// The tracks as rows of a table.
    fn rows(&self) -> Vec<(&'static str, String)> {
        let row = |track: &EventTrack| {
            let ns: u64 = self.track(*track).map(|e| e.end_ns.saturating_sub(e.begin_ns)).sum();
            let slices = self.track(*track).count();
            (track.name(), format!("{slices:>7} slices, {:>9.1} ms", ns as f64 / 1e6))
        };
        EventTrack::ALL.iter().map(row).collect()
    }

    /// Tasks by op and worker between the two looks.
    fn ops(&self) -> Value {
        let mut by_worker = ops::tasks_by_worker(&self.before.page, &self.after.page);
        if self.events.is_empty() {
            by_worker.clear();
        }
        let (before, after) = (ops::tasks(&self.before.page), ops::tasks(&self.after.page));
        let mut all = after;
        all.iter_mut()
            .zip(before)
            .for_each(|(after, before)| *after = after.saturating_sub(before));
        let object = |ops: &ops::Ops| {
            let named = ops::named(ops).map(|(op, tasks)| (op.to_owned(), tasks.into()));
            Value::Object(named.collect())
        };
        json!({
            "source": "derived",
            "programs": programs(Some(&self.before.page), &self.after.page),
            "tasks": object(&all),
            "by_worker": by_worker.iter().map(object).collect::<Vec<Value>>(),
        })
    }

    /// The tracks and the mix of ops as text, for people and agents.
    fn digest(&self, title: &str) -> String {
        let mut out = format!(
            "# {title}\n{:.2} s, {} events, {} dropped, stopped by {}\n\ntrack\tslices\tms\tpositions\ttokens\n",
            self.seconds(),
            self.events.len(),
            self.dropped,
            self.stopped_by
        );
        for track in EventTrack::ALL {
            let ns: u64 = self.track(*track).map(|e| e.end_ns.saturating_sub(e.begin_ns)).sum();
            let (name, slices) = (track.name(), self.track(*track).count());
            let positions = self.sum(*track, |event| event.positions);
            let tokens = self.sum(*track, |event| event.tokens);
            let ms = ns as f64 / 1e6;
            let _ = writeln!(out, "{name}\t{slices}\t{ms:.1}\t{positions}\t{tokens}");
        }
        let by_worker = ops::tasks_by_worker(&self.before.page, &self.after.page);
        let mix = |ops: &ops::Ops| {
            let named = ops::named(ops).map(|(op, tasks)| format!("{op} {tasks}"));
            named.collect::<Vec<String>>().join(", ")
        };
        out.push_str("\ntasks by op, derived: those of a pass of the program times its passes\n");
        for (worker, ops) in by_worker.iter().enumerate().take(WORKERS) {
            let _ = writeln!(out, "worker {worker}\t{}", mix(ops));
        }
        if let Some(more) = by_worker.len().checked_sub(WORKERS).filter(|more| *more > 0) {
            let _ = writeln!(out, "and {more} more workers");
        }
        out
    }
}
