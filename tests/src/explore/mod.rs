//! Explores every interleaving of a small protocol under weak memory, and prints a shortest one that breaks it.
//!
//! A protocol is a [`Model`]: a few threads, each a straight line of [`Op`]s, over a few words, stage barriers and asynchronous copies.
//! [`explore`] runs all of its executions, breadth first, so the first that fails is among the shortest.
//!
//! **The memory model.** Each word has a history of its values. A thread has a *view*: for each history, the oldest
//! place that it may still read. A load may return any value that is not older than the view, so stale values are
//! possible. A store may take any place in the history behind the view, so another thread's store may win. A release
//! attaches the view to the value; an acquire joins it; a relaxed load keeps it for a later fence. That is the
//! release/acquire fragment of the C++ and PTX models in its operational form, with one omission: no store happens
//! before an earlier load of its own thread.
//!
//! A thread belongs to a device. A fence has the scope of its device, or of all ([`Op::SystemFence`]): it orders nothing
//! towards threads of another device unless both sides have the wider scope. A model of one device has plain fences only.
//!
//! Copies read and write through the asynchronous proxy, which has a view of its own: it includes what plain accesses
//! have seen only from the next proxy fence on.

mod machine;
pub mod models;

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

pub use machine::{BARRIERS_MAX, WORDS_MAX};
use machine::{State, Step};

/// A word of memory.
pub type Word = usize;
/// A stage barrier.
pub type Barrier = usize;

/// The memory order of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Orders nothing by itself.
    Relaxed,
    /// Joins the view that the value was released with.
    Acquire,
    /// Attaches the thread's view to the value.
    Release,
}

/// The condition of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// A counter that is at least this.
    AtLeast(u32),
    /// Exactly this value.
    Equals(u32),
    /// A word with these bits under the mask.
    Masked(u32, u32),
}

impl Until {
    fn holds(self, value: u32) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::Equals(wanted) => value == wanted,
            Self::Masked(mask, wanted) => value & mask == wanted,
        }
    }
}

/// One operation of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Loads, and must find this value.
    Read(Word, Order, u32),
    /// Loads, and notes the value; see [`outcomes`].
    Note(Word, Order),
    /// Loads repeatedly, until a value matches.
    Poll(Word, Order, Until),
    /// As `Poll`, and the matching value must be this one.
    PollFor(Word, Until, u32),
    /// Stores.
    Write(Word, Order, u32),
    /// Polls two words at once. Continues once a value of the first matches; skips this many ops once the second is not
    /// zero.
    PollEither(Word, Until, Word, Order, u8),
    /// Loads, and must find a nonzero value, which is noted.
    Set(Word, Order),
    /// Loads, and must find the value that this thread noted last.
    Like(Word, Order),
    /// Adds one, relaxed, as `red.add` does.
    Add(Word),
    /// As `Add`, but all threads except the first skip this many ops: `atom.add` of a claim.
    Claim(Word, u8),
    /// `fence.acq_rel.gpu`.
    Fence,
    /// `fence.acq_rel.sys`.
    SystemFence,
    /// `fence.proxy.async`: makes this thread's view visible to copies.
    ProxyFence,
    /// Meets the other threads of the same group: `bar.sync`.
    Meet(u8),
    /// `mbarrier.arrive`.
    Arrive(Barrier),
    /// `mbarrier.arrive.expect_tx` for one copy.
    Expect(Barrier),
    /// `mbarrier.try_wait.parity` until the phase of this parity has completed.
    Land(Barrier, u8),
    /// Starts a copy into a word, from a word or a constant, that completes on a barrier.
    Copy(Source, Word, Barrier),
}

/// The source of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A constant: weights.
    Value(u32),
    /// A word of memory as the asynchronous proxy sees it: keys and values.
    Word(Word),
}

/// A thread: its name and its ops.
#[derive(Clone, Debug)]
pub struct Thread {
    /// Name, such as `consumer.1`.
    pub name: String,
    /// In program order.
    pub ops: Vec<Op>,
    /// Its device.
    pub device: u8,
}

/// A protocol to explore.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// The words' names; all begin at zero.
    pub words: Vec<String>,
    /// Names of the stage barriers, and the arrivals that end a phase.
    pub barriers: Vec<(String, u8)>,
    /// The threads.
    pub threads: Vec<Thread>,
}

impl Model {
    /// Adds a word.
    pub fn word(&mut self, name: impl Into<String>) -> Word {
        self.words.push(name.into());
        assert!(self.words.len() <= WORDS_MAX, "at most {WORDS_MAX} words");
        self.words.len() - 1
    }

    /// Adds a stage barrier that this many arrivals complete.
    pub fn barrier(&mut self, name: impl Into<String>, arrivals: u8) -> Barrier {
        self.barriers.push((name.into(), arrivals));
        assert!(self.barriers.len() <= BARRIERS_MAX, "at most {BARRIERS_MAX} barriers");
        self.barriers.len() - 1
    }

    /// Adds a thread.
    pub fn thread(&mut self, name: impl Into<String>, ops: Vec<Op>) {
        self.thread_on(0, name, ops);
    }

    /// Adds a thread of a device.
    pub fn thread_on(&mut self, device: u8, name: impl Into<String>, ops: Vec<Op>) {
        self.threads.push(Thread { name: name.into(), ops, device });
    }
}

/// The result of exploring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No execution fails.
    Holds {
        /// Distinct states.
        states: usize,
        /// Steps between them.
        steps: usize,
    },
    /// Some execution fails.
    Fails {
        /// The failure.
        what: String,
        /// A shortest failing execution, one line per step.
        trace: Vec<String>,
        /// States visited until then.
        states: usize,
    },
    /// The limit of states was exceeded.
    TooMany,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holds { states, steps } => {
                write!(f, "holds in all {states} states ({steps} steps)")
            }
            Self::Fails { what, trace, states } => {
                writeln!(f, "fails after {} steps ({states} states seen): {what}", trace.len())?;
                trace
                    .iter()
                    .enumerate()
                    .try_for_each(|(i, line)| writeln!(f, "  {:2} {line}", i + 1))
            }
            Self::TooMany => f.write_str("too many states"),
        }
    }
}

/// Hash of a state, 128 bits.
type Print = (u64, u64);

fn print(state: &State) -> Print {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        state.hash(&mut hasher);
        hasher.finish()
    };
    (half(0), half(1))
}

/// Runs every execution of `model`, at most `limit` states.
#[must_use]
pub fn explore(model: &Model, limit: usize) -> Verdict {
    search(model, limit, |_| ())
}

/// The possible notes of the threads at the end, a list for each thread.
///
/// # Panics If some execution fails: a model with notes must not have a failing op.
#[must_use]
pub fn outcomes(model: &Model) -> BTreeSet<Vec<Vec<u32>>> {
    let mut found = BTreeSet::new();
    let verdict = search(model, usize::MAX, |end| {
        found.insert(end.notes.clone());
    });
    assert!(matches!(verdict, Verdict::Holds { .. }), "{verdict}");
    found
}

fn search(model: &Model, limit: usize, mut at_end: impl FnMut(&State)) -> Verdict {
    let mut first = State::new(model);
    first.settle(model);
    // How each state was first reached: its predecessor and the step.
    let mut reached: HashMap<Print, Option<(Print, Step)>> = HashMap::new();
    let mut layer = vec![(print(&first), first.clone())];
    reached.insert(layer[0].0, None);
    let mut count = 0;
    while !layer.is_empty() {
        let mut next = Vec::new();
        for (from, state) in &layer {
            let steps = state.steps(model);
            if steps.is_empty() && state.finished(model) {
                at_end(state);
            } else if steps.is_empty() {
                let trace = replay(model, &first, &reached, *from, None);
                return Verdict::Fails { what: state.stuck(model), trace, states: reached.len() };
            }
            for step in steps {
                count += 1;
                let mut after = state.clone();
                if let Err(what) = after.take(model, step) {
                    let trace = replay(model, &first, &reached, *from, Some(step));
                    return Verdict::Fails { what, trace, states: reached.len() };
                }
                after.settle(model);
                let to = print(&after);
                if let Entry::Vacant(place) = reached.entry(to) {
                    place.insert(Some((*from, step)));
                    next.push((to, after));
                }
            }
            if reached.len() > limit {
                return Verdict::TooMany;
            }
        }
        layer = next;
    }
    Verdict::Holds { states: reached.len(), steps: count }
}

/// The execution that leads to `to`, and one step further, described line by line.
fn replay(
    model: &Model,
    first: &State,
    reached: &HashMap<Print, Option<(Print, Step)>>,
    to: Print,
    last: Option<Step>,
) -> Vec<String> {
    let mut steps: Vec<Step> = last.into_iter().collect();
    let mut at = to;
    while let Some(&Some((from, step))) = reached.get(&at) {
        steps.push(step);
        at = from;
    }
    let mut state = first.clone();
    let mut trace = Vec::new();
    for step in steps.into_iter().rev() {
        trace.push(state.tell(model, step));
        if state.take(model, step).is_ok() {
            state.settle(model);
        }
    }
    trace
}
