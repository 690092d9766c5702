//! `amk fleet`: searches over many workers that share a board.

use std::path::Path;

use fleet::protocol::Terms;
use fleet::{Board, BoardError};
use serde_json::json;

use crate::cli::{FleetDrainArgs, FleetInitArgs};
use crate::failure::{Exit, Failure, Outcome};
use crate::report as out;

#[cfg(all(test, feature = "full"))]
mod cards_tests;
mod finding;
mod metrics;
#[cfg(feature = "full")]
mod page;
pub(crate) mod report;
pub(crate) mod status;
pub(crate) mod submit;
pub(crate) mod worker;

impl From<BoardError> for Failure {
    fn from(error: BoardError) -> Self {
        match error {
            BoardError::Damaged { .. } => Self::integrity(error.to_string()),
            BoardError::Sqlite { .. }
            | BoardError::Server { .. }
            | BoardError::NoBoard(_)
            | BoardError::Missing(_)
            | BoardError::Version { .. }
            | BoardError::Terms { .. }
            | BoardError::Network { .. }
            | BoardError::Refused(_) => Self::usage(error.to_string()),
        }
    }
}

fn open(board: &Path) -> Result<Board, Failure> {
    Ok(Board::open(board)?)
}

/// Creates a board, or opens the one that is there. `role` is the role of its workers, on a server.
fn create(board: &Path, terms: Option<Terms>, role: Option<&str>) -> Result<Board, Failure> {
    let is_file = !board.to_string_lossy().contains("://");
    let folder = board.parent().filter(|folder| is_file && !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).map_err(Failure::cannot(
            "create",
            folder,
            "name another file with --board",
        ))?;
    }
    Ok(Board::create_for(board, terms, role)?)
}

pub(crate) fn init(args: &FleetInitArgs) -> Outcome {
    let ms = |flag: &str, seconds: f64| {
        let fits = (0.001..=86_400.0).contains(&seconds);
        let wrong = || format!("{flag} {seconds} is out of range: 0.001 to 86400 seconds");
        if fits { Ok((seconds * 1000.0).round() as u64) } else { Err(Failure::usage(wrong())) }
    };
    let (lease_ms, heartbeat_ms) = (ms("--lease", args.lease)?, ms("--heartbeat", args.heartbeat)?);
    let terms = Terms { lease_ms, heartbeat_ms, attempts_max: args.attempts };
    let board = create(&args.board.board, Some(terms), args.worker_role.as_deref())?;
    out::say(&format!("board {}", board.path().display()));
    out::document(
        &json!({"schema": "amk.fleet_init.v1", "board": board.path(), "terms": board.terms()}),
    )?;
    Ok(Exit::Yes)
}

pub(crate) fn drain(args: &FleetDrainArgs) -> Outcome {
    let told = open(&args.board.board)?.drain(&args.workers)?;
    out::say(&format!("{told} workers end after their current job"));
    out::document(
        &json!({"schema": "amk.fleet_drain.v1", "board": args.board.board, "workers": told}),
    )?;
    Ok(Exit::Yes)
}
