//! Faults on a real device. Without one these tests print `skipped`; with `AMK_REQUIRE_DEVICE=1` that is a failure.

use std::time::{Duration, Instant};

use abi::{ProgramHeader, Trap};
use ir::program::{Program, Verified};
use ir::schedule::{neutral_config, validate};
use ir::{KernelConfig, Target};
use model::Model;

use super::*;
use crate::pages::CACHE_POISON;

const DEADLINE: Duration = Duration::from_millis(300);

/// A booted toy with its program, or `None` if there is no device.
fn toy() -> Option<(Model, Verified<Program>, Variant, Idle)> {
    let info = match crate::Card::default().info() {
        Ok(info) => info,
        Err(error) => {
            assert!(
                std::env::var_os("AMK_REQUIRE_DEVICE").is_none(),
                "a device is required: {error}"
            );
            eprintln!("skipped: {error}");
            return None;
        }
    };
    let model = model::preset("toy-2l").expect("a preset");
    let target = Target { sms: info.sms, ..Target::by_name("h200").expect("a known target") };
    let config = validate(neutral_config(&model.graph, &target), &model.graph, &target)
        .expect("the default is legal");
    let program = lower::lower(&config, &model.graph, &target, lower::Options { kv_capacity: 64 })
        .expect("it lowers");
    let variant = crate::compile::variant(&KernelConfig::default(), &model.graph);
    let options = BootOptions { deadline: DEADLINE, ..BootOptions::default() };
    let idle =
        Idle::boot(&model.graph, &*model.weights, &program, &variant, options).expect("it boots");
    Some((model, program, variant, idle))
}

/// Sets the current program's counters back by half their range, so that no wait for one ever ends.
fn lose_signals(machine: &mut Resident, program: &Program) {
    let place = machine.current.place;
    let idle = machine.idle();
    let mut bytes = [0; size_of::<ProgramHeader>()];
    let base = idle.memory.regions[0].program(place);
    idle.memory.copier.download(base, &mut bytes).expect("the header");
    let header: ProgramHeader = bytemuck::pod_read_unaligned(&bytes);
    let counters = u64::from(program.counters) * 32;
    idle.memory.copier.fill(header.counters, counters, 0x80).expect("the counters");
}

#[test]
fn a_lost_signal_is_reported_in_time_and_the_machine_goes_on() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let before = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("it decodes");
    lose_signals(&mut machine, &program);
    let start = Instant::now();
    let error = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect_err("nothing is signalled");
    let waited = start.elapsed();
    let HostError::Trapped(status) = error else { panic!("{error}") };
    eprintln!("after {waited:?}: {}", crate::error::describe(&status));
    assert_eq!(Trap::new(status.trap), Some(Trap::CounterDeadline));
    assert!(status.need > 0 && status.have != status.need && status.epoch > 0);
    assert!(waited >= DEADLINE && waited < DEADLINE * 4, "{waited:?}");
    assert!(
        machine.decode(0, 0, &[1], 1, &[], false).is_err(),
        "a stopped machine takes no command"
    );
    let idle = machine.stop().expect("the kernel leaves by itself");
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let after = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("it decodes again");
    assert_eq!(after.tokens, before.tokens);
    machine.stop().expect("it stops");
}

#[test]
fn a_stop_token_ends_a_command_and_bad_requests_are_refused() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let all = machine.decode(0, 0, &[7], 16, &[], false).expect("it decodes").tokens;
    let cut = machine.decode(0, 0, &[7], 16, &all[3..4], false).expect("it decodes");
    let first = all.iter().position(|t| *t == all[3]).expect("it is there");
    assert_eq!(cut.ending, abi::Ending::Stop);
    assert_eq!(cut.tokens, all[..=first]);
    for (session, position, tokens) in
        [(9, 0, vec![1]), (0, 64, vec![1]), (0, 0, vec![u32::MAX]), (0, 0, vec![])]
    {
        let refused = machine.decode(session, position, &tokens, 1, &[], false);
        assert!(matches!(refused, Err(HostError::Request(_))), "{session} {position} {tokens:?}");
    }
    assert!(machine.ping().expect("it answers") < 1e5);
    machine.stop().expect("it stops");
}

#[test]
fn a_poisoned_session_holds_nothing() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    machine.poison_session(0).expect("the whole session");
    for tokens in [&[1, 2, 3][..], &[4; 20]] {
        machine.decode(0, 0, tokens, 1, &[], true).expect("it decodes");
        assert!(caches(&mut machine).iter().any(|&byte| byte != CACHE_POISON), "a command writes");
        machine.poison_session(0).expect("what was touched");
        assert!(
            caches(&mut machine).iter().all(|&byte| byte == CACHE_POISON),
            "{} positions",
            tokens.len()
        );
    }
    machine.poison_logits(2).expect("two rows");
    let rows = machine.logits(3).expect("three rows");
    assert!(rows[..2].iter().flatten().all(|value| value.is_nan()));
    assert!(rows[2].iter().all(|value| value.is_finite()), "the third row is left alone");
    machine.stop().expect("it stops");
}

/// A command that the host never sends: positions for which a session has no pages.
#[test]
fn a_command_for_positions_without_pages_is_refused_by_the_device() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let decode = Submission {
        command: Command::Decode as u32,
        steps: 3,
        forced: 3,
        ..Submission::default()
    };
    let limit = Duration::from_secs(5);
    let refused = machine.command(&decode, limit, Watched::default());
    assert!(matches!(refused, Err(HostError::Request(_))), "{refused:?}");
    let said = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("with pages it decodes");
    machine.command(&decode, limit, Watched::default()).expect("there are pages now");
    machine.end_session(0).expect("it ends");
    let refused = machine.command(&decode, limit, Watched::default());
    assert!(matches!(refused, Err(HostError::Request(_))), "given back: {refused:?}");
    let again = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("with new pages");
    assert_eq!(again.tokens, said.tokens);
    machine.stop().expect("it stops");
}

/// The bytes of the only session's pages.
fn caches(machine: &mut Resident) -> Vec<u8> {
    let idle = machine.idle();
    let Memory { residents, pages, copier, .. } = &idle.memory;
    let mut all = Vec::new();
    for layer in 0..residents.devices[0].caches.len() as u32 {
        for &page in pages.pool.held(0) {
            let mut bytes = vec![0; residents.devices[0].layout.page_bytes() as usize];
            copier.download(pages.place(layer, page), &mut bytes).expect("a page");
            all.extend(bytes);
        }
    }
    assert!(!all.is_empty(), "the session has pages");
    all
}

/// Set in the process that will lose its device.
const DIES: &str = "AMK_TEST_DIES";

/// An exception destroys the process's context, so it is provoked in a child process.
#[test]
fn a_kernel_that_dies_is_reported_before_any_limit() {
    if std::env::var_os(DIES).is_some() {
        return die();
    }
    let Some(booted) = toy() else { return };
    drop(booted);
    let name = "machine::tests::a_kernel_that_dies_is_reported_before_any_limit";
    let output = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", name, "--nocapture"])
        .env(DIES, "1")
        .output()
        .expect("it starts again");
    let said = String::from_utf8_lossy(&output.stderr);
    eprintln!("{said}");
    assert!(output.status.success(), "{said}");
}

/// Makes the workers read tasks at an unmapped address.
fn die() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let place = machine.current.place;
    let idle = machine.idle();
    let base = idle.memory.regions[0].program(place);
    let mut bytes = [0; size_of::<ProgramHeader>()];
    idle.memory.copier.download(base, &mut bytes).expect("the header");
    let mut header: ProgramHeader = bytemuck::pod_read_unaligned(&bytes);
    header.tasks = 128;
    let header = bytemuck::bytes_of(&header);
    idle.memory.copier.upload(base, header).expect("the header");
    let load =
        Submission { command: Command::LoadProgram as u32, program: base, ..Submission::default() };
    let limit = Duration::from_secs(60);
    let start = Instant::now();
    let died = machine.command(&load, limit, Watched::default()).and_then(|_| {
        let decode = Submission {
            command: Command::Decode as u32,
            steps: 1,
            forced: 1,
            ..Submission::default()
        };
        machine.command(&decode, limit, Watched::default())
    });
    let waited = start.elapsed();
    let error = died.expect_err("there are no tasks");
    eprintln!("after {waited:?}: {error}");
    assert!(matches!(error, HostError::Died(_)), "{error}");
    assert!(waited < limit / 10, "{waited:?}");
    assert!(machine.stop().is_err(), "the context is gone");
}

/// Data copied into fresh memory is not overwritten: its zeroing is complete, although it runs on a stream that ours do not wait for.
#[test]
fn fresh_memory_keeps_what_is_copied_in_at_once() {
    const BYTES: u64 = 1 << 30; // takes a card some 300 us to zero
    let Some((_, _, _, mut idle)) = toy() else { return };
    for round in 0..10 {
        let buffer = DeviceBuffer::zeroed(BYTES).expect("memory");
        let (copied, end) = ([0xa5; 4096], buffer.address + BYTES - 4096);
        idle.memory.copier.upload(end, &copied).expect("a copy");
        std::thread::sleep(Duration::from_millis(5)); // lets any work still running elsewhere finish
        let mut kept = [0; 4096];
        idle.memory.copier.download(end, &mut kept).expect("a copy");
        assert!(kept == copied, "round {round}: {:x?} ...", &kept[..8]);
    }
}
