//! Commands of a log on another engine, beside their answers.

use std::collections::BTreeMap;

use ir::sampling::{Sampling, Seen};
use serde::Serialize;

use crate::command_log::{Done, Entry, Line, Row, Said, Seq, Settings};
use crate::engine::{Advanced, Engine, How};

/// An answer that is not that of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Difference {
    /// The entry's number in the log.
    entry: u64,
    session: u64,
    position: usize,
    /// token, logits, error or reuse.
    what: &'static str,
    expected: String,
    got: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { entry, session, position, what, expected, got } = self;
        write!(
            f,
            "entry {entry}, session {session}, position {position}: {what}: the log has {expected}, now {got}"
        )
    }
}

/// Why a replay ends before the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Halt {
    Differs(Difference),
    /// The log contradicts itself.
    Nonsense(String),
}

/// What was compared.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Compared {
    pub(crate) commands: u64,
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    /// Tokens under rules that are not in the log.
    pub(crate) unruled: u64,
}

/// A session under way.
#[derive(Default)]
struct Session {
    place: usize,
    prompt: Vec<u32>,
    rule: Option<Sampling>,
    stop: Vec<u32>,
    /// Whether the engine samples.
    samples: bool,
    seen: Seen,
    position: usize,
    /// The last row that was read.
    row: Option<Vec<f32>>,
    /// The sampled token that is fed next.
    next: Option<u32>,
}

impl Session {
    fn ran(&mut self, tokens: &[u32]) {
        self.seen.extend(tokens.iter().copied());
        self.position += tokens.len();
    }
}

/// A replay.
pub(crate) struct Again<'e, 'm> {
    engine: &'e mut (dyn Engine + 'm),
    /// Whether rows of logits must have the same bits.
    bits: bool,
    sessions: BTreeMap<u64, Session>,
    compared: Compared,
    /// The entry under way, and the kernel that ran it.
    entry: u64,
    kernel: usize,
}

impl<'e, 'm> Again<'e, 'm> {
    pub(crate) fn new(engine: &'e mut (dyn Engine + 'm), bits: bool) -> Self {
        let (sessions, compared) = (BTreeMap::new(), Compared::default());
        Self { engine, bits, sessions, compared, entry: 0, kernel: 0 }
    }

    pub(crate) fn compared(&self) -> Compared {
        self.compared
    }

    /// Runs an entry, and compares the answer.
    pub(crate) fn line(&mut self, line: &Line) -> Result<(), Halt> {
        self.entry = line.n;
        match &line.entry {
            Entry::Begin { session, place, positions, prompt, said } => {
                self.begin((*session, *place), *positions, prompt, said)
            }
            Entry::Reuse { session, position, to, .. } => self.reuse(*session, *position, *to),
            Entry::Sampling { session, sampling, stop, said, .. } => {
                self.sampling(*session, sampling, stop, said)
            }
            Entry::Feed { session, position, tokens, read, said, .. } => {
                self.feed((*session, *position), tokens, *read, said)
            }
            Entry::Rows { session, position, tokens, said, .. } => {
                self.rows((*session, *position), tokens, said)
            }
            Entry::Advance { session, position, kernel, tokens, generate, said, .. } => {
                self.kernel = *kernel;
                self.advance((*session, *position), tokens, *generate, said)
            }
            Entry::Together { seqs, kernel, generate, said } => {
                self.kernel = *kernel;
                self.together(seqs, *generate, said)
            }
            Entry::Token { session, position, token, sampling, .. } => {
                self.token((*session, *position), *token, sampling.as_ref())
            }
            Entry::End { session, place } => {
                self.sessions.remove(session);
                self.engine.end(*place);
                Ok(())
            }
            // The engine's commands make them anew: addresses and clocks in them are of a process.
            Entry::Submission { .. } | Entry::Completion { .. } | Entry::Closed { .. } => Ok(()),
        }
    }

    fn differs<T>(
        &self,
        (session, position): (u64, usize),
        what: &'static str,
        (expected, got): (impl ToString, impl ToString),
    ) -> Result<T, Halt> {
        let (expected, got) = (expected.to_string(), got.to_string());
        let entry = self.entry;
        Err(Halt::Differs(Difference { entry, session, position, what, expected, got }))
    }

    /// A session, which is at this position and is fed these tokens next: the first is the one that was sampled last.
    fn session(
        &mut self,
        (number, position): (u64, usize),
        tokens: &[u32],
    ) -> Result<&mut Session, Halt> {
        let entry = self.entry;
        let nonsense = |why: &str| Halt::Nonsense(format!("entry {entry}: session {number} {why}"));
        let session = self.sessions.get_mut(&number);
        let session = session.ok_or_else(|| nonsense("has not begun"))?;
        if session.position != position {
            return Err(nonsense(&format!("is at {}, not at {position}", session.position)));
        }
        let next = if tokens.is_empty() { None } else { session.next.take() };
        if let (Some(next), Some(&first)) = (next, tokens.first())
            && next != first
        {
            return self.differs((number, position), "token", (first, next));
        }
        // Borrowed again, since the difference borrows the whole.
        self.sessions.get_mut(&number).ok_or_else(|| nonsense("has not begun"))
    }

    /// The answer, if the log has one too; an error of both is no difference.
    fn both<'s, T, U>(
        &self,
        at: (u64, usize),
        said: &'s Said<U>,
        now: Result<T, impl ToString>,
    ) -> Result<Option<(&'s U, T)>, Halt> {
        match (said, now) {
            (Said::Ok(then), Ok(now)) => Ok(Some((then, now))),
            (Said::Error(_), Err(_)) => Ok(None),
            (Said::Error(why), Ok(_)) => self.differs(at, "error", (why, "an answer")),
            (Said::Ok(_), Err(why)) => self.differs(at, "error", ("an answer", why)),
        }
    }

    fn begin(
        &mut self,
        (number, place): (u64, usize),
        positions: u64,
        prompt: &[u32],
        said: &Said<usize>,
    ) -> Result<(), Halt> {
        self.compared.commands += 1;
        let begun = self.engine.begin(place, positions, prompt);
        let Some((&has, mut here)) = self.both((number, 0), said, begun)? else { return Ok(()) };
        let Some(head) = prompt.get(..has) else {
            return Err(Halt::Nonsense(format!("entry {}: {has} positions", self.entry)));
        };
        // What the engine shares depends on the sessions before: the rest is run, or all of it anew.
        if here > has {
            self.engine.end(place);
            let begun = self.engine.begin(place, positions, &[]);
            here = self.both((number, 0), said, begun)?.map_or(0, |(_, here)| here);
        }
        if here < has {
            let fed = self.engine.feed(place, &head[here..], false);
            self.both((number, here), said, fed)?;
        }
        let mut session = Session { place, prompt: prompt.to_vec(), ..Session::default() };
        session.ran(head);
        self.sessions.insert(number, session);
        Ok(())
    }

    fn reuse(&mut self, number: u64, position: usize, to: usize) -> Result<(), Halt> {
        let session = self.session((number, position), &[])?;
        let (place, prompt) = (session.place, session.prompt.clone());
        let Some(taken) = prompt.get(position..to) else {
            return Err(Halt::Nonsense(format!("entry {}: up to {to}", self.entry)));
        };
        let here = self.engine.reuse(place, position, &prompt).unwrap_or(position);
        if here > to {
            return self.differs((number, position), "reuse", (to, here));
        }
        if let Some(rest) = taken.get(here - position..).filter(|rest| !rest.is_empty()) {
            let fed = self.engine.feed(place, rest, false);
            self.both((number, here), &Said::Ok(()), fed)?;
        }
        self.session((number, position), &[])?.ran(taken);
        Ok(())
    }

    fn sampling(
        &mut self,
        number: u64,
        sampling: &Settings,
        stop: &[u32],
        said: &Said<bool>,
    ) -> Result<(), Halt> {
        let Some(session) = self.sessions.get_mut(&number) else {
            return Err(Halt::Nonsense(format!("entry {}: no session {number}", self.entry)));
        };
        let sampling = Sampling::from(sampling.clone());
        let how = How { sampling: &sampling, masked: false, stop };
        let answer = self.engine.choose_by(session.place, &how);
        session.samples = *answer.as_ref().unwrap_or(&false);
        (session.rule, session.stop) = (Some(sampling), stop.to_vec());
        let at = (number, session.position);
        self.both(at, said, answer).map(|_| ())
    }

    fn feed(
        &mut self,
        at: (u64, usize),
        tokens: &[u32],
        read: bool,
        said: &Said<Option<Row>>,
    ) -> Result<(), Halt> {
        self.compared.commands += 1;
        let place = self.session(at, tokens)?.place;
        let answer = self.engine.feed(place, tokens, read);
        let Some((then, row)) = self.both(at, said, answer)? else { return Ok(()) };
        let last = (at.0, at.1 + tokens.len().saturating_sub(1));
        then.iter().try_for_each(|then| self.row(last, then, &row))?;
        let session = self.session(at, &[])?;
        session.row = read.then_some(row);
        session.ran(tokens);
        Ok(())
    }

    fn rows(
        &mut self,
        at: (u64, usize),
        tokens: &[u32],
        said: &Said<Vec<Row>>,
    ) -> Result<(), Halt> {
        self.compared.commands += 1;
        let place = self.session(at, tokens)?.place;
        let answer = self.engine.rows(place, tokens);
        let Some((then, mut rows)) = self.both(at, said, answer)? else { return Ok(()) };
        if then.len() != rows.len() {
            return self.differs(at, "logits", (then.len(), rows.len()));
        }
        for (index, (then, row)) in then.iter().zip(&rows).enumerate() {
            self.row((at.0, at.1 + index), then, row)?;
        }
        let session = self.session(at, &[])?;
        session.row = rows.pop();
        session.ran(tokens);
        Ok(())
    }

    /// Compares a row of logits, if it must have the same bits.
    fn row(&mut self, at: (u64, usize), then: &Row, row: &[f32]) -> Result<(), Halt> {
        if !self.bits {
            return Ok(());
        }
        self.compared.rows += 1;
        let now = Row::of(row);
        if now == *then {
            return Ok(());
        }
        let shown = |row: &Row| {
            let best = row.best.map_or_else(|| "none".to_owned(), |token| token.to_string());
            format!("{} (highest: {best})", row.bits)
        };
        self.differs(at, "logits", (shown(then), shown(&now)))
    }

    fn token(
        &mut self,
        at: (u64, usize),
        token: u32,
        sampling: Option<&Settings>,
    ) -> Result<(), Halt> {
        let session = self.session(at, &[])?;
        // Settings that come with a token are those of a session without a `sampling` entry.
        if let Some(sampling) = sampling {
            session.rule = Some(sampling.clone().into());
        }
        session.next = Some(token);
        let (Some(rule), Some(row)) = (&session.rule, &session.row) else {
            self.compared.unruled += 1;
            return Ok(());
        };
        let now = rule.choose(row, &session.seen, at.1 as u32);
        self.compared.tokens += 1;
        match now {
            Some(now) if now == token => Ok(()),
            now => self.differs(at, "token", (token, now.map_or(-1, i64::from))),
        }
    }

    fn advance(
        &mut self,
        at: (u64, usize),
        tokens: &[u32],
        generate: u32,
        said: &Said<Done>,
    ) -> Result<(), Halt> {
        self.compared.commands += 1;
        self.session(at, tokens)?;
        // What a request that arrived cut short is repeated as it was cut.
        let (fed, generate) = match said {
            Said::Ok(done) => (&tokens[..done.ran.min(tokens.len())], done.tokens.len() as u32),
            Said::Error(_) => (tokens, generate),
        };
        let answer = self.advanced(at.0, fed, generate);
        self.sampled(at, fed, said, answer)
    }

    /// Feeds tokens and samples, where the engine or the host samples.
    fn advanced(&mut self, number: u64, fed: &[u32], generate: u32) -> Result<Vec<u32>, String> {
        let session = self.sessions.get(&number).ok_or("it has not begun")?;
        let (place, text) = (session.place, |error: crate::engine::Broken| error.to_string());
        if session.samples {
            let (mut rest, mut chosen) = (fed, Vec::new());
            loop {
                let done = self.engine.advance(place, rest, generate, &mut || false);
                let Advanced { chosen: new, ran, .. } = done.map_err(text)?;
                chosen.extend(new);
                match rest.get(ran..).filter(|rest| !rest.is_empty()) {
                    None => return Ok(chosen),
                    Some(_) if ran == 0 => return Err("no position was run".into()),
                    Some(more) => rest = more,
                }
            }
        }
        let (mut seen, mut position) = (session.seen.clone(), session.position);
        let (mut tokens, mut chosen) = (fed.to_vec(), Vec::new());
        let rule = session.rule.clone().unwrap_or_default();
        loop {
            let more = chosen.len() < generate as usize;
            let row = self.engine.feed(place, &tokens, more).map_err(text)?;
            seen.extend(tokens.iter().copied());
            position += tokens.len();
            if !more {
                return Ok(chosen);
            }
            let token = rule.choose(&row, &seen, position as u32).ok_or("every token is banned")?;
            chosen.push(token);
            if chosen.len() == generate as usize {
                return Ok(chosen);
            }
            tokens = vec![token];
        }
    }

    /// Compares the tokens of a session that was fed some.
    fn sampled(
        &mut self,
        (number, position): (u64, usize),
        fed: &[u32],
        said: &Said<Done>,
        answer: Result<Vec<u32>, String>,
    ) -> Result<(), Halt> {
        let Some((then, now)) = self.both((number, position), said, answer)? else {
            return Ok(());
        };
        let first = position + fed.len();
        let length = then.tokens.len().max(now.len());
        for index in 0..length {
            let (then, now) = (then.tokens.get(index), now.get(index));
            self.compared.tokens += 1;
            if then != now {
                let shown = |of: Option<&u32>| of.map_or(-1, |token| i64::from(*token));
                // Another kernel sums in another order: near ties may go another way.
                let (mut got, kernel) = (shown(now).to_string(), self.engine.kernel());
                if kernel != self.kernel {
                    got = format!("{got} (by kernel {kernel}, in the log {})", self.kernel);
                }
                return self.differs((number, first + index), "token", (shown(then), got));
            }
        }
        let session = self.session((number, position), &[])?;
        session.ran(fed);
        if let Some((last, others)) = now.split_last() {
            session.ran(others);
            session.next = Some(*last);
        }
        Ok(())
    }

    /// A batch: the values of a sequence do not depend on the others, nor on its place among them.
    fn together(
        &mut self,
        seqs: &[Seq],
        most: u32,
        said: &Said<Vec<Said<Done>>>,
    ) -> Result<(), Halt> {
        let first = seqs.first().map_or((0, 0), |seq| (seq.session, seq.position));
        let mut samples = true;
        for seq in seqs {
            samples &= self.session((seq.session, seq.position), &[seq.token])?.samples;
        }
        let steps = match said {
            Said::Error(_) => most,
            Said::Ok(all) => {
                let ran = |of: &Said<Done>| match of {
                    Said::Ok(done) => done.ran as u32,
                    Said::Error(_) => 0,
                };
                all.iter().map(ran).max().unwrap_or(0).max(1)
            }
        };
        let fed: Vec<Vec<u32>> = seqs.iter().map(Seq::tokens).collect();
        let fed = fed.iter().map(|tokens| &tokens[..tokens.len().min(steps as usize + 1)]);
        let fed: Vec<&[u32]> = fed.collect();
        self.compared.commands += 1;
        let answers = if samples && seqs.len() <= self.engine.seqs() && seqs.len() > 1 {
            let placed: Vec<(usize, &[u32])> =
                seqs.iter().zip(&fed).map(|(seq, fed)| (seq.place, *fed)).collect();
            let answer = self.engine.together(&placed, steps, &mut || false);
            let Some((_, answers)) = self.both(first, said, answer)? else { return Ok(()) };
            answers.into_iter().map(|answer| answer.map(|done| done.chosen)).collect()
        } else {
            let alone = |(seq, fed): (&Seq, &&[u32])| {
                let ran = &fed[..fed.len().min(steps as usize)];
                self.advanced(seq.session, ran, steps + 1 - fed.len() as u32)
            };
            seqs.iter().zip(&fed).map(alone).collect::<Vec<_>>()
        };
        let Said::Ok(all) = said else { return Ok(()) };
        for (((seq, fed), said), answer) in seqs.iter().zip(fed).zip(all).zip(answers) {
            let ran = &fed[..fed.len().min(steps as usize)];
            self.sampled((seq.session, seq.position), ran, said, answer)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "again_tests.rs"]
mod tests;
