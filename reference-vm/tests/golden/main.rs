//! Compares both executors with the logits that transformers computed for small random models.

mod devices;
mod eval;
mod heads;
mod kept;
mod kv_e4m3;
mod longer;
mod lowered;
mod quantised_families;

use std::path::Path;

use ir::DType;
use model::Model;
use safetensors::SafeTensors;

const NAMES: [&str; 5] =
    ["llama-tied-f32", "llama3-rope-bf16", "mistral-f16", "qwen2-bias-bf16", "qwen3-qknorm-bf16"];

/// Folders of `corpus/quantised`: their weights are codes, or dequantised to f32.
const QUANTISED: [&str; 18] = [
    "awq-g128-qwen2",
    "bnb-nf4-llama",
    "bnb-nf4-plain-qwen3",
    "ct-fp8-dynamic-llama",
    "ct-fp8-static-qwen3",
    "ct-int8-llama",
    "ct-nvfp4-llama",
    "ct-w4a16-asym-g128-qwen2",
    "ct-w4a16-g128-llama",
    "ct-w4a16-g32-qwen3",
    "fp8-block-llama",
    "gguf-q4_0-llama",
    "gguf-q4_k_m-qwen3",
    "gguf-q6_k-llama",
    "gguf-q8_0-llama",
    "gptq-asym-g128-qwen2",
    "gptq-desc-act-g128-llama",
    "gptq-sym-g128-llama",
];

/// Folders of `corpus/families`: one for each family, and for each scaling of rotary frequencies.
const FAMILIES: [&str; 14] = [
    "gemma2-bf16",
    "gemma3-256-bf16",
    "gemma3-bf16",
    "glm4-bf16",
    "granite-bf16",
    "llama-linear-f16",
    "llama-yarn-bf16",
    "ministral-bf16",
    "mistral-nemo-f16",
    "olmo2-bf16",
    "olmo3-bf16",
    "phi3-bf16",
    "phi4-longrope-bf16",
    "smollm3-bf16",
];

/// Folders of families with experts.
const EXPERTS: [&str; 5] =
    ["gpt-oss-bf16", "mixtral-bf16", "olmoe-bf16", "qwen2-moe-bf16", "qwen3-moe-bf16"];

/// Quantised ones of them, in `corpus/quantised`, and their codes if they are streamed.
const EXPERTS_QUANTISED: [(&str, Option<DType>); 2] =
    [("fp8-block-qwen3-moe", Some(DType::E4m3G64)), ("mxfp4-gpt-oss", Some(DType::Mxfp4))];

/// A model with its tokens and logits.
struct Golden {
    model: Model,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
    greedy: Vec<u32>,
}

impl Golden {
    fn open(kind: &str, name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus").join(kind).join(name);
        let gguf = folder.join("model.gguf");
        let path = if gguf.exists() { &gguf } else { &folder };
        let model = model::import(path).unwrap_or_else(|error| panic!("{name}: {error}"));
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
        check(name, &Golden::open("golden", name));
    }
}

/// Runs `check` on a folder of each family.
fn each_family(check: impl Fn(&str, &Golden)) {
    for name in FAMILIES {
        check(name, &Golden::open("families", name));
    }
}

/// Runs `check` on a folder of each family with experts.
fn each_with_experts(check: impl Fn(&str, &Golden)) {
    for name in EXPERTS {
        check(name, &Golden::open("families", name));
    }
}

/// Runs `check` on every quantised folder.
fn each_quantised(check: impl Fn(&str, &Golden)) {
    for name in QUANTISED {
        check(name, &Golden::open("quantised", name));
    }
}
