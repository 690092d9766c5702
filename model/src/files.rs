//! Files of a model folder: opened without blocking; small ones are read whole, up to a limit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest `config.json`, `generation_config.json`, `tokenizer_config.json` or chat template.
pub(crate) const SMALL_FILE_MAX: u64 = 16 << 20;
/// Largest `tokenizer.json` or `model.safetensors.index.json`.
pub(crate) const LARGE_FILE_MAX: u64 = 256 << 20;

/// A regular file, open for reading, or `None` if there is none. Opening never blocks on a pipe: the folder's author,
/// who is not trusted, controls its contents.
pub(crate) fn open(path: &Path) -> Result<Option<File>, ModelError> {
    let failed = |source| ModelError::io("read", path, source);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path);
    let file = match file {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    // Checks the opened file, since the name may refer to another one by now.
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(ModelError::file(
            path,
            "is not a regular file; a model's files are, or symbolic links to such",
        ));
    }
    Ok(Some(file))
}

/// The bytes of a file, or `None` if there is none.
pub(crate) fn read(path: &Path, max: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let failed = |source| ModelError::io("read", path, source);
    let Some(file) = open(path)? else { return Ok(None) };
    let mut bytes = Vec::new();
    // One byte more than allowed, to detect a file that is too long.
    file.take(max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > max {
        return Err(ModelError::file(
            path,
            format!("is longer than {max} bytes, so it is not read"),
        ));
    }
    Ok(Some(bytes))
}

/// The JSON object in a file, or `None` if there is no file.
pub(crate) fn read_object(path: &Path, max: u64) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(bytes) = read(path, max)? else { return Ok(None) };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(Some(object)),
        Ok(_) => Err(ModelError::file(path, "is valid JSON but not an object")),
        Err(error) => Err(ModelError::file(path, format!("is not valid JSON: {error}"))),
    }
}
