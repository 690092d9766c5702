//! Everything that can go wrong between this process and the device.

use std::time::Duration;

use abi::{Status, Trap};

/// A failure of the host side, the driver or the device.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// No CUDA driver library.
    #[error(
        "no CUDA driver (libcuda.so.1) on this machine: use --device cpu, or install the NVIDIA driver"
    )]
    NoDriver,
    /// No device.
    #[error("the CUDA driver is here but reports no device")]
    NoDevice,
    /// No device with this number.
    #[error(
        "there is no GPU {ordinal}: {count} are seen here, counted from 0 (CUDA_VISIBLE_DEVICES and the container say which)"
    )]
    NoSuchDevice {
        /// The number.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// Two GPUs of one step cannot reach each other's memory.
    #[error(
        "GPU {from} cannot access the memory of GPU {to} (nvidia-smi topo -p2p r): one step on several GPUs needs peer access between all of them; choose others with --gpus"
    )]
    NoPeerAccess {
        /// The one that reads.
        from: u32,
        /// The one whose memory it is.
        to: u32,
    },
    /// No NVRTC library.
    #[error(
        "NVRTC not found (looked in {0}): install the CUDA toolkit or point AMK_NVRTC at the folder of libnvrtc.so.13"
    )]
    NoNvrtc(String),
    /// The device is of an architecture that the kernel does not run on.
    #[error(
        "{name} has compute capability {major}.{minor}; there are kernels for {}",
        vm_device::Architecture::all()
    )]
    Architecture {
        /// Device name.
        name: String,
        /// Compute capability, major.
        major: i32,
        /// Compute capability, minor.
        minor: i32,
    },
    /// A driver call failed.
    #[error("{call} failed: {message}")]
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's message.
        message: String,
    },
    /// The kernel does not compile.
    #[error("the kernel does not compile: {0}")]
    Compile(String),
    /// The compiled kernel was built with another layout.
    #[error(
        "the compiled kernel was built from another header (hash {found:#x}, expected {expected:#x}): empty $AMK_CACHE, or mend $AMK_KERNEL_DIR"
    )]
    AbiMismatch {
        /// The hash that the kernel reports.
        found: u64,
        /// This build's.
        expected: u64,
    },
    /// The grid does not fit on the device at once, so its workers would wait for each other forever.
    #[error(
        "{requested} workers need {requested} resident blocks, but {possible} fit ({threads} threads, {shared} bytes of shared memory each): nothing was launched; lower for a target with at most {possible} multiprocessors (--target, or leave it out to take the GPU that is here)"
    )]
    NotCoResident {
        /// Blocks requested.
        requested: u32,
        /// Blocks that fit.
        possible: u32,
        /// Threads of a block.
        threads: u32,
        /// Shared memory of a block.
        shared: u32,
    },
    /// Device memory is too small.
    #[error(
        "the model needs {needed} bytes of device memory, {free} are free: nothing was allocated; end what else uses the GPU (nvidia-smi), or lower --kv-capacity"
    )]
    OutOfMemory {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A weight file cannot be read, or a matrix not be packed.
    #[error("{path}: {message}")]
    Weights {
        /// The file, or the matrix.
        path: String,
        /// What went wrong.
        message: String,
    },
    /// The request exceeds what the machine was booted for.
    #[error("{0}")]
    Request(String),
    /// The device stopped and reported the reason.
    #[error("the device stopped: {}", describe(.0))]
    Trapped(Box<Status>),
    /// The kernel died of an exception that the driver reports. The driver serves this process no more.
    #[error(
        "the kernel died in the middle of a command ({0}): run it again in a new process; if it dies there too, compute-sanitizer shows where"
    )]
    Died(String),
    /// The kernel is gone, without an answer or a trap.
    #[error("the kernel left without an answer: stop the machine and launch it again")]
    Left,
    /// The device did not answer in time and reported nothing.
    #[error("no answer from the device in {waited:?} (poller heartbeat {}): the process that holds it must be restarted", if *.alive { "alive" } else { "stopped" })]
    TimedOut {
        /// How long the wait was.
        waited: Duration,
        /// Whether the poller's heartbeat changed during the wait.
        alive: bool,
    },
}

/// The status block as text.
#[must_use]
pub fn describe(s: &Status) -> String {
    let trap = Trap::new(s.trap).map_or("unknown trap", Trap::name);
    format!(
        "{trap} (worker {}, task {}, opcode {}, object {}, have {}, need {}, epoch {}, waited {} us)",
        s.worker,
        s.task,
        s.opcode,
        s.object,
        s.have,
        s.need,
        s.epoch,
        s.waited_ns / 1000
    )
}
