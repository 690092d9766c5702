//! Switching programs: `Resident::load` and `switch`, `run_load_program`, `wait_action`, `adopt_program`.
//!
//! Programs are stored in places; there are two here. The host writes the next program into the place that is not
//! current, the poller announces it, and every worker adopts it; only then is the other place free. The model has two
//! workers of two threads each and three switches, so that each place is reused while a worker could still be reading
//! it.

use super::super::{Model, Op, Order, Until};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    RelaxedCommand,
    RelaxedTake,
    /// The next program is written before the switch has completed.
    EarlyLoad,
    /// `go` before the pointer.
    GoFirst,
    RelaxedGo,
    NoFenceAfterGo,
    NoMeetingAfterGo,
    /// Completed while a worker is still on the old program.
    PartialSwitch,
    /// The awaited count does not grow from switch to switch.
    CountOfOne,
    /// A worker counts itself before it has adopted.
    CountedEarly,
    /// A thread may still be reading when the other counts.
    NoMeetingBeforeCount,
    /// The poller completes without waiting.
    NotAwaited,
}

const WORKERS: u32 = 2;
const SWITCHES: u32 = 3;

/// The contents of the program table of a switch; memory starts with the first program's.
fn table(switch: u32) -> u32 {
    switch * 10
}

fn host(places: [usize; 2], command: usize, completed: usize, bug: Bug) -> Vec<Op> {
    let write = |i: u32| Op::Write(places[i as usize % 2], Order::Relaxed, table(i));
    let mut ops = vec![write(1)];
    for i in 1..=SWITCHES {
        let order = if bug == Bug::RelaxedCommand { Order::Relaxed } else { Order::Release };
        ops.push(Op::Write(command, order, i));
        let wait = Op::Poll(completed, Order::Acquire, Until::Equals(i));
        let next = (i < SWITCHES).then(|| write(i + 1));
        if bug == Bug::EarlyLoad {
            ops.extend(next);
            ops.push(wait);
        } else {
            ops.push(wait);
            ops.extend(next);
        }
    }
    ops
}

/// The poller. Words of the device: pointer, go, switched.
fn poller(
    [pointer, go, switched]: [usize; 3],
    command: usize,
    completed: usize,
    bug: Bug,
) -> Vec<Op> {
    let mut ops = Vec::new();
    for i in 1..=SWITCHES {
        let take = if bug == Bug::RelaxedTake { Order::Relaxed } else { Order::Acquire };
        ops.push(Op::Poll(command, take, Until::Equals(i)));
        let order = if bug == Bug::RelaxedGo { Order::Relaxed } else { Order::Release };
        let mut publish = [Op::Write(pointer, Order::Relaxed, i), Op::Write(go, order, i)];
        if bug == Bug::GoFirst {
            publish.reverse();
        }
        ops.extend(publish);
        let need = if bug == Bug::CountOfOne { WORKERS } else { i * WORKERS };
        let need = need - u32::from(bug == Bug::PartialSwitch);
        ops.unless(
            bug == Bug::NotAwaited,
            Op::Poll(switched, Order::Relaxed, Until::AtLeast(need)),
        );
        ops.extend([Op::Fence, Op::Write(completed, Order::Release, i)]);
    }
    ops
}

/// Thread 0 waits and counts. Thread 1 reads: the old program until then, the pointer, the new program.
fn worker(
    m: &mut Model,
    w: u32,
    places: [usize; 2],
    [pointer, go, switched]: [usize; 3],
    bug: Bug,
) {
    let (mut waits, mut reads) = (Vec::new(), Vec::new());
    for i in 1..=SWITCHES {
        let old = Op::Read(places[(i - 1) as usize % 2], Order::Relaxed, table(i - 1));
        let new = Op::Read(places[i as usize % 2], Order::Relaxed, table(i));
        let [halted, adopted] = [0, 1].map(|meeting| (w * 2 + meeting) as u8);
        waits.push(Op::Poll(go, Order::Relaxed, Until::AtLeast(i)));
        waits.unless(bug == Bug::NoFenceAfterGo, Op::Fence);
        if bug == Bug::CountedEarly {
            waits.push(Op::Add(switched));
        }
        waits.unless(bug == Bug::NoMeetingAfterGo, Op::Meet(halted));
        reads.push(old);
        reads.unless(bug == Bug::NoMeetingAfterGo, Op::Meet(halted));
        reads.extend([Op::Read(pointer, Order::Relaxed, i), new]);
        waits.unless(bug == Bug::NoMeetingBeforeCount, Op::Meet(adopted));
        reads.unless(bug == Bug::NoMeetingBeforeCount, Op::Meet(adopted));
        if bug != Bug::CountedEarly {
            waits.push(Op::Add(switched));
        }
    }
    m.thread(format!("worker{w}.0"), waits);
    m.thread(format!("worker{w}.1"), reads);
}

fn model(bug: Bug) -> Model {
    let mut m = Model::default();
    let places = [m.word("place 0"), m.word("place 1")];
    let (command, completed) = (m.word("command"), m.word("completed"));
    let words = ["pointer", "go", "switched"].map(|name| m.word(name));
    m.thread("host", host(places, command, completed, bug));
    m.thread("poller", poller(words, command, completed, bug));
    for w in 0..WORKERS {
        worker(&mut m, w, places, words, bug);
    }
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let case = |what: &str, bug, fails| Case::fails(format!("switch: {what}"), model(bug), fails);
    let (program, any) = ("from place", "reads");
    vec![
        Case::holds("switch: three programs in two places", model(Bug::None)),
        case("the command is published relaxed", Bug::RelaxedCommand, program),
        case("the command is taken relaxed", Bug::RelaxedTake, program),
        case("a place is written before the switch is over", Bug::EarlyLoad, program),
        case("go before the pointer", Bug::GoFirst, "from pointer"),
        case("go is published relaxed", Bug::RelaxedGo, any),
        case("no fence after go", Bug::NoFenceAfterGo, any),
        case("no block barrier after go", Bug::NoMeetingAfterGo, any),
        case("over while a worker is on the old program", Bug::PartialSwitch, any),
        case("the count does not grow", Bug::CountOfOne, any),
        case("a worker counts before it adopts", Bug::CountedEarly, any),
        case("no block barrier before the count", Bug::NoMeetingBeforeCount, any),
        case("nobody waits for the workers", Bug::NotAwaited, any),
    ]
}
