//! Compares both executors with the logits that transformers computed for small random models.

mod eval;
mod lowered;

use std::path::Path;

use model::Model;
use safetensors::SafeTensors;

const NAMES: [&str; 5] =
    ["llama-tied-f32", "llama3-rope-bf16", "mistral-f16", "qwen2-bias-bf16", "qwen3-qknorm-bf16"];

/// A model with its tokens and logits.
struct Golden {
    model: Model,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
}

impl Golden {
    fn open(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name);
        let model = model::import(&folder).unwrap();
        let file = std::fs::read(folder.join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&file).unwrap();
        let data = |name| file.tensor(name).unwrap().data().to_vec();
        let ids = |name| {
            data(name).as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as u32).collect()
        };
        let logits = data("logits");
        let logits: Vec<f32> =
            logits.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let logits = logits.chunks_exact(model.graph.vocab as usize).map(<[f32]>::to_vec).collect();
        Self { tokens: ids("tokens"), greedy: ids("greedy"), logits, model }
    }
}

/// Runs `check` on every golden folder.
fn each(check: impl Fn(&str, &Golden)) {
    for name in NAMES {
        check(name, &Golden::open(name));
    }
}
