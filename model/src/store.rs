//! The tensors of a model folder: mapped files, matched with the graph.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Component, Path, PathBuf};

use ir::{FileRange, Graph, TensorId, Weights};
use memmap2::Mmap;
use serde_json::Value;

use crate::error::{ModelError, Problem, quoted, shown};
use crate::files;
use crate::header::{self, Entry};

/// The file of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Most files of one checkpoint.
const SHARDS_MAX: usize = 4096;

/// Weights that stay in their files: mapped, read on access, never copied.
struct Mapped {
    files: Vec<(PathBuf, Mmap)>,
    /// By [`TensorId`].
    places: Vec<Place>,
}

#[derive(Clone, Copy)]
struct Place {
    file: usize,
    offset: u64,
    bytes: u64,
}

impl Weights for Mapped {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        let place = self.places[tensor.index()];
        let start = place.offset as usize;
        &self.files[place.file].1[start..start + place.bytes as usize]
    }

    fn file_range(&self, tensor: TensorId) -> Option<FileRange> {
        let place = self.places[tensor.index()];
        let path = self.files[place.file].0.clone();
        Some(FileRange { path, offset: place.offset, bytes: place.bytes })
    }
}

/// A stored tensor: its file, and its place in it.
struct Found {
    file: usize,
    entry: Entry,
}

/// Opens the folder's tensors, sets the graph's element types to the stored ones, and checks that the tensors match the
/// graph.
pub(crate) fn open(
    dir: &Path,
    graph: &mut Graph,
) -> Result<Box<dyn Weights + Send + Sync>, ModelError> {
    let (files, found) = if exists(&dir.join(SINGLE)) {
        open_single(dir)?
    } else if let Some(index) = files::read_object(&dir.join(INDEX), files::LARGE_FILE_MAX)? {
        open_shards(dir, &index)?
    } else {
        let reason = format!("it has neither {SINGLE} nor {INDEX}{}", other_format(dir));
        return Err(ModelError::NotAFolder { path: dir.to_path_buf(), reason });
    };
    let places = matched(found, graph)
        .map_err(|problems| ModelError::Tensors { path: dir.to_path_buf(), problems })?;
    Ok(Box::new(Mapped { files, places }))
}

/// The files of weights that a folder lacks: none if it can be imported, [`SINGLE`] if it has no weights at all.
///
/// # Errors
/// If its index cannot be read.
pub fn missing_weights(dir: &Path) -> Result<Vec<String>, ModelError> {
    if exists(&dir.join(SINGLE)) {
        return Ok(Vec::new());
    }
    let at = dir.join(INDEX);
    let Some(index) = files::read_object(&at, files::LARGE_FILE_MAX)? else {
        return Ok(vec![SINGLE.to_owned()]);
    };
    let shards = shards(&index).map_err(|reason| ModelError::file(&at, reason))?;
    let missing = shards.into_keys().filter(|name| !exists(&dir.join(name)));
    Ok(missing.map(str::to_owned).collect())
}

fn exists(path: &Path) -> bool {
    std::fs::exists(path).unwrap_or(false)
}

fn other_format(dir: &Path) -> &'static str {
    let older = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"];
    if older.iter().any(|name| exists(&dir.join(name))) {
        "; convert its pickled weights with transformers' save_pretrained"
    } else {
        ""
    }
}

type Opened = (Vec<(PathBuf, Mmap)>, HashMap<String, Found>);

fn open_single(dir: &Path) -> Result<Opened, ModelError> {
    let path = dir.join(SINGLE);
    let (map, entries) = open_file(&path)?;
    let found =
        entries.into_iter().map(|entry| (entry.name.clone(), Found { file: 0, entry })).collect();
    Ok((vec![(path, map)], found))
}

fn open_shards(dir: &Path, index: &serde_json::Map<String, Value>) -> Result<Opened, ModelError> {
    let at = dir.join(INDEX);
    let wrong = |reason: String| ModelError::file(&at, reason);
    let shards = shards(index).map_err(&wrong)?;
    let missing: Vec<_> = shards.keys().filter(|name| !exists(&dir.join(name))).copied().collect();
    if !missing.is_empty() {
        return Err(wrong(format!(
            "names {} of {} files that do not exist: {}; download them",
            missing.len(),
            shards.len(),
            missing.iter().take(20).map(|name| quoted(name)).collect::<Vec<_>>().join(", ")
        )));
    }
    let (mut files, mut found) = (Vec::new(), HashMap::new());
    for (name, mut promised) in shards {
        let path = dir.join(name);
        let (map, entries) = open_file(&path)?;
        for entry in entries {
            if !promised.remove(entry.name.as_str()) && !is_buffer(&entry.name) {
                return Err(wrong(format!(
                    "does not say that tensor {} is in {name}; the files are from different checkpoints",
                    quoted(&entry.name)
                )));
            }
            found.insert(entry.name.clone(), Found { file: files.len(), entry });
        }
        if let Some(absent) = promised.iter().min() {
            return Err(wrong(format!(
                "says that tensor {} is in {name}, but it is not",
                quoted(absent)
            )));
        }
        files.push((path, map));
    }
    Ok((files, found))
}

/// The files in an index, with the tensors that it lists for each.
fn shards(index: &serde_json::Map<String, Value>) -> Result<BTreeMap<&str, HashSet<&str>>, String> {
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err("has no \"weight_map\" object".to_owned());
    };
    let mut shards: BTreeMap<&str, HashSet<&str>> = BTreeMap::new();
    for (tensor, file) in map {
        let Some(name) = file.as_str().filter(|name| is_plain(name)) else {
            return Err(format!(
                "puts tensor {} in {}; supported: the plain name of a .safetensors file in this folder",
                quoted(tensor),
                shown(file)
            ));
        };
        shards.entry(name).or_default().insert(tensor);
    }
    if shards.is_empty() || shards.len() > SHARDS_MAX {
        return Err(format!("names {} files; supported: 1 to {SHARDS_MAX}", shards.len()));
    }
    Ok(shards)
}

/// Whether a shard's name is inside the folder.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let one = matches!(parts.next(), Some(Component::Normal(part)) if part.to_str() == Some(name));
    one && parts.next().is_none() && name.ends_with(".safetensors") && !name.contains(['\\', '\0'])
}

fn open_file(path: &Path) -> Result<(Mmap, Vec<Entry>), ModelError> {
    let missing = || ModelError::io("read", path, io::ErrorKind::NotFound.into());
    let file = files::open(path)?.ok_or_else(missing)?;
    // SAFETY: the mapping is read-only. Bytes that another process changes meanwhile give
    // wrong numbers, and a file that another process shortens gives SIGBUS; both hold for every mapped model, are stated
    // in the crate's documentation, and no length or offset is read from the mapping after `header::parse`.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io("map", path, e))?;
    let entries = header::parse(&map).map_err(|reason| ModelError::file(path, reason))?;
    Ok((map, entries))
}

/// Whether the tensor is a constant that old checkpoints contain and that we compute.
fn is_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// Finds every tensor of the graph, or lists everything that is missing, extra or of the wrong shape or type.
fn matched(
    mut found: HashMap<String, Found>,
    graph: &mut Graph,
) -> Result<Vec<Place>, Vec<Problem>> {
    let tied = graph.tied();
    let mut problems = Vec::new();
    let mut places = Vec::with_capacity(graph.tensors.len());
    let mut first_matrix = None;
    for tensor in &mut graph.tensors {
        let Some(Found { file, entry }) = found.remove(&tensor.name) else {
            let hint = if tensor.name == "lm_head.weight" {
                "is missing; if the embedding serves for it, config.json must say \"tie_word_embeddings\": true"
            } else {
                "is missing"
            };
            problems.push(Problem::new(&tensor.name, hint));
            continue;
        };
        if !entry.shape.iter().copied().eq(tensor.shape.iter().map(|&dim| u64::from(dim))) {
            let reason =
                format!("has shape {:?}; config.json asks for {:?}", entry.shape, tensor.shape);
            problems.push(Problem::new(&tensor.name, reason));
        }
        match entry.dtype {
            Ok(dtype) => tensor.dtype = dtype,
            Err(other) => {
                let reason =
                    format!("has element type {}; supported: F32, F16, BF16", quoted(&other));
                problems.push(Problem::new(&tensor.name, reason));
                continue;
            }
        }
        if tensor.shape.len() == 2 {
            let (name, dtype) =
                first_matrix.get_or_insert_with(|| (tensor.name.clone(), tensor.dtype));
            if *dtype != tensor.dtype {
                let (has, other) = (tensor.dtype.name(), dtype.name());
                let reason =
                    format!("is {has} but {name:?} is {other}; all matrices must share one type");
                problems.push(Problem::new(&tensor.name, reason));
            }
        }
        places.push(Place { file, offset: entry.offset, bytes: entry.bytes });
    }
    let mut extra: Vec<String> = found.into_keys().collect();
    extra.retain(|name| !(is_buffer(name) || (tied && name == "lm_head.weight")));
    extra.sort_unstable();
    let reason = "is not part of the model that config.json describes";
    problems.extend(extra.into_iter().map(|name| Problem::new(name, reason)));
    if let Some((_, dtype)) = first_matrix {
        graph.dtype = dtype;
    }
    if problems.is_empty() { Ok(places) } else { Err(problems) }
}
