//! Loads weights that are in memory already, or made there: packed by all processors and copied, with no kernel
//! resident. Tensors that are made are held only while their pieces are packed, so that a model may be larger than the
//! host's memory.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ir::{TensorId, Weights};
use rayon::prelude::*;

use crate::error::HostError;
use crate::weight_stream::memory::Staging;
use crate::weight_stream::pipeline::{SLOTS, Target};
use crate::weight_stream::plan::{Piece, Plan, pack};
use crate::weight_stream::{LoadReport, wait_until};

/// Limit for the copy of a piece.
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// The tensors of the pieces that are packed now.
type Held<'a> = BTreeMap<TensorId, Cow<'a, [u8]>>;

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
    let mut held = Held::new();
    let (mut next, mut packed_bytes) = (0, 0);
    for (round, pieces) in plan.pieces.chunks(SLOTS / 2).enumerate() {
        let half = &mut staging[round % 2 * (SLOTS / 2)..][..pieces.len()];
        hold(pieces, weights, &mut held);
        for part in &*half {
            wait_until(COPY_LIMIT, || target.copied(part.index))?;
        }
        half.par_iter_mut().zip(pieces).try_for_each(|(part, piece)| {
            // SAFETY: its last copy is over, and the target has kept the memory.
            let out = unsafe { &mut part.bytes_mut()[..plan.packed_bytes(piece)] };
            pack_from(plan, piece, &held, out)
        })?;
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

/// Reads the tensors of these pieces that are not held yet, several at once, after those of no piece were let go.
fn hold<'a>(pieces: &[Piece], weights: &'a dyn Weights, held: &mut Held<'a>) {
    let needed =
        |id: TensorId| pieces.iter().flat_map(|piece| &piece.reads).any(|read| read.tensor == id);
    held.retain(|&id, _| needed(id));
    let reads = pieces.iter().flat_map(|piece| &piece.reads);
    let missing: BTreeSet<TensorId> =
        reads.map(|read| read.tensor).filter(|id| !held.contains_key(id)).collect();
    held.par_extend(missing.into_par_iter().map(|id| (id, weights.read(id))));
}

/// Packs a piece with several threads: there are fewer pieces than processors.
fn pack_from(plan: &Plan, piece: &Piece, held: &Held<'_>, out: &mut [u8]) -> Result<(), HostError> {
    const PARTS: u32 = 4;
    let matrix = &plan.matrices[piece.matrix];
    let row_bytes = matrix.format.row_bytes(matrix.cols);
    let tiles = piece.tiles.div_ceil(PARTS).max(1);
    let parts = out.par_chunks_mut(tiles as usize * matrix.tile_bytes());
    parts.zip(0..piece.tiles.div_ceil(tiles)).try_for_each(|(out, part)| {
        let row = |tensor: TensorId, row: u32| -> &[u8] {
            held.get(&tensor).map_or(&[], |held| &held[row as usize * row_bytes..][..row_bytes])
        };
        pack(matrix, piece.tile0 + part * tiles, row, out)
    })
}
