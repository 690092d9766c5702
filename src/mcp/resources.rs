//! Documents for an agent to read before it starts.

use rmcp::model::{Resource, ResourceContents};

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
    PAGES.iter().map(resource).collect()
}

pub(super) fn read(uri: &str) -> Option<ResourceContents> {
    let page = PAGES.iter().find(|page| page.uri == uri)?;
    Some(ResourceContents::text((page.text)(), page.uri).with_mime_type("text/markdown"))
}

pub(super) fn uris() -> String {
    PAGES.map(|page| page.uri).join(", ")
}
