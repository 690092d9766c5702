//! Brings weights to the device, before a kernel is launched or while it is resident: from files through packing threads, in the order in
//! which a step needs them, or out of memory. docs/explanation/runtime.md, "Streamed weight loading".

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

pub(crate) use device::DeviceTarget;
pub(crate) use plan::Plan;

use crate::error::HostError;
use memory::{IoBuffer, Staging};
use pipeline::{Order, SLOTS, Target};
pub(crate) use source::Source;
use source::{Files, Threads};
use uring::Uring;

/// Threads that pack, and that read where io_uring does not.
const CREW_MAX: usize = 8;
/// How long nothing may come before the launch.
const READ_LIMIT: Duration = Duration::from_secs(60);
/// How long a stopped weight streaming may take to notice.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How the weights came in.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct LoadReport {
    /// Bytes of stored tensors that were read.
    pub bytes: u64,
    /// Seconds from the first read to the last copy.
    pub seconds: f64,
    /// How they were read: `io_uring` or `pread` and in which way, or `memory`.
    pub source: String,
    /// Why io_uring was not used, where it was wanted.
    pub fallback: Option<String>,
}

/// Where weights are read from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadBy {
    /// Through the page cache what it holds, else by io_uring past it, else by threads.
    #[default]
    Auto,
    /// By io_uring, past the page cache where the file system can.
    IoUring,
    /// By threads with `pread`, through the page cache.
    Pread,
}

/// How weights are to be brought in while the kernel runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streaming {
    /// Where they are read from.
    pub read_by: ReadBy,
    /// How long nothing may come before they are given up.
    pub limit: Duration,
}

impl Default for Streaming {
    fn default() -> Self {
        Self { read_by: ReadBy::Auto, limit: Duration::from_secs(10) }
    }
}

/// How far it has come, for everybody to see.
#[derive(Debug)]
pub(crate) struct Progress {
    began: Instant,
    bytes: AtomicU64,
    /// Packed bytes on the device. Whoever looks on from another thread keeps it.
    packed: Arc<AtomicU64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    over: Option<Result<(), Failure>>,
    seconds: f64,
}

/// Why weights will not come.
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

    /// A piece is on its way behind those before it: so many bytes of files, so many packed.
    pub(crate) fn watermark(&self, bytes: u64, packed: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.packed.fetch_add(packed, Ordering::Relaxed);
    }

    /// No more weights will come: they are all there, or there is a reason.
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

    /// Not even that could be said to the device: its own patience ends the wait.
    pub(crate) fn unreachable(&self, error: &HostError) {
        if let Some(Err(failure)) = &mut self.state().over {
            failure.message += &format!("; and the device could not be told: {error}");
        }
    }
}

/// Weights on their way to a target.
pub(crate) struct WeightStream<T: Target = DeviceTarget> {
    progress: Arc<Progress>,
    cancel: Arc<AtomicBool>,
    source: String,
    fallback: Option<String>,
    /// Until it has ended: it gives the target back, with the first piece that has not arrived.
    thread: Option<JoinHandle<(T, usize)>>,
}

/// What a weight streaming's source is read through: nothing, but for tests.
pub(crate) type Through<'a> = &'a dyn Fn(Box<dyn Source>) -> Box<dyn Source>;

/// Brings in all weights of the plan before a kernel is launched.
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
    /// Starts. The plan's packed matrices go to the target.
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

    /// Until no more weights will come.
    ///
    /// # Errors
    /// Why they have not all come.
    pub(crate) fn wait(&self) -> Result<(), HostError> {
        while self.under_way() {
            std::thread::sleep(Duration::from_micros(200)); // the weight streaming bounds it
        }
        self.failure().map_or(Ok(()), Err)
    }

    /// Packed bytes on the device, for whoever looks on from another thread.
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
            seconds,
            source: self.source.clone(),
            fallback: self.fallback.clone(),
        }
    }

    /// Ends it and gives the target back, with the first piece that has not arrived. Nothing if its thread does not end, which keeps all that it
    /// uses.
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

/// The source that is asked for, or the best there is; and why it is not io_uring where that was meant.
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
