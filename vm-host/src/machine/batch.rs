//! Batches: several sessions that one decode command runs side by side, a lane each (decision 022).

use abi::{Completion, Ending, LANE_ENDING_BITS, LANES_MAX, Submission};
use ir::program::Together;

use super::run::decode;
use super::{Idle, Loaded, Memory, Request, Resident};
use crate::error::HostError;

/// One session of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// The session whose caches are used; no other lane's.
    pub session: u32,
    /// Position of its token. What was run before is in its caches.
    pub position: u32,
    /// The token to run first.
    pub token: u32,
    /// Choose by the session's settings ([`Resident::set_sampling`]), not greedily.
    pub sampled: bool,
}

/// What a batch is to do. It ends for all lanes as soon as it does for one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch<'a> {
    /// The sessions, in lanes 0, 1, ...
    pub lanes: &'a [Lane],
    /// Tokens to generate at most, each lane as many; one at least.
    pub generate: u32,
    /// A generated token among these ends the batch.
    pub stop: &'a [u32],
    /// Keep the logits of every position of every lane.
    pub keep_logits: bool,
}

/// What came of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneDecoded {
    /// Tokens that were generated, a stop token included. The last one is not run.
    pub tokens: Vec<u32>,
    /// How it ended. `Length` with fewer tokens than were asked for is a lane that could have gone on: another one's end ended the batch.
    pub ending: Ending,
}

/// The result of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchDecoded {
    /// Of each lane, in order.
    pub lanes: Vec<LaneDecoded>,
    /// Positions that were run, of each lane.
    pub steps: u32,
    /// Microseconds from publishing the command to seeing its completion, by the host's clock.
    pub host_us: f64,
    /// Microseconds between taking the command up and completing it, by the device's clock; for diagnosis only.
    pub device_us: f64,
}

impl Resident {
    /// Loads a program beside the current one, as [`load`](Self::load) does, for batches of as many lanes as it is proven for.
    ///
    /// # Errors
    /// If the program does not fit.
    pub fn load_together(&mut self, program: &Together) -> Result<Loaded, HostError> {
        self.load_for(program.program(), program.lanes())
    }

    /// Lanes that a batch may have now: those of the kernel, and those that the current program is proven for.
    #[must_use]
    pub fn lanes(&mut self) -> u32 {
        let (most, current) = (self.variant.lanes, self.current);
        most.min(self.idle().memory.places.sequences(current))
    }

    /// Runs one step after the other of several sessions at once, each with the tokens that it would get alone. While it runs, `give_way` is
    /// asked now and then; once it says yes the batch ends after the step that is under way. A session goes on, in whatever batch or
    /// alone, with its last token, `steps` positions further.
    ///
    /// # Errors
    /// If the batch is outside what was booted or proven, or the device stopped. A session that cannot go on is no error of the device: its
    /// [`Ending`] says so.
    pub fn run_together(
        &mut self,
        batch: &Batch<'_>,
        give_way: &mut dyn FnMut() -> bool,
    ) -> Result<BatchDecoded, HostError> {
        let lanes = self.lanes();
        Bounds { lanes, ..self.idle().bounds() }.check(batch).map_err(HostError::Request)?;
        for &Lane { session, position, token, sampled } in batch.lanes {
            self.begin(session, position..position + batch.generate, &[token], sampled)?;
        }
        let (done, host_us, device_us) = self.timed(&submission(batch), give_way)?;
        let memory = &self.idle().memory;
        let lanes = batch.lanes.iter().zip(0_u32..).map(|(lane, index)| {
            let ending = ending(&done, index)?;
            let at = memory.tokens_at(lane.session, lane.position) + 4;
            let generated = done.steps - u32::from(ending == Ending::NoToken).min(done.steps);
            Ok(LaneDecoded { tokens: memory.tokens.read_words(at, generated as usize), ending })
        });
        Ok(BatchDecoded {
            lanes: lanes.collect::<Result<_, HostError>>()?,
            steps: done.steps,
            host_us,
            device_us,
        })
    }

    /// Logits of the first `rows` positions of a lane of the last batch that kept them.
    ///
    /// # Errors
    /// If there is no such lane, or a copy fails.
    pub fn lane_logits(&mut self, lane: u32, rows: u32) -> Result<Vec<Vec<f32>>, HostError> {
        let source = self.lane_row(lane)?;
        let Idle { memory, vocab, .. } = self.idle();
        let rows = rows.min(memory.residents.logits_rows);
        memory.copier.rows(source, rows as usize, *vocab as usize)
    }

    /// Fills the first rows of a lane's logits with what is not a number.
    ///
    /// # Errors
    /// If there is no such lane, or a copy fails.
    pub fn poison_lane_logits(&mut self, lane: u32, rows: u32) -> Result<(), HostError> {
        let source = self.lane_row(lane)?;
        let Idle { memory, vocab, .. } = self.idle();
        let rows = u64::from(rows.min(memory.residents.logits_rows));
        memory.copier.fill(source, rows * u64::from(*vocab) * size_of::<f32>() as u64, 0xff)
    }

    /// Where the first row of a lane's logits is.
    fn lane_row(&mut self, lane: u32) -> Result<u64, HostError> {
        let lanes = self.variant.lanes;
        if lane >= lanes {
            return Err(HostError::Request(format!("lane {lane} of a kernel of {lanes}")));
        }
        let Idle { memory: Memory { residents, .. }, vocab, .. } = self.idle();
        let skipped = u64::from(lane) * u64::from(residents.logits_rows) * u64::from(*vocab);
        Ok(residents.logits + skipped * size_of::<f32>() as u64)
    }
}

impl Idle {
    pub(super) fn bounds(&self) -> Bounds {
        let residents = &self.memory.residents;
        Bounds {
            lanes: 1,
            sessions: self.options.sessions,
            vocab: self.vocab,
            capacity: residents.kv_capacity,
            rows: residents.logits_rows,
        }
    }
}

/// What a command must stay within.
pub(super) struct Bounds {
    lanes: u32,
    sessions: u32,
    vocab: u32,
    capacity: u32,
    rows: u32,
}

impl Bounds {
    fn check(&self, batch: &Batch<'_>) -> Result<(), String> {
        let &Batch { lanes, generate, stop, keep_logits } = batch;
        if lanes.is_empty() || lanes.len() > self.lanes as usize {
            let (asked, most) = (lanes.len(), self.lanes);
            return Err(format!(
                "a batch of {asked} lanes; 1 to {most} are possible with this kernel and this program's proof"
            ));
        }
        check_stop(stop)?;
        if generate == 0 {
            return Err("a batch that generates nothing: ask for one token at least".into());
        }
        if keep_logits && generate > self.rows {
            let rows = self.rows;
            return Err(format!("{generate} rows of logits of each lane; {rows} were set aside"));
        }
        for (index, lane) in lanes.iter().enumerate() {
            self.check_run(lane.session, lane.position, &[lane.token], generate.into())
                .map_err(|why| format!("lane {index}: {why}"))?;
            if let Some(other) = lanes[..index].iter().position(|l| l.session == lane.session) {
                let session = lane.session;
                return Err(format!("lane {index}: session {session} is that of lane {other} too"));
            }
        }
        Ok(())
    }

    /// Refuses `steps` positions from `position` that these tokens begin.
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

/// A batch as a command. One lane alone is a plain decode.
fn submission(batch: &Batch<'_>) -> Submission {
    let &Batch { lanes, generate, stop, keep_logits } = batch;
    if let &[Lane { session, position, sampled, .. }] = lanes {
        let plain = decode(generate, stop, keep_logits, sampled);
        return Submission { lanes: 1, session, position, forced: position + 1, ..plain };
    }
    let mut submission = decode(generate, stop, keep_logits, false);
    submission.lanes = lanes.len() as u32;
    for (index, lane) in lanes.iter().enumerate().take(LANES_MAX) {
        submission.lane_position[index] = lane.position;
        submission.lane_session[index / 4] |= lane.session << (8 * (index % 4));
        submission.lane_sample |= u32::from(lane.sampled) << index;
    }
    submission
}

/// How a lane ended. A plain decode has its ending in a word of its own, and no other lanes.
pub(super) fn ending(done: &Completion, lane: u32) -> Result<Ending, HostError> {
    let mask = (1 << LANE_ENDING_BITS) - 1;
    let code = (done.lane_endings >> (lane * LANE_ENDING_BITS) & mask) | done.ending;
    Ending::new(code).ok_or_else(|| {
        HostError::Request(format!("the device says of the end of lane {lane}: {code}"))
    })
}

#[cfg(test)]
#[path = "batch_tests.rs"]
mod tests;
