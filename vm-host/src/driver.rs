//! Checked wrappers of the few driver calls that we make. Raw handles stay here and in `memory`.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, stream::StreamKind};
use cudarc::driver::sys::{self, CUresult};

use crate::error::HostError;
use crate::prefill::Piece;

/// The result of a driver call, or which one failed and why.
pub(crate) fn called<T>(call: &'static str, made: Result<T, DriverError>) -> Result<T, HostError> {
    made.map_err(|error| {
        let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
        HostError::Driver { call, message: text.unwrap_or_else(|_| format!("{:?}", error.0)) }
    })
}

/// Whether the queried work is done; "not ready" is not a failure.
fn over(call: &'static str, made: Result<(), DriverError>) -> Result<bool, HostError> {
    match made {
        Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
        made => called(call, made).map(|()| true),
    }
}

/// Properties of the device, for reports and comparability.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// Marketing name.
    pub name: String,
    /// Universally unique id, hexadecimal.
    pub uuid: String,
    /// CUDA version of the driver, such as 13000.
    pub driver: i32,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub sms: u32,
    /// Shared memory that a block may opt in to.
    pub shared_bytes: u32,
    /// L2 cache.
    pub l2_bytes: u32,
    /// Device memory.
    pub memory_bytes: u64,
}

/// A device. Querying it makes no context, so it takes no memory there and this process is not listed on it.
pub(crate) struct Device(sys::CUdevice);

impl Device {
    /// Initialises the driver, and finds the device with this ordinal.
    pub(crate) fn at(ordinal: u32) -> Result<Self, HostError> {
        // SAFETY: only checks with the dynamic loader whether the library can be opened. Without this check cudarc panics.
        if !unsafe { sys::is_culib_present() } {
            return Err(HostError::NoDriver);
        }
        called("cuInit", result::init())?;
        let count = called("cuDeviceGetCount", result::device::get_count())?;
        if count == 0 {
            return Err(HostError::NoDevice);
        }
        let there = i32::try_from(ordinal).ok().filter(|&ordinal| ordinal < count);
        let Some(ordinal) = there else {
            return Err(HostError::NoSuchDevice { ordinal, count: count.cast_unsigned() });
        };
        called("cuDeviceGet", result::device::get(ordinal)).map(Self)
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, HostError> {
        // SAFETY: the device is live.
        let value = unsafe { result::device::get_attribute(self.0, attribute) };
        called("cuDeviceGetAttribute", value)
    }

    pub(crate) fn info(&self) -> Result<DeviceInfo, HostError> {
        use sys::CUdevice_attribute as A;
        let mut driver = 0;
        // SAFETY: the out pointer is valid.
        let version = unsafe { sys::cuDriverGetVersion(&raw mut driver) };
        called("cuDriverGetVersion", version.result())?;
        let uuid = called("cuDeviceGetUuid", result::device::get_uuid(self.0))?;
        // SAFETY: the device is live.
        let total = unsafe { result::device::total_mem(self.0) };
        let number = |attribute| self.attribute(attribute).map(i32::cast_unsigned);
        Ok(DeviceInfo {
            name: called("cuDeviceGetName", result::device::get_name(self.0))?,
            uuid: uuid.bytes.iter().map(|b| format!("{:02x}", b.cast_unsigned())).collect(),
            driver,
            capability: (
                self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sms: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: number(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: number(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            memory_bytes: called("cuDeviceTotalMem", total)? as u64,
        })
    }
}

/// A handle of a context, kept by what belongs to the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(sys::CUcontext);

// SAFETY: the driver lets any thread use a context; the handle is never changed.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl Owner {
    /// The context that is current on this thread.
    pub(crate) fn current() -> Result<Self, HostError> {
        let current = called("cuCtxGetCurrent", result::ctx::get_current())?;
        Ok(Self(current.unwrap_or(std::ptr::null_mut())))
    }

    /// The context whose memory an address is in.
    pub(crate) fn of_memory(address: u64) -> Result<Self, HostError> {
        let mut owner: sys::CUcontext = std::ptr::null_mut();
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        // SAFETY: the attribute is a context, for which the out pointer has room.
        let asked =
            unsafe { sys::cuPointerGetAttribute((&raw mut owner).cast(), attribute, address) };
        called("cuPointerGetAttribute", asked.result()).map(|()| Self(owner))
    }

    /// Makes a driver call with this context current. Afterwards the one before is current again.
    pub(crate) fn within<R>(self, call: impl FnOnce() -> R) -> R {
        // Without a driver's answer the call itself fails.
        let before = Self::current().unwrap_or(self);
        if before == self {
            return call();
        }
        // SAFETY: primary contexts are never released by this process.
        let _ = unsafe { result::ctx::set_current(self.0) };
        let made = call();
        // SAFETY: as above.
        let _ = unsafe { result::ctx::set_current(before.0) };
        made
    }
}

pub(crate) struct Context {
    device: Device,
    handle: sys::CUcontext,
}

// SAFETY: the driver lets any thread use a context; the handle is never changed.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the primary context current on this thread.
    pub(crate) fn new(device: Device) -> Result<Arc<Self>, HostError> {
        // SAFETY: the device is live; the context is that of the first call, and never released by this process.
        let handle =
            called("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device.0) })?;
        let context = Self { device, handle };
        context.make_current()?;
        Ok(Arc::new(context))
    }

    pub(crate) fn make_current(&self) -> Result<(), HostError> {
        // SAFETY: the primary context is never released by this process.
        called("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.handle) })
    }

    /// Lets kernels of this context use the memory of another one. Returns false if the hardware cannot.
    pub(crate) fn reach(&self, other: &Self) -> Result<bool, HostError> {
        let mut can = 0;
        // SAFETY: the out pointer is valid, the devices are live.
        let asked =
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.device.0, other.device.0) };
        called("cuDeviceCanAccessPeer", asked.result())?;
        if can == 0 {
            return Ok(false);
        }
        // SAFETY: both contexts are live.
        let made = Owner(self.handle)
            .within(|| unsafe { sys::cuCtxEnablePeerAccess(other.handle, 0) }.result());
        if let Err(DriverError(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) = made {
            return Ok(true);
        }
        called("cuCtxEnablePeerAccess", made).map(|()| true)
    }

    /// Its handle, for [`Owner::within`].
    pub(crate) fn owner(&self) -> Owner {
        Owner(self.handle)
    }

    pub(crate) fn info(&self) -> Result<DeviceInfo, HostError> {
        self.device.info()
    }

    pub(crate) fn free_bytes(&self) -> Result<u64, HostError> {
        let free = self.owner().within(result::mem_get_info);
        called("cuMemGetInfo", free).map(|(free, _)| free as u64)
    }
}

/// A stream that does not wait for the legacy default stream.
pub(crate) struct Stream(pub(crate) sys::CUstream, Owner);

// SAFETY: the driver lets any thread use a stream; one has it at a time.
unsafe impl Send for Stream {}

impl Stream {
    /// In the context that is current on this thread.
    pub(crate) fn new() -> Result<Self, HostError> {
        let owner = Owner::current()?;
        let made = result::stream::create(StreamKind::NonBlocking);
        called("cuStreamCreate", made).map(|stream| Self(stream, owner))
    }

    /// The context that it belongs to.
    pub(crate) fn owner(&self) -> Owner {
        self.1
    }

    /// Waits for everything in this stream, and for nothing else.
    pub(crate) fn synchronize(&self) -> Result<(), HostError> {
        // SAFETY: the stream is live.
        let made = self.1.within(|| unsafe { result::stream::synchronize(self.0) });
        called("cuStreamSynchronize", made)
    }

    pub(crate) fn is_done(&self) -> Result<bool, HostError> {
        // SAFETY: the stream is live.
        let made = self.1.within(|| unsafe { sys::cuStreamQuery(self.0) });
        over("cuStreamQuery", made.result())
    }

    /// Copies to the device. `source` must be page-locked and stay untouched until the stream has been synchronised.
    pub(crate) fn copy_in(
        &self,
        target: u64,
        source: *const u8,
        bytes: usize,
    ) -> Result<(), HostError> {
        // SAFETY: the callers own both ranges and keep them until they synchronise.
        let copy = || unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, self.0) };
        let made = self.1.within(copy);
        called("cuMemcpyHtoDAsync", made.result())
    }

    /// Copies from the device into page-locked memory.
    pub(crate) fn copy_out(
        &self,
        target: *mut u8,
        source: u64,
        bytes: usize,
    ) -> Result<(), HostError> {
        // SAFETY: as `copy_in`.
        let copy = || unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, self.0) };
        let made = self.1.within(copy);
        called("cuMemcpyDtoHAsync", made.result())
    }

    /// Writes a word of device memory after everything in this stream, with a system-wide fence before it: a reader that sees the word sees
    /// what was copied before. No kernel is involved.
    pub(crate) fn write_value(&self, target: u64, value: u32) -> Result<(), HostError> {
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the callers own the word, which is aligned.
        let write = || unsafe { sys::cuStreamWriteValue32_v2(self.0, target, value, flags) };
        let made = self.1.within(write);
        called("cuStreamWriteValue32", made.result())
    }

    /// Copies rows of device memory, `pitch` apart on both sides; one may be memory of another GPU that this one's context can reach.
    pub(crate) fn copy_rows(
        &self,
        target: u64,
        source: u64,
        piece: &Piece,
    ) -> Result<(), HostError> {
        if piece.width == 0 || piece.rows == 0 {
            return Ok(());
        }
        let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: unified,
            srcHost: std::ptr::null(),
            srcDevice: source + piece.offset,
            srcArray: std::ptr::null_mut(),
            srcPitch: piece.pitch as usize,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: unified,
            dstHost: std::ptr::null_mut(),
            dstDevice: target + piece.offset,
            dstArray: std::ptr::null_mut(),
            dstPitch: piece.pitch as usize,
            WidthInBytes: piece.width as usize,
            Height: piece.rows as usize,
        };
        // SAFETY: the callers own both ranges and keep them until they synchronise; the driver reads `copy` before it returns.
        let made = self.1.within(|| unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.0) });
        called("cuMemcpy2DAsync", made.result())
    }

    /// Orders what follows in this stream after what an event has recorded last, perhaps on another GPU.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), HostError> {
        // SAFETY: both handles are live.
        let made = self.1.within(|| unsafe { sys::cuStreamWaitEvent(self.0, event.0, 0) });
        called("cuStreamWaitEvent", made.result())
    }

    pub(crate) fn launch(
        &self,
        function: &Function,
        grid: u32,
        block: u32,
        shared: u32,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), HostError> {
        let (grid, block) = ((grid, 1, 1), (block, 1, 1));
        // SAFETY: the callers pass one pointer per kernel parameter, each to a value of that parameter's type.
        let launched = self.1.within(|| unsafe {
            result::launch_kernel(function.0, grid, block, shared, self.0, arguments)
        });
        called("cuLaunchKernel", launched)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is live and not used after; the driver releases it once its work is done.
        self.1.within(|| unsafe { sys::cuStreamDestroy_v2(self.0) });
    }
}

/// An event with timing.
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver lets any thread use an event; one has it at a time.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new() -> Result<Self, HostError> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        called("cuEventCreate", result::event::create(flags)).map(Self)
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<(), HostError> {
        // SAFETY: both handles are live.
        let made = stream.1.within(|| unsafe { result::event::record(self.0, stream.0) });
        called("cuEventRecord", made)
    }

    pub(crate) fn synchronize(&self) -> Result<(), HostError> {
        // SAFETY: the event is live.
        called("cuEventSynchronize", unsafe { result::event::synchronize(self.0) })
    }

    /// Whether the recorded work is done. Does not wait.
    pub(crate) fn is_reached(&self) -> Result<bool, HostError> {
        // SAFETY: the event is live.
        over("cuEventQuery", unsafe { result::event::query(self.0) })
    }

    /// Microseconds from `self` to `end`, both recorded and reached.
    pub(crate) fn elapsed_us(&self, end: &Self) -> Result<f64, HostError> {
        // SAFETY: both events are live.
        let ms = called("cuEventElapsedTime", unsafe { result::event::elapsed(self.0, end.0) })?;
        Ok(f64::from(ms) * 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is live and not used after.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A loaded image. Its functions are looked up at once: a lookup while a kernel is resident may wait for it.
pub(crate) struct Module {
    handle: sys::CUmodule,
    owner: Owner,
}

pub(crate) struct Function(sys::CUfunction, Owner);

impl Module {
    /// Into the context that is current on this thread.
    pub(crate) fn load(image: &[u8]) -> Result<Self, HostError> {
        // SAFETY: the image is a complete cubin; the driver copies it.
        let handle = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let owner = Owner::current()?;
        called("cuModuleLoadData", handle).map(|handle| Self { handle, owner })
    }

    pub(crate) fn function(&self, name: &CStr) -> Result<Function, HostError> {
        // SAFETY: the module is live.
        let get = || unsafe { result::module::get_function(self.handle, name.to_owned()) };
        let function = called("cuModuleGetFunction", self.owner.within(get))?;
        Ok(Function(function, self.owner))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the module is live and none of its kernels runs: a `Resident` machine keeps its module.
        self.owner.within(|| unsafe { sys::cuModuleUnload(self.handle) });
    }
}

impl Function {
    /// Lets blocks of this kernel use `bytes` of dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), HostError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is live.
        let set = || unsafe { sys::cuFuncSetAttribute(self.0, attribute, bytes.cast_signed()) };
        called("cuFuncSetAttribute", self.1.within(set).result())
    }

    /// Blocks of this shape that fit on one multiprocessor.
    pub(crate) fn resident_blocks(&self, threads: u32, shared: u32) -> Result<u32, HostError> {
        let (threads, shared) = (threads.cast_signed(), shared as usize);
        // SAFETY: the function is live.
        let blocks = self.1.within(|| unsafe {
            result::occupancy::max_active_block_per_multiprocessor(self.0, threads, shared)
        });
        let blocks = called("cuOccupancyMaxActiveBlocksPerMultiprocessor", blocks)?;
        Ok(blocks.cast_unsigned())
    }
}
