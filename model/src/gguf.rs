//! GGUF files: a header of typed values and the places of tensors, then their bytes.
//!
//! The header is not trusted: every count and length is compared with what is left of the file before it is used,
//! texts are borrowed from it, and the elements of lists are read only where they are wanted.

mod import;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::collections::{HashMap, HashSet};
use std::fmt;

use ir::DType;

pub(crate) use self::import::{import, tokenizer};
use crate::error::quoted;
use crate::quantised::BlockType;

/// The first four bytes.
const MAGIC: &[u8] = b"GGUF";
/// Alignment of tensors without `general.alignment`.
const ALIGNMENT: u64 = 32;
/// Largest alignment.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Longest name of a tensor.
const NAME_MAX: usize = 256;
/// Most dimensions of a tensor.
const RANK_MAX: u32 = 4;
/// Least bytes of a value and of a tensor in the header.
const LEAST_VALUE: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 4 + 4 + 8;

/// A value of the header.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Whole(i128),
    Real(f64),
    Flag(bool),
    Text(&'a str),
    List(List<'a>),
}

/// A list whose elements lie within its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct List<'a> {
    kind: u32,
    count: u64,
    bytes: &'a [u8],
}

impl<'a> List<'a> {
    /// The elements, if they are texts in UTF-8.
    pub(crate) fn texts(self) -> Option<Vec<&'a str>> {
        let mut reader = Reader { file: self.bytes, at: 0 };
        let mut text = |_| reader.text("an element").ok();
        (self.kind == 8).then(|| (0..self.count).map(&mut text).collect())?
    }

    /// The elements, if they are numbers of 32 bits.
    pub(crate) fn numbers(self) -> Option<Vec<f32>> {
        let number = |bytes: &[u8; 4]| match self.kind {
            4 => Some(u32::from_le_bytes(*bytes) as f32),
            5 => Some(i32::from_le_bytes(*bytes) as f32),
            6 => Some(f32::from_le_bytes(*bytes)),
            _ => None,
        };
        self.bytes.as_chunks::<4>().0.iter().map(number).collect()
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(n) => write!(f, "{n}"),
            Self::Real(x) => write!(f, "{x}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Text(text) => f.write_str(&quoted(text)),
            Self::List(list) => write!(f, "a list of {}", list.count),
        }
    }
}

/// The header of a file.
#[derive(Debug)]
pub(crate) struct Header<'a> {
    pub(crate) values: HashMap<&'a str, Value<'a>>,
    pub(crate) tensors: Vec<Info>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Info {
    pub(crate) name: String,
    /// Its element type, or the name of one that is not read.
    pub(crate) element: Result<BlockType, String>,
    /// Rows first, as in a safetensors header.
    pub(crate) shape: Vec<u64>,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// 0 for an unknown type.
    pub(crate) bytes: u64,
}

/// Reads the header.
pub(crate) fn parse(file: &[u8]) -> Result<Header<'_>, String> {
    let mut reader = Reader { file, at: 0 };
    if reader.take(4, "the magic number").ok() != Some(MAGIC) {
        return Err("does not begin with GGUF; it is not a GGUF file".to_owned());
    }
    let version = reader.u32("the version")?;
    if !matches!(version, 2 | 3) {
        return Err(format!("has version {version}; supported: 2 and 3, little-endian"));
    }
    let tensors = reader.count("tensors", LEAST_TENSOR)?;
    let values = reader.count("values", LEAST_VALUE)?;
    let mut map = HashMap::new();
    for _ in 0..values {
        let key = reader.text("a key")?;
        let kind = reader.u32("a type")?;
        let value = reader.value(kind, key)?;
        if map.insert(key, value).is_some() {
            return Err(format!("has the value {} twice", quoted(key)));
        }
    }
    let alignment = match map.get("general.alignment") {
        None => ALIGNMENT,
        Some(&Value::Whole(n)) if n > 0 && n <= i128::from(ALIGNMENT_MAX) => n as u64,
        Some(other) => {
            return Err(format!("has general.alignment {other}; supported: 1 to {ALIGNMENT_MAX}"));
        }
    };
    let mut list = Vec::new();
    for _ in 0..tensors {
        list.push(reader.tensor()?);
    }
    let start = (reader.at as u64).next_multiple_of(alignment);
    place(&mut list, start, alignment, file.len() as u64)?;
    Ok(Header { values: map, tensors: list })
}

/// Turns offsets after the header into offsets in the file, and checks them.
fn place(tensors: &mut [Info], start: u64, alignment: u64, size: u64) -> Result<(), String> {
    let mut seen = HashSet::new();
    for tensor in &mut *tensors {
        let name = quoted(&tensor.name);
        if !seen.insert(tensor.name.clone()) {
            return Err(format!("has tensor {name} twice"));
        }
        if !tensor.offset.is_multiple_of(alignment) {
            let at = tensor.offset;
            return Err(format!(
                "tensor {name} begins at {at}; expected a multiple of {alignment}"
            ));
        }
        let offset = start.checked_add(tensor.offset);
        let ends = |at: &u64| at.checked_add(tensor.bytes).is_some_and(|end| end <= size);
        let Some(offset) = offset.filter(ends) else {
            return Err(format!(
                "tensor {name} claims {} bytes at {} after a header of {start}, but the file has {size} bytes; it is \
                 truncated",
                tensor.bytes, tensor.offset
            ));
        };
        tensor.offset = offset;
    }
    let mut order: Vec<&Info> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    match order.windows(2).find(|pair| pair[0].offset + pair[0].bytes > pair[1].offset) {
        None => Ok(()),
        Some(pair) => {
            let (one, two) = (quoted(&pair[0].name), quoted(&pair[1].name));
            Err(format!("tensors {one} and {two} overlap; the file is corrupt"))
        }
    }
}

/// Reads a file from its start.
struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> u64 {
        (self.file.len() - self.at) as u64
    }

    fn take(&mut self, bytes: u64, what: &str) -> Result<&'a [u8], String> {
        if bytes > self.left() {
            return Err(format!(
                "ends within {what}: {bytes} bytes expected at {}, {} left; it is truncated",
                self.at,
                self.left()
            ));
        }
        let start = self.at;
        self.at += bytes as usize;
        Ok(&self.file[start..self.at])
    }

    fn word<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut word = [0; N];
        word.copy_from_slice(self.take(N as u64, what)?);
        Ok(word)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.word(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.word(what).map(u64::from_le_bytes)
    }

    /// A number of things that take at least `least` bytes each.
    fn count(&mut self, what: &str, least: u64) -> Result<u64, String> {
        let count = self.u64(what)?;
        let most = self.left() / least;
        if count > most {
            return Err(format!("claims {count} {what}; what is left of it holds at most {most}"));
        }
        Ok(count)
    }

    fn text(&mut self, what: &str) -> Result<&'a str, String> {
        let length = self.u64(what)?;
        let at = self.at;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|_| format!("{what} at {at} is not UTF-8"))
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value<'a>, String> {
        let whole = |n: i64| Value::Whole(i128::from(n));
        Ok(match kind {
            0 => whole(i64::from(self.word::<1>(key)?[0])),
            1 => whole(i64::from(i8::from_le_bytes(self.word(key)?))),
            2 => whole(i64::from(u16::from_le_bytes(self.word(key)?))),
            3 => whole(i64::from(i16::from_le_bytes(self.word(key)?))),
            4 => whole(i64::from(self.u32(key)?)),
            5 => whole(i64::from(i32::from_le_bytes(self.word(key)?))),
            6 => Value::Real(f64::from(f32::from_le_bytes(self.word(key)?))),
            7 => Value::Flag(self.word::<1>(key)?[0] != 0),
            8 => Value::Text(self.text(key)?),
            9 => Value::List(self.list(key)?),
            10 => Value::Whole(i128::from(self.u64(key)?)),
            11 => whole(i64::from_le_bytes(self.word(key)?)),
            12 => Value::Real(f64::from_le_bytes(self.word(key)?)),
            _ => return Err(format!("value {} has type {kind}; supported: 0 to 12", quoted(key))),
        })
    }

    /// Skips a list, whose elements are read later if at all.
    fn list(&mut self, key: &str) -> Result<List<'a>, String> {
        let kind = self.u32(key)?;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => {
                return Err(format!(
                    "list {} has elements of type {kind}; supported: 0 to 8 and 10 to 12",
                    quoted(key)
                ));
            }
        };
        let count = self.count("elements of a list", size)?;
        let start = self.at;
        if kind == 8 {
            for _ in 0..count {
                let length = self.u64(key)?;
                self.take(length, key)?;
            }
        } else {
            self.take(count * size, key)?;
        }
        Ok(List { kind, count, bytes: &self.file[start..self.at] })
    }

    fn tensor(&mut self) -> Result<Info, String> {
        let name = self.text("a tensor's name")?;
        if name.len() > NAME_MAX {
            return Err(format!("tensor {} has a name of {} bytes", quoted(name), name.len()));
        }
        let rank = self.u32("a number of dimensions")?;
        if rank > RANK_MAX {
            let name = quoted(name);
            return Err(format!(
                "tensor {name} has {rank} dimensions; supported: up to {RANK_MAX}"
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            shape.push(self.u64("a dimension")?);
        }
        let element = element(self.u32("an element type")?);
        let offset = self.u64("an offset")?;
        let row = shape.first().copied().unwrap_or(1);
        shape.reverse();
        let mut info = Info { name: name.to_owned(), element, shape, offset, bytes: 0 };
        let Ok(kind) = info.element else { return Ok(info) };
        let (length, bytes) = (kind.len() as u64, kind.bytes() as u64);
        if !row.is_multiple_of(length) {
            return Err(format!(
                "tensor {} has rows of {row} elements; blocks of {} have {length}: expected a multiple",
                quoted(name),
                kind.name()
            ));
        }
        let elements = info.shape.iter().try_fold(1_u64, |all, &side| all.checked_mul(side));
        let total = elements.and_then(|elements| (elements / length).checked_mul(bytes));
        info.bytes = total.ok_or_else(|| {
            format!("tensor {} has shape {:?}, which is too large", quoted(name), info.shape)
        })?;
        Ok(info)
    }
}

/// The element type with this number, or its name.
fn element(number: u32) -> Result<BlockType, String> {
    const OTHERS: [(u32, &str); 23] = [
        (9, "Q8_1"),
        (10, "Q2_K"),
        (11, "Q3_K"),
        (15, "Q8_K"),
        (16, "IQ2_XXS"),
        (17, "IQ2_XS"),
        (18, "IQ3_XXS"),
        (19, "IQ1_S"),
        (20, "IQ4_NL"),
        (21, "IQ3_S"),
        (22, "IQ2_S"),
        (23, "IQ4_XS"),
        (24, "I8"),
        (25, "I16"),
        (26, "I32"),
        (27, "I64"),
        (28, "F64"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (41, "Q1_0"),
    ];
    Ok(match number {
        0 => BlockType::Float(DType::F32),
        1 => BlockType::Float(DType::F16),
        30 => BlockType::Float(DType::Bf16),
        2 => BlockType::Q4_0,
        3 => BlockType::Q4_1,
        6 => BlockType::Q5_0,
        7 => BlockType::Q5_1,
        8 => BlockType::Q8_0,
        12 => BlockType::Q4K,
        13 => BlockType::Q5K,
        14 => BlockType::Q6K,
        _ => {
            let named = OTHERS.iter().find(|(n, _)| *n == number);
            return Err(
                named.map_or_else(|| format!("number {number}"), |(_, name)| (*name).to_owned())
            );
        }
    })
}
