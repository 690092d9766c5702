//! The words of each buffer that a task accesses. `verify` proves order and coverage on these regions; the reference VM
//! checks tags on them. The device accesses exactly the same words.

use std::ops::Range;

use abi::{AttentionParams, BufferKind, Epilogue, MatvecParams, Opcode, Params, Prologue};

use crate::id::BufferId;
use crate::kv::KvDtype;
use crate::program::{Program, Task, part_heads};

/// Words `start..end` of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// The buffer.
    pub buffer: BufferId,
    /// First word.
    pub start: u32,
    /// One past the last word.
    pub end: u32,
}

/// The regions that a task reads and writes. Constants and the embedding are never written and are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// Words read.
    pub reads: Vec<Region>,
    /// Words written.
    pub writes: Vec<Region>,
}

/// The regions that `task` accesses. A buffer out of range gives no region (the shape rules report it). Word ranges are
/// not clipped, so that the bounds rule sees them. Arithmetic saturates: an absurd parameter gives an absurd region,
/// never a wrapped one.
#[must_use]
pub fn accesses(program: &Program, task: &Task) -> Accesses {
    let mut finder = Finder { program, task, found: Accesses::default() };
    match task.op() {
        Params::Nop(_) => {}
        Params::Embed(p) => finder.write(0, p.offset, p.len),
        Params::Matvec(p) => finder.matvec(p),
        Params::Attention(p) => finder.attention(p),
        Params::AttentionMerge(p) => {
            finder.partials(p.head0, p.heads, p.heads_total, p.head_dim, p.splits);
            let (start, len) =
                (p.head0.saturating_mul(p.head_dim), p.heads.saturating_mul(p.head_dim));
            finder.write(0, start, len);
        }
        Params::Sample(p) => finder.read(0, 0, p.candidates.saturating_mul(2)),
        Params::Route(p) => {
            finder.read(0, p.first, p.experts);
            finder.write(0, 0, p.slots.saturating_mul(2));
        }
        Params::Norm(p) => {
            finder.read(0, 0, p.width);
            finder.write(0, p.offset, p.len);
        }
    }
    finder.found
}

/// The route of a product whose loads follow the logits. Its words are read while the product multiplies, and are there by
/// then, so the product begins with the logits.
#[must_use]
pub fn read_late(task: &Task) -> Option<BufferId> {
    let ranks = task.opcode == Opcode::Matvec && task.reads[5].is_some();
    if ranks { task.reads[4] } else { None }
}

/// Elements of a group of the residual stream that one thread stores.
const GROUP: u32 = 4;

/// The elements of the residual stream that a product with the prologue `post_norm` stores, if it stores any: those of its
/// tiles, when the matrix's tiles in order have equally many groups of elements until none are left.
#[must_use]
pub fn stream_part(p: &MatvecParams) -> Range<u32> {
    let (groups, tiles) = (p.k_len.div_ceil(GROUP), p.rows.div_ceil(abi::UNIT_ROWS).max(1));
    let each = groups.div_ceil(tiles) * GROUP;
    let at = |tile: u32| tile.saturating_mul(each).min(p.k_len);
    at(p.tile0)..at(p.tile0.saturating_add(p.tiles))
}

struct Finder<'a> {
    program: &'a Program,
    task: &'a Task,
    found: Accesses,
}

impl Finder<'_> {
    fn region(&self, id: Option<BufferId>, start: u32, len: u32) -> Option<Region> {
        let id = id?;
        let buffer = self.program.buffers.get(id.index())?;
        let tracked =
            matches!(buffer.kind, BufferKind::Plain | BufferKind::FlagInData | BufferKind::Logits)
                || KvDtype::of_buffer(buffer.kind).is_some();
        tracked.then_some(Region { buffer: id, start, end: start.saturating_add(len) })
    }

    fn read(&mut self, index: usize, start: u32, len: u32) {
        self.found.reads.extend(self.region(self.task.reads[index], start, len));
    }

    fn write(&mut self, index: usize, start: u32, len: u32) {
        self.found.writes.extend(self.region(self.task.writes[index], start, len));
    }

    fn partials(&mut self, head0: u32, heads: u32, heads_total: u32, head_dim: u32, splits: u32) {
        let stride = head_dim.saturating_add(abi::PARTIAL_HEADER);
        for split in 0..splits.min(abi::SPLITS_MAX) {
            let first = split.saturating_mul(heads_total).saturating_add(head0);
            self.read(0, first.saturating_mul(stride), heads.saturating_mul(stride));
        }
    }

    fn matvec(&mut self, p: &MatvecParams) {
        if p.prologue == Prologue::Merge as u32 {
            let heads = p.k_len / p.head_dim.max(1);
            self.partials(0, heads, heads, p.head_dim, p.splits);
        } else {
            self.read(0, 0, p.k_len);
        }
        if p.prologue == Prologue::PostNorm as u32 {
            self.read(3, 0, p.k_len);
            let part = stream_part(p);
            if p.epilogue != Epilogue::Logits as u32 && !part.is_empty() {
                self.write(1, part.start, part.end - part.start);
            }
        }
        if let Some(route) = self.task.reads[4].and_then(|id| self.program.buffers.get(id.index()))
        {
            self.read(4, 0, route.words);
        }
        // Of the loader: it ranks the experts itself, before the task has its route.
        if let Some(matrix) = self.program.matrices.get(p.matrix as usize) {
            self.read(5, 0, matrix.experts);
        }
        let row0 = p.tile0.saturating_mul(abi::UNIT_ROWS);
        let row1 =
            p.tile0.saturating_add(p.tiles).saturating_mul(abi::UNIT_ROWS).min(p.rows.max(row0));
        if p.epilogue == Epilogue::SiluMul as u32 {
            // Gate and up tiles alternate, so two tiles give eight output rows; `rows` counts rows of the padded
            // matrix.
            let out_rows = self.task.writes[0]
                .and_then(|buffer| self.program.buffers.get(buffer.index()))
                .map_or(0, |s| s.words);
            let (start, end) = (row0 / 2, (row1 / 2).min(out_rows.max(row0 / 2)));
            self.write(0, start, end - start);
            return;
        }
        if p.epilogue == Epilogue::Residual as u32 {
            self.read(3, row0, row1 - row0);
        }
        self.write(0, row0, row1 - row0);
        if p.epilogue == Epilogue::Logits as u32 {
            self.write(1, p.candidate.saturating_mul(2), 2);
        }
    }

    fn attention(&mut self, p: &AttentionParams) {
        let hd = p.head_dim;
        let heads = p.kv_heads.saturating_mul(p.group);
        let part = part_heads(p.group, p.part);
        let (head, count) =
            (p.kv_head.saturating_mul(p.group).saturating_add(part.start), part.len() as u32);
        self.read(0, head.saturating_mul(hd), count.saturating_mul(hd));
        self.read(0, heads.saturating_add(p.kv_head).saturating_mul(hd), hd);
        self.read(
            0,
            heads.saturating_add(p.kv_heads).saturating_add(p.kv_head).saturating_mul(hd),
            hd,
        );
        let first = p.split.saturating_mul(heads).saturating_add(head);
        let stride = hd.saturating_add(abi::PARTIAL_HEADER);
        self.write(0, first.saturating_mul(stride), count.saturating_mul(stride));
    }
}
