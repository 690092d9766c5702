//! Explores every interleaving of two workers, one job and a clock: claims, heartbeats, results, lost answers, crashes,
//! sleeping and late workers. The transitions are those of [`fleet::protocol`], which the board executes.
//!
//! Positive control: each of five planted bugs is found, with a shortest trace.

use std::collections::{HashMap, VecDeque};

use fleet::protocol::{Claimed, Fence, Finish, Job, Late, Millis, State, Terms};

const TERMS: Terms = Terms { lease_ms: 2, heartbeat_ms: 1, attempts_max: 2 };
const WORKERS: usize = 2;
/// The clock stops here: by then every lease of every attempt could have run out.
const LATEST: Millis = 7;
/// Claims in all: attempts that count, and some that are given back.
const FENCES: Fence = 4;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bug {
    None,
    /// A live lease is taken away.
    ClaimsEarly,
    /// A heartbeat renews whatever lease there is.
    BeatsWithoutFence,
    /// A late result is accepted.
    FinishesWithoutFence,
    /// A request that is repeated after a lost answer is called late.
    ForgetsItsFinish,
    /// The result is recorded first, the job closed in a second transaction.
    FinishesInTwoSteps,
}

/// What a worker believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Worker {
    Idle,
    /// It works under a lease that it believes in until this time.
    Works {
        fence: Fence,
        until: Millis,
    },
    /// It has sent its result and heard nothing: the request may have been executed or not.
    Doubts {
        fence: Fence,
    },
    /// Between the two transactions of a planted bug.
    Half {
        fence: Fence,
    },
    Accepted {
        fence: Fence,
    },
    Refused {
        fence: Fence,
    },
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    now: Millis,
    job: Job,
    /// The rows of the table of results: the lease of each.
    results: Vec<Fence>,
    fences: Fence,
    workers: [Worker; WORKERS],
}

impl World {
    fn start() -> Self {
        let workers = [Worker::Idle; WORKERS];
        Self { now: 0, job: Job::new(), results: Vec::new(), fences: 0, workers }
    }

    fn is_closed(&self) -> bool {
        matches!(self.job.state, State::Done { .. } | State::Dead)
    }

    fn with(&self, index: usize, worker: Worker) -> Self {
        let mut next = self.clone();
        next.workers[index] = worker;
        next
    }

    /// Every world that one step leads to, with the step's name.
    fn steps(&self, bug: Bug) -> Vec<(String, Self)> {
        let mut steps = Vec::new();
        if self.now < LATEST {
            steps.push(("tick".to_owned(), Self { now: self.now + 1, ..self.clone() }));
        }
        for (index, worker) in self.workers.into_iter().enumerate() {
            let mut add = |name: &str, world| steps.push((format!("{index}: {name}"), world));
            match worker {
                Worker::Idle => self.claims(index, bug, &mut add),
                Worker::Works { fence, .. } => {
                    self.beats(index, fence, bug, &mut add);
                    self.finishes(index, fence, bug, &mut add);
                    self.frees(index, fence, &mut add);
                }
                Worker::Doubts { fence } => self.finishes(index, fence, bug, &mut add),
                Worker::Half { fence } => self.closes(index, fence, &mut add),
                Worker::Accepted { .. } | Worker::Refused { .. } | Worker::Dead => continue,
            }
            add("dies", self.with(index, Worker::Dead));
        }
        steps
    }

    fn claims(&self, index: usize, bug: Bug, add: &mut impl FnMut(&str, Self)) {
        if self.fences == FENCES {
            return;
        }
        let fence = self.fences + 1;
        let seen = if bug == Bug::ClaimsEarly { self.now + 1 } else { self.now };
        match self.job.claim(seen, fence, &TERMS) {
            Claimed::Granted(job) => {
                let until = TERMS.lease_ms + self.now;
                let mut next = self.with(index, Worker::Works { fence, until });
                (next.job, next.fences) = (job, fence);
                // The answer was lost: nobody works under this lease.
                add("claims in vain", Self { workers: self.workers, ..next.clone() });
                add("claims", next);
            }
            Claimed::Dead(job) => add("finds it dead", Self { job, ..self.clone() }),
            Claimed::No => {}
        }
    }

    fn beats(&self, index: usize, fence: Fence, bug: Bug, add: &mut impl FnMut(&str, Self)) {
        let shown = match self.job.state {
            State::Leased { fence: held, .. } if bug == Bug::BeatsWithoutFence => held,
            State::Queued | State::Leased { .. } | State::Done { .. } | State::Dead => fence,
        };
        match self.job.beat(self.now, shown, &TERMS) {
            Ok(job) => {
                let until = self.now + TERMS.lease_ms;
                let next =
                    Self { job: job.clone(), ..self.with(index, Worker::Works { fence, until }) };
                add("beats", next);
                add("beats in vain", Self { job, ..self.clone() });
            }
            Err(_) => add("hears that it is late", self.with(index, Worker::Refused { fence })),
        }
    }

    /// It sends its result, for the first time or again.
    fn finishes(&self, index: usize, fence: Fence, bug: Bug, add: &mut impl FnMut(&str, Self)) {
        if bug == Bug::FinishesInTwoSteps && self.job.finish(fence, "r").is_ok() {
            let mut next = self.with(index, Worker::Half { fence });
            next.results.push(fence);
            return add("records", next);
        }
        let answer = match (bug, &self.job.state) {
            (Bug::FinishesWithoutFence, State::Leased { fence: held, .. }) => {
                self.job.finish(*held, "r")
            }
            (Bug::ForgetsItsFinish, State::Done { .. }) => Err(Late::Finished),
            _ => self.job.finish(fence, "r"),
        };
        let doubts = self.with(index, Worker::Doubts { fence });
        add("sends nothing that arrives", doubts.clone());
        match answer {
            Ok(Finish::Now(job)) => {
                let mut next = Self { job, ..self.with(index, Worker::Accepted { fence }) };
                next.results.push(fence);
                add(
                    "finishes, the answer is lost",
                    Self { workers: doubts.workers, ..next.clone() },
                );
                add("finishes", next);
            }
            Ok(Finish::Already) => {
                add("reads it back", self.with(index, Worker::Accepted { fence }))
            }
            Err(_) => add("is refused", self.with(index, Worker::Refused { fence })),
        }
    }

    fn closes(&self, index: usize, fence: Fence, add: &mut impl FnMut(&str, Self)) {
        if let Ok(Finish::Now(job)) = self.job.finish(fence, "r") {
            add("closes", Self { job, ..self.with(index, Worker::Accepted { fence }) });
        }
    }

    /// It gives the job back, or says that it failed.
    fn frees(&self, index: usize, fence: Fence, add: &mut impl FnMut(&str, Self)) {
        let after = |job| Self { job, ..self.with(index, Worker::Idle) };
        if let Ok(job) = self.job.give_back(fence) {
            add("gives back", after(job));
        }
        if let Ok(job) = self.job.fail(fence, &TERMS) {
            add("fails", after(job));
        }
    }

    /// What must hold in every world.
    fn broken(&self) -> Option<String> {
        let done = match self.job.state {
            State::Done { fence, .. } => Some(fence),
            State::Queued | State::Leased { .. } | State::Dead => None,
        };
        if self.results != done.into_iter().collect::<Vec<_>>() {
            return Some(format!("results {:?} of a job {:?}", self.results, self.job.state));
        }
        let believes =
            |worker: &Worker| matches!(worker, Worker::Works { until, .. } if self.now < *until);
        if self.workers.iter().filter(|worker| believes(worker)).count() > 1 {
            return Some("two workers believe in their leases".to_owned());
        }
        for worker in self.workers {
            if let Worker::Accepted { fence } = worker
                && done != Some(fence)
            {
                return Some(format!("lease {fence} was accepted and is not recorded"));
            }
            if let Worker::Refused { fence } = worker
                && done == Some(fence)
            {
                return Some(format!("lease {fence} was refused and is recorded"));
            }
        }
        if self.job.attempts > TERMS.attempts_max {
            return Some(format!("{} attempts", self.job.attempts));
        }
        (self.job.state == State::Dead && self.job.attempts < TERMS.attempts_max)
            .then(|| "dead with attempts left".to_owned())
    }
}

/// All worlds, and a shortest trace to the first broken one.
struct Explored {
    worlds: Vec<World>,
    next: Vec<Vec<usize>>,
    broken: Option<(String, Vec<String>)>,
}

fn explore(bug: Bug) -> Explored {
    let mut numbers = HashMap::from([(World::start(), 0)]);
    let mut found = Explored { worlds: vec![World::start()], next: Vec::new(), broken: None };
    let mut came: Vec<(usize, String)> = vec![(0, String::new())];
    let mut queue = VecDeque::from([0]);
    while let Some(at) = queue.pop_front() {
        let world = found.worlds[at].clone();
        if let Some(what) = world.broken() {
            let mut trace = Vec::new();
            let mut here = at;
            while here != 0 {
                trace.push(came[here].1.clone());
                here = came[here].0;
            }
            trace.reverse();
            found.broken = Some((what, trace));
            return found;
        }
        let mut next = Vec::new();
        for (name, step) in world.steps(bug) {
            let number = *numbers.entry(step.clone()).or_insert_with(|| {
                found.worlds.push(step);
                came.push((at, name));
                queue.push_back(found.worlds.len() - 1);
                found.worlds.len() - 1
            });
            next.push(number);
        }
        found.next.push(next);
    }
    found
}

#[test]
fn every_job_is_done_once_even_if_workers_are_killed_stopped_or_late() {
    let found = explore(Bug::None);
    assert_eq!(found.broken, None);
    let count = |of: fn(&World) -> bool| found.worlds.iter().filter(|world| of(world)).count();
    let accepted =
        |world: &World| world.workers.iter().any(|w| matches!(w, Worker::Accepted { .. }));
    // The model reaches what it is about.
    let late = count(|w| {
        w.workers.iter().any(|w| matches!(w, Worker::Refused { .. })) && w.results.len() == 1
    });
    let dead = count(|world| world.job.state == State::Dead);
    assert!(found.worlds.len() > 10_000, "{} worlds", found.worlds.len());
    assert!(late > 0 && dead > 0 && found.worlds.iter().any(accepted), "{late} {dead}");
    println!("{} worlds, {late} with a late worker, {dead} with a dead job", found.worlds.len());
}

/// No world is stuck: as long as a worker lives, some path closes the job, without a crash of its own.
#[test]
fn a_job_can_always_be_closed_while_a_worker_lives() {
    let found = explore(Bug::None);
    let mut closes: Vec<bool> = found.worlds.iter().map(World::is_closed).collect();
    loop {
        let more: Vec<usize> = (0..closes.len())
            .filter(|&at| !closes[at] && found.next[at].iter().any(|&next| closes[next]))
            .collect();
        if more.is_empty() {
            break;
        }
        more.into_iter().for_each(|at| closes[at] = true);
    }
    let can_act = |world: &World| {
        let idle = |worker: &Worker| *worker == Worker::Idle && world.fences < FENCES;
        let holds = |worker: &Worker| match (worker, &world.job.state) {
            (
                Worker::Works { fence, .. } | Worker::Doubts { fence },
                State::Leased { fence: held, .. },
            ) => fence == held,
            _ => false,
        };
        // Time to see the last lease run out is part of the bounds, not of the protocol.
        world.now + TERMS.lease_ms <= LATEST && world.workers.iter().any(|w| idle(w) || holds(w))
    };
    let stuck =
        found.worlds.iter().zip(&closes).find(|(world, closes)| !**closes && can_act(world));
    assert_eq!(stuck, None);
}

#[test]
fn planted_bugs_are_found() {
    let bugs = [
        (Bug::ClaimsEarly, "two workers believe"),
        (Bug::BeatsWithoutFence, "two workers believe"),
        (Bug::FinishesWithoutFence, "results"),
        (Bug::ForgetsItsFinish, "was refused and is recorded"),
        (Bug::FinishesInTwoSteps, "results"),
    ];
    for (bug, wanted) in bugs {
        let (what, trace) = explore(bug).broken.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: {what} after {}", trace.join("; "));
        assert!(what.contains(wanted), "{bug:?}: {what}");
        assert!((1..=8).contains(&trace.len()), "{bug:?}: {trace:?}");
    }
}

/// Transitions by hand, next to their meaning.
#[test]
fn a_lease_counts_until_somebody_else_has_the_job() {
    let Claimed::Granted(first) = Job::new().claim(0, 1, &TERMS) else { panic!() };
    assert_eq!(first.claim(1, 2, &TERMS), Claimed::No, "the lease is live");
    assert!(first.beat(5, 1, &TERMS).is_ok(), "it ran out, and nobody took the job");
    let Claimed::Granted(second) = first.claim(2, 2, &TERMS) else { panic!() };
    assert_eq!(second.beat(3, 1, &TERMS), Err(Late::Taken));
    assert_eq!(second.finish(1, "a"), Err(Late::Taken));
    assert!(matches!(second.claim(4, 3, &TERMS), Claimed::Dead(_)), "two attempts at most");
    assert_eq!(second.give_back(2).unwrap().attempts, 1, "given back: it does not count");
    assert_eq!(second.fail(2, &TERMS).unwrap().state, State::Dead);
    let Ok(Finish::Now(done)) = second.finish(2, "a") else { panic!() };
    assert_eq!(done.finish(2, "a"), Ok(Finish::Already));
    assert_eq!(done.finish(2, "b"), Err(Late::Differs));
    assert_eq!(done.finish(1, "a"), Err(Late::Finished));
    assert_eq!(done.claim(99, 3, &TERMS), Claimed::No);
}

#[test]
fn terms_that_cannot_work_are_refused() {
    assert!(Terms::default().check().is_ok());
    let bad = [(60_000, 0, 3), (60_000, 30_001, 3), (60_000, 10_000, 0), (86_400_001, 1, 1)];
    for (lease_ms, heartbeat_ms, attempts_max) in bad {
        assert!(Terms { lease_ms, heartbeat_ms, attempts_max }.check().is_err());
    }
}
