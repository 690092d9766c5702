//! The kernel that unpacks codes, compiled as host C++, against the packer and the decoder of stored rows.

use std::fmt::Write as _;

use half::f16;
use ir::{CodeBlock, DType, Format, TILE_ROWS};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

const ROWS: usize = 13;

/// A row of codes, each group with a scale of its own; `same` numbers the scales that rows of a tile share.
fn stored_row(
    format: Format,
    cols: usize,
    same: usize,
    random: &mut Xoshiro256PlusPlus,
) -> Vec<u8> {
    let mut row: Vec<u8> = (0..format.row_bytes(cols as u32)).map(|_| random.random()).collect();
    let e4m3 = format.stored().scalar() == ir::Scalar::E4m3;
    // No code of e4m3 that is no number.
    row.iter_mut().filter(|byte| e4m3 && **byte & 0x7f == 0x7f).for_each(|byte| *byte ^= 1);
    let Some(block) = format.stored().block() else { return row };
    for (number, bytes) in row.chunks_mut(block.bytes()).enumerate() {
        let (_, constants) = bytes.split_at_mut(CodeBlock::CODE_BYTES);
        for (group, constants) in constants.chunks_mut(block.group_scale_bytes()).enumerate() {
            if block.shared {
                let scale = 1e-3 * (same + number + 1) as f32;
                constants.copy_from_slice(&scale.to_le_bytes());
                continue;
            }
            if block.powers {
                constants[0] = random.random_range(118..126);
                continue;
            }
            let scale = f16::from_f32(random.random_range(-0.1..0.1_f32) * (group + 1) as f32);
            constants[..2].copy_from_slice(&scale.to_le_bytes());
            if block.zeros {
                let zero = f16::from_f32(f32::from(random.random_range(0..16_u8)));
                constants[2..].copy_from_slice(&zero.to_le_bytes());
            }
        }
    }
    row
}

/// The tiles of a matrix, packed.
fn packed(format: Format, cols: u32, rows: &[Vec<u8>]) -> Vec<u8> {
    let tile_bytes = (format.units_per_tile(cols) * format.unit_bytes()) as usize;
    let pack = |tile: &[Vec<u8>]| {
        let rows: [&[u8]; TILE_ROWS] =
            std::array::from_fn(|row| tile.get(row).map_or(&[][..], |row| &row[..]));
        let mut out = vec![0; tile_bytes];
        format.pack(&rows, &mut out);
        out
    };
    rows.chunks(TILE_ROWS).flat_map(pack).collect()
}

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
    let sources = ["amk_abi.h", "prelude.cuh", "unpack.cuh", "prefill_unpack.cuh"];
    let defines = [
        format!("-DAMK_UNPACK={}", (1 << abi::Unpack::ALL.len()) - 1),
        format!("-DAMK_DTYPE={}", DType::F16 as u32),
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
