//! Text to ids and back, with the folder's own tokenizer.

use std::panic::AssertUnwindSafe;
use std::path::Path;

use serde::de::IgnoredAny;

use crate::chat::{Chat, Template};
use crate::error::{ModelError, quoted};
use crate::files;

const FILE: &str = "tokenizer.json";

/// A model's tokenizer and, if it has one, its chat template.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
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
    /// When the tokenizer or the chat template is malformed, or when the tokenizer has an id that the model has no row for.
    pub fn load(dir: &Path, vocab: u32) -> Result<Self, ModelError> {
        let path = dir.join(FILE);
        let Some(bytes) = files::read(&path, files::LARGE_FILE_MAX)? else {
            return Err(ModelError::file(
                &path,
                "does not exist; text needs the model's tokenizer",
            ));
        };
        let mut inner = parse(&bytes)
            .map_err(|e| ModelError::file(&path, format!("is not a tokenizer: {e}")))?;
        let beyond = inner
            .get_vocab(true)
            .into_iter()
            .filter(|&(_, id)| id >= vocab)
            .max_by_key(|&(_, id)| id);
        if let Some((token, id)) = beyond {
            let reason = format!(
                "gives token {} id {id}, but the model's vocabulary ends at {}; it belongs to another model",
                quoted(&token),
                vocab.saturating_sub(1)
            );
            return Err(ModelError::file(&path, reason));
        }
        // What the file says about lengths is for training batches; a prompt is neither cut nor padded.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| ModelError::file(&path, e.to_string()))?;
        Ok(Self { inner, template: Template::load(dir)? })
    }

    /// The ids of a text. `special` adds what the tokenizer puts around a text, such as the id that begins a sequence; a
    /// rendered chat has those already.
    ///
    /// # Errors
    /// When the tokenizer's model has no id for a part of the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, ModelError> {
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

    /// Decodes ids as they come.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream {
            tokenizer: self,
            skip_special,
            ids: Vec::new(),
            prefix: String::new(),
            prefix_index: 0,
        }
    }

    /// Whether the folder has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// The prompt for a chat, as the model's own template writes it.
    ///
    /// # Errors
    /// When there is no template, when the template refuses the messages, or when it runs too long.
    pub fn chat(&self, chat: &Chat<'_>) -> Result<String, ModelError> {
        let Some(template) = &self.template else {
            let reason = "the model has none (chat_template.jinja or chat_template in tokenizer_config.json); give a plain prompt";
            return Err(ModelError::Template { reason: reason.to_owned() });
        };
        template.render(chat)
    }
}

/// Text from ids that come one at a time.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

impl TextStream<'_> {
    /// The text that this id completes; `None` while a character is still incomplete.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, ModelError> {
        caught(|| {
            tokenizers::step_decode_stream(
                &self.tokenizer.inner,
                vec![id],
                self.skip_special,
                &mut self.ids,
                &mut self.prefix,
                &mut self.prefix_index,
            )
        })
    }
}

/// Reads `tokenizer.json`.
fn parse(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    // The library panics where parts of it read JSON that is cut short, so the syntax is checked first.
    serde_json::from_slice::<IgnoredAny>(bytes).map_err(|e| e.to_string())?;
    // It also indexes its own tables by numbers from the file; a panic there is the file's fault and no more than an error.
    let read = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(bytes));
    let read = read.map_err(|_| "its tables contradict each other".to_owned())?;
    read.map_err(|e| e.to_string())
}

/// A call of the library. It indexes its tables by what other parts of the file say, so a file whose parts contradict each other can
/// make it panic long after it was read; that is the file's fault, too.
fn caught<R>(call: impl FnOnce() -> tokenizers::Result<R>) -> Result<R, ModelError> {
    let reason = "the parts of tokenizer.json contradict each other";
    std::panic::catch_unwind(AssertUnwindSafe(call))
        .map_err(|_| ModelError::Tokenizer { reason: reason.to_owned() })?
        .map_err(|e| failed(&e))
}

fn failed(error: &tokenizers::Error) -> ModelError {
    ModelError::Tokenizer { reason: error.to_string() }
}
