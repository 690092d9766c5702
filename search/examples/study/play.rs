//! Simulates searches on a recorded measured grid: the trials that a strategy would have run, under the loop's own
//! keep-or-revert rule. The latency of a simulated trial is not the recorded median but the median of as many blocks
//! resampled from the recorded ones, anew for each trial and both sides, so that searches with several seeds meet the
//! noise of the card. The recorded median judges the result.

use std::collections::BTreeSet;

use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};
use search::strategy::{MoveStats, Question, SearchSpace, Strategy};
use search::{TrialRecord, TrialRecords, changes, generator, median};

use tests::measured_grid::{Found, MeasuredGrid};

/// Maximum draws for one trial, after which a search counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Number of the random stream of the noise.
const NOISE_STREAM: u64 = u64::MAX - 2;

/// Number of candidates in a bracket of successive halving.
const BRACKET: usize = 16;

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
}

impl Played {
    /// The statistics that a store would have of these moves.
    pub(super) fn seen(&self) -> Vec<MoveStats> {
        let one = |past: &TrialRecord| MoveStats {
            to: past
                .changes
                .iter()
                .map(|change| (change.knob.path().to_owned(), change.to.to_json()))
                .collect(),
            tries: 1.0,
            gain_sum: past.gain.unwrap_or(0.0),
        };
        self.past.iter().map(one).collect()
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

    /// The first `count` proposals that are legal and new, or fewer.
    fn next(&mut self, strategy: &dyn Strategy, trial: u64, count: usize) -> Vec<Asked<'l>> {
        let past = std::mem::take(&mut self.played.past);
        let incumbent = self.incumbent;
        let question = Question { trial, incumbent: &incumbent, past: &past };
        let mut found = Vec::new();
        for (_, config) in strategy.ask(&question).take(DRAWS_MAX) {
            if found.len() == count {
                break;
            }
            if !self.drawn.insert(config.id()) {
                continue;
            }
            match self.land.at(&config) {
                Found::Illegal => self.played.rejected += 1,
                Found::Outside | Found::Unrecorded => self.played.unknown += 1,
                Found::Failed(point) if self.tried.insert(point) => found.push((config, None)),
                Found::Timed(point, us, blocks) if self.tried.insert(point) => {
                    found.push((config, Some((us, blocks))));
                }
                Found::Failed(_) | Found::Timed(..) => {} // another schedule of a program that was tried
            }
        }
        self.played.past = past;
        found
    }

    /// Runs one bracket; returns the number of blocks that it measured.
    fn halve(&mut self, asked: Vec<Asked<'l>>, full: usize) -> usize {
        let mut left: Vec<(Asked<'l>, Vec<f64>)> = Vec::new();
        for (config, timed) in asked {
            let mut blocks = timed.map_or(Vec::new(), |(_, blocks)| blocks.to_vec());
            blocks.shuffle(&mut self.rng);
            left.push(((config, timed), blocks));
        }
        let (mut spent, mut blocks) = (0, 0);
        loop {
            let more = blocks.max(1).min(full - blocks);
            (spent, blocks) = (spent + more * left.len(), blocks + more);
            let seen = |all: &[f64]| match all.is_empty() {
                true => f64::INFINITY,
                false => median(&all[..blocks.min(all.len())]),
            };
            left.sort_by(|(_, a), (_, b)| seen(a).total_cmp(&seen(b)));
            if left.len() == 1 || blocks >= full {
                break;
            }
            for ((config, timed), all) in left.split_off(left.len().div_ceil(2)) {
                // Eliminated: its apparent gain counts as not enough.
                let gain = timed.map(|_| (1.0 - seen(&all) / self.us).min(self.min_gain));
                self.end(config, timed, gain);
            }
        }
        if let Some((best, _)) = left.into_iter().next() {
            self.judge(best);
        }
        spent
    }

    /// Ends a trial: keeps or reverts.
    fn judge(&mut self, (config, timed): Asked<'l>) {
        let gain = timed.map(|(_, blocks)| {
            1.0 - resampled(blocks, &mut self.rng) / resampled(self.blocks, &mut self.rng)
        });
        self.end(config, timed, gain);
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
        if let Some(asked) = game.next(strategy, trial, 1).pop() {
            game.judge(asked);
        }
        game.played.best_us.push(game.us);
    }
    Some(game.played)
}

/// Simulates a search by successive halving of the measurements: the strategy fills a bracket of candidates; each is
/// measured for one block, the better half for one more, and so on; the last one is judged. A trial counts as many
/// blocks as the measured grid has per point.
pub(super) fn play_halving(
    land: &MeasuredGrid,
    strategy: &dyn Strategy,
    trials: u64,
    min_gain: f64,
    seed: u64,
) -> Option<Played> {
    let mut game = Game::new(land, min_gain, seed)?;
    let (mut spent, mut bracket) = (0_usize, 0);
    let full = match land.at(land.start()) {
        Found::Timed(_, _, blocks) => blocks.len(),
        Found::Outside | Found::Illegal | Found::Unrecorded | Found::Failed(_) => return None,
    };
    while spent < full * (trials as usize - 1) {
        bracket += 1;
        let left = game.next(strategy, bracket, BRACKET);
        if left.is_empty() {
            break;
        }
        spent += game.halve(left, full);
        let until = (1 + spent / full.max(1)).min(trials as usize);
        let last = game.played.best_us.last().copied().unwrap_or(game.us);
        game.played.best_us.resize(until.saturating_sub(1).max(1), last);
        game.played.best_us.push(game.us);
    }
    game.played.best_us.resize(trials as usize, game.us);
    Some(game.played)
}

/// The space of strategies on a measured grid, with the sweep of a search of `trials` trials.
pub(super) fn search_space(land: &MeasuredGrid, seed: u64, trials: u64) -> SearchSpace {
    let sweep = search::Budget::Trials(trials).explore();
    SearchSpace { space: land.space().axes().to_vec(), seed, sweep }
}
