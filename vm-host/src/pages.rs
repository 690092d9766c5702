//! Pages of the key/value cache: their allocation to sessions, and their layout.
//!
//! The cache of a layer is `[pages][2][kv_heads][KV_PAGE]` rows. A session has a row of page numbers, in the order of its positions. The
//! rows are in device memory, and the kernel finds keys and values through them ([decision 021](../../docs/decisions/021-paged-key-value-caches.md)).
//! All pages are allocated before the launch. Between two commands of a session its row grows; at its end its pages are returned.

use std::ops::Range;

use abi::{KV_PAGE, KV_PAGES_MAX};
use ir::KvDtype;
use ir::program::{BufferSource, Program};

use crate::error::HostError;

mod prefixes;
mod tables;

use prefixes::{Block, PrefixIndex};

#[cfg(test)]
pub(crate) use tables::CACHE_POISON;
pub(crate) use tables::{DeviceCaches, PageTables};

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
    /// Pages that hold positions of some session, each once.
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
    /// Its last block in the prefix index, and the number of blocks up to it.
    last: Block,
    published: usize,
}

/// The pages of a machine. A page is held by a session, free, or idle: it keeps the keys and values of a known beginning for the next session
/// with that beginning, until it is needed. Sessions with equal beginnings hold the same full pages, which nobody writes. Promises never exceed
/// the pages, so that an admitted session never waits for another's end.
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Pages without contents; the last is allocated next.
    free: Vec<u32>,
    /// Per page: the sessions that hold it.
    holders: Vec<u32>,
    shares: Vec<Share>,
    prefixes: PrefixIndex,
    pages: u32,
    /// Pages that sessions hold, each once.
    held: u32,
    /// Pages promised to sessions beyond those that they hold.
    owed: u32,
}

impl PagePool {
    /// For `sessions` sessions, with `pages` pages besides page zero, which belongs to no session.
    #[must_use]
    pub fn new(sessions: u32, pages: u32) -> Self {
        let pages = pages.min(KV_PAGES_MAX - 1);
        Self {
            free: (1..=pages).rev().collect(),
            holders: vec![0; pages as usize + 1],
            shares: vec![Share::default(); sessions as usize],
            prefixes: PrefixIndex::new(pages),
            pages,
            held: 0,
            owed: 0,
        }
    }

    fn unpromised(&self) -> u32 {
        self.pages - self.held - self.owed
    }

    fn refuse(&self, session: u32, wanted: u32) -> NoPages {
        NoPages { session, wanted, unpromised: self.unpromised(), pages: self.pages }
    }

    /// Promises a session pages for its first `positions` positions. It keeps what it was promised before.
    ///
    /// # Errors
    /// If too few pages are unpromised; then nothing has changed.
    pub fn promise(&mut self, session: u32, positions: u32) -> Result<(), NoPages> {
        let promised = self.shares.get(session as usize).map(|share| share.promised);
        let wanted = pages_of(positions).saturating_sub(promised.unwrap_or(0));
        if wanted > self.unpromised() || promised.is_none() {
            return Err(self.refuse(session, wanted));
        }
        self.shares[session as usize].promised += wanted;
        self.owed += wanted;
        Ok(())
    }

    /// Whether a session without pages could be promised `positions` positions that begin with `prompt`.
    #[must_use]
    pub fn has_room(&self, positions: u32, prompt: &[u32]) -> bool {
        self.needs(positions, &self.known(prompt)) <= self.unpromised()
    }

    /// Unpromised pages that a session takes whose first pages are these.
    fn needs(&self, positions: u32, known: &[(u32, Block)]) -> u32 {
        let used = known.iter().filter(|(page, _)| self.holders[*page as usize] > 0).count();
        pages_of(positions).saturating_sub(used as u32)
    }

    /// The pages that hold the beginning of a prompt, without its last token, which has to run: its logits are those of the next token.
    fn known(&self, prompt: &[u32]) -> Vec<(u32, Block)> {
        self.prefixes.find(&prompt[..prompt.len().saturating_sub(1)])
    }

    /// Begins a session without pages: promises it `positions` positions, and gives it the pages that hold the beginning of `prompt`. Returns the
    /// number of positions that it has.
    ///
    /// # Errors
    /// As [`promise`](Self::promise).
    pub fn begin(&mut self, session: u32, positions: u32, prompt: &[u32]) -> Result<u32, NoPages> {
        let known = self.known(prompt);
        let empty = self.shares.get(session as usize).is_some_and(|share| share.promised == 0);
        if !empty || known.is_empty() {
            self.promise(session, positions)?;
            return Ok(0);
        }
        let needs = self.needs(positions, &known);
        if needs > self.unpromised() {
            return Err(self.refuse(session, needs));
        }
        let promised = pages_of(positions).max(known.len() as u32);
        self.shares[session as usize].promised = promised;
        self.owed += promised;
        Ok(self.take(session, &known))
    }

    /// Gives a session whose first `ran` positions are there the next pages of its prompt that other sessions have filled since. Returns the
    /// number of positions that it has then.
    pub fn reuse(&mut self, session: u32, ran: u32, prompt: &[u32]) -> u32 {
        let Some(share) = self.shares.get(session as usize) else { return ran };
        let (held, promised) = (share.held.len(), share.promised as usize);
        if ran as usize != held * KV_PAGE as usize {
            return ran;
        }
        let mut known = self.known(prompt);
        known.truncate(promised);
        match known.get(held..) {
            Some(next) if !next.is_empty() => self.take(session, next),
            _ => ran,
        }
    }

    /// Appends pages to those of a session, which has a promise for them. Returns its positions.
    fn take(&mut self, session: u32, pages: &[(u32, Block)]) -> u32 {
        for &(page, _) in pages {
            if self.holders[page as usize] == 0 {
                self.prefixes.wake(page);
                self.held += 1;
            }
            self.holders[page as usize] += 1;
            self.owed -= 1;
        }
        let share = &mut self.shares[session as usize];
        share.held.extend(pages.iter().map(|(page, _)| page));
        share.last = pages.last().map_or(share.last, |(_, block)| *block);
        share.published = share.held.len();
        share.held.len() as u32 * KV_PAGE
    }

    /// Makes known that a session's first positions hold the keys and values of `tokens`, so that later sessions can have its full pages. Returns
    /// the pages that became known, with the index of their first position.
    pub fn publish(&mut self, session: u32, tokens: &[u32]) -> Vec<(u32, u32)> {
        let Some(share) = self.shares.get_mut(session as usize) else { return Vec::new() };
        let mut new = Vec::new();
        let blocks = tokens.chunks_exact(KV_PAGE as usize).enumerate();
        for (index, block) in blocks.skip(share.published) {
            let Some(&page) = share.held.get(index) else { break };
            let (last, is_new) = self.prefixes.add(share.last, block, page);
            (share.last, share.published) = (last, index + 1);
            if is_new {
                new.push((page, index as u32 * KV_PAGE));
            }
        }
        new
    }

    /// Forgets which pages hold the beginnings of prompts: their contents are lost. Pages of sessions stay theirs.
    pub fn forget(&mut self) {
        self.free.extend(self.prefixes.clear());
        for share in &mut self.shares {
            // What such a session adds has an unknown beginning.
            share.published = usize::MAX;
        }
    }

    /// Allocates the pages that a session's first positions lack, promising them if they were not. Returns how many it had before.
    ///
    /// # Errors
    /// As [`promise`](Self::promise).
    pub fn grow(&mut self, session: u32, positions: u32) -> Result<usize, NoPages> {
        self.promise(session, positions)?;
        let before = self.shares[session as usize].held.len();
        for _ in before..pages_of(positions) as usize {
            // Promised pages are always available.
            let Some(page) = self.free.pop().or_else(|| self.prefixes.evict()) else { break };
            self.holders[page as usize] = 1;
            self.held += 1;
            self.owed -= 1;
            self.shares[session as usize].held.push(page);
        }
        Ok(before)
    }

    /// Takes back a session's pages and promises. Known pages stay until others need them: the last of a beginning go first.
    pub fn release(&mut self, session: u32) {
        let Some(share) = self.shares.get_mut(session as usize) else { return };
        let share = std::mem::take(share);
        self.owed -= share.promised - share.held.len() as u32;
        for page in share.held.into_iter().rev() {
            self.holders[page as usize] -= 1;
            if self.holders[page as usize] > 0 {
                continue;
            }
            self.held -= 1;
            if !self.prefixes.rest(page) {
                self.free.push(page);
            }
        }
    }

    /// Whether a session alone holds a page, and no other can get it as the beginning of a prompt.
    pub(crate) fn is_own(&self, page: u32) -> bool {
        self.holders[page as usize] == 1 && !self.prefixes.knows(page)
    }

    /// The pages of a session, in the order of its positions.
    #[must_use]
    pub fn held(&self, session: u32) -> &[u32] {
        self.shares.get(session as usize).map_or(&[], |share| &share.held)
    }

    /// Its occupancy.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        Occupancy { pages: self.pages, held: self.held, promised: self.held + self.owed }
    }
}

/// Layout of a layer's cache in its pages. The device's half is pages.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLayout {
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) dtype: KvDtype,
}

impl PageLayout {
    pub(crate) fn new(kv_heads: u32, head_dim: u32, dtype: KvDtype) -> Self {
        Self { kv_heads, head_dim, dtype }
    }

    /// Bytes of the keys, or values, of a head at one position.
    pub(crate) fn row_bytes(self) -> u32 {
        self.dtype.row_bytes(self.head_dim)
    }

    /// That of a device with these heads of a program, at least one.
    pub(crate) fn of(program: &Program, heads: Range<u32>) -> Self {
        Self::new(heads.len().max(1) as u32, program.dims.head_dim, program.kv_dtype())
    }

    /// Bytes of a head's keys, or values, in a page.
    pub(crate) fn head_bytes(self) -> u32 {
        KV_PAGE * self.row_bytes()
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

/// Layers of a program that have a cache.
pub(crate) fn cached_layers(program: &Program) -> u64 {
    let cached =
        |buffer: &&ir::program::Buffer| matches!(buffer.source, BufferSource::KvCache { .. });
    program.buffers.iter().filter(cached).count() as u64
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
