//! The threads that stream weights: a reader, a crew of packers, and the lander, which copies and raises the watermark.
//!
//! ```text
//!          free slots                                   in stream order
//!   ┌──────────────────────────────────────────────────────────────┐
//!   └► reader ─ start, next ─► crew ─ pack ─► lander ─ copy, arrived ┘
//! ```
//!
//! A slot (a buffer to read into, a part of the page-locked memory to pack into) is handed out in stream order and returned when its copy is
//! done. So the next piece in order always has one, and nothing can be stuck behind it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use crate::error::HostError;
use crate::weight_stream::Progress;
use crate::weight_stream::memory::{IoBuffer, Staging};
use crate::weight_stream::plan::{Plan, pack};
use crate::weight_stream::source::{Extent, Files, Job, Source};

/// Pieces in flight at once.
pub(crate) const SLOTS: usize = 16;
/// How often the lander checks for copies while nothing arrives.
const TICK: Duration = Duration::from_micros(200);

/// Destination of pieces: the device, or memory in tests.
///
/// # Safety
/// `staging` returns memory that lives as long as the target and has no other user.
pub(crate) unsafe trait Target: Send + 'static {
    /// This many bytes of page-locked memory, allocated before.
    fn staging(&self, bytes: usize) -> *mut u8;
    /// Called first, on the thread that calls the other methods.
    fn enter(&mut self) -> Result<(), HostError>;
    /// Starts the copy of a packed piece to a byte offset of what a device has of a matrix.
    fn copy(
        &mut self,
        matrix: usize,
        place: (usize, u64),
        from: &Staging,
        bytes: usize,
    ) -> Result<(), HostError>;
    /// Writes every device's `watermark` after every copy started so far, then records the end of this slot's.
    fn watermark(&mut self, value: u32, slot: usize) -> Result<(), HostError>;
    /// Whether the slot's copy has completed.
    fn copied(&mut self, slot: usize) -> Result<bool, HostError>;
}

/// Buffers that a piece passes through.
struct Slot {
    io: IoBuffer,
    staging: Staging,
}

/// A piece whose bytes have been read.
struct Read {
    job: Job,
    staging: Staging,
}

/// Messages to the lander.
enum Message {
    Packed { piece: usize, slot: Slot },
    Failed(HostError),
}

/// Open while packed pieces may be written: after closing it, no thread writes any more.
#[derive(Clone)]
struct Gate(Arc<RwLock<bool>>);

impl Gate {
    fn new() -> Self {
        Self(Arc::new(RwLock::new(true)))
    }

    fn pass<R>(&self, body: impl FnOnce() -> R) -> Option<R> {
        let open = self.0.read().unwrap_or_else(PoisonError::into_inner);
        open.then(body)
    }

    fn close(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// The plan, and the limit of a wait for it.
pub(crate) struct Order {
    pub(crate) plan: Arc<Plan>,
    pub(crate) files: Arc<Files>,
    /// Limit without any arrival.
    pub(crate) limit: Duration,
    pub(crate) crew: usize,
}

/// Streams everything; returns the first piece that did not arrive. Runs on the calling thread; the other threads end by themselves. On a
/// failure, `watermark` is set to abandoned.
pub(crate) fn land<T: Target>(
    order: &Order,
    source: Box<dyn Source>,
    buffers: Vec<IoBuffer>,
    staging: Vec<Staging>,
    target: &mut T,
    progress: &Progress,
    cancel: &AtomicBool,
) -> usize {
    let gate = Gate::new();
    let mut next = 0;
    let result = target.enter().and_then(|()| {
        let (free, messages) = start(order, source, buffers, staging, &gate)?;
        lander(order, target, progress, cancel, &free, &messages, &mut next)
    });
    gate.close();
    // The reason is stored before waiting readers continue.
    let failed = result.is_err();
    progress.end(result);
    if failed && let Err(error) = target.watermark(abi::WATERMARK_ABANDONED, SLOTS) {
        progress.unreachable(&error);
    }
    next
}

fn start(
    order: &Order,
    source: Box<dyn Source>,
    buffers: Vec<IoBuffer>,
    staging: Vec<Staging>,
    gate: &Gate,
) -> Result<(Sender<Slot>, Receiver<Message>), HostError> {
    let (free, slots) = channel();
    for (io, staging) in buffers.into_iter().zip(staging) {
        free.send(Slot { io, staging }).map_err(|_| gone())?;
    }
    let (read, to_pack) = channel();
    let (tell, messages) = channel();
    let to_pack = Arc::new(Mutex::new(to_pack));
    for _ in 0..order.crew.max(1) {
        let (to_pack, tell, gate) = (to_pack.clone(), tell.clone(), gate.clone());
        let plan = order.plan.clone();
        spawn("weights-pack", move || crew(&plan, &to_pack, &tell, &gate))?;
    }
    let (files, limit) = (order.files.clone(), order.limit);
    spawn("weights-order", move || {
        if let Err(error) = reader(&files.extents, source, &slots, &read, limit) {
            let _ = tell.send(Message::Failed(error)); // the receiver is gone if the stream was cancelled
        }
    })?;
    Ok((free, messages))
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), HostError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(body)
        .map(|_| ())
        .map_err(|e| HostError::Request(format!("no thread to bring weights in: {e}")))
}

fn gone() -> HostError {
    HostError::Request("a thread that brings weights in is gone".into())
}

/// The reader: requests pieces in stream order, as many at once as there are slots, and passes on those that arrive.
fn reader(
    extents: &[Vec<Extent>],
    mut source: Box<dyn Source>,
    slots: &Receiver<Slot>,
    read: &Sender<Read>,
    limit: Duration,
) -> Result<(), HostError> {
    let mut under_way: BTreeMap<usize, Staging> = BTreeMap::new();
    let mut ask = 0..extents.len();
    loop {
        while !ask.is_empty() {
            // With no read in flight there is nothing else to wait for; slots stop coming when the lander is gone.
            let slot = match slots.try_recv() {
                Ok(slot) => slot,
                Err(TryRecvError::Empty) if under_way.is_empty() => match slots.recv() {
                    Ok(slot) => slot,
                    Err(_) => return Ok(()),
                },
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            };
            let Some(piece) = ask.next() else { break };
            under_way.insert(piece, slot.staging);
            source.start(Job { piece, extents: extents[piece].clone(), buffer: slot.io })?;
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let job = match source.next(limit) {
            Some(job) => job?,
            None => {
                return Err(HostError::Weights {
                    path: source.name(),
                    message: format!("no bytes came for {limit:?}: the disk does not answer"),
                });
            }
        };
        let Some(staging) = under_way.remove(&job.piece) else { return Err(gone()) };
        if read.send(Read { job, staging }).is_err() {
            return Ok(());
        }
    }
}

/// A packer of the crew. Ends when nothing more is read.
fn crew(plan: &Plan, reads: &Mutex<Receiver<Read>>, tell: &Sender<Message>, gate: &Gate) {
    loop {
        let next = reads.lock().map(|reads| reads.recv());
        let Ok(Ok(Read { job, mut staging })) = next else { return };
        let piece = &plan.pieces[job.piece];
        let matrix = &plan.matrices[piece.matrix];
        let row_bytes = matrix.format.row_bytes(matrix.cols);
        let bytes = job.buffer.bytes();
        let row = |tensor, index: u32| {
            let part = piece.reads.iter().position(|read| read.tensor == tensor);
            part.map_or(&[][..], |part| {
                let first =
                    job.extents[part].at + (index - piece.reads[part].first) as usize * row_bytes;
                &bytes[first..first + row_bytes]
            })
        };
        let packed = gate.pass(|| {
            // SAFETY: the gate is open, so the memory is there; the slot came back, so its last copy is over.
            let out = unsafe { staging.bytes_mut() };
            pack(matrix, piece.tile0, row, &mut out[..plan.packed_bytes(piece)])
        });
        let message = match packed {
            None => return,
            Some(Err(error)) => Message::Failed(error),
            Some(Ok(())) => {
                Message::Packed { piece: job.piece, slot: Slot { io: job.buffer, staging } }
            }
        };
        if tell.send(message).is_err() {
            return;
        }
    }
}

/// The lander: copies pieces in stream order and raises the watermark.
fn lander<T: Target>(
    order: &Order,
    target: &mut T,
    progress: &Progress,
    cancel: &AtomicBool,
    free: &Sender<Slot>,
    messages: &Receiver<Message>,
    next: &mut usize,
) -> Result<(), HostError> {
    let mut ready: BTreeMap<usize, Slot> = BTreeMap::new();
    let mut copying: VecDeque<Slot> = VecDeque::new();
    let mut last = Instant::now();
    let count = order.plan.pieces.len();
    while *next < count || !copying.is_empty() {
        if cancel.load(Ordering::Relaxed) {
            return Err(HostError::Request(
                "the weights were still weight streaming when it was stopped".into(),
            ));
        }
        while let Some(slot) = copying.front()
            && target.copied(slot.staging.index)?
        {
            let _ = copying.pop_front().map(|slot| free.send(slot)); // a reader that is done takes none
            last = Instant::now();
        }
        match messages.recv_timeout(TICK) {
            Ok(Message::Packed { piece, slot }) => {
                ready.insert(piece, slot);
            }
            Ok(Message::Failed(error)) => return Err(error),
            Err(RecvTimeoutError::Disconnected) if *next < count => return Err(gone()),
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(TICK),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Twice the reader's patience: the reader can report better which read does not return.
        if last.elapsed() > order.limit * 2 {
            return Err(HostError::Weights {
                path: "weights".into(),
                message: format!(
                    "nothing arrived for {:?}: whoever reads them hangs",
                    order.limit * 2
                ),
            });
        }
        while let Some(slot) = ready.remove(next) {
            let piece = &order.plan.pieces[*next];
            let bytes = order.plan.packed_bytes(piece);
            for &place in &piece.places {
                target.copy(piece.matrix, place, &slot.staging, bytes)?;
            }
            target.watermark(order.plan.watermark_behind(*next), slot.staging.index)?;
            progress.watermark(order.files.stored(*next), bytes as u64);
            copying.push_back(slot);
            *next += 1;
            last = Instant::now();
        }
    }
    Ok(())
}
