//! Documents for an agent to read: two before it starts, and one for each search in the folder `runs`.

use std::path::{Component, Path, PathBuf};

use rmcp::model::{Resource, ResourceContents, ResourceTemplate};

use super::paths;
use crate::commands::runs::{self, show};
use crate::failure::Failure;

/// What the address of a search begins with; its folder's name follows.
const RUN: &str = "amk://runs/";
/// The most searches that a list has: the last by name, which are the newest.
const LISTED_MAX: usize = 100;

struct Page {
    uri: &'static str,
    name: &'static str,
    description: &'static str,
    text: fn() -> String,
}

const PAGES: [Page; 2] = [
    Page {
        uri: "amk://harness",
        name: "HARNESS.md",
        description: "How to drive the search: the loop by hand, every field of every answer, what ends a trial, what may not be touched.",
        text: || include_str!("../../HARNESS.md").to_owned(),
    },
    Page {
        uri: "amk://knobs",
        name: "knobs",
        description: "The knob table: path, legal values, the neutral one, what a change costs on a GPU, what it decides.",
        text: ir::schedule::knob_table_markdown,
    },
];

pub(super) fn list() -> Vec<Resource> {
    let resource = |page: &Page| {
        Resource::new(page.uri, page.name)
            .with_description(page.description)
            .with_mime_type("text/markdown")
    };
    let run = |name: &String| {
        Resource::new(format!("{RUN}{name}"), format!("runs/{name}"))
            .with_description("A search.")
            .with_mime_type("application/json")
    };
    let names = names();
    let newest = names.iter().rev().take(LISTED_MAX).map(run);
    PAGES.iter().map(resource).chain(newest).collect()
}

pub(super) fn templates() -> Vec<ResourceTemplate> {
    let text =
        "A search: its terms, trials by outcome, what was kept and why, the champion's schedule.";
    let run = ResourceTemplate::new(format!("{RUN}{{name}}"), "run");
    vec![run.with_description(text).with_mime_type("application/json")]
}

/// The names of the searches in the folder `runs` whose addresses need no escapes.
fn names() -> Vec<String> {
    let found = runs::ledgers(&[]).unwrap_or_default();
    let name = |ledger: PathBuf| {
        let name = ledger.parent()?.file_name()?.to_str()?.to_owned();
        is_plain(&name).then_some(name)
    };
    found.into_iter().filter_map(name).collect()
}

fn is_plain(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// The document of an address, or `None` if there is none.
pub(super) fn read(uri: &str) -> Option<Result<ResourceContents, Failure>> {
    if let Some(page) = PAGES.iter().find(|page| page.uri == uri) {
        let text = ResourceContents::text((page.text)(), page.uri);
        return Some(Ok(text.with_mime_type("text/markdown")));
    }
    let folder = folder(uri.strip_prefix(RUN)?)?;
    let text = show::document(&folder).map(|document| document.to_string());
    Some(text.map(|text| ResourceContents::text(text, uri).with_mime_type("application/json")))
}

/// The folder of a search by its name.
fn folder(name: &str) -> Option<PathBuf> {
    let path = Path::new(runs::RUNS).join(name);
    let within =
        matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
    (within && path.join(runs::LEDGER).is_file() && paths::in_working_folder(&path)).then_some(path)
}

pub(super) fn uris() -> String {
    format!(
        "{}, and {RUN}NAME for each search in the folder {}",
        PAGES.map(|page| page.uri).join(", "),
        runs::RUNS
    )
}
