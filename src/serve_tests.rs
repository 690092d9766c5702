//! Sampling on the command line, and the HTTP server from a client's side, byte by byte. OpenAI's own client drives it
//! in `tests/serve/client.py`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use super::amk;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama3-rope-bf16");
const MODEL: &str = "llama3-rope-bf16";
/// The time limit of every wait.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a change in another process.
#[track_caller]
fn wait_for(what: &str, mut happened: impl FnMut() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A server process.
pub(super) struct Server {
    child: Child,
    /// Kept open: a server with a closed standard output would fail to write.
    _output: BufReader<ChildStdout>,
    address: String,
    pub(super) document: Value,
}

/// An answer of the server.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl Answer {
    #[track_caller]
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Asserts a refusal in OpenAI's shape that names the field.
    #[track_caller]
    pub(super) fn refuses(&self, status: u16, param: Option<&str>) -> String {
        assert_eq!(self.status, status, "{}", self.body);
        let error = &self.json()["error"];
        assert_eq!(error["param"].as_str(), param, "{error}");
        assert!(error["type"].is_string(), "{error}");
        error["message"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    fn text(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()["choices"][0]["text"].as_str().unwrap().to_owned()
    }
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        Self::start_in(arguments, None)
    }

    /// The same with a folder for its telemetry page.
    pub(super) fn start_in(arguments: &[&str], runtime: Option<&Path>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
        command.envs(runtime.map(|folder| ("XDG_RUNTIME_DIR", folder)));
        Self::start_by(command, arguments)
    }

    /// Starts it through a command that runs `amk` with the appended arguments.
    fn start_by(mut command: Command, arguments: &[&str]) -> Self {
        let mut child = command
            .args(["serve", "--addr", "127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let document: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(document["schema"], "amk.serve.v2");
        let url = document["url"].as_str().unwrap();
        let address = url.trim_start_matches("http://").trim_end_matches("/v1").to_owned();
        Self { child, _output: output, address, document }
    }

    /// Opens a connection and sends a request. HTTP/1.0, so that the answer ends with the connection.
    pub(super) fn send(&self, head: &str, body: &str) -> TcpStream {
        Self::connect(&self.address, head, body)
    }

    fn connect(address: &str, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The server may answer and close before it has read everything.
        let _ = write!(
            stream,
            "{head}\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream
    }

    /// Sends a request to another listener of the same process.
    pub(super) fn at(&self, address: &str, head: &str) -> Answer {
        Self::answered(Self::connect(address, head, ""))
    }

    fn ask(&self, head: &str, body: &str) -> Answer {
        Self::answered(self.send(head, body))
    }

    fn answered(mut stream: TcpStream) -> Answer {
        let mut bytes = Vec::new();
        let mut piece = [0; 4096];
        loop {
            match stream.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => bytes.extend_from_slice(&piece[..length]),
                Err(error)
                    if !bytes.is_empty() && error.kind() == std::io::ErrorKind::ConnectionReset =>
                {
                    break;
                }
                // A process that was stopped and continued has its timed waits interrupted.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => panic!("{error} after {} bytes", bytes.len()),
            }
        }
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("{head}"));
        Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    fn get(&self, path: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.0"), "")
    }

    fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask(&head(path), &body.to_string())
    }

    pub(super) fn complete(&self, fields: Value) -> Answer {
        self.post("/v1/completions", &request(fields))
    }

    fn inside(&self) -> u64 {
        self.get("/health").json()["requests"].as_u64().unwrap()
    }

    pub(super) fn interrupt(&self) {
        self.signal(Signal::INT);
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The number of sequences that ended because the client disconnected.
    fn cancelled(&self) -> u64 {
        self.sum("amk_sequences_ended_total{outcome=\"cancelled\"} ")
    }

    /// The number of positions run so far.
    pub(super) fn positions(&self) -> u64 {
        self.sum("amk_positions_total{priority=\"normal\"} ")
    }

    /// The value of a metric.
    pub(super) fn sum(&self, name: &str) -> u64 {
        let url = self.document["metrics"].as_str().unwrap();
        let address = url.trim_start_matches("http://").trim_end_matches("/metrics");
        let text = self.at(address, "GET /metrics HTTP/1.0").body;
        let count = text.lines().find_map(|line| line.strip_prefix(name)?.parse::<f64>().ok());
        count.unwrap_or_else(|| panic!("{text}")) as u64
    }

    /// Waits for the end and returns the exit code.
    #[track_caller]
    pub(super) fn end(&mut self) -> i32 {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(began.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn head(path: &str) -> String {
    format!("POST {path} HTTP/1.0\r\ncontent-type: application/json")
}

/// A completion request with additional fields.
fn request(fields: Value) -> Value {
    let mut request = json!({"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 12, "seed": 1});
    for (name, value) in fields.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

#[test]
fn tokens_are_drawn_the_same_with_the_same_seed() {
    let base = ["generate", "--model", "toy", "--tokens", "1,2,3", "--max-new-tokens", "12"];
    let generate = |more: &[&str]| {
        let arguments: Vec<&str> = base.iter().chain(more).copied().collect();
        amk(&arguments).succeeds("amk.generate.v1")
    };
    let warm = ["--temperature", "1.5", "--seed", "3"];
    let drawn = generate(&warm);
    assert_eq!(drawn["sampling"], "host");
    assert_eq!(generate(&warm)["tokens"], drawn["tokens"]);
    assert_ne!(generate(&["--temperature", "1.5", "--seed", "4"])["tokens"], drawn["tokens"]);
    let greedy = generate(&[]);
    assert_ne!(greedy["tokens"], drawn["tokens"]);
    for same in [
        &["--temperature", "0"][..],
        &["--top-k", "1", "--temperature", "2"],
        &["--top-p", "0", "--temperature", "1"],
        &["--device", "eval"],
    ] {
        assert_eq!(generate(same)["tokens"], greedy["tokens"], "{same:?}");
    }
    let first = greedy["tokens"][0].as_u64().unwrap();
    let banned = generate(&["--logit-bias", &format!("{first}:-inf,2:-1.5"), "--logprobs", "3"]);
    assert!(banned["tokens"].as_array().unwrap().iter().all(|token| *token != first));
    let scored = &banned["logprobs"][0];
    assert_eq!(scored["token"], banned["tokens"][0]);
    // The row as the model computed it: the banned token has the highest logit.
    assert_eq!(
        (&scored["top"][0]["token"], scored["top"].as_array().unwrap().len()),
        (&json!(first), 3)
    );
    assert!(scored["top"][0]["logprob"].as_f64() > scored["logprob"].as_f64());
    assert!(greedy.get("logprobs").is_none());
}

#[test]
fn settings_without_meaning_are_refused_together() {
    let base = ["generate", "--model", "toy", "--tokens", "1"];
    let wrong = [
        "--temperature",
        "-1",
        "--top-p",
        "1.5",
        "--repetition-penalty",
        "0",
        "--logit-bias",
        "999999:1",
    ];
    let arguments: Vec<&str> = base.iter().chain(&wrong).copied().collect();
    let wanted = [
        "--temperature is -1",
        "--top-p is 1.5; legal: 0 to 1",
        "--repetition-penalty is 0",
        "--logit-bias is 1 for token 999999",
    ];
    amk(&arguments).fails(2, &wanted);
    amk(&["generate", "--model", "toy", "--tokens", "1", "--logit-bias", "x"]).fails(2, &[]);
    let all: Vec<String> = (0..256).map(|token| format!("{token}:-inf")).collect();
    let vocab = amk(&[
        "generate",
        "--model",
        "toy",
        "--tokens",
        "1",
        "--max-new-tokens",
        "1",
        "--logit-bias",
        &all.join(","),
    ]);
    assert_eq!(vocab.code, 1, "{}", vocab.stderr);
    assert!(vocab.stderr.contains("every token is banned"), "{}", vocab.stderr);
}

/// The same model behind the server and on the command line, with both engines of the CPU.
#[test]
fn the_server_gives_the_tokens_of_generate() {
    for device in ["eval", "cpu"] {
        let server = Server::start(&["--model", "toy", "--device", device]);
        assert_eq!(
            (&server.document["device"], &server.document["tokenizer"]),
            (&json!(device), &json!(false))
        );
        let settings =
            ["--temperature", "0.9", "--top-k", "20", "--repetition-penalty", "1.3", "--seed", "5"];
        let base = [
            "generate",
            "--model",
            "toy",
            "--tokens",
            "1,2,3",
            "--max-new-tokens",
            "20",
            "--device",
            device,
        ];
        let arguments: Vec<&str> = base.iter().chain(&settings).copied().collect();
        let document = amk(&arguments).succeeds("amk.generate.v1");
        let expected: Vec<String> = document["tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| format!("{token} "))
            .collect();
        let fields = json!({"model": "toy", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0.9, "top_k": 20,
            "repetition_penalty": 1.3, "seed": 5, "service_tier": "flex"});
        let answer = server.complete(fields);
        // The server also stops at the model's end tokens, which have no text.
        assert!(expected.concat().starts_with(&answer.text()), "{}", answer.body);
        let usage = &answer.json()["usage"];
        assert_eq!(usage["prompt_tokens"], 3);
        if usage["completion_tokens"] == 20 {
            assert_eq!(answer.text().trim_end().len(), expected.concat().trim_end().len());
        }
        let message =
            server.complete(json!({"model": "toy", "prompt": "text"})).refuses(400, Some("prompt"));
        assert!(message.contains("no tokenizer.json"), "{message}");
    }
}

/// A lone request that is guessed, by the server's default or its own field, has the text of one that is not. The model is one
/// whose texts repeat: others are never guessed.
#[test]
fn a_guessed_answer_is_the_same() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/qwen3-qknorm-bf16");
    let server = Server::start(&["--model", model, "--device", "cpu", "--speculate", "5"]);
    let fields = |most: u32| {
        let prompt = [3, 5, 8, 3, 5, 8, 3, 5];
        json!({"model": "qwen3-qknorm-bf16", "prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": true, "speculative.n_max": most})
    };
    let mut default = fields(0);
    default.as_object_mut().unwrap().remove("speculative.n_max");
    let plain = server.complete(fields(0));
    assert_eq!(plain.json()["usage"]["completion_tokens"], 60, "{}", plain.body);
    for guessed in [default, fields(1), fields(7)] {
        assert_eq!(server.complete(guessed.clone()).text(), plain.text(), "{guessed}");
    }
    let metrics = server.get("/metrics").body;
    let count = |name: &str| {
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
        value
            .and_then(|(_, value)| value.parse::<f64>().ok())
            .unwrap_or_else(|| panic!("{metrics}"))
    };
    let [windows, guessed, accepted] = ["windows", "guessed_tokens", "accepted_tokens"]
        .map(|name| count(&format!("amk_{name}_total")));
    assert!(windows > 0.0 && guessed >= accepted && accepted > 0.0, "{metrics}");
    let drafts = ["drafts", "draft_tokens", "accepted_tokens"]
        .map(|name| count(&format!("vllm:spec_decode_num_{name}_total")));
    assert_eq!(drafts, [windows, guessed, accepted]);
    let message = server.complete(fields(8)).refuses(400, Some("speculative.n_max"));
    assert!(message.contains("0 to 7"), "{message}");
}

/// The same with a draft, whose guesses are counted apart. Beside another request nobody has it.
#[test]
fn an_answer_with_a_draft_is_the_same() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama3-rope-bf16");
    let flags = ["--speculate", "4", "--draft", model];
    let server = Server::start(&[&["--model", model, "--device", "cpu"], &flags[..]].concat());
    let ask = |most: u32, seed: u32| {
        let (prompt, temperature) = ([3, 5, 8, 13 + seed], f64::from(seed) / 8.0);
        let fields = json!({"model": "llama3-rope-bf16", "prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": seed, "ignore_eos": true, "speculative.n_max": most});
        server.complete(fields).text()
    };
    let drafted = || {
        let metrics = server.get("/metrics").body;
        ["guessed", "accepted"].map(|name| {
            let prefix = format!("amk_draft_{name}_tokens_total");
            let line = metrics.lines().find(|line| line.starts_with(&prefix));
            let count = line.and_then(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
            count.unwrap_or_else(|| panic!("{metrics}"))
        })
    };
    let plain: Vec<String> = (0..4).map(|seed| ask(0, seed)).collect();
    assert_eq!(drafted(), [0.0, 0.0], "a request may do without");
    for seed in 0..4 {
        assert_eq!(ask(4, seed), plain[seed as usize]);
    }
    let [guessed, accepted] = drafted();
    assert!(guessed > 30.0 && accepted <= guessed && accepted > 20.0, "{accepted} of {guessed}");
    let ask = &ask;
    let together: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || ask(4, seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, plain);
}

/// Concurrent requests take turns, and none changes another.
#[test]
fn requests_beside_each_other_do_not_meet() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval", "--sessions", "3"]);
    let ask = |seed: u64| {
        let tier = ["flex", "default", "priority"][seed as usize % 3];
        let fields = json!({"seed": seed, "max_tokens": 30, "service_tier": tier, "prompt": vec![9; 1 + seed as usize * 7]});
        server.complete(fields).text()
    };
    let alone: Vec<String> = (0..10).map(ask).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..10).map(|seed| scope.spawn(move || ask(seed))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    assert_eq!(server.inside(), 0);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval", "--kv-capacity", "64"]);
    let fields = [
        ("model", json!("other"), 404),
        ("n", json!(0), 400),
        ("n", json!(129), 400),
        ("best_of", json!(3), 400),
        ("echo", json!("yes"), 400),
        ("min_tokens", json!(13), 400),
        ("ignore_eos", json!(1), 400),
        ("suffix", json!("x"), 400),
        ("presence_penalty", json!(2.1), 400),
        ("frequency_penalty", json!(-3), 400),
        ("response_format", json!({"type": "json"}), 400),
        ("tools", json!([{}]), 400),
        ("temperature", json!("warm"), 400),
        ("temperature", json!(-0.1), 400),
        ("top_p", json!(1.01), 400),
        ("top_k", json!(-1), 400),
        ("min_p", json!(2), 400),
        ("repetition_penalty", json!(0), 400),
        ("logit_bias", json!({"5": 101}), 400),
        ("logit_bias", json!({"512": 1}), 400),
        ("logit_bias", json!({"x": 1}), 400),
        ("logprobs", json!(21), 400),
        ("seed", json!(0.5), 400),
        ("stop", json!(["a", "b", "c", "d", "e"]), 400),
        ("stop", json!(""), 400),
        ("stop_token_ids", json!([512]), 400),
        ("max_tokens", json!(-1), 400),
        ("stream", json!("yes"), 400),
        ("stream_options", json!({"include_obfuscation": true}), 400),
        ("service_tier", json!("gold"), 400),
        ("prompt", json!([[5], []]), 400),
        ("prompt", json!([[5], "a", {}]), 400),
        ("prompt", json!(vec!["a"; 129]), 400),
        ("prompt", json!([512]), 400),
        ("prompt", json!([]), 400),
        ("prompt", json!(vec![5; 65]), 400),
        ("max_completion_tokens", json!(5), 400),
        ("tool_choise", json!("auto"), 400),
    ];
    for (name, value, status) in fields {
        server.complete(json!({name: value})).refuses(status, Some(name));
    }
    let neutral = json!({"n": 1, "echo": false, "presence_penalty": 0, "user": "me", "stop": null, "suffix": null, "max_tokens": 1});
    assert_eq!(server.complete(neutral).status, 200);
    // The last sampled token needs no position of its own.
    assert_eq!(server.complete(json!({"prompt": vec![5; 60], "max_tokens": 5})).status, 200);
    let message = server
        .complete(json!({"prompt": vec![5; 60], "max_tokens": 6}))
        .refuses(400, Some("max_tokens"));
    assert!(
        message.contains("60 tokens and 6 new ones do not fit the key/value cache of 64"),
        "{message}"
    );
    let chat = |messages: Value| {
        server.post("/v1/chat/completions", &json!({"model": MODEL, "messages": messages}))
    };
    chat(json!([])).refuses(400, Some("messages"));
    chat(json!([{"content": "x"}])).refuses(400, Some("messages[0].role"));
    let image = json!([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}]);
    chat(image).refuses(400, Some("messages[1].content"));
    chat(json!([{"role": "user", "content": "x", "tool_calls": []}]))
        .refuses(400, Some("messages[0].tool_calls"));
}

#[test]
fn what_is_misspelt_gets_a_tip_and_a_tier_is_answered() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval", "--kv-capacity", "64"]);
    let chat = |messages: Value| {
        server.post("/v1/chat/completions", &json!({"model": MODEL, "messages": messages}))
    };
    let typo =
        chat(json!([{"role": "usr", "content": "x"}])).refuses(400, Some("messages[0].role"));
    assert!(typo.ends_with("did you mean \"user\"?"), "{typo}");
    let typo = server.complete(json!({"tempratur": 1})).refuses(400, Some("tempratur"));
    assert!(typo.ends_with("did you mean `temperature`?"), "{typo}");
    let tiered = server.complete(json!({"max_tokens": 1, "service_tier": "flex"})).json();
    assert_eq!(tiered["service_tier"], "flex");
}

#[test]
fn requests_that_are_no_requests() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let body = request(json!({})).to_string();
    server.ask("POST /v1/completions HTTP/1.0", &body).refuses(415, None);
    server
        .ask("POST /v1/completions HTTP/1.0\r\ncontent-type: text/plain", &body)
        .refuses(415, None);
    let kind = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json; charset=utf-8";
    assert_eq!(server.ask(kind, &body).status, 200);
    server.ask(&head("/v1/completions"), "{").refuses(400, None);
    server.ask(&head("/v1/completions"), "[]").refuses(400, Some("body"));
    server.ask(&head("/v1/completions"), &"[".repeat(100_000)).refuses(400, None);
    server.ask(&head("/v1/completions"), &" ".repeat((1 << 20) + 1)).refuses(413, None);
    assert!(server.get("/v1/engines").refuses(404, None).contains("/v1/completions"));
    let other = server.get("/v1/completions");
    assert!(other.refuses(405, None).ends_with("not take GET but POST"), "{}", other.body);
    assert!(other.head.to_lowercase().contains("\r\nallow: post"), "{}", other.head);
    let preflight = server.ask("OPTIONS /v1/completions HTTP/1.0", "").refuses(405, None);
    assert!(preflight.contains("--cors lets pages of other sites use it"), "{preflight}");
    server.get("/v1/models/other").refuses(404, Some("model"));
    assert_eq!(server.get(&format!("/v1/models/{MODEL}")).json()["id"], MODEL);
    assert_eq!(server.inside(), 0);
}

/// A long answer in a server with one place: other requests are refused with 429, and a disconnecting client frees the place.
#[test]
fn a_full_queue_and_a_client_that_goes() {
    let arguments =
        ["--model", GOLDEN, "--device", "cpu", "--queue", "1", "--metrics", "127.0.0.1:0"];
    let mut server = Server::start(&arguments);
    let long =
        request(json!({"max_tokens": 2000, "stream": true, "logit_bias": {"1": -100, "2": -100}}));
    let stream = server.send(&head("/v1/completions"), &long.to_string());
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    let chunk = lines.find_map(|line| line.strip_prefix("data: ").map(str::to_owned)).unwrap();
    let chunk: Value = serde_json::from_str(&chunk).unwrap();
    assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
    let told = server.complete(json!({}));
    assert!(told.refuses(429, None).contains("its limit"), "{}", told.body);
    assert!(told.head.contains("\r\nretry-after: 1"), "{}", told.head);
    drop(lines);
    wait_for("the request goes on for nobody", || server.cancelled() == 1);
    // A client that waits for its whole answer can disconnect, too.
    let whole = request(json!({"max_tokens": 2000, "logit_bias": {"1": -100, "2": -100}}));
    let before = server.positions();
    let stream = server.send(&head("/v1/completions"), &whole.to_string());
    // A client that disconnects earlier leaves no sequence to count.
    wait_for("the request is decoded", || server.positions() > before);
    drop(stream);
    wait_for("the request goes on for nobody", || server.cancelled() == 2);
    assert_eq!(server.complete(json!({"max_tokens": 2})).status, 200);
    server.interrupt();
    assert_eq!(server.end(), 0);
}

/// Ctrl-C or SIGTERM: current requests are finished, or aborted at the second signal; new requests get 503.
#[test]
fn the_server_ends_when_it_is_told() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
        let body = request(
            json!({"max_tokens": 60, "stream": true, "logit_bias": {"1": -100, "2": -100}}),
        );
        let stream = server.send(&head("/v1/completions"), &body.to_string());
        let mut lines = BufReader::new(stream).lines();
        lines.next().unwrap().unwrap();
        server.signal(signal);
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        assert!(rest.iter().any(|line| line.contains("\"length\"")), "{rest:?}");
        assert!(rest.iter().any(|line| line == "data: [DONE]"), "{rest:?}");
        assert_eq!(server.end(), 0, "{signal:?}");
    }
    let mut server = Server::start(&["--model", GOLDEN, "--device", "cpu"]);
    let body =
        request(json!({"max_tokens": 2000, "stream": true, "logit_bias": {"1": -100, "2": -100}}));
    let stream = server.send(&head("/v1/completions"), &body.to_string());
    let mut lines = BufReader::new(stream).lines();
    lines.next().unwrap().unwrap();
    server.interrupt();
    wait_for("the first is noticed", || server.get("/ready").status == 503);
    let told = server.complete(json!({}));
    assert!(told.refuses(503, None).contains("shutting down"), "{}", told.body);
    assert!(told.head.contains("\r\nretry-after: 1"), "{}", told.head);
    server.interrupt();
    assert_eq!(server.end(), 0);
    let rest: Vec<String> = lines.map_while(Result::ok).collect();
    assert!(!rest.iter().any(|line| line == "data: [DONE]"), "it was broken off");
}

#[test]
fn addresses_and_places_are_checked() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    amk(&["serve", "--model", "toy", "--device", "eval", "--addr", &address])
        .fails(2, &["cannot listen on", &address, "--addr"]);
    amk(&["serve", "--model", "toy", "--device", "eval", "--sessions", "65"])
        .fails(2, &["--sessions 65", "1 to 64"]);
    amk(&["serve", "--model", "toy", "--device", "eval", "--kv-pool", "4096"])
        .fails(2, &["--kv-pool", "--device eval has none"]);
    let serve = ["serve", "--model", "toy", "--device", "eval"];
    for (wrong, wanted) in [
        (["--cors", "chat.example"], "SCHEME://HOST[:PORT]"),
        (["--cors", "https://chat.example/"], "is no origin"),
        (["--api-key", " "], "the API key is empty"),
    ] {
        amk(&[&serve[..], &wrong].concat()).fails(2, &[wanted]);
    }
    amk(&[&serve[..], &["--served-model-name", ""]].concat()).fails(2, &[]);
    amk(&["serve", "--model", "toy", "--addr", "example.com"]).fails(2, &[]);
}

/// Hostile clients and model folders.
#[path = "serve_hostile_tests.rs"]
mod hostile;

/// Several GPUs.
#[path = "serve_gpus_tests.rs"]
mod gpus;

/// Grammars and tools.
#[path = "serve_tools_tests.rs"]
mod tools;

/// Servers that tune themselves.
#[path = "serve_tune_tests.rs"]
mod tune;

/// Prompts that begin alike.
#[path = "serve_otlp_tests.rs"]
mod otlp;

#[path = "serve_prefix_tests.rs"]
mod prefix;

/// Tenants.
#[path = "serve_tenants_tests.rs"]
mod tenants;

/// A long mixture of requests.
#[path = "serve_soak_tests.rs"]
mod soak;
