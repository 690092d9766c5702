//! Mixtures in chunks. A chunk's vectors are f16, so it may choose another expert than a step where two are near each other, and all values after
//! that are other ones. So it is compared with the graph on the chunk's own routes, and each route with the logits that the graph has there.
//! Small random mixtures amplify roundings more than dense models do, so what is allowed is found per model, as in the gate of a search: from what a
//! chunk's roundings do to the graph.

use reference_vm::eval::{Evaluator, Logits};
use reference_vm::routes::{Routed, Routes};
use vm_host::{ChunkRoutes, GemmShape, Idle, PrefillOptions};

use super::{Bench, ONE_CHUNK, SHAPES, relative, worst};

/// Folders with experts: plain ones, with a norm of all queries, with a shared expert, with sinks, biases and a clamped activation, and with codes of two kinds.
pub(crate) const MIXTURES: [&str; 7] = [
    "families/mixtral-bf16",
    "families/qwen3-moe-bf16",
    "families/olmoe-bf16",
    "families/qwen2-moe-bf16",
    "families/gpt-oss-bf16",
    "quantised/fp8-block-qwen3-moe",
    "quantised/mxfp4-gpt-oss",
];
/// What is allowed, in terms of what a chunk's roundings do to the graph; and how often they are drawn. The margin is that of a step's gate.
const MARGIN: f64 = 2.0;
const DRAWS: u32 = 8;

/// Greatest relative differences: of a position's logits, and of a layer's keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    logits: f64,
    pub(crate) keys: f64,
    pub(crate) values: f64,
}

/// What the graph has on a chunk's routes.
struct OnRoutes {
    logits: Vec<f32>,
    caches: Vec<(Vec<f32>, Vec<f32>)>,
    routed: Routed,
}

impl Bench {
    /// Compares prompts of every length, in every shape of the products, in one chunk and in several.
    pub(crate) fn mixture(&mut self, idle: &mut Idle) {
        let own = self.own_routes();
        let allowed = self.allowed(Some(&own));
        let shapes = SHAPES.into_iter().chain([GemmShape::Auto]);
        let whole = shapes.map(|shape| (PrefillOptions { shape, ..ONE_CHUNK }, usize::MAX));
        // Of codes, two experts are unpacked at once in the one, and then one.
        let parts = [(2, 128), (1, 40)];
        let parts = parts.map(|(experts, most)| (PrefillOptions { experts, ..ONE_CHUNK }, most));
        for (options, most) in whole.chain(parts) {
            for length in self.lengths.clone() {
                let name = match most {
                    usize::MAX => format!("{:?}", options.shape),
                    most => format!("chunks of {most}"),
                };
                self.compare_mixture(idle, (&own, allowed), (&name, &options), (length, most));
            }
        }
    }

    /// The routes that the graph itself takes.
    fn own_routes(&self) -> Routes {
        let evaluator = Evaluator::new(self.graph(), &*self.model.weights).expect("an evaluator");
        let mut evaluator = evaluator.recording_routes();
        evaluator.run(&self.tokens, Logits::Last).expect("it is evaluated");
        evaluator.routed().expect("a mixture").routes
    }

    /// Twice what a chunk's roundings do to the graph, of a mixture on its own routes, in the draw, at the position and in the layer where they do
    /// most.
    pub(crate) fn allowed(&self, own: Option<&Routes>) -> Allowed {
        let evaluator = || {
            let evaluator = Evaluator::new(self.graph(), &*self.model.weights);
            let evaluator = evaluator.expect("an evaluator");
            match own {
                Some(own) => evaluator.on_routes(0, own.clone()),
                None => evaluator,
            }
        };
        let run = |evaluator: &mut Evaluator<'_>| {
            evaluator.run(&self.tokens, Logits::All).expect("it is evaluated")
        };
        let mut exact = evaluator();
        let expected = run(&mut exact);
        let mut allowed = Allowed { logits: 0.0, keys: 0.0, values: 0.0 };
        for draw in 0..DRAWS {
            let mut rounded = evaluator().with_chunk_roundings(draw);
            let logits = run(&mut rounded);
            let errors = expected.iter().zip(&logits).map(|(a, b)| MARGIN * relative(a, b));
            allowed.logits = errors.fold(allowed.logits, f64::max);
            for layer in 0..self.graph().layers.len() {
                let keys = MARGIN * worst(&exact.keys(layer), &rounded.keys(layer));
                let values = MARGIN * worst(&exact.values(layer), &rounded.values(layer));
                (allowed.keys, allowed.values) =
                    (allowed.keys.max(keys), allowed.values.max(values));
            }
        }
        let (Allowed { logits, keys, values }, name) = (allowed, &self.graph().name);
        eprintln!("{name:18} allowed: logits {logits:.1e}, keys {keys:.1e}, values {values:.1e}");
        allowed
    }

    /// Runs a prompt in chunks of at most `most` tokens, each a request of its own, whose routes are read.
    fn compare_mixture(
        &mut self,
        idle: &mut Idle,
        (own, allowed): (&Routes, Allowed),
        (name, options): (&str, &PrefillOptions),
        (length, most): (usize, usize),
    ) {
        let mut routes = Routes::new(own.layers());
        for part in self.tokens[..length].chunks(most) {
            let start = routes.positions();
            let done = idle.prefill(1, start as u32, part, true, options);
            let done = done.unwrap_or_else(|error| panic!("{name}, {length}: {error}"));
            assert!(!done.clamped, "{name}, {length}");
            let chosen = idle.chunk_routes(part.len() as u32).expect("routes");
            (0..part.len()).for_each(|token| routes.push(position(&chosen, token, start, own)));
        }
        let logits = idle.last_logits().expect("logits");
        let graph = self.on_routes(&routes, length);
        let (mut keys, mut values) = (0.0_f64, 0.0_f64);
        for (layer, (k, v)) in graph.caches.iter().enumerate() {
            let (a, b) = idle.cached(1, layer as u32, length as u32).expect("cache");
            (keys, values) = (keys.max(worst(k, &a)), values.max(worst(v, &b)));
        }
        let (error, stray) = (relative(&graph.logits, &logits), graph.routed.worst());
        let strays = graph.routed.strays(length);
        // A router's logits are products of the normed vector, as keys are; the best expert left out and the worst one chosen may both be that wrong.
        let wrong = error > allowed.logits
            || keys > allowed.keys
            || values > allowed.values
            || stray.gap > 2.0 * allowed.keys;
        self.say(
            wrong,
            &format!(
                "{name:16} {length:5} tokens: logits to graph {error:.1e}; keys {keys:.1e}, values {values:.1e}; {strays} of {} choices differ, by {:.1e} at most",
                length * own.layers(),
                stray.gap
            ),
        );
    }

    fn on_routes(&self, routes: &Routes, length: usize) -> OnRoutes {
        let evaluator = Evaluator::new(self.graph(), &*self.model.weights).expect("an evaluator");
        let mut evaluator = evaluator.on_routes(0, routes.clone()).recording_routes();
        let rows = evaluator.run(&self.tokens[..length], Logits::Last).expect("it is evaluated");
        let layers = 0..self.graph().layers.len();
        OnRoutes {
            logits: rows.into_iter().next_back().expect("a row"),
            caches: layers.map(|n| (evaluator.keys(n), evaluator.values(n))).collect(),
            routed: evaluator.routed().expect("a mixture"),
        }
    }
}

/// The experts of a chunk's token, by layer: the graph's own where the chunk ran none, which nothing later reads.
fn position(chosen: &[ChunkRoutes], token: usize, start: usize, own: &Routes) -> Vec<Vec<u32>> {
    let of = |(layer, routes): (usize, &ChunkRoutes)| {
        let ran = token.checked_sub(routes.first as usize).and_then(|n| routes.chosen.get(n));
        ran.cloned().unwrap_or_else(|| {
            own.set(start + token, layer).expect("the graph chose there").to_vec()
        })
    };
    chosen.iter().enumerate().map(of).collect()
}
