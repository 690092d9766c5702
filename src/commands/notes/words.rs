//! Words of a text as the index compares them: in lower case, without endings, identifiers whole, by the end of their path,
//! and in parts.

/// Words that say nothing about the subject.
const STOP: &[&str] = &[
    "a", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "did", "do",
    "does", "for", "from", "had", "has", "have", "how", "if", "in", "is", "it", "its", "my", "no",
    "not", "of", "on", "one", "or", "should", "so", "than", "that", "the", "their", "them", "then",
    "there", "they", "this", "to", "was", "were", "what", "when", "where", "which", "who", "why",
    "will", "with", "would",
];

/// Words of older pages, which are never rewritten, and those of today (docs/words.toml): each pair is one word.
const TODAY: &[(&str, &str)] = &[
    ("card", "gpu"),
    ("floor", "bound"),
    ("machin", "vm"),
    ("session", "sequenc"),
    ("shar", "fragment"),
    ("slot", "buffer"),
    ("tag", "flag"),
];

/// The words of a text in order. `16 384` is one number, as `16384`.
pub(super) fn words(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let is_inside = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
    let mut grows = false;
    for piece in text.split(' ') {
        let mut number = false;
        for token in piece.split(|c: char| !is_inside(c)) {
            let token = token.trim_matches(['_', '.', '-']).to_lowercase();
            if token.is_empty() {
                continue;
            }
            let digits = token.chars().all(|c| c.is_ascii_digit());
            if let Some(last) = found.last_mut()
                && grows
                && digits
                && token.len() == 3
            {
                last.push_str(&token);
                number = true;
                continue;
            }
            number = digits && token.len() <= 3 && piece == token;
            add(&token, &mut found);
        }
        grows = number;
    }
    found
}

fn add(token: &str, found: &mut Vec<String>) {
    if STOP.contains(&token) {
        return;
    }
    found.push(stem(token));
    let is_number = token.parse::<f64>().is_ok();
    let parts: Vec<&str> = token.split(['_', '.', '-']).filter(|part| !part.is_empty()).collect();
    if parts.len() > 1 && !is_number {
        // A knob is also called by the end of its path: `kv_split` is `tiling.attention.kv_split`.
        let of_path = token.split('.').map(|name| name.trim_matches(['_', '-']));
        let names = of_path.filter(|name| name.contains('_') && *name != token);
        found.extend(names.map(str::to_owned));
        found.extend(parts.into_iter().filter(|part| !STOP.contains(part)).map(stem));
    }
}

/// A word without its commonest endings, so that `stages`, `staged` and `staging` are one.
fn stem(word: &str) -> String {
    if word.len() < 4 || !word.is_ascii() || word.contains(['_', '.', '-']) {
        return word.to_owned();
    }
    let endings = ["ations", "ation", "ings", "ing", "ers", "er", "ed", "es", "s", "e"];
    let cut = endings.iter().find_map(|ending| word.strip_suffix(ending));
    let root = cut.filter(|root| root.len() >= 3).unwrap_or(word);
    // `spilled` and `spills`.
    let root = match root.as_bytes() {
        [.., a, b] if a == b && !matches!(a, b'l' | b's' | b'0'..=b'9') => {
            root[..root.len() - 1].to_owned()
        }
        _ => root.to_owned(),
    };
    let today = TODAY.iter().find(|(before, _)| *before == root);
    today.map_or(root, |(_, today)| (*today).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_one_meaning_are_one_word() {
        let same = |a: &str, b: &str| assert_eq!(words(a), words(b), "{a} {b}");
        same("stages", "Staged");
        same("16 384 tokens", "16384 token");
        same("spilled", "spills");
        assert_eq!(
            words("tiling.attention.kv_split"),
            ["tiling.attention.kv_split", "kv_split", "til", "attention", "kv", "split"]
        );
        assert_eq!(words("kv_split"), ["kv_split", "kv", "split"]);
        assert_eq!(words("7, 9, 11 384"), ["7", "9", "11384"]);
        assert_eq!(words("0.97 and 3.5 us"), ["0.97", "3.5", "us"]);
        assert_ne!(words("stage"), words("storage"));
    }
}
