//! Device memory and page-locked host memory. Freeing either waits for the device, so nothing here is dropped while a kernel is
//! resident: `machine` owns all of it.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use rayon::prelude::*;

use crate::driver::{Owner, Stream, called};
use crate::error::HostError;

pub(crate) struct DeviceBuffer {
    /// Address, 256-byte aligned.
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    owner: Owner,
}

impl DeviceBuffer {
    /// Allocates zeroed memory on the GPU whose context is current. Never called while a kernel is resident.
    pub(crate) fn zeroed(bytes: u64) -> Result<Self, HostError> {
        let bytes = bytes.max(256);
        // SAFETY: a context is current.
        let made = unsafe { result::malloc_sync(bytes as usize) };
        if let Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) = made {
            let (free, _) = called("cuMemGetInfo", result::mem_get_info())?;
            return Err(HostError::OutOfMemory { needed: bytes, free: free as u64 });
        }
        let address = called("cuMemAlloc", made)?;
        let buffer = Self { address, bytes, owner: Owner::current()? };
        // The memset is asynchronous, and our streams do not wait for it: it must not zero what is copied in next.
        // SAFETY: the range was just allocated; null is the legacy stream, in which the memset is.
        unsafe {
            called("cuMemsetD8", result::memset_d8_sync(address, 0, bytes as usize))?;
            called("cuStreamSynchronize", result::stream::synchronize(result::stream::null()))?;
        }
        Ok(buffer)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemAlloc and not used after.
        self.owner.within(|| unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Page-locked host memory that the device can address too. Cached, not write-combined, because the host reads it.
pub(crate) struct HostBuffer {
    host: *mut u8,
    /// The device's address of the same bytes.
    pub(crate) device: u64,
    pub(crate) bytes: usize,
    _raw: PhantomData<*mut u8>,
}

// SAFETY: the memory belongs to this value alone; the pointer is not tied to a thread.
unsafe impl Send for HostBuffer {}
// SAFETY: through a shared reference the host only reads; what the device writes is waited for before it is read, or read a word at a
// time by `word`.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates zeroed memory. Never called while a kernel is resident.
    pub(crate) fn zeroed(bytes: usize) -> Result<Self, HostError> {
        let bytes = bytes.max(4096);
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut device = 0;
        // SAFETY: the out pointer is valid; the range written is the range allocated.
        let host = unsafe {
            let host = called("cuMemHostAlloc", result::malloc_host(bytes, flags))?;
            std::ptr::write_bytes(host.cast::<u8>(), 0, bytes);
            let made = sys::cuMemHostGetDevicePointer_v2(&raw mut device, host, 0);
            called("cuMemHostGetDevicePointer", made.result())?;
            host
        };
        Ok(Self { host: host.cast(), device, bytes, _raw: PhantomData })
    }

    /// The first byte. The device may write to the buffer, so no reference to its contents is ever made.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.host
    }

    /// Copies `bytes` in at `offset`. The device must not be reading that range.
    pub(crate) fn write(&mut self, offset: usize, bytes: &[u8]) {
        let place = self.range(offset, bytes.len());
        // SAFETY: in range; the caller promises that the device is not reading it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    /// Copies `out.len()` bytes from `offset`. The device must not be writing that range.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        let place = self.range(offset, out.len());
        // SAFETY: in range; the caller promises that the device is not writing it.
        unsafe { std::ptr::copy_nonoverlapping(place, out.as_mut_ptr(), out.len()) };
    }

    /// Address of a range of this many bytes, checked to lie within the buffer.
    fn range(&self, offset: usize, bytes: usize) -> *mut u8 {
        let fits = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{bytes} bytes at {offset} of {}", self.bytes);
        self.host.wrapping_add(offset)
    }

    /// The word at `offset`, which the device may be writing: it writes words whole.
    pub(crate) fn word(&self, offset: usize) -> u32 {
        let place = self.range(offset, size_of::<u32>()).cast::<u32>();
        assert!(place.is_aligned(), "a word at byte {offset}");
        // SAFETY: in range and aligned; the host writes no word while it can be read here, and the device only whole ones.
        u32::from_le(unsafe { AtomicU32::from_ptr(place) }.load(Ordering::Relaxed))
    }

    /// Stores a word that the device polls, after all that was written before.
    pub(crate) fn publish(&mut self, offset: usize, word: u32) {
        let place = self.range(offset, size_of::<u32>()).cast::<u32>();
        assert!(place.is_aligned(), "a word at byte {offset}");
        // SAFETY: in range and aligned; the device reads the word whole, and this is the only way in which the host writes it.
        unsafe { AtomicU32::from_ptr(place) }.store(word.to_le(), Ordering::Release);
    }

    /// Reads this many words from `offset`, as [`read`](Self::read).
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

/// Bytes per copy of a fill.
const FILL_BYTES: usize = 4 << 20;

/// Copies to and from the devices through a page-locked buffer, in pieces. Safe while a kernel is resident: it only waits for its own streams.
pub(crate) struct Copier {
    /// One on each GPU.
    streams: Vec<Stream>,
    bounce: HostBuffer,
}

impl Copier {
    /// With a stream on each GPU and a buffer of this many bytes. Never called while a kernel is resident.
    pub(crate) fn new(streams: Vec<Stream>, bytes: usize) -> Result<Self, HostError> {
        Ok(Self { streams, bounce: HostBuffer::zeroed(bytes)? })
    }

    pub(crate) fn upload(&mut self, target: u64, bytes: &[u8]) -> Result<(), HostError> {
        upload(stream_of(&self.streams, target)?, &mut self.bounce, target, bytes)
    }

    /// The same, ordered after everything in another stream.
    pub(crate) fn upload_behind(
        &mut self,
        stream: &Stream,
        target: u64,
        bytes: &[u8],
    ) -> Result<(), HostError> {
        upload(stream, &mut self.bounce, target, bytes)
    }

    /// Fills device memory by copies of a filled buffer: a memset may be a kernel, for which a resident kernel leaves no room.
    pub(crate) fn fill(&mut self, target: u64, bytes: u64, value: u8) -> Result<(), HostError> {
        self.fill_all(std::iter::once(target), bytes, value)
    }

    /// Fills several ranges of this many bytes each, and waits once.
    pub(crate) fn fill_all(
        &mut self,
        targets: impl Iterator<Item = u64>,
        bytes: u64,
        value: u8,
    ) -> Result<(), HostError> {
        let len = (self.bounce.bytes.min(FILL_BYTES) as u64).min(bytes) as usize;
        // SAFETY: the bounce buffer is ours and holds `len` bytes; no copy from it is under way.
        unsafe { std::ptr::write_bytes(self.bounce.pointer(), value, len) };
        for target in targets {
            let (stream, mut done) = (stream_of(&self.streams, target)?, 0);
            while done < bytes {
                let piece = (bytes - done).min(len as u64);
                stream.copy_in(target + done, self.bounce.pointer(), piece as usize)?;
                done += piece;
            }
        }
        self.streams.iter().try_for_each(Stream::synchronize)
    }

    pub(crate) fn download(&self, source: u64, out: &mut [u8]) -> Result<(), HostError> {
        for (i, piece) in out.chunks_mut(self.bounce.bytes).enumerate() {
            self.copy_out(source + (i * self.bounce.bytes) as u64, piece.len())?;
            self.bounce.read(0, piece);
        }
        Ok(())
    }

    /// Reads this many values from an address on.
    pub(crate) fn values<T: bytemuck::Pod>(
        &self,
        source: u64,
        count: usize,
    ) -> Result<Vec<T>, HostError> {
        let mut values = vec![T::zeroed(); count];
        self.download(source, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// Reads rows of numbers, each into a vector of its own.
    pub(crate) fn rows(
        &self,
        source: u64,
        rows: usize,
        len: usize,
    ) -> Result<Vec<Vec<f32>>, HostError> {
        let mut out = vec![Vec::new(); rows];
        self.each_piece(source, &mut out, len, |row, copy| {
            *row = vec![0.0; len];
            copy(row);
        })?;
        Ok(out)
    }

    /// Reads as many rows of numbers as `out` holds.
    pub(crate) fn rows_into(
        &self,
        source: u64,
        out: &mut [f32],
        len: usize,
    ) -> Result<(), HostError> {
        let mut rows: Vec<_> = out.chunks_exact_mut(len).collect();
        self.each_piece(source, &mut rows, len, |row, copy| copy(row))
    }

    /// Reads rows in pieces: as many at a time as the bounce buffer holds, at least one. All cores copy from there.
    fn each_piece<R: Send>(
        &self,
        source: u64,
        rows: &mut [R],
        len: usize,
        take: impl Fn(&mut R, &dyn Fn(&mut [f32])) + Sync,
    ) -> Result<(), HostError> {
        let (bounce, row_bytes) = (&self.bounce, len * size_of::<f32>());
        let at_once = (bounce.bytes / row_bytes).max(1);
        for (piece, rows) in rows.chunks_mut(at_once).enumerate() {
            self.copy_out(source + (piece * at_once * row_bytes) as u64, rows.len() * row_bytes)?;
            let one = |(index, row): (usize, &mut R)| {
                let copy = |values: &mut [f32]| {
                    bounce.read(index * row_bytes, bytemuck::cast_slice_mut(values));
                };
                take(row, &copy);
            };
            match rows {
                // Other cores would take longer to wake up than to copy.
                [row] => one((0, row)),
                rows => rows.par_iter_mut().enumerate().for_each(one),
            }
        }
        Ok(())
    }

    /// Copies this many bytes into the bounce buffer.
    fn copy_out(&self, source: u64, bytes: usize) -> Result<(), HostError> {
        let stream = stream_of(&self.streams, source)?;
        stream.copy_out(self.bounce.pointer(), source, bytes)?;
        stream.synchronize()
    }
}

/// The stream of the GPU that has an address.
fn stream_of(streams: &[Stream], address: u64) -> Result<&Stream, HostError> {
    if let [only] = streams {
        return Ok(only);
    }
    let owner = Owner::of_memory(address)?;
    let own = streams.iter().find(|stream| stream.owner() == owner);
    own.ok_or_else(|| HostError::Request("a copy to a GPU that is not in use".into()))
}

fn upload(
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
