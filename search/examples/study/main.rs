//! Compares strategies on recorded measured grids and writes the results into docs/explanation/search.md, with a chart
//! beside it: `cargo run --release -p search --example study -- corpus/grids/*.jsonl --out docs`.
//!
//! Every figure follows from the files and the seeds: the same command gives the same bytes.

use std::fmt::Write;
use std::path::Path;

use ::tests::measured_grid::{Found, MeasuredGrid};
use ir::Target;
use rayon::prelude::*;
use search::median;
use search::strategy::{PriorMove, StrategyName, rank, strategy};

mod charts;
mod play;
#[cfg(test)]
mod tests;

use play::{Played, play, play_halving, search_space};

/// Number of searches of each strategy on each measured grid.
const SEEDS: u64 = 20;

/// Trials of a search.
const TRIALS: u64 = 64;

/// Budgets that strategies are compared at.
const BUDGETS: [u64; 3] = [16, 32, TRIALS];

/// Trials of a search with a store of earlier results.
const SHORT: u64 = 16;

/// Seeds of the searches that fill the store. They differ from the seeds of the compared searches.
const EARLIER: std::ops::Range<u64> = 1000..1005;

/// The least gain worth keeping, as in a measured search.
const MIN_GAIN: f64 = 0.01;

/// Regret up to which a schedule counts as near the best point.
const NEAR: f64 = 0.02;

/// The regret of each search after each trial, by measured grid and seed.
type Paths = Vec<Vec<Vec<f64>>>;

/// A search method, with its searches of each budget in [`BUDGETS`]. A short search is not a prefix of a long one,
/// since it plans for its length.
struct Line {
    name: String,
    paths: [Paths; 3],
}

impl Line {
    /// The longest searches.
    fn whole(&self) -> &Paths {
        &self.paths[BUDGETS.len() - 1]
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let out = args.iter().position(|arg| arg == "--out").map(|at| args[at + 1].clone());
    let files = args.iter().take_while(|arg| *arg != "--out");
    let lands: Vec<MeasuredGrid> = files.map(|file| read(Path::new(file))).collect();
    assert!(!lands.is_empty(), "name the files of measured grids");
    let mut lines: Vec<Line> = ALONE.iter().map(|name| alone(&lands, *name)).collect();
    lines.push(halving(&lands));
    let learned = |seeds: std::ops::Range<u64>| -> Vec<Vec<PriorMove>> {
        (0..lands.len()).map(|land| others(&lands, land, seeds.clone())).collect()
    };
    let known = learned(EARLIER);
    let first = EARLIER.start..EARLIER.start + 1;
    let once = with_prior(&lands, &learned(first));
    lines.push(with_prior(&lands, &known));
    let text = report(&lands, &lines, &once, &known);
    match out {
        None => println!("{text}"),
        Some(folder) => {
            let folder = Path::new(&folder);
            insert(&folder.join("search.md"), &text);
            charts::draw(&folder.join("search-regret.svg"), &lands, &lines);
        }
    }
}

/// Strategies without knowledge from other searches.
const ALONE: [StrategyName; 3] = [StrategyName::Random, StrategyName::HillClimb, StrategyName::Tpe];

fn read(path: &Path) -> MeasuredGrid {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let first = text.lines().next().unwrap_or_default();
    let terms: search::measured_grid::Terms =
        serde_json::from_str(first).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let graph = model::preset(&terms.model).expect("measured grids are of presets").graph;
    let target = Target::by_name(&terms.target).expect("a target of the table");
    let neutral = ir::schedule::neutral_config(&graph, &target);
    MeasuredGrid::read(&text, &neutral).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn regrets(land: &MeasuredGrid, played: &Played) -> Vec<f64> {
    let (_, best) = land.best().expect("some point was timed");
    played.best_us.iter().map(|us| us / best - 1.0).collect()
}

/// Runs a search method on every measured grid with every seed and budget. `play` takes the grid's index, the grid, the
/// seed and the budget.
fn line(
    name: &str,
    lands: &[MeasuredGrid],
    play: impl Fn(usize, &MeasuredGrid, u64, u64) -> Option<Played> + Sync,
) -> Line {
    let of = |trials: u64| {
        let one = |(index, land): (usize, &MeasuredGrid)| {
            let played = |seed| play(index, land, seed, trials).expect("the start was timed");
            (0..SEEDS).into_par_iter().map(|seed| regrets(land, &played(seed))).collect()
        };
        lands.iter().enumerate().map(one).collect()
    };
    Line { name: name.to_owned(), paths: BUDGETS.map(of) }
}

fn alone(lands: &[MeasuredGrid], name: StrategyName) -> Line {
    line(name.name(), lands, |_, land, seed, trials| {
        let strategy = strategy(name, search_space(land, seed, trials), Vec::new());
        play(land, &*strategy, trials, MIN_GAIN, seed)
    })
}

fn halving(lands: &[MeasuredGrid]) -> Line {
    line("halving (hill-climb)", lands, |_, land, seed, trials| {
        let hill_climb =
            strategy(StrategyName::HillClimb, search_space(land, seed, trials), Vec::new());
        play_halving(land, &*hill_climb, trials, MIN_GAIN, seed)
    })
}

fn with_prior(lands: &[MeasuredGrid], known: &[Vec<PriorMove>]) -> Line {
    line("prior", lands, |index, land, seed, trials| {
        let known = known[index].clone();
        let strategy = strategy(StrategyName::Prior, search_space(land, seed, trials), known);
        play(land, &*strategy, trials, MIN_GAIN, seed)
    })
}

/// The moves that searches of the other models would have left in a store.
fn others(lands: &[MeasuredGrid], held_out: usize, seeds: std::ops::Range<u64>) -> Vec<PriorMove> {
    let mut seen = Vec::new();
    for (_, land) in lands.iter().enumerate().filter(|(index, _)| *index != held_out) {
        for seed in seeds.clone() {
            let hill_climb =
                strategy(StrategyName::HillClimb, search_space(land, seed, TRIALS), Vec::new());
            let played =
                play(land, &*hill_climb, TRIALS, MIN_GAIN, seed).expect("the start was timed");
            seen.extend(played.seen());
        }
    }
    rank(seen)
}

/// Final regrets of all searches of a measured grid and a budget, sorted.
fn after(line: &Line, land: usize, trials: u64) -> Vec<f64> {
    let budget = BUDGETS.iter().position(|&budget| budget == trials).expect("one of the budgets");
    let paths = &line.paths[budget][land];
    let mut all: Vec<f64> = paths.iter().filter_map(|path| path.last().copied()).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

/// Mean of the final regret over measured grids and budgets: the result of a search is its final schedule.
fn ends(line: &Line) -> f64 {
    let lands = 0..line.whole().len();
    let all: Vec<f64> =
        lands.flat_map(|land| BUDGETS.map(|trials| mean(&after(line, land, trials)))).collect();
    mean(&all)
}

/// Number of searches that came near the best point, and the median of the trials that they needed.
fn arrivals(line: &Line, land: usize) -> (usize, Option<f64>) {
    let first = |path: &Vec<f64>| path.iter().position(|regret| *regret <= NEAR);
    let trials: Vec<f64> =
        line.whole()[land].iter().filter_map(first).map(|trial| trial as f64 + 1.0).collect();
    (trials.len(), (!trials.is_empty()).then(|| median(&trials)))
}

fn report(lands: &[MeasuredGrid], lines: &[Line], once: &Line, known: &[Vec<PriorMove>]) -> String {
    let mut out = String::new();
    grounds(&mut out, lands);
    table(&mut out, lands, lines);
    let mut best: Vec<(f64, &str)> =
        lines[..ALONE.len()].iter().map(|line| (ends(line), line.name.as_str())).collect();
    // Of equal strategies the simpler one wins, which comes first.
    best.sort_by(|a, b| a.0.total_cmp(&b.0));
    let order: Vec<String> =
        best.iter().map(|(end, name)| format!("{name} {:.2} %", 100.0 * end)).collect();
    let _ = writeln!(
        out,
        "\n**Chosen: `{}`**, by the mean of the regrets of searches of 16, 32 and 64 trials on all measured grids, among those that the loop offers and that need no store: {}.\n",
        best[0].1,
        order.join(", ")
    );
    held_out(&mut out, lands, lines, once, known);
    out
}

fn grounds(out: &mut String, lands: &[MeasuredGrid]) {
    out.push_str("| measured grid | card | points measured | illegal | failed | not recorded | start us | best us | neutral schedule again |\n|---|---|---|---|---|---|---|---|---|\n");
    for land in lands {
        let [timed, twins, failed, illegal, missing] = land.counts();
        let (_, best) = land.best().expect("some point was timed");
        let Found::Timed(_, start, _) = land.at(land.start()) else {
            panic!("the start of {} was not timed", land.terms.model);
        };
        let card = land.terms.conditions.as_ref().map_or("predicted", |c| c.card.as_str());
        let least = land.again_us.iter().copied().fold(f64::INFINITY, f64::min);
        let most = land.again_us.iter().copied().fold(0.0, f64::max);
        let _ = writeln!(
            out,
            "| {} at {} | {card} | {} | {illegal} | {failed} | {missing} | {start:.1} | {best:.1} | {} times, {least:.1} to {most:.1} us |",
            land.terms.model,
            land.terms.context,
            timed + twins,
            land.again_us.len(),
        );
    }
    out.push('\n');
}

fn table(out: &mut String, lands: &[MeasuredGrid], lines: &[Line]) {
    let _ = writeln!(
        out,
        "Regret: how much slower the schedule that leads is than the best point, per cent; mean of {SEEDS} searches of 16, of 32 and of {TRIALS} trials; of the longest also the worst, how many came within {:.0} % and the median of the trials that it took those.\n",
        100.0 * NEAR
    );
    out.push_str("| strategy | measured grid | 16 | 32 | 64 | worst | near | trials |\n|---|---|---|---|---|---|---|---|\n");
    for line in lines {
        for (index, land) in lands.iter().enumerate() {
            let [short, half, whole] =
                BUDGETS.map(|trials| 100.0 * mean(&after(line, index, trials)));
            let worst = 100.0 * after(line, index, TRIALS).last().copied().unwrap_or(f64::NAN);
            let (count, trials) = arrivals(line, index);
            let trials = trials.map_or_else(|| "-".to_owned(), |trials| format!("{trials:.0}"));
            let _ = writeln!(
                out,
                "| {} | {} | {short:.2} | {half:.2} | {whole:.2} | {worst:.2} | {count} of {SEEDS} | {trials} |",
                line.name, land.terms.model
            );
        }
    }
}

fn held_out(
    out: &mut String,
    lands: &[MeasuredGrid],
    lines: &[Line],
    once: &Line,
    known: &[Vec<PriorMove>],
) {
    let named = |name| lines.iter().find(|line| line.name == name).expect("it is played");
    let (hill_climb, prior) = (named("hill-climb"), named("prior"));
    let _ = writeln!(
        out,
        "**Held out.** The store of each row holds what {} searches of {TRIALS} trials (`hill_climb`) found on each of the other models, and nothing of this one; in the column beside it, one search each. Regret in per cent, mean and worst of {SEEDS} seeds.\n",
        EARLIER.end - EARLIER.start
    );
    out.push_str("| held out | moves known | full store, 16 trials | of one search each | empty store, 16 trials | empty store, 64 trials |\n|---|---|---|---|---|---|\n");
    for (index, land) in lands.iter().enumerate() {
        let cell = |line: &Line, trials| {
            let all = after(line, index, trials);
            let worst = all.last().copied().unwrap_or(f64::NAN);
            format!("{:.2} (worst {:.2})", 100.0 * mean(&all), 100.0 * worst)
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} |",
            land.terms.model,
            known[index].len(),
            cell(prior, SHORT),
            cell(once, SHORT),
            cell(hill_climb, SHORT),
            cell(hill_climb, TRIALS)
        );
    }
}

/// Replaces the text between the marks of a page.
fn insert(path: &Path, text: &str) {
    let page = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (begin, end) = ("<!-- study:begin -->\n", "<!-- study:end -->");
    let (head, rest) = page.split_once(begin).expect("the page has a place for the study");
    let (_, tail) = rest.split_once(end).expect("that place has an end");
    let page = format!("{head}{begin}{text}{end}{tail}");
    std::fs::write(path, page).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
