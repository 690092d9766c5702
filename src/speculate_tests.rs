use super::*;
use proptest::prelude::*;

#[test]
fn the_longest_run_that_was_there_decides_and_the_last_of_equal_ones() {
    let lookup = Lookup::new(&[1, 2, 3, 9, 1, 2, 4, 8, 7, 2, 3, 5, 1, 2]);
    assert_eq!(lookup.guess(3), [4, 8, 7], "of two places the last");
    let lookup = Lookup::new(&[1, 2, 3, 9, 7, 2, 3, 5, 1, 2, 3]);
    assert_eq!(lookup.guess(2), [9, 7], "three tokens before two");
    assert_eq!(Lookup::new(&[1, 2, 3, 4]).guess(2), [0; 0]);
    assert_eq!(Lookup::new(&[]).guess(2), [0; 0]);
    assert_eq!(Lookup::new(&[5, 6, 5, 6]).guess(5), [5, 6, 5, 6, 5], "a period goes on");
    assert_eq!(Lookup::new(&[5, 6, 5, 6]).guess(0), [0; 0]);
}

/// The guess by its definition: the longest run first, the last place that has a token behind it.
fn defined(tokens: &[u32], most: usize) -> Vec<u32> {
    for run in RUNS.into_iter().filter(|run| *run <= tokens.len()) {
        let last = &tokens[tokens.len() - run..];
        let places = (run..tokens.len()).rev();
        if let Some(from) = places.into_iter().find(|end| &tokens[end - run..*end] == last) {
            let mut all = tokens.to_vec();
            (0..most).for_each(|i| all.push(all[from + i]));
            return all.split_off(tokens.len());
        }
    }
    Vec::new()
}

/// Continues a text with a machine that chooses by `next`, with windows where the guesser wants them.
fn continued(
    prompt: &[u32],
    (count, most): (usize, usize),
    next: impl Fn(&[u32]) -> u32,
    us: impl Fn(usize) -> f64,
) -> (Vec<u32>, Tally, f64) {
    let (mut all, mut spent) = (prompt.to_vec(), 0.0);
    let mut guesser = Guesser::new(prompt, most);
    while all.len() < prompt.len() + count {
        let room = prompt.len() + count - all.len() - 1;
        let plan = guesser.next(room);
        let (guesses, kernel) = match plan {
            Plan::Plain => (Vec::new(), 0),
            Plan::Window(guesses) => (guesses, 1),
        };
        assert!(guesses.len() <= most.min(room));
        // What a window gives: the choice behind each position whose guesses before it were right.
        let mut tokens = vec![next(&all)];
        for guess in &guesses {
            if tokens.last() != Some(guess) {
                break;
            }
            tokens.push(next(&[&all[..], &tokens].concat()));
        }
        let took = us(kernel * (guesses.len() + 1));
        spent += took;
        match kernel {
            0 => guesser.stepped(&tokens, Some(took)),
            _ => guesser.ran(&guesses, &tokens, Some(took)),
        }
        all.extend(tokens);
        assert_eq!(guesser.len(), all.len());
    }
    (all.split_off(prompt.len()), guesser.tally, spent)
}

/// The measured prices of llama-3.2-1b: a batch of 8 takes 1.4 times as long as one. Of no position: the kernel for one.
fn us(positions: usize) -> f64 {
    if positions == 0 { 600.0 } else { 700.0 + 18.0 * positions as f64 }
}

proptest! {
    #[test]
    fn a_guess_is_what_its_definition_says(
        tokens in prop::collection::vec(0_u32..4, 0..40),
        most in 0_usize..8,
    ) {
        prop_assert_eq!(Lookup::new(&tokens).guess(most), defined(&tokens, most));
    }

    /// Whatever the machine chooses, and however long its steps take: the tokens are those without guesses.
    #[test]
    fn guesses_never_change_a_token(
        prompt in prop::collection::vec(0_u32..6, 1..30),
        (seed, span, most) in (any::<u32>(), 1_usize..6, 1_usize..8),
        prices in prop::collection::vec(1.0_f64..3000.0, 9),
    ) {
        let next = |all: &[u32]| {
            let last = &all[all.len().saturating_sub(span)..];
            last.iter().fold(seed, |sum, t| sum.wrapping_mul(31).wrapping_add(*t)) >> 7 & 3
        };
        let mut plain = prompt.clone();
        (0..60).for_each(|_| plain.push(next(&plain)));
        let (tokens, tally, _) = continued(&prompt, (60, most), next, |width| prices[width % 9]);
        prop_assert_eq!(&tokens, &plain[prompt.len()..]);
        prop_assert!(tally.accepted <= tally.guessed);
        prop_assert!(tally.tokens <= tally.accepted + tally.windows);
    }
}

#[test]
fn a_text_that_repeats_is_run_in_windows_and_takes_less_than_half_the_time() {
    let next = |all: &[u32]| all[all.len() - 7];
    let (_, tally, spent) = continued(&[1, 2, 3, 4, 5, 6, 7], (400, 7), next, us);
    assert!(tally.windows > 20 && tally.accepted * 10 > tally.guessed * 9, "{tally:?}");
    assert!(spent < 0.5 * 400.0 * us(0), "{spent}");
}

/// Of a text without repetitions nothing is looked up; of one whose repetitions go on otherwise, it stops.
#[test]
fn a_text_that_cannot_be_guessed_takes_no_longer() {
    let mix = |n: usize| (n as u32).wrapping_mul(2_654_435_761) >> 9;
    for vocab in [50_000, 12, 3] {
        let next = |all: &[u32]| mix(all.len() * all.len()) % vocab;
        let prompt: Vec<u32> = (0..64).map(|i| mix(i * 7) % vocab).collect();
        let (_, tally, spent) = continued(&prompt, (1000, 7), next, us);
        assert!(spent <= 1000.0 * us(0) / 0.97, "{vocab}: {spent}, {tally:?}");
    }
}

#[test]
fn windows_that_take_too_long_are_given_up() {
    let next = |all: &[u32]| all[all.len() - 5];
    let dear = |positions: usize| if positions == 0 { 600.0 } else { 20_000.0 };
    let (_, tally, _) = continued(&[1, 2, 3, 4, 5], (300, 7), next, dear);
    assert!(tally.windows <= 2, "{tally:?}");
}
