//! nf4 of bitsandbytes: values by their formula, computed here in another way, and every refusal of one edit.

use half::bf16;
use ir::{DType, TensorId};
use model::{Model, Shape, import};
use serde_json::{Map, Value, json};

use crate::folder::{Copy, safetensors, split};

/// The values of the codes, as bitsandbytes 0.50.2 writes them to `quant_map`.
const TABLE: [f32; 16] = [
    f32::from_bits(0xbf80_0000),
    f32::from_bits(0xbf32_39b1),
    f32::from_bits(0xbf06_6b30),
    f32::from_bits(0xbeca_32a0),
    f32::from_bits(0xbe91_a24d),
    f32::from_bits(0xbe3d_353f),
    f32::from_bits(0xbdba_7871),
    f32::from_bits(0x0000_0000),
    f32::from_bits(0x3da2_faff),
    f32::from_bits(0x3e24_cae3),
    f32::from_bits(0x3e7c_04dd),
    f32::from_bits(0x3ead_033a),
    f32::from_bits(0x3ee1_a4b8),
    f32::from_bits(0x3f10_07ab),
    f32::from_bits(0x3f39_13b3),
    f32::from_bits(0x3f80_0000),
];
const Q: &str = "model.layers.0.self_attn.q_proj";
const BLOCK: usize = 64;
const NESTED_BLOCK: usize = 256;

/// Numbers without a pattern.
struct Numbers(u64);

impl Numbers {
    fn byte(&mut self) -> u8 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 56) as u8
    }

    fn float(&mut self) -> f32 {
        f32::from(self.byte()) * 0.003 + f32::from(self.byte()) * 1e-5 + 0.01
    }
}

/// A tensor to store: name, element type, shape, bytes.
type Stored = (String, &'static str, Vec<usize>, Vec<u8>);

fn floats(list: &[f32]) -> Vec<u8> {
    list.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A matrix of random codes: its tensors, and its values by the formula.
fn matrix(
    name: &str,
    shape: [usize; 2],
    nested: bool,
    numbers: &mut Numbers,
) -> (Vec<Stored>, Vec<f32>) {
    let [rows, cols] = shape;
    let (bytes, count) = (rows * cols / 2, rows * cols / BLOCK);
    let codes: Vec<u8> = (0..bytes).map(|_| numbers.byte()).collect();
    let mut state =
        json!({"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": shape});
    let mut tensors = vec![
        (format!("{name}.weight"), "U8", vec![bytes, 1], codes.clone()),
        (format!("{name}.weight.quant_map"), "F32", vec![16], floats(&TABLE)),
    ];
    let scales: Vec<f32> = if nested {
        let absmax: Vec<u8> = (0..count).map(|_| numbers.byte()).collect();
        let map: Vec<f32> = (0..256).map(|i| (i as f32 - 127.3) / 130.7).collect();
        let outer: Vec<f32> = (0..count.div_ceil(NESTED_BLOCK)).map(|_| numbers.float()).collect();
        let offset = 0.130_292_251_706_123_35_f64;
        state["nested_blocksize"] = json!(NESTED_BLOCK);
        state["nested_dtype"] = json!("float32");
        state["nested_offset"] = json!(offset);
        let parts = [
            ("absmax", "U8", count, absmax.clone()),
            ("nested_quant_map", "F32", 256, floats(&map)),
            ("nested_absmax", "F32", outer.len(), floats(&outer)),
        ];
        tensors.extend(parts.map(|(part, element, length, bytes)| {
            (format!("{name}.weight.{part}"), element, vec![length], bytes)
        }));
        let scale = |(i, &code): (usize, &u8)| {
            map[usize::from(code)] * outer[i / NESTED_BLOCK] + offset as f32
        };
        absmax.iter().enumerate().map(scale).collect()
    } else {
        let absmax: Vec<f32> = (0..count).map(|_| numbers.float()).collect();
        tensors.push((format!("{name}.weight.absmax"), "F32", vec![count], floats(&absmax)));
        absmax
    };
    let state = state.to_string().into_bytes();
    let state_name = format!("{name}.weight.quant_state.bitsandbytes__nf4");
    tensors.push((state_name, "U8", vec![state.len()], state));
    let value = |i: usize| {
        let code = if i.is_multiple_of(2) { codes[i / 2] >> 4 } else { codes[i / 2] & 15 };
        TABLE[usize::from(code)] * scales[i / BLOCK]
    };
    (tensors, (0..rows * cols).map(value).collect())
}

/// A folder in nf4, and the values of its matrices by name.
fn folder(nested: bool) -> (Copy, Vec<(String, Vec<f32>)>) {
    let shape = Shape { hidden: 128, ffn: 192, heads: 8, vocab: 64, ..Shape::default() };
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("m");
    model::export(&Model::random(shape, 5), &dir).expect("a folder");
    let copy = Copy::of_folder(&dir);
    let (header, old) = split(&copy.read("model.safetensors"));
    let (mut tensors, mut values, mut numbers) = (Vec::new(), Vec::new(), Numbers(9));
    for (name, info) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let numbers_of = |field: &str| -> Vec<usize> {
            let list = info[field].as_array().expect("a list").iter();
            list.map(|n| n.as_u64().expect("a number") as usize).collect()
        };
        let (shape, range) = (numbers_of("shape"), numbers_of("data_offsets"));
        match (name.strip_suffix(".weight"), &shape[..]) {
            (Some(module), &[rows, cols]) if name.starts_with("model.layers") => {
                let (stored, made) = matrix(module, [rows, cols], nested, &mut numbers);
                tensors.extend(stored);
                values.push((name.clone(), made));
            }
            _ => tensors.push((name.clone(), "BF16", shape, old[range[0]..range[1]].to_vec())),
        }
    }
    store(&copy, &tensors);
    copy.set(json!({"quantization_config": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": true,
        "load_in_8bit": false,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head"],
    }}));
    (copy, values)
}

fn store(copy: &Copy, tensors: &[Stored]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, element, shape, bytes) in tensors {
        let from = data.len();
        data.extend(bytes);
        let info = json!({"dtype": element, "shape": shape, "data_offsets": [from, data.len()]});
        header.insert(name.clone(), info);
    }
    copy.write("model.safetensors", safetensors(&Value::Object(header).to_string(), &data));
}

#[test]
fn values_are_those_of_the_formula() {
    for nested in [false, true] {
        let (copy, values) = folder(nested);
        let model = import(copy.dir()).unwrap_or_else(|error| panic!("{error}"));
        assert!(
            model.notes[0].contains("7 are quantised: 7 as nf4 of bitsandbytes"),
            "{:?}",
            model.notes
        );
        assert!(model.notes[0].contains("dequantised to bf16"), "{:?}", model.notes);
        assert_eq!(model.graph.dtype, DType::Bf16);
        assert_eq!(values.len(), 7);
        for (name, want) in values {
            let at =
                model.graph.tensors.iter().position(|tensor| tensor.name == name).expect(&name);
            let got = model.weights.bytes(TensorId(at as u32)).as_chunks::<2>().0;
            let got = got.iter().map(|bytes| u16::from_le_bytes(*bytes));
            let want = want.iter().map(|&value| bf16::from_f32(value).to_bits());
            assert!(got.eq(want), "{name}, nested: {nested}");
        }
    }
}

/// The error of importing a folder in which one tensor was changed.
fn edited(nested: bool, part: &str, change: impl Fn(&mut Stored)) -> String {
    let (copy, _) = folder(nested);
    let (header, data) = split(&copy.read("model.safetensors"));
    let mut tensors: Vec<Stored> = Vec::new();
    for (name, info) in header {
        let at = |i: usize| info["data_offsets"][i].as_u64().expect("an offset") as usize;
        let shape = info["shape"].as_array().expect("a shape").iter();
        let shape = shape.map(|side| side.as_u64().expect("a side") as usize).collect();
        let element =
            ["U8", "F32", "BF16"].into_iter().find(|it| info["dtype"] == *it).expect("a type");
        tensors.push((name, element, shape, data[at(0)..at(1)].to_vec()));
    }
    let name = format!("{Q}.{part}");
    change(tensors.iter_mut().find(|tensor| tensor.0 == name).expect("a tensor"));
    tensors.retain(|tensor| !tensor.0.is_empty());
    store(&copy, &tensors);
    copy.refusal()
}

#[test]
fn every_part_is_checked() {
    let state = "weight.quant_state.bitsandbytes__nf4";
    let cases = [
        (false, "weight.absmax", "F32 of shape [256]"),
        (true, "weight.absmax", "U8 of shape [256]"),
        (true, "weight.nested_absmax", "F32 of shape [1]"),
        (true, "weight.nested_quant_map", "F32 of shape [256]"),
        (false, "weight.quant_map", "F32 of shape [16]"),
        (false, state, "JSON in U8"),
    ];
    for (nested, part, expected) in cases {
        let text = edited(nested, part, |tensor| tensor.0.clear());
        let reason = format!("\"{Q}.{part}\" is missing; expected {expected}");
        assert!(text.contains(&reason), "{text}");
    }
    let text = edited(false, "weight", |(_, _, shape, bytes)| {
        bytes.pop();
        shape[0] -= 1;
    });
    assert!(
        text.ends_with(&format!("\"{Q}.weight\" has shape [8191, 1]; expected [8192, 1]")),
        "{text}"
    );
    let text = edited(false, "weight.quant_map", |tensor| tensor.3[4] ^= 1);
    assert!(text.ends_with("holds other values than those of nf4"), "{text}");
    let nan = |at: usize| {
        move |tensor: &mut Stored| tensor.3[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes())
    };
    let text = edited(false, "weight.absmax", nan(12));
    assert!(text.ends_with("gives the scale NaN at index 3; expected finite numbers"), "{text}");
    let text = edited(true, "weight.nested_absmax", nan(0));
    assert!(text.ends_with("gives the scale NaN at index 0; expected finite numbers"), "{text}");
}

#[test]
fn the_description_of_a_matrix_is_checked() {
    let with = |nested: bool, field: &str, value: Value| {
        edited(nested, "weight.quant_state.bitsandbytes__nf4", |(_, _, shape, bytes)| {
            let mut state: Value = serde_json::from_slice(bytes).expect("JSON");
            state[field] = value.clone();
            *bytes = state.to_string().into_bytes();
            *shape = vec![bytes.len()];
        })
    };
    let cases = [
        (false, "quant_type", json!("fp4"), "has quant_type \"fp4\"; expected \"nf4\""),
        (
            false,
            "dtype",
            json!("int8"),
            "has dtype \"int8\"; expected \"bfloat16\", \"float16\" or \"float32\"",
        ),
        (false, "shape", json!([64, 256]), "has shape [64,256]; expected [128,128]"),
        (false, "blocksize", json!(0), "has no blocksize; expected a positive whole number"),
        (false, "blocksize", json!(96), "has 128 columns, which blocks of 96 do not divide"),
        (true, "nested_blocksize", json!("x"), "has no nested_blocksize"),
        (true, "nested_offset", Value::Null, "has no finite nested_offset"),
        (true, "nested_offset", json!(1e300), "has no finite nested_offset"),
    ];
    for (nested, field, value, reason) in cases {
        let text = with(nested, field, value);
        assert!(text.contains(reason) && text.contains(Q), "{text}");
    }
    let text = edited(false, "weight.quant_state.bitsandbytes__nf4", |tensor| tensor.3[0] = b'!');
    assert!(text.ends_with("is no JSON object"), "{text}");
}

#[test]
fn the_configuration_must_agree() {
    let with = |field: &str, value: Value| {
        let (copy, _) = folder(false);
        copy.config(|config| config["quantization_config"][field] = value);
        copy.refusal()
    };
    let cases = [
        ("bnb_4bit_quant_type", json!("fp4"), "is \"fp4\"; supported: \"nf4\""),
        ("load_in_4bit", json!(false), "is false; supported: true"),
        ("load_in_8bit", json!(true), "is true; supported: false"),
        ("bnb_4bit_quant_storage", json!("bfloat16"), "is \"bfloat16\"; supported: \"uint8\""),
    ];
    for (field, value, reason) in cases {
        let text = with(field, value);
        assert!(text.contains(&format!("\"quantization_config.{field}\" {reason}")), "{text}");
    }
    let text = with("bnb_4bit_use_double_quant", json!(true));
    let reason = format!(
        "\"{Q}.weight.absmax\" does not agree with bnb_4bit_use_double_quant, which is true"
    );
    assert!(text.contains("7 problems") && text.contains(&reason), "{text}");
    let text = with("llm_int8_skip_modules", json!([Q]));
    assert!(text.contains("lists it as not quantised"), "{text}");
}
