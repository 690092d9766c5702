//! A/A test: a search over candidates that are the same program to the card, with the settings of `amk loop`.
//! Everything that it keeps is a false positive.
//!
//! With `AMK_AA_SEEDS=100` it searches with that many seeds for each kind of noise, and prints how many searches kept
//! how many of the 64.

use std::collections::BTreeMap;
use std::time::Duration;

use ir::Target;
use ir::schedule::{KernelConfig, Knob};
use search::{Budget, Expected, Gate, Outcome, Search, Settings, Step, Timing};
use search::{
    Clocks, Contender, Device, DeviceError, DeviceInfo, Equals, Handle, Plan, Ran, Samples, equals,
};
use tests::scripted::{Behaviour, Jitter, ScriptedDevice};

const KV_CAPACITY: u32 = 24;

/// Number of equal candidates of a search.
const CANDIDATES: u64 = 64;

/// Maximum number of them that a search may keep.
const KEPT_MAX: usize = 2;

/// A card at rest: blocks of one length vary by 0.2% (docs/explanation/measuring.md).
const QUIET: Jitter = Jitter {
    sigma: 0.002,
    keeps: 0.0,
    walk: 0.0,
    trend: 0.0,
    spikes: 0.0,
    spike: 0.0,
    steps: (0.0, 0.0),
};

/// Kinds of noise.
const KINDS: [(&str, Jitter); 7] = [
    ("quiet", QUIET),
    ("autocorrelated", Jitter { sigma: 0.002, keeps: 0.9, ..QUIET }),
    ("drifting", Jitter { walk: 0.002, ..QUIET }),
    ("warming up", Jitter { trend: 0.0005, ..QUIET }),
    ("interrupted", Jitter { spikes: 0.05, spike: 0.03, ..QUIET }),
    ("stepping clocks", Jitter { steps: (0.05, 0.04), ..QUIET }),
    (
        "all of it, on a card that others use",
        Jitter {
            sigma: 0.01,
            keeps: 0.7,
            walk: 0.002,
            trend: 0.0,
            spikes: 0.05,
            spike: 0.05,
            steps: (0.02, 0.04),
        },
    ),
];

/// The number of equal candidates that a search keeps.
fn kept(seed: u64, jitter: Jitter) -> usize {
    let model = model::preset("toy").unwrap();
    let target = Target::by_name("h200").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 1, Some(24)).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected());
    let values = |&knob: &Knob| (knob, ir::schedule::legal_values(knob, graph, &target));
    let settings = Settings {
        seed,
        budget: Budget::Trials(CANDIDATES + 1),
        explore: Budget::Trials(CANDIDATES).explore(),
        min_gain: 0.01,
        default: ir::schedule::neutral_config(graph, &target),
        space: Knob::ALL.iter().map(values).collect(),
        timing: Timing::default(),
        finalists: 0,
        simplest: None,
    };
    let same = |_: &_, _: &_| Behaviour::takes(100.0);
    let mut device = ScriptedDevice::new(expected().logits, seed, same).with_jitter(jitter);
    let mut search = Search::new(gate, Some(&mut device), settings);
    while let Step::Trial(_) = search.step(Duration::ZERO).unwrap() {}
    let trials = search.trials();
    assert_eq!(trials.len() as u64, CANDIDATES + 1);
    trials.iter().filter(|trial| trial.outcome == Outcome::Kept).count()
}

#[test]
fn of_64_equal_candidates_at_most_two_are_kept_whatever_the_noise() {
    let seeds = std::env::var("AMK_AA_SEEDS").map_or(2, |text| text.parse().unwrap());
    for (name, jitter) in KINDS {
        let mut searches: BTreeMap<usize, usize> = BTreeMap::new();
        for seed in 0..seeds {
            *searches.entry(kept(seed, jitter)).or_default() += 1;
        }
        println!("{name}: {seeds} searches by candidates kept {searches:?}");
        let most = searches.keys().max().unwrap();
        assert!(*most <= KEPT_MAX, "{name}: {most} of {CANDIDATES} equal candidates kept");
    }
}

/// First handle of copies.
const COPY: u64 = 1000;

/// A scripted card with clocks, on which a copy of a program takes `factor` times as long as the program.
struct Biased<'a> {
    card: ScriptedDevice<'a>,
    original: Option<std::sync::Arc<ir::program::Verified<ir::program::Program>>>,
    factor: f64,
    sm_mhz: Box<dyn FnMut() -> u32>,
}

impl Device for Biased<'_> {
    fn describe(&self) -> DeviceInfo {
        self.card.describe()
    }

    fn prepare(
        &mut self,
        program: &std::sync::Arc<ir::program::Verified<ir::program::Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        let original = self.original.get_or_insert_with(|| program.clone());
        let copy = !std::sync::Arc::ptr_eq(original, program);
        let Handle(handle) = self.card.prepare(program, kernel)?;
        Ok(Handle(if copy { handle + COPY } else { handle }))
    }

    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        self.card.run(Handle(program.0 % COPY), tokens, first)
    }

    fn clocks(&mut self) -> Option<Clocks> {
        let sm_mhz = (self.sm_mhz)();
        Some(Clocks { sm_mhz, memory_mhz: 3201, throttled: Vec::new(), ..Clocks::default() })
    }

    fn time(&mut self, pair: [Contender<'_>; 2], plan: &Plan<'_>) -> Result<Samples, DeviceError> {
        let copied = pair[1].handle().0 >= COPY;
        let pair = pair
            .each_ref()
            .map(|side| Contender::new(Handle(side.handle().0 % COPY), side.agreement()));
        let mut samples = self.card.time(pair, plan)?;
        for round in samples.rounds.iter_mut().filter(|_| copied) {
            round[1] *= self.factor;
            round[2] *= self.factor;
        }
        Ok(samples)
    }

    fn release(
        &mut self,
        program: &std::sync::Arc<ir::program::Verified<ir::program::Program>>,
        kernel: &KernelConfig,
    ) {
        self.card.release(program, kernel);
    }
}

/// Runs the check of `amk evaluate --aa` on a simulated card.
fn a_against_a(jitter: Jitter, factor: f64, sm_mhz: impl FnMut() -> u32 + 'static) -> Equals {
    let model = model::preset("toy").unwrap();
    let target = Target::by_name("h200").unwrap();
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = || Expected::new(graph, weights, KV_CAPACITY, 1, Some(24)).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let mut gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected());
    let same = |_: &_, _: &_| Behaviour::takes(100.0);
    let card = ScriptedDevice::new(expected().logits, 1, same).with_jitter(jitter);
    let mut card = Biased { card, original: None, factor, sm_mhz: Box::new(sm_mhz) };
    let config = ir::schedule::neutral_config(graph, &target);
    let timing = Timing::default();
    let (_, assessed) = search::assess::evaluate(&mut gate, Some(&mut card), &config, timing, 1);
    equals(&mut gate, &mut card, &assessed.unwrap(), timing, 0.01, (CANDIDATES as usize, 1))
        .unwrap()
}

#[test]
fn a_program_against_its_copy_is_hardly_ever_kept() {
    for (name, jitter) in [KINDS[0], KINDS[2], KINDS[6]] {
        let equals = a_against_a(jitter, 1.0, || 1980);
        assert_eq!((equals.all.len(), equals.kept_max()), (CANDIDATES as usize, KEPT_MAX));
        assert!(equals.kept() <= KEPT_MAX, "{name}: {} kept", equals.kept());
        assert!(equals.width() > 0.0 && equals.width() < 0.1, "{name}: {}", equals.width());
        assert!(equals.all.iter().all(|equal| equal.notes.len() == 1), "{name}: clocks changed");
    }
}

#[test]
fn a_card_that_favours_the_copy_and_clocks_that_change_are_seen() {
    let mut readings = 0;
    let biased = a_against_a(QUIET, 0.95, move || {
        readings += 1;
        if readings > 99 { 1755 } else { 1980 }
    });
    assert_eq!(biased.kept(), CANDIDATES as usize);
    assert!(biased.kept() > biased.kept_max());
    let changed = |equal: &&search::Equal| equal.notes.iter().any(|n| n.contains("clocks changed"));
    assert_eq!(biased.all.iter().filter(changed).count(), 1, "the clock changed once");
}

/// Shows that the noise matters: without the rule it would be called a gain, as times of equal programs differ by more
/// than the least gain worth keeping.
#[test]
fn the_noise_is_larger_than_what_is_worth_keeping() {
    use search::Device;
    for (name, jitter) in &KINDS[1..] {
        let model = model::preset("toy").unwrap();
        let target = Target::by_name("h200").unwrap();
        let (graph, weights) = (&model.graph, &*model.weights);
        let expected = Expected::new(graph, weights, KV_CAPACITY, 1, Some(24)).unwrap();
        let tokens = expected.tokens.clone();
        let options = lower::Options { kv_capacity: KV_CAPACITY };
        let device_expected = expected.logits.clone();
        let mut gate = Gate::new(graph, weights, &target, options, &KernelConfig::id, expected);
        let same = |_: &_, _: &_| Behaviour::takes(100.0);
        let mut device = ScriptedDevice::new(device_expected, 1, same).with_jitter(*jitter);
        let config = ir::schedule::neutral_config(graph, &target);
        let (_, assessed) =
            search::assess::evaluate(&mut gate, Some(&mut device), &config, Timing::default(), 1);
        let assessed = assessed.unwrap();
        let handle = device.prepare(&assessed.candidate.program, &config.kernel).unwrap();
        let contender = search::Contender::new(handle, assessed.on_device.as_ref().unwrap());
        let plan = search::Plan { tokens: &tokens, first: 16, rounds: 36, warmup: 0 };
        let samples = device.time([contender; 2], &plan).unwrap();
        let all = samples.rounds.iter().flatten();
        let (low, high) =
            all.fold((f64::MAX, 0_f64), |(low, high), &us| (low.min(us), high.max(us)));
        assert!(high / low > 1.01, "{name}: {low} to {high} us");
    }
}
