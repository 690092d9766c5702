//! Lists the files under `schedules/<target>/<folder>/` as a table of the crate, so that a schedule is shipped by
//! adding its file.

use std::fmt::Write as _;
use std::io::Result;
use std::path::{Path, PathBuf};

fn main() -> Result<()> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let root = root.join("schedules");
    println!("cargo::rerun-if-changed={}", root.display());
    let mut table = String::from("&[\n");
    for target in sorted(&root)? {
        for folder in sorted(&target)? {
            println!("cargo::rerun-if-changed={}", folder.display());
            if !folder.is_dir() {
                continue;
            }
            for file in sorted(&folder)? {
                entry(&mut table, &target, &folder, &file);
            }
        }
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    std::fs::write(out.join("shipped.rs"), table)
}

/// The entries of a folder, by name; none if it is a file.
fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// A schedule is `<context>.json`; its proof is `<context>.bundle.json` beside it.
fn entry(table: &mut String, target: &Path, folder: &Path, file: &Path) {
    println!("cargo::rerun-if-changed={}", file.display());
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let file_name = name(file);
    let context = file_name.strip_suffix(".json").and_then(|stem| stem.parse::<u32>().ok());
    let Some(context) = context else { return };
    let shape = folder.join("shape.json").display().to_string();
    let (target, folder) = (name(target), name(folder));
    let bundle = file.with_file_name(format!("{context}.bundle.json"));
    let bundle = match bundle.is_file() {
        true => format!("Some(include_str!({:?}))", bundle.display().to_string()),
        false => "None".to_owned(),
    };
    let _ = writeln!(
        table,
        "    ({target:?}, {folder:?}, include_str!({shape:?}), {context}, include_str!({:?}), {bundle}),",
        file.display().to_string()
    );
}
