//! Attention on the device, of a step and of a prompt's chunk, compiled as host C++: heads of every kind of width against the definition.

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
const CHUNKS: [Heads; 6] =
    [(32, 2, 1), (48, 1, 0), (64, 2, 1), (80, 2, 1), (96, 1, 0), (112, 1, 1)];

/// Keys and values are f16, as in the reference; of a step, nothing else is.
const STEP_MAX: f64 = 1e-4;
/// Queries, softmax weights and results of a chunk are f16 too.
const CHUNK_MAX: f64 = 3e-3;

/// What is run: a step, a prompt's chunk, or one with a score of each head beside those of its keys.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Step,
    Chunk,
    ChunkWithSinks,
}
use Way::{Chunk, ChunkWithSinks, Step};

fn device_says(
    compiler: &str,
    (head_dim, group, normed): Heads,
    way: Way,
    spoil: Option<(&str, &str)>,
) -> String {
    let chunks = way != Step;
    let sinks = u32::from(way == ChunkWithSinks);
    let mut sources =
        vec!["keys.cuh", "pages.cuh", "op_attention_merge.cuh", "features.cuh", "op_attention.cuh"];
    if chunks {
        sources.extend(["prefill_vectors.cuh", "prefill_attention.cuh"]);
    }
    let defines = [
        format!("-DAMK_HEAD_DIM={head_dim}"),
        format!("-DAMK_GROUP={group}"),
        format!("-DAMK_QK_NORM={normed}"),
        format!("-DAMK_FEATURES={}", sinks << abi::Feature::Sinks as u32),
        "-DAMK_SEQS=1".into(),
    ];
    let program = if chunks { "chunks" } else { "attention" };
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
    for heads in STEPS {
        let said = device_says(&compiler, heads, Step, None);
        let error = error_of(&said);
        assert!(error <= STEP_MAX, "{heads:?}: {said}");
        let masks = said.split_whitespace().skip(1).map(|word| word.parse().expect("a number"));
        let host: Vec<u32> = (0..16).map(|key| row_swizzle(key, heads.0)).collect();
        assert_eq!(masks.collect::<Vec<u32>>(), host, "{heads:?}: chunks of a row");
    }
    for (heads, from, to) in [
        ((80, 1, 0), "block * 32 + threadIdx.x % 4 * 8 < AMK_HEAD_DIM", "block < 4"),
        ((96, 2, 1), "HEAD_PARTS == HEAD_LANES ||", "true ||"),
        ((96, 1, 0), "key[HEAD_PARTS]", "key[HEAD_LANES]"),
        ((96, 1, 0), "room / ROW_ROOM", "room / ROW_BYTES"),
        ((80, 1, 0), "(ROW_CHUNKS & (0 - ROW_CHUNKS)) < 8", "false"),
    ] {
        let error = error_of(&device_says(&compiler, heads, Step, Some((from, to))));
        assert!(error > STEP_MAX, "{heads:?}: nobody notices {to} for {from}");
    }
}

#[test]
fn a_chunk_attends_with_heads_of_every_multiple_of_16() {
    let Some(compiler) = compiler() else { return };
    for heads in CHUNKS {
        let said = device_says(&compiler, heads, Chunk, None);
        assert!(error_of(&said) <= CHUNK_MAX, "{heads:?}: {said}");
    }
    let with_sinks = |spoil| error_of(&device_says(&compiler, (64, 2, 0), ChunkWithSinks, spoil));
    assert!(with_sinks(None) <= CHUNK_MAX, "sinks");
    let beside = "__ldg(a.sinks + a.head) * LOG2_E";
    for (from, to) in [(beside, "__ldg(a.sinks + a.head)"), (beside, "__ldg(a.sinks) * LOG2_E")] {
        let error = with_sinks(Some((from, to)));
        assert!(error > CHUNK_MAX, "nobody notices {to} for {from}");
    }
    for (heads, from, to) in [
        ((96, 1, 0), "place = j * PART_BYTES", "place = 0"),
        ((96, 1, 0), "values + part * PART_BYTES", "values + 0 * part"),
        ((80, 1, 1), "token < tokens && head_lane(part)", "token < tokens"),
    ] {
        let error = error_of(&device_says(&compiler, heads, Chunk, Some((from, to))));
        assert!(error > CHUNK_MAX, "{heads:?}: nobody notices {to} for {from}");
    }
}
