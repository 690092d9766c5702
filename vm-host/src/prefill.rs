//! Prompts in chunks: matrix products over many tokens by ordinary kernels, while no kernel is resident.
//!
//! The kernels read the same packed weights, constants and rotary table as the resident kernel, and append keys and values to the same caches
//! in the same form, so a later decode continues from there. After the last layer's keys and values, only the tile of tokens whose logits are
//! requested is computed. Decision 019.

use std::time::{Duration, Instant};

use abi::{ATTEND_KEYS, ATTEND_TOKENS, PREFILL_THREADS};
use ir::{DType, Graph};
use vm_device::PrefillVariant;

use crate::card::arch;
use crate::compile::{self, compile_prefill, default_cache};
use crate::driver::{DeviceInfo, Event, Function, Module, Stream};
use crate::error::HostError;
use crate::load::Residents;
use crate::memory::{Copier, DeviceBuffer};

mod cached;
mod plan;

pub(crate) use cached::unpacked;
use plan::{LayerPlan, Lookup, Packed, Plan};

/// Tokens per chunk: more make the products no faster, and take more memory.
const CHUNK_TOKENS: u32 = 2048;
/// Token granule: a multiple of the block of every form of the matrix products and of the attention.
const BLOCK_TOKENS: u32 = 128;
/// Threads per block of the attention: a warp has 16 of its tokens.
const ATTEND_THREADS: u32 = ATTEND_TOKENS * 2;
/// Columns of a unit of 16-bit elements.
const UNIT_COLS: u32 = abi::UNIT_ROW_BYTES / 2;
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
    /// 128 tokens by 256 rows, with warpgroup products.
    Group,
    /// 64 tokens by 64 rows, with warp products, four blocks per multiprocessor.
    Small,
}

/// Options for running a prompt in chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillOptions {
    /// Number of 16-bit halves into which a vector is split for multiplication: 1 or 2.
    pub vector_halves: u32,
    /// Block shape of the matrix products.
    pub shape: GemmShape,
    /// Tokens per chunk at most; a multiple of 128.
    pub chunk: u32,
    /// Time every kernel. This slows the run down.
    pub profile: bool,
}

impl Default for PrefillOptions {
    fn default() -> Self {
        Self { vector_halves: 2, shape: GemmShape::Auto, chunk: CHUNK_TOKENS, profile: false }
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
    /// By kernel, if they were timed.
    pub kernels: Vec<KernelTime>,
}

/// The reason why a model's prompts cannot be run in chunks, or `None` if they can.
#[must_use]
pub fn prefill_refused(graph: &Graph) -> Option<String> {
    let same_blocks = |layer: &ir::Layer| {
        layer.gated().is_some()
            && layer.attention.norm.is_some()
            && layer.mlp.norm.is_some()
            && !graph.norms_all_heads(layer)
    };
    let narrow = graph.head_dim.is_power_of_two() && (16..=128).contains(&graph.head_dim);
    if compile::features(graph) != 0 || !graph.layers.iter().all(same_blocks) || !narrow {
        return Some(format!(
            "{} has blocks that the kernels for prompt chunks lack: its prompts run token by token",
            graph.name
        ));
    }
    let matrices = || graph.tensors.iter().filter(|tensor| tensor.shape.len() == 2);
    let what = if graph.dtype == DType::F32 {
        "f32"
    } else if matrices().any(|matrix| matrix.dtype.is_scaled()) {
        "quantised"
    } else {
        return None;
    };
    Some(format!(
        "{} has {what} weights: prompt chunks are multiplied by 16-bit weights only; its prompts run token by token",
        graph.name
    ))
}

struct Kernels {
    embed: Function,
    norm: Function,
    heads: Function,
    attention: Function,
    logits: Function,
    group: [Function; 3],
    small: [Function; 3],
}

/// What is done with a matrix's products; in the order of `Kernels::group`.
#[derive(Clone, Copy)]
enum Finish {
    Store,
    Residual,
    SiluMul,
}

impl Kernels {
    fn of(module: &Module, variant: &PrefillVariant) -> Result<Self, HostError> {
        let gemm = |shape: GemmShape, name| {
            let function = module.function(name)?;
            function.allow_shared(gemm_block(shape).shared(variant.vector_halves))?;
            Ok::<_, HostError>(function)
        };
        let attention = module.function(c"amk_prefill_attention")?;
        attention.allow_shared(attend_shared(variant.head_dim))?;
        Ok(Self {
            embed: module.function(c"amk_prefill_embed")?,
            norm: module.function(c"amk_prefill_norm")?,
            heads: module.function(c"amk_prefill_heads")?,
            attention,
            logits: module.function(c"amk_prefill_logits")?,
            group: [
                gemm(GemmShape::Group, c"amk_prefill_store_group")?,
                gemm(GemmShape::Group, c"amk_prefill_residual_group")?,
                gemm(GemmShape::Group, c"amk_prefill_silu_group")?,
            ],
            small: [
                gemm(GemmShape::Small, c"amk_prefill_store_small")?,
                gemm(GemmShape::Small, c"amk_prefill_residual_small")?,
                gemm(GemmShape::Small, c"amk_prefill_silu_small")?,
            ],
        })
    }
}

/// A block of the matrix products, as the kernels are compiled.
struct GemmBlock {
    tokens: u32,
    rows: u32,
    stages: u32,
    threads: u32,
    /// Microseconds that a multiprocessor takes for a unit of columns with this many blocks side by side, from one to as many as fit: measured
    /// on an H200 (docs/explanation/performance.md). Only their ratios matter.
    us: &'static [f64],
}

fn gemm_block(shape: GemmShape) -> GemmBlock {
    let (tokens, rows, stages, threads, us): (_, _, _, _, &[f64]) = match shape {
        GemmShape::Auto | GemmShape::Group => (128, 256, 6, 256, &[0.75]),
        GemmShape::Small => (64, 64, 4, 128, &[0.37, 0.55, 0.74, 0.93]),
    };
    GemmBlock { tokens, rows, stages, threads, us }
}

impl GemmBlock {
    /// Bytes of shared memory.
    fn shared(&self, halves: u32) -> u32 {
        let tiles = self.tokens / abi::UNIT_ROWS * halves + self.rows / abi::UNIT_ROWS;
        self.stages * tiles * abi::UNIT_BYTES
    }

    fn count(&self, tokens: u32, tiles: u32) -> u32 {
        tokens.div_ceil(self.tokens) * (tiles * abi::UNIT_ROWS).div_ceil(self.rows)
    }

    /// Blocks that fit on a multiprocessor.
    fn beside(&self) -> u32 {
        self.us.len() as u32
    }

    /// Estimated microseconds for a unit of a matrix's columns: rounds over all multiprocessors; in the last each may have fewer blocks.
    fn cost(&self, tokens: u32, tiles: u32, sms: u32) -> f64 {
        let blocks = self.count(tokens, tiles);
        let (full, rest) = (blocks / (self.beside() * sms), blocks % (self.beside() * sms));
        let round = |beside: u32| if beside == 0 { 0.0 } else { self.us[beside as usize - 1] };
        f64::from(full) * round(self.beside()) + round(rest.div_ceil(sms))
    }
}

/// Bytes of shared memory per block of the attention: keys and values, double-buffered.
fn attend_shared(head_dim: u32) -> u32 {
    2 * 2 * ATTEND_KEYS * head_dim * HALF_BYTES
}

/// The shape that is likely the fastest for a matrix, unless one is requested.
fn choose(asked: GemmShape, tokens: u32, tiles: u32, sms: u32) -> GemmShape {
    let cost = |shape| gemm_block(shape).cost(tokens, tiles, sms);
    match asked {
        GemmShape::Auto if cost(GemmShape::Small) < cost(GemmShape::Group) => GemmShape::Small,
        GemmShape::Auto => GemmShape::Group,
        GemmShape::Group | GemmShape::Small => asked,
    }
}

/// Memory of one chunk.
struct Buffers {
    tokens: DeviceBuffer,
    residual: DeviceBuffer,
    normed: DeviceBuffer,
    qkv: DeviceBuffer,
    queries: DeviceBuffer,
    attended: DeviceBuffer,
    hidden: DeviceBuffer,
}

/// Kernels and memory for prompts of one model.
pub(crate) struct Prefill {
    variant: PrefillVariant,
    chunk: u32,
    plan: Plan,
    kernels: Kernels,
    buffers: Buffers,
    unit_bytes: u64, // of 8 tokens
    heads: u32,
    kv_heads: u32,
    hidden: u32,
    vocab: u32,
    eps: f32,
    scale: f32,
    sms: u32,
    _module: Module, // dropped last: the kernels belong to it
}

/// State of one run: what has been enqueued on a stream.
struct Run<'a> {
    prefill: &'a Prefill,
    stream: &'a Stream,
    shape: GemmShape,
    /// Timed kernels: name, flop, begin and end.
    marks: Option<Vec<(&'static str, f64, Event, Event)>>,
    flop: f64,
    /// Address of the session's row of pages.
    pages: u64,
}

impl Prefill {
    /// Compiles, loads and allocates. No kernel is resident.
    pub(crate) fn new(
        graph: &Graph,
        residents: &Residents,
        info: &DeviceInfo,
        options: &PrefillOptions,
    ) -> Result<Self, HostError> {
        if let Some(why) = prefill_refused(graph) {
            return Err(HostError::Request(why));
        }
        let variant = variant(graph, options);
        let plan = Lookup { graph, residents }.plan()?;
        let cubin = compile_prefill(&variant, arch(info)?.name, default_cache().as_deref())?;
        let module = Module::load(&cubin.image)?;
        let kernels = Kernels::of(&module, &variant)?;
        let chunk = chunk_tokens(options.chunk, residents.kv_capacity);
        let unit_bytes = u64::from(abi::UNIT_BYTES * variant.vector_halves);
        let rows = |words: u32| DeviceBuffer::zeroed(u64::from(chunk) * u64::from(words) * 4);
        let vectors = |cols: u32| {
            let units = u64::from(chunk / abi::UNIT_ROWS) * u64::from(cols.div_ceil(UNIT_COLS));
            DeviceBuffer::zeroed(units * unit_bytes)
        };
        let qkv_rows = plan.layers.first().map_or(0, |layer| layer.qkv.tiles * abi::UNIT_ROWS);
        let buffers = Buffers {
            tokens: rows(1)?,
            residual: rows(graph.hidden.next_multiple_of(abi::UNIT_ROWS))?,
            normed: vectors(graph.hidden)?,
            qkv: rows(qkv_rows)?,
            queries: rows(graph.q_width())?, // two halves of 16 bits
            attended: vectors(graph.q_width())?,
            hidden: vectors(graph.ffn)?,
        };
        Ok(Self {
            variant,
            chunk,
            plan,
            kernels,
            buffers,
            unit_bytes,
            heads: graph.heads,
            kv_heads: graph.kv_heads,
            hidden: graph.hidden,
            vocab: graph.vocab,
            eps: graph.norm_eps,
            scale: graph.attn_scale,
            sms: info.sms,
            _module: module,
        })
    }

    /// Whether it was built with these options.
    pub(crate) fn serves(&self, graph: &Graph, options: &PrefillOptions) -> bool {
        self.variant == variant(graph, options)
            && self.chunk == chunk_tokens(options.chunk, self.plan.capacity)
    }

    /// Runs `tokens` from `start` of a session: their keys and values go to its pages and, with `logits`, the last one's logits to the first row of
    /// logits. The request was checked, and the session has pages for it.
    pub(crate) fn run(
        &self,
        stream: &Stream,
        copier: &mut Copier,
        (pages, start, tokens): (u64, u32, &[u32]),
        logits: bool,
        options: &PrefillOptions,
    ) -> Result<Prefilled, HostError> {
        let (begin, end) = (Event::new()?, Event::new()?);
        let mut run = Run {
            prefill: self,
            stream,
            shape: options.shape,
            marks: options.profile.then(Vec::new),
            flop: 0.0,
            pages,
        };
        begin.record(stream)?;
        let chunks = tokens.chunks(self.chunk as usize);
        let count = chunks.len() as u32;
        for (piece, index) in chunks.zip(0..) {
            copier.upload_behind(
                stream,
                self.buffers.tokens.address,
                bytemuck::cast_slice(piece),
            )?;
            run.chunk(
                start + index * self.chunk,
                piece.len() as u32,
                logits && index + 1 == count,
            )?;
        }
        end.record(stream)?;
        wait(stream)?;
        Ok(Prefilled {
            chunks: count,
            device_us: begin.elapsed_us(&end)?,
            flop: run.flop,
            kernels: times(run.marks.unwrap_or_default())?,
        })
    }
}

/// The id of the kernels that run a prompt of a model on an architecture such as `sm_90a`.
#[must_use]
pub fn prefill_kernel_id(graph: &Graph, arch: &str) -> String {
    compile::prefill_kernel_id(&variant(graph, &PrefillOptions::default()), arch)
}

fn variant(graph: &Graph, options: &PrefillOptions) -> PrefillVariant {
    PrefillVariant {
        dtype: graph.dtype,
        head_dim: graph.head_dim,
        group: graph.group(),
        qk_norm: graph.layers.iter().any(|layer| layer.attention.body.q_norm.is_some()),
        vector_halves: options.vector_halves.clamp(1, 2),
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

/// The tokens of a chunk that a kernel processes.
#[derive(Clone, Copy)]
struct Rows {
    first: u32, // a multiple of 128
    count: u32,
}

impl Run<'_> {
    /// Launches a kernel. Each value is one of its parameters, in the order of its declaration; the low bytes are used.
    fn launch(
        &mut self,
        name: &'static str,
        flop: f64,
        kernel: &Function,
        (grid, block, shared): (u32, u32, u32),
        values: &mut [u64],
    ) -> Result<(), HostError> {
        let mut arguments: Vec<*mut std::ffi::c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        self.flop += flop;
        let Some(marks) = &mut self.marks else {
            return self.stream.launch(kernel, grid, block, shared, &mut arguments);
        };
        let (begin, end) = (Event::new()?, Event::new()?);
        begin.record(self.stream)?;
        self.stream.launch(kernel, grid, block, shared, &mut arguments)?;
        end.record(self.stream)?;
        marks.push((name, flop, begin, end));
        Ok(())
    }

    fn chunk(&mut self, start: u32, count: u32, logits: bool) -> Result<(), HostError> {
        let all = Rows { first: 0, count };
        self.embed(count)?;
        let last = self.prefill.plan.layers.len().saturating_sub(1);
        for (index, layer) in self.prefill.plan.layers.iter().enumerate() {
            self.norm(layer.attn_norm, all)?;
            let (normed, qkv) = (&self.prefill.buffers.normed, &self.prefill.buffers.qkv);
            self.gemm("qkv", Finish::Store, &layer.qkv, normed.address, qkv.address, all)?;
            self.heads(layer, start, count)?;
            if index == last && !logits {
                return Ok(());
            }
            // After the last keys and values, only the last token is needed.
            let first = (count - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
            let rows = if index == last { Rows { first, count: count - first } } else { all };
            self.attention(layer, start, rows)?;
            self.mlp(layer, rows)?;
            if index == last {
                self.logits(rows)?;
            }
        }
        Ok(())
    }

    /// The part of a layer after its attention.
    fn mlp(&mut self, layer: &LayerPlan, rows: Rows) -> Result<(), HostError> {
        let Buffers { residual, normed, attended, hidden, .. } = &self.prefill.buffers;
        let (attended, hidden) = (attended.address, hidden.address);
        self.gemm("o", Finish::Residual, &layer.o, attended, residual.address, rows)?;
        self.norm(layer.mlp_norm, rows)?;
        self.gemm("gate_up", Finish::SiluMul, &layer.gate_up, normed.address, hidden, rows)?;
        self.gemm("down", Finish::Residual, &layer.down, hidden, residual.address, rows)
    }

    /// Words per row of the residual stream.
    fn stride(&self) -> u32 {
        self.prefill.hidden.next_multiple_of(abi::UNIT_ROWS)
    }

    /// Address of a token's vector; the token is the first of its tile.
    fn vector(&self, buffer: u64, token: u32, units: u32) -> u64 {
        buffer + u64::from(token / abi::UNIT_ROWS) * u64::from(units) * self.prefill.unit_bytes
    }

    fn embed(&mut self, count: u32) -> Result<(), HostError> {
        let Prefill { kernels, buffers, plan, .. } = self.prefill;
        let mut values = [
            buffers.residual.address,
            plan.embed.address,
            buffers.tokens.address,
            self.stride().into(),
            plan.embed.units.into(),
        ];
        self.launch("embed", 0.0, &kernels.embed, (count, PREFILL_THREADS, 0), &mut values)
    }

    fn norm(&mut self, norm: u64, rows: Rows) -> Result<(), HostError> {
        let Prefill { kernels, buffers, plan, hidden, eps, .. } = self.prefill;
        let (stride, units) = (self.stride(), plan.embed.units);
        let mut values = [
            self.vector(buffers.normed.address, rows.first, units),
            buffers.residual.address + u64::from(rows.first) * u64::from(stride) * 4,
            norm,
            stride.into(),
            units.into(),
            (*hidden).into(),
            eps.to_bits().into(),
        ];
        self.launch("norm", 0.0, &kernels.norm, (rows.count, PREFILL_THREADS, 0), &mut values)
    }

    /// Multiplies the vectors of `x` by a matrix, into rows or, for the hidden layer, vectors.
    fn gemm(
        &mut self,
        name: &'static str,
        finish: Finish,
        matrix: &Packed,
        x: u64,
        out: u64,
        rows: Rows,
    ) -> Result<(), HostError> {
        let Prefill { kernels, sms, .. } = self.prefill;
        let shape = choose(self.shape, rows.count, matrix.tiles, *sms);
        let block = gemm_block(shape);
        let set = match shape {
            GemmShape::Auto | GemmShape::Group => &kernels.group,
            GemmShape::Small => &kernels.small,
        };
        let (stride, out) = if let Finish::SiluMul = finish {
            let units = (matrix.tiles / 2 * abi::UNIT_ROWS).div_ceil(UNIT_COLS);
            (units, self.vector(out, rows.first, units))
        } else {
            let stride = matrix.tiles * abi::UNIT_ROWS;
            (stride, out + u64::from(rows.first) * u64::from(stride) * 4)
        };
        let mut values = [
            out,
            self.vector(x, rows.first, matrix.units),
            matrix.address,
            matrix.bias,
            matrix.units.into(),
            matrix.tiles.into(),
            rows.count.into(),
            stride.into(),
        ];
        let flop = 2.0 * f64::from(rows.count) * f64::from(matrix.rows) * f64::from(matrix.cols);
        let place = (
            block.count(rows.count, matrix.tiles),
            block.threads,
            block.shared(self.prefill.variant.vector_halves),
        );
        self.launch(name, flop, &set[finish as usize], place, &mut values)
    }

    fn heads(&mut self, layer: &LayerPlan, start: u32, count: u32) -> Result<(), HostError> {
        let Prefill { kernels, buffers, variant, heads, kv_heads, .. } = self.prefill;
        let threads =
            u64::from(count) * u64::from(heads + 2 * kv_heads) * u64::from(variant.head_dim / 8);
        let grid = threads.div_ceil(u64::from(PREFILL_THREADS)) as u32;
        let mut values = [
            buffers.queries.address,
            layer.cache,
            self.pages,
            buffers.qkv.address,
            layer.rope,
            layer.q_norm,
            layer.k_norm,
            count.into(),
            (layer.qkv.tiles * abi::UNIT_ROWS).into(),
            (*kv_heads).into(),
            start.into(),
            self.prefill.eps.to_bits().into(),
            self.prefill.scale.to_bits().into(),
        ];
        self.launch("heads", 0.0, &kernels.heads, (grid, PREFILL_THREADS, 0), &mut values)
    }

    fn attention(&mut self, layer: &LayerPlan, start: u32, rows: Rows) -> Result<(), HostError> {
        let Prefill { kernels, buffers, variant, heads, kv_heads, .. } = self.prefill;
        let q_bytes = heads * variant.head_dim * 2 * HALF_BYTES; // per token
        let grid = rows.count.div_ceil(ATTEND_TOKENS) * heads;
        let units = layer.o.units;
        let mut values = [
            self.vector(buffers.attended.address, rows.first, units),
            buffers.queries.address + u64::from(rows.first) * u64::from(q_bytes),
            layer.cache,
            self.pages,
            units.into(),
            rows.count.into(),
            (*kv_heads).into(),
            (start + rows.first).into(),
            layer.window.into(),
        ];
        let seen = (0..rows.count).map(|row| {
            let keys = start + rows.first + row + 1;
            f64::from(if layer.window == 0 { keys } else { keys.min(layer.window) })
        });
        let flop = 4.0 * seen.sum::<f64>() * f64::from(heads * variant.head_dim);
        let shared = attend_shared(variant.head_dim);
        let place = (grid, ATTEND_THREADS, shared);
        self.launch("attention", flop, &kernels.attention, place, &mut values)
    }

    /// Logits of the last token of `rows`.
    fn logits(&mut self, rows: Rows) -> Result<(), HostError> {
        let Prefill { kernels, buffers, plan, vocab, hidden, sms, .. } = self.prefill;
        self.norm(plan.final_norm, rows)?;
        let token = rows.first + rows.count - 1;
        let mut values = [
            plan.logits,
            plan.lm_head.address,
            self.vector(buffers.normed.address, token, plan.lm_head.units),
            (token % abi::UNIT_ROWS).into(),
            plan.lm_head.units.into(),
            (*vocab).into(),
        ];
        let flop = 2.0 * f64::from(*vocab) * f64::from(*hidden);
        let place = (sms * 8, PREFILL_THREADS, 0);
        self.launch("logits", flop, &kernels.logits, place, &mut values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The estimate picks the faster shape wherever a measurement showed at least 10 % difference.
    #[test]
    fn the_form_that_was_measured_to_be_faster_is_chosen() {
        use GemmShape::{Auto, Group, Small};
        let measured = [
            ("llama-3.2-1b gate_up", 2048, 16384, Group), // 382 us against 872
            ("llama-3.2-1b down", 1000, 2048, Group),     // 189 against 237
            ("llama-3.2-1b down", 500, 2048, Small),      // 140 against 191
            ("llama-3.2-1b gate_up", 129, 16384, Group),  // 51 against 91
            ("llama-3.2-1b gate_up", 64, 16384, Small),   // 39 against 49
            ("llama-3.2-1b qkv", 129, 3072, Small),       // 38 against 48
            ("qwen3-0.6b qkv", 500, 4096, Group),         // 29 against 36
            ("qwen3-0.6b down", 1000, 1024, Small),       // 64 against 93
            ("smollm2-135m gate_up", 1000, 3072, Group),  // 23 against 31
            ("smollm2-135m down", 2048, 576, Small),      // 44 against 61
        ];
        for (name, tokens, rows, faster) in measured {
            assert_eq!(choose(Auto, tokens, rows / 8, 132), faster, "{name}, {tokens} tokens");
        }
        assert_eq!(choose(Small, 2048, 2048, 132), Small, "asked for");
    }

    #[test]
    fn every_row_and_token_has_a_block() {
        for shape in [GemmShape::Group, GemmShape::Small] {
            let block = gemm_block(shape);
            assert_eq!(block.count(1, 1), 1);
            assert_eq!(block.count(block.tokens + 1, block.rows / 8 + 1), 4, "{shape:?}");
        }
    }

    #[test]
    fn blocks_fit_the_shared_memory_and_chunks_the_cache() {
        for halves in [1, 2] {
            for shape in [GemmShape::Group, GemmShape::Small] {
                let block = gemm_block(shape);
                assert!(block.beside() * (block.shared(halves) + 1024) <= 228 << 10, "{shape:?}");
            }
        }
        assert_eq!((chunk_tokens(2048, 64), chunk_tokens(2048, 4096)), (128, 2048));
        assert_eq!((chunk_tokens(1, 4096), chunk_tokens(500, 4096)), (128, 512));
    }
}
