//! Sampling rules that only the host applies, to a row of logits before `ir::sampling` chooses from it.

use std::borrow::Cow;
use std::collections::BTreeMap;

/// Rules of a request. The default has none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HostRules {
    /// Tokens to generate before one of the stop tokens may come.
    pub(crate) min_tokens: u32,
    /// Subtracted from the logit of each token that was generated before.
    pub(crate) presence_penalty: f32,
    /// The same, times the number of its occurrences.
    pub(crate) frequency_penalty: f32,
    /// Whether the log probabilities of the prompt's tokens are reported.
    pub(crate) score_prompt: bool,
}

impl HostRules {
    /// Whether there is any rule, so that the host has to sample.
    pub(crate) fn any(&self) -> bool {
        *self != Self::default()
    }

    /// The row with these rules, after the tokens `chosen`.
    pub(crate) fn applied<'a>(
        &self,
        logits: impl Into<Cow<'a, [f32]>>,
        chosen: &[u32],
        stop: &[u32],
    ) -> Cow<'a, [f32]> {
        let mut row = logits.into();
        if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            let mut counts = BTreeMap::<u32, u16>::new();
            for id in chosen {
                let count = counts.entry(*id).or_default();
                *count = count.saturating_add(1);
            }
            for (id, count) in counts {
                if let Some(logit) = row.to_mut().get_mut(id as usize) {
                    *logit -= self.frequency_penalty * f32::from(count) + self.presence_penalty;
                }
            }
        }
        if chosen.len() < self.min_tokens as usize {
            for id in stop {
                if let Some(logit) = row.to_mut().get_mut(*id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_count_generated_tokens_and_stop_tokens_wait() {
        let row = [1.0, 2.0, 3.0, 4.0];
        let none = HostRules::default();
        assert!(!none.any());
        assert!(matches!(none.applied(&row[..], &[1, 1], &[3]), Cow::Borrowed(_)));
        let rules = HostRules { presence_penalty: 0.5, frequency_penalty: 0.25, ..none };
        assert_eq!(*rules.applied(&row[..], &[1, 2, 1], &[3]), [1.0, 1.0, 2.25, 4.0]);
        let rules = HostRules { presence_penalty: -1.0, ..none };
        assert_eq!(*rules.applied(&row[..], &[0, 9], &[]), [2.0, 2.0, 3.0, 4.0], "an unknown id");
        let rules = HostRules { min_tokens: 2, ..none };
        assert!(rules.any());
        assert_eq!(*rules.applied(&row[..], &[1], &[3, 9]), [1.0, 2.0, 3.0, f32::NEG_INFINITY]);
        assert_eq!(*rules.applied(&row[..], &[1, 1], &[3]), row);
    }
}
