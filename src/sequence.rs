//! A sequence on an engine: the prompt is fed, then tokens are sampled and fed back, by the machine or on the host.

use std::borrow::Cow;
use std::time::Instant;

use abi::SequenceEnd;
use ir::sampling::{Logprobs, Sampling, Seen, logprobs};
use sessions::Priority;
use vm_host::Watch;

use crate::constraint::{Constraint, Guide};
use crate::engine::{Advanced, Broken, Engine, How, Observer, PROMPT_SLICE};
use crate::host_rules::HostRules;
use crate::speculate::{Draft, Guessed, Guesser, Offer, Plan, Tally};

/// New tokens of a command if the device samples them and no other sequence waits. Between two commands is a pause of some
/// 0.2 ms; in commands of this length fewer than one token in a thousand come after it. Clients do not wait for the end:
/// tokens are sent while it runs, and it ends early when a request arrives or a client leaves.
pub(crate) const SLICE: usize = 2048;

/// The same while other sequences wait for a turn.
pub(crate) const SHARED_SLICE: usize = 16;

/// The same between two pieces of a prompt that runs in chunks. With fewer the prompt's first token comes earlier, with
/// more the other sequences are faster.
pub(crate) const BESIDE_CHUNKS: usize = 2;

/// Steps of one position after which a sequence looks whether its tokens could have been guessed.
const LOOKED: u64 = 32;

/// The same while a draft waits for the time of such a step, with which its guesses are compared.
const FIRST: u64 = 4;

/// A generation request.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) prompt: Vec<u32>,
    /// The most tokens to generate.
    pub(crate) limit: u32,
    pub(crate) sampling: Sampling,
    /// What only the host can do: with any of it the host samples.
    pub(crate) host: HostRules,
    /// The rule of the text, in the state after the sampled tokens, unless the machine samples by a [`Guide`].
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// Ids that end the text.
    pub(crate) stop: Vec<u32>,
    /// How many likeliest tokens to report with the log probability of the sampled one.
    pub(crate) logprobs: Option<usize>,
    pub(crate) priority: Priority,
    /// The most guesses of a window; 0 for none.
    pub(crate) speculate: u32,
}

impl Work {
    /// The most positions that it can take.
    pub(crate) fn positions(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.limit)
    }

    /// The prompt, if what others have run of it can be used: a scored prompt needs the logits of each token.
    pub(crate) fn reusable(&self) -> &[u32] {
        if self.host.score_prompt { &[] } else { &self.prompt }
    }
}

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The last token is a stop token, or completes the text of a grammar.
    Stop,
    /// The requested length was reached.
    Length,
    /// The machine failed.
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

/// The progress of a request.
pub(crate) struct Sequence {
    pub(crate) work: Work,
    pub(crate) fed: usize,
    /// Sampled tokens; the last one is not fed yet.
    pub(crate) chosen: Vec<u32>,
    seen: Seen,
    /// The kernel that ran it last.
    kernel: usize,
    /// Whether the machine samples, not the host.
    pub(crate) chosen_there: bool,
    /// The rule of the text, if the machine samples.
    pub(crate) guide: Option<Guide>,
    /// The logits of every position, if they are kept: then the host samples.
    pub(crate) rows: Option<Vec<Vec<f32>>>,
    /// Guesses its next tokens, if it runs in windows.
    pub(crate) guesser: Option<Guesser>,
}

/// What a sequence reports.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Told {
    /// The log probability of the prompt's next token, from its second one on.
    Prompt(Logprobs),
    /// The kernel of what follows, by its index in the engine; at first 0.
    Kernel(usize),
    /// A sampled token, with its log probability if that was requested.
    Token(u32, Option<Logprobs>),
}

/// A callback for each token.
pub(crate) type Tell<'a> = &'a mut dyn FnMut(Told);

/// Reports tokens of a command while it runs.
struct Teller<'t> {
    /// The kernel that was reported last.
    kernel: &'t mut usize,
    /// Tokens reported so far.
    told: usize,
    guide: Option<&'t mut Guide>,
    tell: &'t mut dyn FnMut(Told),
    preempt: &'t mut dyn FnMut() -> bool,
}

impl Watch for Teller<'_> {
    fn token(&mut self, _sequence: usize, token: u32) {
        (self.tell)(Told::Token(token, None));
        self.told += 1;
        self.guide.iter_mut().for_each(|guide| guide.take(token));
    }

    fn mask(&mut self, _sequence: usize, vocab: u32) -> Option<Vec<u32>> {
        self.guide.as_mut()?.mask(vocab)
    }

    fn yields(&mut self) -> bool {
        (self.preempt)()
    }
}

impl Observer for Teller<'_> {
    fn kernel(&mut self, number: usize) {
        if std::mem::replace(self.kernel, number) != number {
            (self.tell)(Told::Kernel(number));
        }
    }
}

impl Sequence {
    pub(crate) fn new(work: Work) -> Self {
        let mut seen = Seen::default();
        seen.extend(work.prompt.iter().copied());
        let (fed, kernel, chosen, chosen_there) = (0, 0, Vec::new(), false);
        let (guide, rows, guesser) = (None, None, None);
        Self { work, fed, chosen, seen, kernel, chosen_there, guide, rows, guesser }
    }

    /// Begins the sequence in a place, and determines whether the machine samples.
    pub(crate) fn begin(&mut self, engine: &mut dyn Engine, place: usize) -> Result<(), Broken> {
        // Kept rows are those of every token.
        let prompt = if self.rows.is_some() { &[] } else { self.work.reusable() };
        self.fed = engine.begin(place, self.work.positions(), prompt)?;
        let most = (self.work.speculate as usize).min(engine.window() - 1);
        let Work { limit, host, constraint, logprobs, .. } = &self.work;
        let masked = constraint.is_some();
        // A window has no masks.
        let ruled = host.any() || masked && most > 0;
        // Log probabilities are computed on the host, from rows. Without new tokens there is nothing to sample.
        if logprobs.is_none() && self.rows.is_none() && !ruled && *limit > 0 {
            let Work { sampling, stop, .. } = &self.work;
            self.chosen_there = engine.choose_by(place, &How { sampling, masked, stop })?;
        }
        if self.chosen_there {
            let rule = self.work.constraint.take();
            self.guide = rule.map(|rule| Guide::new(rule, &self.work.stop));
        }
        // The machine's set of tokens for a penalty would have the guesses; on the host it is that of the sequence.
        let penalised = self.chosen_there && self.work.sampling.repetition_penalty != 1.0;
        self.guesser = (most > 0 && !penalised).then(|| Guesser::new(&self.work.prompt, most));
        Ok(())
    }

    /// Takes over what other sequences have run of the prompt. Returns the number of tokens that it saves.
    pub(crate) fn reuse(&mut self, engine: &mut dyn Engine, place: usize) -> Result<usize, Broken> {
        let (before, prompt) = (self.fed, self.work.reusable());
        if before < prompt.len() && self.rows.is_none() {
            self.fed = engine.reuse(place, before, prompt)?;
        }
        Ok(self.fed - before)
    }

    /// The tokens that are known and not fed yet: the rest of the prompt, or the last sampled one.
    pub(crate) fn unfed(&self) -> &[u32] {
        match self.work.prompt.get(self.fed..) {
            Some(rest) if !rest.is_empty() => rest,
            _ => &self.chosen[self.chosen.len().saturating_sub(1)..],
        }
    }

    /// The tokens to feed next, at most `most`.
    pub(crate) fn next(&self, most: u64) -> Vec<u32> {
        // Each scored token has a row of logits, which all lie in memory until the turn ends.
        let most = if self.work.host.score_prompt { most.min(PROMPT_SLICE) } else { most };
        let unfed = self.unfed();
        unfed[..unfed.len().min(most as usize)].to_vec()
    }

    /// A turn of `most` positions: a piece of the prompt, or new tokens. Returns the number of positions run, and the
    /// ending if the text has ended. A draft guesses where the text has nothing better.
    pub(crate) fn turn(
        &mut self,
        engine: &mut dyn Engine,
        draft: Option<&mut Draft<'_>>,
        (place, most): (usize, u64),
        tell: Tell<'_>,
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<(usize, Option<Finish>), Broken> {
        if self.guesser.is_some() && !self.chosen.is_empty() {
            let tokens = self.work.prompt.len() + self.chosen.len();
            let draft = draft.filter(|draft| draft.can_guess(tokens));
            return self.guessing_turn(engine, draft, (place, most), tell, preempt);
        }
        self.plain_turn(engine, (place, most), tell, preempt)
    }

    /// A turn of steps of one position.
    fn plain_turn(
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
            let (kernel, told, guide) = (&mut self.kernel, 0, self.guide.as_mut());
            let mut teller = Teller { kernel, told, guide, tell, preempt };
            let done = engine.advance(place, &tokens, generate, &mut teller)?;
            let told = teller.told;
            self.ran_on(engine.kernel(), tell);
            return Ok((done.ran, self.took(done, told, tell)));
        }
        let row = self.run(engine, (place, &tokens, read), tell)?;
        self.ran_on(engine.kernel(), tell);
        self.fed += tokens.len();
        let finish = match read {
            true if self.work.limit > 0 => {
                let finish = self.choose(Cow::Owned(row), tell).map_err(Broken::Sequence)?;
                self.say_sampled(engine, place);
                finish
            }
            true => self.finish(false),
            false => None,
        };
        Ok((tokens.len(), finish))
    }

    /// What its windows gave since this was last called.
    pub(crate) fn unpublished(&mut self) -> Tally {
        self.guesser.as_mut().map_or_else(Tally::default, Guesser::unpublished)
    }

    /// Its guesser, with all tokens so far.
    fn informed(&mut self) -> Option<&mut Guesser> {
        let guesser = self.guesser.as_mut()?;
        let known = guesser.len() - self.work.prompt.len();
        guesser.stepped(&self.chosen[known..], None);
        Some(guesser)
    }

    /// What it could have in a step beside other sequences, of at most `most` positions: nothing before its first token.
    pub(crate) fn offer(&mut self, most: usize) -> Offer {
        let left = self.work.limit as usize - self.chosen.len();
        let room = left.min(most).saturating_sub(1);
        let begun = !self.chosen.is_empty();
        let guesser = if begun { self.informed() } else { None };
        guesser.map_or_else(Offer::default, |guesser| guesser.offer(room))
    }

    /// Notes what a window with these guesses gave beside other sequences: the tokens from number `before` on.
    pub(crate) fn guessed(&mut self, guesses: &[u32], before: usize) {
        if let Some(guesser) = self.guesser.as_mut().filter(|_| !guesses.is_empty()) {
            guesser.ran(guesses, &self.chosen[before..], None);
        }
    }

    /// A turn of a sequence that is past its prompt and may run in windows: one of these, or some steps.
    fn guessing_turn(
        &mut self,
        engine: &mut dyn Engine,
        mut draft: Option<&mut Draft<'_>>,
        (place, most): (usize, u64),
        tell: Tell<'_>,
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let left = self.work.limit as usize - self.chosen.len();
        let room = left.min(most as usize).saturating_sub(1);
        let Some(guesser) = self.informed() else { return Ok((0, None)) };
        let worth = draft.as_deref().map(|draft| (&draft.worth, draft.unread(guesser.text())));
        let slice = if worth.is_some_and(|(worth, _)| worth.waits()) { FIRST } else { LOOKED };
        let plan = guesser.next(room, worth);
        let guessed = match (&plan, draft.as_deref_mut()) {
            (Plan::Draft(count) | Plan::Look(count), Some(draft)) => {
                draft.guess(guesser.text(), *count)
            }
            _ => Guessed::default(),
        };
        let (before, kernel, began) = (self.chosen.len(), engine.kernel(), Instant::now());
        let (ran, finish) = match &plan {
            Plan::Plain | Plan::Look(_) => {
                self.plain_turn(engine, (place, most.min(slice)), tell, preempt)?
            }
            Plan::Window(guesses) => self.window_turn(engine, (place, guesses), tell, preempt)?,
            Plan::Draft(_) => self.window_turn(engine, (place, &guessed.tokens), tell, preempt)?,
        };
        let us = began.elapsed().as_secs_f64() * 1e6;
        // A launch of the other kernel is in no price.
        let us = (engine.timed() && engine.kernel() == kernel).then_some(us);
        let tokens = &self.chosen[before..];
        let Some(guesser) = &mut self.guesser else { return Ok((ran, finish)) };
        let worth = draft.map(|draft| &mut draft.worth);
        guesser.learn((&plan, &guessed), (tokens, us), worth);
        Ok((ran, finish))
    }

    /// A window with these guesses.
    fn window_turn(
        &mut self,
        engine: &mut dyn Engine,
        (place, guesses): (usize, &[u32]),
        tell: Tell<'_>,
        preempt: &mut dyn FnMut() -> bool,
    ) -> Result<(usize, Option<Finish>), Broken> {
        if !self.chosen_there {
            return self.host_window(engine, (place, guesses), tell);
        }
        let tokens = [self.unfed(), guesses].concat();
        let (kernel, told, guide) = (&mut self.kernel, 0, None);
        let mut teller = Teller { kernel, told, guide, tell, preempt };
        let done = engine.speculate(&[(place, &tokens)], &mut teller)?.pop();
        let told = teller.told;
        let done = done.unwrap_or_else(|| Err("no answer".to_owned()));
        let done = done.map_err(Broken::Sequence)?;
        Ok((done.ran, self.took(done, told, tell)))
    }

    /// A window whose tokens the host samples, row by row until a guess was wrong.
    fn host_window(
        &mut self,
        engine: &mut dyn Engine,
        (place, guesses): (usize, &[u32]),
        tell: Tell<'_>,
    ) -> Result<(usize, Option<Finish>), Broken> {
        let tokens = [self.unfed(), guesses].concat();
        let rows = engine.window_rows(place, &tokens)?;
        self.ran_on(engine.kernel(), tell);
        let (mut ran, mut finish) = (0, None);
        for row in rows {
            (self.fed, ran) = (self.fed + 1, ran + 1);
            finish = self.choose(Cow::Borrowed(&row), tell).map_err(Broken::Sequence)?;
            if let Some(kept) = &mut self.rows {
                kept.push(row);
            }
            if finish.is_some() || tokens.get(ran) != self.chosen.last() {
                break;
            }
        }
        engine.keep(place, &tokens[..ran])?;
        self.say_sampled(engine, place);
        Ok((ran, finish))
    }

    /// Runs tokens and returns the last row of logits, if it is read. Keeps or scores the other rows if that was requested.
    fn run(
        &mut self,
        engine: &mut dyn Engine,
        (place, tokens, read): (usize, &[u32], bool),
        tell: Tell<'_>,
    ) -> Result<Vec<f32>, Broken> {
        let unscored = self.work.prompt.get(self.fed + 1..).unwrap_or_default();
        let scores = self.work.host.score_prompt && !unscored.is_empty();
        if self.rows.is_none() && !scores {
            return match self.work.constraint.as_mut().filter(|_| read) {
                Some(constraint) => engine.feed_and(place, tokens, &mut || constraint.prepare()),
                None => engine.feed(place, tokens, read),
            };
        }
        let rows = engine.rows(place, tokens)?;
        if scores {
            let top = self.work.logprobs.unwrap_or(0);
            let scored = rows.iter().zip(unscored);
            scored.for_each(|(row, id)| tell(Told::Prompt(logprobs(row, *id, top))));
        }
        let last = rows.last().cloned().unwrap_or_default();
        if let Some(kept) = &mut self.rows {
            kept.extend(rows);
        }
        Ok(last)
    }

    /// Samples from a row and reports the token; returns the ending if it was the last.
    fn choose(&mut self, logits: Cow<'_, [f32]>, tell: Tell<'_>) -> Result<Option<Finish>, String> {
        let work = &mut self.work;
        let position = u32::try_from(self.fed).unwrap_or(u32::MAX);
        // Log probabilities are of the row as it came.
        let raw = work.logprobs.map(|top| (top, logits.clone()));
        let mut ruled = work.host.applied(logits, &self.chosen, &work.stop);
        let id = match &mut work.constraint {
            None => work.sampling.choose(&ruled, &self.seen, position),
            Some(constraint) => {
                let allowed = constraint.allowed(ruled.len(), &work.stop)?;
                if let Some(few) = allowed.few() {
                    let few: Vec<_> = few.iter().map(|id| (*id, ruled[*id as usize])).collect();
                    work.sampling.choose_among(&few, &self.seen, position)
                } else {
                    allowed.ban_others(ruled.to_mut());
                    work.sampling.choose(&ruled, &self.seen, position)
                }
            }
        };
        let id = id.ok_or_else(|| "every token is banned or not a number".to_owned())?;
        let mut stopped = work.stop.contains(&id);
        if let Some(constraint) = &mut work.constraint
            && !stopped
        {
            stopped = constraint.take(id)?;
        }
        tell(Told::Token(id, raw.map(|(top, row)| logprobs(&row, id, top))));
        self.seen.insert(id);
        self.chosen.push(id);
        Ok(self.finish(stopped))
    }

    /// Tells the engine of the token that the host has sampled.
    fn say_sampled(&self, engine: &mut dyn Engine, place: usize) {
        let Work { host, constraint, sampling, .. } = &self.work;
        let plain = !host.any() && constraint.is_none();
        if let Some(token) = self.chosen.last() {
            engine.sampled(place, *token, plain.then_some(sampling));
        }
    }

    /// Reports the kernel, if it is another one.
    pub(crate) fn says_kernel(&self, number: usize, tell: Tell<'_>) {
        if self.kernel != number {
            tell(Told::Kernel(number));
        }
    }

    /// Reports and notes a change of the kernel.
    pub(crate) fn ran_on(&mut self, kernel: usize, tell: Tell<'_>) {
        if std::mem::replace(&mut self.kernel, kernel) != kernel {
            tell(Told::Kernel(kernel));
        }
    }

    /// Records the tokens that the machine sampled, of which `told` were reported while it ran.
    pub(crate) fn took(&mut self, done: Advanced, told: usize, tell: Tell<'_>) -> Option<Finish> {
        self.fed += done.ran;
        for id in done.chosen.iter().skip(told) {
            tell(Told::Token(*id, None));
            self.guide.iter_mut().for_each(|guide| guide.take(*id));
        }
        self.chosen.extend(done.chosen);
        match self.guide.as_ref().and_then(Guide::end) {
            Some(Err(why)) => Some(Finish::Failed(why.clone())),
            Some(Ok(())) => self.finish(true),
            None => self.finish(done.stopped),
        }
    }

    /// The ending, if the last token ends the text.
    fn finish(&self, stopped: bool) -> Option<Finish> {
        let full = self.chosen.len() >= self.work.limit as usize;
        match (stopped, full) {
            (true, _) => Some(Finish::Stop),
            (false, true) => Some(Finish::Length),
            (false, false) => None,
        }
    }
}

#[cfg(test)]
#[path = "sequence_tests.rs"]
mod tests;
