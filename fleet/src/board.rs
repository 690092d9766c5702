//! The board: one face for a file ([`crate::sqlite`]) and a server ([`crate::postgres`]).
//!
//! What both share is here: sizes, hashes, and what is checked when something is read back. Each request is one
//! transaction of a [`Store`].

use std::cell::{RefCell, RefMut};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::board_error::BoardError;
use crate::job::{Spec, hash};
use crate::protocol::{Fence, Job, Late, Millis, Terms};
use crate::sqlite::Sqlite;
use crate::verdict::Finding;

/// Most bytes of a ledger on the board, and of a snapshot.
const TEXT_MAX: usize = 64 << 20;
/// Most jobs of one submission.
const SUBMITTED_MAX: usize = 10_000;
/// Most bytes of a reason.
const WHY_MAX: usize = 4096;

/// The answer to a request with a lease: done, or too late.
pub type Answer = Result<Result<(), Late>, BoardError>;

/// What a board is kept in. Texts are as they were written; [`Board`] checks them.
pub(crate) trait Store: Send {
    fn freeze(&mut self, key: &str, priors: &str) -> Result<(), BoardError>;
    /// Adds jobs and returns how many are new.
    fn submit(&mut self, specs: &[Spec]) -> Result<u64, BoardError>;
    fn join(&mut self, worker: &Worker, text: &str) -> Result<bool, BoardError>;
    fn leave(&mut self, worker: &str) -> Result<(), BoardError>;
    fn drain(&mut self, workers: &[String]) -> Result<u64, BoardError>;
    /// Leases a job. The same `ask` of a worker again finds the lease that the first one got.
    fn claim(&mut self, worker: &Worker, ask: &str) -> Result<Offer, BoardError>;
    fn beat(&mut self, id: u64, fence: Fence) -> Answer;
    fn finish(&mut self, id: u64, fence: Fence, hash: &str, result: &str) -> Answer;
    /// Frees a job: with a reason it failed, without one it was given back.
    fn release(&mut self, id: u64, fence: Fence, why: Option<&str>) -> Answer;
    fn jobs(&mut self) -> Result<Vec<JobRow>, BoardError>;
    /// Job, text and hash of each result.
    fn results(&mut self) -> Result<Vec<(u64, String, Option<String>)>, BoardError>;
    fn workers(&mut self) -> Result<Vec<(String, String, Millis)>, BoardError>;
    fn attempts(&mut self) -> Result<Vec<Attempt>, BoardError>;
    /// Longest wait of one request.
    fn set_patience(&mut self, patience: Duration) -> Result<(), BoardError>;
    /// Waits until something may have become free, at most this long.
    fn wait(&mut self, most: Duration);
}

/// A job as it is kept.
pub(crate) struct JobRow {
    pub(crate) id: u64,
    pub(crate) job: Job,
    pub(crate) spec: String,
    pub(crate) key: String,
    pub(crate) why: Option<String>,
}

/// What a store says to a claim.
pub(crate) enum Offer {
    Leased { id: u64, fence: Fence, spec: String, key: String, priors: Option<String> },
    Nothing { open: u64 },
    Drained,
}

/// A board.
pub struct Board {
    store: RefCell<Box<dyn Store>>,
    path: PathBuf,
    terms: Terms,
    /// The number of a claim whose answer did not come: the next claim repeats it.
    unanswered: Option<String>,
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board").field("path", &self.path).field("terms", &self.terms).finish()
    }
}

/// A worker, with what it can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its id, unlike any other's.
    pub id: String,
    /// The host's name.
    pub host: String,
    /// What the host's kernel calls this boot: the same for all containers of a machine. Empty if unknown.
    pub boot: String,
    /// The version of `amk`.
    pub version: String,
    /// The target that its GPU is; empty without one.
    pub target: String,
    /// Its card's UUID; empty without one.
    pub card: String,
    /// The card's name.
    pub card_name: String,
}

/// The answer to a claim.
#[derive(Debug)]
pub enum Claim {
    /// A job under a lease.
    Leased(Box<Leased>),
    /// No job is free now that this worker could do.
    Nothing {
        /// Jobs that are queued or leased.
        open: u64,
    },
    /// The worker is to end.
    Drained,
}

/// A job under a lease.
#[derive(Clone, Debug)]
pub struct Leased {
    /// The job.
    pub id: u64,
    /// The lease.
    pub fence: Fence,
    /// What to do.
    pub spec: Spec,
    /// The snapshot of priors, whose hash was checked; empty: none.
    pub priors: String,
}

/// What came of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// New jobs.
    pub new: u64,
    /// Jobs that were on the board already.
    pub held: u64,
}

/// A job on the board.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its number.
    pub id: u64,
    /// What it is.
    pub spec: Spec,
    /// Its state.
    pub job: Job,
    /// The reason of its last failure.
    pub why: Option<String>,
}

/// A result as the board holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// The name of the worker's host.
    pub host: String,
    /// The boot of that host, as in [`Worker`].
    #[serde(default)]
    pub boot: String,
    /// The card that measured it; empty if it was predicted.
    pub card: String,
    /// The verdict.
    pub finding: Finding,
    /// The ledger's text.
    pub ledger: String,
    /// The text of the ledger's tip record.
    pub head: String,
}

/// One lease of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Its fence.
    pub fence: Fence,
    /// The job.
    pub job: u64,
    /// The worker.
    pub worker: String,
    /// Its card.
    pub card: String,
    /// Milliseconds that it took, so far if it is running.
    pub took_ms: Millis,
    /// running, done, given_back, failed or expired.
    pub how: String,
}

impl Board {
    /// Creates a board, or opens the one that is there; `terms`, if given, must be its terms. On a server, `role` may
    /// then call what a worker needs and nothing else.
    ///
    /// # Errors
    /// If the place holds something else, is a file on a network file system, has other terms, or cannot be written.
    pub fn create(path: &Path, terms: Option<Terms>) -> Result<Self, BoardError> {
        Self::create_for(path, terms, None)
    }

    /// The same. On a server, `role` may then call the five functions of a worker, and nothing else.
    ///
    /// # Errors
    /// As those of [`Board::create`], and if there is no such role or the board is a file.
    pub fn create_for(
        path: &Path,
        terms: Option<Terms>,
        role: Option<&str>,
    ) -> Result<Self, BoardError> {
        terms.unwrap_or_default().check().map_err(BoardError::Refused)?;
        match (is_server(path), role) {
            (true, _) => create_on_server(path, terms.unwrap_or_default(), role)?,
            (false, None) => Sqlite::create(path, terms.unwrap_or_default())?,
            (false, Some(role)) => {
                return Err(BoardError::Refused(format!(
                    "{} is a file, which has no roles such as {role}; they are for boards on a server",
                    path.display()
                )));
            }
        }
        let board = Self::open(path)?;
        match terms.filter(|terms| *terms != board.terms) {
            None => Ok(board),
            Some(_) => {
                let terms = serde_json::to_string(&board.terms).unwrap_or_default();
                Err(BoardError::Terms { path: path.to_path_buf(), terms })
            }
        }
    }

    /// Opens a board: a file, or a server by its address.
    ///
    /// # Errors
    /// If there is none, it is of another version, or it is a file on a network file system.
    pub fn open(path: &Path) -> Result<Self, BoardError> {
        if is_server(path) {
            let (store, terms) = open_on_server(path)?;
            return Ok(Self::of(store, path, terms));
        }
        let (store, terms) = Sqlite::open(path)?;
        Ok(Self::of(Box::new(store), path, terms))
    }

    /// Opens a file with another clock, for tests.
    ///
    /// # Errors
    /// As those of [`Board::open`].
    pub fn open_with_clock(path: &Path, clock: fn() -> Millis) -> Result<Self, BoardError> {
        let (store, terms) = Sqlite::open(path)?;
        Ok(Self::of(Box::new(store.with_clock(clock)), path, terms))
    }

    fn of(store: Box<dyn Store>, path: &Path, terms: Terms) -> Self {
        let path = path.to_path_buf();
        Self { store: RefCell::new(store), path, terms, unanswered: None }
    }

    fn store(&self) -> RefMut<'_, Box<dyn Store>> {
        self.store.borrow_mut()
    }

    /// Waits this long for the answer to a request: 10 s for a file, 30 s for a server if this was not called.
    ///
    /// # Errors
    /// If SQLite refuses.
    pub fn set_patience(&self, patience: Duration) -> Result<(), BoardError> {
        self.store().set_patience(patience)
    }

    /// Waits until a job may have become free, at most this long. A server says so; otherwise the time passes.
    pub fn wait(&self, most: Duration) {
        self.store().wait(most);
    }

    /// The terms of its leases.
    #[must_use]
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// The file, or the address of the server.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Freezes a snapshot of priors, and returns its hash.
    ///
    /// # Errors
    /// If it is too large, or the board cannot be written.
    pub fn freeze(&mut self, priors: &str) -> Result<String, BoardError> {
        bounded("the snapshot of priors", priors)?;
        let key = hash(priors);
        self.store().freeze(&key, priors)?;
        Ok(key)
    }

    /// Adds jobs, all or none. Those on the board already are left alone.
    ///
    /// # Errors
    /// If there are too many, or the board cannot be written.
    pub fn submit(&mut self, specs: &[Spec]) -> Result<Submitted, BoardError> {
        if specs.len() > SUBMITTED_MAX {
            let jobs = specs.len();
            return Err(BoardError::Refused(format!(
                "{jobs} jobs at once; at most {SUBMITTED_MAX}"
            )));
        }
        let new = self.store().submit(specs)?;
        Ok(Submitted { new, held: specs.len() as u64 - new })
    }

    /// Registers a worker. The same worker again is accepted, as after an answer that was lost.
    ///
    /// # Errors
    /// If there is another one with this id.
    pub fn join(&mut self, worker: &Worker) -> Result<(), BoardError> {
        let (id, text) = (&worker.id, serde_json::to_string(worker).unwrap_or_default());
        if self.store().join(worker, &text)? {
            return Ok(());
        }
        Err(BoardError::Refused(format!("there is another worker {id} on the board")))
    }

    /// Says that a worker has ended.
    ///
    /// # Errors
    /// If the board cannot be written.
    pub fn leave(&mut self, worker: &str) -> Result<(), BoardError> {
        self.store().leave(worker)
    }

    /// Tells workers to end after their current job: those named, or all. Returns how many were told.
    ///
    /// # Errors
    /// If one of the names is not that of an active worker; then none of the others is told either.
    pub fn drain(&mut self, workers: &[String]) -> Result<u64, BoardError> {
        self.store().drain(workers)
    }

    /// Leases the next job that this worker can do: one that needs its card before one that needs none. After an error,
    /// the next call repeats this claim and finds the lease that it may have got.
    ///
    /// # Errors
    /// If the board cannot be read or written, or is damaged.
    pub fn claim(&mut self, worker: &Worker) -> Result<Claim, BoardError> {
        let fresh = || format!("{:016x}", RandomState::new().hash_one(&worker.id));
        let ask = self.unanswered.take().unwrap_or_else(fresh);
        let offer = self.store().claim(worker, &ask);
        if offer.is_err() {
            self.unanswered = Some(ask);
        }
        Ok(match offer? {
            Offer::Drained => Claim::Drained,
            Offer::Nothing { open } => Claim::Nothing { open },
            Offer::Leased { id, fence, spec, key, priors } => {
                let spec = parsed(&self.path, id, &spec, &key)?;
                let priors = if spec.priors.is_empty() { None } else { priors }.unwrap_or_default();
                if !spec.priors.is_empty() && hash(&priors) != spec.priors {
                    let reason =
                        format!("the snapshot of priors of job {id} is missing or was edited");
                    return Err(BoardError::Damaged { path: self.path.clone(), reason });
                }
                Claim::Leased(Box::new(Leased { id, fence, spec, priors }))
            }
        })
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn beat(&mut self, id: u64, fence: Fence) -> Answer {
        self.store().beat(id, fence)
    }

    /// Records a result and closes its job, in one transaction. The same result again is accepted and changes nothing.
    ///
    /// # Errors
    /// If the result is too large, or the board cannot be read or written. A lost lease is no error.
    pub fn finish(&mut self, id: u64, fence: Fence, result: &Recorded) -> Answer {
        bounded("the ledger", &result.ledger)?;
        let text = serde_json::to_string(result).unwrap_or_default();
        self.store().finish(id, fence, &hash(&text), &text)
    }

    /// Frees a job; the attempt does not count.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn give_back(&mut self, id: u64, fence: Fence) -> Answer {
        self.store().release(id, fence, None)
    }

    /// Frees a job after a failure, with the reason; after its last attempt it is dead.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn fail(&mut self, id: u64, fence: Fence, why: &str) -> Answer {
        let end = why.char_indices().map(|(at, _)| at).take_while(|at| *at < WHY_MAX).last();
        let why = if why.len() > WHY_MAX { &why[..end.unwrap_or(0)] } else { why };
        self.store().release(id, fence, Some(why))
    }

    /// All jobs, the oldest first.
    ///
    /// # Errors
    /// If the board cannot be read or is damaged.
    pub fn jobs(&self) -> Result<Vec<Entry>, BoardError> {
        let entry = |row: JobRow| {
            let JobRow { id, job, spec, key, why } = row;
            Ok(Entry { id, job, spec: parsed(&self.path, id, &spec, &key)?, why })
        };
        self.store().jobs()?.into_iter().map(entry).collect()
    }

    /// The results by job, each checked against its hash.
    ///
    /// # Errors
    /// If the board cannot be read or is damaged.
    pub fn results(&self) -> Result<Vec<(u64, Recorded)>, BoardError> {
        let one = |(id, text, held): (u64, String, Option<String>)| {
            let damaged = |reason: String| BoardError::Damaged { path: self.path.clone(), reason };
            if held != Some(hash(&text)) {
                return Err(damaged(format!("the result of job {id} was edited")));
            }
            let result = serde_json::from_str(&text);
            let unread = |error| damaged(format!("the result of job {id} cannot be read: {error}"));
            Ok((id, result.map_err(unread)?))
        };
        self.store().results()?.into_iter().map(one).collect()
    }

    /// All workers with their state and the milliseconds since they were seen.
    ///
    /// # Errors
    /// If the board cannot be read.
    pub fn workers(&self) -> Result<Vec<(Worker, String, Millis)>, BoardError> {
        let one = |(text, state, seen): (String, String, Millis)| {
            let unread = |error: serde_json::Error| BoardError::Damaged {
                path: self.path.clone(),
                reason: format!("a worker cannot be read: {error}"),
            };
            Ok((serde_json::from_str(&text).map_err(unread)?, state, seen))
        };
        self.store().workers()?.into_iter().map(one).collect()
    }

    /// All leases there ever were, the oldest first.
    ///
    /// # Errors
    /// If the board cannot be read.
    pub fn attempts(&self) -> Result<Vec<Attempt>, BoardError> {
        self.store().attempts()
    }
}

/// Whether a board is named by the address of a server.
fn is_server(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.contains("://"))
}

#[cfg(feature = "postgres")]
fn create_on_server(path: &Path, terms: Terms, role: Option<&str>) -> Result<(), BoardError> {
    crate::postgres::Postgres::create(path, terms, role)
}

#[cfg(feature = "postgres")]
fn open_on_server(path: &Path) -> Result<(Box<dyn Store>, Terms), BoardError> {
    let (store, terms) = crate::postgres::Postgres::open(path)?;
    Ok((Box::new(store), terms))
}

#[cfg(not(feature = "postgres"))]
fn create_on_server(path: &Path, _: Terms, _: Option<&str>) -> Result<(), BoardError> {
    open_on_server(path).map(drop)
}

#[cfg(not(feature = "postgres"))]
fn open_on_server(path: &Path) -> Result<(Box<dyn Store>, Terms), BoardError> {
    Err(BoardError::Refused(format!(
        "{}: this amk was built without its feature `full` and keeps boards in SQLite files only",
        path.display()
    )))
}

fn bounded(what: &str, text: &str) -> Result<(), BoardError> {
    let bytes = text.len();
    if bytes <= TEXT_MAX {
        return Ok(());
    }
    Err(BoardError::Refused(format!(
        "{what} has {bytes} bytes, and the board takes at most {TEXT_MAX}"
    )))
}

fn parsed(path: &Path, id: u64, text: &str, key: &str) -> Result<Spec, BoardError> {
    let damaged = |reason: String| BoardError::Damaged { path: path.to_path_buf(), reason };
    let spec: Spec = serde_json::from_str(text)
        .map_err(|error| damaged(format!("job {id} cannot be read: {error}")))?;
    if spec.key() == key { Ok(spec) } else { Err(damaged(format!("job {id} was edited"))) }
}
