//! Hostile clients and hostile model folders.

use super::*;

/// A copy of the golden folder with another chat template.
pub(super) fn folder(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(GOLDEN).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

/// Memory in KiB and threads of a server.
pub(super) fn held(server: &Server) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    (number("VmRSS:"), number("Threads:"))
}

#[test]
fn refused_templates_leave_no_memory_and_no_threads() {
    let doubled = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
    let folder = folder(&format!("{{% if messages[0].content == 'go' %}}{doubled}{{% endif %}}hi"));
    let model = folder.path().to_str().unwrap();
    let server = Server::start(&["--model", model, "--device", "eval"]);
    let name = server.document["model"].clone();
    let say = |content: &str| {
        let message = json!([{"role": "user", "content": content}]);
        let body = json!({"model": name, "messages": message, "max_tokens": 1});
        server.post("/v1/chat/completions", &body)
    };
    let refused = || {
        let message = say("go").refuses(400, Some("messages"));
        assert!(message.contains("more than 134217728 bytes of memory"), "{message}");
    };
    refused();
    assert_eq!(say("hello").status, 200);
    let before = held(&server);
    for _ in 0..50 {
        refused();
    }
    let after = held(&server);
    assert!(after.0 < before.0 + (8 << 10) && after.1 <= before.1 + 1, "{before:?} {after:?}");
    assert_eq!(say("hello").status, 200);
}

#[test]
fn variables_of_a_template_are_nested_up_to_a_limit() {
    let folder = folder("{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}");
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "eval"]);
    let nested = format!("{}{}{}", "[".repeat(110), ["0"; 1000].join(","), "]".repeat(110));
    let tools: Value = serde_json::from_str(&nested).unwrap();
    let body = json!({"model": server.document["model"], "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"tools": tools}});
    let message = server.post("/v1/chat/completions", &body).refuses(400, Some("messages"));
    assert!(message.contains("nested deeper than 32"), "{message}");
}

#[test]
fn half_heads_leave_the_server_answering() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 128; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_amk")]);
    let server = Server::start_by(command, &["--model", GOLDEN, "--device", "eval"]);
    let half = |_| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /v1/models HTTP/1.1\r\nhost: loc").unwrap();
        stream
    };
    let mut halves: Vec<TcpStream> = (0..150).map(half).collect();
    assert_eq!(server.get("/v1/models").json()["data"][0]["id"], MODEL);
    // The first ones were closed to make room.
    let end = halves[0].read(&mut [0; 16]);
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    drop(halves);
    assert_eq!(server.complete(json!({})).status, 200);
}

#[test]
fn names_and_pages_of_other_sites_are_refused() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let code = |head: &str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /v1/models HTTP/1.0\r\n{head}\r\n\r\n").unwrap();
        let answer = Server::answered(stream);
        if answer.status == 200 {
            return "fine".to_owned();
        }
        answer.refuses(403, None);
        answer.json()["error"]["code"].as_str().unwrap().to_owned()
    };
    assert_eq!(code("host: evil.example"), "foreign_host");
    assert_eq!(code("host: evil.example\r\norigin: http://evil.example"), "foreign_host");
    assert_eq!(code("host: localhost\r\norigin: http://evil.example"), "foreign_origin");
    assert_eq!(code("host: localhost\r\norigin: null"), "foreign_origin");
    assert_eq!(code("host: LOCALHOST:80\r\norigin: http://[::1]:3000"), "fine");
}

#[test]
fn a_name_that_is_no_text_is_refused_in_the_same_shape() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let message = server.get("/v1/models/%ff%fe").refuses(400, Some("model"));
    assert!(message.contains("UTF-8"), "{message}");
}

/// A pool of a hundred thousand threads never starts working.
#[test]
fn a_pool_of_threads_has_a_limit() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.env("RAYON_NUM_THREADS", "100000");
    let server = Server::start_by(command, &["--model", GOLDEN, "--device", "eval"]);
    assert_eq!(server.complete(json!({})).status, 200);
    assert!(held(&server).1 < 1000);
}

/// Clients send the body and then read: a server that answers early and closes resets the connection, and the answer is lost.
#[test]
fn an_answer_that_does_not_need_the_body_still_arrives() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let json = "content-type: application/json";
    let cases = [
        (format!("POST /v1/nowhere HTTP/1.1\r\nhost: localhost\r\n{json}"), 404),
        (format!("POST /v1/models HTTP/1.1\r\nhost: localhost\r\n{json}"), 405),
        ("POST /v1/completions HTTP/1.1\r\nhost: localhost".to_owned(), 415),
        (format!("POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\n{json}"), 403),
    ];
    let body = [b' '; 1 << 16];
    for (head, status) in cases {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n", body.len()).unwrap();
        // By the time the body arrives, the server has decided on its answer.
        std::thread::sleep(Duration::from_millis(50));
        for piece in body.chunks(1 << 12) {
            stream.write_all(piece).unwrap_or_else(|e| panic!("{head}: {e}"));
        }
        // The connection accepts another request.
        write!(stream, "GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n").unwrap();
        let answer = Server::answered(stream);
        assert_eq!(answer.status, status, "{head}");
        assert!(
            answer.body.contains("HTTP/1.0 200") || answer.body.contains("HTTP/1.1 200"),
            "{}",
            answer.body
        );
    }
}
