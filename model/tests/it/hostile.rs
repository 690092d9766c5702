//! Folders that try to make the importer block or run out of memory.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use model::{Tokenizer, import};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use crate::folder::Copy;

const NAME: &str = "llama3-rope-bf16";

fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
}

/// The error of importing a folder and its tokenizer; panics if that does not end.
fn refused(copy: &Copy) -> String {
    let (said, answer) = channel();
    let dir = copy.dir().to_owned();
    std::thread::spawn(move || {
        let loaded = import(&dir).and_then(|model| model.tokenizer().map(|_| ()));
        said.send(loaded.map_err(|error| error.to_string()))
    });
    let loaded = answer.recv_timeout(Duration::from_secs(60)).expect("an answer");
    loaded.expect_err("a refusal")
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let files = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ];
    for file in files {
        let makers: [fn(&Path); 3] = [
            pipe,
            |path| std::fs::create_dir(path).expect("a folder"),
            |path| std::os::unix::fs::symlink("/dev/zero", path).expect("a link"),
        ];
        for make in makers {
            let copy = Copy::of(NAME);
            let path = copy.dir().join(file);
            let _ = std::fs::remove_file(&path);
            make(&path);
            let said = refused(&copy);
            assert!(said.contains(file) && said.contains("not a regular file"), "{file}: {said}");
        }
    }
}

#[test]
fn a_link_to_a_regular_file_is_followed() {
    let (copy, other) = (Copy::of(NAME), Copy::of(NAME));
    let path = copy.dir().join("tokenizer.json");
    std::fs::remove_file(&path).expect("a file");
    std::os::unix::fs::symlink(other.dir().join("tokenizer.json"), &path).expect("a link");
    Tokenizer::load(copy.dir(), 512).expect("a tokenizer");
}

/// The golden tokenizer with one part replaced.
fn with(part: &str, value: Value) -> Copy {
    let copy = Copy::of(NAME);
    let mut tokenizer: Value = serde_json::from_slice(&copy.read("tokenizer.json")).expect("JSON");
    tokenizer[part] = value;
    copy.write("tokenizer.json", tokenizer.to_string());
    copy
}

fn replace(pattern: Value, letters: usize) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": "l".repeat(letters)})
}

#[test]
fn a_tokenizer_that_multiplies_texts_is_refused() {
    for steps in 2..5 {
        let list = vec![replace(json!({"String": "l"}), 1000); steps];
        let copy = with("normalizer", json!({"type": "Sequence", "normalizers": list}));
        let said = refused(&copy);
        assert!(said.contains("tokenizer.json: its normalizer"), "{said}");
    }
    for steps in 1..4 {
        let list = vec![replace(json!({"Regex": "."}), 1000); steps];
        let copy = with("decoder", json!({"type": "Sequence", "decoders": list}));
        let said = refused(&copy);
        assert!(said.contains("tokenizer.json: its decoder can write"), "{said}");
    }
    let token = json!([{"id": 3, "content": "l".repeat(30_000), "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": true, "special": false}]);
    let copy = with("added_tokens", token);
    let mut tokenizer: Value = serde_json::from_slice(&copy.read("tokenizer.json")).expect("JSON");
    tokenizer["normalizer"] = replace(json!({"String": "l"}), 400);
    copy.write("tokenizer.json", tokenizer.to_string());
    assert!(refused(&copy).contains("added tokens"));
}

#[test]
fn a_text_that_would_grow_too_long_is_refused() {
    let copy = with("normalizer", replace(json!({"String": "l"}), 400));
    let tokenizer = Tokenizer::load(copy.dir(), 512).expect("a tokenizer");
    assert!(tokenizer.encode("hello", false).expect("ids").len() > 20);
    let said = tokenizer.encode(&"l".repeat(30_000), false).expect_err("a refusal").to_string();
    assert!(said.contains("could grow to 800 times"), "{said}");
}
