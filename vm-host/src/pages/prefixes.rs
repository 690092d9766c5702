//! Equal beginnings: which page holds the keys and values of which tokens.
//!
//! A block is the tokens of a full page after those of the blocks before it. Blocks are found by hash and compared token by token, so that
//! no two beginnings are ever taken for each other.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use abi::KV_PAGE;

/// A block by its number, which is never used again; 0 is the empty beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Block(u64);

/// The block before, and the tokens.
type Key = (Block, Arc<[u32]>);

/// The known blocks. Each lies in one page.
#[derive(Clone, Debug)]
pub(super) struct PrefixIndex {
    known: HashMap<Key, (u32, Block)>,
    /// Per page: the block in it.
    keys: Vec<Option<Key>>,
    /// Pages in no session, by the time of their release.
    idle: BTreeMap<u64, u32>,
    /// Per page: that time.
    released: Vec<u64>,
    blocks: u64,
    clock: u64,
}

impl PrefixIndex {
    pub(super) fn new(pages: u32) -> Self {
        Self {
            known: HashMap::new(),
            keys: vec![None; pages as usize + 1],
            idle: BTreeMap::new(),
            released: vec![0; pages as usize + 1],
            blocks: 0,
            clock: 0,
        }
    }

    /// The pages of the known blocks that the tokens begin with.
    pub(super) fn find(&self, tokens: &[u32]) -> Vec<(u32, Block)> {
        let mut before = Block::default();
        let mut found = Vec::new();
        for tokens in tokens.chunks_exact(KV_PAGE as usize) {
            let Some(&(page, block)) = self.known.get(&(before, tokens.into())) else { break };
            found.push((page, block));
            before = block;
        }
        found
    }

    /// Adds the block in a page, unless it is known in another page. Returns it, and whether it is new.
    pub(super) fn add(&mut self, before: Block, tokens: &[u32], page: u32) -> (Block, bool) {
        let key: Key = (before, tokens.into());
        if let Some(&(_, block)) = self.known.get(&key) {
            return (block, false);
        }
        self.blocks += 1;
        let block = Block(self.blocks);
        self.keys[page as usize] = Some(key.clone());
        self.known.insert(key, (page, block));
        (block, true)
    }

    pub(super) fn knows(&self, page: u32) -> bool {
        self.keys[page as usize].is_some()
    }

    /// Keeps a page that no session holds any more, if its block is known.
    pub(super) fn rest(&mut self, page: u32) -> bool {
        if !self.knows(page) {
            return false;
        }
        self.clock += 1;
        self.released[page as usize] = self.clock;
        self.idle.insert(self.clock, page);
        true
    }

    /// A session takes an idle page.
    pub(super) fn wake(&mut self, page: u32) {
        self.idle.remove(&self.released[page as usize]);
    }

    /// Forgets the page that has been idle longest, and returns it.
    pub(super) fn evict(&mut self) -> Option<u32> {
        let (_, page) = self.idle.pop_first()?;
        if let Some(key) = self.keys[page as usize].take() {
            self.known.remove(&key);
        }
        Some(page)
    }

    /// Forgets everything, and returns the idle pages.
    pub(super) fn clear(&mut self) -> Vec<u32> {
        self.known.clear();
        self.keys.fill(None);
        std::mem::take(&mut self.idle).into_values().collect()
    }

    #[cfg(test)]
    pub(super) fn idle_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.idle.values().copied()
    }
}
