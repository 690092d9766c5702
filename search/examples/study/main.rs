//! Compares strategies on recorded measured grids and writes the results into docs/lab/search-study.md, with a chart
//! beside it: `cargo run --release -p search --example study -- corpus/grids/*.jsonl --out docs/lab`.
//!
//! Every figure follows from the files and the seeds: the same command gives the same bytes.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ::tests::measured_grid::{Found, MeasuredGrid};
use ir::Target;
use ir::program::GraphShape;
use rayon::prelude::*;
use search::strategy::{CostModel, Known, KnownRun, StrategyName, strategy, weight};

mod charts;
mod play;
#[cfg(test)]
mod tests;

use play::{Played, play, search_space};

/// Number of searches of each strategy on each measured grid.
const SEEDS: u64 = 100;

/// Trials of a search.
const TRIALS: u64 = 64;

/// Budgets that strategies are compared at.
const BUDGETS: [u64; 3] = [16, 32, TRIALS];

/// Seeds of the searches that fill the store. They differ from the seeds of the compared searches.
const EARLIER: Range<u64> = 1000..1005;

/// The least gain worth keeping, as in a measured search.
const MIN_GAIN: f64 = 0.01;

/// Regret up to which a schedule counts as near the best point.
const NEAR: f64 = 0.01;

/// The regret of a search after each trial, and that of the winner of the race at its end.
struct Ended {
    kept: Vec<f64>,
    raced: f64,
}

/// The searches, by measured grid and seed.
type Paths = Vec<Vec<Ended>>;

/// A measured grid with the cost model of its graph.
struct Land {
    grid: MeasuredGrid,
    dims: GraphShape,
    model: Arc<CostModel>,
}

impl std::ops::Deref for Land {
    type Target = MeasuredGrid;

    fn deref(&self) -> &MeasuredGrid {
        &self.grid
    }
}

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
    let lands: Vec<Land> = files.map(|file| read(Path::new(file))).collect();
    assert!(!lands.is_empty(), "name the files of measured grids");
    let mut lines: Vec<Line> = ALONE.iter().map(|name| alone(&lands, *name, 0..SEEDS)).collect();
    lines.push(line("residual, no cost model", &lands, 0..SEEDS, |_, land, seed, trials| {
        let space = search_space(land, seed, trials);
        let strategy = strategy(StrategyName::Residual, space, Known::default());
        play(land, &*strategy, trials, MIN_GAIN, seed)
    }));
    let first = EARLIER.start..EARLIER.start + 1;
    lines.push(with_store(&lands, "residual, store of 1 search each", first, 0..SEEDS));
    lines.push(with_store(&lands, "residual, store of 5 searches each", EARLIER, 0..SEEDS));
    let text = report(&lands, &lines);
    match out {
        None => println!("{text}"),
        Some(folder) => {
            let folder = Path::new(&folder);
            insert(&folder.join("search-study.md"), &text);
            charts::draw(&folder.join("search-regret.svg"), &lands, &lines);
        }
    }
}

/// Strategies without knowledge from other searches.
const ALONE: [StrategyName; 3] =
    [StrategyName::Random, StrategyName::HillClimb, StrategyName::Residual];

fn read(path: &Path) -> Land {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let first = text.lines().next().unwrap_or_default();
    let terms: search::measured_grid::Terms =
        serde_json::from_str(first).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let graph = model::preset(&terms.model).expect("measured grids are of presets").graph;
    let target = Target::by_name(&terms.target).expect("a target of the table");
    let neutral = ir::schedule::neutral_config(&graph, &target);
    let grid =
        MeasuredGrid::read(&text, &neutral).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    // Rates that have not seen this grid.
    let rates = path.with_file_name(format!("without-{}.rates.json", terms.model));
    let text =
        std::fs::read_to_string(&rates).unwrap_or_else(|e| panic!("{}: {e}", rates.display()));
    let file: lower::RateFile =
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", rates.display()));
    let model = CostModel::new(&graph, &target, terms.kv_capacity, &[terms.context], &file.rates);
    Land { grid, dims: GraphShape::from(&graph), model: Arc::new(model) }
}

fn ended(land: &MeasuredGrid, played: &Played) -> Ended {
    let (_, best) = land.best().expect("some point was timed");
    let kept = played.best_us.iter().map(|us| us / best - 1.0).collect();
    Ended { kept, raced: played.raced_us / best - 1.0 }
}

/// Runs a search method on every measured grid with every seed and budget. `play` takes the grid's index, the grid, the
/// seed and the budget.
fn line(
    name: &str,
    lands: &[Land],
    seeds: Range<u64>,
    play: impl Fn(usize, &Land, u64, u64) -> Option<Played> + Sync,
) -> Line {
    let of = |trials: u64| {
        let one = |(index, land): (usize, &Land)| {
            let played = |seed| play(index, land, seed, trials).expect("the start was timed");
            seeds.clone().into_par_iter().map(|seed| ended(land, &played(seed))).collect()
        };
        lands.iter().enumerate().map(one).collect()
    };
    Line { name: name.to_owned(), paths: BUDGETS.map(of) }
}

fn alone(lands: &[Land], name: StrategyName, seeds: Range<u64>) -> Line {
    line(name.name(), lands, seeds, |_, land, seed, trials| {
        let known = Known { predictions: Some(land.model.clone()), runs: Vec::new() };
        let strategy = strategy(name, search_space(land, seed, trials), known);
        play(land, &*strategy, trials, MIN_GAIN, seed)
    })
}

/// Searches with a store that `earlier` searches of each other model filled, and none of the model itself.
fn with_store(lands: &[Land], name: &str, earlier: Range<u64>, seeds: Range<u64>) -> Line {
    let runs: Vec<Vec<KnownRun>> =
        (0..lands.len()).map(|held_out| others(lands, held_out, earlier.clone())).collect();
    line(name, lands, seeds, |index, land, seed, trials| {
        let known = Known { predictions: Some(land.model.clone()), runs: runs[index].clone() };
        let space = search_space(land, seed, trials);
        let strategy = strategy(StrategyName::Residual, space, known);
        play(land, &*strategy, trials, MIN_GAIN, seed)
    })
}

/// What searches of the other models would have left in a store.
fn others(lands: &[Land], held_out: usize, seeds: Range<u64>) -> Vec<KnownRun> {
    let mut runs = Vec::new();
    for (_, land) in lands.iter().enumerate().filter(|(index, _)| *index != held_out) {
        // The searches of one graph count together as one.
        let count = (seeds.end - seeds.start) as f64;
        let weight = weight(true, &lands[held_out].dims, &land.dims) / count;
        for seed in seeds.clone() {
            let known = Known { predictions: Some(land.model.clone()), runs: Vec::new() };
            let space = search_space(land, seed, TRIALS);
            let strategy = strategy(StrategyName::Residual, space, known);
            let played = play(land, &*strategy, TRIALS, MIN_GAIN, seed);
            let played = played.expect("the start was timed");
            runs.push(played.known(land, &*land.model, weight));
        }
    }
    runs
}

/// Searches of a measured grid with a budget.
fn searches(line: &Line, land: usize, trials: u64) -> &[Ended] {
    let budget = BUDGETS.iter().position(|&budget| budget == trials).expect("one of the budgets");
    &line.paths[budget][land]
}

/// Final regrets of all searches of a measured grid and a budget, sorted: of the incumbent, or of the race's winner.
fn after(line: &Line, land: usize, trials: u64, raced: bool) -> Vec<f64> {
    let end = |path: &Ended| if raced { Some(path.raced) } else { path.kept.last().copied() };
    let mut all: Vec<f64> = searches(line, land, trials).iter().filter_map(end).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn mean(all: &[f64]) -> f64 {
    all.iter().sum::<f64>() / all.len().max(1) as f64
}

/// Median, nine tenths and worst of sorted values.
fn spread(sorted: &[f64]) -> [f64; 3] {
    let at = |share: f64| {
        let index = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    };
    [at(0.5), at(0.9), at(1.0)]
}

/// Mean of the final regret over measured grids and budgets: the result of a search is its final schedule.
fn ends(line: &Line) -> f64 {
    let lands = 0..line.whole().len();
    let all: Vec<f64> = lands
        .flat_map(|land| BUDGETS.map(|trials| mean(&after(line, land, trials, false))))
        .collect();
    mean(&all)
}

/// Trials that the longest searches took to come near the best point, sorted; one more than all for the others.
fn arrivals(line: &Line, land: usize) -> Vec<f64> {
    let first = |path: &Ended| path.kept.iter().position(|regret| *regret <= NEAR);
    let trials = |path| first(path).map_or(TRIALS as f64 + 1.0, |trial| trial as f64 + 1.0);
    let mut all: Vec<f64> = line.whole()[land].iter().map(trials).collect();
    all.sort_by(f64::total_cmp);
    all
}

fn report(lands: &[Land], lines: &[Line]) -> String {
    let mut out = String::new();
    grounds(&mut out, lands);
    table(&mut out, lands, lines, false);
    table(&mut out, lands, lines, true);
    near(&mut out, lands, lines);
    let mut best: Vec<(f64, &str)> =
        lines[..ALONE.len()].iter().map(|line| (ends(line), line.name.as_str())).collect();
    // Of equal strategies the simpler one wins, which comes first.
    best.sort_by(|a, b| a.0.total_cmp(&b.0));
    let order: Vec<String> =
        best.iter().map(|(end, name)| format!("{name} {:.2}%", 100.0 * end)).collect();
    let _ = writeln!(
        out,
        "\n**Order**, by the mean regret of the incumbents of searches of 16, 32 and 64 trials on all measured grids,\nwithout a store: {}.\n",
        order.join(", ")
    );
    out
}

fn grounds(out: &mut String, lands: &[Land]) {
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

fn table(out: &mut String, lands: &[Land], lines: &[Line], raced: bool) {
    let of = if raced {
        "the winner of the race of the five best, run after the last trial"
    } else {
        "the incumbent (least gain 1%)"
    };
    let _ = writeln!(
        out,
        "\nRegret in per cent of {of}:\nmedian / nine tenths / worst of {SEEDS} searches by budget.\n"
    );
    out.push_str(
        "| strategy | measured grid | 16 trials | 32 trials | 64 trials |\n|---|---|---|---|---|\n",
    );
    for line in lines {
        for (index, land) in lands.iter().enumerate() {
            let cells = BUDGETS.map(|trials| {
                let all = spread(&after(line, index, trials, raced));
                all.map(|regret| format!("{:.2}", 100.0 * regret)).join(" / ")
            });
            let _ =
                writeln!(out, "| {} | {} | {} |", line.name, land.terms.model, cells.join(" | "));
        }
    }
}

fn near(out: &mut String, lands: &[Land], lines: &[Line]) {
    let _ = writeln!(
        out,
        "\nTrials until the incumbent is within {:.0}% of the best point, in searches of {TRIALS}: median / nine tenths / worst\n({} = never).\n",
        100.0 * NEAR,
        TRIALS + 1
    );
    let models: Vec<&str> = lands.iter().map(|land| land.terms.model.as_str()).collect();
    let _ =
        writeln!(out, "| strategy | {} |\n|---{}|", models.join(" | "), "|---".repeat(lands.len()));
    for line in lines {
        let cell = |land| spread(&arrivals(line, land)).map(|n| n.to_string()).join(" / ");
        let cells: Vec<String> = (0..lands.len()).map(cell).collect();
        let _ = writeln!(out, "| {} | {} |", line.name, cells.join(" | "));
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
