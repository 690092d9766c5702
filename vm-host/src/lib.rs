//! Compiles, loads and drives the resident megakernel.
//!
//! **Promises.** No allocating or synchronising driver call is made while the kernel is resident: [`Idle`] owns everything that may
//! allocate or free, [`Resident`] can only copy on a stream of its own and touch mapped words, and each is made by consuming the
//! other. Every wait has a limit. On a machine without a driver every entry point returns an error that says so.
//!
//! ```compile_fail
//! fn launch_behind_a_running_kernel(resident: vm_host::Resident, program: &ir::program::Verified<ir::program::Program>) {
//!     // `launch` loads a module, so only an `Idle` machine has it.
//!     let _ = resident.launch(resident.variant(), program);
//! }
//! ```

#[cfg(test)]
mod attention_tests;
#[cfg(test)]
mod batch_products_tests;
mod boot;
mod card;
mod compile;
mod devices;
#[cfg(test)]
mod digits_tests;
mod driver;
#[cfg(test)]
#[path = "emulated_tests.rs"]
mod emulated;
mod error;
mod experts;
#[cfg(test)]
mod fragments_tests;
mod kernel_id;
mod links;
mod load;
#[cfg(test)]
mod looks_tests;
mod machine;
mod masks;
mod memory;
mod monitor;
mod nvml;
mod nvrtc;
mod pages;
mod prefill;
#[cfg(test)]
mod random_codes;
mod region;
mod ring;
#[cfg(test)]
mod route_tests;
mod sampling;
mod uring;
mod weight_stream;

pub use boot::{BootOptions, deadline};
pub use card::Card;
pub use compile::{
    Cubin, Resources, compile, compile_prefill, cuda_tool, default_cache, kernel_id, options, ptx,
    resources, variant,
};
pub use driver::DeviceInfo;
pub use error::{HostError, describe};
pub use links::{Link, links};
#[cfg(debug_assertions)]
pub use machine::faults;
pub use machine::{
    Batch, BatchDecoded, Decoded, Idle, Loaded, PROGRAMS_MAX, Request, Resident, SeqDecoded,
    Sequence, Start, TensorCheck, Watch, WeightStreamReport, Window, WindowDecoded, WindowsDecoded,
};
pub use monitor::Monitor;
pub use nvml::{
    compute_processes, driver_version, gpu_state, max_clocks, process_memory, visible_name,
};
pub use nvrtc::{nvrtc_file, nvrtc_version};
pub use pages::{KvPool, NoPages, Occupancy, PagePool, pages_of};
pub use prefill::{
    ChunkRoutes, GemmShape, KernelTime, LayersRan, PrefillOptions, Prefilled, compile_prompts,
    prefill_kernel_id, prefill_refused,
};
pub use ring::{Passed, RingTap};
pub use weight_stream::{LoadReport, ReadBy, Streaming};
