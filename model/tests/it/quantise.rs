//! Quantised copies: their values follow from their definition, computed here in another way, and what is not
//! quantised stays as it was.

use std::path::Path;

use half::bf16;
use ir::{DType, TensorId, decode};
use model::{Format, Model, Quantisation, Shape, import, import_dequantised, quantise};
use serde_json::{Value, json};

use crate::folder::{Copy, golden, quantised, split};

const FORMATS: [Format; 3] = [Format::Fp8, Format::Int8, Format::Int4G128];

/// A model of which 128 divides all columns.
fn wide(dtype: DType) -> Model {
    let shape = Shape { hidden: 128, ffn: 256, heads: 8, layers: 2, dtype, ..Shape::default() };
    Model::random(shape, 3)
}

fn written(model: &Model, format: Format, lm_head: Option<Format>) -> (tempfile::TempDir, Model) {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("quantised");
    quantise(model, Quantisation { format, lm_head }, &dir).expect("a folder");
    let left = std::fs::read_dir(parent.path()).expect("a folder").count();
    assert_eq!(left, 1, "a temporary folder stayed");
    let back = import_dequantised(&dir).unwrap_or_else(|error| panic!("{format:?}: {error}"));
    (parent, back)
}

fn index(model: &Model, name: &str) -> Option<usize> {
    model.graph.tensors.iter().position(|tensor| tensor.name == name)
}

fn values(model: &Model, name: &str) -> Vec<f32> {
    let i = index(model, name).expect(name);
    let tensor = &model.graph.tensors[i];
    let mut out = vec![0.0; tensor.len()];
    decode(tensor.dtype, model.weights.bytes(TensorId(i as u32)), &mut out);
    out
}

/// The magnitudes of e4m3, from its definition.
fn e4m3() -> Vec<f64> {
    let normal = |e: i32| (8..16).map(move |m| f64::from(m) * 2_f64.powi(e - 3));
    let all = (0..8).map(|m| f64::from(m) / 512.0).chain((-6..=8).flat_map(normal));
    all.filter(|&value| value <= 448.0).collect()
}

/// The nearest number of an ascending list; of two the one at an even place.
fn nearest(list: &[f64], value: f64) -> f64 {
    let above = list.partition_point(|&entry| entry < value).min(list.len() - 1);
    let below = above.saturating_sub(1);
    let (down, up) = (value - list[below], list[above] - value);
    let even = if above % 2 == 0 { above } else { below };
    if down == up { list[even] } else { list[if down < up { below } else { above }] }
}

/// What a group of weights becomes.
fn rounded(format: Format, weights: &[f32], dtype: DType, magnitudes: &[f64]) -> Vec<f32> {
    let half_range = match format {
        Format::Fp8 => 448.0,
        Format::Int8 => 127.5,
        Format::Int4G128 => 7.5,
    };
    let largest = weights.iter().fold(0.0_f32, |most, weight| most.max(weight.abs()));
    let mut scale = largest / half_range;
    if dtype == DType::Bf16 {
        scale = bf16::from_f32(scale).to_f32();
    }
    if scale == 0.0 {
        scale = 1.0;
    }
    let code = |weight: &f32| {
        let ratio = weight / scale;
        match format {
            Format::Fp8 => {
                let magnitude = nearest(magnitudes, f64::from(ratio.abs())) as f32;
                magnitude.copysign(ratio)
            }
            Format::Int8 => ratio.round_ties_even().clamp(-128.0, 127.0),
            Format::Int4G128 => ratio.round_ties_even().clamp(-8.0, 7.0),
        }
    };
    weights.iter().map(|weight| code(weight) * scale).collect()
}

/// Compares a matrix of a copy with its original, rounded here.
fn check(model: &Model, back: &Model, name: &str, original: &str, format: Format) {
    let (want, got) = (values(model, original), values(back, name));
    let tensor = &model.graph.tensors[index(model, original).expect(original)];
    let cols = if format == Format::Int4G128 { 128 } else { tensor.shape[1] as usize };
    let magnitudes = e4m3();
    for (i, (want, got)) in want.chunks(cols).zip(got.chunks(cols)).enumerate() {
        let want = rounded(format, want, tensor.dtype, &magnitudes);
        assert!(want == got, "{format:?} {name}, group {i}");
    }
}

#[test]
fn every_matrix_of_a_layer_is_rounded_and_the_rest_stays() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let model = wide(dtype);
        for format in FORMATS {
            let (_kept, back) = written(&model, format, None);
            for tensor in &model.graph.tensors {
                let name = &tensor.name;
                let kept = tensor.shape.len() == 1 || !name.starts_with("model.layers");
                if kept {
                    assert!(values(&model, name) == values(&back, name), "{format:?} {name}");
                } else {
                    check(&model, &back, name, name, format);
                }
            }
            assert!(back.notes[0].contains("14 are quantised"), "{:?}", back.notes);
        }
    }
}

#[test]
fn all_codes_are_used_and_scales_have_the_type_of_the_format() {
    for (dtype, element) in [(DType::Bf16, "BF16"), (DType::F16, "F32"), (DType::F32, "F32")] {
        let (parent, _) = written(&wide(dtype), Format::Int8, None);
        let (header, data) = split(&file(parent.path()));
        let of = |part: &str| &header[&format!("model.layers.0.mlp.up_proj.{part}")];
        assert_eq!(of("weight_scale")["dtype"], element);
        assert_eq!(of("weight_scale")["shape"], json!([256, 1]));
        let range = of("weight")["data_offsets"].as_array().expect("offsets");
        let at = |i: usize| range[i].as_u64().expect("an offset") as usize;
        let codes = &data[at(0)..at(1)];
        let largest = codes
            .chunks(128)
            .map(|row| row.iter().map(|code| code.cast_signed().unsigned_abs()).max().unwrap_or(0));
        assert!(largest.into_iter().all(|most| most >= 127), "each row uses its range");
    }
}

fn file(parent: &Path) -> Vec<u8> {
    std::fs::read(parent.join("quantised/model.safetensors")).expect("a checkpoint")
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

/// A folder of f32 whose first q matrix has these rows.
fn with_rows(rows: &[Vec<f32>]) -> Copy {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("m");
    model::export(&wide(DType::F32), &dir).expect("a folder");
    let copy = Copy::of_folder(&dir);
    let (header, mut data) = split(&copy.read("model.safetensors"));
    let mut at = header[Q]["data_offsets"][0].as_u64().expect("an offset") as usize;
    for value in rows.iter().flatten() {
        data[at..at + 4].copy_from_slice(&value.to_le_bytes());
        at += 4;
    }
    let header = Value::Object(header).to_string();
    copy.write("model.safetensors", crate::folder::safetensors(&header, &data));
    copy
}

#[test]
fn rows_of_zeros_and_of_extreme_values_have_finite_scales() {
    let mut rows = vec![vec![0.0; 128]; 5];
    rows[1][7] = 3e38;
    rows[1][8] = -1.0;
    rows[2] = vec![1e-44; 128];
    rows[3] = (0..128).map(|i| i as f32 / 16.0 - 4.0).collect();
    // Between the two largest numbers of e4m3, and above both after rounding: the larger is the last one.
    rows[4] = (0..128).map(|i| 400.0 + i as f32 / 2.0).collect();
    let copy = with_rows(&rows);
    let model = import(copy.dir()).expect("a model");
    for format in FORMATS {
        let (_kept, back) = written(&model, format, None);
        let got = values(&back, Q);
        assert!(got.iter().all(|value| value.is_finite()), "{format:?}");
        assert!(got[..128].iter().all(|&value| value == 0.0), "{format:?}: zeros stay zeros");
        assert!(got[2 * 128..3 * 128].iter().all(|&value| value == 0.0), "{format:?}: too small");
        let huge = got[128 + 7] / 3e38;
        assert!((0.93..1.001).contains(&huge) && got[128 + 8].abs() < 1e37, "{format:?}: {huge}");
        for row in [0, 1, 3, 4] {
            let want = rounded(format, &rows[row], DType::F32, &e4m3());
            assert!(want == got[row * 128..][..128], "{format:?}: row {row}");
        }
    }
}

#[test]
fn a_weight_that_is_no_number_is_named() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut rows = vec![vec![0.5; 128]; 3];
        rows[2][77] = value;
        let copy = with_rows(&rows);
        let model = import(copy.dir()).expect("a model");
        for format in FORMATS {
            let parent = tempfile::tempdir().expect("a folder");
            let dir = parent.path().join("q");
            let with = Quantisation { format, lm_head: None };
            let error = quantise(&model, with, &dir).expect_err("a refusal").to_string();
            let end =
                format!("tensor {Q:?} has a weight in row 2 that is infinite or not a number");
            assert!(error.ends_with(&end), "{error}");
            assert_eq!(std::fs::read_dir(parent.path()).expect("a folder").count(), 0);
        }
    }
}

#[test]
fn lm_head_is_quantised_on_request_also_where_it_is_tied() {
    for tied in [false, true] {
        let model = Model::random(Shape { tied, ..wide(DType::Bf16).shape }, 3);
        let original = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
        for format in FORMATS {
            let (parent, back) = written(&model, format, Some(Format::Int8));
            assert!(!back.graph.tied());
            check(&model, &back, "lm_head.weight", original, Format::Int8);
            check(&model, &back, Q, Q, format);
            let embed = "model.embed_tokens.weight";
            assert!(values(&model, embed) == values(&back, embed));
            let config = std::fs::read(parent.path().join("quantised/config.json")).expect("JSON");
            let config: Value = serde_json::from_slice(&config).expect("JSON");
            assert_eq!(config["quantization_config"]["ignore"], json!(["model.embed_tokens"]));
        }
        let (_kept, back) = written(&model, Format::Fp8, None);
        assert_eq!(back.graph.tied(), tied);
    }
}

#[test]
fn a_folder_is_quantised_with_its_tokenizer_and_options() {
    for name in ["llama3-rope-bf16", "qwen2-bias-bf16"] {
        let model = import(&golden(name)).expect("a model");
        let (_kept, back) = written(&model, Format::Fp8, None);
        let tokenizer = back.tokenizer().expect("no error");
        assert_eq!(tokenizer.is_some(), model.tokenizer().expect("no error").is_some(), "{name}");
        let renamed = Shape { name: model.shape.name.clone(), ..back.shape.clone() };
        assert_eq!(Shape { dtype: model.shape.dtype, ..renamed }, model.shape);
        for tensor in model.graph.tensors.iter().filter(|tensor| tensor.shape.len() == 1) {
            assert!(values(&model, &tensor.name) == values(&back, &tensor.name));
        }
    }
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("q");
    let refusal = |model: &Model, format| {
        let with = Quantisation { format, lm_head: None };
        let error = quantise(model, with, &dir).expect_err("a refusal").to_string();
        assert!(!dir.exists());
        error
    };
    for name in ["ct-int8-llama", "gguf-q8_0-llama/model.gguf"] {
        let model = import(&quantised(name)).expect(name);
        let error = refusal(&model, Format::Fp8);
        assert!(error.contains("quantised already") && error.contains("16-bit"), "{error}");
    }
    let toy = model::preset("toy").expect("toy");
    let error = refusal(&toy, Format::Int4G128);
    let reason = "128 does not divide the columns of 6 matrices, the first of which is";
    assert!(error.contains(&format!("{reason} {Q}; use fp8 or int8")), "{error}");
}

/// Halfway cases, and values beyond each end, for the codes of e4m3.
#[test]
fn halfway_values_round_to_even() {
    let magnitudes = e4m3();
    assert_eq!(magnitudes.len(), 127);
    let halfway = magnitudes.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
    let mut row: Vec<f32> = halfway.chain([448.0, -448.0]).collect();
    assert_eq!(row.len(), 128);
    row[0] = -row[0];
    let copy = with_rows(&[row.clone()]);
    let model = import(copy.dir()).expect("a model");
    let (_kept, back) = written(&model, Format::Fp8, None);
    let got = &values(&back, Q)[..128];
    for (i, got) in got.iter().enumerate().take(126) {
        let even = magnitudes[if i % 2 == 0 { i } else { i + 1 }];
        assert_eq!(f64::from(got.abs()), even, "{i}");
    }
    assert_eq!((got[0].to_bits(), got[126], got[127]), (1 << 31, 448.0, -448.0));
}
