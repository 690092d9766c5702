//! What one PostgreSQL server takes from a fleet: claims and results per second over 1 to 200 connections.
//!
//! `cargo run --release -p fleet -F postgres --example throughput`; the figures are in
//! `docs/lab/2026-11-24-fleet-postgres.md`.

#[path = "../tests/boards/mod.rs"]
mod boards;
#[path = "../tests/boards/server.rs"]
mod server;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use boards::{result, spec, worker};
use fleet::{Board, Claim, Recorded};
use server::Server;

/// Rows of a typical leg, and bytes of each.
const ROWS: usize = 66;
const ROW_BYTES: usize = 3000;
/// Jobs on the board at the beginning of each run.
const JOBS: u64 = 4000;
/// The longest run.
const MOST: Duration = Duration::from_secs(10);

fn main() {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("PGPASSWORD", "owner") };
    let server = Server::start();
    println!("connections  claims/s  p50 ms  p99 ms  results/s  rows/s  MB/s");
    for connections in [1, 16, 64, 200] {
        server.sql("DROP SCHEMA IF EXISTS amk_fleet CASCADE");
        let mut board = Board::create(&server.url("owner"), None).unwrap();
        board.submit(&(0..JOBS).map(spec).collect::<Vec<_>>()).unwrap();
        let (claims, finishes, mut took) = run(&server, connections);
        took.sort_unstable();
        let at = |share: usize| took[(took.len() - 1) * share / 100].as_secs_f64() * 1000.0;
        let rows = finishes * ROWS as f64;
        println!(
            "{connections:>11}  {claims:>8.0}  {:>6.2}  {:>6.2}  {finishes:>9.0}  {rows:>6.0}  {:>4.1}",
            at(50),
            at(99),
            rows * ROW_BYTES as f64 / 1e6
        );
    }
}

/// Of one connection: the time of each claim, the results, and how long all claims and all results took.
type Figures = (Vec<Duration>, usize, Duration, Duration);

/// Claims and results per second, and the time of each claim.
fn run(server: &Server, connections: usize) -> (f64, f64, Vec<Duration>) {
    let (begin, ledger) = (Barrier::new(connections), "x".repeat(ROW_BYTES * ROWS));
    let results: Vec<Figures> = std::thread::scope(|scope| {
        let one = |n: usize| {
            let (begin, ledger, url) = (&begin, &ledger, server.url("owner"));
            scope.spawn(move || {
                let mut board = Board::open(&url).unwrap();
                let who = worker(&format!("w{n}"), "h200", &format!("card {n}"));
                board.join(&who).unwrap();
                begin.wait();
                let began = Instant::now();
                let (mut took, mut leases) = (Vec::new(), Vec::new());
                while began.elapsed() < MOST {
                    let asked = Instant::now();
                    let Claim::Leased(job) = board.claim(&who).unwrap() else { break };
                    took.push(asked.elapsed());
                    leases.push((job.id, job.fence));
                }
                let claimed = began.elapsed();
                begin.wait();
                let began = Instant::now();
                let mut finished = 0;
                for (id, fence) in leases {
                    if began.elapsed() > MOST {
                        break;
                    }
                    let found =
                        Recorded { ledger: ledger.clone(), ..result("host", &who.card, "kept") };
                    board.finish(id, fence, &found).unwrap().unwrap();
                    finished += 1;
                }
                (took, finished, claimed, began.elapsed())
            })
        };
        let threads: Vec<_> = (0..connections).map(one).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let longest = |of: fn(&Figures) -> Duration| {
        results.iter().map(of).max().unwrap_or_default().as_secs_f64()
    };
    let took: Vec<Duration> = results.iter().flat_map(|result| result.0.clone()).collect();
    let finished: usize = results.iter().map(|result| result.1).sum();
    (took.len() as f64 / longest(|r| r.2), finished as f64 / longest(|r| r.3), took)
}
