//! Several sessions in one command: kernels of more than one lane, and programs that are proven for them.

use ir::program::{Program, Together, Verified};
use search::{DeviceError, Handle};
use vm_host::{Batch, BatchDecoded, Loaded, Resident};

use super::{Gpu, device_error};
use crate::engine::Broken;

impl Gpu<'_> {
    /// From the next program on kernels run so many sessions at once. No kernel is launched yet.
    pub(crate) fn set_lanes(&mut self, lanes: u32) {
        self.lanes = lanes;
    }

    pub(crate) fn lanes(&self) -> u32 {
        self.lanes
    }

    /// The proof that sessions may share a program, where kernels run several.
    pub(super) fn prove(
        &self,
        program: &Verified<Program>,
    ) -> Result<Option<Together>, DeviceError> {
        if self.lanes == 1 {
            return Ok(None);
        }
        Together::new(program.clone(), self.lanes).map(Some).map_err(|violations| {
            let lanes = self.lanes;
            let reason = format!("the program cannot be shared by {lanes} sessions: {violations}");
            DeviceError::Fault { reason }
        })
    }

    /// Runs a batch. While it runs, `give_way` is asked whether it is to end after the step under way.
    pub(crate) fn batch(
        &mut self,
        handle: Handle,
        batch: &Batch<'_>,
        give_way: &mut dyn FnMut() -> bool,
    ) -> Result<BatchDecoded, Broken> {
        self.sequences.fill(None); // of searches
        self.undone(handle, |running| running.run_together(batch, give_way))
    }

    /// Logits of each lane of the last batch that kept them.
    pub(crate) fn batch_logits(
        &mut self,
        handle: Handle,
        lanes: u32,
        rows: u32,
    ) -> Result<Vec<Vec<Vec<f32>>>, Broken> {
        self.undone(handle, |running| {
            (0..lanes).map(|lane| running.lane_logits(lane, rows)).collect()
        })
    }
}

/// Loads a program as what it is proven for.
pub(super) fn load(
    running: &mut Resident,
    program: &Verified<Program>,
    together: Option<&Together>,
) -> Result<Loaded, DeviceError> {
    let loaded = match together {
        Some(together) => running.load_together(together),
        None => running.load(program),
    };
    loaded.map_err(device_error)
}
