//! Models with heads whose width is a multiple of 16 but no power of two.

use model::{Family, Model, Shape};
use rayon::prelude::*;
use vm_device::Variant;

/// Random models of two layers by the elements of a head: with as many key/value heads as query heads, or fewer, and with normalised heads.
pub(crate) fn odd_heads() -> Vec<(u32, Model)> {
    let shapes = [
        (48, 6, 3, Family::Llama),
        (80, 5, 1, Family::Qwen3),
        (96, 4, 4, Family::Phi3),
        (96, 8, 2, Family::Qwen3),
        (112, 4, 2, Family::Llama),
        (160, 2, 2, Family::Llama),
        (192, 4, 1, Family::Qwen3),
    ];
    let model = |(head_dim, heads, kv_heads, family): (u32, u32, u32, Family)| {
        let shape = Shape {
            name: format!("{heads} heads of {head_dim}"),
            family,
            hidden: 320,
            heads,
            kv_heads,
            head_dim,
            ffn: 512,
            vocab: 512,
            layers: 2,
            max_positions: 2048,
            dtype: ir::DType::Bf16,
            ..Shape::default()
        };
        (head_dim, Model::random(shape, 7))
    };
    shapes.map(model).into()
}

/// Fills the cache with these kernels, on all cores: one after the other they take minutes. What cannot be compiled is said where it is launched.
pub(crate) fn compile(variants: &[Variant]) {
    let cache = vm_host::default_cache();
    let arch = vm_device::ARCHITECTURES[0].name;
    variants.par_iter().for_each(|variant| {
        let _ = vm_host::compile(variant, arch, cache.as_deref());
    });
}
