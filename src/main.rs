//! `amk` turns a decoder LLM into one persistent CUDA megakernel and searches for its fastest schedule.
//!
//! The command line: this crate reads arguments and files, wires the device into `search`, prints one JSON document on stdout
//! and everything for people on stderr. Decisions are made in the crates below it.

mod cli;
mod commands;
mod conditions;
mod context;
mod device;
mod failure;
mod files;
mod peers;
mod report;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    install_panic_hook();
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

/// A panic is our bug: one line that says so, and its own exit code.
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
        let what = what.replace('\n', " ");
        report::say(&format!(
            "amk: this is a bug in amk {}, please report it with the command: {what} ({place})",
            env!("CARGO_PKG_VERSION")
        ));
        std::process::exit(failure::Exit::Bug.code());
    }));
}
