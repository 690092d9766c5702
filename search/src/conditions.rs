//! Where a measurement was made.

use serde::{Deserialize, Serialize};

/// What a reader of a measured number needs to know about the machine and the build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conditions {
    /// The card.
    pub card: String,
    /// Version of the kernel driver.
    pub driver: String,
    /// Version of CUDA that the driver speaks.
    pub cuda: String,
    /// Version of the device compiler.
    pub nvrtc: String,
    /// Version of `amk`, with the commit if the build was told it (`AMK_COMMIT`).
    pub amk: String,
    /// What else the device says of itself.
    pub notes: Vec<String>,
}

impl Conditions {
    /// What tells the card from others of its name, if it said so.
    #[must_use]
    pub fn uuid(&self) -> Option<&str> {
        self.notes.iter().find_map(|note| note.strip_prefix("uuid "))
    }

    /// The first thing in which another measurement's conditions are so different that the two cannot stand beside each other: the card,
    /// one of the same name included, the driver, or the compiler. The build of `amk` is not: programs and kernels have ids.
    #[must_use]
    pub fn differs(&self, now: &Self) -> Option<String> {
        let uuid = |conditions: &Self| conditions.uuid().unwrap_or("unknown").to_owned();
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
