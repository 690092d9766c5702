//! nf4 of bitsandbytes: 4-bit codes into a table, with a scale per block of the row-major matrix. The scales may be
//! quantised themselves (double quantisation). The library multiplies values that are rounded to the type that the
//! matrix had before, so these are its values.

use half::{bf16, f16};
use ir::{DType, Scalar};
use serde_json::{Map, Value};

use super::checkpoint::Parts;
use super::matrix::ScaleType;
use crate::store::{Files, Place};

/// The values of the codes.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The description of a matrix, in JSON.
const STATE: &str = "weight.quant_state.bitsandbytes__nf4";
/// Longest description.
const STATE_MAX: usize = 1 << 16;

/// A matrix in nf4. The columns are a multiple of the block.
#[derive(Clone, Debug)]
pub(crate) struct Nf4 {
    codes: Place,
    block: usize,
    scales: Absmax,
    /// The type that values are rounded to: f32, f16 or bf16.
    dtype: DType,
}

/// The scale of each block.
#[derive(Clone, Debug)]
enum Absmax {
    /// f32.
    Plain(Place),
    /// `table[code] * scales[index / block] + offset`, all f32.
    Nested { codes: Place, table: Place, scales: Place, block: usize, offset: f32 },
}

fn float(files: &Files, place: Place, index: usize) -> f32 {
    ScaleType::Float(DType::F32).get(files.slice(place), index)
}

impl Nf4 {
    /// The type that holds its values.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Dequantises one row: `table[code] * scale`, rounded.
    pub(crate) fn dequantise_row(&self, files: &Files, row: usize, out: &mut [f32]) {
        let start = row * out.len();
        let bytes = &files.slice(self.codes)[start / 2..];
        let blocks = out.chunks_mut(self.block).zip(bytes.chunks(self.block / 2));
        for (block, (out, bytes)) in blocks.enumerate() {
            let scale = self.scales.get(files, start / self.block + block);
            for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                // The first element is in the high bits.
                let codes = [byte >> 4, byte & 15];
                *pair = codes.map(|code| rounded(self.dtype, NF4[usize::from(code)] * scale));
            }
        }
    }
}

fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype.scalar() {
        Scalar::F16 => f16::from_f32(value).to_f32(),
        Scalar::Bf16 => bf16::from_f32(value).to_f32(),
        Scalar::F32 | Scalar::E4m3 | Scalar::Int8 | Scalar::Int4 | Scalar::E2m1 => value,
    }
}

impl Absmax {
    fn get(&self, files: &Files, index: usize) -> f32 {
        match *self {
            Self::Plain(place) => float(files, place, index),
            Self::Nested { codes, table, scales, block, offset } => {
                let code = usize::from(files.slice(codes)[index]);
                // The product rounds, then the sum.
                float(files, table, code) * float(files, scales, index / block) + offset
            }
        }
    }
}

impl Parts<'_> {
    /// A matrix in nf4, unless there are problems.
    pub(super) fn nf4(&mut self, nested: bool) -> Option<Nf4> {
        let absmax = self.stored.get("weight.absmax").map(|found| found.entry.element == "U8");
        let made = if absmax.is_some_and(|quantised| quantised != nested) {
            let reason = format!(
                "does not agree with bnb_4bit_use_double_quant, which is {nested}; expected F32 for false, U8 for true"
            );
            self.complain("weight.absmax", reason);
            None
        } else {
            self.nf4_parts(nested)
        };
        if made.is_none() {
            // What was not looked at is not too much.
            self.stored.clear();
        }
        made
    }

    fn nf4_parts(&mut self, nested: bool) -> Option<Nf4> {
        let (n, k) = (self.rows, self.cols);
        let codes = self.want("weight", &["U8"], &[&[n * k / 2, 1]]);
        let table = self.want("weight.quant_map", &["F32"], &[&[16]]);
        if let Some(table) = table {
            let stored = (0..16).map(|code| float(self.files, table.place(), code));
            if !stored.map(f32::to_bits).eq(NF4.map(f32::to_bits)) {
                self.complain("weight.quant_map", "holds other values than those of nf4");
            }
        }
        let state = self.state()?;
        let dtype = self.dtype(&state);
        let block = self.block(&state, "blocksize")?;
        if !k.is_multiple_of(block) || !block.is_multiple_of(2) {
            let reason = format!(
                "has {k} columns, which blocks of {block} do not divide; expected a multiple of an even block"
            );
            self.complain("weight", reason);
            return None;
        }
        let count = n * k / block;
        let scales = if nested { self.nested(&state, count) } else { self.plain(count) }?;
        let dtype = dtype?;
        let mut all = (0..count as usize).map(|i| (i, scales.get(self.files, i)));
        // The greatest value of the table is 1.
        if let Some((i, value)) = all.find(|&(_, scale)| !rounded(dtype, scale).is_finite()) {
            let reason = format!("gives the scale {value} at index {i}; expected finite numbers");
            self.complain("weight.absmax", reason);
            return None;
        }
        Some(Nf4 { codes: codes?.place(), block: block as usize, scales, dtype })
    }

    fn plain(&mut self, count: u64) -> Option<Absmax> {
        let found = self.want("weight.absmax", &["F32"], &[&[count]])?;
        Some(Absmax::Plain(found.place()))
    }

    fn nested(&mut self, state: &Map<String, Value>, count: u64) -> Option<Absmax> {
        let block = self.block(state, "nested_blocksize")?;
        let codes = self.want("weight.absmax", &["U8"], &[&[count]]);
        let table = self.want("weight.nested_quant_map", &["F32"], &[&[256]]);
        let scales = self.want("weight.nested_absmax", &["F32"], &[&[count.div_ceil(block)]]);
        let offset = state.get("nested_offset").and_then(Value::as_f64).map(|offset| offset as f32);
        let Some(offset) = offset.filter(|offset| offset.is_finite()) else {
            self.complain(STATE, "has no finite nested_offset");
            return None;
        };
        let (codes, table, scales) = (codes?.place(), table?.place(), scales?.place());
        Some(Absmax::Nested { codes, table, scales, block: block as usize, offset })
    }

    /// The description, if it is of this matrix.
    fn state(&mut self) -> Option<Map<String, Value>> {
        let Some(found) = self.stored.remove(STATE) else {
            self.complain(STATE, "is missing; expected JSON in U8");
            return None;
        };
        let bytes = self.files.slice(found.place());
        let parsed = (bytes.len() <= STATE_MAX).then(|| serde_json::from_slice(bytes).ok());
        let Some(Some(state)) = parsed else {
            self.complain(STATE, "is no JSON object");
            return None;
        };
        let state: Map<String, Value> = state;
        let expected = [
            ("quant_type", Value::from("nf4")),
            ("shape", Value::from(vec![self.rows, self.cols])),
        ];
        for (field, expected) in expected {
            let value = state.get(field).unwrap_or(&Value::Null);
            if *value != expected {
                let value = crate::error::shown(value);
                self.complain(STATE, format!("has {field} {value}; expected {expected}"));
            }
        }
        Some(state)
    }

    /// The type of the matrix before.
    fn dtype(&mut self, state: &Map<String, Value>) -> Option<DType> {
        let name = state.get("dtype").unwrap_or(&Value::Null);
        let known = [("bfloat16", DType::Bf16), ("float16", DType::F16), ("float32", DType::F32)];
        let dtype = known.iter().find(|(known, _)| name == known).map(|&(_, dtype)| dtype);
        if dtype.is_none() {
            let name = crate::error::shown(name);
            self.complain(
                STATE,
                format!("has dtype {name}; expected \"bfloat16\", \"float16\" or \"float32\""),
            );
        }
        dtype
    }

    /// The elements of a block.
    fn block(&mut self, state: &Map<String, Value>, field: &str) -> Option<u64> {
        let size = state.get(field).and_then(Value::as_u64).filter(|&size| size > 0);
        if size.is_none() {
            self.complain(STATE, format!("has no {field}; expected a positive whole number"));
        }
        size
    }
}
