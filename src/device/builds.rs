//! Speculative kernel builds, compiled before they are needed. A finished build costs its first trial only a read from
//! the cache; it does not affect which trial that is or what it decides.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Background compilers. Most cores are left to the reference VM.
const COMPILERS: usize = 4;

/// Compiles one variant; its result goes where the device looks for it.
type Compile<V> = dyn Fn(&V) + Send + Sync;

/// Background compilations of kernel variants.
pub(super) struct Builds<V> {
    compile: Arc<Compile<V>>,
    /// Compilations. The first caller compiles, and later callers wait.
    known: Vec<(V, Arc<OnceLock<()>>)>,
    over: Arc<AtomicBool>,
    /// Threads are started only when there is something to compile.
    pool: Option<ThreadPool>,
}

impl<V: Copy + PartialEq + Send + 'static> Builds<V> {
    pub(super) fn new(compile: impl Fn(&V) + Send + Sync + 'static) -> Self {
        Self { compile: Arc::new(compile), known: Vec::new(), over: Arc::default(), pool: None }
    }

    /// Enqueues these after the earlier ones. A variant is enqueued once.
    pub(super) fn ask(&mut self, variants: impl Iterator<Item = V>) {
        for variant in variants {
            if self.find(&variant).is_some() {
                continue;
            }
            let build: Arc<OnceLock<()>> = Arc::default();
            self.known.push((variant, build.clone()));
            if self.pool.is_none() {
                let pool = ThreadPoolBuilder::new().num_threads(COMPILERS);
                // The caller that needs a failed build gets the error.
                self.pool = pool.panic_handler(|_| {}).build().ok();
            }
            let (compile, over) = (self.compile.clone(), self.over.clone());
            let Some(pool) = &self.pool else { return };
            pool.spawn_fifo(move || {
                if !over.load(Ordering::Relaxed) {
                    build.get_or_init(|| compile(&variant));
                }
            });
        }
    }

    fn find(&self, variant: &V) -> Option<&OnceLock<()>> {
        let known = self.known.iter().find(|(known, _)| known == variant);
        known.map(|(_, build)| &**build)
    }

    /// Returns when this variant is compiled, if it was enqueued.
    pub(super) fn settle(&self, variant: &V) {
        if let Some(build) = self.find(variant) {
            build.get_or_init(|| (self.compile)(variant));
        }
    }
}

impl<V> Drop for Builds<V> {
    /// Waits for running compilations: ending a process inside a compiler may crash it.
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.pool.iter().for_each(|pool| drop(pool.broadcast(|_| ())));
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
        for variant in 0..7 {
            builds.settle(&variant);
        }
        assert_eq!(count.load(Ordering::SeqCst), 6, "nobody asked for the seventh");
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
