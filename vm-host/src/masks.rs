//! Masks of sessions: the tokens that may not come next, in host memory that the device reads.
//!
//! At the end of a step the device waits until the session's mask is that of the next token's position. The host writes a mask when it has seen
//! the token before, which the device stores after it has read that token's mask: neither writes what the other reads.

use abi::MASK_HEAD_WORDS;

use crate::error::HostError;
use crate::memory::HostBuffer;

const WORD: usize = size_of::<u32>();

pub(crate) struct Masks {
    memory: HostBuffer,
    vocab: u32,
}

/// Words of a mask: whole groups of four.
fn mask_words(vocab: u32) -> usize {
    vocab.div_ceil(32).next_multiple_of(4) as usize
}

/// A bit for each token of the vocabulary that is not allowed: all of them if none may come.
fn banned(allowed: Option<&[u32]>, vocab: u32) -> Vec<u32> {
    let allowed = allowed.unwrap_or_default().iter().copied().chain(std::iter::repeat(0));
    allowed.take(mask_words(vocab)).map(|word| !word).collect()
}

impl Masks {
    /// For `sessions` sessions. No kernel is resident.
    pub(crate) fn new(sessions: u32, vocab: u32) -> Result<Self, HostError> {
        let bytes = sessions as usize * (MASK_HEAD_WORDS as usize + mask_words(vocab)) * WORD;
        Ok(Self { memory: HostBuffer::zeroed(bytes)?, vocab })
    }

    pub(crate) fn vocab(&self) -> u32 {
        self.vocab
    }

    /// Where a session's head is.
    fn head(&self, session: u32) -> usize {
        session as usize * (MASK_HEAD_WORDS as usize + mask_words(self.vocab)) * WORD
    }

    /// The device's address of a session's mask, behind its head.
    pub(crate) fn address(&self, session: u32) -> u64 {
        self.memory.device + self.head(session) as u64 + u64::from(MASK_HEAD_WORDS) * WORD as u64
    }

    /// Before a command: the mask is of no position.
    pub(crate) fn clear(&mut self, session: u32) {
        self.memory.publish(self.head(session), 0);
    }

    /// Gives the mask of the token at a position. Pairs with `mask_wait` in op_sample.cuh.
    pub(crate) fn give(&mut self, session: u32, position: u32, allowed: Option<&[u32]>) {
        let head = self.head(session);
        let words = banned(allowed, self.vocab);
        self.memory.write(head + MASK_HEAD_WORDS as usize * WORD, bytemuck::cast_slice(&words));
        self.memory.publish(head, position);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_a_bit_for_each_token_that_may_not_come() {
        assert_eq!(banned(Some(&[0b101, 1 << 31]), 64), [!0b101, !(1 << 31), !0, !0]);
        assert_eq!(
            banned(Some(&[7]), 200)[..3],
            [!7, !0, !0],
            "words that are missing allow nothing"
        );
        assert_eq!(banned(None, 33), [!0; 4]);
        assert_eq!([1, 128, 129].map(mask_words), [4, 4, 8]);
    }
}
