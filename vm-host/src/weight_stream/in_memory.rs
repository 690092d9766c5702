//! Loads weights that are in memory already: packed by all processors and copied, with no kernel resident.

use std::time::{Duration, Instant};

use ir::Weights;
use rayon::prelude::*;

use crate::error::HostError;
use crate::weight_stream::memory::Staging;
use crate::weight_stream::pipeline::{SLOTS, Target};
use crate::weight_stream::plan::{Plan, pack};
use crate::weight_stream::{LoadReport, wait_until};

/// Limit for the copy of a piece.
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// Copies all weights to the target. Half of its staging memory is packed into while the other half is copied from.
pub(crate) fn land<T: Target>(
    plan: &Plan,
    weights: &dyn Weights,
    target: &mut T,
) -> Result<LoadReport, HostError> {
    let began = Instant::now();
    let part = plan.largest();
    // SAFETY: the trait's promise; a part is packed into again only once its copy is over, and the target frees what is copied from.
    let mut staging = unsafe { Staging::parts(target.staging(part * SLOTS), part, SLOTS) };
    target.enter()?;
    let (mut next, mut packed_bytes) = (0, 0);
    for (round, pieces) in plan.pieces.chunks(SLOTS / 2).enumerate() {
        let half = &mut staging[round % 2 * (SLOTS / 2)..][..pieces.len()];
        for part in &*half {
            wait_until(COPY_LIMIT, || target.copied(part.index))?;
        }
        half.par_iter_mut().zip(pieces).for_each(|(part, piece)| {
            let matrix = &plan.matrices[piece.matrix];
            let row_bytes = matrix.format.row_bytes(matrix.cols);
            // SAFETY: its last copy is over, and the target has kept the memory.
            let out = unsafe { &mut part.bytes_mut()[..plan.packed_bytes(piece)] };
            pack(
                matrix,
                piece,
                |tensor, row| &weights.bytes(tensor)[row as usize * row_bytes..][..row_bytes],
                out,
            );
        });
        for (part, piece) in half.iter().zip(pieces) {
            let bytes = plan.packed_bytes(piece);
            for &place in &piece.places {
                target.copy(piece.matrix, place, part, bytes)?;
            }
            target.watermark(plan.watermark_behind(next), part.index)?;
            packed_bytes += bytes as u64;
            next += 1;
        }
    }
    for part in &staging {
        wait_until(COPY_LIMIT, || target.copied(part.index))?;
    }
    let bytes = plan.pieces.iter().map(|piece| plan.stored_bytes(piece)).sum();
    let seconds = began.elapsed().as_secs_f64();
    Ok(LoadReport { bytes, packed_bytes, seconds, source: "memory".into(), fallback: None })
}
