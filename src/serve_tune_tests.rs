//! Servers that tune themselves: by predictions here, as `amk loop` on the CPU; `src/serve/tune/tests.rs` has a clock.

use std::collections::{BTreeMap, BTreeSet};

use super::super::amk_in;
use super::*;

/// A server in a folder of its own, where its search is.
fn server(folder: &Path, more: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amk"));
    command.current_dir(folder).env("XDG_RUNTIME_DIR", folder);
    let base = ["--model", "toy", "--device", "cpu", "--kv-capacity", "160"];
    Server::start_by(command, &[&base[..], more].concat())
}

impl Server {
    /// A figure of the search.
    fn tuned(&self, name: &str) -> f64 {
        let (text, name) =
            (self.get("/metrics").body, format!("amk_tune_{name}{{model_name=\"toy\"}} "));
        let found = text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
        found.unwrap_or_else(|| panic!("{name}: {text}"))
    }

    /// A label of the schedule that serves: `state`, `schedule` or `kernel`.
    fn schedule(&self, label: &str) -> String {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.starts_with("amk_tune_schedule{"));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        let rest = line.split_once(&format!("{label}=\"")).unwrap().1;
        rest.split('"').next().unwrap().to_owned()
    }

    /// The same in `amk top`, once the page has it.
    fn tuning(&self, folder: &Path) -> Value {
        let pid = self.document["pid"].to_string();
        let mut top = super::super::command(
            folder,
            &["top", "--once", "--json", "--every", "50", "--pid", &pid],
        );
        let looked = top.env("XDG_RUNTIME_DIR", folder).output().unwrap();
        super::super::ran(looked).succeeds("amk.top.v2")["tuning"].take()
    }

    /// Text and fingerprint of a greedy answer to one of some prompts.
    fn answer(&self, number: u64) -> (String, String) {
        let prompt = [5 + number % 7, 6, 7];
        let fields = json!({"model": "toy", "prompt": prompt, "max_tokens": 12, "temperature": 0});
        let answer = self.complete(fields);
        (answer.text(), answer.json()["system_fingerprint"].as_str().unwrap().to_owned())
    }
}

/// The schedules of a search by the names of their kernels.
fn schedules(search: &Path) -> BTreeMap<String, Value> {
    let rows = std::fs::read_to_string(search.join("ledger.jsonl")).unwrap();
    let rows = rows.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let named = rows.filter_map(|row| {
        let trial = Some(&row["record"]).filter(|row| row["kind"] == "trial")?;
        let id = trial["verdict"]["program_id"].as_str()?;
        Some((format!("b1-{}", &id[..8]), trial["config"].clone()))
    });
    named.collect()
}

#[test]
fn a_server_with_a_slow_start_reaches_its_goal_and_answers_the_same_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let plain = server(folder.path(), &["--schedule", "neutral", "--no-prefix-cache"]);
    let expected: Vec<(String, String)> = (0..7).map(|number| plain.answer(number)).collect();
    let tune = ["--schedule", "neutral", "--tune", "--goal", "20%", "--out", "search"];
    let mut tuned = server(folder.path(), &tune);
    assert_eq!(tuned.document["prefix_cache"], false);
    let mut answers = Vec::new();
    wait_for("the goal", || {
        let number = answers.len() as u64;
        answers.push(tuned.answer(number));
        std::thread::sleep(Duration::from_millis(30)); // there are idle moments
        !["waiting", "tuning"].contains(&&*tuned.schedule("state"))
    });
    assert_eq!(tuned.schedule("state"), "goal");
    assert!(tuned.tuned("kept_total") >= 1.0 && tuned.tuned("gain") >= 0.2);
    assert_eq!([tuned.tuned("refused_total"), tuned.tuned("rolled_back_total")], [0.0; 2]);
    shows_the_metrics(&tuned, folder.path());
    assert_eq!(plain.tuning(folder.path()), Value::Null);
    for _ in 0..7 {
        answers.push(tuned.answer(answers.len() as u64));
    }
    let (_, last) = answers.last().unwrap().clone();
    assert!(last.ends_with(&tuned.schedule("kernel")) && last != expected[0].1, "{last}");
    // Each answer is by one schedule, and `generate` repeats it with that of its fingerprint.
    let schedules = schedules(&folder.path().join("search"));
    let mut repeated = BTreeSet::new();
    for (number, (text, fingerprint)) in answers.iter().enumerate() {
        assert_eq!(text, &expected[number % 7].0, "request {number}");
        let (_, kernel) = fingerprint.split_at("amk-".len());
        let kernel = kernel.split_once("-cpu-").unwrap().1;
        let config = schedules.get(kernel).unwrap_or_else(|| panic!("{kernel} has no trial"));
        if !repeated.insert(kernel) {
            continue;
        }
        let tokens = format!("{},6,7", 5 + number % 7);
        let args = [
            "generate",
            "--model",
            "toy",
            "--device",
            "cpu",
            "--kv-capacity",
            "160",
            "--config",
            &config.to_string(),
            "--tokens",
            &tokens,
            "--max-new-tokens",
            "12",
        ];
        let again = amk_in(folder.path(), &args).succeeds("amk.generate.v1");
        let again: Vec<String> =
            again["tokens"].as_array().unwrap().iter().map(Value::to_string).collect();
        assert_eq!(text.trim(), again.join(" "), "request {number}");
    }
    assert!(repeated.len() > 1, "{repeated:?}");
    assert_eq!(amk_in(folder.path(), &["runs", "verify", "search"]).code, 0);
    tuned.interrupt();
    assert_eq!(tuned.end(), 0);
}

/// `amk top` shows a search that has ended as `/metrics` does.
fn shows_the_metrics(tuned: &Server, folder: &Path) {
    let tuning = tuned.tuning(folder);
    for name in ["trials", "kept", "refused", "rolled_back"] {
        assert_eq!(tuning[name].as_f64(), Some(tuned.tuned(&format!("{name}_total"))), "{tuning}");
    }
    let state = tuned.schedule("state");
    for name in ["state", "stopped"] {
        assert_eq!(tuning[name], *state, "{tuning}");
    }
    assert_eq!(tuning["schedule"], *tuned.schedule("schedule"), "{tuning}");
    let [low, high] = ["low", "high"].map(|end| tuning["gain_ci"][end].as_f64().unwrap());
    assert!((low - tuned.tuned("gain")).abs() <= 1e-6 && low <= high && high < 1.0, "{tuning}");
}

#[test]
fn a_server_that_has_nothing_to_gain_says_so() {
    let folder = tempfile::tempdir().unwrap();
    for (more, state) in [(["--stop-within", "10000%"], "bound"), (["--budget", "3"], "trials")] {
        let tune = ["--tune", "--goal", "99%", more[0], more[1]];
        let tuned = server(folder.path(), &tune);
        wait_for(state, || !["waiting", "tuning"].contains(&&*tuned.schedule("state")));
        assert_eq!(tuned.schedule("state"), state);
        let kept = tuned.tuned("kept_total");
        assert_eq!(kept > 0.0, tuned.tuned("gain") > 0.0);
    }
}

/// Without a device there is nothing to spoil: the planted lever is not kept as if it were right.
#[test]
fn planted_levers_want_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let tune = ["--schedule", "neutral", "--tune", "--tune-plant", "--out", "search"];
    let tuned = server(folder.path(), &tune);
    wait_for("the end", || !["waiting", "tuning"].contains(&&*tuned.schedule("state")));
    assert_eq!((&*tuned.schedule("state"), tuned.tuned("kept_total")), ("failed", 0.0));
}

/// The end does not wait for the end of the search.
#[test]
fn a_server_ends_while_it_tunes() {
    let folder = tempfile::tempdir().unwrap();
    let mut tuned = server(folder.path(), &["--tune", "--budget", "100000", "--out", "search"]);
    wait_for("a trial", || tuned.tuned("trials_total") >= 2.0);
    tuned.interrupt();
    assert_eq!(tuned.end(), 0);
    assert!(schedules(&folder.path().join("search")).len() >= 2, "and its ledger has the trials");
}

#[test]
fn what_cannot_be_tuned_or_would_not_stay_true_is_refused() {
    let refused = |more: &[&str], words: &[&str]| {
        let base = ["serve", "--model", "toy", "--addr", "127.0.0.1:0", "--device", "cpu"];
        amk(&[&base[..], more].concat()).fails(2, words);
    };
    refused(&["--tune", "--deterministic"], &["--deterministic"]);
    refused(&["--tune", "--command-log", "log"], &["--command-log"]);
    refused(&["--tune", "--goal", "100"], &["--goal 100 is out of range"]);
    refused(&["--goal", "20%"], &["--help"]);
    refused(&["--tune-plant"], &["--help"]);
    let args = ["serve", "--model", "toy", "--addr", "127.0.0.1:0", "--device", "eval", "--tune"];
    amk(&args).fails(2, &["--device eval"]);
}
