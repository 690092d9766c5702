//! Splits a phase over devices: which of its items each device does.
//!
//! Every matrix is split by rows of its output, so that each word is summed by one worker in the order that it has on one
//! device. Of experts each device has the same rows of all. A device has whole key/value heads, with their queries and caches; heads that do not divide are dealt as evenly
//! as whole heads can be. What is small and needs the whole input (the embedding row, norms over all heads) is done on every
//! device.

use std::ops::Range;

/// A device of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) index: u32,
    /// Devices of the program.
    pub(crate) of: u32,
}

impl Device {
    /// The only device of a program.
    #[cfg(test)]
    pub(crate) const ALONE: Self = Self { index: 0, of: 1 };

    /// This device's part of `count` in order, parts being as equal as possible.
    fn part(self, count: u32) -> Range<u32> {
        let at = |index: u32| (u64::from(count) * u64::from(index) / u64::from(self.of)) as u32;
        at(self.index)..at(self.index + 1)
    }
}

/// Which items of a phase each device does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// All of them, on every device.
    Whole,
    /// A range of each of these sections, which are equally long, `granule` items being inseparable.
    Even { granule: u32, sections: u32 },
    /// Those of its key/value heads. `parts` are the starts and lengths of what the heads share in order; an item has
    /// `granule` of their units, and one that two devices need is done on both.
    Heads { kv_heads: u32, parts: Vec<(u32, u32)>, granule: u32 },
}

impl Split {
    /// The ranges of items of a device, in order and apart from each other.
    pub(crate) fn runs(&self, items: u32, device: Device) -> Vec<Range<u32>> {
        match self {
            Self::Whole => joined(std::iter::once(0..items)),
            Self::Even { .. } | Self::Heads { .. } if device.of == 1 => {
                joined(std::iter::once(0..items))
            }
            Self::Even { granule, sections } => {
                let each = items / sections;
                let part = device.part(each.div_ceil(*granule));
                let part = part.start * granule..(part.end * granule).min(each);
                joined((0..*sections).map(|s| s * each + part.start..s * each + part.end))
            }
            Self::Heads { kv_heads, parts, granule } => {
                let heads = device.part(*kv_heads);
                joined(parts.iter().map(|&(start, len)| {
                    let each = len / kv_heads;
                    let (first, end) = (start + heads.start * each, start + heads.end * each);
                    first / granule..if heads.is_empty() {
                        first / granule
                    } else {
                        end.div_ceil(*granule)
                    }
                }))
            }
        }
    }
}

/// Ranges in ascending order, without empty ones, those that touch made one.
fn joined(ranges: impl IntoIterator<Item = Range<u32>>) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match runs.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            Some(_) | None => runs.push(range),
        }
    }
    runs
}

/// The items `range` of a device's runs, counted over all of them, as ranges of items.
pub(crate) fn pieces(runs: &[Range<u32>], range: &Range<u32>) -> Vec<Range<u32>> {
    let mut before = 0;
    let mut pieces = Vec::new();
    for run in runs {
        let len = run.end - run.start;
        let (start, end) =
            (range.start.clamp(before, before + len), range.end.clamp(before, before + len));
        if start < end {
            pieces.push(run.start + start - before..run.start + end - before);
        }
        before += len;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(split: &Split, items: u32, of: u32) -> Vec<Vec<Range<u32>>> {
        (0..of).map(|index| split.runs(items, Device { index, of })).collect()
    }

    fn even(granule: u32) -> Split {
        Split::Even { granule, sections: 1 }
    }

    #[test]
    fn each_section_is_dealt_alike() {
        let split = Split::Even { granule: 2, sections: 3 };
        assert_eq!(all(&split, 18, 2), [[0..2, 6..8, 12..14], [2..6, 8..12, 14..18]]);
        assert_eq!(all(&split, 18, 1).concat(), joined(std::iter::once(0..18)));
    }

    #[test]
    fn even_parts_are_whole_granules_and_cover_everything() {
        assert_eq!(all(&even(2), 10, 2).concat(), [0..4, 4..10]);
        assert_eq!(all(&even(1), 1, 2).concat(), joined(std::iter::once(0..1)));
        for (granule, items, of) in [(1, 17, 4), (2, 34, 8), (1, 3, 4), (2, 2, 2)] {
            let runs = all(&even(granule), items, of).concat();
            assert!(runs.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(joined(runs), joined(std::iter::once(0..items)));
        }
    }

    #[test]
    fn a_device_has_the_rows_of_its_heads() {
        // Four query heads of two key/value heads, 16 elements each: 64 rows of q, 32 of k, 32 of v.
        let parts = vec![(0, 64), (64, 32), (96, 32)];
        let split = Split::Heads { kv_heads: 2, parts, granule: 8 };
        assert_eq!(all(&split, 16, 2), [[0..4, 8..10, 12..14], [4..8, 10..12, 14..16]]);
        // One head for two devices.
        let parts = vec![(0, 12), (12, 12), (24, 12)];
        let split = Split::Heads { kv_heads: 1, parts: parts.clone(), granule: 8 };
        assert_eq!(all(&split, 5, 2).concat(), joined(std::iter::once(0..5)));
        // Rows 0..6, 12..18 and 24..30 of the first head, and tiles that both need.
        let split = Split::Heads { kv_heads: 2, parts, granule: 8 };
        assert_eq!(all(&split, 5, 2).concat(), [0..4, 0..5]);
    }

    #[test]
    fn pieces_lie_in_the_runs() {
        let runs = [4..8, 10..12, 14..16];
        assert_eq!(pieces(&runs, &(0..8)), runs);
        assert_eq!(pieces(&runs, &(3..6)), [7..8, 10..12]);
        assert_eq!(pieces(&runs, &(5..5)), []);
        assert_eq!(pieces(&runs, &(0..2)).len() + pieces(&runs, &(4..8)).len(), 3);
    }
}
