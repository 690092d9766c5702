//! `amk quantize`: a quantised copy of a model, as a Hugging Face folder.

use model::{Format, Quantisation};
use serde_json::json;

use crate::cli::{QuantizeArgs, WeightFormat};
use crate::failure::{Exit, Outcome};
use crate::memory::Bytes;
use crate::spinner::Spinner;
use crate::{models, report};

pub(crate) fn run(args: &QuantizeArgs) -> Outcome {
    let model = models::load(&args.model)?;
    let format = match args.format {
        WeightFormat::Fp8 => Format::Fp8,
        WeightFormat::Int8 => Format::Int8,
        WeightFormat::Int4G128 => Format::Int4G128,
    };
    // The only format that the flag takes.
    let lm_head = args.lm_head.as_ref().map(|_| Format::Int8);
    let working = Spinner::on(format!("writing {}", args.out.display()));
    let written = model::quantise(&model, Quantisation { format, lm_head }, &args.out)?;
    drop(working);
    let name: &str = args.format.into();
    report::document(&json!({
        "schema": "amk.quantize.v1",
        "model": model.graph.name,
        "out": args.out,
        "format": name,
        "lm_head": args.lm_head,
        "matrices": written.matrices,
        "bytes": written.bytes,
        "bytes_before": model.graph.weight_bytes(),
    }))?;
    report::say(&format!(
        "{} as {name} written to {}: {} instead of {}",
        model.graph.name,
        args.out.display(),
        Bytes(written.bytes),
        Bytes(model.graph.weight_bytes() as u64),
    ));
    Ok(Exit::Yes)
}
