//! A sequence on an engine: its prompt is fed, and then a token is chosen and fed again and again, by the machine or here.

use abi::SequenceEnd;
use ir::sampling::{Logprobs, Sampling, Seen, logprobs};
use sessions::Priority;

use crate::engine::{Advanced, Broken, Engine, How};

/// New tokens of a turn where the machine chooses them. It yields between turns, and within one to requests that come.
pub(crate) const SLICE: usize = 16;

/// What somebody wants of the model.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub(crate) limit: u32,
    pub(crate) sampling: Sampling,
    /// Ids that end the text.
    pub(crate) stop: Vec<u32>,
    /// How many likeliest tokens to report beside the chosen one's probability.
    pub(crate) logprobs: Option<usize>,
    pub(crate) priority: Priority,
}

impl Work {
    /// Positions that it may take.
    pub(crate) fn positions(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.limit)
    }
}

/// How a text ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// With a stop token, which was the last one.
    Stop,
    /// As long as was asked for.
    Length,
    /// The machine failed at it.
    Failed(String),
    Leaving,
}

impl Finish {
    pub(crate) fn ending(&self) -> SequenceEnd {
        match self {
            Self::Stop => SequenceEnd::Stop,
            Self::Length => SequenceEnd::Length,
            Self::Failed(_) => SequenceEnd::Failed,
            Self::Leaving => SequenceEnd::Leaving,
        }
    }
}

/// How far it is.
pub(crate) struct Sequence {
    pub(crate) work: Work,
    pub(crate) fed: usize,
    /// Tokens that were chosen; the last one is not fed yet.
    pub(crate) chosen: Vec<u32>,
    seen: Seen,
    /// Whether the machine chooses, not the host.
    pub(crate) chosen_there: bool,
    /// The logits of every position, if they are to be kept: then the host chooses.
    pub(crate) rows: Option<Vec<Vec<f32>>>,
}

/// Who is told of tokens.
pub(crate) type Tell<'a> = &'a mut dyn FnMut(u32, Option<Logprobs>);

impl Sequence {
    pub(crate) fn new(work: Work) -> Self {
        let mut seen = Seen::default();
        seen.extend(work.prompt.iter().copied());
        Self { work, fed: 0, chosen: Vec::new(), seen, chosen_there: false, rows: None }
    }

    /// Begins it in a place, and finds out who chooses.
    pub(crate) fn begin(&mut self, engine: &mut dyn Engine, place: usize) -> Result<(), Broken> {
        engine.begin(place, self.work.positions())?;
        // Probabilities are the host's to compute, from rows.
        if self.work.logprobs.is_none() && self.rows.is_none() {
            let how = How { sampling: &self.work.sampling, stop: &self.work.stop };
            self.chosen_there = engine.choose_by(place, &how)?;
        }
        Ok(())
    }

    /// What to feed next, at most `most` tokens.
    pub(crate) fn next(&self, most: u64) -> Vec<u32> {
        match self.work.prompt.get(self.fed..) {
            Some(rest) if !rest.is_empty() => rest[..rest.len().min(most as usize)].to_vec(),
            _ => self.chosen.last().copied().into_iter().collect(),
        }
    }

    /// A turn of `most` positions: a piece of the prompt, or new tokens. How many were run, and whether that was all.
    pub(crate) fn turn(
        &mut self,
        engine: &mut dyn Engine,
        (place, most): (usize, u64),
        tell: Tell<'_>,
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let tokens = self.next(most);
        let read = self.fed + tokens.len() >= self.work.prompt.len();
        if self.chosen_there {
            let room = most as usize + 1 - tokens.len();
            let left = self.work.limit as usize - self.chosen.len();
            let generate = if read { room.min(left).min(SLICE) as u32 } else { 0 };
            let done = engine.advance(place, &tokens, generate, preempt)?;
            return Ok((done.ran, self.took(done, tell)));
        }
        let row = match &mut self.rows {
            None => engine.feed(place, &tokens, read)?,
            Some(rows) => {
                rows.extend(engine.rows(place, &tokens)?);
                rows.last().cloned().unwrap_or_default()
            }
        };
        self.fed += tokens.len();
        let finish = match read {
            true if self.work.limit > 0 => self.choose(&row, tell).map_err(Broken::Sequence)?,
            true => self.finish(false),
            false => None,
        };
        Ok((tokens.len(), finish))
    }

    /// Chooses from a row; tells of it, and says whether that was the last.
    fn choose(&mut self, logits: &[f32], tell: Tell<'_>) -> Result<Option<Finish>, String> {
        let work = &self.work;
        let position = u32::try_from(self.fed).unwrap_or(u32::MAX);
        let id = work.sampling.choose(logits, &self.seen, position);
        let id = id.ok_or_else(|| "every token is banned or not a number".to_owned())?;
        let stopped = work.stop.contains(&id);
        tell(id, work.logprobs.map(|top| logprobs(logits, id, top)));
        self.seen.insert(id);
        self.chosen.push(id);
        Ok(self.finish(stopped))
    }

    /// Takes over what the machine chose.
    pub(crate) fn took(&mut self, done: Advanced, tell: Tell<'_>) -> Option<Finish> {
        self.fed += done.ran;
        for id in done.chosen {
            tell(id, None);
            self.chosen.push(id);
        }
        self.finish(done.stopped)
    }

    /// Whether the last token was the last.
    fn finish(&self, stopped: bool) -> Option<Finish> {
        let full = self.chosen.len() >= self.work.limit as usize;
        match (stopped, full) {
            (true, _) => Some(Finish::Stop),
            (false, true) => Some(Finish::Length),
            (false, false) => None,
        }
    }
}
