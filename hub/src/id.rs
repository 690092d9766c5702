//! Names of models on the Hub.

use std::fmt;

/// Longest name; the Hub's own limit.
const NAME_MAX: usize = 96;
/// Longest revision.
const REVISION_MAX: usize = 200;

/// A model of the Hub, `ORG/NAME`, at a revision: a branch, a tag or a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelId {
    repo: String,
    revision: String,
}

impl ModelId {
    /// Reads `ORG/NAME` or `ORG/NAME@REVISION`; `None` if the text is neither.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (org, name) = repo.split_once('/')?;
        let named = repo.len() <= NAME_MAX && is_word(org) && is_word(name);
        (named && is_revision(revision))
            .then(|| Self { repo: repo.to_owned(), revision: revision.to_owned() })
    }

    /// `ORG/NAME`.
    #[must_use]
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// The branch, tag or commit.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// `NAME`.
    #[must_use]
    pub fn name(&self) -> &str {
        self.repo.rsplit('/').next().unwrap_or_default()
    }

    /// The model's folder in the cache.
    #[must_use]
    pub fn folder(&self) -> String {
        format!("models--{}", self.repo.replace('/', "--"))
    }

    /// The command of Hugging Face's own client that downloads this model.
    #[must_use]
    pub fn command(&self) -> String {
        let revision = match self.revision.as_str() {
            "main" => String::new(),
            other => format!(" --revision {other}"),
        };
        format!("hf download {}{revision}", self.repo)
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        if self.revision == "main" { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Whether the text is a plain name: it can stand in a path and in an address.
pub(crate) fn is_word(word: &str) -> bool {
    let begins = word.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    begins && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// Whether the text is a revision: plain names with slashes between them, as in `refs/pr/1`.
fn is_revision(text: &str) -> bool {
    text.len() <= REVISION_MAX && text.split('/').all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_an_owner_and_a_name() {
        let id = ModelId::parse("Qwen/Qwen3-0.6B").unwrap();
        assert_eq!(
            (id.repo(), id.revision(), id.name()),
            ("Qwen/Qwen3-0.6B", "main", "Qwen3-0.6B")
        );
        assert_eq!(id.folder(), "models--Qwen--Qwen3-0.6B");
        assert_eq!(id.command(), "hf download Qwen/Qwen3-0.6B");
        let id = ModelId::parse("a/b@refs/pr/1").unwrap();
        assert_eq!((id.revision(), id.to_string().as_str()), ("refs/pr/1", "a/b@refs/pr/1"));
        assert_eq!(id.command(), "hf download a/b --revision refs/pr/1");
        for text in [
            "toy",
            "",
            "/",
            "a/",
            "/b",
            "./a",
            "../b",
            "a/b/c",
            "a/../b",
            "a b/c",
            "a/b@",
            "a/b@..",
            "a/b@x/../y",
            "~/m",
        ] {
            assert_eq!(ModelId::parse(text), None, "{text}");
        }
    }
}
