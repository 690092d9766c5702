//! A server on several GPUs, on the reference VM: its answers are those of one GPU.

use super::*;

/// A server of a golden model on as many GPUs.
fn server(gpus: &str, more: &[&str]) -> Server {
    let place = ["--model", GOLDEN, "--device", "cpu", "--gpus", gpus, "--kv-capacity", "640"];
    Server::start(&[&place[..], more].concat())
}

/// The text of a streamed answer, and how many pieces it came in.
fn streamed(server: &Server, fields: &Value) -> (String, usize) {
    let mut fields = request(fields.clone());
    fields["stream"] = json!(true);
    let answer = server.post("/v1/completions", &fields);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let chunks = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let chunks = chunks.filter(|chunk| *chunk != "[DONE]");
    let texts: Vec<String> = chunks
        .filter_map(|chunk| {
            serde_json::from_str::<Value>(chunk).unwrap()["choices"][0]["text"]
                .as_str()
                .map(str::to_owned)
        })
        .filter(|text| !text.is_empty())
        .collect();
    (texts.concat(), texts.len())
}

/// Greedy and sampled requests of every priority, with filters and penalties.
fn requests() -> Vec<Value> {
    let all = (0..6_u64).map(|seed| {
        json!({
            "seed": seed,
            "max_tokens": 16,
            "logit_bias": {"1": -100, "2": -100},
            "prompt": vec![9 + seed; 1 + seed as usize * 5],
            "service_tier": (["flex", "default", "priority"][seed as usize % 3]),
            "temperature": ([0.0, 0.8, 1.1][seed as usize / 2]),
            "top_p": 0.9,
            "top_k": ([0, 20][seed as usize % 2]),
            "repetition_penalty": 1.2,
        })
    });
    all.collect()
}

/// Each request alone on one GPU; on two and four all of them at once, and one as a stream.
#[test]
fn answers_are_those_of_one_gpu() {
    let one = server("1", &[]);
    let alone: Vec<String> =
        requests().into_iter().map(|fields| one.complete(fields).text()).collect();
    assert!(alone.iter().all(|text| !text.is_empty()), "{alone:?}");
    for (gpus, target) in [("2", "h200x2"), ("4", "h200x4")] {
        let several = server(gpus, &["--sessions", "3"]);
        assert_eq!(several.document["target"], target);
        assert_eq!(several.document["batch"], 1);
        let together: Vec<String> = std::thread::scope(|scope| {
            let ask = |fields| several.complete(fields).text();
            let clients: Vec<_> =
                requests().into_iter().map(|fields| scope.spawn(move || ask(fields))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        assert_eq!(together, alone, "{gpus}");
        let (text, pieces) = streamed(&several, &requests()[3]);
        assert_eq!(text, alone[3], "{gpus}");
        assert!(pieces > 4, "{pieces} pieces of {text:?}");
        assert_eq!(several.inside(), 0);
    }
}

/// Pages of the cache hold the heads of all devices: prompts that begin alike share them.
#[test]
fn prompts_that_begin_alike_share_pages_on_several_gpus() {
    let ask = |server: &Server, last: u64| {
        let mut prompt: Vec<u64> = (0..256).map(|i| 3 + i * 7 % 200).collect();
        prompt.push(last);
        let fields = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0.7});
        let answer = server.complete(fields).json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0]["text"].clone(), cached)
    };
    let (one, two) = (server("1", &["--no-prefix-cache"]), server("2", &[]));
    for (last, cached) in [(5, 0), (6, 256)] {
        assert_eq!(ask(&two, last), (ask(&one, last).0, cached), "{last}");
    }
}

/// A client that goes frees the place; a signal ends the server after the answer that is under way.
#[test]
fn a_server_of_two_gpus_is_left_and_ended() {
    let mut server = server("2", &["--metrics", "127.0.0.1:0"]);
    let long = json!({"max_tokens": 500, "stream": true, "logit_bias": {"1": -100, "2": -100}});
    let begin = |tokens: u64| {
        let mut fields = request(long.clone());
        fields["max_tokens"] = json!(tokens);
        let stream = server.send(&head("/v1/completions"), &fields.to_string());
        let mut lines = BufReader::new(stream).lines();
        assert!(lines.next().unwrap().unwrap().contains("200"));
        assert!(lines.any(|line| line.unwrap().starts_with("data: ")), "a first token");
        lines
    };
    drop(begin(500));
    wait_for("the request goes on for nobody", || server.cancelled() == 1);
    let lines = begin(40);
    server.interrupt();
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line.contains("\"length\"")), "{rest:?}");
    assert_eq!(server.end(), 0);
}

#[test]
fn a_batch_needs_gpus_whether_one_or_several() {
    let serve = ["serve", "--model", "toy", "--device", "cpu", "--addr", "127.0.0.1:0"];
    let batch = ["--gpus", "2", "--batch", "4"];
    amk(&[&serve[..], &batch].concat()).fails(2, &["--batch is for --device cuda"]);
}
