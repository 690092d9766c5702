//! Gives the build its commit: `AMK_COMMIT` of the environment, else git's HEAD, marked if a source differs from it.
//! Without git the commit is unknown.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=AMK_COMMIT");
    let given = std::env::var("AMK_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(head);
    let version = env!("CARGO_PKG_VERSION");
    let version = match &commit {
        Some(commit) => format!("{version} ({commit})"),
        None => version.to_owned(),
    };
    println!("cargo::rustc-env=AMK_VERSION={version}");
    if let Some(commit) = commit {
        println!("cargo::rustc-env=AMK_COMMIT={commit}");
    }
}

/// The commit of the working tree. Watches what can change it: the commit itself, and every source that cargo would
/// compile again anyway.
fn head() -> Option<String> {
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let branch = git(&["symbolic-ref", "HEAD"]).unwrap_or_default();
    for name in ["HEAD", "logs/HEAD", "packed-refs", branch.trim()] {
        let path = git(&["rev-parse", "--git-path", name]).unwrap_or_default();
        watch(path.trim());
    }
    git(&["ls-files"])?.lines().filter(|path| is_source(path)).for_each(watch);
    let modified = git(&["diff", "--name-only", "HEAD"])?.lines().any(is_source);
    Some(commit.trim().to_owned() + if modified { "-modified" } else { "" })
}

/// Whether a change of a file changes the program: documents and tests do not.
fn is_source(path: &str) -> bool {
    !path.contains("tests") && !path.starts_with("docs/") && !path.ends_with(".md")
}

/// A path that does not exist would run this script in every build.
fn watch(path: &str) {
    if Path::new(path).is_file() {
        println!("cargo::rerun-if-changed={path}");
    }
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).ok())?
}
