//! The telemetry page of this process, and the thread that keeps it fresh: it publishes a heartbeat, polls the kernel
//! if there is one, and writes the metrics file.

mod gpu;
mod kernel;
mod sequences;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use abi::{Activity, Evidence, EvidenceFamily};
use telemetry::{Page, Publisher, Reader, now_ns};

use crate::context::Context;
use crate::device::Gpu;
use crate::failure::Failure;
use crate::report;

use gpu::GpuWatch;
pub(crate) use kernel::KernelWatch;
pub(crate) use sequences::{Command, Sequences, TurnEnd};

/// How often the thread polls. The ring holds 64 answers, so even commands of one step each are all seen.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The monitor handle of a machine, while there is one.
pub(crate) type SharedMonitor = Arc<Mutex<Option<vm_host::Monitor>>>;

/// A file that is written at an interval.
pub(crate) struct MetricsFile {
    pub(crate) path: PathBuf,
    pub(crate) every: Duration,
}

/// The page of this process, which is removed on drop.
pub(crate) struct Observer {
    publisher: Publisher,
    /// The kernel that the thread polls, once there is one.
    monitor: SharedMonitor,
    /// The driver's id of the GPU, once there is one.
    gpu: Arc<OnceLock<String>>,
    over: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Observer {
    /// Creates the page and starts the thread. Without a visible page the process works all the same.
    pub(crate) fn start(
        context: &Context,
        (command, device): (&str, &str),
        places: u32,
        file: Option<MetricsFile>,
    ) -> Result<Self, Failure> {
        Self::of(publisher(context, (command, device), places)?, file)
    }

    /// The page of a search without a GPU, which has no machine to watch. `None` if there can be no page.
    pub(crate) fn of_search(model: &str, device: &str) -> Option<Self> {
        let (publisher, _) = Publisher::new(&telemetry::folder(), |edit| {
            edit.command("search", model);
            edit.device(device);
            edit.known(EvidenceFamily::Control, Evidence::Measured);
        })
        .ok()?;
        Self::of(publisher, None).ok()
    }

    fn of(publisher: Publisher, file: Option<MetricsFile>) -> Result<Self, Failure> {
        let reader = publisher.reader();
        if let Some(file) = &file {
            write_metrics(&file.path, &reader)?;
        }
        let (over, ended) = channel();
        let monitor = SharedMonitor::default();
        let gpu = Arc::<OnceLock<String>>::default();
        let (page, looked, read) = (publisher.clone(), monitor.clone(), gpu.clone());
        let run = move || {
            let mut watch = KernelWatch::default();
            let mut written = Instant::now();
            let mut gpu = GpuWatch::new(read);
            while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                look(&page, &looked, &mut watch);
                gpu.look(&page);
                if let Some(file) = file.as_ref().filter(|file| written.elapsed() >= file.every) {
                    written = Instant::now();
                    let _ = write_metrics(&file.path, &reader); // it was possible at the start
                }
            }
            if let Some(file) = &file {
                look(&page, &looked, &mut watch);
                let _ = write_metrics(&file.path, &reader); // as above
            }
        };
        let thread = std::thread::Builder::new().name("telemetry".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Failure::usage(format!("no thread: {error}")))?;
        Ok(Self { publisher, monitor, gpu, over: Some(over), thread: Some(thread) })
    }

    pub(crate) fn publisher(&self) -> &Publisher {
        &self.publisher
    }

    /// Observes the kernels that a device runs from now on, and its GPU.
    pub(crate) fn observe(&self, device: &mut Gpu<'_>) {
        let gpu = device.observed(&self.monitor, &self.publisher);
        let _ = self.gpu.set(gpu.to_owned()); // a process has one
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        drop(self.over.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been reported
        }
    }
}

/// The page of a process that runs a model.
pub(crate) fn publisher(
    context: &Context,
    (command, device): (&str, &str),
    places: u32,
) -> Result<Publisher, Failure> {
    let graph = context.graph();
    let bytes = graph.weight_bytes() as u64;
    let made = Publisher::new(&telemetry::folder(), |edit| {
        edit.command(command, &graph.name);
        edit.device(device);
        edit.known(EvidenceFamily::Control, Evidence::Measured);
        let head = edit.head();
        (head.places, head.capacity, head.weights_bytes) = (places, context.kv_capacity, bytes);
    });
    let (publisher, hidden) =
        made.map_err(|error| Failure::usage(format!("no memory for telemetry: {error}")))?;
    if let Some(why) = hidden {
        report::say(&format!(
            "note: `amk top` cannot see this process ({}: {why})",
            telemetry::folder().path().display()
        ));
    }
    Ok(publisher)
}

fn look(page: &Publisher, monitor: &SharedMonitor, watch: &mut KernelWatch) {
    let monitor = monitor.lock().unwrap_or_else(PoisonError::into_inner);
    page.edit(|edit| {
        if let Some(monitor) = &*monitor {
            watch.look(monitor, edit, now_ns());
        }
    });
}

/// Changes the activity of the process, and adds up the time of the previous one.
pub(crate) fn enter_at(head: &mut abi::Telemetry, activity: Activity, now_ns: u64) {
    let began = if head.activity_ns == 0 { head.started_ns } else { head.activity_ns };
    let spent = now_ns.saturating_sub(began);
    if let Some(sum) = head.spent_ns.get_mut(head.activity as usize) {
        *sum = sum.saturating_add(spent);
    }
    (head.activity, head.activity_ns) = (activity as u32, now_ns);
}

pub(crate) fn snapshot(reader: &Reader) -> Option<Box<Page>> {
    let mut page = Page::boxed();
    reader.read(&mut page).ok().map(|()| page)
}

/// Writes the metrics atomically: to a temporary file, which then replaces the old one.
fn write_metrics(path: &Path, reader: &Reader) -> Result<(), Failure> {
    let Some(page) = snapshot(reader) else { return Ok(()) };
    let text = telemetry::openmetrics(page);
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    let written = std::fs::File::create(&beside)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| std::fs::rename(&beside, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&beside); // there may be none
        Failure::cannot("write metrics to", path, "--metrics-file takes another path")(error)
    })
}
