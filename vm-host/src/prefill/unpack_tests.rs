//! The kernel that unpacks codes, compiled as host C++, against the packer and the decoder of stored rows.

use std::fmt::Write as _;

use half::f16;
use ir::{DType, Format, TILE_ROWS};
use rand::{SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::random_codes::{packed, stored_row};

const ROWS: usize = 13;

/// The input of unpack.cpp and its expected output.
fn case(format: Format, cols: u32, factor: f32) -> (String, String) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(cols));
    let stored: Vec<Vec<u8>> = (0..ROWS)
        .map(|row| stored_row(format, cols as usize, row / TILE_ROWS * 7, &mut random))
        .collect();
    let factors: Vec<f32> = (0..ROWS).map(|row| factor * 2_f32.powi(row as i32 % 3)).collect();
    let halves = stored.iter().zip(&factors).map(|(row, factor)| {
        let mut values = vec![0.0; cols as usize];
        ir::decode(format.stored(), row, &mut values);
        values.iter().flat_map(|value| f16::from_f32(value * factor).to_le_bytes()).collect()
    });
    let halves: Vec<Vec<u8>> = halves.collect();
    let codes = packed(format, cols, &stored);
    let (tiles, units) = (ROWS.div_ceil(TILE_ROWS), Format::F16.units_per_tile(cols));
    let numbers =
        [format.unpack() as usize, format.units_per_tile(cols) as usize, units as usize, tiles];
    let mut asked = String::new();
    for number in numbers.into_iter().chain([ROWS, codes.len()]) {
        let _ = write!(asked, "{number} ");
    }
    factors.iter().for_each(|factor| _ = write!(asked, "{} ", factor.to_bits()));
    codes.iter().for_each(|byte| _ = write!(asked, "{byte} "));
    let words = packed(Format::F16, cols, &halves);
    let words = words.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word).to_string());
    (asked, words.collect::<Vec<_>>().join(" "))
}

fn device_says(compiler: &str, spoil: Option<(&str, &str)>, asked: &str) -> (String, String) {
    feature_says(compiler, 0, spoil, asked)
}

fn feature_says(
    compiler: &str,
    features: u32,
    spoil: Option<(&str, &str)>,
    asked: &str,
) -> (String, String) {
    let sources = ["amk_abi.h", "prelude.cuh", "unpack.cuh", "prefill_unpack.cuh"];
    let defines = [
        format!("-DAMK_UNPACK={}", (1 << abi::Unpack::ALL.len()) - 1),
        format!("-DAMK_DTYPE={}", DType::F16 as u32),
        format!("-DAMK_FEATURES={features}u"),
    ];
    let said = crate::emulated::run(compiler, "unpack", (&sources, &defines), spoil, asked);
    let (beyond, words) = said.split_once('\n').unwrap_or_default();
    (beyond.to_owned(), words.trim().replace("32768", "0")) // zeros have no sign
}

#[test]
fn codes_become_the_f16_matrix_of_their_values() {
    let Some(compiler) = crate::emulated::compiler() else { return };
    let formats = Format::ALL.iter().copied().filter(|format| format.is_scaled());
    for format in formats {
        for cols in [384_u32, 416] {
            // Groups divide the columns.
            if format.stored().block().is_some_and(|block| !cols.is_multiple_of(block.group)) {
                continue;
            }
            let (asked, expected) = case(format, cols, 0.25);
            let (beyond, words) = device_says(&compiler, None, &asked);
            assert_eq!(
                words,
                expected.replace("32768", "0"),
                "{} of {cols} columns",
                format.name()
            );
            assert_eq!(beyond, "0", "{}", format.name());
        }
    }
    let (asked, _) = case(Format::Int8, 384, 1e3);
    assert_eq!(device_says(&compiler, None, &asked).0, "1", "an element beyond the range of f16");
    // Mutations that it must detect.
    let (asked, expected) = case(Format::Int4G128Zero, 384, 0.25);
    for (from, to) in [
        ("at / 2 * 4 + at % 2 * 16", "at * 4"),
        ("stored_half(scales + 2)", "8.f"),
        ("tile * units + first", "number * units"),
        ("1.f : factors[row]", "1.f : factors[0]"),
    ] {
        let (_, words) = device_says(&compiler, Some((from, to)), &asked);
        assert_ne!(words, expected.replace("32768", "0"), "nobody notices {to}");
    }
}

/// Three experts of a tile of eight rows each, of which the second has no tokens. They share the factors of their rows.
#[test]
fn experts_without_tokens_are_not_unpacked() {
    let Some(compiler) = crate::emulated::compiler() else { return };
    let format = Format::Int8;
    let cols = 384;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(3);
    let rows = 3 * TILE_ROWS;
    let stored: Vec<Vec<u8>> =
        (0..rows).map(|_| stored_row(format, cols as usize, 0, &mut random)).collect();
    let factors: Vec<f32> = (0..TILE_ROWS).map(|row| 0.25 * (1 + row) as f32).collect();
    let halves = stored.iter().enumerate().map(|(row, stored)| {
        let mut values = vec![0.0; cols as usize];
        ir::decode(format.stored(), stored, &mut values);
        let factor = if row / TILE_ROWS == 1 { 0.0 } else { factors[row % TILE_ROWS] };
        values.iter().flat_map(|value| f16::from_f32(value * factor).to_le_bytes()).collect()
    });
    let halves: Vec<Vec<u8>> = halves.collect();
    let codes = packed(format, cols, &stored);
    let units = [format, Format::F16].map(|format| format.units_per_tile(cols));
    let numbers = [format.unpack() as u32, units[0], units[1], 3, TILE_ROWS as u32];
    let mut asked = numbers.map(|number| number.to_string()).join(" ");
    let _ = write!(asked, " {} ", codes.len());
    factors.iter().for_each(|factor| _ = write!(asked, "{} ", factor.to_bits()));
    codes.iter().for_each(|byte| _ = write!(asked, "{byte} "));
    let words = packed(Format::F16, cols, &halves);
    let words = words.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word).to_string());
    let expected = words.collect::<Vec<_>>().join(" ").replace("32768", "0");
    let routes = 1 << abi::Feature::Route as u32;
    assert_eq!(feature_says(&compiler, routes, None, &asked).1, expected);
    for (from, to) in [
        ("counts[tile / expert_tiles] == 0", "counts[0] == 0"),
        ("tile % expert_tiles * AMK_UNIT_ROWS", "tile * AMK_UNIT_ROWS"),
    ] {
        let (_, words) = feature_says(&compiler, routes, Some((from, to)), &asked);
        assert_ne!(words, expected, "nobody notices {to}");
    }
}
