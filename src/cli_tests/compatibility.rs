//! What programs and agents rely on: flags stay, and the skill for coding agents names commands and flags that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::amk;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The long flags of each command, as they ever were.
const RECORD: &str = "tests/flags.json";

type Flags = BTreeMap<String, BTreeSet<String>>;

/// The long flags on a help page.
fn flags_of(command: &[&str]) -> BTreeSet<String> {
    let help = amk(&[command, &["--help"]].concat());
    assert_eq!(help.code, 0, "{command:?}: {}", help.stderr);
    let options = help.stdout.lines().filter_map(|line| {
        let line = line.trim_start();
        let line = line
            .split_once(", ")
            .map_or(line, |(short, rest)| if short.len() == 2 { rest } else { line });
        line.strip_prefix("--")
    });
    let name = |text: &str| text.split([' ', '=', '[', '.']).next().unwrap_or_default().to_owned();
    options.map(name).filter(|name| !name.is_empty()).collect()
}

/// The commands on a help page.
fn commands_of(command: &[&str]) -> Vec<String> {
    let help = amk(&[command, &["--help"]].concat()).stdout;
    let list = help.split("\nOptions:").next().unwrap_or_default();
    let listed = list.lines().filter_map(|line| line.strip_prefix("  "));
    let names =
        listed.filter_map(|line| line.split_whitespace().next().filter(|_| !line.starts_with(' ')));
    names.filter(|name| name.chars().all(|c| c.is_ascii_lowercase())).map(str::to_owned).collect()
}

fn all_flags() -> Flags {
    let mut flags = Flags::new();
    for command in commands_of(&[]) {
        let nested: Vec<String> = match command.as_str() {
            "runs" | "corpus" | "fleet" | "grid" | "inspect" => commands_of(&[&command]),
            _ => vec![String::new()],
        };
        for sub in nested.iter().filter(|sub| *sub != "help") {
            let path: Vec<&str> =
                [command.as_str(), sub].into_iter().filter(|p| !p.is_empty()).collect();
            flags.insert(path.join(" "), flags_of(&path));
        }
    }
    flags
}

#[test]
fn no_flag_of_a_command_is_gone() {
    let path = Path::new(ROOT).join(RECORD);
    let now = all_flags();
    assert!(now.len() > 35 && now["serve"].contains("addr"), "{now:?}");
    let known: Flags =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap_or_else(|_| "{}".into()))
            .unwrap();
    let mut gone = Vec::new();
    let mut all = known.clone();
    for (command, flags) in &known {
        let there = now.get(command);
        gone.extend(
            flags
                .iter()
                .filter(|flag| there.is_none_or(|there| !there.contains(*flag)))
                .map(|flag| format!("{command} --{flag}")),
        );
    }
    assert!(gone.is_empty(), "programs use these; keep them as in src/cli/renamed.rs: {gone:?}");
    for (command, flags) in now {
        all.entry(command).or_default().extend(flags);
    }
    if all != known {
        assert!(tests::blessing(), "new flags: BLESS=1 cargo test -p amk --test cli compatibility");
        std::fs::write(&path, serde_json::to_string_pretty(&all).unwrap() + "\n").unwrap();
    }
}

/// The commands in the blocks of a text.
fn commands_in(text: &str) -> Vec<Vec<&str>> {
    let blocks = text.split("```").skip(1).step_by(2);
    let lines = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("amk "));
    lines.map(|line| line.split_whitespace().collect()).collect()
}

#[test]
fn the_skill_is_where_agents_look_and_names_commands_that_exist() {
    let text = std::fs::read_to_string(Path::new(ROOT).join("skills/amk/SKILL.md")).unwrap();
    for place in [".claude/skills/amk/SKILL.md", ".agents/skills/amk/SKILL.md"] {
        assert_eq!(std::fs::read_to_string(Path::new(ROOT).join(place)).unwrap(), text, "{place}");
    }
    let head = text.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---\n")).unwrap().0;
    assert!(head.starts_with("name: amk\ndescription: >-\n  "), "{head}");
    assert!((80..1024).contains(&head.len()));
    let commands = commands_in(&text);
    assert!(commands.len() > 12, "{commands:?}");
    for command in commands {
        let words = command.iter().take_while(|word| !word.starts_with('-')).count();
        let nested = ["runs", "corpus", "fleet"].contains(&command[0]);
        let flags = flags_of(&command[..words.min(if nested { 2 } else { 1 })]);
        for flag in command.iter().filter_map(|word| word.strip_prefix("--")) {
            assert!(flags.contains(flag), "{command:?}: no --{flag}");
        }
    }
}
