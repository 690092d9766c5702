//! The reference VM: executes a program's workers, queues, counters and flag-in-data words, one step per token.
//!
//! A step fires every task once. A worker's next task is ready when its waits are satisfied and all flag-in-data words
//! that it reads have the right tag; the [`Order`] chooses among ready tasks. Counters and tags persist over steps, as
//! on the device.
//!
//! A violation by the program is a [`Trap`] with its place: words read before they are written, a load stream that does
//! not match what the tasks consume, a step that ends early. Wrong values are found by [`compare`](crate::compare).

use ir::program::{Program, Verified};
use ir::{BufferId, CounterId, Graph, Weights, WorkerId};
use rayon::prelude::*;

use crate::defect::{Defect, WindowDefect};
use crate::memory::{Memory, Span, Step};
use crate::ops::{self, Best, Context, Effects};
use crate::order::{Order, Picker};
use crate::packed::Packed;
use crate::products::Products;
use crate::trace::{Appended, Fired, Stored};
use crate::trap::{Fault, InputError, MachineError, Trap};
use crate::wave::Wave;

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Run {
    /// Every step ended.
    Finished(Outputs),
    /// The program violated a rule.
    Trapped(Trap),
    /// Tasks are left and none is ready.
    Stuck {
        /// What each unfinished worker waits for.
        waiting: Vec<Waiting>,
    },
}

impl Run {
    /// The outputs, if the run finished.
    #[must_use]
    pub fn finished(self) -> Option<Outputs> {
        match self {
            Self::Finished(outputs) => Some(outputs),
            Self::Trapped(_) | Self::Stuck { .. } => None,
        }
    }
}

impl From<Trap> for Run {
    fn from(trap: Trap) -> Self {
        Self::Trapped(trap)
    }
}

/// The outputs of a finished run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outputs {
    /// Logits after each token that was fed.
    pub logits: Vec<Vec<f32>>,
    /// From `run`: the token that the program chose after each fed token. From `greedy`: the continuation.
    pub tokens: Vec<u32>,
}

/// A blocked worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The worker.
    pub worker: WorkerId,
    /// Index of its next task.
    pub task: u32,
    /// What the task waits for.
    pub on: On,
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A counter.
    Counter {
        /// The counter.
        counter: CounterId,
        /// Its value.
        have: u64,
        /// The value waited for.
        need: u64,
    },
    /// A flag-in-data word.
    Word {
        /// The buffer.
        buffer: BufferId,
        /// The word.
        word: u32,
        /// Its tag.
        have: u32,
        /// The tag waited for.
        need: u32,
    },
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "worker {}, task {} waits for ", self.worker, self.task)?;
        match self.on {
            On::Counter { counter, have, need } => {
                write!(f, "counter {counter}, which has {have} of {need}")
            }
            On::Word { buffer, word, have, need } => {
                write!(f, "word {word} of buffer {buffer}, which has tag {have} instead of {need}")
            }
        }
    }
}

/// A program bound to its weights, with the memory of one sequence.
pub struct Machine<'a> {
    program: &'a Program,
    packed: Vec<Packed<'a>>,
    products: Option<&'a Products<'a>>,
    memory: Memory<'a>,
    epoch: u32,
    positions: usize,
    /// The last chosen token, until positions are dropped.
    chosen: Option<u32>,
    /// The last run stopped in the middle of a step.
    halted: bool,
    defect: Option<(Defect, Option<u16>)>,
    window_defect: Option<WindowDefect>,
    /// The stores of tasks, while tracing.
    trace: Option<Vec<Fired>>,
}

/// A worker's progress through its queue during a step.
#[derive(Default)]
struct Progress {
    task: usize,
    /// Inputs of the next task, and the first word of them that is not known to have arrived: span, and word within it.
    inputs: Option<Vec<Span>>,
    scan: (usize, u32),
    ready: bool,
}

impl<'a> Machine<'a> {
    /// Binds a program to the graph it was lowered from and to its weights.
    ///
    /// # Errors
    /// If the program does not fit the graph or the weights.
    pub fn new(
        program: &'a Verified<Program>,
        graph: &Graph,
        weights: &'a dyn Weights,
    ) -> Result<Self, MachineError> {
        Self::bind(program, graph, weights)
    }

    /// As [`new`](Self::new), with the weights of `products`. Products of stored rows that an earlier machine computed
    /// are reused; nothing else is skipped.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sharing(
        program: &'a Verified<Program>,
        graph: &Graph,
        products: &'a Products<'a>,
    ) -> Result<Self, MachineError> {
        products.begin();
        let machine = Self::bind(program, graph, products.weights())?;
        Ok(Self { products: Some(products), ..machine })
    }

    /// As [`new`](Self::new) for unverified programs, for tests of what verification refuses.
    pub(crate) fn bind(
        program: &'a Program,
        graph: &Graph,
        weights: &'a dyn Weights,
    ) -> Result<Self, MachineError> {
        let qkv_rows = u64::from(graph.heads) + 2 * u64::from(graph.kv_heads);
        let qkv_fits = qkv_rows * u64::from(graph.head_dim) <= u64::from(u32::MAX);
        if program.dims != graph.into() || program.kv_dtype() != graph.kv_dtype || !qkv_fits {
            return Err(MachineError::Dims);
        }
        let logits =
            program.buffers.iter().filter(|buffer| buffer.kind == abi::BufferKind::Logits).count();
        if program.workers.is_empty() || logits != 1 {
            return Err(MachineError::Incomplete { workers: program.workers.len(), logits });
        }
        let matrices = program.matrices.iter().enumerate();
        let bind =
            |(index, matrix)| Packed::new(ir::MatrixId(index as u32), matrix, graph, weights);
        Ok(Self {
            program,
            packed: matrices.map(bind).collect::<Result<_, _>>()?,
            products: None,
            memory: Memory::new(program, graph, weights)?,
            epoch: 0,
            positions: 0,
            chosen: None,
            halted: false,
            defect: None,
            window_defect: None,
            trace: None,
        })
    }

    /// Adds a defect in one layer or in all, to test the checks that judge machines.
    #[must_use]
    pub fn with_defect(mut self, defect: Defect, layer: Option<u16>) -> Self {
        self.defect = Some((defect, layer));
        self
    }

    /// Adds a defect in windows.
    #[must_use]
    pub fn with_window_defect(self, defect: WindowDefect) -> Self {
        Self { window_defect: Some(defect), ..self }
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &'a Program {
        self.program
    }

    /// Positions fed so far.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Keys of a layer after norm and rotation, `[positions, kv_heads * head_dim]`; empty for a
    /// layer that does not exist.
    #[must_use]
    pub fn keys(&self, layer: usize) -> &[f32] {
        self.memory.layer(layer).map_or(&[], |cache| &cache.keys)
    }

    /// Values of a layer, `[positions, kv_heads * head_dim]`; empty for a layer that does not
    /// exist.
    #[must_use]
    pub fn values(&self, layer: usize) -> &[f32] {
        self.memory.layer(layer).map_or(&[], |cache| &cache.values)
    }

    /// Contents of a plain or flag-in-data buffer after the last step; unwritten words are NaN.
    #[must_use]
    pub fn buffer(&self, buffer: BufferId) -> Option<Vec<f32>> {
        self.memory.contents(buffer)
    }

    /// Resets all state, as if the program had just been loaded.
    pub fn reset(&mut self) {
        self.memory.reset();
        (self.epoch, self.positions, self.chosen, self.halted) = (0, 0, None, false);
    }

    /// Drops all but the first `positions` positions. A continuation then needs a fed token first.
    pub fn truncate(&mut self, positions: usize) {
        if positions < self.positions {
            self.memory.truncate(positions);
            (self.positions, self.chosen) = (positions, None);
        }
    }

    /// Resumes after these keys and values, as those of the first `positions` positions; one pair per layer, in the
    /// layout of [`keys`](Self::keys). A continuation then needs a fed token first.
    ///
    /// # Errors
    /// If they are not those of `positions` positions in every layer, do not fit the KV cache, or the last run did not finish.
    pub fn resume(
        &mut self,
        positions: usize,
        layers: &[(Vec<f32>, Vec<f32>)],
    ) -> Result<(), MachineError> {
        let capacity = self.program.kv_capacity as usize;
        if self.halted {
            return Err(MachineError::Halted);
        }
        InputError::check(&[], 0, positions, capacity)?;
        if !self.memory.fill(positions, layers) {
            return Err(InputError::Cache(positions).into());
        }
        (self.positions, self.chosen) = (positions, None);
        Ok(())
    }

    /// Feeds tokens at the next positions, one step each.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, the KV cache is full, or the last run did not finish;
    /// nothing was fed then.
    pub fn run(&mut self, tokens: &[u32], order: Order) -> Result<Run, MachineError> {
        if self.halted {
            return Err(MachineError::Halted);
        }
        let Program { dims, kv_capacity, .. } = self.program;
        InputError::check(tokens, dims.vocab, self.positions, *kv_capacity as usize)?;
        self.steps(0, tokens.chunks(1), order)
    }

    /// Feeds tokens at the next positions in one step: a window, in which each position has a sequence's scratch, and
    /// attends to the keys and values that those before it write in the same step. The tokens and logits are those of
    /// [`run`](Self::run), bit for bit. The sequences before `first` are those of other sessions in the same step: they share
    /// nothing with the window that is written, so that only its place among them matters.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn window(
        &mut self,
        first: u32,
        tokens: &[u32],
        order: Order,
    ) -> Result<Run, MachineError> {
        if self.halted {
            return Err(MachineError::Halted);
        }
        let Program { dims, kv_capacity, .. } = self.program;
        InputError::check(tokens, dims.vocab, self.positions, *kv_capacity as usize)?;
        self.steps(first, [tokens].into_iter().filter(|tokens| !tokens.is_empty()), order)
    }

    /// Runs steps of one position or several, from sequence `first` on. The tokens have been checked.
    fn steps<'t>(
        &mut self,
        first: u32,
        steps: impl Iterator<Item = &'t [u32]>,
        order: Order,
    ) -> Result<Run, MachineError> {
        let mut outputs = Outputs::default();
        for tokens in steps {
            match self.step(first, tokens, order) {
                Ok(chosen) => {
                    self.chosen = chosen.last().copied();
                    outputs.tokens.extend(chosen);
                    let seqs = (first as usize..).take(tokens.len());
                    outputs.logits.extend(seqs.map(|seq| self.memory.logits(seq)));
                }
                Err(stopped) => {
                    self.halted = true;
                    return Ok(stopped);
                }
            }
        }
        Ok(Run::Finished(outputs))
    }

    /// Feeds one token, and returns the stores of each task, in the order in which they ran.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn traced(&mut self, token: u32, order: Order) -> Result<(Run, Vec<Fired>), MachineError> {
        self.trace = Some(Vec::new());
        let run = self.run(&[token], order);
        let fired = self.trace.take().unwrap_or_default();
        Ok((run?, fired))
    }

    /// Runs one task of the last step again on the current memory, and stores nothing. Its inputs are the same as
    /// before, unless they were overwritten since.
    ///
    /// # Errors The trap of the task.
    pub fn again(&self, fired: &Fired, token: u32) -> Result<Fired, Trap> {
        let position = self.positions.saturating_sub(1) as u32;
        let step = Step { token, position, epoch: self.epoch, device: 0, seq: 0, before: 0 };
        let (worker, task) = (fired.worker.index(), fired.task as usize);
        let progress = Progress { task, ..Progress::default() };
        let effects = ops::fire(self.context(worker, &progress, step));
        let effects = effects.map_err(|fault| self.trap(worker, task, fault))?;
        Ok(self.fired(worker, task, &effects))
    }

    /// A task's stores, as readers see them.
    fn fired(&self, worker: usize, task: usize, effects: &Effects) -> Fired {
        let stored = |(buffer, start, words): &(BufferId, u32, Vec<u32>)| Stored {
            buffer: *buffer,
            start: *start,
            values: self.memory.as_read(*buffer, words),
        };
        let appended = effects.append.as_ref().map(|append| Appended {
            kv_head: append.kv_head,
            key: append.key.clone(),
            value: append.value.clone(),
        });
        Fired {
            worker: WorkerId(worker as u32),
            task: task as u32,
            writes: effects.writes.iter().map(stored).collect(),
            appended,
            chosen: effects.chosen.map(|best| best.token),
        }
    }

    /// Continues the sequence with the tokens that the program chooses, up to `n`. A token of `stop` is the last one
    /// returned.
    ///
    /// The last token returned is chosen but not fed.
    ///
    /// # Errors
    /// As [`run`](Self::run), or if nothing was fed since the start or the last
    /// [`truncate`](Self::truncate).
    pub fn greedy(&mut self, n: usize, stop: &[u32], order: Order) -> Result<Run, MachineError> {
        let mut token = self.chosen.ok_or(InputError::NothingFed)?;
        let mut outputs = Outputs::default();
        while outputs.tokens.len() < n {
            if let Some(&last) = outputs.tokens.last() {
                match self.run(&[last], order)? {
                    Run::Finished(fed) => {
                        outputs.logits.extend(fed.logits);
                        token = fed.tokens[0];
                    }
                    run @ (Run::Trapped(_) | Run::Stuck { .. }) => {
                        return Ok(run);
                    }
                }
            }
            outputs.tokens.push(token);
            if stop.contains(&token) {
                break;
            }
        }
        Ok(Run::Finished(outputs))
    }

    /// Runs tokens through the program, a sequence of a window each, and returns the token chosen after each.
    fn step(&mut self, first: u32, tokens: &[u32], order: Order) -> Result<Vec<u32>, Run> {
        self.epoch = self.epoch.wrapping_add(1);
        let of = |(before, &token): (u32, &u32)| {
            let (position, seq) = (self.positions as u32 + before, first + before);
            Step { token, position, epoch: self.epoch, device: 0, seq, before }
        };
        let steps: Vec<Step> = (0..).zip(tokens).map(of).collect();
        self.memory.begin(steps[0], steps.len());
        let mut workers: Vec<Progress> =
            self.program.workers.iter().map(|_| Progress::default()).collect();
        let mut picker = Picker::new(order, self.epoch);
        let mut left = self.program.task_len() as u64;
        let mut samples = u64::from(self.program.topology.devices);
        let mut chosen: Vec<Option<Best>> = vec![None; steps.len()];
        let mut ready = Vec::new();
        while left > 0 {
            ready.clear();
            for (worker, progress) in workers.iter_mut().enumerate() {
                if self.poll(worker, progress, &steps)? {
                    ready.push(worker);
                }
            }
            if ready.is_empty() {
                return Err(Run::Stuck { waiting: self.waiting(&workers, steps[0]) });
            }
            let picked = picker.pick(&mut ready);
            let picked = &ready[ready.len() - picked..];
            for (worker, effects) in self.fire(picked, &workers, &steps)? {
                left -= 1;
                let best: Vec<Option<Best>> = effects.iter().map(|of| of.chosen).collect();
                self.commit(worker, &mut workers[worker], &effects, &steps)?;
                if best.iter().all(Option::is_none) {
                    continue;
                }
                // The devices' best tokens are exchanged: the last `sample` ends the step.
                for (chosen, best) in chosen.iter_mut().zip(best) {
                    *chosen = best.map(|best| chosen.map_or(best, |other| best.better(other)));
                }
                samples = samples.saturating_sub(1);
                if let Some(fired) = self.trace.as_mut().and_then(|all| all.last_mut()) {
                    fired.chosen = chosen[0].map(|best| best.token).filter(|_| samples == 0);
                }
                if samples == 0 {
                    for best in chosen.iter().flatten() {
                        self.end(worker, &workers[worker], best.token, left)?;
                    }
                }
            }
        }
        self.positions += steps.len();
        let chosen: Option<Vec<u32>> = chosen.iter().map(|best| Some((*best)?.token)).collect();
        let chosen = chosen.filter(|_| samples == 0);
        Ok(chosen.ok_or_else(|| self.trap(0, 0, Fault::NoEnd))?)
    }

    /// Whether the worker's next task is ready; checks only waits and words that were not ready before.
    fn poll(&self, worker: usize, progress: &mut Progress, steps: &[Step]) -> Result<bool, Trap> {
        let step = self.on_device(worker, steps[0]);
        let Some(task) = self.program.workers[worker].tasks.get(progress.task) else {
            return Ok(false);
        };
        if progress.ready {
            return Ok(true);
        }
        let fault = |fault| self.trap(worker, progress.task, fault);
        if progress.inputs.is_none() {
            for wait in &task.waits {
                let have = self.memory.counter(wait.counter, step).map_err(fault)?;
                if have < u64::from(step.epoch) * u64::from(wait.count) {
                    return Ok(false);
                }
            }
            let mut inputs = Vec::new();
            for &step in steps {
                inputs.extend(ops::inputs(self.context(worker, progress, step)).map_err(fault)?);
            }
            progress.inputs = Some(inputs);
        }
        while let Some(&span) = progress.inputs.iter().flatten().nth(progress.scan.0) {
            if let Some((word, _)) =
                self.memory.missing_tag(span, progress.scan.1, step).map_err(fault)?
            {
                progress.scan.1 = word;
                return Ok(false);
            }
            progress.scan = (progress.scan.0 + 1, 0);
        }
        progress.ready = true;
        Ok(true)
    }

    /// Computes the effects of the picked workers' next tasks in each sequence. None sees the effects of another.
    fn fire(
        &self,
        picked: &[usize],
        workers: &[Progress],
        steps: &[Step],
    ) -> Result<Vec<(usize, Vec<Effects>)>, Trap> {
        let waves: Vec<Wave> = steps.iter().map(|_| Wave::default()).collect();
        let effects = |&worker: &usize| {
            let progress = &workers[worker];
            let fire = |(&step, wave): (&Step, _)| {
                let context = Context {
                    products: self.products.map(|products| (products, wave)),
                    ..self.context(worker, progress, step)
                };
                ops::fire(context).map_err(|fault| self.trap(worker, progress.task, fault))
            };
            let effects = steps.iter().zip(&waves).map(fire);
            Ok((worker, effects.collect::<Result<_, Trap>>()?))
        };
        // Collected first, so that the first trap in order is the one reported.
        let all: Vec<_> = picked.par_iter().map(effects).collect();
        all.into_iter().collect()
    }

    fn commit(
        &mut self,
        worker: usize,
        progress: &mut Progress,
        effects: &[Effects],
        steps: &[Step],
    ) -> Result<(), Trap> {
        let program = self.program;
        let device = self.program.device_of(WorkerId(worker as u32));
        let task = &program.workers[worker].tasks[progress.task];
        let stored = (|| {
            for (effects, step) in effects.iter().zip(steps) {
                let step = Step { device, ..*step };
                for (buffer, start, words) in &effects.writes {
                    self.memory.write(*buffer, *start, words, step)?;
                }
                if let Some(append) = &effects.append {
                    self.memory.append(append, step)?;
                }
            }
            let step = Step { device, ..steps[0] };
            task.signal.map_or(Ok(()), |counter| self.memory.signal(counter, step))
        })();
        stored.map_err(|fault| self.trap(worker, progress.task, fault))?;
        if self.trace.is_some() {
            let fired = self.fired(worker, progress.task, &effects[0]);
            self.trace.get_or_insert_default().push(fired);
        }
        *progress = Progress { task: progress.task + 1, ..Progress::default() };
        Ok(())
    }

    /// Checks the end of a step: the chosen token, and that no other task is left.
    fn end(&self, worker: usize, progress: &Progress, token: u32, left: u64) -> Result<(), Trap> {
        let vocab = self.program.dims.vocab;
        if left > 0 {
            return Err(self.trap(worker, progress.task - 1, Fault::EarlyEnd(left)));
        }
        if token >= vocab {
            return Err(self.trap(worker, progress.task - 1, Fault::BadToken { token, vocab }));
        }
        Ok(())
    }

    fn context<'m>(&'m self, worker: usize, progress: &Progress, step: Step) -> Context<'m> {
        let queue = &self.program.workers[worker];
        let task = &queue.tasks[progress.task];
        let here = |layer: Option<u16>| layer.is_none_or(|layer| layer == task.layer);
        let defect = self.defect.filter(|&(_, layer)| here(layer)).map(|(defect, _)| defect);
        let token = Defect::token(defect, step.token, self.program.dims.vocab);
        Context {
            task,
            defect,
            step: Step { token, ..self.on_device(worker, step) },
            memory: &self.memory,
            packed: &self.packed,
            products: None,
            window_defect: self.window_defect,
        }
    }

    /// The step as the worker's device sees it.
    fn on_device(&self, worker: usize, step: Step) -> Step {
        Step { device: self.program.device_of(WorkerId(worker as u32)), ..step }
    }

    fn trap(&self, worker: usize, task: usize, fault: Fault) -> Trap {
        let opcode = self.program.workers[worker]
            .tasks
            .get(task)
            .map_or(abi::Opcode::Nop, |task| task.opcode);
        let (worker, task) = (WorkerId(worker as u32), task as u32);
        Trap { worker, task, opcode, epoch: self.epoch, fault }
    }

    fn waiting(&self, workers: &[Progress], step: Step) -> Vec<Waiting> {
        let waiting = |(worker, progress): (usize, &Progress)| {
            let step = self.on_device(worker, step);
            let task = self.program.workers[worker].tasks.get(progress.task)?;
            let counter = task.waits.iter().find_map(|wait| {
                let (have, need) = (
                    self.memory.counter(wait.counter, step).ok()?,
                    u64::from(step.epoch) * u64::from(wait.count),
                );
                (have < need).then_some(On::Counter { counter: wait.counter, have, need })
            });
            let word = || {
                let span = *progress.inputs.as_ref()?.get(progress.scan.0)?;
                let (word, have) = self.memory.missing_tag(span, progress.scan.1, step).ok()??;
                let (buffer, need) = (span.buffer, step.epoch);
                Some(On::Word { buffer, word: span.start + word, have, need })
            };
            let (worker, task) = (WorkerId(worker as u32), progress.task as u32);
            Some(Waiting { worker, task, on: counter.or_else(word)? })
        };
        workers.iter().enumerate().filter_map(waiting).collect()
    }
}

#[cfg(test)]
mod tests;
