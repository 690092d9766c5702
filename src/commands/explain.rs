//! `amk explain`: what a word means here. Everything comes from the declaring tables: knobs, rules, traps, exit codes, states, the
//! outcomes and fields of HARNESS.md, the glossary.

use std::collections::BTreeMap;

use abi::{Activity, EntryState, SequenceEnd, ThrottleReason, Trap};
use ir::Rule;
use ir::schedule::Knob;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use strum::VariantArray as _;

use crate::cli::ExplainArgs;
use crate::failure::{Exit, Failure};
use crate::report::{self, Answer};

const GLOSSARY: &str = include_str!("../../docs/reference/glossary.md");
const HARNESS: &str = include_str!("../../HARNESS.md");

/// The longest name that is looked up; no real name is half as long.
const NAME_BYTES_MAX: usize = 200;

/// Similar names that are suggested for an unknown one.
const NEAR_MAX: usize = 8;

/// A word with what it means.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct Entry {
    /// knob, rule, trap, exit, state, outcome, field or term.
    kind: &'static str,
    name: String,
    meaning: String,
    #[serde(flatten)]
    more: BTreeMap<&'static str, Value>,
}

impl Entry {
    fn new(kind: &'static str, name: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self { kind, name: name.into(), meaning: meaning.into(), more: BTreeMap::new() }
    }

    fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.more.insert(key, value.into());
        self
    }

    /// Whether the query means this entry. The first of several words for one thing is enough.
    fn is(&self, asked: &str) -> bool {
        let names = std::iter::once(self.name.as_str()).chain(self.name.split(", "));
        names.into_iter().any(|name| same(name, asked))
            || self.more.get("error").and_then(Value::as_str) == Some(asked)
    }

    /// Whether one of the words of its name equals the query.
    fn has_word(&self, asked: &str) -> bool {
        let mut words = self.name.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '-');
        words.any(|word| same(word, asked))
    }

    /// Whether it is a knob with this word among its values.
    fn has_value(&self, asked: &str) -> bool {
        let values = self.more.get("values").and_then(Value::as_str).unwrap_or_default();
        let word = asked.starts_with(|first: char| first.is_alphabetic());
        word && values.split(", ").any(|value| same(value, asked))
    }
}

/// Whether two names are spelt alike. Letter case is ignored, and a dash is an underscore, as in flags.
fn same(name: &str, asked: &str) -> bool {
    name.replace('-', "_").eq_ignore_ascii_case(&asked.replace('-', "_"))
}

/// The meanings of a name, or the list of all names.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Explanation {
    #[schemars(extend("const" = "amk.explain.v1"))]
    schema: &'static str,
    /// Every name, by kind, if no name was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    names: Option<BTreeMap<&'static str, Vec<String>>>,
    /// All meanings of the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<Vec<Entry>>,
}

fn entries() -> Vec<Entry> {
    let knobs = Knob::ALL.iter().map(|&knob| {
        Entry::new("knob", knob.path(), knob.desc())
            .with("values", knob.domain().to_string())
            .with("neutral", knob.default().to_json())
            .with("acts_on", knob.acts_on().name())
    });
    let rules = Rule::ALL.iter().map(|rule| Entry::new("rule", rule.id(), rule.sentence()));
    let traps = Trap::ALL
        .iter()
        .map(|trap| Entry::new("trap", trap.name(), trap.sentence()).with("number", *trap as u32));
    let exits = Exit::VARIANTS.iter().map(|exit| {
        Entry::new("exit", exit.code().to_string(), exit.sentence()).with("error", exit.name())
    });
    let outcomes =
        rows(HARNESS, "outcome").map(|[name, meaning, _]| Entry::new("outcome", name, meaning));
    let fields =
        rows(HARNESS, "field").map(|[name, meaning, _]| Entry::new("field", name, meaning));
    let here = knobs.chain(rules).chain(traps).chain(exits).chain(states());
    here.chain(outcomes).chain(fields).chain(terms()).collect()
}

/// What `amk top` and the metrics call the states of a command, a process, a sequence that ended, a GPU that is held down.
fn states() -> impl Iterator<Item = Entry> {
    let state = |name: &str, sentence: &str| Entry::new("state", name, sentence);
    let commands = EntryState::ALL.iter().map(move |of| state(of.name(), of.sentence()));
    let processes = Activity::ALL.iter().map(move |of| state(of.name(), of.sentence()));
    let endings = SequenceEnd::ALL.iter().map(move |of| state(of.name(), of.sentence()));
    let reasons = ThrottleReason::ALL.iter().map(move |of| state(of.name(), of.sentence()));
    commands.chain(processes).chain(endings).chain(reasons)
}

/// The rows of the glossary's table: a word, its meaning, the words not to use.
fn terms() -> impl Iterator<Item = Entry> {
    rows(GLOSSARY, "word").map(|[word, meaning, not]| {
        let entry = Entry::new("term", word, meaning);
        if not.is_empty() { entry } else { entry.with("not", not) }
    })
}

/// The first three cells of each row of the table whose first column has this head. Names are without marks of code.
fn rows<'p>(page: &'p str, head: &str) -> impl Iterator<Item = [String; 3]> + 'p {
    let head = format!("| {head} |");
    let table = page.lines().skip_while(move |line| !line.starts_with(&head));
    table.skip(2).take_while(|line| line.starts_with('|')).map(|row| {
        let mut cells = row.trim_start_matches('|').split(" |").map(str::trim);
        let mut cell = || cells.next().unwrap_or_default();
        [cell().replace(['`', '[', ']'], ""), cell().to_owned(), cell().to_owned()]
    })
}

pub(crate) fn answer(args: &ExplainArgs) -> Result<Answer<Explanation>, Failure> {
    let explained = |names, entries| {
        let document = Explanation { schema: "amk.explain.v1", names, entries };
        Ok(Answer { document, exit: Exit::Yes })
    };
    let all = entries();
    let Some(name) = &args.name else {
        let mut names: BTreeMap<&'static str, Vec<String>> = BTreeMap::new();
        for entry in all {
            names.entry(entry.kind).or_default().push(entry.name);
        }
        for (kind, names) in &names {
            report::say(&format!("  {kind:7} {}", names.join("; ")));
        }
        return explained(Some(names), None);
    };
    let name = name.trim();
    if name.len() > NAME_BYTES_MAX {
        let begin = &name[..name.floor_char_boundary(NAME_BYTES_MAX / 4)];
        return Err(Failure::usage(format!(
            "nothing is called `{begin}...` ({} bytes) here; `amk explain` lists every name",
            name.len()
        )));
    }
    let found = meant(name, &all).ok_or_else(|| Failure::usage(unknown(name, &all)))?;
    for entry in &found {
        report::say(&format!("{} ({}): {}", entry.name, entry.kind, entry.meaning));
        for (key, value) in &entry.more {
            report::say(&format!("  {key}: {}", report::word(Some(value))));
        }
    }
    explained(None, Some(found))
}

/// The meaning of a name: all entries of that name, else the only entry whose name contains it as a word, else the knobs
/// that have it as a value.
fn meant(name: &str, all: &[Entry]) -> Option<Vec<Entry>> {
    let exact: Vec<Entry> = all.iter().filter(|entry| entry.is(name)).cloned().collect();
    if !exact.is_empty() {
        return Some(exact);
    }
    let part: Vec<&Entry> = all.iter().filter(|entry| entry.has_word(name)).collect();
    match part[..] {
        [only] => Some(vec![only.clone()]),
        [] => {
            let knobs: Vec<Entry> = all.iter().filter(|e| e.has_value(name)).cloned().collect();
            (!knobs.is_empty()).then_some(knobs)
        }
        _ => None,
    }
}

/// The error for an unknown name: suggests similar names.
fn unknown(name: &str, all: &[Entry]) -> String {
    let asked = name.to_lowercase();
    let like = |entry: &&Entry| {
        let known = entry.name.to_lowercase();
        let alike = ir::nearest(&asked, [known.as_str()]).is_some();
        known.contains(&asked) || asked.contains(&known) || alike
    };
    let near: Vec<&str> = all.iter().filter(like).map(|e| e.name.as_str()).take(NEAR_MAX).collect();
    let hint = if near.is_empty() { String::new() } else { format!("; try {}", near.join(", ")) };
    format!("nothing is called `{name}` here{hint}; `amk explain` lists every name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_means_something() {
        let all = entries();
        for entry in &all {
            assert!(!entry.meaning.is_empty(), "{} means nothing", entry.name);
            assert!(all.iter().any(|other| other.is(&entry.name)), "{}", entry.name);
        }
        let count = |kind| all.iter().filter(|entry| entry.kind == kind).count();
        assert_eq!(count("knob"), Knob::ALL.len());
        assert_eq!(count("rule"), Rule::ALL.len());
        assert_eq!(count("exit"), Exit::VARIANTS.len());
        let rows = GLOSSARY.lines().filter(|line| line.starts_with("| ")).count();
        assert_eq!(count("term"), rows - 1, "a row of the glossary is not a term");
        for name in ["out_of_memory", "unloadable", "violations", "kernel_id", "gate", "numeric_id"]
        {
            assert!(meant(name, &all).is_some(), "{name}");
        }
        assert!(count("outcome") > 7 && count("field") > 7);
    }

    #[test]
    fn the_help_names_every_exit_code() {
        for exit in Exit::VARIANTS {
            let code = format!(" {} ", exit.code());
            for help in [crate::cli::EXIT_CODES, crate::cli::FIRST_STEPS] {
                let help = help.replace('\n', " ");
                assert!(help.contains(&code), "{help} leaves out {code}");
            }
        }
    }

    #[test]
    fn part_of_a_name_means_the_one_thing_that_has_it() {
        let all = entries();
        let names = |asked: &str| -> Vec<String> {
            meant(asked, &all).into_iter().flatten().map(|entry| entry.name).collect()
        };
        let dashed = answer(&ExplainArgs { name: Some("kv-split".to_owned()) }).unwrap();
        assert_eq!(dashed.document.entries.unwrap()[0].name, "tiling.attention.kv_split");
        assert_eq!(names("kv_split"), ["tiling.attention.kv_split"]);
        assert_eq!(names("flag-in-data"), ["flag-in-data word"]);
        assert_eq!(names("flag_in_data"), ["flag-in-data word"], "as a config spells it");
        assert_eq!(names("carry"), ["sm_assignment"], "a knob's value");
        assert_eq!(names("128"), Vec::<String>::new(), "a number is no name");
        assert_eq!(names("stages"), ["pipeline.stages"]);
        assert_eq!(names("inconclusive"), ["5", "inconclusive", "kept, reverted, inconclusive"]);
        assert_eq!(names("rows"), Vec::<String>::new(), "several knobs are called so");
    }

    #[test]
    fn a_name_that_is_nearly_right_gets_a_suggestion() {
        let all = entries();
        assert!(unknown("pipeline.stage", &all).contains("pipeline.stages"));
        assert!(unknown("R-HAPPEN", &all).contains("R-HAPPENS"));
        assert!(!unknown("zzz", &all).contains("try"));
    }
}
