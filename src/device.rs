//! The GPU behind `search::Device`: the only place where the command line meets the driver.

use ir::Target;
use search::Device;

use crate::context::Context;
use crate::failure::Failure;

/// Opens the GPU for a model. The error says what is missing (exit code 3).
pub(crate) fn open_device(_context: &Context) -> Result<Box<dyn Device + '_>, Failure> {
    Err(Failure::missing(
        "capability missing: no CUDA device can be driven here (libcuda.so and NVRTC are needed); \
         use --device cpu for predictions, or see `amk doctor`",
    ))
}

/// The live GPU as a target, if there is one.
pub(crate) fn live_target() -> Option<Target> {
    None
}

/// One thing that driving a GPU needs.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    pub(crate) found: String,
    pub(crate) remedy: Option<String>,
}

/// What driving a GPU needs, and whether it is here.
pub(crate) fn checks() -> Vec<Check> {
    let nvrtc = vm_host::nvrtc_version();
    vec![
        Check {
            name: "driver",
            ok: false,
            found: "not looked for by this version".into(),
            remedy: Some("install the NVIDIA driver; in a container, run with --gpus all".into()),
        },
        Check {
            name: "nvrtc",
            ok: nvrtc.is_ok(),
            found: match &nvrtc {
                Ok((major, minor)) => format!("{major}.{minor}"),
                Err(error) => error.to_string(),
            },
            remedy: Some("install the CUDA toolkit, or: pip install nvidia-cuda-nvrtc".into()),
        },
        Check {
            name: "gpu",
            ok: false,
            found: "none".into(),
            remedy: Some("run where an NVIDIA GPU is visible (nvidia-smi lists it)".into()),
        },
    ]
}
