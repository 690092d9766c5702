//! `--speculate`: the tokens, logits and log probabilities of a text are those without it.

use serde_json::Value;

use super::{amk, folder};

fn golden(name: &str) -> String {
    format!("{}/corpus/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn generated(model: &str, how: &[&str]) -> Value {
    let what = ["generate", "--model", model, "--device", "cpu", "--tokens", "3,5,8,3,5,8,3,5"];
    amk(&[&what[..], how].concat()).succeeds("amk.generate.v1")
}

#[test]
fn guesses_change_no_token() {
    let (mut accepted, mut rejected) = (0, 0);
    for model in ["qwen3-qknorm-bf16", "llama3-rope-bf16"].map(golden) {
        for how in [
            &["--max-new-tokens", "80"][..],
            &["--max-new-tokens", "80", "--temperature", "0.7", "--seed", "5"],
            &["--max-new-tokens", "40", "--temperature", "1", "--repetition-penalty", "1.3"],
            &["--max-new-tokens", "40", "--logprobs", "2"],
        ] {
            let plain = generated(&model, how);
            assert!(plain.get("speculation").is_none());
            for most in ["1", "4", "7"] {
                let guessed = generated(&model, &[how, &["--speculate", most]].concat());
                let what = format!("{model} {how:?} {most}");
                assert_eq!(guessed["tokens"], plain["tokens"], "{what}");
                assert_eq!(guessed["logprobs"], plain["logprobs"], "{what}");
                let tally = &guessed["speculation"];
                let of = |field: &str| tally[field].as_u64().unwrap();
                assert!(of("accepted") + of("windows") >= of("tokens"), "{tally}");
                accepted += of("accepted");
                rejected += of("rejected");
            }
        }
    }
    assert!(accepted > 50 && rejected > 10, "{accepted} right, {rejected} wrong");
}

#[test]
fn kept_logits_are_those_of_the_tokens_that_were_right() {
    let home = folder();
    let rows = |name: &str, more: &[&str]| {
        let path = home.path().join(name);
        let keep = ["--max-new-tokens", "60", "--logits", path.to_str().unwrap()];
        generated(&golden("llama3-rope-bf16"), &[&keep[..], more].concat());
        std::fs::read(path).unwrap()
    };
    assert!(rows("plain", &[]) == rows("guessed", &["--speculate", "5"]));
}

#[test]
fn what_cannot_be_guessed_is_refused() {
    let model = golden("llama3-rope-bf16");
    let on = |device: &str, more: &[&str]| {
        let what = ["generate", "--model", &model, "--device", device, "--tokens", "1"];
        amk(&[&what[..], more].concat())
    };
    on("eval", &["--speculate", "2"]).fails(2, &["--speculate", "--device cpu or cuda"]);
    let eight = on("cpu", &["--speculate", "8"]);
    assert!(eight.code == 2 && eight.stderr.contains("0..=7"), "{}", eight.stderr);
    let log = on("cpu", &["--speculate", "2", "--command-log", "a"]);
    assert!(log.code == 2 && log.stderr.contains("cannot be used with"), "{}", log.stderr);
}

#[test]
fn a_bench_counts_the_tokens_of_a_step() {
    let bench = |more: &[&str]| {
        let what = ["bench", "--model", "toy", "--device", "cpu", "--context", "16"];
        amk(&[&what[..], &["--speculate", "5"], more].concat())
    };
    let of = |acceptance: &str| {
        let document = bench(&["--acceptance", acceptance]).succeeds("amk.bench.v1");
        assert_eq!(
            (&document["correct"], &document["latency_kind"]),
            (&true.into(), &"predicted".into())
        );
        let found = &document["speculation"];
        assert_eq!(found["tokens_as_plain"], true);
        (found["tokens_per_step"].as_f64().unwrap(), document["us"].as_f64().unwrap())
    };
    let [none, some, all] = ["0", "0.7", "1"].map(of);
    assert!(
        (none.0, all.0) == (1.0, 6.0) && (2.3..3.6).contains(&some.0),
        "{none:?} {some:?} {all:?}"
    );
    assert!(none.1 > some.1 && some.1 > all.1, "{none:?} {some:?} {all:?}");
    bench(&[]).succeeds("amk.bench.v1");
    let wrong = bench(&["--acceptance", "1.5"]);
    assert!(wrong.code == 2 && wrong.stderr.contains("from 0 to 1"), "{}", wrong.stderr);
}

#[test]
fn a_draft_changes_no_token_and_its_guesses_are_counted() {
    let model = golden("llama3-rope-bf16");
    let own = generated(&model, &["--max-new-tokens", "60", "--speculate", "4", "--draft", &model]);
    assert_eq!(own["tokens"], generated(&model, &["--max-new-tokens", "60"])["tokens"]);
    let tally = &own["speculation"];
    assert_eq!((&tally["drafts_acceptance"], &tally["rejected"]), (&1.0.into(), &0.into()));
    assert!(tally["drafted"].as_u64().unwrap() > 30, "{tally}");

    // A copy in fewer bits is mostly right.
    let home = folder();
    let copy = home.path().join("fp8");
    let copy = copy.to_str().unwrap();
    amk(&["quantize", "--model", &model, "--format", "fp8", "--out", copy])
        .succeeds("amk.quantize.v1");
    let by_copy =
        generated(&model, &["--max-new-tokens", "60", "--speculate", "4", "--draft", copy]);
    assert_eq!(by_copy["tokens"], own["tokens"]);
    let acceptance = by_copy["speculation"]["drafts_acceptance"].as_f64().unwrap();
    assert!((0.5..1.0).contains(&acceptance), "{acceptance}");

    let another = |how: &[&str]| {
        let how = [&["--max-new-tokens", "200"], how].concat();
        let plain = generated("toy-2l", &how);
        let drafted =
            generated("toy-2l", &[&how[..], &["--speculate", "4", "--draft", "toy"]].concat());
        assert_eq!(drafted["tokens"], plain["tokens"], "{how:?}");
        let of = |field: &str| drafted["speculation"][field].as_u64().unwrap();
        (of("windows"), of("drafted"), of("drafts_accepted"))
    };
    let (_, drafted, accepted) = another(&[]);
    assert!(drafted > 5 && 0 < accepted && accepted < drafted, "{accepted} of {drafted}");
    // Tokens that are nearly random: it is tried, and stops.
    let (windows, drafted, _) = another(&["--temperature", "1", "--seed", "3"]);
    assert!((5..60).contains(&drafted) && windows < 50, "{drafted} guesses in {windows} windows");
}

#[test]
fn a_draft_that_cannot_guess_for_the_model_is_refused() {
    let model = golden("llama3-rope-bf16");
    let on = |device: &str, more: &[&str]| {
        let what = ["generate", "--model", &model, "--device", device, "--tokens", "1"];
        amk(&[&what[..], more].concat())
    };
    let other = golden("qwen3-qknorm-bf16");
    let two = ["--speculate", "2", "--draft"];
    on("cpu", &[&two[..], &[&other]].concat()).fails(2, &["400 tokens", "512", "same family"]);
    on("eval", &[&two[..], &[&model]].concat()).fails(2, &["--draft", "--device cpu or cuda"]);
    on("cpu", &["--speculate", "0", "--draft", &model]).fails(2, &["--speculate 1 to 7"]);
    let alone = on("cpu", &["--draft", &model]);
    assert!(alone.code == 2 && alone.stderr.contains("--speculate <N>"), "{}", alone.stderr);
    let home = folder();
    let copy = home.path().join("other-tokens");
    std::fs::create_dir(&copy).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        std::fs::copy(format!("{model}/{file}"), copy.join(file)).unwrap();
    }
    let path = copy.to_str().unwrap().to_owned();
    on("cpu", &[&two[..], &[&path]].concat()).succeeds("amk.generate.v1");
    let text = std::fs::read_to_string(format!("{model}/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    vocab.insert("a".to_owned(), b);
    vocab.insert("b".to_owned(), a);
    std::fs::write(copy.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    on("cpu", &[&two[..], &[&path]].concat()).fails(2, &["other tokens"]);
}

#[test]
fn a_bench_times_a_draft() {
    let bench = |draft: &str, more: &[&str]| {
        let what = ["bench", "--model", "toy-2l", "--device", "cpu", "--context", "16"];
        let what = [&what[..], &["--speculate", "4", "--draft", draft], more].concat();
        amk(&what).succeeds("amk.bench.v1")
    };
    let own = bench("toy-2l", &[]);
    let found = &own["speculation"];
    assert_eq!((&found["draft"], &found["drafts_acceptance"]), (&"toy-2l".into(), &1.0.into()));
    let us = |draft: &str, acceptance: &str| {
        let document = bench(draft, &["--acceptance", acceptance]);
        assert_eq!(document["speculation"]["drafted"], document["speculation"]["guessed"]);
        document["us"].as_f64().unwrap()
    };
    assert!(us("toy", "0.5") > us("toy", "1"), "right guesses");
    assert!(us("toy-2l", "0.5") > us("toy", "0.5"), "a smaller draft");
}
