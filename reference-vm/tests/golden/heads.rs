//! A folder of phi-3's form with heads of 96 elements, which is no power of two: both executors agree, and a kernel takes it.

use std::fs;
use std::path::Path;

use ir::schedule::{default_config, neutral_config, read_config_over, validate};
use ir::{DType, Target};
use lower::{Options, lower};
use model::{Model, Shape};
use reference_vm::Order;
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{Evaluator, Logits};
use reference_vm::machine::{Machine, Run};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

/// Stored matrices of a llama that phi-3 has in one, rows after rows.
const FUSED: [(&str, &[&str]); 2] = [
    ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
];

/// Writes a llama's folder again, as a phi-3.
fn fuse(llama: &Path, phi3: &Path) {
    let bytes = fs::read(llama.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for name in stored.names() {
        let part = |part: &&str| name.contains(*part);
        let Some((whole, parts)) = FUSED.iter().find(|(_, parts)| parts.iter().any(part)) else {
            let tensor = stored.tensor(name).unwrap();
            let (shape, data) = (tensor.shape().to_vec(), tensor.data().to_vec());
            tensors.push((name.to_owned(), tensor.dtype(), shape, data));
            continue;
        };
        if name.contains(parts[0]) {
            let of = |part: &&str| stored.tensor(&name.replace(parts[0], part)).unwrap();
            let all: Vec<_> = parts.iter().map(of).collect();
            let rows = all.iter().map(|tensor| tensor.shape()[0]).sum();
            let data = all.iter().flat_map(TensorView::data).copied().collect();
            let shape = vec![rows, all[0].shape()[1]];
            tensors.push((name.replace(parts[0], whole), all[0].dtype(), shape, data));
        }
    }
    let text = fs::read_to_string(llama.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["model_type"] = "phi3".into();
    config["architectures"] = serde_json::json!(["Phi3ForCausalLM"]);
    fs::create_dir(phi3).unwrap();
    fs::write(phi3.join("config.json"), config.to_string()).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, &phi3.join("model.safetensors")).unwrap();
}

#[test]
fn a_phi3_folder_with_heads_of_96_runs_and_has_a_kernel() {
    let shape = Shape {
        hidden: 192,
        heads: 2,
        kv_heads: 2,
        head_dim: 96,
        ffn: 256,
        layers: 2,
        max_positions: 256,
        dtype: DType::Bf16,
        ..Shape::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let [llama, phi3] = ["llama", "phi3"].map(|name| folder.path().join(name));
    let random = Model::random(shape, 3);
    model::export(&random, &llama).unwrap();
    fuse(&llama, &phi3);
    let model = model::import(&phi3).unwrap();
    assert_eq!((model.graph.head_dim, model.graph.heads_refused()), (96, None));
    assert!(model.notes.iter().all(|note| !note.contains("no kernel")), "{:?}", model.notes);

    let (graph, weights) = (&model.graph, &*model.weights);
    let tokens: Vec<u32> = (0..70).map(|i| i * 37 % graph.vocab).collect();
    let run = |model: &Model| {
        let evaluator = Evaluator::new(&model.graph, &*model.weights);
        evaluator.unwrap().run(&tokens, Logits::All).unwrap()
    };
    let expected = run(&random);
    assert_eq!(run(&model), expected, "the llama that it was made of");
    let target = Target::by_name("h200").unwrap();
    let split = r#"{"tiling": {"attention": {"kv_split": 2, "kv_block": 32}}}"#;
    let split = read_config_over(neutral_config(graph, &target), split, graph, &target).unwrap();
    for config in [validate(default_config(graph, &target), graph, &target).unwrap(), split] {
        let program = lower(&config, graph, &target, Options { kv_capacity: 80 }).unwrap();
        let mut machine = Machine::new(&program, graph, weights).unwrap();
        let Run::Finished(outputs) = machine.run(&tokens, Order::Waves).unwrap() else {
            panic!("the program did not end")
        };
        let compared = compare(&expected, &outputs.logits, Tolerance::REFERENCE);
        assert!(compared.is_ok(), "{}", compared.unwrap_err());
    }
}
