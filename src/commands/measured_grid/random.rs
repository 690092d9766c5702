//! Random schedules instead of the points of a grid: the rows that the cost model is fitted to.

use std::collections::BTreeSet;
use std::time::Instant;

use ir::schedule::ScheduleConfig;
use search::measured_grid::{Answer, Measured};
use search::random_sample::{Drawn, OBSERVATION_SCHEMA, Observation, RandomSample};
use search::{Conditions, Device, assess};
use serde_json::{Value, json};

use super::{TIMED_TOKENS, gate, prepared, probe};
use crate::cli::RecordArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::files::Rows;
use crate::spinner::Spinner;
use crate::{conditions, interrupt, report};

/// Draws for each row asked for, before the space counts as exhausted.
const DRAWS_PER_ROW: usize = 20;

/// What is written to the file, and what was dropped.
struct Sample<'a> {
    args: &'a RecordArgs,
    context: &'a Context,
    conditions: Conditions,
    bandwidth: f64,
    file: Rows,
    /// Ids of the programs and kernels that were drawn.
    seen: BTreeSet<(String, String)>,
    rows: usize,
    /// Schedules that gave no row, to try them again.
    dropped: Vec<Value>,
    working: Spinner,
}

pub(super) fn run(args: &RecordArgs, context: &Context, count: usize) -> Outcome {
    let Some(mut device) = context.open_process(&args.sharing)? else {
        return Err(Failure::no_gpu("--random is for what is measured"));
    };
    let file = Rows::create(&args.out, "--out names a file that does not exist yet")?;
    interrupt::catch("rows", |_| {});
    let began = Instant::now();
    let info = device.describe();
    let mut sample = Sample {
        args,
        context,
        bandwidth: info.bandwidth.unwrap_or(0.0),
        conditions: conditions::of(info),
        file,
        seen: BTreeSet::new(),
        rows: 0,
        dropped: Vec::new(),
        working: Spinner::through(count, "schedules"),
    };
    sample.measure(&mut device, count)?;
    sample.working.end();
    sample.finish(began.elapsed().as_secs_f64())
}

/// The schedules from which nearby draws start: the neutral one, and those shipped for this GPU that are legal here.
fn known(context: &Context) -> Vec<ScheduleConfig> {
    let (graph, target) = (context.graph(), &context.target);
    let here = corpus::all_shipped().iter().filter(|shipped| shipped.target == target.name);
    let read = |shipped: &corpus::Shipped| {
        ir::schedule::read_config(shipped.schedule, graph, target).ok().map(|valid| *valid)
    };
    let shipped = here.filter_map(read);
    [context.neutral_config()].into_iter().chain(shipped).collect()
}

impl Sample<'_> {
    /// Draws the missing schedules, groups them by kernel so that each kernel is launched once, and measures them.
    fn measure(&mut self, device: &mut dyn Device, count: usize) -> Result<(), Failure> {
        let (args, context) = (self.args, self.context);
        let kernel_id = |kernel: &_| context.kernel_id(kernel);
        let gate = gate(args, context, &kernel_id)?;
        let mut probe = probe(args, context, &gate)?;
        let (graph, target, known) = (context.graph(), &context.target, known(context));
        let draws = RandomSample { graph, target, known: &known, seed: args.seed };
        let mut draws = draws.draws().take(count.saturating_mul(DRAWS_PER_ROW));
        while self.rows < count && !interrupt::came() {
            let mut batch: Vec<_> = draws.by_ref().take(count - self.rows).collect();
            if batch.is_empty() {
                return Ok(());
            }
            batch.sort_by_key(|(_, config)| config.kernel.id());
            let mut kernels: Vec<_> = batch.iter().map(|(_, config)| config.kernel).collect();
            kernels.dedup();
            device.foresee(&kernels);
            prepared(&gate, batch, |drawn, config, ready| {
                let (candidate, reference) = match ready {
                    Ok(ready) => ready,
                    Err(answer) => return self.record(drawn, config, answer, f64::NAN),
                };
                let ids = (candidate.program_id.clone(), candidate.kernel_id.clone());
                if !self.seen.insert(ids) {
                    return Ok(());
                }
                let lost = |error| {
                    let (rows, out) = (self.rows, self.args.out.display());
                    Failure::missing(format!("{error}; {rows} finished rows are in {out}"))
                };
                let answer = probe.measure(device, &candidate, reference).map_err(lost)?;
                let middle = args.context + TIMED_TOKENS / 2;
                let bounds = assess::bounds(&gate, device, &candidate, middle);
                self.record(drawn, config, answer, bounds.bound_us)
            })?;
        }
        Ok(())
    }

    /// Writes a row; it is flushed before the next schedule runs. A schedule without a latency is kept for the answer.
    fn record(
        &mut self,
        drawn: Drawn,
        config: ScheduleConfig,
        answer: Answer,
        bound_us: f64,
    ) -> Result<(), Failure> {
        let Answer::Measured(measured) = answer else {
            report::say(&format!("  {}: {answer:?}", config.id()));
            self.dropped.push(json!({"answer": answer, "drawn": drawn, "config": config}));
            return Ok(());
        };
        self.rows += 1;
        let us = measured.us;
        report::say(&format!("  {:4} {us:9.1} us, {drawn:?}", self.rows));
        self.working.done();
        let row = self.row(drawn, config, measured, bound_us);
        self.file.write(&row)
    }

    fn row(
        &self,
        drawn: Drawn,
        config: ScheduleConfig,
        measured: Measured,
        bound_us: f64,
    ) -> Observation {
        let interval = search::median_interval(&measured.blocks_us, self.args.seed);
        Observation {
            schema: OBSERVATION_SCHEMA.to_owned(),
            model: self.args.model.model.clone(),
            target: self.context.target.name.clone(),
            conditions: self.conditions.clone(),
            kv_capacity: self.context.kv_capacity,
            context: self.args.context,
            timed_tokens: TIMED_TOKENS,
            drawn,
            config,
            program_id: measured.program_id,
            kernel_id: measured.kernel_id,
            median_us: measured.us,
            ci_us: [interval.low, interval.high],
            blocks_us: measured.blocks_us,
            bound_us,
            bandwidth: self.bandwidth,
        }
    }

    fn finish(&self, seconds: f64) -> Outcome {
        let out = self.args.out.display();
        report::say(&format!("{} schedules in {seconds:.1} s; rows in {out}", self.rows));
        report::document(&json!({
            "schema": "amk.grid_record.v1",
            "model": self.args.model.model,
            "target": self.context.target.name,
            "latency_kind": search::LatencyKind::MeasuredGpu,
            "points": self.args.random,
            "answers": {"measured": self.rows},
            "new": self.rows,
            "seconds": seconds,
            "out": self.args.out,
            "dropped": self.dropped,
        }))?;
        if interrupt::came() {
            return Ok(Exit::Interrupted);
        }
        // A limit is not a fault; a schedule that disagrees or hangs is a bug of amk.
        let fault = |row: &Value| row["answer"]["failed"]["outcome"] != "unloadable";
        Ok(if self.dropped.iter().any(fault) { Exit::No } else { Exit::Yes })
    }
}
