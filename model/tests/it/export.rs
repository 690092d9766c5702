//! An exported model imports as the same model, and appears complete or not at all.

use std::fs;
use std::path::Path;

use ir::{DType, TensorId};
use model::{Family, Model, Rope, Scaling, Shape, Window, export, import, preset};

use crate::folder::{GOLDEN, golden, quantised};

/// Exports, imports, and compares everything but the name.
fn round_trip(model: &Model) {
    round_trip_of(model, model.graph.tensors.len());
}

/// The same for a model whose checkpoint has this many tensors.
fn round_trip_of(model: &Model, stored: usize) {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("nested/model");
    export(model, &dir).expect("an export");
    let mut back = import(&dir).expect("an import");
    back.graph.name.clone_from(&model.graph.name);
    assert_eq!(back.graph, model.graph);
    for i in 0..model.graph.tensors.len() {
        let id = TensorId(i as u32);
        assert_eq!(
            back.weights.bytes(id),
            model.weights.bytes(id),
            "{}",
            model.graph.tensor(id).name
        );
    }
    let file = fs::read(dir.join("model.safetensors")).expect("the checkpoint");
    let reference = safetensors::SafeTensors::deserialize(&file).expect("a checkpoint");
    assert_eq!(reference.len(), stored);
    let left: Vec<_> = fs::read_dir(dir.parent().expect("a parent")).expect("a folder").collect();
    assert_eq!(left.len(), 1, "a temporary folder stayed");
}

#[test]
fn golden_models() {
    for name in GOLDEN {
        round_trip(&import(&golden(name)).expect(name));
    }
}

/// Families whose tensors are cut, reordered, changed or stacked: written as they are stored.
#[test]
fn golden_models_of_families() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families");
    let mut names: Vec<_> = fs::read_dir(&families)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir())
        .collect();
    names.sort();
    assert!(names.len() >= 19, "{names:?}");
    for folder in names {
        let file = fs::read(folder.join("model.safetensors")).expect("a checkpoint");
        let stored = safetensors::SafeTensors::deserialize(&file).expect("a checkpoint").len();
        let model = import(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        round_trip_of(&model, stored);
    }
}

#[test]
fn a_family_that_has_no_folder_or_is_quantised_is_refused() {
    let parent = tempfile::tempdir().expect("a folder");
    let refusal = |model: &Model| {
        let error = export(model, &parent.path().join("m")).expect_err("a refusal").to_string();
        assert!(!parent.path().join("m").exists());
        error
    };
    let text = refusal(&preset("gemma-3-1b").expect("a preset"));
    assert!(text.contains("a gemma3_text that is neither an imported folder"), "{text}");
    let text = refusal(&import(&quantised("mxfp4-gpt-oss")).expect("a model"));
    assert!(text.contains("a quantised gpt_oss cannot be written; export the folder"), "{text}");
}

#[test]
fn presets() {
    round_trip(&preset("toy").expect("toy"));
    round_trip(&preset("toy-2l").expect("toy-2l"));
}

#[test]
fn every_option() {
    let shape =
        |family| Shape { family, layers: 2, eos: vec![3], bos: Some(1), ..Shape::default() };
    let llama3 = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 512 };
    let mixed = Window::Layers { window: 8, sliding: vec![true, false] };
    let shapes = [
        Shape { attention_bias: true, mlp_bias: true, tied: true, ..shape(Family::Llama) },
        Shape {
            rope: Rope { theta: 5e5, scaling: llama3 },
            eos: vec![2, 9],
            ..shape(Family::Llama)
        },
        Shape {
            rope: Rope { theta: 1e4, scaling: Scaling::Linear { factor: 2.5 } },
            ..shape(Family::Llama)
        },
        Shape {
            window: Window::All(32),
            dtype: DType::F16,
            norm_eps: 1e-6,
            ..shape(Family::Mistral)
        },
        Shape { window: mixed.clone(), ..shape(Family::Qwen2) },
        Shape { window: mixed, attention_bias: true, head_dim: 32, ..shape(Family::Qwen3) },
        Shape { window: Window::All(32), dtype: DType::F32, ..shape(Family::Qwen3) },
        Shape { eos: vec![], bos: None, ..shape(Family::Qwen3) },
    ];
    for shape in shapes {
        assert_eq!(shape.problems(), []);
        round_trip(&Model::random(shape, 11));
    }
}

/// Its long vectors are multiplied in f16, and its folder says what is stored.
#[test]
fn a_model_with_long_vectors() {
    let shape = Shape { ffn: 16_400, hidden: 64, layers: 1, vocab: 64, ..Shape::default() };
    let shape = Shape { heads: 1, kv_heads: 1, head_dim: 64, ..shape };
    let model = Model::random(shape, 1);
    assert_eq!(model.graph.dtype, DType::F16);
    round_trip(&model);
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("model");
    export(&model, &dir).expect("an export");
    let back = import(&dir).expect("an import");
    assert_eq!(
        (back.shape.dtype, back.graph.tensor(back.graph.lm_head).dtype),
        (DType::Bf16, DType::Bf16)
    );
    export(&back, &parent.path().join("again")).expect("an export of what was imported");
}

#[test]
fn the_tokenizer_goes_along() {
    let parent = tempfile::tempdir().expect("a folder");
    let dir = parent.path().join("model");
    export(&import(&golden("llama3-rope-bf16")).expect("a model"), &dir).expect("an export");
    let tokenizer =
        import(&dir).expect("a model").tokenizer().expect("no error").expect("a tokenizer");
    assert!(tokenizer.has_chat_template());
}

#[test]
fn an_occupied_target_is_left_alone() {
    let parent = tempfile::tempdir().expect("a folder");
    let toy = preset("toy").expect("toy");
    let occupied = parent.path().join("occupied");
    fs::create_dir(&occupied).expect("a folder");
    fs::write(occupied.join("mine"), "x").expect("a file");
    for target in [&occupied, &occupied.join("mine")] {
        let error = export(&toy, target).expect_err("a refusal").to_string();
        assert!(
            error.ends_with("it exists and is not an empty folder; remove it or give another path"),
            "{error}"
        );
    }
    assert_eq!(fs::read(occupied.join("mine")).expect("the file"), b"x");
    let empty = parent.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    export(&toy, &empty).expect("an empty folder is no obstacle");
    assert!(import(&empty).is_ok());
    let error = export(&toy, &parent.path().join("..")).expect_err("a refusal").to_string();
    assert!(error.ends_with("the path must end in the new folder's name"), "{error}");
    assert_eq!(fs::read_dir(parent.path()).expect("a folder").count(), 2);
}

#[test]
fn a_window_that_fits_no_configuration_is_refused() {
    let parent = tempfile::tempdir().expect("a folder");
    let shape = Shape { window: Window::All(8), ..Shape::default() };
    let error = export(&Model::random(shape, 1), &parent.path().join("m"))
        .expect_err("a refusal")
        .to_string();
    assert!(
        error
            .ends_with("a llama with a sliding window fits no config.json; use the mistral family")
    );
    assert_eq!(fs::read_dir(parent.path()).expect("a folder").count(), 0);
}
