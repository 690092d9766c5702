//! `amk doctor`: what works here, what is missing, what is on the disk.

use serde_json::Value;

use super::{amk, command, folder, ran, search};

#[test]
fn doctor_lists_what_is_on_the_disk_and_how_to_remove_it() {
    let dir = folder();
    std::fs::create_dir_all(dir.path().join("schedules")).unwrap();
    std::fs::write(dir.path().join("schedules/a.json"), [b'x'; 300]).unwrap();
    search(dir.path(), &["--budget", "2"]).succeeds("amk.loop.v1");
    let cache = dir.path().join("no-cache");
    let ran = ran(command(dir.path(), &["doctor"]).env("AMK_CACHE", cache).output().unwrap());
    let places = ran.succeeds("amk.doctor.v1")["places"].clone();
    let names: Vec<_> = places.as_array().unwrap().iter().map(|place| &place["name"]).collect();
    assert_eq!(names, ["schedules", "runs", "store"], "{places}");
    assert_eq!(places[0]["bytes"], 300);
    for place in places.as_array().unwrap() {
        let path = place["path"].as_str().unwrap();
        let remove = place["remove"].as_str().unwrap();
        assert!(remove.contains(path), "{place}");
        assert!(ran.stderr.contains(&format!("in {path}; to remove: {remove}")), "{}", ran.stderr);
    }
    assert!(ran.stderr.contains("amk corpus import RUNS makes it anew"), "{}", ran.stderr);
}

#[test]
fn doctor_lists_what_works_and_what_is_missing() {
    let document = amk(&["doctor"]).succeeds("amk.doctor.v1");
    let checks = document["checks"].as_array().unwrap();
    for name in ["cpu", "memory", "driver", "nvrtc", "gpu"] {
        let check = checks.iter().find(|check| check["name"] == name);
        let check = check.unwrap_or_else(|| panic!("{name} is not checked"));
        assert!(check["ok"] == true || check["remedy"].is_string(), "{check}");
    }
    let missing = |check: &&Value| check["ok"] == false && check["optional"] == false;
    let missing = checks.iter().filter(missing).count();
    let measures = document["can_measure"] == true;
    assert!(measures || missing == 1, "a laptop lacks one thing, the driver: {document}");
    let ran = amk(&["evaluate", "--model", "toy", "--device", "cuda"]);
    if measures {
        ran.succeeds("amk.verdict.v2");
    } else {
        ran.fails(3, &["capability missing"]);
        amk(&["evaluate", "--model", "toy", "--aa", "2"]).fails(3, &["no GPU here"]);
        let args = ["generate", "--model", "toy", "--tokens", "1", "--device", "cuda"];
        amk(&args).fails(3, &["capability missing"]);
    }
}
