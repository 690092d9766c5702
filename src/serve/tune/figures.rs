//! The figures of a server that tunes itself, in `/metrics` and on the telemetry page.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use abi::TuneState;
use search::Interval;

use crate::observe::Sequences;

type Share = Gauge<f64, AtomicU64>;

/// State of the search, the schedule of one sequence, and its kernel's name in fingerprints.
type Labels = [(&'static str, String); 3];

/// What a schedule saves: nothing.
pub(super) const NOTHING: Interval = Interval { low: 0.0, high: 0.0 };

/// The figures.
#[derive(Default)]
pub(in crate::serve) struct TuneFigures {
    page: Sequences,
    info: Family<Labels, Gauge>,
    labels: std::sync::Mutex<Labels>,
    trials: Counter,
    kept: Counter,
    refused: Counter,
    rolled_back: Counter,
    gain: Share,
    gain_high: Share,
    wait: Share,
    wait_ns: AtomicU64,
}

impl TuneFigures {
    pub(super) fn new(page: &Sequences) -> Self {
        Self { page: page.clone(), ..Self::default() }
    }

    /// Writes the figures on the page.
    fn show(&self) {
        let [state, schedule, _] =
            self.labels.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let known = TuneState::ALL.iter().find(|known| known.name() == state.1);
        let count = |counter: &Counter| u32::try_from(counter.get()).unwrap_or(u32::MAX);
        let millionths = |share: &Share| (share.get() * 1e6).round() as u32;
        self.page.head(|head| {
            head.tune_state = known.copied().unwrap_or(TuneState::Off) as u32;
            head.tune_trials = count(&self.trials);
            head.tune_kept = count(&self.kept);
            head.tune_refused = count(&self.refused);
            head.tune_rolled_back = count(&self.rolled_back);
            head.tune_gain_low = millionths(&self.gain);
            head.tune_gain_high = millionths(&self.gain_high);
            head.tune_wait_us = (self.wait.get() * 1e6).round() as u32;
            head.tune_schedule = u64::from_str_radix(&schedule.1, 16).unwrap_or_default();
        });
    }

    pub(in crate::serve) fn register(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("amk_tune_{name}"), help, counter.clone());
        };
        add("trials", "Trials of the search that tunes the server", &self.trials);
        add("kept", "Trials that it kept", &self.kept);
        add(
            "rolled_back",
            "Schedules that were better and were taken back, by the gate before a switch or by the confirmation",
            &self.rolled_back,
        );
        add("refused", "Of these, those that failed the gate before a switch", &self.refused);
        let help = "The share of the first schedule's time that the current one saves";
        registry.register("amk_tune_gain", help, self.gain.clone());
        let help = "The longest wait of a request for work of the search";
        registry.register("amk_tune_wait_seconds", help, self.wait.clone());
        let help = "State of the search, and the schedule of one sequence; always 1";
        registry.register("amk_tune_schedule", help, self.info.clone());
    }

    fn relabel(&self, change: impl FnOnce(&mut Labels)) {
        let mut labels = self.labels.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let old = labels.clone();
        change(&mut labels);
        // The new label first: a reader between the two lines finds a schedule, not none.
        self.info.get_or_create(&labels).set(1);
        if old != *labels {
            self.info.remove(&old);
        }
    }

    pub(super) fn state(&self, state: &str) {
        self.relabel(|labels| labels[0].1 = state.to_owned());
        self.show();
    }

    /// The schedule that serves from now on, its kernel's name, and what it saves.
    pub(super) fn serves(&self, schedule: &str, kernel: &str, gain: Interval) {
        self.gain.set(gain.low);
        self.gain_high.set(gain.high);
        self.relabel(|labels| {
            let state = std::mem::take(&mut labels[0].1);
            *labels = [
                ("state", if state.is_empty() { "waiting".to_owned() } else { state }),
                ("schedule", schedule.to_owned()),
                ("kernel", kernel.to_owned()),
            ];
        });
        self.show();
    }

    pub(super) fn trial(&self, kept: bool) {
        self.trials.inc();
        self.kept.inc_by(u64::from(kept));
        self.show();
    }

    /// A better schedule is taken back before it serves.
    pub(super) fn refused(&self) {
        self.refused.inc();
        self.rolled_back();
    }

    /// The confirmation has measured what the schedule saves.
    pub(super) fn confirmed(&self, gain: Interval) {
        self.gain.set(gain.low);
        self.gain_high.set(gain.high);
        self.show();
    }

    pub(super) fn rolled_back(&self) {
        self.rolled_back.inc();
        self.show();
    }

    /// A request has waited this long for work of the search.
    pub(in crate::serve) fn waited(&self, ns: u64) {
        let most = self.wait_ns.fetch_max(ns, Ordering::Relaxed).max(ns);
        self.wait.set(most as f64 / 1e9);
        self.show();
    }
}

#[cfg(test)]
impl TuneFigures {
    pub(super) fn state_now(&self) -> String {
        self.labels.lock().unwrap()[0].1.clone()
    }

    pub(super) fn has_ended(&self) -> bool {
        !["waiting", "tuning"].contains(&&*self.state_now())
    }

    pub(super) fn gain_now(&self) -> f64 {
        self.gain.get()
    }

    pub(super) fn refused_now(&self) -> u64 {
        self.refused.get()
    }

    pub(super) fn rolled_back_now(&self) -> u64 {
        self.rolled_back.get()
    }
}
