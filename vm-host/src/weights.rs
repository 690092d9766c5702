//! Stored weights to packed matrices on the device: file -> page-locked buffer (io_uring, or pread where it is refused) -> device
//! staging -> pack kernel. Several pieces are on their way at once.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use ir::program::{Matrix, Program};
use ir::{TensorId, Weights};

use crate::driver::{Event, Function, Stream};
use crate::error::HostError;
use crate::memory::{DeviceBuffer, HostBuffer};
use crate::uring;

/// Bytes of a staging buffer: the largest read, copy and pack.
const PIECE_BYTES: usize = 8 << 20;
/// Staging buffers: pieces on their way at once.
const BUFFERS: usize = 8;
/// How long one read may take.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// How the weights came in.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct LoadReport {
    /// Bytes of stored tensors that were read.
    pub bytes: u64,
    /// Seconds from the first read to the last pack.
    pub seconds: f64,
    /// `io_uring`, `pread` or `memory`.
    pub source: String,
    /// Why io_uring was not used, where it was wanted.
    pub fallback: Option<String>,
}

/// Rows of one tensor on their way into a matrix.
struct Piece {
    tensor: TensorId,
    first_byte: u64,
    bytes: usize,
    rows: u32,
    cols: u32,
    target: u64, // address of the packed matrix
    tile0: u32,
    stride_tiles: u32,
    units: u32,
}

/// Cuts every matrix into pieces of whole tiles that fit a staging buffer.
fn pieces(program: &Program, addresses: &[u64]) -> Result<Vec<Piece>, HostError> {
    let mut all = Vec::new();
    for (matrix, &target) in program.matrices.iter().zip(addresses) {
        let stride_tiles = if matrix.map.interleaved { matrix.map.parts.len() as u32 } else { 1 };
        let mut row0 = 0; // packed row of the part's first, for parts one after the other
        for (index, &(tensor, rows)) in matrix.map.parts.iter().enumerate() {
            let tile = if matrix.map.interleaved { index as u32 } else { row0 / abi::UNIT_ROWS };
            if !matrix.map.interleaved && row0 % abi::UNIT_ROWS != 0 {
                return Err(HostError::Request(format!(
                    "{}: part {index} does not start on a tile",
                    matrix.name
                )));
            }
            if let Some(tensor) = tensor {
                part_pieces(&mut all, matrix, tensor, rows, tile, stride_tiles, target)?;
            }
            row0 += rows;
        }
    }
    Ok(all)
}

fn part_pieces(
    all: &mut Vec<Piece>,
    matrix: &Matrix,
    tensor: TensorId,
    rows: u32,
    tile: u32,
    stride_tiles: u32,
    target: u64,
) -> Result<(), HostError> {
    let row_bytes = matrix.format.row_bytes(matrix.cols);
    let step = (PIECE_BYTES / row_bytes / abi::UNIT_ROWS as usize * abi::UNIT_ROWS as usize) as u32;
    if step == 0 {
        return Err(HostError::Request(format!(
            "{}: 8 rows of {row_bytes} bytes exceed a staging buffer",
            matrix.name
        )));
    }
    for first in (0..rows).step_by(step as usize) {
        let count = step.min(rows - first);
        all.push(Piece {
            tensor,
            first_byte: u64::from(first) * row_bytes as u64,
            bytes: count as usize * row_bytes,
            rows: count,
            cols: matrix.cols,
            target,
            tile0: tile + first / abi::UNIT_ROWS * stride_tiles,
            stride_tiles,
            units: matrix.units_per_tile(),
        });
    }
    Ok(())
}

/// Brings every matrix of `program` to the addresses given. No kernel is resident.
pub(crate) fn load_matrices(
    program: &Program,
    weights: &dyn Weights,
    addresses: &[u64],
    pack: &Function,
    stream: &Stream,
) -> Result<LoadReport, HostError> {
    let start = Instant::now();
    let pieces = pieces(program, addresses)?;
    let (mut hosts, mut staging) = (Vec::new(), Vec::new());
    for _ in 0..BUFFERS {
        hosts.push(HostBuffer::zeroed(PIECE_BYTES)?);
        staging.push((DeviceBuffer::zeroed(PIECE_BYTES as u64)?, Event::new()?));
    }
    let mut reader = Reader::new(weights, &pieces, hosts);
    let mut waiting = VecDeque::new(); // (piece, buffer) whose read was asked for
    for (index, piece) in pieces.iter().enumerate() {
        let buffer = index % BUFFERS;
        if index >= BUFFERS {
            if let Some(oldest) = waiting.pop_front() {
                finish(&mut reader, &pieces, oldest, &staging, pack, stream)?;
            }
            staging[buffer].1.synchronize()?; // its last pack is over, the buffer is free
        }
        reader.start(piece, buffer)?;
        waiting.push_back((index, buffer));
    }
    while let Some(oldest) = waiting.pop_front() {
        finish(&mut reader, &pieces, oldest, &staging, pack, stream)?;
    }
    stream.synchronize()?;
    let bytes = pieces.iter().map(|p| p.bytes as u64).sum();
    let (seconds, source) = (start.elapsed().as_secs_f64(), reader.source());
    tracing::info!(bytes, seconds, source, "weights loaded");
    Ok(LoadReport { bytes, seconds, source: source.into(), fallback: reader.fallback.take() })
}

type Staging = (DeviceBuffer, Event);

/// Waits for the piece's bytes, then copies and packs them.
fn finish(
    reader: &mut Reader<'_>,
    pieces: &[Piece],
    (index, buffer): (usize, usize),
    staging: &[Staging],
    pack: &Function,
    stream: &Stream,
) -> Result<(), HostError> {
    let piece = &pieces[index];
    let (device, event) = &staging[buffer];
    reader.wait(buffer)?;
    stream.copy_in(device.address, reader.buffers[buffer].pointer(), piece.bytes)?;
    let (mut target, mut source) = (piece.target, device.address);
    let (mut rows, mut cols, mut tile0) = (piece.rows, piece.cols, piece.tile0);
    let (mut stride, mut units) = (piece.stride_tiles, piece.units);
    let mut arguments: [*mut std::ffi::c_void; 7] = [
        (&raw mut target).cast(),
        (&raw mut source).cast(),
        (&raw mut rows).cast(),
        (&raw mut cols).cast(),
        (&raw mut tile0).cast(),
        (&raw mut stride).cast(),
        (&raw mut units).cast(),
    ];
    let threads = u64::from(rows) * u64::from(units) * 4;
    stream.launch(pack, threads.div_ceil(256) as u32, 256, 0, &mut arguments)?;
    event.record(stream)
}

/// A read of a file that has been submitted: where the rest of it goes.
#[derive(Clone, Copy)]
struct Pending {
    file: usize,
    offset: u64,
    pointer: *mut u8,
    left: usize,
    done: bool,
}

/// Fills staging buffers, which it owns, from files or from memory.
struct Reader<'w> {
    weights: &'w dyn Weights,
    buffers: Vec<HostBuffer>,
    files: Vec<(PathBuf, File)>,
    ring: Option<IoUring>,
    fixed: bool,
    pending: [Option<Pending>; BUFFERS],
    in_memory: bool,
    fallback: Option<String>,
}

impl<'w> Reader<'w> {
    fn new(weights: &'w dyn Weights, pieces: &[Piece], buffers: Vec<HostBuffer>) -> Self {
        let in_memory = pieces.first().is_none_or(|p| weights.file_range(p.tensor).is_none());
        let mut fallback = None;
        let ring = if in_memory {
            None
        } else {
            IoUring::new(BUFFERS as u32)
                .map_err(|e| fallback = Some(format!("io_uring refused: {e}")))
                .ok()
        };
        let mut reader = Self {
            weights,
            buffers,
            files: Vec::new(),
            ring,
            fixed: false,
            pending: [None; BUFFERS],
            in_memory,
            fallback,
        };
        reader.register();
        reader
    }

    fn source(&self) -> &'static str {
        match (self.in_memory, &self.ring) {
            (true, _) => "memory",
            (false, Some(_)) => "io_uring",
            (false, None) => "pread",
        }
    }

    /// Registers the staging buffers, so that the kernel maps their pages once. Refusal is no failure: plain reads work too.
    fn register(&mut self) {
        let Some(ring) = &self.ring else { return };
        let vectors: Vec<libc::iovec> = self
            .buffers
            .iter()
            .map(|b| libc::iovec { iov_base: b.pointer().cast(), iov_len: b.bytes })
            .collect();
        // SAFETY: the reader owns the buffers, and its drop waits for every read or keeps ring and buffers for good.
        match unsafe { ring.submitter().register_buffers(&vectors) } {
            Ok(()) => self.fixed = true,
            Err(error) => self.fallback = Some(format!("buffers not registered: {error}")),
        }
    }

    fn file(&mut self, path: PathBuf) -> Result<usize, HostError> {
        if let Some(index) = self.files.iter().position(|(known, _)| *known == path) {
            return Ok(index);
        }
        let file = File::open(&path).map_err(|e| HostError::Weights {
            path: path.display().to_string(),
            message: e.to_string(),
        })?;
        self.files.push((path, file));
        Ok(self.files.len() - 1)
    }

    /// Asks for the piece's bytes in `buffer`.
    fn start(&mut self, piece: &Piece, buffer: usize) -> Result<(), HostError> {
        let host = &mut self.buffers[buffer];
        let Some(range) = self.weights.file_range(piece.tensor) else {
            let first = piece.first_byte as usize;
            host.write(0, &self.weights.bytes(piece.tensor)[first..first + piece.bytes]);
            self.pending[buffer] = None;
            return Ok(());
        };
        let pointer = host.pointer();
        let file = self.file(range.path)?;
        let pending = Pending {
            file,
            offset: range.offset + piece.first_byte,
            pointer,
            left: piece.bytes,
            done: false,
        };
        self.pending[buffer] = Some(pending);
        if self.ring.is_some() { self.submit(buffer) } else { self.read_now(buffer) }
    }

    fn submit(&mut self, buffer: usize) -> Result<(), HostError> {
        let (Some(ring), Some(p)) = (&mut self.ring, self.pending[buffer]) else { return Ok(()) };
        let fd = types::Fd(self.files[p.file].1.as_raw_fd());
        let entry = if self.fixed {
            opcode::ReadFixed::new(fd, p.pointer, p.left as u32, buffer as u16)
                .offset(p.offset)
                .build()
        } else {
            opcode::Read::new(fd, p.pointer, p.left as u32).offset(p.offset).build()
        };
        let entry = entry.user_data(buffer as u64);
        let path = || self.files[p.file].0.display().to_string();
        // SAFETY: the buffer and the file live until the completion has been taken; one read per buffer is under way.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            return Err(HostError::Weights {
                path: path(),
                message: "io_uring's queue is full".into(),
            });
        }
        uring::submit(ring).map_err(|e| HostError::Weights { path: path(), message: e.to_string() })
    }

    fn read_now(&mut self, buffer: usize) -> Result<(), HostError> {
        let Some(p) = self.pending[buffer] else { return Ok(()) };
        let (path, file) = &self.files[p.file];
        // SAFETY: the staging buffer holds at least `left` bytes, and nothing else touches it until the piece is packed.
        let out = unsafe { std::slice::from_raw_parts_mut(p.pointer, p.left) };
        file.read_exact_at(out, p.offset).map_err(|e| HostError::Weights {
            path: path.display().to_string(),
            message: e.to_string(),
        })?;
        self.pending[buffer] = None;
        Ok(())
    }

    /// Waits until the piece's bytes are in `buffer`. Completions arrive in any order; short reads are continued.
    fn wait(&mut self, buffer: usize) -> Result<(), HostError> {
        while self.pending[buffer].is_some_and(|p| !p.done) {
            let Some(ring) = &mut self.ring else { return Ok(()) };
            let error = |message| HostError::Weights { path: "io_uring".into(), message };
            uring::submit_and_wait(ring, READ_LIMIT).map_err(|e| error(e.to_string()))?;
            let done: Vec<(usize, i32)> =
                ring.completion().map(|c| (c.user_data() as usize, c.result())).collect();
            if done.is_empty() {
                return Err(error(format!(
                    "no read ended within {READ_LIMIT:?}: is the disk there?"
                )));
            }
            for (which, result) in done {
                self.complete(which, result)?;
            }
        }
        self.pending[buffer] = None;
        Ok(())
    }

    /// A read has ended: with the piece's last byte, too early, which asks for the rest, or with an error.
    fn complete(&mut self, buffer: usize, result: i32) -> Result<(), HostError> {
        let Some(mut p) = self.pending[buffer].take() else { return Ok(()) };
        let error = |message| {
            let path = self.files[p.file].0.display().to_string();
            Err(HostError::Weights { path, message })
        };
        if result < 0 {
            return error(std::io::Error::from_raw_os_error(-result).to_string());
        }
        if result == 0 {
            return error(format!("the file ends {} bytes early: was it truncated?", p.left));
        }
        let got = (result as usize).min(p.left);
        p.left -= got;
        p.offset += got as u64;
        p.pointer = p.pointer.wrapping_add(got);
        p.done = p.left == 0;
        self.pending[buffer] = Some(p);
        if p.done { Ok(()) } else { self.submit(buffer) }
    }
}

impl Drop for Reader<'_> {
    /// No read may land in freed memory. What does not end soon keeps its ring and all buffers for good.
    fn drop(&mut self) {
        let Some(mut ring) = self.ring.take() else { return };
        let patience = Instant::now() + Duration::from_secs(1);
        let mut open = self.pending.iter().flatten().filter(|p| !p.done).count();
        while open > 0 && Instant::now() < patience {
            let _ = uring::submit_and_wait(&mut ring, Duration::from_millis(20));
            open = open.saturating_sub(ring.completion().count());
        }
        if open > 0 {
            std::mem::forget((ring, std::mem::take(&mut self.buffers)));
        }
    }
}

/// What `amk_pack` makes of a matrix, thread by thread, from the pieces that it is given.
#[cfg(test)]
pub(crate) fn packed_by_the_kernel(matrix: &Matrix, weights: &dyn Weights) -> Vec<u8> {
    let mut packed = vec![0; matrix.bytes() as usize];
    let stride = if matrix.map.interleaved { matrix.map.parts.len() as u32 } else { 1 };
    let (mut all, mut row0) = (Vec::new(), 0);
    for (index, &(tensor, rows)) in matrix.map.parts.iter().enumerate() {
        let tile = if matrix.map.interleaved { index as u32 } else { row0 / abi::UNIT_ROWS };
        if let Some(tensor) = tensor {
            part_pieces(&mut all, matrix, tensor, rows, tile, stride, 0).expect("it fits");
        }
        row0 += rows;
    }
    for piece in all {
        let source = &weights.bytes(piece.tensor)[piece.first_byte as usize..][..piece.bytes];
        pack_like_the_kernel(&mut packed, source, &piece, matrix.format.stored().bytes());
    }
    packed
}

/// The kernel's arithmetic: one of its threads for each 16 bytes of a unit's row.
#[cfg(test)]
fn pack_like_the_kernel(packed: &mut [u8], source: &[u8], piece: &Piece, element: usize) {
    let columns = abi::UNIT_ROW_BYTES as usize / element;
    let (units, cols) = (piece.units as usize, piece.cols as usize);
    for thread in 0..piece.rows as usize * units * 4 {
        let (quarter, unit, row) = (thread % 4, thread / 4 % units, thread / 4 / units);
        let tile = piece.tile0 as usize + row / 8 * piece.stride_tiles as usize;
        let out = (tile * units + unit) * 512 + row % 8 * 64 + quarter * 16;
        for i in 0..columns / 4 {
            let at = quarter * (columns / 4) + i;
            // Of 16-bit columns, bits 2 and 3 of the number change places.
            let swapped = if element == 2 { at & !12 | (at & 4) << 1 | (at & 8) >> 1 } else { at };
            let column = unit * columns + swapped;
            if column < cols {
                let from = (row * cols + column) * element;
                packed[out + i * element..][..element].copy_from_slice(&source[from..][..element]);
            }
        }
    }
}
