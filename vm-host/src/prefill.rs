//! Prompts in chunks: matrix products over many tokens by ordinary kernels, while no kernel is resident.
//!
//! The kernels read the same packed weights, constants and rotary table as the resident kernel, and append keys and values to the same caches
//! in the same form, so a later decode continues from there. After the last layer's keys and values, only the tile of tokens whose logits are
//! requested is computed. Decision 019. Several devices share a chunk ([`share`]).

use std::time::{Duration, Instant};

use abi::{ATTEND_TOKENS, Feature};
use ir::program::PackedModel;
use ir::{DType, Graph};
use vm_device::PrefillVariant;

use crate::card::arch;
use crate::compile::{self, compile_prefill, default_cache};
use crate::devices::Cards;
use crate::driver::{DeviceInfo, Event, Stream};
use crate::error::HostError;
use crate::load::Residents;
use crate::memory::Copier;

mod cached;
#[cfg(test)]
mod expert_tests;
mod experts;
mod kernels;
mod layers;
#[cfg(test)]
mod norm_tests;
mod part;
mod plan;
mod share;
#[cfg(test)]
mod unpack_tests;

#[cfg(test)]
pub(crate) use cached::row_swizzle;
pub(crate) use cached::unpacked;
pub use experts::ChunkRoutes;
pub(crate) use experts::workspace_bytes;
use layers::Begun;
pub use layers::LayersRan;
use part::{Part, Run};
pub(crate) use share::Piece;
use share::{Runs, whole_blocks};

/// Tokens per chunk: more make the products no faster, and take more memory.
const CHUNK_TOKENS: u32 = 2048;
/// Token granule: a multiple of the block of every form of the matrix products and of the attention.
const BLOCK_TOKENS: u32 = 128;
/// Threads per block of the attention: a warp has 16 of its tokens.
const ATTEND_THREADS: u32 = ATTEND_TOKENS * 2;
/// Columns that follow one another in a token's row of a vector, and the row's bytes (prefill_vectors.cuh).
const X_COLS: u32 = 64;
const X_ROW_BYTES: u32 = 128;
/// Units of a matrix that a stage of the products has.
const STAGE_UNITS: u32 = 2;
/// Factor of the hidden layer's elements while they are f16: they may reach 4.2e6. A power of two, so that only the range moves.
const HIDDEN_SCALE: f32 = 1.0 / 64.0;
/// Bytes of an element of queries, keys and values.
const HALF_BYTES: u32 = 2;
/// Limit for one chunk. It takes milliseconds; nothing in it waits.
const CHUNK_LIMIT: Duration = Duration::from_secs(20);

/// Block shape of the matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmShape {
    /// The one that is likely the fastest for the matrix and the number of tokens.
    #[default]
    Auto,
    /// 256 tokens by 128 rows.
    Wide,
    /// 128 tokens by 128 rows.
    Middle,
    /// 64 tokens by 64 rows, three blocks per multiprocessor.
    Small,
}

const SHAPES: [GemmShape; 3] = [GemmShape::Wide, GemmShape::Middle, GemmShape::Small];

/// Options for running a prompt in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillOptions {
    /// Block shape of the matrix products.
    pub shape: GemmShape,
    /// Tokens per chunk at most; a multiple of 128.
    pub chunk: u32,
    /// Most experts of codes that are unpacked at once. Only tests set it: there is room for many.
    pub experts: u32,
    /// Time every kernel. This slows the run down.
    pub profile: bool,
}

impl Default for PrefillOptions {
    fn default() -> Self {
        let (shape, chunk) = (GemmShape::Auto, CHUNK_TOKENS);
        Self { shape, chunk, experts: u32::MAX, profile: false }
    }
}

/// Total of all launches of a kernel.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelTime {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Number of launches.
    pub launches: u32,
    /// Microseconds in total.
    pub us: f64,
    /// Multiplications and additions that the model requires.
    pub flop: f64,
}

/// Result of running a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefilled {
    /// Number of chunks.
    pub chunks: u32,
    /// Microseconds from the first kernel to the last, by the device's events.
    pub device_us: f64,
    /// Multiplications and additions that the model requires.
    pub flop: f64,
    /// Elements of the hidden layer were out of range and were clamped, or weights of codes were: the results are not the model's. Run the
    /// tokens one by one.
    pub clamped: bool,
    /// By kernel, if they were timed: those of the first device.
    pub kernels: Vec<KernelTime>,
}

/// The reason why a model's prompts cannot be run in chunks on as many devices, or `None` if they can.
#[must_use]
pub fn prefill_refused(graph: &Graph, devices: u32) -> Option<String> {
    if let Some(why) = graph.heads_refused() {
        return Some(format!("{}: {why}", graph.name));
    }
    // A block without a norm takes the stream as it is, which only kernels with norms behind blocks do.
    let bare = |layer: &ir::Layer| {
        let (attention, mlp) = (&layer.attention, &layer.mlp);
        attention.norm.or(attention.post_norm).is_none() || mlp.norm.or(mlp.post_norm).is_none()
    };
    if graph.layers.iter().any(bare) {
        return Some(format!(
            "{} has blocks without a norm: its prompts run token by token",
            graph.name
        ));
    }
    let norms = 1 << Feature::Norm as u32 | 1 << Feature::PostNorm as u32;
    if devices > 1 && compile::features(graph) & norms != 0 {
        return Some(format!(
            "{}: chunks on several GPUs have no norms over results or all heads: its prompts run token by token",
            graph.name
        ));
    }
    if let Some(why) = experts::refused(graph, devices) {
        return Some(format!("{}: {why}: its prompts run token by token", graph.name));
    }
    if graph.dtype == DType::F32 {
        return Some(format!(
            "{} has f32 weights: prompt chunks are multiplied by 16-bit weights only; its prompts run token by token",
            graph.name
        ));
    }
    let head = graph.group() * graph.head_dim;
    let tile = abi::UNIT_ROWS; // a tile of gate rows and one of up rows
    let mut widths = graph.layers.iter().flat_map(|layer| experts::widths(graph, layer));
    let whole = whole_blocks(graph.kv_heads, head, devices)
        && widths.all(|width| whole_blocks(width.div_ceil(tile), tile, devices));
    (!whole).then(|| {
        format!(
            "heads or hidden layers of {} do not divide into blocks of {X_COLS} columns for {devices} GPUs: its prompts run token by token",
            graph.name
        )
    })
}

/// Compiles the kernels that run this model's prompts in chunks on as many devices into the cache, if it has such and there is a cache. It uses
/// no GPU, so a thread of its own may do it while weights are loaded.
pub fn compile_prompts(
    graph: &Graph,
    devices: u32,
    info: &DeviceInfo,
) -> impl FnOnce() -> Result<(), HostError> + Send + 'static {
    let needed = prefill_refused(graph, devices).is_none();
    let (variant, arch) = (variant(graph, devices), arch(info).map(|arch| arch.name));
    move || match default_cache() {
        Some(cache) if needed => compile_prefill(&variant, arch?, Some(&cache)).map(|_| ()),
        _ => Ok(()),
    }
}

/// Kernels and memory for prompts of one model: a part on each device.
pub(crate) struct Prefill {
    variant: PrefillVariant,
    chunk: u32,
    parts: Vec<Part>,
    /// A chunk of which some layers are still to run.
    begun: Option<Begun>,
}

/// What is run: the session's rows of pages on each device, its first position, its tokens.
pub(crate) type Prompt<'a> = (&'a [u64], u32, &'a [u32]);

impl Prefill {
    /// Compiles, loads and allocates. No kernel is resident.
    pub(crate) fn new(
        graph: &Graph,
        residents: &Residents,
        (cards, info): (&Cards, &DeviceInfo),
        options: &PrefillOptions,
    ) -> Result<Self, HostError> {
        if let Some(why) = prefill_refused(graph, cards.devices()) {
            return Err(HostError::Request(why));
        }
        let variant = variant(graph, cards.devices());
        let cubin = compile_prefill(&variant, arch(info)?.name, default_cache().as_deref())?;
        let chunk = chunk_tokens(options.chunk, residents.kv_capacity);
        let kernels = (&variant, &cubin.image[..]);
        let part = |device| Part::new(graph, residents, (device, info.sms), kernels, chunk);
        Ok(Self { variant, chunk, parts: cards.on_each(part)?, begun: None })
    }

    /// Whether it was built with these options.
    pub(crate) fn serves(&self, graph: &Graph, options: &PrefillOptions) -> bool {
        self.variant == variant(graph, self.parts.len() as u32)
            && self.chunk == chunk_tokens(options.chunk, self.parts[0].plan.capacity)
    }

    /// Runs `tokens` from `start` of a session: their keys and values go to its pages and, with `logits`, the last one's logits to the first row of
    /// logits. The request was checked, and the session has pages for it. A stream for each device.
    pub(crate) fn run(
        &mut self,
        streams: &[&Stream],
        copier: &mut Copier,
        (pages, start, tokens): Prompt<'_>,
        logits: bool,
        options: &PrefillOptions,
    ) -> Result<Prefilled, HostError> {
        self.begun = None; // its memory is used again
        let mut runs = self.runs(streams, pages, options)?;
        let event = || streams[0].owner().within(Event::new);
        self.clear_clamped(streams, copier)?;
        let (begin, end) = (event()?, event()?);
        begin.record(streams[0])?;
        let chunks = tokens.chunks(self.chunk as usize);
        let count = chunks.len() as u32;
        for (piece, index) in chunks.zip(0..) {
            self.upload_tokens(streams, copier, piece)?;
            let last = index + 1 == count;
            runs.chunk(start + index * self.chunk, piece.len() as u32, logits && last)?;
        }
        end.record(streams[0])?;
        runs.streams().try_for_each(wait)?;
        let clamped = self.clamped(copier)?;
        let flop = runs.runs.iter().map(|run| run.flop).sum();
        let first = runs.runs.swap_remove(0);
        let kernels = times(first.marks.unwrap_or_default())?;
        Ok(Prefilled { chunks: count, device_us: begin.elapsed_us(&end)?, flop, clamped, kernels })
    }

    fn runs<'a>(
        &'a self,
        streams: &[&'a Stream],
        pages: &[u64],
        options: &PrefillOptions,
    ) -> Result<Runs<'a>, HostError> {
        let runs = self.parts.iter().zip(streams).zip(pages).map(|((part, &stream), &pages)| {
            let marks = options.profile.then(Vec::new);
            let PrefillOptions { shape, experts, .. } = *options;
            Run { part, stream, shape, experts, marks, flop: 0.0, pages }
        });
        Runs::new(runs.collect())
    }

    fn upload_tokens(
        &self,
        streams: &[&Stream],
        copier: &mut Copier,
        tokens: &[u32],
    ) -> Result<(), HostError> {
        self.parts.iter().zip(streams).try_for_each(|(part, stream)| {
            let to = part.buffers.tokens.address;
            copier.upload_behind(stream, to, bytemuck::cast_slice(tokens))
        })
    }

    fn clear_clamped(&self, streams: &[&Stream], copier: &mut Copier) -> Result<(), HostError> {
        self.parts.iter().zip(streams).try_for_each(|(part, stream)| {
            copier.upload_behind(stream, part.buffers.clamped.address, &[0; 4])
        })
    }

    /// Whether a value was clamped since that was last cleared.
    fn clamped(&self, copier: &Copier) -> Result<bool, HostError> {
        let mut clamped = false;
        for part in &self.parts {
            let mut word = [0_u8; 4];
            copier.download(part.buffers.clamped.address, &mut word)?;
            clamped |= word != [0; 4];
        }
        Ok(clamped)
    }
}

impl Prefill {
    /// The experts that the last chunk chose.
    pub(crate) fn routes(
        &self,
        copier: &Copier,
        count: u32,
    ) -> Result<Vec<ChunkRoutes>, HostError> {
        self.parts.first().map_or(Ok(Vec::new()), |part| part.routes(copier, count))
    }
}

/// The id of the kernels that run a prompt of a model on as many devices of an architecture such as `sm_90a`.
#[must_use]
pub fn prefill_kernel_id(graph: &Graph, devices: u32, arch: &str) -> String {
    compile::prefill_kernel_id(&variant(graph, devices), arch)
}

fn variant(graph: &Graph, devices: u32) -> PrefillVariant {
    let features = compile::features(graph);
    PrefillVariant {
        dtype: graph.dtype,
        unpack: compile::unpack_mask(&PackedModel::new(graph)),
        head_dim: graph.head_dim,
        group: graph.group(),
        qk_norm: graph.layers.iter().any(|layer| graph.norms_each_head(layer)),
        features,
        parts: devices > 1 && features >> Feature::Route as u32 & 1 != 0,
    }
}

/// Tokens per chunk: whole blocks, and no more than the cache can hold.
fn chunk_tokens(asked: u32, capacity: u32) -> u32 {
    let blocks = |tokens: u32| tokens.next_multiple_of(BLOCK_TOKENS);
    blocks(asked.max(1)).min(blocks(capacity))
}

/// Waits for all work on the stream, which ends by itself.
fn wait(stream: &Stream) -> Result<(), HostError> {
    let began = Instant::now();
    while !stream.is_done()? {
        if began.elapsed() > CHUNK_LIMIT {
            return Err(HostError::TimedOut { waited: began.elapsed(), alive: false });
        }
        std::hint::spin_loop();
    }
    Ok(())
}

/// Sums per kernel, in the order of their first launches.
fn times(marks: Vec<(&'static str, f64, Event, Event)>) -> Result<Vec<KernelTime>, HostError> {
    let mut all: Vec<KernelTime> = Vec::new();
    for (kernel, flop, begin, end) in marks {
        let us = begin.elapsed_us(&end)?;
        if let Some(time) = all.iter_mut().find(|time| time.kernel == kernel) {
            time.launches += 1;
            time.us += us;
            time.flop += flop;
        } else {
            all.push(KernelTime { kernel, launches: 1, us, flop });
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fit_the_cache() {
        assert_eq!((chunk_tokens(2048, 64), chunk_tokens(2048, 4096)), (128, 2048));
        assert_eq!((chunk_tokens(1, 4096), chunk_tokens(500, 4096)), (128, 512));
    }

    #[test]
    fn all_families_run_in_chunks() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus");
        let folders = [
            "families/mixtral-bf16",
            "families/gpt-oss-bf16",
            "families/phi3-bf16",
            "families/olmoe-bf16",
            "families/olmo2-bf16",
            "families/glm4-bf16",
            "families/gemma3-256-bf16",
            "quantised/mxfp4-gpt-oss",
            "quantised/gguf-q4_k_m-qwen3/model.gguf",
        ];
        for name in folders {
            let folder = format!("{corpus}/{name}");
            let graph = model::import(folder.as_ref()).expect("a golden folder").graph;
            assert_eq!(prefill_refused(&graph, 1), None, "{name}");
        }
        let two = |name: &str| {
            prefill_refused(&model::preset(name).expect("a preset").graph, 2).is_none()
        };
        let presets = ["qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-3-4b"];
        assert_eq!(presets.map(two), [true, true, true, false, false], "on two GPUs");
    }
}
