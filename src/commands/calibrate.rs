//! `amk calibrate`: compares the cost model with measured grids, and fits its rates to them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ir::Target;
use lower::{RateFile, Rates};
use search::calibrate::{Calibration, Case, Changes, Point, fit, points, split};
use search::checks::{Checks, Past};
use serde_json::{Value, json};

use crate::cli::CalibrateArgs;
use crate::failure::{Exit, Failure, Outcome};
use crate::spinner::Spinner;
use crate::{files, report};

/// The least rank correlation at which predictions are good enough to rank schedules.
const RANK_MIN: f64 = 0.8;

const ROWS_BYTES_MAX: u64 = 1 << 30;

const RATES_BYTES_MAX: u64 = 1 << 20;

pub(crate) fn run(args: &CalibrateArgs) -> Outcome {
    let (mut cases, mut changes, mut cards) = (Vec::new(), Vec::new(), BTreeSet::new());
    let checks = args.checks.as_ref().map_or(Ok(Checks::default()), |path| checks(path))?;
    let working = Spinner::through(args.grids.len(), "lowering points of grids");
    for path in &args.grids {
        let read = read(path, args.rows as usize, &checks)?;
        cases.extend(read.cases);
        changes.extend(read.changes);
        cards.insert(read.card);
        working.done();
    }
    drop(working);
    let other = cases.iter().filter(|case| !case.same_program).count();
    if other > 0 {
        report::say(&format!("note: {other} rows lower to another program than the one measured"));
    }
    let mut rates = match &args.rates {
        Some(path) => files::read_json::<RateFile>(path, RATES_BYTES_MAX)?.rates,
        None => *Rates::shipped(),
    };
    let mut tables = Vec::new();
    if let Some(path) = &args.fit {
        let (fitted, held) = split(cases);
        let before = [
            table("before, fitted rows", &fitted, &rates),
            table("before, held out", &held, &rates),
        ];
        tables.extend(before);
        let _working = Spinner::on("fitting rates");
        rates = fit(&fitted, &changes, &rates, |iteration, loss| {
            report::say(&format!("  iteration {iteration}: loss {loss:.6}"));
        });
        tables.push(table("after, fitted rows", &fitted, &rates));
        tables.push(table("after, held out", &held, &rates));
        cases = fitted.into_iter().chain(held).collect();
        write_rates(
            path,
            &rates,
            args,
            (cases.len(), changes.iter().map(Changes::len).sum()),
            cards,
        )?;
    }
    let all = table("all rows", &cases, &rates);
    let holds = all.holds();
    tables.push(all);
    for table in &tables {
        table.say();
    }
    say_changes(&changes, &rates);
    for (index, (name, low, high)) in Rates::TABLE.iter().enumerate() {
        let value = rates.get(index);
        let end = if value <= *low || value >= *high { "  (at its bound)" } else { "" };
        report::say(&format!("  {name:20} {value:.5}{end}"));
    }
    report::document(&json!({
        "schema": "amk.calibrate.v3",
        "grids": args.grids,
        "tables": tables.iter().map(Table::to_json).collect::<Vec<_>>(),
        "rates": rates,
        "rows": rows(&cases, &rates),
        "checks": changes.iter().flat_map(|of| of.lines(&rates)).collect::<Vec<_>>(),
        "other_program": other,
        "rank_correlation_min": RANK_MIN,
        "holds": holds,
    }))?;
    Ok(if holds { Exit::Yes } else { Exit::No })
}

/// Every row with its prediction, to find the ones that are off.
fn rows(cases: &[Case], rates: &Rates) -> Vec<Value> {
    let pairs = cases.iter().zip(points(cases, rates));
    let row = |(case, point): (&Case, Point)| {
        json!({
            "model": case.model,
            "context": case.context,
            "schedule_id": case.config.id(),
            "measured_us": point.measured_us,
            "predicted_us": point.predicted_us,
            "bound_us": point.bound_us,
        })
    };
    pairs.map(row).collect()
}

/// The checks of a file.
fn checks(path: &Path) -> Result<Checks, Failure> {
    let text = files::read_text(path, ROWS_BYTES_MAX)?;
    Checks::read(&text)
        .map_err(|(line, what)| Failure::usage(format!("{} line {line}: {what}", path.display())))
}

/// What a file of points gives.
struct Read {
    cases: Vec<Case>,
    /// The checks of its model.
    changes: Option<Changes>,
    /// What it was measured on.
    card: String,
}

fn read(path: &Path, count: usize, checks: &Checks) -> Result<Read, Failure> {
    let text = files::read_text(path, ROWS_BYTES_MAX)?;
    let at = |what: String| Failure::usage(format!("{} {what}", path.display()));
    let file = search::calibrate::read(&text)
        .map_err(|(line, what)| at(format!("line {line}: {what}")))?;
    let terms = &file.terms;
    let target = Target::by_name(&terms.target).map_err(|error| at(error.to_string()))?;
    let graph = model::load(&terms.model)?.graph;
    let neutral = ir::schedule::neutral_config(&graph, &target);
    let space = terms.grid.space(&neutral).map_err(|error| at(error.to_string()))?;
    let cases = search::calibrate::cases(&file, &space, count, &graph, &target)
        .map_err(|(point, dropped)| at(format!("point {point}: {dropped}")))?;
    let changes = Changes::new(checks, terms, &graph, &target)
        .map_err(|what| at(format!("beside the checks: {what}")))?;
    let card = terms
        .conditions
        .as_ref()
        .map_or_else(String::new, |at| format!("{}, driver {}", at.card, at.driver));
    Ok(Read { cases, changes, card })
}

/// How good the gains that these rates predict are, by model.
fn say_changes(changes: &[Changes], rates: &Rates) {
    for of in changes.iter().filter(|of| !of.is_empty()) {
        let figures = Past::default().judge(&of.predicted(rates), &of.base);
        report::say(&format!("  {}: {}", of.model, figures.say()));
    }
}

/// Writes fitted rates with their origin, rounded to the precision of the fit.
fn write_rates(
    path: &Path,
    rates: &Rates,
    args: &CalibrateArgs,
    (rows, changes): (usize, usize),
    cards: BTreeSet<String>,
) -> Result<(), Failure> {
    let round =
        |rates: Rates, index: usize| rates.with(index, (rates.get(index) * 1e5).round() / 1e5);
    let names: Vec<String> = args.grids.iter().map(|path| path.display().to_string()).collect();
    let cards: Vec<String> = cards.into_iter().collect();
    let checks = if changes > 0 { format!(" and {changes} checks") } else { String::new() };
    let file = RateFile {
        source: format!(
            "amk calibrate --fit on {rows} points of {}{checks}; {}",
            names.join(", "),
            cards.join("; ")
        ),
        rates: (0..Rates::TABLE.len()).fold(*rates, round),
    };
    files::write_json(path, &file)?;
    report::say(&format!("rates: {}", path.display()));
    Ok(())
}

/// The quality of the predictions for some rows, by model.
struct Table {
    title: &'static str,
    rows: Vec<(String, Calibration)>,
}

fn table(title: &'static str, cases: &[Case], rates: &Rates) -> Table {
    let mut groups: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for (case, point) in cases.iter().zip(points(cases, rates)) {
        let group = format!("{} at {}", case.model, case.context);
        groups.entry(group).or_default().push(point);
    }
    let rows = groups.into_iter().map(|(name, points)| (name, Calibration::of(&points))).collect();
    Table { title, rows }
}

impl Table {
    /// Whether every model is ranked well enough and no prediction is below the roofline bound.
    fn holds(&self) -> bool {
        let good = |c: &Calibration| c.rank_correlation >= RANK_MIN && c.below_bound == 0;
        !self.rows.is_empty() && self.rows.iter().all(|(_, calibration)| good(calibration))
    }

    fn say(&self) {
        report::say(&format!("{}: predicted beside measured", self.title));
        for (name, c) in &self.rows {
            report::say(&format!(
                "  {name}: {} rows, rank correlation {:.3}, error {:.1} % median, {:.1} % at nine tenths, bias {:+.1} %, {} below the bound",
                c.rows,
                c.rank_correlation,
                100.0 * c.error_median,
                100.0 * c.error_p90,
                100.0 * c.bias,
                c.below_bound
            ));
        }
    }

    fn to_json(&self) -> Value {
        let rows: BTreeMap<_, _> = self.rows.iter().cloned().collect();
        json!({"title": self.title, "models": rows})
    }
}
