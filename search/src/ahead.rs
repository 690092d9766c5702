//! Speculative work on threads beside the search.
//!
//! While a device runs and times one candidate, the next ones can be lowered, verified and run on the reference VM:
//! those results follow from the schedule alone. The next schedules are guessed, on the assumption that the current
//! trial is reverted. A guess decides nothing: the search requests the candidates that it proposes itself, and finds
//! some of them done. So the trials are the same with any number of threads, and with none.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Scope;

use ir::schedule::ScheduleConfig;
use reference_vm::compare::{Agreement, Reference};

use crate::cpu::{Candidate, Cpu};
use crate::history::{Guess, Tried};
use crate::rejection::Rejection;
use crate::settings::Clock;

/// Maximum lowered candidates in memory, some megabytes each: those of some trials to come, three for each of eight
/// devices among them.
const LOWERED_MAX: usize = 64;

/// A lowered schedule, or why it cannot be lowered.
pub(crate) type Lowered = Result<Candidate, Rejection>;

/// The result of the reference VM, and the seconds that it took by the caller's clock.
#[derive(Clone)]
pub(crate) struct Judged {
    pub(crate) found: Result<Agreement<Reference>, Rejection>,
    pub(crate) seconds: f64,
}

/// Results by id. A thread waits for a result that another one computes; if that thread panics, the waiting one
/// computes it.
type Memo<T> = BTreeMap<String, Arc<OnceLock<T>>>;

#[derive(Default)]
struct State {
    /// By the id of the schedule.
    lowered: Memo<Lowered>,
    /// Ids of schedules in `lowered`, oldest first.
    order: VecDeque<String>,
    /// The program and kernel ids that schedules lowered to, by schedule id.
    keys: BTreeMap<String, (String, String)>,
    /// By the id of the program.
    judged: Memo<Judged>,
    /// Guesses for the next trials, the most urgent first. Those of an earlier trial have another serial number.
    guesses: VecDeque<Guess>,
    serial: u64,
    /// Guessed candidates that the reference VM has not run yet, in the order in which the search may need them.
    waiting: VecDeque<Candidate>,
    over: bool,
}

/// Cached results of candidates, and the queue of the threads that compute more.
pub(crate) struct Ahead<'a> {
    pub(crate) cpu: Cpu<'a>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Selects one of the two memos.
type Of<T> = fn(&mut State) -> &mut Memo<T>;

/// A job for a thread.
enum Job {
    Judge(Box<Candidate>),
    Follow(Box<Guess>, u64),
}

impl<'a> Ahead<'a> {
    pub(crate) fn new(cpu: Cpu<'a>) -> Self {
        Self { cpu, state: Mutex::new(State::default()), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The result for an id: cached, awaited, or computed here.
    fn get<T: Clone>(&self, of: Of<T>, id: &str, compute: impl FnOnce() -> T) -> T {
        let cell = of(&mut self.lock()).entry(id.to_owned()).or_default().clone();
        cell.get_or_init(compute).clone()
    }

    /// Validates, lowers and verifies.
    pub(crate) fn lower(&self, config: &ScheduleConfig) -> Lowered {
        let valid = self.cpu.validate(config)?;
        let id = config.id();
        let lowered = self.get(|s| &mut s.lowered, &id, || self.cpu.lower(valid));
        let mut state = self.lock();
        if let Ok(candidate) = &lowered {
            state.keys.insert(id.clone(), candidate.key());
        }
        if !state.order.contains(&id) {
            state.order.push_back(id);
        }
        if state.order.len() > LOWERED_MAX
            && let Some(oldest) = state.order.pop_front()
        {
            state.lowered.remove(&oldest);
        }
        lowered
    }

    /// The lowered schedule, or the trial of `tried` that it would repeat. A schedule that is known to repeat one is
    /// not lowered again.
    pub(crate) fn lower_new(
        &self,
        config: &ScheduleConfig,
        tried: &Tried,
    ) -> Result<Result<Candidate, u64>, Rejection> {
        let known = self.lock().keys.get(&config.id()).and_then(|key| tried.get(key)).copied();
        if let Some(twin) = known {
            return Ok(Err(twin));
        }
        let candidate = self.lower(config)?;
        Ok(match tried.get(&candidate.key()) {
            Some(&twin) => Err(twin),
            None => Ok(candidate),
        })
    }

    /// Whether the reference VM has run a program already.
    pub(crate) fn is_judged(&self, program_id: &str) -> bool {
        self.lock().judged.get(program_id).is_some_and(|cell| cell.get().is_some())
    }

    /// Seconds that the reference VM took for a program that it has run.
    pub(crate) fn seconds(&self, program_id: &str) -> f64 {
        let state = self.lock();
        let judged = state.judged.get(program_id).and_then(|cell| cell.get());
        judged.map_or(0.0, |judged| judged.seconds)
    }

    /// Runs a candidate on the reference VM. Equal programs are run once.
    pub(crate) fn judge(&self, candidate: &Candidate, clock: Clock) -> Judged {
        self.get(
            |s| &mut s.judged,
            &candidate.program_id,
            || {
                let began = clock();
                let found = self.cpu.judge(candidate);
                Judged { found, seconds: (clock() - began).as_secs_f64() }
            },
        )
    }

    /// Adds a guess at the next trials: an urgent one goes before the others of this trial, any other replaces them.
    pub(crate) fn guess(&self, guess: Guess) {
        let mut state = self.lock();
        if !guess.is_urgent() {
            state.serial += 1;
            state.guesses.clear();
            state.waiting.clear();
        }
        state.guesses.push_front(guess);
        drop(state);
        self.changed.notify_all();
    }

    /// Works until the search is over. What the search may need first goes first.
    fn work(&self, clock: Clock) {
        while let Some(job) = self.next_job() {
            match job {
                Job::Judge(candidate) => drop(self.judge(&candidate, clock)),
                Job::Follow(guess, serial) => self.follow(*guess, serial),
            }
        }
    }

    /// Guesses one more candidate. It is discarded if the search has moved on to another trial meanwhile.
    fn follow(&self, mut guess: Guess, serial: u64) {
        let candidate = guess.next(|config, tried| self.lower_new(config, tried));
        let mut state = self.lock();
        if let Some(candidate) = candidate
            && state.serial == serial
        {
            if guess.is_urgent() {
                state.waiting.push_front(candidate);
                state.guesses.push_front(guess);
            } else {
                state.waiting.push_back(candidate);
                state.guesses.push_back(guess);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.over {
                return None;
            }
            let urgent = state.guesses.front().is_some_and(Guess::is_urgent);
            if !urgent && let Some(candidate) = state.waiting.pop_front() {
                return Some(Job::Judge(Box::new(candidate)));
            }
            let serial = state.serial;
            if let Some(guess) = state.guesses.pop_front() {
                return Some(Job::Follow(Box::new(guess), serial));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The helper threads of a search; they end with it.
pub(crate) struct Helpers<'a>(Arc<Ahead<'a>>);

impl<'a> Helpers<'a> {
    /// Starts `helpers` threads, each with a pool of `threads` threads for the reference VM. If the system cannot start
    /// the pool, that helper is left out.
    pub(crate) fn start<'scope>(
        ahead: &Arc<Ahead<'a>>,
        scope: &'scope Scope<'scope, '_>,
        helpers: usize,
        threads: usize,
        clock: Clock,
    ) -> Self
    where
        'a: 'scope,
    {
        for _ in 0..helpers {
            let ahead = ahead.clone();
            // A separate pool: a thread that waits for its part of one program must not steal work of another one.
            let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads).build() else {
                continue;
            };
            scope.spawn(move || pool.install(|| ahead.work(clock)));
        }
        Self(ahead.clone())
    }
}

impl Drop for Helpers<'_> {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.changed.notify_all();
    }
}
