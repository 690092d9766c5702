//! The board on a PostgreSQL server of the test's own: it does what the protocol says, whatever the network loses, and
//! workers can call their five functions and nothing else.

mod boards;
#[path = "boards/proxy.rs"]
mod proxy;
#[path = "boards/server.rs"]
mod server;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use boards::{TERMS, leased, open, race, result, spec, worker};
use fleet::protocol::{Late, Terms};
use fleet::{Board, BoardError, Claim, Device, Recorded, Spec, Status, Worker, champions};
use proxy::Proxy;
use server::Server;

fn main() -> std::process::ExitCode {
    // SAFETY: no other thread runs yet. Both roles have the password `owner`: see `board`.
    unsafe { std::env::set_var("PGPASSWORD", "owner") };
    let exit = server::run(&[
        ("the_server_executes_the_protocol", the_server_executes_the_protocol),
        ("a_cut_at_any_message_changes_nothing", a_cut_at_any_message_changes_nothing),
        ("many_claim_at_once", many_claim_at_once),
        ("workers_have_five_functions_only", workers_have_five_functions_only),
        ("confirmed_by_three_cards_of_two_hosts", confirmed_by_three_cards_of_two_hosts),
        ("a_waiting_worker_is_told_of_jobs", a_waiting_worker_is_told_of_jobs),
        ("nothing_waits_without_a_bound", nothing_waits_without_a_bound),
        ("edits_and_other_versions_are_noticed", edits_and_other_versions_are_noticed),
        ("addresses_that_are_not_safe_are_refused", addresses_that_are_not_safe_are_refused),
    ]);
    drop(SERVER.lock().unwrap_or_else(PoisonError::into_inner).take());
    exit
}

/// The server of all these tests, which run one after the other.
static SERVER: Mutex<Option<Server>> = Mutex::new(None);

struct Shared(MutexGuard<'static, Option<Server>>);

impl std::ops::Deref for Shared {
    type Target = Server;

    fn deref(&self) -> &Server {
        self.0.as_ref().unwrap()
    }
}

impl std::ops::DerefMut for Shared {
    fn deref_mut(&mut self) -> &mut Server {
        self.0.as_mut().unwrap()
    }
}

/// The server with a new board, and its address for workers.
fn board() -> (Shared, Board, PathBuf) {
    let mut held = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
    held.get_or_insert_with(Server::start);
    let server = Shared(held);
    server.sql("ALTER ROLE amk_worker PASSWORD 'owner'; DROP SCHEMA IF EXISTS amk_fleet CASCADE");
    let board = Board::create_for(&server.url("owner"), Some(TERMS), Some("amk_worker")).unwrap();
    let url = server.url("amk_worker");
    (server, board, url)
}

fn the_server_executes_the_protocol() {
    let (server, board, _) = board();
    server.sql(
        "DROP TABLE IF EXISTS clock; CREATE TABLE clock(at bigint); INSERT INTO clock VALUES (0); CREATE OR REPLACE FUNCTION amk_fleet.now_ms() \
         RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT at FROM public.clock'",
    );
    let set = |time| drop(server.sql(&format!("UPDATE clock SET at = {time}")));
    boards::executes_the_protocol(board, 240, set);
}

/// One worker's whole life, each request repeated until it is answered.
fn lives(url: &Path, who: &Worker) -> u64 {
    let insist = |request: &mut dyn FnMut() -> Result<(), BoardError>| {
        for _ in 0..20 {
            match request() {
                Err(error) if error.is_passing() => {}
                answer => return answer.unwrap(),
            }
        }
        panic!("no answer in 20 tries");
    };
    let mut opened = None;
    insist(&mut || Board::open(url).map(|board| opened = Some(board)));
    let mut board = opened.unwrap();
    insist(&mut || board.join(who));
    let mut claimed = None;
    insist(&mut || board.claim(who).map(|claim| claimed = Some(claim)));
    let job = leased(claimed.unwrap());
    insist(&mut || board.beat(job.id, job.fence).map(Result::unwrap));
    let found = result("host", "a", "kept");
    insist(&mut || board.finish(job.id, job.fence, &found).map(Result::unwrap));
    insist(&mut || board.leave(&who.id));
    job.id
}

/// Every message of a worker's life is once the last one that gets through.
fn a_cut_at_any_message_changes_nothing() {
    let (server, mut board, _) = board();
    let mut lives_cut = 0;
    for first in 1_i64.. {
        board.submit(&[spec(first.unsigned_abs())]).unwrap();
        let proxy = Proxy::start(server.port, first, 0);
        let who = worker(&format!("w{first}"), "h200", "a");
        assert_eq!(lives(&server.url_at("amk_worker", proxy.port), &who), first.unsigned_abs());
        if !proxy.was_cut() {
            break;
        }
        lives_cut += 1;
    }
    let attempts = board.attempts().unwrap();
    assert!(lives_cut > 30, "{lives_cut} boundaries");
    assert_eq!(attempts.len(), lives_cut + 1, "a claim whose answer was lost is found again");
    assert!(attempts.iter().all(|attempt| attempt.how == "done"));
    assert_eq!(board.results().unwrap().len(), lives_cut + 1);
    assert!(board.workers().unwrap().iter().all(|(_, state, _)| state == "gone"));
    println!("{lives_cut} message boundaries");
}

fn many_claim_at_once() {
    let (_server, mut board, url) = board();
    board.submit(&(0..200).map(spec).collect::<Vec<_>>()).unwrap();
    let mut all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|n| {
                let url = &url;
                scope.spawn(move || {
                    let mut board = Board::open(url).unwrap();
                    let who = worker(&format!("w{n}"), "h200", &format!("card {n}"));
                    board.join(&who).unwrap();
                    let mut mine = Vec::new();
                    while let Claim::Leased(job) = board.claim(&who).unwrap() {
                        let found = result("host", &who.card, "kept");
                        board.finish(job.id, job.fence, &found).unwrap().unwrap();
                        mine.push(job.id);
                    }
                    mine
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    all.sort_unstable();
    assert_eq!(all, (1..=200).collect::<Vec<u64>>());
    assert_eq!(board.attempts().unwrap().len(), 200);
}

fn workers_have_five_functions_only() {
    let (server, mut board, url) = board();
    board.submit(&[spec(0)]).unwrap();
    let mut as_worker = Board::open(&url).unwrap();
    assert_eq!(as_worker.terms(), TERMS);
    let who = worker("w", "h200", "a");
    as_worker.join(&who).unwrap();
    let job = leased(as_worker.claim(&who).unwrap());
    let found = result("host", "a", "kept");
    as_worker.finish(job.id, job.fence, &found).unwrap().unwrap();
    let denied =
        |error: Option<BoardError>| error.unwrap().to_string().contains("permission denied");
    assert!(denied(as_worker.jobs().err()) && denied(as_worker.results().err()));
    assert!(denied(as_worker.workers().err()) && denied(as_worker.attempts().err()));
    assert!(denied(as_worker.submit(&[spec(1)]).err()) && denied(as_worker.freeze("[]").err()));
    assert!(denied(as_worker.drain(&[]).err()));
    let callable = "SELECT count(*) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
        WHERE nspname = 'amk_fleet' AND has_function_privilege('amk_worker', p.oid, 'EXECUTE')";
    assert_eq!(server.sql(callable), "5");
    let readable = "SELECT count(*) FROM pg_class c WHERE c.relnamespace = 'amk_fleet'::regnamespace AND c.relkind = 'r' \
        AND has_table_privilege('amk_worker', c.oid, 'SELECT, INSERT, UPDATE, DELETE')";
    assert_eq!(server.sql(readable), "0");
    let nobody = Board::create_for(&server.url("owner"), None, Some("nobody"));
    assert!(nobody.unwrap_err().to_string().contains("does not exist"));
}

/// Claims by capability, races on other cards and the status that follows, from workers of several hosts.
fn confirmed_by_three_cards_of_two_hosts() {
    let (_server, mut board, url) = board();
    board.submit(&[spec(0), Spec { device: Device::Cpu, ..spec(9) }]).unwrap();
    let mut crew: Vec<(Board, Worker)> = [("1", "a"), ("1", "b"), ("2", "c"), ("2", "d")]
        .map(|(host, card)| Worker { host: host.to_owned(), ..worker(card, "h200", card) })
        .into_iter()
        .map(|who| (Board::open(&url).unwrap(), who))
        .collect();
    crew.iter_mut().for_each(|(board, who)| board.join(who).unwrap());
    let does = |(board, who): &mut (Board, Worker), decision: &str| {
        let job = leased(board.claim(who).unwrap());
        let found = result(&who.host, &who.card, decision);
        board.finish(job.id, job.fence, &found).unwrap().unwrap();
        job.id
    };
    assert_eq!(does(&mut crew[0], "kept"), 1, "what needs the card comes first");
    board.submit(&[race(1, 1), race(1, 2), race(1, 3)]).unwrap();
    let status = |board: &Board| {
        let results = board.results().unwrap();
        let done: Vec<_> = (board.jobs().unwrap().into_iter())
            .filter_map(|job| {
                Some((job.clone(), results.iter().find(|r| r.0 == job.id)?.1.clone()))
            })
            .collect();
        champions(&done).into_iter().find(|champion| champion.job == 1).unwrap()
    };
    assert_eq!(status(&board).status, Status::Candidate);
    assert_eq!(does(&mut crew[0], "kept"), 2, "its own champion is not for this card");
    does(&mut crew[1], "kept");
    assert_eq!(status(&board).status, Status::Candidate, "two cards of one host");
    does(&mut crew[2], "kept");
    let champion = status(&board);
    assert_eq!(
        (champion.status, champion.cards_kept, champion.hosts_kept),
        (Status::Confirmed, 3, 2)
    );
    does(&mut crew[3], "reverted");
    assert_eq!(status(&board).status, Status::Candidate, "one card reverts it");
}

fn a_waiting_worker_is_told_of_jobs() {
    let (_server, mut board, url) = board();
    let mut waiting = Board::open(&url).unwrap();
    let who = worker("w", "h200", "a");
    waiting.join(&who).unwrap();
    assert_eq!(open(waiting.claim(&who).unwrap()), 0);
    waiting.wait(Duration::from_millis(1));
    board.submit(&[spec(0)]).unwrap();
    let began = Instant::now();
    waiting.wait(Duration::from_secs(20));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    leased(waiting.claim(&who).unwrap());
    waiting.wait(Duration::from_millis(50));
}

/// A lock that somebody holds, and a server that is silent or away.
fn nothing_waits_without_a_bound() {
    let (mut server, mut board, url) = board();
    board.submit(&[spec(0)]).unwrap();
    let mut mine = Board::open(&url).unwrap();
    let who = worker("w", "h200", "a");
    mine.join(&who).unwrap();
    let job = leased(mine.claim(&who).unwrap());
    std::thread::scope(|scope| {
        let server: &Server = &server;
        let held = "BEGIN; SELECT 1 FROM amk_fleet.jobs FOR UPDATE; SELECT pg_sleep(8); COMMIT";
        scope.spawn(move || server.sql(held));
        std::thread::sleep(Duration::from_millis(500));
        let began = Instant::now();
        let error = mine.beat(job.id, job.fence).unwrap_err();
        assert!(error.is_passing() && began.elapsed() < Duration::from_secs(7), "{error}");
        mine.set_patience(Duration::from_secs(1)).unwrap();
        let began = Instant::now();
        assert!(mine.beat(job.id, job.fence).unwrap_err().is_passing());
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
    mine.set_patience(Duration::from_secs(5)).unwrap();
    assert_eq!(mine.beat(job.id, job.fence).unwrap(), Ok(()));
    server.stop_immediately();
    assert!(mine.beat(job.id, job.fence).unwrap_err().is_passing());
    assert!(Board::open(&url).unwrap_err().is_passing());
    server.again();
    assert_eq!(mine.finish(job.id, job.fence, &result("h", "a", "kept")).unwrap(), Ok(()));
    assert_eq!(mine.beat(job.id, job.fence + 1).unwrap(), Err(Late::Finished));
}

fn edits_and_other_versions_are_noticed() {
    let (server, mut board, url) = board();
    let priors = board.freeze("[1]").unwrap();
    assert_eq!(board.submit(&[spec(0), spec(0), Spec { priors, ..spec(1) }]).unwrap().new, 2);
    assert_eq!(board.submit(&[spec(1), spec(0)]).unwrap().held, 1);
    let who = worker("w", "h200", "a");
    board.join(&who).unwrap();
    board.join(&who).expect("the answer to the first request was lost");
    assert!(board.join(&Worker { host: "other".to_owned(), ..who.clone() }).is_err());
    let job = leased(board.claim(&who).unwrap());
    let found = result("1", "a", "kept");
    board.finish(job.id, job.fence, &found).unwrap().unwrap();
    assert_eq!(board.finish(job.id, job.fence, &found).unwrap(), Ok(()));
    let other = Recorded { host: "2".to_owned(), ..found };
    assert_eq!(board.finish(job.id, job.fence, &other).unwrap(), Err(Late::Differs));
    assert_eq!(leased(board.claim(&who).unwrap()).priors, "[1]");
    board.give_back(2, 2).unwrap().unwrap();
    assert!(board.drain(&["nobody".to_owned()]).is_err());
    assert_eq!(board.drain(&[]).unwrap(), 1);
    assert!(matches!(board.claim(&who).unwrap(), Claim::Drained));
    server.sql("UPDATE amk_fleet.results SET result = replace(result, 'rows', 'sows')");
    assert!(matches!(board.results(), Err(BoardError::Damaged { .. })));
    let terms = Some(Terms { lease_ms: 70_000, ..TERMS });
    let refused = Board::create(&server.url("owner"), terms).unwrap_err();
    assert!(refused.to_string().contains("other terms"), "{refused}");
    server.sql("UPDATE amk_fleet.terms SET version = 7");
    assert!(Board::open(&url).unwrap_err().to_string().contains("one version"));
    server.sql("DROP SCHEMA amk_fleet CASCADE");
    assert!(Board::open(&server.url("owner")).unwrap_err().to_string().contains("amk fleet init"));
}

fn addresses_that_are_not_safe_are_refused() {
    let refused = |url: &str| Board::open(Path::new(url)).unwrap_err().to_string();
    let told = refused("postgres://me:hidden@127.0.0.1/b");
    assert!(told.contains("PGPASSWORD") && !told.contains("hidden"), "{told}");
    assert!(refused("postgres://me@10.0.0.1/b?sslmode=disable").contains("127.0.0.1"));
    assert!(refused("postgres://me@127.0.0.1/b?sslrootcert=/no").contains("PGSSLROOTCERT"));
    assert!(refused("mysql://me@127.0.0.1/b").contains("postgres://"));
    // A server without TLS is not spoken to in the clear when TLS is demanded.
    let (server, ..) = board();
    let url = format!("postgres://owner@127.0.0.1:{}/postgres?sslmode=verify-full", server.port);
    assert!(refused(&url).contains("TLS"), "{}", refused(&url));
}
