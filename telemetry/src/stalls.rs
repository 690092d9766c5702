//! Early detection of stalls, from two samples of the workers: a worker is suspected if it finished no task for longer
//! than a limit while a step was under way. The kernel's own watchdogs report at their deadline, which is later.

use abi::{Trap, WorkerHeartbeat, WorkerWords};

/// Compares samples of workers, and records since when each has made no progress.
#[derive(Clone, Copy, Debug)]
pub struct Stalls {
    limit_ns: u64,
}

/// A worker suspected of a stall.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Suspect {
    /// The worker.
    pub worker: u32,
    /// Nanoseconds since its last progress.
    pub still_ns: u64,
    /// Its words in the page.
    pub words: WorkerWords,
    /// Nanoseconds since its watchdog last wrote. If the watchdog is silent, the SM is not running.
    pub silent_ns: u64,
}

impl Stalls {
    /// A detector with this limit.
    #[must_use]
    pub fn new(limit_ns: u64) -> Self {
        Self { limit_ns }
    }

    /// Updates a worker's words from its heartbeat. `under_way`: the machine has a command that it has not completed.
    pub fn look(
        &self,
        words: &mut WorkerWords,
        worker_heartbeat: &WorkerHeartbeat,
        under_way: bool,
        now_ns: u64,
    ) {
        let idle = worker_heartbeat.active == 0 || !under_way;
        // Only a worker without progress in a running step counts as stalled; a new step restarts the time.
        let moved = idle
            || (worker_heartbeat.progress, worker_heartbeat.epoch) != (words.progress, words.epoch);
        let beats = worker_heartbeat.beat != words.beat || words.beat_ns == 0;
        let moved_ns = if moved || words.moved_ns == 0 { now_ns } else { words.moved_ns };
        let beat_ns = if beats { now_ns } else { words.beat_ns };
        let still = now_ns.saturating_sub(moved_ns);
        *words = WorkerWords {
            beat: worker_heartbeat.beat,
            active: worker_heartbeat.active,
            progress: worker_heartbeat.progress,
            epoch: worker_heartbeat.epoch,
            position: worker_heartbeat.position,
            task: worker_heartbeat.task,
            issued: worker_heartbeat.issued,
            wait: worker_heartbeat.wait,
            object: worker_heartbeat.object,
            have: worker_heartbeat.have,
            need: worker_heartbeat.need,
            suspected: u32::from(still > self.limit_ns),
            moved_ns,
            beat_ns,
        };
    }

    /// One of the suspected workers, and their number. A worker that waits for nothing comes before those that wait,
    /// since they may wait for it; otherwise the first is returned.
    #[must_use]
    pub fn suspects(workers: &[WorkerWords], now_ns: u64) -> (u32, Option<Suspect>) {
        let mut count = 0;
        let mut found: Option<Suspect> = None;
        for (worker, words) in workers.iter().enumerate() {
            if words.suspected == 0 {
                continue;
            }
            count += 1;
            let suspect = Suspect {
                worker: worker as u32,
                still_ns: now_ns.saturating_sub(words.moved_ns),
                words: *words,
                silent_ns: now_ns.saturating_sub(words.beat_ns),
            };
            if found.is_none_or(|before| before.words.wait != 0 && words.wait == 0) {
                found = Some(suspect);
            }
        }
        (count, found)
    }
}

impl Suspect {
    /// Number of words of a suspect.
    pub const WORDS: usize = 9;

    /// Encodes it as words, for memory that processes share.
    #[must_use]
    pub fn to_words(&self) -> [u32; Self::WORDS] {
        let WorkerWords { task, position, wait, object, have, need, .. } = self.words;
        let ms = |ns: u64| u32::try_from(ns / 1_000_000).unwrap_or(u32::MAX);
        let (still, silent) = (ms(self.still_ns), ms(self.silent_ns));
        [self.worker, still, silent, task, position, wait, object, have, need]
    }

    /// Decodes it from words.
    #[must_use]
    pub fn from_words(words: [u32; Self::WORDS]) -> Self {
        let [worker, still, silent, task, position, wait, object, have, need] = words;
        let ns = |ms: u32| u64::from(ms) * 1_000_000;
        let words = WorkerWords {
            task,
            position,
            wait,
            object,
            have,
            need,
            suspected: 1,
            ..WorkerWords::default()
        };
        Self { worker, still_ns: ns(still), silent_ns: ns(silent), words }
    }
}

impl std::fmt::Display for Suspect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let WorkerWords { task, position, wait, object, have, need, .. } = self.words;
        write!(
            f,
            "worker {} has finished no task for {} ms (task {task} of position {position})",
            self.worker,
            self.still_ns / 1_000_000
        )?;
        let waits = [
            (Trap::CounterDeadline, "counter"),
            (Trap::PayloadDeadline, "word of buffer"),
            (Trap::StageDeadline, "stage"),
        ];
        let Some((_, name)) = waits.iter().find(|(trap, _)| *trap as u32 == wait) else {
            return write!(f, " and waits for nothing");
        };
        write!(f, " and waits for {name} {object}, which has {have} and needs {need}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 1000 * MS;

    fn worker_heartbeat(progress: u32) -> WorkerHeartbeat {
        WorkerHeartbeat {
            active: 1,
            beat: progress,
            progress,
            epoch: 3,
            ..WorkerHeartbeat::default()
        }
    }

    #[test]
    fn a_worker_that_does_not_move_is_suspected_after_the_limit_and_cleared_when_it_moves() {
        let stalls = Stalls::new(200 * MS);
        let mut words = WorkerWords::default();
        let waits = |beat| WorkerHeartbeat {
            beat,
            wait: Trap::CounterDeadline as u32,
            object: 7,
            have: 12,
            need: 16,
            ..worker_heartbeat(5)
        };
        for (at, expected) in [(0, 0), (100, 0), (200, 0), (201, 1), (900, 1)] {
            stalls.look(&mut words, &waits(at as u32), true, START + at * MS);
            assert_eq!(words.suspected, expected, "after {at} ms");
        }
        let others = [WorkerWords::default(), words];
        let (count, suspect) = Stalls::suspects(&others, START + 900 * MS);
        let said = suspect.unwrap().to_string();
        let shared = Suspect::from_words(suspect.unwrap().to_words());
        assert_eq!((count, shared.to_string()), (1, said.clone()));
        for part in ["worker 1", "900 ms", "counter 7", "has 12 and needs 16"] {
            assert!(said.contains(part), "{said}");
        }
        stalls.look(&mut words, &worker_heartbeat(6), true, START + 1000 * MS);
        assert_eq!((words.suspected, words.moved_ns), (0, START + 1000 * MS));
    }

    #[test]
    fn a_worker_between_steps_or_of_an_idle_machine_is_not() {
        let stalls = Stalls::new(200 * MS);
        let mut words = WorkerWords::default();
        stalls.look(&mut words, &worker_heartbeat(5), true, START);
        let between = WorkerHeartbeat { active: 0, ..worker_heartbeat(5) };
        stalls.look(&mut words, &between, true, START + 900 * MS);
        assert_eq!(words.suspected, 0);
        stalls.look(&mut words, &worker_heartbeat(5), false, START + 1800 * MS);
        assert_eq!(words.suspected, 0);
        // The time counts from the first sample of the next step, not from the last step.
        stalls.look(&mut words, &worker_heartbeat(5), true, START + 1900 * MS);
        assert_eq!(words.suspected, 0);
        stalls.look(&mut words, &worker_heartbeat(5), true, START + 2001 * MS);
        assert_eq!(words.suspected, 1);
    }

    #[test]
    fn who_waits_for_nothing_is_named_first() {
        let stuck =
            |wait| WorkerWords { suspected: 1, wait, moved_ns: START, ..WorkerWords::default() };
        let waiting = stuck(Trap::CounterDeadline as u32);
        let (count, suspect) =
            Stalls::suspects(&[waiting, waiting, stuck(0), stuck(0)], START + MS);
        assert_eq!((count, suspect.map(|suspect| suspect.worker)), (4, Some(2)));
        assert!(suspect.unwrap().to_string().contains("waits for nothing"));
        assert_eq!(Stalls::suspects(&[WorkerWords::default()], START), (0, None));
    }
}
