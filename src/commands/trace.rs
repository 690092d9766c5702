//! `amk trace`: where the time of a step goes. On a GPU from a kernel variant in which every task records timestamps,
//! else in the virtual time of the cost model; the records are the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};

use abi::{LoaderRecord, TaskRecord};
use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use lower::{Predictor, Rates};
use search::Timing;
use serde_json::{Value, json};
use trace::counters::{self, Counter};
use trace::{Clock, Path, Timeline, digest, perfetto, timeline};
use vm_host::{BootOptions, HostError, Idle, Resident};

use super::bench::rounds;
use crate::cli::{ConfigArgs, TraceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::spinner::Spinner;
use crate::{files, report};

const TIMED_TOKENS: u32 = 32;
/// Rounds of four timed blocks; the median counts.
const TIMING: Timing = Timing { rounds: 3, warmup: 0 };
/// Steps whose records are averaged.
const TRACED_STEPS: u32 = 24;

pub(crate) fn run(args: &TraceArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    if args.context.saturating_add(TIMED_TOKENS) > context.kv_capacity {
        return Err(Failure::usage(format!(
            "--context {} is out of range: the key/value cache holds {}; raise --kv-capacity",
            args.context, context.kv_capacity
        )));
    }
    let mut schedules = Vec::new();
    for path in &args.config {
        let given = ConfigArgs { config: Some(path.clone()), schedule: None };
        let chosen = choose(&context, &given, args.context, Auto::Reproducible)?;
        schedules.push((path.to_string(), chosen));
    }
    if schedules.is_empty() {
        let given = ConfigArgs { config: None, schedule: args.schedule };
        let chosen = choose(&context, &given, args.context, Auto::Reproducible)?;
        schedules.push((chosen.source.kind.to_owned(), chosen));
    }
    let measured = context.has_device()?;
    let mut idle = None;
    let mut documents = Vec::new();
    for (name, Chosen { config, source }) in &schedules {
        let working = Spinner::on(format!("tracing schedule {name}"));
        let program = context.lowered(config)?;
        let traced = if measured {
            schedule(&context, args.context, name, config, &program, &mut idle)
                .map_err(|error| Failure::missing(format!("{name}: {error}")))?
        } else {
            simulated(&context, args.context, name, config, &program)
        };
        drop(working);
        let kind = if measured { "measured" } else { "predicted" };
        let title = format!(
            "{} on {} ({kind}), {} tokens of context, schedule {name}",
            context.graph().name,
            context.target.name,
            args.context
        );
        let mut document = traced.keep(args, &title)?;
        document["schedule_source"] = json!(source);
        documents.push(document);
    }
    report::document(&json!({
        "schema": "amk.trace.v2",
        "model": context.graph().name,
        "target": context.target.name,
        "context": args.context,
        "latency_kind": if measured { "measured-gpu" } else { "predicted" },
        "schedules": documents,
    }))?;
    Ok(Exit::Yes)
}

struct Traced {
    document: Value,
    timeline: Timeline,
    counters: Vec<Counter>,
}

impl Traced {
    /// Writes the requested files; returns the document with the sums.
    fn keep(mut self, args: &TraceArgs, title: &str) -> Result<Value, Failure> {
        let (timeline, counters) = (&self.timeline, &self.counters);
        let digest = digest::write(timeline, title);
        let files: [(_, &Fill<'_>); 2] = [
            (&args.digest, &|out| out.write_all(digest.as_bytes())),
            (&args.perfetto, &|out| perfetto::write(out, timeline, counters, title)),
        ];
        for (path, fill) in files {
            if let Some(path) = path {
                files::write_with(path, |file| {
                    let mut out = BufWriter::new(file);
                    fill(&mut out)?;
                    out.flush()
                })?;
            }
        }
        self.document["step"] = sums(&self.timeline);
        self.document["critical_path"] = critical_path(&self.timeline);
        Ok(self.document)
    }
}

type Fill<'a> = dyn Fn(&mut BufWriter<&mut File>) -> io::Result<()> + 'a;

/// The breakdown of the nanoseconds of all workers in one step. The parts add up to the whole.
fn sums(timeline: &Timeline) -> Value {
    let timeline::Sums { tasks, bound, excess, waiting, bubble } = timeline.total();
    let [before, between, after] = bubble;
    json!({
        "span_ns": timeline.span(), "workers": timeline.workers.len(), "tasks": tasks,
        "bound_ns": bound, "excess_ns": excess, "waiting_ns": waiting,
        "bubble_ns": {"before": before, "between": between, "after": after},
        "clocks_differ_ns": timeline.moved,
    })
}

/// The critical path by cause and op, longest first. The rows add up to `span_ns`.
fn critical_path(timeline: &Timeline) -> Value {
    let rows = Path::new(timeline).table(timeline);
    let row = |&(cause, op, ns): &(trace::Cause, usize, u64)| json!({"cause": cause.name(), "op": timeline.names[op], "ns": ns});
    rows.iter().map(row).collect()
}

/// Simulates a step in the virtual time of the cost model.
fn simulated(
    context: &Context,
    first: u32,
    name: &str,
    config: &ScheduleConfig,
    program: &Verified<Program>,
) -> Traced {
    let rates = Rates::shipped();
    let predicted = trace::predicted(program, &config.kernel, &context.target, first, rates);
    let mut trace_buffer = TraceBuffer::default();
    trace_buffer.add(program, &predicted.records);
    let us = predicted.us;
    report::say(&format!("{name}: {us:.1} us per token, predicted"));
    let document = json!({"name": name, "us_per_token": us, "ops": trace_buffer.ops()});
    Traced { document, timeline: predicted.timeline, counters: predicted.counters }
}

/// Times one schedule, then traces it.
fn schedule(
    context: &Context,
    first: u32,
    name: &str,
    config: &ScheduleConfig,
    program: &Verified<Program>,
    idle: &mut Option<Idle>,
) -> Result<Traced, HostError> {
    let variant = vm_host::variant(&config.kernel, context.graph());
    let booted = match idle.take() {
        Some(booted) => booted,
        None => {
            let options =
                BootOptions { records: program.task_len() as u32 * 2, ..BootOptions::default() };
            Idle::boot(context.graph(), &*context.model.weights, program, &variant, options)?
        }
    };
    let give_back = |refused: Box<(Idle, HostError)>| refused.1;
    let mut running = booted.launch(variant, program).map_err(give_back)?;
    let tokens = search::draw_tokens(0, context.graph().vocab, (first + TIMED_TOKENS) as usize);
    let timed = &tokens[first as usize..];
    running.decode(0, 0, &tokens, 1, &[], false)?;
    let samples = rounds(TIMING, None, || {
        let done = running.decode(0, first, timed, 1, &[], false)?;
        Ok::<_, HostError>(done.host_us / f64::from(done.steps))
    })?;
    let checksum = logits_checksum(&mut running, first, timed)?;
    let traced = vm_device::Variant { trace: true, ..variant };
    let mut running = running.stop()?.launch(traced, program).map_err(give_back)?;
    running.decode(0, 0, &tokens, 1, &[], false)?;
    let done = running.decode(0, first, timed, 1, &[], false)?;
    let mut trace_buffer = TraceBuffer::default();
    for step in 0..TRACED_STEPS {
        running.decode(0, first + step, &[timed[step as usize]], 1, &[], false)?;
        trace_buffer.add(program, &running.records()?);
        trace_buffer.add_loaders(&running.loader_records()?);
    }
    let records = running.records()?;
    *idle = Some(running.stop()?);
    let mut blocks = samples.rounds.concat();
    blocks.sort_by(f64::total_cmp);
    let (median, least, most) = (search::median(&blocks), blocks[0], blocks[blocks.len() - 1]);
    report::say(&format!(
        "{name}: {median:.1} us per token ({least:.1} to {most:.1}), traced {:.1}, logits {checksum}",
        done.host_us / f64::from(done.steps)
    ));
    let document = json!({
        "name": name,
        "us_per_token": median,
        "traced_us_per_token": done.host_us / f64::from(done.steps),
        "blocks_us": blocks,
        "logits": checksum,
        "ops": trace_buffer.ops(),
        "loader": trace_buffer.loader(),
    });
    let position = first + TRACED_STEPS - 1;
    let bytes = Predictor::new(program, &config.kernel, &context.target, position).task_bytes();
    let clock =
        Clock { ns_per_cycle: trace_buffer.ns_per_cycle(), span: None, polls_after_ready: true };
    let timeline = Timeline::new(program, &records, &bytes, context.target.bandwidth, clock);
    let counters = vec![counters::multiplied(&timeline)];
    Ok(Traced { document, timeline, counters })
}

/// The sum of a block's logits and the best of its last row: two schedules that add in the same order agree.
fn logits_checksum(running: &mut Resident, first: u32, timed: &[u32]) -> Result<String, HostError> {
    let done = running.decode(0, first, timed, 1, &[], true)?;
    let rows = running.logits(done.steps)?;
    let sum: f64 = rows.iter().flatten().map(|&v| f64::from(v)).sum();
    let top = rows.last().and_then(|row| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)));
    Ok(format!("{sum:.4e}, last best {:?}", top))
}

/// Summed times of one kind of task: the number of tasks, and cycles of waiting, input, products, output, and of
/// products starved of weights.
#[derive(Clone, Copy, Default)]
struct Sums {
    tasks: u64,
    cycles: [u64; 5],
}

#[derive(Default)]
struct TraceBuffer {
    /// By name of op and, for products, of matrix.
    ops: BTreeMap<String, Sums>,
    /// Cycles of all loaders: waiting for a free stage, waiting for fewer bytes in flight, and whole steps.
    loaders: [u64; 3],
    steps: u64,
    workers: u64,
    /// Nanoseconds by the clock and cycles over the same span, which give the length of a cycle.
    span_ns: f64,
    span_cycles: f64,
}

impl TraceBuffer {
    fn add(&mut self, program: &Program, records: &[TaskRecord]) {
        self.steps += 1;
        self.workers = program.workers.len() as u64;
        let mut index = 0;
        for worker in &program.workers {
            let (first, mut cycles) = (index, 0_u64);
            for task in &worker.tasks {
                let r = records[index];
                index += 1;
                let sums = self.ops.entry(program.phase_name(task).to_owned()).or_default();
                sums.tasks += 1;
                let (input, products) = (r.staged - r.ready, r.multiplied - r.staged);
                let took = [r.ready, input, products, r.end - r.multiplied, r.starved];
                sums.cycles.iter_mut().zip(took).for_each(|(sum, took)| *sum += u64::from(took));
                cycles += u64::from(r.end);
            }
            let span = records[index - 1].begin - records[first].begin;
            self.span_ns += span as f64;
            self.span_cycles += (cycles - u64::from(records[index - 1].end)) as f64;
        }
    }

    /// A simulation has no records of loaders.
    fn add_loaders(&mut self, records: &[LoaderRecord]) {
        for r in records {
            let cycles = [r.stage_free, r.in_flight, r.step].map(u64::from);
            self.loaders.iter_mut().zip(cycles).for_each(|(sum, cycles)| *sum += cycles);
        }
    }

    /// The waits of an average loader in a step; also prints them.
    fn loader(&self) -> Value {
        let us = self.ns_per_cycle() / 1000.0 / (self.steps * self.workers) as f64;
        let [free, cap, step] = self.loaders.map(|cycles| cycles as f64 * us);
        report::say(&format!("  loader: no free stage {free:.1}, cap {cap:.1}, step {step:.1} us"));
        json!({ "stage_free_us": free, "in_flight_us": cap, "step_us": step })
    }

    fn ns_per_cycle(&self) -> f64 {
        self.span_ns / self.span_cycles
    }

    /// For each op: µs per step on an average worker. Also prints them.
    fn ops(&self) -> Vec<Value> {
        let us = self.ns_per_cycle() / 1000.0 / (self.steps * self.workers) as f64;
        let line = |(name, s): (&String, &Sums)| {
            let [waited, staged, multiplied, ended, starved] = s.cycles.map(|c| c as f64 * us);
            let tasks = s.tasks as f64 / (self.steps * self.workers) as f64;
            report::say(&format!(
                "  {name:16} {tasks:5.1} tasks a worker: wait {waited:6.1}, input {staged:6.1}, products {multiplied:6.1} (starved {starved:6.1}), output {ended:6.1}; sum {:6.1} us",
                waited + staged + multiplied + ended
            ));
            json!({
                "op": name, "tasks_per_worker": tasks, "wait_us": waited, "input_us": staged,
                "products_us": multiplied, "starved_us": starved, "output_us": ended,
            })
        };
        self.ops.iter().map(line).collect()
    }
}
