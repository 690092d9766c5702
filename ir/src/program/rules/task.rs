//! Task rules, each task by itself: the buffers that its op needs, and parameters that agree with buffers, matrices and
//! dimensions.
//!
//! Relies on valid limits, matrices and buffers. Everything later relies on this: regions lie inside their buffers.

use abi::{
    Activation, AttentionMergeParams, AttentionParams, BufferKind, EmbedParams, Epilogue,
    MatvecParams, NormParams, Opcode, Params, Prologue, RouteParams, SampleParams, Scoring,
};

use crate::id::BufferId;
use crate::kv::KvDtype;
use crate::program::stream::uncountable;
use crate::program::{
    Buffer, BufferSource, Matrix, Program, Task, accesses, group_parts, stream_part,
};
use crate::violation::{At, Rule, Violations};

use super::{buffer_name, named, tasks};

pub(in crate::program) fn check(program: &Program, found: &mut Violations) {
    for (at, task) in tasks(program) {
        let before = found.total();
        ids(program, task, &at, found);
        if found.total() > before {
            continue;
        }
        let mut op = Op { program, task, at: &at, found };
        if task.opcode != Opcode::Matvec {
            op.none(&[5], &[]);
        }
        match task.op() {
            Params::Nop(p) => {
                op.zero(&p.reserved);
                op.none(&[0, 1, 2, 3, 4], &[0, 1]);
            }
            Params::Embed(p) => op.embed(p),
            Params::Matvec(p) => op.matvec(p),
            Params::Attention(p) => op.attention(p),
            Params::AttentionMerge(p) => op.attention_merge(p),
            Params::Sample(p) => op.sample(p),
            Params::Norm(p) => op.norm(p),
            Params::Route(p) => op.route(p),
        }
        if found.total() == before {
            bounds(program, task, &at, found);
        }
    }
}

/// Checks that every id is in range, and so is the layer.
fn ids(program: &Program, task: &Task, at: &At, found: &mut Violations) {
    let mut wrong = |rule, detail| found.push(rule, at.clone(), detail);
    for buffer in named(task).filter(|buffer| buffer.index() >= program.buffers.len()) {
        wrong(Rule::PArity, format!("there is no buffer {buffer}"));
    }
    for counter in task.waits.iter().map(|wait| wait.counter).chain(task.signal) {
        if counter.0 >= program.counters {
            wrong(Rule::PArity, format!("there is no counter {counter}"));
        }
    }
    if task.waits.len() > abi::WAITS_MAX {
        wrong(Rule::PArity, format!("{} waits, at most {}", task.waits.len(), abi::WAITS_MAX));
    }
    if u32::from(task.layer) > program.dims.layers {
        wrong(Rule::PShape, format!("layer {} of {}", task.layer, program.dims.layers));
    }
}

/// Checks that no region is empty or reaches outside its buffer.
fn bounds(program: &Program, task: &Task, at: &At, found: &mut Violations) {
    let touched = accesses(program, task);
    for region in touched.reads.iter().chain(&touched.writes) {
        let words = program.buffers[region.buffer.index()].words;
        if region.start >= region.end || region.end > words {
            let name = buffer_name(program, region.buffer);
            found.push(
                Rule::PShape,
                at.clone(),
                format!("words {}..{} of {name}, which has {words}", region.start, region.end),
            );
        }
    }
}

const ACTIVATION: &[BufferKind] = &[BufferKind::Plain, BufferKind::FlagInData];
/// A candidate holds a row number, which leaves no bits for a tag.
const CANDIDATES: &[BufferKind] = &[BufferKind::Plain];
const VECTOR: &[BufferKind] = &[BufferKind::Plain, BufferKind::FlagInData, BufferKind::Embedding];
const CONSTANT: &[BufferKind] = &[BufferKind::Constant];

struct Op<'a> {
    program: &'a Program,
    task: &'a Task,
    at: &'a At,
    found: &'a mut Violations,
}

impl<'a> Op<'a> {
    fn wrong(&mut self, rule: Rule, detail: String) {
        self.found.push(rule, self.at.clone(), detail);
    }

    fn shape(&mut self, detail: String) {
        self.wrong(Rule::PShape, detail);
    }

    fn arity(&mut self, detail: String) {
        self.wrong(Rule::PArity, detail);
    }

    fn equal(&mut self, what: &str, actual: u32, expected: u32) {
        if actual != expected {
            self.shape(format!("{what} is {actual}, expected {expected}"));
        }
    }

    fn below(&mut self, what: &str, actual: u32, limit: u32) {
        if actual >= limit {
            self.shape(format!("{what} is {actual}, not below {limit}"));
        }
    }

    fn finite(&mut self, what: &str, value: f32) {
        if !(value.is_finite() && value >= 0.0) {
            self.shape(format!("{what} is {value}"));
        }
    }

    fn zero(&mut self, reserved: &[u32]) {
        if reserved.iter().any(|&word| word != 0) {
            self.wrong(Rule::POpcode, "a reserved parameter is not zero".into());
        }
    }

    /// Requires a buffer of one of these kinds.
    fn buffer(
        &mut self,
        what: &str,
        id: Option<BufferId>,
        kinds: &[BufferKind],
    ) -> Option<&'a Buffer> {
        let Some(id) = id else {
            self.arity(format!("{what} is missing"));
            return None;
        };
        let buffer = &self.program.buffers[id.index()];
        if !kinds.contains(&buffer.kind) {
            let name = buffer_name(self.program, id);
            self.arity(format!("{what} is {name}, a {} buffer", buffer.kind.name()));
            return None;
        }
        Some(buffer)
    }

    fn read(&mut self, what: &str, index: usize, kinds: &[BufferKind]) -> Option<&'a Buffer> {
        self.buffer(what, self.task.reads[index], kinds)
    }

    fn write(&mut self, what: &str, index: usize, kinds: &[BufferKind]) -> Option<&'a Buffer> {
        self.buffer(what, self.task.writes[index], kinds)
    }

    /// Requires a buffer of exactly this many words. An embedding counts as one row.
    fn words(&mut self, what: &str, buffer: Option<&Buffer>, words: u64) {
        let Some(buffer) = buffer else { return };
        let have = if buffer.kind == BufferKind::Embedding {
            u64::from(self.program.dims.hidden)
        } else {
            u64::from(buffer.words)
        };
        if have != words {
            self.shape(format!("{what} is {} with {have} words, expected {words}", buffer.name));
        }
    }

    fn read_words(&mut self, what: &str, index: usize, kinds: &[BufferKind], words: u64) {
        let buffer = self.read(what, index, kinds);
        self.words(what, buffer, words);
    }

    fn write_words(&mut self, what: &str, index: usize, kinds: &[BufferKind], words: u64) {
        let buffer = self.write(what, index, kinds);
        self.words(what, buffer, words);
    }

    /// Requires that the buffers from these places on are unused.
    fn none(&mut self, reads: &[usize], writes: &[usize]) {
        let op = self.task.opcode.info().name;
        for &index in reads.iter().filter(|&&index| self.task.reads[index].is_some()) {
            self.arity(format!("read {index} is not used by this {op}"));
        }
        for &index in writes.iter().filter(|&&index| self.task.writes[index].is_some()) {
            self.arity(format!("write {index} is not used by this {op}"));
        }
    }

    /// Checks the parameters common to attention and its two merges.
    fn splits(&mut self, head_dim: u32, splits: u32, kv_block: u32) {
        self.equal("head_dim", head_dim, self.program.dims.head_dim);
        if !(1..=abi::SPLITS_MAX).contains(&splits) {
            self.shape(format!("splits is {splits}, not within 1..={}", abi::SPLITS_MAX));
        }
        if !(1..=abi::KV_CAPACITY_MAX).contains(&kv_block) {
            self.shape(format!("kv_block is {kv_block}, not within 1..={}", abi::KV_CAPACITY_MAX));
        }
    }

    fn partial_words(&self, splits: u32) -> u64 {
        let d = &self.program.dims;
        u64::from(splits) * u64::from(d.heads) * u64::from(d.head_dim + abi::PARTIAL_HEADER)
    }

    fn matrix(&mut self, p: &MatvecParams) {
        let Some(m) = self.program.matrices.get(p.matrix as usize) else {
            self.arity(format!("there is no matrix m{}", p.matrix));
            return;
        };
        if m.format.is_rows() {
            self.shape(format!(
                "{} is {}, which is read and not multiplied",
                m.name,
                m.format.name()
            ));
        }
        // With a route, rows or columns are those of all slots.
        let (slots, gated) = (self.slots(m), p.epilogue == Epilogue::SiluMul as u32);
        let (row_slots, col_slots) = if gated { (slots, 1) } else { (1, slots) };
        let whole_units = !gated && self.task.reads[4].is_some();
        let unit_cols = m.format.unit_cols();
        let cols = if whole_units { m.cols.next_multiple_of(unit_cols) } else { m.cols };
        self.equal("units", p.units, m.units_per_tile().saturating_mul(col_slots));
        self.equal("k_len", p.k_len, cols.saturating_mul(col_slots));
        let all_rows = m.expert_rows().saturating_mul(row_slots);
        self.equal("rows", p.rows, all_rows);
        let (end, tiles) =
            (u64::from(p.tile0) + u64::from(p.tiles), all_rows.div_ceil(abi::UNIT_ROWS));
        if p.tiles == 0 || end > u64::from(tiles) {
            self.shape(format!("tiles {}..+{} of {}, which has {tiles}", p.tile0, p.tiles, m.name));
        }
        if let Some(detail) = uncountable(self.program, p.units) {
            self.wrong(Rule::PLimit, detail);
        }
    }

    /// Slots of the task's route; 1 without one. Where there is a choice, the logits that it is made by are read too.
    fn slots(&mut self, matrix: &Matrix) -> u32 {
        if matrix.experts > 1 {
            self.read("the experts' logits", 5, &[BufferKind::FlagInData]);
        } else {
            self.none(&[5], &[]);
        }
        if self.task.reads[4].is_none() {
            if matrix.experts > 1 {
                self.arity(format!(
                    "{} has {} experts and the task no route",
                    matrix.name, matrix.experts
                ));
            }
            return 1;
        }
        let route = self.read("the route", 4, &[BufferKind::FlagInData]);
        route.map_or(1, |route| route.words / 2)
    }

    fn prologue(&mut self, p: &MatvecParams, prologue: Prologue) {
        let d = &self.program.dims;
        let norm = match prologue {
            Prologue::Copy | Prologue::Rms => {
                self.read_words("the input", 0, VECTOR, p.k_len.into());
                prologue == Prologue::Rms
            }
            Prologue::PostNorm => return self.post_norm(p),
            Prologue::Merge => {
                self.read_words("the partials", 0, ACTIVATION, self.partial_words(p.splits));
                self.splits(p.head_dim, p.splits, p.kv_block);
                self.equal("k_len", p.k_len, d.heads * d.head_dim);
                false
            }
        };
        if norm {
            self.read_words("the norm weight", 1, CONSTANT, p.k_len.into());
            self.finite("eps", p.eps);
        } else {
            self.none(&[1], &[]);
        }
        self.row_constants(p);
    }

    /// A prologue that adds a block's result to the residual stream. Read 3 is the stream, so that no epilogue can add
    /// another residual, and there is no place for a route's constants.
    fn post_norm(&mut self, p: &MatvecParams) {
        // The kernel has registers for vectors of this width.
        self.equal("k_len", p.k_len, self.program.dims.hidden);
        self.read_words("the block's result", 0, ACTIVATION, p.k_len.into());
        let weights = self.read("the norm weights", 1, CONSTANT).map(|found| found.words);
        let one = u64::from(p.k_len);
        if weights.is_some_and(|words| ![one, 2 * one].contains(&u64::from(words))) {
            let words = weights.unwrap_or(0);
            self.shape(format!("{words} norm weights, expected {one} or twice as many"));
        }
        self.finite("eps", p.eps);
        self.read_words("the residual stream", 3, VECTOR, one);
        self.none(&[4], &[]);
        let epilogue = Epilogue::new(p.epilogue);
        if epilogue == Some(Epilogue::Residual) {
            self.arity("a product after a norm that is added to the residual adds another".into());
        }
        if epilogue != Some(Epilogue::Logits) && self.task.writes[1].is_some() {
            self.write_words("the sum", 1, ACTIVATION, one);
            if stream_part(p).is_empty() {
                self.arity("stores no part of the sum, and names a buffer for it".into());
            }
        }
        self.row_constants(p);
    }

    /// Requires that the places of the residual and of a second output are unused, but for a prologue that has both.
    fn one_output(&mut self, p: &MatvecParams) {
        if p.prologue != Prologue::PostNorm as u32 {
            self.none(&[3], &[1]);
        }
    }

    /// Scales and biases: one for each row of the matrix, the scales first, which experts share.
    fn row_constants(&mut self, p: &MatvecParams) {
        let matrix = self.program.matrices.get(p.matrix as usize);
        let scaled = matrix.is_some_and(|matrix| matrix.format.is_scaled());
        let rows = matrix.map_or(u64::from(p.rows), |matrix| u64::from(matrix.rows()));
        if !scaled {
            if self.task.reads[2].is_some() {
                self.read_words("the bias", 2, CONSTANT, rows);
            }
            return;
        }
        let scales = matrix.map_or(rows, |matrix| u64::from(matrix.expert_rows()));
        // Rows that alternate have no place for biases behind the scales, unless a route is followed.
        let interleaved = matrix.is_some_and(|matrix| matrix.map.interleaved);
        let biased = !interleaved || self.task.reads[4].is_some();
        let most = if biased { scales + rows } else { scales };
        if let Some(found) = self.read("the scales", 2, CONSTANT)
            && ![scales, most].contains(&u64::from(found.words))
        {
            self.shape(format!(
                "the scales are {} with {} words, expected {scales}{}",
                found.name,
                found.words,
                if biased { format!(", or {most} with biases") } else { String::new() }
            ));
        }
    }

    fn epilogue(&mut self, p: &MatvecParams, epilogue: Epilogue) {
        match epilogue {
            Epilogue::Store => {
                self.write_words("the output", 0, ACTIVATION, p.rows.into());
                self.one_output(p);
            }
            Epilogue::Residual => {
                self.read_words("the residual", 3, VECTOR, p.rows.into());
                self.write_words("the output", 0, ACTIVATION, p.rows.into());
                self.none(&[], &[1]);
            }
            Epilogue::SiluMul => {
                if let Some(out) = self.write("the output", 0, ACTIVATION)
                    && u64::from(out.words).next_multiple_of(8) != u64::from(p.rows / 2)
                {
                    self.shape(format!(
                        "{} has {} words, but gate and up make {}",
                        out.name,
                        out.words,
                        p.rows / 2
                    ));
                }
                if !p.tile0.is_multiple_of(2) || !p.tiles.is_multiple_of(2) {
                    self.shape(format!(
                        "tiles {}..+{} split a pair of gate and up",
                        p.tile0, p.tiles
                    ));
                }
                let pairs = self
                    .program
                    .matrices
                    .get(p.matrix as usize)
                    .is_some_and(|m| m.map.interleaved && m.map.parts.len().is_multiple_of(2));
                if !pairs {
                    self.shape(format!("m{} does not alternate tiles of gate and up", p.matrix));
                }
                self.one_output(p);
            }
            Epilogue::Logits => {
                self.write_words("the logits", 0, &[BufferKind::Logits], p.rows.into());
                self.equal("rows", p.rows, self.program.dims.vocab);
                self.write("the candidates", 1, CANDIDATES);
                if p.prologue != Prologue::PostNorm as u32 {
                    self.none(&[3], &[]);
                }
            }
        }
    }

    fn embed(&mut self, p: &EmbedParams) {
        self.zero(&p.reserved);
        self.finite("scale", p.scale);
        self.read("the embedding", 0, &[BufferKind::Embedding]);
        self.write_words("the output", 0, ACTIVATION, self.program.dims.hidden.into());
        if p.len == 0 {
            self.shape("len is zero".into());
        }
        self.none(&[1, 2, 3, 4], &[1]);
    }

    fn norm(&mut self, p: &NormParams) {
        self.zero(&p.reserved);
        let parts = u64::from(p.first) + u64::from(p.second);
        if p.first == 0 || parts > p.width.into() {
            self.shape(format!("parts of {} and {} in {} elements", p.first, p.second, p.width));
        }
        self.finite("eps", p.eps);
        self.read_words("the input", 0, ACTIVATION, p.width.into());
        self.read_words("the norm weight", 1, CONSTANT, parts);
        self.write_words("the output", 0, ACTIVATION, p.width.into());
        self.none(&[2, 3, 4], &[1]);
    }

    fn route(&mut self, p: &RouteParams) {
        self.zero(&p.reserved);
        if Scoring::new(p.scoring).is_none() {
            self.wrong(Rule::POpcode, format!("scoring {} is not in the table", p.scoring));
        }
        let most = p.experts.min(abi::SLOTS_MAX);
        if !(1..=most).contains(&p.slots) || p.experts > abi::EXPERTS_MAX {
            let (slots, all) = (abi::SLOTS_MAX, abi::EXPERTS_MAX);
            self.shape(format!(
                "{} of {} experts, at most {slots} of at most {all} are possible",
                p.slots, p.experts
            ));
        }
        self.read("the logits", 0, ACTIVATION);
        self.write_words("the route", 0, &[BufferKind::FlagInData], 2 * u64::from(p.slots));
        self.none(&[1, 2, 3, 4], &[1]);
    }

    fn matvec(&mut self, p: &MatvecParams) {
        self.finite("cap", p.cap);
        // They mean nothing elsewhere.
        let (activation, cap) = (p.activation, p.cap.to_bits());
        let gated = p.epilogue == Epilogue::SiluMul as u32;
        let clamped = gated && activation == Activation::ClampedSilu as u32;
        self.zero(&[
            if gated { 0 } else { activation },
            if clamped || p.epilogue == Epilogue::Logits as u32 { 0 } else { cap },
        ]);
        if clamped && p.cap == 0.0 {
            self.shape("clamped_silu has no limit".into());
        }
        if p.epilogue == Epilogue::Logits as u32 {
            self.none(&[4], &[]);
        }
        if Activation::new(p.activation).is_none() {
            self.wrong(Rule::POpcode, format!("activation {} is not in the table", p.activation));
        }
        self.matrix(p);
        match Prologue::new(p.prologue) {
            Some(prologue) => self.prologue(p, prologue),
            None => {
                self.wrong(Rule::POpcode, format!("prologue {} is not in the table", p.prologue))
            }
        }
        match Epilogue::new(p.epilogue) {
            Some(epilogue) => self.epilogue(p, epilogue),
            None => {
                self.wrong(Rule::POpcode, format!("epilogue {} is not in the table", p.epilogue))
            }
        }
    }

    fn attention(&mut self, p: &AttentionParams) {
        let d = self.program.dims;
        self.zero(&p.reserved);
        self.splits(p.head_dim, p.splits, p.kv_block);
        self.equal("kv_heads", p.kv_heads, d.kv_heads);
        self.equal("group", p.group, d.heads / d.kv_heads);
        self.below("kv_head", p.kv_head, d.kv_heads);
        self.below("split", p.split, p.splits);
        self.below("part", p.part, group_parts(p.group));
        self.finite("eps", p.eps);
        self.finite("cap", p.cap);
        if !p.scale.is_finite() {
            self.shape(format!("scale is {}", p.scale));
        }
        self.read_words(
            "qkv",
            0,
            ACTIVATION,
            (u64::from(d.heads) + 2 * u64::from(d.kv_heads)) * u64::from(d.head_dim),
        );
        for (what, index) in [("the q norm", 1), ("the k norm", 2)] {
            if self.task.reads[index].is_some() {
                let norm = self.read(what, index, CONSTANT);
                self.words(what, norm, d.head_dim.into());
            }
        }
        if let Some(freq) = self.read("inverse frequencies", 3, CONSTANT)
            && !matches!(freq.source, BufferSource::Rotary(_))
        {
            self.arity(format!("{} does not hold a rotary table", freq.name));
        }
        if self.task.reads[4].is_some() {
            let sinks = self.read("the sinks", 4, CONSTANT);
            self.words("the sinks", sinks, d.heads.into());
        }
        self.write_words("the partials", 0, ACTIVATION, self.partial_words(p.splits));
        self.write("the cache", 1, &KvDtype::ALL.map(KvDtype::buffer_kind));
    }

    fn attention_merge(&mut self, p: &AttentionMergeParams) {
        let d = self.program.dims;
        self.zero(&p.reserved);
        self.splits(p.head_dim, p.splits, p.kv_block);
        self.equal("heads_total", p.heads_total, d.heads);
        if p.heads == 0 || u64::from(p.head0) + u64::from(p.heads) > u64::from(d.heads) {
            self.shape(format!("heads {}..+{} of {}", p.head0, p.heads, d.heads));
        }
        self.read_words("the partials", 0, ACTIVATION, self.partial_words(p.splits));
        self.write_words("the output", 0, ACTIVATION, u64::from(d.heads) * u64::from(d.head_dim));
        self.none(&[1, 2, 3, 4], &[1]);
    }

    fn sample(&mut self, p: &SampleParams) {
        self.zero(&p.reserved);
        if self.program.topology.devices == 1 {
            self.read_words("the candidates", 0, CANDIDATES, 2 * u64::from(p.candidates));
        } else {
            // Devices may have different numbers of them: rule D-LOCAL.
            self.read("the candidates", 0, CANDIDATES);
        }
        if p.candidates == 0 {
            self.shape("no candidates".into());
        }
        self.none(&[1, 2, 3, 4], &[0, 1]);
    }
}
