//! Weights of several sequences, compiled as host C++: their products against the packer and the decoder of stored rows, and what the loader copies.

use std::fmt::Write as _;

use abi::Unpack;
use half::f16;
use ir::program::staging::Staging;
use ir::{DType, Format, TILE_ROWS};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::emulated::{compiler, run};
use crate::random_codes::{packed, stored_row};

/// Columns: of one unit of the longest format, of a whole part, with padding, and of several parts of which the last is short.
const COLUMNS: [u32; 4] = [128, 2048, 416, 4480];

/// Products of rows with vectors: their values, and the sums of the magnitudes.
type Products = Vec<(f64, f64)>;

/// The input of batch_products.cpp, and each row's product with each sequence's vector.
fn case(format: Format, cols: u32, group: u32, seqs: usize) -> (String, Products) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(cols));
    let mut row = || {
        if format.is_scaled() {
            return stored_row(format, cols as usize, 7, &mut random);
        }
        let mut element = || f16::from_f32(random.random_range(-1.0..1.0)).to_le_bytes();
        (0..cols).flat_map(|_| element()).collect()
    };
    let rows: Vec<Vec<u8>> = (0..TILE_ROWS).map(|_| row()).collect();
    let (units, operands) = (format.units_per_tile(cols), format.operand_units());
    let staging = Staging::seqs(units, abi::STAGE_UNITS_MAX, [operands, group]);
    let part = if staging.tile_parts == 1 { units } else { staging.stage_units };
    // Some are beyond the range of f16, and some so small that it has few bits of them.
    let most = match cols {
        128 => 4e5,
        2048 => 1e-3,
        _ => 2.0,
    };
    let vectors: Vec<f32> =
        (0..seqs * cols as usize).map(|_| random.random_range(-most..most)).collect();
    let mut asked = format!("{} {cols} {units} {part} ", format.unpack() as u32);
    vectors.iter().for_each(|v| _ = write!(asked, "{} ", v.to_bits()));
    let tile = packed(format, cols, &rows);
    let _ = write!(asked, "{} ", tile.len());
    tile.iter().for_each(|byte| _ = write!(asked, "{byte} "));
    let values: Vec<Vec<f32>> = rows
        .iter()
        .map(|row| {
            let mut values = vec![0.0; cols as usize];
            ir::decode(format.stored(), row, &mut values);
            values
        })
        .collect();
    let product = |(vector, row): (&[f32], &Vec<f32>)| {
        let products = vector.iter().zip(row).map(|(v, w)| f64::from(*v) * f64::from(*w));
        products.fold((0.0, 0.0), |(sum, most), p| (sum + p, most + p.abs()))
    };
    let expected = vectors
        .chunks(cols as usize)
        .flat_map(|vector| values.iter().map(move |row| product((vector, row))))
        .collect();
    (asked, expected)
}

/// A program that multiplies tiles by vectors: its name, its device sources, and the bits to which its products are right.
pub(crate) struct Multiplier {
    pub(crate) program: &'static str,
    pub(crate) sources: &'static [&'static str],
    pub(crate) bits: i32,
}

/// What the host reserves for a unit's part of a vector that is staged as integers, by the number of what unpacks it.
fn staged_bytes() -> String {
    let of = |number: u32| {
        let mut all = Format::ALL.iter().filter(|format| format.has_digits());
        all.find(|format| format.unpack() as u32 == number).map_or(0, |format| format.digit_bytes())
    };
    let last = Format::ALL.iter().map(|format| format.unpack() as u32).max().unwrap_or(0);
    (0..=last).map(|number| of(number).to_string()).collect::<Vec<_>>().join(",")
}

impl Multiplier {
    /// What it gets wrong of products with `seqs` vectors, in a kernel that has all of these formats.
    pub(crate) fn wrong(
        &self,
        compiler: &str,
        formats: &[Format],
        seqs: usize,
        spoil: Option<(&str, &str)>,
    ) -> Option<String> {
        let mask = formats.iter().fold(1 << Unpack::None as u32, |m, f| m | 1 << f.unpack() as u32);
        let group = formats.iter().map(|format| format.operand_units()).max().unwrap_or(1);
        let cases: Vec<(Format, u32, (String, Products))> = formats
            .iter()
            .flat_map(|&format| COLUMNS.map(|cols| (format, cols)))
            .filter(|(format, cols)| {
                format.stored().block().is_none_or(|block| cols.is_multiple_of(block.group))
            })
            .map(|(format, cols)| (format, cols, case(format, cols, group, seqs)))
            .collect();
        let mut asked = format!("{} ", cases.len());
        cases.iter().for_each(|(.., (text, _))| asked += text);
        let defines = [
            format!("-DHOST_DIGIT_BYTES={}", staged_bytes()),
            format!("-DAMK_UNPACK={mask}"),
            format!("-DAMK_DTYPE={}", DType::F16 as u32),
            format!("-DAMK_SEQS={seqs}"),
        ];
        let said = run(compiler, self.program, (self.sources, &defines), spoil, &asked);
        let mut lines = said.lines();
        for (format, cols, (_, expected)) in &cases {
            let row = lines.next().unwrap_or_default().split_whitespace();
            let row: Vec<f64> = row.filter_map(|word| word.parse().ok()).collect();
            let near = |(actual, (value, most)): (&f64, &(f64, f64))| {
                (actual - value).abs() <= most * 2_f64.powi(-self.bits)
            };
            if row.len() != expected.len() || !row.iter().zip(expected).all(near) {
                let name = format.name();
                return Some(format!("{name} of {cols} columns: {row:?}, expected {expected:?}"));
            }
        }
        None
    }
}

/// Whether the device's products with the vectors of several sequences are wrong.
fn wrong(
    compiler: &str,
    formats: &[Format],
    seqs: usize,
    spoil: Option<(&str, &str)>,
) -> Option<String> {
    let sources = &["amk_abi.h", "prelude.cuh", "unpack.cuh", "batch_products.cuh"];
    let batch = Multiplier { program: "batch_products", sources, bits: 18 };
    batch.wrong(compiler, formats, seqs, spoil)
}

#[test]
fn codes_times_the_vectors_of_several_sequences_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    let of = |formats: &[Format], seqs| {
        if let Some(what) = wrong(&compiler, formats, seqs, None) {
            panic!("{seqs} sequences, {formats:?}: {what}");
        }
    };
    of(&[Format::F16], 8);
    let bytes = [Format::F16, Format::E4m3, Format::Int8, Format::E4m3G64, Format::Int8G32];
    of(&bytes, 8);
    of(&[Format::F16, Format::Int8, Format::Int4G128, Format::Int4G128Zero, Format::Mxfp4], 4);
    let all: Vec<Format> =
        Format::ALL.iter().copied().filter(|format| format.is_scaled()).collect();
    of(&all, 2);
}

/// What is wrong with the device's products of one sequence.
fn wrong_alone(compiler: &str, formats: &[Format], spoil: Option<(&str, &str)>) -> Option<String> {
    let sources = &["amk_abi.h", "prelude.cuh", "unpack.cuh", "digits.cuh", "unit_products.cuh"];
    // The smallest vectors have about ten bits in f16, and their low halves none.
    Multiplier { program: "unit_products", sources, bits: 13 }.wrong(compiler, formats, 1, spoil)
}

/// Formats without digits, which have tests of their own; alone, and in a kernel with all others.
#[test]
fn codes_times_a_vector_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    let all: Vec<Format> = Format::ALL
        .iter()
        .copied()
        .filter(|format| format.is_scaled() && !format.has_digits())
        .collect();
    for formats in [&[Format::E4m3G64Row][..], &[Format::Mxfp4], &all] {
        if let Some(what) = wrong_alone(&compiler, formats, None) {
            panic!("{formats:?}: {what}");
        }
    }
}

#[test]
fn mutations_of_the_products_of_one_sequence_are_noticed() {
    let Some(compiler) = compiler() else { return };
    let formats = [Format::Int8, Format::E4m3G64, Format::E4m3G64Row, Format::Mxfp4];
    for (from, to) in [
        ("group < 3 ? scales[0]", "group < 4 ? scales[0]"),
        ("0x8e008e00u, rest", "0x0e000e00u, rest"),
        ("sum[2] = fmaf(scale, halves_sum(c[2], c[3]), sum[2])", "sum[2] = sum[0]"),
        ("second[n] *= E2M1_CODE", "second[n] *= 1.f"),
        ("__shfl_down_sync(~0u, second[n], 1)", "0.f"),
        ("scale_stride(unpack) == 0 ? 16", "scale_stride(unpack) == 0 ? 0"),
        ("high + low; }", "low; }"),
    ] {
        assert!(
            wrong_alone(&compiler, &formats, Some((from, to))).is_some(),
            "nobody notices {to} for {from}"
        );
    }
}

#[test]
fn mutations_of_the_products_of_several_sequences_are_noticed() {
    let Some(compiler) = compiler() else { return };
    let formats = [Format::F16, Format::Int8, Format::Int4G128Zero, Format::Int4G32];
    for (from, to) in [
        ("HIGH_CODE / LOW_CODE", "1.f"),
        ("w.thread % 4 * 2 * scale_stride", "w.thread % 32 / 4 * scale_stride"),
        ("pair_row<UNPACK>(scales, row), scale, group)", "scales, scale, group)"),
        ("(n >> IN) * (AMK_WARPS << IN)", "n * AMK_WARPS"),
        (
            "x.sum[EXCESS_CODES ? s : 0] = rows_sum(c[0], c[2])",
            "x.sum[EXCESS_CODES ? s : 0] = c[0]",
        ),
        ("low_pair(v.x - b0.x, v.y - b0.y)", "element_pair(v.x - b0.x, v.y - b0.y)"),
    ] {
        assert!(
            wrong(&compiler, &formats, 8, Some((from, to))).is_some(),
            "nobody notices {to} for {from}"
        );
    }
}

/// The stages of a load, in the order in which op_matvec_batch multiplies them: bytes, then place, source and bytes of each copy.
fn stages(tiles: u32, units: u32, unit: u32, staging: &Staging) -> Vec<String> {
    let (part, parts) = (staging.stage_units, staging.tile_parts);
    let mut stages = Vec::new();
    for first in (0..tiles).step_by(abi::BATCH_TILES as usize) {
        let end = tiles.min(first + abi::BATCH_TILES);
        for turn in 0..parts {
            let odd = first / abi::BATCH_TILES % 2 == 1;
            let unit0 = if odd { parts - 1 - turn } else { turn } * part;
            let bytes = part.min(units - unit0) * unit;
            for tile in (first..end).step_by(staging.stage_tiles as usize) {
                let these = staging.stage_tiles.min(end - tile);
                let copy = |i| {
                    let from = (1 << 20) + ((tile + i) * units + unit0) * unit;
                    format!("{} {from} {bytes}, ", i * bytes)
                };
                let copies: String = (0..these).map(copy).collect();
                stages.push(format!("{}: {copies}", these * bytes));
            }
        }
    }
    stages
}

#[test]
fn stages_have_the_parts_of_tiles_in_the_order_in_which_they_are_multiplied() {
    let Some(compiler) = compiler() else { return };
    let (mut asked, mut expected) = (String::new(), Vec::new());
    for (format, operands) in [(Format::E4m3, 2), (Format::Int4G128, 4), (Format::F16, 1)] {
        for (tiles, units) in [(1, 112), (27, 64), (9, 65), (121, 128), (16, 30 * operands)] {
            let staging = Staging::seqs(units, 64, [operands, 4]);
            if staging.tile_parts == 1 {
                continue;
            }
            let Staging { stage_units, stage_tiles, .. } = staging;
            let unit = format.unit_bytes();
            asked += &format!("{tiles} {units} {stage_units} {unit} {stage_tiles}\n");
            expected.extend(stages(tiles, units, unit, &staging));
        }
    }
    let mask = [Unpack::None, Unpack::E4m3, Unpack::Int4G128];
    let mask = mask.iter().fold(0, |mask, &unpack| mask | 1 << unpack as u32);
    let says = |spoil| {
        let defines = [
            format!("-DAMK_UNPACK={mask}"),
            format!("-DAMK_DTYPE={}", DType::F16 as u32),
            "-DAMK_SEQS=8".to_owned(),
        ];
        let sources = ["prelude.cuh", "keys.cuh", "stream.cuh"];
        let said = run(&compiler, "batch_stream", (&sources, &defines), spoil, &asked);
        let lines = said.lines().filter(|line| !line.is_empty());
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(says(None), expected);
    for (from, to) in [
        ("parts - 1 - turn : turn", "turn : turn"),
        ("left < most ? left : most", "most"),
        ("MIXED ? tiles * units : units", "units"),
    ] {
        assert_ne!(says(Some((from, to))), expected, "nobody notices {to} for {from}");
    }
}
