//! Grammars of answers, by `llguidance`: JSON schemas, regular expressions and lists of texts.

use std::sync::Arc;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use model::Tokenizer;
use serde_json::{Value, json};

use super::fields::{Fields, clipped, short};
use super::refusal::Refusal;
use super::request::Api;
use crate::constraint::{Allowed, Constraint};

/// Longest grammar, in bytes.
const LENGTH_MAX: usize = 64 << 10;
/// Longest regular expression: some take the library quadratic time.
const EXPRESSION_MAX: usize = 4 << 10;
/// Stack of the thread that compiles one: the library follows references by recursion, and a schema of the greatest
/// length can have a chain of thousands. Only what is used of it takes memory.
const STACK: usize = 256 << 20;
/// An option of the library that the server does not offer.
const COERCE: &str = "Enable 'coerce_one_of' option to approximate oneOf with anyOf";

/// Makes the grammars of a model's vocabulary.
pub(super) struct Grammars {
    factory: ParserFactory,
}

/// A grammar that a request asks for, and the field that has it.
pub(super) struct Wanted {
    pub(super) source: Source,
    pub(super) field: String,
}

#[derive(Debug, PartialEq)]
pub(super) enum Source {
    Schema(Value),
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// In the library's form of Lark. Not from requests: its rules are followed by recursion, too.
    Lark(String),
}

/// A text under a grammar.
struct Guided {
    matcher: Matcher,
    /// What may come next, if that was computed already.
    next: Option<Result<Next, String>>,
}

/// What may come next by the grammar.
struct Next {
    /// Whether the text may end here.
    ends: bool,
    /// The tokens that fit, without the ends of a text; `None` if it has to end.
    mask: Option<SimpleVob>,
}

impl Grammars {
    pub(super) fn new(tokenizer: &Tokenizer, vocab: u32) -> Result<Self, String> {
        let document = tokenizer.document().map_err(|error| error.to_string())?;
        // The library asserts what it expects of the names of tokens.
        let words = std::panic::catch_unwind(|| token_bytes_from_tokenizer_json(&document));
        let words = words.map_err(|_| crate::bug::last_panic())?;
        let mut words = words.map_err(|error| error.to_string())?;
        words.resize(vocab as usize, Vec::new());
        // The ends of a text are the request's stop tokens, which `Guided` knows.
        let trie = TokTrie::from(&TokRxInfo::new(vocab, INVALID_TOKEN), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|e| e.to_string())?;
        factory.quiet().limits_mut().verbose_errors = false;
        Ok(Self { factory })
    }

    /// The rule of a grammar; an error says what the grammar has that is not supported.
    pub(super) fn constraint(&self, source: Source) -> Result<Box<dyn Constraint>, String> {
        source.check_length()?;
        let grammar = match source {
            Source::Schema(schema) => TopLevelGrammar::from_json_schema(spaced(schema)),
            Source::Regex(regex) => TopLevelGrammar::from_regex(&regex),
            Source::Choice(texts) => TopLevelGrammar::from_regex(&choice(&texts)),
            Source::Lark(grammar) => TopLevelGrammar::from_lark(grammar),
        };
        let mut matcher = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let made = || Matcher::new(self.factory.create_parser(grammar));
            let thread = thread.spawn_scoped(scope, made).map_err(|error| error.to_string())?;
            thread.join().map_err(|_| crate::bug::last_panic())
        })?;
        // Before the first token: a grammar may be one that no text fits.
        if let Some(why) = matcher.get_error() {
            return Err(why.replace(COERCE, "use anyOf"));
        }
        match matcher.compute_mask() {
            Ok(mask) => {
                let next = matcher.is_accepting().map(|ends| Next { ends, mask: Some(mask) });
                let next = Some(next.map_err(cannot_continue));
                Ok(Box::new(Guided { matcher, next }))
            }
            Err(error) if has_no_token(&error.to_string()) => Err("no text fits it".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}

fn cannot_continue(error: impl std::fmt::Display) -> String {
    format!("the grammar cannot continue: {error}")
}

/// Whether the library found no token that fits.
fn has_no_token(error: &str) -> bool {
    error.contains(&StopReason::NoExtensionBias.to_string())
}

impl Source {
    /// Checks the lengths: some steps of the library grow faster than what it is given.
    fn check_length(&self) -> Result<(), String> {
        let (length, expression) = match self {
            Self::Schema(schema) => (schema.to_string().len(), longest_pattern(schema)),
            Self::Regex(text) => (text.len(), text.len()),
            Self::Choice(texts) => (texts.iter().map(String::len).sum(), 0),
            Self::Lark(text) => (text.len(), 0),
        };
        for (what, length, most) in
            [("it", length, LENGTH_MAX), ("an expression", expression, EXPRESSION_MAX)]
        {
            if length > most {
                return Err(format!("{what} has {length} bytes; supported: up to {most}"));
            }
        }
        Ok(())
    }
}

/// The length of the longest regular expression of a schema.
fn longest_pattern(schema: &Value) -> usize {
    let of = |(name, value): (&String, &Value)| {
        let own = match (name.as_str(), value) {
            ("pattern", Value::String(text)) => text.len(),
            ("patternProperties", Value::Object(map)) => {
                map.keys().map(String::len).max().unwrap_or(0)
            }
            _ => 0,
        };
        own.max(longest_pattern(value))
    };
    match schema {
        Value::Object(map) => map.iter().map(of).max().unwrap_or(0),
        Value::Array(list) => list.iter().map(longest_pattern).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

/// The grammar that a request asks for, if any.
pub(super) fn wanted(api: Api, fields: &mut Fields) -> Result<Option<Wanted>, Refusal> {
    let format = match api {
        Api::Completions | Api::Chat => response_format(fields)?,
        Api::Responses => text_format(fields)?,
        Api::Messages => None,
    };
    match (format, structured(fields)?) {
        (Some(_), Some(other)) => {
            let message = format!("`{}` and another format are given; give one", other.field);
            Err(Refusal::field("structured_outputs", message))
        }
        (format, structured) => Ok(format.or(structured)),
    }
}

/// OpenAI's `response_format`.
fn response_format(fields: &mut Fields) -> Result<Option<Wanted>, Refusal> {
    let name = "response_format";
    let Some(value) = fields.take(name) else { return Ok(None) };
    let mut schema = None;
    if let Some(inner) = value.get("json_schema") {
        let at = format!("{name}.json_schema");
        known(&at, inner, &["name", "description", "schema", "strict"])?;
        schema = inner.get("schema").map(|schema| (format!("{at}.schema"), schema));
    }
    known(name, &value, &["type", "json_schema"])?;
    typed(name, &value, schema, "json_schema.schema")
}

/// The format of the responses API's `text`.
fn text_format(fields: &mut Fields) -> Result<Option<Wanted>, Refusal> {
    let Some(text) = fields.take("text") else { return Ok(None) };
    known("text", &text, &["format"])?;
    let Some(format) = text.get("format").filter(|format| !format.is_null()) else {
        return Ok(None);
    };
    let name = "text.format";
    known(name, format, &["type", "name", "description", "schema", "strict"])?;
    let schema = format.get("schema").map(|schema| (format!("{name}.schema"), schema));
    typed(name, format, schema, "schema")
}

/// A format by its type.
fn typed(
    name: &str,
    format: &Value,
    schema: Option<(String, &Value)>,
    place: &str,
) -> Result<Option<Wanted>, Refusal> {
    match (format.get("type").and_then(Value::as_str), schema) {
        (Some("text"), None) => Ok(None),
        (Some("json_object"), None) => {
            let source = Source::Schema(json!({"type": "object"}));
            Ok(Some(Wanted { source, field: name.to_owned() }))
        }
        (Some("json_schema"), Some((field, schema))) => {
            Ok(Some(Wanted { source: Source::Schema(schema.clone()), field }))
        }
        _ => {
            let legal = format!("type text, json_object, or json_schema with {place}");
            let message = format!("`{name}` is {}; legal: {legal}", short(format));
            Err(Refusal::field(name, message))
        }
    }
}

/// vLLM's `structured_outputs`: one of its fields.
fn structured(fields: &mut Fields) -> Result<Option<Wanted>, Refusal> {
    let name = "structured_outputs";
    let Some(value) = fields.take(name) else { return Ok(None) };
    known(name, &value, &["json", "json_object", "regex", "choice"])?;
    let given = value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let given: Vec<(&String, &Value)> = given.collect();
    let legal =
        "one of json (a schema), json_object (true), regex (a text), choice (a list of texts)";
    let wrong = || Refusal::field(name, format!("`{name}` is {}; legal: {legal}", short(&value)));
    let [(key, value)] = given[..] else { return Err(wrong()) };
    let text = || value.as_str().map(str::to_owned).ok_or_else(wrong);
    let source = match key.as_str() {
        // A schema may be given as its text.
        "json" => Source::Schema(match value.as_str() {
            Some(text) => serde_json::from_str(text).map_err(|_| wrong())?,
            None => value.clone(),
        }),
        "json_object" if *value == Value::Bool(true) => Source::Schema(json!({"type": "object"})),
        "regex" => Source::Regex(text()?),
        "choice" => {
            let list = value.as_array().filter(|list| !list.is_empty()).ok_or_else(wrong)?;
            let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
            Source::Choice(texts.collect::<Option<_>>().ok_or_else(wrong)?)
        }
        _ => return Err(wrong()),
    };
    Ok(Some(Wanted { source, field: format!("{name}.{key}") }))
}

/// The regular expression of a list of texts.
fn choice(texts: &[String]) -> String {
    texts.iter().map(|text| format!("({})", escaped(text))).collect::<Vec<_>>().join("|")
}

/// A regular expression for exactly this text.
fn escaped(text: &str) -> String {
    let letter = |c: char| match c {
        c if c.is_ascii_punctuation() => format!("\\{c}"),
        c => c.to_string(),
    };
    text.chars().map(letter).collect()
}

/// Refuses fields of an object that this server does not know, and what is no object.
pub(super) fn known(place: &str, value: &Value, names: &[&str]) -> Result<(), Refusal> {
    let Some(map) = value.as_object() else {
        let message = format!("`{place}` is {}; legal: an object", short(value));
        return Err(Refusal::field(place, message));
    };
    match map.iter().find(|(name, value)| !names.contains(&name.as_str()) && !value.is_null()) {
        None => Ok(()),
        Some((name, _)) => {
            let field = format!("{place}.{}", clipped(name));
            let message = format!("`{field}` is not a field that this server supports");
            Err(Refusal::field(field, message).coded("unsupported_parameter"))
        }
    }
}

/// A schema whose texts have the spaces of Python's `json.dumps` and no others: a model cannot fill them with blanks.
pub(super) fn spaced(schema: Value) -> Value {
    let spaces =
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    match schema {
        Value::Object(mut map) => {
            map.insert("x-guidance".to_owned(), spaces);
            Value::Object(map)
        }
        Value::Bool(true) => json!({"x-guidance": spaces}),
        Value::Bool(false)
        | Value::Null
        | Value::Number(_)
        | Value::String(_)
        | Value::Array(_) => schema,
    }
}

impl std::fmt::Debug for Guided {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guided").field("ended", &self.matcher.is_stopped()).finish()
    }
}

impl Guided {
    fn compute(&mut self) -> Result<Next, String> {
        let ends = self.matcher.is_accepting().map_err(cannot_continue)?;
        let mask = match self.matcher.compute_mask() {
            Ok(mask) => Some(mask),
            Err(error) if ends && has_no_token(&error.to_string()) => None,
            Err(error) => return Err(cannot_continue(error)),
        };
        Ok(Next { ends, mask })
    }
}

impl Constraint for Guided {
    fn allowed(&mut self, vocab: usize, stop: &[u32]) -> Result<Allowed, String> {
        let Next { ends, mask } = match self.next.take() {
            Some(next) => next?,
            None => self.compute()?,
        };
        let mut allowed = Allowed::new(mask.as_ref().map_or(&[], SimpleVob::as_slice), vocab);
        stop.iter().for_each(|id| allowed.set(*id, ends));
        Ok(allowed)
    }

    fn prepare(&mut self) {
        if self.next.is_none() {
            self.next = Some(self.compute());
        }
    }

    fn take(&mut self, id: u32) -> Result<bool, String> {
        self.next = None;
        let taken = self.matcher.consume_token(id);
        taken.map_err(|error| format!("token {id} does not fit the grammar: {error}"))?;
        match self.matcher.stop_reason() {
            StopReason::NotStopped => Ok(false),
            StopReason::NoExtension => Ok(true),
            StopReason::MaxTokensTotal
            | StopReason::MaxTokensParser
            | StopReason::NoExtensionBias
            | StopReason::EndOfSentence
            | StopReason::InternalError
            | StopReason::LexerTooComplex
            | StopReason::ParserTooComplex
            | StopReason::Cancelled => {
                Err(format!("the grammar ended: {}", self.matcher.stop_reason()))
            }
        }
    }

    fn copied(&self) -> Box<dyn Constraint> {
        Box::new(Self { matcher: self.matcher.deep_clone(), next: None })
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
pub(super) mod tests;
