//! Models of the Hugging Face Hub by name: found in the Hub's local cache, or downloaded into it.
//!
//! **Promises.**
//!
//! - The cache has the layout of Hugging Face's own clients (`models--ORG--NAME/{refs,snapshots,blobs}`): what one of them
//!   downloaded is found here, and the other way round.
//! - A blob appears under its name only after its length, and its SHA-256 where the Hub names one, were found right. What
//!   was interrupted goes on where it stopped.
//! - Two processes that download the same file take turns: the lock of a blob is that of Hugging Face's clients.
//! - Every wait has a limit: a connection, an answer, a stretch without a byte, a lock whose holder makes no progress.
//! - Names from the network never leave the cache's folder: what is not a plain name is refused.

mod cache;
#[cfg(feature = "client")]
mod download;
mod error;
#[cfg(feature = "client")]
mod http;
mod id;
mod settings;

pub use cache::Snapshot;
pub use error::HubError;
pub use id::ModelId;
pub use settings::{Hub, Limits};

/// How far a download is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A file begins, or goes on after `have` of its bytes.
    File {
        /// Its name.
        name: String,
        /// Bytes that are here already.
        have: u64,
        /// Its length.
        bytes: u64,
    },
    /// This many more bytes arrived.
    Bytes(u64),
    /// An attempt failed and is repeated.
    Again(String),
    /// Another process downloads this file.
    Waiting(String),
}
