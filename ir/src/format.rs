//! Weight formats: how the elements of a packed matrix are laid out on the device. Each format is one row of the table
//! below.
//!
//! A packed matrix is a sequence of tiles of 8 rows. A tile is a sequence of units of 8 rows by 64 bytes, in order
//! along K. Behind a unit of codes in groups lie the scales of its 8 rows, row after row, or the one that they share: so a
//! stream brings both.
//! This file has the only packer.

use std::borrow::Cow;

use abi::{CodeBlock, Scalar, Scales, UNIT_BYTES, UNIT_ROW_BYTES, UNIT_ROWS, Unpack};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::graph::DType;

/// Rows of a tile.
pub const TILE_ROWS: usize = UNIT_ROWS as usize;
const ROWS: usize = TILE_ROWS;
const ROW: usize = UNIT_ROW_BYTES as usize;
const UNIT: usize = UNIT_BYTES as usize;

macro_rules! formats {
    ($($(#[doc = $doc:literal])+ $variant:ident $name:literal stored $stored:ident operand $operand:ident unpack $unpack:ident;)+) => {
        /// A weight format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "snake_case")]
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
                self.stored().scalar().bits()
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

            /// What the kernel does to its elements before it multiplies them.
            #[must_use]
            pub const fn unpack(self) -> Unpack {
                match self { $(Self::$variant => Unpack::$unpack),+ }
            }
        }
    };
}

formats! {
    /// IEEE binary32.
    F32 "f32" stored F32 operand F32 unpack None;
    /// IEEE binary16.
    F16 "f16" stored F16 operand F16 unpack None;
    /// The upper half of a binary32.
    Bf16 "bf16" stored Bf16 operand Bf16 unpack None;
    /// bf16 as f16, beside matrices that are multiplied in f16. Exact from 2^-17 to 65504; smaller values are rounded to
    /// a multiple of 2^-24.
    Bf16AsF16 "bf16_as_f16" stored Bf16 operand F16 unpack None;
    /// e4m3, each row with a scale.
    E4m3 "e4m3" stored E4m3 operand F16 unpack E4m3;
    /// Integers of 8 bits, each row with a scale.
    Int8 "int8" stored Int8 operand F16 unpack Int8;
    /// e4m3, each 64 columns of a tile's rows with a scale.
    E4m3G64 "e4m3_g64" stored E4m3G64 operand F16 unpack E4m3G64;
    /// Integers of 8 bits, each 32 columns of a row with a scale.
    Int8G32 "int8_g32" stored Int8G32 operand F16 unpack Int8G32;
    /// Integers of 4 bits, each 128 columns of a row with a scale.
    Int4G128 "int4_g128" stored Int4G128 operand F16 unpack Int4G128;
    /// Integers of 4 bits, each 128 columns of a row with a scale and a zero point.
    Int4G128Zero "int4_g128_zero" stored Int4G128Zero operand F16 unpack Int4G128Zero;
    /// Integers of 4 bits, each 32 columns of a row with a scale.
    Int4G32 "int4_g32" stored Int4G32 operand F16 unpack Int4G32;
    /// e4m3, each 64 columns of a row with a scale.
    E4m3G64Row "e4m3_g64_row" stored E4m3G64Row operand F16 unpack E4m3G64Row;
    /// e2m1, each 32 columns of a row with a power of two.
    Mxfp4 "mxfp4" stored Mxfp4 operand F16 unpack Mxfp4;
    /// IEEE binary32, rows of an embedding that are read one at a time, beside matrices that are multiplied in f16.
    F32Rows "f32_rows" stored F32 operand F16 unpack None;
    /// Integers of 4 bits, each 32 columns of a row with factors of the unit's scale and offset (Q4_K).
    Int4K "int4_k" stored Int4K operand F16 unpack Int4K;
    /// Integers of 8 bits, each 16 columns of a row with factors of the unit's scale and offset (Q5_K, Q6_K).
    Int8K "int8_k" stored Int8K operand F16 unpack Int8K;
}

impl Format {
    /// The format of matrices of this element type in a program with such operands. One that no format has gets the
    /// format of the operands, which its reader refuses.
    #[must_use]
    pub fn of(stored: DType, operand: DType) -> Self {
        let of = |stored: DType| {
            let mut all = Self::ALL.iter().copied();
            all.find(|format| (format.stored(), format.operand()) == (stored, operand))
        };
        of(stored).or_else(|| of(operand)).unwrap_or(Self::F32)
    }

    /// Whether only its rows can be read: a product would need them in the type of the operands.
    #[must_use]
    pub const fn is_rows(self) -> bool {
        matches!(self, Self::F32Rows)
    }

    /// Whether each row has a factor.
    #[must_use]
    pub const fn is_scaled(self) -> bool {
        self.stored().is_scaled()
    }

    /// Whether vectors of one sequence are multiplied with it as integers (vm-device/cuda/digits.cuh): codes in groups that
    /// are integers. Their scale is of the elements that go with a unit.
    #[must_use]
    pub const fn has_digits(self) -> bool {
        matches!(self.stored().scalar(), Scalar::Int8 | Scalar::Int4)
            && self.stored().block().is_some()
    }

    /// Staged bytes of the elements of a vector that go with a unit, as integers: two digits of a byte each, a factor, and
    /// for offsets the sums of the groups (vm-device/cuda/digits.cuh: `digit_bytes`).
    #[must_use]
    pub fn digit_bytes(self) -> u32 {
        let offsets = self.stored().block().is_some_and(|block| block.scales == Scales::Factors);
        2 * self.unit_cols() + if offsets { 32 } else { 16 }
    }

    /// Bytes of one row of a unit's scales.
    fn scale_bytes(self) -> usize {
        self.stored().block().map_or(0, CodeBlock::scale_bytes)
    }

    /// Place of a row's scales among those of its unit.
    fn scale_place(self, row: usize) -> usize {
        if self.stored().block().is_some_and(CodeBlock::shared) {
            0
        } else {
            row * self.scale_bytes()
        }
    }

    /// Bytes of a unit with its scales.
    #[must_use]
    pub fn unit_bytes(self) -> u32 {
        UNIT_BYTES + self.stored().block().map_or(0, |block| block.unit_scale_bytes() as u32)
    }

    /// Elements of one row of a unit.
    #[must_use]
    pub const fn unit_cols(self) -> u32 {
        UNIT_ROW_BYTES * 8 / self.bits()
    }

    /// Units of 16-bit operands that a unit makes: 1 of what is multiplied as it is.
    #[must_use]
    pub const fn operand_units(self) -> u32 {
        if self.is_scaled() { 16 / self.bits() } else { 1 }
    }

    /// Units of a tile whose rows have `cols` elements; the last unit is padded.
    #[must_use]
    pub const fn units_per_tile(self, cols: u32) -> u32 {
        cols.div_ceil(self.unit_cols())
    }

    /// Bytes of a stored row of `cols` elements.
    #[must_use]
    pub const fn row_bytes(self, cols: u32) -> usize {
        self.stored().row_bytes(cols as usize)
    }

    /// Packs one tile from stored rows. A shorter or empty row is padded with zeros. `tile` is a whole number of units.
    pub fn pack(self, rows: &[&[u8]; ROWS], tile: &mut [u8]) {
        let scale_bytes = self.scale_bytes();
        for (unit, out) in tile.chunks_exact_mut(self.unit_bytes() as usize).enumerate() {
            let (elements, scales) = out.split_at_mut(UNIT);
            scales.fill(0);
            for (at, (row, out)) in rows.iter().zip(elements.as_chunks_mut::<ROW>().0).enumerate() {
                let left = row.get(unit * (ROW + scale_bytes)..).unwrap_or_default();
                match left.first_chunk::<ROW>() {
                    Some(whole) => out.copy_from_slice(whole),
                    None => {
                        out[..left.len()].copy_from_slice(left);
                        out[left.len()..].fill(0);
                    }
                }
                if let Some(stored) = left.get(ROW..ROW + scale_bytes) {
                    scales[self.scale_place(at)..][..scale_bytes].copy_from_slice(stored);
                }
                self.arrange(out);
            }
        }
    }

    /// The inverse of [`pack`](Self::pack) for one row of a tile, padding included.
    pub fn stored_row(self, tile: &[u8], row: usize, out: &mut Vec<u8>) {
        out.clear();
        let scale_bytes = self.scale_bytes();
        for unit in tile.chunks_exact(self.unit_bytes() as usize) {
            let (elements, scales) = unit.split_at(UNIT);
            let mut stored = elements.as_chunks::<ROW>().0[row];
            self.restore(&mut stored);
            out.extend_from_slice(&stored);
            out.extend_from_slice(&scales[self.scale_place(row)..][..scale_bytes]);
        }
    }

    /// Stored elements, rounded as packing does, so that what was packed can be compared with them.
    #[must_use]
    pub fn rounded(self, mut stored: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
        if self == Self::Bf16AsF16 {
            for element in stored.to_mut().as_chunks_mut::<2>().0 {
                let half = f16::from_f32(bf16::from_le_bytes(*element).to_f32());
                *element = bf16::from_f32(half.to_f32()).to_le_bytes();
            }
        }
        stored
    }

    /// Brings a stored row of a unit into the form that the kernel reads.
    fn arrange(self, row: &mut [u8; ROW]) {
        match self.stored().scalar() {
            Scalar::F32 => {}
            Scalar::Bf16 if self.operand() == DType::F16 => {
                let elements = row.as_chunks_mut::<2>().0;
                let values: [f32; ROW / 2] =
                    std::array::from_fn(|i| bf16::from_le_bytes(elements[i]).to_f32());
                let mut halves = [f16::ZERO; ROW / 2];
                halves.convert_from_f32_slice(&values);
                for (element, half) in elements.iter_mut().zip(halves) {
                    *element = half.to_le_bytes();
                }
                exchange_vec4s(row);
            }
            Scalar::F16 | Scalar::Bf16 => exchange_vec4s(row),
            Scalar::E4m3 | Scalar::Int8 => {
                let stored = *row;
                // Four neighbouring bytes stay neighbours.
                let (stored, words) = (stored.as_chunks::<4>().0, row.as_chunks_mut::<4>().0);
                for (at, word) in words.iter_mut().enumerate() {
                    *word = stored[byte_column(4 * at) / 4];
                }
            }
            Scalar::Int4 => *row = half_words(row, |halves| halves),
            Scalar::E2m1 => *row = half_words(row, spread_bits),
        }
    }

    /// The inverse of [`arrange`](Self::arrange).
    fn restore(self, row: &mut [u8; ROW]) {
        match self.stored().scalar() {
            Scalar::F32 => {}
            Scalar::Bf16 if self.operand() == DType::F16 => {
                exchange_vec4s(row);
                for element in row.as_chunks_mut::<2>().0 {
                    *element = bf16::from_f32(f16::from_le_bytes(*element).to_f32()).to_le_bytes();
                }
            }
            Scalar::F16 | Scalar::Bf16 => exchange_vec4s(row),
            Scalar::E4m3 | Scalar::Int8 => {
                let packed = *row;
                for (place, element) in packed.into_iter().enumerate() {
                    row[byte_column(place)] = element;
                }
            }
            Scalar::Int4 => {
                let packed = std::mem::replace(row, [0; ROW]);
                for place in 0..2 * ROW {
                    let (code, column) =
                        ((packed[place / 2] >> (4 * (place % 2))) & 15, half_column(place));
                    row[column / 2] |= code << (4 * (column % 2));
                }
            }
            Scalar::E2m1 => {
                let packed = std::mem::replace(row, [0; ROW]);
                for place in 0..2 * ROW {
                    let column = half_column(place);
                    for (bit, at) in code_bits(place).into_iter().enumerate() {
                        row[column / 2] |=
                            (packed[at / 8] >> (at % 8) & 1) << (4 * (column % 2) + bit);
                    }
                }
            }
        }
    }
}

/// Swaps the second and third group of four in every 16 columns of 16 bits. This is its own inverse. With it, two threads
/// that multiply neighbouring 16 bytes read whole sectors of the vector.
fn exchange_vec4s(row: &mut [u8]) {
    for half in row.chunks_exact_mut(32) {
        let (front, back) = half.split_at_mut(16);
        front[8..].swap_with_slice(&mut back[..8]);
    }
}

/// The column at a place of a unit's row of bytes. A thread's 16 bytes are the columns that it would multiply of two
/// units of 16-bit elements, so that unpacking them gives both.
const fn byte_column(place: usize) -> usize {
    operand_column(place / 8 % 2, place / 16, place % 8)
}

/// The column at a place of a unit's row of halves of bytes. A thread's 16 bytes are four words, one for each of four units
/// of 16-bit elements. Halves `n` and `n + 4` of a word are a pair of neighbouring columns, which one mask takes out.
const fn half_column(place: usize) -> usize {
    let (thread, unit, half) = (place / 32, place / 8 % 4, place % 8);
    operand_column(unit, thread, half % 4 * 2 + half / 4)
}

/// A unit's row of halves of bytes in the order of [`half_column`], word by word, each as `of` changes it. All halves
/// of two words are moved at once: one by one they are six times as slow.
#[inline(always)]
fn half_words(stored: &[u8; ROW], of: impl Fn(u32) -> u32) -> [u8; ROW] {
    let mut pairs = [0; ROW / 8];
    for (pair, stored) in pairs.iter_mut().zip(stored.as_chunks::<8>().0) {
        *pair = two_words(u64::from_le_bytes(*stored));
    }
    let mut row = [0; ROW];
    let words = row.as_chunks_mut::<4>().0;
    for (at, pair) in pairs.into_iter().enumerate() {
        // The words of neighbouring threads.
        let (unit, threads) = (at / 2, at % 2 * 2);
        words[threads * 4 + unit] = of(pair as u32).to_le_bytes();
        words[threads * 4 + 4 + unit] = of((pair >> 32) as u32).to_le_bytes();
    }
    row
}

/// Two words of eight halves from 16 neighbouring columns. Each has two runs of four columns, of which the even ones
/// come first: the first word has runs 0 and 2, the second 1 and 3.
#[inline(always)]
fn two_words(columns: u64) -> u64 {
    const HALF: u64 = 0x000f_000f_000f_000f;
    let even = columns & HALF | columns >> 4 & (HALF << 4);
    let odd = columns >> 4 & HALF | columns >> 8 & (HALF << 4);
    let runs = even | odd << 8;
    // Four bytes to every other byte of eight.
    let spread = |runs: u64| {
        let pairs = (runs | runs << 16) & 0x0000_ffff_0000_ffff;
        (pairs | pairs << 8) & 0x00ff_00ff_00ff_00ff
    };
    spread(runs & 0xffff_ffff) | spread(runs >> 32) << 8
}

/// The bits of eight e2m1 codes of a word at the places of [`code_bits`].
fn spread_bits(codes: u32) -> u32 {
    let pair = |at: u32| codes >> (4 * at) & 0x000f_000f;
    let sign = |at| pair(at) >> 3 & 0x0001_0001;
    let magnitude = |at| pair(at) & 0x0007_0007;
    magnitude(0) << 9
        | magnitude(1) << 1
        | magnitude(2) << 12
        | magnitude(3) << 4
        | sign(0) << 15
        | sign(1) << 7
        | sign(2).rotate_left(16)
        | sign(3) << 8
}

/// Where in a unit's row of bits the four bits of an e2m1 code are, by its place among halves of bytes. Two codes of a word are
/// two f16 after a mask of bits 9 to 11 and 15 of each half: as they are; after a shift by 8; and twice more after the
/// other bits have taken these places (`unpack_e2m1` in unpack.cuh).
const fn code_bits(place: usize) -> [usize; 4] {
    let (word, pair, high) = (place / 8, place % 4, place / 4 % 2);
    let magnitude = [9, 1, 12, 4][pair] + 16 * high;
    let sign = [15 + 16 * high, 7 + 16 * high, 16 - 16 * high, 8 + 16 * high][pair];
    let first = 32 * word;
    [first + magnitude, first + magnitude + 1, first + magnitude + 2, first + sign]
}

/// The column of one of the eight elements that a thread multiplies of a unit of 16-bit elements.
const fn operand_column(unit: usize, thread: usize, element: usize) -> usize {
    let column = thread * 8 + element;
    unit * 32 + (column & !12 | (column & 4) << 1 | (column & 8) >> 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// bf16 of any mantissa that f16 has exactly.
    fn exact(mut row: Vec<u8>) -> Vec<u8> {
        for [_, high] in row.as_chunks_mut::<2>().0 {
            *high = *high & 0x81 | 0x3c;
        }
        row
    }

    /// The row with zeros for scales if all rows share them.
    fn alike(format: Format, mut row: Vec<u8>) -> Vec<u8> {
        if let Some(block) = format.stored().block().filter(|block| block.shared()) {
            row.chunks_mut(block.bytes()).for_each(|block| block[CodeBlock::CODE_BYTES..].fill(7));
        }
        row
    }

    #[test]
    fn what_was_packed_is_unpacked() {
        for format in Format::ALL {
            for cols in [1, 15, 16, 17, 32, 33, 100] {
                let bytes = format.row_bytes(cols);
                let stored: Vec<Vec<u8>> = (0..ROWS)
                    .map(|row| (0..bytes).map(|at| (row * 37 + at) as u8).collect())
                    .map(|row| if *format == Format::Bf16AsF16 { exact(row) } else { row })
                    .collect();
                let stored: Vec<Vec<u8>> =
                    stored.into_iter().map(|row| alike(*format, row)).collect();
                // A missing row, as in the last tile of a matrix.
                let rows: [&[u8]; ROWS] =
                    std::array::from_fn(|row| if row == 7 { &[][..] } else { &stored[row][..] });
                let units = format.units_per_tile(cols) as usize;
                let mut tile = vec![0xee; units * format.unit_bytes() as usize];
                format.pack(&rows, &mut tile);
                let mut back = Vec::new();
                for (row, stored) in rows.iter().enumerate() {
                    format.stored_row(&tile, row, &mut back);
                    assert_eq!(back.len(), units * (ROW + format.scale_bytes()));
                    assert_eq!(&back[..stored.len()], *stored, "{} {cols}", format.name());
                    let shared = format.stored().block().is_some_and(CodeBlock::shared);
                    assert!(shared || back[stored.len()..].iter().all(|&byte| byte == 0));
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

    #[test]
    fn a_threads_16_bytes_are_its_columns_of_two_units_of_16_bits() {
        let columns: Vec<u8> = (0..64).collect();
        let halves: Vec<u8> = (0..64_u16).flat_map(u16::to_le_bytes).collect();
        let mut bytes = [0; UNIT];
        Format::Int8.pack(&std::array::from_fn(|_| &columns[..]), &mut bytes);
        let mut wide = [0; 2 * UNIT];
        Format::F16.pack(&std::array::from_fn(|_| &halves[..]), &mut wide);
        let column = |unit: usize, place: usize| wide[unit * UNIT + place * 2];
        for thread in 0..4 {
            for unit in 0..2 {
                for element in 0..8 {
                    let narrow = bytes[thread * 16 + unit * 8 + element];
                    assert_eq!(
                        narrow,
                        column(unit, thread * 8 + element),
                        "{thread} {unit} {element}"
                    );
                }
            }
        }
    }

    #[test]
    fn bits_of_e2m1_have_places_of_their_own() {
        let mut places: Vec<usize> = (0..2 * ROW).flat_map(code_bits).collect();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..8 * ROW));
    }

    /// What the kernel makes of a word, and which codes it finds in it: those that int4 has there.
    #[test]
    fn words_of_e2m1_are_masked_into_f16() {
        let packed = |format: Format, stored: &[u8]| {
            let mut unit = vec![0; format.unit_bytes() as usize];
            format.pack(&std::array::from_fn(|_| stored), &mut unit);
            let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
            unit[..ROW].as_chunks::<4>().0.iter().map(word).collect::<Vec<_>>()
        };
        let stored: Vec<u8> = (0..ROW).map(|i| (i * 37 + i / 7) as u8).collect();
        let mask = 0x8e00_8e00_u32;
        let values = [0.0_f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (v, codes) in
            packed(Format::Mxfp4, &stored).into_iter().zip(packed(Format::Int4G128, &stored))
        {
            let (shifted, turned) = (v >> 3, v.rotate_right(1));
            let u = (shifted ^ turned) & 0x0e0e_0e0e ^ turned;
            let pairs = [v & mask, v << 8 & mask, u & mask, u << 8 & mask];
            for (n, pair) in pairs.into_iter().enumerate() {
                for (high, half) in [pair as u16, (pair >> 16) as u16].into_iter().enumerate() {
                    let code = codes >> (4 * n + 16 * high) & 15;
                    let value = values[code as usize & 7] * if code < 8 { 1.0 } else { -1.0 };
                    let got = f16::from_bits(half).to_f32() * 16384.0;
                    assert_eq!(got.to_bits(), value.to_bits(), "{n} {high} of {v:#x}");
                }
            }
        }
    }

    #[test]
    fn a_word_of_halves_is_a_threads_part_of_a_unit_of_16_bits() {
        // Each column's number, in two passes: its lower four bits, then its upper three.
        let packed = |part: fn(usize) -> usize| {
            let mut row: Vec<u8> =
                (0..64).map(|i| (part(2 * i) | part(2 * i + 1) << 4) as u8).collect();
            row.extend([0; 2]);
            let mut tile = [0; UNIT + 16];
            Format::Int4G128.pack(&std::array::from_fn(|_| &row[..]), &mut tile);
            move |place: usize| usize::from(tile[place / 2] >> (4 * (place % 2)) & 15)
        };
        let (low, high) = (packed(|column| column & 15), packed(|column| column >> 4));
        let halves: Vec<u8> = (0..128_u16).flat_map(u16::to_le_bytes).collect();
        let mut wide = [0; 4 * UNIT];
        Format::F16.pack(&std::array::from_fn(|_| &halves[..]), &mut wide);
        for (thread, unit, pair) in (0..64).map(|i| (i / 16, i / 4 % 4, i % 4)) {
            let places = [0, 4].map(|behind| thread * 32 + unit * 8 + pair + behind);
            let columns = places.map(|place| low(place) | high(place) << 4);
            let expected =
                [0, 1].map(|i| usize::from(wide[unit * UNIT + thread * 16 + (pair * 2 + i) * 2]));
            assert_eq!(columns, expected, "{thread} {unit} {pair}");
        }
    }

    /// The packer moves words; these are the places of single codes.
    #[test]
    fn codes_are_packed_where_the_tables_say() {
        let stored: [u8; ROW] = std::array::from_fn(|at| (at * 89 + 7) as u8);
        let arranged = |format: Format| {
            let mut row = stored;
            format.arrange(&mut row);
            row
        };
        assert_eq!(arranged(Format::E4m3), std::array::from_fn(|at| stored[byte_column(at)]));
        let code = |place| stored[half_column(place) / 2] >> (4 * (half_column(place) % 2)) & 15;
        let halves = std::array::from_fn(|at| code(2 * at) | code(2 * at + 1) << 4);
        assert_eq!(arranged(Format::Int4G128), halves);
        let mut bits = [0; ROW];
        for place in 0..2 * ROW {
            for (bit, at) in code_bits(place).into_iter().enumerate() {
                bits[at / 8] |= (code(place) >> bit & 1) << (at % 8);
            }
        }
        assert_eq!(arranged(Format::Mxfp4), bits);
    }

    #[test]
    fn scales_lie_behind_their_unit() {
        let row: Vec<u8> =
            (0..2).flat_map(|block| [vec![0; 64], vec![block * 8 + 1; 8]].concat()).collect();
        let mut tile = [0xee; 2 * (UNIT + 64)];
        let rows: [&[u8]; ROWS] =
            std::array::from_fn(|at| if at == 7 { &[][..] } else { &row[..] });
        Format::Int4G32.pack(&rows, &mut tile);
        for (unit, value) in tile.chunks_exact(UNIT + 64).zip([1, 9]) {
            assert!(unit[..UNIT].iter().all(|&code| code == 0));
            assert!(unit[UNIT..UNIT + 56].iter().all(|&scale| scale == value));
            assert!(unit[UNIT + 56..].iter().all(|&scale| scale == 0), "a missing row");
        }
    }

    #[test]
    fn bf16_as_f16_rounds_what_is_small_and_nothing_else() {
        let packed = |value: f32| {
            let row = bf16::from_f32(value).to_le_bytes();
            let mut tile = [0; UNIT];
            Format::Bf16AsF16.pack(&std::array::from_fn(|_| &row[..]), &mut tile);
            f16::from_le_bytes([tile[0], tile[1]]).to_f32()
        };
        for value in [0.0, -0.0, 1.0, -65280.0, 0.123_046_875, 2f32.powi(-17) * 1.992_187_5] {
            assert_eq!(packed(value).to_bits(), value.to_bits(), "{value}");
        }
        let small = 2f32.powi(-18) * 1.992_187_5;
        assert!((packed(small) - small).abs() <= 2f32.powi(-25) && packed(small) != small);
        let stored = bf16::from_f32(small).to_le_bytes();
        let rounded = Format::Bf16AsF16.rounded(Cow::Borrowed(&stored));
        assert_eq!(rounded[..], bf16::from_f32(packed(small)).to_le_bytes());
    }

    #[test]
    fn a_format_is_found_by_what_is_stored_and_what_is_multiplied() {
        assert_eq!(Format::of(DType::Bf16, DType::Bf16), Format::Bf16);
        assert_eq!(Format::of(DType::Bf16, DType::F16), Format::Bf16AsF16);
        assert_eq!(Format::of(DType::E4m3, DType::F16), Format::E4m3);
        assert_eq!(Format::of(DType::F32, DType::F16), Format::F32Rows);
        assert_eq!(Format::of(DType::F32, DType::Bf16), Format::Bf16, "its reader refuses it");
    }
}
