//! Typed indices: a buffer index cannot be used as a counter index.

use serde::{Deserialize, Serialize};

macro_rules! define_id {
    ($($(#[$doc:meta])* $name:ident($letter:literal);)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as a `usize`.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    )+};
}

define_id! {
    /// A stored tensor of a graph.
    TensorId("%");
    /// A packed matrix that a program streams.
    MatrixId("m");
    /// A buffer that tasks name by index.
    BufferId("b");
    /// A monotone counter in device memory.
    CounterId("c");
    /// A persistent thread block.
    WorkerId("w");
}
