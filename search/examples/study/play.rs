//! Simulates searches on a recorded measured grid: the trials that a strategy would have run, under the loop's own
//! keep-or-revert rule. The latency of a simulated trial is not the recorded median but the median of as many blocks
//! resampled from the recorded ones, anew for each trial and both sides, so that searches with several seeds meet the
//! noise of the card. The recorded median judges the result.

use std::collections::BTreeSet;

use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::IndexedRandom;
use search::strategy::{KnownRun, KnownTrial, Predictions, Question, SearchSpace, Strategy};
use search::{
    Decision, Samples, StoppingRule, TrialRecord, TrialRecords, changes, generator, median,
    noise_floor, spread,
};

use tests::measured_grid::{Found, MeasuredGrid};

/// Maximum draws for one trial, after which a search counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Number of the random stream of the noise.
const NOISE_STREAM: u64 = u64::MAX - 2;

/// Number of schedules in the race at the end of a search, the incumbent included.
const FINALISTS: usize = 5;

/// Rounds of a full comparison, as of the loop.
const ROUNDS: usize = 36;

/// A simulated search.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Played {
    /// Recorded µs per token of the incumbent after each trial, the baseline's first.
    pub(super) best_us: Vec<f64>,
    /// Proposals that broke rules.
    pub(super) rejected: u64,
    /// Proposals without a result in the measured grid: outside its grid, or not recorded.
    pub(super) unknown: u64,
    /// The trials after the baseline.
    pub(super) past: TrialRecords,
    /// Recorded µs per token of the winner of a race of the best trials, run after the last one.
    pub(super) raced_us: f64,
}

impl Played {
    /// What a store would have of the search; `predictions` are those of its graph.
    pub(super) fn known(
        &self,
        land: &MeasuredGrid,
        predictions: &dyn Predictions,
        weight: f64,
    ) -> KnownRun {
        let row = |(config, us): (ir::ScheduleConfig, f64)| {
            Some(KnownTrial::new(&config, us, predictions.us(&config)?))
        };
        let scored = self.past.iter().filter_map(|past| Some((past.config, past.score?.exp())));
        let rows = std::iter::once((*land.start(), 1.0)).chain(scored);
        let graph = land.terms.graph_id.clone();
        KnownRun { graph, weight, trials: rows.filter_map(row).collect() }
    }
}

/// A proposal with its recorded time, unless it failed.
type Asked<'l> = (ir::ScheduleConfig, Option<Timed<'l>>);

/// The recorded median and its blocks.
type Timed<'l> = (f64, &'l [f64]);

/// A search in progress.
struct Game<'l> {
    land: &'l MeasuredGrid,
    incumbent: ir::ScheduleConfig,
    /// The recorded median and the blocks of the incumbent.
    us: f64,
    blocks: &'l [f64],
    /// The incumbent's score as the simulated trials measured it.
    score: f64,
    min_gain: f64,
    rng: Xoshiro256PlusPlus,
    tried: BTreeSet<u32>,
    drawn: BTreeSet<String>,
    played: Played,
}

impl<'l> Game<'l> {
    fn new(land: &'l MeasuredGrid, min_gain: f64, seed: u64) -> Option<Self> {
        let incumbent = *land.start();
        let Found::Timed(point, us, blocks) = land.at(&incumbent) else { return None };
        Some(Self {
            land,
            incumbent,
            us,
            blocks,
            score: 0.0,
            min_gain,
            rng: generator(seed, NOISE_STREAM),
            tried: BTreeSet::from([point]),
            drawn: BTreeSet::from([incumbent.id()]),
            played: Played { best_us: vec![us], ..Played::default() },
        })
    }

    /// The first proposal that is legal and new.
    fn next(&mut self, strategy: &dyn Strategy, trial: u64) -> Option<Asked<'l>> {
        let past = std::mem::take(&mut self.played.past);
        let incumbent = self.incumbent;
        let question = Question { trial, incumbent: &incumbent, past: &past };
        let mut found = None;
        for (_, config) in strategy.ask(&question).take(DRAWS_MAX) {
            if found.is_some() {
                break;
            }
            if !self.drawn.insert(config.id()) {
                continue;
            }
            match self.land.at(&config) {
                Found::Illegal => self.played.rejected += 1,
                Found::Outside | Found::Unrecorded => self.played.unknown += 1,
                Found::Failed(point) if self.tried.insert(point) => {
                    found = Some((config, None));
                }
                Found::Timed(point, us, blocks) if self.tried.insert(point) => {
                    found = Some((config, Some((us, blocks))));
                }
                Found::Failed(_) | Found::Timed(..) => {} // another schedule of a program that was tried
            }
        }
        self.played.past = past;
        found
    }

    /// Ends a trial: keeps or reverts.
    fn judge(&mut self, (config, timed): Asked<'l>) {
        let gain = timed.map(|(_, blocks)| {
            1.0 - resampled(blocks, &mut self.rng) / resampled(self.blocks, &mut self.rng)
        });
        self.end(config, timed, gain);
    }

    /// Races the schedules with the best scores against the incumbent, as a measured search does at its end; returns the
    /// recorded time of the winner.
    fn race(&mut self) -> f64 {
        let Found::Timed(_, _, start) = self.land.at(self.land.start()) else { return self.us };
        let mut baseline = Samples::default();
        self.add_rounds(&mut baseline, [start, start], ROUNDS);
        let threshold = noise_floor(&baseline, 0);
        let rule = StoppingRule { threshold, spread: spread(&baseline), rounds: ROUNDS };
        let scored = self.played.past.iter().filter_map(|past| Some((past.score?, past.config)));
        let mut best: Vec<_> = std::iter::once((0.0, *self.land.start())).chain(scored).collect();
        best.sort_by(|a, b| a.0.total_cmp(&b.0));
        best.retain(|(_, config)| *config != self.incumbent);
        best.truncate(FINALISTS - 1);
        for (_, config) in best {
            let Found::Timed(_, us, blocks) = self.land.at(&config) else { continue };
            let mut samples = Samples::default();
            while let Some(more) = rule.enough(&samples, 0) {
                self.add_rounds(&mut samples, [self.blocks, blocks], more);
            }
            if rule.look(&samples, 0).decision == Some(Decision::Kept) {
                (self.us, self.blocks) = (us, blocks);
            }
        }
        self.us
    }

    /// Adds rounds of blocks resampled from those of both sides.
    fn add_rounds(&mut self, samples: &mut Samples, sides: [&[f64]; 2], rounds: usize) {
        let mut block =
            |side: usize| sides[side].choose(&mut self.rng).copied().unwrap_or(f64::NAN);
        samples.rounds.extend((0..rounds).map(|_| [block(0), block(1), block(1), block(0)]));
    }

    /// Ends a trial with this apparent gain.
    fn end(&mut self, config: ir::ScheduleConfig, timed: Option<Timed<'l>>, gain: Option<f64>) {
        let kept = gain.is_some_and(|gain| gain > self.min_gain);
        let score = gain.map(|gain| self.score + (1.0 - gain).ln());
        let changes = changes(&self.incumbent, &config);
        self.played.past.push(TrialRecord { config, changes, gain, kept, score });
        if let (true, Some((us, blocks)), Some(score)) = (kept, timed, score) {
            (self.incumbent, self.us, self.blocks, self.score) = (config, us, blocks, score);
        }
    }
}

/// The median of as many blocks, resampled from these.
fn resampled(blocks: &[f64], rng: &mut Xoshiro256PlusPlus) -> f64 {
    let drawn: Vec<f64> = blocks.iter().filter_map(|_| blocks.choose(rng).copied()).collect();
    median(&drawn)
}

/// Simulates a search of `trials` trials, the baseline included. `None` if the measured grid has no time for its own start.
pub(super) fn play(
    land: &MeasuredGrid,
    strategy: &dyn Strategy,
    trials: u64,
    min_gain: f64,
    seed: u64,
) -> Option<Played> {
    let mut game = Game::new(land, min_gain, seed)?;
    for trial in 1..trials {
        // A search without new proposals stays where it is.
        if let Some(asked) = game.next(strategy, trial) {
            game.judge(asked);
        }
        game.played.best_us.push(game.us);
    }
    game.played.raced_us = game.race();
    Some(game.played)
}

/// The space of strategies on a measured grid, with the sweep of a search of `trials` trials.
pub(super) fn search_space(land: &MeasuredGrid, seed: u64, trials: u64) -> SearchSpace {
    let budget = search::Budget::Trials(trials);
    let (sweep, short) = (budget.explore(), budget.is_short());
    SearchSpace { space: land.space().axes().to_vec(), seed, sweep, short }
}
