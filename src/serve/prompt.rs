//! The prompts of a request: text, token ids or messages of any of the APIs, as token ids.

use model::{Chat, Message};
use serde_json::{Value, json};

use super::Served;
use super::fields::{Fields, short};
use super::messages;
use super::refusal::Refusal;
use super::request::{Api, CHOICES_MAX};
use super::tools::Tools;

/// A prompt.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    /// The text, if it was given as one.
    pub(super) text: Option<String>,
}

pub(super) fn tokens(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

pub(super) fn check_tokens(field: &str, ids: &[u32], served: &Served) -> Result<(), Refusal> {
    match ids.iter().find(|id| **id >= served.vocab) {
        None => Ok(()),
        Some(id) => {
            let last = served.vocab.saturating_sub(1);
            let message = format!("`{field}` has token {id}; the vocabulary is 0 to {last}");
            Err(Refusal::field(field, message))
        }
    }
}

/// The prompts of a completion: one text or list of token ids, or a list of them.
pub(super) fn completion(fields: &mut Fields, served: &Served) -> Result<Vec<Prompt>, Refusal> {
    let legal = "a text, a list of token ids, or a list of either";
    let Some(value) = fields.take("prompt") else {
        return Err(Refusal::field("prompt", format!("`prompt` is missing; legal: {legal}")));
    };
    let several = value
        .as_array()
        .filter(|list| list.first().is_some_and(|first| first.is_string() || first.is_array()));
    let list = several.map_or(std::slice::from_ref(&value), Vec::as_slice);
    if list.len() > CHOICES_MAX {
        let message = format!("`prompt` has {} prompts; the most are {CHOICES_MAX}", list.len());
        return Err(Refusal::field("prompt", message));
    }
    list.iter().map(|value| one(value, legal, served)).collect()
}

fn one(value: &Value, legal: &str, served: &Served) -> Result<Prompt, Refusal> {
    let ids = match value.as_str() {
        Some(text) => served.encode(text, true, "prompt")?,
        None => tokens(value).ok_or_else(|| {
            Refusal::field("prompt", format!("`prompt` is {}; legal: {legal}", short(value)))
        })?,
    };
    check_tokens("prompt", &ids, served)?;
    if ids.is_empty() {
        return Err(Refusal::field("prompt", "`prompt` has no tokens; give at least one"));
    }
    Ok(Prompt { ids, text: value.as_str().map(str::to_owned) })
}

/// The prompt of a chat: the messages, in the form of the API, and the tools, through the model's template.
pub(super) fn chat(
    api: Api,
    fields: &mut Fields,
    tools: Option<&Tools>,
    served: &Served,
) -> Result<Prompt, Refusal> {
    let name = if api == Api::Responses { "input" } else { "messages" };
    let system = system(api, fields)?;
    let mut messages: Vec<Message> = system.into_iter().collect();
    match fields.take(name) {
        Some(Value::String(text)) if api == Api::Responses => {
            messages.push(Message::new("user", text));
        }
        Some(Value::Array(list)) if !list.is_empty() => {
            for (index, value) in list.iter().enumerate() {
                let read = messages::read(api, &format!("{name}[{index}]"), value, served)?;
                if api == Api::Responses {
                    read.into_iter().for_each(|message| messages::push(&mut messages, message));
                } else {
                    messages.extend(read);
                }
            }
        }
        _ => {
            let text = if api == Api::Responses { "a text, or " } else { "" };
            let legal = format!("{text}a list of messages with role and content");
            let message = format!("`{name}` is missing, empty or not a list; legal: {legal}");
            return Err(Refusal::field(name, message));
        }
    }
    if api == Api::Messages && messages.last().is_some_and(|last| last.role == "assistant") {
        let message = "the last of `messages` must have the role user: an answer cannot be begun by the client";
        return Err(Refusal::field(name, message));
    }
    let generation = fields.read("add_generation_prompt", "true or false", Value::as_bool)?;
    let mut extra =
        fields.read("chat_template_kwargs", "an object", |value| value.as_object().cloned())?;
    if let Some(tools) = tools {
        extra.get_or_insert_default().insert("tools".to_owned(), json!(tools.definitions));
    }
    let now = std::time::SystemTime::now();
    let chat = Chat {
        messages: &messages,
        add_generation_prompt: generation.unwrap_or(true),
        extra: extra.as_ref(),
        now,
    };
    let text = served.tokenizer(name)?.chat(&chat);
    let text = text.map_err(|error| Refusal::field(name, error.to_string()))?;
    let ids = served.encode(&text, false, name)?;
    if ids.is_empty() {
        return Err(Refusal::field(name, "the chat template made an empty prompt"));
    }
    Ok(Prompt { ids, text: None })
}

/// The system message, in the APIs that have a field of its own for it.
fn system(api: Api, fields: &mut Fields) -> Result<Option<Message>, Refusal> {
    let name = match api {
        Api::Messages => "system",
        Api::Responses => "instructions",
        Api::Completions | Api::Chat => return Ok(None),
    };
    let content =
        fields.read(name, "a text, or a list of text blocks", |v| messages::text(api, v))?;
    Ok(content.map(|content| Message::new("system", content)))
}
