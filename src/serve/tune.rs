//! `amk serve --tune`: the search of `amk loop`, on the machine of the server between its requests.
//!
//! The search has a thread of its own, which lowers, compiles and decides. What needs the machine is a task for the
//! thread that owns it, done while no request is in the server, or in a turn where there always is one. A schedule that the
//! search is to keep passes the gate once more, on other tokens, and then runs the requests that come; otherwise the search
//! goes on from the one before. The confirmation at the end can still roll it back.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use search::{Device, Interval};

use super::Lowered;
use super::decode::{Admission, BetweenRequests, EngineLoop, Job, PATIENCE, Task};
use crate::cli::{LoopArgs, ServeArgs, TuneStart};
use crate::commands::search_loop;
use crate::context::Context;
use crate::device::hardware::{CardIdentity, Hardware, ThisMachine};
use crate::engine::{KernelTable, Preempt};
use crate::failure::Failure;
use crate::observe::Sequences;
use crate::report;

mod adopter;
mod figures;
mod machine;
mod plant;

use adopter::Adopter;
use figures::NOTHING;
pub(super) use figures::TuneFigures;
use machine::{Machine, ask};
use plant::Plant;

/// How long the end of the server waits for the search, which stops after its current trial.
const GRACE: Duration = Duration::from_secs(10);

/// The priority of the search's threads on the CPU, the lowest.
const NICE: i32 = 19;

/// What the search and the server share.
struct Tuned {
    args: LoopArgs,
    /// The schedule that the server began with, and its number among the kernels.
    start: (ScheduleConfig, Arc<Verified<Program>>, usize),
    /// Whether it tries two levers that it must not keep.
    plants: bool,
    /// How many sequences its kernel decodes at once: the context's steps have as many.
    seqs: u32,
    table: Arc<KernelTable>,
    figures: Arc<TuneFigures>,
    admission: Admission,
    said: Sequences,
    tasks: mpsc::Sender<Task>,
    /// How long it waits for an idle moment.
    patience: Duration,
    /// Whether it has the machine although requests wait.
    has_turn: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

/// A search that tunes a server.
pub(super) struct Tuner {
    tuned: Tuned,
    between: BetweenRequests,
}

/// The search of these arguments; none without `--tune`. Refuses what it cannot tune, or what would no longer be true.
pub(super) fn tuner(
    args: &ServeArgs,
    (device, lowered): (&str, Option<&Lowered>),
    (table, said): (&Arc<KernelTable>, &Sequences),
    admission: &Admission,
) -> Result<Option<Tuner>, Failure> {
    if !args.tune.tune {
        return Ok(None);
    }
    args.model.place.kv.only_f16("a search (--tune)")?;
    let refused = |why: &str| Err(Failure::usage(format!("--tune: {why}")));
    let Some(lowered) = lowered else {
        return refused("--device eval runs the graph, which has no schedule");
    };
    if args.deterministic {
        return refused(
            "a request with a seed would have other tokens after a switch; drop --deterministic",
        );
    }
    if args.log.command_log.is_some() {
        return refused("a command log names its kernels at the beginning; drop --command-log");
    }
    // Where kernels are switched by load, the one for a lone sequence is tuned; else the only one.
    let (number, one) = match &lowered.lone {
        Some(lone) => (1, &**lone),
        None => (0, lowered),
    };
    if device == "cuda" && vm_host::default_cache().is_none() {
        return refused(
            "kernels are compiled beside requests into a cache; set AMK_CACHE to a folder",
        );
    }
    let terms = LoopArgs {
        model: Some(args.model.model.clone()),
        place: args.model.place.clone(),
        budget: args.tune.budget,
        goal: args.tune.goal,
        stop_within: args.tune.stop_within,
        out: args.tune.out.clone(),
        start: Some(TuneStart { config: one.config, planted: Vec::new() }),
        batch: (one.seqs > 1).then_some(one.seqs),
        ..LoopArgs::default()
    };
    search_loop::check(&terms)?;
    let (tasks, inbox) = mpsc::channel();
    let (patience, has_turn) = (PATIENCE, Arc::<AtomicBool>::default());
    let figures = Arc::new(TuneFigures::new(said));
    figures.serves(&one.config.id(), &KernelTable::name(one.seqs, &one.program), NOTHING);
    let tuned = Tuned {
        args: terms,
        start: (one.config, one.program.clone(), number),
        plants: args.tune.tune_plant,
        seqs: one.seqs,
        table: table.clone(),
        figures: figures.clone(),
        admission: admission.clone(),
        said: said.clone(),
        tasks,
        patience,
        has_turn: has_turn.clone(),
        over: Arc::default(),
    };
    let between = BetweenRequests::new(inbox, patience, has_turn, figures);
    Ok(Some(Tuner { tuned, between }))
}

impl Tuner {
    /// Whether a request has come that ends the search's work early.
    pub(super) fn preempt(&self) -> Preempt {
        let (admission, has_turn) = (self.tuned.admission.clone(), self.tuned.has_turn.clone());
        Arc::new(move || admission.inside() > 0 && !has_turn.load(Ordering::Relaxed))
    }

    /// Another time to wait for an idle moment.
    #[cfg(test)]
    fn patient_for(self, patience: Duration) -> Self {
        let Self { tuned, between } = self;
        Self { tuned: Tuned { patience, ..tuned }, between: between.patient_for(patience) }
    }

    pub(super) fn figures(&self) -> &TuneFigures {
        &self.tuned.figures
    }

    /// Runs the server with the search beside it. At the end the search stops after its current trial, or with the
    /// process: its ledger has every finished trial.
    ///
    /// # Errors
    /// As [`EngineLoop::run`].
    pub(super) fn beside(
        self,
        context: &Arc<Context>,
        engine_loop: EngineLoop<'_>,
        inbox: &mpsc::Receiver<Job>,
    ) -> Result<(), String> {
        let Self { tuned, between } = self;
        let (context, over) = (context.clone(), tuned.over.clone());
        let (end, ended) = mpsc::channel::<()>();
        let run = move || {
            let _end = end; // dropped however the thread ends
            // Its threads inherit this: those of requests come first.
            let _ = rustix::process::setpriority_process(None, NICE);
            match rayon::ThreadPoolBuilder::new().build() {
                Ok(pool) => pool.install(|| tuned.run(&context)),
                Err(_) => tuned.run(&context),
            }
        };
        let thread = std::thread::Builder::new().name("tune".to_owned()).spawn(run);
        if let Err(error) = thread {
            report::say(&format!("tune: no thread: {error}"));
        }
        let worked = engine_loop.tuned(between).run(inbox);
        over.store(true, Ordering::Relaxed);
        let _ = ended.recv_timeout(GRACE);
        worked
    }
}

impl Tuned {
    fn run(&self, context: &Context) {
        let kernel_id = |kernel: &_| context.kernel_id(kernel);
        let config = self.start.0;
        let plant = self.plants.then(|| Plant::of(context, &config));
        let planted = plant.iter().flat_map(|plant| [plant.slow, plant.wrong]).collect();
        let args = LoopArgs { start: Some(TuneStart { config, planted }), ..self.args.clone() };
        let wrong = plant.map(|plant| plant.wrong);
        let state = RefCell::default();
        let adopter = Adopter { tuned: self, context, kernel_id: &kernel_id, wrong, state };
        let found = search_loop::answer_in(&args, &adopter, self, context);
        match found {
            Ok(found) => adopter.ended(&found.document),
            Err(_) if self.is_over() => {} // the machine has gone with the server
            Err(failure) => {
                self.figures.state("failed");
                report::say(&format!("tune: the search ended: {}", failure.message));
            }
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Runs later sequences by a program that has passed its gates.
    fn switch(
        &self,
        config: &ScheduleConfig,
        program: &Arc<Verified<Program>>,
        gain: Interval,
    ) -> Result<(), String> {
        let number = self.table.add(self.seqs, program);
        let number = number.ok_or("the server has had as many schedules as it can name")?;
        let (kernel, program, slot) = (config.kernel, program.clone(), self.start.2);
        let (table, said) = (self.table.clone(), self.said.clone());
        let name = KernelTable::name(self.seqs, &program);
        let switched = ask(&self.tasks, move |engine| {
            engine.switch(number, &program, &kernel)?;
            said.program(slot, &program);
            if slot == 0 {
                table.begin_with(number);
            }
            Ok::<(), String>(())
        });
        switched.map_err(|error| error.to_string())??;
        self.figures.serves(&config.id(), &name, gain);
        report::say(&format!(
            "tune: schedule {} runs now ({name}), which saves {:.1}% of the first one's time",
            config.id(),
            100.0 * gain.low
        ));
        Ok(())
    }
}

impl Hardware for Tuned {
    fn host(&self) -> String {
        ThisMachine.host()
    }

    fn boot(&self) -> String {
        ThisMachine.boot()
    }

    fn live_card(&self) -> Option<CardIdentity> {
        ThisMachine.live_card()
    }

    fn open<'a>(
        &self,
        context: &'a Context,
        _: &LoopArgs,
    ) -> Result<Option<Box<dyn Device + 'a>>, Failure> {
        let device = Machine::open(&self.tasks, context)
            .map_err(|error| Failure::missing(error.to_string()))?;
        Ok(device.map(|device| Box::new(device) as Box<dyn Device + 'a>))
    }
}

#[cfg(test)]
mod tests;
