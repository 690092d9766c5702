//! A device's part of a chunk: its kernels and memory, and what it enqueues.

use abi::{ATTEND_TOKENS, PREFILL_THREADS};
use ir::Graph;
use vm_device::PrefillVariant;

use super::experts::{self, ExpertBuffers};
use super::kernels::{Finish, Kernels, attend_shared, choose, gemm_block};
use super::plan::{LayerPlan, Lookup, Packed, Plan, unpacked_bytes};
use super::share::{Piece, Rows, Shared, columns_before, rows_of, vectors_of};
use super::{ATTEND_THREADS, GemmShape, HALF_BYTES, HIDDEN_SCALE, X_COLS, X_ROW_BYTES};
use crate::driver::{Event, Function, Module, Stream};
use crate::error::HostError;
use crate::load::Residents;
use crate::memory::DeviceBuffer;

/// Memory of one chunk. Residual stream, attended and hidden vectors are whole on each device, the rest is of its own rows and heads.
pub(super) struct Buffers {
    pub(super) tokens: DeviceBuffer,
    pub(super) residual: DeviceBuffer,
    pub(super) normed: DeviceBuffer,
    /// What a block adds to the residual stream, before its norm.
    results: DeviceBuffer,
    qkv: DeviceBuffer,
    queries: DeviceBuffer,
    attended: DeviceBuffer,
    pub(super) hidden: DeviceBuffer,
    /// A matrix of codes in 16 bits, right before its products.
    pub(super) unpacked: DeviceBuffer,
    pub(super) clamped: DeviceBuffer,
    pub(super) experts: Option<ExpertBuffers>,
}

/// Kernels and memory of a device, and its rows and heads.
pub(super) struct Part {
    pub(super) variant: PrefillVariant,
    pub(super) chunk: u32,
    pub(super) plan: Plan,
    pub(super) kernels: Kernels,
    pub(super) buffers: Buffers,
    heads: u32,
    kv_heads: u32,
    /// Column of the attended vectors where its heads begin.
    first_column: u32,
    /// Rows of its queries, keys and values.
    qkv_rows: u32,
    hidden: u32,
    vocab: u32,
    eps: f32,
    scale: f32,
    embed_scale: f32,
    /// Of scores and of logits, or 0.
    caps: [f32; 2],
    pub(super) sms: u32,
    _module: Module, // dropped last: the kernels belong to it
}

/// A launch of the matrix products.
pub(super) struct Products {
    pub(super) finish: Finish,
    pub(super) shape: GemmShape,
    /// Blocks of the whole work, at most.
    pub(super) blocks: u32,
    /// In 16 bits.
    pub(super) weights: u64,
    pub(super) x: u64,
    pub(super) out: u64,
    /// Words of a row of `out`, or tokens of a vector's columns.
    pub(super) stride: u32,
    /// Tokens of the columns of `x`.
    pub(super) pitch: u32,
    pub(super) tokens: u32,
    pub(super) scale: f32,
    /// Of experts: addresses of their first blocks and of the blocks, the first expert and their number, the limit of the activation.
    pub(super) experts: [u64; 5],
}

/// Bytes of the vectors of this many tokens. A block of products reads whole blocks of tokens, so up to 255 behind the last ones.
pub(super) fn vector_bytes(cols: u32, tokens: u32) -> u64 {
    let token_rows = u64::from(tokens) * u64::from(cols.div_ceil(X_COLS)) + 256;
    token_rows * u64::from(X_ROW_BYTES)
}

/// What has been enqueued on a device's stream.
pub(super) struct Run<'a> {
    pub(super) part: &'a Part,
    pub(super) stream: &'a Stream,
    pub(super) shape: GemmShape,
    /// Experts that are unpacked at once, at most.
    pub(super) experts: u32,
    /// Timed kernels: name, flop, begin and end.
    pub(super) marks: Option<Vec<(&'static str, f64, Event, Event)>>,
    pub(super) flop: f64,
    /// Address of the session's row of pages.
    pub(super) pages: u64,
}

impl Part {
    /// Loads and allocates on the GPU whose context is current.
    pub(super) fn new(
        graph: &Graph,
        residents: &Residents,
        (device, sms): (u32, u32),
        (variant, image): (&PrefillVariant, &[u8]),
        chunk: u32,
    ) -> Result<Self, HostError> {
        let plan = Lookup { graph, residents, device }.plan()?;
        let module = Module::load(image)?;
        let kernels = Kernels::of(&module, variant)?;
        let here = &residents.devices[device as usize];
        let rows =
            |words: u32| DeviceBuffer::zeroed((u64::from(chunk) * u64::from(words) * 4).max(4));
        let vectors = |cols: u32| DeviceBuffer::zeroed(vector_bytes(cols, chunk));
        let (qkv_rows, kv_heads) = plan.own_heads(graph).ok_or_else(|| {
            HostError::Request(format!(
                "{}: device {device} has parts of heads; --prefill steps runs its prompts",
                graph.name
            ))
        })?;
        let q_width = kv_heads * graph.group() * graph.head_dim;
        let stride = graph.hidden.next_multiple_of(abi::UNIT_ROWS);
        let buffers = Buffers {
            tokens: rows(1)?,
            residual: rows(stride)?,
            results: rows(if kernels.post_norm.is_some() { stride } else { 0 })?,
            normed: vectors(graph.hidden)?,
            qkv: rows(qkv_rows)?,
            queries: rows(q_width / 2)?, // of 16 bits
            attended: vectors(graph.q_width())?,
            hidden: vectors(experts::dense_width(graph))?,
            unpacked: DeviceBuffer::zeroed(unpacked_bytes(&residents.matrix_table))?,
            clamped: DeviceBuffer::zeroed(4)?,
            experts: ExpertBuffers::new(graph, chunk)?,
        };
        Ok(Self {
            variant: *variant,
            chunk,
            plan,
            kernels,
            buffers,
            heads: kv_heads * graph.group(),
            kv_heads,
            first_column: here.first_head * graph.group() * graph.head_dim,
            qkv_rows,
            hidden: graph.hidden,
            vocab: graph.vocab,
            eps: graph.norm_eps,
            scale: graph.attn_scale,
            embed_scale: graph.embed_scale,
            caps: [graph.score_cap, graph.logit_cap].map(|cap| cap.unwrap_or(0.0)),
            sms,
            _module: module,
        })
    }

    /// Words per row of the residual stream.
    pub(super) fn stride(&self) -> u32 {
        self.hidden.next_multiple_of(abi::UNIT_ROWS)
    }

    /// A buffer that all devices have whole, and the piece of it that this device has computed in a layer.
    pub(super) fn shared(&self, what: Shared, index: usize, rows: Rows) -> (u64, Piece) {
        let (layer, buffers) = (&self.plan.layers[index], &self.buffers);
        let added = |matrix: &Packed| {
            let columns = matrix.row()..matrix.row() + matrix.expert_tiles() * abi::UNIT_ROWS;
            (buffers.residual.address, rows_of(columns, self.stride(), rows))
        };
        let experts = layer.router.as_ref().zip(buffers.experts.as_ref());
        let nothing = (0, Piece::default()); // a layer without experts has none to share
        match what {
            Shared::Attended => {
                let end = self.first_column + self.heads * self.variant.head_dim;
                let piece = vectors_of(self.first_column..end, self.chunk, rows);
                (buffers.attended.address, piece)
            }
            Shared::Hidden => {
                let shared = layer.router.as_ref().and_then(|router| router.shared.as_ref());
                let columns = shared.map_or(&layer.gate_up, |[up, _]| up).hidden_columns();
                (buffers.hidden.address, vectors_of(columns, self.chunk, rows))
            }
            Shared::ExpertLogits => {
                experts.map_or(nothing, |(router, own)| own.shared_logits(router, rows))
            }
            Shared::Experts => experts.map_or(nothing, |(router, own)| {
                own.shared_hidden(layer.gate_up.hidden_columns(), rows.count * router.slots)
            }),
            Shared::Output => added(&layer.o),
            Shared::Down => added(&layer.down),
        }
    }
}

impl Run<'_> {
    /// Launches a kernel. Each value is one of its parameters, in the order of its declaration; the low bytes are used.
    pub(super) fn launch(
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
        let event = || self.stream.owner().within(Event::new);
        let (begin, end) = (event()?, event()?);
        begin.record(self.stream)?;
        self.stream.launch(kernel, grid, block, shared, &mut arguments)?;
        end.record(self.stream)?;
        marks.push((name, flop, begin, end));
        Ok(())
    }

    /// The keys and values of a layer, and the queries.
    pub(super) fn keys(&mut self, index: usize, start: u32, count: u32) -> Result<(), HostError> {
        let Part { plan, buffers, qkv_rows, .. } = self.part;
        let (layer, rows) = (&plan.layers[index], Rows { first: 0, count });
        self.norm(layer.attn_norm, rows)?;
        let mut to = buffers.qkv.address;
        for run in &layer.qkv {
            let out = (to, *qkv_rows);
            self.gemm("qkv", Finish::Store, run, buffers.normed.address, out, rows)?;
            to += u64::from(run.tiles * abi::UNIT_ROWS) * 4;
        }
        self.norm_heads(layer, count)?;
        self.heads(layer, start, count)
    }

    /// The residual stream after the attention.
    pub(super) fn output(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, .. } = self.part;
        let layer = &plan.layers[index];
        self.add("o", &layer.o, layer.post_norms[0], buffers.attended.address, rows)
    }

    /// The hidden layer.
    pub(super) fn gate_up(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, chunk, .. } = self.part;
        let layer = &plan.layers[index];
        self.norm(layer.mlp_norm, rows)?;
        let to = buffers.hidden.address + columns_before(layer.gate_up.row() / 2, *chunk);
        let (x, out) = (buffers.normed.address, (to, *chunk));
        self.gemm("gate_up", Finish::SiluMul, &layer.gate_up, x, out, rows)
    }

    /// The residual stream after the MLP.
    pub(super) fn down(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, .. } = self.part;
        let layer = &plan.layers[index];
        self.add("down", &layer.down, layer.post_norms[1], buffers.hidden.address, rows)
    }

    /// Adds products to their rows of the residual stream, or what the norm of their block makes of them: then they are all of its rows.
    fn add(
        &mut self,
        name: &'static str,
        matrix: &Packed,
        post_norm: u64,
        x: u64,
        rows: Rows,
    ) -> Result<(), HostError> {
        let Part { kernels, buffers, hidden, eps, .. } = self.part;
        let stride = self.part.stride();
        let Some(kernel) = kernels.post_norm.as_ref().filter(|_| post_norm != 0) else {
            let to = buffers.residual.address + u64::from(matrix.row()) * 4;
            return self.gemm(name, Finish::Residual, matrix, x, (to, stride), rows);
        };
        self.gemm(name, Finish::Store, matrix, x, (buffers.results.address, stride), rows)?;
        let skipped = u64::from(rows.first) * u64::from(stride) * 4;
        let mut values = [
            buffers.residual.address + skipped,
            buffers.results.address + skipped,
            post_norm,
            stride.into(),
            (*hidden).into(),
            eps.to_bits().into(),
        ];
        self.launch("post_norm", 0.0, kernel, (rows.count, PREFILL_THREADS, 0), &mut values)
    }

    /// Queries and keys that are normalised over all heads.
    fn norm_heads(&mut self, layer: &LayerPlan, count: u32) -> Result<(), HostError> {
        let Part { kernels, buffers, variant, heads, kv_heads, qkv_rows, eps, .. } = self.part;
        let Some(kernel) = kernels.norm_heads.as_ref().filter(|_| layer.heads_norm != 0) else {
            return Ok(());
        };
        let mut values = [
            buffers.qkv.address,
            layer.heads_norm,
            (*qkv_rows).into(),
            (heads * variant.head_dim).into(),
            (kv_heads * variant.head_dim).into(),
            eps.to_bits().into(),
        ];
        self.launch("norm_heads", 0.0, kernel, (2 * count, PREFILL_THREADS, 0), &mut values)
    }

    /// Address of the first 64 columns of a token's vector; the token's number is a multiple of 8.
    pub(super) fn vector(buffer: u64, token: u32) -> u64 {
        buffer + u64::from(token) * u64::from(X_ROW_BYTES)
    }

    pub(super) fn embed(&mut self, count: u32) -> Result<(), HostError> {
        let Part { kernels, buffers, plan, .. } = self.part;
        let mut values = [
            buffers.residual.address,
            plan.embed.address,
            buffers.tokens.address,
            self.part.stride().into(),
            plan.embed.units.into(),
            self.part.embed_scale.to_bits().into(),
        ];
        self.launch("embed", 0.0, &kernels.embed, (count, PREFILL_THREADS, 0), &mut values)
    }

    pub(super) fn norm(&mut self, norm: u64, rows: Rows) -> Result<(), HostError> {
        let Part { kernels, buffers, chunk, hidden, eps, .. } = self.part;
        let stride = self.part.stride();
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

    /// Address of some tiles of a matrix in 16 bits: of codes they are unpacked, `scaled` by the factors of their rows or not. Of experts they
    /// are whole ones, and those that no token has chosen are left out.
    pub(super) fn unpack(
        &mut self,
        matrix: &Packed,
        first: u32,
        tiles: u32,
        scaled: bool,
    ) -> Result<u64, HostError> {
        let Part { kernels, buffers, .. } = self.part;
        let (Some(codes), Some(kernel)) = (&matrix.codes, &kernels.unpack) else {
            return Ok(matrix.address + u64::from(first) * matrix.tile_bytes());
        };
        let skipped = u64::from(first) * u64::from(codes.units) * u64::from(codes.unit_bytes);
        let (row, rows, counts, each) = match &buffers.experts {
            Some(experts) if matrix.experts > 1 => {
                let each = matrix.expert_tiles();
                (0, matrix.rows / matrix.experts, experts.count_of(first / each), each)
            }
            _ => (first * abi::UNIT_ROWS, matrix.rows - first * abi::UNIT_ROWS, 0, tiles.max(1)),
        };
        let mut values = [
            buffers.unpacked.address,
            codes.address + skipped,
            if scaled { codes.factors + u64::from(row) * 4 } else { 0 },
            buffers.clamped.address,
            codes.unpack as u64,
            codes.units.into(),
            matrix.units.into(),
            tiles.into(),
            rows.into(),
            counts, // these two are parameters of the kernels for experts only
            each.into(),
        ];
        let warps = u64::from(tiles) * u64::from(codes.units);
        let grid = warps.div_ceil(u64::from(PREFILL_THREADS / 32)) as u32;
        self.launch("unpack", 0.0, kernel, (grid, PREFILL_THREADS, 0), &mut values)?;
        Ok(buffers.unpacked.address)
    }

    /// Multiplies the vectors of `x` by a matrix, into rows of a stride or, for the hidden layer, vectors.
    pub(super) fn gemm(
        &mut self,
        name: &'static str,
        finish: Finish,
        matrix: &Packed,
        x: u64,
        (out, stride): (u64, u32),
        rows: Rows,
    ) -> Result<(), HostError> {
        if matrix.tiles == 0 {
            return Ok(()); // other devices have all rows
        }
        let weights = self.unpack(matrix, 0, matrix.tiles, matrix.factors() == 0)?;
        let Part { buffers, chunk, sms, .. } = self.part;
        let shape = choose(self.shape, rows.count, matrix.tiles, *sms);
        let out = match finish {
            Finish::SiluMul => Self::vector(out, rows.first),
            Finish::Store | Finish::Residual => out + u64::from(rows.first) * u64::from(stride) * 4,
        };
        let scale = match finish {
            Finish::SiluMul => HIDDEN_SCALE,
            _ if x == buffers.hidden.address => 1.0 / HIDDEN_SCALE,
            Finish::Store | Finish::Residual => 1.0,
        };
        let flop = 2.0 * f64::from(rows.count) * f64::from(matrix.rows) * f64::from(matrix.cols);
        let blocks = gemm_block(shape).count(rows.count, matrix.tiles);
        let (x, pitch, tokens) = (Self::vector(x, rows.first), *chunk, rows.count);
        let experts = [0; 5];
        let work = Products {
            finish,
            shape,
            blocks,
            weights,
            x,
            out,
            stride,
            pitch,
            tokens,
            scale,
            experts,
        };
        self.products(name, flop, matrix, &work)
    }

    /// Launches matrix products.
    pub(super) fn products(
        &mut self,
        name: &'static str,
        flop: f64,
        matrix: &Packed,
        work: &Products,
    ) -> Result<(), HostError> {
        let Part { kernels, buffers, sms, .. } = self.part;
        let block = gemm_block(work.shape);
        let set = match work.shape {
            GemmShape::Auto | GemmShape::Wide => &kernels.wide,
            GemmShape::Middle => &kernels.middle,
            GemmShape::Small => &kernels.small,
        };
        let of_experts = work.experts[0] != 0;
        let tiles = if of_experts { matrix.expert_tiles() } else { matrix.tiles };
        let [first_blocks, blocks, first, count, limit] = work.experts;
        let mut values = [
            work.out,
            work.x,
            work.weights,
            matrix.bias,
            buffers.clamped.address,
            matrix.units.into(),
            tiles.into(),
            work.tokens.into(),
            work.stride.into(),
            work.pitch.into(),
            work.scale.to_bits().into(),
            matrix.factors(), // a parameter of the kernels for codes or experts only, those behind it for experts only
            first_blocks,
            blocks,
            first,
            count,
            limit,
        ];
        let place = (work.blocks.min(block.beside() * sms), block.threads, block.shared());
        self.launch(name, flop, &set[work.finish as usize], place, &mut values)
    }

    fn heads(&mut self, layer: &LayerPlan, start: u32, count: u32) -> Result<(), HostError> {
        let Part { kernels, buffers, variant, heads, kv_heads, qkv_rows, .. } = self.part;
        if *kv_heads == 0 {
            return Ok(()); // other devices have them all
        }
        let of_head = (variant.head_dim / 8).next_power_of_two(); // as op_attention.cuh has it
        let threads = u64::from(count) * u64::from(heads + 2 * kv_heads) * u64::from(of_head);
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
            (*qkv_rows).into(),
            (*kv_heads).into(),
            start.into(),
            self.part.eps.to_bits().into(),
            self.part.scale.to_bits().into(),
        ];
        self.launch("heads", 0.0, &kernels.heads, (grid, PREFILL_THREADS, 0), &mut values)
    }

    pub(super) fn attention(
        &mut self,
        index: usize,
        start: u32,
        rows: Rows,
    ) -> Result<(), HostError> {
        let Part { kernels, buffers, chunk, variant, heads, kv_heads, .. } = self.part;
        let layer = &self.part.plan.layers[index];
        if *kv_heads == 0 {
            return Ok(()); // as in `heads`
        }
        let to = buffers.attended.address + columns_before(self.part.first_column, *chunk);
        let q_bytes = heads * variant.head_dim * HALF_BYTES; // per token
        let grid = rows.count.div_ceil(ATTEND_TOKENS) * heads;
        let mut values = [
            Self::vector(to, rows.first),
            buffers.queries.address + u64::from(rows.first) * u64::from(q_bytes),
            layer.cache,
            self.pages,
            (*chunk).into(),
            rows.count.into(),
            (*kv_heads).into(),
            (start + rows.first).into(),
            layer.window.into(),
            self.part.caps[0].to_bits().into(),
            layer.sinks, // a parameter of the kernels for sinks only
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

    /// Logits of the last token of `rows`, stored to the first device by all: of codes part by part, as many rows as there is room for.
    pub(super) fn logits(&mut self, rows: Rows) -> Result<(), HostError> {
        let Part { kernels, buffers, chunk, plan, vocab, hidden, sms, .. } = self.part;
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
            let row = matrix.row() + first * abi::UNIT_ROWS;
            let here = matrix.rows - first * abi::UNIT_ROWS;
            let count = here.min(*vocab - row).min(room * abi::UNIT_ROWS);
            let mut values = [
                plan.logits + u64::from(row) * 4,
                weights,
                buffers.normed.address,
                (*chunk).into(),
                token.into(),
                matrix.units.into(),
                count.into(),
                self.part.caps[1].to_bits().into(),
            ];
            let flop = 2.0 * f64::from(count) * f64::from(*hidden);
            let place = (sms * 8, PREFILL_THREADS, 0);
            self.launch("logits", flop, &kernels.logits, place, &mut values)?;
        }
        Ok(())
    }
}
