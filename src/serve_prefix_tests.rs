//! Requests whose prompts begin alike: they share pages of the cache, and answer what they would answer alone.

use super::*;

/// A prompt of this many tokens: the first 512 are those of all.
fn prompt(tokens: usize, last: u64) -> Vec<u64> {
    let mut prompt: Vec<u64> = (0..512).map(|i| i * 7 % 200).collect();
    prompt.resize(tokens, last);
    prompt
}

fn asked(server: &Server, prompt: &[u64]) -> (String, Value) {
    let fields = json!({"model": "toy", "prompt": prompt, "max_tokens": 6, "seed": 4});
    let answer = server.complete(fields).json();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["usage"].clone())
}

fn cached(usage: &Value) -> u64 {
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn chats_with_one_system_prompt_run_it_once() {
    for device in ["cpu", "eval"] {
        let start = |more: &[&str]| {
            let base = ["--model", "toy", "--device", device, "--kv-capacity", "640"];
            Server::start_in(&[&base[..], more].concat(), None)
        };
        let (shared, plain) = (start(&[]), start(&["--no-prefix-cache"]));
        assert_eq!(shared.document["prefix_cache"], true);
        assert_eq!(plain.document["prefix_cache"], false);
        for (last, expected) in [(1, 0), (2, 512), (1, 512), (3, 512)] {
            let prompt = prompt(530, last);
            let (text, usage) = asked(&shared, &prompt);
            assert_eq!((cached(&usage), &usage["prompt_tokens"]), (expected, &json!(530)));
            let (alone, usage) = asked(&plain, &prompt);
            assert_eq!((text, cached(&usage)), (alone, 0), "{device}");
        }
        // Two choices of one prompt: it is counted once.
        let fields = json!({"model": "toy", "prompt": prompt(530, 1), "n": 2, "max_tokens": 1});
        let usage = shared.complete(fields).json()["usage"].clone();
        assert_eq!((cached(&usage), &usage["prompt_tokens"]), (512, &json!(530)));
        // A scored prompt needs the logits of each of its tokens.
        let fields = json!({"model": "toy", "prompt": prompt(530, 1), "max_tokens": 1, "echo": true, "logprobs": 0});
        let scored = shared.complete(fields).json();
        assert_eq!(cached(&scored["usage"]), 0);
        assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 531);
        let text = shared.get("/metrics").body;
        for line in [
            "vllm:prefix_cache_queries_total{model_name=\"toy\"} 3180",
            "vllm:prefix_cache_hits_total{model_name=\"toy\"} 2560",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        let text = plain.get("/metrics").body;
        assert!(text.contains("vllm:prefix_cache_queries_total{model_name=\"toy\"} 0"), "{text}");
    }
}

/// Prompts that come at once: the later ones take over what the first has run meanwhile.
#[test]
fn prompts_that_come_at_once_are_run_once_between_them() {
    let server = Server::start_in(
        &["--model", "toy", "--device", "eval", "--kv-capacity", "640", "--sessions", "8"],
        None,
    );
    let usages: Vec<Value> = std::thread::scope(|scope| {
        let ask = |last| {
            let server = &server;
            move || asked(server, &prompt(513, last)).1
        };
        let clients: Vec<_> = (0..8).map(|last| scope.spawn(ask(last))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let ran: u64 = usages.iter().map(|usage| 513 - cached(usage)).sum();
    // One runs the prompt; each of the others its last token, and what it had begun of a page before the first came.
    assert!((513 + 7..513 + 7 * 129).contains(&ran), "{ran}");
}

/// A request with a seed, alone and beside others that share its beginning or not.
#[test]
fn a_seed_gives_the_same_text_alone_and_under_load() {
    for more in [&[][..], &["--deterministic"]] {
        let base = ["--model", "toy", "--device", "cpu", "--kv-capacity", "640"];
        let server = Server::start_in(&[&base[..], more].concat(), None);
        assert_eq!(server.document["prefix_cache"], more.is_empty());
        let ask = || {
            let fields = json!({"model": "toy", "prompt": prompt(200, 1), "max_tokens": 24, "seed": 4, "temperature": 0.9});
            let answer = server.complete(fields).json();
            (answer["choices"][0]["text"].clone(), answer["system_fingerprint"].clone())
        };
        let alone = ask();
        let kernel = server.document["kernels"][0].as_str().unwrap();
        let print = alone.1.as_str().unwrap();
        assert!(kernel.starts_with("b1-") && print.ends_with(kernel), "{print} of {kernel}");
        std::thread::scope(|scope| {
            let load: Vec<_> = (0..6)
                .map(|i| {
                    let (server, length) = (&server, 100 + 60 * i);
                    scope.spawn(move || asked(server, &prompt(length, i as u64)))
                })
                .collect();
            assert_eq!(ask(), alone);
            load.into_iter().for_each(|client| drop(client.join().unwrap()));
        });
        assert_eq!(ask(), alone);
    }
}
