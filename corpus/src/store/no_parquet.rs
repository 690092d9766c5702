//! Replaces Parquet support in a build without it: an export returns an error.

use std::io;
use std::path::Path;

use super::Store;
use crate::error::CorpusError;

const MISSING: &str =
    "this build of amk has no Parquet files; build it with its default features, or use JSON lines";

/// Writes nothing.
///
/// # Errors
/// Always.
pub fn write(_: &Store, folder: &Path) -> Result<u64, CorpusError> {
    Err(CorpusError::io("write", folder, io::Error::new(io::ErrorKind::Unsupported, MISSING)))
}
