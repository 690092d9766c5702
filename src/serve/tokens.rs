//! `/tokenize` and `/detokenize`, in the shape of vLLM's, and Anthropic's count of tokens.

use serde_json::{Value, json};

use super::Served;
use super::prompt::{self, check_tokens, tokens};
use super::refusal::Refusal;
use super::request::{Api, check_model, fields};
use super::tools;

/// Tokens of a text (`prompt`) or of a chat (`messages`).
pub(super) fn tokenize(body: &[u8], served: &Served) -> Result<Value, Refusal> {
    let mut fields = fields(body)?;
    check_model(&mut fields, served)?;
    let texts = fields.flag("return_token_strs")?;
    let ids = match fields.read("prompt", "a text", |value| value.as_str().map(str::to_owned))? {
        Some(text) => {
            let special = fields.read("add_special_tokens", "true or false", Value::as_bool)?;
            served.encode(&text, special.unwrap_or(true), "prompt")?
        }
        None if fields.0.contains_key("messages") => {
            let tools = tools::read(Api::Chat, &mut fields, served)?;
            prompt::chat(Api::Chat, &mut fields, tools.as_ref(), served)?.ids
        }
        None => {
            let message = "`prompt` is missing; legal: `prompt` as a text, or `messages`";
            return Err(Refusal::field("prompt", message));
        }
    };
    fields.end()?;
    let text_of = |id: &u32| decoded(&[*id], served);
    let texts = texts.then(|| ids.iter().map(text_of).collect::<Result<Vec<_>, Refusal>>());
    Ok(json!({
        "count": ids.len(),
        "max_model_len": served.capacity,
        "tokens": ids,
        "token_strs": texts.transpose()?,
    }))
}

/// Anthropic's count of the tokens of a prompt: that of a request to `/v1/messages`, which is not run.
pub(super) fn count(body: &[u8], served: &Served) -> Result<Value, Refusal> {
    let mut fields = fields(body)?;
    check_model(&mut fields, served)?;
    let tools = tools::read(Api::Messages, &mut fields, served)?;
    let prompt = prompt::chat(Api::Messages, &mut fields, tools.as_ref(), served)?;
    fields.end()?;
    Ok(json!({"input_tokens": prompt.ids.len()}))
}

/// The text of tokens.
pub(super) fn detokenize(body: &[u8], served: &Served) -> Result<Value, Refusal> {
    let mut fields = fields(body)?;
    check_model(&mut fields, served)?;
    let ids = fields.read("tokens", "a list of token ids", tokens)?;
    fields.end()?;
    let ids = ids.ok_or_else(|| {
        Refusal::field("tokens", "`tokens` is missing; legal: a list of token ids")
    })?;
    check_tokens("tokens", &ids, served)?;
    Ok(json!({"prompt": decoded(&ids, served)?}))
}

fn decoded(ids: &[u32], served: &Served) -> Result<String, Refusal> {
    let text = served.tokenizer("tokens")?.decode(ids, false);
    text.map_err(|error| Refusal::field("tokens", error.to_string()))
}
