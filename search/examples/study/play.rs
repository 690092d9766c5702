//! Searches on a recorded measured grid: what a strategy would have done, trial by trial, by the loop's own rule of keep and revert. What a trial
//! sees is not the recorded median but the median of as many blocks drawn from the recorded ones, anew for each trial and both sides, so that
//! searches of several seeds meet the noise of the card; what they are judged by is the recorded median.

use std::collections::BTreeSet;

use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};
use search::strategy::{MoveStats, Question, SearchSpace, Strategy};
use search::{TrialRecord, TrialRecords, changes, generator, median};

use tests::measured_grid::{Found, MeasuredGrid};

/// Draws for one trial before a search counts as exhausted.
const DRAWS_MAX: usize = 20_000;

/// Which numbers the noise is drawn with.
const NOISE_STREAM: u64 = u64::MAX - 2;

/// Candidates of a bracket of successive halving.
const BRACKET: usize = 16;

/// A search that was played.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Played {
    /// Microseconds of the schedule that leads, after each trial, the baseline's first.
    pub(super) best_us: Vec<f64>,
    /// Proposals that broke rules.
    pub(super) rejected: u64,
    /// Proposals that the measured grid has no answer for: outside its grid, or not recorded.
    pub(super) unknown: u64,
    /// The trials after the baseline.
    pub(super) past: TrialRecords,
}

impl Played {
    /// What a store would know of these moves.
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

/// A proposal with its time and the blocks that say so; without them if it failed.
type Asked<'l> = (ir::ScheduleConfig, Option<Timed<'l>>);

/// The recorded median, and the blocks that it is of.
type Timed<'l> = (f64, &'l [f64]);

/// A search under way.
struct Game<'l> {
    land: &'l MeasuredGrid,
    incumbent: ir::ScheduleConfig,
    /// The recorded median and the blocks of the schedule that leads.
    us: f64,
    blocks: &'l [f64],
    /// Its score, as trials saw it.
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

    /// The first proposals that are legal and new, at most so many.
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

    /// One bracket: returns the blocks that it took.
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
                // Given up: whatever it seemed to gain is not enough.
                let gain = timed.map(|_| (1.0 - seen(&all) / self.us).min(self.min_gain));
                self.end(config, timed, gain);
            }
        }
        if let Some((best, _)) = left.into_iter().next() {
            self.judge(best);
        }
        spent
    }

    /// Ends a trial: keep, or revert.
    fn judge(&mut self, (config, timed): Asked<'l>) {
        let gain = timed.map(|(_, blocks)| {
            1.0 - resampled(blocks, &mut self.rng) / resampled(self.blocks, &mut self.rng)
        });
        self.end(config, timed, gain);
    }

    /// Ends a trial that seemed to gain so much.
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

/// The median of as many blocks, drawn from these.
fn resampled(blocks: &[f64], rng: &mut Xoshiro256PlusPlus) -> f64 {
    let drawn: Vec<f64> = blocks.iter().filter_map(|_| blocks.choose(rng).copied()).collect();
    median(&drawn)
}

/// Plays a search of so many trials, the baseline included. `None` if the measured grid does not know its own start.
pub(super) fn play(
    land: &MeasuredGrid,
    strategy: &dyn Strategy,
    trials: u64,
    min_gain: f64,
    seed: u64,
) -> Option<Played> {
    let mut game = Game::new(land, min_gain, seed)?;
    for trial in 1..trials {
        // Who has nothing left stays where it is.
        if let Some(asked) = game.next(strategy, trial, 1).pop() {
            game.judge(asked);
        }
        game.played.best_us.push(game.us);
    }
    Some(game.played)
}

/// Plays a search by successive halving on measuring: the strategy fills a bracket of candidates, each is measured for one block, the better
/// half for one more, and so on; the last one is judged. As many blocks are one trial as the measured grid has of a point.
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

/// What strategies draw from on a measured grid, with the sweep that a search of so many trials has.
pub(super) fn search_space(land: &MeasuredGrid, seed: u64, trials: u64) -> SearchSpace {
    let sweep = search::Budget::Trials(trials).explore();
    SearchSpace { space: land.space().axes().to_vec(), seed, sweep }
}
