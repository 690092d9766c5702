//! The host ring: `RingHost::publish` and `poll_completion` with `poller_run` and `post_completion`, over several wraps
//! of a ring of three, and the token that the sampling worker stores in host memory.

use super::super::{Model, Op, Order, Until};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    RelaxedPublish,
    RelaxedTake,
    SequenceFirst,
    /// Publishes although the ring is full.
    Overrun,
    /// The sequence word only tells that there is an entry, not which wrap.
    NoLap,
    RelaxedCompletion,
    RelaxedCompletionTake,
    CompletionFirst,
}

const ENTRIES: usize = 3;
const COMMANDS: usize = 10;

/// The payload of command `i`: nonzero, and different each time.
fn value(i: usize) -> u32 {
    i as u32 + 1
}

fn words(m: &mut Model, name: &str) -> Vec<usize> {
    (0..ENTRIES).map(|i| m.word(format!("{name}{i}"))).collect()
}

/// Payload, then sequence.
fn put(ops: &mut Vec<Op>, payload: usize, sequence: usize, i: usize, bug: [bool; 3]) {
    let [relaxed, first, no_lap] = bug;
    let order = if relaxed { Order::Relaxed } else { Order::Release };
    let announce = Op::Write(sequence, order, if no_lap { 1 } else { value(i) });
    let store = Op::Write(payload, Order::Relaxed, value(i) * 10);
    ops.extend(if first { [announce, store] } else { [store, announce] });
}

/// Sequence, then payload.
fn take(ops: &mut Vec<Op>, payload: usize, sequence: usize, i: usize, bug: [bool; 2]) {
    let [relaxed, no_lap] = bug;
    let order = if relaxed { Order::Relaxed } else { Order::Acquire };
    ops.push(Op::Poll(sequence, order, Until::Equals(if no_lap { 1 } else { value(i) })));
    ops.push(Op::Read(payload, Order::Relaxed, value(i) * 10));
}

fn ring(bug: Bug) -> Model {
    let mut m = Model::default();
    let (command, published) = (words(&mut m, "command"), words(&mut m, "published"));
    let (answer, completed) = (words(&mut m, "answer"), words(&mut m, "completed"));
    let is = |b: Bug| bug == b;
    let (mut host, mut device) = (Vec::new(), Vec::new());
    let window = ENTRIES + usize::from(bug == Bug::Overrun);
    for i in 0..COMMANDS + window {
        if let Some(oldest) = i.checked_sub(window) {
            let (e, wrong) = (oldest % ENTRIES, [is(Bug::RelaxedCompletionTake), false]);
            take(&mut host, answer[e], completed[e], oldest, wrong);
        }
        if i < COMMANDS {
            let e = i % ENTRIES;
            let wrong = [is(Bug::RelaxedPublish), is(Bug::SequenceFirst), is(Bug::NoLap)];
            put(&mut host, command[e], published[e], i, wrong);
        }
    }
    for i in 0..COMMANDS {
        let e = i % ENTRIES;
        take(&mut device, command[e], published[e], i, [is(Bug::RelaxedTake), is(Bug::NoLap)]);
        let wrong = [is(Bug::RelaxedCompletion), is(Bug::CompletionFirst), false];
        put(&mut device, answer[e], completed[e], i, wrong);
    }
    m.thread("host", host);
    m.thread("poller", device);
    m
}

/// `finish_step`: stores the token in host memory, then `done`, which the poller forwards. `[publish, fence]` may be
/// missing: the release of the worker, the acquire of the poller.
fn token(relaxed_done: bool, no_fence: bool) -> Model {
    let mut m = Model::default();
    let (token, done, completed) = (m.word("token"), m.word("done"), m.word("completed"));
    let mut worker = vec![Op::Write(token, Order::Relaxed, 7)];
    worker.unless(relaxed_done, Op::Fence);
    let order = if relaxed_done { Order::Relaxed } else { Order::Release };
    worker.push(Op::Write(done, order, 1));
    m.thread("sample", worker);
    let mut poller = vec![Op::Poll(done, Order::Relaxed, Until::AtLeast(1))];
    poller.unless(no_fence, Op::Fence);
    poller.push(Op::Write(completed, Order::Release, 1));
    m.thread("poller", poller);
    let host =
        [Op::Poll(completed, Order::Acquire, Until::Equals(1)), Op::Read(token, Order::Relaxed, 7)];
    m.thread("host", host.to_vec());
    m
}

/// The ring and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let command = "from command";
    let answer = "from answer";
    vec![
        Case::holds("host ring: three entries, ten commands", ring(Bug::None)),
        Case::fails("host ring: published relaxed", ring(Bug::RelaxedPublish), command),
        Case::fails("host ring: taken relaxed", ring(Bug::RelaxedTake), command),
        Case::fails("host ring: the sequence before the words", ring(Bug::SequenceFirst), command),
        Case::fails("host ring: published when full", ring(Bug::Overrun), command),
        Case::fails("host ring: a sequence without laps", ring(Bug::NoLap), command),
        Case::fails("host ring: completed relaxed", ring(Bug::RelaxedCompletion), answer),
        Case::fails(
            "host ring: completion taken relaxed",
            ring(Bug::RelaxedCompletionTake),
            answer,
        ),
        Case::fails("host ring: completed before the words", ring(Bug::CompletionFirst), answer),
        Case::holds("host ring: the token before the completion", token(false, false)),
        Case::fails(
            "host ring: the worker does not release the token",
            token(true, false),
            "from token",
        ),
        Case::fails(
            "host ring: the poller passes on without a fence",
            token(false, true),
            "from token",
        ),
    ]
}
