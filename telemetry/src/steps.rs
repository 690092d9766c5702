//! The histogram of step times: fixed buckets, eight per octave, so that any quantile is exact to an eighth of an octave.

/// Number of buckets.
pub const BUCKETS: usize = 128;
/// Log2 of the start of the first octave: 2^14 ns, 16.4 µs. Shorter times are in the first bucket.
const FIRST: u32 = 14;
/// Log2 of the buckets per octave.
const FINE: u32 = 3;

/// The bucket of a time.
#[must_use]
pub fn bucket(ns: u64) -> usize {
    let octave = (ns | 1).ilog2();
    if octave < FIRST {
        return 0;
    }
    let part = (ns >> (octave - FINE)) & ((1 << FINE) - 1);
    ((((octave - FIRST) << FINE) as usize) + part as usize).min(BUCKETS - 1)
}

/// The upper end of a bucket, exclusive; the last bucket has none.
#[must_use]
pub fn upper_ns(bucket: usize) -> Option<u64> {
    if bucket >= BUCKETS - 1 {
        return None;
    }
    let (octave, part) = (bucket as u32 >> FINE, bucket as u64 & ((1 << FINE) - 1));
    Some(((1 << FINE) + part + 1) << (FIRST + octave - FINE))
}

/// The quantile of the step times, by linear interpolation inside a bucket; `None` without steps. A quantile in the
/// last bucket is that bucket's lower end.
#[must_use]
pub fn quantile_ns(steps: &[u64; BUCKETS], share: f64) -> Option<f64> {
    let total: u64 = steps.iter().fold(0, |sum, count| sum.saturating_add(*count));
    if total == 0 {
        return None;
    }
    let wanted = share.clamp(0.0, 1.0) * total as f64;
    let mut below = 0.0;
    for (index, &count) in steps.iter().enumerate() {
        let lower = if index == 0 { 0 } else { upper_ns(index - 1).unwrap_or(u64::MAX) } as f64;
        let next = below + count as f64;
        if count > 0 && next >= wanted {
            let upper = upper_ns(index).map_or(lower, |upper| upper as f64);
            return Some(lower + (upper - lower) * ((wanted - below) / count as f64));
        }
        below = next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_the_bucket_whose_bounds_hold_it() {
        let mut last = 0;
        for index in 0..BUCKETS - 1 {
            let upper = upper_ns(index).unwrap();
            assert!(upper > last, "{index}");
            assert_eq!(bucket(upper - 1), index);
            assert_eq!(bucket(upper), index + 1);
            // A bucket's width is at most an eighth of its lower bound.
            assert!(index == 0 || (upper - last) * 8 <= last, "{index}");
            last = upper;
        }
        assert_eq!((bucket(0), bucket(u64::MAX), upper_ns(BUCKETS - 1)), (0, BUCKETS - 1, None));
        assert!((1_000_000_000..1_100_000_000).contains(&last), "{last}");
    }

    #[test]
    fn quantiles_are_within_a_bucket_of_the_truth() {
        let mut steps = [0; BUCKETS];
        assert_eq!(quantile_ns(&steps, 0.5), None);
        // 1 000 times between 0.5 and 1.5 ms, and 1 000 of one second.
        let times = |i: u64| 500_000 + i * 1000;
        (0..1000).for_each(|i| steps[bucket(times(i))] += 1);
        for share in [0.01, 0.5, 0.9, 0.99] {
            let (found, truth) = (quantile_ns(&steps, share).unwrap(), 500_000.0 + share * 1e6);
            assert!((found / truth - 1.0).abs() < 0.125, "{share}: {found} for {truth}");
        }
        steps[bucket(1_000_000_000)] += 1000;
        assert!(quantile_ns(&steps, 0.99).unwrap() > 0.9e9);
        assert!(quantile_ns(&steps, 0.25).unwrap() < 1.1e6);
        steps[BUCKETS - 1] = u64::MAX;
        assert!(quantile_ns(&steps, 1.0).is_some(), "no sum overflows");
    }
}
