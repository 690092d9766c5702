//! Models by name: a preset, a folder, or a model of the Hugging Face Hub, which is downloaded if it is not in the Hub's
//! cache.

use std::path::{Path, PathBuf};

use hub::{Hub, HubError, ModelId, Snapshot};
use ir::Graph;
use model::Model;

use crate::failure::Failure;
use crate::report;

/// Loads the model of a name.
pub(crate) fn load(name: &str) -> Result<Model, Failure> {
    match hub_folder(name)? {
        Some(folder) => Ok(model::import(&folder)?),
        None => Ok(model::load(name)?),
    }
}

/// Loads the model of a name for a command that needs its shape alone: a `config.json`, or a folder without weights, gives
/// a model with random weights, which are not made unless they are read. Also whether that is so.
pub(crate) fn load_shape(name: &str) -> Result<(Model, bool), Failure> {
    let path = Path::new(name);
    let described = if model::preset(name).is_some() || name.is_empty() {
        None
    } else if path.is_file() {
        path.extension().is_some_and(|extension| extension == "json").then(|| path.to_path_buf())
    } else if path.is_dir() {
        Some(path.to_path_buf())
    } else {
        ModelId::parse(name).and_then(|id| Hub::from_env()?.described(&id))
    };
    // An index of shards that cannot be read is an error of its own, which loading reports.
    let bare = |path: &PathBuf| {
        path.is_file()
            || (path.join("config.json").is_file()
                && model::missing_weights(path).is_ok_and(|missing| !missing.is_empty()))
    };
    let Some(path) = described.filter(bare) else { return Ok((load(name)?, false)) };
    let (shape, _) = model::import_shape(&path)?;
    report::say(&format!(
        "note: {} has no weights: the shape of its config.json is scheduled and predicted; what reads weights gets random ones",
        path.display()
    ));
    Ok((Model::random(shape, 0), true))
}

/// The folder of a model of the Hub, downloaded if it has to be; `None` for a preset, a folder, and what is no such name.
pub(crate) fn hub_folder(name: &str) -> Result<Option<PathBuf>, Failure> {
    if model::preset(name).is_some() || std::fs::exists(name).unwrap_or(false) {
        return Ok(None);
    }
    let Some(id) = ModelId::parse(name) else { return Ok(None) };
    let hub = Hub::from_env().ok_or_else(|| {
        Failure::usage(format!(
            "{name} is not a folder, and there is no folder for a cache of the Hugging Face Hub: set HF_HUB_CACHE"
        ))
    })?;
    let cached = hub.find(&id)?;
    if let Some(Snapshot { dir, whole: true }) = cached {
        return Ok(Some(dir));
    }
    match (download(&hub, &id), cached) {
        (Ok(dir), _) => Ok(Some(dir)),
        (Err(error), Some(Snapshot { dir, .. })) => {
            report::say(&format!(
                "note: {id} is in the cache without its tokenizer.json; {}",
                error.message
            ));
            Ok(Some(dir))
        }
        (Err(error), None) => Err(error),
    }
}

/// The graph of a folder without a look at its weights, and whether they are made in memory.
fn described(path: &Path, positions: u32) -> Result<(Graph, bool), Failure> {
    let (mut shape, quantised) = model::import_shape(path)?;
    shape.reach(positions);
    Ok((shape.graph(), quantised))
}

/// The graph of a name with room for sequences of `positions`, and whether its weights are made in memory: random or
/// dequantised. Nothing is downloaded.
pub(crate) fn graph(name: &str, positions: u32) -> Result<(Graph, bool), Failure> {
    if let Some(model) = model::preset(name) {
        return Ok((model.graph, true));
    }
    if !std::fs::exists(name).unwrap_or(false)
        && let (Some(id), Some(hub)) = (ModelId::parse(name), Hub::from_env())
    {
        let missing = || {
            Failure::usage(format!(
                "{id} is not in the cache {}: `amk generate --model {id}` or `{}` downloads it",
                hub.cache.display(),
                id.command()
            ))
        };
        let dir = hub.described(&id).ok_or_else(missing)?;
        return described(&dir, positions);
    }
    // An unknown name gets the error that lists the presets.
    match std::fs::exists(name) {
        Ok(true) if !name.is_empty() && !name.ends_with(".gguf") => {
            described(Path::new(name), positions)
        }
        _ => Ok((model::load(name)?.graph, true)),
    }
}

#[cfg(not(feature = "full"))]
fn download(hub: &Hub, id: &ModelId) -> Result<PathBuf, Failure> {
    Err(Failure::missing(format!(
        "{id} is not in the cache {}, and this build of amk does not download: run `{}`",
        hub.cache.display(),
        id.command()
    )))
}

#[cfg(feature = "full")]
fn download(hub: &Hub, id: &ModelId) -> Result<PathBuf, Failure> {
    let mut shown = Shown::default();
    if !hub.offline {
        report::say(&format!("downloading {id} into {}", hub.cache.display()));
    }
    Ok(hub.download(id, &mut |progress| shown.on(progress))?.dir)
}

/// The progress line of a download.
#[cfg(feature = "full")]
#[derive(Default)]
struct Shown {
    bar: Option<indicatif::ProgressBar>,
    waiting: bool,
}

#[cfg(feature = "full")]
impl Shown {
    fn on(&mut self, progress: hub::Progress) {
        match progress {
            hub::Progress::File { name, have, bytes } => {
                self.end();
                let template = "  [{bar:30}] {bytes}/{total_bytes} {msg}, {bytes_per_sec}, {left}";
                let bar = crate::spinner::shown(indicatif::ProgressBar::new(bytes), template);
                bar.set_position(have);
                // The time left follows from what arrives now, not from what was there.
                bar.reset_eta();
                bar.set_message(name);
                self.bar = Some(bar);
            }
            hub::Progress::Bytes(bytes) => {
                self.bar.iter().for_each(|bar| bar.inc(bytes));
            }
            hub::Progress::Again(why) => report::say(&format!("{why}; trying again")),
            hub::Progress::Waiting(name) if !self.waiting => {
                self.waiting = true;
                report::say(&format!("another process downloads {name}; waiting for it"));
            }
            hub::Progress::Waiting(_) => {}
        }
    }

    fn end(&mut self) {
        self.bar.take().iter().for_each(indicatif::ProgressBar::finish_and_clear);
    }
}

#[cfg(feature = "full")]
impl Drop for Shown {
    fn drop(&mut self) {
        self.end();
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        let text = error.to_string();
        match error {
            HubError::Unreachable(_) | HubError::Forbidden { .. } | HubError::NoSpace { .. } => {
                Self::missing(text)
            }
            HubError::Absent { .. }
            | HubError::Unsupported { .. }
            | HubError::Certificates { .. }
            | HubError::Io { .. } => Self::usage(text),
            HubError::Damaged { .. } => Self::integrity(text),
            HubError::Model(_) => Self::usage(text),
        }
    }
}
