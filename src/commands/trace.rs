//! `amk trace`: where the time of a step goes, by op, from a kernel variant in which every task notes its times.

use std::collections::BTreeMap;

use abi::{Opcode, TaskRecord};
use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use serde_json::{Value, json};
use vm_host::{BootOptions, HostError, Idle, Resident};

use crate::cli::TraceArgs;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

/// Tokens of a timed block.
const TIMED_TOKENS: u32 = 32;
/// Timed blocks; the median counts.
const BLOCKS: usize = 12;
/// Steps whose records are averaged.
const TRACED_STEPS: u32 = 24;

pub(crate) fn run(args: &TraceArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    if args.context + TIMED_TOKENS > context.kv_capacity {
        return Err(Failure::usage(format!(
            "--context {} is out of range: the key/value cache holds {}; raise --kv-capacity",
            args.context, context.kv_capacity
        )));
    }
    let mut schedules = Vec::new();
    for path in &args.config {
        schedules.push((path.to_string(), context.valid_config(Some(path))?));
    }
    if schedules.is_empty() {
        schedules.push(("shipped".to_owned(), context.best_config(None, args.context)?));
    }
    let mut idle = None;
    let mut documents = Vec::new();
    for (name, config) in &schedules {
        let program = super::program::lowered(&context, config)?;
        let document = schedule(&context, args.context, name, config, &program, &mut idle)
            .map_err(|error| Failure::missing(format!("{name}: {error}")))?;
        documents.push(document.0);
        if let Some(path) = &args.records {
            std::fs::write(path, document.1).map_err(|error| {
                Failure::usage(format!("cannot write {}: {error}", path.display()))
            })?;
        }
    }
    report::document(&json!({
        "schema": "amk.trace.v1",
        "model": context.graph().name,
        "target": context.target.name,
        "context": args.context,
        "schedules": documents,
    }))?;
    Ok(Exit::Yes)
}

/// Times one schedule, then takes it apart.
fn schedule(
    context: &Context,
    first: u32,
    name: &str,
    config: &ScheduleConfig,
    program: &Verified<Program>,
    idle: &mut Option<Idle>,
) -> Result<(Value, String), HostError> {
    let variant = vm_host::variant(&config.kernel, context.graph());
    let booted = match idle.take() {
        Some(booted) => booted,
        None => {
            let options = BootOptions {
                records: (program.task_len() + program.workers.len()) as u32 * 2,
                ..BootOptions::default()
            };
            Idle::boot(context.graph(), &*context.model.weights, program, &variant, options)?
        }
    };
    let give_back = |refused: Box<(Idle, HostError)>| refused.1;
    let mut running = booted.launch(variant, program).map_err(give_back)?;
    let tokens = search::draw_tokens(0, context.graph().vocab, (first + TIMED_TOKENS) as usize);
    let timed = &tokens[first as usize..];
    running.decode(0, 0, &tokens, 1, &[], false)?;
    let mut blocks = Vec::new();
    for _ in 0..BLOCKS {
        let done = running.decode(0, first, timed, 1, &[], false)?;
        blocks.push(done.host_us / f64::from(done.steps));
    }
    blocks.sort_by(f64::total_cmp);
    let checksum = logits_checksum(&mut running, first, timed)?;
    let traced = vm_device::Variant { trace: true, ..variant };
    let mut running = running.stop()?.launch(traced, program).map_err(give_back)?;
    running.decode(0, 0, &tokens, 1, &[], false)?;
    let done = running.decode(0, first, timed, 1, &[], false)?;
    let mut tape = Tape::default();
    for step in 0..TRACED_STEPS {
        running.decode(0, first + step, &[timed[step as usize]], 1, &[], false)?;
        tape.add(program, &running.records()?);
    }
    let table = tape.table(program, &running.records()?);
    *idle = Some(running.stop()?);
    let median = blocks[blocks.len() / 2];
    report::say(&format!(
        "{name}: {median:.1} us a token ({:.1} to {:.1}), traced {:.1}, logits {checksum}",
        blocks[0],
        blocks[blocks.len() - 1],
        done.host_us / f64::from(done.steps)
    ));
    let digest = tape.digest();
    for line in &digest {
        report::say(&line.1);
    }
    let document = json!({
        "name": name,
        "us_per_token": median,
        "blocks_us": blocks,
        "logits": checksum,
        "ops": digest.into_iter().map(|line| line.0).collect::<Vec<_>>(),
    });
    Ok((document, table))
}

/// A hash of the logits of a block: two schedules that add in the same order agree.
fn logits_checksum(running: &mut Resident, first: u32, timed: &[u32]) -> Result<String, HostError> {
    let done = running.decode(0, first, timed, 1, &[], true)?;
    let rows = running.logits(done.steps)?;
    let sum: f64 = rows.iter().flatten().map(|&v| f64::from(v)).sum();
    let top = rows.last().and_then(|row| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)));
    Ok(format!("{sum:.4e}, last best {:?}", top))
}

/// The op of a task; of a product, what it multiplies.
fn op_name(program: &Program, task: &ir::program::Task) -> String {
    match task.opcode {
        Opcode::Matvec => {
            let p: abi::MatvecParams = task.params();
            let name = &program.matrices[p.matrix as usize].name;
            name.rsplit('.').next().unwrap_or(name).to_owned()
        }
        Opcode::Nop
        | Opcode::Embed
        | Opcode::Attention
        | Opcode::AttentionMerge
        | Opcode::Sample => format!("{:?}", task.opcode).to_lowercase(),
    }
}

/// Sums of the times of a kind of task, in cycles.
#[derive(Clone, Copy, Default)]
struct Sums {
    tasks: u64,
    waited: u64,
    staged: u64,
    multiplied: u64,
    ended: u64,
    starved: u64,
}

#[derive(Default)]
struct Tape {
    /// By name of op and, for products, of matrix.
    ops: BTreeMap<String, Sums>,
    steps: u64,
    workers: u64,
    /// Nanoseconds of the clock and cycles, to tell how long a cycle is.
    span_ns: f64,
    span_cycles: f64,
}

impl Tape {
    fn add(&mut self, program: &Program, records: &[TaskRecord]) {
        self.steps += 1;
        self.workers = program.workers.len() as u64;
        let mut index = 0;
        for worker in &program.workers {
            let (first, mut cycles) = (index, 0_u64);
            for task in &worker.tasks {
                let r = records[index];
                index += 1;
                let sums = self.ops.entry(op_name(program, task)).or_default();
                sums.tasks += 1;
                sums.waited += u64::from(r.ready);
                sums.staged += u64::from(r.staged - r.ready);
                sums.multiplied += u64::from(r.multiplied - r.staged);
                sums.ended += u64::from(r.end - r.multiplied);
                sums.starved += u64::from(r.starved);
                cycles += u64::from(r.end);
            }
            let span = records[index - 1].begin - records[first].begin;
            self.span_ns += span as f64;
            self.span_cycles += (cycles - u64::from(records[index - 1].end)) as f64;
        }
        for r in &records[index..index + program.workers.len()] {
            let sums = self.ops.entry("~loader".to_owned()).or_default();
            sums.tasks += 1;
            sums.waited += u64::from(r.ready);
            sums.staged += u64::from(r.staged);
            sums.multiplied += u64::from(r.multiplied);
            sums.ended += u64::from(r.end);
        }
    }

    /// The records of one step as tab-separated text.
    fn table(&self, program: &Program, records: &[TaskRecord]) -> String {
        let ns = self.span_ns / self.span_cycles;
        let mut out =
            "worker\tlayer\top\tbegin\tready\tstaged\tmultiplied\tend\tstarved\n".to_owned();
        let mut records = records.iter();
        let start = records.clone().next().map_or(0, |r| r.begin);
        for (w, worker) in program.workers.iter().enumerate() {
            for (task, r) in worker.tasks.iter().zip(&mut records) {
                let begin = r.begin as i64 - start as i64;
                let at = |cycles: u32| begin + (f64::from(cycles) * ns) as i64;
                out += &format!(
                    "{w}\t{}\t{}\t{begin}\t{}\t{}\t{}\t{}\t{}\n",
                    task.layer,
                    op_name(program, task),
                    at(r.ready),
                    at(r.staged),
                    at(r.multiplied),
                    at(r.end),
                    (f64::from(r.starved) * ns) as i64,
                );
            }
        }
        out
    }

    /// For each op: microseconds of a step on an average worker, and a line for people.
    fn digest(&self) -> Vec<(Value, String)> {
        let us = self.span_ns / self.span_cycles / 1000.0 / (self.steps * self.workers) as f64;
        let line = |(name, s): (&String, &Sums)| {
            let [waited, staged, multiplied, ended, starved] =
                [s.waited, s.staged, s.multiplied, s.ended, s.starved].map(|c| c as f64 * us);
            let tasks = s.tasks as f64 / (self.steps * self.workers) as f64;
            let text = if name == "~loader" {
                format!(
                    "  loader: no free stage {waited:.1}, cap {staged:.1}, descriptor {multiplied:.1}, step {ended:.1} us"
                )
            } else {
                format!(
                    "  {name:16} {tasks:5.1} tasks a worker: wait {waited:6.1}, input {staged:6.1}, products {multiplied:6.1} (starved {starved:6.1}), output {ended:6.1}; sum {:6.1} us",
                    waited + staged + multiplied + ended
                )
            };
            let value = json!({
                "op": name, "tasks_per_worker": tasks, "wait_us": waited, "input_us": staged,
                "products_us": multiplied, "starved_us": starved, "output_us": ended,
            });
            (value, text)
        };
        self.ops.iter().map(line).collect()
    }
}
