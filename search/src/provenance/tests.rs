use serde_json::json;

use super::*;

fn documents() -> Documents {
    let list = json!([{"engine": "a", "us": 7.5, "note": "n"}, {"engine": "b", "us": "e.json#/x"}]);
    BTreeMap::from([("e.json".to_owned(), json!({"x": 1.5, "y": 2})), ("l.json".to_owned(), list)])
}

fn shown(text: &str) -> Vec<(String, Option<String>)> {
    let numbers = read_page(text, &documents()).numbers.into_iter();
    numbers.map(|number| (number.shown, number.expected)).collect()
}

/// Every page of five of these pieces.
#[test]
fn any_page_is_read_and_writing_twice_changes_nothing() {
    let pieces = [
        "<!-- from e.json#/x .1 -->",
        "<!-- rows from l.json: | {/engine} | {/us .0 -->",
        "<!-- by hand: \u{e9} -->",
        "<!-- / -->",
        "\n",
        "\n|--|\n",
        "| 7 ms | 9 |",
        "`",
        "```",
        "<!-- ",
    ];
    for page in 0..pieces.len().pow(5) {
        let piece = |place: u32| pieces[page / pieces.len().pow(place) % pieces.len()];
        let text: String = (0..5).map(piece).collect();
        let once = read_page(&text, &documents()).text;
        assert_eq!(read_page(&once, &documents()).text, once, "{text}");
    }
}

#[test]
fn formats_are_decimals_exponents_and_units() {
    let cases = [
        (1.5, "0", "2"),
        (0.125, "1%", "12.5%"),
        (4.65e12, "2T", "4.65"),
        (0.00077, "1e", "7.7e-4"),
    ];
    for (number, format, expected) in cases {
        assert_eq!(formatted(number, format).as_deref(), Some(expected));
    }
    for format in ["", "x", "1x", "99", "-1", "1%%"] {
        assert_eq!(formatted(1.0, format), None, "{format}");
    }
}

#[test]
fn values_are_divided_and_links_followed_once() {
    let line = |term: &str| format!("a <!-- from {term} -->0<!-- / -->");
    let expected = |term: &str| shown(&line(term))[0].1.clone();
    assert_eq!(expected("e.json#/x .1").as_deref(), Some("1.5"));
    assert_eq!(expected("e.json#/x over /y .2").as_deref(), Some("0.75"));
    assert_eq!(expected("l.json#/1/us .1").as_deref(), Some("1.5"));
    for none in ["e.json#/z .1", "no.json#/x .1", "l.json#/0/note .1", "e.json"] {
        assert_eq!(expected(none), None, "{none}");
    }
}

#[test]
fn a_comment_without_an_end_is_reported() {
    for text in
        ["a <!-- from e.json#/x .1 -->1.5", "<!-- rows from l.json: | {/us .0} | -->\n| a |"]
    {
        let numbers = read_page(text, &documents()).numbers;
        assert!(numbers[0].reason.as_deref().unwrap().contains("<!-- / -->"), "{text}");
    }
    assert_eq!(shown("`<!-- from e.json#/x .1 -->`"), []);
    assert_eq!(shown("```\n<!-- rows from l.json: x -->\n```"), []);
}

#[test]
fn a_section_with_evidence_has_no_other_measured_number() {
    let marked = "A <!-- from e.json#/x .1 -->1.5<!-- / --> ms.";
    let found =
        |rest: &str| shown(&format!("# One\n{rest}\n{marked}\n# Two\n8 ms\n"))[1..].to_vec();
    assert_eq!(found("Up to 8 at once, 99% of them, in 2026."), []);
    let loose = |text: &str| vec![(text.to_owned(), None)];
    let first = |rest: &str| shown(&format!("# One\n{rest}\n{marked}\n"))[..1].to_vec();
    assert_eq!(first("It takes (7 ms)."), loose("7 ms"));
    assert_eq!(first("| 2048 tokens | 7.5 |"), loose("7.5"));
}
