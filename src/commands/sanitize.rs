//! `amk sanitize`: a program on the GPU under compute-sanitizer's three tools, with the reports judged.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::Serialize;

use crate::child_process::{self, this_program_by_path};
use crate::cli::{SanitizeArgs, SanitizerTool};
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{files, report};

mod racecheck;

/// The exit code that the tool gives a program in which it found an error.
const FOUND: i32 = 9;

/// Tokens to start from and to generate: the tools slow a kernel down up to a thousand times.
const TOKENS: &str = "1,2,3";
const GENERATED: &str = "5";

/// Seconds that a worker may wait under a tool, unless `AMK_DEADLINE_S` is set.
const DEADLINE_S: &str = "120";

/// What the tools said of a program.
#[derive(Debug, Serialize, JsonSchema)]
struct Sanitized {
    #[schemars(extend("const" = "amk.sanitize.v1"))]
    schema: &'static str,
    /// The program and its arguments.
    command: Vec<String>,
    tools: Vec<Judged>,
}

/// What one tool said.
#[derive(Debug, Serialize, JsonSchema)]
struct Judged {
    tool: &'static str,
    /// Whether nothing is wrong: the program ended well, the tool came to its end, and it found no error.
    clean: bool,
    /// Why not.
    why: Option<String>,
    /// The tool's last line.
    summary: Option<String>,
    seconds: f64,
    /// Of racecheck, the hazards that something orders which it does not follow.
    known: Vec<racecheck::Known>,
    /// Of racecheck, the others.
    races: Vec<racecheck::Race>,
    /// The whole report.
    report: Option<std::path::PathBuf>,
}

pub(crate) fn run(args: &SanitizeArgs) -> Outcome {
    let sanitizer = vm_host::cuda_tool("compute-sanitizer").ok_or_else(|| {
        Failure::missing(
            "capability missing: no compute-sanitizer in PATH or in /usr/local/cuda/bin: it comes with the CUDA toolkit",
        )
    })?;
    if let Some(folder) = &args.out {
        let remedy = "name a folder that you may write to with --out";
        std::fs::create_dir_all(folder).map_err(Failure::cannot("create", folder, remedy))?;
    }
    let tools = if args.tool.is_empty() { SanitizerTool::ALL } else { &args.tool };
    let judged: Result<Vec<Judged>, Failure> =
        tools.iter().map(|tool| judge(&sanitizer, *tool, args)).collect();
    let document =
        Sanitized { schema: "amk.sanitize.v1", command: words(&program(args)?), tools: judged? };
    document.tools.iter().for_each(say);
    let clean = document.tools.iter().all(|judged| judged.clean);
    report::document(&document)?;
    Ok(if clean { Exit::Yes } else { Exit::No })
}

/// The program under the tools: the one that was named, or this one, which decodes a few tokens.
fn program(args: &SanitizeArgs) -> Result<Command, Failure> {
    if let Some((program, rest)) = args.program.split_first() {
        let mut command = Command::new(program);
        command.args(rest);
        return Ok(command);
    }
    let remedy = "name the program to run behind --";
    let mut command = this_program_by_path().map_err(Failure::cannot(
        "find",
        Path::new(child_process::SELF),
        remedy,
    ))?;
    let model = args.model.as_deref().unwrap_or("toy");
    command.args(["generate", "--device", "cuda", "--model", model]);
    command.args(["--tokens", TOKENS, "--max-new-tokens", GENERATED]);
    if let Some(config) = &args.config {
        command.arg("--config").arg(config);
    }
    Ok(command)
}

fn words(command: &Command) -> Vec<String> {
    let all = std::iter::once(command.get_program()).chain(command.get_args());
    all.map(|word| word.to_string_lossy().into_owned()).collect()
}

fn judge(sanitizer: &Path, tool: SanitizerTool, args: &SanitizeArgs) -> Result<Judged, Failure> {
    let inner = program(args)?;
    let mut command = Command::new(sanitizer);
    command.args(["--tool", tool.name()]);
    if tool != SanitizerTool::Racecheck {
        command.arg("--error-exitcode").arg(FOUND.to_string());
    }
    command.arg(inner.get_program()).args(inner.get_args());
    if std::env::var_os("AMK_DEADLINE_S").is_none() {
        command.env("AMK_DEADLINE_S", DEADLINE_S);
    }
    let working = Spinner::on(format!("{} of {}", tool.name(), words(&inner).join(" ")));
    let began = Instant::now();
    let ended = child_process::run(command, "", Duration::from_secs(args.limit));
    drop(working);
    let seconds = began.elapsed().as_secs_f64();
    let (text, failed) = match ended {
        Ok(ended) => {
            let failed = (!ended.status.success()).then(|| match ended.status.code() {
                Some(FOUND) => "it found errors".to_owned(),
                _ => format!("the program ended with {}: {}", ended.status, last_words(&ended)),
            });
            (ended.out + &ended.err, failed)
        }
        Err(error) => (String::new(), Some(format!("{}: {error}", sanitizer.display()))),
    };
    let path = args.out.as_ref().map(|folder| folder.join(format!("{}.txt", tool.name())));
    if let Some(path) = &path {
        files::write_whole(path, text.as_bytes())?;
    }
    let summary = text.lines().rev().find(|line| line.contains(" SUMMARY: "));
    let summary = summary.map(|line| line.trim_start_matches('=').trim().to_owned());
    let (known, races) = match tool {
        SanitizerTool::Racecheck => racecheck::classified(&text),
        SanitizerTool::Memcheck | SanitizerTool::Synccheck => (Vec::new(), Vec::new()),
    };
    let raced = (!races.is_empty()).then(|| format!("{} races", races.len()));
    let cut = summary.is_none().then(|| "it did not reach its end".to_owned());
    let why = failed.or(raced).or(cut);
    let clean = why.is_none();
    Ok(Judged { tool: tool.name(), clean, why, summary, seconds, known, races, report: path })
}

/// The last line of a program's errors, else of the tool, which writes beside the program's output.
fn last_words(ended: &child_process::Ended) -> &str {
    let said = ended.out.lines().rev().find(|line| !line.trim().is_empty());
    Some(ended.last_line()).filter(|line| !line.is_empty()).or(said).unwrap_or_default()
}

fn say(judged: &Judged) {
    let verdict = judged.why.as_deref().unwrap_or("clean");
    report::say(&format!("{:10} {verdict} ({:.0} s)", judged.tool, judged.seconds));
    if let Some(summary) = &judged.summary {
        report::say(&format!("  {summary}"));
    }
    for known in judged.known.iter().filter(|known| known.hazards > 0) {
        report::say(&format!("  {} hazards, {}: {}", known.hazards, known.kind, known.ordered_by));
    }
    for race in &judged.races {
        let side = |access: &racecheck::Access| {
            let kind = if access.writes { "write" } else { "read" };
            let place = access.place.as_deref().map_or_else(String::new, |at| format!(" ({at})"));
            format!("{kind} in {}{place}", access.function)
        };
        let [one, other] = &race.between;
        let pair = || format!("{} and {}", side(one), side(other));
        let what = race.unread.clone().unwrap_or_else(pair);
        report::say(&format!("  RACE, {} hazards: {what}", race.hazards));
    }
}
