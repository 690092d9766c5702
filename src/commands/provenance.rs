//! `amk provenance`: walks the numbers of pages to their evidence, and writes them anew from it.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use search::provenance::{Documents, Number, Page, read_page, sources};
use search::{Evidence, Refusal};
use serde_json::{Value, json};

use super::bundle::Status;
use crate::cli::{DeviceChoice, PlaceArgs, ProvenanceArgs};
use crate::context::Context;
use crate::failure::{Exit, Failure, Outcome};
use crate::{files, report};

const BYTES_MAX: u64 = 1 << 20;

/// Most folders below a named one.
const DEPTH_MAX: usize = 8;

pub(crate) fn run(args: &ProvenanceArgs) -> Outcome {
    let mut shelf = Shelf::default();
    let mut numbers = Vec::new();
    let mut all = Vec::new();
    for path in &args.files {
        // Numbers of one line with the same answer are one line here.
        let mut lines: Vec<(usize, String, Vec<String>)> = Vec::new();
        for number in page(args, path, &mut shelf)?.numbers {
            let (status, reason) = shelf.judge(&number);
            let source = number.from.first().and_then(|place| place.split_once('#'));
            let why = reason.as_deref().or(source.map(|(file, _)| file)).unwrap_or_default();
            let answer = format!("{status}: {why}");
            match lines.last_mut() {
                Some((line, last, shown)) if (*line, &*last) == (number.line, &answer) => {
                    shown.push(number.shown.clone());
                }
                Some(_) | None => lines.push((number.line, answer, vec![number.shown.clone()])),
            }
            numbers.push(json!({
                "file": path,
                "line": number.line,
                "shown": number.shown,
                "expected": number.expected,
                "status": status,
                "from": number.from,
                "reason": reason,
            }));
            all.push(status);
        }
        for (line, answer, shown) in lines {
            report::say(&format!("{}:{line}: {}: {answer}", path.display(), shown.join("; ")));
        }
    }
    shelf.held.iter().for_each(|(name, held)| held.say(name));
    let count = |status| all.iter().filter(|each| **each == status).count();
    report::say(&format!(
        "{} numbers: {} hold, {} are stale, {} have no evidence, {} are altered",
        all.len(),
        count(Status::Holds),
        count(Status::Stale),
        count(Status::NoEvidence),
        count(Status::Altered)
    ));
    let worst = all.into_iter().max().unwrap_or(Status::Holds);
    let evidence: Vec<Value> = shelf.held.iter().map(|(name, held)| held.document(name)).collect();
    report::document(&json!({
        "schema": "amk.provenance.v1",
        "status": worst,
        "numbers": numbers,
        "evidence": evidence,
    }))?;
    Ok(match worst {
        Status::Holds => Exit::Yes,
        Status::Stale | Status::NoEvidence => Exit::Inconclusive,
        Status::Altered => Exit::Integrity,
    })
}

/// Reads a page; with `--write` writes it anew, unless its evidence was altered.
fn page(args: &ProvenanceArgs, path: &Path, shelf: &mut Shelf) -> Result<Page, Failure> {
    let text = files::read_text(path, BYTES_MAX)?;
    let whole = path.canonicalize().map_err(|error| files::unreadable(path, error))?;
    for source in sources(&text) {
        shelf.add(&whole, &source, 0)?;
    }
    let page = read_page(&text, &shelf.documents);
    let altered = |number: &Number| shelf.evidence_of(number).0 == Status::Altered;
    if !args.write || page.text == text || page.numbers.iter().any(altered) {
        return Ok(page);
    }
    files::write_whole(path, page.text.as_bytes())?;
    report::say(&format!("wrote {}", path.display()));
    Ok(read_page(&page.text, &shelf.documents))
}

/// What pages name as evidence, by the name.
#[derive(Default)]
struct Shelf {
    documents: Documents,
    held: BTreeMap<String, Held>,
}

/// A file of evidence, and its status under this build.
struct Held {
    status: Status,
    reason: Option<String>,
    evidence: Option<Evidence>,
}

impl Shelf {
    /// Adds a file, or the bundles in a folder. Names are paths from a folder above the page; a missing one is not added.
    fn add(&mut self, page: &Path, name: &str, depth: usize) -> Result<(), Failure> {
        let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
        let beside = |folder: &Path| Some(folder.join(name)).filter(|path| path.exists());
        let inside = !name.is_empty() && Path::new(name).components().all(normal);
        if !inside || self.documents.contains_key(name) || depth > DEPTH_MAX {
            return Ok(());
        }
        let Some(path) = page.ancestors().skip(1).find_map(beside) else { return Ok(()) };
        if path.is_dir() {
            for file in entries(&path)? {
                let named = format!("{name}/{file}");
                if file.ends_with(".bundle.json") || path.join(&file).is_dir() {
                    self.add(page, &named, depth + 1)?;
                }
            }
            return Ok(());
        }
        let text = files::read_text(&path, BYTES_MAX)?;
        let document: Value = serde_json::from_str(&text).unwrap_or_default();
        // Before its links, one of which may lead to itself.
        self.documents.insert(name.to_owned(), document.clone());
        if document.is_array() {
            for source in sources(&text) {
                self.add(page, &source, depth + 1)?;
            }
        }
        let listed = "a list, without samples".to_owned();
        let (status, reason, evidence) = match Evidence::read(&text) {
            _ if document.is_array() => (Status::NoEvidence, Some(listed), None),
            Ok(evidence) => match stale(&evidence) {
                Ok(None) => (Status::Holds, None, Some(evidence)),
                Ok(reason) => (Status::Stale, reason, Some(evidence)),
                Err(refusal) => (refused(&refusal), Some(refusal.to_string()), Some(evidence)),
            },
            Err(refusal) => (refused(&refusal), Some(refusal.to_string()), None),
        };
        self.held.insert(name.to_owned(), Held { status, reason, evidence });
        Ok(())
    }

    /// The worst status of the files that a number follows from.
    fn evidence_of(&self, number: &Number) -> (Status, Option<String>) {
        let files = number.from.iter().filter_map(|place| place.split_once('#'));
        let held = files.filter_map(|(file, _)| Some((file, self.held.get(file)?)));
        let worst = held.max_by_key(|(_, held)| held.status);
        worst.map_or((Status::Holds, None), |(file, Held { status, reason, .. })| {
            // Why evidence is stale is said once, with the evidence.
            let shown = reason.as_ref().filter(|_| *status > Status::Stale);
            (*status, shown.map(|why| format!("{file}: {why}")))
        })
    }

    fn judge(&self, number: &Number) -> (Status, Option<String>) {
        let (status, reason) = self.evidence_of(number);
        match &number.expected {
            _ if status == Status::Altered => (status, reason),
            None => (Status::NoEvidence, number.reason.clone()),
            Some(expected) if !number.is_right() => {
                let from = number.from.join(", ");
                (Status::Altered, Some(format!("the figure is {expected} ({from})")))
            }
            Some(_) => (status, reason),
        }
    }
}

impl Held {
    fn document(&self, name: &str) -> Value {
        let mut document = json!({"file": name, "status": self.status, "reason": self.reason});
        if let Some(evidence) = &self.evidence {
            let builds = evidence.builds.iter().map(|build| {
                let program = build.program.as_ref().map(|(_, id)| id);
                json!({"program_id": program, "kernel_id": build.kernel_id})
            });
            document["model"] = json!(evidence.model);
            document["samples"] = json!(evidence.samples);
            document["builds"] = builds.collect();
            document["commit"] = json!(evidence.commit());
            document["conditions"] = json!(evidence.conditions);
        }
        document
    }

    fn say(&self, name: &str) {
        let mut line = format!("{name}: {}", self.status);
        line.extend(self.reason.iter().map(|why| format!(": {why}")));
        if let Some(evidence) = &self.evidence {
            line += &format!("; {} samples", evidence.samples);
            for build in &evidence.builds {
                let program = build.program.as_ref().map_or("none", |(_, id)| id);
                line += &format!("; program {program}, kernel {}", build.kernel_id);
            }
            let (commit, on) = (evidence.commit().unwrap_or("not recorded"), &evidence.conditions);
            line += &format!("; commit {commit}; {}, driver {}", on.card, on.driver);
        }
        report::say(&line);
    }
}

/// What was never measured is no evidence; the rest was edited or is damaged.
fn refused(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::Unproven(_) => Status::NoEvidence,
        Refusal::Unreadable(_) | Refusal::Tampered(_) | Refusal::Stale(_) => Status::Altered,
    }
}

/// Why this build is not the one that was measured, if it is another.
///
/// # Errors
/// If the figures are impossible for the program.
fn stale(evidence: &Evidence) -> Result<Option<String>, Refusal> {
    let place = PlaceArgs {
        target: Some(evidence.target.clone()),
        device: DeviceChoice::Cpu,
        kv_capacity: evidence.kv_capacity,
        ..PlaceArgs::default()
    };
    let known = model::preset(&evidence.model).is_some();
    let context = known.then(|| Context::load(&evidence.model, &place).ok()).flatten();
    let Some(context) = context else {
        return Ok(Some(format!("{} cannot be built here", evidence.model)));
    };
    if let Some(bundle) = &evidence.bundle {
        match bundle.rebuild(context.graph(), &context.target) {
            Ok(_) => {}
            Err(Refusal::Stale(why)) => return Ok(Some(why)),
            Err(refusal) => return Err(refusal),
        }
    }
    for build in &evidence.builds {
        let kernel = match &build.program {
            Some((config, _)) => context.kernel_id_of(&config.kernel, build.sequences),
            None => {
                let ir::Target { devices, arch, .. } = &context.target;
                vm_host::prefill_kernel_id(context.graph(), *devices, arch)
            }
        };
        let program = build.program.as_ref().filter(|_| evidence.bundle.is_none());
        if let Some((config, id)) = program {
            match context.lowered(config) {
                Ok(program) if program.id() == *id => {}
                Ok(program) => return Ok(Some(format!("this build has program {}", program.id()))),
                Err(failure) => return Ok(Some(failure.message)),
            }
        }
        if kernel != build.kernel_id {
            return Ok(Some(format!("this build has kernel {kernel}")));
        }
    }
    Ok(None)
}

/// The names in a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<String>, Failure> {
    let unreadable = |error| files::unreadable(folder, error);
    let found = std::fs::read_dir(folder).map_err(unreadable)?;
    let paths: Result<Vec<PathBuf>, _> = found.map(|entry| Ok(entry?.path())).collect();
    let names = paths.map_err(unreadable)?;
    let mut names: Vec<String> =
        names.iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}
