//! Weights that arrive while the machine runs: reports their progress, compares them with their files.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

use abi::Completion;
use ir::program::{BufferSource, Matrix, Program};
use ir::{Graph, TensorId, Weights};
use rayon::prelude::*;

use super::{Idle, Memory, Resident};
use crate::boot::{BootOptions, place_matrices};
use crate::devices::{Cards, Placed, Tiles, tiles_of};
use crate::driver::Stream;
use crate::error::HostError;
use crate::memory::{Copier, DeviceBuffer};
use crate::region::Region;
use crate::ring::RingHost;
use crate::weight_stream::{
    DeviceEnd, DeviceTarget, LoadReport, Plan, Through, WeightStream, land_before_launch,
};

/// How weights were loaded while the kernel was resident.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct WeightStreamReport {
    /// Bytes, speed and method of the reads.
    #[serde(flatten)]
    pub load: LoadReport,
    /// Times that a worker's loader waited for weights.
    pub waits: u32,
    /// Total seconds of those waits, over all workers.
    pub waited_s: f64,
}

/// A tensor on the device compared with its file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct TensorCheck {
    /// Its name.
    pub tensor: String,
    /// Bytes.
    pub bytes: u64,
    /// blake3 of the bytes on the device.
    pub device: String,
    /// blake3 of the bytes in the file.
    pub file: String,
}

impl TensorCheck {
    /// Whether they are equal.
    #[must_use]
    pub fn equal(&self) -> bool {
        self.device == self.file
    }
}

impl Idle {
    /// Waits until all weights have arrived: only the resident kernel can wait for them itself.
    pub(super) fn weights_here(&self) -> Result<(), HostError> {
        self.weight_stream.as_ref().map_or(Ok(()), WeightStream::wait)
    }

    /// Whether weights are still on their way: false if all have arrived.
    ///
    /// # Errors
    /// Why they will not arrive.
    pub fn arriving(&self) -> Result<bool, HostError> {
        let Some(stream) = &self.weight_stream else { return Ok(false) };
        // In this order: a stream that fails in between is one that is under way.
        let under_way = stream.under_way();
        stream.failure().map_or(Ok(under_way), Err)
    }
}

impl Resident {
    /// Whether weights are still on their way: see [`Idle::arriving`].
    ///
    /// # Errors
    /// Why they will not arrive.
    pub fn arriving(&self) -> Result<bool, HostError> {
        self.idle.as_ref().map_or(Ok(false), Idle::arriving)
    }

    /// How the weights were loaded, and how long workers waited for them.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn weight_stream_report(&mut self) -> Result<WeightStreamReport, HostError> {
        let idle = self.idle();
        let (mut waits, mut waited_s) = (0, 0.0);
        for region in &idle.memory.regions {
            let block: Vec<abi::WeightStream> =
                idle.memory.copier.values(region.weight_stream(), 1)?;
            waits += block[0].waits;
            waited_s += f64::from(block[0].waited_us) / 1e6;
        }
        Ok(WeightStreamReport { load: idle.load_report(), waits, waited_s })
    }

    /// Compares every matrix on the device with its file, tensor by tensor, rounded as it was when it was packed. Takes as
    /// long as copying all of them back.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn check_weights(
        &mut self,
        graph: &Graph,
        weights: &dyn Weights,
    ) -> Result<Vec<TensorCheck>, HostError> {
        let idle = self.idle();
        let mut checks = Vec::new();
        for (index, matrix) in idle.memory.residents.matrix_table.iter().enumerate() {
            let packed = idle.memory.packed(index)?;
            let rows = rows_by_tensor(matrix);
            checks.par_extend(rows.par_iter().map(|(&tensor, rows)| {
                let of = graph.tensor(tensor);
                let stored = matrix.format.rounded(weights.read(tensor));
                TensorCheck {
                    tensor: of.name.clone(),
                    bytes: stored.len() as u64,
                    device: unpacked_hash(matrix, &packed, rows),
                    file: blake3::hash(&stored).to_hex().to_string(),
                }
            }));
        }
        Ok(checks)
    }
}

/// Bytes of the counts of `abi::WeightStream`.
pub(super) const WEIGHT_STREAM_COUNTS: u64 =
    (offset_of!(abi::WeightStream, reserved) - offset_of!(abi::WeightStream, waits)) as u64;

impl Memory {
    /// The bytes of a packed matrix: of each tile those of a device that has it.
    pub(super) fn packed(&self, index: usize) -> Result<Vec<u8>, HostError> {
        let matrix = &self.residents.matrix_table[index];
        let (mut packed, tile) = (vec![0; matrix.bytes() as usize], matrix.tile_bytes());
        for device in &self.residents.devices {
            let placed = &device.matrices[index];
            let mut at = placed.address;
            for run in &placed.tiles {
                let part = &mut packed[run.start as usize * tile..run.end as usize * tile];
                self.copier.download(at, part)?;
                at += part.len() as u64;
            }
        }
        Ok(packed)
    }
}

/// Where the packed matrices are, by device, and how they come there.
pub(super) struct Brought {
    pub(super) placed: Vec<Vec<Placed>>,
    /// Units that arrive before the first of each matrix.
    pub(super) starts: Vec<u32>,
    pub(super) weight_stream: Option<WeightStream>,
    pub(super) report: LoadReport,
}

/// Allocates the matrices of each device and loads them, or starts to.
pub(super) fn bring_weights(
    (program, weights, through): (&Program, &dyn Weights, Through<'_>),
    options: &BootOptions,
    (cards, regions): (&Cards, &[Region]),
    copier: &mut Copier,
    owned: &mut Vec<DeviceBuffer>,
) -> Result<Brought, HostError> {
    let tiles: Vec<Tiles> = (0..cards.devices()).map(|n| tiles_of(program, n)).collect();
    let placed = cards.on_each(|n| place_matrices(&program.matrices, &tiles[n as usize], owned))?;
    let plan = place_weight_stream(program, options, &tiles, regions, copier)?;
    let ends = cards.on_each(|n| {
        let addresses = placed[n as usize].iter().map(|matrix| matrix.address);
        DeviceEnd::new(addresses.collect(), regions[n as usize].weight_stream())
    })?;
    let target = DeviceTarget::new(cards.of(0), &plan, ends)?;
    let starts = plan.starts.clone();
    let (weight_stream, report) = match options.streaming {
        None => (None, land_before_launch(plan, weights, target)?),
        Some(how) => {
            (Some(WeightStream::start(plan, weights, how, target, through)?), LoadReport::default())
        }
    };
    Ok(Brought { placed, starts, weight_stream, report })
}

/// The order in which weights are streamed to the devices with these tiles, and the devices' initial watermark: how far they are, or that all have
/// arrived.
fn place_weight_stream(
    program: &Program,
    options: &BootOptions,
    tiles: &[Tiles],
    regions: &[Region],
    copier: &mut Copier,
) -> Result<Arc<Plan>, HostError> {
    let plan = Arc::new(Plan::new(&program.matrices, tiles)?);
    let end = |matrix: usize| plan.starts[matrix] + program.matrices[matrix].units() as u32;
    let embeddings = program.buffers.iter().filter_map(|buffer| match buffer.source {
        BufferSource::Embedding(matrix) => Some(end(matrix.index())),
        BufferSource::Scratch
        | BufferSource::Vector(_)
        | BufferSource::Rotary(_)
        | BufferSource::KvCache { .. } => None,
    });
    let limit = options.streaming.map_or(Duration::ZERO, |streaming| streaming.limit);
    let weight_stream = abi::WeightStream {
        watermark: if options.streaming.is_some() { 0 } else { abi::WATERMARK_ALL },
        embedding: embeddings.max().unwrap_or(0),
        // The host gives up after two limits: the device must not give up first.
        patience: (limit.as_nanos() * 4 / options.deadline.as_nanos().max(1) + 2) as u32,
        ..abi::WeightStream::default()
    };
    for region in regions {
        copier.upload(region.weight_stream(), bytemuck::bytes_of(&weight_stream))?;
    }
    Ok(plan)
}

/// Waits for a command. If it waits for weights, it may take as long as they do, for which the weight stream has its own limit.
pub(super) fn wait_for_answer(
    ring: &mut RingHost,
    kernels: &[Stream],
    weight_stream: Option<&WeightStream>,
    limit: Duration,
    preempt: &mut dyn FnMut() -> bool,
) -> Result<Completion, HostError> {
    loop {
        let under_way = weight_stream.is_some_and(WeightStream::under_way);
        match ring.wait_completion(limit, || any_done(kernels), preempt) {
            Err(HostError::TimedOut { .. }) if under_way => {}
            answer => return answer,
        }
    }
}

/// Whether the kernel of some GPU has exited.
fn any_done(kernels: &[Stream]) -> Result<bool, HostError> {
    for kernel in kernels {
        if kernel.is_done()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The packed rows of each tensor, in the tensor's order.
fn rows_by_tensor(matrix: &Matrix) -> BTreeMap<TensorId, Vec<u32>> {
    let mut all: BTreeMap<TensorId, Vec<u32>> = BTreeMap::new();
    for row in 0..matrix.rows() {
        if let Some((tensor, _)) = matrix.map.locate(row) {
            all.entry(tensor).or_default().push(row);
        }
    }
    all
}

/// blake3 of packed rows in the layout of their file.
fn unpacked_hash(matrix: &Matrix, packed: &[u8], rows: &[u32]) -> String {
    let row_bytes = matrix.format.row_bytes(matrix.cols);
    let tile_bytes = matrix.tile_bytes();
    let mut hasher = blake3::Hasher::new();
    let mut line = Vec::new();
    for &row in rows {
        let tile = &packed[(row / abi::UNIT_ROWS) as usize * tile_bytes..][..tile_bytes];
        matrix.format.stored_row(tile, (row % abi::UNIT_ROWS) as usize, &mut line);
        hasher.update(&line[..row_bytes]);
    }
    hasher.finalize().to_hex().to_string()
}
