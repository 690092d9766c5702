//! The ring of stages: `loader_claim`, `loader_issue`, `cursor_land`, `cursor_next`, and their additions for keys and
//! values.

use super::super::{Model, Op, Order, Source, Until};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// Refills a stage without waiting until it is free.
    Overrun,
    /// Expects one arrival less than there are warps.
    PartialEmpty,
    /// The loader's first parity is inverted.
    LoaderParity,
    /// A warp's first parity is inverted: a wrap ahead.
    WarpParity,
    /// A warp frees stages that it does not multiply without having waited for their arrival.
    SkipsArrival,
    /// A warp frees the stage before it has read it.
    EarlyFree,
    /// Reads without waiting.
    NoArrival,
    /// The byte count is announced after the copy.
    LateExpect,
}

#[derive(Clone, Copy)]
struct Shape {
    stages: usize,
    chunks: usize,
    cap: usize,
    warps: usize,
}

/// Mirrors the loader's state (stage, parity, oldest, oldest_parity, lapped), which does not depend on timing.
fn loader(s: Shape, bug: Bug, stage: &[usize], full: &[usize], empty: &[usize]) -> Vec<Op> {
    let mut ops = Vec::new();
    let (mut oldest, mut in_flight) = (0, 0);
    for chunk in 0..s.chunks {
        let (at, wrap) = (chunk % s.stages, chunk / s.stages);
        if wrap > 0 {
            let parity = (wrap - 1 + usize::from(bug == Bug::LoaderParity)) as u8 % 2;
            ops.unless(bug == Bug::Overrun, Op::Land(empty[at], parity));
        }
        while in_flight >= s.cap {
            ops.push(Op::Land(full[oldest % s.stages], (oldest / s.stages) as u8 % 2));
            oldest += 1;
            in_flight -= 1;
        }
        let copy = Op::Copy(Source::Value(chunk as u32 + 1), stage[at], full[at]);
        if bug == Bug::LateExpect {
            ops.extend([copy, Op::Expect(full[at])]);
        } else {
            ops.extend([Op::Expect(full[at]), copy]);
        }
        in_flight += 1;
    }
    ops
}

fn ring(s: Shape, bug: Bug) -> Model {
    let mut m = Model::default();
    let stage: Vec<_> = (0..s.stages).map(|i| m.word(format!("stage{i}"))).collect();
    let full: Vec<_> = (0..s.stages).map(|i| m.barrier(format!("full{i}"), 1)).collect();
    let warps = s.warps as u8 - u8::from(bug == Bug::PartialEmpty);
    let empty: Vec<_> = (0..s.stages).map(|i| m.barrier(format!("empty{i}"), warps)).collect();
    let ops = loader(s, bug, &stage, &full, &empty);
    m.thread("loader", ops);
    for warp in 0..s.warps {
        let mut ops = Vec::new();
        for chunk in 0..s.chunks {
            let (at, wrap) = (chunk % s.stages, chunk / s.stages);
            let ahead = usize::from(bug == Bug::WarpParity && warp == 0);
            let skips = bug == Bug::SkipsArrival && warp == 1;
            ops.unless(
                skips || bug == Bug::NoArrival,
                Op::Land(full[at], (wrap + ahead) as u8 % 2),
            );
            let read = Op::Read(stage[at], Order::Relaxed, chunk as u32 + 1);
            if bug == Bug::EarlyFree {
                ops.extend([Op::Arrive(empty[at]), read]);
            } else {
                ops.unless(skips, read);
                ops.push(Op::Arrive(empty[at]));
            }
        }
        m.thread(format!("warp{warp}"), ops);
    }
    m
}

/// A bug in the handling of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeysBug {
    None,
    /// `loader_keys` does not wait for the step.
    NoBegun,
    /// No fence between the read of the step word and the announcement to the loader.
    NoBlockFence,
    /// No `copies_see_stores`.
    NoProxyFence,
    /// No `stage_given_back`.
    NotGivenBack,
}

/// A worker stores a row of the cache and ends the step. Another worker begins the next step and announces it to its
/// loader, which copies the row. A warp replaces the row in the stage by its own, frees the stage, and the next copy
/// arrives.
fn keys(bug: KeysBug) -> Model {
    let mut m = Model::default();
    let (row, go, started, stage) =
        (m.word("cache row"), m.word("go"), m.word("begun"), m.word("stage"));
    let (full, empty) = (m.barrier("full", 1), m.barrier("empty", 1));
    m.thread(
        "step before",
        vec![Op::Write(row, Order::Relaxed, 5), Op::Write(go, Order::Release, 2)],
    );
    let mut begins = vec![Op::Poll(go, Order::Relaxed, Until::AtLeast(2)), Op::Fence];
    if bug == KeysBug::NoBlockFence {
        begins.pop();
    }
    begins.push(Op::Write(started, Order::Relaxed, 1));
    m.thread("thread0", begins);
    let mut loads = Vec::new();
    if bug != KeysBug::NoBegun {
        loads.extend([Op::Poll(started, Order::Relaxed, Until::AtLeast(1)), Op::Fence]);
    }
    loads.unless(bug == KeysBug::NoProxyFence, Op::ProxyFence);
    loads.extend([Op::Expect(full), Op::Copy(Source::Word(row), stage, full)]);
    loads.extend([Op::Land(empty, 0), Op::Expect(full), Op::Copy(Source::Value(9), stage, full)]);
    m.thread("loader", loads);
    let mut warp = vec![
        Op::Land(full, 0),
        Op::Read(stage, Order::Relaxed, 5),
        Op::Write(stage, Order::Relaxed, 6),
    ];
    warp.unless(bug == KeysBug::NotGivenBack, Op::ProxyFence);
    warp.extend([Op::Arrive(empty), Op::Land(full, 1), Op::Read(stage, Order::Relaxed, 9)]);
    m.thread("warp", warp);
    m
}

/// The ring and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let of = |stages, chunks, cap, warps| Shape { stages, chunks, cap, warps };
    let two = of(2, 6, 2, 2);
    let mut cases: Vec<Case> = [
        of(1, 4, 1, 2),
        of(2, 10, 1, 2),
        two,
        of(3, 10, 3, 2),
        of(2, 7, 2, 3),
        of(4, 13, 3, 2),
        of(4, 9, 2, 1),
    ]
    .into_iter()
    .map(|s| {
        let name = format!(
            "stages: {} of them, cap {}, {} chunks, {} warps",
            s.stages, s.cap, s.chunks, s.warps
        );
        Case::holds(name, ring(s, Bug::None))
    })
    .collect();
    let reads = "should read";
    cases.extend([
        Case::fails(
            "stages: a cap of one more than there are",
            ring(of(2, 6, 3, 2), Bug::None),
            "nobody goes on",
        ),
        Case::fails("stages: no wait for a free stage", ring(two, Bug::Overrun), reads),
        Case::fails(
            "stages: no wait for a free stage, slow copies aside",
            ring(of(2, 6, 1, 2), Bug::Overrun),
            reads,
        ),
        Case::fails("stages: one arrival less frees a stage", ring(two, Bug::PartialEmpty), reads),
        Case::fails(
            "stages: the loader waits with the other parity",
            ring(two, Bug::LoaderParity),
            reads,
        ),
        Case::fails("stages: a warp's parity is a wrap ahead", ring(two, Bug::WarpParity), reads),
        Case::fails(
            "stages: a warp frees what it has not seen land",
            ring(two, Bug::SkipsArrival),
            reads,
        ),
        Case::fails("stages: freed before it is read", ring(two, Bug::EarlyFree), reads),
        Case::fails("stages: read before it has arrived", ring(two, Bug::NoArrival), reads),
        Case::fails(
            "stages: announced behind the copy",
            ring(two, Bug::LateExpect),
            "expects none",
        ),
    ]);
    cases.extend(keys_cases());
    cases
}

fn keys_cases() -> Vec<Case> {
    vec![
        Case::holds("keys: as they are", keys(KeysBug::None)),
        Case::fails(
            "keys: copied before the step has begun",
            keys(KeysBug::NoBegun),
            "reads 0 from stage",
        ),
        Case::fails(
            "keys: no fence before the loader is told",
            keys(KeysBug::NoBlockFence),
            "reads 0 from stage",
        ),
        Case::fails(
            "keys: no proxy fence before the copy",
            keys(KeysBug::NoProxyFence),
            "reads 0 from stage",
        ),
        Case::fails(
            "keys: the stage is not given back to the copies",
            keys(KeysBug::NotGivenBack),
            "should read 9",
        ),
    ]
}
