//! Streams of events that come together, from a channel.

use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::context::Context;
use crate::engine::KernelTable;
use crate::host_rules::HostRules;
use crate::sequence::Work;
use crate::serve::decode::Admission;
use crate::serve::request::Api;
use crate::serve::{Served, Taking};

/// A kernel of eight sequences, and one of one.
fn kernels() -> Arc<KernelTable> {
    let place = PlaceArgs { device: DeviceChoice::Cpu, ..PlaceArgs::default() };
    let context = Context::load("toy", &place).unwrap_or_else(|f| panic!("{}", f.message));
    let program = context.lowered(&context.neutral_config());
    let program = Arc::new(program.unwrap_or_else(|f| panic!("{}", f.message)));
    let table = KernelTable::default();
    assert_eq!([8, 1].map(|seqs| table.add(seqs, &program)), [Some(0), Some(1)]);
    Arc::new(table)
}

fn served() -> Served {
    let home = tempfile::tempdir().unwrap();
    let folder = telemetry::Folder::at(&home.path().join("amk"));
    let start = |edit: &mut telemetry::Edit<'_>| edit.head().places = 1;
    let (page, _) = telemetry::Publisher::new(&folder, start).unwrap();
    let (_, loaded) = tokio::sync::watch::channel(true);
    Served {
        names: vec!["m".into()],
        device: "cuda",
        target: "h200".to_owned(),
        schedule: None,
        fingerprint: "amk-cuda".into(),
        kernels: kernels(),
        vocab: 100,
        capacity: 100,
        seqs: 8,
        shares: true,
        speculate: 0,
        draft: None,
        eos: Vec::new(),
        tokenizer: None,
        grammars: OnceLock::new(),
        admission: Admission::new(1),
        jobs: std::sync::mpsc::channel().0,
        began: 0,
        answers: 0.into(),
        taking: Taking { loaded, leaving: AtomicBool::new(false) },
        page: page.reader(),
        command_log: None,
        figures: Arc::new(Figures::new("m", Arc::default())),
        spans: None,
    }
}

fn answering() -> (UnboundedSender<Event>, Answering) {
    answering_with(None)
}

fn answering_with(echo: Option<Prompt>) -> (UnboundedSender<Event>, Answering) {
    let work = Work {
        prompt: vec![1],
        limit: 50,
        sampling: ir::sampling::Sampling::default(),
        host: HostRules::default(),
        constraint: None,
        stop: Vec::new(),
        logprobs: None,
        priority: sessions::Priority::Normal,
        speculate: 0,
    };
    let asked = Asked { work, least: 0, echo, tools: None, first: true };
    let request = axum::http::Request::post("/v1/completions").body(axum::body::Body::empty());
    let record = Arc::new(Record::new(&request.unwrap(), None));
    let mut answering = Answering::new(Arc::new(served()), record, Default::default(), 1);
    let (to, events) = unbounded_channel();
    answering.add(events, &asked, &[]);
    (to, answering)
}

fn token(id: u32) -> Event {
    Event::Token { id, logprobs: None }
}

fn next(answering: &mut Answering) -> Next {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let next = runtime.block_on(answering.next());
    next.unwrap_or_else(|refusal| panic!("{}", refusal.message)).expect("a piece")
}

#[test]
fn tokens_that_came_together_are_one_piece() {
    let (to, mut answering) = answering();
    (0..3).for_each(|id| to.send(token(id)).unwrap());
    let piece = next(&mut answering);
    assert_eq!((piece.piece.text.as_str(), &piece.ending), ("0 1 2 ", &None));
    to.send(token(3)).unwrap();
    assert_eq!(next(&mut answering).piece.text, "3 ");
    // No more than a bound at once, and the ending with the last of them.
    (0..40).for_each(|_| to.send(token(7)).unwrap());
    to.send(Event::End(Finish::Length)).unwrap();
    assert_eq!(next(&mut answering).piece.text.len(), 2 * TOGETHER_MAX);
    let last = next(&mut answering);
    assert_eq!(last.piece.text.len(), 2 * (40 - TOGETHER_MAX));
    assert_eq!(last.ending.expect("the end").reason, "length");
    assert_eq!(answering.usage.completion, 44);
}

#[test]
fn answers_name_the_kernels_that_ran_them_and_count_what_was_cached() {
    let (to, mut answering) = answering();
    let print = |answering: &Answering| answering.served.fingerprint(answering.kernels);
    let kernels = answering.served.kernels.clone();
    let names: Vec<String> = kernels.names().map(|name| format!("amk-cuda-{name}")).collect();
    assert_eq!(print(&answering), names[0], "before there is a token");
    for event in [Event::Reused(128), Event::Kernel(1), token(1)] {
        to.send(event).unwrap();
    }
    next(&mut answering);
    assert_eq!(print(&answering), names[1]);
    to.send(Event::Kernel(0)).unwrap();
    to.send(token(2)).unwrap();
    next(&mut answering);
    let both = format!("amk-cuda-{}", kernels.names_of(3));
    assert_eq!((print(&answering), answering.usage.cached), (both.clone(), 128));
    let (id, model) = ("id".to_owned(), "m".to_owned());
    let heading = Heading {
        api: Api::Completions,
        id,
        created: 0,
        model,
        fingerprint: String::new(),
        scored: false,
        include_usage: false,
        tier: None,
        settings: Value::Null,
    };
    to.send(Event::End(Finish::Length)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let whole =
        runtime.block_on(answering.whole(&heading)).unwrap_or_else(|r| panic!("{}", r.message));
    assert_eq!(whole["system_fingerprint"], both);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 128);
}

/// The echo waits for the log probabilities of the prompt, whatever else is said before them.
#[test]
fn an_echoed_prompt_has_its_log_probabilities() {
    let echo = Prompt { ids: vec![4, 5], text: None };
    let (to, mut answering) = answering_with(Some(echo));
    let scores = Event::Prompt(Logprobs { chosen: -2.0, top: Vec::new() });
    for event in [Event::Begun, Event::Reused(1), Event::Kernel(1), scores, token(6)] {
        to.send(event).unwrap();
    }
    let piece = next(&mut answering).piece;
    assert_eq!(piece.text, "4 5 6 ");
    let logprobs: Vec<_> = piece.scored.iter().map(|scored| scored.logprob).collect();
    assert_eq!(logprobs[..2], [None, Some(-2.0)]);
}

/// An answer without tokens is of the kernel that ran its prompt, whatever sequences begin with since.
#[test]
fn an_answer_without_tokens_names_what_ran_its_prompt() {
    for ran in [0, 1] {
        let (to, mut answering) = answering();
        let kernels = answering.served.kernels.clone();
        // The engine says it when it is not the first one.
        (ran > 0).then(|| to.send(Event::Kernel(ran)).unwrap());
        to.send(Event::End(Finish::Length)).unwrap();
        next(&mut answering);
        kernels.begin_with(1 - ran);
        assert_eq!(kernels.names_of(answering.kernels()), kernels.names_of(1 << ran));
    }
}
