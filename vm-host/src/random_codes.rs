//! Random codes with scales, as stored rows and packed, for tests of device code.

use half::f16;
use ir::{CodeBlock, Format, Scales, TILE_ROWS};
use rand::{RngExt, rngs::Xoshiro256PlusPlus};

/// A row of codes, each group with a scale of its own; `same` numbers the scales that rows of a tile share.
pub(crate) fn stored_row(
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
        if block.scales == Scales::Factors {
            let mut half =
                |most: f32| f16::from_f32(random.random_range(-most..most)).to_le_bytes();
            // The factors are random bytes.
            constants[..2].copy_from_slice(&half(0.01));
            constants[2..4].copy_from_slice(&half(0.05));
            continue;
        }
        for (group, constants) in constants.chunks_mut(block.group_scale_bytes()).enumerate() {
            match block.scales {
                Scales::Shared => {
                    let scale = 1e-3 * (same + number + 1) as f32;
                    constants.copy_from_slice(&scale.to_le_bytes());
                }
                Scales::Powers => constants[0] = random.random_range(118..126),
                Scales::Each | Scales::WithZeros | Scales::Factors => {
                    let scale = random.random_range(-0.1..0.1_f32) * (group + 1) as f32;
                    constants[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
                }
            }
            if block.scales == Scales::WithZeros {
                let zero = f16::from_f32(f32::from(random.random_range(0..16_u8)));
                constants[2..].copy_from_slice(&zero.to_le_bytes());
            }
        }
    }
    row
}

/// The tiles of a matrix, packed.
pub(crate) fn packed(format: Format, cols: u32, rows: &[Vec<u8>]) -> Vec<u8> {
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
