//! Events of a running process as trace events in JSON: a process for each track, a thread for each client, place, ring
//! and device.

use std::io::{self, Write};

use abi::{EventTrack, EventWords};
use serde_json::{Value, json};

/// The track of an event, and its thread there.
fn thread(event: &EventWords) -> (EventTrack, u64) {
    match EventTrack::new(event.track).unwrap_or(EventTrack::Device) {
        // A client's request may wait for the place of another one, and overlap with it.
        EventTrack::Client => (EventTrack::Client, event.number),
        EventTrack::Turn => (EventTrack::Turn, event.place.into()),
        track @ (EventTrack::Command | EventTrack::Device) => (track, 0),
    }
}

fn slice(event: &EventWords, start_ns: u64) -> Value {
    let (track, tid) = thread(event);
    // Whole nanoseconds, relative to the start: 1970 has too many for a float.
    let us = |ns: u64| ns as f64 / 1000.0;
    let name = match track {
        EventTrack::Client => format!("{} tokens", event.tokens),
        EventTrack::Turn => format!("sequence {}", event.number),
        EventTrack::Command => format!("command of {}", event.sequences),
        EventTrack::Device => format!("{} positions", event.positions),
    };
    json!({
        "ph": "X", "pid": track as u32 + 1, "tid": tid, "name": name, "cat": track.name(),
        "ts": us(event.begin_ns.saturating_sub(start_ns)), "dur": us(event.end_ns.saturating_sub(event.begin_ns)),
        "args": {
            "number": event.number, "place": event.place, "first": event.first, "positions": event.positions,
            "tokens": event.tokens, "sequences": event.sequences,
        },
    })
}

/// Writes the file, one event per line.
///
/// # Errors
/// If it cannot be written.
pub fn write(out: &mut impl Write, events: &[EventWords], title: &str) -> io::Result<()> {
    let start_ns = events.iter().map(|event| event.begin_ns).min().unwrap_or(0);
    let mut between = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
    let mut put = |event: &Value| write!(out, "{}{event}", std::mem::replace(&mut between, ",\n"));
    for track in EventTrack::ALL {
        let name = format!("{}: {title}", track.name());
        put(
            &json!({"ph": "M", "pid": *track as u32 + 1, "tid": 0, "name": "process_name", "args": {"name": name}}),
        )?;
    }
    for event in events {
        put(&slice(event, start_ns))?;
    }
    out.write_all(b"\n]}\n")
}
