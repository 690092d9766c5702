use std::path::Path;
use ir::{Graph, Target, schedule::{Knob, neutral_config}};
use lower::{RateFile, Rates, Predictor};
use rayon::prelude::*;
use search::calibrate::{Case, Changes, Calibration, Point, read, split, fit};
use search::measured_grid::Terms;
use serde_json::json;

const MODELS: [&str; 3] = ["llama-3.2-1b", "qwen3-0.6b", "smollm2-135m"];

struct Data { cases: Vec<Case>, changes: Changes, terms: Terms, graph: Graph, target: Target, base: ir::ScheduleConfig }

fn data(name: &str, count: usize) -> Data {
    let folder = std::env::var("GRIDS").unwrap_or("corpus/grids/points".into());
    let text = std::fs::read_to_string(format!("{folder}/h200-{name}-128.jsonl")).unwrap();
    let file = read(&text).unwrap();
    let graph = model::preset(name).unwrap().graph;
    let target = Target::by_name(&file.terms.target).unwrap();
    let space = file.terms.grid.space(&neutral_config(&graph, &target)).unwrap();
    let cases = search::calibrate::cases(&file, &space, count, &graph, &target).unwrap();
    let checks: Vec<search::checks::Check> = std::fs::read_to_string("corpus/checks/h200.jsonl").unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let base = std::fs::read_to_string(format!("/tmp/cost/base/{name}.json")).unwrap();
    let base = *ir::schedule::read_config(&base, &graph, &target).unwrap();
    let changes = Changes::new(&checks, base, &file.terms, &graph, &target).unwrap();
    Data { cases, changes, terms: file.terms, graph, target, base }
}
fn rates(path: &str) -> Rates {
    if path == "shipped" { return *Rates::shipped(); }
    let text = std::fs::read_to_string(path).unwrap();
    let mut v: serde_json::Value = serde_json::from_str(&text).unwrap();
    // rates that are new take the start's value
    let start: serde_json::Value = serde_json::from_str(&std::fs::read_to_string("/tmp/cost/new.json").unwrap_or("{}".into())).unwrap();
    for (k, x) in start.as_object().unwrap() { v["rates"].as_object_mut().unwrap().entry(k.clone()).or_insert(x.clone()); }
    let f: RateFile = serde_json::from_value(v).unwrap();
    f.rates
}
fn regret(points: &[Point]) -> f64 {
    let p = points.iter().min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us)).unwrap();
    let f = points.iter().map(|p| p.measured_us).fold(f64::INFINITY, f64::min);
    p.measured_us / f - 1.0
}
fn med(mut v: Vec<f64>) -> f64 { v.sort_by(f64::total_cmp); v[v.len() / 2] }
fn judge(d: &Data, r: &Rates) {
    let points = search::calibrate::points(&d.cases, r);
    let c = Calibration::of(&points);
    let checks = d.changes.predicted(r);
    let fig = |checks: &[search::checks::Check]| {
        let e = med(checks.iter().map(|c| (c.predicted_pct - c.measured_pct).abs()).collect());
        let big: Vec<_> = checks.iter().filter(|c| c.measured_pct.abs() > 1.0).collect();
        let right = big.iter().filter(|c| (c.predicted_pct > 0.0) == (c.measured_pct > 0.0)).count();
        format!("{e:.2} ({right}/{})", big.len())
    };
    let mut top: Vec<&Point> = points.iter().collect();
    top.sort_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us));
    let f = points.iter().map(|p| p.measured_us).fold(f64::INFINITY, f64::min);
    let tops: Vec<String> = top.iter().take(6).map(|p| format!("{:.1}", 100.0 * (p.measured_us / f - 1.0))).collect();
    let half = checks.len() / 2;
    println!("{:13} rank {:.3} err {:.1} p90 {:.1} bias {:+.1} regret {:.1} top [{}] checks {} = {} {}", d.terms.model, c.rank_correlation, 100.0*c.error_median, 100.0*c.error_p90, 100.0*c.bias, 100.0*regret(&points), tops.join(" "), checks.len(), fig(&checks[..half]), fig(&checks[half..]));
}
fn write(path: &str, r: &Rates) {
    let round = |r: Rates, i: usize| r.with(i, (r.get(i) * 1e5).round() / 1e5);
    let r = (0..Rates::TABLE.len()).fold(*r, round);
    std::fs::write(path, serde_json::to_string_pretty(&RateFile { source: "probe".into(), rates: r }).unwrap()).unwrap();
}

/// For each phase of a layer: its workers, and how many had a task one, two.. phases before; (active attention apart).
fn adjacency(program: &ir::program::Program) {
    for line in adjacent(program, 10) { println!("{line}"); }
}
fn adjacent(program: &ir::program::Program, layer: u16) -> Vec<String> {
    // sequence of phases by name in layer order
    let order = ["qkv", "attention", "o_proj", "gate_up", "down"];
    let mut out = vec![];
    let place = |l: u16, name: &str| order.iter().position(|o| *o == name).map(|p| usize::from(l) * 5 + p);
    let mut rows: std::collections::BTreeMap<usize, (usize, std::collections::BTreeMap<usize, usize>)> = Default::default();
    for worker in &program.workers {
        let mut last: Option<usize> = None;
        for task in &worker.tasks {
            let Some(at) = place(task.layer, program.phase_name(task)) else { continue };
            if let abi::Params::Attention(p) = task.op() { if p.split > 0 { continue; } }
            if task.layer == layer {
                let e = rows.entry(at).or_default();
                e.0 += 1;
                if let Some(l) = last { *e.1.entry(at - l).or_default() += 1; }
            }
            last = Some(at);
        }
    }
    for (at, (n, gaps)) in rows { out.push(format!("{:10} tasks {n:4} gaps {gaps:?}", order[at % 5])); }
    out
}

fn gaps(program: &ir::program::Program, position: u32) -> serde_json::Value {
    let mut order: Vec<String> = vec![];
    // order of phases within a layer: by the first worker that shows them, sorted by known order
    for n in ["embed", "qkv", "attention", "merge", "o_proj", "gate_up", "down"] { if program.workers.iter().any(|w| w.tasks.iter().any(|t| program.phase_name(t) == n)) { order.push(n.into()); } }
    let order: Vec<String> = order.into_iter().filter(|n| n != "embed").collect();
    let n = order.len();
    let layers = program.workers.iter().flat_map(|w| &w.tasks).map(|t| usize::from(t.layer)).max().unwrap() ;
    let mut found: std::collections::BTreeMap<String, std::collections::BTreeMap<String, std::collections::BTreeSet<usize>>> = Default::default();
    for worker in &program.workers {
        let mut last: Option<(usize, bool)> = None;
        let mut lastattn: Option<usize> = None;
        for task in &worker.tasks {
            let Some(p) = order.iter().position(|o| o == program.phase_name(task)) else { continue };
            let at = usize::from(task.layer) * n + p;
            let mut attn = false;
            if let abi::Params::Attention(a) = task.op() {
                let active = ir::program::active_splits(ir::program::attended(position, a.window), a.kv_block, a.splits);
                if a.split >= active { continue; }
                attn = true;
            }
            if let Some((l, _)) = last { let g = at - l; if g <= 1 { found.entry(order[p].clone()).or_default().entry(format!("g{g}")).or_default().insert(task.layer.into()); } }
            if let Some(l) = lastattn { let g = at - l; if g <= 3 && g > 0 { found.entry(order[p].clone()).or_default().entry(format!("a{g}")).or_default().insert(task.layer.into()); } }
            last = Some((at, attn));
            if attn { lastattn = Some(at); }
        }
    }
    let v: serde_json::Map<String, serde_json::Value> = found.into_iter().flat_map(|(p, g)| g.into_iter().map(move |(g, s)| (format!("{p}.{g}"), json!(s.len() as f64 / (layers) as f64)))).collect();
    serde_json::Value::Object(v)
}

fn main() {
    let a: Vec<String> = std::env::args().skip(1).collect();
    match a[0].as_str() {
        "judge" => for (i, m) in MODELS.iter().enumerate() {
            let d = data(m, 600);
            let r = if a.len() > 3 { &a[1 + i] } else if a[1] == "left" { &format!("corpus/grids/points/without-{m}.rates.json") } else if a[1].contains('%') { &a[1].replace('%', m) } else { &a[1] };
            judge(&d, &rates(r));
        },
        "dump" => for m in MODELS {
            let d = data(m, 600);
            let r = rates(&a[1].replace('%', m));
            let ps = search::calibrate::points(&d.cases, &r);
            for (c, p) in d.cases.iter().zip(&ps) {
                let k: serde_json::Map<_, _> = Knob::ALL.iter().map(|k| (k.path().to_owned(), c.config.get(*k).to_json())).collect();
                println!("{}", json!({"model": m, "knobs": k, "m": p.measured_us, "p": p.predicted_us}));
            }
            for c in d.changes.predicted(&r) { println!("{}", json!({"check": m, "change": c.change, "m": c.measured_pct, "p": c.predicted_pct})); }
        },
        // fit START OUT% ROWS: all, and without each
        "fit" => {
            let start = a[1].clone();
            let rows: usize = a[3].parse().unwrap();
            let only = a.get(4).map(String::as_str);
            let mut all: Vec<Data> = MODELS.iter().map(|m| data(m, rows)).collect();
            let mut parts: Vec<(String, Vec<Case>)> = Vec::new();
            let mut changes = Vec::new();
            for (m, d) in MODELS.iter().zip(all.drain(..)) { let (f, _) = split(d.cases); parts.push((m.to_string(), f)); changes.push(d.changes); }
            for (i, out) in ["all", MODELS[0], MODELS[1], MODELS[2]].iter().enumerate() {
                if only.is_some_and(|o| o != *out) { continue; }
                let t = std::time::Instant::now();
                let s = rates(&start.replace('%', out));
                let mut cs = Vec::new(); let mut ch = Vec::new();
                let mut back = Vec::new();
                for (j, (m, f)) in parts.iter_mut().enumerate() { if i == 0 || j + 1 != i { back.push((j, f.len())); cs.append(f); ch.push(changes.remove(0)); let _ = m; } else { let c = changes.remove(0); ch.push(c); } }
                // changes of the left-out model are last seen: move it out
                let left = if i > 0 { Some(ch.remove(i - 1)) } else { None };
                let mut losses = Vec::new();
                let r = fit(&cs, &ch, &s, |_, l| losses.push(format!("{l:.5}")));
                println!("{out}: {} in {:.0}s", losses.join(" "), t.elapsed().as_secs_f64());
                write(&a[2].replace('%', out), &r);
                if let Some(l) = left { ch.insert(i - 1, l); }
                changes = ch;
                let mut it = cs.into_iter();
                for (j, n) in back { parts[j].1 = it.by_ref().take(n).collect(); }
            }
        },
        // gaps: per case, for each phase the share of layers in which some worker had a task in the phase before
        "gaps" => for m in MODELS {
            let d = data(m, 600);
            let rows: Vec<String> = d.cases.par_iter().map(|c| {
                let valid = ir::schedule::validate(c.config, &d.graph, &d.target).unwrap();
                let program = lower::lower(&valid, &d.graph, &d.target, lower::Options { kv_capacity: d.terms.kv_capacity }).unwrap();
                gaps(&program, d.terms.context + 4).to_string()
            }).collect();
            for r in rows { println!("{r}"); }
        },
        // trace MODEL RATES CHANGES.. : tasks of a middle layer
        "trace" => {
            let m = &a[1];
            let d = data(m, 1);
            let r = rates(&a[2].replace('%', m));
            let mut config = d.base;
            for c in &a[3..] { config = config.with_change(c).unwrap().0; }
            let valid = ir::schedule::validate(config, &d.graph, &d.target).unwrap();
            let program = lower::lower(&valid, &d.graph, &d.target, lower::Options { kv_capacity: d.terms.kv_capacity }).unwrap();
            let p = Predictor::new(&program, &valid.kernel, &d.target, d.terms.context + d.terms.timed_tokens / 2);
            let s = p.simulate(&r);
            println!("{:.2} us", s.us);
            if std::env::var("ADJ").is_ok() { adjacency(&program); return; }
            let layer = 10u16;
            let mut names: Vec<String> = Vec::new();
            let mut by: Vec<Vec<(usize, lower::TaskTimes, usize)>> = Vec::new();
            for (w, (worker, times)) in program.workers.iter().zip(&s.workers).enumerate() {
                for (n, (task, t)) in worker.tasks.iter().zip(times).enumerate() {
                    if task.layer != layer { continue; }
                    let name = program.phase_name(task).to_owned();
                    let i = names.iter().position(|x| *x == name).unwrap_or_else(|| { names.push(name); by.push(vec![]); names.len() - 1 });
                    by[i].push((w, *t, n));
                }
            }
            let mut order: Vec<usize> = (0..names.len()).collect();
            let end = |i: usize| by[i].iter().map(|x| x.1.end).fold(0.0, f64::max);
            order.sort_by(|a, b| end(*a).total_cmp(&end(*b)));
            let mut before = 0.0;
            for i in order {
                let e = end(i);
                let mean = |f: &dyn Fn(&lower::TaskTimes) -> f64| by[i].iter().map(|x| f(&x.1)).sum::<f64>() / by[i].len() as f64;
                let max = |f: &dyn Fn(&lower::TaskTimes) -> f64| by[i].iter().map(|x| f(&x.1)).fold(f64::MIN, f64::max);
                println!("{:12} tasks {:4} end {:.2} (+{:.2}) begin mean {:.2} max {:.2}; ready mean {:.2} max {:.2}; staged-ready {:.2}; mult mean {:.2} max {:.2} starved max {:.2}; end-mult {:.2}; arrived {:.0} min {:.0}", names[i], by[i].len(), e, e - before, mean(&|t| t.begin) - e, max(&|t| t.begin) - e, mean(&|t| t.ready) - e, max(&|t| t.ready) - e, mean(&|t| t.staged - t.ready), mean(&|t| t.multiplied - t.staged), max(&|t| t.multiplied - t.staged), max(&|t| t.starved), mean(&|t| t.end - t.multiplied), mean(&|t| t.arrived[0]), by[i].iter().map(|x| x.1.arrived[0]).fold(f64::MAX, f64::min));
                before = e;
            }
        }
        _ => panic!(),
    }
    let _ = (Path::new(""), 0); let _ = (0..1).into_par_iter().count();
}
