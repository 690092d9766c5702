//! A handle with which another thread watches a running kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use abi::Completion;

use crate::memory::HostBuffer;
use crate::ring::RingHost;

/// Read access to the ring for threads other than the one that drives the machine, which may be stuck in a call of the driver. It keeps
/// the ring's memory.
pub struct Monitor {
    ring: RingHost,
    workers: u32,
    launch: u64,
    weight_stream: Option<Arc<AtomicU64>>,
    _block: Arc<HostBuffer>, // the ring's memory: dropped after it
}

impl Monitor {
    /// For this ring, whose memory it keeps.
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

    /// The status block, if the kernel has trapped.
    #[must_use]
    pub fn status(&self) -> Option<abi::Status> {
        self.ring.status()
    }

    /// Number of the launch in this process: counts of another launch are final.
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

    /// One of the last commands answered, by its number from zero; `None` if too many followed it.
    #[must_use]
    pub fn completion(&self, index: u32) -> Option<Completion> {
        self.ring.completion(index)
    }

    /// Workers of the launch.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// The last heartbeat of a worker.
    #[must_use]
    pub fn worker_heartbeat(&self, worker: u32) -> abi::WorkerHeartbeat {
        self.ring.worker_heartbeat(worker)
    }

    /// Whether the current command waits for weights.
    #[must_use]
    pub fn waits_for_weights(&self) -> bool {
        self.ring.waiting() != 0
    }

    /// Packed bytes of weights that have arrived, if they are streamed while the kernel runs; else `None`.
    #[must_use]
    pub fn arrived_bytes(&self) -> Option<u64> {
        self.weight_stream.as_ref().map(|packed| packed.load(Ordering::Relaxed))
    }

    /// Asks the kernel to leave.
    pub fn abort(&self) {
        self.ring.abort();
    }
}
