//! Streamed weight loading while the kernel runs: `Stream::write_value`, `weight_stream_wait`, `poller_wait_embedding`,
//! `poller_abandoned`.
//!
//! Two pieces arrive one after the other and `watermark` counts them; a loader copies each into a stage once it has
//! arrived. Or a read fails: waiting threads are released, and the poller, which checks after the step, must not accept
//! the answer. Then the rest arrives after all.

use super::super::{Model, Op, Order, Source, Until, Word};
use super::{Case, Unless};

/// Values in place of a count. `ABANDONED`: no more will come; `ALL`: everything has arrived.
const ABANDONED: u32 = 8;
const ALL: u32 = 9;

/// A bug in the arrival of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The word is written without a preceding fence (`CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`).
    NoBarrier,
    /// The word is written before the copy.
    SaidFirst,
    /// The loader does not wait.
    NoWait,
    /// The loader waits for the piece before its own.
    OneShort,
    /// No `acquire_release_fence` after the wait.
    NoAcquire,
    /// No `copies_see_stores` after it.
    NoProxyFence,
    /// The loader caches "the first has arrived" as "all have arrived".
    KeepsTooMuch,
}

/// The copy stream brings two pieces; the loader needs both, and the second one twice (a step later it does not check
/// again).
fn lands(bug: Bug) -> Model {
    let mut m = Model::default();
    let pieces = [m.word("piece 1"), m.word("piece 2")];
    let watermark = m.word("arrived");
    let stages: Vec<Word> = (0..3).map(|i| m.word(format!("stage{i}"))).collect();
    let full: Vec<_> = (0..3).map(|i| m.barrier(format!("full{i}"), 1)).collect();
    let mut copies = Vec::new();
    for (piece, count) in pieces.iter().zip(1..) {
        let copy = Op::Write(*piece, Order::Relaxed, 10 + count);
        let said = Op::Write(watermark, Order::Relaxed, count);
        let first = bug == Bug::SaidFirst;
        copies.push(if first { said } else { copy });
        copies.unless(bug == Bug::NoBarrier, Op::Fence);
        copies.push(if first { copy } else { said });
    }
    m.thread("copy stream", copies);
    let mut loader = Vec::new();
    for (at, piece) in [0, 1, 1].into_iter().enumerate() {
        let need = piece as u32 + 1 - u32::from(bug == Bug::OneShort);
        let asks = at < 2 && !(at == 1 && bug == Bug::KeepsTooMuch) && bug != Bug::NoWait;
        if asks {
            loader.push(Op::Poll(watermark, Order::Relaxed, Until::AtLeast(need)));
            loader.unless(bug == Bug::NoAcquire, Op::Fence);
            loader.unless(bug == Bug::NoProxyFence, Op::ProxyFence);
        }
        loader.extend([
            Op::Expect(full[at]),
            Op::Copy(Source::Word(pieces[piece]), stages[at], full[at]),
        ]);
    }
    m.thread("loader", loader);
    let mut warp = Vec::new();
    for (at, value) in [11, 12, 12].into_iter().enumerate() {
        warp.extend([Op::Land(full[at], 0), Op::Read(stages[at], Order::Relaxed, value)]);
    }
    m.thread("warp", warp);
    m
}

/// A bug in the handling of a failed read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultBug {
    None,
    /// The failure is not reported.
    NobodyTold,
    /// The loader continues without a fence: its view is not passed on with the stage.
    NoFence,
    /// The poller checks before the step instead of after it.
    LooksBefore,
    /// The poller's check after the step is not ordered after it.
    NoAcquire,
    /// The loader runs ahead into the next step while the rest is abandoned.
    RunsAhead,
    /// The rest arrives, but the word is written first.
    SaidFirst,
}

/// A read fails in the first step. The host receives the fault, loads the rest and sends the second step, whose stage
/// must hold the arrived data.
fn fails(bug: FaultBug) -> Model {
    let mut m = Model::default();
    let (piece, watermark) = (m.word("piece"), m.word("arrived"));
    let (done, answer, go) = (m.word("done"), m.word("answer"), m.word("go"));
    let stages = [m.word("stage0"), m.word("stage1")];
    let full = [m.barrier("full0", 1), m.barrier("full1", 1)];
    let mut host = vec![Op::Write(watermark, Order::Relaxed, 1)];
    host.unless(bug == FaultBug::NobodyTold, Op::Write(watermark, Order::Relaxed, ABANDONED));
    // Only a fault lets it continue; a token without data would be another answer.
    host.push(Op::PollFor(answer, Until::AtLeast(1), 2));
    let rest = [
        Op::Write(piece, Order::Relaxed, 11),
        Op::Fence,
        Op::Write(watermark, Order::Relaxed, ALL),
    ];
    let order = if bug == FaultBug::SaidFirst { [2, 1, 0] } else { [0, 1, 2] };
    host.extend(order.map(|i| rest[i]));
    host.push(Op::Write(go, Order::Release, 1));
    m.thread("host", host);
    let mut loader = Vec::new();
    let enough = Until::AtLeast(ABANDONED);
    let ahead = if bug == FaultBug::RunsAhead { enough } else { Until::Equals(ALL) };
    for (at, until) in [enough, ahead].into_iter().enumerate() {
        loader.push(Op::Poll(watermark, Order::Relaxed, until));
        loader.unless(bug == FaultBug::NoFence, Op::Fence);
        loader.push(Op::ProxyFence);
        loader.extend([Op::Expect(full[at]), Op::Copy(Source::Word(piece), stages[at], full[at])]);
    }
    m.thread("loader", loader);
    m.thread(
        "workers",
        vec![
            Op::Land(full[0], 0),
            Op::Write(done, Order::Release, 1),
            Op::Poll(go, Order::Relaxed, Until::AtLeast(1)),
            Op::Fence,
            Op::Land(full[1], 0),
            Op::Read(stages[1], Order::Relaxed, 11),
        ],
    );
    // The poller posts a fault (2) if it reads that the rest was abandoned. Reading anything else there is the failure
    // under test.
    let wait = [Op::Poll(done, Order::Relaxed, Until::AtLeast(1)), Op::Fence];
    let look = Op::Read(watermark, Order::Relaxed, ABANDONED);
    let mut poller = Vec::new();
    if bug == FaultBug::LooksBefore {
        poller.push(look);
    }
    poller.extend(wait);
    if bug == FaultBug::NoAcquire {
        poller.pop();
    }
    poller.unless(bug == FaultBug::LooksBefore, look);
    poller.push(Op::Write(answer, Order::Release, 2));
    m.thread("poller", poller);
    m
}

/// All models, with their expected results.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut all = vec![Case::holds("weight streaming", lands(Bug::None))];
    for bug in [
        Bug::NoBarrier,
        Bug::SaidFirst,
        Bug::NoWait,
        Bug::OneShort,
        Bug::NoAcquire,
        Bug::NoProxyFence,
        Bug::KeepsTooMuch,
    ] {
        all.push(Case::fails(format!("weight streaming: {bug:?}"), lands(bug), "stage"));
    }
    all.push(Case::holds("weight streaming: a read fails", fails(FaultBug::None)));
    for (bug, words) in [
        (FaultBug::NobodyTold, "nobody goes on"),
        (FaultBug::NoFence, "stage1"),
        (FaultBug::LooksBefore, "arrived"),
        (FaultBug::NoAcquire, "arrived"),
        (FaultBug::RunsAhead, "stage1"),
        (FaultBug::SaidFirst, "stage1"),
    ] {
        all.push(Case::fails(
            format!("weight streaming: a read fails: {bug:?}"),
            fails(bug),
            words,
        ));
    }
    all
}
