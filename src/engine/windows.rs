//! Windows: steps of consecutive positions of sequences, of which those behind a wrong guess are dropped.

use std::sync::Arc;

use ir::program::{Program, Verified, check_seqs};
use ir::schedule::ScheduleConfig;
use reference_vm::eval::Logits;
use remote::Served;
use search::{DeviceError, Handle};
use telemetry::now_ns;
use vm_host::{KvPool, Window};

use crate::context::Context;
use crate::device::Gpu;
use crate::failure::Failure;
use crate::schedule_choice::spread;
use crate::speculate::kernel_seqs;

use super::hosted::Hosted;
use super::kernel_choice::KernelChoice;
use super::shared_pages::Cached;
use super::{Advanced, Broken, Kernel, Megakernel, Observer, refused, unknown};

/// The program and schedule of windows, and the batch size of their kernel.
pub(crate) struct Windows {
    program: Arc<Verified<Program>>,
    config: ScheduleConfig,
    seqs: u32,
}

impl Windows {
    /// Those with this many guesses beside the schedule of one sequence, if there are any.
    pub(crate) fn of(
        context: &Context,
        alone: &ScheduleConfig,
        guesses: u32,
    ) -> Result<Option<Self>, Failure> {
        if guesses == 0 {
            return Ok(None);
        }
        let seqs = kernel_seqs(guesses);
        let config = spread(*alone, context.graph(), &context.target, seqs);
        let program = Arc::new(context.lowered(&config)?);
        check_seqs(&program, seqs)
            .map_err(|why| Failure::usage(format!("--speculate {guesses}: {why}")))?;
        Ok(Some(Self { program, config, seqs }))
    }

    /// Boots for one sequence on their kernel, and on the one of `alone` where nothing is worth a guess.
    pub(crate) fn boot<'a>(
        &self,
        mut gpu: Gpu<'a>,
        alone: Handle,
    ) -> Result<Megakernel<'a>, DeviceError> {
        // Last, and booted: the memory is for the wider kernel.
        gpu.set_seqs(self.seqs);
        let wide = gpu.prepare(&self.program, &self.config.kernel)?;
        gpu.serve(wide, 1, KvPool::Full)?;
        let choice = KernelChoice::alone();
        Ok(Megakernel { choice, ..Megakernel::new(gpu, wide, 1).switching(Some(alone)) })
    }
}

impl<S, B, R> Hosted<S, B, R>
where
    S: Cached,
    R: Fn(&mut S, &[u32], Logits) -> Result<Vec<Vec<f32>>, String>,
{
    pub(super) fn rows_of_window(
        &mut self,
        place: usize,
        tokens: &[u32],
    ) -> Result<Vec<Vec<f32>>, Broken> {
        let (sequence, _) = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        let (began, positions) = (now_ns(), sequence.positions());
        let rows = sequence.window(tokens).map_err(Broken::Sequence)?;
        self.account.last = Some([began, now_ns()]);
        self.account.passes[0] += 1;
        self.window_at = positions;
        Ok(rows)
    }

    pub(super) fn keep_of_window(&mut self, place: usize, tokens: &[u32]) -> Result<(), Broken> {
        let (sequence, fed) = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        sequence.truncate(self.window_at + tokens.len());
        if let Some(shared) = &mut self.shared {
            fed.extend(tokens);
            shared.ran(place, sequence, fed).map_err(refused)?;
        }
        Ok(())
    }
}

impl<S: Cached, B, R> Hosted<S, B, R> {
    pub(super) fn rewound(&mut self, place: usize, positions: usize) -> Result<(), Broken> {
        let (sequence, _) = self.sequences.get_mut(&place).ok_or_else(|| unknown(place))?;
        // What drops wrong guesses drops more, but not pages that others may have.
        if S::WINDOW == 1 || self.shared.is_some() || positions > sequence.positions() {
            return Err(Broken::Sequence(format!(
                "place {place} cannot go to {positions} positions"
            )));
        }
        sequence.truncate(positions);
        Ok(())
    }
}

impl Megakernel<'_> {
    /// The window of a place's next tokens, on the kernel of several sequences.
    fn window<'t>(&self, place: usize, tokens: &'t [u32]) -> Result<Window<'t>, Broken> {
        let held = self.places.get(place).ok_or_else(|| unknown(place))?;
        let (session, position, sampled) = (place as u32, held.position, held.sampled);
        Ok(Window { session, position, tokens, sampled })
    }

    pub(super) fn windows(
        &mut self,
        seqs: &[(usize, &[u32])],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Advanced, String>>, Broken> {
        let windows = seqs.iter().map(|&(place, tokens)| self.window(place, tokens));
        let windows = windows.collect::<Result<Vec<_>, Broken>>()?;
        self.ran_on = Kernel::Batch;
        observer.kernel(self.numbers[Kernel::Batch as usize]);
        let done = self.gpu.windows(self.program, &windows, false)?;
        let accepted = done.windows.iter().zip(seqs);
        let accepted = accepted.map(|(of, (_, tokens))| of.accepted(&tokens[1..]));
        let accepted: Vec<Vec<u32>> = accepted.collect();
        self.passed(accepted.iter().map(Vec::len).max().unwrap_or(0) as u32);
        let advanced = accepted.into_iter().zip(seqs);
        Ok(advanced.map(|(chosen, of)| self.kept(of, chosen)).collect())
    }

    /// Keeps what a window's choices say of its tokens, up to a stop token.
    fn kept(
        &mut self,
        (place, tokens): &(usize, &[u32]),
        mut chosen: Vec<u32>,
    ) -> Result<Advanced, String> {
        if chosen.is_empty() {
            return Err("every token is banned or not a number".to_owned());
        }
        let stop = &self.places[*place].stop;
        let stopped = chosen.iter().position(|token| stop.contains(token));
        chosen.truncate(stopped.map_or(chosen.len(), |at| at + 1));
        let ran = chosen.len();
        self.ran(*place, tokens.iter().copied(), ran as u32);
        Ok(Advanced { chosen, ran, stopped: stopped.is_some() })
    }

    pub(super) fn rows_of_window(
        &mut self,
        place: usize,
        tokens: &[u32],
    ) -> Result<Vec<Vec<f32>>, Broken> {
        let window = Window { sampled: false, ..self.window(place, tokens)? };
        self.ran_on = Kernel::Batch;
        self.gpu.windows(self.program, &[window], true)?;
        let rows = self.gpu.batch_logits(self.program, tokens.len() as u32, 1)?;
        self.passed(1);
        Ok(rows.into_iter().flatten().collect())
    }
}
