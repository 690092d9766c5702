//! The MCP server from a client's side: the built binary, and JSON-RPC line by line over its pipes. A client of another
//! project drives it in `tests/mcp/client.py`.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The time limit of every wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server and its pipes. Every line that it writes must be a JSON-RPC message.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<Value>,
    /// Messages received while waiting for another one.
    aside: Vec<Value>,
    id: u64,
}

impl Server {
    /// Starts a server and completes the handshake.
    fn start(folder: &Path) -> Self {
        let mut server = Self::spawn(folder);
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "transcript", "version": "1"}});
        let id = server.request("initialize", hello);
        let answer = server.answer(id);
        assert_eq!(answer["result"]["serverInfo"]["name"], "amk", "{answer}");
        assert_eq!(answer["result"]["protocolVersion"], "2025-06-18");
        server.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        server
    }

    fn spawn(folder: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_amk"))
            .arg("mcp")
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Never read: a server that writes much to it would block.
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let line = line.unwrap();
                let message: Value = serde_json::from_str(&line)
                    .unwrap_or_else(|e| panic!("not JSON on standard output: {e}: {line}"));
                assert_eq!(message["jsonrpc"], "2.0", "{line}");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        Self { child, input, lines, aside: Vec::new(), id: 0 }
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    fn request(&mut self, method: &str, params: Value) -> u64 {
        self.id += 1;
        let id = self.id;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn next(&mut self) -> Value {
        self.lines.recv_timeout(PATIENCE).expect("the server is silent")
    }

    /// The next message of a kind; others are set aside.
    #[track_caller]
    fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(place) = self.aside.iter().position(&wanted) {
            return self.aside.remove(place);
        }
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let message = self.next();
            if wanted(&message) {
                return message;
            }
            self.aside.push(message);
        }
        panic!("not among {:?}", self.aside);
    }

    #[track_caller]
    fn answer(&mut self, id: u64) -> Value {
        self.until(|message| message["id"] == id && message.get("method").is_none())
    }

    fn begin(&mut self, tool: &str, arguments: Value) -> u64 {
        self.request("tools/call", json!({"name": tool, "arguments": arguments}))
    }

    #[track_caller]
    fn result(&mut self, id: u64) -> Value {
        let answer = self.answer(id);
        assert!(answer.get("error").is_none(), "{answer}");
        answer["result"].clone()
    }

    /// A call that succeeds: its document.
    #[track_caller]
    fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.begin(tool, arguments);
        let result = self.result(id);
        assert_eq!(result["isError"], false, "{result}");
        let text = result["content"][0]["text"].as_str().unwrap();
        let document: Value = serde_json::from_str(text).unwrap();
        assert_eq!(document, result["structuredContent"], "text and structure differ");
        document
    }

    /// A refused call: the error's document.
    #[track_caller]
    fn refused(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.begin(tool, arguments);
        let result = self.result(id);
        assert_eq!(result["isError"], true, "{result}");
        serde_json::from_str(result["content"][0]["text"].as_str().unwrap()).unwrap()
    }

    /// Closes the input and waits for the end: returns its exit code, and how long it took.
    fn end(mut self) -> (Option<i32>, Duration) {
        let began = Instant::now();
        drop(self.input.take());
        while began.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status.code(), began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("the server is still there {PATIENCE:?} after its input ended");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn toy(mut more: Value) -> Value {
    more["model"] = "toy".into();
    more["device"] = "cpu".into();
    more
}

/// Trials of a ledger, read without the project's own reader.
fn trials(ledger: &Path) -> usize {
    let text = std::fs::read_to_string(ledger).unwrap_or_default();
    text.lines().filter(|line| line.contains("\"kind\":\"trial\"")).count()
}

fn places(document: &Value) -> Vec<&str> {
    let list = document["violations"].as_array().unwrap();
    list.iter().map(|violation| violation["at"].as_str().unwrap()).collect()
}

#[test]
fn tools_and_resources_are_listed_and_read() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let id = server.request("tools/list", json!({}));
    let tools = server.result(id)["tools"].clone();
    let names: Vec<&str> =
        tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap()).collect();
    let all = [
        "propose", "evaluate", "trace", "loop", "status", "runs", "compare", "replay", "report",
        "doctor", "explain",
    ];
    assert_eq!(names, all);
    for tool in tools.as_array().unwrap() {
        assert_eq!(tool["inputSchema"]["additionalProperties"], false, "{tool}");
        assert!(
            tool["outputSchema"]["properties"]["schema"]["const"].is_string()
                || ["evaluate", "compare", "loop"].contains(&tool["name"].as_str().unwrap()),
            "{tool}"
        );
        assert!(tool["description"].as_str().unwrap().len() < 400, "{tool}");
    }
    // A client puts the list into its model's context before the first request.
    let bytes = tools.to_string().len();
    assert!(bytes < 20_000, "tools/list has {bytes} bytes");
    let id = server.request("resources/list", json!({}));
    let listed = server.result(id)["resources"].clone();
    let uris: Vec<&str> =
        listed.as_array().unwrap().iter().map(|page| page["uri"].as_str().unwrap()).collect();
    assert_eq!(uris, ["amk://harness", "amk://knobs"]);
    let mut read = |uri: &str| {
        let id = server.request("resources/read", json!({"uri": uri}));
        server.result(id)["contents"][0]["text"].as_str().unwrap().to_owned()
    };
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let harness = std::fs::read_to_string(root.join("HARNESS.md")).unwrap();
    assert_eq!(read("amk://harness"), harness);
    assert!(harness.contains(&read("amk://knobs")), "the knob table is not HARNESS.md's");
    let id = server.request("resources/read", json!({"uri": "amk://nothing"}));
    let missing = server.answer(id);
    assert!(missing["error"]["message"].as_str().unwrap().contains("amk://knobs"), "{missing}");
}

#[test]
fn each_search_is_a_resource() {
    let dir = folder();
    let amk = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
        command.args(args).current_dir(dir.path()).output().unwrap()
    };
    let found =
        amk(&["loop", "--model", "toy", "--device", "cpu", "--budget", "2", "--out", "runs/a"]);
    assert!(found.status.success(), "{found:?}");
    let shown: Value = serde_json::from_slice(&amk(&["runs", "show", "runs/a"]).stdout).unwrap();
    let elsewhere = folder();
    std::fs::copy(dir.path().join("runs/a/ledger.jsonl"), elsewhere.path().join("ledger.jsonl"))
        .unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), dir.path().join("runs/away")).unwrap();
    let mut server = Server::start(dir.path());
    let id = server.request("resources/list", json!({}));
    let listed = server.result(id)["resources"].to_string();
    assert!(listed.contains("\"amk://runs/a\""), "{listed}");
    let id = server.request("resources/templates/list", json!({}));
    assert_eq!(server.result(id)["resourceTemplates"][0]["uriTemplate"], "amk://runs/{name}");
    let id = server.request("resources/read", json!({"uri": "amk://runs/a"}));
    let contents = server.result(id)["contents"][0].clone();
    assert_eq!(contents["mimeType"], "application/json");
    let text = contents["text"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), shown);
    for none in
        ["amk://runs/b", "amk://runs/..", "amk://runs/a/../a", "amk://runs/", "amk://runs/away"]
    {
        let id = server.request("resources/read", json!({"uri": none}));
        let answer = server.answer(id);
        assert!(answer["error"]["message"].as_str().unwrap().contains("there is no"), "{answer}");
    }
    let ledger = dir.path().join("runs/a/ledger.jsonl");
    let edited =
        std::fs::read_to_string(&ledger).unwrap().replacen("\"trial\":1", "\"trial\":7", 1);
    std::fs::write(&ledger, edited).unwrap();
    let id = server.request("resources/read", json!({"uri": "amk://runs/a"}));
    let answer = server.answer(id);
    assert!(answer["error"]["message"].as_str().unwrap().contains("does not hold"), "{answer}");
}

#[test]
fn prompts_are_listed_and_filled_in() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let id = server.request("prompts/list", json!({}));
    let listed = server.result(id)["prompts"].clone();
    let names: Vec<_> =
        listed.as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tune", "explain_run"]);
    assert_eq!(listed[0]["arguments"][0]["required"], true, "{listed}");
    let mut get = |name: &str, arguments: Value| {
        let id = server.request("prompts/get", json!({"name": name, "arguments": arguments}));
        server.answer(id)
    };
    let text = |answer: &Value| {
        answer["result"]["messages"][0]["content"]["text"].as_str().unwrap().to_owned()
    };
    let tune = text(&get("tune", json!({"model": "toy", "budget": "30m"})));
    assert!(tune.contains("\"toy\"") && tune.contains("\"30m\""), "{tune}");
    assert!(text(&get("tune", json!({"model": "toy"}))).contains("\"64\""));
    assert!(text(&get("explain_run", json!({"run": "0001"}))).contains("amk://runs/0001"));
    for (name, arguments, why) in [
        ("tune", json!({}), "needs the argument `model`"),
        ("tune", json!({"model": "toy", "modle": "x"}), "no argument `modle`"),
        ("tun", json!({}), "there are tune, explain_run"),
    ] {
        let answer = get(name, arguments);
        assert!(answer["error"]["message"].as_str().unwrap().contains(why), "{answer}");
    }
}

#[test]
fn the_quick_tools_answer_as_the_commands_do() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let command = |args: &[&str]| -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
        let ran = command.args(args).current_dir(dir.path()).output().unwrap();
        serde_json::from_slice(&ran.stdout).unwrap()
    };
    let proposed = server.call("propose", toy(json!({})));
    assert_eq!(proposed, command(&["propose", "--model", "toy", "--device", "cpu"]));
    let config = json!({"pipeline": {"stages": 4}});
    std::fs::write(dir.path().join("my.json"), config.to_string()).unwrap();
    let verdict = server.call("evaluate", toy(json!({"config": config, "kv_capacity": 16})));
    let args = ["evaluate", "--model", "toy", "--device", "cpu", "--kv-capacity", "16"];
    assert_eq!(verdict, command(&[&args[..], &["--config", "my.json"]].concat()));
    assert_eq!(verdict["correct"], true);
    let same = server.call("evaluate", toy(json!({"config": "my.json", "kv_capacity": 16})));
    assert_eq!(same, verdict, "a config in a file and one in the arguments");
    assert_eq!(server.call("explain", json!({"name": "S-RING"})), command(&["explain", "S-RING"]));
    assert_eq!(server.call("explain", json!({})), command(&["explain"]));
    let (a, b) = (json!({"kernel": {"evict": "normal"}}), json!({"pipeline": {"stages": 4}}));
    let difference = server.call("compare", json!({"a": a, "b": b}));
    let knobs: Vec<&str> = difference["knobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|knob| knob["knob"].as_str().unwrap())
        .collect();
    assert_eq!(knobs, ["pipeline.stages", "kernel.evict"]);
    assert_eq!(difference["acts_on"], "kernel");
    assert_eq!(server.call("status", json!({}))["doing"], "idle");
}

#[test]
fn a_page_is_written_and_only_its_path_is_sent() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    server.call("loop", toy(json!({"budget": 2, "out": "run", "kv_capacity": 16})));
    let written = server.call("report", json!({"runs": ["run"], "out": "page.html"}));
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert_eq!(
        (&written["schema"], &written["file"]),
        (&json!("amk.report.v1"), &json!("page.html"))
    );
    assert_eq!(written["bytes"], page.len());
    assert!(page.contains("<svg") && !written.to_string().contains("<svg"));
    let wrong = json!({"runs": ["nowhere"], "out": "run/ledger.jsonl"});
    assert_eq!(places(&server.refused("report", wrong)), ["runs", "out"]);
    assert_eq!(
        places(&server.refused("report", json!({"runs": ["run"], "out": "no/a.html"}))),
        ["out"]
    );
}

#[test]
fn wrong_arguments_are_an_error_that_says_all_of_it() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let wrong = json!({
        "model": "toy", "device": "gpu", "target": "h2000", "kv_capacity": 99_999_999, "sed": 3,
        "config": {"pipeline": {"stages": 99, "stage": 1}}
    });
    let error = server.refused("evaluate", wrong);
    assert_eq!((&error["schema"], &error["exit_code"]), (&json!("amk.error.v1"), &json!(2)));
    let mut found = places(&error);
    found.sort_unstable();
    let all = [
        "config.pipeline.stage",
        "config.pipeline.stages",
        "device",
        "kv_capacity",
        "sed",
        "target",
    ];
    assert_eq!(found, all);
    // Only the schedule is wrong: the verdict reports it with every violation, and is an error.
    let illegal = json!({"config": {"pipeline": {"stages": 99, "stage": 1}, "kernel": {"poll_sleep_ns": "8"}}});
    let verdict = server.refused("evaluate", toy(illegal));
    assert_eq!(verdict["schema"], "amk.verdict.v2");
    assert_eq!(places(&verdict), ["pipeline.stages", "pipeline.stage", "kernel.poll_sleep_ns"]);

    let error = server.refused("evaluate", json!({"model": "no-such-model", "seed": -1}));
    assert_eq!(places(&error), ["seed", "model"]);
    let error = server.refused("propose", json!({"ledger": "nowhere.jsonl"}));
    assert_eq!(places(&error), ["model", "ledger"]);
    let error = server
        .refused("loop", json!({"budget": "soon", "min_gain": 100, "results": "/etc/passwd"}));
    let mut found = places(&error);
    found.sort_unstable();
    assert_eq!(found, ["budget", "min_gain", "results"]);
    let error = server.refused("loop", toy(json!({"resume": true, "out": "nowhere"})));
    assert_eq!(places(&error), ["out"]);
    let error = server.refused(
        "compare",
        json!({"a": {"pipeline": {"stages": 99}}, "b": "nowhere.json", "model": "none"}),
    );
    assert_eq!(places(&error), ["model", "a", "b"]);
    let error = server.refused("runs", json!({"paths": ["here", "there"]}));
    assert_eq!(places(&error), ["paths", "paths"]);
    let error = server.refused("explain", json!({"name": "pipeline.stage"}));
    assert!(error["message"].as_str().unwrap().contains("pipeline.stages"), "{error}");
    // An unknown tool is an error of the protocol.
    let id = server.begin("lop", json!({}));
    let answer = server.answer(id);
    assert!(answer["error"]["message"].as_str().unwrap().contains("loop"), "{answer}");
    assert_eq!(server.call("status", json!({}))["doing"], "idle", "it goes on after all that");
}

#[test]
fn texts_are_taken_for_what_they_can_only_mean() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let given = json!({"config": {"pipeline": {"stages": 4}}, "kv_capacity": 16});
    let plain = server.call("evaluate", toy(given));
    let texts = json!({"config": r#"{"pipeline": {"stages": 4}}"#, "kv_capacity": "16"});
    assert_eq!(server.call("evaluate", toy(texts)), plain);
    let error = server.refused("evaluate", toy(json!({"config": "{pipeline: 4}"})));
    assert!(
        error["violations"][0]["message"].as_str().unwrap().contains("line 1 column 2"),
        "{error}"
    );
    let error = server.refused("evaluate", toy(json!({"kv_capacity": "many"})));
    assert_eq!(places(&error), ["kv_capacity"]);
    server.call("loop", toy(json!({"budget": "2", "out": "run", "kv_capacity": "16"})));
    let written = server.call("report", json!({"runs": "run", "out": "page.html"}));
    assert_eq!(written["trials"], 2);
}

#[test]
fn files_outside_of_the_working_folder_are_neither_read_nor_written() {
    let (dir, elsewhere) = (folder(), folder());
    let secret = elsewhere.path().join("secret.json");
    std::fs::write(&secret, r#"{"token": "SECRET", "pipeline": "SECRET"}"#).unwrap();
    std::os::unix::fs::symlink(&secret, dir.path().join("link.json")).unwrap();
    std::fs::create_dir(dir.path().join("here")).unwrap();
    let mut server = Server::start(&dir.path().join("here"));
    let secret = secret.to_str().unwrap();
    let new = elsewhere.path().join("new.html");
    for (tool, arguments, place) in [
        ("evaluate", toy(json!({"config": secret})), "config"),
        ("evaluate", toy(json!({"config": "../link.json"})), "config"),
        ("compare", json!({"a": {}, "b": secret}), "b"),
        ("propose", toy(json!({"ledger": secret})), "ledger"),
        ("runs", json!({"paths": [elsewhere.path()]}), "paths"),
        ("loop", toy(json!({"budget": 1, "out": elsewhere.path().join("run")})), "out"),
        ("loop", toy(json!({"budget": 1, "out": "run", "store": "../store.sqlite"})), "store"),
        ("report", json!({"runs": ["."], "out": new}), "out"),
    ] {
        let error = server.refused(tool, arguments);
        assert!(!error.to_string().contains("SECRET"), "{error}");
        assert_eq!(places(&error), [place], "{error}");
        assert!(error.to_string().contains("outside of"), "{error}");
    }
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 1);
    assert_eq!(std::fs::read_dir(dir.path().join("here")).unwrap().count(), 0);
}

#[test]
fn what_an_unknown_key_holds_is_not_repeated() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    std::fs::write(dir.path().join("other.json"), r#"{"token": "SECRET"}"#).unwrap();
    let verdict = server.refused("evaluate", toy(json!({"config": "other.json"})));
    assert_eq!(places(&verdict), ["token"]);
    assert!(!verdict.to_string().contains("SECRET"), "{verdict}");
}

#[test]
fn nothing_is_written_over() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    server.call("loop", toy(json!({"budget": 1, "out": "run", "kv_capacity": 16})));
    std::fs::create_dir(dir.path().join("mine")).unwrap();
    std::fs::write(dir.path().join("mine/best.json"), "precious").unwrap();
    let error = server.refused("loop", toy(json!({"budget": 1, "out": "mine"})));
    assert_eq!(places(&error), ["out"]);
    std::fs::write(dir.path().join("report.html"), "precious").unwrap();
    for out in [json!({}), json!({"out": "report.html"})] {
        let mut arguments = json!({"runs": ["run"]});
        arguments.as_object_mut().unwrap().extend(out.as_object().unwrap().clone());
        assert_eq!(places(&server.refused("report", arguments)), ["out"]);
    }
    for file in ["mine/best.json", "report.html"] {
        assert_eq!(std::fs::read_to_string(dir.path().join(file)).unwrap(), "precious");
    }
}

/// Begins a search with a progress token.
fn begin_search(server: &mut Server, arguments: Value) -> u64 {
    let meta = json!({"progressToken": "trials"});
    server
        .request("tools/call", json!({"name": "loop", "arguments": toy(arguments), "_meta": meta}))
}

fn is_progress(message: &Value) -> bool {
    message["method"] == "notifications/progress"
}

/// While a search runs, other calls are answered, and those that would disturb it are refused at once.
fn leaves_room(server: &mut Server, folder: &Path) {
    let ping = server.request("ping", json!({}));
    server.result(ping);
    let status = server.call("status", json!({}));
    assert_eq!(
        (&status["doing"], &status["search"]["state"]),
        (&json!("searching"), &json!("running"))
    );
    assert!(status["search"]["best_us"].as_f64().unwrap() > 0.0);
    for (tool, arguments) in [("evaluate", toy(json!({}))), ("loop", toy(json!({"out": "other"})))]
    {
        let error = server.refused(tool, arguments);
        assert!(error["message"].as_str().unwrap().starts_with("busy: a search"), "{error}");
    }
    assert!(!folder.join("other").exists());
}

#[test]
fn a_search_reports_leaves_room_is_cancelled_and_goes_on() {
    let dir = folder();
    let ledger = dir.path().join("night/ledger.jsonl");
    let mut server = Server::start(dir.path());
    let search = begin_search(&mut server, json!({"budget": 100_000, "out": "night"}));
    let mut before = 0.0;
    for _ in 0..3 {
        let progress = server.until(is_progress)["params"].clone();
        assert_eq!(
            (&progress["progressToken"], &progress["total"]),
            (&json!("trials"), &json!(100_000.0))
        );
        assert!(progress["progress"].as_f64().unwrap() > before, "{progress}");
        before = progress["progress"].as_f64().unwrap();
        let message = progress["message"].as_str().unwrap();
        assert!(
            message.contains("of 100000; best") && message.contains("us predicted"),
            "{message}"
        );
        assert!(trials(&ledger) as f64 >= before, "told before it was on the disk");
    }
    leaves_room(&mut server, dir.path());
    server.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": search, "reason": "enough"}}));
    let began = Instant::now();
    let ended = loop {
        let status = server.call("status", json!({}));
        if status["doing"] == "idle" {
            break status["search"].clone();
        }
        assert!(began.elapsed() < PATIENCE, "{status}");
    };
    assert_eq!(
        (&ended["state"], &ended["result"]["stopped_by"]),
        (&json!("interrupted"), &json!("interrupted"))
    );
    let done = trials(&ledger);
    assert_eq!(ended["trials"], done, "what is told is what is on the disk");
    assert_eq!(ended["result"]["n_trials"], done);
    assert!(done >= 3 && ended["resume"] == "amk loop --resume --out night", "{ended}");
    let answered = |server: &Server| server.aside.iter().any(|message| message["id"] == search);
    assert!(!answered(&server), "a call that was cancelled has no answer");

    let runs = server.call("runs", json!({"verify": true, "paths": ["night"]}));
    assert_eq!(
        (&runs["runs"][0]["holds"], &runs["runs"][0]["trials"]),
        (&json!(true), &json!(done))
    );
    // A resumed search continues where it was, and ends by itself.
    let more = json!({"resume": true, "out": "night", "budget": done + 2});
    let found = server.call("loop", toy(more));
    assert_eq!((&found["n_trials"], &found["stopped_by"]), (&json!(done + 2), &json!("trials")));
    assert_eq!(trials(&ledger), done + 2);
    assert!(!answered(&server));
    assert_eq!(server.call("status", json!({}))["search"]["state"], "finished");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_search_in_the_background_is_followed_stopped_and_replayed() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let begun = server.call("loop", toy(json!({"budget": "1h", "out": "s", "background": true})));
    assert_eq!(begun["schema"], "amk.status.v1");
    let mut until = |state: &str, arguments: Value| {
        let began = Instant::now();
        loop {
            let status = server.call("status", arguments.clone());
            let trials = status["search"]["trials"].as_u64().unwrap_or(0);
            if status["search"]["state"] == state && trials > 2 {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "{status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    assert_eq!(until("running", json!({}))["doing"], "searching");
    let ended = until("interrupted", json!({"stop": true}));
    let trial = ended["search"]["best_trial"].clone();
    // A search that was stopped has no champion, and each of its trials can be repeated.
    let again = server.call("replay", json!({"path": "s", "trial": trial, "device": "cpu"}));
    assert_eq!(again["same"], true, "{again}");
    let far = server.refused("replay", json!({"path": "/etc"}));
    assert_eq!(places(&far), ["path"]);
}

#[test]
fn an_agent_sees_where_the_time_goes_and_what_the_machine_lacks() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let config = json!({"tiling": {"qkv": {"rows": 8}}});
    let traced = server.call("trace", toy(json!({"config": config, "context": 64})));
    let digest = traced["schedules"][0]["digest"].as_str().unwrap();
    assert!(digest.contains("64 tokens of context") && digest.len() < 6 << 10, "{digest}");
    let machine = server.call("doctor", json!({"model": "toy"}));
    assert!(machine["checks"].as_array().unwrap().iter().any(|check| check["name"] == "device"));
}

#[test]
fn a_search_is_sealed_kept_in_the_store_and_compared_with_another() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let few = |more: Value| {
        let mut arguments = toy(json!({"budget": 4, "kv_capacity": 16}));
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    let one = server.call("loop", few(json!({"out": "runs/one"})));
    let two = server.call("loop", few(json!({"out": "runs/two", "seed": 1})));
    assert_eq!((&one["store"], &two["store"]), (&json!("runs/store.sqlite"), &one["store"]));
    let own = server.call("loop", few(json!({"out": "runs/own", "store": "none"})));
    assert!(own["store"].is_null(), "{own}");
    let other = few(json!({"out": "runs/other", "store": "other.sqlite", "kv_capacity": 32}));
    assert_eq!(server.call("loop", other)["store"], "other.sqlite");
    for (store, held) in [("runs/store.sqlite", 2), ("other.sqlite", 1)] {
        let store = corpus::Store::existing(&dir.path().join(store)).unwrap();
        assert_eq!(store.runs().unwrap().len(), held);
        assert_eq!(store.check().unwrap(), Ok(()));
    }
    let listed = server.call("runs", json!({"verify": true, "paths": ["runs"]}));
    let states: Vec<&Value> =
        listed["runs"].as_array().unwrap().iter().map(|run| &run["state"]).collect();
    assert_eq!(states, ["sealed"; 4]);
    let pair = ["runs/one", "runs/two/ledger.jsonl"];
    let compared = server.call("compare", json!({"a": pair[0], "b": pair[1]}));
    let ran = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["runs", "compare", pair[0], pair[1]])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(compared, serde_json::from_slice::<Value>(&ran.stdout).unwrap());
    assert_eq!(
        (&compared["schema"], &compared["comparable"]),
        (&json!("amk.compare.v1"), &json!(true))
    );
    // Runs that are not comparable are an answer with reasons, not an error.
    let apart = server.call("compare", json!({"a": "runs/one", "b": "runs/other"}));
    assert_eq!(
        (&apart["better"], &apart["reasons"][0]["what"]),
        (&Value::Null, &json!("key/value capacity"))
    );
    let mixed = json!({"a": "runs/one", "b": "runs/one/best.json", "model": "toy"});
    assert_eq!(places(&server.refused("compare", mixed)), ["model", "b"]);
    assert_eq!(places(&server.refused("compare", json!({"a": "runs", "b": "runs/one"}))), ["a"]);
}

#[test]
fn evaluations_take_turns_and_a_crowd_is_refused() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    let ids: Vec<u64> =
        (0..24).map(|_| server.begin("evaluate", toy(json!({"kv_capacity": 16})))).collect();
    let results: Vec<Value> = ids.into_iter().map(|id| server.result(id)).collect();
    let (judged, refused): (Vec<&Value>, Vec<&Value>) =
        results.iter().partition(|result| result["isError"] == false);
    assert!(!judged.is_empty(), "{refused:?}");
    for result in &judged {
        assert_eq!(result["structuredContent"], judged[0]["structuredContent"]);
    }
    for result in &refused {
        assert!(result["content"][0]["text"].as_str().unwrap().contains("busy: "), "{result}");
    }
}

#[test]
fn the_end_of_the_input_ends_the_work() {
    let dir = folder();
    let mut server = Server::start(dir.path());
    begin_search(&mut server, json!({"budget": 1_000_000, "out": "night"}));
    server.until(is_progress);
    let (code, took) = server.end();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(20), "{took:?}");
    let done = trials(&dir.path().join("night/ledger.jsonl"));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(trials(&dir.path().join("night/ledger.jsonl")), done, "somebody still searches");
    let verify = Command::new(env!("CARGO_BIN_EXE_amk"))
        .args(["runs", "verify", "night"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert_eq!(verify.status.code(), Some(0));
    // A client that sends nothing.
    let silent = Server::spawn(dir.path());
    assert_eq!(silent.end().0, Some(0));
}

/// A client that sends and never reads must neither stop the search nor keep the server alive.
#[test]
fn a_client_that_does_not_read_stops_nothing() {
    let dir = folder();
    let mut child = Command::new(env!("CARGO_BIN_EXE_amk"))
        .arg("mcp")
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "deaf", "version": "1"}});
    writeln!(
        input,
        "{}",
        json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello})
    )
    .unwrap();
    writeln!(input, "{}", json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
        .unwrap();
    // More than the buffer of a pipe.
    for id in 1..=20 {
        let read = json!({"jsonrpc": "2.0", "id": id, "method": "resources/read", "params": {"uri": "amk://harness"}});
        writeln!(input, "{read}").unwrap();
    }
    let search = json!({
        "jsonrpc": "2.0", "id": 99, "method": "tools/call",
        "params": {"name": "loop", "arguments": toy(json!({"budget": 8, "out": "night"})), "_meta": {"progressToken": 1}}
    });
    writeln!(input, "{search}").unwrap();
    let best = dir.path().join("night/best.json");
    let began = Instant::now();
    while !best.exists() {
        assert!(began.elapsed() < PATIENCE, "the search waits for its reader");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(trials(&dir.path().join("night/ledger.jsonl")), 8);
    drop(input);
    let (sender, ended) = channel();
    let mut output = child.stdout.take();
    std::thread::spawn(move || sender.send(child.wait().unwrap().code()));
    match ended.recv_timeout(PATIENCE) {
        Ok(code) => assert_eq!(code, Some(0)),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            panic!("the server outlives its client")
        }
    }
    drop(output.take());
}

#[test]
fn a_search_whose_proposals_are_a_command_is_not_resumed_by_a_tool() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(folder.path());
    server.call("loop", json!({"model": "toy", "device": "cpu", "kv_capacity": 16, "budget": 2, "out": "s", "store": "none"}));
    let ledger = folder.path().join("s/ledger.jsonl");
    let mut contents = corpus::read(&ledger).unwrap();
    contents.header["proposer"] = "touch OWNED; cat >/dev/null".into();
    for name in ["ledger.jsonl", "manifest.json"] {
        std::fs::remove_file(folder.path().join("s").join(name)).unwrap();
    }
    let mut forged = corpus::Ledger::create(&ledger, &contents.header).unwrap();
    contents.records.iter().for_each(|record| drop(forged.append(record).unwrap()));
    drop(forged);
    for more in [json!({}), json!({"proposer": "touch OWNED; cat >/dev/null"})] {
        let mut arguments = json!({"resume": true, "out": "s", "budget": 9, "store": "none"});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let error = server.refused("loop", arguments);
        assert!(error.to_string().contains("proposer"), "{error}");
    }
    assert!(!folder.path().join("OWNED").exists());
    assert_eq!(corpus::read(&ledger).unwrap().records.len(), contents.records.len());
}

/// A search by an agent.
#[path = "mcp_agent_tests.rs"]
mod agent;
