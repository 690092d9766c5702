//! What is expected of changes, on the recorded checks: the newest run of each model is judged by the ones before it alone.

use search::checks::{Checks, Past};

const CHECKS: &str = include_str!("../../corpus/checks/h200.jsonl");
const CARD: &str = "NVIDIA H200";
/// Checks of one run.
const RUN: usize = 40;

#[test]
fn the_newest_run_of_each_model_is_predicted_within_a_point_from_the_runs_before() {
    let all = Checks::read(CHECKS).unwrap();
    for model in ["smollm2-135m", "qwen3-0.6b", "llama-3.2-1b"] {
        let of: Vec<usize> = (0..all.each.len()).filter(|&i| all.each[i].model == model).collect();
        let (before, newest) = of.split_at(of.len() - RUN);
        let newest: Vec<_> = newest.iter().map(|&i| all.each[i].clone()).collect();
        let mut past = all.clone();
        past.each.truncate(before.last().map_or(0, |last| last + 1));
        let past = Past::new(&past, CARD);
        let judged = past.judge(&newest, all.schedule(&newest[0]).unwrap());
        let (figures, (held, made)) = (judged.figures(), past.held(&judged));
        println!("{model}: {}, {held} of {made} held", judged.say());
        assert_eq!((figures.checks, made), (RUN, RUN));
        assert!(figures.median_error_pct.unwrap() <= 1.0, "{model}: {figures:?}");
        assert!(figures.sign_right * 10 >= figures.above_1_pct * 9, "{model}: {figures:?}");
    }
}
