//! Element types of key/value caches.

use abi::BufferKind;
use serde::{Deserialize, Serialize};

/// Element type of the keys and values of a graph, and with it the layout of a row: the key or the value of a head at one position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvDtype {
    /// 16 bits.
    #[default]
    F16,
    /// Eight bits, with a scale per row. The scale is a power of two, so that every kept value is an f16.
    E4m3,
}

impl KvDtype {
    /// Every type.
    pub const ALL: [Self; 2] = [Self::F16, Self::E4m3];

    /// Its name on the command line and in documents.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::E4m3 => "e4m3",
        }
    }

    /// Bytes of a row on the device.
    #[must_use]
    pub fn row_bytes(self, head_dim: u32) -> u32 {
        match self {
            Self::F16 => head_dim * abi::KV_ELEMENT_BYTES as u32,
            Self::E4m3 => head_dim + abi::KV_SCALE_BYTES,
        }
    }

    /// The kind of a cache's buffer.
    #[must_use]
    pub fn buffer_kind(self) -> BufferKind {
        match self {
            Self::F16 => BufferKind::KvCache,
            Self::E4m3 => BufferKind::KvCacheE4m3,
        }
    }

    /// The type of a cache of this kind; `None` of any other buffer.
    #[must_use]
    pub fn of_buffer(kind: BufferKind) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.buffer_kind() == kind)
    }
}
