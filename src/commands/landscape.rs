//! `amk landscape`: every point of a grid of schedules, measured once and kept, so that strategies can be compared with no device.

mod file;
mod record;

use crate::cli::LandscapeCommand;
use crate::failure::Outcome;

pub(crate) fn run(command: &LandscapeCommand) -> Outcome {
    match command {
        LandscapeCommand::Record(args) => record::run(args),
    }
}
