//! Windows: consecutive positions of a session in one step, alone or beside other sessions, give the bits of the same positions
//! one by one.

use super::*;
use vm_host::{Window, WindowDecoded};

/// Tokens behind the prompt.
const NEW: usize = 40;

/// A prompt, and what plain decoding by the same kernel gives behind it.
struct Plain {
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn plain(machine: &mut Resident, session: u32, length: u32, vocab: u32) -> Plain {
    let prompt = prompt(length, length, vocab);
    fill(machine, session, &prompt);
    let (mut tokens, mut logits) = (Vec::new(), Vec::new());
    let mut last = prompt[prompt.len() - 1];
    // As many as there are rows of logits.
    while tokens.len() < NEW {
        let position = length - 1 + tokens.len() as u32;
        let done =
            machine.decode(session, position, &[last], ROWS / 2, &[], true).expect("it runs");
        logits.extend(machine.logits(done.steps).expect("logits"));
        tokens.extend(done.tokens);
        last = tokens[tokens.len() - 1];
    }
    Plain { prompt, tokens, logits }
}

impl Plain {
    /// The next token behind `done` of the new ones and guesses behind it, of which the first `right` are right; and the
    /// position of the first.
    fn window(&self, done: usize, (right, count): Guess, vocab: u32) -> (Vec<u32>, u32) {
        let last = if done == 0 { self.prompt.last() } else { self.tokens.get(done - 1) };
        let behind = self.tokens[done..done + count].iter().enumerate();
        let guess = |(i, &t): (usize, &u32)| if i < right { t } else { (t + 1 + i as u32) % vocab };
        let tokens = last.copied().into_iter().chain(behind.map(guess)).collect();
        (tokens, (self.prompt.len() - 1 + done) as u32)
    }

    /// Compares what a window behind `done` of the new tokens gave, in these sequences on. Returns the number of its tokens.
    fn compare(
        &self,
        machine: &mut Resident,
        (done, got, guesses): (usize, &WindowDecoded, &[u32]),
        (first, right): (u32, usize),
        what: &str,
    ) -> usize {
        let accepted = got.accepted(guesses);
        assert_eq!(accepted.len(), right.min(guesses.len()) + 1, "{what}: {guesses:?}");
        assert_eq!(accepted, self.tokens[done..done + accepted.len()], "{what}");
        for (seq, wanted) in (first..).zip(&self.logits[done..done + accepted.len()]) {
            let logits = machine.seq_logits(seq, 1).expect("logits").remove(0);
            let same = wanted.iter().map(|x| x.to_bits()).eq(logits.iter().map(|x| x.to_bits()));
            let worst = worst(wanted, &logits);
            assert!(same, "{what}: sequence {seq} from {first} is off by {worst:.2e}");
        }
        accepted.len()
    }
}

/// Runs a window alone.
fn window(machine: &mut Resident, of: &Window<'_>) -> Result<(WindowDecoded, f64), HostError> {
    let mut done = machine.run_windows(&[*of], false)?;
    Ok((done.windows.remove(0), done.device_us))
}

/// How many guesses of a window are right, and how many there are.
type Guess = (usize, usize);

/// Runs windows until all new tokens are there, and compares each token and logit.
fn check(machine: &mut Resident, of: &Plain, guesses: &[Guess], vocab: u32, what: &str) {
    fill(machine, 0, &of.prompt);
    let (mut done, mut turn) = (0, 0);
    let most = machine.window_seqs() as usize;
    while done + most < NEW {
        let (right, count) = guesses[turn % guesses.len()];
        turn += 1;
        let (tokens, position) = of.window(done, (right, count.min(most - 1)), vocab);
        for seq in 0..tokens.len() as u32 {
            machine.poison_seq_logits(seq, 1).expect("poison");
        }
        let window = Window { position, tokens: &tokens, ..Window::default() };
        let got = machine.run_windows(&[window], true).unwrap_or_else(|e| panic!("{what}: {e}"));
        let got = (done, &got.windows[0], &tokens[1..]);
        done += of.compare(machine, got, (0, right), &format!("{what} at {position}"));
    }
}

/// Guesses of each session in a step, of which there are three: at most eight positions.
const BESIDE: [[Guess; 3]; 6] = [
    [(3, 3), (1, 2), (0, 0)],
    [(0, 0), (0, 0), (5, 5)],
    [(1, 3), (0, 0), (2, 2)],
    [(0, 0), (0, 0), (0, 0)],
    [(0, 1), (3, 3), (0, 1)],
    [(0, 2), (0, 1), (2, 2)],
];

/// Runs steps with windows of several sessions, far apart, until one has all its new tokens, and compares each token and logit.
fn check_beside(machine: &mut Resident, of: &[Plain; 3], vocab: u32, what: &str) {
    const SESSIONS: [u32; 3] = [4, 0, 7];
    for (of, session) in of.iter().zip(SESSIONS) {
        fill(machine, session, &of.prompt);
    }
    let (mut done, mut turn) = ([0; 3], 0);
    let most = machine.window_seqs() as usize;
    while done.iter().all(|done| done + most < NEW) {
        // Of a kernel of four there is one position beside those of the sessions.
        let left = |guess: Guess| if most < 8 { (guess.0.min(1), guess.1.min(1)) } else { guess };
        let mut guesses = BESIDE[turn % BESIDE.len()].map(left);
        if most < 8 {
            let one = turn % 3;
            (0..3).filter(|at| *at != one).for_each(|at| guesses[at] = (0, 0));
        }
        turn += 1;
        let parts: [_; 3] = std::array::from_fn(|i| of[i].window(done[i], guesses[i], vocab));
        let window = |i: usize| {
            let (tokens, position) = &parts[i];
            let (session, position) = (SESSIONS[i], *position);
            Window { session, position, tokens, sampled: false }
        };
        let windows = [0, 1, 2].map(window);
        let positions: usize = windows.iter().map(|window| window.tokens.len()).sum();
        (0..positions as u32).for_each(|seq| machine.poison_seq_logits(seq, 1).expect("poison"));
        let got = machine.run_windows(&windows, true).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut first = 0;
        for (i, got) in got.windows.iter().enumerate() {
            let what = format!("{what}, session {i} of {guesses:?} at {}", windows[i].position);
            let got = (done[i], got, &windows[i].tokens[1..]);
            done[i] += of[i].compare(machine, got, (first, guesses[i].0), &what);
            first += windows[i].tokens.len() as u32;
        }
    }
}

const RIGHT: [Guess; 1] = [(7, 7)];
const WRONG: [Guess; 1] = [(0, 7)];
const MIXED: [Guess; 6] = [(2, 5), (0, 1), (7, 7), (1, 3), (0, 0), (3, 6)];

/// Begin around the borders of tiles, blocks and pages.
const LENGTHS: [u32; 7] = [1, 13, 30, 61, 96, 120, 127];

fn check_windows(model: &Model, schedule: (&str, &str), seqs: u32, lengths: &[u32]) {
    let Some(info) = device() else { return };
    let capacity = lengths.iter().max().copied().unwrap_or(1) + NEW as u32 + ROWS + 9;
    let mut machine = machine(model, &info, schedule.1, capacity.next_multiple_of(128), seqs);
    let vocab = model.graph.vocab;
    for &length in lengths {
        let of = plain(&mut machine, 0, length, vocab);
        for (guesses, name) in [(&RIGHT[..], "right"), (&WRONG[..], "wrong"), (&MIXED[..], "mixed")]
        {
            let what = format!(
                "{}, {}, kernel of {seqs}, {length} tokens, {name} guesses",
                model.graph.name, schedule.0
            );
            check(&mut machine, &of, guesses, vocab, &what);
        }
    }
    if machine.window_seqs() > 3 {
        let lengths = [0, 1, 2].map(|i| lengths[lengths.len() - 1 - i * (lengths.len() - 1) / 2]);
        let of = lengths.map(|length| plain(&mut machine, 0, length, vocab));
        let what = format!("{}, {}, kernel of {seqs}, beside", model.graph.name, schedule.0);
        check_beside(&mut machine, &of, vocab, &what);
    }
    machine.stop().expect("it stops");
}

#[test]
fn windows_give_the_tokens_and_logits_of_plain_decoding() {
    if device().is_none() {
        return;
    }
    // Every kernel takes some 20 s to compile, so each folder has one schedule.
    let kernels = SCHEDULES.into_iter().zip([8, 8, 4, 2]).cycle();
    for (name, (schedule, seqs)) in GOLDEN.into_iter().step_by(2).zip(kernels) {
        check_windows(&golden(name), schedule, seqs, &LENGTHS);
        println!("windows of {name}, {}, kernel of {seqs}: right", schedule.0);
    }
}

#[test]
fn windows_over_caches_of_codes_do_too() {
    if device().is_none() {
        return;
    }
    let mut model = golden("golden/qwen3-qknorm-bf16");
    model.graph.kv_dtype = ir::KvDtype::E4m3;
    for (schedule, seqs) in SCHEDULES.into_iter().zip([8, 4, 8, 2]) {
        check_windows(&model, schedule, seqs, &LENGTHS);
    }
}

#[test]
fn windows_over_long_contexts_and_rows_do_too() {
    if device().is_none() {
        return;
    }
    let mut model = model::preset("llama-3.2-1b").expect("a preset");
    model.graph.layers.truncate(2);
    let lengths = [1, 127, 250, 500, 1000];
    check_windows(&model, ("as shipped, 8 splits", &shipped(8)), 8, &lengths);
    check_windows(&model, ("as shipped, 1 split", &shipped(1)), 8, &lengths);
    let mut model = model::preset("llama-3.1-8b").expect("a preset");
    model.graph.layers.truncate(1);
    check_windows(&model, ("as shipped, 8 splits", &shipped(8)), 8, &lengths[..3]);
}

/// Each position draws with the random numbers of its own, so a window gives the tokens of plain decoding with the same seed.
#[test]
fn windows_that_sample_give_the_tokens_of_plain_decoding() {
    let Some(info) = device() else { return };
    let model = golden("golden/llama3-rope-bf16");
    let mut machine = machine(&model, &info, SCHEDULES[1].1, 256, 8);
    let vocab = model.graph.vocab;
    for seed in 0..4 {
        let sampling = Sampling { temperature: 1.3, top_p: 0.95, seed, ..Sampling::default() };
        let prompt = prompt(0, 60, vocab);
        machine.set_sampling(0, &sampling).expect("settings");
        fill(&mut machine, 0, &prompt);
        let last = &prompt[prompt.len() - 1..];
        let request = Request {
            position: 59,
            tokens: last,
            generate: NEW as u32,
            sampled: true,
            ..Request::default()
        };
        let wanted = machine.run(&request, &mut || false).expect("it samples alone").tokens;
        machine.set_sampling(0, &sampling).expect("settings");
        fill(&mut machine, 0, &prompt);
        let (mut got, mut turn) = (Vec::new(), 0);
        while got.len() + 8 < NEW {
            let at = got.len();
            let (right, count) = MIXED[turn % MIXED.len()];
            turn += 1;
            let behind = wanted[at..at + count].iter().enumerate();
            let guessed: Vec<u32> =
                behind.map(|(i, &t)| if i < right { t } else { (t + 1) % vocab }).collect();
            let tokens = [&[*got.last().unwrap_or(&last[0])], &guessed[..]].concat();
            let position = 59 + at as u32;
            let of = Window { position, tokens: &tokens, sampled: true, ..Window::default() };
            got.extend(window(&mut machine, &of).expect("a window").0.accepted(&guessed));
        }
        assert_eq!(got, wanted[..got.len()], "seed {seed}");
    }
    machine.stop().expect("it stops");
}

#[test]
fn a_window_that_cannot_be_is_refused_and_the_next_one_runs() {
    let Some((mut machine, sessions, vocab)) = prepared() else { return };
    let penalised = Sampling { temperature: 1.0, repetition_penalty: 1.2, ..Sampling::default() };
    machine.set_sampling(3, &penalised).expect("settings");
    let tokens = [1; 9];
    let good = Window { session: 2, position: 32, tokens: &tokens[..4], ..Window::default() };
    for (bad, says) in [
        (Window { tokens: &tokens, ..good }, "1 windows with 9 positions; 1 to 8"),
        (Window { tokens: &[], ..good }, "1 windows with 0 positions"),
        (Window { position: 253, ..good }, "4 positions from 253 exceed"),
        (Window { tokens: &[vocab], ..good }, "outside the vocabulary"),
        (Window { session: 3, sampled: true, ..good }, "repetition penalty"),
    ] {
        let refused = window(&mut machine, &bad).expect_err(says);
        let why = refused.to_string();
        assert!(matches!(refused, HostError::Request(_)) && why.contains(says), "{why}");
    }
    let of = &sessions[2];
    let tokens = [&of.prompt[32..], &of.tokens[..5]].concat();
    let (done, _) = window(&mut machine, &Window { tokens: &tokens, ..good }).expect("it runs");
    assert_eq!(done.accepted(&of.tokens[..5]), of.tokens[..6]);
    machine.stop().expect("it stops");
}

/// Microseconds of windows and of plain steps of the same kernel, for the lab page.
#[test]
fn a_window_of_eight_takes_at_most_half_as_long_again_as_a_step() {
    let Some(info) = device() else { return };
    let model = model::preset("llama-3.2-1b").expect("a known preset");
    let mut machine = machine(&model, &info, &shipped(8), 512, 8);
    let tokens = [11; 8];
    let mut us = |counts: &[usize]| {
        let of = |(session, &count): (u32, &usize)| {
            let tokens = &tokens[..count];
            Window { session, position: 128, tokens, sampled: false }
        };
        let windows: Vec<Window<'_>> = (0..).zip(counts).map(of).collect();
        let timed = (0..40).map(|_| machine.run_windows(&windows, false).expect("it runs"));
        let mut all: Vec<f64> = timed.map(|done| done.device_us).skip(8).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let steps = [1, 2, 4, 6, 8].map(|count| {
        let us = us(&[count]);
        eprintln!("a window of {count}: {us:.1} us");
        us
    });
    for counts in [&[1, 1, 1][..], &[4, 3, 1], &[6, 1, 1], &[2, 2, 2, 2], &[1; 8]] {
        eprintln!("windows of {counts:?} positions: {:.1} us", us(counts));
    }
    machine.stop().expect("it stops");
    assert!(steps[4] <= 1.5 * steps[0], "{steps:?}");
}
