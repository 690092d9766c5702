//! Answers in the shape of OpenAI's API.

use serde_json::{Map, Value, json};

use super::request::Api;
use super::text::{Piece, Scored};

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
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub(super) prompt: usize,
    pub(super) completion: usize,
}

impl Usage {
    fn document(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        })
    }
}

impl Heading {
    /// A document of these choices; `streamed` if it is one of several.
    fn document(&self, streamed: bool, choices: Vec<Value>) -> Value {
        let object = match (self.api, streamed) {
            (Api::Completions, _) => "text_completion",
            (Api::Chat, false) => "chat.completion",
            (Api::Chat, true) => "chat.completion.chunk",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        })
    }

    /// The only choice: its text in the API's form, and its finish reason if it ends.
    fn choice((name, text): (&str, Value), logprobs: Value, finish: Option<&str>) -> Vec<Value> {
        vec![json!({"index": 0, name: text, "logprobs": logprobs, "finish_reason": finish})]
    }

    /// The complete answer in one document; `finish` is `stop` or `length`.
    pub(super) fn whole(&self, piece: &Piece, finish: &str, usage: Usage) -> Value {
        let text = match self.api {
            Api::Completions => ("text", json!(piece.text)),
            Api::Chat => {
                ("message", json!({"role": "assistant", "content": piece.text, "refusal": null}))
            }
        };
        let choice = Self::choice(text, self.logprobs(&piece.scored, 0), Some(finish));
        let mut document = self.document(false, choice);
        document["usage"] = usage.document();
        document
    }

    /// A chunk of a streamed answer: `sent` characters came before it; `finish` is the reason if it is the last.
    pub(super) fn chunk(&self, piece: &Piece, sent: usize, finish: Option<&str>) -> Value {
        let text = match self.api {
            Api::Completions => ("text", json!(piece.text)),
            Api::Chat if piece.text.is_empty() => ("delta", json!({})),
            Api::Chat => ("delta", json!({"content": piece.text})),
        };
        self.document(true, Self::choice(text, self.logprobs(&piece.scored, sent), finish))
    }

    /// The first chunk of a streamed chat: the role.
    pub(super) fn opening(&self) -> Option<Value> {
        let delta = ("delta", json!({"role": "assistant", "content": ""}));
        let opening = || self.document(true, Self::choice(delta, Value::Null, None));
        (self.api == Api::Chat).then(opening)
    }

    /// The last chunk of a stream, if a count was requested.
    pub(super) fn usage(&self, usage: Usage) -> Value {
        let mut document = self.document(true, Vec::new());
        document["usage"] = usage.document();
        document
    }

    fn logprobs(&self, scored: &[Scored], sent: usize) -> Value {
        if !self.scored {
            return Value::Null;
        }
        match self.api {
            Api::Completions => legacy(scored, sent),
            Api::Chat => {
                let top = |(text, logprob): &(String, f64)| entry(text, *logprob);
                let content = scored.iter().map(|token| {
                    let mut document = entry(&token.text, token.logprob);
                    document["top_logprobs"] = token.top.iter().map(top).collect();
                    document
                });
                json!({"content": content.collect::<Vec<Value>>(), "refusal": null})
            }
        }
    }
}

/// A token's text and log probability. A token that ends inside a character has no bytes of its own to report.
fn entry(text: &str, logprob: f64) -> Value {
    let whole = !text.contains(char::REPLACEMENT_CHARACTER);
    json!({"token": text, "logprob": finite(logprob), "bytes": whole.then_some(text.as_bytes())})
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
        map
    };
    json!({
        "tokens": scored.iter().map(|token| &token.text).collect::<Vec<_>>(),
        "token_logprobs": scored.iter().map(|token| finite(token.logprob)).collect::<Vec<_>>(),
        "top_logprobs": scored.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
