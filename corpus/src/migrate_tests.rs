//! Documents as the previous version wrote them: `tests/migrate/`.

use std::path::PathBuf;

use super::*;

fn earlier(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/migrate")).join(name)
}

fn lines(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(earlier(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_schedule_gets_todays_names() {
    let text = std::fs::read_to_string(earlier("schedule.json")).unwrap();
    let mut document: Value = serde_json::from_str(&text).unwrap();
    assert!(serde_json::from_value::<ScheduleConfig>(document.clone()).is_err());
    assert_eq!(documents(std::slice::from_mut(&mut document), "hash"), 1);
    let config: ScheduleConfig = serde_json::from_value(document.clone()).unwrap();
    assert_eq!(config.pipeline.in_flight_before_wait_bytes, 65536);
    assert_eq!(config.sync.qkv, ir::schedule::Handoff::FlagInData);
    // The id that the previous version computed, from its bundle.
    assert_eq!(schedule::earlier_schedule_id(&config), "c7960e4d05a835f5");
    assert_eq!(documents(std::slice::from_mut(&mut document), "hash"), 0, "it is of today");
}

#[test]
fn a_grid_gets_todays_names() {
    let mut grid = lines("grid.jsonl");
    assert!(documents(&mut grid, "hash") > 0);
    assert_eq!(grid[0]["schema"], "amk.measured_grid.v1");
    assert_eq!(grid[0]["migrated_from"], "hash");
    let axes = &grid[0]["grid"]["axes"];
    assert_eq!(axes["pipeline.in_flight_before_wait_bytes"], json!([32768, 65536]));
    assert_eq!(axes["sync.attention"], json!(["counter", "flag_in_data"]));
}

#[test]
fn a_ledger_gets_a_chain_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("ledger.jsonl");
    let rows = ledger(&earlier("run/ledger.jsonl"), &to).unwrap();
    let contents = crate::read(&to).unwrap();
    assert_eq!(contents.records.len() as u64 + 1, rows);
    assert_eq!(contents.header["schema"], LEDGER_SCHEMA);
    assert_eq!(contents.header["strategy"], "hill-climb");
    let earlier_rows = std::fs::read_to_string(earlier("run/ledger.jsonl")).unwrap();
    let last = earlier_rows.lines().last().unwrap();
    let from = contents.header["migrated_from"].as_str().unwrap();
    assert!(last.contains(&format!("\"hash\":\"{from}\"")), "it names the last row of its origin");
    for row in &contents.records {
        let Some(config) = row.get("config") else { continue };
        let config: ScheduleConfig = serde_json::from_value(config.clone()).unwrap();
        assert_eq!(row["verdict"]["schedule_id"], config.id());
        assert!(row["verdict"].get("n_buffers").is_some());
    }
}

#[test]
fn a_ledger_that_was_edited_is_not_rewritten() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("from.jsonl"), folder.path().join("to.jsonl"));
    let text = std::fs::read_to_string(earlier("run/ledger.jsonl")).unwrap();
    std::fs::write(&from, text.replacen("reverted", "kept", 1)).unwrap();
    let error = ledger(&from, &to).unwrap_err();
    assert!(error.is_integrity() && !to.exists(), "{error}");
}

#[test]
fn evidence_is_not_rewritten() {
    let error = text(r#"{"schema": "amk.bundle.v2", "median_us": 1}"#).unwrap_err();
    assert!(error.to_string().contains("measure again"), "{error}");
}
