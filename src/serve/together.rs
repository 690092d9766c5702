//! Batched turns: sessions that only decode, if the machine samples and runs several at once.

use std::time::Instant;

use sessions::{SessionId, Turn};

use super::{Broken, EngineLoop, Running, free, say};
use crate::engine::Advanced;
use crate::observe::Command;
use crate::sequence::SLICE;

impl Running {
    /// The next token, if it is the only one to feed and the machine samples the following ones.
    fn decodes(&self) -> Option<u32> {
        let sequence = &self.sequence;
        let last = sequence.fed + 1 == sequence.work.prompt.len() + sequence.chosen.len();
        let tokens = sequence.next(1);
        (sequence.chosen_there && last && !self.to.is_closed()).then(|| tokens.first().copied())?
    }

    /// The most tokens that a turn of `most` positions may sample.
    fn allowed(&self, most: u64) -> usize {
        let left = self.sequence.work.limit as usize;
        let left = left.saturating_sub(self.sequence.chosen.len());
        left.min(SLICE).min(usize::try_from(most).unwrap_or(usize::MAX))
    }
}

impl EngineLoop<'_> {
    /// The turn, and the turns that can be batched with it: those of sessions that only decode, in the scheduler's order.
    pub(super) fn joined(&mut self, turn: Turn) -> Vec<Turn> {
        let (seqs, slice) = (self.engine.seqs(), self.engine.prompt_slice());
        let running = &self.running;
        let mut suits =
            |session: SessionId| running.get(&session).and_then(Running::decodes).is_some();
        let mut turns = vec![turn];
        if !suits(turns[0].session()) {
            return turns;
        }
        while turns.len() < seqs
            && let Some(turn) = self.scheduler.join(slice, &mut suits)
        {
            turns.push(turn);
        }
        turns
    }

    /// Runs one turn alone, or several as a batch.
    pub(super) fn turns(&mut self, mut turns: Vec<Turn>) {
        match turns.len() {
            1 => turns.pop().into_iter().for_each(|turn| self.turn(turn)),
            _ => self.together(turns),
        }
    }

    /// Runs a batch. It ends for all sequences when one ends, a request arrives, or a client disconnects.
    fn together(&mut self, turns: Vec<Turn>) {
        let held = |turn: &Turn| {
            let running = self.running.get(&turn.session())?;
            Some((turn.session().place(), running.decodes()?, running))
        };
        let seqs: Option<Vec<(usize, u32, &Running)>> = turns.iter().map(held).collect();
        let Some(seqs) = seqs else {
            // A client has disconnected since the turns were chosen.
            return turns.into_iter().for_each(|turn| self.turn(turn));
        };
        let allowed = |((_, _, running), turn): (&(usize, u32, &Running), &Turn)| {
            running.allowed(turn.tokens())
        };
        let generate = seqs.iter().zip(&turns).map(allowed).min().unwrap_or(1).max(1);
        let firsts: Vec<(usize, usize)> =
            seqs.iter().map(|(place, _, running)| (*place, running.sequence.fed)).collect();
        self.said.begin(&firsts, generate);
        let admitted = &seqs[0].2.admitted;
        let before = free(admitted);
        let mut preempt = || {
            let gone = seqs.iter().any(|(_, _, running)| running.to.is_closed());
            gone || free(admitted) < before
        };
        let fed: Vec<(usize, u32)> = seqs.iter().map(|&(place, token, _)| (place, token)).collect();
        let began = Instant::now();
        let done = self.engine.together(&fed, generate as u32, &mut preempt);
        let (took, kernel) = (began.elapsed(), self.engine.kernel());
        let (place, first) = firsts[0];
        let mut command =
            Command { place, first, sequences: turns.len(), positions: 0, tokens: 0, took };
        for seq in done.iter().flatten().flatten() {
            command.positions = command.positions.max(seq.ran);
            command.tokens += seq.chosen.len();
        }
        self.said.ran(&command, &self.engine.account());
        let mut outcomes = outcomes(done, turns.len()).into_iter();
        for turn in turns {
            let session = turn.session();
            let Some(running) = self.running.get_mut(&session) else {
                unreachable!("every open session has its request")
            };
            let outcome = outcomes.next().unwrap_or_else(|| Err(Broken::All("no answer".into())));
            let (ran, chosen, finish) = match outcome {
                Ok(seq) => {
                    let (ran, chosen) = (seq.ran, seq.chosen.len());
                    let mut tell = |told| say(&running.to, told);
                    running.sequence.ran_on(kernel, &mut tell);
                    (ran, chosen, Ok(running.sequence.took(seq, &mut tell)))
                }
                Err(broken) => (0, 0, Err(broken)),
            };
            self.settle(turn, ran, chosen, finish);
        }
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
