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
    sequences: Option<u32>,
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
        let bench = document.get("schema").and_then(Value::as_str).and_then(Bench::named);
        let Some(bench) = bench else {
            return Bundle::read(text).map(Self::from);
        };
        let sealed = corpus::check_seal(&document);
        let document = Value::Object(document);
        let header = Header::deserialize(&document).map_err(unreadable)?;
        let unproven = |what: &str| Refusal::Unproven(what.to_owned());
        let conditions = header.conditions.ok_or_else(|| unproven("it was not measured"))?;
        // Of an edited document the figure that is wrong is named too, if its samples were not edited.
        let samples = match (sealed, bench.check(&document)) {
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
        let mut builds = vec![build(&document, header.sequences.unwrap_or(1))];
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

/// The documents of `amk bench`.
#[derive(Clone, Copy)]
enum Bench {
    Step,
    Batch,
    Prompt,
}

impl Bench {
    fn named(schema: &str) -> Option<Self> {
        match schema {
            "amk.bench.v1" => Some(Self::Step),
            "amk.bench.sequences.v1" => Some(Self::Batch),
            "amk.bench.prefill.v1" => Some(Self::Prompt),
            _ => None,
        }
    }

    /// Checks the figures that follow from samples; returns the number of samples.
    fn check(self, document: &Value) -> Result<usize, String> {
        let mut samples = 0;
        let mut wrong = Vec::new();
        for (at, found) in self.figures(document, &mut samples)? {
            let held = number(document, &at);
            let same = (held - found).abs() <= ROUNDING * found.abs();
            if !same {
                wrong.push(format!("its {at} is {held}, its samples have {found}"));
            }
        }
        if wrong.is_empty() { Ok(samples) } else { Err(wrong.join("; ")) }
    }

    /// The figures of a document, computed from its samples.
    fn figures(self, document: &Value, samples: &mut usize) -> Result<Vec<(String, f64)>, String> {
        let mut of = |at: &str| -> Result<Vec<f64>, String> {
            let list = document.pointer(at).map(Vec::<f64>::deserialize).and_then(Result::ok);
            let list = list.filter(|list| !list.is_empty());
            *samples += list.as_ref().map_or(0, Vec::len);
            list.ok_or_else(|| format!("it has no samples at {at}"))
        };
        let figures = match self {
            Self::Step => {
                let rounds = document.get("rounds_us").map(Vec::<[f64; 4]>::deserialize);
                let rounds = rounds.and_then(Result::ok).unwrap_or_default();
                let values = Samples { rounds, ..Samples::default() }.of(Side::Candidate);
                let seed = document.get("seed").and_then(Value::as_u64).unwrap_or_default();
                let interval = median_interval(&values, seed);
                let mut figures = vec![
                    ("/us_per_token".to_owned(), median(&values)),
                    ("/ci_us/0".to_owned(), interval.low),
                    ("/ci_us/1".to_owned(), interval.high),
                ];
                let peers = document.get("peers").and_then(Value::as_array).map_or(0, Vec::len);
                for peer in (0..peers).map(|peer| format!("/peers/{peer}")) {
                    let figure = format!("{peer}/us_per_token");
                    if number(document, &figure) > 0.0 {
                        figures.push((figure, median(&of(&format!("{peer}/blocks_us"))?)));
                    }
                }
                *samples += values.len();
                return Ok(figures);
            }
            Self::Batch => {
                let several = median(&of("/us_per_step_rounds")?);
                let one = median(&of("/one/us_per_step_rounds")?);
                vec![
                    ("/us_per_step", several),
                    ("/one/us_per_step", one),
                    ("/times_one", several / one),
                    ("/us_per_token", several / number(document, "/sequences")),
                    ("/tokens_per_s", number(document, "/sequences") * 1e6 / several),
                ]
            }
            Self::Prompt => {
                let runs = of("/ms_runs")?;
                let ms = median(&runs);
                vec![
                    ("/ms", ms),
                    ("/ms_least", runs.iter().copied().fold(f64::INFINITY, f64::min)),
                    ("/ms_most", runs.iter().copied().fold(0.0, f64::max)),
                    ("/tokens_per_second", number(document, "/tokens") / ms * 1e3),
                ]
            }
        };
        Ok(figures.into_iter().map(|(at, found)| (at.to_owned(), found)).collect())
    }
}

fn number(document: &Value, at: &str) -> f64 {
    document.pointer(at).and_then(Value::as_f64).unwrap_or(f64::NAN)
}
