//! `amk export`: a model as a Hugging Face folder.

use serde_json::json;

use crate::cli::ExportArgs;
use crate::failure::{Exit, Outcome};
use crate::spinner::Spinner;
use crate::{models, report};

pub(crate) fn run(args: &ExportArgs) -> Outcome {
    let model = models::load(&args.model)?;
    let working = Spinner::on(format!("writing {}", args.out.display()));
    model::export(&model, &args.out)?;
    drop(working);
    report::document(&json!({
        "schema": "amk.export.v1",
        "model": model.graph.name,
        "out": args.out,
        "tensors": model.graph.tensors.len(),
        "bytes": model.graph.weight_bytes(),
    }))?;
    report::say(&format!("{} written to {}", model.graph.name, args.out.display()));
    Ok(Exit::Yes)
}
