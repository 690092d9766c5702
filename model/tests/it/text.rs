//! Tests of the golden tokenizer and chat template, and of misbehaving templates.

use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use model::{Chat, Message, Tokenizer, import};
use serde::Deserialize;
use serde_json::json;

use crate::folder::{Copy, golden};

const NAME: &str = "llama3-rope-bf16";

#[derive(Deserialize)]
struct Text {
    prompts: Vec<Prompt>,
    chat: GoldenChat,
    greedy_text: String,
}

#[derive(Deserialize)]
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct GoldenChat {
    messages: Vec<Message>,
    text: String,
    ids: Vec<u32>,
}

fn text() -> Text {
    let bytes = std::fs::read(golden(NAME).join("text.json")).expect("text.json");
    serde_json::from_slice(&bytes).expect("text.json")
}

fn tokenizer() -> Tokenizer {
    import(&golden(NAME))
        .expect("a model")
        .tokenizer()
        .expect("a tokenizer")
        .expect("some tokenizer")
}

fn chat(messages: &[Message]) -> Chat<'_> {
    Chat { messages, add_generation_prompt: true, extra: None, now: UNIX_EPOCH }
}

fn hello() -> Vec<Message> {
    vec![Message::new("user", "<hi> & \"bye\"")]
}

/// Renders a template on one message.
fn rendered(template: &str) -> Result<String, String> {
    let copy = Copy::of(NAME);
    copy.write("chat_template.jinja", template);
    let tokenizer = Tokenizer::load(copy.dir(), 512).map_err(|e| e.to_string())?;
    tokenizer.chat(&chat(&hello())).map_err(|e| e.to_string())
}

#[test]
fn prompts_give_the_golden_ids() {
    let tokenizer = tokenizer();
    for prompt in text().prompts {
        assert_eq!(
            tokenizer.encode(&prompt.text, false).expect("ids"),
            prompt.ids,
            "{:?}",
            prompt.text
        );
        assert_eq!(tokenizer.decode(&prompt.ids, false).expect("text"), prompt.text);
    }
}

#[test]
fn the_chat_template_gives_the_golden_prompt() {
    let (tokenizer, golden) = (tokenizer(), text().chat);
    assert!(tokenizer.has_chat_template());
    let prompt = tokenizer.chat(&chat(&golden.messages)).expect("a prompt");
    assert_eq!(prompt, golden.text);
    assert_eq!(tokenizer.encode(&prompt, false).expect("ids"), golden.ids);
}

#[test]
fn greedy_ids_give_the_golden_text_at_once_and_one_by_one() {
    let file = std::fs::read(golden(NAME).join("golden.safetensors")).expect("golden.safetensors");
    let tensors = safetensors::SafeTensors::deserialize(&file).expect("tensors");
    let greedy = tensors.tensor("greedy").expect("greedy ids");
    let ids: Vec<u32> =
        greedy.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect();
    let tokenizer = tokenizer();
    let whole = text().greedy_text;
    assert_eq!(tokenizer.decode(&ids, false).expect("text"), whole);
    let mut stream = tokenizer.stream(false);
    let mut parts: Vec<String> =
        ids.iter().filter_map(|&id| stream.push(id).expect("text")).collect();
    assert!(parts.len() > 10);
    parts.push(stream.finish().expect("text"));
    assert_eq!(parts.concat(), whole);
}

/// Any ids decoded one by one give the same text as all at once, even where a character spans several ids.
#[test]
fn text_comes_whole_across_the_borders_of_tokens() {
    let tokenizer = tokenizer();
    let streamed = |ids: &[u32], skip: bool| {
        let mut stream = tokenizer.stream(skip);
        let mut parts: Vec<String> =
            ids.iter().filter_map(|&id| stream.push(id).expect("text")).collect();
        parts.push(stream.finish().expect("text"));
        parts
    };
    for text in [
        "naïve café",
        "日本語のテキスト",
        "🦀 and 👩‍👩‍👧 and ｡",
        "a\u{fffd}b",
        "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}x",
    ] {
        let ids = tokenizer.encode(text, false).expect("ids");
        let cut = |id: &u32| {
            tokenizer.decode(&[*id], false).expect("text").contains(char::REPLACEMENT_CHARACTER)
        };
        assert!(ids.iter().any(cut), "no border cuts a character: {text}");
        let parts = streamed(&ids, false);
        assert_eq!(parts.concat(), text);
        let broken = |part: &String| part.contains(char::REPLACEMENT_CHARACTER);
        assert_eq!(
            parts.iter().any(broken),
            text.contains(char::REPLACEMENT_CHARACTER),
            "{parts:?}"
        );
    }
    let mut state = 1_u64;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    for round in 0..400 {
        // Mostly single bytes, so that most borders split a character; some ids are special.
        let ids: Vec<u32> = (0..40).map(|_| next() % [512, 260][round % 2]).collect();
        let skip = round % 3 == 0;
        assert_eq!(
            streamed(&ids, skip).concat(),
            tokenizer.decode(&ids, skip).expect("text"),
            "{ids:?}"
        );
    }
    // Bytes that never form a character do not accumulate.
    let lone = tokenizer.encode("é", false).expect("ids")[0];
    let mut stream = tokenizer.stream(false);
    let given = (0..500).filter_map(|_| stream.push(lone).expect("text")).collect::<String>();
    assert!(given.chars().count() >= 500 - 3, "{}", given.len());
}

#[test]
fn an_id_beyond_the_vocabulary_is_refused() {
    let error = Tokenizer::load(&golden(NAME), 500).expect_err("a refusal").to_string();
    assert!(error.contains("id 511, but the model's vocabulary ends at 499"), "{error}");
}

#[test]
fn malformed_tokenizers_are_refused() {
    let copy = Copy::of(NAME);
    for bytes in [&b""[..], b"{}", b"[", b"{\"model\":{\"type\":\"BPE\"}}", b"\xff\xfe"] {
        copy.write("tokenizer.json", bytes);
        let error = Tokenizer::load(copy.dir(), 512).expect_err("a refusal").to_string();
        assert!(error.contains("tokenizer.json: is not a tokenizer"), "{error}");
    }
}

#[test]
fn a_folder_without_tokenizer_has_none() {
    assert!(
        import(&golden("mistral-f16")).expect("a model").tokenizer().expect("no error").is_none()
    );
    assert!(model::preset("toy").expect("toy").tokenizer().expect("no error").is_none());
}

#[test]
fn templates_may_be_in_the_tokenizer_config() {
    let copy = Copy::of(NAME);
    copy.remove("chat_template.jinja");
    let none = Tokenizer::load(copy.dir(), 512).expect("a tokenizer");
    let error = none.chat(&chat(&hello())).expect_err("no template").to_string();
    assert!(error.contains("the model has none"), "{error}");
    let list = json!([{ "name": "tools", "template": "no" }, { "name": "default", "template": "{{ eos_token }}" }]);
    for template in [json!("{{ eos_token }}"), list] {
        let config = json!({ "chat_template": template, "eos_token": { "content": "</s>" } });
        copy.write("tokenizer_config.json", config.to_string());
        let tokenizer = Tokenizer::load(copy.dir(), 512).expect("a tokenizer");
        assert_eq!(tokenizer.chat(&chat(&hello())).expect("a prompt"), "</s>");
    }
}

#[test]
fn templates_have_what_transformers_gives_them() {
    let cases = [
        ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ messages[0]['content'] }}", "<hi> & \"bye\""),
        ("{{ messages[0] | tojson }}", "{\"role\": \"user\", \"content\": \"<hi> & \\\"bye\\\"\"}"),
        ("{{ [1, 'é'] | tojson(indent=2) }}", "[\n  1,\n  \"é\"\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "01 Jan 1970"),
        ("{{ ' a b '.strip().split(' ')[1].upper() }}", "B"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{%- endgeneration -%} b", "ab"),
        ("{% if tools is none and documents is none %}ok{% endif %}", "ok"),
        ("{% if thinking is defined %}no{% else %}ok{% endif %}", "ok"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}", "2"),
        ("{{ bos_token + eos_token }}", "<|begin_of_text|><|eot_id|>"),
        ("{{ messages[-1].role }}{{ messages | length }}", "user1"),
    ];
    for (template, expected) in cases {
        assert_eq!(rendered(template).as_deref(), Ok(expected), "{template}");
    }
}

#[test]
fn extra_variables_are_nested_up_to_a_limit() {
    let tokenizer = tokenizer();
    let nested = |depth: usize| {
        let text = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        let value = serde_json::from_str(&text).expect("a list");
        let extra = serde_json::Map::from_iter([("tools".to_owned(), value)]);
        let messages = hello();
        let chat = Chat { extra: Some(&extra), ..chat(&messages) };
        tokenizer.chat(&chat).map_err(|error| error.to_string())
    };
    nested(32).expect("a prompt");
    let refused = nested(33).expect_err("a refusal");
    assert!(refused.contains("nested deeper than 32"), "{refused}");
}

#[test]
fn extra_variables_and_the_time_reach_the_template() {
    let copy = Copy::of(NAME);
    copy.write("chat_template.jinja", "{{ enable_thinking }} {{ strftime_now('%Y-%m-%d %H:%M') }}");
    let tokenizer = Tokenizer::load(copy.dir(), 512).expect("a tokenizer");
    let extra = json!({ "enable_thinking": false }).as_object().expect("an object").clone();
    let now = UNIX_EPOCH + Duration::from_secs(1_709_210_096);
    let messages = hello();
    let chat = Chat { messages: &messages, add_generation_prompt: false, extra: Some(&extra), now };
    assert_eq!(tokenizer.chat(&chat).expect("a prompt"), "False 2024-02-29 12:34");
}

/// Environment variable of a process that renders a template for this binary.
const PART: &str = "AMK_TEST_TEMPLATE";

/// This binary again, running the test that acts as the process.
fn again() -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["text::a_template_may_refuse_and_cannot_run_away", "--exact"]);
    command.args(["--test-threads=1"]).env(PART, "1");
    command
}

#[test]
fn a_template_may_refuse_and_cannot_run_away() {
    if std::env::var_os(PART).is_some() {
        return model::template_process().expect("an answer");
    }
    model::templates_run_in(again);
    let endless =
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}";
    let doubled = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
    let cases = [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        (endless, "longer than 16777216 bytes"),
        (&endless.replace("{{ j }}", ""), "ran longer than 20000000 steps"),
        (doubled, "asked for more than 134217728 bytes"),
        (
            "{% set x = 'x' * 1000000 %}{% for i in range(99) %}{{ x }}{% endfor %}",
            "longer than 16777216 bytes",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ strftime_now('%') }}", "strftime_now"),
        ("{% for %}", "does not compile"),
        ("{{ 1 / 0 }}", "chat template:"),
        ("{% include 'x' %}", "chat template:"),
    ];
    for (template, expected) in cases {
        let error = rendered(template).expect_err(template);
        assert!(error.contains(expected), "{template}: {error}");
    }
    let long = format!("{{# {} #}}", "x".repeat(2 << 20));
    assert!(rendered(&long).expect_err("a refusal").contains("supported: up to 1048576"));
    assert_eq!(rendered("{{ messages[0].role }}{{ eos_token }}").as_deref(), Ok("user<|eot_id|>"));
}
