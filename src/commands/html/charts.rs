//! The charts, as SVG inside the page. Ink and grid take the page's colours, so that they follow light and dark; no text here comes from
//! a ledger.

use std::ops::Range;

use maud::{Markup, PreEscaped, html};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use search::{Outcome, Trial};

use super::Run;
use super::effects::gain_of;

/// Points of a chart, leaders excepted; a page with ten thousand trials stays small.
const POINTS_MAX: usize = 1500;

/// Trials whose intervals are drawn, leaders excepted.
const INTERVALS_MAX: usize = 240;

/// How far above the baseline the progress chart extends, as a fraction of the distance from the bound to the baseline.
const HEADROOM: f64 = 0.35;

const WIDTH: u32 = 860;

/// Placeholder colours, which are replaced by those of the page's style sheet.
const INK: RGBColor = RGBColor(1, 2, 3);
const GRID: RGBColor = RGBColor(4, 5, 6);
const KEPT: RGBColor = RGBColor(7, 8, 9);
const REVERTED: RGBColor = RGBColor(10, 11, 12);
const UNCLEAR: RGBColor = RGBColor(13, 14, 15);
const BOUND: RGBColor = RGBColor(16, 17, 18);

const COLOURS: [(&str, &str); 6] = [
    ("#010203", "var(--ink)"),
    ("#040506", "var(--grid)"),
    ("#070809", "var(--kept)"),
    ("#0A0B0C", "var(--reverted)"),
    ("#0D0E0F", "var(--unclear)"),
    ("#101112", "var(--bound)"),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A chart and the note below it.
pub(super) struct Chart {
    pub(super) drawing: Markup,
    /// What was left out.
    pub(super) note: Option<String>,
}

fn draw(height: u32, label: &str, body: impl FnOnce(&Area<'_>) -> Drawn) -> Markup {
    let mut svg = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        body(&area).and_then(|()| area.present().map_err(Into::into))
    };
    if let Err(error) = drawn {
        return html! { p { "this chart cannot be drawn: " (error) } };
    }
    for (stand_in, colour) in COLOURS {
        svg = svg.replace(stand_in, colour);
    }
    PreEscaped(svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{label}\" "), 1))
}

fn label() -> TextStyle<'static> {
    ("sans-serif", 14).into_font().color(&INK)
}

/// The vertical axis of a chart; the horizontal one has the trials.
struct YAxis<'a> {
    words: &'a str,
    label: &'a dyn Fn(&f64) -> String,
}

type Framed<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn framed<'a, 'b>(
    area: &'a Area<'b>,
    last: f64,
    y: Range<f64>,
    axis: &YAxis<'_>,
) -> Result<Framed<'a, 'b>, Box<dyn std::error::Error>> {
    let mut builder = ChartBuilder::on(area);
    let sized = builder.margin(12).x_label_area_size(44).y_label_area_size(70);
    let mut chart = sized.build_cartesian_2d(-0.01 * last..1.02 * last, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(INK)
        .label_style(label())
        .axis_desc_style(label())
        .x_labels(9)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .x_desc("trial")
        .y_labels(8)
        .y_label_formatter(axis.label)
        .y_desc(axis.words);
    mesh.draw()?;
    drop(mesh);
    Ok(chart)
}

/// The line of the leader: constant until another trial leads.
fn steps(leaders: &[(f64, f64, Outcome)], last: f64) -> Vec<(f64, f64)> {
    let mut line: Vec<(f64, f64)> = Vec::new();
    for &(x, y, _) in leaders {
        line.extend(line.last().map(|&(_, before)| (x, before)));
        line.push((x, y));
    }
    line.extend(line.last().map(|&(_, best)| (last, best)));
    line
}

/// The note below a chart that draws only some of the trials.
fn drawn(shown: usize, all: usize) -> Vec<String> {
    let note = format!(
        "{shown} of {all} trials that did not lead are drawn: of each run of neighbours the lowest, the middle and the highest"
    );
    if shown < all { vec![note] } else { Vec::new() }
}

/// Latencies over trials: every trial, those that led, the current leader, and the bound.
pub(super) fn progress(run: &Run) -> Option<Chart> {
    let us = |trial: &Trial| trial.verdict.latency_us;
    type Point = (f64, f64, Outcome);
    let points: Vec<Point> = run
        .trials
        .iter()
        .filter_map(|trial| Some((trial.trial as f64, us(trial)?, trial.outcome)))
        .collect();
    let (leaders, others): (Vec<Point>, Vec<Point>) =
        points.into_iter().partition(|point| point.2.leads());
    let (first, best) = (leaders.first()?.1, leaders.last()?.1);
    let bound = run.champion()?.verdict.bound_us?;
    let shown = thin(&others, POINTS_MAX, |point| point.1);
    // A bound far below everything else would squeeze the rest of the chart.
    let near = bound > 0.4 * best;
    let least = leaders.iter().map(|point| point.1).fold(f64::MAX, f64::min);
    let bottom = if near { 0.96 * bound } else { least - 0.25 * (first - least).max(0.1 * least) };
    let top = first + HEADROOM * (first - bottom);
    let above = others.iter().filter(|point| point.1 > top).count();
    let last = run.trials.last()?.trial.max(1) as f64;
    let drawing = draw(380, "Latency of every trial", |area| {
        let y_axis = YAxis {
            words: &format!("{} latency, us per token", run.kind()),
            label: &|y| tick(*y, top - bottom),
        };
        let mut chart = framed(area, last, bottom..top, &y_axis)?;
        if near {
            chart.draw_series(LineSeries::new(
                [(0.0, bound), (last, bound)],
                BOUND.stroke_width(2),
            ))?;
        }
        for (x, y, outcome) in &shown {
            let colour = if *outcome == Outcome::Inconclusive { UNCLEAR } else { REVERTED };
            if *y > top {
                chart.draw_series([TriangleMarker::new(
                    (*x, top - 0.012 * (top - bottom)),
                    4,
                    colour,
                )])?;
            } else {
                chart.draw_series([Circle::new((*x, *y), 2, colour.filled())])?;
            }
        }
        chart.draw_series(LineSeries::new(steps(&leaders, last), KEPT.stroke_width(2)))?;
        chart.draw_series(leaders.iter().map(|p| Circle::new((p.0, p.1), 4, KEPT.filled())))?;
        Ok(())
    });
    let mut notes = drawn(shown.len(), others.len());
    if above > 0 {
        notes.push(format!("above the chart, as triangles at its edge: {above}"));
    }
    if !near {
        notes.push(format!("the bound, {} us, lies far below the chart", figure(bound)));
    }
    Some(Chart { drawing, note: (!notes.is_empty()).then(|| notes.join("; ")) })
}

pub(super) fn gains(run: &Run) -> Option<Chart> {
    type Gained = (f64, [f64; 3], Outcome);
    let gained = |trial: &Trial| -> Option<Gained> {
        let (middle, gain) = (gain_of(trial)?, trial.gain?);
        Some((trial.trial as f64, [100.0 * gain.low, middle, 100.0 * gain.high], trial.outcome))
    };
    let all: Vec<Gained> = run.trials.iter().filter_map(gained).collect();
    let (kept, others): (Vec<Gained>, Vec<Gained>) = all.iter().partition(|g| g.2.leads());
    let shown = thin(&others, INTERVALS_MAX, |gained| gained.1[1]);
    let highest = kept.iter().map(|gained| gained.1[2]).fold(1.0, f64::max);
    let (bottom, top) = (-1.2 * highest.max(5.0), 1.15 * highest);
    let below = others.iter().filter(|gained| gained.1[1] < bottom).count();
    if all.is_empty() {
        return None;
    }
    let last = run.trials.last()?.trial.max(1) as f64;
    let drawing = draw(320, "Gain of every trial over the schedule that led", |area| {
        let y_axis =
            YAxis { words: "time saved over the leader", label: &|y| format!("{y:+.0} %") };
        let mut chart = framed(area, last, bottom..top, &y_axis)?;
        chart.draw_series(LineSeries::new([(0.0, 0.0), (last, 0.0)], INK.stroke_width(1)))?;
        for (x, [low, middle, high], outcome) in shown.iter().chain(&kept) {
            let colour = match outcome.leads() {
                true => KEPT,
                false if *outcome == Outcome::Inconclusive => UNCLEAR,
                false => REVERTED,
            };
            let within = |y: f64| y.clamp(bottom, top);
            let line = vec![(*x, within(*low)), (*x, within(*high))];
            if low < high {
                chart.draw_series([PathElement::new(line, colour.stroke_width(2))])?;
            }
            chart.draw_series([Circle::new((*x, within(*middle)), 3, colour.filled())])?;
        }
        Ok(())
    });
    let mut notes = drawn(shown.len(), others.len());
    if below > 0 {
        notes.push(format!("below the chart, drawn at its edge: {below}"));
    }
    if !run.is_measured() {
        notes.push("predictions have no interval".to_owned());
    }
    Some(Chart { drawing, note: (!notes.is_empty()).then(|| notes.join("; ")) })
}

/// A label of an axis with this span: all labels have equally many digits.
fn tick(value: f64, span: f64) -> String {
    let digits = if span >= 20.0 {
        0
    } else if span >= 2.0 {
        1
    } else {
        3
    };
    format!("{:.digits$}", value + 0.0)
}

/// A figure with its significant digits.
pub(super) fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Thins points, which are in order of x, to at most about `most` points of the same shape. The points are split into
/// runs of equal length, and each run keeps its lowest, highest and median point, so that the best, the worst and the
/// bulk remain visible.
fn thin<T: Copy>(points: &[T], most: usize, y: impl Fn(&T) -> f64) -> Vec<T> {
    if points.len() <= most {
        return points.to_vec();
    }
    let length = (3 * points.len()).div_ceil(most.max(3));
    let mut kept = Vec::new();
    for run in points.chunks(length) {
        let mut order: Vec<usize> = (0..run.len()).collect();
        order.sort_by(|&a, &b| y(&run[a]).total_cmp(&y(&run[b])));
        let mut take = vec![order[0], order[order.len() / 2], order[order.len() - 1]];
        take.sort_unstable();
        take.dedup();
        kept.extend(take.into_iter().map(|index| run[index]));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_stay_and_of_many_the_extremes_do() {
        let points: Vec<(u64, f64)> =
            (0..10_000).map(|i| (i, ((i * 7919) % 1000) as f64)).collect();
        assert_eq!(thin(&points[..50], 60, |p| p.1).len(), 50);
        let kept = thin(&points, 600, |p| p.1);
        assert!((400..=600).contains(&kept.len()), "{}", kept.len());
        assert!(kept.is_sorted_by_key(|p| p.0));
        let lowest = |points: &[(u64, f64)]| points.iter().map(|p| p.1).fold(f64::MAX, f64::min);
        let highest = |points: &[(u64, f64)]| points.iter().map(|p| p.1).fold(0.0, f64::max);
        assert_eq!((lowest(&kept), highest(&kept)), (lowest(&points), highest(&points)));
    }
}
