//! Observes the kernel from a separate thread, without driver calls: commands, steps, worker heartbeats, stall
//! suspicion. All of it is read from memory that the device writes, at no cost to the thread that drives the machine.

use abi::{EventTrack, EventWords, RING_ENTRIES, Telemetry, UNIT_BYTES, WORKERS_MAX};
use telemetry::{Edit, Stalls, Suspect, bucket};
use vm_host::Monitor;

/// How long a worker may make no progress inside a step before it is suspected. A step takes milliseconds, and the
/// kernel itself gives up after seconds.
const STILL_NS: u64 = 250_000_000;

/// How much two clocks may drift apart between two looks.
const DRIFT_NS: i64 = 1_000;

/// Counts the bytes that arrived while the kernel runs, if they do; others arrived before its launch.
fn arrived(head: &mut Telemetry, streamed: Option<u64>) {
    let before = head.arrived_bytes;
    head.arrived_bytes = streamed.unwrap_or(head.weights_bytes);
    if let Some(bytes) = streamed {
        // Fewer than before are those of another load.
        head.uploaded_bytes += bytes.checked_sub(before).unwrap_or(bytes);
    }
}

pub(crate) struct KernelWatch {
    launch: u64,
    /// Commands counted so far.
    seen: u32,
    /// The end of the last of them, by the device's clock.
    ended_ns: u64,
    /// The host's clock less the device's, at most: the shortest time from a command's end to a look at it is in it.
    ahead_ns: i64,
    /// Units that each loader has requested so far.
    issued: [u32; WORKERS_MAX as usize],
    stalls: Stalls,
    suspected: u32,
}

impl Default for KernelWatch {
    fn default() -> Self {
        Self {
            launch: 0,
            seen: 0,
            ended_ns: 0,
            ahead_ns: i64::MAX,
            issued: [0; WORKERS_MAX as usize],
            stalls: Stalls::new(STILL_NS),
            suspected: 0,
        }
    }
}

impl KernelWatch {
    /// Publishes everything new. Returns the suspected worker, if there is one.
    pub(crate) fn look(
        &mut self,
        monitor: &Monitor,
        edit: &mut Edit<'_>,
        now_ns: u64,
    ) -> Option<Suspect> {
        if self.launch != monitor.launch() {
            *self = Self { launch: monitor.launch(), ..Self::default() };
        }
        let (answered, outstanding) = (monitor.answered(), monitor.outstanding());
        self.commands(monitor, edit, answered, now_ns);
        let head = edit.head();
        head.published = head.drained + u64::from(outstanding);
        arrived(head, monitor.arrived_bytes());
        self.seen = answered;
        self.workers(monitor, edit, outstanding > 0, now_ns)
    }

    fn commands(&mut self, monitor: &Monitor, edit: &mut Edit<'_>, answered: u32, now_ns: u64) {
        let new = answered.wrapping_sub(self.seen);
        edit.head().drained += u64::from(new);
        // The clocks may drift apart.
        self.ahead_ns = self.ahead_ns.saturating_add(DRIFT_NS);
        for index in (0..new.min(RING_ENTRIES)).rev().map(|back| answered.wrapping_sub(back + 1)) {
            let head = edit.head();
            let Some(done) = monitor.completion(index) else {
                head.unseen += 1;
                continue;
            };
            if done.trap != 0 {
                head.traps += 1;
            }
            let took = done.end_ns.saturating_sub(done.start_ns);
            head.device_running_ns += took;
            if self.ended_ns != 0 {
                head.device_idle_ns += done.start_ns.saturating_sub(self.ended_ns);
            }
            self.ended_ns = done.end_ns;
            if done.steps > 0 {
                let step = took / u64::from(done.steps);
                head.positions += u64::from(done.steps);
                head.steps[bucket(step)] += u64::from(done.steps);
                head.steps_ns += took;
            }
            self.event(edit, index, &done, now_ns);
        }
        edit.head().unseen += u64::from(new.saturating_sub(RING_ENTRIES));
    }

    /// The device's part of a command, by the host's clock.
    fn event(&mut self, edit: &mut Edit<'_>, index: u32, done: &abi::Completion, now_ns: u64) {
        self.ahead_ns = self.ahead_ns.min(now_ns.wrapping_sub(done.end_ns).cast_signed());
        let at = |device_ns: u64| device_ns.wrapping_add_signed(self.ahead_ns);
        edit.event(EventWords {
            begin_ns: at(done.start_ns),
            end_ns: at(done.end_ns),
            number: u64::from(index) + 1,
            track: EventTrack::Device as u32,
            positions: done.steps,
            ..EventWords::default()
        });
    }

    fn workers(
        &mut self,
        monitor: &Monitor,
        edit: &mut Edit<'_>,
        under_way: bool,
        now_ns: u64,
    ) -> Option<Suspect> {
        let count = monitor.workers().min(WORKERS_MAX) as usize;
        edit.head().workers = count as u32;
        let workers = &mut edit.workers()[..count];
        let mut streamed = 0;
        for ((worker, words), issued) in workers.iter_mut().enumerate().zip(&mut self.issued) {
            let worker_heartbeat = monitor.worker_heartbeat(worker as u32);
            streamed +=
                u64::from(worker_heartbeat.issued.wrapping_sub(*issued)) * u64::from(UNIT_BYTES);
            *issued = worker_heartbeat.issued;
            self.stalls.look(words, &worker_heartbeat, under_way, now_ns);
        }
        let (suspected, suspect) = Stalls::suspects(workers, now_ns);
        let head = edit.head();
        head.streamed_bytes += streamed;
        head.suspicions += u64::from(suspected > 0 && self.suspected == 0);
        head.suspected = suspected;
        head.suspect = suspect.map_or(0, |suspect| suspect.worker);
        self.suspected = suspected;
        suspect
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_weights_are_counted_once_as_they_arrive() {
        let mut page = telemetry::Page::boxed();
        let head = &mut page.head;
        head.weights_bytes = 90;
        for (streamed, arrived_bytes, uploaded_bytes) in [
            (Some(0), 0, 0),
            (Some(60), 60, 60),
            (Some(90), 90, 90),
            // The same weights under another kernel, a second load, and one before a launch.
            (Some(90), 90, 90),
            (Some(20), 20, 110),
            (Some(90), 90, 180),
            (None, 90, 180),
        ] {
            arrived(head, streamed);
            assert_eq!((head.arrived_bytes, head.uploaded_bytes), (arrived_bytes, uploaded_bytes));
        }
    }
}
