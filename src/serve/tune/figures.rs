//! The figures of a server that tunes itself, in `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

type Share = Gauge<f64, AtomicU64>;

/// State of the search, the schedule of one sequence, and its kernel's name in fingerprints.
type Labels = [(&'static str, String); 3];

/// The figures.
#[derive(Default)]
pub(in crate::serve) struct TuneFigures {
    info: Family<Labels, Gauge>,
    labels: std::sync::Mutex<Labels>,
    trials: Counter,
    kept: Counter,
    refused: Counter,
    rolled_back: Counter,
    gain: Share,
    wait: Share,
    wait_ns: AtomicU64,
}

impl TuneFigures {
    pub(in crate::serve) fn register(&self, registry: &mut Registry) {
        let mut add = |name: &str, help: &str, counter: &Counter| {
            registry.register(format!("amk_tune_{name}"), help, counter.clone());
        };
        add("trials", "Trials of the search that tunes the server", &self.trials);
        add("kept", "Trials that it kept", &self.kept);
        add("refused", "Of these, those that failed the gate before a switch", &self.refused);
        add(
            "rolled_back",
            "Schedules that were taken back after they had served",
            &self.rolled_back,
        );
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
    }

    /// The schedule that serves from now on, its kernel's name, and what it saves.
    pub(super) fn serves(&self, schedule: &str, kernel: &str, gain: f64) {
        self.gain.set(gain);
        self.relabel(|labels| {
            let state = std::mem::take(&mut labels[0].1);
            *labels = [
                ("state", if state.is_empty() { "waiting".to_owned() } else { state }),
                ("schedule", schedule.to_owned()),
                ("kernel", kernel.to_owned()),
            ];
        });
    }

    pub(super) fn trial(&self, kept: bool) {
        self.trials.inc();
        self.kept.inc_by(u64::from(kept));
    }

    pub(super) fn refused(&self) {
        self.refused.inc();
    }

    pub(super) fn rolled_back(&self) {
        self.rolled_back.inc();
    }

    /// A request has waited this long for work of the search.
    pub(in crate::serve) fn waited(&self, ns: u64) {
        let most = self.wait_ns.fetch_max(ns, Ordering::Relaxed).max(ns);
        self.wait.set(most as f64 / 1e9);
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
