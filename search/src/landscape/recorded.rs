//! A recorded landscape, read back.

use std::collections::BTreeMap;

use ir::schedule::ScheduleConfig;

use super::{Answer, LANDSCAPE_SCHEMA, Row, Space, Terms};
use crate::verdict::LatencyKind;

/// A file that is no landscape, or not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct BadLandscape {
    /// The line, from one.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// What a landscape says of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Found<'l> {
    /// It is not a point of the grid.
    Outside,
    /// It breaks rules.
    Illegal,
    /// Nobody measured it: the run was cut off before.
    Unrecorded,
    /// It is legal and has no latency. The number tells programs apart.
    Failed(u32),
    /// Microseconds a token, and the blocks that say so. The number tells programs apart.
    Timed(u32, f64, &'l [f64]),
}

/// All answers of a grid.
#[derive(Clone, Debug)]
pub struct Landscape {
    /// The terms of its file.
    pub terms: Terms,
    space: Space,
    start: ScheduleConfig,
    answers: BTreeMap<u32, Answer>,
    /// Times of the neutral schedule, in the order in which they were taken.
    pub again_us: Vec<f64>,
}

impl Landscape {
    /// Reads the text of a file. `neutral` is the neutral schedule of its model. A last line without an end is left out: a kill cut it off.
    ///
    /// # Errors
    /// The first line that does not fit.
    pub fn read(text: &str, neutral: &ScheduleConfig) -> Result<Self, BadLandscape> {
        let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
        let mut lines = whole.lines().enumerate().map(|(number, line)| (number + 1, line));
        let bad = |line: usize, what: String| BadLandscape { line, what };
        let (_, first) = lines.next().ok_or_else(|| bad(1, "there is none".to_owned()))?;
        let terms: Terms = serde_json::from_str(first).map_err(|e| bad(1, e.to_string()))?;
        if terms.schema != LANDSCAPE_SCHEMA {
            return Err(bad(1, format!("its schema is {}", terms.schema)));
        }
        let space = terms.grid.space(neutral).map_err(|e| bad(1, e.to_string()))?;
        let start = space.start(neutral).ok_or_else(|| bad(1, "it has no start".to_owned()))?;
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
        if point >= self.space.len() {
            return Err(format!("point {point} of {}", self.space.len()));
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

    /// What is known of a schedule.
    #[must_use]
    pub fn at(&self, config: &ScheduleConfig) -> Found<'_> {
        let Some(point) = self.space.point(config) else { return Found::Outside };
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
            // A twin's point is before it in the file, and no twin itself.
            Some(Answer::Twin(of)) => self.of(*of),
        }
    }

    /// Points by what became of them: timed, twins, failed, illegal, unrecorded.
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
        counts[4] = self.space.len() as usize - self.answers.len();
        counts
    }

    /// The schedule with the least time, and that time.
    #[must_use]
    pub fn best(&self) -> Option<(ScheduleConfig, f64)> {
        let timed = |point| match self.of(point) {
            Found::Timed(_, us, _) => Some((self.space.config(point), us)),
            Found::Outside | Found::Illegal | Found::Unrecorded | Found::Failed(_) => None,
        };
        (0..self.space.len()).filter_map(timed).min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}
