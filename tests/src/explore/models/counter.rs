//! Counters and the step word: `counter_signal`, `wait_counter`, `word_publish`, `wait_action` of the device.
//!
//! Three producers of two threads each store, meet, and signal. A consumer of two threads waits, meets, and loads; then
//! it publishes the next step, in which all is repeated over the same words.

use super::super::{Model, Op, Order, Until};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    NoReleaseFence,
    NoAcquireFence,
    PartialWait,
    NoMeetingBeforeSignal,
    NoMeetingAfterWait,
    CountWithoutEpoch,
    SignalBeforeStores,
    RelaxedStep,
    StepBeforeReads,
}

const EPOCHS: u32 = 3;
const PRODUCERS: u32 = 3;

fn model(bug: Bug) -> Model {
    let mut m = Model::default();
    let data: Vec<_> = (0..PRODUCERS).map(|p| m.word(format!("data{p}"))).collect();
    let (counter, token, go) = (m.word("counter"), m.word("token"), m.word("go"));
    for (p, &word) in (0_u8..).zip(&data) {
        let (mut signals, mut stores) = (Vec::new(), Vec::new());
        for epoch in 1..=EPOCHS {
            let (begin, end) = (2 * p, 2 * p + 1);
            if epoch > 1 {
                // wait_action
                signals.push(Op::Poll(go, Order::Relaxed, Until::AtLeast(epoch)));
                signals.push(Op::Fence);
                signals.push(Op::Meet(begin));
                stores.extend([Op::Meet(begin), Op::Read(token, Order::Relaxed, epoch)]);
            }
            let early = bug == Bug::SignalBeforeStores;
            if early {
                signals.extend([Op::Fence, Op::Add(counter)]);
            }
            stores.push(Op::Write(word, Order::Relaxed, epoch));
            signals.unless(bug == Bug::NoMeetingBeforeSignal, Op::Meet(end));
            stores.unless(bug == Bug::NoMeetingBeforeSignal, Op::Meet(end));
            if !early {
                signals.unless(bug == Bug::NoReleaseFence, Op::Fence);
                signals.push(Op::Add(counter));
            }
        }
        m.thread(format!("producer{p}.0"), signals);
        m.thread(format!("producer{p}.1"), stores);
    }
    let (mut waits, mut reads) = (Vec::new(), Vec::new());
    let (ready, read) = (100, 101);
    for epoch in 1..=EPOCHS {
        let count = if bug == Bug::PartialWait { PRODUCERS - 1 } else { PRODUCERS };
        let need = if bug == Bug::CountWithoutEpoch { count } else { epoch * count };
        waits.push(Op::Poll(counter, Order::Relaxed, Until::AtLeast(need)));
        waits.unless(bug == Bug::NoAcquireFence, Op::Fence);
        waits.unless(bug == Bug::NoMeetingAfterWait, Op::Meet(ready));
        reads.unless(bug == Bug::NoMeetingAfterWait, Op::Meet(ready));
        reads.extend(data.iter().map(|&word| Op::Read(word, Order::Relaxed, epoch)));
        waits.unless(bug == Bug::StepBeforeReads, Op::Meet(read));
        reads.unless(bug == Bug::StepBeforeReads, Op::Meet(read));
        let order = if bug == Bug::RelaxedStep { Order::Relaxed } else { Order::Release };
        waits
            .extend([Op::Write(token, Order::Relaxed, epoch + 1), Op::Write(go, order, epoch + 1)]);
    }
    m.thread("consumer.0", waits);
    m.thread("consumer.1", reads);
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    let stale = "reads";
    vec![
        Case::holds("counter: as it is", model(Bug::None)),
        Case::fails("counter: no fence before the signal", model(Bug::NoReleaseFence), stale),
        Case::fails("counter: no fence after the wait", model(Bug::NoAcquireFence), stale),
        Case::fails("counter: waits for some arrivals", model(Bug::PartialWait), stale),
        Case::fails(
            "counter: no block barrier before the signal",
            model(Bug::NoMeetingBeforeSignal),
            stale,
        ),
        Case::fails(
            "counter: no block barrier after the wait",
            model(Bug::NoMeetingAfterWait),
            stale,
        ),
        Case::fails(
            "counter: the need does not grow with the epoch",
            model(Bug::CountWithoutEpoch),
            stale,
        ),
        Case::fails("counter: signal before the stores", model(Bug::SignalBeforeStores), stale),
        Case::fails("counter: the next step is published relaxed", model(Bug::RelaxedStep), stale),
        Case::fails(
            "counter: the next step before all have read",
            model(Bug::StepBeforeReads),
            stale,
        ),
    ]
}
