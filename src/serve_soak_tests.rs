//! A server under a mixture of requests, cancels, slow readers, floods and malformed bodies: every request is answered
//! or refused, and memory, threads and files stay.
//!
//! `AMK_SOAK_REQUESTS=10000 cargo test -p amk --test cli soak -- --nocapture` is the long form.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use super::hostile::held;
use super::*;

/// Clients at once: more than the server takes, so that some are refused.
const CLIENTS: u64 = 24;
const QUEUE: &str = "12";
/// What a server may keep beyond its first requests, in KiB: allocators keep some.
const GROWTH_KIB: u64 = 24 << 10;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Answered,
    Refused(u16),
    /// The client left, or never sent a whole request.
    Left,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect(name))
}

/// A body that a client may send: of each five, one is malformed.
fn body(random: &mut Xoshiro256PlusPlus, stream: bool) -> (String, bool) {
    let prompt: Vec<u32> = vec![random.random_range(0..4); random.random_range(1..200)];
    let fine = json!({
        "model": "toy", "prompt": prompt, "max_tokens": random.random_range(1..12), "stream": stream,
        "seed": 1, "n": random.random_range(1..3),
    });
    let bad = match random.random_range(0..30) {
        0 => "{".to_owned(),
        1 => json!({"model": "toy", "prompt": [1], "max_tokens": -1}).to_string(),
        2 => json!({"model": "another", "prompt": [1]}).to_string(),
        3 => json!({"model": "toy", "prompt": [70_000]}).to_string(),
        4 => json!({"model": "toy", "prompt": [1], "max_tokens": 5_000}).to_string(),
        5 => "[".repeat(20_000),
        _ => return (fine.to_string(), true),
    };
    (bad, false)
}

/// Reads to the end; the status and the text after the head.
fn read(mut stream: TcpStream, slow: bool) -> (u16, String) {
    let (mut bytes, mut piece) = (Vec::new(), [0; 256]);
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => bytes.extend_from_slice(&piece[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error} after {} bytes", bytes.len()),
        }
        if slow {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status: {text:?}"));
    (status, text.split_once("\r\n\r\n").unwrap_or_default().1.to_owned())
}

/// One request of a random kind.
fn one(server: &Server, random: &mut Xoshiro256PlusPlus) -> End {
    let kind = random.random_range(0..20);
    if kind == 0 {
        // A head without its body, and what is no HTTP at all.
        drop(server.send(&format!("{}\r\ncontent-length: 900", head("/v1/completions")), "{\"mo"));
        let _ = TcpStream::connect(&server.address).unwrap().write_all(b"\x16\x03\x01\0\xff\n\n");
        return End::Left;
    }
    let stream = kind < 10;
    let (body, fine) = body(random, stream);
    let mut sent = server.send(&head("/v1/completions"), &body);
    if kind == 1 || kind == 2 {
        // Before the answer, or after its first bytes.
        if kind == 2 {
            let _ = sent.read(&mut [0; 40]);
        }
        return End::Left;
    }
    let (status, text) = read(sent, kind == 3);
    match status {
        200 if stream => assert!(fine && text.ends_with("data: [DONE]\n\n"), "{text}"),
        200 => {
            let document: Value = serde_json::from_str(&text).unwrap();
            assert!(fine && document["usage"]["completion_tokens"].as_u64() > Some(0), "{text}");
        }
        400 | 404 => assert!(!fine && text.contains("\"error\""), "{status}: {body}: {text}"),
        429 | 503 => assert!(text.contains("\"error\""), "{status}: {text}"),
        _ => panic!("{status} for {body}: {text}"),
    }
    if status == 429 && kind % 4 > 0 {
        // Most come back later, as they are told; the others flood.
        std::thread::sleep(Duration::from_millis(random.random_range(20..150)));
    }
    if status == 200 { End::Answered } else { End::Refused(status) }
}

/// Sends requests from all clients; returns what became of them.
fn load(server: &Server, requests: u64, seed: u64) -> BTreeMap<End, u64> {
    let (sent, ends) = (AtomicU64::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (sent, ends) = (&sent, &ends);
            scope.spawn(move || {
                let mut random = Xoshiro256PlusPlus::seed_from_u64(seed * CLIENTS + client);
                while sent.fetch_add(1, Ordering::Relaxed) < requests {
                    let end = one(server, &mut random);
                    *ends.lock().unwrap().entry(end).or_insert(0) += 1;
                }
            });
        }
    });
    ends.into_inner().unwrap()
}

fn files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.child.id())).unwrap().count()
}

#[test]
fn a_soak_of_the_server_loses_no_request_and_holds_nothing() {
    let requests = number("AMK_SOAK_REQUESTS", 500);
    let mut server = Server::start(&[
        "--model",
        "toy",
        "--device",
        "cpu",
        "--kv-capacity",
        "256",
        "--queue",
        QUEUE,
    ]);
    let settled = |server: &Server| wait_for("requests stay", || server.inside() == 0);
    // The cache of shared pages fills, and allocators grow.
    let warm_up = load(&server, requests / 5, 1);
    settled(&server);
    let (memory, files_before) = (held(&server), files(&server));
    let began = Instant::now();
    let ends = load(&server, requests - requests / 5, 2);
    settled(&server);
    let after = held(&server);
    eprintln!("{warm_up:?}, then in {:.1?}: {ends:?}", began.elapsed());
    eprintln!(
        "KiB and threads: {memory:?}, then {after:?}; files {files_before}, then {}",
        files(&server)
    );
    assert_eq!(warm_up.values().chain(ends.values()).sum::<u64>(), requests);
    for kind in [End::Answered, End::Left, End::Refused(400), End::Refused(429)] {
        assert!(ends.contains_key(&kind), "{kind:?} did not happen: {ends:?}");
    }
    assert!(after.0 <= memory.0 + GROWTH_KIB, "{} KiB were {}", after.0, memory.0);
    // Blocking threads come and go with the load.
    assert!(after.1 <= memory.1 + CLIENTS, "{} threads were {}", after.1, memory.1);
    wait_for("files stay", || files(&server) <= files_before + 2);
    assert_eq!(server.post("/v1/completions", &json!({"model": "toy", "prompt": [1]})).status, 200);
    server.interrupt();
    assert_eq!(server.end(), 0);
}
