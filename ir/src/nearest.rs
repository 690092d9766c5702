//! The nearest known name to one that nobody knows, for suggestions in errors.

/// Edits (insert, delete, replace, swap of neighbours) that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut best = replace.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
}

/// The candidate with the fewest edits, if at most half of the letters differ; the first one on a tie. Names longer than
/// `NAME_MAX` letters have no neighbours.
pub(crate) fn nearest<'a>(
    given: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    const NAME_MAX: usize = 128;
    if given.len() > NAME_MAX {
        return None;
    }
    let given = given.to_lowercase();
    let close = candidates.into_iter().map(|c| (distance(&given, &c.to_lowercase()), c));
    let (edits, name) = close.min_by_key(|&(edits, _)| edits)?;
    (edits * 2 <= given.chars().count().max(name.chars().count())).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_typos_and_refuses_strangers() {
        let names = ["stages", "stage_bytes", "in_flight_bytes"];
        assert_eq!(nearest("stagse", names), Some("stages"));
        assert_eq!(nearest("stage_byte", names), Some("stage_bytes"));
        assert_eq!(nearest("IN_FLIGHT", names), Some("in_flight_bytes"));
        assert_eq!(nearest("qqqqqqqqq", names), None);
        assert_eq!(nearest("", names), None);
        assert_eq!(nearest("ba", ["ab"]), Some("ab"), "a swap is one edit");
    }
}
