//! `amk rerun`: runs one task again on its original inputs, and compares its words with the expected ones.

use std::cmp::Ordering;
use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use ir::{BufferId, KvDtype};
use reference_vm::divergence::{Examiner, Word, ulps};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Fired, Order};
use search::{Device, Expected, FirstDivergence, TaskAt};
use serde_json::{Map, Value, json};

use crate::cli::{DeviceChoice, RerunArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::schedule_choice::{Auto, choose};
use crate::spinner::Spinner;
use crate::{files, report};

const SCHEMA: &str = "amk.rerun.v2";

struct Found {
    token: u32,
    words: Vec<Word>,
    /// Whether the rerun gives the same bits as the whole step; unknown on a GPU.
    repeatable: Option<bool>,
}

/// The state of a GPU after the position: its buffers and its logits.
struct Left {
    buffers: Vec<Vec<f32>>,
    logits: Vec<f32>,
}

pub(crate) fn run(args: &RerunArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let tokens = context.predicted_at();
    let config = choose(&context, &args.config, tokens, Auto::Reproducible)?.config;
    let program = match &args.program {
        Some(file) => files::verified(file)?,
        None => context.lowered(&config)?,
    };
    check_task(&program, args.task)?;
    let working = Spinner::on("preparing the inputs of the task");
    let left = match args.model.place.device {
        DeviceChoice::Cuda => Some(on_device(&context, args, &program, &config)?),
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Eval => None,
    };
    let found = at_position(&context, args, &program, left.as_ref())?;
    drop(working);
    let wrong = print(&found, &program, args, left.is_some())?;
    Ok(if wrong == 0 && found.repeatable != Some(false) { Exit::Yes } else { Exit::No })
}

fn check_task(program: &Program, (at, task): (u32, u32)) -> Result<(), Failure> {
    let last = match program.workers.get(at as usize).map(|worker| worker.tasks.len()) {
        None => format!("the program has workers 0 to {}", program.workers.len() - 1),
        Some(0) => format!("worker {at} has no tasks; `amk disasm` lists them"),
        Some(tasks) if task as usize >= tasks => {
            format!("worker {at} has tasks 0 to {}; `amk disasm` lists them", tasks - 1)
        }
        Some(_) => return Ok(()),
    };
    Err(Failure::usage(format!("--task {at}:{task}: {last}")))
}

/// Runs the reference VM up to the task's step, then the task alone.
fn at_position(
    context: &Context,
    args: &RerunArgs,
    program: &Verified<Program>,
    left: Option<&Left>,
) -> Result<Found, Failure> {
    let (graph, weights) = (context.graph(), &*context.model.weights);
    let unrunnable = |e: &dyn std::fmt::Display| {
        Failure::usage(format!("the program does not run on {}: {e}", graph.name))
    };
    let examiner = match left {
        None => Examiner::new(graph, weights),
        Some(_) => Examiner::of_device(graph, weights),
    };
    let examiner = examiner.map_err(|e| unrunnable(&e))?;
    let mut machine = Machine::new(program, graph, weights).map_err(|e| unrunnable(&e))?;
    let mut found = None;
    let mut look = |machine: &Machine<'_>, token: u32, fired: &[Fired]| {
        if machine.positions() == args.position + 1 {
            found = Some(look_at(&examiner, (machine, token, fired), args.task, program, left));
        }
        found.is_none()
    };
    let tokens = match (args.tokens.is_empty(), left) {
        (true, None) => {
            let expected = Expected::new(graph, weights, program.kv_capacity, args.seed, None)
                .map_err(|e| unrunnable(&e))?;
            expected.each_position(&mut machine, Some(args.position), &mut look);
            Vec::new()
        }
        _ => tokens(context, args),
    };
    for token in tokens {
        let ran = machine.traced(token, Order::Waves).map_err(|e| unrunnable(&e))?;
        let (Run::Finished(_), fired) = ran else {
            return Err(Failure::refused(search::Rejection::Halted(ran.0).to_string()));
        };
        if !look(&machine, token, &fired) {
            break;
        }
    }
    found.unwrap_or_else(|| {
        Err(Failure::usage(format!(
            "nothing was run at --position {}: give one that the gate ran, or --tokens up to it",
            args.position
        )))
    })
}

/// The tokens up to the position: the given ones, or those of a gate from position zero on.
fn tokens(context: &Context, args: &RerunArgs) -> Vec<u32> {
    if args.tokens.is_empty() {
        return search::draw_tokens(args.seed, context.graph().vocab, args.position + 1);
    }
    args.tokens.iter().copied().take(args.position + 1).collect()
}

fn look_at(
    examiner: &Examiner<'_>,
    (machine, token, fired): (&Machine<'_>, u32, &[Fired]),
    (worker, task): (u32, u32),
    program: &Program,
    left: Option<&Left>,
) -> Result<Found, Failure> {
    let is_it = |fired: &&Fired| fired.worker.0 == worker && fired.task == task;
    let missing = || Failure::refused("the task did not run in this step");
    if let Some(left) = left {
        let (left, _) = search::left_in(program, fired, &left.buffers, Some(&left.logits));
        let one = left.iter().find(is_it).ok_or_else(missing)?;
        let words = examiner.words(machine, token, &left, one);
        return Ok(Found { token, words, repeatable: None });
    }
    let before = fired.iter().find(is_it).ok_or_else(missing)?;
    let again = machine.again(before, token).map_err(|trap| Failure::refused(trap.to_string()))?;
    let same = (&again.writes, &again.appended, again.chosen)
        == (&before.writes, &before.appended, before.chosen);
    let words = examiner.words(machine, token, fired, &again);
    Ok(Found { token, words, repeatable: Some(same) })
}

/// A GPU runs only whole steps: reads its buffers after the task's step.
fn on_device(
    context: &Context,
    args: &RerunArgs,
    program: &Verified<Program>,
    config: &ScheduleConfig,
) -> Result<Left, Failure> {
    let device = context.open_process(&args.sharing)?;
    let mut device = device.ok_or_else(|| Failure::no_gpu("--device cuda wants one"))?;
    let program = Arc::new(program.clone());
    let handle = device.prepare(&program, &config.kernel)?;
    let rows = device.run(handle, &tokens(context, args), 0)?.logits;
    let all: Vec<_> = (0..program.buffers.len() as u32).map(BufferId).collect();
    let buffers = device.buffers(handle, &all)?;
    let buffers =
        buffers.ok_or_else(|| Failure::missing("this device cannot say what its buffers hold"))?;
    Ok(Left { buffers, logits: rows.into_iter().last().unwrap_or_default() })
}

/// Prints the words, wrong ones first, and returns the number of wrong ones.
fn print(
    found: &Found,
    program: &Program,
    args: &RerunArgs,
    on_gpu: bool,
) -> Result<usize, Failure> {
    let task = TaskAt::of(program, args.task.0, args.task.1);
    let wrong = found.words.iter().filter(|word| word.is_wrong()).count();
    let mut order: Vec<&Word> = found.words.iter().collect();
    let off = |word: &Word| word.want.map_or(0.0, |want| (word.got - want).abs());
    order.sort_by(|a, b| {
        (b.is_wrong(), off(b)).partial_cmp(&(a.is_wrong(), off(a))).unwrap_or(Ordering::Equal)
    });
    order.truncate(args.words);
    let count = found.words.len();
    report::say(&format!("{task} at position {}: {count} words, {wrong} wrong", args.position));
    let name = |word: &Word| search::place_name(program, word.place);
    let ulp = |word: &Word| word.want.and_then(|want| ulps(word.got, want));
    let line = |word: &&Word| {
        let want = word.want.map_or_else(|| "not known".to_owned(), |want| want.to_string());
        let ulp = ulp(word).map_or_else(String::new, |ulp| format!(", {ulp} ulp"));
        (format!("{}[{}]", name(word), word.index), format!("got {}, want {want}{ulp}", word.got))
    };
    report::table(&order.iter().map(line).collect::<Vec<_>>());
    if on_gpu {
        report::say(
            "the GPU ran the whole step; these words are what the task left in its buffers",
        );
    }
    let shown = |word: &&Word| {
        json!({
            "buffer": name(word), "index": word.index, "got": word.got, "want": word.want,
            "ulp": ulp(word), "allowed": word.allowed, "wrong": word.is_wrong(),
        })
    };
    report::document(&json!({
        "schema": SCHEMA,
        "model": program.model,
        "program_id": program.id(),
        "device": if on_gpu { "cuda" } else { "cpu" },
        "position": args.position,
        "token": found.token,
        "task": task,
        "repeatable": found.repeatable,
        "n_words": count,
        "n_wrong": wrong,
        "words": order.iter().map(shown).collect::<Vec<_>>(),
    }))?;
    Ok(wrong)
}

/// The source of the command's inputs.
pub(crate) enum Inputs<'a> {
    /// A schedule, on the gate's tokens.
    Schedule { config: &'a ScheduleConfig, default: ScheduleConfig, seed: u64 },
    /// A saved program, on these tokens, or on the gate's if there are none.
    Program { file: &'a std::path::Path, tokens: &'a [u32], seed: u64 },
}

/// The command that reruns a task; `None` if no task was named.
pub(crate) fn command(
    place: &Place<'_>,
    inputs: &Inputs<'_>,
    found: &FirstDivergence,
) -> Option<String> {
    let (task, position) = (found.task.as_ref()?, found.position?);
    let mut words = vec!["amk rerun --model".to_owned(), quoted(place.model)];
    if place.kv_dtype != KvDtype::default() {
        words.push(format!("--kv-dtype {}", place.kv_dtype.name()));
    }
    if let Some(target) = place.target {
        words.push(format!("--target {target}"));
    }
    match inputs {
        Inputs::Schedule { config, default, seed } => {
            words.extend(place.kv_capacity.map(|tokens| format!("--kv-capacity {tokens}")));
            let changed = search::changes(default, config);
            words.push(match changed.is_empty() {
                true => "--schedule default".to_owned(),
                false => format!("--config '{}'", nested(&changed)),
            });
            words.push(format!("--seed {seed}"));
        }
        Inputs::Program { file, tokens, seed } => {
            words.push(format!("--program {}", quoted(&file.display().to_string())));
            let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
            words.push(match tokens.is_empty() {
                true => format!("--seed {seed}"),
                false => format!("--tokens {}", tokens.join(",")),
            });
        }
    }
    let device = if found.by == "device" { "cuda" } else { "cpu" };
    words.push(format!(
        "--device {device} --position {position} --task {}:{}",
        task.worker, task.task
    ));
    Some(words.join(" "))
}

/// A model and its place, as named in the arguments.
pub(crate) struct Place<'a> {
    pub(crate) model: &'a str,
    pub(crate) target: Option<&'a str>,
    /// If it is not the default.
    pub(crate) kv_capacity: Option<u32>,
    pub(crate) kv_dtype: KvDtype,
}

impl<'a> Place<'a> {
    pub(crate) fn of(context: &'a Context) -> Self {
        Self {
            model: &context.name,
            target: context.named_target.as_deref(),
            kv_capacity: Some(context.kv_capacity),
            kv_dtype: context.graph().kv_dtype,
        }
    }
}

/// Changes as a nested config.
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

/// Quotes a word for a shell.
pub(super) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
