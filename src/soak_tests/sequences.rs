//! The sequences: prompts, and the reference's tokens after them.

use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use reference_vm::eval::{Evaluator, Logits};
use search::Ran;

use crate::Subject;

/// The number of prompts.
const SCRIPTS: usize = 6;
/// The most tokens of a prompt, and the most after it.
const PROMPT: usize = 12;
const TOKENS: usize = 24;
/// Two logits closer than this fraction of the greatest may change order between machines with different orders of summation.
const TIE: f32 = 2e-3;

/// A prompt and its continuation by the reference.
pub(super) struct Script {
    pub(super) prompt: Vec<u32>,
    pub(super) expected: Vec<Expected>,
}

/// A token of the reference.
pub(super) struct Expected {
    token: u32,
    /// Tokens that are equally good within rounding.
    ties: Vec<u32>,
}

/// A running sequence.
pub(super) struct Sequence {
    pub(super) script: usize,
    /// The prompt and the sampled tokens, stored here and not in the process.
    pub(super) tokens: Vec<u32>,
    /// The number of these that the process had run after its last turn of this sequence.
    pub(super) held: usize,
    chosen: usize,
    limit: usize,
}

/// The result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    More,
    Last,
    /// A token other than the reference's, equally good within rounding; the text diverges from here.
    NearTie,
}

/// The prompts and their continuations, determined by the seed.
pub(super) fn scripts(subject: &Subject, seed: u64) -> Vec<Script> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x5eed);
    (0..SCRIPTS).map(|_| script(subject, &mut rng)).collect()
}

fn script(subject: &Subject, rng: &mut Xoshiro256PlusPlus) -> Script {
    let (graph, weights) = (&subject.model.graph, &*subject.model.weights);
    let mut evaluator = Evaluator::new(graph, weights).unwrap().with_capacity(subject.kv_capacity);
    let length = rng.random_range(1..=PROMPT);
    let prompt: Vec<u32> = (0..length).map(|_| rng.random_range(0..graph.vocab)).collect();
    let mut expected = Vec::with_capacity(TOKENS);
    let mut fed = prompt.clone();
    for _ in 0..TOKENS {
        let rows = evaluator.run(&fed, Logits::Last).unwrap();
        let row = rows.last().expect("the logits of the last token");
        let best = best(row).expect("a token");
        let greatest = row.iter().fold(0.0_f32, |most, logit| most.max(logit.abs()));
        let near = |logit: &f32| row[best as usize] - logit <= TIE * greatest;
        let ties = row.iter().enumerate().filter(|(_, logit)| near(logit));
        let ties = ties.map(|(token, _)| token as u32).filter(|token| *token != best).collect();
        expected.push(Expected { token: best, ties });
        fed = vec![best];
    }
    Script { prompt, expected }
}

/// The highest logit; the lowest id of equals.
fn best(row: &[f32]) -> Option<u32> {
    let mut best: Option<(usize, f32)> = None;
    for (token, &logit) in row.iter().enumerate() {
        if best.is_none_or(|(_, most)| logit > most) {
            best = Some((token, logit));
        }
    }
    best.map(|(token, _)| token as u32)
}

impl Sequence {
    pub(super) fn new(script: usize, text: &Script, limit: usize) -> Self {
        Self { script, tokens: text.prompt.clone(), held: 0, chosen: 0, limit }
    }

    /// Compares the device's result for the tokens from `held` on with the reference, and appends the next token.
    pub(super) fn next(
        &mut self,
        script: &Script,
        held: usize,
        ran: &Ran,
    ) -> Result<Found, String> {
        let positions = self.tokens.len() - held;
        if ran.logits.len() != positions || ran.chosen.len() != positions {
            return Err(format!(
                "{} rows and {} tokens for {positions} positions",
                ran.logits.len(),
                ran.chosen.len()
            ));
        }
        let (Some(row), Some(&chosen)) = (ran.logits.last(), ran.chosen.last()) else {
            return Err("nothing was run".to_owned());
        };
        if best(row) != Some(chosen) {
            return Err(format!("token {chosen}, where its own logits say {:?}", best(row)));
        }
        let expected = &script.expected[self.chosen];
        if chosen != expected.token {
            let what = format!("token {chosen} instead of {}", expected.token);
            return if expected.ties.contains(&chosen) { Ok(Found::NearTie) } else { Err(what) };
        }
        self.tokens.push(chosen);
        self.chosen += 1;
        Ok(if self.chosen == self.limit { Found::Last } else { Found::More })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_token_is_found_and_a_tie_is_none() {
        let expected = |token, ties| Expected { token, ties };
        let script =
            Script { prompt: vec![5], expected: vec![expected(1, vec![2]), expected(0, vec![])] };
        let ran = |rows: usize, chosen: u32, best: usize| {
            let mut row = vec![0.0; 4];
            row[best] = 1.0;
            Ran { logits: vec![row; rows], chosen: vec![chosen; rows], ..Ran::default() }
        };
        let sequence = || Sequence::new(0, &script, 2);
        assert_eq!(sequence().next(&script, 0, &ran(1, 1, 1)), Ok(Found::More));
        assert_eq!(sequence().next(&script, 0, &ran(1, 2, 2)), Ok(Found::NearTie));
        assert!(sequence().next(&script, 0, &ran(1, 3, 3)).unwrap_err().contains("instead of 1"));
        assert!(sequence().next(&script, 0, &ran(1, 1, 2)).unwrap_err().contains("own logits"));
        assert!(sequence().next(&script, 0, &ran(2, 1, 1)).unwrap_err().contains("2 rows"));
        let mut whole = sequence();
        whole.next(&script, 0, &ran(1, 1, 1)).unwrap();
        assert_eq!(whole.tokens, [5, 1]);
        assert_eq!(whole.next(&script, 1, &ran(1, 0, 0)), Ok(Found::Last));
    }
}
