//! Legs and races of real worker processes with scripted cards of two pretended hosts, on a PostgreSQL server of the
//! test's own: what cards agree on is confirmed, and what one of them reverts is not.
//!
//! This binary is its own `amk`: it starts itself again with [`COMMAND`] set. A worker gets the pretended hardware of
//! [`CARD`] there; nothing outside of this test can choose another hardware than the real one.

use std::process::{Command, Stdio};

use clap::Parser as _;
use fleet::{Board, Spec};
use ir::Target;
use ir::program::Program;
use ir::schedule::KernelConfig;
use search::{Device, Expected, POSITIONS_MAX};
use serde_json::{Value, json};
use tests::scripted::{Behaviour, ScriptedDevice};

use super::worker;
use crate::cli::{self, Cli, FleetCommand, LoopArgs};
use crate::context::Context;
use crate::device::hardware::{CardIdentity, Hardware};
use crate::dispatch;
use crate::failure::{Exit, Failure};
use crate::schedule_choice::reproducible;

#[path = "../../../fleet/tests/boards/server.rs"]
mod server;

/// The command line of a process, as JSON.
const COMMAND: &str = "AMK_TEST_COMMAND";
/// The pretended hardware of a worker, as JSON.
const CARD: &str = "AMK_TEST_CARD";
const TEST: &str =
    "commands::fleet::cards_tests::a_champion_that_cards_of_two_hosts_keep_is_confirmed";

/// A scripted card: µs per token of the start, and of every other schedule.
#[derive(Clone, Copy)]
struct Card {
    host: &'static str,
    boot: &'static str,
    uuid: &'static str,
    start_us: f64,
    other_us: f64,
}

const A: Card = Card { host: "one", boot: "1", uuid: "GPU-a", start_us: 100.0, other_us: 92.0 };
const B: Card = Card { uuid: "GPU-b", start_us: 103.0, other_us: 95.0, ..A };
const C: Card = Card { host: "two", boot: "2", uuid: "GPU-c", ..A };
/// Another name for the first host, such as that of a container.
const ALIAS: Card = Card { host: "three", uuid: "GPU-d", ..A };
/// The champion is slower here.
const REVERTS: Card = Card { uuid: "GPU-e", start_us: 90.0, other_us: 93.0, ..C };

/// The hardware of a worker process, from [`CARD`].
struct Pretended(Value);

impl Pretended {
    fn word(&self, key: &str) -> String {
        self.0[key].as_str().unwrap().to_owned()
    }
}

impl Hardware for Pretended {
    fn host(&self) -> String {
        self.word("host")
    }

    fn boot(&self) -> String {
        self.word("boot")
    }

    fn live_card(&self) -> Option<CardIdentity> {
        let target = Target::by_name("h200").unwrap();
        Some(CardIdentity { target, uuid: self.word("uuid"), name: "NVIDIA H200".to_owned() })
    }

    fn open<'a>(
        &self,
        context: &'a Context,
        args: &LoopArgs,
    ) -> Result<Option<Box<dyn Device + 'a>>, Failure> {
        let (graph, weights) = (context.graph(), &*context.model.weights);
        let seed = args.seed.unwrap();
        let expected =
            Expected::new(graph, weights, context.kv_capacity, seed, Some(POSITIONS_MAX)).unwrap();
        let start = reproducible(context, context.predicted_at());
        let start_id = context.lowered(&start)?.id();
        let us = [&self.0["start_us"], &self.0["other_us"]].map(|us| us.as_f64().unwrap());
        let script = move |program: &Program, kernel: &KernelConfig| {
            let is_start = program.id() == start_id && *kernel == start.kernel;
            // Schedules differ, by the same figures in every process.
            let id = u64::from_str_radix(&program.id()[..4], 16).unwrap();
            let more = if is_start { 0.0 } else { 0.25 * (id % 9) as f64 };
            Behaviour::takes(us[usize::from(!is_start)] + more).with_noise(0.002)
        };
        let device = ScriptedDevice::new(expected.logits, 7, script).with_bandwidth(4.6e12);
        Ok(Some(Box::new(device.with_card("NVIDIA H200", &self.word("uuid")))))
    }
}

/// What a process of this test does: `amk` with the arguments of [`COMMAND`].
fn be_amk(arguments: &str) -> ! {
    let arguments: Vec<String> = serde_json::from_str(arguments).unwrap();
    let parsed = Cli::try_parse_from(arguments).unwrap_or_else(|error| panic!("{error}"));
    let command = parsed.command.unwrap();
    let outcome = if let cli::Command::Fleet { command: FleetCommand::Worker(args) } = &command {
        let card = serde_json::from_str(&std::env::var(CARD).unwrap()).unwrap();
        worker::run_on(args, &Pretended(card))
    } else {
        dispatch::run(command)
    };
    let exit = outcome.unwrap_or_else(|failure| {
        eprintln!("{}", failure.message);
        failure.exit
    });
    std::process::exit(exit.code())
}

/// A board with its own folder.
struct Fleet {
    board: String,
    folder: tempfile::TempDir,
}

impl Fleet {
    fn new(board: String) -> Self {
        Self { board, folder: tempfile::tempdir().unwrap() }
    }

    fn command(&self, words: &str) -> Command {
        let mut arguments: Vec<String> = words.split(' ').map(str::to_owned).collect();
        arguments.splice(0..0, ["amk".to_owned(), "fleet".to_owned()]);
        arguments.extend(["--board".to_owned(), self.board.clone()]);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture", "--test-threads=1"]);
        command.env(COMMAND, json!(arguments).to_string()).env("PGPASSWORD", "owner");
        command.env("AMK_DATA", self.folder.path()).current_dir(self.folder.path());
        command
    }

    /// The document of a command, after the words of the test's harness.
    #[track_caller]
    fn answer(&self, words: &str) -> Value {
        let output = self.command(words).output().unwrap();
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let document = &text[text.find('{').unwrap_or_else(|| panic!("no document in {text}"))..];
        serde_json::Deserializer::from_str(document).into_iter().next().unwrap().unwrap()
    }

    /// Lets a worker process of each card run until there is nothing to do, all at once.
    #[track_caller]
    fn work(&self, cards: &[Card]) {
        let start = |card: &Card| {
            let Card { host, boot, uuid, start_us, other_us } = *card;
            let card = json!({
                "host": host, "boot": boot, "uuid": uuid, "start_us": start_us, "other_us": other_us,
            });
            let words = "worker --device cuda --until-done --for 2m";
            let mut command = self.command(words);
            command.env(CARD, card.to_string()).stdout(Stdio::null()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let workers: Vec<_> = cards.iter().map(start).collect();
        for worker in workers {
            let ended = worker.wait_with_output().unwrap();
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        }
    }

    /// What is wrong with a command.
    #[track_caller]
    fn refusal(&self, words: &str) -> String {
        let output = self.command(words).output().unwrap();
        assert_eq!(output.status.code(), Some(Exit::Usage.code()), "{words}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// The ledger of a job, after `report --out out`.
    fn ledger(&self, job: usize) -> corpus::Contents {
        corpus::read(&self.folder.path().join(format!("out/{job}/ledger.jsonl"))).unwrap()
    }

    /// The only champion: status, cards and hosts that kept it, and cards that reverted it.
    #[track_caller]
    fn champion(&self) -> Value {
        let status = self.answer("status");
        assert_eq!(status["open"], json!([]), "every job is done");
        let [champion] = &status["champions"].as_array().unwrap()[..] else { panic!("{status}") };
        let of = |key: &str| champion[key].clone();
        json!([of("status"), of("cards_kept"), of("hosts_kept"), of("reverted")])
    }
}

#[test]
fn a_champion_that_cards_of_two_hosts_keep_is_confirmed() {
    if let Ok(arguments) = std::env::var(COMMAND) {
        be_amk(&arguments);
    }
    if server::is_missing() {
        println!("not run: no PostgreSQL here");
        return;
    }
    let server = server::Server::start();
    let fleet = Fleet::new(server.url("owner").display().to_string());
    let leg = "submit --models toy --cards h200 --device cuda --budget 6";
    assert_eq!(fleet.answer(leg)["new"], 1);
    fleet.work(&[A]);
    assert_eq!(fleet.champion(), json!(["candidate", 1, 1, 0]), "its own card only");

    // Two more cards, but of the host that found it.
    assert_eq!(fleet.answer("submit --races 2")["new"], 2);
    fleet.work(&[B, ALIAS]);
    assert_eq!(fleet.champion(), json!(["candidate", 3, 1, 0]), "one host by its boot");

    assert_eq!(fleet.answer("submit --races 3")["new"], 1);
    fleet.work(&[C]);
    assert_eq!(fleet.champion(), json!(["confirmed", 4, 2, 0]));

    assert_eq!(fleet.answer("submit --races 4")["new"], 1);
    fleet.work(&[REVERTS]);
    assert_eq!(fleet.champion(), json!(["candidate", 4, 2, 1]), "one card reverts it");

    // Every verdict follows from an audited ledger of its own card.
    let report = fleet.answer("report --out out");
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 5);
    let decisions: Vec<&str> = runs.iter().map(|run| run["decision"].as_str().unwrap()).collect();
    assert_eq!(decisions, ["kept", "kept", "kept", "kept", "reverted"]);
    let card = |job: usize| fleet.ledger(job).header["conditions"]["uuid"].clone();
    assert_eq!([card(1), card(4), card(5)], ["GPU-a", "GPU-c", "GPU-e"]);
}

/// Trial, outcome and schedule of each row, which must repeat.
fn rows(ledger: &corpus::Contents) -> Vec<Value> {
    let row = |row: &Value| json!([row["trial"], row["outcome"], row["verdict"]["schedule_id"]]);
    ledger.records.iter().map(row).collect()
}

/// The measured times of a search's trials, ascending.
fn measured(ledger: &corpus::Contents) -> Vec<f64> {
    let us = |row: &Value| row["verdict"]["latency_us"].as_f64();
    let trials = ledger.records.iter().filter(|row| row["kind"] == "trial");
    let mut us: Vec<f64> = trials.filter_map(us).collect();
    us.sort_by(f64::total_cmp);
    us
}

/// A leg of a later round proposes from what the rounds before it measured on this board, frozen under its hash;
/// snapshot and seed repeat it.
#[test]
fn a_round_proposes_from_the_rounds_before_and_can_be_replayed() {
    let fleet = Fleet::new("b.sqlite".to_owned());
    let round = |number: u32| {
        format!(
            "submit --models toy --cards h200 --device cuda --budget 6 --seeds 1,2 --round {number}"
        )
    };
    assert!(fleet.refusal(&round(1)).contains("amk fleet init"));
    assert_eq!(fleet.answer(&round(0))["snapshots"], json!([]));
    assert!(fleet.refusal(&round(1)).contains("0 legs done and 2 open"));
    fleet.work(&[A]);
    let made = fleet.answer(&round(1));
    assert_eq!((&made["new"], made["snapshots"].as_array().unwrap().len()), (&json!(2), 1));
    assert!(fleet.refusal(&round(2)).contains("2 legs done and 2 open"));
    fleet.work(&[A]);
    let held = fleet.answer(&round(1));
    assert_eq!((&held["new"], &held["snapshots"]), (&json!(0), &made["snapshots"]), "it is there");
    let later = fleet.answer(&round(2));
    assert_eq!(later["new"], 2);
    assert_ne!(later["snapshots"], made["snapshots"], "it knows round 1 too");
    let elsewhere = round(1).replace("h200", "h100");
    assert!(fleet.refusal(&elsewhere).contains("measured nothing for h100"));

    // The snapshot is what the legs of round 0 measured.
    fleet.answer("report --out out");
    let prior = fleet.ledger(3).header["prior"].clone();
    assert_eq!(fleet.ledger(4).header["prior"], prior, "one snapshot for a round");
    let mut known: Vec<f64> = (prior.as_array().unwrap().iter())
        .flat_map(|run| run["trials"].as_array().unwrap())
        .map(|trial| trial["us"].as_f64().unwrap())
        .collect();
    known.sort_by(f64::total_cmp);
    let mut both = [measured(&fleet.ledger(1)), measured(&fleet.ledger(2))].concat();
    both.sort_by(f64::total_cmp);
    assert_eq!(known, both);

    // A new board with the same snapshot and seeds: the same trials. Without the snapshot there are others.
    let again = Fleet::new("b.sqlite".to_owned());
    let specs: Vec<Spec> =
        (Board::open(&fleet.folder.path().join("b.sqlite")).unwrap()).jobs().unwrap()[2..4]
            .iter()
            .map(|entry| entry.spec.clone())
            .collect();
    let mut board = Board::create(&again.folder.path().join("b.sqlite"), None).unwrap();
    assert_eq!(board.freeze(&prior.to_string()).unwrap(), specs[0].priors);
    assert_eq!(json!([specs[0].priors]), made["snapshots"]);
    board.submit(&specs).unwrap();
    again.work(&[A]);
    again.answer("report --out out");
    for (job, seed) in [(3, 1), (4, 2)] {
        assert_eq!(rows(&again.ledger(job - 2)), rows(&fleet.ledger(job)), "seed {seed}");
        assert_ne!(rows(&fleet.ledger(job)), rows(&fleet.ledger(job - 2)), "the snapshot is used");
    }
}
