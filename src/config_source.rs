//! The source of a schedule: a file, standard input, or the caller's arguments.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::failure::Failure;
use crate::files;

const BYTES_MAX: u64 = 16 << 20;

/// Documents of `amk` that hold a schedule, and its field.
const ANSWERS: [(&str, &str); 2] =
    [("amk.propose.v1", "schedule_config"), ("amk.loop.v1", "best_config")];

/// The argument `--config`, or a tool's `config`. Its schema is an object or a string and not the knobs' own: errors
/// inside a config come from its rules, with legal values and a suggestion each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ConfigSource {
    /// Standard input, `-` on the command line. Not available to a tool: its standard input carries the protocol.
    Stdin,
    File(PathBuf),
    /// The config itself, as JSON text: a tool's argument, or JSON on the command line.
    Inline(String),
}

impl ConfigSource {
    /// The config as text. In a document of `amk propose` or `amk loop` it is the schedule inside.
    pub(crate) fn text(&self) -> Result<String, Failure> {
        self.schedule(self.whole_text()?)
    }

    fn whole_text(&self) -> Result<String, Failure> {
        match self {
            Self::Inline(config) => Ok(config.clone()),
            Self::Stdin => files::read_input(std::io::stdin().lock(), self, BYTES_MAX),
            Self::File(path) => {
                let file = std::fs::File::open(path).map_err(|e| files::unreadable(path, e))?;
                files::read_input(file, self, BYTES_MAX)
            }
        }
    }

    /// The schedule in a document of amk; such a document without one is an error. Any other text is the config, valid or not.
    fn schedule(&self, text: String) -> Result<String, Failure> {
        let Ok(Value::Object(document)) = ir::schedule::unique_json(&text) else { return Ok(text) };
        let Some(schema) = document.get("schema").and_then(Value::as_str) else { return Ok(text) };
        if let Some((_, field)) = ANSWERS.iter().find(|(answer, _)| *answer == schema)
            && let Some(config @ Value::Object(_)) = document.get(*field)
        {
            return Ok(config.to_string());
        }
        if !schema.starts_with("amk.") {
            return Ok(text);
        }
        let holding = ANSWERS.map(|(answer, field)| format!("{answer} ({field})"));
        Err(Failure::usage(format!(
            "{self} is a document {schema:.40} without a schedule; a config is an object of knobs, or an answer {}",
            holding.join(" or ")
        )))
    }
}

impl std::fmt::Display for ConfigSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdin => f.write_str("standard input"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Inline(_) => f.write_str("config"),
        }
    }
}

/// Whether an argument is meant as JSON, valid or not, and not as a path.
fn is_json(text: &str) -> bool {
    text.trim_start().starts_with(['{', '['])
}

impl From<OsString> for ConfigSource {
    fn from(argument: OsString) -> Self {
        match argument.to_str() {
            Some(text) if is_json(text) => Self::Inline(text.to_owned()),
            _ if Path::new(&argument) == Path::new("-") => Self::Stdin,
            _ => Self::File(PathBuf::from(argument)),
        }
    }
}

impl<'de> Deserialize<'de> for ConfigSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) if is_json(&text) => Ok(Self::Inline(text)),
            Value::String(path) => Ok(Self::File(PathBuf::from(path))),
            config @ Value::Object(_) => Ok(Self::Inline(config.to_string())),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
                Err(serde::de::Error::custom("neither a config object nor a path"))
            }
        }
    }
}
