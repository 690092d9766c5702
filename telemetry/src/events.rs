//! The trace ring: the last events of the process, behind its page. An entry is written inside the edit that counts it,
//! so the ring has one writer and needs no lock of its own; a sequence word per entry (`sequence.rs`) shows readers
//! which entries were overwritten.

use std::sync::atomic::Ordering;

use abi::{EventTrack, EventWords, TELEMETRY_EVENTS};

use crate::page::Reader;
use crate::sequence::{self, Mapped, Words as _};

/// Words of an entry.
const EVENT_WORDS: usize = size_of::<EventWords>() / size_of::<u64>();
/// Words of the ring.
pub(crate) const RING_WORDS: usize = TELEMETRY_EVENTS * EVENT_WORDS;
/// Index of an entry's sequence word.
const SEQUENCE: usize = core::mem::offset_of!(EventWords, sequence) / size_of::<u64>();

/// The words of an event by its number from zero.
fn entry(ring: &Mapped, index: u64) -> Mapped {
    let place = (index % TELEMETRY_EVENTS as u64) as usize;
    ring.part(place * EVENT_WORDS, EVENT_WORDS)
}

/// The sequence word of an entry that holds this event.
fn written(index: u64) -> u64 {
    (index / TELEMETRY_EVENTS as u64 + 1) * 2
}

/// Writes an event over the oldest one.
pub(crate) fn write(ring: &Mapped, index: u64, event: EventWords) {
    let event = EventWords { end_ns: event.end_ns.max(event.begin_ns + 1), ..event };
    let words: [u64; EVENT_WORDS] = bytemuck::cast(event);
    let entry = entry(ring, index);
    sequence::begin(&entry, SEQUENCE);
    for (at, word) in words.into_iter().enumerate().filter(|(at, _)| *at != SEQUENCE) {
        entry.store(at, word, Ordering::Relaxed);
    }
    sequence::end(&entry, SEQUENCE);
}

/// An event, if its entry still holds it.
fn read(ring: &Mapped, index: u64) -> Option<EventWords> {
    let mut words = [0; EVENT_WORDS];
    let whole = sequence::copy(&entry(ring, index), SEQUENCE, &mut words);
    (whole && words[SEQUENCE] == written(index)).then(|| bytemuck::cast(words))
}

/// Follows the events of a process from some moment on. Reading allocates nothing.
pub struct Tail<'a> {
    reader: &'a Reader,
    next: u64,
    dropped: u64,
}

impl<'a> Tail<'a> {
    /// Begins with this event, by its number from zero: `head.events` of a page for those after that look.
    #[must_use]
    pub fn new(reader: &'a Reader, next: u64) -> Self {
        Self { reader, next, dropped: 0 }
    }

    /// Events that were overwritten before they were read.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Calls `each` with every new event, until it returns false.
    pub fn follow(&mut self, each: impl FnMut(&EventWords) -> bool) {
        self.follow_to(self.reader.events(), each);
    }

    /// The same up to an event, by its number from zero.
    pub fn follow_to(&mut self, end: u64, mut each: impl FnMut(&EventWords) -> bool) {
        let oldest = end.saturating_sub(TELEMETRY_EVENTS as u64);
        self.dropped += oldest.saturating_sub(self.next);
        self.next = self.next.max(oldest);
        while self.next < end {
            self.next += 1;
            match read(self.reader.ring(), self.next - 1) {
                Some(event) if !each(&event) => return,
                Some(_) => {}
                None => self.dropped += 1,
            }
        }
    }
}

/// The last events of a track, at most `most`, oldest first.
#[must_use]
pub fn last_of(reader: &Reader, track: EventTrack, most: usize) -> Vec<EventWords> {
    let end = reader.events();
    let mut found = Vec::new();
    for index in (end.saturating_sub(TELEMETRY_EVENTS as u64)..end).rev() {
        let event = read(reader.ring(), index).filter(|event| event.track == track as u32);
        found.extend(event);
        if found.len() == most {
            break;
        }
    }
    found.reverse();
    found
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
