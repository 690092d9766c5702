//! `amk grid record`: measures every point of a grid. All cores but one lower points and run them on
//! the reference VM ahead of the device, so that it seldom waits. Points of one kernel follow each other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use ir::schedule::ScheduleConfig;
use rand::SeedableRng;
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom;
use reference_vm::compare::{Agreement, Reference};
use search::measured_grid::{Answer, Grid, MEASURED_GRID_SCHEMA, Probe, Space, Terms, prepare};
use search::{Candidate, Device, DeviceInfo, Gate, KernelId, LatencyKind, POSITIONS_MAX};
use serde_json::json;

use crate::cli::RecordArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{conditions, files, interrupt, report};

mod file;

use file::Recording;

/// Tokens of a timed block, as in a search.
pub(super) const TIMED_TOKENS: u32 = 8;

const GRID_BYTES_MAX: u64 = 16 << 20;

/// Points after which the neutral schedule is timed again.
const AGAIN_EVERY: usize = 100;

/// Points that may be ready and wait for the device.
const READY_MAX: usize = 32;

/// The point number of the neutral schedule, which need not be in the grid.
const ANCHOR: u32 = u32::MAX;

/// A point that is ready for the device, or its answer if it failed before.
type Ready = Result<(Candidate, Agreement<Reference>), Answer>;

pub(crate) fn run(args: &RecordArgs) -> Outcome {
    args.model.place.kv.only_f16("a measured grid")?;
    let context = Context::new(&args.model)?;
    let most = context.kv_capacity.min(POSITIONS_MAX as u32);
    context.check_timed(args.context, TIMED_TOKENS, most)?;
    if args.rounds == 0 {
        return Err(Failure::usage("--rounds 0 times nothing: at least 1"));
    }
    let grid: Grid = files::read_json(&args.grid, GRID_BYTES_MAX)?;
    let space = grid.space(&context.neutral_config()).map_err(|e| Failure::usage(e.to_string()))?;
    let device = context.open_process(&args.sharing)?;
    let terms = terms(args, &context, grid, device.as_ref().map(Device::describe));
    let recording = Recording::open(&args.out, &terms, args.resume)?;
    interrupt::catch("rows", |_| {});
    let mut session = Session {
        args,
        context: &context,
        space,
        recording,
        fresh: 0,
        began: Instant::now(),
        working: None,
    };
    let todo = session.legal()?;
    session.working = Some(Spinner::through(todo.iter().map(Vec::len).sum(), "points"));
    match device {
        Some(mut device) => session.measure(&mut device, &todo)?,
        None => session.predict(&todo)?,
    }
    session.working = None;
    session.finish(&terms)
}

fn terms(args: &RecordArgs, context: &Context, grid: Grid, info: Option<DeviceInfo>) -> Terms {
    let measured = info.is_some();
    Terms {
        schema: MEASURED_GRID_SCHEMA.to_owned(),
        latency_kind: if measured { LatencyKind::MeasuredGpu } else { LatencyKind::Predicted },
        model: args.model.model.clone(),
        graph_id: context.graph().id(),
        target: context.target.name.clone(),
        bandwidth: info.as_ref().and_then(|info| info.bandwidth),
        conditions: info.map(conditions::of),
        kv_capacity: context.kv_capacity,
        context: args.context,
        timed_tokens: TIMED_TOKENS,
        rounds: args.rounds,
        seed: args.seed,
        grid,
        shard: [0, 1],
        migrated_from: None,
    }
}

struct Session<'a> {
    args: &'a RecordArgs,
    context: &'a Context,
    space: Space,
    recording: Recording,
    /// Rows of this run that needed lowering.
    fresh: usize,
    began: Instant,
    working: Option<Spinner>,
}

impl Session<'_> {
    /// Records the illegal points and returns the others in measuring order: kernel by kernel, shuffled within each, so
    /// that an interrupted run has a random sample of each kernel. Of `--points`, those that a run before drew too.
    fn legal(&mut self) -> Result<Vec<Vec<u32>>, Failure> {
        let (graph, target) = (self.context.graph(), &self.context.target);
        let mut legal = Vec::new();
        for point in 0..self.space.points() {
            match ir::schedule::validate(self.space.config(point), graph, target) {
                Ok(_) => legal.push(point),
                Err(_) if self.recording.done.contains_key(&point) => {}
                Err(violations) => self.recording.row(point, Answer::illegal(&violations))?,
            }
        }
        legal.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(self.args.seed));
        legal.truncate(self.args.points.unwrap_or(usize::MAX));
        legal.retain(|point| !self.recording.done.contains_key(point));
        let mut by_kernel: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for point in legal {
            by_kernel.entry(self.space.config(point).kernel.id()).or_default().push(point);
        }
        Ok(by_kernel.into_values().collect())
    }

    fn measure(&mut self, device: &mut dyn Device, todo: &[Vec<u32>]) -> Result<(), Failure> {
        let (context, args) = (self.context, self.args);
        let kernels = todo.iter().map(|points| self.space.config(points[0]).kernel);
        device.foresee(&kernels.collect::<Vec<_>>());
        let kernel_id = |kernel: &_| context.kernel_id(kernel);
        let gate = gate(args, context, &kernel_id)?;
        let mut probe = probe(args, context, &gate)?;
        self.anchor(&mut probe, device)?;
        for points in todo {
            let configs: Vec<_> =
                points.iter().map(|&point| (point, self.space.config(point))).collect();
            prepared(&gate, &configs, |point, ready| match ready {
                Ok((candidate, reference)) => {
                    let key = (candidate.program_id.clone(), candidate.kernel_id.clone());
                    if let Some(&twin) = self.recording.by_ids.get(&key) {
                        return self.record(point, Answer::Twin(twin));
                    }
                    let lost = |e| Failure::missing(format!("{e}; --resume goes on"));
                    let answer = probe.measure(device, &candidate, reference).map_err(lost)?;
                    self.record(point, answer)?;
                    if self.fresh.is_multiple_of(AGAIN_EVERY) {
                        self.anchor(&mut probe, device)?;
                    }
                    Ok(())
                }
                Err(answer) => self.record(point, answer),
            })?;
        }
        self.anchor(&mut probe, device)
    }

    /// Times the neutral schedule again, which shows the drift.
    fn anchor(
        &mut self,
        probe: &mut Probe<'_, '_>,
        device: &mut dyn Device,
    ) -> Result<(), Failure> {
        let lost = |e| Failure::missing(format!("{e}; --resume goes on"));
        let answer = probe.anchor(device).map_err(lost)?;
        let Answer::Measured(measured) = &answer else {
            return Err(Failure::refused(format!("the neutral schedule: {answer:?}")));
        };
        report::say(&format!("  neutral schedule {:.1} us", measured.us));
        self.recording.row(ANCHOR, Answer::Again(measured.clone()))
    }

    /// Records the cost model's predictions if there is no device.
    fn predict(&mut self, todo: &[Vec<u32>]) -> Result<(), Failure> {
        let context = self.context;
        let position = self.args.context + TIMED_TOKENS / 2;
        for &point in todo.iter().flatten() {
            if interrupt::came() {
                return Ok(());
            }
            let config = self.space.config(point);
            let Ok(valid) = ir::schedule::validate(config, context.graph(), &context.target) else {
                continue;
            };
            let options = context.lower_options();
            let answer = match lower::lower(&valid, context.graph(), &context.target, options) {
                Err(error) => {
                    Answer::Failed { outcome: "unloadable".to_owned(), why: error.to_string() }
                }
                Ok(program) => {
                    let ids = (program.id(), context.kernel_id(&config.kernel));
                    match self.recording.by_ids.get(&ids) {
                        Some(&twin) => Answer::Twin(twin),
                        None => Answer::Predicted {
                            us: lower::predict(&program, &config.kernel, &context.target, position)
                                .latency_us,
                            program_id: ids.0,
                            kernel_id: ids.1,
                        },
                    }
                }
            };
            self.record(point, answer)?;
        }
        Ok(())
    }

    fn record(&mut self, point: u32, answer: Answer) -> Result<(), Failure> {
        if let Answer::Failed { outcome, why } = &answer {
            report::say(&format!("  point {point}: {outcome}: {why}"));
        }
        if let Some(working) = &self.working {
            working.done();
        }
        self.fresh += 1;
        if self.fresh.is_multiple_of(AGAIN_EVERY) {
            let seconds = self.began.elapsed().as_secs_f64();
            report::say(&format!("  {} points in {seconds:.1} s", self.fresh));
        }
        self.recording.row(point, answer)
    }

    fn finish(&self, terms: &Terms) -> Outcome {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for answer in self.recording.done.values() {
            let kind = match answer {
                Answer::Illegal(rules) => format!("illegal {}", rules.join(" ")),
                Answer::Twin(_) => "twin".to_owned(),
                Answer::Measured(_) | Answer::Again(_) => "measured".to_owned(),
                Answer::Predicted { .. } => "predicted".to_owned(),
                Answer::Failed { outcome, .. } => outcome.clone(),
            };
            *counts.entry(kind).or_default() += 1;
        }
        let all = self.space.points() as usize;
        let illegal = |answer: &&Answer| matches!(answer, Answer::Illegal(_));
        let illegal = self.recording.done.values().filter(illegal).count();
        let wanted = self.args.points.map_or(all, |points| all.min(illegal.saturating_add(points)));
        let seconds = self.began.elapsed().as_secs_f64();
        report::say(&format!(
            "{} of {wanted} points are in {}, {} of them new, in {seconds:.1} s",
            self.recording.done.len(),
            self.args.out.display(),
            self.fresh
        ));
        report::document(&json!({
            "schema": "amk.grid_record.v1",
            "model": terms.model,
            "target": terms.target,
            "latency_kind": terms.latency_kind,
            "points": wanted,
            "answers": counts,
            "new": self.fresh,
            "seconds": seconds,
            "out": self.args.out,
        }))?;
        let all = self.recording.done.len() == wanted;
        Ok(if all { Exit::Yes } else { Exit::Interrupted })
    }
}

/// The gate of the timed positions, which are the last ones.
fn gate<'a>(
    args: &RecordArgs,
    context: &'a Context,
    kernel_id: KernelId<'a>,
) -> Result<Gate<'a>, Failure> {
    let positions = (args.context + TIMED_TOKENS) as usize;
    let name = &context.graph().name;
    let _working = Spinner::on(format!("evaluating {name} at {positions} positions"));
    context.gate(args.seed, Some(positions), kernel_id)
}

/// Measures points after the neutral schedule, which fills the context.
fn probe<'g, 'a>(
    args: &RecordArgs,
    context: &Context,
    gate: &'g Gate<'a>,
) -> Result<Probe<'g, 'a>, Failure> {
    let anchor = prepare(gate, &context.neutral_config())
        .map_err(|answer| Failure::refused(format!("the neutral schedule: {answer:?}")))?;
    let first = args.context as usize;
    let timed = first..first + TIMED_TOKENS as usize;
    Ok(Probe::new(gate, anchor, timed, args.rounds, args.seed))
}

/// Prepares points on all cores but one, and hands each over as it is ready, until all are done or Ctrl-C came.
pub(super) fn prepared(
    gate: &Gate<'_>,
    points: &[(u32, ScheduleConfig)],
    mut take: impl FnMut(u32, Ready) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let next = AtomicUsize::new(0);
    let (send, receive) = mpsc::sync_channel::<(usize, Ready)>(READY_MAX);
    let work = |send: mpsc::SyncSender<(usize, Ready)>| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some((_, config)) = points.get(index) else { return };
            if interrupt::came() || send.send((index, prepare(gate, config))).is_err() {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..workers() {
            // Each thread has a pool of one thread: several programs at once use cores better than one program on all of them.
            let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(1).build() else {
                continue;
            };
            let (send, work) = (send.clone(), &work);
            scope.spawn(move || pool.install(|| work(send)));
        }
        drop(send);
        // Dropped before the threads are joined, so that blocked senders end.
        let receive = receive;
        for (index, ready) in &receive {
            take(points[index].0, ready)?;
            if interrupt::came() {
                break;
            }
        }
        Ok(())
    })
}

/// The number of threads that prepare points: one core is left for the device's driver.
fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).saturating_sub(1).max(1)
}
