//! GGUF files against the reference library, and damaged ones.

use std::path::{Path, PathBuf};

use ir::TensorId;
use proptest::prelude::*;
use proptest::test_runner::Config;

use super::{Value, parse};
use crate::quantised::BlockType;
use crate::{Scaling, import, import_dequantised};

const FILES: [&str; 4] =
    ["gguf-q4_0-llama", "gguf-q4_k_m-qwen3", "gguf-q6_k-llama", "gguf-q8_0-llama"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/quantised").join(name)
}

pub(super) fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(folder(name).join("model.gguf")).expect("a file")
}

/// Imports these bytes as a file.
pub(super) fn read(bytes: &[u8]) -> Result<crate::Model, String> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).expect("a file");
    // The mapping outlives the name.
    import(&path).map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))
}

fn refused(bytes: &[u8]) -> String {
    read(bytes).expect_err("a refusal")
}

/// The matrices of a file with the reference library's values, against a model's. Codes and scales mean the same bits.
fn check_matrices(name: &str, model: &crate::Model) {
    let bytes = std::fs::read(folder(name).join("dequant.safetensors")).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a checkpoint");
    assert_eq!(file.len(), 2);
    for (tensor, view) in file.tensors() {
        let named = |t: &ir::Tensor| super::import::file_name(&t.name) == tensor;
        let at = model.graph.tensors.iter().position(named).expect("a tensor");
        let dtype = model.graph.tensors[at].dtype;
        let made = model.weights.bytes(TensorId(at as u32));
        let cols = view.shape()[1];
        let width = model.graph.head_dim as usize;
        let turned = name.ends_with("llama") && tensor.contains("attn_k");
        for (row, made) in made.chunks_exact(dtype.row_bytes(cols)).enumerate() {
            // The file has the rows of a head's halves in turn.
            let (head, half, pair) = (row / width, row % width / (width / 2), row % (width / 2));
            let stored = if turned { head * width + 2 * pair + half } else { row };
            let mut values = vec![0.0; cols];
            ir::decode(dtype, made, &mut values);
            let got: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let want = &view.data()[stored * cols * 4..][..cols * 4];
            assert!(got == want, "{name} {tensor} row {row} in {}", dtype.name());
        }
    }
}

#[test]
fn matrices_have_the_bits_of_the_reference_library() {
    for name in FILES {
        let file = folder(name).join("model.gguf");
        check_matrices(name, &import_dequantised(&file).unwrap_or_else(|e| panic!("{e}")));
        check_matrices(name, &import(&file).unwrap_or_else(|e| panic!("{e}")));
    }
}

/// The types of a file's matrices are those of the smallest codes that hold them, of packed ones together; the embedding is
/// read without scales.
#[test]
fn matrices_are_streamed_as_codes() {
    use ir::DType::{F16, F32, Int4G32, Int4K, Int8G32, Int8K};
    for (name, [embed, head], layers) in [
        ("gguf-q4_0-llama", [F32, Int8G32], [[Int4G32; 3]; 2]),
        ("gguf-q4_k_m-qwen3", [F32, Int8K], [[Int8K, Int4K, Int8K], [Int8K, Int4K, Int4K]]),
        ("gguf-q6_k-llama", [F32, Int8K], [[Int8K; 3]; 2]),
        ("gguf-q8_0-llama", [F32, Int8G32], [[Int8G32; 3]; 2]),
    ] {
        let model = import(&folder(name).join("model.gguf")).unwrap_or_else(|e| panic!("{e}"));
        let graph = &model.graph;
        let dtype = |tensor: TensorId| graph.tensor(tensor).dtype;
        assert_eq!([dtype(graph.embed), dtype(graph.lm_head)], [embed, head], "{name}");
        let of = |layer: &ir::Layer| {
            let gated = layer.gated().expect("no experts");
            [layer.attention.body.v.weight, gated.gate.weight, gated.down.weight].map(dtype)
        };
        let got: Vec<_> = graph.layers.iter().map(of).collect();
        assert_eq!(got, layers, "{name}");
        assert_eq!(graph.dtype, F16, "{name}");
    }
}

#[test]
fn the_header_becomes_the_shape() {
    let model = import(&folder("gguf-q4_k_m-qwen3").join("model.gguf")).expect("a model");
    let shape = &model.shape;
    assert_eq!((shape.hidden, shape.layers, shape.heads, shape.kv_heads), (256, 2, 4, 1));
    assert_eq!((shape.head_dim, shape.ffn, shape.vocab, shape.tied), (64, 256, 180, false));
    assert_eq!((shape.norm_eps, shape.max_positions, shape.rope.theta), (1e-6, 512, 10_000.0));
    assert_eq!(model.folder(), None);
    let list = "10 as Q4_K, 6 as Q6_K";
    assert!(
        model.notes[0].contains(&format!("of 16 matrices 16 are quantised: {list}")),
        "{:?}",
        model.notes
    );
    let file = bytes("gguf-q8_0-llama");
    let header = parse(&file).expect("a header");
    assert_eq!(header.values["general.architecture"], Value::Text("llama"));
    assert_eq!(header.tensors[0].element, Ok(BlockType::Q8_0));
}

/// Where a text is in a file.
fn find(file: &[u8], text: &str) -> usize {
    file.windows(text.len()).position(|window| window == text.as_bytes()).expect(text)
}

#[test]
fn files_that_are_damaged_or_lie_are_refused() {
    let whole = bytes("gguf-q8_0-llama");
    let edited = |at: usize, value: &[u8]| {
        let mut file = whole.clone();
        file[at..at + value.len()].copy_from_slice(value);
        refused(&file)
    };
    assert_eq!(refused(b"GGU"), "FILE: does not begin with GGUF; it is not a GGUF file");
    assert_eq!(edited(4, &[1]), "FILE: has version 1; supported: 2 and 3, little-endian");
    assert_eq!(
        edited(4, &[0, 0, 0, 3]),
        "FILE: has version 50331648; supported: 2 and 3, little-endian"
    );
    let text = edited(8, &u64::MAX.to_le_bytes());
    assert!(text.starts_with("FILE: claims 18446744073709551615 tensors; what is left"), "{text}");
    let text = refused(&whole[..whole.len() - 40]);
    assert!(text.starts_with("FILE: tensor ") && text.ends_with("it is truncated"), "{text}");
    let text = refused(&whole[..700]);
    assert!(text.contains("ends within") && text.ends_with("it is truncated"), "{text}");
    // After a tensor's name: rank, sides, type, offset.
    let name = "blk.0.attn_q.weight";
    let at = find(&whole, name) + name.len();
    assert_eq!(
        edited(at, &[9]),
        format!("FILE: tensor \"{name}\" has 9 dimensions; supported: up to 4")
    );
    assert_eq!(
        edited(at + 4, &[127]),
        format!(
            "FILE: tensor \"{name}\" has rows of 127 elements; blocks of Q8_0 have 32: expected a multiple"
        )
    );
    let text = edited(at + 4, &[96]);
    assert_eq!(text, format!("FILE: \"{name}\" has shape [128, 96]; expected [128, 128]"));
    assert_eq!(
        edited(at + 20, &[10]),
        format!(
            "FILE: \"{name}\" has element type Q2_K; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K"
        )
    );
    // A number that llama.cpp no longer has.
    let text = edited(at + 20, &[31]);
    assert!(text.contains("has element type number 31; supported: "), "{text}");
    let begin = u64::from_le_bytes(*whole[at + 24..].first_chunk().expect("an offset")) + 1;
    assert_eq!(
        edited(at + 24, &begin.to_le_bytes()),
        format!("FILE: tensor \"{name}\" begins at {begin}; expected a multiple of 32")
    );
    let text = edited(at + 24, &[0; 8]);
    assert!(text.contains("overlap; the file is corrupt"), "{text}");
    let text = edited(find(&whole, "llama"), b"gemma");
    assert_eq!(text, "FILE: \"general.architecture\" is \"gemma\"; supported: llama, qwen2, qwen3");
    let key = "llama.embedding_length";
    let text = edited(find(&whole, key) + key.len() + 4, &[100]);
    assert!(
        text.contains("\"token_embd.weight\" has shape [210, 128]; expected [210, 100]"),
        "{text}"
    );
    let text = edited(find(&whole, key), b"llama.embedding_lengtH");
    assert!(text.contains("\"llama.embedding_length\" is missing"), "{text}");
    let text = edited(find(&whole, "output_norm"), b"output_nurm");
    assert_eq!(
        text,
        "FILE: 2 problems: \"output_norm.weight\" is missing | \"output_nurm.weight\" is not part of a model of this \
         architecture"
    );
}

#[test]
fn a_scale_that_is_no_number_is_refused_with_its_block() {
    let mut file = bytes("gguf-q8_0-llama");
    let info = parse(&file).expect("a header").tensors;
    let info = info.into_iter().find(|info| info.name == "blk.1.ffn_up.weight").expect("a tensor");
    file[info.offset as usize + 34 * 7 + 1] = 0x7e;
    assert_eq!(
        refused(&file),
        "FILE: \"blk.1.ffn_up.weight\" has a scale in block 7 that is not finite; expected numbers. The file is damaged"
    );
}

/// Adds a tensor of f32 to a file.
fn with_tensor(file: &[u8], name: &str, values: &[f32]) -> Vec<u8> {
    let header = parse(file).expect("a header");
    let start = header.tensors.iter().map(|info| info.offset).min().expect("a tensor") as usize;
    let (end, key) = (file.len().next_multiple_of(32), "blk.0.attn_norm.weight");
    // In front of a known entry, which begins with the length of its name.
    let at = find(file, key) - 8;
    let mut entry = (name.len() as u64).to_le_bytes().to_vec();
    entry.extend(name.as_bytes());
    entry.extend(1_u32.to_le_bytes());
    entry.extend((values.len() as u64).to_le_bytes());
    entry.extend(0_u32.to_le_bytes());
    entry.extend(((end - start) as u64).to_le_bytes());
    let mut head = [&file[..at], &entry[..], &file[at..start]].concat();
    // Padding after the last entry is made anew.
    let unpadded = head_end(file) + entry.len();
    head.truncate(unpadded);
    head.resize(unpadded.next_multiple_of(32), 0);
    let count = u64::from_le_bytes(*head[8..].first_chunk().expect("a count")) + 1;
    head[8..16].copy_from_slice(&count.to_le_bytes());
    head.extend(&file[start..]);
    head.resize(head.len() + end - file.len(), 0);
    head.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    head
}

/// The end of a header, without padding.
fn head_end(file: &[u8]) -> usize {
    let header = parse(file).expect("a header");
    let ends = header.tensors.iter().map(|info| {
        let at = find(file, &info.name) + info.name.len();
        at + 4 + 8 * info.shape.len() + 4 + 8
    });
    ends.max().expect("a tensor")
}

/// Adds a value to a file: its key, the number of its type, its bytes.
fn with_value(file: &[u8], key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let header = parse(file).expect("a header");
    let start = header.tensors.iter().map(|info| info.offset).min().expect("a tensor") as usize;
    let mut head = file[..24].to_vec();
    let count = u64::from_le_bytes(*head[16..].first_chunk().expect("a count")) + 1;
    head[16..24].copy_from_slice(&count.to_le_bytes());
    head.extend((key.len() as u64).to_le_bytes());
    head.extend(key.as_bytes());
    head.extend(kind.to_le_bytes());
    head.extend(value);
    head.extend(&file[24..head_end(file)]);
    head.resize(head.len().next_multiple_of(32), 0);
    head.extend(&file[start..]);
    head
}

#[test]
fn values_that_change_the_arithmetic_are_refused() {
    let whole = bytes("gguf-q4_0-llama");
    let (u16_type, u32_type, text_type) = (2, 4, 8);
    let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let cases = [
        (
            "split.count",
            u16_type,
            vec![3, 0],
            "is 3; supported: 1. Merge the files with llama-gguf-split --merge",
        ),
        ("llama.expert_count", u32_type, vec![8, 0, 0, 0], "is 8; supported: none or 0"),
        (
            "llama.attention.sliding_window",
            u32_type,
            vec![0, 16, 0, 0],
            "is 4096; supported: none or 0",
        ),
        (
            "llama.rope.scaling.type",
            text_type,
            text("yarn"),
            "is \"yarn\"; supported: none, linear",
        ),
    ];
    for (key, kind, value, reason) in cases {
        let said = refused(&with_value(&whole, key, kind, &value));
        assert_eq!(said, format!("FILE: \"{key}\" {reason}"));
    }
    for (key, neutral) in [
        ("attention.scale", 0.0),
        ("attention.clamp_kqv", 0.0),
        ("attention.max_alibi_bias", 0.0),
        ("attn_logit_softcapping", 0.0),
        ("final_logit_softcapping", 0.0),
        ("embedding_scale", 1.0),
        ("residual_scale", 1.0),
        ("logit_scale", 1.0),
        ("rope.scaling.attn_factor", 1.0),
        ("rope.scaling.alpha", 0.0),
    ] {
        let key = format!("llama.{key}");
        let with = |value: f32| with_value(&whole, &key, 6, &value.to_le_bytes());
        assert!(read(&with(neutral)).is_ok(), "{key}");
        let said = refused(&with(12.5));
        assert!(said.starts_with(&format!("FILE: \"{key}\" is 12.5; supported: none")), "{said}");
    }
    for (key, neutral) in [("attention.causal", 1), ("use_parallel_residual", 0)] {
        let key = format!("llama.{key}");
        assert!(read(&with_value(&whole, &key, 7, &[neutral])).is_ok(), "{key}");
        let said = refused(&with_value(&whole, &key, 7, &[1 - neutral]));
        assert!(said.starts_with(&format!("FILE: \"{key}\" is ")), "{said}");
    }
    let file = with_value(&whole, "llama.rope.scaling.factor", 6, &4_f32.to_le_bytes());
    let twice = with_value(&file, "llama.rope.scaling.factor", 6, &4_f32.to_le_bytes());
    assert_eq!(refused(&twice), "FILE: has the value \"llama.rope.scaling.factor\" twice");
    let texts = [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &text("a"), &text("bc")].concat();
    let listed = with_value(&whole, "tokenizer.ggml.tokens", 9, &texts);
    let header = parse(&listed).expect("a header");
    let Value::List(list) = header.values["tokenizer.ggml.tokens"] else { panic!("no list") };
    assert_eq!((list.texts(), list.numbers()), (Some(vec!["a", "bc"]), None));
    assert!(read(&listed).is_ok());
    let nested = [&9_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat();
    let said = refused(&with_value(&whole, "x", 9, &nested));
    assert!(said.starts_with("FILE: list \"x\" has elements of type 9"), "{said}");
}

/// A factor without a type was read as no scaling at all, and so was the key of early files.
#[test]
fn frequencies_are_scaled_as_llama_cpp_does() {
    let whole = bytes("gguf-q4_0-llama");
    let with = |kind: Option<&str>, factors: &[(&str, f32)]| {
        let mut file = whole.clone();
        if let Some(kind) = kind {
            let value = [&(kind.len() as u64).to_le_bytes()[..], kind.as_bytes()].concat();
            file = with_value(&file, "llama.rope.scaling.type", 8, &value);
        }
        for (key, factor) in factors {
            file = with_value(&file, &format!("llama.rope.{key}"), 6, &factor.to_le_bytes());
        }
        read(&file).map(|model| model.shape.rope.scaling)
    };
    let (new, old) = ("scaling.factor", "scale_linear");
    let four = Ok(Scaling::Linear { factor: 4.0 });
    assert_eq!(with(Some("linear"), &[(new, 4.0)]), four);
    assert_eq!(with(None, &[(new, 4.0)]), four);
    assert_eq!(with(None, &[(old, 4.0)]), four);
    assert_eq!(with(None, &[(new, 4.0), (old, 8.0)]), four);
    for none in [
        with(Some("none"), &[(new, 4.0)]),
        with(Some("linear"), &[]),
        with(None, &[(new, 0.0)]),
        with(None, &[(new, 1.0)]),
    ] {
        assert_eq!(none, Ok(Scaling::Default));
    }
    for factor in [-1.0, f32::NAN, f32::INFINITY] {
        assert_eq!(
            with(None, &[(old, factor)]),
            Err(format!(
                "FILE: \"llama.rope.scale_linear\" is {factor}; expected a number from 0 to 1e9"
            ))
        );
    }
}

/// The second part of a model has no architecture, which is not what is wrong with it.
#[test]
fn a_part_of_a_model_is_refused_as_one() {
    let mut file = with_value(&bytes("gguf-q4_0-llama"), "split.count", 2, &[2, 0]);
    let at = find(&file, "general.architecture");
    file[at] = b'h';
    let text = refused(&file);
    assert!(text.starts_with("FILE: \"split.count\" is 2; supported: 1. Merge"), "{text}");
}

#[test]
fn divisors_of_frequencies_become_llama3_scaling() {
    let file = bytes("gguf-q6_k-llama");
    let scaling = Scaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192 };
    let rope = crate::Rope { theta: 10_000.0, scaling };
    let plain = crate::Rope::plain(10_000.0).inv_freq(32);
    let divisors: Vec<f32> = plain.iter().zip(rope.inv_freq(32)).map(|(a, b)| a / b).collect();
    let model = read(&with_tensor(&file, "rope_freqs.weight", &divisors)).expect("a model");
    assert_eq!(model.shape.rope, rope);
    assert_eq!(model.graph.inv_freq, rope.inv_freq(32));
    let text = refused(&with_tensor(&file, "rope_freqs.weight", &[1.5; 16]));
    assert!(text.starts_with("FILE: \"rope_freqs.weight\" holds other divisors"), "{text}");
    // Fewer or more than a head has, which were those of no scaling.
    for count in [4, 17] {
        assert_eq!(
            refused(&with_tensor(&file, "rope_freqs.weight", &vec![1.0; count])),
            format!("FILE: \"rope_freqs.weight\" has shape [{count}]; expected [16]")
        );
    }
}

#[test]
fn an_exported_copy_has_the_same_bits() {
    for name in ["gguf-q4_0-llama", "gguf-q4_k_m-qwen3"] {
        let file = folder(name).join("model.gguf");
        let model = import_dequantised(&file).expect("a model");
        let parent = tempfile::tempdir().expect("a folder");
        let to = parent.path().join("out");
        crate::export(&import(&file).expect("a model"), &to).expect("an export");
        let back = import(&to).expect("a model");
        assert_eq!((back.graph.tied(), &back.notes[..]), (model.graph.tied(), &[][..]));
        for i in 0..model.graph.tensors.len() {
            let id = TensorId(i as u32);
            assert!(back.weights.bytes(id) == model.weights.bytes(id), "{name} {i}");
        }
    }
}

#[test]
fn damaged_headers_give_an_error_or_a_model() {
    let whole = bytes("gguf-q4_0-llama");
    let end = head_end(&whole);
    let edits = proptest::collection::vec((0..end, any::<u8>()), 1..4);
    let config = Config { cases: 400, failure_persistence: None, ..Config::default() };
    proptest!(config, |(edits in edits, cut in proptest::option::of(0..whole.len()))| {
        let mut file = whole.clone();
        for (at, byte) in edits {
            file[at] = byte;
        }
        file.truncate(cut.unwrap_or(file.len()));
        match read(&file) {
            Ok(model) => {
                for (i, tensor) in model.graph.tensors.iter().enumerate() {
                    let bytes = model.weights.bytes(TensorId(i as u32));
                    prop_assert_eq!(bytes.len(), tensor.bytes());
                }
            }
            Err(text) => prop_assert!(text.len() < 40_000),
        }
    });
}
