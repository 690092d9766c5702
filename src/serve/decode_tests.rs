//! The decode thread with a scripted engine: faults, clients that go, and the end.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::super::engine::PROMPT_SLICE;
use super::*;

/// Tokens of the scripted model.
const VOCAB: usize = 64;

/// A model whose next token is the sum of all before it. A sequence that is fed `POISON` breaks, and with `PLAGUE` all do.
#[derive(Clone, Default)]
struct Scripted {
    sums: BTreeMap<usize, u32>,
    /// Place and tokens of each call.
    fed: Arc<Mutex<Vec<(usize, usize)>>>,
}

const POISON: u32 = 60;
const PLAGUE: u32 = 61;

impl Engine for Scripted {
    fn begin(&mut self, place: usize) -> Result<(), Broken> {
        self.sums.insert(place, 0);
        Ok(())
    }

    fn feed(&mut self, place: usize, tokens: &[u32], read: bool) -> Result<Vec<f32>, Broken> {
        self.fed.lock().unwrap().push((place, tokens.len()));
        if tokens.contains(&POISON) {
            return Err(Broken::Sequence("poisoned".into()));
        }
        if tokens.contains(&PLAGUE) {
            self.sums.clear();
            return Err(Broken::All("the kernel left".into()));
        }
        let sum = self.sums.get_mut(&place).ok_or_else(|| Broken::Sequence("gone".into()))?;
        *sum += tokens.iter().sum::<u32>();
        let mut row = vec![0.0; if read { VOCAB } else { 0 }];
        if let Some(logit) = row.get_mut((*sum % 50) as usize) {
            *logit = 1.0;
        }
        Ok(row)
    }

    fn end(&mut self, place: usize) {
        self.sums.remove(&place);
    }
}

/// A greedy request for `limit` tokens.
fn job(prompt: &[u32], limit: u32, admission: &Admission) -> (Job, UnboundedReceiver<Event>) {
    let (to, events) = unbounded_channel();
    let work = Work {
        prompt: prompt.to_vec(),
        limit,
        sampling: Sampling::default(),
        stop: Vec::new(),
        logprobs: None,
        priority: Priority::Normal,
    };
    (Job { work, to, admitted: admission.enter().unwrap() }, events)
}

/// Everything that a request hears, and how it ended.
fn heard(mut events: UnboundedReceiver<Event>) -> (Vec<u32>, Option<Finish>) {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::End(finish) => return (tokens, Some(finish)),
        }
    }
    (tokens, None)
}

/// What the scripted model says after a prompt.
fn expected(prompt: &[u32], limit: u32) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..limit {
        all.push(all.iter().sum::<u32>() % 50);
    }
    all.split_off(prompt.len())
}

/// Runs a desk beside the test, until the test has dropped its sender.
fn beside(engine: Scripted, places: usize, test: impl FnOnce(Sender<Job>)) {
    std::thread::scope(|scope| {
        let (jobs, inbox) = channel();
        scope.spawn(move || Desk::new(Box::new(engine), places, Sequences::default()).run(&inbox));
        test(jobs);
    });
}

#[test]
fn a_request_that_breaks_breaks_alone() {
    let admission = Admission::new(100);
    beside(Scripted::default(), 4, |jobs| {
        // More requests than places; every third one is poisoned, in the middle of a prompt that takes several turns.
        let mut poisoned = vec![1; 40];
        poisoned[35] = POISON;
        let prompts: Vec<Vec<u32>> = (0..12)
            .map(|i| if i % 3 == 2 { poisoned.clone() } else { vec![i; 1 + 7 * i as usize] })
            .collect();
        let answers: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let (job, events) = job(prompt, 9, &admission);
                jobs.send(job).unwrap();
                events
            })
            .collect();
        for (prompt, events) in prompts.iter().zip(answers) {
            let (tokens, finish) = heard(events);
            if prompt.contains(&POISON) {
                assert_eq!((tokens, finish), (vec![], Some(Finish::Failed("poisoned".into()))));
            } else {
                assert_eq!((tokens, finish), (expected(prompt, 9), Some(Finish::Length)));
            }
        }
    });
    assert_eq!(admission.inside(), 0);
}

#[test]
fn a_lost_machine_ends_those_it_ran_and_no_others() {
    let admission = Admission::new(100);
    beside(Scripted::default(), 3, |jobs| {
        let prompts: [&[u32]; 5] = [&[1], &[PLAGUE], &[2], &[3], &[4]];
        let (made, answers): (Vec<_>, Vec<_>) =
            prompts.iter().map(|prompt| job(prompt, 50, &admission)).unzip();
        for job in made {
            jobs.send(job).unwrap();
        }
        let ends: Vec<_> = answers.into_iter().map(heard).collect();
        let failed = |end: &(Vec<u32>, Option<Finish>)| {
            end.1 == Some(Finish::Failed("the kernel left".into()))
        };
        assert!(failed(&ends[1]), "{ends:?}");
        // Each either was lost with it, or came later and is whole.
        for (prompt, end) in prompts.iter().zip(&ends) {
            assert!(failed(end) || end.0 == expected(prompt, 50), "{prompt:?}: {end:?}");
        }
        assert!(!failed(&ends[4]), "it had no session yet: {ends:?}");
    });
}

#[test]
fn nobody_decodes_for_a_client_that_has_gone() {
    let admission = Admission::new(100);
    let engine = Scripted::default();
    let fed = engine.fed.clone();
    beside(engine, 1, |jobs| {
        let (long, mut events) = job(&[1], u32::MAX, &admission);
        jobs.send(long).unwrap();
        assert!(matches!(events.blocking_recv(), Some(Event::Token { .. })));
        // This one waits for its turn, and goes before it comes.
        let (waiting, gone) = job(&[7; 17], 5, &admission);
        jobs.send(waiting).unwrap();
        drop(gone);
        drop(events);
        let (last, events) = job(&[2], 3, &admission);
        jobs.send(last).unwrap();
        assert_eq!(heard(events), (expected(&[2], 3), Some(Finish::Length)));
        assert_eq!(admission.inside(), 0);
    });
    assert!(fed.lock().unwrap().iter().all(|(_, tokens)| *tokens == 1), "the one that waited ran");
}

#[test]
fn prompts_give_way() {
    let admission = Admission::new(100);
    let engine = Scripted::default();
    let fed = engine.fed.clone();
    let (long, long_events) = job(&[1; 100], 1, &admission);
    let (short, short_events) = job(&[2], 3, &admission);
    beside(engine, 2, |jobs| {
        jobs.send(long).unwrap();
        jobs.send(short).unwrap();
        heard(long_events);
        heard(short_events);
    });
    let fed = fed.lock().unwrap();
    assert!(fed.iter().all(|(_, tokens)| *tokens <= PROMPT_SLICE as usize), "{fed:?}");
    let last_short = fed.iter().rposition(|(_, tokens)| *tokens == 1).unwrap();
    assert!(last_short < fed.len() - 1, "the short request waited for the long prompt: {fed:?}");
}

#[test]
fn an_end_in_the_middle_is_said() {
    let admission = Admission::new(2);
    let (long, mut events) = job(&[1], u32::MAX, &admission);
    let (waiting, other) = job(&[1], 5, &admission);
    assert!(admission.enter().is_none(), "two are inside");
    beside(Scripted::default(), 1, |jobs| {
        jobs.send(long).unwrap();
        jobs.send(waiting).unwrap();
        assert!(matches!(events.blocking_recv(), Some(Event::Token { .. })));
    });
    assert_eq!(heard(events).1, Some(Finish::Leaving));
    assert_eq!(heard(other), (vec![], Some(Finish::Leaving)));
}
