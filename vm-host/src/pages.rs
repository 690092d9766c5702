//! Pages of the key/value cache: which session has which, and where they lie.
//!
//! The cache of a layer is `[pages][2][kv_heads][KV_PAGE][head_dim]`. A session has a row of page numbers, in the order of its positions; the
//! rows lie in device memory, and the kernel finds keys and values through them ([decision 021](../../docs/decisions/021-paged-key-value-caches.md)).
//! All pages are there before the launch; between two commands of a session its row grows, and at its end the pages are given back.

use abi::{KV_ELEMENT_BYTES, KV_PAGE, KV_PAGES_MAX};
use ir::program::{BufferSource, Program};

use crate::error::HostError;

mod tables;

#[cfg(test)]
pub(crate) use tables::CACHE_POISON;
pub(crate) use tables::PageTables;

/// How large the pool of pages is from which the sessions of a machine draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvPool {
    /// Every session can have its full capacity.
    #[default]
    Full,
    /// As the former if that fits, else what fits.
    Fitting,
    /// So many positions of all sessions together, rounded up to whole pages.
    Positions(u64),
}

/// There are not so many pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} more pages of {KV_PAGE} positions for session {session}; {unpromised} of {pages} are not promised to others: end a session, or set more aside (--kv-pool)"
)]
pub struct NoPages {
    /// Who asked.
    pub session: u32,
    /// For how many more.
    pub wanted: u32,
    /// That nobody was promised.
    pub unpromised: u32,
    /// That there are.
    pub pages: u32,
}

/// What a pool holds at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Occupancy {
    /// Pages that sessions can have.
    pub pages: u32,
    /// In which positions of some session lie.
    pub held: u32,
    /// Promised to sessions, those that they hold included.
    pub promised: u32,
}

/// Pages that so many positions take.
#[must_use]
pub fn pages_of(positions: u32) -> u32 {
    positions.div_ceil(KV_PAGE)
}

/// What one session has.
#[derive(Clone, Debug, Default)]
struct Share {
    /// In the order of its positions.
    held: Vec<u32>,
    /// How many it may have without asking again; never fewer than it holds.
    promised: u32,
}

/// The pages of a machine. A page is one session's or nobody's, and what was promised can be had: the promises are never more than the
/// pages, so that a session that was let in never waits in the middle for another's end.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Those of nobody; the last is the next to be given.
    free: Vec<u32>,
    shares: Vec<Share>,
    pages: u32,
    promised: u32,
}

impl PagePool {
    /// For so many sessions, with so many pages beside page zero, which is nobody's.
    #[must_use]
    pub fn new(sessions: u32, pages: u32) -> Self {
        let pages = pages.min(KV_PAGES_MAX - 1);
        let shares = vec![Share::default(); sessions as usize];
        Self { free: (1..=pages).rev().collect(), shares, pages, promised: 0 }
    }

    /// Promises a session pages for its first so many positions. It keeps what it was promised before.
    ///
    /// # Errors
    /// If that is more than nobody was promised; then nothing has changed.
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

    /// Gives a session the pages that its first so many positions lack, promising them if they were not. How many there were before.
    ///
    /// # Errors
    /// As [`promise`](Self::promise).
    pub fn grow(&mut self, session: u32, positions: u32) -> Result<usize, NoPages> {
        self.promise(session, positions)?;
        let held = &mut self.shares[session as usize].held;
        let before = held.len();
        let lacking = (pages_of(positions) as usize).saturating_sub(before);
        let rest = self.free.len() - lacking; // what is promised is there
        held.extend(self.free.drain(rest..).rev());
        Ok(before)
    }

    /// Takes back what a session has, and what it was promised.
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

    /// How full it is.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        let held = self.pages - self.free.len() as u32;
        Occupancy { pages: self.pages, held, promised: self.promised }
    }
}

/// How a layer's cache lies in its pages. The device's half is pages.cuh.
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
/// the last page is copied in whole tiles. Whole lines of 16 bytes, which the loader takes at once.
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

/// Pages that a pool is to have, page zero not counted, for so many sessions of a capacity. `room` is how many fit into memory, `spare` how many of
/// them are left alone if they need not be taken.
///
/// # Errors
/// With how many it would take, if they do not fit.
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
