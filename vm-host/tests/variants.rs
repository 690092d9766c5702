//! Every kernel variant that the schedule space can produce compiles for `sm_90a`, none spills or needs a stack, and no two have the
//! same machine code: a knob without effect would be searched for nothing.
//!
//! NVRTC needs no GPU. Without NVRTC every test here prints `skipped` and passes; with `AMK_REQUIRE_NVRTC=1` that is a failure.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use abi::{DType, Feature, Unpack};
use ir::schedule::legal_values;
use ir::{Graph, Knob, ScheduleConfig, Target};
use vm_device::{PrefillVariant, Trace, Variant};
use vm_host::Resources;

const ARCH: &str = vm_device::ARCHITECTURES[0].name;

/// The model with which all knobs are compiled, and one of the other kind of weights, with the default only.
const MODELS: [&str; 2] = ["qwen2-bias-bf16", "llama-tied-f32"];

/// The kernel knobs.
const KNOBS: [Knob; 2] = [Knob::KernelPollSleepNs, Knob::KernelEvict];

/// Shapes of heads beyond those of the models: elements, query heads of a group, whether they are normalised. The attention of wide
/// heads spills a few registers outside its loop over the keys; nothing else may.
const HEADS: [(u32, u32, bool, u32); 9] = [
    (16, 2, false, 0),
    (32, 4, true, 0),
    (96, 1, false, 0), // phi-3-mini
    (64, 3, false, 0),
    (64, 4, false, 0),
    (80, 8, true, 0),
    (128, 2, true, WIDE_SPILLS),
    (128, 4, false, WIDE_SPILLS),
    (256, 4, true, GEMMA_SPILLS), // gemma-3-1b
];
/// Matrices of real models: their heads above, the widths of their vectors, and their warp fragment sizes.
const MATRICES: [(usize, [u32; 3], u32); 4] = [
    (3, [576, 576, 1536], 1 << 3 | 1 << 6),
    (4, [2048, 2048, 8192], 1 << 8),
    (6, [1024, 2048, 3072], 1 << 4 | 1 << 6 | 1 << 8),
    (7, [4096, 4096, 14336], 1 << 8),
];
/// The same with codes beside a 16-bit `lm_head`: llama-3.2-1b, llama-3.1-8b and qwen3-0.6b; the last those of GGUF's Q4_K_M.
const CODES: [(usize, [u32; 3], u32, &[Unpack]); 8] = [
    (4, [2048, 2048, 8192], 1 << 4 | 1 << 8, &[Unpack::None, Unpack::E4m3]),
    (7, [4096, 4096, 14336], 1 << 7 | 1 << 8, &[Unpack::None, Unpack::Int8]),
    (7, [4096, 4096, 14336], 1 << 7 | 1 << 8, &[Unpack::None, Unpack::E4m3G64]),
    (4, [2048, 2048, 8192], 1 << 2 | 1 << 8, &[Unpack::None, Unpack::Int4G128]),
    (7, [4096, 4096, 14336], 1 << 4 | 1 << 7 | 1 << 8, &[Unpack::None, Unpack::Int4G128Zero]),
    (6, [1024, 2048, 3072], 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4, &[Unpack::None, Unpack::Int4G32]),
    (4, [2048, 2048, 8192], 1 << 2 | 1 << 8, &[Unpack::None, Unpack::Mxfp4]),
    (4, [2048, 2048, 8192], 1 << 2 | 1 << 4 | 1 << 8, &[Unpack::Int4K, Unpack::Int8K]),
];
/// Registers per thread at launch, as `LAUNCH_REGISTERS` of `worker.cuh` assumes.
const LAUNCH_REGISTERS: u32 = 168;
/// Number of kernels for prompt chunks; one more for codes.
const PREFILL_KERNELS: usize = 14;
/// Kernels of more than two devices: the poller's (12 bytes stored and 12 loaded with four devices).
const DEVICES_SPILLS: u32 = 32;
const WIDE_SPILLS: u32 = 192;
/// Kernels of codes with several scales behind each row of a unit, which wait in registers while the vector is staged: in groups of 32, and with factors
/// (three words a row: 276 for llama-3.2-1b in Q4_K_M). The cost was not measured.
const FOUR_SCALES_SPILLS: u32 = 132;
const FACTORS_SPILLS: u32 = 288;
/// With the features of all dense families at once 492, with those of gemma-3-1b alone 408.
const GEMMA_SPILLS: u32 = 500;
/// Kernels with routes: one word of the loader's around its wait for the experts, stored and loaded.
const ROUTE_SPILLS: u32 = 24;
/// The same with codes, whose scales and factors wait in registers too: qwen3-30b-a3b-fp8-block spills 16 bytes, gpt-oss-20b 32.
const ROUTED_CODES_SPILLS: u32 = 40;
const TRACE_SPILLS: u32 = 32;
/// Kernels of several sequences, whose vectors take 64 registers per thread: the one of 8 sequences for llama-3.2-1b spills 652. The cost was not measured.
const BATCH_SPILLS: u32 = 800;
/// The same for heads of 128, and with codes: llama-3.1-8b in Q4_K_M spills 1556, in bf16 1036. Windows have a copy of attention: without it 1400 and 864.
const BATCH_CODES_SPILLS: u32 = 1600;

/// Bit n: the `Unpack` of number n.
fn mask(unpack: &[Unpack]) -> u32 {
    unpack.iter().fold(0, |mask, &one| mask | 1 << one as u32)
}

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

/// Each value of each kernel knob in as few configs as possible: the knobs are constants of the kernel that do not depend on each other.
fn configs(graph: &Graph, target: &Target) -> Vec<ScheduleConfig> {
    let legal = KNOBS.map(|knob| (knob, legal_values(knob, graph, target)));
    let most = legal.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    let numbered = |n: usize| {
        let mut config = ScheduleConfig::default();
        for (knob, values) in &legal {
            assert_eq!(config.set(*knob, values[n % values.len()]), Ok(()), "{knob}");
        }
        config
    };
    (0..most).map(numbered).collect()
}

/// Result of compiling a variant.
#[derive(Clone, Default)]
struct Built {
    image: Vec<u8>,
    kernels: Vec<Resources>,
}

/// Compiles all variants, as many at once as there are cores. Results are in the order of `variants`.
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
                    // No cache: the test is of the compiler's answer, not the cache's.
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
    let (dtype, unpack) = (variant.dtype.name(), variant.unpack);
    let Variant { head_dim, group, qk_norm, poll_sleep_ns, evict_first, seqs, .. } = variant;
    let Variant { devices, masks, trace, .. } = variant;
    let features = variant.features;
    format!(
        "{dtype:4} unpack {unpack:03b}, heads of {head_dim:3} by {group}, norm {qk_norm:5}, features {features:05b}, sleep {poll_sleep_ns:3} ns, evict first {evict_first:5}, sequences {seqs}, devices {devices}, masks {masks}, trace {trace:?}"
    )
}

/// Bytes of registers that a variant may spill.
fn spills_allowed(variant: &Variant) -> u32 {
    let routed = variant.features >> Feature::Route as u32 & 1 != 0;
    let of_route = if routed { ROUTE_SPILLS } else { 0 };
    if variant.trace != Trace::Off {
        return TRACE_SPILLS + of_route; // its times serve to analyse a step, and no build that is timed has them
    }
    if variant.seqs > 1 {
        let codes = variant.unpack != 1 << Unpack::None as u32;
        return if codes { BATCH_CODES_SPILLS } else { BATCH_SPILLS };
    }
    if variant.devices > 2 {
        return DEVICES_SPILLS;
    }
    if variant.unpack != 1 << Unpack::None as u32 {
        let of_codes = if routed { ROUTED_CODES_SPILLS } else { 0 };
        let has = |some: &[Unpack]| variant.unpack & mask(some) != 0;
        let of_scales = match () {
            () if has(&[Unpack::Int4K, Unpack::Int8K]) => FACTORS_SPILLS,
            () if has(&[Unpack::Int4G32, Unpack::Mxfp4]) => FOUR_SCALES_SPILLS,
            () => 0,
        };
        return of_scales.max(of_codes);
    }
    let of = |&&(head_dim, ..): &&(u32, u32, bool, u32)| head_dim == variant.head_dim;
    HEADS.iter().find(of).map_or(0, |&(.., spills)| spills).max(of_route)
}

/// Prints the table and fails on any spill or stack, and on a knob that leaves the machine code unchanged.
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
        // The register file holds 65536 words, allocated to a warp in blocks of 256.
        let words =
            (abi::CONSUMER_WARPS + abi::HELPER_WARPS) * (main.registers * 32).next_multiple_of(256);
        if words > 65536 {
            problems.push(format!("{}: {words} registers a block", name(variant)));
        }
        // `setmaxnreg` can only move what the launch allocated. With fewer, consumers would wait for registers forever, without a trap.
        if main.registers != LAUNCH_REGISTERS {
            problems.push(format!("{}: {} registers per thread", name(variant), main.registers));
        }
        let allowed = spills_allowed(variant);
        let spills =
            |kernel: &&Resources| kernel.spills > allowed || (kernel.stack > 0 && allowed == 0);
        for kernel in kernels.iter().filter(spills) {
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
    let [model, other] = MODELS.map(graph);
    let configs = configs(&model, &target);
    let mut variants: Vec<Variant> =
        configs.iter().map(|config| vm_host::variant(&config.kernel, &model)).collect();
    let distinct: HashSet<&Variant> = variants.iter().collect();
    assert_eq!(distinct.len(), variants.len(), "two configs asked for the same variant");
    let seen = |knob: Knob| configs.iter().map(|config| config.get(knob)).collect::<HashSet<_>>();
    assert!(KNOBS.iter().all(|&knob| seen(knob).len() == knob.values().len()), "every value");
    variants.push(vm_host::variant(&ScheduleConfig::default().kernel, &other));
    check(&variants);
}

#[test]
fn every_shape_of_heads_compiles() {
    if !nvrtc() {
        return;
    }
    let plain = vm_host::variant(&ScheduleConfig::default().kernel, &graph("qwen2-bias-bf16"));
    let shaped = |(head_dim, group, qk_norm, _)| Variant { head_dim, group, qk_norm, ..plain };
    // Without those that are compiled with the matrices of real models.
    let other =
        HEADS[..8].iter().enumerate().filter(|(heads, _)| MATRICES.iter().all(|m| m.0 != *heads));
    let mut variants: Vec<Variant> = other.map(|(_, heads)| shaped(*heads)).collect();
    variants.push(Variant { trace: Trace::Delays, ..shaped(HEADS[4]) });
    variants.push(Variant { seqs: 2, ..shaped(HEADS[0]) });
    // Those of servers have masks.
    let (heads, widths, shares) = MATRICES[1];
    variants.push(Variant { seqs: 8, masks: true, widths, shares, ..shaped(HEADS[heads]) });
    // Those of experts, and caches of codes, are tested with kernels of their own.
    let others = [Feature::Route, Feature::Sinks, Feature::ClampedSilu, Feature::KvE4m3];
    let dense = Feature::ALL.iter().filter(|feature| !others.contains(feature));
    let features = dense.fold(0, |mask, &feature| mask | 1 << feature as u32);
    let (heads, widths, shares) = (HEADS[8], [1152, 1024, 6912], 1 << 4 | 1 << 5 | 1 << 7 | 1);
    variants.push(Variant { widths, shares, features, ..shaped(heads) });
    for (heads, widths, shares) in MATRICES {
        variants.push(Variant { widths, shares, ..shaped(HEADS[heads]) });
    }
    // Key/value caches of codes: the shapes of llama-3.2-1b and (with masks) llama-3.1-8b, and several sequences.
    for (matrices, seqs, masks) in
        [(MATRICES[1], 1, false), (MATRICES[3], 1, true), (MATRICES[1], 8, false)]
    {
        let (heads, widths, shares) = matrices;
        let features = 1 << Feature::KvE4m3 as u32;
        variants.push(Variant { widths, shares, features, seqs, masks, ..shaped(HEADS[heads]) });
    }
    let halves = Variant { dtype: DType::F16, ..plain };
    variants.push(halves);
    for (heads, widths, shares, unpack) in CODES {
        let (head_dim, group, qk_norm, _) = HEADS[heads];
        let unpack = mask(unpack);
        let features = if unpack & 1 == 0 { 1 << Feature::F32Rows as u32 } else { 0 };
        let shaped = Variant { head_dim, group, qk_norm, widths, shares, unpack, ..halves };
        variants.push(Variant { features, ..shaped });
    }
    // Codes of several sequences: of 8 bits, and those that take most registers.
    let batch = |code: usize, unpack: &[Unpack], seqs| {
        let (heads, widths, shares, _) = CODES[code];
        let (head_dim, group, qk_norm, _) = HEADS[heads];
        let unpack = mask(unpack);
        Variant { head_dim, group, qk_norm, widths, shares, unpack, seqs, ..halves }
    };
    variants.push(batch(0, &[Unpack::None, Unpack::E4m3], 2));
    variants.push(batch(4, &[Unpack::Int4K, Unpack::Int8K], 8));
    check(&variants);
}

/// Kernels of several devices: shapes of the dense presets, a batch, and weights of f32.
#[test]
fn kernels_of_several_devices_compile_and_nothing_spills() {
    if !nvrtc() {
        return;
    }
    let plain = vm_host::variant(&ScheduleConfig::default().kernel, &graph("qwen2-bias-bf16"));
    let shaped = |(heads, widths, shares): (usize, _, _)| {
        let (head_dim, group, qk_norm, _) = HEADS[heads];
        Variant { head_dim, group, qk_norm, widths, shares, devices: 2, ..plain }
    };
    let [small, middle, _, large] = MATRICES.map(shaped);
    let mut variants = vec![small, Variant { seqs: 8, ..middle }, large];
    variants.push(Variant { devices: 4, ..middle });
    let f32s = vm_host::variant(&ScheduleConfig::default().kernel, &graph("llama-tied-f32"));
    variants.push(Variant { devices: 2, ..f32s });
    variants.push(Variant { trace: Trace::Tasks, ..variants[0] });
    check(&variants);
}

/// Those of the golden folders with experts, and of published models: shapes of qwen3-30b-a3b and mixtral-8x7b in bf16; experts as codes.
#[test]
fn kernels_of_experts_compile_and_nothing_spills() {
    if !nvrtc() {
        return;
    }
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families");
    let kernel = ScheduleConfig::default().kernel;
    let golden = |name: &str| {
        let model = model::import(&families.join(name)).unwrap_or_else(|error| panic!("{error}"));
        vm_host::variant(&kernel, &model.graph)
    };
    let folders =
        ["gpt-oss-bf16", "mixtral-bf16", "olmoe-bf16", "qwen2-moe-bf16", "qwen3-moe-bf16"];
    let mut variants: Vec<Variant> = folders.map(golden).to_vec();
    let features = |all: &[Feature]| all.iter().fold(0, |mask, &f| mask | 1 << f as u32);
    let plain = variants[1];
    let shapes = [
        (128, 8, true, [2048, 4096, 6144], 1 << 8, features(&[Feature::Route])),
        (128, 4, false, [4096, 4096, 28672], 1 << 8, features(&[Feature::Route])),
    ];
    variants.extend(shapes.map(|(head_dim, group, qk_norm, widths, shares, features)| Variant {
        head_dim,
        group,
        qk_norm,
        widths,
        shares,
        features,
        ..plain
    }));
    variants.push(Variant { trace: Trace::Delays, ..variants[0] });
    let preset = |name: &str| vm_host::variant(&kernel, &model::preset(name).expect(name).graph);
    variants.extend(["gpt-oss-20b", "qwen3-30b-a3b-fp8-block"].map(preset));
    let of = |all: &[Unpack]| all.iter().fold(0, |mask, &unpack| mask | 1 << unpack as u32);
    let fp8 = variants[variants.len() - 1];
    let per_row = of(&[Unpack::None, Unpack::E4m3, Unpack::E4m3G64Row]);
    variants.push(Variant { unpack: per_row, format_shares: None, ..fp8 });
    check(&variants);
}

/// The kernels for prompt chunks: heads of no power of two, normalised wide ones, those of llama-3.2-1b, those of all codes, those of gemma-3-1b with
/// what other dense families have, and those of mixtures (qwen3-30b-a3b, gpt-oss-20b; qwen3-30b-a3b-fp8-block on several GPUs).
#[test]
fn kernels_for_prompt_chunks_compile_and_nothing_spills() {
    if !nvrtc() {
        return;
    }
    let of = |dtype, head_dim, group, qk_norm| PrefillVariant {
        dtype,
        unpack: 1 << Unpack::None as u32,
        head_dim,
        group,
        qk_norm,
        features: 0,
        parts: false,
    };
    let coded_cache = 1 << Feature::KvE4m3 as u32;
    let features = |all: &[Feature]| all.iter().fold(0, |mask, &f| mask | 1 << f as u32);
    let routes = features(&[Feature::Route]);
    let clamped = features(&[Feature::Route, Feature::Sinks, Feature::ClampedSilu]);
    let codes = |all: &[Unpack]| all.iter().fold(1, |mask, &unpack| mask | 1 << unpack as u32);
    // What dense families have, in one: norms, caps, another activation, a scaled embedding.
    let others = [Feature::Route, Feature::Sinks, Feature::ClampedSilu, Feature::KvE4m3];
    let dense = features(Feature::ALL) & !features(&others);
    let variants = [
        of(DType::Bf16, 96, 1, false),
        of(DType::Bf16, 128, 2, true),
        of(DType::Bf16, 64, 4, false),
        PrefillVariant { unpack: (1 << Unpack::ALL.len()) - 1, ..of(DType::F16, 128, 4, false) },
        PrefillVariant { features: coded_cache, ..of(DType::Bf16, 64, 4, false) },
        PrefillVariant { features: coded_cache, ..of(DType::Bf16, 128, 2, true) },
        PrefillVariant { features: routes, ..of(DType::Bf16, 128, 8, true) },
        PrefillVariant {
            features: clamped,
            unpack: codes(&[Unpack::Mxfp4]),
            ..of(DType::F16, 64, 8, false)
        },
        PrefillVariant { features: dense, ..of(DType::Bf16, 256, 4, true) },
        PrefillVariant {
            features: routes,
            parts: true,
            unpack: codes(&[Unpack::E4m3G64]),
            ..of(DType::F16, 128, 8, true)
        },
    ];
    let mut problems = Vec::new();
    std::thread::scope(|scope| {
        let built = variants.map(|variant| {
            scope.spawn(move || (variant, vm_host::compile_prefill(&variant, ARCH, None)))
        });
        for (variant, cubin) in built.map(|thread| thread.join().expect("it does not panic")) {
            let cubin = cubin.unwrap_or_else(|error| panic!("{variant:?}: {error}"));
            let kernels = vm_host::resources(&cubin.log);
            let unpacks = variant.unpack != 1 << Unpack::None as u32;
            let routes = variant.features >> Feature::Route as u32 & 1 != 0;
            let norms = [Feature::Norm, Feature::PostNorm]
                .map(|feature| variant.features >> feature as u32 & 1)
                .iter()
                .sum::<u32>() as usize;
            let count = PREFILL_KERNELS + usize::from(unpacks) + 5 * usize::from(routes) + norms;
            assert_eq!(kernels.len(), count, "{variant:?}: {kernels:?}");
            let bad = |kernel: &&Resources| kernel.spills > 0 || kernel.stack > 0;
            problems.extend(kernels.iter().filter(bad).map(|k| format!("{variant:?}: {k:?}")));
            // The assembler's message about warpgroup products (wgmma) that it serialised.
            if cubin.log.contains("serialized") {
                problems.push(format!("{variant:?}: {}", cubin.log));
            }
        }
    });
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
}
