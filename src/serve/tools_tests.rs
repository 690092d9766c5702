//! Calls in each family's form: forced by a grammar, and found in texts.

use std::sync::Arc;

use ir::sampling::Sampling;

use super::*;
use crate::serve::grammar::tests::{constraint, drawn, tokenizer};
use crate::serve::tool_calls::{Call, CallReader};

const FORMS: [ToolForm; 3] = [ToolForm::Hermes, ToolForm::Llama, ToolForm::Mistral];

fn tools(form: ToolForm, choice: Choice, several: bool) -> Tools {
    let pair = json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2});
    let definitions = [
        json!({"name": "add", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
            "required": ["a"], "additionalProperties": false, "$defs": {"n": {"type": "integer"}}}}),
        json!({"name": "set", "parameters": {"type": "object", "properties": {"p": pair, "é": {"enum": ["\"x\""]}},
            "required": ["p", "é"], "additionalProperties": false}}),
    ];
    let definitions = definitions.map(|function| json!({"type": "function", "function": function}));
    let names = ["add", "set"].map(str::to_owned).into();
    Tools { form, names, definitions: definitions.to_vec(), choice, several }
}

/// What a reader finds in a text, given in pieces of so many characters.
fn found(tools: &Tools, text: &str, piece: usize) -> (String, Vec<(String, Value)>, bool) {
    let mut reader = CallReader::new(Arc::new(tools.clone()));
    let (mut shown, mut calls) = (String::new(), Vec::<Call>::new());
    let letters: Vec<char> = text.chars().collect();
    for letters in letters.chunks(piece) {
        let (text, found) = reader.push(&letters.iter().collect::<String>());
        shown += &text;
        calls.extend(found);
        if reader.is_full() {
            break;
        }
    }
    let (text, last) = reader.finish();
    if !reader.is_full() || !last.is_empty() {
        shown += &text;
        calls.extend(last);
    }
    for (index, call) in calls.iter().enumerate() {
        assert_eq!(call.index, index);
        assert!(call.id.len() == 9 && call.id.chars().all(|c| c.is_ascii_alphanumeric()));
    }
    let any = reader.any();
    (shown, calls.into_iter().map(|call| (call.name, call.arguments)).collect(), any)
}

#[test]
fn forced_calls_are_well_formed() {
    for form in FORMS {
        for choice in [Choice::Required, Choice::Named("set".to_owned())] {
            let tools = tools(form, choice.clone(), form != ToolForm::Llama);
            let wanted = tools.forced(tokenizer()).unwrap();
            let rule = constraint(wanted.source).unwrap_or_else(|why| panic!("{form:?}: {why}"));
            let mut complete = 0;
            for seed in 0..10 {
                let temperature = (seed % 2) as f32;
                let sampling = Sampling { temperature, seed, ..Sampling::default() };
                let (text, ended) = drawn(&mut *rule.clone(), &sampling, 400);
                if !ended {
                    continue;
                }
                complete += 1;
                let (shown, calls, _) = found(&tools, &text, 3);
                assert!(shown.is_empty() && !calls.is_empty(), "{form:?}: {text:?}");
                if choice != Choice::Required {
                    assert!(calls.len() == 1 && calls[0].0 == "set", "{text}");
                }
                for (name, arguments) in calls {
                    let index = usize::from(name == "set");
                    let schema = &tools.definitions[index]["function"]["parameters"];
                    assert!(jsonschema::is_valid(schema, &arguments), "{name}: {arguments}");
                }
            }
            assert!(complete >= 5, "{form:?} {choice:?}: {complete} of 10 ended");
        }
    }
    assert!(tools(ToolForm::Hermes, Choice::Auto, true).forced(tokenizer()).is_none());
}

#[test]
fn calls_are_found_in_texts_however_they_come() {
    let add = |n: i64| ("add".to_owned(), json!({"a": n}));
    let one = "{\"name\": \"add\", \"arguments\": {\"a\": 1}}";
    let two = one.replace('1', "2");
    let (hermes, mistral, llama) = (ToolForm::Hermes, ToolForm::Mistral, ToolForm::Llama);
    let cases = [
        (hermes, "no call < at <tool all".to_owned(), "no call < at <tool all", vec![]),
        (hermes, format!("Well:\n<tool_call>\n{one}\n</tool_call>"), "Well:\n", vec![add(1)]),
        (
            hermes,
            format!("<tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>\n"),
            "",
            vec![add(1), add(2)],
        ),
        (hermes, "<tool_call>oops</tool_call>".to_owned(), "<tool_call>oops</tool_call>", vec![]),
        (
            hermes,
            format!("<tool_call>{one}"),
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
            vec![],
        ),
        (
            hermes,
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>".to_owned(),
            "<tool_call>{\"name\": \"other\", \"arguments\": {}}</tool_call>",
            vec![],
        ),
        (mistral, format!("[TOOL_CALLS][{one}, {two}]"), "", vec![add(1), add(2)]),
        (mistral, format!("Sure. [TOOL_CALLS] [{one}]"), "Sure. ", vec![add(1)]),
        (mistral, "[TOOL_CALLS][oops]".to_owned(), "[TOOL_CALLS][oops]", vec![]),
        (mistral, "[1, 2] [TOO".to_owned(), "[1, 2] [TOO", vec![]),
        (llama, one.replace("arguments", "parameters"), "", vec![add(1)]),
        (
            llama,
            format!("<|python_tag|>{}", one.replace("arguments", "parameters")),
            "",
            vec![add(1)],
        ),
        (llama, "{\"a\": 1}".to_owned(), "{\"a\": 1}", vec![]),
        (llama, " Hello {\"name\"".to_owned(), " Hello {\"name\"", vec![]),
    ];
    for (form, text, shown, calls) in cases {
        let tools = tools(form, Choice::Auto, form != llama);
        for piece in [1, 2, 7, 1000] {
            let any = !calls.is_empty();
            assert_eq!(
                found(&tools, &text, piece),
                (shown.to_owned(), calls.clone(), any),
                "{text:?} by {piece}"
            );
        }
    }
    let single = tools(hermes, Choice::Auto, false);
    let text = format!("<tool_call>{one}</tool_call><tool_call>{two}</tool_call>");
    assert_eq!(found(&single, &text, 1), (String::new(), vec![add(1)], true), "the first only");
    let single = tools(mistral, Choice::Auto, false);
    assert_eq!(found(&single, &format!("[TOOL_CALLS][{one}, {two}]"), 1).1, [add(1)]);
}

/// Text is not held back longer than it may begin a call.
#[test]
fn text_is_sent_as_it_comes() {
    for form in FORMS {
        let mut reader = CallReader::new(Arc::new(tools(form, Choice::Auto, true)));
        assert_eq!(reader.push("Hello, ").0, "Hello, ");
        assert_eq!(reader.push("a [1] <b> {").0, "a [1] <b> {");
    }
}
