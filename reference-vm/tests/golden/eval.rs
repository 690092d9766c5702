//! Tests of the evaluator: feeding, truncating and refusing.

use ir::{DType, FeedForward, Graph, TensorId};
use model::{Model, Shape, Window};
use reference_vm::InputError;
use reference_vm::compare::{Tolerance, compare, distance};
use reference_vm::eval::{EvalError, Evaluator, Logits};

use crate::{EXPERTS, Golden, each, each_family, each_quantised, each_with_experts};

fn evaluator(golden: &Golden) -> Evaluator<'_> {
    Evaluator::new(&golden.model.graph, &*golden.model.weights).unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    let check = |name: &str, golden: &Golden| {
        let logits = evaluator(golden).run(&golden.tokens, Logits::All).unwrap();
        let agreement = compare(&golden.logits, &logits, Tolerance::REFERENCE)
            .unwrap_or_else(|d| panic!("{name}: {d}"));
        assert_eq!(agreement.summary().top1_agreement, 1.0, "{name}");
    };
    each(check);
    each_quantised(check);
    each_family(check);
    each_with_experts(check);
}

#[test]
fn greedy_tokens_are_those_of_transformers() {
    let check = |name: &str, golden: &Golden| {
        let mut evaluator = evaluator(golden);
        evaluator.run(&golden.tokens, Logits::Skip).unwrap();
        assert_eq!(evaluator.greedy(golden.greedy.len(), &[]).unwrap(), golden.greedy, "{name}");
    };
    each(check);
    each_quantised(check);
    each_family(check);
    each_with_experts(check);
}

#[test]
fn one_at_a_time_has_the_bits_of_all_at_once() {
    let check = |name: &str, golden: &Golden| {
        let mut together = evaluator(golden);
        let logits = together.run(&golden.tokens, Logits::All).unwrap();
        let mut single = evaluator(golden);
        for (token, want) in golden.tokens.iter().zip(&logits) {
            assert_eq!(&single.run(&[*token], Logits::Last).unwrap()[0], want, "{name}");
        }
        for layer in 0..golden.model.graph.layers.len() {
            assert_eq!(single.keys(layer), together.keys(layer), "{name}");
            assert_eq!(single.values(layer), together.values(layer), "{name}");
            assert_eq!(single.keys(layer).len(), 48 * golden.model.graph.kv_width() as usize);
        }
    };
    each(check);
    each_with_experts(check);
}

#[test]
fn logits_at_some_positions_are_those_of_all() {
    each(|name, golden| {
        let all = evaluator(golden).run(&golden.tokens, Logits::All).unwrap();
        let mut some = evaluator(golden);
        let mut rows = some.run_at(&golden.tokens[..30], &[0, 7, 29, 31]).unwrap();
        rows.extend(some.run_at(&golden.tokens[30..], &[47, 31, 31, 99]).unwrap());
        let want = [0, 7, 29, 31, 47].map(|position: usize| all[position].clone());
        assert_eq!(rows, want, "{name}");
    });
}

/// Feeds more positions than a block of keys and a pass over the weights, in uneven pieces.
#[test]
fn pieces_have_the_bits_of_the_whole() {
    for (window, dtype) in
        [(Window::None, DType::Bf16), (Window::All(70), DType::F16), (Window::All(3), DType::F32)]
    {
        let named = format!("{window:?}");
        let shape = Shape { window, dtype, layers: 2, head_dim: 24, ..Shape::default() };
        let model = Model::random(shape, 3);
        let tokens: Vec<u32> = (0..201).map(|i| i * 37 % model.graph.vocab).collect();
        let new = || Evaluator::new(&model.graph, &*model.weights).unwrap();
        let mut whole = new();
        let want = whole.run(&tokens, Logits::All).unwrap();
        let mut pieces = new();
        let mut got = Vec::new();
        for cut in [0..1, 1..3, 3..130, 130..131, 131..201] {
            got.extend(pieces.run(&tokens[cut], Logits::All).unwrap());
        }
        assert_eq!(got, want, "{named}");
        for layer in 0..2 {
            assert_eq!(pieces.keys(layer), whole.keys(layer));
            assert_eq!(pieces.values(layer), whole.values(layer));
        }
        pieces.truncate(70);
        assert_eq!(pieces.run(&tokens[70..], Logits::All).unwrap(), want[70..], "{named}");
    }
}

#[test]
fn truncating_goes_back() {
    each(|name, golden| {
        let mut evaluator = evaluator(golden);
        let logits = evaluator.run(&golden.tokens, Logits::All).unwrap();
        evaluator.truncate(20);
        assert_eq!(evaluator.positions(), 20);
        assert_eq!(evaluator.greedy(1, &[]), Err(InputError::NothingFed.into()));
        assert_eq!(
            evaluator.run(&golden.tokens[20..], Logits::All).unwrap(),
            logits[20..],
            "{name}"
        );
        evaluator.reset();
        assert_eq!(evaluator.run(&golden.tokens, Logits::All).unwrap(), logits, "{name}");
    });
}

/// Resuming from a cache gives the same bits as filling it.
#[test]
fn resuming_goes_on_with_the_same_bits() {
    each(|name, golden| {
        let layers = 0..golden.model.graph.layers.len();
        let mut whole = evaluator(golden);
        whole.run(&golden.tokens[..20], Logits::Skip).unwrap();
        let cache: Vec<_> = layers.map(|layer| (whole.keys(layer), whole.values(layer))).collect();
        let want = whole.run(&golden.tokens[20..], Logits::All).unwrap();
        let mut other = evaluator(golden);
        other.run(&golden.tokens[30..], Logits::Skip).unwrap();
        other.resume(20, &cache).unwrap();
        assert_eq!(other.positions(), 20);
        assert_eq!(other.greedy(1, &[]), Err(InputError::NothingFed.into()));
        assert_eq!(other.run(&golden.tokens[20..], Logits::All).unwrap(), want, "{name}");
        assert_eq!(other.resume(21, &cache), Err(InputError::Cache(21).into()));
        assert_eq!(other.resume(20, &cache[1..]), Err(InputError::Cache(20).into()));
        let full = Err(InputError::Capacity { positions: 20, capacity: 19 }.into());
        assert_eq!(other.with_capacity(19).resume(20, &cache), full);
    });
}

/// Rounding hand-offs changes logits by about the size of their last bits.
#[test]
fn rounded_handoffs_move_logits_a_little() {
    each(|name, golden| {
        let want = evaluator(golden).run(&golden.tokens, Logits::All).unwrap();
        let mut rounded = evaluator(golden).with_rounded_handoffs();
        let got = rounded.run(&golden.tokens, Logits::All).unwrap();
        let moved = distance(want.iter().map(Vec::as_slice), got.iter().map(Vec::as_slice));
        assert!((1e-7..2e-5).contains(&moved), "{name}: {moved}");
    });
}

/// Device roundings change logits by as much as was measured (`cargo device`: 7e-4 to 1.4e-3). Most of that comes from
/// keys and values as f16: the type of the weights adds less than a tenth of it.
#[test]
fn device_roundings_move_logits_as_far_as_the_device_does() {
    each(|name, golden| {
        let want = evaluator(golden).run(&golden.tokens, Logits::All).unwrap();
        let moved = |dtype| {
            let mut graph = golden.model.graph.clone();
            graph.dtype = dtype;
            let weights = &*golden.model.weights;
            let mut rounded = Evaluator::new(&graph, weights).unwrap().with_device_roundings();
            let got = rounded.run(&golden.tokens, Logits::All).unwrap();
            distance(want.iter().map(Vec::as_slice), got.iter().map(Vec::as_slice))
        };
        let [bf16, f16, f32] = [DType::Bf16, DType::F16, DType::F32].map(moved);
        let own = moved(golden.model.graph.dtype);
        println!("{name}: {own:.2e}; as bf16 {bf16:.2e}, as f16 {f16:.2e}, as f32 {f32:.2e}");
        assert!((2e-4..2.5e-3).contains(&own), "{name}: {own}");
        assert!((bf16 / f32 - 1.0).abs() < 0.1 && (f16 / f32 - 1.0).abs() < 0.1, "{name}");
        let longest = golden.model.graph.ffn.max(golden.model.graph.hidden) as usize;
        let allowed = Tolerance::of_device(ir::KvDtype::F16, own, longest).rel();
        assert!(allowed > 1.9 * own || allowed == Tolerance::DEVICE.rel(), "{name}: {allowed}");
    });
}

/// What roundings of the device move in other families: within what its test allows (vm-host/tests/differential.rs).
#[test]
fn device_roundings_leave_the_families_where_they_are() {
    each_family(|name, golden| {
        let mut rounded = evaluator(golden).with_device_roundings();
        let got = rounded.run(&golden.tokens, Logits::All).unwrap();
        let want = golden.logits.iter().map(Vec::as_slice);
        let own = distance(want, got.iter().map(Vec::as_slice));
        println!("{name}: {own:.2e}");
        assert!(own < 5e-3, "{name}: {own}");
    });
}

#[test]
fn a_window_of_the_whole_sequence_is_full_attention_and_a_shorter_one_is_not() {
    each(|name, golden| {
        let full = evaluator(golden).run(&golden.tokens, Logits::All).unwrap();
        let windowed = |window| {
            let mut graph = golden.model.graph.clone();
            for layer in &mut graph.layers {
                layer.attention.body.window = Some(window);
            }
            Evaluator::new(&graph, &*golden.model.weights)
                .unwrap()
                .run(&golden.tokens, Logits::All)
                .unwrap()
        };
        assert_eq!(windowed(48), full, "{name}");
        let short = windowed(5);
        assert_eq!(short[..5], full[..5], "{name}");
        assert_ne!(short[5], full[5], "{name}");
    });
}

#[test]
fn what_cannot_be_evaluated_is_an_error() {
    each(|name, golden| {
        let vocab = golden.model.graph.vocab;
        let mut evaluator = evaluator(golden).with_capacity(4);
        assert_eq!(
            evaluator.run(&[1, vocab], Logits::All),
            Err(InputError::Token { token: vocab, vocab }.into()),
            "{name}"
        );
        assert_eq!(
            evaluator.run(&[1; 5], Logits::All),
            Err(InputError::Capacity { positions: 5, capacity: 4 }.into())
        );
        assert_eq!(evaluator.positions(), 0);
        assert_eq!(evaluator.run(&[], Logits::Last), Ok(vec![]));
        assert_eq!(evaluator.greedy(1, &[]), Err(InputError::NothingFed.into()));
        evaluator.run(&[1; 4], Logits::Skip).unwrap();
        assert_eq!(evaluator.greedy(1, &[]).unwrap().len(), 1);
        assert_eq!(
            evaluator.greedy(2, &[]),
            Err(InputError::Capacity { positions: 5, capacity: 4 }.into())
        );
    });
}

#[test]
fn greedy_ends_with_a_stop_token() {
    each(|name, golden| {
        let mut evaluator = evaluator(golden);
        evaluator.run(&golden.tokens, Logits::Skip).unwrap();
        let stop = golden.greedy[3];
        let end = golden.greedy.iter().position(|&token| token == stop).unwrap();
        assert_eq!(evaluator.greedy(24, &[stop]).unwrap(), golden.greedy[..=end], "{name}");
    });
}

#[test]
fn a_graph_that_contradicts_itself_is_refused() {
    each(|name, golden| {
        let refused = |edit: &dyn Fn(&mut Graph)| {
            let mut graph = golden.model.graph.clone();
            edit(&mut graph);
            Evaluator::new(&graph, &*golden.model.weights)
                .err()
                .unwrap_or_else(|| panic!("{name} was accepted"))
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
    if dtype == DType::F32 { DType::F16 } else { DType::F32 }
}

/// Logits of transformers tell each option of experts and of attention from its neighbour.
#[test]
fn a_changed_option_of_experts_is_seen() {
    let with = |change: fn(&mut ir::Experts)| {
        move |graph: &mut Graph| {
            for layer in &mut graph.layers {
                if let FeedForward::Experts(experts) = &mut layer.mlp.body {
                    change(experts);
                }
            }
        }
    };
    let changed = |name: &str, what: &str, change: &dyn Fn(&mut Graph)| {
        let mut golden = Golden::open("families", name);
        change(&mut golden.model.graph);
        let logits = evaluator(&golden).run(&golden.tokens, Logits::All).unwrap();
        let agreement = compare(&golden.logits, &logits, Tolerance::REFERENCE);
        assert!(agreement.is_err(), "{name}: {what}");
    };
    for name in EXPERTS {
        changed(name, "weights of the other kind", &with(|experts| experts.normalised ^= true));
        changed(name, "one expert fewer", &with(|experts| experts.top_k -= 1));
        changed(name, "one expert more", &with(|experts| experts.top_k += 1));
        changed(name, "experts in another order", &with(|experts| experts.experts.reverse()));
    }
    changed("qwen2-moe-bf16", "no shared expert", &with(|experts| experts.shared = None));
    changed("gpt-oss-bf16", "no clamp", &with(|experts| experts.clamped = None));
    changed("gpt-oss-bf16", "no sinks", &|graph| {
        graph.layers.iter_mut().for_each(|layer| layer.attention.body.sinks = None);
    });
    let mut golden = Golden::open("families", "mixtral-bf16");
    with(|experts| experts.top_k = 5)(&mut golden.model.graph);
    let error = Evaluator::new(&golden.model.graph, &*golden.model.weights).err();
    assert_eq!(error, Some(EvalError::Experts { top_k: 5, count: 4 }));
}
