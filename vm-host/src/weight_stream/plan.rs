//! The order in which packed matrices are streamed, their division into pieces, and the packing of a piece.

use std::ops::Range;

use half::f16;
use ir::program::Matrix;
use ir::{Format, TensorId};

use crate::devices::{Tiles, place};
use crate::error::HostError;

/// Bytes per packed piece, at most: one copy to the device. A tile that is longer is a piece of its own.
const PIECE_BYTES: u64 = 4 << 20;

/// Consecutive rows of a stored tensor in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorRows {
    pub(crate) tensor: TensorId,
    pub(crate) first: u32,
    pub(crate) rows: u32,
}

/// Consecutive whole tiles of a packed matrix on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) matrix: usize,
    pub(crate) tile0: u32,
    pub(crate) tiles: u32,
    /// Units that have arrived, in stream order, once this piece has.
    pub(crate) end: u32,
    /// The devices that it goes to, with its byte offset in what each has of the matrix.
    pub(crate) places: Vec<(usize, u64)>,
    /// Its source rows, each tensor once.
    pub(crate) reads: Vec<TensorRows>,
}

/// All pieces in stream order: the order of the matrices, which is that of their first use in a step, and within a matrix that of its tiles.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) pieces: Vec<Piece>,
    /// Per matrix: units that arrive before its first.
    pub(crate) starts: Vec<u32>,
}

impl Plan {
    /// Divides the matrices of a program into pieces. `devices`: the tiles that each device has. No tile is read twice, and a piece goes to
    /// the same devices with all of its tiles.
    pub(crate) fn new(matrices: &[Matrix], devices: &[Tiles]) -> Result<Self, HostError> {
        let units: u64 = matrices.iter().map(Matrix::units).sum();
        if units >= u64::from(abi::WATERMARK_ABANDONED) {
            return Err(HostError::Request(format!(
                "{units} units of weights; {} can be counted",
                abi::WATERMARK_ABANDONED
            )));
        }
        let (mut pieces, mut starts, mut watermark) = (Vec::new(), Vec::new(), 0);
        for (index, matrix) in matrices.iter().enumerate() {
            starts.push(watermark);
            let tile_bytes = matrix.tile_bytes() as u64;
            let step = (PIECE_BYTES / tile_bytes.max(1)).clamp(1, u64::from(u32::MAX)) as u32;
            for (tile0, tiles) in cuts(matrix.tiles(), step, devices.iter().map(|all| &all[index]))
            {
                watermark += tiles * matrix.units_per_tile();
                let places = places(devices, index, tile0, tile_bytes);
                if !places.is_empty() {
                    let reads = reads(matrix, tile0, tiles);
                    pieces.push(Piece {
                        matrix: index,
                        tile0,
                        tiles,
                        end: watermark,
                        places,
                        reads,
                    });
                }
            }
        }
        Ok(Self { matrices: matrices.to_vec(), pieces, starts })
    }

    pub(crate) fn packed_bytes(&self, piece: &Piece) -> usize {
        piece.tiles as usize * self.matrices[piece.matrix].tile_bytes()
    }

    pub(crate) fn stored_bytes(&self, piece: &Piece) -> u64 {
        let matrix = &self.matrices[piece.matrix];
        let rows: u64 = piece.reads.iter().map(|read| u64::from(read.rows)).sum();
        rows * matrix.format.row_bytes(matrix.cols) as u64
    }

    /// The value of `watermark` once piece `index` is on the device.
    pub(crate) fn watermark_behind(&self, index: usize) -> u32 {
        if index + 1 == self.pieces.len() { abi::WATERMARK_ALL } else { self.pieces[index].end }
    }

    pub(crate) fn largest(&self) -> usize {
        self.pieces.iter().map(|piece| self.packed_bytes(piece)).max().unwrap_or(0)
    }
}

/// Runs of at most `step` tiles, cut where a run of some device begins or ends.
fn cuts<'a>(
    tiles: u32,
    step: u32,
    runs: impl Iterator<Item = &'a Vec<Range<u32>>>,
) -> Vec<(u32, u32)> {
    let mut ends: Vec<u32> = runs.flatten().flat_map(|run| [run.start, run.end]).collect();
    ends.push(tiles);
    ends.sort_unstable();
    let (mut cuts, mut tile0) = (Vec::new(), 0);
    for end in ends {
        while tile0 < end {
            let count = step.min(end - tile0);
            cuts.push((tile0, count));
            tile0 += count;
        }
    }
    cuts
}

/// The devices that have a tile of a matrix, with its byte offset there.
fn places(devices: &[Tiles], matrix: usize, tile: u32, tile_bytes: u64) -> Vec<(usize, u64)> {
    let of = |(device, tiles): (usize, &Tiles)| {
        place(&tiles[matrix], tile, 1).map(|before| (device, before * tile_bytes))
    };
    devices.iter().enumerate().filter_map(of).collect()
}

/// The source rows of some tiles, by tensor. A map never goes back, so those of a tensor are one run.
fn reads(matrix: &Matrix, tile0: u32, tiles: u32) -> Vec<TensorRows> {
    let mut reads: Vec<TensorRows> = Vec::new();
    let last = ((tile0 + tiles) * abi::UNIT_ROWS).min(matrix.rows());
    for (tensor, row) in (tile0 * abi::UNIT_ROWS..last).filter_map(|row| matrix.map.locate(row)) {
        match reads.iter_mut().find(|read| read.tensor == tensor) {
            Some(read) => read.rows = row + 1 - read.first,
            None => reads.push(TensorRows { tensor, first: row, rows: 1 }),
        }
    }
    reads
}

/// Packs as many tiles as `out` has room for, from `tile0` on. `row` returns a stored row; missing rows are zero.
///
/// # Errors
/// If an element of bf16 has no f16 to be multiplied as.
pub(crate) fn pack<'a>(
    matrix: &Matrix,
    tile0: u32,
    row: impl Fn(TensorId, u32) -> &'a [u8],
    out: &mut [u8],
) -> Result<(), HostError> {
    let tile_bytes = matrix.tile_bytes();
    for (tile, out) in (tile0..).zip(out.chunks_exact_mut(tile_bytes)) {
        let rows = std::array::from_fn(|inner| {
            let found = matrix.map.locate(tile * abi::UNIT_ROWS + inner as u32);
            found.map_or(&[][..], |(tensor, index)| row(tensor, index))
        });
        matrix.format.pack(&rows, out);
        if matrix.format == Format::Bf16AsF16 && has_infinities(out) {
            let message = format!(
                "has an element beyond 65504, the largest f16, in which bf16 is multiplied beside codes and in models with vectors of more than \
                 {} elements: store its tensors as float32",
                abi::TWO_HALVES_MAX
            );
            return Err(HostError::Weights { path: matrix.name.clone(), message });
        }
    }
    Ok(())
}

/// Whether some f16 is infinite.
fn has_infinities(halves: &[u8]) -> bool {
    let infinite = |half: &[u8; 2]| u16::from_le_bytes(*half) & 0x7fff == f16::INFINITY.to_bits();
    // Without a branch for each, so that it costs little beside the packing.
    halves.as_chunks::<2>().0.iter().fold(false, |any, half| any | infinite(half))
}
