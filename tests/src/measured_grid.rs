//! Reads a recorded measured grid.

use std::collections::BTreeMap;

use ir::schedule::ScheduleConfig;
use search::LatencyKind;
use search::measured_grid::{Answer, MEASURED_GRID_SCHEMA, Row, Space, Terms};

/// A malformed file of a measured grid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct BadMeasuredGrid {
    /// The line, from one.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// The result of a schedule in a measured grid.
#[derive(Clone, Debug, PartialEq)]
pub enum Found<'l> {
    /// It is not a point of the grid.
    Outside,
    /// It breaks rules.
    Illegal,
    /// It was not measured: the run was cut off before.
    Unrecorded,
    /// It is legal and has no latency. The number distinguishes programs.
    Failed(u32),
    /// Microseconds per token, and the blocks that they come from. The number distinguishes programs.
    Timed(u32, f64, &'l [f64]),
}

/// All results of a grid.
#[derive(Clone, Debug)]
pub struct MeasuredGrid {
    /// The parameters of its file.
    pub terms: Terms,
    space: Space,
    start: ScheduleConfig,
    answers: BTreeMap<u32, Answer>,
    /// Times of the neutral schedule, in the order in which they were taken.
    pub again_us: Vec<f64>,
}

impl MeasuredGrid {
    /// Parses a file. `neutral` is the neutral schedule of its model. A last line without an end is ignored: a kill cut
    /// it off.
    ///
    /// # Errors
    /// The first malformed line.
    pub fn read(text: &str, neutral: &ScheduleConfig) -> Result<Self, BadMeasuredGrid> {
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut lines = whole.lines().enumerate().map(|(number, line)| (number + 1, line));
        let bad = |line: usize, what: String| BadMeasuredGrid { line, what };
        let (_, first) = lines.next().ok_or_else(|| bad(1, "there is none".to_owned()))?;
        let terms: Terms = serde_json::from_str(first).map_err(|e| bad(1, e.to_string()))?;
        if terms.schema != MEASURED_GRID_SCHEMA {
            return Err(bad(1, format!("its schema is {}", terms.schema)));
        }
        let space = terms.grid.space(neutral).map_err(|e| bad(1, e.to_string()))?;
        let start =
            start_of(&space, neutral).ok_or_else(|| bad(1, "it has no start".to_owned()))?;
        let start = space.config(start);
        let mut land = Self { terms, space, start, answers: BTreeMap::new(), again_us: Vec::new() };
        for (number, line) in lines {
            let row: Row = serde_json::from_str(line).map_err(|e| bad(number, e.to_string()))?;
            land.add(row).map_err(|what| bad(number, what))?;
        }
        Ok(land)
    }

    fn add(&mut self, Row { point, answer }: Row) -> Result<(), String> {
        let kind = match &answer {
            Answer::Again(measured) => {
                self.again_us.push(measured.us);
                return Ok(());
            }
            Answer::Measured(_) => Some(LatencyKind::MeasuredGpu),
            Answer::Predicted { .. } => Some(LatencyKind::Predicted),
            Answer::Illegal(_) | Answer::Failed { .. } => None,
            Answer::Twin(of) if self.answers.contains_key(of) => None,
            Answer::Twin(of) => return Err(format!("the twin of point {of}, which has no row")),
        };
        if kind.is_some_and(|kind| kind != self.terms.latency_kind) {
            return Err("measured and predicted in one file".to_owned());
        }
        if point >= self.space.points() {
            return Err(format!("point {point} of {}", self.space.points()));
        }
        match self.answers.insert(point, answer) {
            None => Ok(()),
            Some(_) => Err(format!("point {point} has two answers")),
        }
    }

    /// The grid.
    #[must_use]
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The schedule that a search begins with.
    #[must_use]
    pub fn start(&self) -> &ScheduleConfig {
        &self.start
    }

    /// The result of a schedule.
    #[must_use]
    pub fn at(&self, config: &ScheduleConfig) -> Found<'_> {
        let Some(point) = point_of(&self.space, config) else { return Found::Outside };
        self.of(point)
    }

    fn of(&self, point: u32) -> Found<'_> {
        match self.answers.get(&point) {
            None | Some(Answer::Again(_)) => Found::Unrecorded,
            Some(Answer::Illegal(_)) => Found::Illegal,
            Some(Answer::Failed { .. }) => Found::Failed(point),
            Some(Answer::Measured(m)) => Found::Timed(point, m.us, &m.blocks_us),
            Some(Answer::Predicted { us, .. }) => {
                Found::Timed(point, *us, std::slice::from_ref(us))
            }
            // A twin's point is earlier in the file, and is not a twin itself.
            Some(Answer::Twin(of)) => self.of(*of),
        }
    }

    /// Number of points by result: timed, twins, failed, illegal, unrecorded.
    #[must_use]
    pub fn counts(&self) -> [usize; 5] {
        let mut counts = [0; 5];
        for answer in self.answers.values() {
            let kind = match answer {
                Answer::Measured(_) | Answer::Predicted { .. } => 0,
                Answer::Twin(_) => 1,
                Answer::Failed { .. } => 2,
                Answer::Illegal(_) => 3,
                Answer::Again(_) => continue,
            };
            counts[kind] += 1;
        }
        counts[4] = self.space.points() as usize - self.answers.len();
        counts
    }

    /// The schedule with the least time, and that time.
    #[must_use]
    pub fn best(&self) -> Option<(ScheduleConfig, f64)> {
        let timed = |point| match self.of(point) {
            Found::Timed(_, us, _) => Some((self.space.config(point), us)),
            Found::Outside | Found::Illegal | Found::Unrecorded | Found::Failed(_) => None,
        };
        (0..self.space.points()).filter_map(timed).min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}

/// The point of a schedule; `None` if it is outside the grid.
#[must_use]
pub fn point_of(space: &Space, config: &ScheduleConfig) -> Option<u32> {
    let mut point = 0;
    for (knob, values) in space.axes() {
        let index = values.iter().position(|&value| value == config.get(*knob))?;
        point = point * values.len() as u32 + index as u32;
    }
    (space.config(point) == *config).then_some(point)
}

/// The point at which a search begins: the neutral value of every knob that varies.
#[must_use]
pub fn start_of(space: &Space, neutral: &ScheduleConfig) -> Option<u32> {
    let mut config = space.config(0);
    for &(knob, _) in space.axes() {
        config.set(knob, neutral.get(knob)).ok()?;
    }
    point_of(space, &config)
}

#[cfg(test)]
mod tests {
    use search::measured_grid::{GRID_SCHEMA, Grid};

    use super::*;

    #[test]
    fn every_point_is_a_schedule_of_its_own_and_the_other_way_round() {
        let axes = r#"{"tiling.qkv.rows": [16, 8, 32], "kernel.evict": ["normal", "first"], "pipeline.stages": [8, 5]}"#;
        let text = format!(
            r#"{{"schema": "{GRID_SCHEMA}", "base": {{"sync.qkv": "flag_in_data"}}, "axes": {axes}}}"#
        );
        let grid: Grid = serde_json::from_str(&text).unwrap();
        let space = grid.space(&ScheduleConfig::default()).unwrap();
        assert_eq!(space.points(), 12);
        let ids: std::collections::BTreeSet<_> =
            (0..12).map(|point| space.config(point).id()).collect();
        assert_eq!(ids.len(), 12);
        for point in 0..12 {
            assert_eq!(point_of(&space, &space.config(point)), Some(point));
        }
        let start = space.config(start_of(&space, &ScheduleConfig::default()).unwrap());
        let mut want = ScheduleConfig::default();
        want.sync.qkv = ir::schedule::Handoff::FlagInData;
        assert_eq!(start, want);
        assert_eq!(point_of(&space, &ScheduleConfig::default()), None, "outside: another hand-off");
    }
}
