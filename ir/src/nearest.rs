//! Spelling suggestions in errors: the known name nearest to an unknown one.

/// The candidate with the fewest edits (insert, delete, replace, swap of neighbours), if at most half of the letters
/// differ; the first one on a tie. Names longer than `NAME_MAX` letters have no neighbours.
#[must_use]
pub fn nearest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const NAME_MAX: usize = 128;
    if given.len() > NAME_MAX {
        return None;
    }
    let given = given.to_lowercase();
    let close =
        candidates.into_iter().map(|c| (strsim::damerau_levenshtein(&given, &c.to_lowercase()), c));
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
