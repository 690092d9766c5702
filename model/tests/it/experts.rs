//! What families with experts make of configurations and stored tensors, beyond the logits of `corpus/families`.

use std::path::Path;

use ir::{Experts, FeedForward, TensorId, decode};
use model::{Model, import};
use serde_json::{Value, json};

use crate::folder::Copy;

fn family(name: &str) -> Copy {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families");
    Copy::of_folder(&folder.join(name))
}

fn changed(name: &str, fields: Value) -> Model {
    let copy = family(name);
    copy.set(fields);
    import(copy.dir()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn refused(name: &str, fields: Value) -> String {
    let copy = family(name);
    copy.set(fields);
    copy.refusal()
}

/// The experts of each layer; `None` for one MLP.
fn experts(model: &Model) -> Vec<Option<&Experts>> {
    model
        .graph
        .layers
        .iter()
        .map(|layer| match &layer.mlp.body {
            FeedForward::Experts(experts) => Some(&**experts),
            FeedForward::Gated(_) => None,
        })
        .collect()
}

fn values(model: &Model, id: TensorId) -> Vec<f32> {
    let tensor = model.graph.tensor(id);
    let mut out = vec![0.0; tensor.len()];
    decode(tensor.dtype, model.weights.bytes(id), &mut out);
    out
}

#[test]
fn routers_are_those_of_the_configuration() {
    let router = |name: &str, fields: Value| {
        let model = changed(name, fields);
        let first = experts(&model)[0].expect("experts").clone();
        let shared = first.shared.map(|shared| shared.ffn);
        (first.experts.len(), first.top_k, first.normalised, first.ffn, shared)
    };
    let none = json!({});
    assert_eq!(router("mixtral-bf16", none.clone()), (4, 2, true, 80, None));
    assert_eq!(router("qwen3-moe-bf16", none.clone()), (8, 2, true, 48, None));
    assert_eq!(router("qwen2-moe-bf16", none.clone()), (6, 2, false, 40, Some(80)));
    assert_eq!(router("olmoe-bf16", none.clone()), (8, 3, false, 48, None));
    assert_eq!(router("gpt-oss-bf16", none), (6, 3, true, 48, None));
    let absent = json!({ "norm_topk_prob": null, "num_experts_per_tok": 5 });
    assert_eq!(router("qwen3-moe-bf16", absent), (8, 5, false, 48, None));
    let both = json!({ "num_experts": 8 });
    assert_eq!(router("qwen3-moe-bf16", both).0, 8);
}

#[test]
fn a_folder_that_is_no_expert_s_is_refused_with_all_its_problems() {
    let cases = [
        (
            json!({ "num_experts": 7 }),
            "\"num_local_experts\" is 8; num_experts is 7; keep one of the two",
        ),
        (
            json!({ "num_experts_per_tok": 9 }),
            "\"num_experts_per_tok\" is 9; it must be 1 to 8, the experts",
        ),
        (json!({ "num_local_experts": 0 }), "\"num_experts\" is 0; supported: 2 to 1024"),
        (json!({ "num_local_experts": 4_000_000 }), "supported: 2 to 1024"),
        // Three million matrices, from two numbers.
        (
            json!({ "num_local_experts": 1024, "num_hidden_layers": 1024 }),
            "\"num_experts\" is 1024 in each of 1024 layers; supported: 32768 in all of them",
        ),
        (
            json!({ "moe_intermediate_size": 42 }),
            "\"moe_intermediate_size\" is 42; supported: multiples of 4",
        ),
        (
            json!({ "decoder_sparse_step": 0 }),
            "\"decoder_sparse_step\" is 0; it must be at least 1",
        ),
        (json!({ "use_sliding_window": true }), "\"use_sliding_window\" is true; supported: false"),
        (json!({ "n_shared_experts": 1 }), "\"n_shared_experts\" is 1; supported: 0"),
        (json!({ "num_local_experts": 9 }), "experts.8.down_proj.weight\" is missing"),
        (
            json!({ "num_local_experts": 7 }),
            "experts.7.down_proj.weight\" is not part of the model",
        ),
    ];
    for (fields, want) in cases {
        let text = refused("qwen3-moe-bf16", fields);
        assert!(text.contains(want), "{text}");
    }
    let text = refused(
        "qwen3-moe-bf16",
        json!({ "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "q_lora_rank": 8 }),
    );
    assert!(text.contains("3 problems: "), "{text}");
    let text = refused(
        "gpt-oss-bf16",
        json!({ "swiglu_limit": 8.0, "attention_bias": false, "rope_scaling": null }),
    );
    assert!(text.contains("3 problems: "), "{text}");
    let text = refused("gpt-oss-bf16", json!({ "num_local_experts": 5 }));
    let want = "mlp.experts.gate_up_proj\" has shape [6, 64, 96]; config.json asks for [5, 64, 96]";
    assert!(text.contains(want), "{text}");
    let text = refused("olmoe-bf16", json!({ "clip_qkv": 8.0 }));
    assert!(text.contains("\"clip_qkv\" is 8.0; supported: null"), "{text}");
}

/// Layers that a configuration gives one MLP need its tensors, which these folders do not have.
#[test]
fn layers_without_experts_are_those_of_step_and_list() {
    let text = refused("qwen3-moe-bf16", json!({ "decoder_sparse_step": 2 }));
    for layer in [0, 2] {
        let missing = format!("\"model.layers.{layer}.mlp.gate_proj.weight\" is missing");
        assert!(text.contains(&missing), "{text}");
    }
    assert!(!text.contains("model.layers.1."), "{text}");
    let text = refused("qwen3-moe-bf16", json!({ "mlp_only_layers": [1] }));
    assert!(text.contains("\"model.layers.1.mlp.gate_proj.weight\" is missing"), "{text}");
    assert!(!text.contains("model.layers.0."), "{text}");
    let copy = family("qwen3-moe-bf16");
    copy.set(json!({ "decoder_sparse_step": 2 }));
    let (shape, _) = model::import_shape(copy.dir()).expect("a shape");
    let model = Model::random(shape, 1);
    let widths = |ffn: Option<&Experts>| ffn.map(|experts| experts.ffn);
    assert_eq!(experts(&model).into_iter().map(widths).collect::<Vec<_>>(), [None, Some(48), None]);
    let gate = model.graph.layers[0].gated().expect("one MLP").gate;
    assert_eq!(model.graph.tensor(gate.weight).shape, [96, 64]);
}

/// Gate and up lie in alternating columns of a tensor of all experts.
#[test]
fn stacked_experts_are_cut_and_transposed() {
    let model = changed("gpt-oss-bf16", json!({}));
    let file = std::fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../corpus/families/gpt-oss-bf16/model.safetensors"),
    )
    .expect("a file");
    let file = safetensors::SafeTensors::deserialize(&file).expect("tensors");
    let stored = |name: &str| {
        let view = file.tensor(&format!("model.layers.2.mlp.experts.{name}")).expect("a tensor");
        let mut out = vec![0.0; view.shape().iter().product()];
        decode(ir::DType::Bf16, view.data(), &mut out);
        out
    };
    let layers = experts(&model);
    let all = layers[2].expect("experts");
    let (hidden, ffn) = (64, 48);
    for (number, expert) in all.experts.iter().enumerate() {
        let gate_up = &stored("gate_up_proj")[number * hidden * 2 * ffn..][..hidden * 2 * ffn];
        let down = &stored("down_proj")[number * ffn * hidden..][..ffn * hidden];
        for (half, linear) in [expert.gate, expert.up].into_iter().enumerate() {
            let got = values(&model, linear.weight);
            let want = (0..ffn).flat_map(|row| {
                (0..hidden).map(move |col| gate_up[col * 2 * ffn + 2 * row + half])
            });
            assert!(want.eq(got), "expert {number}, half {half}");
            let bias = &stored("gate_up_proj_bias")[number * 2 * ffn..][..2 * ffn];
            let want = bias.iter().skip(half).step_by(2).copied();
            assert!(want.eq(values(&model, linear.bias.expect("a bias"))));
        }
        let got = values(&model, expert.down.weight);
        let want = (0..hidden).flat_map(|row| (0..ffn).map(move |col| down[col * hidden + row]));
        assert!(want.eq(got), "expert {number}, down");
        let bias = &stored("down_proj_bias")[number * hidden..][..hidden];
        assert_eq!(bias, values(&model, expert.down.bias.expect("a bias")));
    }
    // By hand: a layer without experts, three of its six, and the output matrix with its norm.
    let attention = 2 * (2 * 128 * 64 + 2 * 64 * 64 + 128 + 3 * 64 + 2 * 64 + 4);
    let (router, expert) = (2 * (6 * 64 + 6), 2 * (3 * 48 * 64 + 48 + 48 + 64));
    let step = 4 * (attention + router + 3 * expert) + 2 * (300 * 64 + 64);
    assert_eq!(model.graph.step_bytes(), step);
    assert!(model.graph.layers.iter().all(|layer| layer.attention.body.sinks.is_some()));
}
