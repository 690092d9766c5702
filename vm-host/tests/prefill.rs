//! Prompts in chunks against the same prompts token by token, on a real device: logits, keys, values, the tokens generated next, and times.
//!
//! Without a device the tests that need one print `skipped` and pass; with `AMK_REQUIRE_DEVICE=1` that is a failure. Presets with real shapes,
//! and folders such as those of `amk quantize`, run if `AMK_PREFILL_PRESETS` names them (separated by commas). `AMK_PREFILL_EVAL` sets the longest prompt for which the graph is evaluated
//! too, `AMK_DEADLINE_S` how long a worker of the resident kernel may wait. Every problem is collected, so that one run shows all.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::schedule::{neutral_config, validate};
use ir::{DType, Graph, KvDtype, Target, TensorId, Weights};
use model::Model;
use rayon::prelude::*;
use reference_vm::eval::Evaluator;
use vm_device::Variant;
use vm_host::{BootOptions, GemmShape, HostError, Idle, PrefillOptions, Resident};

mod device;
#[path = "device/heads.rs"]
mod heads;
#[path = "device/mixtures.rs"]
mod mixtures;
use device::device;
use heads::{compile, odd_heads};
use mixtures::MIXTURES;

const GOLDEN: [&str; 13] = [
    "golden/llama-tied-f32",
    "golden/llama3-rope-bf16",
    "golden/mistral-f16",
    "golden/qwen2-bias-bf16",
    "golden/qwen3-qknorm-bf16",
    "quantised/ct-fp8-dynamic-llama",
    "quantised/ct-fp8-static-qwen3",
    "quantised/ct-int8-llama",
    "quantised/ct-w4a16-asym-g128-qwen2",
    "quantised/ct-w4a16-g128-llama",
    "quantised/ct-w4a16-g32-qwen3",
    "quantised/gguf-q4_k_m-qwen3/model.gguf",
    "quantised/fp8-block-llama",
];
const FAMILIES: [&str; 8] = [
    "families/gemma2-bf16",
    "families/gemma3-bf16",
    "families/gemma3-256-bf16",
    "families/glm4-bf16",
    "families/granite-bf16",
    "families/olmo2-bf16",
    "families/olmo3-bf16",
    "families/smollm3-bf16",
];
/// Lengths of prompts: within a tile, across tiles and blocks, more than a chunk of 128.
const SHORT: [usize; 8] = [1, 2, 7, 48, 64, 65, 129, 200];
const LONG: [usize; 8] = [1, 2, 7, 64, 129, 500, 1000, 2048];
/// Tolerance of logits: against the evaluated graph, the gate's of a search; and against token by token, where both have errors.
const LOGITS_MAX: f64 = 5e-3;
/// The same with caches of codes: an element that f16 takes to the next code moves the logits of these small models.
const LOGITS_OF_CODES_MAX: f64 = 0.2;
/// Greatest difference of keys or values over the greatest of them. A rounding to f16 alone is 4.9e-4.
const CACHE_MAX: f64 = 5e-3;
/// Repetitions of a timed run.
const REPEATS: usize = 10;
const SHAPES: [GemmShape; 3] = [GemmShape::Wide, GemmShape::Middle, GemmShape::Small];
/// Tokens generated after a prompt.
const FOLLOW: u32 = 24;

fn golden(name: &str) -> Model {
    let here = PathBuf::from("corpus");
    let dir = if here.is_dir() {
        here
    } else {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus"))
    };
    model::import(&dir.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn number(name: &str) -> Option<usize> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}: {text:?}: {error}")))
}

/// Tokens without a pattern.
fn tokens(count: usize, vocab: u32) -> Vec<u32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as u32 % vocab
    };
    (0..count).map(|_| next()).collect()
}

/// Greatest difference over the greatest value; infinite for NaN.
fn worst(expected: &[f32], actual: &[f32]) -> f64 {
    assert_eq!(expected.len(), actual.len());
    let scale = expected.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
    let differences = expected
        .iter()
        .zip(actual)
        .map(|(e, a)| if a.is_finite() { f64::from((e - a).abs()) } else { f64::INFINITY });
    differences.fold(0.0, f64::max) / scale
}

/// Norm of the difference over the norm of the expected vector.
fn relative(expected: &[f32], actual: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let both = expected.iter().zip(actual);
    let difference = squares(&mut both.map(|(e, a)| f64::from(e - a)));
    let error = (difference / squares(&mut expected.iter().map(|&e| f64::from(e)))).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

fn top(row: &[f32]) -> (usize, f32) {
    let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i);
    let second = row.iter().enumerate().filter(|(i, _)| *i != best).map(|(_, v)| *v);
    (best, row[best] - second.fold(f32::NEG_INFINITY, f32::max))
}

/// A model on the device, with what a program of it needs.
struct Bench {
    model: Model,
    program: Verified<Program>,
    variant: Variant,
    tokens: Vec<u32>,
    lengths: Vec<usize>,
    problems: Vec<String>,
    /// Tolerance of keys and values.
    cache_max: f64,
}

/// Results of token by token.
struct Steps {
    logits: Vec<Vec<f32>>,
    caches: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Bench {
    fn new(model: Model, lengths: &[usize], sms: u32) -> Self {
        let target = Target { sms, ..Target::by_name("h200").expect("a known target") };
        let config = validate(neutral_config(&model.graph, &target), &model.graph, &target);
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        let most = lengths.iter().copied().max().unwrap_or(1);
        let options = lower::Options { kv_capacity: most as u32 + FOLLOW + 8 };
        let program = lower::lower(&config, &model.graph, &target, options);
        let program = program.unwrap_or_else(|error| panic!("{}: {error}", model.graph.name));
        let variant = vm_host::variant(&config.kernel, &model.graph);
        let tokens = tokens(most, model.graph.vocab);
        let (lengths, problems) = (lengths.to_vec(), Vec::new());
        Self { program, variant, tokens, lengths, problems, model, cache_max: CACHE_MAX }
    }

    fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// Tolerances of logits, and of keys and values. In chunks activations are f16, so some codes are others than in steps.
    fn most(&self) -> (f64, f64) {
        match self.model.graph.kv_dtype {
            KvDtype::F16 => (LOGITS_MAX, self.cache_max),
            KvDtype::E4m3 => (LOGITS_OF_CODES_MAX, self.cache_max + 0.125),
        }
    }

    fn boot(&self) -> Idle {
        let options = BootOptions { sessions: 2, logits_rows: 2, ..BootOptions::default() };
        Idle::boot(self.graph(), &*self.model.weights, &self.program, &self.variant, options)
            .unwrap_or_else(|error| panic!("{}: boot: {error}", self.graph().name))
    }

    fn launch(&self, idle: Idle) -> Resident {
        idle.launch(self.variant, &self.program)
            .unwrap_or_else(|refused| panic!("{}: launch: {}", self.graph().name, refused.1))
    }

    fn say(&mut self, wrong: bool, line: &str) {
        let name = &self.model.graph.name;
        eprintln!("{}{name:18} {line}", if wrong { "WRONG " } else { "" });
        if wrong {
            self.problems.push(format!("{name} {line}"));
        }
    }

    /// Runs the prompt token by token in session 0; returns the logits after each length.
    fn steps(&mut self, idle: Idle) -> (Idle, Steps) {
        let mut machine = self.launch(idle);
        let (mut logits, mut done) = (Vec::new(), 0);
        let began = Instant::now();
        for &length in &self.lengths {
            let (head, last) = self.tokens[done..length].split_at(length - done - 1);
            if !head.is_empty() {
                machine.decode(0, done as u32, head, 1, &[], false).expect("steps");
            }
            machine.decode(0, length as u32 - 1, last, 1, &[], true).expect("a step");
            logits.extend(machine.logits(1).expect("logits"));
            done = length;
        }
        let seconds = began.elapsed().as_secs_f64();
        let began = Instant::now();
        let mut idle = machine.stop().unwrap_or_else(|error| panic!("stop: {error}"));
        let stop_ms = began.elapsed().as_secs_f64() * 1e3;
        let layers = self.graph().layers.len() as u32;
        let caches = (0..layers).map(|layer| idle.cached(0, layer, done as u32).expect("cache"));
        let caches = caches.collect();
        self.say(
            false,
            &format!("{done} tokens by steps in {:.1} ms; stop {stop_ms:.2} ms", seconds * 1e3),
        );
        (idle, Steps { logits, caches })
    }

    /// The graph's logits after each length up to `most`.
    fn evaluated(&self, most: usize) -> Vec<Vec<f32>> {
        let lengths: Vec<usize> = self.lengths.iter().copied().filter(|&n| n <= most).collect();
        let Some(&end) = lengths.last() else { return Vec::new() };
        let mut evaluator =
            Evaluator::new(self.graph(), &*self.model.weights).expect("an evaluator");
        let positions: Vec<usize> = lengths.iter().map(|n| n - 1).collect();
        evaluator.run_at(&self.tokens[..end], &positions).expect("it is evaluated")
    }

    /// Errors of one way to run a prompt of each length, in session 1.
    fn compare(
        &mut self,
        idle: &mut Idle,
        steps: &Steps,
        graph: &[Vec<f32>],
        (name, options, pieces): (&str, &PrefillOptions, usize),
    ) {
        for (index, length) in self.lengths.clone().into_iter().enumerate() {
            let piece = length.div_ceil(pieces);
            for (n, part) in self.tokens[..length].chunks(piece).enumerate() {
                let last = (n + 1) * piece >= length;
                let done = idle.prefill(1, (n * piece) as u32, part, last, options);
                let done = done.unwrap_or_else(|error| panic!("{name}, {length}: {error}"));
                assert!(!done.clamped, "{name}, {length}");
            }
            let logits = idle.last_logits().expect("logits");
            let (mut keys, mut values) = ((0.0_f64, 0), (0.0_f64, 0));
            let width = self.graph().kv_width() as usize;
            for (layer, (k, v)) in steps.caches.iter().enumerate() {
                let (a, b) = idle.cached(1, layer as u32, length as u32).expect("cache");
                let (k, v) = (worst(&k[..length * width], &a), worst(&v[..length * width], &b));
                keys = if k > keys.0 { (k, layer) } else { keys };
                values = if v > values.0 { (v, layer) } else { values };
            }
            let by_steps = relative(&steps.logits[index], &logits);
            let by_graph = graph.get(index).map(|row| relative(row, &logits));
            let of_steps = graph.get(index).map(|row| relative(row, &steps.logits[index]));
            let (best, margin) = top(&steps.logits[index]);
            let greatest = steps.logits[index].iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let (logits_max, cache_max) = self.most();
            let decided = f64::from(margin / greatest) > logits_max;
            let same = top(&logits).0 == best;
            let wrong = by_steps > logits_max
                || by_graph.is_some_and(|error| error > logits_max)
                || keys.0 > cache_max
                || values.0 > cache_max
                || (decided && !same);
            let shown = |error: Option<f64>| error.map_or("-".into(), |e| format!("{e:.1e}"));
            self.say(wrong, &format!(
                "{name:24} {length:5} tokens: logits to steps {by_steps:.1e}, to graph {} (steps {}); keys {:.1e} (layer {}), values {:.1e} ({}); top-1 {}",
                shown(by_graph), shown(of_steps), keys.0, keys.1, values.0, values.1,
                if same { "same" } else if decided { "DIFFERS" } else { "differs, not decided" },
            ));
        }
    }

    /// Keys and values of a chunk that runs at once, and of one that runs layer by layer: the same bits.
    fn by_layers(&mut self, idle: &mut Idle, length: usize) {
        let layers = self.graph().layers.len() as u32;
        let caches = |idle: &mut Idle| -> Vec<(Vec<f32>, Vec<f32>)> {
            (0..layers).map(|l| idle.cached(1, l, length as u32).expect("cache")).collect()
        };
        let tokens = self.tokens[..length].to_vec();
        let backwards: Vec<u32> = tokens.iter().rev().copied().collect();
        idle.prefill(1, 0, &tokens, false, &ONE_CHUNK).expect("prefill");
        let whole = caches(idle);
        idle.prefill(1, 0, &backwards, false, &ONE_CHUNK).expect("prefill");
        let other = caches(idle) != whole;
        let mut calls = 0;
        let done = loop {
            let ran = idle.prefill_within(1, 0, &tokens, Duration::ZERO).expect("layers");
            calls += 1;
            let begun = idle.chunk_begun() == Some(1);
            if ran.done || ran.clamped || !begun || calls > layers {
                break ran.done && !ran.clamped && !begun;
            }
        };
        let same = other && done && calls == layers && caches(idle) == whole;
        self.say(
            !same,
            &format!("{length} tokens layer by layer: {calls} calls, same bits: {same}"),
        );
    }

    /// Times of one way to run a prompt.
    fn time(&mut self, idle: &mut Idle, name: &str, length: usize, options: &PrefillOptions) {
        let prompt = self.tokens[..length].to_vec();
        let mut us = Vec::new();
        let mut flop = 0.0;
        for repeat in 0..=REPEATS {
            let done = idle.prefill(1, 0, &prompt, true, options).expect("prefill");
            flop = done.flop;
            if repeat > 0 {
                us.push(done.device_us);
            }
        }
        us.sort_by(f64::total_cmp);
        let median = f64::midpoint(us[REPEATS / 2 - 1], us[REPEATS / 2]);
        self.say(false, &format!(
            "{name:24} {length:5} tokens: {:.3} ms ({:.3} to {:.3}), {:.0} tokens/s, {:.1} TFLOP/s",
            median / 1e3, us[0] / 1e3, us[REPEATS - 1] / 1e3, length as f64 / median * 1e6, flop / median / 1e6
        ));
    }

    /// Breakdown of a prompt's time by kernel.
    fn profile(&mut self, idle: &mut Idle, name: &str, length: usize, options: PrefillOptions) {
        let prompt = self.tokens[..length].to_vec();
        let options = PrefillOptions { profile: true, ..options };
        let mut done = idle.prefill(1, 0, &prompt, true, &options).expect("prefill");
        for _ in 0..2 {
            done = idle.prefill(1, 0, &prompt, true, &options).expect("prefill");
        }
        for time in &done.kernels {
            self.say(false, &format!(
                "{name:24} {length:5} tokens: {:10} {:4} launches {:9.1} us, {:6.1} us each, {:6.1} TFLOP/s",
                time.kernel, time.launches, time.us, time.us / f64::from(time.launches), time.flop / time.us / 1e6
            ));
        }
    }

    /// The tokens that follow a prompt in a session, each the greatest of its logits, and the smallest margin of a choice.
    fn greedy(machine: &mut Resident, session: u32, last: u32, position: u32) -> Vec<(u32, f64)> {
        let (mut token, mut all) = (last, Vec::new());
        for position in (position..).take(FOLLOW as usize) {
            machine.decode(session, position, &[token], 1, &[], true).expect("a step");
            let row = machine.logits(1).expect("logits").remove(0);
            let greatest = row.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            let (best, margin) = top(&row);
            token = best as u32;
            all.push((token, f64::from(margin / greatest)));
        }
        all
    }

    /// Tokens generated after a prompt that was run in chunks, and after the same prompt token by token, which session 0 still holds.
    fn follow(&mut self, mut idle: Idle, length: usize) -> Idle {
        let head = self.tokens[..length - 1].to_vec();
        let (last, position) = (self.tokens[length - 1], length as u32 - 1);
        idle.prefill(1, 0, &head, false, &PrefillOptions::default()).expect("prefill");
        let began = Instant::now();
        let mut machine = self.launch(idle);
        let launch_ms = began.elapsed().as_secs_f64() * 1e3;
        let [steps, chunks] = [0, 1].map(|s| Self::greedy(&mut machine, s, last, position));
        let same = steps.iter().zip(&chunks).take_while(|(a, b)| a.0 == b.0).count();
        let call = steps.get(same).map(|(_, margin)| *margin);
        let wrong = call.is_some_and(|call| call > self.most().0);
        self.say(
            wrong,
            &format!(
                "{same} of {FOLLOW} tokens behind {length} the same{}; launch {launch_ms:.2} ms",
                call.map_or(String::new(), |call| format!(
                    ", then a call of {call:.1e} of the greatest logit"
                ))
            ),
        );
        let began = Instant::now();
        let idle = machine.stop().unwrap_or_else(|error| panic!("stop: {error}"));
        let stop_ms = began.elapsed().as_secs_f64() * 1e3;
        let began = Instant::now();
        let machine = self.launch(idle);
        let again_ms = began.elapsed().as_secs_f64() * 1e3;
        self.say(false, &format!("stop {stop_ms:.2} ms, launched again in {again_ms:.2} ms"));
        machine.stop().unwrap_or_else(|error| panic!("stop: {error}"))
    }
}

fn check(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

const ONE_CHUNK: PrefillOptions =
    PrefillOptions { shape: GemmShape::Auto, chunk: 2048, experts: u32::MAX, profile: false };

#[test]
fn chunks_of_golden_models_are_as_good_as_steps() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    for name in GOLDEN {
        problems.append(&mut chunks_and_steps(golden(name), info.sms));
    }
    check(&problems);
}

#[test]
fn chunks_with_caches_of_codes_are_as_good_as_steps() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    for name in GOLDEN {
        let mut model = golden(name);
        model.graph.kv_dtype = KvDtype::E4m3;
        problems.append(&mut chunks_and_steps(model, info.sms));
    }
    check(&problems);
}

/// Mixtures, judged on the experts that their chunks chose.
#[test]
fn chunks_of_mixtures_are_as_good_as_the_graph_on_their_routes() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    for name in MIXTURES {
        let mut bench = Bench::new(golden(name), &SHORT, info.sms);
        let mut idle = bench.boot();
        bench.mixture(&mut idle);
        problems.append(&mut bench.problems);
    }
    check(&problems);
}

/// Dense families with norms of results or of all heads, caps, other activations, wide heads.
#[test]
fn chunks_of_dense_families_are_as_good_as_steps() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    for name in FAMILIES {
        let mut bench = Bench::new(golden(name), &SHORT, info.sms);
        // The roundings of a chunk grow from layer to layer; in a small model without rotary embeddings to 6e-3 of the greatest key (smollm3).
        let allowed = bench.allowed(None);
        bench.cache_max = CACHE_MAX.max(allowed.keys).max(allowed.values);
        problems.append(&mut bench.chunks_and_steps());
    }
    check(&problems);
}

/// Heads whose width is no power of two.
#[test]
fn chunks_of_heads_of_multiples_of_16_are_as_good_as_steps() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    let models = odd_heads();
    let kernel = ir::ScheduleConfig::default().kernel;
    let variants = models.iter().map(|(_, model)| vm_host::variant(&kernel, &model.graph));
    compile(&variants.collect::<Vec<_>>());
    models.par_iter().for_each(|(_, model)| {
        let _ = vm_host::compile_prompts(&model.graph, 1, &info)();
    });
    for (head_dim, model) in models {
        let refused = vm_host::prefill_refused(&model.graph, 1);
        assert_eq!(refused, None, "heads of {head_dim}");
        problems.append(&mut chunks_and_steps(model, info.sms));
    }
    check(&problems);
}

/// What is wrong with a model's prompts in chunks, against the same prompts in steps.
fn chunks_and_steps(model: Model, sms: u32) -> Vec<String> {
    Bench::new(model, &SHORT, sms).chunks_and_steps()
}

impl Bench {
    fn chunks_and_steps(mut self) -> Vec<String> {
        let mut idle = self.boot();
        if let Some(why) = vm_host::prefill_refused(self.graph(), 1) {
            let name = &self.graph().name;
            let refused = idle.prefill(1, 0, &[1, 2], true, &ONE_CHUNK);
            assert!(matches!(refused, Err(HostError::Request(said)) if said == why), "{name}");
            return self.problems;
        }
        let (booted, steps) = self.steps(idle);
        idle = booted;
        let graph = self.evaluated(usize::MAX);
        let small = PrefillOptions { chunk: 128, ..ONE_CHUNK };
        for shape in SHAPES {
            let options = PrefillOptions { shape, ..ONE_CHUNK };
            self.compare(&mut idle, &steps, &graph, (&format!("{shape:?}"), &options, 1));
        }
        self.compare(&mut idle, &steps, &graph, ("chunks of 128", &small, 1));
        self.compare(&mut idle, &steps, &graph, ("in three pieces", &ONE_CHUNK, 3));
        self.by_layers(&mut idle, 129);
        self.follow(idle, 129);
        self.problems
    }
}

/// The chunk kernels alone, with no kernel resident: this test runs under compute-sanitizer.
#[test]
fn chunks_alone() {
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    let with_codes = ["quantised/ct-w4a16-asym-g128-qwen2", "quantised/fp8-block-llama"];
    let plain = ["golden/llama3-rope-bf16", "golden/qwen3-qknorm-bf16", "golden/mistral-f16"];
    for name in ["families/qwen2-moe-bf16", "quantised/mxfp4-gpt-oss"] {
        let mut bench = Bench::new(golden(name), &[150], info.sms);
        let mut idle = bench.boot();
        bench.mixture(&mut idle);
        problems.append(&mut bench.problems);
    }
    for name in plain.into_iter().chain(with_codes) {
        let bench = Bench::new(golden(name), &[150], info.sms);
        let mut idle = bench.boot();
        let graph = bench.evaluated(usize::MAX);
        let ways = [
            (GemmShape::Wide, 2048),
            (GemmShape::Auto, 128),
            (GemmShape::Middle, 2048),
            (GemmShape::Small, 256),
        ];
        for (shape, chunk) in ways {
            let options = PrefillOptions { shape, chunk, ..ONE_CHUNK };
            let done = idle.prefill(1, 0, &bench.tokens, true, &options).expect("prefill");
            let error = relative(&graph[0], &idle.last_logits().expect("logits"));
            eprintln!("{name:18} {shape:?} {chunk}: logits to graph {error:.1e}");
            if error > LOGITS_MAX || done.clamped {
                problems.push(format!("{name} {options:?}: {error:.2e}, {done:?}"));
            }
        }
    }
    check(&problems);
}

/// A model's weights, some of them scaled.
struct Scaled {
    weights: Box<dyn Weights + Send + Sync>,
    tensor: TensorId,
    bytes: Vec<u8>,
}

/// Multiplies a tensor of bf16 or f32 by 65536.
fn scaled(model: Model, tensor: TensorId) -> Model {
    let dtype = model.graph.tensors[tensor.index()].dtype;
    assert!(matches!(dtype, DType::F32 | DType::Bf16), "{dtype:?}: 8 bits of exponent");
    let width = if dtype == DType::F32 { 4 } else { 2 };
    let mut bytes = model.weights.bytes(tensor).to_vec();
    for element in bytes.chunks_exact_mut(width) {
        let mut word = [0; 4];
        word[4 - width..].copy_from_slice(element);
        let word = (f32::from_le_bytes(word) * 65536.0).to_le_bytes();
        element.copy_from_slice(&word[4 - width..]);
    }
    let weights = Box::new(Scaled { weights: model.weights, tensor, bytes });
    Model { weights, ..model }
}

impl Weights for Scaled {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        if tensor == self.tensor { &self.bytes } else { self.weights.bytes(tensor) }
    }
}

/// The hidden layer is f16: a prompt that leaves its range says so, at every shape, and the next one of another model does not.
#[test]
fn a_hidden_layer_out_of_range_is_reported() {
    let Some(info) = device() else { return };
    let model = golden("golden/llama3-rope-bf16");
    let norm = model.graph.layers[0].mlp.norm.expect("a norm");
    let bench = Bench::new(scaled(model, norm), &[150], info.sms);
    let mut idle = bench.boot();
    for shape in SHAPES {
        let options = PrefillOptions { shape, ..ONE_CHUNK };
        let done = idle.prefill(1, 0, &bench.tokens, true, &options).expect("prefill");
        assert!(done.clamped, "{shape:?}");
    }
}

/// The prompts of models of real shapes: errors and times of every form of the kernels.
#[test]
fn chunks_of_presets() {
    let Ok(names) = std::env::var("AMK_PREFILL_PRESETS") else {
        eprintln!("skipped: AMK_PREFILL_PRESETS names no preset");
        return;
    };
    let Some(info) = device() else { return };
    let mut problems = Vec::new();
    for name in names.split(',') {
        let began = Instant::now();
        let folder = || model::import(Path::new(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let model = model::preset(name).unwrap_or_else(folder);
        let mut bench = Bench::new(model, &LONG, info.sms);
        let idle = bench.boot();
        bench.say(false, &format!("booted after {:.1} s", began.elapsed().as_secs_f64()));
        let (mut idle, steps) = bench.steps(idle);
        for length in [2048, 1000, 500, 129, 64, 16] {
            bench.time(&mut idle, "Auto", length, &ONE_CHUNK);
            for shape in SHAPES {
                let options = PrefillOptions { shape, ..ONE_CHUNK };
                bench.time(&mut idle, &format!("{shape:?}"), length, &options);
                bench.profile(&mut idle, &format!("{shape:?}"), length, options);
            }
        }
        let small = PrefillOptions { chunk: 512, ..ONE_CHUNK };
        bench.time(&mut idle, "chunks of 512", 2048, &small);
        if bench.graph().has_experts() {
            // Chunks may choose other experts than steps, and the graph takes too long to evaluate: the golden folders show whether they are right.
            bench.say(false, &format!("done after {:.1} s", began.elapsed().as_secs_f64()));
            continue;
        }
        let graph = bench.evaluated(number("AMK_PREFILL_EVAL").unwrap_or(129));
        bench.say(false, &format!("evaluated after {:.1} s", began.elapsed().as_secs_f64()));
        for shape in SHAPES {
            let options = PrefillOptions { shape, ..ONE_CHUNK };
            bench.compare(&mut idle, &steps, &graph, (&format!("{shape:?}"), &options, 1));
        }
        bench.compare(&mut idle, &steps, &graph, ("chunks of 512", &small, 1));
        let idle = bench.follow(idle, 500);
        drop(bench.follow(idle, 64));
        bench.say(false, &format!("done after {:.1} s", began.elapsed().as_secs_f64()));
        problems.append(&mut bench.problems);
    }
    check(&problems);
}
