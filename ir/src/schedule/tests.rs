//! Tests of parsing, validating and the walks over the table.

use serde_json::json;

use super::*;
use crate::block::{Attention, Block, FeedForward, Gated, Layer};
use crate::graph::{Activation, DType, Graph, Linear, Tensor};
use crate::id::TensorId;
use crate::target::Target;
use crate::violation::{At, Rule, Violations};

/// A graph with Llama-3.1-8B's shapes, or another MLP width; tensors are shared between layers.
fn graph(ffn: u32, dtype: DType) -> Graph {
    let tensor =
        |name: &str, shape: &[u32]| Tensor { name: name.into(), dtype, shape: shape.to_vec() };
    let tensors = vec![
        tensor("embed", &[128_256, 4096]),
        tensor("norm", &[4096]),
        tensor("q", &[4096, 4096]),
        tensor("kv", &[1024, 4096]),
        tensor("gate", &[ffn, 4096]),
        tensor("down", &[4096, ffn]),
    ];
    let linear = |id: u32| Linear { weight: TensorId(id), scale: None, bias: None };
    let attention = Attention {
        q: linear(2),
        k: linear(3),
        v: linear(3),
        q_norm: None,
        k_norm: None,
        o: linear(2),
        sinks: None,
        window: None,
        rotary: 0,
    };
    let mlp = FeedForward::Gated(Gated { gate: linear(4), up: linear(4), down: linear(5) });
    let norm = Some(TensorId(1));
    let layer = Layer {
        attention: Block { norm, post_norm: None, body: attention },
        mlp: Block { norm, post_norm: None, body: mlp },
    };
    Graph {
        name: "test".into(),
        family: "llama".into(),
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn,
        vocab: 128_256,
        norm_eps: 1e-5,
        inv_freq: vec![1.0; 64],
        rotary: Vec::new(),
        embed_scale: 1.0,
        activation: Activation::Silu,
        score_cap: None,
        logit_cap: None,
        kv_dtype: crate::KvDtype::default(),
        attn_scale: 0.088,
        max_positions: 8192,
        dtype,
        tensors,
        embed: TensorId(0),
        layers: vec![layer; 2],
        final_norm: TensorId(1),
        lm_head: TensorId(0),
        lm_head_scale: None,
        eos: vec![],
        bos: None,
    }
}

fn h200() -> Target {
    Target::by_name("h200").expect("in the table")
}

fn refuse(text: &str) -> Violations {
    parse_config(text, &graph(14336, DType::Bf16), &h200()).expect_err("refused")
}

#[test]
fn any_subset_of_the_tree_parses_and_the_rest_is_default() {
    let graph = graph(14336, DType::Bf16);
    let config = parse_config(
        r#"{"tiling": {"gate_up": {"rows": 32}}, "sync": {"qkv": "flag_in_data"}}"#,
        &graph,
        &h200(),
    );
    let mut expected = default_config(&graph, &h200());
    expected.tiling.gate_up.rows = 32;
    expected.sync.qkv = Handoff::FlagInData;
    assert_eq!(config, Ok(expected));
    assert_eq!(parse_config("{}", &graph, &h200()), Ok(default_config(&graph, &h200())));
    let neutral = neutral_config(&graph, &h200());
    let text = json!({"tiling": {"qkv": {"rows": 8}}}).to_string();
    let over = read_config_over(neutral, &text, &graph, &h200());
    let rows8 = ScheduleConfig {
        tiling: Tiling { qkv: QkvTiling { rows: 8 }, ..neutral.tiling },
        ..neutral
    };
    assert_eq!(over.map(Valid::into_inner), Ok(rows8));
}

#[test]
fn everything_wrong_is_reported_at_once_with_place_and_suggestion() {
    let found = refuse(
        r#"{"pipelin": {"stages": 4}, "pipeline": {"stages": "8", "stage_bytes": 16000, "depth": 3, "in_flight_bytes": -1},
            "sync": {"qkv": "flag_in_dat", "attn": 4}, "kernel": 7, "stage_bytes": 8192, "tiling.qkv.rows": 8, "sm_assignment": null}"#,
    );
    let got: Vec<_> = found
        .list()
        .iter()
        .map(|v| (v.rule, v.at.to_string(), v.suggestion.clone().unwrap_or_default()))
        .collect();
    let expected = [
        (Rule::SKey, "pipelin", "pipeline"),
        (Rule::SType, "pipeline.stages", "pipeline.stages = 8"),
        (Rule::SRange, "pipeline.stage_bytes", "pipeline.stage_bytes = 16384"),
        (Rule::SKey, "pipeline.depth", ""),
        (Rule::SRange, "pipeline.in_flight_bytes", "pipeline.in_flight_bytes = 8192"),
        (Rule::SRange, "sync.qkv", "sync.qkv = flag_in_data"),
        (Rule::SKey, "sync.attn", ""),
        (Rule::SType, "kernel", ""),
        (Rule::SKey, "stage_bytes", "pipeline.stage_bytes"),
        (Rule::SKey, "tiling.qkv.rows", "nested objects, one for each part of `tiling.qkv.rows`"),
        (Rule::SType, "sm_assignment", ""),
    ];
    let expected: Vec<_> =
        expected.iter().map(|&(rule, at, s)| (rule, at.to_string(), s.to_string())).collect();
    assert_eq!(got.len(), expected.len(), "{found}");
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((got.0, &got.1), (expected.0, &expected.1), "{found}");
        assert!(expected.2.is_empty() || got.2 == expected.2, "{found}");
    }
    let json = serde_json::to_value(&found).expect("serializes");
    assert!(json.to_string().contains("\"legal\":\"8192, 16384, 32768\""), "{json}");
}

#[test]
fn broken_json_has_its_line_and_column() {
    let found = refuse("{\n  \"sync\": {\n    \"qkv\" \"flag_in_data\" }}");
    assert_eq!(
        (found.list()[0].rule, &found.list()[0].at),
        (Rule::SJson, &At::Text { line: 3, column: 11 })
    );
    let found = refuse("{\"kernel\": {\"warps\": 4,\n \"warps\": 8}}");
    assert_eq!(found.list()[0].rule, Rule::SJson);
    assert!(found.to_string().contains("line 2 column 8: key `warps` is given twice"), "{found}");
    let found = refuse("[1, 2]");
    assert_eq!((found.list()[0].rule, &found.list()[0].at), (Rule::SJson, &At::Whole));
}

#[test]
fn every_bad_value_of_every_knob_is_refused() {
    for knob in Knob::ALL {
        for bad in [
            json!(null),
            json!(true),
            json!(1.5),
            json!("banana"),
            json!(u64::MAX),
            json!([8]),
            json!({"x": 1}),
        ] {
            let mut tree = bad.clone();
            for part in knob.path().rsplit('.') {
                tree = json!({ part: tree });
            }
            let found = refuse(&tree.to_string());
            assert_eq!(found.total(), 1, "{knob} = {bad}: {found}");
            assert_eq!(found.list()[0].at.to_string(), knob.path(), "{bad}: {found}");
        }
    }
}

#[test]
fn a_ring_that_does_not_fit_names_the_largest_that_does() {
    let graph = graph(14336, DType::Bf16);
    let mut config = ScheduleConfig::default();
    config.pipeline.stages = 25;
    let found = validate(config, &graph, &h200()).expect_err("25 x 16 KB do not fit beside 56 KB");
    assert_eq!(found.total(), 1, "{found}");
    let most = largest_stages(&config, &graph, &h200()).expect("some fit");
    assert_eq!(
        found.list()[0].suggestion.as_deref(),
        Some(format!("pipeline.stages = {most}").as_str())
    );
    config.pipeline.stages = most;
    assert!(validate(config, &graph, &h200()).is_ok());
    config.pipeline.stages = most + 1;
    assert!(validate(config, &graph, &h200()).is_err());
}

#[test]
fn rules_between_knobs_are_all_reported_in_one_answer() {
    let graph = graph(14336, DType::F32);
    let text = r#"{"pipeline": {"in_flight_bytes": 24576, "in_flight_before_wait_bytes": 32768, "stages": 25},
        "tiling": {"attention": {"kv_block": 512, "kv_split": 32}}, "oops": 1}"#;
    let found = read_config(text, &graph, &h200()).expect_err("refused");
    for rule in [Rule::SKey, Rule::SRing, Rule::SInFlight, Rule::SBeforeWait, Rule::SSplit] {
        assert!(found.has(rule), "{rule} in {found}");
    }
}

#[test]
fn schedule_rules_are_all_reachable() {
    let mut broken = graph(14336, DType::Bf16);
    broken.head_dim = 300;
    assert!(
        validate(ScheduleConfig::default(), &broken, &h200())
            .expect_err("head_dim")
            .has(Rule::SGraph)
    );
    let mut target = h200();
    target.sms = 1000;
    target.threads_per_block_max = 256;
    let found = validate(ScheduleConfig::default(), &graph(14336, DType::Bf16), &target)
        .expect_err("target");
    assert!(found.has(Rule::STarget) && found.has(Rule::SThreads), "{found}");
    let mut config = ScheduleConfig::default();
    config.kernel.poll_sleep_ns = 3;
    assert!(
        validate(config, &graph(14336, DType::Bf16), &h200())
            .expect_err("poll_sleep_ns")
            .has(Rule::SRange)
    );
}

#[test]
fn the_default_is_legal_on_every_target_that_can_hold_the_model() {
    for target in Target::all() {
        for ffn in [1024, 14336] {
            let graph = graph(ffn, DType::Bf16);
            let at = |context| default_config_at(&graph, &target, context);
            for config in [at(0), at(128), at(4096), at(u32::MAX), neutral_config(&graph, &target)]
            {
                assert!(validate(config, &graph, &target).is_ok(), "{} {ffn}", target.name);
            }
        }
    }
    // 28672 wide activations take 112 KB: more than an rtx4090 has.
    let wide = graph(28672, DType::Bf16);
    assert!(validate(default_config(&wide, &h200()), &wide, &h200()).is_ok());
    let small = Target::by_name("rtx4090").expect("in the table");
    assert!(
        validate(default_config(&wide, &small), &wide, &small)
            .expect_err("too wide")
            .has(Rule::SRing)
    );
}

#[test]
fn the_default_is_the_deepest_ring_of_32_kb_stages_with_every_hand_off_in_the_data() {
    let graph = graph(14336, DType::Bf16);
    for name in ["h100", "h200"] {
        let target = Target::by_name(name).expect("in the table");
        let config = default_config(&graph, &target);
        assert_eq!((config.pipeline.stage_bytes, config.pipeline.stages), (32 * 1024, 5));
        assert_eq!(config.pipeline.in_flight_before_wait_bytes, 32 * 1024);
        assert_eq!(largest_stages(&config, &graph, &target), Some(5));
        for knob in Knob::ALL.iter().filter(|knob| knob.path().starts_with("sync.")) {
            assert_eq!(config.get(*knob), Value::Name("flag_in_data"), "{knob}");
        }
        assert_eq!(config.fusion_grouping.merge, MergeGrouping::OProj);
        assert_eq!(config.sm_assignment, SmAssignment::AroundAttention, "4096 rows of o_proj");
        assert_eq!(config.kernel.poll_sleep_ns, 0);
    }
    // 99 KB less 67 KB: two stages of 16 KB, and one of them before a wait.
    let small = default_config(&graph, &Target::by_name("l40s").expect("in the table"));
    assert_eq!((small.pipeline.stage_bytes, small.pipeline.stages), (16 * 1024, 2));
    assert_eq!(small.pipeline.in_flight_bytes, 32 * 1024);
    assert_eq!(neutral_config(&graph, &h200()), ScheduleConfig::default());
}

#[test]
fn the_default_splits_the_keys_with_the_context() {
    let graph = graph(14336, DType::Bf16);
    let at = |context| {
        let config = default_config_at(&graph, &h200(), context);
        (config.tiling.attention.kv_split, config.fusion_grouping.merge)
    };
    assert_eq!(default_config_at(&graph, &h200(), 128), default_config(&graph, &h200()));
    for context in [0, 1, 256] {
        assert_eq!(at(context), (1, MergeGrouping::OProj), "{context}");
    }
    assert_eq!(at(1024), (4, MergeGrouping::OProj));
    assert_eq!(at(2048), (8, MergeGrouping::Separate));
    // 132 workers of 8 heads, and positions for 32 splits.
    assert_eq!(at(u32::MAX), (16, MergeGrouping::Separate));
    let mut config = default_config_at(&graph, &h200(), 8192);
    split_keys(&mut config, &graph, &h200(), 128);
    assert_eq!(config, default_config(&graph, &h200()), "a split is taken back");
}

#[test]
fn the_search_space_lists_what_is_legal_on_its_own() {
    let space = search_space(&graph(14336, DType::F32), &h200());
    assert_eq!(space.as_object().map(serde_json::Map::len), Some(Knob::ALL.len()));
    assert_eq!(space["kernel.evict"]["choices"], json!(["normal", "first"]));
    assert_eq!(space["pipeline.stages"]["min"], json!(2));
    assert_eq!(space["pipeline.stages"]["max"], json!(20));
    assert_eq!(space["pipeline.stages"]["acts_on"], json!("program"));
    let mut short = graph(14336, DType::Bf16);
    short.max_positions = 100;
    let space = search_space(&short, &h200());
    assert_eq!(space["tiling.attention.kv_split"]["choices"], json!([1, 2, 4]));
    assert_eq!(space["tiling.attention.kv_split"]["type"], json!("integer"));
}

#[test]
fn schedule_ids_do_not_depend_on_how_the_config_was_written() {
    let graph = graph(14336, DType::Bf16);
    let parse = |text| parse_config(text, &graph, &h200()).expect("legal").id();
    assert_eq!(
        parse(r#"{"kernel": {"evict": "first", "poll_sleep_ns": 0}}"#),
        parse(r#"{"kernel": {"poll_sleep_ns": 0, "evict": "first"}, "sync": {}}"#)
    );
    assert_eq!(parse("{}").len(), 16);
}

#[test]
fn the_checked_in_schema_is_fresh() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/schedule.schema.json");
    let fresh = serde_json::to_string_pretty(&json_schema()).expect("serializes") + "\n";
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &fresh).expect("docs/ is writable");
    }
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == fresh,
        "docs/reference/schedule.schema.json is stale; BLESS=1 cargo test -p ir schedule rewrites it"
    );
}

#[test]
fn serde_agrees_with_the_table() {
    assert!(
        serde_json::from_str::<ScheduleConfig>(r#"{"sync": {"qvk": "flag_in_data"}}"#).is_err(),
        "unknown fields are refused"
    );
    let config: ScheduleConfig =
        serde_json::from_str(r#"{"sync": {"qkv": "flag_in_data"}}"#).expect("a subset is enough");
    assert_eq!(config.get(Knob::SyncQkv), Value::Name("flag_in_data"));
    assert_eq!(
        schemars::schema_for!(ScheduleConfig).as_value()["properties"]["pipeline"]["additionalProperties"],
        json!(false)
    );
    assert_eq!(knob_table_markdown().lines().count(), Knob::ALL.len() + 2);
}
