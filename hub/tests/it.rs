//! Downloads, from a stand-in for the Hub.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hub::{Hub, HubError, Limits, ModelId, Progress};

mod stand_in;

/// A golden folder whose weights are some hundred kilobytes.
fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden/llama3-rope-bf16")
}

fn id() -> ModelId {
    ModelId::parse("org/model").unwrap()
}

struct Case {
    server: stand_in::Hub,
    hub: Hub,
    _cache: tempfile::TempDir,
}

fn case() -> Case {
    let cache = tempfile::tempdir().unwrap();
    let server = stand_in::Hub::with(&golden());
    let hub = Hub {
        cache: cache.path().join("hub"),
        endpoint: server.endpoint.clone(),
        token: None,
        offline: false,
        certificates: None,
        limits: Limits {
            answer: Duration::from_secs(5),
            attempts: 1,
            pause: Duration::from_millis(1),
            lock: Duration::from_secs(5),
        },
    };
    Case { server, hub, _cache: cache }
}

impl Case {
    fn download(&self) -> Result<PathBuf, HubError> {
        self.hub.download(&id(), &mut |_| {}).map(|snapshot| snapshot.dir)
    }

    fn refusal(&self) -> String {
        self.download().unwrap_err().to_string()
    }

    fn blobs(&self) -> PathBuf {
        self.hub.cache.join("models--org--model/blobs")
    }

    fn weights(&self) -> u64 {
        self.server.state().files["model.safetensors"].bytes.len() as u64
    }
}

fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

#[test]
fn a_model_is_downloaded_once_and_found_then() {
    let case = case();
    assert_eq!(case.hub.find(&id()).unwrap(), None);
    let mut files = Vec::new();
    let mut tell = |progress| {
        if let Progress::File { name, .. } = progress {
            files.push(name);
        }
    };
    let dir = case.hub.download(&id(), &mut tell).unwrap().dir;
    assert_eq!(files.last().unwrap(), "model.safetensors", "the weights come last");
    assert!(!files.contains(&"golden.safetensors".to_owned()), "{files:?}");
    let model = model::import(&dir).unwrap();
    assert_eq!(model.graph.name, "model", "a snapshot is named like its model");
    let repo = case.hub.cache.join("models--org--model");
    let commit = std::fs::read_to_string(repo.join("refs/main")).unwrap();
    assert_eq!(dir, repo.join("snapshots").join(&commit));
    let link = std::fs::read_link(dir.join("config.json")).unwrap();
    assert!(link.starts_with("../../blobs"), "{}", link.display());
    let found = case.hub.find(&id()).unwrap().unwrap();
    assert!(found.whole && found.dir == dir);
    let by_commit = ModelId::parse(&format!("org/model@{commit}")).unwrap();
    assert_eq!(case.hub.find(&by_commit).unwrap().unwrap().dir, dir);
    // What is here already is not fetched again.
    let sent = case.server.state().sent;
    assert_eq!(case.download().unwrap(), dir);
    let list = case.server.state().sent - sent;
    assert!(list < 2048, "{list} bytes again");
}

#[test]
fn a_download_that_is_cut_goes_on_where_it_stopped() {
    let case = case();
    let bytes = case.weights();
    case.server.state().cuts = vec![bytes / 2];
    contains(&case.refusal(), &["cannot be reached", "hf download org/model", "--local-dir model"]);
    assert_eq!(case.hub.find(&id()).unwrap(), None);
    let before = case.server.state().sent;
    let dir = case.download().unwrap();
    let again = case.server.state().sent - before;
    assert!(again * 100 < bytes * 55, "{again} of {bytes} bytes were fetched again");
    assert_eq!(
        std::fs::read(dir.join("model.safetensors")).unwrap(),
        std::fs::read(golden().join("model.safetensors")).unwrap()
    );
}

#[test]
fn a_cut_is_repeated_without_being_asked_for() {
    let mut case = case();
    case.hub.limits.attempts = 2;
    let bytes = case.weights();
    // As long as bytes arrive, failures are not counted together.
    case.server.state().cuts = vec![bytes / 4, bytes / 4, bytes / 4];
    let mut again = 0;
    case.hub.download(&id(), &mut |p| again += u32::from(matches!(p, Progress::Again(_)))).unwrap();
    assert_eq!(again, 3);
    assert!(case.server.state().sent < bytes + bytes / 2);
}

#[test]
fn a_server_that_ignores_ranges_sends_all_of_it_again() {
    let case = case();
    let bytes = case.weights();
    case.server.state().whole_only = true;
    case.server.state().cuts = vec![bytes / 2];
    case.refusal();
    let dir = case.download().unwrap();
    model::import(&dir).unwrap();
}

#[test]
fn a_file_with_the_wrong_hash_is_refused_and_removed() {
    let case = case();
    let wrong = "0".repeat(64);
    case.server.state().files.get_mut("model.safetensors").unwrap().etag = wrong.clone();
    contains(&case.refusal(), &["model.safetensors", "SHA-256", &wrong, "removed"]);
    let blobs = std::fs::read_dir(case.blobs()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = blobs.filter(|name| name.to_str().unwrap().starts_with(&wrong)).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(case.hub.find(&id()).unwrap(), None);
}

#[test]
fn another_etag_begins_anew() {
    let case = case();
    let bytes = case.weights();
    case.server.state().cuts = vec![bytes / 2];
    case.refusal();
    {
        // The same length, other contents: half of the old file must not become part of it.
        let mut state = case.server.state();
        let file = state.files.get_mut("model.safetensors").unwrap();
        let last = file.bytes.len() - 1;
        file.bytes[last] ^= 1;
        file.etag = stand_in::sha256(&file.bytes);
        state.commit = "beef".repeat(10);
    }
    let before = case.server.state().sent;
    let dir = case.download().unwrap();
    assert!(case.server.state().sent - before >= bytes);
    let state = case.server.state();
    let fetched = std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(fetched == state.files["model.safetensors"].bytes);
}

#[test]
fn large_files_are_elsewhere_and_the_token_is_not_sent_there() {
    let mut case = case();
    case.hub.token = Some("hf_secret".into());
    case.server.state().token = Some("hf_secret".into());
    case.server.state().redirects = true;
    let dir = case.download().unwrap();
    model::import(&dir).unwrap();
    for (request, token) in &case.server.state().seen {
        assert_eq!(*token, !request.contains("/elsewhere/"), "{request}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    let case = case();
    case.server.state().token = Some("hf_secret".into());
    contains(&case.refusal(), &["org/model", "accept its terms", "settings/tokens", "HF_TOKEN"]);
    case.server.state().token = None;
    for (refusal, words) in [
        ((401, "RepoNotFound"), ["no model org/model", "HF_TOKEN"]),
        ((404, "RepoNotFound"), ["there is no folder org/model here", "private"]),
        ((404, "RevisionNotFound"), ["has no revision main", "org/model"]),
        ((403, ""), ["accept its terms", "https://huggingface.co/org/model"]),
        ((503, ""), ["the Hub answers 503", "hf download org/model"]),
        ((418, ""), ["answers 418", "/api/models/org/model"]),
    ] {
        case.server.state().refusal = Some(refusal);
        contains(&case.refusal(), &words);
    }
}

#[test]
fn certificates_to_trust_must_be_there() {
    let mut case = case();
    let file = case.hub.cache.with_extension("pem");
    case.hub.certificates = Some(file.clone());
    let name = file.to_str().unwrap();
    contains(&case.refusal(), &["SSL_CERT_FILE", name, "No such file"]);
    for text in
        ["", "no certificate", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"]
    {
        std::fs::write(&file, text).unwrap();
        contains(&case.refusal(), &["SSL_CERT_FILE", name, "it has no certificate"]);
    }
    assert_eq!(case.server.state().seen, [], "nothing was asked");
}

#[test]
fn without_a_network_only_the_cache_is_read() {
    let mut case = case();
    case.hub.offline = true;
    contains(&case.refusal(), &["HF_HUB_OFFLINE", "hf download org/model", "models--org--model"]);
    assert!(case.server.state().seen.is_empty());
    case.hub.offline = false;
    let dir = case.download().unwrap();
    case.hub.offline = true;
    assert_eq!(case.hub.find(&id()).unwrap().unwrap().dir, dir);
    // Nobody listens there.
    case.hub.offline = false;
    case.hub.endpoint = "http://127.0.0.1:1".into();
    case.hub.cache.push("empty");
    contains(&case.refusal(), &["http://127.0.0.1:1 cannot be reached", "hf download org/model"]);
}

#[test]
fn an_unsupported_model_is_refused_before_its_weights() {
    let case = case();
    let config = br#"{"model_type": "mamba2"}"#.to_vec();
    case.server.state().files.get_mut("config.json").unwrap().bytes = config.clone();
    case.server.state().files.get_mut("config.json").unwrap().etag = stand_in::sha256(&config);
    contains(&case.refusal(), &["mamba2", "weights were not downloaded"]);
    let asked = |name: &str| case.server.state().seen.iter().any(|(path, _)| path.contains(name));
    assert!(!asked("model.safetensors"));
    case.server.state().files.remove("model.safetensors");
    contains(&case.refusal(), &["safetensors"]);
}

#[test]
fn shards_with_hostile_names_are_refused() {
    let case = case();
    let index = br#"{"weight_map": {"a": "../../../evil.safetensors"}}"#.to_vec();
    let etag = stand_in::sha256(&index);
    let mut state = case.server.state();
    state.files.remove("model.safetensors");
    let stored = stand_in::Stored { bytes: index, etag };
    state.files.insert("model.safetensors.index.json".into(), stored);
    drop(state);
    contains(&case.refusal(), &["plain name"]);
}

#[test]
fn two_at_once_fetch_it_once() {
    let case = case();
    let one = || case.download().unwrap();
    std::thread::scope(|scope| {
        let both = [scope.spawn(one), scope.spawn(one)];
        let [a, b] = both.map(|thread| thread.join().unwrap());
        assert_eq!(a, b);
    });
    let fetched = case.server.state();
    let gets = |(request, _): &&(String, bool)| {
        request.starts_with("GET") && request.ends_with("/model.safetensors")
    };
    assert_eq!(fetched.seen.iter().filter(gets).count(), 1);
}
