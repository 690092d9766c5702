//! One step on one page of HTML: bounds, causes, what-ifs, the timeline of every worker, and where the prediction is wrong.
//! The page holds its data and fetches nothing.

use serde_json::{Value, json};
use trace::{Edit, Timeline, replay};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("../html/style.css");

/// Factors of hand-offs and of the stream that the page's sliders stop at.
const HOPS: [f64; 9] = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0];
const STREAMS: [f64; 7] = [0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 1000.0];

/// The page. `document` is the schedule's part of the answer.
pub(super) fn render(
    title: &str,
    kind: &str,
    document: &Value,
    timeline: &Timeline,
    predicted: &Timeline,
) -> String {
    let tasks = |of: &dyn Fn(&trace::timeline::Task) -> u64| -> Value {
        timeline.tasks.iter().map(|task| Value::from(of(task))).collect()
    };
    let start = timeline.start;
    let data = json!({
        "title": title,
        "kind": kind,
        "us_per_token": document["us_per_token"],
        "span_ns": timeline.span(),
        "workers": timeline.workers.len(),
        "task_count": timeline.tasks.len(),
        "bounds": document["bounds"],
        "names": timeline.names,
        "critical_path": document["critical_path"],
        "what_if": what_ifs(timeline),
        "residuals": residuals(timeline, predicted),
        "tasks": {
            "worker": tasks(&|task| task.worker.into()),
            "name": tasks(&|task| task.name as u64),
            "layer": tasks(&|task| task.layer.into()),
            "begin": tasks(&|task| task.begin - start),
            "arrived": tasks(&|task| task.arrived - start),
            "staged": tasks(&|task| task.staged - start),
            "multiplied": tasks(&|task| task.multiplied - start),
            "end": tasks(&|task| task.end - start),
            "starved": tasks(&|task| task.starved.min(task.multiplied - task.staged)),
        },
    });
    // A title may hold the path of a file: nothing in it may end the script.
    let data = data.to_string().replace('<', "\\u003c");
    PAGE.replacen("/*STYLE*/", STYLE, 1).replacen("/*DATA*/", &data, 1)
}

/// The span for every position of the sliders, and without each op.
fn what_ifs(timeline: &Timeline) -> Value {
    let span = |edit: &Edit| replay(timeline, edit).span.round();
    let mut spans = Vec::new();
    for hop in HOPS {
        for stream in STREAMS {
            for balanced in [false, true] {
                spans.push(span(&Edit { hop, stream, balanced, ops: Vec::new() }));
            }
        }
    }
    let without = |(place, name): (usize, &String)| json!({"op": name, "span_ns": span(&Edit { ops: vec![(place, 0.0)], ..Edit::default() })});
    let ops: Vec<Value> = timeline.names.iter().enumerate().map(without).collect();
    json!({"hop": HOPS, "stream": STREAMS, "span_ns": spans, "ops": ops})
}

/// Mean nanoseconds by op and worker that a task's own time is longer than predicted.
fn residuals(timeline: &Timeline, predicted: &Timeline) -> Value {
    let mut sums = vec![vec![(0_i64, 0_i64); timeline.workers.len()]; timeline.names.len()];
    for (task, expected) in timeline.tasks.iter().zip(&predicted.tasks) {
        let own = |task: &trace::timeline::Task| (task.end - task.arrived) as i64;
        let (sum, count) = &mut sums[task.name][task.worker as usize];
        *sum += own(task) - own(expected);
        *count += 1;
    }
    let mean = |&(sum, count): &(i64, i64)| (count > 0).then(|| sum / count);
    let rows: Vec<Vec<Option<i64>>> =
        sums.iter().map(|row| row.iter().map(mean).collect()).collect();
    json!({"ops": timeline.names, "ns": rows})
}
