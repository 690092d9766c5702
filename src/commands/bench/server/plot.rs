//! The distributions of a load as one picture: which part of the times is below each value.

use plotters::prelude::*;

use super::{Kinds, Times};

const SIZE: (u32, u32) = (900, 300);
/// Points of a line; a load of a million events stays small.
const POINTS: usize = 400;

/// The picture as SVG.
pub(super) fn svg(kinds: &Kinds) -> Result<String, String> {
    let mut svg = String::new();
    draw(&mut svg, kinds).map_err(|error| format!("the plot cannot be drawn: {error}"))?;
    Ok(svg)
}

fn draw(svg: &mut String, kinds: &Kinds) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let panels = area.split_evenly((1, 3));
    let shown = [
        ("first token", &kinds.first),
        ("per token", &kinds.per_token),
        ("end to end", &kinds.whole),
    ];
    for (panel, (name, times)) in panels.iter().zip(shown) {
        let last = times.quantile(1.0).unwrap_or(1.0).max(1e-3);
        let mut builder = ChartBuilder::on(panel);
        builder.margin(10).caption(name, ("sans-serif", 15));
        builder.x_label_area_size(36).y_label_area_size(44);
        let mut chart = builder.build_cartesian_2d(0.0..1.05 * last, 0.0..100.0)?;
        let mut mesh = chart.configure_mesh();
        mesh.light_line_style(TRANSPARENT).x_labels(5).x_desc("ms").y_desc("% at most");
        mesh.draw()?;
        chart.draw_series(LineSeries::new(steps(times), BLUE.stroke_width(2)))?;
    }
    area.present()?;
    Ok(())
}

/// Points of the distribution function.
fn steps(times: &Times) -> Vec<(f64, f64)> {
    let points = times.0.len().min(POINTS);
    let part = |point: usize| point as f64 / points as f64;
    let point = |point: usize| Some((times.quantile(part(point))?, 100.0 * part(point)));
    times
        .0
        .first()
        .map(|&first| (first, 0.0))
        .into_iter()
        .chain((1..=points).filter_map(point))
        .collect()
}
