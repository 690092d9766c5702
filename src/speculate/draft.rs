//! A draft: a small model of the same vocabulary, on an engine of its own, that guesses the next tokens of another model.

use std::mem::ManuallyDrop;
use std::time::Instant;

use ir::sampling::{Sampling, Seen};

use super::Worth;
use crate::engine::{Broken, Engine, How};
use crate::failure::Failure;
use crate::report;

/// Guesses, and what they took.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guessed {
    pub(crate) tokens: Vec<u32>,
    /// Microseconds; `None` if steps take no time that counts.
    pub(crate) us: Option<f64>,
    /// Tokens that were read before.
    pub(crate) read: usize,
}

/// A draft with one sequence, which follows the text that it guesses for.
pub(crate) struct Draft<'a> {
    /// Never dropped: freeing page-locked memory may wait for the kernels of all GPUs, and that of the model is resident.
    engine: ManuallyDrop<Box<dyn Engine + 'a>>,
    /// The most positions of its sequence.
    capacity: usize,
    /// The tokens at its positions.
    fed: Vec<u32>,
    /// Whether the machine samples, not the host.
    samples: bool,
    /// Whether it failed, and guesses no more.
    broken: bool,
    /// Microseconds of its commands, and their guesses.
    spent: (f64, usize),
    pub(crate) worth: Worth,
}

impl<'a> Draft<'a> {
    pub(crate) fn new(engine: Box<dyn Engine + 'a>, capacity: u32) -> Result<Self, Failure> {
        let mut engine = ManuallyDrop::new(engine);
        engine.begin(0, capacity.into(), &[])?;
        let sampling = Sampling::default();
        let samples =
            engine.choose_by(0, &How { sampling: &sampling, masked: false, stop: &[] })?;
        let (worth, fed, capacity) = (Worth::new(engine.timed()), Vec::new(), capacity as usize);
        let (broken, spent) = (false, (0.0, 0));
        Ok(Self { engine, capacity, fed, samples, broken, spent, worth })
    }

    /// What a guess took so far, the text that was read before it included.
    pub(crate) fn us_per_guess(&self) -> Option<f64> {
        let (us, guesses) = self.spent;
        (us > 0.0).then(|| us / guesses as f64)
    }

    /// Whether it can guess behind this many tokens: it has not failed, and its cache reaches further.
    pub(crate) fn can_guess(&self, tokens: usize) -> bool {
        !self.broken && tokens < self.capacity
    }

    /// The tokens of a text that it has to read: those from where its own differ, and the last one in any case, from whose
    /// logits the next is sampled.
    pub(crate) fn unread(&self, text: &[u32]) -> usize {
        let same = self.fed.iter().zip(text).take_while(|(fed, token)| fed == token).count();
        text.len() - same.min(text.len().saturating_sub(1))
    }

    /// Runs tokens once, so that what they need is loaded before the model's kernel is resident.
    pub(crate) fn warm(&mut self, tokens: &[u32]) -> Result<(), Failure> {
        self.read(tokens, 0)?;
        Ok(())
    }

    /// Takes other guesses behind a text for its own, of which all but the last are run: for a measurement.
    pub(crate) fn pretend(&mut self, text: &[u32], guesses: &[u32]) {
        self.fed = [text, guesses].concat();
        self.fed.pop();
    }

    /// Its likeliest continuation of a text, at most `most` tokens; none once it has failed, and where its cache ends.
    pub(crate) fn guess(&mut self, text: &[u32], most: usize) -> Guessed {
        let most = most.min(self.capacity.saturating_sub(text.len()));
        if self.broken || most == 0 || text.is_empty() {
            return Guessed::default();
        }
        let began = Instant::now();
        let (tokens, read) = match self.continued(text, most) {
            Ok(guessed) => guessed,
            Err(broken) => {
                report::say(&format!(
                    "warning: the draft model failed and guesses no more: {broken}"
                ));
                self.broken = true;
                return Guessed::default();
            }
        };
        let us = self.engine.timed().then(|| began.elapsed().as_secs_f64() * 1e6);
        self.spent.0 += us.unwrap_or(0.0);
        self.spent.1 += tokens.len();
        Guessed { tokens, us, read }
    }

    /// Goes back to where its sequence is the beginning of a text, reads the rest and samples. Also returns the number of
    /// tokens that it read.
    fn continued(&mut self, text: &[u32], most: usize) -> Result<(Vec<u32>, usize), Broken> {
        let same = text.len() - self.unread(text);
        if same < self.fed.len() {
            self.engine.rewind(0, same)?;
            self.fed.truncate(same);
        }
        let rest = &text[same..];
        let tokens = if self.samples { self.read(rest, most)? } else { self.sampled(rest, most)? };
        Ok((tokens, rest.len()))
    }

    /// Runs tokens on a machine that samples, then samples `most`; all but the last are run.
    fn read(&mut self, mut rest: &[u32], most: usize) -> Result<Vec<u32>, Broken> {
        loop {
            let done = self.engine.advance(0, rest, most as u32, &mut || false)?;
            self.fed.extend(rest.iter().chain(&done.chosen).take(done.ran));
            rest = rest.get(done.ran..).unwrap_or_default();
            // Most of a long text is run in chunks, in a command of its own.
            if !done.chosen.is_empty() || rest.is_empty() {
                return Ok(done.chosen);
            }
        }
    }

    /// The same where the host samples.
    fn sampled(&mut self, rest: &[u32], most: usize) -> Result<Vec<u32>, Broken> {
        let mut chosen: Vec<u32> = Vec::with_capacity(most);
        let mut next = rest.to_vec();
        while chosen.len() < most {
            let row = self.engine.feed(0, &next, true)?;
            self.fed.extend(&next);
            let token = Sampling::default().choose(&row, &Seen::default(), 0);
            let token =
                token.ok_or_else(|| Broken::Sequence("its logits are not numbers".into()))?;
            chosen.push(token);
            next = vec![token];
        }
        Ok(chosen)
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        self.engine.rest();
    }
}

#[cfg(test)]
#[path = "draft_tests.rs"]
mod tests;
