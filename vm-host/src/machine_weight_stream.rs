//! Weights that arrive while the machine runs: reports their progress, compares them with their files.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

use abi::Completion;
use ir::program::{BufferSource, Matrix, Program};
use ir::{Graph, TensorId, Weights};
use rayon::prelude::*;

use super::{Idle, Resident};
use crate::boot::BootOptions;
use crate::driver::Stream;
use crate::error::HostError;
use crate::memory::{Copier, DeviceBuffer};
use crate::ring::RingHost;
use crate::weight_stream::{LoadReport, Plan, WeightStream};

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
}

impl Resident {
    /// How the weights were loaded, and how long workers waited for them.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn weight_stream_report(&mut self) -> Result<WeightStreamReport, HostError> {
        let idle = self.idle();
        let block: Vec<abi::WeightStream> =
            idle.memory.copier.values(idle.memory.weight_stream.address, 1)?;
        let (waits, waited_s) = (block[0].waits, f64::from(block[0].waited_us) / 1e6);
        Ok(WeightStreamReport { load: idle.load_report(), waits, waited_s })
    }

    /// Compares every matrix on the device with its file, tensor by tensor. Takes as long as copying all of them back.
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
            let address = idle.memory.residents.matrices[index];
            let packed = idle.memory.copier.values(address, matrix.bytes() as usize)?;
            let rows = rows_by_tensor(matrix);
            checks.par_extend(rows.par_iter().map(|(&tensor, rows)| {
                let of = graph.tensor(tensor);
                let stored = weights.bytes(tensor);
                TensorCheck {
                    tensor: of.name.clone(),
                    bytes: stored.len() as u64,
                    device: unpacked_hash(matrix, &packed, rows),
                    file: blake3::hash(stored).to_hex().to_string(),
                }
            }));
        }
        Ok(checks)
    }
}

/// Bytes of the counts of `abi::WeightStream`.
pub(super) const WEIGHT_STREAM_COUNTS: u64 =
    (offset_of!(abi::WeightStream, reserved) - offset_of!(abi::WeightStream, waits)) as u64;

/// The order in which weights are streamed, and the device's initial watermark: how far they are, or that all have arrived.
pub(super) fn place_weight_stream(
    program: &Program,
    options: &BootOptions,
    copier: &mut Copier,
) -> Result<(Arc<Plan>, DeviceBuffer), HostError> {
    let plan = Arc::new(Plan::new(&program.matrices)?);
    let block = DeviceBuffer::zeroed(size_of::<abi::WeightStream>() as u64)?;
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
    copier.upload(block.address, bytemuck::bytes_of(&weight_stream))?;
    Ok((plan, block))
}

/// Waits for a command. If it waits for weights, it may take as long as they do, for which the weight stream has its own limit.
pub(super) fn wait_for_answer(
    ring: &mut RingHost,
    kernel: &Stream,
    weight_stream: Option<&WeightStream>,
    limit: Duration,
    preempt: &mut dyn FnMut() -> bool,
) -> Result<Completion, HostError> {
    loop {
        let under_way = weight_stream.is_some_and(WeightStream::under_way);
        match ring.wait_completion(limit, || kernel.is_done(), preempt) {
            Err(HostError::TimedOut { .. }) if under_way => {}
            answer => return answer,
        }
    }
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
