//! One step on several devices against one device, on a card: tokens and logits, bit for bit. The devices are two parts of the first GPU, and
//! with `AMK_TEST_GPUS=2` that many GPUs.
//!
//! Without a device every test here prints `skipped` and passes; with `AMK_REQUIRE_DEVICE=1` that is a failure. `AMK_TEST_MODELS` (folders of
//! the corpus, separated by commas) selects models. Run from the repository root, or with cargo.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::sampling::Sampling;
use ir::schedule::{default_config, read_config_over, validate};
use ir::{ScheduleConfig, Target, Valid};
use model::{ExpertShape, Family, Model, Options, Shape};
use vm_device::Variant;
use vm_host::{BootOptions, Card, Idle, PrefillOptions};

#[path = "devices/batches.rs"]
mod batches;
mod device;
use device::device;

/// Folders of the corpus: every element type, normed heads, biases, caps, norms after the products, codes of every kind, experts.
const MODELS: [&str; 18] = [
    "golden/qwen3-qknorm-bf16",
    "golden/llama-tied-f32",
    "golden/mistral-f16",
    "golden/qwen2-bias-bf16",
    "golden/llama3-rope-bf16",
    "families/gemma2-bf16",
    "families/gemma3-256-bf16",
    "families/olmo2-bf16",
    "families/phi3-bf16",
    "quantised/ct-fp8-dynamic-llama",
    "quantised/ct-int8-llama",
    "quantised/ct-w4a16-asym-g128-qwen2",
    "quantised/fp8-block-llama",
    "families/qwen3-moe-bf16",
    "families/qwen2-moe-bf16",
    "families/gpt-oss-bf16",
    "quantised/fp8-block-qwen3-moe",
    "quantised/mxfp4-gpt-oss",
];

/// Schedules beside the default one, with edges by counter where they are within a device.
const SCHEDULES: [&str; 4] = [
    "{}",
    r#"{"tiling": {"attention": {"kv_split": 2, "kv_block": 32}}}"#,
    r#"{"sync": {"qkv": "counter"}, "sm_assignment": "around_attention"}"#,
    r#"{"fusion_grouping": {"embed": "qkv", "merge": "o_proj"}, "tiling": {"attention": {"kv_split": 4, "kv_block": 32}}}"#,
];

const DEADLINE: Duration = Duration::from_millis(500);
const POSITIONS: usize = 40;
const SESSIONS: u32 = 5;
/// Sequences of kernels for batches.
const SEQS: u32 = 8;

fn corpus() -> PathBuf {
    let here = PathBuf::from("corpus");
    if here.is_dir() {
        return here;
    }
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus"))
}

fn models() -> Vec<String> {
    named(&MODELS)
}

/// The models that `AMK_TEST_MODELS` names, or these.
fn named(usual: &[&str]) -> Vec<String> {
    match std::env::var("AMK_TEST_MODELS") {
        Ok(names) => names.split(',').map(str::to_owned).collect(),
        Err(_) => usual.iter().map(|&name| name.to_owned()).collect(),
    }
}

/// The first card, whole and in two parts; and the GPUs that are asked for.
fn targets() -> Option<Vec<Target>> {
    let info = device()?;
    let one = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let mut targets = vec![one.clone(), one.clone().divided(2)];
    if let Ok(gpus) = std::env::var("AMK_TEST_GPUS") {
        targets.push(one.times(gpus.parse().expect("a number of GPUs")));
    }
    Some(targets)
}

fn lowered(
    text: &str,
    model: &Model,
    target: &Target,
) -> Option<(Valid<ScheduleConfig>, Verified<Program>)> {
    let graph = &model.graph;
    // One schedule, and so one numeric id, for all targets.
    let base = default_config(graph, &Target::by_name("h200").expect("a known target"));
    let config = read_config_over(base, text, graph, target).ok()?;
    validate(*config, graph, target).ok()?;
    let program = lower::lower(&config, graph, target, lower::Options { kv_capacity: 128 });
    Some((config, program.unwrap_or_else(|error| panic!("{text}: {error}"))))
}

/// A machine that is booted for a target, and what it runs.
type Booted = (Idle, Variant, Verified<Program>);

fn booted(text: &str, model: &Model, target: &Target) -> Option<Booted> {
    booted_for(text, model, target, 1)
}

/// The same, in a kernel for this number of sequences.
fn booted_for(text: &str, model: &Model, target: &Target, seqs: u32) -> Option<Booted> {
    let (config, program) = lowered(text, model, target)?;
    let variant = vm_host::variant(&config.kernel, &model.graph);
    let variant = Variant { devices: target.devices, seqs, ..variant };
    let cards = (0..target.cards()).map(Card::new).collect();
    let of = BootOptions { cards, sessions: SESSIONS.max(seqs), ..BootOptions::default() };
    let options = BootOptions { logits_rows: 80, deadline: DEADLINE, ..of };
    let idle = Idle::boot(&model.graph, &*model.weights, &program, &variant, options);
    Some((idle.unwrap_or_else(|error| panic!("{}: boot: {error}", target.name)), variant, program))
}

/// The tokens after a prompt, and the bits of the logits at every position.
fn run(text: &str, model: &Model, target: &Target) -> Option<(Vec<u32>, Vec<u32>, f64)> {
    let (idle, variant, program) = booted(text, model, target)?;
    let mut machine = idle
        .launch(variant, &program)
        .unwrap_or_else(|refused| panic!("{}: launch: {}", target.name, refused.1));
    let vocab = model.graph.vocab;
    let prompt: Vec<u32> = (0..POSITIONS as u32).map(|i| (i * 1021 + 7) % vocab).collect();
    let mut found = None;
    for _ in 0..2 {
        machine.poison_logits(2 * POSITIONS as u32 - 1).expect("poison");
        let done = machine.decode(0, 0, &prompt, POSITIONS as u32, &[], true);
        let done = done.unwrap_or_else(|error| panic!("{} {text}: {error}", target.name));
        let rows = machine.logits(done.steps).expect("logits").concat();
        assert!(rows.iter().all(|value| value.is_finite()), "{} {text}", target.name);
        let bits = rows.iter().map(|value| value.to_bits()).collect();
        found = Some((done.tokens, bits, done.device_us / f64::from(done.steps)));
    }
    machine.stop().expect("it stops");
    found
}

/// Needs no card: what is refused below is a schedule, never a model.
#[test]
fn every_model_runs_on_several_devices_in_its_default_schedule() {
    for name in MODELS {
        let model = model::import(&corpus().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        for target in ["h200/2", "h200x2"] {
            let target = Target::by_name(target).expect("a known target");
            assert!(lowered("{}", &model, &target).is_some(), "{name} on {}", target.name);
        }
    }
}

#[test]
fn tokens_and_logits_are_those_of_one_device() {
    let Some(targets) = targets() else { return };
    let mut wrong = Vec::new();
    for name in models() {
        let model = model::import(&corpus().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut compared = 0;
        for text in SCHEDULES {
            let ran: Vec<_> = targets.iter().map(|target| run(text, &model, target)).collect();
            let Some((tokens, logits, us)) = &ran[0] else { continue };
            for (target, other) in targets.iter().zip(&ran).skip(1) {
                let Some((others, bits, other_us)) = other else { continue };
                compared += 1;
                let differ = logits.iter().zip(bits).filter(|(a, b)| a != b).count();
                let on = &target.name;
                eprintln!(
                    "{name:32} {on:8} {us:6.1} us, {other_us:6.1} us, {differ} of {} logits differ: {text}",
                    logits.len()
                );
                if differ > 0 || tokens != others {
                    wrong.push(format!("{name} on {on}: {differ} logits: {text}"));
                }
            }
        }
        assert!(compared > 0, "{name}: every schedule is refused");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Settings with one, two and several requests to the helpers, and with none.
fn samplings() -> [Sampling; 4] {
    let at = Sampling { temperature: 0.9, seed: 11, ..Sampling::default() };
    let bias = (0..9).map(|token| (token * 5, -2.0)).collect();
    [
        at.clone(),
        Sampling { top_k: 20, top_p: 0.9, ..at.clone() },
        Sampling { top_p: 0.7, min_p: 0.01, repetition_penalty: 1.3, bias, ..at.clone() },
        Sampling { temperature: 0.0, repetition_penalty: 1.3, ..at },
    ]
}

/// The tokens of sessions with all kinds of settings, one greedy, each in commands that alternate with those of the others.
fn sampled(model: &Model, target: &Target) -> Option<Vec<Vec<u32>>> {
    const EACH: [u32; 3] = [1, 15, 24];
    let (idle, variant, program) = booted("{}", model, target)?;
    let launched = idle.launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|refused| panic!("{}: {}", target.name, refused.1));
    let vocab = model.graph.vocab;
    let mut feeds: Vec<(u32, Vec<u32>)> = (0..SESSIONS)
        .map(|session| (0, (0..20).map(|i| (i * 1021 + 7 * session) % vocab).collect()))
        .collect();
    for (session, sampling) in (0..).zip(samplings()) {
        machine.set_sampling(session, &sampling).expect("settings");
    }
    let mut said = vec![Vec::new(); feeds.len()];
    for generate in EACH {
        for (session, (position, feed)) in (0..).zip(&mut feeds) {
            let (tokens, sampled) = (&feed[..], session < SESSIONS - 1);
            let of = vm_host::Request { session, position: *position, ..Default::default() };
            let request = vm_host::Request { tokens, generate, sampled, ..of };
            let done = machine.run(&request, &mut || false);
            let done = done.unwrap_or_else(|error| panic!("{} {session}: {error}", target.name));
            assert_eq!(done.tokens.len(), generate as usize, "{} {session}", target.name);
            *position += done.steps;
            *feed = done.tokens[generate as usize - 1..].to_vec();
            said[session as usize].extend(done.tokens);
        }
    }
    machine.stop().expect("it stops");
    Some(said)
}

#[test]
fn sessions_sample_the_tokens_of_one_device() {
    let Some(targets) = targets() else { return };
    for name in models() {
        let model = model::import(&corpus().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let ran: Vec<_> = targets.iter().map(|target| sampled(&model, target)).collect();
        let one = ran[0].as_ref().expect("the default schedule is legal");
        for (target, other) in targets.iter().zip(&ran).skip(1) {
            let other = other.as_ref().expect("the default schedule is legal");
            let wrong = one.iter().zip(other).filter(|(one, other)| one != other).count();
            eprintln!("{name:32} {:8} {wrong} of {SESSIONS} sessions differ", target.name);
            assert_eq!(one, other, "{name} on {}", target.name);
        }
    }
}

/// A prompt in two pieces of chunks, and the tokens and logits of the steps after it.
fn chunked(model: &Model, target: &Target) -> (Vec<u32>, Vec<f32>) {
    const PROMPT: usize = 100;
    const STEPS: u32 = 16;
    let vocab = model.graph.vocab;
    let prompt: Vec<u32> = (0..=PROMPT as u32).map(|i| (i * 1021 + 7) % vocab).collect();
    let (mut idle, variant, program) = booted("{}", model, target).expect("it is legal");
    for (at, piece) in [(0, &prompt[..60]), (60, &prompt[60..PROMPT])] {
        let done = idle.prefill(0, at, piece, false, &PrefillOptions::default());
        let done = done.unwrap_or_else(|error| panic!("{}: {error}", target.name));
        assert!(!done.clamped, "{}", target.name);
        eprintln!("{} {}: {:.0} us", model.graph.name, target.name, done.device_us);
    }
    let launched = idle.launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|refused| panic!("{}: {}", target.name, refused.1));
    let done = machine.decode(0, PROMPT as u32, &prompt[PROMPT..], STEPS, &[], true);
    let done = done.unwrap_or_else(|error| panic!("{}: {error}", target.name));
    let rows = machine.logits(done.steps).expect("logits").concat();
    machine.stop().expect("it stops");
    (done.tokens, rows)
}

/// Experts, and one that every token has, whose hidden layers have whole blocks of 64 columns on two devices and on four.
fn mixture() -> Model {
    let experts = ExpertShape {
        count: 6,
        top_k: 2,
        ffn: 256,
        shared: Some(512),
        normalised: false,
        dense: Vec::new(),
    };
    let shape = Shape {
        name: "six experts and a shared one".into(),
        family: Family::Qwen2Moe,
        hidden: 256,
        heads: 4,
        kv_heads: 4,
        head_dim: 64,
        ffn: 256,
        vocab: 512,
        layers: 2,
        max_positions: 2048,
        dtype: ir::DType::Bf16,
        options: Options { experts: Some(experts), ..Options::default() },
        ..Shape::default()
    };
    Model::random(shape, 7)
}

/// Models whose prompts two devices run in chunks.
fn in_chunks() -> Vec<Model> {
    let preset = |name| model::preset(name).expect("a preset");
    let folder = corpus().join("quantised/fp8-block-qwen3-moe");
    let codes = model::import(&folder).expect("a folder");
    vec![preset("smollm2-135m"), preset("qwen3-0.6b"), codes, mixture()]
}

#[test]
fn models_for_chunks_on_two_devices_are_not_refused() {
    let target = Target::by_name("h200").expect("a known target").divided(2);
    for model in in_chunks() {
        assert_eq!(vm_host::prefill_refused(&model.graph, 2), None);
        assert!(lowered("{}", &model, &target).is_some(), "{}", model.graph.name);
    }
}

/// Products of fewer rows are added up in the same order, so keys, values and what follows are those of one device.
#[test]
fn prompts_in_chunks_go_on_as_on_one_device() {
    let Some(targets) = targets() else { return };
    for model in in_chunks() {
        let name = &model.graph.name;
        let (tokens, logits) = chunked(&model, &targets[0]);
        for target in &targets[1..] {
            if let Some(why) = vm_host::prefill_refused(&model.graph, target.devices) {
                assert!(target.devices > 2, "{}: {why}", target.name);
                continue;
            }
            let (others, rows) = chunked(&model, target);
            let most = logits.iter().zip(&rows).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            eprintln!("{name} on {}: logits differ by {most:e} at most", target.name);
            assert_eq!(others, tokens, "{name} on {}", target.name);
            assert_eq!(most, 0.0, "{name} on {}", target.name);
        }
    }
}

/// A stop token, a bad request and a preemption end a command on all devices together: the next one works.
#[test]
fn commands_end_on_all_devices_together() {
    let Some(targets) = targets() else { return };
    let model = model::import(&corpus().join(MODELS[0])).expect("a golden model");
    for target in &targets[1..] {
        let (idle, variant, program) = booted("{}", &model, target).expect("it is legal");
        let launched = idle.launch(variant, &program);
        let mut machine = launched.unwrap_or_else(|refused| panic!("launch: {}", refused.1));
        let all = machine.decode(0, 0, &[7], 48, &[], false).expect("it decodes").tokens;
        let cut = machine.decode(0, 0, &[7], 48, &all[5..6], false).expect("it stops at a token");
        let first = all.iter().position(|token| *token == all[5]).expect("it is there");
        assert_eq!((cut.ending, &cut.tokens[..]), (abi::Ending::Stop, &all[..=first]));
        assert!(machine.decode(0, 0, &[u32::MAX], 1, &[], false).is_err());
        let request = vm_host::Request { tokens: &[7], generate: 48, ..Default::default() };
        let yields = machine.run(&request, &mut || true).expect("it yields");
        assert_eq!(yields.tokens[..], all[..yields.tokens.len()]);
        for sampling in samplings() {
            machine.set_sampling(0, &sampling).expect("settings");
            let request = vm_host::Request { sampled: true, ..request };
            let whole = machine.run(&request, &mut || false).expect("it samples").tokens;
            let yields = machine.run(&request, &mut || true).expect("it yields").tokens;
            assert_eq!(yields[..], whole[..yields.len()], "{sampling:?}");
            let stop = &whole[5..6];
            let cut = machine.run(&vm_host::Request { stop, ..request }, &mut || false);
            let first = whole.iter().position(|token| *token == whole[5]).expect("it is there");
            assert_eq!(cut.expect("it stops").tokens[..], whole[..=first], "{sampling:?}");
        }
        for _ in 0..8 {
            let loaded = machine.load(&program).expect("a place");
            machine.switch(loaded).expect("all devices switch");
            let again = machine.decode(0, 0, &[7], 48, &[], false).expect("it decodes again");
            assert_eq!(again.tokens, all, "{}", target.name);
        }
        machine.stop().expect("it stops");
    }
}

/// A device that waits forever makes all leave in time, whichever it is, and the next launch works.
#[cfg(debug_assertions)]
#[test]
fn a_fault_of_one_device_ends_all_and_the_next_launch_works() {
    use vm_host::faults::Fault;
    let Some(targets) = targets() else { return };
    let model = model::import(&corpus().join(MODELS[0])).expect("a golden model");
    let faults =
        [Fault::MissingSignal, Fault::WrongThreshold, Fault::StuckLoader, Fault::CyclicWait];
    for (target, seqs) in targets[1..].iter().flat_map(|target| [(target, 1), (target, SEQS)]) {
        let booted = booted_for("{}", &model, target, seqs);
        let (mut idle, variant, program) = booted.expect("it is legal");
        let (mut expected, mut ended) = (None, vec![0; target.devices as usize]);
        for (round, fault) in faults.iter().cycle().take(16).enumerate() {
            let launched = idle.launch(variant, &program);
            let mut machine = launched.unwrap_or_else(|refused| panic!("launch: {}", refused.1));
            let done = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("it decodes");
            assert_eq!(*expected.get_or_insert_with(|| done.tokens.clone()), done.tokens);
            let device = round as u32 / 4 % target.devices;
            let began = Instant::now();
            machine.set_sampling(0, &samplings()[1]).expect("settings");
            let sampled = round / 4 % 4 >= 2; // the same faults in greedy and in sampled steps
            let of = vm_host::Request { tokens: &[1, 2, 3], generate: 8, ..Default::default() };
            let request = vm_host::Request { sampled, ..of };
            let met = match machine.spoil_on(device, &program, *fault) {
                Err(vm_host::HostError::Request(_)) => None, // the program has no such place
                Err(error) => Some(error),
                Ok(()) => machine.run(&request, &mut || false).err(),
            };
            let waited = began.elapsed();
            if let Some(error) = met {
                eprintln!("{} device {device} {fault:?} after {waited:?}: {error}", target.name);
                assert!(matches!(error, vm_host::HostError::Trapped(_)), "{error}");
                assert!(waited < DEADLINE * 4, "{waited:?}");
                ended[device as usize] += 1;
            }
            idle = machine.stop().expect("all leave");
        }
        assert!(ended.iter().all(|&faults| faults > 0), "{}: {ended:?}", target.name);
    }
}
