//! Tests without a device: bounds, and the encoding of batches and their completions.

use abi::{Completion, Ending, Submission};

use super::{Batch, Bounds, Sequence, Watched, Window, WindowDecoded, ending, submission};

const BOUNDS: Bounds = Bounds { seqs: 4, sessions: 6, vocab: 100, capacity: 64, rows: 8 };

fn seq(session: u32, position: u32) -> Sequence<'static> {
    Sequence { session, position, tokens: &[7], sampled: session == 5 }
}

/// In its prompt for `tokens` positions.
fn in_prompt(session: u32, tokens: usize) -> Sequence<'static> {
    static TOKENS: [u32; 300] = [7; 300];
    Sequence { tokens: &TOKENS[..tokens], ..seq(session, 0) }
}

#[test]
fn a_batch_within_its_bounds_is_accepted() {
    let seqs = [seq(5, 0), seq(0, 56), in_prompt(3, 9)];
    let batch = Batch { seqs: &seqs, steps: 8, stop: &[1], keep_logits: true };
    assert_eq!(BOUNDS.check(&batch), Ok(()));
    let alone = Batch { seqs: &seqs[..1], ..batch };
    assert_eq!(BOUNDS.check(&alone), Ok(()));
    let wide = Bounds { capacity: 400, ..BOUNDS };
    let seqs = [seq(1, 0), in_prompt(2, 256)];
    let long = Batch { seqs: &seqs, steps: 300, ..Batch::default() };
    assert_eq!(wide.check(&long), Ok(()));
    // The others are counted in a byte.
    let seqs = [seq(1, 0), in_prompt(2, 257)];
    let refused = wide.check(&Batch { seqs: &seqs, ..long }).expect_err("257 tokens");
    assert!(refused.contains("257 tokens"), "{refused}");
}

/// A batch (sequences, steps, stop tokens, whether logits are kept), and the expected message.
type Case<'a> = (&'a [Sequence<'a>], u32, &'a [u32], bool, &'a str);

/// Each case is one step beyond a batch that is accepted.
#[test]
fn a_batch_beyond_any_bound_is_refused_by_name() {
    let good = [seq(1, 56), seq(2, 0)];
    let cases: [Case<'_>; 13] = [
        (&[], 8, &[], false, "a batch of 0 sequences"),
        (&[seq(0, 0), seq(1, 0), seq(2, 0), seq(3, 0), seq(4, 0)], 8, &[], false, "5 sequences"),
        (&good, 0, &[], false, "without steps"),
        (&good, 8, &[0; 9], false, "9 stop tokens"),
        (&[seq(1, 0), seq(2, 0)], 9, &[], true, "9 rows of logits"),
        (&good, 9, &[], false, "sequence 0: 9 positions from 56"),
        (&[seq(1, 0), seq(2, u32::MAX)], 8, &[], false, "sequence 1: 8 positions from 4294967295"),
        (&[seq(1, 0), seq(6, 0)], 8, &[], false, "sequence 1: session 6 of 6"),
        (
            &[seq(1, 0), seq(2, 0), seq(1, 9)],
            8,
            &[],
            false,
            "sequence 2: session 1 is that of sequence 0",
        ),
        (&[Sequence { tokens: &[100], ..seq(1, 0) }], 8, &[], false, "sequence 0: token 100"),
        (&[Sequence { tokens: &[7, 100], ..seq(1, 0) }], 8, &[], false, "sequence 0: token 100"),
        (&[seq(1, 0), Sequence { tokens: &[], ..seq(2, 0) }], 8, &[], false, "no token to start"),
        (
            &[seq(1, 0), in_prompt(2, 10)],
            8,
            &[],
            false,
            "sequence 1: 10 tokens; a batch of 8 steps takes 9",
        ),
    ];
    for (seqs, steps, stop, keep_logits, expected) in cases {
        let batch = Batch { seqs, steps, stop, keep_logits };
        let refused = BOUNDS.check(&batch).expect_err(expected);
        assert!(refused.contains(expected), "{refused:?} does not say {expected:?}");
    }
}

#[test]
fn a_batch_is_written_sequence_by_sequence() {
    let mut seqs = [seq(5, 9), seq(0, 3), seq(1, 4), seq(2, 5), seq(4, 6)];
    (seqs[1].tokens, seqs[4].tokens) = (&[7; 3], &[7; 4]);
    let batch = Batch { seqs: &seqs, steps: 3, stop: &[11, 12], keep_logits: true };
    let s = submission(&batch);
    assert_eq!((s.seqs, s.steps, s.stop_len, s.flags), (5, 3, 2, abi::FLAG_KEEP_LOGITS));
    assert_eq!((s.session, s.position, s.forced), (0, 0, 0));
    assert_eq!(s.stop[..3], [11, 12, 0]);
    assert_eq!(s.seq_position, [9, 3, 4, 5, 6, 0, 0, 0]);
    assert_eq!(s.seq_session, [0x0201_0005, 4]);
    assert_eq!(s.seq_forced, [0x200, 3], "tokens after the first");
    assert_eq!(s.seq_sample, 1, "session 5 in sequence 0");
}

#[test]
fn one_sequence_alone_is_a_plain_decode() {
    let one = Sequence { tokens: &[7, 8], ..seq(5, 9) };
    let s = submission(&Batch { seqs: &[one], steps: 3, ..Batch::default() });
    let plain = Submission {
        command: s.command,
        session: 5,
        position: 9,
        steps: 3,
        forced: 11,
        flags: abi::FLAG_SAMPLE,
        seqs: 1,
        ..Submission::default()
    };
    assert_eq!(s, plain);
}

#[test]
fn endings_are_read_by_sequence() {
    let done = Completion { seq_endings: 0x3012_0000, ..Completion::default() };
    let read: Vec<Ending> = (0..8).filter_map(|seq| ending(&done, seq).ok()).collect();
    let end = Ending::Length;
    assert_eq!(read, [end, end, end, end, Ending::Yield, Ending::Stop, end, Ending::NoToken]);
    let plain = Completion { ending: Ending::Stop as u32, ..Completion::default() };
    assert_eq!(ending(&plain, 0).ok(), Some(Ending::Stop));
    let unknown = Completion { seq_endings: 0xf0, ..Completion::default() };
    assert!(ending(&unknown, 0).is_ok() && ending(&unknown, 1).is_err());
}

/// Sends commands that the host would refuse to the device itself: it rejects them and continues.
#[test]
fn the_device_refuses_what_it_cannot_run() {
    let Ok(info) = crate::Card::default().info() else {
        let required = std::env::var_os("AMK_REQUIRE_DEVICE").is_some();
        assert!(!required, "a device is required");
        eprintln!("skipped: no device");
        return;
    };
    let model = model::preset("smollm2-135m").expect("a preset");
    let target =
        ir::Target { sms: info.sms, ..ir::Target::by_name("h200").expect("a known target") };
    let config = ir::schedule::neutral_config(&model.graph, &target);
    let config = ir::schedule::validate(config, &model.graph, &target).expect("it is legal");
    let options = lower::Options { kv_capacity: 64 };
    let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
    let variant = vm_device::Variant { seqs: 4, ..crate::variant(&config.kernel, &model.graph) };
    let options = crate::BootOptions { sessions: 6, logits_rows: 8, ..Default::default() };
    let idle = super::Idle::boot(&model.graph, &*model.weights, &program, &variant, options);
    let launched = idle.expect("it boots").launch(variant, &program);
    let mut machine = launched.unwrap_or_else(|e| panic!("{}", e.1));
    let good = [seq(1, 3), seq(2, 4), seq(4, 60)];
    // Pages first: otherwise the missing pages would be the reason of every refusal.
    for of in &good {
        let memory = &mut machine.idle().memory;
        memory.pages.before(&mut memory.copier, of.session, 0..64).expect("there are pages");
    }
    let good = submission(&Batch { seqs: &good, steps: 4, ..Batch::default() });
    let second = |session: u32| {
        let mut bad = good;
        bad.seq_session[0] = bad.seq_session[0] & !0xff00 | session << 8;
        bad
    };
    let low = Submission { seq_position: [0; 8], ..good };
    let mut behind = good;
    behind.seq_position[1] = 61;
    for (bad, what) in [
        (Submission { seqs: 5, ..good }, "more sequences than the kernel has"),
        (Submission { seqs: u32::MAX, ..good }, "far more sequences"),
        (Submission { steps: 5, ..good }, "one step too many for the last sequence"),
        (Submission { steps: 0, ..good }, "no step"),
        (Submission { stop_len: 9, ..good }, "nine stop tokens"),
        (Submission { steps: 9, flags: abi::FLAG_KEEP_LOGITS, ..low }, "nine rows of logits"),
        (second(1), "a session twice"),
        (second(5), "a session without pages"),
        (second(6), "no such session"),
        (second(255), "far from any session"),
        (behind, "a position behind the cache"),
    ] {
        let limit = std::time::Duration::from_secs(2);
        let refused = machine.command(&bad, limit, Watched::default());
        let refused = refused.map(|done| done.seq_endings);
        assert!(matches!(refused, Err(crate::HostError::Request(_))), "{what}: {refused:?}");
    }
    let limit = std::time::Duration::from_secs(2);
    let done = machine.command(&good, limit, Watched::default()).expect("the good one runs");
    assert_eq!((done.steps, done.seq_endings), (4, 0));
    machine.stop().expect("it stops");
}

#[test]
fn windows_beyond_their_bounds_are_refused_by_name() {
    let good = Window { session: 5, position: 60, tokens: &[7, 8, 9, 1], ..Window::default() };
    let other = Window { session: 2, position: 9, tokens: &[3], ..Window::default() };
    let two = Window { tokens: &[7, 8], ..good };
    for good in
        [&[good][..], &[other], &[other, two], &[two, other, Window { session: 1, ..other }]]
    {
        assert_eq!(BOUNDS.check_windows(good), Ok(()));
    }
    for (bad, says) in [
        (&[][..], "0 windows with 0 positions; 1 to 4"),
        (&[Window { tokens: &[1; 5], position: 0, ..good }], "1 windows with 5 positions; 1 to 4"),
        (&[good, other], "2 windows with 5 positions; 1 to 4"),
        (&[Window { tokens: &[], ..good }, other], "window 0: an empty prompt"),
        (&[Window { position: 61, ..good }], "window 0: 4 positions from 61 exceed"),
        (&[Window { session: 6, ..good }], "session 6 of 6"),
        (&[other, Window { tokens: &[7, 100], ..good }], "window 1: token 100"),
        (&[two, Window { session: 5, ..other }], "window 1: session 5 is that of window 0 too"),
    ] {
        let why = BOUNDS.check_windows(bad).expect_err(says);
        assert!(why.contains(says), "{why} does not say {says:?}");
    }
}

/// Each position is a sequence of its own, at the place that the device finds it by.
#[test]
fn windows_are_a_command_of_one_step() {
    let three = Window { session: 3, position: 9, tokens: &[4, 5, 6], sampled: true };
    let windows = [Window { session: 7, position: 2, tokens: &[1], sampled: false }, three];
    let seqs: Vec<Sequence<'_>> = windows.iter().flat_map(super::sequences).collect();
    let batch = Batch { seqs: &seqs, steps: 1, ..Batch::default() };
    let command = submission(&batch);
    assert_eq!((command.seqs, command.steps, command.seq_sample), (4, 1, 0b1110));
    assert_eq!(command.seq_position[..4], [2, 9, 10, 11]);
    assert_eq!(command.seq_session[0].to_le_bytes(), [7, 3, 3, 3]);
    assert_eq!(command.seq_forced, [0; 2], "the token behind each is chosen");
}

#[test]
fn a_window_gives_its_right_guesses_and_the_choice_behind_them() {
    let of = |chosen: &[Option<u32>], guesses: &[u32]| {
        let chosen = chosen.to_vec();
        WindowDecoded { chosen }.accepted(guesses)
    };
    let all = [Some(4), Some(5), Some(6)];
    assert_eq!(of(&all, &[4, 5]), [4, 5, 6]);
    assert_eq!(of(&all, &[4, 9]), [4, 5]);
    assert_eq!(of(&all, &[9, 5]), [4]);
    assert_eq!(of(&all[..1], &[]), [4]);
    assert_eq!(of(&[Some(4), None, Some(6)], &[4, 6]), [4], "nothing can follow");
    assert_eq!(of(&[None, Some(5)], &[5]), [0; 0]);
}
