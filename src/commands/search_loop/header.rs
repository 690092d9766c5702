//! The terms of a search: fixed when it starts, kept in the ledger's first row, and read back on resuming.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::ValueEnum as _;
use ir::program::GraphShape;
use ir::schedule::ScheduleConfig;
use search::strategy::{KnownRun, StrategyName};
use search::{Budget, Conditions, DeviceInfo, Enough, LatencyKind, TIMED_TOKENS};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cli::{ConfigArgs, DeviceChoice, LoopArgs, PlaceArgs, ScheduleChoice};
use crate::context::Context;
use crate::failure::Failure;
use crate::schedule_choice::{Auto, Chosen, choose, for_steps};

/// The model if none is named: real shapes, and small enough for two cores.
const DEFAULT_MODEL: &str = "smollm2-135m";

const DEFAULT_BUDGET: Budget = Budget::Trials(64);

/// Least gains worth keeping: measurements are noisy, predictions are not.
pub(crate) const MIN_GAIN_MEASURED: f64 = 0.01;
const MIN_GAIN_PREDICTED: f64 = 0.001;

/// How many of the best schedules a measured search races at its end.
const FINALISTS: usize = 5;

/// Folder of the searches if none is named.
const RUNS: &str = "runs";

/// A search's terms: the ledger's first record. Fields that older ledgers lack are optional.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Header {
    /// The ledger's schema id, which the ledger fills in.
    schema: Option<String>,
    /// The unique id of the search.
    run: Option<String>,
    #[serde(default)]
    began_unix_s: u64,
    amk: Option<String>,
    commit: Option<String>,
    protocol: Option<u32>,
    pub(super) model: String,
    pub(super) graph: String,
    /// The graph's id and shape.
    graph_id: Option<String>,
    #[serde(default)]
    shape: Value,
    pub(super) target: String,
    #[serde(rename = "latency_kind")]
    pub(super) kind: String,
    pub(super) device: String,
    pub(super) seed: u64,
    pub(super) budget: Budget,
    #[serde(flatten)]
    pub(super) enough: Enough,
    pub(super) explore: u64,
    #[serde(default = "hill_climb")]
    pub(super) strategy: StrategyName,
    /// The trials of other searches in the store when the search began.
    #[serde(default, rename = "prior")]
    pub(super) known: Vec<KnownRun>,
    pub(super) proposer: Option<String>,
    pub(super) min_gain: f64,
    /// How many of the best schedules race at the end; none in ledgers before there was a race.
    #[serde(default)]
    pub(super) finalists: usize,
    pub(super) kv_capacity: Option<u32>,
    /// The contexts that schedules are judged at, ascending; none for the end of the gate's tokens.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) contexts: Vec<u32>,
    /// Sequences of a step; none for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) batch: Option<u32>,
    /// Whether schedules of several GPUs may give other bits than the first one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    other_bits: bool,
    /// The conditions of the measurement; none if predicted. Of several cards, those of the first.
    conditions: Option<Conditions>,
    /// The device's cache, which roofline bounds depend on.
    cache_bytes: u64,
    /// The start of the search; none in ledgers before there was a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<Start>,
    /// The conditions of each card of a search with several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) cards: Vec<Conditions>,
    #[serde(skip)]
    resumed: bool,
}

/// The contexts of the arguments, ascending and each once.
fn contexts(args: &LoopArgs) -> Vec<u32> {
    let found: std::collections::BTreeSet<u32> = args.context.iter().copied().collect();
    found.into_iter().collect()
}

fn listed(contexts: &[u32]) -> String {
    contexts.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The strategy of ledgers from before there was a choice.
fn hill_climb() -> StrategyName {
    StrategyName::HillClimb
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Start {
    source: Value,
    config: ScheduleConfig,
}

impl Header {
    /// The terms of a new search, as far as the arguments determine them.
    pub(super) fn fresh(args: &LoopArgs) -> Result<Self, Failure> {
        args.place.kv.only_f16("a search")?;
        let budget = args.budget.unwrap_or(DEFAULT_BUDGET);
        Ok(Self {
            schema: None,
            // A unique id.
            run: Some(corpus::store::fresh_run_id(&format!(
                "{:?} {} {}",
                SystemTime::now(),
                std::process::id(),
                std::env::current_dir().unwrap_or_default().display()
            ))),
            began_unix_s: unix_s(),
            amk: Some(env!("CARGO_PKG_VERSION").to_owned()),
            commit: option_env!("AMK_COMMIT").map(str::to_owned),
            protocol: Some(search::PROTOCOL),
            model: args.model.clone().unwrap_or_else(|| DEFAULT_MODEL.to_owned()),
            graph: String::new(),
            graph_id: None,
            shape: Value::Null,
            target: args.place.target.clone().unwrap_or_default(),
            kind: String::new(),
            device: String::new(),
            seed: args.seed.unwrap_or(0),
            budget,
            enough: enough(args)?,
            explore: budget.explore(),
            strategy: args.strategy.unwrap_or_default(),
            known: Vec::new(),
            proposer: args.proposer.clone(),
            min_gain: min_gain(args)?.unwrap_or(f64::NAN),
            finalists: FINALISTS,
            kv_capacity: args.place.kv_capacity,
            contexts: contexts(args),
            batch: args.batch,
            other_bits: args.allow_other_bits,
            conditions: None,
            cache_bytes: 0,
            start: None,
            cards: Vec::new(),
            resumed: false,
        })
    }

    /// The terms of a ledger. Contradicting arguments are refused, but the budget may grow.
    pub(super) fn resumed(args: &LoopArgs, held: &Value, path: &Path) -> Result<Self, Failure> {
        let found = serde_json::from_value::<Self>(held.clone()).map_err(|error| {
            Failure::usage(format!(
                "{} has a header of another version of amk ({error}), which this one can read and compare but not resume; \
                 start a new search in another --out",
                path.display()
            ))
        })?;
        let mut found = Self { resumed: true, ..found };
        found.refuse_changes(args, path)?;
        found.refuse_to_run_a_file(args, path)?;
        if let Some(budget) = args.budget {
            found.budget = budget;
        }
        let given = enough(args)?;
        found.enough.goal = given.goal.or(found.enough.goal);
        found.enough.stop_within = given.stop_within.or(found.enough.stop_within);
        Ok(found)
    }

    /// A proposer command comes from this command line or not at all: a forged ledger could contain any command.
    fn refuse_to_run_a_file(&self, args: &LoopArgs, path: &Path) -> Result<(), Failure> {
        match &self.proposer {
            Some(command) if args.proposer.as_ref() != Some(command) => {
                Err(Failure::usage(format!(
                    "{} has its proposals from the command {command:?}, and a command out of a file is never run; \
                     if you know it and trust it, give it again on the command line with --proposer (no tool takes it), \
                     or start a new search in another --out",
                    path.display()
                )))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn refuse_changes(&self, args: &LoopArgs, path: &Path) -> Result<(), Failure> {
        let strategy = self.strategy.name().to_owned();
        let proposer = self.proposer.clone();
        let devices: Vec<String> = args.devices.iter().map(ToString::to_string).collect();
        let devices = (!devices.is_empty() && self.cards.is_empty()).then(|| devices.join(","));
        let start = self.source().unwrap_or_default();
        let start = start.get("kind").and_then(Value::as_str).unwrap_or("neutral");
        let schedule = args.schedule.filter(|choice| *choice != ScheduleChoice::Auto);
        let schedule = schedule.and_then(|choice| choice.to_possible_value());
        let measured = self.kind == LatencyKind::MeasuredGpu.name();
        let device = match (args.place.device, measured) {
            (DeviceChoice::Cpu, true) => Some("cpu".to_owned()),
            (DeviceChoice::Cuda, false) => Some("cuda".to_owned()),
            _ => None,
        };
        let percent = |share: f64| (100.0 * share).to_string();
        let tokens = |tokens: Option<u32>| tokens.map(|tokens| tokens.to_string());
        let gpus = ir::Target::by_name(&self.target).map_or(1, |target| target.devices).to_string();
        let terms = [
            ("--model", args.model.clone(), self.model.clone()),
            ("--target", args.place.target.clone(), self.target.clone()),
            ("--gpus", args.place.gpus.map(|gpus| gpus.count().to_string()), gpus),
            ("--seed", args.seed.map(|seed| seed.to_string()), self.seed.to_string()),
            (
                "--proposer",
                args.proposer.clone(),
                proposer.clone().unwrap_or_else(|| format!("strategy {strategy}")),
            ),
            (
                "--strategy",
                args.strategy.map(|strategy| strategy.name().to_owned()),
                proposer.unwrap_or(strategy),
            ),
            ("--min-gain", min_gain(args)?.map(percent), percent(self.min_gain)),
            (
                "--kv-capacity",
                tokens(args.place.kv_capacity),
                tokens(self.kv_capacity).unwrap_or_default(),
            ),
            (
                "--context",
                Some(listed(&contexts(args))).filter(|given| !given.is_empty()),
                listed(&self.contexts),
            ),
            ("--batch", tokens(args.batch), tokens(self.batch).unwrap_or_else(|| "1".to_owned())),
            (
                "--allow-other-bits",
                args.allow_other_bits.then(|| "given".to_owned()),
                if self.other_bits { "given" } else { "not given" }.to_owned(),
            ),
            ("--devices", devices, "it has no cards by number".to_owned()),
            ("--schedule", schedule.map(|value| value.get_name().to_owned()), start.to_owned()),
            ("--device", device, self.kind.clone()),
        ];
        for (flag, given, held) in terms {
            if let Some(given) = given.filter(|given| *given != held) {
                return Err(Failure::usage(format!(
                    "{flag} {given} contradicts {} ({held}); leave it out, or start a new search in another --out",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    /// The terms with the start schedule of a new search.
    pub(super) fn with_start(
        mut self,
        args: &LoopArgs,
        context: &Context,
    ) -> Result<Self, Failure> {
        if !self.resumed {
            for &tokens in &self.contexts {
                context.check_timed(tokens, TIMED_TOKENS as u32, context.kv_capacity)?;
            }
            let raced = args.fixed.as_ref().and_then(|fixed| fixed.race);
            self.start = raced.map(|[config, _]| Start { source: json!({"kind": "race"}), config });
            if let Some(start) = &args.start {
                let config = start.config;
                self.start = Some(Start { source: json!({"kind": "served"}), config });
            }
        }
        if !self.resumed && self.start.is_none() {
            let given = ConfigArgs { config: None, schedule: args.schedule };
            let tokens = self.predicted_at(context)[0];
            let Chosen { config, source } = choose(context, &given, tokens, Auto::Reproducible)?;
            // A found one is of as many sequences, and the neutral one is what it is.
            let kept = ["found", "neutral"].contains(&source.kind);
            let config = if kept { config } else { for_steps(context, config) };
            self.start = Some(Start { source: json!(source), config });
        }
        if self.other_bits && context.target.devices == 1 {
            return Err(Failure::usage("--allow-other-bits is about several GPUs; add --gpus"));
        }
        if self.kept_bits(context).is_some() && self.proposer.is_some() {
            return Err(Failure::usage(
                "the schedules of a --proposer may differ from one GPU's in the last bits of their results: add --allow-other-bits",
            ));
        }
        if let Some(start) = &self.start {
            let legal = ir::schedule::validate(start.config, context.graph(), &context.target);
            legal.map_err(|violations| {
                Failure::usage(format!("this search began with an illegal schedule: {violations}"))
            })?;
        }
        Ok(self)
    }

    /// The contexts and the sequences of a step, for people; empty if neither was chosen.
    pub(super) fn at_contexts(&self) -> String {
        let contexts = match &*self.contexts {
            [] => String::new(),
            contexts => format!(" at {} tokens of context", listed(contexts)),
        };
        let batch = self.batch.map(|batch| format!(", steps of {batch} sequences"));
        contexts + &batch.unwrap_or_default()
    }

    /// The contexts that schedules are predicted at.
    pub(super) fn predicted_at(&self, context: &Context) -> Vec<u32> {
        match &*self.contexts {
            [] => vec![context.predicted_at()],
            contexts => contexts.to_vec(),
        }
    }

    /// The schedule of the first trial. It was the neutral one before there was a choice.
    pub(super) fn start(&self, context: &Context) -> ScheduleConfig {
        self.start.as_ref().map_or_else(|| context.neutral_config(), |start| start.config)
    }

    /// The schedule whose bits all others of the search have to give: on several GPUs they are those of one.
    pub(super) fn kept_bits(&self, context: &Context) -> Option<ScheduleConfig> {
        (context.target.devices > 1 && !self.other_bits).then(|| self.start(context))
    }

    pub(super) fn source(&self) -> Option<Value> {
        self.start.as_ref().map(|start| start.source.clone())
    }

    /// Where the search runs: a resumed one runs where it ran before.
    pub(super) fn place(&self, args: &LoopArgs) -> PlaceArgs {
        let measured = self.kind == LatencyKind::MeasuredGpu.name();
        let device = match (self.resumed, measured) {
            (false, _) if !args.devices.is_empty() => DeviceChoice::Cuda,
            (false, _) => args.place.device,
            (true, true) => DeviceChoice::Cuda,
            (true, false) => DeviceChoice::Cpu,
        };
        let target = Some(self.target.clone()).filter(|target| !target.is_empty());
        // A resumed search has the number of GPUs in its target's name.
        let gpus = args.place.gpus.filter(|_| !self.resumed);
        let emulate = args.place.emulate.filter(|_| !self.resumed);
        PlaceArgs {
            target,
            device,
            kv_capacity: self.kv_capacity,
            gpus,
            emulate,
            kv: args.place.kv,
        }
    }

    /// The terms with the fields that depend on the loaded model and the opened device.
    pub(super) fn with_kind(
        mut self,
        context: &Context,
        (info, now): (Option<DeviceInfo>, Vec<Conditions>),
        several: bool,
    ) -> Result<Self, Failure> {
        let kind = match info {
            Some(_) => LatencyKind::MeasuredGpu,
            None => LatencyKind::Predicted,
        };
        if kind == LatencyKind::Predicted && context.batch > 1 {
            let message = "capability missing: --batch needs a GPU: the cost model predicts steps of one sequence";
            return Err(Failure::missing(message));
        }
        let name = info.as_ref().map_or_else(|| "cpu".to_owned(), |info| info.name.clone());
        if self.resumed {
            let one = self.conditions.as_slice();
            let then = if self.cards.is_empty() { one } else { &self.cards };
            let differs = |(then, now): (&Conditions, &Conditions)| then.differs(now);
            let (graph, here, id) = (&self.graph, &context.graph().name, context.graph().id());
            let other = if let Some(difference) = then.iter().zip(&now).find_map(differs) {
                format!("was measured elsewhere: {difference}")
            } else if name != self.device || here != graph {
                format!("ran {graph} on {}, and here is {here} on {name}", self.device)
            } else if let Some(then) = self.graph_id.as_ref().filter(|then| **then != id) {
                format!("ran another graph called {graph} (graph {then}, here {id})")
            } else {
                return Ok(self);
            };
            return Err(Failure::usage(format!(
                "this search {other}; start a new search in another --out"
            )));
        }
        self.kind = kind.name().to_owned();
        self.device = name;
        self.cache_bytes = info.map_or(0, |info| info.cache_bytes);
        self.conditions = now.first().cloned();
        if several {
            self.cards = now;
        }
        self.graph.clone_from(&context.graph().name);
        self.graph_id = Some(context.graph().id());
        self.shape = json!(GraphShape::from(context.graph()));
        self.target.clone_from(&context.target.name);
        self.kv_capacity = Some(context.kv_capacity);
        if self.min_gain.is_nan() {
            self.min_gain = match kind {
                LatencyKind::MeasuredGpu => MIN_GAIN_MEASURED,
                LatencyKind::Predicted => MIN_GAIN_PREDICTED,
            };
        }
        Ok(self)
    }
}

pub(super) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// When a search ends before its budget is spent, in fractions.
fn enough(args: &LoopArgs) -> Result<Enough, Failure> {
    let goal = args.goal.map(|percent| percent / 100.0);
    if let Some(goal) = goal.filter(|goal| !(*goal > 0.0 && *goal < 1.0)) {
        let percent = 100.0 * goal;
        return Err(Failure::usage(format!(
            "--goal {percent} is out of range: above 0 and below 100 per cent of the time"
        )));
    }
    let stop_within = args.stop_within.map(|percent| percent / 100.0);
    if let Some(within) = stop_within.filter(|within| !(*within >= 0.0 && within.is_finite())) {
        let percent = 100.0 * within;
        return Err(Failure::usage(format!(
            "--stop-within {percent} is out of range: at least 0 per cent above the bound"
        )));
    }
    Ok(Enough { goal, stop_within })
}

/// The least gain as a fraction.
fn min_gain(args: &LoopArgs) -> Result<Option<f64>, Failure> {
    match args.min_gain {
        None => Ok(None),
        Some(percent) if (0.0..100.0).contains(&percent) => Ok(Some(percent / 100.0)),
        Some(percent) => {
            Err(Failure::usage(format!("--min-gain {percent} is out of range: 0 to 100 per cent")))
        }
    }
}

pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Whether this search created it.
    made: bool,
}

impl Drop for Folder {
    /// Removes a created folder that stayed empty.
    fn drop(&mut self) {
        if self.made {
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// The search's folder: the one named, a new one, or the latest one to resume.
pub(super) fn folder(args: &LoopArgs) -> Result<Folder, Failure> {
    let there = |path: PathBuf| Folder { path, made: false };
    if let Some(dir) = &args.out {
        if args.resume && !dir.join("ledger.jsonl").is_file() {
            return Err(Failure::usage(format!(
                "{} holds no search to resume (no ledger.jsonl); leave out --resume to start one",
                dir.display()
            )));
        }
        return Ok(there(dir.clone()));
    }
    if args.resume {
        return latest_run().map(there).ok_or_else(|| {
            Failure::usage(format!("there is no search in {RUNS}/ to resume; name it with --out"))
        });
    }
    new_run(Path::new(RUNS)).map(|path| Folder { path, made: true })
}

/// Creates the folder with the next number. Searches that begin together get different folders, since only one can create a folder.
fn new_run(runs: &Path) -> Result<PathBuf, Failure> {
    let remedy = "name a folder that you may write to with --out";
    let refused = Failure::cannot::<std::io::Error>("create a folder in", runs, remedy);
    std::fs::create_dir_all(runs).map_err(refused)?;
    let last = numbered(runs).into_iter().map(|(number, _)| number).max().unwrap_or(0);
    for number in u64::from(last) + 1.. {
        let path = runs.join(format!("{number:04}"));
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(refused(error)),
        }
    }
    Err(refused(std::io::ErrorKind::AlreadyExists.into()))
}

fn latest_run() -> Option<PathBuf> {
    let runs = numbered(Path::new(RUNS)).into_iter();
    runs.filter(|(_, path)| path.join("ledger.jsonl").is_file()).max().map(|(_, path)| path)
}

/// All entries of a folder with a numeric name.
fn numbered(runs: &Path) -> Vec<(u32, PathBuf)> {
    let number = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.ok()?.path();
        Some((path.file_name()?.to_str()?.parse().ok()?, path))
    };
    std::fs::read_dir(runs).map_or_else(|_| Vec::new(), |all| all.filter_map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_that_begin_together_get_a_folder_each() {
        let parent = tempfile::tempdir().unwrap();
        let runs = parent.path().join("runs");
        std::fs::create_dir_all(runs.join("0007")).unwrap();
        let made = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| new_run(&runs))).collect();
            let made = threads.into_iter().map(|thread| thread.join().unwrap());
            let mut made: Vec<PathBuf> = made.map(|made| made.ok().unwrap()).collect();
            made.sort();
            made
        });
        let wanted: Vec<PathBuf> = (8..16).map(|n| runs.join(format!("{n:04}"))).collect();
        assert_eq!(made, wanted);
        drop(Folder { path: runs.join("0015"), made: true });
        assert!(!runs.join("0015").exists() && runs.join("0014").exists());
    }
}
