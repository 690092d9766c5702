//! The tensors of a model folder: mapped files, matched with the graph.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use ir::{DType, FileRange, Graph, Tensor, TensorId, Weights};
use memmap2::Mmap;
use serde_json::Value;

use crate::error::{ModelError, Problem, quoted, shown};
use crate::files;
use crate::header::{self, Entry};
use crate::pieces::{Change, Piece};
use crate::quantised::{self, Declared, Form, checkpoint};

/// The file of an unsharded checkpoint.
pub const SINGLE: &str = "model.safetensors";
/// The index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Most files of one checkpoint.
const SHARDS_MAX: usize = 4096;

/// Mapped files.
#[derive(Debug, Default)]
pub(crate) struct Files(Vec<(PathBuf, Mmap)>);

/// Bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Files {
    /// Maps one file.
    pub(crate) fn map(path: &Path) -> Result<Self, ModelError> {
        Ok(Self(vec![(path.to_path_buf(), map(path)?)]))
    }

    /// All bytes of a file.
    pub(crate) fn whole(&self, file: usize) -> &[u8] {
        &self.0[file].1
    }

    /// The bytes at a place, which has been compared with the file's size.
    pub(crate) fn slice(&self, place: Place) -> &[u8] {
        let start = place.offset as usize;
        &self.0[place.file].1[start..start + place.bytes as usize]
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, map)| map.len() as u64).sum()
    }

    /// The place as others read it.
    pub(crate) fn range(&self, place: Place) -> FileRange {
        let path = self.0[place.file].0.clone();
        FileRange { path, offset: place.offset, bytes: place.bytes }
    }
}

/// Weights that stay in their files: mapped, read on access, never copied.
struct Mapped {
    files: Files,
    /// By [`TensorId`].
    sources: Vec<Source>,
}

/// Where a tensor comes from.
pub(crate) struct Source {
    place: Place,
    made: Option<Made>,
}

impl Source {
    pub(crate) fn bytes<'a>(&'a self, files: &'a Files) -> &'a [u8] {
        let stored = files.slice(self.place);
        let Some(made) = &self.made else { return stored };
        made.bytes.get_or_init(|| made.change.apply(&made.tensor, made.dtype, stored))
    }

    pub(crate) fn file_range(&self, files: &Files) -> Option<FileRange> {
        self.made.is_none().then(|| files.range(self.place))
    }
}

/// A tensor that is made of a stored one when it is first read.
struct Made {
    tensor: Tensor,
    /// The type of the stored one.
    dtype: DType,
    change: Change,
    bytes: OnceLock<Vec<u8>>,
}

impl Weights for Mapped {
    fn bytes(&self, tensor: TensorId) -> &[u8] {
        self.sources[tensor.index()].bytes(&self.files)
    }

    fn file_range(&self, tensor: TensorId) -> Option<FileRange> {
        self.sources[tensor.index()].file_range(&self.files)
    }
}

/// A stored tensor: its file, and its place in it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) file: usize,
    pub(crate) entry: Entry,
}

impl Found {
    pub(crate) fn place(&self) -> Place {
        Place { file: self.file, offset: self.entry.offset, bytes: self.entry.bytes }
    }
}

/// The weights of a folder, and what the user should know about them.
pub(crate) type Opening = (Box<dyn Weights + Send + Sync>, Vec<String>);

/// The tensors of a folder's language model, under the names of a model of text.
pub(crate) struct Checkpoint {
    files: Files,
    found: HashMap<String, Found>,
    /// Tensors of the other parts of a multimodal model.
    ignored: usize,
}

impl Checkpoint {
    /// Maps the files of a folder.
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelError> {
        let (files, mut found) = open_checkpoint(dir)?;
        let ignored = language_model(&mut found);
        Ok(Self { files, found, ignored })
    }

    /// Whether `lm_head` has weights that are not those of the embedding.
    pub(crate) fn has_head(&self) -> bool {
        let [head, embed] = ["lm_head.weight", "model.embed_tokens.weight"]
            .map(|name| self.found.get(name).map(|found| self.files.slice(found.place())));
        head.is_some() && head != embed
    }
}

/// Sets the graph's element types to those of the weights, and checks that the folder's tensors match the graph and what
/// the configuration says about quantisation.
pub(crate) fn open(
    dir: &Path,
    checkpoint: Checkpoint,
    graph: &mut Graph,
    pieces: &[Option<Piece>],
    declared: Option<&Declared>,
    form: Form,
) -> Result<Opening, ModelError> {
    let Checkpoint { files, found, ignored } = checkpoint;
    let wrong = |problems| ModelError::Tensors { path: dir.to_path_buf(), problems };
    let mut notes = Vec::new();
    if ignored > 0 {
        notes.push(format!("{ignored} tensors are not of the language model and are ignored"));
    }
    if let Some(declared) = declared {
        let (weights, more) =
            quantised::open(files, found, graph, pieces, declared, form).map_err(wrong)?;
        return Ok((weights, more.into_iter().chain(notes).collect()));
    }
    if let Some(name) = checkpoint::sign(&found) {
        let reason = format!(
            "is missing, but tensor {} is of a quantised model; it must be in config.json, other files are not read for it",
            quoted(name)
        );
        return Err(wrong(vec![Problem::new("quantization_config", reason)]));
    }
    let sources = matched(found, graph, pieces).map_err(wrong)?;
    Ok((Box::new(Mapped { files, sources }), notes))
}

/// The tensors of a folder's language model with these names, as they are stored, in the order of their names.
pub(crate) fn as_stored(
    dir: &Path,
    names: &BTreeSet<String>,
) -> Result<(Vec<Tensor>, Box<dyn Weights + Send + Sync>), ModelError> {
    let Checkpoint { files, mut found, .. } = Checkpoint::open(dir)?;
    let (mut tensors, mut sources, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for name in names {
        let shape = found.get(name).map(|found| found.entry.shape.iter().map(|&side| side as u32));
        let shape = shape.map(Iterator::collect).unwrap_or_default();
        let mut tensor = Tensor { name: name.clone(), dtype: DType::F32, shape };
        let place = take(&mut tensor, &mut found, &mut problems);
        sources.extend(place.map(|place| Source { place, made: None }));
        tensors.push(tensor);
    }
    if problems.is_empty() {
        return Ok((tensors, Box::new(Mapped { files, sources })));
    }
    Err(ModelError::Tensors { path: dir.to_path_buf(), problems })
}

/// Maps the files of a folder's checkpoint.
fn open_checkpoint(dir: &Path) -> Result<Opened, ModelError> {
    if exists(&dir.join(SINGLE)) {
        open_single(dir)
    } else if let Some(index) = files::read_object(&dir.join(INDEX), files::LARGE_FILE_MAX)? {
        open_shards(dir, &index)
    } else {
        let reason = format!("it has neither {SINGLE} nor {INDEX}; {}", other_format(dir));
        Err(ModelError::NotAFolder { path: dir.to_path_buf(), reason })
    }
}

/// Names the tensors of a multimodal folder's language model as those of a model of text, and drops all others. Returns
/// the number of dropped ones: zero for a model of text.
fn language_model(found: &mut HashMap<String, Found>) -> usize {
    let prefixes = ["language_model.model.", "model.language_model.", "model.text_model."];
    let inside = |name: &str| {
        let rest = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix))?;
        Some(format!("model.{rest}"))
    };
    if !found.keys().any(|name| inside(name).is_some()) {
        return 0;
    }
    let all = std::mem::take(found);
    let before = all.len();
    found.extend(all.into_iter().filter_map(|(name, tensor)| {
        let head = name.strip_prefix("language_model.").unwrap_or(&name);
        let is_head = head == "lm_head.weight";
        inside(&name).or(is_head.then(|| head.to_owned())).map(|name| (name, tensor))
    }));
    before - found.len()
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
        "convert its pickled weights with transformers' save_pretrained"
    } else {
        "download its weights (propose, lower, trace and bench with --device cpu need none)"
    }
}

type Opened = (Files, HashMap<String, Found>);

pub(crate) fn open_single(dir: &Path) -> Result<Opened, ModelError> {
    let path = dir.join(SINGLE);
    let (map, entries) = open_file(&path)?;
    let found =
        entries.into_iter().map(|entry| (entry.name.clone(), Found { file: 0, entry })).collect();
    Ok((Files(vec![(path, map)]), found))
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
    Ok((Files(files), found))
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
    let map = map(path)?;
    let entries = header::parse(&map).map_err(|reason| ModelError::file(path, reason))?;
    Ok((map, entries))
}

fn map(path: &Path) -> Result<Mmap, ModelError> {
    let missing = || ModelError::io("read", path, io::ErrorKind::NotFound.into());
    let file = files::open(path)?.ok_or_else(missing)?;
    // SAFETY: the mapping is read-only. Bytes that another process changes meanwhile give
    // wrong numbers, and a file that another process shortens gives SIGBUS; both hold for every mapped model, are stated
    // in the crate's documentation, and no length or offset is read from the mapping after its header was parsed.
    unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io("map", path, e))
}

/// Whether the tensor is a constant that old checkpoints contain and that we compute.
fn is_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// Finds every tensor of the graph, or lists everything that is missing, extra or of the wrong shape or type.
fn matched(
    mut found: HashMap<String, Found>,
    graph: &mut Graph,
    pieces: &[Option<Piece>],
) -> Result<Vec<Source>, Vec<Problem>> {
    let tied = graph.tied();
    let mut problems = Vec::new();
    let mut sources = Vec::with_capacity(graph.tensors.len());
    let mut first_matrix = None;
    let mut cuts = Cuts::default();
    for (tensor, piece) in graph.tensors.iter_mut().zip(pieces) {
        let source = match piece {
            None => {
                take(tensor, &mut found, &mut problems).map(|place| Source { place, made: None })
            }
            Some(piece) => cuts.cut(tensor, piece, &mut found, &mut problems),
        };
        let Some(source) = source else { continue };
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
        sources.push(source);
    }
    problems.extend(extra(found, tied));
    if let Some((_, dtype)) = first_matrix {
        graph.dtype = graph.operand(dtype);
    }
    if problems.is_empty() { Ok(sources) } else { Err(problems) }
}

/// Stored tensors that several are pieces of.
#[derive(Default)]
pub(crate) struct Cuts<'a>(HashMap<&'a str, Option<Found>>);

impl<'a> Cuts<'a> {
    /// Finds a tensor that is a piece of a stored one, which is taken from `found` once.
    pub(crate) fn cut(
        &mut self,
        tensor: &mut Tensor,
        piece: &'a Piece,
        found: &mut HashMap<String, Found>,
        problems: &mut Vec<Problem>,
    ) -> Option<Source> {
        let stored = self.0.entry(&piece.name).or_insert_with(|| {
            let stored = found.remove(&piece.name);
            if stored.is_none() {
                problems.push(Problem::new(&piece.name, missing(&piece.name)));
            }
            stored
        });
        stored.as_ref().and_then(|stored| cut(tensor, piece, stored, problems))
    }
}

/// A tensor that is a piece of a stored one.
fn cut(
    tensor: &mut Tensor,
    piece: &Piece,
    stored: &Found,
    problems: &mut Vec<Problem>,
) -> Option<Source> {
    let shape = piece.stored_shape(tensor);
    let mut whole = Tensor { name: piece.name.clone(), shape, ..tensor.clone() };
    // Every piece of it has the same problems: the first reports them.
    let mut found = HashMap::from([(piece.name.clone(), stored.clone())]);
    let mut wrong = Vec::new();
    let place = take(&mut whole, &mut found, &mut wrong);
    let new = wrong.into_iter().filter(|p| problems.iter().all(|known| known.subject != p.subject));
    let new: Vec<Problem> = new.collect();
    let fits = place.is_some_and(|place| place.bytes == whole.bytes() as u64);
    problems.extend(new);
    let place = place.filter(|_| fits)?;
    let row = whole.bytes() as u64 / u64::from(piece.of.max(1));
    let (offset, bytes) = match piece.change {
        Change::Strided(_) => (0, place.bytes),
        Change::None | Change::Order(_) | Change::Affine { .. } => {
            (u64::from(piece.first) * row, u64::from(tensor.shape[0]) * row)
        }
    };
    let place = Place { offset: place.offset + offset, bytes, ..place };
    tensor.dtype = piece.change.dtype(whole.dtype);
    let (dtype, change) = (whole.dtype, piece.change.clone());
    let made = Made { tensor: tensor.clone(), dtype, change, bytes: OnceLock::new() };
    Some(Source { place, made: (piece.change != Change::None).then_some(made) })
}

/// Takes a tensor that is used as it is stored and sets its type to the stored one; `None` if it has none.
pub(crate) fn take(
    tensor: &mut Tensor,
    found: &mut HashMap<String, Found>,
    problems: &mut Vec<Problem>,
) -> Option<Place> {
    let Some(stored) = found.remove(&tensor.name) else {
        problems.push(Problem::new(&tensor.name, missing(&tensor.name)));
        return None;
    };
    let entry = &stored.entry;
    if !entry.shape.iter().copied().eq(tensor.shape.iter().map(|&dim| u64::from(dim))) {
        let reason =
            format!("has shape {:?}; config.json asks for {:?}", entry.shape, tensor.shape);
        problems.push(Problem::new(&tensor.name, reason));
    }
    let Some(dtype) = entry.dtype() else {
        let reason =
            format!("has element type {}; supported: F32, F16, BF16", quoted(&entry.element));
        problems.push(Problem::new(&tensor.name, reason));
        return None;
    };
    tensor.dtype = dtype;
    Some(stored.place())
}

/// The problem with a tensor that is not there.
pub(crate) fn missing(name: &str) -> &'static str {
    if name == "lm_head.weight" {
        "is missing; if the embedding serves for it, config.json must say \"tie_word_embeddings\": true"
    } else {
        "is missing"
    }
}

/// A problem for each tensor that no part of the graph is made of.
pub(crate) fn extra(found: HashMap<String, Found>, tied: bool) -> Vec<Problem> {
    let mut extra: Vec<String> = found.into_keys().collect();
    extra.retain(|name| !(is_buffer(name) || (tied && name == "lm_head.weight")));
    extra.sort_unstable();
    let reason = "is not part of the model that config.json describes";
    extra.into_iter().map(|name| Problem::new(name, reason)).collect()
}
