//! The tools of a request: their definitions for the chat template, and the grammar of a forced call.

use std::collections::BTreeSet;

use model::{Tokenizer, ToolForm};
use serde_json::{Value, json};

use super::Served;
use super::fields::{Fields, clipped, short};
use super::grammar::{Source, Wanted, known, spaced};
use super::refusal::Refusal;
use super::request::Api;

/// The most tools of a request.
const TOOLS_MAX: usize = 128;
/// The longest name of a tool.
const NAME_MAX: usize = 64;

/// Tools that the answer may call.
#[derive(Clone, Debug)]
pub(super) struct Tools {
    pub(super) form: ToolForm,
    pub(super) names: BTreeSet<String>,
    /// In OpenAI's form, which chat templates read.
    pub(super) definitions: Vec<Value>,
    choice: Choice,
    /// Whether an answer may have more than one call.
    pub(super) several: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Choice {
    Never,
    Auto,
    Required,
    Named(String),
}

/// The tools of a request; `None` without any, or if none may be called.
pub(super) fn read(
    api: Api,
    fields: &mut Fields,
    served: &Served,
) -> Result<Option<Tools>, Refusal> {
    let some = fields.0.get("tools").is_some_and(|tools| tools.as_array() != Some(&Vec::new()));
    if api == Api::Completions || !some {
        return Ok(None);
    }
    let list = fields.read("tools", "a list of tools", |value| value.as_array().cloned())?;
    let Some(list) = list else { return Ok(None) };
    if list.len() > TOOLS_MAX {
        let message = format!("`tools` has {}; the most are {TOOLS_MAX}", list.len());
        return Err(Refusal::field("tools", message));
    }
    let place = |(index, tool)| definition(api, &format!("tools[{index}]"), tool);
    let definitions: Vec<Value> = list.iter().enumerate().map(place).collect::<Result<_, _>>()?;
    let name = |definition: &Value| definition["function"]["name"].as_str().map(str::to_owned);
    let names: BTreeSet<String> = definitions.iter().filter_map(name).collect();
    if names.len() < definitions.len() {
        return Err(Refusal::field("tools", "two of `tools` have the same name"));
    }
    let (choice, several) = choice(api, fields, &names)?;
    let form = form(served, "tools")?;
    // Llama's template takes a single call.
    let several = several && form != ToolForm::Llama;
    let tools = Tools { form, names, definitions, choice, several };
    Ok(Some(tools).filter(|tools| tools.choice != Choice::Never))
}

/// How the model writes tool calls.
pub(super) fn form(served: &Served, field: &str) -> Result<ToolForm, Refusal> {
    served.tokenizer(field)?.tool_form().ok_or_else(|| {
        let message = format!(
            "`{field}`: the chat template of {} has no tools, or in a form other than those of Hermes and Qwen, Llama 3 and Mistral",
            served.name()
        );
        Refusal::field(field, message).coded("unsupported_value")
    })
}

/// A tool in OpenAI's form.
fn definition(api: Api, place: &str, tool: &Value) -> Result<Value, Refusal> {
    let (inner, at, schema) = match api {
        Api::Messages => {
            let names = ["type", "name", "description", "input_schema", "cache_control"];
            known(place, tool, &names)?;
            (tool, place.to_owned(), "input_schema")
        }
        Api::Responses => {
            known(place, tool, &["type", "name", "description", "parameters", "strict"])?;
            (tool, place.to_owned(), "parameters")
        }
        Api::Completions | Api::Chat => {
            known(place, tool, &["type", "function"])?;
            let at = format!("{place}.function");
            let inner = &tool["function"];
            known(&at, inner, &["name", "description", "parameters", "strict"])?;
            (inner, at, "parameters")
        }
    };
    let kind = tool.get("type").and_then(Value::as_str);
    if !matches!(
        (api, kind),
        (Api::Messages, None | Some("custom")) | (Api::Chat | Api::Responses, Some("function"))
    ) {
        let field = format!("{place}.type");
        let message =
            format!("`{field}` is {}; legal: a function of the client", short(&tool["type"]));
        return Err(Refusal::field(field, message).coded("unsupported_value"));
    }
    let letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let legal = |name: &&str| (1..=NAME_MAX).contains(&name.len()) && name.chars().all(letter);
    let name = inner["name"].as_str().filter(legal).ok_or_else(|| {
        let message = format!(
            "`{at}.name` is {}; legal: 1 to {NAME_MAX} of A-Z a-z 0-9 _ -",
            short(&inner["name"])
        );
        Refusal::field(format!("{at}.name"), message)
    })?;
    let none = json!({"type": "object", "properties": {}});
    let parameters = inner.get(schema).filter(|schema| !schema.is_null()).unwrap_or(&none);
    if !parameters.is_object() {
        let field = format!("{at}.{schema}");
        let message = format!("`{field}` is {}; legal: a JSON schema", short(parameters));
        return Err(Refusal::field(field, message));
    }
    let description = inner.get("description").and_then(Value::as_str).unwrap_or("");
    Ok(json!({"type": "function", "function": {
        "name": name, "description": description, "parameters": parameters,
    }}))
}

/// Which tools are to be called, and whether several calls may be made.
fn choice(
    api: Api,
    fields: &mut Fields,
    names: &BTreeSet<String>,
) -> Result<(Choice, bool), Refusal> {
    let field = "tool_choice";
    let value = fields.take(field);
    let (legal, kind, name, several) = match api {
        Api::Messages => {
            let kind = value.as_ref().and_then(|value| value["type"].as_str());
            let kind = if value.is_some() { kind.unwrap_or("") } else { "auto" };
            let value = value.as_ref().unwrap_or(&Value::Null);
            let single = value["disable_parallel_tool_use"].as_bool().unwrap_or(false);
            ("type auto, any, none, or tool with a name of `tools`", kind, &value["name"], !single)
        }
        Api::Completions | Api::Chat | Api::Responses => {
            let several = fields.read("parallel_tool_calls", "true or false", Value::as_bool)?;
            let value = value.as_ref().unwrap_or(&Value::Null);
            let kind = match value {
                Value::Null => "auto",
                Value::String(text) => text,
                other
                @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
                    other["type"].as_str().unwrap_or("")
                }
            };
            let (legal, name) = match api {
                Api::Responses => (
                    "auto, none, required, or {\"type\": \"function\", \"name\": one of `tools`}",
                    &value["name"],
                ),
                Api::Completions | Api::Chat | Api::Messages => (
                    "auto, none, required, or {\"type\": \"function\", \"function\": {\"name\": one of `tools`}}",
                    &value["function"]["name"],
                ),
            };
            (legal, kind, name, several.unwrap_or(true))
        }
    };
    let named = name.as_str().filter(|name| names.contains(*name));
    let choice = match (kind, named) {
        ("none", None) => Choice::Never,
        ("auto", None) => Choice::Auto,
        ("required" | "any", None) => Choice::Required,
        ("function" | "tool", Some(name)) => Choice::Named(name.to_owned()),
        _ => {
            let message = format!("`{field}` is {}; legal: {legal}", clipped(kind));
            return Err(Refusal::field(field, message));
        }
    };
    Ok((choice, several))
}

impl Tools {
    /// The text that begins a call.
    pub(super) fn marker(&self) -> &'static str {
        match self.form {
            ToolForm::Hermes => "<tool_call>",
            ToolForm::Mistral => "[TOOL_CALLS]",
            ToolForm::Llama => "<|python_tag|>",
        }
    }

    /// The texts around a call, which may be special tokens.
    pub(super) fn markers(&self) -> [&'static str; 2] {
        [self.marker(), "</tool_call>"]
    }

    /// The grammar of an answer that has to call a tool.
    pub(super) fn forced(&self, tokenizer: &Tokenizer) -> Option<Wanted> {
        let allowed = |definition: &&Value| match &self.choice {
            Choice::Never | Choice::Auto => false,
            Choice::Required => true,
            Choice::Named(name) => definition["function"]["name"] == **name,
        };
        let functions: Vec<&Value> = self
            .definitions
            .iter()
            .filter(allowed)
            .map(|definition| &definition["function"])
            .collect();
        if functions.is_empty() {
            return None;
        }
        // A special token is none of the text, and is named by its number.
        let marker = match tokenizer.special(self.marker()) {
            Some(id) => format!("<[{id}]>"),
            None => literal(self.marker()),
        };
        let several = self.several && self.choice == Choice::Required;
        let (start, arguments) = match self.form {
            ToolForm::Hermes => {
                let end = match tokenizer.special("</tool_call>") {
                    Some(id) => format!("<[{id}]>"),
                    None => literal("</tool_call>"),
                };
                let more =
                    if several { format!(" ({} block)*", literal("\n")) } else { String::new() };
                let newline = literal("\n");
                let block = format!("block: {marker} {newline} call {newline} {end}");
                (format!("start: block{more}\n{block}"), "arguments")
            }
            ToolForm::Mistral => {
                let more =
                    if several { format!(" ({} call)*", literal(", ")) } else { String::new() };
                let (open, close) = (literal("["), literal("]"));
                (format!("start: {marker} {open} call{more} {close}"), "arguments")
            }
            ToolForm::Llama => ("start: call".to_owned(), "parameters"),
        };
        let mut grammar = format!("{start}\n");
        let calls: Vec<String> =
            (0..functions.len()).map(|index| format!("call_{index}")).collect();
        grammar += &format!("call: {}\n", calls.join(" | "));
        for (function, call) in functions.iter().zip(&calls) {
            let head = format!("{{\"name\": {}, \"{arguments}\": ", function["name"]);
            let schema = spaced(function["parameters"].clone());
            grammar += &format!("{call}: {} {call}_schema {}\n", literal(&head), literal("}"));
            grammar += &format!("{call}_schema: %json {schema}\n");
        }
        Some(Wanted { source: Source::Lark(grammar), field: "tools".to_owned() })
    }
}

/// A text in a Lark grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
