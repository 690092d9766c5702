//! Device addresses of a model's matrices, constants and caches: matrices by id, constants by the tensors that they are made of.

use ir::program::{PackedLayer, PackedMatrix, PackedModel, RowMap};
use ir::{Graph, TensorId};

use crate::error::HostError;
use crate::load::{Residents, constant_key};

/// A matrix on the device.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    pub(super) address: u64,
    pub(super) bias: u64,
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
        Ok(Packed {
            address: self.residents.devices[0].matrices[packed.id.index()].address,
            bias: packed.constants.as_ref().map_or(Ok(0), |map| self.constant(map))?,
            units: matrix.units_per_tile(),
            tiles: matrix.tiles(),
            rows: matrix.rows(),
            cols: matrix.cols,
        })
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
