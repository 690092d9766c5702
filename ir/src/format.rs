//! Weight formats: how the elements of a packed matrix are laid out on the device. Each format is one row of the table
//! below.
//!
//! A packed matrix is a sequence of tiles of 8 rows. A tile is a sequence of units of 8 rows by 64 bytes, in order
//! along K. This file has the only packer.

use abi::{UNIT_BYTES, UNIT_ROW_BYTES, UNIT_ROWS};

use crate::graph::DType;

const ROWS: usize = UNIT_ROWS as usize;
const ROW: usize = UNIT_ROW_BYTES as usize;
const UNIT: usize = UNIT_BYTES as usize;

macro_rules! formats {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal bits $bits:literal stored $stored:ident operand $operand:ident;)+) => {
        /// A weight format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Format { $($(#[doc = $doc])+ $variant),+ }

        impl Format {
            /// Every format.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Its name in the text form.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// Bits of an element.
            #[must_use]
            pub const fn bits(self) -> u32 {
                match self { $(Self::$variant => $bits),+ }
            }

            /// Element type of the stored tensors that are packed in this format.
            #[must_use]
            pub const fn stored(self) -> DType {
                match self { $(Self::$variant => DType::$stored),+ }
            }

            /// Element type of the tensor cores' operands.
            #[must_use]
            pub const fn operand(self) -> DType {
                match self { $(Self::$variant => DType::$operand),+ }
            }
        }
    };
}

formats! {
    /// IEEE binary32.
    F32 "f32" bits 32 stored F32 operand F32;
    /// IEEE binary16.
    F16 "f16" bits 16 stored F16 operand F16;
    /// The upper half of a binary32.
    Bf16 "bf16" bits 16 stored Bf16 operand Bf16;
}

impl From<DType> for Format {
    fn from(stored: DType) -> Self {
        match stored {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::Bf16 => Self::Bf16,
        }
    }
}

impl Format {
    /// Elements of one row of a unit.
    #[must_use]
    pub const fn unit_cols(self) -> u32 {
        UNIT_ROW_BYTES * 8 / self.bits()
    }

    /// Units of a tile whose rows have `cols` elements; the last unit is padded.
    #[must_use]
    pub const fn units_per_tile(self, cols: u32) -> u32 {
        cols.div_ceil(self.unit_cols())
    }

    /// Bytes of a stored row of `cols` elements.
    #[must_use]
    pub const fn row_bytes(self, cols: u32) -> usize {
        cols as usize * self.stored().bytes()
    }

    /// Packs one tile from stored rows. A shorter or empty row is padded with zeros. `tile` is a whole number of units.
    pub fn pack(self, rows: &[&[u8]; ROWS], tile: &mut [u8]) {
        for (unit, out) in tile.chunks_exact_mut(UNIT).enumerate() {
            for (row, out) in rows.iter().zip(out.chunks_exact_mut(ROW)) {
                let left = row.get(unit * ROW..).unwrap_or_default();
                match left.first_chunk::<ROW>() {
                    Some(whole) => out.copy_from_slice(whole),
                    None => {
                        out[..left.len()].copy_from_slice(left);
                        out[left.len()..].fill(0);
                    }
                }
                self.exchange_vec4s(out);
            }
        }
    }

    /// Unpacks one row of a packed tile to its stored form, padding included.
    pub fn unpack(self, tile: &[u8], row: usize, out: &mut Vec<u8>) {
        out.clear();
        for unit in tile.chunks_exact(UNIT) {
            let first = out.len();
            out.extend_from_slice(&unit[row * ROW..][..ROW]);
            self.exchange_vec4s(&mut out[first..]);
        }
    }

    /// Swaps the second and third group of four in every 16 columns of a unit's row, if elements have 16 bits. This is
    /// the order that the kernel reads, and its own inverse. With it, two threads that multiply neighbouring 16 bytes
    /// read whole sectors of the vector. Elements of 32 bits stay in place.
    fn exchange_vec4s(self, row: &mut [u8]) {
        if self.bits() == 16 {
            for half in row.chunks_exact_mut(32) {
                let (front, back) = half.split_at_mut(16);
                front[8..].swap_with_slice(&mut back[..8]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        for format in Format::ALL {
            for cols in [1, 15, 16, 17, 32, 33, 100] {
                let bytes = format.row_bytes(cols);
                let stored: Vec<Vec<u8>> = (0..ROWS)
                    .map(|row| (0..bytes).map(|at| (row * 37 + at) as u8).collect())
                    .collect();
                // A missing row, as in the last tile of a matrix.
                let rows: [&[u8]; ROWS] =
                    std::array::from_fn(|row| if row == 7 { &[][..] } else { &stored[row][..] });
                let units = format.units_per_tile(cols) as usize;
                let mut tile = vec![0xee; units * UNIT];
                format.pack(&rows, &mut tile);
                let mut back = Vec::new();
                for (row, stored) in rows.iter().enumerate() {
                    format.unpack(&tile, row, &mut back);
                    assert_eq!(back.len(), units * ROW);
                    assert_eq!(&back[..stored.len()], *stored, "{} {cols}", format.name());
                    assert!(back[stored.len()..].iter().all(|&byte| byte == 0));
                }
            }
        }
    }

    #[test]
    fn vec4s_of_16_bits_change_places() {
        let row: Vec<u8> = (0..32_u16).flat_map(u16::to_le_bytes).collect();
        let mut tile = [0; UNIT];
        Format::Bf16.pack(&std::array::from_fn(|_| &row[..]), &mut tile);
        let words = tile[..ROW].chunks_exact(2).map(|w| u16::from_le_bytes([w[0], w[1]]));
        let first: Vec<u16> = words.take(16).collect();
        assert_eq!(first, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]);
    }
}
