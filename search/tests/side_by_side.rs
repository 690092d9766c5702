//! A search on several scripted devices: the same rows as on one, no comparison of two cards' figures, and cards that fail.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ir::Target;
use ir::program::Program;
use ir::schedule::{KernelConfig, Knob};
use model::Model;
use search::strategy::{Known, SearchSpace, StrategyName, strategy};
use search::{
    Audit, Budget, Confirmation, Decision, Device, DeviceError, Expected, Gate, LatencyKind,
    Opener, Outcome, Row, Search, SearchError, Settings, Step, StoppedBy, Terms, Timing, Trial,
    WorkerPool,
};
use tests::scripted::{Behaviour, ScriptedDevice};

const KV_CAPACITY: u32 = 24;
const TRIALS: u64 = 20;
const MIN_GAIN: f64 = 0.01;

/// A model, a target, and results of programs that all tests share.
struct Host {
    model: &'static Model,
    target: &'static Target,
    gate: Gate<'static>,
}

fn fresh_gate(model: &'static Model, target: &'static Target) -> Gate<'static> {
    let (graph, weights) = (&model.graph, &*model.weights);
    let expected = Expected::new(graph, weights, KV_CAPACITY, 1, Some(144)).unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    Gate::new(graph, weights, target, options, &KernelConfig::id, expected)
}

/// The behaviour of one card for a program.
type Script = Arc<dyn Fn(&Program, &KernelConfig) -> Behaviour + Send + Sync>;

/// The end of a search, and its records.
struct Ran {
    trials: Vec<Trial>,
    confirmation: Option<Confirmation>,
    ended: Result<StoppedBy, SearchError>,
    dropped: u64,
}

impl Host {
    fn new() -> &'static Self {
        static HOST: LazyLock<Host> = LazyLock::new(|| {
            let model: &Model = Box::leak(Box::new(model::preset("toy").unwrap()));
            let target: &Target = Box::leak(Box::new(Target::by_name("h200").unwrap()));
            Host { model, target, gate: fresh_gate(model, target) }
        });
        &HOST
    }

    fn logits(&self) -> Vec<Vec<f32>> {
        self.gate.expected().logits.clone()
    }

    fn gate(&self) -> Gate<'static> {
        self.gate.beside()
    }

    fn settings(&self) -> Settings {
        let (graph, target) = (&self.model.graph, self.target);
        let values = |&knob: &Knob| (knob, ir::schedule::legal_values(knob, graph, target));
        Settings {
            seed: 5,
            budget: Budget::Trials(TRIALS),
            explore: TRIALS / 2,
            min_gain: MIN_GAIN,
            default: ir::schedule::neutral_config(graph, target),
            space: Knob::ALL.iter().map(values).collect(),
            timing: Timing { rounds: 12, warmup: 1 },
            finalists: 5,
            simplest: None,
        }
    }

    fn openers<'a>(&self, scripts: &[Script]) -> Vec<Opener<'a>> {
        let one = |script: &Script| {
            let (script, expected) = (script.clone(), self.logits());
            let open = move || {
                let device = ScriptedDevice::new(expected, 1, move |p, k| script(p, k));
                Ok(Box::new(device) as Box<dyn Device>)
            };
            Box::new(open) as Opener<'a>
        };
        scripts.iter().map(one).collect()
    }

    /// A search on these cards, after `past`.
    fn run(&self, scripts: &[Script], past: &[Trial], name: StrategyName) -> Ran {
        std::thread::scope(|scope| {
            let pool = WorkerPool::open(scope, self.openers(scripts));
            let search = Search::side_by_side(self.gate(), pool, self.settings());
            self.finish(search, past, name)
        })
    }

    fn alone(&self, script: &Script) -> Ran {
        let script = script.clone();
        let mut device = ScriptedDevice::new(self.logits(), 1, move |p, k| script(p, k));
        let search = Search::new(self.gate(), Some(&mut device), self.settings());
        self.finish(search, &[], StrategyName::HillClimb)
    }

    fn finish(&self, search: Search<'_>, past: &[Trial], name: StrategyName) -> Ran {
        let settings = self.settings();
        let search_space = SearchSpace {
            space: settings.space,
            seed: settings.seed,
            sweep: settings.explore,
            short: false,
        };
        let mut search = search.with_strategy(strategy(name, search_space, Known::default()));
        for trial in past {
            search.absorb(trial.clone()).unwrap();
        }
        search.check_absorbed().unwrap();
        let ended = loop {
            match search.step(Duration::ZERO) {
                Ok(Step::Trial(_)) => {}
                Ok(Step::Done(stopped_by)) => break Ok(stopped_by),
                Err(error) => break Err(error),
            }
        };
        let confirmation = if ended.is_ok() { search.confirm().unwrap() } else { None };
        let trials = search.trials().iter().map(through_json).collect();
        Ran { trials, confirmation, ended, dropped: search.dropped().trials }
    }
}

fn through_json(trial: &Trial) -> Trial {
    let text = serde_json::to_string(&Row::Trial(Box::new(trial.clone()))).unwrap();
    match serde_json::from_str(&text).unwrap() {
        Row::Trial(trial) => *trial,
        Row::Confirmation(_) => panic!("a trial was written"),
    }
}

fn audit(ran: &Ran) -> Result<(), String> {
    let timing = Timing { rounds: 12, warmup: 1 };
    let kind = Some(LatencyKind::MeasuredGpu);
    let mut audit = Audit::new(Terms { seed: 5, min_gain: MIN_GAIN, timing, kind, cache_bytes: 0 });
    for trial in &ran.trials {
        audit.trial(trial)?;
    }
    ran.confirmation.iter().try_for_each(|confirmation| audit.confirmation(confirmation))
}

/// The time of a program, the same in every process.
fn us(program: &Program, kernel: &KernelConfig) -> f64 {
    let id = program.id() + &kernel.id();
    // With this seed the search keeps two candidates, so some speculative trials are wasted.
    let mut hash: u32 = 2_166_136_261 ^ 2;
    for byte in id.bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(16_777_619);
    }
    // From 10% faster to 5% slower.
    100.0 * (0.90 + 0.15 * f64::from(hash >> 8) / f64::from(1 << 24))
}

fn card(slower: f64) -> Script {
    Arc::new(move |program, kernel| Behaviour::takes(us(program, kernel) * slower))
}

/// The content of a row without what differs between cards and runs.
fn said(trial: &Trial) -> impl PartialEq + std::fmt::Debug + use<> {
    let verdict = &trial.verdict;
    let rounded = trial.gain.map(|gain| (gain.low * 1e9).round() as i64);
    (
        (trial.trial, trial.origin, trial.incumbent, trial.outcome, trial.config.id()),
        (trial.changed.clone(), rounded, trial.samples_us.len(), trial.skipped.clone()),
        (verdict.program_id.clone(), verdict.kernel_id.clone(), verdict.correct),
    )
}

fn all_said(ran: &Ran) -> Vec<impl PartialEq + std::fmt::Debug + use<>> {
    ran.trials.iter().map(said).collect()
}

#[test]
fn several_cards_write_the_rows_of_one() {
    let host = Host::new();
    let one = host.alone(&card(1.0));
    let kept = one.trials.iter().filter(|trial| trial.outcome == Outcome::Kept).count();
    assert!(kept >= 2, "{kept} kept: too few to be in the way of what is begun ahead");
    for cards in [vec![1.0], vec![1.0, 1.03], vec![1.03, 1.0], vec![1.0, 1.03, 0.9]] {
        let scripts: Vec<Script> = cards.iter().map(|&slower| card(slower)).collect();
        let many = host.run(&scripts, &[], StrategyName::HillClimb);
        assert_eq!(many.ended, Ok(StoppedBy::Trials), "{cards:?}");
        assert_eq!(all_said(&many), all_said(&one), "{cards:?}");
        audit(&many).unwrap();
        assert_eq!(many.trials[0].beside.len(), cards.len() - 1);
        for trial in &many.trials[1..] {
            let turn = (trial.trial % cards.len() as u64) as u32;
            assert_eq!(trial.card, Some(turn), "trial {}", trial.trial);
            // The incumbent's blocks are from this card.
            let slower = cards[turn as usize];
            let incumbent = &many.trials[trial.incumbent.unwrap() as usize];
            let here =
                incumbent.verdict.latency_us.unwrap() / cards[incumbent.card.unwrap() as usize];
            assert!((trial.samples_us[0][0] / slower / here - 1.0).abs() < 1e-9);
        }
    }
}

#[test]
fn helpers_change_no_row_of_several_cards() {
    let host = Host::new();
    let without = host.run(&[card(1.0), card(1.03)], &[], StrategyName::HillClimb);
    // A gate of its own: the end of the helpers also ends the shared state that they work on.
    let gate = fresh_gate(host.model, host.target);
    let with = std::thread::scope(|scope| {
        let pool = WorkerPool::open(scope, host.openers(&[card(1.0), card(1.03)]));
        let search = Search::side_by_side(gate, pool, host.settings()).with_helpers(scope, 1, 1);
        host.finish(search, &[], StrategyName::HillClimb)
    });
    assert_eq!(all_said(&with), all_said(&without));
}

#[test]
fn a_figure_of_another_card_would_have_decided_otherwise() {
    // The same rows, compared in the wrong way: the candidate's time over the incumbent's recorded time, whichever card
    // measured it.
    let host = Host::new();
    let latency = |trial: &Trial| trial.verdict.latency_us.unwrap();
    let mut wrong = Vec::new();
    for cards in [[1.0, 1.03], [1.03, 1.0], [1.0, 1.05], [1.05, 1.0]] {
        let ran = host.run(&cards.map(card), &[], StrategyName::HillClimb);
        for trial in &ran.trials[1..] {
            let incumbent = &ran.trials[trial.incumbent.unwrap() as usize];
            let mixed = 1.0 - latency(trial) / latency(incumbent);
            // A simpler schedule needs no gain.
            if (mixed > trial.threshold.unwrap_or(MIN_GAIN)) != (trial.outcome == Outcome::Kept) {
                assert_ne!(trial.card, incumbent.card, "trial {}", trial.trial);
                wrong.push(trial.trial);
            }
        }
    }
    assert!(wrong.len() >= 2, "only {wrong:?} would tell");
}

#[test]
fn every_strategy_is_the_same_on_two_cards() {
    let host = Host::new();
    for name in StrategyName::ALL {
        let one = host.run(&[card(1.0)], &[], name);
        let two = host.run(&[card(1.0), card(1.03)], &[], name);
        assert_eq!(all_said(&two), all_said(&one), "{}", name.name());
        assert_eq!(one.confirmation.map(|c| c.decision), two.confirmation.map(|c| c.decision));
    }
}

#[test]
fn a_resumed_search_goes_on_as_if_it_had_not_stopped() {
    let host = Host::new();
    let cards = [card(1.0), card(1.03)];
    let whole = host.run(&cards, &[], StrategyName::HillClimb);
    for cut in [1, 2, 9, 19] {
        let again = host.run(&cards, &whole.trials[..cut], StrategyName::HillClimb);
        assert_eq!(all_said(&again), all_said(&whole), "cut at {cut}");
        let on = |ran: &Ran| ran.trials.iter().map(|trial| trial.card).collect::<Vec<_>>();
        assert_eq!(on(&again), on(&whole));
        audit(&again).unwrap();
    }
    // Resumed on one of two cards, it continues on that one.
    let lost: Opener<'_> = Box::new(|| Err(DeviceError::Unavailable { reason: "no card".into() }));
    let again = std::thread::scope(|scope| {
        let openers = vec![host.openers(&cards).remove(0), lost];
        let pool = WorkerPool::open(scope, openers);
        assert!(pool.infos()[1].is_err());
        let search = Search::side_by_side(host.gate(), pool, host.settings());
        host.finish(search, &whole.trials[..9], StrategyName::HillClimb)
    });
    assert_eq!(all_said(&again), all_said(&whole));
    assert!(again.trials[9..].iter().all(|trial| trial.card == Some(0)));
    assert_eq!(again.trials[9].left_out.len(), 1);
    audit(&again).unwrap();
}

/// A card that is lost after it has loaded `loads` programs.
fn lost_after(loads: usize) -> Script {
    let loaded = Arc::new(AtomicUsize::new(0));
    Arc::new(move |program, kernel| {
        let lost = loaded.fetch_add(1, Ordering::Relaxed) >= loads;
        let reason = "it fell off the bus".to_owned();
        let load_error = lost.then_some(DeviceError::Unavailable { reason });
        Behaviour { load_error, ..Behaviour::takes(us(program, kernel) * 1.03) }
    })
}

#[test]
fn a_card_that_is_lost_is_left_out_and_the_rows_are_the_same() {
    let host = Host::new();
    let whole = host.run(&[card(1.0), card(1.03)], &[], StrategyName::HillClimb);
    for loads in [0, 1, 4, 8] {
        let ran = host.run(&[card(1.0), lost_after(loads)], &[], StrategyName::HillClimb);
        assert_eq!(ran.ended, Ok(StoppedBy::Trials), "after {loads} loads");
        assert_eq!(all_said(&ran), all_said(&whole), "after {loads} loads");
        let out: Vec<&search::LeftOut> = ran.trials.iter().flat_map(|t| &t.left_out).collect();
        assert_eq!(out.len(), 1, "after {loads} loads: {out:?}");
        assert!(out[0].card == 1 && out[0].why.contains("fell off the bus"), "{out:?}");
        let from = ran.trials.iter().position(|trial| !trial.left_out.is_empty()).unwrap();
        assert!(ran.trials[from..].iter().all(|trial| trial.card == Some(0)));
        audit(&ran).unwrap();
        let confirmation = ran.confirmation.unwrap();
        assert!(confirmation.beside.is_empty() && confirmation.card == Some(0));
    }
}

#[test]
fn without_a_card_the_search_ends_and_can_go_on() {
    let host = Host::new();
    let ran = host.run(&[lost_after(4), lost_after(6)], &[], StrategyName::HillClimb);
    assert!(matches!(&ran.ended, Err(SearchError::Device(_))), "{:?}", ran.ended);
    assert!(!ran.trials.is_empty());
    let on = host.run(&[card(1.03), card(1.03)], &ran.trials, StrategyName::HillClimb);
    let searched = on.trials.iter().filter(|trial| trial.origin != search::Origin::Race).count();
    assert_eq!(searched as u64, TRIALS);
    audit(&on).unwrap();
}

#[test]
fn a_card_without_a_correct_baseline_takes_no_part() {
    let host = Host::new();
    let wrong: Script = Arc::new(|p, k| Behaviour { wrong: true, ..Behaviour::takes(us(p, k)) });
    for (scripts, good) in [([card(1.0), wrong.clone()], 0), ([wrong.clone(), card(1.0)], 1)] {
        let ran = host.run(&scripts, &[], StrategyName::HillClimb);
        assert_eq!(all_said(&ran), all_said(&host.alone(&card(1.0))));
        assert!(ran.trials.iter().all(|trial| trial.card == Some(good)));
        assert!(ran.trials[0].left_out[0].why.contains("the baseline is disagreed there"));
        audit(&ran).unwrap();
    }
    // Without a correct baseline nothing can be compared, on one card as on two.
    let ran = host.run(&[wrong.clone(), wrong], &[], StrategyName::HillClimb);
    assert!(ran.trials.iter().all(|trial| trial.outcome == Outcome::Disagreed));
    assert!(ran.trials.iter().all(|trial| trial.card == Some(0)));
    audit(&ran).unwrap();
}

#[test]
fn a_schedule_that_leads_must_pass_on_every_card_that_goes_on() {
    let host = Host::new();
    let fast = host.run(&[card(1.0), card(1.0)], &[], StrategyName::HillClimb);
    let kept = fast.trials.iter().find(|trial| trial.outcome == Outcome::Kept).unwrap();
    let (program, kernel) = (kept.verdict.program_id.clone().unwrap(), kept.config.kernel.id());
    let other = 1 - kept.card.unwrap() as usize;
    let mut scripts = [card(1.0), card(1.0)];
    scripts[other] = Arc::new(move |p, k| Behaviour {
        wrong: p.id() == program && k.id() == kernel,
        ..Behaviour::takes(us(p, k))
    });
    let ran = host.run(&scripts, &[], StrategyName::HillClimb);
    assert_eq!(all_said(&ran), all_said(&fast));
    let out: Vec<&search::LeftOut> = ran.trials.iter().flat_map(|trial| &trial.left_out).collect();
    assert_eq!(out.len(), 1);
    let why = format!("the schedule that leads (trial {}) fails there", kept.trial);
    assert!(out[0].why.contains(&why), "{}", out[0].why);
}

#[test]
fn a_champion_is_confirmed_on_each_card() {
    let host = Host::new();
    let ran = host.run(&[card(1.0), card(1.03)], &[], StrategyName::HillClimb);
    let confirmation = ran.confirmation.unwrap();
    assert_eq!(confirmation.decision, Decision::Kept);
    assert_eq!((confirmation.card, confirmation.beside[0].card), (Some(0), 1));
    assert_eq!(confirmation.beside[0].decision, Some(Decision::Kept));
    assert_eq!(confirmation.beside[0].samples_us.len(), 24);
    assert!(confirmation.why.contains("; card 1: gain "), "{}", confirmation.why);

    // If nothing is better than the baseline, nothing is raced, and no card has a figure of another one.
    let equal = |slower: f64| -> Script { Arc::new(move |_, _| Behaviour::takes(100.0 * slower)) };
    let none = host.run(&[equal(1.0), equal(1.03)], &[], StrategyName::HillClimb);
    let last = none.confirmation.as_ref().unwrap();
    assert_eq!((last.champion, last.card, last.beside.len()), (0, Some(0), 0));
    audit(&none).unwrap();

    // On one card the champion is slower than the baseline, but only after it was kept on the other.
    let champion = ran.trials.iter().rfind(|trial| trial.outcome.leads()).unwrap();
    let (program, kernel) =
        (champion.verdict.program_id.clone().unwrap(), champion.config.kernel.id());
    let other = 1 - champion.card.unwrap() as usize;
    let mut scripts = [card(1.0), card(1.0)];
    scripts[other] = Arc::new(move |p, k| {
        let is_champion = p.id() == program && k.id() == kernel;
        Behaviour::takes(if is_champion { 200.0 } else { us(p, k) })
    });
    let again = host.run(&scripts, &ran.trials, StrategyName::HillClimb);
    let confirmation = again.confirmation.as_ref().unwrap();
    assert_eq!(confirmation.decision, Decision::Reverted, "{}", confirmation.why);
    audit(&again).unwrap();
    // An adverse result of one card cannot be removed from the row.
    let forged = |forge: fn(&mut Confirmation)| {
        let mut forged = again.confirmation.clone().unwrap();
        forge(&mut forged);
        audit(&Ran {
            trials: again.trials.clone(),
            confirmation: Some(forged),
            ended: Ok(StoppedBy::Trials),
            dropped: 0,
        })
    };
    assert!(forged(|c| c.decision = Decision::Kept).is_err());
    assert!(forged(|c| c.beside.iter_mut().for_each(|b| turned(&mut b.decision))).is_err());
    let faster = |c: &mut Confirmation| {
        for round in c.beside.iter_mut().flat_map(|other| &mut other.samples_us) {
            round[1] /= 2.0;
            round[2] /= 2.0;
        }
    };
    assert!(forged(faster).is_err());
}

/// The other decision.
fn turned(decision: &mut Option<Decision>) {
    let kept = *decision == Some(Decision::Kept);
    *decision = Some(if kept { Decision::Reverted } else { Decision::Kept });
}

#[test]
fn rows_that_mix_cards_are_refused() {
    let host = Host::new();
    // Two cards with different noise.
    let noisy = |slower: f64, noise: f64| -> Script {
        Arc::new(move |p, k| Behaviour::takes(us(p, k) * slower).with_noise(noise))
    };
    let ran = host.run(&[noisy(1.0, 0.002), noisy(1.03, 0.08)], &[], StrategyName::HillClimb);
    audit(&ran).unwrap();
    let noise = |trial: &Trial| trial.threshold.unwrap();
    let (quiet, loud) = (noise(&ran.trials[2]), noise(&ran.trials[1]));
    assert!(loud > 1.2 * quiet, "each card has its own threshold: {quiet} and {loud}");
    let forged = |forge: &dyn Fn(&mut Vec<Trial>)| {
        let mut trials = ran.trials.clone();
        forge(&mut trials);
        audit(&Ran { trials, confirmation: None, ended: Ok(StoppedBy::Trials), dropped: 0 })
    };
    assert!(forged(&|_| {}).is_ok());
    assert!(forged(&|trials| trials[1].card = Some(0)).is_err(), "another card's noise");
    assert!(forged(&|trials| trials[1].card = Some(7)).is_err(), "a card that measured no noise");
    assert!(forged(&|trials| trials[0].beside.clear()).is_err(), "noise from nowhere");
    assert!(forged(&|trials| trials[0].beside[0].noise_floor = Some(0.001)).is_err());
    assert!(forged(&|trials| trials[0].beside[0].card = 0).is_err(), "a card twice");
    let moved = |trials: &mut Vec<Trial>| {
        let beside = trials[0].beside.clone();
        trials[1].beside = beside;
    };
    assert!(forged(&moved).is_err(), "noise measured anew");
}

#[test]
fn a_thread_that_panics_is_heard_of() {
    let host = Host::new();
    let panics: Script = Arc::new(|_, _| panic!("a bug of ours"));
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut trials = 0;
        std::thread::scope(|scope| {
            let pool = WorkerPool::open(scope, host.openers(&[card(1.0), panics]));
            let mut search = Search::side_by_side(host.gate(), pool, host.settings());
            while let Ok(Step::Trial(trial)) = search.step(Duration::ZERO) {
                assert!(trial.trial > 0 || trial.left_out.len() == 1);
                trials += 1;
            }
            assert_eq!(trials, TRIALS);
        });
    }));
    assert!(ended.is_err(), "the panic comes out at the end, after all trials");
}

#[test]
fn what_is_begun_for_nothing_is_counted() {
    let host = Host::new();
    let nothing: Script = Arc::new(|_, _| Behaviour::takes(100.0));
    let ran = host.run(&[nothing.clone(), nothing], &[], StrategyName::HillClimb);
    assert_eq!(ran.dropped, 0, "nothing is kept, so that all was foreseen");
    let ran = host.run(&[card(1.0), card(1.0)], &[], StrategyName::HillClimb);
    assert!(ran.dropped > 0 && ran.dropped < TRIALS, "{}", ran.dropped);
}
