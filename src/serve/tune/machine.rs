//! The machine of a running server as the device of a search.

use std::sync::{Arc, mpsc};
use std::time::Instant;

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
    /// Whether it gives wrong values, for a test.
    spoils: bool,
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
            spoils: false,
        }))
    }

    /// Whether runs give wrong values from now on.
    pub(super) fn spoil(&mut self, spoils: bool) {
        self.spoils = spoils;
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

/// Times the first round of a plan, and more of them for as long as that one took: where requests had the machine, their
/// tokens are run again before it, which takes longer than a round. A request costs the round that it comes in.
fn some_rounds(
    bench: &mut dyn Bench,
    handles: [Handle; 2],
    plan: &Plan<'_>,
    vocab: usize,
) -> Result<Samples, DeviceError> {
    let one = |bench: &mut dyn Bench, warmup| {
        let mut last = vec![0.0; 2 * vocab];
        let (rounds, last_chosen) =
            bench.time(handles, &Plan { rounds: 1, warmup, ..*plan }, &mut last)?;
        let (incumbent, candidate) = last.split_at(vocab);
        let last_logits = [incumbent.to_vec(), candidate.to_vec()];
        Ok(Samples { rounds, last_logits, last_chosen, ..Samples::default() })
    };
    let began = Instant::now();
    let mut done = one(bench, plan.warmup)?;
    let until = began + 2 * began.elapsed();
    while done.rounds.len() < plan.rounds && Instant::now() < until {
        match one(bench, 0) {
            Ok(more) => done.extend(more),
            Err(_) if bench.take_preempted() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
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
        let (mut rows, chosen) = self.on(move |bench| {
            if first > 0 && !bench.holds(program, &tokens[..first]) {
                // A request has had the machine since.
                let mut rows = vec![0.0; first * vocab];
                bench.run(program, &tokens[..first], 0, &mut rows)?;
            }
            let mut rows = vec![0.0; (tokens.len() - first) * vocab];
            let chosen = bench.run(program, &tokens, first, &mut rows)?;
            Ok((rows, chosen))
        })?;
        if self.spoils {
            rows.iter_mut().for_each(|value| *value = 1.0 - *value);
        }
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

    /// Times a few rounds at a time, so that a request costs a search no more than one.
    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        let handles = contenders.map(|contender| contender.handle());
        let mut samples = Samples::default();
        while samples.rounds.len() < plan.rounds {
            let (tokens, first, vocab) = (plan.tokens.to_vec(), plan.first, self.vocab);
            let warmup = if samples.rounds.is_empty() { plan.warmup } else { 0 };
            let rounds = plan.rounds - samples.rounds.len();
            samples.extend(self.on(move |bench| {
                let plan = Plan { tokens: &tokens, first, rounds, warmup };
                some_rounds(bench, handles, &plan, vocab)
            })?);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use remote::Served;

    use super::*;

    /// A machine whose first round takes 100 ms and whose others take none; a request comes in one of them.
    struct Rounds {
        timed: usize,
        preempted_in: usize,
        preempted: bool,
    }

    impl Served for Rounds {
        fn describe(&self) -> DeviceInfo {
            DeviceInfo::default()
        }

        fn prepare(
            &mut self,
            _: &Arc<Verified<Program>>,
            _: &KernelConfig,
        ) -> Result<Handle, DeviceError> {
            Ok(Handle(0))
        }

        fn run(
            &mut self,
            _: Handle,
            _: &[u32],
            _: usize,
            _: &mut [f32],
        ) -> Result<Vec<u32>, DeviceError> {
            Ok(Vec::new())
        }

        fn time(
            &mut self,
            _: [Handle; 2],
            plan: &Plan<'_>,
            _: &mut [f32],
        ) -> Result<(Vec<[f64; 4]>, [u32; 2]), DeviceError> {
            self.timed += 1;
            assert_eq!((plan.rounds, plan.warmup), (1, usize::from(self.timed == 1)));
            if self.timed == self.preempted_in {
                self.preempted = true;
                return Err(DeviceError::Unavailable { reason: "a request came".to_owned() });
            }
            if self.timed == 1 {
                std::thread::sleep(Duration::from_millis(100));
            }
            Ok((vec![[self.timed as f64; 4]], [0; 2]))
        }

        fn release(&mut self, _: Handle) {}
    }

    impl Bench for Rounds {
        fn holds(&self, _: Handle, _: &[u32]) -> bool {
            false
        }

        fn take_preempted(&mut self) -> bool {
            std::mem::take(&mut self.preempted)
        }
    }

    /// Rounds of a plan of ten that one task times, and whether it is made again.
    fn timed(preempted_in: usize) -> (Vec<f64>, bool) {
        let mut bench = Rounds { timed: 0, preempted_in, preempted: false };
        let plan = Plan { tokens: &[1, 2], first: 1, rounds: 10, warmup: 1 };
        let done = some_rounds(&mut bench, [Handle(0); 2], &plan, 1).unwrap_or_default();
        (done.rounds.iter().map(|round| round[0]).collect(), bench.take_preempted())
    }

    /// What precedes a first round is paid once, and a request costs the round that it comes in.
    #[test]
    fn a_task_times_several_rounds_and_a_request_ends_it_early() {
        assert_eq!(timed(0), ((1..=10).map(f64::from).collect(), false));
        assert_eq!(timed(3), (vec![1.0, 2.0], false));
        assert_eq!(timed(1), (Vec::new(), true), "there is nothing to keep");
    }
}
