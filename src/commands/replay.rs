//! `amk replay`: runs the commands of a log again, and compares every answer.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::{ScheduleConfig, read_config};
use serde_json::json;
use vm_host::KvPool;

use crate::cli::{DeviceChoice, KvArgs, PlaceArgs, PrefillChoice, ReplayLogArgs};
use crate::command_log::{Head, Kernel, Recorded};
use crate::context::Context;
use crate::engine::{Built, Kernels, Opening, open};
use crate::failure::{Exit, Failure, Outcome};
use crate::memory::{self, Use};
use crate::report;
use crate::spinner::Spinner;

use again::{Again, Compared, Difference, Halt};

mod again;

/// A kernel of the log, made again.
struct Made {
    program: Arc<Verified<Program>>,
    config: ScheduleConfig,
    seqs: u32,
}

impl Made {
    fn new(context: &Context, of: &Kernel) -> Result<Self, Failure> {
        let text = of.config.to_string();
        let config = read_config(&text, context.graph(), &context.target);
        let config = *config.map_err(|violations| Failure::refused(violations.to_string()))?;
        let program = Arc::new(context.lowered(&config)?);
        Ok(Self { program, config, seqs: of.seqs })
    }

    fn built(&self) -> Built<'_> {
        Built { program: &self.program, config: &self.config, seqs: self.seqs }
    }

    /// Whether it has the code of the log's.
    fn is(&self, context: &Context, of: &Kernel, on_gpu: bool) -> bool {
        let kernel_id = on_gpu.then(|| context.kernel_id_of(&self.config.kernel, self.seqs));
        self.program.id() == of.program_id && kernel_id == of.kernel_id
    }
}

pub(crate) fn run(args: &ReplayLogArgs) -> Outcome {
    let found = Recorded::open(&args.file)?;
    let head = &found.head;
    let context = context(args, head)?;
    let gpu = match context.device {
        DeviceChoice::Eval => None,
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda => context.open_here(false)?,
    };
    let on_gpu = gpu.is_some();
    let device = match context.device {
        DeviceChoice::Eval => "eval",
        _ if on_gpu => "cuda",
        DeviceChoice::Auto | DeviceChoice::Cpu | DeviceChoice::Cuda => "cpu",
    };
    let made = made(&context, head, device)?;
    let (sequences, positions) = (head.places as u64, u64::from(context.kv_capacity));
    let host = Use::Host { sequences, positions };
    memory::check(&context.model, if on_gpu { Use::Device } else { host })?;
    let bits = same_code(&context, head, (device, &made));
    let kernels = made.first().map(|batch| Kernels {
        batch: batch.built(),
        lone: made.get(1).filter(|_| on_gpu).map(Made::built),
        table: None,
    });
    let opening = Opening {
        places: head.places,
        kv_pool: head.kv_pool.map_or(KvPool::Fitting, KvPool::Positions),
        prefill: prefill(head)?,
        shares: head.shares,
        masks: false,
    };
    let mut engine = open(&context, gpu, kernels, &opening)?;
    let working = Spinner::on(format!("running {} commands again", found.lines.len()));
    let mut again = Again::new(&mut *engine, bits);
    let halt = found.lines.iter().find_map(|line| again.line(line).err());
    let compared = again.compared();
    drop((working, engine));
    let difference = match halt {
        None => None,
        Some(Halt::Differs(difference)) => Some(difference),
        Some(Halt::Nonsense(why)) => {
            return Err(Failure::integrity(format!("{}: {why}", args.file.display())));
        }
    };
    print(args, &found, (device, bits), (&compared, difference.as_ref()))?;
    Ok(if difference.is_none() { Exit::Yes } else { Exit::No })
}

/// The model of the log, on the device of the replay.
fn context(args: &ReplayLogArgs, head: &Head) -> Result<Context, Failure> {
    let recorded = match head.device.as_str() {
        "eval" => DeviceChoice::Eval,
        "cpu" => DeviceChoice::Cpu,
        "cuda" => DeviceChoice::Cuda,
        other => return Err(Failure::integrity(format!("the log's device is {other:?}"))),
    };
    let place = PlaceArgs {
        target: Some(head.target.clone()),
        device: args.device.unwrap_or(recorded),
        kv_capacity: Some(head.kv_capacity),
        kv: KvArgs { kv_dtype: head.kv_dtype },
        ..PlaceArgs::default()
    };
    let context = Context::load(args.model.as_deref().unwrap_or(&head.model), &place)?;
    let (then, now) = (&head.graph_id, context.graph().id());
    if *then != now {
        let name = &context.name;
        let message = format!(
            "the log is of graph {then}, and {name} is {now}: --model names the model of the log"
        );
        return Err(Failure::refused(message));
    }
    if !(1..=abi::SESSIONS_MAX as usize).contains(&head.places) {
        return Err(Failure::integrity(format!("the log has {} places", head.places)));
    }
    Ok(context)
}

/// The kernels of the log. A log of the graph on another device runs the schedule by rule.
fn made(context: &Context, head: &Head, device: &str) -> Result<Vec<Made>, Failure> {
    if device == "eval" {
        return Ok(Vec::new());
    }
    let made: Result<Vec<Made>, Failure> =
        head.kernels.iter().map(|of| Made::new(context, of)).collect();
    let mut made = made?;
    if made.is_empty() {
        let config = context.default_config();
        made.push(Made { program: Arc::new(context.lowered(&config)?), config, seqs: 1 });
    }
    Ok(made)
}

/// Whether the answers must have the bits of the log: the same build, device, programs and kernels.
fn same_code(context: &Context, head: &Head, (device, made): (&str, &[Made])) -> bool {
    let on_gpu = device == "cuda";
    let same = |(made, of): (&Made, &Kernel)| made.is(context, of, on_gpu);
    head.amk == env!("AMK_VERSION")
        && head.device == device
        && (!on_gpu || head.card == context.card())
        && made.iter().zip(&head.kernels).all(same)
}

fn prefill(head: &Head) -> Result<PrefillChoice, Failure> {
    clap::ValueEnum::from_str(&head.prefill, false)
        .map_err(|why| Failure::integrity(format!("the log's prefill: {why}")))
}

fn print(
    args: &ReplayLogArgs,
    found: &Recorded,
    (device, bits): (&str, bool),
    (compared, difference): (&Compared, Option<&Difference>),
) -> Result<(), Failure> {
    let Compared { commands, tokens, rows, unruled } = *compared;
    let missing = match (&found.cut, found.dropped) {
        (Some(why), _) => Some(format!("the log was cut off: {why}")),
        (None, 0) => None,
        (None, dropped) => Some(format!("the log was full: {dropped} entries are not in it")),
    };
    missing.iter().for_each(|why| report::say(&format!("note: {why}; replayed up to there")));
    let of = if bits { "bits" } else { "tokens" };
    report::say(&format!(
        "{commands} commands on {device}: {tokens} tokens and {rows} rows compared, by {of}"
    ));
    match difference {
        None => report::say("all are the same"),
        Some(of) => report::say(&format!("DIFFERS at {of}")),
    }
    report::document(&json!({
        "schema": "amk.command_replay.v1",
        "log": args.file,
        "model": found.head.model,
        "device": device,
        "recorded_on": found.head.card.as_ref().unwrap_or(&found.head.device),
        "by_bits": bits,
        "same": difference.is_none(),
        "commands": commands,
        "tokens": tokens,
        "rows": rows,
        // Tokens under rules of the host, such as a grammar, which are not in the log.
        "tokens_not_compared": unruled,
        "incomplete": missing,
        "dropped": found.dropped,
        "first_difference": difference,
    }))
}
