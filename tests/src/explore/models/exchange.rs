//! The end of a step on two devices: each device's `sample` stores its best token to the other, and starts no next step
//! before it has the other's.
//!
//! A worker of device 1 stores a replicated word to device 0 in every step, and a worker of device 0 waits for it there.
//! Counters and step words are each device's own, and so is the scope of their fences. At the end the host, which only
//! device 0 answers, reads the logits of device 1. `exchange_best` has fences of the system on both sides.
//!
//! A sampled step (`exchange_gather`, `exchange_token`) ends by way of device 0: a helper of its sampler reads the logits
//! of device 1, which starts its next step when it has the token.
//!
//! In a batch each sequence is exchanged by a thread of its own, between two meetings of the worker's threads: one after the
//! first thread has waited for the counters, one before it starts the next step.

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
    /// Device 0 samples before it has the other's candidate.
    DoesNotGather,
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

/// `sample` of a device for another sequence than the first: the first thread, and the one that exchanges. `meet`: the
/// words by which they meet.
fn of_batch(bug: Bug, steps: &Steps, [theirs, mine]: [usize; 2], meet: [usize; 2]) -> [Vec<Op>; 2] {
    let (mut first, mut other) = (Vec::new(), Vec::new());
    for epoch in 1..=STEPS {
        let [counters, fence, go] = steps.sample(epoch);
        let met = |at| Op::Poll(at, Order::Acquire, Until::AtLeast(epoch));
        first.extend([counters, fence, Op::Write(meet[0], Order::Release, epoch)]);
        first.extend([met(meet[1]), go]);
        other.push(met(meet[0]));
        let release = if bug == Bug::NarrowRelease { Op::Fence } else { Op::SystemFence };
        other.unless(bug == Bug::NoRelease, release);
        other.push(Op::Write(theirs, Order::Relaxed, epoch));
        let taken = Op::Poll(mine, Order::Relaxed, Until::AtLeast(epoch));
        other.unless(bug == Bug::DoesNotWait, taken);
        let acquire = if bug == Bug::NarrowAcquire { Op::Fence } else { Op::SystemFence };
        other.unless(bug == Bug::NoAcquire, acquire);
        other.push(Op::Write(meet[1], Order::Release, epoch));
    }
    [first, other]
}

/// A batch: the steps of [`model`], in which threads of their own exchange.
fn batch(bug: Bug) -> Model {
    let mut m = Model::default();
    let (replica, logits) = (m.word("replica"), m.word("logits"));
    let (slot0, slot1) = (m.word("slot of 0"), m.word("slot of 1"));
    let [steps0, steps1] = [Steps::new(&mut m, 1), Steps::new(&mut m, 1)];
    let [meet0, meet1] = [0, 1].map(|_| [m.word("meet"), m.word("met")]);
    let (mut reader, mut writer) = (Vec::new(), Vec::new());
    for epoch in 1..=STEPS {
        reader.push(wait(replica, epoch));
        writer.push(Op::Write(replica, Order::Relaxed, word(epoch)));
        writer.unless(epoch < STEPS, Op::Write(logits, Order::Relaxed, 5));
        reader.extend(steps0.done(epoch));
        writer.extend(steps1.done(epoch));
    }
    reader.push(Op::Read(logits, Order::Relaxed, 5));
    m.thread_on(0, "worker of 0, then the host", reader);
    m.thread_on(1, "worker of 1", writer);
    for (device, ops) in [
        (0, of_batch(bug, &steps0, [slot0, slot1], meet0)),
        (1, of_batch(bug, &steps1, [slot1, slot0], meet1)),
    ] {
        let [first, other] = ops;
        m.thread_on(device, "first thread of sample", first);
        m.thread_on(device, "thread of a sequence", other);
    }
    m
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

/// `sample` of device 0 in a sampled step: it takes the candidate of device 1, has its helper read the logits, and stores
/// the token to device 1.
fn sampler(bug: Bug, steps: &Steps, [candidate, ask, done, token]: [usize; 4]) -> Vec<Op> {
    let mut ops = Vec::new();
    for epoch in 1..=STEPS {
        let [counters, fence, go] = steps.sample(epoch);
        ops.extend([counters, fence]); // wait_counter
        let taken = Op::Poll(candidate, Order::Relaxed, Until::AtLeast(epoch));
        ops.unless(bug == Bug::DoesNotGather, taken);
        let acquire = if bug == Bug::NarrowAcquire { Op::Fence } else { Op::SystemFence };
        ops.unless(bug == Bug::NoAcquire, acquire);
        ops.push(Op::Write(ask, Order::Release, epoch)); // sampler_ask
        ops.extend([Op::Poll(done, Order::Relaxed, Until::AtLeast(epoch)), Op::Fence]);
        ops.extend([Op::SystemFence, Op::Write(token, Order::Relaxed, epoch), go]);
    }
    ops
}

/// `sample` of device 1 in a sampled step.
fn sampled(bug: Bug, steps: &Steps, [candidate, token]: [usize; 2]) -> Vec<Op> {
    let mut ops = Vec::new();
    for epoch in 1..=STEPS {
        let [counters, fence, go] = steps.sample(epoch);
        ops.extend([counters, fence]); // wait_counter
        let release = if bug == Bug::NarrowRelease { Op::Fence } else { Op::SystemFence };
        ops.unless(bug == Bug::NoRelease, release);
        ops.push(Op::Write(candidate, Order::Relaxed, epoch));
        let taken = Op::Poll(token, Order::Relaxed, Until::AtLeast(epoch));
        ops.unless(bug == Bug::DoesNotWait, taken);
        ops.extend([Op::SystemFence, go]);
    }
    ops
}

fn sampling(bug: Bug) -> Model {
    let mut m = Model::default();
    let (logits, candidate, token) = (m.word("logits"), m.word("candidate"), m.word("token"));
    let (ask, done) = (m.word("ask"), m.word("done"));
    let [steps0, steps1] = [Steps::new(&mut m, 1), Steps::new(&mut m, 1)];
    let (mut helper, mut writer) = (Vec::new(), Vec::new());
    for epoch in 1..=STEPS {
        let [fence, arrives, begins, after] = steps0.done(epoch);
        helper.extend([fence, arrives]);
        helper.extend([Op::Poll(ask, Order::Relaxed, Until::AtLeast(epoch)), Op::Fence]);
        helper.push(Op::Read(logits, Order::Relaxed, epoch));
        helper.extend([Op::Fence, Op::Add(done), begins, after]);
        writer.push(Op::Write(logits, Order::Relaxed, epoch));
        writer.extend(steps1.done(epoch));
    }
    m.thread_on(0, "helper of 0", helper);
    m.thread_on(1, "worker of 1", writer);
    m.thread_on(0, "sample of 0", sampler(bug, &steps0, [candidate, ask, done, token]));
    m.thread_on(1, "sample of 1", sampled(bug, &steps1, [candidate, token]));
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
        Case::holds("batch: as designed, two steps", batch(Bug::None)),
        Case::fails("batch: a device does not wait", batch(Bug::DoesNotWait), "replica"),
        Case::fails("batch: no release", batch(Bug::NoRelease), lost),
        Case::fails("batch: released to its own GPU", batch(Bug::NarrowRelease), lost),
        Case::fails("batch: no acquire", batch(Bug::NoAcquire), lost),
        Case::fails("batch: acquired from its own GPU", batch(Bug::NarrowAcquire), lost),
        Case::holds("sampling: as designed, two steps", sampling(Bug::None)),
        Case::fails("sampling: no candidate of another", sampling(Bug::DoesNotGather), "logits"),
        Case::fails("sampling: a device does not wait", sampling(Bug::DoesNotWait), "logits"),
        Case::fails("sampling: no release", sampling(Bug::NoRelease), "logits"),
        Case::fails("sampling: released to its own GPU", sampling(Bug::NarrowRelease), "logits"),
        Case::fails("sampling: no acquire", sampling(Bug::NoAcquire), "logits"),
        Case::fails("sampling: acquired from its own GPU", sampling(Bug::NarrowAcquire), "logits"),
        Case::holds("action for another device", action(false)),
        Case::fails("action for another device: a narrow fence", action(true), "from token"),
    ]
}
