//! Memory order: tries every execution of the protocols, and finds every deliberate bug. `-- --nocapture` prints the
//! states and the counter-examples.

use tests::explore::models::{
    Case, attend, counter, exchange, host, payload, stages, switch, transitive, trap, weight_stream,
};
use tests::explore::{Model, Op, Order, Verdict, explore, outcomes};

/// Far more states than any of the models has.
const STATES_MAX: usize = 2_000_000;

fn check(cases: Vec<Case>) {
    let mut wrong = Vec::new();
    for case in cases {
        let verdict = explore(&case.model, STATES_MAX);
        println!("{}: {verdict}", case.name);
        let as_expected = match (&verdict, case.fails) {
            (Verdict::Holds { .. }, None) => true,
            (Verdict::Fails { what, trace, .. }, Some(words)) => {
                what.contains(words) && !trace.is_empty()
            }
            (Verdict::Holds { .. } | Verdict::TooMany, Some(_))
            | (Verdict::Fails { .. } | Verdict::TooMany, None) => false,
        };
        if !as_expected {
            wrong.push(format!("{}, expected {:?}: {verdict}", case.name, case.fails));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn counters() {
    check(counter::cases());
}

#[test]
fn flag_in_data_words() {
    check(payload::cases());
}

#[test]
fn what_flag_in_data_words_do_not_order() {
    check(transitive::cases());
}

#[test]
fn stages_of_the_ring() {
    check(stages::cases());
}

#[test]
fn devices_end_a_step_together() {
    check(exchange::cases());
}

#[test]
fn attention_and_the_ring() {
    check(attend::cases());
}

#[test]
fn host_ring() {
    check(host::cases());
}

#[test]
fn weights_that_land_while_the_kernel_runs() {
    check(weight_stream::cases());
}

#[test]
fn traps() {
    check(trap::cases());
}

#[test]
fn switches_of_programs() {
    check(switch::cases());
}

const X: usize = 0;
const Y: usize = 1;

fn store(word: usize, order: Order) -> Op {
    Op::Write(word, order, 1)
}

/// A litmus test over two words: name, threads, an outcome (the notes of each thread), whether it is possible.
struct Litmus(&'static str, Vec<Vec<Op>>, &'static [&'static [u32]], bool);

/// The new word is seen, and what was stored before it is not.
fn message_passing() -> Vec<Litmus> {
    use Order::{Acquire, Relaxed, Release};
    let pass = |name, release, acquire, possible| {
        let writer = vec![store(X, Relaxed), store(Y, release)];
        let reader = vec![Op::Note(Y, acquire), Op::Note(X, Relaxed)];
        Litmus(name, vec![writer, reader], &[&[], &[1, 0]], possible)
    };
    let fenced = |name, first: bool, second: bool, possible| {
        let writer = [Some(store(X, Relaxed)), first.then_some(Op::Fence), Some(store(Y, Relaxed))];
        let reader =
            [Some(Op::Note(Y, Relaxed)), second.then_some(Op::Fence), Some(Op::Note(X, Relaxed))];
        let threads =
            vec![writer.into_iter().flatten().collect(), reader.into_iter().flatten().collect()];
        Litmus(name, threads, &[&[], &[1, 0]], possible)
    };
    let over_three = |name, release, acquire, possible| {
        let between = vec![Op::Note(X, acquire), store(Y, release)];
        let reader = vec![Op::Note(Y, acquire), Op::Note(X, Relaxed)];
        let threads = vec![vec![store(X, Release)], between, reader];
        Litmus(name, threads, &[&[], &[1], &[1, 0]], possible)
    };
    vec![
        pass("relaxed", Relaxed, Relaxed, true),
        pass("release alone", Release, Relaxed, true),
        pass("acquire alone", Relaxed, Acquire, true),
        pass("release and acquire", Release, Acquire, false),
        fenced("fences", true, true, false),
        fenced("the first fence alone", true, false, true),
        fenced("the second fence alone", false, true, true),
        over_three("over three", Release, Acquire, false),
        over_three("over three, relaxed", Relaxed, Relaxed, true),
    ]
}

fn other_shapes() -> Vec<Litmus> {
    use Order::{Acquire, Relaxed, Release};
    let note = Op::Note;
    let cross = |a: [Op; 2], b: [Op; 2]| vec![a.to_vec(), b.to_vec()];
    let buffers =
        cross([store(X, Release), note(Y, Acquire)], [store(Y, Release), note(X, Acquire)]);
    let loads = cross([note(X, Relaxed), store(Y, Relaxed)], [note(Y, Relaxed), store(X, Relaxed)]);
    let coherent =
        cross([store(X, Relaxed), Op::Write(X, Relaxed, 2)], [note(X, Relaxed), note(X, Relaxed)]);
    let readers = vec![
        vec![store(X, Release)],
        vec![store(Y, Release)],
        vec![note(X, Acquire), note(Y, Acquire)],
        vec![note(Y, Acquire), note(X, Acquire)],
    ];
    let chain = vec![
        vec![store(Y, Relaxed), Op::Fence, Op::Add(X)],
        vec![Op::Add(X)],
        vec![note(X, Relaxed), Op::Fence, note(Y, Relaxed)],
    ];
    vec![
        Litmus("store buffering", buffers, &[&[0], &[0]], true),
        Litmus("load buffering, which this memory leaves out", loads, &[&[1], &[1]], false),
        Litmus("one word goes backwards", coherent, &[&[], &[2, 1]], false),
        Litmus("two readers disagree", readers, &[&[], &[], &[1, 0], &[1, 0]], true),
        Litmus("a second addition hides the first's release", chain, &[&[], &[], &[2, 0]], false),
    ]
}

/// Tests the explorer's memory model. A model that is too strong would find no bugs, and one that is too weak would
/// find false ones.
#[test]
fn the_memory_is_as_weak_as_it_should_be() {
    for Litmus(name, threads, outcome, possible) in
        message_passing().into_iter().chain(other_shapes())
    {
        let mut model = Model::default();
        assert_eq!([model.word("x"), model.word("y")], [X, Y]);
        for (index, ops) in threads.into_iter().enumerate() {
            model.thread(format!("t{index}"), ops);
        }
        let found = outcomes(&model);
        let wanted: Vec<Vec<u32>> = outcome.iter().map(|notes| notes.to_vec()).collect();
        assert_eq!(found.contains(&wanted), possible, "{name}: {found:?}");
    }
}
