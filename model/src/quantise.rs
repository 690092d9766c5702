//! Quantises a model: a folder in the layouts of compressed-tensors, each weight rounded to the nearest code.

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use half::bf16;
use ir::{DType, Tensor, TensorId, decode};
use serde_json::{Map, Value, json};

use crate::error::ModelError;
use crate::export::{self, Item, SHARD_BYTES, Stored, write_folder};
use crate::model::{Model, Origin, import_shape};
use crate::parallel;
use crate::shape::Shape;

/// The output matrix, which stays in 16 bits unless it is asked for.
const LM_HEAD: &str = "lm_head";
/// The embedding, which always does.
const EMBED: &str = "model.embed_tokens";

/// A format to quantise to. All are symmetric: there are no zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// e4m3 with a scale per row: `float-quantized`.
    Fp8,
    /// int8 with a scale per row: `int-quantized`.
    Int8,
    /// int4 with a scale per 128 columns of a row: `pack-quantized`.
    Int4G128,
}

/// What to quantise, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantisation {
    /// The format of the matrices of the layers.
    pub format: Format,
    /// The format of `lm_head`; `None` leaves it as it is. A tied `lm_head` is written beside the embedding.
    pub lm_head: Option<Format>,
}

/// A folder that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Matrices that are quantised.
    pub matrices: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Writes a quantised copy of the model to `dir`, as [`export`](crate::export) writes a plain one: tensor by tensor, in
/// shards above 5 GB, complete or not at all.
///
/// The scale of a group of weights is their largest magnitude over half the range of the codes, rounded to bf16 if the
/// model is bf16 (f32 otherwise); 1 if that is below the smallest normal number. A code is the weight over that scale,
/// rounded to nearest even and clamped.
///
/// # Errors
/// As [`export`](crate::export); when the model is no folder or preset in f32, f16 or bf16, when 128 does not divide the
/// columns of a matrix of [`Format::Int4G128`], and when a weight is infinite or not a number.
pub fn quantise(model: &Model, with: Quantisation, dir: &Path) -> Result<Written, ModelError> {
    quantise_in_shards(model, with, dir, SHARD_BYTES)
}

fn quantise_in_shards(
    model: &Model,
    with: Quantisation,
    dir: &Path,
    shard_bytes: u64,
) -> Result<Written, ModelError> {
    let refused = |reason| ModelError::Source { name: model.graph.name.clone(), reason };
    check_origin(model, refused)?;
    let items = with.items(model);
    let odd = items.iter().filter(|item| {
        let cols = model.graph.tensor(item.source).shape.last().copied().unwrap_or(0);
        item.format == Some(Format::Int4G128) && !cols.is_multiple_of(Format::GROUP as u32)
    });
    let odd: Vec<_> = odd.map(|item| &model.graph.tensor(item.source).name[..]).collect();
    if let [first, ..] = odd[..] {
        return Err(refused(format!(
            "128 does not divide the columns of {} matrices, the first of which is {first}; use fp8 or int8",
            odd.len()
        )));
    }
    let shape = Shape { tied: model.shape.tied && with.lm_head.is_none(), ..model.shape.clone() };
    let target = |reason| ModelError::Target { path: dir.to_path_buf(), reason };
    let mut config = export::config(&shape).map_err(target)?;
    config.insert("quantization_config".to_owned(), with.config());
    write_folder(model, config, &items, dir, shard_bytes)?;
    Ok(Written {
        matrices: items.iter().filter(|item| item.format.is_some()).count(),
        bytes: items.iter().map(Item::bytes).sum(),
    })
}

/// Refuses a model whose weights are not the original ones.
fn check_origin(model: &Model, refused: impl Fn(String) -> ModelError) -> Result<(), ModelError> {
    let quantised = match &model.origin {
        Origin::Folder(dir) => import_shape(dir)?.1,
        Origin::File(_) => true,
        Origin::Random { .. } => false,
    };
    if quantised {
        let reason = "it is quantised already, or a GGUF file; give the folder of the 16-bit model";
        return Err(refused(reason.to_owned()));
    }
    Ok(())
}

impl Quantisation {
    /// What is written for each tensor.
    fn items(self, model: &Model) -> Vec<Item> {
        let graph = &model.graph;
        let mut items = Vec::new();
        for (id, tensor) in (0..).map(TensorId).zip(&graph.tensors) {
            let format = if id == graph.embed || tensor.shape.len() != 2 {
                None
            } else if id == graph.lm_head {
                self.lm_head
            } else {
                Some(self.format)
            };
            items.push(match format {
                None => Item::plain(id, tensor),
                Some(format) => format.item(id, &tensor.name, tensor),
            });
        }
        if let Some(format) = self.lm_head.filter(|_| graph.tied()) {
            let name = format!("{LM_HEAD}.weight");
            items.push(format.item(graph.embed, &name, graph.tensor(graph.embed)));
        }
        items
    }

    /// `quantization_config` of `config.json`, as compressed-tensors writes it.
    fn config(self) -> Value {
        let mut groups = Map::new();
        groups.insert("group_0".to_owned(), self.format.group("Linear"));
        let mut format = self.format.name();
        let mut ignore = vec![LM_HEAD, EMBED];
        if let Some(lm_head) = self.lm_head {
            ignore.remove(0);
            if lm_head != self.format {
                format = "mixed-precision";
                groups.insert("group_1".to_owned(), lm_head.group(LM_HEAD));
            }
        }
        json!({
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignore,
            "kv_cache_scheme": null,
            "global_compression_ratio": null,
        })
    }
}

impl Format {
    /// Columns of a group of int4.
    const GROUP: usize = 128;

    /// The `format` of compressed-tensors.
    const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "float-quantized",
            Self::Int8 => "int-quantized",
            Self::Int4G128 => "pack-quantized",
        }
    }

    /// A group of `config_groups`. Formats of 8 bits say, as compressed-tensors has it, that an engine may quantise
    /// activations when it runs.
    fn group(self, target: &str) -> Value {
        let (bits, number, group) = match self {
            Self::Fp8 => (8, "float", None),
            Self::Int8 => (8, "int", None),
            Self::Int4G128 => (4, "int", Some(Self::GROUP)),
        };
        let options = |strategy: &str, dynamic: bool| {
            json!({
                "num_bits": bits,
                "type": number,
                "symmetric": true,
                "strategy": strategy,
                "group_size": if dynamic { None } else { group },
                "dynamic": dynamic,
            })
        };
        let strategy = if group.is_some() { "group" } else { "channel" };
        json!({
            "targets": [target],
            "weights": options(strategy, false),
            "input_activations": if bits == 8 { options("token", true) } else { Value::Null },
            "output_activations": null,
            "format": self.name(),
        })
    }

    /// The tensors that are written for a matrix under this name.
    fn item(self, source: TensorId, name: &str, tensor: &Tensor) -> Item {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let stored = |part: &str, element: &str, width: usize, shape: [u32; 2]| Stored {
            name: format!("{module}.{part}"),
            element: element.to_owned(),
            width,
            shape: shape.to_vec(),
        };
        let (rows, cols) = size(tensor);
        let (n, k) = (rows as u32, cols as u32);
        let groups = (cols / self.columns(cols)) as u32;
        let dtype = scale_type(tensor);
        let element = dtype.name().to_uppercase();
        let scale = stored("weight_scale", &element, dtype.bytes(), [n, groups]);
        let stored = match self {
            Self::Fp8 => vec![stored("weight", "F8_E4M3", 1, [n, k]), scale],
            Self::Int8 => vec![stored("weight", "I8", 1, [n, k]), scale],
            Self::Int4G128 => {
                let sides = Stored { shape: vec![2], ..stored("weight_shape", "I64", 8, [n, k]) };
                vec![stored("weight_packed", "I32", 4, [n, k / 8]), scale, sides]
            }
        };
        Item { source, format: Some(self), stored }
    }

    /// Columns that share a scale.
    fn columns(self, cols: usize) -> usize {
        match self {
            Self::Fp8 | Self::Int8 => cols,
            Self::Int4G128 => Self::GROUP,
        }
    }

    /// Bytes of the codes of this many columns of a row.
    fn code_bytes(self, cols: usize) -> usize {
        match self {
            Self::Fp8 | Self::Int8 => cols,
            Self::Int4G128 => cols / 2,
        }
    }

    /// The largest magnitude over the scale: half the range of the codes.
    const fn half_range(self) -> f32 {
        match self {
            Self::Fp8 => 448.0,
            Self::Int8 => 127.5,
            Self::Int4G128 => 7.5,
        }
    }

    /// Quantises a matrix; the bytes of each tensor that [`item`](Self::item) lists. Or what is wrong with the matrix.
    pub(crate) fn quantise(self, tensor: &Tensor, bytes: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let (rows, cols) = size(tensor);
        let (columns, row_bytes) = (self.columns(cols), self.code_bytes(cols));
        let groups = cols / columns;
        let scale_type = scale_type(tensor);
        let scales: Vec<AtomicU32> = (0..rows * groups).map(|_| AtomicU32::new(0)).collect();
        let unsound = AtomicUsize::new(rows);
        let mut codes = vec![0; rows * row_bytes];
        parallel::fill(&mut codes, row_bytes, &parallel::threads, |first, out| {
            let mut values = vec![0.0; cols];
            for (row, out) in (first..).zip(out.chunks_mut(row_bytes)) {
                decode(tensor.dtype, &bytes[row * cols * tensor.dtype.bytes()..], &mut values);
                let out = out.chunks_mut(self.code_bytes(columns));
                for (group, (values, out)) in values.chunks(columns).zip(out).enumerate() {
                    let Some(scale) = self.scale(values, scale_type) else {
                        unsound.fetch_min(row, Ordering::Relaxed);
                        return;
                    };
                    scales[row * groups + group].store(scale.to_bits(), Ordering::Relaxed);
                    self.codes(values, scale, out);
                }
            }
        });
        let row = unsound.into_inner();
        if row < rows {
            return Err(format!("has a weight in row {row} that is infinite or not a number"));
        }
        let scales = scales.into_iter().map(|bits| f32::from_bits(bits.into_inner()));
        let scales = if scale_type == DType::Bf16 {
            scales.flat_map(|scale| bf16::from_f32(scale).to_le_bytes()).collect()
        } else {
            scales.flat_map(f32::to_le_bytes).collect()
        };
        let sides = [rows, cols].map(|side| (side as u64).to_le_bytes()).concat();
        Ok(match self {
            Self::Fp8 | Self::Int8 => vec![codes, scales],
            Self::Int4G128 => vec![codes, scales, sides],
        })
    }

    /// The scale of a group; `None` if a value is infinite or not a number.
    fn scale(self, values: &[f32], dtype: DType) -> Option<f32> {
        // The bits of magnitudes are in the order of their values, and those of NaN above all.
        let largest = values.iter().fold(0, |most, value| value.abs().to_bits().max(most));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return None;
        }
        let exact = largest / self.half_range();
        let scale = if dtype == DType::Bf16 { bf16::from_f32(exact).to_f32() } else { exact };
        Some(if scale < f32::MIN_POSITIVE { 1.0 } else { scale })
    }

    fn codes(self, values: &[f32], scale: f32, out: &mut [u8]) {
        match self {
            Self::Fp8 => {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = e4m3(value / scale);
                }
            }
            Self::Int8 => {
                for (out, value) in out.iter_mut().zip(values) {
                    *out = integer(value / scale, -128.0, 127.0) as u8;
                }
            }
            Self::Int4G128 => {
                for (out, [low, high]) in out.iter_mut().zip(values.as_chunks::<2>().0) {
                    let code = |value: f32| integer(value / scale, -8.0, 7.0).wrapping_add(8) as u8;
                    *out = code(*low) | code(*high) << 4;
                }
            }
        }
    }
}

fn size(tensor: &Tensor) -> (usize, usize) {
    let cols = tensor.shape.last().map_or(1, |&cols| cols as usize);
    (tensor.len() / cols.max(1), cols)
}

/// The element type of scales. That of f16 is too narrow: the scale of a row of small weights would be zero.
fn scale_type(tensor: &Tensor) -> DType {
    if tensor.dtype == DType::Bf16 { DType::Bf16 } else { DType::F32 }
}

/// The nearest integer, of two the even one, in two's complement.
fn integer(value: f32, least: f32, most: f32) -> u32 {
    // At this magnitude neighbouring floats differ by one, so that the sum is rounded to an integer, in its low bits.
    const ONES: f32 = 12_582_912.0;
    (value.clamp(least, most) + ONES).to_bits().wrapping_sub(ONES.to_bits())
}

/// The code of the nearest e4m3 number, of two the even one; 448 if it is larger.
fn e4m3(value: f32) -> u8 {
    // Neighbouring floats differ by 2^-9 here, as the subnormals of e4m3 do.
    const STEPS: f32 = 16_384.0;
    let magnitude = value.abs().min(448.0);
    let subnormal = (magnitude + STEPS).to_bits().wrapping_sub(STEPS.to_bits());
    let bits = magnitude.to_bits();
    // Twenty of 23 bits are rounded away; the bias is 120 less.
    let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
    let normal = rounded.wrapping_sub(120 << 3);
    let code = if magnitude < 1.0 / 64.0 { subnormal } else { normal };
    code as u8 | (value.to_bits() >> 24 & 0x80) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::import;
    use crate::preset::preset;

    #[test]
    fn shards_import_as_one_file_does() {
        let parent = tempfile::tempdir().expect("a folder");
        let toy = preset("toy-2l").expect("toy-2l");
        let with = Quantisation { format: Format::Fp8, lm_head: Some(Format::Int8) };
        let models = [1, 60_000, 1 << 40].map(|shard_bytes| {
            let dir = parent.path().join(shard_bytes.to_string());
            let written = quantise_in_shards(&toy, with, &dir, shard_bytes).expect("a folder");
            // The embedding and norms in 16 bits, a byte for each other weight, and 1280 scales.
            assert_eq!((written.matrices, written.bytes), (15, 33_408 + 90_112 + 2_560));
            import(&dir).expect("an import")
        });
        for id in (0..).map(TensorId).take(toy.graph.tensors.len()) {
            let bytes = |i: usize| models[i].weights.bytes(id);
            assert!(bytes(0) == bytes(2) && bytes(1) == bytes(2), "{id:?}");
        }
    }

    #[test]
    fn larger_values_are_the_largest_number() {
        assert_eq!([448.0, 449.75, 464.0, 1e30].map(e4m3), [0x7e; 4]);
        assert_eq!([-449.75, -0.0, 0.0].map(e4m3), [0xfe, 0x80, 0]);
        assert_eq!(
            [127.6, 128.0, -127.5, -129.0].map(|x| integer(x, -128.0, 127.0) as u8 as i8),
            [127, 127, -128, -128]
        );
    }
}
