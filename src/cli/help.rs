//! The first page of help: commands in groups.

use std::fmt::Write as _;

use clap::{Command, CommandFactory as _};

/// What `amk --help` lists, in this order; a test holds that every command is in one group.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Use a model", &["doctor", "generate", "chat", "serve", "bench", "top", "export", "quantize"]),
    (
        "Search for a schedule",
        &["propose", "evaluate", "loop", "fleet", "runs", "report", "corpus", "bundle", "mcp"],
    ),
    (
        "Inspect",
        &[
            "explain",
            "notes",
            "diff",
            "trace",
            "levers",
            "lower",
            "verify",
            "disasm",
            "interpret",
            "replay",
            "rerun",
            "provenance",
            "inspect",
            "sanitize",
        ],
    ),
    ("Develop amk", &["grid", "calibrate", "migrate", "man", "completions"]),
];

/// The command line, its commands in groups.
pub(crate) fn command() -> Command {
    let command = super::Cli::command();
    let mut listed = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(listed, "{title}:");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(listed, "  {name:12} {}", first_clause(&about));
        }
        listed.push('\n');
    }
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{listed}Options:\n{{options}}{{after-help}}"
    ))
}

/// The part of a sentence that fits on a line after the command's name.
fn first_clause(about: &str) -> &str {
    about.split(['.', ':', ';']).next().unwrap_or(about)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group_and_its_line_is_short() {
        let listed: Vec<&str> =
            GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let command = super::super::Cli::command();
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let times = listed.iter().filter(|name| **name == sub.get_name()).count();
            assert_eq!(times, 1, "{}", sub.get_name());
            let about = sub.get_about().expect("a sentence").to_string();
            assert!(first_clause(&about).len() <= 66, "{}: {about}", sub.get_name());
        }
        assert!(listed.iter().all(|name| command.find_subcommand(name).is_some()));
    }
    #[test]
    fn paragraphs_are_wrapped_for_the_terminal_and_nowhere_else() {
        fn look(command: &Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            for two in lines.windows(2).filter(|two| !two[1].starts_with(' ')) {
                let broken = !two[0].is_empty() && !two[1].is_empty() && !two[0].starts_with(' ');
                assert!(!broken, "{}: a line ends at {:?}", command.get_name(), two[0]);
            }
            command.get_subcommands().for_each(look);
        }
        super::super::Cli::command().get_subcommands().for_each(look);
    }
}
