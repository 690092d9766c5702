//! `amk trace`: where the time of a step goes. On a GPU from a kernel variant in which every task records timestamps,
//! else in the virtual time of the cost model; the records are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use abi::{LoaderRecord, TaskRecord};
use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use lower::{Predictor, Rates};
use rayon::prelude::*;
use schemars::JsonSchema;
use search::Timing;
use serde::Serialize;
use serde_json::{Value, json};
use trace::counters::{self, Counter};
use trace::{
    Clock, Edit, Expected, Path, Plant, Residuals, Timeline, digest, perfetto, plant, replay,
    residuals, timeline,
};
use vm_device::Trace;
use vm_host::{BootOptions, HostError, Idle, Resident};

use super::bench::rounds;
use crate::cli::{ConfigArgs, ModelArgs, TraceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report::Answer;
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::spinner::Spinner;
use crate::{files, report};

mod live;
mod page;

const TIMED_TOKENS: u32 = 32;
/// Rounds of four timed blocks; the median counts.
const TIMING: Timing = Timing { rounds: 3, warmup: 0 };
/// Runs without a planted cause, of as many steps each: what differs between them is no finding.
const EXPECTED_RUNS: usize = 8;
/// Steps whose records are averaged.
const TRACED_STEPS: u32 = 24;

/// A step of each schedule.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TracedSteps {
    #[schemars(extend("const" = "amk.trace.v2"))]
    schema: &'static str,
    model: String,
    target: String,
    context: u32,
    latency_kind: &'static str,
    schedules: Vec<Value>,
}

pub(crate) fn run(args: &TraceArgs) -> Outcome {
    match args.live.pid {
        Some(pid) => live::run(args, pid),
        None => answer(args)?.print(),
    }
}

/// Traces a step of each schedule.
pub(crate) fn answer(args: &TraceArgs) -> Result<Answer<TracedSteps>, Failure> {
    let model = args.model.clone().unwrap_or_default();
    let context = Context::of_shape_on_cpu(&ModelArgs { model, place: args.place.clone() })?;
    if args.context.saturating_add(TIMED_TOKENS) > context.kv_capacity {
        return Err(Failure::usage(format!(
            "--context {} is out of range: the key/value cache holds {}; raise --kv-capacity",
            args.context, context.kv_capacity
        )));
    }
    let files = [&args.digest, &args.perfetto, &args.residuals, &args.html];
    files.into_iter().flatten().try_for_each(|path| files::check_place(path))?;
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
    let on_device = context.has_device()?;
    let mut idle = None;
    let mut documents = Vec::new();
    let ask = Ask { context: args.context, plant: &args.plant, plants: args.plants };
    for (name, Chosen { config, source }) in &schedules {
        let working = Spinner::on(format!("tracing schedule {name}"));
        let program = context.lowered(config)?;
        check_edits(&program, &args.what_if)?;
        let traced = if on_device {
            measured(&context, &ask, name, config, &program, &mut idle)
                .map_err(|error| Failure::missing(format!("{name}: {error}")))?
        } else {
            simulated(&context, &ask, name, config, &program)
        };
        drop(working);
        let kind = if on_device { "measured" } else { "predicted" };
        let title = format!(
            "{} on {} ({kind}), {} tokens of context, schedule {name}",
            context.graph().name,
            context.target.name,
            args.context
        );
        let mut document = traced.keep(args, &title, kind)?;
        document["schedule_source"] = json!(source);
        if args.kernel {
            document["kernel"] = kernel(&context, config);
        }
        documents.push(document);
    }
    let document = TracedSteps {
        schema: "amk.trace.v2",
        model: context.graph().name.clone(),
        target: context.target.name.clone(),
        context: args.context,
        latency_kind: if on_device { "measured-gpu" } else { "predicted" },
        schedules: documents,
    };
    Ok(Answer { document, exit: Exit::Yes })
}

/// Refuses edits that no step of this program has, before a step is traced.
fn check_edits(program: &Program, edits: &[String]) -> Result<(), Failure> {
    let tasks = program.workers.iter().flat_map(|worker| &worker.tasks);
    let names: BTreeSet<&str> = tasks.map(|task| program.phase_name(task)).collect();
    let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
    edits.iter().try_for_each(|text| edit(text, &names).map(|_| ()))
}

fn edit(text: &str, names: &[String]) -> Result<Edit, Failure> {
    Edit::parse(text, names).map_err(|wrong| Failure::usage(format!("--what-if {text}: {wrong}")))
}

/// The build of the kernel of a schedule, and its registers and spills if NVRTC is here to compile it.
fn kernel(context: &Context, config: &ScheduleConfig) -> Value {
    let variant = context.variant(&config.kernel, 1);
    let (arch, cache) = (&context.target.arch, vm_host::default_cache());
    let compiled = vm_host::compile(&variant, arch, cache.as_deref());
    if let Err(error) = &compiled {
        report::say(&format!("  kernel: not compiled: {error}"));
    }
    let all = compiled.as_ref().map(|cubin| vm_host::resources(&cubin.log)).unwrap_or_default();
    let of = all.iter().find(|of| of.kernel == "amk_megakernel");
    json!({
        "id": vm_host::kernel_id(&variant, arch),
        "registers": of.map(|of| of.registers), "spills": of.map(|of| of.spills),
        "stack": of.map(|of| of.stack), "not_compiled": compiled.err().map(|error| error.to_string()),
    })
}

/// What to trace.
pub(super) struct Ask<'a> {
    /// Tokens before the traced steps.
    pub(super) context: u32,
    /// Causes to plant.
    pub(super) plant: &'a [Plant],
    /// Number of seeded ones.
    pub(super) plants: u64,
}

/// Microseconds per token of a schedule, and the step of the median span: measured if there is a device, else predicted.
pub(super) fn traced(
    context: &Context,
    ask: &Ask<'_>,
    name: &str,
    config: &ScheduleConfig,
    idle: &mut Option<Idle>,
) -> Result<(f64, Timeline), Failure> {
    let program = context.lowered(config)?;
    let traced = if context.has_device()? {
        measured(context, ask, name, config, &program, idle)
            .map_err(|error| Failure::missing(format!("{name}: {error}")))?
    } else {
        simulated(context, ask, name, config, &program)
    };
    let us = traced.document["us_per_token"].as_f64().unwrap_or(f64::NAN);
    Ok((us, residuals::middle_step(&traced.steps).clone()))
}

/// A traced schedule. The document and files show the step of the median span.
struct Traced {
    document: Value,
    steps: Vec<Timeline>,
    counters: Vec<Counter>,
    predicted: Timeline,
    /// Planted causes, with the steps before and after.
    planted: Vec<(Plant, Residuals)>,
}

impl Traced {
    /// Writes the requested files; returns the document with the sums.
    fn keep(mut self, args: &TraceArgs, title: &str, kind: &str) -> Result<Value, Failure> {
        let (timeline, counters) = (residuals::middle_step(&self.steps), &self.counters);
        let digest = digest::write(timeline, title);
        let residuals = args.residuals.is_some().then(|| {
            let expected = Expected::new(&[std::slice::from_ref(&self.predicted)]);
            let residuals = Residuals::new(&expected, &self.steps);
            say_residuals(&residuals, timeline);
            json!({"schema": "amk.residuals.v1", "title": title, "residuals": residuals.document(timeline)})
        });
        self.document["step"] = sums(timeline);
        self.document["critical_path"] = critical_path(timeline);
        if args.digest_in_answer {
            self.document["digest"] = digest.as_str().into();
        }
        let page = args
            .html
            .is_some()
            .then(|| page::render(title, kind, &self.document, timeline, &self.predicted));
        let files: [(_, &Fill<'_>); 4] = [
            (&args.digest, &|out| out.write_all(digest.as_bytes())),
            (&args.perfetto, &|out| perfetto::write(out, timeline, counters, title)),
            (&args.residuals, &|out| writeln!(out, "{:#}", residuals.as_ref().unwrap_or_default())),
            (&args.html, &|out| out.write_all(page.as_deref().unwrap_or_default().as_bytes())),
        ];
        write_files(&files)?;
        if !args.what_if.is_empty() {
            self.document["what_if"] = what_if(timeline, &args.what_if)?;
        }
        if !self.planted.is_empty() {
            self.document["planted"] = planted(timeline, &self.planted);
        }
        Ok(self.document)
    }
}

/// Writes the files that were asked for.
fn write_files(files: &[(&Option<PathBuf>, &Fill<'_>)]) -> Result<(), Failure> {
    for (path, fill) in files {
        if let Some(path) = path {
            files::write_with(path, |file| {
                let mut out = BufWriter::new(file);
                fill(&mut out)?;
                out.flush()
            })?;
        }
    }
    Ok(())
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
        "gpu_clocks_ahead_ns": timeline.clocks.ahead_ns, "gpu_clocks_within_ns": timeline.clocks.within_ns,
    })
}

/// The critical path by cause and op, longest first. The rows add up to `span_ns`.
fn critical_path(timeline: &Timeline) -> Value {
    let rows = Path::new(timeline).table(timeline);
    let row = |&(cause, op, ns): &(trace::Cause, usize, u64)| json!({"cause": cause.name(), "op": timeline.names[op], "ns": ns});
    rows.iter().map(row).collect()
}

/// The span with each edit.
fn what_if(timeline: &Timeline, edits: &[String]) -> Result<Value, Failure> {
    let span = timeline.span() as f64;
    let row = |text: &String| {
        let edit = edit(text, &timeline.names)?;
        let replayed = replay(timeline, &edit).span;
        let gain = 100.0 * (1.0 - replayed / span);
        report::say(&format!("  what if {text}: {:.1} us, {gain:+.1}% faster", replayed / 1e3));
        Ok(json!({"edit": text, "span_ns": replayed.round(), "gain_pct": gain}))
    };
    edits.iter().map(row).collect::<Result<Vec<_>, Failure>>().map(Value::from)
}

/// Whether planted causes were named, and what was said of each.
fn planted(timeline: &Timeline, all: &[(Plant, Residuals)]) -> Value {
    let (nothing, causes): (Vec<_>, Vec<_>) =
        all.iter().partition(|(plant, _)| *plant == Plant::Nothing);
    let named = |of: &[&(Plant, Residuals)]| {
        of.iter().filter(|(plant, found)| plant.is_named(&found.findings, timeline)).count()
    };
    let (found, quiet) = (named(&causes), named(&nothing));
    report::say(&format!(
        "  planted causes: {found} of {} named first; {quiet} of {} steps without one have no finding",
        causes.len(),
        nothing.len()
    ));
    let row = |(plant, residuals): &(Plant, Residuals)| {
        let document = residuals.document(timeline);
        json!({
            "plant": plant.to_string(), "named_first": plant.is_named(&residuals.findings, timeline),
            "growth_ns": residuals.growth_ns, "findings": document["findings"], "causes": document["causes"],
        })
    };
    json!({
        "causes": causes.len(), "named_first": found,
        "nothing": nothing.len(), "no_finding": quiet,
        "each": all.iter().map(row).collect::<Vec<_>>(),
    })
}

/// The findings, and what the difference of the span is due to.
fn say_residuals(residuals: &Residuals, timeline: &Timeline) {
    let us = |ns: f64| ns / 1000.0;
    report::say(&format!("  recorded less predicted: {:+.1} us", us(residuals.growth_ns as f64)));
    for share in residuals.causes.iter().filter(|share| share.ns.abs() >= 100) {
        let what = share.finding.map_or_else(
            || format!("{}, the rest", share.cause.name()),
            |place| residuals.findings[place].say(timeline),
        );
        report::say(&format!("    {:+8.1} us  {what}", us(share.ns as f64)));
    }
}

/// Simulates a step in the virtual time of the cost model, and with noise those that the causes are planted in.
fn simulated(
    context: &Context,
    args: &Ask<'_>,
    name: &str,
    config: &ScheduleConfig,
    program: &Verified<Program>,
) -> Traced {
    let at = (&context.target, args.context);
    let predicted = trace::predicted(program, &config.kernel, at.0, at.1, Rates::shipped());
    let mut trace_buffer = TraceBuffer::default();
    trace_buffer.add(program, &predicted.records);
    let us = predicted.us;
    report::say(&format!("{name}: {us:.1} us per token, predicted"));
    let document = json!({
        "name": name, "us_per_token": us, "bounds": bounds(context, config, program, args.context),
        "ops": trace_buffer.ops(),
    });
    let steps = |plant: &Plant, seed| {
        plant::simulated(program, &config.kernel, at, plant, (seed, TRACED_STEPS))
    };
    let plants = plants(args, &predicted.timeline, Some(program.pipeline.in_flight));
    let planted = if plants.is_empty() {
        Vec::new()
    } else {
        let runs = [0, u64::MAX].map(|seed| steps(&Plant::Nothing, seed));
        let expected = Expected::new(&[&runs[0], &runs[1]]);
        let each = plants.into_par_iter().enumerate();
        each.map(|(index, plant)| {
            let residuals = Residuals::new(&expected, &steps(&plant, index as u64 + 1));
            (plant, residuals)
        })
        .collect()
    };
    Traced {
        document,
        steps: vec![predicted.timeline.clone()],
        counters: predicted.counters,
        predicted: predicted.timeline,
        planted,
    }
}

/// What no step of this program can be faster than: its bytes over the bandwidth, and, as predicted, its chain of hand-offs and of the
/// tasks' own time with an infinitely fast stream.
fn bounds(
    context: &Context,
    config: &ScheduleConfig,
    program: &Verified<Program>,
    position: u32,
) -> Value {
    let predictor = Predictor::new(program, &config.kernel, &context.target, position);
    let bytes_us = predictor.predict(Rates::shipped()).bound_us;
    let chain_us = predictor.chain_us(Rates::shipped());
    report::say(&format!("  bounds: bytes {bytes_us:.1}, chain {chain_us:.1} us (predicted)"));
    json!({"bytes_us": bytes_us, "chain_us": chain_us, "bound_us": bytes_us.max(chain_us)})
}

/// The causes to plant: those named, then the seeded ones, and as many times nothing.
fn plants(args: &Ask<'_>, timeline: &Timeline, in_flight: Option<u32>) -> Vec<Plant> {
    let seeded = (0..args.plants).map(|seed| Plant::draw(seed, timeline, in_flight));
    let nothing = (0..args.plants).map(|_| Plant::Nothing);
    args.plant.iter().cloned().chain(seeded).chain(nothing).collect()
}

/// Times one schedule, then traces it.
fn measured(
    context: &Context,
    args: &Ask<'_>,
    name: &str,
    config: &ScheduleConfig,
    program: &Verified<Program>,
    idle: &mut Option<Idle>,
) -> Result<Traced, HostError> {
    let first = args.context;
    let variant = context.variant(&config.kernel, 1);
    let tasks = tasks_of_devices(program);
    let booted = idle.take().map_or_else(|| boot(context, program, &variant, &tasks), Ok)?;
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
    let planting = args.plants > 0 || !args.plant.is_empty();
    let trace = if planting { Trace::Delays } else { Trace::Tasks };
    let traced = vm_device::Variant { trace, ..variant };
    let mut running = running.stop()?.launch(traced, program).map_err(give_back)?;
    running.decode(0, 0, &tokens, 1, &[], false)?;
    let done = running.decode(0, first, timed, 1, &[], false)?;
    let position = first + TRACED_STEPS - 1;
    let predictor = Predictor::new(program, &config.kernel, &context.target, position);
    let mut device = Traces {
        running,
        program,
        bytes: predictor.task_bytes(),
        bandwidth: context.target.total_bandwidth(),
        // Parts of one GPU share its clock.
        per_device: !context.target.emulated,
        tasks,
        tokens: timed,
        first,
        buffer: TraceBuffer::default(),
        like: None,
    };
    let steps = device.steps(None)?;
    let mut blocks = samples.rounds.concat();
    blocks.sort_by(f64::total_cmp);
    let (median, least, most) = (search::median(&blocks), blocks[0], blocks[blocks.len() - 1]);
    report::say(&format!(
        "{name}: {median:.1} us per token ({least:.1} to {most:.1}), traced {:.1}; sum of logits {checksum}",
        done.host_us / f64::from(done.steps)
    ));
    let document = json!({
        "name": name,
        "us_per_token": median,
        "bounds": bounds(context, config, program, position),
        "traced_us_per_token": done.host_us / f64::from(done.steps),
        "blocks_us": blocks,
        "logits": checksum,
        "ops": device.buffer.ops(),
        "loader": device.buffer.loader(),
    });
    let planted = if planting { device.planted(args, steps.clone())? } else { Vec::new() };
    *idle = Some(device.running.stop()?);
    let predicted =
        trace::predicted(program, &config.kernel, &context.target, position, Rates::shipped());
    let counters = vec![counters::multiplied(residuals::middle_step(&steps))];
    Ok(Traced { document, steps, counters, predicted: predicted.as_recorded, planted })
}

/// A machine with room for the records of twice these tasks: another schedule, traced with it, may have more.
fn boot(
    context: &Context,
    program: &Verified<Program>,
    variant: &vm_device::Variant,
    tasks: &[usize],
) -> Result<Idle, HostError> {
    let records = tasks.iter().copied().max().unwrap_or(0) as u32 * 2;
    let options = BootOptions { records, cards: context.gpus(), ..BootOptions::default() };
    Idle::boot(context.graph(), &*context.model.weights, program, variant, options)
}

/// The number of tasks of each device, in the program's order.
fn tasks_of_devices(program: &Program) -> Vec<usize> {
    let devices = program.workers.chunks(program.workers_per_device().max(1));
    devices.map(|workers| workers.iter().map(|worker| worker.tasks.len()).sum()).collect()
}

/// Records steps of a resident kernel, one command each.
struct Traces<'a> {
    running: Resident,
    program: &'a Verified<Program>,
    bytes: Vec<Vec<u64>>,
    bandwidth: u64,
    per_device: bool,
    /// Tasks of each device.
    tasks: Vec<usize>,
    tokens: &'a [u32],
    first: u32,
    buffer: TraceBuffer,
    /// A step of the same program.
    like: Option<Timeline>,
}

impl Traces<'_> {
    /// The next steps, with a planted cause. Those with one are not summed up in the buffer.
    fn steps(&mut self, plant: Option<&Plant>) -> Result<Vec<Timeline>, HostError> {
        if let Some(plant) = plant {
            let delays = plant.delays(self.program, self.buffer.ns_per_cycle());
            self.running.delay_tasks(&self.tasks, &delays.map_err(HostError::Request)?)?;
        }
        let (mut all, mut others) = (Vec::new(), TraceBuffer::default());
        for step in 0..TRACED_STEPS {
            let token = self.tokens[step as usize];
            self.running.decode(0, self.first + step, &[token], 1, &[], false)?;
            all.push(self.running.records(&self.tasks)?);
            let buffer = if plant.is_some() { &mut others } else { &mut self.buffer };
            buffer.add(self.program, &all[step as usize]);
            buffer.add_loaders(&self.running.loader_records()?);
        }
        let ns_per_cycle = self.buffer.ns_per_cycle();
        let per_device = self.per_device;
        let clock = Clock { ns_per_cycle, span: None, per_device, polls_after_ready: true };
        let mut timelines: Vec<Timeline> = Vec::new();
        for records in &all {
            let (bytes, bandwidth) = (&self.bytes, self.bandwidth);
            let timeline = match &self.like {
                Some(like) => like.again(self.program, records, bytes, bandwidth, clock),
                None => Timeline::new(self.program, records, bytes, bandwidth, clock),
            };
            self.like.get_or_insert_with(|| timeline.clone());
            timelines.push(timeline);
        }
        Ok(timelines)
    }

    /// Records steps for each cause to plant. Compares them with runs without one: `first`, and others recorded between
    /// them, so that what drifts in the meantime is no finding.
    fn planted(
        &mut self,
        ask: &Ask<'_>,
        first: Vec<Timeline>,
    ) -> Result<Vec<(Plant, Residuals)>, HostError> {
        let plants = plants(ask, &first[0], None);
        let between = plants.len().div_ceil(EXPECTED_RUNS - 1).max(1);
        let (mut expected, mut recorded) = (vec![first], Vec::new());
        for plants in plants.chunks(between) {
            for plant in plants {
                recorded.push((plant.clone(), self.steps(Some(plant))?));
            }
            expected.push(self.steps(Some(&Plant::Nothing))?);
        }
        let expected = Expected::new(&expected.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let explained = recorded.into_par_iter().map(|(plant, steps)| {
            let residuals = Residuals::new(&expected, &steps);
            (plant, residuals)
        });
        Ok(explained.collect())
    }
}

/// The sum of a block's logits and the best token of its last row: two schedules that add in the same order agree.
fn logits_checksum(running: &mut Resident, first: u32, timed: &[u32]) -> Result<String, HostError> {
    let done = running.decode(0, first, timed, 1, &[], true)?;
    let rows = running.logits(done.steps)?;
    let sum: f64 = rows.iter().flatten().map(|&v| f64::from(v)).sum();
    let top = rows.last().and_then(|row| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)));
    let best =
        top.map_or_else(String::new, |(token, logit)| format!(", best token {token} ({logit:.3})"));
    Ok(format!("{sum:.4e}{best}"))
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

    /// One where no worker has two tasks: such small programs are only simulated, in nanoseconds.
    fn ns_per_cycle(&self) -> f64 {
        if self.span_cycles > 0.0 { self.span_ns / self.span_cycles } else { 1.0 }
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
