//! Where a model's matrices, constants and caches are on the device, found by the tensors that they are made of.

use ir::program::RowMap;
use ir::{Graph, Layer, TensorId};

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
}

/// Where everything is.
pub(super) struct Plan {
    pub(super) embed: Packed,
    pub(super) layers: Vec<LayerPlan>,
    pub(super) final_norm: u64,
    pub(super) lm_head: Packed,
    pub(super) rope: u64,
    pub(super) logits: u64,
    pub(super) capacity: u32,
}

/// What graph and device memory have in common, looked up by the tensors that things are made of.
pub(super) struct Lookup<'a> {
    pub(super) graph: &'a Graph,
    pub(super) residents: &'a Residents,
}

impl Lookup<'_> {
    fn missing(&self, what: &str) -> HostError {
        HostError::Request(format!("{}: no {what} on the device", self.graph.name))
    }

    fn constant(&self, map: &RowMap) -> Result<u64, HostError> {
        let found = self.residents.constants.get(&constant_key(map));
        found.copied().ok_or_else(|| self.missing("such constant"))
    }

    fn vector(&self, tensor: TensorId, len: u32) -> Result<u64, HostError> {
        self.constant(&RowMap::single(tensor, len))
    }

    fn optional(&self, tensor: Option<TensorId>, len: u32) -> Result<u64, HostError> {
        tensor.map_or(Ok(0), |tensor| self.vector(tensor, len))
    }

    /// The matrix of these parts, with a bias if any part has one.
    fn matrix(
        &self,
        parts: &[(TensorId, Option<TensorId>, u32)],
        interleaved: bool,
    ) -> Result<Packed, HostError> {
        let weights = parts.iter().map(|&(weight, _, rows)| (Some(weight), rows)).collect();
        let map = RowMap { parts: weights, interleaved };
        let place = self.residents.matrix_table.iter().position(|matrix| matrix.map == map);
        let place = place.ok_or_else(|| self.missing("such matrix"))?;
        let matrix = &self.residents.matrix_table[place];
        let biases: Vec<_> = parts.iter().map(|&(_, bias, rows)| (bias, rows)).collect();
        let biased = biases.iter().any(|(bias, _)| bias.is_some());
        let bias = RowMap { parts: biases, interleaved };
        Ok(Packed {
            address: self.residents.matrices[place],
            bias: if biased { self.constant(&bias)? } else { 0 },
            units: matrix.units_per_tile(),
            tiles: matrix.tiles(),
            rows: matrix.rows(),
            cols: matrix.cols,
        })
    }

    fn layer(&self, index: usize, layer: &Layer) -> Result<LayerPlan, HostError> {
        let graph = self.graph;
        let (hidden, kv) = (graph.hidden, graph.kv_width());
        let part = |linear: ir::Linear, rows| (linear.weight, linear.bias, rows);
        let qkv = [part(layer.q, graph.q_width()), part(layer.k, kv), part(layer.v, kv)];
        let gate_up = [part(layer.gate, graph.ffn), part(layer.up, graph.ffn)];
        Ok(LayerPlan {
            attn_norm: self.vector(layer.attn_norm, hidden)?,
            qkv: self.matrix(&qkv, false)?,
            q_norm: self.optional(layer.q_norm, graph.head_dim)?,
            k_norm: self.optional(layer.k_norm, graph.head_dim)?,
            cache: self.residents.caches[index],
            o: self.matrix(&[part(layer.o, hidden)], false)?,
            mlp_norm: self.vector(layer.mlp_norm, hidden)?,
            gate_up: self.matrix(&gate_up, true)?,
            down: self.matrix(&[part(layer.down, hidden)], false)?,
            window: layer.window.unwrap_or(0),
        })
    }

    pub(super) fn plan(&self) -> Result<Plan, HostError> {
        let graph = self.graph;
        let layers = graph.layers.iter().enumerate().map(|(n, layer)| self.layer(n, layer));
        Ok(Plan {
            embed: self.matrix(&[(graph.embed, None, graph.vocab)], false)?,
            layers: layers.collect::<Result<_, _>>()?,
            final_norm: self.vector(graph.final_norm, graph.hidden)?,
            lm_head: self.matrix(&[(graph.lm_head, None, graph.vocab)], false)?,
            rope: self.residents.rope,
            logits: self.residents.logits,
            capacity: self.residents.kv_capacity,
        })
    }
}
