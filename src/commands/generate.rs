//! `amk generate`: continues a prompt, by greedy decoding or sampling.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

use model::Message;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use crate::cli::{GenerateArgs, GuessArgs};
use crate::config_source::ConfigSource;
use crate::engine::DraftModel;
use crate::failure::{Exit, Failure, Outcome};
use crate::library::{Engine, Prompt, Request};
use crate::live_text::LiveText;
use crate::spinner::Spinner;
use crate::{files, report};

const PROMPT_BYTES_MAX: u64 = 4 << 20;

pub(crate) fn run(args: &GenerateArgs) -> Outcome {
    let mut engine = Engine::of(&args.model)?;
    engine.config.clone_from(&args.config);
    engine.prefill = args.prefill;
    engine.streaming = args.stream.streaming();
    engine.check_weights = args.check_weights;
    engine.log.clone_from(&args.log);
    let graph = engine.context().graph();
    let request = Request {
        prompt: prompt(args)?,
        max_new_tokens: args.max_new_tokens,
        stop: args.stop.clone(),
        sampling: args.sampling.sampling(graph.vocab)?,
        logprobs: args.sampling.logprobs,
        keep_logits: args.logits.is_some(),
        speculate: args.guesses.speculate,
    };
    engine.draft = draft(args, &engine, &request)?;
    let graph = engine.context().graph();
    let working = Spinner::on(format!("generating with {}", graph.name));
    let mut live = LiveText::new(engine.tokenizer(), working);
    let generated = engine.generate_with(&request, |token| {
        live.push(token);
        ControlFlow::Continue(())
    })?;
    let (_, gaps) = live.finish()?;
    if let Some(path) = &args.logits {
        write_logits(path, &generated.logits, graph.vocab as usize)?;
        report::say(&format!("{} rows of logits in {}", generated.logits.len(), path.display()));
    }
    // A text was shown as it came.
    if generated.text.is_none() {
        report::say(&listed(&generated.tokens));
    }
    let mut document = generated.to_json();
    document["between_tokens_ms"] = json!(gaps);
    report::document(&document)?;
    Ok(Exit::Yes)
}

/// The draft that the arguments name, for a text as long as the request's may become.
fn draft(
    args: &GenerateArgs,
    engine: &Engine,
    request: &Request,
) -> Result<Option<DraftModel>, Failure> {
    let GuessArgs { speculate, draft } = &args.guesses;
    let Some(name) = draft else { return Ok(None) };
    if args.stream.stream_weights {
        let message =
            "--stream-weights is for one model, and --draft loads another before: leave one out";
        return Err(Failure::usage(message));
    }
    let tokens = engine.prompt(&request.prompt)?.len().saturating_add(request.max_new_tokens);
    let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
    DraftModel::of(Some(name), *speculate, (engine.context(), engine.on_gpu()), tokens)
}

/// Tokens in the format of `--tokens`.
fn listed(tokens: &[u32]) -> String {
    let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    format!("tokens: {}", tokens.join(","))
}

fn prompt(args: &GenerateArgs) -> Result<Prompt, Failure> {
    let Some(text) = &args.prompt else { return Ok(Prompt::Tokens(args.tokens.clone())) };
    let text = if text == "-" { prompt_from_stdin(args)? } else { text.clone() };
    if !args.chat {
        return Ok(Prompt::Text(text));
    }
    let system = args.system.iter().map(|system| Message::new("system", system.clone()));
    Ok(Prompt::Chat(system.chain([Message::new("user", text)]).collect()))
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
