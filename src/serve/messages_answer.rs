//! Answers in the shape of Anthropic's messages API: a block of text, and one for each call of a tool.

use serde_json::{Value, json};

use super::answer::{Ending, Heading, Line, Progress, Usage};
use super::text::Piece;
use super::tool_calls::Call;

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
        _ if ending.called => "tool_use",
        _ => "end_turn",
    });
    (reason, matched)
}

pub(super) fn whole(heading: &Heading, piece: &Piece, ending: &Ending, usage: Usage) -> Value {
    let text = json!({"type": "text", "text": piece.text});
    let text = Some(text).filter(|_| piece.calls.is_empty() || !piece.text.is_empty());
    let calls = piece.calls.iter().map(|call| used(call, &call.arguments));
    let content: Vec<Value> = text.into_iter().chain(calls).collect();
    message(heading, &json!(content), Some(ending), usage)
}

/// The block of a call of a tool.
fn used(call: &Call, input: &Value) -> Value {
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

pub(super) fn opening(heading: &Heading, usage: Usage) -> Vec<Line> {
    let begun = message(heading, &json!([]), None, usage);
    vec![Line::named(&json!({"type": "message_start", "message": begun}))]
}

/// The event that begins the next block.
fn begin(block: &Value, progress: &mut Progress) -> Line {
    let index = progress.blocks;
    progress.blocks += 1;
    Line::named(&json!({"type": "content_block_start", "index": index, "content_block": block}))
}

/// An event of the last block that was begun.
fn of_last(mut document: Value, progress: &Progress) -> Line {
    document["index"] = json!(progress.blocks.saturating_sub(1));
    Line::named(&document)
}

/// The end of a text that is open.
fn end_text(progress: &mut Progress) -> Option<Line> {
    let open = std::mem::take(&mut progress.open);
    open.then(|| of_last(json!({"type": "content_block_stop"}), progress))
}

fn text(text: &str, progress: &mut Progress) -> Vec<Line> {
    let mut lines = Vec::new();
    if !progress.open {
        progress.open = true;
        lines.push(begin(&json!({"type": "text", "text": ""}), progress));
    }
    if !text.is_empty() {
        let delta = json!({"type": "text_delta", "text": text});
        lines.push(of_last(json!({"type": "content_block_delta", "delta": delta}), progress));
    }
    lines
}

pub(super) fn delta(piece: &Piece, progress: &mut Progress) -> Vec<Line> {
    let mut lines = Vec::new();
    if !piece.text.is_empty() {
        lines.extend(text(&piece.text, progress));
    }
    for call in &piece.calls {
        lines.extend(end_text(progress));
        lines.push(begin(&used(call, &json!({})), progress));
        let delta = json!({"type": "input_json_delta", "partial_json": call.arguments.to_string()});
        lines.push(of_last(json!({"type": "content_block_delta", "delta": delta}), progress));
        lines.push(of_last(json!({"type": "content_block_stop"}), progress));
    }
    lines
}

pub(super) fn closing(progress: &mut Progress) -> Vec<Line> {
    // An answer without anything has an empty text.
    let mut lines = if progress.blocks == 0 { text("", progress) } else { Vec::new() };
    lines.extend(end_text(progress));
    let (reason, matched) = ended(progress.ending.as_ref());
    let delta = json!({"stop_reason": reason, "stop_sequence": matched});
    let usage = json!({
        "input_tokens": progress.usage.prompt, "output_tokens": progress.usage.completion,
    });
    lines.push(Line::named(&json!({"type": "message_delta", "delta": delta, "usage": usage})));
    lines.push(Line::named(&json!({"type": "message_stop"})));
    lines
}
