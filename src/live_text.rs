//! Text for people as it is generated, on standard error, and its speed at the end.

use std::time::{Duration, Instant};

use model::{ModelError, TextStream, Tokenizer};

use crate::distribution::{Distribution, Times};
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
    /// Between tokens.
    gaps: Vec<Duration>,
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
            gaps: Vec::new(),
            failed: None,
        }
    }

    /// Shows what a token completes.
    pub(crate) fn push(&mut self, token: u32) {
        let now = self.began.elapsed();
        match self.first {
            None => self.first = Some(now),
            Some(_) => self.gaps.push(now - self.last),
        }
        self.last = now;
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

    /// Ends the line, says how fast it was, and returns the text and the times between tokens.
    ///
    /// # Errors
    /// If the tokenizer failed on a token.
    pub(crate) fn finish(mut self) -> Result<(String, Option<Distribution>), ModelError> {
        let rest = self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default();
        self.show(&rest);
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.text.is_empty() && !self.text.ends_with('\n') {
            report::say_piece("\n");
        }
        if let Some(first) = self.first {
            report::say(&speed(first, &self.gaps));
        }
        Ok((self.text, Times::of(self.gaps.into_iter()).distribution()))
    }
}

/// The rate of the tokens after the first one, which waits for the prompt, and how long that took.
fn speed(first: Duration, gaps: &[Duration]) -> String {
    let (tokens, after) = (gaps.len() + 1, gaps.iter().sum::<Duration>().as_secs_f64());
    let rate = if after > 0.0 {
        format!(", {:.1} tokens/s", gaps.len() as f64 / after)
    } else {
        String::new()
    };
    let plural = if tokens == 1 { "" } else { "s" };
    format!("[{tokens} token{plural}{rate}, first after {:.3} s]", first.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_leaves_out_the_first_token() {
        let s = Duration::from_secs;
        assert_eq!(speed(s(2), &[]), "[1 token, first after 2.000 s]");
        let ten = [Duration::from_millis(200); 10];
        assert_eq!(speed(s(2), &ten), "[11 tokens, 5.0 tokens/s, first after 2.000 s]");
    }
}
