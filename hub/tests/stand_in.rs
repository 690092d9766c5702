//! A stand-in for the Hugging Face Hub: it answers with the status lines and headers of the real one, counts the bytes
//! that it sends, and cuts answers short when told to.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use sha2::{Digest, Sha256};

/// A file of the model.
#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) bytes: Vec<u8>,
    pub(crate) etag: String,
}

/// What the Hub has, and how it behaves.
#[derive(Clone, Default)]
pub(crate) struct State {
    pub(crate) commit: String,
    pub(crate) files: BTreeMap<String, Stored>,
    /// The answer to everything: a status and an `X-Error-Code`.
    pub(crate) refusal: Option<(u16, &'static str)>,
    /// The token without which everything is refused.
    pub(crate) token: Option<String>,
    /// The next answers with a body are cut after this many bytes, one each.
    pub(crate) cuts: Vec<u64>,
    /// Whether `Range` is ignored.
    pub(crate) whole_only: bool,
    /// Whether files are elsewhere: the Hub redirects to another address of this server.
    pub(crate) redirects: bool,
    /// The address of the server.
    pub(crate) address: String,
    /// Bytes of bodies of files sent.
    pub(crate) sent: u64,
    /// `METHOD PATH` of each request, and whether it had a token.
    pub(crate) seen: Vec<(String, bool)>,
}

/// A running stand-in. It ends with the test's process.
pub(crate) struct Hub {
    pub(crate) endpoint: String,
    state: Arc<Mutex<State>>,
}

/// The hash of a file, which is the Hub's etag of a large one.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Hub {
    /// Serves the files of a folder as those of `org/model`.
    pub(crate) fn with(folder: &Path) -> Self {
        let mut state = State { commit: "c0ffee".repeat(6) + "0001", ..State::default() };
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let bytes = std::fs::read(entry.path()).unwrap();
            let etag = sha256(&bytes);
            state.files.insert(entry.file_name().into_string().unwrap(), Stored { bytes, etag });
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        state.address.clone_from(&endpoint);
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { endpoint, state }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// One request per connection.
fn serve(mut stream: TcpStream, shared: &Mutex<State>) {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let (mut from, mut token) = (None, None);
    for line in lines.take_while(|line| !line.is_empty()) {
        let line = line.to_lowercase();
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse::<usize>().ok();
        }
        token = line.strip_prefix("authorization: bearer ").map(str::to_owned).or(token);
    }
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
    let (head, body) = answer(&mut shared.lock().unwrap(), (method, path), from, token);
    // The client may be gone.
    let _ = stream.write_all(head.as_bytes());
    for block in body.chunks(1 << 14) {
        if stream.write_all(block).is_err() {
            return;
        }
        shared.lock().unwrap().sent += block.len() as u64;
    }
}

fn answer(
    state: &mut State,
    (method, path): (&str, &str),
    from: Option<usize>,
    token: Option<String>,
) -> (String, Vec<u8>) {
    state.seen.push((format!("{method} {path}"), token.is_some()));
    let empty = |status: u16, headers: &str| {
        let head = format!("HTTP/1.1 {status} x\r\nConnection: close\r\n{headers}");
        (head + "Content-Length: 0\r\n\r\n", Vec::new())
    };
    let elsewhere = path.strip_prefix("/elsewhere");
    let refusal = match &state.token {
        Some(wanted) if elsewhere.is_none() && token.as_ref() != Some(wanted) => {
            Some((401, "GatedRepo"))
        }
        _ => state.refusal,
    };
    if let Some((status, code)) = refusal {
        return empty(status, &format!("X-Error-Code: {code}\r\n"));
    }
    if path.starts_with("/api/models/org/model/revision/") {
        let names: Vec<_> =
            state.files.keys().map(|name| format!("{{\"rfilename\":{name:?}}}")).collect();
        let body = format!("{{\"sha\":\"{}\",\"siblings\":[{}]}}", state.commit, names.join(","));
        let length = body.len();
        let head =
            format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        return (head, body.into_bytes());
    }
    let prefix = format!("/org/model/resolve/{}/", state.commit);
    let name = elsewhere.unwrap_or(path).strip_prefix(&prefix).unwrap_or("");
    let Some(Stored { bytes, etag }) = state.files.get(name).cloned() else {
        return empty(404, "X-Error-Code: RepoNotFound\r\n");
    };
    let linked = format!("X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n", bytes.len());
    if state.redirects && elsewhere.is_none() {
        // A large file: what it is in this answer, its bytes at an absolute address.
        let host = &state.address;
        return empty(302, &format!("{linked}Location: {host}/elsewhere{path}\r\n"));
    }
    if method == "HEAD" {
        let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nETag: \"{etag}\"\r\n");
        return (head + &format!("Content-Length: {}\r\n\r\n", bytes.len()), Vec::new());
    }
    let from = from.filter(|_| !state.whole_only);
    let rest = &bytes[from.unwrap_or(0).min(bytes.len())..];
    let status = match from {
        Some(from) => {
            format!("206 x\r\nContent-Range: bytes {from}-{}/{}", bytes.len() - 1, bytes.len())
        }
        None => "200 OK".to_owned(),
    };
    let head =
        format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", rest.len());
    let most = if rest.len() > 1 << 17 && !state.cuts.is_empty() {
        state.cuts.remove(0) as usize
    } else {
        rest.len()
    };
    (head, rest[..most.min(rest.len())].to_vec())
}
