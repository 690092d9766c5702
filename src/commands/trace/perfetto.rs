//! A timeline as a Perfetto trace: a lane a worker, a slice a task with its parts, an arrow from who was waited for, counters.
//!
//! The messages are the few of Perfetto's `trace.proto` that are needed, by their field numbers there.

use prost::Message;

use super::counters::Counter;
use super::timeline::{Task, Timeline};

#[derive(Clone, PartialEq, Message)]
pub(super) struct Trace {
    #[prost(message, repeated, tag = "1")]
    pub(super) packet: Vec<Packet>,
}

/// `TracePacket`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Packet {
    #[prost(uint64, optional, tag = "8")]
    pub(super) timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    pub(super) trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "11")]
    pub(super) track_event: Option<TrackEvent>,
    #[prost(message, optional, tag = "12")]
    pub(super) interned_data: Option<InternedData>,
    #[prost(uint32, tag = "13")]
    pub(super) sequence_flags: u32,
    #[prost(message, optional, tag = "60")]
    pub(super) track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub(super) uuid: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(uint64, tag = "5")]
    pub(super) parent_uuid: u64,
    #[prost(message, optional, tag = "8")]
    pub(super) counter: Option<CounterDescriptor>,
    /// `CHRONOLOGICAL` is 2, `EXPLICIT` 3.
    #[prost(int32, tag = "11")]
    pub(super) child_ordering: i32,
    #[prost(int32, tag = "12")]
    pub(super) sibling_order_rank: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CounterDescriptor {
    #[prost(string, tag = "6")]
    pub(super) unit_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    pub(super) debug_annotations: Vec<Annotation>,
    #[prost(enumeration = "Kind", tag = "9")]
    pub(super) kind: i32,
    #[prost(uint64, tag = "10")]
    pub(super) name_iid: u64,
    #[prost(uint64, tag = "11")]
    pub(super) track_uuid: u64,
    #[prost(int64, optional, tag = "30")]
    pub(super) counter_value: Option<i64>,
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    pub(super) flow_ids: Vec<u64>,
    #[prost(fixed64, repeated, packed = "false", tag = "48")]
    pub(super) terminating_flow_ids: Vec<u64>,
}

/// `TrackEvent.Type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
pub(super) enum Kind {
    Unspecified = 0,
    SliceBegin = 1,
    SliceEnd = 2,
    Counter = 4,
}

/// `DebugAnnotation`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Annotation {
    #[prost(uint64, tag = "1")]
    pub(super) name_iid: u64,
    #[prost(uint64, tag = "3")]
    pub(super) uint_value: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InternedData {
    #[prost(message, repeated, tag = "2")]
    pub(super) event_names: Vec<Interned>,
    #[prost(message, repeated, tag = "3")]
    pub(super) debug_annotation_names: Vec<Interned>,
}

/// `EventName`, `DebugAnnotationName`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Interned {
    #[prost(uint64, tag = "1")]
    pub(super) iid: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
}

/// One writer of packets.
const SEQUENCE: u32 = 1;
/// `SEQ_INCREMENTAL_STATE_CLEARED` and `SEQ_NEEDS_INCREMENTAL_STATE`.
const CLEARED: u32 = 1;
const NEEDS_STATE: u32 = 2;

/// Children in the order of their ranks.
const EXPLICIT: i32 = 3;

const STEP: u64 = 1;
const WORKERS: u64 = 1000;
const COUNTERS: u64 = 1 << 32;

/// The parts of a task, in its slice. Their names come first, those of ops behind them.
const PARTS: [&str; 4] = ["wait", "input", "products", "output"];
const ANNOTATIONS: [&str; 5] = ["layer", "task", "bytes", "floor_ns", "starved_ns"];

pub(super) fn encode(timeline: &Timeline, counters: &[Counter], title: &str) -> Vec<u8> {
    trace(timeline, counters, title).encode_to_vec()
}

fn trace(timeline: &Timeline, counters: &[Counter], title: &str) -> Trace {
    let mut packet = vec![names(timeline)];
    packet.push(track(STEP, 0, title, 0, None));
    for (index, counter) in counters.iter().enumerate() {
        let descriptor = CounterDescriptor { unit_name: counter.unit.to_owned() };
        let uuid = COUNTERS + index as u64;
        packet.push(track(uuid, STEP, &counter.name, index as i32, Some(descriptor)));
        packet.extend(counter.samples.iter().map(|&(at, value)| {
            let kind = Kind::Counter as i32;
            let counter_value = Some(value);
            event(at, TrackEvent { kind, track_uuid: uuid, counter_value, ..TrackEvent::default() })
        }));
    }
    let flows = Flows::new(timeline);
    for (worker, tasks) in timeline.workers.iter().enumerate() {
        let (uuid, rank) = (WORKERS + worker as u64, (counters.len() + worker) as i32);
        packet.push(track(uuid, STEP, &format!("worker {worker}"), rank, None));
        for index in tasks.clone() {
            packet.extend(task(timeline, index, uuid, &flows));
        }
    }
    Trace { packet }
}

/// Which tasks arrows leave, and where they end: from the last of those that a task waited for on another worker.
pub(super) struct Flows {
    /// For each task, the tasks that wait for it.
    out: Vec<Vec<u64>>,
}

impl Flows {
    pub(super) fn new(timeline: &Timeline) -> Self {
        let mut out = vec![Vec::new(); timeline.tasks.len()];
        for (index, task) in timeline.tasks.iter().enumerate() {
            if let Some(producer) = arrow(timeline, task) {
                out[producer].push(index as u64 + 1);
            }
        }
        Self { out }
    }

    /// Numbers of the arrows that leave a task. An arrow has the number of the task where it ends, plus one.
    pub(super) fn leave(&self, task: usize) -> &[u64] {
        &self.out[task]
    }
}

/// Where the arrow to a task comes from. None from its own worker, and none where the clocks of two workers say that what came was not yet sent.
pub(super) fn arrow(timeline: &Timeline, task: &Task) -> Option<usize> {
    task.producer.filter(|&producer| {
        let from = &timeline.tasks[producer];
        from.worker != task.worker && from.multiplied <= task.arrived
    })
}

fn names(timeline: &Timeline) -> Packet {
    let interned =
        |(index, name): (usize, &str)| Interned { iid: index as u64 + 1, name: name.to_owned() };
    let ops = timeline.names.iter().map(String::as_str);
    let data = InternedData {
        event_names: PARTS.into_iter().chain(ops).enumerate().map(interned).collect(),
        debug_annotation_names: ANNOTATIONS.into_iter().enumerate().map(interned).collect(),
    };
    Packet {
        trusted_packet_sequence_id: SEQUENCE,
        interned_data: Some(data),
        sequence_flags: CLEARED | NEEDS_STATE,
        ..Packet::default()
    }
}

fn track(
    uuid: u64,
    parent: u64,
    name: &str,
    rank: i32,
    counter: Option<CounterDescriptor>,
) -> Packet {
    Packet {
        trusted_packet_sequence_id: SEQUENCE,
        track_descriptor: Some(TrackDescriptor {
            uuid,
            name: name.to_owned(),
            parent_uuid: parent,
            counter,
            child_ordering: if parent == 0 { EXPLICIT } else { 0 },
            sibling_order_rank: rank,
        }),
        ..Packet::default()
    }
}

fn event(at: u64, track_event: TrackEvent) -> Packet {
    Packet {
        timestamp: Some(at),
        trusted_packet_sequence_id: SEQUENCE,
        track_event: Some(track_event),
        sequence_flags: NEEDS_STATE,
        ..Packet::default()
    }
}

/// A task's slice and its parts in it. The arrow to it ends where its wait does; arrows from it start at its output.
fn task(timeline: &Timeline, index: usize, track_uuid: u64, flows: &Flows) -> Vec<Packet> {
    let task = &timeline.tasks[index];
    let begin = |at: u64, name_iid: usize| {
        let (kind, name_iid) = (Kind::SliceBegin as i32, name_iid as u64);
        (at, TrackEvent { kind, name_iid, track_uuid, ..TrackEvent::default() })
    };
    let end = |at: u64| {
        event(at, TrackEvent { kind: Kind::SliceEnd as i32, track_uuid, ..TrackEvent::default() })
    };
    let (at, mut whole) = begin(task.begin, PARTS.len() + task.name + 1);
    let values = [u64::from(task.layer), index as u64, task.bytes, task.floor, task.starved];
    let annotation = |(place, uint_value)| Annotation { name_iid: place as u64 + 1, uint_value };
    whole.debug_annotations = values.into_iter().enumerate().map(annotation).collect();
    let mut packets = vec![event(at, whole)];
    let marks = [task.begin, task.arrived, task.staged, task.multiplied, task.end];
    for (part, ends) in marks.windows(2).enumerate() {
        let (at, mut slice) = begin(ends[0], part + 1);
        if part == 1 && arrow(timeline, task).is_some() {
            slice.terminating_flow_ids = vec![index as u64 + 1];
        }
        if part == 3 {
            slice.flow_ids = flows.leave(index).to_vec();
        }
        packets.extend([event(at, slice), end(ends[1])]);
    }
    packets.push(end(task.end));
    packets
}

#[cfg(test)]
#[path = "perfetto_tests.rs"]
mod tests;
