//! Answers in the shape of OpenAI's responses API: a message of one text, and an item for each call of a tool.

use serde_json::{Value, json};

use super::answer::{Ending, Heading, Line, Progress, Usage};
use super::text::Piece;
use super::tool_calls::Call;

/// The id of a message, by the number of items before it.
fn message_id(heading: &Heading, before: usize) -> String {
    match before {
        0 => format!("msg_{}", heading.id),
        more => format!("msg_{}_{more}", heading.id),
    }
}

fn content(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn message(id: &str, status: &str, content: &Value) -> Value {
    json!({
        "type": "message", "id": id, "status": status, "role": "assistant", "content": content,
    })
}

/// The item of a call of a tool.
fn called(call: &Call, status: &str, arguments: &str) -> Value {
    json!({
        "type": "function_call", "id": format!("fc_{}", call.id), "call_id": call.id,
        "name": call.name, "arguments": arguments, "status": status,
    })
}

/// An answer that was cut off by its length is incomplete.
fn status(ending: Option<&Ending>) -> &'static str {
    match ending.map(|ending| ending.reason) {
        None => "in_progress",
        Some("length") => "incomplete",
        Some(_) => "completed",
    }
}

/// The response; without an ending it is in progress, and has no usage yet.
fn response(heading: &Heading, output: &[Value], ending: Option<&Ending>, usage: Usage) -> Value {
    let status = status(ending);
    let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
    let usage = ending.map(|_| {
        json!({
            "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        })
    });
    let mut document = json!({
        "id": heading.id, "object": "response", "created_at": heading.created, "status": status,
        "background": false, "error": null, "incomplete_details": incomplete,
        "model": heading.model, "output": output,
        "previous_response_id": null, "store": false,
        "truncation": "disabled", "usage": usage,
    });
    for (name, value) in heading.settings.as_object().into_iter().flatten() {
        document[name] = value.clone();
    }
    document
}

pub(super) fn whole(heading: &Heading, piece: &Piece, ending: &Ending, usage: Usage) -> Value {
    let text = json!([content(&piece.text)]);
    let text = message(&message_id(heading, 0), status(Some(ending)), &text);
    let text = Some(text).filter(|_| piece.calls.is_empty() || !piece.text.is_empty());
    let calls =
        piece.calls.iter().map(|call| called(call, "completed", &call.arguments.to_string()));
    let output: Vec<Value> = text.into_iter().chain(calls).collect();
    response(heading, &output, Some(ending), usage)
}

/// An event with the next number.
fn numbered(progress: &mut Progress, mut document: Value) -> Line {
    document["sequence_number"] = json!(progress.number);
    progress.number += 1;
    Line::named(&document)
}

pub(super) fn opening(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    let begun = response(heading, &[], None, progress.usage);
    let documents = [
        json!({"type": "response.created", "response": begun}),
        json!({"type": "response.in_progress", "response": begun}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}

/// The events that begin a message, unless one is open.
fn begin(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    if std::mem::replace(&mut progress.open, true) {
        return Vec::new();
    }
    let index = progress.items.len();
    let id = message_id(heading, index);
    let documents = [
        json!({"type": "response.output_item.added", "output_index": index,
            "item": message(&id, "in_progress", &json!([]))}),
        json!({"type": "response.content_part.added", "item_id": id,
            "output_index": index, "content_index": 0, "part": content("")}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}

/// The events that end the message, if one is open.
fn end(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    if !std::mem::take(&mut progress.open) {
        return Vec::new();
    }
    let (index, text) = (progress.items.len(), std::mem::take(&mut progress.text));
    let (id, status) = (message_id(heading, index), status(progress.ending.as_ref()));
    let status = if status == "in_progress" { "completed" } else { status };
    let item = message(&id, status, &json!([content(&text)]));
    progress.items.push(item.clone());
    let documents = [
        json!({"type": "response.output_text.done", "item_id": id, "output_index": index,
            "content_index": 0, "text": text, "logprobs": []}),
        json!({"type": "response.content_part.done", "item_id": id, "output_index": index,
            "content_index": 0, "part": content(&text)}),
        json!({"type": "response.output_item.done", "output_index": index, "item": item}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}

/// The events of a call, which comes whole.
fn call(call: &Call, progress: &mut Progress) -> Vec<Line> {
    let (index, arguments) = (progress.items.len(), call.arguments.to_string());
    let item = called(call, "completed", &arguments);
    progress.items.push(item.clone());
    let documents = [
        json!({"type": "response.output_item.added", "output_index": index,
            "item": called(call, "in_progress", "")}),
        json!({"type": "response.function_call_arguments.delta", "item_id": item["id"],
            "output_index": index, "delta": arguments}),
        json!({"type": "response.function_call_arguments.done", "item_id": item["id"],
            "output_index": index, "name": call.name, "arguments": arguments}),
        json!({"type": "response.output_item.done", "output_index": index, "item": item}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}

pub(super) fn delta(heading: &Heading, piece: &Piece, progress: &mut Progress) -> Vec<Line> {
    let mut lines = Vec::new();
    if !piece.text.is_empty() {
        lines.extend(begin(heading, progress));
        progress.text.push_str(&piece.text);
        let index = progress.items.len();
        let document = json!({"type": "response.output_text.delta",
            "item_id": message_id(heading, index), "output_index": index, "content_index": 0,
            "delta": piece.text, "logprobs": []});
        lines.push(numbered(progress, document));
    }
    for made in &piece.calls {
        lines.extend(end(heading, progress));
        lines.extend(call(made, progress));
    }
    lines
}

pub(super) fn closing(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    // An answer without anything has an empty text.
    let none = progress.items.is_empty();
    let mut lines = if none { begin(heading, progress) } else { Vec::new() };
    lines.extend(end(heading, progress));
    let ending = progress.ending.clone();
    let status = status(ending.as_ref());
    let last = response(heading, &progress.items, ending.as_ref(), progress.usage);
    lines.push(numbered(progress, json!({"type": format!("response.{status}"), "response": last})));
    lines
}
