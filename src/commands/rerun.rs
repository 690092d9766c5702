//! `amk rerun`: one task again, on the inputs that it had, beside what belongs there.

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use reference_vm::divergence::{Examiner, ulps};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Fired, Order};
use search::{Device, Expected, FirstDivergence, TaskAt};
use serde_json::{Map, Value, json};

use crate::cli::{DeviceChoice, RerunArgs, TaskPlace};
use crate::commands::program;
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

/// The schema of its document.
const SCHEMA: &str = "amk.rerun.v1";

/// A task that was run again.
struct Found {
    token: u32,
    /// On the reference machine.
    again: Fired,
    /// Whether the same bits came out as when the whole step ran.
    repeatable: bool,
    /// What belongs there, write by write; of writes of which nothing is known nothing.
    wanted: Vec<reference_vm::Stored>,
}

pub(crate) fn run(args: &RerunArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let program = match &args.program {
        Some(file) => program::verified(file)?,
        None => {
            let config = context.valid_config(args.config.config.as_ref())?;
            program::lowered(&context, &config)?
        }
    };
    check_task(&program, args.task)?;
    let (mut found, device) = match args.model.place.device {
        DeviceChoice::Cuda => (on_device(&context, args, &program)?, "cuda"),
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Eval => {
            (on_reference(&context, args, &program)?, "cpu")
        }
    };
    let task = TaskAt::of(&program, args.task.worker, args.task.task);
    let wrong = print(&mut found, &program, &task, args, device)?;
    Ok(if wrong == 0 && found.repeatable { Exit::Yes } else { Exit::No })
}

fn check_task(program: &Program, at: TaskPlace) -> Result<(), Failure> {
    let workers = program.workers.len();
    let Some(worker) = program.workers.get(at.worker as usize) else {
        return Err(Failure::usage(format!(
            "--task {}:{}: the program has workers 0 to {}",
            at.worker,
            at.task,
            workers - 1
        )));
    };
    match worker.tasks.len() {
        0 => Err(Failure::usage(format!(
            "worker {} has no tasks; `amk disasm` lists them",
            at.worker
        ))),
        tasks if at.task as usize >= tasks => Err(Failure::usage(format!(
            "--task {}:{}: worker {} has tasks 0 to {}; `amk disasm` lists them",
            at.worker,
            at.task,
            at.worker,
            tasks - 1
        ))),
        _ => Ok(()),
    }
}

/// The step in which the task runs, on the reference machine, and then the task alone.
fn on_reference(
    context: &Context,
    args: &RerunArgs,
    program: &Verified<Program>,
) -> Result<Found, Failure> {
    let (graph, weights) = (context.graph(), &*context.model.weights);
    let unrunnable = |e: &dyn std::fmt::Display| {
        Failure::usage(format!("the program does not run on {}: {e}", graph.name))
    };
    let examiner = Examiner::new(graph, weights).map_err(|e| unrunnable(&e))?;
    let mut machine = Machine::new(program, graph, weights).map_err(|e| unrunnable(&e))?;
    let mut found = None;
    let mut look = |machine: &Machine<'_>, token: u32, fired: &[Fired]| {
        if machine.positions() == args.position + 1 {
            found = Some(again(&examiner, machine, token, fired, args.task));
        }
        found.is_none()
    };
    if args.tokens.is_empty() {
        let expected = Expected::new(graph, weights, context.kv_capacity, args.seed, None)
            .map_err(|e| unrunnable(&e))?;
        expected.each_position(&mut machine, Some(args.position), &mut look);
    } else {
        for &token in &args.tokens {
            let ran = machine.traced(token, Order::Waves).map_err(|e| unrunnable(&e))?;
            let (Run::Finished(_), fired) = ran else {
                return Err(Failure::refused(search::Dropped::Halted(ran.0).to_string()));
            };
            if !look(&machine, token, &fired) {
                break;
            }
        }
    }
    found.unwrap_or_else(|| {
        Err(Failure::usage(format!(
            "nothing was run at --position {}: give one that the gate ran, or --tokens up to it",
            args.position
        )))
    })
}

fn again(
    examiner: &Examiner<'_>,
    machine: &Machine<'_>,
    token: u32,
    all: &[Fired],
    at: TaskPlace,
) -> Result<Found, Failure> {
    let Some(before) =
        all.iter().find(|fired| fired.worker.0 == at.worker && fired.task == at.task)
    else {
        return Err(Failure::refused("the task did not run in this step"));
    };
    let again = machine.again(before, token).map_err(|trap| Failure::refused(trap.to_string()))?;
    let wanted = examiner.wanted(machine, token, all, &again);
    let repeatable = again.writes == before.writes && again.appended == before.appended;
    Ok(Found { token, again, repeatable, wanted })
}

/// A GPU runs whole steps: what the task has left there, beside what belongs there.
fn on_device(
    context: &Context,
    args: &RerunArgs,
    program: &Verified<Program>,
) -> Result<Found, Failure> {
    let mut found = on_reference(context, args, program)?;
    let config = context.valid_config(args.config.config.as_ref())?;
    let Some(mut device) = context.open_process(&args.sharing)? else {
        return Err(Failure::missing("there is no GPU here: see `amk doctor`"));
    };
    let tokens = if args.tokens.is_empty() {
        search::draw_tokens(args.seed, context.graph().vocab, args.position + 1)
    } else {
        args.tokens.iter().copied().take(args.position + 1).collect()
    };
    let failed = |error: search::DeviceError| Failure::refused(error.to_string());
    let program = std::sync::Arc::new(program.clone());
    let handle = device.prepare(&program, &config.kernel).map_err(failed)?;
    let logits = device.run(handle, &tokens, 0).map_err(failed)?;
    let Some(slots) = device.slots(handle).map_err(failed)? else {
        return Err(Failure::missing("this device cannot say what its slots hold"));
    };
    for stored in &mut found.again.writes {
        let slot = &program.slots[stored.slot.index()];
        let held =
            if slot.arena_bytes() > 0 { slots.get(stored.slot.index()) } else { logits.last() };
        let words = stored.start as usize..stored.start as usize + stored.values.len();
        if let Some(values) = held.and_then(|held| held.get(words)) {
            stored.values = values.to_vec();
        }
    }
    Ok(found)
}

/// Prints the words, and returns how many are further off than a last place or so of rounding can explain.
fn print(
    found: &mut Found,
    program: &Program,
    task: &TaskAt,
    args: &RerunArgs,
    device: &str,
) -> Result<usize, Failure> {
    let mut words = Vec::new();
    for got in &found.again.writes {
        let slot = &program.slots[got.slot.index()].name;
        let want =
            found.wanted.iter().find(|want| want.slot == got.slot && want.start == got.start);
        for (index, &value) in got.values.iter().enumerate() {
            let want = want.map(|want| want.values[index]);
            let ulp = want.and_then(|want| ulps(value, want));
            words.push((slot, got.start as usize + index, value, want, ulp));
        }
    }
    let far = |word: &&(&String, usize, f32, Option<f32>, Option<u64>)| {
        word.3.is_some_and(|want| !close(word.2, want, device))
    };
    let wrong = words.iter().filter(far).count();
    let mut order: Vec<_> = words.iter().collect();
    order.sort_by_key(|word| (!far(word), std::cmp::Reverse(word.4)));
    let shown: Vec<Value> = order.iter().take(args.words).map(|&&(slot, index, got, want, ulp)| {
        json!({"slot": slot, "index": index, "got": got, "want": want, "ulp": ulp})
    }).collect();
    report::say(&format!(
        "{task} at position {}: {} words, {wrong} wrong",
        args.position,
        words.len()
    ));
    let lines = order.iter().take(args.words).map(|&&(slot, index, got, want, ulp)| {
        let want = want.map_or_else(|| "not known".to_owned(), |want| want.to_string());
        let ulp = ulp.map_or_else(String::new, |ulp| format!(", {ulp} ulp"));
        (format!("{slot}[{index}]"), format!("got {got}, want {want}{ulp}"))
    });
    report::table(&lines.collect::<Vec<_>>());
    if device == "cuda" {
        report::say(
            "on a GPU the whole step ran; these are the words that the task left in its slots",
        );
    }
    report::document(&json!({
        "schema": SCHEMA,
        "model": program.model,
        "program_id": program.id(),
        "device": device,
        "position": args.position,
        "token": found.token,
        "task": task,
        "repeatable": found.repeatable,
        "n_words": words.len(),
        "n_wrong": wrong,
        "words": shown,
        "token_chosen": found.again.chosen,
    }))?;
    Ok(wrong)
}

/// Whether two words may be the same but for rounding. The verdict's allowance knows the op; this only sorts what is shown.
fn close(got: f32, want: f32, device: &str) -> bool {
    let share = if device == "cuda" { 1e-3 } else { 1e-4 };
    got == want || (got - want).abs() <= share * want.abs().max(got.abs())
}

/// Where the command gets its inputs from.
pub(crate) enum Inputs<'a> {
    /// A schedule, on the gate's tokens.
    Schedule { config: &'a ScheduleConfig, neutral: ScheduleConfig, seed: u64 },
    /// A saved program, on these tokens.
    Program { file: &'a std::path::Path, tokens: &'a [u32] },
}

/// The command that runs a task again: nothing where no task was named.
pub(crate) fn command(
    place: &Place<'_>,
    inputs: &Inputs<'_>,
    found: &FirstDivergence,
) -> Option<String> {
    let (task, position) = (found.task.as_ref()?, found.position?);
    let mut words = vec!["amk rerun --model".to_owned(), quoted(place.model)];
    if let Some(target) = place.target {
        words.push(format!("--target {target}"));
    }
    match inputs {
        Inputs::Schedule { config, neutral, seed } => {
            words.extend(place.kv_capacity.map(|tokens| format!("--kv-capacity {tokens}")));
            let changed = search::changes(neutral, config);
            if !changed.is_empty() {
                words.push(format!("--config '{}'", nested(&changed)));
            }
            words.push(format!("--seed {seed}"));
        }
        Inputs::Program { file, tokens } => {
            let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
            words.push(format!("--program {}", quoted(&file.display().to_string())));
            words.push(format!("--tokens {}", tokens.join(",")));
        }
    }
    let device = if found.by == "device" { "cuda" } else { "cpu" };
    words.push(format!(
        "--device {device} --position {position} --task {}:{}",
        task.worker, task.task
    ));
    Some(words.join(" "))
}

/// A model and where it was to run, as they were named.
pub(crate) struct Place<'a> {
    pub(crate) model: &'a str,
    pub(crate) target: Option<&'a str>,
    /// If it is not the default.
    pub(crate) kv_capacity: Option<u32>,
}

impl<'a> Place<'a> {
    /// What a command was given.
    pub(crate) fn of(context: &'a Context) -> Self {
        Self {
            model: &context.name,
            target: context.named_target.as_deref(),
            kv_capacity: Some(context.kv_capacity),
        }
    }
}

/// Changes as a config file has them.
fn nested(changes: &[search::Change]) -> Value {
    let mut config = Map::new();
    for change in changes {
        let mut at = &mut config;
        let (groups, last) = match change.knob.path().rsplit_once('.') {
            Some((groups, last)) => (groups, last),
            None => ("", change.knob.path()),
        };
        for group in groups.split('.').filter(|group| !group.is_empty()) {
            let inner = at.entry(group).or_insert_with(|| Value::Object(Map::new()));
            let Value::Object(inner) = inner else { unreachable!("a knob is no group") };
            at = inner;
        }
        at.insert(last.to_owned(), change.to.to_json());
    }
    Value::Object(config)
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
