//! The engines that run the model for `generate` and `serve`: sequences in places, tokens in, logits out.

use std::sync::Arc;

use abi::{Ending, TELEMETRY_PROGRAMS};
use ir::program::{Program, Verified};
use ir::sampling::Sampling;
use ir::schedule::KernelConfig;
use remote::Served;
use search::Handle;

use vm_host::{Batch, Request, Sequence, Watch};

use crate::device::Gpu;
use crate::failure::Failure;

mod bench;
mod draft;
mod feed;
mod hosted;
mod kernel_choice;
mod kernel_table;
mod open;
pub(crate) mod pieces;
mod shared_pages;
mod windows;

pub(crate) use bench::{Bench, Preempt};
pub(crate) use draft::DraftModel;
pub(crate) use hosted::{graph, reference, reference_of};
use kernel_choice::{ALONE, Kernel, KernelChoice};
pub(crate) use kernel_table::KernelTable;
pub(crate) use open::{Built, Kernels, Opening, open};
use pieces::Pieces;
pub(crate) use shared_pages::SharedPages;
pub(crate) use windows::Windows;

/// Prompt tokens per turn where each takes a step.
pub(crate) const PROMPT_SLICE: u64 = 16;

/// Why tokens could not be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// This sequence is lost; the others are unaffected.
    Sequence(String),
    /// Every sequence is lost. New ones can begin.
    All(String),
}

/// What an engine's commands took so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// Passes of each kernel's program, by the kernel's index.
    pub(crate) passes: [u64; TELEMETRY_PROGRAMS],
    /// When the last command began and ended on the machine; `None` if the machine itself reports it.
    pub(crate) last: Option<[u64; 2]>,
}

/// Where the weights of the next command are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum WeightsAt {
    /// On the machine.
    #[default]
    Here,
    /// On their way there.
    Coming,
    /// They will not arrive, with the reason.
    Lost(String),
}

/// Hears of a command while it runs.
pub(crate) trait Observer: Watch {
    /// The kernel that runs it, by its index in the server's list; before any token.
    fn kernel(&mut self, _number: usize) {}
}

impl<F: FnMut() -> bool> Observer for F {}

/// Several sequences of one model.
pub(crate) trait Engine {
    /// Whether a sequence of this many positions, which begins with `prompt`, could begin now; false if it has to wait for
    /// others to end.
    fn has_room(&mut self, _positions: u64, _prompt: &[u32]) -> bool {
        true
    }

    /// Begins a sequence of at most this many positions in a place, replacing its previous one. If the beginning of
    /// `prompt` is in the cache, the sequence has it; returns the number of its positions, less than the prompt's.
    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken>;

    /// Whether sequences with equal beginnings share what one of them has run.
    fn shares(&self) -> bool {
        false
    }

    /// Gives a sequence that has run the first `ran` tokens of `prompt` what others have run of it since. Returns the
    /// number of its positions then.
    fn reuse(&mut self, _place: usize, ran: usize, _prompt: &[u32]) -> Result<usize, Broken> {
        Ok(ran)
    }

    /// Runs tokens at the next positions of a place's sequence; with `read`, returns the logits of the last one.
    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken>;

    /// The same with the last token read, and `meanwhile` called once: while the machine runs, if it runs by itself.
    fn feed_and(
        &mut self,
        place: usize,
        tokens: &[u32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, Broken> {
        meanwhile();
        self.feed(place, tokens, true)
    }

    /// The same with the logits of each token.
    fn rows(&mut self, place: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        tokens.iter().map(|token| self.feed(place, &[*token], true)).collect()
    }

    /// Notes that the host sampled a token for a place's next position; with its settings if nothing else rules.
    fn sampled(&mut self, _place: usize, _token: u32, _sampling: Option<&Sampling>) {}

    /// Forgets a place's sequence.
    fn end(&mut self, place: usize);

    /// Why the machine is lost to this process for good, if it is.
    fn lost(&self) -> Option<String> {
        None
    }

    /// Prompt tokens per turn: a long prompt yields between turns.
    fn prompt_slice(&self) -> u64 {
        PROMPT_SLICE
    }

    /// Notes whether other sequences wait for their next tokens while the next piece of a prompt runs.
    fn beside_streams(&mut self, _streams: bool) {}

    /// The place of a prompt's chunk that was interrupted: the same turn goes on with it, and no other chunk runs before.
    fn interrupted(&self) -> Option<usize> {
        None
    }

    /// Lets the machine sample the tokens of a place's sequence. False if it cannot: then the host samples from rows.
    fn choose_by(&mut self, _place: usize, _how: &How<'_>) -> Result<bool, Broken> {
        Ok(false)
    }

    /// Runs tokens at the next positions of a sequence for which the machine samples, then samples at most `generate`
    /// tokens and runs all but the last. Meanwhile `observer` is called: it hears of tokens, and if it yields, this ends after the current step. It may
    /// also end before the last of `tokens`.
    fn advance(
        &mut self,
        place: usize,
        _tokens: &[u32],
        _generate: u32,
        _observer: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        Err(Broken::Sequence(format!("the machine does not choose for place {place}")))
    }

    /// Most positions of a step with windows, which run consecutive positions of one sequence each: its next token and guesses.
    /// 1: the machine has none.
    fn window(&self) -> usize {
        1
    }

    /// Whether steps take as long as they will, so that windows may be judged by their time.
    fn timed(&self) -> bool {
        false
    }

    /// Runs the next token of each of these sequences, for which the machine samples, and guesses behind it, in one step of
    /// windows. Gives each the tokens that [`advance`](Self::advance) would have sampled, as many as its guesses were right and
    /// one more. A sequence that cannot continue returns an error; the others are unaffected.
    fn speculate(
        &mut self,
        _seqs: &[(usize, &[u32])],
        _observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        Err(Broken::All("the machine has no windows".into()))
    }

    /// Runs tokens at the next positions in a window, and returns the logits of each. The sequence goes on where it was until
    /// [`keep`](Self::keep).
    fn window_rows(&mut self, place: usize, _tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        Err(Broken::Sequence(format!("the machine has no windows for place {place}")))
    }

    /// Keeps the first tokens of the last window of a sequence: one at least.
    fn keep(&mut self, place: usize, _tokens: &[u32]) -> Result<(), Broken> {
        Err(Broken::Sequence(format!("the machine has no windows for place {place}")))
    }

    /// Takes a sequence back to its first positions: what it runs next is behind these.
    fn rewind(&mut self, place: usize, _positions: usize) -> Result<(), Broken> {
        Err(Broken::Sequence(format!("the machine does not take place {place} back")))
    }

    /// Ends the resident kernel, if there is one: the next command launches it again.
    fn rest(&mut self) {}

    /// The kernel that ran the last command, by its index in the server's list; 0 where there is one.
    fn kernel(&self) -> usize {
        0
    }

    /// The machine, for a search between requests; `None` if a search has nothing to time on it.
    fn bench(&mut self) -> Option<&mut dyn Bench> {
        None
    }

    /// Runs by this program from now on, the kernel of this number in the server's list: a lone sequence where kernels are
    /// switched by load, else all. No sequence is open, and none shares pages.
    fn switch(
        &mut self,
        _number: usize,
        _program: &Arc<Verified<Program>>,
        _kernel: &KernelConfig,
    ) -> Result<(), String> {
        Err("the machine has one schedule".to_owned())
    }

    /// What its commands took so far.
    fn account(&self) -> Account {
        Account::default()
    }

    /// Where the weights of the next command are.
    fn weights(&self) -> WeightsAt {
        WeightsAt::Here
    }

    /// The batch size of the machine where it samples.
    fn seqs(&self) -> usize {
        1
    }

    /// Whether the last tokens of a prompt, this many, are run in the batch of others, where they take a step each. Else the
    /// others wait until they have been run. The answer is the same under any load: the bits depend on it.
    fn reads_in_batch(&self, _tokens: usize) -> bool {
        true
    }

    /// Runs at most `steps` positions of several sequences at once, each from its next tokens: one at least, and at most
    /// one more than there are steps, which is then not run. Further tokens are sampled. Meanwhile `observer` is called: if
    /// it yields, this ends after the current step, for all. A sequence that cannot continue returns an error; the others are
    /// unaffected.
    fn together(
        &mut self,
        _seqs: &[(usize, &[u32])],
        _steps: u32,
        _observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        Err(Broken::All("the machine runs one sequence at a time".into()))
    }
}

pub(crate) struct How<'a> {
    pub(crate) sampling: &'a Sampling,
    /// Whether each token has a mask, which the machine gets from the command's observer ([`Watch::mask`]).
    pub(crate) masked: bool,
    /// Generation ends after any of these tokens.
    pub(crate) stop: &'a [u32],
}

/// The result of a machine that samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advanced {
    pub(crate) chosen: Vec<u32>,
    pub(crate) ran: usize,
    /// Whether the last of the tokens is a stop token.
    pub(crate) stopped: bool,
}

fn unknown(place: usize) -> Broken {
    Broken::Sequence(format!("there is no sequence in place {place}"))
}

fn refused(why: impl std::fmt::Display) -> Broken {
    Broken::Sequence(why.to_string())
}

/// A number of positions as pools count them.
fn clamped(positions: u64) -> u32 {
    u32::try_from(positions).unwrap_or(u32::MAX)
}

/// The resident kernel: `--device cuda`. It samples on the device, except where the host needs rows of logits.
pub(crate) struct Megakernel<'a> {
    gpu: Gpu<'a>,
    program: Handle,
    /// The program of the kernel for a lone sequence, if kernels are switched by load.
    lone: Option<Handle>,
    choice: KernelChoice,
    ran_on: Kernel,
    /// The numbers of the two kernels in the server's list.
    numbers: [usize; 2],
    places: Vec<Place>,
    /// Whether sequences with equal beginnings share pages.
    shares: bool,
    account: Account,
    pieces: Pieces,
}

#[derive(Clone, Default)]
struct Place {
    /// The most positions of its sequence; 0 without one.
    most: u64,
    position: u32,
    /// The tokens at the positions before it.
    fed: Vec<u32>,
    /// Whether tokens are sampled with settings stored on the device.
    sampled: bool,
    /// Whether each has a mask.
    masked: bool,
    /// The last position, if its step had no token because the mask came too late.
    late: Option<u32>,
    stop: Vec<u32>,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Self::Sequence(why) | Self::All(why)) = self;
        f.write_str(why)
    }
}

impl From<Broken> for Failure {
    fn from(broken: Broken) -> Self {
        Self::refused(broken.to_string())
    }
}

/// Whether a command ended with a stop token, or why there is no token.
fn has_stopped(ending: Ending) -> Result<bool, String> {
    match ending {
        Ending::Length | Ending::Yield => Ok(false),
        Ending::Stop => Ok(true),
        Ending::NoToken => Err("every token is banned or not a number".to_owned()),
        Ending::BadToken => Err("a token is outside the vocabulary".to_owned()),
    }
}

impl<'a> Megakernel<'a> {
    pub(crate) fn new(gpu: Gpu<'a>, program: Handle, places: usize) -> Self {
        let (choice, ran_on) = (KernelChoice::default(), Kernel::Batch);
        let places = vec![Place::default(); places];
        let (account, pieces) = (Account::default(), Pieces::default());
        let (lone, numbers, shares) = (None, [0, 1], false);
        Self { gpu, program, lone, choice, ran_on, numbers, places, shares, account, pieces }
    }

    /// Runs a lone sequence with this program, whose kernel is for one sequence.
    pub(crate) fn switching(self, lone: Option<Handle>) -> Self {
        Self { lone, ..self }
    }

    fn program(&self, kernel: Kernel) -> Handle {
        match (kernel, self.lone) {
            (Kernel::Lone, Some(lone)) => lone,
            _ => self.program,
        }
    }

    /// The number of open sequences.
    fn open(&self) -> usize {
        self.places.iter().filter(|place| place.most > 0).count()
    }

    /// The program for the next command of a place.
    fn pick(&mut self, place: usize) -> Handle {
        let Some(lone) = self.lone else { return self.program };
        let sequences = self.open();
        let held = &self.places[place];
        let left = held.most.saturating_sub(held.position.into());
        let is = |handle| self.gpu.is_resident(handle);
        let resident = match (is(self.program), is(lone)) {
            (true, _) => Some(Kernel::Batch),
            (false, true) => Some(Kernel::Lone),
            (false, false) => None,
        };
        self.ran_on = self.choice.next(resident, sequences, left);
        self.program(self.ran_on)
    }

    /// Lets sequences with equal beginnings share pages of the cache.
    pub(crate) fn sharing(self) -> Self {
        Self { shares: true, ..self }
    }

    /// Counts the passes of the command that has just run this many positions.
    fn passed(&mut self, positions: u32) {
        self.choice.ran(self.open(), positions);
        self.account.passes[self.ran_on as usize] += self.gpu.take_passes();
    }

    /// Notes that a place has run tokens, of which `steps` positions were run; others may have the pages that are full.
    fn ran(&mut self, place: usize, tokens: impl Iterator<Item = u32>, steps: u32) {
        let held = &mut self.places[place];
        let full = held.position / abi::KV_PAGE;
        held.fed.extend(tokens.take(steps as usize));
        held.position += steps;
        if self.shares && held.position / abi::KV_PAGE > full {
            self.gpu.publish_pages(place as u32, &held.fed);
        }
    }

    /// Notes how a command ended for a place that was fed tokens and sampled more. Returns its positions, and whether it
    /// ended with a stop token. A step without its mask is as if it had not run: the next command runs it again.
    fn ended(
        &mut self,
        place: usize,
        (fed, sampled): (&[u32], &[u32]),
        (steps, ending): (u32, Ending),
    ) -> Result<(usize, bool), String> {
        let held = &mut self.places[place];
        let late = held.masked && ending == Ending::NoToken;
        let ran = if late { steps - 1 } else { steps };
        let last = held.position + ran;
        let before = std::mem::replace(&mut held.late, late.then_some(last));
        self.ran(place, fed.iter().chain(sampled).copied(), ran);
        match (late, before == Some(last)) {
            (false, _) => Ok((ran as usize, has_stopped(ending)?)),
            (true, false) => Ok((ran as usize, false)),
            (true, true) => Err(format!(
                "no token after position {last}, twice: its row is not a number, or its mask came too late"
            )),
        }
    }

    pub(crate) fn gpu(&mut self) -> &mut Gpu<'a> {
        &mut self.gpu
    }
}

impl Engine for Megakernel<'_> {
    fn has_room(&mut self, positions: u64, prompt: &[u32]) -> bool {
        let prompt = if self.shares { prompt } else { &[] };
        self.gpu.has_room(clamped(positions), prompt)
    }

    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken> {
        let held = self.places.get_mut(place).ok_or_else(|| unknown(place))?;
        *held = Place::default();
        let prompt = if self.shares { prompt } else { &[] };
        held.position = self.gpu.begin_session(place as u32, clamped(positions), prompt)?;
        held.fed = prompt[..held.position as usize].to_vec();
        held.most = positions;
        Ok(held.position as usize)
    }

    fn shares(&self) -> bool {
        self.shares
    }

    fn reuse(&mut self, place: usize, ran: usize, prompt: &[u32]) -> Result<usize, Broken> {
        let held = self.places.get_mut(place).ok_or_else(|| unknown(place))?;
        if !self.shares || held.position as usize != ran {
            return Ok(ran);
        }
        held.position = self.gpu.reuse_pages(place as u32, held.position, prompt);
        held.fed.extend(&prompt[ran..held.position as usize]);
        Ok(held.position as usize)
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        self.fed(place, tokens, (read, &mut || {}))
    }

    fn feed_and(
        &mut self,
        place: usize,
        tokens: &[u32],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Vec<f32>, Broken> {
        self.fed(place, tokens, (true, meanwhile))
    }

    fn end(&mut self, place: usize) {
        if let Some(held) = self.places.get_mut(place) {
            *held = Place::default();
            self.gpu.end_session(place as u32);
        }
    }

    fn lost(&self) -> Option<String> {
        self.gpu.why_lost()
    }

    fn choose_by(&mut self, place: usize, how: &How<'_>) -> Result<bool, Broken> {
        let held = self.places.get_mut(place).ok_or_else(|| unknown(place))?;
        if how.stop.len() > abi::STOP_TOKENS_MAX || how.sampling.bias.len() > abi::BIAS_MAX as usize
        {
            return Ok(false);
        }
        // The device has one bias for all tokens of a mask.
        if how.masked && !(self.gpu.masks() && how.sampling.bias.is_empty()) {
            return Ok(false);
        }
        held.stop = how.stop.to_vec();
        held.masked = how.masked;
        held.sampled = how.masked || !how.sampling.is_plain_greedy();
        if held.sampled {
            self.gpu.choose_by(self.program, place as u32, how)?;
        }
        Ok(true)
    }

    fn advance(
        &mut self,
        place: usize,
        tokens: &[u32],
        generate: u32,
        observer: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        if place >= self.places.len() {
            return Err(unknown(place));
        }
        let program = self.pick(place);
        observer.kernel(self.numbers[self.ran_on as usize]);
        // Before a switch of kernels a command is short.
        let waits = self.lone.is_some() && self.ran_on == Kernel::Batch;
        let generate = if waits { generate.min(ALONE) } else { generate };
        let held = &self.places[place];
        let request = Request {
            session: place as u32,
            position: held.position,
            tokens,
            generate,
            stop: &held.stop,
            keep_logits: false,
            // A request without generated tokens needs no sampling.
            sampled: held.sampled && generate > 0,
        };
        let limit = self.pieces.limit(self.gpu.launch_time());
        let done = self.gpu.command(program, &request, limit, observer)?;
        self.pieces.ran(done.steps, done.device_us);
        self.passed(done.steps);
        let ended = self.ended(place, (tokens, &done.tokens), (done.steps, done.ending));
        let (ran, stopped) = ended.map_err(Broken::Sequence)?;
        Ok(Advanced { chosen: done.tokens, ran, stopped })
    }

    fn window(&self) -> usize {
        self.gpu.window_seqs() as usize
    }

    fn timed(&self) -> bool {
        true
    }

    fn speculate(
        &mut self,
        seqs: &[(usize, &[u32])],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        self.windows(seqs, observer)
    }

    fn window_rows(&mut self, place: usize, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Broken> {
        self.rows_of_window(place, tokens)
    }

    fn keep(&mut self, place: usize, tokens: &[u32]) -> Result<(), Broken> {
        self.ran(place, tokens.iter().copied(), tokens.len() as u32);
        Ok(())
    }

    fn rewind(&mut self, place: usize, positions: usize) -> Result<(), Broken> {
        let held = self.places.get_mut(place).ok_or_else(|| unknown(place))?;
        // Full pages of a sequence that shares them are never written again.
        if self.shares || positions > held.position as usize {
            return Err(Broken::Sequence(format!(
                "place {place} cannot go to {positions} positions"
            )));
        }
        (held.position, held.late) = (positions as u32, None);
        held.fed.truncate(positions);
        Ok(())
    }

    fn rest(&mut self) {
        self.gpu.rest();
    }

    fn kernel(&self) -> usize {
        self.numbers[self.ran_on as usize]
    }

    fn bench(&mut self) -> Option<&mut dyn Bench> {
        Some(&mut self.gpu)
    }

    fn switch(
        &mut self,
        number: usize,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<(), String> {
        let handle =
            self.gpu.prepare_searched(program, kernel).map_err(|error| error.to_string())?;
        let (slot, held) = match &mut self.lone {
            Some(lone) => (Kernel::Lone, lone),
            None => (Kernel::Batch, &mut self.program),
        };
        let old = std::mem::replace(held, handle);
        if old != handle {
            self.gpu.release(old);
        }
        self.numbers[slot as usize] = number;
        self.account.passes[slot as usize] = 0; // those of another program
        Ok(())
    }

    fn account(&self) -> Account {
        self.account
    }

    fn weights(&self) -> WeightsAt {
        self.gpu.weights()
    }

    fn seqs(&self) -> usize {
        self.gpu.seqs() as usize
    }

    fn together(
        &mut self,
        seqs: &[(usize, &[u32])],
        steps: u32,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        let mut stop: Vec<u32> = Vec::new();
        for &(place, _) in seqs {
            let held = self.places.get(place).ok_or_else(|| unknown(place))?;
            stop.extend(held.stop.iter().filter(|token| !stop.contains(token)).collect::<Vec<_>>());
        }
        // The stop tokens of all sequences end the batch; for the other sequences such a token is an ordinary one. If
        // there are too many stop tokens, each step is checked on the host.
        let several = stop.len() <= abi::STOP_TOKENS_MAX;
        let (stop, steps) = if several { (&stop[..], steps) } else { (&[][..], 1) };
        let asked = seqs.iter().map(|&(place, tokens)| {
            let &Place { position, sampled, .. } = &self.places[place];
            let tokens = &tokens[..tokens.len().min(steps as usize + 1)];
            Sequence { session: place as u32, position, tokens, sampled }
        });
        let asked: Vec<Sequence<'_>> = asked.collect();
        let batch = Batch { seqs: &asked, steps, stop, keep_logits: false };
        self.ran_on = Kernel::Batch;
        observer.kernel(self.numbers[Kernel::Batch as usize]);
        let done = self.gpu.batch(self.program, &batch, observer)?;
        self.pieces.ran(done.steps, done.device_us);
        self.passed(done.steps);
        Ok(done
            .seqs
            .into_iter()
            .zip(seqs)
            .map(|(seq, &(place, tokens))| {
                let of = (tokens, &seq.tokens[..]);
                let (ran, _) = self.ended(place, of, (done.steps, seq.ending))?;
                let stop = &self.places[place].stop;
                let stopped = seq.tokens.last().is_some_and(|last| stop.contains(last));
                Ok(Advanced { chosen: seq.tokens, ran, stopped })
            })
            .collect())
    }

    fn reads_in_batch(&self, tokens: usize) -> bool {
        // The last token is never part of a chunk.
        !self.gpu.takes_chunks(tokens.saturating_sub(1))
    }

    fn prompt_slice(&self) -> u64 {
        if self.gpu.takes_chunks(pieces::SLICE as usize) { pieces::SLICE } else { PROMPT_SLICE }
    }

    fn beside_streams(&mut self, streams: bool) {
        self.pieces.streams = streams;
    }

    fn interrupted(&self) -> Option<usize> {
        self.gpu.chunk_begun().map(|session| session as usize)
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
