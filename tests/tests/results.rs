//! Generates tables and the picture of results from the shipped bundles and `docs/results/engines.json`. `BLESS=1`
//! rewrites them.

use std::fmt::Write as _;

use search::Bundle;
use serde::Deserialize;
use tests::root;

use crate::docs::{fresh, fresh_part};

/// The shipped bundles, small models and short contexts first.
fn bundles() -> Vec<Bundle> {
    let read = |text| Bundle::read(text).unwrap_or_else(|refusal| panic!("{refusal}"));
    let mut all: Vec<Bundle> =
        corpus::all_shipped().iter().filter_map(|s| s.bundle).map(read).collect();
    all.sort_by(|a, b| {
        let key = |b: &Bundle| (b.bytes_per_token, b.context);
        key(a).cmp(&key(b))
    });
    all
}

/// The table of README.md and of the page about performance.
fn table() -> String {
    let mut out = String::from(
        "| model, bf16 | context | µs per token | 99% interval | share of the roofline bound | the card reads |\n|---|---|---|---|---|---|\n",
    );
    for b in bundles() {
        let _ = writeln!(
            out,
            "| {} | {} | {:.1} | {:.1} to {:.1} | {:.1}% | {:.2} TB/s |",
            b.model,
            b.context,
            b.median_us,
            b.ci_us[0],
            b.ci_us[1],
            100.0 * b.bound_us / b.median_us,
            b.bandwidth / 1e12
        );
    }
    out
}

/// One row per bundle, with what a reader needs to repeat it.
fn page() -> String {
    let mut out = String::from(
        "# Results of the shipped schedules\n\nGenerated from the bundles in `corpus/schedules` by the tests (`BLESS=1 cargo test -p tests \
         results`). `amk bundle`\nrecomputes each row from its raw samples.\n\n\
         | model | context | µs per token | bound | card | driver | CUDA | worst relative error | KL, nats | top-1 | kernel |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for b in bundles() {
        let (c, a) = (&b.conditions, &b.accuracy);
        let _ = writeln!(
            out,
            "| {} | {} | {:.1} | {:.1} | {} | {} | {} | {:.1e} | {:.1e} | {} of {} | `{}` |",
            b.model,
            b.context,
            b.median_us,
            b.bound_us,
            c.card,
            c.driver,
            c.cuda,
            a.rel_err_worst,
            a.kl_mean,
            a.top1_equal,
            a.top1_decided,
            b.kernel_id
        );
    }
    out
}

#[derive(Deserialize)]
struct Engine {
    engine: String,
    us: f64,
    note: String,
}

const BAR: u32 = 34;
const LABEL: f64 = 330.0;
const WIDTH: f64 = 900.0;

/// Bars: shorter is better.
fn picture(engines: &[Engine]) -> String {
    let longest = engines.iter().map(|e| e.us).fold(0.0, f64::max);
    let height = engines.len() as u32 * BAR + 70;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"15\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"24\" font-size=\"17\">llama-3.2-1b, 16 bits, context 128, one NVIDIA H200: µs per token, less is better</text>\n"
    );
    for (row, Engine { engine, us, note }) in engines.iter().enumerate() {
        let (top, bar) = (row as u32 * BAR + 42, us / longest * (WIDTH - LABEL - 270.0));
        let (text, fill) = (top + 19, if engine == "amk" { "#2f7d4f" } else { "#9aa5b1" });
        let _ = writeln!(
            out,
            "<text x=\"10\" y=\"{text}\">{engine}</text>\n\
             <rect x=\"{LABEL}\" y=\"{top}\" width=\"{bar:.0}\" height=\"24\" fill=\"{fill}\"/>\n\
             <text x=\"{:.0}\" y=\"{text}\">{us:.0} <tspan fill=\"#666\" font-size=\"12\">{note}</tspan></text>",
            LABEL + bar + 8.0
        );
    }
    out + "</svg>\n"
}

#[test]
fn results_are_those_of_the_bundles() {
    fresh_part("README.md", "results", &table());
    fresh_part("docs/explanation/performance.md", "results", &table());
    fresh("docs/results/shipped.md", &page());
}

#[test]
fn the_picture_shows_the_engines() {
    let path = root().join("docs/results/engines.json");
    let text = std::fs::read_to_string(&path).expect("it is there");
    let engines: Vec<Engine> = serde_json::from_str(&text).expect("rows of engines");
    assert!(engines.is_sorted_by(|a, b| a.us <= b.us), "the fastest first");
    fresh("docs/results/engines.svg", &picture(&engines));
}
