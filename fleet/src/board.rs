//! The board in an SQLite file, for the workers of one machine.
//!
//! Every request is one immediate transaction: it reads the job, asks [`protocol`](crate::protocol) for the next state,
//! and writes it. The clock is this machine's, read inside the transaction. The tables are in [`SCHEMA`].

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{
    Connection, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, params,
};
use serde::{Deserialize, Serialize};

use crate::board_error::{At, BoardError};
use crate::job::{Spec, hash};
use crate::mount::network_mount;
use crate::protocol::{Claimed, Fence, Finish, Job, Late, Millis, State, Terms};
use crate::verdict::Finding;

/// Marks a file as a board: `amkf`.
const APPLICATION_ID: i64 = 0x616d_6b66;
/// Version of the tables.
const VERSION: i64 = 1;
/// Longest wait for another process's transaction.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a ledger on the board, and of a snapshot.
const TEXT_MAX: usize = 64 << 20;
/// Most jobs of one submission.
const SUBMITTED_MAX: usize = 10_000;

const SCHEMA: &str = "
CREATE TABLE terms(lease_ms INTEGER NOT NULL, heartbeat_ms INTEGER NOT NULL, attempts_max INTEGER NOT NULL) STRICT;
CREATE TABLE snapshots(hash TEXT PRIMARY KEY, priors TEXT NOT NULL) STRICT;
CREATE TABLE jobs(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, needs TEXT NOT NULL, subject TEXT NOT NULL,
  not_card TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL, fence INTEGER,
  until_ms INTEGER, hash TEXT, why TEXT) STRICT;
CREATE INDEX jobs_open ON jobs(state, needs);
CREATE TABLE workers(id TEXT PRIMARY KEY, worker TEXT NOT NULL, state TEXT NOT NULL, seen_ms INTEGER NOT NULL) STRICT;
CREATE TABLE attempts(fence INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL REFERENCES jobs,
  worker TEXT NOT NULL REFERENCES workers, card TEXT NOT NULL, began_ms INTEGER NOT NULL, ended_ms INTEGER,
  how TEXT NOT NULL) STRICT;
CREATE INDEX attempts_job ON attempts(job);
CREATE TABLE results(job INTEGER PRIMARY KEY REFERENCES jobs, fence INTEGER NOT NULL UNIQUE REFERENCES attempts,
  result TEXT NOT NULL, recorded_ms INTEGER NOT NULL) STRICT;
";

/// The answer to a request with a lease: done, or too late.
pub type Answer = Result<Result<(), Late>, BoardError>;

/// A board.
#[derive(Debug)]
pub struct Board {
    db: Connection,
    path: PathBuf,
    terms: Terms,
    clock: fn() -> Millis,
}

/// A worker, with what it can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Worker {
    /// Its id, unlike any other's.
    pub id: String,
    /// The host's name.
    pub host: String,
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
    /// The host of the worker.
    pub host: String,
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

fn wall_clock() -> Millis {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(Millis::MAX)
}

impl Board {
    /// Creates a board, or opens the one that is there; `terms`, if given, must be its terms.
    ///
    /// # Errors
    /// If the file is something else, lies on a network file system, has other terms, or cannot be written.
    pub fn create(path: &Path, terms: Option<Terms>) -> Result<Self, BoardError> {
        terms.unwrap_or_default().check().map_err(BoardError::Refused)?;
        local(path)?;
        let mut db = connect(path)?;
        let tables = "SELECT count(*) FROM sqlite_schema";
        if number::<i64>(&db, tables).at(path)? == 0 {
            db.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).at(path)?;
        }
        // Two that create one board take turns: the second finds the tables.
        let tx = begin(&mut db, path)?;
        if number::<i64>(&tx, tables).at(path)? == 0 {
            let Terms { lease_ms, heartbeat_ms, attempts_max } = terms.unwrap_or_default();
            let insert = "INSERT INTO terms VALUES (?, ?, ?)";
            tx.execute_batch(SCHEMA)
                .and_then(|()| {
                    tx.execute(insert, params![int(lease_ms), int(heartbeat_ms), attempts_max])
                })
                .and_then(|_| tx.pragma_update(None, "application_id", APPLICATION_ID))
                .and_then(|()| tx.pragma_update(None, "user_version", VERSION))
                .at(path)?;
        }
        tx.commit().at(path)?;
        let board = Self::open(path)?;
        match terms.filter(|terms| *terms != board.terms) {
            None => Ok(board),
            Some(_) => {
                let terms = serde_json::to_string(&board.terms).unwrap_or_default();
                Err(BoardError::Terms { path: path.to_path_buf(), terms })
            }
        }
    }

    /// Opens a board.
    ///
    /// # Errors
    /// If there is none, it is of another version, or it lies on a network file system.
    pub fn open(path: &Path) -> Result<Self, BoardError> {
        if !path.is_file() {
            return Err(BoardError::Missing(path.to_path_buf()));
        }
        local(path)?;
        let db = connect(path)?;
        let no_board = |_| BoardError::NoBoard(path.to_path_buf());
        let id: i64 = number(&db, "PRAGMA application_id").map_err(no_board)?;
        let found: i64 = number(&db, "PRAGMA user_version").map_err(no_board)?;
        if id != APPLICATION_ID {
            return Err(BoardError::NoBoard(path.to_path_buf()));
        }
        if found != VERSION {
            return Err(BoardError::Version { path: path.to_path_buf(), found, known: VERSION });
        }
        let select = "SELECT lease_ms, heartbeat_ms, attempts_max FROM terms";
        let terms = |row: &Row<'_>| {
            Ok(Terms {
                lease_ms: millis(row, 0)?,
                heartbeat_ms: millis(row, 1)?,
                attempts_max: row.get(2)?,
            })
        };
        let terms = db.query_row(select, [], terms).at(path)?;
        Ok(Self { db, path: path.to_path_buf(), terms, clock: wall_clock })
    }

    /// The same board with another clock, for tests.
    #[must_use]
    pub fn with_clock(self, clock: fn() -> Millis) -> Self {
        Self { clock, ..self }
    }

    /// Waits this long for other processes' transactions instead of 10 s.
    ///
    /// # Errors
    /// If SQLite refuses.
    pub fn set_patience(&self, patience: Duration) -> Result<(), BoardError> {
        self.db.busy_timeout(patience).at(&self.path)
    }

    /// The terms of its leases.
    #[must_use]
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// The file.
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
        let insert = "INSERT OR IGNORE INTO snapshots VALUES (?, ?)";
        self.db.execute(insert, params![key, priors]).at(&self.path)?;
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
        let path = self.path.clone();
        let tx = begin(&mut self.db, &path)?;
        let insert = "INSERT OR IGNORE INTO jobs(key, needs, subject, not_card, spec, state, attempts) \
            VALUES (?, ?, ?, ?, ?, 'queued', 0)";
        let mut new = 0;
        for spec in specs {
            let text = serde_json::to_string(spec).unwrap_or_default();
            let not_card = spec.race.as_ref().map_or("", |race| &race.card);
            let values = params![spec.key(), spec.needs(), spec.subject(), not_card, text];
            new += tx.execute(insert, values).at(&path)? as u64;
        }
        tx.commit().at(&path)?;
        Ok(Submitted { new, held: specs.len() as u64 - new })
    }

    /// Registers a worker.
    ///
    /// # Errors
    /// If there is one with this id.
    pub fn join(&mut self, worker: &Worker) -> Result<(), BoardError> {
        let (id, text) = (&worker.id, serde_json::to_string(worker).unwrap_or_default());
        let insert = "INSERT OR IGNORE INTO workers VALUES (?, ?, 'active', ?)";
        let values = params![id, text, int((self.clock)())];
        if self.db.execute(insert, values).at(&self.path)? == 0 {
            return Err(BoardError::Refused(format!(
                "there is a worker {id} on the board already"
            )));
        }
        Ok(())
    }

    /// Says that a worker has ended.
    ///
    /// # Errors
    /// If the board cannot be written.
    pub fn leave(&mut self, worker: &str) -> Result<(), BoardError> {
        let update = "UPDATE workers SET state = 'gone', seen_ms = ? WHERE id = ?";
        self.db.execute(update, params![int((self.clock)()), worker]).at(&self.path)?;
        Ok(())
    }

    /// Tells workers to end after their current job: those named, or all. Returns how many were told.
    ///
    /// # Errors
    /// If a name is not that of an active worker. Then no worker is told.
    pub fn drain(&mut self, workers: &[String]) -> Result<u64, BoardError> {
        let path = self.path.clone();
        let tx = begin(&mut self.db, &path)?;
        let all = "UPDATE workers SET state = 'draining' WHERE state = 'active'";
        let mut told = 0;
        if workers.is_empty() {
            told = tx.execute(all, []).at(&path)?;
        }
        for worker in workers {
            let one = tx.execute(&format!("{all} AND id = ?"), [worker]).at(&path)?;
            if one == 0 {
                return Err(BoardError::Refused(format!(
                    "{worker} is no active worker of {}; `amk fleet status` lists them",
                    path.display()
                )));
            }
            told += one;
        }
        tx.commit().at(&path)?;
        Ok(told as u64)
    }

    /// Leases the next job that this worker can do: one that needs its card before one that needs none.
    ///
    /// # Errors
    /// If the board cannot be read or written, or is damaged.
    pub fn claim(&mut self, worker: &Worker) -> Result<Claim, BoardError> {
        let (path, terms, clock) = (self.path.clone(), self.terms, self.clock);
        let tx = begin(&mut self.db, &path)?;
        let now = clock();
        let seen = "UPDATE workers SET seen_ms = ? WHERE id = ? RETURNING state";
        let state: Option<String> = tx
            .query_row(seen, params![int(now), worker.id], |row| row.get(0))
            .optional()
            .at(&path)?;
        if state.as_deref() != Some("active") {
            return Ok(Claim::Drained);
        }
        while let Some((id, job)) = free(&tx, worker, now).at(&path)? {
            close_expired(&tx, &job).at(&path)?;
            let fence = next_fence(&tx).at(&path)?;
            match job.claim(now, fence, &terms) {
                Claimed::Granted(job) => {
                    store(&tx, id, &job).at(&path)?;
                    let insert = "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, NULL, 'running')";
                    let values = params![int(fence), int(id), worker.id, worker.card, int(now)];
                    tx.execute(insert, values).at(&path)?;
                    let leased = leased(&tx, &path, id, fence)?;
                    tx.commit().at(&path)?;
                    return Ok(Claim::Leased(Box::new(leased)));
                }
                Claimed::Dead(job) => {
                    store(&tx, id, &job).at(&path)?;
                    let why = "UPDATE jobs SET why = coalesce(why || '; ', '') || 'the last lease ran out' WHERE id = ?";
                    tx.execute(why, [int(id)]).at(&path)?;
                }
                Claimed::No => break,
            }
        }
        let open =
            "SELECT count(*) FROM jobs WHERE state IN ('queued', 'leased') AND needs IN ('', ?)";
        let open: i64 = tx.query_row(open, [&worker.target], |row| row.get(0)).at(&path)?;
        tx.commit().at(&path)?;
        Ok(Claim::Nothing { open: open.cast_unsigned() })
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn beat(&mut self, id: u64, fence: Fence) -> Answer {
        let terms = self.terms;
        let step = |job: &Job, now| job.beat(now, fence, &terms).map(Some);
        self.change(id, step, |tx, now| {
            let seen = "UPDATE workers SET seen_ms = ? WHERE id = (SELECT worker FROM attempts WHERE fence = ?)";
            tx.execute(seen, params![int(now), int(fence)]).map(drop)
        })
    }

    /// Records a result and closes its job, in one transaction. The same result again is accepted and changes nothing.
    ///
    /// # Errors
    /// If the result is too large, or the board cannot be read or written. A lost lease is no error.
    pub fn finish(&mut self, id: u64, fence: Fence, result: &Recorded) -> Answer {
        bounded("the ledger", &result.ledger)?;
        let text = serde_json::to_string(result).unwrap_or_default();
        let key = hash(&text);
        let step = |job: &Job, _| match job.finish(fence, &key)? {
            Finish::Now(job) => Ok(Some(job)),
            Finish::Already => Ok(None),
        };
        self.change(id, step, |tx, now| {
            let insert = "INSERT INTO results VALUES (?, ?, ?, ?)";
            tx.execute(insert, params![int(id), int(fence), text, int(now)])?;
            close(tx, fence, now, "done")
        })
    }

    /// Frees a job; the attempt does not count.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn give_back(&mut self, id: u64, fence: Fence) -> Answer {
        let step = |job: &Job, _| job.give_back(fence).map(Some);
        self.change(id, step, |tx, now| close(tx, fence, now, "given_back"))
    }

    /// Frees a job after a failure, with the reason; after its last attempt it is dead.
    ///
    /// # Errors
    /// If the board cannot be read or written. A lost lease is no error.
    pub fn fail(&mut self, id: u64, fence: Fence, why: &str) -> Answer {
        let terms = self.terms;
        let step = |job: &Job, _| job.fail(fence, &terms).map(Some);
        self.change(id, step, |tx, now| {
            tx.execute("UPDATE jobs SET why = ? WHERE id = ?", params![why, int(id)])?;
            close(tx, fence, now, "failed")
        })
    }

    /// All jobs, the oldest first.
    ///
    /// # Errors
    /// If the board cannot be read or is damaged.
    pub fn jobs(&self) -> Result<Vec<Entry>, BoardError> {
        let select = "SELECT id, state, attempts, fence, until_ms, hash, spec, key, why FROM jobs ORDER BY id";
        let rows = self.rows(select, |row| {
            let (id, job) = job_of(row)?;
            Ok((id, job, row.get::<_, String>(6)?, row.get::<_, String>(7)?, row.get(8)?))
        })?;
        let entry = |(id, job, text, key, why): (u64, Job, String, String, Option<String>)| {
            Ok(Entry { id, job, spec: parsed(&self.path, id, &text, &key)?, why })
        };
        rows.into_iter().map(entry).collect()
    }

    /// The results by job, each checked against its hash.
    ///
    /// # Errors
    /// If the board cannot be read or is damaged.
    pub fn results(&self) -> Result<Vec<(u64, Recorded)>, BoardError> {
        let select = "SELECT r.job, r.result, j.hash FROM results r JOIN jobs j ON j.id = r.job ORDER BY r.job";
        let rows = self.rows(select, |row| {
            Ok((millis(row, 0)?, row.get::<_, String>(1)?, row.get::<_, Option<String>>(2)?))
        })?;
        let one = |(id, text, held): (u64, String, Option<String>)| {
            let damaged = |reason: String| BoardError::Damaged { path: self.path.clone(), reason };
            if held != Some(hash(&text)) {
                return Err(damaged(format!("the result of job {id} was edited")));
            }
            let result = serde_json::from_str(&text);
            let unread = |error| damaged(format!("the result of job {id} cannot be read: {error}"));
            Ok((id, result.map_err(unread)?))
        };
        rows.into_iter().map(one).collect()
    }

    /// All workers with their state and the milliseconds since they were seen.
    ///
    /// # Errors
    /// If the board cannot be read.
    pub fn workers(&self) -> Result<Vec<(Worker, String, Millis)>, BoardError> {
        let now = (self.clock)();
        let select = "SELECT worker, state, seen_ms FROM workers ORDER BY rowid";
        let rows = self.rows(select, |row| {
            let seen = now.saturating_sub(millis(row, 2)?);
            Ok((row.get::<_, String>(0)?, row.get(1)?, seen))
        })?;
        let one = |(text, state, seen): (String, String, Millis)| {
            let unread = |error: serde_json::Error| BoardError::Damaged {
                path: self.path.clone(),
                reason: format!("a worker cannot be read: {error}"),
            };
            Ok((serde_json::from_str(&text).map_err(unread)?, state, seen))
        };
        rows.into_iter().map(one).collect()
    }

    /// All leases there ever were, the oldest first.
    ///
    /// # Errors
    /// If the board cannot be read.
    pub fn attempts(&self) -> Result<Vec<Attempt>, BoardError> {
        let now = int((self.clock)());
        let select = format!(
            "SELECT fence, job, worker, card, max(coalesce(ended_ms, {now}) - began_ms, 0), how FROM attempts ORDER BY fence"
        );
        self.rows(&select, |row| {
            Ok(Attempt {
                fence: millis(row, 0)?,
                job: millis(row, 1)?,
                worker: row.get(2)?,
                card: row.get(3)?,
                took_ms: millis(row, 4)?,
                how: row.get(5)?,
            })
        })
    }

    fn rows<T>(
        &self,
        select: &str,
        of: impl Fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, BoardError> {
        let read = || {
            let mut statement = self.db.prepare(select)?;
            statement.query_map([], |row| of(row))?.collect()
        };
        let rows: rusqlite::Result<Vec<T>> = read();
        rows.at(&self.path)
    }

    /// One request on one job, in one transaction: the protocol's step and what else is written with it. A refused
    /// request, and one that was executed before (`None`), write nothing.
    fn change(
        &mut self,
        id: u64,
        step: impl FnOnce(&Job, Millis) -> Result<Option<Job>, Late>,
        also: impl FnOnce(&Transaction<'_>, Millis) -> rusqlite::Result<()>,
    ) -> Answer {
        let (path, clock) = (&self.path, self.clock);
        let tx = begin(&mut self.db, path)?;
        let now = clock();
        let select = "SELECT id, state, attempts, fence, until_ms, hash FROM jobs WHERE id = ?";
        let job = tx.query_row(select, [int(id)], job_of).optional().at(path)?;
        let Some((_, job)) = job else {
            return Err(BoardError::Refused(format!("there is no job {id} on {}", path.display())));
        };
        match step(&job, now) {
            Ok(None) => Ok(Ok(())),
            Err(late) => Ok(Err(late)),
            Ok(Some(next)) => {
                also(&tx, now).and_then(|()| store(&tx, id, &next)).at(path)?;
                tx.commit().at(path).map(Ok)
            }
        }
    }
}

/// Refuses a network file system.
fn local(path: &Path) -> Result<(), BoardError> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let whole = std::fs::canonicalize(path)
        .or_else(|_| std::fs::canonicalize(folder.unwrap_or(Path::new("."))));
    match whole.ok().and_then(|whole| network_mount(&mounts, &whole)) {
        Some(kind) => Err(BoardError::Network { path: path.to_path_buf(), kind }),
        None => Ok(()),
    }
}

fn connect(path: &Path) -> Result<Connection, BoardError> {
    let open = || {
        let db = Connection::open(path)?;
        db.busy_timeout(PATIENCE)?;
        db.pragma_update(None, "trusted_schema", false)?;
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "foreign_keys", true)?;
        Ok(db)
    };
    open().map_err(|source: rusqlite::Error| match source.sqlite_error_code() {
        Some(ErrorCode::NotADatabase) => BoardError::NoBoard(path.to_path_buf()),
        _ => BoardError::Sqlite { path: path.to_path_buf(), source },
    })
}

fn begin<'c>(db: &'c mut Connection, path: &Path) -> Result<Transaction<'c>, BoardError> {
    db.transaction_with_behavior(TransactionBehavior::Immediate).at(path)
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

fn number<T: rusqlite::types::FromSql>(db: &Connection, select: &str) -> rusqlite::Result<T> {
    db.query_row(select, [], |row| row.get(0))
}

/// A number as SQLite keeps it; what does not fit is a time or count that never comes.
fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn millis(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(at).map(|number| u64::try_from(number).unwrap_or(0))
}

/// The first job that is free for a worker. Two cards never race one champion twice.
fn free(
    tx: &Transaction<'_>,
    worker: &Worker,
    now: Millis,
) -> rusqlite::Result<Option<(u64, Job)>> {
    let select = "SELECT id, state, attempts, fence, until_ms, hash FROM jobs \
        WHERE (state = 'queued' OR (state = 'leased' AND until_ms <= ?1)) AND needs IN ('', ?2) \
        AND (subject = '' OR ?3 = '' OR (not_card <> ?3 AND NOT EXISTS (SELECT 1 FROM attempts a \
        JOIN jobs j ON j.id = a.job WHERE j.subject = jobs.subject AND j.id <> jobs.id AND a.card = ?3 \
        AND a.how IN ('running', 'done')))) ORDER BY needs = '', id LIMIT 1";
    tx.query_row(select, params![int(now), worker.target, worker.card], job_of).optional()
}

fn job_of(row: &Row<'_>) -> rusqlite::Result<(u64, Job)> {
    let state: String = row.get(1)?;
    let fence = || millis(row, 3);
    let state = match &*state {
        "queued" => State::Queued,
        "leased" => State::Leased { fence: fence()?, until: millis(row, 4)? },
        "done" => State::Done { fence: fence()?, hash: row.get(5)? },
        _ => State::Dead,
    };
    Ok((millis(row, 0)?, Job { state, attempts: row.get(2)? }))
}

fn store(tx: &Transaction<'_>, id: u64, job: &Job) -> rusqlite::Result<()> {
    let (state, fence, until, hash) = match &job.state {
        State::Queued => ("queued", None, None, None),
        State::Leased { fence, until } => ("leased", Some(int(*fence)), Some(int(*until)), None),
        State::Done { fence, hash } => ("done", Some(int(*fence)), None, Some(hash)),
        State::Dead => ("dead", None, None, None),
    };
    let update =
        "UPDATE jobs SET state = ?, attempts = ?, fence = ?, until_ms = ?, hash = ? WHERE id = ?";
    tx.execute(update, params![state, job.attempts, fence, until, hash, int(id)]).map(|_| ())
}

fn next_fence(tx: &Transaction<'_>) -> rusqlite::Result<Fence> {
    let last = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'attempts'";
    number::<i64>(tx, last).map(|last| last.cast_unsigned() + 1)
}

fn close(tx: &Transaction<'_>, fence: Fence, now: Millis, how: &str) -> rusqlite::Result<()> {
    let update = "UPDATE attempts SET ended_ms = ?, how = ? WHERE fence = ?";
    tx.execute(update, params![int(now), how, int(fence)]).map(|_| ())
}

/// Ends the attempt whose lease ran out, at the time when it did.
fn close_expired(tx: &Transaction<'_>, job: &Job) -> rusqlite::Result<()> {
    match job.state {
        State::Leased { fence, until } => close(tx, fence, until, "expired"),
        State::Queued | State::Done { .. } | State::Dead => Ok(()),
    }
}

fn leased(tx: &Transaction<'_>, path: &Path, id: u64, fence: Fence) -> Result<Leased, BoardError> {
    let select = "SELECT spec, key FROM jobs WHERE id = ?";
    let both = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
    let (text, key) = tx.query_row(select, [int(id)], both).at(path)?;
    let spec = parsed(path, id, &text, &key)?;
    let mut priors = String::new();
    if !spec.priors.is_empty() {
        let select = "SELECT priors FROM snapshots WHERE hash = ?";
        let held = tx.query_row(select, [&spec.priors], |row| row.get(0)).optional().at(path)?;
        priors = held.unwrap_or_default();
        if hash(&priors) != spec.priors {
            let reason = format!("the snapshot of priors of job {id} is missing or was edited");
            return Err(BoardError::Damaged { path: path.to_path_buf(), reason });
        }
    }
    Ok(Leased { id, fence, spec, priors })
}

fn parsed(path: &Path, id: u64, text: &str, key: &str) -> Result<Spec, BoardError> {
    let damaged = |reason: String| BoardError::Damaged { path: path.to_path_buf(), reason };
    let spec: Spec = serde_json::from_str(text)
        .map_err(|error| damaged(format!("job {id} cannot be read: {error}")))?;
    if spec.key() == key { Ok(spec) } else { Err(damaged(format!("job {id} was edited"))) }
}
