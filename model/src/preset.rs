//! Models that need no download: real shapes with seeded random weights.

use ir::DType;

use crate::model::Model;
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, Shape};

/// Seed of the presets' weights.
const SEED: u64 = 0x616d_6b00;

/// A named shape. Its weights are random, so no id ends a generation or begins a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// What a user types.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    dims: Dims,
}

#[derive(Clone, Copy, Debug)]
struct Dims {
    family: Family,
    hidden: u32,
    layers: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    ffn: u32,
    vocab: u32,
    tied: bool,
    norm_eps: f32,
    max_positions: u32,
    rope: Rope,
}

const TOY: Dims = Dims {
    family: Family::Llama,
    hidden: 64,
    layers: 1,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    ffn: 128,
    vocab: 256,
    tied: false,
    norm_eps: 1e-5,
    max_positions: 2048,
    rope: Rope::plain(10_000.0),
};

const LLAMA: Dims = Dims {
    hidden: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    ffn: 14_336,
    vocab: 128_256,
    max_positions: 131_072,
    rope: llama3(8.0),
    ..TOY
};

const QWEN3: Dims = Dims {
    family: Family::Qwen3,
    hidden: 1024,
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    ffn: 3072,
    vocab: 151_936,
    tied: true,
    norm_eps: 1e-6,
    max_positions: 40_960,
    rope: Rope::plain(1_000_000.0),
};

const SMOLLM2_135M: Dims = Dims {
    family: Family::Llama,
    hidden: 576,
    layers: 30,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    ffn: 1536,
    vocab: 49_152,
    tied: true,
    norm_eps: 1e-5,
    max_positions: 8192,
    rope: Rope::plain(100_000.0),
};

const fn llama3(factor: f64) -> Rope {
    Rope {
        theta: 500_000.0,
        scaling: Scaling::Llama3 { factor, low: 1.0, high: 4.0, original: 8192 },
    }
}

/// Every preset, small to large.
pub const PRESETS: &[Preset] = &[
    Preset { name: "toy", about: "one tiny layer, for a first look and for tests", dims: TOY },
    Preset { name: "toy-2l", about: "two tiny layers", dims: Dims { layers: 2, ..TOY } },
    Preset {
        name: "smollm2-135m",
        about: "SmolLM2 135M: 30 layers of 576, tied",
        dims: SMOLLM2_135M,
    },
    Preset {
        name: "qwen3-0.6b",
        about: "Qwen3 0.6B: 28 layers of 1024, q/k norms, tied",
        dims: QWEN3,
    },
    Preset {
        name: "llama-3.2-1b",
        about: "Llama 3.2 1B: 16 layers of 2048, tied",
        dims: Dims {
            hidden: 2048,
            layers: 16,
            head_dim: 64,
            ffn: 8192,
            tied: true,
            rope: llama3(32.0),
            ..LLAMA
        },
    },
    Preset {
        name: "qwen3-1.7b",
        about: "Qwen3 1.7B: 28 layers of 2048, q/k norms, tied",
        dims: Dims { hidden: 2048, ffn: 6144, ..QWEN3 },
    },
    Preset {
        name: "qwen3-4b",
        about: "Qwen3 4B: 36 layers of 2560, q/k norms, tied",
        dims: Dims { hidden: 2560, layers: 36, heads: 32, ffn: 9728, ..QWEN3 },
    },
    Preset { name: "llama-3.1-8b", about: "Llama 3.1 8B: 32 layers of 4096", dims: LLAMA },
    Preset {
        name: "qwen3-8b",
        about: "Qwen3 8B: 36 layers of 4096, q/k norms",
        dims: Dims { hidden: 4096, layers: 36, heads: 32, ffn: 12_288, tied: false, ..QWEN3 },
    },
];

impl Preset {
    /// The preset's dimensions, all in bf16.
    #[must_use]
    pub fn shape(&self) -> Shape {
        let dims = self.dims;
        Shape {
            name: self.name.to_owned(),
            family: dims.family,
            hidden: dims.hidden,
            layers: dims.layers,
            heads: dims.heads,
            kv_heads: dims.kv_heads,
            head_dim: dims.head_dim,
            ffn: dims.ffn,
            vocab: dims.vocab,
            tied: dims.tied,
            dtype: DType::Bf16,
            norm_eps: dims.norm_eps,
            rope: dims.rope,
            max_positions: dims.max_positions,
            ..Shape::default()
        }
    }
}

/// The preset of this name, with its weights still to be made.
#[must_use]
pub fn preset(name: &str) -> Option<Model> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    Some(Model::random(preset.shape(), SEED))
}
