//! Pages of the key/value cache: their allocation to sessions, and their layout.
//!
//! The cache of a layer is `[pages][2][kv_heads][KV_PAGE][head_dim]`. A session has a row of page numbers, in the order of its positions. The
//! rows are in device memory, and the kernel finds keys and values through them ([decision 021](../../docs/decisions/021-paged-key-value-caches.md)).
//! All pages are allocated before the launch. Between two commands of a session its row grows; at its end its pages are returned.

use abi::{KV_ELEMENT_BYTES, KV_PAGE, KV_PAGES_MAX};
use ir::program::{BufferSource, Program};

use crate::error::HostError;

mod tables;

#[cfg(test)]
pub(crate) use tables::CACHE_POISON;
pub(crate) use tables::PageTables;

/// Size of the page pool that the sessions of a machine share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvPool {
    /// Every session can have its full capacity.
    #[default]
    Full,
    /// The same if that fits, else as many as fit.
    Fitting,
    /// This many positions of all sessions together, rounded up to whole pages.
    Positions(u64),
}

/// Error: too few pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more pages of {KV_PAGE} positions for session {session}; {unpromised} of {pages} are not promised to others: end a session, or set more aside (--kv-pool)"
)]
pub struct NoPages {
    /// The requesting session.
    pub session: u32,
    /// Additional pages requested.
    pub wanted: u32,
    /// Pages that are not promised.
    pub unpromised: u32,
    /// Pages in total.
    pub pages: u32,
}

/// Occupancy of a pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Occupancy {
    /// Pages that sessions can have.
    pub pages: u32,
    /// Pages that hold positions of some session.
    pub held: u32,
    /// Pages promised to sessions, including those that they hold.
    pub promised: u32,
}

/// Pages needed for this many positions.
#[must_use]
pub fn pages_of(positions: u32) -> u32 {
    positions.div_ceil(KV_PAGE)
}

/// Pages of one session.
#[derive(Clone, Debug, Default)]
struct Share {
    /// In the order of its positions.
    held: Vec<u32>,
    /// Number of pages that it may have without a new promise; never less than it holds.
    promised: u32,
}

/// The pages of a machine. A page belongs to one session or is free. Promises never exceed the pages, so that an admitted session never
/// waits for another's end.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Free pages; the last is allocated next.
    free: Vec<u32>,
    shares: Vec<Share>,
    pages: u32,
    promised: u32,
}

impl PagePool {
    /// For `sessions` sessions, with `pages` pages besides page zero, which belongs to no session.
    #[must_use]
    pub fn new(sessions: u32, pages: u32) -> Self {
        let pages = pages.min(KV_PAGES_MAX - 1);
        let shares = vec![Share::default(); sessions as usize];
        Self { free: (1..=pages).rev().collect(), shares, pages, promised: 0 }
    }

    /// Promises a session pages for its first `positions` positions. It keeps what it was promised before.
    ///
    /// # Errors
    /// If too few pages are unpromised; then nothing has changed.
    pub fn promise(&mut self, session: u32, positions: u32) -> Result<(), NoPages> {
        let (pages, unpromised) = (self.pages, self.pages - self.promised);
        let Some(share) = self.shares.get_mut(session as usize) else {
            return Err(NoPages { session, wanted: pages_of(positions), unpromised, pages });
        };
        let wanted = pages_of(positions).saturating_sub(share.promised);
        if wanted > unpromised {
            return Err(NoPages { session, wanted, unpromised, pages });
        }
        share.promised += wanted;
        self.promised += wanted;
        Ok(())
    }

    /// Allocates the pages that a session's first positions lack, promising them if they were not. Returns how many it had before.
    ///
    /// # Errors
    /// As [`promise`](Self::promise).
    pub fn grow(&mut self, session: u32, positions: u32) -> Result<usize, NoPages> {
        self.promise(session, positions)?;
        let held = &mut self.shares[session as usize].held;
        let before = held.len();
        let lacking = (pages_of(positions) as usize).saturating_sub(before);
        let rest = self.free.len() - lacking; // promised pages are always available
        held.extend(self.free.drain(rest..).rev());
        Ok(before)
    }

    /// Takes back a session's pages and promises.
    pub fn release(&mut self, session: u32) {
        if let Some(share) = self.shares.get_mut(session as usize) {
            self.promised -= share.promised;
            share.promised = 0;
            self.free.extend(share.held.drain(..).rev());
        }
    }

    /// The pages of a session, in the order of its positions.
    #[must_use]
    pub fn held(&self, session: u32) -> &[u32] {
        self.shares.get(session as usize).map_or(&[], |share| &share.held)
    }

    /// Its occupancy.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        let held = self.pages - self.free.len() as u32;
        Occupancy { pages: self.pages, held, promised: self.promised }
    }
}

/// Layout of a layer's cache in its pages. The device's half is pages.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLayout {
    pub(crate) kv_heads: u32,
    /// Bytes of the keys, or values, of a head at one position.
    pub(crate) row_bytes: u32,
}

impl PageLayout {
    pub(crate) fn new(kv_heads: u32, head_dim: u32) -> Self {
        Self { kv_heads, row_bytes: head_dim * KV_ELEMENT_BYTES as u32 }
    }

    /// Bytes of a head's keys, or values, in a page.
    pub(crate) fn head_bytes(self) -> u32 {
        KV_PAGE * self.row_bytes
    }

    /// Bytes from the keys of a head to its values in a page.
    pub(crate) fn values(self) -> u32 {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of a page in one layer.
    pub(crate) fn page_bytes(self) -> u64 {
        2 * u64::from(self.values())
    }
}

/// Words of a session's row: a page for each part of the capacity, and one that is always zero, since a block that begins in the middle of
/// the last page is copied in whole tiles. Rounded up to lines of 16 bytes, which the loader copies at once.
pub(crate) fn row_words(capacity: u32) -> u32 {
    (pages_of(capacity) + 1).next_multiple_of(8)
}

/// Bytes of a page in all layers of a program.
pub(crate) fn page_bytes(program: &Program) -> u64 {
    let cached =
        |buffer: &&ir::program::Buffer| matches!(buffer.source, BufferSource::KvCache { .. });
    let layers = program.buffers.iter().filter(cached).count() as u64;
    layers * PageLayout::new(program.dims.kv_heads, program.dims.head_dim).page_bytes()
}

/// Size of a pool, without page zero, for `sessions` sessions of a capacity. `room` is how many pages fit into memory, `spare` how many of
/// them stay free unless they are needed.
///
/// # Errors
/// The number of pages needed, if they do not fit.
pub(crate) fn pool_pages(
    pool: KvPool,
    (sessions, capacity): (u32, u32),
    room: u64,
    spare: u64,
) -> Result<u32, u64> {
    let one = u64::from(pages_of(capacity));
    let full = (u64::from(sessions) * one).min(u64::from(KV_PAGES_MAX - 1));
    let pages = match pool {
        KvPool::Full => full,
        KvPool::Fitting => full.min(room.saturating_sub(spare)).max(one),
        KvPool::Positions(positions) => positions.div_ceil(u64::from(KV_PAGE)).clamp(1, full),
    };
    if pages > room { Err(pages) } else { Ok(pages as u32) }
}

impl From<NoPages> for HostError {
    fn from(lacking: NoPages) -> Self {
        Self::Request(lacking.to_string())
    }
}

#[cfg(test)]
mod tests;
