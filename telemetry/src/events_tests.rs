//! The trace ring between threads: whole, counted, in order, and its cost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use abi::EventTrack;

use super::*;
use crate::find::Folder;
use crate::page::{Page, Publisher, Unreadable};

fn publisher() -> (tempfile::TempDir, Publisher) {
    let home = tempfile::tempdir().unwrap();
    let folder = Folder::at(&home.path().join("amk"));
    (home, Publisher::new(&folder, |_| {}).unwrap().0)
}

fn event(value: u64) -> EventWords {
    let (begin_ns, end_ns, number, total) = (value, value + 1, value, value);
    EventWords { begin_ns, end_ns, number, total, positions: value as u32, ..EventWords::default() }
}

fn is_whole(event: &EventWords) -> bool {
    let value = event.number;
    event.begin_ns == value && event.end_ns == value + 1 && event.total == value
}

#[test]
fn events_come_in_order_and_overwritten_ones_are_counted() {
    let (_home, publisher) = publisher();
    let reader = publisher.reader();
    let mut tail = Tail::new(&reader, 0);
    let mut seen = Vec::new();
    let all = TELEMETRY_EVENTS as u64 + 100;
    for value in 0..all {
        publisher.edit(|edit| edit.event(event(value)));
        if value == 9 {
            tail.follow(|event| {
                seen.push(event.number);
                event.number < 4
            });
            assert_eq!(seen, [0, 1, 2, 3, 4], "the reader stops at the count that it was given");
        }
    }
    tail.follow(|event| {
        assert!(is_whole(event), "{event:?}");
        seen.push(event.number);
        true
    });
    assert_eq!(tail.dropped(), 95, "the 100 oldest are overwritten, of which 5 were read");
    assert_eq!(seen.len() as u64 + tail.dropped(), all);
    assert_eq!(seen[5..], (100..all).collect::<Vec<u64>>());
    // An event without a length gets one; the last of a track are found among the others.
    let track = EventTrack::Command as u32;
    let odd = EventWords { begin_ns: 7, end_ns: 3, track, ..EventWords::default() };
    publisher.edit(|edit| edit.event(odd));
    publisher.edit(|edit| edit.event(event(1)));
    let last = last_of(&reader, EventTrack::Command, 64);
    assert_eq!(
        last.iter().map(|event| (event.begin_ns, event.end_ns)).collect::<Vec<_>>(),
        [(7, 8)]
    );
    assert_eq!(last_of(&reader, EventTrack::Client, 3).len(), 3);
}

/// Two readers beside a writer that laps them: every event is whole or counted, and the counts on the page are those of
/// the events before them.
#[test]
fn no_reader_sees_half_an_event() {
    const ALL: u64 = 60_000;
    let (_home, publisher) = publisher();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let read = || {
            let reader = publisher.reader();
            let (mut tail, mut seen, mut last) = (Tail::new(&reader, 0), 0_u64, None);
            let mut page = Page::boxed();
            loop {
                let ended = over.load(Ordering::Relaxed);
                match reader.read(&mut page) {
                    Ok(_) => {}
                    // While the writer never rests, a reader that is held up may give up: it has seen nothing.
                    Err(Unreadable::Torn) if !ended => continue,
                    Err(other) => panic!("{other}"),
                }
                assert_eq!(page.head.positions, page.head.events, "one look, one count");
                tail.follow_to(page.head.events, |event| {
                    assert!(
                        is_whole(event) && last.is_none_or(|last| last < event.number),
                        "{event:?}"
                    );
                    (seen, last) = (seen + 1, Some(event.number));
                    true
                });
                if ended {
                    return (seen, tail.dropped());
                }
            }
        };
        let readers = [scope.spawn(read), scope.spawn(read)];
        for value in 0..ALL {
            publisher.edit(|edit| {
                edit.event(event(value));
                edit.head().positions += 1;
            });
        }
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            let (seen, dropped) = reader.join().unwrap();
            println!("{seen} seen, {dropped} dropped");
            assert_eq!(seen + dropped, ALL);
        }
    });
}

/// What an event adds to the edit that it is part of: its own 64 bytes, against some 2 KB of the page's head.
#[test]
fn an_event_costs_less_than_the_edit_around_it() {
    let (_home, publisher) = publisher();
    let ns = |events: u64| {
        let mut best = f64::INFINITY;
        for _ in 0..20 {
            let began = Instant::now();
            for _ in 0..500 {
                publisher.edit(|edit| (0..events).for_each(|value| edit.event(event(value))));
            }
            best = best.min(began.elapsed().as_nanos() as f64 / 500.0);
        }
        best
    };
    let (without, with) = (ns(0), ns(10));
    let each = (with - without) / 10.0;
    println!("an edit takes {without:.0} ns, an event in it {each:.1} ns");
    assert!(each < without, "{each} of {without}");
}
