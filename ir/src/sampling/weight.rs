//! Powers of two in fixed point, by f32 operations that round alike on every machine. Integer sums do not depend on
//! order, so any number of workers may add up their parts of a vocabulary and get the same bits.

/// Logits that are looked at together.
pub(super) const BLOCK: usize = 256;
/// Binary places of a weight: the likeliest token weighs `ONE`.
const PLACES: u32 = 40;
/// The weight of the likeliest token. The weights of the largest vocabulary sum to well below 2^64.
pub(super) const ONE: u64 = 1 << PLACES;
/// Binary places of an f32 in [0.5, 1].
const MANTISSA: u32 = 24;

/// `2^f` on [-1, 0] less the leading one, divided by `f`: interpolated at the Chebyshev points, lowest power first. The
/// bits are part of the definition of a draw (decision 015), however they were found.
const POLYNOMIAL: [f32; 6] = [
    f32::from_bits(0x3f31_7218),
    f32::from_bits(0x3e75_fdd4),
    f32::from_bits(0x3d63_5329),
    f32::from_bits(0x3c1d_3ce2),
    f32::from_bits(0x3aa9_4c24),
    f32::from_bits(0x38f1_012e),
];

/// `2^t` for `t` at most 0, in units of `1 / ONE`, rounded down; 0 for smaller values and for NaN. Without branches, so
/// that a row is computed by vectors.
#[inline(always)]
#[must_use]
pub(super) fn weight(t: f32) -> u64 {
    let none = t.is_nan() || t <= -(PLACES as f32 + 1.0);
    let t = if none { 0.0 } else { t.min(0.0) };
    let whole = t.trunc();
    let fraction = t - whole; // exact: in (-1, 0], on the grid of t
    let power = POLYNOMIAL.iter().rev().fold(0.0, |sum: f32, c| sum.mul_add(fraction, *c));
    let power = power.mul_add(fraction, 1.0);
    // `as` would also do, but checks the range, which no vector instruction does.
    // SAFETY: `t` is a number from -41 to 0, so that `power` is one near 0.5 to 1, and `-whole` one from 0 to 41.
    let [mantissa, octaves]: [i32; 2] = unsafe {
        [(power * (1 << MANTISSA) as f32).to_int_unchecked(), (-whole).to_int_unchecked()]
    };
    let weight = ((mantissa as u64) << (PLACES - MANTISSA)) >> (octaves & 63);
    if none { 0 } else { weight }
}

/// Passes on the weights of a row of logits, of which none is above `greatest`, block by block with the first token of
/// each: to keep them all would cost more than to compute them again.
pub(super) fn weights(
    logits: &[f32],
    (greatest, scale): (f32, f32),
    mut each: impl FnMut(usize, &[u64]),
) {
    let weigh = best_weigher();
    let mut weights = [0; BLOCK];
    for (block, part) in logits.chunks(BLOCK).enumerate() {
        let weights = &mut weights[..part.len()];
        weigh(part, greatest, scale, weights);
        each(block * BLOCK, weights);
    }
}

type Weigh = fn(&[f32], f32, f32, &mut [u64]);

fn best_weigher() -> Weigh {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: this CPU has the instructions.
        return |logits, greatest, scale, weights| unsafe {
            weigh_by_vectors(logits, greatest, scale, weights);
        };
    }
    weigh
}

#[inline(always)]
fn weigh(logits: &[f32], greatest: f32, scale: f32, weights: &mut [u64]) {
    for (to, logit) in weights.iter_mut().zip(logits) {
        *to = weight((logit - greatest) * scale);
    }
}

/// The same where a fused multiply-add is an instruction and no call, eight at a time: the same bits in a twentieth of the
/// time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn weigh_by_vectors(logits: &[f32], greatest: f32, scale: f32, weights: &mut [u64]) {
    weigh(logits, greatest, scale, weights);
}
