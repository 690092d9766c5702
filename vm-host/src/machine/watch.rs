//! What the host does while a command runs: it takes tokens as they come, gives masks, and may ask the command to end.

use std::ops::Range;

/// Runs beside a command, called now and then by the thread that waits for its completion.
pub trait Watch {
    /// The next generated token of a sequence, by the sequence's number in the command. Called at most once for each, in
    /// order; tokens that come with the completion are only in the command's answer.
    fn token(&mut self, _sequence: usize, _token: u32) {}

    /// The tokens that may come next in a sequence whose session has masks
    /// ([`set_masked_sampling`](crate::Resident::set_masked_sampling)), a bit for each of `vocab`. Called for each token, after
    /// those before it. With `None` no token may, and the command ends after the current step.
    fn mask(&mut self, _sequence: usize, _vocab: u32) -> Option<Vec<u32>> {
        None
    }

    /// Whether the command is to end after the current step.
    fn yields(&mut self) -> bool;
}

impl<F: FnMut() -> bool> Watch for F {
    fn yields(&mut self) -> bool {
        self()
    }
}

/// A word of the token buffer that the device has not written yet: no token of any vocabulary.
pub(super) const NOT_YET: u32 = u32::MAX;

/// What a sequence of a command is expected to generate.
#[derive(Clone, Debug, Default)]
pub(super) struct Expected {
    /// Where its next tokens will be: bytes of the token buffer, [`NOT_YET`] at first.
    pub(super) tokens: Range<usize>,
    /// If its session has masks: the session, and the position of the next token.
    pub(super) mask: Option<(u32, u32)>,
    /// Whether the mask of the next token was given.
    pub(super) given: bool,
}

impl Expected {
    /// The next token has come.
    fn came(&mut self) {
        self.tokens.start += size_of::<u32>();
        self.mask = self.mask.map(|(session, position)| (session, position + 1));
        self.given = false;
    }
}

/// A watch, and what is expected of each sequence.
#[derive(Default)]
pub(super) struct Watched<'w> {
    pub(super) watch: Option<&'w mut dyn Watch>,
    pub(super) sequences: Vec<Expected>,
}

/// Gives the mask of a session's token at a position.
type Give<'g> = &'g mut dyn FnMut((u32, u32), Option<Vec<u32>>);

impl Watched<'_> {
    /// Whether some session has masks.
    pub(super) fn masked(&self) -> bool {
        self.sequences.iter().any(|expected| expected.mask.is_some())
    }

    /// Tells the tokens that have come, and gives the masks of those that come next. Returns whether the command is to end.
    pub(super) fn look(&mut self, vocab: u32, word: &dyn Fn(usize) -> u32, give: Give<'_>) -> bool {
        let Some(watch) = &mut self.watch else { return false };
        for (sequence, expected) in self.sequences.iter_mut().enumerate() {
            while !expected.tokens.is_empty() {
                if let Some(place) = expected.mask
                    && !std::mem::replace(&mut expected.given, true)
                {
                    give(place, watch.mask(sequence, vocab));
                }
                let token = word(expected.tokens.start);
                if token == NOT_YET {
                    break;
                }
                expected.came();
                watch.token(sequence, token);
            }
        }
        watch.yields()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes what it hears; the mask of a token has the bit of its position in the answer.
    #[derive(Default)]
    struct Heard {
        said: Vec<String>,
        masks: usize,
    }

    impl Watch for Heard {
        fn token(&mut self, sequence: usize, token: u32) {
            self.said.push(format!("{sequence} says {token}"));
        }

        fn mask(&mut self, sequence: usize, vocab: u32) -> Option<Vec<u32>> {
            self.said.push(format!("{sequence} needs a mask of {vocab}"));
            self.masks += 1;
            (self.masks < 4).then(|| vec![1 << self.masks])
        }

        fn yields(&mut self) -> bool {
            self.said.len() > 5
        }
    }

    /// Tokens of two sequences come one after the other; the second one has masks, from position 7 of session 3 on.
    #[test]
    fn a_mask_is_given_once_before_its_token_and_after_those_before() {
        let mut heard = Heard::default();
        let masked = Expected { tokens: 40..52, mask: Some((3, 7)), given: false };
        let plain = Expected { tokens: 0..8, ..Expected::default() };
        let mut watched = Watched { watch: Some(&mut heard), sequences: vec![plain, masked] };
        assert!(watched.masked());
        let mut memory = [NOT_YET; 13];
        let mut given = Vec::new();
        let mut look = |memory: &[u32]| {
            watched.look(50, &|at| memory[at / 4], &mut |place, mask| given.push((place, mask)))
        };
        assert!(!look(&memory));
        assert!(!look(&memory), "nothing has come, and nothing is given again");
        memory[0] = 5;
        assert!(!look(&memory));
        (memory[10], memory[11]) = (8, 9);
        assert!(look(&memory), "two came at once");
        (memory[1], memory[12]) = (6, 4);
        assert!(look(&memory), "the last ones need no mask behind them");
        let masks = [Some(vec![2]), Some(vec![4]), Some(vec![8])];
        assert_eq!(given, [(3, 7), (3, 8), (3, 9)].into_iter().zip(masks).collect::<Vec<_>>());
        let mask = "1 needs a mask of 50";
        let said = [mask, "0 says 5", "1 says 8", mask, "1 says 9", mask, "0 says 6", "1 says 4"];
        assert_eq!(heard.said, said);
    }
}
