//! The kernels of a chunk, and the block shapes of its products.

use abi::{ATTEND_KEYS, ATTEND_TOKENS, Feature, Unpack};
use vm_device::PrefillVariant;

use super::{GemmShape, HALF_BYTES, SHAPES, STAGE_UNITS, X_ROW_BYTES};
use crate::driver::{Function, Module};
use crate::error::HostError;

pub(super) struct Kernels {
    /// For matrices of codes.
    pub(super) unpack: Option<Function>,
    pub(super) embed: Function,
    pub(super) norm: Function,
    /// For blocks whose results are normalised.
    pub(super) post_norm: Option<Function>,
    /// For queries and keys that are normalised over all heads.
    pub(super) norm_heads: Option<Function>,
    pub(super) heads: Function,
    pub(super) attention: Function,
    pub(super) logits: Function,
    pub(super) experts: Option<ExpertKernels>,
    pub(super) wide: [Function; 3],
    pub(super) middle: [Function; 3],
    pub(super) small: [Function; 3],
}

/// Those of models with experts, besides the products.
pub(super) struct ExpertKernels {
    pub(super) route: Function,
    pub(super) rank: Function,
    pub(super) blocks: Function,
    pub(super) gather: Function,
    pub(super) combine: Function,
}

impl ExpertKernels {
    fn of(module: &Module) -> Result<Self, HostError> {
        Ok(Self {
            route: module.function(c"amk_prefill_route")?,
            rank: module.function(c"amk_prefill_rank")?,
            blocks: module.function(c"amk_prefill_blocks")?,
            gather: module.function(c"amk_prefill_gather")?,
            combine: module.function(c"amk_prefill_combine")?,
        })
    }
}

/// What is done with a matrix's products; in the order of `Kernels::wide`.
#[derive(Clone, Copy)]
pub(super) enum Finish {
    Store,
    Residual,
    SiluMul,
}

impl Kernels {
    pub(super) fn of(module: &Module, variant: &PrefillVariant) -> Result<Self, HostError> {
        let gemms = |shape: GemmShape, names: [&std::ffi::CStr; 3]| {
            let of = |name| {
                let function = module.function(name)?;
                function.allow_shared(gemm_block(shape).shared())?;
                Ok::<_, HostError>(function)
            };
            let [store, residual, silu] = names.map(of);
            Ok::<_, HostError>([store?, residual?, silu?])
        };
        let attention = module.function(c"amk_prefill_attention")?;
        attention.allow_shared(attend_shared(variant.head_dim))?;
        let codes = variant.unpack != 1 << Unpack::None as u32;
        let has = |feature: Feature| variant.features >> feature as u32 & 1 != 0;
        let of = |needed: bool, name| needed.then(|| module.function(name)).transpose();
        Ok(Self {
            unpack: of(codes, c"amk_prefill_unpack")?,
            post_norm: of(has(Feature::PostNorm), c"amk_prefill_post_norm")?,
            norm_heads: of(has(Feature::Norm), c"amk_prefill_norm_heads")?,
            embed: module.function(c"amk_prefill_embed")?,
            norm: module.function(c"amk_prefill_norm")?,
            heads: module.function(c"amk_prefill_heads")?,
            attention,
            logits: module.function(c"amk_prefill_logits")?,
            experts: has(Feature::Route).then(|| ExpertKernels::of(module)).transpose()?,
            wide: gemms(
                GemmShape::Wide,
                [c"amk_prefill_store_wide", c"amk_prefill_residual_wide", c"amk_prefill_silu_wide"],
            )?,
            middle: gemms(
                GemmShape::Middle,
                [
                    c"amk_prefill_store_middle",
                    c"amk_prefill_residual_middle",
                    c"amk_prefill_silu_middle",
                ],
            )?,
            small: gemms(
                GemmShape::Small,
                [
                    c"amk_prefill_store_small",
                    c"amk_prefill_residual_small",
                    c"amk_prefill_silu_small",
                ],
            )?,
        })
    }
}

/// A block of the matrix products, as the kernels are compiled.
pub(super) struct GemmBlock {
    pub(super) tokens: u32,
    rows: u32,
    stages: u32,
    pub(super) threads: u32,
    /// Microseconds that a multiprocessor takes for a unit of columns with this many blocks side by side, from one to as many as fit:
    /// measured on an H200 (docs/lab/2026-11-25-prompt.md, second run). Only their ratios matter.
    us: &'static [f64],
}

pub(super) fn gemm_block(shape: GemmShape) -> GemmBlock {
    let (tokens, rows, stages, threads, us): (_, _, _, _, &[f64]) = match shape {
        GemmShape::Auto | GemmShape::Wide => (256, 128, 4, 384, &[0.40]),
        GemmShape::Middle => (128, 128, 6, 384, &[0.25]),
        GemmShape::Small => (64, 64, 4, 160, &[0.19, 0.225, 0.265]),
    };
    GemmBlock { tokens, rows, stages, threads, us }
}

impl GemmBlock {
    /// Bytes of shared memory: the stages and two barriers for each.
    pub(super) fn shared(&self) -> u32 {
        let weights = self.rows / abi::UNIT_ROWS * STAGE_UNITS * abi::UNIT_BYTES;
        self.stages * (self.tokens * X_ROW_BYTES + weights + 16)
    }

    pub(super) fn count(&self, tokens: u32, tiles: u32) -> u32 {
        tokens.div_ceil(self.tokens) * self.row_blocks(tiles)
    }

    pub(super) fn row_blocks(&self, tiles: u32) -> u32 {
        (tiles * abi::UNIT_ROWS).div_ceil(self.rows)
    }

    /// Blocks that fit on a multiprocessor.
    pub(super) fn beside(&self) -> u32 {
        self.us.len() as u32
    }

    /// Estimated microseconds for a unit of a matrix's columns: rounds over all multiprocessors; in the last each may have fewer blocks.
    fn cost(&self, blocks: u32, sms: u32) -> f64 {
        let (full, rest) = (blocks / (self.beside() * sms), blocks % (self.beside() * sms));
        let round = |beside: u32| if beside == 0 { 0.0 } else { self.us[beside as usize - 1] };
        f64::from(full) * round(self.beside()) + round(rest.div_ceil(sms))
    }
}

/// Bytes of shared memory per block of the attention: keys and values, double-buffered, and the queries.
pub(super) fn attend_shared(head_dim: u32) -> u32 {
    (2 * 2 * ATTEND_KEYS + ATTEND_TOKENS) * head_dim * HALF_BYTES
}

/// The shape that is likely the fastest for a matrix, unless one is requested.
pub(super) fn choose(asked: GemmShape, tokens: u32, tiles: u32, sms: u32) -> GemmShape {
    cheapest(asked, sms, |block| block.count(tokens, tiles))
}

/// The same for experts, from the number of choices of all tokens and the tiles of an expert: the last block of an expert's tokens is half full on average.
pub(super) fn choose_of_experts(
    asked: GemmShape,
    (choices, experts): (u32, u32),
    tiles: u32,
    sms: u32,
) -> GemmShape {
    cheapest(asked, sms, |block| {
        let chosen = choices.min(experts);
        let blocks = (choices / block.tokens + chosen / 2).max(chosen);
        blocks * block.row_blocks(tiles)
    })
}

fn cheapest(asked: GemmShape, sms: u32, blocks: impl Fn(&GemmBlock) -> u32) -> GemmShape {
    if asked != GemmShape::Auto {
        return asked;
    }
    let cost = |shape: &GemmShape| {
        let block = gemm_block(*shape);
        block.cost(blocks(&block), sms)
    };
    let best = SHAPES.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
    best.unwrap_or(GemmShape::Wide)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The estimate picks the faster shape wherever a measurement showed at least 10 % difference.
    #[test]
    fn the_form_that_was_measured_to_be_faster_is_chosen() {
        use GemmShape::{Auto, Middle, Small, Wide};
        let measured = [
            ("llama-3.2-1b gate_up", 2048, 16384, Wide), // 202 us against 267 and 365
            ("llama-3.2-1b gate_up", 500, 16384, Wide),  // 54 against 68 and 93
            ("llama-3.2-1b gate_up", 129, 16384, Wide),  // 32 against 37 and 38
            ("llama-3.2-1b down", 2048, 2048, Wide),     // 103 against 128 and 199
            ("llama-3.2-1b down", 1000, 2048, Middle),   // 64 against 93 and 116
            ("llama-3.2-1b down", 129, 2048, Small),     // 50 against 60 and 86
            ("llama-3.2-1b o", 1000, 2048, Middle),      // 26 against 35 and 37
            ("llama-3.2-1b o", 64, 2048, Small),         // 17 against 20 and 27
            ("llama-3.2-1b qkv", 1000, 3072, Wide),      // 30 against 37 and 39
            ("llama-3.2-1b qkv", 500, 3072, Middle),     // 20 against 22 and 28
            ("llama-3.2-1b qkv", 64, 3072, Small),       // 17 against 19 and 26
        ];
        for (name, tokens, rows, faster) in measured {
            assert_eq!(choose(Auto, tokens, rows / 8, 132), faster, "{name}, {tokens} tokens");
        }
        assert_eq!(choose(Small, 2048, 2048, 132), Small, "asked for");
        // Predicted, not measured: 128 tokens of each of 128 experts, 256 of each of 32, one of each of 60.
        let experts = |choices, experts, rows: u32| {
            choose_of_experts(Auto, (choices, experts), rows / 8, 132)
        };
        assert_eq!(experts(16384, 128, 1536), Middle, "qwen3-30b-a3b");
        assert_eq!(experts(8192, 32, 5760), Wide, "gpt-oss-20b");
        assert_eq!(experts(64, 60, 2816), Small, "16 tokens of qwen1.5-moe");
    }

    #[test]
    fn every_row_and_token_has_a_block() {
        for shape in SHAPES {
            let block = gemm_block(shape);
            assert_eq!(block.count(1, 1), 1);
            assert_eq!(block.count(block.tokens + 1, block.rows / 8 + 1), 4, "{shape:?}");
        }
    }

    #[test]
    fn blocks_fit_the_shared_memory() {
        for shape in SHAPES {
            let block = gemm_block(shape);
            assert!(block.beside() * (block.shared() + 1024) <= 228 << 10, "{shape:?}");
        }
    }
}
