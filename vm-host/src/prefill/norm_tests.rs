//! The norms of a chunk, compiled as host C++, against the definition.

use abi::Feature;

use crate::emulated::{compiler, run};

/// Vectors are f16, of magnitudes up to 3: half a unit in the last place is 1e-3.
const ERROR_MAX: f64 = 1.2e-3;

fn error(compiler: &str, spoil: Option<(&str, &str)>) -> f64 {
    let sources = [
        "keys.cuh",
        "pages.cuh",
        "op_attention_merge.cuh",
        "features.cuh",
        "cache_rows.cuh",
        "op_attention.cuh",
        "prefill_vectors.cuh",
    ];
    let features = 1 << Feature::Norm as u32 | 1 << Feature::PostNorm as u32;
    let defines = [
        "-DAMK_HEAD_DIM=64".to_owned(),
        "-DAMK_GROUP=1".into(),
        "-DAMK_QK_NORM=0".into(),
        "-DAMK_SEQS=1".into(),
        format!("-DAMK_FEATURES={features}"),
    ];
    let said = run(compiler, "norms", (&sources, &defines), spoil, "");
    let error = said.trim().parse().unwrap_or(f64::INFINITY);
    if error.is_nan() { f64::INFINITY } else { error }
}

#[test]
fn norms_before_and_behind_blocks_and_of_all_heads_are_those_of_the_definition() {
    let Some(compiler) = compiler() else { return };
    let worst = error(&compiler, None);
    assert!(worst <= ERROR_MAX, "{worst:e}");
    for (from, to) in [
        ("norm == nullptr;", "false;"),
        ("v += sums[i];", "v += sums[0];"),
        ("/ (float)columns + eps", "/ (float)stride + eps"),
        ("fmaf(v.z * n.z, scale, r.z)", "fmaf(v.z * n.z, scale, 0.f)"),
        ("norm += keys ? q_width : 0;", ""),
        ("stride + (keys ? q_width : 0)", "stride + (keys ? k_width : 0)"),
        ("? k_width : q_width;", "? q_width : q_width;"),
    ] {
        let worst = error(&compiler, Some((from, to)));
        assert!(worst > ERROR_MAX, "nobody notices {to} for {from}: {worst:e}");
    }
}
