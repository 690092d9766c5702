//! Batches: several sessions that one decode command runs side by side, a sequence each (decision 022).

use abi::{Completion, Ending, SEQ_ENDING_BITS, SEQ_FORCED_MAX, SEQS_MAX, Submission};
use ir::program::Together;

use super::run::decode;
use super::watch::{Watch, Watched};
use super::{Idle, Loaded, Memory, Request, Resident};
use crate::error::HostError;

/// One session of a batch, or one position of a [`Window`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sequence<'a> {
    /// The session whose caches are used; no other sequence's.
    pub session: u32,
    /// Position of its first token. The caches hold the positions before it.
    pub position: u32,
    /// The tokens to run first: one at least, and at most one more than the batch has steps, which is then not run. It
    /// generates tokens from the last of these on.
    pub tokens: &'a [u32],
    /// Sample by the session's settings ([`Resident::set_sampling`]), not greedily.
    pub sampled: bool,
}

/// Consecutive positions of one session that one step runs, a sequence each: the next token, and guesses of those behind it.
/// Each position has the bits that it has in a plain decode by the same kernel. A step may have windows of several sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window<'a> {
    /// The session whose caches are used.
    pub session: u32,
    /// Position of the first token. The caches hold the positions before it.
    pub position: u32,
    /// The next token, then the guesses.
    pub tokens: &'a [u32],
    /// Sample by the session's settings ([`Resident::set_sampling`]), not greedily. They must have no repetition penalty: the
    /// set of tokens that it is about would have the guesses.
    pub sampled: bool,
}

/// The result of a step of windows.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowsDecoded {
    /// Of each window, in order.
    pub windows: Vec<WindowDecoded>,
    /// Microseconds from publishing the command to seeing its completion, by the host's clock.
    pub host_us: f64,
    /// Microseconds from start to completion of the command, by the device's clock; for diagnosis only.
    pub device_us: f64,
}

/// The result of a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowDecoded {
    /// The device's choice after each position: what follows if the tokens up to there are right. `None` where every token
    /// is banned or not a number.
    pub chosen: Vec<Option<u32>>,
}

impl WindowDecoded {
    /// The tokens that the window gives: its guesses as far as they were chosen, and the choice behind them.
    #[must_use]
    pub fn accepted(&self, guesses: &[u32]) -> Vec<u32> {
        let right = self.chosen.iter().zip(guesses).take_while(|(c, g)| **c == Some(**g)).count();
        self.chosen.iter().take(right + 1).map_while(|chosen| *chosen).collect()
    }
}

/// A batch to run. It ends for all sequences as soon as it ends for one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch<'a> {
    /// The sessions, in sequences 0, 1, ...
    pub seqs: &'a [Sequence<'a>],
    /// Positions to run per sequence, at most; one at least.
    pub steps: u32,
    /// A generated token among these ends the batch.
    pub stop: &'a [u32],
    /// Keep the logits of every position of every sequence.
    pub keep_logits: bool,
}

/// Result of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeqDecoded {
    /// Tokens that were generated, a stop token included. The last one is not run. None if its own tokens last longer.
    pub tokens: Vec<u32>,
    /// The device's choice after each position that was run, also where a token was its own.
    pub chosen: Vec<u32>,
    /// How it ended. `Length` with fewer steps than requested is a sequence that can continue: another one's end ended the batch.
    pub ending: Ending,
}

/// The result of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchDecoded {
    /// Of each sequence, in order.
    pub seqs: Vec<SeqDecoded>,
    /// Positions that were run, per sequence.
    pub steps: u32,
    /// Microseconds from publishing the command to seeing its completion, by the host's clock.
    pub host_us: f64,
    /// Microseconds from start to completion of the command, by the device's clock; for diagnosis only.
    pub device_us: f64,
}

impl Resident {
    /// Loads a program beside the current one, as [`load`](Self::load) does, for batches of as many sequences as it is proven for.
    ///
    /// # Errors
    /// If the program does not fit.
    pub fn load_together(&mut self, program: &Together) -> Result<Loaded, HostError> {
        self.load_for(program.program(), program.seqs())
    }

    /// Sequences that a batch may have now: the least of the kernel's, and those that the current program is proven for.
    #[must_use]
    pub fn seqs(&mut self) -> u32 {
        let (most, current) = (self.variant.seqs, self.current);
        most.min(self.idle().memory.places.sequences(current))
    }

    /// Runs steps of several sessions at once, each with the tokens that it would get alone, whether it is still in its prompt or not. While
    /// it runs, `watch` is called now and then; once it yields, the batch ends after the current step. A session continues, in any
    /// batch or alone, `steps` positions further, with the rest of its tokens or the last generated one.
    ///
    /// # Errors
    /// If the batch is outside what was booted or proven, or the device stopped. A session that cannot continue is not an error of the
    /// device: its [`Ending`] reports it.
    pub fn run_together(
        &mut self,
        batch: &Batch<'_>,
        watch: &mut dyn Watch,
    ) -> Result<BatchDecoded, HostError> {
        let seqs = self.seqs();
        Bounds { seqs, ..self.idle().bounds() }.check(batch).map_err(HostError::Request)?;
        for &Sequence { session, position, tokens, sampled } in batch.seqs {
            self.begin(session, position..position + batch.steps, tokens, sampled)?;
        }
        let expects = |seq: &Sequence<'_>| {
            let of = (seq.session, seq.position, seq.sampled);
            self.expects(of, seq.tokens.len(), batch.steps, batch.steps)
        };
        let sequences = batch.seqs.iter().map(expects).collect();
        let (done, host_us, device_us) =
            self.timed(&submission(batch), Watched { watch: Some(watch), sequences })?;
        let memory = &self.idle().memory;
        let seqs = batch.seqs.iter().zip(0_u32..).map(|(seq, index)| {
            let ending = ending(&done, index)?;
            let fed = seq.tokens.len() as u32;
            let at = memory.tokens_at(seq.session, seq.position + fed);
            let last = (done.steps + 1).saturating_sub(fed);
            let generated = last - u32::from(ending == Ending::NoToken && last > 0);
            let tokens = memory.tokens.read_words(at, generated as usize);
            let at = memory.tokens_at(seq.session, seq.position);
            let at = at + memory.token_stride as usize * 4;
            let chosen = memory.tokens.read_words(at, done.steps as usize);
            Ok(SeqDecoded { tokens, chosen, ending })
        });
        Ok(BatchDecoded {
            seqs: seqs.collect::<Result<_, HostError>>()?,
            steps: done.steps,
            host_us,
            device_us,
        })
    }

    /// The most positions of a step's windows together now: of the kernel, the current program's proof, and what fits in shared memory.
    #[must_use]
    pub fn window_seqs(&mut self) -> u32 {
        self.seqs().min(ir::program::smem::fresh_rows(self.variant.head_dim))
    }

    /// Runs a step of windows, each of another session; one of a single token is an ordinary step of its session. With
    /// `keep_logits` those of every position are kept, one row per sequence, in the order of the windows. A session continues
    /// behind as many positions as were right: what the others left in the cache is stored over, and read by nothing.
    ///
    /// # Errors
    /// If the windows are outside what was booted, or the device stopped.
    pub fn run_windows(
        &mut self,
        windows: &[Window<'_>],
        keep_logits: bool,
    ) -> Result<WindowsDecoded, HostError> {
        let seqs = self.window_seqs();
        let bounds = Bounds { seqs, ..self.idle().bounds() };
        bounds.check_windows(windows).map_err(HostError::Request)?;
        for &Window { session, tokens, sampled, .. } in windows {
            let sampling = &self.idle().memory.sampling;
            // Of an ordinary step the set of tokens that the penalty is about is right.
            let penalised = tokens.len() > 1 && sampling.penalised(session);
            if sampled && (penalised || sampling.masked(session)) {
                let why = format!(
                    "session {session} has a repetition penalty or masks, and a window has tokens that are guessed: run it one position at a time"
                );
                return Err(HostError::Request(why));
            }
        }
        for &Window { session, position, tokens, sampled } in windows {
            self.begin(session, position..position + tokens.len() as u32, tokens, sampled)?;
        }
        let seqs: Vec<Sequence<'_>> = windows.iter().flat_map(sequences).collect();
        let batch = Batch { seqs: &seqs, steps: 1, stop: &[], keep_logits };
        let (done, host_us, device_us) = self.timed(&submission(&batch), Watched::default())?;
        let memory = &self.idle().memory;
        let mut seq = 0..;
        let decoded = windows.iter().map(|window| {
            let at = memory.tokens_at(window.session, window.position);
            let at = at + memory.token_stride as usize * 4;
            let words = memory.tokens.read_words(at, window.tokens.len());
            let chosen = words
                .into_iter()
                .zip(&mut seq)
                .map(|(word, seq)| Ok((ending(&done, seq)? != Ending::NoToken).then_some(word)));
            Ok(WindowDecoded { chosen: chosen.collect::<Result<_, HostError>>()? })
        });
        let windows = decoded.collect::<Result<_, HostError>>()?;
        Ok(WindowsDecoded { windows, host_us, device_us })
    }

    /// Logits of the first `rows` positions of a sequence of the last batch that kept them.
    ///
    /// # Errors
    /// If there is no such sequence, or a copy fails.
    pub fn seq_logits(&mut self, seq: u32, rows: u32) -> Result<Vec<Vec<f32>>, HostError> {
        let source = self.lane_row(seq)?;
        let Idle { memory, vocab, .. } = self.idle();
        let rows = rows.min(memory.residents.logits_rows);
        memory.copier.rows(source, rows as usize, *vocab as usize)
    }

    /// The logits of one position of a sequence of the last batch that kept them, into a caller's memory; row 0 of one that
    /// did not keep them are those of its last position.
    ///
    /// # Errors
    /// If there is no such sequence or row, or a copy fails.
    pub fn seq_row(&mut self, seq: u32, row: u32, out: &mut [f32]) -> Result<(), HostError> {
        let source = self.lane_row(seq)?;
        let Idle { memory, vocab, .. } = self.idle();
        let rows = memory.residents.logits_rows;
        if row >= rows {
            return Err(HostError::Request(format!("row {row} of {rows} rows of logits")));
        }
        let before = u64::from(row) * u64::from(*vocab) * size_of::<f32>() as u64;
        memory.copier.rows_into(source + before, out, *vocab as usize)
    }

    /// Fills the first rows of a sequence's logits with NaN.
    ///
    /// # Errors
    /// If there is no such sequence, or a copy fails.
    pub fn poison_seq_logits(&mut self, seq: u32, rows: u32) -> Result<(), HostError> {
        let source = self.lane_row(seq)?;
        let Idle { memory, vocab, .. } = self.idle();
        let rows = u64::from(rows.min(memory.residents.logits_rows));
        memory.copier.fill(source, rows * u64::from(*vocab) * size_of::<f32>() as u64, 0xff)
    }

    /// Address of the first row of a sequence's logits.
    fn lane_row(&mut self, seq: u32) -> Result<u64, HostError> {
        let seqs = self.variant.seqs;
        if seq >= seqs {
            return Err(HostError::Request(format!("sequence {seq} of a kernel of {seqs}")));
        }
        let Idle { memory: Memory { residents, .. }, vocab, .. } = self.idle();
        let skipped = u64::from(seq) * u64::from(residents.logits_rows) * u64::from(*vocab);
        Ok(residents.logits + skipped * size_of::<f32>() as u64)
    }
}

impl Idle {
    pub(super) fn bounds(&self) -> Bounds {
        let residents = &self.memory.residents;
        Bounds {
            seqs: 1,
            sessions: self.options.sessions,
            vocab: self.vocab,
            capacity: residents.kv_capacity,
            rows: residents.logits_rows,
        }
    }
}

/// Bounds on a command.
pub(super) struct Bounds {
    seqs: u32,
    sessions: u32,
    vocab: u32,
    capacity: u32,
    rows: u32,
}

impl Bounds {
    fn check(&self, batch: &Batch<'_>) -> Result<(), String> {
        let &Batch { seqs, steps, stop, keep_logits } = batch;
        if seqs.is_empty() || seqs.len() > self.seqs as usize {
            let (asked, most) = (seqs.len(), self.seqs);
            return Err(format!(
                "a batch of {asked} sequences; 1 to {most} are possible with this kernel and this program's proof"
            ));
        }
        check_stop(stop)?;
        if steps == 0 {
            return Err("a batch without steps: ask for one at least".into());
        }
        if keep_logits && steps > self.rows {
            let rows = self.rows;
            return Err(format!("{steps} rows of logits of each sequence; {rows} were set aside"));
        }
        let tokens_max = (steps as usize + 1).min(SEQ_FORCED_MAX as usize + 1);
        for (index, seq) in seqs.iter().enumerate() {
            self.check_run(seq.session, seq.position, seq.tokens, steps.into())
                .map_err(|why| format!("sequence {index}: {why}"))?;
            if seq.tokens.len() > tokens_max {
                let tokens = seq.tokens.len();
                return Err(format!(
                    "sequence {index}: {tokens} tokens; a batch of {steps} steps takes {tokens_max} at most"
                ));
            }
            if let Some(other) = seqs[..index].iter().position(|l| l.session == seq.session) {
                let session = seq.session;
                return Err(format!(
                    "sequence {index}: session {session} is that of sequence {other} too"
                ));
            }
        }
        Ok(())
    }

    fn check_windows(&self, windows: &[Window<'_>]) -> Result<(), String> {
        let asked: usize = windows.iter().map(|window| window.tokens.len()).sum();
        if asked == 0 || asked > self.seqs as usize {
            let (count, most) = (windows.len(), self.seqs);
            return Err(format!(
                "{count} windows with {asked} positions; 1 to {most} are possible with this kernel and this program's proof"
            ));
        }
        for (index, &Window { session, position, tokens, .. }) in windows.iter().enumerate() {
            self.check_run(session, position, tokens, tokens.len() as u64)
                .map_err(|why| format!("window {index}: {why}"))?;
            if let Some(other) = windows[..index].iter().position(|of| of.session == session) {
                return Err(format!(
                    "window {index}: session {session} is that of window {other} too"
                ));
            }
        }
        Ok(())
    }

    /// Refuses a run of `steps` positions from `position` that starts with these tokens, if it is out of bounds.
    pub(super) fn check_run(
        &self,
        session: u32,
        position: u32,
        tokens: &[u32],
        steps: u64,
    ) -> Result<(), String> {
        if session >= self.sessions {
            return Err(format!("session {session} of {}", self.sessions));
        }
        if tokens.is_empty() {
            return Err("an empty prompt: there is no token to start from".into());
        }
        if let Some(token) = tokens.iter().find(|&&token| token >= self.vocab) {
            return Err(format!("token {token} is outside the vocabulary of {}", self.vocab));
        }
        if u64::from(position) + steps > u64::from(self.capacity) {
            let capacity = self.capacity;
            return Err(format!(
                "{steps} positions from {position} exceed the key/value capacity of {capacity}"
            ));
        }
        Ok(())
    }

    pub(super) fn check_request(&self, request: &Request<'_>) -> Result<u32, String> {
        let &Request { session, position, tokens, generate, stop, keep_logits, .. } = request;
        check_stop(stop)?;
        let steps = tokens.len() as u64 + u64::from(generate.saturating_sub(1));
        self.check_run(session, position, tokens, steps)?;
        if keep_logits && steps > u64::from(self.rows) {
            return Err(format!("{steps} rows of logits; {} were set aside", self.rows));
        }
        Ok(steps as u32)
    }
}

fn check_stop(stop: &[u32]) -> Result<(), String> {
    let (asked, most) = (stop.len(), abi::STOP_TOKENS_MAX);
    if asked > most {
        return Err(format!("{asked} stop tokens; at most {most} are possible"));
    }
    Ok(())
}

/// The sequences of a window, a position each.
fn sequences<'a>(window: &Window<'a>) -> impl Iterator<Item = Sequence<'a>> + use<'a> {
    let &Window { session, position, tokens, sampled } = window;
    let of = move |(tokens, position)| Sequence { session, position, tokens, sampled };
    tokens.chunks(1).zip(position..).map(of)
}

/// A batch as a command. One sequence alone is a plain decode.
fn submission(batch: &Batch<'_>) -> Submission {
    let &Batch { seqs, steps, stop, keep_logits } = batch;
    if let &[Sequence { session, position, tokens, sampled }] = seqs {
        let plain = decode(steps, stop, keep_logits, sampled);
        let forced = position + tokens.len() as u32;
        return Submission { seqs: 1, session, position, forced, ..plain };
    }
    let mut submission = decode(steps, stop, keep_logits, false);
    submission.seqs = seqs.len() as u32;
    for (index, seq) in seqs.iter().enumerate().take(SEQS_MAX) {
        submission.seq_position[index] = seq.position;
        submission.seq_session[index / 4] |= seq.session << (8 * (index % 4));
        let forced = seq.tokens.len().saturating_sub(1) as u32;
        submission.seq_forced[index / 4] |= forced << (8 * (index % 4));
        submission.seq_sample |= u32::from(seq.sampled) << index;
    }
    submission
}

/// How a sequence ended. A plain decode has its ending in a separate word, and no other sequences.
pub(super) fn ending(done: &Completion, seq: u32) -> Result<Ending, HostError> {
    let mask = (1 << SEQ_ENDING_BITS) - 1;
    let code = (done.seq_endings >> (seq * SEQ_ENDING_BITS) & mask) | done.ending;
    Ending::new(code).ok_or_else(|| {
        HostError::Request(format!("the device says of the end of sequence {seq}: {code}"))
    })
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
