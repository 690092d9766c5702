//! A small seeded generator, so that every failure is replayed by its seed.

/// A linear congruential generator with a mixed output.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that gives the same numbers for the same seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0x9fb2_1c65_1e98_df25);
        mixed ^ (mixed >> 32)
    }

    /// A number below `limit`, which is not zero.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next_u64() % limit as u64) as usize
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }

    /// Heads or tails.
    pub fn flip(&mut self) -> bool {
        self.next_u64() & 1 == 1
    }
}
