//! `amk sample`: random legal schedules, gated and timed, one row each: the data that the cost model is fitted to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use ir::schedule::ScheduleConfig;
use reference_vm::eval::Evaluator;
use search::random_sample::{
    Drawn, OBSERVATION_SCHEMA, Observation, Passage, RandomSample, observe,
};
use search::{
    Conditions, Device, DeviceError, Gate, POSITIONS_MAX, Rejection, Side, Timing, draw_tokens,
};
use serde_json::{Value, json};

use crate::cli::SampleArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::Rows;
use crate::spinner::Spinner;
use crate::{conditions, interrupt, report};

/// Tokens of a timed block, as in a search.
const TIMED_TOKENS: u32 = 8;

/// The same timing effort for every schedule: eight timed blocks, and eight more between them.
const TIMING: Timing = Timing { rounds: 4, warmup: 1 };

/// Draws for each row asked for, before the space counts as exhausted.
const DRAWS_PER_ROW: usize = 20;

pub(crate) fn run(args: &SampleArgs) -> Outcome {
    let end = args.context.saturating_add(TIMED_TOKENS);
    let context = Context::with_room(&args.model.model, &args.model.place, end)?;
    context.check_timed(args.context, TIMED_TOKENS, context.kv_capacity)?;
    let Some(mut device) = context.open_process(&args.sharing)? else {
        return Err(Failure::no_gpu("a random sample is measured"));
    };
    let file = Rows::create(&args.out, "--out names a file that does not exist yet")?;
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let (gate, passage) = expected(&context, args, &kernel_id)?;
    interrupt::catch("rows", |_| {});
    let conditions = conditions::of(device.describe());
    let mut session = Session {
        args,
        context: &context,
        gate,
        passage,
        conditions,
        file,
        seen: BTreeSet::new(),
        rows: 0,
        working: Spinner::through(args.count, "schedules"),
        dropped: BTreeMap::new(),
        began: Instant::now(),
        timed: Duration::ZERO,
    };
    session.sample(&mut device)?;
    session.working.end();
    session.finish()
}

/// The gate, and the tokens at which schedules are timed. Up to the gate's own length they are the gate's tokens.
fn expected<'a>(
    context: &'a Context,
    args: &SampleArgs,
    kernel_id: search::KernelId<'a>,
) -> Result<(Gate<'a>, Passage), Failure> {
    let graph = context.graph();
    let first = args.context as usize;
    let length = first + TIMED_TOKENS as usize;
    let positions = length.min(POSITIONS_MAX);
    let _working = Spinner::on(format!("evaluating {} at {length} positions", graph.name));
    let gate = context.gate(args.seed, Some(positions), kernel_id)?;
    let tokens = draw_tokens(args.seed, graph.vocab, length);
    let last = match gate.expected().logits.get(length - 1) {
        Some(logits) => logits.clone(),
        None => {
            let rows = Evaluator::new(graph, &*context.model.weights)
                .and_then(|mut evaluator| evaluator.run_at(&tokens, &[length - 1]))
                .map_err(|error| context.unevaluated(error))?;
            rows.into_iter().next().unwrap_or_default()
        }
    };
    Ok((gate, Passage { tokens, first, last }))
}

/// The schedules from which nearby samples start: the neutral one, and those shipped for this GPU that are legal here.
fn known(context: &Context) -> Vec<ScheduleConfig> {
    let (graph, target) = (context.graph(), &context.target);
    let here = corpus::all_shipped().iter().filter(|shipped| shipped.target == target.name);
    let read = |shipped: &corpus::Shipped| {
        ir::schedule::read_config(shipped.schedule, graph, target).ok().map(|valid| *valid)
    };
    let shipped = here.filter_map(read);
    [context.neutral_config()].into_iter().chain(shipped).collect()
}

struct Session<'a> {
    args: &'a SampleArgs,
    context: &'a Context,
    gate: Gate<'a>,
    passage: Passage,
    conditions: Conditions,
    file: Rows,
    seen: BTreeSet<(String, String)>,
    rows: usize,
    /// By kind: the data to try them again.
    dropped: BTreeMap<&'static str, Vec<Value>>,
    working: Spinner,
    began: Instant,
    timed: Duration,
}

impl Session<'_> {
    /// Samples the missing schedules, groups them by kernel so that each kernel is launched once, and measures them.
    fn sample(&mut self, device: &mut dyn Device) -> Result<(), Failure> {
        let (graph, target) = (self.context.graph(), &self.context.target);
        let known = known(self.context);
        let sample = RandomSample { graph, target, known: &known, seed: self.args.seed };
        let mut draws = sample.draws().take(self.args.count.saturating_mul(DRAWS_PER_ROW));
        while self.rows < self.args.count {
            let missing = self.args.count - self.rows;
            let mut batch: Vec<_> = draws.by_ref().take(missing).collect();
            if batch.is_empty() {
                return Ok(());
            }
            batch.sort_by_key(|(_, config)| config.kernel.id());
            let mut kernels: Vec<_> = batch.iter().map(|(_, config)| config.kernel).collect();
            kernels.dedup();
            device.foresee(&kernels);
            for (drawn, config) in batch {
                if interrupt::came() {
                    return Ok(());
                }
                self.one(device, drawn, config)?;
            }
        }
        Ok(())
    }

    fn one(
        &mut self,
        device: &mut dyn Device,
        drawn: Drawn,
        config: ScheduleConfig,
    ) -> Result<(), Failure> {
        match self.measure(device, &drawn, config) {
            Ok(None) => Ok(()),
            Ok(Some(row)) => self.record(&row),
            Err(Rejection::Failed(error @ DeviceError::Unavailable { .. })) => {
                Err(Failure::missing(format!(
                    "{error}; {} finished rows are in {}",
                    self.rows,
                    self.args.out.display()
                )))
            }
            Err(dropped) => {
                let kind = match dropped {
                    Rejection::Rejected(_) | Rejection::Unloadable(_) => "over a limit",
                    Rejection::Failed(_) => "failed on the device",
                    Rejection::BelowBound(_) => "below the bound",
                    Rejection::Unrepeatable(_) => "unrepeatable",
                    Rejection::Unrunnable(_)
                    | Rejection::Unevaluated(_)
                    | Rejection::Halted(_)
                    | Rejection::Sampled { .. }
                    | Rejection::Disagreed { .. } => "disagreed",
                };
                let reason = dropped.to_string();
                let line = format!("  {kind}: {}: {reason}", config.id());
                report::say(&line);
                let document = json!({"reason": reason, "drawn": drawn, "config": config});
                self.dropped.entry(kind).or_default().push(document);
                Ok(())
            }
        }
    }

    /// A row, or nothing if the same program and kernel were measured before.
    fn measure(
        &mut self,
        device: &mut dyn Device,
        drawn: &Drawn,
        config: ScheduleConfig,
    ) -> Result<Option<Observation>, Rejection> {
        let candidate = self.gate.lower(&config)?;
        let (program_id, kernel_id) = (candidate.program_id.clone(), candidate.kernel_id.clone());
        if !self.seen.insert((program_id.clone(), kernel_id.clone())) {
            return Ok(None);
        }
        let began = Instant::now();
        let (gate, passage, seed) = (&mut self.gate, &self.passage, self.args.seed);
        let timed = observe(gate, device, candidate, passage, TIMING, seed)?;
        self.timed += began.elapsed();
        let interval = timed.latency.ci_us();
        Ok(Some(Observation {
            schema: OBSERVATION_SCHEMA.to_owned(),
            model: self.args.model.model.clone(),
            target: self.context.target.name.clone(),
            conditions: self.conditions.clone(),
            kv_capacity: self.context.kv_capacity,
            context: self.args.context,
            timed_tokens: TIMED_TOKENS,
            drawn: drawn.clone(),
            config,
            program_id,
            kernel_id,
            median_us: timed.latency.median_us(),
            ci_us: [interval.low, interval.high],
            blocks_us: timed.samples.of(Side::Candidate),
            bound_us: timed.bound_us,
            bandwidth: device.describe().bandwidth.unwrap_or(0.0),
        }))
    }

    /// Writes a row; it is flushed before the next schedule runs.
    fn record(&mut self, row: &Observation) -> Result<(), Failure> {
        self.file.write(row)?;
        self.rows += 1;
        let drawn = match &row.drawn {
            Drawn::Wide => "wide".to_owned(),
            Drawn::Near { edits, .. } => format!("near, {edits} edits"),
        };
        let line = format!(
            "  {:4} {:9.1} us ({:.1} to {:.1}), {drawn}",
            self.rows, row.median_us, row.ci_us[0], row.ci_us[1]
        );
        report::say(&line);
        self.working.done();
        Ok(())
    }

    fn finish(&self) -> Outcome {
        let seconds = self.began.elapsed().as_secs_f64();
        report::say(&format!(
            "{} schedules in {seconds:.1} s, of which gating and timing {:.1} s; rows in {}",
            self.rows,
            self.timed.as_secs_f64(),
            self.args.out.display()
        ));
        report::document(&Drew {
            schema: "amk.sample.v1",
            model: &self.args.model.model,
            target: &self.context.target.name,
            context: self.args.context,
            seed: self.args.seed,
            rows: self.rows,
            out: &self.args.out,
            dropped: &self.dropped,
            seconds,
        })?;
        if interrupt::came() {
            return Ok(Exit::Interrupted);
        }
        // A limit is not a fault; a schedule that disagrees or hangs is a bug of amk.
        let faults = self.dropped.keys().any(|kind| *kind != "over a limit");
        Ok(if faults { Exit::No } else { Exit::Yes })
    }
}

#[derive(serde::Serialize)]
pub(super) struct Drew<'a> {
    pub(super) schema: &'static str,
    pub(super) model: &'a str,
    pub(super) target: &'a str,
    pub(super) context: u32,
    pub(super) seed: u64,
    pub(super) rows: usize,
    pub(super) out: &'a Path,
    /// Schedules that gave no row, by the reason.
    pub(super) dropped: &'a BTreeMap<&'static str, Vec<Value>>,
    pub(super) seconds: f64,
}
