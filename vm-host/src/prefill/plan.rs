//! Addresses on a device of a model's matrices, constants and caches: matrices by id, constants by the tensors that they are made of. Of several
//! devices each has neighbouring rows of every matrix, and of queries, keys and values those of its heads.

use std::ops::Range;

use abi::{Scoring, UNIT_ROW_BYTES, UNIT_ROWS, Unpack};
use ir::program::{Matrix, PackedLayer, PackedMatrix, PackedModel, PackedRouter, RowMap};
use ir::{FeedForward, Graph, TensorId};

use crate::error::HostError;
use crate::experts::own_tiles;
use crate::load::{DeviceResidents, Residents, constant_key};

/// The codes of a matrix on the device.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) address: u64,
    /// The factors of its rows.
    pub(super) factors: u64,
    pub(super) unpack: Unpack,
    /// Per tile.
    pub(super) units: u32,
    pub(super) unit_bytes: u32,
}

/// Neighbouring tiles of a matrix on the device, of experts the same of each: all of them, if there is one device.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    /// The number of the first one in the matrix, or in each expert.
    pub(super) first: u32,
    /// Zero if it is of codes.
    pub(super) address: u64,
    pub(super) codes: Option<Codes>,
    pub(super) bias: u64,
    /// Per tile, in 16 bits.
    pub(super) units: u32,
    pub(super) tiles: u32,
    pub(super) rows: u32,
    pub(super) cols: u32,
    /// Whose rows lie one after the other, as many of each.
    pub(super) experts: u32,
}

/// What chooses among a layer's experts, and the expert that every token has.
pub(super) struct RouterPlan {
    /// Of the logits of the experts and, behind them, of the shared one.
    pub(super) logits: Packed,
    /// The layer, counted among those with experts.
    pub(super) number: u32,
    pub(super) experts: u32,
    pub(super) slots: u32,
    pub(super) scoring: Scoring,
    /// The limit of a clamped activation, or 0.
    pub(super) limit: f32,
    /// Gate and up, and down, of the shared expert.
    pub(super) shared: Option<[Packed; 2]>,
}

/// A layer's constants and matrices.
pub(super) struct LayerPlan {
    /// Zero if there is none, as of all norms here.
    pub(super) attn_norm: u64,
    /// The rows of queries, keys and values: of several devices those of the device's heads, in runs.
    pub(super) qkv: Vec<Packed>,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    /// Of all query heads together and, behind it, of all key heads.
    pub(super) heads_norm: u64,
    pub(super) cache: u64,
    pub(super) o: Packed,
    /// Of what the attention, and the MLP, adds to the residual stream.
    pub(super) post_norms: [u64; 2],
    pub(super) mlp_norm: u64,
    /// Of experts those of all.
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
    pub(super) router: Option<RouterPlan>,
    pub(super) window: u32,
    pub(super) rope: u64,
    pub(super) sinks: u64,
}

/// All addresses.
pub(super) struct Plan {
    pub(super) embed: Packed,
    pub(super) layers: Vec<LayerPlan>,
    pub(super) final_norm: u64,
    pub(super) lm_head: Packed,
    pub(super) logits: u64,
    pub(super) capacity: u32,
}

/// Finds a graph's tensors in device memory.
pub(super) struct Lookup<'a> {
    pub(super) graph: &'a Graph,
    pub(super) residents: &'a Residents,
    pub(super) device: u32,
}

impl Lookup<'_> {
    fn here(&self) -> &DeviceResidents {
        &self.residents.devices[self.device as usize]
    }

    fn missing(&self, what: &str) -> HostError {
        HostError::Request(format!("{}: no {what} on the device", self.graph.name))
    }

    fn constant(&self, map: &RowMap) -> Result<u64, HostError> {
        let found = self.here().constants.get(&constant_key(map));
        found.copied().ok_or_else(|| self.missing("such constant"))
    }

    fn vector(&self, tensor: TensorId, len: u32) -> Result<u64, HostError> {
        self.constant(&RowMap::single(tensor, len))
    }

    fn optional(&self, tensor: Option<TensorId>, len: u32) -> Result<u64, HostError> {
        tensor.map_or(Ok(0), |tensor| self.vector(tensor, len))
    }

    /// The norm of what was added to the residual stream before, if it has one, and that of the stream's next reader. Both
    /// are one constant where there are both (`read_stream` in lower/src/flow.rs).
    fn norms(
        &self,
        added: Option<TensorId>,
        next: Option<TensorId>,
    ) -> Result<[u64; 2], HostError> {
        let hidden = self.graph.hidden;
        let Some(post) = added else { return Ok([0, self.optional(next, hidden)?]) };
        let parts = std::iter::once(post).chain(next).map(|norm| (Some(norm), hidden));
        let both = self.constant(&RowMap { parts: parts.collect(), interleaved: false })?;
        Ok([both, next.map_or(0, |_| both + u64::from(hidden) * 4)])
    }

    /// The runs of a matrix's tiles that the device has.
    fn runs(&self, packed: &PackedMatrix) -> Result<Vec<Packed>, HostError> {
        let tiles = self.here().matrices[packed.id.index()].tiles.clone();
        tiles.into_iter().map(|run| self.run(packed, run)).collect()
    }

    /// The rows of such a matrix that the device has: neighbours, or of experts those of each. None, if others have all.
    fn matrix(&self, packed: &PackedMatrix) -> Result<Packed, HostError> {
        let matrix = &self.residents.matrix_table[packed.id.index()];
        let placed = &self.here().matrices[packed.id.index()];
        match &placed.tiles[..] {
            runs if matrix.experts > 1 => {
                let own = own_tiles(matrix, runs);
                self.rows(packed, own.ok_or_else(|| self.missing("equal rows of all experts"))?, 0)
            }
            [] => self.rows(packed, 0..0, 0),
            [run] => self.run(packed, run.clone()),
            _ => Err(self.missing("rows of a matrix in one piece")),
        }
    }

    fn run(&self, packed: &PackedMatrix, tiles: Range<u32>) -> Result<Packed, HostError> {
        let placed = &self.here().matrices[packed.id.index()];
        let before = placed.before(tiles.start, tiles.end - tiles.start);
        self.rows(packed, tiles, before.ok_or_else(|| self.missing("such rows"))?)
    }

    /// These tiles of each expert, or of a matrix without experts, behind others on the device.
    fn rows(
        &self,
        packed: &PackedMatrix,
        tiles: Range<u32>,
        before: u64,
    ) -> Result<Packed, HostError> {
        let matrix = &self.residents.matrix_table[packed.id.index()];
        let (first, count) = (tiles.start, (tiles.end - tiles.start) * matrix.experts);
        let placed = &self.here().matrices[packed.id.index()];
        let address = placed.address + before * matrix.tile_bytes() as u64;
        let constants = packed.constants.as_ref().map_or(Ok(0), |map| self.constant(map))?;
        // The constants of all rows are on each device.
        let skipped = u64::from(first * UNIT_ROWS) * 4;
        let each = matrix.expert_rows();
        let rows = ((tiles.end * UNIT_ROWS).min(each) - first * UNIT_ROWS) * matrix.experts;
        let codes = matrix.format.is_scaled().then(|| Codes {
            address,
            factors: constants + skipped,
            unpack: matrix.format.unpack(),
            units: matrix.units_per_tile(),
            unit_bytes: matrix.format.unit_bytes(),
        });
        // The biases lie behind the factors, which all experts share.
        let biased = packed.constants.as_ref().is_some_and(|map| map.rows() > each);
        let bias = match codes {
            Some(_) if !biased => 0,
            Some(_) => constants + u64::from(each) * 4 + skipped,
            None if constants == 0 => 0,
            None => constants + skipped,
        };
        let (address, units) = match codes {
            Some(_) => (0, units_of_16_bits(matrix)),
            None => (address, matrix.units_per_tile()),
        };
        let (tiles, cols, experts) = (count, matrix.cols, matrix.experts);
        Ok(Packed { first, address, codes, bias, units, tiles, rows, cols, experts })
    }

    /// A layer's router; none if every position has the same MLP.
    fn router(&self, index: usize, packed: &PackedLayer) -> Result<Option<RouterPlan>, HostError> {
        let layers = &self.graph.layers;
        let (FeedForward::Experts(experts), Some(PackedRouter { router, shared })) =
            (&layers[index].mlp.body, &packed.router)
        else {
            return Ok(None);
        };
        let shared = match shared {
            Some(mlp) => Some([self.matrix(&mlp.gate_up)?, self.matrix(&mlp.down)?]),
            None => None,
        };
        Ok(Some(RouterPlan {
            logits: self.matrix(router)?,
            number: layers[..index].iter().filter(|layer| layer.gated().is_none()).count() as u32,
            experts: experts.experts.len() as u32,
            slots: experts.top_k,
            scoring: if experts.normalised { Scoring::Chosen } else { Scoring::All },
            limit: experts.clamped.map_or(0.0, |clamped| clamped.limit),
            shared,
        }))
    }

    fn layer(&self, index: usize, packed: &PackedLayer) -> Result<LayerPlan, HostError> {
        let layers = &self.graph.layers;
        let layer = &layers[index];
        let before = index.checked_sub(1).and_then(|n| layers[n].mlp.post_norm);
        let [_, attn_norm] = self.norms(before, layer.attention.norm)?;
        let [attn_post_norm, mlp_norm] = self.norms(layer.attention.post_norm, layer.mlp.norm)?;
        let next = layers.get(index + 1);
        let next = next.map_or(Some(self.graph.final_norm), |next| next.attention.norm);
        let [mlp_post_norm, _] = self.norms(layer.mlp.post_norm, next)?;
        let attention = &layer.attention.body;
        let mlp = &packed.mlp;
        let together = self.graph.norms_all_heads(layer);
        let each = |norm: Option<TensorId>| norm.filter(|_| !together);
        let (q_width, kv_width) = (self.graph.q_width(), self.graph.kv_width());
        let heads = vec![(attention.q_norm, q_width), (attention.k_norm, kv_width)];
        let heads_norm = RowMap { parts: heads, interleaved: false };
        Ok(LayerPlan {
            attn_norm,
            qkv: self.runs(&packed.attention.qkv)?,
            q_norm: self.optional(each(attention.q_norm), self.graph.head_dim)?,
            k_norm: self.optional(each(attention.k_norm), self.graph.head_dim)?,
            heads_norm: if together { self.constant(&heads_norm)? } else { 0 },
            cache: self.here().caches[index],
            o: self.matrix(&packed.attention.o)?,
            post_norms: [attn_post_norm, mlp_post_norm],
            mlp_norm,
            gate_up: self.matrix(&mlp.gate_up)?,
            down: self.matrix(&mlp.down)?,
            router: self.router(index, packed)?,
            window: attention.window.unwrap_or(0),
            rope: self.here().rope[attention.rotary as usize],
            sinks: self.optional(attention.sinks, self.graph.heads)?,
        })
    }

    pub(super) fn plan(&self) -> Result<Plan, HostError> {
        let graph = self.graph;
        let packed = PackedModel::new(graph);
        if packed.matrices != self.residents.matrix_table {
            return Err(self.missing("packed matrices of this graph"));
        }
        let layers = packed.layers.iter().enumerate().map(|(n, layer)| self.layer(n, layer));
        let last = graph.layers.last().and_then(|layer| layer.mlp.post_norm);
        let [_, final_norm] = self.norms(last, Some(graph.final_norm))?;
        Ok(Plan {
            embed: self.matrix(&packed.embed)?,
            layers: layers.collect::<Result<_, _>>()?,
            final_norm,
            lm_head: self.matrix(&packed.lm_head)?,
            logits: self.residents.logits,
            capacity: self.residents.kv_capacity,
        })
    }
}

impl Plan {
    /// Rows of the device's queries, keys and values, and its key/value heads; none if they are not of whole heads.
    pub(super) fn own_heads(&self, graph: &Graph) -> Option<(u32, u32)> {
        let runs = self.layers.first().map_or(&[][..], |layer| &layer.qkv);
        let rows = runs.iter().map(|run| run.tiles * UNIT_ROWS).sum::<u32>();
        let head = (graph.group() + 2) * graph.head_dim;
        rows.is_multiple_of(head).then(|| (rows, rows / head))
    }
}

impl RouterPlan {
    /// Words of a token's row of logits: those of the experts and, behind them, of the shared one.
    pub(super) fn stride(&self) -> u32 {
        (self.experts + u32::from(self.shared.is_some())).next_multiple_of(UNIT_ROWS)
    }
}

impl Packed {
    /// The factors of its rows' products: of codes whose groups have no scales, which are exact without one.
    pub(super) fn factors(&self) -> u64 {
        let exact = |codes: &Codes| matches!(codes.unpack, Unpack::E4m3 | Unpack::Int8);
        self.codes.filter(exact).map_or(0, |codes| codes.factors)
    }

    /// Row of the matrix that its first row is.
    pub(super) fn row(&self) -> u32 {
        self.first * UNIT_ROWS
    }

    /// Columns of the hidden layer that the rows of gate and up, whose tiles alternate, are products of.
    pub(super) fn hidden_columns(&self) -> Range<u32> {
        let first = self.row() / 2;
        first..first + self.expert_tiles() * UNIT_ROWS / 2
    }

    /// Tiles of each expert.
    pub(super) fn expert_tiles(&self) -> u32 {
        self.tiles / self.experts.max(1)
    }

    /// Bytes of a tile in 16 bits.
    pub(super) fn tile_bytes(&self) -> u64 {
        u64::from(self.units) * u64::from(abi::UNIT_BYTES)
    }
}

/// Units of a tile whose elements have 16 bits.
fn units_of_16_bits(matrix: &Matrix) -> u32 {
    matrix.cols.div_ceil(UNIT_ROW_BYTES / 2)
}

/// Bytes of the memory in which codes become 16 bits: the largest matrix of a layer. `lm_head` and experts go through it part by part.
pub(crate) fn unpacked_bytes(matrices: &[Matrix]) -> u64 {
    const OF_LOGITS: u64 = 64 << 20;
    /// So many that products of experts fill the device several times over.
    const OF_EXPERTS: u64 = 512 << 20;
    let bytes = |matrix: &Matrix| {
        let tiles = u64::from(units_of_16_bits(matrix)) * u64::from(matrix.tiles());
        let all = tiles * u64::from(abi::UNIT_BYTES);
        match matrix.experts {
            2.. => all.min(OF_EXPERTS.max(all / u64::from(matrix.experts))),
            _ if matrix.name == "lm_head" => all.min(OF_LOGITS),
            _ => all,
        }
    };
    matrices.iter().filter(|matrix| matrix.format.is_scaled()).map(bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use ir::Target;
    use ir::program::{BufferSource, Program};

    use super::*;
    use crate::devices::{Placed, heads_of, tiles_of};
    use crate::pages::PageLayout;
    use crate::prefill::share::whole_blocks;

    /// A program for several devices, and what would be on them; the addresses of a matrix begin with its number.
    fn residents(graph: &Graph, devices: u32) -> Residents {
        let target = Target::by_name("h200").expect("a known target").times(devices);
        let config = ir::schedule::default_config(graph, &target);
        let config = ir::schedule::validate(config, graph, &target).expect("it is legal");
        let options = lower::Options { kv_capacity: 64 };
        let program = lower::lower(&config, graph, &target, options).expect("it lowers");
        let constants = |program: &Program| {
            let maps = program.buffers.iter().filter_map(|buffer| match &buffer.source {
                BufferSource::Vector(map) => Some((constant_key(map), 1 << 20)),
                BufferSource::Scratch
                | BufferSource::Rotary(_)
                | BufferSource::KvCache { .. }
                | BufferSource::Embedding(_) => None,
            });
            maps.collect()
        };
        let device = |device| {
            let heads = heads_of(&program, device);
            let placed = (1_u64..).zip(tiles_of(&program, device));
            DeviceResidents {
                matrices: placed.map(|(n, tiles)| Placed { address: n << 40, tiles }).collect(),
                constants: constants(&program),
                rope: vec![0; 1 + graph.rotary.len()],
                caches: vec![0; graph.layers.len()],
                layout: PageLayout::of(&program, heads.clone()),
                first_head: heads.start,
            }
        };
        Residents {
            devices: (0..devices).map(device).collect(),
            weight_stream_starts: Vec::new(),
            matrix_table: program.matrices.clone(),
            heads: (graph.kv_heads, graph.head_dim),
            pages: 1,
            logits: 0,
            logits_rows: 1,
            kv_capacity: 64,
            workers: target.sms,
            seqs: 1,
        }
    }

    /// The rows of a matrix on all devices are all rows, one after the other.
    fn follow(runs: &[Packed]) {
        let mut next = 0;
        for run in runs {
            assert_eq!(run.first, next);
            assert_eq!(run.address % (1 << 40), 0, "it begins its device's part");
            next += run.tiles;
        }
        assert!(next > 0);
    }

    #[test]
    fn devices_have_neighbouring_rows_and_whole_heads() {
        for name in ["toy-2l", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"] {
            let graph = model::preset(name).expect("a preset").graph;
            for devices in [1, 2, 4] {
                let residents = residents(&graph, devices);
                let plan = |device| Lookup { graph: &graph, residents: &residents, device }.plan();
                let plans: Vec<Plan> = (0..devices).map(|n| plan(n).expect("a plan")).collect();
                for index in 0..graph.layers.len() {
                    let of = |run: &dyn Fn(&LayerPlan) -> Packed| {
                        plans.iter().map(|plan| run(&plan.layers[index])).collect::<Vec<_>>()
                    };
                    follow(&of(&|layer| layer.o));
                    follow(&of(&|layer| layer.gate_up));
                    follow(&of(&|layer| layer.down));
                }
                let mut heads = 0;
                for (plan, here) in plans.iter().zip(&residents.devices) {
                    let (rows, own) = plan.own_heads(&graph).expect("whole heads");
                    assert_eq!(rows, own * (graph.group() + 2) * graph.head_dim);
                    assert!(own == 0 || (own, heads) == (here.layout.kv_heads, here.first_head));
                    heads += own;
                    assert_eq!(plan.embed.first, 0, "the whole embedding");
                    let half = plan.layers[0].gate_up.row() / 2;
                    let whole = whole_blocks(graph.ffn / UNIT_ROWS, UNIT_ROWS, devices);
                    assert!(!whole || half % 64 == 0, "{name}: columns from {half} on");
                }
                assert_eq!(heads, graph.kv_heads, "{name} on {devices}");
            }
        }
    }

    /// Each device has the same rows of all experts, and adds to the columns of the residual stream that it adds the attention's products to.
    #[test]
    fn devices_have_neighbouring_rows_of_every_expert() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus");
        let folder = |name| model::import(format!("{corpus}/{name}").as_ref()).expect("a folder");
        let models = [
            model::preset("qwen3-30b-a3b").expect("a preset"),
            folder("families/mixtral-bf16"),
            folder("families/qwen2-moe-bf16"),
            folder("quantised/fp8-block-qwen3-moe"),
        ];
        let mut whole = 0;
        for (graph, devices) in models.iter().flat_map(|m| [1, 2, 4].map(|n| (&m.graph, n))) {
            let residents = residents(graph, devices);
            let plan = |device| Lookup { graph, residents: &residents, device }.plan();
            let plans: Vec<Plan> = (0..devices).map(|n| plan(n).expect("a plan")).collect();
            let in_chunks = crate::prefill::prefill_refused(graph, devices).is_none();
            whole += u32::from(in_chunks && devices > 1);
            for index in 0..graph.layers.len() {
                let mut next = [0; 4]; // row of the router, of gate and up and of down, column of the hidden layer
                for plan in &plans {
                    let layer = &plan.layers[index];
                    let router = layer.router.as_ref().expect("a router");
                    let hidden = layer.gate_up.hidden_columns();
                    assert!(!in_chunks || hidden.start % 64 == 0, "{} on {devices}", graph.name);
                    assert!(router.logits.tiles == 0 || router.logits.row() == next[0]);
                    let first = [layer.gate_up.row(), layer.down.row(), hidden.start];
                    assert_eq!(first, next[1..], "{} on {devices}", graph.name);
                    let columns = |matrix: &Packed| (matrix.first, matrix.expert_tiles());
                    assert_eq!(columns(&layer.down), columns(&layer.o), "{}", graph.name);
                    if let Some([_, down]) = &router.shared {
                        assert_eq!(columns(down), columns(&layer.o), "{}", graph.name);
                    }
                    for matrix in [&layer.gate_up, &layer.down] {
                        let at = matrix.codes.map_or(matrix.address, |codes| codes.address);
                        assert_eq!(at % (1 << 40), 0, "it begins its device's part");
                        // Constants of all rows are at 2^20 (see `residents`).
                        let factors = matrix.codes.map(|codes| codes.factors);
                        let own = (1 << 20) + u64::from(matrix.row()) * 4;
                        assert!(factors.is_none_or(|at| at == own), "{}", graph.name);
                    }
                    let rows = |matrix: &Packed| matrix.expert_tiles() * UNIT_ROWS;
                    assert_eq!(layer.gate_up.rows, rows(&layer.gate_up) * router.experts);
                    next[0] += rows(&router.logits);
                    next[1] += rows(&layer.gate_up);
                    next[2] += rows(&layer.down);
                    next[3] = hidden.end;
                }
                let router = plans[0].layers[index].router.as_ref().expect("a router");
                let widths = crate::prefill::experts::widths(graph, &graph.layers[index]);
                let width = widths.take(1).sum::<u32>();
                assert_eq!(next[0], router.stride(), "{} on {devices}", graph.name);
                assert_eq!(next[1..], [2 * width, graph.hidden, width], "{}", graph.name);
            }
        }
        assert_eq!(whole, 3, "qwen3-30b-a3b on two and four, the FP8 folder on two");
    }

    /// Biases of experts lie behind the factors of one of them, and the experts' rows one after the other.
    #[test]
    fn experts_have_whole_tiles_and_biases_of_their_own() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus");
        let folders = [
            ("families/gpt-oss-bf16", 6, 3, Scoring::Chosen, true),
            ("families/qwen2-moe-bf16", 6, 2, Scoring::All, false),
            ("quantised/mxfp4-gpt-oss", 5, 2, Scoring::Chosen, true),
        ];
        for (name, experts, slots, scoring, biased) in folders {
            let folder = format!("{corpus}/{name}");
            let graph = model::import(folder.as_ref()).expect("a golden folder").graph;
            let residents = residents(&graph, 1);
            let plan = Lookup { graph: &graph, residents: &residents, device: 0 }.plan();
            for (number, layer) in plan.expect("a plan").layers.iter().enumerate() {
                let router = layer.router.as_ref().expect("a router");
                assert_eq!(router.number, number as u32, "{name}: every layer has experts");
                assert_eq!((router.experts, router.slots), (experts, slots), "{name}");
                assert_eq!(router.scoring, scoring, "{name}");
                assert_eq!(router.limit != 0.0, biased, "{name}: gpt-oss has both");
                assert_eq!(layer.sinks != 0, biased, "{name}: and sinks");
                assert_eq!(router.shared.is_some(), name.contains("qwen2"), "{name}");
                assert_eq!(router.logits.rows, experts + u32::from(router.shared.is_some()));
                for (matrix, rows) in
                    [(layer.gate_up, layer.gate_up.rows / experts), (layer.down, graph.hidden)]
                {
                    assert_eq!(matrix.expert_tiles() * UNIT_ROWS * experts, matrix.rows, "{name}");
                    assert_eq!(matrix.expert_tiles() * UNIT_ROWS, rows, "{name}");
                    // Constants are at 2^20 (see `residents`).
                    let factors = matrix.codes.map_or(0, |_| u64::from(rows) * 4);
                    let expected = if biased { (1 << 20) + factors } else { 0 };
                    assert_eq!(matrix.bias, expected, "{name}");
                }
            }
        }
    }

    /// Every norm is found among the constants of a program; one behind a block lies before that of the next reader.
    #[test]
    fn norms_of_every_family_are_on_the_device() {
        let families = concat!(env!("CARGO_MANIFEST_DIR"), "/../corpus/families");
        let mut with_both = 0;
        for folder in std::fs::read_dir(families).expect("golden folders") {
            let folder = folder.expect("a folder").path();
            if !folder.is_dir() {
                continue;
            }
            let graph = model::import(&folder).expect("a golden folder").graph;
            let mut residents = residents(&graph, 1);
            let constants = residents.devices[0].constants.values_mut();
            constants.zip(1_u64..).for_each(|(address, n)| *address = n << 20);
            let plan = Lookup { graph: &graph, residents: &residents, device: 0 }.plan();
            let plan = plan.unwrap_or_else(|error| panic!("{}: {error}", graph.name));
            let behind = u64::from(graph.hidden) * 4;
            let norms = |layer: &LayerPlan| [layer.attn_norm, layer.mlp_norm];
            let mut read = plan.layers.iter().flat_map(norms).skip(1).chain([plan.final_norm]);
            for (post, next) in plan.layers.iter().flat_map(|layer| layer.post_norms).zip(&mut read)
            {
                assert_ne!(next | post, 0, "{}", graph.name);
                if post != 0 && next != 0 {
                    assert_eq!(next, post + behind, "{}", graph.name);
                    with_both += 1;
                }
            }
            assert_eq!(read.next(), None, "{}", graph.name);
        }
        assert!(with_both > 0);
    }

    #[test]
    fn experts_of_codes_are_unpacked_part_by_part() {
        let mib = |name: &str| {
            let graph = model::preset(name).expect("a preset").graph;
            unpacked_bytes(&PackedModel::new(&graph).matrices) >> 20
        };
        assert_eq!(mib("gpt-oss-20b"), 512);
        assert_eq!(mib("qwen3-30b-a3b"), 0, "16 bits");
    }
}
