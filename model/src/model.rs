//! A graph with its weights, and its constructors.

use std::path::{Path, PathBuf};

use ir::{DType, Graph, Weights};
use serde_json::{Map, Value};

use crate::error::{ModelError, Problem};
use crate::preset::{PRESETS, preset};
use crate::quantised::{Declared, Form};
use crate::random::Random;
use crate::shape::Shape;
use crate::store::Checkpoint;
use crate::tokenizer::Tokenizer;
use crate::{config, files, gguf, store};

/// Least similarity at which a preset's name is suggested.
const NEAR: f64 = 0.6;

/// A model that can be run: its graph and its weights.
pub struct Model {
    /// The graph.
    pub graph: Graph,
    /// The dimensions that the graph was built from.
    pub shape: Shape,
    /// The weights of the graph's tensors.
    pub weights: Box<dyn Weights + Send + Sync>,
    /// The source of the weights.
    pub origin: Origin,
    /// What the user should know about the import, a sentence or two each.
    pub notes: Vec<String>,
}

/// The source of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A Hugging Face folder.
    Folder(PathBuf),
    /// A GGUF file.
    File(PathBuf),
    /// A seed: [`Model::random`].
    Random {
        /// The seed.
        seed: u64,
    },
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("shape", &self.shape)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// A model of this shape with random weights, each tensor generated when it is first read.
    ///
    /// Matrices are bell-shaped with standard deviation `cols ** -0.5`, an untied embedding with 1, biases with 0.1;
    /// norms are uniform from 0.5 to 1.5. An element depends on the seed, its tensor's name and its index, and on
    /// nothing else.
    #[must_use]
    pub fn random(shape: Shape, seed: u64) -> Self {
        let graph = shape.graph();
        let weights = Box::new(Random::new(&graph, seed));
        Self { graph, shape, weights, origin: Origin::Random { seed }, notes: Vec::new() }
    }

    /// Makes room for sequences of `positions`, as [`Shape::reach`] does.
    pub fn reach(&mut self, positions: u32) {
        if self.shape.reach(positions) {
            let longer = self.shape.graph();
            (self.graph.inv_freq, self.graph.rotary) = (longer.inv_freq, longer.rotary);
            self.graph.max_positions = longer.max_positions;
        }
    }

    /// The folder that the model was imported from.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        match &self.origin {
            Origin::Folder(path) => Some(path),
            Origin::File(_) | Origin::Random { .. } => None,
        }
    }

    /// The model's tokenizer; `None` for a preset, for a folder without `tokenizer.json`, and for a GGUF file without a
    /// tokenizer or with one that is not read, which [`Model::notes`] say.
    ///
    /// # Errors
    /// As [`Tokenizer::load`]; of a GGUF file also when its tokens, merges or scores contradict each other.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, ModelError> {
        match &self.origin {
            Origin::Folder(dir) if Tokenizer::exists(dir) => {
                Tokenizer::load(dir, self.graph.vocab).map(Some)
            }
            Origin::File(path) => gguf::tokenizer(path, self.graph.vocab),
            Origin::Folder(_) | Origin::Random { .. } => Ok(None),
        }
    }
}

/// Imports a Hugging Face folder, `config.json` with `model.safetensors` or its shards, or a GGUF file.
///
/// Quantised matrices are given as they are stored where the kernel takes them so; else they are dequantised to f32, each
/// when it is first read. [`Model::notes`] say which.
///
/// The weights stay in their files. While the model lives, the files must not be changed or shortened.
///
/// # Errors
/// When the folder, its configuration or its tensors are not those of a supported model; the error has every problem of
/// the first bad file.
pub fn import(dir: &Path) -> Result<Model, ModelError> {
    import_as(dir, Form::Streamed)
}

/// Imports a folder or file with every quantised matrix dequantised to f32, each when it is first read.
///
/// # Errors
/// As [`import`].
pub fn import_dequantised(dir: &Path) -> Result<Model, ModelError> {
    import_as(dir, Form::Dequantised)
}

fn import_as(dir: &Path, form: Form) -> Result<Model, ModelError> {
    let not_a_folder = |reason: &str| ModelError::NotAFolder {
        path: dir.to_path_buf(),
        reason: reason.to_owned(),
    };
    let kind = std::fs::metadata(dir).map_err(|e| ModelError::io("open", dir, e))?;
    if !kind.is_dir() && is_gguf(dir) {
        return gguf::import(dir, form);
    }
    if !kind.is_dir() {
        return Err(not_a_folder(
            "it is a file; give the folder that holds config.json and the weights (propose, lower, trace and bench with --device cpu take a config.json alone)",
        ));
    }
    let path = dir.join("config.json");
    let Some(object) = files::read_object(&path, files::SMALL_FILE_MAX)? else {
        return Err(not_a_folder(&no_config(dir)));
    };
    let (mut shape, declared) = described(&path, &object)?;
    let checkpoint = Checkpoint::open(dir)?;
    if shape.tied && checkpoint.has_head() {
        // As transformers 5 does. Version 4 ignores it, but no version has trained such a matrix with the flag.
        shape.tied = false;
        let note = "lm_head.weight is used: it differs from model.embed_tokens.weight, although tie_word_embeddings is true";
        shape.options.notes.push(note.to_owned());
    }
    let (mut graph, pieces) = shape.described();
    let declared = declared.as_ref();
    let (weights, mut notes) = store::open(dir, checkpoint, &mut graph, &pieces, declared, form)?;
    notes.extend(shape.options.notes.iter().cloned());
    if let Some(refused) = graph.heads_refused() {
        notes.push(format!("no kernel: {refused}"));
    }
    shape.dtype = graph.tensor(graph.embed).dtype;
    Ok(Model { graph, shape, weights, origin: Origin::Folder(dir.to_path_buf()), notes })
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// What a folder without a `config.json` may be instead, and what to give.
fn no_config(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut inside: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    inside.sort();
    let deeper = inside.iter().find(|path| path.join("config.json").is_file());
    let remedy = if dir.join("adapter_config.json").is_file() {
        "it is a LoRA adapter, which is not run by itself: merge it into its model (merge_and_unload of peft, then save_pretrained) and give that folder".to_owned()
    } else if inside.iter().any(|path| is_gguf(path)) {
        "of a GGUF model, give the .gguf file".to_owned()
    } else if dir.join("snapshots").is_dir() {
        "it is a folder of the Hub's cache: give the model's name (ORG/NAME), or a folder in its snapshots".to_owned()
    } else if let Some(deeper) = deeper {
        format!("{} has one: give that", deeper.display())
    } else {
        "give the folder that holds config.json, *.safetensors and tokenizer.json, or the name of a model of the Hugging Face Hub (ORG/NAME)".to_owned()
    };
    format!("it has no config.json; {remedy}")
}

/// The shape, and what the configuration says about quantisation; or the problems of both.
fn configured(
    object: &Map<String, Value>,
    dir: &Path,
) -> Result<(Shape, Option<Declared>), Vec<Problem>> {
    let (text, _) = config::text_part(object);
    match (config::parse(object, &folder_name(dir)), Declared::parse(&text)) {
        (Ok(shape), Ok(declared)) => Ok((shape, declared)),
        (shape, declared) => Err(shape.err().into_iter().chain(declared.err()).flatten().collect()),
    }
}

/// The shape that a `config.json`, or that of a folder, describes, with the element type that it names, and whether its
/// weights are quantised: then they run as f32. No weights are needed.
///
/// # Errors
/// As [`import`], for the configuration.
pub fn import_shape(path: &Path) -> Result<(Shape, bool), ModelError> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
    let Some(object) = files::read_object(&file, files::SMALL_FILE_MAX)? else {
        return Err(ModelError::NotAFolder { path: path.to_path_buf(), reason: no_config(path) });
    };
    let (mut shape, declared) = described(&file, &object)?;
    if declared.is_some() {
        shape.dtype = DType::F32;
    }
    Ok((shape, declared.is_some()))
}

/// The model that a configuration describes, named like its folder, and what it says about quantisation.
fn described(
    path: &Path,
    object: &Map<String, Value>,
) -> Result<(Shape, Option<Declared>), ModelError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let (mut shape, declared) = configured(object, dir)
        .map_err(|problems| ModelError::Config { path: path.to_path_buf(), problems })?;
    add_generation_eos(dir, &mut shape)?;
    Ok((shape, declared))
}

/// A preset by name, or else a folder by path. A folder with the name of a preset is reached by `./name`.
///
/// # Errors
/// As [`import`]; and when the text names neither, an error with all presets and the most similar one.
pub fn load(name_or_path: &str) -> Result<Model, ModelError> {
    if let Some(model) = preset(name_or_path) {
        return Ok(model);
    }
    let path = Path::new(name_or_path);
    // An empty path would give an error without a name.
    if !name_or_path.is_empty() && std::fs::exists(path).unwrap_or(false) {
        return import(path);
    }
    let likeness =
        |name: &str| strsim::normalized_damerau_levenshtein(name, &name_or_path.to_lowercase());
    let presets: Vec<_> = PRESETS.iter().map(|preset| preset.name).collect();
    let nearest = presets.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    Err(ModelError::Unknown {
        name: name_or_path.to_owned(),
        nearest: nearest.filter(|name| likeness(name) >= NEAR).map(|&name| name.to_owned()),
        presets,
    })
}

/// Merges the end ids of both files, each once, in order of first mention.
fn add_generation_eos(dir: &Path, shape: &mut Shape) -> Result<(), ModelError> {
    let path = dir.join("generation_config.json");
    let object = files::read_object(&path, files::SMALL_FILE_MAX)?.unwrap_or_default();
    let more = config::generation_eos(&object, shape.vocab)
        .map_err(|problems| ModelError::Config { path, problems })?;
    for id in std::mem::take(&mut shape.eos).into_iter().chain(more) {
        if !shape.eos.contains(&id) {
            shape.eos.push(id);
        }
    }
    Ok(())
}

/// The folder's own name, even if the path ends in `.` or `..`. A snapshot in the cache of the Hugging Face Hub,
/// `models--ORG--NAME/snapshots/COMMIT`, is named like its model.
fn folder_name(dir: &Path) -> String {
    let full = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let model = full.parent().filter(|parent| parent.ends_with("snapshots")).and_then(Path::parent);
    let cached = model.and_then(Path::file_name).and_then(|name| name.to_str());
    if let Some((_, name)) =
        cached.and_then(|name| name.strip_prefix("models--")).and_then(|name| name.split_once("--"))
    {
        return name.to_owned();
    }
    full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}
