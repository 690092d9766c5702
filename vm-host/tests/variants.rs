//! Every kernel variant that the schedule space can produce compiles for `sm_90a`, none spills or needs a stack, and no two are the
//! same machine code: a knob that changes nothing would be a knob to search for nothing.
//!
//! NVRTC needs no GPU. Without NVRTC every test here says `skipped` and passes; with `AMK_REQUIRE_NVRTC=1` that is a failure.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ir::schedule::{legal_values, validate};
use ir::{Graph, Knob, ScheduleConfig, Target};
use vm_device::Variant;
use vm_host::Resources;

const ARCH: &str = "sm_90a";

/// One model for each element type of the weights.
const MODELS: [&str; 3] = ["llama-tied-f32", "mistral-f16", "qwen2-bias-bf16"];

/// The knobs that decide which code there is. The other kernel knobs change one instruction each.
const SHAPE: [Knob; 4] =
    [Knob::KernelConsumer, Knob::KernelWarps, Knob::KernelUnroll, Knob::KernelKvCache];

/// The other kernel knobs.
const DETAILS: [Knob; 2] = [Knob::KernelPollSleepNs, Knob::KernelEvict];

/// Whether there is a compiler.
fn nvrtc() -> bool {
    match vm_host::nvrtc_version() {
        Ok(_) => true,
        Err(error) => {
            let required = std::env::var_os("AMK_REQUIRE_NVRTC").is_some_and(|v| v == "1");
            assert!(!required, "NVRTC is required: {error}");
            eprintln!("skipped: {error}");
            false
        }
    }
}

fn graph(name: &str) -> Graph {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name);
    model::import(&dir).unwrap_or_else(|error| panic!("{name}: {error}")).graph
}

fn target() -> Target {
    Target::by_name("h200").expect("a known target")
}

/// The legal configs that differ from the default in these knobs only.
fn configs(graph: &Graph, target: &Target, knobs: &[Knob]) -> Vec<ScheduleConfig> {
    let mut found = vec![ScheduleConfig::default()];
    for &knob in knobs {
        let mut wider = Vec::new();
        for config in found {
            for value in legal_values(knob, graph, target) {
                let mut config = config;
                assert_eq!(config.set(knob, value), Ok(()), "{knob}");
                wider.push(config);
            }
        }
        found = wider;
    }
    found.retain(|config| validate(*config, graph, target).is_ok());
    found
}

/// What compiling a variant gave.
#[derive(Clone, Default)]
struct Built {
    image: Vec<u8>,
    kernels: Vec<Resources>,
}

/// Compiles all variants, as many at once as there are cores. In the order of `variants`.
fn compile_all(variants: &[Variant]) -> Vec<Built> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(vec![Built::default(); variants.len()]);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(variants.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(variant) = variants.get(index) else { break };
                    // No cache: what is tested is the compiler's answer, not the cache's.
                    let cubin = vm_host::compile(variant, ARCH, None)
                        .unwrap_or_else(|error| panic!("{variant:?}: {error}"));
                    let kernels = vm_host::resources(&cubin.log);
                    results.lock().expect("no thread panicked while it held the lock")[index] =
                        Built { image: cubin.image, kernels };
                }
            });
        }
    });
    results.into_inner().expect("no thread panicked while it held the lock")
}

fn name(variant: &Variant) -> String {
    let dtype = ["f32", "f16", "bf16"][variant.dtype as usize];
    let consumer = if variant.mma { "mma" } else { "fma" };
    format!(
        "{dtype:4} {consumer} {:2} warps, unroll {}, sleep {:3} ns, evict first {}",
        variant.warps, variant.unroll, variant.poll_sleep_ns, variant.evict_first
    )
}

/// Prints the table and fails on whatever spills or has a stack, and on a knob that leaves the machine code as it was.
fn check(variants: &[Variant]) {
    let mut problems = Vec::new();
    let mut images: HashMap<Vec<u8>, &Variant> = HashMap::new();
    for (variant, Built { image, kernels }) in variants.iter().zip(compile_all(variants)) {
        if let Some(twin) = images.insert(image, variant) {
            problems.push(format!("{}: the same machine code as {}", name(variant), name(twin)));
        }
        let Some(main) = kernels.iter().find(|kernel| kernel.kernel == "amk_megakernel") else {
            panic!("{}: the assembler said nothing of amk_megakernel: {kernels:?}", name(variant));
        };
        eprintln!("{}: {:3} registers", name(variant), main.registers);
        // The register file holds 65536 words, handed out to a warp in blocks of 256.
        let words = variant.threads() / 32 * (main.registers * 32).next_multiple_of(256);
        if words > 65536 {
            problems.push(format!("{}: {words} registers a block", name(variant)));
        }
        for kernel in kernels.iter().filter(|kernel| kernel.spills != 0 || kernel.stack != 0) {
            problems.push(format!("{}: {kernel:?}", name(variant)));
        }
    }
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn every_variant_compiles_and_nothing_spills() {
    if !nvrtc() {
        return;
    }
    let target = target();
    let mut variants = Vec::new();
    for model in MODELS {
        let graph = graph(model);
        let configs = configs(&graph, &target, &SHAPE);
        variants.extend(configs.iter().map(|config| vm_host::variant(&config.kernel, graph.dtype)));
    }
    let distinct: HashSet<&Variant> = variants.iter().collect();
    assert_eq!(distinct.len(), variants.len(), "two configs asked for the same variant");
    let all_values = SHAPE.iter().map(|knob| knob.values().len()).product::<usize>();
    assert!(variants.len() > 2 * all_values, "16-bit models have every variant");
    check(&variants);
    eprintln!("{} variants", variants.len());
}

#[test]
fn every_value_of_the_other_kernel_knobs_compiles() {
    if !nvrtc() {
        return;
    }
    let (target, graph) = (target(), graph("qwen2-bias-bf16"));
    let default = vm_host::variant(&ScheduleConfig::default().kernel, graph.dtype);
    let mut variants = Vec::new();
    for knob in DETAILS {
        let configs = configs(&graph, &target, &[knob]);
        variants.extend(configs.iter().map(|config| vm_host::variant(&config.kernel, graph.dtype)));
    }
    variants.retain(|variant| *variant != default);
    variants.push(default);
    let others: usize = DETAILS.iter().map(|knob| knob.values().len() - 1).sum();
    assert_eq!(variants.len(), others + 1);
    check(&variants);
}
