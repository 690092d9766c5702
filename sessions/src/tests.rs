//! Every state and every change of the reference ring, the operations that must be refused, and the bound on waiting
//! under hostile loads.

use std::collections::{BTreeMap, BTreeSet};

use abi::{CHANGES, EntryState, RING_ENTRIES, SESSIONS_MAX, Side, Transition, transition};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use crate::{
    Cancelled, Outcome, Priority, Refused, Rejected, Report, Ring, Scheduler, SessionId, Why,
};

const ALL: usize = RING_ENTRIES as usize;

/// A scheduler with one session that has submitted.
fn one(quota: u64) -> (Scheduler, SessionId) {
    let mut scheduler = Scheduler::new(1);
    let session = scheduler.open(Priority::Normal, quota).unwrap();
    scheduler.submit(session).unwrap();
    (scheduler, session)
}

fn state(scheduler: &Scheduler, session: SessionId) -> EntryState {
    scheduler.ring().state(session.place())
}

#[test]
fn the_table_has_each_change_once_and_every_state_has_a_way_in_and_out() {
    let mut pairs = BTreeSet::new();
    for change in CHANGES {
        assert!(pairs.insert((change.from as u32, change.to as u32)), "{change:?} twice");
        assert!(!change.when.is_empty());
    }
    for &state in EntryState::ALL {
        assert!(CHANGES.iter().any(|change| change.to == state), "no way to {state:?}");
        assert!(CHANGES.iter().any(|change| change.from == state), "no way out of {state:?}");
    }
    assert_eq!(SESSIONS_MAX, RING_ENTRIES, "a session's place is its entry");
}

/// Brings entries into each state by legal changes, then requests each change from each side.
#[test]
fn the_ring_makes_the_changes_of_the_table_and_no_others() {
    let road = |to: EntryState| -> Vec<EntryState> {
        use EntryState::{Claimed, Done, Empty, Fault, Published, Requeue, WaitIo, Yield};
        match to {
            Empty => vec![],
            Published => vec![Published],
            Claimed => vec![Published, Claimed],
            Done => vec![Published, Claimed, Done],
            WaitIo => vec![Published, Claimed, WaitIo],
            Yield => vec![Published, Claimed, Yield],
            Requeue => vec![Published, Claimed, Yield, Requeue],
            Fault => vec![Published, Fault],
        }
    };
    let mut made = 0;
    for &from in EntryState::ALL {
        for (&to, by) in
            EntryState::ALL.iter().flat_map(|to| [(to, Side::Host), (to, Side::Device)])
        {
            let mut ring = Ring::new(ALL);
            for next in road(from) {
                let by = transition(ring.state(5), next).unwrap().by;
                ring.change(by, 5, next).unwrap();
            }
            let asked = Transition { from, to };
            let listed = CHANGES.iter().find(|change| (change.from, change.to) == (from, to));
            let expected = match listed {
                Some(change) if change.by == by => Ok(()),
                Some(change) => {
                    Err(Refused::NotYours { entry: 5, transition: asked, owner: change.by })
                }
                None => Err(Refused::Illegal { entry: 5, transition: asked }),
            };
            assert_eq!(ring.change(by, 5, to), expected);
            assert_eq!(ring.state(5), if expected.is_ok() { to } else { from });
            let others: u32 = ring.occupancy().iter().sum();
            assert_eq!(others, RING_ENTRIES);
            made += usize::from(expected.is_ok());
        }
    }
    assert_eq!(made, CHANGES.len());
    let beyond = Ring::new(3).change(Side::Host, 3, EntryState::Published).unwrap_err();
    assert_eq!(beyond.to_string(), "entry 3: a ring entry cannot go from empty to published");
}

#[test]
fn a_command_yields_and_finishes() {
    let (mut scheduler, session) = one(10);
    assert_eq!(
        scheduler.submit(session).unwrap_err().to_string(),
        "entry 0: a ring entry cannot go from published to published"
    );
    let turn = scheduler.next(4).unwrap();
    assert_eq!((turn.session(), turn.tokens()), (session, 4));
    assert_eq!(scheduler.next(4), None, "nobody else is ready");
    assert_eq!(scheduler.close(session), Err(Rejected::Running));
    assert_eq!(scheduler.give_back(turn, 4, Outcome::Yield), Ok(Report::Ready));
    assert_eq!(state(&scheduler, session), EntryState::Requeue);
    let turn = scheduler.next(4).unwrap();
    assert_eq!(scheduler.give_back(turn, 2, Outcome::Done), Ok(Report::Finished));
    assert!(scheduler.cancel(session).is_err() && scheduler.next(4).is_none());
    scheduler.retire(session).unwrap();
    assert!(scheduler.retire(session).is_err());
    scheduler.submit(session).unwrap();
    let turn = scheduler.next(100).unwrap();
    assert_eq!(turn.tokens(), 4, "what is left of the quota");
    assert_eq!(scheduler.give_back(turn, 4, Outcome::Yield), Ok(Report::Failed(Why::Quota)));
    assert_eq!(scheduler.why(session), Some(Why::Quota));
    scheduler.close(session).unwrap();
    assert_eq!(scheduler.submit(session), Err(Rejected::Closed));
    let next = scheduler.open(Priority::High, 1).unwrap();
    assert_eq!(next.place(), session.place());
    assert_eq!(scheduler.cancel(session), Err(Rejected::Closed), "an old name is no new session's");
}

#[test]
fn waiting_cancelling_and_failing() {
    let (mut scheduler, session) = one(10);
    let turn = scheduler.next(4).unwrap();
    assert!(scheduler.returned(session).is_err() && scheduler.lost(session).is_err());
    assert_eq!(scheduler.refuse(session), Err(Rejected::Running));
    assert_eq!(scheduler.give_back(turn, 0, Outcome::WaitIo), Ok(Report::Waiting));
    assert_eq!(scheduler.next(4), None, "it waits");
    scheduler.returned(session).unwrap();
    scheduler.returned(session).unwrap();
    let turn = scheduler.next(4).unwrap();
    assert_eq!(scheduler.cancel(session), Ok(Cancelled::AtTurnEnd));
    assert_eq!(scheduler.give_back(turn, 4, Outcome::Yield), Ok(Report::Cancelled));
    for (outcome, report) in [(Outcome::Fault, Why::Trapped), (Outcome::Yield, Why::Overran)] {
        scheduler.submit(session).unwrap();
        let turn = scheduler.next(2).unwrap();
        let used = if report == Why::Overran { 3 } else { 0 };
        assert_eq!(scheduler.give_back(turn, used, outcome), Ok(Report::Failed(report)));
        assert_eq!((state(&scheduler, session), scheduler.next(4)), (EntryState::Fault, None));
        scheduler.retire(session).unwrap();
        assert_eq!(scheduler.why(session), None);
    }
    scheduler.submit(session).unwrap();
    scheduler.refuse(session).unwrap();
    assert_eq!((scheduler.why(session), scheduler.next(4)), (Some(Why::Refused), None));
    scheduler.retire(session).unwrap();
    scheduler.submit(session).unwrap();
    let turn = scheduler.next(1).unwrap();
    let _ = scheduler.give_back(turn, 0, Outcome::WaitIo);
    scheduler.returned(session).unwrap();
    scheduler.lost(session).unwrap();
    assert_eq!((scheduler.why(session), scheduler.next(4)), (Some(Why::Io), None));
    scheduler.retire(session).unwrap();
    scheduler.submit(session).unwrap();
    assert_eq!(scheduler.cancel(session), Ok(Cancelled::Now));
    assert_eq!((state(&scheduler, session), scheduler.next(4)), (EntryState::Empty, None));
}

/// Random operations on all entries, legal or not, with a record of every change of every entry.
#[test]
fn random_sessions_reach_every_state_and_make_every_change() {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(11);
    let mut made: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    let mut reached = [0_u64; EntryState::ALL.len()];
    let mut scheduler = Scheduler::new(ALL);
    let mut open: Vec<(SessionId, u64)> = Vec::new();
    let mut turns = Vec::new();
    for _ in 0..200_000 {
        let before: Vec<EntryState> = (0..ALL).map(|entry| scheduler.ring().state(entry)).collect();
        let any =
            open.get(random.random_range(0..ALL.max(open.len()))).map(|(session, _)| *session);
        match (random.random_range(0..10), any) {
            (0, _) => {
                let priority = Priority::ALL[random.random_range(0..3)];
                let quota = random.random_range(0..64);
                open.extend(scheduler.open(priority, quota).map(|session| (session, quota)));
            }
            (1 | 2, _) => turns.extend(scheduler.next(random.random_range(1..8))),
            (3 | 4, _) if !turns.is_empty() => {
                let turn: crate::Turn = turns.swap_remove(random.random_range(0..turns.len()));
                let beyond = u64::from(random.random_bool(0.1));
                let used = random.random_range(0..=turn.tokens() + beyond);
                let of = turn.session();
                let outcomes = [
                    Outcome::Done,
                    Outcome::Yield,
                    Outcome::Yield,
                    Outcome::WaitIo,
                    Outcome::Fault,
                ];
                let allowed = turn.tokens();
                scheduler.give_back(turn, used, outcomes[random.random_range(0..5)]).unwrap();
                let quota = open.iter_mut().find(|(session, _)| *session == of).unwrap();
                assert!(allowed <= quota.1, "more than the quota");
                quota.1 = quota.1.saturating_sub(used);
            }
            (5, Some(session)) => drop(scheduler.submit(session)),
            (6, Some(session)) => drop(scheduler.cancel(session)),
            (7, Some(session)) => drop(scheduler.retire(session)),
            (8, Some(session)) if random.random_bool(0.5) => drop(scheduler.returned(session)),
            (8, Some(session)) if random.random_bool(0.5) => drop(scheduler.lost(session)),
            (8, Some(session)) => drop(scheduler.refuse(session)),
            (9, Some(session)) if scheduler.close(session).is_ok() => {
                open.retain(|(s, _)| *s != session)
            }
            _ => {}
        }
        for (entry, from) in before.iter().enumerate() {
            let to = scheduler.ring().state(entry);
            reached[to as usize] += 1;
            if *from != to {
                let spent = |(session, _): &(SessionId, u64)| {
                    session.place() == entry && scheduler.why(*session) == Some(Why::Quota)
                };
                record(&mut made, *from, to, open.iter().any(spent));
            }
        }
    }
    assert!(
        reached.iter().zip(EntryState::ALL).all(|(n, s)| *n > 0 || *s == EntryState::Yield),
        "{reached:?}"
    );
    let missing: Vec<_> =
        CHANGES.iter().filter(|c| !made.contains_key(&(c.from as u32, c.to as u32))).collect();
    assert!(missing.is_empty(), "never made: {missing:?}");
}

/// Records a change. A turn that ends in `yield` and goes on to another state makes two changes at once.
fn record(made: &mut BTreeMap<(u32, u32), u64>, from: EntryState, to: EntryState, spent: bool) {
    let mut note = |from: EntryState, to: EntryState| {
        assert!(transition(from, to).is_ok(), "{from:?} to {to:?}");
        *made.entry((from as u32, to as u32)).or_insert(0) += 1;
    };
    if transition(from, to).is_ok() && !spent {
        return note(from, to);
    }
    assert_eq!(from, EntryState::Claimed, "to {to:?}");
    note(from, EntryState::Yield);
    note(EntryState::Yield, to);
}

/// A scheduler under the hostile loads.
trait Picks {
    fn open(&mut self, priority: Priority) -> usize;
    fn submit(&mut self, session: usize);
    /// Runs the next session and gives its turn back; returns the session.
    fn turn(&mut self, outcome: Outcome) -> Option<usize>;
    fn reopen(&mut self, session: usize);
    fn land(&mut self, session: usize);
    fn bound(&self, priority: Priority) -> u64;
}

struct Real {
    scheduler: Scheduler,
    sessions: Vec<(SessionId, Priority)>,
}

impl Picks for Real {
    fn open(&mut self, priority: Priority) -> usize {
        self.sessions.push((self.scheduler.open(priority, u64::MAX).unwrap(), priority));
        self.sessions.len() - 1
    }

    fn submit(&mut self, session: usize) {
        self.scheduler.submit(self.sessions[session].0).unwrap();
    }

    fn turn(&mut self, outcome: Outcome) -> Option<usize> {
        let turn = self.scheduler.next(1)?;
        let session = self.sessions.iter().position(|(id, _)| *id == turn.session()).unwrap();
        if self.scheduler.give_back(turn, 1, outcome) == Ok(Report::Finished) {
            self.scheduler.retire(self.sessions[session].0).unwrap();
        }
        Some(session)
    }

    fn reopen(&mut self, session: usize) {
        let (id, priority) = self.sessions[session];
        self.scheduler.close(id).unwrap();
        self.sessions[session].0 = self.scheduler.open(priority, u64::MAX).unwrap();
    }

    fn land(&mut self, session: usize) {
        self.scheduler.returned(self.sessions[session].0).unwrap();
    }

    fn bound(&self, priority: Priority) -> u64 {
        self.scheduler.longest_wait(priority)
    }
}

/// The naive scheduler: the highest priority first, and first come, first served among equals.
#[derive(Default)]
struct Strict {
    priorities: Vec<Priority>,
    line: Vec<(std::cmp::Reverse<Priority>, u64, usize)>,
    clock: u64,
}

impl Picks for Strict {
    fn open(&mut self, priority: Priority) -> usize {
        self.priorities.push(priority);
        self.priorities.len() - 1
    }

    fn submit(&mut self, session: usize) {
        self.clock += 1;
        self.line.push((std::cmp::Reverse(self.priorities[session]), self.clock, session));
    }

    fn turn(&mut self, outcome: Outcome) -> Option<usize> {
        let first = *self.line.iter().min()?;
        self.line.retain(|entry| *entry != first);
        if outcome == Outcome::Yield {
            self.submit(first.2);
        }
        Some(first.2)
    }

    fn reopen(&mut self, _: usize) {}

    fn land(&mut self, session: usize) {
        self.submit(session);
    }

    fn bound(&self, priority: Priority) -> u64 {
        Scheduler::new(ALL).longest_wait(priority)
    }
}

/// Sixty-four sessions that try to keep each other from running: long commands, short ones that are resubmitted at
/// once, sessions that close and reopen, some that wait for weights. Returns the longest wait and the turns of each
/// priority; fails at the first wait that is too long.
fn hostile(
    picks: &mut dyn Picks,
    crowd: [usize; 3],
    seed: u64,
) -> Result<BTreeMap<Priority, (u64, u64)>, String> {
    const TURNS: u64 = 20_000;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let kinds = Priority::ALL.iter().zip(crowd).flat_map(|(p, n)| std::iter::repeat_n(*p, n));
    let kinds: Vec<Priority> = kinds.collect();
    let mut ready_since: Vec<Option<u64>> = vec![None; kinds.len()];
    let mut waiting: Vec<usize> = Vec::new();
    for (session, priority) in kinds.iter().enumerate() {
        assert_eq!(picks.open(*priority), session);
        picks.submit(session);
        ready_since[session] = Some(0);
    }
    let mut seen: BTreeMap<Priority, (u64, u64)> = BTreeMap::new();
    for now in 0..TURNS {
        let outcome = match random.random_range(0..20) {
            0 => Outcome::WaitIo,
            1..8 => Outcome::Done,
            _ => Outcome::Yield,
        };
        let session = picks.turn(outcome).ok_or("nobody is ready")?;
        let waited = now - ready_since[session].ok_or("it was not ready")?;
        let entry = seen.entry(kinds[session]).or_default();
        *entry = (entry.0.max(waited), entry.1 + 1);
        ready_since[session] = Some(now + 1);
        match outcome {
            Outcome::WaitIo => {
                ready_since[session] = None;
                waiting.push(session);
            }
            Outcome::Done => {
                if random.random_bool(0.3) {
                    picks.reopen(session);
                }
                picks.submit(session);
            }
            Outcome::Yield | Outcome::Fault => {}
        }
        if !waiting.is_empty() && random.random_bool(0.2) {
            let returned = waiting.swap_remove(random.random_range(0..waiting.len()));
            picks.land(returned);
            ready_since[returned] = Some(now + 1);
        }
        for (session, since) in ready_since.iter().enumerate() {
            let bound = picks.bound(kinds[session]);
            if since.is_some_and(|since| now + 1 - since.min(now + 1) > bound) {
                return Err(format!(
                    "session {session} waits longer than {bound} turns at turn {now}"
                ));
            }
        }
    }
    Ok(seen)
}

#[test]
fn nothing_starves_among_64_hostile_sessions() {
    // Low, normal, high.
    let crowds = [[1, 0, 63], [1, 31, 32], [32, 32, 0], [21, 21, 22], [63, 0, 1], [2, 60, 2]];
    for (crowd, seed) in crowds.into_iter().zip(0..) {
        let mut real = Real { scheduler: Scheduler::new(ALL), sessions: Vec::new() };
        let seen =
            hostile(&mut real, crowd, seed).unwrap_or_else(|late| panic!("{crowd:?}: {late}"));
        let present = crowd.iter().filter(|sessions| **sessions > 0).count();
        assert_eq!(seen.len(), present, "{crowd:?}: {seen:?}");
        // Priority has an effect: on turns per session, and on the longest wait.
        let of = |priority: Priority| {
            seen.get(&priority)
                .map(|(wait, turns)| (*wait, *turns as f64 / crowd[priority as usize] as f64))
        };
        for pair in Priority::ALL.windows(2) {
            if let (Some(low), Some(high)) = (of(pair[0]), of(pair[1])) {
                assert!(low.0 >= high.0 && low.1 <= high.1, "{crowd:?}: {seen:?}");
            }
        }
    }
}

/// The same loads detect a scheduler that does starve.
#[test]
fn the_hostile_load_starves_a_strict_scheduler() {
    let late = hostile(&mut Strict::default(), [1, 0, 63], 0).unwrap_err();
    assert!(late.contains("session 0 waits longer than 319 turns"), "{late}");
}

#[test]
fn the_first_of_equals_runs_first() {
    let mut scheduler = Scheduler::new(8);
    let open = |scheduler: &mut Scheduler| scheduler.open(Priority::Normal, 9).unwrap();
    let sessions: Vec<SessionId> = (0..8).map(|_| open(&mut scheduler)).collect();
    // Another order than that of their places.
    let order = [3, 7, 0, 5, 1, 6, 2, 4].map(|place: usize| sessions[place]);
    for session in order {
        scheduler.submit(session).unwrap();
    }
    let ran = std::iter::from_fn(|| scheduler.next(1)).map(|turn| turn.session());
    assert_eq!(ran.collect::<Vec<_>>(), order);
}

/// Runs sessions that generate a text each, one of them with a fault at its fifth token.
fn texts(faulty: bool) -> BTreeMap<usize, Vec<u64>> {
    let mut scheduler = Scheduler::new(8);
    let sessions: Vec<SessionId> =
        (0..8).map(|i| scheduler.open(Priority::ALL[i % 3], 40).unwrap()).collect();
    for session in &sessions {
        scheduler.submit(*session).unwrap();
    }
    let mut texts: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    while let Some(turn) = scheduler.next(1) {
        let place = turn.session().place();
        let text = texts.entry(place).or_default();
        text.push(text.last().map_or(7, |last: &u64| last.wrapping_mul(31)) + place as u64);
        let outcome = match text.len() {
            5 if faulty && place == 3 => Outcome::Fault,
            20 => Outcome::Done,
            _ => Outcome::Yield,
        };
        scheduler.give_back(turn, 1, outcome).unwrap();
    }
    let expected = if faulty { EntryState::Fault } else { EntryState::Done };
    assert_eq!(state(&scheduler, sessions[3]), expected);
    texts
}

#[test]
fn a_faulty_session_is_faulted_alone() {
    let (mut good, mut bad) = (texts(false), texts(true));
    assert_eq!(bad.remove(&3).unwrap().len(), 5);
    good.remove(&3);
    assert_eq!(good, bad);
}

/// Most of 64 sessions run eight at a time, joined to the one that has the turn; the others run alone. No session waits
/// longer than the bound, in turns of `next`.
#[test]
fn who_joins_makes_nobody_wait_longer() {
    const SEQS: usize = 8;
    for (seed, alone) in [(1, 1), (2, 4), (3, 40)] {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut scheduler = Scheduler::new(ALL);
        let open = |at: usize| (scheduler.open(Priority::ALL[at % 3], u64::MAX).unwrap(), at % 3);
        let sessions: Vec<(SessionId, usize)> = (0..ALL).map(open).collect();
        for (session, _) in &sessions {
            scheduler.submit(*session).unwrap();
        }
        let mut ready_since = vec![0; ALL];
        let (mut joined, mut led) = (0, vec![0; ALL]);
        for now in 0..5000_u64 {
            let first = scheduler.next(9).unwrap();
            led[first.session().place()] += 1;
            let mut turns = vec![first];
            let mut suits = |session: SessionId| session.place() >= alone;
            if suits(turns[0].session()) {
                while turns.len() < SEQS
                    && let Some(turn) = scheduler.join(4, &mut suits)
                {
                    assert_eq!(turn.tokens(), 4);
                    turns.push(turn);
                }
                joined += turns.len() - 1;
                let mut places: Vec<usize> = turns.iter().map(|t| t.session().place()).collect();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places.len(), turns.len(), "nobody is in two sequences");
            }
            for turn in turns {
                let (session, place) = (turn.session(), turn.session().place());
                let waited = now - ready_since[place];
                let bound = scheduler.longest_wait(Priority::ALL[sessions[place].1]);
                assert!(waited <= bound, "session {place} waited {waited} turns of {bound}");
                ready_since[place] = now + 1;
                let outcome = if random.random_bool(0.3) { Outcome::Done } else { Outcome::Yield };
                if scheduler.give_back(turn, 1, outcome) == Ok(Report::Finished) {
                    scheduler.retire(session).unwrap();
                    scheduler.submit(session).unwrap();
                }
            }
        }
        assert_eq!(scheduler.turns(), 5000, "who joins has no turn of its own");
        assert!(joined > 2000, "{joined}");
        assert!(led[..alone].iter().all(|turns| *turns > 0), "{led:?}");
    }
}

#[test]
fn only_who_suits_and_is_ready_joins() {
    let mut scheduler = Scheduler::new(3);
    let open = |_| scheduler.open(Priority::Normal, 6).unwrap();
    let sessions: Vec<SessionId> = (0..3).map(open).collect();
    scheduler.submit(sessions[0]).unwrap();
    scheduler.submit(sessions[2]).unwrap();
    let first = scheduler.next(4).unwrap();
    assert_eq!(scheduler.join(4, &mut |session| session == sessions[1]), None);
    let second = scheduler.join(9, &mut |_| true).unwrap();
    assert_eq!((second.session(), second.tokens()), (sessions[2], 6), "what is left of the quota");
    assert_eq!(scheduler.join(4, &mut |_| true), None);
    assert_eq!(scheduler.turns(), 1);
    assert_eq!(scheduler.give_back(second, 6, Outcome::Done), Ok(Report::Finished));
    assert_eq!(scheduler.give_back(first, 1, Outcome::Yield), Ok(Report::Ready));
}
