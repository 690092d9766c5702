//! Attacks that a dishonest schedule, device or owner of files could use to appear faster. One table; each attack is
//! run, and must be refused or flagged by name. `docs/explanation/trust.md` shows the table.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use abi::Opcode;
use ir::program::{Program, Verified};
use ir::schedule::{KernelConfig, Knob};
use ir::{DType, Target, TensorId, Weights};
use model::Model;
use reference_vm::eval::{Evaluator, Logits};
use search::{
    Audit, Budget, Bundle, Conditions, Contender, Device, DeviceError, DeviceInfo, Expected, Gate,
    Handle, LatencyKind, Outcome, Plan, Ran, Samples, Search, Settings, Step, Terms, Timing, Trial,
};
use tests::scripted::{Behaviour, ScriptedDevice};

const KV_CAPACITY: u32 = 24;

/// An attack.
pub(crate) struct Attack {
    /// Its name.
    pub(crate) name: &'static str,
    /// The action.
    pub(crate) how: &'static str,
    /// The check that detects it.
    pub(crate) found_by: &'static str,
    /// Text of the refusal.
    pub(crate) says: &'static str,
    /// Runs it. Returns the refusal or the flag; `None` if it was not detected.
    run: fn() -> Option<String>,
}

/// Every attack.
pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        name: "work skipped in the program",
        how: "a program without one of its products",
        found_by: "`verify`",
        says: "C-SATISFIABLE",
        run: || without_a_task().err().map(|violations| violations.to_string()),
    },
    Attack {
        name: "work skipped on the device",
        how: "half of the logits are never computed",
        found_by: "the gate `device`",
        says: "device disagrees",
        run: || cheats(Cheat::HalfTheLogits),
    },
    Attack {
        name: "completion flagged before the stores",
        how: "the host reads the last position before it was written: the poison is still there",
        found_by: "the gate `device`",
        says: "device disagrees",
        run: || cheats(Cheat::LastRowIsPoison),
    },
    Attack {
        name: "completion flagged early when timed",
        how: "the same, only while a clock runs",
        found_by: "the check of timed outputs",
        says: "timed disagrees",
        run: || cheats(Cheat::PoisonWhenTimed),
    },
    Attack {
        name: "previous output reused",
        how: "each position answers with the logits of the one before",
        found_by: "the gate `device`",
        says: "device disagrees",
        run: || cheats(Cheat::RowBefore),
    },
    Attack {
        name: "previous output reused when timed",
        how: "a timed run leaves the logits of an earlier position",
        found_by: "the check of timed outputs",
        says: "timed disagrees",
        run: || cheats(Cheat::RowBeforeWhenTimed),
    },
    Attack {
        name: "keys and values of an earlier step",
        how: "the newest key and value are those of the position before",
        found_by: "the gate `device`",
        says: "device disagrees",
        run: || cheats(Cheat::StaleKeys),
    },
    Attack {
        name: "another token than the logits say",
        how: "the logits are right; the sequence goes on with the token beside the most likely one",
        found_by: "the gate `device`",
        says: "the device's own logits say",
        run: || cheats(Cheat::AnotherToken),
    },
    Attack {
        name: "another token when timed",
        how: "the same, only while a clock runs",
        found_by: "the check of timed outputs",
        says: "timed disagrees",
        run: || cheats(Cheat::AnotherTokenWhenTimed),
    },
    Attack {
        name: "another bit the second time",
        how: "the last bit of one logit differs in every second run of the same tokens",
        found_by: "the gate `device`",
        says: "two runs on the device differ",
        run: || cheats(Cheat::AnotherBit),
    },
    Attack {
        name: "lower precision",
        how: "weights rounded to 8 bits (e4m3)",
        found_by: "the gate `device`",
        says: "device disagrees",
        run: || cheats(Cheat::EightBits),
    },
    Attack {
        name: "clocks or caches abused",
        how: "the candidate leaves the card so that the incumbent's next block takes 10 % longer",
        found_by: "the order effect: not kept",
        says: "order effect",
        run: || cheats(Cheat::SlowsTheNext),
    },
    Attack {
        name: "a latency below the bound",
        how: "a tenth of what reading the bytes takes",
        found_by: "the gate `bound`",
        says: "below the bound",
        run: || too_fast(0.1),
    },
    Attack {
        name: "a latency of zero",
        how: "the clock says that nothing passed",
        found_by: "the gate `bound`",
        says: "below the bound",
        run: || too_fast(0.0),
    },
    Attack {
        name: "a latency that is no number",
        how: "NaN, which no comparison refuses",
        found_by: "the gate `bound`",
        says: "below the bound",
        run: || too_fast(f64::NAN),
    },
    Attack {
        name: "a forged row: latency",
        how: "0.001 us in a ledger whose hashes are all computed anew",
        found_by: "the audit (`runs verify`, `--resume`)",
        says: "its samples have",
        run: || forged(|trial| trial.verdict.latency_us = Some(0.001)),
    },
    Attack {
        name: "a forged row: samples",
        how: "the same with samples that fit it",
        found_by: "the audit",
        says: "rounds decide nothing",
        run: || {
            forged(|trial| {
                trial.verdict.latency_us = Some(0.001);
                trial.samples_us.iter_mut().for_each(|round| (round[1], round[2]) = (0.001, 0.001));
            })
        },
    },
    Attack {
        name: "a forged row: outcome",
        how: "a reverted candidate is called kept",
        found_by: "the audit",
        says: "its samples say reverted",
        run: || forged(|trial| trial.outcome = Outcome::Kept),
    },
    Attack {
        name: "a forged row: no samples",
        how: "the samples are left out",
        found_by: "the audit",
        says: "without samples",
        run: || forged(|trial| trial.samples_us.clear()),
    },
    Attack {
        name: "a forged row: chosen samples",
        how: "measured on after the rule had decided, until the samples please",
        found_by: "the audit",
        says: "it was decided after",
        run: || {
            forged(|trial| {
                let round = trial.samples_us[0];
                trial.samples_us.push(round);
            })
        },
    },
    Attack {
        name: "a forged row: no proof",
        how: "a row without the gate that compares on the device",
        found_by: "the audit",
        says: "the gate device",
        run: || forged(|trial| trial.verdict.gates.retain(|gate| gate.gate != "device")),
    },
    Attack {
        name: "an edited bundle",
        how: "another median in the file",
        found_by: "`Bundle::read`",
        says: "it was edited",
        run: || {
            shipped_bundle(|text| text.replacen("\"median_us\": ", "\"median_us\": 1", 1), |_| {})
        },
    },
    Attack {
        name: "a forged bundle",
        how: "0.001 us, with samples, interval and hash that fit it",
        found_by: "`Bundle::rebuild`",
        says: "below the bound",
        run: || {
            shipped_bundle(str::to_owned, |bundle| {
                bundle.rounds_us.iter_mut().for_each(|round| *round = [0.001; 4]);
                (bundle.median_us, bundle.ci_us) = (0.001, [0.001; 2]);
            })
        },
    },
    Attack {
        name: "a forged bundle: fewer bytes",
        how: "the same, with a bound for fewer bytes than the program reads",
        found_by: "`Bundle::rebuild`",
        says: "the program reads",
        run: || {
            shipped_bundle(str::to_owned, |bundle| {
                bundle.bytes_per_token = 1000;
                bundle.bound_us = 1000.0 / bundle.bandwidth * 1e6;
            })
        },
    },
    Attack {
        name: "a result from another card",
        how: "a bundle for an H200 that was measured on a B200",
        found_by: "`Bundle::rebuild`",
        says: "another card",
        run: || {
            shipped_bundle(str::to_owned, |bundle| bundle.conditions.card = "NVIDIA B200".into())
        },
    },
    Attack {
        name: "a search continued on another card",
        how: "a card of the same name, another one",
        found_by: "`Conditions::differs`, on `--resume`",
        says: "the card was",
        run: || elsewhere(|now| now.uuid = Some("2".into())),
    },
    Attack {
        name: "a search continued with another driver",
        how: "a driver that clocks differently",
        found_by: "`Conditions::differs`, on `--resume`",
        says: "the driver was",
        run: || elsewhere(|now| now.driver = "581.0".into()),
    },
];

#[test]
fn every_attack_is_refused_or_flagged_by_name() {
    let mut through = Vec::new();
    for attack in ATTACKS {
        match (attack.run)() {
            Some(said) if said.contains(attack.says) => {}
            Some(said) => {
                through.push(format!("{}: says {said:?}, not {:?}", attack.name, attack.says))
            }
            None => through.push(format!("{}: was let through", attack.name)),
        }
    }
    assert!(through.is_empty(), "{}", through.join("\n"));
}

/// A control: without the attack, the same checks pass.
#[test]
fn what_is_honest_passes_the_same_checks() {
    assert_eq!(cheats(Cheat::Nothing), None);
    assert_eq!(too_fast(1.5), None);
    assert_eq!(forged(|_| {}), None);
    assert_eq!(shipped_bundle(str::to_owned, |_| {}), None);
    assert_eq!(elsewhere(|now| now.amk = "another build".into()), None);
}

/// The table as `docs/explanation/trust.md` shows it.
pub(crate) fn table() -> String {
    let mut out = String::from("| attack | what is done | found by | says |\n|---|---|---|---|\n");
    for Attack { name, how, found_by, says, .. } in ATTACKS {
        let _ = writeln!(out, "| {name} | {how} | {found_by} | `{says}` |");
    }
    out
}

struct Bench {
    model: Model,
    target: Target,
}

impl Bench {
    fn new() -> Self {
        let model = model::preset("toy").unwrap();
        Self { model, target: Target::by_name("h200").unwrap() }
    }

    fn expected(&self) -> Expected {
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        Expected::new(graph, weights, KV_CAPACITY, 1, Some(KV_CAPACITY as usize)).unwrap()
    }

    fn settings(&self) -> Settings {
        let (graph, target) = (&self.model.graph, &self.target);
        let knobs = [Knob::SyncDown, Knob::PipelineStages, Knob::KernelPollSleepNs];
        Settings {
            seed: 5,
            budget: Budget::Trials(3),
            explore: 2,
            min_gain: 0.01,
            default: ir::schedule::neutral_config(graph, target),
            space: knobs
                .map(|knob| (knob, ir::schedule::legal_values(knob, graph, target)))
                .to_vec(),
            timing: Timing::default(),
            finalists: 0,
            simplest: None,
        }
    }

    /// The trials of a short search.
    fn trials(&self, device: &mut dyn Device) -> Vec<Trial> {
        let (graph, weights) = (&self.model.graph, &*self.model.weights);
        let options = lower::Options { kv_capacity: KV_CAPACITY };
        let gate =
            Gate::new(graph, weights, &self.target, options, &KernelConfig::id, self.expected());
        let mut search = Search::new(gate, Some(device), self.settings());
        while let Step::Trial(_) = search.step(Duration::ZERO).unwrap() {}
        search.trials().to_vec()
    }
}

/// The refusal or flag of a candidate that must not win; `None` if one was kept, or no error was found.
fn refusal(trials: &[Trial]) -> Option<String> {
    assert_eq!(trials[0].outcome, Outcome::Baseline, "{}", trials[0].why);
    let said = |trial: &Trial| {
        let failed = trial.verdict.gates.iter().find(|gate| !gate.passed);
        let flagged = trial.verdict.notes.iter().find(|note| note.starts_with("order effect"));
        failed.map(|gate| gate.detail.clone()).or(flagged.cloned())
    };
    let candidates = trials[1..].iter();
    let all: Option<Vec<String>> =
        candidates.map(|trial| said(trial).filter(|_| trial.outcome != Outcome::Kept)).collect();
    all.map(|all| all.join("; "))
}

fn without_a_task() -> Result<Verified<Program>, ir::Violations> {
    let bench = Bench::new();
    let valid = ir::schedule::validate(bench.settings().default, &bench.model.graph, &bench.target)
        .unwrap();
    let options = lower::Options { kv_capacity: KV_CAPACITY };
    let mut program =
        lower::lower(&valid, &bench.model.graph, &bench.target, options).unwrap().into_inner();
    let tasks = &mut program.workers[0].tasks;
    let last = tasks.iter().rposition(|task| task.opcode == Opcode::Matvec).unwrap();
    tasks.remove(last);
    ir::program::verify(program)
}

/// How the candidates of a device cheat. The baseline is honest.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Cheat {
    Nothing,
    HalfTheLogits,
    LastRowIsPoison,
    PoisonWhenTimed,
    RowBefore,
    RowBeforeWhenTimed,
    StaleKeys,
    EightBits,
    SlowsTheNext,
    AnotherToken,
    AnotherTokenWhenTimed,
    AnotherBit,
}

struct Cheating<'a> {
    honest: ScriptedDevice<'a>,
    bench: &'a Bench,
    cheat: Cheat,
}

impl Cheating<'_> {
    fn is_candidate(handle: Handle) -> bool {
        handle != Handle(0)
    }

    /// A candidate's answers at these positions.
    fn rows(&self, mut rows: Vec<Vec<f32>>, tokens: &[u32], first: usize) -> Vec<Vec<f32>> {
        let graph = &self.bench.model.graph;
        let weights = &*self.bench.model.weights;
        match self.cheat {
            Cheat::Nothing
            | Cheat::PoisonWhenTimed
            | Cheat::RowBeforeWhenTimed
            | Cheat::SlowsTheNext
            | Cheat::AnotherToken
            | Cheat::AnotherTokenWhenTimed
            | Cheat::AnotherBit => rows,
            Cheat::HalfTheLogits => {
                rows.iter_mut()
                    .for_each(|row| row.iter_mut().skip(128).for_each(|x| *x = f32::NAN));
                rows
            }
            Cheat::LastRowIsPoison => {
                rows.last_mut().unwrap().fill(f32::NAN);
                rows
            }
            Cheat::RowBefore => {
                rows.rotate_right(1);
                rows
            }
            Cheat::StaleKeys => {
                let stale = |at: usize| {
                    let mut seen = tokens[..=at].to_vec();
                    if at > 1 {
                        seen[at - 1] = seen[at - 2];
                    }
                    let mut evaluator = Evaluator::new(graph, weights).unwrap();
                    evaluator.run(&seen, Logits::Last).unwrap().remove(0)
                };
                (first..tokens.len()).map(stale).collect()
            }
            Cheat::EightBits => {
                let rounded = EightBits::of(&self.bench.model);
                let mut evaluator = Evaluator::new(graph, &rounded).unwrap();
                evaluator.run(tokens, Logits::All).unwrap().split_off(first)
            }
        }
    }
}

impl Device for Cheating<'_> {
    fn describe(&self) -> DeviceInfo {
        self.honest.describe()
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        self.honest.prepare(program, kernel)
    }

    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        let honest = self.honest.run(program, tokens, first)?;
        if !Self::is_candidate(program) {
            return Ok(honest);
        }
        // It chooses tokens consistently with its answers.
        let logits = self.rows(honest.logits, tokens, first);
        let mut chosen: Vec<u32> = logits.iter().map(|row| reference_vm::argmax(row)).collect();
        if self.cheat == Cheat::AnotherToken {
            *chosen.last_mut().unwrap() ^= 1;
        }
        Ok(Ran { logits, chosen, ..Ran::default() })
    }

    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let candidate = Self::is_candidate(contenders[1].handle());
        let mut samples = self.honest.time(contenders, plan)?;
        if candidate {
            match self.cheat {
                Cheat::PoisonWhenTimed => samples.last_logits[1].fill(f32::NAN),
                Cheat::RowBeforeWhenTimed => {
                    samples.last_logits[1] =
                        self.bench.expected().logits[plan.tokens.len() - 2].clone();
                }
                Cheat::SlowsTheNext => samples.rounds.iter_mut().for_each(|round| round[3] *= 1.1),
                Cheat::AnotherTokenWhenTimed => samples.last_chosen[1] ^= 1,
                Cheat::Nothing
                | Cheat::AnotherToken
                | Cheat::AnotherBit
                | Cheat::HalfTheLogits
                | Cheat::LastRowIsPoison
                | Cheat::RowBefore
                | Cheat::StaleKeys
                | Cheat::EightBits => {}
            }
        }
        Ok(samples)
    }

    fn release(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) {
        self.honest.release(program, kernel);
    }
}

/// A model's weights, rounded to three bits of mantissa, as stored.
struct EightBits(Vec<Vec<u8>>);

impl EightBits {
    fn of(model: &Model) -> Self {
        assert_eq!(model.graph.dtype, DType::Bf16);
        // Rounds to the nearest with three of seven bits of mantissa.
        let round =
            |bytes: &[u8; 2]| ((u16::from_le_bytes(*bytes) + (1 << 3)) & !0xf).to_le_bytes();
        let tensor = |index: usize| {
            let bytes = model.weights.bytes(TensorId(index as u32));
            bytes.as_chunks::<2>().0.iter().flat_map(round).collect()
        };
        Self((0..model.graph.tensors.len()).map(tensor).collect())
    }
}

impl Weights for EightBits {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        &self.0[tensor.index()]
    }
}

/// A search whose candidates cheat and would be 5 % faster if they were accepted.
fn cheats(cheat: Cheat) -> Option<String> {
    let bench = Bench::new();
    let us = if matches!(cheat, Cheat::SlowsTheNext) { 100.0 } else { 95.0 };
    let first = std::cell::Cell::new(true);
    let script = move |_: &Program, _: &KernelConfig| {
        let is_first = first.replace(false);
        let other = matches!(cheat, Cheat::AnotherBit) && !is_first;
        Behaviour {
            unrepeatable: other.then_some((3, 5)),
            ..Behaviour::takes(if is_first { 100.0 } else { us }).with_noise(0.002)
        }
    };
    let honest = ScriptedDevice::new(bench.expected().logits, 1, script);
    let mut device = Cheating { honest, bench: &bench, cheat };
    refusal(&bench.trials(&mut device))
}

/// A search whose candidates take this multiple of their bound.
fn too_fast(times: f64) -> Option<String> {
    let bench = Bench::new();
    // 106 kB per step: a bound of 1064 us.
    const BANDWIDTH: f64 = 1e8;
    let first = std::cell::Cell::new(true);
    let script = move |program: &Program, _: &KernelConfig| {
        let bound = program.stream_bytes() as f64 / BANDWIDTH * 1e6;
        Behaviour::takes(bound * if first.replace(false) { 4.0 } else { times })
    };
    let honest = ScriptedDevice::new(bench.expected().logits, 1, script).with_bandwidth(BANDWIDTH);
    let mut device = Cheating { honest, bench: &bench, cheat: Cheat::Nothing };
    refusal(&bench.trials(&mut device))
}

/// A ledger of measured trials in which one was edited; returns the audit's finding.
fn forged(edit: impl Fn(&mut Trial)) -> Option<String> {
    let bench = Bench::new();
    let slower = std::cell::Cell::new(100.0);
    let script = move |_: &Program, _: &KernelConfig| {
        Behaviour::takes(slower.replace(103.0)).with_noise(0.004)
    };
    let mut device = ScriptedDevice::new(bench.expected().logits, 1, script);
    let mut trials = bench.trials(&mut device);
    assert_eq!(trials[1].outcome, Outcome::Reverted);
    edit(&mut trials[1]);
    // The forger keeps this one consistent.
    let verdict = &mut trials[1].verdict;
    let (bound, us) = (verdict.bound_us.unwrap(), verdict.latency_us.unwrap());
    verdict.pct_of_roofline = Some(100.0 * bound / us);
    let Settings { seed, min_gain, timing, .. } = bench.settings();
    let kind = Some(LatencyKind::MeasuredGpu);
    let mut audit = Audit::new(Terms { seed, min_gain, timing, kind, cache_bytes: 0 });
    trials.iter().find_map(|trial| audit.trial(trial).err())
}

/// The shipped bundle with its text or its figures edited; the figures get a new hash.
fn shipped_bundle(
    edit_text: impl Fn(&str) -> String,
    edit: impl Fn(&mut Bundle),
) -> Option<String> {
    let shipped = corpus::all_shipped().iter().find(|shipped| shipped.bundle.is_some()).unwrap();
    let target = Target::by_name(shipped.target).unwrap();
    let mut honest = Bundle::read(shipped.bundle.unwrap()).unwrap();
    let graph = model::preset(&honest.model).unwrap().graph;
    // Measured at the current version: a stale bundle would be refused for that.
    let valid = ir::schedule::validate(honest.config, &graph, &target).unwrap();
    let options = lower::Options { kv_capacity: honest.kv_capacity };
    honest.program_id = lower::lower(&valid, &graph, &target, options).unwrap().id();
    let text = honest.to_text();
    let check = || -> Result<(), search::Refusal> {
        let mut bundle = Bundle::read(&edit_text(&text))?;
        edit(&mut bundle);
        Bundle::read(&bundle.to_text())?.rebuild(&graph, &target).map(drop)
    };
    check().err().map(|refusal| refusal.to_string())
}

/// The error for a search that is resumed under other conditions.
fn elsewhere(edit: impl Fn(&mut Conditions)) -> Option<String> {
    let then = Conditions {
        card: "NVIDIA H200".into(),
        driver: "580.159.04".into(),
        cuda: "13.0".into(),
        nvrtc: "13.0".into(),
        amk: "0.1.0".into(),
        uuid: Some("1".into()),
        ..Conditions::default()
    };
    let mut now = then.clone();
    edit(&mut now);
    then.differs(&now)
}
