//! The conditions of a measurement: machine and build.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// The machine and the build of a measurement. A field is `None` if the device did not report it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
pub struct Conditions {
    /// The card.
    pub card: String,
    /// Identifies the card among others of its name.
    pub uuid: Option<String>,
    /// Multiprocessors of the card.
    pub sms: Option<u32>,
    /// Highest clock of the multiprocessors, in MHz.
    pub max_sm_mhz: Option<u32>,
    /// Highest clock of the memory, in MHz.
    pub max_memory_mhz: Option<u32>,
    /// Number of other processes on the card when it was opened.
    pub other_processes: Option<u32>,
    /// Version of the kernel driver.
    pub driver: String,
    /// CUDA version that the driver supports.
    pub cuda: String,
    /// Version of the device compiler.
    pub nvrtc: String,
    /// Version of `amk`, with the commit if the build knew it.
    pub amk: String,
}

impl Serialize for Conditions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for Conditions {
    /// Older files have `notes`: texts for what are fields now.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Map::deserialize(deserializer)?;
        let notes = fields.remove("notes").map(Vec::<String>::deserialize).transpose();
        let mut found = Self::deserialize(Value::Object(fields)).map_err(D::Error::custom)?;
        let notes = notes.map_err(D::Error::custom)?.unwrap_or_default();
        notes.iter().for_each(|note| found.read_note(note));
        Ok(found)
    }
}

impl Conditions {
    /// Reads a note of an older file. The CUDA version is a field there too.
    fn read_note(&mut self, note: &str) {
        if let Some(uuid) = note.strip_prefix("uuid ") {
            self.uuid = Some(uuid.to_owned());
        } else if let Some(sms) = note.strip_suffix(" multiprocessors") {
            self.sms = sms.parse().ok();
        } else if let Some(clocks) = note.strip_prefix("clocks at most ")
            && let Some((sm, memory)) = clocks.split_once(" MHz, memory ")
        {
            self.max_sm_mhz = sm.parse().ok();
            self.max_memory_mhz = memory.strip_suffix(" MHz").and_then(|mhz| mhz.parse().ok());
        } else if let Some(others) = note.strip_prefix("other processes on the GPU: ") {
            let count = others.trim_end_matches(" (--shared-gpu)");
            self.other_processes = if count == "none seen" { Some(0) } else { count.parse().ok() };
        }
    }

    /// The highest clocks, as text for display.
    #[must_use]
    pub fn max_clocks(&self) -> Option<String> {
        let (sm, memory) = self.max_sm_mhz.zip(self.max_memory_mhz)?;
        Some(format!("at most {sm} MHz, memory {memory} MHz"))
    }

    /// The first difference that makes two measurements incomparable: the card (even one of the same name), the driver,
    /// or the compiler. The build of `amk` does not count: programs and kernels have ids.
    #[must_use]
    pub fn differs(&self, now: &Self) -> Option<String> {
        let uuid = |conditions: &Self| conditions.uuid.clone().unwrap_or("unknown".to_owned());
        let pairs = [
            ("card", self.card.clone(), now.card.clone()),
            ("card", uuid(self), uuid(now)),
            ("driver", self.driver.clone(), now.driver.clone()),
            ("CUDA version", self.cuda.clone(), now.cuda.clone()),
            ("compiler", self.nvrtc.clone(), now.nvrtc.clone()),
        ];
        let different = pairs.into_iter().find(|(_, then, now)| then != now);
        different.map(|(what, then, now)| format!("the {what} was {then} and is {now} here"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn old(notes: &[&str]) -> Conditions {
        let written = json!({
            "card": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0", "nvrtc": "13.0", "amk": "0.1.0", "notes": notes,
        });
        serde_json::from_value(written).unwrap()
    }

    #[test]
    fn notes_of_older_files_become_fields() {
        let found = old(&[
            "uuid b48b9072ea6ed480496cbd8b0a1f0d86",
            "driver CUDA 13.0",
            "132 multiprocessors",
            "other processes on the GPU: none seen",
            "clocks at most 1980 MHz, memory 3201 MHz",
        ]);
        assert_eq!(found.uuid.as_deref(), Some("b48b9072ea6ed480496cbd8b0a1f0d86"));
        assert_eq!((found.sms, found.other_processes), (Some(132), Some(0)));
        assert_eq!((found.max_sm_mhz, found.max_memory_mhz), (Some(1980), Some(3201)));
        assert_eq!(found.max_clocks().as_deref(), Some("at most 1980 MHz, memory 3201 MHz"));
        let shared = old(&["other processes on the GPU: 2 (--shared-gpu)"]);
        assert_eq!((shared.other_processes, shared.uuid), (Some(2), None));
        let unknown = old(&["other processes on the GPU: unknown (no NVML)", "of another version"]);
        assert_eq!(unknown.other_processes, None);
        // Written conditions have only fields, and are read back unchanged.
        let written = serde_json::to_value(&found).unwrap();
        assert_eq!((&written["sms"], written.get("notes")), (&json!(132), None));
        assert_eq!(serde_json::from_value::<Conditions>(written.clone()).unwrap(), found);
        let mut strange = written;
        strange["weather"] = json!("fair");
        assert!(serde_json::from_value::<Conditions>(strange).is_err());
    }

    /// Collects the conditions anywhere in a document.
    fn all_in(document: &Value, found: &mut Vec<Conditions>) {
        for (key, value) in document.as_object().into_iter().flatten() {
            if key == "conditions" && value.is_object() {
                found.push(serde_json::from_value(value.clone()).unwrap());
            }
            all_in(value, found);
        }
    }

    fn files_under(folder: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                files_under(&path, found);
            } else if path.extension().is_some_and(|kind| kind == "json" || kind == "jsonl") {
                found.push(path);
            }
        }
    }

    #[test]
    fn every_measurement_that_is_kept_here_says_its_card_and_clocks() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = Vec::new();
        for name in ["schedules", "grids"] {
            files_under(&root.join(name), &mut files);
        }
        let mut found = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            match serde_json::from_str(&text) {
                Ok(document) => all_in(&document, &mut found),
                Err(_) => text.lines().for_each(|line| {
                    all_in(&serde_json::from_str(line).unwrap(), &mut found);
                }),
            }
        }
        assert!(found.len() >= 12, "nine bundles and three grids: {}", found.len());
        for conditions in found {
            let known = conditions.uuid.as_ref().is_some_and(|uuid| uuid.len() == 32);
            assert!(known && conditions.sms == Some(132), "{conditions:?}");
            assert!(conditions.max_clocks().is_some(), "{conditions:?}");
            assert!(conditions.other_processes == Some(0), "{conditions:?}");
        }
    }
}
