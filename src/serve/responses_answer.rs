//! Answers in the shape of OpenAI's responses API: one message of one text.

use serde_json::{Value, json};

use super::answer::{Ending, Heading, Line, Progress, Usage};

/// The id of the only message.
fn message_id(heading: &Heading) -> String {
    format!("msg_{}", heading.id)
}

fn content(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn message(heading: &Heading, status: &str, content: &Value) -> Value {
    json!({
        "type": "message", "id": message_id(heading), "status": status, "role": "assistant",
        "content": content,
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

/// The response; without an ending it is in progress, and has no output yet.
pub(super) fn whole(heading: &Heading, text: &str, ending: Option<&Ending>, usage: Usage) -> Value {
    let status = status(ending);
    let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
    let output = ending.map(|_| message(heading, status, &json!([content(text)])));
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
        "model": heading.model, "output": output.into_iter().collect::<Vec<Value>>(),
        "parallel_tool_calls": true, "previous_response_id": null, "store": false,
        "tool_choice": "auto", "tools": [],
        "truncation": "disabled", "usage": usage,
    });
    for (name, value) in heading.settings.as_object().into_iter().flatten() {
        document[name] = value.clone();
    }
    document
}

/// An event with the next number.
fn numbered(progress: &mut Progress, mut document: Value) -> Line {
    document["sequence_number"] = json!(progress.number);
    progress.number += 1;
    Line::named(&document)
}

pub(super) fn opening(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    let begun = whole(heading, "", None, progress.usage);
    let item = message(heading, "in_progress", &json!([]));
    let documents = [
        json!({"type": "response.created", "response": begun}),
        json!({"type": "response.in_progress", "response": begun}),
        json!({"type": "response.output_item.added", "output_index": 0, "item": item}),
        json!({"type": "response.content_part.added", "item_id": message_id(heading),
            "output_index": 0, "content_index": 0, "part": content("")}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}

pub(super) fn delta(heading: &Heading, text: &str, progress: &mut Progress) -> Vec<Line> {
    if text.is_empty() {
        return Vec::new();
    }
    progress.text.push_str(text);
    let document = json!({"type": "response.output_text.delta", "item_id": message_id(heading),
        "output_index": 0, "content_index": 0, "delta": text, "logprobs": []});
    vec![numbered(progress, document)]
}

pub(super) fn closing(heading: &Heading, progress: &mut Progress) -> Vec<Line> {
    let ending = progress.ending.clone();
    let status = status(ending.as_ref());
    let last = whole(heading, &progress.text, ending.as_ref(), progress.usage);
    let (id, text) = (message_id(heading), progress.text.clone());
    let item = message(heading, status, &json!([content(&text)]));
    let documents = [
        json!({"type": "response.output_text.done", "item_id": id, "output_index": 0,
            "content_index": 0, "text": text, "logprobs": []}),
        json!({"type": "response.content_part.done", "item_id": id, "output_index": 0,
            "content_index": 0, "part": content(&text)}),
        json!({"type": "response.output_item.done", "output_index": 0, "item": item}),
        json!({"type": format!("response.{status}"), "response": last}),
    ];
    documents.map(|document| numbered(progress, document)).into()
}
