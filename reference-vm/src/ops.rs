//! The ops: their reads, arithmetic and writes. An op that does more than move words has its own file, named as in the
//! opcode table.
//!
//! An op is a function of memory, the step and its parameters; it returns its [`Effects`] and changes nothing. `inputs`
//! lists the activations that must have arrived before it may run.

mod attention;
mod attention_merge;
mod matvec;
mod norm;
mod route;
mod sample;

use abi::Params;
use ir::BufferId;
use ir::program::{Task, active_splits, attended};

use crate::defect::{Defect, WindowDefect};
use crate::memory::{Append, Memory, Span, Step};
use crate::packed::Packed;
use crate::products::Products;
use crate::trap::Fault;
use crate::wave::Wave;

/// The inputs of a task.
#[derive(Clone, Copy)]
pub(crate) struct Context<'m> {
    pub(crate) task: &'m Task,
    pub(crate) step: Step,
    pub(crate) memory: &'m Memory<'m>,
    pub(crate) packed: &'m [Packed<'m>],
    /// Cached products, if the machine may use them, and the operands that tasks of this wave share.
    pub(crate) products: Option<(&'m Products<'m>, &'m Wave)>,
    /// The machine's defect in the task's layer.
    pub(crate) defect: Option<Defect>,
    /// The machine's defect in windows.
    pub(crate) window_defect: Option<WindowDefect>,
}

#[derive(Default)]
pub(crate) struct Effects {
    /// Stores: buffer, first word, words.
    pub(crate) writes: Vec<(BufferId, u32, Vec<u32>)>,
    pub(crate) append: Option<Append>,
    /// The device's best token; it ends the step of the device.
    pub(crate) chosen: Option<Best>,
}

/// A token, and the logit that it was chosen by.
#[derive(Clone, Copy)]
pub(crate) struct Best {
    pub(crate) logit: f32,
    pub(crate) token: u32,
}

impl Best {
    /// The better of two; of equals the smaller token.
    pub(crate) fn better(self, other: Self) -> Self {
        let wins =
            self.logit > other.logit || self.logit == other.logit && self.token < other.token;
        if wins { self } else { other }
    }
}

impl Effects {
    fn store(buffer: BufferId, start: u32, values: &[f32]) -> Self {
        Self { writes: vec![(buffer, start, bits(values))], ..Self::default() }
    }
}

/// The words that must have arrived before the task runs.
pub(crate) fn inputs(context: Context<'_>) -> Result<Vec<Span>, Fault> {
    match context.task.op() {
        Params::Nop(p) => reserved(&p.reserved).map(|()| Vec::new()),
        Params::Embed(p) => reserved(&p.reserved).map(|()| Vec::new()),
        Params::Matvec(p) => matvec::inputs(context, p),
        Params::Attention(p) => attention::inputs(context, p),
        Params::AttentionMerge(p) => attention_merge::inputs(context, p),
        Params::Sample(p) => sample::inputs(context, p),
        Params::Norm(p) => norm::inputs(context, p),
        Params::Route(p) => route::inputs(context, p),
    }
}

pub(crate) fn fire(context: Context<'_>) -> Result<Effects, Fault> {
    match context.task.op() {
        Params::Nop(_) => Ok(Effects::default()),
        // A part of the token's embedding row.
        Params::Embed(p) => {
            let mut row = context.read(0, p.offset, p.len)?;
            if p.scale != 0.0 {
                row.iter_mut().for_each(|x| *x *= p.scale);
            }
            Ok(Effects::store(context.writes(0)?, p.offset, &row))
        }
        Params::Matvec(p) => matvec::fire(context, p),
        Params::Attention(p) => attention::fire(context, p),
        Params::AttentionMerge(p) => attention_merge::fire(context, p),
        Params::Sample(p) => sample::fire(context, p),
        Params::Norm(p) => norm::fire(context, p),
        Params::Route(p) => route::fire(context, p),
    }
}

impl<'m> Context<'m> {
    /// The same task in another sequence of the window, at that one's position.
    fn in_seq(self, seq: u32) -> Self {
        let at = |of: u32| of + seq - self.step.seq;
        let (position, before) = (at(self.step.position), at(self.step.before));
        Self { step: Step { seq, position, before, ..self.step }, ..self }
    }

    fn reads(self, index: usize) -> Result<BufferId, Fault> {
        self.task.reads[index].ok_or(Fault::NoBuffer { access: "read", index })
    }

    fn writes(self, index: usize) -> Result<BufferId, Fault> {
        self.task.writes[index].ok_or(Fault::NoBuffer { access: "write", index })
    }

    fn span(self, index: usize, start: u32, len: u32) -> Result<Span, Fault> {
        Ok(Span { buffer: self.reads(index)?, start, len, seq: self.step.seq })
    }

    fn read(self, index: usize, start: u32, len: u32) -> Result<Vec<f32>, Fault> {
        self.memory.read(self.span(index, start, len)?, self.step, self.packed)
    }

    fn read_optional(self, index: usize, start: u32, len: u32) -> Result<Option<Vec<f32>>, Fault> {
        if self.task.reads[index].is_none() {
            return Ok(None);
        }
        self.read(index, start, len).map(Some)
    }
}

/// A product of parameters, which must fit a word.
fn product(name: &'static str, a: u32, b: u32) -> Result<u32, Fault> {
    a.checked_mul(b).ok_or(Fault::Parameter { name, value: a })
}

/// Reserved parameters must be zero, since a later version of the table may use them.
fn reserved(words: &[u32]) -> Result<(), Fault> {
    let set = words.iter().find(|&&word| word != 0);
    set.map_or(Ok(()), |&value| Err(Fault::Parameter { name: "reserved", value }))
}

/// The split of a step's keys; the same in `attention` and in both merges.
#[derive(Clone, Copy)]
struct Splits {
    keys: u32,
    active: u32,
}

impl Splits {
    fn new(step: Step, window: u32, kv_block: u32, splits: u32) -> Result<Self, Fault> {
        if kv_block == 0 {
            return Err(Fault::Parameter { name: "kv_block", value: kv_block });
        }
        if splits == 0 || splits > abi::SPLITS_MAX {
            return Err(Fault::Parameter { name: "splits", value: splits });
        }
        let keys = attended(step.position, window);
        Ok(Self { keys, active: active_splits(keys, kv_block, splits) })
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
