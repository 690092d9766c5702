//! `amk generate`: continues a prompt, greedily, on the reference machine, the graph or the GPU.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ir::schedule::ScheduleConfig;
use model::{Chat, Message, Tokenizer};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use reference_vm::{Order, argmax};
use remote::Served;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use crate::cli::{DeviceChoice, GenerateArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::working::Working;
use crate::{files, report};

/// Feeds one or more tokens at the next positions and returns the logits of each.
type Feed<'a> = dyn FnMut(&[u32]) -> Result<Vec<Vec<f32>>, Failure> + 'a;

/// What was fed and what came out.
struct Generated {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

pub(crate) fn run(args: &GenerateArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let tokenizer = context.model.tokenizer()?;
    let prompt = prompt(args, &context, tokenizer.as_ref())?;
    check(args, &context, &prompt)?;
    let working = Working::on(format!("generating with {}", context.graph().name));
    let generated = execute(args, &context, &prompt)?;
    drop(working);
    if let Some(path) = &args.logits {
        write_logits(path, &generated.logits, context.graph().vocab as usize)?;
        report::say(&format!("{} rows of logits in {}", generated.logits.len(), path.display()));
    }
    let text = tokenizer.map(|t| t.decode(&generated.tokens, true)).transpose()?;
    if let Some(text) = &text {
        report::say(text);
    }
    report::document(&json!({
        "schema": "amk.generate.v1",
        "tokens": generated.tokens,
        "text": text,
        "prompt_tokens": prompt,
        "model": context.graph().name,
    }))?;
    Ok(Exit::Yes)
}

fn prompt(
    args: &GenerateArgs,
    context: &Context,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<u32>, Failure> {
    let Some(text) = &args.prompt else { return Ok(args.tokens.clone()) };
    let Some(tokenizer) = tokenizer else {
        return Err(Failure::usage(format!(
            "{} has no tokenizer.json, so --prompt cannot be read; give --tokens",
            context.graph().name
        )));
    };
    if !args.chat {
        return Ok(tokenizer.encode(text, true)?);
    }
    let message =
        |role: &str, content: &String| Message { role: role.to_owned(), content: content.clone() };
    let system = args.system.iter().map(|text| message("system", text));
    let messages: Vec<Message> = system.chain([message("user", text)]).collect();
    let now = std::time::SystemTime::now();
    let chat = Chat { messages: &messages, add_generation_prompt: true, extra: None, now };
    Ok(tokenizer.encode(&tokenizer.chat(&chat)?, false)?)
}

/// Refuses, before anything runs, what could not be finished.
fn check(args: &GenerateArgs, context: &Context, prompt: &[u32]) -> Result<(), Failure> {
    let (vocab, capacity) = (context.graph().vocab, context.kv_capacity as usize);
    let name = &context.graph().name;
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt has no tokens; give at least one"));
    }
    if let Some(token) = prompt.iter().chain(&args.stop).find(|&&token| token >= vocab) {
        return Err(Failure::usage(format!(
            "token {token} is out of range: the vocabulary of {name} is 0 to {}",
            vocab - 1
        )));
    }
    let needed = prompt.len().saturating_add(args.max_new_tokens.saturating_sub(1));
    if prompt.len() > capacity || needed > capacity {
        return Err(Failure::usage(format!(
            "a prompt of {} tokens and {} new ones need {needed} positions, and the key/value cache holds {capacity}; \
             shorten the prompt, lower --max-new-tokens or raise --kv-capacity (at most {})",
            prompt.len(),
            args.max_new_tokens,
            context.graph().max_positions
        )));
    }
    Ok(())
}

fn execute(args: &GenerateArgs, context: &Context, prompt: &[u32]) -> Result<Generated, Failure> {
    let stop = stop_tokens(args, context);
    let keep = args.logits.is_some();
    let limit = args.max_new_tokens;
    let (graph, weights) = (context.graph(), &*context.model.weights);
    match args.model.place.device {
        DeviceChoice::Eval => {
            let mut evaluator = Evaluator::new(graph, weights)
                .map_err(|e| Failure::usage(format!("{} cannot be evaluated: {e}", graph.name)))?;
            let mut feed = |tokens: &[u32]| {
                let rows = evaluator.run(tokens, if keep { Logits::All } else { Logits::Last });
                rows.map_err(|e| Failure::usage(e.to_string()))
            };
            greedy(&mut feed, prompt, limit, &stop, keep)
        }
        DeviceChoice::Cuda => on_device(args, context, prompt, &stop),
        DeviceChoice::Auto | DeviceChoice::Cpu => {
            let config = config(args, context, prompt)?;
            let program = super::program::lowered(context, &config)?;
            let mut machine = Machine::new(&program, graph, weights)
                .map_err(|e| Failure::usage(e.to_string()))?;
            let mut feed = |tokens: &[u32]| match machine.run(tokens, Order::Waves) {
                Ok(Run::Finished(outputs)) => Ok(outputs.logits),
                Ok(halted @ (Run::Trapped(_) | Run::OutOfFuel { .. } | Run::Stuck { .. })) => {
                    Err(Failure::refused(search::Dropped::Halted(halted).to_string()))
                }
                Err(error) => Err(Failure::usage(error.to_string())),
            };
            greedy(&mut feed, prompt, limit, &stop, keep)
        }
    }
}

/// The schedule that is named, else the best known one for where the generation ends: that is where steps are slowest.
fn config(
    args: &GenerateArgs,
    context: &Context,
    prompt: &[u32],
) -> Result<ScheduleConfig, Failure> {
    let tokens = u32::try_from(prompt.len() + args.max_new_tokens).unwrap_or(u32::MAX);
    context.best_config(args.config.config.as_ref(), tokens)
}

/// The megakernel decodes, choosing and feeding back its own tokens.
fn on_device(
    args: &GenerateArgs,
    context: &Context,
    prompt: &[u32],
    stop: &[u32],
) -> Result<Generated, Failure> {
    if stop.len() > abi::STOP_TOKENS_MAX {
        return Err(Failure::usage(format!(
            "{} stop tokens; the device takes at most {}",
            stop.len(),
            abi::STOP_TOKENS_MAX
        )));
    }
    let config = config(args, context, prompt)?;
    let program = Arc::new(super::program::lowered(context, &config)?);
    let Some(mut device) = context.open_here()? else {
        return Err(Failure::missing("capability missing: no CUDA device"));
    };
    let failed = |error: search::DeviceError| Failure::refused(error.to_string());
    let handle = device.prepare(&program, &config.kernel).map_err(failed)?;
    let limit = u32::try_from(args.max_new_tokens).unwrap_or(u32::MAX);
    let keep = args.logits.is_some();
    let (tokens, logits) = device.generate(handle, prompt, limit, stop, keep).map_err(failed)?;
    Ok(Generated { tokens, logits })
}

/// Text stops where the model says; raw tokens only where the caller says.
fn stop_tokens(args: &GenerateArgs, context: &Context) -> Vec<u32> {
    let mut stop = args.stop.clone();
    if args.prompt.is_some() {
        stop.extend(&context.graph().eos);
    }
    stop
}

fn greedy(
    feed: &mut Feed<'_>,
    prompt: &[u32],
    limit: usize,
    stop: &[u32],
    keep: bool,
) -> Result<Generated, Failure> {
    let mut generated = Generated { tokens: Vec::new(), logits: Vec::new() };
    let mut fed = prompt.to_vec();
    loop {
        let rows = feed(&fed)?;
        let next = rows.last().map(|row| argmax(row));
        if keep {
            generated.logits.extend(rows);
        }
        let Some(next) = next.filter(|_| generated.tokens.len() < limit) else { break };
        generated.tokens.push(next);
        if generated.tokens.len() == limit || stop.contains(&next) {
            break;
        }
        fed = vec![next];
    }
    Ok(generated)
}

fn write_logits(path: &Path, rows: &[Vec<f32>], vocab: usize) -> Result<(), Failure> {
    let bytes: Vec<u8> = rows.iter().flatten().flat_map(|value| value.to_le_bytes()).collect();
    let encode = || {
        let view = TensorView::new(Dtype::F32, vec![rows.len(), vocab], &bytes)?;
        safetensors::serialize(HashMap::from([("logits", view)]), None)
    };
    let file =
        encode().map_err(|e| Failure::usage(format!("the logits cannot be encoded: {e}")))?;
    files::write_whole(path, &file)
}
