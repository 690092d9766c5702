//! The host's half of the ring: wraps, a full ring, silence, traps, a dead kernel; and every execution beside a device, with `loom`.

use super::*;

fn ring() -> (Vec<u128>, RingHost) {
    let mut block = vec![0_u128; BYTES / 16 + 8];
    let base = block.as_mut_ptr().cast::<u8>();
    let base = base.wrapping_add(base.align_offset(128));
    // SAFETY: the block is long enough, aligned above, and returned beside the ring.
    let ring = unsafe { RingHost::new(base, 1, WORKERS_MAX) };
    (block, ring)
}

/// Another handle of the same ring.
fn twin(ring: &RingHost) -> RingHost {
    RingHost {
        words: Mapped(ring.words.0, BYTES),
        devices: 1,
        workers: WORKERS_MAX,
        tail: 0,
        seen: 0,
        tap: None,
    }
}

/// Acts as the device: answers the oldest submission.
fn answer(ring: &RingHost, index: u32, token: u32) {
    let entry = COMPLETIONS + (index % RING_ENTRIES) as usize * size_of::<Completion>();
    let words: [u32; 16] = bytemuck::cast(Completion { token, ..Completion::default() });
    for (i, word) in words[..15].iter().enumerate() {
        ring.store(entry + i * 4, *word, Ordering::Relaxed);
    }
    ring.store(entry + 60, index + 1, Ordering::Release);
}

fn running() -> Result<bool, HostError> {
    Ok(false)
}

#[test]
fn completions_arrive_in_order_over_several_laps() {
    let (_block, mut ring) = ring();
    for i in 0..RING_ENTRIES * 3 + 5 {
        assert_eq!(ring.publish(&Submission::default()).ok(), Some(i + 1));
        assert!(ring.poll_completion().is_none());
        answer(&ring, i, i * 7);
        assert_eq!(
            ring.wait_completion(Duration::from_secs(1), running, &mut || false)
                .map(|c| c.token)
                .ok(),
            Some(i * 7)
        );
    }
}

#[test]
fn a_tap_sees_each_command_and_its_answer() {
    let (_block, mut ring) = ring();
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let into = seen.clone();
    ring.show(Some(Arc::new(move |passed| {
        into.lock().unwrap().push(match passed {
            Passed::Submission(of) => ("submission", of.sequence, of.steps),
            Passed::Completion(of) => ("completion", of.sequence, of.token),
        });
    })));
    for i in 0..2 {
        ring.publish(&Submission { steps: 5 + i, ..Submission::default() }).unwrap();
        assert!(ring.poll_completion().is_none());
        answer(&ring, i, 7 + i);
        assert!(ring.poll_completion().is_some());
    }
    ring.show(None);
    ring.publish(&Submission::default()).unwrap();
    let expected =
        [("submission", 1, 5), ("completion", 1, 7), ("submission", 2, 6), ("completion", 2, 8)];
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[test]
fn a_full_ring_refuses() {
    let (_block, mut ring) = ring();
    for _ in 0..RING_ENTRIES {
        assert!(ring.publish(&Submission::default()).is_ok());
    }
    assert!(matches!(ring.publish(&Submission::default()), Err(HostError::Request(_))));
    answer(&ring, 0, 1);
    assert!(ring.poll_completion().is_some());
    assert!(ring.publish(&Submission::default()).is_ok());
}

#[test]
fn silence_is_a_time_out_and_a_trap_is_named() {
    let (_block, mut ring) = ring();
    let silent = ring.wait_completion(Duration::from_millis(5), running, &mut || false);
    assert!(matches!(silent, Err(HostError::TimedOut { alive: false, .. })));
    ring.store(STATUS, abi::Trap::CounterDeadline as u32, Ordering::Relaxed);
    ring.store(STATUS + core::mem::offset_of!(Status, valid), 1, Ordering::Release);
    let trapped = ring.wait_completion(Duration::from_secs(1), running, &mut || false);
    assert!(
        matches!(trapped, Err(HostError::Trapped(status)) if status.trap == abi::Trap::CounterDeadline as u32)
    );
    ring.reset();
    assert!(ring.status().is_none());
}

#[test]
fn a_dead_kernel_is_reported_at_once() {
    let (_block, mut ring) = ring();
    let limit = Duration::from_secs(60);
    let message = "an illegal memory access was encountered".to_owned();
    let dead = || Err(HostError::Driver { call: "cuStreamQuery", message: message.clone() });
    let start = Instant::now();
    let error = ring.wait_completion(limit, dead, &mut || false).unwrap_err();
    assert!(start.elapsed() < limit / 10);
    assert!(matches!(&error, HostError::Died(said) if said.contains(&message)));
    assert!(error.to_string().contains("run it again"), "{error}");
    assert!(matches!(
        ring.wait_completion(limit, || Ok(true), &mut || false),
        Err(HostError::Left)
    ));
}

/// A query of the driver takes longer than a token may be late.
#[test]
fn the_driver_is_asked_only_when_a_heartbeat_stops() {
    let (_block, mut ring) = ring();
    let twin = twin(&ring);
    let heartbeat = INDICES + core::mem::offset_of!(RingIndices, heartbeat);
    let limit = Duration::from_millis(30);
    let asked = std::cell::Cell::new(0);
    let gone = || {
        asked.set(asked.get() + 1);
        Ok(false)
    };
    let mut beats = || {
        twin.store(heartbeat, twin.load(heartbeat, Ordering::Relaxed) + 1, Ordering::Relaxed);
        false
    };
    let slow = ring.wait_completion(limit, gone, &mut beats);
    assert!(matches!(slow, Err(HostError::TimedOut { alive: true, .. })));
    assert_eq!(asked.get(), 0);
    let silent = ring.wait_completion(limit, gone, &mut || false);
    assert!(matches!(silent, Err(HostError::TimedOut { alive: false, .. })));
    assert!(asked.get() > 0);
}

#[test]
fn what_a_kernel_said_before_it_left_counts() {
    let (_block, mut ring) = ring();
    assert!(ring.publish(&Submission::default()).is_ok());
    // The device answers between the last poll and the query.
    let twin = twin(&ring);
    let gone = || {
        answer(&twin, 0, 7);
        Ok(true)
    };
    let answered = ring.wait_completion(Duration::from_secs(60), gone, &mut || false);
    assert_eq!(answered.map(|c| c.token).ok(), Some(7));
    let gone = || {
        twin.store(STATUS + core::mem::offset_of!(Status, valid), 1, Ordering::Release);
        Ok(true)
    };
    let trapped = ring.wait_completion(Duration::from_secs(60), gone, &mut || false);
    assert!(matches!(trapped, Err(HostError::Trapped(_))));
}

/// A preemption request names the running command, once, and is no answer.
#[test]
fn a_command_is_asked_to_yield() {
    let (_block, mut ring) = ring();
    for sequence in [1, 2] {
        assert_eq!(ring.publish(&Submission::default()).ok(), Some(sequence));
    }
    answer(&ring, 0, 3);
    assert!(ring.poll_completion().is_some());
    let word = INDICES + core::mem::offset_of!(RingIndices, preempt);
    assert_eq!(ring.load(word, Ordering::Relaxed), 0);
    let twin = twin(&ring);
    let mut looked = Vec::new();
    let answered = ring.wait_completion(Duration::from_secs(60), running, &mut || {
        looked.push(twin.load(word, Ordering::Relaxed));
        match looked.len() {
            2 => {}
            // What it does beside this, such as giving masks, goes on.
            3 => answer(&twin, 1, 9),
            _ => return false,
        }
        true
    });
    assert_eq!((answered.map(|c| c.token).ok(), looked), (Some(9), vec![0, 0, 2]));
    assert_eq!(ring.load(word, Ordering::Relaxed), 2, "the second command's sequence");
}

#[test]
fn a_report_that_comes_after_its_completion_is_waited_for() {
    let (_block, mut ring) = ring();
    assert!(ring.publish(&Submission::default()).is_ok());
    answer(&ring, 0, 0);
    assert!(ring.poll_completion().is_some());
    assert!(ring.await_status(Duration::from_millis(5)).is_none());
    let device = Mapped(ring.words.0, BYTES);
    let report = std::thread::spawn(move || {
        let device = device;
        std::thread::sleep(Duration::from_millis(20));
        device.store(STATUS, abi::Trap::StageDeadline as u32, Ordering::Relaxed);
        device.store(STATUS + core::mem::offset_of!(Status, valid), 1, Ordering::Release);
    });
    let status = ring.await_status(Duration::from_secs(60)).map(|status| status.trap);
    assert_eq!(status, Some(abi::Trap::StageDeadline as u32));
    assert!(report.join().is_ok());
}

/// The real `RingHost` beside a thread that does what `poller.cuh` does, in every execution that the C++ memory model allows (up to a
/// number of preemptions).
mod every_execution {
    use std::collections::HashMap;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicUsize;

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;

    use super::*;

    /// Orderings that are weakened on one side or the other.
    #[derive(Clone, Copy, Default)]
    struct Broken {
        publish: bool,
        take: bool,
        complete: bool,
        poll: bool,
        sequence_first: bool,
    }

    /// Words of two entries and the status block, as `loom` sees them. Release and acquire become relaxed as `weak` requests.
    #[derive(Clone)]
    struct Modelled {
        words: Arc<HashMap<usize, AtomicU32>>,
        weak_store: bool,
        weak_load: bool,
    }

    impl Words for Modelled {
        fn load(&self, offset: usize, order: Ordering) -> u32 {
            self.words[&offset].load(if self.weak_load { Ordering::Relaxed } else { order })
        }

        fn store(&self, offset: usize, value: u32, order: Ordering) {
            let order = if self.weak_store { Ordering::Relaxed } else { order };
            self.words[&offset].store(value, order);
        }
    }

    /// The first command; the second one begins another wrap.
    const FIRST: u32 = 2 * RING_ENTRIES - 1;
    const COMMANDS: u32 = 2;

    fn entry(base: usize, size: usize, index: u32) -> usize {
        base + (index % RING_ENTRIES) as usize * size
    }

    /// Entries as the wrap before left them.
    fn words(broken: Broken) -> Modelled {
        let mut words = HashMap::new();
        for index in FIRST..FIRST + COMMANDS {
            for (base, size) in
                [(SUBMISSIONS, size_of::<Submission>()), (COMPLETIONS, size_of::<Completion>())]
            {
                let at = entry(base, size, index);
                for offset in (at..at + size).step_by(4) {
                    let last = offset + 4 == at + size;
                    let old = if last { index + 1 - RING_ENTRIES } else { u32::MAX };
                    words.insert(offset, AtomicU32::new(old));
                }
            }
        }
        for offset in (STATUS..STATUS + size_of::<Status>()).step_by(4) {
            words.insert(offset, AtomicU32::new(0));
        }
        Modelled { words: Arc::new(words), weak_store: broken.publish, weak_load: broken.poll }
    }

    fn command(index: u32) -> Submission {
        Submission {
            session: index,
            position: index + 1,
            steps: index + 2,
            ..Submission::default()
        }
    }

    /// `poller_run` and `post_completion`.
    fn device(words: &Modelled, broken: Broken) {
        for index in FIRST..FIRST + COMMANDS {
            let at = entry(SUBMISSIONS, size_of::<Submission>(), index);
            let last = at + size_of::<Submission>() - 4;
            let order = if broken.take { Ordering::Relaxed } else { Ordering::Acquire };
            while words.words[&last].load(order) != index + 1 {
                loom::thread::yield_now();
            }
            let mut copy = [0_u32; size_of::<Submission>() / 4];
            for (i, word) in copy.iter_mut().enumerate() {
                *word = words.words[&(at + i * 4)].load(Ordering::Relaxed);
            }
            let expected = Submission { sequence: index + 1, ..command(index) };
            assert_eq!(
                bytemuck::cast::<_, Submission>(copy),
                expected,
                "the device takes a command"
            );
            let at = entry(COMPLETIONS, size_of::<Completion>(), index);
            let sequence = |order| words.words[&(at + 60)].store(index + 1, order);
            if broken.sequence_first {
                sequence(Ordering::Release);
            }
            let answer = Completion { token: index, steps: 1, ..Completion::default() };
            let answer: [u32; 16] = bytemuck::cast(answer);
            for (i, &word) in answer[..15].iter().enumerate() {
                words.words[&(at + i * 4)].store(word, Ordering::Relaxed);
            }
            sequence(if broken.complete { Ordering::Relaxed } else { Ordering::Release });
        }
    }

    /// Two commands at once, two answers. Returns the number of executions.
    fn commands(broken: Broken) -> Option<usize> {
        static EXECUTIONS: AtomicUsize = AtomicUsize::new(0);
        let before = EXECUTIONS.load(Ordering::Relaxed);
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.max_branches = 20_000;
        let all = catch_unwind(AssertUnwindSafe(|| {
            model.check(move || {
                EXECUTIONS.fetch_add(1, Ordering::Relaxed);
                let words = words(broken);
                let mut ring = RingHost {
                    words: words.clone(),
                    devices: 1,
                    workers: 1,
                    tail: FIRST,
                    seen: FIRST,
                    tap: None,
                };
                let there = loom::thread::spawn(move || device(&words, broken));
                for index in FIRST..FIRST + COMMANDS {
                    assert_eq!(ring.publish(&command(index)).ok(), Some(index + 1));
                }
                for index in FIRST..FIRST + COMMANDS {
                    let completion = loop {
                        match ring.poll_completion() {
                            Some(completion) => break completion,
                            None => loom::thread::yield_now(),
                        }
                    };
                    let words = (completion.token, completion.steps, completion.trap);
                    assert_eq!(words, (index, 1, 0), "the host takes an answer");
                }
                there.join().expect("the device leaves");
            });
        }));
        all.ok().map(|()| EXECUTIONS.load(Ordering::Relaxed) - before)
    }

    #[test]
    fn commands_and_answers_arrive_whole() {
        let executions = commands(Broken::default()).expect("no execution fails");
        println!("{executions} executions");
        assert!(executions > 10);
        for (name, broken) in [
            ("published relaxed", Broken { publish: true, ..Broken::default() }),
            ("taken relaxed", Broken { take: true, ..Broken::default() }),
            ("completed relaxed", Broken { complete: true, ..Broken::default() }),
            ("polled relaxed", Broken { poll: true, ..Broken::default() }),
            ("sequence first", Broken { sequence_first: true, ..Broken::default() }),
        ] {
            assert_eq!(commands(broken), None, "{name} must be found");
        }
    }

    /// `trap` and `RingHost::status`.
    fn status(broken: bool) -> bool {
        let check = move || {
            let words = words(Broken::default());
            let ring = RingHost {
                words: words.clone(),
                devices: 1,
                workers: 1,
                tail: FIRST,
                seen: FIRST,
                tap: None,
            };
            let there = loom::thread::spawn(move || {
                let order = if broken { Ordering::Relaxed } else { Ordering::Release };
                words.store(STATUS + core::mem::offset_of!(Status, worker), 7, Ordering::Relaxed);
                words.store(STATUS + core::mem::offset_of!(Status, have), 5, Ordering::Relaxed);
                words.store(STATUS + core::mem::offset_of!(Status, valid), 1, order);
            });
            if let Some(status) = ring.status() {
                assert_eq!((status.worker, status.have), (7, 5), "a status is whole");
            }
            there.join().expect("the device leaves");
        };
        catch_unwind(|| loom::model(check)).is_ok()
    }

    #[test]
    fn a_status_is_whole() {
        assert!(status(false));
        assert!(!status(true), "a relaxed `valid` must be found");
    }
}
