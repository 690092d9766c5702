//! Chat templates: Jinja programs from the model's author that turn messages into a prompt.
//!
//! A template comes with the weights and is not trusted: it can read only its messages, and its length, steps, call
//! depth and output are limited. The engine has no limit for intermediate strings, so it runs in a [process of its
//! own](crate::template_process).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::error::ModelError;
use crate::files;
use crate::template_process::run;

const FILE: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
/// Longest template, in bytes. The longest in use are about 20 000.
const SOURCE_MAX: usize = 1 << 20;
/// Most steps of one rendering: about a second, or some hundred thousand messages.
const FUEL: u64 = 20_000_000;
/// Most nested calls and blocks.
const DEPTH_MAX: usize = 100;
/// Longest prompt, in bytes: some million tokens.
const OUTPUT_MAX: usize = 16 << 20;
/// Most nested lists and objects in the variables of a request: an indented print grows with their depth.
const EXTRA_DEPTH_MAX: usize = 32;
/// Tokens that templates refer to by name.
const SPECIAL_TOKENS: [&str; 5] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token"];

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The speaker: `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields that templates read, such as `tool_calls` and `tool_call_id`.
    #[serde(flatten)]
    pub fields: Map<String, Json>,
}

impl Message {
    /// A message of text only.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), fields: Map::new() }
    }
}

/// How a model writes tool calls, which its chat template tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolForm {
    /// Hermes and Qwen: `<tool_call>\n{"name": .., "arguments": ..}\n</tool_call>`, once or more.
    Hermes,
    /// Llama 3: an answer that is `{"name": .., "parameters": ..}`.
    Llama,
    /// Mistral: `[TOOL_CALLS][{"name": .., "arguments": ..}, ..]`.
    Mistral,
}

/// The input of a chat template.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// The messages so far.
    pub messages: &'a [Message],
    /// Whether the prompt ends at the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub extra: Option<&'a Map<String, Json>>,
    /// The current time for a template that writes today's date; dates are in UTC.
    pub now: SystemTime,
}

pub(crate) struct Template {
    source: String,
    tokens: BTreeMap<String, String>,
}

/// A template to compile, with the input to render it with, if any.
#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    source: String,
    variables: Option<Variables>,
}

/// The variables visible to a template.
#[derive(Serialize, Deserialize)]
struct Variables {
    tokens: BTreeMap<String, String>,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    extra: Map<String, Json>,
    /// Since 1970.
    now: Duration,
}

impl Template {
    /// The template of a folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, else none.
    pub(crate) fn load(dir: &Path) -> Result<Option<Self>, ModelError> {
        let config_path = dir.join(CONFIG);
        let config = files::read_object(&config_path, files::SMALL_FILE_MAX)?.unwrap_or_default();
        let (path, bytes) = match files::read(&dir.join(FILE), files::SMALL_FILE_MAX)? {
            Some(bytes) => (dir.join(FILE), bytes),
            None => match embedded(&config) {
                Some(source) => (config_path, source.as_bytes().to_vec()),
                None => return Ok(None),
            },
        };
        let source = String::from_utf8(bytes)
            .map_err(|_| ModelError::file(&path, "the chat template is not UTF-8"))?;
        let tokens = SPECIAL_TOKENS
            .into_iter()
            .filter_map(|name| Some((name.into(), token(&config, name)?)));
        Self::new(&path, source, tokens.collect()).map(Some)
    }

    /// A template from a file, with the texts of special tokens by name, if it compiles.
    pub(crate) fn new(
        path: &Path,
        source: String,
        tokens: BTreeMap<String, String>,
    ) -> Result<Self, ModelError> {
        let job = Job { source, variables: None };
        run(&job).map_err(|why| {
            ModelError::file(path, format!("the chat template does not compile: {why}"))
        })?;
        Ok(Self { source: job.source, tokens })
    }

    /// The form of tool calls; `None` if the template does not read `tools`, or has a form that is not known.
    pub(crate) fn tool_form(&self) -> Option<ToolForm> {
        let has = |text: &str| self.source.contains(text);
        // Newer models of these families write calls without JSON, or without their names in it.
        let other = ["[ARGS]", "[CALL_ID]", "<function=", "<arg_key>"].into_iter().any(has);
        match () {
            () if other || !has("tools") => None,
            () if has("[TOOL_CALLS]") => Some(ToolForm::Mistral),
            () if has("<tool_call>") => Some(ToolForm::Hermes),
            () if has("\"parameters\": ") => Some(ToolForm::Llama),
            () => None,
        }
    }

    pub(crate) fn render(&self, chat: &Chat<'_>) -> Result<String, ModelError> {
        let wrong = |reason: String| ModelError::Template(reason);
        let extra = chat.extra.cloned().unwrap_or_default();
        if extra.values().any(|value| is_deeper(value, EXTRA_DEPTH_MAX)) {
            return Err(wrong(format!(
                "its variables have lists or objects nested deeper than {EXTRA_DEPTH_MAX}, the most that is supported"
            )));
        }
        let variables = Variables {
            tokens: self.tokens.clone(),
            messages: chat.messages.to_vec(),
            add_generation_prompt: chat.add_generation_prompt,
            extra,
            now: chat.now.duration_since(UNIX_EPOCH).unwrap_or_default(),
        };
        run(&Job { source: self.source.clone(), variables: Some(variables) }).map_err(wrong)
    }
}

fn is_deeper(value: &Json, depth: usize) -> bool {
    let inner: Box<dyn Iterator<Item = &Json>> = match value {
        Json::Array(list) => Box::new(list.iter()),
        Json::Object(map) => Box::new(map.values()),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::String(_) => return false,
    };
    let mut inner = inner;
    depth == 0 || inner.any(|value| is_deeper(value, depth - 1))
}

impl Job {
    /// The prompt, or an error. With nothing to render, only checks that the template compiles.
    pub(crate) fn run(&self) -> Result<String, String> {
        let environment = compile(&self.source).map_err(|error| format!("{error:#}"))?;
        let Some(variables) = &self.variables else { return Ok(String::new()) };
        let mut output = Limited { bytes: Vec::new() };
        let template = environment.get_template(FILE).map_err(|e| reason(&e))?;
        template.render_captured_to(variables.context(), &mut output).map_err(|e| reason(&e))?;
        String::from_utf8(output.bytes).map_err(|e| e.to_string())
    }
}

impl Variables {
    fn context(&self) -> Value {
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        // Templates compare these two with none, so they are defined as none.
        context.insert("tools", Value::from(()));
        context.insert("documents", Value::from(()));
        for (name, text) in &self.tokens {
            context.insert(name, Value::from(text.as_str()));
        }
        for (name, value) in &self.extra {
            context.insert(name, Value::from(Serde(value)));
        }
        context.insert("messages", Value::from(Serde(&self.messages)));
        context.insert("add_generation_prompt", Value::from(self.add_generation_prompt));
        let now = self.now;
        context.insert("strftime_now", Value::from_function(move |format: &str| date(now, format)));
        Value::from(context)
    }
}

/// The template inside `tokenizer_config.json`: a string, or the one named `default` of a list.
fn embedded(config: &Map<String, Json>) -> Option<&str> {
    let value = config.get("chat_template")?;
    if let Some(list) = value.as_array() {
        let default = list
            .iter()
            .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))?;
        return default.get("template")?.as_str();
    }
    value.as_str()
}

/// A special token's text, which is a string or an object with its settings.
fn token(config: &Map<String, Json>, name: &str) -> Option<String> {
    let value = config.get(name)?;
    let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
    Some(text.to_owned())
}

fn compile(source: &str) -> Result<Environment<'static>, Error> {
    if source.len() > SOURCE_MAX {
        let detail = format!("it is {} bytes long; supported: up to {SOURCE_MAX}", source.len());
        return Err(Error::new(ErrorKind::SyntaxError, detail));
    }
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH_MAX);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", to_json);
    environment.add_template_owned(FILE, without_generation_tags(source))?;
    Ok(environment)
}

/// Disables the tags that mark the assistant's words for training: `generation` becomes `if true`.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start + 2..].find("%}").map(|length| start + 2 + length) else {
            break;
        };
        let tag = &rest[start + 2..end];
        let word = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        out.push_str(&rest[..start + 2]);
        match word {
            "generation" => out.push_str(&tag.replace(word, "if true")),
            "endgeneration" => out.push_str(&tag.replace(word, "endif")),
            _ => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

fn date(now: Duration, format: &str) -> Result<String, Error> {
    let wrong =
        |detail: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {detail}"));
    let seconds = now.as_secs();
    let seconds = i64::try_from(seconds).map_err(|e| wrong(e.to_string()))?;
    let time = jiff::Timestamp::from_second(seconds).map_err(|e| wrong(e.to_string()))?;
    let zoned = time.to_zoned(jiff::tz::TimeZone::UTC);
    jiff::fmt::strtime::format(format, &zoned).map_err(|e| wrong(e.to_string()))
}

/// JSON spaced like Python's `json.dumps`, which is what models were trained on.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let wrong = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut text = Vec::new();
    match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(16)];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            let mut serializer = serde_json::Serializer::with_formatter(&mut text, pretty);
            value.serialize(&mut serializer).map_err(wrong)?;
        }
        None => {
            let mut serializer = serde_json::Serializer::with_formatter(&mut text, Spaced);
            value.serialize(&mut serializer).map_err(wrong)?;
        }
    }
    Ok(Value::from(String::from_utf8_lossy(&text).into_owned()))
}

/// JSON in one line, with a space after every comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

/// A buffer for the prompt with a length limit.
struct Limited {
    bytes: Vec<u8>,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > OUTPUT_MAX {
            return Err(io::Error::other(format!("the prompt is longer than {OUTPUT_MAX} bytes")));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine's message in one line, with the underlying error.
fn reason(error: &Error) -> String {
    let mut text = if error.kind() == ErrorKind::OutOfFuel {
        format!("it ran longer than {FUEL} steps and was stopped")
    } else {
        error.to_string()
    };
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text.push_str(&format!(": {inner}"));
        source = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_tool_calls_is_read_from_the_template() {
        let form = |source: &str| {
            let source = format!("{{% if tools %}}{source}{{% endif %}}");
            Template { source, tokens: BTreeMap::new() }.tool_form()
        };
        assert_eq!(form("within <tool_call></tool_call> tags"), Some(ToolForm::Hermes));
        assert_eq!(form("[TOOL_CALLS]["), Some(ToolForm::Mistral));
        let llama = "{\"name\": function name, \"parameters\": dictionary of arguments}";
        assert_eq!(form(llama), Some(ToolForm::Llama));
        for unknown in ["", "<tool_call><function=f>", "[TOOL_CALLS]f[ARGS]{}"] {
            assert_eq!(form(unknown), None, "{unknown:?}");
        }
        let without = Template { source: "<tool_call>".to_owned(), tokens: BTreeMap::new() };
        assert_eq!(without.tool_form(), None, "it does not read them");
    }
}
