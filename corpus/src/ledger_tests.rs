use serde_json::json;

use super::*;

fn filled(rows: u32) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("runs/ledger.jsonl");
    let mut ledger = Ledger::create(&path, &json!({"model": "toy"})).unwrap();
    for trial in 0..rows {
        ledger.append(&json!({"trial": trial, "why": "a,\"hash\":\"b"})).unwrap();
    }
    (folder, path)
}

fn rewrite(path: &Path, edit: impl FnOnce(&mut Vec<String>)) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    edit(&mut lines);
    std::fs::write(path, lines.join("\n") + "\n").unwrap();
}

#[test]
fn what_was_appended_is_read() {
    let (_folder, path) = filled(3);
    let contents = read(&path).unwrap();
    assert_eq!(contents.header, json!({"model": "toy", "schema": LEDGER_SCHEMA}));
    assert_eq!(contents.records.len(), 3);
    assert_eq!(contents.records[2]["trial"], 2);
    assert!(!contents.torn);
}

#[test]
fn a_second_search_is_refused() {
    let (_folder, path) = filled(1);
    let error = Ledger::create(&path, &json!({})).unwrap_err();
    assert!(matches!(error, CorpusError::Exists { .. }), "{error}");
    assert!(error.to_string().contains("--resume"), "{error}");
}

#[test]
fn two_writers_are_refused() {
    let (_folder, path) = filled(1);
    let (_ledger, _) = Ledger::resume(&path).unwrap();
    let error = Ledger::resume(&path).unwrap_err();
    assert!(matches!(error, CorpusError::Locked { .. }), "{error}");
}

#[test]
fn a_torn_row_is_ignored_and_cut_off_wherever_it_tore() {
    let (_folder, path) = filled(3);
    let whole = std::fs::read(&path).unwrap();
    let last = whole[..whole.len() - 1].iter().rposition(|&b| b == b'\n').unwrap() + 1;
    for end in last + 1..whole.len() {
        std::fs::write(&path, &whole[..end]).unwrap();
        assert!(read(&path).unwrap().torn);
        let (mut ledger, contents) = Ledger::resume(&path).unwrap();
        assert_eq!(contents.records.len(), 2, "torn at {end}");
        ledger.append(&json!({"trial": 2})).unwrap();
        drop(ledger);
        let again = read(&path).unwrap();
        assert_eq!((again.records.len(), again.torn), (3, false));
    }
}

#[test]
fn a_torn_header_may_be_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    std::fs::write(&path, "{\"seq\":0,\"prev\":\"12").unwrap();
    Ledger::create(&path, &json!({})).unwrap();
    assert_eq!(read(&path).unwrap().records.len(), 0);
}

#[test]
fn every_edit_is_found() {
    type Edit = fn(&mut Vec<String>);
    let edits: [(&str, Edit); 8] = [
        ("value", |rows| rows[2] = rows[2].replace("\"trial\":1", "\"trial\":7")),
        ("last value", |rows| rows[4] = rows[4].replace("\"trial\":3", "\"trial\":7")),
        ("hash", |rows| rows[2] = rows[2].replace("\"prev\":\"", "\"prev\":\"0")),
        ("removed", |rows| drop(rows.remove(2))),
        ("reordered", |rows| rows.swap(2, 3)),
        ("repeated", |rows| rows.insert(3, rows[2].clone())),
        ("header", |rows| rows[0] = rows[0].replace("toy", "joy")),
        ("garbage", |rows| rows[3] = "not a row".into()),
    ];
    for (name, edit) in edits {
        let (_folder, path) = filled(4);
        rewrite(&path, edit);
        let error = read(&path).unwrap_err();
        assert!(error.is_integrity(), "{name}: {error}");
        assert!(error.to_string().contains("line"), "{name}: {error}");
        assert!(Ledger::resume(&path).unwrap_err().is_integrity(), "{name}");
    }
}

#[test]
fn another_file_is_not_a_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.jsonl");
    for text in ["", "hello\n", "{\"a\":1}\n"] {
        std::fs::write(&path, text).unwrap();
        let error = read(&path).unwrap_err();
        assert!(matches!(error, CorpusError::Schema { .. }), "{text:?}: {error}");
    }
    let missing = read(&folder.path().join("none.jsonl")).unwrap_err().to_string();
    assert!(missing.contains("none.jsonl") && missing.contains("check the path"), "{missing}");
}

#[test]
fn an_older_version_says_so() {
    let (_folder, path) = filled(1);
    rewrite(&path, |rows| rows[0] = rows[0].replace(LEDGER_SCHEMA, "amk.ledger.v0"));
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("amk.ledger.v0"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_one_line_with_a_remedy() {
    let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut ledger = Ledger { file, path: "/dev/full".into(), seq: 0, prev: genesis(), bytes: 0 };
    let error = ledger.append(&json!({})).unwrap_err().to_string();
    assert!(error.contains("/dev/full") && error.contains("free some space"), "{error}");
    assert!(!error.contains('\n'));
}
