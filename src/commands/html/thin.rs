//! Fewer points, of the same shape: what a chart with thousands of trials still shows.

/// Takes at most about `most` of the points, which are in order of x. The points are cut into runs of equal length, and each run keeps its
/// lowest, its highest and its middle one, so that neither the best, nor the worst, nor where most of them lie is lost.
pub(super) fn thin<T: Copy>(points: &[T], most: usize, y: impl Fn(&T) -> f64) -> Vec<T> {
    if points.len() <= most {
        return points.to_vec();
    }
    let length = (3 * points.len()).div_ceil(most.max(3));
    let mut kept = Vec::new();
    for run in points.chunks(length) {
        let mut order: Vec<usize> = (0..run.len()).collect();
        order.sort_by(|&a, &b| y(&run[a]).total_cmp(&y(&run[b])));
        let mut take = vec![order[0], order[order.len() / 2], order[order.len() - 1]];
        take.sort_unstable();
        take.dedup();
        kept.extend(take.into_iter().map(|index| run[index]));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_stay_and_of_many_the_extremes_do() {
        let points: Vec<(u64, f64)> =
            (0..10_000).map(|i| (i, ((i * 7919) % 1000) as f64)).collect();
        assert_eq!(thin(&points[..50], 60, |p| p.1).len(), 50);
        let kept = thin(&points, 600, |p| p.1);
        assert!((400..=600).contains(&kept.len()), "{}", kept.len());
        assert!(kept.is_sorted_by_key(|p| p.0));
        let lowest = |points: &[(u64, f64)]| points.iter().map(|p| p.1).fold(f64::MAX, f64::min);
        let highest = |points: &[(u64, f64)]| points.iter().map(|p| p.1).fold(0.0, f64::max);
        assert_eq!((lowest(&kept), highest(&kept)), (lowest(&points), highest(&points)));
    }
}
