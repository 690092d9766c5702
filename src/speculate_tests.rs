use super::worth::PAYS;
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
        let plan = guesser.next(room, None);
        let (guesses, kernel) = match plan {
            Plan::Plain => (Vec::new(), 0),
            Plan::Window(guesses) => (guesses, 1),
            plan @ (Plan::Draft(_) | Plan::Look(_)) => panic!("{plan:?} without a draft"),
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

/// Steps of 3600 us: those of qwen3-8b, a window of it, and between two commands 210 us.
const STEP: f64 = 3600.0;
const PAUSE: f64 = 210.0;

fn window_us(positions: usize) -> f64 {
    STEP * price(positions) + PAUSE
}

/// A draft whose guesses are right with a probability, wherever they begin, and whose step takes a part of one of the model.
struct Simulated {
    acceptance: f64,
    step: f64,
    /// A token of a chunk.
    chunk: f64,
    /// The tokens that it has run.
    fed: Vec<u32>,
}

impl Simulated {
    fn right(&self, position: usize) -> bool {
        let mixed = (position as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40;
        mixed as f64 / f64::from(1 << 24) < self.acceptance
    }

    fn unread(&self, text: &[u32]) -> usize {
        let same = self.fed.iter().zip(text).take_while(|(fed, token)| fed == token).count();
        text.len() - same.min(text.len() - 1)
    }

    /// Guesses behind a text; what is unread is read in a chunk if there are many tokens.
    fn guess(&mut self, text: &[u32], count: usize, next: impl Fn(&[u32]) -> u32) -> Guessed {
        let mut all = text.to_vec();
        for _ in 0..count {
            let token = next(&all);
            all.push(if self.right(all.len()) { token } else { token ^ 1 });
        }
        let unread = self.unread(text);
        let reads =
            if unread > 16 { self.chunk * unread as f64 } else { self.step * unread as f64 };
        let us = self.step * (count - 1) as f64 + reads + PAUSE;
        self.fed = all[..all.len() - 1].to_vec();
        Guessed { tokens: all.split_off(text.len()), us: Some(us), read: unread }
    }
}

/// Generates tokens behind a prompt, of `(prompt, count)` tokens, with guesses of the draft alone, since the lookup finds
/// nothing. Returns the time in steps of the model, and the tally.
fn drafted(worth: &mut Worth, draft: &mut Simulated, tokens: (usize, usize)) -> (f64, Tally) {
    drafted_of(worth, draft, tokens, u32::MAX)
}

/// The same with tokens below `vocab`: of few tokens something is always found, and wrong.
fn drafted_of(
    worth: &mut Worth,
    draft: &mut Simulated,
    (prompt, count): (usize, usize),
    vocab: u32,
) -> (f64, Tally) {
    let next = |all: &[u32]| {
        let mixed = (all.len() as u32).wrapping_mul(2_654_435_761);
        ((mixed ^ mixed >> 15).wrapping_mul(0x9E37_79B9) >> 3) % vocab
    };
    let mut all: Vec<u32> =
        (0..prompt as u32).map(|i| (i * i).wrapping_mul(2_654_435_761)).collect();
    draft.fed.clear();
    let mut guesser = Guesser::new(&all, 7);
    let mut spent = 0.0;
    while all.len() < prompt + count {
        let room = prompt + count - all.len() - 1;
        let plan = guesser.next(room, Some((worth, draft.unread(&all))));
        let guessed = match plan {
            Plan::Draft(count) | Plan::Look(count) => draft.guess(&all, count, next),
            Plan::Plain | Plan::Window(_) => Guessed::default(),
        };
        let (steps, guesses) = match &plan {
            Plan::Plain | Plan::Look(_) => {
                (if worth.waits() { 4 } else { 32 }.min(room + 1), &[][..])
            }
            Plan::Window(guesses) => (0, &guesses[..]),
            Plan::Draft(_) => (0, &guessed.tokens[..]),
        };
        let mut tokens = vec![next(&all)];
        let right = |tokens: &[u32]| guesses.get(tokens.len() - 1) == tokens.last();
        while tokens.len() < steps || steps == 0 && right(&tokens) {
            tokens.push(next(&[&all[..], &tokens].concat()));
        }
        let us = if steps > 0 { steps as f64 * STEP } else { window_us(guesses.len() + 1) };
        spent += us + guessed.us.unwrap_or(0.0);
        guesser.learn((&plan, &guessed), (&tokens, Some(us)), Some(worth));
        all.extend(tokens);
    }
    (spent / STEP, guesser.tally)
}

/// The time per token, in steps of the model, of windows with this many guesses each. After a window whose guesses were
/// all right, the draft has one token more to read.
fn fixed(acceptance: f64, step: f64, guesses: usize) -> f64 {
    let read = acceptance.powi(guesses as i32);
    let draft = (step * (guesses as f64 + read) + PAUSE) / STEP;
    (window_us(guesses + 1) / STEP + draft) / expected(acceptance, guesses)
}

#[test]
fn a_draft_never_costs_much_and_is_near_the_best_number_of_guesses_where_it_pays() {
    for part in [0.1, 0.4] {
        for acceptance in [0.0, 0.3, 0.5, 0.7, 0.9] {
            let step = part * STEP;
            let mut worth = Worth::new(true);
            let mut draft = Simulated { acceptance, step, chunk: 0.02 * step, fed: Vec::new() };
            let (spent, tally) = drafted(&mut worth, &mut draft, (4, 1000));
            let best = (1..=7).map(|n| fixed(acceptance, step, n)).fold(1.0, f64::min);
            let what = format!(
                "acceptance {acceptance}, a guess {part} of a step: {spent:.0} steps for 1000, best {best:.3}: {tally:?}"
            );
            assert!(spent <= 1000.0 / 0.97, "{what}");
            if best < 1.0 / 1.15 {
                assert!(spent <= 1100.0 * best, "{what}");
            }
        }
    }
}

#[test]
fn a_hopeless_draft_is_learned_once_and_one_that_becomes_better_is_noticed() {
    let text = |worth: &mut Worth, acceptance: f64| {
        let mut draft = Simulated { acceptance, step: 0.1 * STEP, chunk: 7.0, fed: Vec::new() };
        drafted(worth, &mut draft, (4, 1000)).0
    };
    let mut worth = Worth::new(true);
    let first = text(&mut worth, 0.0);
    let second = text(&mut worth, 0.0);
    // Looks alone: a part of the time that is bounded.
    assert!(second <= 1000.0 * (1.0 + PAYS) + 1.0 && second < first + 4.0, "{first}, {second}");
    let better = text(&mut worth, 0.9);
    assert!(better < 700.0, "{better}");
    let again = text(&mut worth, 0.0);
    assert!(again <= 1000.0 / 0.97, "{again}: what the text before saved is not lost here");
}

#[test]
fn a_draft_comes_before_what_is_found_and_wrong() {
    let mut worth = Worth::new(true);
    let step = 0.1 * STEP;
    let mut draft = Simulated { acceptance: 0.8, step, chunk: 7.0, fed: Vec::new() };
    let (spent, tally) = drafted_of(&mut worth, &mut draft, (40, 1000), 12);
    let best = (1..=7).map(|n| fixed(0.8, step, n)).fold(1.0, f64::min);
    assert!(spent < 1150.0 * best && tally.drafted * 10 > tally.guessed * 9, "{spent}: {tally:?}");
}

/// Reading a token takes 50 us: of 4000 as long as 55 steps of the model.
#[test]
fn a_long_text_is_read_only_where_enough_tokens_are_left() {
    let mut worth = Worth::new(true);
    let mut draft = Simulated { acceptance: 0.8, step: 0.1 * STEP, chunk: 50.0, fed: Vec::new() };
    let (long, tally) = drafted(&mut worth, &mut draft, (4000, 1000));
    assert!(long < 700.0 && tally.drafted > 500, "{long}: {tally:?}");
    let (short, tally) = drafted(&mut worth, &mut draft, (4000, 40));
    assert!(short < 41.0 && tally.drafted == 0, "{short}: {tally:?}");
    let (short, tally) = drafted(&mut worth, &mut draft, (40, 40));
    assert!(short < 30.0 && tally.drafted > 20, "{short}: {tally:?}");
}

#[test]
fn guesses_of_a_draft_are_counted_by_their_source() {
    let mut guesser = Guesser::new(&[1, 2, 3], 4);
    let mut worth = Worth::new(false);
    let Plan::Draft(count) = guesser.next(20, Some((&worth, 3))) else { panic!("it is tried") };
    let guessed = Guessed { tokens: vec![4, 5, 9], us: None, read: 3 };
    guesser.learn((&Plan::Draft(count), &guessed), (&[4, 5, 6], None), Some(&mut worth));
    let Tally { guessed, accepted, rejected, drafted, drafts_accepted, .. } = guesser.tally;
    assert_eq!((guessed, accepted, rejected, drafted, drafts_accepted), (3, 2, 1, 3, 2));
    guesser.learn((&Plan::Window(vec![7]), &Guessed::default()), (&[7, 8], None), Some(&mut worth));
    let tally = guesser.tally.to_json();
    assert_eq!((&tally["accepted"], &tally["drafts_accepted"]), (&3.into(), &2.into()));
    assert_eq!(tally["drafts_acceptance"], 2.0 / 3.0);
    assert_eq!((&tally["lookups_acceptance"], &tally["draft_looks"]), (&1.0.into(), &0.into()));
    let looked = Guessed { tokens: vec![1, 1], us: None, read: 1 };
    guesser.learn((&Plan::Look(2), &looked), (&[1, 2], None), Some(&mut worth));
    assert_eq!((guesser.tally.looks, guesser.tally.drafted), (1, 3), "no window had them");
    assert_eq!(guesser.text(), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]);
}
