//! Searches that end before their budget is spent.

use serde_json::Value;

use super::{amk_in, folder, search, trials};

#[test]
fn a_search_ends_when_enough_is_found() {
    let dir = folder();
    fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [&["--budget", "40"], more].concat()
    }
    search(dir.path(), &args(&["--out", "whole"])).succeeds("amk.loop.v1");
    let whole = trials(&dir.path().join("whole"));
    let us = |row: &Value| row["verdict"]["latency_us"].as_f64().unwrap();
    let leads =
        |row: &&Value| ["baseline", "kept"].iter().any(|outcome| row["outcome"] == *outcome);
    let led: Vec<&Value> = whole.iter().filter(leads).collect();
    let [.., before, last] = &led[..] else { panic!("nothing was kept") };
    let saved = |row: &Value| 100.0 * (1.0 - us(row) / us(&whole[0]));
    let between = format!("{:.3}%", f64::midpoint(saved(before), saved(last)));
    let goal = search(dir.path(), &args(&["--goal", &between, "--out", "goal"]));
    let goal = goal.succeeds("amk.loop.v1");
    assert_eq!(goal["stopped_by"], "goal");
    let rows = trials(&dir.path().join("goal"));
    assert_eq!(rows.last().unwrap()["trial"], last["trial"], "{between}");
    // A larger goal goes on from there.
    let more = ["loop", "--resume", "--out", "goal", "--goal", "99"];
    let more = amk_in(dir.path(), &more).succeeds("amk.loop.v1");
    assert_eq!((&more["stopped_by"], &more["n_trials"]), (&"trials".into(), &40.into()));
    // The first schedule is near enough to a bound that is a hundredth of its time.
    let near = search(dir.path(), &args(&["--stop-within", "10000", "--out", "near"]));
    let near = near.succeeds("amk.loop.v1");
    assert_eq!((&near["stopped_by"], &near["n_trials"]), (&"bound".into(), &1.into()));
    for wrong in ["--goal=0", "--goal=100%", "--stop-within=-1%"] {
        search(dir.path(), &args(&[wrong])).fails(2, &["out of range"]);
    }
    search(dir.path(), &args(&["--goal", "much"])).fails(2, &["--help"]);
}
