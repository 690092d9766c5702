//! The state machine of a ring entry: every legal transition, which side makes it, and when.

use crate::ring::EntryState;

/// The side that changes an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The process that owns the sessions.
    Host,
    /// The machine that runs programs.
    Device,
}

impl Side {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

/// A legal change of an entry's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The state before.
    pub from: EntryState,
    /// The state after.
    pub to: EntryState,
    /// The side that makes it; the other may not.
    pub by: Side,
    /// When.
    pub when: &'static str,
}

macro_rules! changes {
    ($($from:ident -> $to:ident by $by:ident: $when:literal;)+) => {
        /// Every legal transition. Both sides refuse any other.
        pub const CHANGES: &[Change] = &[$(
            Change { from: EntryState::$from, to: EntryState::$to, by: Side::$by, when: $when },
        )+];
    };
}

changes! {
    Empty -> Published by Host: "a command is written";
    Published -> Claimed by Device: "its turn has come";
    Published -> Fault by Device: "it asks for what was not set aside";
    Published -> Empty by Host: "it is cancelled";
    Claimed -> Done by Device: "it is finished";
    Claimed -> Fault by Device: "it trapped";
    Claimed -> WaitIo by Device: "weights that it needs are still on their way";
    Claimed -> Yield by Device: "it yields at a token boundary";
    WaitIo -> Claimed by Device: "the weights have arrived and its turn has come";
    WaitIo -> Fault by Host: "the weights will never land";
    WaitIo -> Empty by Host: "it is cancelled";
    Yield -> Requeue by Host: "it goes back in line";
    Yield -> Fault by Host: "its quota is spent";
    Yield -> Empty by Host: "it was cancelled while it ran";
    Requeue -> Claimed by Device: "its turn has come again";
    Requeue -> Fault by Device: "it asks for what is no longer there";
    Requeue -> Empty by Host: "it is cancelled";
    Done -> Empty by Host: "its answer was taken";
    Fault -> Empty by Host: "its report was taken";
}

/// A requested transition that is not legal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The state before.
    pub from: EntryState,
    /// The requested state.
    pub to: EntryState,
}

impl std::fmt::Display for Transition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a ring entry cannot go from {} to {}", self.from.name(), self.to.name())
    }
}

impl std::error::Error for Transition {}

/// The legal transition from one state to another, on either side.
///
/// # Errors
/// If an entry in `from` may not become `to`.
pub const fn transition(from: EntryState, to: EntryState) -> Result<Change, Transition> {
    let mut index = 0;
    while index < CHANGES.len() {
        let change = CHANGES[index];
        if change.from as u32 == from as u32 && change.to as u32 == to as u32 {
            return Ok(change);
        }
        index += 1;
    }
    Err(Transition { from, to })
}
