//! The megakernel against stored logits, on a real device.
//!
//! Without a device every test here prints `skipped` and passes; with `AMK_REQUIRE_DEVICE=1` that is a failure. Run from the
//! repository root, or with cargo. Under a tool that makes the kernel a hundred times slower, `AMK_TEST_MODELS` (names, separated by
//! commas) selects some of the models, `AMK_DEADLINE_S` sets how long a worker may wait, and `AMK_TEST_POSITIONS` runs only that
//! many first positions, once, instead of all of them and the tokens that follow, twice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use abi::Opcode;

use ir::schedule::{neutral_config, read_config_over};
use ir::{Target, Valid};
use rayon::prelude::*;
use vm_host::{BootOptions, Idle, Resident};

mod device;
#[path = "device/heads.rs"]
mod heads;
use device::device;
use heads::{compile, odd_heads};

/// Folders of the corpus. Those that multiply the residual stream without a norm (olmo) and those with experts do not run in a kernel of several
/// sequences.
const GOLDEN: [&str; 40] = [
    "golden/llama-tied-f32",
    "golden/llama3-rope-bf16",
    "golden/mistral-f16",
    "golden/qwen2-bias-bf16",
    "golden/qwen3-qknorm-bf16",
    "quantised/awq-g128-qwen2",
    "quantised/ct-fp8-dynamic-llama",
    "quantised/ct-fp8-static-qwen3",
    "quantised/ct-int8-llama",
    "quantised/ct-w4a16-asym-g128-qwen2",
    "quantised/ct-w4a16-g128-llama",
    "quantised/ct-w4a16-g32-qwen3",
    "quantised/fp8-block-llama",
    "quantised/fp8-block-qwen3-moe",
    "quantised/gguf-q4_0-llama/model.gguf",
    "quantised/gguf-q4_k_m-qwen3/model.gguf",
    "quantised/gguf-q6_k-llama/model.gguf",
    "quantised/gguf-q8_0-llama/model.gguf",
    "quantised/gptq-asym-g128-qwen2",
    "quantised/gptq-sym-g128-llama",
    "quantised/mxfp4-gpt-oss",
    "families/gemma2-bf16",
    "families/gemma3-256-bf16",
    "families/gemma3-bf16",
    "families/glm4-bf16",
    "families/gpt-oss-bf16",
    "families/granite-bf16",
    "families/llama-linear-f16",
    "families/llama-yarn-bf16",
    "families/ministral-bf16",
    "families/mistral-nemo-f16",
    "families/mixtral-bf16",
    "families/olmo2-bf16",
    "families/olmo3-bf16",
    "families/olmoe-bf16",
    "families/phi3-bf16",
    "families/phi4-longrope-bf16",
    "families/qwen2-moe-bf16",
    "families/qwen3-moe-bf16",
    "families/smollm3-bf16",
];

/// Those with experts.
const EXPERTS: [&str; 5] = ["gpt-oss", "mixtral", "olmoe", "qwen2-moe", "qwen3-moe"];

/// Schedules that together cover every path of the kernel.
const SCHEDULES: [(&str, &str); 10] = [
    ("neutral", "{}"),
    ("fused", r#"{"fusion_grouping": {"embed": "qkv", "merge": "o_proj"}}"#),
    (
        "flag_in_data",
        r#"{"sync": {"embed": "flag_in_data", "qkv": "flag_in_data", "attention": "flag_in_data", "merge": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "flag_in_data", "down": "flag_in_data"}}"#,
    ),
    (
        "flag-in-data, fused, split",
        r#"{"sync": {"qkv": "flag_in_data", "attention": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "flag_in_data", "down": "flag_in_data"},
            "fusion_grouping": {"embed": "qkv", "merge": "o_proj"}, "tiling": {"attention": {"kv_split": 4, "kv_block": 32}},
            "sm_assignment": "carry"}"#,
    ),
    (
        "small stages, evict first",
        r#"{"kernel": {"evict": "first", "poll_sleep_ns": 0}, "pipeline": {"stages": 4, "stage_bytes": 8192, "in_flight_bytes": 16384, "in_flight_before_wait_bytes": 8192}}"#,
    ),
    (
        "two splits",
        r#"{"tiling": {"attention": {"kv_split": 2, "kv_block": 32}, "qkv": {"rows": 8}},
            "sm_assignment": "around_attention"}"#,
    ),
    // Only the flag-in-data input orders the plain residual for a worker without a task in the phase between.
    (
        "plain residual",
        r#"{"sync": {"embed": "counter", "qkv": "flag_in_data", "attention": "flag_in_data", "o_proj": "counter", "gate_up": "flag_in_data", "down": "counter"},
            "tiling": {"qkv": {"rows": 64}, "o_proj": {"rows": 8}, "gate_up": {"rows": 64}, "down": {"rows": 8}}}"#,
    ),
    (
        "counters from the hidden layer on",
        r#"{"pipeline": {"stage_bytes": 16384, "stages": 10, "in_flight_bytes": 49152, "in_flight_before_wait_bytes": 49152},
            "sync": {"embed": "flag_in_data", "qkv": "flag_in_data", "attention": "flag_in_data", "merge": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "counter", "down": "counter"},
            "fusion_grouping": {"merge": "o_proj"}, "tiling": {"qkv": {"rows": 64}, "gate_up": {"rows": 16}, "down": {"rows": 32}, "o_proj": {"rows": 8}},
            "sm_assignment": "carry"}"#,
    ),
    (
        // The smallest ring. With longer heads than these models have it holds less than a block of keys: stage `rings` of .ci/device.
        "smallest ring",
        r#"{"pipeline": {"stages": 2, "stage_bytes": 8192, "in_flight_bytes": 8192, "in_flight_before_wait_bytes": 8192}, "tiling": {"attention": {"kv_split": 1}}}"#,
    ),
    (
        "large stages",
        r#"{"pipeline": {"stages": 2, "stage_bytes": 32768, "in_flight_bytes": 32768, "in_flight_before_wait_bytes": 32768}}"#,
    ),
];

fn corpus() -> PathBuf {
    let here = PathBuf::from("corpus");
    if here.is_dir() {
        here
    } else {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus"))
    }
}

/// Whether a folder runs in kernels of one sequence only.
fn alone(name: &str) -> bool {
    name.contains("/olmo") || EXPERTS.iter().any(|expert| name.contains(expert))
}

/// The models to test: all, or those that are requested.
fn chosen() -> Vec<&'static str> {
    let batched = number("AMK_TEST_BATCH").is_some_and(|seqs| seqs > 1);
    let all = GOLDEN.into_iter().filter(|name| !(batched && alone(name)));
    let Ok(names) = std::env::var("AMK_TEST_MODELS") else { return all.collect() };
    let is = |golden: &str, name: &str| golden.trim_end_matches("/model.gguf").ends_with(name);
    let known = |name: &str| all.clone().find(|golden| is(golden, &format!("/{name}")));
    let chosen = names.split(',').map(|name| {
        known(name).unwrap_or_else(|| panic!("AMK_TEST_MODELS: {name} is none of {GOLDEN:?}"))
    });
    chosen.collect()
}

/// A number from the environment, if it is set.
fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}: {text:?}: {error}")))
}

/// The kernel of a program: for one sequence, or for `AMK_TEST_BATCH`, which must give the same results for a plain decode.
fn kernel_variant(kernel: &ir::KernelConfig, graph: &ir::Graph) -> vm_device::Variant {
    batch_variant(kernel, graph, number("AMK_TEST_BATCH").unwrap_or(1) as u32)
}

fn batch_variant(kernel: &ir::KernelConfig, graph: &ir::Graph, seqs: u32) -> vm_device::Variant {
    vm_device::Variant { seqs, ..vm_host::variant(kernel, graph) }
}

/// Boot options of these tests.
fn boot_options() -> BootOptions {
    BootOptions { logits_rows: 80, sessions: 2, ..BootOptions::default() }
}

struct Golden {
    tokens: Vec<u32>,
    greedy: Vec<u32>,
    logits: Vec<f32>,
}

fn read_golden(dir: &std::path::Path) -> Golden {
    // Beside a file of GGUF.
    let dir = if dir.is_dir() { dir } else { dir.parent().expect("a folder") };
    let bytes = std::fs::read(dir.join("golden.safetensors")).expect("golden file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("golden tensors");
    let integers = |name: &str| -> Vec<u32> {
        let data = tensors.tensor(name).expect(name).data();
        data.as_chunks::<8>()
            .0
            .iter()
            .map(|b| u32::try_from(i64::from_le_bytes(*b)).expect("a token id"))
            .collect()
    };
    let logits = tensors
        .tensor("logits")
        .expect("logits")
        .data()
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    Golden { tokens: integers("tokens"), greedy: integers("greedy"), logits }
}

fn config(text: &str, graph: &ir::Graph, target: &Target) -> Valid<ir::ScheduleConfig> {
    // Not every model's first product can read the embedding itself (S-EMBED).
    let normed = graph.layers.iter().all(|layer| layer.attention.norm.is_some());
    let fuses = normed && graph.embed_scale == 1.0;
    let separate = text.replace(r#""embed": "qkv""#, r#""embed": "separate""#);
    let text = if fuses { text } else { &separate };
    let config = read_config_over(neutral_config(graph, target), text, graph, target);
    config.unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Greatest difference relative to the greatest logit.
fn worst(expected: &[f32], actual: &[f32]) -> f64 {
    let scale = expected.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
    let differences = expected
        .iter()
        .zip(actual)
        .map(|(e, a)| if a.is_finite() { f64::from((e - a).abs()) } else { f64::INFINITY });
    differences.fold(0.0, f64::max) / scale
}

/// Runs the resident program, in one session and in another, and compares every logit and every token that follows.
fn check_program(machine: &mut Resident, golden: &Golden, name: &str, schedule: &str) {
    let some = number("AMK_TEST_POSITIONS").map(|n| (n as usize).clamp(1, golden.tokens.len()));
    let (tokens, follow, repeats) = match some {
        Some(positions) => (&golden.tokens[..positions], 1, 1),
        None => (&golden.tokens[..], golden.greedy.len(), 2),
    };
    let expected = &golden.logits[..golden.logits.len() / golden.tokens.len() * tokens.len()];
    for repeat in 0..repeats {
        let decoded = machine
            .decode(repeat, 0, tokens, follow as u32, &[], true)
            .unwrap_or_else(|e| panic!("{name}, {schedule}: {e}"));
        let logits = machine
            .logits(tokens.len() as u32)
            .unwrap_or_else(|e| panic!("{name}, {schedule}: {e}"))
            .concat();
        let error = worst(expected, &logits);
        eprintln!(
            "{name:18} {schedule:22} run {repeat}: max |diff| / max |logit| {error:.2e}, {:.1} us per position",
            decoded.device_us / f64::from(decoded.steps)
        );
        assert!(error <= 5e-3, "{name}, {schedule}: {error:.3e}");
        if some.is_none() {
            assert_eq!(decoded.tokens, golden.greedy, "{name}, {schedule}");
        }
        check_choices(&decoded, &logits, tokens.len(), &format!("{name}, {schedule}"));
    }
}

/// The index of the greatest value, the first of equals.
fn first_greatest(row: &[f32]) -> u32 {
    let better =
        |best, (index, value): (usize, &f32)| if *value > row[best] { index } else { best };
    row.iter().enumerate().fold(0, better) as u32
}

/// After each position of the prompt, where the next token was forced, the device's choice matches its own logits.
fn check_choices(decoded: &vm_host::Decoded, logits: &[f32], positions: usize, what: &str) {
    let vocab = logits.len() / positions;
    let likeliest: Vec<u32> = logits.chunks(vocab).map(first_greatest).collect();
    assert_eq!(decoded.chosen[..positions], likeliest, "{what}: chosen");
}

/// One model under every schedule: launched again only when the kernel variant changes, else switched by a ring command.
fn check_model(
    name: &str,
    info: &vm_host::DeviceInfo,
    schedules: &[(&str, &str)],
    of: &dyn Fn(&ir::KernelConfig, &ir::Graph) -> vm_device::Variant,
) {
    let dir = corpus().join(name);
    let model = model::import(&dir).unwrap_or_else(|e| panic!("{name}: {e}"));
    let golden = read_golden(&dir);
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let options = lower::Options { kv_capacity: 128 };
    let mut idle: Option<Idle> = None;
    let mut resident: Option<Resident> = None;
    for &(schedule, text) in schedules {
        let config = config(text, &model.graph, &target);
        let program = lower::lower(&config, &model.graph, &target, options)
            .unwrap_or_else(|e| panic!("{name}, {schedule}: {e}"));
        let variant = of(&config.kernel, &model.graph);
        let mut machine = match resident.take() {
            Some(mut running) if running.variant() == variant => {
                let loaded = running
                    .load(&program)
                    .unwrap_or_else(|e| panic!("{name}, {schedule}: load: {e}"));
                running
                    .switch(loaded)
                    .unwrap_or_else(|e| panic!("{name}, {schedule}: switch: {e}"));
                running
            }
            other => {
                if let Some(running) = other {
                    idle = Some(
                        running.stop().unwrap_or_else(|e| panic!("{name}, {schedule}: stop: {e}")),
                    );
                }
                let booted = idle.take().unwrap_or_else(|| {
                    Idle::boot(&model.graph, &*model.weights, &program, &variant, boot_options())
                        .unwrap_or_else(|e| panic!("{name}: boot: {e}"))
                });
                booted
                    .launch(variant, &program)
                    .unwrap_or_else(|e| panic!("{name}, {schedule}: launch: {}", e.1))
            }
        };
        check_program(&mut machine, &golden, name, schedule);
        resident = Some(machine);
    }
    if let Some(running) = resident {
        running.stop().unwrap_or_else(|e| panic!("{name}: stop: {e}"));
    }
}

/// Fills the cache with the kernels of these models and schedules, on all cores: one after the other they take minutes.
fn compile_kernels(
    info: &vm_host::DeviceInfo,
    names: &[&str],
    schedules: &[(&str, &str)],
    of: &(dyn Fn(&ir::KernelConfig, &ir::Graph) -> vm_device::Variant + Sync),
) {
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let cache = vm_host::default_cache();
    names.into_par_iter().for_each(|name| {
        let graph =
            model::import(&corpus().join(name)).unwrap_or_else(|e| panic!("{name}: {e}")).graph;
        for (_, text) in schedules {
            let kernel = config(text, &graph, &target).kernel;
            // What cannot be compiled is said where it is launched.
            let _ = vm_host::compile(&of(&kernel, &graph), "sm_90a", cache.as_deref());
        }
    });
}

#[test]
fn logits_and_tokens_are_those_of_the_golden_models() {
    let Some(info) = device() else { return };
    compile_kernels(&info, &chosen(), &SCHEDULES, &kernel_variant);
    for name in chosen() {
        check_model(name, &info, &SCHEDULES, &kernel_variant);
    }
}

/// Every format of codes in kernels of 2 and of 8 sequences: tiles in parts and whole, in small stages and large ones.
#[test]
fn codes_in_kernels_of_several_sequences_are_those_of_the_golden_models() {
    let Some(info) = device() else { return };
    let codes = |name: &&str| name.starts_with("quantised/") && !alone(name);
    let names: Vec<&str> = chosen().into_iter().filter(codes).collect();
    let schedules = [0, 3, 8, 9].map(|schedule: usize| SCHEDULES[schedule]);
    for seqs in [2, 8] {
        let of = move |kernel: &_, graph: &_| batch_variant(kernel, graph, seqs);
        compile_kernels(&info, &names, &schedules, &of);
        for name in &names {
            eprintln!("kernel of {seqs} sequences:");
            check_model(name, &info, &schedules, &of);
        }
    }
}

/// With a large vocabulary each worker has several consecutive groups of tiles in the last product. A past bug: threads without a row took
/// part in the argmax from the second group on, so the logits were right and the token was not theirs.
#[test]
fn the_choice_among_many_rows_is_that_of_the_logits() {
    let Some(info) = device() else { return };
    let model = model::preset("smollm2-135m").expect("a known preset");
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let options = lower::Options { kv_capacity: 128 };
    let config = config("{}", &model.graph, &target);
    let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
    let variant = kernel_variant(&config.kernel, &model.graph);
    let booted = Idle::boot(&model.graph, &*model.weights, &program, &variant, boot_options());
    let launched = booted.expect("it boots").launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|e| panic!("launch: {}", e.1));
    let tokens: Vec<u32> = (0..48).map(|i| i * 1021 % model.graph.vocab).collect();
    let decoded = machine.decode(1, 0, &tokens, 1, &[], true).expect("it runs");
    let logits = machine.logits(tokens.len() as u32).expect("logits").concat();
    check_choices(&decoded, &logits, tokens.len(), "smollm2-135m");
    machine.stop().expect("it stops");
}

/// Task numbers wrap at 2^32, after hours of decoding. A past bug: the task prefetcher overtook its consumers there.
#[test]
fn tasks_go_on_where_their_numbers_wrap() {
    let Some(info) = device() else { return };
    let name = "golden/llama3-rope-bf16";
    let dir = corpus().join(name);
    let (model, golden) = (model::import(&dir).expect(name), read_golden(&dir));
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    for (schedule, text) in &SCHEDULES[..3] {
        let config = config(text, &model.graph, &target);
        let options = lower::Options { kv_capacity: 128 };
        let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
        let plain = kernel_variant(&config.kernel, &model.graph);
        let variant = vm_device::Variant { first_task: 0_u32.wrapping_sub(100), ..plain };
        let booted = Idle::boot(&model.graph, &*model.weights, &program, &variant, boot_options());
        let launched = booted.expect("it boots").launch(variant, &program);
        let mut machine = launched.unwrap_or_else(|e| panic!("launch: {}", e.1));
        let steps = golden.tokens.len() + golden.greedy.len();
        assert!(program.workers[0].tasks.len() * steps > 200, "the numbers wrap");
        check_program(&mut machine, &golden, name, schedule);
        machine.stop().expect("it stops");
    }
}

/// Tiles whose length is no multiple of a power of two: parts of 38 and 37 units, and parts that leave the last warps one unit less. With
/// 16-bit weights, and with codes, whose tiles have half as many units. Groups of 5, 7 and 30 query heads are attended in parts,
/// and codes meet one half of the vector of 17408 elements. Codes also in a kernel of 8 sequences, where rows of 2304 have two parts.
#[test]
fn odd_widths_compute_what_the_graph_says() {
    let Some(info) = device() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let kernel = ir::ScheduleConfig::default().kernel;
    let models = odd_widths(folder.path());
    let variants = models.iter().flat_map(|(_, model, several)| {
        several.iter().map(|&seqs| batch_variant(&kernel, &model.graph, seqs))
    });
    compile(&variants.collect::<Vec<_>>());
    let text = r#"{"pipeline": {"stage_bytes": 32768, "stages": 4, "in_flight_bytes": 65536, "in_flight_before_wait_bytes": 32768}}"#;
    for (what, model, several) in &models {
        several.iter().for_each(|&seqs| check_graph(model, (text, 12), what, &info, seqs));
    }
}

/// Models of odd widths with 16-bit weights and with codes, which are in `folder`: a name, and how many sequences their kernels have.
fn odd_widths(folder: &Path) -> Vec<(String, model::Model, Vec<u32>)> {
    let asked = number("AMK_TEST_BATCH").map(|seqs| seqs as u32);
    let mut models = Vec::new();
    for (hidden, heads, kv_heads, ffn) in [
        (1920, 15, 3, 9728),
        (896, 7, 1, 4864),
        (640, 5, 1, 17408),
        (2304, 18, 2, 6144),
        (3840, 30, 1, 18944),
    ] {
        let shape = model::Shape {
            name: format!("{hidden} by {ffn}"),
            hidden,
            heads,
            kv_heads,
            head_dim: 128,
            ffn,
            vocab: 512,
            layers: 2,
            dtype: ir::DType::Bf16,
            ..model::Shape::default()
        };
        let plain = model::Model::random(shape, 7);
        // The widest takes the processor half a minute in each format.
        let formats = [model::Format::Fp8, model::Format::Int8, model::Format::Int4G128];
        for format in formats.into_iter().filter(|_| hidden < 3000) {
            let dir = folder.join(format!("{hidden} {format:?}"));
            let lm_head = (format != model::Format::Int4G128).then_some(format);
            let all = model::Quantisation { format, lm_head };
            model::quantise(&plain, all, &dir).unwrap_or_else(|e| panic!("{e}"));
            let codes = model::import(&dir).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(codes.graph.dtype, ir::DType::F16, "it is not dequantised");
            let several = asked.map_or(vec![1, 8], |seqs| vec![seqs]);
            models.push((format!("{format:?}"), codes, several));
        }
        models.push(("bf16".to_owned(), plain, vec![asked.unwrap_or(1)]));
    }
    models
}

/// Heads whose width is no power of two: in one split and in several, which are merged by an op or by the product after them; across pages.
#[test]
fn heads_of_multiples_of_16_compute_what_the_graph_says() {
    let Some(info) = device() else { return };
    let merged = r#""fusion_grouping": {"merge": "o_proj"}"#;
    let split = r#""tiling": {"attention": {"kv_split": 4, "kv_block": 32}}"#;
    let small = r#""pipeline": {"stages": 2, "stage_bytes": 8192, "in_flight_bytes": 8192, "in_flight_before_wait_bytes": 8192}"#;
    let of = |parts: &[&str]| format!("{{{}}}", parts.join(", "));
    let schedules = [of(&[]), of(&[split]), of(&[split, merged]), of(&[small, merged])];
    let models = odd_heads();
    let seqs = number("AMK_TEST_BATCH").unwrap_or(1) as u32;
    let kernel = ir::ScheduleConfig::default().kernel;
    let variants = models.iter().map(|(_, model)| kernel_variant(&kernel, &model.graph));
    compile(&variants.collect::<Vec<_>>());
    for (head_dim, model) in models {
        for text in &schedules {
            check_graph(&model, (text, 150), &format!("heads of {head_dim}, {text}"), &info, seqs);
        }
    }
}

/// Caches of codes: the graph has the same codes, so what they cost is no error. `AMK_TEST_BATCH=8` runs kernels of several sequences.
#[test]
fn caches_of_codes_compute_what_the_graph_says() {
    let Some(info) = device() else { return };
    let split = r#"{"tiling": {"attention": {"kv_split": 4, "kv_block": 32}}}"#;
    let small = r#"{"pipeline": {"stages": 2, "stage_bytes": 8192, "in_flight_bytes": 8192, "in_flight_before_wait_bytes": 8192}}"#;
    let golden = |name: &str| {
        let model = model::import(&corpus().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name.to_owned(), model)
    };
    let wide = odd_heads().into_iter().map(|(dim, model)| (format!("heads of {dim}"), model));
    let mut models: Vec<_> = GOLDEN[..5].iter().map(|name| golden(name)).chain(wide).collect();
    models.iter_mut().for_each(|(_, model)| model.graph.kv_dtype = ir::KvDtype::E4m3);
    let seqs = number("AMK_TEST_BATCH").unwrap_or(1) as u32;
    models.retain(|(_, model)| seqs == 1 || model.graph.dtype != ir::DType::F32);
    let kernel = ir::ScheduleConfig::default().kernel;
    let variants = models.iter().map(|(_, model)| batch_variant(&kernel, &model.graph, seqs));
    compile(&variants.collect::<Vec<_>>());
    for (name, model) in models {
        for text in ["{}", split, small] {
            let positions = 150.min(model.graph.max_positions);
            check_graph(&model, (text, positions), &format!("codes, {name}, {text}"), &info, seqs);
        }
    }
}

/// The logits of so many positions under a schedule are those of the evaluated graph.
fn check_graph(
    model: &model::Model,
    (text, positions): (&str, u32),
    what: &str,
    info: &vm_host::DeviceInfo,
    seqs: u32,
) {
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let ir::Graph { hidden, ffn, .. } = model.graph;
    let config = config(text, &model.graph, &target);
    let options = lower::Options { kv_capacity: 128.max(positions + 2) };
    let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
    let variant = batch_variant(&config.kernel, &model.graph, seqs);
    let rows = boot_options().logits_rows.max(positions);
    let options = BootOptions { logits_rows: rows, ..boot_options() };
    let booted = Idle::boot(&model.graph, &*model.weights, &program, &variant, options);
    let launched = booted.expect("it boots").launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|e| panic!("launch: {}", e.1));
    let tokens: Vec<u32> = (0..positions).map(|i| i * 37 % model.graph.vocab.min(512)).collect();
    let decoded = machine.decode(0, 0, &tokens, 1, &[], true).expect("it runs");
    let logits = machine.logits(tokens.len() as u32).expect("logits").concat();
    machine.stop().expect("it stops");
    let mut evaluator = reference_vm::eval::Evaluator::new(&model.graph, &*model.weights)
        .expect("it can be evaluated");
    let expected =
        evaluator.run(&tokens, reference_vm::eval::Logits::All).expect("it runs").concat();
    let error = worst(&expected, &logits);
    eprintln!(
        "hidden {hidden}, ffn {ffn}, {what}, kernel of {seqs}: max |diff| / max |logit| {error:.2e}, {:.1} us per position",
        decoded.device_us / f64::from(decoded.steps)
    );
    let most = reference_vm::compare::Tolerance::device_limit(model.graph.kv_dtype).rel();
    assert!(error <= most, "hidden {hidden}, ffn {ffn}, {what}, kernel of {seqs}: {error:.3e}");
}

/// The programs that run on the device here cover every op. Needs no device.
#[test]
fn every_op_is_covered() {
    let target = Target::by_name("h200").expect("a known target");
    let options = lower::Options { kv_capacity: 128 };
    let (mut norms, mut routes) = (0, 0);
    for name in chosen() {
        let model = model::import(&corpus().join(name)).unwrap_or_else(|e| panic!("{e}"));
        let mut tasks: BTreeMap<&str, usize> = BTreeMap::new();
        for (schedule, text) in SCHEDULES {
            let config = config(text, &model.graph, &target);
            let program = lower::lower(&config, &model.graph, &target, options)
                .unwrap_or_else(|e| panic!("{name}, {schedule}: {e}"));
            for task in program.workers.iter().flat_map(|worker| &worker.tasks) {
                *tasks.entry(task.opcode.info().name).or_default() += 1;
            }
        }
        eprintln!("{name:18} tasks by op over {} schedules: {tasks:?}", SCHEDULES.len());
        norms += tasks.get(Opcode::Norm.info().name).copied().unwrap_or(0);
        routes += tasks.get(Opcode::Route.info().name).copied().unwrap_or(0);
        // Lowering never emits a `nop`, which does nothing, and others only where a family has norms behind its products, or experts.
        let some = |op: &Opcode| matches!(op, Opcode::Nop | Opcode::Norm | Opcode::Route);
        let expected = Opcode::ALL.iter().filter(|op| !some(op));
        let missing: Vec<&str> =
            expected.map(|op| op.info().name).filter(|op| !tasks.contains_key(op)).collect();
        assert!(missing.is_empty(), "{name}: no task of {missing:?}");
    }
    let all = std::env::var_os("AMK_TEST_MODELS").is_none();
    assert!(!all || (norms > 0 && routes > 0), "no task of a norm or of a route");
}
