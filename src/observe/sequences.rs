//! Telemetry of sequences, written by the thread that owns the machine on which they take turns.

use std::time::Duration;

use abi::{Activity, EntryState, SequenceEnd, SessionWords};
use sessions::{Priority, Ring};
use telemetry::{Edit, Publisher, bucket, now_ns};

use super::enter_at;

/// Publishes the state of sequences on a page. Without a page it does nothing.
#[derive(Clone, Default)]
pub(crate) struct Sequences {
    page: Option<Publisher>,
    opened: u64,
    /// Whether commands and steps are counted here: a kernel counts its own.
    counts: bool,
}

impl Sequences {
    /// With `counts`, steps are counted by turns; otherwise another thread counts them.
    pub(crate) fn new(page: &Publisher, counts: bool) -> Self {
        Self { page: Some(page.clone()), opened: 0, counts }
    }

    fn edit(&self, change: impl FnOnce(&mut Edit<'_>)) {
        if let Some(page) = &self.page {
            page.edit(change);
        }
    }

    /// Changes the activity of the machine's owner.
    pub(crate) fn enter(&self, activity: Activity) {
        self.edit(|edit| enter_at(edit.head(), activity, now_ns()));
    }

    /// Sets the number of requests without a place.
    pub(crate) fn waiting(&self, requests: usize) {
        self.edit(|edit| edit.head().waiting = u32::try_from(requests).unwrap_or(u32::MAX));
    }

    /// A sequence got a place; it may run at most `goal` positions.
    pub(crate) fn open(&mut self, place: usize, priority: Priority, goal: u64, ring: &Ring) {
        self.opened += 1;
        self.edit(|edit| {
            let state = ring.state(place) as u32;
            *edit.session(place) = opened(self.opened, priority, state, goal);
            edit.head().opened = self.opened;
            states(edit.head(), ring);
        });
    }

    /// The only sequence, which takes no turns.
    pub(crate) fn sole(&self, goal: u64) {
        self.edit(|edit| {
            *edit.session(0) = opened(1, Priority::Normal, EntryState::Claimed as u32, goal);
            edit.head().opened = 1;
            edit.head().occupancy[EntryState::Claimed as usize] = 1;
        });
    }

    /// A command ran this many sequences at once. Each publishes its own turn.
    pub(crate) fn batch(&self, turns: usize) {
        self.edit(|edit| {
            let head = edit.head();
            head.batches += 1;
            head.batched += turns as u64;
        });
    }

    /// The machine begins to run positions of a place.
    pub(crate) fn begin(&self, place: usize, first: usize, positions: usize) {
        self.edit(|edit| {
            let now = now_ns();
            let session = edit.session(place);
            (session.state, session.turn_ns) = (EntryState::Claimed as u32, now);
            let head = edit.head();
            head.command_first = u32::try_from(first).unwrap_or(u32::MAX);
            head.command_positions = u32::try_from(positions).unwrap_or(u32::MAX);
            head.published += u64::from(self.counts);
            head.occupancy[EntryState::Claimed as usize] = 1;
            enter_at(head, Activity::Running, now);
        });
    }

    /// It ran this many positions in this time.
    pub(crate) fn ran(&self, place: usize, positions: usize, took: Duration) {
        self.edit(|edit| {
            let session = edit.session(place);
            session.positions += positions as u64;
            let priority = session.priority as usize;
            let head = edit.head();
            if let Some(sum) = head.priority_positions.get_mut(priority) {
                *sum += positions as u64;
            }
            if self.counts {
                let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
                head.drained += 1;
                head.positions += positions as u64;
                if let Some(step) = ns.checked_div(positions as u64) {
                    head.steps[bucket(step)] += positions as u64;
                    head.steps_ns += ns;
                }
            }
            enter_at(head, Activity::Between, now_ns());
        });
    }

    /// A turn has ended, in which `tokens` tokens were sampled.
    pub(crate) fn turn(&self, place: usize, tokens: u64, ring: &Ring) {
        self.edit(|edit| {
            add_tokens(edit, place, tokens);
            edit.session(place).state = ring.state(place) as u32;
            states(edit.head(), ring);
        });
    }

    /// Tokens were sampled by the only sequence.
    pub(crate) fn chosen(&self, place: usize, tokens: u64) {
        self.edit(|edit| add_tokens(edit, place, tokens));
    }

    /// A sequence has ended and left its place.
    pub(crate) fn close(&self, place: usize, ending: SequenceEnd, ring: &Ring) {
        self.edit(|edit| {
            *edit.session(place) = SessionWords::default();
            edit.head().endings[ending as usize] += 1;
            states(edit.head(), ring);
        });
    }

    /// Sequences ended outside a turn: they never had a place, or everything ends.
    pub(crate) fn lost(&self, ending: SequenceEnd, count: usize) {
        self.edit(|edit| edit.head().endings[ending as usize] += count as u64);
    }
}

fn add_tokens(edit: &mut Edit<'_>, place: usize, tokens: u64) {
    let session = edit.session(place);
    session.tokens += tokens;
    let priority = session.priority as usize;
    let head = edit.head();
    head.tokens += tokens;
    if let Some(sum) = head.priority_tokens.get_mut(priority) {
        *sum += tokens;
    }
}

fn opened(serial: u64, priority: Priority, state: u32, goal: u64) -> SessionWords {
    let priority = match priority {
        Priority::Low => 0,
        Priority::Normal => 1,
        Priority::High => 2,
    };
    let now = now_ns();
    let (opened_ns, turn_ns) = (now, now);
    SessionWords { serial, priority, state, goal, opened_ns, turn_ns, ..SessionWords::default() }
}

/// The states of all commands, and the number of times each was entered.
fn states(head: &mut abi::Telemetry, ring: &Ring) {
    head.occupancy = ring.occupancy();
    let entered = ring.entered();
    head.turns = entered[EntryState::Claimed as usize];
    head.yields = entered[EntryState::Yield as usize];
    head.requeues = entered[EntryState::Requeue as usize];
    head.io_waits = entered[EntryState::WaitIo as usize];
    head.faults = entered[EntryState::Fault as usize];
}
