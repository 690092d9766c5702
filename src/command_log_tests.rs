//! The file of a command log: its bound, its queue, and what is made of a damaged one.

use super::*;
use crate::cli::{DeviceChoice, PlaceArgs};
use crate::failure::Exit;

fn head() -> Head {
    let device = DeviceChoice::Cpu;
    let place = PlaceArgs { device, kv_capacity: Some(64), ..PlaceArgs::default() };
    let context = Context::load("toy", &place).unwrap();
    Head::new(&context, "generate", "cpu")
}

fn ending(session: u64) -> Entry {
    Entry::End { session, place: 0 }
}

#[test]
fn a_full_file_is_a_beginning_and_the_rest_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let most = 4096;
    let log = CommandLog::create(&path, &head(), most).unwrap();
    for session in 0..500 {
        log.push(telemetry::now_ns(), ending(session));
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    let ended = log.close();
    assert!(ended.entries > 5 && ended.dropped > 300, "{ended:?}");
    assert_eq!(ended.entries + ended.dropped, 500);
    assert!(std::fs::metadata(&path).unwrap().len() <= most);
    let found = Recorded::open(&path).unwrap();
    assert_eq!((found.dropped, &found.cut), (ended.dropped, &None));
    assert_eq!(found.lines.len() as u64, ended.entries);
    for (line, session) in found.lines.iter().zip(0..) {
        assert_eq!(line.entry, ending(session));
    }
    // Another log does not replace it.
    let refused = CommandLog::create(&path, &head(), most).err().unwrap();
    assert_eq!(refused.exit, Exit::Usage);
}

#[test]
fn a_full_queue_is_counted_and_never_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    // Nothing fits into the queue unless the thread waits for it just then.
    let log = CommandLog::with_queue(&path, &head(), 1 << 20, 0).unwrap();
    let began = std::time::Instant::now();
    for session in 0..10_000 {
        log.push(telemetry::now_ns(), ending(session));
    }
    assert!(began.elapsed() < std::time::Duration::from_secs(5));
    let ended = log.close();
    assert!(ended.dropped > 0, "{ended:?}");
    assert_eq!(ended.entries + ended.dropped, 10_000);
    let found = Recorded::open(&path).unwrap();
    assert_eq!((found.lines.len() as u64, found.dropped), (ended.entries, ended.dropped));
    log.push(0, ending(1)); // too late
    assert_eq!(Recorded::open(&path).unwrap().lines.len() as u64, ended.entries);
}

#[test]
fn a_log_whose_handles_are_gone_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log.jsonl");
    let log = CommandLog::create(&path, &head(), 1 << 20).unwrap();
    log.push(telemetry::now_ns(), ending(1));
    drop(log);
    let began = std::time::Instant::now();
    while Recorded::open(&path).is_ok_and(|found| found.cut.is_some()) {
        assert!(began.elapsed() < std::time::Duration::from_secs(20));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(Recorded::open(&path).unwrap().lines.len(), 1);
}

#[test]
fn entries_are_read_as_they_were_written() {
    let bias = [(3, f32::NEG_INFINITY), (5, -0.25)].into();
    let sampling = Sampling { temperature: 0.1, seed: u64::MAX, bias, ..Sampling::default() };
    let settings = Settings::from(&sampling);
    assert_eq!(Sampling::from(settings.clone()), sampling);
    let done = Done { tokens: vec![4, 5], ran: 3, stopped: false };
    let seqs = vec![Seq { session: 1, place: 0, position: 7, token: 2, prompt: vec![3] }];
    let all = vec![Said::Ok(done.clone()), Said::Error("no token".into())];
    for entry in [
        Entry::Sampling {
            session: 1,
            place: 0,
            sampling: settings,
            stop: vec![2],
            said: Said::Ok(true),
        },
        Entry::Together { seqs, kernel: 1, generate: 9, said: Said::Ok(all) },
        Entry::Feed {
            session: 1,
            place: 0,
            position: 0,
            tokens: vec![1],
            read: false,
            said: Said::Ok(None),
        },
        Entry::Advance {
            session: 1,
            place: 2,
            position: 3,
            kernel: 0,
            tokens: vec![1],
            generate: 2,
            said: Said::Ok(done),
        },
        Entry::Submission { sequence: 1, command: "decode".into(), words: vec![0, u32::MAX] },
        Entry::Closed { dropped: 3 },
    ] {
        let line = Line { n: 1, at_ns: u64::MAX, took_ns: 5, entry };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line, "{text}");
    }
}
