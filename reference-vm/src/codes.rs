//! Keys and values as a cache of e4m3 keeps them: codes of eight bits, and a scale for each head at each position.

use half::f16;

/// Greatest e4m3.
const CODE_MAX: f32 = 448.0;
/// Exponents of the scales. The smallest one keeps the last bit of every code an f16, the greatest one its first.
const EXPONENTS: std::ops::RangeInclusive<i32> = -14..=7;

/// To f16 and back, without infinities.
pub(crate) fn as_f16(value: f32) -> f32 {
    f16::from_f32(value.clamp(f16::MIN.to_f32(), f16::MAX.to_f32())).to_f32()
}

/// Rounds the key or the value of a head: to f16, then to e4m3 times the smallest power of two with which no element is beyond the greatest
/// code. A power of two loses nothing, since codes are floats: another scale would only move their binades. In exchange all products of codes
/// and scales are f16, so attention multiplies what a cache of f16 could hold.
pub(crate) fn to_e4m3(head: &mut [f32]) {
    head.iter_mut().for_each(|value| *value = as_f16(*value));
    let greatest = head.iter().fold(0f32, |greatest, value| greatest.max(value.abs()));
    let mut exponents = EXPONENTS;
    let fits = |exponent: &i32| greatest <= CODE_MAX * 2f32.powi(*exponent);
    let scale = 2f32.powi(exponents.find(fits).unwrap_or(*EXPONENTS.end()));
    head.iter_mut().for_each(|value| *value = nearest_code(*value / scale) * scale);
}

/// The nearest e4m3, ties to even; beyond the greatest one the greatest.
fn nearest_code(value: f32) -> f32 {
    // Normal codes have three bits after the first; those below 2^-6 have the step of the smallest normal ones.
    let binade = (value.to_bits() >> 23 & 0xff) as i32 - 127;
    let step = 2f32.powi(binade.max(-6) - 3);
    ((value / step).round_ties_even() * step).clamp(-CODE_MAX, CODE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code, by the decoder of weights.
    fn codes() -> Vec<f32> {
        (0..=255).map(ir::e4m3).filter(|code| code.is_finite()).collect()
    }

    #[test]
    fn codes_are_kept_and_everything_else_goes_to_the_nearest() {
        let mut all = codes();
        all.sort_by(f32::total_cmp);
        all.dedup();
        assert_eq!(all.len(), 253, "two zeros, and no NaN");
        for pair in all.windows(2) {
            let [low, high] = [pair[0], pair[1]];
            assert_eq!([nearest_code(low), nearest_code(high)], [low, high]);
            let middle = f32::midpoint(low, high);
            assert_eq!(nearest_code(f32::midpoint(low, middle)), low);
            assert_eq!(nearest_code(f32::midpoint(middle, high)), high);
            // A tie goes to the code whose last bit is zero.
            let even = |code: f32| (0..=255_u8).any(|b| b % 2 == 0 && ir::e4m3(b) == code);
            assert_eq!(nearest_code(middle), if even(low) { low } else { high }, "{low} {high}");
        }
        assert_eq!([nearest_code(465.0), nearest_code(-1e9)], [448.0, -448.0]);
    }

    #[test]
    fn a_kept_head_is_f16_and_stays_what_it_is() {
        for greatest in [0.0, 3e-7, 1e-3, 0.44, 0.45, 1.0, 300.0, 5e4, 1e9] {
            let mut head: Vec<f32> =
                (0..64).map(|i| greatest * (i as f32 * 0.37).sin() / (1 + i % 5) as f32).collect();
            head[7] = -greatest;
            let given = head.clone();
            to_e4m3(&mut head);
            let bound = given.iter().fold(0f32, |most, v| most.max(v.abs())).min(57344.0);
            for (kept, value) in head.iter().zip(&given) {
                assert_eq!(*kept, as_f16(*kept), "{greatest}: {kept} is no f16");
                let value = value.clamp(-bound, bound);
                // Half a step of the codes, normal or not, and of the f16 before.
                let code = (value.abs() / 16.0).max(bound * 2f32.powi(-17)).max(2f32.powi(-24));
                let half = (value.abs() * 2f32.powi(-11)).max(2f32.powi(-25));
                assert!((kept - value).abs() <= code + half, "{greatest}: {kept} for {value}");
            }
            let mut again = head.clone();
            to_e4m3(&mut again);
            assert_eq!(again, head, "{greatest}");
        }
    }
}
