//! Tokens to text that can be sent: whole characters only, and nothing that may still be the start of a stop string.

use std::sync::Arc;

use ir::sampling::Logprobs;
use model::{ModelError, TextStream, Tokenizer};

/// A token with its text and log probability.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scored {
    pub(super) text: String,
    pub(super) logprob: f64,
    /// The likeliest tokens: text and log probability.
    pub(super) top: Vec<(String, f64)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) scored: Vec<Scored>,
}

impl Piece {
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.scored.is_empty()
    }
}

pub(super) struct Writer {
    tokenizer: Option<Arc<Tokenizer>>,
    stream: Option<TextStream<Arc<Tokenizer>>>,
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    scored: Vec<Scored>,
}

impl Writer {
    pub(super) fn new(tokenizer: Option<Arc<Tokenizer>>, stops: Vec<String>) -> Self {
        let stream = tokenizer.clone().map(|tokenizer| TextStream::new(tokenizer, true));
        Self { tokenizer, stream, stops, held: String::new(), scored: Vec::new() }
    }

    /// The text of a single token. Without a tokenizer it is the token's number.
    fn text_of(&self, id: u32) -> Result<String, ModelError> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(&[id], false),
            None => Ok(format!("{id} ")),
        }
    }

    /// Adds a token; `ends` if it is a stop token, whose text is not part of the answer. Returns the text that can be
    /// sent, and whether a stop string was found.
    pub(super) fn push(
        &mut self,
        id: u32,
        ends: bool,
        logprobs: Option<&Logprobs>,
    ) -> Result<(Piece, bool), ModelError> {
        if let Some(logprobs) = logprobs.filter(|_| !ends) {
            let top = logprobs.top.iter();
            let top = top.map(|(token, logprob)| Ok((self.text_of(*token)?, *logprob)));
            let top = top.collect::<Result<_, ModelError>>()?;
            let (text, logprob) = (self.text_of(id)?, logprobs.chosen);
            self.scored.push(Scored { text, logprob, top });
        }
        if !ends {
            let new = match &mut self.stream {
                Some(stream) => stream.push(id)?.unwrap_or_default(),
                None => self.text_of(id)?,
            };
            self.held.push_str(&new);
        }
        Ok(self.release())
    }

    /// The rest of the text, after the last token.
    pub(super) fn finish(mut self) -> Result<(Piece, bool), ModelError> {
        if let Some(stream) = self.stream.take() {
            self.held.push_str(&stream.finish()?);
        }
        let (mut piece, stopped) = self.release();
        if !stopped {
            piece.text.push_str(&self.held);
            piece.scored.append(&mut self.scored);
        }
        Ok((piece, stopped))
    }

    /// Takes the text in which no stop string can begin; up to the first stop string if there is one.
    fn release(&mut self) -> (Piece, bool) {
        let found = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        let end = found.unwrap_or_else(|| self.held.len() - self.suspect());
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
        (Piece { text, scored }, found.is_some())
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
        let mut writer = Writer::new(None, stops);
        let mut pieces = Vec::new();
        for id in ids {
            let (piece, stopped) = writer.push(*id, false, None).unwrap();
            pieces.push(piece.text);
            if stopped {
                return (pieces, true);
            }
        }
        let (piece, stopped) = writer.finish().unwrap();
        pieces.push(piece.text);
        (pieces, stopped)
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
        let mut writer = Writer::new(None, vec!["2 4".into()]);
        let logprobs = Logprobs { chosen: -0.5, top: vec![(7, -0.25)] };
        assert!(writer.push(2, false, Some(&logprobs)).unwrap().0.is_empty());
        let (piece, _) = writer.push(5, false, Some(&logprobs)).unwrap();
        assert_eq!((piece.text.as_str(), piece.scored.len()), ("2 5 ", 2));
        let scored = Scored { text: "5 ".into(), logprob: -0.5, top: vec![("7 ".into(), -0.25)] };
        assert_eq!(piece.scored[1], scored);
        let (piece, stopped) = writer.push(9, true, Some(&logprobs)).unwrap();
        assert!(piece.is_empty() && !stopped, "a stop token has no text");
    }
}
