//! Explores every interleaving of a small protocol under weak memory, and prints a shortest one that breaks it.
//!
//! A protocol is a [`Model`]: a few threads, each a straight line of [`Op`]s, over a few words, stage barriers and asynchronous copies.
//! [`explore`] runs all of its executions, breadth first, so the first that fails is among the shortest.
//!
//! **What memory may do.** Each word has the history of its values. A thread has a *view*: how far into each history it must
//! look at least. A load may return any value that is not older than the view, so a stale one is a choice; a store may take any place in the
//! history behind the view, so the store of somebody else may win. A release leaves the view with the value; an acquire takes it over; a relaxed
//! load keeps it for a later fence. That is the release/acquire fragment of the C++ and PTX models in its operational form, with
//! one thing left out: no store happens before an earlier load of its own thread.
//!
//! Copies read and write by the asynchronous proxy, which has a view of its own: what plain accesses have seen counts for it from the next proxy
//! fence on.

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

/// How a load or store takes part in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Orders nothing by itself.
    Relaxed,
    /// Takes over what the value was released with.
    Acquire,
    /// Leaves what the thread has seen with the value.
    Release,
}

/// What a poll waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// A counter that has come so far.
    AtLeast(u32),
    /// Exactly this value.
    Equals(u32),
    /// A word whose bits under the mask are these.
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

/// One thing that a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Loads, and must find this value.
    Read(Word, Order, u32),
    /// Loads, and notes what it found; see [`outcomes`].
    Note(Word, Order),
    /// Loads again and again, until a value fits.
    Poll(Word, Order, Until),
    /// As `Poll`, and what fits must be this value.
    PollFor(Word, Until, u32),
    /// Stores.
    Write(Word, Order, u32),
    /// Polls two words at once. Once a value of the first fits, goes on; once the second is not zero, goes on so many ops later.
    PollEither(Word, Until, Word, Order, u8),
    /// Loads, and must find something else than zero; noted.
    Set(Word, Order),
    /// Loads, and must find what this thread noted last.
    Like(Word, Order),
    /// Adds one, relaxed, as `red.add` does.
    Add(Word),
    /// As `Add`, and whoever is not the first goes on so many ops later: `atom.add` of a claim.
    Claim(Word, u8),
    /// `fence.acq_rel`.
    Fence,
    /// `fence.proxy.async`: what this thread has seen counts for copies too.
    ProxyFence,
    /// Meets the other threads that name the same group: `bar.sync`.
    Meet(u8),
    /// `mbarrier.arrive`.
    Arrive(Barrier),
    /// `mbarrier.arrive.expect_tx` for one copy.
    Expect(Barrier),
    /// `mbarrier.try_wait.parity` until the phase of this parity is over.
    Land(Barrier, u8),
    /// Starts a copy into a word, of a word or of a constant, that completes on a barrier.
    Copy(Source, Word, Barrier),
}

/// What a copy brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// A constant: weights.
    Value(u32),
    /// A word of memory as the asynchronous proxy sees it: keys and values.
    Word(Word),
}

/// A thread: its name and what it does.
#[derive(Clone, Debug)]
pub struct Thread {
    /// Such as `consumer.1`.
    pub name: String,
    /// In program order.
    pub ops: Vec<Op>,
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
        self.threads.push(Thread { name: name.into(), ops });
    }
}

/// What exploring found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No execution fails.
    Holds {
        /// States that differ.
        states: usize,
        /// Steps between them.
        steps: usize,
    },
    /// Some execution fails.
    Fails {
        /// What is wrong at its end.
        what: String,
        /// A shortest such execution, a line for each step.
        trace: Vec<String>,
        /// States that had been seen by then.
        states: usize,
    },
    /// There are more states than were allowed.
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

/// States are told apart by 128 bits.
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

/// What the threads' notes can be at the end, a list for each thread.
///
/// # Panics
/// If some execution fails: a model with notes has nothing that could.
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
    // How each state was first reached: from which, by which of its steps.
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

/// The execution that leads to `to`, and one step further, told line by line.
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
