//! The order in which packed matrices are streamed, their division into pieces, and the packing of a piece.

use ir::TensorId;
use ir::program::Matrix;

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
    /// Divides the matrices of a program into pieces.
    pub(crate) fn new(matrices: &[Matrix]) -> Result<Self, HostError> {
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
            for tile0 in (0..matrix.tiles()).step_by(step as usize) {
                let tiles = step.min(matrix.tiles() - tile0);
                watermark += tiles * matrix.units_per_tile();
                let reads = reads(matrix, tile0, tiles);
                pieces.push(Piece { matrix: index, tile0, tiles, end: watermark, reads });
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

    pub(crate) fn packed_offset(&self, piece: &Piece) -> u64 {
        u64::from(piece.tile0) * self.matrices[piece.matrix].tile_bytes() as u64
    }

    /// The value of `watermark` once piece `index` is on the device.
    pub(crate) fn watermark_behind(&self, index: usize) -> u32 {
        if index + 1 == self.pieces.len() { abi::WATERMARK_ALL } else { self.pieces[index].end }
    }

    pub(crate) fn largest(&self) -> usize {
        self.pieces.iter().map(|piece| self.packed_bytes(piece)).max().unwrap_or(0)
    }
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

/// Packs tiles. `row` returns a stored row; missing rows are zero.
pub(crate) fn pack<'a>(
    matrix: &Matrix,
    piece: &Piece,
    row: impl Fn(TensorId, u32) -> &'a [u8],
    out: &mut [u8],
) {
    let tile_bytes = matrix.tile_bytes();
    for (tile, out) in (piece.tile0..).zip(out.chunks_exact_mut(tile_bytes)) {
        let rows = std::array::from_fn(|inner| {
            let found = matrix.map.locate(tile * abi::UNIT_ROWS + inner as u32);
            found.map_or(&[][..], |(tensor, index)| row(tensor, index))
        });
        matrix.format.pack(&rows, out);
    }
}
