//! Seeded mutations of valid inputs.

use crate::rng::Rng;

use super::Target;

/// Longest mutated input.
const LENGTH_MAX: usize = 1 << 20;

/// Boundary values of sizes, counts and offsets.
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "7",
    "65535",
    "65536",
    "2147483648",
    "4294967295",
    "4294967296",
    "1152921504606846976",
    "9223372036854775807",
    "18446744073709551615",
    "340282366920938463463374607431768211456",
    "1e308",
];

/// A mutated copy of one of the seeds: one to eight edits.
#[must_use]
pub fn damaged(target: &Target, seeds: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut input = seeds[rng.below(seeds.len())].clone();
    for _ in 0..=rng.below(8) {
        edit(target, seeds, &mut input, rng);
    }
    input.truncate(LENGTH_MAX);
    input
}

fn edit(target: &Target, seeds: &[Vec<u8>], input: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.below(input.len() + 1);
    let end = (at + 1 + rng.below(32)).min(input.len());
    match rng.below(9) {
        0 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << rng.below(8);
            }
        }
        1 => {
            if let Some(byte) = input.get_mut(at) {
                *byte = rng.pick(&[0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'[', b'\n']);
            }
        }
        2 => drop(input.drain(at..end)),
        3 => {
            let copy = input[at..end].to_vec();
            let to = rng.below(input.len() + 1);
            drop(input.splice(to..to, copy));
        }
        4 => input.truncate(at),
        5 => {
            let words: Vec<&str> = target.dictionary().collect();
            drop(input.splice(at..at, rng.pick(&words).bytes()));
        }
        6 | 7 => number(input, at, rng),
        _ => {
            // Continues with another seed.
            let other = &seeds[rng.below(seeds.len())];
            let from = rng.below(other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
    }
}

/// Replaces the next digits with another number.
fn number(input: &mut Vec<u8>, at: usize, rng: &mut Rng) {
    let Some(digit) = input[at..].iter().position(u8::is_ascii_digit) else { return };
    let from = at + digit;
    let digits = input[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    drop(input.splice(from..from + digits, rng.pick(&NUMBERS).bytes()));
}
