//! Answers in the shape of Anthropic's messages API: one block of text.

use serde_json::{Value, json};

use super::answer::{Ending, Heading, Line, Progress, Usage};

fn message(heading: &Heading, content: &Value, ending: Option<&Ending>, usage: Usage) -> Value {
    let (reason, matched) = ended(ending);
    json!({
        "id": heading.id, "type": "message", "role": "assistant", "model": heading.model,
        "content": content, "stop_reason": reason, "stop_sequence": matched,
        "usage": {"input_tokens": usage.prompt, "output_tokens": usage.completion},
    })
}

/// The reason of an ending, and the stop string.
fn ended(ending: Option<&Ending>) -> (Option<&'static str>, Option<&str>) {
    let matched = ending.and_then(|ending| ending.matched.as_deref());
    let reason = ending.map(|ending| match (ending.reason, matched) {
        (_, Some(_)) => "stop_sequence",
        ("length", None) => "max_tokens",
        _ => "end_turn",
    });
    (reason, matched)
}

pub(super) fn whole(heading: &Heading, text: &str, ending: &Ending, usage: Usage) -> Value {
    message(heading, &json!([{"type": "text", "text": text}]), Some(ending), usage)
}

pub(super) fn opening(heading: &Heading, usage: Usage) -> Vec<Line> {
    let begun = message(heading, &json!([]), None, usage);
    let block = json!({"type": "text", "text": ""});
    vec![
        Line::named(&json!({"type": "message_start", "message": begun})),
        Line::named(&json!({"type": "content_block_start", "index": 0, "content_block": block})),
    ]
}

pub(super) fn delta(text: &str) -> Vec<Line> {
    if text.is_empty() {
        return Vec::new();
    }
    let delta = json!({"type": "text_delta", "text": text});
    vec![Line::named(&json!({"type": "content_block_delta", "index": 0, "delta": delta}))]
}

pub(super) fn closing(progress: &Progress) -> Vec<Line> {
    let (reason, matched) = ended(progress.ending.as_ref());
    let delta = json!({"stop_reason": reason, "stop_sequence": matched});
    let usage = json!({
        "input_tokens": progress.usage.prompt, "output_tokens": progress.usage.completion,
    });
    vec![
        Line::named(&json!({"type": "content_block_stop", "index": 0})),
        Line::named(&json!({"type": "message_delta", "delta": delta, "usage": usage})),
        Line::named(&json!({"type": "message_stop"})),
    ]
}
