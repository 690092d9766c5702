//! One command a file.

mod bench;
mod bundle;
mod calibrate;
mod corpus_store;
pub(crate) mod diff;
mod doctor;
pub(crate) mod evaluate;
pub(crate) mod explain;
mod export;
mod generate;
mod html;
pub(crate) mod program;
pub(crate) mod propose;
pub(crate) mod runs;
mod sample;
pub(crate) mod search_loop;
mod trace;

use clap::CommandFactory;

use crate::cli::{Cli, Command, RunsCommand};
use crate::failure::{Exit, Outcome};
use crate::report;

/// Runs a command and says how it ended.
pub(crate) fn run(command: Command) -> Outcome {
    match command {
        Command::Doctor => doctor::run(),
        Command::Propose(args) => propose::run(&args),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Loop(args) => search_loop::run(&args),
        Command::Corpus { command } => corpus_store::run(&command),
        Command::Runs { command: RunsCommand::Verify(args) } => runs::verify(&args)?.print(),
        Command::Runs { command: RunsCommand::List(args) } => runs::list(&args)?.print(),
        Command::Runs { command: RunsCommand::Show(args) } => runs::show::run(&args),
        Command::Runs { command: RunsCommand::Compare(args) } => {
            runs::compare::answer(&args)?.print()
        }
        Command::Runs { command: RunsCommand::Replay(args) } => runs::replay::run(&args),
        Command::Runs { command: RunsCommand::Export(args) } => runs::export::run(&args),
        Command::Runs { command: RunsCommand::Gc(args) } => runs::gc::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Sample(args) => sample::run(&args),
        Command::Calibrate(args) => calibrate::run(&args),
        Command::Lower(args) => program::lower(&args),
        Command::Verify(args) => program::verify(&args),
        Command::Disasm(args) => program::disasm(&args),
        Command::Interpret(args) => program::interpret(&args),
        Command::Export(args) => export::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Report(args) => html::run(&args),
        Command::Serve(args) => crate::serve::run(&args),
        Command::Mcp => crate::mcp::serve(),
        Command::DeviceChild(args) => crate::device::serve(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "amk", &mut script);
            report::text(&String::from_utf8_lossy(&script))?;
            Ok(Exit::Yes)
        }
    }
}
