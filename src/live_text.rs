//! Text for people as it is generated, on standard error, and its speed at the end.

use std::time::{Duration, Instant};

use model::{ModelError, TextStream, Tokenizer};

use crate::report;
use crate::spinner::Spinner;

/// A text that is being generated.
pub(crate) struct LiveText<'a> {
    stream: Option<TextStream<&'a Tokenizer>>,
    /// Shown until the first text.
    working: Option<Spinner>,
    /// The text so far.
    text: String,
    began: Instant,
    first: Option<Duration>,
    last: Duration,
    tokens: usize,
    failed: Option<ModelError>,
}

impl<'a> LiveText<'a> {
    /// Begins now. Without a tokenizer only the speed is measured.
    pub(crate) fn new(tokenizer: Option<&'a Tokenizer>, working: Spinner) -> Self {
        Self {
            stream: tokenizer.map(|tokenizer| tokenizer.stream(true)),
            working: Some(working),
            text: String::new(),
            began: Instant::now(),
            first: None,
            last: Duration::ZERO,
            tokens: 0,
            failed: None,
        }
    }

    /// Shows what a token completes.
    pub(crate) fn push(&mut self, token: u32) {
        self.last = self.began.elapsed();
        self.first.get_or_insert(self.last);
        self.tokens += 1;
        match self.stream.as_mut().map(|stream| stream.push(token)) {
            Some(Ok(Some(piece))) => self.show(&piece),
            Some(Err(error)) => {
                self.stream = None;
                self.failed = Some(error);
            }
            Some(Ok(None)) | None => {}
        }
    }

    fn show(&mut self, piece: &str) {
        // A progress line would be written into the text.
        self.working = None;
        self.text.push_str(piece);
        report::say_piece(piece);
    }

    /// Ends the line, says how fast it was, and returns the text.
    ///
    /// # Errors
    /// If the tokenizer failed on a token.
    pub(crate) fn finish(mut self) -> Result<String, ModelError> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        self.show(&rest);
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            report::say_piece("\n");
        }
        if let Some(speed) = speed(self.tokens, self.first, self.last) {
            report::say(&speed);
        }
        Ok(self.text)
    }
}

/// The rate of the tokens after the first one, which waits for the prompt, and how long that took.
fn speed(tokens: usize, first: Option<Duration>, last: Duration) -> Option<String> {
    let first = first?;
    let after = last.saturating_sub(first).as_secs_f64();
    let rate = if tokens > 1 && after > 0.0 {
        format!(", {:.1} tokens/s", (tokens - 1) as f64 / after)
    } else {
        String::new()
    };
    let plural = if tokens == 1 { "" } else { "s" };
    Some(format!("[{tokens} token{plural}{rate}, first after {:.3} s]", first.as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_leaves_out_the_first_token() {
        let s = Duration::from_secs;
        assert_eq!(speed(0, None, s(0)), None);
        assert_eq!(speed(1, Some(s(2)), s(2)).unwrap(), "[1 token, first after 2.000 s]");
        assert_eq!(
            speed(11, Some(s(2)), s(4)).unwrap(),
            "[11 tokens, 5.0 tokens/s, first after 2.000 s]"
        );
    }
}
