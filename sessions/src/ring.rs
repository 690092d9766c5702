//! The states of a ring's entries, as the host keeps them. The reference for every machine that moves entries: what it refuses, they
//! must refuse.

use abi::{EntryState, RING_ENTRIES, Side, Transition, transition};

/// A change that was asked for and not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The table has no such change.
    #[error("entry {entry}: {transition}")]
    Illegal {
        /// The entry.
        entry: usize,
        /// What was asked for.
        transition: Transition,
    },
    /// The table gives the change to the other side.
    #[error("entry {entry}: going from {} to {} is the {}'s to do", transition.from.name(), transition.to.name(), owner.name())]
    NotYours {
        /// The entry.
        entry: usize,
        /// What was asked for.
        transition: Transition,
        /// Who may.
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
    /// A ring of empty entries: as many as asked for, at most those of the wire.
    #[must_use]
    pub fn new(entries: usize) -> Self {
        let states = vec![EntryState::Empty; entries.min(RING_ENTRIES as usize)];
        Self { states, entered: [0; EntryState::ALL.len()] }
    }

    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// The state of an entry; one that does not exist is empty for ever.
    #[must_use]
    pub fn state(&self, entry: usize) -> EntryState {
        self.states.get(entry).copied().unwrap_or(EntryState::Empty)
    }

    /// Changes an entry's state.
    ///
    /// # Errors
    /// If the table has no such change, or gives it to the other side; nothing was changed then.
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

    /// How often any entry came into each state, by the state's number.
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
