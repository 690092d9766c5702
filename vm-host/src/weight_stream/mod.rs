//! Streams weights to the device, before a kernel is launched or while it is resident: from files through packing threads, in the order in
//! which a step needs them, or from memory. docs/explanation/runtime.md, "Streamed weight loading".

mod device;
mod in_memory;
mod memory;
mod pipeline;
mod plan;
mod source;
mod uring;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ir::Weights;

pub(crate) use device::{DeviceEnd, DeviceTarget};
pub(crate) use plan::Plan;

use crate::error::HostError;
use memory::{IoBuffer, Staging};
use pipeline::{Order, SLOTS, Target};
pub(crate) use source::Source;
use source::{Files, Threads};
use uring::Uring;

/// Number of threads that pack, and of threads that read where io_uring is not used.
const CREW_MAX: usize = 8;
/// Limit without any arrival, before the launch.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// Limit for a stopped weight stream to end.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How the weights were loaded.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct LoadReport {
    /// Bytes of stored tensors that were read.
    pub bytes: u64,
    /// Packed bytes that were copied to the device, counted with each copy.
    pub packed_bytes: u64,
    /// Seconds from the first read to the last copy.
    pub seconds: f64,
    /// How they were read: `io_uring` or `pread` and in which way, or `memory`.
    pub source: String,
    /// Why io_uring was not used, if it was wanted.
    pub fallback: Option<String>,
}

/// Where weights are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadBy {
    /// What the page cache holds through it; else by io_uring past it; else by threads.
    #[default]
    Auto,
    /// By io_uring, past the page cache if the file system supports it.
    IoUring,
    /// By threads with `pread`, through the page cache.
    Pread,
}

/// How weights are streamed while the kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    /// Where they are read from.
    pub read_by: ReadBy,
    /// Limit without any arrival, after which the rest is abandoned.
    pub limit: Duration,
}

impl Default for Streaming {
    fn default() -> Self {
        Self { read_by: ReadBy::Auto, limit: Duration::from_secs(10) }
    }
}

/// Progress, readable from any thread.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    bytes: AtomicU64,
    /// Packed bytes on the device. A monitor on another thread keeps a reference.
    packed: Arc<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    over: Option<Result<(), Failure>>,
    seconds: f64,
}

/// The reason why the rest of the weights will not arrive.
#[derive(Clone, Debug)]
struct Failure {
    path: String,
    message: String,
}

impl Progress {
    fn new() -> Self {
        let (bytes, packed) = (AtomicU64::new(0), Arc::default());
        let state = Mutex::new(State { over: None, seconds: 0.0 });
        Self { began: Instant::now(), bytes, packed, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A piece is in flight after those before it: this many bytes of files, this many packed.
    pub(crate) fn watermark(&self, bytes: u64, packed: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.packed.fetch_add(packed, Ordering::Relaxed);
    }

    /// No more weights will arrive: all have, or there is a reason.
    pub(crate) fn end(&self, result: Result<(), HostError>) {
        let over = result.map_err(|error| {
            if let HostError::Weights { path, message } = error {
                return Failure { path, message };
            }
            Failure { path: "weights".into(), message: error.to_string() }
        });
        let mut state = self.state();
        state.seconds = self.began.elapsed().as_secs_f64();
        state.over = Some(over);
    }

    // The device cannot be notified either: its own patience ends the wait.
    pub(crate) fn unreachable(&self, error: &HostError) {
        if let Some(Err(failure)) = &mut self.state().over {
            failure.message += &format!("; and the device could not be told: {error}");
        }
    }
}

/// A weight stream in progress.
pub(crate) struct WeightStream<T: Target = DeviceTarget> {
    progress: Arc<Progress>,
    cancel: Arc<AtomicBool>,
    source: String,
    fallback: Option<String>,
    /// Until it has ended: it returns the target, with the first piece that has not arrived.
    thread: Option<JoinHandle<(T, usize)>>,
}

/// Wrapper of a weight stream's source: the identity, except in tests.
pub(crate) type Through<'a> = &'a dyn Fn(Box<dyn Source>) -> Box<dyn Source>;

/// Loads all weights of the plan before a kernel is launched.
pub(crate) fn land_before_launch<T: Target>(
    plan: Arc<Plan>,
    weights: &dyn Weights,
    mut target: T,
) -> Result<LoadReport, HostError> {
    let Some(files) = Files::open(&plan, weights)? else {
        return in_memory::land(&plan, weights, &mut target);
    };
    let streaming = Streaming { limit: READ_LIMIT, ..Streaming::default() };
    let weight_stream = WeightStream::of(plan, files, streaming, target, &|source| source)?;
    weight_stream.wait()?;
    Ok(weight_stream.report())
}

impl<T: Target> WeightStream<T> {
    /// Starts streaming the plan's packed matrices to the target.
    pub(crate) fn start(
        plan: Arc<Plan>,
        weights: &dyn Weights,
        streaming: Streaming,
        target: T,
        through: Through<'_>,
    ) -> Result<Self, HostError> {
        let files = Files::open(&plan, weights)?.ok_or_else(|| {
            HostError::Request(
                "weights that are not in files cannot land while the kernel runs: export the model first".into(),
            )
        })?;
        Self::of(plan, files, streaming, target, through)
    }

    fn of(
        plan: Arc<Plan>,
        files: Files,
        streaming: Streaming,
        mut target: T,
        through: Through<'_>,
    ) -> Result<Self, HostError> {
        let files = Arc::new(files);
        let bytes = files.buffer_bytes();
        let buffers: Vec<_> = (0..SLOTS as u16).map(|index| IoBuffer::new(bytes, index)).collect();
        let (source, fallback) = choose(&files, &buffers, streaming.read_by)?;
        let source = through(source);
        let parts = plan.largest();
        // SAFETY: the trait's promise; the gate of `land` is closed before the target is given back.
        let staging = unsafe { Staging::parts(target.staging(parts * SLOTS), parts, SLOTS) };
        let (progress, cancel) = (Arc::new(Progress::new()), Arc::<AtomicBool>::default());
        let name = source.name();
        let order = Order { plan, files, limit: streaming.limit, crew: threads() };
        let (seen, stop) = (progress.clone(), cancel.clone());
        let body = move || {
            let next = pipeline::land(&order, source, buffers, staging, &mut target, &seen, &stop);
            (target, next)
        };
        let thread = Some(std::thread::spawn(body));
        Ok(Self { progress, cancel, source: name, fallback, thread })
    }

    pub(crate) fn under_way(&self) -> bool {
        self.progress.state().over.is_none()
    }

    /// Waits until no more weights will arrive.
    ///
    /// # Errors
    /// The reason why some have not arrived.
    pub(crate) fn wait(&self) -> Result<(), HostError> {
        while self.under_way() {
            std::thread::sleep(Duration::from_micros(200)); // the weight stream has its own limit
        }
        self.failure().map_or(Ok(()), Err)
    }

    /// Packed bytes on the device, for monitors on other threads.
    pub(crate) fn packed(&self) -> Arc<AtomicU64> {
        self.progress.packed.clone()
    }

    pub(crate) fn failure(&self) -> Option<HostError> {
        match &self.progress.state().over {
            Some(Err(Failure { path, message })) => {
                Some(HostError::Weights { path: path.clone(), message: message.clone() })
            }
            Some(Ok(())) | None => None,
        }
    }

    pub(crate) fn report(&self) -> LoadReport {
        let state = self.progress.state();
        let seconds = match state.over {
            Some(_) => state.seconds,
            None => self.progress.began.elapsed().as_secs_f64(),
        };
        LoadReport {
            bytes: self.progress.bytes.load(Ordering::Relaxed),
            packed_bytes: self.progress.packed.load(Ordering::Relaxed),
            seconds,
            source: self.source.clone(),
            fallback: self.fallback.clone(),
        }
    }

    /// Ends it and returns the target, with the first piece that has not arrived. `None` if its thread does not end; that thread then keeps
    /// everything that it uses.
    pub(crate) fn end(&mut self) -> Option<(T, usize)> {
        self.cancel.store(true, Ordering::Relaxed);
        let limit = Instant::now() + STOP_LIMIT;
        let thread = self.thread.take()?;
        while !thread.is_finished() {
            if Instant::now() > limit {
                return None;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        thread.join().ok()
    }
}

impl<T: Target> Drop for WeightStream<T> {
    fn drop(&mut self) {
        self.end();
    }
}

fn wait_until(
    limit: Duration,
    mut done: impl FnMut() -> Result<bool, HostError>,
) -> Result<(), HostError> {
    let start = Instant::now();
    while !done()? {
        if start.elapsed() > limit {
            return Err(HostError::TimedOut { waited: start.elapsed(), alive: true });
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(CREW_MAX)
}

/// The requested source, or the best available one; and why it is not io_uring where that was meant.
fn choose(
    files: &Arc<Files>,
    buffers: &[IoBuffer],
    read_by: ReadBy,
) -> Result<(Box<dyn Source>, Option<String>), HostError> {
    let cached = |why| -> Result<(Box<dyn Source>, Option<String>), HostError> {
        Ok((Box::new(Threads::new(files, threads(), false)?), why))
    };
    match read_by {
        ReadBy::Pread => cached(None),
        ReadBy::Auto if files.cached() => cached(None),
        ReadBy::Auto | ReadBy::IoUring => match Uring::new(files, buffers, files.direct()) {
            Ok(ring) => Ok((Box::new(ring), None)),
            Err(why) if files.direct() => {
                Ok((Box::new(Threads::new(files, SLOTS, true)?), Some(why)))
            }
            Err(why) => cached(Some(why)),
        },
    }
}

#[cfg(test)]
#[path = "tests/scripted.rs"]
pub(crate) mod scripted;
#[cfg(test)]
mod tests;
