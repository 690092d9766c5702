//! Rules for the text of one sequence, such as a grammar: each token is allowed by those before it. The host applies
//! them to a row of logits, so that a sequence with a rule is sampled on the host.

/// A rule, in the state after the tokens so far.
pub(crate) trait Constraint: Send + std::fmt::Debug {
    /// Bans the tokens of a row that may not come next: a stop token where the text may not end, others where they do
    /// not fit.
    ///
    /// # Errors
    /// When no token fits, or a limit of the rule is reached.
    fn ban(&mut self, row: &mut [f32], stop: &[u32]) -> Result<(), String>;

    /// Takes the next token, which is not a stop token. True if the text is complete and nothing can follow.
    ///
    /// # Errors
    /// When the token was banned, or a limit of the rule is reached.
    fn take(&mut self, id: u32) -> Result<bool, String>;

    /// A copy with a state of its own.
    fn copied(&self) -> Box<dyn Constraint>;
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
        fn ban(&mut self, row: &mut [f32], _stop: &[u32]) -> Result<(), String> {
            row.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
            Ok(())
        }

        fn take(&mut self, id: u32) -> Result<bool, String> {
            if id.is_multiple_of(2) { Ok(id == 44) } else { Err(format!("{id} is odd")) }
        }

        fn copied(&self) -> Box<dyn Constraint> {
            Box::new(self.clone())
        }
    }
}
