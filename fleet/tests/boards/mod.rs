//! What the tests of boards share: jobs, workers and results, and random requests against the protocol.
#![allow(dead_code, reason = "each test takes what it needs")]

use fleet::protocol::{Claimed, Finish, Job, Millis, State, Terms};
use fleet::{Board, Claim, Device, Finding, Kind, Leased, Raced, Recorded, Spec, Worker};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use serde_json::json;

pub(crate) const TERMS: Terms = Terms { lease_ms: 60_000, heartbeat_ms: 10_000, attempts_max: 3 };

pub(crate) fn spec(seed: u64) -> Spec {
    Spec {
        kind: Kind::Leg,
        model: "toy".to_owned(),
        target: "h200".to_owned(),
        device: Device::Cuda,
        contexts: Vec::new(),
        seed,
        budget: "8".to_owned(),
        strategy: "residual".to_owned(),
        protocol: 1,
        priors: String::new(),
        round: 0,
        race: None,
    }
}

pub(crate) fn race(leg: u64, number: u32) -> Spec {
    let raced =
        Raced { leg, card: "a".to_owned(), start: json!({}), champion: json!({"x": 1}), number };
    Spec { kind: Kind::Race, race: Some(raced), ..spec(0) }
}

pub(crate) fn worker(id: &str, target: &str, card: &str) -> Worker {
    Worker {
        id: id.to_owned(),
        host: "host".to_owned(),
        boot: String::new(),
        version: "0".to_owned(),
        target: target.to_owned(),
        card: card.to_owned(),
        card_name: String::new(),
    }
}

pub(crate) fn finding(decision: &str, us: f64) -> Finding {
    Finding {
        decision: Some(decision.to_owned()),
        why: String::new(),
        latency_kind: "measured-gpu".to_owned(),
        latency_us: Some(us),
        saved: Some([0.1, 0.2]),
        schedule_id: None,
        program_id: None,
        kernel_id: None,
        config: json!({"x": 1}),
        start_config: json!({}),
        trials: 8,
    }
}

pub(crate) fn result(host: &str, card: &str, decision: &str) -> Recorded {
    Recorded {
        host: host.to_owned(),
        boot: String::new(),
        card: card.to_owned(),
        finding: finding(decision, 10.0),
        ledger: "rows\n".to_owned(),
        head: "tip\n".to_owned(),
    }
}

#[track_caller]
pub(crate) fn leased(claim: Claim) -> Leased {
    let Claim::Leased(leased) = claim else { panic!("{claim:?}") };
    *leased
}

#[track_caller]
pub(crate) fn open(claim: Claim) -> u64 {
    let Claim::Nothing { open } = claim else { panic!("{claim:?}") };
    open
}

/// Random requests, with leases of the past among them: states and answers are those of the protocol.
pub(crate) fn executes_the_protocol(mut board: Board, steps: usize, set_clock: impl Fn(Millis)) {
    let specs: Vec<Spec> = (0..4).map(spec).collect();
    board.submit(&specs).unwrap();
    let who = worker("w", "h200", "a");
    board.join(&who).unwrap();
    let mut jobs = vec![Job::new(); specs.len()];
    let mut leases: Vec<(usize, u64)> = Vec::new();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    let (mut late, mut done, mut time) = (0, 0, 0);
    for _ in 0..steps {
        time += rng.random_range(0..24_000);
        set_clock(time);
        let what = rng.random_range(0..8);
        if what < 3 || leases.is_empty() {
            claims(&mut board, &who, time, &mut jobs, &mut leases);
        } else {
            let (at, fence) = leases[rng.random_range(0..leases.len())];
            let (id, job) = (at as u64 + 1, &mut jobs[at]);
            let (answer, wanted) = match what {
                3 | 4 => (board.beat(id, fence), job.beat(time, fence, &TERMS)),
                5 => (board.give_back(id, fence), job.give_back(fence)),
                6 => (board.fail(id, fence, "why"), job.fail(fence, &TERMS)),
                _ => {
                    let answer = board.finish(id, fence, &result("host", "a", "kept"));
                    let hash = board.jobs().unwrap()[at].job.clone();
                    let hash = if let State::Done { hash, .. } = hash.state {
                        hash
                    } else {
                        String::new()
                    };
                    let wanted = match job.finish(fence, &hash) {
                        Ok(Finish::Now(next)) => Ok(next),
                        Ok(Finish::Already) => Ok(job.clone()),
                        Err(why) => Err(why),
                    };
                    done += usize::from(wanted.is_ok());
                    (answer, wanted)
                }
            };
            assert_eq!(answer.unwrap(), wanted.clone().map(|_| ()));
            late += usize::from(wanted.is_err());
            *job = wanted.unwrap_or_else(|_| job.clone());
        }
        let held: Vec<Job> = board.jobs().unwrap().into_iter().map(|entry| entry.job).collect();
        assert_eq!(held, jobs);
        let closed = jobs.iter().filter(|job| matches!(job.state, State::Done { .. })).count();
        assert_eq!(
            board.results().unwrap().len(),
            closed,
            "a result for each done job, and no other"
        );
        if jobs.iter().all(|job| matches!(job.state, State::Done { .. } | State::Dead)) {
            let more: Vec<Spec> = (0..4).map(|n| spec(jobs.len() as u64 + n)).collect();
            board.submit(&more).unwrap();
            jobs.extend(vec![Job::new(); 4]);
        }
    }
    assert!(late > steps / 30 && done > steps / 120, "{late} late, {done} done");
    let open = board.attempts().unwrap().iter().filter(|a| a.how == "running").count();
    let leased = jobs.iter().filter(|job| matches!(job.state, State::Leased { .. })).count();
    assert_eq!(open, leased, "every other attempt has an end");
}

/// The board's claim is the protocol's on the first free job, after those that its look found dead.
fn claims(
    board: &mut Board,
    who: &Worker,
    time: Millis,
    jobs: &mut [Job],
    leases: &mut Vec<(usize, u64)>,
) {
    let claim = board.claim(who).unwrap();
    let fence = if let Claim::Leased(leased) = &claim { leased.fence } else { 0 };
    for (at, job) in jobs.iter_mut().enumerate() {
        match job.claim(time, fence, &TERMS) {
            Claimed::No => {}
            Claimed::Dead(next) => *job = next,
            Claimed::Granted(next) => {
                assert_eq!(leased(claim).id, at as u64 + 1);
                assert!(leases.iter().all(|(_, older)| *older < fence), "a fence is new");
                *job = next;
                return leases.push((at, fence));
            }
        }
    }
    assert!(matches!(claim, Claim::Nothing { .. }), "{claim:?}");
}
