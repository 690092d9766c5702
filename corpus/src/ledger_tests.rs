use std::fs::OpenOptions;

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

/// The text of the head after this many rows.
fn head_after(path: &Path, rows: usize) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let row: Value = serde_json::from_str(text.lines().nth(rows - 1).unwrap()).unwrap();
    format!("{{\"rows\":{rows:20},\"hash\":{}}}\n", row["hash"])
}

#[test]
fn rows_cut_off_the_end_are_missed() {
    for left in 1..5 {
        let (_folder, path) = filled(4);
        rewrite(&path, |rows| rows.truncate(left));
        let error = read(&path).unwrap_err();
        assert!(error.is_integrity(), "{left} left: {error}");
        let said = error.to_string();
        assert!(said.contains(&format!("line {}", left + 1)), "{said}");
        assert!(said.contains("cut off") && said.contains("ledger.head counts 5"), "{said}");
        assert!(Ledger::resume(&path).unwrap_err().is_integrity());
    }
    // Half a row does not count as torn if the head names it.
    let (_folder, path) = filled(4);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 9]).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("cut off"));
}

/// What a store gives back is the ledger, byte for byte; rows that do not follow are refused and nothing is written.
#[test]
fn a_ledger_is_restored_from_its_rows() {
    let (folder, path) = filled(4);
    let mut links: Vec<Link> = read(&path).unwrap().links().collect();
    let again = folder.path().join("again/ledger.jsonl");
    Ledger::restore(&again, &links).unwrap();
    for (one, other) in [(&path, &again), (&tip::path_of(&path), &tip::path_of(&again))] {
        assert_eq!(std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
    }
    links.remove(2);
    let gap = folder.path().join("gap/ledger.jsonl");
    assert!(Ledger::restore(&gap, &links).unwrap_err().is_integrity());
    links[1].record = "{}".to_owned();
    assert!(Ledger::restore(&gap, &links[..2]).unwrap_err().is_integrity());
    assert!(!gap.exists() && Ledger::restore(&gap, &[]).is_err());
}

#[test]
fn a_head_that_is_edited_or_gone_is_found() {
    type Edit = fn(&str) -> String;
    let edits: [(&str, Edit); 4] = [
        ("names another row", |head| head.replace("\"hash\":\"", "\"hash\":\"0")),
        ("names another row", |head| head.replace("  5,", "  3,")),
        ("not the head", |head| head.replace("rows", "cows")),
        ("missing", |_| String::new()),
    ];
    for (word, edit) in edits {
        let (_folder, path) = filled(4);
        let head = std::fs::read_to_string(tip::path_of(&path)).unwrap();
        std::fs::write(tip::path_of(&path), edit(&head)).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.is_integrity() && error.to_string().contains(word), "{word}: {error}");
    }
    let (_folder, path) = filled(4);
    std::fs::remove_file(tip::path_of(&path)).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("ledger.head is missing"));
}

#[test]
fn a_head_that_is_behind_is_caught_up() {
    let (_folder, path) = filled(4);
    let now = std::fs::read_to_string(tip::path_of(&path)).unwrap();
    assert_eq!(now, head_after(&path, 5));
    // A process that died between the row and the head.
    std::fs::write(tip::path_of(&path), head_after(&path, 4)).unwrap();
    assert_eq!(read(&path).unwrap().records.len(), 4);
    drop(Ledger::resume(&path).unwrap());
    assert_eq!(std::fs::read_to_string(tip::path_of(&path)).unwrap(), now);
    // Or between the header and its head.
    let (_folder, path) = filled(0);
    std::fs::write(tip::path_of(&path), "").unwrap();
    assert_eq!(read(&path).unwrap().records.len(), 0);
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
    assert!(matches!(error, CorpusError::Exists(_)), "{error}");
    assert!(error.to_string().contains("--resume"), "{error}");
}

#[test]
fn two_writers_are_refused() {
    let (_folder, path) = filled(1);
    let (_ledger, _) = Ledger::resume(&path).unwrap();
    let error = Ledger::resume(&path).unwrap_err();
    assert!(matches!(error, CorpusError::Locked(_)), "{error}");
}

#[test]
fn a_torn_row_is_ignored_and_cut_off_wherever_it_tore() {
    let (_folder, path) = filled(3);
    let whole = std::fs::read(&path).unwrap();
    let last = whole[..whole.len() - 1].iter().rposition(|&b| b == b'\n').unwrap() + 1;
    // The torn row was never finished, so no head names it.
    let mark = head_after(&path, 3);
    for end in last + 1..whole.len() {
        std::fs::write(&path, &whole[..end]).unwrap();
        std::fs::write(tip::path_of(&path), &mark).unwrap();
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

/// Its head lies beside it, so it was one.
#[test]
fn a_ledger_whose_header_is_gone_is_damaged() {
    let (_folder, path) = filled(3);
    for text in ["", "hello\n", "{\"a\":1}\n", "{\"a\":1"] {
        std::fs::write(&path, text).unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.is_integrity() && error.to_string().contains("line 1"), "{text:?}: {error}");
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
    let folder = tempfile::tempdir().unwrap();
    let head = Tip::open(&folder.path().join("ledger.jsonl")).unwrap();
    let path = "/dev/full".into();
    let mut ledger = Ledger { file, head, path, seq: 0, prev: genesis(), bytes: 0 };
    let error = ledger.append(&json!({})).unwrap_err().to_string();
    assert!(error.contains("/dev/full") && error.contains("free some space"), "{error}");
    assert!(!error.contains('\n'));
}

#[test]
fn a_ledger_that_is_a_link_or_a_pipe_is_refused_at_once_and_so_is_its_head() {
    let folder = tempfile::tempdir().unwrap();
    let real = folder.path().join("real.jsonl");
    drop(Ledger::create(&real, &serde_json::json!({})).unwrap());
    let path = folder.path().join("ledger.jsonl");
    std::os::unix::fs::symlink(&real, &path).unwrap();
    let reasons = [
        read(&path).unwrap_err(),
        Ledger::resume(&path).unwrap_err(),
        Ledger::create(&path, &serde_json::json!({})).unwrap_err(),
    ];
    for error in reasons {
        assert!(error.to_string().contains("it is a symbolic link"), "{error}");
    }
    std::fs::remove_file(&path).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).unwrap();
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("it is not a regular file"), "{error}");
    std::fs::remove_file(&path).unwrap();
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "").unwrap();
    std::os::unix::fs::symlink(&victim, folder.path().join("ledger.head")).unwrap();
    let error = Ledger::create(&path, &serde_json::json!({})).unwrap_err().to_string();
    assert!(error.contains("ledger.head") && error.contains("symbolic link"), "{error}");
    assert_eq!(std::fs::read(&victim).unwrap(), b"");
}
