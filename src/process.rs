//! Running processes of `amk`, found by their telemetry pages: what `top`, `trace --pid` and `inspect` look at.

use std::path::Path;

use abi::{EntryState, ProgramWords, SessionWords};
use serde_json::{Map, Value, json};
use telemetry::{Folder, Found, Page, Reader, Unreadable, now_ns, text};

use crate::failure::Failure;

/// A snapshot of the page at some moment.
pub(crate) struct Look {
    pub(crate) page: Box<Page>,
    pub(crate) at_ns: u64,
}

impl Look {
    /// Whether the process says that it has ended.
    pub(crate) fn is_last(&self) -> bool {
        self.page.head.activity == abi::Activity::Ended as u32
    }

    /// Whether it was ended without a chance to say so.
    pub(crate) fn is_gone(&self) -> bool {
        !Path::new("/proc").join(self.page.head.pid.to_string()).exists()
    }
}

/// A process with its page.
pub(crate) struct Process {
    pub(crate) reader: Reader,
    /// The number of other processes that could be looked at.
    pub(crate) others: usize,
}

impl Process {
    /// A consistent copy of its page.
    pub(crate) fn look(&self) -> Result<Look, Failure> {
        let mut page = Page::boxed();
        let read = self.reader.read(&mut page);
        read.map_err(|error| Failure::refused(format!("the page cannot be read: {error}")))?;
        Ok(Look { page, at_ns: now_ns() })
    }

    /// The process with this id, or the one that started last.
    pub(crate) fn find(folder: &Folder, pid: Option<u32>) -> Result<Self, Failure> {
        let living = folder.living();
        let named = |found: &&Found| pid.is_none_or(|pid| found.pid == pid);
        let mut open: Vec<(u64, Reader)> = Vec::new();
        let mut unreadable = None;
        for found in living.iter().filter(named) {
            let looked = Reader::open(&found.path).and_then(|reader| {
                let mut page = Page::boxed();
                reader.read(&mut page).map(|()| (page.head.started_ns, reader))
            });
            match looked {
                Ok(looked) => open.push(looked),
                Err(error) => unreadable = Some((found, error)),
            }
        }
        open.sort_by_key(|(started, _)| *started);
        let others = open.len().saturating_sub(1);
        match (open.pop(), unreadable) {
            (Some((_, reader)), _) => Ok(Self { reader, others }),
            (None, Some((found, error))) => Err(unread(found, &error)),
            (None, None) => Err(nobody(folder, &living, pid)),
        }
    }
}

/// A sequence in its place.
pub(crate) fn session(place: usize, session: &SessionWords, at_ns: u64) -> Value {
    json!({
        "place": place,
        "serial": session.serial,
        "priority": priority(session.priority),
        "state": EntryState::new(session.state).map_or("unknown", EntryState::name),
        "positions": session.positions,
        "positions_max": session.goal,
        "tokens": session.tokens,
        "age_s": at_ns.saturating_sub(session.opened_ns) as f64 / 1e9,
    })
}

pub(crate) fn priority(number: u32) -> &'static str {
    ["low", "normal", "high"].get(number as usize).copied().unwrap_or("unknown")
}

/// Names by number, with their values.
pub(crate) fn by_name<'a, V: Into<Value> + Copy>(
    names: impl Iterator<Item = &'a str>,
    values: &[V],
) -> Value {
    let pairs = names.zip(values).map(|(name, value)| (name.to_owned(), (*value).into()));
    Value::Object(pairs.collect::<Map<String, Value>>())
}

/// The programs of a page, with the passes of their queues since another look, or since the start.
pub(crate) fn programs(before: Option<&Page>, now: &Page) -> Value {
    let all = now.programs.iter().enumerate().filter(|(_, program)| program.workers > 0);
    let row = |(number, program): (usize, &ProgramWords)| {
        let before = before.map_or(0, |before| before.programs[number].passes);
        json!({
            "program": text(&program.id),
            "workers": program.workers,
            "passes": program.passes.saturating_sub(before),
        })
    };
    all.map(row).collect()
}

fn unread(found: &Found, error: &Unreadable) -> Failure {
    let path = found.path.display();
    Failure::missing(format!(
        "process {} cannot be looked at: {path}: {error}; use the `amk` that it was started with",
        found.pid
    ))
}

fn nobody(folder: &Folder, living: &[Found], pid: Option<u32>) -> Failure {
    let place = folder.path().display();
    let Some(pid) = pid else {
        return Failure::missing(format!(
            "no running amk was found in {place}; start one, for example `amk serve --model smollm2-135m`, as the same user and with the same XDG_RUNTIME_DIR, then look again"
        ));
    };
    let there: Vec<String> = living.iter().map(|found| found.pid.to_string()).collect();
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    Failure::missing(format!(
        "process {pid} has no page in {place}; processes that have one: {there}"
    ))
}
