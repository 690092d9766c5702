//! Totals over all workers, sampled at equal intervals.

use lower::SimulatedStep;

use crate::timeline::{Task, Timeline};

/// A total over all workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name in the trace.
    pub name: String,
    /// The unit of its samples.
    pub unit: &'static str,
    /// The time in nanoseconds, and the value from then on.
    pub samples: Vec<(u64, i64)>,
}

/// The most samples of a counter.
const SAMPLES: u64 = 1000;

/// The size of a worker's ring, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// All stages.
    pub bytes: u64,
    /// The cap on bytes in flight.
    pub in_flight: u64,
}

fn bin(timeline: &Timeline) -> u64 {
    timeline.span().div_ceil(SAMPLES).max(1)
}

/// Bytes that are multiplied or attended to; a bin's value is at its begin. The bytes of a task are spread evenly over
/// its products; the sum over all bins is the bytes of the step.
pub fn multiplied(timeline: &Timeline) -> Counter {
    let width = bin(timeline);
    let mut bins = vec![0_i64; (timeline.span() / width + 1) as usize];
    for task in &timeline.tasks {
        spread(task, timeline.start, width, &mut bins);
    }
    let at = |index: usize| timeline.start + index as u64 * width;
    Counter {
        name: format!("bytes multiplied in {width} ns"),
        unit: "bytes",
        samples: bins.into_iter().enumerate().map(|(index, bytes)| (at(index), bytes)).collect(),
    }
}

fn spread(task: &Task, start: u64, width: u64, bins: &mut [i64]) {
    let (from, to) = (task.staged - start, task.multiplied - start);
    // The bytes multiplied by a given time. All of them at once if the products take no time.
    let until = |at: u64| match to - from {
        0 => u128::from(task.bytes) * u128::from(at > from),
        length => {
            u128::from(task.bytes) * u128::from(at.clamp(from, to) - from) / u128::from(length)
        }
    };
    let (first, last) = (from / width, to / width);
    for index in first..=last {
        let (begin, end) = (index * width, (index + 1) * width);
        bins[index as usize] += (until(end) - until(begin)) as i64;
    }
}

/// Bytes waiting in the rings, and bytes in flight, of a simulated step. The device's records do not hold them.
pub fn rings(timeline: &Timeline, step: &SimulatedStep, ring: Ring) -> [Counter; 2] {
    let mut changes: Vec<(u64, usize, u64)> = Vec::new();
    for (worker, (times, tasks)) in step.workers.iter().zip(&timeline.workers).enumerate() {
        for (times, task) in times.iter().zip(&timeline.tasks[tasks.clone()]) {
            let [started, done] = times.arrived.map(|bytes| bytes.round() as u64);
            changes.extend([(task.staged, worker, started), (task.multiplied, worker, done)]);
        }
    }
    changes.sort_by_key(|&(at, ..)| at);
    let mut changes = changes.into_iter().peekable();
    // Before its first mark a worker's ring is full: it filled at the end of the step before.
    let mut arrived = vec![ring.bytes; timeline.workers.len()];
    let (mut depth, mut flight) = (Vec::new(), Vec::new());
    for at in (timeline.start..=timeline.end).step_by(bin(timeline) as usize) {
        while let Some((_, worker, bytes)) = changes.next_if(|&(changed, ..)| changed <= at) {
            arrived[worker] = bytes;
        }
        let on_their_way = |&arrived: &u64| ring.bytes.saturating_sub(arrived).min(ring.in_flight);
        depth.push((at, arrived.iter().sum::<u64>() as i64));
        flight.push((at, arrived.iter().map(on_their_way).sum::<u64>() as i64));
    }
    let counter = |name: &str, samples| Counter { name: name.to_owned(), unit: "bytes", samples };
    [counter("ring depth", depth), counter("bytes in flight", flight)]
}
