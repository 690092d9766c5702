//! The fields of a request's body. Every field is either read, neutral, or refused by name: no field that would change
//! the answer is ignored.

use serde_json::{Map, Value};

use super::refusal::Refusal;

/// Unsupported fields with their neutral values; any other value is refused.
const NEUTRAL: [(&str, &[&str]); 15] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("suffix", &["\"\""]),
    ("thinking", &["{\"type\":\"disabled\"}"]),
    ("truncation", &["\"disabled\""]),
    ("include", &["[]"]),
    ("background", &["false"]),
    ("top_logprobs", &["0"]),
    ("tools", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("functions", &["[]"]),
    ("parallel_tool_calls", &["true", "false"]),
    ("modalities", &["[\"text\"]"]),
    ("store", &["false"]),
];

/// Fields that identify the caller (see `tenants`), or that other servers cache by: they do not change the answer.
const ABOUT_THE_CALLER: [&str; 5] =
    ["user", "metadata", "safety_identifier", "prompt_cache_key", "cache_control"];

/// The fields that have not been parsed yet, and the names that were looked for.
pub(super) struct Fields(pub(super) Map<String, Value>, Vec<String>);

impl Fields {
    pub(super) fn new(map: Map<String, Value>) -> Self {
        Self(map, Vec::new())
    }

    /// Removes a field; `None` if it is missing or null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.1.push(name.to_owned());
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn read<T>(
        &mut self,
        name: &str,
        legal: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong =
            || Refusal::field(name, format!("`{name}` is {}; legal: {legal}", short(&value)));
        read(&value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn number(&mut self, name: &str) -> Result<Option<f32>, Refusal> {
        self.read(name, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    pub(super) fn integer(
        &mut self,
        name: &str,
        from: u64,
        to: u64,
    ) -> Result<Option<u64>, Refusal> {
        let legal = format!("a whole number, {from} to {to}");
        self.read(name, &legal, |value| value.as_u64().filter(|n| (from..=to).contains(n)))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, Refusal> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Refuses the remaining fields unless they are neutral.
    pub(super) fn end(mut self) -> Result<(), Refusal> {
        for name in ABOUT_THE_CALLER {
            self.take(name);
        }
        for (name, neutral) in NEUTRAL {
            if let Some(value) = self.take(name)
                && !neutral.contains(&value.to_string().as_str())
            {
                let legal = neutral.join(" or ");
                let message =
                    format!("`{name}` is {}; this server supports {legal} only", short(&value));
                return Err(Refusal::field(name, message).coded("unsupported_value"));
            }
        }
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let alike = ir::nearest(name, self.1.iter().map(String::as_str));
                let tip =
                    alike.map_or_else(String::new, |alike| format!("; did you mean `{alike}`?"));
                let message =
                    format!("`{}` is not a field that this server supports{tip}", clipped(name));
                Err(Refusal::field(clipped(name), message).coded("unsupported_parameter"))
            }
        }
    }
}

pub(super) fn short(value: &Value) -> String {
    clipped(&value.to_string())
}

pub(super) fn clipped(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}
