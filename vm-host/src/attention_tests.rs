//! Attention on the device, of a step and of a prompt's chunk, compiled as host C++: heads of every kind of width against the definition.

use abi::Feature;
use ir::KvDtype;

use crate::emulated::{compiler, run};
use crate::prefill::row_swizzle;

/// Elements of a head, query heads of a group, whether they are normalised.
type Heads = (u32, u32, u32);

/// Of powers of two, and of even and odd multiples of 16 between them.
const STEPS: [Heads; 10] = [
    (16, 2, 0),
    (48, 2, 1),
    (64, 2, 1),
    (80, 5, 1),
    (96, 1, 0),
    (112, 2, 1),
    (128, 3, 0),
    (160, 2, 0),
    (192, 4, 1),
    (256, 1, 1),
];
const CHUNKS: [Heads; 8] = [
    (32, 2, 1),
    (48, 1, 0),
    (64, 2, 1),
    (80, 2, 1),
    (96, 1, 0),
    (112, 1, 1),
    (160, 1, 0),
    (256, 1, 1),
];

/// Keys and values are f16, as in the reference; of a step, nothing else is.
const STEP_MAX: f64 = 1e-4;
/// Queries, softmax weights and results of a chunk are f16 too.
const CHUNK_MAX: f64 = 3e-3;

/// Mutations of what reads and writes rows of codes.
const CODES_SPOILED: [(&str, &str); 9] = [
    ("+ 0x1fffffu", "+ 0u"),
    ("(uint32_t)(e + 15) << 10", "(uint32_t)(e + 14) << 10"),
    ("ROW_BYTES + chunk * 8", "ROW_BYTES + chunk * 16"),
    ("0x3120", "0x3210"),
    ("% 4 * 2 * ROW_BYTES + AMK_HEAD_DIM", "% 4 * ROW_BYTES + AMK_HEAD_DIM"),
    ("at + 9 * ROW_BYTES", "at + ROW_BYTES"),
    ("lane % 16 * ROW_BYTES + step", "lane % 8 * ROW_BYTES + step"),
    ("i / 2 * 16 + lane / 4 * 2 + i % 2", "i * 8 + lane / 4"),
    ("row_encode(fresh_value(w));", ""),
];

/// What is run: a step, one of a window in a kernel of so many sequences with so many splits,
/// a prompt's chunk, or one with a feature of some
/// models.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Step,
    Window(u32, u32),
    Chunk,
    ChunkWith(Feature),
}
use Way::{Chunk, ChunkWith, Step, Window};

fn device_says(
    compiler: &str,
    (head_dim, group, normed): Heads,
    (way, kv): (Way, KvDtype),
    spoil: Option<(&str, &str)>,
) -> String {
    let (seqs, splits) = if let Window(seqs, splits) = way { (seqs, splits) } else { (1, 2) };
    let chunks = matches!(way, Chunk | ChunkWith(_));
    let feature = if let ChunkWith(feature) = way { 1 << feature as u32 } else { 0 };
    let mut sources = vec!["keys.cuh", "pages.cuh", "op_attention_merge.cuh", "features.cuh"];
    sources.extend(["cache_rows.cuh", "op_attention.cuh"]);
    if chunks {
        sources.extend(["prefill_vectors.cuh", "prefill_attention.cuh"]);
    }
    if seqs > 1 {
        sources.push("batch.cuh");
    }
    let defines = [
        format!("-DAMK_HEAD_DIM={head_dim}"),
        format!("-DAMK_GROUP={group}"),
        format!("-DAMK_QK_NORM={normed}"),
        format!("-DAMK_FEATURES={}", crate::compile::kv_feature(kv) | feature),
        format!("-DAMK_SEQS={seqs}"),
        "-DAMK_BATCH_TILES=1".into(),
        format!("-DSPLITS_OF_TEST={splits}"),
    ];
    let program = match way {
        Step => "attention",
        Window(..) => "windows",
        Chunk | ChunkWith(_) => "chunks",
    };
    run(compiler, program, (&sources, &defines), spoil, "")
}

/// The greatest error that a program printed, or infinity if a check of its own failed.
fn error_of(said: &str) -> f64 {
    let first = said.split_whitespace().next();
    let error = first.and_then(|word| word.parse().ok()).unwrap_or(f64::INFINITY);
    if error.is_nan() { f64::INFINITY } else { error }
}

#[test]
fn a_step_attends_with_heads_of_every_multiple_of_16() {
    let Some(compiler) = compiler() else { return };
    for (kv, heads) in KvDtype::ALL.into_iter().flat_map(|kv| STEPS.map(|heads| (kv, heads))) {
        let said = device_says(&compiler, heads, (Step, kv), None);
        let error = error_of(&said);
        assert!(error <= STEP_MAX, "{kv:?} {heads:?}: {said}");
        let masks = said.split_whitespace().skip(1).map(|word| word.parse().expect("a number"));
        let swizzle = |key| if kv == KvDtype::F16 { row_swizzle(key, heads.0) } else { 0 };
        let host: Vec<u32> = (0..16).map(swizzle).collect();
        assert_eq!(masks.collect::<Vec<u32>>(), host, "{kv:?} {heads:?}: chunks of a row");
    }
    for (heads, from, to) in [
        ((80, 1, 0), "block * 32 + threadIdx.x % 4 * 8 < AMK_HEAD_DIM", "block < 4"),
        ((96, 2, 1), "HEAD_PARTS == HEAD_LANES ||", "true ||"),
        ((96, 1, 0), "key[HEAD_PARTS]", "key[HEAD_LANES]"),
        ((96, 1, 0), "room / ROW_ROOM", "room / ROW_BYTES"),
        ((80, 1, 0), "(HEAD_CHUNKS & (0 - HEAD_CHUNKS)) < 8", "false"),
    ] {
        let wide = (Step, KvDtype::F16);
        let error = error_of(&device_says(&compiler, heads, wide, Some((from, to))));
        assert!(error > STEP_MAX, "{heads:?}: nobody notices {to} for {from}");
    }
    for (from, to) in CODES_SPOILED {
        let coded = (Step, KvDtype::E4m3);
        let error = error_of(&device_says(&compiler, (64, 2, 1), coded, Some((from, to))));
        assert!(error > STEP_MAX, "nobody notices {to} for {from}");
    }
}

/// Heads of windows, the sequences of their kernels, and splits. Those of wide heads have room for 4 new keys and values; with
/// one split the newest key of a long context is not a warp's only one.
const WINDOWS: [(Heads, u32, u32); 4] =
    [((64, 4, 0), 8, 1), ((80, 5, 1), 4, 2), ((128, 2, 1), 8, 2), ((256, 1, 1), 4, 2)];

/// Each position of a window has the bits that it has alone, also in the cache, and those are right.
#[test]
fn a_window_attends_as_its_positions_one_by_one() {
    let Some(compiler) = compiler() else { return };
    let says = |(heads, seqs, splits): (Heads, u32, u32), kv, spoil| {
        device_says(&compiler, heads, (Window(seqs, splits), kv), spoil)
    };
    let right =
        |said: &str| error_of(said) <= STEP_MAX && said.split_whitespace().skip(1).eq(["0", "0"]);
    let wide = WINDOWS.map(|of| (of, KvDtype::F16));
    for (of, kv) in wide.into_iter().chain([(WINDOWS[1], KvDtype::E4m3)]) {
        let said = says(of, kv, None);
        assert!(right(&said), "{of:?}, {kv:?}: {said}");
    }
    for (from, to) in [
        // No row of another sequence, or that of the wrong one.
        ("position - seqs_before(w) - walk.start", "position - walk.start"),
        ("position - seqs_before(w) - walk.start", "position - w.seq - walk.start"),
        ("w.seq + walk.start + key - position", "w.seq"),
        ("seq % FRESH_ROWS", "0 * seq"),
        // Keys, values, or the task's part of both is missing.
        ("rows_renew(w, walk, count, tile, values, HEAD_CHUNKS);", ""),
        ("rows_renew(w, walk, count, tile, w.ring + (rows - w.ring), 0);", ""),
        ("(int32_t)first > (int32_t)tile ? first : tile", "first"),
        ("fresh_take_all(w, st, p);\n    }", "}"),
        // Each of them as of one sequence, or not in the cache.
        ("fresh_take_words(in_seq(w, seq), st, p);", "fresh_take_words(w, st, p);"),
        ("fresh_store(w, p, fresh_row(w, st.buffer[AMK_READS_STAGED + 1], p, fresh_page(w)));", ""),
        (
            "(lane ^ row_swizzle(walk.start + key)) * 16, row",
            "(lane ^ row_swizzle(key + 1)) * 16, row",
        ),
    ] {
        let said = says(((64, 2, 0), 8, 1), KvDtype::F16, Some((from, to)));
        assert!(!right(&said), "nobody notices {to} for {from}");
    }
    let said = says(WINDOWS[1], KvDtype::E4m3, Some(("row_encode(fresh_value(w));", "")));
    assert!(!right(&said), "nobody notices values that are no codes");
}

#[test]
fn a_chunk_attends_with_heads_of_every_multiple_of_16() {
    let Some(compiler) = compiler() else { return };
    let all = KvDtype::ALL.into_iter().flat_map(|kv| CHUNKS.map(|heads| (kv, heads)));
    // Wide heads take long here. Rows of codes of 160 elements have nothing that those of 96 and of 256 have not.
    for (kv, heads) in all.filter(|(kv, heads)| *kv == KvDtype::F16 || heads.0 != 160) {
        let said = device_says(&compiler, heads, (Chunk, kv), None);
        assert!(error_of(&said) <= CHUNK_MAX, "{kv:?} {heads:?}: {said}");
    }
    let with = |feature, spoil| {
        let way = (ChunkWith(feature), KvDtype::F16);
        error_of(&device_says(&compiler, (64, 2, 0), way, spoil))
    };
    assert!(with(Feature::Sinks, None) <= CHUNK_MAX, "sinks");
    assert!(with(Feature::ScoreCap, None) <= CHUNK_MAX, "capped scores");
    let beside = "__ldg(a.sinks + a.head) * LOG2_E";
    for (feature, from, to) in [
        (Feature::Sinks, beside, "__ldg(a.sinks + a.head)"),
        (Feature::Sinks, beside, "__ldg(a.sinks) * LOG2_E"),
        (Feature::ScoreCap, "score_capped(s[j][i], cap)", "capped(s[j][i], cap)"),
    ] {
        let error = with(feature, Some((from, to)));
        assert!(error > CHUNK_MAX, "nobody notices {to} for {from}");
    }
    for (heads, from, to) in [
        (
            (96, 1, 0),
            "place = j * (ROW_LANES / PART_CHUNKS)",
            "place = 0 * (ROW_LANES / PART_CHUNKS)",
        ),
        ((256, 1, 1), "place = j * (ROW_LANES / PART_CHUNKS)", "place = j"),
        ((256, 1, 1), "stage_load(queries_place(first + k))", "stage_load(queries_place(k))"),
        ((96, 1, 0), "values + part * PART_BYTES", "values + 0 * part"),
        ((80, 1, 1), "token < tokens && head_lane(part)", "token < tokens"),
    ] {
        let wide = (Chunk, KvDtype::F16);
        let error = error_of(&device_says(&compiler, heads, wide, Some((from, to))));
        assert!(error > CHUNK_MAX, "{heads:?}: nobody notices {to} for {from}");
    }
    for (from, to) in [
        ("(2 * piece + half) ^ head_swizzle(row)", "(2 * piece + half)"),
        ("if (part == 0)", "if (false)"),
        ("head < heads + kv_heads ? u[i] : x[i]", "x[i]"),
    ] {
        let coded = (Chunk, KvDtype::E4m3);
        let error = error_of(&device_says(&compiler, (64, 2, 1), coded, Some((from, to))));
        assert!(error > CHUNK_MAX, "nobody notices {to} for {from}");
    }
}
