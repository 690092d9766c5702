//! The kernels of experts in a chunk, compiled as host C++, against the definition.

use abi::Feature;

use crate::emulated::{compiler, run};

/// Vectors and hidden layers are f16: the sums of some 100 of them, of magnitude 10.
const ERROR_MAX: f64 = 5e-3;

/// Greatest error with the small or the middle shape of the products, with a clamped activation or a plain one, and on two devices or one.
fn error(compiler: &str, [middle, clamped, parts]: [bool; 3], spoil: Option<(&str, &str)>) -> f64 {
    let sources = [
        "keys.cuh",
        "pages.cuh",
        "op_attention_merge.cuh",
        "features.cuh",
        "cache_rows.cuh",
        "op_attention.cuh",
        "rank.cuh",
        "route.cuh",
        "prefill_vectors.cuh",
        "prefill_route.cuh",
        "prefill_gemm.cuh",
    ];
    let features = [Feature::Route, Feature::ClampedSilu];
    let features = features.iter().fold(0, |mask, &feature| mask | 1 << feature as u32);
    let mut defines = vec![
        "-DAMK_HEAD_DIM=64".to_owned(),
        "-DAMK_GROUP=1".into(),
        "-DAMK_QK_NORM=0".into(),
        "-DAMK_SEQS=1".into(),
        "-DAMK_UNPACK=1".into(),
        format!("-DAMK_FEATURES={features}u"),
    ];
    defines.extend(parts.then(|| "-DAMK_PARTS=1".to_owned()));
    let asked = format!("{} {}\n", u32::from(middle), u32::from(clamped));
    let said = run(compiler, "experts", (&sources, &defines), spoil, &asked);
    let error = said.trim().parse().unwrap_or(f64::INFINITY);
    if error.is_nan() { f64::INFINITY } else { error }
}

#[test]
fn the_experts_of_a_chunk_are_those_that_its_tokens_choose() {
    let Some(compiler) = compiler() else { return };
    for (middle, clamped) in [(false, false), (false, true), (true, false), (true, true)] {
        let worst = error(&compiler, [middle, clamped, false], None);
        assert!(worst <= ERROR_MAX, "middle {middle}, clamped {clamped}: {worst:e}");
    }
    // Mutations that it must detect.
    for (from, to) in [
        ("slots + rank] = expert;", "slots + rank] = rank;"),
        ("? experts : slots;", "? slots : slots + 1;"),
        (
            "chosen_weight(AMK_SCORING_SIGMOID, row[experts]",
            "chosen_weight(AMK_SCORING_SIGMOID, row[0]",
        ),
        ("rank += i < warp ? of_warps[i] : 0;", "rank += i <= warp ? of_warps[i] : 0;"),
        ("rank + __popc(", "rank + 0 * __popc("),
        ("(all[i] + PLACES - 1) / PLACES * PLACES", "all[i]"),
        ("number += (all[i] + block - 1) / block;", "number += all[i] / block;"),
        (
            "make_uint4(e, place + token, place + all[e], 0)",
            "make_uint4(e, place + token, place + token + 8, 0)",
        ),
        ("(chunk ^ to[slot] % 8)", "(chunk ^ token % 8)"),
        ("(place.expert - g.first_expert) * g.tiles", "place.expert * g.tiles"),
        ("(uint64_t)place.expert * g.tiles * AMK_UNIT_ROWS : 0", "0 : 0"),
        (
            "index % row_blocks * Shape::TILES, block.x",
            "index / row_blocks * Shape::TILES, block.x",
        ),
        ("weights[(uint64_t)token * all + slot]", "weights[(uint64_t)token * slots + slot]"),
        (
            "limit != 0.f ? AMK_ACTIVATION_CLAMPED_SILU",
            "limit == 0.f ? AMK_ACTIVATION_CLAMPED_SILU",
        ),
    ] {
        let worst = error(&compiler, [false; 3], Some((from, to)));
        assert!(worst > ERROR_MAX, "nobody notices {to} for {from}: {worst:e}");
    }
}

/// A device has some rows of every expert, finds their factors, and adds to its columns of the residual stream only.
#[test]
fn devices_with_rows_of_every_expert_have_the_sums_of_one() {
    let Some(compiler) = compiler() else { return };
    let parts = |middle, spoil| error(&compiler, [middle, false, true], spoil);
    for middle in [false, true] {
        let worst = parts(middle, None);
        assert!(worst <= ERROR_MAX, "middle {middle}: {worst:e}");
    }
    for (from, to) in [
        ("e < columns; e", "e < stride; e"),
        ("(place.expert - g.first_expert) * g.tiles", "(place.expert - g.first_expert) * 12"),
    ] {
        let worst = parts(false, Some((from, to)));
        assert!(worst > ERROR_MAX, "nobody notices {to} for {from}: {worst:e}");
    }
}
