//! What the Python module calls: arguments as JSON, as the MCP tools take them, and answers as the commands print them.

use std::ops::ControlFlow;

use ir::sampling::Sampling;
use model::Message;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Engine, Prompt, Request, Search};
use crate::cli::{ConfigArgs, EvaluateArgs, LoopArgs, ModelArgs, ProposeArgs};
use crate::commands;
use crate::failure::Failure;

/// Arguments of [`generate`].
#[derive(Debug, Deserialize)]
struct Generate {
    #[serde(flatten)]
    model: ModelArgs,
    #[serde(flatten)]
    config: ConfigArgs,
    prompt: Given,
    max_new_tokens: usize,
    stop: Vec<u32>,
    logprobs: Option<usize>,
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    seed: u64,
}

/// A prompt: token ids, a text or messages.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Given {
    Tokens(Vec<u32>),
    Text(String),
    Chat(Vec<Message>),
}

impl From<Given> for Prompt {
    fn from(given: Given) -> Self {
        match given {
            Given::Tokens(tokens) => Self::Tokens(tokens),
            Given::Text(text) => Self::Text(text),
            Given::Chat(messages) => Self::Chat(messages),
        }
    }
}

/// The answer of `amk propose`.
///
/// # Errors
/// As the command.
pub fn propose(arguments: Value) -> Result<Value, Failure> {
    written(&commands::propose::answer(&read::<ProposeArgs>(arguments)?)?.document)
}

/// The answer of `amk evaluate`. A schedule that is illegal, wrong or slow is an answer too.
///
/// # Errors
/// As the command.
pub fn evaluate(arguments: Value) -> Result<Value, Failure> {
    written(&commands::evaluate::answer(&read::<EvaluateArgs>(arguments)?)?.document)
}

/// The answer of `amk loop`. Calls `on_trial` with each row of the ledger, and `stop` before each trial.
///
/// # Errors
/// As the command.
pub fn search(
    arguments: Value,
    mut on_trial: impl FnMut(Value) -> ControlFlow<()>,
    stop: impl Fn() -> bool,
) -> Result<Value, Failure> {
    let search = Search::of(read::<LoopArgs>(arguments)?).stop_when(stop);
    // A row that JSON cannot hold could not be in the ledger.
    let on_trial =
        |trial: &search::Trial| on_trial(serde_json::to_value(trial).unwrap_or_default());
    written(&search.on_trial(on_trial).run()?)
}

/// The answer of `amk generate`. Calls `on_token` with each token.
///
/// # Errors
/// As the command.
pub fn generate(
    arguments: Value,
    on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Value, Failure> {
    let call: Generate = read(arguments)?;
    let mut engine = Engine::of(&call.model)?;
    engine.config = call.config;
    let request = Request {
        max_new_tokens: call.max_new_tokens,
        stop: call.stop,
        logprobs: call.logprobs,
        sampling: Sampling {
            temperature: call.temperature,
            top_k: call.top_k,
            top_p: call.top_p,
            min_p: call.min_p,
            repetition_penalty: call.repetition_penalty,
            seed: call.seed,
            ..Sampling::default()
        },
        ..Request::new(call.prompt.into())
    };
    Ok(engine.generate_with(&request, on_token)?.to_json())
}

fn read<A: DeserializeOwned>(arguments: Value) -> Result<A, Failure> {
    serde_json::from_value(arguments).map_err(|error| Failure::usage(format!("arguments: {error}")))
}

fn written(document: &impl Serialize) -> Result<Value, Failure> {
    serde_json::to_value(document).map_err(|error| Failure::bug(error.to_string()))
}
