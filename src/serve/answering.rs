//! Answers being made: the events of each choice become pieces of text, and these one document or a stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::response::sse;
use futures_util::stream::{self, Stream};
use ir::sampling::Logprobs;
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedReceiver;

use super::Served;
use super::answer::{Ending, Heading, Line, Part, Progress, Usage};
use super::decode::{Event, Finish};
use super::figures::{Figures, Ran};
use super::prompt::Prompt;
use super::record::Record;
use super::refusal::Refusal;
use super::request::Asked;
use super::tenants::Caller;
use super::text::{Piece, Writer};
use super::tool_calls::CallReader;

/// The most events that become one piece: a turn of the GPU gives up to 16 tokens at once.
const TOGETHER_MAX: usize = 32;

/// One choice. Dropping it closes the channel, so that the decode thread stops.
struct Choice {
    events: UnboundedReceiver<Event>,
    /// None after the end of the text.
    writer: Option<Writer>,
    /// Finds the calls, if there are tools.
    calls: Option<CallReader>,
    ends: Vec<u32>,
    /// Whether it is the first of its prompt, whose cached tokens are counted.
    first: bool,
    /// The kernel of its tokens.
    kernel: usize,
    /// The prompt, until it has been sent, if the answer begins with it.
    echo: Option<Prompt>,
    /// Log probabilities of the prompt's tokens after the first.
    scores: Vec<Logprobs>,
    /// Tokens that came since the last measurement, and its time.
    unmeasured: usize,
    measured: Option<Instant>,
    /// What has been counted of it, and since when the last of its times runs.
    ran: Ran,
    since: Instant,
    /// Characters sent.
    sent: usize,
}

/// All choices of a request.
pub(super) struct Answering {
    choices: Vec<Choice>,
    usage: Usage,
    /// The kernels that ran it, a bit each.
    kernels: u32,
    /// The choice whose events are looked at first, so that none starves.
    turn: usize,
    served: Arc<Served>,
    record: Arc<Record>,
    /// Whose it is, and its place among the requests of its tenant.
    counted: (Caller, Option<OwnedSemaphorePermit>),
}

/// A piece of a choice, and its ending if it is the last.
struct Next {
    index: usize,
    piece: Piece,
    ending: Option<Ending>,
}

impl Choice {
    fn new(
        events: UnboundedReceiver<Event>,
        asked: &Asked,
        stop: &[String],
        served: &Served,
    ) -> Self {
        let writer = Writer::new(served.tokenizer.clone(), stop.to_vec(), asked.least);
        let markers = asked.tools.as_ref().map(|tools| tools.markers());
        Self {
            events,
            writer: Some(writer.showing(markers.as_ref().map_or(&[], |markers| markers))),
            calls: asked.tools.clone().map(CallReader::new),
            ends: asked.work.stop.clone(),
            first: asked.first,
            kernel: 0,
            echo: asked.echo.clone(),
            scores: Vec::new(),
            unmeasured: 0,
            measured: None,
            ran: Ran { prompt: asked.work.prompt.len(), ..Ran::default() },
            since: Instant::now(),
            sent: 0,
        }
    }

    /// The time since the last call, or since it was sent to the decode thread.
    fn since_last(&mut self) -> Option<Duration> {
        let before = std::mem::replace(&mut self.since, Instant::now());
        Some(self.since - before)
    }

    /// Measures the tokens that came together.
    fn measure(&mut self, figures: &Figures) {
        if self.unmeasured > 0
            && let Some(before) = self.measured.replace(Instant::now())
        {
            figures.between(self.unmeasured, before.elapsed());
            self.unmeasured = 0;
        }
    }

    /// The piece that an event adds, and the ending if it is the last, with the calls of tools taken out of the text.
    fn take(&mut self, event: Event) -> Result<(Piece, Option<Ending>), Refusal> {
        let (mut piece, mut ending) = self.next(event)?;
        let Some(calls) = &mut self.calls else { return Ok((piece, ending)) };
        (piece.text, piece.calls) = calls.push(&piece.text);
        if calls.is_full() && ending.is_none() {
            ending = Some(Ending { reason: "stop", matched: None, called: true });
        } else if let Some(ending) = &mut ending {
            let (text, found) = calls.finish();
            piece.text.push_str(&text);
            piece.calls.extend(found);
            ending.called = calls.any();
        }
        Ok((piece, ending))
    }

    fn next(&mut self, event: Event) -> Result<(Piece, Option<Ending>), Refusal> {
        let undecodable = |error: model::ModelError| Refusal::failed(error.to_string());
        let Some(writer) = &mut self.writer else {
            return Err(Refusal::failed("the text has ended"));
        };
        // A prompt is sent when all of its tokens are scored.
        let read = matches!(event, Event::Token { .. } | Event::End(_));
        let prompt = self.echo.take_if(|_| read);
        let echo = prompt.map(|prompt| writer.echoed(&prompt, &self.scores));
        let mut piece = echo.transpose().map_err(undecodable)?.unwrap_or_default();
        let ended = |reason, matched| Some(Ending { reason, matched, called: false });
        let reason = match event {
            Event::Prompt(logprobs) => {
                self.scores.push(logprobs);
                return Ok((piece, None));
            }
            Event::Token { id, logprobs } => {
                let ends = self.ends.contains(&id);
                let pushed = writer.push(id, ends, logprobs.as_ref());
                let (next, matched) = pushed.map_err(undecodable)?;
                piece.append(next);
                let ending = matched.and_then(|matched| ended("stop", Some(matched)));
                return Ok((piece, ending));
            }
            // Counted where events are received.
            Event::Begun | Event::Reused(_) | Event::Kernel(_) => return Ok((piece, None)),
            Event::End(Finish::Stop) => "stop",
            Event::End(Finish::Length) => "length",
            Event::End(Finish::Failed(why)) => return Err(Refusal::failed(why)),
            Event::End(Finish::Leaving) => return Err(Refusal::leaving()),
        };
        let last = self.writer.take().map(Writer::finish).transpose();
        let (next, matched) = last.map_err(undecodable)?.unwrap_or_default();
        piece.append(next);
        Ok((piece, ended(if matched.is_some() { "stop" } else { reason }, matched)))
    }
}

impl Answering {
    pub(super) fn new(
        served: Arc<Served>,
        record: Arc<Record>,
        counted: (Caller, Option<OwnedSemaphorePermit>),
        prompt: usize,
    ) -> Self {
        let usage = Usage { prompt, ..Usage::default() };
        Self { choices: Vec::new(), usage, kernels: 0, turn: 0, served, record, counted }
    }

    pub(super) fn add(&mut self, events: UnboundedReceiver<Event>, asked: &Asked, stop: &[String]) {
        self.choices.push(Choice::new(events, asked, stop, &self.served));
    }

    /// The next event of any choice; `None` after the end of all.
    async fn event(&mut self) -> Option<(usize, Option<Event>)> {
        let (count, turn) = (self.choices.len(), self.turn);
        let choices = &mut self.choices;
        poll_fn(|context| {
            let mut open = false;
            for index in (0..count).map(|place| (turn + place) % count) {
                let choice = &mut choices[index];
                if choice.writer.is_none() {
                    continue;
                }
                open = true;
                if let Poll::Ready(event) = choice.events.poll_recv(context) {
                    return Poll::Ready(Some((index, event)));
                }
            }
            if open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// The next piece of any choice; `None` after the end of all. Tokens that came together are one piece.
    async fn next(&mut self) -> Result<Option<Next>, Refusal> {
        loop {
            let Some((index, event)) = self.event().await else { return Ok(None) };
            self.turn = index + 1;
            let Some(event) = event else {
                return Err(Refusal::failed("the decode thread has gone"));
            };
            let (mut piece, mut ending) = self.take(index, event)?;
            for _ in 1..TOGETHER_MAX {
                let more = ending.is_none().then(|| self.choices[index].events.try_recv().ok());
                let Some(event) = more.flatten() else { break };
                let next = self.take(index, event)?;
                piece.append(next.0);
                ending = next.1;
            }
            if let Some(Ending { reason, .. }) = &ending {
                self.end(index, reason);
            }
            if ending.is_some() || !piece.is_empty() {
                return Ok(Some(Next { index, piece, ending }));
            }
        }
    }

    fn take(&mut self, index: usize, event: Event) -> Result<(Piece, Option<Ending>), Refusal> {
        self.measure(index, &event);
        self.choices[index].take(event)
    }

    /// Counts and times a token. Tokens of one turn of the machine come together and share its time.
    fn measure(&mut self, index: usize, event: &Event) {
        if matches!(event, Event::Begun) {
            self.choices[index].ran.queued = self.choices[index].since_last();
        }
        if let Event::Reused(tokens) = event {
            self.served.figures.reused(*tokens);
            if self.choices[index].first {
                self.usage.cached += tokens;
                self.record.cached(*tokens);
            }
        }
        if let Event::Kernel(kernel) = event {
            self.choices[index].kernel = *kernel;
        }
        let Event::Token { .. } = event else { return };
        self.kernels |= 1 << self.choices[index].kernel;
        self.usage.completion += 1;
        let figures = &self.served.figures;
        if let Some(took) = self.record.token() {
            figures.first(took);
        }
        figures.token();
        self.counted.0.used(1);
        let choice = &mut self.choices[index];
        choice.ran.tokens += 1;
        match choice.measured {
            // The first of a choice has none before it.
            None => {
                choice.measured = Some(Instant::now());
                choice.ran.prefill = choice.since_last();
            }
            Some(_) => choice.unmeasured += 1,
        }
        if choice.events.is_empty() {
            choice.measure(figures);
        }
    }

    /// The kernels of its tokens, or without tokens those that ran its prompts.
    fn kernels(&self) -> u32 {
        let ran = self.choices.iter().fold(0, |all, choice| all | 1 << choice.kernel);
        if self.kernels == 0 { ran } else { self.kernels }
    }

    fn end(&mut self, index: usize, reason: &'static str) {
        let choice = &mut self.choices[index];
        choice.measure(&self.served.figures);
        choice.events.close(); // discards the rest
        choice.writer = None;
        if choice.ran.tokens > 0 {
            choice.ran.decode = choice.since_last();
        }
        let figures = &self.served.figures;
        figures.ended(reason, self.record.elapsed(), &choice.ran);
        if self.choices.iter().all(|choice| choice.writer.is_none()) {
            let longest = self.choices.iter().map(|choice| choice.ran.tokens).max();
            figures.longest(longest.unwrap_or(0));
        }
    }

    /// The complete answer.
    pub(super) async fn whole(mut self, heading: &Heading) -> Result<Value, Refusal> {
        let mut pieces: Vec<(Piece, Option<Ending>)> = Vec::new();
        pieces.resize_with(self.choices.len(), Default::default);
        while let Some(Next { index, piece, ending }) = self.next().await? {
            let (whole, end) = &mut pieces[index];
            whole.append(piece);
            *end = ending;
        }
        let ended = pieces.into_iter().map(|(piece, ending)| Some((piece, ending?)));
        let ended: Option<Vec<(Piece, Ending)>> = ended.collect();
        let ended = ended.ok_or_else(|| Refusal::failed("a choice has no ending"))?;
        let fingerprint = self.served.fingerprint(self.kernels());
        Ok(Heading { fingerprint, ..heading.clone() }.whole(&ended, self.usage))
    }

    /// The answer as server-sent events.
    pub(super) fn streamed(
        self,
        heading: Heading,
    ) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        let mut progress = Progress { usage: self.usage, ..Progress::default() };
        let ready = heading.opening(self.choices.len(), &mut progress).into();
        let streamed = Streamed { answering: self, heading, progress, ready, over: false };
        stream::unfold(streamed, |mut streamed| async move {
            let Line { event, data } = streamed.next().await?;
            let named = event.map(|name| sse::Event::default().event(name));
            Some((Ok(named.unwrap_or_default().data(data)), streamed))
        })
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        // The client has gone, or the machine failed.
        for _ in self.choices.iter().filter(|choice| choice.writer.is_some()) {
            self.served.figures.ended("abort", self.record.elapsed(), &Ran::default());
        }
    }
}

/// An answer being streamed.
struct Streamed {
    answering: Answering,
    heading: Heading,
    progress: Progress,
    /// Events to send before the next piece is awaited.
    ready: VecDeque<Line>,
    over: bool,
}

impl Streamed {
    async fn next(&mut self) -> Option<Line> {
        while self.ready.is_empty() && !self.over {
            match self.answering.next().await {
                Ok(Some(next)) => self.take(next),
                Ok(None) => {
                    self.progress.usage = self.answering.usage;
                    self.ready.extend(self.heading.closing(&mut self.progress));
                    self.over = true;
                }
                // The status has been sent already: clients look for an error here.
                Err(refusal) => {
                    self.ready.push_back(self.heading.error(&refusal, &self.progress));
                    self.over = true;
                }
            }
        }
        self.ready.pop_front()
    }

    fn take(&mut self, Next { index, piece, ending }: Next) {
        let sent = self.answering.choices[index].sent;
        self.heading.fingerprint = self.answering.served.fingerprint(self.answering.kernels());
        let part = Part { index, piece: &piece, sent, ending: ending.as_ref() };
        self.ready.extend(self.heading.chunk(&part, &mut self.progress));
        self.answering.choices[index].sent += piece.text.chars().count();
        self.progress.ending = ending.or(self.progress.ending.take());
    }
}

#[cfg(test)]
#[path = "answering_tests.rs"]
mod tests;
