use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use ir::{ScheduleConfig, Target, program::GraphShape, schedule::{Knob, neutral_config}};
use lower::{RateFile, Rates};
use search::strategy::{CostModel, Known, KnownRun, KnownTrial, Predictions, Question, SearchSpace, StrategyName, strategy, weight};
use search::{TrialRecord, TrialRecords, changes, generator};
use rand::RngExt;

const MODELS: [&str; 3] = ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"];

fn rates(path: &str) -> Rates { let f: RateFile = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap(); f.rates }

struct World { name: &'static str, dims: GraphShape, neutral: ScheduleConfig, base: ScheduleConfig, space: Vec<(Knob, Vec<ir::schedule::Value>)>, left: Arc<CostModel>, truth: Arc<CostModel>, off: BTreeMap<(String, String), f64> }

fn world(name: &'static str, left: &str, all: &str) -> World {
    let graph = model::preset(name).unwrap().graph;
    let target = Target::by_name("h200").unwrap();
    let neutral = neutral_config(&graph, &target);
    let base = *ir::schedule::read_config(&std::fs::read_to_string(format!("/tmp/cost/base/{name}.json")).unwrap(), &graph, &target).unwrap();
    let space: Vec<_> = Knob::ALL.iter().map(|&k| (k, ir::schedule::legal_values(k, &graph, &target))).collect();
    let m = |r: &Rates| Arc::new(CostModel::new(&graph, &target, 4096, &[128], r));
    let (l, t) = (m(&rates(&left.replace('%', name))), m(&rates(all)));
    // what the checks say beyond the fitted model, per value, relative to the base
    let mut off: BTreeMap<(String, String), Vec<f64>> = BTreeMap::new();
    let b = t.us(&base).unwrap();
    let checks: Vec<search::checks::Check> = std::fs::read_to_string("corpus/checks/h200.jsonl").unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for c in checks.iter().filter(|c| c.model == name).rev().take(80) {
        let Ok((config, _)) = base.with_change(&c.change) else { continue };
        let Some(p) = t.us(&config) else { continue };
        let (k, v) = c.change.split_once('=').unwrap();
        off.entry((k.into(), v.into())).or_default().push(((1.0 - c.measured_pct / 100.0) / (p / b)).ln());
    }
    let off = off.into_iter().map(|(k, v)| (k, v.iter().sum::<f64>() / v.len() as f64)).collect();
    World { name, dims: GraphShape::from(&graph), neutral, base, space, left: l, truth: t, off }
}
impl World {
    fn us(&self, c: &ScheduleConfig) -> Option<f64> {
        let p = self.truth.us(c)?;
        let extra: f64 = changes(&self.base, c).iter().filter_map(|x| { let j = x.to.to_json(); let v = j.as_str().map_or(j.to_string(), str::to_owned); self.off.get(&(x.knob.path().to_owned(), v)) }).sum();
        Some(p * extra.clamp(-0.3, 0.3).exp())
    }
    fn say(&self, from: &ScheduleConfig, c: &ScheduleConfig) -> String { changes(from, c).iter().map(|x| format!("{}={}", x.knob.path().replace("pipeline.", "").replace("tiling.", ""), x.to.to_json())).collect::<Vec<_>>().join(" ") }
}
fn play(w: &World, known: Vec<KnownRun>, trials: u64, seed: u64, verbose: bool) -> (TrialRecords, f64, f64, Vec<(ScheduleConfig, f64)>) {
    let space = SearchSpace { space: w.space.clone(), seed, sweep: search::Budget::Trials(trials).explore() };
    let predictions: Arc<dyn Predictions> = w.left.clone();
    let s = strategy(StrategyName::Residual, space, Known { predictions: Some(predictions), runs: known });
    let mut rng = generator(seed, u64::MAX - 2);
    let (mut incumbent, mut us, mut score) = (w.neutral, w.us(&w.neutral).unwrap(), 0.0f64);
    let mut past = TrialRecords::default();
    let mut drawn = BTreeSet::from([incumbent.id()]);
    let mut seen = vec![(incumbent, us)];
    for trial in 1..trials {
        let found = { let q = Question { trial, incumbent: &incumbent, past: &past };
            s.ask(&q).take(2000).find_map(|(o, c)| { if !drawn.insert(c.id()) { return None; } Some((o, c, w.us(&c)?)) }) };
        let Some((origin, config, its)) = found else { continue };
        let noise = 1.0 + 0.002 * (rng.random::<f64>() - 0.5);
        let gain = 1.0 - its / us * noise;
        let kept = gain > 0.01;
        if verbose { println!("  {trial:2} {origin:?} true {its:7.1} predicted {:7.1} gain {:+.2}% {} {}", w.left.us(&config).unwrap_or(0.0), gain * 100.0, if kept { "KEPT" } else { "" }, w.say(&incumbent, &config)); }
        let sc = score + (1.0 - gain).ln();
        past.push(TrialRecord { config, changes: changes(&incumbent, &config), gain: Some(gain), kept, score: Some(sc) });
        seen.push((config, its));
        if kept { (incumbent, us, score) = (config, its, sc); }
    }
    let mut all: Vec<(f64, f64)> = past.iter().zip(seen.iter().skip(1)).map(|(p, s)| (p.score.unwrap(), s.1)).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let raced = all.iter().take(4).map(|x| x.1).fold(us, f64::min);
    (past, us, raced, seen)
}
fn known(w: &World, past: &TrialRecords, weight: f64) -> KnownRun {
    let rows = std::iter::once((w.neutral, 1.0)).chain(past.iter().filter_map(|p| Some((p.config, p.score?.exp()))));
    KnownRun { graph: w.name.into(), weight, trials: rows.filter_map(|(c, us)| Some(KnownTrial::new(&c, us, w.left.us(&c)?))).collect() }
}
fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    let (left, all, seeds): (&str, &str, u64) = (&a[0], &a[1], a[2].parse().unwrap());
    let verbose = a.get(3).is_some_and(|v| v == "v");
    let only = a.get(4);
    let t = std::time::Instant::now();
    let worlds: Vec<World> = MODELS.into_iter().map(|m| world(m, left, all)).collect();
    let mut runs = Vec::new(); let mut best = Vec::new();
    for w in &worlds {
        let (past, us, raced, seen) = play(w, vec![], 64, 7, false);
        let low = seen.iter().map(|s| s.1).fold(f64::INFINITY, f64::min).min(w.us(&w.base).unwrap());
        println!("{}: neutral {:.1} base {:.1}; 64 trials: {us:.1} raced {raced:.1} low {low:.1} ({:.0}s)", w.name, w.us(&w.neutral).unwrap(), w.us(&w.base).unwrap(), t.elapsed().as_secs_f64());
        best.push(low); runs.push(past);
    }
    for (i, w) in worlds.iter().enumerate() {
        if only.is_some_and(|o| o != w.name) { continue; }
        for stored in [true, false] {
            let mut ends = vec![];
            for seed in 0..seeds {
                let kn: Vec<KnownRun> = if stored { (0..3).filter(|j| *j != i).map(|j| known(&worlds[j], &runs[j], weight(true, &w.dims, &worlds[j].dims))).collect() } else { vec![] };
                let (_, us, raced, seen) = play(w, kn, 16, seed, verbose && seed == 0);
                best[i] = seen.iter().map(|s| s.1).fold(best[i], f64::min);
                ends.push((us, raced));
            }
            let f = |x: f64| format!("{:.1}", 100.0 * (x / best[i] - 1.0));
            println!("{} store {stored}: best {:.1}: incumbent/raced {} ({:.0}s)", w.name, best[i], ends.iter().map(|(a, b)| format!("{}/{}", f(*a), f(*b))).collect::<Vec<_>>().join(" "), t.elapsed().as_secs_f64());
        }
    }
}
