//! Tool calls in the text of an answer, in the form of the model's family. What is not a call of one of the tools is
//! text.

use std::collections::BTreeSet;
use std::sync::Arc;

use model::ToolForm;
use serde_json::{Map, Value};

use super::tools::Tools;

/// A call, complete.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    /// Its number in the answer.
    pub(super) index: usize,
    /// Nine letters and digits: what Mistral's templates require, and every other API takes.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: Value,
}

/// Divides a text into what is shown and calls.
#[derive(Debug)]
pub(super) struct CallReader {
    tools: Arc<Tools>,
    /// Text that may be, or begin, a call.
    held: String,
    /// Whether the text before was only blanks.
    blank: bool,
    calls: usize,
}

/// Text to show, and complete calls.
pub(super) type Parts = (String, Vec<Call>);

impl CallReader {
    pub(super) fn new(tools: Arc<Tools>) -> Self {
        Self { tools, held: String::new(), blank: true, calls: 0 }
    }

    /// Adds text; returns what cannot be part of a later call, and the calls that are complete.
    pub(super) fn push(&mut self, text: &str) -> Parts {
        self.held.push_str(text);
        match self.tools.form {
            ToolForm::Hermes => self.between_tags(),
            ToolForm::Mistral | ToolForm::Llama => (self.before_list(), Vec::new()),
        }
    }

    /// The rest, at the end of the text.
    pub(super) fn finish(&mut self) -> Parts {
        let rest = std::mem::take(&mut self.held);
        let names = &self.tools.names;
        let marker = self.tools.marker();
        let body = rest.trim_start().strip_prefix(marker);
        let found = match self.tools.form {
            ToolForm::Hermes => None,
            ToolForm::Mistral => body.and_then(|body| list(body, names)),
            ToolForm::Llama => {
                call(body.unwrap_or(&rest), "parameters", names).map(|call| vec![call])
            }
        };
        match found {
            Some(mut calls) => {
                calls.truncate(if self.tools.several { calls.len() } else { 1 });
                (String::new(), calls.into_iter().map(|call| self.numbered(call)).collect())
            }
            None => (rest, Vec::new()),
        }
    }

    /// Whether there was a call.
    pub(super) fn any(&self) -> bool {
        self.calls > 0
    }

    /// Whether the only call that the request allows has come.
    pub(super) fn is_full(&self) -> bool {
        self.calls > 0 && !self.tools.several
    }

    fn numbered(&mut self, (name, arguments): (String, Value)) -> Call {
        let index = self.calls;
        self.calls += 1;
        let id = format!("{:09}", super::fresh_seed() % 1_000_000_000);
        Call { index, id, name, arguments }
    }

    /// Calls between tags.
    fn between_tags(&mut self) -> Parts {
        let (begin, end) = (self.tools.marker(), "</tool_call>");
        let (mut shown, mut calls) = (String::new(), Vec::new());
        while let Some(start) = self.held.find(begin) {
            let Some(length) = self.held[start..].find(end) else {
                shown.extend(self.held.drain(..start));
                break;
            };
            let after = start + length + end.len();
            let body = &self.held[start + begin.len()..start + length];
            match call(body, "arguments", &self.tools.names) {
                Some(found) => {
                    shown.push_str(&self.held[..start]);
                    self.held.drain(..after);
                    calls.push(self.numbered(found));
                }
                None => shown.extend(self.held.drain(..after)),
            }
        }
        if !self.held.starts_with(begin) {
            let keep = suspect(&self.held, begin);
            shown.extend(self.held.drain(..self.held.len() - keep));
        }
        // Blanks between calls are not text.
        if self.calls > 0 && shown.trim().is_empty() {
            shown.clear();
        }
        (shown, calls)
    }

    /// The text ahead of what ends the answer as a call: with Mistral's marker, or as a JSON object from the start.
    fn before_list(&mut self) -> String {
        let marker = self.tools.marker();
        let keep = match self.held.find(marker) {
            Some(start) => self.held.len() - start,
            None if self.tools.form == ToolForm::Llama && self.blank => {
                match self.held.trim_start().chars().next() {
                    None | Some('{') => self.held.len(),
                    Some(_) => suspect(&self.held, marker),
                }
            }
            None => suspect(&self.held, marker),
        };
        let shown: String = self.held.drain(..self.held.len() - keep).collect();
        self.blank &= shown.trim().is_empty();
        shown
    }
}

/// The number of bytes at the end that may be the start of a marker.
fn suspect(text: &str, marker: &str) -> usize {
    let begins = |length: &usize| text.ends_with(&marker[..*length]);
    (1..marker.len()).rev().find(begins).unwrap_or(0)
}

/// One call: its name and arguments.
fn call(text: &str, arguments: &str, names: &BTreeSet<String>) -> Option<(String, Value)> {
    of(serde_json::from_str(text).ok()?, arguments, names)
}

fn of(
    mut map: Map<String, Value>,
    arguments: &str,
    names: &BTreeSet<String>,
) -> Option<(String, Value)> {
    let name = map.get("name")?.as_str().filter(|name| names.contains(*name))?.to_owned();
    let arguments = map.remove(arguments).unwrap_or_else(|| Map::new().into());
    arguments.is_object().then_some((name, arguments))
}

/// A list of calls.
fn list(text: &str, names: &BTreeSet<String>) -> Option<Vec<(String, Value)>> {
    let list: Vec<Map<String, Value>> = serde_json::from_str(text).ok()?;
    list.into_iter().map(|map| of(map, "arguments", names)).collect()
}
