//! Altered and forged runs, and how the commands that read runs treat them.

use std::path::Path;

use serde_json::Value;

use super::{amk, copy, folder, forge, search, succeeds};

/// Rewrites a ledger with right hashes and leaves every other file in its folder as it was.
fn forge_ledger_alone(run: &Path, edit: impl FnOnce(&mut Value, &mut Vec<Value>)) {
    let manifest = std::fs::read(run.join("manifest.json")).unwrap();
    forge(run, edit);
    std::fs::write(run.join("manifest.json"), manifest).unwrap();
}

/// A way to alter a run's folder, with a word of its refusal.
type Alteration = (&'static str, fn(&Path));

fn pipe(path: &Path) {
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
}

#[test]
fn a_command_out_of_a_ledger_is_named_and_never_run() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    let run = folder.path().join("runs/a");
    let command = "touch OWNED; cat >/dev/null; \u{1b}[2J";
    forge(&run, |header, _| header["proposer"] = command.into());
    let verified = succeeds(folder.path(), &["runs", "verify", "runs/a"], "amk.runs.v1");
    assert_eq!(verified["runs"][0]["proposer"], command);
    for args in [&["runs", "verify", "runs/a"][..], &["runs", "show", "runs/a"]] {
        let (code, _, said) = amk(folder.path(), args);
        assert!(code == 0 && said.contains("touch OWNED") && !said.contains('\u{1b}'), "{said}");
    }
    let before = std::fs::read(run.join("ledger.jsonl")).unwrap();
    let resume = ["loop", "--resume", "--out", "runs/a", "--store", "none", "--budget", "9"];
    for more in [&[][..], &["--proposer", "true"]] {
        let (code, document, said) = amk(folder.path(), &[&resume[..], more].concat());
        assert_eq!((code, &document["schema"]), (2, &"amk.error.v1".into()), "{said}");
        assert!(said.contains("--proposer") && !said.contains('\u{1b}'), "{said}");
    }
    assert!(!folder.path().join("OWNED").exists());
    assert_eq!(std::fs::read(run.join("ledger.jsonl")).unwrap(), before);
}

#[test]
fn a_search_with_a_proposer_goes_on_when_the_same_command_is_given_again() {
    let folder = folder();
    let script = r#"n=8; while read -r line; do case "$line" in *'"ask"'*) n=$((n*2));
        echo "{\"config\": {\"tiling\": {\"lm_head\": {\"rows\": $n}}}}";; esac; done"#;
    let (document, _) = super::proposed(folder.path(), "runs/a", "3", script);
    let resume = document["resume"].as_str().unwrap();
    assert!(resume.starts_with("amk loop --resume --out runs/a --proposer '"), "{resume}");
    let args = ["loop", "--resume", "--out", "runs/a", "--budget", "4"];
    let (code, _, said) = amk(folder.path(), &args);
    assert!(code == 2 && said.contains("never run"), "{said}");
    let more = [&args[..], &["--proposer", script]].concat();
    // The command starts again, and its first proposal is known.
    assert_eq!(succeeds(folder.path(), &more, "amk.loop.v1")["n_trials"], 4);
}

#[test]
fn no_verb_takes_a_sealed_run_that_was_altered_and_none_seals_it_again() {
    let folder = folder();
    search(folder.path(), "runs/a", &["--store", "none"]);
    let run = folder.path().join("x/b");
    let alter: [Alteration; 6] = [
        ("ledger.jsonl", |run| {
            forge_ledger_alone(run, |_, rows| rows[2]["why"] = "another reason".into());
        }),
        ("best.json", |run| std::fs::write(run.join("best.json"), "{}").unwrap()),
        ("manifest", |run| std::fs::write(run.join("manifest.json"), "{").unwrap()),
        ("ledger.jsonl", |run| {
            forge(run, |_, rows| rows[2]["why"] = "another reason".into());
            let aside = run.join("unsealed.json");
            std::fs::copy(run.join("../../runs/a/manifest.json"), aside).unwrap();
        }),
        ("best.json", |run| {
            std::fs::remove_file(run.join("best.json")).unwrap();
            pipe(&run.join("best.json"));
        }),
        ("note", |run| std::os::unix::fs::symlink("/dev/zero", run.join("note")).unwrap()),
    ];
    let verbs: [&[&str]; 7] = [
        &["runs", "verify", "x/b"],
        &["runs", "show", "x/b"],
        &["runs", "export", "x/b", "--out", "t"],
        &["propose", "--model", "toy", "--kv-capacity", "16", "--ledger", "x/b/ledger.jsonl"],
        &["loop", "--resume", "--out", "x/b", "--budget", "9", "--store", "none"],
        &["report", "x/b", "--out", "page.html"],
        &["corpus", "import", "x/b", "--store", "s.sqlite"],
    ];
    for (word, alter) in alter {
        std::fs::create_dir_all(folder.path().join("x")).unwrap();
        copy(&folder.path().join("runs/a"), &run);
        alter(&run);
        let names = || {
            let entries = std::fs::read_dir(&run).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            (names, std::fs::read(run.join("ledger.jsonl")).unwrap())
        };
        let before = names();
        for args in verbs {
            let (code, _, said) = amk(folder.path(), args);
            assert_eq!(code, 4, "{word}: {args:?}: {said}");
            assert!(said.contains(word), "{word}: {args:?}: {said}");
        }
        assert_eq!(names(), before, "{word}: something was written");
        assert!(
            !folder.path().join("page.html").exists() && !folder.path().join("s.sqlite").exists()
        );
        std::fs::remove_dir_all(folder.path().join("t")).unwrap();
        std::fs::remove_dir_all(&run).unwrap();
    }
}

#[test]
fn a_resumed_search_writes_through_no_link_of_its_folder() {
    let folder = folder();
    search(folder.path(), "runs/a", &["--store", "none"]);
    let run = folder.path().join("runs/a");
    std::fs::remove_file(run.join("manifest.json")).unwrap();
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "mine\n").unwrap();
    for name in ["results.tsv", "best.json"] {
        std::fs::remove_file(run.join(name)).unwrap();
        std::os::unix::fs::symlink(&victim, run.join(name)).unwrap();
    }
    for name in ["results.tsv.partial", "best.json.partial", "manifest.json.partial"] {
        std::os::unix::fs::symlink(&victim, run.join(name)).unwrap();
    }
    let resume = ["loop", "--resume", "--out", "runs/a", "--budget", "9", "--store", "none"];
    succeeds(folder.path(), &resume, "amk.loop.v1");
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "mine\n");
    succeeds(folder.path(), &["runs", "verify", "runs/a"], "amk.runs.v1");
    // A ledger that is a symbolic link is not resumed, wherever it leads.
    std::fs::remove_file(run.join("manifest.json")).unwrap();
    std::fs::rename(run.join("ledger.jsonl"), folder.path().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), run.join("ledger.jsonl")).unwrap();
    let (code, _, said) = amk(folder.path(), &resume);
    assert!(code == 2 && said.contains("symbolic link"), "{said}");
}

#[test]
fn a_refuted_champion_leads_nowhere() {
    let folder = folder();
    search(folder.path(), "runs/a", &["--store", "none"]);
    let run = folder.path().join("runs/a");
    forge(&run, |_, rows| {
        let last = rows.last_mut().unwrap();
        assert_eq!(last["kind"], "confirmation");
        assert_ne!(last["champion"], 0, "the toy has something to keep");
        last["decision"] = "reverted".into();
        last["verdict"]["correct"] = false.into();
        let gates = last["verdict"]["gates"].as_array_mut().unwrap();
        gates.last_mut().unwrap()["passed"] = false.into();
    });
    let rows = corpus::read(&run.join("ledger.jsonl")).unwrap().records;
    let baseline = &rows[0]["verdict"];
    let listed = succeeds(folder.path(), &["runs", "verify", "runs/a"], "amk.runs.v1");
    assert_eq!(listed["runs"][0]["best_us"], baseline["latency_us"]);
    let propose = ["propose", "--model", "toy", "--kv-capacity", "16", "--device", "cpu"];
    let ledger = ["--ledger", "runs/a/ledger.jsonl"];
    let proposed = succeeds(folder.path(), &[&propose[..], &ledger].concat(), "amk.propose.v1");
    assert_eq!(proposed["schedule_id"], baseline["schedule_id"]);
    succeeds(folder.path(), &["corpus", "import", "runs/a"], "amk.corpus_import.v1");
    let shown = succeeds(folder.path(), &["corpus", "show"], "amk.corpus.v1");
    assert_eq!(shown["best"][0]["best_us"], baseline["latency_us"]);
    let kept = |moves: &Value| -> i64 {
        moves.as_array().unwrap().iter().map(|m| m["kept"].as_i64().unwrap()).sum()
    };
    let led = rows.iter().filter(|row| row["outcome"] == "kept").count() as i64;
    assert_eq!(kept(&shown["moves"]), led - 1, "the champion's move is not counted as kept");
    succeeds(folder.path(), &["corpus", "check"], "amk.corpus_check.v1");
}

#[test]
fn a_program_that_is_not_what_its_id_says_is_not_taken() {
    let folder = folder();
    search(folder.path(), "runs/a", &[]);
    succeeds(folder.path(), &["corpus", "check"], "amk.corpus_check.v1");
    let path = folder.path().join("runs/store.sqlite");
    let store = corpus::Store::existing(&path).unwrap();
    let mut whole = Vec::new();
    store
        .each_program(|_, saved| {
            whole = saved.to_vec();
            Ok(())
        })
        .unwrap()
        .unwrap();
    drop(store);
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    for (what, id, bytes) in [
        ("is another one", "0123456789abcdef", &whole[..]),
        ("cannot be read", "fedcba9876543210", &damaged),
        ("cannot be read", "fedcba9876543210", &[0]),
    ] {
        let copied = folder.path().join("copy.sqlite");
        std::fs::copy(&path, &copied).unwrap();
        let mut store = corpus::Store::existing(&copied).unwrap();
        assert!(store.add_program(id, bytes).unwrap());
        drop(store);
        let (code, document, said) =
            amk(folder.path(), &["corpus", "check", "--store", "copy.sqlite"]);
        assert_eq!((code, &document["holds"]), (4, &false.into()), "{said}");
        assert!(said.contains(id) && said.contains(what), "{said}");
        let import = ["corpus", "import", "copy.sqlite", "--store", "b.sqlite"];
        let (code, _, said) = amk(folder.path(), &import);
        assert!(code == 4 && said.contains(what), "{what}: {code} {said}");
        assert!(!folder.path().join("b.sqlite").exists());
        std::fs::remove_file(&copied).unwrap();
    }
}
