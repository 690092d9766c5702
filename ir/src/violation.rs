//! Every rule that `validate` and `verify` check, and the report of a violation.
//!
//! A rule is declared once, in [`for_each_rule!`]: its identifier and one sentence. `docs/reference/invariants.md` is
//! generated from the table, and a test fails when a program rule has no negative file test.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value as Json;

use crate::id::{BufferId, CounterId, MatrixId, WorkerId};

/// Calls `$macro` with the whole rule table. Schedule rules first, then program rules by family.
macro_rules! for_each_rule {
    ($macro:ident) => {
        $macro! {
            Schedule SJson "S-JSON" "a config file is one JSON document that holds an object";
            Schedule SKey "S-KEY" "every key of a config file is part of a knob's dotted path";
            Schedule SType "S-TYPE" "a knob's value has the type that the knob table says";
            Schedule SRange "S-RANGE" "a knob's value is one of those that the knob table lists";
            Schedule SGraph "S-GRAPH" "the graph lies within the limits of the opcode table";
            Schedule STarget "S-TARGET" "the target lies within the limits of the opcode table";
            Schedule SRing "S-RING" "the weight ring fits in shared memory beside the activation buffer";
            Schedule SInFlight "S-IN-FLIGHT" "bytes in flight are whole stages, at least one and at most the ring";
            Schedule SBeforeWait "S-BEFORE-WAIT" "bytes in flight before a wait are at most those elsewhere";
            Schedule SThreads "S-THREADS" "the threads of a worker are within the target's limits, and its architecture has what the kernel uses";
            Schedule SEmbed "S-EMBED" "the first layer reads the embedding itself only if it norms the row and the row has no factor";
            Schedule SRemote "S-REMOTE" "with several GPUs, what all of them read is handed over by flag_in_data, and each has rows of the logits";
            Schedule SSplit "S-SPLIT" "every split of the keys has work at some position";
            Program PLimit "P-LIMIT" "sizes, dimensions and the weight ring stay within the ABI's limits";
            Program POpcode "P-OPCODE" "enumerations hold values of their table and reserved words are zero";
            Program PArity "P-ARITY" "a task has the buffers that its op needs, of the right kinds, and every id is in range";
            Program PShape "P-SHAPE" "parameters, buffers, matrices and dimensions agree, and no word or tile lies outside its buffer or matrix";
            Program CSatisfiable "C-SATISFIABLE" "a wait is for at least one arrival and at most those that the counter gets in a step";
            Program CAlljoin "C-ALLJOIN" "a wait is for all arrivals of its counter in a step";
            Program CWidth "C-WIDTH" "arrivals over a whole key/value cache of steps fit into a counter";
            Program DReplica "D-REPLICA" "a replicated buffer holds flag-in-data words, and a program of one device has none";
            Program DLocal "D-LOCAL" "with several devices, a task reads words that its own device writes or that all devices have, and `sample` all candidates of its device";
            Program DHead "D-HEAD" "all splits of a key/value head are attended on one device";
            Program OAcyclic "O-ACYCLIC" "queue order, counters and flag-in-data buffers leave no cycle of tasks that wait for each other";
            Program OStep "O-STEP" "a step has exactly one `sample` on each device, and it is ordered after every other task of the device";
            Program RHappens "R-HAPPENS" "a read is ordered after the write that it reads";
            Program RWriter "R-WRITER" "no word is written twice in a step";
            Program TCover "T-COVER" "every word of a buffer that tasks use is written in each step";
            Program MArena "M-ARENA" "buffers lie in the arena, aligned and apart from each other";
            Program KSplit "K-SPLIT" "each split of each key/value head of a layer is attended exactly once, with equal parameters, and merged with the same";
            Program LRoute "L-ROUTE" "a product with a route reads one that a `route` of as many experts writes as flag-in-data words, and its loads follow the same logits";
            Program KCache "K-CACHE" "each layer has one key/value cache of the right size, used by that layer only";
        }
    };
}

/// The level that a rule applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
    /// A schedule from a user: checked by `validate`.
    Schedule,
    /// A program from `lower`: checked by `verify`.
    Program,
}

macro_rules! define_rules {
    ($($level:ident $variant:ident $id:literal $sentence:literal;)+) => {
        /// A rule. Its text form is its identifier.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Rule { $(#[doc = concat!($id, ": ", $sentence, ".")] $variant),+ }

        impl Rule {
            /// Every rule, in the table's order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Such as `R-HAPPENS`.
            #[must_use]
            pub const fn id(self) -> &'static str {
                match self { $(Self::$variant => $id),+ }
            }

            /// The rule in one sentence, without a full stop.
            #[must_use]
            pub const fn sentence(self) -> &'static str {
                match self { $(Self::$variant => $sentence),+ }
            }

            /// The level of the rule.
            #[must_use]
            pub const fn level(self) -> Level {
                match self { $(Self::$variant => Level::$level),+ }
            }
        }
    };
}
for_each_rule!(define_rules);

impl Rule {
    /// The rule with this identifier.
    #[must_use]
    pub fn from_id(id: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|rule| rule.id() == id)
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.id())
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.id())
    }
}

/// The place of a violation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum At {
    /// The whole schedule or program.
    Whole,
    /// A knob or another key of a config, by its dotted path.
    Knob(String),
    /// A place in a text, counted from one.
    Text {
        /// Line.
        line: u32,
        /// Column.
        column: u32,
    },
    /// The model graph.
    Graph,
    /// The target.
    Target,
    /// A matrix of the program.
    Matrix(MatrixId),
    /// A buffer of the program.
    Buffer(BufferId),
    /// A counter of the program.
    Counter(CounterId),
    /// A worker of the program.
    Worker(WorkerId),
    /// A task, by worker and place in its queue.
    Task(WorkerId, u32),
}

impl std::fmt::Display for At {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Knob(path) => f.write_str(path),
            Self::Text { line, column } => write!(f, "line {line} column {column}"),
            Self::Graph => f.write_str("graph"),
            Self::Target => f.write_str("target"),
            Self::Matrix(id) => id.fmt(f),
            Self::Buffer(id) => id.fmt(f),
            Self::Counter(id) => id.fmt(f),
            Self::Worker(id) => id.fmt(f),
            Self::Task(worker, index) => write!(f, "{worker}.{index}"),
        }
    }
}

impl Serialize for At {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Longest value that is quoted in full, in bytes.
const VALUE_BYTES_MAX: usize = 200;

/// One broken rule, with its place and its numbers. As JSON: `{rule, at, value, legal, suggestion, message}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The place.
    pub at: At,
    /// What was found and what was expected, in one lower-case sentence.
    pub detail: String,
    /// The given value, if a user gave one.
    pub value: Option<Json>,
    /// The legal values.
    pub legal: Option<String>,
    /// What to write instead.
    pub suggestion: Option<String>,
}

impl Violation {
    /// A violation with its sentence; the other methods add the given value, the legal values and a suggestion.
    #[must_use]
    pub fn new(rule: Rule, at: At, detail: impl Into<String>) -> Self {
        Self { rule, at, detail: detail.into(), value: None, legal: None, suggestion: None }
    }

    /// Adds the given value; a long one is truncated.
    #[must_use]
    pub fn value(self, value: impl Into<Json>) -> Self {
        Self { value: Some(bounded(value.into())), ..self }
    }

    /// Adds the legal values.
    #[must_use]
    pub fn legal(self, legal: impl Into<String>) -> Self {
        Self { legal: Some(legal.into()), ..self }
    }

    /// Adds what to write instead.
    #[must_use]
    pub fn suggest(self, suggestion: impl Into<String>) -> Self {
        Self { suggestion: Some(suggestion.into()), ..self }
    }
}

/// The value itself, or the beginning of its text if that is longer than [`VALUE_BYTES_MAX`].
pub(crate) fn bounded(value: Json) -> Json {
    let text = match &value {
        Json::String(text) => text.clone(),
        Json::Null | Json::Bool(_) | Json::Number(_) | Json::Array(_) | Json::Object(_) => {
            value.to_string()
        }
    };
    if text.len() <= VALUE_BYTES_MAX {
        return value;
    }
    let begin = &text[..text.floor_char_boundary(VALUE_BYTES_MAX)];
    Json::String(format!("{begin}... ({} bytes)", text.len()))
}

impl Serialize for Violation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(6))?;
        map.serialize_entry("rule", &self.rule)?;
        map.serialize_entry("at", &self.at)?;
        map.serialize_entry("value", &self.value)?;
        map.serialize_entry("legal", &self.legal)?;
        map.serialize_entry("suggestion", &self.suggestion)?;
        map.serialize_entry("message", &self.detail)?;
        map.end()
    }
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}: {}", self.rule, self.at, self.detail)?;
        if let Some(legal) = &self.legal {
            write!(f, "; legal: {legal}")?;
        }
        if let Some(suggestion) = &self.suggestion {
            write!(f, "; try {suggestion}")?;
        }
        Ok(())
    }
}

/// All violations found. The first [`Violations::KEPT_MAX`] are kept, the rest only counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Violations {
    kept: Vec<Violation>,
    total: usize,
}

impl Violations {
    /// Violations that are kept; more are only counted.
    pub const KEPT_MAX: usize = 256;
    const PRINTED_MAX: usize = 20;

    /// Adds one.
    pub fn push(&mut self, rule: Rule, at: At, detail: impl Into<String>) {
        self.add(Violation::new(rule, at, detail));
    }

    /// Adds a complete violation.
    pub fn add(&mut self, violation: Violation) {
        self.total += 1;
        if self.kept.len() < Self::KEPT_MAX {
            self.kept.push(violation);
        }
    }

    /// `Ok` if there are no violations.
    ///
    /// # Errors
    /// These violations, if there are any.
    pub fn into_result(self) -> Result<(), Self> {
        if self.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Whether this rule is broken.
    #[must_use]
    pub fn has(&self, rule: Rule) -> bool {
        self.kept.iter().any(|violation| violation.rule == rule)
    }

    /// The violations that were kept, in the order in which they were found.
    #[must_use]
    pub fn list(&self) -> &[Violation] {
        &self.kept
    }

    /// The number of violations, kept or not.
    #[must_use]
    pub fn total(&self) -> usize {
        self.total
    }

    /// Whether there are no violations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.total == 0
    }
}

impl std::fmt::Display for Violations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, violation) in self.kept.iter().take(Self::PRINTED_MAX).enumerate() {
            write!(f, "{}{violation}", if index == 0 { "" } else { "\n" })?;
        }
        let printed = self.kept.len().min(Self::PRINTED_MAX);
        if self.total > printed {
            write!(f, "\n... and {} more", self.total - printed)?;
        }
        Ok(())
    }
}

impl std::error::Error for Violations {}
