//! The moves of a sweep: joint changes of knobs that belong together. The groups follow from the paths and values of
//! the knob table.

use ir::schedule::{ActsOn, Knob, ScheduleConfig, Value};

/// One change in alternative forms: the first legal form is tried.
pub(super) type Move = Vec<Vec<(Knob, Value)>>;

/// Caps that a sweep tries: bytes in flight to a worker, and bytes in flight before a wait.
const CAPS: [(u32, u32); 6] = [
    (32 << 10, 32 << 10),
    (48 << 10, 32 << 10),
    (64 << 10, 32 << 10),
    (96 << 10, 32 << 10),
    (128 << 10, 32 << 10),
    (96 << 10, 64 << 10),
];
/// The pair of caps that a sweep also tries with each ring size: it lets hand-offs through between the bytes.
const NEAR_CAPS: (u32, u32) = (65_536, 32_768);

/// The group of a knob: the part of the schedule that it interacts with most.
pub(crate) fn group(knob: Knob) -> &'static str {
    let path = knob.path();
    if path.starts_with("tiling.attention") || path == "fusion_grouping.merge" {
        return "attention";
    }
    path.split('.').next().unwrap_or(path)
}

/// The family of a knob, whose members a sweep sets to one value together: the hand-offs, the row counts.
fn family(knob: Knob) -> Option<&'static str> {
    let path = knob.path();
    if path.starts_with("sync.") {
        Some("sync")
    } else if path.ends_with(".rows") {
        Some("rows")
    } else {
        None
    }
}

/// Every move, in the order of the sweep. Program knobs come first: their trials need no compiler, which can prepare
/// the kernels of the others meanwhile. The ring comes last: its best shape depends on how fast its bytes are consumed.
pub(super) fn all(space: &[(Knob, Vec<Value>)], incumbent: &ScheduleConfig) -> Vec<Move> {
    let mut moves = families(space);
    let is_ring = |knob: Knob| knob.path().starts_with("pipeline.");
    let alone = |(knob, _): &&(Knob, Vec<Value>)| family(*knob).is_none() && !is_ring(*knob);
    let mut alone: Vec<_> = space.iter().filter(alone).collect();
    alone.sort_by_key(|(knob, _)| knob.acts_on() == ActsOn::Kernel);
    for (knob, values) in alone {
        let at = values.iter().position(|&v| v == incumbent.get(*knob)).unwrap_or(0);
        let others = values.iter().enumerate().filter(|&(index, _)| index != at);
        // Few values: all of them. Many values: the neighbours, the middle and the last.
        let few = values.len() <= 3;
        let shown = others.filter(|&(index, _)| {
            few || index.abs_diff(at) == 1 || index == values.len() / 2 || index + 1 == values.len()
        });
        moves.extend(shown.map(|(_, &value)| vec![vec![(*knob, value)]]));
    }
    moves.extend(ring(space));
    moves
}

/// The forms of every move, and every value of every knob alone.
pub(crate) fn forms(
    space: &[(Knob, Vec<Value>)],
    incumbent: &ScheduleConfig,
) -> Vec<Vec<(Knob, Value)>> {
    let alone = |(knob, values): &(Knob, Vec<Value>)| {
        values.iter().map(|&value| vec![(*knob, value)]).collect::<Vec<_>>()
    };
    all(space, incumbent).into_iter().flatten().chain(space.iter().flat_map(alone)).collect()
}

fn families(space: &[(Knob, Vec<Value>)]) -> Vec<Move> {
    let mut moves = Vec::new();
    for name in ["sync", "rows"] {
        let members: Vec<_> =
            space.iter().filter(|(knob, _)| family(*knob) == Some(name)).collect();
        let Some((_, values)) = members.first() else { continue };
        for &value in values {
            let takes = |(knob, values): &&(Knob, Vec<Value>)| {
                values.contains(&value).then_some((*knob, value))
            };
            let form: Vec<_> = members.iter().copied().filter_map(|m| takes(&m)).collect();
            if form.iter().any(|&(knob, value)| knob.default() != value) {
                moves.push(vec![form]);
            }
        }
    }
    moves
}

/// The ring as a whole: each stage size with as many stages as fit, with the caps as they are and with the lower one
/// before a hand-off (measured on an H200: stages of 32 KB are worse than stages of 16 KB with the former, and better
/// with the latter), then each pair of caps.
fn ring(space: &[(Knob, Vec<Value>)]) -> Vec<Move> {
    let values = |knob: Knob| {
        space.iter().find(|(other, _)| *other == knob).map_or(&[][..], |(_, values)| values)
    };
    let deepest = |&size: &Value| -> Move {
        let depths = values(Knob::PipelineStages).iter().rev();
        let form =
            |&depth: &Value| vec![(Knob::PipelineStageBytes, size), (Knob::PipelineStages, depth)];
        depths.map(form).collect()
    };
    let has = |knob: Knob, bytes: u32| values(knob).contains(&Value::Number(bytes));
    let lower = [
        (Knob::PipelineInFlightBytes, Value::Number(NEAR_CAPS.0)),
        (Knob::PipelineInFlightBeforeWaitBytes, Value::Number(NEAR_CAPS.1)),
    ];
    let lowered = |mut all: Move| {
        all.iter_mut().for_each(|form| form.extend(lower));
        all
    };
    let sizes = values(Knob::PipelineStageBytes).iter();
    let mut moves: Vec<Move> = sizes.clone().map(deepest).collect();
    if has(lower[0].0, NEAR_CAPS.0) && has(lower[1].0, NEAR_CAPS.1) {
        moves.extend(sizes.map(deepest).map(lowered));
    }
    for (all, before_wait) in CAPS {
        if has(Knob::PipelineInFlightBytes, all)
            && has(Knob::PipelineInFlightBeforeWaitBytes, before_wait)
        {
            moves.push(vec![vec![
                (Knob::PipelineInFlightBytes, Value::Number(all)),
                (Knob::PipelineInFlightBeforeWaitBytes, Value::Number(before_wait)),
            ]]);
        }
    }
    moves
}
