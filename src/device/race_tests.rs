//! A sum of floats in an order that is not fixed, planted in the kernel: a search rejects it and says that no two tasks
//! race, so the fault is in what runs them. The kernel as it is gives the same bits 1000 times.
//!
//! Without a device the kernel is only compiled; with `AMK_REQUIRE_DEVICE=1` that is a failure. This binary is its own
//! device process, as in [`super::hang_tests`].

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use remote::{Limits, Remote, Room};
use search::{DivergenceClass, Rejection, Timing, assess, device_positions};

use super::LOGITS_ROWS;
use super::hang_tests::{changed_kernel, serve_gpu};
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;

/// Set in a device process.
const IS_DEVICE: &str = "AMK_TEST_RACE";

/// The test in which this binary is a device process.
const PARTS: &str =
    "device::race_tests::a_sum_in_no_fixed_order_is_named_and_the_kernel_as_it_is_repeats";

/// Its rows are sums over all warps: those of the toy over two, in which the order makes no difference.
const MODEL: &str = "smollm2-135m";

/// Runs of the kernel as it is that must not differ.
const RUNS: usize = 1000;

const TOKENS: [u32; 16] = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597];

/// Where the sums of the warps are added up, and the same forwards or backwards by the clock.
const SUM: [&str; 2] = [
    "  __device__ __forceinline__ float row_sum() const { return sum(row); }\n",
    "  __device__ __forceinline__ float row_sum() const {
    uint32_t clock;
    asm volatile(\"mov.u32 %0, %%clock;\" : \"=r\"(clock));
    float v = 0.f;
#pragma unroll
    for (int i = AMK_WARPS / 4 - 1; i >= 0; --i) {
      v = (((v + row[i].w) + row[i].z) + row[i].y) + row[i].x;
    }
    return __popc(clock) & 1 ? v : sum(row);
  }\n",
];

fn planted(source: &vm_device::Source) -> String {
    source.text.replace(SUM[0], SUM[1])
}

fn context() -> Context {
    let place =
        PlaceArgs { device: DeviceChoice::Cuda, kv_capacity: Some(256), ..PlaceArgs::default() };
    Context::load(MODEL, &place).unwrap_or_else(|failure| panic!("{}", failure.message))
}

/// Runs this binary as a device process, or only compiles the kernel.
fn be_a_part(device: bool) {
    let context = context();
    if !device {
        let variant = context.variant(&context.default_config().kernel, 1);
        let built = vm_host::compile(&variant, &context.target.arch, None);
        return drop(built.unwrap_or_else(|error| panic!("{error}")));
    }
    serve_gpu(&context, |gpu| gpu);
}

/// This binary as a part of the test, with the kernel of this folder.
fn part(kernel: Option<&Path>, device: bool) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", PARTS, "--nocapture", "--test-threads=1"]);
    command.env(IS_DEVICE, u8::from(device).to_string());
    command.envs(kernel.map(|folder| ("AMK_KERNEL_DIR", folder)));
    command
}

fn open<'a>(context: &Context, kernel: Option<&'a Path>) -> Remote<'a> {
    let graph = context.graph();
    let limits = Limits::for_weights(graph.weight_bytes() as u64);
    let room = Room { rows: LOGITS_ROWS as usize, vocab: graph.vocab as usize };
    Remote::open(Box::new(move || part(kernel, true)), limits, room)
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn a_sum_in_no_fixed_order_is_named_and_the_kernel_as_it_is_repeats() {
    if let Ok(device) = std::env::var(IS_DEVICE) {
        return be_a_part(device == "1");
    }
    let folder = changed_kernel(planted);
    if let Err(error) = vm_host::Card::default().info() {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required: {error}");
        return compiles(folder.path());
    }
    let context = context();
    let config = context.default_config();
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let gate = context.gate(0, Some(device_positions(context.graph())), &kernel_id);
    let mut gate = gate.unwrap_or_else(|failure| panic!("{}", failure.message));
    let timing = Timing { rounds: 1, warmup: 1 };
    let mut judge =
        |device: &mut Remote<'_>| assess::evaluate(&mut gate, Some(device), &config, timing, 0);

    let (verdict, outcome) = judge(&mut open(&context, Some(folder.path())));
    assert!(matches!(outcome, Err(Rejection::Unrepeatable(_))), "{verdict:?}");
    let at = verdict.first_divergence.as_ref().expect("where they differ");
    assert_eq!(at.class, DivergenceClass::Race, "{at:?}");
    assert!(at.unordered.is_empty() && at.detail.contains("in what runs it"), "{at:?}");
    eprintln!("{}", at.detail);

    let mut device = open(&context, None);
    let (verdict, outcome) = judge(&mut device);
    let program = match outcome {
        Ok(assessed) => assessed.candidate.program.clone(),
        Err(why) => panic!("{why}: {verdict:?}"),
    };
    same_bits(&mut device, &program, &config.kernel);
}

fn same_bits(
    device: &mut Remote<'_>,
    program: &Arc<ir::program::Verified<ir::program::Program>>,
    kernel: &ir::KernelConfig,
) {
    use search::Device as _;
    let handle = device.prepare(program, kernel).unwrap_or_else(|error| panic!("{error}"));
    let mut bits = || {
        let ran = device.run(handle, &TOKENS, 0).unwrap_or_else(|error| panic!("{error}"));
        ran.logits.concat().into_iter().map(f32::to_bits).collect::<Vec<u32>>()
    };
    let first = bits();
    let differ = (1..RUNS).filter(|_| bits() != first).count();
    assert_eq!(differ, 0, "of {RUNS} runs");
    eprintln!("{differ} of {RUNS} runs differ");
}

/// Compiles the planted kernel, if there is a compiler.
fn compiles(folder: &Path) {
    if let Err(error) = vm_host::nvrtc_version() {
        let required = std::env::var_os("AMK_REQUIRE_NVRTC").is_some();
        assert!(!required, "NVRTC is required: {error}");
        eprintln!("skipped: {error}");
        return;
    }
    let compiled = part(Some(folder), false).output().expect("it runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

#[test]
fn the_planted_sum_is_in_the_kernel_once() {
    let changed: Vec<_> =
        vm_device::SOURCES.iter().filter(|source| planted(source) != source.text).collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0].name, "cuda/unit_products.cuh");
    assert_eq!(changed[0].text.matches(SUM[0]).count(), 1);
}
