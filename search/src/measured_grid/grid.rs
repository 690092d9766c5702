//! The points of a measured grid: every combination of some values of some knobs.

use std::collections::BTreeMap;

use ir::schedule::{Knob, ScheduleConfig, Value};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

/// Schema of a grid's file.
pub const GRID_SCHEMA: &str = "amk.grid.v1";

/// Most points, legal or not.
const POINTS_MAX: usize = 1 << 20;

/// A grid as it is written in a file: knobs by dotted path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grid {
    /// [`GRID_SCHEMA`].
    pub schema: String,
    /// Values of fixed knobs that differ from the neutral ones.
    pub base: BTreeMap<String, Json>,
    /// Knobs with the values to combine.
    pub axes: BTreeMap<String, Vec<Json>>,
}

/// Why a grid cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grid cannot be used: {0}")]
pub struct BadGrid(String);

/// A parsed grid: its knobs in the order of the knob table.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    base: ScheduleConfig,
    axes: Vec<(Knob, Vec<Value>)>,
}

fn bad<T>(what: String) -> Result<T, BadGrid> {
    Err(BadGrid(what))
}

fn knob(path: &str) -> Result<Knob, BadGrid> {
    Knob::from_path(path).map_or_else(|| bad(format!("no knob is called {path}")), Ok)
}

fn value(knob: Knob, json: &Json) -> Result<Value, BadGrid> {
    let found = knob.values().into_iter().find(|value| value.to_json() == *json);
    found.map_or_else(|| bad(format!("{json} is not a value of {knob}: {}", knob.domain())), Ok)
}

impl Grid {
    /// Parses the knobs and values. Knobs that are left out take the value of `neutral`.
    ///
    /// # Errors
    /// The first thing that is wrong: an unknown knob or value, a knob twice, or too many points.
    pub fn space(&self, neutral: &ScheduleConfig) -> Result<Space, BadGrid> {
        if self.schema != GRID_SCHEMA {
            return bad(format!("its schema is {}, not {GRID_SCHEMA}", self.schema));
        }
        let mut base = *neutral;
        for (path, json) in &self.base {
            if self.axes.contains_key(path) {
                return bad(format!("{path} is both fixed and varied"));
            }
            let knob = knob(path)?;
            base.set(knob, value(knob, json)?)
                .map_err(|domain| BadGrid(format!("{knob} takes {domain}")))?;
        }
        let mut axes = Vec::new();
        for (path, list) in &self.axes {
            let knob = knob(path)?;
            let mut values =
                list.iter().map(|json| value(knob, json)).collect::<Result<Vec<_>, _>>()?;
            values.sort_by_key(|value| knob.values().iter().position(|other| other == value));
            values.dedup();
            if values.len() != list.len() || values.is_empty() {
                return bad(format!("{path} needs values, each once"));
            }
            if !values.contains(&neutral.get(knob)) {
                return bad(format!(
                    "{path} lacks {}, which a search begins with",
                    neutral.get(knob)
                ));
            }
            axes.push((knob, values));
        }
        axes.sort_by_key(|&(knob, _)| knob);
        let points = axes.iter().try_fold(1_usize, |n, (_, values)| n.checked_mul(values.len()));
        if points.is_none_or(|points| points > POINTS_MAX) {
            return bad(format!("it has more than {POINTS_MAX} points"));
        }
        Ok(Space { base, axes })
    }
}

impl Space {
    /// The knobs that vary, with their values in the order of the knob table.
    #[must_use]
    pub fn axes(&self) -> &[(Knob, Vec<Value>)] {
        &self.axes
    }

    /// Number of points, legal or not.
    #[must_use]
    pub fn points(&self) -> u32 {
        self.axes.iter().map(|(_, values)| values.len() as u32).product()
    }

    /// The schedule of a point. Numbers past the last wrap around.
    #[must_use]
    pub fn config(&self, point: u32) -> ScheduleConfig {
        let (mut config, mut rest) = (self.base, point);
        for (knob, values) in self.axes.iter().rev() {
            let count = values.len() as u32;
            let outcome = config.set(*knob, values[(rest % count) as usize]);
            debug_assert!(outcome.is_ok(), "values are from the knob's own domain");
            rest /= count;
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(base: &str, axes: &str) -> Result<Space, BadGrid> {
        let text = format!(r#"{{"schema": "{GRID_SCHEMA}", "base": {base}, "axes": {axes}}}"#);
        let grid: Grid = serde_json::from_str(&text).unwrap();
        grid.space(&ScheduleConfig::default())
    }

    #[test]
    fn what_means_nothing_is_refused_with_its_reason() {
        let says = |base, axes| grid(base, axes).unwrap_err().to_string();
        assert!(says("{}", r#"{"tiling.rows": [8]}"#).contains("no knob is called tiling.rows"));
        assert!(says("{}", r#"{"tiling.qkv.rows": [16, 9]}"#).contains("9 is not a value"));
        assert!(says("{}", r#"{"tiling.qkv.rows": [16, 16]}"#).contains("each once"));
        assert!(says("{}", r#"{"tiling.qkv.rows": [8]}"#).contains("lacks 16"));
        let both = says(r#"{"tiling.qkv.rows": 8}"#, r#"{"tiling.qkv.rows": [16]}"#);
        assert!(both.contains("both fixed and varied"));
    }
}
