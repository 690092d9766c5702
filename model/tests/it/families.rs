//! What families make of configurations and stored tensors, beyond the logits of `corpus/families`.

use std::path::Path;

use ir::{Activation, DType, Graph, TensorId, decode};
use model::{Model, import};
use serde_json::{Map, Value, json};

use crate::folder::{Copy, safetensors, split};

fn family(name: &str) -> Copy {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families");
    Copy::of_folder(&folder.join(name))
}

fn model(name: &str) -> Model {
    import(family(name).dir()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn changed(name: &str, fields: Value) -> Graph {
    let copy = family(name);
    copy.set(fields);
    import(copy.dir()).unwrap_or_else(|error| panic!("{name}: {error}")).graph
}

fn refused(name: &str, fields: Value) -> String {
    let copy = family(name);
    copy.set(fields);
    copy.refusal()
}

fn values(model: &Model, name: &str) -> Vec<f32> {
    let id = model.graph.tensors.iter().position(|t| t.name == name).expect(name);
    let tensor = &model.graph.tensors[id];
    let mut out = vec![0.0; tensor.len()];
    decode(tensor.dtype, model.weights.bytes(TensorId(id as u32)), &mut out);
    out
}

#[test]
fn norms_of_one_plus_w_and_scalars_are_in_the_graph() {
    let gemma = model("gemma2-bf16");
    let graph = &gemma.graph;
    assert_eq!((graph.embed_scale, graph.activation), (8.0, Activation::GeluTanh));
    assert_eq!((graph.score_cap, graph.logit_cap), (Some(4.0), Some(3.0)));
    assert!(graph.tied(), "the default, which the file does not say");
    let norm = values(&gemma, "model.layers.0.input_layernorm.weight");
    assert!(norm.iter().all(|w| (0.5..=1.5).contains(w)), "stored between -0.5 and 0.5: {norm:?}");
    let windows: Vec<_> = graph.layers.iter().map(|layer| layer.attention.body.window).collect();
    assert_eq!(windows, [Some(12), None, Some(12), None]);
    assert!(
        graph.layers.iter().all(|l| l.attention.post_norm.is_some() && l.mlp.post_norm.is_some())
    );
    let none = json!({ "attn_logit_softcapping": null, "final_logit_softcapping": null });
    let plain = changed("gemma2-bf16", none);
    assert_eq!((plain.score_cap, plain.logit_cap), (None, None));
    let granite = model("granite-bf16").graph;
    assert!((granite.embed_scale - 3.0 / 0.55).abs() < 1e-6 && granite.attn_scale == 0.11);
    assert!((granite.norm_eps / (1e-6 / (0.55 * 0.55)) - 1.0).abs() < 1e-6);
    let text =
        refused("granite-bf16", json!({ "residual_multiplier": 0.0, "logits_scaling": -1.0 }));
    assert!(text.contains("2 problems") && text.contains("residual_multiplier"), "{text}");
}

#[test]
fn layers_have_the_rotation_of_their_kind() {
    let graph = model("gemma3-bf16").graph;
    let tables: Vec<_> = graph.layers.iter().map(|layer| layer.attention.body.rotary).collect();
    assert_eq!(tables, [1, 1, 0, 1, 1, 0]);
    assert_eq!(graph.rotary_of(&graph.layers[2])[0], 0.125, "a linear factor of 8");
    assert_eq!(graph.rotary_of(&graph.layers[0])[0], 1.0);
    let graph = model("smollm3-bf16").graph;
    assert!(graph.rotary_of(&graph.layers[1]).iter().all(|&f| f == 0.0));
    assert_eq!(
        graph.layers.iter().map(|l| l.attention.body.rotary).collect::<Vec<_>>(),
        [0, 1, 0, 1]
    );
    let absent = changed("smollm3-bf16", json!({ "no_rope_layers": null }));
    assert_eq!(
        absent.layers.iter().map(|l| l.attention.body.rotary).collect::<Vec<_>>(),
        [0, 1, 0, 1]
    );
    let text = refused("smollm3-bf16", json!({ "no_rope_layers": [1, 0] }));
    assert!(text.contains("\"no_rope_layers\" has 2 entries for 4 layers"), "{text}");
}

#[test]
fn longrope_is_that_of_the_original_length() {
    let graph = model("phi4-longrope-bf16").graph;
    // 12 of 16 pairs are rotated; then the factors of all.
    assert_eq!((graph.inv_freq.len(), graph.max_positions), (32, 128));
    assert!(graph.inv_freq[11] > 0.0 && graph.inv_freq[12..16] == [0.0; 4]);
    let factor = (1.0 + 4_f64.ln() / 128_f64.ln()).sqrt() as f32;
    assert!(graph.inv_freq[16..28].iter().all(|&f| f == factor));
    assert_eq!(graph.inv_freq[28..], [1.0; 4]);
    let notes = model("phi4-longrope-bf16").notes;
    assert!(notes.iter().any(|note| note.contains("beyond 128 positions")), "{notes:?}");
    let short =
        json!({ "rope_scaling": { "type": "longrope", "short_factor": [1.0], "long_factor": [] } });
    let text = refused("phi4-longrope-bf16", short);
    assert!(text.contains("\"rope_scaling.short_factor\" has 1 numbers; 12 are rotated"), "{text}");
    assert!(text.contains("\"rope_scaling.long_factor\" has 0 numbers; 12 are rotated"), "{text}");
}

#[test]
fn longrope_beyond_the_original_length_has_the_long_factors() {
    let mut reached = model("phi4-longrope-bf16");
    assert_eq!((reached.shape.max_positions, reached.shape.farthest()), (128, 512));
    let short = reached.graph.clone();
    reached.reach(128);
    assert_eq!(reached.graph, short, "the original length is not beyond it");
    reached.reach(129);
    let long = &reached.graph;
    assert_eq!((long.max_positions, reached.shape.farthest()), (512, 512));
    // The folder's factors: 1.0, 1.1 and so on, and 2.0, 2.5 and so on.
    for pair in 0..12_u16 {
        let [before, after] = [1.0 + 0.1 * f32::from(pair), 2.0 + 0.5 * f32::from(pair)];
        let ratio = short.inv_freq[usize::from(pair)] / long.inv_freq[usize::from(pair)];
        assert!((ratio - after / before).abs() < 1e-5, "{pair}: {ratio}");
    }
    assert_eq!(long.inv_freq[12..], short.inv_freq[12..], "no rotation, and the factors");
    let (tensors, layers) = (&long.tensors, &long.layers);
    assert_eq!((tensors, layers), (&short.tensors, &short.layers));
    let mut plain = model("phi3-bf16");
    let before = plain.graph.clone();
    plain.reach(u32::MAX);
    assert_eq!(plain.graph, before);
}

#[test]
fn yarn_and_dynamic_scaling_follow_their_fields() {
    let yarn = |fields: Value| changed("llama-yarn-bf16", json!({ "rope_scaling": fields }));
    let scaling = |more: Value| {
        let mut all =
            json!({ "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024 });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let plain = yarn(scaling(json!({})));
    let factor = (0.1 * 8_f64.ln() + 1.0) as f32;
    assert_eq!((plain.inv_freq.len(), plain.inv_freq[8]), (16, factor));
    assert_eq!(yarn(scaling(json!({ "attention_factor": 1.0 }))).inv_freq.len(), 8);
    assert_eq!(yarn(scaling(json!({ "mscale": 1.0, "mscale_all_dim": 1.0 }))).inv_freq.len(), 8);
    for other in
        [json!({ "beta_fast": 4.0 }), json!({ "beta_slow": 4.0 }), json!({ "truncate": false })]
    {
        assert_ne!(yarn(scaling(other.clone())).inv_freq, plain.inv_freq, "{other}");
    }
    let dynamic =
        changed("llama-yarn-bf16", json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }));
    assert_eq!((dynamic.inv_freq.len(), dynamic.inv_freq[0]), (8, 1.0));
}

#[test]
fn fused_matrices_are_cut_and_their_shapes_checked() {
    let phi = model("phi3-bf16");
    let ranges: Vec<_> = ["q_proj", "k_proj", "v_proj"]
        .iter()
        .map(|part| {
            let name = format!("model.layers.0.self_attn.{part}.weight");
            let id = phi.graph.tensors.iter().position(|t| t.name == name).expect("a part");
            phi.weights.file_range(TensorId(id as u32)).expect("it is mapped, not copied")
        })
        .collect();
    assert_eq!(ranges[0].offset + ranges[0].bytes, ranges[1].offset);
    assert_eq!(ranges[1].offset + ranges[1].bytes, ranges[2].offset);
    let text = refused("phi3-bf16", json!({ "num_key_value_heads": 4 }));
    let expected = "2 problems: \"model.layers.0.self_attn.qkv_proj.weight\" has shape [256, 128]; config.json asks for [384, 128]";
    assert!(text.contains(expected), "{text}");
}

/// Gemma 3 as it is published from 4B on: the text part of a multimodal folder.
#[test]
fn a_multimodal_folder_gives_its_language_model() {
    let plain = model("gemma3-bf16");
    let copy = family("gemma3-bf16");
    let text: Value = serde_json::from_slice(&copy.read("config.json")).expect("JSON");
    let outer = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": text, "vision_config": { "hidden_size": 1152 },
    });
    copy.write("config.json", outer.to_string());
    let (header, data) = split(&copy.read("model.safetensors"));
    for prefix in ["language_model.model.", "model.language_model.", "model.text_model."] {
        let named = |name: &str| match name.strip_prefix("model.") {
            Some(rest) => format!("{prefix}{rest}"),
            None => name.to_owned(),
        };
        let mut all: Map<String, Value> =
            header.iter().map(|(name, info)| (named(name), info.clone())).collect();
        let at = data.len();
        let vision = json!({ "dtype": "BF16", "shape": [4], "data_offsets": [at, at + 8] });
        all.insert("vision_tower.post_layernorm.weight".to_owned(), vision);
        let data = [&data[..], &[0; 8]].concat();
        copy.write("model.safetensors", safetensors(&Value::Object(all).to_string(), &data));
        let found = import(copy.dir()).expect("a language model");
        assert_eq!(found.graph.layers, plain.graph.layers);
        let name = "model.layers.3.mlp.down_proj.weight";
        assert_eq!(values(&plain, name), values(&found, name));
        let notes = found.notes.join("\n");
        assert!(notes.contains("a vision tower") && notes.contains("1 tensors"), "{notes}");
    }
    assert_eq!(plain.graph.dtype, DType::Bf16);
}
