//! Completion scripts of shells: what `clap` writes, with the names of presets after `--model` and `--draft`, and of GPUs
//! after `--target`.

use clap::builder::{PossibleValue, PossibleValuesParser, ValueParser};
use clap_complete::Shell;

/// The script of a shell.
pub(crate) fn script(shell: Shell) -> String {
    let command = named(crate::cli::command());
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command.clone(), "amk", &mut script);
    with_files(shell, &String::from_utf8_lossy(&script))
}

fn presets() -> Vec<&'static str> {
    model::PRESETS.iter().map(|preset| preset.name).collect()
}

/// The command with names that can be completed. It is not for parsing: a model may have any name.
fn named(command: clap::Command) -> clap::Command {
    let known = |names: Vec<&'static str>| -> ValueParser {
        PossibleValuesParser::new(names.into_iter().map(PossibleValue::new)).into()
    };
    let command = command.mut_args(|arg| match arg.get_long() {
        Some("model" | "draft") => arg.value_parser(known(presets())),
        Some("target") => arg.value_parser(known(ir::Target::names().collect())),
        _ => arg,
    });
    let subcommands: Vec<String> =
        command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    subcommands.iter().fold(command, |command, name| command.mut_subcommand(name, named))
}

/// The script with files beside the presets: a model is a folder or a file as well, which a list of values rules out.
fn with_files(shell: Shell, script: &str) -> String {
    let names = presets().join(" ");
    match shell {
        Shell::Bash => {
            let listed = format!("compgen -W \"{names}\"");
            script.replace(&listed, &format!("compgen -f -W \"{names}\""))
        }
        Shell::Zsh => {
            // A function of its own: an action of `_arguments` may have no colons.
            let both = format!(
                "_amk_models() {{\n    _alternative 'presets:preset:({names})' 'files:file:_files'\n}}\n\n_amk() {{"
            );
            let script = script.replace(&format!(":({names})"), ":_amk_models");
            script.replacen("_amk() {", &both, 1)
        }
        Shell::Fish => {
            let values: Vec<String> = presets().iter().map(|name| format!("{name}\\t''")).collect();
            let values = values.join("\n");
            script.replace(&format!("-r -f -a \"{values}\""), &format!("-r -F -a \"{values}\""))
        }
        // clap writes no values into those of the others.
        Shell::Elvish | Shell::PowerShell | _ => script.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_presets_or_files_and_targets_are_gpus() {
        for (shell, model) in [
            (Shell::Bash, "compgen -f -W \"toy toy-2l "),
            (Shell::Zsh, ":_amk_models'"),
            (Shell::Fish, "-r -F -a \"toy\\t''"),
        ] {
            let script = script(shell);
            let found = script.matches(model).count();
            assert!(found >= 10, "{shell}: {found} options have the presets");
            assert!(script.contains("h200"), "{shell} has no GPU");
            let named = script.matches("toy-2l").count();
            let all = if shell == Shell::Zsh { 1 } else { found };
            assert_eq!(named, all, "{shell}: a model that is no file");
        }
    }
}
