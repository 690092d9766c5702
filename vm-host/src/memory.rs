//! Device memory and page-locked host memory. Freeing either waits for the device, so nothing here is dropped while a kernel is
//! resident: `machine` owns all of it.

use std::marker::PhantomData;

use cudarc::driver::sys;
use rayon::prelude::*;

use crate::driver::{Stream, check};
use crate::error::HostError;

pub(crate) struct DeviceBuffer {
    /// Address, 256-byte aligned.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl DeviceBuffer {
    /// Allocates zeroed memory. Never called while a kernel is resident.
    pub(crate) fn zeroed(bytes: u64) -> Result<Self, HostError> {
        let bytes = bytes.max(256);
        let mut address = 0;
        // SAFETY: the out pointer is valid; a context is current.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) };
        if result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let (mut free, mut total) = (0, 0);
            // SAFETY: both out pointers are valid.
            check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
            return Err(HostError::OutOfMemory { needed: bytes, free: free as u64 });
        }
        check("cuMemAlloc", result)?;
        let buffer = Self { address, bytes };
        // The memset does not wait, and our streams do not wait for it: what is copied in next must not be zeroed then.
        // SAFETY: the range was just allocated; null is the legacy stream, in which the memset is.
        unsafe {
            check("cuMemsetD8", sys::cuMemsetD8_v2(address, 0, bytes as usize))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))?;
        }
        Ok(buffer)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemAlloc and not used after.
        unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Page-locked host memory that the device can address too. Cached, not write-combined: the host reads it.
pub(crate) struct HostBuffer {
    host: *mut u8,
    /// The device's address of the same bytes.
    pub(crate) device: u64,
    pub(crate) bytes: usize,
    _raw: PhantomData<*mut u8>,
}

// SAFETY: the memory belongs to this value alone; the pointer is not tied to a thread.
unsafe impl Send for HostBuffer {}
// SAFETY: through a shared reference the host only reads; what the device writes is waited for before it is read.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates zeroed memory. Never called while a kernel is resident.
    pub(crate) fn zeroed(bytes: usize) -> Result<Self, HostError> {
        let bytes = bytes.max(4096);
        let mut host = std::ptr::null_mut();
        let mut device = 0;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: out pointers are valid; the range written is the range allocated.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&raw mut host, bytes, flags))?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            check(
                "cuMemHostGetDevicePointer",
                sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0),
            )?;
        }
        Ok(Self { host: host.cast(), device, bytes, _raw: PhantomData })
    }

    /// The first byte. The device may write behind it, so no reference to the contents is ever made.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.host
    }

    /// Copies `bytes` in at `offset`. The device is not reading that range.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.bytes),
            "{} bytes at {offset} of {}",
            bytes.len(),
            self.bytes
        );
        // SAFETY: in range by the assert; the caller promises that the device is not reading it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.add(offset), bytes.len())
        };
    }

    /// Copies `out.len()` bytes from `offset`. The device is not writing that range.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(
            offset.checked_add(out.len()).is_some_and(|end| end <= self.bytes),
            "{} bytes at {offset} of {}",
            out.len(),
            self.bytes
        );
        // SAFETY: in range by the assert; the caller promises that the device is not writing it.
        unsafe {
            std::ptr::copy_nonoverlapping(self.host.add(offset), out.as_mut_ptr(), out.len())
        };
    }

    /// So many words from `offset`, as [`read`](Self::read).
    pub(crate) fn read_words(&self, offset: usize, count: usize) -> Vec<u32> {
        let mut bytes = vec![0; count * 4];
        self.read(offset, &mut bytes);
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc and not used after.
        unsafe { sys::cuMemFreeHost(self.host.cast()) };
    }
}

/// Copies `bytes` to the device through a page-locked bounce buffer, in pieces. Safe beside a resident kernel: it only waits for its
/// own stream.
pub(crate) fn upload(
    stream: &Stream,
    bounce: &mut HostBuffer,
    target: u64,
    bytes: &[u8],
) -> Result<(), HostError> {
    for (i, piece) in bytes.chunks(bounce.bytes).enumerate() {
        bounce.write(0, piece);
        stream.copy_in(target + (i * bounce.bytes) as u64, bounce.pointer(), piece.len())?;
        stream.synchronize()?;
    }
    Ok(())
}

/// Bytes of one copy of a fill.
const FILL_BYTES: usize = 4 << 20;

/// Fills device memory by copies of a filled bounce buffer: a memset may be a kernel, which a resident kernel leaves no room for.
pub(crate) fn upload_fill(
    stream: &Stream,
    bounce: &mut HostBuffer,
    target: u64,
    bytes: u64,
    value: u8,
) -> Result<(), HostError> {
    upload_fills(stream, bounce, std::iter::once(target), bytes, value)
}

/// Fills several ranges of so many bytes each, and waits once.
pub(crate) fn upload_fills(
    stream: &Stream,
    bounce: &mut HostBuffer,
    targets: impl Iterator<Item = u64>,
    bytes: u64,
    value: u8,
) -> Result<(), HostError> {
    let len = (bounce.bytes.min(FILL_BYTES) as u64).min(bytes) as usize;
    // SAFETY: the bounce buffer is ours and holds `len` bytes; no copy from it is under way.
    unsafe { std::ptr::write_bytes(bounce.pointer(), value, len) };
    for target in targets {
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(len as u64);
            stream.copy_in(target + done, bounce.pointer(), piece as usize)?;
            done += piece;
        }
    }
    stream.synchronize()
}

pub(crate) fn download(
    stream: &Stream,
    bounce: &HostBuffer,
    source: u64,
    out: &mut [u8],
) -> Result<(), HostError> {
    for (i, piece) in out.chunks_mut(bounce.bytes).enumerate() {
        stream.copy_out(bounce.pointer(), source + (i * bounce.bytes) as u64, piece.len())?;
        stream.synchronize()?;
        bounce.read(0, piece);
    }
    Ok(())
}

/// Copies rows of numbers out, each into memory of its own.
pub(crate) fn download_rows(
    stream: &Stream,
    bounce: &HostBuffer,
    source: u64,
    rows: usize,
    len: usize,
) -> Result<Vec<Vec<f32>>, HostError> {
    let row_bytes = len * size_of::<f32>();
    let mut out = Vec::with_capacity(rows);
    for piece in pieces(bounce, rows, row_bytes) {
        copy_piece(stream, bounce, source, &piece, row_bytes)?;
        let row = |index: usize| {
            let mut values = vec![0.0; len];
            bounce.read(index * row_bytes, bytemuck::cast_slice_mut(&mut values));
            values
        };
        out.par_extend((0..piece.len()).into_par_iter().map(row));
    }
    Ok(out)
}

/// Copies as many rows of numbers out as `out` holds.
pub(crate) fn download_into(
    stream: &Stream,
    bounce: &HostBuffer,
    source: u64,
    out: &mut [f32],
    len: usize,
) -> Result<(), HostError> {
    let row_bytes = len * size_of::<f32>();
    for piece in pieces(bounce, out.len() / len, row_bytes) {
        copy_piece(stream, bounce, source, &piece, row_bytes)?;
        let rows = &mut out[piece.start * len..piece.end * len];
        rows.par_chunks_exact_mut(len).enumerate().for_each(|(index, row)| {
            bounce.read(index * row_bytes, bytemuck::cast_slice_mut(row));
        });
    }
    Ok(())
}

/// Rows in pieces: as many at a time as the bounce buffer holds, at least one. From there all cores copy.
fn pieces(
    bounce: &HostBuffer,
    rows: usize,
    row_bytes: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> {
    let at_once = (bounce.bytes / row_bytes).max(1);
    (0..rows).step_by(at_once).map(move |first| first..rows.min(first + at_once))
}

fn copy_piece(
    stream: &Stream,
    bounce: &HostBuffer,
    source: u64,
    piece: &std::ops::Range<usize>,
    row_bytes: usize,
) -> Result<(), HostError> {
    let start = source + (piece.start * row_bytes) as u64;
    stream.copy_out(bounce.pointer(), start, piece.len() * row_bytes)?;
    stream.synchronize()
}
