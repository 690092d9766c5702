//! Simulates a program under weak memory: not its arithmetic, but which write each read finds.
//!
//! A second check of `verify`, which shares nothing with it but the words that a task accesses. The memory is that of
//! the explorer (`explore`), adapted to programs: every worker has two warps with a view each, which meet where the
//! device has a block barrier; loads pick any value that is not older than the view, and stores any place after it. The
//! choices are drawn from a seed, so this samples where the explorer exhausts. Several steps run, early enough for
//! splits of attention to be idle.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use abi::{AttentionParams, BufferKind, Epilogue, MatvecParams, Opcode};
use ir::program::{Program, Region, Task, accesses, active_splits, attended, split_range};

use crate::rng::Rng;

/// Warps per worker: enough for two of them to diverge.
const WARPS: usize = 2;

/// A value in a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    step: u32,
    buffer: u32,
    /// Task that wrote it.
    by: usize,
}

/// The place of a value in the history of its piece. New places are made between old ones.
type Place = f64;

type View = Vec<Place>;

fn join(mine: &mut View, theirs: &View) {
    mine.iter_mut().zip(theirs).for_each(|(m, t)| *m = m.max(*t));
}

/// One operation of a warp.
#[derive(Clone, Copy, Debug)]
enum Micro {
    Wait { counter: usize, need: u32 },
    Begin { step: u32 },
    Meet,
    Read { piece: usize, want: Value, polled: bool },
    Write { piece: usize, value: Value },
    Signal { counter: usize },
    End,
}

/// Divides the program's bytes where accesses begin or end.
struct Pieces<'a> {
    program: &'a Program,
    /// First byte of each buffer's words: arena, then logits, then candidates of caches.
    bases: Vec<u64>,
    cuts: Vec<u64>,
    caches: HashMap<(u32, u32, u32), usize>,
}

impl<'a> Pieces<'a> {
    fn new(program: &'a Program) -> Self {
        let mut logits = 1 << 40;
        let base = |buffer: &ir::program::Buffer| match buffer.kind {
            BufferKind::Logits => {
                logits += 1 << 32;
                logits
            }
            BufferKind::Plain
            | BufferKind::FlagInData
            | BufferKind::Constant
            | BufferKind::KvCache
            | BufferKind::KvCacheE4m3
            | BufferKind::Embedding => buffer.offset,
        };
        let bases = program.buffers.iter().map(base).collect();
        let mut pieces = Self { program, bases, cuts: Vec::new(), caches: HashMap::new() };
        let mut cuts = Vec::new();
        for task in program.workers.iter().flat_map(|worker| &worker.tasks) {
            let touched = accesses(program, task);
            for region in touched.reads.iter().chain(&touched.writes) {
                let (start, end) = pieces.bytes(region);
                cuts.extend([start, end]);
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        pieces.cuts = cuts;
        pieces
    }

    fn bytes(&self, region: &Region) -> (u64, u64) {
        let base = self.bases[region.buffer.index()];
        let byte = |word: u32| base.saturating_add(u64::from(word) * 4); // an absurd offset is not our business
        (byte(region.start), byte(region.end))
    }

    fn of(&self, region: &Region) -> std::ops::Range<usize> {
        let (start, end) = self.bytes(region);
        let find = |byte| self.cuts.partition_point(|&cut| cut < byte);
        find(start)..find(end)
    }

    /// The piece for a row of keys and values.
    fn row(&mut self, buffer: u32, kv_head: u32, position: u32) -> usize {
        let next = self.cuts.len() + self.caches.len();
        *self.caches.entry((buffer, kv_head, position)).or_insert(next)
    }
}

struct Machine<'a> {
    program: &'a Program,
    pieces: usize,
    /// Remaining operations by worker and warp, last first.
    todo: Vec<[Vec<Micro>; WARPS]>,
    views: Vec<[View; WARPS]>,
    history: Vec<Vec<(Place, Value)>>,
    counters: Vec<(u32, View)>,
    /// The current step, and the view released with it.
    begun: (u32, View),
    /// A checksum of which write each read has found.
    found: u64,
    rng: Rng,
}

/// Runs `steps` steps with the choices of `seed`. Two runs of a program in which every read finds the same writes give the same number.
///
/// # Errors
/// A read that found a wrong write, or workers that wait for ever.
pub fn run(program: &Program, steps: u32, seed: u64) -> Result<u64, String> {
    let mut rng = Rng::new(seed);
    let mut pieces = Pieces::new(program);
    let mut todo = Vec::new();
    let mut first = 0;
    for worker in &program.workers {
        let mut warps = [Vec::new(), Vec::new()];
        for step in 1..=steps {
            warps[0].push(Micro::Begin { step });
            warps.iter_mut().for_each(|ops| ops.push(Micro::Meet));
            for (index, task) in worker.tasks.iter().enumerate() {
                task_ops(&mut pieces, task, first + index, step, &mut warps, &mut rng);
            }
        }
        first += worker.tasks.len();
        warps.iter_mut().for_each(|ops| ops.reverse());
        todo.push(warps);
    }
    let count = pieces.cuts.len() + pieces.caches.len();
    let nothing = Value { step: 0, buffer: u32::MAX, by: usize::MAX };
    let view = vec![0.0; count];
    Machine {
        program,
        pieces: count,
        views: vec![[view.clone(), view.clone()]; todo.len()],
        todo,
        history: vec![vec![(0.0, nothing)]; count],
        counters: vec![(0, view.clone()); program.counters as usize],
        begun: (1, view),
        found: 0,
        rng,
    }
    .run()
}

/// The operations of a worker's warps for a task, in the places of the device's ops.
fn task_ops(
    pieces: &mut Pieces<'_>,
    task: &Task,
    by: usize,
    step: u32,
    warps: &mut [Vec<Micro>; WARPS],
    rng: &mut Rng,
) {
    let program = pieces.program;
    let meet = |warps: &mut [Vec<Micro>; WARPS]| warps.iter_mut().for_each(|o| o.push(Micro::Meet));
    for wait in &task.waits {
        warps[0].push(Micro::Wait { counter: wait.counter.index(), need: wait.count * step });
    }
    if !task.waits.is_empty() {
        meet(warps);
    }
    let attention = (task.opcode == Opcode::Attention).then(|| task.params::<AttentionParams>());
    let keys = |p: &AttentionParams| attended(step - 1, p.window);
    let active = |p: &AttentionParams| active_splits(keys(p), p.kv_block, p.splits);
    let idle = attention.as_ref().is_some_and(|p| p.split >= active(p));
    let residual = task.opcode == Opcode::Matvec
        && task.params::<MatvecParams>().epilogue == Epilogue::Residual as u32;
    let touched = accesses(program, task);
    let late = touched.reads.len() - usize::from(residual && !touched.reads.is_empty());
    let read = |region: &Region, warps: &mut [Vec<Micro>; WARPS], rng: &mut Rng| {
        let polled = program.buffers[region.buffer.index()].kind == BufferKind::FlagInData;
        let want = Value { step, buffer: region.buffer.0, by };
        for piece in pieces.of(region) {
            warps[rng.below(WARPS)].push(Micro::Read { piece, want, polled });
        }
    };
    if !idle {
        touched.reads[..late].iter().for_each(|region| read(region, warps, rng));
    }
    let write = |region: &Region, warps: &mut [Vec<Micro>; WARPS], rng: &mut Rng| {
        let value = Value { step, buffer: region.buffer.0, by };
        for piece in pieces.of(region) {
            warps[rng.below(WARPS)].push(Micro::Write { piece, value });
        }
    };
    // These ops store before the task's barrier, the others after it.
    let early = task.opcode == Opcode::Embed || idle;
    if early {
        touched.writes.iter().for_each(|region| write(region, warps, rng));
    }
    meet(warps);
    touched.reads[late..].iter().for_each(|region| read(region, warps, rng));
    if !early {
        touched.writes.iter().for_each(|region| write(region, warps, rng));
    }
    if let (Some(p), Some(cache)) = (attention.filter(|_| !idle), task.writes[1]) {
        cache_ops(pieces, &p, cache.0, by, step, &mut warps[rng.below(WARPS)]);
    }
    if let Some(counter) = task.signal {
        meet(warps);
        warps[0].push(Micro::Signal { counter: counter.index() });
    }
    if task.opcode == Opcode::Sample {
        warps[0].push(Micro::End);
    }
}

/// Keys of earlier steps are read, and the first part of the last active split keeps the step's own.
fn cache_ops(
    pieces: &mut Pieces<'_>,
    p: &AttentionParams,
    buffer: u32,
    by: usize,
    step: u32,
    ops: &mut Vec<Micro>,
) {
    let position = step - 1;
    let keys = attended(position, p.window);
    let active = active_splits(keys, p.kv_block, p.splits);
    for key in split_range(keys, p.kv_block, active, p.split) {
        let row = position + 1 - keys + key;
        let piece = pieces.row(buffer, p.kv_head, row);
        let value = Value { step: row + 1, buffer, by };
        if row < position {
            ops.push(Micro::Read { piece, want: value, polled: false });
        } else if p.part == 0 {
            ops.push(Micro::Write { piece, value });
        }
    }
}

/// The lowest bits of a tag, as in the word.
fn tag(value: Value) -> u32 {
    (value.step * abi::TAG_RUNS) & ((1 << abi::TAG_BITS) - 1)
}

impl Machine<'_> {
    fn run(mut self) -> Result<u64, String> {
        let mut favour = 0;
        loop {
            if self.rng.below(12) == 0 {
                favour = self.rng.below(self.todo.len());
            }
            let (mut any, mut left) = (false, false);
            for offset in 0..self.todo.len() {
                let worker = (favour + offset) % self.todo.len();
                any |= self.go(worker)?;
                left |= self.todo[worker].iter().any(|ops| !ops.is_empty());
                if any {
                    break;
                }
            }
            if !any {
                return if left { Err(self.stuck()) } else { Ok(self.found) };
            }
        }
    }

    /// Advances a worker by a step; returns whether it could.
    fn go(&mut self, worker: usize) -> Result<bool, String> {
        let start = self.rng.below(WARPS);
        for offset in 0..WARPS {
            let warp = (start + offset) % WARPS;
            let Some(&op) = self.todo[worker][warp].last() else { continue };
            if matches!(op, Micro::Meet) {
                continue;
            }
            if self.take(worker, warp, op)? {
                self.todo[worker][warp].pop();
                return Ok(true);
            }
        }
        let meets = |ops: &Vec<Micro>| matches!(ops.last(), Some(Micro::Meet));
        if self.todo[worker].iter().all(meets) {
            let mut all = vec![0.0; self.pieces];
            self.views[worker].iter().for_each(|view| join(&mut all, view));
            self.views[worker].iter_mut().for_each(|view| view.clone_from(&all));
            self.todo[worker].iter_mut().for_each(|ops| {
                ops.pop();
            });
            return Ok(true);
        }
        Ok(false)
    }

    fn take(&mut self, worker: usize, warp: usize, op: Micro) -> Result<bool, String> {
        let view = &mut self.views[worker][warp];
        match op {
            Micro::Wait { counter, need } => {
                let (count, released) = &self.counters[counter];
                if *count < need {
                    return Ok(false);
                }
                join(view, released);
            }
            Micro::Begin { step } => {
                if self.begun.0 < step {
                    return Ok(false);
                }
                join(view, &self.begun.1);
            }
            Micro::Signal { counter } => {
                self.counters[counter].0 += 1;
                join(&mut self.counters[counter].1, view);
            }
            Micro::End => {
                self.begun.0 += 1;
                join(&mut self.begun.1, view);
            }
            Micro::Read { piece, want, polled } => {
                return self.read(worker, warp, piece, want, polled);
            }
            Micro::Write { piece, value } => self.write(worker, warp, piece, value),
            Micro::Meet => unreachable!("taken by all warps at once"),
        }
        Ok(true)
    }

    fn read(
        &mut self,
        worker: usize,
        warp: usize,
        piece: usize,
        want: Value,
        polled: bool,
    ) -> Result<bool, String> {
        let seen = self.views[worker][warp][piece];
        let visible = self.history[piece].iter().filter(|(place, _)| *place >= seen);
        let found: Vec<(Place, Value)> =
            visible.filter(|(_, value)| !polled || tag(*value) == tag(want)).copied().collect();
        let Some(&oldest) = found.first() else { return Ok(false) };
        let (place, value) = if self.rng.flip() { oldest } else { self.rng.pick(&found) };
        self.views[worker][warp][piece] = place;
        let mut hasher = DefaultHasher::new();
        (want.by, want.step, piece, value.by).hash(&mut hasher);
        self.found = self.found.wrapping_add(hasher.finish());
        if (value.step, value.buffer) != (want.step, want.buffer) {
            return Err(format!(
                "{} of step {} reads s{} and finds s{} of step {} by {}",
                self.name(want.by),
                want.step,
                want.buffer,
                value.buffer,
                value.step,
                self.name(value.by)
            ));
        }
        Ok(true)
    }

    fn write(&mut self, worker: usize, warp: usize, piece: usize, value: Value) {
        let seen = self.views[worker][warp][piece];
        let history = &mut self.history[piece];
        let least = history.iter().position(|(place, _)| *place > seen).unwrap_or(history.len());
        let at = if self.rng.flip() { least } else { history.len() };
        let before = history[at - 1].0;
        let place = history.get(at).map_or(before + 1.0, |(next, _)| f64::midpoint(before, *next));
        history.insert(at, (place, value));
        self.views[worker][warp][piece] = place;
    }

    fn name(&self, task: usize) -> String {
        let mut index = task;
        for (worker, queue) in self.program.workers.iter().enumerate() {
            if index < queue.tasks.len() {
                return format!("w{worker}.{index}");
            }
            index = index.saturating_sub(queue.tasks.len());
        }
        "nobody".into()
    }

    fn stuck(&self) -> String {
        let waiting = self.todo.iter().enumerate().flat_map(|(worker, warps)| {
            warps.iter().filter_map(move |ops| Some((worker, ops.last()?)))
        });
        let first = waiting.filter(|(_, op)| !matches!(op, Micro::Meet)).take(3);
        let names: Vec<String> = first.map(|(worker, op)| format!("w{worker} at {op:?}")).collect();
        format!("nobody goes on: {}", names.join(", "))
    }
}
