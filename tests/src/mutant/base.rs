//! The models that are mutated, their schedules, and the effect of correct schedules on their logits.

use crate::random_sample::RandomSample;
use ir::program::{Program, Verified};
use ir::schedule::validate;
use ir::{Activation, DType, Graph, ScheduleConfig, Target, Weights};
use model::{ExpertShape, Family, Model, Options, Rope, Scaling, Shape, Window};
use rayon::prelude::*;
use reference_vm::compare::distance;
use reference_vm::divergence::Examiner;
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::Machine;
use reference_vm::{Defect, Order};
use search::{Expected, draw_tokens};

use super::config;
use crate::rng::Rng;

/// A mutant is equivalent if its change of the logits is at most this many times that of the worst correct schedule.
pub const FACTOR: f64 = 8.0;

/// Suffix in the names of models that are examined as in a search of a large model.
pub const AS_LARGE: &str = " as large";

/// Positions of the cache: more than the gate runs.
const KV_CAPACITY: u32 = 1100;

/// Inputs that the gate does not use: a run from position zero, and a few positions at the end of the cache.
const WIDE_TOKENS: usize = 180;
const LAST_TOKENS: usize = 4;
const WIDE_SEED: u64 = 77;

/// Schedules to mutate: every kind of hand-off and fusion, and keys split over several workers.
const SCHEDULES: &[&str] = &[
    r#"{"tiling": {"attention": {"kv_block": 32, "kv_split": 4}}}"#,
    r#"{"sync": {"embed": "flag_in_data", "qkv": "flag_in_data", "attention": "flag_in_data", "merge": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "flag_in_data", "down": "flag_in_data"},
        "tiling": {"attention": {"kv_block": 32, "kv_split": 4}}}"#,
    r#"{"fusion_grouping": {"embed": "qkv", "merge": "o_proj"}, "sync": {"down": "flag_in_data", "attention": "flag_in_data"},
        "tiling": {"attention": {"kv_block": 64, "kv_split": 2}}}"#,
];

/// Options of the examination.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Number of correct schedules to run for each model.
    pub schedules: usize,
    /// Their random seed.
    pub seed: u64,
    /// Uses as few steps as a search of a large model can afford.
    pub as_large: bool,
}

/// A model, correct programs of it, the gate's expected values, and the results of correct schedules.
pub struct Base {
    /// Its name, for reports.
    pub name: String,
    model: Model,
    target: Target,
    schedules: Vec<ScheduleConfig>,
    programs: Vec<Verified<Program>>,
    expected: Expected,
    wide: Wide,
    honest: f64,
    /// Correct schedules that the gate refused, and the number of schedules run.
    pub false_alarms: (Vec<String>, usize),
    /// The largest fraction of the tolerance that a correct schedule used.
    pub closest: f64,
}

/// Inputs beyond the gate's with the graph's logits.
struct Wide {
    tokens: Vec<u32>,
    last_first: usize,
    last_before: Vec<(Vec<f32>, Vec<f32>)>,
    last_tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

impl Wide {
    fn new(graph: &Graph, weights: &dyn Weights) -> Self {
        let tokens = draw_tokens(WIDE_SEED, graph.vocab, WIDE_TOKENS);
        let last_tokens = draw_tokens(WIDE_SEED + 1, graph.vocab, LAST_TOKENS);
        let last_first = KV_CAPACITY.min(graph.max_positions) as usize - LAST_TOKENS;
        let mut rng = Rng::new(WIDE_SEED);
        let mut values = |scale: f32| -> Vec<f32> {
            let words = last_first * graph.kv_width() as usize;
            (0..words).map(|_| scale * (rng.below(2001) as f32 / 1000.0 - 1.0)).collect()
        };
        let last_before = graph.layers.iter().map(|_| (values(1.5), values(1.0))).collect();
        let mut wide = Self { tokens, last_first, last_before, last_tokens, logits: Vec::new() };
        wide.logits = wide.evaluate(graph, weights).unwrap_or_else(|error| panic!("{error}"));
        wide
    }

    fn evaluate(&self, graph: &Graph, weights: &dyn Weights) -> Result<Vec<Vec<f32>>, String> {
        let mut evaluator = Evaluator::new(graph, weights).map_err(|error| error.to_string())?;
        let mut rows =
            evaluator.run(&self.tokens, Logits::All).map_err(|error| error.to_string())?;
        evaluator.resume(self.last_first, &self.last_before).map_err(|error| error.to_string())?;
        rows.extend(
            evaluator.run(&self.last_tokens, Logits::All).map_err(|error| error.to_string())?,
        );
        Ok(rows)
    }

    /// The difference of the machine's logits; infinite if it does not finish, or chooses tokens that differ from its
    /// logits' best.
    fn run(&self, mut machine: Machine<'_>) -> f64 {
        let mut rows = Vec::new();
        let mut run = |machine: &mut Machine<'_>, tokens: &[u32]| {
            let Some(outputs) = machine.run(tokens, Order::Waves).ok().and_then(|r| r.finished())
            else {
                return false;
            };
            let pairs = outputs.tokens.iter().zip(&outputs.logits);
            let said = pairs.clone().all(|(&token, row)| token == reference_vm::argmax(row));
            rows.extend(outputs.logits);
            said
        };
        let finished = run(&mut machine, &self.tokens)
            && machine.resume(self.last_first, &self.last_before).is_ok()
            && run(&mut machine, &self.last_tokens);
        if finished { self.distance(&rows) } else { f64::INFINITY }
    }

    fn distance(&self, rows: &[Vec<f32>]) -> f64 {
        distance(self.logits.iter().map(Vec::as_slice), rows.iter().map(Vec::as_slice))
    }
}

impl Base {
    /// Computes the expected values of a model, and runs correct schedules of it.
    #[must_use]
    pub fn new(model: Model, plan: Plan) -> Self {
        let size = if plan.as_large { AS_LARGE } else { "" };
        let name = format!("{} {}{size}", model.graph.name, model.graph.dtype.name());
        let (graph, weights) = (&model.graph, &*model.weights);
        let mut target = Target::by_name("h200").unwrap_or_else(|error| panic!("{error}"));
        target.sms = 4;
        let bytes = if plan.as_large { 0 } else { u64::MAX };
        let expected = Expected::within(graph, weights, KV_CAPACITY, 1, None, bytes)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let wide = Wide::new(graph, weights);
        let schedules = SCHEDULES.iter().map(|text| config(text, graph, &target)).collect();
        let mut base = Self {
            name,
            model,
            target,
            schedules,
            programs: Vec::new(),
            expected,
            wide,
            honest: 0.0,
            false_alarms: (Vec::new(), 0),
            closest: 0.0,
        };
        let lower = |config: &ScheduleConfig| base.lower(base.graph(), *config);
        base.programs = base
            .schedules
            .iter()
            .map(lower)
            .collect::<Result<_, _>>()
            .unwrap_or_else(|e| panic!("{e}"));
        base.run_honest(plan);
        base
    }

    /// Runs random legal schedules: all must pass, and their effect on the logits is the scale for mutants.
    fn run_honest(&mut self, plan: Plan) {
        let sample = RandomSample {
            graph: &self.model.graph,
            target: &self.target,
            known: &self.schedules,
            seed: plan.seed,
        };
        let mut configs = self.schedules.clone();
        configs.extend(sample.draws().map(|(_, config)| config).take(plan.schedules));
        let runs: Vec<_> = configs.par_iter().map(|config| self.run_one(*config)).collect();
        for (config, (refusal, change, used)) in configs.iter().zip(runs) {
            if let Some(refusal) = refusal {
                self.false_alarms.0.push(format!("{}: {}: {refusal}", self.name, config.id()));
            }
            self.honest = self.honest.max(change);
            self.closest = self.closest.max(used);
        }
        self.false_alarms.1 = configs.len();
    }

    /// The gate's refusal of a schedule, its change of the logits, and the fraction of the tolerance used.
    fn run_one(&self, config: ScheduleConfig) -> (Option<String>, f64, f64) {
        let program = self.lower(self.graph(), config).unwrap_or_else(|e| panic!("{e}"));
        let new = || {
            Machine::new(&program, self.graph(), self.weights()).unwrap_or_else(|e| panic!("{e}"))
        };
        let (refusal, used) = match self.expected.examine(&mut new()) {
            Ok(agreement) => (None, agreement.summary().max_tolerance_used),
            Err(dropped) => (Some(dropped.to_string()), f64::INFINITY),
        };
        (refusal, self.wide.run(new()), used)
    }

    /// Lowers a schedule for the graph, or a changed one.
    pub(super) fn lower(
        &self,
        graph: &Graph,
        config: ScheduleConfig,
    ) -> Result<Verified<Program>, String> {
        let valid = validate(config, graph, &self.target).map_err(|v| v.to_string())?;
        let options = lower::Options { kv_capacity: KV_CAPACITY };
        lower::lower(&valid, graph, &self.target, options).map_err(|error| error.to_string())
    }

    /// The right graph.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// The model with its shape.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The right weights.
    #[must_use]
    pub fn weights(&self) -> &dyn Weights {
        &*self.model.weights
    }

    /// Number of schedules to mutate.
    #[must_use]
    pub fn schedules(&self) -> usize {
        self.schedules.len()
    }

    pub(super) fn config(&self, schedule: usize) -> ScheduleConfig {
        self.schedules[schedule]
    }

    /// The right program of a schedule.
    #[must_use]
    pub fn program(&self, schedule: usize) -> &Verified<Program> {
        &self.programs[schedule]
    }

    /// The gate's inputs and what it expects.
    #[must_use]
    pub fn expected(&self) -> &Expected {
        &self.expected
    }

    /// The largest change of the logits by a correct schedule, relative to the largest.
    #[must_use]
    pub fn honest(&self) -> f64 {
        self.honest
    }

    /// Whether a change of the logits is small enough to be rounding.
    #[must_use]
    pub fn is_equivalent(&self, change: f64) -> bool {
        change <= FACTOR * self.honest
    }

    /// A task of a correct program that is blamed by mistake, up to a position of the gate.
    #[must_use]
    pub fn blames(&self, until: Option<usize>) -> Option<String> {
        let examiner =
            Examiner::new(self.graph(), self.weights()).unwrap_or_else(|e| panic!("{e}"));
        self.programs.par_iter().find_map_any(|program| {
            let mut machine = Machine::new(program, self.graph(), self.weights()).ok()?;
            let found = self.expected.diverges(&examiner, &mut machine, until)?;
            Some(format!("{found:?}"))
        })
    }

    /// The bits of the logits at a few positions; the last one follows several blocks of keys.
    pub(super) fn bits(&self, program: &Verified<Program>) -> Vec<u32> {
        let Ok(mut machine) = Machine::new(program, self.graph(), self.weights()) else {
            return Vec::new();
        };
        let ran = machine.run(&self.wide.tokens[..2], Order::Waves).ok().and_then(|r| r.finished());
        let mut rows = ran.map_or_else(Vec::new, |outputs| outputs.logits);
        if machine.resume(self.wide.last_first, &self.wide.last_before).is_ok()
            && let Some(outputs) = machine
                .run(&self.wide.last_tokens[..1], Order::Waves)
                .ok()
                .and_then(|r| r.finished())
        {
            rows.extend(outputs.logits);
        }
        rows.into_iter().flatten().map(f32::to_bits).collect()
    }

    /// The change of the logits by a changed model, from the graph alone, without the gate.
    pub(super) fn change_of_model(&self, graph: &Graph, weights: &dyn Weights) -> Option<f64> {
        let rows = self.wide.evaluate(graph, weights);
        Some(rows.map_or(f64::INFINITY, |rows| self.wide.distance(&rows)))
    }

    /// The change of the logits by a changed program, or by a defect under the correct one.
    pub(super) fn change_of_program(
        &self,
        program: &Verified<Program>,
        defect: Option<(Defect, Option<u16>)>,
    ) -> Option<f64> {
        let Ok(machine) = Machine::new(program, self.graph(), self.weights()) else {
            return Some(f64::INFINITY);
        };
        Some(self.wide.run(match defect {
            Some((defect, layer)) => machine.with_defect(defect, layer),
            None => machine,
        }))
    }
}

fn shape(name: &str, dtype: DType) -> Shape {
    Shape {
        name: name.to_owned(),
        hidden: 64,
        layers: 2,
        ffn: 104,
        vocab: 136,
        dtype,
        ..Shape::default()
    }
}

/// Seeded models that cover all differences between the families, each in the given element type.
#[must_use]
pub fn families([llama, mistral, qwen2, qwen3]: [DType; 4]) -> Vec<Model> {
    let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 512 };
    let rope = Rope { theta: 10_000.0, scaling };
    let sliding = Window::Layers { window: 40, sliding: vec![true, false] };
    let after = Window::Layers { window: 40, sliding: vec![true, false] };
    let options = Options {
        activation: Activation::GeluTanh,
        embed_scale: 8.0,
        attn_scale: Some(0.3),
        score_cap: Some(2.0),
        logit_cap: Some(3.0),
        sliding_rope: Some(Rope::plain(500.0)),
        ..Options::default()
    };
    let shapes = [
        Shape { rope, mlp_bias: true, attention_bias: true, ..shape("llama", llama) },
        Shape { family: Family::Mistral, window: sliding, ..shape("mistral", mistral) },
        Shape { family: Family::Qwen2, heads: 6, kv_heads: 2, ..shape("qwen2", qwen2) },
        Shape { family: Family::Qwen3, tied: true, ..shape("qwen3", qwen3) },
        // These publish an epsilon of 1e-6. A hundredth of 1e-5 is below what the gate sees.
        Shape {
            family: Family::Gemma3,
            window: after,
            options,
            norm_eps: 1e-6,
            ..shape("gemma", llama)
        },
        Shape { family: Family::Olmo2, norm_eps: 1e-6, ..shape("olmo", mistral) },
        // Experts with a shared one; and with biases, a clamp and sinks.
        Shape {
            family: Family::Qwen2Moe,
            options: experts((6, 2, 40), Some(80)),
            ..shape("shared", llama)
        },
        Shape {
            family: Family::GptOss,
            attention_bias: true,
            options: experts((5, 3, 48), None),
            ..shape("clamped", mistral)
        },
    ];
    shapes.into_iter().zip(1..).map(|(shape, seed)| Model::random(shape, seed)).collect()
}

fn experts((count, top_k, ffn): (u32, u32, u32), shared: Option<u32>) -> Options {
    let (normalised, dense) = (shared.is_none(), Vec::new());
    let experts = ExpertShape { count, top_k, ffn, shared, normalised, dense };
    Options { experts: Some(experts), ..Options::default() }
}

/// The golden models of the corpus.
#[must_use]
pub fn golden() -> Vec<Model> {
    let folder = crate::root().join("corpus/golden");
    let mut folders: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join("config.json").exists())
        .collect();
    folders.sort();
    folders
        .iter()
        .map(|path| model::import(path).unwrap_or_else(|error| panic!("{error}")))
        .collect()
}
