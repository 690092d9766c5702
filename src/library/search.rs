//! A search that a program starts and follows.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::PathBuf;

use search::{Budget, Trial};

use crate::cli::{DeviceChoice, LoopArgs};
use crate::commands::search_loop::{self, Found, Progress, Watch};
use crate::failure::Failure;
use crate::report::Answer;

/// A search for the fastest schedule of a model: `amk loop`, called from a program.
///
/// Every finished trial is in the ledger of its folder before the callback gets it; [`resume`](Self::resume) goes on
/// after any end.
///
/// ```
/// use std::ops::ControlFlow;
///
/// let folder = tempfile::tempdir()?;
/// let mut kept = 0;
/// let found = amk::Search::new("toy")
///     .device(amk::DeviceChoice::Cpu)
///     .budget(amk::Budget::Trials(4))
///     .out(folder.path().join("search"))
///     .on_trial(|trial| {
///         kept += u32::from(trial.outcome == amk::Outcome::Kept);
///         ControlFlow::Continue(())
///     })
///     .run()?;
/// assert_eq!((found.n_trials, found.n_correct), (4, 4));
/// assert_eq!(found.n_kept as u32, kept);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A wrong argument is an error that says what is legal:
///
/// ```
/// let failure = amk::Search::new("no-such-model").run().unwrap_err();
/// assert_eq!(failure.exit, amk::Exit::Usage);
/// ```
#[must_use = "a search runs when `run` is called"]
pub struct Search<'a> {
    args: LoopArgs,
    watch: Option<&'a dyn Watch>,
    on_trial: Option<OnTrial<'a>>,
    stop_when: Option<Box<dyn Fn() -> bool + 'a>>,
}

type OnTrial<'a> = Box<dyn FnMut(&Trial) -> ControlFlow<()> + 'a>;

impl<'a> Search<'a> {
    /// A search on a model: a Hugging Face folder, a model of the Hub (ORG/NAME) or a preset such as `toy`.
    pub fn new(model: impl Into<String>) -> Self {
        Self::of(LoopArgs { model: Some(model.into()), ..LoopArgs::default() })
    }

    /// The search in `folder`, continued. Its terms are those in its ledger; [`budget`](Self::budget) may be larger.
    pub fn resume(folder: impl Into<PathBuf>) -> Self {
        Self::of(LoopArgs { resume: true, out: Some(folder.into()), ..LoopArgs::default() })
    }

    /// The search that these arguments describe.
    pub(crate) fn of(args: LoopArgs) -> Self {
        Self { args, watch: None, on_trial: None, stop_when: None }
    }

    /// What runs the model. Default: the GPU if there is one, else the CPU, which predicts.
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.args.place.device = device;
        self
    }

    /// The GPU to schedule for, such as `h100`. Default: the live device, else `h200`.
    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.args.place.target = Some(target.into());
        self
    }

    /// When to end. Default: after 64 trials.
    pub fn budget(mut self, budget: Budget) -> Self {
        self.args.budget = Some(budget);
        self
    }

    /// The seed of the proposals and of the gate's tokens. Default: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.args.seed = Some(seed);
        self
    }

    /// Tokens of context that schedules are judged at. Default: one context of about 128 tokens.
    pub fn contexts(mut self, tokens: impl Into<Vec<u32>>) -> Self {
        self.args.context = tokens.into();
        self
    }

    /// The folder of the ledger, the table and the best schedule; a new or empty one. Default: a new folder in `runs`.
    pub fn out(mut self, folder: impl Into<PathBuf>) -> Self {
        self.args.out = Some(folder.into());
        self
    }

    /// The store of the results of all searches; `none` for no store. Default: `store.sqlite` beside the folder.
    pub fn store(mut self, file: impl Into<PathBuf>) -> Self {
        self.args.store = Some(file.into());
        self
    }

    /// Calls `on_trial` with each trial once it is on the disk. On `Break` the search ends before the next one.
    pub fn on_trial(mut self, on_trial: impl FnMut(&Trial) -> ControlFlow<()> + 'a) -> Self {
        self.on_trial = Some(Box::new(on_trial));
        self
    }

    /// Ends the search before the next trial once `stop` is true. It is called between trials.
    pub fn stop_when(mut self, stop: impl Fn() -> bool + 'a) -> Self {
        self.stop_when = Some(Box::new(stop));
        self
    }

    /// Reports to this observer too, which may also end the search.
    pub(crate) fn watched(mut self, watch: &'a dyn Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Searches until the budget is spent, or until a callback ends it.
    ///
    /// # Errors
    /// If arguments are wrong, a file cannot be read or written, or the device is missing or lost. Schedules that fail
    /// are rows of the ledger, no errors.
    pub fn run(self) -> Result<Found, Failure> {
        self.answer().map(|answer| answer.document)
    }

    /// The same with the exit code of the command.
    pub(crate) fn answer(self) -> Result<Answer<Found>, Failure> {
        let Self { args, watch, on_trial, stop_when } = self;
        let on_trial = RefCell::new((on_trial, false));
        search_loop::answer(&args, &Callbacks { watch, on_trial, stop_when })
    }
}

/// The callbacks of a program, and the observer of a command.
struct Callbacks<'a> {
    watch: Option<&'a dyn Watch>,
    /// The callback for trials, and whether it has ended the search.
    on_trial: RefCell<(Option<OnTrial<'a>>, bool)>,
    stop_when: Option<Box<dyn Fn() -> bool + 'a>>,
}

impl Watch for Callbacks<'_> {
    fn stopped(&self) -> bool {
        self.on_trial.borrow().1
            || self.stop_when.as_ref().is_some_and(|stop| stop())
            || self.watch.is_some_and(Watch::stopped)
    }

    fn prepares(&self, resume: &str) {
        self.watch.iter().for_each(|watch| watch.prepares(resume));
    }

    fn begins(&self, progress: &Progress) {
        self.watch.iter().for_each(|watch| watch.begins(progress));
    }

    fn trial(&self, progress: &Progress, trial: &Trial) {
        self.watch.iter().for_each(|watch| watch.trial(progress, trial));
        let (on_trial, stopped) = &mut *self.on_trial.borrow_mut();
        if let Some(on_trial) = on_trial {
            *stopped |= on_trial(trial).is_break();
        }
    }
}
