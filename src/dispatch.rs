//! Dispatches a command to its implementation.

use std::path::Path;

use serde_json::json;

use crate::cli::{
    Command, CorpusCommand, FleetCommand, InspectCommand, MeasuredGridCommand, RunsCommand,
};
use crate::commands::{
    bench, bundle, calibrate, chat, corpus_store, diff, doctor, evaluate, explain, export, fleet,
    generate, inspect, levers, measured_grid, migrate, notes, program, propose, provenance,
    quantize, replay, rerun, runs, sanitize, search_loop, trace,
};
use crate::failure::{Exit, Failure, Outcome};
use crate::report;

pub(crate) fn run(command: Command) -> Outcome {
    match command {
        Command::Doctor(args) => doctor::answer(&args)?.print(),
        Command::Propose(args) => propose::answer(&args)?.print(),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Loop(args) => search_loop::run(&args),
        Command::Fleet { command: FleetCommand::Init(args) } => fleet::init(&args),
        Command::Fleet { command: FleetCommand::Submit(args) } => fleet::submit::run(&args),
        Command::Fleet { command: FleetCommand::Worker(args) } => fleet::worker::run(&args),
        Command::Fleet { command: FleetCommand::Status(args) } => fleet::status::run(&args),
        Command::Fleet { command: FleetCommand::Report(args) } => fleet::report::run(&args),
        Command::Fleet { command: FleetCommand::Drain(args) } => fleet::drain(&args),
        Command::Corpus { command: CorpusCommand::Show(args) } => corpus_store::show(&args),
        Command::Corpus { command: CorpusCommand::Check(args) } => corpus_store::check(&args),
        Command::Corpus { command: CorpusCommand::Import(args) } => corpus_store::import(&args),
        Command::Corpus { command: CorpusCommand::Export(args) } => corpus_store::export(&args),
        Command::Runs { command: RunsCommand::Verify(args) } => runs::verify(&args)?.print(),
        Command::Runs { command: RunsCommand::List(args) } => runs::list(&args)?.print(),
        Command::Runs { command: RunsCommand::Show(args) } => runs::show::run(&args),
        Command::Runs { command: RunsCommand::Compare(args) } => runs::compare::run(&args),
        Command::Runs { command: RunsCommand::Replay(args) } => {
            runs::replay::answer(&args)?.print()
        }
        Command::Runs { command: RunsCommand::Export(args) } => runs::export::run(&args),
        Command::Runs { command: RunsCommand::Gc(args) } => runs::gc::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Provenance(args) => provenance::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::MeasuredGrid { command: MeasuredGridCommand::Record(args) } => {
            measured_grid::run(&args)
        }
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Lower(args) => program::lower(&args),
        Command::Verify(args) => program::verify(&args),
        Command::Disasm(args) => program::disasm(&args),
        Command::Interpret(args) => program::interpret(&args),
        Command::Rerun(args) => rerun::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Migrate(args) => migrate::run(&args),
        Command::Levers(args) => levers::run(&args),
        Command::Inspect { command } => inspect(command),
        Command::Sanitize(args) => sanitize::run(&args),
        Command::Notes(args) => notes::run(&args),
        Command::Explain(args) => explain::answer(&args)?.print(),
        Command::Diff(args) => diff::answer(&args)?.print(),
        #[cfg(feature = "full")]
        Command::Report(args) => crate::commands::html::answer(&args)?.print(),
        #[cfg(feature = "full")]
        Command::Serve(args) => crate::serve::run(&args),
        #[cfg(feature = "full")]
        Command::Top(args) => crate::top::run(&args),
        #[cfg(feature = "full")]
        Command::Mcp => crate::mcp::serve(),
        #[cfg(not(feature = "full"))]
        Command::Report(_) | Command::Serve(_) | Command::Top(_) | Command::Mcp => {
            let what = "this build of amk has no `mcp`, `report`, `serve` and `top`";
            Err(Failure::missing(format!("{what}; build it with its default features")))
        }
        Command::DeviceChild(args) => crate::device::serve(&args),
        Command::TemplateChild => template(),
        Command::Man { out } => man(out.as_deref()),
        Command::Completions { shell } => completions(shell),
    }
}

fn completions(shell: clap_complete::Shell) -> Outcome {
    report::text(&crate::completions::script(shell))?;
    Ok(Exit::Yes)
}

fn inspect(command: InspectCommand) -> Outcome {
    match command {
        InspectCommand::Kernel(args) => inspect::kernel(&args),
        InspectCommand::Ring(args) => inspect::live::ring(&args),
        InspectCommand::Evidence(args) => inspect::live::evidence(&args),
    }
}

/// Renders a chat template for the process that started this one.
fn template() -> Outcome {
    model::template_process().map_err(|error| {
        Failure::usage(format!("template-child is started by `amk` itself: {error}"))
    })?;
    Ok(Exit::Yes)
}

/// Writes the manual: one page on standard output, or a page for each command in a folder.
fn man(out: Option<&Path>) -> Outcome {
    let place = out.unwrap_or(Path::new("standard output"));
    let unwritable = Failure::cannot("write to", place, "name another folder");
    let Some(folder) = out else {
        let mut page = Vec::new();
        let rendered = clap_mangen::Man::new(crate::cli::command()).render(&mut page);
        rendered.map_err(unwritable)?;
        report::text(&String::from_utf8_lossy(&page))?;
        return Ok(Exit::Yes);
    };
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(crate::cli::command(), folder))
        .and_then(|()| std::fs::read_dir(folder));
    let pages = written.map_err(unwritable)?;
    let mut names: Vec<String> = pages
        .filter_map(|page| page.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("amk") && name.ends_with(".1"))
        .collect();
    names.sort();
    report::say(&format!("{} pages in {}", names.len(), folder.display()));
    report::document(&json!({"schema": "amk.man.v1", "folder": folder, "pages": names}))?;
    Ok(Exit::Yes)
}
