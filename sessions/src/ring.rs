//! The states of a ring's entries on the host. This is the reference for every implementation that changes entries:
//! they must refuse what it refuses.

use abi::{EntryState, RING_ENTRIES, Side, Transition, transition};

/// A change that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The table has no such change.
    #[error("entry {entry}: {transition}")]
    Illegal {
        /// The entry.
        entry: usize,
        /// The requested change.
        transition: Transition,
    },
    /// The table gives the change to the other side.
    #[error("entry {entry}: a change from {} to {} may only be made by the {}", transition.from.name(), transition.to.name(), owner.name())]
    NotYours {
        /// The entry.
        entry: usize,
        /// The requested change.
        transition: Transition,
        /// The side that may make it.
        owner: Side,
    },
}

/// The states of all entries.
#[derive(Clone, Debug)]
pub struct Ring {
    states: Vec<EntryState>,
    entered: [u64; EntryState::ALL.len()],
}

impl Ring {
    /// A ring of `entries` empty entries, at most [`RING_ENTRIES`].
    #[must_use]
    pub fn new(entries: usize) -> Self {
        let states = vec![EntryState::Empty; entries.min(RING_ENTRIES as usize)];
        Self { states, entered: [0; EntryState::ALL.len()] }
    }

    /// Number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether it has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// The state of an entry; an entry that does not exist is always empty.
    #[must_use]
    pub fn state(&self, entry: usize) -> EntryState {
        self.states.get(entry).copied().unwrap_or(EntryState::Empty)
    }

    /// Changes an entry's state.
    ///
    /// # Errors
    /// If the table has no such change, or gives it to the other side. Nothing has changed then.
    pub fn change(&mut self, by: Side, entry: usize, to: EntryState) -> Result<(), Refused> {
        let refused = Transition { from: self.state(entry), to };
        let change = transition(refused.from, to)
            .map_err(|transition| Refused::Illegal { entry, transition })?;
        if change.by != by {
            return Err(Refused::NotYours { entry, transition: refused, owner: change.by });
        }
        match self.states.get_mut(entry) {
            Some(state) => {
                *state = to;
                self.entered[to as usize] += 1;
            }
            None => return Err(Refused::Illegal { entry, transition: refused }),
        }
        Ok(())
    }

    /// How many times any entry entered each state, by the state's number.
    #[must_use]
    pub fn entered(&self) -> [u64; EntryState::ALL.len()] {
        self.entered
    }

    /// How many entries are in each state, by the state's number. Allocates nothing.
    #[must_use]
    pub fn occupancy(&self) -> [u32; EntryState::ALL.len()] {
        let mut counts = [0; EntryState::ALL.len()];
        for state in &self.states {
            counts[*state as usize] += 1;
        }
        counts
    }
}
