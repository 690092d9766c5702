//! Models that need no download: real shapes with seeded random weights.

use crate::model::Model;
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, Shape};

/// Seed of the presets' weights.
const SEED: u64 = 0x616d_6b00;

/// A named shape. Its weights are random, so no id ends a generation or begins a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// The name on the command line.
    pub name: &'static str,
    /// A one-line description.
    pub about: &'static str,
    shape: fn() -> Shape,
}

fn llama() -> Shape {
    Shape {
        hidden: 4096,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 14_336,
        vocab: 128_256,
        max_positions: 131_072,
        rope: llama3(8.0),
        ..Shape::default()
    }
}

fn qwen3() -> Shape {
    Shape {
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
        ..Shape::default()
    }
}

fn smollm2() -> Shape {
    Shape {
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
        ..Shape::default()
    }
}

const fn llama3(factor: f64) -> Rope {
    Rope {
        theta: 500_000.0,
        scaling: Scaling::Llama3 { factor, low: 1.0, high: 4.0, original: 8192 },
    }
}

/// Every preset, small to large.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "toy",
        about: "one tiny layer, for a first look and for tests",
        shape: Shape::default,
    },
    Preset {
        name: "toy-2l",
        about: "two tiny layers",
        shape: || Shape { layers: 2, ..Shape::default() },
    },
    Preset { name: "smollm2-135m", about: "SmolLM2 135M: 30 layers of 576, tied", shape: smollm2 },
    Preset {
        name: "qwen3-0.6b",
        about: "Qwen3 0.6B: 28 layers of 1024, q/k norms, tied",
        shape: qwen3,
    },
    Preset {
        name: "llama-3.2-1b",
        about: "Llama 3.2 1B: 16 layers of 2048, tied",
        shape: || Shape {
            hidden: 2048,
            layers: 16,
            head_dim: 64,
            ffn: 8192,
            tied: true,
            rope: llama3(32.0),
            ..llama()
        },
    },
    Preset {
        name: "qwen3-1.7b",
        about: "Qwen3 1.7B: 28 layers of 2048, q/k norms, tied",
        shape: || Shape { hidden: 2048, ffn: 6144, ..qwen3() },
    },
    Preset {
        name: "qwen3-4b",
        about: "Qwen3 4B: 36 layers of 2560, q/k norms, tied",
        shape: || Shape { hidden: 2560, layers: 36, heads: 32, ffn: 9728, ..qwen3() },
    },
    Preset { name: "llama-3.1-8b", about: "Llama 3.1 8B: 32 layers of 4096", shape: llama },
    Preset {
        name: "qwen3-8b",
        about: "Qwen3 8B: 36 layers of 4096, q/k norms",
        shape: || Shape {
            hidden: 4096,
            layers: 36,
            heads: 32,
            ffn: 12_288,
            tied: false,
            ..qwen3()
        },
    },
    Preset {
        name: "qwen3-32b",
        about: "Qwen3 32B: 64 layers of 5120, q/k norms",
        shape: || Shape {
            hidden: 5120,
            layers: 64,
            heads: 64,
            ffn: 25_600,
            tied: false,
            ..qwen3()
        },
    },
    Preset {
        name: "llama-3.1-70b",
        about: "Llama 3.1 70B: 80 layers of 8192",
        shape: || Shape { hidden: 8192, layers: 80, heads: 64, ffn: 28_672, ..llama() },
    },
];

impl Preset {
    /// The preset's dimensions, all in bf16.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { name: self.name.to_owned(), ..(self.shape)() }
    }
}

/// The preset with this name; its weights are generated later.
#[must_use]
pub fn preset(name: &str) -> Option<Model> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    Some(Model::random(preset.shape(), SEED))
}
