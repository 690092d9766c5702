//! `amk fleet submit`: jobs for the product of models, cards and contexts, and races of champions.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use corpus::Store;
use fleet::protocol::State;
use fleet::{Board, Device, Entry, Kind, Raced, Spec, champions};
use ir::Target;
use search::{Budget, LatencyKind};
use serde_json::json;

use super::report::written;
use super::{create, open, status};
use crate::cli::{DeviceChoice, FleetSubmitArgs, PlaceArgs};
use crate::commands::search_loop::store_sink::known_in;
use crate::context::Context;
use crate::device::probe::live_target;
use crate::failure::{Exit, Failure, Outcome};
use crate::{models, report};

/// The target if none is named and there is no GPU.
const DEFAULT_TARGET: &str = "h200";
/// Trials of a race: the start and the champion.
const RACED: Budget = Budget::Trials(2);

pub(crate) fn run(args: &FleetSubmitArgs) -> Outcome {
    let (mut board, specs) = match args.races {
        Some(races) => {
            let board = open(&args.board.board)?;
            let specs = raced(&board, races)?;
            (board, specs)
        }
        None => {
            // Everything is checked before there is a board.
            let mut specs = legs(args)?;
            let mut board = match args.round {
                0 => create(&args.board.board, None, None)?,
                _ => open(&args.board.board)?,
            };
            freeze(args, &mut board, &mut specs)?;
            (board, specs)
        }
    };
    let submitted = board.submit(&specs)?;
    let (new, held) = (submitted.new, submitted.held);
    report::say(&format!("{}: {new} jobs new, {held} held", board.path().display()));
    report::document(&json!({
        "schema": "amk.fleet_submit.v1",
        "board": board.path(),
        "new": new,
        "held": held,
        "round": args.round,
        "snapshots": specs.iter().map(|s| &s.priors).filter(|p| !p.is_empty()).collect::<BTreeSet<_>>(),
    }))?;
    Ok(Exit::Yes)
}

/// A leg for each model, card, context and seed.
fn legs(args: &FleetSubmitArgs) -> Result<Vec<Spec>, Failure> {
    let live = if args.device == DeviceChoice::Cpu { None } else { live_target() };
    let device = match args.device {
        DeviceChoice::Cpu => Device::Cpu,
        DeviceChoice::Cuda => Device::Cuda,
        DeviceChoice::Auto if live.is_some() => Device::Cuda,
        DeviceChoice::Auto => Device::Cpu,
        DeviceChoice::Eval => {
            return Err(Failure::usage("--device eval runs no schedule; legs take cpu or cuda"));
        }
    };
    let mut targets = Vec::new();
    for name in &args.cards {
        let found = Target::by_name(name).map_err(|error| Failure::usage(error.to_string()))?;
        targets.push(found.name);
    }
    if targets.is_empty() {
        targets.push(live.map_or_else(|| DEFAULT_TARGET.to_owned(), |target| target.name));
    }
    let contexts: Vec<Vec<u32>> = match &*args.contexts {
        [] => vec![Vec::new()],
        several => several.iter().map(|&tokens| vec![tokens]).collect(),
    };
    let mut specs = Vec::new();
    for model in &args.models {
        let model = named(model)?;
        for target in &targets {
            for contexts in &contexts {
                specs.extend(args.seeds.iter().map(|&seed| Spec {
                    kind: Kind::Leg,
                    model: model.clone(),
                    target: target.clone(),
                    device,
                    contexts: contexts.clone(),
                    seed,
                    budget: args.budget.to_string(),
                    strategy: args.strategy.name().to_owned(),
                    protocol: search::PROTOCOL,
                    priors: String::new(),
                    round: args.round,
                    race: None,
                }));
            }
        }
    }
    Ok(specs)
}

/// A model's name, checked; a path is made absolute, since workers run in other folders.
fn named(model: &str) -> Result<String, Failure> {
    models::graph(model, 0)?;
    if model::preset(model).is_some() || !Path::new(model).exists() {
        return Ok(model.to_owned());
    }
    let whole = std::fs::canonicalize(model);
    let whole = whole.map_err(Failure::cannot("find", Path::new(model), "name another model"))?;
    whole.into_os_string().into_string().map_err(|path| {
        Failure::usage(format!("the path {} is not UTF-8; rename it", path.display()))
    })
}

/// Freezes what a store knows for each leg, and names it in the leg by its hash: the store of the arguments, or one of
/// the rounds before.
fn freeze(args: &FleetSubmitArgs, board: &mut Board, specs: &mut [Spec]) -> Result<(), Failure> {
    let folder;
    let store = match (&args.store, args.round) {
        (Some(store), _) => store.clone(),
        (None, 0) => return Ok(()),
        (None, round) => {
            folder = tempfile::tempdir().map_err(Failure::cannot(
                "create a folder in",
                &std::env::temp_dir(),
                "name another one with TMPDIR",
            ))?;
            rounds_before(board, round, folder.path())?
        }
    };
    for spec in specs {
        let target = Some(spec.target.clone());
        // Nothing runs here, and the target is the one named, whatever GPU this machine has.
        let place = PlaceArgs { target, device: DeviceChoice::Cpu, ..PlaceArgs::default() };
        let context = Context::load(&spec.model, &place)?;
        let kind = match spec.device {
            Device::Cpu => LatencyKind::Predicted,
            Device::Cuda => LatencyKind::MeasuredGpu,
        };
        let known = known_in(&store, &context, kind.name(), &spec.contexts)?;
        if known.is_empty() && args.round > 0 {
            return Err(Failure::usage(format!(
                "the rounds before {} measured nothing for {} at the contexts of this one; make it a job of round 0",
                args.round, spec.target
            )));
        }
        if !known.is_empty() {
            spec.priors = board.freeze(&json!(known).to_string())?;
        }
    }
    Ok(())
}

/// A store of the legs of all rounds before this one, in a folder. Their ledgers are audited, and their verdicts are
/// derived again.
fn rounds_before(board: &Board, round: u32, folder: &Path) -> Result<PathBuf, Failure> {
    let earlier = |spec: &Spec| spec.kind == Kind::Leg && spec.round < round;
    let open = |entry: &Entry| !matches!(entry.job.state, State::Done { .. } | State::Dead);
    let jobs = board.jobs()?;
    let open = jobs.iter().filter(|entry| earlier(&entry.spec) && open(entry)).count();
    let done = status::done(board)?;
    let legs: Vec<_> = done.iter().filter(|(entry, _)| earlier(&entry.spec)).collect();
    if open > 0 || legs.is_empty() {
        return Err(Failure::usage(format!(
            "round {round} proposes from the rounds before it, of which {} has {} legs done and {open} open; \
             let workers finish them first",
            board.path().display(),
            legs.len()
        )));
    }
    let path = folder.join("store.sqlite");
    let mut store = Store::open(&path)?;
    for (entry, result) in legs {
        let (run, contents) = written(entry, result, &folder.join(entry.id.to_string()))?;
        store.add(&run.run, contents.links())?;
    }
    Ok(path)
}

/// Races of the champions that their legs kept, for as many further cards.
fn raced(board: &Board, races: u32) -> Result<Vec<Spec>, Failure> {
    let done = status::done(board)?;
    let mut specs = Vec::new();
    for champion in champions(&done).iter().filter(|champion| champion.finding.is_kept()) {
        let leg = done.iter().find(|(entry, _)| entry.id == champion.job);
        let Some((leg, finding)) = leg.map(|(entry, _)| (entry, &champion.finding)) else {
            continue;
        };
        if finding.config == finding.start_config {
            continue;
        }
        specs.extend((1..=races).map(|number| Spec {
            kind: Kind::Race,
            budget: RACED.to_string(),
            priors: String::new(),
            race: Some(Raced {
                leg: leg.id,
                card: champion.card.clone().unwrap_or_default(),
                start: finding.start_config.clone(),
                champion: finding.config.clone(),
                number,
            }),
            ..leg.spec.clone()
        }));
    }
    if specs.is_empty() {
        return Err(Failure::usage(format!(
            "{} has no champion that its leg kept, so there is nothing to race yet",
            board.path().display()
        )));
    }
    Ok(specs)
}
