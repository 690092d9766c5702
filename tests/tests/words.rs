//! Tests that the words of `docs/words.toml` are not used: the field has other words for them.

use serde::Deserialize;
use tests::root;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    word: Vec<Word>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Word {
    not: Vec<String>,
    #[serde(rename = "use")]
    instead: String,
    #[serde(default)]
    except: Vec<String>,
}

const NOT_SEARCHED: &[&str] = &["docs/lab/", "docs/words.toml", "CHANGELOG.md", "Cargo.lock"];

fn is_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether a text contains a phrase that is not part of a longer word.
fn has(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + phrase.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

#[test]
fn no_listed_word_is_used() {
    let list = std::fs::read_to_string(root().join("docs/words.toml")).expect("the list");
    let words: Words = toml::from_str(&list).expect("the list is TOML");
    assert!(words.word.len() >= 15, "the list has lost its words");
    let mut found = Vec::new();
    for (path, text) in
        crate::tidy::files(&["rs", "cu", "cuh", "h", "hpp", "md", "py", "toml", "amk"])
    {
        let path = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        if NOT_SEARCHED.iter().any(|left_out| path.starts_with(left_out)) {
            continue;
        }
        for word in &words.word {
            if word.except.iter().any(|except| path.starts_with(except)) {
                continue;
            }
            for not in word.not.iter().filter(|not| has(&text, not)) {
                let line = text.lines().position(|line| has(line, not)).map_or(0, |line| line + 1);
                found.push(format!("{path}:{line}: {not:?}; write {}", word.instead));
            }
        }
    }
    assert!(found.is_empty(), "{} words\n{}", found.len(), found.join("\n"));
}

#[test]
fn a_word_is_found_where_it_stands_alone() {
    assert!(has("a lane of", "lane") && has("lane", "lane") && has("(lane)", "lane"));
    assert!(!has("planes", "lane") && !has("lane_of", "lane") && !has("lanes", "lane"));
}
