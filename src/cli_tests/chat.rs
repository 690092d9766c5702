//! Conversations: through pipes, and on a terminal.

use std::io::Write;
use std::process::Stdio;

use super::{Ran, amk, command, folder, golden, ran};

/// `amk chat` on a golden model, with these lines on standard input.
fn chat(lines: &str, more: &[&str]) -> Ran {
    let model = golden("llama3-rope-bf16").display().to_string();
    let args = ["chat", "--model", &model, "--device", "eval", "--max-new-tokens", "4"];
    let mut command = command(&std::env::temp_dir(), &[&args[..], more].concat());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    ran(child.wait_with_output().unwrap())
}

fn roles(ran: &Ran) -> Vec<String> {
    let document = ran.succeeds("amk.chat.v1");
    let messages = document["messages"].as_array().unwrap();
    messages.iter().map(|message| message["role"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_conversation_is_kept_until_it_is_reset() {
    let two = chat("Hello\nAgain\n", &[]);
    assert_eq!(roles(&two), ["user", "assistant", "user", "assistant"]);
    for said in ["/reset forgets", "first after", "tokens/s"] {
        assert!(two.stderr.contains(said), "{said:?} is not in {}", two.stderr);
    }
    // The second answer depends on the first question.
    let messages = two.json()["messages"].clone();
    let alone = chat("Again\n", &[]).json()["messages"].clone();
    assert_ne!(messages[3]["content"], alone[1]["content"]);
    let reset = chat("Hello\n/reset\nAgain\n/exit\nnever\n", &[]);
    assert_eq!(roles(&reset), ["user", "assistant"]);
    assert_eq!(reset.json()["messages"], alone);
    assert!(chat("/quit\n\n", &[]).stderr.contains("there is no /quit"));
    let system = chat("Hello\n", &["--system", "Be brief."]);
    assert_eq!(roles(&system)[0], "system");
}

#[test]
fn a_full_conversation_says_what_to_do() {
    let full = chat("Hello\n", &["--kv-capacity", "2"]);
    assert!(full.stderr.contains("no room for an answer"), "{}", full.stderr);
    assert!(full.stderr.contains("--kv-capacity"), "{}", full.stderr);
    assert!(roles(&full).is_empty());
}

#[test]
fn without_a_chat_template_there_is_no_chat() {
    amk(&["chat", "--model", "toy"]).fails(2, &["toy has no chat template", "amk generate"]);
    // A folder with a tokenizer and without a template.
    let dir = folder();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(golden("llama3-rope-bf16").join(file), dir.path().join(file)).unwrap();
    }
    let name = dir.path().display().to_string();
    amk(&["chat", "--model", &name]).fails(2, &["no chat template", "-Instruct"]);
}
