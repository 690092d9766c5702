//! Where a schedule is read from: a file, standard input, or the caller's own arguments.

use std::borrow::Cow;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::failure::Failure;

/// Longest config file that is read.
const BYTES_MAX: u64 = 16 << 20;

/// What `--config`, or a tool's `config`, names.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ConfigSource {
    /// Standard input, `-` on the command line. A tool's arguments cannot name it: there it carries the protocol.
    Stdin,
    /// A file.
    File(PathBuf),
    /// The config itself: a tool's argument, or JSON on the command line.
    Inline(Map<String, Value>),
}

impl ConfigSource {
    /// The config as text.
    pub(crate) fn text(&self) -> Result<String, Failure> {
        let unreadable = |error: std::io::Error| {
            Failure::usage(format!("cannot read {self}: {error}; check the path"))
        };
        let mut bytes = Vec::new();
        match self {
            Self::Inline(config) => return Ok(Value::Object(config.clone()).to_string()),
            Self::Stdin => {
                let mut input = std::io::stdin().lock().take(BYTES_MAX + 1);
                input.read_to_end(&mut bytes).map_err(unreadable)?;
            }
            Self::File(path) => {
                let file = std::fs::File::open(path).map_err(unreadable)?;
                file.take(BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
            }
        }
        if bytes.len() as u64 > BYTES_MAX {
            return Err(Failure::usage(format!(
                "{self} is longer than {} MiB: that is no config",
                BYTES_MAX >> 20
            )));
        }
        String::from_utf8(bytes).map_err(|_| {
            Failure::usage(format!("{self} is not UTF-8 text; a config is a JSON object"))
        })
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

impl From<OsString> for ConfigSource {
    fn from(argument: OsString) -> Self {
        let given = argument.to_str().filter(|text| text.trim_start().starts_with('{'));
        if let Some(Ok(config)) = given.map(serde_json::from_str) {
            Self::Inline(config)
        } else if Path::new(&argument) == Path::new("-") {
            Self::Stdin
        } else {
            Self::File(PathBuf::from(argument))
        }
    }
}

impl<'de> Deserialize<'de> for ConfigSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let given = Value::deserialize(deserializer)?;
        if let Some(path) = given.as_str() {
            return Ok(Self::File(PathBuf::from(path)));
        }
        let Value::Object(config) = given else {
            return Err(serde::de::Error::custom("neither a config object nor a path"));
        };
        Ok(Self::Inline(config))
    }
}

impl JsonSchema for ConfigSource {
    fn schema_name() -> Cow<'static, str> {
        "ConfigSource".into()
    }

    fn inline_schema() -> bool {
        true
    }

    // Not the knobs' own schema: what is wrong inside a config is said by its rules, with legal values and a suggestion each.
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": ["object", "string"]})
    }
}
