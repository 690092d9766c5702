//! Measures the cost of a device process per trial: sending a program and returning logits.
//!
//! ```text
//! cargo run --release -p remote --example handover_cost -- llama-3.2-1b
//! ```
//!
//! The device does nothing, so all of the time is that of the two processes.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::{KernelConfig, Target};
use remote::{Board, Limits, Remote, Room, Served, Watch, serve};
use search::{Device, DeviceError, DeviceInfo, Handle, Plan};

/// Environment variable that is set in the device process.
const CHILD: &str = "AMK_EXAMPLE_DEVICE";

/// Positions of the gate's first stage, and of the whole gate.
const ROWS: [usize; 2] = [24, 144];

/// Repetitions of each measurement; the median counts.
const REPEATS: usize = 9;

/// A device that answers at once. It writes the rows, as a download would.
struct Nothing;

impl Served for Nothing {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: "nothing".into(),
            bandwidth: None,
            cache_bytes: 0,
            ..DeviceInfo::default()
        }
    }

    fn prepare(
        &mut self,
        _program: &Arc<Verified<Program>>,
        _kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        Ok(Handle(0))
    }

    fn run(
        &mut self,
        _program: Handle,
        tokens: &[u32],
        first: usize,
        logits: &mut [f32],
    ) -> Result<Vec<u32>, DeviceError> {
        logits.fill(tokens.len() as f32);
        Ok(vec![0; tokens.len() - first])
    }

    fn time(
        &mut self,
        _programs: [Handle; 2],
        _plan: &Plan<'_>,
        _last: &mut [f32],
    ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
        Ok((Vec::new(), [0; 2]))
    }

    fn release(&mut self, _program: Handle) {}
}

impl Watch for Nothing {
    fn look(&mut self, _board: &Board) {}

    fn leave(&mut self) {}
}

/// The median of several times, in milliseconds.
fn median(mut run: impl FnMut() -> Duration) -> f64 {
    let mut times: Vec<Duration> = (0..REPEATS).map(|_| run()).collect();
    times.sort();
    times[REPEATS / 2].as_secs_f64() * 1e3
}

fn timed<T>(run: impl FnOnce() -> T) -> Duration {
    let began = Instant::now();
    std::hint::black_box(run());
    began.elapsed()
}

fn main() {
    if std::env::var_os(CHILD).is_some() {
        return serve(Nothing, |_| Ok(Nothing)).expect("a parent");
    }
    let name = std::env::args().nth(1).unwrap_or_else(|| "llama-3.2-1b".to_owned());
    let model = model::preset(&name).expect("a preset");
    let target = Target::by_name("h200").expect("a known target");
    let config = ir::schedule::neutral_config(&model.graph, &target);
    let valid =
        ir::schedule::validate(config, &model.graph, &target).expect("the default is legal");
    let lowered = lower::lower(&valid, &model.graph, &target, lower::Options { kv_capacity: 4096 });
    let program = lowered.expect("it lowers");
    let bytes = ir::text::save(&program);
    println!("{name}: {} tasks, {:.2} MB as saved", program.task_len(), bytes.len() as f64 / 1e6);
    println!("  save {:.2} ms", median(|| timed(|| ir::text::save(&program))));
    println!("  load {:.2} ms", median(|| timed(|| ir::text::load(&bytes))));
    println!("  verify {:.2} ms", median(|| timed(|| ir::program::check(&program))));
    let launcher = || {
        let mut command = Command::new("/proc/self/exe");
        command.env(CHILD, "1");
        command
    };
    let room = Room { rows: 160, vocab: model.graph.vocab as usize };
    let started = Instant::now();
    let mut device =
        Remote::open(Box::new(launcher), Limits::default(), room).expect("a device process");
    println!("  a process started in {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
    let mut last = Handle(0);
    let prepared = median(|| {
        let program = Arc::new(program.clone());
        timed(|| last = device.prepare(&program, &config.kernel).expect("it is handed over"))
    });
    println!("  prepare, there and back {prepared:.2} ms");
    for rows in ROWS {
        let tokens = vec![1; rows];
        let run = median(|| timed(|| device.run(last, &tokens, 0).expect("it runs")));
        let megabytes = (rows * room.vocab * 4) as f64 / 1e6;
        println!("  {rows} rows of logits ({megabytes:.0} MB), there and back {run:.2} ms");
    }
}
