//! The schedule: every choice that a search may make, as one structured object.
//!
//! Knobs are declared once, in the table of `knobs.rs`. The structs, [`Knob`], `get`, `set`, [`search_space`], the JSON
//! schema, the docs table and the errors of [`parse_config`] are expansions of it or walks over it.
//!
//! **Promises.** [`validate`] is the only way to a [`Valid`] config. A refusal lists every violation with its place,
//! the given value, the legal values and a suggestion. Nothing is rounded or adjusted silently: a value is taken as it
//! is or refused.

mod defaults;
mod knobs;
mod numeric;
mod parse;
mod renamed;
mod space;
#[cfg(test)]
mod tests;
mod validate;
mod value;

use serde::Serialize;

pub use defaults::{default_config, default_config_at, neutral_config, split_keys};
pub use knobs::{
    ActsOn, AttentionTiling, DownTiling, FusionGrouping, GateUpTiling, Handoffs, KernelConfig,
    Knob, LmHeadTiling, OProjTiling, Pipeline, QkvTiling, ScheduleConfig, Tiling,
};
pub use numeric::{decides_bits, numeric_id};
pub use parse::{parse_config, read_config, read_config_over, unique_json};
pub use renamed::{
    RENAMED_KNOBS, RENAMED_VALUES, earlier_schedule_id, renamed_knob, renamed_value,
};
pub use space::{json_schema, knob_table_markdown, legal_values, search_space};
pub use validate::{activation_bytes, largest_stages, remote_handoffs, validate};
pub use value::{Domain, EmbedGrouping, Evict, Handoff, MergeGrouping, SmAssignment, Value};

/// A value that passed its check. Only this module's [`validate`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Valid<T>(T);

impl<T> Valid<T> {
    /// The value.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T> std::ops::Deref for Valid<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// The stable id of a schedule: 16 hex digits.
#[must_use]
pub fn schedule_id(config: &ScheduleConfig) -> String {
    config.id()
}

/// Hash of the canonical JSON (fields in table order), prefixed with the name of the kind.
pub(crate) fn content_id<T: Serialize>(kind: &str, value: &T) -> String {
    id_of(kind, &serde_json::to_string(value).unwrap_or_default())
}

fn id_of(kind: &str, text: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(kind.as_bytes());
    hasher.update(text.as_bytes());
    hasher.finalize().to_hex()[..16].to_string()
}
