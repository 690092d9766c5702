//! Checks whether the rows of a ledger follow from each other. A forger who recomputes all hashes must get this right
//! as well.
//!
//! A row holds its raw samples, so every decision made from them can be repeated: the median, its interval, the gain,
//! the threshold, the outcome, and that measuring lasted exactly as long as the stopping rule says. The audit finds and
//! names a row that claims a latency without samples, a latency below its bound, a decision that its samples do not
//! support, or another incumbent than the actual one.
//!
//! It cannot detect samples that were made up consistently with every other figure. Only measuring again shows that. It
//! does not check a prediction beyond its bound and the decisions made from it: `replay` predicts again.

use std::collections::{BTreeMap, BTreeSet};

use crate::assess::Timing;
use crate::decide::{Decision, decide_measured};
use crate::device::{Samples, Side};
use crate::device_worker::{Noise, is_equal};
use crate::effort::{Interim, StoppingRule};
use crate::measure::{Interval, gain, median, median_interval, noise_floor};
use crate::propose::{Origin, changes, mixed};
use crate::trial::{Beside, Confirmation, Outcome, Row, Trial, changed, together};
use crate::verdict::{LatencyKind, Verdict};

mod bound;
#[cfg(test)]
mod tests;

pub use bound::{RooflineBound, StepBytes};

/// The parameters of a search that its rows depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// The seed.
    pub seed: u64,
    /// The least gain worth keeping.
    pub min_gain: f64,
    /// How the device was timed.
    pub timing: Timing,
    /// Kind of its latencies; `None` accepts either.
    pub kind: Option<LatencyKind>,
    /// Bytes of the device's cache, which a step may find there instead of in memory.
    pub cache_bytes: u64,
}

/// Tolerance of a bound: the bandwidth is measured in each process, and differs by a per cent or so.
const BOUND_SLACK: f64 = 0.98;

/// Checks the rows of a search one after another.
#[derive(Clone, Debug)]
pub struct Audit {
    pub(crate) terms: Terms,
    bound: RooflineBound,
    pub(crate) trials: Vec<Trial>,
    /// Index of the incumbent.
    pub(crate) champion: Option<usize>,
    /// The noise of each card, by its number; `None` is the card of a search that has one.
    pub(crate) noises: BTreeMap<Option<u32>, Noise>,
}

impl Audit {
    /// An audit that has seen no row.
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        let bound = RooflineBound::default();
        Self { terms, bound, trials: Vec::new(), champion: None, noises: BTreeMap::new() }
    }

    /// The same audit with a known model or card: bounds then follow from them and not from the rows.
    #[must_use]
    pub fn with_bound(self, bound: RooflineBound) -> Self {
        Self { bound, ..self }
    }

    /// Checks the next row.
    ///
    /// # Errors
    /// The first thing that does not follow.
    pub fn row(&mut self, row: &Row) -> Result<(), String> {
        match row {
            Row::Trial(trial) => self.trial(trial),
            Row::Confirmation(confirmation) => self.confirmation(confirmation),
        }
    }

    /// Checks the next trial.
    ///
    /// # Errors
    /// The first thing that does not follow.
    pub fn trial(&mut self, trial: &Trial) -> Result<(), String> {
        self.check(trial)?;
        self.push(trial.clone());
        Ok(())
    }

    /// Adds a trial that was checked.
    pub(crate) fn push(&mut self, trial: Trial) {
        let own = trial.noise_floor.map(|floor| (trial.card, floor, &trial.samples_us));
        let others = trial
            .beside
            .iter()
            .filter_map(|other| Some((Some(other.card), other.noise_floor?, &other.samples_us)));
        for (card, floor, samples_us) in own.into_iter().chain(others) {
            self.noises.insert(card, Noise::of(floor, samples_us));
        }
        if trial.outcome.leads() {
            self.champion = Some(self.trials.len());
        }
        self.trials.push(trial);
    }

    /// Whether a trial is the next one, and its figures follow from its samples.
    pub(crate) fn check(&self, trial: &Trial) -> Result<(), String> {
        self.place(trial)?;
        let verdict = &trial.verdict;
        if trial.outcome.is_judged() {
            self.judged(trial)?;
        } else {
            unjudged(trial)?;
        }
        if trial.verdict.schedule_id.as_ref() != Some(&trial.config.id()) {
            return Err(format!(
                "its schedule is {}, not {:?}",
                trial.config.id(),
                verdict.schedule_id
            ));
        }
        self.beside(trial)
    }

    /// Checks its number, its incumbent, and the changes that it claims.
    fn place(&self, trial: &Trial) -> Result<(), String> {
        let next = self.trials.len() as u64;
        if trial.trial != next {
            return Err(format!("its number is not the next one ({next})"));
        }
        let champion = self.champion.map(|index| self.trials[index].trial);
        if trial.incumbent != champion {
            return Err(format!(
                "it was compared with another incumbent than the one that led ({champion:?})"
            ));
        }
        let tried = |old: &Trial| old.config == trial.config && old.outcome.is_judged();
        if trial.origin == Origin::Race && !self.trials.iter().any(tried) {
            return Err("it races a schedule that no trial before it measured".to_owned());
        }
        if let Some(index) = self.champion
            && trial.changed != changed(&changes(&self.trials[index].config, &trial.config))
        {
            return Err(
                "the knobs that it says it changed are not those in which it differs".to_owned()
            );
        }
        Ok(())
    }

    /// Checks a trial that was compared: it agreed, has a latency, and its outcome follows.
    fn judged(&self, trial: &Trial) -> Result<(), String> {
        let verdict = &trial.verdict;
        proven(verdict)?;
        let (Some(us), Some(kind), Some(bound)) =
            (verdict.latency_us, verdict.latency_kind, verdict.bound_us)
        else {
            return Err("it has an outcome without a latency".to_owned());
        };
        if self.terms.kind.is_some_and(|wanted| wanted != kind) {
            return Err(format!("its latency is {}, which this search has none of", kind.name()));
        }
        if verdict.pct_of_roofline != (us > 0.0).then_some(100.0 * bound / us) {
            return Err("its share of the bound does not follow from its latency".to_owned());
        }
        let first = self.champion.is_none();
        if first && !trial.outcome.leads() {
            return Err("the first correct trial leads, and this one does not".to_owned());
        }
        if (trial.outcome == Outcome::Baseline) != (trial.trial == 0) {
            return Err("only trial 0 is the baseline".to_owned());
        }
        match kind {
            LatencyKind::MeasuredGpu => self.measured(trial),
            LatencyKind::Predicted => self.predicted(trial, us, bound),
        }
    }

    fn measured(&self, trial: &Trial) -> Result<(), String> {
        let samples = samples_of(&trial.samples_us);
        let seed = mixed(self.terms.seed, trial.trial);
        self.figures(&Beside::of_trial(0, trial), trial.verdict.weight_mb, &samples, seed)?;
        let rounds = samples.rounds.len();
        if self.champion.is_none() {
            if rounds != self.terms.timing.rounds {
                return Err(format!(
                    "it has {rounds} rounds, and the noise takes {}",
                    self.terms.timing.rounds
                ));
            }
            let noise = noise_floor(&samples, seed);
            let same = trial.noise_floor.map(f64::to_bits) == Some(noise.to_bits());
            return if same {
                Ok(())
            } else {
                Err(format!("its noise floor is not that of its samples ({noise})"))
            };
        }
        let noise = self.noise(trial.card)?;
        let threshold = noise.floor.max(trial.origin.min_gain(self.terms.min_gain));
        if trial.threshold != Some(threshold) {
            return Err(format!("its threshold is not that of the search ({threshold})"));
        }
        let bar =
            StoppingRule { threshold, spread: noise.spread, rounds: self.terms.timing.rounds };
        if let Some(departures) = trial.simpler {
            return self.simpler(trial, departures, &bar.look(&samples, seed), threshold);
        }
        // Measuring ends at the first look that decides.
        let mut done = 0;
        while let Some(more) = bar.more(done).filter(|more| done + more <= rounds) {
            done += more;
            let look = bar.look(&samples_of(&samples.rounds[..done]), seed);
            let Some(decision) = look.decision else { continue };
            if done < rounds {
                return Err(format!("it was decided after {done} rounds and has {rounds}"));
            }
            if trial.gain != Some(look.gain) {
                return Err(format!("its gain is not that of its samples ({:?})", look.gain));
            }
            let outcome = Outcome::from(decision);
            let same = outcome == trial.outcome;
            return if same { Ok(()) } else { Err(format!("its samples say {}", outcome.name())) };
        }
        Err(format!("its {rounds} rounds decide nothing"))
    }

    /// Checks a raced trial with fewer departures than the incumbent, which is measured in full: it leads unless it is
    /// slower. The number of departures is its own claim.
    fn simpler(
        &self,
        trial: &Trial,
        [own, other]: [usize; 2],
        look: &Interim,
        threshold: f64,
    ) -> Result<(), String> {
        let rounds = (trial.samples_us.len(), self.terms.timing.rounds);
        if trial.origin != Origin::Race || own >= other || rounds.0 != rounds.1 {
            return Err(
                "it claims to be simpler than the incumbent, and is not raced in full".to_owned()
            );
        }
        if trial.gain != Some(look.gain) {
            return Err(format!("its gain is not that of its samples ({:?})", look.gain));
        }
        let outcome = if is_equal(look.gain, threshold) {
            Outcome::Kept
        } else {
            look.decision.map_or(Outcome::Inconclusive, Outcome::from)
        };
        let same = outcome == trial.outcome;
        if same { Ok(()) } else { Err(format!("its samples say {}", outcome.name())) }
    }

    /// The noise of a card. It is an error to compare on a card that has not measured it.
    fn noise(&self, card: Option<u32>) -> Result<Noise, String> {
        let found = self.noises.get(&card).copied();
        found.ok_or_else(|| match card {
            Some(card) => format!("it is of card {card}, whose noise was not measured"),
            None => "no trial before it measured the noise".to_owned(),
        })
    }

    /// Checks the measurements of a baseline on other cards.
    fn beside(&self, trial: &Trial) -> Result<(), String> {
        if !trial.beside.is_empty() && trial.outcome != Outcome::Baseline {
            return Err("only a baseline is measured on several cards".to_owned());
        }
        let seed = mixed(self.terms.seed, trial.trial);
        let mut cards = BTreeSet::from([trial.card]);
        for other in &trial.beside {
            let samples = samples_of(&other.samples_us);
            self.figures_of(other, trial.verdict.weight_mb, &samples, seed)?;
            let floor = noise_floor(&samples, seed);
            let whole = samples.rounds.len() == self.terms.timing.rounds;
            if !whole || other.noise_floor.map(f64::to_bits) != Some(floor.to_bits()) {
                return Err(format!(
                    "the noise floor of card {} is not that of its samples ({floor})",
                    other.card
                ));
            }
            if !cards.insert(Some(other.card)) {
                return Err(format!("card {} is there twice", other.card));
            }
        }
        Ok(())
    }

    /// Checks the figures of another card.
    fn figures_of(
        &self,
        other: &Beside,
        weight_mb: Option<f64>,
        samples: &Samples,
        seed: u64,
    ) -> Result<(), String> {
        let followed = self.figures(other, weight_mb, samples, seed);
        followed.map_err(|reason| format!("card {}: {reason}", other.card))
    }

    /// Checks the figures that follow from samples alone, whatever the trial was compared with.
    fn figures(
        &self,
        shown: &Beside,
        weight_mb: Option<f64>,
        samples: &Samples,
        seed: u64,
    ) -> Result<(), String> {
        let (Some(us), Some(bound)) = (shown.latency_us, shown.bound_us) else {
            return Err("it has samples and no latency".to_owned());
        };
        let values = samples.of(Side::Candidate);
        let plausible = |us: &f64| us.is_finite() && *us > 0.0;
        if values.is_empty() || !samples.rounds.iter().flatten().all(plausible) {
            return Err("it has a measured latency without samples that could be times".to_owned());
        }
        let found = median(&values);
        if found.to_bits() != us.to_bits() {
            return Err(format!("its latency is {us} us, its samples have {found}"));
        }
        let interval = median_interval(&values, seed);
        let wanted = (samples.rounds.len() >= crate::assess::INTERVAL_ROUNDS)
            .then_some([interval.low, interval.high]);
        if shown.ci_us != wanted {
            return Err("its interval does not follow from its samples".to_owned());
        }
        self.bound.bound(weight_mb, bound)?;
        // The bound was computed from the bytes of a step, most of which are weights.
        let weights = self.bound.weights(weight_mb);
        let cached = self.bound.cached(self.terms.cache_bytes);
        let least =
            if weights > 0.0 { bound * ((weights - cached) / weights).max(0.0) } else { 0.0 };
        if us < least * BOUND_SLACK {
            return Err(format!("its latency of {us} us is below the bound of {least} us"));
        }
        Ok(())
    }

    fn predicted(&self, trial: &Trial, us: f64, bound: f64) -> Result<(), String> {
        if !trial.samples_us.is_empty()
            || trial.simpler.is_some()
            || trial.noise_floor.is_some()
            || trial.predicted_us.is_some()
            || trial.verdict.ci_us.is_some()
        {
            return Err("it is predicted and has samples".to_owned());
        }
        self.bound.bound(trial.verdict.weight_mb, bound)?;
        if !us.is_finite() || us < bound * (1.0 - 1e-6) {
            return Err(format!("its latency of {us} us is below the bound of {bound} us"));
        }
        let Some(index) = self.champion else { return Ok(()) };
        let Some(incumbent) = self.trials[index].verdict.latency_us else {
            return Err("it was compared with a trial that has no latency".to_owned());
        };
        let gain = 1.0 - us / incumbent;
        let same = trial.gain.is_some_and(|held| held.low == gain && held.high == gain);
        if !same || trial.threshold != Some(self.terms.min_gain) {
            return Err(format!(
                "its gain or threshold does not follow from the latencies ({gain})"
            ));
        }
        let decision = if gain > self.terms.min_gain { Decision::Kept } else { Decision::Reverted };
        let outcome = Outcome::from(decision);
        let same = outcome == trial.outcome;
        if same { Ok(()) } else { Err(format!("the latencies say {}", outcome.name())) }
    }

    /// Checks a confirmation of the champion.
    ///
    /// # Errors
    /// The first thing that does not follow.
    pub fn confirmation(&mut self, confirmation: &Confirmation) -> Result<(), String> {
        if confirmation.trials != self.trials.len() as u64 {
            return Err(format!(
                "it confirms {} trials, and {} are here",
                confirmation.trials,
                self.trials.len()
            ));
        }
        let champion = self.champion.map(|index| &self.trials[index]);
        let Some(champion) = champion.filter(|trial| trial.trial == confirmation.champion) else {
            return Err(format!("trial {} does not lead", confirmation.champion));
        };
        self.same_program(&champion.verdict, &confirmation.verdict)?;
        let refused = confirmation.verdict.gates.iter().any(|gate| !gate.passed);
        if refused && confirmation.decision == Decision::Reverted {
            // The champion disagreed, or has no time: nothing else of the confirmation counts.
            return if confirmation.samples_us.is_empty() {
                Ok(())
            } else {
                Err("a gate failed, and it has samples".to_owned())
            };
        }
        proven(&confirmation.verdict)?;
        if confirmation.positions == 0 {
            return Err("it ran no position on the reference VM".to_owned());
        }
        if confirmation.samples_us.is_empty() {
            return self.confirmed_without_samples(champion, confirmation);
        }
        let samples = samples_of(&confirmation.samples_us);
        let seed = mixed(self.terms.seed, u64::MAX - 1);
        let own = Beside::of_confirmation(0, confirmation);
        self.figures(&own, confirmation.verdict.weight_mb, &samples, seed)?;
        let wanted = 2 * self.terms.timing.rounds;
        if samples.rounds.len() != wanted {
            return Err(format!(
                "it has {} rounds, and a confirmation takes {wanted}",
                samples.rounds.len()
            ));
        }
        let one = self.confirmed(confirmation.card, &samples, confirmation.gain, seed)?;
        let threshold = self.noise(confirmation.card)?.floor.max(self.terms.min_gain);
        if confirmation.threshold != Some(threshold) {
            return Err(format!("its threshold is not that of the search ({threshold})"));
        }
        for other in &confirmation.beside {
            let samples = samples_of(&other.samples_us);
            // A card on which the champion failed has no samples.
            if samples.rounds.is_empty() && other.decision == Some(Decision::Reverted) {
                continue;
            }
            self.figures_of(other, confirmation.verdict.weight_mb, &samples, seed)?;
            let decision = self.confirmed(Some(other.card), &samples, other.gain, seed)?;
            if other.decision != Some(decision) {
                return Err(format!("the samples of card {} say {decision:?}", other.card));
            }
        }
        let all = together(confirmation.beside.iter().filter_map(|b| b.decision).chain([one]));
        let same = confirmation.decision == all;
        if same { Ok(()) } else { Err(format!("its samples say {all:?}")) }
    }

    /// Checks a confirmation without a race: of a prediction, or of a champion that is the baseline.
    fn confirmed_without_samples(
        &self,
        champion: &Trial,
        confirmation: &Confirmation,
    ) -> Result<(), String> {
        let measured = champion.verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
        let has_baseline = self.trials.first().is_some_and(|t| t.outcome == Outcome::Baseline);
        if measured && has_baseline && champion.trial > 0 {
            return Err("it was measured against the baseline and has no samples".to_owned());
        }
        let (then, now) = (&champion.verdict, &confirmation.verdict);
        if (then.latency_us, then.ci_us, then.bound_us) != (now.latency_us, now.ci_us, now.bound_us)
        {
            return Err("it has a new latency without samples".to_owned());
        }
        if confirmation.decision != Decision::Kept || confirmation.gain.is_some() {
            return Err(format!(
                "nothing failed and nothing was measured, and it says {:?}",
                confirmation.decision
            ));
        }
        Ok(())
    }

    /// Whether a confirmation is about the champion's program.
    fn same_program(&self, champion: &Verdict, now: &Verdict) -> Result<(), String> {
        let ids = |v: &Verdict| {
            (v.schedule_id.clone(), v.program_id.clone(), v.kernel_id.clone(), v.latency_kind)
        };
        if ids(champion) == ids(now) && champion.weight_mb == now.weight_mb {
            return Ok(());
        }
        Err("it is about another program than the champion's".to_owned())
    }

    /// The decision that the samples of one card give for a champion.
    fn confirmed(
        &self,
        card: Option<u32>,
        samples: &Samples,
        held: Option<Interval>,
        seed: u64,
    ) -> Result<Decision, String> {
        let interval = gain(samples, seed);
        let decision = decide_measured(interval, self.noise(card)?.floor, self.terms.min_gain);
        let same = held == Some(interval);
        if same { Ok(decision) } else { Err(format!("its samples say {decision:?}")) }
    }
}

/// Checks that the gates passed.
fn proven(verdict: &Verdict) -> Result<(), String> {
    if let Some(gate) = verdict.gates.iter().find(|gate| !gate.passed) {
        return Err(format!("it has an outcome, and the gate {} failed", gate.gate));
    }
    let passed = |name: &str| verdict.gates.iter().any(|gate| gate.gate == name);
    let device = verdict.latency_kind == Some(LatencyKind::MeasuredGpu);
    let mut needed = vec!["validate", "lower", "verify", "reference"];
    needed.extend(if device { &["device", "bound"][..] } else { &[] });
    if let Some(missing) = needed.into_iter().find(|name| !passed(name)) {
        return Err(format!(
            "it has an outcome, and nothing says that it passed the gate {missing}"
        ));
    }
    if !verdict.valid || !verdict.correct {
        return Err("it has an outcome and is not correct".to_owned());
    }
    Ok(())
}

/// Checks that a rejected trial has no latency, gain or samples.
fn unjudged(trial: &Trial) -> Result<(), String> {
    let verdict = &trial.verdict;
    if verdict.latency_us.is_some() || trial.gain.is_some() || !trial.samples_us.is_empty() {
        return Err(format!("it is {} and has a latency", trial.outcome.name()));
    }
    if trial.predicted_us.is_some() {
        return Err(format!("it is {} and was predicted beside a latency", trial.outcome.name()));
    }
    if verdict.gates.iter().all(|gate| gate.passed) {
        return Err(format!("it is {} and no gate failed", trial.outcome.name()));
    }
    Ok(())
}

fn samples_of(rounds: &[[f64; 4]]) -> Samples {
    Samples { rounds: rounds.to_vec(), ..Samples::default() }
}
