//! Quantised folders as other tools write them, and damage that was once read as weights.

use serde_json::{Value, json};

use crate::folder::Copy;
use crate::quantised::{Q, change, config, configure, copy, edit, same, tensors};

/// Renames the tensors that end in `from`.
fn rename(copy: &Copy, from: &str, to: &str) {
    edit(copy, |all| {
        let new = |name: String| match name.strip_suffix(from) {
            Some(start) => format!("{start}{to}"),
            None => name,
        };
        *all = std::mem::take(all).into_iter().map(|(name, stored)| (new(name), stored)).collect();
    });
}

/// Puts bytes into a tensor of a copy.
fn put(copy: &Copy, name: &str, at: usize, value: &[u8]) {
    change(copy, name, |(_, _, bytes)| bytes[at..at + value.len()].copy_from_slice(value));
}

/// AutoFP8 and transformers (Ministral) have one scale for a matrix, under two names.
#[test]
fn fp8_without_blocks_has_a_scale_for_each_matrix() {
    for (scale, input, ignored) in [
        ("weight_scale", "input_scale", "ignored_layers"),
        ("weight_scale_inv", "activation_scale", "modules_to_not_convert"),
    ] {
        let config = json!({ "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null,
                             ignored: ["lm_head"] });
        let per_tensor = |copy: &Copy| {
            configure(copy, |declared| *declared = config.clone());
            rename(copy, ".weight_scale", &format!(".{scale}"));
            rename(copy, ".input_scale", &format!(".{input}"));
        };
        same("ct-fp8-static-qwen3", per_tensor);
        same("ct-fp8-static-qwen3", |copy| {
            per_tensor(copy);
            edit(copy, |all| {
                let scales = all.iter_mut().filter(|(name, _)| name.ends_with(scale));
                scales.for_each(|(_, (_, shape, _))| shape.clear());
            });
        });
        // Blocks that the configuration does not have.
        let text = tensors("fp8-block-llama", |copy| {
            per_tensor(copy);
            rename(copy, ".weight_scale_inv", &format!(".{scale}"));
        });
        let reason = format!("\"{Q}.{scale}\" has shape [1, 2]; expected [1]");
        assert!(text.contains(&reason), "{text}");
        let text = tensors("ct-fp8-static-qwen3", |copy| {
            per_tensor(copy);
            configure(copy, |declared| declared[ignored] = json!([Q]));
        });
        let reason = "is quantised; quantization_config lists it as not quantised";
        assert_eq!(text, format!("\"{Q}.weight\" {reason}"));
    }
    let text = tensors("ct-fp8-static-qwen3", |copy| {
        configure(copy, |declared| *declared = json!({ "quant_method": "fp8" }));
        edit(copy, |all| drop(all.remove(&format!("{Q}.weight_scale")).expect("a scale")));
    });
    let reason = "is missing; expected F32 or F16 or BF16 of shape [1]";
    assert_eq!(text, format!("\"{Q}.weight_scale\" {reason}"));
}

/// With act-order columns of one group lie anywhere: without their list they would be taken for runs.
#[test]
fn act_order_of_gptq_needs_its_groups() {
    let text = tensors("gptq-desc-act-g128-llama", |copy| {
        edit(copy, |all| all.retain(|name, _| !name.ends_with("g_idx")));
    });
    assert!(text.starts_with("14 problems: "), "{text}");
    let reason = "is missing; expected I32 of shape [256]";
    assert!(text.contains(&format!("\"{Q}.g_idx\" {reason}")), "{text}");
}

/// Otherwise a list of zeros would give every column the first group's scale.
#[test]
fn no_group_of_columns_is_larger_than_groups_are() {
    let zeros = |copy: &Copy| put(copy, &format!("{Q}.g_idx"), 0, &[0; 1024]);
    // As exllamav2 has it, such a list says nothing.
    same("gptq-sym-g128-llama", zeros);
    let text = tensors("gptq-desc-act-g128-llama", zeros);
    let too_many = |count: u32, group: u32| {
        format!("\"{Q}.g_idx\" puts {count} columns into group {group}; expected at most 128")
    };
    assert_eq!(text, too_many(256, 0));
    let text = tensors("gptq-sym-g128-llama", |copy| {
        put(copy, &format!("{Q}.g_idx"), 4 * 7, &1_u32.to_le_bytes());
    });
    assert_eq!(text, too_many(129, 1));
}

/// The version decides what zero points mean: a name of the field that is not read would silently be version 1.
#[test]
fn the_version_of_gptq_has_two_names() {
    let renamed = |copy: &Copy, value: &str| {
        configure(copy, |declared| {
            let map = declared.as_object_mut().expect("an object");
            map.remove("checkpoint_format");
            map.insert("format".to_owned(), json!(value));
        });
    };
    same("gptq-asym-g128-qwen2", |copy| renamed(copy, "gptq"));
    same("gptq-asym-g128-qwen2", |copy| {
        renamed(copy, "gptq_v2");
        edit(copy, |all| {
            for (_, (_, _, bytes)) in all.iter_mut().filter(|(name, _)| name.ends_with("qzeros")) {
                // Stored zero points are 0 to 14: no carry.
                bytes.iter_mut().for_each(|byte| *byte += 0x11);
            }
        });
    });
    let both = |one: &str, other: &str| {
        config("gptq-asym-g128-qwen2", |declared| {
            declared["checkpoint_format"] = json!(one);
            declared["format"] = json!(other);
        })
    };
    assert_eq!(
        both("gptq", "gptq_v2"),
        "\"format\" is \"gptq_v2\", but checkpoint_format is \"gptq\"; expected the same"
    );
    let marlin = config("gptq-asym-g128-qwen2", |declared| {
        declared.as_object_mut().expect("an object").remove("checkpoint_format");
        declared["format"] = json!("marlin");
    });
    assert_eq!(marlin, "\"format\" is \"marlin\"; supported: \"gptq\", \"gptq_v2\"");
}

/// The other layouts of AWQ have the same shapes where a matrix is square.
#[test]
fn other_layouts_of_awq_are_named_wherever_they_are_declared() {
    let with = |field: &str, value: &str| {
        config("awq-g128-qwen2", |declared| {
            declared.as_object_mut().expect("an object").remove("version");
            declared[field] = json!(value);
        })
    };
    for field in ["version", "format", "checkpoint_format"] {
        let reason = "is \"gemv\"; supported: \"gemm\"; use such a copy of the model";
        assert_eq!(with(field, "gemv"), format!("\"{field}\" {reason}"));
    }
    assert_eq!(
        with("backend", "llm-awq"),
        "\"backend\" is \"llm-awq\"; supported: weights of AutoAWQ; llm-awq stores them in another order"
    );
    same("awq-g128-qwen2", |copy| {
        configure(copy, |declared| {
            declared["checkpoint_format"] = json!("GEMM");
            declared["backend"] = json!("autoawq");
        });
    });
}

#[test]
fn scales_that_make_weights_infinite_are_refused() {
    let set = |name: &str, part: &str, at: usize, value: &[u8]| {
        tensors(name, |copy| put(copy, &format!("{Q}.{part}"), at, value))
    };
    let expected = "expected scales of finite weights";
    assert_eq!(
        set("ct-fp8-static-qwen3", "weight_scale", 0, &1e37_f32.to_le_bytes()),
        format!("\"{Q}.weight_scale\" holds {} at index 0; {expected}", 1e37_f32)
    );
    // The largest bf16.
    let most = f32::from_bits(0x7f7f_0000);
    assert_eq!(
        set("ct-int8-llama", "weight_scale", 2, &[0x7f, 0x7f]),
        format!("\"{Q}.weight_scale\" holds {most} at index 1; {expected}")
    );
    assert_eq!(
        set("ct-w4a16-g128-llama", "weight_scale", 0, &[0x7f, 0xff]),
        format!("\"{Q}.weight_scale\" holds {} at index 0; {expected}", -most)
    );
    let text = tensors("ct-nvfp4-llama", |copy| {
        put(copy, &format!("{Q}.weight_global_scale"), 0, &1e-36_f32.to_le_bytes());
    });
    assert!(text.ends_with(expected) && text.contains("weight_scale"), "{text}");
    // nf4 rounds to the type that the matrix had.
    let text = tensors("bnb-nf4-plain-qwen3", |copy| {
        put(copy, &format!("{Q}.weight.absmax"), 4, &f32::MAX.to_le_bytes());
    });
    let reason = format!("gives the scale {} at index 1; expected finite numbers", f32::MAX);
    assert_eq!(text, format!("\"{Q}.weight.absmax\" {reason}"));
}

/// Rows of zeros have scales of zero, and AutoRound writes negative ones of integers. Those of floats are damage.
#[test]
fn zero_is_a_scale_and_so_are_negative_numbers_of_integers() {
    for (name, part, value) in [
        ("gptq-sym-g128-llama", "scales", [0, 0]),
        ("gptq-sym-g128-llama", "scales", [0, 0xa0]),
        ("ct-int8-llama", "weight_scale", [0, 0xbc]),
        ("ct-fp8-dynamic-llama", "weight_scale", [0, 0]),
        ("ct-fp8-dynamic-llama", "weight_scale", [0, 0x80]),
    ] {
        let copy = copy(name);
        put(&copy, &format!("{Q}.{part}"), 10, &value);
        model::import(copy.dir()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let refused = |name: &str, part: &str, at: usize, value: &[u8]| {
        tensors(name, |copy| put(copy, &format!("{Q}.{part}"), at, value))
    };
    assert_eq!(
        refused("ct-fp8-dynamic-llama", "weight_scale", 10, &[0, 0xbf]),
        format!("\"{Q}.weight_scale\" holds -0.5 at index 5; expected no negative numbers")
    );
    let text = refused("ct-nvfp4-llama", "weight_scale", 2, &[0xb8]);
    assert!(text.ends_with(" at index 2; expected no negative numbers"), "{text}");
    assert_eq!(
        refused("ct-nvfp4-llama", "weight_global_scale", 0, &(-2_f32).to_le_bytes()),
        format!("\"{Q}.weight_global_scale\" holds -2; expected a finite number above 0")
    );
}

#[test]
fn zero_points_beyond_the_codes_are_refused() {
    for zero in [8_u8, 100, 0xf7] {
        let text = tensors("ct-w4a16-asym-g128-qwen2", |copy| {
            change(copy, &format!("{Q}.weight_zero_point"), |(element, shape, bytes)| {
                let count = shape[0] * 8 * shape[1];
                let mut zeros = vec![0xf8; count];
                zeros[3] = zero;
                (*element, shape[0], *bytes) = ("I8".to_owned(), shape[0] * 8, zeros);
            });
        });
        let zero = zero.cast_signed();
        let reason = format!("holds {zero} at index 3; expected -8 to 7");
        assert_eq!(text, format!("\"{Q}.weight_zero_point\" {reason}"));
    }
}

/// Damage is reported once, under the name that the folder has.
#[test]
fn damage_of_a_fused_matrix_is_named_by_its_tensor() {
    let folder = crate::folder::family("phi3-bf16");
    let copy = Copy::of_folder(&folder);
    let fused = "model.layers.0.self_attn.qkv_proj.weight";
    copy.set(json!({ "quantization_config": { "quant_method": "fp8" } }));
    edit(&copy, |all| {
        let (element, _, bytes) = all.get_mut(fused).expect(fused);
        *element = "F8_E4M3".to_owned();
        bytes.truncate(bytes.len() / 2);
        bytes.fill(0x38);
        bytes[7] = 0xff;
        let scale = ("F32".to_owned(), vec![1], 0.5_f32.to_le_bytes().to_vec());
        all.insert(format!("{fused}_scale"), scale);
    });
    assert_eq!(
        copy.refusal(),
        format!(
            "DIR: the tensors do not fit config.json: \"{fused}\" holds the e4m3 code of NaN (0x7f or 0xff); expected \
             numbers. The file is damaged"
        )
    );
}

/// Options that are no concern of the weights.
#[test]
fn fields_that_do_not_change_weights_are_ignored() {
    let with = |fields: Value| {
        move |copy: &Copy| {
            configure(copy, |declared| {
                let map = declared.as_object_mut().expect("an object");
                map.extend(fields.as_object().expect("an object").clone());
            });
        }
    };
    same(
        "gptq-sym-g128-llama",
        with(json!({ "use_exllama": true, "meta": { "quantizer": ["x:5"] }, "tokenizer": null,
        "desc_act": true, "static_groups": true, "modules_in_block_to_quantize": null })),
    );
    same("fp8-block-llama", with(json!({ "scale_fmt": "ue8m0", "dequantize": false })));
    same(
        "ct-int8-llama",
        with(json!({ "version": "0.12.2", "ignore": ["lm_head", "re:.*gate$"] })),
    );
}
