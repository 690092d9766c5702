//! Small files, read whole but never beyond a limit.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest `config.json`, `generation_config.json`, `tokenizer_config.json` or chat template.
pub(crate) const SMALL_FILE_MAX: u64 = 16 << 20;
/// Largest `tokenizer.json` or `model.safetensors.index.json`.
pub(crate) const LARGE_FILE_MAX: u64 = 256 << 20;

/// The bytes of a file, or `None` if there is none.
pub(crate) fn read(path: &Path, max: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let failed = |source| ModelError::io("read", path, source);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that is too long from one that just fits.
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
