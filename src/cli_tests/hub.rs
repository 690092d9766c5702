//! Models of the Hugging Face Hub, from a stand-in for it.

use super::{Ran, command, folder, golden, ran, timeless};

#[path = "../../hub/tests/stand_in.rs"]
mod stand_in;

fn with_hub(cache: &std::path::Path, endpoint: &str, offline: &str, args: &[&str]) -> Ran {
    let mut command = command(cache, args);
    command.env("HF_HUB_CACHE", cache.join("hub")).env("HF_ENDPOINT", endpoint);
    ran(command.env("HF_HUB_OFFLINE", offline).env_remove("HF_TOKEN").output().unwrap())
}

#[test]
fn a_model_of_the_hub_is_downloaded_and_then_found_without_a_network() {
    let cache = folder();
    let server = stand_in::Hub::with(&golden("llama3-rope-bf16"));
    let args = ["generate", "--model", "org/model", "--prompt", "Hello", "--device", "eval"];
    let run = |offline| with_hub(cache.path(), &server.endpoint, offline, &args);
    run("1").fails(
        3,
        &[
            "org/model is no folder here and not in the cache",
            "HF_HUB_OFFLINE",
            "hf download org/model",
        ],
    );
    let first = run("0");
    assert!(first.stderr.contains("downloading org/model"), "{}", first.stderr);
    let first = first.succeeds("amk.generate.v1");
    assert_eq!(first["model"], "model");
    let again = run("1");
    assert!(!again.stderr.contains("downloading"), "{}", again.stderr);
    assert_eq!(timeless(again.succeeds("amk.generate.v1")), timeless(first));
}

#[test]
fn the_hubs_refusals_are_failures_with_a_remedy() {
    let cache = folder();
    let server = stand_in::Hub::with(&golden("llama3-rope-bf16"));
    let run =
        || with_hub(cache.path(), &server.endpoint, "0", &["evaluate", "--model", "org/model"]);
    server.state().refusal = Some((403, "GatedRepo"));
    run().fails(3, &["org/model", "accept its terms", "HF_TOKEN"]);
    server.state().refusal = Some((404, "RepoNotFound"));
    run().fails(2, &["there is no folder org/model here, and no model org/model on the Hub"]);
    server.state().refusal = None;
    let wrong = "0".repeat(64);
    server.state().files.get_mut("model.safetensors").unwrap().etag = wrong;
    run().fails(4, &["model.safetensors", "SHA-256"]);
}
