//! `amk` turns a decoder LLM into one persistent CUDA megakernel and searches for its fastest schedule.
//!
//! The command line: this crate reads arguments and files, wires the device into `search`, prints one JSON document on stdout
//! and everything for people on stderr. Decisions are made in the crates below it.

mod cli;
mod commands;
mod conditions;
mod config_source;
mod context;
mod device;
mod failure;
mod files;
mod found;
mod mcp;
mod observe;
mod peers;
mod report;
mod sampling_args;
mod schedule_choice;
mod serve;
mod soak;
mod together;
mod top;
mod working;

use std::alloc::System;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::sync::Mutex;

use clap::Parser;
use model::Guarded;

/// Chat templates may not use all memory.
#[global_allocator]
static ALLOCATOR: Guarded<System> = Guarded(System);

/// What the last panic said. Some are caught on the way: those that a hostile file causes in a library.
static PANIC: Mutex<String> = Mutex::new(String::new());

fn main() -> ExitCode {
    install_panic_hook();
    // A panic that nobody caught is our bug: one line that says so, and its own exit code.
    std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        report::say(&format!("amk: {}", last_panic()));
        failure::Exit::Bug.into()
    })
}

/// What the last panic said, for whoever is to report it.
fn last_panic() -> String {
    let what = PANIC.lock().map(|what| what.clone()).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    format!("this is a bug in amk {version}, please report it with the command: {what}")
}

fn run() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report::usage(&error),
    };
    let Some(command) = cli.command else {
        report::say(cli::FIRST_STEPS);
        return ExitCode::SUCCESS;
    };
    match commands::run(command) {
        Ok(exit) => exit.into(),
        Err(failure) => report::fail(&failure),
    }
}

/// Keeps what a panic says for whoever ends the process.
fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        let what = info
            .payload()
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| info.payload().downcast_ref::<String>().cloned())
            .unwrap_or_default();
        if what.contains("Broken pipe") {
            std::process::exit(0);
        }
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        if let Ok(mut last) = PANIC.lock() {
            *last = format!("{} ({place})", what.replace('\n', " "));
        }
    }));
}
