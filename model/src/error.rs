//! Errors of this crate; each message says where, what is wrong and what to do.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::coded::CODED;

/// Most problems in one message; the rest are counted. The error itself holds them all.
const SHOWN_PROBLEMS: usize = 12;

/// Most characters of a name or value from a file in a message.
const SHOWN_CHARS: usize = 120;

/// Why a model, its export or its tokenizer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The name is neither a preset nor a folder.
    #[error("{}", unknown(name, nearest.as_deref(), presets))]
    Unknown {
        /// The given name.
        name: String,
        /// The preset with the most similar spelling, if one is close.
        nearest: Option<String>,
        /// All presets.
        presets: Vec<&'static str>,
    },
    /// The path is not a model folder.
    #[error("{} is not a model folder: {reason}", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The operating system reported an error for a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, `rename` and so on.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// The contents of a file are invalid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where in the file.
        reason: String,
    },
    /// The model's configuration is invalid or not supported; every problem is listed.
    #[error("{}: {}", path.display(), listed(problems))]
    Config {
        /// The file, `config.json` or `generation_config.json`.
        path: PathBuf,
        /// All problems.
        problems: Vec<Problem>,
    },
    /// The stored tensors do not match the configuration; every difference is listed.
    #[error("{}: the tensors do not fit config.json: {}", path.display(), listed(problems))]
    Tensors {
        /// The model folder.
        path: PathBuf,
        /// All differences.
        problems: Vec<Problem>,
    },
    /// The target of an export is in use.
    #[error("cannot export to {}: {reason}", path.display())]
    Target {
        /// The folder.
        path: PathBuf,
        /// The conflict.
        reason: String,
    },
    /// A model cannot be quantised.
    #[error("cannot quantise {name}: {reason}")]
    Source {
        /// The model.
        name: String,
        /// Why not.
        reason: String,
    },
    /// Encoding or decoding of text failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A chat template failed on these messages.
    #[error("chat template: {0}")]
    Template(String),
}

impl ModelError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> Self {
        Self::File { path: path.to_path_buf(), reason: reason.into() }
    }
}

/// One problem with one field or tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field of `config.json`, or the tensor's name.
    pub subject: String,
    /// What is wrong with it, and what would be right.
    pub reason: String,
}

impl Problem {
    pub(crate) fn new(subject: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { subject: subject.into(), reason: reason.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", quoted(&self.subject), self.reason)
    }
}

/// A string from a file, quoted, escaped and truncated for display.
pub(crate) fn quoted(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{:?}...", &text[..cut]),
        None => format!("{text:?}"),
    }
}

/// A JSON value, truncated for display.
pub(crate) fn shown(value: &serde_json::Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

fn listed(problems: &[Problem]) -> String {
    let mut text = String::new();
    if problems.len() > 1 {
        text = format!("{} problems: ", problems.len());
    }
    for (i, problem) in problems.iter().take(SHOWN_PROBLEMS).enumerate() {
        if i > 0 {
            text.push_str(" | ");
        }
        text.push_str(&problem.to_string());
    }
    if problems.len() > SHOWN_PROBLEMS {
        text.push_str(&format!(" | and {} more", problems.len() - SHOWN_PROBLEMS));
    }
    text
}

/// Whether the text looks like the name of a repository on the Hugging Face Hub: an owner and a name.
fn is_hub_id(text: &str) -> bool {
    let is_word = |word: &str| {
        let begins = word.starts_with(|c: char| c.is_ascii_alphanumeric());
        begins && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.len() <= 96
        && text.split_once('/').is_some_and(|(owner, name)| is_word(owner) && is_word(name))
}

fn unknown(name: &str, nearest: Option<&str>, presets: &[&str]) -> String {
    if is_hub_id(name) {
        let folder = name.rsplit('/').next().unwrap_or_default();
        return format!(
            "there is no folder {name}; run `hf download {name} --local-dir {folder}` and name that folder"
        );
    }
    // No preset and no model of the Hub has such a name.
    if name.starts_with(['.', '/', '~']) || name.matches('/').count() > 1 || name.ends_with(".gguf")
    {
        return format!("there is no file or folder {}; check the path", quoted(name));
    }
    // A preset has random weights: it must not be taken for the real model of a similar name.
    let hint = nearest
        .map(|n| format!(" (the preset {n} has this shape and random weights)"))
        .unwrap_or_default();
    let formats: Vec<_> = CODED.iter().map(|(format, _)| format!("-{format}")).collect();
    format!(
        "{} is neither a preset nor a folder{hint}; a model of the Hugging Face Hub is named ORG/NAME; presets, all with random weights: {}; those of 16 bits also with {}",
        quoted(name),
        presets.join(", "),
        formats.join(", ")
    )
}
