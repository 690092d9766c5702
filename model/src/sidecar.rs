//! `amk.json`: what a model folder's own files cannot say about how its reference was computed.
//!
//! There is one field. PyTorch's `model.to(dtype)` casts the rotary frequencies along with the weights, and whoever trained or
//! measured a model that way has other logits than `from_pretrained` gives, which keeps the frequencies in float32. Nothing in
//! `config.json` tells the two apart, so `{"rope_frequencies": "stored"}` asks for frequencies rounded to the stored type.

use std::path::Path;

use half::{bf16, f16};
use ir::{DType, Graph};
use serde_json::Value;

use crate::error::{ModelError, Problem, shown};
use crate::files;

/// The file's name in a model folder.
pub(crate) const FILE: &str = "amk.json";

/// Applies the folder's `amk.json`, if it has one.
pub(crate) fn apply(dir: &Path, graph: &mut Graph) -> Result<(), ModelError> {
    let path = dir.join(FILE);
    let Some(object) = files::read_object(&path, files::SMALL_FILE_MAX)? else {
        return Ok(());
    };
    let mut problems = Vec::new();
    for (field, value) in &object {
        match (field.as_str(), value.as_str()) {
            ("rope_frequencies", Some("stored")) => round_frequencies(graph),
            ("rope_frequencies", Some("f32")) => {}
            ("rope_frequencies", _) => {
                let reason = format!("is {}; it must be \"f32\" or \"stored\"", shown(value));
                problems.push(Problem::new(field.clone(), reason));
            }
            _ => problems.push(Problem::new(field.clone(), unknown(value))),
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ModelError::Config { path, problems }) }
}

fn unknown(value: &Value) -> String {
    format!("is {}, but there is no such field; known: rope_frequencies", shown(value))
}

fn round_frequencies(graph: &mut Graph) {
    for frequency in &mut graph.inv_freq {
        *frequency = match graph.dtype {
            DType::F32 => *frequency,
            DType::F16 => f16::from_f32(*frequency).to_f32(),
            DType::Bf16 => bf16::from_f32(*frequency).to_f32(),
        };
    }
}
