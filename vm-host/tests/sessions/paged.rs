//! Sessions on pages: a session's results do not depend on which pages it has, their order, or who had them before.

use ir::sampling::Sampling;
use model::Model;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use vm_host::{
    BootOptions, DeviceInfo, HostError, Idle, KvPool, PrefillOptions, Request, Resident,
};

use super::{CAPACITY, base, built, device, target};

/// Rows of logits that a command may keep.
const ROWS: u32 = 512;
/// Positions of a sequence: three pages and a part of the fourth.
const LENGTH: usize = 3 * abi::KV_PAGE as usize + 21;

/// Splits that begin in the middle of a page, and blocks that fit in a stage or not.
const SCHEDULES: [(&str, &str); 4] = [
    ("neutral", "{}"),
    ("blocks of 32", r#"{"tiling": {"attention": {"kv_split": 4, "kv_block": 32}}}"#),
    (
        "small stages",
        r#"{"pipeline": {"stages": 4, "stage_bytes": 8192, "in_flight_bytes": 16384, "in_flight_before_wait_bytes": 8192}, "tiling": {"attention": {"kv_split": 4, "kv_block": 64}}}"#,
    ),
    (
        "large stages",
        r#"{"pipeline": {"stages": 2, "stage_bytes": 32768, "in_flight_bytes": 32768, "in_flight_before_wait_bytes": 32768}, "tiling": {"attention": {"kv_split": 1}}}"#,
    ),
];

/// A running machine for a model and a schedule.
fn machine(
    info: &DeviceInfo,
    model: &Model,
    schedule: &str,
    (kv_capacity, sessions, kv_pool): (u32, u32, KvPool),
) -> Resident {
    let graph = &model.graph;
    let target = target(info);
    let config = ir::schedule::read_config_over(base(graph, &target), schedule, graph, &target);
    let config = config.unwrap_or_else(|error| panic!("{schedule}: {error}"));
    let options = lower::Options { kv_capacity };
    let program = lower::lower(&config, graph, &target, options).expect("it lowers");
    let (variant, cards) = built(&config, graph, &target);
    let of = BootOptions { cards, sessions, kv_pool, ..BootOptions::default() };
    let options = BootOptions { logits_rows: ROWS, ..of };
    let idle = Idle::boot(graph, &*model.weights, &program, &variant, options);
    let idle = idle.unwrap_or_else(|error| panic!("{}: {error}", graph.name));
    idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}: {}", graph.name, e.1))
}

fn tokens(random: &mut Xoshiro256PlusPlus, vocab: u32, count: usize) -> Vec<u32> {
    (0..count).map(|_| random.random_range(0..vocab)).collect()
}

/// Runs tokens at the next positions of a session; returns the logits of each as bits.
fn feed(machine: &mut Resident, session: u32, position: usize, tokens: &[u32]) -> Vec<Vec<u32>> {
    let done = machine.decode(session, position as u32, tokens, 1, &[], true);
    let steps = done.unwrap_or_else(|error| panic!("session {session}: {error}")).steps;
    let rows = machine.logits(steps).expect("rows");
    rows.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

/// The first difference between two sequences of rows.
fn differs(got: &[Vec<u32>], want: &[Vec<u32>]) -> Option<String> {
    let at = got.iter().zip(want).position(|(got, want)| got != want)?;
    let column = got[at].iter().zip(&want[at]).position(|(got, want)| got != want)?;
    let value = |rows: &[Vec<u32>]| f32::from_bits(rows[at][column]);
    Some(format!("position {at}, logit {column}: {} instead of {}", value(got), value(want)))
}

/// Three sequences run side by side in pieces, beside a fourth session that comes and goes, so that their pages interleave.
fn interleaved(
    machine: &mut Resident,
    sequences: &[Vec<u32>],
    random: &mut Xoshiro256PlusPlus,
) -> Vec<Vec<Vec<u32>>> {
    let guest = sequences.len() as u32;
    let mut rows = vec![Vec::new(); sequences.len()];
    while rows.iter().any(|rows| rows.len() < LENGTH) {
        let session = random.random_range(0..sequences.len());
        let (fed, sequence) = (rows[session].len(), &sequences[session]);
        let upto = (fed + random.random_range(1..160)).min(LENGTH);
        if fed < upto {
            let more = feed(machine, session as u32, fed, &sequence[fed..upto]);
            rows[session].extend(more);
        }
        if random.random_bool(0.4) {
            let count = random.random_range(1..400);
            machine.end_session(guest).expect("it ends");
            feed(machine, guest, 0, &vec![1; count]);
        }
    }
    rows
}

/// Pages in order and in any order give the same bits, with splits, blocks and stages of all kinds and with a sliding window.
#[test]
fn pages_in_any_order_give_the_same_bits() {
    let Some(info) = device() else { return };
    for (preset, window) in [("smollm2-135m", None), ("toy-2l", None), ("toy-2l", Some(250))] {
        let mut model = model::preset(preset).expect("a preset");
        model.graph.layers.iter_mut().for_each(|layer| layer.attention.body.window = window);
        let vocab = model.graph.vocab;
        let mut random = Xoshiro256PlusPlus::seed_from_u64(4);
        let sequences: Vec<Vec<u32>> = (0..3).map(|_| tokens(&mut random, vocab, LENGTH)).collect();
        for (name, schedule) in SCHEDULES {
            let mut machine = machine(&info, &model, schedule, (CAPACITY, 4, KvPool::Full));
            let in_order: Vec<_> = (0..)
                .zip(&sequences)
                .map(|(session, sequence)| feed(&mut machine, session, 0, sequence))
                .collect();
            let first = machine.session_pages(0).to_vec();
            assert!(first.windows(2).all(|pair| pair[1] == pair[0] + 1), "{first:?}");
            (0..4).for_each(|session| machine.end_session(session).expect("it ends"));
            let rows = interleaved(&mut machine, &sequences, &mut random);
            let pages: Vec<_> = (0..3).map(|s| machine.session_pages(s).to_vec()).collect();
            eprintln!("{preset}, {window:?}, {name}: {pages:?}");
            let scattered = |pages: &Vec<u32>| pages.windows(2).any(|pair| pair[1] != pair[0] + 1);
            assert!(pages.iter().any(scattered), "{pages:?}");
            for (session, (rows, in_order)) in rows.iter().zip(&in_order).enumerate() {
                let wrong = differs(rows, in_order);
                assert_eq!(wrong, None, "{preset}, {window:?}, {name}, session {session}");
            }
            machine.stop().expect("it stops");
        }
    }
}

/// A full pool refuses a session and harms no other. Returned pages are allocated again, and hold nothing of their former session.
#[test]
fn pages_that_were_anothers_leave_no_trace() {
    let Some(info) = device() else { return };
    let model = model::preset("smollm2-135m").expect("a preset");
    let pool = (CAPACITY, 3, KvPool::Positions(5 * u64::from(abi::KV_PAGE)));
    let mut machine = machine(&info, &model, "{}", pool);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(5);
    let mut sequence = |count| tokens(&mut random, model.graph.vocab, count);
    let (long, short, other) = (sequence(LENGTH), sequence(90), sequence(200));
    let fresh = feed(&mut machine, 1, 0, &short);
    let had = machine.session_pages(1).to_vec();
    machine.end_session(1).expect("it ends");
    feed(&mut machine, 0, 0, &long);
    assert!(machine.session_pages(0).contains(&had[0]), "it is another's now");
    let full = machine.decode(2, 0, &other, 1, &[], false);
    let Err(HostError::Request(said)) = full else { panic!("{full:?}") };
    assert!(said.contains("2 more pages") && said.contains("1 of 5"), "{said}");
    assert_eq!(machine.pages().held, 4, "a refusal takes nothing");
    let going_on = feed(&mut machine, 0, LENGTH, &other[..10]);
    machine.end_session(0).expect("it ends");
    assert_eq!(machine.pages().promised, 0);
    // In pages of the long session, whose keys and values lie after the first rows.
    assert_eq!(differs(&feed(&mut machine, 1, 0, &short), &fresh), None);
    machine.end_session(1).expect("it ends");
    feed(&mut machine, 2, 0, &other);
    feed(&mut machine, 0, 0, &long[..300]);
    let rest = [&long[300..], &other[..10]].concat();
    machine.promise_pages(0, CAPACITY).expect_err("two of five are another session's");
    machine.end_session(2).expect("it ends");
    let rows = feed(&mut machine, 0, 300, &rest);
    assert_eq!(
        differs(&rows[rows.len() - 10..], &going_on),
        None,
        "{:?}",
        machine.session_pages(0)
    );
    machine.stop().expect("it stops");
}

/// A session that begins as another did has its pages: its logits have the same bits, sampling knows its tokens, and nobody writes to them.
#[test]
fn sessions_that_begin_alike_share_pages() {
    let Some(info) = device() else { return };
    let model = model::preset("smollm2-135m").expect("a preset");
    let mut machine = machine(&info, &model, "{}", (CAPACITY, 3, KvPool::Full));
    let mut random = Xoshiro256PlusPlus::seed_from_u64(9);
    let long = tokens(&mut random, model.graph.vocab, LENGTH);
    let (positions, shared) = (LENGTH as u32 + 8, 3 * abi::KV_PAGE);
    let penalty = Sampling { repetition_penalty: 1.5, ..Sampling::default() };
    let answer = |machine: &mut Resident, session| {
        machine.set_sampling(session, &penalty).expect("settings");
        let (position, tokens) = (LENGTH as u32 - 1, &long[LENGTH - 1..]);
        let request =
            Request { session, position, tokens, generate: 8, sampled: true, ..Request::default() };
        machine.run(&request, &mut || false).expect("it runs").tokens
    };
    assert_eq!(machine.begin_session(0, positions, &long).expect("it begins"), 0);
    let rows = feed(&mut machine, 0, 0, &long);
    machine.publish_pages(0, &long);
    let said = answer(&mut machine, 0);
    let pages = machine.session_pages(0)[..3].to_vec();
    for session in [1, 2] {
        let has = machine.begin_session(session, positions, &long).expect("it begins");
        assert_eq!(has, shared);
        assert_eq!(&machine.session_pages(session)[..3], pages);
        let more = feed(&mut machine, session, has as usize, &long[has as usize..]);
        assert_eq!(differs(&more, &rows[has as usize..]), None, "session {session}");
        assert_eq!(answer(&mut machine, session), said, "session {session}");
        machine.end_session(0).expect("it may end first");
    }
    let refused = machine.decode(1, shared - 1, &long[..4], 1, &[], false);
    let Err(HostError::Request(said)) = refused else { panic!("{refused:?}") };
    assert!(said.contains("other sessions may have"), "{said}");
    machine.stop().expect("it stops");
}

/// Prompts in chunks write to the pages that steps read, in any order.
#[test]
fn chunks_find_scattered_pages() {
    let Some(info) = device().filter(|info| target(info).devices == 1) else { return };
    let model = model::preset("smollm2-135m").expect("a preset");
    let mut machine = machine(&info, &model, "{}", (CAPACITY, 3, KvPool::Full));
    let mut random = Xoshiro256PlusPlus::seed_from_u64(6);
    let sequence = tokens(&mut random, model.graph.vocab, LENGTH);
    // Pages are returned in another order than they were allocated, so those of session 2 are out of order.
    for session in [0, 1, 0, 1, 0] {
        let from = machine.session_pages(session).len() * abi::KV_PAGE as usize;
        feed(&mut machine, session, from, &vec![1; 128]);
    }
    machine.end_session(0).expect("it ends");
    machine.end_session(1).expect("it ends");
    let mut idle = machine.stop().expect("it stops");
    let options = PrefillOptions { chunk: 128, ..PrefillOptions::default() };
    let mut held = Vec::new();
    for session in [2, 0] {
        for (at, piece) in [(0, &sequence[..200]), (200, &sequence[200..])] {
            idle.prefill(session, at, piece, false, &options).expect("it runs");
        }
        let layers = model.graph.layers.len() as u32;
        let all = (0..layers).map(|layer| {
            let (keys, values) = idle.cached(session, layer, LENGTH as u32).expect("rows");
            let bits = |rows: Vec<f32>| rows.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            (bits(keys), bits(values))
        });
        let all: Vec<_> = all.collect();
        held.push((idle.session_pages(session).to_vec(), all));
    }
    let orders: Vec<_> = held.iter().map(|(pages, _)| pages.clone()).collect();
    eprintln!("{orders:?}");
    let step = |pages: &[u32]| pages.windows(2).map(|p| p[1].abs_diff(p[0])).collect::<Vec<_>>();
    assert_ne!(step(&orders[0]), step(&orders[1]), "{orders:?}");
    assert!(held[0].1 == held[1].1, "keys or values depend on where they lie: {orders:?}");
}

/// A step takes the same time with pages in any order as with pages in order.
#[test]
fn the_price_of_scattered_pages() {
    const CONTEXT: u32 = 2048;
    const STEPS: u32 = 32;
    let Some(info) = device() else { return };
    let model = model::preset("smollm2-135m").expect("a preset");
    let pool = (CONTEXT + 2 * abi::KV_PAGE, 3, KvPool::Full);
    let mut machine = machine(&info, &model, "{}", pool);
    let mut random = Xoshiro256PlusPlus::seed_from_u64(7);
    let sequence = tokens(&mut random, model.graph.vocab, CONTEXT as usize);
    machine.decode(0, 0, &sequence, 1, &[], false).expect("it runs");
    for at in (0..CONTEXT).step_by(128) {
        for session in [1, 2] {
            let piece = &sequence[at as usize..at as usize + 128];
            machine.decode(session, at, piece, 1, &[], false).expect("it runs");
        }
    }
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..40 {
        let session = round % 2;
        let done = machine.decode(session, CONTEXT, &[1], STEPS, &[], false).expect("it runs");
        times[session as usize].push(done.device_us / f64::from(done.steps));
    }
    let [ordered, scattered] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    let pages = machine.session_pages(1);
    assert!(pages.windows(2).all(|pair| pair[1] != pair[0] + 1), "{pages:?}");
    eprintln!("{CONTEXT} positions: {ordered:.2} us per step in order, {scattered:.2} scattered");
    assert!(scattered < ordered * 1.02, "{scattered} us against {ordered}");
    machine.stop().expect("it stops");
}
