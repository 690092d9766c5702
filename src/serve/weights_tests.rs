//! Sequences whose weights have not arrived, and that every state of the ring's table is entered by the loop itself.

use std::time::{Duration, Instant};

use abi::{CHANGES, EntryState};
use telemetry::{Edit, Folder, Page, Publisher};

use super::*;
use crate::engine::WeightsAt;

fn page() -> (tempfile::TempDir, Publisher) {
    let home = tempfile::tempdir().unwrap();
    let start = |edit: &mut Edit<'_>| edit.head().places = 2;
    let page = Publisher::new(&Folder::at(&home.path().join("amk")), start).unwrap().0;
    (home, page)
}

/// Polls the page until the condition holds.
fn until(page: &Publisher, what: &str, is: impl Fn(&Page) -> bool) -> Box<Page> {
    let (reader, began) = (page.reader(), Instant::now());
    let mut seen = Page::boxed();
    loop {
        reader.read(&mut seen).unwrap();
        if is(&seen) {
            return seen;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: {:?}", seen.head);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn waits(page: &Page) -> u32 {
    page.head.occupancy[EntryState::WaitIo as usize]
}

/// The engine is scripted; the states are those that the loop of `amk serve` enters. Whoever removes the only way into
/// one of them finds it here.
#[test]
fn every_state_of_the_table_is_entered_by_the_server() {
    let (_home, page) = page();
    let engine = Scripted::default();
    let weights = engine.weights_at.clone();
    *weights.lock().unwrap() = WeightsAt::Coming;
    let admission = Admission::new(8);
    said_beside(engine, 2, Sequences::new(&page, true), |jobs| {
        let (first, heard_first) = job(&[1, 2, 3], 20, &admission);
        jobs.send(first).unwrap();
        let (second, heard_second) = job(&[4], 20, &admission);
        jobs.send(second).unwrap();
        let seen = until(&page, "both wait", |page| waits(page) == 2);
        assert_eq!(seen.head.entered[EntryState::WaitIo as usize], 2);
        assert_eq!(seen.head.activity, Activity::Loading as u32);
        // A client that leaves meanwhile, and a request that gets its place.
        drop(heard_second);
        until(&page, "it has left", |page| page.head.endings[SequenceEnd::Cancelled as usize] == 1);
        let (third, heard_third) = job(&[POISON], 20, &admission);
        jobs.send(third).unwrap();
        until(&page, "it waits too", |page| waits(page) == 2);
        *weights.lock().unwrap() = WeightsAt::Here;
        assert_eq!(heard(heard_first), (expected(&[1, 2, 3], 20), Some(Finish::Length)));
        assert_eq!(heard(heard_third), (vec![], Some(Finish::Failed("poisoned".into()))));
    });
    let seen = until(&page, "all have left", |_| true);
    for change in CHANGES {
        let entered = seen.head.entered[change.to as usize];
        assert!(entered > 0, "{} is in the table, and no server enters it", change.to.name());
    }
    assert_eq!(waits(&seen), 0);
    // The other half: the resident kernel's engine is not asked in vain.
    let engine = include_str!("../engine.rs");
    assert!(engine.contains("self.gpu.weights()"), "the megakernel says where its weights are");
}

#[test]
fn lost_weights_end_those_that_wait_with_the_reason() {
    let (_home, page) = page();
    let engine = Scripted::default();
    let weights = engine.weights_at.clone();
    *weights.lock().unwrap() = WeightsAt::Coming;
    let admission = Admission::new(8);
    said_beside(engine, 2, Sequences::new(&page, true), |jobs| {
        let (first, heard_first) = job(&[1], 5, &admission);
        jobs.send(first).unwrap();
        until(&page, "it waits", |page| waits(page) == 1);
        *weights.lock().unwrap() = WeightsAt::Lost("a short file".into());
        assert_eq!(heard(heard_first), (vec![], Some(Finish::Failed("a short file".into()))));
    });
    let seen = until(&page, "it has left", |_| true);
    assert_eq!(seen.head.entered[EntryState::Fault as usize], 1);
    assert_eq!(seen.head.endings[SequenceEnd::Failed as usize], 1);
}
