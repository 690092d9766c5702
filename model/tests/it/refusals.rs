//! Every refusal, word for word where the words matter.

use serde_json::{Value, json};

use crate::folder::{Copy, safetensors, sharded, split};

/// The import's error for a golden model with some fields of its configuration changed.
fn with(name: &str, fields: Value) -> String {
    let copy = Copy::of(name);
    copy.set(fields);
    copy.refusal()
}

/// The same for the llama, without the file's name.
fn llama(fields: Value) -> String {
    let text = with("llama-tied-f32", fields);
    text.strip_prefix("DIR/config.json: ").expect("the file's name").to_owned()
}

#[test]
fn other_families() {
    let families = "llama, mistral, ministral, qwen2, qwen3, phi3, granite, smollm3, olmo2, olmo3, gemma2, \
                    gemma3_text, glm4, mixtral, olmoe, qwen2_moe, qwen3_moe, gpt_oss; multimodal ones around them: \
                    gemma3, idefics3, internvl, llava, llava_next, llava_onevision, mistral3, smolvlm";
    assert_eq!(
        llama(json!({ "model_type": "gpt2" })),
        format!("\"model_type\" is \"gpt2\"; supported: {families}")
    );
    assert_eq!(
        llama(json!({ "model_type": null })),
        format!("\"model_type\" is missing; supported: {families}")
    );
    assert_eq!(
        llama(json!({ "architectures": ["LlamaForSequenceClassification"] })),
        r#""architectures" is ["LlamaForSequenceClassification"]; supported: ["LlamaForCausalLM"]"#
    );
}

#[test]
fn other_arithmetic() {
    let cases = [
        (
            json!({ "hidden_act": "gelu" }),
            r#""hidden_act" is "gelu"; supported: "silu", "gelu_pytorch_tanh""#,
        ),
        (
            json!({ "quantization_config": { "quant_method": "gptq", "bits": 3 } }),
            r#""quantization_config.bits" is 3; supported: 4"#,
        ),
        (
            json!({ "partial_rotary_factor": 0.5 }),
            r#""partial_rotary_factor" is 0.5; supported: 1.0"#,
        ),
        (
            json!({ "dtype": "float8_e4m3fn" }),
            r#""dtype" is "float8_e4m3fn"; supported: "float32", "float16", "bfloat16""#,
        ),
        (
            json!({ "layer_types": ["full_attention", "sliding_attention"] }),
            r#""layer_types" has sliding_attention; this family has none without sliding_window"#,
        ),
        (
            json!({ "layer_types": ["full_attention", "chunked_attention"] }),
            r#""layer_types" has "chunked_attention"; supported: full_attention, sliding_attention"#,
        ),
        (json!({ "layer_types": [] }), r#""layer_types" has 0 entries for 2 layers"#),
    ];
    for (fields, expected) in cases {
        assert_eq!(llama(fields), expected);
    }
}

#[test]
fn other_rope() {
    let rope = |value: Value| llama(json!({ "rope_parameters": value }));
    assert_eq!(
        rope(json!({ "rope_type": "longrope", "factor": 4.0 })),
        r#""rope_parameters.rope_type" is "longrope"; supported: default, linear, dynamic, llama3, yarn"#
    );
    assert_eq!(
        llama(json!({ "rope_parameters": null, "rope_scaling": { "type": "yarn" } })),
        r#""rope_scaling.factor" is missing; it must be a number"#
    );
    assert_eq!(
        rope(json!({ "rope_type": "llama3", "factor": 8.0 })),
        "2 problems: \"rope_parameters.low_freq_factor\" is missing; it must be a number | \
         \"rope_parameters.high_freq_factor\" is missing; it must be a number"
    );
    assert_eq!(
        rope(
            json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4 })
        ),
        r#""high_freq_factor" is 4; it must be above low_freq_factor, which is 4"#
    );
    assert_eq!(
        rope(json!({ "rope_type": "linear", "factor": 0 })),
        r#""rope factor" is 0; it must be positive and at most 1e9"#
    );
    assert_eq!(
        rope(json!({ "full_attention": { "rope_type": "default" } })),
        r#""rope_parameters.full_attention" is an object; layers of this family have one rotary embedding"#
    );
    assert_eq!(
        rope(json!({ "rope_type": "default", "partial_rotary_factor": 0.25 })),
        r#""rope_parameters.partial_rotary_factor" is 0.25; supported: 1.0"#
    );
    assert_eq!(rope(json!([1])), r#""rope_parameters" is [1]; supported: an object or null"#);
    assert_eq!(
        rope(json!({ "rope_theta": -1 })),
        r#""rope_theta" is -1; supported: above 1 and up to 1e15"#
    );
}

#[test]
fn absurd_sizes_name_their_field() {
    let cases = [
        ("hidden_size", 0_u32, "is 0; supported: 1 to 131072"),
        ("num_hidden_layers", 0, "is 0; supported: 1 to 1024"),
        ("num_attention_heads", 0, "is 0; supported: 1 to 4096"),
        ("num_key_value_heads", 0, "is 0; supported: 1 to 4096"),
        ("head_dim", 0, "is 0; supported: 1 to 256"),
        ("head_dim", 512, "is 512; supported: 1 to 256"),
        ("head_dim", 20, "is 20; supported: multiples of 8 up to 256"),
        ("head_dim", 17, "is 17; supported: multiples of 8 up to 256"),
        ("intermediate_size", 0, "is 0; supported: 1 to 1048576"),
        ("hidden_size", 66, "is 66; supported: multiples of 4"),
        ("intermediate_size", 8806, "is 8806; supported: multiples of 4"),
        ("vocab_size", 0, "is 0; supported: 1 to 4194304"),
        ("max_position_embeddings", 0, "is 0; supported: 1 to 134217728"),
        ("vocab_size", 4_000_000_000, "is 4000000000; supported: 1 to 4194304"),
        ("num_hidden_layers", 4_000_000_000, "is 4000000000; supported: 1 to 1024"),
        ("num_key_value_heads", 3, "is 3; it must divide num_attention_heads, which is 4"),
        ("bos_token_id", 256, "is 256; it must be below vocab_size, which is 256"),
        ("eos_token_id", 999, "is 999; it must be below vocab_size, which is 256"),
    ];
    for (field, value, expected) in cases {
        assert_eq!(
            llama(json!({ field: value })),
            format!("{field:?} {expected}"),
            "{field} {value}"
        );
    }
}

#[test]
fn wrong_types_name_their_field() {
    let whole = "supported: a whole number from 0 to 4294967295";
    let cases = [
        (json!({ "vocab_size": -1 }), format!("\"vocab_size\" is -1; {whole}")),
        (json!({ "vocab_size": 1.5 }), format!("\"vocab_size\" is 1.5; {whole}")),
        (json!({ "vocab_size": 1e300 }), format!("\"vocab_size\" is 1e+300; {whole}")),
        (json!({ "hidden_size": "64" }), format!("\"hidden_size\" is \"64\"; {whole}")),
        (json!({ "hidden_size": null }), "\"hidden_size\" is missing; it must be a whole number".into()),
        (json!({ "rms_norm_eps": "x" }), "\"rms_norm_eps\" is \"x\"; supported: a number".into()),
        (json!({ "rms_norm_eps": 0 }), "\"rms_norm_eps\" is 0e0; it must be above 0 and below 1".into()),
        (json!({ "tie_word_embeddings": 1 }), "\"tie_word_embeddings\" is 1; supported: true or false".into()),
        (
            json!({ "eos_token_id": ["</s>"] }),
            "\"eos_token_id\" is [\"</s>\"]; supported: a token id, a list of up to 1024 token ids, or null".into(),
        ),
    ];
    for (fields, expected) in cases {
        assert_eq!(llama(fields), expected);
    }
    assert_eq!(
        with("qwen3-qknorm-bf16", json!({ "head_dim": null })),
        "DIR/config.json: \"head_dim\" is null; qwen3 needs a whole number"
    );
    assert_eq!(
        with("mistral-f16", json!({ "sliding_window": 0 })),
        "DIR/config.json: \"sliding_window\" is 0; use null for full attention"
    );
    assert_eq!(
        llama(json!({ "head_dim": null, "hidden_size": 66 })),
        "\"hidden_size\" is 66; it must be a multiple of num_attention_heads, which is 4, or head_dim must be given"
    );
}

#[test]
fn all_problems_of_a_configuration_come_at_once() {
    let text = llama(json!({
        "hidden_size": 0, "num_attention_heads": "four", "head_dim": 12, "hidden_act": "relu", "vocab_size": null,
        "rope_parameters": { "rope_type": "longrope" }, "rms_norm_eps": 2,
    }));
    assert!(text.starts_with("7 problems: "), "{text}");
    let fields = [
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "hidden_act",
        "vocab_size",
        "rope_type",
        "rms_norm_eps",
    ];
    for field in fields {
        assert_eq!(text.matches(&format!("{field}\" ")).count(), 1, "{field}: {text}");
    }
}

#[test]
fn every_unsupported_field_is_named_whatever_the_family() {
    let mixture = json!({
        "num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [], "swiglu_limit": 7.0,
        "embedding_multiplier": 12.0, "residual_multiplier": 1.0, "logits_scaling": null,
    });
    let wrong =
        ["num_local_experts", "num_experts_per_tok", "swiglu_limit", "embedding_multiplier"];
    let known = llama(mixture.clone());
    let mut unknown = mixture;
    unknown["model_type"] = "jamba".into();
    let unknown = llama(unknown);
    assert!(known.starts_with("4 problems: ") && unknown.starts_with("5 problems: "), "{unknown}");
    for field in wrong {
        assert!(known.contains(field) && unknown.contains(field), "{known}\n{unknown}");
    }
}

#[test]
fn malformed_json() {
    let copy = Copy::of("llama-tied-f32");
    assert!(
        copy.write("config.json", "{")
            .refusal()
            .starts_with("DIR/config.json: is not valid JSON: EOF")
    );
    assert_eq!(
        copy.write("config.json", "[]").refusal(),
        "DIR/config.json: is valid JSON but not an object"
    );
    let deep = "[".repeat(1 << 20);
    assert!(copy.write("config.json", deep).refusal().contains("recursion limit"));
    let long = format!("{{\"x\": \"{}\"}}", "y".repeat(17 << 20));
    assert!(copy.write("config.json", long).refusal().contains("is longer than 16777216 bytes"));
}

#[test]
fn not_a_folder() {
    let copy = Copy::of("llama-tied-f32");
    let file = copy.dir().join("config.json");
    let error = model::import(&file).expect_err("a refusal").to_string();
    assert!(
        error.contains(
            "is not a model folder: it is a file; give the folder that holds config.json"
        )
    );
    let error = model::import(&copy.dir().join("absent")).expect_err("a refusal").to_string();
    assert!(error.starts_with("cannot open ") && error.contains("No such file"), "{error}");
    copy.remove("model.safetensors");
    assert_eq!(
        copy.refusal(),
        "DIR is not a model folder: it has neither model.safetensors nor model.safetensors.index.json; \
         download its weights (propose, lower, trace and bench with --device cpu need none)"
    );
    copy.write("pytorch_model.bin", "");
    assert!(
        copy.refusal()
            .ends_with("; convert its pickled weights with transformers' save_pretrained")
    );
    copy.remove("config.json");
    let lost = |words: &str| {
        let text = copy.refusal();
        let text = text.strip_prefix("DIR is not a model folder: it has no config.json; ");
        assert!(text.is_some_and(|text| text.contains(words)), "{text:?}");
    };
    lost("give the folder that holds config.json");
    std::fs::create_dir(copy.dir().join("7b")).expect("a folder");
    copy.write("7b/config.json", "{}");
    lost("7b has one: give that");
    std::fs::create_dir(copy.dir().join("snapshots")).expect("a folder");
    lost("(ORG/NAME), or a folder in its snapshots");
    copy.write("model.gguf", "");
    lost("give the .gguf file");
    copy.write("adapter_config.json", "{}");
    lost("a LoRA adapter");
}

#[test]
fn missing_extra_and_misshapen_tensors_come_at_once() {
    let copy = Copy::of("llama-tied-f32");
    let file = copy.read("model.safetensors");
    let text = String::from_utf8_lossy(&file[8..]).into_owned();
    let end = u64::from_le_bytes(*file.first_chunk().expect("8 bytes")) as usize;
    let header = text[..end]
        .replace("model.norm.weight", "model.nrom.weight")
        .replace("[128,64]", "[64,128]");
    copy.write("model.safetensors", safetensors(&header, &file[8 + end..]));
    let text = copy.refusal();
    assert!(text.starts_with("DIR: the tensors do not fit config.json: 6 problems: "), "{text}");
    for expected in [
        "\"model.layers.0.mlp.gate_proj.weight\" has shape [64, 128]; config.json asks for [128, 64]",
        "\"model.layers.1.mlp.up_proj.weight\" has shape [64, 128]; config.json asks for [128, 64]",
        "\"model.norm.weight\" is missing",
        "\"model.nrom.weight\" is not part of the model that config.json describes",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn an_untied_model_without_head_gets_a_hint() {
    let text = with("llama-tied-f32", json!({ "tie_word_embeddings": false }));
    assert!(text.ends_with(
        "\"lm_head.weight\" is missing; if the embedding serves for it, config.json must say \"tie_word_embeddings\": true"
    ));
    let text = with("llama3-rope-bf16", json!({ "vocab_size": 999 }));
    assert!(
        text.contains("2 problems: \"model.embed_tokens.weight\" has shape [512, 128]"),
        "{text}"
    );
}

#[test]
fn element_types() {
    let copy = Copy::of("qwen2-bias-bf16");
    let (mut header, data) = split(&copy.read("model.safetensors"));
    let mut retype = |name: &str, dtype: &str| header[name]["dtype"] = json!(dtype);
    // Norms and biases may have another type than the matrices, but a matrix may not.
    retype("model.norm.weight", "F16");
    retype("model.layers.0.self_attn.q_proj.bias", "F16");
    let text = serde_json::to_string(&header).expect("a header");
    copy.write("model.safetensors", safetensors(&text, &data));
    let graph = model::import(copy.dir()).expect("a model").graph;
    assert_eq!(graph.tensor(graph.final_norm).dtype, ir::DType::F16);
    assert_eq!(graph.dtype, ir::DType::Bf16);
    header["model.layers.1.mlp.up_proj.weight"]["dtype"] = json!("F16");
    header["model.layers.0.input_layernorm.weight"]["dtype"] = json!("I16");
    let text = serde_json::to_string(&header).expect("a header");
    copy.write("model.safetensors", safetensors(&text, &data));
    assert_eq!(
        copy.refusal(),
        "DIR: the tensors do not fit config.json: 2 problems: \
         \"model.layers.0.input_layernorm.weight\" has element type \"I16\"; supported: F32, F16, BF16 | \
         \"model.layers.1.mlp.up_proj.weight\" is f16 but \"model.embed_tokens.weight\" is bf16; all matrices must share one type"
    );
}

#[test]
fn lying_headers() {
    let one = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let two = |from: u64, to: u64| {
        format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"b":{{"dtype":"U8","shape":[8],"data_offsets":[{from},{to}]}}}}"#
        )
    };
    let mut huge = safetensors(one, &[0; 8]);
    huge[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    let shape = |shape: &str| safetensors(&one.replace("[2]", shape), &[0; 8]);
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![], "is 0 bytes long, too short for a safetensors header"),
        (vec![0; 7], "is 7 bytes long, too short for a safetensors header"),
        (
            huge,
            "claims a header of 1152921504606846976 bytes but is only 70 bytes long; it is truncated",
        ),
        (vec![0xff; 64], "claims a header of 18446744073709551615 bytes but is only 64 bytes long"),
        (safetensors(one, &[0; 4]), "tensor \"a\" claims bytes 0 to 8 of 4 bytes of data"),
        (safetensors(one, &[0; 9]), "has 1 bytes after its last tensor"),
        (safetensors(&two(4, 12), &[0; 16]), "tensor \"b\" overlaps the one before it"),
        (safetensors(&two(12, 20), &[0; 20]), "tensor \"b\" leaves a gap before it"),
        (
            safetensors(&two(16, 8), &[0; 16]),
            "tensor \"b\" claims bytes 16 to 8 of 16 bytes of data",
        ),
        (
            safetensors(&two(8, u64::MAX), &[0; 16]),
            "tensor \"b\" claims bytes 8 to 18446744073709551615",
        ),
        (shape("[3]"), "tensor \"a\" of \"F32\" with shape [3] cannot take 8 bytes"),
        (shape("[4294967296,4294967296,2]"), "cannot take 8 bytes"),
        (shape("[1,1,1,1,1,1,1,1,2]"), "has 9 dimensions; supported: up to 8"),
        (shape("[-1]"), "has a malformed header: invalid value"),
        (safetensors(&one.replace('}', ""), &[0; 8]), "has a malformed header: EOF"),
        (safetensors("[]", &[]), "has a malformed header: invalid type"),
        (safetensors("\u{0}", &[]), "has a malformed header"),
        (safetensors(&two(8, 16).replace("\"b\"", "\"a\""), &[0; 16]), "has tensor \"a\" twice"),
    ];
    let copy = Copy::of("llama-tied-f32");
    for (file, expected) in cases {
        copy.write("model.safetensors", file);
        let text = copy.refusal();
        assert!(text.starts_with("DIR/model.safetensors: "), "{text}");
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn an_index_stays_in_its_folder() {
    let copy = sharded("llama-tied-f32");
    let index: Value =
        serde_json::from_slice(&copy.read("model.safetensors.index.json")).expect("JSON");
    for path in [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        "x.bin",
    ] {
        let mut index = index.clone();
        index["weight_map"]["model.norm.weight"] = json!(path);
        copy.write("model.safetensors.index.json", index.to_string());
        let expected = format!(
            "DIR/model.safetensors.index.json: puts tensor \"model.norm.weight\" in {}; \
             supported: the plain name of a .safetensors file in this folder",
            json!(path)
        );
        assert_eq!(copy.refusal(), expected);
    }
}

#[test]
fn an_index_tells_the_truth() {
    let copy = sharded("llama-tied-f32");
    let index: Value =
        serde_json::from_slice(&copy.read("model.safetensors.index.json")).expect("JSON");
    let refusal = |change: &dyn Fn(&mut Value)| {
        let mut index = index.clone();
        change(&mut index);
        copy.write("model.safetensors.index.json", index.to_string());
        copy.refusal()
    };
    assert_eq!(
        refusal(&|index| index["weight_map"]["model.norm.weight"] = json!("model-9.safetensors")),
        "DIR/model.safetensors.index.json: names 1 of 3 files that do not exist: \"model-9.safetensors\"; download them"
    );
    assert_eq!(
        refusal(&|index| index["weight_map"]["more"] = json!("model-1.safetensors")),
        "DIR/model.safetensors.index.json: says that tensor \"more\" is in model-1.safetensors, but it is not"
    );
    assert_eq!(
        refusal(&|index| {
            index["weight_map"].as_object_mut().expect("a map").remove("model.norm.weight");
        }),
        "DIR/model.safetensors.index.json: does not say that tensor \"model.norm.weight\" is in model-2.safetensors; \
         the files are from different checkpoints"
    );
    assert_eq!(
        refusal(&|index| *index = json!({ "weight_map": {} })),
        "DIR/model.safetensors.index.json: names 0 files; supported: 1 to 4096"
    );
    assert_eq!(
        refusal(&|index| *index = json!({ "weight_map": [] })),
        "DIR/model.safetensors.index.json: has no \"weight_map\" object"
    );
    copy.write("model.safetensors.index.json", index.to_string())
        .write("model-2.safetensors", "short");
    assert!(copy.refusal().starts_with("DIR/model-2.safetensors: is 5 bytes long"));
}

#[test]
fn shards_give_the_same_model_as_one_file() {
    let (whole, parts) = (Copy::of("llama-tied-f32"), sharded("llama-tied-f32"));
    let whole = model::import(whole.dir()).expect("a model");
    let parts = model::import(parts.dir()).expect("a model");
    assert_eq!(whole.graph.tensors, parts.graph.tensors);
    for i in 0..whole.graph.tensors.len() {
        let id = ir::TensorId(i as u32);
        assert_eq!(whole.weights.bytes(id), parts.weights.bytes(id));
    }
}

#[test]
fn names_that_are_neither_preset_nor_folder() {
    let text = |name: &str| model::load(name).expect_err("a refusal").to_string();
    assert_eq!(
        text("llama-3.2-1B-instruct"),
        "\"llama-3.2-1B-instruct\" is neither a preset nor a folder; a model of the Hugging Face Hub is named ORG/NAME; \
         presets, all with random weights: toy, toy-2l, smollm2-135m, qwen3-0.6b, \
         llama-3.2-1b, gemma-3-1b, qwen3-1.7b, qwen3-4b, gemma-3-4b, phi-3-mini, phi-4-mini, llama-3.1-8b, qwen3-8b, gpt-oss-20b, qwen3-30b-a3b, \
         mixtral-8x7b, qwen3-32b, llama-3.1-70b, gpt-oss-120b; those of 16 bits also with -fp8, -fp8-block, -int8, \
         -int4-g128, -int4-g32, -q8-0, -q4-k-m"
    );
    assert!(
        text("Llama3.2-1B").contains("(the preset llama-3.2-1b has this shape and random weights)")
    );
    assert!(
        text("smollm-135m").contains("(the preset smollm2-135m has this shape and random weights)")
    );
    for path in ["/no/such/folder", "./here", "a/b/c", "model.gguf"] {
        let said = format!("there is no file or folder {path:?}; check the path");
        assert_eq!(text(path), said);
    }
    assert!(text("").starts_with("\"\" is neither"));
}
