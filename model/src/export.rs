//! Exports any model as a Hugging Face folder.

use std::borrow::Cow;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ir::{Graph, Scalar, Tensor, TensorId};
use serde_json::{Map, Value, json};

use crate::error::{ModelError, quoted};
use crate::model::{Model, Origin, import_dequantised};
use crate::quantise::Format;
use crate::random;
use crate::rope::{Rope, Scaling};
use crate::shape::{Family, Options, Shape, Window};
use crate::store::{INDEX, SINGLE};
use crate::{config, files, store};

/// Most bytes per file; a larger checkpoint is split.
pub(crate) const SHARD_BYTES: u64 = 5_000_000_000;
/// Families whose configurations are written.
const EXPORTED: [Family; 4] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3];
/// Files of an imported folder that are copied unchanged.
const COMPANIONS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// Writes the model to `dir` as `config.json`, `generation_config.json` and `model.safetensors` (shards and an index
/// above 5 GB). The tokenizer of an imported folder is copied.
///
/// The folder is written beside `dir` under another name and renamed when it is complete and on disk. Weights are
/// written tensor by tensor; random ones are generated one at a time and not kept.
///
/// # Errors
/// When `dir` exists and is not an empty folder, when the model fits no `config.json` and is no imported folder in f32,
/// f16 or bf16, or when the disk reports an error; nothing is left at `dir` then.
pub fn export(model: &Model, dir: &Path) -> Result<(), ModelError> {
    export_in_shards(model, dir, SHARD_BYTES)
}

pub(crate) fn export_in_shards(
    model: &Model,
    dir: &Path,
    shard_bytes: u64,
) -> Result<(), ModelError> {
    let stored = match &model.origin {
        Origin::Folder(path) | Origin::File(path) => has_codes(model).then_some(path),
        Origin::Random { .. } => None,
    };
    if let Some(path) = stored {
        return export_in_shards(&import_dequantised(path)?, dir, shard_bytes);
    }
    let plain = |model: &Model, config| {
        let tensors = (0..).map(TensorId).zip(&model.graph.tensors);
        let items: Vec<Item> = tensors.map(|(id, tensor)| Item::plain(id, tensor)).collect();
        write_folder(model, config, &items, dir, shard_bytes)
    };
    match (config(&model.shape), model.folder()) {
        (Ok(config), _) => plain(model, config),
        (Err(_), Some(folder)) => {
            let (stored, config) = as_stored(model, folder, dir)?;
            plain(&stored, config)
        }
        (Err(reason), None) => Err(ModelError::Target { path: dir.to_path_buf(), reason }),
    }
}

/// A model of a family whose configurations are not written here, with the tensors and the configuration of its folder:
/// those of the language model, as they are stored.
fn as_stored(
    model: &Model,
    folder: &Path,
    dir: &Path,
) -> Result<(Model, Map<String, Value>), ModelError> {
    let path = folder.join("config.json");
    let object = files::read_object(&path, files::SMALL_FILE_MAX)?.unwrap_or_default();
    let (mut config, _) = config::text_part(&object);
    config.insert("tie_word_embeddings".to_owned(), model.shape.tied.into());
    if config.get("quantization_config").is_some_and(|value| !value.is_null()) {
        let reason = format!(
            "a quantised {} cannot be written; export the folder of the 16-bit model",
            model.shape.family.model_type()
        );
        return Err(ModelError::Target { path: dir.to_path_buf(), reason });
    }
    let (graph, pieces) = model.shape.described();
    let names = graph.tensors.iter().zip(&pieces);
    let names = names.map(|(tensor, piece)| piece.as_ref().map_or(&tensor.name, |p| &p.name));
    let (tensors, weights) = store::as_stored(folder, &names.cloned().collect())?;
    let stored = Model {
        graph: Graph { tensors, ..graph },
        shape: model.shape.clone(),
        weights,
        origin: model.origin.clone(),
        notes: Vec::new(),
    };
    Ok((stored, config))
}

/// A tensor of a model, and the tensors that are written for it.
pub(crate) struct Item {
    pub(crate) source: TensorId,
    /// Its format if it is quantised while it is written.
    pub(crate) format: Option<Format>,
    pub(crate) stored: Vec<Stored>,
}

/// A tensor of a checkpoint that is written.
pub(crate) struct Stored {
    pub(crate) name: String,
    /// The name of its element type in a safetensors header.
    pub(crate) element: String,
    /// Bytes of an element.
    pub(crate) width: usize,
    pub(crate) shape: Vec<u32>,
}

impl Item {
    /// A tensor that is written as it is.
    pub(crate) fn plain(source: TensorId, tensor: &Tensor) -> Self {
        let stored = Stored {
            name: tensor.name.clone(),
            element: tensor.dtype.name().to_uppercase(),
            width: tensor.dtype.bytes(),
            shape: tensor.shape.clone(),
        };
        Self { source, format: None, stored: vec![stored] }
    }

    /// Bytes of what is written.
    pub(crate) fn bytes(&self) -> u64 {
        self.stored.iter().map(Stored::bytes).sum()
    }

    /// The bytes of each stored tensor.
    fn encode<'a>(&self, model: &'a Model) -> Result<Vec<Cow<'a, [u8]>>, ModelError> {
        let bytes = bytes(model, self.source);
        let Some(format) = self.format else { return Ok(vec![bytes]) };
        let tensor = model.graph.tensor(self.source);
        let parts = format.quantise(tensor, &bytes).map_err(|reason| ModelError::Source {
            name: model.graph.name.clone(),
            reason: format!("tensor {} {reason}", quoted(&tensor.name)),
        })?;
        Ok(parts.into_iter().map(Cow::Owned).collect())
    }
}

impl Stored {
    fn bytes(&self) -> u64 {
        self.shape.iter().map(|&side| u64::from(side)).product::<u64>() * self.width as u64
    }
}

/// The folder that is being written, under its temporary name.
static UNFINISHED: Mutex<Option<PathBuf>> = Mutex::new(None);

fn unfinished() -> MutexGuard<'static, Option<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the folder that is being written: for a process that ends now, by a signal. Its writer may still add files.
pub fn remove_unfinished() {
    let Some(folder) = unfinished().take() else { return };
    for _ in 0..8 {
        if std::fs::remove_dir_all(&folder).is_ok() {
            return;
        }
    }
}

/// Writes a folder: this `config.json`, and a checkpoint of these items.
pub(crate) fn write_folder(
    model: &Model,
    config: Map<String, Value>,
    items: &[Item],
    dir: &Path,
    shard_bytes: u64,
) -> Result<(), ModelError> {
    refuse_occupied(dir)?;
    let parent =
        dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|e| ModelError::io("create", parent, e))?;
    // The umask still applies to these permissions, as it does to any other new folder.
    let temporary = tempfile::Builder::new()
        .prefix(".export-")
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(parent)
        .map_err(|e| ModelError::io("create a folder in", parent, e))?;
    let inside = temporary.path();
    *unfinished() = Some(inside.to_path_buf());
    write_json(&inside.join("config.json"), &Value::Object(config))?;
    write_json(&inside.join("generation_config.json"), &generation_config(&model.shape))?;
    copy_companions(model, inside)?;
    write_weights(model, items, inside, shard_bytes)?;
    sync(inside)?;
    std::fs::rename(inside, dir).map_err(|e| {
        if e.kind() == io::ErrorKind::DirectoryNotEmpty {
            occupied(dir)
        } else {
            ModelError::io("rename the finished folder to", dir, e)
        }
    })?;
    // The folder has its final name, so there is nothing left to clean up.
    *unfinished() = None;
    let _ = temporary.keep();
    sync(parent)
}

/// Whether some matrices are of codes. A folder of them has no form here: its values are written.
fn has_codes(model: &Model) -> bool {
    model.graph.tensors.iter().any(|tensor| tensor.dtype.is_scaled())
}

fn occupied(dir: &Path) -> ModelError {
    let reason = "it exists and is not an empty folder; remove it or give another path".to_owned();
    ModelError::Target { path: dir.to_path_buf(), reason }
}

fn refuse_occupied(dir: &Path) -> Result<(), ModelError> {
    if dir.file_name().is_none() {
        let reason = "the path must end in the new folder's name".to_owned();
        return Err(ModelError::Target { path: dir.to_path_buf(), reason });
    }
    match std::fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() != io::ErrorKind::NotADirectory => {
            Err(ModelError::io("look into", dir, e))
        }
        Ok(false) | Err(_) => Err(occupied(dir)),
    }
}

fn sync(path: &Path) -> Result<(), ModelError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|e| ModelError::io("sync", path, e))
}

fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(format!("{value:#}\n").as_bytes())?;
        file.sync_all()
    };
    write().map_err(|e| ModelError::io("write", path, e))
}

fn copy_companions(model: &Model, inside: &Path) -> Result<(), ModelError> {
    let Some(source) = model.folder() else { return Ok(()) };
    for name in COMPANIONS {
        let (from, to) = (source.join(name), inside.join(name));
        if from.is_file() {
            std::fs::copy(&from, &to).map_err(|e| ModelError::io("copy", &from, e))?;
            sync(&to)?;
        }
    }
    Ok(())
}

/// `config.json`, in the spelling of transformers 5 with the fields of transformers 4 beside it.
pub(crate) fn config(shape: &Shape) -> Result<Map<String, Value>, String> {
    let dtype = match shape.dtype.scalar() {
        Scalar::F32 => "float32",
        Scalar::F16 => "float16",
        Scalar::Bf16 => "bfloat16",
        Scalar::E4m3 | Scalar::Int8 | Scalar::Int4 | Scalar::E2m1 => {
            return Err("codes are no type of a configuration".to_owned());
        }
    };
    if !EXPORTED.contains(&shape.family) || shape.options != Options::default() {
        return Err(format!(
            "a {} that is neither an imported folder nor of the options of llama, mistral, qwen2 or qwen3 cannot be written",
            shape.family.model_type()
        ));
    }
    let fields = json!({
        "architectures": [shape.family.architecture()],
        "model_type": shape.family.model_type(),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": decimal(shape.norm_eps),
        "tie_word_embeddings": shape.tied,
        "attention_dropout": 0.0,
        "bos_token_id": shape.bos,
        "eos_token_id": eos(&shape.eos),
        "rope_theta": shape.rope.theta,
        "rope_scaling": rope_scaling(shape.rope),
        "rope_parameters": rope_parameters(shape.rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": true,
    });
    let Value::Object(mut fields) = fields else {
        return Err("its configuration is no object".to_owned());
    };
    if matches!(shape.family, Family::Llama | Family::Qwen3) {
        fields.insert("attention_bias".to_owned(), json!(shape.attention_bias));
    }
    if shape.family == Family::Llama {
        fields.insert("mlp_bias".to_owned(), json!(shape.mlp_bias));
    }
    insert_window(&mut fields, shape)?;
    Ok(fields)
}

/// The shortest decimal that reads back as this single-precision number: 1e-5 rather than 9.999999747378752e-6.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn eos(ids: &[u32]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => json!(one),
        many => json!(many),
    }
}

fn rope_parameters(rope: Rope) -> Value {
    let theta = rope.theta;
    match rope.scaling {
        Scaling::Default => json!({ "rope_type": "default", "rope_theta": theta }),
        Scaling::Linear { factor } => {
            json!({ "rope_type": "linear", "rope_theta": theta, "factor": factor })
        }
        Scaling::Yarn { factor, original, fast, slow, truncate, amplitude } => json!({
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
            "truncate": truncate,
            "attention_factor": amplitude,
        }),
        Scaling::Llama3 { factor, low, high, original } => json!({
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }),
    }
}

fn rope_scaling(rope: Rope) -> Value {
    if rope.scaling == Scaling::Default {
        return Value::Null;
    }
    rope_parameters(rope)
}

fn insert_window(fields: &mut Map<String, Value>, shape: &Shape) -> Result<(), String> {
    let layers = shape.layers as usize;
    let sliding: Vec<bool> = (0..layers).map(|i| shape.window.of(i).is_some()).collect();
    let window = match shape.window {
        Window::None => None,
        Window::All(window) | Window::Layers { window, .. } => Some(window),
    };
    if shape.family == Family::Llama && window.is_some() {
        let reason = "a llama with a sliding window fits no config.json; use the mistral family";
        return Err(reason.to_owned());
    }
    if shape.family == Family::Mistral {
        if matches!(shape.window, Window::Layers { .. }) {
            return Err("a mistral's sliding window is in every layer or in none".to_owned());
        }
        fields.insert("sliding_window".to_owned(), json!(window));
    }
    if matches!(shape.family, Family::Qwen2 | Family::Qwen3) {
        let first = sliding.iter().position(|&s| s).unwrap_or(layers);
        let types = sliding.iter().map(|&s| if s { "sliding_attention" } else { "full_attention" });
        fields.insert("layer_types".to_owned(), types.collect());
        fields.insert("use_sliding_window".to_owned(), json!(window.is_some()));
        fields.insert("sliding_window".to_owned(), json!(window));
        fields.insert("max_window_layers".to_owned(), json!(first));
    }
    Ok(())
}

fn generation_config(shape: &Shape) -> Value {
    let mut fields = Map::new();
    if let Some(bos) = shape.bos {
        fields.insert("bos_token_id".to_owned(), json!(bos));
    }
    if !shape.eos.is_empty() {
        fields.insert("eos_token_id".to_owned(), eos(&shape.eos));
    }
    Value::Object(fields)
}

fn write_weights(
    model: &Model,
    items: &[Item],
    inside: &Path,
    shard_bytes: u64,
) -> Result<(), ModelError> {
    let mut shards: Vec<Vec<&Item>> = vec![Vec::new()];
    let mut filled = 0;
    for item in items {
        if filled > 0 && filled + item.bytes() > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += item.bytes();
        if let Some(shard) = shards.last_mut() {
            shard.push(item);
        }
    }
    if let [all] = &shards[..] {
        return write_shard(model, &inside.join(SINGLE), all);
    }
    let mut places = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        write_shard(model, &inside.join(&name), shard)?;
        let stored = shard.iter().flat_map(|item| &item.stored);
        places.extend(stored.map(|stored| (stored.name.clone(), json!(name))));
    }
    let total: u64 = items.iter().map(Item::bytes).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": places });
    write_json(&inside.join(INDEX), &index)
}

fn write_shard(model: &Model, path: &Path, items: &[&Item]) -> Result<(), ModelError> {
    let all = items.iter().enumerate().flat_map(|(i, item)| {
        item.stored.iter().enumerate().map(move |(part, stored)| (stored, (i, part)))
    });
    let mut all: Vec<_> = all.collect();
    // Wide elements first, so that every tensor is aligned to its own element.
    all.sort_by_key(|(stored, _)| std::cmp::Reverse(stored.width));
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut starts: Vec<Vec<u64>> = items.iter().map(|item| vec![0; item.stored.len()]).collect();
    let mut end = 0;
    for (stored, (i, part)) in all {
        let start = end;
        end += stored.bytes();
        let Stored { element, shape, .. } = stored;
        let info = json!({ "dtype": element, "shape": shape, "data_offsets": [start, end] });
        header.insert(stored.name.clone(), info);
        starts[i][part] = start;
    }
    let mut json = Value::Object(header).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let failed = |e| ModelError::io("write", path, e);
    let mut out = File::create(path).map_err(failed)?;
    let begin = [&(json.len() as u64).to_le_bytes(), &json[..]].concat();
    out.write_all(&begin).map_err(failed)?;
    for (item, starts) in items.iter().zip(&starts) {
        for (bytes, start) in item.encode(model)?.iter().zip(starts) {
            out.write_all_at(bytes, begin.len() as u64 + start).map_err(failed)?;
        }
    }
    out.sync_all().map_err(failed)
}

fn bytes(model: &Model, id: TensorId) -> Cow<'_, [u8]> {
    match model.origin {
        // Generated anew, so that a preset that is only exported is never in memory as a whole.
        Origin::Random { seed } => Cow::Owned(random::tensor(&model.graph, id, seed)),
        Origin::Folder(_) | Origin::File(_) => Cow::Borrowed(model.weights.bytes(id)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::import;
    use crate::preset::preset;

    #[test]
    fn shards_import_as_the_same_model() {
        let parent = tempfile::tempdir().expect("a folder");
        let toy = preset("toy-2l").expect("toy-2l");
        for (shard_bytes, files) in [(60_000, 4), (1, 21), (1 << 40, 1)] {
            let dir = parent.path().join(shard_bytes.to_string());
            export_in_shards(&toy, &dir, shard_bytes).expect("an export");
            let found = std::fs::read_dir(&dir).expect("a folder").filter(|entry| {
                let name = entry.as_ref().expect("an entry").file_name();
                name.to_string_lossy().ends_with(".safetensors")
            });
            assert_eq!(found.count(), files, "{shard_bytes}");
            let back = import(&dir).expect("an import");
            for i in 0..toy.graph.tensors.len() {
                let id = TensorId(i as u32);
                assert_eq!(back.weights.bytes(id), toy.weights.bytes(id));
            }
        }
    }
}
