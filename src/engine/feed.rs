//! Tokens through the kernel, whose last row of logits the host samples from.

use super::{Broken, Megakernel, unknown};

impl Megakernel<'_> {
    /// Feeds tokens, and calls `meanwhile` once while the kernel runs the last one, if that is read.
    pub(super) fn fed(
        &mut self,
        place: usize,
        tokens: &[u32],
        (read, meanwhile): (bool, &mut dyn FnMut()),
    ) -> Result<Vec<f32>, Broken> {
        let held = self.places.get(place).ok_or_else(|| unknown(place))?;
        let at = (place as u32, held.position);
        let program = self.pick(place);
        let row = self.gpu.feed(program, at, tokens, (read, meanwhile))?;
        self.passed(tokens.len() as u32);
        self.ran(place, tokens.iter().copied(), tokens.len() as u32);
        Ok(row)
    }
}
