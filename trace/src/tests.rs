//! A step of a small model in virtual time: its sums, and the files read back.

use std::collections::BTreeSet;

use ir::program::{Program, Verified};
use ir::schedule::{neutral_config, validate};
use ir::{KernelConfig, Target};
use lower::{Predictor, Rates};

use serde_json::{Value, json};

use crate::perfetto::write;
use crate::{Cause, Clock, Edit, Path, Predicted, digest, predicted, replay};

/// The program, and the bytes that each of its tasks takes.
fn program_and_bytes() -> (Verified<Program>, Vec<Vec<u64>>) {
    let (program, kernel, target) = lowered("toy-2l");
    let bytes = Predictor::new(&program, &kernel, &target, 128).task_bytes();
    (program, bytes)
}

fn traced() -> Predicted {
    let (program, kernel, target) = lowered("toy-2l");
    predicted(&program, &kernel, &target, 128, Rates::shipped())
}

fn lowered(model: &str) -> (Verified<Program>, KernelConfig, Target) {
    let model = model::load(model).unwrap();
    let target = Target::by_name("h200").unwrap();
    let config = neutral_config(&model.graph, &target);
    let config = validate(config, &model.graph, &target).unwrap();
    let options = lower::Options { kv_capacity: 256 };
    let program = lower::lower(&config, &model.graph, &target, options).unwrap();
    (program, config.kernel, target)
}

#[test]
fn every_nanosecond_is_somewhere() {
    let Predicted { mut timeline, .. } = traced();
    let total = timeline.total();
    assert_eq!(total.sum(), (timeline.span() * timeline.workers.len() as u64) as i64);
    assert!(total.bound > 0 && total.waiting > 0 && total.bubbles() > 0, "{total:?}");
    let of_ops: i64 =
        timeline.by(|task| task.name).values().map(|s| s.bound + s.excess + s.waiting).sum();
    assert_eq!(of_ops + total.bubbles(), total.sum());
    assert_eq!(timeline.moved, 0, "virtual time runs forwards");
    // Marks out of order are detected, even where arithmetic wraps: the parts would still add up.
    let second = timeline.workers[0].start + 1;
    timeline.tasks[second].begin = timeline.tasks[second].end + 1;
    let found = std::panic::catch_unwind(|| timeline.total()).expect_err("it is found out");
    let said = found.downcast_ref::<String>().expect("a message");
    assert!(said.starts_with("a mark at"), "{said}");
}

#[test]
fn the_bound_is_that_of_the_bytes() {
    let Predicted { timeline, us, .. } = traced();
    let bytes: u64 = timeline.tasks.iter().map(|task| task.bytes).sum();
    let bandwidth = ir::Target::by_name("h200").expect("it is known").bandwidth;
    let exact = bytes as f64 * 1e9 / bandwidth as f64 * timeline.workers.len() as f64;
    assert!((timeline.total().bound as f64 - exact).abs() <= 1.0, "rounded once, not once a task");
    assert!((timeline.span() as f64 / 1000.0 - us).abs() < 0.001, "the step that is predicted");
}

#[test]
fn who_is_waited_for_has_just_ended() {
    let Predicted { timeline, .. } = traced();
    let alone = timeline.tasks.iter().filter(|task| task.producer.is_none());
    let alone: BTreeSet<&str> = alone.map(|task| timeline.name(task)).collect();
    assert_eq!(alone, BTreeSet::from(["embed", "nop"]), "all others wait for somebody");
    for task in &timeline.tasks {
        if let Some(producer) = task.producer {
            assert!(timeline.tasks[producer].end <= task.arrived, "{task:?}");
        }
    }
}

#[test]
fn the_trace_file_tells_the_same() {
    let Predicted { timeline, counters, .. } = traced();
    let mut file = Vec::new();
    write(&mut file, &timeline, &counters, "toy").expect("memory takes it");
    let document: Value = serde_json::from_slice(&file).expect("it is JSON");
    let events = document["traceEvents"].as_array().expect("a list");
    let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).collect::<Vec<_>>();
    let ns = |event: &Value, key: &str| (event[key].as_f64().expect(key) * 1000.0).round() as u64;
    assert_eq!(of("M").len(), 1 + timeline.workers.len());
    let slices = of("X");
    assert_eq!(slices.len(), 5 * timeline.tasks.len(), "a task and its four parts");
    let mut waiting = 0;
    for (task, five) in timeline.tasks.iter().zip(slices.chunks(5)) {
        let whole = five[0];
        assert_eq!((ns(whole, "ts"), ns(whole, "dur")), (task.begin, task.end - task.begin));
        assert_eq!(
            (whole["name"].as_str(), &whole["tid"]),
            (Some(timeline.name(task)), &json!(task.worker))
        );
        assert_eq!(five[1]["name"], "wait");
        waiting += ns(five[1], "dur");
        let mut end = task.begin;
        for part in &five[1..] {
            assert_eq!((ns(part, "ts"), &part["tid"]), (end, &whole["tid"]), "side by side");
            end += ns(part, "dur");
        }
        assert_eq!(end, task.end);
    }
    assert_eq!(waiting as i64, timeline.total().waiting);
    let bound: u64 = slices.iter().filter_map(|event| event["args"]["bound_ns"].as_u64()).sum();
    assert_eq!(bound as i64, timeline.total().bound);
    let (from, to) = (of("s"), of("f"));
    assert!(!from.is_empty() && from.len() == to.len());
    for (from, to) in from.iter().zip(&to) {
        assert_eq!(from["id"], to["id"]);
        assert!(ns(from, "ts") <= ns(to, "ts") && from["tid"] != to["tid"], "{from} to {to}");
    }
    let named = |name: &str| -> Vec<i64> {
        let is = |event: &&&Value| event["name"].as_str().is_some_and(|n| n.starts_with(name));
        of("C").iter().filter(is).filter_map(|event| event["args"]["bytes"].as_i64()).collect()
    };
    let bytes: u64 = timeline.tasks.iter().map(|task| task.bytes).sum();
    assert_eq!(named("bytes multiplied").iter().sum::<i64>() as u64, bytes);
    assert!(named("ring depth").iter().collect::<BTreeSet<_>>().len() > 1);
    assert!(named("bytes in flight").iter().any(|&bytes| bytes > 0));
}

#[test]
fn the_digest_is_small_and_names_the_worst_wait() {
    let Predicted { timeline, .. } = traced();
    let text = digest::write(&timeline, &"toy/".repeat(3000));
    assert!(text.len() <= digest::BYTES_MAX);
    let worst = timeline.tasks.iter().max_by_key(|task| task.arrived - task.begin).expect("one");
    let us = format!("{:.2}\t", (worst.arrived - worst.begin) as f64 / 1000.0);
    assert!(text.contains(&us), "{us:?} is not in\n{text}");
    // Many workers wait for the same task: that is one line.
    let (_, waits) = text.split_once("## the longest waits").expect("they are there");
    let lines = waits.lines().skip(1).take_while(|line| !line.is_empty());
    let producers: Vec<&str> = lines.filter_map(|line| line.split('\t').nth(2)).collect();
    assert!(
        producers.len() > 2 && producers.len() == producers.iter().collect::<BTreeSet<_>>().len()
    );
    for heading in ["## by op", "## by layer", "## waits", "## bubbles"] {
        assert!(text.contains(heading), "{heading}");
    }
}

#[test]
fn the_critical_path_has_no_gap() {
    let Predicted { timeline, .. } = traced();
    let path = Path::new(&timeline);
    let mut end = timeline.end;
    for piece in &path.pieces {
        assert_eq!(piece.to, end, "{piece:?}");
        end = piece.from;
    }
    assert_eq!(end, timeline.start);
    let us = |cause| -> u64 {
        path.pieces.iter().filter(|piece| piece.cause == cause).map(|p| p.to - p.from).sum()
    };
    assert!(us(Cause::HandOff) > 0 && us(Cause::Products) > 0, "{:?}", path.pieces);
}

#[test]
fn an_input_on_its_way_is_a_hand_off_and_one_that_was_there_is_looked_at() {
    // Workers that attended are late for the merge, but not so late that its input is there.
    let (program, kernel, target) = lowered("smollm2-135m");
    let mut timeline = predicted(&program, &kernel, &target, 128, Rates::shipped()).timeline;
    let ends: Vec<u64> = timeline.tasks.iter().map(|task| task.end).collect();
    let mut late = 0;
    for index in 0..timeline.tasks.len() {
        let task = &timeline.tasks[index];
        let Some(end) = task.producer.map(|of| ends[of]) else { continue };
        if timeline.name(task) != "merge" || end >= task.begin {
            continue;
        }
        late += 1;
        assert_eq!(timeline.hand_off(index), Some(task.arrived - end), "{task:?}");
        // The same look much later finds what was there.
        let task = &mut timeline.tasks[index];
        (task.begin, task.arrived) = (task.begin + 10_000, task.arrived + 10_000);
        assert_eq!(timeline.hand_off(index), None, "{:?}", timeline.tasks[index]);
    }
    assert_eq!(late, 3 * 30, "three workers attend in each of 30 layers");
}

#[test]
fn the_identity_edit_is_exact() {
    let Predicted { timeline, .. } = traced();
    let same = replay(&timeline, &Edit::default());
    assert!((same.span - timeline.span() as f64).abs() < 1e-6, "{}", same.span);
    for (task, end) in timeline.tasks.iter().zip(&same.ends) {
        assert!((end - (task.end - timeline.start) as f64).abs() < 1e-6, "{task:?} {end}");
    }
}

#[test]
fn edits_move_the_span_as_far_as_the_path_allows() {
    let Predicted { timeline, .. } = traced();
    let span = timeline.span() as f64;
    let path = Path::new(&timeline);
    let on_path = |cause| -> f64 {
        let of = path.pieces.iter().filter(|piece| piece.cause == cause);
        of.map(|piece| (piece.to - piece.from) as f64).sum()
    };
    let at = |edit: Edit| replay(&timeline, &edit).span;
    // Halving what is on the path saves at most half of it, since another path may take over.
    let hop = at(Edit { hop: 0.5, ..Edit::default() });
    assert!(hop < span && hop >= span - 0.5 * on_path(Cause::HandOff) - 1e-6, "{hop} {span}");
    let slow = at(Edit { hop: 2.0, ..Edit::default() });
    assert!(slow >= span + on_path(Cause::HandOff) - 1e-6, "the recorded path is one of them");
    let stream = at(Edit { stream: 2.0, ..Edit::default() });
    assert!(stream <= span);
    for name in 0..timeline.names.len() {
        let none = at(Edit { ops: vec![(name, 0.0)], ..Edit::default() });
        assert!(none <= span + 1e-6, "{}", timeline.names[name]);
    }
}

#[test]
fn edits_are_read_and_everything_wrong_is_said() {
    let names = ["down".to_owned(), "attention".to_owned()];
    let read = Edit::parse("hop=0.5,op.attention=0,balance=perfect,stream=2x", &names);
    let edit = Edit { hop: 0.5, stream: 2.0, ops: vec![(1, 0.0)], balanced: true };
    assert_eq!(read, Ok(edit));
    assert_eq!(Edit::parse("", &names), Ok(Edit::default()));
    let said =
        Edit::parse("hop=-1,op.up=1,stream=0,balance=0.5,x", &names).expect_err("it is wrong");
    for part in
        ["`hop=-1`", "no op `up`; there are down, attention", "`stream=0`", "`balance=0.5`", "`x`"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn the_identity_edit_is_exact_though_clocks_differ() {
    let Predicted { timeline, mut records, .. } = traced();
    // The clocks of two workers are up to 20 us apart: an input may arrive before its producer's end.
    for record in &mut records {
        record.begin +=
            (1 << 60) + u64::from(record.worker.wrapping_mul(2_654_435_761) >> 8) % 20_000;
    }
    let (program, bytes) = program_and_bytes();
    let clock = Clock { ns_per_cycle: 1.0, span: None, per_device: false, polls_after_ready: true };
    let skewed = timeline.again(&program, &records, &bytes, 4_800_000_000_000, clock);
    let late = |task: &crate::timeline::Task| {
        task.producer.is_some_and(|of| skewed.tasks[of].end > task.arrived)
    };
    assert!(skewed.tasks.iter().any(late), "some producers end after the arrival");
    let same = replay(&skewed, &Edit::default());
    assert!((same.span - skewed.span() as f64).abs() < 1e-6, "{} {}", same.span, skewed.span());
}

#[test]
fn causes_add_up_though_clocks_differ() {
    let Predicted { timeline, mut records, .. } = traced();
    for record in &mut records {
        record.begin +=
            (1 << 60) + u64::from(record.worker.wrapping_mul(2_654_435_761) >> 8) % 20_000;
    }
    let (program, bytes) = program_and_bytes();
    let clock = Clock { ns_per_cycle: 1.0, span: None, per_device: false, polls_after_ready: true };
    let skewed = timeline.again(&program, &records, &bytes, 4_800_000_000_000, clock);
    let (one, two) = ([timeline], [skewed]);
    // `new` asserts that they add up.
    let there = crate::Residuals::new(&crate::Expected::new(&[&one]), &two);
    let back = crate::Residuals::new(&crate::Expected::new(&[&two]), &one);
    assert_eq!(there.growth_ns, -back.growth_ns);
}

/// Steps of two and of four GPUs, whose clocks are milliseconds apart, are those of GPUs with one clock.
#[test]
fn clocks_of_gpus_are_put_right_by_what_they_hand_each_other() {
    for (target, ahead) in
        [("h200x2", vec![0, 7_000_000]), ("h200x4", vec![0, -3_000_000, 40, 9_123_456])]
    {
        let model = model::load("toy-2l").unwrap();
        let target = Target::by_name(target).unwrap();
        let config = ir::schedule::default_config(&model.graph, &target);
        let config = validate(config, &model.graph, &target).unwrap();
        let options = lower::Options { kv_capacity: 256 };
        let program = lower::lower(&config, &model.graph, &target, options).unwrap();
        let Predicted { timeline, mut records, .. } =
            predicted(&program, &config.kernel, &target, 128, Rates::shipped());
        let (each, base) = (program.workers_per_device() as u32, 1_u64 << 60);
        for record in &mut records {
            let ahead: i64 = ahead[(record.worker / each) as usize];
            record.begin = (base + record.begin).wrapping_add_signed(ahead);
        }
        let bytes = Predictor::new(&program, &config.kernel, &target, 128).task_bytes();
        let clock =
            Clock { ns_per_cycle: 1.0, span: None, per_device: true, polls_after_ready: false };
        let again = timeline.again(&program, &records, &bytes, target.total_bandwidth(), clock);
        assert!(again.clocks.within_ns < 3_000, "{:?}", again.clocks);
        for (found, ahead) in again.clocks.ahead_ns.iter().zip(&ahead) {
            assert!((found - ahead).abs() < 100, "{:?}, not {ahead}", again.clocks);
        }
        let span = timeline.tasks.iter().map(|task| task.end).max().unwrap();
        let first = timeline.tasks.iter().map(|task| task.begin).min().unwrap();
        assert!(again.span().abs_diff(span - first) < 200, "{} {}", again.span(), span - first);
        assert_eq!(again.worker_name(each as usize + 1), "GPU 1 worker 1");
        again.total(); // asserts that the parts add up
        // Without it the step would seem to last for milliseconds.
        let clock = Clock { per_device: false, ..clock };
        let apart = timeline.again(&program, &records, &bytes, target.total_bandwidth(), clock);
        assert!(apart.span() > 5_000_000);
    }
}
