//! Ways to spoil a ring; see `machine_faults_tests.rs`.

use std::sync::atomic::Ordering;

use super::{RingHost, STATUS};

impl RingHost {
    /// Skips an entry, as if it had been overwritten before the device saw it.
    pub(crate) fn lose_one(&mut self) {
        self.tail = self.tail.wrapping_add(1);
    }

    /// Overwrites entries and indices.
    pub(crate) fn scribble(&self) {
        for offset in (0..STATUS).step_by(4) {
            self.store(offset, u32::MAX, Ordering::Relaxed);
        }
    }
}
