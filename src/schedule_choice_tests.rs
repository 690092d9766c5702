//! Tests of the schedule choice, on models whose weights are never read.

use std::path::Path;

use serde_json::json;

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::config_source::ConfigSource;

fn place(target: &str) -> PlaceArgs {
    PlaceArgs { target: Some(target.to_owned()), device: DeviceChoice::Cpu, ..PlaceArgs::default() }
}

fn load(model: &str, target: &str) -> Context {
    Context::load(model, &place(target)).unwrap_or_else(|failure| panic!("{}", failure.message))
}

fn taken(context: &Context, schedule: Option<ScheduleChoice>, tokens: u32) -> Chosen {
    let args = ConfigArgs { config: None, schedule };
    let chosen = choose(context, &args, tokens, Auto::Reproducible);
    chosen.unwrap_or_else(|failure| panic!("{}", failure.message))
}

/// A Hugging Face folder with the sizes of smollm2-135m and weights in a sparse file.
fn downloaded(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let config = json!({
        "_name_or_path": "someone/a-model-of-theirs", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "hidden_act": "silu",
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0_u64);
    for tensor in &model::preset("smollm2-135m").unwrap().graph.tensors {
        let bytes = 2 * tensor.shape.iter().map(|&size| u64::from(size)).product::<u64>();
        let place = [end, end + bytes];
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": place});
        header.insert(tensor.name.clone(), entry);
        end += bytes;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let path = folder.join("model.safetensors");
    let length = file.len() as u64 + end;
    std::fs::write(&path, file).unwrap();
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
}

#[test]
fn a_folder_of_another_name_gets_the_schedule_of_its_shape() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("SmolLM2-Theirs");
    downloaded(&folder);
    let theirs = load(folder.to_str().unwrap(), "h200");
    assert_eq!(theirs.graph().name, "SmolLM2-Theirs");
    let chosen = taken(&theirs, None, 128);
    let shipped = include_str!("../corpus/schedules/h200/smollm2-135m/128.json");
    let shipped: ScheduleConfig = serde_json::from_str(shipped).unwrap();
    assert_eq!(chosen.config.id(), shipped.id(), "the schedule shipped for these sizes");
    assert_eq!(chosen.config.id(), taken(&load("smollm2-135m", "h200"), None, 128).config.id());
    let source = &chosen.source;
    assert_eq!(
        (source.kind, source.shape, source.context),
        ("shipped", Some(ShapeMatch::Same), Some(128))
    );
    let of = GraphShape::from(theirs.graph());
    let shipped = corpus::all_shipped().iter().find(|shipped| shipped.shape == of);
    let bundle = shipped.and_then(|shipped| shipped.bundle).expect("its schedule has a bundle");
    let kernel = search::Bundle::read(bundle).expect("it holds").kernel_id;
    assert_eq!(source.kernel.as_ref(), Some(&kernel), "the kernel of its bundle");
}

#[test]
fn an_h100_runs_the_schedule_of_an_h200_of_the_same_shape() {
    let h100 = taken(&load("llama-3.2-1b", "h100"), None, 2048);
    assert_eq!(h100.config, taken(&load("llama-3.2-1b", "h200"), None, 2048).config);
    assert_eq!(h100.source.target.as_deref(), Some("h200"));
    assert_eq!(h100.config.pipeline.stage_bytes, 32 * 1024);
    assert_eq!(h100.config.sync.attention, ir::schedule::Handoff::FlagInData);
    let other = taken(&load("llama-3.2-1b", "a100"), None, 128);
    assert_eq!(other.source.kind, "default", "another architecture");
    assert!(other.source.why.starts_with("no schedule for this shape: rule-based default"));
}

#[test]
fn every_preset_is_predicted_faster_than_neutral_on_both_hoppers() {
    for preset in model::PRESETS.iter().filter(|preset| !preset.name.starts_with("toy")) {
        for target in ["h100", "h200"] {
            let context = load(preset.name, target);
            // What does not fit a card is bound by bytes: there is less to win.
            if context.graph().weight_bytes() > 100_000_000_000 {
                continue;
            }
            let us = |config: &ScheduleConfig| {
                let program = context.lowered(config);
                let program = program.unwrap_or_else(|failure| panic!("{}", failure.message));
                lower::predict(&program, &config.kernel, &context.target, 128).latency_us
            };
            let chosen = taken(&context, None, 128);
            let (chosen, neutral) = (us(&chosen.config), us(&context.neutral_config()));
            assert!(chosen < 0.95 * neutral, "{} on {target}: {chosen} of {neutral}", preset.name);
        }
    }
}

#[test]
fn a_named_schedule_is_taken_or_missed_by_name() {
    let toy = load("toy", "h200");
    assert_eq!(taken(&toy, None, 8).source.kind, "default");
    assert_eq!(taken(&toy, Some(ScheduleChoice::Neutral), 8).config, toy.neutral_config());
    assert_eq!(taken(&toy, Some(ScheduleChoice::Default), 8).config, toy.default_config());
    let args = ConfigArgs { config: None, schedule: Some(ScheduleChoice::Shipped) };
    let missed = choose(&toy, &args, 8, Auto::Reproducible).unwrap_err();
    assert_eq!(missed.exit, crate::failure::Exit::Missing);
    assert!(missed.message.contains("no schedule is shipped for the shape of toy"));
    let config = Some(ConfigSource::Inline("{}".to_owned()));
    let both = ConfigArgs { config, schedule: Some(ScheduleChoice::Neutral) };
    assert!(choose(&toy, &both, 8, Auto::Fastest).is_err(), "two schedules are named");
}

#[test]
fn shipped_schedules_are_legal_for_the_shapes_that_they_name() {
    for shipped in corpus::all_shipped() {
        let target = ir::Target::by_name(shipped.target).expect("a known target");
        let bundle = search::Bundle::read(shipped.bundle.expect("a bundle")).expect("it holds");
        let graph = model::preset(&bundle.model).expect("a preset").graph;
        assert_eq!(GraphShape::from(&graph), shipped.shape, "{}", shipped.folder);
        let config = read_config(shipped.schedule, &graph, &target);
        assert!(config.is_ok(), "{shipped:?}: {config:?}");
    }
}

#[test]
fn sequences_get_a_split_each() {
    let target = Target::by_name("h200").expect("a known target");
    for (model, context, seqs, splits, block) in [
        ("llama-3.2-1b", 128, 8, 8, 1024),
        ("llama-3.2-1b", 128, 2, 2, 1024),
        ("llama-3.2-1b", 128, 1, 1, 1024),
        ("llama-3.2-1b", 16_384, 8, 16, 1024),
        ("qwen3-0.6b", 128, 8, 8, 1024),
        // It has 8192 positions.
        ("smollm2-135m", 128, 8, 16, 512),
    ] {
        let model = model::preset(model).expect("a preset");
        let shape = ir::program::GraphShape::from(&model.graph);
        let shipped = corpus::shipped(&shape, &target, context)[0].shipped;
        let config = ir::schedule::read_config(shipped.schedule, &model.graph, &target);
        let config = *config.expect("a legal schedule");
        let got = spread(config, &model.graph, &target, seqs);
        assert_eq!(got.tiling.attention.kv_split, splits, "{}", model.graph.name);
        assert_eq!(got.tiling.attention.kv_block, block, "{}", model.graph.name);
        let mut back = got;
        back.tiling.attention = config.tiling.attention;
        assert_eq!(back, config, "nothing else changes");
        assert!(validate(got, &model.graph, &target).is_ok());
    }
}
