//! What the host does while a command runs: it takes tokens as they come, and may ask the command to end.

use std::ops::Range;

use crate::memory::HostBuffer;

/// Runs beside a command, called now and then by the thread that waits for its completion.
pub trait Watch {
    /// The next generated token of a sequence, by the sequence's number in the command. Called at most once for each, in
    /// order; tokens that come with the completion are only in the command's answer.
    fn token(&mut self, _sequence: usize, _token: u32) {}

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

/// A watch, and where the tokens of each sequence will be: bytes of the token buffer, [`NOT_YET`] at first.
#[derive(Default)]
pub(super) struct Watched<'w> {
    pub(super) watch: Option<&'w mut dyn Watch>,
    pub(super) places: Vec<Range<usize>>,
}

impl Watched<'_> {
    /// Tells the tokens that have come. Returns whether the command is to end.
    pub(super) fn look(&mut self, tokens: &HostBuffer) -> bool {
        let Some(watch) = &mut self.watch else { return false };
        for (sequence, place) in self.places.iter_mut().enumerate() {
            while place.start < place.end {
                let token = tokens.word(place.start);
                if token == NOT_YET {
                    break;
                }
                place.start += size_of::<u32>();
                watch.token(sequence, token);
            }
        }
        watch.yields()
    }
}
