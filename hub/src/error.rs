//! Errors of this crate; each says what, where and what to do.

use std::io;
#[cfg(feature = "client")]
use std::path::Path;
use std::path::PathBuf;

#[cfg(feature = "client")]
use crate::{id::ModelId, settings::Hub};

/// Why a model of the Hub is not here.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The network may not or cannot be used, and the cache does not have the model.
    #[error("{0}")]
    Unreachable(String),
    /// Access was refused.
    #[error("the Hub does not let you read {id}: {why}")]
    Forbidden {
        /// The model.
        id: String,
        /// What to do about it.
        why: String,
    },
    /// There is no such model or revision.
    #[error("there is no folder {id} here, and {why}")]
    Absent {
        /// The model.
        id: String,
        /// What the Hub says.
        why: String,
    },
    /// The model is not of a kind that can be run; nothing large was downloaded.
    #[error("{id} cannot be run, so its weights were not downloaded: {why}")]
    Unsupported {
        /// The model.
        id: String,
        /// What is not supported.
        why: String,
    },
    /// What arrived is not what the Hub announced.
    #[error("{file} of {id} is damaged: {why}; it was removed, run the command again")]
    Damaged {
        /// The model.
        id: String,
        /// The file.
        file: String,
        /// The difference.
        why: String,
    },
    /// The disk is too small.
    #[error(
        "{id} needs {needed} more bytes and {} has {free} free: make room, or name another folder in HF_HUB_CACHE",
        cache.display()
    )]
    NoSpace {
        /// The model.
        id: String,
        /// The cache.
        cache: PathBuf,
        /// Bytes of what is missing.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The certificates to trust cannot be read.
    #[error("SSL_CERT_FILE {}: {why}; name a PEM file with the certificates to trust", path.display())]
    Certificates {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A file of the cache cannot be read or written.
    #[error("cannot {action} {}: {source}; HF_HUB_CACHE names another folder", path.display())]
    Io {
        /// `create`, `write` and so on.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A file of the model is invalid.
    #[error(transparent)]
    Model(#[from] model::ModelError),
}

#[cfg(feature = "client")]
impl HubError {
    pub(crate) fn unreachable(hub: &Hub, id: &ModelId, why: impl Into<String>) -> Self {
        let (command, why) = (id.command(), why.into());
        Self::Unreachable(format!(
            "{id} is no folder here and not in the cache {}, and {why}: run `{command}` where there is a network and copy its cache folder {} to \
             there, or `{command} --local-dir {}` and give that folder as --model",
            hub.cache.display(),
            id.folder(),
            id.name()
        ))
    }

    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }
}
