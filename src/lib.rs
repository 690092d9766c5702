//! `amk` turns a decoder LLM into one persistent CUDA megakernel and searches for its fastest schedule.
//!
//! The application: it reads arguments and files, connects the device to `search`, prints one JSON document on stdout
//! and everything for people on stderr. Decisions are made in the crates below it. [`main`] is the command line.
//!
//! A program calls [`Search`] and [`Engine`], of which `amk loop` and `amk generate` are made. They print nothing. A
//! search on a GPU drives it in a process of its own, the program `amk` of `PATH`, which must be of the same build
//! ([`starts_as`] names another).

#![cfg_attr(
    not(feature = "full"),
    allow(dead_code, unused_imports, reason = "what only `mcp`, `report`, `serve` and `top` use")
)]

mod bug;
mod child_process;
mod cli;
mod command_log;
mod commands;
mod completions;
mod conditions;
mod config_source;
mod constraint;
mod context;
mod csv;
mod device;
mod dispatch;
mod distribution;
mod engine;
mod failure;
mod files;
mod found;
mod host_rules;
mod interrupt;
mod library;
mod live_text;
mod log;
#[cfg(feature = "full")]
mod mcp;
mod memory;
mod models;
mod observe;
mod out_of_memory;
mod peers;
mod process;
mod report;
mod schedule_choice;
mod sequence;
#[cfg(feature = "full")]
mod serve;
mod speculate;
mod spinner;
#[cfg(feature = "full")]
mod top;

use std::ffi::OsString;
use std::panic::AssertUnwindSafe;
use std::process::{Command, ExitCode};

use clap::FromArgMatches as _;

pub use child_process::starts_as;
pub use cli::DeviceChoice;
pub use commands::search_loop::{Card, Found, Kept};
pub use failure::{Exit, Failure};
pub use ir::sampling::{Logprobs, Sampling};
pub use ir::schedule::ScheduleConfig;
#[doc(hidden)]
pub use library::bindings;
pub use library::{Engine, Generated, Prompt, Request, Search};
pub use model::Message;
pub use search::{Budget, Outcome, Trial, Verdict};

/// Most threads of a pool, whatever the environment sets: the target machines have some hundred cores.
const THREADS_MAX: usize = 512;

/// The command line: runs this process's arguments.
#[must_use]
pub fn main() -> ExitCode {
    starts_as([child_process::SELF.into()]);
    command_line(std::env::args_os().collect()).into()
}

/// The command line with these arguments, of which the first is the program's name. The process should end after it.
#[must_use]
pub fn command_line(arguments: Vec<OsString>) -> Exit {
    bug::install_panic_hook();
    spinner::all();
    model::templates_run_in(template_child);
    // A panic that reaches this point is a bug in amk: one line that says so, and its own exit code.
    std::panic::catch_unwind(AssertUnwindSafe(|| run(arguments))).unwrap_or_else(|_| {
        report::say_failure(&format!("amk: {}", bug::last_panic()));
        Exit::Bug
    })
}

/// This program again, to render a chat template.
fn template_child() -> Command {
    let mut command = child_process::this_program();
    command.arg("template-child");
    command
}

/// Limits the threads of the global pool: one of a hundred thousand threads would never start working.
fn limit_threads() {
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok());
    if asked.is_some_and(|threads: usize| threads > THREADS_MAX) {
        report::say(&format!(
            "note: RAYON_NUM_THREADS is more than {THREADS_MAX}, the most threads of a pool; {THREADS_MAX} are used"
        ));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS_MAX);
        // No pool exists before `main`.
        let _ = pool.build_global();
    }
}

fn run(given: Vec<OsString>) -> Exit {
    let (arguments, renamed) = cli::renamed::today(given.iter().cloned());
    let parsed = cli::command().try_get_matches_from(arguments).and_then(|found| {
        cli::Cli::from_arg_matches(&found).map_err(|error| error.format(&mut cli::command()))
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return report::usage(&error, &given),
    };
    let Some(command) = cli.command else {
        report::say_text(cli::FIRST_STEPS);
        return Exit::Yes;
    };
    // `top` has a flag of its own, which needs --once.
    if cli.json || matches!(&command, cli::Command::Top(args) if args.json) {
        report::json_wanted();
    }
    if cli.quiet {
        spinner::only_failures();
    }
    renamed.iter().for_each(|warning| report::say(&format!("note: {warning}")));
    log::begin(cli.verbose);
    if !matches!(command, cli::Command::TemplateChild) {
        limit_threads();
    }
    // The others end in order by themselves, or speak a protocol on standard output.
    use cli::Command as C;
    let by_itself = matches!(
        command,
        C::Serve(_) | C::Top(_) | C::Mcp | C::Fleet { .. } | C::DeviceChild(_) | C::TemplateChild
    );
    if !by_itself {
        interrupt::answered();
    }
    let done = texts_only(given.into_iter()).and_then(|()| dispatch::run(command));
    done.unwrap_or_else(|failure| {
        interrupt::first();
        report::fail(&failure)
    })
}

/// Refuses arguments that are not UTF-8 and could not be repeated in a JSON document, before anything runs.
fn texts_only(arguments: impl Iterator<Item = OsString>) -> Result<(), Failure> {
    for argument in arguments.skip(1) {
        if argument.to_str().is_none() {
            return Err(Failure::usage(format!(
                "the argument {argument:?} is not UTF-8, and answers are JSON, which could not name it; rename the file or folder"
            )));
        }
    }
    Ok(())
}
