//! Sequences that share the resident kernel, each in a session of its own, for a server. Tokens are sampled on the device.

use std::time::Duration;

use abi::Ending;
use ir::program::{Program, Together, Verified};
use search::{DeviceError, Handle};
use vm_host::{
    Batch, BatchDecoded, Decoded, HostError, KvPool, Occupancy, Request, Resident, Watch, Window,
    WindowsDecoded,
};

use super::chunks::Chunked;
use super::{Gpu, Machine, device_error};
use crate::engine::{Bench as _, Broken, How, WeightsAt};
use crate::report;

impl Gpu<'_> {
    /// Sets the batch size of kernels from the next program on. No kernel is launched yet.
    pub(crate) fn set_seqs(&mut self, seqs: u32) {
        self.seqs = seqs;
    }

    pub(crate) fn seqs(&self) -> u32 {
        self.seqs
    }

    /// Compiles kernels with masks from the next program on.
    pub(crate) fn set_masks(&mut self, masks: bool) {
        self.masks = masks;
    }

    /// Whether kernels have masks.
    pub(crate) fn masks(&self) -> bool {
        self.masks
    }

    /// The most positions of a step's windows of kernels from the next program on.
    pub(crate) fn window_seqs(&self) -> u32 {
        let graph = self.context.graph();
        let fits = ir::program::smem::fresh_rows(graph.head_dim);
        if graph.has_experts() { 1 } else { self.seqs.min(fits) }
    }

    /// The proof that sessions may share a program, if kernels run several.
    pub(super) fn prove(
        &self,
        program: &Verified<Program>,
    ) -> Result<Option<Together>, DeviceError> {
        if self.seqs == 1 {
            return Ok(None);
        }
        Together::new(program.clone(), self.seqs).map(Some).map_err(|violations| {
            let seqs = self.seqs;
            let reason = format!("the program cannot be shared by {seqs} sessions: {violations}");
            DeviceError::Fault { reason }
        })
    }

    /// Runs a batch. Meanwhile `watch` is called: if it yields, the batch ends after the current step.
    pub(crate) fn batch(
        &mut self,
        handle: Handle,
        batch: &Batch<'_>,
        watch: &mut dyn Watch,
    ) -> Result<BatchDecoded, Broken> {
        self.sequences.fill(None); // those of searches
        let done = self.undone(handle, |running| running.run_together(batch, watch))?;
        self.passes += u64::from(done.steps);
        if done.seqs.iter().any(|seq| !seq.tokens.is_empty()) {
            self.arrival.tokens();
        }
        Ok(done)
    }

    /// Runs a step of windows.
    pub(crate) fn windows(
        &mut self,
        handle: Handle,
        windows: &[Window<'_>],
        keep_logits: bool,
    ) -> Result<WindowsDecoded, Broken> {
        self.sequences.fill(None); // those of searches
        let done = self.undone(handle, |running| running.run_windows(windows, keep_logits))?;
        self.passes += 1;
        self.arrival.tokens();
        Ok(done)
    }

    /// Logits of each sequence of the last batch that kept them.
    pub(crate) fn batch_logits(
        &mut self,
        handle: Handle,
        seqs: u32,
        rows: u32,
    ) -> Result<Vec<Vec<Vec<f32>>>, Broken> {
        self.undone(handle, |running| (0..seqs).map(|seq| running.seq_logits(seq, rows)).collect())
    }

    /// Boots for `sessions` sequences that allocate their key/value caches from a pool, and launches the kernel with a program.
    pub(crate) fn serve(
        &mut self,
        handle: Handle,
        sessions: u32,
        kv_pool: KvPool,
    ) -> Result<(), DeviceError> {
        self.sessions = sessions.max(self.sessions);
        self.kv_pool = kv_pool;
        self.activate(handle, false).map(|_| ())
    }

    /// Boots for one sequence with a program, and launches no kernel: the first command does. So what other GPUs of this
    /// process allocate waits for none.
    pub(crate) fn boot(&mut self, handle: Handle) -> Result<(), DeviceError> {
        let prepared = self.prepared(handle)?;
        let (variant, program) = (prepared.variant, prepared.program.clone());
        let idle = self.idle(&program, &variant)?;
        self.machine = Machine::Idle(Box::new(idle));
        Ok(())
    }

    /// Ends the kernel, if it is resident.
    pub(crate) fn rest(&mut self) {
        self.machine = match std::mem::replace(&mut self.machine, Machine::Absent) {
            // One that does not exit is lost to this process, which the next command says.
            Machine::Running(running) => {
                let stopped = self.stop(*running);
                stopped.map_or(Machine::Absent, |idle| Machine::Idle(Box::new(idle)))
            }
            machine @ (Machine::Absent | Machine::Idle(_)) => machine,
        };
    }

    /// The occupancy of the key/value caches, if there is a machine.
    pub(crate) fn pages(&self) -> Option<Occupancy> {
        match &self.machine {
            Machine::Absent => None,
            Machine::Idle(idle) => Some(idle.pages()),
            Machine::Running(running) => Some(running.pages()),
        }
    }

    /// Whether the kernel of a program is resident.
    pub(crate) fn is_resident(&self, handle: Handle) -> bool {
        let Machine::Running(running) = &self.machine else { return false };
        self.programs.get(&handle.0).is_some_and(|prepared| prepared.variant == running.variant())
    }

    /// Whether a session of this many positions, which begins with `prompt`, could begin now.
    pub(crate) fn has_room(&self, positions: u32, prompt: &[u32]) -> bool {
        match &self.machine {
            Machine::Absent => true,
            Machine::Idle(idle) => idle.has_room(positions, prompt),
            Machine::Running(running) => running.has_room(positions, prompt),
        }
    }

    /// Begins a session: reserves its pages, and gives it those that hold the beginning of `prompt`. Returns the number of
    /// positions that it has. Without a machine, the session allocates pages on demand.
    pub(crate) fn begin_session(
        &mut self,
        session: u32,
        positions: u32,
        prompt: &[u32],
    ) -> Result<u32, Broken> {
        if self.preempts() {
            self.leave();
        }
        let begun = match &mut self.machine {
            Machine::Absent => Ok(0),
            Machine::Idle(idle) => idle.begin_session(session, positions, prompt),
            Machine::Running(running) => running.begin_session(session, positions, prompt),
        };
        self.say_pages();
        self.outcome(begun)
    }

    /// Gives a session the pages of its prompt that others have filled since. Returns the number of its positions.
    pub(crate) fn reuse_pages(&mut self, session: u32, ran: u32, prompt: &[u32]) -> u32 {
        match &mut self.machine {
            Machine::Absent => ran,
            Machine::Idle(idle) => idle.reuse_pages(session, ran, prompt),
            Machine::Running(running) => running.reuse_pages(session, ran, prompt),
        }
    }

    /// Lets later sessions have the full pages of a session that has run `tokens`.
    pub(crate) fn publish_pages(&mut self, session: u32, tokens: &[u32]) {
        match &mut self.machine {
            Machine::Absent => {}
            Machine::Idle(idle) => idle.publish_pages(session, tokens),
            Machine::Running(running) => running.publish_pages(session, tokens),
        }
    }

    /// Why the device is lost to this process, if it is.
    pub(crate) fn why_lost(&self) -> Option<String> {
        let lost = "the device is lost to this process: its kernel did not leave, or a fault took its context";
        self.lost.then(|| lost.to_owned())
    }

    /// Ends a session and frees its pages.
    pub(crate) fn end_session(&mut self, session: u32) {
        let ended = match &mut self.machine {
            Machine::Absent => Ok(()),
            Machine::Idle(idle) => idle.end_session(session),
            Machine::Running(running) => running.end_session(session),
        };
        // Its pages are free in any case; a device that cannot be notified reports the error again at the next command.
        if let Err(error) = ended {
            report::say(&format!("session {session} ended, and the device was not told: {error}"));
        }
        self.say_pages();
    }

    /// Sets how tokens of a session are sampled in later sampled commands.
    pub(crate) fn choose_by(
        &mut self,
        handle: Handle,
        session: u32,
        how: &How<'_>,
    ) -> Result<(), Broken> {
        let How { sampling, masked, .. } = *how;
        let of_running = |running: &mut Resident| match masked {
            true => running.set_masked_sampling(session, sampling),
            false => running.set_sampling(session, sampling),
        };
        match &mut self.machine {
            Machine::Absent => self.undone(handle, of_running),
            // No launch, nor a switch of kernels, before the next command.
            Machine::Idle(idle) => {
                let set = match masked {
                    true => idle.set_masked_sampling(session, sampling),
                    false => idle.set_sampling(session, sampling),
                };
                self.outcome(set)
            }
            Machine::Running(running) => {
                let set = of_running(running);
                self.outcome(set)
            }
        }
    }

    /// Runs a command of a session, or the tokens of a prompt before its last in chunks: with a limit some layers of
    /// these, which is a command of no steps until the last. Meanwhile `watch` is called: if it yields, the command ends
    /// after the current step.
    pub(crate) fn command(
        &mut self,
        handle: Handle,
        request: &Request<'_>,
        limit: Option<Duration>,
        watch: &mut dyn Watch,
    ) -> Result<Decoded, Broken> {
        self.sequences.fill(None); // those of searches
        // Only the last token of a prompt needs sampling.
        let choice = usize::from(request.generate > 0);
        let head = &request.tokens[..request.tokens.len().saturating_sub(choice)];
        let chunked = self.in_chunks(handle, (request.session, request.position), head, limit)?;
        if chunked != Chunked::Not {
            // Not the last token: prompts that wait run before the next launch, and then all these tokens in one batch.
            let (tokens, chosen, ending) = (Vec::new(), Vec::new(), Ending::Yield);
            let steps = if chunked == Chunked::All { head.len() as u32 } else { 0 };
            let (host_us, device_us) = (0.0, 0.0);
            return Ok(Decoded { tokens, chosen, steps, ending, host_us, device_us });
        }
        let done = self.undone(handle, |running| running.run(request, watch))?;
        self.passes += u64::from(done.steps);
        if !done.tokens.is_empty() {
            self.arrival.tokens();
        }
        Ok(done)
    }

    /// Runs a prompt, or a part of it, in chunks, if it is long enough.
    fn in_chunks(
        &mut self,
        handle: Handle,
        place: (u32, u32),
        tokens: &[u32],
        limit: Option<Duration>,
    ) -> Result<Chunked, Broken> {
        // Invalid tokens are refused by the resident kernel, which stays.
        let vocab = self.context.graph().vocab;
        if tokens.iter().any(|token| *token >= vocab) {
            return Ok(Chunked::Not);
        }
        let done = self.prefilled(handle, place, tokens, limit);
        self.recover(done).map_err(|error| Broken::All(error.to_string()))
    }

    /// Runs tokens at the next positions of a session. With `read`, returns the logits of the last one, and calls
    /// `meanwhile` once while the kernel runs it.
    pub(crate) fn feed(
        &mut self,
        handle: Handle,
        (session, position): (u32, u32),
        tokens: &[u32],
        (read, meanwhile): (bool, &mut dyn FnMut()),
    ) -> Result<Vec<f32>, Broken> {
        self.sequences.fill(None);
        let (head, last) = tokens.split_at(tokens.len().saturating_sub(usize::from(read)));
        let chunked = self.in_chunks(handle, (session, position), head, None)? == Chunked::All;
        let row = self.undone(handle, |running| {
            if !head.is_empty() && !chunked {
                running.decode(session, position, head, 1, &[], false)?;
            }
            if last.is_empty() {
                return Ok(Vec::new());
            }
            let position = position + head.len() as u32;
            let (generate, stop, keep_logits, sampled) = (1, &[][..], true, false);
            let request =
                Request { session, position, tokens: last, generate, stop, keep_logits, sampled };
            let mut to_do = Some(meanwhile);
            running.run(&request, &mut || {
                if let Some(meanwhile) = to_do.take() {
                    meanwhile();
                }
                false
            })?;
            Ok(running.logits(1)?.into_iter().next().unwrap_or_default())
        })?;
        self.passes += (tokens.len() - if chunked { head.len() } else { 0 }) as u64;
        Ok(row)
    }

    /// Passes of the resident kernel's program since the last call: prompts in chunks run without it.
    pub(crate) fn take_passes(&mut self) -> u64 {
        std::mem::take(&mut self.passes)
    }

    /// Where the weights are, if they are loaded while the kernel is already resident.
    pub(crate) fn weights(&self) -> WeightsAt {
        let arriving = match &self.machine {
            Machine::Absent => return WeightsAt::Here,
            Machine::Idle(idle) => idle.arriving(),
            Machine::Running(running) => running.arriving(),
        };
        match arriving {
            Ok(true) => WeightsAt::Coming,
            Ok(false) => WeightsAt::Here,
            Err(error) => WeightsAt::Lost(error.to_string()),
        }
    }

    /// Runs `act` on the resident kernel. A failure ends the kernel; a refused request leaves it as it is.
    pub(super) fn undone<T>(
        &mut self,
        handle: Handle,
        act: impl FnOnce(&mut Resident) -> Result<T, HostError>,
    ) -> Result<T, Broken> {
        let done = match self.activate(handle, false) {
            Ok(running) => act(running),
            Err(error) => {
                self.say_pages();
                return self.recover(Err(error)).map_err(|error| Broken::All(error.to_string()));
            }
        };
        self.say_pages();
        self.outcome(done)
    }

    fn outcome<T>(&mut self, done: Result<T, HostError>) -> Result<T, Broken> {
        if let Err(HostError::Request(why)) = done {
            return Err(Broken::Sequence(why));
        }
        let done = self.recover(done.map_err(device_error));
        // A kernel that stopped in the middle of a step is launched again, with empty caches.
        done.map_err(|error| Broken::All(error.to_string()))
    }
}
