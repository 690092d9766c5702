//! Tokens to text that can be sent: whole characters only, and nothing that may still be the start of a stop string.

use std::sync::Arc;

use ir::sampling::Logprobs;
use model::{ModelError, TextStream, Tokenizer};

use super::prompt::Prompt;
use super::tool_calls::Call;

/// A token with its text and log probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scored {
    pub(super) text: String,
    /// None for the first token of a prompt, which follows nothing.
    pub(super) logprob: Option<f64>,
    /// The likeliest tokens: text and log probability.
    pub(super) top: Vec<(String, f64)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) scored: Vec<Scored>,
    /// Calls of tools that are complete.
    pub(super) calls: Vec<Call>,
}

impl Piece {
    pub(super) fn append(&mut self, mut next: Self) {
        self.text.push_str(&next.text);
        self.scored.append(&mut next.scored);
        self.calls.append(&mut next.calls);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.scored.is_empty() && self.calls.is_empty()
    }
}

pub(super) struct Writer {
    tokenizer: Option<Arc<Tokenizer>>,
    stream: Option<TextStream<Arc<Tokenizer>>>,
    stops: Vec<String>,
    /// Special tokens whose names are text all the same: those around a call of a tool.
    shown: Vec<(u32, &'static str)>,
    /// Tokens that still come before stop strings are searched for.
    least: u32,
    /// Text that may be the beginning of a stop string.
    held: String,
    scored: Vec<Scored>,
}

impl Writer {
    pub(super) fn new(tokenizer: Option<Arc<Tokenizer>>, stops: Vec<String>, least: u32) -> Self {
        let stream = tokenizer.clone().map(|tokenizer| TextStream::new(tokenizer, true));
        let (held, scored, shown) = (String::new(), Vec::new(), Vec::new());
        Self { tokenizer, stream, stops, shown, least, held, scored }
    }

    /// The same for an answer that may call tools.
    pub(super) fn showing(mut self, markers: &[&'static str]) -> Self {
        let special = |name: &&'static str| Some((self.tokenizer.as_ref()?.special(name)?, *name));
        self.shown = markers.iter().filter_map(special).collect();
        self
    }

    /// A prompt that the answer begins with, and the log probabilities of its tokens after the first, if they are known.
    pub(super) fn echoed(&self, prompt: &Prompt, scores: &[Logprobs]) -> Result<Piece, ModelError> {
        let mut scored = Vec::new();
        if !scores.is_empty() || prompt.ids.len() == 1 {
            let logprobs = std::iter::once(None).chain(scores.iter().map(Some));
            for (id, logprobs) in prompt.ids.iter().zip(logprobs) {
                scored.push(self.scored(*id, logprobs)?);
            }
        }
        let text = match (&prompt.text, &self.tokenizer) {
            (Some(text), _) => text.clone(),
            (None, Some(tokenizer)) => tokenizer.decode(&prompt.ids, false)?,
            (None, None) => prompt.ids.iter().map(|id| format!("{id} ")).collect(),
        };
        Ok(Piece { text, scored, ..Piece::default() })
    }

    fn scored(&self, id: u32, logprobs: Option<&Logprobs>) -> Result<Scored, ModelError> {
        let top = logprobs.map_or(&[][..], |logprobs| &logprobs.top).iter();
        let top = top.map(|(token, logprob)| Ok((self.text_of(*token)?, *logprob)));
        let top = top.collect::<Result<_, ModelError>>()?;
        Ok(Scored { text: self.text_of(id)?, logprob: logprobs.map(|l| l.chosen), top })
    }

    /// The text of a single token. Without a tokenizer it is the token's number.
    fn text_of(&self, id: u32) -> Result<String, ModelError> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(&[id], false),
            None => Ok(format!("{id} ")),
        }
    }

    /// Adds a token; `ends` if it is a stop token, whose text is not part of the answer. Returns the text that can be
    /// sent, and the stop string that was found.
    pub(super) fn push(
        &mut self,
        id: u32,
        ends: bool,
        logprobs: Option<&Logprobs>,
    ) -> Result<(Piece, Option<String>), ModelError> {
        if let Some(logprobs) = logprobs {
            self.scored.push(self.scored(id, Some(logprobs))?);
        }
        if !ends {
            let name = self.shown.iter().find(|(shown, _)| *shown == id).map(|(_, name)| *name);
            let new = match (&mut self.stream, &self.tokenizer, name) {
                (Some(stream), Some(tokenizer), Some(name)) => {
                    let after = TextStream::new(tokenizer.clone(), true);
                    std::mem::replace(stream, after).finish()? + name
                }
                (Some(stream), ..) => stream.push(id)?.unwrap_or_default(),
                (None, ..) => self.text_of(id)?,
            };
            self.held.push_str(&new);
        }
        if self.least == 0 {
            return Ok(self.release());
        }
        self.least -= 1;
        let text = std::mem::take(&mut self.held);
        let scored = if text.is_empty() { Vec::new() } else { std::mem::take(&mut self.scored) };
        Ok((Piece { text, scored, ..Piece::default() }, None))
    }

    /// The rest of the text, after the last token.
    pub(super) fn finish(mut self) -> Result<(Piece, Option<String>), ModelError> {
        if let Some(stream) = self.stream.take() {
            self.held.push_str(&stream.finish()?);
        }
        let (mut piece, stopped) = self.release();
        if stopped.is_none() {
            piece.text.push_str(&self.held);
            piece.scored.append(&mut self.scored);
        }
        Ok((piece, stopped))
    }

    /// Takes the text in which no stop string can begin; up to the first stop string if there is one.
    fn release(&mut self) -> (Piece, Option<String>) {
        let places =
            self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        let found =
            places.min_by_key(|(place, _)| *place).map(|(place, stop)| (place, stop.clone()));
        let end = found.as_ref().map_or_else(|| self.held.len() - self.suspect(), |(end, _)| *end);
        let text: String = self.held.drain(..end).collect();
        if found.is_some() {
            self.held.clear();
        }
        // Log probabilities are sent with the text.
        let scored = if text.is_empty() && found.is_none() {
            Vec::new()
        } else {
            std::mem::take(&mut self.scored)
        };
        (Piece { text, scored, ..Piece::default() }, found.map(|(_, stop)| stop))
    }

    /// The number of bytes at the end that may be the start of a stop string.
    fn suspect(&self) -> usize {
        let begins = |length: &usize| {
            self.held.is_char_boundary(self.held.len() - length)
                && self
                    .stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.held[self.held.len() - length..]))
        };
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        (1..=longest.min(self.held.len())).rev().find(begins).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a text token by token, where a token is a number and a space, and returns the sent pieces.
    fn sent(stops: &[&str], ids: &[u32]) -> (Vec<String>, bool) {
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut writer = Writer::new(None, stops, 0);
        let mut pieces = Vec::new();
        for id in ids {
            let (piece, stopped) = writer.push(*id, false, None).unwrap();
            pieces.push(piece.text);
            if stopped.is_some() {
                return (pieces, true);
            }
        }
        let (piece, stopped) = writer.finish().unwrap();
        pieces.push(piece.text);
        (pieces, stopped.is_some())
    }

    #[test]
    fn stop_texts_are_found_across_tokens_and_never_sent() {
        assert_eq!(sent(&[], &[1, 23]), (vec!["1 ".into(), "23 ".into(), String::new()], false));
        assert_eq!(
            sent(&["2 4"], &[1, 2, 4, 5]),
            (vec!["1 ".into(), String::new(), String::new()], true)
        );
        // Held while it may be a stop string, sent once it is not.
        assert_eq!(
            sent(&["2 4"], &[2, 5]),
            (vec![String::new(), "2 5 ".into(), String::new()], false)
        );
        // The end of a text that looked like the start of a stop string.
        assert_eq!(sent(&["2 4"], &[1, 2]), (vec!["1 ".into(), String::new(), "2 ".into()], false));
        // The first of several stop strings, and one that begins inside another.
        assert_eq!(sent(&["9", "3 "], &[1, 3, 9]), (vec!["1 ".into(), String::new()], true));
        assert_eq!(
            sent(&["1 1 2"], &[1, 1, 1, 2]),
            (vec![String::new(), String::new(), "1 ".into(), String::new()], true)
        );
    }

    #[test]
    fn probabilities_go_out_with_their_text() {
        let mut writer = Writer::new(None, vec!["2 4".into()], 0);
        let logprobs = Logprobs { chosen: -0.5, top: vec![(7, -0.25)] };
        assert!(writer.push(2, false, Some(&logprobs)).unwrap().0.is_empty());
        let (piece, _) = writer.push(5, false, Some(&logprobs)).unwrap();
        assert_eq!((piece.text.as_str(), piece.scored.len()), ("2 5 ", 2));
        let scored =
            Scored { text: "5 ".into(), logprob: Some(-0.5), top: vec![("7 ".into(), -0.25)] };
        assert_eq!(piece.scored[1], scored);
        let (piece, stopped) = writer.push(9, true, Some(&logprobs)).unwrap();
        assert!(piece.is_empty() && stopped.is_none(), "a stop token has no text");
        let (last, _) = writer.finish().unwrap();
        assert_eq!((last.text.as_str(), last.scored.len()), ("", 1), "but it was sampled");
    }

    #[test]
    fn stop_texts_wait_for_the_least_number_of_tokens() {
        let mut writer = Writer::new(None, vec!["4".into()], 2);
        for _ in 0..2 {
            assert_eq!(writer.push(4, false, None).unwrap().0.text, "4 ");
        }
        assert_eq!(writer.push(4, false, None).unwrap().1.as_deref(), Some("4"));
    }

    #[test]
    fn a_prompt_is_echoed_with_the_scores_of_all_but_its_first_token() {
        let writer = Writer::new(None, Vec::new(), 0);
        let prompt = Prompt { ids: vec![3, 4], text: None };
        let scores = [Logprobs { chosen: -2.0, top: vec![(5, -1.0)] }];
        let piece = writer.echoed(&prompt, &scores).unwrap();
        assert_eq!(piece.text, "3 4 ");
        let scored: Vec<_> = piece.scored.iter().map(|s| (s.text.as_str(), s.logprob)).collect();
        assert_eq!(scored, [("3 ", None), ("4 ", Some(-2.0))]);
        assert!(writer.echoed(&prompt, &[]).unwrap().scored.is_empty(), "none were requested");
    }
}
