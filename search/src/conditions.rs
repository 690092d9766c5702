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
