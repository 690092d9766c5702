//! Batches on a real device: each session of a batch gets what it gets alone.
//!
//! Without a device every test here prints `skipped` and passes; with `AMK_REQUIRE_DEVICE=1` that is a failure. They run on the first GPU, or
//! where `AMK_TEST_TARGET` says (device/target.rs).

use std::path::PathBuf;

use abi::Ending;
use ir::program::Together;
use ir::sampling::Sampling;
use ir::schedule::read_config_over;
use ir::{ScheduleConfig, Target, Valid};
use model::Model;
use vm_device::Variant;
use vm_host::{
    Batch, BatchDecoded, BootOptions, HostError, Idle, Request, Resident, Sequence, Start,
};

mod device;
#[path = "device/heads.rs"]
mod heads;
#[path = "device/target.rs"]
mod target;
#[path = "together/windows.rs"]
mod windows;
use device::device;
use heads::{compile, odd_heads};
use target::{base, built, target};

/// Folders of the corpus: models of every family and 16-bit type, and of codes of every layout.
const GOLDEN: [&str; 11] = [
    "golden/llama3-rope-bf16",
    "golden/mistral-f16",
    "golden/qwen2-bias-bf16",
    "golden/qwen3-qknorm-bf16",
    "quantised/ct-fp8-static-qwen3",
    "quantised/gguf-q4_k_m-qwen3/model.gguf",
    "quantised/fp8-block-llama",
    "quantised/ct-int8-llama",
    "quantised/ct-w4a16-g128-llama",
    "quantised/ct-w4a16-asym-g128-qwen2",
    "quantised/ct-w4a16-g32-qwen3",
];

const SCHEDULES: [(&str, &str); 4] = [
    ("neutral", "{}"),
    (
        "flag-in-data, fused, split",
        r#"{"sync": {"qkv": "flag_in_data", "attention": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "flag_in_data", "down": "flag_in_data"},
            "fusion_grouping": {"embed": "qkv", "merge": "o_proj"}, "tiling": {"attention": {"kv_split": 4, "kv_block": 32}},
            "sm_assignment": "carry"}"#,
    ),
    (
        "two splits",
        r#"{"tiling": {"attention": {"kv_split": 2, "kv_block": 32}, "qkv": {"rows": 8}}}"#,
    ),
    (
        "small stages",
        r#"{"pipeline": {"stages": 4, "stage_bytes": 8192, "in_flight_bytes": 16384, "in_flight_before_wait_bytes": 8192}}"#,
    ),
];

/// Tokens that each session generates.
const GENERATED: u32 = 12;
const SESSIONS: u32 = 9;
const ROWS: u32 = 16;

fn golden(name: &str) -> Model {
    let here = PathBuf::from("corpus");
    let root = if here.is_dir() {
        here
    } else {
        PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus"))
    };
    model::import(&root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The schedule and the program of a model, which this many sequences may share.
fn lowered(
    model: &Model,
    target: &Target,
    schedule: &str,
    (capacity, seqs): (u32, u32),
) -> (Valid<ScheduleConfig>, Together) {
    let (graph, name) = (&model.graph, &model.graph.name);
    let config = read_config_over(base(graph, target), schedule, graph, target);
    let config = config.unwrap_or_else(|e| panic!("{name}: {schedule}: {e}"));
    let options = lower::Options { kv_capacity: capacity };
    let program = lower::lower(&config, graph, target, options).expect("it lowers");
    (config, Together::new(program, seqs).unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Needs no card: what is refused here would fail the tests of several devices, each after some 20 s of compiling.
#[test]
fn every_schedule_is_legal_on_one_device_and_on_two() {
    for name in GOLDEN {
        let model = golden(name);
        for target in ["h200", "h200/2", "h200x2"] {
            let target = Target::by_name(target).expect("a known target");
            for (_, schedule) in SCHEDULES {
                lowered(&model, &target, schedule, (160, 8));
            }
        }
    }
}

/// A machine that runs this many sequences of a model.
fn machine(
    model: &Model,
    info: &vm_host::DeviceInfo,
    schedule: &str,
    capacity: u32,
    seqs: u32,
) -> Resident {
    let (graph, name, target) = (&model.graph, &model.graph.name, target(info));
    let (config, together) = lowered(model, &target, schedule, (capacity, seqs));
    let program = together.program();
    let (variant, cards) = built(&config, graph, &target);
    let variant = Variant { seqs, ..variant };
    let of = BootOptions { cards, sessions: SESSIONS, ..BootOptions::default() };
    let options = BootOptions { logits_rows: ROWS, ..of };
    let idle = Idle::boot(graph, &*model.weights, program, &variant, options);
    let idle = idle.unwrap_or_else(|error| panic!("{name}: boot: {error}"));
    let mut machine =
        idle.launch(variant, program).unwrap_or_else(|e| panic!("{name}: launch: {}", e.1));
    assert_eq!(machine.seqs(), 1, "what is launched with is proven for one session");
    let loaded = machine.load_together(&together).expect("it loads");
    machine.switch(loaded).expect("it switches");
    assert_eq!(machine.seqs(), seqs);
    machine
}

/// A session: its prompt, and the tokens and logits that it generates alone.
struct Session {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn prompt(session: u32, length: u32, vocab: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 131 + session * 977 + 7) % vocab).collect()
}

/// Runs the prompt except its last token, on caches that hold nothing else.
fn fill(machine: &mut Resident, session: u32, prompt: &[u32]) {
    machine.poison_session(session).expect("poison");
    if prompt.len() > 1 {
        let head = &prompt[..prompt.len() - 1];
        machine.decode(session, 0, head, 0, &[], false).expect("the prompt");
    }
}

/// The caches of a session as they are when a sequence begins, and nothing else in them.
fn refill(machine: &mut Resident, seq: &Sequence<'_>, sessions: &[Session]) {
    machine.poison_session(seq.session).expect("poison");
    let head = &sessions[seq.session as usize].prompt[..seq.position as usize];
    if !head.is_empty() {
        machine.decode(seq.session, 0, head, 0, &[], false).expect("the prompt");
    }
}

/// Runs each session by itself.
fn alone(machine: &mut Resident, lengths: &[u32], vocab: u32) -> Vec<Session> {
    let run = |(session, &length): (u32, &u32)| {
        let prompt = prompt(session, length, vocab);
        fill(machine, session, &prompt);
        let last = &prompt[prompt.len() - 1..];
        let done = machine.decode(session, length - 1, last, GENERATED, &[], true);
        let done = done.expect("it runs alone");
        assert_eq!(done.tokens.len(), GENERATED as usize);
        let logits = machine.logits(done.steps).expect("logits");
        Session { prompt, tokens: done.tokens, logits }
    };
    (0..).zip(lengths).map(run).collect()
}

fn seq(session: u32, of: &Session) -> Sequence<'_> {
    in_prompt(session, of, 0)
}

/// A session that has this many tokens of its prompt to run before the last.
fn in_prompt(session: u32, of: &Session, before: usize) -> Sequence<'_> {
    let (head, tokens) = of.prompt.split_at(of.prompt.len() - 1 - before);
    Sequence { session, position: head.len() as u32, tokens, sampled: false }
}

fn together(machine: &mut Resident, seqs: &[Sequence<'_>], keep_logits: bool) -> BatchDecoded {
    let batch = Batch { seqs, steps: GENERATED, stop: &[], keep_logits };
    machine.run_together(&batch, &mut || false).expect("it runs together")
}

/// Greatest difference over the greatest expected value; infinite for NaN.
fn worst(expected: &[f32], actual: &[f32]) -> f64 {
    let scale = expected.iter().fold(0.0_f64, |m, v| m.max(f64::from(v.abs())));
    let differences = expected
        .iter()
        .zip(actual)
        .map(|(e, a)| if a.is_finite() { f64::from((e - a).abs()) } else { f64::INFINITY });
    differences.fold(0.0, f64::max) / scale
}

/// Runs these sessions in one batch and compares every logit and token with those of each alone. Bit for bit: a sequence's sums have the same
/// order as a plain decode's in the same kernel, and nothing of one sequence is added to another's.
fn check_batch(machine: &mut Resident, sessions: &[Session], chosen: &[u32], what: &str) {
    let seqs: Vec<Sequence<'_>> =
        chosen.iter().map(|&session| seq(session, &sessions[session as usize])).collect();
    for (index, seq) in (0..).zip(&seqs) {
        fill(machine, seq.session, &sessions[seq.session as usize].prompt);
        machine.poison_seq_logits(index, GENERATED).expect("poison");
    }
    let done = together(machine, &seqs, true);
    assert_eq!(done.steps, GENERATED, "{what}");
    let mut wrong = Vec::new();
    for ((index, seq), got) in (0..).zip(&seqs).zip(&done.seqs) {
        let expected = &sessions[seq.session as usize];
        let logits = machine.seq_logits(index, done.steps).expect("logits");
        let rows = expected.logits.iter().zip(&logits);
        let errors: Vec<f64> = rows.map(|(want, got)| worst(want, got)).collect();
        let greatest = errors.iter().copied().fold(0.0, f64::max);
        let by_position: Vec<String> = errors.iter().map(|e| format!("{e:.0e}")).collect();
        let by_position = by_position.join(" ");
        let same = expected.logits.iter().flatten().map(|x| x.to_bits());
        let same = same.eq(logits.iter().flatten().map(|x| x.to_bits()));
        if !same || got.tokens != expected.tokens || got.ending != Ending::Length {
            wrong.push(format!(
                "sequence {index}, session {} at {}: worst {greatest:.2e} (by position {by_position}), tokens {:?} instead of {:?}, {:?}",
                seq.session, seq.position, got.tokens, expected.tokens, got.ending
            ));
        }
    }
    eprintln!(
        "{what}, {} sequences: {} wrong, {:.1} us per step",
        seqs.len(),
        wrong.len(),
        done.device_us / f64::from(done.steps)
    );
    assert!(wrong.is_empty(), "{what}:\n{}", wrong.join("\n"));
}

/// Sequences at positions far apart, with different prompts, in batches of every size, with sequence numbers other than the sessions'.
fn check_model(model: &Model, schedule: (&str, &str), lengths: &[u32], capacity: u32, seqs: u32) {
    let Some(info) = device() else { return };
    let what = format!("{}, {}, kernel of {seqs}", model.graph.name, schedule.0);
    let mut machine = machine(model, &info, schedule.1, capacity, seqs);
    let sessions = alone(&mut machine, lengths, model.graph.vocab);
    for size in 2..=seqs {
        let first = size % 3;
        let mut chosen: Vec<u32> =
            (0..size).map(|i| (first + i * 2) % lengths.len() as u32).collect();
        chosen.reverse();
        check_batch(&mut machine, &sessions, &chosen, &what);
    }
    machine.stop().expect("it stops");
}

#[test]
fn sessions_of_a_batch_get_what_they_get_alone() {
    if device().is_none() {
        return;
    }
    // Each folder has two of the schedules, since a kernel takes some 20 s to compile.
    for (number, name) in GOLDEN.into_iter().enumerate() {
        let model = golden(name);
        for index in [number % 4, (number + 1) % 4] {
            let (schedule, seqs) = (SCHEDULES[index], [8, 8, 4, 2][index]);
            check_model(&model, schedule, &[1, 17, 33, 96, 2, 64, 5, 40, 127], 160, seqs);
        }
    }
}

#[test]
fn sessions_with_heads_of_multiples_of_16_get_what_they_get_alone() {
    if device().is_none() {
        return;
    }
    let models: Vec<(u32, Model)> =
        odd_heads().into_iter().filter(|(head_dim, _)| [80, 96].contains(head_dim)).collect();
    let kernel = ir::ScheduleConfig::default().kernel;
    let devices = device().map_or(1, |info| target(&info).devices);
    let variant = |(_, model): &(u32, Model)| Variant {
        seqs: 8,
        devices,
        ..vm_host::variant(&kernel, &model.graph)
    };
    compile(&models.iter().map(variant).collect::<Vec<_>>());
    for (_, model) in models {
        for schedule in [SCHEDULES[1], SCHEDULES[2]] {
            check_model(&model, schedule, &[1, 17, 33, 96, 2, 64, 5, 40, 127], 160, 8);
        }
    }
}

#[test]
fn sequences_may_be_a_thousand_positions_apart() {
    let model = golden("golden/llama3-rope-bf16");
    for schedule in [SCHEDULES[0], SCHEDULES[1]] {
        let lengths = [1, 1001, 18, 128, 700, 129, 2, 300, 1000];
        check_model(&model, schedule, &lengths, 1024, 8);
    }
}

/// A sequence's words carry the lowest bits of an epoch. A past bug: sequences that had skipped steps took the words of their last step for new.
#[test]
fn sequences_that_sat_out_read_nothing_old() {
    let Some((mut machine, sessions, _)) = prepared() else { return };
    for steps in 1..=9 {
        check_batch(&mut machine, &sessions, &[4, 1, 6, 0, 7, 2, 5], "before");
        // `fill` runs steps itself: those of the first prompt must be none.
        let tokens = vec![3; steps];
        machine.decode(8, 0, &tokens, 0, &[], false).expect("some plain steps");
        let seqs: Vec<Sequence<'_>> =
            [0_u32, 4, 6].map(|session| seq(session, &sessions[session as usize])).into();
        let done = together(&mut machine, &seqs, false);
        for (seq, session) in done.seqs.iter().zip([0_usize, 4, 6]) {
            assert_eq!(seq.tokens, sessions[session].tokens, "after {steps} steps");
        }
    }
    machine.stop().expect("it stops");
}

/// A model of some size, with many rows of logits, and all warp fragment sizes.
#[test]
fn sessions_of_a_real_model_get_what_they_get_alone() {
    let Some(model) = device().map(|_| model::preset("smollm2-135m").expect("a preset")) else {
        return;
    };
    check_model(&model, SCHEDULES[1], &[1, 17, 127, 1000, 5, 64, 300, 33, 2], 1024, 8);
}

/// Rows that fill the registers of all warps, and rows of several such parts, which the models above do not have. Also one session that gets a
/// second split while it runs.
#[test]
fn sessions_of_a_model_with_long_rows_get_what_they_get_alone() {
    if device().is_none() {
        return;
    }
    let mut model = model::preset("llama-3.2-1b").expect("a preset");
    model.graph.layers.truncate(2);
    let lengths = [1, 17, 127, 200, 5, 64, 250, 33, 2];
    check_model(&model, ("as shipped", &shipped(8)), &lengths, 512, 8);
}

/// Codes whose rows have several parts, more tiles than one epilogue in a task, and a 16-bit output matrix beside them.
#[test]
fn sessions_of_codes_with_long_rows_get_what_they_get_alone() {
    if device().is_none() {
        return;
    }
    for name in ["llama-3.1-8b-fp8", "llama-3.1-8b-int4-g128"] {
        let mut model = model::preset(name).expect("a preset");
        model.graph.layers.truncate(1);
        let pipeline = r#"{"pipeline": {"stage_bytes": 32768, "stages": 4, "in_flight_bytes": 65536, "in_flight_before_wait_bytes": 32768}}"#;
        check_model(
            &model,
            ("large stages", pipeline),
            &[1, 17, 127, 33, 5, 64, 99, 2, 18],
            160,
            8,
        );
    }
}

/// A machine of 8 sequences of a small model, with sessions that have run alone.
fn prepared() -> Option<(Resident, Vec<Session>, u32)> {
    let info = device()?;
    let model = golden("golden/llama3-rope-bf16");
    let mut machine = machine(&model, &info, SCHEDULES[1].1, 256, 8);
    let vocab = model.graph.vocab;
    let sessions = alone(&mut machine, &[1, 17, 33, 96, 2, 64, 5, 40], vocab);
    for (session, of) in (0..).zip(&sessions) {
        fill(&mut machine, session, &of.prompt);
    }
    Some((machine, sessions, vocab))
}

/// A machine for 8 sequences stops, runs the kernel for one with the bits of a machine that has no other, and goes back: the caches stay.
#[test]
fn a_machine_for_batches_runs_the_kernel_for_one_and_goes_back() {
    let Some(info) = device() else { return };
    let model = golden("golden/llama3-rope-bf16");
    let (graph, vocab, target) = (&model.graph, model.graph.vocab, target(&info));
    let (config, shared) = lowered(&model, &target, SCHEDULES[1].1, (256, 8));
    let program = shared.program();
    let (variant, cards) = built(&config, graph, &target);
    let [one, eight] = [1, 8].map(|seqs| Variant { seqs, ..variant });
    let of = BootOptions { cards, sessions: SESSIONS, ..BootOptions::default() };
    let options = BootOptions { logits_rows: ROWS, ..of };
    let boot = |variant: &Variant| {
        Idle::boot(graph, &*model.weights, program, variant, options.clone()).expect("it boots")
    };
    let launch = |idle: Idle, variant, start: Start<'_>| {
        idle.launch_with(variant, start).unwrap_or_else(|e| panic!("{}", e.1))
    };
    let lengths = [1, 17, 33, 96, 2, 64, 5, 40];
    let mut machine = launch(boot(&one), one, Start::Alone(program));
    let wanted = alone(&mut machine, &lengths, vocab);
    let refused = machine.stop().expect("it stops").launch(eight, program);
    assert!(refused.is_err(), "its memory is for one");
    let mut machine = launch(boot(&eight), eight, Start::Together(&shared));
    let of_eight = machine.current();
    // From the second round on, both programs are where they were loaded, and go on from there.
    let mut of_one = Start::Alone(program);
    for round in 0..3 {
        machine = launch(machine.stop().expect("it stops"), one, of_one);
        of_one = Start::Held(machine.current());
        let got = alone(&mut machine, &lengths, vocab);
        for (got, wanted) in got.iter().zip(&wanted) {
            assert_eq!(got.tokens, wanted.tokens, "round {round}");
            assert_eq!(got.logits, wanted.logits, "round {round}");
        }
        (0..).zip(&got).for_each(|(session, of)| fill(&mut machine, session, &of.prompt));
        machine = launch(machine.stop().expect("it stops"), eight, Start::Held(of_eight));
        // On the caches that the other kernel filled.
        let seqs: Vec<Sequence<'_>> = (0..8).map(|s| seq(s, &got[s as usize])).collect();
        let done = together(&mut machine, &seqs, false);
        for (seq, of) in done.seqs.iter().zip(&got) {
            assert_eq!(seq.tokens, of.tokens, "round {round}");
        }
    }
    machine.stop().expect("it stops");
}

#[test]
fn a_batch_that_cannot_be_is_refused_and_the_next_one_runs() {
    let Some((mut machine, sessions, _)) = prepared() else { return };
    let seqs: Vec<Sequence<'_>> = (0..8).map(|s| seq(s, &sessions[s as usize])).collect();
    let twice = [seqs[1], seqs[2], seqs[1]];
    let beyond = [seqs[0], Sequence { position: 256, ..seqs[1] }];
    let nobody = [seqs[0], Sequence { session: SESSIONS, ..seqs[1] }];
    let nine: Vec<Sequence<'_>> = (0..9).map(|s| Sequence { session: s, ..seqs[0] }).collect();
    for (bad, says) in [
        (&twice[..], "session 1 is that of sequence 0"),
        (&beyond[..], "exceed the key/value capacity"),
        (&nobody[..], "session 9 of 9"),
        (&nine[..], "a batch of 9 sequences"),
    ] {
        let batch = Batch { seqs: bad, steps: 4, ..Batch::default() };
        let refused = machine.run_together(&batch, &mut || false).expect_err(says);
        assert!(
            matches!(&refused, HostError::Request(why) if why.contains(says)),
            "{refused} does not say {says:?}"
        );
    }
    let done = together(&mut machine, &seqs, false);
    for (seq, of) in done.seqs.iter().zip(&sessions) {
        assert_eq!(seq.tokens, of.tokens);
    }
    machine.stop().expect("it stops");
}

/// The sixth token of a session, if none of the sessions generates it earlier: a batch with it as stop token ends there.
#[test]
fn a_stop_token_in_one_sequence_ends_the_batch_and_the_others_go_on() {
    let Some((mut machine, sessions, vocab)) = prepared() else { return };
    let seqs: Vec<Sequence<'_>> = (0..8).map(|s| seq(s, &sessions[s as usize])).collect();
    // Where each token is generated first, by any session.
    let first = |token: u32| {
        let at = sessions.iter().map(|of| of.tokens.iter().position(|t| *t == token));
        at.map(|at| at.unwrap_or(usize::MAX)).min().unwrap_or(usize::MAX)
    };
    let stop = (0..vocab).find(|&token| (2..11).contains(&first(token))).expect("a late token");
    let steps = first(stop) + 1;
    let batch = Batch { seqs: &seqs, steps: GENERATED, stop: &[stop], keep_logits: false };
    let done = machine.run_together(&batch, &mut || false).expect("it runs");
    assert_eq!(done.steps as usize, steps);
    for (index, (seq, of)) in done.seqs.iter().zip(&sessions).enumerate() {
        assert_eq!(seq.tokens, of.tokens[..steps], "sequence {index}");
        let stopped = of.tokens[steps - 1] == stop;
        let expected = if stopped { Ending::Stop } else { Ending::Length };
        assert_eq!(seq.ending, expected, "sequence {index}");
    }
    // Sequences that could continue do, in a smaller batch and then alone.
    let rest: Vec<usize> = (0..8).filter(|s| done.seqs[*s].ending == Ending::Length).collect();
    assert!(rest.len() < 8 && rest.len() > 1, "{rest:?}");
    let on = |s: &usize| Sequence {
        position: seqs[*s].position + done.steps,
        tokens: &done.seqs[*s].tokens[steps - 1..],
        ..seqs[*s]
    };
    let more: Vec<Sequence<'_>> = rest.iter().map(on).collect();
    let left = GENERATED - done.steps;
    let batch = Batch { seqs: &more, steps: left, stop: &[], keep_logits: false };
    let next = machine.run_together(&batch, &mut || false).expect("it goes on");
    for (seq, s) in next.seqs.iter().zip(&rest) {
        assert_eq!(seq.tokens, sessions[*s].tokens[steps..], "session {s}");
    }
    machine.stop().expect("it stops");
}

/// Some sequences decode and others are in their prompts, one beyond the batch: each gets the bits that it gets alone, and goes on with them. A
/// stop token in a prompt ends nothing.
#[test]
fn sequences_in_their_prompts_get_what_they_get_alone() {
    let Some((mut machine, sessions, vocab)) = prepared() else { return };
    // Of prompts of 1, 17, 33, 96, 2, 64, 5 and 40 tokens.
    let before = [0, 12, 0, 11, 1, 5, 4, 1];
    let steps = GENERATED as usize;
    let seqs: Vec<Sequence<'_>> =
        (0..).zip(before).map(|(s, b)| in_prompt(s, &sessions[s as usize], b)).collect();
    let mut expected = Vec::new();
    for seq in &seqs {
        refill(&mut machine, seq, &sessions);
        let generate = GENERATED + 1 - seq.tokens.len() as u32;
        let done = machine.decode(seq.session, seq.position, seq.tokens, generate, &[], true);
        let done = done.expect("it runs alone");
        let mut logits = machine.logits(done.steps).expect("logits");
        logits.truncate(steps);
        expected.push((done.tokens, logits));
    }
    for (index, seq) in (0..).zip(&seqs) {
        refill(&mut machine, seq, &sessions);
        machine.poison_seq_logits(index, GENERATED).expect("poison");
    }
    let said = |token: &u32| expected.iter().any(|(tokens, _)| tokens.contains(token));
    let stop = seqs.iter().flat_map(|seq| &seq.tokens[1..]).find(|token| !said(token));
    let stop = [*stop.expect("a token that is in prompts only")];
    assert!(stop[0] < vocab);
    let batch = Batch { seqs: &seqs, steps: GENERATED, stop: &stop, keep_logits: true };
    let done = machine.run_together(&batch, &mut || false).expect("it runs");
    assert_eq!(done.steps, GENERATED);
    for ((index, got), (tokens, logits)) in (0..).zip(&done.seqs).zip(&expected) {
        assert_eq!((&got.tokens, got.ending), (tokens, Ending::Length), "sequence {index}");
        let rows = machine.seq_logits(index, done.steps).expect("logits");
        let bits =
            |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&rows) == bits(logits), "logits of sequence {index}");
    }
    let on = seqs.iter().zip(&done.seqs).map(|(seq, got)| Sequence {
        position: seq.position + GENERATED,
        tokens: seq
            .tokens
            .get(steps..)
            .filter(|rest| !rest.is_empty())
            .unwrap_or(&got.tokens[got.tokens.len().saturating_sub(1)..]),
        ..*seq
    });
    let on: Vec<Sequence<'_>> = on.collect();
    let next = together(&mut machine, &on, false);
    for (((got, more), of), before) in done.seqs.iter().zip(&next.seqs).zip(&sessions).zip(before) {
        let all = [&got.tokens[..], &more.tokens].concat();
        assert!(all.len() >= steps, "{before} tokens before the last");
        assert_eq!(all[..steps], of.tokens, "{before} tokens before the last");
    }
    machine.stop().expect("it stops");
}

#[test]
fn a_batch_yields_and_goes_on_with_the_same_tokens() {
    let Some((mut machine, sessions, _)) = prepared() else { return };
    // Tokens before the last of each prompt that are left: they are run in the batches, too.
    let before = |s: u32| (s as usize * 3).min(sessions[s as usize].prompt.len() - 1);
    let starts: Vec<Sequence<'_>> =
        (0..8).map(|s| in_prompt(s, &sessions[s as usize], before(s))).collect();
    let mut known: Vec<Vec<u32>> = starts.iter().map(|seq| seq.tokens.to_vec()).collect();
    let (mut ran, mut commands, mut yields) = (0, 0, 0);
    while ran < 2 * GENERATED {
        let steps = 2 * GENERATED - ran;
        let unfed = |known: &Vec<u32>| ran as usize..known.len().min((ran + steps) as usize + 1);
        let seqs = starts.iter().zip(&known).map(|(start, known)| Sequence {
            position: start.position + ran,
            tokens: &known[unfed(known)],
            ..*start
        });
        let seqs: Vec<Sequence<'_>> = seqs.collect();
        let batch = Batch { seqs: &seqs, steps, stop: &[], keep_logits: false };
        let done = machine.run_together(&batch, &mut || true).expect("it runs");
        commands += 1;
        ran += done.steps;
        for (known, got) in known.iter_mut().zip(&done.seqs) {
            assert!(matches!(got.ending, Ending::Yield | Ending::Length), "{:?}", got.ending);
            yields += u32::from(got.ending == Ending::Yield);
            known.extend(&got.tokens);
            assert!(known.len() > ran as usize, "its next token is known");
        }
    }
    eprintln!("{commands} commands, {yields} sequences yielded");
    assert!(commands > 1 && yields >= 8);
    for ((known, start), of) in known.iter().zip(&starts).zip(&sessions) {
        let said = &known[start.tokens.len()..];
        let both = said.len().min(of.tokens.len());
        assert!(both > 2);
        assert_eq!(said[..both], of.tokens[..both]);
    }
    machine.stop().expect("it stops");
}

/// Sequences 2 and 5 sample, each with its own settings, after the rest of their prompts; the others are greedy. Each gets the tokens that it
/// gets alone.
#[test]
fn some_sequences_sample_and_the_others_do_not() {
    let Some((mut machine, sessions, _)) = prepared() else { return };
    let drawing = [2_u32, 5];
    let before =
        |session: u32| if drawing.contains(&session) { 2 + session as usize / 2 } else { 0 };
    let mut expected: Vec<Vec<u32>> = sessions.iter().map(|of| of.tokens.clone()).collect();
    for session in drawing {
        let sampling = Sampling {
            temperature: 1.1,
            top_p: 0.95,
            repetition_penalty: 1.2,
            seed: u64::from(session) + 3,
            ..Sampling::default()
        };
        machine.set_sampling(session, &sampling).expect("settings");
        let of = &sessions[session as usize];
        let request = Request {
            session,
            tokens: &of.prompt,
            generate: GENERATED,
            sampled: true,
            ..Request::default()
        };
        let done = machine.run(&request, &mut || false).expect("it samples alone");
        assert_ne!(done.tokens, of.tokens, "it is another choice than the greedy one");
        expected[session as usize] = done.tokens;
        machine.set_sampling(session, &sampling).expect("settings");
        fill(&mut machine, session, &of.prompt);
    }
    let seqs: Vec<Sequence<'_>> = (0..8)
        .map(|s| Sequence {
            sampled: drawing.contains(&s),
            ..in_prompt(s, &sessions[s as usize], before(s))
        })
        .collect();
    let done = together(&mut machine, &seqs, false);
    for (session, (seq, expected)) in (0..).zip(done.seqs.iter().zip(&expected)) {
        let said = GENERATED as usize - before(session);
        assert_eq!(seq.tokens, expected[..said], "session {session}");
    }
    machine.stop().expect("it stops");
}

/// A session whose every token is banned ends with no token, and ends no other session.
#[test]
fn a_sequence_without_a_token_ends_alone() {
    let Some((mut machine, sessions, vocab)) = prepared() else { return };
    assert!(vocab <= abi::BIAS_MAX, "all can be banned");
    let bias = (0..vocab).map(|token| (token, f32::NEG_INFINITY)).collect();
    machine.set_sampling(3, &Sampling { bias, ..Sampling::default() }).expect("settings");
    let mut seqs: Vec<Sequence<'_>> = (0..8).map(|s| seq(s, &sessions[s as usize])).collect();
    seqs[3].sampled = true;
    let done = together(&mut machine, &seqs, false);
    assert_eq!(done.steps, 1);
    for (index, (seq, of)) in done.seqs.iter().zip(&sessions).enumerate() {
        let (ending, tokens) = match index {
            3 => (Ending::NoToken, &of.tokens[..0]),
            _ => (Ending::Length, &of.tokens[..1]),
        };
        assert_eq!((seq.ending, &seq.tokens[..]), (ending, tokens), "sequence {index}");
    }
    machine.stop().expect("it stops");
}

/// The shipped schedule of llama-3.2-1b for a context of 128, with its attention in this many splits.
fn shipped(splits: u32) -> String {
    format!(
        r#"{{"pipeline": {{"stage_bytes": 32768, "stages": 5, "in_flight_bytes": 98304, "in_flight_before_wait_bytes": 32768}},
            "sync": {{"embed": "flag_in_data", "qkv": "flag_in_data", "attention": "flag_in_data", "merge": "flag_in_data", "o_proj": "flag_in_data", "gate_up": "flag_in_data", "down": "flag_in_data"}},
            "fusion_grouping": {{"embed": "qkv", "merge": "o_proj"}},
            "tiling": {{"qkv": {{"rows": 8}}, "o_proj": {{"rows": 8}}, "gate_up": {{"rows": 8}}, "down": {{"rows": 8}}, "lm_head": {{"rows": 8}},
                        "attention": {{"kv_block": 256, "kv_split": {splits}}}}},
            "kernel": {{"poll_sleep_ns": 0, "evict": "first"}}, "sm_assignment": "byte_balance"}}"#
    )
}

/// Microseconds per step of this many sessions at a context of 128, the median of 16 commands.
fn step_us(machine: &mut Resident, sessions: u32) -> f64 {
    const STEPS: u32 = 24;
    let seqs: Vec<Sequence<'_>> = (0..sessions)
        .map(|session| Sequence { session, position: 128, tokens: &[11], sampled: false })
        .collect();
    let mut us: Vec<f64> = (0..20)
        .map(|_| {
            let batch = Batch { seqs: &seqs, steps: STEPS, stop: &[], keep_logits: false };
            let done = machine.run_together(&batch, &mut || false).expect("it runs");
            assert_eq!(done.steps, STEPS);
            done.device_us / f64::from(STEPS)
        })
        .skip(4)
        .collect();
    us.sort_by(f64::total_cmp);
    f64::midpoint(us[7], us[8])
}

/// Cost of a pass over the weights that several sessions share: a step of eight takes at most 1.5 times as long as a step of one.
#[test]
fn a_step_of_eight_sessions_takes_at_most_half_as_long_again() {
    let Some(info) = device() else { return };
    let model = model::preset("llama-3.2-1b").expect("a known preset");
    let mut one = machine(&model, &info, &shipped(1), 512, 1);
    let alone = step_us(&mut one, 1);
    one.stop().expect("it stops");
    eprintln!("one sequence, 1 session: {alone:.1} us");
    let mut eight = machine(&model, &info, &shipped(8), 512, 8);
    let steps = [1, 2, 4, 8].map(|sessions| {
        let us = step_us(&mut eight, sessions);
        eprintln!("eight sequences, {sessions} sessions: {us:.1} us, {:.2} of one", us / alone);
        us
    });
    eight.stop().expect("it stops");
    assert!(steps[3] <= 1.5 * alone, "{:.1} us, one takes {alone:.1}", steps[3]);
}
