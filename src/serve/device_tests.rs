//! The decode thread on a real card: concurrent sessions on the resident kernel. Without a device it prints `skipped`;
//! with `AMK_REQUIRE_DEVICE=1` that is a failure.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use ir::sampling::Sampling;
use sessions::{Priority, Tenant};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::constraint::tests::Even;
use crate::context::Context;
use crate::engine::Megakernel;

const SESSIONS: u32 = 16;

/// A request, and when its client disconnects.
struct Wanted {
    work: Work,
    /// The client disconnects after this many tokens.
    goes: Option<usize>,
}

fn wanted(i: u32, vocab: u32) -> Wanted {
    let plain = Sampling { seed: u64::from(i), ..Sampling::default() };
    let at = Sampling { temperature: 0.8, ..plain.clone() };
    let bias = BTreeMap::from([(7 * i % vocab, 4.0), (11, f32::NEG_INFINITY)]);
    let sampling = match i % 6 {
        0 => plain,
        1 => at,
        2 => Sampling { top_p: 0.9, repetition_penalty: 1.3, ..at },
        3 => Sampling { top_k: 40, min_p: 0.01, ..at },
        4 => Sampling { bias, repetition_penalty: 1.1, ..plain },
        _ => Sampling { bias, top_k: 100, top_p: 0.95, temperature: 1.3, ..at },
    };
    let work = Work {
        prompt: (0..1 + 9 * i % 70).map(|k| (k * 131 + i * 977) % vocab).collect(),
        limit: 20 + 13 * i % 60,
        sampling,
        host: crate::host_rules::HostRules::default(),
        constraint: None,
        stop: Vec::new(),
        // Some are sampled on the host, from rows.
        logprobs: (i % 8 == 6).then_some(1),
        priority: Priority::ALL[i as usize % 3],
        speculate: 0,
    };
    Wanted { work, goes: (i % 5 == 4).then_some(3) }
}

/// The tokens that a client receives until the end, or until it disconnects.
fn listen(mut events: UnboundedReceiver<Event>, goes: Option<usize>) -> (Vec<u32>, Option<Finish>) {
    let mut tokens = Vec::new();
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Token { id, .. } => tokens.push(id),
            Event::Begun | Event::Prompt(_) | Event::Reused(_) | Event::Kernel(_) => {}
            Event::End(finish) => return (tokens, Some(finish)),
        }
        if goes == Some(tokens.len()) {
            break;
        }
    }
    (tokens, None)
}

/// Sends requests to an engine loop, all at once or one after the other, and returns the tokens of each.
fn heard(
    engine_loop: EngineLoop<'_>,
    wanted: Vec<Wanted>,
    together: bool,
) -> Vec<(Vec<u32>, Option<Finish>)> {
    let (jobs, inbox) = channel();
    let admission = Admission::new(wanted.len());
    std::thread::scope(|scope| {
        let clients = scope.spawn(move || {
            let mut answers = Vec::new();
            for Wanted { work, goes } in wanted {
                let (to, events) = unbounded_channel();
                let admitted = admission.enter().expect("a place in the queue");
                jobs.send(Job { work, tenant: Tenant::default(), to, admitted, arrived_ns: 0 })
                    .expect("the desk is there");
                let client = std::thread::spawn(move || listen(events, goes));
                if !together {
                    while !client.is_finished() {
                        std::thread::yield_now();
                    }
                }
                answers.push(client);
            }
            let heard =
                answers.into_iter().map(|client| client.join().expect("it listened")).collect();
            drop(jobs); // ends the engine loop
            heard
        });
        assert_eq!(engine_loop.run(&inbox), Ok(()));
        clients.join().expect("they were answered")
    })
}

/// Sixteen sessions with all kinds of settings, priorities and disconnecting clients: each gets the tokens that it gets
/// alone, and a broken one does not affect the others.
#[test]
fn sessions_on_the_kernel_say_what_each_says_alone() {
    if let Err(error) = vm_host::Card::default().info() {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required: {error}");
        return eprintln!("skipped: {error}");
    }
    let place =
        PlaceArgs { device: DeviceChoice::Cuda, kv_capacity: Some(256), ..PlaceArgs::default() };
    let context = Context::load("smollm2-135m", &place).unwrap_or_else(|f| panic!("{}", f.message));
    let config = crate::schedule_choice::reproducible(&context, 256);
    let program = context.lowered(&config);
    let program = Arc::new(program.unwrap_or_else(|f| panic!("{}", f.message)));
    let vocab = context.graph().vocab;
    let all = || {
        let mut all: Vec<Wanted> = (0..SESSIONS).map(|i| wanted(i, vocab)).collect();
        // Every token is banned, and more than the device's list holds, so the host samples. And an unchecked prompt with a bad token.
        all[9].work.sampling.bias = (0..vocab).map(|token| (token, f32::NEG_INFINITY)).collect();
        all[13].work.prompt = vec![1, 2, vocab, 3];
        // Greedy and not, with filters and a penalty; the last one has biases, too, and is sampled on the host.
        for i in [0, 1, 2, 3, 7, 4] {
            all[i].work.constraint = Some(Box::new(Even));
        }
        all
    };
    let run = |together: bool, masks: bool| {
        let gpu = context.open_here(true).unwrap_or_else(|f| panic!("{}", f.message));
        let mut gpu = gpu.expect("there is one");
        gpu.set_masks(masks);
        let handle = remote::Served::prepare(&mut gpu, &program, &config.kernel).expect("a kernel");
        gpu.serve(handle, SESSIONS, vm_host::KvPool::Full).expect("it boots");
        let engine = Megakernel::new(gpu, handle, SESSIONS as usize);
        let began = Instant::now();
        let engine_loop =
            EngineLoop::new(Box::new(engine), SESSIONS as usize, Sequences::default());
        let heard = heard(engine_loop, all(), together);
        let tokens: usize = heard.iter().map(|(tokens, _)| tokens.len()).sum();
        let took = began.elapsed();
        eprintln!("together {together}, masks {masks}: {tokens} tokens in {took:.1?}");
        heard
    };
    let (alone, together) = (run(false, false), [false, true].map(|masks| run(true, masks)));
    for (i, alone) in alone.iter().enumerate() {
        eprintln!("session {i}: {} tokens, {:?}", alone.0.len(), alone.1);
        assert_eq!(*alone, together[0][i], "session {i}");
        assert_eq!(*alone, together[1][i], "session {i}, sampled under masks");
        let broken = matches!(alone.1, Some(Finish::Failed(_)));
        assert_eq!(broken, i == 9 || i == 13, "session {i}: {:?}", alone.1);
    }
}

/// A server with two kernels: a lone sequence runs on the one for it, several on the other, and each is finished.
#[test]
fn a_lone_sequence_and_a_batch_have_kernels_of_their_own() {
    if let Err(error) = vm_host::Card::default().info() {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required: {error}");
        return eprintln!("skipped: {error}");
    }
    let place =
        PlaceArgs { device: DeviceChoice::Cuda, kv_capacity: Some(1024), ..PlaceArgs::default() };
    let context = Context::load("smollm2-135m", &place).unwrap_or_else(|f| panic!("{}", f.message));
    let config = crate::schedule_choice::reproducible(&context, 1024);
    let program = context.lowered(&config);
    let program = Arc::new(program.unwrap_or_else(|f| panic!("{}", f.message)));
    let gpu = context.open_here(true).unwrap_or_else(|f| panic!("{}", f.message));
    let mut gpu = gpu.expect("there is one");
    let [lone, batch] = [1, 8].map(|seqs| {
        gpu.set_seqs(seqs);
        remote::Served::prepare(&mut gpu, &program, &config.kernel).expect("a kernel")
    });
    gpu.serve(batch, 8, vm_host::KvPool::Full).expect("it boots");
    let engine = Megakernel::new(gpu, batch, 8).switching(Some(lone)).sharing();
    let (jobs, inbox) = channel();
    let admission = Admission::new(8);
    let engine_loop = EngineLoop::new(Box::new(engine), 8, Sequences::default());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // One, then four that begin alike, then one.
            for count in [1, 4, 1] {
                let asked = (0..count).map(|i| {
                    let mut wanted = wanted(0, 1000).work;
                    wanted.prompt = (0..300).chain(std::iter::once(i)).collect();
                    wanted.limit = 200;
                    let (to, events) = unbounded_channel();
                    let admitted = admission.enter().expect("a place in the queue");
                    jobs.send(Job {
                        work: wanted,
                        tenant: Tenant::default(),
                        to,
                        admitted,
                        arrived_ns: 0,
                    })
                    .expect("the loop is there");
                    events
                });
                for mut events in asked.collect::<Vec<_>>() {
                    let (mut kernels, mut tokens) = (vec![0], 0);
                    while let Some(event) = events.blocking_recv() {
                        match event {
                            Event::Kernel(kernel) => kernels.push(kernel),
                            Event::Token { .. } => tokens += 1,
                            Event::Begun | Event::Prompt(_) | Event::Reused(_) => {}
                            Event::End(finish) => assert_eq!(finish, Finish::Length),
                        }
                    }
                    eprintln!("{count} at once: {tokens} tokens on kernels {kernels:?}");
                    assert_eq!(tokens, 200);
                    assert_eq!(kernels.last() == Some(&1), count == 1, "{kernels:?}");
                }
            }
            drop(jobs);
        });
        assert_eq!(engine_loop.run(&inbox), Ok(()));
    });
}
