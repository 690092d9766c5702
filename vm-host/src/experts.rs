//! Experts on a device: it has the same rows of each, and a route decides whose it reads.

use std::ops::Range;

use ir::program::{Matrix, Selection};

use crate::devices::Placed;

/// Tiles of each expert.
fn tiles_each(matrix: &Matrix) -> u32 {
    matrix.tiles() / matrix.experts
}

/// The tiles that a load has units of, in an expert, whichever is chosen.
pub(crate) fn tiles_loaded(
    matrix: &Matrix,
    selection: Selection,
    unit0: u64,
    units: u32,
) -> Range<u32> {
    let (segment, tile) = (u64::from(selection.segment), u64::from(matrix.units_per_tile()));
    let round = segment * u64::from(selection.slots);
    let last = unit0 + u64::from(units.max(1)) - 1;
    let within = |unit: u64| unit / round * segment + unit % segment;
    let (first, end) = match unit0 / segment == last / segment {
        true => (within(unit0), within(last) + 1),
        // Of several slots: all that they have in these rounds.
        false => (unit0 / round * segment, (last / round + 1) * segment),
    };
    (first / tile) as u32..end.div_ceil(tile) as u32
}

/// These tiles of every expert, by their numbers in the matrix.
pub(crate) fn of_all(matrix: &Matrix, own: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let each = tiles_each(matrix);
    (0..matrix.experts).map(move |expert| expert * each + own.start..expert * each + own.end)
}

/// The tiles of each expert that a device has, if these are all of its tiles; `None` if it has not the same of each.
pub(crate) fn own_tiles(matrix: &Matrix, runs: &[Range<u32>]) -> Option<Range<u32>> {
    match runs {
        [] => Some(0..0),
        [all] if *all == (0..matrix.tiles()) => Some(0..tiles_each(matrix)),
        [first, ..] if of_all(matrix, first.clone()).eq(runs.iter().cloned()) => {
            Some(first.clone())
        }
        _ => None,
    }
}

/// Where the choice of experts puts a load's units, counted among those that a device has, without the logits' address;
/// `None` if it has not the same of each expert.
pub(crate) fn record(
    matrix: &Matrix,
    placed: &Placed,
    selection: Selection,
    unit0: u32,
) -> Option<abi::Routed> {
    let place = Place::new(matrix, &placed.tiles)?;
    let (segment, unit0) = place.of(matrix, selection, unit0);
    Some(abi::Routed {
        experts: placed.address,
        expert_units: place.units,
        segment,
        unit0,
        slots: selection.slots,
        expert_len: matrix.experts,
        ..abi::Routed::default()
    })
}

/// Which units of each expert lie on a device. Those of an expert lie one after the other, and experts in order.
struct Place {
    /// Those before the first one.
    before: u32,
    units: u32,
}

impl Place {
    /// The place of experts whose tiles on a device are these; `None` if it has not the same of each.
    fn new(matrix: &Matrix, runs: &[Range<u32>]) -> Option<Self> {
        let own = own_tiles(matrix, runs).filter(|own| !own.is_empty())?;
        let tile = matrix.units_per_tile();
        Some(Self { before: own.start * tile, units: (own.end - own.start) * tile })
    }

    /// The segment and the first unit of a load, as [`abi::Routed`] counts them: among the units that are here.
    fn of(&self, matrix: &Matrix, selection: Selection, unit0: u32) -> (u32, u32) {
        let Selection { segment, slots, .. } = selection;
        let (slot, round) = (unit0 / segment % slots, unit0 / (segment * slots));
        let unit = round * segment + unit0 % segment - self.before;
        // Either each slot has all its rows before the next, or slots alternate in every tile.
        let whole = tiles_each(matrix) * matrix.units_per_tile();
        let segment = if segment == whole { self.units } else { segment };
        (segment, (unit / segment * slots + slot) * segment + unit % segment)
    }
}

#[cfg(test)]
mod tests {
    use ir::program::Load;

    use super::*;
    use crate::devices::tests::lowered;
    use crate::devices::tiles_of;

    /// The slot of each unit of a load, and the unit within its expert: by the definition of [`Selection`], and as the kernel
    /// walks through a record of the same meaning.
    fn walk(unit0: u32, units: u32, segment: u32, slots: u32) -> Vec<(u32, u32)> {
        let of =
            |unit| (unit / segment % slots, unit / (segment * slots) * segment + unit % segment);
        (unit0..unit0 + units).map(of).collect()
    }

    #[test]
    fn a_load_finds_on_its_device_the_units_that_it_names() {
        for (name, devices) in [("mixtral-bf16", 1), ("mixtral-bf16", 2), ("gpt-oss-bf16", 4)] {
            let program = lowered(name, devices);
            let mut loads = 0;
            for device in 0..devices {
                let tiles = tiles_of(&program, device);
                let each = program.workers_per_device();
                let own = program.workers.iter().skip(device as usize * each).take(each);
                for load in own.flat_map(|worker| program.stream(worker)) {
                    let Load::Weights { matrix, unit0, units, selection: Some(of) } = load else {
                        continue;
                    };
                    let (index, matrix) = (matrix.index(), &program.matrices[matrix.index()]);
                    let place = Place::new(matrix, &tiles[index]).expect("the same of each expert");
                    let (segment, first) = place.of(matrix, of, unit0 as u32);
                    let meant = walk(unit0 as u32, units, of.segment, of.slots);
                    let found = walk(first, units, segment, of.slots);
                    let moved = found.iter().map(|&(slot, unit)| (slot, unit + place.before));
                    assert!(moved.eq(meant), "{name}, device {device}: {load:?}");
                    assert!(found.iter().all(|&(_, unit)| unit < place.units), "{name}: {load:?}");
                    loads += 1;
                }
                let experts = program.matrices.iter().zip(&tiles).filter(|(m, _)| m.experts > 1);
                for (matrix, tiles) in experts {
                    let held: u32 = tiles.iter().map(|run| run.end - run.start).sum();
                    assert!(held < matrix.tiles() || devices == 1, "{name} {}", matrix.name);
                }
            }
            assert!(loads > 0, "{name} on {devices}");
        }
    }
}
