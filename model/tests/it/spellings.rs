//! Configurations as different programs and versions write them, each with what transformers makes of it. What changes
//! the arithmetic and is not followed is refused.

use std::path::Path;

use ir::{Graph, decode};
use model::{Model, import};
use serde_json::{Value, json};

use crate::folder::{Copy, safetensors, split};

fn copy(name: &str) -> Copy {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus");
    let families = corpus.join("families").join(name);
    Copy::of_folder(&if families.exists() { families } else { corpus.join("golden").join(name) })
}

fn with(name: &str, fields: Value) -> Copy {
    let copy = copy(name);
    copy.set(fields);
    copy
}

fn loaded(copy: &Copy) -> Model {
    import(copy.dir()).unwrap_or_else(|error| panic!("{error}"))
}

fn graph(name: &str, fields: Value) -> Graph {
    loaded(&with(name, fields)).graph
}

fn windows(graph: &Graph) -> Vec<Option<u32>> {
    graph.layers.iter().map(|layer| layer.attention.body.window).collect()
}

#[test]
fn smollm3_has_windows_where_it_does_not_rotate() {
    let on = json!({ "use_sliding_window": true, "sliding_window": 6, "max_window_layers": 0 });
    assert_eq!(windows(&graph("smollm3-bf16", on.clone())), [None, Some(6), None, Some(6)]);
    let mut none = on.clone();
    none["sliding_window"] = Value::Null;
    assert_eq!(windows(&graph("smollm3-bf16", none)), [None; 4]);
    let mut listed = on;
    let (full, sliding) = ("full_attention", "sliding_attention");
    listed["layer_types"] = json!([sliding, full, full, sliding]);
    assert_eq!(windows(&graph("smollm3-bf16", listed.clone())), [Some(6), None, None, Some(6)]);
    let copy = with("smollm3-bf16", listed);
    copy.config(|config| {
        config.remove("sliding_window");
    });
    let expected =
        r#"DIR/config.json: "sliding_window" is missing, but there are layers with a window"#;
    assert_eq!(copy.refusal(), expected);
}

/// Checks what is said of folders whose configuration has other fields: what transformers reads otherwise is refused.
fn refused(cases: impl IntoIterator<Item = (&'static str, Value, &'static str)>) {
    for (name, fields, expected) in cases {
        let text = with(name, fields).refusal();
        assert_eq!(text, format!("DIR/config.json: {expected}"), "{name}");
    }
}

#[test]
fn windows_that_contradict_each_other_are_refused() {
    let types = json!(["sliding_attention", "full_attention"]);
    let off = json!({ "use_sliding_window": false, "sliding_window": 4, "layer_types": types });
    let none = json!({ "use_sliding_window": true, "sliding_window": null, "layer_types": types });
    let null = "\"sliding_window\" is null, but there are layers with a window";
    refused([
        (
            "qwen2-bias-bf16",
            off,
            "\"layer_types\" has sliding_attention although use_sliding_window is not true",
        ),
        ("qwen2-bias-bf16", none, null),
        ("gemma2-bf16", json!({ "sliding_window": null }), null),
        (
            "gemma2-bf16",
            json!({ "sliding_window_pattern": 3 }),
            "\"sliding_window_pattern\" is 3; supported: null",
        ),
    ]);
}

#[test]
fn rotary_parameters_that_are_not_followed_are_refused() {
    let plain = json!({ "rope_type": "default" });
    let kinds = json!({ "full_attention": plain, "sliding_attention": plain });
    let flat = json!({ "rope_scaling": null, "rope_parameters": { "rope_theta": 500.0 } });
    let (zeros, ones) = (vec![0; 12], vec![1; 12]);
    let zeros = json!({ "type": "su", "short_factor": zeros, "long_factor": ones });
    let linear = json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } });
    refused([
        (
            "gemma3-bf16",
            flat,
            "\"rope_parameters\" has neither full_attention nor sliding_attention",
        ),
        (
            "gemma3-bf16",
            json!({ "rope_local_base_freq": 0.0 }),
            "\"rope_local_base_freq\" is 0; supported: above 1 and up to 1e15",
        ),
        (
            "llama-yarn-bf16",
            json!({ "rope_theta": 1.0 }),
            "\"rope_theta\" is 1; supported: above 1 and up to 1e15",
        ),
        (
            "glm4-bf16",
            json!({ "rope_parameters": kinds }),
            "\"rope_parameters.full_attention\" is an object; layers of this family have one rotary embedding",
        ),
        ("phi3-bf16", linear, "\"rope_scaling.type\" is \"linear\"; supported: default, longrope"),
        (
            "phi4-longrope-bf16",
            json!({ "rope_scaling": zeros }),
            "\"rope_scaling.short_factor\" has 0e0; supported: 1e-6 to 1e9",
        ),
    ]);
}

#[test]
fn scalars_and_lists_that_are_not_followed_are_refused() {
    let interval = json!({ "no_rope_layers": null, "no_rope_layer_interval": 0 });
    refused([
        (
            "llama-tied-f32",
            json!({ "is_causal": false }),
            "\"is_causal\" is false; supported: true",
        ),
        (
            "gemma2-bf16",
            json!({ "query_pre_attn_scalar": -1 }),
            "\"query_pre_attn_scalar\" is -1; it must be above 0",
        ),
        (
            "gemma3-bf16",
            json!({ "attn_logit_softcapping": 3.0 }),
            "\"attn_logit_softcapping\" is 3.0; supported: null",
        ),
        ("smollm3-bf16", interval, "\"no_rope_layer_interval\" is 0; it must be at least 1"),
        (
            "smollm3-bf16",
            json!({ "no_rope_layers": [] }),
            "\"no_rope_layers\" has 0 entries for 4 layers",
        ),
        (
            "gpt-oss-bf16",
            json!({ "swiglu_alpha": 1.5 }),
            "\"swiglu_alpha\" differs from 1.702; supported: 1.702",
        ),
    ]);
}

/// What can be imported can be lowered.
#[test]
fn sizes_that_no_schedule_takes_are_refused() {
    let heads = json!({ "num_attention_heads": 65, "num_key_value_heads": 1 });
    let chosen = json!({ "num_local_experts": 64, "num_experts_per_tok": 17 });
    refused([
        (
            "glm4-bf16",
            heads,
            "\"num_key_value_heads\" is 1 for 65 heads, 65 for each; supported: up to 64",
        ),
        ("qwen3-moe-bf16", chosen, "\"num_experts_per_tok\" is 17; supported: 1 to 16"),
        (
            "olmoe-bf16",
            json!({ "hidden_size": 60, "head_dim": 16 }),
            "\"hidden_size\" is 60; with experts: multiples of 8",
        ),
        (
            "mixtral-bf16",
            json!({ "num_local_experts": 1, "num_experts_per_tok": 1 }),
            "\"num_experts\" is 1; supported: 2 to 1024",
        ),
        (
            "qwen3-moe-bf16",
            json!({ "mlp_only_layers": [-1] }),
            "\"mlp_only_layers\" has an entry that is not the number of a layer",
        ),
    ]);
}

#[test]
fn a_rotary_parameter_inside_wins_over_one_outside() {
    let inside =
        json!({ "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5 });
    let both =
        json!({ "rope_parameters": inside, "partial_rotary_factor": 1.0, "rope_theta": 77.0 });
    let (both, plain) = (graph("glm4-bf16", both), graph("glm4-bf16", json!({})));
    assert_eq!((both.inv_freq, both.tensors), (plain.inv_freq, plain.tensors));
}

#[test]
fn layers_with_a_window_have_the_base_of_their_kind() {
    let base = |name: &str, fields: Value| {
        let graph = graph(name, fields);
        let half = graph.head_dim / 2;
        let sliding = graph.rotary_of(&graph.layers[0])[1];
        (1.0 / f64::from(sliding)).powi(half as i32).round() as u32
    };
    let near = |found: u32, want: u32| {
        assert!(found.abs_diff(want) <= want / 10_000, "{found}, not {want}")
    };
    let full = json!({ "full_attention": { "rope_type": "default", "rope_theta": 1e6 } });
    let gemma = |more: Value| {
        let mut fields =
            json!({ "rope_scaling": null, "rope_theta": null, "rope_parameters": full });
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fields
    };
    near(base("gemma3-bf16", gemma(json!({ "rope_local_base_freq": null }))), 10_000);
    near(base("gemma3-bf16", gemma(json!({ "rope_local_base_freq": 300.0 }))), 300);
    let scaled = json!({ "rope_type": "linear", "factor": 2.0 });
    near(base("olmo3-bf16", json!({ "rope_parameters": null, "rope_scaling": scaled })), 500_000);
    let theta = json!({ "rope_parameters": null, "rope_scaling": scaled, "rope_theta": 300.0 });
    near(base("olmo3-bf16", theta), 300);
}

#[test]
fn a_truncation_of_null_is_none() {
    let yarn = |truncate: Value| {
        let scaling = json!({ "rope_type": "yarn", "factor": 8.0, "truncate": truncate });
        graph("llama-yarn-bf16", json!({ "rope_scaling": scaling })).inv_freq
    };
    assert_eq!(yarn(Value::Null), yarn(false.into()));
    assert_ne!(yarn(Value::Null), yarn(true.into()));
}

#[test]
fn longrope_has_three_names() {
    let longrope = graph("phi4-longrope-bf16", json!({}));
    for name in ["su", "yarn", "longrope"] {
        let copy = copy("phi4-longrope-bf16");
        copy.config(|config| config["rope_scaling"]["type"] = name.into());
        assert_eq!(loaded(&copy).graph.inv_freq, longrope.inv_freq, "{name}");
    }
}

/// Puts a matrix for `lm_head` into a folder that has none: the embedding, or twice of it.
fn with_head(copy: &Copy, twice: bool) {
    let (mut header, data) = split(&copy.read("model.safetensors"));
    let info = header["model.embed_tokens.weight"].clone();
    let at = |i: usize| info["data_offsets"][i].as_u64().expect("an offset") as usize;
    let mut head = data[at(0)..at(1)].to_vec();
    if twice {
        let values = head.as_chunks::<4>().0.iter().map(|&bytes| 2.0 * f32::from_le_bytes(bytes));
        head = values.flat_map(f32::to_le_bytes).collect();
    }
    let end = data.len() + head.len();
    header.insert(
        "lm_head.weight".to_owned(),
        json!({ "dtype": "F32", "shape": info["shape"], "data_offsets": [data.len(), end] }),
    );
    let all = [data, head].concat();
    copy.write("model.safetensors", safetensors(&Value::Object(header).to_string(), &all));
}

#[test]
fn a_stored_head_of_its_own_is_used() {
    let copied = copy("llama-tied-f32");
    with_head(&copied, false);
    assert!(loaded(&copied).graph.tied());
    let own = copy("llama-tied-f32");
    with_head(&own, true);
    let model = loaded(&own);
    let graph = &model.graph;
    let [mut embed, mut head] = [vec![0.0; 8], vec![0.0; 8]];
    decode(graph.dtype, &model.weights.bytes(graph.embed)[..32], &mut embed);
    decode(graph.dtype, &model.weights.bytes(graph.lm_head)[..32], &mut head);
    assert!(
        embed.iter().zip(&head).all(|(embed, head)| 2.0 * embed == *head),
        "{embed:?} {head:?}"
    );
    let notes = model.notes.join("\n");
    assert!(notes.contains("lm_head.weight is used"), "{notes}");
}

/// A search without a GPU says at once that no GPU will take its result.
#[test]
fn heads_without_a_kernel_are_noted() {
    // The same matrices, cut into other heads.
    let heads = json!({ "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24 });
    let noted = |fields: Value| loaded(&with("mistral-f16", fields)).notes.join(" ");
    assert!(noted(heads).contains("no kernel: heads of 24 elements"));
    assert!(!noted(json!({})).contains("no kernel"));
}

#[test]
fn language_models_of_other_wrappers() {
    for (wrapper, name) in [
        ("idefics3", "llama-tied-f32"),
        ("internvl", "qwen3-qknorm-bf16"),
        ("llava", "mistral-f16"),
        ("llava_next", "llama-tied-f32"),
        ("llava_onevision", "qwen2-bias-bf16"),
        ("mistral3", "mistral-f16"),
        ("smolvlm", "llama3-rope-bf16"),
    ] {
        let copy = copy(name);
        let plain = loaded(&copy).graph;
        let text: Value = serde_json::from_slice(&copy.read("config.json")).expect("JSON");
        copy.write(
            "config.json",
            json!({ "model_type": wrapper, "text_config": text }).to_string(),
        );
        assert_eq!(loaded(&copy).graph.layers, plain.layers, "{wrapper} of {name}");
    }
    let unread = json!({ "model_type": "ministral3", "scoring_func": "x", "n_shared_experts": 2 });
    let inside = copy("mistral-f16");
    inside.write(
        "config.json",
        json!({ "model_type": "mistral3", "text_config": unread }).to_string(),
    );
    let text = inside.refusal();
    assert!(text.contains("3 problems") && text.contains("scoring_func"), "{text}");
}

/// transformers 5 writes the flag of Mistral 3 outside, where it is true by default, whatever the text part says.
#[test]
fn a_wrapper_is_tied_if_either_flag_says_so() {
    for (outside, inside) in [(true, false), (false, true), (true, true)] {
        let copy = with("llama-tied-f32", json!({ "tie_word_embeddings": inside }));
        let text: Value = serde_json::from_slice(&copy.read("config.json")).expect("JSON");
        let all =
            json!({ "model_type": "llava", "tie_word_embeddings": outside, "text_config": text });
        copy.write("config.json", all.to_string());
        assert!(loaded(&copy).graph.tied(), "{outside} {inside}");
        with_head(&copy, true);
        assert!(!loaded(&copy).graph.tied(), "{outside} {inside}");
    }
}
