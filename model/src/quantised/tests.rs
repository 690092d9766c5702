//! Dequantised matrices against those of the reference libraries, bit for bit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ir::{DType, TensorId, decode};

use super::checkpoint;
use super::codes::Codes;
use super::declared::Declared;
use super::grouped::Grouped;
use super::matrix::{Layout, Matrix, ScaleType, Scales, View, Zeros};
use super::{BlockType, Source, stored};
use crate::store::{self, Files, Found, Place};
use crate::{files, import, import_dequantised};

/// Folders of families that are imported.
const FOLDERS: [&str; 14] = [
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
    "gptq-asym-g128-qwen2",
    "gptq-desc-act-g128-llama",
    "gptq-sym-g128-llama",
];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/quantised").join(name)
}

/// The matrices of `dequant.safetensors`: name, shape, bits of the values.
fn expected(name: &str) -> Vec<(String, Vec<usize>, Vec<u32>)> {
    let bytes = std::fs::read(folder(name).join("dequant.safetensors")).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
    let mut list = Vec::new();
    for (name, view) in file.tensors() {
        let words = view.data().as_chunks::<4>().0;
        let bits = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        list.push((name, view.shape().to_vec(), bits));
    }
    assert_eq!(list.len(), 2);
    list
}

fn bits(values: &[u8]) -> Vec<u32> {
    values.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

#[test]
fn matrices_have_the_bits_of_the_reference_libraries() {
    for name in FOLDERS {
        let model =
            import_dequantised(&folder(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (tensor, shape, want) in expected(name) {
            let at = model.graph.tensors.iter().position(|t| t.name == tensor).expect(&tensor);
            let stored = &model.graph.tensors[at];
            assert!(stored.shape.iter().map(|&side| side as usize).eq(shape), "{name} {tensor}");
            let id = TensorId(at as u32);
            let mut values = vec![0.0; stored.len()];
            decode(stored.dtype, model.weights.bytes(id), &mut values);
            assert!(values.iter().map(|value| value.to_bits()).eq(want), "{name} {tensor}");
            assert_eq!(model.weights.file_range(id), None);
        }
        assert!(model.notes[0].contains("14 are quantised"), "{name}: {:?}", model.notes);
    }
}

#[test]
fn codes_and_scales_mean_the_same_bits() {
    for (name, stored) in [
        ("ct-fp8-dynamic-llama", DType::E4m3),
        ("ct-fp8-static-qwen3", DType::E4m3),
        ("ct-int8-llama", DType::Int8),
        ("fp8-block-llama", DType::E4m3G64),
        ("ct-w4a16-g128-llama", DType::Int4G128),
        ("ct-w4a16-g32-qwen3", DType::Int4G32),
        ("ct-w4a16-asym-g128-qwen2", DType::Int4G128Zero),
        ("gptq-sym-g128-llama", DType::Int4G128),
        ("gptq-asym-g128-qwen2", DType::Int4G128Zero),
        ("awq-g128-qwen2", DType::Int4G128Zero),
        ("fp8-block-qwen3-moe", DType::E4m3G64),
    ] {
        let model = import(&folder(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(model.graph.dtype, DType::F16, "{name}");
        for (tensor, _, want) in expected(name) {
            let id = |name: &str| {
                TensorId(model.graph.tensors.iter().position(|t| t.name == name).expect(name) as u32)
            };
            let values = |id: TensorId| {
                let tensor = model.graph.tensor(id);
                let mut out = vec![0.0; tensor.len()];
                let cols = *tensor.shape.last().expect("a side") as usize;
                let stored = model.weights.bytes(id).chunks(tensor.dtype.row_bytes(cols));
                for (row, out) in stored.zip(out.chunks_mut(cols)) {
                    decode(tensor.dtype, row, out);
                }
                (tensor.dtype, out)
            };
            let (dtype, codes) = values(id(&tensor));
            // Those of experts are the first one's.
            let first = tensor.replace(".experts.3.", ".experts.0.");
            let (_, scales) = values(id(&format!("{first}_scale")));
            // A row of this one is no longer than a block.
            let one = name == "fp8-block-qwen3-moe" && tensor.ends_with("k_proj.weight");
            assert_eq!(dtype, if one { DType::E4m3 } else { stored }, "{name} {tensor}");
            let rows = codes.chunks(codes.len() / scales.len()).zip(&scales);
            let got =
                rows.flat_map(|(row, scale)| row.iter().map(move |code| (code * scale).to_bits()));
            assert!(got.eq(want), "{name} {tensor}");
        }
    }
}

#[test]
fn matrices_of_16_bits_beside_them_keep_their_values() {
    let model = import_dequantised(&folder("ct-int8-llama")).expect("a model");
    let path = folder("ct-int8-llama").join("model.safetensors");
    let bytes = std::fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
    let stored = file.tensor("lm_head.weight").expect("a tensor").data();
    let mut want = vec![0.0; stored.len() / 2];
    decode(ir::DType::Bf16, stored, &mut want);
    let made = bits(model.weights.bytes(model.graph.lm_head));
    assert!(made.iter().copied().eq(want.iter().map(|value| value.to_bits())));
}

/// The tensors of a folder whose family is not imported.
fn opened(name: &str) -> (Files, HashMap<String, Found>) {
    store::open_single(&folder(name)).expect("a checkpoint")
}

#[test]
fn scales_of_blocks_may_be_bf16() {
    let name = "fp8-block-qwen3-moe";
    let config = files::read_object(&folder(name).join("config.json"), files::SMALL_FILE_MAX);
    let config = config.expect("a file").expect("an object");
    let declared = Declared::parse(&config).expect("no problems").expect("a format");
    let (files, mut found) = opened(name);
    for (tensor, shape, want) in expected(name) {
        let size = (shape[0] as u32, shape[1] as u32);
        let recognised = checkpoint::matrix(&tensor, size, &mut found, &files, &declared);
        let matrix = recognised.unwrap_or_else(|problems| panic!("{problems:?}")).matrix;
        assert!(bits(&matrix.dequantise(&files, DType::F32)) == want, "{tensor}");
    }
}

/// The experts of gpt-oss as they lie: blocks of 32 columns, each with a power of two.
#[test]
fn mxfp4_has_the_bits_of_the_reference_library() {
    let name = "mxfp4-gpt-oss";
    let (files, found) = opened(name);
    for (tensor, shape, want) in expected(name) {
        let part = |suffix: &str| found[&format!("{tensor}_{suffix}")].place();
        let scales = Scales {
            place: part("scales"),
            element: ScaleType::E8m0,
            rows_each: 1,
            cols_each: 32,
            transposed: false,
            divisor: None,
            groups: None,
        };
        let (place, codes, zeros) = (part("blocks"), Codes::E2m1, Zeros::None);
        let layout = Layout::Scaled { place, codes, zeros, scales };
        let matrix =
            Matrix { rows: shape[0] * shape[1], cols: shape[2], layout, view: View::Whole };
        assert!(bits(&matrix.dequantise(&files, DType::F32)) == want, "{tensor}");
    }
}

/// A program in bf16 would read an embedding in f32 as bf16.
#[test]
fn beside_an_embedding_of_blocks_bf16_is_multiplied_in_f16() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("zeros");
    std::fs::write(&path, [0; 64]).expect("a file");
    let files = Files::map(&path).expect("it is mapped");
    let mut graph = crate::preset("llama-3.1-8b").expect("a preset").graph;
    let place = |bytes| Place { file: 0, offset: 0, bytes };
    let (embed, lm_head) = (graph.embed, graph.lm_head);
    let source = |(id, tensor): (TensorId, &ir::Tensor)| {
        if tensor.shape.len() != 2 {
            return Source::Stored(place(64));
        }
        let layout = match id == embed {
            true => Layout::Blocks(place(34), BlockType::Q8_0),
            false => Layout::Floats(place(64), DType::Bf16),
        };
        Source::Made(Matrix { rows: 1, cols: 32, layout, view: View::Whole }, DType::F32)
    };
    let mut sources: Vec<Source> = (0..).map(TensorId).zip(&graph.tensors).map(source).collect();
    assert!(stored::stream(&mut graph, &mut sources, &files));
    let dtypes = [embed, lm_head].map(|id| graph.tensor(id).dtype);
    assert_eq!((graph.dtype, dtypes), (DType::F16, [DType::F32, DType::Bf16]));
}

#[test]
fn a_tile_whose_rows_would_share_a_foreign_scale_is_not_streamed_as_codes() {
    let (files, found) = opened("fp8-block-llama");
    let tensor = "model.layers.0.mlp.gate_proj.weight";
    let matrix = |rows, rows_each, view| {
        let place = |suffix: &str| found[&format!("{tensor}{suffix}")].place();
        let scales = Scales {
            place: place("_scale_inv"),
            element: ScaleType::Float(DType::F32),
            rows_each,
            cols_each: 128,
            transposed: false,
            divisor: None,
            groups: None,
        };
        let (codes, zeros) = (Codes::E4m3, Zeros::None);
        let layout = Layout::Scaled { place: place(""), codes, zeros, scales };
        Matrix { rows, cols: 128, layout, view }
    };
    let streamed = |rows, rows_each, view| {
        Grouped::together(&[&matrix(rows, rows_each, view)], &files).is_some()
    };
    assert!(streamed(16, 128, View::Whole));
    assert!(!streamed(12, 128, View::Whole), "a tile's last rows are those of another tensor");
    assert!(!streamed(16, 4, View::Whole), "a tile has rows of two scales");
    assert!(!streamed(16, 128, View::Pairs(16)), "neighbours come from two halves of a head");
}
