//! Tenants with API keys of their own.

use super::*;

#[test]
fn each_tenant_has_its_key_its_limits_and_its_figures() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("tenants.json");
    let list = json!({"tenants": [
        {"name": "web", "key": "one", "share": 3},
        {"name": "batch", "key": "two", "tokens_per_minute": 10},
    ]});
    std::fs::write(&file, list.to_string()).unwrap();
    let server = Server::start(&[
        "--model",
        GOLDEN,
        "--device",
        "eval",
        "--tenants",
        file.to_str().unwrap(),
    ]);
    let body = request(json!({})).to_string();
    let ask = |key: &str| {
        let head = format!("{}\r\nauthorization: Bearer {key}", head("/v1/completions"));
        server.ask(&head, &body)
    };
    assert_eq!(server.post("/v1/completions", &request(json!({}))).status, 401);
    ask("three").refuses(401, None);
    let text = ask("one").text();
    assert_eq!(ask("one").text(), text);
    assert_eq!(ask("two").text(), text, "who asks does not change the answer");
    // It has used 15 of its 10 tokens.
    let why = ask("two").refuses(429, None);
    assert!(why.contains("batch has used its 10 tokens per minute"), "{why}");
    let metrics = server.ask("GET /metrics HTTP/1.0\r\nauthorization: Bearer one", "").body;
    for sample in [
        "amk_tenant_requests_total{model_name=\"llama3-rope-bf16\",tenant=\"web\"} 2",
        "amk_tenant_refused_total{model_name=\"llama3-rope-bf16\",tenant=\"batch\"} 1",
        "amk_tenant_tokens_total{model_name=\"llama3-rope-bf16\",tenant=\"web\"} 30",
        "amk_tenant_skew{model_name=\"llama3-rope-bf16\",tenant=\"batch\"} 1.3333333333333333",
    ] {
        assert!(metrics.contains(sample), "{sample}: {metrics}");
    }
    let wrong = home.path().join("wrong.json");
    std::fs::write(&wrong, r#"{"tenants": [{"name": "", "key": "1"}]}"#).unwrap();
    let base = ["serve", "--model", GOLDEN, "--device", "eval", "--addr", "127.0.0.1:0"];
    let arguments = [&base[..], &["--tenants", wrong.to_str().unwrap()]].concat();
    amk(&arguments).fails(2, &["tenants[0]: `name` is empty"]);
}
