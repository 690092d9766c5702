//! Telemetry of sequences, written by the thread that owns the machine on which they take turns.

use std::time::Duration;

use abi::{
    Activity, EntryState, EventTrack, EventWords, Evidence, EvidenceFamily, ProgramWords,
    SequenceEnd, SessionWords, TELEMETRY_OPS, Telemetry,
};
use ir::program::Program;
use sessions::{Priority, Ring};
use telemetry::{Edit, Publisher, bucket, now_ns};

use super::enter_at;
use crate::engine::Account;
use crate::speculate::Tally;

/// A command that has completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    /// Place of its first sequence, and the first position there.
    pub(crate) place: usize,
    pub(crate) first: usize,
    pub(crate) sequences: usize,
    /// Positions of each sequence, and tokens of all.
    pub(crate) positions: usize,
    pub(crate) tokens: usize,
    pub(crate) took: Duration,
}

/// A turn that has ended: what a sequence ran and sampled in it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TurnEnd {
    pub(crate) place: usize,
    pub(crate) first: usize,
    pub(crate) positions: usize,
    pub(crate) tokens: usize,
    /// What its windows gave.
    pub(crate) guesses: Tally,
}

/// Publishes the state of sequences on a page. Without a page it does nothing.
#[derive(Clone, Default)]
pub(crate) struct Sequences {
    page: Option<Publisher>,
    opened: u64,
    commands: u64,
    /// When the current command began.
    began_ns: u64,
    /// Whether commands and steps are counted here: a kernel counts its own.
    counts: bool,
}

impl Sequences {
    /// With `counts`, steps are counted by turns; otherwise another thread counts them.
    pub(crate) fn new(page: &Publisher, counts: bool) -> Self {
        page.edit(|edit| edit.known(EvidenceFamily::Ring, Evidence::Measured));
        Self { page: Some(page.clone()), opened: 0, commands: 0, began_ns: 0, counts }
    }

    fn edit(&self, change: impl FnOnce(&mut Edit<'_>)) {
        if let Some(page) = &self.page {
            page.edit(change);
        }
    }

    /// Changes figures of the process.
    pub(crate) fn head(&self, change: impl FnOnce(&mut Telemetry)) {
        self.edit(|edit| change(edit.head()));
    }

    /// Changes the activity of the machine's owner.
    pub(crate) fn enter(&self, activity: Activity) {
        self.edit(|edit| enter_at(edit.head(), activity, now_ns()));
    }

    /// Sets the number of requests without a place.
    pub(crate) fn waiting(&self, requests: usize) {
        self.edit(|edit| edit.head().waiting = u32::try_from(requests).unwrap_or(u32::MAX));
    }

    /// A program that the machine runs, by its kernel's index.
    pub(crate) fn program(&self, number: usize, program: &Program) {
        self.edit(|edit| {
            if number == 0 {
                edit.head().step_bytes = program.stream_bytes();
            }
            tasks(edit.program(number), program);
        });
    }

    /// A sequence got a place; it may run at most `goal` positions. Its request arrived at `arrived_ns`.
    pub(crate) fn open(
        &mut self,
        place: usize,
        (priority, goal): (Priority, u64),
        arrived_ns: u64,
        ring: &Ring,
    ) {
        self.opened += 1;
        self.edit(|edit| {
            let state = ring.state(place) as u32;
            let session = opened(self.opened, priority, state, goal);
            *edit.session(place) = SessionWords { told_ns: arrived_ns, ..session };
            edit.head().opened = self.opened;
            states(edit.head(), ring);
        });
    }

    /// The only sequence, which takes no turns.
    pub(crate) fn sole(&self, goal: u64) {
        self.edit(|edit| {
            let session = opened(1, Priority::Normal, EntryState::Claimed as u32, goal);
            *edit.session(0) = session;
            edit.head().opened = 1;
            edit.head().occupancy[EntryState::Claimed as usize] = 1;
            if self.counts {
                edit.known(EvidenceFamily::Ring, Evidence::Derived);
            }
        });
    }

    /// The machine begins a command of sequences in these places, each from its first position on.
    pub(crate) fn begin(&mut self, sequences: &[(usize, usize)], positions: usize) {
        let now = now_ns();
        self.began_ns = now;
        self.edit(|edit| {
            for (place, _) in sequences {
                let session = edit.session(*place);
                let before = std::mem::replace(&mut session.state, EntryState::Claimed as u32);
                session.turn_ns = now;
                let occupancy = &mut edit.head().occupancy;
                if let Some(count) = occupancy.get_mut(before as usize) {
                    *count = count.saturating_sub(1);
                }
                occupancy[EntryState::Claimed as usize] += 1;
            }
            let head = edit.head();
            head.command_first = clamped(sequences.first().map_or(0, |(_, first)| *first));
            head.command_positions = clamped(positions);
            head.published += u64::from(self.counts);
            enter_at(head, Activity::Running, now);
        });
    }

    /// The command has completed.
    pub(crate) fn ran(&mut self, command: &Command, account: &Account) {
        self.commands += 1;
        let Command { place, first, sequences, positions, tokens, took } = *command;
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.edit(|edit| {
            let now = now_ns();
            edit.passes(account.passes);
            let head = edit.head();
            if sequences > 1 && positions > 0 {
                head.batches += 1;
                head.batched += sequences as u64;
            }
            if self.counts {
                head.drained += 1;
                head.positions += (positions * sequences) as u64;
                if let Some(step) = ns.checked_div(positions as u64) {
                    head.steps[bucket(step)] += positions as u64;
                    head.steps_ns += ns;
                }
            }
            enter_at(head, Activity::Between, now);
            let event = EventWords {
                begin_ns: self.began_ns,
                end_ns: now,
                number: self.commands,
                track: EventTrack::Command as u32,
                place: clamped(place),
                first: clamped(first),
                positions: clamped(positions),
                tokens: clamped(tokens),
                sequences: clamped(sequences),
                ..EventWords::default()
            };
            edit.event(event);
            if let Some([begin_ns, end_ns]) = account.last.filter(|_| positions > 0) {
                let track = EventTrack::Device as u32;
                edit.event(EventWords { begin_ns, end_ns, track, ..event });
            }
        });
    }

    /// A turn has ended.
    pub(crate) fn turn(&self, turn: &TurnEnd, ring: &Ring) {
        self.edit(|edit| {
            add(edit, turn);
            edit.session(turn.place).state = ring.state(turn.place) as u32;
            states(edit.head(), ring);
        });
    }

    /// The only sequence has run a command.
    pub(crate) fn chosen(&self, turn: &TurnEnd) {
        self.edit(|edit| add(edit, turn));
    }

    /// A sequence has ended and left its place.
    pub(crate) fn close(&self, place: usize, ending: SequenceEnd, ring: &Ring) {
        self.edit(|edit| {
            let left = std::mem::take(edit.session(place));
            let head = edit.head();
            head.left_required += left.required;
            head.left_lookahead += left.lookahead;
            head.left_accepted += left.accepted;
            head.endings[ending as usize] += 1;
            states(edit.head(), ring);
        });
    }

    /// Sequences ended outside a turn: they never had a place, or everything ends.
    pub(crate) fn lost(&self, ending: SequenceEnd, count: usize) {
        self.edit(|edit| edit.head().endings[ending as usize] += count as u64);
    }
}

/// Adds what a sequence has run and sampled in a turn, and the turn's events, if it had the machine.
fn add(edit: &mut Edit<'_>, turn: &TurnEnd) {
    let (now, session) = (now_ns(), edit.session(turn.place));
    let had_the_machine = session.state == EntryState::Claimed as u32;
    session.positions += turn.positions as u64;
    session.tokens += turn.tokens as u64;
    let Tally { windows, guessed, accepted, .. } = turn.guesses;
    session.required += windows;
    session.lookahead += guessed;
    session.stood += windows + accepted;
    session.rerun += guessed - accepted;
    session.accepted += accepted;
    let told_ns = session.told_ns;
    if turn.tokens > 0 {
        session.told_ns = now;
    }
    let SessionWords { serial, turn_ns, priority, .. } = *session;
    let head = edit.head();
    head.tokens += turn.tokens as u64;
    head.windows += windows;
    head.guessed += guessed;
    head.accepted += accepted;
    if let Some(sum) = head.priority_positions.get_mut(priority as usize) {
        *sum += turn.positions as u64;
    }
    if let Some(sum) = head.priority_tokens.get_mut(priority as usize) {
        *sum += turn.tokens as u64;
    }
    if !had_the_machine {
        return;
    }
    let event = EventWords {
        begin_ns: turn_ns,
        end_ns: now,
        number: serial,
        total: head.priority_positions.iter().sum(),
        track: EventTrack::Turn as u32,
        place: clamped(turn.place),
        first: clamped(turn.first),
        positions: clamped(turn.positions),
        tokens: clamped(turn.tokens),
        sequences: 1,
        ..EventWords::default()
    };
    edit.event(event);
    if turn.tokens > 0 {
        let track = EventTrack::Client as u32;
        edit.event(EventWords { begin_ns: told_ns, track, positions: 0, total: 0, ..event });
    }
}

/// Counts the tasks of one pass of a program.
fn tasks(words: &mut ProgramWords, program: &Program) {
    *words = ProgramWords { workers: clamped(program.workers.len()), ..ProgramWords::default() };
    let id = program.id();
    for (to, from) in words.id.iter_mut().zip(id.bytes()) {
        *to = from;
    }
    for (worker, queue) in program.workers.iter().enumerate() {
        for task in &queue.tasks {
            words.all[task.opcode as usize] += 1;
            // Workers beyond those of the page count in the sums.
            if let Some(count) = words.tasks.get_mut(worker * TELEMETRY_OPS + task.opcode as usize)
            {
                *count += 1;
            }
        }
    }
}

fn clamped(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn opened(serial: u64, priority: Priority, state: u32, goal: u64) -> SessionWords {
    let priority = match priority {
        Priority::Low => 0,
        Priority::Normal => 1,
        Priority::High => 2,
    };
    let now = now_ns();
    let (positions, tokens) = (0, 0);
    let (opened_ns, turn_ns, told_ns) = (now, now, now);
    SessionWords {
        serial,
        priority,
        state,
        positions,
        goal,
        tokens,
        opened_ns,
        turn_ns,
        told_ns,
        ..SessionWords::default()
    }
}

/// The states of all commands, and the number of times each was entered.
fn states(head: &mut abi::Telemetry, ring: &Ring) {
    head.occupancy = ring.occupancy();
    head.entered = ring.entered();
}

#[cfg(test)]
mod tests {
    use abi::Side;

    use super::*;

    #[test]
    fn each_place_is_in_one_state() {
        let dir = tempfile::tempdir().unwrap();
        let folder = telemetry::Folder::at(dir.path());
        let (page, _) = Publisher::new(&folder, |_| {}).unwrap();
        let mut ring = Ring::new(4);
        let mut sequences = Sequences::new(&page, true);
        for place in [0, 1] {
            ring.change(Side::Host, place, EntryState::Published).unwrap();
            sequences.open(place, (Priority::Normal, 8), now_ns(), &ring);
        }
        for _ in 0..2 {
            sequences.begin(&[(0, 0), (1, 0)], 1);
            let mut counts = [0; EntryState::ALL.len()];
            page.edit(|edit| counts = edit.head().occupancy);
            assert_eq!(counts.iter().sum::<u32>(), 4, "{counts:?}");
            assert_eq!(counts[EntryState::Claimed as usize], 2);
        }
    }

    #[test]
    fn a_wrong_guess_is_run_again() {
        let dir = tempfile::tempdir().unwrap();
        let (page, _) = Publisher::new(&telemetry::Folder::at(dir.path()), |_| {}).unwrap();
        let guesses = Tally { windows: 2, guessed: 5, accepted: 2, ..Tally::default() };
        let turn = TurnEnd { positions: 7, tokens: 4, guesses, ..TurnEnd::default() };
        let mut words = SessionWords::default();
        page.edit(|edit| {
            add(edit, &turn);
            words = *edit.session(0);
        });
        assert_eq!((words.required, words.lookahead), (2, 5));
        assert_eq!((words.stood, words.rerun, words.accepted), (4, 3, 2));
    }
}
