//! Runs every file under `filetests/` as a separate test: `cargo test -p tests --test filetests PART_OF_A_PATH`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use tests::filetest::{Filetest, all, unified};

mod lowering;

fn main() -> ExitCode {
    let files = all();
    assert!(files.len() > 80, "{} file tests", files.len());
    let lowered = files.iter().filter(|file| lowering::is_for(file)).count();
    assert!(lowered > 5, "only {lowered} files are lowered or run");
    let trials = files.into_iter().map(|file| Trial::test(file.name(), move || check(&file)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

fn check(file: &Filetest) -> Result<(), Failed> {
    if file.directive("test").is_none() {
        return Err("no `;! test = ...` directive".into());
    }
    if let Err((passing, wrong)) = file.run() {
        if !tests::blessing() {
            let diff = unified(&file.text, &passing);
            let bless = "rewrite with: BLESS=1 cargo test -p tests --test filetests";
            return Err(format!("{wrong}{diff}{bless}").into());
        }
        std::fs::write(&file.path, passing)?;
    }
    if lowering::is_for(file) { Ok(lowering::check(file)?) } else { Ok(()) }
}
