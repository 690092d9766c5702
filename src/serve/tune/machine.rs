//! The machine of a running server as the device of a search.

use std::sync::{Arc, mpsc};

use ir::BufferId;
use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use search::{
    Clocks, Contender, Costs, Device, DeviceError, DeviceInfo, Handle, Plan, Ran, Samples,
};

use crate::cli::DeviceChoice;
use crate::context::Context;
use crate::device::{Compiler, clocks};
use crate::engine::{Bench, Engine};
use crate::serve::decode::Task;

/// Does something with the engine of a server between requests.
pub(super) fn ask<T: Send + 'static>(
    tasks: &mpsc::Sender<Task>,
    act: impl FnOnce(&mut dyn Engine) -> T + Send + 'static,
) -> Result<T, DeviceError> {
    let gone = || DeviceError::Unavailable { reason: "the server has ended".to_owned() };
    let (to, answer) = mpsc::sync_channel(1);
    let task: Task = Box::new(move |engine| drop(to.send(act(engine))));
    tasks.send(task).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())
}

/// The machine. A call that a request ends early is made again when there is time.
pub(super) struct Machine<'a> {
    tasks: mpsc::Sender<Task>,
    info: DeviceInfo,
    vocab: usize,
    /// None on a machine that compiles nothing.
    compiler: Option<Compiler<'a>>,
    programs: Vec<(Arc<Verified<Program>>, KernelConfig, Handle)>,
    costs: Costs,
}

impl<'a> Machine<'a> {
    /// `None` if the engine has nothing to time: then predictions are compared.
    pub(super) fn open(
        tasks: &mpsc::Sender<Task>,
        context: &'a Context,
    ) -> Result<Option<Self>, DeviceError> {
        let info = ask(tasks, |engine| engine.bench().map(|bench| bench.describe()))?;
        let compiles = context.device != DeviceChoice::Cpu;
        Ok(info.map(|info| Self {
            tasks: tasks.clone(),
            info,
            vocab: context.graph().vocab as usize,
            compiler: compiles.then(|| Compiler::new(context)),
            programs: Vec::new(),
            costs: Costs::default(),
        }))
    }

    /// Does something with the machine, again until no request ends it early.
    fn on<T: Send + 'static>(
        &mut self,
        act: impl Fn(&mut dyn Bench) -> Result<T, DeviceError> + Send + Sync + 'static,
    ) -> Result<T, DeviceError> {
        let act = Arc::new(act);
        loop {
            let act = act.clone();
            let done = ask(&self.tasks, move |engine| {
                let bench = engine.bench()?;
                let done = act(bench);
                Some((done, bench.take_preempted(), bench.costs()))
            });
            let gone = || DeviceError::Unavailable { reason: "there is no machine".to_owned() };
            let (done, preempted, costs) = done?.ok_or_else(gone)?;
            self.costs = costs;
            if !preempted {
                return done;
            }
        }
    }

    fn place(&self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) -> Option<usize> {
        self.programs.iter().position(|(known, of, _)| Arc::ptr_eq(known, program) && of == kernel)
    }
}

impl Device for Machine<'_> {
    fn describe(&self) -> DeviceInfo {
        self.info.clone()
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        if let Some(place) = self.place(program, kernel) {
            return Ok(self.programs[place].2);
        }
        self.compiler.iter().try_for_each(|compiler| compiler.compile(kernel))?;
        // A program of its own: a device knows programs by their allocation, and the search releases what the server may
        // still run.
        let (of, with) = (Arc::new(Verified::clone(program)), *kernel);
        let handle = self.on(move |bench| bench.prepare_searched(&of, &with))?;
        self.programs.push((program.clone(), *kernel, handle));
        Ok(handle)
    }

    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        let (tokens, vocab) = (tokens.to_vec(), self.vocab);
        let (rows, chosen) = self.on(move |bench| {
            if first > 0 && !bench.holds(program, &tokens[..first]) {
                // A request has had the machine since.
                let mut rows = vec![0.0; first * vocab];
                bench.run(program, &tokens[..first], 0, &mut rows)?;
            }
            let mut rows = vec![0.0; (tokens.len() - first) * vocab];
            let chosen = bench.run(program, &tokens, first, &mut rows)?;
            Ok((rows, chosen))
        })?;
        let logits = rows.chunks(vocab).map(<[f32]>::to_vec).collect();
        Ok(Ran { logits, chosen, ..Ran::default() })
    }

    fn buffers(
        &mut self,
        program: Handle,
        which: &[BufferId],
    ) -> Result<Option<Vec<Vec<f32>>>, DeviceError> {
        let which = which.to_vec();
        self.on(move |bench| bench.buffers(program, &which))
    }

    fn foresee(&mut self, kernels: &[KernelConfig]) {
        self.compiler.iter_mut().for_each(|compiler| compiler.foresee(kernels));
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn clocks(&mut self) -> Option<Clocks> {
        self.info.uuid.as_deref().and_then(clocks)
    }

    /// Times round by round, so that a request costs a search no more than one.
    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let handles = contenders.map(|contender| contender.handle());
        let mut samples = Samples::default();
        for round in 0..plan.rounds {
            let (tokens, first, vocab) = (plan.tokens.to_vec(), plan.first, self.vocab);
            let warmup = if round == 0 { plan.warmup } else { 0 };
            let (times, last, chosen) = self.on(move |bench| {
                let plan = Plan { tokens: &tokens, first, rounds: 1, warmup };
                let mut last = vec![0.0; 2 * vocab];
                let (times, chosen) = bench.time(handles, &plan, &mut last)?;
                Ok((times, last, chosen))
            })?;
            samples.rounds.extend(times);
            let (incumbent, candidate) = last.split_at(vocab);
            samples.last_logits = [incumbent.to_vec(), candidate.to_vec()];
            samples.last_chosen = chosen;
        }
        Ok(samples)
    }

    fn release(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) {
        let Some(place) = self.place(program, kernel) else { return };
        let (_, _, handle) = self.programs.swap_remove(place);
        // An error means that the server has ended.
        let _ = self.on(move |bench| {
            bench.release(handle);
            Ok(())
        });
    }
}
