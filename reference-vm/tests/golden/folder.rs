//! Reads a golden folder: just enough of a Hugging Face folder for these tests.

use std::fs;
use std::path::Path;

use ir::{DType, Graph, Layer, Linear, Tensor, TensorId, Weights};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

pub(crate) struct Folder {
    pub(crate) graph: Graph,
    bytes: Vec<Vec<u8>>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logits: Vec<Vec<f32>>,
    pub(crate) greedy: Vec<u32>,
}

impl Weights for Folder {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        &self.bytes[tensor.index()]
    }
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Self {
        let config: Value =
            serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        let file = fs::read(path.join("model.safetensors")).unwrap();
        let (graph, bytes) = import(&config, &SafeTensors::deserialize(&file).unwrap());
        let golden = fs::read(path.join("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&golden).unwrap();
        let ids = |name| {
            let data = golden.tensor(name).unwrap().data().to_vec();
            data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
        };
        let logits = golden.tensor("logits").unwrap();
        let logits: Vec<f32> =
            logits.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let logits = logits.chunks_exact(graph.vocab as usize).map(<[f32]>::to_vec).collect();
        Self { tokens: ids("tokens"), greedy: ids("greedy"), logits, graph, bytes }
    }
}

fn import(config: &Value, file: &SafeTensors<'_>) -> (Graph, Vec<Vec<u8>>) {
    let names: Vec<String> = file.names().iter().map(|name| (*name).to_owned()).collect();
    let find =
        |name: &str| names.iter().position(|n| n == name).map(|index| TensorId(index as u32));
    let int = |key: &str| config[key].as_u64().map(|v| v as u32);
    let (hidden, heads) = (int("hidden_size").unwrap(), int("num_attention_heads").unwrap());
    let head_dim = int("head_dim").unwrap_or(hidden / heads);
    let layer = |index: u32| {
        let tensor = |name: &str| find(&format!("model.layers.{index}.{name}"));
        let linear = |name: &str| Linear {
            weight: tensor(&format!("{name}.weight")).unwrap(),
            bias: tensor(&format!("{name}.bias")),
        };
        Layer {
            attn_norm: tensor("input_layernorm.weight").unwrap(),
            q: linear("self_attn.q_proj"),
            k: linear("self_attn.k_proj"),
            v: linear("self_attn.v_proj"),
            q_norm: tensor("self_attn.q_norm.weight"),
            k_norm: tensor("self_attn.k_norm.weight"),
            o: linear("self_attn.o_proj"),
            mlp_norm: tensor("post_attention_layernorm.weight").unwrap(),
            gate: linear("mlp.gate_proj"),
            up: linear("mlp.up_proj"),
            down: linear("mlp.down_proj"),
            window: None,
        }
    };
    let embed = find("model.embed_tokens.weight").unwrap();
    let tensors = names.iter().map(|name| {
        let view = file.tensor(name).unwrap();
        let stored = |(stored, dtype)| (stored == view.dtype()).then_some(dtype);
        let dtypes =
            [(Dtype::F32, DType::F32), (Dtype::F16, DType::F16), (Dtype::BF16, DType::Bf16)];
        let dtype = dtypes.into_iter().find_map(stored).unwrap();
        Tensor {
            name: name.clone(),
            dtype,
            shape: view.shape().iter().map(|&d| d as u32).collect(),
        }
    });
    let tensors: Vec<Tensor> = tensors.collect();
    let bytes = names.iter().map(|name| file.tensor(name).unwrap().data().to_vec()).collect();
    let graph = Graph {
        name: "golden".into(),
        family: config["model_type"].as_str().unwrap().into(),
        hidden,
        heads,
        kv_heads: int("num_key_value_heads").unwrap(),
        head_dim,
        ffn: int("intermediate_size").unwrap(),
        vocab: int("vocab_size").unwrap(),
        norm_eps: config["rms_norm_eps"].as_f64().unwrap() as f32,
        inv_freq: inv_freq(&config["rope_parameters"], head_dim),
        attn_scale: f64::from(head_dim).powf(-0.5) as f32,
        max_positions: int("max_position_embeddings").unwrap(),
        dtype: tensors[0].dtype,
        tensors,
        embed,
        layers: (0..int("num_hidden_layers").unwrap()).map(layer).collect(),
        final_norm: find("model.norm.weight").unwrap(),
        lm_head: find("lm_head.weight").unwrap_or(embed),
        eos: vec![],
        bos: None,
    };
    (graph, bytes)
}

/// Default and llama3 frequencies.
fn inv_freq(rope: &Value, head_dim: u32) -> Vec<f32> {
    let number = |key: &str| rope[key].as_f64().unwrap() as f32;
    let plain = (0..head_dim / 2)
        .map(|i| 1.0 / number("rope_theta").powf((2 * i) as f32 / head_dim as f32));
    if rope["rope_type"] == "default" {
        return plain.collect();
    }
    let (factor, low, high) =
        (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
    let original = number("original_max_position_embeddings");
    let scale = |frequency: f32| {
        let wavelength = 2.0 * std::f32::consts::PI / frequency;
        if wavelength > original / low {
            return frequency / factor;
        }
        if wavelength < original / high {
            return frequency;
        }
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / factor + smooth * frequency
    };
    plain.map(scale).collect()
}
