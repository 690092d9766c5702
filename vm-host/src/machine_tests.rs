//! Faults on a real device. Without one these tests say `skipped`; with `AMK_REQUIRE_DEVICE=1` that is a failure.

use std::time::{Duration, Instant};

use abi::{ProgramHeader, Trap};
use ir::program::{Program, Verified};
use ir::schedule::{default_config, validate};
use ir::{KernelConfig, Target};
use model::Model;

use super::*;

const DEADLINE: Duration = Duration::from_millis(300);

/// A booted toy with its program, or nothing if there is no device.
fn toy() -> Option<(Model, Verified<Program>, Variant, Idle)> {
    let info = match crate::boot::device_info() {
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
    let config = validate(default_config(&model.graph, &target), &model.graph, &target)
        .expect("the default is legal");
    let program = lower::lower(&config, &model.graph, &target, lower::Options { kv_capacity: 64 })
        .expect("it lowers");
    let variant = crate::compile::variant(&KernelConfig::default(), &model.graph);
    let options = BootOptions { deadline: DEADLINE, ..BootOptions::default() };
    let idle =
        Idle::boot(&model.graph, &*model.weights, &program, &variant, options).expect("it boots");
    Some((model, program, variant, idle))
}

/// Sets the current program's counters back by half their range, so that no wait for one is ever over.
fn lose_signals(machine: &mut Resident) {
    let place = machine.current.place;
    let idle = machine.idle();
    let mut bytes = [0; size_of::<ProgramHeader>()];
    let base = idle.memory.programs[place].address;
    download(&idle.copy, &idle.memory.bounce, base, &mut bytes).expect("the header");
    let header: ProgramHeader = bytemuck::pod_read_unaligned(&bytes);
    let counters = u64::from(header.counter_len) * 32;
    upload_fill(&idle.copy, &mut idle.memory.bounce, header.counters, counters, 0x80)
        .expect("the counters");
}

#[test]
fn a_lost_signal_is_reported_in_time_and_the_machine_goes_on() {
    let Some((_model, program, variant, idle)) = toy() else { return };
    let mut machine = idle.launch(variant, &program).unwrap_or_else(|e| panic!("{}", e.1));
    let before = machine.decode(0, 0, &[1, 2, 3], 8, &[], false).expect("it decodes");
    lose_signals(&mut machine);
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
    assert!(cut.stopped);
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
