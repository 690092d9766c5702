//! Boot, before any kernel is resident: the handshake, the memory, the constants, the checks of residency.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use ir::program::{BufferSource, Matrix, Program};
use ir::{Graph, Weights};
use vm_device::Variant;

use crate::card::Card;
use crate::devices::{Cards, Placed, Tiles, heads_of, tiles_of};
use crate::driver::{Module, Stream};
use crate::error::HostError;
use crate::load::{DeviceResidents, constant_key, constant_values, rope_table};
use crate::memory::{Copier, DeviceBuffer, HostBuffer};
use crate::pages::{KvPool, PageLayout, PageTables, cached_layers, pool_pages};
use crate::prefill::workspace_bytes;
use crate::region::region_bytes;
use crate::sampling::SamplingMemory;
use crate::weight_stream::Streaming;

/// Options of a boot.
#[derive(Clone, Debug)]
pub struct BootOptions {
    /// The GPUs: one for each device of the program, or one for all devices.
    pub cards: Vec<Card>,
    /// Sessions with a key/value cache of their own.
    pub sessions: u32,
    /// Pages for their caches.
    pub kv_pool: KvPool,
    /// Rows of logits that a command may keep.
    pub logits_rows: u32,
    /// Least device memory for each loaded program's tables and activations ([`program_room`]).
    pub program_bytes: u64,
    /// Task records for the traced kernel variant.
    pub records: u32,
    /// How long a worker may wait inside a step before it traps and the kernel leaves.
    pub deadline: Duration,
    /// Weights are streamed while the kernel is resident; without it they are all loaded before the launch.
    pub streaming: Option<Streaming>,
}

impl Default for BootOptions {
    fn default() -> Self {
        Self {
            cards: vec![Card::default()],
            sessions: 1,
            kv_pool: KvPool::Full,
            logits_rows: 64,
            program_bytes: 96 << 20,
            records: 0,
            deadline: deadline(),
            streaming: None,
        }
    }
}

/// How long a worker may wait by default: 2 s, or the whole seconds of `AMK_DEADLINE_S`, for tools that slow a kernel down.
#[must_use]
pub fn deadline() -> Duration {
    let given = std::env::var("AMK_DEADLINE_S").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(given.unwrap_or(2))
}

/// Bytes of device memory for each loaded program, from the first one and the sequences of its kernel. Another schedule may
/// need more activations, as for more splits of the keys: there is room for twice those of the first program.
pub(crate) fn program_room(program: &Program, seqs: u32, least: u64) -> u64 {
    const TABLES: u64 = 32 << 20;
    let activations = u64::from(seqs) * program.arena_bytes.next_multiple_of(256);
    least.max(TABLES + 2 * activations)
}

/// Refuses a grid that cannot be resident at once, before its launch: its workers would wait for workers that never start.
pub(crate) fn check_residency(
    requested: u32,
    per_multiprocessor: u32,
    multiprocessors: u32,
    threads: u32,
    shared: u32,
) -> Result<(), HostError> {
    let possible = per_multiprocessor.saturating_mul(multiprocessors);
    if requested > possible {
        return Err(HostError::NotCoResident { requested, possible, threads, shared });
    }
    Ok(())
}

/// Allocates a device's part of each matrix.
pub(crate) fn place_matrices(
    matrices: &[Matrix],
    tiles: &Tiles,
    owned: &mut Vec<DeviceBuffer>,
) -> Result<Vec<Placed>, HostError> {
    let mut placed = Vec::new();
    for (matrix, tiles) in matrices.iter().zip(tiles) {
        let buffer = DeviceBuffer::zeroed(Placed::bytes(matrix, tiles))?;
        placed.push(Placed { address: buffer.address, tiles: tiles.clone() });
        owned.push(buffer);
    }
    Ok(placed)
}

/// Number of pages that fit on every GPU.
pub(crate) fn check_cards(
    cards: &Cards,
    graph: &Graph,
    program: &Program,
    options: &BootOptions,
    seqs: u32,
) -> Result<u32, HostError> {
    let prompts = workspace_bytes(graph, program.kv_capacity);
    let mut pages = u32::MAX;
    for (first, context) in cards.iter() {
        let here = (first..first + cards.per_card(), context.free_bytes()?);
        pages = pages.min(check_memory(program, options, (seqs, prompts), here)?);
    }
    Ok(pages)
}

/// Refuses a kernel of another number of devices.
pub(crate) fn check_devices(devices: u32, variant: &Variant) -> Result<(), HostError> {
    if variant.devices != devices {
        return Err(HostError::Request(format!(
            "a kernel of {} devices for a program of {devices}",
            variant.devices
        )));
    }
    Ok(())
}

/// Refuses shapes and options that no kernel supports.
pub(crate) fn check_shape(graph: &Graph, options: &BootOptions) -> Result<(), HostError> {
    if options.sessions == 0 || options.sessions > abi::SESSIONS_MAX {
        return Err(HostError::Request(format!(
            "{} sessions; 1 to {} are possible",
            options.sessions,
            abi::SESSIONS_MAX
        )));
    }
    if let Some(refused) = graph.heads_refused() {
        return Err(HostError::Request(format!("{}: {refused}", graph.name)));
    }
    for (what, width) in [("hidden", graph.hidden), ("ffn", graph.ffn_width())] {
        if !width.is_multiple_of(4) {
            return Err(HostError::Request(format!(
                "{what} is {width} in {}: the kernel waits for activations four at a time, so it must be a multiple of 4",
                graph.name
            )));
        }
    }
    Ok(())
}

/// Memory that caches sized to fit leave free: prompts in chunks allocate theirs later.
const SPARE_BYTES: u64 = 2 << 30;

/// Number of pages of the caches, without page zero. What does not fit is refused before anything is allocated. `devices` are those of a GPU
/// that has so much free memory, and `prompts` the bytes of each for prompts in chunks.
fn check_memory(
    program: &Program,
    options: &BootOptions,
    (seqs, prompts): (u32, u64),
    (devices, free): (Range<u32>, u64),
) -> Result<u32, HostError> {
    let sessions = options.sessions;
    let heads = |device| PageLayout::of(program, heads_of(program, device)).page_bytes();
    let page = (devices.clone().map(heads).sum::<u64>() * cached_layers(program)).max(1);
    let tables = PageTables::bytes(sessions, program.kv_capacity);
    let programs = region_bytes(options.program_bytes);
    let of_each = |device| {
        let tiles = tiles_of(program, device);
        let placed = program.matrices.iter().zip(&tiles);
        let matrices: u64 = placed.map(|(matrix, tiles)| Placed::bytes(matrix, tiles)).sum();
        matrices + tables + programs
    };
    let logits = logits_bytes(options, seqs, program.dims.vocab);
    let sampling = SamplingMemory::bytes(options.sessions, program.dims.vocab);
    let prompts = devices.len() as u64 * prompts;
    let needed =
        devices.map(of_each).sum::<u64>() + page + logits + sampling + prompts + (256 << 20);
    let room = free.saturating_sub(needed) / page;
    let spare = SPARE_BYTES.div_ceil(page);
    match pool_pages(options.kv_pool, (sessions, program.kv_capacity), room, spare) {
        Ok(pages) if needed <= free => Ok(pages),
        Ok(pages) => Err(HostError::OutOfMemory { needed: needed + u64::from(pages) * page, free }),
        Err(pages) => Err(HostError::OutOfMemory { needed: needed + pages * page, free }),
    }
}

/// Bytes of the rows of logits of all sequences.
pub(crate) fn logits_bytes(options: &BootOptions, seqs: u32, vocab: u32) -> u64 {
    u64::from(seqs) * u64::from(options.logits_rows) * u64::from(vocab) * 4
}

/// The layout handshake: the compiled kernel must be built with this build's header, whose assertions check sizes.
pub(crate) fn probe_abi(module: &Module, stream: &Stream) -> Result<(), HostError> {
    let out = HostBuffer::zeroed(size_of::<u64>())?;
    let mut address = out.device;
    let mut arguments: [*mut std::ffi::c_void; 1] = [(&raw mut address).cast()];
    stream.launch(&module.function(c"amk_abi_probe")?, 1, 1, 0, &mut arguments)?;
    stream.synchronize()?;
    let mut bytes = [0; size_of::<u64>()];
    out.read(0, &mut bytes);
    let (found, expected) = (u64::from_le_bytes(bytes), abi::abi_hash());
    if found == expected { Ok(()) } else { Err(HostError::AbiMismatch { found, expected }) }
}

/// Loads what a device has besides its matrices: constants, rotary tables, caches.
pub(crate) fn make_device(
    graph: &Graph,
    weights: &dyn Weights,
    (program, device): (&Program, u32),
    pages: u32,
    matrices: Vec<Placed>,
    owned: &mut Vec<DeviceBuffer>,
    copier: &mut Copier,
) -> Result<DeviceResidents, HostError> {
    let mut place = |bytes: &[u8], owned: &mut Vec<DeviceBuffer>| -> Result<u64, HostError> {
        let buffer = DeviceBuffer::zeroed(bytes.len() as u64)?;
        let address = buffer.address;
        copier.upload(address, bytes)?;
        owned.push(buffer);
        Ok(address)
    };
    let mut constants = BTreeMap::new();
    for buffer in &program.buffers {
        if let BufferSource::Vector(map) = &buffer.source {
            let values = constant_values(map, graph, weights);
            constants.insert(constant_key(map), place(bytemuck::cast_slice(&values), owned)?);
        }
    }
    let mut rope = Vec::new();
    for rotary in std::iter::once(&graph.inv_freq).chain(&graph.rotary) {
        let table = rope_table(rotary, graph.head_dim, program.kv_capacity);
        rope.push(place(bytemuck::cast_slice(&table), owned)?);
    }
    let mut caches = vec![0; graph.layers.len()];
    let heads = heads_of(program, device);
    let layout = PageLayout::of(program, heads.clone());
    for buffer in &program.buffers {
        if let BufferSource::KvCache { layer } = buffer.source {
            let with_zero = u64::from(pages) + 1;
            owned.push(DeviceBuffer::zeroed(with_zero * layout.page_bytes())?);
            caches[layer as usize] = owned.last().map_or(0, |b| b.address);
        }
    }
    Ok(DeviceResidents { matrices, constants, rope, caches, layout, first_head: heads.start })
}

#[cfg(test)]
mod tests {
    use ir::Target;

    use super::*;

    #[test]
    fn a_grid_that_is_larger_than_what_fits_is_refused_before_a_launch() {
        assert!(check_residency(132, 1, 132, 416, 232_448).is_ok());
        let error = check_residency(133, 1, 132, 416, 232_448).expect_err("one too many");
        assert!(matches!(error, HostError::NotCoResident { requested: 133, possible: 132, .. }));
        let said = error.to_string();
        assert!(said.contains("nothing was launched") && said.contains("--target"), "{said}");
        assert!(check_residency(1, 0, 132, 416, 300_000).is_err(), "not even one fits");
        assert!(check_residency(u32::MAX, u32::MAX, 132, 1, 0).is_ok(), "it does not wrap");
    }

    #[test]
    fn a_model_that_does_not_fit_is_refused_before_an_allocation() {
        let model = model::preset("toy").expect("a preset");
        let target = Target::by_name("h200").expect("a known target");
        let config = ir::schedule::neutral_config(&model.graph, &target);
        let valid = ir::schedule::validate(config, &model.graph, &target).expect("it is legal");
        let lowered =
            lower::lower(&valid, &model.graph, &target, lower::Options { kv_capacity: 64 });
        let program = lowered.expect("it lowers");
        let options = BootOptions::default();
        assert!(check_memory(&program, &options, (1, 0), (0..1, 80 << 30)).is_ok());
        let error =
            check_memory(&program, &options, (1, 0), (0..1, 1 << 20)).expect_err("a megabyte");
        let HostError::OutOfMemory { needed, free } = error else { panic!("{error}") };
        assert_eq!(free, 1 << 20);
        assert!(needed > options.program_bytes * crate::PROGRAMS_MAX as u64);
        assert!(
            check_memory(&program, &options, (1, 0), (0..1, needed)).is_ok(),
            "exactly enough is enough"
        );
        let more = BootOptions { sessions: 8, ..options };
        let error = check_memory(&program, &more, (1, 0), (0..1, needed))
            .expect_err("sessions have caches");
        let HostError::OutOfMemory { needed, .. } = error else { panic!("{error}") };
        let layout = PageLayout::of(&program, 0..program.dims.kv_heads);
        let page = cached_layers(&program) * layout.page_bytes();
        let (page, pages) = (page, |kv_pool, free| {
            check_memory(&program, &BootOptions { kv_pool, ..more.clone() }, (1, 0), (0..1, free))
                .ok()
        });
        assert_eq!(pages(KvPool::Full, needed), Some(8), "64 positions each");
        assert_eq!(pages(KvPool::Full, needed - 1), None);
        assert_eq!(pages(KvPool::Fitting, needed - 7 * page), Some(1));
        assert_eq!(pages(KvPool::Fitting, needed - 7 * page - 1), None);
        let spared = needed + SPARE_BYTES.next_multiple_of(page);
        assert_eq!(pages(KvPool::Fitting, spared - 5 * page), Some(3));
        assert_eq!(pages(KvPool::Positions(1), needed - 7 * page), Some(1));
        assert!(
            check_memory(&program, &more, (2, 0), (0..1, needed)).is_err(),
            "sequences have logits"
        );
        assert!(error.to_string().contains("nothing was allocated"), "{error}");
    }
}
