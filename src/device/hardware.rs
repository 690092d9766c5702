//! The machine that a search runs on, as seen by `amk loop` and a worker of a fleet.
//!
//! There is one implementation, [`ThisMachine`]. Tests of this crate have another one with scripted cards and pretended
//! hosts; no flag, environment variable or file can choose it.

use ir::Target;
use search::Device;

use super::probe;
use crate::cli::LoopArgs;
use crate::context::Context;
use crate::failure::Failure;

/// A card that a worker offers: its target, UUID and name.
#[derive(Clone, Debug)]
pub(crate) struct CardIdentity {
    pub(crate) target: Target,
    pub(crate) uuid: String,
    pub(crate) name: String,
}

pub(crate) trait Hardware: Sync {
    /// The name of the host.
    fn host(&self) -> String;
    /// What the host's kernel calls this boot; empty if unknown.
    fn boot(&self) -> String;
    /// The first card that the kernel runs on.
    fn live_card(&self) -> Option<CardIdentity>;
    /// Opens the card of a search on one card; `None` if the search predicts.
    fn open<'a>(
        &self,
        context: &'a Context,
        args: &LoopArgs,
    ) -> Result<Option<Box<dyn Device + 'a>>, Failure>;
}

/// The real one.
#[derive(Debug)]
pub(crate) struct ThisMachine;

impl Hardware for ThisMachine {
    fn host(&self) -> String {
        kernel("hostname")
    }

    fn boot(&self) -> String {
        kernel("random/boot_id")
    }

    fn live_card(&self) -> Option<CardIdentity> {
        let (target, info) = probe::live_card()?;
        Some(CardIdentity { target, uuid: info.uuid, name: info.name })
    }

    fn open<'a>(
        &self,
        context: &'a Context,
        args: &LoopArgs,
    ) -> Result<Option<Box<dyn Device + 'a>>, Failure> {
        let opened = context.open_process(&args.sharing)?;
        Ok(opened.map(|device| Box::new(device) as Box<dyn Device + 'a>))
    }
}

fn kernel(name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    text.trim().to_owned()
}
