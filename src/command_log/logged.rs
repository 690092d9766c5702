//! An engine whose commands are logged: the one place through which all of them pass, on every device.

use std::collections::BTreeMap;
use std::ops::DerefMut;

use ir::sampling::Sampling;
use telemetry::now_ns;

use super::{CommandLog, Done, Entry, Row, Said, Seq, Settings};
use crate::engine::{Account, Advanced, Broken, Engine, How, Observer, WeightsAt};

/// An engine with a log.
pub(crate) struct Logged<P> {
    engine: P,
    log: CommandLog,
    held: BTreeMap<usize, Held>,
    sessions: u64,
}

/// The session of a place.
#[derive(Clone, Copy, Default)]
struct Held {
    session: u64,
    /// Its next position.
    position: usize,
    /// Whether its settings are in the log.
    told: bool,
}

impl<P> Logged<P> {
    pub(crate) fn new(engine: P, log: CommandLog) -> Self {
        Self { engine, log, held: BTreeMap::new(), sessions: 0 }
    }

    fn held(&self, place: usize) -> Held {
        self.held.get(&place).copied().unwrap_or_default()
    }

    fn moved(&mut self, place: usize, by: usize) {
        if let Some(held) = self.held.get_mut(&place) {
            held.position += by;
        }
    }

    /// Records tokens that were fed, and what became of them.
    fn fed(
        &mut self,
        began: u64,
        (place, tokens): (usize, &[u32]),
        read: bool,
        answer: &Result<Vec<f32>, Broken>,
    ) {
        let Held { session, position, .. } = self.held(place);
        let said = said(answer, |row| read.then(|| Row::of(row)));
        let tokens = tokens.to_vec();
        self.moved(place, answer.as_ref().map_or(0, |_| tokens.len()));
        self.log.push(began, Entry::Feed { session, place, position, tokens, read, said });
    }
}

fn said<T, U, E: ToString>(answer: &Result<T, E>, of: impl FnOnce(&T) -> U) -> Said<U> {
    match answer {
        Ok(answer) => Said::Ok(of(answer)),
        Err(error) => Said::Error(error.to_string()),
    }
}

fn done(of: &Advanced) -> Done {
    Done { tokens: of.chosen.clone(), ran: of.ran, stopped: of.stopped }
}

impl<P: DerefMut> Engine for Logged<P>
where
    P::Target: Engine,
{
    fn has_room(&mut self, positions: u64, prompt: &[u32]) -> bool {
        self.engine.has_room(positions, prompt)
    }

    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken> {
        let began = now_ns();
        let answer = self.engine.begin(place, positions, prompt);
        self.sessions += 1;
        let (session, position) = (self.sessions, *answer.as_ref().unwrap_or(&0));
        self.held.insert(place, Held { session, position, told: false });
        let said = said(&answer, |has| *has);
        let entry = Entry::Begin { session, place, positions, prompt: prompt.to_vec(), said };
        self.log.push(began, entry);
        answer
    }

    fn shares(&self) -> bool {
        self.engine.shares()
    }

    fn reuse(&mut self, place: usize, ran: usize, prompt: &[u32]) -> Result<usize, Broken> {
        let began = now_ns();
        let answer = self.engine.reuse(place, ran, prompt);
        let Held { session, position, .. } = self.held(place);
        if let Ok(to) = answer
            && to > ran
        {
            self.moved(place, to - ran);
            self.log.push(began, Entry::Reuse { session, place, position, to });
        }
        answer
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        let began = now_ns();
        let answer = self.engine.feed(place, tokens, read);
        self.fed(began, (place, tokens), read, &answer);
        answer
    }

    fn feed_and(
        &mut self,
        place: usize,
        tokens: &[u32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, Broken> {
        let began = now_ns();
        let answer = self.engine.feed_and(place, tokens, meanwhile);
        self.fed(began, (place, tokens), true, &answer);
        answer
    }

    fn rows(&mut self, place: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        let (began, Held { session, position, .. }) = (now_ns(), self.held(place));
        let answer = self.engine.rows(place, tokens);
        let said = said(&answer, |rows| rows.iter().map(|row| Row::of(row)).collect());
        let tokens = tokens.to_vec();
        self.moved(place, answer.as_ref().map_or(0, |_| tokens.len()));
        self.log.push(began, Entry::Rows { session, place, position, tokens, said });
        answer
    }

    fn sampled(&mut self, place: usize, token: u32, sampling: Option<&Sampling>) {
        self.engine.sampled(place, token, sampling);
        let Some(held) = self.held.get_mut(&place) else { return };
        let Held { session, position, told } = *held;
        held.told = true;
        let sampling = sampling.filter(|_| !told).map(Settings::from);
        self.log.push(now_ns(), Entry::Token { session, place, position, token, sampling });
    }

    fn end(&mut self, place: usize) {
        let began = now_ns();
        self.engine.end(place);
        if let Some(Held { session, .. }) = self.held.remove(&place) {
            self.log.push(began, Entry::End { session, place });
        }
    }

    fn lost(&self) -> Option<String> {
        self.engine.lost()
    }

    fn prompt_slice(&self) -> u64 {
        self.engine.prompt_slice()
    }

    fn beside_streams(&mut self, streams: bool) {
        self.engine.beside_streams(streams);
    }

    fn interrupted(&self) -> Option<usize> {
        self.engine.interrupted()
    }

    fn choose_by(&mut self, place: usize, how: &How<'_>) -> Result<bool, Broken> {
        if how.masked {
            return Ok(false); // a log has no masks, but the tokens that the host samples
        }
        let (began, Held { session, .. }) = (now_ns(), self.held(place));
        let answer = self.engine.choose_by(place, how);
        let (sampling, stop) = (Settings::from(how.sampling), how.stop.to_vec());
        let said = said(&answer, |there| *there);
        self.log.push(began, Entry::Sampling { session, place, sampling, stop, said });
        answer
    }

    fn advance(
        &mut self,
        place: usize,
        tokens: &[u32],
        generate: u32,
        observer: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        let (began, Held { session, position, .. }) = (now_ns(), self.held(place));
        let answer = self.engine.advance(place, tokens, generate, observer);
        if answer.is_ok() && self.engine.interrupted() == Some(place) {
            return answer; // it goes on, and is logged whole at its end
        }
        let (said, kernel, tokens) = (said(&answer, done), self.engine.kernel(), tokens.to_vec());
        self.moved(place, answer.as_ref().map_or(0, |done| done.ran));
        let entry = Entry::Advance { session, place, position, kernel, tokens, generate, said };
        self.log.push(began, entry);
        answer
    }

    fn kernel(&self) -> usize {
        self.engine.kernel()
    }

    fn account(&self) -> Account {
        self.engine.account()
    }

    fn weights(&self) -> WeightsAt {
        self.engine.weights()
    }

    fn seqs(&self) -> usize {
        self.engine.seqs()
    }

    fn reads_in_batch(&self, tokens: usize) -> bool {
        self.engine.reads_in_batch(tokens)
    }

    fn together(
        &mut self,
        seqs: &[(usize, &[u32])],
        steps: u32,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        let began = now_ns();
        let seq = |&(place, tokens): &(usize, &[u32])| {
            let Held { session, position, .. } = self.held(place);
            let (token, prompt) = tokens.split_first().map_or((0, &[][..]), |(t, more)| (*t, more));
            Seq { session, place, position, token, prompt: prompt.to_vec() }
        };
        let listed = seqs.iter().map(seq).collect();
        let answer = self.engine.together(seqs, steps, observer);
        let outcome = |of: &Result<Advanced, String>| self::said(of, done);
        let said = said(&answer, |all| all.iter().map(outcome).collect());
        for (outcome, (place, _)) in answer.iter().flatten().zip(seqs) {
            self.moved(*place, outcome.as_ref().map_or(0, |done| done.ran));
        }
        let kernel = self.engine.kernel();
        let entry = Entry::Together { seqs: listed, kernel, generate: steps, said };
        self.log.push(began, entry);
        answer
    }
}
