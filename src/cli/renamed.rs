//! Names of the version before: they work for one version more, with a warning.

use std::ffi::OsString;

/// Flags that have another name today.
const FLAGS: &[(&str, &str)] = &[("--lanes", "--batch"), ("--sequences", "--batch")];

/// Commands that have another name today.
const COMMANDS: &[(&str, &str)] = &[("landscape", "grid")];

/// Values that have another name today, by flag.
const VALUES: &[(&str, &str, &str)] = &[
    ("--strategy", "climb", "hill-climb"),
    ("--strategy", "prior", "residual"),
    ("--strategy", "tpe", "residual"),
];

/// The arguments in today's names, and a warning for each that was not.
pub(crate) fn today(arguments: impl Iterator<Item = OsString>) -> (Vec<OsString>, Vec<String>) {
    let (mut new, mut warnings) = (Vec::<OsString>::new(), Vec::new());
    for (index, argument) in arguments.enumerate() {
        let previous = new.last().and_then(|last| last.to_str()).unwrap_or_default();
        let text = argument.to_str().unwrap_or_default();
        let command = COMMANDS.iter().find(|(old, _)| index == 1 && *old == text);
        let today =
            command.map(|(_, new)| (*new).to_owned()).or_else(|| name_today(text, previous));
        let Some(name) = today else {
            new.push(argument);
            continue;
        };
        let old = argument.to_string_lossy();
        warnings.push(format!("{old} is replaced by {name} since 0.2; the old name goes with 0.3"));
        new.push(OsString::from(name));
    }
    (new, warnings)
}

fn name_today(text: &str, previous: &str) -> Option<String> {
    let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
    if let Some((_, flag)) = FLAGS.iter().find(|(old, _)| *old == name) {
        return Some(value.map_or_else(|| (*flag).into(), |value| format!("{flag}={value}")));
    }
    let (flag, _, new) = VALUES.iter().find(|(flag, old, _)| {
        (*flag == name && value == Some(*old)) || (*flag == previous && *old == text)
    })?;
    Some(value.map_or_else(|| (*new).into(), |_| format!("{flag}={new}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> (String, usize) {
        let (new, warnings) = today(line.split(' ').map(OsString::from));
        let new: Vec<_> = new.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        (new.join(" "), warnings.len())
    }

    #[test]
    fn old_names_work_and_are_warned_of() {
        let cases = [
            ("amk serve --lanes 4", "amk serve --batch 4", 1),
            ("amk serve --lanes=4", "amk serve --batch=4", 1),
            ("amk bench --sequences 8", "amk bench --batch 8", 1),
            ("amk landscape record", "amk grid record", 1),
            ("amk loop --count 9", "amk loop --count 9", 0),
            ("amk loop --strategy climb", "amk loop --strategy hill-climb", 1),
            ("amk loop --strategy=climb", "amk loop --strategy=hill-climb", 1),
            ("amk loop --strategy prior", "amk loop --strategy residual", 1),
            ("amk loop --strategy=tpe", "amk loop --strategy=residual", 1),
            ("amk explain climb", "amk explain climb", 0),
            ("amk serve --batch 4", "amk serve --batch 4", 0),
        ];
        for (old, new, warnings) in cases {
            assert_eq!(of(old), (new.to_owned(), warnings), "{old}");
        }
    }
}
