//! The codes of quantised weights: e4m3, e2m1, e8m0, int8 and int4, and the orders in which they lie in a file.
//!
//! All files are little-endian, so a word of eight int4 codes, the first in its lowest bits, is four bytes with the
//! lower nibble first. Every order of nibbles is then a function from row and column to the index of a nibble.
use ir::{Scalar, e2m1};

/// Values of the e4m3 codes ("fn": no infinities, 0x7f and 0xff are NaN), bias 7.
pub(crate) static E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = ir::e4m3(code as u8);
        code += 1;
    }
    values
};

/// Whether any of these e4m3 codes is NaN.
pub(crate) fn has_nan(codes: &[u8]) -> bool {
    // Without a branch inside a chunk, so that it is compiled to vector instructions.
    codes
        .chunks(4096)
        .any(|chunk| chunk.iter().fold(false, |any, code| any | (code & 0x7f == 0x7f)))
}

/// The nibble with this index, the lower half of a byte first.
pub(crate) fn nibble(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 2] >> (4 * (index % 2))) & 15
}

/// Place in a word of AWQ of each of its eight columns.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The order of int4 codes in a file, eight to a 32-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// compressed-tensors: words along the columns, `[rows, ceil(cols / 8)]`.
    AlongColumns,
    /// compressed-tensors' zero points: words along the rows, `[ceil(rows / 8), cols]`.
    AlongRows,
    /// GPTQ: the transpose of `AlongColumns`, `[cols / 8, rows]`.
    Gptq,
    /// AWQ: words along the rows, transposed and their columns interleaved, `[cols, rows / 8]`.
    Awq,
    /// GPTQ's zero points: as AWQ, in natural order.
    Transposed,
}

impl Order {
    /// Index of the nibble of an element of a `rows` by `cols` matrix.
    pub(crate) fn index(self, rows: usize, cols: usize, row: usize, col: usize) -> usize {
        match self {
            Self::AlongColumns => row * cols.next_multiple_of(8) + col,
            Self::AlongRows => (row / 8 * cols + col) * 8 + row % 8,
            Self::Gptq => (col / 8 * rows + row) * 8 + col % 8,
            Self::Awq => col * rows + row / 8 * 8 + AWQ_PLACES[row % 8],
            Self::Transposed => col * rows + row,
        }
    }

    /// Shape of the words of a `rows` by `cols` matrix.
    pub(crate) fn shape(self, rows: u64, cols: u64) -> [u64; 2] {
        match self {
            Self::AlongColumns => [rows, cols.div_ceil(8)],
            Self::AlongRows => [rows.div_ceil(8), cols],
            Self::Gptq => [cols.div_ceil(8), rows],
            Self::Awq | Self::Transposed => [cols, rows.div_ceil(8)],
        }
    }
}

/// How the codes of a matrix are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// One e4m3 a byte, row-major.
    E4m3,
    /// One two's complement integer a byte, row-major.
    Int8,
    /// Two e2m1 a byte, row-major, the lower nibble first.
    E2m1,
    /// Unsigned int4 in words.
    Int4(Order),
}

impl Codes {
    /// What a code is.
    pub(crate) fn scalar(self) -> Scalar {
        match self {
            Self::E4m3 => Scalar::E4m3,
            Self::Int8 => Scalar::Int8,
            Self::Int4(_) => Scalar::Int4,
            Self::E2m1 => Scalar::E2m1,
        }
    }

    /// The greatest magnitude of a code less its zero point, which is the middle code if they are symmetric.
    pub(crate) fn greatest(self, symmetric: bool) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::Int8 => 128.0,
            Self::Int4(_) if symmetric => 8.0,
            // A zero point of GPTQ may be 16.
            Self::Int4(_) => 16.0,
            Self::E2m1 => 6.0,
        }
    }

    /// Whether some tool gives such codes negative scales.
    pub(crate) fn has_signed_scales(self) -> bool {
        match self {
            Self::Int8 | Self::Int4(_) => true,
            Self::E4m3 | Self::E2m1 => false,
        }
    }

    /// Decodes one row of a matrix of `rows` rows with as many columns as `out` has elements.
    pub(crate) fn decode_row(self, bytes: &[u8], rows: usize, row: usize, out: &mut [f32]) {
        let cols = out.len();
        match self {
            Self::E4m3 => {
                for (out, &code) in out.iter_mut().zip(&bytes[row * cols..]) {
                    *out = E4M3[usize::from(code)];
                }
            }
            Self::Int8 => {
                for (out, &code) in out.iter_mut().zip(&bytes[row * cols..]) {
                    *out = f32::from(code.cast_signed());
                }
            }
            Self::E2m1 => {
                for (col, out) in out.iter_mut().enumerate() {
                    *out = e2m1(nibble(bytes, row * cols + col));
                }
            }
            Self::Int4(order @ (Order::AlongColumns | Order::Gptq)) => {
                // A word holds eight columns of the row.
                let words = bytes.as_chunks::<4>().0;
                for (eight, out) in out.chunks_mut(8).enumerate() {
                    let at = order.index(rows, cols, row, eight * 8) / 8;
                    let word = u32::from_le_bytes(words[at]);
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = f32::from((word >> (4 * i)) as u8 & 15);
                    }
                }
            }
            Self::Int4(order) => {
                for (col, out) in out.iter_mut().enumerate() {
                    *out = f32::from(nibble(bytes, order.index(rows, cols, row, col)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_code_is_its_definition() {
        for code in 0..=255_u8 {
            let value = E4M3[usize::from(code)];
            if code & 0x7f == 0x7f {
                assert!(value.is_nan() && has_nan(&[0, code]), "{code:#04x}");
                continue;
            }
            assert!(!has_nan(&[code, code ^ 0x80]), "{code:#04x}");
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
            let magnitude = if exponent == 0 {
                mantissa / 8.0 * f64::powi(2.0, -6)
            } else {
                (1.0 + mantissa / 8.0) * f64::powi(2.0, exponent - 7)
            };
            let signed = if code >= 128 { -magnitude } else { magnitude };
            assert_eq!(f64::from(value).to_bits(), signed.to_bits(), "{code:#04x}");
        }
        assert_eq!((E4M3[0x7e], E4M3[1], E4M3[0x80].to_bits()), (448.0, 1.0 / 512.0, 1 << 31));
    }

    use ir::e8m0;

    #[test]
    fn every_e8m0_code_is_a_power_of_two() {
        for code in 0..255_u8 {
            assert_eq!(f64::from(e8m0(code)), f64::powi(2.0, i32::from(code) - 127));
        }
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn orders_are_one_to_one_within_their_shape() {
        let orders =
            [Order::AlongColumns, Order::AlongRows, Order::Gptq, Order::Awq, Order::Transposed];
        for order in orders {
            let (rows, cols) = (16, 24);
            let words: u64 = order.shape(rows, cols).iter().product();
            let (rows, cols) = (rows as usize, cols as usize);
            let mut seen = vec![false; words as usize * 8];
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                let at = order.index(rows, cols, row, col);
                assert!(!std::mem::replace(&mut seen[at], true), "{order:?} {row} {col}");
            }
            assert!(seen.iter().all(|&seen| seen), "{order:?}");
        }
    }

    #[test]
    fn rows_are_decoded_by_the_index_of_their_elements() {
        let (rows, cols) = (16, 20);
        let bytes: Vec<u8> = (0..=255).cycle().map(|i: u8| i.wrapping_mul(37)).take(1024).collect();
        for order in [Order::AlongColumns, Order::AlongRows, Order::Gptq, Order::Awq] {
            for row in 0..rows {
                let mut out = vec![0.0; cols];
                Codes::Int4(order).decode_row(&bytes, rows, row, &mut out);
                let at = |col| f32::from(nibble(&bytes, order.index(rows, cols, row, col)));
                assert!(out.into_iter().eq((0..cols).map(at)), "{order:?} {row}");
            }
        }
    }

    #[test]
    fn columns_of_a_word_of_awq_are_interleaved() {
        // Nibbles 0 to 7 of the word hold columns 0, 2, 4, 6, 1, 3, 5 and 7.
        let word = 0x7531_6420_u32.to_le_bytes();
        for row in 0..8 {
            assert_eq!(nibble(&word, Order::Awq.index(8, 1, row, 0)), row as u8);
        }
    }
}
