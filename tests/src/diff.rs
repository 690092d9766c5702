//! A line diff for failed comparisons.

/// The differing part of two texts, with `-` for lines only in `expected` and `+` for lines only in `actual`.
#[must_use]
pub fn unified(expected: &str, actual: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), actual.lines().collect());
    let same_start = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let same_end = old[same_start..]
        .iter()
        .rev()
        .zip(new[same_start..].iter().rev())
        .take_while(|(a, b)| a == b)
        .count();
    let mut out = format!("@@ line {} @@\n", same_start + 1);
    for line in &old[same_start.saturating_sub(2)..same_start] {
        out += &format!(" {line}\n");
    }
    for line in &old[same_start..old.len() - same_end] {
        out += &format!("-{line}\n");
    }
    for line in &new[same_start..new.len() - same_end] {
        out += &format!("+{line}\n");
    }
    for line in old[old.len() - same_end..].iter().take(2) {
        out += &format!(" {line}\n");
    }
    out
}
