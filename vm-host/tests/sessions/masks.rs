//! Tokens under masks that the host gives while a step runs: those that the definition samples from rows with bans.

use super::*;

const GENERATED: u32 = 100;

/// Gives masks of its own: the tokens that may come next follow from how many there were.
struct Masking {
    seed: u64,
    /// Masks so far, of which this one comes late.
    given: usize,
    late: Option<(usize, Duration)>,
    heard: Vec<u32>,
}

impl Masking {
    fn new(seed: u64) -> Self {
        Self { seed, given: 0, late: None, heard: Vec::new() }
    }

    /// The tokens that are allowed in place `index`: one in two, in sixteen or in thousands.
    fn allowed(seed: u64, index: usize, vocab: u32) -> Vec<u32> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed * 1000 + index as u64);
        let words = vocab.div_ceil(32) as usize;
        let few = random.random_range(0..3);
        let mut word = |_| match few {
            0 => random.random(),
            1 => random.random::<u32>() & random.random::<u32>() & random.random::<u32>(),
            _ => u32::from(random.random_bool(0.01)) << random.random_range(0..32),
        };
        let mut allowed: Vec<u32> = (0..words).map(&mut word).collect();
        allowed[0] |= 8;
        allowed
    }
}

impl Watch for Masking {
    fn token(&mut self, _sequence: usize, token: u32) {
        self.heard.push(token);
    }

    fn mask(&mut self, sequence: usize, vocab: u32) -> Option<Vec<u32>> {
        assert_eq!(sequence, 0);
        if let Some((_, long)) = self.late.filter(|(late, _)| *late == self.given) {
            std::thread::sleep(long);
        }
        self.given += 1;
        Some(Self::allowed(self.seed, self.given - 1, vocab))
    }

    fn yields(&mut self) -> bool {
        false
    }
}

fn settings(i: u64) -> Sampling {
    let at = Sampling { temperature: 0.9, seed: 70 + i, ..Sampling::default() };
    match i {
        0 => Sampling::default(),
        1 => at,
        2 => Sampling { top_p: 0.9, repetition_penalty: 1.3, ..at },
        _ => Sampling { top_k: 40, min_p: 0.01, ..at },
    }
}

/// Rows as the device had them, without the tokens that were banned.
fn banned(rows: &[Vec<f32>], seed: u64, prompt: usize, vocab: u32) -> Vec<Vec<f32>> {
    let mut rows = rows.to_vec();
    for (index, row) in rows[prompt - 1..].iter_mut().enumerate() {
        let allowed = Masking::allowed(seed, index, vocab);
        for (token, logit) in row.iter_mut().enumerate() {
            let kept = allowed[token / 32] >> (token % 32) & 1 == 1;
            *logit = if kept { *logit } else { f32::NEG_INFINITY };
        }
    }
    rows
}

#[test]
fn tokens_under_masks_are_those_of_the_definition() {
    let options = BootOptions { sessions: 2, logits_rows: 128, ..BootOptions::default() };
    let Some((mut machine, vocab)) = machine_of("smollm2-135m", true, options) else { return };
    let prompt: Vec<u32> = (0..20).map(|i| i * 131 % vocab).collect();
    let request =
        Request { session: 1, tokens: &prompt, generate: GENERATED, ..Request::default() };
    let free = machine.run(&request, &mut || false).expect("it runs");
    for i in 0..4 {
        let sampling = settings(i);
        machine.set_masked_sampling(1, &sampling).expect("settings");
        let request = Request { sampled: true, keep_logits: true, ..request };
        let mut masking = Masking::new(i);
        let done = machine.run(&request, &mut masking).expect("it runs");
        assert_eq!((done.ending, done.tokens.len()), (Ending::Length, GENERATED as usize));
        let rows = machine.logits(done.steps).expect("logits");
        let tokens = [&prompt[..], &done.tokens].concat();
        let want =
            expected(&sampling, &banned(&rows, i, prompt.len(), vocab), &tokens, prompt.len());
        assert_eq!(done.tokens, want, "{sampling:?}");
        assert_eq!(masking.given, GENERATED as usize, "a mask for each token");
        let us = |done: &vm_host::Decoded| done.host_us / f64::from(done.steps);
        eprintln!(
            "settings {i}: {:.1} us per step; greedy without masks {:.1}",
            us(&done),
            us(&free)
        );
    }
    machine.stop().expect("it stops");
}

/// The step whose mask comes too late has no token, and is run again with the token that it would have had.
#[test]
fn a_command_whose_mask_is_late_ends_and_goes_on() {
    let deadline = Duration::from_millis(400);
    let options = BootOptions { sessions: 2, deadline, ..BootOptions::default() };
    let Some((mut machine, vocab)) = machine_of("smollm2-135m", true, options) else { return };
    let prompt: Vec<u32> = (0..20).map(|i| i * 131 % vocab).collect();
    machine.set_masked_sampling(1, &settings(1)).expect("settings");
    let whole =
        Request { session: 1, tokens: &prompt, generate: 40, sampled: true, ..Request::default() };
    let all = machine.run(&whole, &mut Masking::new(5)).expect("it runs").tokens;
    let late = Some((9, deadline / 2));
    let mut masking = Masking { late, ..Masking::new(5) };
    let done = machine.run(&whole, &mut masking).expect("the command ends without a trap");
    assert_eq!((done.ending, &done.tokens[..]), (Ending::NoToken, &all[..9]));
    // The last step ran in vain: its position is run again.
    let position = prompt.len() as u32 + 8;
    assert_eq!(done.steps, position + 1);
    let rest = Request { position, tokens: &all[8..9], generate: 31, ..whole };
    let mut masking = Masking { given: 9, ..Masking::new(5) };
    let done = machine.run(&rest, &mut masking).expect("it runs");
    assert_eq!((done.ending, &done.tokens[..]), (Ending::Length, &all[9..]));
    machine.stop().expect("it stops");
}

#[test]
fn a_kernel_without_masks_refuses_them() {
    let Some((mut machine, _)) = machine("smollm2-135m", 2, 4) else { return };
    let refused = machine.set_masked_sampling(1, &Sampling::default());
    assert!(matches!(refused, Err(HostError::Request(why)) if why.contains("without masks")));
    machine.stop().expect("it stops");
}
