//! Decode commands: requests and results.

use std::ops::Range;
use std::time::{Duration, Instant};

use abi::{Command, Completion, Ending, Submission};
use ir::sampling::Sampling;

use super::watch::{Expected, NOT_YET, Watch, Watched};
use super::{Idle, Memory, Resident};
use crate::error::HostError;
use crate::weight_stream::WeightStream;

/// The result of a decode command.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// Tokens that were generated, a stop token included.
    pub tokens: Vec<u32>,
    /// The device's choice after each position that was run, also where a token was forced.
    pub chosen: Vec<u32>,
    /// Positions that were run.
    pub steps: u32,
    /// How the command ended.
    pub ending: Ending,
    /// Microseconds from publishing the command to seeing its completion, by the host's clock.
    pub host_us: f64,
    /// Microseconds from start to completion of the command, by the device's clock; for diagnosis only.
    pub device_us: f64,
}

/// A decode request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// The session whose caches are used.
    pub session: u32,
    /// Position of the first token.
    pub position: u32,
    /// Tokens to run; at least one.
    pub tokens: &'a [u32],
    /// Tokens to generate at most. The last one is not run, so a later command starts with it.
    pub generate: u32,
    /// A generated token among these ends the command.
    pub stop: &'a [u32],
    /// Keep the logits of every position.
    pub keep_logits: bool,
    /// Sample by the session's settings ([`Resident::set_sampling`]), not greedily.
    pub sampled: bool,
}

impl Memory {
    /// Index of a session's position in the token buffers.
    pub(super) fn tokens_at(&self, session: u32, position: u32) -> usize {
        (session as usize * 2 * self.token_stride as usize + position as usize) * 4
    }
}

impl Resident {
    /// Runs the prompt `tokens` from `position` of a session, then generates greedily until `generate` tokens or a stop token. With
    /// `keep_logits`, the logits of every position that is run can be read afterwards.
    ///
    /// # Errors
    /// If the request is outside what was booted, or the device stopped.
    pub fn decode(
        &mut self,
        session: u32,
        position: u32,
        tokens: &[u32],
        generate: u32,
        stop: &[u32],
        keep_logits: bool,
    ) -> Result<Decoded, HostError> {
        let sampled = false;
        let request = Request { session, position, tokens, generate, stop, keep_logits, sampled };
        self.run(&request, &mut || false)
    }

    /// Runs a request. While it runs, `watch` is called now and then; once it yields, the command ends after the current step. A
    /// request that starts with the last token, at its position, continues as if there had been no end.
    ///
    /// # Errors
    /// If the request is outside what was booted, or the device stopped. A session that cannot continue is not an error of the device: the
    /// [`Ending`] reports it.
    pub fn run(
        &mut self,
        request: &Request<'_>,
        watch: &mut dyn Watch,
    ) -> Result<Decoded, HostError> {
        let steps = self.idle().bounds().check_request(request).map_err(HostError::Request)?;
        let Request { session, position, tokens, generate, stop, sampled, .. } = *request;
        self.begin(session, position..position + steps, tokens, sampled)?;
        let of = (session, position, sampled);
        let sequences = vec![self.expects(of, tokens.len(), steps, generate)];
        let submission = Submission {
            session,
            position,
            forced: position + tokens.len() as u32,
            ..decode(steps, stop, request.keep_logits, sampled)
        };
        let (done, host_us, device_us) =
            self.timed(&submission, Watched { watch: Some(watch), sequences })?;
        let ending = super::batch::ending(&done, 0)?;
        let last = (done.steps + 1).saturating_sub(tokens.len() as u32).min(generate);
        let generated = last - u32::from(ending == Ending::NoToken && last > 0);
        let memory = &self.idle().memory;
        let base = memory.tokens_at(session, position);
        let chosen = base + memory.token_stride as usize * 4;
        Ok(Decoded {
            tokens: memory.tokens.read_words(base + tokens.len() * 4, generated as usize),
            chosen: memory.tokens.read_words(chosen, done.steps as usize),
            steps: done.steps,
            ending,
            host_us,
            device_us,
        })
    }

    /// Prepares a command that runs these positions of a session: allocates their pages, updates the sampling state, and writes the first
    /// tokens to the token buffer.
    pub(super) fn begin(
        &mut self,
        session: u32,
        positions: Range<u32>,
        tokens: &[u32],
        sampled: bool,
    ) -> Result<(), HostError> {
        let Idle { memory, weight_stream, .. } = self.idle();
        if let Some(failure) = weight_stream.as_ref().and_then(WeightStream::failure) {
            return Err(failure);
        }
        memory.pages.before(&mut memory.copier, session, positions.clone())?;
        if sampled {
            memory.sampling.uses(&mut memory.copier, session, positions.start)?;
        } else {
            memory.sampling.passes_by(session);
        }
        let at = memory.tokens_at(session, positions.start);
        memory.tokens.write(at, bytemuck::cast_slice(tokens));
        Ok(())
    }

    /// Marks the places of the tokens that a command of `steps` steps generates at most, as not written yet, and clears the
    /// session's mask if it has masks.
    pub(super) fn expects(
        &mut self,
        (session, position, sampled): (u32, u32, bool),
        fed: usize,
        steps: u32,
        most: u32,
    ) -> Expected {
        let memory = &mut self.idle().memory;
        let count = (steps as usize + 1).saturating_sub(fed).min(most as usize);
        let next = position + fed as u32;
        let at = memory.tokens_at(session, next);
        memory.tokens.write(at, bytemuck::cast_slice(&vec![NOT_YET; count]));
        let masked = sampled && memory.sampling.masked(session);
        if masked {
            memory.sampling.masks.clear(session);
        }
        let tokens = at..at + count * size_of::<u32>();
        Expected { tokens, mask: masked.then_some((session, next)), given: false }
    }

    /// Runs a decode command; returns its completion, and its microseconds by the clocks of host and device.
    pub(super) fn timed(
        &mut self,
        submission: &Submission,
        watched: Watched<'_>,
    ) -> Result<(Completion, f64, f64), HostError> {
        let deadline = self.idle().options.deadline;
        let limit = deadline * 2 + Duration::from_millis(100) * submission.steps;
        let start = Instant::now();
        let done = self.command(submission, limit, watched)?;
        let host_us = start.elapsed().as_secs_f64() * 1e6;
        Ok((done, host_us, done.end_ns.saturating_sub(done.start_ns) as f64 / 1000.0))
    }

    /// As [`Idle::set_sampling`].
    ///
    /// # Errors
    /// The same.
    pub fn set_sampling(&mut self, session: u32, sampling: &Sampling) -> Result<(), HostError> {
        self.idle().set_sampling(session, sampling)
    }

    /// As [`Idle::set_masked_sampling`].
    ///
    /// # Errors
    /// The same.
    pub fn set_masked_sampling(
        &mut self,
        session: u32,
        sampling: &Sampling,
    ) -> Result<(), HostError> {
        self.idle().set_masked_sampling(session, sampling)
    }
}

impl Idle {
    /// Sets how tokens of a session are sampled from now on; the session's next sampled request begins with its tokens so far.
    ///
    /// # Errors
    /// If the settings have no meaning, there is no such session, or a copy fails.
    pub fn set_sampling(&mut self, session: u32, sampling: &Sampling) -> Result<(), HostError> {
        self.sample_by(session, sampling, false)
    }

    /// The same for a session whose tokens have masks: while a sampled command runs, its watch gives the mask of each token
    /// ([`Watch::mask`]). A command whose mask is empty or comes too late ends with [`Ending::NoToken`]: its last step has no
    /// token, and may be run again.
    ///
    /// # Errors
    /// The same, and if the settings have biases or the kernels were compiled without masks.
    pub fn set_masked_sampling(
        &mut self,
        session: u32,
        sampling: &Sampling,
    ) -> Result<(), HostError> {
        if self.kernels.iter().any(|(variant, _)| !variant.masks) {
            return Err(HostError::Request("the kernel was compiled without masks".into()));
        }
        self.sample_by(session, sampling, true)
    }

    fn sample_by(
        &mut self,
        session: u32,
        sampling: &Sampling,
        masked: bool,
    ) -> Result<(), HostError> {
        if let Some(problem) = sampling.problems(self.vocab).first() {
            return Err(HostError::Request(problem.to_string()));
        }
        let memory = &mut self.memory;
        if memory.residents.workers < 2 {
            return Err(HostError::Request(
                "one worker alone does not choose: the others go through the row".into(),
            ));
        }
        memory.sampling.set(&mut memory.copier, session, sampling, masked)
    }
}

/// A decode command that runs this many positions, without session and position.
pub(super) fn decode(steps: u32, stop: &[u32], keep_logits: bool, sampled: bool) -> Submission {
    let keep = if keep_logits { abi::FLAG_KEEP_LOGITS } else { 0 };
    let sample = if sampled { abi::FLAG_SAMPLE } else { 0 };
    let mut submission = Submission {
        command: Command::Decode as u32,
        steps,
        flags: keep | sample,
        stop_len: stop.len() as u32,
        ..Submission::default()
    };
    submission.stop[..stop.len()].copy_from_slice(stop);
    submission
}
