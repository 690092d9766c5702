//! The store: the results of all searches in one SQLite file that other programs read directly.
//!
//! **Promises.** The ledgers are the source of truth, and the store can be rebuilt from them at any time:
//! [`Store::add`] adds rows of a ledger with their chain, in order, each once, all or none. A killed process leaves the
//! store at its last finished transaction, and adding the ledger again brings it to exactly the ledger's rows. Several
//! processes may read while one writes (WAL).
//!
//! **Versions.** `user_version` counts the steps of the schema ([`schema::STEPS`]). An older file is upgraded when it
//! is opened, in one transaction; a newer one is refused. `docs/reference/store.md` is generated from the same tables.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::types::{Value as Cell, ValueRef};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use serde_json::{Map, Value};

use crate::error::{At, CorpusError};
use crate::ledger::Link;

mod derive;
pub mod schema;
#[cfg(test)]
mod tests;

use derive::{Place, Record};
use schema::{STEPS, TABLES, Table, VERSION};

/// Marks a file as a store: `amk1`.
const APPLICATION_ID: i64 = 0x616d_6b31;

/// Longest wait for another process's transaction.
const PATIENCE: Duration = Duration::from_secs(10);

/// The best trial by model, target, device and kind of latency: the last trial of a search that led or, if its last
/// confirmation refuted it, the first trial; the least of several searches.
pub const BEST: &str = "\
WITH leading AS (SELECT run, seq, trial, latency_us FROM trials WHERE outcome IN ('baseline', 'kept')), \
refuted AS (SELECT c.run, l.seq FROM confirmations c JOIN leading l ON l.run = c.run AND l.trial = c.champion \
WHERE c.decision = 'reverted' AND c.seq = (SELECT max(seq) FROM confirmations x WHERE x.run = c.run) \
AND l.seq = (SELECT max(seq) FROM leading y WHERE y.run = c.run)), \
best AS (SELECT runs.*, (SELECT count(*) FROM trials t WHERE t.run = runs.run) AS trials, \
CASE WHEN EXISTS (SELECT 1 FROM refuted r WHERE r.run = runs.run) \
THEN (SELECT latency_us FROM leading l WHERE l.run = runs.run AND l.seq < (SELECT r.seq FROM refuted r WHERE r.run = l.run) ORDER BY seq LIMIT 1) \
ELSE (SELECT latency_us FROM leading l WHERE l.run = runs.run ORDER BY seq DESC LIMIT 1) END AS us FROM runs) \
SELECT model, graph, graph_id, target, latency_kind, device, count(*) AS runs, sum(trials) AS trials, min(us) AS best_us, run AS best_run \
FROM best GROUP BY coalesce(graph_id, graph), target, latency_kind, device ORDER BY model, target, latency_kind, device";

/// The effect of moves, ordered by how often they were kept.
pub const PRIORS: &str = "\
SELECT latency_kind, device, target, graph, move, tries, kept, failed, gain_sum / max(tries - failed, 1) AS gain_mean, gain_best \
FROM priors ORDER BY 1.0 * kept / tries DESC, gain_best DESC, move LIMIT 32";

/// An open store.
#[derive(Debug)]
pub struct Store {
    db: Connection,
    path: PathBuf,
}

/// The result of [`Store::add`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Added {
    /// Number of new rows.
    pub new: u64,
    /// Number of rows already present.
    pub held: u64,
}

/// An id for a new search: a hash of everything that distinguishes it.
#[must_use]
pub fn fresh_run_id(what: &str) -> String {
    blake3::hash(what.as_bytes()).to_hex()[..16].to_owned()
}

/// The id of a search from its ledger's header: the header's own id, else the start of its hash.
#[must_use]
pub fn run_id(header: &Value, hash: &str) -> String {
    let named = header.get("run").and_then(Value::as_str);
    named.map_or_else(|| hash.chars().take(16).collect(), str::to_owned)
}

impl Store {
    /// Opens a store, or creates one. An older one is upgraded.
    ///
    /// # Errors If it is not a store, is a newer one, or cannot be read or written.
    pub fn open(path: &Path) -> Result<Self, CorpusError> {
        crate::files::make_folder_of(path)?;
        let found = std::fs::metadata(path).ok();
        if found.as_ref().is_some_and(|found| !found.is_file() && !found.is_dir()) {
            return Err(CorpusError::io("open", path, crate::files::not_regular()));
        }
        let is_new = found.is_none();
        let open = || -> rusqlite::Result<_> {
            let db = Connection::open(path)?;
            db.busy_timeout(PATIENCE)?;
            db.pragma_update(None, "trusted_schema", false)?;
            Ok(db)
        };
        let db = open().at("open", path)?;
        let mut store = Self { db, path: path.to_path_buf() };
        if let Err(error) = store.prepare() {
            drop(store);
            if is_new {
                // Space taken from a full disk would be missing to the ledger.
                remove(path);
            }
            return Err(error);
        }
        Ok(store)
    }

    /// Opens an existing store.
    ///
    /// # Errors
    /// As [`open`](Self::open), and if there is none.
    pub fn existing(path: &Path) -> Result<Self, CorpusError> {
        let found = std::fs::metadata(path).at("read", path)?;
        if !found.is_file() {
            return Err(CorpusError::io("read", path, std::io::ErrorKind::IsADirectory.into()));
        }
        Self::open(path)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs a read, and turns its failure into an error with a remedy.
    fn read<T>(
        &self,
        of: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, CorpusError> {
        of(&self.db).at("read", &self.path)
    }

    fn prepare(&mut self) -> Result<(), CorpusError> {
        let version = self.version()?;
        if version > VERSION {
            return Err(CorpusError::NewerStore {
                path: self.path.clone(),
                found: version,
                known: schema::VERSION,
            });
        }
        // A trigger would run on each row that is written from here on.
        if let Some(name) = self.trigger()? {
            return Err(CorpusError::Store {
                action: "open",
                path: self.path.clone(),
                reason: format!(
                    "it has a trigger ({name:?}), which no store has; make it anew from the runs: amk corpus import RUNS --store NEW"
                ),
                damaged: true,
            });
        }
        if version == VERSION {
            return Ok(());
        }
        self.bring_up_to_date().at("bring up to date", &self.path)
    }

    /// The name of a trigger, if there is one.
    fn trigger(&self) -> Result<Option<String>, CorpusError> {
        let select = "SELECT name FROM sqlite_schema WHERE type = 'trigger' ORDER BY name LIMIT 1";
        self.read(|db| db.query_row(select, [], |row| row.get(0)).optional())
    }

    /// The first object in the file that is not part of a store, or differs from the store's definition.
    fn foreign(&self, fresh: &Connection) -> rusqlite::Result<Option<String>> {
        let objects = |db: &Connection| -> rusqlite::Result<Vec<(String, String, String)>> {
            let select = "SELECT type, name, coalesce(sql, '') FROM sqlite_schema \
                WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type, name";
            let mut statement = db.prepare(select)?;
            // Without comments: files of builds that wrote none, or others, are stores too.
            let code = |sql: String| -> String {
                let parts = sql.lines().map(|line| line.split("--").next().unwrap_or(line).trim());
                parts.collect()
            };
            let rows =
                statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, code(row.get(2)?))))?;
            rows.collect()
        };
        let (here, wanted) = (objects(&self.db)?, objects(fresh)?);
        let more = here.iter().find(|object| !wanted.contains(object));
        let less = wanted.iter().find(|object| !here.contains(object));
        Ok(more.or(less).map(|(kind, name, _)| {
            format!("{kind} {name:?} is not as a store of this version has it")
        }))
    }

    /// The file's version; zero for an empty one.
    fn version(&self) -> Result<i64, CorpusError> {
        let (id, version, tables): (i64, i64, i64) = self.read(|db| {
            let number = |pragma: &str| db.query_row(pragma, [], |row| row.get(0));
            let tables = number("SELECT count(*) FROM sqlite_schema")?;
            Ok((number("PRAGMA application_id")?, number("PRAGMA user_version")?, tables))
        })?;
        if id != APPLICATION_ID && tables > 0 {
            return Err(CorpusError::NoStore(self.path.clone()));
        }
        Ok(version)
    }

    fn bring_up_to_date(&mut self) -> rusqlite::Result<()> {
        // Set outside of a transaction and stored in the file. Two processes that create the same store take turns.
        self.db.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
        let db = self.db.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let version: i64 = db.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if version >= VERSION {
            return Ok(());
        }
        for table in STEPS[usize::try_from(version).unwrap_or(0)..].iter().copied().flatten() {
            db.execute_batch(&table.sql())?;
        }
        for table in TABLES.iter().filter(|table| table.is_derived()) {
            db.execute_batch(&format!("DROP TABLE IF EXISTS {}; {}", table.name, table.sql()))?;
        }
        derive_all(&db)?;
        db.pragma_update(None, "application_id", APPLICATION_ID)?;
        db.pragma_update(None, "user_version", VERSION)?;
        db.commit()
    }

    /// Adds the rows of a ledger, the header first, that are not there yet: all of them or, on an error, none.
    ///
    /// # Errors
    /// If the rows do not follow from each other or from those that are there, or the file cannot be written.
    pub fn add(
        &mut self,
        run: &str,
        links: impl IntoIterator<Item = Link>,
    ) -> Result<Added, CorpusError> {
        let path = self.path.clone();
        let db =
            self.db.transaction_with_behavior(TransactionBehavior::Immediate).at("write", &path)?;
        let mut last = last(&db, run).at("write", &path)?;
        let mut place = place(&db, run).at("write", &path)?;
        let mut added = Added::default();
        for link in links {
            if let Some((seq, _)) = &last
                && link.seq <= *seq
            {
                let held = hash_at(&db, run, link.seq).at("write", &path)?;
                if held.as_deref() != Some(&link.hash) {
                    return Err(CorpusError::Diverged { path, run: run.to_owned(), seq: link.seq });
                }
                added.held += 1;
                continue;
            }
            let tampered = |reason: String| CorpusError::Foreign {
                run: run.to_owned(),
                seq: link.seq,
                reason,
            };
            link.follows(last.as_ref().map(|(seq, hash)| (*seq, hash.as_str())))
                .map_err(tampered)?;
            let record: Value = serde_json::from_str(&link.record)
                .map_err(|e| tampered(format!("it is not JSON: {e}")))?;
            if link.seq == 0 {
                place = Place::of(&record);
            }
            write(&db, run, &place, &link, &record).at("write", &path)?;
            added.new += 1;
            last = Some((link.seq, link.hash));
        }
        db.commit().at("write", &path)?;
        Ok(added)
    }

    /// The last stored row of a run, with its hash.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn last(&self, run: &str) -> Result<Option<(u64, String)>, CorpusError> {
        self.read(|db| last(db, run))
    }

    /// Adds a program, unless one with this id exists; returns whether it was new.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn add_program(&mut self, program_id: &str, saved: &[u8]) -> Result<bool, CorpusError> {
        let insert = "INSERT OR IGNORE INTO programs VALUES (?, ?)";
        let added = self.db.execute(insert, params![program_id, saved]);
        added.map(|rows| rows > 0).at("write", &self.path)
    }

    /// A program's bytes.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn program(&self, program_id: &str) -> Result<Option<Vec<u8>>, CorpusError> {
        let select = "SELECT saved FROM programs WHERE program_id = ?";
        self.read(|db| db.query_row(select, [program_id], |row| row.get(0)).optional())
    }

    /// Passes every program to a callback, by id, until one is refused; returns that reason.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn each_program(
        &self,
        mut look: impl FnMut(&str, &[u8]) -> Result<(), String>,
    ) -> Result<Result<(), String>, CorpusError> {
        self.read(|db| {
            let select = "SELECT program_id, saved FROM programs ORDER BY program_id";
            let mut statement = db.prepare(select)?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                let (id, saved) = (row.get_ref(0)?, row.get_ref(1)?);
                // A value of another type is not a program, but no SQLite error either.
                let looked = match (id.as_str(), saved.as_bytes()) {
                    (Ok(id), Ok(saved)) => look(id, saved),
                    (Ok(id), Err(_)) => look(id, &[]),
                    (Err(_), _) => Err("a program has an id that is no text".to_owned()),
                };
                if looked.is_err() {
                    return Ok(looked);
                }
            }
            Ok(Ok(()))
        })
    }

    /// The ids of the runs, in order.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn runs(&self) -> Result<Vec<String>, CorpusError> {
        self.read(|db| {
            let mut statement = db.prepare("SELECT run FROM runs ORDER BY run")?;
            statement.query_map([], |row| row.get(0))?.collect()
        })
    }

    /// The rows of a run, the header first.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn links(&self, run: &str) -> Result<Vec<Link>, CorpusError> {
        self.read(|db| links(db, run))
    }

    /// The rows of a query as JSON objects.
    ///
    /// # Errors
    /// If the query is invalid for this store.
    pub fn query(
        &self,
        sql: &str,
        parameters: &[&str],
    ) -> Result<Vec<Map<String, Value>>, CorpusError> {
        let mut rows = Vec::new();
        self.for_each(sql, parameters, |names, cells| {
            let fields = names.iter().zip(cells);
            rows.push(fields.map(|(name, cell)| (name.clone(), json_of(cell))).collect());
            Ok(())
        })?;
        Ok(rows)
    }

    /// Passes every row of a query to a callback.
    fn for_each(
        &self,
        sql: &str,
        parameters: &[&str],
        mut row: impl FnMut(&[String], Vec<Cell>) -> Result<(), CorpusError>,
    ) -> Result<(), CorpusError> {
        let mut statement = self.db.prepare(sql).at("read", &self.path)?;
        let names: Vec<String> = statement.column_names().map(str::to_owned).collect();
        let mut rows =
            statement.query(rusqlite::params_from_iter(parameters)).at("read", &self.path)?;
        while let Some(found) = rows.next().at("read", &self.path)? {
            let cell = |index| found.get::<_, Cell>(index);
            let cells: Result<Vec<Cell>, _> = (0..names.len()).map(cell).collect();
            row(&names, cells.at("read", &self.path)?)?;
        }
        Ok(())
    }

    /// Rows of each table.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, CorpusError> {
        let count = |db: &Connection, table: &Table| {
            let select = format!("SELECT count(*) FROM {}", table.name);
            let rows: i64 = db.query_row(&select, [], |row| row.get(0))?;
            Ok((table.name, rows.cast_unsigned()))
        };
        self.read(|db| TABLES.iter().map(|table| count(db, table)).collect())
    }

    /// Checks that the file is intact, every chain holds and the derived tables match the records; otherwise returns
    /// what is wrong.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn check(&self) -> Result<Result<(), String>, CorpusError> {
        let sound: String = self
            .db
            .query_row("PRAGMA integrity_check", [], |row| row.get(0))
            .at("read", &self.path)?;
        if sound != "ok" {
            return Ok(Err(sound));
        }
        let fresh = Connection::open_in_memory().at("read", &self.path)?;
        for table in TABLES {
            fresh.execute_batch(&table.sql()).at("read", &self.path)?;
        }
        if let Some(reason) = self.foreign(&fresh).at("read", &self.path)? {
            return Ok(Err(reason));
        }
        let mut fresh = Self { db: fresh, path: self.path.clone() };
        for run in self.runs()? {
            match fresh.add(&run, self.links(&run)?) {
                Err(CorpusError::Foreign { reason, .. }) => {
                    return Ok(Err(format!("run {run}: {reason}")));
                }
                added => drop(added?),
            }
        }
        for table in TABLES.iter().filter(|table| table.is_derived()) {
            let all = format!("SELECT * FROM {} ORDER BY {}", table.name, table.key);
            let (here, wanted) = (self.query(&all, &[])?, fresh.query(&all, &[])?);
            let same = here.len() == wanted.len();
            if !same || !here.iter().zip(&wanted).all(|(here, wanted)| alike(table, here, wanted)) {
                return Ok(Err(format!("table {} does not follow from the records", table.name)));
            }
        }
        Ok(Ok(()))
    }
}

/// Whether two rows of a table are equal. A sum over runs may differ in its last bits if the runs came in another
/// order.
fn alike(table: &Table, here: &Map<String, Value>, wanted: &Map<String, Value>) -> bool {
    let near = |name: &str| {
        let number = |row: &Map<String, Value>| row.get(name).and_then(Value::as_f64);
        number(here).zip(number(wanted)).is_some_and(|(here, wanted)| (here - wanted).abs() < 1e-9)
    };
    let same = |(name, value): (&String, &Value)| {
        wanted.get(name) == Some(value)
            || (table.name == "priors" && name == "gain_sum" && near(name))
    };
    here.len() == wanted.len() && here.iter().all(same)
}

/// Removes a store whose creation failed, with the files that SQLite keeps beside it.
fn remove(path: &Path) {
    for end in ["", "-wal", "-shm"] {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        let _ = std::fs::remove_file(PathBuf::from(name));
    }
}

fn write(
    db: &Connection,
    run: &str,
    place: &Place,
    link: &Link,
    record: &Value,
) -> rusqlite::Result<()> {
    let mut statement = db.prepare_cached("INSERT INTO records VALUES (?,?,?,?,?)")?;
    statement.execute(params![run, link.seq.cast_signed(), link.prev, link.hash, link.record])?;
    Record { db, run, place, seq: link.seq, record }.derive()
}

/// Fills the derived tables from the records.
fn derive_all(db: &Connection) -> rusqlite::Result<()> {
    let mut statement = db.prepare("SELECT run FROM records WHERE seq = 0 ORDER BY run")?;
    let runs: Vec<String> = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
    for run in runs {
        let place = place(db, &run)?;
        for link in links(db, &run)? {
            let record = serde_json::from_str(&link.record).unwrap_or(Value::Null);
            let (run, place, record) = (run.as_str(), &place, &record);
            Record { db, run, place, seq: link.seq, record }.derive()?;
        }
    }
    Ok(())
}

fn links(db: &Connection, run: &str) -> rusqlite::Result<Vec<Link>> {
    let select = "SELECT seq, prev, record, hash FROM records WHERE run = ? ORDER BY seq";
    let mut statement = db.prepare(select)?;
    let link = |row: &rusqlite::Row<'_>| {
        let seq: i64 = row.get(0)?;
        let seq = seq.cast_unsigned();
        Ok(Link { seq, prev: row.get(1)?, record: row.get(2)?, hash: row.get(3)? })
    };
    statement.query_map([run], link)?.collect()
}

fn last(db: &Connection, run: &str) -> rusqlite::Result<Option<(u64, String)>> {
    let select = "SELECT seq, hash FROM records WHERE run = ? ORDER BY seq DESC LIMIT 1";
    let found = db.query_row(select, [run], |row| Ok((row.get::<_, i64>(0)?, row.get(1)?)));
    Ok(found.optional()?.map(|(seq, hash)| (seq.cast_unsigned(), hash)))
}

fn hash_at(db: &Connection, run: &str, seq: u64) -> rusqlite::Result<Option<String>> {
    let select = "SELECT hash FROM records WHERE run = ? AND seq = ?";
    db.query_row(select, params![run, seq.cast_signed()], |row| row.get(0)).optional()
}

fn place(db: &Connection, run: &str) -> rusqlite::Result<Place> {
    let select = "SELECT record FROM records WHERE run = ? AND seq = 0";
    let header: Option<String> = db.query_row(select, [run], |row| row.get(0)).optional()?;
    let header: Option<Value> = header.and_then(|text| serde_json::from_str(&text).ok());
    Ok(header.map_or_else(Place::default, |header| Place::of(&header)))
}

fn json_of(cell: Cell) -> Value {
    match ValueRef::from(&cell) {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => number.into(),
        ValueRef::Real(number) => number.into(),
        ValueRef::Text(text) => String::from_utf8_lossy(text).into(),
        ValueRef::Blob(bytes) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}
