//! Prompts in chunks: matrix products over many tokens by ordinary kernels, while no kernel is resident.
//!
//! The kernels read the same packed weights, constants and rotary table as the resident kernel, and append keys and values to the same caches
//! in the same form, so a later decode continues from there. After the last layer's keys and values, only the tile of tokens whose logits are
//! requested is computed. Decision 019.

use std::time::{Duration, Instant};

use abi::{ATTEND_KEYS, ATTEND_TOKENS, PREFILL_THREADS, Unpack};
use ir::program::PackedModel;
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
#[cfg(test)]
mod unpack_tests;

pub(crate) use cached::unpacked;
pub(crate) use plan::unpacked_bytes;
use plan::{LayerPlan, Lookup, Packed, Plan};

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
    /// Time every kernel. This slows the run down.
    pub profile: bool,
}

impl Default for PrefillOptions {
    fn default() -> Self {
        Self { shape: GemmShape::Auto, chunk: CHUNK_TOKENS, profile: false }
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
    (graph.dtype == DType::F32).then(|| {
        format!(
            "{} has f32 weights: prompt chunks are multiplied by 16-bit weights only; its prompts run token by token",
            graph.name
        )
    })
}

/// Compiles the kernels that run this model's prompts in chunks into the cache, if it has such and there is a cache. It uses
/// no GPU, so a thread of its own may do it while weights are loaded.
pub fn compile_prompts(
    graph: &Graph,
    info: &DeviceInfo,
) -> impl FnOnce() -> Result<(), HostError> + Send + 'static {
    let needed = prefill_refused(graph).is_none();
    let (variant, arch) = (variant(graph), arch(info).map(|arch| arch.name));
    move || match default_cache() {
        Some(cache) if needed => compile_prefill(&variant, arch?, Some(&cache)).map(|_| ()),
        _ => Ok(()),
    }
}

struct Kernels {
    /// For matrices of codes.
    unpack: Option<Function>,
    embed: Function,
    norm: Function,
    heads: Function,
    attention: Function,
    logits: Function,
    wide: [Function; 3],
    middle: [Function; 3],
    small: [Function; 3],
}

/// What is done with a matrix's products; in the order of `Kernels::wide`.
#[derive(Clone, Copy)]
enum Finish {
    Store,
    Residual,
    SiluMul,
}

impl Kernels {
    fn of(module: &Module, variant: &PrefillVariant) -> Result<Self, HostError> {
        let gemms = |shape: GemmShape, names: [&std::ffi::CStr; 3]| {
            let of = |name| {
                let function = module.function(name)?;
                function.allow_shared(gemm_block(shape).shared())?;
                Ok::<_, HostError>(function)
            };
            let [store, residual, silu] = names.map(of);
            Ok::<_, HostError>([store?, residual?, silu?])
        };
        let attention = module.function(c"amk_prefill_attention")?;
        attention.allow_shared(attend_shared(variant.head_dim))?;
        let codes = variant.unpack != 1 << Unpack::None as u32;
        Ok(Self {
            unpack: codes.then(|| module.function(c"amk_prefill_unpack")).transpose()?,
            embed: module.function(c"amk_prefill_embed")?,
            norm: module.function(c"amk_prefill_norm")?,
            heads: module.function(c"amk_prefill_heads")?,
            attention,
            logits: module.function(c"amk_prefill_logits")?,
            wide: gemms(
                GemmShape::Wide,
                [c"amk_prefill_store_wide", c"amk_prefill_residual_wide", c"amk_prefill_silu_wide"],
            )?,
            middle: gemms(
                GemmShape::Middle,
                [
                    c"amk_prefill_store_middle",
                    c"amk_prefill_residual_middle",
                    c"amk_prefill_silu_middle",
                ],
            )?,
            small: gemms(
                GemmShape::Small,
                [
                    c"amk_prefill_store_small",
                    c"amk_prefill_residual_small",
                    c"amk_prefill_silu_small",
                ],
            )?,
        })
    }
}

/// A block of the matrix products, as the kernels are compiled.
struct GemmBlock {
    tokens: u32,
    rows: u32,
    stages: u32,
    threads: u32,
    /// Microseconds that a multiprocessor takes for a unit of columns with this many blocks side by side, from one to as many as fit:
    /// measured on an H200 (docs/lab/2026-11-25-prompt.md, second run). Only their ratios matter.
    us: &'static [f64],
}

fn gemm_block(shape: GemmShape) -> GemmBlock {
    let (tokens, rows, stages, threads, us): (_, _, _, _, &[f64]) = match shape {
        GemmShape::Auto | GemmShape::Wide => (256, 128, 4, 384, &[0.40]),
        GemmShape::Middle => (128, 128, 6, 384, &[0.25]),
        GemmShape::Small => (64, 64, 4, 160, &[0.19, 0.225, 0.265]),
    };
    GemmBlock { tokens, rows, stages, threads, us }
}

impl GemmBlock {
    /// Bytes of shared memory: the stages and two barriers for each.
    fn shared(&self) -> u32 {
        let weights = self.rows / abi::UNIT_ROWS * STAGE_UNITS * abi::UNIT_BYTES;
        self.stages * (self.tokens * X_ROW_BYTES + weights + 16)
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

/// Bytes of shared memory per block of the attention: keys and values, double-buffered, and the queries.
fn attend_shared(head_dim: u32) -> u32 {
    (2 * 2 * ATTEND_KEYS + ATTEND_TOKENS) * head_dim * HALF_BYTES
}

/// The shape that is likely the fastest for a matrix, unless one is requested.
fn choose(asked: GemmShape, tokens: u32, tiles: u32, sms: u32) -> GemmShape {
    if asked != GemmShape::Auto {
        return asked;
    }
    let cost = |shape: &GemmShape| gemm_block(*shape).cost(tokens, tiles, sms);
    let best = SHAPES.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
    best.unwrap_or(GemmShape::Wide)
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
    /// A matrix of codes in 16 bits, right before its products.
    unpacked: DeviceBuffer,
    clamped: DeviceBuffer,
}

/// Kernels and memory for prompts of one model.
pub(crate) struct Prefill {
    variant: PrefillVariant,
    chunk: u32,
    plan: Plan,
    kernels: Kernels,
    buffers: Buffers,
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
        let variant = variant(graph);
        let plan = Lookup { graph, residents }.plan()?;
        let cubin = compile_prefill(&variant, arch(info)?.name, default_cache().as_deref())?;
        let module = Module::load(&cubin.image)?;
        let kernels = Kernels::of(&module, &variant)?;
        let chunk = chunk_tokens(options.chunk, residents.kv_capacity);
        let rows = |words: u32| DeviceBuffer::zeroed(u64::from(chunk) * u64::from(words) * 4);
        // A block of products reads whole blocks of tokens, so up to 255 behind the last ones.
        let vectors = |cols: u32| {
            let token_rows = u64::from(chunk) * u64::from(cols.div_ceil(X_COLS)) + 256;
            DeviceBuffer::zeroed(token_rows * u64::from(X_ROW_BYTES))
        };
        let qkv_rows = plan.layers.first().map_or(0, |layer| layer.qkv.tiles * abi::UNIT_ROWS);
        let buffers = Buffers {
            tokens: rows(1)?,
            residual: rows(graph.hidden.next_multiple_of(abi::UNIT_ROWS))?,
            normed: vectors(graph.hidden)?,
            qkv: rows(qkv_rows)?,
            queries: rows(graph.q_width() / 2)?, // of 16 bits
            attended: vectors(graph.q_width())?,
            hidden: vectors(graph.ffn)?,
            unpacked: DeviceBuffer::zeroed(unpacked_bytes(&residents.matrix_table))?,
            clamped: DeviceBuffer::zeroed(4)?,
        };
        Ok(Self {
            variant,
            chunk,
            plan,
            kernels,
            buffers,
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
        self.variant == variant(graph)
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
        copier.upload_behind(stream, self.buffers.clamped.address, &[0; 4])?;
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
        let mut clamped = [0_u8; 4];
        copier.download(self.buffers.clamped.address, &mut clamped)?;
        Ok(Prefilled {
            chunks: count,
            device_us: begin.elapsed_us(&end)?,
            flop: run.flop,
            clamped: clamped != [0; 4],
            kernels: times(run.marks.unwrap_or_default())?,
        })
    }
}

/// The id of the kernels that run a prompt of a model on an architecture such as `sm_90a`.
#[must_use]
pub fn prefill_kernel_id(graph: &Graph, arch: &str) -> String {
    compile::prefill_kernel_id(&variant(graph), arch)
}

fn variant(graph: &Graph) -> PrefillVariant {
    PrefillVariant {
        dtype: graph.dtype,
        unpack: compile::unpack_mask(&PackedModel::new(graph)),
        head_dim: graph.head_dim,
        group: graph.group(),
        qk_norm: graph.layers.iter().any(|layer| layer.attention.body.q_norm.is_some()),
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

    /// Address of the first 64 columns of a token's vector; the token's number is a multiple of 8.
    fn vector(buffer: u64, token: u32) -> u64 {
        buffer + u64::from(token) * u64::from(X_ROW_BYTES)
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
        let Prefill { kernels, buffers, chunk, hidden, eps, .. } = self.prefill;
        let stride = self.stride();
        let mut values = [
            Self::vector(buffers.normed.address, rows.first),
            buffers.residual.address + u64::from(rows.first) * u64::from(stride) * 4,
            norm,
            stride.into(),
            (*chunk).into(),
            (*hidden).into(),
            eps.to_bits().into(),
        ];
        self.launch("norm", 0.0, &kernels.norm, (rows.count, PREFILL_THREADS, 0), &mut values)
    }

    /// Address of some tiles of a matrix in 16 bits: of codes they are unpacked, `scaled` by the factors of their rows or not.
    fn unpack(
        &mut self,
        matrix: &Packed,
        first: u32,
        tiles: u32,
        scaled: bool,
    ) -> Result<u64, HostError> {
        let Prefill { kernels, buffers, .. } = self.prefill;
        let (Some(codes), Some(kernel)) = (&matrix.codes, &kernels.unpack) else {
            return Ok(matrix.address + u64::from(first) * matrix.tile_bytes());
        };
        let skipped = u64::from(first) * u64::from(codes.units) * u64::from(codes.unit_bytes);
        let row = first * abi::UNIT_ROWS;
        let mut values = [
            buffers.unpacked.address,
            codes.address + skipped,
            if scaled { codes.factors + u64::from(row) * 4 } else { 0 },
            buffers.clamped.address,
            codes.unpack as u64,
            codes.units.into(),
            matrix.units.into(),
            tiles.into(),
            (matrix.rows - row).into(),
        ];
        let warps = u64::from(tiles) * u64::from(codes.units);
        let grid = warps.div_ceil(u64::from(PREFILL_THREADS / 32)) as u32;
        self.launch("unpack", 0.0, kernel, (grid, PREFILL_THREADS, 0), &mut values)?;
        Ok(buffers.unpacked.address)
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
        let address = self.unpack(matrix, 0, matrix.tiles, matrix.factors() == 0)?;
        let Prefill { kernels, buffers, chunk, sms, .. } = self.prefill;
        let shape = choose(self.shape, rows.count, matrix.tiles, *sms);
        let block = gemm_block(shape);
        let set = match shape {
            GemmShape::Auto | GemmShape::Wide => &kernels.wide,
            GemmShape::Middle => &kernels.middle,
            GemmShape::Small => &kernels.small,
        };
        let (stride, out) = if let Finish::SiluMul = finish {
            (*chunk, Self::vector(out, rows.first))
        } else {
            let stride = matrix.tiles * abi::UNIT_ROWS;
            (stride, out + u64::from(rows.first) * u64::from(stride) * 4)
        };
        let scale = match finish {
            Finish::SiluMul => HIDDEN_SCALE,
            _ if x == buffers.hidden.address => 1.0 / HIDDEN_SCALE,
            Finish::Store | Finish::Residual => 1.0,
        };
        let mut values = [
            out,
            Self::vector(x, rows.first),
            address,
            matrix.bias,
            buffers.clamped.address,
            matrix.units.into(),
            matrix.tiles.into(),
            rows.count.into(),
            stride.into(),
            (*chunk).into(),
            scale.to_bits().into(),
            matrix.factors(), // a parameter of the kernels for codes only, so it is the last
        ];
        let flop = 2.0 * f64::from(rows.count) * f64::from(matrix.rows) * f64::from(matrix.cols);
        let blocks = block.count(rows.count, matrix.tiles).min(block.beside() * sms);
        let place = (blocks, block.threads, block.shared());
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
        let Prefill { kernels, buffers, chunk, variant, heads, kv_heads, .. } = self.prefill;
        let q_bytes = heads * variant.head_dim * HALF_BYTES; // per token
        let grid = rows.count.div_ceil(ATTEND_TOKENS) * heads;
        let mut values = [
            Self::vector(buffers.attended.address, rows.first),
            buffers.queries.address + u64::from(rows.first) * u64::from(q_bytes),
            layer.cache,
            self.pages,
            (*chunk).into(),
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

    /// Logits of the last token of `rows`: of codes part by part, as many rows as there is room for.
    fn logits(&mut self, rows: Rows) -> Result<(), HostError> {
        let Prefill { kernels, buffers, chunk, plan, vocab, hidden, sms, .. } = self.prefill;
        self.norm(plan.final_norm, rows)?;
        let (token, matrix) = (rows.first + rows.count - 1, &plan.lm_head);
        let room = match matrix.codes {
            Some(_) => {
                (buffers.unpacked.bytes / matrix.tile_bytes()).min(u64::from(matrix.tiles)) as u32
            }
            None => matrix.tiles,
        };
        for first in (0..matrix.tiles).step_by(room as usize) {
            let weights = self.unpack(matrix, first, room.min(matrix.tiles - first), true)?;
            let row = first * abi::UNIT_ROWS;
            let count = (vocab - row).min(room * abi::UNIT_ROWS);
            let mut values = [
                plan.logits + u64::from(row) * 4,
                weights,
                buffers.normed.address,
                (*chunk).into(),
                token.into(),
                matrix.units.into(),
                count.into(),
            ];
            let flop = 2.0 * f64::from(count) * f64::from(*hidden);
            let place = (sms * 8, PREFILL_THREADS, 0);
            self.launch("logits", flop, &kernels.logits, place, &mut values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The estimate picks the faster shape wherever a measurement showed at least 10 % difference.
    #[test]
    fn the_form_that_was_measured_to_be_faster_is_chosen() {
        use GemmShape::{Auto, Middle, Small, Wide};
        let measured = [
            ("llama-3.2-1b gate_up", 2048, 16384, Wide), // 202 us against 267 and 365
            ("llama-3.2-1b gate_up", 500, 16384, Wide),  // 54 against 68 and 93
            ("llama-3.2-1b gate_up", 129, 16384, Wide),  // 32 against 37 and 38
            ("llama-3.2-1b down", 2048, 2048, Wide),     // 103 against 128 and 199
            ("llama-3.2-1b down", 1000, 2048, Middle),   // 64 against 93 and 116
            ("llama-3.2-1b down", 129, 2048, Small),     // 50 against 60 and 86
            ("llama-3.2-1b o", 1000, 2048, Middle),      // 26 against 35 and 37
            ("llama-3.2-1b o", 64, 2048, Small),         // 17 against 20 and 27
            ("llama-3.2-1b qkv", 1000, 3072, Wide),      // 30 against 37 and 39
            ("llama-3.2-1b qkv", 500, 3072, Middle),     // 20 against 22 and 28
            ("llama-3.2-1b qkv", 64, 3072, Small),       // 17 against 19 and 26
        ];
        for (name, tokens, rows, faster) in measured {
            assert_eq!(choose(Auto, tokens, rows / 8, 132), faster, "{name}, {tokens} tokens");
        }
        assert_eq!(choose(Small, 2048, 2048, 132), Small, "asked for");
    }

    #[test]
    fn every_row_and_token_has_a_block() {
        for shape in SHAPES {
            let block = gemm_block(shape);
            assert_eq!(block.count(1, 1), 1);
            assert_eq!(block.count(block.tokens + 1, block.rows / 8 + 1), 4, "{shape:?}");
        }
    }

    #[test]
    fn blocks_fit_the_shared_memory_and_chunks_the_cache() {
        for shape in SHAPES {
            let block = gemm_block(shape);
            assert!(block.beside() * (block.shared() + 1024) <= 228 << 10, "{shape:?}");
        }
        assert_eq!((chunk_tokens(2048, 64), chunk_tokens(2048, 4096)), (128, 2048));
        assert_eq!((chunk_tokens(1, 4096), chunk_tokens(500, 4096)), (128, 512));
    }
}
