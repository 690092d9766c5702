//! The work of each task of a program, independent of the rates.

use std::ops::Range;

use abi::{
    AttentionMergeParams, AttentionParams, BufferKind, Epilogue, MatvecParams, Opcode, Params,
    Prologue, Unpack,
};
use ir::program::staging::Staging;
use ir::program::{
    Program, Region, Task, Worker, accesses, active_splits, attended, read_late, split_range,
};
use ir::{BufferId, CounterId, WorkerId};
use rustc_hash::FxHashMap;

use super::rates::Shape;

/// Keys of a tile of a consumer warp, and of a block in the ring, of which the warps take every other one (keys.cuh).
fn tile_keys(head_dim: u32) -> u32 {
    if head_dim > 128 { 16 } else { 32 }
}
fn block_keys(head_dim: u32) -> u32 {
    tile_keys(head_dim) * abi::CONSUMER_WARPS / 2
}

/// Tiles whose sums are kept before an epilogue: TILES_BUF in vm-device/cuda/worker.cuh.
const EPILOGUE_TILES: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Work {
    /// Products over this many bytes, stages and tiles, after staging a vector of `elements`, merging `merged` splits, and
    /// adding the vector to another after a norm of its own if it is `normed`.
    Product { bytes: f64, stages: f64, tiles: f64, elements: f64, merged: u32, normed: bool },
    /// Attention over this many bytes of keys and values from the ring, in so many passes of all warps.
    Attention { passes: u32, bytes: f64 },
    /// A merge of this many splits.
    Merge { merged: u32 },
    /// Another op.
    Small,
    /// Nothing.
    Nothing,
}

impl Work {
    /// Bytes taken from the ring.
    pub(super) fn bytes(&self) -> u64 {
        match *self {
            Self::Product { bytes, .. } | Self::Attention { bytes, .. } => bytes as u64,
            Self::Merge { .. } | Self::Small | Self::Nothing => 0,
        }
    }
}

pub(super) struct Cost {
    pub(super) phase: u32,
    /// Index of the flow of its matrix, or of the worker's next one.
    pub(super) flow: u32,
    pub(super) work: Work,
    pub(super) waits: Vec<u32>,
    /// Flag-in-data regions read.
    pub(super) polls: Vec<Poll>,
    /// Index of the one that is added to the products, if they have it before they begin: tasks of one epilogue.
    pub(super) residual: Option<u32>,
    pub(super) signal: Option<u32>,
    /// Flag-in-data writes: buffer, and index in its list.
    pub(super) posts: Vec<(u32, u32)>,
}

/// A flag-in-data region that a task reads: writers `first..last` of a buffer.
pub(super) struct Poll {
    pub(super) buffer: u32,
    pub(super) first: u32,
    pub(super) last: u32,
}

/// The phases of one kind in one layer, for the breakdown.
pub(super) struct Phase {
    pub(super) name: usize,
    pub(super) tasks: u32,
    pub(super) stream_bytes: u64,
    /// Keys and values, which come through the ring as well.
    pub(super) kv_bytes: u64,
}

/// The complete input of a simulation: a program at a position.
pub(super) struct Plan {
    pub(super) workers: Vec<Vec<Cost>>,
    /// Arrivals of each counter in a step.
    pub(super) counters: Vec<u32>,
    /// Writers of each flag-in-data buffer, by first word. One that is not replicated is another one on each device.
    pub(super) flag_in_data: Vec<Vec<(u32, u32)>>,
    /// Whether other devices write some of its words.
    pub(super) remote: Vec<bool>,
    /// Phases that hand over to another phase.
    pub(super) handoffs: u32,
    pub(super) devices: u32,
    pub(super) flows: Vec<Shape>,
    pub(super) phases: Vec<Phase>,
    pub(super) names: Vec<String>,
    pub(super) kv_bytes: u64,
    /// Bytes that go through the rings: weights, keys and values.
    pub(super) bytes: u64,
}

impl Plan {
    pub(super) fn new(program: &Program, position: u32) -> Self {
        let mut builder = Builder::new(program, position);
        let mut workers = Vec::with_capacity(program.workers.len());
        for (worker, w) in program.workers.iter().zip(0..) {
            builder.device = program.device_of(WorkerId(w));
            // From the last to the first: an op without products runs while the weights of the next products arrive.
            let mut flow = 0;
            let tasks = worker.tasks.iter().rev();
            let mut costs: Vec<Cost> = tasks.map(|task| builder.cost(task, &mut flow)).collect();
            costs.reverse();
            workers.push(costs);
        }
        let devices = program.topology.devices;
        let mut counters = vec![0; (program.counters * devices) as usize];
        for signal in workers.iter().flatten().filter_map(|task: &Cost| task.signal) {
            counters[signal as usize] += 1;
        }
        let signalled =
            |c: u32| (0..devices).any(|d| counters[(d * program.counters + c) as usize] > 0);
        let signalled = (0..program.counters).filter(|&c| signalled(c)).count();
        let Builder { flag_in_data, flag_in_data_ids, flows, phases, names, kv_bytes, .. } =
            builder;
        let mut remote = vec![false; flag_in_data.len()];
        let mut buffers: Vec<BufferId> = Vec::new();
        for (&(_, buffer), &id) in &flag_in_data_ids {
            remote[id] = program.topology.is_replicated(buffer);
            buffers.push(buffer);
        }
        buffers.sort_unstable();
        buffers.dedup();
        let handoffs = (signalled + buffers.len()) as u32;
        let bytes = workers.iter().flatten().map(|task: &Cost| task.work.bytes()).sum();
        Self {
            workers,
            counters,
            flag_in_data,
            remote,
            handoffs,
            devices,
            flows,
            phases,
            names,
            kv_bytes,
            bytes,
        }
    }
}

impl Plan {
    /// Bytes of a phase, of an average worker.
    pub(super) fn mean_bytes(&self, phase: u32) -> f64 {
        let phase = &self.phases[phase as usize];
        (phase.stream_bytes + phase.kv_bytes) as f64 / self.workers.len() as f64
    }
}

/// Average number of stages, by the rule that the device loads by.
struct Stages {
    units: f64,
    /// Units of a full stage.
    full: u32,
    /// Tiles per stage; a fraction of one where a tile spans several stages.
    tiles: f64,
    /// Whether each warp loads its part of a stage into registers at once.
    even: bool,
}

impl Stages {
    fn new(tile: u32, staging: Staging) -> Self {
        let even = staging.warp_units > 0;
        let units = match tile > staging.stage_units {
            true => f64::from(tile) / f64::from(tile.div_ceil(staging.stage_units)),
            false => f64::from(staging.stage_units),
        };
        Self { units, full: staging.stage_units, tiles: units / f64::from(tile), even }
    }

    /// Stages of this many tiles.
    fn of(&self, tiles: u32) -> f64 {
        (f64::from(tiles) / self.tiles).ceil()
    }
}

/// What is done to the weights of a product.
fn task_unpack(program: &Program, p: &MatvecParams) -> Unpack {
    program.matrices.get(p.matrix as usize).map_or(Unpack::None, |matrix| matrix.format.unpack())
}

/// The buffer whose words a product adds to its rows, requested once before its vector arrives: that of a task whose tiles
/// have one epilogue.
fn added(task: &Task) -> Option<BufferId> {
    let Params::Matvec(p) = task.op() else { return None };
    let once = p.epilogue == Epilogue::Residual as u32 && p.tiles <= EPILOGUE_TILES;
    if once { task.reads[3] } else { None }
}

/// Stages of `keys` keys and their values: blocks of which each takes one stage if it fits, and else has the keys and the
/// values in stages of their own, as many rows in each as of the next power of two of bytes. The rule of
/// vm-device/cuda/keys.cuh.
fn kv_stages(keys: u32, (head_dim, row_bytes): (u32, u32), stage_bytes: u32) -> u32 {
    // A stage of units with scales is a little longer than a power of two.
    let room = 1 << stage_bytes.ilog2();
    let stages = |keys: u32| {
        let rows = keys.next_multiple_of(tile_keys(head_dim));
        let of_stage = room / row_bytes.next_power_of_two();
        if 2 * rows * row_bytes <= room { 1 } else { 2 * rows.div_ceil(of_stage) }
    };
    let (block, rest) = (block_keys(head_dim), keys % block_keys(head_dim));
    keys / block * stages(block) + if rest > 0 { stages(rest) } else { 0 }
}

/// Computes the cost of tasks one by one, and numbers flows, phases and flag-in-data buffers on the way.
struct Builder<'a> {
    program: &'a Program,
    /// Whether some units have scales behind them.
    scaled: bool,
    position: u32,
    flag_in_data: Vec<Vec<(u32, u32)>>,
    /// By device, the first for all devices if the buffer is replicated.
    flag_in_data_ids: FxHashMap<(u32, BufferId), usize>,
    /// The device of the tasks at hand.
    device: u32,
    flows: Vec<Shape>,
    phases: Vec<Phase>,
    phase_ids: FxHashMap<(u16, usize), usize>,
    names: Vec<String>,
    kv_bytes: u64,
}

impl<'a> Builder<'a> {
    fn new(program: &'a Program, position: u32) -> Self {
        let mut builder = Self {
            program,
            scaled: program.matrices.iter().any(|m| m.format.unit_bytes() > abi::UNIT_BYTES),
            position,
            flag_in_data: Vec::new(),
            flag_in_data_ids: FxHashMap::default(),
            device: 0,
            flows: Vec::new(),
            phases: Vec::new(),
            phase_ids: FxHashMap::default(),
            names: Vec::new(),
            kv_bytes: 0,
        };
        builder.flow(program.pipeline.stage_units, 0, 0, Unpack::None);
        let of = |(worker, w): (&'a Worker, u32)| worker.tasks.iter().map(move |task| (w, task));
        for (w, task) in program.workers.iter().zip(0..).flat_map(of) {
            builder.device = program.device_of(WorkerId(w));
            for region in accesses(program, task).writes {
                builder.written(region);
            }
        }
        builder.flag_in_data.iter_mut().for_each(|writers| writers.sort_unstable());
        builder
    }

    /// Lists the writer of a flag-in-data region.
    fn written(&mut self, region: Region) {
        if self.is_flag_in_data(&region) {
            let next = self.flag_in_data.len();
            let id = *self.flag_in_data_ids.entry(self.key(region.buffer)).or_insert(next);
            if id == next {
                self.flag_in_data.push(Vec::new());
            }
            self.flag_in_data[id].push((region.start, region.end));
        }
    }

    fn key(&self, buffer: BufferId) -> (u32, BufferId) {
        let all = self.program.topology.is_replicated(buffer);
        (if all { 0 } else { self.device }, buffer)
    }

    fn is_flag_in_data(&self, region: &Region) -> bool {
        self.program.buffers[region.buffer.index()].kind == BufferKind::FlagInData
    }

    /// The stages of tiles of this many units.
    fn stages(&self, units: u32) -> Stages {
        let stage_units = self.program.pipeline.stage_units;
        Stages::new(units.max(1), Staging::new(units, stage_units, self.scaled))
    }

    /// The flow of tasks of this many tiles and bytes, whose tiles have this many units.
    fn flow(&mut self, units: u32, tiles: u32, bytes: u64, unpack: Unpack) -> u32 {
        let staging = self.stages(units);
        let needed = staging.of(tiles);
        let full = staging.units * f64::from(abi::UNIT_BYTES);
        let payload = if needed > 0.0 { bytes as f64 / needed } else { full };
        self.numbered(payload, staging.full, staging.even, needed, unpack)
    }

    fn numbered(
        &mut self,
        payload: f64,
        full: u32,
        even: bool,
        needed: f64,
        unpack: Unpack,
    ) -> u32 {
        let pipeline = self.program.pipeline;
        // The loader's rule: caps are bytes, so more stages that are filled in part may be in flight.
        let cap =
            |stages: u32| (stages * pipeline.stage_units / full.max(1)).clamp(1, pipeline.stages);
        let shape = Shape {
            stages: pipeline.stages,
            in_flight: cap(pipeline.in_flight),
            in_flight_before_wait: cap(pipeline.in_flight_before_wait),
            payload,
            even,
            needed,
            unpack,
            scaled: self.scaled,
        };
        let found = self.flows.iter().position(|flow| *flow == shape);
        found.unwrap_or_else(|| {
            self.flows.push(shape);
            self.flows.len() - 1
        }) as u32
    }

    fn cost(&mut self, task: &Task, flow: &mut u32) -> Cost {
        let touched = accesses(self.program, task);
        let mut polls: Vec<Poll> = Vec::new();
        let (unread, added, late) = (self.unread(task), added(task), read_late(task));
        let mut residual = None;
        let read =
            |index: &usize, region: &Region| !unread.contains(index) && late != Some(region.buffer);
        let reads = touched.reads.iter().enumerate().filter(|(index, region)| read(index, region));
        for (index, region) in reads.filter(|(_, region)| self.is_flag_in_data(region)) {
            let Some(&buffer) = self.flag_in_data_ids.get(&self.key(region.buffer)) else {
                continue;
            };
            let writers = &self.flag_in_data[buffer];
            let first = writers.partition_point(|&(_, end)| end <= region.start);
            let last = writers.partition_point(|&(start, _)| start < region.end).max(first);
            if added == Some(region.buffer) && index + 1 == touched.reads.len() {
                residual = Some(polls.len() as u32);
            }
            polls.push(Poll { buffer: buffer as u32, first: first as u32, last: last as u32 });
        }
        let mut posts = Vec::new();
        for region in touched.writes.iter().filter(|region| self.is_flag_in_data(region)) {
            let Some(&buffer) = self.flag_in_data_ids.get(&self.key(region.buffer)) else {
                continue;
            };
            let place = self.flag_in_data[buffer].binary_search(&(region.start, region.end));
            posts.extend(place.map(|place| (buffer as u32, place as u32)));
        }
        let (work, stream_bytes) = self.work(task, flow);
        let phase = self.phase(task, stream_bytes);
        if let Work::Attention { bytes, .. } = work {
            self.phases[phase as usize].kv_bytes += bytes as u64;
        }
        let first = self.device * self.program.counters;
        let counter = |counter: CounterId| first + counter.0;
        Cost {
            phase,
            flow: *flow,
            work,
            waits: task.waits.iter().map(|wait| counter(wait.counter)).collect(),
            polls,
            residual,
            signal: task.signal.map(counter),
            posts,
        }
    }

    /// The regions that a task does not read at this position although its operands name them, by place in its list: a
    /// split without keys reads nothing, and a merge reads active splits only.
    fn unread(&self, task: &Task) -> Range<usize> {
        let active = |window, kv_block, splits| {
            active_splits(attended(self.position, window), kv_block, splits)
        };
        let op = task.op();
        if let Params::Attention(p) = op
            && p.split >= active(p.window, p.kv_block, p.splits)
        {
            return 0..usize::MAX;
        }
        let merged = match op {
            Params::Matvec(p) if p.prologue == Prologue::Merge as u32 => {
                Some((p.window, p.kv_block, p.splits))
            }
            Params::AttentionMerge(p) => Some((p.window, p.kv_block, p.splits)),
            Params::Matvec(_)
            | Params::Attention(_)
            | Params::Nop(_)
            | Params::Embed(_)
            | Params::Sample(_)
            | Params::Norm(_)
            | Params::Route(_) => None,
        };
        merged.map_or(0..0, |(window, kv_block, splits)| {
            active(window, kv_block, splits) as usize..splits as usize
        })
    }

    /// The work, and the bytes streamed.
    fn work(&mut self, task: &Task, flow: &mut u32) -> (Work, u64) {
        match task.opcode {
            Opcode::Matvec => {
                let p: MatvecParams = task.params();
                let stages = self.stages(p.units).of(p.tiles);
                let merges = p.prologue == Prologue::Merge as u32;
                let merged = if merges { self.merged(p.window, p.kv_block, p.splits) } else { 0 };
                let bytes =
                    self.program.load(task).map_or(0, |load| self.program.weight_bytes(load));
                *flow = self.flow(p.units, p.tiles, bytes, task_unpack(self.program, &p));
                let work = Work::Product {
                    bytes: bytes as f64,
                    stages,
                    tiles: f64::from(p.tiles),
                    elements: f64::from(p.k_len),
                    merged,
                    normed: p.prologue == Prologue::PostNorm as u32,
                };
                (work, bytes)
            }
            Opcode::Attention => (self.attention(&task.params(), flow), 0),
            Opcode::AttentionMerge => {
                let p: AttentionMergeParams = task.params();
                let merged = self.merged(p.window, p.kv_block, p.splits);
                (Work::Merge { merged }, 0)
            }
            Opcode::Nop => (Work::Nothing, 0),
            Opcode::Embed | Opcode::Sample | Opcode::Norm | Opcode::Route => (Work::Small, 0),
        }
    }

    /// Splits to merge; a single split needs no merge.
    fn merged(&self, window: u32, kv_block: u32, splits: u32) -> u32 {
        let active = active_splits(attended(self.position, window), kv_block, splits);
        if active > 1 { active } else { 0 }
    }

    fn attention(&mut self, p: &AttentionParams, flow: &mut u32) -> Work {
        let keys = attended(self.position, p.window);
        let active = active_splits(keys, p.kv_block, p.splits);
        if p.split >= active {
            return Work::Nothing;
        }
        let mine = split_range(keys, p.kv_block, active, p.split).len() as u32;
        let row_bytes = self.program.kv_dtype().row_bytes(p.head_dim);
        let bytes = u64::from(mine) * 2 * u64::from(row_bytes);
        if p.part == 0 {
            self.kv_bytes += bytes; // the group's other parts find them in L2
        }
        let stages =
            f64::from(kv_stages(mine, (p.head_dim, row_bytes), self.program.stage_bytes()));
        let (payload, full) = (bytes as f64 / stages, self.program.pipeline.stage_units);
        *flow = self.numbered(payload, full, false, stages, Unpack::None);
        // All warps at once take two blocks.
        let passes = mine.div_ceil(2 * block_keys(p.head_dim));
        Work::Attention { passes, bytes: bytes as f64 }
    }

    fn phase(&mut self, task: &Task, stream_bytes: u64) -> u32 {
        let name = self.program.phase_name(task);
        let name = self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.names.push(name.to_owned());
            self.names.len() - 1
        });
        let next = self.phases.len();
        let id = *self.phase_ids.entry((task.layer, name)).or_insert(next);
        if id == next {
            self.phases.push(Phase { name, tasks: 0, stream_bytes: 0, kv_bytes: 0 });
        }
        self.phases[id].tasks += 1;
        self.phases[id].stream_bytes += stream_bytes;
        id as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `block_stages` of keys.cuh has it: a stage of 16 KB has 64 rows of 128 elements, and as many of 96 or 80.
    #[test]
    fn keys_take_the_stages_of_the_next_power_of_two() {
        let of = |dtype: ir::KvDtype, keys, head_dim: u32| {
            kv_stages(keys, (head_dim, dtype.row_bytes(head_dim)), 16 << 10)
        };
        let stages = |keys, head_dim| of(ir::KvDtype::F16, keys, head_dim);
        // Codes with their scale take as many, but for a short block that fits into one stage.
        assert_eq!([64, 128].map(|head_dim| of(ir::KvDtype::E4m3, 128, head_dim)), [2, 4]);
        assert_eq!([32, 48].map(|keys| of(ir::KvDtype::E4m3, keys, 128)), [1, 2]);
        for head_dim in [80, 96, 112, 128] {
            assert_eq!(stages(128, head_dim), 4, "{head_dim}");
            assert_eq!(stages(64, head_dim), 2, "{head_dim}");
            assert_eq!(stages(32, head_dim), 1, "{head_dim}: keys and values in one stage");
        }
        // 48 keys are copied as 64: keys and values of heads of 48 fit in one stage, of 80 they do not.
        assert_eq!([48, 64, 80].map(|head_dim| stages(48, head_dim)), [1, 1, 2]);
        assert_eq!([160, 192, 256].map(|head_dim| stages(64, head_dim)), [4, 4, 4]);
        assert_eq!(stages(128 + 48, 96), 4 + 2);
    }
}
