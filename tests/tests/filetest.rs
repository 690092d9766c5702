//! Runs every file under `filetests/`.

use std::path::PathBuf;

use tests::diff::unified;
use tests::filetest::Filetest;

/// Every file test.
pub(crate) fn all() -> Vec<Filetest> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("filetests");
    Filetest::all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

#[test]
fn filetests() {
    let files = all();
    assert!(files.len() > 20, "{} file tests", files.len());
    let mut failed = Vec::new();
    for file in &files {
        let name = file.path.display().to_string();
        if file.directive("test").is_none() {
            failed.push(format!("{name}: no `;! test = ...` directive"));
        }
        let Err((passing, wrong)) = file.run() else { continue };
        if tests::blessing() {
            std::fs::write(&file.path, passing).unwrap_or_else(|error| panic!("{name}: {error}"));
        } else {
            let diff = unified(&file.text, &passing);
            failed.push(format!(
                "{name}:\n{wrong}{diff}rewrite with: BLESS=1 cargo test -p tests filetests\n"
            ));
        }
    }
    assert!(
        failed.is_empty(),
        "{} of {} file tests failed\n{}",
        failed.len(),
        files.len(),
        failed.join("\n")
    );
}
