//! Models that need no download: real shapes with seeded random weights.

use ir::{Activation, DType};

use crate::coded::{CODED, Coded};
use crate::family::ExpertShape;
use crate::model::Model;
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, Longer, Options, Shape, Window};

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

fn gemma3() -> Shape {
    Shape {
        family: Family::Gemma3,
        hidden: 1152,
        layers: 26,
        heads: 4,
        kv_heads: 1,
        head_dim: 256,
        ffn: 6912,
        vocab: 262_144,
        tied: true,
        norm_eps: 1e-6,
        max_positions: 32_768,
        rope: Rope::plain(1_000_000.0),
        ..Shape::default()
    }
    .with_gemma3_options(512)
}

impl Shape {
    /// Five layers with a window, then one without, and so on; and what follows from the width.
    fn with_gemma3_options(self, window: u32) -> Self {
        let sliding = (1..=self.layers).map(|n| n % 6 != 0).collect();
        let options = Options {
            activation: Activation::GeluTanh,
            embed_scale: f64::from(self.hidden).sqrt() as f32,
            attn_scale: Some(0.0625),
            sliding_rope: Some(Rope::plain(10_000.0)),
            ..Options::default()
        };
        Self { window: Window::Layers { window, sliding }, options, ..self }
    }
}

/// `top_k` of `count` experts of this width, whose weights sum to 1.
fn experts(count: u32, top_k: u32, ffn: u32) -> Options {
    let (shared, normalised, dense) = (None, true, Vec::new());
    let experts = ExpertShape { count, top_k, ffn, shared, normalised, dense };
    Options { experts: Some(experts), ..Options::default() }
}

fn qwen3_moe() -> Shape {
    Shape {
        family: Family::Qwen3Moe,
        hidden: 2048,
        layers: 48,
        heads: 32,
        kv_heads: 4,
        ffn: 6144,
        tied: false,
        options: experts(128, 8, 768),
        ..qwen3()
    }
}

/// As published: experts in MXFP4, the rest in 16 bits.
fn gpt_oss(layers: u32, count: u32) -> Shape {
    let (factor, original) = (32.0_f64, 4096);
    let amplitude = 0.1 * factor.ln() + 1.0;
    let (fast, slow, truncate) = (32.0, 1.0, false);
    let scaling = Scaling::Yarn { factor, original, fast, slow, truncate, amplitude };
    Shape {
        family: Family::GptOss,
        hidden: 2880,
        layers,
        heads: 64,
        kv_heads: 8,
        head_dim: 64,
        ffn: 2880,
        vocab: 201_088,
        max_positions: 131_072,
        attention_bias: true,
        rope: Rope { theta: 150_000.0, scaling },
        window: Window::Layers { window: 128, sliding: (0..layers).map(|n| n % 2 == 0).collect() },
        options: Options {
            coded: Some(Coded::Layers { dense: None, experts: DType::Mxfp4 }),
            ..experts(count, 4, 2880)
        },
        ..Shape::default()
    }
}

/// The one for 4096 positions.
fn phi3_mini() -> Shape {
    Shape {
        family: Family::Phi3,
        hidden: 3072,
        layers: 32,
        heads: 32,
        kv_heads: 32,
        head_dim: 96,
        ffn: 8192,
        vocab: 32_064,
        norm_eps: 1e-5,
        max_positions: 4096,
        rope: Rope::plain(10_000.0),
        window: Window::All(2047),
        ..Shape::default()
    }
}

/// Without the divisors of its frequencies, which cost no time.
fn phi4_mini() -> Shape {
    Shape {
        family: Family::Phi3,
        hidden: 3072,
        layers: 32,
        heads: 24,
        kv_heads: 8,
        head_dim: 128,
        ffn: 8192,
        vocab: 200_064,
        tied: true,
        max_positions: 4096,
        options: Options {
            rotated: 0.75,
            rotary_factor: 1.190_238,
            longer: Some(Longer { max_positions: 131_072, divisors: Vec::new() }),
            ..Options::default()
        },
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
        name: "gemma-3-1b",
        about: "Gemma 3 1B: 26 layers of 1152, windows of 512, tied",
        shape: gemma3,
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
    Preset {
        name: "gemma-3-4b",
        about: "Gemma 3 4B, its language model: 34 layers of 2560, windows of 1024, tied",
        shape: || {
            let rope = Rope { theta: 1_000_000.0, scaling: Scaling::Linear { factor: 8.0 } };
            let (hidden, ffn, max_positions) = (2560, 10_240, 131_072);
            let shape = Shape { hidden, ffn, max_positions, rope, vocab: 262_208, ..gemma3() };
            Shape { layers: 34, heads: 8, kv_heads: 4, ..shape }.with_gemma3_options(1024)
        },
    },
    Preset {
        name: "phi-3-mini",
        about: "Phi 3 mini: 32 layers of 3072, heads of 96, windows of 2047",
        shape: phi3_mini,
    },
    Preset {
        name: "phi-4-mini",
        about: "Phi 4 mini: 32 layers of 3072, three quarters of each head rotated, tied",
        shape: phi4_mini,
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
        name: "gpt-oss-20b",
        about: "GPT-OSS 20B: 24 layers of 2880, 4 of 32 experts in MXFP4, attention sinks",
        shape: || gpt_oss(24, 32),
    },
    Preset {
        name: "qwen3-30b-a3b",
        about: "Qwen3 30B A3B: 48 layers of 2048, 8 of 128 experts",
        shape: qwen3_moe,
    },
    Preset {
        name: "mixtral-8x7b",
        about: "Mixtral 8x7B: 32 layers of 4096, 2 of 8 experts",
        shape: || Shape {
            family: Family::Mixtral,
            vocab: 32_000,
            max_positions: 32_768,
            norm_eps: 1e-5,
            rope: Rope::plain(1_000_000.0),
            options: experts(8, 2, 14_336),
            ..llama()
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
    Preset {
        name: "gpt-oss-120b",
        about: "GPT-OSS 120B: 36 layers of 2880, 4 of 128 experts in MXFP4, attention sinks",
        shape: || gpt_oss(36, 128),
    },
];

impl Preset {
    /// The preset's dimensions, all in bf16 but what is codes.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { name: self.name.to_owned(), ..(self.shape)() }
    }
}

/// The preset with this name; its weights are generated later. A preset of 16 bits has a name in each format of [`CODED`]
/// too, such as `llama-3.1-8b-fp8`: its codes are drawn, not rounded from values of 16 bits.
#[must_use]
pub fn preset(name: &str) -> Option<Model> {
    let of = |name: &str| PRESETS.iter().find(|preset| preset.name == name);
    let shape = of(name).map(Preset::shape).or_else(|| {
        let (preset, coded) = CODED.iter().find_map(|(format, coded)| {
            let plain = name.strip_suffix(format)?.strip_suffix('-')?;
            of(plain).map(|preset| (preset, *coded))
        })?;
        let shape = preset.shape();
        let fits = coded.has_experts() || shape.options.experts.is_none();
        let is_plain = shape.options.coded.is_none() && fits;
        let options = Options { coded: Some(coded), ..shape.options };
        is_plain.then_some(Shape { name: name.to_owned(), options, ..shape })
    })?;
    Some(Model::random(shape, SEED))
}
