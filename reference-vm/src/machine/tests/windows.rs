//! Windows give the bits of the same positions one by one, whatever was guessed, and the checks notice a wrong row.

use super::*;

/// Windows over the same tokens: how many positions each has.
const WIDTHS: [&[usize]; 4] = [&[2, 2, 2, 2, 2, 2, 2], &[4, 4, 4, 2], &[8, 6], &[1, 3, 5, 1, 4]];

fn plans() -> Vec<Plan> {
    let mut plans = Vec::new();
    for flag_in_data in [false, true] {
        for (splits, kv_block, workers) in [(1, 128, 3), (3, 4, 5), (8, 1, 7)] {
            let fused = splits == 3;
            plans.push(Plan {
                flag_in_data,
                splits,
                kv_block,
                workers,
                fuse_merge: fused,
                fuse_embed: fused,
                ..Plan::default()
            });
        }
    }
    plans
}

/// Logits, tokens and caches.
type All = (Outputs, Vec<Vec<f32>>);

fn caches(machine: &Machine<'_>, model: &Model) -> Vec<Vec<f32>> {
    let layers = 0..model.graph.layers.len();
    layers.flat_map(|l| [machine.keys(l).to_vec(), machine.values(l).to_vec()]).collect()
}

/// Runs three positions one by one, then windows of these widths. In a step with a window, `others` sequences of other sessions
/// come first.
fn windowed(
    machine: &mut Machine<'_>,
    model: &Model,
    (widths, others): (&[usize], u32),
    order: Order,
) -> All {
    let n: usize = widths.iter().sum();
    let all = tokens(3 + n as u32);
    let mut got = outputs(machine.run(&all[..3], order).unwrap());
    let mut rest = &all[3..];
    for &width in widths {
        let (window, after) = rest.split_at(width);
        let Outputs { logits, tokens } = outputs(machine.window(others, window, order).unwrap());
        assert_eq!((logits.len(), tokens.len()), (width, width));
        got.logits.extend(logits);
        got.tokens.extend(tokens);
        rest = after;
    }
    assert_eq!(machine.positions(), all.len());
    (got, caches(machine, model))
}

fn one_by_one(machine: &mut Machine<'_>, model: &Model, n: usize) -> All {
    let got = outputs(machine.run(&tokens(n as u32), Order::Queue).unwrap());
    (got, caches(machine, model))
}

#[test]
fn a_window_gives_the_bits_of_its_positions_one_by_one_in_any_order() {
    for model in models() {
        for plan in plans() {
            let program = verify(plan::program(&model.graph, plan)).unwrap();
            for ((widths, others), order) in WIDTHS.into_iter().zip([0, 3, 0, 2]).zip(ORDERS) {
                let machine = || Machine::new(&program, &model.graph, &*model.weights).unwrap();
                let n = 3 + widths.iter().sum::<usize>();
                let expected = one_by_one(&mut machine(), &model, n);
                let got = windowed(&mut machine(), &model, (widths, others), order);
                assert_eq!(got, expected, "{plan:?} {widths:?} behind {others} {order:?}");
            }
        }
    }
}

/// Rows of guesses that were wrong stay behind, and nothing reads them.
#[test]
fn rejected_positions_leave_no_trace() {
    let model = &models()[0];
    let plan = Plan { splits: 3, kv_block: 4, workers: 5, ..Plan::default() };
    let program = verify(plan::program(&model.graph, plan)).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let expected = one_by_one(&mut machine, model, 12);
    machine.reset();
    let all = tokens(12);
    let mut got = outputs(machine.run(&all[..2], Order::Waves).unwrap());
    for (at, &token) in all.iter().enumerate().skip(2) {
        let window = [token, 130, 129, 128];
        let right = outputs(machine.window(0, &window, Order::Seeded(at as u64)).unwrap());
        machine.truncate(at + 1);
        got.logits.push(right.logits[0].clone());
        got.tokens.push(right.tokens[0]);
    }
    assert_eq!((got, caches(&machine, model)), expected);
}

#[test]
fn every_mistake_in_a_window_changes_a_logit() {
    for model in models() {
        for plan in plans() {
            let program = verify(plan::program(&model.graph, plan)).unwrap();
            let machine = || Machine::new(&program, &model.graph, &*model.weights).unwrap();
            let (expected, _) = one_by_one(&mut machine(), &model, 17);
            for defect in WindowDefect::ALL {
                let mut wrong = machine().with_window_defect(defect);
                let (got, _) = one_by_one(&mut wrong, &model, 17);
                assert_eq!(got, expected, "{defect:?} has no effect without a window");
                for (widths, others) in [(WIDTHS[0], 0), (WIDTHS[2], 0), (WIDTHS[1], 3)] {
                    let mut wrong = machine().with_window_defect(defect);
                    let (got, _) = windowed(&mut wrong, &model, (widths, others), Order::Waves);
                    assert_ne!(got.logits, expected.logits, "{defect:?} {plan:?} {widths:?}");
                }
            }
        }
    }
}

#[test]
fn a_window_beyond_the_cache_or_the_vocabulary_is_refused_and_nothing_runs() {
    let model = &models()[0];
    let program = verify(plan::program(&model.graph, Plan::default())).unwrap();
    let mut machine = Machine::new(&program, &model.graph, &*model.weights).unwrap();
    let capacity = program.kv_capacity;
    let beyond =
        InputError::Capacity { positions: capacity as usize + 1, capacity: capacity as usize };
    let refused = machine.window(0, &vec![1; capacity as usize + 1], Order::Waves);
    assert_eq!(refused, Err(beyond.into()));
    let vocab = model.graph.vocab;
    let refused = machine.window(0, &[1, vocab], Order::Waves);
    assert_eq!(refused, Err(InputError::Token { token: vocab, vocab }.into()));
    assert_eq!(machine.window(0, &[], Order::Waves), Ok(Run::Finished(Outputs::default())));
    assert_eq!(machine.positions(), 0);
}
