//! Numbers in pages and their evidence: the pages of this repository, and pages with an altered digit, altered evidence,
//! evidence of another build, or none.

use std::collections::BTreeSet;

use serde_json::json;
use tempfile::TempDir;

use super::*;

/// Numbers of this repository without evidence: the file that is not there yet, or the reason in the page.
const WITHOUT: &[(&str, &str)] = &[
    ("docs/results/engines.json: a list, without samples", "engines by hand, on other days"),
    ("amk bench on a card", "no schedule of the preset is shipped, so no bundle"),
    ("amk trace on a card", "without the gate, so there is no bundle"),
    ("vm-host/tests/prefill.rs on a card", "a test prints it; no document has it"),
    ("vm-host/tests/sampling.rs on a card", "a test prints it; no document has it"),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn numbers(document: &Value) -> &Vec<Value> {
    assert_eq!(document["schema"], "amk.provenance.v1");
    document["numbers"].as_array().unwrap()
}

/// Not red for evidence of an older kernel: `.ci/release` is.
#[test]
fn every_number_of_the_repository_follows_from_evidence_or_is_listed() {
    let (code, document, said) = amk_in(root(), &["provenance"]);
    assert!([0, 5].contains(&code), "amk provenance --write mends it\n{said}");
    let numbers = numbers(&document);
    assert!(numbers.len() > 100, "{said}");
    let without = numbers.iter().filter(|number| number["status"] == "no_evidence");
    let without: BTreeSet<&str> = without.map(|n| n["reason"].as_str().unwrap()).collect();
    let listed: BTreeSet<&str> = WITHOUT.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(without, listed, "no evidence (left), and listed in this test (right)");

    let pages: BTreeSet<&str> = numbers.iter().map(|n| n["file"].as_str().unwrap()).collect();
    for entry in std::fs::read_dir(root().join("docs/results")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_page = name.ends_with(".md") || name.ends_with(".svg");
        let page = format!("docs/results/{name}");
        assert!(!is_page || pages.contains(page.as_str()), "{page} is not a default page");
    }
}

/// A copy of pages of this repository beside its bundles.
fn copies(pages: &[&str], edit: impl Fn(&str, String) -> String) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root().join("corpus"), folder.path().join("corpus")).unwrap();
    for page in pages {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let path = folder.path().join(page);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, edit(page, text)).unwrap();
    }
    folder
}

#[test]
fn an_edited_digit_in_a_page_is_found_with_its_line_and_the_right_figure() {
    let pages = ["README.md", "docs/results/shipped.md"];
    let bundle = corpus::all_shipped()[0].bundle.unwrap();
    let right = format!("| {:.1} |", Bundle::read(bundle).unwrap().median_us);
    for edited in pages {
        let folder = copies(&pages, |page, text| {
            let forged = if page == edited { "| 12.3 |" } else { &right };
            text.replace(&right, forged)
        });
        let (code, document, said) = amk_in(folder.path(), &["provenance", pages[0], pages[1]]);
        assert_eq!(code, 4, "{said}");
        let mut altered = numbers(&document).iter().filter(|n| n["status"] == "altered");
        let number = altered.next().unwrap();
        assert_eq!(altered.next(), None, "{said}");
        assert_eq!((&number["file"], &number["shown"]), (&json!(edited), &json!("12.3")));
        assert_eq!(number["expected"], right.trim_matches(['|', ' ']));
        let text = std::fs::read_to_string(folder.path().join(edited)).unwrap();
        let line = text.lines().position(|line| line.contains("12.3")).unwrap() + 1;
        assert_eq!(number["line"], line);
        let says = format!(
            "{edited}:{line}: 12.3: altered: the figure is {}",
            right.trim_matches(['|', ' '])
        );
        assert!(said.contains(&says), "{says}\n{said}");
        assert!(number["from"][0].as_str().unwrap().ends_with(".bundle.json#/median_us"));

        let (code, _, said) = amk_in(folder.path(), &["provenance", "--write", pages[0], pages[1]]);
        assert_eq!(code, amk_in(folder.path(), &["provenance", pages[0], pages[1]]).0, "{said}");
        for page in pages {
            let read = |folder: &Path| std::fs::read_to_string(folder.join(page)).unwrap();
            assert!(read(folder.path()) == read(root()), "{page} is not what it was");
        }
    }
}

/// The bundle of the toy, of this build's kernel and a known commit.
fn current() -> Bundle {
    let mut bundle = bundle();
    let graph = model::preset("toy").unwrap().graph;
    let arch = Target::by_name("h200").unwrap().arch;
    bundle.kernel_id = vm_host::kernel_id(&vm_host::variant(&bundle.config.kernel, &graph), &arch);
    bundle.conditions.amk = "0.1.0 (0123456789ab)".to_owned();
    bundle
}

fn sealed(document: &Value) -> String {
    serde_json::to_string_pretty(&corpus::seal(document.as_object().unwrap())).unwrap()
}

/// A document of `amk bench --batch 2`, of this build.
fn batch() -> Value {
    let (bundle, graph) = (current(), model::preset("toy").unwrap().graph);
    let arch = Target::by_name("h200").unwrap().arch;
    let alone = vm_host::variant(&bundle.config.kernel, &graph);
    let two = vm_host::kernel_id(&vm_device::Variant { seqs: 2, ..alone }, &arch);
    json!({
        "schema": "amk.bench.v1", "model": "toy", "target": "h200",
        "kv_capacity": KV_CAPACITY, "batch": 2, "correct": true, "seed": 0,
        "us": 45.0, "ci_us": [45.0, 45.0], "us_per_token": 22.5, "times_one": 1.5,
        "samples_us": [[0.0, 45.0, 45.0, 0.0], [0.0, 45.0, 45.0, 0.0]],
        "one": {
            "us": 30.0, "samples_us": [[0.0, 30.0, 30.0, 0.0]],
            "config": bundle.config, "program_id": bundle.program_id, "kernel_id": bundle.kernel_id,
        },
        "config": bundle.config, "program_id": bundle.program_id, "kernel_id": two,
        "conditions": bundle.conditions,
    })
}

/// A document of `amk bench --prefill 64`, of this build.
fn prompt() -> Value {
    let (bundle, graph) = (current(), model::preset("toy").unwrap().graph);
    let arch = Target::by_name("h200").unwrap().arch;
    json!({
        "schema": "amk.bench.v1", "model": "toy", "target": "h200", "correct": true, "seed": 0,
        "batch": 1, "prompt": 64, "us": 2048.0, "us_per_token": 32.0, "ci_us": [2048.0, 2048.0],
        "samples_us": [[0.0, 2048.0, 2048.0, 0.0]],
        "config": bundle.config, "conditions": bundle.conditions,
        "kernel_id": vm_host::prefill_kernel_id(&graph, 1, &arch),
    })
}

/// A document of `amk bench`, of this build, with another engine.
fn step() -> Value {
    let bundle = current();
    let peer =
        json!({"name": "torch-graph", "us_per_token": 40.0, "blocks_us": [39.0, 40.0, 41.0]});
    json!({
        "schema": "amk.bench.v1", "model": "toy", "target": "h200", "kv_capacity": KV_CAPACITY,
        "correct": true, "seed": bundle.seed, "batch": 1, "us": bundle.median_us,
        "us_per_token": bundle.median_us, "ci_us": bundle.ci_us, "samples_us": bundle.rounds_us,
        "peers": [peer, {"us_per_token": null}],
        "config": bundle.config, "program_id": bundle.program_id, "kernel_id": bundle.kernel_id,
        "conditions": bundle.conditions,
    })
}

const PAGE: &str = "# Results\n\n\
    <!-- rows from e/b: | {/model} | {/median_us .1} | {/bound_us over /median_us .1%} | -->\n\
    | model | µs | of the bound |\n|---|---|---|\n| toy | 25.5 | 0.1% |\n<!-- / -->\n\n\
    Two take <!-- from e/batch.json#/times_one .2 -->1.50<!-- / --> times as long as one, a\n\
    prompt <!-- from e/prompt.json#/us .0k -->2<!-- / --> ms.\n";

/// A page with its evidence.
fn site() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("e/b")).unwrap();
    write(folder.path(), "e/b/16.bundle.json", &current().to_text());
    write(folder.path(), "e/batch.json", &sealed(&batch()));
    write(folder.path(), "e/prompt.json", &sealed(&prompt()));
    write(folder.path(), "e/list.json", r#"["e/list.json#/0"]"#);
    write(folder.path(), "p.md", PAGE);
    let (code, _, said) = amk_in(folder.path(), &["provenance", "--write", "p.md"]);
    assert_eq!(code, 0, "{said}");
    folder
}

fn walk(folder: &TempDir) -> (i32, Value, String) {
    amk_in(folder.path(), &["provenance", "p.md"])
}

/// The one number with a status.
#[track_caller]
fn only<'a>(document: &'a Value, status: &str) -> &'a Value {
    let found: Vec<_> = numbers(document).iter().filter(|n| n["status"] == status).collect();
    assert_eq!(found.len(), 1, "{document}");
    found[0]
}

#[test]
fn every_number_is_walked_to_samples_program_kernel_commit_and_card() {
    let folder = site();
    let (code, document, said) = walk(&folder);
    assert_eq!((code, &document["status"]), (0, &json!("holds")), "{said}");
    let shown: Vec<_> = numbers(&document).iter().map(|n| n["from"].clone()).collect();
    let bundle = "e/b/16.bundle.json#";
    let expected = [
        json!([format!("{bundle}/median_us")]),
        json!([format!("{bundle}/bound_us"), format!("{bundle}/median_us")]),
        json!(["e/batch.json#/times_one"]),
        json!(["e/prompt.json#/us"]),
    ];
    assert_eq!(shown, expected, "{said}");
    let (bundle, batch, prompt) =
        (&document["evidence"][0], &document["evidence"][1], &document["evidence"][2]);
    assert_eq!(bundle["samples"], 8);
    assert_eq!(bundle["builds"][0]["program_id"], current().program_id);
    assert_eq!(bundle["builds"][0]["kernel_id"], current().kernel_id);
    assert_eq!(bundle["commit"], "0123456789ab");
    assert_eq!(bundle["conditions"]["card"], "NVIDIA H200");
    assert_eq!((&batch["samples"], batch["builds"].as_array().unwrap().len()), (&json!(6), 2));
    assert_eq!((&prompt["samples"], &prompt["builds"][0]["program_id"]), (&json!(2), &Value::Null));
    assert!(said.contains("4 numbers: 4 hold, 0 are stale"), "{said}");
    assert!(said.contains("commit 0123456789ab; NVIDIA H200"), "{said}");
}

#[test]
fn altered_evidence_is_exit_4_and_no_page_is_written_from_it() {
    let cases: [(&str, &str, &str, &str); 4] = [
        ("e/b/16.bundle.json", "30.0,", "31.0,", "edited"),
        ("e/b/16.bundle.json", "25.5", "25.4", "edited"),
        ("e/batch.json", "\"us\": 45.0", "\"us\": 44.5", "/us is 44.5, its samples have 45"),
        ("e/prompt.json", "\"us\": 2048.0", "\"us\": 1024.0", "/us is 1024, its samples have 2048"),
    ];
    for (file, from, to, why) in cases {
        let folder = site();
        let path = folder.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let before = std::fs::read_to_string(folder.path().join("p.md")).unwrap();
        let (code, document, said) = amk_in(folder.path(), &["provenance", "--write", "p.md"]);
        assert_eq!((code, &document["status"]), (4, &json!("altered")), "{file}: {said}");
        assert!(said.contains(why), "{file}: {said}");
        assert_eq!(std::fs::read_to_string(folder.path().join("p.md")).unwrap(), before);
    }
}

/// A hash alone does not help: the figures must follow from the samples too.
#[test]
fn figures_that_do_not_follow_are_found_even_with_a_new_hash() {
    let (two, prompt, step) = ("e/batch.json", "e/prompt.json", "e/step.json");
    for (name, document, field) in [
        (two, batch(), "/us"),
        (two, batch(), "/one/us"),
        (two, batch(), "/times_one"),
        (prompt, self::prompt(), "/ci_us/1"),
        (step, self::step(), "/us_per_token"),
        (step, self::step(), "/ci_us/1"),
        (step, self::step(), "/peers/0/us_per_token"),
    ] {
        let folder = site();
        let peer =
            "Another takes <!-- from e/step.json#/peers/0/us_per_token .0 -->40<!-- / --> us.";
        let page = std::fs::read_to_string(folder.path().join("p.md")).unwrap();
        write(folder.path(), "p.md", &format!("{page}\n{peer}\n"));
        write(folder.path(), step, &sealed(&self::step()));
        let (code, _, said) = walk(&folder);
        assert_eq!(code, 0, "{said}");
        let mut forged = document;
        *forged.pointer_mut(field).unwrap() = json!(1.25);
        write(folder.path(), name, &sealed(&forged));
        let (code, _, said) = walk(&folder);
        assert_eq!(code, 4, "{said}");
        assert!(said.contains(&format!("its {field} is 1.25, its samples have")), "{said}");
    }
}

#[test]
fn evidence_of_another_build_is_stale_with_its_commit() {
    let edits: [fn(&mut Value); 3] = [
        |batch| batch["kernel_id"] = json!("0123456789abcdef"),
        |batch| batch["one"]["kernel_id"] = json!("0123456789abcdef"),
        |batch| batch["program_id"] = json!("0123456789abcdef"),
    ];
    for edit in edits {
        let folder = site();
        let mut older = batch();
        edit(&mut older);
        write(folder.path(), "e/batch.json", &sealed(&older));
        let (code, document, said) = walk(&folder);
        assert_eq!(code, 5, "{said}");
        assert_eq!(only(&document, "stale")["shown"], "1.50");
        assert!(said.contains("e/batch.json: stale: this build has"), "{said}");
        assert!(said.contains("commit 0123456789ab"), "{said}");
    }
}

#[test]
fn a_number_without_evidence_is_named_and_left_alone() {
    let none = |line: &str, why: &str| {
        let folder = site();
        write(folder.path(), "p.md", &format!("{PAGE}{line}\n").replace("0.1%", "0.0%"));
        let (code, document, said) = amk_in(folder.path(), &["provenance", "--write", "p.md"]);
        assert_eq!(code, 5, "{said}");
        let number = only(&document, "no_evidence");
        assert_eq!((&number["shown"], &number["line"]), (&json!("7 ms"), &json!(11)), "{said}");
        assert!(number["reason"].as_str().unwrap().contains(why), "{said}");
        assert!(
            std::fs::read_to_string(folder.path().join("p.md"))
                .unwrap()
                .ends_with(&format!("{line}\n"))
        );
    };
    none("and <!-- from e/no.json#/us .1 -->7 ms<!-- / -->", "e/no.json is missing");
    none("and <!-- from #/us .1 -->7 ms<!-- / -->", "is missing");
    none("and <!-- from e/list.json#/0 .1 -->7 ms<!-- / -->", "a link to a link");
    none("and <!-- from e/batch.json#/no .1 -->7 ms<!-- / -->", "has nothing at /no");
    none("and <!-- from e/../p.json#/us .1 -->7 ms<!-- / -->", "is missing");
    none("and <!-- from e/batch.json#/times_one .x -->7 ms<!-- / -->", "makes no number");
    none("<!-- from e/batch.json#/times_one .1 -->7 ms<!-- / -->", "ends the paragraph");
    none("and <!-- by hand: another day -->7 ms<!-- / -->", "another day");
    none("and 7 ms", "names no evidence");
    none("`<!-- from a.json#/b .1 -->` shows a mark, and 7 ms.", "names no evidence");

    let folder = site();
    let mut predicted = batch();
    predicted["conditions"] = Value::Null;
    write(folder.path(), "e/batch.json", &sealed(&predicted));
    let (code, document, said) = walk(&folder);
    assert_eq!(code, 5, "{said}");
    assert!(only(&document, "no_evidence")["reason"].as_str().unwrap().contains("not measured"));
}

#[test]
fn a_picture_is_drawn_from_its_list_and_a_link_leads_to_evidence() {
    let folder = site();
    let list = json!([{"engine": "amk", "us": "e/b/16.bundle.json#/median_us", "note": "x"}]);
    write(folder.path(), "e/engines.json", &list.to_string());
    let svg =
        write(folder.path(), "e/engines.svg", "<svg> <!-- bars from e/engines.json --></svg>\n");
    let page = "e/engines.svg";
    assert_eq!(amk_in(folder.path(), &["provenance", page]).0, 4);
    let (code, document, said) = amk_in(folder.path(), &["provenance", "--write", page]);
    assert_eq!((code, numbers(&document).len()), (0, 1), "{said}");
    let drawn = std::fs::read_to_string(&svg).unwrap();
    std::fs::write(&svg, drawn.replace(">26 <", ">25 <")).unwrap();
    let (code, document, said) = amk_in(folder.path(), &["provenance", page]);
    assert_eq!(code, 4, "{said}");
    let number = only(&document, "altered");
    assert_eq!((&number["line"], &number["expected"]), (&json!(7), &json!("26")), "{said}");
    std::fs::write(&svg, drawn.replace("#2f7d4f", "#000000")).unwrap();
    assert_eq!(amk_in(folder.path(), &["provenance", page]).0, 4);
}
