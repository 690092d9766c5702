//! Philox 4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11): a
//! random function of a counter and a key. It is stateless: seed and position suffice to draw, in any order and on any
//! machine.

const ROUNDS: u32 = 10;
const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// Increments of the key between rounds: fractions of the golden ratio and of the square root of three.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Four random words for a counter.
#[must_use]
pub(super) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut words, mut key) = (counter, key);
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let products = [0, 2].map(|i| u64::from(words[i]) * u64::from(MULTIPLIERS[i / 2]));
        let [high, low] = [
            products.map(|product| (product >> 32) as u32),
            products.map(|product| product as u32),
        ];
        words = [high[1] ^ words[1] ^ key[0], low[1], high[0] ^ words[3] ^ key[1], low[0]];
    }
    words
}

/// The 64 random bits of a position under a seed.
#[must_use]
pub(super) fn bits(seed: u64, position: u32) -> u64 {
    let words = philox([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(words[0]) | u64::from(words[1]) << 32
}
