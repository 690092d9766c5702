//! The layout of a matrix's tiles in the stages of the weight ring. The device loads by this rule and the cost model
//! predicts by it.

use abi::{BATCH_TILES, CONSUMER_WARPS};

use crate::format::Format;

/// Most units of a stage that one warp loads into registers.
pub const WARP_UNITS_MAX: u32 = abi::STAGE_UNITS_MAX / CONSUMER_WARPS;

/// The layout: several whole tiles in a stage, or one tile in several stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// Units of a stage; where it holds the same part of several tiles, units of that part.
    pub stage_units: u32,
    /// Tiles of a stage; 1 where a tile spans several, but for codes in a kernel of several sequences.
    pub stage_tiles: u32,
    /// Units after which a new stage begins.
    pub period: u32,
    /// Units of a tile, or of a part of a tile, that each warp loads into registers with the rest of its stage: the
    /// fast loop. 0: the warps read the stage unit by unit, which takes several times as long. Of one sequence only.
    pub warp_units: u32,
    /// Parts of a tile, each as long as the vectors that the warps' registers hold. Of several sequences only.
    pub tile_parts: u32,
}

/// The layouts of a program's tiles, by their length.
#[derive(Clone, Copy, Debug)]
pub struct Stagings {
    pub(super) stage_units: u32,
    /// Whether units of some matrix have scales behind them.
    pub(super) scaled: bool,
    pub(super) sequences: u32,
    /// Units of operands that the longest unit of some matrix makes.
    pub(super) group: u32,
}

impl Stagings {
    /// The layout of tiles of this many units in this format.
    #[must_use]
    pub fn of(self, tile_units: u32, format: Format) -> Staging {
        match self.sequences {
            1 => Staging::new(tile_units, self.stage_units, self.scaled),
            _ => Staging::seqs(tile_units, self.stage_units, [format.operand_units(), self.group]),
        }
    }
}

impl Staging {
    /// The layout of tiles of `tile_units` units in stages of at most `stage_units`, in a kernel in which some units have
    /// scales behind them or none has.
    #[must_use]
    pub fn new(tile_units: u32, stage_units: u32, scaled: bool) -> Self {
        let (tile_units, stage_units) = (tile_units.max(1), stage_units.max(1));
        Self::in_registers(tile_units, stage_units, scaled)
            .unwrap_or_else(|| Self::unit_by_unit(tile_units, stage_units))
    }

    /// The same for a kernel with several sequences (matvec_batch.cuh): a stage holds whole tiles, whose number divides
    /// the tiles of an epilogue; or a part of a tile, as long as the vectors that the warps' registers hold. A unit makes
    /// `operands` units of operands, and warps take these in groups of `group` (batch_products.cuh): parts are whole groups,
    /// but the last. A part of codes is so short that those of several tiles share a stage.
    #[must_use]
    pub fn seqs(tile_units: u32, stage_units: u32, [operands, group]: [u32; 2]) -> Self {
        let (tile_units, stage_units) = (tile_units.max(1), stage_units.max(1));
        let most = stage_units.min(abi::STAGE_UNITS_MAX / operands);
        let shared = |units: u32| 1 << (stage_units / units).clamp(1, BATCH_TILES).ilog2();
        if tile_units > most {
            let part = tile_units.div_ceil(tile_units.div_ceil(most));
            let part = part.next_multiple_of(group / operands).min(most);
            return Self {
                stage_units: part,
                stage_tiles: if group > 1 { shared(part) } else { 1 },
                period: tile_units,
                warp_units: 0,
                tile_parts: tile_units.div_ceil(part),
            };
        }
        let stage_tiles = shared(tile_units);
        let stage_units = stage_tiles * tile_units;
        Self { stage_units, stage_tiles, period: stage_units, warp_units: 0, tile_parts: 1 }
    }

    /// The layout in which the warps load whole stages into registers.
    fn in_registers(tile_units: u32, stage_units: u32, scaled: bool) -> Option<Self> {
        let part = part_units(tile_units);
        let warp_units = part.div_ceil(CONSUMER_WARPS);
        let most = (WARP_UNITS_MAX / warp_units).max(1);
        // What a warp loads at once (`share_tiles` in fragments.cuh): a whole stage, of two tiles at most; or, in a kernel
        // of units with scales, up to four units. There a stage has as many tiles as the warps can hold, or half of them
        // where it is that short.
        let tiles = match scaled {
            false => [most.min(2); 2],
            true if warp_units <= 2 => [most, most / 2],
            true => [most; 2],
        };
        let stage_tiles = tiles.into_iter().find(|tiles| tiles * part <= stage_units)?;
        let full = stage_tiles * part;
        let period = if part == tile_units { full } else { tile_units };
        Some(Self { stage_units: full, stage_tiles, period, warp_units, tile_parts: 1 })
    }

    fn unit_by_unit(tile_units: u32, stage_units: u32) -> Self {
        let (stage_units, stage_tiles, period) = match stage_units / tile_units {
            0 => (stage_units, 1, tile_units),
            tiles => (tiles * tile_units, tiles, tiles * tile_units),
        };
        Self { stage_units, stage_tiles, period, warp_units: 0, tile_parts: 1 }
    }
}

/// Units of a part of a tile: as few parts as fit a stage each, as equal as possible; the last one may be shorter. A
/// warp stages every eighth unit of the input vector, counted from the tile's first, and multiplies only those, so
/// parts begin at multiples of 8.
fn part_units(tile_units: u32) -> u32 {
    match tile_units.div_ceil(abi::STAGE_UNITS_MAX) {
        1 => tile_units,
        parts => tile_units.div_ceil(parts).next_multiple_of(CONSUMER_WARPS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tile_units: u32, stage_units: u32) -> (u32, u32, u32, u32) {
        let s = Staging::new(tile_units, stage_units, false);
        (s.stage_units, s.stage_tiles, s.period, s.warp_units)
    }

    #[test]
    fn tiles_are_cut_into_what_a_warp_can_hold() {
        assert_eq!(of(64, 64), (64, 1, 64, 8));
        assert_eq!(of(256, 64), (64, 1, 256, 8), "four parts");
        assert_eq!(of(32, 64), (64, 2, 64, 4), "two tiles in a stage");
        assert_eq!(of(18, 64), (36, 2, 36, 3));
        assert_eq!(of(48, 64), (48, 1, 48, 6));
        assert_eq!(of(96, 64), (48, 1, 96, 6), "two equal parts");
        assert_eq!(of(1, 64), (2, 2, 2, 1));
        assert_eq!(of(60, 64), (60, 1, 60, 8), "the last warps have a unit less");
        assert_eq!(of(304, 64), (64, 1, 304, 8), "four parts of 64, and 48");
        assert_eq!(of(152, 64), (56, 1, 152, 7), "two parts of 56, and 40");
        assert_eq!(of(67, 64), (40, 1, 67, 5), "40 and 27");
    }

    #[test]
    fn more_tiles_share_a_stage_where_units_have_scales() {
        let of = |tile_units, stage_units| {
            let s = Staging::new(tile_units, stage_units, true);
            (s.stage_units, s.stage_tiles, s.period, s.warp_units)
        };
        assert_eq!(of(64, 64), (64, 1, 64, 8));
        assert_eq!(of(32, 64), (64, 2, 64, 4));
        assert_eq!(of(16, 64), (64, 4, 64, 2), "four tiles in a stage");
        assert_eq!(of(16, 32), (32, 2, 32, 2), "two in a shorter one");
        assert_eq!(of(8, 64), (64, 8, 64, 1));
        assert_eq!(of(1, 64), (8, 8, 8, 1));
    }

    #[test]
    fn widths_of_published_models_take_the_fast_loop() {
        // Columns of 16-bit elements, and the number of parts of their tiles.
        for (model, columns, parts) in [
            ("qwen3-4b down", 9728, 5),
            ("qwen2.5-0.5b down", 4864, 3),
            ("qwen2.5-0.5b hidden", 896, 1),
            ("qwen2.5-7b down", 18944, 10),
            ("tinyllama down", 5632, 3),
            ("gemma3-12b hidden", 3840, 2),
        ] {
            let tile = columns / 32;
            let staging = Staging::new(tile, 64, false);
            assert!(staging.warp_units > 0, "{model}: {staging:?}");
            assert_eq!(tile.div_ceil(staging.stage_units), parts, "{model}: {staging:?}");
        }
    }

    #[test]
    fn what_no_warp_can_hold_is_packed_as_tight_as_it_goes() {
        assert_eq!(of(32, 32), (32, 1, 32, 0));
        assert_eq!(of(256, 32), (32, 1, 256, 0));
        assert_eq!(of(5, 8), (5, 1, 5, 0));
    }

    #[test]
    fn several_sequences_take_tiles_part_by_part() {
        let of = |tile, stage| {
            let s = Staging::seqs(tile, stage, [1, 1]);
            (s.stage_units, s.stage_tiles, s.period, s.tile_parts)
        };
        assert_eq!(of(64, 64), (64, 1, 64, 1));
        assert_eq!(of(256, 64), (64, 1, 256, 4), "four parts");
        assert_eq!(of(64, 32), (32, 1, 64, 2), "as long as a stage");
        assert_eq!(of(65, 64), (33, 1, 65, 2), "the last part may be shorter");
        assert_eq!(of(18, 64), (36, 2, 36, 1), "a divisor of the tiles of an epilogue");
        assert_eq!(of(2, 64), (16, 8, 16, 1), "and no more than those");
        let codes = |tile, operands, group| {
            let s = Staging::seqs(tile, 64, [operands, group]);
            (s.stage_units, s.stage_tiles, s.period, s.tile_parts)
        };
        assert_eq!(
            codes(64, 2, 2),
            (32, 2, 64, 2),
            "FP8 of llama-3.1-8b: parts of two tiles in a stage"
        );
        assert_eq!(codes(112, 4, 4), (16, 4, 112, 7), "int4 of its down");
        assert_eq!(codes(16, 4, 4), (64, 4, 64, 1), "int4 of llama-3.2-1b: four tiles in a stage");
        assert_eq!(codes(65, 1, 4), (36, 1, 65, 2), "16 bits beside int4: whole groups");
        assert_eq!(codes(65, 2, 4), (22, 2, 65, 3), "whole groups of 8 bits");
    }

    #[test]
    fn parts_of_several_sequences_fit_registers_and_stages() {
        let kernels = [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 4)];
        for (tile, (operands, group)) in (1..1000).flat_map(|tile| kernels.map(|of| (tile, of))) {
            for stage in [8, 16, 32, 64] {
                let s = Staging::seqs(tile, stage, [operands, group]);
                let what = format!("{tile} of {operands} in {stage} and groups of {group}: {s:?}");
                assert!(BATCH_TILES.is_multiple_of(s.stage_tiles), "{what}");
                let part = if s.tile_parts == 1 { tile } else { s.stage_units };
                assert!(s.stage_tiles * part <= stage, "{what}");
                assert!(part * operands <= abi::STAGE_UNITS_MAX, "{what}");
                assert!(s.tile_parts == 1 || (part * operands).is_multiple_of(group), "{what}");
                let last = tile - (s.tile_parts - 1) * part;
                assert!((1..=part).contains(&last), "{what}");
                // The device tells the two layouts apart by this.
                assert_eq!(s.period > s.stage_units, s.tile_parts > 1, "{what}");
            }
        }
    }

    #[test]
    fn a_warp_multiplies_by_the_columns_that_it_has_staged() {
        let stages = [8, 16, 32, 64].into_iter().flat_map(|stage| [(stage, false), (stage, true)]);
        for tile in 1..1000 {
            for (stage, scaled) in stages.clone() {
                let s = Staging::new(tile, stage, scaled);
                assert!(
                    s.stage_units <= stage && s.period.is_multiple_of(tile),
                    "{tile} in {stage}: {s:?}"
                );
                if s.warp_units == 0 {
                    continue;
                }
                // Warp w multiplies units w, w + 8, .. of a part, and has staged units w, w + 8, .. of the tile.
                let parts = tile.div_ceil(s.stage_units);
                assert!(parts == 1 || s.stage_units.is_multiple_of(8), "{tile} in {stage}: {s:?}");
                assert!(s.stage_units.div_ceil(s.stage_tiles) <= 8 * s.warp_units, "{tile}: {s:?}");
                let held = s.warp_units * s.stage_tiles;
                assert!(held <= WARP_UNITS_MAX, "{tile} in {stage}: {s:?}");
                // What the device takes at once divides the tiles of a stage, and those divide the tiles of an epilogue.
                let at_once = match s.warp_units {
                    1 if scaled => 4,
                    1 => 2,
                    2..=4 => 2,
                    _ => 1,
                };
                assert!(s.stage_tiles.is_multiple_of(at_once), "{tile} in {stage}: {s:?}");
                assert!(16_u32.is_multiple_of(s.stage_tiles), "{tile} in {stage}: {s:?}");
                assert!(
                    s.stage_tiles == 1 || s.period == s.stage_units,
                    "{tile} in {stage}: {s:?}"
                );
            }
        }
    }
}
