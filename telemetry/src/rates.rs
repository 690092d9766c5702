//! Rates computed from two snapshots of a page.

use abi::{Activity, Telemetry};

use crate::page::Page;
use crate::steps::{BUCKETS, quantile_ns};

/// The time by activity, as fractions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares {
    /// The machine ran commands.
    pub running: f64,
    /// Between commands, with something to do.
    pub between: f64,
    /// There was nothing to do.
    pub idle: f64,
    /// Models and programs were loaded onto the machine.
    pub loading: f64,
}

/// The rates between two snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Seconds between them.
    pub seconds: f64,
    /// Tokens chosen per second.
    pub tokens: f64,
    /// Positions run per second.
    pub positions: f64,
    /// The time by activity.
    pub shares: Shares,
    /// Fraction of the device's time without a command; `None` if the device has no clock.
    pub device_idle: Option<f64>,
    /// Median time of a step, in microseconds; `None` without steps.
    pub p50_us: Option<f64>,
    /// 99th percentile of the step time.
    pub p99_us: Option<f64>,
    /// Mean step time.
    pub mean_us: Option<f64>,
    /// Roofline bound of a step: its weights over the card's bandwidth.
    pub bound_us: Option<f64>,
    /// Bytes per second while the machine ran.
    pub bytes: f64,
    /// Whether the loaders counted these bytes; otherwise they are computed as positions times the weights of a step.
    pub counted: bool,
    /// Fraction of the time that was spent writing the page.
    pub telemetry: f64,
}

/// Time spent on an activity until `now`.
pub(crate) fn spent_ns(head: &Telemetry, activity: Activity, now_ns: u64) -> u64 {
    let open =
        if head.activity == activity as u32 { now_ns.saturating_sub(head.activity_ns) } else { 0 };
    head.spent_ns[activity as usize].saturating_add(open)
}

impl Rates {
    /// The rates between two snapshots of the same page, with the time of each.
    #[must_use]
    pub fn between(before: (&Page, u64), after: (&Page, u64)) -> Self {
        let ((before, from), (after, to)) = (before, after);
        let seconds = to.saturating_sub(from) as f64 / 1e9;
        let more = |field: fn(&Telemetry) -> u64| {
            field(&after.head).saturating_sub(field(&before.head)) as f64
        };
        let share = |activity| {
            let more = spent_ns(&after.head, activity, to).saturating_sub(spent_ns(
                &before.head,
                activity,
                from,
            ));
            ratio(more as f64 / 1e9, seconds).min(1.0)
        };
        let shares = Shares {
            running: share(Activity::Running),
            between: share(Activity::Between),
            idle: share(Activity::Idle),
            loading: share(Activity::Loading),
        };
        let steps: [u64; BUCKETS] = std::array::from_fn(|bucket| {
            after.head.steps[bucket].saturating_sub(before.head.steps[bucket])
        });
        let count: u64 = steps.iter().fold(0, |sum, count| sum.saturating_add(*count));
        let us = |share: f64| quantile_ns(&steps, share).map(|ns| ns / 1e3);
        let streamed = more(|head| head.streamed_bytes);
        let read = if streamed > 0.0 {
            streamed
        } else {
            more(|head| head.positions) * after.head.step_bytes as f64
        };
        let (busy, gap) = (more(|head| head.device_running_ns), more(|head| head.device_idle_ns));
        Self {
            seconds,
            tokens: ratio(more(|head| head.tokens), seconds),
            positions: ratio(more(|head| head.positions), seconds),
            shares,
            device_idle: (busy + gap > 0.0).then(|| gap / (busy + gap)),
            p50_us: us(0.5),
            p99_us: us(0.99),
            mean_us: (count > 0).then(|| more(|head| head.steps_ns) / count as f64 / 1e3),
            bound_us: bound_us(&after.head),
            bytes: ratio(read, seconds * shares.running),
            counted: streamed > 0.0,
            telemetry: ratio(more(|head| head.write_ns) / 1e9, seconds),
        }
    }

    /// The rates since the process began.
    #[must_use]
    pub fn since_start(page: &Page, now_ns: u64) -> Self {
        let mut empty = Page::boxed();
        empty.head.started_ns = page.head.started_ns;
        Self::between((&empty, page.head.started_ns), (page, now_ns))
    }
}

/// Roofline bound of a step.
fn bound_us(head: &Telemetry) -> Option<f64> {
    (head.bandwidth > 0 && head.step_bytes > 0)
        .then(|| head.step_bytes as f64 / head.bandwidth as f64 * 1e6)
}

/// `part / whole`, or zero if `whole` is zero.
fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::bucket;

    const SECOND: u64 = 1_000_000_000;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1.0)
    }

    #[test]
    fn rates_follow_from_two_looks() {
        let (mut before, mut after) = (Page::boxed(), Page::boxed());
        before.head.tokens = 5;
        before.head.activity = Activity::Running as u32;
        before.head.activity_ns = 9 * SECOND;
        after.head.tokens = 105;
        after.head.positions = 200;
        after.head.step_bytes = 2_000_000_000;
        after.head.bandwidth = 4_000_000_000_000;
        after.head.activity = Activity::Idle as u32;
        after.head.activity_ns = 13 * SECOND;
        // It ran from 9 s to 12 s, then was between two commands for 1 s.
        after.head.spent_ns[Activity::Running as usize] = 3 * SECOND;
        after.head.spent_ns[Activity::Between as usize] = SECOND;
        after.head.steps[bucket(600_000)] = 200;
        after.head.steps_ns = 200 * 600_000;
        (after.head.device_running_ns, after.head.device_idle_ns) = (3 * SECOND, SECOND);
        after.head.write_ns = SECOND / 100;
        let rates = Rates::between((&before, 10 * SECOND), (&after, 14 * SECOND));
        assert!(close(rates.tokens, 25.0) && close(rates.positions, 50.0), "{rates:?}");
        let Shares { running, between, idle, loading } = rates.shares;
        assert!(close(running, 0.5) && close(between, 0.25) && close(idle, 0.25), "{rates:?}");
        assert!(close(loading, 0.0) && close(rates.device_idle.unwrap(), 0.25));
        assert!(close(rates.mean_us.unwrap(), 600.0) && close(rates.bound_us.unwrap(), 500.0));
        assert!((rates.p50_us.unwrap() / 600.0 - 1.0).abs() < 0.125);
        assert!(
            close(rates.bytes, 200e9) && !rates.counted,
            "while it ran, for two seconds: {rates:?}"
        );
        assert!(close(rates.telemetry, 0.0025));
        after.head.streamed_bytes = 4_000_000_000;
        let counted = Rates::between((&before, 10 * SECOND), (&after, 14 * SECOND));
        assert!(close(counted.bytes, 2e9) && counted.counted);
    }

    #[test]
    fn nothing_that_happened_is_no_number() {
        let page = Page::boxed();
        let rates = Rates::between((&page, 5), (&page, 5));
        assert_eq!((rates.p50_us, rates.bound_us, rates.device_idle), (None, None, None));
        assert!(close(rates.tokens, 0.0) && close(rates.bytes, 0.0));
        // A page that goes backwards is from another process: no rate may be negative.
        let mut more = Page::boxed();
        more.head.tokens = 9;
        assert!(close(Rates::between((&more, 0), (&page, SECOND)).tokens, 0.0));
        assert!(close(Rates::since_start(&more, 3 * SECOND).tokens, 3.0));
    }
}
