//! The messages of a chat, in the form of each API, with calls of tools and their results.

use model::Message;
use serde_json::{Value, json};

use super::Served;
use super::fields::{clipped, short};
use super::grammar::known;
use super::refusal::Refusal;
use super::request::Api;
use super::tools;

/// The text of a content; `None` if some part of it is not text.
pub(super) fn text(api: Api, content: &Value) -> Option<String> {
    let kinds: &[&str] = match api {
        Api::Responses => &["input_text", "output_text"],
        Api::Completions | Api::Chat | Api::Messages => &["text"],
    };
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .map(|part| {
                let kind = part.get("type").and_then(Value::as_str)?;
                kinds.contains(&kind).then(|| part.get("text")?.as_str())?
            })
            .collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
    }
}

/// The messages of one entry: most are one, and one with results of tools has a message for each.
pub(super) fn read(
    api: Api,
    place: &str,
    value: &Value,
    served: &Served,
) -> Result<Vec<Message>, Refusal> {
    let at = |field: &str| format!("{place}.{field}");
    let item = value.get("type").and_then(Value::as_str).unwrap_or("message");
    if api == Api::Responses && item != "message" {
        return Ok(vec![called_or_answered(place, item, value, served)?]);
    }
    let role = value.get("role").and_then(Value::as_str).ok_or_else(|| {
        Refusal::field(at("role"), format!("`{}` is missing or not a text", at("role")))
    })?;
    if api == Api::Messages && !["user", "assistant"].contains(&role) {
        let message = format!("`{}` is {role:?}; legal: user, assistant", at("role"));
        return Err(Refusal::field(at("role"), message));
    }
    // A template may know other roles. One that is spelt almost like a usual one would make a wrong prompt in silence.
    const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
    if !ROLES.contains(&role)
        && let Some(alike) = ir::nearest(role, ROLES)
    {
        let message = format!("`{}` is {role:?}; did you mean {alike:?}?", at("role"));
        return Err(Refusal::field(at("role"), message));
    }
    let names: &[&str] = match (api, role) {
        (Api::Completions | Api::Chat, "tool") => &["role", "content", "name", "tool_call_id"],
        (Api::Completions | Api::Chat, "assistant") => {
            &["role", "content", "name", "refusal", "annotations", "tool_calls"]
        }
        (Api::Completions | Api::Chat, _) => &["role", "content", "name"],
        (Api::Messages, _) => &["role", "content"],
        (Api::Responses, _) => &["role", "content", "type", "id", "status"],
    };
    known(place, value, names)?;
    let content = value.get("content");
    if let (Api::Messages, Some(Value::Array(blocks))) = (api, content) {
        return self::blocks(role, &at("content"), blocks, served);
    }
    let mut message = Message::new(role, "");
    let calls = value.get("tool_calls").filter(|calls| !calls.is_null());
    if calls.is_some() || role == "tool" && api == Api::Chat {
        tools::form(served, place)?;
    }
    if let Some(calls) = calls {
        message.fields.insert("tool_calls".to_owned(), made(&at("tool_calls"), calls)?);
    }
    match content.and_then(|content| text(api, content)) {
        Some(text) => message.content = text,
        None if calls.is_some() && content.is_none_or(Value::is_null) => {}
        None => return Err(no_text(api, &at("content"))),
    }
    if role == "tool" && api == Api::Chat {
        let id = value.get("tool_call_id").filter(|id| id.is_string()).ok_or_else(|| {
            let field = at("tool_call_id");
            Refusal::field(&field, format!("`{field}` is missing or not a text"))
        })?;
        message.fields.insert("tool_call_id".to_owned(), id.clone());
        let name = value.get("name").filter(|name| name.is_string());
        message.fields.extend(name.map(|name| ("name".to_owned(), name.clone())));
    }
    Ok(vec![message])
}

/// An item of the responses API that is no message: a call of a tool, or its result.
fn called_or_answered(
    place: &str,
    item: &str,
    value: &Value,
    served: &Served,
) -> Result<Message, Refusal> {
    let wrong = |legal: &str| {
        let message = format!("`{place}` is {}; legal: {legal}", short(value));
        Refusal::field(place, message)
    };
    match item {
        "function_call" => {
            known(place, value, &["type", "id", "call_id", "name", "arguments", "status"])?;
            tools::form(served, place)?;
            let arguments = value["arguments"].as_str();
            let arguments = arguments.and_then(|text| serde_json::from_str::<Value>(text).ok());
            let (id, name) = (value["call_id"].as_str(), value["name"].as_str());
            let (Some(id), Some(name), Some(arguments)) =
                (id, name, arguments.filter(Value::is_object))
            else {
                return Err(wrong("a call_id, a name, and arguments as the text of a JSON object"));
            };
            let mut message = Message::new("assistant", "");
            let calls = json!([called(id, name, &arguments)]);
            message.fields.insert("tool_calls".to_owned(), calls);
            Ok(message)
        }
        "function_call_output" => {
            known(place, value, &["type", "id", "call_id", "output", "status"])?;
            tools::form(served, place)?;
            let output = value.get("output").and_then(|output| text(Api::Responses, output));
            let (Some(output), Some(id)) = (output, value["call_id"].as_str()) else {
                return Err(wrong("a call_id, and output of text"));
            };
            let mut message = Message::new("tool", output);
            message.fields.insert("tool_call_id".to_owned(), json!(id));
            Ok(message)
        }
        _ => {
            let field = format!("{place}.type");
            let message = format!(
                "`{field}` is {:?}; legal: message, function_call, function_call_output",
                clipped(item)
            );
            Err(Refusal::field(field, message).coded("unsupported_value"))
        }
    }
}

/// Adds a message. Calls that follow the assistant's text or calls are of the same message, as templates expect.
pub(super) fn push(messages: &mut Vec<Message>, mut next: Message) {
    if let Some(last) = messages.last_mut()
        && (&*last.role, &*next.role, &*next.content) == ("assistant", "assistant", "")
        && let Some(Value::Array(calls)) = next.fields.get_mut("tool_calls")
    {
        let before = last.fields.entry("tool_calls").or_insert_with(|| json!([]));
        if let Value::Array(before) = before {
            before.append(calls);
        }
        return;
    }
    messages.push(next);
}

fn no_text(api: Api, place: &str) -> Refusal {
    let kind = if api == Api::Responses { "input_text" } else { "text" };
    let legal = format!("a text, or a list of {{\"type\": {kind:?}, \"text\": ..}}");
    Refusal::field(place, format!("`{place}` is missing or not text; legal: {legal}"))
}

/// Calls that the assistant made, in OpenAI's form, with their arguments as objects: what templates print.
fn made(place: &str, calls: &Value) -> Result<Value, Refusal> {
    let call = |(index, call): (usize, &Value)| {
        let arguments = call["function"]["arguments"].as_str();
        let arguments = arguments.and_then(|text| serde_json::from_str::<Value>(text).ok());
        let (id, name) = (call["id"].as_str(), call["function"]["name"].as_str());
        match (id, name, arguments.filter(Value::is_object)) {
            (Some(id), Some(name), Some(arguments)) => Ok(called(id, name, &arguments)),
            _ => {
                let field = format!("{place}[{index}]");
                let legal = "an id, and a function with a name and its arguments as the text of a JSON object";
                Err(Refusal::field(&field, format!("`{field}` is {}; legal: {legal}", short(call))))
            }
        }
    };
    let Some(list) = calls.as_array() else {
        return Err(Refusal::field(place, format!("`{place}` is {}; legal: a list", short(calls))));
    };
    list.iter().enumerate().map(call).collect()
}

fn called(id: &str, name: &str, arguments: &Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The messages of a list of Anthropic's blocks: results of tools, then the text with the calls.
fn blocks(
    role: &str,
    place: &str,
    blocks: &[Value],
    served: &Served,
) -> Result<Vec<Message>, Refusal> {
    let (mut results, mut calls, mut message) = (Vec::new(), Vec::new(), Message::new(role, ""));
    let mut texts = 0;
    for (index, block) in blocks.iter().enumerate() {
        let at = format!("{place}[{index}]");
        let field = |name: &str| block[name].as_str();
        match (role, field("type")) {
            (_, Some("text")) if block["text"].is_string() => {
                message.content.push_str(field("text").unwrap_or_default());
                texts += 1;
            }
            ("assistant", Some("tool_use")) if block["input"].is_object() => {
                tools::form(served, &at)?;
                let (Some(id), Some(name)) = (field("id"), field("name")) else {
                    let message = format!("`{at}` needs an id and a name");
                    return Err(Refusal::field(at, message));
                };
                calls.push(called(id, name, &block["input"]));
            }
            ("user", Some("tool_result")) => {
                tools::form(served, &at)?;
                let text =
                    block.get("content").map_or(Some(String::new()), |v| text(Api::Messages, v));
                let (Some(text), Some(id)) = (text, field("tool_use_id")) else {
                    let message = format!("`{at}` needs a tool_use_id, and content of text");
                    return Err(Refusal::field(at, message));
                };
                let mut result = Message::new("tool", text);
                result.fields.insert("tool_call_id".to_owned(), json!(id));
                results.push(result);
            }
            _ => {
                let message = format!(
                    "`{at}` is {}; legal: blocks of text, tool_use of the assistant and tool_result of the user",
                    short(block)
                );
                return Err(Refusal::field(place, message));
            }
        }
    }
    if !calls.is_empty() {
        message.fields.insert("tool_calls".to_owned(), calls.into());
    } else if texts == 0 && !results.is_empty() {
        return Ok(results);
    }
    results.push(message);
    Ok(results)
}
