//! `amk chat`: a conversation in the terminal, line by line, on the model's own chat template.

use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use model::{Chat, Message, Tokenizer};
use remote::Served;
use serde_json::json;
use sessions::Priority;
use vm_host::KvPool;

use crate::cli::{ChatArgs, DeviceChoice, GuessArgs};
use crate::context::Context;
use crate::engine::{self, DraftModel, Engine, Megakernel, SharedPages, Windows};
use crate::failure::{Exit, Failure, Outcome};
use crate::host_rules::HostRules;
use crate::live_text::LiveText;
use crate::memory::{self, Use};
use crate::schedule_choice::{Auto, Chosen, choose};
use crate::sequence::{SLICE, Sequence, Told, Work};
use crate::speculate::Draft;
use crate::spinner::Spinner;
use crate::{interrupt, report};

/// Longest line of a user, in bytes.
const LINE_MAX: u64 = 1 << 20;
const COMMANDS: &str =
    "/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer";

/// Whether an answer is being generated, which Ctrl-C stops.
static ANSWERING: AtomicBool = AtomicBool::new(false);

pub(crate) fn run(args: &ChatArgs) -> Outcome {
    let context = Context::new(&args.model)?;
    let tokenizer = context.model.tokenizer()?;
    let name = &context.graph().name;
    let tokenizer = tokenizer.filter(Tokenizer::has_chat_template).ok_or_else(|| {
        Failure::usage(format!(
            "{name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), so there is no chat with it: take its -Instruct sibling, or use `amk generate --prompt`"
        ))
    })?;
    let (gpu, on_graph) = match context.device {
        DeviceChoice::Eval => (None, true),
        // Without a GPU the graph is the fastest way to an answer.
        DeviceChoice::Auto => (context.open_here(false)?, true),
        DeviceChoice::Cpu | DeviceChoice::Cuda => (context.open_here(false)?, false),
    };
    args.prefill.check(gpu.is_some())?;
    let GuessArgs { speculate, draft } = &args.guesses;
    let on = (&context, gpu.is_some());
    let draft = DraftModel::of(draft.as_deref(), *speculate, on, context.kv_capacity)?;
    let host = Use::Host { sequences: 2, positions: context.kv_capacity.into() };
    memory::check(&context.model, if gpu.is_some() { Use::Device } else { host })?;
    if gpu.is_none() && on_graph {
        let shared = Some(SharedPages::new(1, context.kv_capacity, context.graph().layers.len()));
        if draft.is_some() {
            return Err(DraftModel::no_windows());
        }
        return converse(args, &context, &tokenizer, (&mut engine::graph(&context, shared), None));
    }
    let draft = draft.as_ref().map(DraftModel::open).transpose()?;
    let Chosen { config, .. } = choose(&context, &args.config, context.kv_capacity, Auto::Fastest)?;
    let program = Arc::new(context.lowered(&config)?);
    let Some(mut gpu) = gpu else {
        let shared = Some(SharedPages::new(1, context.kv_capacity, context.graph().layers.len()));
        let mut machine = engine::reference(&context, &program, shared);
        return converse(args, &context, &tokenizer, (&mut machine, draft));
    };
    gpu.set_prefill(args.prefill.prefill)?;
    let handle = gpu.prepare(&program, &config.kernel)?;
    if let Some(windows) = Windows::of(&context, &config, args.guesses.speculate)? {
        let mut engine = windows.boot(gpu, handle)?.sharing();
        return converse(args, &context, &tokenizer, (&mut engine, draft));
    }
    gpu.serve(handle, 1, KvPool::Full)?;
    converse(args, &context, &tokenizer, (&mut Megakernel::new(gpu, handle, 1).sharing(), None))
}

/// Reads lines and answers them until the input ends. The draft's kernel has left afterwards.
fn converse(
    args: &ChatArgs,
    context: &Context,
    tokenizer: &Tokenizer,
    (engine, mut draft): (&mut dyn Engine, Option<Draft<'_>>),
) -> Outcome {
    interrupt::catch("answers", |_| {
        if !ANSWERING.load(Ordering::SeqCst) {
            report::say(&format!("({COMMANDS})"));
        }
    });
    report::say(&format!("{}: {COMMANDS}", context.graph().name));
    let message = |role: &str, content: String| Message::new(role, content);
    let first: Vec<Message> =
        args.system.iter().map(|text| message("system", text.clone())).collect();
    let mut messages = first.clone();
    let mut input = std::io::stdin().lock();
    loop {
        report::say_piece("> ");
        let Some(line) = next_line(&mut input)? else { break };
        match line.trim() {
            "" => continue,
            "/exit" => break,
            "/reset" => {
                messages.clone_from(&first);
                report::say("the conversation is forgotten");
                continue;
            }
            command if command.starts_with('/') && !command.contains(' ') => {
                report::say(&format!("there is no {command}: {COMMANDS}"));
                continue;
            }
            _ => {}
        }
        messages.push(message("user", line));
        match prompt(args, context, tokenizer, &messages)? {
            Ok(work) => {
                let text = answer(context, tokenizer, (engine, draft.as_mut()), work)?;
                messages.push(message("assistant", text));
            }
            Err(why) => {
                messages.pop();
                report::say(&why);
            }
        }
    }
    report::say("");
    report::document(&json!({
        "schema": "amk.chat.v1",
        "model": context.graph().name,
        "messages": messages,
    }))?;
    Ok(Exit::Yes)
}

/// The next line; `None` at the end of the input.
fn next_line(input: &mut impl BufRead) -> Result<Option<String>, Failure> {
    let mut line = Vec::new();
    let read = std::io::Read::take(&mut *input, LINE_MAX).read_until(b'\n', &mut line);
    let unreadable = |why: &str| Failure::usage(format!("standard input cannot be read: {why}"));
    read.map_err(|error| unreadable(&error.to_string()))?;
    if line.len() as u64 == LINE_MAX {
        return Err(unreadable(&format!("a line is longer than {LINE_MAX} bytes")));
    }
    let line = String::from_utf8(line).map_err(|_| unreadable("it is not UTF-8"))?;
    Ok((!line.is_empty()).then(|| line.trim_end_matches(['\n', '\r']).to_owned()))
}

/// The work of the next answer; the inner error says why there is no room for it.
fn prompt(
    args: &ChatArgs,
    context: &Context,
    tokenizer: &Tokenizer,
    messages: &[Message],
) -> Result<Result<Work, String>, Failure> {
    let now = SystemTime::now();
    let chat = Chat { messages, add_generation_prompt: true, extra: None, now };
    let prompt = tokenizer.encode(&tokenizer.chat(&chat)?, false)?;
    let capacity = context.kv_capacity as usize;
    let vocab = context.graph().vocab;
    if prompt.is_empty() || prompt.iter().any(|&token| token >= vocab) {
        let why = "its chat template gives no prompt, or one with tokens outside of the vocabulary";
        return Err(Failure::usage(format!("{}: {why}", context.graph().name)));
    }
    if prompt.len() >= capacity {
        return Ok(Err(format!(
            "no room for an answer: the conversation has {} tokens and the key/value cache holds {capacity}; /reset, or start again with a larger --kv-capacity (at most {})",
            prompt.len(),
            context.positions_max()
        )));
    }
    let limit = args.max_new_tokens.min(capacity - prompt.len());
    Ok(Ok(Work {
        prompt,
        limit: u32::try_from(limit).unwrap_or(u32::MAX),
        sampling: args.sampling.sampling(vocab)?,
        stop: context.graph().eos.clone(),
        logprobs: None,
        host: HostRules::default(),
        constraint: None,
        priority: Priority::Normal,
        speculate: args.guesses.speculate,
    }))
}

/// Generates an answer and shows it as it comes; what there is of it at Ctrl-C is the answer.
fn answer(
    context: &Context,
    tokenizer: &Tokenizer,
    (engine, mut draft): (&mut dyn Engine, Option<&mut Draft<'_>>),
    work: Work,
) -> Result<String, Failure> {
    interrupt::forget();
    ANSWERING.store(true, Ordering::SeqCst);
    let mut live = LiveText::new(Some(tokenizer), Spinner::on("reading"));
    let mut sequence = Sequence::new(work);
    let begun = sequence.begin(engine, 0);
    begun.map_err(|broken| context.unevaluated(broken))?;
    let mut finish = None;
    while finish.is_none() && !interrupt::came() {
        let most = if sequence.chosen.is_empty() { engine.prompt_slice() } else { SLICE as u64 };
        let turn = sequence.turn(
            engine,
            draft.as_deref_mut(),
            (0, most),
            &mut |told| {
                if let Told::Token(token, _) = told {
                    live.push(token);
                }
            },
            &mut interrupt::came,
        );
        (_, finish) = turn.map_err(|broken| match engine.lost() {
            Some(why) => Failure::missing(why),
            None => Failure::from(broken),
        })?;
    }
    engine.end(0);
    ANSWERING.store(false, Ordering::SeqCst);
    let (text, _) = live.finish()?;
    if finish.is_none() {
        report::say("(stopped)");
    }
    Ok(text)
}
