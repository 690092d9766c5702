//! Texts of random logits under grammars: the hard case, since nothing but the grammar leads to a text that fits.

use std::path::Path;
use std::sync::OnceLock;

use ir::sampling::{Sampling, Seen};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;

const END: u32 = 1;
const VOCAB: u32 = 512;
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/golden/llama3-rope-bf16");

pub(crate) fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::load(Path::new(GOLDEN), VOCAB).unwrap())
}

pub(crate) fn constraint(source: Source) -> Result<Box<dyn Constraint>, String> {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(tokenizer(), VOCAB).unwrap()).constraint(source)
}

/// A text of random logits, of at most `most` tokens, and whether it ended by itself.
pub(crate) fn drawn(rule: &mut dyn Constraint, sampling: &Sampling, most: u32) -> (String, bool) {
    let mut random = StdRng::seed_from_u64(sampling.seed);
    let mut ids = Vec::new();
    let text = |ids: &[u32]| tokenizer().decode(ids, false).unwrap();
    for position in 0..most {
        let mut row: Vec<f32> = (0..VOCAB).map(|_| random.random_range(-4.0..4.0)).collect();
        if position % 2 == 0 {
            rule.prepare();
        }
        rule.allowed(row.len(), &[END]).unwrap().ban_others(&mut row);
        let id = sampling.choose(&row, &Seen::default(), position).unwrap();
        if id == END {
            return (text(&ids), true);
        }
        ids.push(id);
        if rule.take(id).unwrap() {
            return (text(&ids), true);
        }
    }
    (text(&ids), false)
}

/// Draws texts by each seed, greedy and not; every text that ended is passed to `check`. Returns how many ended.
fn draw(source: impl Fn() -> Source, most: u32, check: impl Fn(&str)) -> usize {
    let rule = constraint(source()).unwrap();
    let mut ended = 0;
    for seed in 0..8 {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, seed, ..Sampling::default() };
            let (text, complete) = drawn(&mut *rule.clone(), &sampling, most);
            if complete {
                ended += 1;
                check(&text);
            }
        }
    }
    ended
}

#[test]
fn every_text_of_a_schema_validates() {
    let bounded = json!({"type": "string", "maxLength": 4});
    let schemas = [
        json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
            "required": ["a", "b"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"name": bounded, "kind": {"enum": ["x", "é\"", 3, null]}},
            "required": ["name"], "additionalProperties": false}),
        json!({"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 1, "maxItems": 2,
            "$defs": {"pair": {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 9},
                "minItems": 2, "maxItems": 2}}}),
        json!({"anyOf": [{"const": {"k": [1, "two"]}}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]}),
        json!({"type": "object", "properties": {"on": {"type": "string", "format": "date"}},
            "required": ["on"], "additionalProperties": false}),
    ];
    for schema in schemas {
        let validator = jsonschema::validator_for(&schema).unwrap();
        let ended = draw(
            || Source::Schema(schema.clone()),
            200,
            |text| {
                let value: Value =
                    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
                assert!(validator.is_valid(&value), "{text} for {schema}");
            },
        );
        assert!(ended >= 12, "{ended} of 16 ended: {schema}");
    }
}

#[test]
fn an_object_without_a_schema_is_json_or_a_beginning_of_it() {
    let any = || Source::Schema(json!({"type": "object"}));
    let ended = draw(any, 400, |text| {
        // Syntax only: a number may be larger than those of Rust.
        serde_json::from_str::<serde::de::IgnoredAny>(text).unwrap();
        assert!(text.starts_with('{'), "{text}");
    });
    assert!(ended > 0);
    let sampling = Sampling { temperature: 1.0, seed: 3, ..Sampling::default() };
    let (text, complete) = drawn(&mut *constraint(any()).unwrap(), &sampling, 3);
    assert!(!complete && text.starts_with('{'), "cut off by its length: {text}");
}

#[test]
fn expressions_choices_and_grammars_hold() {
    draw(
        || Source::Regex("[ab]{3}-[0-9]+".into()),
        50,
        |text| {
            let (letters, digits) = text.split_once('-').unwrap();
            assert!(letters.len() == 3 && digits.parse::<u128>().is_ok(), "{text}");
        },
    );
    let choices = ["yes", "no (1+1=2)", "naïve [\\d]"].map(str::to_owned);
    let ended = draw(
        || Source::Choice(choices.to_vec()),
        50,
        |text| {
            assert!(choices.contains(&text.to_owned()), "{text}");
        },
    );
    assert_eq!(ended, 16);
    let lark = "start: \"(\" start \")\" | \"x\"";
    let ended = draw(
        || Source::Lark(lark.into()),
        60,
        |text| {
            let (open, close) = text.split_once('x').unwrap();
            assert!(open.chars().all(|c| c == '(') && close.len() == open.len(), "{text}");
        },
    );
    assert!(ended > 0);
}

/// The state of a copy is its own, and what does not fit is refused.
#[test]
fn copies_are_independent_and_wrong_tokens_are_errors() {
    let mut rule = constraint(Source::Regex("ab".into())).unwrap();
    let mut copy = rule.clone();
    let a = tokenizer().encode("a", false).unwrap()[0];
    assert_eq!(rule.take(a), Ok(false));
    assert!(rule.take(a).unwrap_err().contains("does not fit"));
    assert_eq!(copy.take(a), Ok(false), "the copy is still at the start");
    // What was computed beforehand is of the state before.
    let b = tokenizer().encode("b", false).unwrap()[0];
    let mut rule = constraint(Source::Regex("ab".into())).unwrap();
    for id in [a, b] {
        rule.prepare();
        assert!(rule.allowed(VOCAB as usize, &[END]).unwrap().few().unwrap().contains(&id));
        rule.prepare();
        rule.take(id).unwrap();
    }
}

#[test]
fn what_the_library_cannot_do_is_refused_with_its_reason() {
    for (source, reason) in [
        (Source::Schema(json!({"type": "strin"})), "strin"),
        (Source::Schema(json!({"not": {"type": "string"}})), "not"),
        (Source::Schema(json!({"$ref": "#/$defs/none"})), "none"),
        (Source::Schema(json!({"type": "string", "format": "isbn"})), "isbn"),
        (Source::Schema(json!(7)), "schema"),
        (Source::Schema(json!(false)), "schema"),
        (Source::Regex("(".into()), "regex"),
        (Source::Lark("start: other".into()), "other"),
    ] {
        let shown = format!("{source:?}");
        let why = constraint(source).map(|_| ()).unwrap_err();
        assert!(why.to_lowercase().contains(reason), "{shown}: {why}");
    }
    let one = json!({"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]});
    let why = constraint(Source::Schema(one)).map(|_| ()).unwrap_err();
    assert!(why.contains("oneOf") && why.contains("use anyOf"), "{why}");
}

/// Chains of references that end a smaller stack, and what would take the library minutes.
#[test]
fn hostile_grammars_are_bounded() {
    let chain = |link: fn(Value) -> Value| {
        let name = |i| format!("d{i}");
        let next = |i| json!({"$ref": format!("#/$defs/{}", name(i + 1))});
        let mut defs: serde_json::Map<_, _> = (0..800).map(|i| (name(i), link(next(i)))).collect();
        defs.insert(name(800), json!({"type": "null"}));
        Source::Schema(json!({"$ref": "#/$defs/d0", "$defs": defs}))
    };
    assert!(constraint(chain(|next| next)).is_ok());
    assert!(constraint(chain(|next| json!({"anyOf": [{"type": "null"}, next]}))).is_ok());
    assert!(constraint(chain(|next| json!({"properties": {"k": next}}))).is_ok());
    let texts = (0..8000).map(|i| format!("text {i}")).collect();
    for (source, reason) in [
        (Source::Choice(texts), "up to 65536"),
        (Source::Regex("(a|bc)?".repeat(600)), "up to 4096"),
        (Source::Schema(json!({"items": [{"pattern": "a?".repeat(2500)}]})), "up to 4096"),
        (Source::Schema(json!({"patternProperties": {"a?".repeat(2500): {}}})), "up to 4096"),
        (Source::Schema(json!({"$ref": "#"})), "no text fits"),
    ] {
        let why = constraint(source).map(|_| ()).unwrap_err();
        assert!(why.contains(reason), "{why}");
    }
}
