//! Manifests of finished runs: `manifest.json` in a run's folder, with the hash of every file and of the manifest of
//! the previous run.
//!
//! A run grows while its search continues, and its ledger protects it row by row. At its end it is **sealed**: the
//! manifest is written to a temporary name, synced and renamed, so sealing is atomic. Before a search is resumed its
//! manifest is renamed ([`UNSEALED`]); sealed again, it keeps its place in the chain and lists the manifests that it
//! replaces. A run whose files were deleted to free space keeps its manifest ([`COLLECTED`]), so the chain of later
//! runs still holds.
//!
//! Runs are chained in the order in which they were first sealed, among the folders beside each other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{At, CorpusError};
use crate::files;
use crate::seal::{check_seal, seal};

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";

/// Its name while the search continues.
pub const UNSEALED: &str = "unsealed.json";

/// Its name once the run's files were deleted.
pub const COLLECTED: &str = "collected.json";

/// Its names, in order of precedence.
const NAMES: [&str; 3] = [MANIFEST, COLLECTED, UNSEALED];

/// The schema id of a manifest.
pub const MANIFEST_SCHEMA: &str = "amk.manifest.v1";

/// Most files of a run, its manifest included.
pub const FILES_MAX: usize = 12;

/// Longest manifest that is read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Longest file of a run that is sealed or checked.
const FILE_BYTES_MAX: u64 = 2 << 30;

/// The append-only file.
const LEDGER: &str = "ledger.jsonl";

/// The recorded state of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileSeal {
    /// Hash of its bytes.
    pub blake3: String,
    /// Number of bytes.
    pub bytes: u64,
}

/// The previous run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Previous {
    /// Its id.
    pub run: String,
    /// The hash of its manifest at that time.
    pub hash: String,
}

/// The manifest of a sealed run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`MANIFEST_SCHEMA`].
    pub schema: String,
    /// The run's id.
    pub run: String,
    /// Its place in the chain, from zero.
    pub number: u64,
    /// The run before it in the chain.
    pub previous: Option<Previous>,
    /// When it was sealed, seconds since 1970.
    pub sealed_unix_s: u64,
    /// Rows of its ledger, the header among them.
    pub rows: u64,
    /// Hashes of its earlier manifests: it was sealed, resumed, and sealed again.
    pub supersedes: Vec<String>,
    /// Every other file of the folder.
    pub files: BTreeMap<String, FileSeal>,
}

/// Whether a run is sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Its search has not ended, or was stopped: it can be resumed.
    Open,
    /// Its manifest, with its hash.
    Sealed(Box<Manifest>, String),
    /// The manifest of the deleted files, with its hash.
    Collected(Box<Manifest>, String),
}

/// The result of checking a run's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// Whether it is sealed.
    pub state: State,
    /// Inconsistencies: any of them means that the run was changed.
    pub problems: Vec<String>,
    /// Whether the previous run was found beside it.
    pub previous_is_here: bool,
}

impl Manifest {
    fn read(path: &Path) -> Result<Option<(Self, String)>, CorpusError> {
        let tampered =
            |reason: String| CorpusError::Tampered { path: path.to_path_buf(), line: 1, reason };
        let read = files::open_own(path).and_then(|f| files::read_whole(&f, MANIFEST_BYTES_MAX));
        let text = match read {
            Ok(bytes) => String::from_utf8(bytes)
                .map_err(|_| tampered("this is not the manifest of a run".to_owned()))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(CorpusError::io("read", path, error)),
        };
        let fields: Result<Map<String, Value>, _> = serde_json::from_str(&text);
        let mut fields = fields.map_err(|e| tampered(format!("this is not a manifest ({e})")))?;
        check_seal(&fields).map_err(tampered)?;
        let hash = fields.remove("hash").and_then(|hash| hash.as_str().map(str::to_owned));
        let manifest: Self = serde_json::from_value(fields.into())
            .map_err(|e| tampered(format!("this is not a manifest of this version ({e})")))?;
        // Collecting a run deletes the files in its manifest.
        let leads_out =
            |name: &&String| Path::new(name.as_str()).file_name() != Some(name.as_ref());
        if let Some(name) = manifest.files.keys().find(leads_out) {
            return Err(tampered(format!("it names {name:?}, which is no file of its folder")));
        }
        Ok(Some((manifest, hash.unwrap_or_default())))
    }

    /// The text of the file, with its hash, and the hash.
    fn to_text(&self) -> (String, String) {
        let fields = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => seal(&fields),
            Ok(_) | Err(_) => Map::new(),
        };
        let hash = fields.get("hash").and_then(Value::as_str).unwrap_or_default().to_owned();
        (serde_json::to_string_pretty(&fields).unwrap_or_default() + "\n", hash)
    }
}

/// Checks whether a run is sealed, and whether its files are unchanged.
///
/// # Errors
/// If the folder cannot be read. An edited manifest is a reported problem, not an error.
pub fn look(folder: &Path) -> Result<Looked, CorpusError> {
    let mut looked = Looked { state: State::Open, problems: Vec::new(), previous_is_here: false };
    for name in NAMES {
        let (manifest, hash) = match Manifest::read(&folder.join(name)) {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            Err(error) if error.is_integrity() => {
                looked.problems.push(error.to_string());
                return Ok(looked);
            }
            Err(error) => return Err(error),
        };
        let differences = differences(folder, &manifest.files);
        match name {
            MANIFEST => {
                looked.problems = differences.unwrap_or_else(|error| vec![error.to_string()]);
                look_at_previous(folder, &manifest, &mut looked)?;
                looked.state = State::Sealed(Box::new(manifest), hash);
            }
            COLLECTED => {
                looked.problems = differences?;
                // Missing files were deleted by collecting.
                looked.problems.retain(|problem| !problem.ends_with(MISSING));
                looked.state = State::Collected(Box::new(manifest), hash);
            }
            // Its search continues. The sealed contents must still be there: renaming the manifest does not remove the
            // protection.
            _ => {
                let sealed = manifest.files.get(LEDGER);
                let begins = sealed.map(|sealed| begins_as_sealed(&folder.join(LEDGER), sealed));
                if begins.transpose()? == Some(false) {
                    looked.problems.push(format!(
                        "{LEDGER} does not begin with the rows that were sealed ({UNSEALED})"
                    ));
                }
            }
        }
        break;
    }
    Ok(looked)
}

/// Checks whether the previous run is here, and still the one that a manifest names.
fn look_at_previous(
    folder: &Path,
    manifest: &Manifest,
    looked: &mut Looked,
) -> Result<(), CorpusError> {
    looked.previous_is_here = true;
    let Some(previous) = &manifest.previous else { return Ok(()) };
    match neighbour(folder, &previous.run)? {
        None => looked.previous_is_here = false,
        Some(known) if known.contains(&previous.hash) => {}
        Some(_) => looked.problems.push(format!(
            "{MANIFEST} names another manifest of the run before it ({}) than that has",
            previous.run
        )),
    }
    Ok(())
}

/// Whether a file still begins with the bytes that were sealed.
fn begins_as_sealed(path: &Path, sealed: &FileSeal) -> Result<bool, CorpusError> {
    let hash = || {
        let file = files::open_own(path)?;
        if file.metadata()?.len() < sealed.bytes || sealed.bytes > FILE_BYTES_MAX {
            return Ok(None);
        }
        hash_of(&file, sealed.bytes).map(Some)
    };
    let found = hash().at("read", path)?;
    Ok(found.as_ref() == Some(&sealed.blake3))
}

/// The hash of the first bytes of a file.
fn hash_of(file: &File, bytes: u64) -> std::io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file.take(bytes))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Seals a run, or restores its seal if nothing has changed since. `rows` are those of its ledger.
///
/// # Errors If it has too many files, or the disk reports an error.
pub fn seal_run(folder: &Path, run: &str, rows: u64, unix_s: u64) -> Result<Manifest, CorpusError> {
    let parent = parent_of(folder);
    // One at a time, so that no two runs follow the same one. Where folders cannot be locked, `look` detects that.
    let lock = File::open(&parent).at("read", &parent)?;
    let _ = lock.lock();
    let files = files_of(folder)?;
    let aside = folder.join(UNSEALED);
    let old = Manifest::read(&aside)?;
    if let Some((manifest, _)) = &old
        && manifest.files == files
    {
        rename(&aside, &folder.join(MANIFEST))?;
        return Ok(manifest.clone());
    }
    let (number, previous, supersedes) = match old {
        Some((old, hash)) => (old.number, old.previous, [old.supersedes, vec![hash]].concat()),
        None => match latest(folder)? {
            Some((last, hash)) => {
                (last.number + 1, Some(Previous { run: last.run, hash }), Vec::new())
            }
            None => (0, None, Vec::new()),
        },
    };
    let schema = MANIFEST_SCHEMA.to_owned();
    let run = run.to_owned();
    let manifest =
        Manifest { schema, run, number, previous, sealed_unix_s: unix_s, rows, supersedes, files };
    let path = folder.join(MANIFEST);
    let (text, _) = manifest.to_text();
    files::replace(&path, text.as_bytes()).at("write", &path)?;
    files::sync_folder(&path)?;
    if aside.exists() {
        std::fs::remove_file(&aside).at("remove", &aside)?;
    }
    Ok(manifest)
}

/// Sets the seal of a run aside, because its search continues.
///
/// # Errors If the disk reports an error.
pub fn unseal_run(folder: &Path) -> Result<(), CorpusError> {
    let path = folder.join(MANIFEST);
    if path.exists() { rename(&path, &folder.join(UNSEALED)) } else { Ok(()) }
}

/// Deletes the files of a sealed run and keeps its manifest. Returns the number of bytes freed.
///
/// # Errors If it is not sealed, or the disk reports an error.
pub fn collect_run(folder: &Path) -> Result<u64, CorpusError> {
    let path = folder.join(MANIFEST);
    let Some((manifest, _)) = Manifest::read(&path)? else {
        return Err(CorpusError::io("read", &path, std::io::ErrorKind::NotFound.into()));
    };
    // From here on it counts as collected, even if deleting fails.
    rename(&path, &folder.join(COLLECTED))?;
    let mut freed = 0;
    for (name, file) in &manifest.files {
        let path = folder.join(name);
        match std::fs::remove_file(&path) {
            Ok(()) => freed += file.bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(CorpusError::io("remove", &path, error)),
        }
    }
    Ok(freed)
}

/// The end of a problem's text for a missing file.
const MISSING: &str = " is missing";

/// The differences between the files of a folder and the sealed ones. A file of another length is not read.
fn differences(
    folder: &Path,
    sealed: &BTreeMap<String, FileSeal>,
) -> Result<Vec<String>, CorpusError> {
    let found = names_of(folder)?;
    let mut problems = Vec::new();
    for (name, seal) in sealed {
        let Some(path) = found.get(name) else {
            problems.push(format!("{name}{MISSING}"));
            continue;
        };
        match changed(path, seal) {
            Ok(None) => {}
            Ok(Some(bytes)) => problems.push(format!(
                "{name} was changed since it was sealed ({} bytes, {bytes} now)",
                seal.bytes
            )),
            Err(error) => problems.push(format!("{name} cannot be read: {error}")),
        }
    }
    let more = found.keys().filter(|name| !sealed.contains_key(*name));
    problems.extend(more.map(|name| format!("{name} was added since the run was sealed")));
    Ok(problems)
}

/// The file's current number of bytes, if it differs from what was sealed.
fn changed(path: &Path, seal: &FileSeal) -> std::io::Result<Option<u64>> {
    let file = files::open_own(path)?;
    let bytes = file.metadata()?.len();
    let same = bytes == seal.bytes
        && bytes <= FILE_BYTES_MAX
        && hash_of(&file, seal.bytes)? == seal.blake3;
    Ok((!same).then_some(bytes))
}

/// Every file of a run in its current state.
fn files_of(folder: &Path) -> Result<BTreeMap<String, FileSeal>, CorpusError> {
    let names = names_of(folder)?;
    if names.len() >= FILES_MAX {
        let many = format!("{} files, and a run has at most {FILES_MAX}", names.len() + 1);
        let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, many);
        return Err(CorpusError::io("seal", folder, error));
    }
    let seal = |(name, path): (String, PathBuf)| {
        let read = || {
            let file = files::open_own(&path)?;
            let bytes = file.metadata()?.len();
            if bytes > FILE_BYTES_MAX {
                let long = format!("it has {bytes} bytes, and at most {FILE_BYTES_MAX} are sealed");
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, long));
            }
            Ok(FileSeal { blake3: hash_of(&file, bytes)?, bytes })
        };
        let sealed = read().at("read", &path)?;
        Ok((name, sealed))
    };
    names.into_iter().map(seal).collect()
}

/// The names in a run's folder, except its manifest's and temporary files of a dead process.
fn names_of(folder: &Path) -> Result<BTreeMap<String, PathBuf>, CorpusError> {
    let unreadable = |e| CorpusError::io("read", folder, e);
    let mut names = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !NAMES.contains(&name.as_str()) && !name.ends_with(".partial") {
            names.insert(name, entry.path());
        }
    }
    Ok(names)
}

fn parent_of(path: &Path) -> PathBuf {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let parent = whole.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_path_buf()
}

/// The manifests of the runs beside a folder, in any state. Unreadable ones are skipped.
fn beside(folder: &Path) -> Result<Vec<(Manifest, String)>, CorpusError> {
    let parent = parent_of(folder);
    let own = folder.canonicalize().at("read", folder)?;
    let unreadable = |e| CorpusError::io("read", &parent, e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&parent).map_err(unreadable)? {
        let other = entry.map_err(unreadable)?.path();
        if other.file_name() != own.file_name() && other.is_dir() {
            let read = |name: &&str| Manifest::read(&other.join(name)).ok().flatten();
            found.extend(NAMES.iter().find_map(read));
        }
    }
    Ok(found)
}

/// The last run of the chain.
fn latest(folder: &Path) -> Result<Option<(Manifest, String)>, CorpusError> {
    Ok(beside(folder)?.into_iter().max_by_key(|(manifest, _)| manifest.number))
}

/// The current and earlier hashes of the manifest of a run beside this one.
fn neighbour(folder: &Path, run: &str) -> Result<Option<Vec<String>>, CorpusError> {
    let found = beside(folder)?.into_iter().find(|(manifest, _)| manifest.run == run);
    Ok(found.map(|(manifest, hash)| [manifest.supersedes, vec![hash]].concat()))
}

fn rename(from: &Path, to: &Path) -> Result<(), CorpusError> {
    std::fs::rename(from, to).at("write", to)?;
    files::sync_folder(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(parent: &Path, name: &str) -> PathBuf {
        let folder = parent.join(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("ledger.jsonl"), format!("rows of {name}\n")).unwrap();
        std::fs::write(folder.join("best.json"), "{}\n").unwrap();
        folder
    }

    fn sealed(parent: &Path, name: &str, unix_s: u64) -> PathBuf {
        let folder = run(parent, name);
        seal_run(&folder, &format!("id-{name}"), 3, unix_s).unwrap();
        folder
    }

    #[test]
    fn a_flipped_byte_in_any_file_is_found_and_named() {
        let parent = tempfile::tempdir().unwrap();
        let folder = sealed(parent.path(), "a", 1);
        let clean = look(&folder).unwrap();
        assert!(matches!(clean.state, State::Sealed(..)) && clean.problems.is_empty());
        for name in ["ledger.jsonl", "best.json", MANIFEST] {
            let whole = std::fs::read(folder.join(name)).unwrap();
            for at in 0..whole.len() {
                let mut bytes = whole.clone();
                bytes[at] ^= 1;
                std::fs::write(folder.join(name), bytes).unwrap();
                let problems = look(&folder).unwrap().problems;
                let named = problems.iter().any(|problem| problem.contains(name));
                assert!(named, "{name} byte {at}: {problems:?}");
            }
            std::fs::write(folder.join(name), whole).unwrap();
        }
        std::fs::write(folder.join("notes.md"), "more").unwrap();
        assert_eq!(
            look(&folder).unwrap().problems,
            ["notes.md was added since the run was sealed"]
        );
        std::fs::remove_file(folder.join("notes.md")).unwrap();
        std::fs::remove_file(folder.join("best.json")).unwrap();
        assert_eq!(look(&folder).unwrap().problems, ["best.json is missing"]);
    }

    #[test]
    fn runs_are_chained_through_resuming_and_collecting() {
        let parent = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| sealed(parent.path(), name, 1));
        let number = |folder: &Path| {
            let state = look(folder).unwrap().state;
            let State::Sealed(manifest, _) = state else { panic!("{state:?}") };
            (manifest.number, manifest.supersedes.len())
        };
        assert_eq!([number(&a), number(&b), number(&c)], [(0, 0), (1, 0), (2, 0)]);
        // `a` is resumed and sealed again: those after it still hold.
        unseal_run(&a).unwrap();
        assert_eq!(look(&a).unwrap().state, State::Open);
        assert!(look(&b).unwrap().problems.is_empty(), "while it is open, too");
        std::fs::write(a.join("ledger.jsonl"), "rows of a\nmore rows\n").unwrap();
        seal_run(&a, "id-a", 4, 2).unwrap();
        assert_eq!((number(&a), a.join(UNSEALED).exists()), ((0, 1), false));
        assert!(look(&b).unwrap().problems.is_empty() && look(&b).unwrap().previous_is_here);
        // Nothing new: the seal is unchanged.
        let before = std::fs::read(a.join(MANIFEST)).unwrap();
        unseal_run(&a).unwrap();
        seal_run(&a, "id-a", 4, 3).unwrap();
        assert_eq!(std::fs::read(a.join(MANIFEST)).unwrap(), before);
        // The files of `b` are deleted.
        assert!(collect_run(&b).unwrap() > 0);
        assert_eq!(std::fs::read_dir(&b).unwrap().count(), 1);
        assert!(matches!(look(&b).unwrap().state, State::Collected(..)));
        assert!(look(&c).unwrap().problems.is_empty());
        // Another run in `b`'s place is detected.
        std::fs::remove_dir_all(&b).unwrap();
        assert!(!look(&c).unwrap().previous_is_here);
        sealed(parent.path(), "b", 9);
        let problems = look(&c).unwrap().problems;
        assert!(problems.len() == 1 && problems[0].contains("id-b"), "{problems:?}");
    }

    #[test]
    fn another_name_of_the_manifest_takes_nothing_of_the_seal_away() {
        let parent = tempfile::tempdir().unwrap();
        let folder = sealed(parent.path(), "a", 1);
        for aside in [UNSEALED, COLLECTED] {
            std::fs::rename(folder.join(MANIFEST), folder.join(aside)).unwrap();
            assert_eq!(look(&folder).unwrap().problems, Vec::<String>::new());
            std::fs::write(folder.join("ledger.jsonl"), "rows of b\n").unwrap();
            let problems = look(&folder).unwrap().problems;
            assert!(problems.len() == 1 && problems[0].contains("ledger.jsonl"), "{problems:?}");
            std::fs::write(folder.join(aside), "{}").unwrap();
            assert_eq!(look(&folder).unwrap().problems.len(), 1);
            std::fs::remove_dir_all(&folder).unwrap();
            sealed(parent.path(), "a", 1);
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once_and_what_a_link_leads_to_is_not_written() {
        let parent = tempfile::tempdir().unwrap();
        let folder = sealed(parent.path(), "a", 1);
        let victim = parent.path().join("victim");
        std::fs::write(&victim, "{}\n").unwrap();
        let pipe = |path: &Path| {
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            let fifo = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, path, fifo, mode, 0).unwrap();
        };
        let link = |path: &Path| std::os::unix::fs::symlink(&victim, path).unwrap();
        for make in [&pipe as &dyn Fn(&Path), &link] {
            let best = folder.join("best.json");
            std::fs::remove_file(&best).unwrap();
            make(&best);
            let problems = look(&folder).unwrap().problems;
            assert!(problems.len() == 1 && problems[0].contains("best.json"), "{problems:?}");
            unseal_run(&folder).unwrap();
            let error = seal_run(&folder, "id-a", 3, 1).unwrap_err().to_string();
            assert!(error.contains("best.json"), "{error}");
            std::fs::rename(folder.join(UNSEALED), folder.join(MANIFEST)).unwrap();
        }
        std::fs::remove_dir_all(&folder).unwrap();
        run(parent.path(), "a");
        link(&folder.join("manifest.json.partial"));
        seal_run(&folder, "id-a", 3, 1).unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"{}\n");
    }

    #[test]
    fn a_file_of_another_length_is_not_read_and_no_file_is_sealed_that_is_too_long() {
        let parent = tempfile::tempdir().unwrap();
        let folder = sealed(parent.path(), "a", 1);
        let file = File::options().write(true).open(folder.join("best.json")).unwrap();
        file.set_len(1 << 40).unwrap();
        let problems = look(&folder).unwrap().problems;
        assert_eq!(
            problems,
            ["best.json was changed since it was sealed (3 bytes, 1099511627776 now)"]
        );
        unseal_run(&folder).unwrap();
        let error = seal_run(&folder, "id-a", 3, 1).unwrap_err().to_string();
        assert!(error.contains("1099511627776 bytes"), "{error}");
    }

    #[test]
    fn a_manifest_that_names_files_elsewhere_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let folder = sealed(parent.path(), "a", 1);
        let (mut manifest, _) = Manifest::read(&folder.join(MANIFEST)).unwrap().unwrap();
        let victim = FileSeal { blake3: String::new(), bytes: 0 };
        manifest.files.insert("../victim".to_owned(), victim);
        std::fs::write(folder.join(MANIFEST), manifest.to_text().0).unwrap();
        let problems = look(&folder).unwrap().problems;
        assert!(problems.len() == 1 && problems[0].contains("victim"), "{problems:?}");
        assert!(collect_run(&folder).is_err());
    }

    #[test]
    fn a_run_has_at_most_twelve_files() {
        let parent = tempfile::tempdir().unwrap();
        let folder = run(parent.path(), "a");
        for number in 0..FILES_MAX - 3 {
            std::fs::write(folder.join(format!("note{number}")), "").unwrap();
        }
        assert!(seal_run(&folder, "id", 1, 1).is_ok());
        unseal_run(&folder).unwrap();
        std::fs::write(folder.join("one more"), "").unwrap();
        let error = seal_run(&folder, "id", 1, 1).unwrap_err().to_string();
        assert!(error.contains("13 files, and a run has at most 12"), "{error}");
    }
}
