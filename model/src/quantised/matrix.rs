//! A matrix made of stored tensors, and its dequantised rows.

use half::{bf16, f16};
use ir::{DType, Scalar, decode, e8m0};

use super::blocks::BlockType;
use super::codes::{Codes, E4M3, Order, has_nan, nibble};
use super::nf4::Nf4;
use crate::parallel;
use crate::pieces::{Change, HeadOrder, Piece};
use crate::store::{Files, Place};

/// A matrix that is not stored as 32-bit floats, row-major.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    /// Those that are stored.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    pub(crate) view: View,
}

/// Which of the stored rows a matrix has, and their order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum View {
    /// All, as they lie.
    Whole,
    /// All; the two elements of a head of this width that are rotated together lie in neighbouring rows: GGUF of llama.
    Pairs(usize),
    /// `count` rows, each `step` after the one before; the rows of each head may lie in another order.
    Rows { first: usize, step: usize, count: usize, order: Option<HeadOrder> },
}

impl View {
    /// The rows of a stored matrix with the same width that a tensor is made of.
    pub(super) fn of(piece: &Piece, rows: u32) -> Self {
        let (first, step, order) = match &piece.change {
            Change::Strided(strided) => {
                // The stored rows are the columns of the strided form, whose elements are transposed.
                let each = u64::from(strided.shape[1]) * u64::from(strided.shape[2]);
                let first = strided.first / each * u64::from(strided.shape[2]);
                (first + strided.first % each, strided.row, None)
            }
            Change::Order(order) => (piece.first.into(), 1, Some(order.clone())),
            Change::None | Change::Affine { .. } => (piece.first.into(), 1, None),
        };
        Self::Rows { first: first as usize, step: step as usize, count: rows as usize, order }
    }
}

/// How a matrix is stored. Every format is a combination of these parts.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    /// Not quantised: floats of this type.
    Floats(Place, DType),
    /// Codes, of which groups share a scale and perhaps a zero point: `(code - zero) * scale`.
    Scaled { place: Place, codes: Codes, zeros: Zeros, scales: Scales },
    /// Blocks of GGUF.
    Blocks(Place, BlockType),
    /// nf4 of bitsandbytes.
    Nf4(Nf4),
}

/// The zero points of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Zeros {
    /// None: codes are values.
    None,
    /// One for all.
    All(f32),
    /// int4, plus this number.
    Int4(Place, Order, u8),
    /// int8 of codes that are stored with 8 added: `[rows, groups]`.
    Int8(Place),
}

/// The element type of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScaleType {
    Float(DType),
    E4m3,
    E8m0,
}

impl ScaleType {
    /// The type with this name in a safetensors header.
    pub(crate) fn of(element: &str) -> Option<Self> {
        match element {
            "F8_E4M3" => Some(Self::E4m3),
            "U8" | "F8_E8M0" => Some(Self::E8m0),
            _ => DType::ALL
                .iter()
                .find(|dtype| dtype.name().eq_ignore_ascii_case(element))
                .map(|&dtype| Self::Float(dtype)),
        }
    }

    /// The scale with this index.
    pub(crate) fn get(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::Float(dtype) => {
                let mut out = [0.0];
                decode(dtype, &bytes[index * dtype.bytes()..], &mut out);
                out[0]
            }
            Self::E4m3 => E4M3[usize::from(bytes[index])],
            Self::E8m0 => e8m0(bytes[index]),
        }
    }
}

/// The scales of a matrix: a grid over its rows and columns.
#[derive(Clone, Debug)]
pub(crate) struct Scales {
    pub(crate) place: Place,
    pub(crate) element: ScaleType,
    /// Rows that share a scale.
    pub(crate) rows_each: usize,
    /// Columns that share a scale; the last group may be shorter.
    pub(crate) cols_each: usize,
    /// Whether they lie as `[groups, rows]` rather than `[rows, groups]`.
    pub(crate) transposed: bool,
    /// Divides every scale.
    pub(crate) divisor: Option<f32>,
    /// The group of each column, if groups are not runs of columns.
    pub(crate) groups: Option<Vec<u32>>,
}

impl Scales {
    /// Groups along the columns.
    pub(crate) fn count(&self, cols: usize) -> usize {
        cols.div_ceil(self.cols_each)
    }

    fn get(&self, bytes: &[u8], size: (usize, usize), row: usize, group: usize) -> f32 {
        let (rows, cols) = size;
        let row = row / self.rows_each;
        let index = if self.transposed {
            group * rows.div_ceil(self.rows_each) + row
        } else {
            row * self.count(cols) + group
        };
        let scale = self.element.get(bytes, index);
        self.divisor.map_or(scale, |divisor| scale / divisor)
    }

    /// The scale of a stored row and a group of its columns.
    pub(crate) fn of_group(&self, files: &Files, matrix: &Matrix, row: usize, group: usize) -> f32 {
        self.get(files.slice(self.place), (matrix.rows, matrix.cols), row, group)
    }

    /// What is wrong with the first scale that is no number, that makes weights of such codes infinite, or that is
    /// negative where only damage is. AutoRound writes negative scales of integers.
    pub(crate) fn unsound(&self, files: &Files, codes: Codes, symmetric: bool) -> Option<String> {
        let bytes = files.slice(self.place);
        let size = match self.element {
            ScaleType::Float(dtype) => dtype.bytes(),
            ScaleType::E4m3 | ScaleType::E8m0 => 1,
        };
        let (greatest, signed) = (codes.greatest(symmetric), codes.has_signed_scales());
        let sound = |scale: f32| (scale * greatest).is_finite() && (signed || scale >= 0.0);
        let all = (0..bytes.len() / size).map(|index| (index, self.element.get(bytes, index)));
        let mut divided = all.map(|(i, scale)| (i, self.divisor.map_or(scale, |by| scale / by)));
        let (index, scale) = divided.find(|&(_, scale)| !sound(scale))?;
        let expected = if !scale.is_finite() {
            "finite numbers"
        } else if scale < 0.0 && !signed {
            "no negative numbers"
        } else {
            "scales of finite weights"
        };
        Some(format!("holds {scale} at index {index}; expected {expected}"))
    }
}

impl Zeros {
    pub(super) fn get(&self, files: &Files, size: (usize, usize), row: usize, group: usize) -> f32 {
        let (rows, groups) = size;
        match self {
            Self::None => 0.0,
            Self::All(zero) => *zero,
            Self::Int4(place, order, plus) => {
                let code = nibble(files.slice(*place), order.index(rows, groups, row, group));
                f32::from(code + plus)
            }
            Self::Int8(place) => {
                f32::from(files.slice(*place)[row * groups + group].cast_signed()) + 8.0
            }
        }
    }
}

impl Matrix {
    /// Dequantises one row, in f32 and in the order of the formats' definitions: `(code - zero) * scale`.
    pub(crate) fn dequantise_row(&self, files: &Files, row: usize, out: &mut [f32]) {
        let row = self.stored_row(row);
        match &self.layout {
            Layout::Floats(place, dtype) => {
                let at = row * self.cols * dtype.bytes();
                decode(*dtype, &files.slice(*place)[at..], out);
            }
            Layout::Scaled { place, codes, zeros, scales } => {
                codes.decode_row(files.slice(*place), self.rows, row, out);
                self.scale_row(files, zeros, scales, row, out);
            }
            Layout::Blocks(place, kind) => {
                let bytes = self.cols / kind.len() * kind.bytes();
                kind.dequantise(&files.slice(*place)[row * bytes..][..bytes], out);
            }
            Layout::Nf4(nf4) => nf4.dequantise_row(files, row, out),
        }
    }

    /// One row of blocks of GGUF, in blocks of a type that holds their codes.
    pub(super) fn recode_row(&self, files: &Files, row: usize, dtype: DType, out: &mut [u8]) {
        if let Layout::Blocks(place, kind) = self.layout {
            let bytes = self.cols / kind.len() * kind.bytes();
            let stored = &files.slice(place)[self.stored_row(row) * bytes..][..bytes];
            kind.recode(stored, dtype, out);
        }
    }

    /// Rows of the matrix.
    pub(crate) fn given_rows(&self) -> usize {
        match self.view {
            View::Whole | View::Pairs(_) => self.rows,
            View::Rows { count, .. } => count,
        }
    }

    /// Where a row is stored.
    pub(super) fn stored_row(&self, row: usize) -> usize {
        match &self.view {
            View::Whole => row,
            &View::Pairs(width) => {
                let (head, element) = (row / width, row % width);
                let (half, pair) = (element / (width / 2), element % (width / 2));
                head * width + 2 * pair + half
            }
            View::Rows { first, step, order, .. } => {
                first + step * order.as_ref().map_or(row, |order| order.source(row))
            }
        }
    }

    /// The first stored row, if the rows lie one after the other.
    pub(super) fn run(&self) -> Option<usize> {
        match self.view {
            View::Whole => Some(0),
            View::Rows { first, step: 1, order: None, .. } => Some(first),
            View::Pairs(_) | View::Rows { .. } => None,
        }
    }

    /// The rows of elements of `row_bytes`, in their order.
    pub(super) fn gather(&self, stored: &[u8], row_bytes: usize) -> Vec<u8> {
        let rows = (0..self.given_rows()).map(|row| self.stored_row(row) * row_bytes);
        rows.flat_map(|at| &stored[at..at + row_bytes]).copied().collect()
    }

    /// What is wrong with the codes: NaN of e4m3, or a block's scale. This reads them once.
    pub(crate) fn damage(&self, files: &Files) -> Option<String> {
        match self.layout {
            Layout::Scaled { place, codes: Codes::E4m3, .. } => has_nan(files.slice(place)).then(|| {
                "holds the e4m3 code of NaN (0x7f or 0xff); expected numbers. The file is damaged".to_owned()
            }),
            Layout::Blocks(place, kind) => kind.unsound(files.slice(place)).map(|block| {
                format!("has a scale in block {block} that is not finite; expected numbers. The file is damaged")
            }),
            Layout::Floats(..) | Layout::Scaled { .. } | Layout::Nf4(_) => None,
        }
    }

    /// The bytes that [`damage`](Self::damage) reads.
    pub(crate) fn checked_bytes(&self) -> u64 {
        match self.layout {
            Layout::Scaled { place, codes: Codes::E4m3, .. } | Layout::Blocks(place, _) => {
                place.bytes
            }
            Layout::Floats(..) | Layout::Scaled { .. } | Layout::Nf4(_) => 0,
        }
    }

    fn scale_row(
        &self,
        files: &Files,
        zeros: &Zeros,
        scales: &Scales,
        row: usize,
        out: &mut [f32],
    ) {
        let bytes = files.slice(scales.place);
        let count = scales.count(self.cols);
        let pair = |group: usize| {
            let zero = zeros.get(files, (self.rows, count), row, group);
            (zero, scales.get(bytes, (self.rows, self.cols), row, group))
        };
        if let Some(groups) = &scales.groups {
            let pairs: Vec<_> = (0..count).map(pair).collect();
            for (out, &group) in out.iter_mut().zip(groups) {
                let (zero, scale) = pairs[group as usize];
                *out = (*out - zero) * scale;
            }
            return;
        }
        for (group, out) in out.chunks_mut(scales.cols_each).enumerate() {
            let (zero, scale) = pair(group);
            for out in out {
                // Without a zero point this subtracts zero, which keeps every value and the sign of zero.
                *out = (*out - zero) * scale;
            }
        }
    }

    /// All rows, as little-endian f32.
    pub(crate) fn dequantise(&self, files: &Files, dtype: DType) -> Vec<u8> {
        let row_bytes = dtype.row_bytes(self.cols);
        let mut out = vec![0; self.given_rows() * row_bytes];
        parallel::fill(&mut out, row_bytes, &parallel::threads, |first, out| {
            let mut values = vec![0.0; self.cols];
            for (row, out) in out.chunks_mut(row_bytes).enumerate() {
                self.dequantise_row(files, first + row, &mut values);
                let elements = out.chunks_exact_mut(dtype.bytes()).zip(&values);
                match dtype.scalar() {
                    Scalar::F16 => elements.for_each(|(out, &value)| {
                        out.copy_from_slice(&f16::from_f32(value).to_le_bytes());
                    }),
                    Scalar::Bf16 => elements.for_each(|(out, &value)| {
                        out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                    }),
                    Scalar::F32 | Scalar::E4m3 | Scalar::Int8 | Scalar::Int4 | Scalar::E2m1 => {
                        elements.for_each(|(out, value)| out.copy_from_slice(&value.to_le_bytes()));
                    }
                }
            }
        });
        out
    }
}
