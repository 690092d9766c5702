//! The slots of a program: one scratch slot per phase, and the constants, caches and tables that tasks read.
//!
//! Scratch slots are written once per step. Where they lie is the business of `pages`.

use abi::SlotKind;
use ir::program::{PackedLayer, PackedMatrix, PackedModel, RowMap, Slot, SlotSource};
use ir::schedule::Handoff;
use ir::{Graph, Layer, SlotId, TensorId};

use crate::assign::Shares;
use crate::emit::task_count;
use crate::error::{Limit, LowerError, within};
use crate::phase::{Op, Phase};

/// The output of a phase, by index of the phase.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    pub(crate) slot: SlotId,
    pub(crate) written: usize,
}

/// Constants and caches of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerSlots {
    pub(crate) attn_norm: SlotId,
    pub(crate) qkv_bias: Option<SlotId>,
    pub(crate) q_norm: Option<SlotId>,
    pub(crate) k_norm: Option<SlotId>,
    pub(crate) kv: SlotId,
    pub(crate) o_bias: Option<SlotId>,
    pub(crate) mlp_norm: SlotId,
    pub(crate) gate_up_bias: Option<SlotId>,
    pub(crate) down_bias: Option<SlotId>,
}

/// Every slot of a program.
pub(crate) struct Slots {
    pub(crate) list: Vec<Slot>,
    pub(crate) embedding: SlotId,
    pub(crate) inv_freq: SlotId,
    pub(crate) layers: Vec<LayerSlots>,
    pub(crate) final_norm: SlotId,
    pub(crate) logits: SlotId,
    /// Outputs of the phases that have one, in phase order.
    pub(crate) scratch: Vec<Scratch>,
}

/// Names every slot.
pub(crate) fn slots(
    graph: &Graph,
    packed: &PackedModel,
    phases: &[Phase],
    shares: &[Shares],
    splits: u32,
    kv_capacity: u32,
) -> Result<Slots, LowerError> {
    let kv_words = 2 * u64::from(graph.kv_width()) * u64::from(kv_capacity);
    within(Limit::KvWords, u32::MAX.into(), kv_words)?;
    let mut list = List(Vec::new());
    let embedding = list.add(
        "embedding".into(),
        SlotKind::Embedding,
        graph.hidden,
        SlotSource::Embedding(packed.embed.id),
    );
    let half = graph.head_dim / 2;
    let inv_freq = list.add("inv_freq".into(), SlotKind::Constant, half, SlotSource::InvFreq);
    let layers = (0_u32..)
        .zip(graph.layers.iter().zip(&packed.layers))
        .map(|(n, (layer, packed))| list.layer(graph, n, layer, packed, kv_words as u32))
        .collect();
    let final_norm = list.vector("final_norm".into(), graph.final_norm, graph.hidden);
    let logits = list.add("logits".into(), SlotKind::Logits, graph.vocab, SlotSource::Scratch);
    let mut scratch = Vec::new();
    for (index, (phase, shares)) in phases.iter().zip(shares).enumerate() {
        let Some(handoff) = phase.handoff else { continue };
        let kind = match handoff {
            Handoff::Counter => SlotKind::Plain,
            Handoff::Tagged => SlotKind::Tagged,
        };
        let words = output_words(graph, phase, shares, splits);
        within(Limit::SlotWords, u32::MAX.into(), words)?;
        let name = output_name(phase);
        let slot = list.add(name, kind, words as u32, SlotSource::Scratch);
        scratch.push(Scratch { slot, written: index });
    }
    within(Limit::Slots, abi::SLOTS_MAX.into(), list.0.len() as u64)?;
    Ok(Slots { list: list.0, embedding, inv_freq, layers, final_norm, logits, scratch })
}

struct List(Vec<Slot>);

impl List {
    fn add(&mut self, name: String, kind: SlotKind, words: u32, source: SlotSource) -> SlotId {
        self.0.push(Slot { name, kind, words, source, offset: 0 });
        SlotId(self.0.len() as u32 - 1)
    }

    fn vector(&mut self, name: String, tensor: TensorId, len: u32) -> SlotId {
        self.map(name, RowMap::single(tensor, len))
    }

    fn map(&mut self, name: String, map: RowMap) -> SlotId {
        self.add(name, SlotKind::Constant, map.rows(), SlotSource::Vector(map))
    }

    fn bias(&mut self, name: String, packed: &PackedMatrix) -> Option<SlotId> {
        packed.bias.clone().map(|map| self.map(name, map))
    }

    fn layer(
        &mut self,
        graph: &Graph,
        n: u32,
        layer: &Layer,
        packed: &PackedLayer,
        kv_words: u32,
    ) -> LayerSlots {
        let name = |part: &str| format!("layers.{n}.{part}");
        let (hidden, head_dim) = (graph.hidden, graph.head_dim);
        LayerSlots {
            attn_norm: self.vector(name("attn_norm"), layer.attn_norm, hidden),
            qkv_bias: self.bias(name("qkv_bias"), &packed.attention.qkv),
            q_norm: layer.q_norm.map(|t| self.vector(name("q_norm"), t, head_dim)),
            k_norm: layer.k_norm.map(|t| self.vector(name("k_norm"), t, head_dim)),
            kv: self.add(name("kv"), SlotKind::KvCache, kv_words, SlotSource::KvCache { layer: n }),
            o_bias: self.bias(name("o_bias"), &packed.attention.o),
            mlp_norm: self.vector(name("mlp_norm"), layer.mlp_norm, hidden),
            gate_up_bias: self.bias(name("gate_up_bias"), &packed.mlp.gate_up),
            down_bias: self.bias(name("down_bias"), &packed.mlp.down),
        }
    }
}

/// The residual stream is `x.0` before layer 0, `layers.N.x` after the attention of layer N and `x.(N + 1)` after its MLP.
fn output_name(phase: &Phase) -> String {
    let n = phase.layer;
    match phase.op {
        Op::Embed => "x.0".into(),
        Op::Qkv => format!("layers.{n}.qkv"),
        Op::Attention => format!("layers.{n}.partials"),
        Op::Merge => format!("layers.{n}.attn"),
        Op::OProj => format!("layers.{n}.x"),
        Op::GateUp => format!("layers.{n}.h"),
        Op::Down => format!("x.{}", n + 1),
        Op::LmHead => "candidates".into(),
        Op::Sample => "sample".into(),
    }
}

fn output_words(graph: &Graph, phase: &Phase, shares: &Shares, splits: u32) -> u64 {
    match phase.op {
        Op::Embed | Op::OProj | Op::Down => graph.hidden.into(),
        Op::Qkv => u64::from(graph.q_width()) + 2 * u64::from(graph.kv_width()),
        Op::Attention => {
            u64::from(splits)
                * u64::from(graph.heads)
                * u64::from(graph.head_dim + abi::PARTIAL_HEADER)
        }
        Op::Merge => graph.q_width().into(),
        Op::GateUp => graph.ffn.into(),
        Op::LmHead => 2 * u64::from(task_count(phase, shares)),
        Op::Sample => 0,
    }
}
