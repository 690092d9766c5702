//! `amk diff`: the difference of two schedules and its effect, or of two programs task by task.

use std::path::Path;

use ir::Target;
use ir::schedule::{ActsOn, ScheduleConfig};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::cli::{DeviceChoice, DiffArgs, PlaceArgs};
use crate::config_source::ConfigSource;
use crate::context::Context;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::report::{self, Answer};

mod programs;

use programs::ProgramDiff;

/// The model for which a schedule is read if none is named: a schedule that is legal for every model is legal for it.
const ANY_MODEL: &str = "toy";

/// How two schedules or two programs differ.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct Difference {
    #[schemars(extend("const" = "amk.diff.v2"))]
    schema: &'static str,
    /// schedules or programs.
    kind: &'static str,
    /// The first, as named in the arguments.
    a: String,
    /// The second.
    b: String,
    /// Whether they are the same.
    same: bool,
    /// Hashes of the two schedules or programs.
    ids: [String; 2],
    /// The knobs that differ, of schedules.
    #[serde(skip_serializing_if = "Option::is_none")]
    knobs: Option<Vec<KnobChange>>,
    /// The cost on a GPU of a switch from the first to the second: nothing, program (tables are uploaded) or kernel
    /// (compiled and launched).
    #[serde(skip_serializing_if = "Option::is_none")]
    acts_on: Option<&'static str>,
    /// The two lowered programs, if a model was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    lowered: Option<Lowered>,
    /// The tasks that differ, of programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    programs: Option<ProgramDiff>,
}

/// One knob that differs.
#[derive(Debug, Serialize, JsonSchema)]
struct KnobChange {
    /// Its path.
    knob: &'static str,
    /// Its value in the first.
    a: Value,
    /// Its value in the second.
    b: Value,
    /// program or kernel.
    acts_on: &'static str,
    /// What it decides.
    decides: &'static str,
}

/// The programs that two schedules lower to.
#[derive(Debug, Serialize, JsonSchema)]
struct Lowered {
    model: String,
    target: String,
    program_ids: [String; 2],
    kernel_ids: [String; 2],
    /// Microseconds per token that the cost model predicts, at 128 tokens of context or the whole cache.
    predicted_us: [f64; 2],
    /// The tasks that differ.
    programs: ProgramDiff,
}

pub(crate) fn answer(args: &DiffArgs) -> Result<Answer<Difference>, Failure> {
    let document = match (program_path(&args.a), program_path(&args.b)) {
        (Some(a), Some(b)) => of_programs(a, b)?,
        (None, None) => of_schedules(args)?,
        (Some(_), None) | (None, Some(_)) => {
            return Err(Failure::usage(format!(
                "{} and {} are a program and a schedule; name two programs (.amk, .amkp) or two schedules (JSON)",
                args.a, args.b
            )));
        }
    };
    document.say();
    Ok(Answer { document, exit: Exit::Yes })
}

/// Whether a schedule or program can be read at all.
pub(crate) fn check(source: &ConfigSource) -> Result<(), Failure> {
    match program_path(source) {
        Some(path) => files::open(path).map(drop),
        None => read_for_any(source).map(drop),
    }
}

fn program_path(source: &ConfigSource) -> Option<&Path> {
    let ConfigSource::File(path) = source else { return None };
    let extension = path.extension()?.to_str()?;
    ["amk", "amkp"].contains(&extension).then_some(path)
}

fn of_programs(a: &Path, b: &Path) -> Result<Difference, Failure> {
    let pair = [files::open(a)?, files::open(b)?];
    let diff = ProgramDiff::of(&pair[0], &pair[1]);
    let ids = pair.map(|program| program.id());
    Ok(Difference {
        schema: "amk.diff.v2",
        kind: "programs",
        a: a.display().to_string(),
        b: b.display().to_string(),
        same: ids[0] == ids[1],
        ids,
        programs: Some(diff),
        ..Difference::default()
    })
}

fn of_schedules(args: &DiffArgs) -> Result<Difference, Failure> {
    let pair = match &args.model {
        Some(name) => {
            let device = DeviceChoice::Cpu;
            let place = PlaceArgs { target: args.target.clone(), device, ..PlaceArgs::default() };
            let context = Context::load(name, &place)?;
            let pair = [context.valid_config(&args.a)?, context.valid_config(&args.b)?];
            return Ok(Difference {
                lowered: Some(lower(&context, &pair)?),
                ..difference(args, &pair)
            });
        }
        None => [read_for_any(&args.a)?, read_for_any(&args.b)?],
    };
    Ok(difference(args, &pair))
}

/// Reads a schedule for no model in particular: checks values against the knob table, but not the rules between knobs.
fn read_for_any(source: &ConfigSource) -> Result<ScheduleConfig, Failure> {
    let model = model::load(ANY_MODEL)?;
    let target = Target::by_name("h200").map_err(|error| Failure::usage(error.to_string()))?;
    ir::schedule::parse_config(&source.text()?, &model.graph, &target)
        .map_err(|violations| Failure::refused(format!("{source}: {violations}")))
}

fn difference(args: &DiffArgs, [a, b]: &[ScheduleConfig; 2]) -> Difference {
    let changes = search::changes(a, b);
    let kernel = changes.iter().any(|change| change.knob.acts_on() == ActsOn::Kernel);
    let knobs: Vec<KnobChange> = changes
        .iter()
        .map(|change| KnobChange {
            knob: change.knob.path(),
            a: change.from.to_json(),
            b: change.to.to_json(),
            acts_on: change.knob.acts_on().name(),
            decides: change.knob.desc(),
        })
        .collect();
    Difference {
        schema: "amk.diff.v2",
        kind: "schedules",
        a: args.a.to_string(),
        b: args.b.to_string(),
        same: knobs.is_empty(),
        ids: [a.id(), b.id()],
        acts_on: Some(match (knobs.is_empty(), kernel) {
            (true, _) => "nothing",
            (false, true) => "kernel",
            (false, false) => "program",
        }),
        knobs: Some(knobs),
        ..Difference::default()
    }
}

fn lower(context: &Context, [a, b]: &[ScheduleConfig; 2]) -> Result<Lowered, Failure> {
    let pair = [context.lowered(a)?, context.lowered(b)?];
    let position = context.predicted_at();
    let predict = |program, config: &ScheduleConfig| {
        lower::predict(program, &config.kernel, &context.target, position).latency_us
    };
    Ok(Lowered {
        model: context.graph().name.clone(),
        target: context.target.name.clone(),
        program_ids: [pair[0].id(), pair[1].id()],
        kernel_ids: [context.kernel_id(&a.kernel), context.kernel_id(&b.kernel)],
        predicted_us: [predict(&pair[0], a), predict(&pair[1], b)],
        programs: ProgramDiff::of(&pair[0], &pair[1]),
    })
}

impl Difference {
    fn say(&self) {
        if self.same {
            report::say(&format!("the two {} are the same: {}", self.kind, self.ids[0]));
        }
        let word = |value| report::word(Some(value));
        for knob in self.knobs.iter().flatten() {
            let KnobChange { knob, a, b, acts_on, decides } = knob;
            report::say(&format!("  {knob}: {} -> {} ({acts_on})  {decides}", word(a), word(b)));
        }
        match self.acts_on {
            Some("kernel") => report::say("  a kernel is compiled and launched for it"),
            Some("program") => report::say("  the kernel stays; new tables are uploaded"),
            _ => {}
        }
        if let Some(lowered) = &self.lowered {
            let [a, b] = lowered.predicted_us;
            report::say(&format!(
                "  {} for {}: {a:.1} us predicted -> {b:.1} us predicted ({:+.2} %)",
                lowered.model,
                lowered.target,
                100.0 * (b / a - 1.0)
            ));
            lowered.programs.say();
        }
        if let Some(programs) = &self.programs {
            programs.say();
        }
    }
}
