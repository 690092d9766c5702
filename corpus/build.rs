//! Lists the files under `schedules/<target>/<folder>/` as a table of the crate, so that shipping one is dropping it there.

use std::fmt::Write as _;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};

/// Sizes of `shape.json`, which are the fields of `ir::program::Dims`.
const SIZES: &[&str] = &["hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "layers"];

/// Formats that a shape can name, and what they are called in the table.
const DTYPES: &[(&str, &str)] = &[("f32", "F32"), ("f16", "F16"), ("bf16", "Bf16")];

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
            let shape = shape(&folder.join("shape.json"))?;
            for file in sorted(&folder)? {
                entry(&mut table, &target, &folder, &shape, &file);
            }
        }
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    std::fs::write(out.join("shipped.rs"), table)
}

/// What is in a folder, by name; nothing if it is a file.
fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// The shape that a folder's schedules are for, as an expression.
fn shape(file: &Path) -> Result<String> {
    println!("cargo::rerun-if-changed={}", file.display());
    let wrong = |what: String| Error::other(format!("{}: {what}", file.display()));
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if json.as_object().map(serde_json::Map::len) != Some(SIZES.len() + 1) {
        return Err(wrong(format!("it wants {} and dtype, and nothing else", SIZES.join(", "))));
    }
    let mut fields = String::new();
    for size in SIZES {
        let value = json[size].as_u64().and_then(|value| u32::try_from(value).ok());
        let value = value.ok_or_else(|| wrong(format!("`{size}` is no size")))?;
        let _ = write!(fields, "{size}: {value}, ");
    }
    let dtype = DTYPES.iter().find(|(name, _)| json["dtype"] == *name);
    let (_, dtype) = dtype.ok_or_else(|| wrong("`dtype` is no format".to_owned()))?;
    Ok(format!("ir::program::Dims {{ {fields}dtype: ir::DType::{dtype} }}"))
}

/// A schedule is `<context>.json`; what proves it is `<context>.bundle.json` beside it.
fn entry(table: &mut String, target: &Path, folder: &Path, shape: &str, file: &Path) {
    println!("cargo::rerun-if-changed={}", file.display());
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let file_name = name(file);
    let context = file_name.strip_suffix(".json").and_then(|stem| stem.parse::<u32>().ok());
    let Some(context) = context else { return };
    let (target, folder) = (name(target), name(folder));
    let bundle = file.with_file_name(format!("{context}.bundle.json"));
    let bundle = match bundle.is_file() {
        true => format!("Some(include_str!({:?}))", bundle.display().to_string()),
        false => "None".to_owned(),
    };
    let _ = writeln!(
        table,
        "    Shipped {{ target: {target:?}, folder: {folder:?}, shape: {shape}, context: {context}, schedule: include_str!({:?}), bundle: {bundle} }},",
        file.display().to_string()
    );
}
