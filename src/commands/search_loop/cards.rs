//! The GPUs of a search with several: which they are, and how each is opened.

use std::thread::Scope;

use search::{Conditions, Device, DeviceError, DeviceInfo, Opener, WorkerPool};

use super::header::Header;
use crate::cli::{DeviceChoice, LoopArgs};
use crate::context::Context;
use crate::device;
use crate::failure::Failure;

/// The devices of a search.
pub(super) enum Opened<'a> {
    /// No device: it predicts.
    None,
    One(DeviceInfo),
    /// Several, by their numbers in the header.
    Several(Box<WorkerPool<'a>>),
}

impl Opened<'_> {
    pub(super) fn count(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(_) => 1,
            Self::Several(pool) => pool.infos().iter().filter(|info| info.is_ok()).count(),
        }
    }

    /// The description of the first device, and the conditions of each card.
    pub(super) fn conditions(&self, header: &Header) -> (Option<DeviceInfo>, Vec<Conditions>) {
        let pool = match self {
            Self::None => return (None, Vec::new()),
            Self::One(info) => {
                return (Some(info.clone()), vec![crate::conditions::of(info.clone())]);
            }
            Self::Several(pool) => pool,
        };
        let one = |(card, info): (usize, Result<&DeviceInfo, &DeviceError>)| match info {
            Ok(info) => crate::conditions::of(info.clone()),
            // Not opened after a resume: uses the recorded conditions.
            Err(_) => header.cards.get(card).cloned().unwrap_or_default(),
        };
        let infos = pool.infos();
        let first = infos.iter().flatten().next().map(|&info| info.clone());
        (first, infos.into_iter().enumerate().map(one).collect())
    }
}

/// Whether the search runs on several GPUs.
pub(super) fn are_meant(args: &LoopArgs, header: &Header) -> Result<bool, Failure> {
    if args.devices.is_empty() {
        return Ok(!header.cards.is_empty());
    }
    if matches!(args.place.device, DeviceChoice::Cpu | DeviceChoice::Eval) {
        return Err(Failure::usage("--devices names GPUs; leave it or --device out"));
    }
    let mut numbers = args.devices.clone();
    numbers.sort_unstable();
    if let Some(twice) = numbers.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Failure::usage(format!("--devices names GPU {} twice", twice[0])));
    }
    Ok(true)
}

/// Opens the GPUs of a search, each on its own thread. In a new search all must open; a resumed one continues with those that do.
pub(super) fn open<'scope, 'a: 'scope>(
    scope: &'scope Scope<'scope, '_>,
    context: &'a Context,
    args: &'a LoopArgs,
    header: &Header,
) -> Result<WorkerPool<'a>, Failure> {
    let ordinals = ordinals(args, header)?;
    let kernel = header.start(context).kernel;
    let opener = |ordinal: Result<u32, String>| -> Opener<'a> {
        Box::new(move || {
            let unavailable = |reason: String| DeviceError::Unavailable { reason };
            let ordinal = ordinal.map_err(unavailable)?;
            let opened = context.open_process_at(ordinal, &args.sharing);
            let mut opened = opened.map_err(|failure| unavailable(failure.message))?;
            // Compiled while the graph is evaluated.
            opened.foresee(&[kernel]);
            Ok(Box::new(opened) as Box<dyn Device + 'a>)
        })
    };
    let pool = WorkerPool::open(scope, ordinals.into_iter().map(opener).collect());
    check(&pool, args, header)?;
    Ok(pool)
}

/// The current numbers of the GPUs: the requested ones, or those of the cards that a resumed search ran on.
fn ordinals(args: &LoopArgs, header: &Header) -> Result<Vec<Result<u32, String>>, Failure> {
    if header.cards.is_empty() {
        return Ok(args.devices.iter().map(|&number| Ok(number)).collect());
    }
    let mut found = Vec::new();
    for card in &header.cards {
        let uuid = card.uuid.as_deref().unwrap_or_default();
        let ordinal = device::probe::find(uuid)?;
        found.push(ordinal.ok_or_else(|| format!("no GPU with the UUID {uuid} is here")));
    }
    let asked = &args.devices;
    let known: Vec<u32> = found.iter().filter_map(|ordinal| ordinal.clone().ok()).collect();
    if !asked.is_empty() && *asked != known {
        let list = |numbers: &[u32]| {
            let all: Vec<String> = numbers.iter().map(ToString::to_string).collect();
            all.join(",")
        };
        return Err(Failure::usage(format!(
            "--devices {} contradicts the ledger: its cards are the GPUs {} here; leave it out, or start a new search in another --out",
            list(asked),
            list(&known)
        )));
    }
    Ok(found)
}

/// Refuses the cards if one of them cannot be used, or if they are not of one kind.
fn check(pool: &WorkerPool<'_>, args: &LoopArgs, header: &Header) -> Result<(), Failure> {
    let infos = pool.infos();
    let none = infos.iter().all(Result::is_err);
    for (card, info) in infos.iter().enumerate() {
        let number = args.devices.get(card).copied().unwrap_or(card as u32);
        if let Err(error) = info
            && (none || header.cards.is_empty())
        {
            return Err(Failure::missing(format!("GPU {number}: {}", device::reason(error))));
        }
    }
    let names: Vec<&str> = infos.iter().flatten().map(|info| info.name.as_str()).collect();
    match names.windows(2).find(|pair| pair[0] != pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Failure::usage(format!(
            "the GPUs of a search must be of one kind: here are {} and {}; name those of one kind with --devices",
            pair[0], pair[1]
        ))),
    }
}
