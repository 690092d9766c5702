//! `amk generate`: continues a prompt, on the reference machine, the graph or the GPU.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use abi::Activity;
use ir::sampling::{Logprobs, Sampling, Seen, logprobs};
use model::{Chat, Message, Tokenizer};
use remote::Served;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use vm_host::{ReadBy, Streaming};

use crate::cli::{DeviceChoice, GenerateArgs, PrefillChoice, ReadByChoice};
use crate::config_source::ConfigSource;
use crate::context::Context;
use crate::device::Gpu;
use crate::engine::{self, Engine, Megakernel};
use crate::failure::{Exit, Failure, Outcome};
use crate::observe::{Observer, Sequences};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose};
use crate::working::Working;
use crate::{files, report};

const PROMPT_BYTES_MAX: u64 = 4 << 20;

/// What was fed and what came out.
#[derive(Default)]
struct Generated {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    /// Of each token, if asked for.
    logprobs: Vec<Logprobs>,
    /// Where tokens were chosen: on the host or on the device.
    chosen_on: &'static str,
    /// How the weights came in, and what a comparison of them said; on the device.
    weights: Value,
    weights_check: Value,
    /// Where the schedule comes from; the graph runs without one.
    schedule: Option<ScheduleSource>,
}

/// What is asked for beside a prompt.
struct Wish {
    sampling: Sampling,
    limit: usize,
    stop: Vec<u32>,
    /// Keep the logits of every position.
    keep: bool,
    logprobs: Option<usize>,
}

pub(crate) fn run(args: &GenerateArgs) -> Outcome {
    let began = Instant::now();
    let context = Context::new(&args.model)?;
    let tokenizer = context.model.tokenizer()?;
    let prompt = prompt(args, &context, tokenizer.as_ref())?;
    check(args, &context, &prompt)?;
    let wish = Wish {
        sampling: args.sampling.sampling(context.graph().vocab)?,
        limit: args.max_new_tokens,
        stop: stop_tokens(args, &context),
        keep: args.logits.is_some(),
        logprobs: args.sampling.logprobs,
    };
    let working = Working::on(format!("generating with {}", context.graph().name));
    let observer = observer(args, &context)?;
    let mut generated = execute(args, &context, &prompt, &wish, &observer, began)?;
    drop(working);
    if let Some(path) = &args.logits {
        write_logits(path, &generated.logits, context.graph().vocab as usize)?;
        report::say(&format!("{} rows of logits in {}", generated.logits.len(), path.display()));
    }
    let text = tokenizer.map(|t| t.decode(&generated.tokens, true)).transpose()?;
    match &text {
        Some(text) => report::say_text(text),
        None => report::say(&listed(&generated.tokens)),
    }
    let mut document = json!({
        "schema": "amk.generate.v1",
        "tokens": generated.tokens,
        "text": text,
        "prompt_tokens": prompt,
        "model": context.graph().name,
        "sampling": generated.chosen_on,
        "schedule_source": generated.schedule,
    });
    if !generated.weights.is_null() {
        document["weights"] = generated.weights.take();
    }
    if !generated.weights_check.is_null() {
        document["weights_check"] = generated.weights_check.take();
    }
    if args.sampling.logprobs.is_some() {
        document["logprobs"] =
            generated.tokens.iter().zip(&generated.logprobs).map(scored).collect();
    }
    report::document(&document)?;
    Ok(Exit::Yes)
}

/// Tokens as `--tokens` takes them.
fn listed(tokens: &[u32]) -> String {
    let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    format!("tokens: {}", tokens.join(","))
}

/// The page of this process, for `amk top`.
fn observer(args: &GenerateArgs, context: &Context) -> Result<Observer, Failure> {
    let device = match args.model.place.device {
        DeviceChoice::Eval => "eval",
        DeviceChoice::Cuda => "cuda",
        DeviceChoice::Auto | DeviceChoice::Cpu => "cpu",
    };
    Observer::start(context, ("generate", device), 1, None)
}

/// A token with its log probability and the likeliest in its place. JSON has no infinity, which becomes null.
fn scored((token, logprobs): (&u32, &Logprobs)) -> Value {
    let top = logprobs.top.iter();
    let top = top.map(|(token, logprob)| json!({"token": token, "logprob": logprob}));
    json!({"token": token, "logprob": logprobs.chosen, "top": top.collect::<Vec<Value>>()})
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
    let text = &if text == "-" { prompt_from_stdin(args)? } else { text.clone() };
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

/// The prompt on standard input, without the line end that `echo` adds.
fn prompt_from_stdin(args: &GenerateArgs) -> Result<String, Failure> {
    if args.config.config == Some(ConfigSource::Stdin) {
        return Err(Failure::usage(
            "--prompt - and --config - both read standard input; name a file",
        ));
    }
    let unreadable = |error: std::io::Error| {
        Failure::usage(format!(
            "cannot read the prompt from standard input: {error}; give UTF-8 text"
        ))
    };
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .take(PROMPT_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > PROMPT_BYTES_MAX {
        let most = PROMPT_BYTES_MAX >> 20;
        return Err(Failure::usage(format!("the prompt is longer than {most} MiB; shorten it")));
    }
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Refuses, before anything runs, what could not be finished.
fn check(args: &GenerateArgs, context: &Context, prompt: &[u32]) -> Result<(), Failure> {
    let (vocab, capacity) = (context.graph().vocab, context.kv_capacity as usize);
    let name = &context.graph().name;
    let weights = args.weights.stream_weights || args.weights.check_weights;
    if weights && args.model.place.device != DeviceChoice::Cuda {
        let message = "--stream-weights and --check-weights are about the GPU; add --device cuda";
        return Err(Failure::usage(message));
    }
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

fn execute(
    args: &GenerateArgs,
    context: &Context,
    prompt: &[u32],
    wish: &Wish,
    observer: &Observer,
    began: Instant,
) -> Result<Generated, Failure> {
    // A kernel counts its own commands.
    let said = Sequences::new(observer.publisher(), args.model.place.device != DeviceChoice::Cuda);
    said.sole((prompt.len() + wish.limit) as u64);
    args.prefill.check(args.model.place.device == DeviceChoice::Cuda)?;
    match args.model.place.device {
        DeviceChoice::Eval => on_host(&mut engine::graph(context), context, prompt, wish, &said),
        DeviceChoice::Cuda => on_device(args, context, prompt, wish, (observer, &said), began),
        DeviceChoice::Auto | DeviceChoice::Cpu => {
            let Chosen { config, source } = schedule(args, context, prompt)?;
            let program = context.lowered(&config)?;
            let mut machine = engine::reference(context, &program);
            let generated = on_host(&mut machine, context, prompt, wish, &said)?;
            Ok(Generated { schedule: Some(source), ..generated })
        }
    }
}

/// The schedule that is named, else the best known one for where the generation ends: that is where steps are slowest.
fn schedule(args: &GenerateArgs, context: &Context, prompt: &[u32]) -> Result<Chosen, Failure> {
    let tokens = u32::try_from(prompt.len() + args.max_new_tokens).unwrap_or(u32::MAX);
    choose(context, &args.config, tokens, Auto::Fastest)
}

/// The megakernel decodes, chooses and feeds back. Where log probabilities are asked for, or more than it holds, the host gets its logits.
fn on_device(
    args: &GenerateArgs,
    context: &Context,
    prompt: &[u32],
    wish: &Wish,
    (observer, said): (&Observer, &Sequences),
    began: Instant,
) -> Result<Generated, Failure> {
    let fits = wish.stop.len() <= abi::STOP_TOKENS_MAX
        && wish.sampling.bias.len() <= abi::BIAS_MAX as usize;
    let chosen_there = fits && wish.logprobs.is_none();
    if wish.keep && args.prefill.prefill == PrefillChoice::Chunks {
        let message = "--prefill chunks: chunks give the logits of the last position alone, and --logits wants those of all";
        return Err(Failure::usage(message));
    }
    let Chosen { config, source } = schedule(args, context, prompt)?;
    let program = Arc::new(context.lowered(&config)?);
    let Some(mut device) = context.open_once()? else {
        return Err(Failure::missing("capability missing: no CUDA device"));
    };
    device.observed(observer.lookout(), observer.publisher());
    device.set_prefill(args.prefill.prefill)?;
    if args.weights.stream_weights {
        device.stream_weights(streaming(args));
    }
    let handle = device.prepare(&program, &config.kernel)?;
    if chosen_there {
        let limit = u32::try_from(wish.limit).unwrap_or(u32::MAX);
        said.enter(Activity::Running);
        let (tokens, logits) =
            device.generate(handle, prompt, &wish.sampling, limit, &wish.stop, wish.keep)?;
        said.chosen(0, tokens.len() as u64);
        let (schedule, chosen_on) = (Some(source), "device");
        let mut generated =
            Generated { tokens, logits, schedule, chosen_on, ..Generated::default() };
        generated.look_at_weights(args, &mut device, began)?;
        return Ok(generated);
    }
    let mut kernel = Megakernel::new(device, handle, 1);
    let mut generated = on_host(&mut kernel, context, prompt, wish, said)?;
    generated.schedule = Some(source);
    generated.look_at_weights(args, kernel.gpu(), began)?;
    Ok(generated)
}

fn streaming(args: &GenerateArgs) -> Streaming {
    let read_by = match args.weights.read_weights_by {
        ReadByChoice::Auto => ReadBy::Auto,
        ReadByChoice::IoUring => ReadBy::IoUring,
        ReadByChoice::Pread => ReadBy::Pread,
    };
    Streaming { read_by, limit: Duration::from_secs(args.weights.weights_deadline.max(1)) }
}

impl Generated {
    fn look_at_weights(
        &mut self,
        args: &GenerateArgs,
        device: &mut Gpu<'_>,
        began: Instant,
    ) -> Result<(), Failure> {
        self.weights = device.weights_report(began)?;
        if args.weights.check_weights {
            self.weights_check = device.check_weights()?;
        }
        Ok(())
    }
}

/// Text stops where the model says; raw tokens only where the caller says.
fn stop_tokens(args: &GenerateArgs, context: &Context) -> Vec<u32> {
    let mut stop = args.stop.clone();
    if args.prompt.is_some() {
        stop.extend(&context.graph().eos);
    }
    stop
}

/// Chooses on the host from rows that a machine computes.
fn on_host(
    engine: &mut dyn Engine,
    context: &Context,
    prompt: &[u32],
    wish: &Wish,
    said: &Sequences,
) -> Result<Generated, Failure> {
    let positions = (prompt.len() + wish.limit) as u64;
    engine.begin(0, positions).map_err(|broken| context.unevaluated(broken))?;
    let mut generated = Generated { chosen_on: "host", ..Generated::default() };
    let mut fed = prompt.to_vec();
    let mut seen = Seen::default();
    let mut position = 0;
    loop {
        said.begin(0, position as usize, fed.len());
        let began = Instant::now();
        let rows = match wish.keep {
            true => engine.rows(0, &fed)?,
            false => vec![engine.feed(0, &fed, true)?],
        };
        said.ran(0, fed.len(), began.elapsed());
        position += fed.len() as u32;
        seen.extend(fed.iter().copied());
        let row = rows.last().filter(|_| generated.tokens.len() < wish.limit);
        let next = row.map(|row| {
            let next = wish.sampling.choose(row, &seen, position);
            generated
                .logprobs
                .extend(next.zip(wish.logprobs).map(|(token, top)| logprobs(row, token, top)));
            next.ok_or_else(|| {
                let what = "every token is banned by --logit-bias or not a number";
                Failure::refused(format!("no token for position {position}: {what}"))
            })
        });
        let next = next.transpose()?;
        if wish.keep {
            generated.logits.extend(rows);
        }
        let Some(next) = next else { break };
        generated.tokens.push(next);
        said.chosen(0, 1);
        if generated.tokens.len() == wish.limit || wish.stop.contains(&next) {
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
