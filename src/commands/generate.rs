//! `amk generate`: continues a prompt, on the reference VM, the graph or the GPU.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::sampling::Logprobs;
use ir::schedule::ScheduleConfig;
use model::{Chat, Message, Tokenizer};
use remote::Served;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use sessions::Priority;
use vm_host::{KvPool, ReadBy, Streaming};

use crate::cli::{DeviceChoice, GenerateArgs, PrefillChoice, ReadByChoice};
use crate::config_source::ConfigSource;
use crate::context::Context;
use crate::engine::{self, Engine, Megakernel};
use crate::failure::{Exit, Failure, Outcome};
use crate::host_rules::HostRules;
use crate::live_text::LiveText;
use crate::memory::{self, Use};
use crate::observe::{Observer, Sequences};
use crate::schedule_choice::{Auto, Chosen, ScheduleSource, choose};
use crate::sequence::{SLICE, Sequence, Told, Work};
use crate::spinner::Spinner;
use crate::{files, report};

const PROMPT_BYTES_MAX: u64 = 4 << 20;

/// The tokens that were fed and generated.
#[derive(Default)]
struct Generated {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    /// Of each token, if requested.
    logprobs: Vec<Logprobs>,
    /// Where tokens were sampled: on the host or on the device.
    chosen_on: &'static str,
    /// How the weights were loaded, and the result of comparing them; on the device.
    weights: Value,
    weights_check: Value,
    /// The source of the schedule; the graph runs without one.
    schedule: Option<ScheduleSource>,
}

pub(crate) fn run(args: &GenerateArgs) -> Outcome {
    let began = Instant::now();
    let context = Context::new(&args.model)?;
    let tokenizer = context.model.tokenizer()?;
    let prompt = prompt(args, &context, tokenizer.as_ref())?;
    check(args, &context, &prompt)?;
    let work = Work {
        prompt: prompt.clone(),
        limit: u32::try_from(args.max_new_tokens).unwrap_or(u32::MAX),
        sampling: args.sampling.sampling(context.graph().vocab)?,
        host: HostRules::default(),
        constraint: None,
        stop: stop_tokens(args, &context),
        logprobs: args.sampling.logprobs,
        priority: Priority::Normal,
    };
    let working = Spinner::on(format!("generating with {}", context.graph().name));
    let observer = observer(args, &context)?;
    let mut live = LiveText::new(tokenizer.as_ref(), working);
    let mut generated = execute(args, &context, work, (&observer, &mut live), began)?;
    live.finish()?;
    if let Some(path) = &args.logits {
        write_logits(path, &generated.logits, context.graph().vocab as usize)?;
        report::say(&format!("{} rows of logits in {}", generated.logits.len(), path.display()));
    }
    let text = tokenizer.map(|t| t.decode(&generated.tokens, true)).transpose()?;
    // A text was shown as it came.
    if text.is_none() {
        report::say(&listed(&generated.tokens));
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

/// Tokens in the format of `--tokens`.
fn listed(tokens: &[u32]) -> String {
    let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    format!("tokens: {}", tokens.join(","))
}

/// The telemetry page of this process, for `amk top`.
fn observer(args: &GenerateArgs, context: &Context) -> Result<Observer, Failure> {
    let device = match args.model.place.device {
        DeviceChoice::Eval => "eval",
        DeviceChoice::Cuda => "cuda",
        DeviceChoice::Auto | DeviceChoice::Cpu => "cpu",
    };
    Observer::start(context, ("generate", device), 1, None)
}

/// A token with its log probability and the likeliest alternatives. JSON has no infinity; it becomes null.
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
    let message = |role: &str, content: &String| Message::new(role, content.clone());
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
    let input = std::io::stdin().lock();
    let text = files::read_input(input, &"the prompt on standard input", PROMPT_BYTES_MAX)?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

/// Refuses, before anything runs, a generation that could not be finished.
fn check(args: &GenerateArgs, context: &Context, prompt: &[u32]) -> Result<(), Failure> {
    let (vocab, capacity) = (context.graph().vocab, context.kv_capacity as usize);
    let name = &context.graph().name;
    let weights = args.stream_weights || args.check_weights;
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
    work: Work,
    (observer, live): (&Observer, &mut LiveText<'_>),
    began: Instant,
) -> Result<Generated, Failure> {
    // A kernel counts its own commands.
    let on_gpu = args.model.place.device == DeviceChoice::Cuda;
    let said = Sequences::new(observer.publisher(), !on_gpu);
    said.sole(work.positions());
    args.prefill.check(on_gpu)?;
    let host = Use::Host { sequences: 1, positions: work.positions() };
    memory::check(&context.model, if on_gpu { Use::Device } else { host })?;
    let keep = args.logits.is_some();
    if args.model.place.device == DeviceChoice::Eval {
        return continued(&mut engine::graph(context, None), context, (work, keep), (&said, live));
    }
    // For the end of the generation, where steps are slowest.
    let tokens = u32::try_from(work.positions()).unwrap_or(u32::MAX);
    if on_gpu && keep && args.prefill.prefill == PrefillChoice::Chunks {
        let message = "--prefill chunks: chunks give the logits of the last position alone, and --logits wants those of all";
        return Err(Failure::usage(message));
    }
    let Chosen { config, source } = choose(context, &args.config, tokens, Auto::Fastest)?;
    let program = Arc::new(context.lowered(&config)?);
    let generated = if on_gpu {
        let mut kernel = kernel(args, context, (&program, &config), &work, observer)?;
        let mut generated = continued(&mut kernel, context, (work, keep), (&said, live))?;
        generated.weights = kernel.gpu().weights_report(began)?;
        if args.check_weights {
            generated.weights_check = kernel.gpu().check_weights()?;
        }
        generated
    } else {
        {
            let mut machine = engine::reference(context, &program, None);
            continued(&mut machine, context, (work, keep), (&said, live))?
        }
    };
    Ok(Generated { schedule: Some(source), ..generated })
}

/// The megakernel, which decodes, samples and feeds back. The host samples from its logits if log probabilities are
/// requested or the device's limits are exceeded.
fn kernel<'a>(
    args: &GenerateArgs,
    context: &'a Context,
    (program, config): (&Arc<Verified<Program>>, &ScheduleConfig),
    work: &Work,
    observer: &Observer,
) -> Result<Megakernel<'a>, Failure> {
    let Some(mut device) = context.open_here(false)? else {
        return Err(Failure::missing("capability missing: no CUDA device"));
    };
    device.observed(observer.monitor(), observer.publisher());
    device.set_prefill(args.prefill.prefill)?;
    if args.stream_weights {
        device.stream_weights(streaming(args));
    }
    let handle = device.prepare(program, &config.kernel)?;
    // Chunks are run before the first launch.
    if args.logits.is_some() || !device.takes_chunks(work.prompt.len().saturating_sub(1)) {
        device.serve(handle, 1, KvPool::Full)?;
    }
    Ok(Megakernel::new(device, handle, 1))
}

fn streaming(args: &GenerateArgs) -> Streaming {
    let read_by = match args.read_weights_by {
        ReadByChoice::Auto => ReadBy::Auto,
        ReadByChoice::IoUring => ReadBy::IoUring,
        ReadByChoice::Pread => ReadBy::Pread,
    };
    Streaming { read_by, limit: Duration::from_secs(args.weights_deadline.max(1)) }
}

/// Text stops at the model's end tokens; raw tokens only at those of the caller.
fn stop_tokens(args: &GenerateArgs, context: &Context) -> Vec<u32> {
    let mut stop = args.stop.clone();
    if args.prompt.is_some() {
        stop.extend(&context.graph().eos);
    }
    stop
}

/// Runs the prompt and generates until the text ends.
fn continued(
    engine: &mut dyn Engine,
    context: &Context,
    (work, keep): (Work, bool),
    (said, live): (&Sequences, &mut LiveText<'_>),
) -> Result<Generated, Failure> {
    let mut sequence = Sequence::new(work);
    sequence.rows = keep.then(Vec::new);
    sequence.begin(engine, 0).map_err(|broken| context.unevaluated(broken))?;
    let mut scores = Vec::new();
    let mut finish = None;
    while finish.is_none() {
        // The first token alone, to measure its latency.
        let most = match sequence.chosen.len() {
            0 => sequence.work.prompt.len() - sequence.fed,
            _ => SLICE,
        };
        said.begin(0, sequence.fed, sequence.next(most as u64).len());
        let (began, before) = (Instant::now(), sequence.chosen.len());
        let mut tell = |told| match told {
            Told::Token(token, logprobs) => {
                live.push(token);
                scores.extend(logprobs);
            }
            Told::Prompt(_) | Told::Kernel(_) => {}
        };
        let turn = sequence.turn(engine, (0, most as u64), &mut tell, &mut || false);
        let (ran, ended) = turn.map_err(|broken| match engine.lost() {
            Some(why) => Failure::missing(why),
            None => Failure::from(broken),
        })?;
        said.ran(0, ran, began.elapsed());
        said.chosen(0, (sequence.chosen.len() - before) as u64);
        finish = ended;
    }
    Ok(Generated {
        chosen_on: if sequence.chosen_there { "device" } else { "host" },
        tokens: sequence.chosen,
        logits: sequence.rows.unwrap_or_default(),
        logprobs: scores,
        ..Generated::default()
    })
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
