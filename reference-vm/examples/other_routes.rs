//! Times evaluations of some layers of a mixture on routes that differ from its own in a few choices: from the start, and
//! with what the own evaluation and a first stage have.
//!
//! `cargo run --release -p reference-vm --example other_routes -- gpt-oss-20b 4`

use std::time::Instant;

use ir::{FeedForward, Graph};
use model::{Model, PRESETS, Shape, Window};
use reference_vm::eval::{Evaluator, Followed, Logits, Sharing};
use reference_vm::routes::Routes;

/// Positions of a gate and of its first stage.
const POSITIONS: [usize; 2] = [144, 24];

/// Words of the vocabulary: logits are not what is measured.
const VOCAB: u32 = 4096;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "gpt-oss-20b".to_owned());
    let layers = arguments.next().map_or(4, |layers| layers.parse().expect("a number of layers"));
    let model = few_layers(&name, layers);
    let (graph, weights) = (&model.graph, &*model.weights);
    let [all, stage] = POSITIONS;
    let tokens: Vec<u32> = (0..all as u32).map(|i| i * 7919 % graph.vocab).collect();
    let evaluator = || Evaluator::new(graph, weights).expect("a preset");
    // Random weights are drawn on first use.
    drop(evaluator().run(&tokens, Logits::All));
    let began = Instant::now();
    let mut own = evaluator().keeping();
    let rows = own.run(&tokens, Logits::All).expect("tokens of the vocabulary");
    println!("own routes: {:.3} s", began.elapsed().as_secs_f64());
    let own = own.into_kept(&tokens).expect("a mixture");
    println!("kept: {:.1} MB beside the logits", own.bytes() as f64 / 1e6);
    let base = Sharing { kept: &own, rows: &rows };
    for strays in [1, 4, 18] {
        let routes = other(graph, &own.routed().routes, strays);
        let mut first = Routes::new(routes.layers());
        for position in 0..stage {
            first.push(
                (0..routes.layers()).map(|l| routes.set(position, l).unwrap_or_default().to_vec()),
            );
        }
        let timed = |routes: &Routes, kept: &[Sharing<'_>]| {
            let (tokens, began) = (&tokens[..routes.positions()], Instant::now());
            let found = evaluator().run_sharing(tokens, routes, kept).expect("the same tokens");
            (found, began.elapsed().as_secs_f64())
        };
        let (_, fresh_s) = timed(&routes, &[]);
        let (found, first_s) = timed(&first, &[base]);
        let Followed { rows, kept, .. } = &found;
        let kept = kept.as_ref().expect("a mixture");
        let (whole, whole_s) = timed(&routes, &[base, Sharing { kept, rows }]);
        println!(
            "{strays} other choices: {fresh_s:.3} s from the start; first stage {first_s:.3} s ({:.0} %), all {whole_s:.3} s ({:.0} %)",
            100.0 * found.computed as f64 / (stage * layers as usize) as f64,
            100.0 * whole.computed as f64 / (all * layers as usize) as f64,
        );
    }
}

/// The first layers of a preset.
fn few_layers(name: &str, layers: u32) -> Model {
    let plain = PRESETS.iter().find(|preset| preset.name == name).expect("a preset in 16 bits");
    let mut shape = Shape { layers, vocab: VOCAB, ..plain.shape() };
    if let Window::Layers { sliding, .. } = &mut shape.window {
        sliding.truncate(layers as usize);
    }
    Model::random(shape, 1)
}

/// These routes with other experts at places that are spread over positions and layers.
fn other(graph: &Graph, routes: &Routes, strays: usize) -> Routes {
    let count = graph.layers.iter().find_map(|layer| match &layer.mlp.body {
        FeedForward::Experts(experts) => Some(experts.experts.len() as u32),
        FeedForward::Gated(_) => None,
    });
    let count = count.expect("a mixture");
    let place = |n: usize| {
        // The golden ratio and the root of two spread points evenly.
        let part = |factor: f64| ((n + 1) as f64 * factor).fract();
        let positions = routes.positions() as f64 * part(0.618_034);
        (positions as usize, (routes.layers() as f64 * part(std::f64::consts::SQRT_2)) as usize)
    };
    let places: Vec<_> = (0..strays).map(place).collect();
    let mut other = Routes::new(routes.layers());
    for position in 0..routes.positions() {
        other.push((0..routes.layers()).map(|layer| {
            let mut set = routes.set(position, layer).unwrap_or_default().to_vec();
            if places.contains(&(position, layer))
                && let Some(free) = (0..count).find(|expert| !set.contains(expert))
            {
                set[0] = free;
            }
            set
        }));
    }
    other
}
