//! Host memory that weights pass through.

use std::marker::PhantomData;

use crate::weight_stream::source::ALIGN;

/// Whole pages for reads past the page cache.
#[derive(Debug)]
pub(crate) struct IoBuffer {
    start: *mut u8,
    bytes: usize,
    /// Its index among the registered buffers.
    pub(crate) index: u16,
    _raw: PhantomData<*mut u8>,
}

// SAFETY: the pages belong to this value alone; the pointer is not tied to a thread.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes, ALIGN)
            .unwrap_or_else(|_| unreachable!("a few megabytes"))
    }

    /// Zeroed pages.
    pub(crate) fn new(bytes: usize, index: u16) -> Self {
        let layout = Self::layout(bytes.max(ALIGN).next_multiple_of(ALIGN));
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc_zeroed(layout) };
        if start.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Self { start, bytes: layout.size(), index, _raw: PhantomData }
    }

    /// For reads by the operating system (io_uring).
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the pages are initialised and ours; no read fills a buffer that is held by value.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout and not used after.
        unsafe { std::alloc::dealloc(self.start, Self::layout(self.bytes)) };
    }
}

/// A part of the page-locked memory that packed pieces are copied from. It does not own that memory: the target does, which outlives all
/// packing (`pipeline::Gate`).
#[derive(Debug)]
pub(crate) struct Staging {
    start: *mut u8,
    bytes: usize,
    pub(crate) index: usize,
}

// SAFETY: parts do not overlap, and each has one owner at a time.
unsafe impl Send for Staging {}

impl Staging {
    /// Parts of this many bytes of the memory at `base`.
    ///
    /// # Safety
    /// The memory holds all of them and is used only through them, while the gate of the pipeline is open.
    pub(crate) unsafe fn parts(base: *mut u8, bytes: usize, count: usize) -> Vec<Self> {
        (0..count)
            // SAFETY: within the memory, as the caller promises.
            .map(|index| Self { start: unsafe { base.add(index * bytes) }, bytes, index })
            .collect()
    }

    pub(crate) fn pointer(&self) -> *const u8 {
        self.start
    }

    /// The bytes, to pack into.
    ///
    /// # Safety
    /// The memory still exists, and no copy from it is in flight.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the caller's promise; one owner at a time.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}
