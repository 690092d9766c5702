//! Reads past the page cache by io_uring, into registered buffers.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use crate::error::HostError;
use crate::uring;
use crate::weight_stream::memory::IoBuffer;
use crate::weight_stream::source::{ALIGN, Extent, Files, Job, Source, unique};

/// Reads per piece at most: a matrix has at most three parts, and a map may name more.
const PARTS: usize = 8;

/// A read in flight: its extent, and how far it has come, counted from the first byte of the first page.
#[derive(Clone, Copy, Debug)]
struct Part {
    extent: usize,
    got: usize,
}

/// A piece with reads in flight.
struct Open {
    job: Job,
    left: usize,
}

pub(crate) struct Uring {
    ring: Option<IoUring>,
    files: Arc<Files>,
    fixed: bool,
    direct: bool,
    open: HashMap<usize, Open>,
    parts: HashMap<u64, (usize, Part)>,
    serial: u64,
    /// Completed pieces; the first in stream order is handed out first.
    finished: BTreeMap<usize, Job>,
}

impl Uring {
    /// Creates a ring for these buffers.
    ///
    /// # Errors
    /// The reason why io_uring is refused here.
    pub(crate) fn new(
        files: &Arc<Files>,
        buffers: &[IoBuffer],
        direct: bool,
    ) -> Result<Self, String> {
        let entries = (buffers.len() * PARTS).next_power_of_two() as u32;
        let ring = IoUring::new(entries).map_err(|e| format!("io_uring refused: {e}"))?;
        let vectors: Vec<libc::iovec> = buffers
            .iter()
            .map(|b| libc::iovec { iov_base: b.pointer().cast(), iov_len: b.len() })
            .collect();
        // SAFETY: the ring pins the pages itself; a buffer is only read into while its job, which owns it, is with this source.
        let fixed = unsafe { ring.submitter().register_buffers(&vectors) }.is_ok();
        let (open, parts) = (HashMap::new(), HashMap::new());
        let (ring, files) = (Some(ring), files.clone());
        Ok(Self { ring, files, fixed, direct, open, parts, serial: 0, finished: BTreeMap::new() })
    }

    fn ring(&mut self) -> Result<&mut IoUring, HostError> {
        self.ring.as_mut().ok_or_else(|| HostError::Request("the ring is closed".into()))
    }

    /// Bytes from the first page's start to the last wanted byte.
    fn wanted(&self, extent: &Extent) -> usize {
        extent.bytes + if self.direct { extent.lead() } else { 0 }
    }

    fn entry(&self, job: &Job, part: Part, serial: u64) -> squeue::Entry {
        let extent = &job.extents[part.extent];
        let file = &self.files.files[extent.file];
        let lead = if self.direct { extent.lead() } else { 0 };
        let wanted = self.wanted(extent);
        let whole = if self.direct { wanted.next_multiple_of(ALIGN) } else { wanted };
        let source = file.direct.as_ref().filter(|_| self.direct).unwrap_or(&file.file);
        let fd = types::Fd(source.as_raw_fd());
        let place = job.buffer.pointer().wrapping_add(extent.at - lead + part.got);
        let (length, offset) =
            ((whole - part.got) as u32, extent.offset - lead as u64 + part.got as u64);
        let entry = if self.fixed {
            opcode::ReadFixed::new(fd, place, length, job.buffer.index).offset(offset).build()
        } else {
            opcode::Read::new(fd, place, length).offset(offset).build()
        };
        entry.user_data(serial)
    }

    fn push(&mut self, piece: usize, part: Part) -> Result<(), HostError> {
        self.serial += 1;
        let serial = self.serial;
        let Some(open) = self.open.get(&piece) else { return Ok(()) };
        let entry = self.entry(&open.job, part, serial);
        let error = |message: String| HostError::Weights { path: "io_uring".into(), message };
        let ring = self.ring()?;
        // SAFETY: buffer and file live until the completion was taken: the job is in `open`, which is leaked with the ring otherwise.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            return Err(error("its queue is full".into()));
        }
        uring::submit(ring).map_err(|e| error(e.to_string()))?;
        self.parts.insert(serial, (piece, part));
        Ok(())
    }

    fn complete(&mut self, serial: u64, result: i32) -> Result<(), HostError> {
        let Some((piece, part)) = self.parts.remove(&serial) else { return Ok(()) };
        let Some(open) = self.open.get_mut(&piece) else { return Ok(()) };
        open.left -= 1;
        let extent = open.job.extents[part.extent];
        let file = &self.files.files[extent.file];
        if result < 0 {
            return Err(file.error(&std::io::Error::from_raw_os_error(-result).to_string()));
        }
        let got = part.got + result as usize;
        let lead = if self.direct { extent.lead() } else { 0 };
        if got < lead + extent.bytes {
            // Past the page cache an odd length is the end of the file.
            if result == 0 || (self.direct && !(result as usize).is_multiple_of(ALIGN)) {
                return Err(file.short(&extent, got.saturating_sub(lead)));
            }
            open.left += 1;
            return self.push(piece, Part { got, ..part });
        }
        if open.left == 0
            && let Some(open) = self.open.remove(&piece)
        {
            for file in unique(&open.job.extents) {
                self.files.files[file].check()?;
            }
            self.finished.insert(piece, open.job);
        }
        Ok(())
    }

    /// Collects completed reads, waiting for at least one or until the limit.
    fn reap(&mut self, limit: Duration) -> Result<bool, HostError> {
        let error = |e: std::io::Error| HostError::Weights {
            path: "io_uring".into(),
            message: e.to_string(),
        };
        let ring = self.ring()?;
        uring::submit_and_wait(ring, limit).map_err(error)?;
        let ended: Vec<(u64, i32)> =
            ring.completion().map(|c| (c.user_data(), c.result())).collect();
        let any = !ended.is_empty();
        for (serial, result) in ended {
            self.complete(serial, result)?;
        }
        Ok(any)
    }
}

impl Source for Uring {
    fn name(&self) -> String {
        let how = if self.direct { "direct" } else { "page cache" };
        let buffers = if self.fixed { "registered" } else { "plain" };
        format!("io_uring, {how}, {buffers} buffers")
    }

    fn start(&mut self, job: Job) -> Result<(), HostError> {
        let (piece, parts) = (job.piece, job.extents.len());
        if parts == 0 {
            self.finished.insert(piece, job);
            return Ok(());
        }
        self.open.insert(piece, Open { job, left: parts });
        (0..parts).try_for_each(|extent| self.push(piece, Part { extent, got: 0 }))
    }

    fn next(&mut self, limit: Duration) -> Option<Result<Job, HostError>> {
        let start = std::time::Instant::now();
        loop {
            if let Some((_, job)) = self.finished.pop_first() {
                return Some(Ok(job));
            }
            match self.reap(limit.saturating_sub(start.elapsed())) {
                Ok(true) => {}
                Ok(false) if start.elapsed() < limit => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Uring {
    /// Pending reads must not write to freed memory: if they do not complete at once, the ring and its buffers are leaked.
    fn drop(&mut self) {
        let patience = std::time::Instant::now() + Duration::from_millis(200);
        while !self.parts.is_empty() && std::time::Instant::now() < patience {
            let Some(ring) = self.ring.as_mut() else { break };
            let _ = uring::submit_and_wait(ring, Duration::from_millis(20));
            let ended: Vec<u64> = ring.completion().map(|c| c.user_data()).collect();
            for serial in ended {
                self.parts.remove(&serial);
            }
        }
        if !self.parts.is_empty() {
            std::mem::forget(self.ring.take());
            self.open.drain().for_each(|(_, open)| std::mem::forget(open.job));
        }
    }
}
