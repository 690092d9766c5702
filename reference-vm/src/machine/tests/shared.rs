//! Machines that share products give the same bits and the same faults as one that computes everything.

use super::*;
use crate::products::Products;

const POSITIONS: u32 = 8;

/// The observable result of a run, bit for bit: its outputs and caches, or how it stopped.
#[derive(Debug, PartialEq)]
enum Shown {
    Finished { logits: Vec<Vec<u32>>, tokens: Vec<u32>, caches: Vec<Vec<u32>> },
    Stopped(Run),
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn shown(program: &Program, model: &Model, products: Option<&Products<'_>>) -> Option<Shown> {
    if let Some(products) = products {
        products.begin();
    }
    let machine = Machine::bind(program, &model.graph, &*model.weights).ok()?;
    let mut machine = Machine { products, ..machine };
    Some(match machine.run(&tokens(POSITIONS), Order::Waves).unwrap() {
        Run::Finished(Outputs { logits, tokens }) => Shown::Finished {
            logits: logits.iter().map(|row| bits(row)).collect(),
            tokens,
            caches: (0..model.graph.layers.len())
                .flat_map(|layer| [bits(machine.keys(layer)), bits(machine.values(layer))])
                .collect(),
        },
        stopped @ (Run::Trapped(_) | Run::Stuck { .. }) => Shown::Stopped(stopped),
    })
}

#[test]
fn shared_products_change_no_bit() {
    for model in models() {
        let products = Products::new(&*model.weights, 64 << 20);
        for flag_in_data in [false, true] {
            for (fuse_merge, workers, splits) in [(false, 3, 1), (true, 7, 3), (true, 1, 8)] {
                let plan = Plan {
                    flag_in_data,
                    fuse_merge,
                    workers,
                    splits,
                    kv_block: 2,
                    ..Plan::default()
                };
                let program = plan::program(&model.graph, plan);
                let alone = shown(&program, &model, None);
                assert!(matches!(alone, Some(Shown::Finished { .. })), "{plan:?}");
                assert_eq!(shown(&program, &model, Some(&products)), alone, "{plan:?}");
            }
        }
        assert!(products.bytes() > 0);
    }
}

#[test]
fn a_memo_without_room_changes_nothing_either() {
    let model = &models()[0];
    let program = plan::program(&model.graph, Plan::default());
    let products = Products::new(&*model.weights, 1 << 10);
    assert_eq!(shown(&program, model, Some(&products)), shown(&program, model, None));
    assert!(products.bytes() <= 1 << 10);
}

/// Every edit of a program gives the same result with all products of the original program cached as without: the same
/// trap, the same wrong bits, or stuck at the same place.
#[test]
fn a_wrong_program_is_as_wrong_with_every_product_known() {
    let model = &models()[0];
    let whole = plan::program(&model.graph, Plan::default());
    let products = Products::new(&*model.weights, 64 << 20);
    let right = shown(&whole, model, Some(&products));
    let mut differing = 0;
    let mut check = |program: &Program, what: &str| {
        let alone = shown(program, model, None);
        differing += usize::from(alone != right);
        assert_eq!(shown(program, model, Some(&products)), alone, "{what}");
    };
    for index in 0..tasks(&mut whole.clone(), Opcode::Matvec).count() {
        for word in 0..16 {
            for change in [1, u32::MAX] {
                let mut program = whole.clone();
                let Some(task) = tasks(&mut program, Opcode::Matvec).nth(index) else { continue };
                task.params[word] = task.params[word].wrapping_add(change);
                check(&program, &format!("word {word} of task {index} plus {change}"));
            }
        }
        for access in 0..4 {
            for buffer in 0..whole.buffers.len() as u32 {
                let mut program = whole.clone();
                let Some(task) = tasks(&mut program, Opcode::Matvec).nth(index) else { continue };
                let Some(read) = &mut task.reads[access] else { continue };
                *read = BufferId(buffer);
                check(&program, &format!("operand {access} of task {index} is buffer {buffer}"));
            }
        }
    }
    for matrix in 0..whole.matrices.len() {
        let mut program = whole.clone();
        program.matrices[matrix].map.parts.reverse();
        check(&program, &format!("parts of matrix {matrix} reversed"));
    }
    assert!(differing > 500, "only {differing} edits change anything");
}
