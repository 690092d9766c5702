//! Golden folders, and copies of them to break.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tempfile::TempDir;

/// The golden models.
pub(crate) const GOLDEN: [&str; 5] =
    ["llama-tied-f32", "llama3-rope-bf16", "mistral-f16", "qwen2-bias-bf16", "qwen3-qknorm-bf16"];

/// The folder of a golden model.
pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/golden").join(name)
}

/// The folder of a quantised golden model.
pub(crate) fn quantised(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/quantised").join(name)
}

/// The folder of a family's golden model.
pub(crate) fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/families").join(name)
}

/// A copy of a golden model that a test may change.
pub(crate) struct Copy(TempDir);

impl Copy {
    /// Copies the files of a golden model.
    pub(crate) fn of(name: &str) -> Self {
        Self::of_folder(&golden(name))
    }

    /// Copies the files of a model, without what the reference computed.
    pub(crate) fn of_folder(folder: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for entry in fs::read_dir(folder).expect("the golden folder") {
            let path = entry.expect("an entry").path();
            let file = path.file_name().expect("a name");
            if file != "golden.safetensors" && file != "dequant.safetensors" {
                fs::copy(&path, dir.path().join(file)).expect("a copy");
            }
        }
        Self(dir)
    }

    /// The folder.
    pub(crate) fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Reads a file of the copy.
    pub(crate) fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.dir().join(file)).expect("a file")
    }

    /// Writes a file of the copy.
    pub(crate) fn write(&self, file: &str, bytes: impl AsRef<[u8]>) -> &Self {
        fs::write(self.dir().join(file), bytes).expect("a written file");
        self
    }

    /// Removes a file of the copy.
    pub(crate) fn remove(&self, file: &str) -> &Self {
        fs::remove_file(self.dir().join(file)).expect("a removed file");
        self
    }

    /// Changes `config.json`.
    pub(crate) fn config(&self, change: impl FnOnce(&mut Map<String, Value>)) -> &Self {
        let mut value: Value = serde_json::from_slice(&self.read("config.json")).expect("JSON");
        change(value.as_object_mut().expect("an object"));
        self.write("config.json", value.to_string())
    }

    /// Sets fields of `config.json`.
    pub(crate) fn set(&self, fields: Value) -> &Self {
        self.config(|config| config.extend(fields.as_object().expect("an object").clone()))
    }

    /// The import's error message for the copy, without the folder's path.
    pub(crate) fn refusal(&self) -> String {
        let error = model::import(self.dir()).expect_err("a refusal").to_string();
        error.replace(&format!("{}", self.dir().display()), "DIR")
    }
}

/// A `.safetensors` file from its header and data.
pub(crate) fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// Splits a `.safetensors` file into its header and data.
pub(crate) fn split(file: &[u8]) -> (Map<String, Value>, Vec<u8>) {
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let header = serde_json::from_slice(&file[8..8 + length]).expect("a header");
    (header, file[8 + length..].to_vec())
}

/// A copy of a golden model whose tensors are in two shards, every other one in the second.
pub(crate) fn sharded(name: &str) -> Copy {
    let copy = Copy::of(name);
    let (header, data) = split(&copy.read("model.safetensors"));
    let mut shards = [(Map::new(), Vec::new()), (Map::new(), Vec::new())];
    let mut places = Map::new();
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    for (i, (name, info)) in tensors.enumerate() {
        // The final norm is always in the second, because tests name it.
        let which = if name == "model.norm.weight" { 1 } else { i % 2 };
        let (header, bytes) = &mut shards[which];
        let at = |i: usize| info["data_offsets"][i].as_u64().expect("an offset") as usize;
        let start = bytes.len();
        bytes.extend_from_slice(&data[at(0)..at(1)]);
        let mut info = info.clone();
        info["data_offsets"] = serde_json::json!([start, bytes.len()]);
        header.insert(name.clone(), info);
        places.insert(name.clone(), serde_json::json!(format!("model-{}.safetensors", which + 1)));
    }
    for (i, (header, bytes)) in shards.into_iter().enumerate() {
        let header = Value::Object(header).to_string();
        copy.write(&format!("model-{}.safetensors", i + 1), safetensors(&header, &bytes));
    }
    let index =
        serde_json::json!({ "metadata": { "total_size": data.len() }, "weight_map": places });
    copy.write("model.safetensors.index.json", index.to_string()).remove("model.safetensors");
    copy
}
