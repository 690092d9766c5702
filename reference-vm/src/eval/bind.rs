//! Finds the weights of a graph's blocks and checks their shapes.

use ir::{
    Attention, DType, Experts, FeedForward, Gated, Graph, Layer, Linear, Shared, TensorId, Weights,
};

use super::experts::{BoundExperts, BoundShared};
use super::{
    Block, BoundAttention, BoundFeedForward, BoundGated, BoundLayer, BoundLinear, EvalError,
};
use crate::math::{Matrix, stored_bytes};

pub(super) struct Binder<'a> {
    graph: &'a Graph,
    weights: &'a dyn Weights,
}

impl<'a> Binder<'a> {
    pub(super) fn new(graph: &'a Graph, weights: &'a dyn Weights) -> Self {
        Self { graph, weights }
    }

    pub(super) fn layer(&self, layer: &Layer) -> Result<BoundLayer<'a>, EvalError> {
        let whole = self.graph.norms_all_heads(layer);
        let attention = self.attention(&layer.attention.body, whole)?;
        let mlp = match &layer.mlp.body {
            FeedForward::Gated(gated) => {
                BoundFeedForward::Gated(Box::new(self.gated(gated, self.graph.ffn)?))
            }
            FeedForward::Experts(experts) => {
                BoundFeedForward::Experts(Box::new(self.experts(experts)?))
            }
        };
        Ok(BoundLayer {
            attention: self.block(&layer.attention, attention)?,
            mlp: self.block(&layer.mlp, mlp)?,
        })
    }

    fn block<A, B>(&self, block: &ir::Block<A>, body: B) -> Result<Block<B>, EvalError> {
        let hidden = self.graph.hidden;
        Ok(Block {
            norm: self.norm(block.norm, hidden)?,
            post_norm: self.norm(block.post_norm, hidden)?,
            body,
        })
    }

    fn norm(&self, id: Option<TensorId>, len: u32) -> Result<Option<Vec<f32>>, EvalError> {
        id.map(|id| self.vector(id, len)).transpose()
    }

    /// `whole`: whether norms of queries and keys are over all heads.
    fn attention(&self, body: &Attention, whole: bool) -> Result<BoundAttention<'a>, EvalError> {
        let graph = self.graph;
        let (hidden, q, kv) = (graph.hidden, graph.q_width(), graph.kv_width());
        let of_heads = |width: u32| if whole { width } else { graph.head_dim };
        Ok(BoundAttention {
            q: self.linear(body.q, q, hidden)?,
            k: self.linear(body.k, kv, hidden)?,
            v: self.linear(body.v, kv, hidden)?,
            q_norm: self.norm(body.q_norm, of_heads(q))?,
            k_norm: self.norm(body.k_norm, of_heads(kv))?,
            o: self.linear(body.o, hidden, q)?,
            sinks: self.norm(body.sinks, graph.heads)?,
            window: body.window,
            rotary: body.rotary,
        })
    }

    fn experts(&self, body: &Experts) -> Result<BoundExperts<'a>, EvalError> {
        let (count, top_k) = (body.experts.len(), body.top_k as usize);
        if top_k == 0 || top_k > count {
            return Err(EvalError::Experts { top_k: body.top_k, count });
        }
        let hidden = self.graph.hidden;
        let shared = |shared: &Shared| -> Result<_, EvalError> {
            let mlp = self.gated(&shared.mlp, shared.ffn)?;
            Ok(BoundShared { gate: self.linear(shared.gate, 1, hidden)?, mlp })
        };
        let experts = body.experts.iter().map(|expert| self.gated(expert, body.ffn));
        Ok(BoundExperts {
            router: self.linear(body.router, count as u32, hidden)?,
            top_k,
            normalised: body.normalised,
            experts: experts.collect::<Result<_, _>>()?,
            clamped: body.clamped,
            shared: body.shared.as_ref().map(shared).transpose()?,
        })
    }

    fn gated(&self, mlp: &Gated, ffn: u32) -> Result<BoundGated<'a>, EvalError> {
        let hidden = self.graph.hidden;
        Ok(BoundGated {
            gate: self.linear(mlp.gate, ffn, hidden)?,
            up: self.linear(mlp.up, ffn, hidden)?,
            down: self.linear(mlp.down, hidden, ffn)?,
        })
    }

    pub(super) fn linear(
        &self,
        linear: Linear,
        rows: u32,
        cols: u32,
    ) -> Result<BoundLinear<'a>, EvalError> {
        let rows_of = |id: Option<TensorId>| id.map(|id| self.vector(id, rows)).transpose();
        let (scale, bias) = (rows_of(linear.scale)?, rows_of(linear.bias)?);
        Ok(BoundLinear { weight: self.matrix(linear.weight, rows, cols)?, scale, bias })
    }

    pub(super) fn matrix(
        &self,
        tensor: TensorId,
        rows: u32,
        cols: u32,
    ) -> Result<Matrix<'a>, EvalError> {
        let (dtype, bytes) = self.stored(tensor, &[rows, cols])?;
        Matrix::new(dtype, rows as usize, cols as usize, bytes).ok_or(EvalError::Empty(tensor))
    }

    pub(super) fn vector(&self, tensor: TensorId, len: u32) -> Result<Vec<f32>, EvalError> {
        let (dtype, bytes) = self.stored(tensor, &[len])?;
        let mut out = vec![0f32; len as usize];
        ir::decode(dtype, bytes, &mut out);
        Ok(out)
    }

    fn stored(&self, tensor: TensorId, shape: &[u32]) -> Result<(DType, &'a [u8]), EvalError> {
        let len = self.graph.tensors.len();
        let stored = self
            .graph
            .tensors
            .get(tensor.index())
            .ok_or(EvalError::MissingTensor { tensor, len })?;
        if stored.shape != shape {
            return Err(EvalError::Shape {
                tensor,
                want: shape.to_vec(),
                got: stored.shape.clone(),
            });
        }
        let bytes = self.weights.bytes(tensor);
        let want = stored_bytes(stored).unwrap_or(usize::MAX);
        if bytes.len() != want {
            return Err(EvalError::Bytes { tensor, want, got: bytes.len() });
        }
        Ok((stored.dtype, bytes))
    }
}
