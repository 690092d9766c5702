//! The evaluator against logits that transformers computed for small random models, and against itself.

mod folder;

use std::path::Path;

use folder::Folder;
use half::{bf16, f16};
use ir::{DType, Graph, TensorId};
use reference_vm::compare::{Tolerance, compare};
use reference_vm::eval::{EvalError, Evaluator, Logits};

/// Runs `check` on every golden folder.
fn each(check: impl Fn(&str, &Folder)) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden");
    for name in [
        "llama-tied-f32",
        "llama3-rope-bf16",
        "mistral-f16",
        "qwen2-bias-bf16",
        "qwen3-qknorm-bf16",
    ] {
        let mut folder = Folder::open(&golden.join(name));
        round_frequencies(&mut folder.graph);
        check(name, &folder);
    }
}

/// `make_golden.py` casts its model to the stored type and back, and PyTorch casts the rotary frequencies along with the
/// weights: the stored logits belong to rounded frequencies. A checkpoint loaded for use keeps them in `f32`.
fn round_frequencies(graph: &mut Graph) {
    for frequency in &mut graph.inv_freq {
        *frequency = match graph.dtype {
            DType::F32 => *frequency,
            DType::F16 => f16::from_f32(*frequency).to_f32(),
            DType::Bf16 => bf16::from_f32(*frequency).to_f32(),
        };
    }
}

fn evaluator(folder: &Folder) -> Evaluator<'_> {
    Evaluator::new(&folder.graph, folder).unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    each(|name, folder| {
        let logits = evaluator(folder).run(&folder.tokens, Logits::All).unwrap();
        let agreement = compare(&folder.logits, &logits, Tolerance::REFERENCE)
            .unwrap_or_else(|d| panic!("{name}: {d}"));
        assert_eq!(agreement.summary().top1_agreement, 1.0, "{name}");
    });
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    each(|name, folder| {
        let mut evaluator = evaluator(folder);
        evaluator.run(&folder.tokens, Logits::Skip).unwrap();
        assert_eq!(evaluator.greedy(folder.greedy.len(), &[]).unwrap(), folder.greedy, "{name}");
    });
}

#[test]
fn one_at_a_time_has_the_bits_of_all_at_once() {
    each(|name, folder| {
        let mut together = evaluator(folder);
        let logits = together.run(&folder.tokens, Logits::All).unwrap();
        let mut single = evaluator(folder);
        for (token, want) in folder.tokens.iter().zip(&logits) {
            assert_eq!(&single.run(&[*token], Logits::Last).unwrap()[0], want, "{name}");
        }
        for layer in 0..folder.graph.layers.len() {
            assert_eq!(single.keys(layer), together.keys(layer), "{name}");
            assert_eq!(single.values(layer), together.values(layer), "{name}");
            assert_eq!(single.keys(layer).len(), 48 * folder.graph.kv_width() as usize);
        }
    });
}

#[test]
fn truncating_goes_back() {
    each(|name, folder| {
        let mut evaluator = evaluator(folder);
        let logits = evaluator.run(&folder.tokens, Logits::All).unwrap();
        evaluator.truncate(20);
        assert_eq!(evaluator.positions(), 20);
        assert_eq!(evaluator.greedy(1, &[]), Err(EvalError::NothingFed));
        assert_eq!(
            evaluator.run(&folder.tokens[20..], Logits::All).unwrap(),
            logits[20..],
            "{name}"
        );
        evaluator.reset();
        assert_eq!(evaluator.run(&folder.tokens, Logits::All).unwrap(), logits, "{name}");
    });
}

#[test]
fn a_window_of_the_whole_sequence_is_full_attention_and_a_shorter_one_is_not() {
    each(|name, folder| {
        let full = evaluator(folder).run(&folder.tokens, Logits::All).unwrap();
        let windowed = |window| {
            let mut graph = folder.graph.clone();
            for layer in &mut graph.layers {
                layer.window = Some(window);
            }
            Evaluator::new(&graph, folder).unwrap().run(&folder.tokens, Logits::All).unwrap()
        };
        assert_eq!(windowed(48), full, "{name}");
        let short = windowed(5);
        assert_eq!(short[..5], full[..5], "{name}");
        assert_ne!(short[5], full[5], "{name}");
    });
}

#[test]
fn what_cannot_be_evaluated_is_an_error() {
    each(|name, folder| {
        let vocab = folder.graph.vocab;
        let mut evaluator = evaluator(folder).with_capacity(4);
        assert_eq!(
            evaluator.run(&[1, vocab], Logits::All),
            Err(EvalError::Token { token: vocab, vocab }),
            "{name}"
        );
        assert_eq!(
            evaluator.run(&[1; 5], Logits::All),
            Err(EvalError::Capacity { positions: 5, capacity: 4 })
        );
        assert_eq!(evaluator.positions(), 0);
        assert_eq!(evaluator.run(&[], Logits::Last), Ok(vec![]));
        assert_eq!(evaluator.greedy(1, &[]), Err(EvalError::NothingFed));
        evaluator.run(&[1; 4], Logits::Skip).unwrap();
        assert_eq!(evaluator.greedy(1, &[]).unwrap().len(), 1);
        assert_eq!(
            evaluator.greedy(2, &[]),
            Err(EvalError::Capacity { positions: 5, capacity: 4 })
        );
    });
}

#[test]
fn greedy_ends_with_a_stop_token() {
    each(|name, folder| {
        let mut evaluator = evaluator(folder);
        evaluator.run(&folder.tokens, Logits::Skip).unwrap();
        let stop = folder.greedy[3];
        let end = folder.greedy.iter().position(|&token| token == stop).unwrap();
        assert_eq!(evaluator.greedy(24, &[stop]).unwrap(), folder.greedy[..=end], "{name}");
    });
}

#[test]
fn a_graph_that_contradicts_itself_is_refused() {
    each(|name, folder| {
        let refused = |edit: &dyn Fn(&mut Graph)| {
            let mut graph = folder.graph.clone();
            edit(&mut graph);
            Evaluator::new(&graph, folder).err().unwrap_or_else(|| panic!("{name} was accepted"))
        };
        assert!(matches!(refused(&|g| g.kv_heads = 0), EvalError::Heads { .. }));
        assert!(matches!(refused(&|g| g.inv_freq.clear()), EvalError::Heads { .. }));
        assert!(matches!(refused(&|g| g.embed = TensorId(9999)), EvalError::MissingTensor { .. }));
        assert!(matches!(refused(&|g| g.hidden += 1), EvalError::Shape { .. }));
        assert!(matches!(
            refused(&|g| g.tensors[0].dtype = other(g.tensors[0].dtype)),
            EvalError::Bytes { .. }
        ));
    });
}

fn other(dtype: DType) -> DType {
    match dtype {
        DType::F32 => DType::F16,
        DType::F16 | DType::Bf16 => DType::F32,
    }
}
