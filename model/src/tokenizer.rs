//! Encoding and decoding of text, with the folder's own tokenizer.

use std::panic::AssertUnwindSafe;
use std::path::Path;

use crate::chat::{Chat, Template, ToolForm};
use crate::error::{ModelError, quoted};
use crate::files;
use crate::growth::{Growth, Steps, check_tokens};

const FILE: &str = "tokenizer.json";

/// A model's tokenizer and, if it has one, its chat template.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bound on the length of a text during encoding.
    growth: Growth,
    template: Option<Template>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let size = self.inner.get_vocab_size(true);
        f.debug_struct("Tokenizer")
            .field("size", &size)
            .field("template", &self.template.is_some())
            .finish()
    }
}

impl Tokenizer {
    /// Whether the folder has a tokenizer.
    #[must_use]
    pub fn exists(dir: &Path) -> bool {
        std::fs::exists(dir.join(FILE)).unwrap_or(false)
    }

    /// The tokenizer of a model folder, for a model with `vocab` embedding rows.
    ///
    /// # Errors
    /// When the tokenizer or the chat template is malformed, or when the tokenizer has an id without a row of the
    /// model.
    pub fn load(dir: &Path, vocab: u32) -> Result<Self, ModelError> {
        let path = dir.join(FILE);
        let Some(bytes) = files::read(&path, files::LARGE_FILE_MAX)? else {
            return Err(ModelError::file(
                &path,
                "does not exist; text needs the model's tokenizer",
            ));
        };
        Self::parse(&path, &bytes, vocab, || Template::load(dir))
    }

    /// The tokenizer in the bytes of a `tokenizer.json`. Errors name this file.
    pub(crate) fn parse(
        path: &Path,
        bytes: &[u8],
        vocab: u32,
        template: impl FnOnce() -> Result<Option<Template>, ModelError>,
    ) -> Result<Self, ModelError> {
        let wrong = |reason: String| ModelError::file(path, reason);
        let steps: Steps = caught_parse(|| serde_json::from_slice(bytes)).map_err(wrong)?;
        // This comes first, because added tokens are normalized as they are read.
        let growth = steps.growth().map_err(wrong)?;
        let mut inner = caught_parse(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(wrong)?;
        let tokens = inner.get_vocab(true);
        check_tokens(inner.get_model(), tokens.keys()).map_err(wrong)?;
        let beyond = tokens.into_iter().filter(|&(_, id)| id >= vocab).max_by_key(|&(_, id)| id);
        if let Some((token, id)) = beyond {
            let reason = format!(
                "gives token {} id {id}, but the model's vocabulary ends at {}; it belongs to another model",
                quoted(&token),
                vocab.saturating_sub(1)
            );
            return Err(wrong(reason));
        }
        // The file's lengths are for training batches; a prompt is neither truncated nor padded.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        Ok(Self { inner, growth, template: template()? })
    }

    /// The ids of a text. `special` adds the tokenizer's ids around a text, such as the one that begins a sequence; a
    /// rendered chat has those already.
    ///
    /// # Errors
    /// When the tokenizer's model has no id for a part of the text, or the text is so long that it could grow beyond 16 MiB.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ModelError> {
        self.growth.check(text).map_err(ModelError::Tokenizer)?;
        let encoding = caught(|| self.inner.encode_fast(text, special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some ids. `skip_special` leaves out tokens such as those that end a sequence.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, ModelError> {
        caught(|| self.inner.decode(ids, skip_special))
    }

    /// A decoder for ids that arrive one at a time.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TextStream<&Self> {
        TextStream::new(self, skip_special)
    }

    /// The tokenizer as the document that `tokenizer.json` is.
    ///
    /// # Errors
    /// When the library cannot write it.
    pub fn document(&self) -> Result<serde_json::Value, ModelError> {
        serde_json::to_value(&self.inner).map_err(|e| ModelError::Tokenizer(e.to_string()))
    }

    /// Whether both have the same tokens with the same ids.
    #[must_use]
    pub fn has_tokens_of(&self, other: &Self) -> bool {
        self.inner.get_vocab(true) == other.inner.get_vocab(true)
    }

    /// Whether the folder has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// How the model writes tool calls; `None` without a chat template that has `tools`, in a form that is known.
    #[must_use]
    pub fn tool_form(&self) -> Option<ToolForm> {
        self.template.as_ref()?.tool_form()
    }

    /// The id of a special token, which has no text when it is decoded without special tokens.
    #[must_use]
    pub fn special(&self, name: &str) -> Option<u32> {
        let id = self.inner.token_to_id(name)?;
        self.inner
            .get_added_tokens_decoder()
            .get(&id)
            .is_some_and(|token| token.special)
            .then_some(id)
    }

    /// The prompt for a chat, rendered by the model's own template.
    ///
    /// # Errors
    /// When there is no template, when it fails on the messages, or when it runs too long.
    pub fn chat(&self, chat: &Chat<'_>) -> Result<String, ModelError> {
        let Some(template) = &self.template else {
            let reason = "the model has none (chat_template.jinja or chat_template in tokenizer_config.json); give a plain prompt";
            return Err(ModelError::Template(reason.to_owned()));
        };
        template.render(chat)
    }
}

/// Text from ids that come one at a time. Text that was returned is never withdrawn: the end of the text is held back
/// while a later id may change it, because a character's bytes can be spread over several ids.
///
/// Ids are decoded together with those before them, since a decoder may treat the first one differently; earlier ids
/// are kept back to the last point where the text was complete.
#[derive(Debug)]
pub struct TextStream<T> {
    tokenizer: T,
    skip_special: bool,
    /// The ids of the last complete piece, then those that came after it.
    ids: Vec<u32>,
    /// The number of ids of that piece.
    whole: usize,
    /// Bytes already returned of the text of the ids after it.
    given: usize,
}

/// Most ids whose incomplete end is held back: no character has as many bytes.
const PENDING_MAX: usize = 64;
/// Most replacement characters that a character's first bytes decode to: all of its bytes but one.
const UNSETTLED_MAX: usize = 3;

impl<T: std::ops::Deref<Target = Tokenizer>> TextStream<T> {
    /// A stream at the start of a text.
    pub fn new(tokenizer: T, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, ids: Vec::new(), whole: 0, given: 0 }
    }

    /// The text that this id completes; `None` while later ids may change all of it.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, ModelError> {
        self.ids.push(id);
        let text = self.pending()?;
        let unsettled = text.chars().rev().take(UNSETTLED_MAX);
        let unsettled = unsettled.take_while(|c| *c == char::REPLACEMENT_CHARACTER).count();
        let settled = text.len() - unsettled * char::REPLACEMENT_CHARACTER.len_utf8();
        let last = unsettled == 0 || self.ids.len() - self.whole >= PENDING_MAX;
        let end = if last { text.len() } else { settled };
        let given = self.given.min(end);
        // A decoder may decode bytes that were already returned differently; they stay.
        let new = text.get(given..end).unwrap_or_default().to_owned();
        self.given = given + new.len();
        if last && !text.is_empty() {
            self.ids.drain(..self.whole);
            (self.whole, self.given) = (self.ids.len(), 0);
        }
        Ok(Some(new).filter(|new| !new.is_empty()))
    }

    /// The rest of the text: incomplete bytes, as replacement characters.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn finish(self) -> Result<String, ModelError> {
        Ok(self.pending()?.get(self.given..).unwrap_or_default().to_owned())
    }

    /// The text of the ids after the last complete piece.
    fn pending(&self) -> Result<String, ModelError> {
        let before = self.tokenizer.decode(&self.ids[..self.whole], self.skip_special)?;
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        match text.strip_prefix(before.as_str()) {
            Some(rest) => Ok(rest.to_owned()),
            None => self.tokenizer.decode(&self.ids[self.whole..], self.skip_special),
        }
    }
}

/// Reads `tokenizer.json`, or a part of it. The library indexes its own tables by numbers from the file; a panic there
/// is caused by the file and becomes an error.
fn caught_parse<T, E: std::fmt::Display>(read: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    let read = std::panic::catch_unwind(AssertUnwindSafe(read));
    let read = read.map_err(|_| "its tables contradict each other".to_owned());
    read.and_then(|read| read.map_err(|e| e.to_string()))
        .map_err(|why| format!("is not a tokenizer: {why}"))
}

/// Calls the library and turns a panic into an error. The library indexes its tables by numbers from other parts of the
/// file, so an inconsistent file can make it panic long after it was read.
fn caught<R>(call: impl FnOnce() -> tokenizers::Result<R>) -> Result<R, ModelError> {
    let reason = "the parts of tokenizer.json contradict each other";
    std::panic::catch_unwind(AssertUnwindSafe(call))
        .map_err(|_| ModelError::Tokenizer(reason.to_owned()))?
        .map_err(|e| failed(&e))
}

fn failed(error: &tokenizers::Error) -> ModelError {
    ModelError::Tokenizer(error.to_string())
}
