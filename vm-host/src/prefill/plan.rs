//! Device addresses of a model's matrices, constants and caches: matrices by id, constants by the tensors that they are made of.

use abi::{UNIT_ROW_BYTES, Unpack};
use ir::program::{Matrix, PackedLayer, PackedMatrix, PackedModel, RowMap};
use ir::{Graph, TensorId};

use crate::error::HostError;
use crate::load::{Residents, constant_key};

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

/// A matrix on the device.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    /// Zero if it is of codes.
    pub(super) address: u64,
    pub(super) codes: Option<Codes>,
    pub(super) bias: u64,
    /// Per tile, in 16 bits.
    pub(super) units: u32,
    pub(super) tiles: u32,
    pub(super) rows: u32,
    pub(super) cols: u32,
}

/// A layer's constants and matrices.
pub(super) struct LayerPlan {
    pub(super) attn_norm: u64,
    pub(super) qkv: Packed,
    pub(super) q_norm: u64,
    pub(super) k_norm: u64,
    pub(super) cache: u64,
    pub(super) o: Packed,
    pub(super) mlp_norm: u64,
    pub(super) gate_up: Packed,
    pub(super) down: Packed,
    pub(super) window: u32,
    pub(super) rope: u64,
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
}

impl Lookup<'_> {
    fn missing(&self, what: &str) -> HostError {
        HostError::Request(format!("{}: no {what} on the device", self.graph.name))
    }

    fn constant(&self, map: &RowMap) -> Result<u64, HostError> {
        let found = self.residents.devices[0].constants.get(&constant_key(map));
        found.copied().ok_or_else(|| self.missing("such constant"))
    }

    fn vector(&self, tensor: TensorId, len: u32) -> Result<u64, HostError> {
        self.constant(&RowMap::single(tensor, len))
    }

    fn optional(&self, tensor: Option<TensorId>, len: u32) -> Result<u64, HostError> {
        tensor.map_or(Ok(0), |tensor| self.vector(tensor, len))
    }

    fn matrix(&self, packed: &PackedMatrix) -> Result<Packed, HostError> {
        let matrix = &self.residents.matrix_table[packed.id.index()];
        let address = self.residents.devices[0].matrices[packed.id.index()].address;
        let constants = packed.constants.as_ref().map_or(Ok(0), |map| self.constant(map))?;
        let rows = matrix.rows();
        let codes = matrix.format.is_scaled().then(|| Codes {
            address,
            factors: constants,
            unpack: matrix.format.unpack(),
            units: matrix.units_per_tile(),
            unit_bytes: matrix.format.unit_bytes(),
        });
        // The biases lie behind the factors.
        let biased = packed.constants.as_ref().is_some_and(|map| map.rows() > rows);
        let bias = match codes {
            Some(_) if !biased => 0,
            Some(_) => constants + u64::from(rows) * 4,
            None => constants,
        };
        let (address, units) = match codes {
            Some(_) => (0, units_of_16_bits(matrix)),
            None => (address, matrix.units_per_tile()),
        };
        let tiles = matrix.tiles();
        Ok(Packed { address, codes, bias, units, tiles, rows, cols: matrix.cols })
    }

    fn layer(&self, index: usize, packed: &PackedLayer) -> Result<LayerPlan, HostError> {
        let (layer, hidden) = (&self.graph.layers[index], self.graph.hidden);
        let attention = &layer.attention.body;
        if packed.router.is_some() {
            return Err(self.missing("an MLP without a router"));
        }
        let mlp = &packed.mlp;
        Ok(LayerPlan {
            attn_norm: self.optional(layer.attention.norm, hidden)?,
            qkv: self.matrix(&packed.attention.qkv)?,
            q_norm: self.optional(attention.q_norm, self.graph.head_dim)?,
            k_norm: self.optional(attention.k_norm, self.graph.head_dim)?,
            cache: self.residents.devices[0].caches[index],
            o: self.matrix(&packed.attention.o)?,
            mlp_norm: self.optional(layer.mlp.norm, hidden)?,
            gate_up: self.matrix(&mlp.gate_up)?,
            down: self.matrix(&mlp.down)?,
            window: attention.window.unwrap_or(0),
            rope: self.residents.devices[0].rope[attention.rotary as usize],
        })
    }

    pub(super) fn plan(&self) -> Result<Plan, HostError> {
        let graph = self.graph;
        let packed = PackedModel::new(graph);
        if packed.matrices != self.residents.matrix_table {
            return Err(self.missing("packed matrices of this graph"));
        }
        let layers = packed.layers.iter().enumerate().map(|(n, layer)| self.layer(n, layer));
        Ok(Plan {
            embed: self.matrix(&packed.embed)?,
            layers: layers.collect::<Result<_, _>>()?,
            final_norm: self.vector(graph.final_norm, graph.hidden)?,
            lm_head: self.matrix(&packed.lm_head)?,
            logits: self.residents.logits,
            capacity: self.residents.kv_capacity,
        })
    }
}

impl Packed {
    /// The factors of its rows' products: of codes whose groups have no scales, which are exact without one.
    pub(super) fn factors(&self) -> u64 {
        let exact = |codes: &Codes| matches!(codes.unpack, Unpack::E4m3 | Unpack::Int8);
        self.codes.filter(exact).map_or(0, |codes| codes.factors)
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

/// Bytes of the memory in which codes become 16 bits: the largest matrix of a layer. `lm_head` goes through it part by part.
pub(crate) fn unpacked_bytes(matrices: &[Matrix]) -> u64 {
    const OF_LOGITS: u64 = 64 << 20;
    let bytes = |matrix: &Matrix| {
        let tiles = u64::from(units_of_16_bits(matrix)) * u64::from(matrix.tiles());
        let all = tiles * u64::from(abi::UNIT_BYTES);
        if matrix.name == "lm_head" { all.min(OF_LOGITS) } else { all }
    };
    matrices.iter().filter(|matrix| matrix.format.is_scaled()).map(bytes).max().unwrap_or(0)
}
