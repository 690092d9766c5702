//! How the tiles of a matrix lie in the stages of the ring.

use ir::Graph;
use ir::program::smem::{CONSUMER_WARPS, LANE_TILES};

use crate::error::HostError;

/// Units that a warp can hold of a stage.
const SHARE: u32 = abi::STAGE_UNITS_MAX / CONSUMER_WARPS;

/// Several whole tiles in a stage, or one in several stages.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Staging {
    /// Units of a stage.
    pub(crate) stage_units: u32,
    /// Tiles of a stage, 1 where a tile lies in several.
    pub(crate) stage_tiles: u32,
    /// Units after which a new stage begins.
    pub(crate) period: u32,
    /// Units of a tile, or of a part of a tile, that a warp takes into registers with the rest of a stage. 0: it takes none.
    pub(crate) warp_units: u32,
}

impl Staging {
    /// Of tiles of so many units in stages of at most so many.
    ///
    /// # Errors
    /// If they are more than the device can count.
    pub(crate) fn new(tile_units: u32, stage_units: u32) -> Result<Self, HostError> {
        if tile_units > u32::from(u16::MAX) || stage_units > abi::STAGE_UNITS_MAX {
            return Err(HostError::Request(format!(
                "tiles of {tile_units} units in stages of {stage_units}: at most {} and {} are possible",
                u16::MAX,
                abi::STAGE_UNITS_MAX
            )));
        }
        Ok(Self::shares(tile_units, stage_units)
            .unwrap_or_else(|| Self::any(tile_units, stage_units)))
    }

    /// The same for a kernel of several lanes (matvec_lanes.cuh): whole tiles in a stage, a divisor of those that an epilogue is for; or a part
    /// of one, as long as the warps' registers hold the vectors of. `warp_units` then counts the parts of a tile.
    ///
    /// # Errors
    /// If they are more than the device can count.
    pub(crate) fn lanes(tile_units: u32, stage_units: u32) -> Result<Self, HostError> {
        let parts = tile_units.div_ceil(stage_units.clamp(1, abi::STAGE_UNITS_MAX)).max(1);
        if tile_units > u32::from(u16::MAX) || parts > u32::from(u8::MAX) {
            return Err(HostError::Request(format!(
                "tiles of {tile_units} units in stages of {stage_units}: at most {} parts of a tile are possible, raise pipeline.stage_bytes",
                u8::MAX
            )));
        }
        if parts > 1 {
            let part = tile_units.div_ceil(parts);
            return Ok(Self {
                stage_units: part,
                stage_tiles: 1,
                period: tile_units,
                warp_units: parts,
            });
        }
        let stage_tiles = 1 << (stage_units / tile_units.max(1)).clamp(1, LANE_TILES).ilog2();
        let stage_units = stage_tiles * tile_units;
        Ok(Self { stage_units, stage_tiles, period: stage_units, warp_units: 1 })
    }

    /// Stages that are shares.
    fn shares(tile_units: u32, stage_units: u32) -> Option<Self> {
        let warp_units = warp_units(tile_units)?;
        let chunk = tile_units / tile_units.div_ceil(abi::STAGE_UNITS_MAX);
        let stage_tiles = if 2 * warp_units <= SHARE { 2 } else { 1 };
        let full = stage_tiles * chunk;
        let period = if chunk == tile_units { full } else { tile_units };
        (full <= stage_units).then_some(Self { stage_units: full, stage_tiles, period, warp_units })
    }

    fn any(tile_units: u32, stage_units: u32) -> Self {
        if tile_units > stage_units {
            return Self { stage_units, stage_tiles: 1, period: tile_units, warp_units: 0 };
        }
        let stage_tiles = stage_units / tile_units.max(1);
        let stage_units = stage_tiles * tile_units;
        Self { stage_units, stage_tiles, period: stage_units, warp_units: 0 }
    }
}

/// Units of a warp where tiles are cut into equal parts of at most a full stage; none where they cannot be.
fn warp_units(tile_units: u32) -> Option<u32> {
    let chunks = tile_units.div_ceil(abi::STAGE_UNITS_MAX);
    let units = tile_units.checked_div(chunks)?.div_ceil(CONSUMER_WARPS);
    let even = tile_units.is_multiple_of(chunks);
    (even && (units < SHARE || tile_units.is_multiple_of(abi::STAGE_UNITS_MAX))).then_some(units)
}

/// Bit n: some matrix of the model is taken in shares of n units a warp. What is not compiled in is never asked for, since the widths
/// of the model's vectors are those of its matrices.
pub(crate) fn share_mask(graph: &Graph) -> u32 {
    let unit_cols = abi::UNIT_ROW_BYTES / graph.dtype.bytes() as u32;
    [graph.hidden, graph.heads * graph.head_dim, graph.ffn]
        .into_iter()
        .filter_map(|cols| warp_units(cols.div_ceil(unit_cols)))
        .fold(0, |mask, units| mask | 1 << units)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tile_units: u32, stage_units: u32) -> (u32, u32, u32, u32) {
        let s = Staging::new(tile_units, stage_units).expect("within limits");
        (s.stage_units, s.stage_tiles, s.period, s.warp_units)
    }

    #[test]
    fn tiles_are_cut_into_what_a_warp_can_hold() {
        assert_eq!(of(64, 64), (64, 1, 64, 8));
        assert_eq!(of(256, 64), (64, 1, 256, 8), "a tile is several shares");
        assert_eq!(of(32, 64), (64, 2, 64, 4), "two tiles are a share");
        assert_eq!(of(18, 64), (36, 2, 36, 3));
        assert_eq!(of(48, 64), (48, 1, 48, 6));
        assert_eq!(of(96, 64), (48, 1, 96, 6), "two equal parts");
        assert_eq!(of(1, 64), (2, 2, 2, 1));
    }

    #[test]
    fn what_fits_no_share_is_packed_as_tight_as_it_goes() {
        assert_eq!(of(32, 32), (32, 1, 32, 0));
        assert_eq!(of(256, 32), (32, 1, 256, 0));
        assert_eq!(of(60, 64), (60, 1, 60, 0));
        assert_eq!(of(65, 64), (64, 1, 65, 0));
        assert_eq!(of(5, 8), (5, 1, 5, 0));
        assert!(Staging::new(70_000, 64).is_err());
    }

    #[test]
    fn several_lanes_take_tiles_part_by_part() {
        let of = |tile, stage| {
            let s = Staging::lanes(tile, stage).expect("within limits");
            (s.stage_units, s.stage_tiles, s.period, s.warp_units)
        };
        assert_eq!(of(64, 64), (64, 1, 64, 1));
        assert_eq!(of(256, 64), (64, 1, 256, 4), "four parts");
        assert_eq!(of(64, 32), (32, 1, 64, 2), "as long as a stage");
        assert_eq!(of(65, 64), (33, 1, 65, 2), "the last part may be shorter");
        assert_eq!(of(18, 64), (36, 2, 36, 1), "a divisor of the tiles of an epilogue");
        assert_eq!(of(2, 64), (16, 8, 16, 1), "and no more than those");
        assert!(Staging::lanes(16_384, 64).is_err(), "256 parts");
        for tile in 1..1000 {
            for stage in [8, 16, 32, 64] {
                let s = Staging::lanes(tile, stage).expect("within limits");
                assert!(
                    s.stage_units <= stage && LANE_TILES.is_multiple_of(s.stage_tiles),
                    "{tile} in {stage}: {s:?}"
                );
                let parts = if s.period == tile && s.warp_units > 1 { s.warp_units } else { 1 };
                let last = tile - (parts - 1) * s.stage_units.min(tile);
                assert!((1..=s.stage_units).contains(&last), "{tile} in {stage}: {s:?}");
            }
        }
    }

    #[test]
    fn every_load_of_a_share_is_a_multiple_of_its_stages() {
        for tile in 1..1000 {
            for stage in [8, 16, 32, 64] {
                let s = Staging::new(tile, stage).expect("within limits");
                assert!(
                    s.stage_units <= stage && s.period.is_multiple_of(tile),
                    "{tile} in {stage}: {s:?}"
                );
                if s.warp_units > 0 {
                    assert_eq!(s.period % s.stage_units, 0, "{tile} in {stage}: {s:?}");
                    assert!(s.warp_units * s.stage_tiles <= SHARE, "{tile} in {stage}: {s:?}");
                }
            }
        }
    }
}
