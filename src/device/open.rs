//! Opening the GPU that a context selects.

use remote::Remote;
use vm_host::DeviceInfo;

use super::Gpu;
use super::child::open_process;
use super::probe::look_at;
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
        self.one_gpu("a search on cards of a list")?;
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
        self.open_with(|_| self.count_others(sharing.shared_gpu))
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
        match look_at(&self.target, self.cards[0]) {
            Ok(info) => {
                self.look_at_others()?;
                open(&info).map(Some)
            }
            Err(error) if wanted => Err(error.into()),
            Err(_) => Ok(None),
        }
    }

    /// The number of other processes on the GPUs that run a step.
    pub(super) fn count_others(&self, shared: bool) -> Result<Option<u32>, Failure> {
        let mut sum = None;
        for &card in &self.cards {
            let here = sharing::count(&look_at(&self.target, card)?.uuid, shared)?;
            sum = here.map(|here| sum.unwrap_or(0) + here).or(sum);
        }
        Ok(sum)
    }

    /// Refuses GPUs that are not here, with what is missing.
    fn look_at_others(&self) -> Result<(), Failure> {
        let (wanted, name) = (self.cards.len(), &self.target.name);
        for &card in &self.cards[1..] {
            look_at(&self.target, card).map_err(|error| {
                Failure::missing(format!("{wanted} GPUs are needed for {name}: {error}"))
            })?;
        }
        Ok(())
    }

    /// The GPU's full name, if a GPU is wanted and there is one.
    pub(crate) fn card(&self) -> Option<String> {
        let wanted = matches!(self.device, DeviceChoice::Auto | DeviceChoice::Cuda);
        wanted.then(|| look_at(&self.target, self.cards[0]).ok().map(|info| info.name)).flatten()
    }
}
