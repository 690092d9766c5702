//! The header of a `.safetensors` file.
//!
//! The format is eight bytes of header length (little-endian), that many bytes of JSON, then the tensors' bytes, each
//! tensor beginning where the one before it ends. The header is not trusted: every length is compared with the file's
//! before it is used, and memory is bounded by the actual size of the file.

use std::collections::HashSet;
use std::fmt;

use ir::DType;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::quoted;

/// Longest JSON header, as in the format's own reader.
const HEADER_MAX: u64 = 100_000_000;
/// Bytes of the header's length.
const PREFIX: usize = 8;
/// Most dimensions of a tensor; no model has more than a few.
const RANK_MAX: usize = 8;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// The format's name of its element type.
    pub(crate) element: String,
    pub(crate) shape: Vec<u64>,
    /// First byte in the file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Entry {
    /// The element type, if it is one of a graph's.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match &self.element[..] {
            "F32" => Some(DType::F32),
            "F16" => Some(DType::F16),
            "BF16" => Some(DType::Bf16),
            _ => None,
        }
    }
}

/// The tensors of a file, in the order of their bytes; or an error.
pub(crate) fn parse(file: &[u8]) -> Result<Vec<Entry>, String> {
    let size = file.len() as u64;
    let Some((prefix, rest)) = file.split_first_chunk::<PREFIX>() else {
        return Err(format!(
            "is {size} bytes long, too short for a safetensors header; download it again"
        ));
    };
    let claimed = u64::from_le_bytes(*prefix);
    if claimed > rest.len() as u64 {
        return Err(format!(
            "claims a header of {claimed} bytes but is only {size} bytes long; it is truncated or not a safetensors file"
        ));
    }
    if claimed > HEADER_MAX {
        return Err(format!("claims a header of {claimed} bytes; supported: up to {HEADER_MAX}"));
    }
    let (json, data) = rest.split_at(claimed as usize);
    let List(raw) =
        serde_json::from_slice(json).map_err(|e| format!("has a malformed header: {e}"))?;
    let mut seen = HashSet::with_capacity(raw.len());
    for (name, _) in &raw {
        if !seen.insert(name.as_str()) {
            return Err(format!("has tensor {} twice", quoted(name)));
        }
    }
    let start = PREFIX as u64 + claimed;
    let mut entries = Vec::with_capacity(raw.len());
    for (name, info) in raw {
        entries.push(entry(name, info, start, data.len() as u64)?);
    }
    entries.sort_by_key(|entry| (entry.offset, entry.bytes));
    contiguous(&entries, start, size)?;
    Ok(entries)
}

fn entry(name: String, info: Info, start: u64, data: u64) -> Result<Entry, String> {
    let [from, to] = info.data_offsets;
    if from > to || to > data {
        return Err(format!(
            "tensor {} claims bytes {from} to {to} of {data} bytes of data; the file is truncated or corrupt",
            quoted(&name)
        ));
    }
    if info.shape.len() > RANK_MAX {
        let rank = info.shape.len();
        return Err(format!(
            "tensor {} has {rank} dimensions; supported: up to {RANK_MAX}",
            quoted(&name)
        ));
    }
    if let Some(bits) = element_bits(&info.dtype) {
        let wanted =
            info.shape.iter().try_fold(bits, |all, &dim| all.checked_mul(dim)).map(|n| n / 8);
        if wanted != Some(to - from) {
            return Err(format!(
                "tensor {} of {} with shape {:?} cannot take {} bytes",
                quoted(&name),
                quoted(&info.dtype),
                info.shape,
                to - from
            ));
        }
    }
    let (offset, bytes) = (start + from, to - from);
    Ok(Entry { name, element: info.dtype, shape: info.shape, offset, bytes })
}

fn contiguous(entries: &[Entry], start: u64, size: u64) -> Result<(), String> {
    let mut end = start;
    for entry in entries {
        if entry.offset != end {
            let what = if entry.offset < end {
                "overlaps the one before it"
            } else {
                "leaves a gap before it"
            };
            return Err(format!("tensor {} {what}; the file is corrupt", quoted(&entry.name)));
        }
        end += entry.bytes;
    }
    if end != size {
        return Err(format!("has {} bytes after its last tensor; the file is corrupt", size - end));
    }
    Ok(())
}

/// Bits of an element type, if they are known.
fn element_bits(name: &str) -> Option<u64> {
    match name {
        "F64" | "I64" | "U64" => Some(64),
        "F32" | "I32" | "U32" => Some(32),
        "F16" | "BF16" | "I16" | "U16" => Some(16),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(8),
        // The format gains new narrow types; they are refused by name only if the model needs the tensor.
        _ => None,
    }
}

#[derive(Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's entries in file order, including duplicates, which a map type would hide.
struct List(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for List {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = List;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<List, A::Error> {
                let mut list = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        list.push((name, map.next_value()?));
                    }
                }
                Ok(List(list))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
