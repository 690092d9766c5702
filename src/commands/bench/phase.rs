//! `amk bench --phase`: the time of one phase within a whole step, its weights streamed as always, beside the registers and
//! spills of the kernel; with `--kernel-dir` also those of edited kernel sources, in alternating processes.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::cli::BenchArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{child_process, report};

/// Processes of each kernel.
const PROCESSES: usize = 3;
/// The limit of one of them: it may have to compile two kernels.
const LIMIT: Duration = Duration::from_secs(300);
/// The parts of a task in the document of `amk trace`, and what a worker spends in all of them.
const PARTS: [&str; 5] = ["wait_us", "input_us", "products_us", "starved_us", "output_us"];

pub(super) fn run(args: &BenchArgs, phase: &str) -> Outcome {
    let edited = args.kernel_dir.as_deref();
    let mut sides = vec![(None, Vec::new())];
    sides.extend(edited.map(|dir| (Some(dir), Vec::new())));
    let working = Spinner::through(PROCESSES * sides.len(), "traces");
    for round in 0..PROCESSES {
        // Forwards and backwards in turn: what drifts affects both sides equally.
        let mut order: Vec<usize> = (0..sides.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for side in order {
            let (dir, traces) = &mut sides[side];
            traces.push(trace(args, phase, *dir)?);
            working.done();
        }
    }
    drop(working);
    let sides: Vec<Value> = sides.iter().map(|(dir, traces)| side(phase, *dir, traces)).collect();
    let kind = sides[0]["latency_kind"].clone();
    let same = sides.iter().all(|side| side["logits"] == sides[0]["logits"]);
    if !same {
        report::say("the edited kernel computes other logits");
    }
    report::document(&json!({
        "schema": "amk.bench_phase.v1", "model": args.model, "context": args.context,
        "phase": phase, "latency_kind": kind, "sides": sides, "same_logits": same,
    }))?;
    Ok(if same { Exit::Yes } else { Exit::No })
}

/// One schedule's part of the answer of `amk trace`, in a process that compiles these sources.
fn trace(args: &BenchArgs, phase: &str, dir: Option<&Path>) -> Result<Value, Failure> {
    let mut command = child_process::this_program();
    command.args(["trace", "--json", "--kernel", "--model"]).args(&args.model);
    command.arg(format!("--context={}", args.context));
    let word = |value: Option<clap::builder::PossibleValue>| value.map(|v| v.get_name().to_owned());
    let flags = [
        ("--device", word(args.place.device.to_possible_value())),
        ("--target", args.place.target.clone()),
        (
            "--schedule",
            args.config.schedule.and_then(|schedule| word(schedule.to_possible_value())),
        ),
        ("--config", args.config.config.as_ref().map(ToString::to_string)),
        ("--kv-capacity", args.place.kv_capacity.map(|tokens| tokens.to_string())),
    ];
    for (flag, value) in flags {
        command.args(value.map(|value| format!("{flag}={value}")));
    }
    if let Some(dir) = dir {
        command.env("AMK_KERNEL_DIR", dir);
    }
    let ended = child_process::run(command, "", LIMIT);
    let ended = ended.map_err(|error| Failure::refused(format!("amk trace: {error}")))?;
    let document: Value = serde_json::from_str(&ended.out).unwrap_or_default();
    let schedule = document["schedules"].get(0).cloned().ok_or_else(|| {
        let message = document["message"].as_str().unwrap_or_else(|| ended.last_line());
        Failure::refused(format!("amk trace: {message}"))
    })?;
    let ops = schedule["ops"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names: Vec<&str> = ops.iter().filter_map(|op| op["op"].as_str()).collect();
    if names.contains(&phase) {
        let mut traced = schedule;
        traced["latency_kind"] = document["latency_kind"].clone();
        return Ok(traced);
    }
    Err(Failure::usage(format!("--phase {phase}: there are {}", names.join(", "))))
}

/// The traces of one kernel: its resources, and the times of the phase with their least, median and most.
fn side(phase: &str, dir: Option<&Path>, traces: &[Value]) -> Value {
    let op = |trace: &Value| {
        let ops = trace["ops"].as_array().map(Vec::as_slice).unwrap_or_default();
        ops.iter().find(|op| op["op"] == phase).cloned().unwrap_or_default()
    };
    let spread = |of: &dyn Fn(&Value) -> f64| {
        let mut all: Vec<f64> = traces.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        [all[0], all[all.len() / 2], all[all.len() - 1]]
    };
    let part = |name: &'static str| move |trace: &Value| op(trace)[name].as_f64().unwrap_or(0.0);
    // `starved_us` is within `products_us`.
    let own = |trace: &Value| [1, 2, 4].map(|p| part(PARTS[p])(trace)).iter().sum::<f64>();
    let [step, work] = [spread(&|t| t["us_per_token"].as_f64().unwrap_or(0.0)), spread(&own)];
    let parts: serde_json::Map<String, Value> =
        PARTS.iter().map(|&name| (name.to_owned(), json!(spread(&part(name))))).collect();
    let kernel = &traces[0]["kernel"];
    let resources = kernel["not_compiled"].as_str().map_or_else(
        || format!("registers {}, spills {}", kernel["registers"], kernel["spills"]),
        str::to_owned,
    );
    let kind = traces[0]["latency_kind"].as_str().unwrap_or_default();
    let name = dir.map_or("this build".into(), |dir| dir.to_string_lossy());
    report::say(&format!(
        "{name}: {kind}: step {:.1} us ({:.1} to {:.1}), {phase} {:.2} us a worker ({:.2} to {:.2}); {resources}",
        step[1], step[0], step[2], work[1], work[0], work[2],
    ));
    json!({
        "kernel_dir": dir, "kernel": kernel, "latency_kind": kind, "us_per_token": step, "phase_us": work, "parts": parts,
        "logits": traces[0]["logits"], "tasks_per_worker": op(&traces[0])["tasks_per_worker"],
    })
}
