//! The decode thread with a scripted engine: faults, disconnecting clients, and shutdown.

use std::collections::BTreeSet;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use ir::sampling::Sampling;
use sessions::{Priority, Tenant};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::engine::{Advanced, How, Observer, PROMPT_SLICE, WeightsAt, pieces};
use crate::host_rules::HostRules;
use crate::sequence::SLICE;

/// Tokens of the scripted model.
const VOCAB: usize = 64;

/// A model whose next token is the sum of all previous ones (mod 50). `POISON` breaks the sequence that is fed it, and `PLAGUE` breaks all.
#[derive(Clone, Default)]
struct Scripted {
    sums: BTreeMap<usize, u32>,
    /// Place and positions of each call.
    fed: Arc<Mutex<Vec<(usize, usize)>>>,
    /// Whether it samples itself, like the resident kernel, and the number of its early yields.
    chooses: bool,
    preempted: Arc<Mutex<usize>>,
    /// Its batch size, if it samples; 0 counts as 1.
    width: usize,
    /// The places of each command in which it sampled.
    commands: Arc<Mutex<Vec<Vec<usize>>>>,
    /// The most positions of a step with windows; 0 counts as 1. The places of each such step, and the positions of each.
    window: usize,
    windows: Arc<Mutex<Vec<Windows>>>,
    /// Whether it runs prompts in chunks, without their last token.
    chunks: bool,
    /// Whether sequences share pages of their prompts: the tokens of each place, and those of the pages that were run.
    shares: bool,
    texts: BTreeMap<usize, Vec<u32>>,
    pages: BTreeSet<Vec<u32>>,
    /// Positions that were run.
    read: Arc<Mutex<usize>>,
    /// The most positions of all sequences together, if limited, and the reservation of each.
    room: Option<u64>,
    promised: BTreeMap<usize, u64>,
    /// The most concurrent sequences so far.
    beside: Arc<Mutex<usize>>,
    /// The call in which the whole machine fails when a sequence of [`FATAL`] positions begins.
    fault: Option<Fault>,
    /// Whether that failure is permanent, and its reason.
    fatal: bool,
    lost: Option<String>,
    /// Where its weights are.
    weights_at: Arc<Mutex<WeightsAt>>,
    /// Its clock, if it has one: then its chunks run layer by layer.
    clock: Option<slices::Clock>,
    /// Whether it samples under masks, and the places that have them.
    masks: bool,
    masked: BTreeSet<usize>,
    /// Steps of such places so far, of which each fifth has its mask too late.
    masked_steps: usize,
}

/// The places of a step with windows, and the positions of each.
type Windows = Vec<(usize, usize)>;

/// A call in which the machine fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Begin,
    ChooseBy,
}

/// The length of the sequence that triggers the fault.
const FATAL: u64 = 77;

/// Marks the begin of a sequence in place of a number of positions.
const BEGUN: usize = usize::MAX;
/// The least number of tokens for which a prompt is a chunk.
const CHUNK: usize = 8;
const POISON: u32 = 60;
const PLAGUE: u32 = 61;

impl Scripted {
    /// The token of a row: of a place with masks the greatest that is allowed, if one is.
    fn pick(
        &self,
        place: usize,
        row: &[f32],
        mask: impl FnOnce(u32) -> Option<Vec<u32>>,
    ) -> Option<u32> {
        if !self.masked.contains(&place) {
            return row.iter().position(|logit| *logit == 1.0).map(|token| token as u32);
        }
        let allowed = mask(VOCAB as u32)?;
        let allowed = (0..VOCAB).filter(|token| allowed[token / 32] >> (token % 32) & 1 == 1);
        let greatest = allowed.max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a)));
        greatest.map(|token| token as u32)
    }

    /// Whether the mask of a place's next step comes too late.
    fn late(&mut self, place: usize) -> bool {
        self.masked_steps += usize::from(self.masked.contains(&place));
        self.masked.contains(&place) && self.masked_steps.is_multiple_of(5)
    }

    /// Fails all sequences if this is the faulty call.
    fn fail_in(&mut self, call: Fault, place: usize) -> Result<(), Broken> {
        if self.fault != Some(call) || self.promised.get(&place) != Some(&FATAL) {
            return Ok(());
        }
        self.sums.clear();
        self.lost = self.fatal.then(|| "no context".to_owned());
        Err(Broken::All("the machine fell".into()))
    }
}

impl Engine for Scripted {
    fn has_room(&mut self, positions: u64, _: &[u32]) -> bool {
        self.room.is_none_or(|room| self.promised.values().sum::<u64>() + positions <= room)
    }

    fn begin(&mut self, place: usize, positions: u64, prompt: &[u32]) -> Result<usize, Broken> {
        if !self.has_room(positions, prompt) {
            return Err(Broken::Sequence("no pages".into()));
        }
        self.promised.insert(place, positions);
        let mut most = self.beside.lock().unwrap();
        *most = self.promised.len().max(*most);
        self.sums.insert(place, 0);
        self.texts.insert(place, Vec::new());
        if self.chooses {
            self.fed.lock().unwrap().push((place, BEGUN));
        }
        drop(most);
        self.fail_in(Fault::Begin, place)?;
        Ok(0)
    }

    fn shares(&self) -> bool {
        self.shares
    }

    fn reuse(&mut self, place: usize, ran: usize, prompt: &[u32]) -> Result<usize, Broken> {
        let known = |to: &usize| *to < prompt.len() && self.pages.contains(&prompt[..*to]);
        let Some(to) = (ran + 1..=ran + alike::PAGE).find(known) else { return Ok(ran) };
        let more = &prompt[ran..to];
        *self.sums.entry(place).or_default() += more.iter().sum::<u32>();
        self.texts.entry(place).or_default().extend(more);
        self.reuse(place, to, prompt)
    }

    fn lost(&self) -> Option<String> {
        self.lost.clone()
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
        *self.read.lock().unwrap() += tokens.len();
        for token in tokens {
            let text = self.texts.entry(place).or_default();
            text.push(*token);
            if text.len().is_multiple_of(alike::PAGE) {
                self.pages.insert(text.clone());
            }
        }
        let mut row = vec![0.0; if read { VOCAB } else { 0 }];
        if let Some(logit) = row.get_mut((*sum % 50) as usize) {
            *logit = 1.0;
        }
        Ok(row)
    }

    fn end(&mut self, place: usize) {
        self.clock.iter_mut().for_each(|clock| clock.end(place));
        self.sums.remove(&place);
        self.promised.remove(&place);
    }

    fn choose_by(&mut self, place: usize, how: &How<'_>) -> Result<bool, Broken> {
        self.fail_in(Fault::ChooseBy, place)?;
        self.masked.remove(&place);
        if how.masked {
            self.masked.insert(place);
        }
        Ok(self.chooses && how.stop.is_empty() && (self.masks || !how.masked))
    }

    fn advance(
        &mut self,
        place: usize,
        tokens: &[u32],
        generate: u32,
        observer: &mut dyn Observer,
    ) -> Result<Advanced, Broken> {
        let chunked = self.chunks && tokens.len() >= CHUNK;
        if let Some(clock) = self.clock.as_mut().filter(|_| chunked)
            && !clock.chunk(place, tokens.len())
        {
            return Ok(Advanced { chosen: Vec::new(), ran: 0, stopped: false });
        }
        let steps = match chunked {
            true => tokens.len() - usize::from(generate > 0),
            false => tokens.len() + (generate as usize).saturating_sub(1),
        };
        observer.kernel(usize::from(self.width > 1)); // as `kernel` has it afterwards
        let mut all = tokens.to_vec();
        let (mut ran, mut told) = (0, all.len());
        while ran < steps {
            let samples = ran + 1 >= tokens.len() && generate > 0;
            if samples && self.late(place) {
                break;
            }
            let row = self.feed(place, &all[ran..=ran], true)?;
            self.fed.lock().unwrap().pop();
            ran += 1;
            self.clock.iter_mut().filter(|_| !chunked).for_each(|clock| clock.step(&[place]));
            if samples {
                if self.masked.contains(&place) {
                    all[told..].iter().for_each(|token| observer.token(0, *token));
                    told = all.len();
                }
                let Some(token) = self.pick(place, &row, |vocab| observer.mask(0, vocab)) else {
                    ran -= 1;
                    break;
                };
                all.push(token);
                // As on a device: all but the last ones are seen before the completion.
                if ran < steps && ran.is_multiple_of(2) {
                    all[told..].iter().for_each(|token| observer.token(0, *token));
                    told = all.len();
                }
            }
            if ran < steps && observer.yields() {
                *self.preempted.lock().unwrap() += 1;
                break;
            }
        }
        self.fed.lock().unwrap().push((place, ran));
        self.commands.lock().unwrap().push(vec![place]);
        let chosen = all.split_off(tokens.len());
        Ok(Advanced { chosen, ran, stopped: false })
    }

    fn weights(&self) -> WeightsAt {
        self.weights_at.lock().unwrap().clone()
    }

    fn seqs(&self) -> usize {
        self.width.max(1)
    }

    fn window(&self) -> usize {
        self.window.max(1)
    }

    fn speculate(
        &mut self,
        seqs: &[(usize, &[u32])],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        observer.kernel(0);
        let of = seqs.iter().map(|(place, tokens)| (*place, tokens.len())).collect();
        self.windows.lock().unwrap().push(of);
        let mut run = |&(place, tokens): &(usize, &[u32])| {
            let mut chosen = Vec::new();
            for (at, token) in tokens.iter().enumerate() {
                if at > 0 && chosen.last() != Some(token) {
                    break;
                }
                let row = self.feed(place, &[*token], true)?;
                self.fed.lock().unwrap().pop();
                chosen.push(row.iter().position(|logit| *logit == 1.0).unwrap() as u32);
            }
            let ran = chosen.len();
            Ok(Ok(Advanced { chosen, ran, stopped: false }))
        };
        seqs.iter().map(&mut run).collect()
    }

    fn prompt_slice(&self) -> u64 {
        self.clock.as_ref().map_or(PROMPT_SLICE, |_| pieces::SLICE)
    }

    fn beside_streams(&mut self, streams: bool) {
        self.clock.iter_mut().for_each(|clock| clock.pieces.streams = streams);
    }

    fn interrupted(&self) -> Option<usize> {
        self.clock.as_ref()?.begun.map(|(place, _)| place)
    }

    fn reads_in_batch(&self, tokens: usize) -> bool {
        !self.chunks || tokens < CHUNK
    }

    /// As a machine with a kernel for one sequence: the second of its list.
    fn kernel(&self) -> usize {
        let last = self.commands.lock().unwrap().last().map_or(0, Vec::len);
        usize::from(self.width > 1 && last == 1)
    }

    fn together(
        &mut self,
        seqs: &[(usize, &[u32])],
        steps: u32,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        assert!(seqs.len() > 1 && seqs.len() <= self.width, "{seqs:?}");
        let tokens = 1..=steps as usize + 1;
        assert!(seqs.iter().all(|(_, fed)| tokens.contains(&fed.len())), "{steps} of {seqs:?}");
        observer.kernel(0);
        let places: Vec<usize> = seqs.iter().map(|(place, _)| *place).collect();
        let mut texts: Vec<Vec<u32>> = seqs.iter().map(|(_, fed)| fed.to_vec()).collect();
        let mut broken = vec![None; seqs.len()];
        let mut told: Vec<usize> = texts.iter().map(Vec::len).collect();
        let mut ran = 0;
        let mut without = vec![0; seqs.len()];
        while ran < steps as usize && broken.iter().all(Option::is_none) && !without.contains(&1) {
            for (index, place) in places.iter().enumerate() {
                let text = &mut texts[index];
                if text.len() == ran + 1 && self.late(*place) {
                    without[index] = 1;
                    continue;
                }
                let fed = self.feed(*place, &text[ran..=ran], true);
                self.fed.lock().unwrap().pop();
                match fed {
                    // The next token of the prompt is there already.
                    Ok(_) if text.len() > ran + 1 => {}
                    Ok(row) => {
                        if self.masked.contains(place) {
                            text.iter().skip(told[index]).for_each(|t| observer.token(index, *t));
                            told[index] = text.len().max(told[index]);
                        }
                        match self.pick(*place, &row, |vocab| observer.mask(index, vocab)) {
                            Some(token) => text.push(token),
                            None => without[index] = 1,
                        }
                    }
                    Err(Broken::Sequence(why)) => broken[index] = Some(why),
                    Err(all) => return Err(all),
                }
            }
            ran += 1;
            self.clock.iter_mut().for_each(|clock| clock.step(&places));
            if ran.is_multiple_of(2) && ran < steps as usize && broken.iter().all(Option::is_none) {
                for (index, (text, told)) in texts.iter().zip(&mut told).enumerate() {
                    text.iter().skip(*told).for_each(|token| observer.token(index, *token));
                    *told = text.len().max(*told);
                }
            }
            if ran < steps as usize && observer.yields() {
                *self.preempted.lock().unwrap() += 1;
                break;
            }
        }
        self.commands.lock().unwrap().push(places);
        let mut done = Vec::new();
        let seqs = seqs.iter().zip(without);
        for ((mut text, broken), ((_, fed), without)) in texts.into_iter().zip(broken).zip(seqs) {
            let chosen = text.split_off(fed.len());
            let ran = ran - without;
            done.push(broken.map_or(Ok(Advanced { chosen, ran, stopped: false }), Err));
        }
        Ok(done)
    }
}

#[path = "slices_tests.rs"]
mod slices;
#[path = "together_tests.rs"]
mod together;
#[path = "weights_tests.rs"]
mod weights;

/// A greedy request for `limit` tokens.
fn job(prompt: &[u32], limit: u32, admission: &Admission) -> (Job, UnboundedReceiver<Event>) {
    let (to, events) = unbounded_channel();
    let work = Work {
        prompt: prompt.to_vec(),
        limit,
        sampling: Sampling::default(),
        host: HostRules::default(),
        constraint: None,
        stop: Vec::new(),
        logprobs: None,
        priority: Priority::Normal,
        speculate: 0,
    };
    let (tenant, admitted) = (Tenant::default(), admission.enter().unwrap());
    (Job { work, tenant, to, admitted, arrived_ns: telemetry::now_ns() }, events)
}

/// The event after the first, which says that the request has a place.
fn begun(events: &mut UnboundedReceiver<Event>) -> Option<Event> {
    assert_eq!(events.blocking_recv(), Some(Event::Begun));
    events.blocking_recv()
}

/// All tokens that a request receives, and its ending.
fn heard(mut events: UnboundedReceiver<Event>) -> (Vec<u32>, Option<Finish>) {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Begun | Event::Prompt(_) | Event::Reused(_) | Event::Kernel(_) => {}
            Event::End(finish) => return (tokens, Some(finish)),
        }
    }
    (tokens, None)
}

/// The tokens of a prompt are scored before the first token is sampled, on machines that sample, too.
#[test]
fn a_prompt_is_scored_in_order() {
    for chooses in [false, true] {
        let engine = Scripted { chooses, ..Scripted::default() };
        let (jobs, inbox) = channel();
        let admission = Admission::new(1);
        let prompt: Vec<u32> = (0..40).map(|i| i % 7).collect();
        let (mut job, mut events) = job(&prompt, 1, &admission);
        (job.work.host.score_prompt, job.work.logprobs) = (true, Some(1));
        jobs.send(job).unwrap();
        let loops = EngineLoop::new(Box::new(engine), 1, Sequences::default());
        let thread = std::thread::spawn(move || {
            let mut heard = Vec::from_iter(begun(&mut events));
            while let Some(event) = events.blocking_recv() {
                heard.push(event);
            }
            drop(jobs);
            heard
        });
        loops.run(&inbox).unwrap();
        let heard = thread.join().unwrap();
        let mut sum = 0;
        for (index, event) in heard[..39].iter().enumerate() {
            sum += prompt[index];
            let Event::Prompt(logprobs) = event else { panic!("{index}: {event:?}") };
            assert_eq!(
                logprobs.top[0].0,
                sum % 50,
                "{index}: the likeliest after its predecessors"
            );
        }
        assert!(matches!(heard[39], Event::Token { logprobs: Some(_), .. }), "{:?}", heard[39]);
        assert_eq!(heard[40..], [Event::End(Finish::Length)]);
    }
}

/// The tokens of the scripted model after a prompt.
fn expected(prompt: &[u32], limit: u32) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for _ in 0..limit {
        all.push(all.iter().sum::<u32>() % 50);
    }
    all.split_off(prompt.len())
}

/// Runs an engine loop concurrently with the test, until the test has dropped its sender.
fn beside(engine: Scripted, places: usize, test: impl FnOnce(Sender<Job>)) {
    said_beside(engine, places, Sequences::default(), test);
}

/// The same with telemetry of the sequences.
fn said_beside(engine: Scripted, places: usize, said: Sequences, test: impl FnOnce(Sender<Job>)) {
    std::thread::scope(|scope| {
        let (jobs, inbox) = channel();
        let engine_loop =
            scope.spawn(move || EngineLoop::new(Box::new(engine), places, said).run(&inbox));
        test(jobs);
        assert_eq!(engine_loop.join().unwrap(), Ok(()));
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
        // Each one was either lost with it, or arrived later and is complete.
        for (prompt, end) in prompts.iter().zip(&ends) {
            assert!(failed(end) || end.0 == expected(prompt, 50), "{prompt:?}: {end:?}");
        }
        assert!(!failed(&ends[4]), "it had no session yet: {ends:?}");
    });
}

/// The machine fails for all sequences when a request begins: the current ones end too, and the next one finds a working machine.
#[test]
fn a_machine_that_fails_as_a_request_begins_ends_all_of_them() {
    for fault in [Fault::Begin, Fault::ChooseBy] {
        let admission = Admission::new(100);
        let engine = Scripted { chooses: true, fault: Some(fault), ..Scripted::default() };
        beside(engine, 4, |jobs| {
            let (long, mut events) = job(&[1], u32::MAX, &admission);
            jobs.send(long).unwrap();
            assert!(matches!(begun(&mut events), Some(Event::Token { .. })));
            let (fatal, ended) = job(&[2; 7], 70, &admission);
            jobs.send(fatal).unwrap();
            let failed = Some(Finish::Failed("the machine fell".into()));
            assert_eq!(heard(ended), (vec![], failed.clone()), "{fault:?}");
            assert_eq!(heard(events).1, failed, "{fault:?}: it went on without its caches");
            let (next, events) = job(&[3], 9, &admission);
            jobs.send(next).unwrap();
            assert_eq!(heard(events), (expected(&[3], 9), Some(Finish::Length)));
        });
        assert_eq!(admission.inside(), 0);
    }
}

#[test]
fn a_machine_that_is_lost_ends_the_desk_and_everybody_is_told() {
    let admission = Admission::new(100);
    let engine =
        Scripted { fault: Some(Fault::Begin), fatal: true, chooses: true, ..Scripted::default() };
    let (jobs, inbox) = channel();
    let prompts: [&[u32]; 4] = [&[1], &[2; 7], &[3], &[4]];
    let limits = [u32::MAX, 70, 5, 5];
    let mut answers = Vec::new();
    for (prompt, limit) in prompts.into_iter().zip(limits) {
        let (job, events) = job(prompt, limit, &admission);
        jobs.send(job).unwrap();
        answers.push(events);
    }
    let worked = EngineLoop::new(Box::new(engine), 2, Sequences::default()).run(&inbox);
    assert_eq!(worked, Err("no context".into()));
    drop(jobs);
    let ends: Vec<_> = answers.into_iter().map(|events| heard(events).1).collect();
    let failed = |why: &str| Some(Finish::Failed(why.into()));
    let (fell, lost) = (failed("the machine fell"), failed("no context"));
    assert_eq!(ends, [fell.clone(), fell, lost.clone(), lost]);
    assert_eq!(admission.inside(), 0);
    let exit = super::super::lost("no context").exit;
    assert_eq!(exit, crate::failure::Exit::Missing);
}

#[test]
fn requests_wait_for_room_in_line_and_what_can_never_fit_is_refused() {
    let admission = Admission::new(100);
    let engine = Scripted { room: Some(100), ..Scripted::default() };
    let beside_each_other = engine.beside.clone();
    beside(engine, 8, |jobs| {
        // Two requests of forty positions fit at a time, though there are eight places; the sixth never fits.
        let (made, answers): (Vec<_>, Vec<_>) =
            (0..12).map(|i| job(&[i; 20], if i == 5 { 81 } else { 20 }, &admission)).unzip();
        for job in made {
            jobs.send(job).unwrap();
        }
        for (i, end) in answers.into_iter().map(heard).enumerate() {
            let want = match i {
                5 => (vec![], Some(Finish::Failed("no pages".into()))),
                _ => (expected(&[i as u32; 20], 20), Some(Finish::Length)),
            };
            assert_eq!(end, want, "request {i}");
        }
    });
    assert_eq!((*beside_each_other.lock().unwrap(), admission.inside()), (2, 0));
}

#[test]
fn nobody_decodes_for_a_client_that_has_gone() {
    let admission = Admission::new(100);
    let engine = Scripted::default();
    let fed = engine.fed.clone();
    beside(engine, 1, |jobs| {
        let (long, mut events) = job(&[1], u32::MAX, &admission);
        jobs.send(long).unwrap();
        assert!(matches!(begun(&mut events), Some(Event::Token { .. })));
        // This one waits for its turn, and disconnects before it.
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
fn prompts_yield() {
    let admission = Admission::new(100);
    let engine = Scripted::default();
    let fed = engine.fed.clone();
    let (long, long_events) = job(&[1; 100], 1, &admission);
    let (short, short_events) = job(&[2], 3, &admission);
    beside(engine, 2, |jobs| {
        // The engine cannot finish its first call before both are sent.
        let first_call = fed.lock().unwrap();
        jobs.send(long).unwrap();
        jobs.send(short).unwrap();
        drop(first_call);
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
        assert!(matches!(begun(&mut events), Some(Event::Token { .. })));
    });
    assert_eq!(heard(events).1, Some(Finish::Leaving));
    assert_eq!(heard(other), (vec![], Some(Finish::Leaving)));
}

/// Sixty-four requests of every kind on a machine that samples: long ones, broken ones, disconnecting clients.
#[test]
fn sixty_four_hostile_requests_wait_no_longer_than_they_must() {
    const ALL: usize = abi::SESSIONS_MAX as usize;
    let admission = Admission::new(ALL + 1);
    let engine = Scripted { chooses: true, ..Scripted::default() };
    let (fed, preempted) = (engine.fed.clone(), engine.preempted.clone());
    let priority = |i: usize| Priority::ALL[if i == 0 { 0 } else { i % 3 }];
    let prompt = |i: usize| {
        let mut prompt = vec![i as u32 % 50; 1 + 13 * i % 90];
        if i % 9 == 4 {
            prompt.push(POISON);
        }
        prompt
    };
    let limit = |i: usize| 20 + 37 * i as u32 % 300;
    let (mut made, mut answers) = (Vec::new(), Vec::new());
    for i in 0..ALL {
        let (mut job, events) = job(&prompt(i), limit(i), &admission);
        job.work.priority = priority(i);
        made.push(job);
        answers.push(events);
    }
    let late = job(&[3], 40, &admission);
    beside(engine, ALL, |jobs| {
        for job in made {
            jobs.send(job).unwrap();
        }
        let mut answers: Vec<_> = answers.into_iter().map(Some).collect();
        // Some clients receive one token and disconnect.
        for i in (0..ALL).filter(|i| i % 7 == 3 && i % 9 != 4) {
            let mut events = answers[i].take().unwrap();
            assert!(matches!(begun(&mut events), Some(Event::Token { .. })));
        }
        jobs.send(late.0).unwrap();
        for (i, events) in answers.into_iter().enumerate() {
            let Some(events) = events else { continue };
            let (tokens, finish) = heard(events);
            if i % 9 == 4 {
                assert_eq!((tokens, finish), (vec![], Some(Finish::Failed("poisoned".into()))));
            } else {
                let expected = expected(&prompt(i), limit(i));
                assert_eq!((tokens, finish), (expected, Some(Finish::Length)), "request {i}");
            }
        }
        assert_eq!(heard(late.1).0, expected(&[3], 40));
    });
    assert_eq!(admission.inside(), 0);
    let calls = fed.lock().unwrap();
    let bound = Scheduler::new(ALL).longest_wait(Priority::Low) as usize;
    let (mut turns, mut longest) = (0, 0);
    let mut before: BTreeMap<usize, usize> = BTreeMap::new();
    for (place, ran) in calls.iter() {
        if *ran == BEGUN {
            before.remove(place);
            continue;
        }
        assert!(*ran <= SLICE);
        if let Some(last) = before.insert(*place, turns) {
            longest = longest.max(turns - last - 1);
        }
        turns += 1;
    }
    assert!(longest > 63 && longest <= bound, "somebody waited {longest} turns of {bound}");
    let preempted = *preempted.lock().unwrap();
    eprintln!("{turns} turns, {preempted} of them yielded early, the longest wait was {longest}");
}

/// One tenant offers ten times as much as the other; each begins every other request while both wait.
#[test]
fn tenants_share_places_whatever_they_offer() {
    let admission = Admission::new(110);
    let engine = Scripted { chooses: true, ..Scripted::default() };
    let fed = engine.fed.clone();
    let mut made = Vec::new();
    for (name, limit, count) in [("a", 60, 100), ("b", 50, 10)] {
        for _ in 0..count {
            let (mut job, events) = job(&[1], limit, &admission);
            job.tenant = Tenant { name: name.into(), share: 1 };
            made.push((job, events));
        }
    }
    beside(engine, 4, |jobs| {
        let (sent, answers): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        sent.into_iter().for_each(|job| jobs.send(job).unwrap());
        answers.into_iter().for_each(|events| assert_eq!(heard(events).1, Some(Finish::Length)));
    });
    // The positions of each request, in the order of their beginnings.
    let (mut latest, mut ran) = (BTreeMap::new(), Vec::new());
    for (place, positions) in fed.lock().unwrap().iter() {
        if *positions == BEGUN {
            latest.insert(*place, ran.len());
            ran.push(0);
        } else {
            ran[latest[place]] += positions;
        }
    }
    assert_eq!(ran.len(), 110);
    let last = ran.iter().rposition(|positions| *positions <= 50).unwrap();
    assert!((15..=26).contains(&last), "b's tenth request was number {last}: {ran:?}");
}

/// A turn ends early when its client disconnects, or another request has arrived, which is taken.
#[test]
fn a_turn_yields() {
    let admission = Admission::new(3);
    let (first, events) = job(&[1], 60, &admission);
    let mut engine = Scripted { chooses: true, ..Scripted::default() };
    let mut running = Running::new(first);
    running.sequence.begin(&mut engine, 0).unwrap();
    let ((jobs, inbox), mut waiting) = (channel(), Fair::default());
    let mut turn =
        || running.turn(&mut engine, None, (0, 8), &mut || takes(&inbox, &mut waiting)).unwrap();
    assert_eq!(turn(), (8, None));
    let entered = admission.enter();
    assert_eq!(turn(), (8, None), "a request that is still being read stops nobody");
    jobs.send(job(&[2], 1, &admission).0).unwrap();
    assert_eq!(turn(), (1, None), "it has come");
    assert_eq!(turn(), (8, None), "it waits");
    drop(events);
    assert_eq!(turn(), (1, None), "nobody listens");
    drop(entered);
    assert_eq!((waiting.len(), *engine.preempted.lock().unwrap()), (1, 2));
    assert_eq!(running.sequence.chosen, expected(&[1], 26));
}
