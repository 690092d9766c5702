//! The regret curves as one SVG: a panel per measured grid, a line per strategy, the mean over seeds.

use std::path::Path;

use plotters::prelude::*;

use super::{Land, Line, TRIALS, mean};

/// Size of a panel, in pixels.
const PANEL: (u32, u32) = (420, 320);

/// Range of the regret axis, per cent.
const RANGE: (f64, f64) = (0.1, 100.0);

/// Line colours for readers with colour vision deficiency (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(130, 130, 130),
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
    RGBColor(0, 158, 115),
];

/// Draws all panels into a file.
pub(super) fn draw(path: &Path, lands: &[Land], lines: &[Line]) {
    let size = (PANEL.0 * lands.len() as u32, PANEL.1);
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE).expect("the file can be written");
    for (index, (panel, land)) in area.split_evenly((1, lands.len())).iter().zip(lands).enumerate()
    {
        let mut chart = ChartBuilder::on(panel)
            .caption(format!("{}: regret, per cent", land.terms.model), ("sans-serif", 15))
            .margin(8)
            .x_label_area_size(30)
            .y_label_area_size(40)
            .build_cartesian_2d(1_f64..TRIALS as f64, (RANGE.0..RANGE.1).log_scale())
            .expect("a chart");
        chart.configure_mesh().x_desc("trials").light_line_style(WHITE).draw().expect("the mesh");
        for (line, colour) in lines.iter().zip(COLOURS) {
            let at = |trial: usize| {
                let all: Vec<f64> =
                    line.whole()[index].iter().map(|path| path.kept[trial]).collect();
                (trial as f64 + 1.0, (100.0 * mean(&all)).max(RANGE.0))
            };
            let points = (0..TRIALS as usize).map(at);
            chart
                .draw_series(LineSeries::new(points, colour.stroke_width(2)))
                .expect("a line")
                .label(line.name.clone())
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2))
                });
        }
        if index > 0 {
            continue; // one legend for all
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .border_style(BLACK.mix(0.2))
            .background_style(WHITE)
            .draw()
            .expect("the legend");
    }
    area.present().expect("the file can be written");
}
