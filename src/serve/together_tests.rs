//! Batched sequences with a scripted engine.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::constraint::tests::Even;

/// What a client has heard.
type Heard = (Vec<u32>, Option<Finish>);

/// Runs these prompts on an engine with a given batch size. Returns the tokens of each request, and the places of each command.
fn served(
    prompts: &[Vec<u32>],
    limit: impl Fn(usize) -> u32,
    priority: impl Fn(usize) -> Priority,
    width: usize,
    places: usize,
) -> (Vec<Heard>, Vec<Vec<usize>>) {
    let admission = Admission::new(prompts.len());
    let engine = Scripted { chooses: true, width, ..Scripted::default() };
    let commands = engine.commands.clone();
    let (mut made, mut answers) = (Vec::new(), Vec::new());
    for (i, prompt) in prompts.iter().enumerate() {
        let (mut job, events) = job(prompt, limit(i), &admission);
        job.work.priority = priority(i);
        made.push(job);
        answers.push(events);
    }
    let mut ends = Vec::new();
    beside(engine, places, |jobs| {
        made.into_iter().for_each(|job| jobs.send(job).unwrap());
        ends = answers.into_iter().map(heard).collect();
    });
    assert_eq!(admission.inside(), 0);
    let commands = std::mem::take(&mut *commands.lock().unwrap());
    (ends, commands)
}

#[test]
fn sequences_that_decode_are_run_at_once_and_say_what_they_say_alone() {
    let prompts: Vec<Vec<u32>> = (0..24).map(|i| vec![i % 50; 1 + 7 * i as usize % 60]).collect();
    let limit = |i: usize| 30 + 11 * i as u32 % 90;
    for width in [2, 8] {
        let (ends, commands) = served(&prompts, limit, |_| Priority::Normal, width, prompts.len());
        for (i, (prompt, end)) in prompts.iter().zip(ends).enumerate() {
            assert_eq!(end, (expected(prompt, limit(i)), Some(Finish::Length)), "request {i}");
        }
        let full = commands.iter().filter(|places| places.len() == width).count();
        for places in &commands {
            let mut seen = places.clone();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), places.len(), "nobody is in two sequences: {places:?}");
        }
        let mut sizes = vec![0; width + 1];
        commands.iter().for_each(|places| sizes[places.len()] += 1);
        assert!(full >= 10, "commands of 0, 1, .. sequences: {sizes:?}");
    }
}

/// Runs requests that all wait before the loop begins. Returns their tokens, and the places of each command.
pub(super) fn awaited(
    engine: Scripted,
    asked: &[(Vec<u32>, u32)],
) -> (Vec<Heard>, Vec<Vec<usize>>) {
    awaited_on(engine, Sequences::default(), asked)
}

/// The same on a page.
fn awaited_on(
    engine: Scripted,
    said: Sequences,
    asked: &[(Vec<u32>, u32)],
) -> (Vec<Heard>, Vec<Vec<usize>>) {
    let admission = Admission::new(asked.len());
    let commands = engine.commands.clone();
    let (jobs, inbox) = channel();
    let send = |(prompt, limit): &(Vec<u32>, u32)| {
        let (job, events) = job(prompt, *limit, &admission);
        jobs.send(job).unwrap();
        events
    };
    let answers: Vec<_> = asked.iter().map(send).collect();
    let mut ends = Vec::new();
    std::thread::scope(|scope| {
        let (engine, places) = (Box::new(engine), asked.len());
        let all = scope.spawn(move || EngineLoop::new(engine, places, said).run(&inbox));
        ends = answers.into_iter().map(heard).collect();
        drop(jobs);
        assert_eq!(all.join().unwrap(), Ok(()));
    });
    for ((prompt, limit), end) in asked.iter().zip(&ends) {
        assert_eq!(*end, (expected(prompt, *limit), Some(Finish::Length)));
    }
    let commands = std::mem::take(&mut *commands.lock().unwrap());
    (ends, commands)
}

fn sizes(commands: &[Vec<usize>]) -> Vec<usize> {
    commands.iter().map(Vec::len).collect()
}

/// The machine samples `SLICE` tokens per command if nobody waits, and 16 if somebody does.
#[test]
fn commands_are_long_while_nobody_waits() {
    let engine = Scripted { chooses: true, ..Scripted::default() };
    let fed = engine.fed.clone();
    awaited(engine, &[(vec![1], 40), (vec![2; 20], 2 * SLICE as u32 + 44)]);
    let fed = fed.lock().unwrap();
    let ran = |of| fed.iter().filter(move |(place, ran)| *place == of && *ran != BEGUN);
    let ran = |of| ran(of).map(|(_, ran)| *ran).collect::<Vec<usize>>();
    assert_eq!(ran(0), [16, 16, 8], "{fed:?}");
    // A piece of the prompt, and its rest with new tokens beside the other; then alone.
    assert_eq!(ran(1), [16, 16, SLICE, SLICE, 31], "{fed:?}");

    let engine = Scripted { chooses: true, width: 4, ..Scripted::default() };
    let asked: Vec<_> = (0..4).map(|i| (vec![i], 2 * SLICE as u32 + 1)).collect();
    assert_eq!(sizes(&awaited(engine, &asked).1), [4; 3]);
    let engine = Scripted { chooses: true, width: 2, ..Scripted::default() };
    assert_eq!(sizes(&awaited(engine, &asked[..3]).1)[..6], [2; 6]);
}

/// Prompts are read in the batch, which ends where the first of them does, so that its first token is said at once.
#[test]
fn a_prompt_is_read_beside_others() {
    let engine = Scripted { chooses: true, width: 4, ..Scripted::default() };
    let asked: Vec<_> = (0..4).map(|i| (vec![i; 3], 3 * SLICE as u32 - 2)).collect();
    // A token each with the prompts, then the others in three commands.
    assert_eq!(sizes(&awaited(engine, &asked).1), [4; 4]);

    // One reads 40 tokens in a command, while two say 40; then all say another 40.
    let engine = Scripted { chooses: true, width: 4, ..Scripted::default() };
    let asked = [(vec![1], 80), (vec![2; 40], 41), (vec![3], 80)];
    assert_eq!(sizes(&awaited(engine, &asked).1), [3; 2]);
}

/// Where prompts are run in chunks, one that is too short for it is read in the batch.
#[test]
fn a_short_prompt_is_no_chunk() {
    for (length, alone) in [(CHUNK - 1, 0), (CHUNK, 4)] {
        let engine = Scripted { chooses: true, width: 4, chunks: true, ..Scripted::default() };
        let asked: Vec<_> = (0..4).map(|i| (vec![i; length], 10)).collect();
        let sizes = sizes(&awaited(engine, &asked).1);
        // The prompt, or its last token, with the first new one; then nine more.
        assert_eq!(sizes[alone..], [4; 2][..2 - usize::from(alone > 0)], "{length}: {sizes:?}");
        assert_eq!(sizes[..alone], vec![1; alone], "{length}: {sizes:?}");
    }
}

/// One of them reads the pages that all begin with, in batches or alone, and the others have them.
#[test]
fn prompts_that_begin_alike_are_read_once_in_batches_too() {
    let engine = Scripted { chooses: true, width: 4, shares: true, ..Scripted::default() };
    let read = engine.read.clone();
    let common = 2 * abi::KV_PAGE as usize;
    let mut asked: Vec<_> = (0..3).map(|i| ([vec![1; common], vec![i; 5]].concat(), 10)).collect();
    asked.push((vec![4], 300));
    let (_, commands) = awaited(engine, &asked);
    assert_eq!(*read.lock().unwrap(), common + 3 * (5 + 10 - 1) + 300);
    // The one that reads is beside the last, which decodes. The others wait, each for a turn in which it is given the pages.
    let sizes = sizes(&commands);
    assert_eq!(sizes[..18], [[2; 16].as_slice(), &[3, 4]].concat(), "{sizes:?}");
}

#[test]
fn batches_are_on_the_page() {
    let home = tempfile::tempdir().unwrap();
    let folder = telemetry::Folder::at(&home.path().join("amk"));
    let start = |edit: &mut telemetry::Edit<'_>| edit.head().places = 6;
    let (page, _) = telemetry::Publisher::new(&folder, start).unwrap();
    let engine = Scripted { chooses: true, width: 4, ..Scripted::default() };
    let asked: Vec<_> = (0..6).map(|i| (vec![i + 1], 40)).collect();
    let (_, commands) = awaited_on(engine, Sequences::new(&page, true), &asked);
    let mut seen = telemetry::Page::boxed();
    page.reader().read(&mut seen).unwrap();
    let batches: Vec<usize> = commands.iter().map(Vec::len).filter(|seqs| *seqs > 1).collect();
    assert!(batches.len() > 2, "{commands:?}");
    assert_eq!(seen.head.batches, batches.len() as u64);
    assert_eq!(seen.head.batched, batches.iter().sum::<usize>() as u64);
}

/// The sequence that breaks is fed its poison as the last token of its prompt, inside a batch.
#[test]
fn one_that_breaks_takes_nobody_with_it() {
    let mut prompts: Vec<Vec<u32>> = (0..6).map(|i| vec![i + 1]).collect();
    prompts[3] = vec![POISON];
    let (ends, commands) = served(&prompts, |_| 20, |_| Priority::Normal, 8, 6);
    for (prompt, end) in prompts.iter().zip(ends) {
        match prompt[0] {
            POISON => assert_eq!(end, (vec![], Some(Finish::Failed("poisoned".into())))),
            _ => assert_eq!(end, (expected(prompt, 20), Some(Finish::Length))),
        }
    }
    assert!(commands.iter().any(|places| places.len() > 1));
}

#[test]
fn a_machine_that_is_lost_ends_all_of_a_batch() {
    let mut prompts: Vec<Vec<u32>> = (0..6).map(|i| vec![i + 1]).collect();
    prompts[3] = vec![PLAGUE];
    // No request waits for a place: all are lost, or end before.
    let (ends, _) = served(&prompts, |_| 4000, |_| Priority::Normal, 8, 6);
    for (prompt, end) in prompts.iter().zip(ends) {
        let lost = end.1 == Some(Finish::Failed("the kernel left".into()));
        assert!(lost || end.0 == expected(prompt, 4000), "{prompt:?}: {:?}", end.1);
        assert!(lost || prompt[0] != PLAGUE);
    }
}

/// Long prompts of low priority, each in turns of its own, among requests that are run eight at a time.
#[test]
fn nobody_waits_longer_for_those_who_are_run_at_once() {
    const ALL: usize = abi::SESSIONS_MAX as usize;
    let prompts: Vec<Vec<u32>> =
        (0..ALL).map(|i| vec![1; if i % 8 == 0 { 200 } else { 1 }]).collect();
    let (ends, commands) = served(
        &prompts,
        |i| if i % 8 == 0 { 40 } else { 400 },
        |i| if i % 8 == 0 { Priority::Low } else { Priority::High },
        8,
        ALL,
    );
    assert!(ends.iter().all(|end| end.1 == Some(Finish::Length)));
    let bound = Scheduler::new(ALL).longest_wait(Priority::Low) as usize;
    let mut last = vec![None; ALL];
    let mut longest = 0;
    for (turn, places) in commands.iter().enumerate() {
        for place in places {
            if let Some(before) = last[*place].replace(turn) {
                longest = longest.max(turn - before - 1);
            }
        }
    }
    assert!(longest >= 5 && longest <= bound, "somebody waited {longest} turns of {bound}");
}

/// Five requests, of which some are under a rule, on a machine that samples under masks or not. Returns what each hears, and
/// how many batches there were of all sequences of a step.
fn ruled(masks: bool, under: &[usize]) -> (Vec<Heard>, usize) {
    let admission = Admission::new(5);
    let engine = Scripted { chooses: true, masks, width: 4, ..Scripted::default() };
    let commands = engine.commands.clone();
    let mut ends = Vec::new();
    beside(engine, 5, |jobs| {
        let answers: Vec<_> = (0..5)
            .map(|i| {
                let (mut job, events) = job(&[i as u32 + 1], 40, &admission);
                if under.contains(&i) {
                    job.work.constraint = Some(Box::new(Even));
                }
                jobs.send(job).unwrap();
                events
            })
            .collect();
        ends = answers.into_iter().map(heard).collect();
    });
    let batches = commands.lock().unwrap().iter().filter(|places| places.len() > 1).count();
    (ends, batches)
}

/// Its tokens are sampled on the host or under masks, and those of its neighbours as ever, in batches.
#[test]
fn a_sequence_under_a_rule_changes_none_beside_it() {
    let (free, _) = ruled(false, &[]);
    for masks in [false, true] {
        let (ends, batches) = ruled(masks, &[1, 3]);
        for i in [0, 2, 4] {
            assert_eq!(ends[i], free[i], "request {i}");
        }
        for i in [1, 3] {
            let (tokens, finish) = &ends[i];
            assert!(tokens.iter().all(|id| id % 2 == 0), "{tokens:?}");
            let complete = tokens.last() == Some(&44);
            assert_eq!(*finish, Some(if complete { Finish::Stop } else { Finish::Length }));
            assert_ne!(ends[i], free[i], "it would have said something else");
        }
        assert!(batches > 2, "the others still run together");
    }
}

/// Whoever samples, a text under a rule is the same: in batches, where masks come too late, and to the end of the rule.
#[test]
fn a_machine_with_masks_says_what_the_host_samples() {
    for under in [&[0, 1, 2, 3, 4][..], &[2], &[0, 4]] {
        let [(there, batches), (here, _)] = [true, false].map(|masks| ruled(masks, under));
        assert_eq!(there, here, "{under:?}");
        assert!(batches > 2, "those under a rule are in batches, too");
    }
}

/// Prompts in chunks that wait at the same time run one after the other, and their last tokens in one batch.
#[test]
fn prompts_in_chunks_that_wait_end_in_one_batch() {
    let engine = Scripted { chooses: true, width: 8, chunks: true, ..Scripted::default() };
    let asked: Vec<_> = (1..5).map(|i| (vec![i; 10], 20)).collect();
    let (_, commands) = awaited(engine, &asked);
    let sizes = sizes(&commands);
    let first = sizes.iter().position(|size| *size == 4).unwrap_or_else(|| panic!("{commands:?}"));
    assert!(first <= 6 && sizes[..first].iter().all(|size| *size == 1), "{commands:?}");
}

/// A client learns which kernel its tokens are of, before they come.
#[test]
fn a_change_of_the_kernel_is_told_before_its_tokens() {
    let admission = Admission::new(1);
    let engine = Scripted { chooses: true, width: 4, ..Scripted::default() };
    beside(engine, 1, |jobs| {
        let (job, mut events) = job(&[1, 2, 3], 40, &admission);
        jobs.send(job).unwrap();
        assert_eq!(begun(&mut events), Some(Event::Kernel(1)));
        let mut rest = Vec::new();
        while let Some(event) = events.blocking_recv() {
            rest.push(event);
        }
        assert_eq!(rest.len(), 41);
        assert!(!rest.contains(&Event::Kernel(0)) && !rest.contains(&Event::Kernel(1)), "{rest:?}");
    });
}

/// Sends requests, each with its prompt, its limit of tokens and its most guesses, to an engine with windows. Returns for each
/// step with windows how many positions each place had.
fn guessing(engine: Scripted, asked: &[(Vec<u32>, u32, u32)]) -> Vec<Windows> {
    let (windows, admission) = (engine.windows.clone(), Admission::new(asked.len()));
    let (jobs, inbox) = channel();
    let send = |(prompt, limit, guesses): &(Vec<u32>, u32, u32)| {
        let (mut job, events) = job(prompt, *limit, &admission);
        job.work.speculate = *guesses;
        jobs.send(job).unwrap();
        events
    };
    let answers: Vec<_> = asked.iter().map(send).collect();
    std::thread::scope(|scope| {
        let (engine, places) = (Box::new(engine), asked.len());
        let all =
            scope.spawn(move || EngineLoop::new(engine, places, Sequences::default()).run(&inbox));
        for ((prompt, limit, _), events) in asked.iter().zip(answers) {
            assert_eq!(heard(events), (expected(prompt, *limit), Some(Finish::Length)));
        }
        drop(jobs);
        assert_eq!(all.join().unwrap(), Ok(()));
    });
    std::mem::take(&mut *windows.lock().unwrap())
}

/// Their texts have a period of 20 tokens, so that most guesses are right.
#[test]
fn sequences_guess_beside_others_and_say_what_they_say_alone() {
    let asked = [(vec![1], 300, 7), (vec![3; 5], 300, 7), (vec![2; 9], 300, 0)];
    let engine = Scripted { chooses: true, width: 8, window: 8, ..Scripted::default() };
    let steps = guessing(engine, &asked);
    let beside: Vec<_> = steps.iter().filter(|of| of.len() > 1).collect();
    assert!(beside.len() > 20, "{steps:?}");
    let guesses = |place: usize| {
        let of = beside.iter().flat_map(|of| of.iter()).filter(|(at, _)| *at == place);
        of.map(|(_, positions)| positions - 1).sum::<usize>()
    };
    assert!(guesses(0) > 50 && guesses(1) > 50, "both guess: {beside:?}");
    assert_eq!(guesses(2), 0, "it asked for none");
    for of in beside {
        let positions: usize = of.iter().map(|(_, positions)| positions).sum();
        assert!((of.len() + 1..=8).contains(&positions), "{of:?}");
        let places: Vec<usize> = of.iter().map(|(place, _)| *place).collect();
        assert!(places.is_sorted_by(|a, b| a != b), "nobody is there twice: {places:?}");
    }
}

/// A batch that is full, machines without windows, and prompts that are read leave nothing to guesses.
#[test]
fn plain_sequences_come_first() {
    let asked: Vec<_> = (1..5).map(|i| (vec![i], 100 + 60 * i, 7)).collect();
    for window in [0, 4] {
        let engine = Scripted { chooses: true, width: 4, window, ..Scripted::default() };
        let steps = guessing(engine, &asked);
        assert!(steps.iter().all(|of| of.len() < 4), "{window}: {steps:?}");
        assert_eq!(steps.is_empty(), window == 0, "{window}: {steps:?}");
    }
    let mut asked = vec![(vec![1], 400, 7), (vec![3], 400, 7)];
    let engine = || Scripted { chooses: true, width: 8, window: 8, ..Scripted::default() };
    let of_two = guessing(engine(), &asked).len();
    asked.push((vec![2; 390], 1, 7));
    let steps = guessing(engine(), &asked);
    assert!(steps.iter().all(|of| of.len() < 3) && steps.len() < of_two / 2, "{steps:?}");
}

/// Every look at a page that is being written has each position of a window in one state, and all right guesses in one
/// sequence or among those that have left.
#[test]
fn ten_thousand_looks_at_windows_add_up() {
    const LOOKS: u64 = 10_000;
    let home = tempfile::tempdir().unwrap();
    let folder = telemetry::Folder::at(&home.path().join("amk"));
    let (page, _) = telemetry::Publisher::new(&folder, |edit| edit.head().places = 4).unwrap();
    let over = AtomicBool::new(false);
    let engine = Scripted { chooses: true, width: 8, window: 8, ..Scripted::default() };
    let (reader, said) = (page.reader(), Sequences::new(&page, true));
    let (mut seen, mut open) = (telemetry::Page::boxed(), 0);
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            said_beside(engine, 4, said, |jobs| {
                let admission = Admission::new(8);
                while !over.load(Ordering::Relaxed) {
                    let ask = |place: u32| {
                        let (mut job, events) = job(&[1 + place; 3], 300, &admission);
                        job.work.speculate = 7;
                        jobs.send(job).unwrap();
                        events
                    };
                    let events: Vec<_> = (0..4).map(ask).collect();
                    events.into_iter().for_each(|events| assert_eq!(heard(events).0.len(), 300));
                }
            });
        });
        // A look that fails ends the server too.
        let ends = Ends(&over);
        let began = Instant::now();
        for _ in 0..LOOKS {
            // A page that is written all the time may be torn at every attempt.
            while reader.read(&mut seen).is_err() {
                assert!(began.elapsed() < Duration::from_secs(120), "no look succeeds");
            }
            open += add_up(&crate::top::document::windows(&seen));
        }
        drop(ends);
        served.join().unwrap();
    });
    assert!(open > LOOKS as usize, "{open} open sequences were seen");
    reader.read(&mut seen).unwrap();
    let head = &seen.head;
    assert!(head.accepted > 1000, "{}", head.accepted);
    let left = [head.left_required, head.left_lookahead, head.left_accepted];
    assert_eq!(left, [head.windows, head.guessed, head.accepted]);
}

/// Ends a loop when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checks a look and returns the number of its open sequences.
fn add_up(windows: &serde_json::Value) -> usize {
    let open = windows["open"].as_array().unwrap();
    let mut accepted = windows["left"]["accepted"].as_u64().unwrap();
    for of in open {
        let count = |name: &str| of[name].as_u64().unwrap();
        let states = ["published", "claimed", "done", "wait_io", "yield", "requeue", "fault"];
        let in_states: u64 = states.into_iter().map(count).sum();
        assert_eq!(count("required") + count("lookahead"), in_states, "{of}");
        accepted += count("accepted");
    }
    assert_eq!(accepted, windows["accepted"].as_u64().unwrap(), "{windows}");
    open.len()
}
