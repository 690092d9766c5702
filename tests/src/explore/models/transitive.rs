//! Shows what a flag-in-data hand-off does not order: everything but its own words.
//!
//! Each shape is a small program: workers, tasks, hand-offs. `verify` must refuse those that fail here and accept those that hold;
//! `tests/filetests/verify/formal` has them as programs.

use super::super::{Model, Op, Order, Until};
use super::payload::{Steps, wait, word};
use super::{Case, Unless};

/// The kind of a hand-off between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handoff {
    Counter,
    FlagInData,
}

/// `signal` and `wait` of a hand-off over `at`, once.
fn handoff(kind: Handoff, at: usize) -> (Vec<Op>, Vec<Op>) {
    match kind {
        Handoff::Counter => (
            vec![Op::Fence, Op::Add(at)],
            vec![Op::Poll(at, Order::Relaxed, Until::AtLeast(1)), Op::Fence],
        ),
        Handoff::FlagInData => (vec![Op::Write(at, Order::Relaxed, word(1))], vec![wait(at, 1)]),
    }
}

/// A worker stores a plain word (its part of the residual), then hands something else over; the reader loads the plain
/// word.
fn plain_word(kind: Handoff) -> Model {
    let mut m = Model::default();
    let (plain, at) = (m.word("residual"), m.word("handoff"));
    let (signal, waits) = handoff(kind, at);
    m.thread("writer", [vec![Op::Write(plain, Order::Relaxed, 5)], signal].concat());
    m.thread("reader", [waits, vec![Op::Read(plain, Order::Relaxed, 5)]].concat());
    m
}

/// The same over a third worker, which has acquired what the first released, and hands over by `kind`.
fn plain_word_over_three(kind: Handoff) -> Model {
    let mut m = Model::default();
    let (plain, counter, at) = (m.word("residual"), m.word("counter"), m.word("handoff"));
    let (first_signal, first_wait) = handoff(Handoff::Counter, counter);
    let (signal, waits) = handoff(kind, at);
    m.thread("writer", [vec![Op::Write(plain, Order::Relaxed, 5)], first_signal].concat());
    m.thread("between", [first_wait, signal].concat());
    m.thread("reader", [waits, vec![Op::Read(plain, Order::Relaxed, 5)]].concat());
    m
}

/// A row of the key/value cache, stored without its own signal, is loaded by another worker in the next step. In
/// between is the end of the step, which the storing worker reports by a tag alone, or by a counter.
fn cache_row(kind: Handoff) -> Model {
    let mut m = Model::default();
    let (row, partials) = (m.word("cache row"), m.word("partials"));
    let steps = Steps::new(&mut m, if kind == Handoff::Counter { 2 } else { 1 });
    let mut attends = vec![Op::Write(row, Order::Relaxed, 5)];
    attends.push(Op::Write(partials, Order::Relaxed, word(1)));
    if kind == Handoff::Counter {
        attends.extend(&steps.done(1)[..2]);
    }
    m.thread("attention", attends);
    m.thread(
        "next step's attention",
        [steps.done(1).to_vec(), vec![Op::Read(row, Order::Relaxed, 5)]].concat(),
    );
    let mut sample = vec![wait(partials, 1)];
    sample.extend(steps.sample(1));
    m.thread("sample", sample);
    m
}

/// Two tasks of one queue: the warps store the first one's output behind its last block barrier, and load the second one's input
/// before its first. `barrier`: the first signals or the second waits, or another task lies between.
fn neighbours(barrier: bool) -> Model {
    let mut m = Model::default();
    let plain = m.word("plain");
    let (mut first, mut second) = (vec![Op::Write(plain, Order::Relaxed, 5)], Vec::new());
    first.unless(!barrier, Op::Meet(0));
    second.unless(!barrier, Op::Meet(0));
    second.push(Op::Read(plain, Order::Relaxed, 5));
    m.thread("warp0", first);
    m.thread("warp1", second);
    m
}

/// The shapes.
#[must_use]
pub fn cases() -> Vec<Case> {
    use Handoff::{Counter, FlagInData};
    vec![
        Case::holds("plain word behind a counter", plain_word(Counter)),
        Case::fails(
            "plain word behind a flag-in-data word",
            plain_word(FlagInData),
            "reads 0 from residual",
        ),
        Case::holds("plain word behind two counters", plain_word_over_three(Counter)),
        Case::fails(
            "plain word behind a counter and a flag-in-data word",
            plain_word_over_three(FlagInData),
            "reads 0 from residual",
        ),
        Case::holds("cache row, the step ends with a counter", cache_row(Counter)),
        Case::fails(
            "cache row, the step ends with a flag-in-data word",
            cache_row(FlagInData),
            "reads 0 from cache row",
        ),
        Case::holds("neighbours in a queue with a block barrier", neighbours(true)),
        Case::fails("neighbours in a queue without one", neighbours(false), "reads 0 from plain"),
    ]
}
