//! What a search runs on the resident kernel. It has two slots, one for each side of a comparison. A slot holds one
//! sequence, or in a search for steps of several, as many equal ones: each in a session of its own, all fed the same
//! tokens, so that one list of expected logits judges them all. Position `p` is read from sequence `p mod n`.

use std::ops::Range;

use vm_host::{Batch, HostError, Resident, Sequence};

/// Positions that one batch runs at most: its tokens are all forced.
const AT_ONCE: usize = abi::SEQ_FORCED_MAX as usize + 1;

/// The sessions of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    /// The number of the slot.
    pub(super) index: u32,
    /// Sequences that a step runs.
    pub(super) seqs: u32,
}

/// What running tokens gave.
#[derive(Clone, Debug, Default)]
pub(super) struct Fed {
    /// The token that was chosen after each position.
    pub(super) chosen: Vec<u32>,
    /// Microseconds by the host's clock.
    pub(super) host_us: f64,
}

impl Fed {
    /// Microseconds of a step.
    pub(super) fn us_per_step(&self) -> f64 {
        self.host_us / self.chosen.len().max(1) as f64
    }
}

impl Slot {
    fn sessions(self) -> Range<u32> {
        self.index * self.seqs..(self.index + 1) * self.seqs
    }

    /// The sequence that a position, counted from the first of a command, is read from.
    fn read_from(self, position: usize) -> u32 {
        (position % self.seqs as usize) as u32
    }

    /// Fills the caches of all its sequences with NaN.
    pub(super) fn poison(self, running: &mut Resident) -> Result<(), HostError> {
        self.sessions().try_for_each(|session| running.poison_session(session))
    }

    /// Fills the rows of logits that a command of `rows` positions writes with NaN.
    pub(super) fn poison_logits(self, running: &mut Resident, rows: u32) -> Result<(), HostError> {
        (0..self.seqs).try_for_each(|seq| running.poison_seq_logits(seq, rows))
    }

    /// Runs tokens at the next positions of all its sequences. With `keep`, the logits of all positions can be read
    /// afterwards, for as many as one batch may run; else those of the last.
    pub(super) fn feed(
        self,
        running: &mut Resident,
        position: u32,
        tokens: &[u32],
        keep: bool,
    ) -> Result<Fed, HostError> {
        if self.seqs == 1 {
            let done = running.decode(self.index, position, tokens, 1, &[], keep)?;
            return Ok(Fed { chosen: done.chosen, host_us: done.host_us });
        }
        let mut fed = Fed::default();
        for part in tokens.chunks(AT_ONCE) {
            let position = position + fed.chosen.len() as u32;
            let of = |session| Sequence { session, position, tokens: part, sampled: false };
            let seqs: Vec<Sequence<'_>> = self.sessions().map(of).collect();
            let steps = part.len() as u32;
            let batch = Batch { seqs: &seqs, steps, stop: &[], keep_logits: keep };
            let done = running.run_together(&batch, &mut || false)?;
            fed.host_us += done.host_us;
            let chosen = (0..done.steps as usize).map(|at| {
                let seq = &done.seqs[self.read_from(at) as usize];
                seq.chosen.get(at).copied().unwrap_or_default()
            });
            fed.chosen.extend(chosen);
        }
        Ok(fed)
    }

    /// The logits of the first positions of a command that kept them, as many as `out` holds.
    pub(super) fn logits(
        self,
        running: &mut Resident,
        out: &mut [f32],
        vocab: usize,
    ) -> Result<(), HostError> {
        if self.seqs == 1 {
            return running.logits_into(out);
        }
        let mut rows = out.chunks_exact_mut(vocab).enumerate();
        rows.try_for_each(|(at, row)| running.seq_row(self.read_from(at), at as u32, row))
    }

    /// The logits of the last position of a command that did not keep them: those of its last sequence.
    pub(super) fn last_logits(
        self,
        running: &mut Resident,
        out: &mut [f32],
    ) -> Result<(), HostError> {
        if self.seqs == 1 {
            return running.logits_into(out);
        }
        running.seq_row(self.seqs - 1, 0, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_have_sessions_of_their_own_and_every_sequence_is_read() {
        for seqs in [1, 2, 4, 8] {
            let [a, b] = [0, 1].map(|index| Slot { index, seqs });
            assert_eq!(a.sessions(), 0..seqs);
            assert_eq!(b.sessions(), seqs..2 * seqs);
            let mut read: Vec<u32> = (0..24).map(|at| a.read_from(at)).collect();
            read.sort_unstable();
            read.dedup();
            assert_eq!(read, (0..seqs).collect::<Vec<_>>());
        }
    }
}
