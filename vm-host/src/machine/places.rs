//! The places of device memory for loaded programs.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Loaded, PROGRAMS_MAX};

/// Serials of the next machine begin here, so that none holds a handle of another machine.
static SERIALS: AtomicU64 = AtomicU64::new(0);

/// The places. A place changes only when a program has been written to it: a refused load leaves every handle as it was.
pub(super) struct Places {
    serials: [u64; PROGRAMS_MAX],
    /// Sequences that a batch of the program in each place may have.
    sequences: [u32; PROGRAMS_MAX],
    next: usize,
}

impl Places {
    pub(super) fn new() -> Self {
        let serials = [SERIALS.fetch_add(1 << 32, Ordering::Relaxed); PROGRAMS_MAX];
        Self { serials, sequences: [1; PROGRAMS_MAX], next: 0 }
    }

    /// The place that was filled longest ago, except that of the current program, if there is one.
    pub(super) fn oldest(&self, current: Option<Loaded>) -> usize {
        if current.is_some_and(|current| self.next == current.place) {
            (self.next + 1) % PROGRAMS_MAX
        } else {
            self.next
        }
    }

    /// Records that a program was written to a place, proven for batches of up to `sequences`.
    pub(super) fn fill(&mut self, place: usize, sequences: u32) -> Loaded {
        self.serials[place] += 1;
        self.sequences[place] = sequences;
        self.next = (place + 1) % PROGRAMS_MAX;
        Loaded { place, serial: self.serials[place] }
    }

    /// Whether a handle still names the program that it was given for.
    pub(super) fn holds(&self, program: Loaded) -> bool {
        self.serials[program.place] == program.serial
    }

    pub(super) fn sequences(&self, program: Loaded) -> u32 {
        self.sequences[program.place]
    }

    /// Invalidates every handle.
    pub(super) fn forget(&mut self) {
        self.serials.iter_mut().for_each(|serial| *serial += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_load_leaves_the_batch_of_the_program_that_stays() {
        let mut places = Places::new();
        let current = places.fill(0, 1);
        let batch = places.fill(places.oldest(Some(current)), 8);
        for _ in 2..PROGRAMS_MAX {
            places.fill(places.oldest(Some(current)), 1);
        }
        // The next load would go to the place of `batch`, and is refused: nothing is filled.
        assert_eq!(places.oldest(Some(current)), batch.place);
        assert!(places.holds(batch));
        assert_eq!(places.sequences(batch), 8);
        assert_eq!(places.oldest(Some(current)), batch.place, "and the place is still the oldest");
    }

    #[test]
    fn the_current_place_is_never_filled_and_old_handles_go_bad() {
        let mut places = Places::new();
        let current = places.fill(0, 1);
        let first = places.fill(places.oldest(Some(current)), 2);
        for _ in 0..PROGRAMS_MAX - 1 {
            assert_ne!(places.oldest(Some(current)), current.place);
            places.fill(places.oldest(Some(current)), 1);
        }
        assert!(places.holds(current) && !places.holds(first));
        assert!(!Places::new().holds(current), "of another machine");
        places.forget();
        assert!(!places.holds(current));
    }
}
