//! Answers under a grammar, and calls of tools, from a client's side. The model has random weights.

use super::hostile::folder;
use super::*;

/// A template with tools in the form of Hermes and Qwen, whose prompts show what it was given.
const TEMPLATE: &str = "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}{% for m in messages %}\
    <{{ m.role }}{{ m.tool_call_id }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}\
    </tool_call>{% endfor %}{% endfor %}<assistant>";

fn schema() -> Value {
    json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"}}, "required": ["n", "ok"], "additionalProperties": false})
}

fn fits(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(jsonschema::is_valid(&schema(), &value), "{text}");
}

/// The data of the events of a stream.
fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.status, 200, "{}", answer.body);
    let lines = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn chat(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 120});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[test]
fn formats_hold_in_every_api() {
    let server = Server::start(&["--model", GOLDEN, "--device", "cpu"]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema(), "strict": true}});
    let ask = |fields: Value| server.post("/v1/chat/completions", &chat(fields));
    for (seed, temperature) in [(1, 0), (1, 1), (2, 1), (3, 1)] {
        let fields = json!({"response_format": format, "seed": seed, "temperature": temperature});
        let choice = ask(fields).json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        fits(choice["message"]["content"].as_str().unwrap());
    }
    // Two choices, streamed, each with log probabilities of the model.
    let fields =
        json!({"response_format": format, "seed": 5, "n": 2, "stream": true, "logprobs": true});
    let mut texts = [String::new(), String::new()];
    for event in events(&ask(fields)) {
        let choice = &event["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index] += choice["delta"]["content"].as_str().unwrap_or("");
    }
    texts.iter().for_each(|text| fits(text));
    assert_ne!(texts[0], texts[1], "their states are their own");
    // A text that is cut off says so.
    let object = json!({"response_format": {"type": "json_object"}, "max_tokens": 1});
    let cut = &ask(object).json()["choices"][0];
    assert_eq!(
        (&cut["finish_reason"], &cut["message"]["content"]),
        (&json!("length"), &json!("{"))
    );
    // The format that an answer names is the one that was asked for.
    let format = json!({"format": {"type": "json_schema", "name": "a", "schema": schema()}});
    let body = json!({"input": "Hello", "text": format, "max_output_tokens": 120});
    let answer = server.post("/v1/responses", &body).json();
    fits(answer["output"][0]["content"][0]["text"].as_str().unwrap());
    assert_eq!(answer["text"], format);
    let plain = server.post("/v1/responses", &json!({"input": "x", "max_output_tokens": 1})).json();
    assert_eq!(plain["text"]["format"]["type"], "text");
    let body = json!({"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]});
    let text = server.post("/v1/messages", &body).json()["content"][0]["text"].clone();
    assert!(text == "yes" || text == "no", "{text}");
    let text = server.complete(json!({"structured_outputs": {"regex": "[0-9]{3}"}})).text();
    assert!(text.len() == 3 && text.parse::<u16>().is_ok(), "{text}");
}

#[test]
fn formats_that_cannot_hold_are_refused() {
    let server = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let ask = |fields: Value| server.post("/v1/chat/completions", &chat(fields));
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}});
    let at = "response_format.json_schema.schema";
    let why = ask(format(json!({"type": "object", "not": {}}))).refuses(400, Some(at));
    assert!(why.contains("not"), "{why}");
    let why = ask(format(json!({"oneOf": [{"type": "string"}, {"minLength": 2}]})))
        .refuses(400, Some(at));
    assert!(why.contains("anyOf"), "{why}");
    ask(json!({"response_format": {"type": "json_schema"}})).refuses(400, Some("response_format"));
    ask(json!({"response_format": {"type": "xml"}})).refuses(400, Some("response_format"));
    ask(json!({"response_format": {"type": "text", "colour": 1}}))
        .refuses(400, Some("response_format.colour"));
    let both =
        json!({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}});
    ask(both).refuses(400, Some("structured_outputs"));
    ask(json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}))
        .refuses(400, Some("structured_outputs"));
    ask(json!({"structured_outputs": {"regex": "("}}))
        .refuses(400, Some("structured_outputs.regex"));
    ask(json!({"structured_outputs": {"grammar": "start: \"a\""}}))
        .refuses(400, Some("structured_outputs.grammar"));
    let least = json!({"response_format": {"type": "json_object"}, "min_tokens": 3});
    ask(least).refuses(400, Some("min_tokens"));
    assert_eq!(ask(json!({"response_format": {"type": "text"}, "max_tokens": 1})).status, 200);
    let toy = Server::start(&["--model", "toy", "--device", "eval"]);
    let body = json!({"prompt": [1], "response_format": {"type": "json_object"}});
    let why = toy.post("/v1/completions", &body).refuses(400, Some("response_format"));
    assert!(why.contains("tokenizer"), "{why}");
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "Adds", "parameters": schema()}})
}

#[test]
fn tools_are_called_in_chats_and_messages() {
    let folder = folder(TEMPLATE);
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "eval"]);
    let ask = |fields: Value| server.post("/v1/chat/completions", &chat(fields));
    let tools = json!([tool("add"), tool("set")]);
    let named = json!({"type": "function", "function": {"name": "set"}});
    for choice in [json!("required"), named] {
        let fields =
            json!({"tools": tools, "tool_choice": choice, "seed": 4, "parallel_tool_calls": false});
        let whole = ask(fields.clone()).json()["choices"][0].clone();
        assert_eq!(whole["finish_reason"], "tool_calls", "{whole}");
        assert_eq!(whole["message"]["content"], Value::Null);
        let calls = whole["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        fits(calls[0]["function"]["arguments"].as_str().unwrap());
        if choice != "required" {
            assert_eq!(calls[0]["function"]["name"], "set");
        }
        let mut streamed = fields;
        streamed["stream"] = json!(true);
        let events = events(&ask(streamed));
        let deltas: Vec<&Value> =
            events.iter().map(|event| &event["choices"][0]["delta"]).collect();
        let call = deltas.iter().find_map(|delta| delta["tool_calls"].get(0)).unwrap();
        assert_eq!((&call["index"], &call["type"]), (&json!(0), &json!("function")));
        assert_eq!(call["function"], calls[0]["function"]);
        assert!(deltas.iter().all(|delta| delta["content"].as_str().unwrap_or("").is_empty()));
        let last = events.last().unwrap();
        assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
    }
    let tools = json!([{"name": "add", "description": "Adds", "input_schema": schema()}]);
    let mut body = json!({"max_tokens": 120, "seed": 4, "tools": tools, "tool_choice": {"type": "tool", "name": "add"},
        "messages": [{"role": "user", "content": "Hello"}]});
    let whole = server.post("/v1/messages", &body).json();
    let block = &whole["content"][0];
    assert_eq!(
        (&whole["stop_reason"], &block["type"], &block["name"]),
        (&json!("tool_use"), &json!("tool_use"), &json!("add"))
    );
    fits(&block["input"].to_string());
    body["stream"] = json!(true);
    let events = events(&server.post("/v1/messages", &body));
    let types: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    let expected = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(types, expected);
    assert_eq!(events[2]["delta"]["partial_json"], block["input"].to_string());
    assert_eq!(events[4]["delta"]["stop_reason"], "tool_use");
}

#[test]
fn tools_are_called_in_responses() {
    let folder = folder(TEMPLATE);
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "eval"]);
    let tools = json!([{"type": "function", "name": "add", "description": "Adds", "parameters": schema(), "strict": true}]);
    let mut body = json!({"input": "Hello", "max_output_tokens": 120, "seed": 4, "tools": tools,
        "tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": false});
    let whole = server.post("/v1/responses", &body).json();
    let call = &whole["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("add")), "{whole}");
    fits(call["arguments"].as_str().unwrap());
    assert_eq!((&whole["tools"], &whole["status"]), (&tools, &json!("completed")));
    body["stream"] = json!(true);
    let events = events(&server.post("/v1/responses", &body));
    let types: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(types, expected);
    assert_eq!(events[3]["delta"], call["arguments"]);
    assert_eq!(events[6]["response"]["output"][0]["arguments"], call["arguments"]);
    // A result is read, and calls that were made together are of one message.
    let (call, other) = (call.clone(), {
        let mut other = call.clone();
        other["call_id"] = json!("c2");
        other
    });
    let output = |id: &Value| json!({"type": "function_call_output", "call_id": id, "output": "2"});
    let input = json!([{"role": "user", "content": "Hello"}, call, other, output(&call["call_id"]), output(&json!("c2"))]);
    let ask = json!({"input": input, "max_output_tokens": 1});
    let used = server.post("/v1/responses", &ask).json()["usage"]["input_tokens"].clone();
    let made = |id: &Value| json!({"id": id, "type": "function", "function": {"name": "add", "arguments": call["arguments"]}});
    let messages = json!([{"role": "user", "content": "Hello"},
        {"role": "assistant", "content": null, "tool_calls": [made(&call["call_id"]), made(&json!("c2"))]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "2"}, {"role": "tool", "tool_call_id": "c2", "content": "2"}]);
    let plain = server.post("/tokenize", &json!({"messages": messages})).json();
    assert_eq!(used, plain["count"]);
    let odd = json!({"input": [{"type": "reasoning", "summary": []}]});
    server.post("/v1/responses", &odd).refuses(400, Some("input[0].type"));
}

/// Mistral's marker is a special token, which is no text: the grammar names it by its id, and the answer shows it.
#[test]
fn a_call_may_begin_with_a_special_token() {
    let folder = folder(
        "{% for t in tools or [] %}[AVAILABLE_TOOLS]{{ t | tojson }}{% endfor %}[TOOL_CALLS]",
    );
    let path = folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(
        text.matches("<|end_header_id|>").count(),
        2,
        "its name, and its place in the vocabulary"
    );
    std::fs::write(&path, text.replace("<|end_header_id|>", "[TOOL_CALLS]")).unwrap();
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "cpu"]);
    let fields = json!({"tools": [tool("add")], "tool_choice": "required", "parallel_tool_calls": false, "seed": 2,
        "logprobs": true});
    let answer = server.post("/v1/chat/completions", &chat(fields)).json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    fits(choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap());
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["logprobs"]["content"][0]["token"], "[TOOL_CALLS]");
}

/// The prompt that messages and tools make, as `/tokenize` shows it.
#[test]
fn calls_and_results_reach_the_template() {
    let folder = folder(TEMPLATE);
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "eval"]);
    let call = json!({"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"n\": 1}"}});
    let messages = json!([{"role": "user", "content": "Go"}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"}]);
    let ids = server
        .post("/tokenize", &json!({"messages": messages, "tools": [tool("add")]}))
        .json()["tokens"]
        .clone();
    let prompt = server.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    let rest = prompt.strip_prefix(&format!("<tools>[{}", "{\"type\": \"function\", ")).unwrap();
    assert!(rest.ends_with(
        "<user>Go<assistant><tool_call>{\"name\": \"add\", \"arguments\": {\"n\": 1}}</tool_call><toolc1>2<assistant>"
    ), "{prompt}");
    // The same conversation in Anthropic's form has the same number of tokens, and neither needs the tools again.
    let blocks = json!([{"role": "user", "content": "Go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}]}]);
    let answer = server.post("/v1/messages", &json!({"messages": blocks, "max_tokens": 1})).json();
    let plain = server.post("/tokenize", &json!({"messages": messages})).json();
    assert_eq!(answer["usage"]["input_tokens"], plain["count"]);
    let counted = server.post("/v1/messages/count_tokens", &json!({"messages": blocks})).json();
    assert_eq!(counted, json!({"input_tokens": plain["count"]}));
    // With `none` the template is not given the tools.
    let fields = json!({"messages": messages, "tools": [tool("add")], "tool_choice": "none", "max_tokens": 1});
    let answer = server.post("/v1/chat/completions", &fields).json();
    assert_eq!(answer["usage"]["prompt_tokens"], plain["count"]);
}

#[test]
fn the_page_is_served_and_may_load_nothing() {
    let server = Server::start(&["--model", "toy", "--device", "eval", "--api-key", "sesame"]);
    let (page, other) = (server.get("/"), server.get("/"));
    assert_eq!(page.status, 200, "without the key, for which it asks");
    assert!(page.head.contains("content-type: text/html; charset=utf-8"), "{}", page.head);
    assert!(page.head.contains("x-content-type-options: nosniff"), "{}", page.head);
    let policy = |page: &Answer| {
        let line =
            page.head.lines().find_map(|line| line.strip_prefix("content-security-policy: "));
        line.unwrap().to_owned()
    };
    assert!(
        policy(&page).starts_with("default-src 'none'; script-src 'nonce-"),
        "{}",
        policy(&page)
    );
    assert!(!policy(&page).contains("unsafe") && policy(&page) != policy(&other));
    let nonce = policy(&page).split_once("nonce-").unwrap().1[..32].to_owned();
    assert_eq!(page.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "style and script");
    assert!(page.body.len() < 12_000, "{} bytes", page.body.len());
    for loaded in ["http:", "https:", "//", "src=", "@import", "url("] {
        assert!(!page.body.contains(loaded), "{loaded}");
    }
    assert_eq!(server.post("/", &json!({})).status, 405, "only to look at");
}

#[test]
fn wrong_tools_are_refused() {
    let plain = Server::start(&["--model", GOLDEN, "--device", "eval"]);
    let why = plain
        .post("/v1/chat/completions", &chat(json!({"tools": [tool("f")]})))
        .refuses(400, Some("tools"));
    assert!(why.contains("template"), "{why}");
    let result = json!({"messages": [{"role": "tool", "tool_call_id": "x", "content": "1"}]});
    plain.post("/v1/chat/completions", &chat(result)).refuses(400, Some("messages[0]"));
    let folder = folder(TEMPLATE);
    let server = Server::start(&["--model", folder.path().to_str().unwrap(), "--device", "eval"]);
    let ask = |fields: Value| server.post("/v1/chat/completions", &chat(fields));
    ask(json!({"tools": [tool("a b")]})).refuses(400, Some("tools[0].function.name"));
    ask(json!({"tools": [tool("f"), tool("f")]})).refuses(400, Some("tools"));
    ask(json!({"tools": [{"type": "web_search"}]})).refuses(400, Some("tools[0].function"));
    ask(json!({"tools": [tool("f")], "tool_choice": "always"})).refuses(400, Some("tool_choice"));
    let other = json!({"type": "function", "function": {"name": "g"}});
    ask(json!({"tools": [tool("f")], "tool_choice": other})).refuses(400, Some("tool_choice"));
    ask(json!({"tool_choice": "required"})).refuses(400, Some("tool_choice"));
    let mut wrong = tool("f");
    wrong["function"]["parameters"] = json!({"type": "object", "not": {}});
    let why = ask(json!({"tools": [wrong], "tool_choice": "required"})).refuses(400, Some("tools"));
    assert!(why.contains("not"), "{why}");
    let format = json!({"tools": [tool("f")], "response_format": {"type": "json_object"}});
    ask(format).refuses(400, Some("response_format"));
    let call =
        json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}});
    let messages = json!([{"role": "assistant", "content": "", "tool_calls": [call]}]);
    ask(json!({"messages": messages})).refuses(400, Some("messages[0].tool_calls[0]"));
    ask(json!({"messages": [{"role": "tool", "content": "1"}]}))
        .refuses(400, Some("messages[0].tool_call_id"));
    let tools = json!([{"type": "bash_20250124", "name": "bash"}]);
    let body =
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": tools});
    server.post("/v1/messages", &body).refuses(400, Some("tools[0].type"));
    plain.complete(json!({"tools": [tool("f")]})).refuses(400, Some("tools"));
}
