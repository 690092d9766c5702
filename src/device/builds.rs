//! Kernels that are compiled before they are asked for. A build that is found finished costs its first trial a read from the cache;
//! which trial that is, and what it decides, does not depend on it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;

/// Compilers beside the search, which leaves most cores to the reference machine.
const COMPILERS: usize = 4;

/// What one compilation does; its result is left where the device looks for it.
type Compile<V> = dyn Fn(&V) + Send + Sync;

/// A compilation. Whoever comes first does it, and who comes meanwhile waits.
type Build<V> = (V, Arc<OnceLock<()>>);

/// Compilers at work on kernel variants.
pub(super) struct Builds<V> {
    compile: Arc<Compile<V>>,
    known: Vec<Build<V>>,
    waiting: Option<Sender<Build<V>>>,
    queue: Arc<Mutex<Receiver<Build<V>>>>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl<V: Copy + PartialEq + Send + 'static> Builds<V> {
    /// No thread is started before there is something to compile.
    pub(super) fn new(compile: impl Fn(&V) + Send + Sync + 'static) -> Self {
        let (waiting, queue) = channel();
        Self {
            compile: Arc::new(compile),
            known: Vec::new(),
            waiting: Some(waiting),
            queue: Arc::new(Mutex::new(queue)),
            over: Arc::default(),
            threads: Vec::new(),
        }
    }

    /// Compiles these after those already asked for. A variant is asked for once.
    pub(super) fn ask(&mut self, variants: impl Iterator<Item = V>) {
        for variant in variants {
            if self.find(&variant).is_none() {
                let build: Build<V> = (variant, Arc::default());
                self.known.push(build.clone());
                // The queue lives as long as this.
                let _ = self.waiting.as_ref().map(|waiting| waiting.send(build));
                if self.threads.len() < COMPILERS {
                    self.threads.push(self.compiler());
                }
            }
        }
    }

    /// A thread that compiles until nobody wants anything any more.
    fn compiler(&self) -> JoinHandle<()> {
        let (queue, compile) = (self.queue.clone(), self.compile.clone());
        let over = self.over.clone();
        std::thread::spawn(move || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Some((variant, build)) = next.ok().filter(|_| !over.load(Ordering::Relaxed))
                else {
                    return;
                };
                build.get_or_init(|| compile(&variant));
            }
        })
    }

    fn find(&self, variant: &V) -> Option<&Build<V>> {
        self.known.iter().find(|(known, _)| known == variant)
    }

    /// Returns when this variant is compiled, if it was asked for.
    pub(super) fn settle(&self, variant: &V) {
        if let Some((_, build)) = self.find(variant) {
            build.get_or_init(|| (self.compile)(variant));
        }
    }
}

impl<V> Drop for Builds<V> {
    /// Waits for compilations under way: ending a process inside a compiler may crash it.
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.waiting = None;
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
