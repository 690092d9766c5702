//! The board on a PostgreSQL server, for workers of many hosts.
//!
//! Each request is one call of a function of `schema.sql`, so it is one transaction, and the only clock is the server's.
//! A request whose answer is lost is resolved by repeating it: every function finds what it did the first time. Nothing
//! waits without a bound: not for the network, not for a lock, not for a statement.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Config, Error, Row};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::board::{Answer, Attempt, JobRow, Offer, Store, Worker};
use crate::board_error::BoardError;
use crate::job::Spec;
use crate::protocol::{Fence, Job, Late, Millis, State, Terms};

const SCHEMA: &str = include_str!("schema.sql");
/// Version of the schema.
const VERSION: i64 = 1;
/// The five functions of a worker, with their arguments.
const FUNCTIONS: &str = "amk_fleet.register(text, text, text), amk_fleet.claim(text, text), \
    amk_fleet.beat(bigint, bigint), amk_fleet.finish(bigint, bigint, text, text), \
    amk_fleet.release(bigint, bigint, text)";
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// What bounds a statement on the server, in case that nobody waits for it any more.
const LIMITS: &str = "SET statement_timeout = '30s'; SET lock_timeout = '5s'; SET search_path = pg_catalog; \
    SET idle_in_transaction_session_timeout = '30s'; SET client_min_messages = warning";

/// A parameter with its type: statements are then sent in one piece, without being prepared.
type Value<'a> = (&'a (dyn ToSql + Sync), Type);

/// A board on a server.
pub(crate) struct Postgres {
    path: PathBuf,
    config: Config,
    tls: MakeRustlsConnect,
    runtime: Runtime,
    link: Option<Link>,
    patience: Duration,
}

/// A connection. What drives it runs while a request does.
struct Link {
    client: Client,
    /// Told when the server says that a job may be free.
    hint: Arc<Notify>,
    listens: bool,
}

/// Why a request got no answer.
enum Trouble {
    Server(Error),
    Silent,
}

impl Postgres {
    /// Makes the schema, unless it is there, and lets `role` call the functions of a worker.
    pub(crate) fn create(path: &Path, terms: Terms, role: Option<&str>) -> Result<(), BoardError> {
        let mut board = Self::unconnected(path)?;
        let Terms { lease_ms, heartbeat_ms, attempts_max } = terms;
        let grant = role.map_or_else(String::new, |role| {
            let role = role.replace('"', "\"\"");
            format!(
                "GRANT USAGE ON SCHEMA amk_fleet TO \"{role}\"; GRANT EXECUTE ON FUNCTION {FUNCTIONS} TO \"{role}\";"
            )
        });
        // Two that create one board take turns: the second finds the schema.
        let script = format!(
            "BEGIN; SELECT pg_advisory_xact_lock({VERSION}, 1634560870);\n{SCHEMA}\nINSERT INTO amk_fleet.terms \
             VALUES ({VERSION}, {lease_ms}, {heartbeat_ms}, {attempts_max}); COMMIT;"
        );
        let there = "SELECT 1 FROM pg_namespace WHERE nspname = 'amk_fleet'";
        if board.ask(there, &[])?.is_empty() {
            let made = board.script(&script);
            if made.is_err() && board.ask(there, &[])?.is_empty() {
                return made;
            }
        }
        if grant.is_empty() { Ok(()) } else { board.script(&grant) }
    }

    /// Connects to a board.
    pub(crate) fn open(path: &Path) -> Result<(Self, Terms), BoardError> {
        let mut board = Self::unconnected(path)?;
        let rows = board.ask("SELECT * FROM amk_fleet.register(NULL, NULL, NULL)", &[])?;
        let Some(row) = rows.first() else { return Err(BoardError::NoBoard(board.path)) };
        let found: i64 = row.get(0);
        if found != VERSION {
            return Err(BoardError::Version { path: board.path, found, known: VERSION });
        }
        let terms = Terms {
            lease_ms: natural(row, 1),
            heartbeat_ms: natural(row, 2),
            attempts_max: u32::try_from(natural(row, 3)).unwrap_or(u32::MAX),
        };
        Ok((board, terms))
    }

    fn unconnected(path: &Path) -> Result<Self, BoardError> {
        let (config, roots) = address(&path.to_string_lossy())?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| {
            BoardError::Refused(format!("cannot wait for {}: {error}", path.display()))
        })?;
        let tls = MakeRustlsConnect::new(tls(roots.as_deref())?);
        Ok(Self { path: path.to_path_buf(), config, tls, runtime, link: None, patience: PATIENCE })
    }

    /// One statement, after connecting if there is no connection.
    fn ask(&mut self, sql: &str, values: &[Value<'_>]) -> Result<Vec<Row>, BoardError> {
        self.request(async |client| client.query_typed(sql, values).await)
    }

    fn script(&mut self, sql: &str) -> Result<(), BoardError> {
        let done = self.request(async |client| client.batch_execute(sql).await);
        if done.is_err() {
            self.link = None; // a transaction may be open
        }
        done
    }

    fn request<T>(
        &mut self,
        what: impl AsyncFnOnce(&Client) -> Result<T, Error>,
    ) -> Result<T, BoardError> {
        let Self { config, tls, runtime, link, patience, .. } = self;
        let (config, tls, patience) = (&*config, &*tls, *patience);
        let answer = runtime.block_on(async {
            let all = async {
                if link.as_ref().is_none_or(|link| link.client.is_closed()) {
                    *link = Some(connect(config, tls).await?);
                }
                match link {
                    Some(link) => what(&link.client).await.map_err(Trouble::Server),
                    None => Err(Trouble::Silent),
                }
            };
            tokio::time::timeout(patience, all).await.unwrap_or(Err(Trouble::Silent))
        });
        answer.map_err(|trouble| {
            // After a statement's own error the connection is good; otherwise its state is unknown.
            if !matches!(&trouble, Trouble::Server(error) if error.as_db_error().is_some()) {
                self.link = None;
            }
            self.error(trouble)
        })
    }

    fn error(&self, trouble: Trouble) -> BoardError {
        let path = self.path.clone();
        let server = |reason: String, passing: bool| BoardError::Server {
            path: path.clone(),
            reason,
            passing,
        };
        let error = match trouble {
            Trouble::Silent => {
                let seconds = self.patience.as_secs();
                return server(format!("the server did not answer in {seconds} s"), true);
            }
            Trouble::Server(error) => error,
        };
        let Some(reason) = error.as_db_error() else {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
            if is_about_certificate(&error) {
                let remedy = "name the file of its root certificates in PGSSLROOTCERT, and the server as in its certificate";
                return server(format!("{error}{cause}; {remedy}"), false);
            }
            return server(format!("{error}{cause}"), true);
        };
        let code = reason.code();
        if [SqlState::INVALID_SCHEMA_NAME, SqlState::UNDEFINED_FUNCTION].contains(code) {
            return BoardError::Missing(path);
        }
        server(reason.message().to_owned(), passes(code))
    }

    fn answer(&mut self, sql: &str, id: u64, values: &[Value<'_>]) -> Answer {
        let rows = self.ask(sql, values)?;
        let said: String = rows.first().map_or_else(String::new, |row| row.get(0));
        Ok(Err(match &*said {
            "ok" => return Ok(Ok(())),
            "taken" => Late::Taken,
            "free" => Late::Free,
            "finished" => Late::Finished,
            "dead" => Late::Dead,
            "differs" => Late::Differs,
            _ => {
                let board = self.path.display();
                return Err(BoardError::Refused(format!("there is no job {id} on {board}")));
            }
        }))
    }
}

/// Whether the server's certificate was refused, which no repetition changes.
fn is_about_certificate(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    let io = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    let tls = io.and_then(|io| io.get_ref()?.downcast_ref::<rustls::Error>());
    matches!(tls, Some(rustls::Error::InvalidCertificate(_)))
}

/// Errors of a server that is full, busy or on its way down or up: the request may be repeated.
fn passes(code: &SqlState) -> bool {
    let class = code.code().get(..2).unwrap_or_default();
    ["08", "40", "53", "57", "58"].contains(&class)
        || [SqlState::LOCK_NOT_AVAILABLE, SqlState::READ_ONLY_SQL_TRANSACTION].contains(code)
}

/// Configuration and file of root certificates of an address.
fn address(text: &str) -> Result<(Config, Option<PathBuf>), BoardError> {
    let refused = |why: &str| BoardError::Refused(format!("--board {text}: {why}"));
    let (before, query) = text.split_once('?').unwrap_or((text, ""));
    let mut roots = std::env::var_os("PGSSLROOTCERT").map(PathBuf::from);
    let mut kept = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sslrootcert", file)) => roots = Some(file.into()),
            // The server's certificate and name are checked whenever there is TLS.
            Some(("sslmode", "verify-full" | "verify-ca")) => kept.push("sslmode=require"),
            _ => kept.push(pair),
        }
    }
    let plain = format!("{before}?{}", kept.join("&"));
    let mut config: Config = plain.parse().map_err(|error: Error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        refused(&format!("{error}: {cause}; an address is postgres://USER@HOST:PORT/DATABASE"))
    })?;
    if config.get_password().is_some() {
        let safe = text.split('@').next_back().unwrap_or_default();
        return Err(BoardError::Refused(format!(
            "--board ...@{safe}: a password among the arguments can be read by others; put it into PGPASSWORD"
        )));
    }
    if let Ok(password) = std::env::var("PGPASSWORD") {
        config.password(password);
    }
    let near = config.get_hosts().iter().all(|host| match host {
        Host::Tcp(name) => {
            let ip = name.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
            ip || name == "localhost"
        }
        Host::Unix(_) => true,
    });
    if !near && config.get_ssl_mode() == SslMode::Disable {
        return Err(refused("sslmode=disable is for servers on 127.0.0.1; leave it out"));
    }
    if !near {
        config.ssl_mode(SslMode::Require);
    }
    config.application_name("amk").connect_timeout(Duration::from_secs(10));
    config.keepalives_idle(Duration::from_secs(20)).tcp_user_timeout(Duration::from_secs(30));
    Ok((config, roots))
}

fn tls(roots: Option<&Path>) -> Result<ClientConfig, BoardError> {
    let mut store = RootCertStore::empty();
    if let Some(file) = roots {
        let cannot = |why: String| {
            let file = file.display();
            BoardError::Refused(format!(
                "cannot read the root certificates {file}: {why}; name a PEM file in PGSSLROOTCERT"
            ))
        };
        let found = CertificateDer::pem_file_iter(file).map_err(|e| cannot(e.to_string()))?;
        for certificate in found {
            let certificate = certificate.map_err(|error| cannot(error.to_string()))?;
            store.add(certificate).map_err(|error| cannot(error.to_string()))?;
        }
        if store.is_empty() {
            return Err(cannot("there is none in it".to_owned()));
        }
    } else {
        store.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| BoardError::Refused(format!("no TLS: {error}")))?;
    Ok(builder.with_root_certificates(store).with_no_client_auth())
}

async fn connect(config: &Config, tls: &MakeRustlsConnect) -> Result<Link, Trouble> {
    let (client, mut connection) = config.connect(tls.clone()).await.map_err(Trouble::Server)?;
    let hint = Arc::new(Notify::new());
    let told = hint.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if matches!(message, AsyncMessage::Notification(_)) {
                told.notify_one();
            }
        }
        told.notify_one();
    });
    client.batch_execute(LIMITS).await.map_err(Trouble::Server)?;
    Ok(Link { client, hint, listens: false })
}

fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn natural(row: &Row, at: usize) -> u64 {
    row.get::<_, Option<i64>>(at).and_then(|number| u64::try_from(number).ok()).unwrap_or(0)
}

fn job_of(row: &Row) -> Job {
    let state: String = row.get(1);
    let state = match &*state {
        "queued" => State::Queued,
        "leased" => State::Leased { fence: natural(row, 3), until: natural(row, 4) },
        "done" => {
            let hash: Option<String> = row.get(5);
            State::Done { fence: natural(row, 3), hash: hash.unwrap_or_default() }
        }
        _ => State::Dead,
    };
    Job { state, attempts: u32::try_from(natural(row, 2)).unwrap_or(u32::MAX) }
}

impl Store for Postgres {
    fn freeze(&mut self, key: &str, priors: &str) -> Result<(), BoardError> {
        let sql = "INSERT INTO amk_fleet.snapshots VALUES ($1, $2) ON CONFLICT DO NOTHING";
        self.ask(sql, &[(&key, Type::TEXT), (&priors, Type::TEXT)]).map(drop)
    }

    fn submit(&mut self, specs: &[Spec]) -> Result<u64, BoardError> {
        let column = |of: &dyn Fn(&Spec) -> String| specs.iter().map(of).collect::<Vec<String>>();
        let keys = column(&Spec::key);
        let needs = column(&|spec| spec.needs().to_owned());
        let subjects = column(&Spec::subject);
        let cards = column(&|spec| spec.race.as_ref().map_or_else(String::new, |r| r.card.clone()));
        let texts = column(&|spec| serde_json::to_string(spec).unwrap_or_default());
        // The lock keeps out other submitters only, so that jobs are numbered without gaps.
        let sql = "WITH l AS MATERIALIZED (SELECT pg_advisory_xact_lock(1634560871)), \
            t AS (SELECT DISTINCT ON (u.key) u.* FROM l, unnest($1, $2, $3, $4, $5) WITH ORDINALITY \
              AS u(key, needs, subject, not_card, spec, n) ORDER BY u.key, u.n), \
            m AS (INSERT INTO amk_fleet.jobs(id, key, needs, subject, not_card, spec) \
              SELECT (SELECT coalesce(max(id), 0) FROM amk_fleet.jobs) + row_number() OVER (ORDER BY t.n), \
              t.key, t.needs, t.subject, t.not_card, t.spec FROM t \
              WHERE NOT EXISTS (SELECT 1 FROM amk_fleet.jobs j WHERE j.key = t.key) RETURNING 1) \
            SELECT count(*), pg_notify('amk_fleet', '')::text FROM m";
        let column = Type::TEXT_ARRAY;
        let values: [Value<'_>; 5] = [
            (&keys, column.clone()),
            (&needs, column.clone()),
            (&subjects, column.clone()),
            (&cards, column.clone()),
            (&texts, column),
        ];
        Ok(self.ask(sql, &values)?.first().map_or(0, |row| natural(row, 0)))
    }

    fn join(&mut self, worker: &Worker, text: &str) -> Result<bool, BoardError> {
        let sql = "SELECT accepted FROM amk_fleet.register($1, $2, 'active')";
        let rows = self.ask(sql, &[(&worker.id, Type::TEXT), (&text, Type::TEXT)])?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    fn leave(&mut self, worker: &str) -> Result<(), BoardError> {
        let sql = "SELECT accepted FROM amk_fleet.register($1, NULL, 'gone')";
        self.ask(sql, &[(&worker, Type::TEXT)]).map(drop)
    }

    fn drain(&mut self, workers: &[String]) -> Result<u64, BoardError> {
        let unknown = "SELECT u.id FROM unnest($1) AS u(id) WHERE NOT EXISTS \
            (SELECT 1 FROM amk_fleet.workers w WHERE w.id = u.id AND w.state = 'active')";
        let names: [Value<'_>; 1] = [(&workers, Type::TEXT_ARRAY)];
        if let Some(row) = self.ask(unknown, &names)?.first() {
            let (name, board) = (row.get::<_, String>(0), self.path.display());
            return Err(BoardError::Refused(format!(
                "{name} is no active worker of {board}; `amk fleet status` lists them"
            )));
        }
        let sql = "WITH m AS (UPDATE amk_fleet.workers SET state = 'draining' \
            WHERE state = 'active' AND (cardinality($1) = 0 OR id = ANY($1)) RETURNING 1) \
            SELECT count(*), pg_notify('amk_fleet', '')::text FROM m";
        Ok(self.ask(sql, &names)?.first().map_or(0, |row| natural(row, 0)))
    }

    fn claim(&mut self, worker: &Worker, ask: &str) -> Result<Offer, BoardError> {
        let sql = "SELECT said, job, lease, spec, key, priors, open FROM amk_fleet.claim($1, $2)";
        let rows = self.ask(sql, &[(&worker.id, Type::TEXT), (&ask, Type::TEXT)])?;
        let Some(row) = rows.first() else { return Ok(Offer::Drained) };
        let said: String = row.get(0);
        Ok(match &*said {
            "leased" => Offer::Leased {
                id: natural(row, 1),
                fence: natural(row, 2),
                spec: row.get(3),
                key: row.get(4),
                priors: row.get(5),
            },
            "nothing" => Offer::Nothing { open: natural(row, 6) },
            _ => Offer::Drained,
        })
    }

    fn beat(&mut self, id: u64, fence: Fence) -> Answer {
        let values: [Value<'_>; 2] = [(&int(id), Type::INT8), (&int(fence), Type::INT8)];
        self.answer("SELECT amk_fleet.beat($1, $2)", id, &values)
    }

    fn finish(&mut self, id: u64, fence: Fence, hash: &str, result: &str) -> Answer {
        let (job, lease) = (int(id), int(fence));
        let values: [Value<'_>; 4] =
            [(&job, Type::INT8), (&lease, Type::INT8), (&hash, Type::TEXT), (&result, Type::TEXT)];
        self.answer("SELECT amk_fleet.finish($1, $2, $3, $4)", id, &values)
    }

    fn release(&mut self, id: u64, fence: Fence, why: Option<&str>) -> Answer {
        let (job, lease) = (int(id), int(fence));
        let values: [Value<'_>; 3] = [(&job, Type::INT8), (&lease, Type::INT8), (&why, Type::TEXT)];
        self.answer("SELECT amk_fleet.release($1, $2, $3)", id, &values)
    }

    fn jobs(&mut self) -> Result<Vec<JobRow>, BoardError> {
        let sql = "SELECT id, state, attempts, fence, until_ms, hash, spec, key, why FROM amk_fleet.jobs ORDER BY id";
        let row = |row: &Row| JobRow {
            id: natural(row, 0),
            job: job_of(row),
            spec: row.get(6),
            key: row.get(7),
            why: row.get(8),
        };
        Ok(self.ask(sql, &[])?.iter().map(row).collect())
    }

    fn results(&mut self) -> Result<Vec<(u64, String, Option<String>)>, BoardError> {
        let sql = "SELECT r.job, r.result, j.hash FROM amk_fleet.results r JOIN amk_fleet.jobs j ON j.id = r.job \
            ORDER BY r.job";
        let rows = self.ask(sql, &[])?;
        Ok(rows.iter().map(|row| (natural(row, 0), row.get(1), row.get(2))).collect())
    }

    fn workers(&mut self) -> Result<Vec<(String, String, Millis)>, BoardError> {
        let sql = "SELECT worker, state, greatest(amk_fleet.now_ms() - seen_ms, 0) FROM amk_fleet.workers ORDER BY number";
        let rows = self.ask(sql, &[])?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1), natural(row, 2))).collect())
    }

    fn attempts(&mut self) -> Result<Vec<Attempt>, BoardError> {
        let sql = "SELECT fence, job, worker, card, greatest(coalesce(ended_ms, amk_fleet.now_ms()) - began_ms, 0), \
            how FROM amk_fleet.attempts ORDER BY fence";
        let attempt = |row: &Row| Attempt {
            fence: natural(row, 0),
            job: natural(row, 1),
            worker: row.get(2),
            card: row.get(3),
            took_ms: natural(row, 4),
            how: row.get(5),
        };
        Ok(self.ask(sql, &[])?.iter().map(attempt).collect())
    }

    fn set_patience(&mut self, patience: Duration) -> Result<(), BoardError> {
        self.patience = patience;
        Ok(())
    }

    fn wait(&mut self, most: Duration) {
        let listening =
            self.link.as_ref().is_some_and(|link| link.listens && !link.client.is_closed());
        if !listening && self.script("LISTEN amk_fleet").is_ok() {
            self.link.iter_mut().for_each(|link| link.listens = true);
        }
        let hint = self.link.as_ref().map(|link| link.hint.clone());
        // Without a connection the poll alone is left.
        self.runtime.block_on(async {
            let hint = async {
                match hint {
                    Some(hint) => hint.notified().await,
                    None => std::future::pending().await,
                }
            };
            let _ = tokio::time::timeout(most, hint).await;
        });
    }
}
