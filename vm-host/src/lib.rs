//! Compiles, loads and drives the resident megakernel.
mod compile;
mod error;
pub use compile::{
    Cubin, Resources, compile, default_cache, kernel_id, nvrtc_version, options, resources,
};
pub use error::{HostError, describe};
