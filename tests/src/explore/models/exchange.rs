//! The end of a step on two devices: each device's `sample` stores its best token to the other, and starts no next step
//! before it has the other's.
//!
//! A worker of device 1 stores a replicated word to device 0 in every step, and a worker of device 0 waits for it there.
//! Counters and step words are each device's own. At the end the host, which only device 0 answers, reads the logits of
//! device 1. Stores to the other device, their polls, and the fences beside them have system scope.

use super::super::{Model, Op, Order, Until};
use super::payload::{Steps, wait, word};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// A device starts its next step as soon as it has ended this one.
    DoesNotWait,
    /// The best token is stored without releasing what the device's counters released to `sample`.
    NoRelease,
    /// The other's best token is polled, and nothing acquired.
    NoAcquire,
}

const STEPS: u32 = 2;

/// `sample` of a device: its slot on the other device, and the other's slot here.
fn sample(bug: Bug, steps: &Steps, [theirs, mine]: [usize; 2]) -> Vec<Op> {
    let mut ops = Vec::new();
    for epoch in 1..=STEPS {
        let [counters, fence, go] = steps.sample(epoch);
        ops.push(counters);
        ops.unless(bug == Bug::NoRelease, fence);
        ops.push(Op::Write(theirs, Order::Relaxed, epoch));
        let other = Op::Poll(mine, Order::Relaxed, Until::AtLeast(epoch));
        ops.unless(bug == Bug::DoesNotWait, other);
        ops.unless(bug == Bug::NoAcquire, Op::Fence);
        ops.push(go);
    }
    ops
}

fn model(bug: Bug) -> Model {
    let mut m = Model::default();
    let (replica, logits) = (m.word("replica"), m.word("logits"));
    let (slot0, slot1) = (m.word("slot of 0"), m.word("slot of 1"));
    let [steps0, steps1] = [Steps::new(&mut m, 1), Steps::new(&mut m, 1)];
    let (mut reader, mut writer) = (Vec::new(), Vec::new());
    for epoch in 1..=STEPS {
        reader.push(wait(replica, epoch));
        writer.push(Op::Write(replica, Order::Relaxed, word(epoch)));
        writer.unless(epoch < STEPS, Op::Write(logits, Order::Relaxed, 5));
        reader.extend(steps0.done(epoch));
        writer.extend(steps1.done(epoch));
    }
    // The last `go` stands for the answer of device 0.
    reader.push(Op::Read(logits, Order::Relaxed, 5));
    m.thread("worker of 0, then the host", reader);
    m.thread("worker of 1", writer);
    m.thread("sample of 0", sample(bug, &steps0, [slot0, slot1]));
    m.thread("sample of 1", sample(bug, &steps1, [slot1, slot0]));
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    vec![
        Case::holds("exchange: as designed, two steps", model(Bug::None)),
        Case::fails("exchange: a device does not wait", model(Bug::DoesNotWait), "replica"),
        Case::fails("exchange: no release", model(Bug::NoRelease), "reads 0 from logits"),
        Case::fails("exchange: no acquire", model(Bug::NoAcquire), "reads 0 from logits"),
    ]
}
