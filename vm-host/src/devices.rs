//! The devices of a program: the GPUs that they are on, and which tiles and heads each has.

use std::ops::Range;
use std::sync::Arc;

use abi::{AttentionParams, Opcode};
use ir::WorkerId;
use ir::program::{BufferSource, Load, Matrix, Program, Task};

use crate::card::Card;
use crate::driver::{Context, DeviceInfo};
use crate::error::HostError;
use crate::experts;

/// The GPUs of a program: one for each device, or one that all devices share.
pub(crate) struct Cards {
    contexts: Vec<Arc<Context>>,
    devices: u32,
}

impl Cards {
    /// Opens GPUs for this many devices, and lets each use the memory of the others. The first one is current afterwards.
    pub(crate) fn open(cards: &[Card], devices: u32) -> Result<Self, HostError> {
        if cards.len() != 1 && cards.len() != devices as usize {
            return Err(HostError::Request(format!(
                "a program of {devices} devices on {} GPUs: one each is needed, or one for all",
                cards.len()
            )));
        }
        let contexts = cards.iter().map(|card| card.context()).collect::<Result<Vec<_>, _>>()?;
        let sms = contexts[0].info()?.sms;
        for (from, context) in contexts.iter().enumerate() {
            let info = context.info()?;
            if info.sms != sms {
                return Err(HostError::Request(format!(
                    "{} has {} multiprocessors, the first GPU {sms}: one step runs on GPUs of one kind",
                    info.name, info.sms
                )));
            }
            for (to, other) in contexts.iter().enumerate() {
                if from != to && !context.reach(other)? {
                    let [from, to] = [from, to].map(|index| cards[index].ordinal());
                    return Err(HostError::NoPeerAccess { from, to });
                }
            }
        }
        contexts[0].make_current()?;
        Ok(Self { contexts, devices })
    }

    /// Devices of the program.
    pub(crate) fn devices(&self) -> u32 {
        self.devices
    }

    /// Devices on each GPU.
    pub(crate) fn per_card(&self) -> u32 {
        self.devices / self.contexts.len() as u32
    }

    /// The GPUs, each with the first of its devices.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Arc<Context>)> {
        (0..self.devices).step_by(self.per_card() as usize).zip(&self.contexts)
    }

    /// The GPU of a device.
    pub(crate) fn of(&self, device: u32) -> &Arc<Context> {
        &self.contexts[(device / self.per_card()) as usize]
    }

    /// Makes something on each GPU, in order.
    pub(crate) fn on_cards<T>(
        &self,
        make: impl Fn() -> Result<T, HostError>,
    ) -> Result<Vec<T>, HostError> {
        self.contexts.iter().map(|context| context.owner().within(&make)).collect()
    }

    /// Makes something on the GPU of each device, in order.
    pub(crate) fn on_each<T>(
        &self,
        mut make: impl FnMut(u32) -> Result<T, HostError>,
    ) -> Result<Vec<T>, HostError> {
        (0..self.devices).map(|device| self.of(device).owner().within(|| make(device))).collect()
    }

    /// The first GPU.
    pub(crate) fn info(&self) -> Result<DeviceInfo, HostError> {
        self.contexts[0].info()
    }
}

/// Which tiles of each matrix a device has, as runs of consecutive ones in ascending order.
pub(crate) type Tiles = Vec<Vec<Range<u32>>>;

/// The tiles of all matrices.
pub(crate) fn all_tiles(matrices: &[Matrix]) -> Tiles {
    matrices.iter().map(|matrix| std::iter::once(0..matrix.tiles()).collect()).collect()
}

/// The tiles that a device needs: those that its workers load, of experts from all, and the whole of a table whose rows are chosen at run
/// time. The same for every program of a model on as many devices.
pub(crate) fn tiles_of(program: &Program, device: u32) -> Tiles {
    let whole = all_tiles(&program.matrices);
    if program.topology.devices == 1 {
        return whole;
    }
    let mut tiles: Tiles = vec![Vec::new(); program.matrices.len()];
    let mut of_experts = tiles.clone();
    for buffer in &program.buffers {
        if let BufferSource::Embedding(matrix) = buffer.source {
            tiles[matrix.index()].clone_from(&whole[matrix.index()]);
        }
    }
    for load in tasks_of(program, device).filter_map(|task| program.load(task)) {
        let Load::Weights { matrix, unit0, units, selection } = load else { continue };
        let (index, matrix) = (matrix.index(), &program.matrices[matrix.index()]);
        let tile = u64::from(matrix.units_per_tile());
        match selection {
            Some(selection) => {
                of_experts[index].push(experts::tiles_loaded(matrix, selection, unit0, units))
            }
            None => {
                let end = (unit0 + u64::from(units)).div_ceil(tile);
                tiles[index].push((unit0 / tile) as u32..end as u32);
            }
        }
    }
    for ((tiles, own), matrix) in tiles.iter_mut().zip(of_experts).zip(&program.matrices) {
        let own = own.into_iter().reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        tiles.extend(own.into_iter().flat_map(|own| experts::of_all(matrix, own)));
    }
    tiles.into_iter().map(joined).collect()
}

/// Ranges in ascending order, those that touch made one.
fn joined(mut ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut runs: Vec<Range<u32>> = Vec::new();
    for range in ranges {
        match runs.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => runs.push(range),
        }
    }
    runs
}

/// The tasks of a device's workers.
fn tasks_of(program: &Program, device: u32) -> impl Iterator<Item = &Task> {
    let workers = program.workers.iter().zip(0..);
    let own = workers.filter(move |(_, worker)| program.device_of(WorkerId(*worker)) == device);
    own.flat_map(|(worker, _)| &worker.tasks)
}

/// The key/value heads whose attention a device computes; it caches their keys and values.
pub(crate) fn heads_of(program: &Program, device: u32) -> Range<u32> {
    if program.topology.devices == 1 {
        return 0..program.dims.kv_heads;
    }
    let attention = tasks_of(program, device).filter(|task| task.opcode == Opcode::Attention);
    let heads = attention.map(|task| task.params::<AttentionParams>().kv_head);
    let (first, end) = heads.fold((u32::MAX, 0), |(a, b), head| (a.min(head), b.max(head + 1)));
    first.min(end)..end
}

/// A packed matrix on a device: the runs of its tiles, one after the other.
pub(crate) struct Placed {
    pub(crate) address: u64,
    pub(crate) tiles: Vec<Range<u32>>,
}

impl Placed {
    /// Bytes of these tiles.
    pub(crate) fn bytes(matrix: &Matrix, tiles: &[Range<u32>]) -> u64 {
        let count: u64 = tiles.iter().map(|run| u64::from(run.end - run.start)).sum();
        count * matrix.tile_bytes() as u64
    }

    /// Tiles before tile `first`, if the device has `count` from it on in one piece.
    pub(crate) fn before(&self, first: u32, count: u32) -> Option<u64> {
        place(&self.tiles, first, count)
    }
}

/// Tiles before tile `first` in the given runs, if one of them has `count` from it on.
pub(crate) fn place(runs: &[Range<u32>], first: u32, count: u32) -> Option<u64> {
    let mut before = 0;
    for run in runs {
        if run.contains(&first) {
            return (first + count <= run.end).then(|| before + u64::from(first - run.start));
        }
        before += u64::from(run.end - run.start);
    }
    None
}

#[cfg(test)]
pub(crate) mod tests {
    use ir::Target;

    use super::*;

    /// A preset or a folder of a family, lowered for several devices.
    pub(crate) fn lowered(name: &str, devices: u32) -> Program {
        let target = Target::by_name("h200").expect("a known target").times(devices);
        let folder = format!("{}/../corpus/families/{name}", env!("CARGO_MANIFEST_DIR"));
        let graph = match model::preset(name) {
            Some(preset) => preset.graph,
            None => model::import(folder.as_ref()).expect("a folder").graph,
        };
        let config = ir::schedule::default_config(&graph, &target);
        let config = ir::schedule::validate(config, &graph, &target).expect("it is legal");
        let options = lower::Options { kv_capacity: 64 };
        Program::clone(&lower::lower(&config, &graph, &target, options).expect("it lowers"))
    }

    #[test]
    fn each_tile_has_a_place_and_what_is_not_chosen_at_run_time_has_one_alone() {
        let presets = [("toy-2l", 2), ("toy-2l", 4), ("smollm2-135m", 2)];
        let mixtures = [("gpt-oss-bf16", 2), ("qwen2-moe-bf16", 2), ("mixtral-bf16", 4)];
        for (name, devices) in presets.into_iter().chain(mixtures) {
            let program = lowered(name, devices);
            let parts: Vec<Tiles> = (0..devices).map(|device| tiles_of(&program, device)).collect();
            for (index, matrix) in program.matrices.iter().enumerate() {
                let has = |part: &Tiles, tile| place(&part[index], tile, 1).is_some();
                for tile in 0..matrix.tiles() {
                    let owners = parts.iter().filter(|part| has(part, tile)).count();
                    assert!(owners > 0, "{name} {}: tile {tile}", matrix.name);
                }
                let held: u64 = parts.iter().map(|part| Placed::bytes(matrix, &part[index])).sum();
                if ["layers.0.o", "layers.0.gate_up", "layers.0.down"].contains(&&*matrix.name) {
                    assert_eq!(held, matrix.bytes(), "{name} {}", matrix.name);
                }
                if matrix.name == "embed" {
                    assert_eq!(held, matrix.bytes() * u64::from(devices), "{name}");
                }
            }
        }
    }

    #[test]
    fn heads_are_dealt_and_the_places_of_tiles_follow_their_runs() {
        let program = lowered("smollm2-135m", 2);
        assert_eq!([heads_of(&program, 0), heads_of(&program, 1)], [0..1, 1..3]);
        assert_eq!(heads_of(&lowered("toy-2l", 1), 0), 0..lowered("toy-2l", 1).dims.kv_heads);
        let runs = [4..8, 10..12, 14..16];
        assert_eq!([4, 7, 10, 15].map(|tile| place(&runs, tile, 1)), [0, 3, 4, 7].map(Some));
        assert_eq!(
            (place(&runs, 6, 2), place(&runs, 6, 3), place(&runs, 8, 1)),
            (Some(2), None, None)
        );
        assert_eq!(joined(vec![4..6, 0..2, 2..3, 5..8]), [0..3, 4..8]);
    }
}
