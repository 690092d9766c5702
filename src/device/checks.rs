//! What driving a GPU needs, for `amk doctor`.

use vm_host::HostError;

/// One thing that driving a GPU needs.
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) ok: bool,
    pub(crate) found: String,
    pub(crate) remedy: Option<String>,
}

/// What driving a GPU needs, and whether it is here.
pub(crate) fn checks() -> Vec<Check> {
    let device = vm_host::device_info();
    let nvrtc = vm_host::nvrtc_version();
    let driver = match &device {
        Ok(info) => (true, format!("CUDA {}.{}", info.driver / 1000, info.driver % 1000 / 10)),
        Err(HostError::NoDevice) => (true, "here, and it reports no device".to_owned()),
        Err(error) => (false, error.to_string()),
    };
    let gpu = match &device {
        Ok(info) => (
            info.capability.0 == 9,
            format!(
                "{}, compute capability {}.{}, {} multiprocessors, {:.0} GiB ({:.0} free)",
                info.name,
                info.capability.0,
                info.capability.1,
                info.sms,
                info.memory_bytes as f64 / (1 << 30) as f64,
                info.free_bytes as f64 / (1 << 30) as f64
            ),
        ),
        Err(_) => (false, "none".to_owned()),
    };
    let nvrtc = match &nvrtc {
        Ok((major, minor)) => (true, format!("{major}.{minor}")),
        Err(error) => (false, error.to_string()),
    };
    let check = |name, (ok, found), remedy: &str| Check {
        name,
        ok,
        found,
        remedy: Some(remedy.to_owned()),
    };
    vec![
        check(
            "driver",
            driver,
            "install the NVIDIA driver; in a container, run it with --gpus all",
        ),
        check("nvrtc", nvrtc, "install the CUDA toolkit, or: pip install nvidia-cuda-nvrtc"),
        check("gpu", gpu, "run where nvidia-smi lists a GPU of compute capability 9.0 (Hopper)"),
    ]
}
