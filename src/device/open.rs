//! Opening the GPU that a context selects.

use remote::Remote;
use vm_host::DeviceInfo;

use super::Gpu;
use super::child::open_process;
use super::probe::{look, look_at};
use super::sharing;
use crate::cli::{DeviceChoice, SharingArgs};
use crate::context::Context;
use crate::failure::Failure;

impl Context {
    /// Opens the GPU in a separate process, which a search can lose. `None` with `cpu`, or with `auto` if there is none.
    pub(crate) fn open_process(
        &self,
        sharing: &SharingArgs,
    ) -> Result<Option<Remote<'_>>, Failure> {
        self.open_with(|info| open_process(self, info, sharing.shared_gpu, false))
    }

    /// Opens the GPU of a number in a separate process, which sees no other GPU.
    pub(crate) fn open_process_at(
        &self,
        ordinal: u32,
        sharing: &SharingArgs,
    ) -> Result<Remote<'_>, Failure> {
        let info = look_at(&self.target, ordinal)?;
        self.refuse_several()?;
        open_process(self, &info, sharing.shared_gpu, true)
    }

    /// Opens the GPU in this process; `None` with `cpu`, or with `auto` if there is none. `measure`: also measures the
    /// bandwidth, for a comparison of speeds.
    pub(crate) fn open_here(&self, measure: bool) -> Result<Option<Gpu<'_>>, Failure> {
        self.open_with(|_| Ok(Gpu::open(self, None, measure)?))
    }

    /// The number of other processes on the GPU, before this process opens it to measure: refused if there are any,
    /// unless the GPU may be shared. `None` if no GPU is used.
    pub(crate) fn others(&self, sharing: &SharingArgs) -> Result<Option<Option<u32>>, Failure> {
        self.open_with(|info| sharing::count(&info.uuid, sharing.shared_gpu))
    }

    /// Whether a GPU is used: false with `cpu`, or with `auto` if there is none.
    pub(crate) fn has_device(&self) -> Result<bool, Failure> {
        Ok(self.open_with(|_| Ok(()))?.is_some())
    }

    fn open_with<D>(
        &self,
        open: impl FnOnce(&DeviceInfo) -> Result<D, Failure>,
    ) -> Result<Option<D>, Failure> {
        let wanted = match self.device {
            DeviceChoice::Cpu => return Ok(None),
            DeviceChoice::Eval => {
                let message =
                    "--device eval is for `generate` and `serve` only; use auto, cpu or cuda";
                return Err(Failure::usage(message));
            }
            DeviceChoice::Auto => false,
            DeviceChoice::Cuda => true,
        };
        match look(&self.target) {
            Ok(info) => {
                self.refuse_several()?;
                open(&info).map(Some)
            }
            Err(error) if wanted => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// Refuses to run one step on several GPUs of this machine, with what is missing.
    fn refuse_several(&self) -> Result<(), Failure> {
        let wanted = self.target.devices;
        if wanted == 1 {
            return Ok(());
        }
        let here = (0..wanted).take_while(|&n| look_at(&self.target, n).is_ok()).count();
        Err(Failure::missing(if here < wanted as usize {
            format!("{wanted} GPUs are needed for {}, and {here} are here", self.target.name)
        } else {
            "one step on several GPUs runs on the reference VM only so far: add --device cpu".into()
        }))
    }

    /// The GPU's full name, if a GPU is wanted and there is one.
    pub(crate) fn card(&self) -> Option<String> {
        let wanted = matches!(self.device, DeviceChoice::Auto | DeviceChoice::Cuda);
        wanted.then(|| look(&self.target).ok().map(|info| info.name)).flatten()
    }
}
