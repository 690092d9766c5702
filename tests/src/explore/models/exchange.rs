//! The end of a step on two devices: each device's `sample` stores its best token to the other, and starts no next step
//! before it has the other's.
//!
//! A worker of device 1 stores a replicated word to device 0 in every step, and a worker of device 0 waits for it there.
//! Counters and step words are each device's own, and so is the scope of their fences. At the end the host, which only
//! device 0 answers, reads the logits of device 1. `exchange_best` has fences of the system on both sides.

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
    /// It is released to its own device only: a fence of the GPU.
    NarrowRelease,
    /// The other's best token is polled, and nothing acquired.
    NoAcquire,
    /// What its own device released is acquired only: a fence of the GPU.
    NarrowAcquire,
}

const STEPS: u32 = 2;

/// `sample` of a device: its slot on the other device, and the other's slot here.
fn sample(bug: Bug, steps: &Steps, [theirs, mine]: [usize; 2]) -> Vec<Op> {
    let mut ops = Vec::new();
    for epoch in 1..=STEPS {
        let [counters, fence, go] = steps.sample(epoch);
        ops.extend([counters, fence]); // wait_counter
        let release = if bug == Bug::NarrowRelease { Op::Fence } else { Op::SystemFence };
        ops.unless(bug == Bug::NoRelease, release);
        ops.push(Op::Write(theirs, Order::Relaxed, epoch));
        let other = Op::Poll(mine, Order::Relaxed, Until::AtLeast(epoch));
        ops.unless(bug == Bug::DoesNotWait, other);
        let acquire = if bug == Bug::NarrowAcquire { Op::Fence } else { Op::SystemFence };
        ops.unless(bug == Bug::NoAcquire, acquire);
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
    m.thread_on(0, "worker of 0, then the host", reader);
    m.thread_on(1, "worker of 1", writer);
    m.thread_on(0, "sample of 0", sample(bug, &steps0, [slot0, slot1]));
    m.thread_on(1, "sample of 1", sample(bug, &steps1, [slot1, slot0]));
    m
}

/// An action that the poller of device 0 publishes to a worker of device 1: `devices_publish` and `wait_action`.
fn action(narrow: bool) -> Model {
    let mut m = Model::default();
    let (token, go) = (m.word("token"), m.word("go"));
    let poller = [Op::Write(token, Order::Relaxed, 7), Op::Write(go, Order::Release, 1)];
    let fence = if narrow { Op::Fence } else { Op::SystemFence };
    let polled = Op::Poll(go, Order::Relaxed, Until::AtLeast(1));
    m.thread_on(0, "poller of 0", poller.to_vec());
    m.thread_on(1, "worker of 1", vec![polled, fence, Op::Read(token, Order::Relaxed, 7)]);
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let lost = "reads 0 from logits";
    vec![
        Case::holds("exchange: as designed, two steps", model(Bug::None)),
        Case::fails("exchange: a device does not wait", model(Bug::DoesNotWait), "replica"),
        Case::fails("exchange: no release", model(Bug::NoRelease), lost),
        Case::fails("exchange: released to its own GPU", model(Bug::NarrowRelease), lost),
        Case::fails("exchange: no acquire", model(Bug::NoAcquire), lost),
        Case::fails("exchange: acquired from its own GPU", model(Bug::NarrowAcquire), lost),
        Case::holds("action for another device", action(false)),
        Case::fails("action for another device: a narrow fence", action(true), "from token"),
    ]
}
