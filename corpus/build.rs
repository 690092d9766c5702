//! Lists the files under `schedules/<target>/<model>/` as a table of the crate, so that shipping one is dropping it there.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let root = root.join("schedules");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut table = String::from("&[\n");
    for target in sorted(&root)? {
        for model in sorted(&target)? {
            println!("cargo::rerun-if-changed={}", model.display());
            for file in sorted(&model)? {
                entry(&mut table, &target, &model, &file);
            }
        }
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    std::fs::write(out.join("shipped.rs"), table)
}

/// What is in a folder, by name; nothing if it is a file.
fn sorted(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<std::io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// A schedule is `<context>.json`; what proves it is `<context>.bundle.json` beside it.
fn entry(table: &mut String, target: &Path, model: &Path, file: &Path) {
    println!("cargo::rerun-if-changed={}", file.display());
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let file_name = name(file);
    let Some(context) = file_name.strip_suffix(".json").filter(|stem| !stem.contains('.')) else {
        return;
    };
    let (target, model) = (name(target), name(model));
    let bundle = file.with_file_name(format!("{context}.bundle.json"));
    let bundle = match bundle.is_file() {
        true => format!("Some(include_str!({:?}))", bundle.display().to_string()),
        false => "None".to_owned(),
    };
    let _ = writeln!(
        table,
        "    Shipped {{ target: {target:?}, model: {model:?}, context: {context}, schedule: include_str!({:?}), bundle: {bundle} }},",
        file.display().to_string()
    );
}
