//! Codes with a scale for each group of columns, as they are streamed: in blocks, with their scales behind them.

use half::f16;
use ir::{CodeBlock, DType, Scalar, Scales as Scaling};

use super::codes::{Codes, nibble};
use super::matrix::{Layout, Matrix, ScaleType, Scales, Zeros};
use crate::parallel;
use crate::store::{Files, Place};

/// A matrix of codes in blocks, made when it is first read.
#[derive(Clone, Debug)]
pub(crate) struct Grouped {
    matrix: Matrix,
    dtype: DType,
    block: CodeBlock,
    /// A power of two for each row, by which its scales are divided: then they are exact in f16. 1 for those in f32 and for powers.
    pub(super) factors: Vec<f32>,
}

/// The parts of a layout of scaled codes.
struct Parts<'a> {
    place: Place,
    codes: Codes,
    zeros: &'a Zeros,
    scales: &'a Scales,
}

impl Grouped {
    /// Matrices of one size in the same blocks and with the same factors, if there are blocks for their groups and their
    /// scales are exact in them.
    pub(super) fn together(matrices: &[&Matrix], files: &Files) -> Option<Vec<Self>> {
        let (dtype, block) = block_of(matrices.first()?, files)?;
        let alike = |matrix: &&Matrix| block_of(matrix, files) == Some((dtype, block));
        if !matrices.iter().all(alike) {
            return None;
        }
        let of = |matrix: &&Matrix| Self {
            matrix: (*matrix).clone(),
            dtype,
            block,
            factors: Vec::new(),
        };
        let mut all: Vec<Self> = matrices.iter().map(of).collect();
        let rows = matrices.iter().map(|matrix| matrix.given_rows()).max().unwrap_or(0);
        let factors = (0..rows).map(|row| Self::factor(&all, files, row));
        let factors: Vec<f32> = factors.collect::<Option<_>>()?;
        all.iter_mut().for_each(|one| one.factors.clone_from(&factors));
        Some(all)
    }

    /// A matrix of blocks of GGUF in blocks of this type, if its own can be written so.
    pub(super) fn recoded(matrix: &Matrix, dtype: DType) -> Option<Self> {
        let block = dtype.block()?;
        let factors = vec![1.0; matrix.given_rows()];
        Some(Self { matrix: matrix.clone(), dtype, block, factors })
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// The power of two that makes the scales of a row of all of them exact in f16, if one does.
    fn factor(all: &[Self], files: &Files, row: usize) -> Option<f32> {
        let block = all.first()?.block;
        if matches!(block.scales, Scaling::Shared | Scaling::Powers | Scaling::Factors) {
            return Some(1.0);
        }
        let mut scales = Vec::new();
        for one in all {
            let (parts, row) = (parts(&one.matrix)?, one.matrix.stored_row(row));
            let scale = |group| parts.scales.of_group(files, &one.matrix, row, group);
            scales.extend((0..parts.scales.count(one.matrix.cols)).map(scale));
        }
        let largest = scales.iter().fold(0.0, |most: f32, scale| most.max(scale.abs()));
        // Its own power of two: 1 for a row of zeros, and for those so small that dividing by it would not be exact.
        let power = f32::from_bits(largest.to_bits() & 0x7f80_0000);
        let factor = if power > 0.0 { power } else { 1.0 };
        let exact = |scale: f32| f16::from_f32(scale / factor).to_f32() * factor == scale;
        scales.into_iter().all(exact).then_some(factor)
    }

    /// All rows.
    pub(super) fn encode(&self, files: &Files) -> Vec<u8> {
        let row_bytes = self.dtype.row_bytes(self.matrix.cols);
        let mut out = vec![0; self.matrix.given_rows() * row_bytes];
        parallel::fill(&mut out, row_bytes, &parallel::threads, |first, out| {
            let mut values = vec![0.0; self.matrix.cols];
            for (row, out) in (first..).zip(out.chunks_mut(row_bytes)) {
                self.encode_row(files, row, &mut values, out);
            }
        });
        out
    }

    fn encode_row(&self, files: &Files, row: usize, values: &mut [f32], out: &mut [u8]) {
        let Some(parts) = parts(&self.matrix) else {
            self.matrix.recode_row(files, row, self.dtype, out);
            return;
        };
        let (block, cols, factor) = (self.block, self.matrix.cols, self.factors[row]);
        let (codes, group) = (block.codes as usize, block.group as usize);
        let row = self.matrix.stored_row(row);
        parts.codes_of(files, &self.matrix, row, values);
        for (at, out) in out.chunks_exact_mut(block.bytes()).enumerate() {
            let (code_bytes, constants) = out.split_at_mut(CodeBlock::CODE_BYTES);
            parts.put_codes(&values[at * codes..cols.min((at + 1) * codes)], code_bytes);
            for (n, out) in constants.chunks_exact_mut(block.group_scale_bytes()).enumerate() {
                let column = at * codes + n * group;
                if column < cols {
                    let [scale, zero] = parts.constants(files, &self.matrix, row, column);
                    self.put_constants(scale / factor, zero, out);
                }
            }
        }
    }

    fn put_constants(&self, scale: f32, zero: f32, out: &mut [u8]) {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        match self.block.scales {
            Scaling::Shared => out.copy_from_slice(&scale.to_le_bytes()),
            Scaling::Powers => out[0] = (scale.to_bits() >> 23) as u8,
            Scaling::Each | Scaling::Factors => out.copy_from_slice(&half(scale)),
            Scaling::WithZeros => {
                out[..2].copy_from_slice(&half(scale));
                out[2..].copy_from_slice(&half(zero));
            }
        }
    }
}

fn parts(matrix: &Matrix) -> Option<Parts<'_>> {
    match &matrix.layout {
        Layout::Scaled { place, codes, zeros, scales } if scales.groups.is_none() => {
            Some(Parts { place: *place, codes: *codes, zeros, scales })
        }
        Layout::Floats(..) | Layout::Scaled { .. } | Layout::Blocks(..) | Layout::Nf4(_) => None,
    }
}

/// The blocks that hold a matrix: those with the fewest scales whose groups do not cross the matrix's, and of those with
/// as many the ones that rows share.
fn block_of(matrix: &Matrix, files: &Files) -> Option<(DType, CodeBlock)> {
    let parts = parts(matrix)?;
    let scalar = parts.codes.scalar();
    let zeros = parts.needs_zeros(scalar, files, matrix)?;
    let wanted = match parts.scales.element {
        ScaleType::E8m0 => Scaling::Powers,
        ScaleType::Float(_) | ScaleType::E4m3 if zeros => Scaling::WithZeros,
        ScaleType::Float(_) | ScaleType::E4m3 => Scaling::Each,
    };
    let each = parts.scales.cols_each;
    // The rows of a tile share a scale only if no tile has rows of two groups, of two tensors or beyond the last.
    let whole = |rows: usize| rows.is_multiple_of(ir::TILE_ROWS);
    let alike = whole(parts.scales.rows_each)
        && whole(matrix.given_rows())
        && matrix.run().is_some_and(whole);
    let holds = |block: &CodeBlock| {
        let fits = each >= matrix.cols || each.is_multiple_of(block.group as usize);
        let shared = block.shared() && wanted == Scaling::Each && alike;
        fits && (block.scales == wanted || shared)
    };
    let of_scalar = DType::ALL.iter().filter(|dtype| dtype.scalar() == scalar);
    of_scalar
        .filter_map(|&dtype| Some((dtype, dtype.block().filter(holds)?)))
        .max_by_key(|(_, block)| (block.group, block.shared()))
}

impl Parts<'_> {
    /// Whether blocks must have zero points; none if no blocks hold such codes. GPTQ stores zero points that are all 8,
    /// which codes of 4 bits have without.
    fn needs_zeros(&self, scalar: Scalar, files: &Files, matrix: &Matrix) -> Option<bool> {
        let groups = self.scales.count(matrix.cols);
        let zero = |row, group| self.zeros.get(files, (matrix.rows, groups), row, group);
        match (self.zeros, scalar) {
            (Zeros::None, _) => (scalar != Scalar::Int4).then_some(false),
            (_, scalar) if scalar != Scalar::Int4 => None,
            (Zeros::All(zero), _) => Some(*zero != 8.0),
            (Zeros::Int4(..) | Zeros::Int8(_), _) => {
                Some((0..matrix.rows).any(|row| (0..groups).any(|group| zero(row, group) != 8.0)))
            }
        }
    }

    /// Scale and zero point of a column.
    fn constants(&self, files: &Files, matrix: &Matrix, row: usize, column: usize) -> [f32; 2] {
        let group = column / self.scales.cols_each;
        let zero = self.zeros.get(files, (matrix.rows, self.scales.count(matrix.cols)), row, group);
        [self.scales.of_group(files, matrix, row, group), zero]
    }

    /// The codes of a row, as numbers: those of 8 bits as they lie.
    fn codes_of(&self, files: &Files, matrix: &Matrix, row: usize, out: &mut [f32]) {
        let bytes = files.slice(self.place);
        match self.codes {
            Codes::E4m3 | Codes::Int8 => {
                let codes = &bytes[row * matrix.cols..][..matrix.cols];
                out.iter_mut().zip(codes).for_each(|(out, &code)| *out = f32::from(code));
            }
            Codes::Int4(_) => self.codes.decode_row(bytes, matrix.rows, row, out),
            Codes::E2m1 => {
                let code = |column| f32::from(nibble(bytes, row * matrix.cols + column));
                out.iter_mut().zip(0..).for_each(|(out, column)| *out = code(column));
            }
        }
    }

    /// Writes the codes of a block.
    fn put_codes(&self, codes: &[f32], out: &mut [u8]) {
        match self.codes {
            Codes::E4m3 | Codes::Int8 => {
                out.iter_mut().zip(codes).for_each(|(out, &code)| *out = code as u8);
            }
            Codes::Int4(_) | Codes::E2m1 => {
                for (out, pair) in out.iter_mut().zip(codes.chunks(2)) {
                    *out = pair[0] as u8 | pair.get(1).map_or(0, |&code| (code as u8) << 4);
                }
            }
        }
    }
}
