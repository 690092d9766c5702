//! Translates a verified program to device tables. This is the only place that patches addresses.

use std::collections::BTreeMap;
use std::ops::Range;

use abi::{
    Activation, BufferDesc, Epilogue, Feature, NONE, Params, ProgramHeader, Prologue, Queue,
};
use ir::program::staging::Stagings;
use ir::program::{
    Buffer, BufferSource, Load, Program, RowMap, Selection, Task, Verified, check_seqs, smem,
};
use ir::{BufferId, Graph, Weights, decode};
use vm_device::Variant;

use crate::devices::Placed;
use crate::error::HostError;
use crate::experts;
use crate::pages::PageLayout;

/// Bytes between two counters: one sector each, so that polls of one do not slow down accesses to another.
const COUNTER_BYTES: u64 = 32;

/// Device addresses of everything that does not depend on the schedule, on one device.
pub(crate) struct DeviceResidents {
    /// The packed matrices, by `MatrixId`.
    pub(crate) matrices: Vec<Placed>,
    /// Constants by the tensors that they are made of.
    pub(crate) constants: BTreeMap<String, u64>,
    /// By rotary table: cosines and sines, `[kv_capacity][head_dim / 2][2]`.
    pub(crate) rope: Vec<u64>,
    /// Key/value caches by layer: address of page zero.
    pub(crate) caches: Vec<u64>,
    pub(crate) layout: PageLayout,
    /// The first key/value head of the caches.
    pub(crate) first_head: u32,
}

impl DeviceResidents {
    /// Address of page zero of a layer's cache as if it had all heads: that of a head is the number of the head further on.
    fn cache(&self, layer: u32) -> u64 {
        let before = u64::from(self.first_head) * u64::from(self.layout.head_bytes());
        self.caches[layer as usize].wrapping_sub(before)
    }
}

/// The same for all devices, and what they have in common.
pub(crate) struct Residents {
    pub(crate) devices: Vec<DeviceResidents>,
    /// Units that arrive before the first of each packed matrix.
    pub(crate) weight_stream_starts: Vec<u32>,
    /// The packed matrices, to refuse a program of another model.
    pub(crate) matrix_table: Vec<ir::program::Matrix>,
    /// Key/value heads, and elements of a head.
    pub(crate) heads: (u32, u32),
    /// Pages that sessions can have.
    pub(crate) pages: u32,
    /// On the first device: every device stores its rows there.
    pub(crate) logits: u64,
    pub(crate) logits_rows: u32,
    /// Tokens of a session's cache.
    pub(crate) kv_capacity: u32,
    /// Workers of a device.
    pub(crate) workers: u32,
    /// Sequences of the kernel: sessions that a step may run at once.
    pub(crate) seqs: u32,
}

/// Identifies a constant by its content, the same for every program of a model.
pub(crate) fn constant_key(map: &RowMap) -> String {
    format!(
        "{:?}",
        (
            map.interleaved,
            map.parts.iter().map(|(t, rows)| (t.map(|t| t.0), *rows)).collect::<Vec<_>>()
        )
    )
}

/// The elements of a packed vector as f32, padded with zeros so that the device may read whole units.
pub(crate) fn constant_values(map: &RowMap, graph: &Graph, weights: &dyn Weights) -> Vec<f32> {
    let rows = map.rows();
    let mut out = vec![0.0; rows.next_multiple_of(64) as usize];
    let mut decoded: BTreeMap<u32, Vec<f32>> = BTreeMap::new();
    for row in 0..rows {
        if let Some((tensor, source)) = map.locate(row) {
            let values = decoded.entry(tensor.0).or_insert_with(|| {
                let stored = graph.tensor(tensor);
                let mut values = vec![0.0; stored.len()];
                decode(stored.dtype, weights.bytes(tensor), &mut values);
                values
            });
            out[row as usize] = values[source as usize];
        }
    }
    out
}

/// Cosines and sines of every position, from angles rounded to f32 as the reference has them.
/// Factors may follow the frequencies.
pub(crate) fn rope_table(rotary: &[f32], head_dim: u32, positions: u32) -> Vec<f32> {
    let (inv_freq, factors) = rotary.split_at(rotary.len().min(head_dim as usize / 2));
    let mut table = Vec::with_capacity(positions as usize * inv_freq.len() * 2);
    for position in 0..positions {
        for (i, &frequency) in inv_freq.iter().enumerate() {
            let angle = f64::from(position as f32 * frequency);
            let factor = factors.get(i).copied().unwrap_or(1.0);
            table.extend([angle.cos() as f32 * factor, angle.sin() as f32 * factor]);
        }
    }
    table
}

/// A program's image for a region of device memory at `base`: the header first, then its tables. After them come the counters, to be
/// zeroed, and the activation arena, to be poisoned so that reading a word before it is written is detected.
pub(crate) struct Image {
    /// Header and tables.
    pub(crate) bytes: Vec<u8>,
    /// Bytes after them that must be zero: the counters.
    pub(crate) zeroed: u64,
    /// Bytes after those to be filled with ones, which is NaN as an f32 and no valid tag.
    pub(crate) poisoned: u64,
}

/// Lays a program out for every device, at an address on each. The parts have the same places in all images.
pub(crate) fn images(
    program: &Verified<Program>,
    residents: &Residents,
    shared_bytes: u32,
    bases: &[u64],
) -> Result<Vec<Image>, HostError> {
    check_fits(program, residents)?;
    let devices = 0..residents.devices.len() as u32;
    let tables = devices.map(|device| tables(program, Part::new(residents, program, device)));
    let mut tables = tables.collect::<Result<Vec<_>, _>>()?;
    let longest = |of: fn(&Tables) -> usize| tables.iter().map(of).max().unwrap_or(0);
    let (tasks, loads) = (longest(|t| t.tasks.len()), longest(|t| t.loads.len()));
    let selections = longest(|t| t.selections.len());
    for tables in &mut tables {
        tables.tasks.resize(tasks, abi::Task::default());
        tables.loads.resize(loads, abi::Load::default());
    }
    let parts = tables.into_iter().zip(bases).zip(0..);
    let of = |((tables, &base), device)| {
        image(
            program,
            Part::new(residents, program, device),
            tables,
            selections,
            (shared_bytes, base),
        )
    };
    parts.map(of).collect()
}

/// What a device's part of an image is made from.
#[derive(Clone, Copy)]
struct Part<'a> {
    residents: &'a Residents,
    /// Those of the device.
    own: &'a DeviceResidents,
    device: u32,
    stagings: Stagings,
}

impl<'a> Part<'a> {
    fn new(residents: &'a Residents, program: &Program, device: u32) -> Self {
        let stagings = program.stagings(residents.seqs);
        Self { residents, own: &residents.devices[device as usize], device, stagings }
    }
}

/// Lays out one device's part of a program. `selections_max` records of selected rows have room in it.
fn image(
    program: &Program,
    part: Part<'_>,
    tables: Tables,
    selections_max: usize,
    (shared_bytes, base): (u32, u64),
) -> Result<Image, HostError> {
    let residents = part.residents;
    let Tables { tasks, mut loads, queues, selections } = tables;
    let mut layout = Layout::new(base, size_of::<ProgramHeader>() as u64);
    let task_address = layout.place(bytemuck::cast_slice(&tasks));
    let load_address = layout.reserve(size_of_val(&loads[..]) as u64);
    let queue_address = layout.place(bytemuck::cast_slice(&queues));
    let buffer_address =
        layout.reserve(program.buffers.len() as u64 * size_of::<BufferDesc>() as u64);
    let routed_address = layout.reserve((selections_max * size_of::<abi::Routed>()) as u64);
    let fixed = layout.end();
    let counters = base + fixed;
    let arena = counters + (u64::from(program.counters) * COUNTER_BYTES).next_multiple_of(256);
    let buffers = buffer_table(program, part, arena)?;
    layout.write(buffer_address, bytemuck::cast_slice(&buffers));
    let mut routed = Vec::with_capacity(selections.len());
    for (load, (selection, of)) in selections {
        loads[load].address = routed_address + (routed.len() * size_of::<abi::Routed>()) as u64;
        routed.push(abi::Routed { logits: buffers[selection.logits.index()].address, ..of });
    }
    layout.write(load_address, bytemuck::cast_slice(&loads));
    layout.write(routed_address, bytemuck::cast_slice(&routed));
    let header = ProgramHeader {
        tasks: task_address,
        loads: load_address,
        queues: queue_address,
        buffers: buffer_address,
        counters,
        buffer_len: program.buffers.len() as u32,
        ..header(program, part, shared_bytes)?
    };
    layout.write(base, bytemuck::bytes_of(&header));
    let poisoned = match residents.seqs {
        1 => program.arena_bytes,
        seqs => u64::from(seqs) * u64::from(header.seq_bytes),
    };
    Ok(Image { bytes: layout.bytes, zeroed: arena - counters, poisoned })
}

fn check_fits(program: &Program, residents: &Residents) -> Result<(), HostError> {
    if program.matrices != residents.matrix_table {
        return Err(HostError::Request(format!(
            "the program is of {}, whose matrices are not those on the device",
            program.model
        )));
    }
    if program.kv_capacity != residents.kv_capacity {
        let (want, have) = (program.kv_capacity, residents.kv_capacity);
        return Err(HostError::Request(format!(
            "the program's key/value capacity is {want}, the device was booted for {have}"
        )));
    }
    if (program.dims.kv_heads, program.dims.head_dim) != residents.heads {
        return Err(HostError::Request(format!(
            "the program is of {}, whose keys and values are not as wide as those on the device",
            program.model
        )));
    }
    if residents.seqs > 1 {
        check_seqs(program, residents.seqs).map_err(|v| HostError::Request(v.to_string()))?;
    }
    let (want, have) = (program.topology.devices as usize, residents.devices.len());
    if want != have {
        return Err(HostError::Request(format!(
            "the program is of {want} devices, the machine was booted for {have}"
        )));
    }
    if program.workers_per_device() != residents.workers as usize {
        let (want, have) = (program.workers_per_device(), residents.workers);
        return Err(HostError::Request(format!(
            "the program has {want} workers, the launch {have}: lower it for this device"
        )));
    }
    Ok(())
}

/// Refuses a program if the kernel was compiled for another attention, or without what it needs: whether queries and keys are normalised is compiled in, so a task
/// that disagrees would read its norm from nowhere, or omit it.
pub(crate) fn check_variant(program: &Program, variant: &Variant) -> Result<(), HostError> {
    let group = program.dims.heads / program.dims.kv_heads.max(1);
    if (program.dims.head_dim, group) != (variant.head_dim, variant.group) {
        return Err(HostError::Request(format!(
            "the program has heads of {} elements, {group} queries to a key; the kernel was compiled for {} and {}",
            program.dims.head_dim, variant.head_dim, variant.group
        )));
    }
    crate::compile::check_stored(program, variant)?;
    let tasks = || program.workers.iter().flat_map(|worker| &worker.tasks);
    let needed = tasks().fold(0, |mask, task| mask | needed_by(task));
    if needed & !variant.features != 0 {
        let lacks = |f: &&Feature| (needed & !variant.features) >> **f as u32 & 1 != 0;
        let missing: Vec<_> = Feature::ALL.iter().filter(lacks).map(|f| f.name()).collect();
        return Err(HostError::Request(format!(
            "the program needs {}, which the kernel was compiled without",
            missing.join(", ")
        )));
    }
    let hidden = program.dims.hidden;
    if needed >> Feature::PostNorm as u32 & 1 != 0 && hidden != variant.widths[0] {
        let compiled = variant.widths[0];
        return Err(HostError::Request(format!(
            "the program norms results of {hidden} elements, the kernel was compiled for {compiled}"
        )));
    }
    for task in tasks().filter(|task| task.opcode == abi::Opcode::Attention) {
        let normed = [task.reads[1].is_some(), task.reads[2].is_some()];
        if normed != [variant.qk_norm; 2] {
            return Err(HostError::Request(format!(
                "layer {}: queries and keys normalised: {normed:?}; the kernel was compiled for {} in every layer",
                task.layer, variant.qk_norm
            )));
        }
    }
    Ok(())
}

/// The features that a task needs. Bit n: the `Feature` of number n.
fn needed_by(task: &Task) -> u32 {
    let bit = |feature: Feature, needed: bool| u32::from(needed) << feature as u32;
    match task.op() {
        Params::Embed(p) => bit(Feature::EmbedScale, p.scale != 0.0),
        Params::Matvec(p) => {
            let activation = |activation: Activation| p.activation == activation as u32;
            bit(Feature::LogitCap, p.epilogue == Epilogue::Logits as u32 && p.cap != 0.0)
                | bit(Feature::GeluTanh, activation(Activation::GeluTanh))
                | bit(Feature::ClampedSilu, activation(Activation::ClampedSilu))
                | bit(Feature::Route, task.reads[4].is_some())
                | bit(Feature::PostNorm, p.prologue == Prologue::PostNorm as u32)
        }
        Params::Attention(p) => {
            bit(Feature::ScoreCap, p.cap != 0.0) | bit(Feature::Sinks, task.reads[4].is_some())
        }
        Params::Norm(_) => bit(Feature::Norm, true),
        Params::Route(_) => bit(Feature::Route, true),
        Params::Nop(_) | Params::AttentionMerge(_) | Params::Sample(_) => 0,
    }
}

fn header(
    program: &Program,
    part: Part<'_>,
    shared_bytes: u32,
) -> Result<ProgramHeader, HostError> {
    let residents = part.residents;
    let room = Room::new(program, residents.seqs, shared_bytes)?;
    Ok(ProgramHeader {
        stages: room.stages,
        stage_units: program.pipeline.stage_units,
        stage_bytes: program.stage_bytes(),
        in_flight: program.pipeline.in_flight,
        in_flight_before_wait: program.pipeline.in_flight_before_wait,
        x_offset: abi::FIXED_BYTES,
        x_bytes: room.x_bytes,
        kv_capacity: residents.kv_capacity,
        kv_values: part.own.layout.values(),
        logits_rows: residents.logits_rows,
        vocab: program.dims.vocab,
        seqs: residents.seqs,
        seq_bytes: seq_bytes(program)?,
        ..ProgramHeader::default()
    })
}

/// Bytes from a scratch buffer of one sequence to that of the next.
fn seq_bytes(program: &Program) -> Result<u32, HostError> {
    let bytes = program.arena_bytes.next_multiple_of(256);
    u32::try_from(bytes).map_err(|_| {
        HostError::Request(format!(
            "the activations are {bytes} bytes, at most {} are possible: lower tiling.attention.kv_split",
            u32::MAX
        ))
    })
}

/// Layout of a worker's shared memory.
#[derive(Debug, PartialEq, Eq)]
struct Room {
    stages: u32,
    x_bytes: u32,
}

/// Least number of stages of a ring: one to be multiplied while another is filled.
const STAGES_MIN: u32 = 2;

impl Room {
    /// A schedule's ring fits beside the activations of one sequence, which `validate` checks. Those of several may be larger: then the ring has as
    /// many stages as fit, which changes only how far the stream runs ahead.
    fn new(program: &Program, seqs: u32, shared_bytes: u32) -> Result<Self, HostError> {
        let stage_bytes = program.stage_bytes();
        let (x_bytes, least) = match seqs {
            1 => {
                (smem::activation_bytes(&program.dims, program.vectors()), program.pipeline.stages)
            }
            seqs => (smem::batch_activation_bytes(&program.dims, seqs), STAGES_MIN),
        };
        let fits =
            shared_bytes.saturating_sub(smem::worker_bytes(0, stage_bytes, x_bytes)) / stage_bytes;
        if fits < least {
            let needed = smem::worker_bytes(least, stage_bytes, x_bytes);
            return Err(HostError::Request(format!(
                "the program needs {needed} bytes of shared memory a block for {least} stages of {stage_bytes} and {seqs} sequences, {shared_bytes} may \
                 be had: lower pipeline.stages or pipeline.stage_bytes, or boot for fewer sequences"
            )));
        }
        Ok(Self { stages: program.pipeline.stages.min(fits), x_bytes })
    }
}

/// Tasks, loads and queues of all workers, and records of loads whose units logits decide, without the logits' addresses.
struct Tables {
    tasks: Vec<abi::Task>,
    loads: Vec<abi::Load>,
    queues: Vec<Queue>,
    selections: Vec<(usize, (Selection, abi::Routed))>,
}

fn tables(program: &Program, part: Part<'_>) -> Result<Tables, HostError> {
    let (mut tasks, mut loads, mut queues) = (Vec::new(), Vec::new(), Vec::new());
    let mut selections = Vec::new();
    let each = program.workers_per_device().max(1);
    for worker in program.workers.iter().skip(part.device as usize * each).take(each) {
        let load0 = loads.len();
        let mut before = None;
        for task in &worker.tasks {
            if let Some(load) = program.load(task) {
                if let Some((selection, routed)) = selected(program, load, part)? {
                    let of = (selection.logits, routed.slots, routed.expert_len);
                    let again = u32::from(before.replace(of) == Some(of));
                    selections.push((loads.len(), (selection, abi::Routed { again, ..routed })));
                }
                loads.push(wire_load(program, task, load, part)?);
            }
        }
        queues.push(Queue {
            task0: tasks.len() as u32,
            tasks: worker.tasks.len() as u32,
            load0: load0 as u32,
            loads: (loads.len() - load0) as u32,
        });
        tasks.extend(worker.tasks.iter().map(|task| wire_task(program, task, part.stagings)));
    }
    tasks.push(abi::Task { signal: NONE, ..abi::Task::default() }); // sentinel: the prefetcher reads one task past the end
    Ok(Tables { tasks, loads, queues, selections })
}

/// Where the choice of experts puts a load's units, without the logits' address.
fn selected(
    program: &Program,
    load: Load,
    part: Part<'_>,
) -> Result<Option<(Selection, abi::Routed)>, HostError> {
    let Load::Weights { matrix, unit0, selection: Some(selection), .. } = load else {
        return Ok(None);
    };
    let index = matrix.index();
    let (placed, matrix) = (&part.own.matrices[index], &program.matrices[index]);
    let routed = experts::record(matrix, placed, selection, unit0 as u32)
        .ok_or_else(|| not_here(part, &format!("rows of all experts of {}", matrix.name)))?;
    Ok(Some((selection, routed)))
}

fn not_here(part: Part<'_>, what: &str) -> HostError {
    HostError::Request(format!(
        "{what} are not on device {}: the program splits its matrices in another way than the machine was booted for",
        part.device
    ))
}

/// Address of consecutive tiles of a matrix on a device.
fn tiles_at(
    program: &Program,
    part: Part<'_>,
    index: usize,
    tiles: Range<u32>,
) -> Result<u64, HostError> {
    let (placed, matrix) = (&part.own.matrices[index], &program.matrices[index]);
    let before = placed.before(tiles.start, tiles.end - tiles.start);
    let before =
        before.ok_or_else(|| not_here(part, &format!("tiles {tiles:?} of {}", matrix.name)))?;
    Ok(placed.address + before * matrix.tile_bytes() as u64)
}

fn wire_load(
    program: &Program,
    task: &Task,
    load: Load,
    part: Part<'_>,
) -> Result<abi::Load, HostError> {
    let residents = part.residents;
    Ok(match load {
        Load::Weights { matrix, unit0, units, selection } => {
            let index = matrix.index();
            let matrix = &program.matrices[index];
            let staging = part.stagings.of(task.params::<abi::MatvecParams>().units, matrix.format);
            let (unit_bytes, tile) = (matrix.format.unit_bytes(), matrix.units_per_tile());
            let first = (unit0 / u64::from(tile)) as u32;
            let address = match selection {
                None => tiles_at(program, part, index, first..first + units.div_ceil(tile))?,
                Some(_) => 0, // of the load's record
            };
            // Of experts any may be chosen, so all have arrived before.
            let (kind, end) = match selection {
                None => (abi::LoadKind::Weights, unit0 as u32 + units),
                Some(_) => (abi::LoadKind::Routed, matrix.units() as u32),
            };
            abi::Load {
                address,
                size: unit_bytes,
                units,
                kind: kind as u8,
                watermark: residents.weight_stream_starts[index] + end,
                stage_units: staging.stage_units as u8,
                period: staging.period as u16,
                split: if staging.tile_parts > 1 { staging.stage_tiles as u16 } else { 0 },
                ..abi::Load::default()
            }
        }
        Load::Cache { buffer, kv_head, kv_block, window, split, splits } => {
            let head = u64::from(kv_head) * u64::from(part.own.layout.head_bytes());
            abi::Load {
                address: part.own.cache(layer_of(program, buffer)).wrapping_add(head),
                kind: abi::LoadKind::Cache as u8,
                size: kv_block,
                window,
                split: split as u16,
                splits: splits as u16,
                ..abi::Load::default()
            }
        }
    })
}

/// The layer of a cache.
fn layer_of(program: &Program, buffer: BufferId) -> u32 {
    let BufferSource::KvCache { layer } = program.buffers[buffer.index()].source else {
        unreachable!("attention of a verified program is over a cache");
    };
    layer
}

fn wire_task(program: &Program, task: &Task, stagings: Stagings) -> abi::Task {
    let mut wire = abi::Task {
        opcode: task.opcode as u16,
        layer: task.layer,
        wait_len: task.waits.len() as u8,
        signal: task.signal.map_or(NONE, |c| c.0),
        reads: std::array::from_fn(|read| task.reads[read].map_or(NONE, |buffer| buffer.0)),
        aside: task.reads[abi::READS_STAGED].map_or(NONE, |buffer| buffer.0),
        writes: task.writes.map(|buffer| buffer.map_or(NONE, |buffer| buffer.0)),
        params: task.params,
        ..abi::Task::default()
    };
    if task.opcode == abi::Opcode::Matvec {
        let p = task.params::<abi::MatvecParams>();
        let format = program.matrices[p.matrix as usize].format;
        let s = stagings.of(p.units, format);
        (wire.stage_units, wire.stage_tiles) = (s.stage_units as u8, s.stage_tiles as u8);
        (wire.warp_units, wire.tile_parts) = (s.warp_units as u8, s.tile_parts as u16);
        wire.unpack = format.unpack() as u16;
    }
    for (i, wait) in task.waits.iter().enumerate() {
        wire.wait_counter[i] = wait.counter.0;
        wire.wait_count[i] = wait.count;
    }
    wire
}

fn buffer_table(
    program: &Program,
    part: Part<'_>,
    arena: u64,
) -> Result<Vec<BufferDesc>, HostError> {
    let buffers = program.buffers.iter().zip(0..);
    let wire = |(buffer, id)| {
        let replicated = u32::from(program.topology.is_replicated(BufferId(id)));
        Ok(BufferDesc { replicated, ..wire_buffer(program, buffer, part, arena)? })
    };
    buffers.map(wire).collect()
}

fn wire_buffer(
    program: &Program,
    buffer: &Buffer,
    part: Part<'_>,
    arena: u64,
) -> Result<BufferDesc, HostError> {
    let (residents, own) = (part.residents, part.own);
    let mut units = 0;
    let address = match &buffer.source {
        BufferSource::Scratch if buffer.kind == abi::BufferKind::Logits => residents.logits,
        BufferSource::Scratch => arena + buffer.offset,
        BufferSource::Vector(map) => *own.constants.get(&constant_key(map)).ok_or_else(|| {
            HostError::Request(format!(
                "buffer {} is of a constant that is not on the device",
                buffer.name
            ))
        })?,
        BufferSource::Rotary(number) => own.rope[*number as usize],
        BufferSource::KvCache { layer } => own.cache(*layer),
        BufferSource::Embedding(matrix) => {
            units = program.matrices[matrix.index()].units_per_tile();
            let all = 0..program.matrices[matrix.index()].tiles();
            tiles_at(program, part, matrix.index(), all)?
        }
    };
    Ok(BufferDesc {
        address,
        kind: buffer.kind as u32,
        words: buffer.words,
        units,
        ..BufferDesc::default()
    })
}

/// Tables one after the other, each 128-byte aligned.
struct Layout {
    base: u64,
    bytes: Vec<u8>,
}

impl Layout {
    fn new(base: u64, header: u64) -> Self {
        Self { base, bytes: vec![0; header.next_multiple_of(128) as usize] }
    }

    fn place(&mut self, table: &[u8]) -> u64 {
        let address = self.reserve(table.len() as u64);
        self.write(address, table);
        address
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        let address = self.base + self.bytes.len() as u64;
        self.bytes.resize((self.bytes.len() + bytes as usize).next_multiple_of(128), 0);
        address
    }

    fn write(&mut self, address: u64, table: &[u8]) {
        let start = (address - self.base) as usize;
        self.bytes[start..start + table.len()].copy_from_slice(table);
    }

    fn end(&mut self) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(256), 0);
        self.bytes.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use ir::Target;

    use super::*;

    #[test]
    fn a_layer_without_norms_is_refused_by_a_kernel_that_normalises_queries_and_keys() {
        let target = Target::by_name("h200").expect("a known target");
        let lower = |name| {
            let graph = model::preset(name).expect("a preset").graph;
            let config = ir::schedule::default_config(&graph, &target);
            let config = ir::schedule::validate(config, &graph, &target).expect("it is legal");
            let options = lower::Options { kv_capacity: 64 };
            let program = lower::lower(&config, &graph, &target, options).expect("it lowers");
            (Program::clone(&program), crate::variant(&config.kernel, &graph))
        };
        let (mut program, variant) = lower("qwen3-0.6b");
        assert!(variant.qk_norm);
        check_variant(&program, &variant).expect("every layer has its norms");
        let refused = |program: &Program, variant: &Variant| {
            check_variant(program, variant).expect_err("refused").to_string()
        };
        let said = refused(&program, &Variant { qk_norm: false, ..variant });
        assert!(said.contains("[true, true]") && said.contains("false in every layer"), "{said}");
        let (gemma, with_all) = lower("gemma-3-1b");
        let plain = Variant { features: 0, ..with_all };
        assert!(refused(&gemma, &plain).contains("needs gelu_tanh, embed_scale, post_norm"));
        let [hidden, rest @ ..] = with_all.widths;
        let wider = Variant { widths: [2 * hidden, rest[0], rest[1]], ..with_all };
        assert!(refused(&gemma, &wider).contains("norms results of 1152 elements"));
        let said = refused(&program, &Variant { head_dim: 64, ..variant });
        assert!(said.contains("heads of 128 elements") && said.contains("64"), "{said}");
        let tasks = program.workers.iter_mut().flat_map(|worker| &mut worker.tasks);
        let attention = |task: &&mut Task| task.opcode == abi::Opcode::Attention && task.layer == 3;
        tasks.filter(attention).for_each(|task| task.reads[1] = None);
        let said = refused(&program, &variant);
        assert!(said.contains("layer 3") && said.contains("[false, true]"), "{said}");
    }

    /// Addresses as a machine of this program's devices would have them: each device's part of a matrix far from all others.
    fn residents(program: &Program) -> Residents {
        let (mut next, rope, dims) = (1_u64 << 32, vec![4096; 8], program.dims);
        let mut far = || {
            next += 1 << 32;
            next
        };
        let devices = (0..program.topology.devices).map(|device| {
            let tiles = crate::devices::tiles_of(program, device);
            let place = |tiles| Placed { address: far(), tiles };
            let matrices = tiles.into_iter().map(place).collect();
            let heads = crate::devices::heads_of(program, device);
            let vectors = program.buffers.iter().filter_map(|buffer| match &buffer.source {
                BufferSource::Vector(map) => Some((constant_key(map), 8192)),
                BufferSource::Scratch
                | BufferSource::Rotary(_)
                | BufferSource::KvCache { .. }
                | BufferSource::Embedding(_) => None,
            });
            DeviceResidents {
                matrices,
                constants: vectors.collect(),
                rope: rope.clone(),
                caches: (0..dims.layers).map(|_| far()).collect(),
                layout: PageLayout::of(program, heads.clone()),
                first_head: heads.start,
            }
        });
        Residents {
            devices: devices.collect(),
            weight_stream_starts: vec![0; program.matrices.len()],
            matrix_table: program.matrices.clone(),
            heads: (dims.kv_heads, dims.head_dim),
            pages: 1,
            logits: 1 << 20,
            logits_rows: 1,
            kv_capacity: program.kv_capacity,
            workers: program.workers_per_device() as u32,
            seqs: 1,
        }
    }

    /// A table of an image.
    fn table<T: bytemuck::Pod>(image: &Image, base: u64, at: u64, len: usize) -> Vec<T> {
        let first = (at - base) as usize;
        let part = image.bytes[first..].chunks_exact(size_of::<T>()).take(len);
        part.map(bytemuck::pod_read_unaligned).collect()
    }

    /// A batch of llama-3.1-8b has more activations than the 96 MB that were once set aside for every program.
    #[test]
    fn what_is_set_aside_holds_the_batches_of_large_models() {
        let target = Target::by_name("h200").expect("a known target");
        let graph = model::preset("llama-3.1-8b").expect("a preset").graph;
        let mut config = ir::schedule::default_config(&graph, &target);
        config.tiling.attention.kv_split = 16;
        let config = ir::schedule::validate(config, &graph, &target).expect("it is legal");
        let options = lower::Options { kv_capacity: 4096 };
        let program = lower::lower(&config, &graph, &target, options).expect("it lowers");
        let residents = Residents { seqs: 8, ..residents(&program) };
        let images = images(&program, &residents, target.smem_optin_bytes, &[1 << 20]);
        let image = &images.expect("it fits")[0];
        let needed = image.bytes.len() as u64 + image.zeroed + image.poisoned;
        let least = crate::BootOptions::default().program_bytes;
        assert!(needed > least, "{needed} bytes");
        // Tables take their own part, so there is room for twice these activations.
        let room = crate::boot::program_room(&program, 8, least);
        assert!(needed + image.poisoned < room, "{needed} of {room} bytes");
    }

    #[test]
    fn each_device_has_its_tasks_its_weights_and_the_same_places() {
        for name in ["toy-2l", "smollm2-135m"] {
            let target = Target::by_name("h200").expect("a known target").times(2);
            let graph = model::preset(name).expect("a preset").graph;
            let config = ir::schedule::default_config(&graph, &target);
            let config = ir::schedule::validate(config, &graph, &target).expect("it is legal");
            let options = lower::Options { kv_capacity: 256 };
            let program = lower::lower(&config, &graph, &target, options).expect("it lowers");
            let residents = residents(&program);
            let bases = [1 << 20, 3 << 20];
            let images = images(&program, &residents, target.smem_optin_bytes, &bases);
            let images = images.expect("they fit");
            let header = |n: usize| table::<ProgramHeader>(&images[n], bases[n], bases[n], 1)[0];
            let headers = [header(0), header(1)];
            let sizes = [0, 1]
                .map(|n: usize| (images[n].bytes.len(), images[n].zeroed, images[n].poisoned));
            assert_eq!(sizes[0], sizes[1], "{name}");
            let distance = bases[1] - bases[0];
            let places: [fn(&ProgramHeader) -> u64; 5] =
                [|h| h.tasks, |h| h.loads, |h| h.queues, |h| h.buffers, |h| h.counters];
            for of in places {
                assert_eq!(of(&headers[1]) - of(&headers[0]), distance, "{name}");
            }
            let buffers = [0, 1].map(|n: usize| {
                table::<BufferDesc>(&images[n], bases[n], headers[n].buffers, program.buffers.len())
            });
            for (index, (buffer, (a, b))) in
                program.buffers.iter().zip(buffers[0].iter().zip(&buffers[1])).enumerate()
            {
                let replicated = program.topology.is_replicated(BufferId(index as u32));
                assert_eq!([a.replicated, b.replicated], [u32::from(replicated); 2]);
                match (&buffer.source, buffer.kind) {
                    (_, abi::BufferKind::Logits) => assert_eq!(a.address, b.address),
                    (BufferSource::Scratch, _) => assert_eq!(b.address - a.address, distance),
                    _ => {}
                }
            }
            let mut tasks = 0;
            for n in 0..2 {
                let queues: Vec<Queue> =
                    table(&images[n], bases[n], headers[n].queues, residents.workers as usize);
                tasks += queues.iter().map(|queue| queue.tasks as usize).sum::<usize>();
                let loads: u32 = queues.iter().map(|queue| queue.loads).sum();
                let loads: Vec<abi::Load> =
                    table(&images[n], bases[n], headers[n].loads, loads as usize);
                for load in loads.iter().filter(|load| load.kind == abi::LoadKind::Weights as u8) {
                    let own = residents.devices[n].matrices.iter().zip(&program.matrices);
                    let inside = own.filter(|(placed, matrix)| {
                        let end = placed.address + Placed::bytes(matrix, &placed.tiles);
                        load.address >= placed.address
                            && load.address + u64::from(load.units * load.size) <= end
                    });
                    assert_eq!(inside.count(), 1, "{name}: a load of device {n}");
                }
            }
            assert_eq!(tasks, program.task_len(), "{name}");
        }
    }
}
