//! A step of a small model in virtual time: its sums, and all three files read back.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::super::{Traced, chrome, digest, simulated};
use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;

fn traced() -> Traced {
    let place = PlaceArgs {
        target: Some("h200".to_owned()),
        device: DeviceChoice::Cpu,
        kv_capacity: Some(256),
    };
    let context = Context::load("toy-2l", &place).unwrap_or_else(|f| panic!("{}", f.message));
    let config = context.neutral_config();
    let program = context.lowered(&config).unwrap_or_else(|f| panic!("{}", f.message));
    simulated(&context, 128, "default", &config, &program)
}

#[test]
fn every_nanosecond_is_somewhere() {
    let Traced { mut timeline, .. } = traced();
    let total = timeline.total();
    assert_eq!(total.sum(), (timeline.span() * timeline.workers.len() as u64) as i64);
    assert!(total.floor > 0 && total.waiting > 0 && total.bubbles() > 0, "{total:?}");
    let of_ops: i64 =
        timeline.by(|task| task.name).values().map(|s| s.floor + s.excess + s.waiting).sum();
    assert_eq!(of_ops + total.bubbles(), total.sum());
    assert_eq!(timeline.moved, 0, "virtual time runs forwards");
    // Marks out of order are found out, also where arithmetic wraps: the parts would still add up.
    let second = timeline.workers[0].start + 1;
    timeline.tasks[second].begin = timeline.tasks[second].end + 1;
    let found = std::panic::catch_unwind(|| timeline.total()).expect_err("it is found out");
    let said = found.downcast_ref::<String>().expect("a message");
    assert!(said.starts_with("a mark at"), "{said}");
}

#[test]
fn the_floor_is_that_of_the_bytes() {
    let Traced { timeline, document, .. } = traced();
    let bytes: u64 = timeline.tasks.iter().map(|task| task.bytes).sum();
    let bandwidth = ir::Target::by_name("h200").expect("it is known").bandwidth;
    let exact = bytes as f64 * 1e9 / bandwidth as f64 * timeline.workers.len() as f64;
    assert!((timeline.total().floor as f64 - exact).abs() <= 1.0, "rounded once, not once a task");
    let us = document["us_per_token"].as_f64().expect("a number");
    assert!((timeline.span() as f64 / 1000.0 - us).abs() < 0.001, "the step that is predicted");
}

#[test]
fn who_is_waited_for_has_just_ended() {
    let Traced { timeline, .. } = traced();
    let alone = timeline.tasks.iter().filter(|task| task.producer.is_none());
    let alone: BTreeSet<&str> = alone.map(|task| timeline.name(task)).collect();
    assert_eq!(alone, BTreeSet::from(["embed", "nop"]), "all others wait for somebody");
    for task in &timeline.tasks {
        if let Some(producer) = task.producer {
            assert!(timeline.tasks[producer].end <= task.arrived, "{task:?}");
        }
    }
}

/// The slices of each track as (begin, end, name), outer ones behind those inside; and where arrows start and end.
#[derive(Default)]
struct Decoded {
    slices: BTreeMap<u64, Vec<(u64, u64, u64)>>,
    arrows: BTreeMap<u64, Vec<(&'static str, u64)>>,
    names: BTreeMap<u64, String>,
    tracks: BTreeMap<u64, String>,
    counters: BTreeMap<u64, Vec<i64>>,
}

fn decode(bytes: &[u8]) -> Decoded {
    let trace = Trace::decode(bytes).expect("it decodes");
    let mut decoded = Decoded::default();
    let mut open: BTreeMap<u64, Vec<(u64, u64)>> = BTreeMap::new();
    let mut last: BTreeMap<u64, u64> = BTreeMap::new();
    for packet in &trace.packet {
        assert_eq!(packet.trusted_packet_sequence_id, SEQUENCE);
        if let Some(data) = &packet.interned_data {
            decoded.names.extend(data.event_names.iter().map(|n| (n.iid, n.name.clone())));
        }
        if let Some(track) = &packet.track_descriptor {
            assert!(decoded.tracks.insert(track.uuid, track.name.clone()).is_none());
        }
        let Some(event) = &packet.track_event else { continue };
        let at = packet.timestamp.expect("events have a time");
        let before = last.insert(event.track_uuid, at).unwrap_or(0);
        assert!(before <= at && decoded.tracks.contains_key(&event.track_uuid));
        let stack = open.entry(event.track_uuid).or_default();
        match event.kind() {
            Kind::SliceBegin => stack.push((at, event.name_iid)),
            Kind::SliceEnd => {
                let (begin, name) = stack.pop().expect("it was begun");
                decoded.slices.entry(event.track_uuid).or_default().push((begin, at, name));
            }
            Kind::Counter => {
                let value = event.counter_value.expect("a value");
                decoded.counters.entry(event.track_uuid).or_default().push(value);
            }
            Kind::Unspecified => panic!("an event of no kind"),
        }
        for &id in &event.flow_ids {
            decoded.arrows.entry(id).or_default().push(("from", at));
        }
        for &id in &event.terminating_flow_ids {
            decoded.arrows.entry(id).or_default().push(("to", at));
        }
    }
    assert!(open.values().all(Vec::is_empty), "every slice ends");
    decoded
}

#[test]
fn the_perfetto_file_tells_the_same() {
    let Traced { timeline, counters, .. } = traced();
    let decoded = decode(&encode(&timeline, &counters, "toy"));
    assert_eq!(decoded.tracks.len(), 1 + counters.len() + timeline.workers.len());
    let mut waiting = 0;
    for (worker, tasks) in timeline.workers.iter().enumerate() {
        let slices = decoded.slices.get(&(WORKERS + worker as u64)).map_or(&[][..], Vec::as_slice);
        assert_eq!(slices.len(), 5 * tasks.len(), "a task and its four parts");
        let waits = slices.iter().filter(|(.., name)| decoded.names[name] == "wait");
        waiting += waits.map(|(begin, end, _)| end - begin).sum::<u64>();
        for (index, five) in tasks.clone().zip(slices.chunks(5)) {
            let (begin, end, name) = five[4];
            let task = &timeline.tasks[index];
            assert_eq!((begin, end), (task.begin, task.end));
            assert_eq!(decoded.names[&name], timeline.name(task));
        }
    }
    assert_eq!(waiting as i64, timeline.total().waiting);
    assert!(!decoded.arrows.is_empty());
    for (id, ends) in &decoded.arrows {
        let mut ends = ends.clone();
        ends.sort_by_key(|&(end, at)| (at, end));
        assert!(matches!(ends[..], [("from", a), ("to", b)] if a <= b), "arrow {id}: {ends:?}");
    }
    let named = |name: &str| {
        let uuid =
            decoded.tracks.iter().find(|(_, track)| track.starts_with(name)).map(|(id, _)| id);
        &decoded.counters[uuid.expect(name)]
    };
    let bytes: u64 = timeline.tasks.iter().map(|task| task.bytes).sum();
    assert_eq!(named("bytes multiplied").iter().sum::<i64>() as u64, bytes);
    assert!(named("ring depth").iter().collect::<BTreeSet<_>>().len() > 1);
    assert!(named("bytes in flight").iter().any(|&bytes| bytes > 0));
}

#[test]
fn the_chrome_file_tells_the_same() {
    let Traced { timeline, counters, .. } = traced();
    let mut file = Vec::new();
    chrome::write(&mut file, &timeline, &counters, "toy").expect("memory takes it");
    let document: serde_json::Value = serde_json::from_slice(&file).expect("it is JSON");
    let events = document["traceEvents"].as_array().expect("a list");
    let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
    assert_eq!(of("X").len(), timeline.tasks.len());
    let ids = |ph: &str| of(ph).iter().map(|event| event["id"].as_u64()).collect::<BTreeSet<_>>();
    assert_eq!(ids("s"), ids("f"));
    assert_eq!(of("f").len(), ids("f").len());
    let floor: u64 = of("X").iter().filter_map(|event| event["args"]["floor_ns"].as_u64()).sum();
    assert_eq!(floor as i64, timeline.total().floor);
}

#[test]
fn the_digest_is_small_and_names_the_worst_wait() {
    let Traced { timeline, .. } = traced();
    let text = digest::write(&timeline, &"toy/".repeat(3000));
    assert!(text.len() <= digest::BYTES_MAX);
    let worst = timeline.tasks.iter().max_by_key(|task| task.arrived - task.begin).expect("one");
    let us = format!("{:.2}\t", (worst.arrived - worst.begin) as f64 / 1000.0);
    assert!(text.contains(&us), "{us:?} is not in\n{text}");
    // Many workers wait for the same task: that is one line.
    let (_, waits) = text.split_once("## the longest waits").expect("they are there");
    let lines = waits.lines().skip(1).take_while(|line| !line.is_empty());
    let producers: Vec<&str> = lines.filter_map(|line| line.split('\t').nth(2)).collect();
    assert!(
        producers.len() > 2 && producers.len() == producers.iter().collect::<BTreeSet<_>>().len()
    );
    for heading in ["## by op", "## by layer", "## waits", "## bubbles"] {
        assert!(text.contains(heading), "{heading}");
    }
}
