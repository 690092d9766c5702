//! An external proposer: a command that is asked and told over JSON lines, one object per line. It may be an agent,
//! another optimiser, or ten lines of shell. HARNESS.md describes the lines.
//!
//! A bad proposer cannot hurt the search: every wait has a limit, a line has a greatest length, a proposal is parsed
//! and validated like any schedule, and a proposer that exits, falls silent or sends malformed lines ends the search,
//! which keeps its finished trials.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ir::schedule::{ScheduleConfig, parse_config, search_space, validate};
use ir::{Graph, Target, Violations};
use rustix::process::{Pid, Signal, kill_process_group};
use search::strategy::{Proposals, Question, Strategy};
use search::{Origin, TrialRecords};
use serde_json::{Value, json};

use crate::context::Context;
use crate::failure::Failure;
use crate::report;

/// The time limit of an answer.
const ANSWER: Duration = Duration::from_secs(300);

/// The most bytes of an answer's line.
const LINE_MAX: u64 = 1 << 20;

/// The most lines that it may leave unread.
const UNREAD_MAX: usize = 4096;

/// The most refused proposals for one trial.
const REFUSED_MAX: usize = 100;

/// The strategy of a race: its candidate, once.
#[derive(Debug)]
pub(super) struct OnlyCandidate(pub(super) ScheduleConfig);

impl Strategy for OnlyCandidate {
    fn name(&self) -> &'static str {
        "race"
    }

    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s> {
        let first = (question.trial == 1).then_some((Origin::External, self.0));
        Box::new(first.into_iter())
    }
}

/// A strategy that tries these schedules first, one a trial.
#[derive(Debug)]
pub(super) struct Planted {
    pub(super) first: Vec<ScheduleConfig>,
    pub(super) then: Arc<dyn Strategy>,
}

impl Strategy for Planted {
    fn name(&self) -> &'static str {
        self.then.name()
    }

    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s> {
        let at = usize::try_from(question.trial).ok().and_then(|trial| trial.checked_sub(1));
        let planted = at.and_then(|at| self.first.get(at));
        let planted = planted.map(|&config| (Origin::External, config));
        Box::new(planted.into_iter().chain(self.then.ask(question)))
    }

    fn may_be_guessed(&self) -> bool {
        self.then.may_be_guessed()
    }
}

#[derive(Debug)]
pub(super) struct Proposer {
    talk: Mutex<Talk>,
    graph: Graph,
    target: Target,
}

#[derive(Debug)]
struct Talk {
    child: Child,
    /// Lines to send. A proposer that does not read them blocks nothing.
    say: Option<SyncSender<String>>,
    lines: Receiver<std::io::Result<String>>,
    /// Finished trials that were sent to it.
    told: usize,
    /// Set when there will be no more proposals.
    over: bool,
}

impl Proposer {
    /// Starts the command and sends the search space.
    pub(super) fn start(command: &str, context: &Context, seed: u64) -> Result<Self, Failure> {
        let spawned = Command::new("sh")
            .args(["-c", command])
            .process_group(0) // Ctrl-C is for the search, which ends it
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let unstarted = |error: std::io::Error| {
            Failure::usage(format!("--proposer {command:?} cannot be started: {error}"))
        };
        let mut child = spawned.map_err(unstarted)?;
        let say = child.stdin.take().map(speaker);
        let lines = listener(child.stdout.take());
        let talk = Talk { child, say, lines, told: 0, over: false };
        let proposer = Self {
            talk: Mutex::new(talk),
            graph: context.graph().clone(),
            target: context.target.clone(),
        };
        proposer.talk().say(&json!({
            "search": {
                "schema": "amk.ask.v1",
                "model": context.name,
                "target": context.target.name,
                "seed": seed,
                "default": context.default_config(),
                "search_space": search_space(context.graph(), &context.target),
            }
        }));
        Ok(proposer)
    }

    fn talk(&self) -> std::sync::MutexGuard<'_, Talk> {
        self.talk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next proposal; `refused` holds the violations of the one before.
    fn propose(
        &self,
        question: &Question<'_>,
        mut refused: Option<Value>,
    ) -> Option<ScheduleConfig> {
        let mut talk = self.talk();
        talk.tell(question.past);
        for _ in 0..REFUSED_MAX {
            talk.say(&json!({
                "ask": {"trial": question.trial, "incumbent": question.incumbent, "refused": refused}
            }));
            let answer = talk.recv()?;
            let Some(config) = answer.get("config") else {
                let over = answer.get("stop").is_some();
                talk.end(match over {
                    true => "it has nothing more to propose",
                    false => "it said neither \"config\" nor \"stop\"",
                });
                return None;
            };
            match parse_config(&config.to_string(), &self.graph, &self.target) {
                Ok(config) => return Some(config),
                Err(violations) => refused = Some(wrong(&violations)),
            }
        }
        talk.end(&format!("{REFUSED_MAX} proposals for one trial could not be read"));
        None
    }

    /// Why a legible proposal was not tried.
    fn why(&self, config: &ScheduleConfig) -> Value {
        match validate(*config, &self.graph, &self.target) {
            Err(violations) => wrong(&violations),
            Ok(_) => {
                json!([{"message": "it was tried before, lowers to a program that was, or cannot be lowered"}])
            }
        }
    }
}

fn wrong(violations: &Violations) -> Value {
    let all = violations.list().iter().filter_map(|v| serde_json::to_value(v).ok());
    all.collect()
}

/// Writes lines to the command, on a thread that ends when the channel or the pipe is closed.
fn speaker(mut input: ChildStdin) -> SyncSender<String> {
    let (send, lines) = sync_channel::<String>(UNREAD_MAX);
    std::thread::spawn(move || {
        for line in lines {
            if input.write_all(line.as_bytes()).and_then(|()| input.flush()).is_err() {
                return;
            }
        }
    });
    send
}

/// Reads the command's lines, on a thread that ends when the pipe or the channel is closed.
fn listener(output: Option<ChildStdout>) -> Receiver<std::io::Result<String>> {
    let (send, lines) = sync_channel(1);
    std::thread::spawn(move || {
        let mut output = output.map(BufReader::new);
        while let Some(line) = output.as_mut().and_then(|reader| read_line(reader).transpose()) {
            let last = line.is_err();
            if send.send(line).is_err() || last {
                return;
            }
        }
    });
    lines
}

/// A line without its end; `None` at the end of the output.
fn read_line(reader: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    reader.take(LINE_MAX).read_until(b'\n', &mut bytes)?;
    if bytes.len() as u64 == LINE_MAX {
        return Err(std::io::Error::other(format!("a line of more than {LINE_MAX} bytes")));
    }
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    Ok((!bytes.is_empty()).then_some(text))
}

impl Talk {
    /// Sends the trials that have finished since the last call.
    fn tell(&mut self, past: &TrialRecords) {
        for (index, past) in (self.told..).zip(past.since(self.told)) {
            let changed: serde_json::Map<String, Value> = (past.changes.iter())
                .map(|c| (c.knob.path().to_owned(), json!([c.from.to_json(), c.to.to_json()])))
                .collect();
            self.say(&json!({
                "tell": {
                    "number": index + 1,
                    "config": past.config,
                    "changed": changed,
                    "gain": past.gain,
                    "kept": past.kept,
                    "time": past.score.map(f64::exp),
                }
            }));
        }
        self.told = self.told.max(past.len());
    }

    fn say(&mut self, line: &Value) {
        let said = self.say.as_ref().map(|say| say.try_send(format!("{line}\n")));
        match said {
            Some(Err(TrySendError::Full(_))) => self.end("it does not listen"),
            // It closed its input. Its earlier lines are still read, and then the reason why it ended.
            Some(Err(TrySendError::Disconnected(_))) => self.say = None,
            Some(Ok(())) | None => {}
        }
    }

    fn recv(&mut self) -> Option<Value> {
        if self.over {
            return None;
        }
        let line = match self.lines.recv_timeout(ANSWER) {
            Ok(Ok(line)) => line,
            Ok(Err(error)) => {
                self.end(&format!("it cannot be heard ({error})"));
                return None;
            }
            Err(RecvTimeoutError::Timeout) => {
                self.end(&format!("no answer within {} s", ANSWER.as_secs()));
                return None;
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.end("it has ended");
                return None;
            }
        };
        match serde_json::from_str::<Value>(&line) {
            Ok(answer) if answer.is_object() => Some(answer),
            Ok(_) | Err(_) => {
                let shown: String = line.chars().take(80).collect();
                self.end(&format!("it said {shown:?}, which is no JSON object"));
                None
            }
        }
    }

    /// Reports once why there will be no more proposals, and closes its input.
    fn end(&mut self, why: &str) {
        if !std::mem::replace(&mut self.over, true) {
            report::say(&format!("the proposer ends the search: {why}"));
        }
        self.say = None;
    }
}

impl Drop for Talk {
    /// Kills the process group instead of waiting for it.
    fn drop(&mut self) {
        self.say = None;
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

impl Strategy for Proposer {
    fn name(&self) -> &'static str {
        "external"
    }

    fn ask<'s>(&'s self, question: &Question<'s>) -> Proposals<'s> {
        let question = *question;
        let mut last: Option<ScheduleConfig> = None;
        Box::new(std::iter::from_fn(move || {
            // A second request for the same trial: the last proposal was refused.
            let refused = last.as_ref().map(|config| self.why(config));
            let config = self.propose(&question, refused)?;
            last = Some(config);
            Some((Origin::External, config))
        }))
    }

    /// The external process is asked once for each trial.
    fn may_be_guessed(&self) -> bool {
        false
    }
}
