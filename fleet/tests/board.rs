//! The board in SQLite: it does what the protocol says, offers jobs by capability, and notices edits.

mod boards;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use boards::{TERMS, finding, leased, open, race, result, spec, worker};
use fleet::protocol::{Late, Millis, Terms};
use fleet::{Board, BoardError, Claim, Device, Leased, Recorded, Spec, Status, Worker, champions};

fn board() -> (tempfile::TempDir, PathBuf, Board) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("board.sqlite");
    let board = Board::create(&path, Some(TERMS)).unwrap();
    (folder, path, board)
}

static NOW: AtomicU64 = AtomicU64::new(0);

fn now() -> Millis {
    NOW.load(Ordering::SeqCst)
}

#[test]
fn the_board_executes_the_protocol() {
    let (_folder, path, _) = board();
    let board = Board::open_with_clock(&path, now).unwrap();
    boards::executes_the_protocol(board, 600, |time| NOW.store(time, Ordering::SeqCst));
}

#[test]
fn a_result_is_recorded_once_and_a_late_one_is_refused() {
    let (_folder, path, mut board) = board();
    board.submit(&[spec(0)]).unwrap();
    let who = worker("w", "h200", "a");
    board.join(&who).unwrap();
    let Leased { id, fence, .. } = leased(board.claim(&who).unwrap());
    let (first, other) = (result("host", "a", "kept"), result("host", "b", "kept"));
    // Another connection repeats it, as after an answer that was lost.
    assert_eq!(board.finish(id, fence, &first).unwrap(), Ok(()));
    assert_eq!(Board::open(&path).unwrap().finish(id, fence, &first).unwrap(), Ok(()));
    assert_eq!(board.finish(id, fence, &other).unwrap(), Err(Late::Differs));
    assert_eq!(board.finish(id, fence + 1, &other).unwrap(), Err(Late::Finished));
    assert_eq!(board.results().unwrap(), [(id, first)]);
    let large = Recorded { ledger: " ".repeat((64 << 20) + 1), ..other };
    assert!(board.finish(id, fence, &large).is_err());
    assert!(matches!(board.beat(99, fence), Err(BoardError::Refused(_))));
}

#[test]
fn many_claim_at_once_and_each_job_goes_to_one() {
    let (_folder, path, mut board) = board();
    board.submit(&(0..40).map(spec).collect::<Vec<_>>()).unwrap();
    let claimed = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|n| {
                let path = &path;
                scope.spawn(move || {
                    let mut board = Board::open(path).unwrap();
                    let who = worker(&format!("w{n}"), "h200", "a");
                    board.join(&who).unwrap();
                    let mut mine = Vec::new();
                    while let Claim::Leased(leased) = board.claim(&who).unwrap() {
                        board
                            .finish(leased.id, leased.fence, &result("host", "a", "kept"))
                            .unwrap()
                            .unwrap();
                        mine.push(leased.id);
                    }
                    mine
                })
            })
            .collect();
        let mut all: Vec<u64> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        all.sort_unstable();
        all
    });
    assert_eq!(claimed, (1..=40).collect::<Vec<u64>>());
    assert_eq!(board.attempts().unwrap().len(), 40);
}

#[test]
fn jobs_go_to_those_who_can_do_them() {
    let (_folder, _, mut board) = board();
    let on_cpu = Spec { device: Device::Cpu, ..spec(1) };
    let other = Spec { target: "h100".to_owned(), ..spec(2) };
    board.submit(&[on_cpu.clone(), spec(0), other]).unwrap();
    let (cpu, gpu) = (worker("cpu", "", ""), worker("gpu", "h200", "a"));
    assert!(matches!(board.claim(&cpu).unwrap(), Claim::Drained), "not joined");
    board.join(&cpu).unwrap();
    board.join(&gpu).unwrap();
    board.join(&cpu).expect("the answer to the first request was lost");
    let other = Worker { host: "other".to_owned(), ..cpu.clone() };
    assert!(board.join(&other).is_err(), "two workers with one name");
    assert_eq!(leased(board.claim(&gpu).unwrap()).id, 2, "what needs its card comes first");
    assert_eq!(leased(board.claim(&cpu).unwrap()).spec, on_cpu);
    assert_eq!(
        open(board.claim(&cpu).unwrap()),
        1,
        "its own job is open, the others are not for it"
    );
    assert_eq!(open(board.claim(&gpu).unwrap()), 2, "job 3 needs an h100");
    assert_eq!(board.drain(&[]).unwrap(), 2);
    assert!(matches!(board.claim(&gpu).unwrap(), Claim::Drained));
    assert!(board.drain(&["gpu".to_owned()]).is_err(), "it is draining already");
}

#[test]
fn races_of_a_champion_go_to_cards_of_their_own() {
    let (_folder, _, mut board) = board();
    board.submit(&[race(7, 1), race(7, 2), race(8, 1)]).unwrap();
    let cards = ["a", "b", "c"].map(|card| worker(card, "h200", card));
    cards.iter().for_each(|card| board.join(card).unwrap());
    let [a, b, c] = &cards;
    assert_eq!(open(board.claim(a).unwrap()), 3, "both legs found their champions on this card");
    let first = leased(board.claim(b).unwrap());
    assert_eq!(leased(board.claim(b).unwrap()).id, 3, "another champion");
    open(board.claim(b).unwrap());
    assert_eq!(leased(board.claim(c).unwrap()).id, 2);
    // A race that was given back is free for the same card again.
    board.give_back(first.id, first.fence).unwrap().unwrap();
    assert_eq!(leased(board.claim(b).unwrap()).id, 1);
}

/// The champion's status after its leg on card a of host 1, and races on other cards.
fn judged(races: &[(&str, &str, &str)]) -> (Status, usize, usize) {
    judged_at(
        "",
        &races.iter().map(|&(host, card, said)| (host, "", card, said)).collect::<Vec<_>>(),
    )
}

/// The same with the boots of the hosts.
fn judged_at(boot: &str, races: &[(&str, &str, &str, &str)]) -> (Status, usize, usize) {
    let (_folder, _, mut board) = board();
    board.submit(&[spec(0)]).unwrap();
    board.submit(&(0..races.len() as u32).map(|n| race(1, n)).collect::<Vec<_>>()).unwrap();
    let cpu = worker("w", "h200", "");
    board.join(&cpu).unwrap();
    let leg = leased(board.claim(&cpu).unwrap());
    let at = |boot: &str, result| Recorded { boot: boot.to_owned(), ..result };
    let found = at(boot, result("1", "a", "kept"));
    board.finish(leg.id, leg.fence, &found).unwrap().unwrap();
    for (host, boot, card, decision) in races {
        let race = leased(board.claim(&cpu).unwrap());
        let found = at(boot, result(host, card, decision));
        board.finish(race.id, race.fence, &found).unwrap().unwrap();
    }
    let done: Vec<_> = board.jobs().unwrap().into_iter().zip(board.results().unwrap()).collect();
    let done: Vec<_> = done.into_iter().map(|(entry, (_, result))| (entry, result)).collect();
    let [champion] = &champions(&done)[..] else { panic!("one champion") };
    (champion.status, champion.cards_kept, champion.hosts_kept)
}

#[test]
fn a_champion_is_confirmed_by_three_cards_of_two_hosts() {
    use Status::{Candidate, Confirmed};
    assert_eq!(judged(&[]), (Candidate, 1, 1));
    assert_eq!(judged(&[("1", "b", "kept"), ("2", "c", "kept")]), (Confirmed, 3, 2));
    assert_eq!(judged(&[("1", "b", "kept"), ("1", "c", "kept")]), (Candidate, 3, 1));
    assert_eq!(judged(&[("2", "b", "kept"), ("2", "b", "kept")]), (Candidate, 2, 2));
    assert_eq!(judged(&[("1", "b", "kept"), ("2", "c", "inconclusive")]), (Candidate, 2, 1));
    let one_reverts = [("1", "b", "kept"), ("2", "c", "kept"), ("2", "d", "reverted")];
    assert_eq!(judged(&one_reverts), (Candidate, 3, 2));
    let unknown = [("1", "", "kept"), ("2", "c", "kept")];
    assert_eq!(judged(&unknown).0, Candidate, "a card without an identity does not count");
}

#[test]
fn a_host_is_more_than_its_name() {
    let pods = [("2", "x", "b", "kept"), ("3", "x", "c", "kept")];
    assert_eq!(judged_at("x", &pods), (Status::Candidate, 3, 1), "three containers of one machine");
    let restarted = [("1", "y", "b", "kept"), ("1", "z", "c", "kept")];
    assert_eq!(judged_at("x", &restarted), (Status::Candidate, 3, 1), "one machine, restarted");
    let linked = [("2", "y", "b", "kept"), ("2", "x", "c", "kept")];
    assert_eq!(
        judged_at("x", &linked),
        (Status::Candidate, 3, 1),
        "the last one links the first two"
    );
    let two = [("2", "y", "b", "kept"), ("1", "x", "c", "kept")];
    assert_eq!(judged_at("x", &two), (Status::Confirmed, 3, 2));
}

#[test]
fn figures_of_two_cards_are_not_compared() {
    let (_folder, _, mut board) = board();
    board.submit(&[spec(0), spec(1), spec(2)]).unwrap();
    let who = worker("w", "h200", "");
    board.join(&who).unwrap();
    for (card, us) in [("a", 10.0), ("b", 5.0), ("a", 9.0)] {
        let job = leased(board.claim(&who).unwrap());
        let found = Recorded { finding: finding("kept", us), ..result("1", card, "kept") };
        board.finish(job.id, job.fence, &found).unwrap().unwrap();
    }
    let done: Vec<_> = board.jobs().unwrap().into_iter().zip(board.results().unwrap()).collect();
    let done: Vec<_> = done.into_iter().map(|(entry, (_, result))| (entry, result)).collect();
    let best: Vec<_> = champions(&done).into_iter().map(|c| (c.card.unwrap(), c.job)).collect();
    assert_eq!(best, [("a".to_owned(), 3), ("b".to_owned(), 2)], "one champion a card");
}

#[test]
fn a_snapshot_is_frozen_under_its_hash() {
    let (_folder, path, mut board) = board();
    let priors = board.freeze("[1]").unwrap();
    assert_eq!(board.freeze("[1]").unwrap(), priors);
    board.submit(&[Spec { priors: priors.clone(), ..spec(0) }, spec(0)]).unwrap();
    let who = worker("w", "h200", "a");
    board.join(&who).unwrap();
    assert_eq!(leased(board.claim(&who).unwrap()).priors, "[1]");
    assert_eq!(leased(board.claim(&who).unwrap()).priors, "", "a job of its own, without priors");
    board.submit(&[Spec { priors, ..spec(1) }]).unwrap();
    edit(&path, "UPDATE snapshots SET priors = '[2]'");
    assert!(matches!(board.claim(&who), Err(BoardError::Damaged { .. })));
}

fn edit(path: &Path, sql: &str) {
    rusqlite::Connection::open(path).unwrap().execute_batch(sql).unwrap();
}

#[test]
fn edits_of_jobs_and_results_are_noticed() {
    let edits = [
        "UPDATE jobs SET spec = replace(spec, 'toy', 'boy')",
        "UPDATE results SET result = replace(result, 'rows', 'sows')",
        "UPDATE results SET result = replace(result, '10.0', '9.0')",
        "UPDATE results SET result = '{}'",
        "UPDATE jobs SET hash = 'x'",
    ];
    for sql in edits {
        let (_folder, path, mut board) = board();
        board.submit(&[spec(0)]).unwrap();
        let who = worker("w", "h200", "a");
        board.join(&who).unwrap();
        let job = leased(board.claim(&who).unwrap());
        board.finish(job.id, job.fence, &result("1", "a", "kept")).unwrap().unwrap();
        assert!(board.jobs().is_ok() && board.results().is_ok());
        edit(&path, sql);
        let noticed = [board.jobs().err(), board.results().err()];
        assert!(
            noticed.iter().flatten().any(|error| matches!(error, BoardError::Damaged { .. })),
            "{sql}: {noticed:?}"
        );
    }
}

#[test]
fn submitting_again_changes_nothing_and_other_files_are_refused() {
    let (folder, path, mut board) = board();
    assert_eq!(board.submit(&[spec(0), spec(0), spec(1)]).unwrap().new, 2);
    let again = board.submit(&[spec(1), spec(2)]).unwrap();
    assert_eq!((again.new, again.held), (1, 1));
    assert!(Board::create(&path, None).is_ok(), "its terms stay");
    let refused = |opened: Result<Board, BoardError>| opened.err().unwrap().to_string();
    let other = Terms { lease_ms: 70_000, ..TERMS };
    assert!(refused(Board::create(&path, Some(other))).contains("other terms"));
    assert!(refused(Board::open(&folder.path().join("no"))).contains("amk fleet init"));
    let text = folder.path().join("text");
    std::fs::write(
        &text,
        "a text that is longer than a header of SQLite, so that it is read as one",
    )
    .unwrap();
    assert!(refused(Board::open(&text)).contains("no board"));
    let foreign = folder.path().join("foreign.sqlite");
    edit(&foreign, "CREATE TABLE t(x)");
    assert!(refused(Board::create(&foreign, None)).contains("no board"));
    let mode = rusqlite::Connection::open(&foreign).unwrap();
    let mode: String = mode.query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
    assert_eq!(mode, "delete", "another program's file is left as it was");
    edit(&path, "PRAGMA user_version = 9");
    assert!(refused(Board::open(&path)).contains("one version"));
    edit(&path, "PRAGMA application_id = 7");
    assert!(refused(Board::open(&path)).contains("no board"));
}
