//! An append-only map that is copied often: copies share their common entries.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs of entries, each longer than the next. There are at most as many runs as the length has binary digits, a copy
/// takes as many steps, and an entry moves to a longer run at most that many times.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Growing<K, V> {
    runs: Vec<Arc<BTreeMap<K, V>>>,
    len: usize,
}

impl<K, V> Default for Growing<K, V> {
    fn default() -> Self {
        Self { runs: Vec::new(), len: 0 }
    }
}

impl<K: Clone + Ord, V: Clone> Growing<K, V> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        count(self.runs.len());
        self.runs.iter().find_map(|run| run.get(key))
    }

    /// Adds an entry, unless its key is there.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        if self.get(&key).is_some() {
            return;
        }
        self.len += 1;
        let mut run = BTreeMap::from([(key, value)]);
        while let Some(longer) = self.runs.pop_if(|longer| longer.len() <= run.len()) {
            count(longer.len() + run.len());
            let mut longer = Arc::unwrap_or_clone(longer);
            longer.append(&mut run);
            run = longer;
        }
        self.runs.push(Arc::new(run));
    }

    /// The values, in key order if keys were added in order.
    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.runs.iter().flat_map(|run| run.values()).inspect(|_| count(1))
    }

    /// The values of this key and of greater ones.
    pub(crate) fn values_from(&self, key: K) -> impl Iterator<Item = &V> {
        let runs = self.runs.iter().flat_map(move |run| run.range(key.clone()..));
        runs.map(|(_, value)| value).inspect(|_| count(1))
    }
}

#[cfg(test)]
thread_local! {
    /// Entries that this thread has read or moved.
    pub(crate) static VISITS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn count(_entries: usize) {
    #[cfg(test)]
    VISITS.with(|visits| visits.set(visits.get() + _entries));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_as_they_are_and_nothing_is_lost() {
        let mut map = Growing::default();
        let mut copies = Vec::new();
        for key in 0..100_usize {
            copies.push(map.clone());
            map.insert(key, 2 * key);
            map.insert(key, 0); // is there
        }
        for (len, copy) in copies.iter().enumerate() {
            assert_eq!((copy.len(), copy.runs.len()), (len, len.count_ones() as usize));
            assert!(copy.values().copied().eq((0..len).map(|key| 2 * key)));
            assert!(copy.values().rev().copied().eq((0..len).rev().map(|key| 2 * key)));
            assert!(copy.values_from(40).copied().eq((40..len).map(|key| 2 * key)));
            assert_eq!(
                (copy.get(&len), len.checked_sub(1).and_then(|key| copy.get(&key))),
                (None, len.checked_sub(1).map(|key| 2 * key).as_ref())
            );
        }
    }
}
