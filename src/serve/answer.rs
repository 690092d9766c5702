//! Answers in the shape of each API.

use serde_json::{Map, Value, json};

use super::refusal::Refusal;
use super::request::Api;
use super::text::{Piece, Scored};
use super::tool_calls::Call;
use super::{messages_answer, responses_answer};

/// The fields common to all documents of one answer.
#[derive(Clone, Debug)]
pub(super) struct Heading {
    pub(super) api: Api,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) fingerprint: String,
    /// Whether log probabilities were requested.
    pub(super) scored: bool,
    /// Whether a stream ends with a count of tokens.
    pub(super) include_usage: bool,
    /// The service tier, if the request named one.
    pub(super) tier: Option<&'static str>,
    /// The request's settings, in the APIs whose answers repeat them.
    pub(super) settings: Value,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    /// Those of the prompt that were in the cache.
    pub(super) cached: usize,
    pub(super) completion: usize,
}

impl Usage {
    fn document(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        })
    }
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ending {
    /// `stop` or `length`.
    pub(super) reason: &'static str,
    /// The stop string that ended it.
    pub(super) matched: Option<String>,
    /// Whether tools were called.
    pub(super) called: bool,
}

impl Ending {
    /// The reason in OpenAI's APIs.
    fn finish_reason(&self) -> &'static str {
        if self.called && self.reason == "stop" { "tool_calls" } else { self.reason }
    }
}

/// A server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    /// Its name, in the APIs that name events.
    pub(super) event: Option<String>,
    pub(super) data: String,
}

impl Line {
    /// An event without a name.
    fn plain(document: &Value) -> Self {
        Self { event: None, data: document.to_string() }
    }

    /// An event with the name of the document's type.
    pub(super) fn named(document: &Value) -> Self {
        let event = document["type"].as_str().map(str::to_owned);
        Self { event, data: document.to_string() }
    }
}

/// The state of a stream that later events repeat.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Events sent, in the API that numbers them.
    pub(super) number: u64,
    /// The text of the item that is open, and the items before it, in the API that repeats them.
    pub(super) text: String,
    pub(super) items: Vec<Value>,
    /// Content blocks begun, in the API that has them, and whether the last one is a text that has not ended.
    pub(super) blocks: usize,
    pub(super) open: bool,
    pub(super) ending: Option<Ending>,
    pub(super) usage: Usage,
}

/// A part of a choice, in a stream.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub(super) index: usize,
    pub(super) piece: &'a Piece,
    /// Characters of the choice before it.
    pub(super) sent: usize,
    pub(super) ending: Option<&'a Ending>,
}

impl Heading {
    /// A document of these choices; `streamed` if it is one of several.
    fn document(&self, streamed: bool, choices: Vec<Value>) -> Value {
        let object = match (self.api, streamed) {
            (Api::Completions, _) => "text_completion",
            (_, false) => "chat.completion",
            (_, true) => "chat.completion.chunk",
        };
        let mut document = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        });
        if let Some(tier) = self.tier {
            document["service_tier"] = tier.into();
        }
        document
    }

    /// A choice: its text in the API's form, and its finish reason if it ends.
    fn choice(
        index: usize,
        (name, text): (&str, Value),
        logprobs: Value,
        ending: Option<&Ending>,
    ) -> Value {
        let reason = ending.map(Ending::finish_reason);
        json!({"index": index, name: text, "logprobs": logprobs, "finish_reason": reason})
    }

    /// The complete answer in one document.
    pub(super) fn whole(&self, choices: &[(Piece, Ending)], usage: Usage) -> Value {
        match (self.api, choices) {
            (Api::Messages, [(piece, ending), ..]) => {
                return messages_answer::whole(self, piece, ending, usage);
            }
            (Api::Responses, [(piece, ending), ..]) => {
                return responses_answer::whole(self, piece, ending, usage);
            }
            _ => {}
        }
        let choice = |(index, (piece, ending)): (usize, &(Piece, Ending))| {
            let text = match self.api {
                Api::Completions => ("text", json!(piece.text)),
                Api::Chat | Api::Messages | Api::Responses => ("message", message(piece)),
            };
            Self::choice(index, text, self.logprobs(&piece.scored, 0), Some(ending))
        };
        let mut document = self.document(false, choices.iter().enumerate().map(choice).collect());
        document["usage"] = usage.document();
        document
    }

    /// The first events of a stream of this many choices.
    pub(super) fn opening(&self, choices: usize, progress: &mut Progress) -> Vec<Line> {
        match self.api {
            Api::Completions => Vec::new(),
            Api::Chat => {
                let role = |index| {
                    let delta = ("delta", json!({"role": "assistant", "content": ""}));
                    let choice = Self::choice(index, delta, Value::Null, None);
                    Line::plain(&self.document(true, vec![choice]))
                };
                (0..choices).map(role).collect()
            }
            Api::Messages => messages_answer::opening(self, progress.usage),
            Api::Responses => responses_answer::opening(self, progress),
        }
    }

    /// The events of a part of a streamed answer.
    pub(super) fn chunk(&self, part: &Part<'_>, progress: &mut Progress) -> Vec<Line> {
        let Part { index, piece, sent, ending } = part;
        let text = match self.api {
            Api::Messages => return messages_answer::delta(piece, progress),
            Api::Responses => return responses_answer::delta(self, piece, progress),
            Api::Completions => ("text", json!(piece.text)),
            Api::Chat => ("delta", delta(piece)),
        };
        let logprobs = self.logprobs(&piece.scored, *sent);
        let choice = Self::choice(*index, text, logprobs, *ending);
        vec![Line::plain(&self.document(true, vec![choice]))]
    }

    /// The last events of a stream, after every choice has ended.
    pub(super) fn closing(&self, progress: &mut Progress) -> Vec<Line> {
        match self.api {
            Api::Messages => messages_answer::closing(progress),
            Api::Responses => responses_answer::closing(self, progress),
            Api::Completions | Api::Chat => {
                let mut document = self.document(true, Vec::new());
                document["usage"] = progress.usage.document();
                let usage = self.include_usage.then(|| Line::plain(&document));
                let done = Line { event: None, data: "[DONE]".to_owned() };
                usage.into_iter().chain([done]).collect()
            }
        }
    }

    /// An error after the status has been sent: clients look for it in the stream.
    pub(super) fn error(&self, refusal: &Refusal, progress: &Progress) -> Line {
        match self.api {
            Api::Completions | Api::Chat => Line::plain(&refusal.document()),
            Api::Messages => Line::named(&refusal.document()),
            Api::Responses => Line::named(&json!({
                "type": "error", "code": refusal.code, "message": refusal.message,
                "param": refusal.param, "sequence_number": progress.number,
            })),
        }
    }

    fn logprobs(&self, scored: &[Scored], sent: usize) -> Value {
        if !self.scored {
            return Value::Null;
        }
        if self.api == Api::Completions {
            return legacy(scored, sent);
        }
        let top = |(text, logprob): &(String, f64)| entry(text, Some(*logprob));
        let content = scored.iter().map(|token| {
            let mut document = entry(&token.text, token.logprob);
            document["top_logprobs"] = token.top.iter().map(top).collect();
            document
        });
        json!({"content": content.collect::<Vec<Value>>(), "refusal": null})
    }
}

/// The message of a chat. Without text beside calls its content is null.
fn message(piece: &Piece) -> Value {
    let content = Some(&piece.text).filter(|text| piece.calls.is_empty() || !text.is_empty());
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !piece.calls.is_empty() {
        message["tool_calls"] = piece.calls.iter().map(call).collect();
    }
    message
}

/// The change of a message.
fn delta(piece: &Piece) -> Value {
    let mut delta = json!({});
    if !piece.text.is_empty() {
        delta["content"] = json!(piece.text);
    }
    if !piece.calls.is_empty() {
        let numbered = |made: &Call| {
            let mut document = call(made);
            document["index"] = json!(made.index);
            document
        };
        delta["tool_calls"] = piece.calls.iter().map(numbered).collect();
    }
    delta
}

fn call(call: &Call) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": call.id, "type": "function", "function": function})
}

/// A token's text and log probability. A token that ends inside a character has no bytes of its own to report.
fn entry(text: &str, logprob: Option<f64>) -> Value {
    let whole = !text.contains(char::REPLACEMENT_CHARACTER);
    let bytes = whole.then_some(text.as_bytes());
    json!({"token": text, "logprob": logprob.map(finite), "bytes": bytes})
}

/// JSON has no infinity: a log probability of minus infinity becomes -9999.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

/// The form of the completions API: four parallel lists.
fn legacy(scored: &[Scored], sent: usize) -> Value {
    let mut offset = sent;
    let offsets = scored.iter().map(|token| {
        let at = offset;
        offset += token.text.chars().count();
        at
    });
    let offsets: Vec<usize> = offsets.collect();
    let top = |token: &Scored| {
        let mut map = Map::new();
        // Tokens that end inside a character can have the same text; the likeliest, which comes first, is kept.
        for (text, logprob) in &token.top {
            map.entry(text.as_str()).or_insert_with(|| json!(finite(*logprob)));
        }
        token.logprob.map(|_| map)
    };
    let logprob = |token: &Scored| token.logprob.map(finite);
    json!({
        "tokens": scored.iter().map(|token| &token.text).collect::<Vec<_>>(),
        "token_logprobs": scored.iter().map(logprob).collect::<Vec<_>>(),
        "top_logprobs": scored.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
