//! Tests of presets: published shapes, and weights that depend only on seed, name and index.

use ir::{DType, TensorId, decode};
use model::{Family, Model, Origin, PRESETS, Shape, Window, preset};

/// Parameters of the published models, in the table's order; the toys' are sums by hand.
const PARAMETERS: [(&str, usize); 19] = [
    ("toy", 69_824),
    ("toy-2l", 106_816),
    ("smollm2-135m", 134_515_008),
    ("qwen3-0.6b", 596_049_920),
    ("llama-3.2-1b", 1_235_814_400),
    ("gemma-3-1b", 999_885_952),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("gemma-3-4b", 3_880_263_168),
    ("phi-3-mini", 3_821_079_552),
    ("phi-4-mini", 3_836_021_760),
    ("llama-3.1-8b", 8_030_261_248),
    ("qwen3-8b", 8_190_735_360),
    ("gpt-oss-20b", 20_914_757_184),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("mixtral-8x7b", 46_702_792_704),
    ("qwen3-32b", 32_762_123_264),
    ("llama-3.1-70b", 70_553_706_496),
    ("gpt-oss-120b", 116_829_156_672),
];

fn values(model: &Model, name: &str) -> Vec<f32> {
    let i = model.graph.tensors.iter().position(|t| t.name == name).expect(name);
    let tensor = &model.graph.tensors[i];
    let mut out = vec![0.0; tensor.len()];
    decode(tensor.dtype, model.weights.bytes(TensorId(i as u32)), &mut out);
    out
}

fn moments(values: &[f32]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    (mean, variance.sqrt())
}

#[test]
fn presets_have_the_published_sizes_and_cost_nothing_until_read() {
    assert_eq!(PRESETS.len(), PARAMETERS.len());
    for (entry, (name, parameters)) in PRESETS.iter().zip(PARAMETERS) {
        assert_eq!(entry.name, name);
        assert!(!entry.about.is_empty());
        assert_eq!(entry.shape().problems(), [], "{name}");
        let model = preset(name).expect(name);
        // Without the scales of codes.
        let tensors = model.graph.tensors.iter().filter(|t| !t.name.ends_with("_scale"));
        assert_eq!(tensors.map(|t| t.len()).sum::<usize>(), parameters, "{name}");
        // Beside codes, and where one half of a long vector is enough.
        let f16 = model.graph.codes().is_some() || ["qwen3-32b", "llama-3.1-70b"].contains(&name);
        let dtype = if f16 { DType::F16 } else { DType::Bf16 };
        assert_eq!((model.graph.dtype, &model.graph.name[..]), (dtype, name));
        assert!(matches!(model.origin, Origin::Random { .. }) && model.folder().is_none());
    }
    assert!(preset("toy-3l").is_none());
    assert_eq!(model::load("toy").expect("toy").graph, preset("toy").expect("toy").graph);
}

#[test]
fn values_follow_their_law() {
    let model = preset("smollm2-135m").expect("a preset");
    for (name, deviation) in [
        ("model.layers.3.mlp.gate_proj.weight", 1.0 / 576_f64.sqrt()),
        ("model.layers.3.mlp.down_proj.weight", 1.0 / 1536_f64.sqrt()),
        ("model.embed_tokens.weight", 1.0 / 576_f64.sqrt()),
    ] {
        let (mean, std) = moments(&values(&model, name));
        assert!(mean.abs() < 0.01 * deviation, "{name}: mean {mean}");
        assert!((std / deviation - 1.0).abs() < 0.01, "{name}: deviation {std} for {deviation}");
    }
    let norm = values(&model, "model.norm.weight");
    assert!(norm.iter().all(|v| (0.5..=1.5).contains(v)));
    let (mean, std) = moments(&norm);
    assert!((mean - 1.0).abs() < 0.05 && (std - 12_f64.powf(-0.5)).abs() < 0.02, "{mean} {std}");
}

/// A small model of the same kinds of layers as a preset: the graph and weights of its first layer.
fn first_layer(name: &str) -> Model {
    let shape = preset(name).expect(name).shape;
    let experts = shape.options.experts.clone().map(|e| model::ExpertShape { count: 8, ..e });
    let options = model::Options { experts, ..shape.options.clone() };
    Model::random(Shape { layers: 1, options, vocab: 64, window: Window::None, ..shape }, 3)
}

/// The values of a matrix have the deviation that those of 16 bits have, times the factors of its rows.
#[test]
fn codes_follow_their_law() {
    let (dense, expert) = ("mlp.down_proj.weight", "mlp.experts.3.down_proj.weight");
    for (name, at, dtype) in [
        ("gpt-oss-20b", expert, DType::Mxfp4),
        ("qwen3-30b-a3b-fp8-block", expert, DType::E4m3G64),
        ("qwen3-30b-a3b-fp8", expert, DType::E4m3G64Row),
        ("qwen3-30b-a3b-int8", expert, DType::Int8G32),
        ("llama-3.2-1b-fp8", dense, DType::E4m3),
        ("llama-3.2-1b-fp8-block", dense, DType::E4m3G64),
        ("llama-3.2-1b-int8", dense, DType::Int8),
        ("llama-3.2-1b-int4-g128", dense, DType::Int4G128),
        ("qwen3-0.6b-int4-g32", dense, DType::Int4G32),
        ("llama-3.2-1b-q8-0", dense, DType::Int8G32),
        // One layer alone has more bits.
        ("llama-3.2-1b-q4-k-m", "mlp.up_proj.weight", DType::Int4K),
        ("llama-3.2-1b-q4-k-m", dense, DType::Int8K),
    ] {
        let model = first_layer(name);
        let at = format!("model.layers.0.{at}");
        let i = model.graph.tensors.iter().position(|t| t.name == at).expect(&at);
        let (tensor, bytes) = (&model.graph.tensors[i], model.weights.bytes(TensorId(i as u32)));
        assert_eq!((tensor.dtype, bytes.len()), (dtype, tensor.bytes()), "{name}");
        let cols = tensor.shape[1] as usize;
        let mut out = vec![0.0; tensor.len()];
        let rows = bytes.chunks(dtype.row_bytes(cols)).zip(out.chunks_mut(cols));
        rows.for_each(|(row, out)| decode(dtype, row, out));
        let factors = values(&model, &format!("{}_scale", at.replace("experts.3", "experts.0")));
        if dtype.block().is_some() {
            assert!(factors.iter().all(|&factor| factor == 1.0), "{name}");
        }
        let ((mean, std), deviation) = (moments(&out), 1.0 / (cols as f64).sqrt());
        let (mean, std) = (mean * f64::from(factors[0]), std * f64::from(factors[0]));
        // Integers of 4 bits have one more value below zero than above: -8 to 7.
        let is_int4 = matches!(dtype, DType::Int4G128 | DType::Int4G32 | DType::Int4K);
        let middle = if is_int4 { -0.5 / 21.5_f64.sqrt() } else { 0.0 };
        assert!((mean / deviation - middle).abs() < 0.01, "{name}: mean {mean}");
        // A power of two may be half of what was wanted.
        assert!((0.5..1.05).contains(&(std / deviation)), "{name}: {std} for {deviation}");
    }
}

#[test]
fn a_preset_has_a_name_in_each_format_of_codes() {
    for preset_of in PRESETS {
        for (format, _) in model::CODED {
            let name = format!("{}-{format}", preset_of.name);
            let is_file = ["q8-0", "q4-k-m"].contains(format);
            let has_experts = preset_of.shape().options.experts.is_some();
            let is_other = preset_of.name.starts_with("gpt-oss") || (is_file && has_experts);
            assert_eq!(preset(&name).is_none(), is_other, "{name}");
        }
    }
    let plain = preset("llama-3.1-70b").expect("a preset").graph;
    let coded = preset("llama-3.1-70b-int4-g128").expect("a preset").graph;
    // 64 bytes and a scale of two for 128 codes, and a factor of four bytes for each row; norms, embedding and output
    // matrix as they were.
    let (all, norms, tables) = (70_553_706_496, (2 * 80 + 1) * 8192, 2 * 128_256 * 8192);
    assert_eq!(plain.weight_bytes(), 2 * all);
    let rows = 80 * (3 * 8192 + 2 * 1024 + 2 * 28_672);
    let codes = (all - norms - tables) / 128 * (64 + 2);
    assert_eq!(coded.weight_bytes(), codes + 4 * rows + 2 * (norms + tables));
    assert!(preset("llama-3.1-70b-int4").is_none() && preset("fp8").is_none());
}

/// Bytes of a step, by hand: attention and `lm_head` in bf16 or FP8, and the chosen experts in blocks.
#[test]
fn a_step_of_codes_reads_their_bytes() {
    let gpt = preset("gpt-oss-20b").expect("a preset").graph;
    let expert = 3 * 2880 * 23 * (64 + 4);
    let attention = 2 * (2 * 4096 * 2880 + 2 * 512 * 2880);
    let rest = gpt.step_bytes() - 24 * (4 * expert + attention) - 2 * 201_088 * 2880;
    assert!(rest < 12_000_000, "router, norms, biases, factors: {rest}");
    let qwen = preset("qwen3-30b-a3b-fp8-block").expect("a preset").graph;
    let expert = 3 * 2048 * 768 / 64 * (64 + 2);
    let attention = (2 * 4096 * 2048 + 2 * 512 * 2048) / 64 * (64 + 2);
    let rest = qwen.step_bytes() - 48 * (8 * expert + attention) - 2 * 151_936 * 2048;
    assert!(rest < 30_000_000, "router, norms, factors: {rest}");
}

#[test]
fn untied_embeddings_and_biases_follow_theirs() {
    let shape = Shape { family: Family::Qwen2, vocab: 4096, hidden: 512, ..Shape::default() };
    let model = Model::random(shape, 7);
    let (_, std) = moments(&values(&model, "model.embed_tokens.weight"));
    assert!((std - 1.0).abs() < 0.01, "{std}");
    let (_, std) = moments(&values(&model, "lm_head.weight"));
    assert!((std * 512_f64.sqrt() - 1.0).abs() < 0.01, "{std}");
    let (_, std) = moments(&values(&model, "model.layers.0.self_attn.k_proj.bias"));
    assert!((0.06..0.14).contains(&std), "{std}");
}

#[test]
fn tensors_and_seeds_differ_and_element_types_agree() {
    let random = |dtype, seed| Model::random(Shape { dtype, ..Shape::default() }, seed);
    let (a, b) = (random(DType::F32, 1), random(DType::F32, 2));
    let name = "model.layers.0.self_attn.k_proj.weight";
    assert_ne!(values(&a, name), values(&b, name));
    assert_ne!(values(&a, name), values(&a, "model.layers.0.self_attn.v_proj.weight"));
    let rounded: Vec<f32> =
        values(&a, name).iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    assert_eq!(values(&random(DType::Bf16, 1), name), rounded);
    let rounded: Vec<f32> =
        values(&a, name).iter().map(|&v| half::f16::from_f32(v).to_f32()).collect();
    assert_eq!(values(&random(DType::F16, 1), name), rounded);
}

/// A change here changes every result that was ever measured on a preset.
#[test]
fn values_are_pinned() {
    let model = preset("toy").expect("toy");
    let first = |name: &str| values(&model, name)[..4].to_vec();
    assert_eq!(first("model.layers.0.self_attn.q_proj.weight"), PINNED_Q);
    assert_eq!(first("model.norm.weight"), PINNED_NORM);
}

const PINNED_Q: [f32; 4] = [0.051513672, -0.171875, -0.28320313, -0.15429688];
const PINNED_NORM: [f32; 4] = [1.0, 1.046875, 0.9921875, 1.0703125];

#[test]
fn many_threads_may_ask_for_the_same_tensor_at_once() {
    let shape = Shape { vocab: 8192, ..Shape::default() };
    let (model, alone) = (Model::random(shape.clone(), 5), Model::random(shape, 5));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for i in 0..model.graph.tensors.len() {
                    let id = TensorId(i as u32);
                    assert_eq!(model.weights.bytes(id), alone.weights.bytes(id));
                }
            });
        }
    });
}

#[test]
fn a_preset_of_70b_is_only_numbers() {
    let graph = preset("llama-3.1-70b").expect("a preset").graph;
    assert_eq!(graph.layers.len(), 80);
    assert_eq!(graph.weight_bytes(), 2 * 70_553_706_496);
    assert_eq!((graph.attn_scale, graph.tensors.len()), (0.088_388_346, 3 + 80 * 9));
}

#[test]
fn windows_reach_the_graph() {
    let window = Window::Layers { window: 8, sliding: vec![true, false] };
    let graph = Shape { layers: 2, window, ..Shape::default() }.graph();
    assert_eq!(
        graph.layers.iter().map(|l| l.attention.body.window).collect::<Vec<_>>(),
        [Some(8), None]
    );
    let problems = Shape { layers: 3, window: Window::All(0), ..Shape::default() }.problems();
    assert_eq!(problems[0].to_string(), "\"sliding_window\" is 0; use null for full attention");
}

/// Ledgers, grids and bundles name graphs by these ids.
#[test]
fn graphs_keep_the_ids_that_results_are_stored_under() {
    let ids = [
        ("toy", "cc5dd864d682857a"),
        ("smollm2-135m", "e4a95c097a1504ed"),
        ("qwen3-0.6b", "f940d54bc11a1134"),
        ("llama-3.2-1b", "c80a821b3a482d99"),
        ("gemma-3-4b", "a3d4961ed0fe5eb2"),
        ("phi-4-mini", "25985941be2e5c9c"),
    ];
    for (name, id) in ids {
        assert_eq!(preset(name).expect(name).graph.id(), id, "{name}");
    }
}
