//! The race at the end of a search: of schedules that take the same time, the one with fewer departures from the default
//! leads.

use std::time::Duration;

use ir::Target;
use ir::program::Program;
use ir::schedule::{Evict, KernelConfig, Knob, ScheduleConfig};
use model::Model;
use search::{Budget, Expected, Gate, Origin, Outcome, Search, Settings, Step, Timing, Trial};
use tests::scripted::{Behaviour, ScriptedDevice};

/// Width of the noise of a block, as a fraction.
const NOISE: f64 = 0.0002;

struct Bench {
    noise: f64,
    model: Model,
    target: Target,
}

/// Time of the default's `poll_sleep_ns` beside another value's 100 µs.
type Us = f64;

impl Bench {
    fn new(noise: f64) -> Self {
        Self {
            noise,
            model: model::preset("toy").unwrap(),
            target: Target::by_name("h200").unwrap(),
        }
    }

    fn plain(&self) -> ScheduleConfig {
        ir::schedule::neutral_config(&self.model.graph, &self.target)
    }

    /// A start that departs in two knobs, of which one is worth something.
    fn settings(&self, simplest: Option<ScheduleConfig>) -> Settings {
        let mut start = self.plain();
        start.kernel.evict = Evict::First;
        start.kernel.poll_sleep_ns = 100;
        let knob = Knob::KernelPollSleepNs;
        let values = ir::schedule::legal_values(knob, &self.model.graph, &self.target);
        Settings {
            seed: 5,
            budget: Budget::Trials(3),
            explore: 2,
            min_gain: 0.01,
            default: start,
            space: vec![(knob, values)],
            timing: Timing { rounds: 12, warmup: 1 },
            finalists: 5,
            simplest,
        }
    }

    fn start(
        &self,
        us: Us,
        seed: u64,
    ) -> (Vec<Vec<f32>>, impl Fn(&Program, &KernelConfig) -> Behaviour, u64) {
        let plain = self.plain().kernel.poll_sleep_ns;
        let noise = self.noise;
        let script = move |_: &Program, kernel: &KernelConfig| {
            let gained = if kernel.evict == Evict::First { 1.0 } else { 1.1 };
            let us = if kernel.poll_sleep_ns == plain { us } else { 100.0 };
            Behaviour::takes(us * gained).with_noise(noise)
        };
        (self.expected().logits, script, seed)
    }

    fn expected(&self) -> Expected {
        Expected::new(&self.model.graph, &*self.model.weights, 24, 1, Some(144)).unwrap()
    }

    fn gate(&self) -> Gate<'_> {
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        let options = lower::Options { kv_capacity: 24 };
        Gate::new(graph, weights, &self.target, options, &KernelConfig::id, self.expected())
    }

    /// Runs the rest of a search whose first rows are given.
    fn search(&self, us: Us, settings: Settings, rows: &[Trial]) -> Result<Vec<Trial>, String> {
        let (rows_of, script, seed) = self.start(us, 1);
        let mut device = ScriptedDevice::new(rows_of, seed, script);
        let mut search = Search::new(self.gate(), Some(&mut device), settings);
        for row in rows {
            let text = serde_json::to_string(row).unwrap();
            search.absorb(serde_json::from_str(&text).unwrap()).map_err(|e| e.to_string())?;
        }
        while let Step::Trial(_) = search.step(Duration::ZERO).unwrap() {}
        let champion = search.champion().unwrap().clone();
        let mut trials = search.trials().to_vec();
        trials.push(champion);
        Ok(trials)
    }
}

fn raced(trials: &[Trial]) -> Vec<&Trial> {
    let all = &trials[..trials.len() - 1];
    all.iter().filter(|trial| trial.origin == Origin::Race).collect()
}

#[test]
fn at_equal_time_fewer_departures_lead() {
    let bench = Bench::new(NOISE);
    let trials = bench.search(100.0, bench.settings(Some(bench.plain())), &[]).unwrap();
    let champion = trials.last().unwrap();
    assert_eq!(champion.config.kernel.poll_sleep_ns, bench.plain().kernel.poll_sleep_ns);
    assert_eq!(champion.config.kernel.evict, Evict::First, "what is worth something stays");
    assert_eq!((champion.origin, champion.outcome), (Origin::Race, Outcome::Kept));
    assert_eq!(champion.simpler, Some([1, 2]), "{}", champion.why);
    assert!(champion.why.contains("1 instead of 2 knobs"), "{}", champion.why);
    let others = raced(&trials).into_iter().filter(|trial| trial.trial != champion.trial);
    for other in others {
        assert!(!other.outcome.leads() && other.simpler.is_none(), "{}", other.why);
    }
}

#[test]
fn without_a_default_or_with_a_difference_the_leader_stays() {
    let bench = Bench::new(NOISE);
    let as_before = bench.search(100.0, bench.settings(None), &[]).unwrap();
    assert_eq!(as_before.last().unwrap().trial, 0);
    assert_eq!(raced(&as_before).len(), 2);
    // Half a per cent slower: less than a trial needs, more than the noise.
    let slower = bench.search(100.5, bench.settings(Some(bench.plain())), &[]).unwrap();
    assert_eq!(slower.last().unwrap().trial, 0, "{:?}", slower.last().unwrap().why);
    // A departure more never leads for being equal: here the start is the default itself.
    let mut settings = bench.settings(None);
    settings.simplest = Some(settings.default);
    let plain = bench.search(100.0, settings, &[]).unwrap();
    assert_eq!(plain.last().unwrap().trial, 0);
}

#[test]
fn a_resumed_race_ends_alike_and_a_forged_tie_is_refused() {
    let bench = Bench::new(0.0);
    let settings = || bench.settings(Some(bench.plain()));
    let whole = bench.search(100.0, settings(), &[]).unwrap();
    let rows = &whole[..whole.len() - 1];
    for stop in 1..=rows.len() {
        let again = bench.search(100.0, settings(), &rows[..stop]).unwrap();
        assert_eq!(again.last().unwrap().config, whole.last().unwrap().config, "after {stop}");
    }
    let slower = bench.search(100.5, settings(), &[]).unwrap();
    let mut rows = slower[..slower.len() - 1].to_vec();
    let forged = rows.iter_mut().find(|row| row.simpler.is_some()).unwrap();
    (forged.outcome, forged.simpler) = (Outcome::Kept, Some([1, 2]));
    let refused = bench.search(100.5, settings(), &rows).unwrap_err();
    assert!(refused.contains("its samples say reverted"), "{refused}");
    // A tie that was not broken cannot be claimed either: two departures are not fewer than one.
    let mut rows = whole[..whole.len() - 1].to_vec();
    let broken = rows.iter_mut().find(|row| row.simpler.is_some()).unwrap();
    broken.simpler = Some([2, 1]);
    assert!(bench.search(100.0, settings(), &rows).unwrap_err().contains("claims to be simpler"));
}
