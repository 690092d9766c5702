//! Parses requests of the completions and chat APIs. Every field is either supported, neutral, or refused by name: no
//! field that would change the answer is ignored.

use std::collections::BTreeMap;

use ir::sampling::Sampling;
use model::{Chat, Message};
use serde_json::{Map, Value};
use sessions::Priority;

use super::Served;
use super::decode::Work;
use super::refusal::Refusal;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Completions,
    Chat,
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) work: Work,
    /// Stop strings, which end the answer and are not part of it.
    pub(super) stop: Vec<String>,
    pub(super) stream: bool,
    /// Whether a stream ends with a count of tokens.
    pub(super) include_usage: bool,
}

/// The most stop strings, as in OpenAI's API.
const STOPS_MAX: usize = 4;
/// The most likeliest tokens per sampled one.
const TOP_MAX: u64 = 20;
/// Tokens of a completion by default, as in OpenAI's API.
const COMPLETION_TOKENS: u32 = 16;

/// Unsupported fields with their neutral values; any other value is refused.
const NEUTRAL: [(&str, &[&str]); 13] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("presence_penalty", &["0", "0.0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("parallel_tool_calls", &["true", "false"]),
    ("modalities", &["[\"text\"]"]),
    ("store", &["false"]),
];

/// Fields that identify the caller and do not change the answer.
const ABOUT_THE_CALLER: [&str; 4] = ["user", "metadata", "safety_identifier", "prompt_cache_key"];

/// The fields that have not been parsed yet.
struct Fields(Map<String, Value>);

impl Fields {
    /// Removes a field; `None` if it is missing or null.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &mut self,
        name: &str,
        legal: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong =
            || Refusal::field(name, format!("`{name}` is {}; legal: {legal}", short(&value)));
        read(&value).map(Some).ok_or_else(wrong)
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>, Refusal> {
        self.read(name, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    fn integer(&mut self, name: &str, from: u64, to: u64) -> Result<Option<u64>, Refusal> {
        let legal = format!("a whole number, {from} to {to}");
        self.read(name, &legal, |value| value.as_u64().filter(|n| (from..=to).contains(n)))
    }

    fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Refuses the remaining fields unless they are neutral.
    fn end(mut self) -> Result<(), Refusal> {
        for name in ABOUT_THE_CALLER {
            self.take(name);
        }
        for (name, neutral) in NEUTRAL {
            if let Some(value) = self.take(name)
                && !neutral.contains(&value.to_string().as_str())
            {
                let legal = neutral.join(" or ");
                let message =
                    format!("`{name}` is {}; this server supports {legal} only", short(&value));
                return Err(Refusal::field(name, message).coded("unsupported_value"));
            }
        }
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let message =
                    format!("`{}` is not a field that this server supports", clipped(name));
                Err(Refusal::field(clipped(name), message).coded("unsupported_parameter"))
            }
        }
    }
}

fn short(value: &Value) -> String {
    clipped(&value.to_string())
}

fn clipped(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

impl Request {
    pub(super) fn read(api: Api, body: &[u8], served: &Served) -> Result<Self, Refusal> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            Refusal::new(
                axum::http::StatusCode::BAD_REQUEST,
                format!("the body is not JSON: {error}"),
            )
        })?;
        let Value::Object(map) = value else {
            return Err(Refusal::field("body", "the body is not a JSON object"));
        };
        let mut fields = Fields(map);
        check_model(&mut fields, served)?;
        let sampling = sampling(&mut fields, served)?;
        let (stop, stop_ids) = stops(&mut fields, served)?;
        let logprobs = top(&mut fields, api)?;
        let stream = fields.flag("stream")?;
        let include_usage = include_usage(&mut fields)?;
        let priority = priority(&mut fields)?;
        let asked = asked(&mut fields, api)?;
        let prompt = match api {
            Api::Completions => completion_prompt(&mut fields, served)?,
            Api::Chat => chat_prompt(&mut fields, served)?,
        };
        fields.end()?;
        let limit = limit(api, asked, &prompt, served)?;
        let work = Work { prompt, limit, sampling, stop: stop_ids, logprobs, priority };
        Ok(Self { work, stop, stream, include_usage })
    }
}

fn check_model(fields: &mut Fields, served: &Served) -> Result<(), Refusal> {
    let name = fields.read("model", "a string", |value| value.as_str().map(str::to_owned))?;
    match name {
        Some(name) if name == served.name => Ok(()),
        Some(name) => Err(served.no_model(&name)),
        None => {
            let message = format!("`model` is missing; this server has {:?}", served.name);
            Err(Refusal::field("model", message))
        }
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

fn stops(fields: &mut Fields, served: &Served) -> Result<(Vec<String>, Vec<u32>), Refusal> {
    let legal = "a text, or up to four that are not empty";
    let texts = fields.read("stop", legal, |value| match value {
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
        return Err(Refusal::field("stop", format!("`stop` has an empty text; legal: {legal}")));
    }
    let ids = fields.read("stop_token_ids", "a list of token ids", tokens)?.unwrap_or_default();
    check_tokens("stop_token_ids", &ids, served)?;
    Ok((texts, ids.into_iter().chain(served.eos.iter().copied()).collect()))
}

/// The number of likeliest tokens to report, which the two APIs express differently.
fn top(fields: &mut Fields, api: Api) -> Result<Option<usize>, Refusal> {
    match api {
        Api::Completions => Ok(fields.integer("logprobs", 0, TOP_MAX)?.map(|top| top as usize)),
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
    let tier = fields.read("service_tier", legal, |value| match value.as_str()? {
        "auto" | "default" => Some(Priority::Normal),
        "flex" => Some(Priority::Low),
        "priority" => Some(Priority::High),
        _ => None,
    })?;
    Ok(tier.unwrap_or(Priority::Normal))
}

fn asked(fields: &mut Fields, api: Api) -> Result<Option<u32>, Refusal> {
    let names: &[&str] = match api {
        Api::Completions => &["max_tokens"],
        Api::Chat => &["max_completion_tokens", "max_tokens"],
    };
    let mut asked = None;
    for name in names {
        asked = asked.or(fields.integer(name, 1, u32::MAX.into())?);
    }
    Ok(asked.map(|tokens| tokens as u32))
}

fn tokens(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

fn check_tokens(field: &str, ids: &[u32], served: &Served) -> Result<(), Refusal> {
    match ids.iter().find(|id| **id >= served.vocab) {
        None => Ok(()),
        Some(id) => {
            let last = served.vocab.saturating_sub(1);
            let message = format!("`{field}` has token {id}; the vocabulary is 0 to {last}");
            Err(Refusal::field(field, message))
        }
    }
}

fn completion_prompt(fields: &mut Fields, served: &Served) -> Result<Vec<u32>, Refusal> {
    let legal = "one text, or one list of token ids";
    let Some(mut value) = fields.take("prompt") else {
        return Err(Refusal::field("prompt", format!("`prompt` is missing; legal: {legal}")));
    };
    // A batch of one prompt.
    if let Value::Array(list) = &mut value
        && let [Value::String(_) | Value::Array(_)] = list.as_slice()
    {
        value = list.remove(0);
    }
    let ids = match value.as_str() {
        Some(text) => served.encode(text, true, "prompt")?,
        None => tokens(&value).ok_or_else(|| {
            Refusal::field("prompt", format!("`prompt` is {}; legal: {legal}", short(&value)))
        })?,
    };
    check_tokens("prompt", &ids, served)?;
    if ids.is_empty() {
        return Err(Refusal::field("prompt", "`prompt` has no tokens; give at least one"));
    }
    Ok(ids)
}

fn chat_prompt(fields: &mut Fields, served: &Served) -> Result<Vec<u32>, Refusal> {
    let legal = "a list of messages with role and content";
    let messages = fields.take("messages");
    let list = messages.as_ref().and_then(Value::as_array).filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| {
        Refusal::field("messages", format!("`messages` is missing or not a list; legal: {legal}"))
    })?;
    let messages = list.iter().enumerate().map(|(index, value)| message(index, value));
    let messages = messages.collect::<Result<Vec<Message>, Refusal>>()?;
    let extra =
        fields.read("chat_template_kwargs", "an object", |value| value.as_object().cloned())?;
    let now = std::time::SystemTime::now();
    let chat =
        Chat { messages: &messages, add_generation_prompt: true, extra: extra.as_ref(), now };
    let tokenizer = served.tokenizer("messages")?;
    let text = tokenizer.chat(&chat);
    let text = text.map_err(|error| Refusal::field("messages", error.to_string()))?;
    let ids = served.encode(&text, false, "messages")?;
    if ids.is_empty() {
        return Err(Refusal::field("messages", "the chat template made an empty prompt"));
    }
    Ok(ids)
}

/// The text of a part of a message; `None` if the part is not text.
fn text_part(part: &Value) -> Option<&str> {
    match part.get("type").and_then(Value::as_str) {
        Some("text") => part.get("text").and_then(Value::as_str),
        _ => None,
    }
}

fn message(index: usize, value: &Value) -> Result<Message, Refusal> {
    let at = |field: &str| format!("messages[{index}].{field}");
    let text = |field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
    let role = text("role").ok_or_else(|| {
        Refusal::field(at("role"), format!("`{}` is missing or not a text", at("role")))
    })?;
    let content = match value.get("content") {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(parts)) => parts.iter().map(text_part).collect::<Option<String>>(),
        _ => None,
    };
    let content = content.ok_or_else(|| {
        let legal = "a text, or a list of {\"type\": \"text\", \"text\": ..}";
        Refusal::field(
            at("content"),
            format!("`{}` is missing or not text; legal: {legal}", at("content")),
        )
    })?;
    let known = ["role", "content", "name", "refusal", "annotations"];
    let other = value.as_object().into_iter().flatten();
    let other = other.into_iter().find(|(key, v)| !known.contains(&key.as_str()) && !v.is_null());
    match other {
        None => Ok(Message { role, content }),
        Some((key, _)) => {
            let field = at(&clipped(key));
            let message = format!("`{field}` is not a field that this server supports");
            Err(Refusal::field(field, message).coded("unsupported_parameter"))
        }
    }
}

/// The number of tokens to generate, which with the prompt must fit the key/value cache.
fn limit(api: Api, asked: Option<u32>, prompt: &[u32], served: &Served) -> Result<u32, Refusal> {
    let field = if api == Api::Chat { "messages" } else { "prompt" };
    // The last sampled token is not fed.
    let room = (served.capacity as usize + 1).saturating_sub(prompt.len());
    let least = match (asked, api) {
        (Some(asked), _) => asked,
        (None, Api::Completions) => COMPLETION_TOKENS.min(room.max(1) as u32),
        (None, Api::Chat) => (room as u32).max(1),
    };
    if prompt.len() > served.capacity as usize || least as usize > room {
        let message = format!(
            "a prompt of {} tokens and {least} new ones do not fit the key/value cache of {} positions",
            prompt.len(),
            served.capacity
        );
        return Err(Refusal::field(field, message).coded("context_length_exceeded"));
    }
    Ok(least)
}
