//! Quantised folders: spellings that mean the same, and every refusal of one edit of a valid folder.

use std::collections::BTreeMap;

use ir::{DType, TensorId};
use serde_json::{Value, json};

use crate::folder::{Copy, quantised, safetensors, split};

/// A stored tensor: element type, shape, bytes.
pub(crate) type Stored = (String, Vec<usize>, Vec<u8>);

pub(crate) const Q: &str = "model.layers.0.self_attn.q_proj";

/// A copy of a quantised folder.
pub(crate) fn copy(name: &str) -> Copy {
    Copy::of_folder(&quantised(name))
}

/// Changes the tensors of a copy.
pub(crate) fn edit(copy: &Copy, change: impl FnOnce(&mut BTreeMap<String, Stored>)) -> &Copy {
    let (header, data) = split(&copy.read("model.safetensors"));
    let mut tensors = BTreeMap::new();
    for (name, info) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let at = |i: usize| info["data_offsets"][i].as_u64().expect("an offset") as usize;
        let sides = info["shape"].as_array().expect("a shape").iter();
        let shape = sides.map(|side| side.as_u64().expect("a side") as usize).collect();
        let element = info["dtype"].as_str().expect("a type").to_owned();
        tensors.insert(name, (element, shape, data[at(0)..at(1)].to_vec()));
    }
    change(&mut tensors);
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, (element, shape, bytes)) in tensors {
        let from = data.len();
        data.extend(bytes);
        let info = json!({ "dtype": element, "shape": shape, "data_offsets": [from, data.len()] });
        header.insert(name, info);
    }
    copy.write("model.safetensors", safetensors(&Value::Object(header).to_string(), &data))
}

/// Changes one tensor of a copy.
pub(crate) fn change(copy: &Copy, name: &str, change: impl FnOnce(&mut Stored)) {
    edit(copy, |tensors| change(tensors.get_mut(name).expect(name)));
}

/// Changes `quantization_config` of a copy.
pub(crate) fn configure(copy: &Copy, change: impl FnOnce(&mut Value)) {
    copy.config(|config| change(config.get_mut("quantization_config").expect("a field")));
}

/// The error of a folder whose tensors were changed, without its beginning.
pub(crate) fn tensors(name: &str, with: impl FnOnce(&Copy)) -> String {
    let copy = copy(name);
    with(&copy);
    let text = copy.refusal();
    let start = "DIR: the tensors do not fit config.json: ";
    text.strip_prefix(start).unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// The error of a folder whose `quantization_config` was changed, without its beginning.
pub(crate) fn config(name: &str, with: impl FnOnce(&mut Value)) -> String {
    let copy = copy(name);
    configure(&copy, with);
    let text = copy.refusal();
    let start = "DIR/config.json: \"quantization_config.";
    format!("\"{}", text.strip_prefix(start).unwrap_or_else(|| panic!("{text}")))
}

/// All bytes of a model's tensors, and its notes.
fn values(copy: &Copy) -> (Vec<Vec<u8>>, Vec<String>) {
    let model = model::import(copy.dir()).unwrap_or_else(|error| panic!("{error}"));
    let ids = (0..model.graph.tensors.len()).map(|i| TensorId(i as u32));
    (ids.map(|id| model.weights.bytes(id).to_vec()).collect(), model.notes)
}

/// Whether a folder means the same after a change.
pub(crate) fn same(name: &str, with: impl FnOnce(&Copy)) -> Vec<String> {
    let copy = copy(name);
    let (before, _) = values(&copy);
    with(&copy);
    let (after, notes) = values(&copy);
    assert!(before == after, "{name}");
    notes
}

#[test]
fn a_missing_scale_is_named_with_its_shape() {
    let drop = |name: &str, part: &str| {
        tensors(name, |copy| {
            edit(copy, |all| drop(all.remove(&format!("{Q}.{part}")).expect("a tensor")));
        })
    };
    let floats = "F32 or F16 or BF16";
    let cases = [
        ("ct-int8-llama", "weight_scale", format!("{floats} of shape [128, 1]")),
        ("ct-fp8-static-qwen3", "weight_scale", format!("{floats} of shape [1]")),
        ("fp8-block-llama", "weight_scale_inv", format!("{floats} of shape [1, 2]")),
        ("ct-w4a16-g128-llama", "weight_scale", format!("{floats} of shape [256, 2]")),
        ("ct-w4a16-g128-llama", "weight_packed", "I32 of shape [256, 32]".to_owned()),
        ("ct-w4a16-g128-llama", "weight_shape", "I64 of shape [2]".to_owned()),
        ("ct-w4a16-asym-g128-qwen2", "weight_zero_point", "I32 of shape [32, 2]".to_owned()),
        ("gptq-sym-g128-llama", "qzeros", "I32 of shape [2, 32]".to_owned()),
        ("gptq-sym-g128-llama", "qweight", "I32 of shape [32, 256]".to_owned()),
        ("awq-g128-qwen2", "scales", format!("{floats} of shape [2, 256]")),
        ("ct-nvfp4-llama", "weight_global_scale", "F32 of shape [1]".to_owned()),
    ];
    for (name, part, expected) in cases {
        let reason = format!("\"{Q}.{part}\" is missing; expected {expected}");
        assert_eq!(drop(name, part), reason, "{name}");
    }
}

#[test]
fn a_shape_that_differs_by_one_is_named() {
    let shorten = |name: &str, part: &str, side: usize| {
        tensors(name, |copy| {
            change(copy, &format!("{Q}.{part}"), |(_, shape, bytes)| {
                let each = bytes.len() / shape.iter().product::<usize>();
                shape[side] -= 1;
                bytes.truncate(each * shape.iter().product::<usize>());
            });
        })
    };
    let cases = [
        ("ct-int8-llama", "weight_scale", 0, "[127, 1]; expected [128, 1]"),
        ("ct-int8-llama", "weight", 1, "[128, 127]; expected [128, 128]"),
        ("fp8-block-llama", "weight_scale_inv", 1, "[1, 1]; expected [1, 2]"),
        ("ct-w4a16-asym-g128-qwen2", "weight_zero_point", 0, "[31, 2]; expected [32, 2]"),
        ("gptq-desc-act-g128-llama", "g_idx", 0, "[255]; expected [256]"),
        ("awq-g128-qwen2", "qzeros", 1, "[2, 31]; expected [2, 32]"),
        ("ct-nvfp4-llama", "weight_packed", 1, "[128, 63]; expected [128, 64]"),
    ];
    for (name, part, side, expected) in cases {
        let reason = format!("\"{Q}.{part}\" has shape {expected}");
        assert_eq!(shorten(name, part, side), reason, "{name}");
    }
}

#[test]
fn scales_and_codes_that_are_no_numbers_are_refused() {
    let set = |name: &str, part: &str, at: usize, value: &[u8]| {
        tensors(name, |copy| {
            change(copy, &format!("{Q}.{part}"), |(_, _, bytes)| {
                bytes[at..at + value.len()].copy_from_slice(value);
            });
        })
    };
    let finite = "expected finite numbers";
    assert_eq!(
        set("ct-int8-llama", "weight_scale", 6, &[0xc0, 0x7f]),
        format!("\"{Q}.weight_scale\" holds NaN at index 3; {finite}")
    );
    assert_eq!(
        set("awq-g128-qwen2", "scales", 2, &[0, 0xfc]),
        format!("\"{Q}.scales\" holds -inf at index 1; {finite}")
    );
    assert_eq!(
        set("ct-nvfp4-llama", "weight_scale", 5, &[0x7f]),
        format!("\"{Q}.weight_scale\" holds NaN at index 5; {finite}")
    );
    assert_eq!(
        set("ct-nvfp4-llama", "weight_global_scale", 0, &[0; 4]),
        format!("\"{Q}.weight_global_scale\" holds 0; expected a finite number above 0")
    );
    for (name, at) in [("fp8-block-llama", 0), ("ct-fp8-dynamic-llama", 16_383)] {
        assert_eq!(
            set(name, "weight", at, &[0xff]),
            format!(
                "\"{Q}.weight\" holds the e4m3 code of NaN (0x7f or 0xff); expected numbers. The file is damaged"
            )
        );
    }
}

#[test]
fn groups_of_columns_are_checked() {
    let of = |name: &'static str, group: u64| {
        tensors(name, |copy| {
            configure(copy, |config| match config.get_mut("config_groups") {
                Some(groups) => groups["group_0"]["weights"]["group_size"] = json!(group),
                None => config["group_size"] = json!(group),
            });
        })
    };
    let text = of("ct-w4a16-g32-qwen3", 48);
    let reason = "has 128 columns, which groups of 48 do not divide; expected a multiple of 48";
    assert!(text.contains(&format!("\"{Q}.weight\" {reason}")), "{text}");
    let text = of("awq-g128-qwen2", 96);
    assert!(
        text.contains(&format!("\"{Q}.weight\" has 256 columns, which groups of 96")),
        "{text}"
    );
    // The last group of GPTQ may be short, so the number of groups is what is wrong.
    let text = of("gptq-sym-g128-llama", 96);
    assert!(text.starts_with("42 problems: "), "{text}");
    assert!(text.contains(&format!("\"{Q}.scales\" has shape [2, 256]; expected [3, 256]")));
    let text = tensors("gptq-desc-act-g128-llama", |copy| {
        change(copy, &format!("{Q}.g_idx"), |(_, _, bytes)| bytes[8] = 2);
    });
    assert_eq!(text, format!("\"{Q}.g_idx\" puts column 2 into group 2; expected 0 to 1"));
    let text = tensors("ct-w4a16-g128-llama", |copy| {
        change(copy, &format!("{Q}.weight_shape"), |(_, _, bytes)| bytes[0] += 1);
    });
    assert_eq!(
        text,
        format!("\"{Q}.weight_shape\" holds [257, 256]; config.json asks for [256, 256]")
    );
}

#[test]
fn tensors_that_contradict_the_configuration_are_all_named() {
    let text = tensors("ct-int8-llama", |copy| {
        configure(copy, |config| {
            config["format"] = json!("float-quantized");
            config["config_groups"]["group_0"]["weights"]["type"] = json!("float");
        });
    });
    assert!(text.starts_with("14 problems: "), "{text}");
    let reason = "is stored as int8 (I8); quantization_config describes fp8 (weight_scale)";
    assert!(text.contains(&format!("\"{Q}\" {reason}")), "{text}");
    let text = tensors("ct-w4a16-asym-g128-qwen2", |copy| {
        configure(copy, |config| {
            config["config_groups"]["group_0"]["weights"]["symmetric"] = json!(true);
        });
    });
    let reason = "is not expected beside int4 of compressed-tensors as quantization_config has it";
    assert!(text.contains(&format!("\"{Q}.weight_zero_point\" {reason}")), "{text}");
    let text = tensors("ct-int8-llama", |copy| {
        configure(copy, |config| config["ignore"] = json!(["lm_head", Q]));
    });
    let reason = "is quantised; quantization_config lists it as not quantised";
    assert_eq!(text, format!("\"{Q}.weight\" {reason}"));
    let text = tensors("ct-int8-llama", |copy| {
        edit(copy, |all| {
            let scale = all[&format!("{Q}.weight_scale")].clone();
            all.insert("lm_head.weight_scale".to_owned(), scale.clone());
            all.insert("model.layers.0.self_attn.k_scale".to_owned(), scale.clone());
            all.insert("model.layers.9.scales".to_owned(), scale);
        });
    });
    assert_eq!(
        text,
        "3 problems: \"lm_head.weight_scale\" belongs to a quantised matrix, which this is not | \
         \"model.layers.0.self_attn.k_scale\" is of a quantised key/value cache, which is not supported | \
         \"model.layers.9.scales\" is not part of the model that config.json describes"
    );
    let text = tensors("gptq-asym-g128-qwen2", |copy| {
        configure(copy, |config| *config = json!({ "quant_method": "awq", "bits": 4 }));
    });
    assert!(text.contains(&format!("\"{Q}.qweight\" has shape [32, 256]; expected [256, 32]")));
    let text = tensors("ct-int8-llama", |copy| {
        copy.config(|config| drop(config.remove("quantization_config")));
    });
    assert_eq!(
        text,
        "\"quantization_config\" is missing, but tensor \"model.layers.0.mlp.down_proj.weight\" is of a quantised \
         model; it must be in config.json, other files are not read for it"
    );
    let plain = Copy::of("llama-tied-f32");
    plain.set(json!({ "quantization_config": { "quant_method": "awq", "bits": 4 } }));
    let reason = "\"quantization_config.quant_method\" is \"awq\", but no tensor is quantised";
    assert!(plain.refusal().ends_with(reason), "{}", plain.refusal());
}

#[test]
fn formats_that_are_not_read_are_named() {
    let methods = "supported: fp8, compressed-tensors, gptq, awq, bitsandbytes, mxfp4";
    let original = "use the 16-bit original";
    for (method, instead) in [
        ("hqq", original),
        ("torchao", original),
        ("quanto", original),
        ("eetq", original),
        ("modelopt", "use the compressed-tensors copy"),
        ("auto-round", "the format auto_gptq or auto_awq"),
        ("new", original),
    ] {
        let text = config("ct-int8-llama", |config| config["quant_method"] = json!(method));
        let start = format!("\"quant_method\" is \"{method}\"; {methods}; ");
        assert!(text.starts_with(&start) && text.contains(instead), "{text}");
    }
    let gptq = |fields: Value| {
        config("gptq-sym-g128-llama", |config| {
            config.as_object_mut().expect("an object").extend(fields.as_object().unwrap().clone());
        })
    };
    let cases = [
        (json!({ "bits": 8 }), r#""bits" is 8; supported: 4"#),
        (
            json!({ "checkpoint_format": "marlin" }),
            r#""checkpoint_format" is "marlin"; supported: "gptq", "gptq_v2""#,
        ),
        (
            json!({ "dynamic": { "-:lm_head": {}, "+:.*\\.18\\..*": { "bits": 8 } } }),
            r#""dynamic" has other options for "+:.*\\.18\\..*"; supported: the same for all"#,
        ),
        (
            json!({ "group_size": 0 }),
            r#""group_size" is 0; supported: a positive whole number, or -1 for a row"#,
        ),
    ];
    for (fields, expected) in cases {
        assert_eq!(gptq(fields), expected);
    }
    assert_eq!(
        config("awq-g128-qwen2", |config| config["version"] = json!("gemv_fast")),
        "\"version\" is \"gemv_fast\"; supported: \"gemm\"; use such a copy of the model"
    );
    assert_eq!(
        config("fp8-block-llama", |config| config["weight_block_size"] = json!([128])),
        "\"weight_block_size\" is [128]; supported: [rows, columns], such as [128, 128]"
    );
}

#[test]
fn options_of_compressed_tensors_that_are_not_read_are_named() {
    let ct = |field: &str, value: Value| {
        config("ct-w4a16-g128-llama", |config| match field.strip_prefix("weights.") {
            Some(field) => config["config_groups"]["group_0"]["weights"][field] = value,
            None => config[field] = value,
        })
    };
    let weights = "config_groups.group_0.weights";
    let cases = [
        ("weights.num_bits", json!(8), format!("\"{weights}.num_bits\" is 8; supported: 4")),
        ("weights.type", json!("float"), format!("\"{weights}.type\" is \"float\"; supported: \"int\"")),
        (
            "weights.strategy",
            json!("attn_head"),
            format!("\"{weights}.strategy\" is \"attn_head\"; supported: channel, group"),
        ),
        ("weights.dynamic", json!(true), format!("\"{weights}.dynamic\" is true; supported: false")),
        (
            "format",
            json!("marlin-24"),
            "\"config_groups.group_0.format\" is \"marlin-24\"; supported: float-quantized, int-quantized, \
             pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized"
                .to_owned(),
        ),
        (
            "kv_cache_scheme",
            json!({ "num_bits": 8 }),
            "\"kv_cache_scheme\" is {\"num_bits\":8}; a quantised key/value cache is not supported".to_owned(),
        ),
        (
            "sparsity_config",
            json!({ "format": "sparse-24" }),
            "\"sparsity_config\" is {\"format\":\"sparse-24\"}; sparse or rotated weights are not supported"
                .to_owned(),
        ),
        (
            "quantization_status",
            json!("calibration"),
            "\"quantization_status\" is \"calibration\"; supported: \"compressed\", \"frozen\"".to_owned(),
        ),
        ("config_groups", json!({}), "\"config_groups\" has no group; supported: one or more".to_owned()),
    ];
    for (field, value, expected) in cases {
        assert_eq!(ct(field, value), expected, "{field}");
    }
    // Problems of both parts of a configuration come in one answer.
    let copy = copy("ct-w4a16-g128-llama");
    copy.set(json!({ "hidden_act": "gelu" }));
    configure(&copy, |config| config["format"] = json!("dense"));
    assert!(copy.refusal().starts_with("DIR/config.json: 2 problems: "), "{}", copy.refusal());
}

#[test]
fn the_user_is_told_what_a_quantised_model_costs() {
    let (_, notes) = values(&copy("ct-int8-llama"));
    assert_eq!(
        notes,
        [
            "of 16 matrices 14 are quantised: 14 as int8 of compressed-tensors. They are multiplied as codes",
            "quantization_config describes quantised activations; they are not quantised here (W8A8 runs as W8A16)"
        ]
    );
    let [note] = &values(&copy("gptq-desc-act-g128-llama")).1[..] else { panic!("one note") };
    assert!(note.contains("dequantised to f32 when they are read: the model takes"), "{note}");
}

#[test]
fn symmetric_zero_points_are_read_by_their_values() {
    // A configuration that says v2 over zero points stored as v1 has them, and the reverse.
    let notes = same("gptq-sym-g128-llama", |copy| {
        configure(copy, |config| config["checkpoint_format"] = json!("gptq_v2"));
    });
    assert!(notes[1].contains("\"gptq\""), "{notes:?}");
    let notes = same("gptq-sym-g128-llama", |copy| {
        edit(copy, |all| {
            for (_, (_, _, bytes)) in all.iter_mut().filter(|(name, _)| name.ends_with("qzeros")) {
                bytes.fill(0x88);
            }
        });
    });
    assert!(notes[1].starts_with("14 matrices: the zero points are stored as"), "{notes:?}");
    let text = tensors("gptq-sym-g128-llama", |copy| {
        change(copy, &format!("{Q}.qzeros"), |(_, _, bytes)| bytes[5] = 0x78);
    });
    let reason = "holds zero points other than 8; expected 8 everywhere, since sym is true";
    assert_eq!(text, format!("\"{Q}.qzeros\" {reason}"));
}

/// Each nibble of a tensor's bytes, changed.
fn nibbles(bytes: &mut [u8], change: impl Fn(u8) -> u8) {
    for byte in bytes {
        *byte = change(*byte & 15) | change(*byte >> 4) << 4;
    }
}

#[test]
fn spellings_of_one_meaning_give_the_same_bits() {
    // GPTQ v2 stores zero points as they are.
    same("gptq-asym-g128-qwen2", |copy| {
        configure(copy, |config| config["checkpoint_format"] = json!("gptq_v2"));
        edit(copy, |all| {
            for (_, (_, _, bytes)) in all.iter_mut().filter(|(name, _)| name.ends_with("qzeros")) {
                nibbles(bytes, |zero| zero + 1);
            }
        });
    });
    // Without act-order the groups of columns need not be stored.
    same("gptq-asym-g128-qwen2", |copy| {
        edit(copy, |all| all.retain(|name, _| !name.ends_with("g_idx")));
    });
    // Blocks under compressed-tensors' name.
    same("fp8-block-llama", |copy| {
        let weights = json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128" });
        let groups = json!({ "group_0": { "targets": ["Linear"], "weights": weights } });
        configure(copy, |config| {
            *config = json!({ "quant_method": "compressed-tensors", "format": "float-quantized",
                              "config_groups": groups });
        });
        edit(copy, |all| {
            *all = std::mem::take(all)
                .into_iter()
                .map(|(name, stored)| (name.replace("weight_scale_inv", "weight_scale"), stored))
                .collect();
        });
    });
    // Zero points of compressed-tensors that are not packed.
    same("ct-w4a16-asym-g128-qwen2", |copy| {
        edit(copy, |all| {
            let zeros = all.iter_mut().filter(|(name, _)| name.ends_with("weight_zero_point"));
            for (_, (element, shape, bytes)) in zeros {
                let (rows, groups) = (shape[0] * 8, shape[1]);
                let nibble = |row: usize, group: usize| {
                    let at = (row / 8 * groups + group) * 8 + row % 8;
                    (bytes[at / 2] >> (4 * (at % 2)) & 15).wrapping_sub(8)
                };
                let places = (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group)));
                let unpacked = places.map(|(row, group)| nibble(row, group)).collect();
                (*element, *shape, *bytes) = ("I8".to_owned(), vec![rows, groups], unpacked);
            }
        });
    });
    // Biases of zeros, which GPTQ's tools write for every matrix.
    same("gptq-sym-g128-llama", |copy| {
        edit(copy, |all| {
            let bias = ("F16".to_owned(), vec![256], vec![0; 512]);
            all.insert(format!("{Q}.bias"), bias);
        });
    });
}

/// Three groups of 256 columns: runs of 96, of which the last is short, or the same groups column by column.
#[test]
fn the_last_group_of_gptq_may_be_short() {
    let three = |by_column: bool| {
        let copy = copy("gptq-asym-g128-qwen2");
        let size = if by_column { 100 } else { 96 };
        configure(&copy, |config| config["group_size"] = json!(size));
        edit(&copy, |all| {
            all.retain(|name, _| by_column || !name.ends_with("g_idx"));
            for (name, (_, shape, bytes)) in all.iter_mut() {
                if name.ends_with("qzeros") || name.ends_with("scales") {
                    // The third group has the values of the first.
                    bytes.extend_from_within(..bytes.len() / 2);
                    shape[0] = 3;
                }
                if name.ends_with("g_idx") {
                    *bytes = (0..256_i32).flat_map(|column| (column / 96).to_le_bytes()).collect();
                }
            }
        });
        values(&copy).0
    };
    let (runs, by_column) = (three(false), three(true));
    assert!(runs == by_column);
    assert!(runs != values(&copy("gptq-asym-g128-qwen2")).0);
}

#[test]
fn each_matrix_finds_its_group_of_a_mixed_configuration() {
    let group = |format: &str, bits: u32, kind: &str, strategy: &str, size: Option<u32>| {
        json!({ "format": format, "targets": ["re:.*"], "weights": {
            "num_bits": bits, "type": kind, "strategy": strategy, "group_size": size, "symmetric": true } })
    };
    let mixed = |copy: &Copy| {
        configure(copy, |config| {
            config["format"] = json!("mixed-precision");
            config["config_groups"] = json!({
                "group_0": group("float-quantized", 8, "float", "channel", None),
                "group_1": group("pack-quantized", 4, "int", "group", Some(32)),
                "group_2": group("pack-quantized", 4, "int", "group", Some(128)),
            });
        });
    };
    for name in ["ct-fp8-dynamic-llama", "ct-w4a16-g128-llama", "ct-w4a16-g32-qwen3"] {
        same(name, mixed);
    }
    let text = tensors("ct-int8-llama", mixed);
    assert!(text.contains("describes fp8 (weight_scale), int4 of compressed-tensors"), "{text}");
}

#[test]
fn act_order_of_compressed_tensors_needs_its_groups() {
    let ordered = |copy: &Copy| {
        configure(copy, |config| {
            config["config_groups"]["group_0"]["weights"]["actorder"] = json!("group");
        });
    };
    let text = tensors("ct-w4a16-g128-llama", ordered);
    let reason = "is missing; expected I32 of shape [256]";
    assert!(text.contains(&format!("\"{Q}.weight_g_idx\" {reason}")), "{text}");
    let groups = |column: i32| column / 128;
    same("ct-w4a16-g128-llama", |copy| {
        ordered(copy);
        edit(copy, |all| {
            let names: Vec<_> =
                all.keys().filter(|name| name.ends_with("_packed")).cloned().collect();
            for name in names {
                let bytes = (0..256).flat_map(|column| groups(column).to_le_bytes()).collect();
                let stored = ("I32".to_owned(), vec![256], bytes);
                all.insert(name.replace("weight_packed", "weight_g_idx"), stored);
            }
        });
    });
}

#[test]
fn an_exported_copy_has_the_same_bits() {
    let copy = copy("ct-nvfp4-llama");
    let (before, _) = values(&copy);
    let parent = tempfile::tempdir().expect("a folder");
    let to = parent.path().join("out");
    model::export(&model::import(copy.dir()).expect("a model"), &to).expect("an export");
    let back = model::import(&to).expect("a model");
    assert!(back.notes.is_empty());
    for (i, bytes) in before.iter().enumerate() {
        assert!(back.weights.bytes(TensorId(i as u32)) == &bytes[..]);
    }
}

/// The element type of the products of a copy, and the note on how its matrices are given.
fn given(copy: &Copy) -> (DType, String) {
    let model = model::import(copy.dir()).unwrap_or_else(|error| panic!("{error}"));
    (model.graph.dtype, model.notes[0].clone())
}

#[test]
fn codes_are_given_as_they_are_stored_only_where_the_kernel_takes_them_so() {
    let name = "ct-int8-llama";
    let (dtype, note) = given(&copy(name));
    assert!(dtype == DType::F16 && note.ends_with("They are multiplied as codes"), "{note}");
    let other = |with: &dyn Fn(&Copy)| {
        let copy = copy(name);
        with(&copy);
        let (dtype, note) = given(&copy);
        assert_eq!(dtype, DType::F32, "{note}");
        assert!(note.contains("dequantised to f32"), "{note}");
    };
    // The largest bf16 that f16 has, and the next one.
    let set = |copy: &Copy, bits: u16| {
        change(copy, "lm_head.weight", |(_, _, bytes)| {
            bytes[..2].copy_from_slice(&bits.to_le_bytes());
        });
    };
    let largest = copy(name);
    set(&largest, 0xc77f);
    assert_eq!(given(&largest).0, DType::F16);
    other(&|copy| set(copy, 0xc780));
    other(&|copy| set(copy, 0x7f80));
    // Keys of 16 bits beside queries and values of codes: one matrix on the device.
    other(&|copy| {
        let module = "model.layers.1.self_attn.k_proj";
        edit(copy, |all| {
            all.remove(&format!("{module}.weight_scale")).expect("a scale");
            let (element, shape, bytes) = all.get_mut(&format!("{module}.weight")).expect("codes");
            *element = "BF16".to_owned();
            *bytes = vec![0; 2 * shape.iter().product::<usize>()];
        });
    });
    // Biases of rows that alternate have no place behind their scales; those of others do.
    let biased = |copy: &Copy, names: &[&str], field: &str| {
        copy.set(json!({ field: true }));
        edit(copy, |all| {
            for layer in 0..2 {
                for part in names {
                    let module = format!("model.layers.{layer}.{part}");
                    let rows = all[&format!("{module}.weight")].1[0];
                    let bias = ("BF16".to_owned(), vec![rows], [0x80, 0x3f].repeat(rows));
                    all.insert(format!("{module}.bias"), bias);
                }
            }
        });
    };
    other(&|copy| biased(copy, &["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], "mlp_bias"));
    let attention = copy(name);
    let projections =
        ["q_proj", "k_proj", "v_proj", "o_proj"].map(|part| format!("self_attn.{part}"));
    biased(&attention, &projections.each_ref().map(|name| &name[..]), "attention_bias");
    assert_eq!(given(&attention).0, DType::F16);
}
