//! Answers in the shape of OpenAI's API.

use serde_json::{Map, Value, json};

use super::request::Api;
use super::text::{Piece, Scored};

/// What all documents of one answer share.
#[derive(Clone, Debug)]
pub(super) struct Heading {
    pub(super) api: Api,
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) fingerprint: String,
    /// Whether probabilities were asked for.
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
    fn document(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint, "choices": choices,
        })
    }

    /// The whole answer in one document; `finish` is `stop` or `length`.
    pub(super) fn whole(&self, piece: &Piece, finish: &str, usage: Usage) -> Value {
        let logprobs = self.logprobs(&piece.scored, 0);
        let (object, choice) = match self.api {
            Api::Completions => (
                "text_completion",
                json!({"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}),
            ),
            Api::Chat => {
                let message = json!({"role": "assistant", "content": piece.text, "refusal": null});
                let choice = json!({
                    "index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish,
                });
                ("chat.completion", choice)
            }
        };
        let mut document = self.document(object, vec![choice]);
        document["usage"] = usage.document();
        document
    }

    /// A piece of a streamed answer: the `sent` bytes of text before it, and why it is the last one if it is.
    pub(super) fn chunk(&self, piece: &Piece, sent: usize, finish: Option<&str>) -> Value {
        let logprobs = self.logprobs(&piece.scored, sent);
        match self.api {
            Api::Completions => {
                let choice = json!({
                    "index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": finish,
                });
                self.document("text_completion", vec![choice])
            }
            Api::Chat => {
                let delta = match piece.text.is_empty() {
                    true => json!({}),
                    false => json!({"content": piece.text}),
                };
                self.delta(delta, logprobs, finish)
            }
        }
    }

    /// What a streamed chat begins with: who speaks.
    pub(super) fn opening(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.api == Api::Chat).then(|| self.delta(delta, Value::Null, None))
    }

    fn delta(&self, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        let choice = json!({
            "index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        });
        self.document("chat.completion.chunk", vec![choice])
    }

    /// What a stream ends with if a count was asked for.
    pub(super) fn usage(&self, usage: Usage) -> Value {
        let object = match self.api {
            Api::Completions => "text_completion",
            Api::Chat => "chat.completion.chunk",
        };
        let mut document = self.document(object, Vec::new());
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

/// A token's text and probability. A token that cuts a character has no bytes of its own that could be told.
fn entry(text: &str, logprob: f64) -> Value {
    let whole = !text.contains(char::REPLACEMENT_CHARACTER);
    json!({"token": text, "logprob": finite(logprob), "bytes": whole.then_some(text.as_bytes())})
}

/// JSON has no infinity: what has no probability has this one.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

/// As the completions API has it: four lists beside each other.
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
        // Tokens that cut characters can have the same text; the likeliest, which comes first, stands for it.
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
