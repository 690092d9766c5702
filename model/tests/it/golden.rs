//! Every golden folder imports correctly, with the bytes that the format's own reader finds.

use ir::{DType, TensorId};
use model::import;

use crate::folder::{GOLDEN, golden};

#[test]
fn imports_with_the_bytes_that_the_reference_reader_finds() {
    for name in GOLDEN {
        let model = import(&golden(name)).expect(name);
        assert_eq!(model.graph.name, name);
        assert_eq!(model.folder(), Some(golden(name).as_path()));
        let file = std::fs::read(golden(name).join("model.safetensors")).expect("the checkpoint");
        let reference = safetensors::SafeTensors::deserialize(&file).expect("a checkpoint");
        assert_eq!(reference.len(), model.graph.tensors.len(), "{name}");
        for (i, tensor) in model.graph.tensors.iter().enumerate() {
            let id = TensorId(i as u32);
            let view = reference.tensor(&tensor.name).expect(&tensor.name);
            assert_eq!(model.weights.bytes(id), view.data(), "{}", tensor.name);
            assert_eq!(model.weights.bytes(id).len(), tensor.bytes());
            let range = model.weights.file_range(id).expect("a place in a file");
            let at = range.offset as usize..(range.offset + range.bytes) as usize;
            assert_eq!(&std::fs::read(&range.path).expect("the file")[at], view.data());
        }
    }
}

#[test]
fn llama_tied() {
    let graph = import(&golden("llama-tied-f32")).expect("a model").graph;
    assert_eq!((graph.hidden, graph.heads, graph.kv_heads, graph.head_dim), (64, 4, 2, 16));
    assert_eq!((graph.ffn, graph.vocab, graph.layers.len()), (128, 256, 2));
    assert_eq!((graph.dtype, graph.tied(), &graph.family[..]), (DType::F32, true, "llama"));
    assert_eq!((graph.bos, &graph.eos[..]), (Some(1), &[2][..]));
    assert_eq!((graph.norm_eps, graph.max_positions, graph.attn_scale), (1e-6, 512, 0.25));
    assert_eq!(graph.inv_freq.len(), 8);
    assert_eq!(graph.inv_freq[0], 1.0);
    assert!(graph.layers.iter().all(|l| l.attention.body.q.bias.is_none()
        && l.attention.body.q_norm.is_none()
        && l.attention.body.window.is_none()));
}

#[test]
fn llama3_head_dim_is_its_own() {
    let graph = import(&golden("llama3-rope-bf16")).expect("a model").graph;
    assert_eq!((graph.hidden, graph.q_width(), graph.kv_width()), (128, 256, 64));
    assert_eq!((graph.dtype, graph.tied()), (DType::Bf16, false));
    assert_eq!(graph.tensor(graph.lm_head).name, "lm_head.weight");
}

#[test]
fn mistral_f16() {
    let graph = import(&golden("mistral-f16")).expect("a model").graph;
    assert_eq!((graph.dtype, &graph.family[..], graph.group()), (DType::F16, "mistral", 2));
}

#[test]
fn qwen2_has_biases_on_q_k_v_only() {
    let graph = import(&golden("qwen2-bias-bf16")).expect("a model").graph;
    for layer in &graph.layers {
        assert!(
            layer.attention.body.q.bias.is_some()
                && layer.attention.body.k.bias.is_some()
                && layer.attention.body.v.bias.is_some()
        );
        assert!(
            layer.attention.body.o.bias.is_none()
                && layer.gated().is_some_and(|mlp| mlp.gate.bias.is_none())
        );
    }
    assert_eq!((graph.bos, graph.eos.len()), (None, 0));
}

#[test]
fn qwen3_has_q_and_k_norms() {
    let graph = import(&golden("qwen3-qknorm-bf16")).expect("a model").graph;
    for layer in &graph.layers {
        let norm = layer.attention.body.q_norm.expect("a q norm");
        assert_eq!(graph.tensor(norm).shape, [32]);
        assert!(layer.attention.body.k_norm.is_some() && layer.attention.body.q.bias.is_none());
    }
    assert_eq!(graph.q_width(), 128);
}

#[test]
fn weights_may_be_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&import(&golden("mistral-f16")).expect("a model"));
}
