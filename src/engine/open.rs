//! Opening an engine for several sequences: on the GPU, on the reference VM or on the graph.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use remote::Served;
use vm_host::KvPool;

use super::{Engine, KernelTable, Megakernel, SharedPages, graph, reference_of};
use crate::cli::PrefillChoice;
use crate::context::Context;
use crate::device::Gpu;
use crate::failure::Failure;

/// A program with its schedule, for commands of this many sequences.
#[derive(Clone, Copy)]
pub(crate) struct Built<'p> {
    pub(crate) program: &'p Arc<Verified<Program>>,
    pub(crate) config: &'p ScheduleConfig,
    pub(crate) seqs: u32,
}

/// What an engine runs: without them, the graph.
pub(crate) struct Kernels<'p> {
    pub(crate) batch: Built<'p>,
    /// For a lone sequence, if kernels are switched by load.
    pub(crate) lone: Option<Built<'p>>,
    /// The programs that a server may be switched to, by number.
    pub(crate) table: Option<&'p KernelTable>,
}

/// What an engine is opened for.
pub(crate) struct Opening {
    pub(crate) places: usize,
    pub(crate) kv_pool: KvPool,
    pub(crate) prefill: PrefillChoice,
    /// Whether sequences with equal beginnings share pages.
    pub(crate) shares: bool,
    /// Whether a GPU's kernels have masks, with which they sample under a grammar.
    pub(crate) masks: bool,
}

/// Loads the model.
pub(crate) fn open<'a>(
    context: &'a Context,
    gpu: Option<Gpu<'a>>,
    kernels: Option<Kernels<'a>>,
    opening: &Opening,
) -> Result<Box<dyn Engine + 'a>, Failure> {
    let Opening { places, kv_pool, prefill, shares, masks } = *opening;
    let layers = context.graph().layers.len();
    let shared = || shares.then(|| SharedPages::new(places, context.kv_capacity, layers));
    Ok(match (gpu, kernels) {
        (Some(mut gpu), Some(Kernels { batch, lone, .. })) => {
            gpu.set_prefill(prefill)?;
            gpu.set_masks(masks);
            gpu.set_seqs(1);
            let lone = lone.map(|lone| gpu.prepare(lone.program, &lone.config.kernel));
            let lone = lone.transpose()?;
            // Last, and booted: the memory is for the wider kernel.
            gpu.set_seqs(batch.seqs);
            let handle = gpu.prepare(batch.program, &batch.config.kernel)?;
            gpu.serve(handle, places as u32, kv_pool)?;
            // Weights that stream come meanwhile, and requests are taken at once.
            if !gpu.streams_weights() {
                gpu.await_prompt_kernels();
            }
            let engine = Megakernel::new(gpu, handle, places).switching(lone);
            Box::new(if shares { engine.sharing() } else { engine })
        }
        (_, Some(Kernels { batch, table, .. })) => {
            let of = move |number| table.and_then(|table| table.program(number));
            let programs = move |number| of(number).unwrap_or(batch.program);
            Box::new(reference_of(context, programs, shared()))
        }
        (_, None) => Box::new(graph(context, shared())),
    })
}
