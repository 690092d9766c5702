//! Evidence: a document with a measurement that numbers in pages follow from, a bundle or a document of `amk bench`.

use corpus::Conditions;
use ir::schedule::ScheduleConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::bundle::{Bundle, Refusal};
use crate::device::{Samples, Side};
use crate::measure::{median, median_interval};

/// Largest difference between a figure and what its samples give, relative: both are computed in the same way.
const ROUNDING: f64 = 1e-12;

/// What ran: a kernel build, and the program that it ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Build {
    /// The schedule and the id of the program that it lowered to. A prompt runs in kernels without a program.
    pub program: Option<(ScheduleConfig, String)>,
    /// Id of the kernel build.
    pub kernel_id: String,
    /// Sequences that the kernel was compiled for.
    pub sequences: u32,
}

/// A measurement whose hash fits and whose figures follow from its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// The bundle, if it is one.
    pub bundle: Option<Box<Bundle>>,
    /// The model.
    pub model: String,
    /// The target of the schedule.
    pub target: String,
    /// Positions of the key/value cache.
    pub kv_capacity: Option<u32>,
    /// Where it was measured, and with which build of `amk`.
    pub conditions: Conditions,
    /// What ran.
    pub builds: Vec<Build>,
    /// Number of samples.
    pub samples: usize,
}

/// The fields that every document of `amk bench` has.
#[derive(Deserialize)]
struct Header {
    model: String,
    target: String,
    kv_capacity: Option<u32>,
    conditions: Option<Conditions>,
    correct: bool,
    batch: u32,
}

#[derive(Deserialize)]
struct Ran {
    config: ScheduleConfig,
    program_id: Option<String>,
    kernel_id: String,
}

impl Evidence {
    /// Reads a document and checks everything that needs no model.
    ///
    /// # Errors
    /// If it is no evidence, was edited, proves nothing, or has figures that do not follow from its samples.
    pub fn read(text: &str) -> Result<Self, Refusal> {
        let unreadable = |error: serde_json::Error| Refusal::Unreadable(error.to_string());
        let document: Map<String, Value> = serde_json::from_str(text).map_err(unreadable)?;
        if document.get("schema").and_then(Value::as_str) != Some(BENCH) {
            return Bundle::read(text).map(Self::from);
        }
        let sealed = corpus::check_seal(&document);
        let document = Value::Object(document);
        let header = Header::deserialize(&document).map_err(unreadable)?;
        let unproven = |what: &str| Refusal::Unproven(what.to_owned());
        let conditions = header.conditions.ok_or_else(|| unproven("it was not measured"))?;
        // Of an edited document the figure that is wrong is named too, if its samples were not edited.
        let samples = match (sealed, check(&document)) {
            (Ok(()), Ok(samples)) => samples,
            (Ok(()), Err(why)) | (Err(why), Ok(_)) => return Err(Refusal::Tampered(why)),
            (Err(edited), Err(why)) => return Err(Refusal::Tampered(format!("{edited}; {why}"))),
        };
        if !header.correct {
            return Err(unproven("its values were wrong"));
        }
        let build = |part: &Value, sequences| {
            let Ran { config, program_id, kernel_id } = Ran::deserialize(part)?;
            Ok(Build { program: program_id.map(|id| (config, id)), kernel_id, sequences })
        };
        let mut builds = vec![build(&document, header.batch)];
        builds.extend(document.get("one").map(|one| build(one, 1)));
        let builds: Result<Vec<_>, _> = builds.into_iter().collect();
        Ok(Self {
            bundle: None,
            model: header.model,
            target: header.target,
            kv_capacity: header.kv_capacity,
            conditions,
            builds: builds.map_err(unreadable)?,
            samples,
        })
    }

    /// The commit of the build that measured, if that build knew it.
    #[must_use]
    pub fn commit(&self) -> Option<&str> {
        let (_, commit) = self.conditions.amk.split_once(" (")?;
        commit.strip_suffix(')')
    }
}

impl From<Bundle> for Evidence {
    fn from(bundle: Bundle) -> Self {
        let program = Some((bundle.config, bundle.program_id.clone()));
        let kernel_id = bundle.kernel_id.clone();
        Self {
            model: bundle.model.clone(),
            target: bundle.target.clone(),
            kv_capacity: Some(bundle.kv_capacity),
            conditions: bundle.conditions.clone(),
            builds: vec![Build { program, kernel_id, sequences: 1 }],
            samples: 2 * bundle.rounds_us.len(),
            bundle: Some(Box::new(bundle)),
        }
    }
}

/// The schema of documents of `amk bench`.
const BENCH: &str = "amk.bench.v1";

/// Checks the figures of a document of `amk bench` that follow from samples; returns the number of samples.
fn check(document: &Value) -> Result<usize, String> {
    let mut samples = 0;
    let mut wrong = Vec::new();
    for (at, found) in figures(document, &mut samples)? {
        let held = number(document, &at);
        let same = (held - found).abs() <= ROUNDING * found.abs();
        if !same {
            wrong.push(format!("its {at} is {held}, its samples have {found}"));
        }
    }
    if wrong.is_empty() { Ok(samples) } else { Err(wrong.join("; ")) }
}

/// The figures of a document, computed from its samples.
fn figures(document: &Value, samples: &mut usize) -> Result<Vec<(String, f64)>, String> {
    let mut of = |at: &str| -> Result<Vec<f64>, String> {
        let rounds = document.pointer(at).map(Vec::<[f64; 4]>::deserialize).and_then(Result::ok);
        let rounds = rounds.filter(|rounds| !rounds.is_empty());
        *samples += rounds.as_ref().map_or(0, |rounds| 2 * rounds.len());
        let rounds = rounds.ok_or_else(|| format!("it has no samples at {at}"))?;
        Ok(Samples { rounds, ..Samples::default() }.of(Side::Candidate))
    };
    let values = of("/samples_us")?;
    let seed = document.get("seed").and_then(Value::as_u64).unwrap_or_default();
    let (us, interval) = (median(&values), median_interval(&values, seed));
    let mut figures = vec![
        ("/us".to_owned(), us),
        ("/ci_us/0".to_owned(), interval.low),
        ("/ci_us/1".to_owned(), interval.high),
    ];
    if document.get("one").is_some() {
        let one = median(&of("/one/samples_us")?);
        figures.push(("/one/us".to_owned(), one));
        figures.push(("/times_one".to_owned(), us / one));
    }
    let tokens = document
        .get("prompt")
        .and_then(Value::as_f64)
        .unwrap_or_else(|| number(document, "/batch"));
    figures.push(("/us_per_token".to_owned(), us / tokens));
    let peers = document.get("peers").and_then(Value::as_array).map_or(0, Vec::len);
    for peer in (0..peers).map(|peer| format!("/peers/{peer}")) {
        let figure = format!("{peer}/us_per_token");
        if number(document, &figure) > 0.0 {
            let at = format!("{peer}/blocks_us");
            let blocks = document.pointer(&at).map(Vec::<f64>::deserialize).and_then(Result::ok);
            let blocks = blocks.filter(|blocks| !blocks.is_empty());
            let blocks = blocks.ok_or_else(|| format!("it has no samples at {at}"))?;
            *samples += blocks.len();
            figures.push((figure, median(&blocks)));
        }
    }
    Ok(figures)
}

fn number(document: &Value, at: &str) -> f64 {
    document.pointer(at).and_then(Value::as_f64).unwrap_or(f64::NAN)
}
