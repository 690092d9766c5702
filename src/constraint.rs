//! Rules for the text of one sequence, such as a grammar: each token is allowed by those before it. A machine that
//! samples is given the mask of each token while its step runs ([`Guide`]); else the host applies it to a row of logits.

/// Of a vocabulary, this part at most is looked up one by one instead of banning the rest from the row.
const FEW: usize = 16;

/// A rule, in the state after the tokens so far.
pub(crate) trait Constraint: Send + std::fmt::Debug {
    /// The tokens of a vocabulary that may come next: a stop token where the text may end.
    ///
    /// # Errors
    /// When no token fits, or a limit of the rule is reached.
    fn allowed(&mut self, vocab: usize, stop: &[u32]) -> Result<Allowed, String>;

    /// Does beforehand what [`allowed`](Self::allowed) needs the tokens so far for: while the machine computes the row.
    fn prepare(&mut self) {}

    /// Takes the next token, which is not a stop token. True if the text is complete and nothing can follow.
    ///
    /// # Errors
    /// When the token was banned, or a limit of the rule is reached.
    fn take(&mut self, id: u32) -> Result<bool, String>;

    /// A copy with a state of its own.
    fn copied(&self) -> Box<dyn Constraint>;
}

/// A set of tokens: a bit for each of a vocabulary.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    words: Vec<u32>,
    vocab: usize,
}

impl Allowed {
    /// The tokens whose bits are set in these words; bits that are missing are not set.
    pub(crate) fn new(words: &[u32], vocab: usize) -> Self {
        let mut words = words.to_vec();
        words.resize(vocab.div_ceil(32), 0);
        if let (Some(last), rest @ 1..) = (words.last_mut(), vocab % 32) {
            *last &= (1 << rest) - 1;
        }
        Self { words, vocab }
    }

    /// Adds a token, or takes it out.
    pub(crate) fn set(&mut self, id: u32, allowed: bool) {
        let place = id as usize / 32;
        if let Some(word) = self.words.get_mut(place).filter(|_| (id as usize) < self.vocab) {
            let bit = 1 << (id % 32);
            *word = if allowed { *word | bit } else { *word & !bit };
        }
    }

    /// Its tokens, ascending, if they are few.
    pub(crate) fn few(&self) -> Option<Vec<u32>> {
        let count: usize = self.words.iter().map(|word| word.count_ones() as usize).sum();
        if count > self.vocab / FEW {
            return None;
        }
        let mut tokens = Vec::with_capacity(count);
        for (index, word) in (0..).zip(&self.words) {
            let mut left = *word;
            while left != 0 {
                tokens.push(index * 32 + left.trailing_zeros());
                left &= left - 1;
            }
        }
        Some(tokens)
    }

    /// Bans all others from a row of logits. Most words are full or empty.
    pub(crate) fn ban_others(&self, row: &mut [f32]) {
        let words = self.words.iter().copied().chain(std::iter::repeat(0));
        for (part, allowed) in row.chunks_mut(32).zip(words) {
            match allowed {
                0 => part.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                _ => {
                    for (bit, logit) in part.iter_mut().enumerate() {
                        let kept = *logit;
                        *logit = if allowed >> bit & 1 == 1 { kept } else { f32::NEG_INFINITY };
                    }
                }
            }
        }
    }
}

/// A rule while the machine samples: it takes the tokens as they come, and says which may come next.
#[derive(Debug)]
pub(crate) struct Guide {
    rule: Box<dyn Constraint>,
    stop: Vec<u32>,
    /// Set when no token follows: the text is complete, or why it cannot continue.
    end: Option<Result<(), String>>,
}

impl Guide {
    /// A rule in the state after the tokens so far, and the tokens that end the text.
    pub(crate) fn new(rule: Box<dyn Constraint>, stop: &[u32]) -> Self {
        Self { rule, stop: stop.to_vec(), end: None }
    }

    /// Takes the next token.
    pub(crate) fn take(&mut self, id: u32) {
        if self.end.is_some() || self.stop.contains(&id) {
            return;
        }
        self.end = match self.rule.take(id) {
            Ok(false) => None,
            Ok(true) => Some(Ok(())),
            Err(why) => Some(Err(why)),
        };
    }

    /// The tokens that may come next, a bit each; `None` where none follows.
    pub(crate) fn mask(&mut self, vocab: u32) -> Option<Vec<u32>> {
        if self.end.is_some() {
            return None;
        }
        match self.rule.allowed(vocab as usize, &self.stop) {
            Ok(allowed) => Some(allowed.words),
            Err(why) => {
                self.end = Some(Err(why));
                None
            }
        }
    }

    /// How the text ended, if it did other than by a stop token.
    pub(crate) fn end(&self) -> Option<&Result<(), String>> {
        self.end.as_ref()
    }
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.copied()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Allows even tokens only, and ends the text after 44.
    #[derive(Clone, Debug)]
    pub(crate) struct Even;

    impl Constraint for Even {
        fn allowed(&mut self, vocab: usize, _stop: &[u32]) -> Result<Allowed, String> {
            Ok(Allowed::new(&vec![0x5555_5555; vocab.div_ceil(32)], vocab))
        }

        fn take(&mut self, id: u32) -> Result<bool, String> {
            if id.is_multiple_of(2) { Ok(id == 44) } else { Err(format!("{id} is odd")) }
        }

        fn copied(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }

    #[test]
    fn a_guide_ends_with_its_text_and_takes_no_stop_tokens() {
        let mut guide = Guide::new(Box::new(Even), &[3]);
        assert_eq!(guide.mask(40), Some(vec![0x5555_5555, 0x55]));
        guide.take(3);
        guide.take(2);
        assert_eq!((guide.mask(32).is_some(), guide.end()), (true, None));
        guide.take(44);
        assert_eq!((guide.mask(32), guide.end()), (None, Some(&Ok(()))));
        guide.take(5);
        assert_eq!(guide.end(), Some(&Ok(())), "what comes behind the end is not looked at");
        let mut guide = Guide::new(Box::new(Even), &[]);
        guide.take(5);
        assert_eq!((guide.mask(32), guide.end()), (None, Some(&Err("5 is odd".to_owned()))));
    }

    #[test]
    fn a_row_keeps_the_tokens_whose_bits_are_set() {
        for word in [0, u32::MAX, 1, 1 << 31, 0x8421_0f0f] {
            for vocab in [32, 7, 64, 70] {
                let mut allowed = Allowed::new(&[word, !word], vocab);
                allowed.set(3, true);
                allowed.set(4, false);
                allowed.set(70, true);
                let bit = |id: usize| match id {
                    3 => true,
                    4 => false,
                    0..32 => word >> id & 1 == 1,
                    32..64 => word >> (id - 32) & 1 == 0,
                    _ => false,
                };
                let kept: Vec<u32> = (0..vocab as u32).filter(|id| bit(*id as usize)).collect();
                let mut row = vec![1.0; vocab];
                allowed.ban_others(&mut row);
                let left: Vec<u32> =
                    (0..).zip(&row).filter(|(_, l)| **l == 1.0).map(|(id, _)| id).collect();
                assert_eq!(left, kept, "{word:x} of {vocab}");
                let few = (kept.len() <= vocab / FEW).then_some(kept);
                assert_eq!(allowed.few(), few);
            }
        }
    }
}
