//! Logs of commands, and their replay: equal, altered, cut off, full.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::serve::Server;
use super::{amk_in, folder};

const FILE: &str = "commands.jsonl";

/// Generates with a log.
fn logged(folder: &Path, device: &str, more: &[&str]) -> Value {
    let plain = ["generate", "--model", "toy", "--device", device, "--kv-capacity", "64"];
    let text = ["--tokens", "1,2,3", "--max-new-tokens", "8", "--command-log", FILE];
    let ran = amk_in(folder, &[&plain[..], &text, more].concat());
    ran.succeeds("amk.generate.v1")
}

fn lines(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join(FILE)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn write(folder: &Path, lines: &[Value]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    std::fs::write(folder.join(FILE), text).unwrap();
}

/// The `count`th line of an op, from zero.
fn find(lines: &[Value], op: &str, count: usize) -> usize {
    let of = lines.iter().enumerate().filter(|(_, line)| line["op"] == op);
    of.map(|(index, _)| index).nth(count).unwrap()
}

#[test]
fn a_log_of_a_generation_replays() {
    for (device, more) in [
        ("cpu", &["--temperature", "0.8", "--seed", "5"][..]),
        ("cpu", &["--logprobs", "2"]),
        ("cpu", &["--logits", "logits.safetensors"]),
        ("eval", &[]),
    ] {
        let home = folder();
        let generated = logged(home.path(), device, more);
        let written = &generated["command_log"];
        assert_eq!((&written["file"], &written["dropped"]), (&json!(FILE), &json!(0)));
        let all = lines(home.path());
        assert_eq!(all[0]["schema"], "amk.command_log.v1");
        assert_eq!((&all[0]["model"], &all[0]["device"]), (&json!("toy"), &json!(device)));
        assert_eq!(written["entries"].as_u64().unwrap() + 2, all.len() as u64);
        assert_eq!(all.last().unwrap()["op"], "closed");
        let tokens: Vec<&Value> =
            all.iter().filter(|line| line["op"] == "token").map(|line| &line["token"]).collect();
        assert_eq!(json!(tokens), generated["tokens"]);
        for on in ["cpu", "eval"] {
            let ran = amk_in(home.path(), &["replay", FILE, "--device", on]);
            let document = ran.succeeds("amk.command_replay.v1");
            assert_eq!((&document["same"], &document["tokens"]), (&json!(true), &json!(8)));
            assert_eq!(document["by_bits"], on == device, "{document}");
            assert_eq!(
                (&document["incomplete"], &document["tokens_not_compared"]),
                (&Value::Null, &json!(0))
            );
        }
        let again = amk_in(home.path(), &["replay", FILE]).succeeds("amk.command_replay.v1");
        assert_eq!(again["device"], device);
        let gpu = amk_in(home.path(), &["replay", FILE, "--device", "cuda"]);
        assert!(gpu.code == 3 || gpu.code == 0, "{}", gpu.stderr);
    }
}

#[test]
fn an_altered_answer_is_found_with_its_position() {
    let home = folder();
    let tokens = logged(home.path(), "cpu", &[])["tokens"].clone();
    let whole = lines(home.path());
    let replayed = |lines: &[Value], device: &str| {
        write(home.path(), lines);
        let ran = amk_in(home.path(), &["replay", FILE, "--device", device]);
        assert_eq!(ran.code, 1, "{}", ran.stderr);
        let document = ran.json();
        assert_eq!(
            (&document["schema"], &document["same"]),
            (&json!("amk.command_replay.v1"), &json!(false))
        );
        assert!(ran.stderr.contains("DIFFERS at entry"), "{}", ran.stderr);
        document["first_difference"].clone()
    };
    // A token: three of the prompt, so the third new one is at position 5.
    let mut altered = whole.clone();
    let at = find(&whole, "token", 2);
    let other = (tokens[2].as_u64().unwrap() + 1) % 200;
    altered[at]["token"] = json!(other);
    for device in ["cpu", "eval"] {
        let found = replayed(&altered, device);
        assert_eq!((&found["entry"], &found["session"]), (&whole[at]["n"], &json!(1)), "{found}");
        assert_eq!((&found["position"], &found["what"]), (&json!(5), &json!("token")));
        assert_eq!(found["expected"], other.to_string());
        assert_eq!(found["got"], tokens[2].to_string());
    }
    // The token that is fed is not the one that was sampled.
    let mut altered = whole.clone();
    let at = find(&whole, "feed", 3);
    altered[at]["tokens"] = json!([other]);
    let found = replayed(&altered, "cpu");
    assert_eq!((&found["entry"], &found["position"]), (&whole[at]["n"], &json!(5)));
    // The prompt is another one: the row has other bits.
    let mut altered = whole.clone();
    let at = find(&whole, "feed", 0);
    altered[at]["tokens"] = json!([1, 2, 4]);
    let found = replayed(&altered, "cpu");
    assert_eq!((&found["what"], &found["position"]), (&json!("logits"), &json!(2)));
    // Another model.
    let mut altered = whole.clone();
    altered[0]["graph_id"] = json!("0123456789abcdef");
    write(home.path(), &altered);
    amk_in(home.path(), &["replay", FILE]).fails(1, &["0123456789abcdef", "--model"]);
}

#[test]
fn a_damaged_log_is_refused_or_read_to_its_cut() {
    let home = folder();
    logged(home.path(), "cpu", &[]);
    let whole = std::fs::read_to_string(home.path().join(FILE)).unwrap();
    let file = home.path().join(FILE);
    let replayed = |text: &str| {
        std::fs::write(&file, text).unwrap();
        amk_in(home.path(), &["replay", FILE])
    };
    // In the middle of a line, and between two.
    let torn = replayed(&whole[..whole.len() / 2]);
    let document = torn.succeeds("amk.command_replay.v1");
    assert!(document["incomplete"].as_str().unwrap().contains("is incomplete"), "{document}");
    assert!(torn.stderr.contains("cut off"), "{}", torn.stderr);
    let without_end = whole.trim_end().rfind('\n').unwrap() + 1;
    let document = replayed(&whole[..without_end]).succeeds("amk.command_replay.v1");
    assert!(document["incomplete"].as_str().unwrap().contains("killed"), "{document}");
    // A line that is gone, moved or overwritten.
    let lines: Vec<&str> = whole.split_inclusive('\n').collect();
    let without: String = [&lines[..3], &lines[4..]].concat().concat();
    replayed(&without).fails(4, &["line 4", "entry 4 stands where entry 3 should be"]);
    replayed(&whole.replacen("\"op\":\"feed\"", "\"op\":\"fred\"", 1)).fails(4, &["line", "fred"]);
    replayed(&format!("{whole}{}", lines[1])).fails(4, &["should be"]);
    for nothing in ["", "banana\n", "{\"schema\":\"amk.verdict.v2\"}\n"] {
        replayed(nothing).fails(2, &["no command log"]);
    }
    std::fs::remove_file(&file).unwrap();
    amk_in(home.path(), &["replay", FILE]).fails(2, &[FILE]);
    // A file that is there is not replaced.
    std::fs::write(&file, "mine").unwrap();
    let plain = ["generate", "--model", "toy", "--device", "cpu", "--tokens", "1"];
    let refused = amk_in(home.path(), &[&plain[..], &["--command-log", FILE]].concat());
    refused.fails(2, &[FILE, "does not exist yet"]);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
}

/// A server with a log, and two clients at once that share a beginning of more than a page.
fn served(home: &Path) -> (Server, PathBuf) {
    let path = home.join(FILE);
    let server = Server::start_in(
        &[
            "--model",
            "toy",
            "--device",
            "cpu",
            "--kv-capacity",
            "512",
            "--sessions",
            "2",
            "--command-log",
            path.to_str().unwrap(),
        ],
        Some(home),
    );
    assert_eq!(server.document["command_log"], json!(path));
    std::thread::scope(|scope| {
        for client in 0..2_u64 {
            let server = &server;
            scope.spawn(move || {
                for request in 0..2 {
                    let shared = (0..260_u64).map(|i| 1 + i * 7 % 190);
                    let prompt: Vec<u64> = shared.chain([client, request]).collect();
                    let fields = json!({
                        "model": "toy", "prompt": prompt, "max_tokens": 20, "ignore_eos": true,
                        "seed": 7 + client, "temperature": 0.9,
                    });
                    assert_eq!(server.complete(fields).status, 200);
                }
            });
        }
    });
    (server, path)
}

#[test]
fn a_log_of_a_server_with_two_sessions_replays() {
    let home = folder();
    let (mut server, path) = served(home.path());
    server.interrupt();
    assert_eq!(server.end(), 0);
    let replayed = || amk_in(home.path(), &["replay", path.to_str().unwrap()]);
    let document = replayed().succeeds("amk.command_replay.v1");
    assert_eq!((&document["same"], &document["tokens"]), (&json!(true), &json!(80)));
    assert_eq!((&document["by_bits"], &document["incomplete"]), (&json!(true), &Value::Null));
    let all = lines(home.path());
    let sessions: Vec<&Value> =
        all.iter().filter(|line| line["op"] == "token").map(|line| &line["session"]).collect();
    let changes = sessions.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes > 3, "they took turns: {sessions:?}");
    // The second session of a place has what the first has run.
    let had = |line: &&Value| line["said"]["ok"].as_u64().is_some_and(|has| has >= 128);
    assert!(all.iter().filter(|line| line["op"] == "begin").any(|line| had(&line)));
    let mut altered = all.clone();
    let at = find(&all, "token", 50);
    altered[at]["token"] = json!((all[at]["token"].as_u64().unwrap() + 1) % 200);
    write(home.path(), &altered);
    let ran = replayed();
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let found = &ran.json()["first_difference"];
    assert_eq!(
        (&found["session"], &found["position"]),
        (&all[at]["session"], &all[at]["position"])
    );
}

#[test]
fn a_log_of_a_killed_server_replays_to_its_cut() {
    let home = folder();
    let (server, path) = served(home.path());
    // Entries reach the file soon, not at once.
    let began = std::time::Instant::now();
    let tokens = || std::fs::read_to_string(&path).unwrap().matches("\"op\":\"token\"").count();
    while tokens() < 80 {
        assert!(began.elapsed() < std::time::Duration::from_secs(30));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(server);
    let ran = amk_in(home.path(), &["replay", path.to_str().unwrap(), "--device", "eval"]);
    let document = ran.succeeds("amk.command_replay.v1");
    assert_eq!((&document["tokens"], &document["by_bits"]), (&json!(80), &json!(false)));
    assert!(document["incomplete"].as_str().unwrap().contains("killed"), "{document}");
}

#[test]
fn a_full_log_replays_as_far_as_it_goes() {
    let home = folder();
    logged(home.path(), "cpu", &[]);
    let mut all = lines(home.path());
    all.drain(10..all.len() - 1);
    let last = all.len() - 1;
    (all[last]["n"], all[last]["dropped"]) = (json!(last), json!(7));
    write(home.path(), &all);
    let ran = amk_in(home.path(), &["replay", FILE]);
    let document = ran.succeeds("amk.command_replay.v1");
    assert_eq!(document["dropped"], 7);
    assert!(document["incomplete"].as_str().unwrap().contains("7 entries"), "{document}");
    assert!(ran.stderr.contains("the log was full"), "{}", ran.stderr);
    // A limit without a log.
    let plain = ["generate", "--model", "toy", "--tokens", "1", "--command-log-limit", "1"];
    let refused = amk_in(home.path(), &plain);
    assert!(
        refused.code == 2 && refused.stderr.contains("--command-log <FILE>"),
        "{}",
        refused.stderr
    );
}
