//! Parses requests of every API into the one internal request. [`Fields`] refuses by name what is not supported.

use std::collections::BTreeMap;
use std::sync::Arc;

use ir::sampling::Sampling;
use serde_json::{Map, Value, json};
use sessions::{Priority, Tenant};

use super::decode::Work;
use super::fields::Fields;
use super::grammar::Wanted;
use super::prompt::{self, Prompt, check_tokens, tokens};
use super::refusal::Refusal;
use super::tenants::{Caller, priority_of, tier_of};
use super::tools::Tools;
use super::{Served, grammar, tools};
use crate::host_rules::HostRules;
use crate::speculate::GUESSES_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    /// OpenAI's `/v1/completions`.
    Completions,
    /// OpenAI's `/v1/chat/completions`.
    Chat,
    /// Anthropic's `/v1/messages`.
    Messages,
    /// OpenAI's `/v1/responses`.
    Responses,
}

/// The internal request, whatever API it came through.
#[derive(Debug)]
pub(super) struct Request {
    /// The choices of the first prompt, then those of the second, and so on.
    pub(super) choices: Vec<Asked>,
    /// Tokens of all prompts.
    pub(super) prompt_tokens: usize,
    /// Stop strings, which end the answer and are not part of it.
    pub(super) stop: Vec<String>,
    pub(super) stream: bool,
    /// Whether a stream ends with a count of tokens.
    pub(super) include_usage: bool,
    /// Whether log probabilities were requested.
    pub(super) scored: bool,
    /// The tier that it has, if it asked for one: a tenant's may be lower.
    pub(super) tier: Option<&'static str>,
    /// The request's settings, in the APIs whose answers repeat them.
    pub(super) settings: Value,
    /// Whose it is.
    pub(super) tenant: Tenant,
}

/// One choice.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) work: Work,
    /// Tokens before which a stop string is ordinary text.
    pub(super) least: u32,
    /// The prompt, if the answer begins with it.
    pub(super) echo: Option<Prompt>,
    /// The tools that it may call.
    pub(super) tools: Option<Arc<Tools>>,
    /// Whether it is the first choice of its prompt.
    pub(super) first: bool,
}

/// The most choices of a request, of all its prompts together.
pub(super) const CHOICES_MAX: usize = 128;
/// The most stop strings, as in OpenAI's API.
const STOPS_MAX: usize = 4;
/// The most likeliest tokens per sampled one.
const TOP_MAX: u64 = 20;
/// Tokens of a completion by default, as in OpenAI's API.
const COMPLETION_TOKENS: u32 = 16;
/// The difference of the seeds of two choices: an odd number, so that all seeds differ.
const NEXT_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// A body's fields.
pub(super) fn fields(body: &[u8]) -> Result<Fields, Refusal> {
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        let message = format!("the body is not JSON: {error}");
        Refusal::new(axum::http::StatusCode::BAD_REQUEST, message)
    })?;
    let Value::Object(map) = value else {
        return Err(Refusal::field("body", "the body is not a JSON object"));
    };
    Ok(Fields::new(map))
}

impl Request {
    pub(super) fn read(
        api: Api,
        body: &[u8],
        caller: &Caller,
        served: &Served,
    ) -> Result<Self, Refusal> {
        let mut fields = fields(body)?;
        let (mut settings, tenant) = (settings(api, &fields.0), caller.tenant(&fields.0));
        check_model(&mut fields, served)?;
        let sampling = sampling(&mut fields, served)?;
        let (stop, stop_ids) = stops(api, &mut fields, served)?;
        let logprobs = top(&mut fields, api)?;
        let stream = fields.flag("stream")?;
        let include_usage = include_usage(&mut fields)?;
        let tiered = fields.0.get("service_tier").is_some_and(|tier| !tier.is_null());
        let priority = caller.priority(priority(&mut fields)?);
        let asked = asked(&mut fields, api)?;
        let echo = api == Api::Completions && fields.flag("echo")?;
        let speculate = guesses(&mut fields, served)?;
        let host = host_rules(&mut fields, echo && logprobs.is_some())?;
        let n = choices_per_prompt(&mut fields, api)?;
        let tools = tools::read(api, &mut fields, served)?;
        let prompts = match api {
            Api::Completions => prompt::completion(&mut fields, served)?,
            Api::Chat | Api::Messages | Api::Responses => {
                vec![prompt::chat(api, &mut fields, tools.as_ref(), served)?]
            }
        };
        let wanted = grammar::wanted(api, &mut fields)?;
        let wanted = ruled(wanted, tools.as_ref(), &host, served)?;
        fields.end()?;
        let constraint = wanted.map(|wanted| served.constraint(wanted)).transpose()?;
        let template = Work {
            prompt: Vec::new(),
            limit: 0,
            sampling,
            host,
            constraint,
            stop: stop_ids,
            logprobs,
            priority,
            speculate,
        };
        let shared = (echo, tools.map(Arc::new));
        let mut choices = Vec::new();
        for prompt in several(&prompts, n)? {
            let limit = limit(api, asked, &prompt.ids, served)?;
            let work = Work { prompt: prompt.ids.clone(), limit, ..template.clone() };
            choices.extend(alike(with_least(work)?, prompt, n, &shared, host));
        }
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let scored = logprobs.is_some();
        let tier = tiered.then(|| tier_of(priority));
        if let (Some(tier), Some(settings)) = (tier, settings.as_object_mut()) {
            settings.insert("service_tier".to_owned(), tier.into());
        }
        Ok(Self {
            choices,
            prompt_tokens,
            stop,
            stream,
            include_usage,
            scored,
            tier,
            settings,
            tenant,
        })
    }
}

fn choices_per_prompt(fields: &mut Fields, api: Api) -> Result<u64, Refusal> {
    let asked = match api {
        Api::Completions | Api::Chat => fields.integer("n", 1, CHOICES_MAX as u64)?,
        Api::Messages | Api::Responses => None,
    };
    Ok(asked.unwrap_or(1))
}

/// The most next tokens that are guessed at once.
fn guesses(fields: &mut Fields, served: &Served) -> Result<u32, Refusal> {
    let asked = fields.integer("speculative.n_max", 0, u64::from(GUESSES_MAX))?;
    Ok(asked.map_or(served.speculate, |n| n as u32))
}

/// The prompts, unless their choices are too many.
fn several(prompts: &[Prompt], n: u64) -> Result<&[Prompt], Refusal> {
    if prompts.len() as u64 * n <= CHOICES_MAX as u64 {
        return Ok(prompts);
    }
    let (prompts, all) = (prompts.len(), CHOICES_MAX);
    let message = format!("{prompts} prompts with {n} choices each are more than {all}");
    Err(Refusal::field("n", message))
}

/// The choices of one prompt: each has a seed of its own.
fn alike(
    work: Work,
    prompt: &Prompt,
    n: u64,
    (echo, tools): &(bool, Option<Arc<Tools>>),
    host: HostRules,
) -> impl Iterator<Item = Asked> {
    (0..n).map(move |choice| {
        let mut work = work.clone();
        let seed = work.sampling.seed;
        work.sampling.seed = seed.wrapping_add(choice.wrapping_mul(NEXT_SEED));
        let echo = echo.then(|| prompt.clone());
        Asked { work, least: host.min_tokens, echo, tools: tools.clone(), first: choice == 0 }
    })
}

/// The grammar of the answer: that of the format, or of a call that has to be made.
fn ruled(
    format: Option<Wanted>,
    tools: Option<&Tools>,
    host: &HostRules,
    served: &Served,
) -> Result<Option<Wanted>, Refusal> {
    if let (Some(format), Some(_)) = (&format, tools) {
        let message = format!("`{}` cannot be combined with `tools`", format.field);
        return Err(Refusal::field(&format.field, message));
    }
    let forced = tools.map(|tools| Ok(tools.forced(served.tokenizer("tools")?))).transpose()?;
    let wanted = format.or(forced.flatten());
    if wanted.is_some() && host.min_tokens > 0 {
        let message =
            "`min_tokens` cannot be combined with a grammar, which says where a text may end";
        return Err(Refusal::field("min_tokens", message));
    }
    Ok(wanted)
}

/// Checks the least number of tokens. If no stop token may come at all, a bias bans them, so that a device can sample.
fn with_least(mut work: Work) -> Result<Work, Refusal> {
    let least = work.host.min_tokens;
    if least > work.limit {
        let message = format!("`min_tokens` is {least}, more than the {} new tokens", work.limit);
        return Err(Refusal::field("min_tokens", message));
    }
    if least == work.limit || work.stop.is_empty() {
        work.host.min_tokens = 0;
    }
    if least == work.limit && least > 0 {
        let banned = work.stop.iter().map(|id| (*id, f32::NEG_INFINITY));
        work.sampling.bias.extend(banned);
    }
    Ok(work)
}

/// What only the host can do.
fn host_rules(fields: &mut Fields, score_prompt: bool) -> Result<HostRules, Refusal> {
    let penalty = |fields: &mut Fields, name: &str| {
        let penalty = fields.read(name, "a number from -2 to 2", |value| {
            value.as_f64().filter(|penalty| (-2.0..=2.0).contains(penalty))
        })?;
        Ok::<f32, Refusal>(penalty.unwrap_or(0.0) as f32)
    };
    Ok(HostRules {
        min_tokens: fields.integer("min_tokens", 0, u32::MAX.into())?.unwrap_or(0) as u32,
        presence_penalty: penalty(fields, "presence_penalty")?,
        frequency_penalty: penalty(fields, "frequency_penalty")?,
        score_prompt,
    })
}

/// The settings that an answer of the responses API repeats.
fn settings(api: Api, fields: &Map<String, Value>) -> Value {
    if api != Api::Responses {
        return Value::Null;
    }
    let names = ["instructions", "max_output_tokens", "user"];
    let pair = |name: &str| (name.to_owned(), fields.get(name).cloned().unwrap_or(Value::Null));
    let mut settings: Map<String, Value> = names.into_iter().map(pair).collect();
    for (name, default) in [
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("temperature", json!(1.0)),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", json!(1.0)),
    ] {
        let given = fields.get(name).filter(|value| !value.is_null());
        settings.insert(name.to_owned(), given.cloned().unwrap_or(default));
    }
    Value::Object(settings)
}

/// Checks the name of the model, which may be missing: there is only one.
pub(super) fn check_model(fields: &mut Fields, served: &Served) -> Result<(), Refusal> {
    let name = fields.read("model", "a string", |value| value.as_str().map(str::to_owned))?;
    match name {
        Some(name) if !served.names.contains(&name) => Err(served.no_model(&name)),
        _ => Ok(()),
    }
}

fn sampling(fields: &mut Fields, served: &Served) -> Result<Sampling, Refusal> {
    let legal = "an object of token ids with numbers from -100 to 100";
    let bias = fields.read("logit_bias", legal, |value| {
        let pair = |(token, bias): (&String, &Value)| {
            let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
            Some((token.parse::<u32>().ok()?, bias as f32))
        };
        value.as_object()?.iter().map(pair).collect::<Option<BTreeMap<u32, f32>>>()
    })?;
    let seed = fields.read("seed", "a whole number", |value| {
        value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64))
    })?;
    let sampling = Sampling {
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        top_k: fields.integer("top_k", 0, u32::MAX.into())?.unwrap_or(0) as u32,
        top_p: fields.number("top_p")?.unwrap_or(1.0),
        min_p: fields.number("min_p")?.unwrap_or(0.0),
        repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
        bias: bias.unwrap_or_default(),
        seed: seed.unwrap_or_else(super::fresh_seed),
    };
    match sampling.problems(served.vocab).into_iter().next() {
        None => Ok(sampling),
        Some(problem) => Err(Refusal::field(problem.field, format!("{problem}"))),
    }
}

fn stops(
    api: Api,
    fields: &mut Fields,
    served: &Served,
) -> Result<(Vec<String>, Vec<u32>), Refusal> {
    let legal = "a text, or up to four that are not empty";
    let name = if api == Api::Messages { "stop_sequences" } else { "stop" };
    let texts = fields.read(name, legal, |value| match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) if list.len() <= STOPS_MAX => {
            list.iter().map(|text| text.as_str().map(str::to_owned)).collect()
        }
        Value::Array(_) | Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            None
        }
    })?;
    let texts = texts.unwrap_or_default();
    if texts.iter().any(String::is_empty) {
        return Err(Refusal::field(name, format!("`{name}` has an empty text; legal: {legal}")));
    }
    let ids = fields.read("stop_token_ids", "a list of token ids", tokens)?.unwrap_or_default();
    check_tokens("stop_token_ids", &ids, served)?;
    let eos: &[u32] = if fields.flag("ignore_eos")? { &[] } else { &served.eos };
    Ok((texts, ids.into_iter().chain(eos.iter().copied()).collect()))
}

/// The number of likeliest tokens to report, which the two APIs express differently.
fn top(fields: &mut Fields, api: Api) -> Result<Option<usize>, Refusal> {
    match api {
        Api::Completions => Ok(fields.integer("logprobs", 0, TOP_MAX)?.map(|top| top as usize)),
        Api::Messages | Api::Responses => Ok(None),
        Api::Chat => {
            let wanted = fields.flag("logprobs")?;
            let top = fields.integer("top_logprobs", 0, TOP_MAX)?;
            if top.is_some() && !wanted {
                let message = "`top_logprobs` needs `logprobs`: true";
                return Err(Refusal::field("top_logprobs", message));
            }
            Ok(wanted.then_some(top.unwrap_or(0) as usize))
        }
    }
}

fn include_usage(fields: &mut Fields) -> Result<bool, Refusal> {
    let legal = "{\"include_usage\": true or false}";
    let usage = fields.read("stream_options", legal, |value| match value.as_object()? {
        map if map.keys().all(|key| key == "include_usage") => {
            map.get("include_usage").map_or(Some(false), Value::as_bool)
        }
        _ => None,
    })?;
    Ok(usage.unwrap_or(false))
}

/// OpenAI's service tier as a priority.
fn priority(fields: &mut Fields) -> Result<Priority, Refusal> {
    let legal = "auto, default, flex or priority";
    let tier = fields.read("service_tier", legal, |value| priority_of(value.as_str()?))?;
    Ok(tier.unwrap_or(Priority::Normal))
}

/// The most new tokens, and the name of the field that says so.
fn asked(fields: &mut Fields, api: Api) -> Result<Option<(&'static str, u32)>, Refusal> {
    let names: &[&'static str] = match api {
        Api::Completions | Api::Messages => &["max_tokens"],
        Api::Chat => &["max_completion_tokens", "max_tokens"],
        Api::Responses => &["max_output_tokens"],
    };
    // No new tokens: for the log probabilities of the prompt.
    let least = u64::from(api != Api::Completions);
    let mut asked = None;
    for &name in names {
        let tokens = fields.integer(name, least, u32::MAX.into())?;
        asked = asked.or(tokens.map(|tokens| (name, tokens as u32)));
    }
    if api == Api::Messages && asked.is_none() {
        let message = "`max_tokens` is missing; legal: a whole number, 1 or more";
        return Err(Refusal::field("max_tokens", message));
    }
    Ok(asked)
}

/// The number of tokens to generate, which with the prompt must fit the key/value cache.
fn limit(
    api: Api,
    asked: Option<(&'static str, u32)>,
    prompt: &[u32],
    served: &Served,
) -> Result<u32, Refusal> {
    let long = prompt.len() > served.capacity as usize;
    let field = match (api, asked) {
        (_, Some((name, _))) if !long => name,
        (Api::Completions, _) => "prompt",
        (Api::Chat | Api::Messages, _) => "messages",
        (Api::Responses, _) => "input",
    };
    // The last sampled token is not fed.
    let room = (served.capacity as usize + 1).saturating_sub(prompt.len());
    let least = match (asked, api) {
        (Some((_, asked)), _) => asked,
        (None, Api::Completions) => COMPLETION_TOKENS.min(room.max(1) as u32),
        (None, Api::Chat | Api::Messages | Api::Responses) => (room as u32).max(1),
    };
    if long || least as usize > room {
        let message = format!(
            "a prompt of {} tokens and {least} new ones do not fit the key/value cache of {} positions",
            prompt.len(),
            served.capacity
        );
        return Err(Refusal::field(field, message).coded("context_length_exceeded"));
    }
    Ok(least)
}
