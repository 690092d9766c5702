//! Tests of all spellings of the same configuration.

use ir::{DType, Graph};
use model::import;
use serde_json::json;

use crate::folder::{Copy, GOLDEN, golden};

fn graph(copy: &Copy) -> Graph {
    let mut graph = import(copy.dir()).expect("a model").graph;
    graph.name.clear();
    graph
}

fn unchanged(name: &str) -> Graph {
    let mut graph = import(&golden(name)).expect("a model").graph;
    graph.name.clear();
    graph
}

#[test]
fn transformers_4_spelling_gives_the_same_graph() {
    for name in GOLDEN {
        for kind in ["rope_type", "type"] {
            let copy = Copy::of(name);
            copy.config(|config| {
                let mut rope = config.remove("rope_parameters").expect("rope_parameters");
                let rope = rope.as_object_mut().expect("an object");
                config.insert("rope_theta".into(), rope.remove("rope_theta").expect("rope_theta"));
                let value = rope.remove("rope_type").expect("rope_type");
                let plain = value == "default";
                rope.insert(kind.into(), value);
                config.insert("rope_scaling".into(), if plain { json!(null) } else { json!(rope) });
                let dtype = config.remove("dtype").expect("dtype");
                config.insert("torch_dtype".into(), dtype);
            });
            assert_eq!(graph(&copy), unchanged(name), "{name} {kind}");
        }
    }
}

#[test]
fn both_spellings_may_stand_side_by_side_if_they_agree() {
    let copy = Copy::of("llama3-rope-bf16");
    copy.config(|config| {
        let rope = config["rope_parameters"].clone();
        config.insert("rope_theta".into(), rope["rope_theta"].clone());
        config.insert("rope_scaling".into(), rope);
    });
    assert_eq!(graph(&copy), unchanged("llama3-rope-bf16"));
    copy.config(|config| config["rope_scaling"]["factor"] = json!(8.0));
    assert_eq!(
        copy.refusal(),
        "DIR/config.json: \"rope_scaling\" differs from rope_parameters; keep one of the two"
    );
}

#[test]
fn absent_fields_have_the_family_defaults() {
    let copy = Copy::of("llama-tied-f32");
    copy.config(|config| {
        for field in
            ["head_dim", "rope_parameters", "rms_norm_eps", "hidden_act", "mlp_bias", "dtype"]
        {
            config.remove(field);
        }
        config.remove("architectures");
    });
    assert_eq!(graph(&copy), unchanged("llama-tied-f32"));
}

#[test]
fn linear_scaling_divides_every_frequency() {
    let copy = Copy::of("llama-tied-f32");
    copy.set(
        json!({ "rope_parameters": { "rope_type": "linear", "factor": 4, "rope_theta": 10000 } }),
    );
    let plain = unchanged("llama-tied-f32").inv_freq;
    let expected: Vec<f32> = plain.iter().map(|f| f / 4.0).collect();
    assert_eq!(graph(&copy).inv_freq, expected);
}

#[test]
fn llama3_scaling_takes_its_original_length_from_where_transformers_does() {
    let copy = Copy::of("llama3-rope-bf16");
    copy.config(|config| {
        config.insert("original_max_position_embeddings".into(), json!(64));
        config["rope_parameters"]["original_max_position_embeddings"] = json!(1024.0);
    });
    assert_eq!(graph(&copy).inv_freq, unchanged("llama3-rope-bf16").inv_freq);
}

#[test]
fn mistral_windows_are_in_every_layer() {
    let copy = Copy::of("mistral-f16");
    copy.set(json!({ "sliding_window": 16 }));
    assert!(graph(&copy).layers.iter().all(|layer| layer.attention.body.window == Some(16)));
    copy.config(|config| {
        config.remove("sliding_window");
    });
    assert!(graph(&copy).layers.iter().all(|layer| layer.attention.body.window == Some(4096)));
}

#[test]
fn qwen_windows_follow_switch_layer_types_and_first_layer() {
    for name in ["qwen2-bias-bf16", "qwen3-qknorm-bf16"] {
        let windows = |fields: serde_json::Value| -> Vec<Option<u32>> {
            let copy = Copy::of(name);
            copy.set(fields);
            graph(&copy).layers.iter().map(|layer| layer.attention.body.window).collect()
        };
        let mixed = json!(["sliding_attention", "full_attention"]);
        let off = json!({ "use_sliding_window": false, "sliding_window": 8, "layer_types": null });
        assert_eq!(windows(off), [None, None]);
        let on = json!({ "use_sliding_window": true, "sliding_window": 8, "layer_types": mixed });
        assert_eq!(windows(on), [Some(8), None]);
        let on = json!({ "use_sliding_window": true, "sliding_window": 8, "layer_types": null, "max_window_layers": 1 });
        assert_eq!(windows(on), [None, Some(8)]);
        let on = json!({ "use_sliding_window": true, "sliding_window": 8, "layer_types": null, "max_window_layers": 28 });
        assert_eq!(windows(on), [None, None]);
    }
}

#[test]
fn ends_of_generation_are_united() {
    let copy = Copy::of("llama-tied-f32");
    let eos = |copy: &Copy| graph(copy).eos;
    copy.set(json!({ "eos_token_id": [2, 7, 2] }));
    assert_eq!(eos(&copy), [2, 7]);
    copy.write("generation_config.json", r#"{"eos_token_id": [7, 9]}"#);
    assert_eq!(eos(&copy), [2, 7, 9]);
    copy.write("generation_config.json", r#"{"eos_token_id": 200, "do_sample": true}"#);
    assert_eq!(eos(&copy), [2, 7, 200]);
    copy.set(json!({ "eos_token_id": null })).write("generation_config.json", "{}");
    assert_eq!(eos(&copy), [0; 0]);
    copy.write("generation_config.json", r#"{"eos_token_id": 256}"#);
    assert_eq!(
        copy.refusal(),
        "DIR/generation_config.json: \"eos_token_id\" is 256; it must be below vocab_size, which is 256"
    );
}

#[test]
fn the_stored_element_type_has_the_last_word() {
    let copy = Copy::of("mistral-f16");
    copy.set(json!({ "dtype": "bfloat16" }));
    assert_eq!(graph(&copy).dtype, DType::F16);
    copy.set(json!({ "dtype": "torch.float16" }));
    assert_eq!(graph(&copy).dtype, DType::F16);
}

#[test]
fn old_buffers_and_a_head_that_repeats_the_embedding_are_ignored() {
    let copy = Copy::of("llama-tied-f32");
    let (mut header, mut data) = crate::folder::split(&copy.read("model.safetensors"));
    let at = |i: usize| header["model.embed_tokens.weight"]["data_offsets"][i].as_u64();
    let [start, end] = [0, 1].map(|i| at(i).expect("an offset") as usize);
    let embed = data[start..end].to_vec();
    let mut add = |name: &str, shape: &[usize], bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            name.into(),
            json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets }),
        );
        data.extend_from_slice(bytes);
    };
    add("lm_head.weight", &[256, 64], &embed);
    add("model.layers.0.self_attn.rotary_emb.inv_freq", &[8], &[0; 32]);
    let header = serde_json::to_string(&header).expect("a header");
    copy.write("model.safetensors", crate::folder::safetensors(&header, &data));
    assert_eq!(graph(&copy), unchanged("llama-tied-f32"));
}
