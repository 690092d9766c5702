//! Measures a point of a measured grid on a device: agreement first, as everywhere, then a few blocks. It is cheap
//! because the context is filled once: each program goes on with the sequence that the one before it left.

use std::ops::Range;

use ir::schedule::ScheduleConfig;
use reference_vm::compare::{Agreement, Reference};

use super::{Answer, Measured};
use crate::assess;
use crate::cpu::Candidate;
use crate::device::{Contender, Device, DeviceError, Handle, Plan, Samples, Side};
use crate::gate::Gate;
use crate::measure::{Latency, median};
use crate::rejection::Rejection;
use crate::trial::Outcome;

/// Lowers a point and runs it on the reference VM: all that needs no device. Any number of threads may call it.
///
/// # Errors
/// The result of a point that is rejected here.
pub fn prepare(
    gate: &Gate<'_>,
    config: &ScheduleConfig,
) -> Result<(Candidate, Agreement<Reference>), Answer> {
    let judged = gate.lower(config).and_then(|candidate| {
        let reference = gate.reference(&candidate)?;
        Ok((candidate, reference))
    });
    judged.map_err(|dropped| answer(&dropped))
}

fn answer(dropped: &Rejection) -> Answer {
    if let Rejection::Rejected(violations) = dropped {
        return Answer::illegal(violations);
    }
    let outcome = Outcome::from(dropped).name().to_owned();
    Answer::Failed { outcome, why: dropped.to_string() }
}

/// The median of a point's blocks over the least of them beyond which the host or the card was interrupted while it was
/// timed (quiet points of an H200 differ by 0.3%), and how often such a point is timed at most.
const QUIET: f64 = 1.01;
const TIMINGS: usize = 4;

/// Measures the points of a grid one after another.
pub struct Probe<'g, 'a> {
    gate: &'g Gate<'a>,
    timed: Range<usize>,
    rounds: usize,
    seed: u64,
    /// A program that is known to be right; it fills the context.
    anchor: (Candidate, Agreement<Reference>),
    /// The program whose sequence is on the device.
    holder: Option<(Handle, Candidate)>,
}

impl<'g, 'a> Probe<'g, 'a> {
    /// Points are timed on this range of the gate's tokens, in `rounds` rounds of four blocks.
    #[must_use]
    pub fn new(
        gate: &'g Gate<'a>,
        anchor: (Candidate, Agreement<Reference>),
        timed: Range<usize>,
        rounds: usize,
        seed: u64,
    ) -> Self {
        Self { gate, timed, rounds, seed, anchor, holder: None }
    }

    /// Times the anchor: at the start and from time to time.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn anchor(&mut self, device: &mut dyn Device) -> Result<Answer, DeviceError> {
        let (candidate, reference) = self.anchor.clone();
        self.measure(device, &candidate, reference)
    }

    /// Runs the timed positions of a point, compares their logits, and times them. A wrong result is checked once more
    /// on a context that the anchor filled: the program before may have corrupted it.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn measure(
        &mut self,
        device: &mut dyn Device,
        candidate: &Candidate,
        reference: Agreement<Reference>,
    ) -> Result<Answer, DeviceError> {
        let inherited = self.holder.is_some();
        let mut measured = self.once(device, candidate, reference);
        let doubtful = matches!(
            measured,
            Err(Rejection::Disagreed { .. } | Rejection::Failed(DeviceError::Fault { .. }))
        );
        if inherited && doubtful {
            self.forget(device);
            measured = self.once(device, candidate, reference);
        }
        match measured {
            Ok(measured) => Ok(Answer::Measured(measured)),
            Err(Rejection::Failed(error @ DeviceError::Unavailable { .. })) => Err(error),
            Err(dropped) => {
                self.forget(device);
                Ok(answer(&dropped))
            }
        }
    }

    /// Discards the context on the device.
    fn forget(&mut self, device: &mut dyn Device) {
        if let Some((_, before)) = self.holder.take() {
            before.release(device);
        }
    }

    /// The program that holds the context. If none does, the anchor fills it.
    fn holder(&mut self, device: &mut dyn Device) -> Result<Handle, Rejection> {
        if let Some((handle, _)) = self.holder {
            return Ok(handle);
        }
        let (candidate, reference) = &self.anchor;
        let handle = candidate.load(device)?;
        let tokens = &self.gate.expected().tokens[..self.timed.end];
        let ran = candidate.run(device, tokens, 0)?;
        let _ = self.gate.agreed(*reference, &ran)?;
        self.holder = Some((handle, candidate.clone()));
        Ok(handle)
    }

    fn once(
        &mut self,
        device: &mut dyn Device,
        candidate: &Candidate,
        reference: Agreement<Reference>,
    ) -> Result<Measured, Rejection> {
        let (expected, Range { start: first, end }) = (self.gate.expected(), self.timed.clone());
        let tokens = &expected.tokens[..end];
        let holder = self.holder(device)?;
        let handle = candidate.load(device)?;
        if handle != holder {
            let before = self.holder.replace((handle, candidate.clone()));
            let handed = device.hand_over(holder, handle);
            if let Some((_, before)) = before {
                before.release(device);
            }
            handed?;
        }
        let ran = device.run(handle, tokens, first)?;
        let agreement = reference
            .and_device(&expected.logits[first..end], &ran.logits, &ran.chosen, expected.on_device)
            .map_err(|at| Rejection::Disagreed { by: "device", at })?;
        let contender = Contender::new(handle, &agreement);
        let plan = Plan { tokens, first, rounds: self.rounds, warmup: 0 };
        let samples = quiet(|| device.time([contender; 2], &plan))?;
        self.gate
            .timed(reference, [&expected.logits[end - 1]; 2], &samples)
            .map_err(|(_, dropped)| dropped)?;
        let at = u32::midpoint(first as u32, end as u32);
        let bound = assess::bounds(self.gate, device, candidate, &[at]).artefact_us;
        let _ = Latency::new(&agreement, &samples, Side::Candidate, bound, self.seed)?;
        Ok(measured(candidate, &samples, device.clocks().map(|clocks| clocks.sm_mhz)))
    }
}

/// Times until the samples are quiet. Interruptions only ever add time, so else the fastest ones are returned.
fn quiet(mut time: impl FnMut() -> Result<Samples, DeviceError>) -> Result<Samples, DeviceError> {
    let mut best = time()?;
    for _ in 1..TIMINGS {
        let (typical, least) = typical_and_least(&best);
        if typical <= QUIET * least {
            break;
        }
        let again = time()?;
        if typical_and_least(&again).0 < typical {
            best = again;
        }
    }
    Ok(best)
}

fn typical_and_least(samples: &Samples) -> (f64, f64) {
    let blocks: Vec<f64> = samples.rounds.iter().flatten().copied().collect();
    (median(&blocks), blocks.iter().copied().fold(f64::INFINITY, f64::min))
}

/// Both sides of the samples are the same program.
fn measured(candidate: &Candidate, samples: &Samples, sm_mhz: Option<u32>) -> Measured {
    let rounded = |us: f64| (1000.0 * us).round() / 1000.0;
    let blocks: Vec<f64> = samples.rounds.iter().flatten().copied().map(rounded).collect();
    Measured {
        program_id: candidate.program_id.clone(),
        kernel_id: candidate.kernel_id.clone(),
        us: rounded(median(&blocks)),
        blocks_us: blocks,
        sm_mhz,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_points_are_timed_again() {
        let (quiet_block, late) = (100.0, 180.0);
        let of = |blocks: [f64; 4]| Samples { rounds: vec![blocks; 2], ..Samples::default() };
        let mut answers = vec![
            of([quiet_block; 4]),
            of([quiet_block, late, quiet_block, late]),
            of([late, late, late, quiet_block]),
        ];
        let samples = quiet(|| Ok(answers.pop().expect("timed again"))).unwrap();
        assert_eq!(samples.rounds, [[quiet_block; 4]; 2]);

        let mut timings = 0;
        let never = quiet(|| {
            timings += 1;
            Ok(of(if timings == 2 {
                [100.0, 100.0, 140.0, 140.0]
            } else {
                [100.0, late, late, late]
            }))
        });
        assert_eq!(timings, TIMINGS);
        assert_eq!(typical_and_least(&never.unwrap()).0, 120.0);
    }
}
