//! Experts in a chunk (prefill_route.cuh): tokens choose, and each chosen expert is multiplied by its tokens. The host knows how many choices there
//! are, not of which experts, so all launches and all memory are for any choice.

use std::ops::Range;

use abi::{PREFILL_THREADS, UNIT_ROWS};
use ir::program::PackedModel;
use ir::{Experts, FeedForward, Gated, Graph};

use super::kernels::{Finish, choose_of_experts, gemm_block};
use super::part::{Part, Products, Run, vector_bytes};
use super::plan::{LayerPlan, Packed, RouterPlan, unpacked_bytes};
use super::share::{Piece, Rows, columns_before, rows_of, rows_of_layer, vectors_of};
use super::{CHUNK_TOKENS, GemmShape, HIDDEN_SCALE, SHAPES, X_COLS, chunk_tokens};
use crate::error::HostError;
use crate::memory::{Copier, DeviceBuffer};

/// Places of an expert's tokens begin with a multiple (prefill_route.cuh).
const PLACES: u32 = 8;
/// Bytes of a block of an expert's tokens.
const BLOCK_BYTES: u64 = 16;
/// Experts that kernels have keys for in shared memory without asking for more than any kernel has.
const EXPERTS_MAX: u32 = 1024;

/// Why experts or sinks are not run in chunks, if they are not.
pub(super) fn refused(graph: &Graph, devices: u32) -> Option<&'static str> {
    let mut all = graph.layers.iter().filter_map(experts_of);
    let sinks = graph.layers.iter().any(|layer| layer.attention.body.sinks.is_some());
    // A device finds its rows' biases by its own number of rows of an expert, and all have those of all.
    let biased =
        |expert: &Gated| [expert.gate, expert.up, expert.down].map(|m| m.bias) != [None; 3];
    let biases = all.clone().any(|experts| experts.experts.iter().any(biased));
    if devices > 1 && (sinks || biases) {
        return Some("sinks and biases of experts run in chunks on one GPU only so far");
    }
    let normed = |layer: &ir::Layer| experts_of(layer).is_some() && layer.mlp.post_norm.is_some();
    if graph.layers.iter().any(normed) {
        return Some("chunks have no norm of what experts add");
    }
    let fits = |experts: &Experts| {
        experts.experts.len() <= EXPERTS_MAX as usize && graph.hidden.is_multiple_of(UNIT_ROWS)
    };
    (!all.all(fits)).then_some("chunks have room for 1024 experts with whole tiles of 8 rows")
}

fn experts_of(layer: &ir::Layer) -> Option<&Experts> {
    match &layer.mlp.body {
        FeedForward::Experts(experts) => Some(experts),
        FeedForward::Gated(_) => None,
    }
}

/// Widths of a layer's hidden layers.
pub(super) fn widths(graph: &Graph, layer: &ir::Layer) -> impl Iterator<Item = u32> {
    let (width, shared) = match experts_of(layer) {
        Some(experts) => (graph.expert_width(experts), experts.shared.map(|shared| shared.ffn)),
        None => (graph.ffn, None),
    };
    std::iter::once(width).chain(shared)
}

/// Width of the hidden layers that every token has.
pub(super) fn dense_width(graph: &Graph) -> u32 {
    let width = |layer: &ir::Layer| match experts_of(layer) {
        Some(experts) => experts.shared.map_or(0, |shared| shared.ffn),
        None => graph.ffn,
    };
    graph.layers.iter().map(width).max().unwrap_or(0)
}

/// What the memory for experts follows from: the greatest number of each kind in any layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sizes {
    chunk: u32,
    layers: u32,
    experts: u32,
    slots: u32,
    /// Of an expert's hidden layer.
    width: u32,
    hidden: u32,
    shared: bool,
}

impl Sizes {
    /// None of a graph without experts.
    fn of(graph: &Graph, chunk: u32) -> Option<Self> {
        let all = || graph.layers.iter().filter_map(experts_of);
        let most = |number: &dyn Fn(&Experts) -> u32| all().map(number).max().unwrap_or(0);
        all().next().map(|_| Self {
            chunk,
            layers: all().count() as u32,
            experts: most(&|experts| experts.experts.len() as u32),
            slots: most(&|experts| experts.top_k),
            width: most(&|experts| graph.expert_width(experts)),
            hidden: graph.hidden,
            shared: all().any(|experts| experts.shared.is_some()),
        })
    }

    /// Choices of a layer.
    fn choices(&self) -> u32 {
        self.chunk * self.slots
    }

    /// Places of all choices, whichever they are.
    fn places(&self) -> u32 {
        self.places_of(self.choices())
    }

    /// Places that `choices` choices take at most: each expert's places are a multiple of `PLACES`, so some stay empty.
    fn places_of(&self, choices: u32) -> u32 {
        let chosen = self.experts.min(choices);
        (choices + chosen * (PLACES - 1)).next_multiple_of(PLACES)
    }

    /// Bytes of the buffers, in their order.
    fn bytes(&self) -> [u64; 11] {
        let words = |count: u64| 4 * count.max(1);
        let (choices, chunk) = (u64::from(self.choices()), u64::from(self.chunk));
        let smallest = SHAPES.map(|shape| gemm_block(shape).tokens).into_iter().min();
        let blocks = choices / u64::from(smallest.unwrap_or(1)) + u64::from(self.experts) + 1;
        let logits = (self.experts + 1).next_multiple_of(UNIT_ROWS);
        let shared = if self.shared { chunk * u64::from(self.hidden) } else { 0 };
        [
            words(chunk * u64::from(logits)),
            words(u64::from(self.layers) * choices),
            words(choices + chunk),
            words(choices),
            words(choices),
            words(3 * (u64::from(self.experts) + 1)),
            BLOCK_BYTES * blocks,
            vector_bytes(self.hidden, self.places()),
            vector_bytes(self.width, self.places()),
            words(u64::from(self.places()) * u64::from(self.hidden)),
            words(shared),
        ]
    }
}

/// Bytes that a device's prompts in chunks take which grow with the model's experts or its codes. What all models need
/// comes from the memory that is left free anyway.
pub(crate) fn workspace_bytes(graph: &Graph, capacity: u32) -> u64 {
    let sizes = Sizes::of(graph, chunk_tokens(CHUNK_TOKENS, capacity));
    let of_experts = sizes.map_or(0, |sizes| sizes.bytes().iter().sum());
    of_experts + unpacked_bytes(&PackedModel::new(graph).matrices)
}

/// Memory for the experts of one chunk.
pub(super) struct ExpertBuffers {
    sizes: Sizes,
    logits: DeviceBuffer,
    /// Experts by token and slot, of each layer.
    chosen: DeviceBuffer,
    /// By token and slot, behind them that of the shared expert.
    weights: DeviceBuffer,
    /// Number of a choice among its expert's.
    ranks: DeviceBuffer,
    /// Place of a choice.
    places: DeviceBuffer,
    /// Of each expert: choices, first place, first block.
    of_experts: DeviceBuffer,
    blocks: DeviceBuffer,
    /// Vectors by place.
    gathered: DeviceBuffer,
    hidden: DeviceBuffer,
    products: DeviceBuffer,
    /// Products of the shared expert, by token.
    shared: DeviceBuffer,
}

impl ExpertBuffers {
    /// Allocates on the GPU whose context is current. None for a graph without experts.
    pub(super) fn new(graph: &Graph, chunk: u32) -> Result<Option<Self>, HostError> {
        let Some(sizes) = Sizes::of(graph, chunk) else { return Ok(None) };
        let mut buffers = Vec::new();
        for bytes in sizes.bytes() {
            buffers.push(DeviceBuffer::zeroed(bytes)?);
        }
        let Ok(
            [
                logits,
                chosen,
                weights,
                ranks,
                places,
                of_experts,
                blocks,
                gathered,
                hidden,
                products,
                shared,
            ],
        ) = <[DeviceBuffer; 11]>::try_from(buffers)
        else {
            return Ok(None); // as many as there are sizes
        };
        Ok(Some(Self {
            sizes,
            logits,
            chosen,
            weights,
            ranks,
            places,
            of_experts,
            blocks,
            gathered,
            hidden,
            products,
            shared,
        }))
    }

    /// Address of the number of choices of an expert.
    pub(super) fn count_of(&self, expert: u32) -> u64 {
        self.of_experts.address + u64::from(expert) * 4
    }

    /// Addresses of the first place and of the first block of each expert.
    fn firsts(&self) -> [u64; 2] {
        let words = self.sizes.experts + 1;
        [self.count_of(words), self.count_of(2 * words)]
    }

    /// The columns that a device has computed of the logits, of some tokens.
    pub(super) fn shared_logits(&self, router: &RouterPlan, rows: Rows) -> (u64, Piece) {
        let logits = &router.logits;
        let columns = logits.row()..logits.row() + logits.tiles * UNIT_ROWS;
        (self.logits.address, rows_of(columns, router.stride(), rows))
    }

    /// The columns that a device has computed of the hidden layers, of all places that so many tokens may have.
    pub(super) fn shared_hidden(&self, columns: Range<u32>, choices: u32) -> (u64, Piece) {
        let places = Rows { first: 0, count: self.sizes.places_of(choices) };
        (self.hidden.address, vectors_of(columns, self.sizes.places(), places))
    }

    /// Address of the experts that the tokens of a layer chose.
    fn chosen_in(&self, layer: u32) -> u64 {
        self.chosen.address + u64::from(layer) * u64::from(self.sizes.choices()) * 4
    }
}

/// The experts that the tokens of a chunk chose in one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkRoutes {
    /// The first token of the chunk that the layer ran: the last layer runs only those around the token whose logits are requested.
    pub first: u32,
    /// The experts of each token from there on, the best first.
    pub chosen: Vec<Vec<u32>>,
}

impl Part {
    /// What the last chunk chose, which had `count` tokens and logits: of each layer with experts.
    pub(super) fn routes(
        &self,
        copier: &Copier,
        count: u32,
    ) -> Result<Vec<ChunkRoutes>, HostError> {
        let Some(own) = &self.buffers.experts else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for (index, layer) in self.plan.layers.iter().enumerate() {
            let Some(router) = &layer.router else { continue };
            let rows = rows_of_layer(index, self.plan.layers.len(), count);
            let words = (rows.count * router.slots) as usize;
            let words: Vec<u32> = copier.values(own.chosen_in(router.number), words)?;
            let tokens = words.chunks(router.slots.max(1) as usize);
            all.push(ChunkRoutes {
                first: rows.first,
                chosen: tokens.map(<[u32]>::to_vec).collect(),
            });
        }
        Ok(all)
    }
}

/// Products of all experts with their places.
struct OfExperts {
    finish: Finish,
    shape: GemmShape,
    x: u64,
    out: u64,
    stride: u32,
    scale: f32,
    limit: f32,
    choices: u32,
}

impl Run<'_> {
    /// The logits that a layer's experts are chosen by.
    pub(super) fn expert_logits(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, .. } = self.part;
        let layer = &plan.layers[index];
        let (Some(router), Some(own)) = (&layer.router, &buffers.experts) else { return Ok(()) };
        self.norm(layer.mlp_norm, rows)?;
        let to = own.logits.address + u64::from(router.logits.row()) * 4;
        let (x, out) = (buffers.normed.address, (to, router.stride()));
        self.gemm("router", Finish::Store, &router.logits, x, out, rows)
    }

    /// The hidden layers of the experts that tokens choose, and of the shared one.
    pub(super) fn experts_up(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, chunk, .. } = self.part;
        let layer = &plan.layers[index];
        let (Some(router), Some(own)) = (&layer.router, &buffers.experts) else { return Ok(()) };
        self.route(router, own, rows)?;
        let (shape, pitch) = (self.shape_of_experts(layer, router, rows), own.sizes.places());
        self.group(router, own, (rows, gemm_block(shape).tokens))?;
        let up = OfExperts {
            finish: Finish::SiluMul,
            shape,
            x: own.gathered.address,
            out: own.hidden.address + columns_before(layer.gate_up.row() / 2, pitch),
            stride: pitch,
            scale: HIDDEN_SCALE,
            limit: router.limit,
            choices: rows.count * router.slots,
        };
        self.of_experts("experts_up", &layer.gate_up, own, &up)?;
        let Some([up, _]) = &router.shared else { return Ok(()) };
        let to = buffers.hidden.address + columns_before(up.row() / 2, *chunk);
        self.gemm("shared_up", Finish::SiluMul, up, buffers.normed.address, (to, *chunk), rows)
    }

    /// The residual stream after a layer's experts.
    pub(super) fn experts_down(&mut self, index: usize, rows: Rows) -> Result<(), HostError> {
        let Part { plan, buffers, .. } = self.part;
        let layer = &plan.layers[index];
        let (Some(router), Some(own)) = (&layer.router, &buffers.experts) else { return Ok(()) };
        let stride = self.part.stride();
        let down = OfExperts {
            finish: Finish::Store,
            shape: self.shape_of_experts(layer, router, rows),
            x: own.hidden.address,
            out: own.products.address + u64::from(layer.down.row()) * 4,
            stride,
            scale: 1.0 / HIDDEN_SCALE,
            limit: 0.0,
            choices: rows.count * router.slots,
        };
        self.of_experts("experts_down", &layer.down, own, &down)?;
        if let Some([_, down]) = &router.shared {
            let to = own.shared.address + u64::from(down.row()) * 4;
            let x = buffers.hidden.address;
            self.gemm("shared_down", Finish::Store, down, x, (to, stride), rows)?;
        }
        self.combine(router, own, &layer.down, rows)
    }

    /// Of both products: their blocks of tokens are the same.
    fn shape_of_experts(&self, layer: &LayerPlan, router: &RouterPlan, rows: Rows) -> GemmShape {
        let of = (rows.count * router.slots, router.experts);
        choose_of_experts(self.shape, of, layer.gate_up.expert_tiles(), self.part.sms)
    }

    /// The experts and weights of each token.
    fn route(
        &mut self,
        router: &RouterPlan,
        own: &ExpertBuffers,
        rows: Rows,
    ) -> Result<(), HostError> {
        let Some(kernels) = &self.part.kernels.experts else { return Ok(()) };
        let stride = router.stride();
        let mut values = [
            own.chosen_in(router.number),
            own.weights.address,
            own.logits.address + u64::from(rows.first) * u64::from(stride) * 4,
            rows.count.into(),
            stride.into(),
            router.experts.into(),
            router.slots.into(),
            router.scoring as u64,
            router.shared.is_some().into(),
        ];
        // Keys of a token's logits, as many for each thread of a warp, and the chosen logits.
        let warps = PREFILL_THREADS / 32;
        let shared = warps * (router.experts.next_multiple_of(128) + abi::SLOTS_MAX) * 4;
        let place = (rows.count.div_ceil(warps), PREFILL_THREADS, shared);
        self.launch("route", 0.0, &kernels.route, place, &mut values)
    }

    /// Groups the choices by expert, in blocks of as many tokens, and copies the vectors to their places.
    fn group(
        &mut self,
        router: &RouterPlan,
        own: &ExpertBuffers,
        (rows, block): (Rows, u32),
    ) -> Result<(), HostError> {
        let Part { kernels, buffers, chunk, .. } = self.part;
        let Some(kernels) = &kernels.experts else { return Ok(()) };
        let [first_place, first_block] = own.firsts();
        let chosen = own.chosen_in(router.number);
        let choices = rows.count * router.slots;
        let mut values = [own.ranks.address, own.count_of(0), chosen, choices.into()];
        let place = (router.experts, PREFILL_THREADS, PREFILL_THREADS / 32 * 4);
        self.launch("rank", 0.0, &kernels.rank, place, &mut values)?;
        let mut values = [
            first_place,
            first_block,
            own.blocks.address,
            own.count_of(0),
            router.experts.into(),
            block.into(),
        ];
        let place = (1, PREFILL_THREADS, router.experts * 4);
        self.launch("blocks", 0.0, &kernels.blocks, place, &mut values)?;
        let mut values = [
            own.gathered.address,
            own.places.address,
            Self::vector(buffers.normed.address, rows.first),
            chosen,
            own.ranks.address,
            first_place,
            router.slots.into(),
            own.sizes.hidden.div_ceil(X_COLS).into(),
            (*chunk).into(),
            own.sizes.places().into(),
        ];
        let place = (rows.count, PREFILL_THREADS, router.slots * 4);
        self.launch("gather", 0.0, &kernels.gather, place, &mut values)
    }

    /// Multiplies the places of all experts: of codes some experts after the others, as many as there is room for in 16 bits.
    fn of_experts(
        &mut self,
        name: &'static str,
        matrix: &Packed,
        own: &ExpertBuffers,
        of: &OfExperts,
    ) -> Result<(), HostError> {
        let (all, each) = (matrix.experts, matrix.expert_tiles());
        if each == 0 {
            return Ok(()); // other devices have all rows
        }
        let bytes = u64::from(each) * matrix.tile_bytes();
        let at_once = match matrix.codes {
            Some(_) => (self.part.buffers.unpacked.bytes / bytes).min(self.experts.into()),
            None => all.into(),
        };
        let at_once = at_once.clamp(1, all.into()) as u32;
        let block = gemm_block(of.shape);
        let flop = 2.0 * f64::from(of.choices) * f64::from(matrix.cols) * f64::from(matrix.rows);
        let [_, first_block] = own.firsts();
        for first in (0..all).step_by(at_once as usize) {
            let count = at_once.min(all - first);
            let scaled = matrix.factors() == 0;
            let weights = self.unpack(matrix, first * each, count * each, scaled)?;
            let limit = of.limit.to_bits().into();
            let work = Products {
                finish: of.finish,
                shape: of.shape,
                blocks: (of.choices / block.tokens + count) * block.row_blocks(each),
                weights,
                x: of.x,
                out: of.out,
                stride: of.stride,
                pitch: own.sizes.places(),
                tokens: of.choices,
                scale: of.scale,
                experts: [first_block, own.blocks.address, first.into(), count.into(), limit],
            };
            let part = f64::from(count) / f64::from(all);
            self.products(name, flop / f64::from(all) * part, matrix, &work)?;
        }
        Ok(())
    }

    /// Adds the products of each token's experts to its residual stream, where the device has computed them.
    fn combine(
        &mut self,
        router: &RouterPlan,
        own: &ExpertBuffers,
        down: &Packed,
        rows: Rows,
    ) -> Result<(), HostError> {
        let Part { kernels, buffers, variant, .. } = self.part;
        let Some(kernels) = &kernels.experts else { return Ok(()) };
        let (stride, column) = (self.part.stride(), u64::from(down.row()) * 4);
        let before = u64::from(rows.first) * u64::from(stride) * 4 + column;
        let mut values = [
            buffers.residual.address + before,
            own.products.address + column,
            router.shared.as_ref().map_or(0, |_| own.shared.address + before),
            own.places.address,
            own.weights.address,
            router.slots.into(),
            stride.into(),
            u64::from(down.expert_tiles() * UNIT_ROWS), // a parameter of the kernels for parts only
        ];
        debug_assert!(variant.parts || down.expert_tiles() * UNIT_ROWS == stride, "all columns");
        let place = (rows.count, PREFILL_THREADS, 0);
        self.launch("combine", 0.0, &kernels.combine, place, &mut values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(name: &str) -> Sizes {
        let graph = model::preset(name).expect("a preset").graph;
        Sizes::of(&graph, CHUNK_TOKENS).expect("experts")
    }

    /// Whatever tokens choose: all the same experts, or all experts with one token more than a multiple.
    #[test]
    fn every_choice_has_a_place() {
        let sizes = Sizes { slots: 3, ..sizes("qwen3-30b-a3b") };
        for chunk in [1, 7, 128, 2048] {
            let sizes = Sizes { chunk, ..sizes };
            let (choices, most) = (sizes.choices(), sizes.experts.min(sizes.choices()));
            let even = |experts: u32| {
                let each = |e| choices / experts + u32::from(e < choices % experts);
                (0..experts).map(|e| each(e).next_multiple_of(PLACES)).sum::<u32>()
            };
            let worst = (1..=most).map(even).max().unwrap_or(0);
            assert!(worst <= sizes.places(), "{chunk} tokens: {worst} of {}", sizes.places());
            // One token of each expert but one, which has the rest.
            let uneven = (most - 1) * PLACES + (choices - most + 1).next_multiple_of(PLACES);
            assert!(uneven <= sizes.places(), "{chunk} tokens: {uneven}");
        }
    }

    #[test]
    fn the_memory_for_experts_is_that_of_the_page() {
        let mb = |name| {
            let bytes = sizes(name).bytes();
            [bytes[7], bytes[8], bytes[9]].map(|bytes| (bytes + 500_000) / 1_000_000)
        };
        assert_eq!(mb("qwen3-30b-a3b"), [71, 27, 142]);
        assert_eq!(mb("gpt-oss-20b"), [49, 50, 97]);
        let all = sizes("qwen3-30b-a3b").bytes().iter().sum::<u64>();
        assert!(all < 300 << 20, "{all}");
    }
}
