//! Timed blocks: one loop and the same statistics for everything that is timed here.

/// The time of each block, the shortest first.
pub(in crate::commands) struct Blocks(pub(in crate::commands) Vec<f64>);

impl Blocks {
    /// Times `count` blocks after `warmup` untimed ones.
    pub(in crate::commands) fn time<E>(
        (warmup, count): (usize, usize),
        mut block: impl FnMut() -> Result<f64, E>,
    ) -> Result<Self, E> {
        for _ in 0..warmup {
            block()?;
        }
        let mut blocks = (0..count).map(|_| block()).collect::<Result<Vec<f64>, E>>()?;
        blocks.sort_by(f64::total_cmp);
        Ok(Self(blocks))
    }

    pub(in crate::commands) fn median(&self) -> f64 {
        search::median(&self.0)
    }

    /// The shortest and the longest time.
    pub(in crate::commands) fn ends(&self) -> [f64; 2] {
        [self.0[0], self.0[self.0.len() - 1]]
    }
}
