//! The few driver calls that we make, each checked. Raw handles live here and in `memory`; nothing else sees them.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use crate::error::HostError;

pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), HostError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the out pointer is valid; the driver's strings are static.
    let known = unsafe { sys::cuGetErrorString(result, &raw mut text) } == CUresult::CUDA_SUCCESS
        && !text.is_null();
    let message = if known {
        // SAFETY: checked non-null above; the driver returns NUL-terminated static strings.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("{result:?}")
    };
    Err(HostError::Driver { call, message })
}

/// What is known of the device, for reports and comparability.
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

/// A device. Looking at it makes no context, so it takes no memory there and nobody sees this process on it.
pub(crate) struct Device(sys::CUdevice);

impl Device {
    /// Initialises the driver, and finds the device of a number.
    pub(crate) fn at(ordinal: u32) -> Result<Self, HostError> {
        // SAFETY: only asks the dynamic loader whether the library can be opened. Without this check cudarc panics.
        if !unsafe { sys::is_culib_present() } {
            return Err(HostError::NoDriver);
        }
        let (mut count, mut device) = (0, 0);
        // SAFETY: all out pointers are valid for their calls.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut count))?;
            if count == 0 {
                return Err(HostError::NoDevice);
            }
            let there = i32::try_from(ordinal).ok().filter(|&ordinal| ordinal < count);
            let Some(ordinal) = there else {
                return Err(HostError::NoSuchDevice { ordinal, count: count.cast_unsigned() });
            };
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
        }
        Ok(Self(device))
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, HostError> {
        let mut value = 0;
        // SAFETY: the out pointer is valid and the device is live.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, attribute, self.0)
        })?;
        Ok(value)
    }

    pub(crate) fn info(&self) -> Result<DeviceInfo, HostError> {
        use sys::CUdevice_attribute as A;
        let mut name = [0_u8; 128];
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        let (mut driver, mut total) = (0, 0);
        // SAFETY: every out pointer is valid, the name buffer as long as is said.
        unsafe {
            check(
                "cuDeviceGetName",
                sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, self.0),
            )?;
            check("cuDeviceGetUuid", sys::cuDeviceGetUuid_v2(&raw mut uuid, self.0))?;
            check("cuDriverGetVersion", sys::cuDriverGetVersion(&raw mut driver))?;
            check("cuDeviceTotalMem", sys::cuDeviceTotalMem_v2(&raw mut total, self.0))?;
        }
        let number = |attribute| self.attribute(attribute).map(i32::cast_unsigned);
        Ok(DeviceInfo {
            name: CStr::from_bytes_until_nul(&name)
                .map(|s| s.to_string_lossy().into_owned())
                .unwrap_or_default(),
            uuid: uuid.bytes.iter().map(|b| format!("{:02x}", b.cast_unsigned())).collect(),
            driver,
            capability: (
                self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                self.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            sms: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: number(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: number(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            memory_bytes: total as u64,
        })
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
        let mut context = std::ptr::null_mut();
        // SAFETY: the out pointer is valid and the device is live; the context is that of the first call.
        unsafe {
            check(
                "cuDevicePrimaryCtxRetain",
                sys::cuDevicePrimaryCtxRetain(&raw mut context, device.0),
            )?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
        }
        Ok(Arc::new(Self { device, handle: context }))
    }

    pub(crate) fn make_current(&self) -> Result<(), HostError> {
        // SAFETY: the primary context is never released by this process.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })
    }

    pub(crate) fn info(&self) -> Result<DeviceInfo, HostError> {
        self.device.info()
    }

    pub(crate) fn free_bytes(&self) -> Result<u64, HostError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both out pointers are valid; this context is current.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }
}

/// A stream that does not wait for the legacy default stream.
pub(crate) struct Stream(pub(crate) sys::CUstream);

// SAFETY: the driver lets any thread use a stream; one has it at a time.
unsafe impl Send for Stream {}

impl Stream {
    pub(crate) fn new() -> Result<Self, HostError> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the out pointer is valid; a context is current.
        check("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&raw mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)
        })?;
        Ok(Self(stream))
    }

    /// Waits for everything in this stream, and for nothing else.
    pub(crate) fn synchronize(&self) -> Result<(), HostError> {
        // SAFETY: the stream is live.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0) })
    }

    pub(crate) fn is_done(&self) -> Result<bool, HostError> {
        // SAFETY: the stream is live.
        let result = unsafe { sys::cuStreamQuery(self.0) };
        if result == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuStreamQuery", result).map(|()| true)
    }

    /// Copies to the device. `source` must be page-locked and stay untouched until the stream has been synchronised.
    pub(crate) fn copy_in(
        &self,
        target: u64,
        source: *const u8,
        bytes: usize,
    ) -> Result<(), HostError> {
        // SAFETY: the callers own both ranges and keep them until they synchronise.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, self.0)
        })
    }

    /// Copies from the device into page-locked memory.
    pub(crate) fn copy_out(
        &self,
        target: *mut u8,
        source: u64,
        bytes: usize,
    ) -> Result<(), HostError> {
        // SAFETY: as `copy_in`.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, self.0)
        })
    }

    /// Writes a word of device memory behind everything in this stream, a fence of the whole system in front: whoever sees the word sees
    /// what was copied before. No kernel is involved.
    pub(crate) fn write_value(&self, target: u64, value: u32) -> Result<(), HostError> {
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as u32;
        // SAFETY: the callers own the word, which is aligned.
        check("cuStreamWriteValue32", unsafe {
            sys::cuStreamWriteValue32_v2(self.0, target, value, flags)
        })
    }

    pub(crate) fn launch(
        &self,
        function: &Function,
        grid: u32,
        block: u32,
        shared: u32,
        arguments: &mut [*mut std::ffi::c_void],
    ) -> Result<(), HostError> {
        // SAFETY: the callers pass one pointer per kernel parameter, each to a value of that parameter's type.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                function.0,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                self.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is live and not used after; the driver releases it once its work is done.
        unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// An event with timing.
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver lets any thread use an event; one has it at a time.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new() -> Result<Self, HostError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the out pointer is valid; a context is current.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, 0) })?;
        Ok(Self(event))
    }

    pub(crate) fn record(&self, stream: &Stream) -> Result<(), HostError> {
        // SAFETY: both handles are live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.0, stream.0) })
    }

    pub(crate) fn synchronize(&self) -> Result<(), HostError> {
        // SAFETY: the event is live.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0) })
    }

    /// Whether what was recorded is over. Does not wait.
    pub(crate) fn is_reached(&self) -> Result<bool, HostError> {
        // SAFETY: the event is live.
        let result = unsafe { sys::cuEventQuery(self.0) };
        if result == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", result).map(|()| true)
    }

    /// Microseconds from `self` to `end`, both recorded and reached.
    pub(crate) fn elapsed_us(&self, end: &Self) -> Result<f64, HostError> {
        let mut ms = 0.0;
        // SAFETY: both events are live, the out pointer is valid.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut ms, self.0, end.0)
        })?;
        Ok(f64::from(ms) * 1000.0)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is live and not used after.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// A loaded image. Its functions are looked up at once: a lookup behind a resident kernel may wait for it.
pub(crate) struct Module {
    handle: sys::CUmodule,
}

pub(crate) struct Function(sys::CUfunction);

impl Module {
    pub(crate) fn load(image: &[u8]) -> Result<Self, HostError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image is a complete cubin; the driver copies it.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&raw mut handle, image.as_ptr().cast())
        })?;
        Ok(Self { handle })
    }

    pub(crate) fn function(&self, name: &CStr) -> Result<Function, HostError> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is live, the name NUL-terminated.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, self.handle, name.as_ptr())
        })?;
        Ok(Function(function))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the module is live and none of its kernels runs: a `Resident` machine keeps its module.
        unsafe { sys::cuModuleUnload(self.handle) };
    }
}

impl Function {
    /// Lets blocks of this kernel use `bytes` of dynamic shared memory.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), HostError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is live.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(self.0, attribute, bytes.cast_signed())
        })
    }

    /// Blocks of this shape that fit on one multiprocessor.
    pub(crate) fn resident_blocks(&self, threads: u32, shared: u32) -> Result<u32, HostError> {
        let mut blocks = 0;
        // SAFETY: the function is live, the out pointer valid.
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.0,
                threads.cast_signed(),
                shared as usize,
            )
        })?;
        Ok(blocks.cast_unsigned())
    }
}
