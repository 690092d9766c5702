//! The rows of page numbers in device memory, and which pages hold poison.

use std::ops::Range;

use super::{PageLayout, PagePool, row_words};
use ir::KvDtype;

use crate::error::HostError;
use crate::memory::{Copier, DeviceBuffer};

/// Value that poisons pages: an f16 far from any key or value, yet finite, since the copies of a tile include rows after the last key,
/// which are multiplied by zero.
pub(crate) const CACHE_POISON: u8 = 0x77;

/// The same of codes: a code far from any, whose product with the scale of the same bytes is finite as an f16.
const CODE_POISON: u8 = 0x60;

/// What poisons pages of caches of an element type.
fn poison(dtype: KvDtype) -> u8 {
    match dtype {
        KvDtype::F16 => CACHE_POISON,
        KvDtype::E4m3 => CODE_POISON,
    }
}

/// The pages of a device: it has its own heads of each.
pub(crate) struct DeviceCaches {
    /// A row per session, and after the last a line that the loader may read. All devices have the same rows.
    rows: DeviceBuffer,
    /// Address of page zero, per layer.
    caches: Vec<u64>,
    page_bytes: u64,
    poison: u8,
}

impl DeviceCaches {
    /// For allocated pages, on the GPU whose context is current. No kernel is resident.
    pub(crate) fn new(
        (sessions, capacity): (u32, u32),
        caches: Vec<u64>,
        layout: PageLayout,
    ) -> Result<Self, HostError> {
        let rows = DeviceBuffer::zeroed(PageTables::bytes(sessions, capacity))?;
        let (page_bytes, poison) = (layout.page_bytes(), poison(layout.dtype));
        Ok(Self { rows, caches, page_bytes, poison })
    }

    /// Address of the rows.
    pub(crate) fn address(&self) -> u64 {
        self.rows.address
    }

    fn place(&self, layer: usize, page: u32) -> u64 {
        self.caches[layer] + u64::from(page) * self.page_bytes
    }
}

/// The pages of a machine, with the state of its devices' tables.
pub(crate) struct PageTables {
    pub(crate) pool: PagePool,
    pub(crate) devices: Vec<DeviceCaches>,
    stride: u32,
    /// Per page: it may hold something other than poison.
    used: Vec<bool>,
    /// Per session: its pages are poisoned before it gets them.
    poisons: Vec<bool>,
    /// Per session: how many pages the device's row has, if it is current.
    told: Vec<Option<usize>>,
}

/// Merges pages into contiguous runs.
fn runs(mut pages: Vec<u32>) -> Vec<Range<u32>> {
    pages.sort_unstable();
    let mut runs: Vec<Range<u32>> = Vec::new();
    for page in pages {
        match runs.last_mut().filter(|run| run.end == page) {
            Some(run) => run.end += 1,
            None => runs.push(page..page + 1),
        }
    }
    runs
}

/// A session's pages from its `first` on that hold something other than poison. Those before it hold what the session has computed.
fn unpoisoned(held: &[u32], first: usize, used: &[bool]) -> Vec<u32> {
    let new = held.get(first..).unwrap_or_default().iter().copied();
    new.filter(|&page| used[page as usize]).collect()
}

impl PageTables {
    /// Bytes of the rows of this many sessions.
    pub(crate) fn bytes(sessions: u32, capacity: u32) -> u64 {
        u64::from(sessions * row_words(capacity)) * 2 + 16
    }

    /// For the pages of all devices.
    pub(crate) fn new(
        pool: PagePool,
        (sessions, capacity): (u32, u32),
        devices: Vec<DeviceCaches>,
    ) -> Self {
        let pages = pool.occupancy().pages as usize + 1;
        Self {
            pool,
            devices,
            stride: row_words(capacity),
            used: vec![true; pages],
            poisons: vec![false; sessions as usize],
            told: vec![Some(0); sessions as usize],
        }
    }

    /// Words of a row.
    pub(crate) fn stride(&self) -> u32 {
        self.stride
    }

    /// A session's row on each device.
    pub(crate) fn rows(&self, session: u32) -> Vec<u64> {
        let row = |device: &DeviceCaches| device.address() + self.row_offset(session);
        self.devices.iter().map(row).collect()
    }

    fn row_offset(&self, session: u32) -> u64 {
        u64::from(session * self.stride) * 2
    }

    /// A page of a layer on the first device.
    pub(crate) fn place(&self, layer: u32, page: u32) -> u64 {
        self.devices[0].place(layer as usize, page)
    }

    /// Prepares a command of the session that uses positions from `start` up to `end`: allocates their pages and updates the device's row. No
    /// command of the session is running.
    pub(crate) fn before(
        &mut self,
        copier: &mut Copier,
        session: u32,
        positions: Range<u32>,
    ) -> Result<(), HostError> {
        let had = self.pool.held(session).len();
        self.pool.grow(session, positions.end)?;
        if self.poisons[session as usize] {
            self.fill(copier, session, had)?;
        }
        if self.told[session as usize] != Some(self.pool.held(session).len()) {
            self.tell(copier, session)?;
        }
        let first = (positions.start / abi::KV_PAGE) as usize;
        let last = super::pages_of(positions.end) as usize;
        for &page in self.pool.held(session).get(first..last).unwrap_or_default() {
            if !self.pool.is_own(page) {
                return Err(HostError::Request(format!(
                    "positions {positions:?} of session {session} lie in a page that other sessions may have; end the session first"
                )));
            }
            self.used[page as usize] = true;
        }
        Ok(())
    }

    /// Writes a session's row: its pages, then zeros.
    fn tell(&mut self, copier: &mut Copier, session: u32) -> Result<(), HostError> {
        let mut words = vec![0_u16; self.stride as usize];
        for (word, &page) in words.iter_mut().zip(self.pool.held(session)) {
            *word = page as u16; // page numbers are below KV_PAGES_MAX
        }
        self.told[session as usize] = None;
        for device in &self.devices {
            let row = device.address() + self.row_offset(session);
            copier.upload(row, bytemuck::cast_slice(&words))?;
        }
        self.told[session as usize] = Some(self.pool.held(session).len());
        Ok(())
    }

    /// Ends a session: others may have its pages, and its row is cleared.
    pub(crate) fn release(&mut self, copier: &mut Copier, session: u32) -> Result<(), HostError> {
        self.pool.release(session);
        let Some(poisons) = self.poisons.get_mut(session as usize) else { return Ok(()) };
        *poisons = false;
        if self.told[session as usize] == Some(0) {
            return Ok(());
        }
        self.tell(copier, session)
    }

    /// Poisons the session's pages that hold something else, and from now on those that it gets.
    pub(crate) fn poison(&mut self, copier: &mut Copier, session: u32) -> Result<(), HostError> {
        self.poisons[session as usize] = true;
        self.fill(copier, session, 0)
    }

    /// Poisons a session's pages from its `first` on that hold something else.
    fn fill(&mut self, copier: &mut Copier, session: u32, first: usize) -> Result<(), HostError> {
        let mut pages = unpoisoned(self.pool.held(session), first, &self.used);
        // Others' keys and values stay.
        pages.retain(|&page| self.pool.is_own(page));
        for run in runs(pages) {
            for device in &self.devices {
                let bytes = u64::from(run.end - run.start) * device.page_bytes;
                let layers = 0..device.caches.len();
                let targets = layers.map(|layer| device.place(layer, run.start));
                copier.fill_all(targets, bytes, device.poison)?;
            }
            self.used[run.start as usize..run.end as usize].fill(false);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_a_session_has_keep_what_is_in_them_when_it_gets_more() {
        let used = [true, true, false, true, true];
        assert_eq!(unpoisoned(&[4, 2, 1, 3], 1, &used), [1, 3], "page 4 holds keys");
        assert_eq!(unpoisoned(&[4, 2, 1, 3], 0, &used), [4, 1, 3]);
        assert!(unpoisoned(&[4], 1, &used).is_empty());
    }

    #[test]
    fn pages_one_behind_the_other_are_filled_at_once() {
        assert_eq!(runs(vec![7, 3, 4, 9, 5]), [3..6, 7..8, 9..10]);
        assert!(runs(Vec::new()).is_empty());
    }
}
