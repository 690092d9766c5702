//! How good are the proposals? A search of 64 trials on the cost model as a landscape, without gates, for several seeds, beside plain
//! random drawing; regret is against the best schedule that long searches found:
//! `cargo run --release -p search --example proposals -- llama-3.2-1b 64 5`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use ir::schedule::{Knob, ScheduleConfig, Value};
use ir::{Graph, Target};
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;
use search::{Past, Proposer, changes};

/// Tokens of context at which schedules are predicted.
const CONTEXT: u32 = 128;

/// Times as many trials as a search has, for the best known schedule.
const LONGER: u64 = 8;

type Space = Vec<(Knob, Vec<Value>)>;

struct Landscape {
    graph: Graph,
    target: Target,
    space: Space,
    known: Mutex<BTreeMap<String, Option<(String, f64)>>>,
}

impl Landscape {
    /// The program and kernel that a schedule becomes, and its predicted microseconds; `None` if it is illegal.
    fn at(&self, config: &ScheduleConfig) -> Option<(String, f64)> {
        if let Some(known) = self.known.lock().expect("no panic").get(&config.id()) {
            return known.clone();
        }
        let options = lower::Options { kv_capacity: 4096 };
        let found = ir::schedule::validate(*config, &self.graph, &self.target).ok().and_then(|v| {
            let program = lower::lower(&v, &self.graph, &self.target, options).ok()?;
            let cost = lower::predict(&program, &v.kernel, &self.target, CONTEXT);
            Some((program.id() + &v.kernel.id(), cost.latency_us))
        });
        self.known.lock().expect("no panic").insert(config.id(), found.clone());
        found
    }

    /// Searches; `draws` gives the proposals of a trial. Returns the best latency after each trial.
    fn search(
        &self,
        trials: u64,
        min_gain: f64,
        draws: impl Fn(u64, &ScheduleConfig, &[Past]) -> Vec<ScheduleConfig>,
    ) -> Vec<f64> {
        let mut incumbent = ir::schedule::default_config(&self.graph, &self.target);
        let (first, mut best) = self.at(&incumbent).expect("the default is legal");
        let mut tried = BTreeSet::from([first]);
        let (mut past, mut path) = (Vec::new(), vec![best]);
        for trial in 1..trials {
            let new = |config: ScheduleConfig| {
                let (id, us) = self.at(&config)?;
                (!tried.contains(&id)).then_some((config, id, us))
            };
            let found = draws(trial, &incumbent, &past).into_iter().find_map(new);
            let Some((config, id, us)) = found else { break };
            tried.insert(id);
            let gain = 1.0 - us / best;
            let kept = gain > min_gain;
            let changes = changes(&incumbent, &config);
            past.push(Past { config, changes, gain: Some(gain), kept });
            if kept {
                (incumbent, best) = (config, us);
            }
            path.push(best);
        }
        path
    }

    fn planned(&self, trials: u64, seed: u64, min_gain: f64) -> Vec<f64> {
        let proposer = Proposer { space: &self.space, seed, sweep: (trials / 2).clamp(2, 40) };
        self.search(trials, min_gain, |trial, incumbent, past| {
            proposer.draws(trial, incumbent, past).take(600).map(|(_, config)| config).collect()
        })
    }

    /// A quarter of the trials around the default, then one or two random changes of the incumbent.
    fn random(&self, trials: u64, seed: u64, min_gain: f64) -> Vec<f64> {
        let default = ir::schedule::default_config(&self.graph, &self.target);
        self.search(trials, min_gain, |trial, incumbent, _| {
            let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed << 32 | trial);
            let mut one = || {
                let (mut config, share) = (default, rng.random_range(0.15..0.75));
                if trial <= trials / 4 {
                    for (knob, values) in &self.space {
                        if rng.random_bool(share) {
                            let _ = config.set(*knob, *values.choose(&mut rng).expect("a value"));
                        }
                    }
                    return config;
                }
                config = *incumbent;
                for _ in 0..rng.random_range(1..=2) {
                    let (knob, values) = self.space.choose(&mut rng).expect("a knob");
                    let _ = config.set(*knob, *values.choose(&mut rng).expect("a value"));
                }
                config
            };
            (0..600).map(|_| one()).collect()
        })
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "llama-3.2-1b".to_owned());
    let mut number = |default| args.next().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (trials, seeds) = (number(64), number(5));
    let graph = model::preset(&name).expect("the first argument names a preset").graph;
    let target = Target::by_name("h200").expect("a target of the table");
    let legal = |&knob: &Knob| (knob, ir::schedule::legal_values(knob, &graph, &target));
    let space = Knob::ALL.iter().map(legal).collect();
    let land = Landscape { space, graph, target, known: Mutex::default() };
    let long = |seed: u64| {
        let planned = land.planned(LONGER * trials, 1000 + seed, 0.0);
        planned.last().copied().unwrap_or(f64::INFINITY)
    };
    let mut best = (0..2_u64).into_par_iter().map(long).reduce(|| f64::INFINITY, f64::min);
    for min_gain in [0.001, 0.01] {
        let run =
            |seed: u64| (land.random(trials, seed, min_gain), land.planned(trials, seed, min_gain));
        let paths: Vec<_> = (0..seeds).into_par_iter().map(run).collect();
        let ends = paths.iter().flat_map(|(a, b)| [a, b]).filter_map(|path| path.last());
        best = ends.fold(best, |best, &us| best.min(us));
        println!(
            "least gain {:.1} %, best known {best:.1} us, regret after {trials} trials:",
            100.0 * min_gain
        );
        for (seed, (random, planned)) in paths.iter().enumerate() {
            let regret = |path: &[f64], at: usize| {
                100.0 * (path.get(at).or(path.last()).map_or(f64::NAN, |us| us / best) - 1.0)
            };
            let (half, end) = (trials as usize / 2, trials as usize - 1);
            println!(
                "  seed {seed}: random {:5.1} % (half way {:5.1} %), planned {:5.1} % (half way {:5.1} %)",
                regret(random, end),
                regret(random, half),
                regret(planned, end),
                regret(planned, half)
            );
        }
    }
}
