//! The board in an SQLite file, for the workers of one machine.
//!
//! Every request is one immediate transaction: it reads the job, asks [`protocol`](crate::protocol) for the next state,
//! and writes it. The clock is this machine's, read inside the transaction. The tables are in [`SCHEMA`].

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{
    Connection, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, params,
};

use crate::board::{Answer, Attempt, JobRow, Offer, Store, Worker};
use crate::board_error::{At, BoardError};
use crate::job::Spec;
use crate::mount::network_mount;
use crate::protocol::{Claimed, Fence, Finish, Job, Late, Millis, State, Terms};

/// Marks a file as a board: `amkf`.
const APPLICATION_ID: i64 = 0x616d_6b66;
/// Version of the tables.
const VERSION: i64 = 2;
/// Longest wait for another process's transaction.
const PATIENCE: Duration = Duration::from_secs(10);

const SCHEMA: &str = "
CREATE TABLE terms(lease_ms INTEGER NOT NULL, heartbeat_ms INTEGER NOT NULL, attempts_max INTEGER NOT NULL) STRICT;
CREATE TABLE snapshots(hash TEXT PRIMARY KEY, priors TEXT NOT NULL) STRICT;
CREATE TABLE jobs(id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, needs TEXT NOT NULL, subject TEXT NOT NULL,
  not_card TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL, fence INTEGER,
  until_ms INTEGER, hash TEXT, why TEXT) STRICT;
CREATE INDEX jobs_open ON jobs(state, needs);
CREATE TABLE workers(id TEXT PRIMARY KEY, worker TEXT NOT NULL, state TEXT NOT NULL, seen_ms INTEGER NOT NULL) STRICT;
CREATE TABLE attempts(fence INTEGER PRIMARY KEY AUTOINCREMENT, job INTEGER NOT NULL REFERENCES jobs,
  worker TEXT NOT NULL REFERENCES workers, ask TEXT NOT NULL, card TEXT NOT NULL, began_ms INTEGER NOT NULL,
  ended_ms INTEGER, how TEXT NOT NULL, UNIQUE(worker, ask)) STRICT;
CREATE INDEX attempts_job ON attempts(job);
CREATE TABLE results(job INTEGER PRIMARY KEY REFERENCES jobs, fence INTEGER NOT NULL UNIQUE REFERENCES attempts,
  result TEXT NOT NULL, recorded_ms INTEGER NOT NULL) STRICT;
";

/// A board in a file.
pub(crate) struct Sqlite {
    db: Connection,
    path: PathBuf,
    terms: Terms,
    clock: fn() -> Millis,
}

fn wall_clock() -> Millis {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(Millis::MAX)
}

impl Sqlite {
    /// Makes the tables, unless they are there.
    pub(crate) fn create(path: &Path, terms: Terms) -> Result<(), BoardError> {
        local(path)?;
        let mut db = connect(path)?;
        let tables = "SELECT count(*) FROM sqlite_schema";
        if number::<i64>(&db, tables).at(path)? == 0 {
            db.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(())).at(path)?;
        }
        // Two that create one board take turns: the second finds the tables.
        let tx = begin(&mut db, path)?;
        if number::<i64>(&tx, tables).at(path)? == 0 {
            let Terms { lease_ms, heartbeat_ms, attempts_max } = terms;
            let insert = "INSERT INTO terms VALUES (?, ?, ?)";
            tx.execute_batch(SCHEMA)
                .and_then(|()| {
                    tx.execute(insert, params![int(lease_ms), int(heartbeat_ms), attempts_max])
                })
                .and_then(|_| tx.pragma_update(None, "application_id", APPLICATION_ID))
                .and_then(|()| tx.pragma_update(None, "user_version", VERSION))
                .at(path)?;
        }
        tx.commit().at(path)
    }

    /// Opens a file that is a board.
    pub(crate) fn open(path: &Path) -> Result<(Self, Terms), BoardError> {
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
        Ok((Self { db, path: path.to_path_buf(), terms, clock: wall_clock }, terms))
    }

    /// The same board with another clock.
    pub(crate) fn with_clock(self, clock: fn() -> Millis) -> Self {
        Self { clock, ..self }
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

impl Store for Sqlite {
    fn freeze(&mut self, key: &str, priors: &str) -> Result<(), BoardError> {
        let insert = "INSERT OR IGNORE INTO snapshots VALUES (?, ?)";
        self.db.execute(insert, params![key, priors]).at(&self.path).map(drop)
    }

    fn submit(&mut self, specs: &[Spec]) -> Result<u64, BoardError> {
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
        Ok(new)
    }

    fn join(&mut self, worker: &Worker, text: &str) -> Result<bool, BoardError> {
        let insert = "INSERT INTO workers VALUES (?1, ?2, 'active', ?3) ON CONFLICT (id) DO UPDATE SET id = ?1 \
            WHERE worker = ?2";
        let values = params![worker.id, text, int((self.clock)())];
        self.db.execute(insert, values).at(&self.path).map(|rows| rows == 1)
    }

    fn leave(&mut self, worker: &str) -> Result<(), BoardError> {
        let update = "UPDATE workers SET state = 'gone', seen_ms = ? WHERE id = ?";
        self.db.execute(update, params![int((self.clock)()), worker]).at(&self.path)?;
        Ok(())
    }

    fn drain(&mut self, workers: &[String]) -> Result<u64, BoardError> {
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

    fn claim(&mut self, worker: &Worker, ask: &str) -> Result<Offer, BoardError> {
        let (path, terms, clock) = (self.path.clone(), self.terms, self.clock);
        let tx = begin(&mut self.db, &path)?;
        let now = clock();
        let seen = "UPDATE workers SET seen_ms = ? WHERE id = ? RETURNING state";
        let state: Option<String> = tx
            .query_row(seen, params![int(now), worker.id], |row| row.get(0))
            .optional()
            .at(&path)?;
        if let Some((id, job)) = asked_before(&tx, worker, ask).at(&path)?
            && let State::Leased { fence, .. } = job.state
            && let Ok(job) = job.beat(now, fence, &terms)
        {
            store(&tx, id, &job).at(&path)?;
            let again = offer(&tx, id, fence).at(&path)?;
            return tx.commit().at(&path).map(|()| again);
        }
        if state.as_deref() != Some("active") {
            return Ok(Offer::Drained);
        }
        while let Some((id, job)) = free(&tx, worker, now).at(&path)? {
            close_expired(&tx, &job).at(&path)?;
            let fence = next_fence(&tx).at(&path)?;
            match job.claim(now, fence, &terms) {
                Claimed::Granted(job) => {
                    store(&tx, id, &job).at(&path)?;
                    let insert = "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, NULL, 'running')";
                    let values =
                        params![int(fence), int(id), worker.id, ask, worker.card, int(now)];
                    tx.execute(insert, values).at(&path)?;
                    let leased = offer(&tx, id, fence).at(&path)?;
                    tx.commit().at(&path)?;
                    return Ok(leased);
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
        Ok(Offer::Nothing { open: open.cast_unsigned() })
    }

    fn beat(&mut self, id: u64, fence: Fence) -> Answer {
        let terms = self.terms;
        let step = |job: &Job, now| job.beat(now, fence, &terms).map(Some);
        self.change(id, step, |tx, now| {
            let seen = "UPDATE workers SET seen_ms = ? WHERE id = (SELECT worker FROM attempts WHERE fence = ?)";
            tx.execute(seen, params![int(now), int(fence)]).map(drop)
        })
    }

    fn finish(&mut self, id: u64, fence: Fence, hash: &str, result: &str) -> Answer {
        let step = |job: &Job, _| match job.finish(fence, hash)? {
            Finish::Now(job) => Ok(Some(job)),
            Finish::Already => Ok(None),
        };
        self.change(id, step, |tx, now| {
            let insert = "INSERT INTO results VALUES (?, ?, ?, ?)";
            tx.execute(insert, params![int(id), int(fence), result, int(now)])?;
            close(tx, fence, now, "done")
        })
    }

    fn release(&mut self, id: u64, fence: Fence, why: Option<&str>) -> Answer {
        let terms = self.terms;
        let Some(why) = why else {
            let step = |job: &Job, _| job.give_back(fence).map(Some);
            return self.change(id, step, |tx, now| close(tx, fence, now, "given_back"));
        };
        let step = |job: &Job, _| job.fail(fence, &terms).map(Some);
        self.change(id, step, |tx, now| {
            tx.execute("UPDATE jobs SET why = ? WHERE id = ?", params![why, int(id)])?;
            close(tx, fence, now, "failed")
        })
    }

    fn jobs(&mut self) -> Result<Vec<JobRow>, BoardError> {
        let select = "SELECT id, state, attempts, fence, until_ms, hash, spec, key, why FROM jobs ORDER BY id";
        self.rows(select, |row| {
            let (id, job) = job_of(row)?;
            Ok(JobRow { id, job, spec: row.get(6)?, key: row.get(7)?, why: row.get(8)? })
        })
    }

    fn results(&mut self) -> Result<Vec<(u64, String, Option<String>)>, BoardError> {
        let select = "SELECT r.job, r.result, j.hash FROM results r JOIN jobs j ON j.id = r.job ORDER BY r.job";
        self.rows(select, |row| Ok((millis(row, 0)?, row.get(1)?, row.get(2)?)))
    }

    fn workers(&mut self) -> Result<Vec<(String, String, Millis)>, BoardError> {
        let now = (self.clock)();
        let select = "SELECT worker, state, seen_ms FROM workers ORDER BY rowid";
        self.rows(select, |row| Ok((row.get(0)?, row.get(1)?, now.saturating_sub(millis(row, 2)?))))
    }

    fn attempts(&mut self) -> Result<Vec<Attempt>, BoardError> {
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

    fn set_patience(&mut self, patience: Duration) -> Result<(), BoardError> {
        self.db.busy_timeout(patience).at(&self.path)
    }

    fn wait(&mut self, most: Duration) {
        std::thread::sleep(most);
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

/// The job that this claim of a worker has leased already.
fn asked_before(
    tx: &Transaction<'_>,
    worker: &Worker,
    ask: &str,
) -> rusqlite::Result<Option<(u64, Job)>> {
    let select = "SELECT j.id, j.state, j.attempts, j.fence, j.until_ms, j.hash FROM attempts a \
        JOIN jobs j ON j.id = a.job AND j.fence = a.fence WHERE a.worker = ? AND a.ask = ? AND a.how = 'running'";
    tx.query_row(select, [&*worker.id, ask], job_of).optional()
}

fn offer(tx: &Transaction<'_>, id: u64, fence: Fence) -> rusqlite::Result<Offer> {
    let select = "SELECT j.spec, j.key, (SELECT s.priors FROM snapshots s WHERE s.hash = j.spec ->> '$.priors') \
        FROM jobs j WHERE j.id = ?";
    tx.query_row(select, [int(id)], |row| {
        Ok(Offer::Leased { id, fence, spec: row.get(0)?, key: row.get(1)?, priors: row.get(2)? })
    })
}
