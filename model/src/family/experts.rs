//! Experts of a family: their fields, and the names of their tensors.

use ir::{Clamped, EXPERTS_MAX, Experts, FeedForward, Gated, Linear, SLOTS_MAX, Shared};

use crate::error::Problem;
use crate::fields::Fields;
use crate::pieces::{Change, Piece, Strided, Tensors};
use crate::shape::{FFN_MAX, LAYERS_MAX, Shape, WIDTH_STEP};

/// Most experts of all layers: a few numbers in a file must not make a graph of gigabytes.
const ALL_EXPERTS_MAX: u64 = 1 << 15;

/// What a family's experts are called and how they are stored.
pub(crate) struct ExpertRow {
    /// Where they are in a layer.
    pub(crate) block: &'static str,
    /// The router.
    pub(crate) router: &'static str,
    /// Gate, up and down of an expert, each a matrix of its own; or `None`: all experts' in two tensors, gate and up in
    /// alternating columns, transposed, with biases.
    pub(crate) parts: Option<[&'static str; 3]>,
    /// Whether weights of chosen experts sum to 1; `None`: as `norm_topk_prob` says.
    pub(crate) normalised: Option<bool>,
    /// The field of their width.
    pub(crate) width: &'static str,
    /// Defaults: experts, those chosen, width, and the width of the shared one if there is one.
    pub(crate) count: u32,
    pub(crate) top_k: u32,
    pub(crate) ffn: u32,
    pub(crate) shared: Option<u32>,
    /// Whether some layers may have one MLP: `decoder_sparse_step` and `mlp_only_layers` say which.
    pub(crate) sparse: bool,
    pub(crate) clamped: Option<Clamped>,
}

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertShape {
    /// Experts of a layer.
    pub count: u32,
    /// Experts chosen for a position.
    pub top_k: u32,
    /// Width of an expert.
    pub ffn: u32,
    /// Width of the shared expert, if there is one.
    pub shared: Option<u32>,
    /// Whether the weights of the chosen experts sum to 1.
    pub normalised: bool,
    /// Layers that have one MLP instead: `true` for each of them; empty for none.
    pub dense: Vec<bool>,
}

impl ExpertRow {
    /// Reads the family's fields.
    pub(crate) fn read(&self, fields: &mut Fields<'_>, shape: &Shape) -> ExpertShape {
        let (new, old) = (fields.whole("num_experts"), fields.whole("num_local_experts"));
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            let reason = format!("is {old}; num_experts is {new}; keep one of the two");
            fields.complain("num_local_experts", reason);
        }
        ExpertShape {
            count: new.or(old).unwrap_or(self.count),
            top_k: fields.whole("num_experts_per_tok").unwrap_or(self.top_k),
            ffn: fields.whole(self.width).unwrap_or(self.ffn),
            shared: self
                .shared
                .map(|absent| fields.whole("shared_expert_intermediate_size").unwrap_or(absent)),
            normalised: self.normalised.unwrap_or_else(|| fields.flag("norm_topk_prob")),
            dense: if self.sparse { dense(fields, shape.layers) } else { Vec::new() },
        }
    }

    /// Adds a layer's experts.
    pub(crate) fn layer(
        &self,
        at: &str,
        hidden: u32,
        experts: &ExpertShape,
        tensors: &mut Tensors,
    ) -> FeedForward {
        let block = format!("{at}{}.", self.block);
        let router = format!("{block}{}", self.router);
        let router =
            tensors.linear(&router, (experts.count, hidden), self.parts.is_none(), None, None);
        let gated = |tensors: &mut Tensors, name: &str, ffn, parts: [&str; 3]| {
            let mut linear = |part: &str, size| {
                tensors.linear(&format!("{name}.{part}"), size, false, None, None)
            };
            let [gate, up] = [parts[0], parts[1]].map(|part| linear(part, (ffn, hidden)));
            Gated { gate, up, down: linear(parts[2], (hidden, ffn)) }
        };
        let one = |number: u32| {
            let name = format!("{block}experts.{number}");
            match self.parts {
                Some(parts) => gated(tensors, &name, experts.ffn, parts),
                None => stacked(tensors, &format!("{block}experts"), number, hidden, experts),
            }
        };
        let list = (0..experts.count.min(EXPERTS_MAX)).map(one).collect();
        let shared = experts.shared.map(|ffn| {
            let parts = ["gate_proj", "up_proj", "down_proj"];
            let name = format!("{block}shared_expert_gate");
            Shared {
                gate: tensors.linear(&name, (1, hidden), false, None, None),
                ffn,
                mlp: gated(tensors, &format!("{block}shared_expert"), ffn, parts),
            }
        });
        FeedForward::Experts(Box::new(Experts {
            router,
            top_k: experts.top_k,
            normalised: experts.normalised,
            ffn: experts.ffn,
            experts: list,
            clamped: self.clamped,
            shared,
        }))
    }
}

/// Expert `number` of those that lie in two tensors: `gate_up_proj`, `[experts, hidden, 2 * ffn]` with gate and up in
/// alternating columns, and `down_proj`, `[experts, ffn, hidden]`. Both have biases, named after them.
fn stacked(
    tensors: &mut Tensors,
    at: &str,
    number: u32,
    hidden: u32,
    experts: &ExpertShape,
) -> Gated {
    let (count, ffn) = (experts.count, experts.ffn);
    let linear = |tensors: &mut Tensors, part: &str, stored: &str, rows, cols, each: u32| {
        // Of two matrices in alternating columns the second begins one element later.
        let offset = u64::from(part == "up_proj");
        let (e, width) = (u64::from(number), u64::from(rows * each));
        let mut add = |part: &str, stored: String, shape: &[u32], strided| {
            let id = tensors.add(&format!("{at}.{number}.{part}"), shape);
            let change = Change::Strided(strided);
            tensors
                .made_of(id, Piece { name: format!("{at}.{stored}"), first: 0, of: count, change });
            id
        };
        let weight = Strided {
            shape: vec![count, cols, rows * each],
            first: e * u64::from(cols) * width + offset,
            row: each.into(),
            col: width,
        };
        let bias = Strided {
            shape: vec![count, rows * each],
            first: e * width + offset,
            row: each.into(),
            col: 0,
        };
        Linear {
            weight: add(&format!("{part}.weight"), stored.to_owned(), &[rows, cols], weight),
            scale: None,
            bias: Some(add(&format!("{part}.bias"), format!("{stored}_bias"), &[rows], bias)),
        }
    };
    Gated {
        gate: linear(tensors, "gate_proj", "gate_up_proj", ffn, hidden, 2),
        up: linear(tensors, "up_proj", "gate_up_proj", ffn, hidden, 2),
        down: linear(tensors, "down_proj", "down_proj", hidden, ffn, 1),
    }
}

/// The layers that `mlp_only_layers` and `decoder_sparse_step` give one MLP.
fn dense(fields: &mut Fields<'_>, layers: u32) -> Vec<bool> {
    let step = fields.whole("decoder_sparse_step").unwrap_or(1);
    if step == 0 {
        fields.complain("decoder_sparse_step", "is 0; it must be at least 1");
    }
    let only = fields.numbers("mlp_only_layers");
    if only.iter().any(|&layer| layer < 0.0 || layer.fract() != 0.0) {
        fields.complain("mlp_only_layers", "has an entry that is not the number of a layer");
    }
    let count = layers.min(LAYERS_MAX);
    let sparse = |i: u32| !only.contains(&i.into()) && (i + 1).is_multiple_of(step.max(1));
    let dense: Vec<bool> = (0..count).map(|i| !sparse(i)).collect();
    if dense.contains(&true) { dense } else { Vec::new() }
}

impl ExpertShape {
    /// Whether a layer has experts.
    #[must_use]
    pub fn in_layer(&self, layer: usize) -> bool {
        self.dense.get(layer) != Some(&true)
    }

    /// Every reason why these experts cannot be run. `width` names the field that holds the width of an expert, and `layers`
    /// is the model's number of layers.
    pub(crate) fn check(&self, width: &str, layers: u32, found: &mut Vec<Problem>) {
        // In a program, a matrix of one expert is one without experts.
        if self.count < 2 || self.count > EXPERTS_MAX {
            let reason = format!("is {}; supported: 2 to {EXPERTS_MAX}", self.count);
            found.push(Problem::new("num_experts", reason));
        } else if u64::from(self.count) * u64::from(layers) > ALL_EXPERTS_MAX {
            let reason = format!(
                "is {} in each of {layers} layers; supported: {ALL_EXPERTS_MAX} in all of them",
                self.count
            );
            found.push(Problem::new("num_experts", reason));
        } else if self.top_k == 0 || self.top_k > self.count.min(SLOTS_MAX) {
            let (count, top_k) = (self.count, self.top_k);
            let reason = match count <= SLOTS_MAX {
                true => format!("is {top_k}; it must be 1 to {count}, the experts"),
                false => format!("is {top_k}; supported: 1 to {SLOTS_MAX}"),
            };
            found.push(Problem::new("num_experts_per_tok", reason));
        }
        let widths = [(width, Some(self.ffn)), ("shared_expert_intermediate_size", self.shared)];
        for (field, width) in widths {
            let Some(width) = width.filter(|_| found.iter().all(|p| p.subject != field)) else {
                continue;
            };
            if width == 0 || width > FFN_MAX || !width.is_multiple_of(WIDTH_STEP) {
                let reason =
                    format!("is {width}; supported: multiples of {WIDTH_STEP} up to {FFN_MAX}");
                found.push(Problem::new(field, reason));
            }
        }
    }
}
