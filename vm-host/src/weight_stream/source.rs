//! Sources of stored bytes: files, read past the page cache by io_uring or through it by threads.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use ir::Weights;

use crate::error::HostError;
use crate::weight_stream::memory::IoBuffer;
use crate::weight_stream::plan::{Piece, Plan};

/// Alignment of reads past the page cache: offset, length and address.
pub(crate) const ALIGN: usize = 4096;

/// Bytes of a file that a piece needs, and their place in its buffer: at the same offset within a page as in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
    pub(crate) at: usize,
}

impl Extent {
    /// Bytes before the wanted ones in their page.
    pub(crate) fn lead(&self) -> usize {
        self.at % ALIGN
    }
}

#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) piece: usize,
    pub(crate) extents: Vec<Extent>,
    pub(crate) buffer: IoBuffer,
}

/// Reads pieces, several at once and in any order. Tests use scripted ones to simulate broken disks.
pub(crate) trait Source: Send {
    /// Name, such as `io_uring`.
    fn name(&self) -> String;
    /// Requests a piece. Does not wait.
    fn start(&mut self, job: Job) -> Result<(), HostError>;
    /// The next piece that has been read, or the error that prevented one. `None` if none arrived within the limit.
    fn next(&mut self, limit: Duration) -> Option<Result<Job, HostError>>;
}

/// Identifies the file that was opened, to detect a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let m = file.metadata()?;
        let (device, inode, bytes) = (m.dev(), m.ino(), m.size());
        Ok(Self { device, inode, bytes, modified: (m.mtime(), m.mtime_nsec()) })
    }
}

#[derive(Debug)]
pub(crate) struct WeightFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// The same, opened for reads past the page cache if its file system supports them.
    pub(crate) direct: Option<File>,
    identity: Identity,
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self, HostError> {
        let file = File::open(&path).map_err(|e| failed(&path, &e.to_string()))?;
        let identity = Identity::of(&file).map_err(|e| failed(&path, &e.to_string()))?;
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path).ok();
        Ok(Self { path, file, direct, identity })
    }

    pub(crate) fn error(&self, message: &str) -> HostError {
        failed(&self.path, message)
    }

    /// Checks that the file has not changed since it was opened. A write that keeps length and modification time is not detected.
    pub(crate) fn check(&self) -> Result<(), HostError> {
        let now = Identity::of(&self.file).map_err(|e| self.error(&e.to_string()))?;
        if now.bytes < self.identity.bytes {
            return Err(self.error(&format!(
                "the file was cut from {} to {} bytes while it was read",
                self.identity.bytes, now.bytes
            )));
        }
        if now != self.identity {
            return Err(self.error("the file was changed while it was read"));
        }
        Ok(())
    }

    /// Error: fewer bytes were read than requested.
    pub(crate) fn short(&self, extent: &Extent, got: usize) -> HostError {
        self.error(&format!(
            "the file ends {} bytes early: {} were wanted at {}; was it truncated?",
            extent.bytes - got.min(extent.bytes),
            extent.bytes,
            extent.offset
        ))
    }
}

fn failed(path: &std::path::Path, message: &str) -> HostError {
    HostError::Weights { path: path.display().to_string(), message: message.to_owned() }
}

/// All files of a model's weights, and the bytes of them that each piece needs.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) files: Vec<WeightFile>,
    pub(crate) extents: Vec<Vec<Extent>>,
}

impl Files {
    /// Opens the files and locates every piece in them. `None` if some tensor is not in a file.
    pub(crate) fn open(plan: &Plan, weights: &dyn Weights) -> Result<Option<Self>, HostError> {
        let mut all = Self { files: Vec::new(), extents: Vec::new() };
        for piece in &plan.pieces {
            let Some(extents) = all.locate(plan, piece, weights)? else { return Ok(None) };
            all.extents.push(extents);
        }
        Ok(Some(all))
    }

    fn locate(
        &mut self,
        plan: &Plan,
        piece: &Piece,
        weights: &dyn Weights,
    ) -> Result<Option<Vec<Extent>>, HostError> {
        let matrix = &plan.matrices[piece.matrix];
        let row_bytes = matrix.format.row_bytes(matrix.cols);
        let mut page = 0; // page of the buffer
        let mut extents = Vec::with_capacity(piece.reads.len());
        for read in &piece.reads {
            let Some(range) = weights.file_range(read.tensor) else { return Ok(None) };
            let file = self.file(range.path)?;
            let offset = range.offset + u64::from(read.first) * row_bytes as u64;
            let bytes = read.rows as usize * row_bytes;
            let end = offset + bytes as u64;
            if end > self.files[file].identity.bytes || end > range.offset + range.bytes {
                let missing = end.saturating_sub(self.files[file].identity.bytes);
                return Err(self.files[file]
                    .error(&format!("the file ends {missing} bytes early: was it truncated?")));
            }
            let at = page + offset as usize % ALIGN;
            extents.push(Extent { file, offset, bytes, at });
            page = (at + bytes).next_multiple_of(ALIGN);
        }
        Ok(Some(extents))
    }

    fn file(&mut self, path: PathBuf) -> Result<usize, HostError> {
        if let Some(index) = self.files.iter().position(|known| known.path == path) {
            return Ok(index);
        }
        self.files.push(WeightFile::open(path)?);
        Ok(self.files.len() - 1)
    }

    /// Bytes of a buffer that every piece fits in, whole pages read.
    pub(crate) fn buffer_bytes(&self) -> usize {
        let end = |extents: &Vec<Extent>| extents.last().map_or(0, |e| e.at + e.bytes);
        self.extents.iter().map(end).max().unwrap_or(0).next_multiple_of(ALIGN).max(ALIGN)
    }

    pub(crate) fn stored(&self, piece: usize) -> u64 {
        self.extents[piece].iter().map(|extent| extent.bytes as u64).sum()
    }

    /// Whether all files can be read past the page cache.
    pub(crate) fn direct(&self) -> bool {
        self.files.iter().all(|file| file.direct.is_some())
    }

    /// Whether the page cache holds most of the files, judged by pages spread over them.
    pub(crate) fn cached(&self) -> bool {
        const PROBES: u64 = 32;
        let probe = |file: &WeightFile, n: u64| {
            let offset = file.identity.bytes / PROBES * n;
            resident(&file.file, offset)
        };
        let all = self.files.iter().flat_map(|file| (0..PROBES).map(move |n| (file, n)));
        let (hits, asked) = all.fold((0_u64, 0_u64), |(hits, asked), (file, n)| {
            (hits + u64::from(probe(file, n)), asked + 1)
        });
        hits * 10 >= asked * 9
    }
}

/// Whether a byte of a file is in the page cache.
fn resident(file: &File, offset: u64) -> bool {
    let mut byte = 0_u8;
    let vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let Ok(offset) = libc::off_t::try_from(offset) else { return false };
    // SAFETY: the vector names one byte that is ours; the descriptor is open.
    let got =
        unsafe { libc::preadv2(file.as_raw_fd(), &raw const vector, 1, offset, libc::RWF_NOWAIT) };
    got == 1
}

/// Threads that read with `pread`: through the page cache, or past it.
pub(crate) struct Threads {
    ask: Sender<Job>,
    answers: Receiver<Result<Job, HostError>>,
    direct: bool,
}

impl Threads {
    /// Starts this many threads. They end when the source is dropped, except one whose read never returns.
    pub(crate) fn new(files: &Arc<Files>, threads: usize, direct: bool) -> Result<Self, HostError> {
        let (ask, jobs) = channel::<Job>();
        let (answer, answers) = channel();
        let jobs = Arc::new(std::sync::Mutex::new(jobs));
        for _ in 0..threads.max(1) {
            let (jobs, answer, files) = (jobs.clone(), answer.clone(), files.clone());
            let body = move || loop {
                let next = jobs.lock().map(|jobs| jobs.recv());
                let Ok(Ok(job)) = next else { break };
                if answer.send(read(&files, job, direct)).is_err() {
                    break;
                }
            };
            std::thread::Builder::new()
                .name("weights-read".into())
                .spawn(body)
                .map_err(|e| HostError::Request(format!("no thread to read weights: {e}")))?;
        }
        Ok(Self { ask, answers, direct })
    }
}

impl Source for Threads {
    fn name(&self) -> String {
        if self.direct { "pread, direct".into() } else { "pread, page cache".into() }
    }

    fn start(&mut self, job: Job) -> Result<(), HostError> {
        self.ask
            .send(job)
            .map_err(|_| HostError::Request("the threads that read weights are gone".into()))
    }

    fn next(&mut self, limit: Duration) -> Option<Result<Job, HostError>> {
        self.answers.recv_timeout(limit).ok()
    }
}

fn read(files: &Files, mut job: Job, direct: bool) -> Result<Job, HostError> {
    for extent in &job.extents {
        let of = &files.files[extent.file];
        let lead = if direct { extent.lead() } else { 0 };
        let wanted = lead + extent.bytes;
        let length = if direct { wanted.next_multiple_of(ALIGN) } else { wanted };
        let place = &mut job.buffer.bytes_mut()[extent.at - lead..][..length];
        let file = of.direct.as_ref().filter(|_| direct).unwrap_or(&of.file);
        let mut got = 0;
        while got < wanted {
            match file.read_at(&mut place[got..], extent.offset - lead as u64 + got as u64) {
                Ok(0) => return Err(of.short(extent, got.saturating_sub(lead))),
                // Past the page cache an odd length is the end of the file.
                Ok(n) if direct && got + n < wanted && n % ALIGN != 0 => {
                    return Err(of.short(extent, (got + n).saturating_sub(lead)));
                }
                Ok(n) => got += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(of.error(&error.to_string())),
            }
        }
    }
    for file in unique(&job.extents) {
        files.files[file].check()?;
    }
    Ok(job)
}

/// The files of a piece.
pub(crate) fn unique(extents: &[Extent]) -> impl Iterator<Item = usize> + '_ {
    let first = |index: usize| !extents[..index].iter().any(|e| e.file == extents[index].file);
    (0..extents.len()).filter(move |&index| first(index)).map(|index| extents[index].file)
}
