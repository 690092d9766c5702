//! Kernels that are compiled before they are asked for. A build that is found finished costs its first trial a read from the cache;
//! which trial that is, and what it decides, does not depend on it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Compilers beside the search, which leaves most cores to the reference machine.
const COMPILERS: usize = 4;

/// What one compilation does; its result is left where the device looks for it.
type Compile<V> = dyn Fn(&V) + Send + Sync;

struct State<V> {
    waiting: VecDeque<V>,
    running: Vec<V>,
    known: Vec<V>,
    over: bool,
}

struct Shared<V> {
    state: Mutex<State<V>>,
    changed: Condvar,
}

impl<V: Copy + PartialEq> Shared<V> {
    fn lock(&self) -> MutexGuard<'_, State<V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State<V>>) -> MutexGuard<'s, State<V>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles until nobody wants anything any more.
    fn work(&self, compile: &Compile<V>) {
        let mut state = self.lock();
        while !state.over {
            let Some(variant) = state.waiting.pop_front() else {
                state = self.wait(state);
                continue;
            };
            state.running.push(variant);
            drop(state);
            compile(&variant);
            state = self.lock();
            state.running.retain(|&other| other != variant);
            self.changed.notify_all();
        }
    }
}

/// Compilers at work on kernel variants.
pub(super) struct Builds<V: Copy + PartialEq> {
    shared: Arc<Shared<V>>,
    compile: Arc<Compile<V>>,
    threads: Vec<JoinHandle<()>>,
}

impl<V: Copy + PartialEq + Send + 'static> Builds<V> {
    /// No thread is started before there is something to compile.
    pub(super) fn new(compile: impl Fn(&V) + Send + Sync + 'static) -> Self {
        let state =
            State { waiting: VecDeque::new(), running: Vec::new(), known: Vec::new(), over: false };
        let shared = Shared { state: Mutex::new(state), changed: Condvar::new() };
        Self { shared: Arc::new(shared), compile: Arc::new(compile), threads: Vec::new() }
    }

    /// Compiles these after those already asked for. A variant is asked for once.
    pub(super) fn ask(&mut self, variants: impl Iterator<Item = V>) {
        let mut state = self.shared.lock();
        for variant in variants {
            if !state.known.contains(&variant) {
                state.known.push(variant);
                state.waiting.push_back(variant);
            }
        }
        let wanted = state.waiting.len().min(COMPILERS);
        drop(state);
        self.shared.changed.notify_all();
        while self.threads.len() < wanted {
            let (shared, compile) = (self.shared.clone(), self.compile.clone());
            self.threads.push(std::thread::spawn(move || shared.work(&*compile)));
        }
    }

    /// Returns when no thread compiles this variant: it is done, or it is the caller's.
    pub(super) fn settle(&self, variant: &V) {
        let mut state = self.shared.lock();
        state.waiting.retain(|other| other != variant);
        if !state.known.contains(variant) {
            state.known.push(*variant);
        }
        while state.running.contains(variant) {
            state = self.shared.wait(state);
        }
    }
}

impl<V: Copy + PartialEq> Drop for Builds<V> {
    /// Waits for compilations under way: ending a process inside a compiler may crash it.
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.waiting.clear();
            state.over = true;
        }
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_variant_is_compiled_once_and_waited_for() {
        let count = Arc::new(AtomicUsize::new(0));
        let seen = count.clone();
        let mut builds = Builds::new(move |_: &u32| {
            std::thread::sleep(Duration::from_millis(5));
            seen.fetch_add(1, Ordering::SeqCst);
        });
        builds.ask(0..6);
        builds.ask(0..6);
        while count.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now(); // until a thread has taken one
        }
        for variant in 0..6 {
            builds.settle(&variant);
            assert!(!builds.shared.lock().running.contains(&variant));
        }
        drop(builds);
        // Those that were settled before a thread took them are the caller's.
        assert!((1..=6).contains(&count.load(Ordering::SeqCst)));
    }

    #[test]
    fn dropping_ends_the_threads_and_forgets_what_waits() {
        let count = Arc::new(AtomicUsize::new(0));
        let seen = count.clone();
        let mut builds = Builds::new(move |_: &u32| {
            std::thread::sleep(Duration::from_millis(2));
            seen.fetch_add(1, Ordering::SeqCst);
        });
        builds.ask(0..200);
        drop(builds);
        assert!(count.load(Ordering::SeqCst) < 200);
    }
}
