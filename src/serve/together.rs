//! Batched turns: sessions that decode or have little left to read, if the machine samples and runs several at once. Where a
//! batch has fewer sessions than the kernel has sequences, the rest may run guesses of some of them, a step at a time.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use sessions::{SessionId, Turn};
use vm_host::Watch;

use super::alike::PAGE;
use super::{Broken, EngineLoop, Job, Running, say, takes};
use crate::constraint::Guide;
use crate::engine::{Advanced, Observer};
use crate::observe::Command;
use crate::sequence::{Sequence, Told};
use crate::speculate::Offer;

impl Running {
    /// The tokens that are known and not run yet, if the machine samples those that follow.
    fn unfed(&self) -> Option<&[u32]> {
        let unfed = self.sequence.unfed();
        (self.sequence.chosen_there && !unfed.is_empty() && !self.to.is_closed()).then_some(unfed)
    }

    /// The most positions that a turn of `most` may run in a batch, `slice` of them at once. A prompt ends there, so that its first token is said at
    /// once, and so does a page of it, which others may wait for.
    fn steps(&self, most: u64, slice: usize) -> usize {
        let Sequence { work, fed, chosen, .. } = &self.sequence;
        let steps = match work.prompt.len().saturating_sub(*fed) {
            0 | 1 => (work.limit as usize).saturating_sub(chosen.len()),
            rest => rest.min(PAGE - fed % PAGE),
        };
        steps.min(slice).min(usize::try_from(most).unwrap_or(usize::MAX))
    }
}

/// Reports what a batch says of its sequences while it runs.
struct Teller<'t> {
    listeners: &'t [&'t Running],
    /// The rule of each, if it has one.
    guides: &'t mut [Option<Guide>],
    /// Tokens reported so far of each.
    told: Vec<usize>,
    /// The kernel, once it is known and reported.
    kernel: Option<usize>,
    yields: &'t mut dyn FnMut() -> bool,
}

impl Watch for Teller<'_> {
    fn token(&mut self, sequence: usize, token: u32) {
        say(&self.listeners[sequence].to, Told::Token(token, None));
        self.told[sequence] += 1;
        self.guides[sequence].iter_mut().for_each(|guide| guide.take(token));
    }

    fn mask(&mut self, sequence: usize, vocab: u32) -> Option<Vec<u32>> {
        self.guides[sequence].as_mut()?.mask(vocab)
    }

    fn yields(&mut self) -> bool {
        (self.yields)()
    }
}

impl Observer for Teller<'_> {
    fn kernel(&mut self, number: usize) {
        for running in self.listeners {
            running.sequence.says_kernel(number, &mut |told| say(&running.to, told));
        }
        self.kernel = Some(number);
    }
}

/// What a batch gave, and what was reported of it while it ran: tokens of each sequence, and the kernel.
struct Batched {
    done: Result<Vec<Result<Advanced, String>>, Broken>,
    told: Vec<usize>,
    guides: Vec<Option<Guide>>,
    kernel: Option<usize>,
    took: Duration,
}

impl EngineLoop<'_> {
    /// The turn, and the turns that can be batched with it, in the scheduler's order: those of sessions that decode, or
    /// have little of their prompt left.
    pub(super) fn joined(&mut self, turn: Turn) -> Vec<Turn> {
        let (seqs, slice) = (self.engine.seqs(), self.slice());
        let (running, engine) = (&self.running, &*self.engine);
        let batches = |session: SessionId| {
            let unfed = running.get(&session).and_then(Running::unfed);
            unfed.is_some_and(|unfed| engine.reads_in_batch(unfed.len()))
        };
        // In a turn of its own a sequence is given the page that is next, if another one has run it.
        let waits = |session: SessionId| {
            engine.shares() && running.get(&session).and_then(Running::next_page).is_some()
        };
        let mut turns = vec![turn];
        if !batches(turns[0].session()) {
            return turns;
        }
        let mut suits = |session: SessionId| batches(session) && !waits(session);
        while turns.len() < seqs
            && let Some(turn) = self.scheduler.join(slice, &mut suits)
        {
            turns.push(turn);
        }
        turns
    }

    /// Runs turns as a batch, or the only one alone. A batch ends for all sequences when one ends or has read its prompt, a
    /// request arrives, or a client disconnects.
    pub(super) fn together(&mut self, mut turns: Vec<Turn>, inbox: &Receiver<Job>) {
        if turns.len() < 2 {
            return turns.pop().into_iter().for_each(|turn| self.turn(turn, inbox));
        }
        // A client may have disconnected since the turns were chosen.
        let left = |turn: &Turn| {
            self.running.get(&turn.session()).is_none_or(|running| running.to.is_closed())
        };
        let (gone, turns): (Vec<Turn>, Vec<Turn>) = turns.into_iter().partition(left);
        if !gone.is_empty() {
            gone.into_iter().for_each(|turn| self.gone(turn));
            return self.together(turns, inbox);
        }
        if let Some(guesses) = self.guesses(&turns) {
            return self.windows(turns, &guesses);
        }
        self.batch(turns, inbox);
    }

    /// Runs turns as a batch.
    fn batch(&mut self, turns: Vec<Turn>, inbox: &Receiver<Job>) {
        // Out of their sequences, which are only read while the batch runs.
        let mut guides: Vec<Option<Guide>> = turns.iter().map(|turn| self.guide(turn)).collect();
        let held = |turn: &Turn| {
            let running = self.running.get(&turn.session())?;
            Some((turn.session().place(), running.sequence.unfed(), running))
        };
        let seqs: Vec<(usize, &[u32], &Running)> = turns.iter().filter_map(held).collect();
        let slice = self.steps_at_once(turns.len());
        // Who may guess looks sooner whether that is worth it.
        let guesses = seqs.iter().any(|(.., running)| running.sequence.guesser.is_some());
        let slice = if guesses { slice.min(self.sharing.slice()) } else { slice };
        self.piece_ran = false;
        let steps = seqs.iter().zip(&turns);
        let steps = steps.map(|((.., running), turn)| running.steps(turn.tokens(), slice));
        let steps = steps.min().unwrap_or(1).max(1);
        let firsts: Vec<(usize, usize)> =
            seqs.iter().map(|(place, _, running)| (*place, running.sequence.fed)).collect();
        self.said.begin(&firsts, steps);
        let mut yields = || {
            let gone = seqs.iter().any(|(_, _, running)| running.to.is_closed());
            takes(inbox, &mut self.waiting) || gone
        };
        let listeners: Vec<&Running> = seqs.iter().map(|(.., running)| *running).collect();
        let told = vec![0; listeners.len()];
        let (guiding, yields) = (&mut guides[..], &mut yields as &mut dyn FnMut() -> bool);
        let mut teller =
            Teller { listeners: &listeners, guides: guiding, told, kernel: None, yields };
        let fed =
            seqs.iter().map(|&(place, unfed, _)| (place, &unfed[..unfed.len().min(steps + 1)]));
        let fed: Vec<(usize, &[u32])> = fed.collect();
        let began = Instant::now();
        let done = self.engine.together(&fed, steps as u32, &mut teller);
        let Teller { told, kernel, .. } = teller;
        let ran = Batched { done, told, guides, kernel, took: began.elapsed() };
        let positions = self.batched(turns, (firsts[0], &[]), ran);
        if self.engine.timed() && positions > 0 {
            let each = began.elapsed().as_secs_f64() * 1e6 / positions as f64;
            self.sharing.stepped(firsts.len(), each);
        }
    }

    /// The guesses of each session in a step beside the others; `None` if they run without. A session that still reads its
    /// prompt has its steps first, and one with a rule has its masks.
    fn guesses(&mut self, turns: &[Turn]) -> Option<Vec<Vec<u32>>> {
        let most = self.engine.window();
        if turns.len() >= most {
            return None;
        }
        let mut offers: Vec<Offer> = Vec::with_capacity(turns.len());
        for turn in turns {
            let running = self.running.get_mut(&turn.session())?;
            if running.unfed()?.len() > 1 || running.sequence.guide.is_some() {
                return None;
            }
            let room = (most - turns.len() + 1).min(usize::try_from(turn.tokens()).unwrap_or(most));
            offers.push(running.sequence.offer(room));
        }
        let counts = self.sharing.next(&offers, most)?;
        let shared = offers.into_iter().zip(counts);
        Some(shared.map(|(offer, count)| offer.guesses[..count].to_vec()).collect())
    }

    /// Runs the next token of each turn, and guesses behind some of them, in one step.
    fn windows(&mut self, turns: Vec<Turn>, guesses: &[Vec<u32>]) {
        let held = |(turn, guesses): (&Turn, &Vec<u32>)| {
            let running = self.running.get(&turn.session())?;
            let tokens = [running.sequence.unfed(), guesses].concat();
            Some((turn.session().place(), tokens, running))
        };
        let seqs = turns.iter().zip(guesses).map(held);
        let Some(seqs) = seqs.collect::<Option<Vec<(usize, Vec<u32>, &Running)>>>() else {
            unreachable!("every open session has its request")
        };
        let firsts: Vec<(usize, usize)> =
            seqs.iter().map(|(place, _, running)| (*place, running.sequence.fed)).collect();
        self.said.begin(&firsts, 1);
        let listeners: Vec<&Running> = seqs.iter().map(|(.., running)| *running).collect();
        let told = vec![0; listeners.len()];
        let (guides, yields) = (&mut [][..], &mut || false);
        let mut teller = Teller { listeners: &listeners, guides, told, kernel: None, yields };
        let fed: Vec<(usize, &[u32])> =
            seqs.iter().map(|(place, tokens, _)| (*place, &tokens[..])).collect();
        let began = Instant::now();
        let done = self.engine.speculate(&fed, &mut teller);
        let Teller { told, kernel, .. } = teller;
        let took = began.elapsed();
        let positions = fed.iter().map(|(_, tokens)| tokens.len()).sum();
        let ran = Batched { done, told, guides: Vec::new(), kernel, took };
        if self.batched(turns, (firsts[0], guesses), ran) > 0 && self.engine.timed() {
            self.sharing.ran(positions, took.as_secs_f64() * 1e6);
        }
    }

    /// Ends the turns of a batch, of which some sessions had guesses. Returns the most positions that one of them ran.
    fn batched(
        &mut self,
        turns: Vec<Turn>,
        ((place, first), guesses): ((usize, usize), &[Vec<u32>]),
        Batched { done, told, guides, kernel: known, took }: Batched,
    ) -> usize {
        let kernel = self.engine.kernel();
        let (mut told, mut guides) = (told.into_iter(), guides.into_iter());
        let mut guesses = guesses.iter();
        let ran = || done.iter().flatten().flatten();
        let positions = ran().map(|seq| seq.ran).max().unwrap_or(0);
        let tokens = ran().map(|seq| seq.chosen.len()).sum();
        let command = Command { place, first, sequences: turns.len(), positions, tokens, took };
        self.said.ran(&command, &self.engine.account());
        let mut outcomes = outcomes(done, turns.len()).into_iter();
        for turn in turns {
            let session = turn.session();
            let Some(running) = self.running.get_mut(&session) else {
                unreachable!("every open session has its request")
            };
            let outcome = outcomes.next().unwrap_or_else(|| Err(Broken::All("no answer".into())));
            let guesses = guesses.next().map_or(&[][..], Vec::as_slice);
            running.sequence.guide = guides.next().flatten();
            let (ran, chosen, finish) = match outcome {
                Ok(seq) => {
                    let (ran, chosen) = (seq.ran, seq.chosen.len());
                    let before = running.sequence.chosen.len();
                    let mut tell = |told| say(&running.to, told);
                    match known {
                        Some(known) => running.sequence.ran_on(known, &mut |_| {}),
                        None => running.sequence.ran_on(kernel, &mut tell),
                    }
                    let told = told.next().unwrap_or(0);
                    let finish = running.sequence.took(seq, told, &mut tell);
                    running.sequence.guessed(guesses, before);
                    (ran, chosen, Ok(finish))
                }
                Err(broken) => (0, 0, Err(broken)),
            };
            self.settle(turn, ran, chosen, finish);
        }
        positions
    }
}

impl EngineLoop<'_> {
    /// Takes the rule of a turn's sequence out of it.
    fn guide(&mut self, turn: &Turn) -> Option<Guide> {
        self.running.get_mut(&turn.session()).and_then(|running| running.sequence.guide.take())
    }
}

/// The outcome of each sequence. If every sequence is lost, the last outcome carries that error: by then no other turn is out.
fn outcomes(
    done: Result<Vec<Result<Advanced, String>>, Broken>,
    seqs: usize,
) -> Vec<Result<Advanced, Broken>> {
    match done {
        Ok(seqs) => seqs.into_iter().map(|seq| seq.map_err(Broken::Sequence)).collect(),
        Err(broken) => {
            let (Broken::Sequence(why) | Broken::All(why)) = &broken;
            let mut all = vec![Err(Broken::Sequence(why.clone())); seqs.saturating_sub(1)];
            all.push(Err(broken));
            all
        }
    }
}
