//! `amk bundle`: checks files that prove schedules, as far as possible without the card they were measured on.

use std::path::Path;

use ir::Target;
use search::{Bundle, Refusal};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::{BundleArgs, DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, report};

const BYTES_MAX: u64 = 16 << 20;

/// Models with at most this many bytes of weights are run on the reference VM without `--reference`: some seconds on two cores.
const REFERENCE_BYTES_MAX: usize = 600 << 20;

pub(crate) fn run(args: &BundleArgs) -> Outcome {
    let mut documents = Vec::new();
    let mut exit = Exit::Yes;
    for path in &args.files {
        let (mut document, status) = match check(args, path)? {
            Ok((document, status)) => {
                report::say(&format!("{}: {}", path.display(), status));
                (document, status)
            }
            Err((why, reason)) => {
                report::say(&format!("{}: REFUSED: {reason}", path.display()));
                exit = if exit == Exit::Integrity { exit } else { why };
                // What is no bundle proves nothing, and need not have been one.
                let status = if why == Exit::Usage { Status::NoEvidence } else { Status::Altered };
                (json!({"reason": reason}), status)
            }
        };
        document["file"] = json!(path);
        document["holds"] = json!(matches!(status, Status::Holds | Status::Stale));
        document["status"] = json!(status);
        documents.push(document);
        if args.current && status == Status::Stale && exit == Exit::Yes {
            exit = Exit::No;
        }
    }
    if exit == Exit::No && args.current {
        report::say(
            "--current: evidence of another build is not enough; measure it again with amk bench --bundle",
        );
    }
    report::document(&json!({"schema": "amk.bundles.v1", "bundles": documents}))?;
    Ok(exit)
}

/// The status of evidence, and of a number that follows from it, under this build; the worst is last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "lowercase")]
pub(super) enum Status {
    /// Everything follows, and this build has the measured kernel.
    Holds,
    /// It was right for another build: the kernel or the program has changed since.
    Stale,
    /// A number without evidence.
    #[strum(to_string = "no evidence")]
    NoEvidence,
    /// It proves nothing.
    Altered,
}

/// The exit code of a refused bundle, and the reason.
type Refusing = (Exit, String);

/// The contents of a bundle and its checks, or why it is refused. A file that cannot be read is an outer error.
fn check(args: &BundleArgs, path: &Path) -> Result<Result<(Value, Status), Refusing>, Failure> {
    let text = files::read_text(path, BYTES_MAX)?;
    let bundle = match Bundle::read(&text) {
        Ok(bundle) => bundle,
        Err(refusal) => return Ok(Err(refused(&refusal))),
    };
    let place = PlaceArgs {
        target: Some(bundle.target.clone()),
        device: DeviceChoice::Cpu,
        kv_capacity: Some(bundle.kv_capacity),
        ..PlaceArgs::default()
    };
    let context = Context::load(args.model.as_ref().unwrap_or(&bundle.model), &place)?;
    let target = Target::by_name(&bundle.target)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let mut checked =
        vec!["the hash fits".to_owned(), "the figures follow from the samples".to_owned()];
    let here = context.kernel_id(&bundle.config.kernel);
    let same_kernel = here == bundle.kernel_id;
    let other_kernel = || {
        format!("this build has another kernel ({here}); the time is that of {}", bundle.kernel_id)
    };
    let rebuilt = match bundle.rebuild(context.graph(), &target) {
        Ok(_) => {
            checked.push(format!("the schedule lowers to program {}", bundle.program_id));
            Ok(())
        }
        Err(Refusal::Stale(why)) => Err(why),
        Err(refusal) => return Ok(Err(refused(&refusal))),
    };
    // The schedule is run only if it still lowers to the measured program.
    if rebuilt.is_ok() && (args.reference || context.graph().weight_bytes() <= REFERENCE_BYTES_MAX)
    {
        match reference(&context, &bundle)? {
            Ok(line) => checked.push(line),
            Err(reason) => return Ok(Err((Exit::No, reason))),
        }
    }
    let stale = rebuilt.err().or_else(|| (!same_kernel).then(other_kernel));
    let (build, status) = match stale {
        None => ("this build has the same kernel".to_owned(), Status::Holds),
        Some(why) => (format!("stale: {why}; built as {}", bundle.conditions.amk), Status::Stale),
    };
    say(&bundle, &checked, &build);
    let document = json!({
        "model": bundle.model,
        "target": bundle.target,
        "context": bundle.context,
        "schedule_id": bundle.schedule_id,
        "program_id": bundle.program_id,
        "kernel_id": bundle.kernel_id,
        "same_kernel": same_kernel,
        "built": bundle.conditions.amk,
        "us_per_token": bundle.median_us,
        "latency_kind": search::LatencyKind::MeasuredGpu,
        "ci_us": bundle.ci_us,
        "bound_us": bundle.bound_us,
        "checked": checked,
    });
    Ok(Ok((document, status)))
}

fn refused(refusal: &Refusal) -> Refusing {
    let exit = match refusal {
        Refusal::Unreadable(_) => Exit::Usage,
        Refusal::Tampered(_) => Exit::Integrity,
        Refusal::Unproven(_) | Refusal::Stale(_) => Exit::No,
    };
    (exit, refusal.to_string())
}

/// Runs the program on the reference VM, as the gate of a search does.
fn reference(context: &Context, bundle: &Bundle) -> Result<Result<String, String>, Failure> {
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let gate = context.gate(bundle.seed, None, &kernel_id)?;
    let lowered = gate.lower(&bundle.config);
    let assessed = lowered.and_then(|candidate| gate.reference(&candidate));
    Ok(match assessed {
        Ok(_) => {
            let scope = gate.expected().reference_scope();
            Ok(format!("it agrees with the graph on the reference VM at {scope}"))
        }
        Err(dropped) => Err(dropped.to_string()),
    })
}

fn say(bundle: &Bundle, checked: &[String], build: &str) {
    let conditions = &bundle.conditions;
    let mut rows = vec![
        ("model", format!("{} {} for {}", bundle.model, bundle.dtype, bundle.target)),
        (
            "measured",
            format!(
                "{:.1} us per token (99 % interval {:.1} to {:.1}), {:.1} % of the bound of {:.1} us, at {} tokens of context",
                bundle.median_us,
                bundle.ci_us[0],
                bundle.ci_us[1],
                100.0 * bundle.bound_us / bundle.median_us,
                bundle.bound_us,
                bundle.context
            ),
        ),
        (
            "on",
            format!(
                "{}, driver {}, CUDA {}, NVRTC {}, amk {}",
                conditions.card,
                conditions.driver,
                conditions.cuda,
                conditions.nvrtc,
                conditions.amk
            ),
        ),
    ];
    rows.extend(checked.iter().map(|line| ("checked", line.clone())));
    rows.push(("build", build.to_owned()));
    report::table(&rows);
}
