//! Batches and windows on several devices: the tokens and logits of one device, bit for bit.

use ir::program::Together;
use vm_host::{Batch, Request, Resident, Sequence, Window};

use super::*;

/// Folders whose batches are compared. Each takes a kernel for one device and one for two, of some 25 s.
const BATCHED: [&str; 4] = [
    "golden/qwen3-qknorm-bf16",
    "golden/mistral-f16",
    "families/gemma2-bf16",
    "quantised/ct-int8-llama",
];
/// Positions of a batch.
const STEPS: u32 = 16;
/// Tokens of prompts that a batch reads.
const READ: usize = 4;

/// What must be equal, by name: tokens, and bits of logits.
type Outputs = Vec<(&'static str, Vec<u32>)>;

/// A running machine whose program is proven for [`SEQS`] sequences.
fn running(text: &str, model: &Model, target: &Target) -> Option<Resident> {
    let (idle, variant, program) = booted_for(text, model, target, SEQS)?;
    let together = Together::new(program.clone(), SEQS).unwrap_or_else(|e| panic!("{e}"));
    let launched = idle.launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|refused| panic!("{}: {}", target.name, refused.1));
    let loaded = machine.load_together(&together).expect("it loads");
    machine.switch(loaded).expect("all devices switch");
    Some(machine)
}

/// Prompts that end at other positions, some of them behind the first block of keys.
fn prompts(vocab: u32) -> Vec<Vec<u32>> {
    let prompt = |session: u32| (0..1 + session * 5).map(move |i| i * 1021 + 7 * session + 3);
    (0..SEQS).map(|session| prompt(session).map(|token| token % vocab).collect()).collect()
}

/// Runs a batch of all sessions, which read the last `read` tokens of their prompts first; the device's choices, and the microseconds of a step.
fn run(
    machine: &mut Resident,
    prompts: &[Vec<u32>],
    (read, sampled, keep_logits): (usize, bool, bool),
) -> (Vec<u32>, f64) {
    let of = |(session, prompt): (u32, &'_ Vec<u32>)| {
        let first = prompt.len() - read.min(prompt.len());
        (session, first as u32, sampled && session % 2 == 0)
    };
    let seqs: Vec<Sequence<'_>> = (0..)
        .zip(prompts)
        .map(|at| {
            let ((session, position, sampled), tokens) = (of(at), at.1);
            Sequence { session, position, tokens: &tokens[position as usize..], sampled }
        })
        .collect();
    let batch = Batch { seqs: &seqs, steps: STEPS, stop: &[], keep_logits };
    let done = machine.run_together(&batch, &mut || false).expect("it runs together");
    assert_eq!(done.steps, STEPS);
    let chosen = done.seqs.into_iter().flat_map(|seq| seq.chosen).collect();
    (chosen, done.device_us / f64::from(STEPS))
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    assert!(rows.iter().flatten().all(|value| value.is_finite()));
    rows.iter().flatten().map(|value| value.to_bits()).collect()
}

/// The tokens and logits of a batch of greedy sequences, of one whose sequences are in their prompts and half of which sample, of a window
/// with right and wrong guesses, and of a lone sequence in the same kernel.
fn outputs(text: &str, model: &Model, target: &Target) -> Option<Outputs> {
    let mut machine = running(text, model, target)?;
    let (vocab, mut found) = (model.graph.vocab, Outputs::new());
    let prompts = prompts(vocab);
    for (session, prompt) in (0..).zip(&prompts).skip(1) {
        machine.decode(session, 0, &prompt[..prompt.len() - 1], 0, &[], false).expect("a prompt");
    }
    let (greedy, us) = run(&mut machine, &prompts, (1, false, true));
    eprintln!("{:32} {:8} {us:6.1} us per step of {SEQS}", model.graph.name, target.name);
    let logits = (0..SEQS).flat_map(|seq| bits(&machine.seq_logits(seq, STEPS).expect("logits")));
    found.push(("logits of a batch", logits.collect()));
    for (session, sampling) in (0..).step_by(2).zip(samplings()) {
        machine.set_sampling(session, &sampling).expect("settings");
    }
    found.push(("a sampled batch", run(&mut machine, &prompts, (READ, true, false)).0));
    // The last session again, in a window whose third guess is wrong.
    let (session, last) = (SEQS - 1, &prompts[SEQS as usize - 1]);
    let (position, said) = (last.len() as u32 - 1, &greedy[greedy.len() - STEPS as usize..]);
    let guesses = [said[0], said[1], (said[2] + 1) % vocab, said[3]];
    let tokens = [&last[last.len() - 1..], &guesses].concat();
    let window = Window { session, position, tokens: &tokens, ..Window::default() };
    // And the one before it beside, with one position.
    let of_other = &prompts[SEQS as usize - 2];
    let (head, tokens) = of_other.split_at(of_other.len() - 1);
    let position_of_other = head.len() as u32;
    let beside =
        Window { session: SEQS - 2, position: position_of_other, tokens, ..Window::default() };
    let done = machine.run_windows(&[window, beside], true).expect("windows");
    assert_eq!(done.windows[0].accepted(&guesses), said[..3], "{}", target.name);
    let next = greedy[greedy.len() - 2 * STEPS as usize];
    assert_eq!(done.windows[1].accepted(&[]), [next], "{}: beside a window", target.name);
    let rows = (0..3).flat_map(|seq| bits(&machine.seq_logits(seq, 1).expect("logits")));
    found.push(("logits of a window", rows.collect()));
    let of = Request { session, position, tokens: &last[last.len() - 1..], ..Request::default() };
    let alone = machine.run(&Request { generate: STEPS, ..of }, &mut || false).expect("it runs");
    assert_eq!(alone.tokens, said, "{}: a lone sequence of the same kernel", target.name);
    found.push(("tokens of a batch", greedy));
    machine.stop().expect("it stops");
    Some(found)
}

/// Needs no card: sequences may share each of these programs.
#[test]
fn every_schedule_of_a_batch_is_legal_on_one_device_and_on_several() {
    for name in BATCHED {
        let model = model::import(&corpus().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        for target in ["h200", "h200/2", "h200x2", "h200x4"] {
            let target = Target::by_name(target).expect("a known target");
            for text in &SCHEDULES[..2] {
                let (_, program) = lowered(text, &model, &target).expect("it is legal");
                Together::new(program, SEQS).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
    }
}

#[test]
fn batches_and_windows_have_the_bits_of_one_device() {
    let Some(targets) = targets() else { return };
    let mut wrong = Vec::new();
    for name in named(&BATCHED) {
        let model = model::import(&corpus().join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        for text in &SCHEDULES[..2] {
            let ran: Vec<_> = targets.iter().map(|target| outputs(text, &model, target)).collect();
            let one = ran[0].as_ref().expect("the schedule is legal on one device");
            for (target, other) in targets.iter().zip(&ran).skip(1) {
                let other = other.as_ref().expect("the schedule is legal on several devices");
                for ((what, of), (_, others)) in one.iter().zip(other) {
                    let differ = of.iter().zip(others).filter(|(a, b)| a != b).count();
                    let on = format!("{name} on {}: {what}: {differ} of {}", target.name, of.len());
                    eprintln!("{on} differ: {text}");
                    if of != others {
                        wrong.push(format!("{on}: {text}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
