//! Powers of two in fixed point, by f32 operations that round alike on every machine. Integer sums do not depend on
//! order, so any number of workers may add up their parts of a vocabulary and get the same bits.

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

/// `2^t` for `t` at most 0, in units of `1 / ONE`, rounded down; 0 for smaller values and for NaN.
#[must_use]
pub(super) fn weight(t: f32) -> u64 {
    if t.is_nan() || t <= -(PLACES as f32 + 1.0) {
        return 0;
    }
    let whole = t.trunc();
    let fraction = t - whole; // exact: in (-1, 0], on the grid of t
    let power = POLYNOMIAL.iter().rev().fold(0.0, |sum: f32, c| sum.mul_add(fraction, *c));
    let power = power.mul_add(fraction, 1.0);
    let mantissa = (power * (1 << MANTISSA) as f32) as u64;
    (mantissa << (PLACES - MANTISSA)) >> (-whole) as u32
}
