//! Quantised folders of families whose tensors are cut, reordered or changed when they are read.

use std::fs;
use std::path::Path;

use ir::schedule::default_config;
use ir::{DType, Target, TensorId, decode, e4m3};
use model::{Model, import, import_dequantised};
use reference_vm::Order;
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

use crate::lowered::checked;
use crate::{EXPERTS_QUANTISED, Golden};

/// A format of compressed-tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Fp8,
    Int8,
    Int4,
}

/// Columns that share a scale of int4.
const GROUP: usize = 32;

/// A stored tensor: name, type, shape, bytes.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Format {
    fn config(self) -> Value {
        let (name, bits, kind) = match self {
            Self::Fp8 => ("float-quantized", 8, "float"),
            Self::Int8 => ("int-quantized", 8, "int"),
            Self::Int4 => ("pack-quantized", 4, "int"),
        };
        let mut weights = json!({ "num_bits": bits, "type": kind, "symmetric": true, "strategy": "channel", "dynamic": false });
        if self == Self::Int4 {
            weights["strategy"] = "group".into();
            weights["group_size"] = GROUP.into();
        }
        json!({
            "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
            "config_groups": { "group_0": { "weights": weights, "targets": ["Linear"] } }, "ignore": ["lm_head"],
        })
    }

    /// The code of a value over its scale, and what it means.
    fn code(self, value: f32) -> (u8, f32) {
        match self {
            Self::Int8 => {
                let code = value.round().clamp(-127.0, 127.0) as i8;
                (code.cast_unsigned(), code.into())
            }
            Self::Int4 => {
                let code = (value.round() as i8).clamp(-8, 7);
                ((code + 8) as u8, code.into())
            }
            Self::Fp8 => {
                let codes = (0..=255_u8).filter(|code| code & 0x7f != 0x7f);
                let off = |code: &u8| (e4m3(*code) - value).abs();
                let code = codes.min_by(|a, b| off(a).total_cmp(&off(b))).unwrap();
                (code, e4m3(code))
            }
        }
    }

    /// The tensors of a quantised matrix, and its values.
    fn matrix(
        self,
        name: &str,
        [rows, cols]: [usize; 2],
        values: &[f32],
    ) -> (Vec<Stored>, Vec<f32>) {
        let each = if self == Self::Int4 { GROUP } else { cols };
        let greatest = match self {
            Self::Fp8 => 448.0,
            Self::Int8 => 127.0,
            Self::Int4 => 7.0,
        };
        let (mut codes, mut scales, mut means) = (Vec::new(), Vec::new(), Vec::new());
        for group in values.chunks(each) {
            let largest = group.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            // A power of two, so that it is exact in f16.
            let scale = (largest / greatest).log2().ceil().exp2();
            scales.push(scale);
            for value in group {
                let (code, mean) = self.code(value / scale);
                codes.push(code);
                means.push(mean * scale);
            }
        }
        let scales =
            (format!("{name}_scale"), Dtype::F32, vec![rows, cols / each], floats(&scales));
        if self == Self::Int4 {
            let words = codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
            let shape = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
            let packed = (format!("{name}_packed"), Dtype::I32, vec![rows, cols / 8], words);
            let shape = (format!("{name}_shape"), Dtype::I64, vec![2], shape);
            return (vec![packed, scales, shape], means);
        }
        let dtype = if self == Self::Int8 { Dtype::I8 } else { Dtype::F8_E4M3 };
        (vec![(name.to_owned(), dtype, vec![rows, cols], codes), scales], means)
    }
}

fn write(folder: &Path, config: &Value, tensors: &[Stored]) {
    fs::create_dir(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// Width of the experts of mixtral that groups of int4 divide; the folder's are wider.
const NARROW: usize = 64;

/// The first [`NARROW`] rows or columns of the experts of mixtral, for int4.
fn narrow(name: &str, shape: &mut [usize], values: &mut Vec<f32>) {
    if name.ends_with(".w2.weight") {
        *values =
            values.chunks(shape[1]).flat_map(|row| &row[..NARROW]).copied().collect::<Vec<_>>();
        shape[1] = NARROW;
    } else if [".w1.weight", ".w3.weight"].iter().any(|part| name.ends_with(part)) {
        values.truncate(NARROW * shape[1]);
        shape[0] = NARROW;
    }
}

/// Writes a family's golden model twice: quantised, and in f32 with the values that the codes mean.
fn folders(name: &str, format: Format, quantised: &Path, plain: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families").join(name);
    let config = fs::read(golden.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    let file = fs::read(golden.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let (mut codes, mut values) = (Vec::new(), Vec::new());
    for (name, view) in file.tensors() {
        let mut given = vec![0.0; view.shape().iter().product()];
        decode(DType::Bf16, view.data(), &mut given);
        let mut shape = view.shape().to_vec();
        if format == Format::Int4 {
            narrow(&name, &mut shape, &mut given);
        }
        let quantised = name.contains("_proj.") || name.contains(".experts.");
        if let (&[rows, cols], true) = (&shape[..], quantised) {
            let (stored, means) = format.matrix(&name, [rows, cols], &given);
            codes.extend(stored);
            values.push((name, Dtype::F32, shape, floats(&means)));
        } else {
            codes.push((name.clone(), view.dtype(), shape.clone(), view.data().to_vec()));
            values.push((name, Dtype::F32, shape, floats(&given)));
        }
    }
    if format == Format::Int4 && config["model_type"] == "mixtral" {
        config["intermediate_size"] = NARROW.into();
    }
    write(plain, &config, &values);
    config["quantization_config"] = format.config();
    write(quantised, &config, &codes);
}

fn values(model: &Model) -> Vec<(String, Vec<u32>)> {
    let of = |(i, tensor): (usize, &ir::Tensor)| {
        let mut out = vec![0.0; tensor.len()];
        decode(tensor.dtype, model.weights.bytes(TensorId(i as u32)), &mut out);
        (tensor.name.clone(), out.into_iter().map(f32::to_bits).collect())
    };
    model.graph.tensors.iter().enumerate().map(of).collect()
}

fn evaluated(model: &Model, tokens: &[u32]) -> (Vec<Vec<f32>>, Vec<u32>) {
    let mut evaluator = Evaluator::new(&model.graph, &*model.weights).unwrap();
    let logits = evaluator.run(tokens, Logits::All).unwrap();
    (logits, evaluator.greedy(4, &[]).unwrap())
}

/// Fused matrices, rows in another order, norms with a term and factors: what is stored quantised has the same bits as
/// a folder of its values, and is streamed as codes.
#[test]
fn quantised_folders_of_families_mean_their_values() {
    // Groups do not divide the widths of glm4 and gemma2.
    mean_their_values(
        &["phi3-bf16", "phi4-longrope-bf16", "glm4-bf16", "granite-bf16", "gemma2-bf16"],
        &["phi3-bf16", "phi4-longrope-bf16", "granite-bf16"],
    );
}

/// The same of experts, one of them shared, whose codes are in blocks.
#[test]
fn quantised_experts_mean_their_values() {
    let all = ["mixtral-bf16", "olmoe-bf16", "qwen2-moe-bf16", "qwen3-moe-bf16"];
    mean_their_values(&all, &["mixtral-bf16"]);
}

/// Of these families, and those that have widths for groups of int4.
fn mean_their_values(names: &[&str], grouped: &[&str]) {
    let target = Target::by_name("h200").unwrap();
    let parent = tempfile::tempdir().unwrap();
    let rows =
        [Format::Fp8, Format::Int8].map(|format| names.iter().map(move |name| (*name, format)));
    let groups = grouped.iter().map(|name| (*name, Format::Int4));
    for (name, format) in rows.into_iter().flatten().chain(groups) {
        let what = format!("{name} {format:?}");
        let [quantised, plain] =
            ["quantised", "plain"].map(|kind| parent.path().join(format!("{what} {kind}")));
        folders(name, format, &quantised, &plain);
        let (plain, dequantised) =
            (import(&plain).unwrap(), import_dequantised(&quantised).unwrap());
        assert!(values(&plain) == values(&dequantised), "{what}");
        let codes = import(&quantised).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(codes.graph.dtype, DType::F16, "{what}: {:?}", codes.notes);
        let tokens: Vec<u32> = (0..24).map(|i| i * 37 % plain.graph.vocab).collect();
        let ((logits, greedy), (of_codes, same)) =
            (evaluated(&plain, &tokens), evaluated(&codes, &tokens));
        let agreement = compare(&logits, &of_codes, Tolerance::REFERENCE);
        let summary = agreement.unwrap_or_else(|d| panic!("{what}: {d}")).summary();
        assert!(summary.max_rel_err < 1e-5, "{what}: {summary:?}");
        assert_eq!(greedy, same, "{what}");
        let golden = Golden { model: codes, tokens, logits, greedy };
        let config = default_config(&golden.model.graph, &target);
        let summary = checked(&golden, config, &target, Order::Waves);
        // The bound of the families as they are stored.
        assert!(summary.max_tolerance_used < 0.2, "{what}: {summary:?}");
    }
}

/// Experts in FP8 with a scale per block, as codes, and in mxfp4, dequantised: as transformers computes them.
#[test]
fn quantised_experts_have_the_logits_of_transformers() {
    for (name, codes) in EXPERTS_QUANTISED {
        let golden = Golden::open("quantised", name);
        assert_eq!(golden.model.graph.codes(), codes, "{name}");
        let (logits, _) = evaluated(&golden.model, &golden.tokens);
        let agreement = compare(&golden.logits, &logits, Tolerance::REFERENCE);
        let summary = agreement.unwrap_or_else(|d| panic!("{name}: {d}")).summary();
        assert_eq!(summary.top1_agreement, 1.0, "{name}");
        println!("{name}: {summary:?}");
    }
}
