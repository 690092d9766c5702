//! Flag-in-data words: `word_write` and `vec4s_wait` of the device. Value and tag are one word, stored and loaded relaxed.
//!
//! A producer writes two words in every step, and two readers wait for both by their tags. The step ends with a counter
//! and begins with the step word, as always.

use super::super::{Model, Op, Order, Until};
use super::{Case, Unless};

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// The tag is a word of its own, stored behind the value without a release.
    TagApart,
    /// The tag is a word of its own, stored first.
    TagApartFirst,
    /// The tag is a word of its own, released, and loaded without an acquire.
    TagApartNoAcquire,
    /// A tag with so few bits that it repeats in the next step.
    ShortTag,
    /// Some steps do not write the word, until its tag repeats.
    SkipsSteps,
    /// The reader does not check the tag.
    NoPoll,
}

const MASK: u32 = (1 << abi::TAG_BITS) - 1;

/// As in `buffer_words`.
fn tag(epoch: u32) -> u32 {
    (epoch * abi::TAG_RUNS) & MASK
}

/// A word whose value is unique to this step.
pub(super) fn word(epoch: u32) -> u32 {
    (epoch * 100) << abi::TAG_BITS | tag(epoch)
}

/// Poll for the word of this step.
pub(super) fn wait(at: usize, epoch: u32) -> Op {
    Op::PollFor(at, Until::Masked(MASK, tag(epoch)), word(epoch))
}

/// The end of a step and the beginning of the next, for the sampling thread and for another.
pub(super) struct Steps {
    end: usize,
    go: usize,
    others: u32,
}

impl Steps {
    pub(super) fn new(m: &mut Model, others: u32) -> Self {
        Self { end: m.word("end"), go: m.word("go"), others }
    }

    /// The sampling thread waits for all arrivals and publishes the next step.
    pub(super) fn sample(&self, epoch: u32) -> [Op; 3] {
        let all = Until::AtLeast(epoch * self.others);
        [
            Op::Poll(self.end, Order::Relaxed, all),
            Op::Fence,
            Op::Write(self.go, Order::Release, epoch + 1),
        ]
    }

    /// Another thread signals its end, and waits for the next step.
    pub(super) fn done(&self, epoch: u32) -> [Op; 4] {
        [
            Op::Fence,
            Op::Add(self.end),
            Op::Poll(self.go, Order::Relaxed, Until::AtLeast(epoch + 1)),
            Op::Fence,
        ]
    }
}

fn model(bug: Bug) -> Model {
    let mut m = Model::default();
    let words = [m.word("word0"), m.word("word1")];
    let steps = Steps::new(&mut m, 2);
    let short = 1;
    // Enough steps for the tags to repeat.
    let round = (MASK + 1) / abi::TAG_RUNS;
    let (mut producer, mut reader) = (Vec::new(), Vec::new());
    for epoch in 1..=round + 2 {
        let skipped = bug == Bug::SkipsSteps && epoch > 1 && epoch <= round;
        for &at in &words {
            let (store, wait) = match bug {
                Bug::ShortTag => (
                    Op::Write(at, Order::Relaxed, epoch << 1 | short),
                    Op::PollFor(at, Until::Masked(1, short), epoch << 1 | short),
                ),
                Bug::NoPoll => (
                    Op::Write(at, Order::Relaxed, word(epoch)),
                    Op::Read(at, Order::Relaxed, word(epoch)),
                ),
                Bug::None
                | Bug::SkipsSteps
                | Bug::TagApart
                | Bug::TagApartFirst
                | Bug::TagApartNoAcquire => {
                    (Op::Write(at, Order::Relaxed, word(epoch)), wait(at, epoch))
                }
            };
            producer.unless(skipped, store);
            reader.unless(skipped, wait);
        }
        producer.extend(steps.sample(epoch));
        reader.extend(steps.done(epoch));
    }
    m.thread("producer", producer);
    m.thread("reader0", reader.clone());
    m.thread("reader1", reader);
    m
}

/// Value and tag are two words.
fn apart(bug: Bug) -> Model {
    let mut m = Model::default();
    let (value, tag) = (m.word("value"), m.word("tag"));
    let publish = if bug == Bug::TagApartNoAcquire { Order::Release } else { Order::Relaxed };
    let mut store = vec![Op::Write(value, Order::Relaxed, 7), Op::Write(tag, publish, 1)];
    if bug == Bug::TagApartFirst {
        store.reverse();
    }
    m.thread("producer", store);
    let poll = Op::Poll(tag, Order::Relaxed, Until::Equals(1));
    let mut read = vec![poll];
    read.unless(bug == Bug::TagApartNoAcquire, Op::Fence);
    read.push(Op::Read(value, Order::Relaxed, 7));
    m.thread("reader", read);
    m
}

/// The protocol and its bugs.
#[must_use]
pub fn cases() -> Vec<Case> {
    vec![
        Case::holds("flag-in-data: as it is, six steps", model(Bug::None)),
        Case::fails("flag-in-data: one bit of tag", model(Bug::ShortTag), "reads"),
        Case::fails(
            "flag-in-data: a word that not every step writes",
            model(Bug::SkipsSteps),
            "reads",
        ),
        Case::fails("flag-in-data: the tag is not looked at", model(Bug::NoPoll), "reads"),
        Case::fails(
            "tag apart: stored behind the value, relaxed",
            apart(Bug::TagApart),
            "reads 0 from value",
        ),
        Case::fails(
            "tag apart: stored before the value",
            apart(Bug::TagApartFirst),
            "reads 0 from value",
        ),
        Case::fails(
            "tag apart: loaded without an acquire",
            apart(Bug::TagApartNoAcquire),
            "reads 0 from value",
        ),
    ]
}
