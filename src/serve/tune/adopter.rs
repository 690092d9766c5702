//! What a search keeps becomes the schedule of the server, if it passes one more gate, and what its confirmation reverts
//! leaves it.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use search::{
    Decision, Device, DeviceError, Gate, KernelId, Outcome as End, Rejection, Trial, assess,
    device_positions,
};

use super::Tuned;
use super::figures::NOTHING;
use super::machine::Machine;
use crate::commands::search_loop::{Found, Progress, Watch};
use crate::context::Context;
use crate::report;

/// How often a search that waits for the end of the requests looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Seed of the tokens of the gate before a switch: others than those of the search, whose seed is 0.
const SEED: u64 = 1;

/// An observer of the search.
pub(super) struct Adopter<'a> {
    pub(super) tuned: &'a Tuned,
    pub(super) context: &'a Context,
    pub(super) kernel_id: KernelId<'a>,
    /// A planted schedule whose gate before a switch fails.
    pub(super) wrong: Option<ScheduleConfig>,
    pub(super) state: RefCell<State<'a>>,
}

#[derive(Default)]
pub(super) struct State<'a> {
    /// The gate before a switch and the machine, from the first switch on.
    gate: Option<(Gate<'a>, Option<Machine<'a>>)>,
    trials: Vec<Trial>,
    /// What has passed it and is to serve next.
    accepted: Option<Arc<Verified<Program>>>,
    /// Whether another schedule than the first one serves.
    switched: bool,
}

impl<'a> Adopter<'a> {
    fn gate(&self) -> Result<(Gate<'a>, Option<Machine<'a>>), String> {
        let machine = Machine::open(&self.tuned.tasks, self.context);
        let machine = machine.map_err(|error| error.to_string())?;
        let positions = machine.as_ref().map(|_| device_positions(self.context.graph()));
        let gate = self.context.gate(SEED, positions, self.kernel_id);
        Ok((gate.map_err(|failure| failure.message)?, machine))
    }

    /// The gate before a switch, on tokens that the search did not have. Returns the program that passed.
    fn last_gate(&self, config: &ScheduleConfig) -> Result<Arc<Verified<Program>>, Rejection> {
        let state = &mut *self.state.borrow_mut();
        let (gate, machine) = match &mut state.gate {
            Some(there) => there,
            none => {
                let unavailable = |reason| DeviceError::Unavailable { reason };
                none.insert(self.gate().map_err(unavailable)?)
            }
        };
        let spoils = self.wrong == Some(*config);
        if spoils && machine.is_none() {
            let why = "--tune-plant spoils what a device computes, and predictions are compared here: use --device cuda";
            return Err(DeviceError::Unavailable { reason: why.to_owned() }.into());
        }
        machine.iter_mut().for_each(|machine| machine.spoil(spoils));
        let mut device = machine.as_mut().map(|machine| machine as &mut dyn Device);
        let mut verdict = assess::begin(gate, device.as_deref(), config);
        let candidate = assess::lower(gate, config, &mut verdict)?;
        let program = candidate.program.clone();
        let passed = assess::assess(gate, device.as_deref_mut(), candidate, &mut verdict);
        // The engine prepares one for itself.
        device.into_iter().for_each(|device| device.release(&program, &config.kernel));
        passed.map(|_| program)
    }

    /// Lets a schedule that was kept run requests.
    fn adopt(&self, config: &ScheduleConfig) -> Result<(), String> {
        let state = &mut *self.state.borrow_mut();
        let program = state.accepted.take().ok_or("it has not passed the gate before a switch")?;
        self.tuned.switch(config, &program, search::saved(&state.trials))?;
        state.switched = true;
        Ok(())
    }

    /// The end of the search: its confirmation decides whether the server keeps what it has.
    pub(super) fn ended(&self, found: &Found) {
        let (tuned, figures) = (self.tuned, &self.tuned.figures);
        let confirmation = found.confirmation.as_ref();
        let switched = self.state.borrow().switched;
        let refuted = confirmation.filter(|c| switched && c.decision == Decision::Reverted);
        if let Some(refuted) = refuted {
            report::say(&format!(
                "tune: not confirmed, back to the first schedule: {}",
                refuted.why
            ));
            figures.rolled_back();
            let (config, program, _) = &tuned.start;
            if let Err(why) = tuned.switch(config, program, NOTHING) {
                report::say(&format!("tune: {why}"));
            }
        }
        let kept = confirmation.filter(|c| switched && c.decision == Decision::Kept);
        kept.and_then(|c| c.gain).into_iter().for_each(|gain| figures.confirmed(gain));
        figures.state(&found.stopped_by);
        report::say(&format!("tune: stopped: {}", found.stopped_by));
    }
}

impl Watch for Adopter<'_> {
    /// Waits for a moment without requests first: where there is one, the search's own work is beside none.
    fn stopped(&self) -> bool {
        let began = Instant::now();
        let busy = || self.tuned.admission.inside() > 0 && began.elapsed() < self.tuned.patience;
        while busy() && !self.tuned.is_over() {
            std::thread::sleep(LOOK_EVERY);
        }
        self.tuned.is_over()
    }

    fn begins(&self, _: &Progress) {
        self.tuned.figures.state("tuning");
    }

    fn accepts(&self, trial: &Trial) -> Result<(), Rejection> {
        let passed = self.last_gate(&trial.config);
        match passed {
            Ok(program) => {
                self.state.borrow_mut().accepted = Some(program);
                Ok(())
            }
            Err(gone @ Rejection::Failed(DeviceError::Unavailable { .. })) => Err(gone),
            Err(why) => {
                self.tuned.figures.refused();
                let trial = trial.trial;
                report::say(&format!("tune: trial {trial} is better and does not serve: {why}"));
                Err(why)
            }
        }
    }

    fn trial(&self, _: &Progress, trial: &Trial) {
        let figures = &self.tuned.figures;
        self.state.borrow_mut().trials.push(trial.clone());
        figures.trial(trial.outcome == End::Kept);
        if trial.outcome != End::Kept {
            return;
        }
        if let Err(why) = self.adopt(&trial.config) {
            report::say(&format!("tune: trial {} does not serve: {why}", trial.trial));
        }
    }
}
