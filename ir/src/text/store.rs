//! The binary form: a fixed header, then the program in postcard.
//!
//! The header is magic (4 bytes), format version (4), ABI hash (8), BLAKE3 of the payload (32), payload length (8);
//! little-endian.

use crate::program::Program;

use super::FORMAT_VERSION;

const MAGIC: [u8; 4] = *b"AMKP";
const HEAD_BYTES: usize = 4 + 4 + 8 + 32 + 8;

/// Why bytes are not a saved program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The magic is wrong or incomplete.
    #[error("this is not a saved program: it does not begin with `AMKP`")]
    Magic,
    /// A saved program of another format.
    #[error("format version {found}, this is {expected}")]
    Version {
        /// In the file.
        found: u32,
        /// Of this build.
        expected: u32,
    },
    /// A program for another ABI: opcodes or layouts differ.
    #[error("saved for ABI {found:#018x}, this is {expected:#018x}: lower the schedule again")]
    Abi {
        /// In the file.
        found: u64,
        /// Of this build.
        expected: u64,
    },
    /// The bytes end too early, or extra bytes follow.
    #[error("{found} bytes, expected {expected}")]
    Length {
        /// Bytes given.
        found: u64,
        /// Bytes that the header gives.
        expected: u64,
    },
    /// The payload was changed.
    #[error("the checksum does not match: the file is damaged")]
    Checksum,
    /// The payload is intact but not a program.
    #[error("the payload is not a program: {0}")]
    Malformed(postcard::Error),
}

/// Serializes the program. [`load`] gives the same program back.
#[must_use]
pub fn save(program: &Program) -> Vec<u8> {
    let payload = program
        .to_bytes()
        .expect("a program holds nothing that postcard refuses, and memory grows");
    let mut bytes = Vec::with_capacity(HEAD_BYTES + payload.len());
    bytes.extend(MAGIC);
    bytes.extend(FORMAT_VERSION.to_le_bytes());
    bytes.extend(abi::program_hash().to_le_bytes());
    bytes.extend(blake3::hash(&payload).as_bytes());
    bytes.extend((payload.len() as u64).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn take<const N: usize>(bytes: &mut &[u8], whole: usize) -> Result<[u8; N], LoadError> {
    let short = LoadError::Length { found: whole as u64, expected: HEAD_BYTES as u64 };
    let (head, rest) = bytes.split_first_chunk::<N>().ok_or(short)?;
    *bytes = rest;
    Ok(*head)
}

/// Reads a saved program. It need not verify.
///
/// # Errors
/// If the bytes are not what [`save`] of this build writes.
pub fn load(bytes: &[u8]) -> Result<Program, LoadError> {
    let whole = bytes.len();
    if !bytes.starts_with(&MAGIC) {
        return Err(LoadError::Magic);
    }
    let mut rest = &bytes[MAGIC.len()..];
    let version = u32::from_le_bytes(take(&mut rest, whole)?);
    if version != FORMAT_VERSION {
        return Err(LoadError::Version { found: version, expected: FORMAT_VERSION });
    }
    let hash = u64::from_le_bytes(take(&mut rest, whole)?);
    if hash != abi::program_hash() {
        return Err(LoadError::Abi { found: hash, expected: abi::program_hash() });
    }
    let checksum: [u8; 32] = take(&mut rest, whole)?;
    let len = u64::from_le_bytes(take(&mut rest, whole)?);
    if rest.len() as u64 != len {
        return Err(LoadError::Length {
            found: whole as u64,
            expected: len.saturating_add(HEAD_BYTES as u64),
        });
    }
    if blake3::hash(rest) != checksum {
        return Err(LoadError::Checksum);
    }
    Program::from_bytes(rest).map_err(LoadError::Malformed)
}
