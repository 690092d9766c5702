//! The whole search on a scripted device: every way in which a trial can end, and the invariants of a search.

use std::cell::Cell;
use std::time::Duration;

use ir::Target;
use ir::program::Program;
use ir::schedule::{Evict, KernelConfig, Knob, Value};
use model::Model;
use search::{
    Budget, Decision, Device, DeviceError, Expected, Gate, LatencyKind, Origin, Outcome, Row,
    Search, SearchError, Settings, Step, StoppedBy, Timing, Trial,
};
use tests::scripted::{Behaviour, ScriptedDevice};

#[path = "scripted/last_gate.rs"]
mod last_gate;

const KV_CAPACITY: u32 = 24;

struct Bench {
    model: Model,
    target: Target,
    kv_capacity: u32,
}

impl Bench {
    fn new() -> Self {
        Self::with_capacity(KV_CAPACITY)
    }

    fn with_capacity(kv_capacity: u32) -> Self {
        let model = model::preset("toy").unwrap();
        Self { model, target: Target::by_name("h200").unwrap(), kv_capacity }
    }

    fn expected(&self) -> Expected {
        Expected::new(&self.model.graph, &*self.model.weights, self.kv_capacity, 1, Some(144))
            .unwrap()
    }

    fn gate(&self) -> Gate<'_> {
        let options = lower::Options { kv_capacity: self.kv_capacity };
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        Gate::new(graph, weights, &self.target, options, &KernelConfig::id, self.expected())
    }

    /// The settings of a search over a few knobs, each of which changes the toy model's program or kernel.
    fn settings(&self, trials: u64) -> Settings {
        let knobs = [
            Knob::SyncQkv,
            Knob::SyncDown,
            Knob::PipelineStages,
            Knob::KernelPollSleepNs,
            Knob::KernelEvict,
        ];
        let (graph, target) = (&self.model.graph, &self.target);
        let values = |knob| (knob, ir::schedule::legal_values(knob, graph, target));
        Settings {
            seed: 5,
            budget: Budget::Trials(trials),
            explore: trials / 3,
            min_gain: 0.01,
            default: ir::schedule::neutral_config(graph, target),
            space: knobs.into_iter().map(values).collect(),
            timing: Timing { rounds: 12, warmup: 1 },
            finalists: 0,
            simplest: None,
        }
    }

    fn device<'a>(
        &self,
        seed: u64,
        script: impl Fn(&Program, &KernelConfig) -> Behaviour + 'a,
    ) -> ScriptedDevice<'a> {
        ScriptedDevice::new(self.expected().logits, seed, script)
    }

    fn search(&self, device: &mut dyn Device, settings: Settings) -> Vec<Trial> {
        let mut search = Search::new(self.gate(), Some(device), settings);
        all(&mut search).1
    }
}

fn all(search: &mut Search<'_>) -> (StoppedBy, Vec<Trial>) {
    let mut trials = Vec::new();
    loop {
        match search.step(Duration::ZERO).unwrap() {
            Step::Trial(trial) => trials.push(*trial),
            Step::Done(stopped_by) => return (stopped_by, trials),
        }
    }
}

fn outcomes(trials: &[Trial]) -> Vec<Outcome> {
    trials.iter().map(|trial| trial.outcome).collect()
}

/// With weights evicted first a program is a third faster. Everything else is noise.
fn evict_wins(_: &Program, kernel: &KernelConfig) -> Behaviour {
    let us = if kernel.evict == Evict::First { 66.0 } else { 100.0 };
    Behaviour::takes(us).with_noise(0.01)
}

#[test]
fn the_better_schedule_is_kept_and_confirmed() {
    let bench = Bench::new();
    let mut device = bench.device(1, evict_wins);
    let mut search = Search::new(bench.gate(), Some(&mut device), bench.settings(16));
    let (stopped_by, trials) = all(&mut search);
    assert_eq!(stopped_by, StoppedBy::Trials);
    assert_eq!(trials.len(), 16);
    assert_eq!(trials[0].outcome, Outcome::Baseline);
    assert!(trials[0].noise_floor.is_some_and(|noise| noise < 0.02));
    let kept: Vec<&Trial> = trials.iter().filter(|t| t.outcome == Outcome::Kept).collect();
    assert_eq!(kept.len(), 1, "{:?}", outcomes(&trials));
    assert_eq!(kept[0].config.kernel.evict, Evict::First);
    assert_eq!(kept[0].verdict.latency_kind, Some(LatencyKind::MeasuredGpu));
    assert!(kept[0].gain.is_some_and(|gain| gain.low > 0.3 && gain.high < 0.4));
    assert_eq!(kept[0].samples_us.len(), 4, "a third faster is clear after four rounds");
    // Each measured trial has its prediction, which is not in its verdict.
    assert!(trials.iter().all(|trial| trial.predicted_us.is_some_and(|us| us > 0.0)));
    assert!(trials.iter().all(|trial| trial.verdict.latency_us != trial.predicted_us));
    let mut text = serde_json::to_value(&trials[1]).unwrap();
    assert_eq!(text["predicted_us"].as_f64(), trials[1].predicted_us);
    text.as_object_mut().unwrap().remove("predicted_us");
    let old: Trial = serde_json::from_value(text).unwrap();
    assert_eq!(old, Trial { predicted_us: None, ..trials[1].clone() });
    let confirmation = search.confirm().unwrap().unwrap();
    assert_eq!(confirmation.decision, Decision::Kept);
    assert_eq!(confirmation.champion, kept[0].trial);
}

#[test]
fn equal_programs_are_never_kept_more_than_noise_allows() {
    let bench = Bench::new();
    let mut kept = 0;
    for seed in 0..6 {
        let mut device = bench.device(seed, |_, _| Behaviour::takes(100.0).with_noise(0.06));
        let trials = bench.search(&mut device, Settings { seed, ..bench.settings(16) });
        kept += outcomes(&trials).iter().filter(|&&outcome| outcome == Outcome::Kept).count();
    }
    assert!(kept <= 1, "{kept} of 90 equal candidates kept");
}

#[test]
fn what_is_slower_is_reverted_and_what_is_unclear_is_inconclusive() {
    let bench = Bench::new();
    let first = Cell::new(true);
    let mut device = bench.device(2, |_, _| {
        Behaviour::takes(if first.replace(false) { 100.0 } else { 120.0 }).with_noise(0.01)
    });
    let trials = bench.search(&mut device, bench.settings(5));
    assert!(trials[1..].iter().all(|t| t.outcome == Outcome::Reverted), "{:?}", outcomes(&trials));

    let first = Cell::new(true);
    let mut device = bench.device(3, |_, _| {
        Behaviour::takes(if first.replace(false) { 100.0 } else { 97.0 }).with_noise(0.12)
    });
    let trials = bench.search(&mut device, bench.settings(5));
    let unclear: Vec<_> = trials.iter().filter(|t| t.outcome == Outcome::Inconclusive).collect();
    assert!(!unclear.is_empty(), "{:?}", outcomes(&trials));
    for trial in unclear {
        assert_eq!(trial.samples_us.len(), 36, "measured longer before it is given up");
        let (gain, threshold) = (trial.gain.unwrap(), trial.threshold.unwrap());
        assert!(gain.low <= threshold && threshold <= gain.high);
    }
}

/// Every candidate but the baseline behaves like this.
fn candidates_end_as(bench: &Bench, behaviour: &Behaviour) -> Vec<Trial> {
    let first = Cell::new(true);
    let mut device = bench.device(4, |_, _| {
        if first.replace(false) { Behaviour::takes(100.0) } else { behaviour.clone() }
    });
    bench.search(&mut device, bench.settings(4))
}

#[test]
fn every_fault_of_a_candidate_costs_one_trial_and_gives_no_latency() {
    let bench = Bench::new();
    let trap = DeviceError::Trapped {
        trap: "deadline".into(),
        worker: 3,
        task: 7,
        counter: 2,
        have: 1,
        need: 4,
    };
    let late = DeviceError::TimedOut { after_ms: 500, status: "worker 3 waits".into() };
    let compile = DeviceError::Compile { log: "error: no".into() };
    let memory = DeviceError::OutOfMemory { needed: 2, free: 1 };
    let fast = || Behaviour::takes(10.0);
    let table = [
        (Behaviour { wrong: true, ..fast() }, Outcome::Disagreed),
        (Behaviour { wrong_when_timed: true, ..fast() }, Outcome::Disagreed),
        (Behaviour { run_error: Some(trap.clone()), ..fast() }, Outcome::Trapped),
        (Behaviour { time_error: Some(trap), ..fast() }, Outcome::Trapped),
        (Behaviour { run_error: Some(late.clone()), ..fast() }, Outcome::TimedOut),
        (Behaviour { time_error: Some(late), ..fast() }, Outcome::TimedOut),
        (Behaviour { load_error: Some(compile), ..fast() }, Outcome::CompileFailed),
        (Behaviour { load_error: Some(memory), ..fast() }, Outcome::OutOfMemory),
    ];
    for (behaviour, want) in table {
        let trials = candidates_end_as(&bench, &behaviour);
        assert_eq!(outcomes(&trials), [Outcome::Baseline, want, want, want], "{behaviour:?}");
        for trial in &trials[1..] {
            assert_eq!(trial.verdict.latency_us, None, "{behaviour:?}");
            assert!(!trial.verdict.correct, "{behaviour:?}");
            assert!(trial.verdict.rejected_reason.is_some() && !trial.why.is_empty());
        }
    }
}

#[test]
fn a_trap_names_who_waits_for_what() {
    let bench = Bench::new();
    let trap = DeviceError::Trapped {
        trap: "deadline".into(),
        worker: 3,
        task: 7,
        counter: 2,
        have: 1,
        need: 4,
    };
    let trials =
        candidates_end_as(&bench, &Behaviour { run_error: Some(trap), ..Behaviour::takes(1.0) });
    assert_eq!(trials[1].why, "trap deadline: worker 3, task 7, counter 2 has 1 and needs 4");
}

#[test]
fn faster_than_the_bytes_allow_is_an_artefact() {
    let bench = Bench::new();
    let first = Cell::new(true);
    // Reading the toy model's bytes takes about 100 µs at 1 GB/s.
    let mut device = bench
        .device(5, |_, _| Behaviour::takes(if first.replace(false) { 200.0 } else { 1.0 }))
        .with_bandwidth(1e9);
    let trials = bench.search(&mut device, bench.settings(3));
    assert_eq!(outcomes(&trials), [Outcome::Baseline, Outcome::BelowBound, Outcome::BelowBound]);
    assert_eq!(trials[1].verdict.latency_us, None);
    assert!(trials[1].why.contains("artefact"), "{}", trials[1].why);
}

#[test]
fn a_lost_device_ends_the_search_and_loses_no_trial() {
    let bench = Bench::new();
    let calls = Cell::new(0);
    let mut device = bench.device(6, |_, _| {
        calls.set(calls.get() + 1);
        let reason = "unplugged".to_owned();
        let lost = (calls.get() > 2).then_some(DeviceError::Unavailable { reason });
        Behaviour { load_error: lost, ..Behaviour::takes(100.0) }
    });
    let mut search = Search::new(bench.gate(), Some(&mut device), bench.settings(8));
    assert!(matches!(search.step(Duration::ZERO), Ok(Step::Trial(_))));
    assert!(matches!(search.step(Duration::ZERO), Ok(Step::Trial(_))));
    assert!(matches!(search.step(Duration::ZERO), Err(SearchError::Device(_))));
    assert_eq!(search.trials().len(), 2);
}

/// A trial as read back from a ledger.
fn through_json(trial: &Trial) -> Trial {
    let text = serde_json::to_string(&Row::Trial(Box::new(trial.clone()))).unwrap();
    match serde_json::from_str(&text).unwrap() {
        Row::Trial(trial) => *trial,
        Row::Confirmation(_) => panic!("a trial was written"),
    }
}

#[test]
fn a_resumed_search_makes_the_same_trials() {
    let bench = Bench::new();
    for device_there in [false, true] {
        let settings = || Settings { min_gain: 0.001, ..bench.settings(14) };
        let script = |_: &Program, kernel: &KernelConfig| {
            Behaviour::takes(100.0 - f64::from(kernel.poll_sleep_ns) / 10.0)
        };
        let mut device = bench.device(7, script);
        let whole = {
            let device = device_there.then_some(&mut device as &mut dyn Device);
            all(&mut Search::new(bench.gate(), device, settings())).1
        };
        assert_eq!(whole.len(), 14);
        for cut in [0, 1, 5, 9, 14] {
            let mut device = bench.device(7, script);
            let device = device_there.then_some(&mut device as &mut dyn Device);
            let mut search = Search::new(bench.gate(), device, settings());
            for trial in &whole[..cut] {
                search.absorb(through_json(trial)).unwrap();
            }
            search.check_absorbed().unwrap();
            let rest = all(&mut search).1;
            assert_eq!(rest.len(), 14 - cut, "cut at {cut}");
            for (again, once) in rest.iter().zip(&whole[cut..]) {
                assert_eq!(again.verdict.schedule_id, once.verdict.schedule_id);
                assert_eq!(again.outcome, once.outcome);
                assert_eq!(again.skipped, once.skipped);
                assert_eq!(again.incumbent, once.incumbent);
            }
        }
    }
}

/// A search on a device that resumes after these trials.
fn resumed<'a>(
    bench: &'a Bench,
    past: &[Trial],
    device: &'a mut dyn Device,
    settings: Settings,
) -> Search<'a> {
    let mut search = Search::new(bench.gate(), Some(device), settings);
    for trial in past {
        search.absorb(through_json(trial)).unwrap();
    }
    search.check_absorbed().unwrap();
    search
}

/// The reason of a lost device.
fn reason<T: std::fmt::Debug>(ended: Result<T, SearchError>) -> String {
    match ended {
        Err(SearchError::Device(DeviceError::Unavailable { reason })) => reason,
        other => panic!("the device was to be given up: {other:?}"),
    }
}

#[test]
fn an_incumbent_that_fails_after_a_resume_is_named_and_costs_no_trial() {
    let bench = Bench::new();
    let settings = || bench.settings(12);
    let whole = bench.search(&mut bench.device(1, evict_wins), settings());
    let lead = whole.iter().rfind(|trial| trial.outcome.leads()).unwrap();
    let past = &whole[..whole.len() - 2];
    assert!(lead.trial > 0 && lead.trial + 2 < 12, "{:?}", outcomes(&whole));
    let named = format!("the schedule that leads (trial {}) fails there: ", lead.trial);
    let late = DeviceError::TimedOut { after_ms: 500, status: "worker 3 waits".into() };
    let memory = DeviceError::OutOfMemory { needed: 2, free: 1 };
    let works = || Behaviour::takes(66.0);
    for (fault, why) in [
        (Behaviour { run_error: Some(late), ..works() }, "no answer within 500 ms"),
        (Behaviour { load_error: Some(memory), ..works() }, "out of device memory"),
        (Behaviour { wrong: true, ..works() }, "device disagrees with the graph"),
        (Behaviour { unrepeatable: Some((2, 3)), ..works() }, "two runs on the device differ"),
    ] {
        let leads = (lead.verdict.program_id.clone().unwrap(), lead.config.kernel);
        let mut device = bench.device(1, move |program, kernel| {
            let is_lead = (program.id(), *kernel) == leads;
            if is_lead { fault.clone() } else { evict_wins(program, kernel) }
        });
        let mut search = resumed(&bench, past, &mut device, settings());
        for _ in 0..2 {
            let said = reason(search.step(Duration::ZERO));
            assert!(said.starts_with(&named) && said.contains(why), "{said}");
            assert_eq!(search.trials().len(), past.len());
        }
        drop(search);
        assert!(device.costs().loads <= 1, "no candidate was loaded");
        assert_eq!(device.live(), 0);
    }
    // On a device where it passes, the search continues with the same candidates.
    let mut device = bench.device(1, evict_wins);
    let rest = all(&mut resumed(&bench, past, &mut device, settings())).1;
    let ids = |trials: &[Trial]| -> Vec<_> {
        trials.iter().map(|trial| (trial.verdict.schedule_id.clone(), trial.outcome)).collect()
    };
    assert_eq!(ids(&rest), ids(&whole[past.len()..]));
}

#[test]
fn what_a_candidate_is_timed_against_is_not_the_candidates_fault() {
    let bench = Bench::new();
    let settings = || bench.settings(12);
    let whole = bench.search(&mut bench.device(1, evict_wins), settings());
    let lead = whole.iter().rfind(|trial| trial.outcome.leads()).unwrap();
    let past = &whole[..whole.len() - 2];
    let kernel = lead.config.kernel;
    // It agrees, but is wrong when timed beside a candidate.
    let mut device = bench.device(1, move |program, k| Behaviour {
        wrong_when_timed: *k == kernel && Some(program.id()) == lead.verdict.program_id,
        ..Behaviour::takes(66.0)
    });
    let mut search = resumed(&bench, past, &mut device, settings());
    let said = reason(search.step(Duration::ZERO));
    assert!(said.starts_with("the schedule that it was timed against ("), "{said}");
    assert_eq!(search.trials().len(), past.len());
    // The baseline's failure does not refute the champion.
    let baseline = whole[0].verdict.program_id.clone();
    let mut device = bench.device(1, move |program, k| Behaviour {
        wrong: *k != kernel && Some(program.id()) == baseline,
        ..evict_wins(program, k)
    });
    let mut search = resumed(&bench, &whole, &mut device, settings());
    let said = reason(search.confirm());
    assert!(said.starts_with("the baseline (trial 0) fails there: device disagrees"), "{said}");
}

#[test]
fn refused_candidates_leave_the_device() {
    let bench = Bench::with_capacity(LONG);
    let fast = || Behaviour::takes(50.0);
    let late = DeviceError::TimedOut { after_ms: 500, status: "worker 3 waits".into() };
    let memory = DeviceError::OutOfMemory { needed: 2, free: 1 };
    let faults = [
        Behaviour { wrong: true, ..fast() },
        Behaviour { wrong_from: Some(FIRST_STAGE), ..fast() },
        Behaviour { wrong_when_timed: true, ..fast() },
        Behaviour { unrepeatable: Some((30, 0)), ..fast() },
        Behaviour { run_error: Some(late.clone()), ..fast() },
        Behaviour { time_error: Some(late), ..fast() },
        Behaviour { load_error: Some(memory), ..fast() },
        Behaviour::takes(120.0),
        Behaviour::takes(100.0),
    ];
    let number = Cell::new(0);
    let mut device = bench.device(1, |_, _| {
        let next = number.replace(number.get() + 1);
        let fault = (next as usize).checked_sub(1).map(|n| faults[n % faults.len()].clone());
        fault.unwrap_or_else(|| Behaviour::takes(100.0))
    });
    let trials = bench.search(&mut device, bench.settings(40));
    assert_eq!(trials.len(), 40);
    assert!(trials[1..].iter().all(|trial| !trial.outcome.leads()), "{:?}", outcomes(&trials));
    assert_eq!((device.live(), device.most_live), (1, 2), "the baseline, and one candidate");

    // A new champion replaces the previous one on the device, and the baseline is loaded again for the confirmation only.
    let mut device = bench.device(1, evict_wins);
    let mut search = Search::new(bench.gate(), Some(&mut device), bench.settings(16));
    all(&mut search);
    assert_eq!(search.confirm().unwrap().unwrap().decision, Decision::Kept);
    drop(search);
    assert_eq!((device.live(), device.most_live), (1, 2));
}

#[test]
fn two_runs_that_differ_in_one_bit_are_unrepeatable_and_never_lead() {
    let bench = Bench::with_capacity(LONG);
    let gate = bench.gate();
    let vocab = gate.expected().logits[0].len();
    for seed in 0..64 {
        let at = (seed as usize * 5 % LONG as usize, seed as usize * 17 % vocab);
        let first = Cell::new(true);
        let mut device = bench.device(seed, |_, _| match first.replace(false) {
            true => Behaviour::takes(100.0),
            false => Behaviour { unrepeatable: Some(at), ..Behaviour::takes(50.0) },
        });
        let settings = Settings { seed, ..bench.settings(3) };
        let mut search = Search::new(gate.beside(), Some(&mut device), settings.clone());
        let trials = all(&mut search).1;
        let ends = [Outcome::Baseline, Outcome::Unrepeatable, Outcome::Unrepeatable];
        assert_eq!(outcomes(&trials), ends, "seed {seed}");
        assert_eq!(search.champion().map(|trial| trial.trial), Some(0));
        for trial in &trials[1..] {
            let verdict = &trial.verdict;
            assert!(!verdict.correct && verdict.latency_us.is_none() && trial.gain.is_none());
            let found = verdict.first_divergence.as_ref().unwrap();
            let place = (found.position, found.buffer.as_deref(), found.index);
            assert_eq!(place, (Some(at.0 as u64), Some("logits"), Some(at.1 as u64)));
            assert!(trial.why.contains(&format!("word {} of the logits", at.1)), "{}", trial.why);
        }
        // The ledger's rows can be read back.
        let mut device = bench.device(seed, |_, _| Behaviour::takes(100.0));
        let again = resumed(&bench, &trials, &mut device, settings);
        assert_eq!(again.trials().len(), 3);
    }
    // A baseline that is not repeatable does not lead.
    let mut device =
        bench.device(1, |_, _| Behaviour { unrepeatable: Some((0, 0)), ..Behaviour::takes(100.0) });
    let mut search = Search::new(bench.gate(), Some(&mut device), bench.settings(2));
    assert_eq!(outcomes(&all(&mut search).1), [Outcome::Unrepeatable; 2]);
    assert!(search.champion().is_none() && search.confirm().unwrap().is_none());
}

#[test]
fn foreign_rows_are_refused() {
    let bench = Bench::new();
    let trials = {
        let mut search = Search::new(bench.gate(), None, bench.settings(3));
        all(&mut search).1
    };
    let fresh = || Search::new(bench.gate(), None, bench.settings(3));
    assert!(matches!(fresh().absorb(trials[1].clone()), Err(SearchError::Foreign { .. })));
    let mut changed = trials[0].clone();
    changed.verdict.program_id = Some("another".into());
    let mut search = fresh();
    search.absorb(changed).unwrap();
    assert!(matches!(search.check_absorbed(), Err(SearchError::Foreign { .. })));
}

#[test]
fn no_program_and_kernel_is_evaluated_twice() {
    let bench = Bench::new();
    let mut device = bench.device(8, evict_wins);
    let trials = bench.search(&mut device, bench.settings(40));
    let keys: std::collections::BTreeSet<_> = trials
        .iter()
        .map(|trial| (trial.verdict.program_id.clone(), trial.verdict.kernel_id.clone()))
        .collect();
    assert_eq!(keys.len(), trials.len());
    assert!((trials.len()..=2 * trials.len()).contains(&device.runs));
}

#[test]
fn a_space_without_anything_new_ends_the_search() {
    let bench = Bench::new();
    let space = vec![(Knob::KernelPollSleepNs, vec![Value::Number(0), Value::Number(20)])];
    let mut search = Search::new(bench.gate(), None, Settings { space, ..bench.settings(64) });
    let (stopped_by, trials) = all(&mut search);
    assert_eq!(stopped_by, StoppedBy::Exhausted);
    assert_eq!(trials.len(), 2);
}

/// Less than the least gain, more than the noise.
fn evict_gains_little(_: &Program, kernel: &KernelConfig) -> Behaviour {
    let us = if kernel.evict == Evict::First { 99.5 } else { 100.0 };
    Behaviour::takes(us).with_noise(0.0002)
}

#[test]
fn the_race_at_the_end_finds_what_the_least_gain_hides() {
    let bench = Bench::new();
    let settings = || Settings { finalists: 5, ..bench.settings(12) };
    let mut device = bench.device(1, evict_gains_little);
    let mut search = Search::new(bench.gate(), Some(&mut device), settings());
    let (stopped_by, trials) = all(&mut search);
    assert_eq!(stopped_by, StoppedBy::Trials);
    let (searched, raced) = trials.split_at(12);
    assert!(searched.iter().all(|trial| trial.origin != Origin::Race));
    assert!(searched[1..].iter().all(|trial| !trial.outcome.leads()), "{:?}", outcomes(searched));
    assert_eq!(raced.len(), 4);
    assert!(raced.iter().all(|trial| trial.origin == Origin::Race));
    assert_eq!(raced[0].outcome, Outcome::Kept, "{}", raced[0].why);
    assert_eq!(raced[0].config.kernel.evict, Evict::First);
    assert!(raced[0].gain.unwrap().low > 0.0 && raced[0].threshold.unwrap() < 0.01);
    // The claim is against the baseline, by the least gain.
    let confirmed = search.confirm().unwrap().unwrap();
    assert_ne!(confirmed.decision, Decision::Kept, "{}", confirmed.why);
    // A search that stopped in the middle of the race ends with the same rows.
    for stop in 11..=trials.len() {
        let mut device = bench.device(2, evict_gains_little);
        let mut again = Search::new(bench.gate(), Some(&mut device), settings());
        for trial in &trials[..stop] {
            again.absorb(through_json(trial)).unwrap();
        }
        let rest: Vec<_> = all(&mut again).1.iter().map(|t| (t.trial, t.config)).collect();
        let first: Vec<_> = trials[stop..].iter().map(|t| (t.trial, t.config)).collect();
        assert_eq!(rest, first, "stopped after {stop}");
    }
}

#[test]
fn a_race_row_of_a_schedule_that_was_never_tried_is_refused() {
    let bench = Bench::new();
    let mut device = bench.device(1, evict_gains_little);
    let trials = bench.search(&mut device, bench.settings(4));
    let mut device = bench.device(1, evict_gains_little);
    let mut search = Search::new(bench.gate(), Some(&mut device), bench.settings(4));
    for trial in &trials[..3] {
        search.absorb(trial.clone()).unwrap();
    }
    let forged = Trial { origin: Origin::Race, ..trials[3].clone() };
    let refused = search.absorb(forged).unwrap_err().to_string();
    assert!(refused.contains("no trial before it measured"), "{refused}");
}

#[test]
fn illegal_proposals_cost_no_trial_and_are_counted() {
    let bench = Bench::new();
    let settings = Settings {
        space: Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect(),
        ..bench.settings(60)
    };
    let mut search = Search::new(bench.gate(), None, settings);
    let (_, trials) = all(&mut search);
    assert_eq!(trials.len(), 60);
    assert!(trials.iter().all(|trial| trial.verdict.valid && trial.verdict.correct));
    let counted: u64 = trials.iter().map(|trial| trial.skipped.rejected).sum();
    assert!(counted > 0 && counted == search.rejected());
}

#[test]
fn predictions_are_kept_only_when_better_and_stay_predictions() {
    let bench = Bench::new();
    let mut search = Search::new(bench.gate(), None, bench.settings(20));
    let (_, trials) = all(&mut search);
    let mut best = f64::INFINITY;
    for trial in &trials {
        assert_eq!(trial.verdict.latency_kind, Some(LatencyKind::Predicted));
        let us = trial.verdict.latency_us.unwrap();
        assert!(us >= trial.verdict.bound_us.unwrap());
        assert_eq!(trial.outcome.leads(), us < best * 0.99 || best.is_infinite(), "{}", trial.why);
        if trial.outcome.leads() {
            best = us;
        }
    }
    let confirmation = search.confirm().unwrap().unwrap();
    assert_eq!((confirmation.decision, confirmation.gain), (Decision::Kept, None));
    assert_eq!(confirmation.positions, KV_CAPACITY as usize);
}

#[test]
fn time_budgets_use_the_callers_clock() {
    let bench = Bench::new();
    let budget = Budget::Time(Duration::from_secs(10));
    let mut search = Search::new(bench.gate(), None, Settings { budget, ..bench.settings(9) });
    for second in 0..10 {
        assert!(matches!(search.step(Duration::from_secs(second)), Ok(Step::Trial(_))));
    }
    let end = search.step(Duration::from_secs(10));
    assert!(matches!(end, Ok(Step::Done(StoppedBy::Time))));
}

/// Positions of the first stage, and of the whole gate of a bench with this capacity.
const FIRST_STAGE: usize = 24;
const LONG: u32 = 48;

fn first_slower(slower: f64) -> impl Fn(&Program, &KernelConfig) -> Behaviour {
    let first = Cell::new(true);
    move |_, _| Behaviour::takes(if first.replace(false) { 100.0 } else { slower }).with_noise(0.01)
}

#[test]
fn what_is_clearly_slower_costs_one_short_stage_and_one_round() {
    let bench = Bench::with_capacity(LONG);
    let mut device = bench.device(1, first_slower(120.0));
    let trials = bench.search(&mut device, bench.settings(5));
    assert!(trials[1..].iter().all(|t| t.outcome == Outcome::Reverted), "{:?}", outcomes(&trials));
    for trial in &trials[1..] {
        assert_eq!(trial.samples_us.len(), 1);
        assert_eq!(trial.verdict.ci_us, None, "two blocks give no interval");
        let device = trial.verdict.gates.iter().find(|gate| gate.gate == "device").unwrap();
        assert!(device.detail.contains("at 24 positions"), "{}", device.detail);
    }
    let whole = 2 * LONG as usize;
    assert_eq!(device.positions, whole + 4 * FIRST_STAGE);
    assert_eq!(device.rounds, 12 + 4);
}

#[test]
fn another_attention_is_run_at_every_position_before_it_is_given_up() {
    let bench = Bench::with_capacity(LONG);
    let values = |knob| (knob, ir::schedule::legal_values(knob, &bench.model.graph, &bench.target));
    let knobs = [Knob::FusionGroupingMerge, Knob::SyncAttention, Knob::SyncMerge];
    let space: Vec<_> = knobs.into_iter().map(values).collect();
    let mut device = bench.device(1, first_slower(120.0));
    let settings = Settings { space, ..bench.settings(3) };
    let trials = bench.search(&mut device, settings);
    assert_eq!(outcomes(&trials), [Outcome::Baseline, Outcome::Reverted, Outcome::Reverted]);
    for trial in &trials[1..] {
        assert_eq!(trial.samples_us.len(), 1);
        let device = trial.verdict.gates.iter().find(|gate| gate.gate == "device").unwrap();
        assert!(device.detail.contains("at 48 positions; a second run"), "{}", device.detail);
    }
    assert_eq!(device.positions, 4 * LONG as usize, "the baseline twice, the others once");
    // A program that is wrong at the last position only is never timed.
    let wrong = |_: &Program, _: &KernelConfig| Behaviour {
        wrong_from: Some(LONG as usize - 1),
        ..Behaviour::takes(120.0)
    };
    let first = Cell::new(true);
    let mut device = bench.device(1, |program, kernel| {
        if first.replace(false) { Behaviour::takes(100.0) } else { wrong(program, kernel) }
    });
    let space: Vec<_> = knobs.into_iter().map(values).collect();
    let trials = bench.search(&mut device, Settings { space, ..bench.settings(3) });
    assert!(trials[1..].iter().all(|trial| trial.outcome == Outcome::Disagreed));
    assert_eq!(device.rounds, 12, "only the baseline was timed");
}

#[test]
fn nothing_is_kept_that_did_not_agree_everywhere_twice() {
    let bench = Bench::with_capacity(LONG);
    for wrong_from in [FIRST_STAGE, LONG as usize - 1] {
        let behaviour = Behaviour { wrong_from: Some(wrong_from), ..Behaviour::takes(50.0) };
        let trials = candidates_end_as(&bench, &behaviour);
        assert_eq!(trials.len(), 4);
        for trial in &trials[1..] {
            assert_eq!(trial.outcome, Outcome::Disagreed, "wrong from {wrong_from}");
            assert_eq!(trial.verdict.latency_us, None);
        }
    }
    let mut device = bench.device(1, evict_wins);
    let trials = bench.search(&mut device, bench.settings(16));
    for trial in trials.iter().filter(|trial| trial.outcome.leads()) {
        let device = trial.verdict.gates.iter().find(|gate| gate.gate == "device").unwrap();
        assert!(device.detail.contains("at 48 positions, twice"), "{}", device.detail);
    }
}

#[test]
fn a_wrong_program_is_never_timed_in_the_first_stage_either() {
    let bench = Bench::with_capacity(LONG);
    for wrong_from in [0, FIRST_STAGE - 1] {
        let first = Cell::new(true);
        let mut device = bench.device(1, |_, _| {
            let wrong_from = (!first.replace(false)).then_some(wrong_from);
            Behaviour { wrong_from, ..Behaviour::takes(120.0) }
        });
        let trials = bench.search(&mut device, bench.settings(4));
        assert!(trials[1..].iter().all(|trial| trial.outcome == Outcome::Disagreed));
        assert_eq!(device.rounds, 12, "only the baseline was timed");
    }
}

#[test]
fn a_schedule_is_data() {
    let bench = Bench::new();
    let mut device = bench.device(1, |_, _| Behaviour::takes(100.0).with_noise(0.01));
    let mut settings = bench.settings(12);
    settings.space.retain(|(knob, _)| knob.acts_on() == ir::schedule::ActsOn::Program);
    let trials = bench.search(&mut device, settings);
    assert_eq!(trials.len(), 12);
    let costs = device.costs();
    assert_eq!((costs.compiles, costs.launches), (1, 1), "twelve schedules, one kernel");
    assert_eq!(costs.loads, 12);
    assert!(trials[1..].iter().all(|t| t.spent.device.compiles + t.spent.device.launches == 0));

    // A kernel knob costs its build once, and a launch at each switch between the two sides.
    let mut device = bench.device(1, |_, _| Behaviour::takes(100.0).with_noise(0.01));
    let mut settings = bench.settings(3);
    settings.space.retain(|(knob, _)| knob.acts_on() == ir::schedule::ActsOn::Kernel);
    let trials = bench.search(&mut device, settings);
    assert_eq!(device.costs().compiles, 3);
    assert!(trials[1..].iter().all(|trial| trial.spent.device.compiles == 1));
}

#[test]
fn the_clock_says_what_trials_spend_and_decides_nothing() {
    use std::sync::atomic::{AtomicU64, Ordering};
    static TICKS: AtomicU64 = AtomicU64::new(0);
    let bench = Bench::new();
    let run = |clock: Option<search::Clock>| {
        let mut device = bench.device(1, evict_wins);
        let search = Search::new(bench.gate(), Some(&mut device), bench.settings(6));
        let mut search = match clock {
            Some(clock) => search.with_clock(clock),
            None => search,
        };
        all(&mut search).1
    };
    let timed = run(Some(|| Duration::from_millis(TICKS.fetch_add(1, Ordering::Relaxed))));
    for trial in &timed {
        let spent = trial.spent;
        let parts = spent.propose_s + spent.lower_s + spent.gates_s + spent.timing_s;
        assert!(spent.gates_s > 0.0 && spent.timing_s > 0.0, "{spent:?}");
        assert!(parts <= spent.total_s + 1e-9, "{spent:?}");
    }
    assert!(timed[0].spent.reference_s > 0.0);
    let plain = run(None);
    assert_eq!(outcomes(&plain), outcomes(&timed));
    assert!(plain.iter().all(|trial| trial.spent.total_s == 0.0));
}

/// The rows of a search and the confirmation of its champion as a ledger would hold them, with `helpers` helpers.
fn rows(bench: &Bench, device: Option<u64>, settings: Settings, helpers: usize) -> String {
    // Each poll interval has its own time; the best differs little from the other good ones.
    let script = |program: &Program, kernel: &KernelConfig| {
        let us =
            100.0 - f64::from(kernel.poll_sleep_ns) / 20.0 - f64::from(program.pipeline.stages);
        Behaviour::takes(us).with_noise(0.004)
    };
    let mut scripted = bench.device(device.unwrap_or(0), script);
    std::thread::scope(|scope| {
        let device = device.map(|_| &mut scripted as &mut dyn Device);
        let mut search = Search::new(bench.gate(), device, settings);
        if helpers > 0 {
            search = search.with_helpers(scope, helpers, 2);
        }
        let (stopped_by, trials) = all(&mut search);
        let confirmation = search.confirm().unwrap();
        serde_json::to_string_pretty(&(stopped_by.name(), trials, confirmation)).unwrap()
    })
}

#[test]
fn work_ahead_changes_no_row() {
    let bench = Bench::with_capacity(LONG);
    for (device, seed, min_gain) in [(None, 5, 0.001), (Some(1), 5, 0.001), (Some(2), 6, 0.02)] {
        let settings = || Settings { seed, min_gain, ..bench.settings(24) };
        let alone = rows(&bench, device, settings(), 0);
        assert!(alone.contains("\"kept\"") && alone.contains("\"reverted\""));
        for helpers in [1, 3] {
            assert_eq!(rows(&bench, device, settings(), helpers), alone, "{helpers} helpers");
        }
    }
    // All knobs, and an end by exhaustion.
    let space = || Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect();
    let all = || Settings { space: space(), min_gain: 0.001, ..bench.settings(40) };
    assert_eq!(rows(&bench, None, all(), 3), rows(&bench, None, all(), 0));
    let space = || vec![(Knob::KernelPollSleepNs, vec![Value::Number(0), Value::Number(20)])];
    let few = || Settings { space: space(), ..bench.settings(64) };
    assert_eq!(rows(&bench, Some(3), few(), 2), rows(&bench, Some(3), few(), 0));
}
