//! The loops that multiply a task's fragments (fragments.cuh), compiled as host C++: rows of tasks of many shapes, in stages as the host lays them
//! out, against the decoder of stored rows; and that every warp gives back every stage, once.

use std::fmt::Write as _;

use abi::Unpack;
use half::f16;
use ir::program::staging::Staging;
use ir::{DType, Format, TILE_ROWS};
use rand::{RngExt, SeedableRng, rngs::Xoshiro256PlusPlus};

use crate::compile::share_bits;
use crate::emulated::{compiler, run_text, source_text};
use crate::random_codes::{packed, stored_row};

/// Units of a tile, and of a stage at most. Some warps have none of the first ones; those after have some of each chunk.
const SHORT: [(u32, u32); 6] = [(1, 64), (3, 64), (8, 64), (5, 30), (60, 64), (67, 64)];
const FULL: [(u32, u32); 6] = [(18, 64), (10, 24), (24, 64), (32, 64), (64, 64), (112, 64)];
const TILES: [u32; 4] = [1, 2, 5, 19];

/// A kernel: its formats, and the tasks' shapes.
struct Kernel<'a> {
    formats: &'a [Format],
    shapes: &'a [(u32, u32)],
}

/// The input of fragments.cpp for a task, and the sums of its rows with those of the products' magnitudes.
fn task(format: Format, staging: &Staging, units: u32, tiles: u32) -> (String, Vec<(f64, f64)>) {
    let cols = units * format.unit_cols();
    let mut random = Xoshiro256PlusPlus::seed_from_u64(u64::from(units * 64 + tiles));
    let mut row = || {
        if format.is_scaled() {
            return stored_row(format, cols as usize, 7, &mut random);
        }
        let mut element = || f16::from_f32(random.random_range(-1.0..1.0)).to_le_bytes();
        (0..cols).flat_map(|_| element()).collect()
    };
    let different: Vec<Vec<Vec<u8>>> =
        (0..3).map(|_| (0..TILE_ROWS).map(|_| row()).collect()).collect();
    let vector: Vec<f32> = (0..cols).map(|_| random.random_range(-2.0..2.0)).collect();
    let Staging { stage_units, stage_tiles, warp_units, .. } = *staging;
    let bytes = stage_units * format.unit_bytes();
    let unpack = format.unpack() as u32;
    let mut asked = format!(
        "{unpack} {cols} {units} {stage_units} {stage_tiles} {warp_units} {tiles} {bytes} "
    );
    vector.iter().for_each(|v| _ = write!(asked, "{} ", v.to_bits()));
    for rows in &different {
        let tile = packed(format, cols, rows);
        let _ = write!(asked, "{} ", tile.len());
        tile.iter().for_each(|byte| _ = write!(asked, "{byte} "));
    }
    let product = |row: &Vec<u8>| {
        let mut values = vec![0.0; cols as usize];
        ir::decode(format.stored(), row, &mut values);
        let products = vector.iter().zip(&values).map(|(v, w)| f64::from(*v) * f64::from(*w));
        products.fold((0.0, 0.0), |(sum, most), p| (sum + p, most + p.abs()))
    };
    let rows: Vec<Vec<(f64, f64)>> =
        different.iter().map(|rows| rows.iter().map(product).collect()).collect();
    let expected = (0..tiles as usize).flat_map(|tile| rows[tile % 3].clone()).collect();
    (asked, expected)
}

impl Kernel<'_> {
    /// What it gets wrong.
    fn wrong(&self, compiler: &str, spoil: Option<(&str, &str)>) -> Option<String> {
        let scaled = self.formats.iter().any(|format| format.is_scaled());
        let mut shares = 0;
        let mut tasks = Vec::new();
        for (&format, &(units, most)) in
            self.formats.iter().flat_map(|format| self.shapes.iter().map(move |s| (format, s)))
        {
            let staging = Staging::new(units, most, scaled);
            shares |= share_bits(units, &staging);
            let of = |tiles| (format, units, tiles, task(format, &staging, units, tiles));
            tasks.extend(TILES.map(of));
        }
        let mut asked = format!("{} ", tasks.len());
        tasks.iter().for_each(|(.., (text, _))| asked += text);
        let mask = self.formats.iter().fold(1, |mask, format| mask | 1 << format.unpack() as u32);
        let of_formats: Vec<String> = (0..Unpack::ALL.len())
            .map(|number| if mask >> number & 1 != 0 { shares } else { 0 }.to_string())
            .collect();
        let defines = [
            format!("-DHOST_SPARE={}", u32::from(mask == 1)),
            format!("-DAMK_SHARES={shares}"),
            format!("-DAMK_FORMAT_SHARES={}", of_formats.join(",")),
            format!("-DAMK_UNPACK={mask}"),
            format!("-DAMK_DTYPE={}", DType::F16 as u32),
            "-DAMK_SEQS=1".to_owned(),
            "-DAMK_HEAD_DIM=64".to_owned(),
        ];
        let sources = ["amk_abi.h", "prelude.cuh", "unpack.cuh", "digits.cuh", "unit_products.cuh"];
        let text = source_text(&sources) + "\nSTAGED_TASK\n" + &source_text(&["fragments.cuh"]);
        let said = run_text(compiler, "fragments", (&text, &defines), spoil, &asked);
        let mut lines = said.lines();
        for (format, units, tiles, (_, expected)) in &tasks {
            let line = lines.next().unwrap_or_default();
            let rows: Vec<f64> = line.split_whitespace().map_while(|v| v.parse().ok()).collect();
            let near = |(actual, (value, most)): (&f64, &(f64, f64))| {
                (actual - value).abs() <= most * 2_f64.powi(-11)
            };
            if rows.len() != expected.len() || !rows.iter().zip(expected).all(near) {
                let name = format.name();
                return Some(format!("{tiles} tiles of {units} units of {name}: {line}"));
            }
        }
        None
    }
}

const PLAIN: [Format; 1] = [Format::F16];
const CODES: [Format; 3] = [Format::F16, Format::E4m3G64, Format::Int4G128];

#[test]
fn rows_of_fragments_are_the_products_of_their_values() {
    let Some(compiler) = compiler() else { return };
    for formats in [&PLAIN[..], &CODES] {
        for shapes in [&SHORT[..], &FULL] {
            if let Some(what) = (Kernel { formats, shapes }).wrong(&compiler, None) {
                panic!("{what}");
            }
        }
    }
}

#[test]
fn mutations_of_fragments_are_noticed() {
    let Some(compiler) = compiler() else { return };
    let (short, full) =
        (Kernel { formats: &CODES, shapes: &SHORT }, Kernel { formats: &CODES, shapes: &FULL });
    for (kernel, from, to) in [
        // What some warps read in the place of units that they have not.
        (&short, "#if AMK_SHARES & 3", "#if 0"),
        (&short, "left > TAKE + (one ? 1 : 0)", "left > TAKE"),
        (&full, "FORMAT_SHARES[unpack] >> warp_units", "FORMAT_SHARES[unpack + 1] >> warp_units"),
        (&full, "unit += F::TILES * k.chunk * unit_bytes(UNPACK)", "unit += 0"),
        (&full, "x.template load<1>(w, k, chunk)", "x.template load<0>(w, k, chunk)"),
        (&full, "x[BOTH ? PART * F::EACH : 0]", "x[0]"),
        (&short, "::BOTH || k.chunks > 1", "::BOTH"),
        (&full, "part += SETS * F::TILES * TILE_PARTS", "part += F::TILES * TILE_PARTS"),
    ] {
        let wrong = kernel.wrong(&compiler, Some((from, to)));
        assert!(wrong.is_some(), "nobody notices {to} for {from}");
    }
}
