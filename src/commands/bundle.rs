//! `amk bundle`: checks files that prove schedules, as far as that goes without the card they were measured on.

use std::path::Path;

use ir::Target;
use search::{Bundle, Refusal};
use serde_json::{Value, json};

use crate::cli::{BundleArgs, DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

/// Longest file that is read.
const BYTES_MAX: u64 = 16 << 20;

/// Models up to so many bytes of weights are run on the reference machine without being asked: some seconds on two cores.
const REFERENCE_BYTES_MAX: usize = 600 << 20;

pub(crate) fn run(args: &BundleArgs) -> Outcome {
    let mut documents = Vec::new();
    let mut exit = Exit::Yes;
    for path in &args.files {
        let (document, refused) = match check(args, path)? {
            Ok(document) => (document, None),
            Err(refused) => (json!({"reason": refused.2}), Some(refused)),
        };
        let mut document = document;
        let status = match (&refused, document["same_kernel"].as_bool()) {
            (None, Some(true)) => Status::Holds,
            (None, _) => Status::Stale,
            (Some((_, Refused::Stale, _)), _) => Status::Stale,
            (Some((_, Refused::Altered, _)), _) => Status::Altered,
        };
        document["file"] = json!(path);
        document["holds"] = json!(refused.is_none());
        document["status"] = json!(status.name());
        documents.push(document);
        match refused {
            None => report::say(&format!("{}: {}", path.display(), status.name())),
            Some((why, _, reason)) => {
                report::say(&format!("{}: REFUSED: {reason}", path.display()));
                exit = if exit == Exit::Integrity { exit } else { why };
            }
        }
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

/// What a bundle is worth to this build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// Everything follows, and this build has the kernel that was measured.
    Holds,
    /// It was right of another build: the kernel or the program is another one now.
    Stale,
    /// It proves nothing.
    Altered,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Stale => "stale",
            Self::Altered => "altered",
        }
    }
}

/// Why a bundle is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    Stale,
    Altered,
}

/// The exit code, what kind of refusal it is, and the reason.
type Refusing = (Exit, Refused, String);

/// What a bundle says and what was checked, or why it is refused. A file that cannot be read fails outright.
fn check(args: &BundleArgs, path: &Path) -> Result<Result<Value, Refusing>, Failure> {
    let text = read(path)?;
    let bundle = match Bundle::read(&text) {
        Ok(bundle) => bundle,
        Err(refusal) => return Ok(Err(refused(&refusal))),
    };
    let place = PlaceArgs {
        target: Some(bundle.target.clone()),
        device: DeviceChoice::Cpu,
        kv_capacity: Some(bundle.kv_capacity),
    };
    let context = Context::load(args.model.as_ref().unwrap_or(&bundle.model), &place)?;
    let target = Target::by_name(&bundle.target)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    if let Err(refusal) = bundle.rebuild(context.graph(), &target) {
        return Ok(Err(refused(&refusal)));
    }
    let mut checked = vec![
        "the hash fits".to_owned(),
        "the figures follow from the samples".to_owned(),
        format!("the schedule lowers to program {}", bundle.program_id),
    ];
    let weights = context.graph().weight_bytes();
    if args.reference || weights <= REFERENCE_BYTES_MAX {
        match reference(&context, &bundle)? {
            Ok(line) => checked.push(line),
            Err(reason) => return Ok(Err((Exit::No, Refused::Altered, reason))),
        }
    }
    let here = context.kernel_id(&bundle.config.kernel);
    let kernel = if here == bundle.kernel_id {
        "this build has the same kernel".to_owned()
    } else {
        format!(
            "stale: this build has another kernel ({here}); the time is that of {}, built as {}",
            bundle.kernel_id, bundle.conditions.amk
        )
    };
    say(&bundle, &checked, &kernel);
    Ok(Ok(json!({
        "model": bundle.model,
        "target": bundle.target,
        "context": bundle.context,
        "schedule_id": bundle.schedule_id,
        "program_id": bundle.program_id,
        "kernel_id": bundle.kernel_id,
        "same_kernel": here == bundle.kernel_id,
        "built": bundle.conditions.amk,
        "us_per_token": bundle.median_us,
        "latency_kind": search::LatencyKind::MeasuredGpu,
        "ci_us": bundle.ci_us,
        "bound_us": bundle.bound_us,
        "checked": checked,
    })))
}

fn read(path: &Path) -> Result<String, Failure> {
    let unreadable = |error: std::io::Error| {
        Failure::usage(format!("cannot read {}: {error}; check the path", path.display()))
    };
    corpus::files::read_text(path, BYTES_MAX).map_err(unreadable)
}

fn refused(refusal: &Refusal) -> Refusing {
    let (exit, kind) = match refusal {
        Refusal::Unreadable(_) => (Exit::Usage, Refused::Altered),
        Refusal::Tampered(_) => (Exit::Integrity, Refused::Altered),
        Refusal::Unproven(_) => (Exit::No, Refused::Altered),
        Refusal::Stale(_) => (Exit::No, Refused::Stale),
    };
    (exit, kind, refusal.to_string())
}

/// Runs the program on the reference machine, as the gate of a search does.
fn reference(context: &Context, bundle: &Bundle) -> Result<Result<String, String>, Failure> {
    let kernel_id = |kernel: &_| context.kernel_id(kernel);
    let gate = super::evaluate::gate(context, bundle.seed, false, &kernel_id)?;
    let assessed = gate
        .validate(&bundle.config)
        .and_then(|valid| gate.lower(valid))
        .and_then(|candidate| gate.reference(&candidate));
    Ok(match assessed {
        Ok(_) => {
            let scope = gate.expected().reference_scope();
            Ok(format!("it agrees with the graph on the reference machine at {scope}"))
        }
        Err(dropped) => Err(dropped.to_string()),
    })
}

fn say(bundle: &Bundle, checked: &[String], kernel: &str) {
    let conditions = &bundle.conditions;
    let mut rows = vec![
        ("model".to_owned(), format!("{} {} for {}", bundle.model, bundle.dtype, bundle.target)),
        (
            "measured".to_owned(),
            format!(
                "{:.1} us a token (99 % interval {:.1} to {:.1}), {:.1} % of the floor of {:.1} us, at {} tokens of context",
                bundle.median_us,
                bundle.ci_us[0],
                bundle.ci_us[1],
                100.0 * bundle.bound_us / bundle.median_us,
                bundle.bound_us,
                bundle.context
            ),
        ),
        (
            "on".to_owned(),
            format!(
                "{}, driver {}, CUDA {}, amk {}",
                conditions.card, conditions.driver, conditions.cuda, conditions.amk
            ),
        ),
    ];
    rows.extend(checked.iter().map(|line| ("checked".to_owned(), line.clone())));
    rows.push(("kernel".to_owned(), kernel.to_owned()));
    report::table(&rows);
}
