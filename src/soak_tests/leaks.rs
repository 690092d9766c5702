//! The resources of a process, before and after.

use std::path::PathBuf;

/// The most bytes by which memory may grow: allocators keep some.
const GROWTH: u64 = 32 << 20;
/// The most bytes of card memory that may be missing afterwards: other processes use the card too, and the driver keeps some.
const CARD: u64 = 64 << 20;

/// The resources of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResourceUsage {
    files: usize,
    children: usize,
    memory: u64,
}

impl ResourceUsage {
    /// The current usage.
    pub(super) fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let children = tasks.map(|task| {
            let path = task.path().join("children");
            std::fs::read_to_string(path).map_or(0, |list| list.split_whitespace().count())
        });
        Self {
            files: open_files().len(),
            children: children.sum(),
            memory: kib.unwrap_or(0) * 1024,
        }
    }
}

/// What the open files of this process are: paths, sockets, pipes.
fn open_files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
}

/// The resources that are held now and were not held before.
pub(super) fn between(before: Option<&ResourceUsage>, after: &ResourceUsage) -> Vec<String> {
    let Some(before) = before else { return Vec::new() };
    let mut leaks = Vec::new();
    if after.files > before.files {
        leaks.push(format!("{} open files were {}", after.files, before.files));
    }
    if after.children > before.children {
        leaks.push(format!("{} child processes were {}", after.children, before.children));
    }
    if after.memory > before.memory + GROWTH {
        leaks.push(format!("{} bytes of memory were {}", after.memory, before.memory));
    }
    leaks
}

/// Memory of the card that was not freed.
pub(super) fn device(before: Option<u64>) -> Option<String> {
    let (before, after) = (before?, vm_host::Card::default().free_memory().ok()?);
    (after + CARD < before).then(|| format!("{after} bytes of the card are free, {before} were"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_seen() {
        let before = ResourceUsage::now();
        assert!(before.files > 2 && before.memory > 1 << 20, "{before:?}");
        let more = ResourceUsage {
            files: before.files + 1,
            children: 3,
            memory: before.memory + (33 << 20),
        };
        assert_eq!(between(Some(&before), &before), Vec::<String>::new());
        assert_eq!(between(Some(&before), &more).len(), 3);
        // Other tests of this process open and close files meanwhile, so a count would say nothing.
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(open_files().iter().any(|path| path == file.path()));
    }
}
