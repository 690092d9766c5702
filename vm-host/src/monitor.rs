//! What another thread may see of a running kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use abi::Completion;

use crate::memory::HostBuffer;
use crate::ring::RingHost;

/// A look at the ring from beside the thread that drives the machine, which may be stuck in a call of the driver. It keeps the ring's
/// memory.
pub struct Monitor {
    ring: RingHost,
    workers: u32,
    launch: u64,
    weight_stream: Option<Arc<AtomicU64>>,
    _block: Arc<HostBuffer>, // the ring's memory: dropped after it
}

impl Monitor {
    /// Of this ring, whose memory is kept.
    pub(crate) fn new(
        ring: RingHost,
        workers: u32,
        launch: u64,
        block: Arc<HostBuffer>,
        weight_stream: Option<Arc<AtomicU64>>,
    ) -> Self {
        Self { ring, workers, launch, weight_stream, _block: block }
    }

    /// The poller's clock.
    #[must_use]
    pub fn heartbeat(&self) -> u32 {
        self.ring.heartbeat()
    }

    /// Who waited for what, if the kernel has given up.
    #[must_use]
    pub fn status(&self) -> Option<abi::Status> {
        self.ring.status()
    }

    /// Number of the launch in this process: what was counted of another is over.
    #[must_use]
    pub fn launch(&self) -> u64 {
        self.launch
    }

    /// Commands answered since the launch.
    #[must_use]
    pub fn answered(&self) -> u32 {
        self.ring.answered()
    }

    /// Commands published and not answered.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.ring.outstanding()
    }

    /// One of the last commands answered, by its number from zero; nothing if too many came after it.
    #[must_use]
    pub fn completion(&self, index: u32) -> Option<Completion> {
        self.ring.completion(index)
    }

    /// Workers of the launch.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// What a worker last said of itself.
    #[must_use]
    pub fn worker_heartbeat(&self, worker: u32) -> abi::WorkerHeartbeat {
        self.ring.worker_heartbeat(worker)
    }

    /// Whether a command is under way that waits for weights.
    #[must_use]
    pub fn waits_for_weights(&self) -> bool {
        self.ring.waiting() != 0
    }

    /// Packed bytes of weights that have arrived, if they came or come while the kernel runs; of all that it was launched with otherwise nothing.
    #[must_use]
    pub fn arrived_bytes(&self) -> Option<u64> {
        self.weight_stream.as_ref().map(|packed| packed.load(Ordering::Relaxed))
    }

    /// Asks the kernel to leave.
    pub fn abort(&self) {
        self.ring.abort();
    }
}
