use super::*;

fn whole() -> Vec<(Knob, Vec<Value>)> {
    Knob::ALL.iter().map(|&knob| (knob, knob.values())).collect()
}

fn past(from: &ScheduleConfig, to: &ScheduleConfig, gain: f64, kept: bool) -> TrialRecord {
    TrialRecord { config: *to, changes: changes(from, to), gain: Some(gain), kept, score: None }
}

/// Runs a search of `trials` trials in which every proposal is legal; `gain` gives the result of each.
fn run(
    trials: u64,
    seed: u64,
    gain: impl Fn(&ScheduleConfig) -> f64,
) -> Vec<(Origin, TrialRecord)> {
    let space = whole();
    let proposer = SearchSpace { space: space.clone(), seed, sweep: trials / 2, short: false };
    let mut incumbent = ScheduleConfig::default();
    let mut history: Vec<(Origin, TrialRecord)> = Vec::new();
    for trial in 1..trials {
        let pasts: TrialRecords = history.iter().map(|(_, past)| past.clone()).collect();
        let tried = |config: &ScheduleConfig| {
            *config == ScheduleConfig::default() || pasts.iter().any(|past| past.config == *config)
        };
        let new = |(_, config): &(Origin, ScheduleConfig)| !tried(config);
        let (origin, config) = proposer.draws(trial, incumbent, &pasts).find(new).unwrap();
        let saved = 1.0 - (1.0 - gain(&config)) / (1.0 - gain(&incumbent));
        let kept = saved > 0.01;
        history.push((origin, past(&incumbent, &config, saved, kept)));
        if kept {
            incumbent = config;
        }
    }
    history
}

#[test]
fn equal_histories_give_equal_draws() {
    let space = whole();
    let proposer = SearchSpace { space: space.clone(), seed: 7, sweep: 4, short: false };
    let default = ScheduleConfig::default();
    let mut other = default;
    other.kernel.poll_sleep_ns = 0;
    let history: TrialRecords = [past(&default, &other, -0.1, false)].into_iter().collect();
    for trial in 1..40 {
        let draws = || proposer.draws(trial, default, &history).take(50).collect::<Vec<_>>();
        assert_eq!(draws(), draws());
    }
}

#[test]
fn a_sweep_touches_every_knob_before_anything_is_left_to_chance() {
    let history = run(80, 1, |_| 0.0);
    let touched: std::collections::BTreeSet<Knob> =
        history.iter().flat_map(|(_, past)| past.changes.iter().map(|c| c.knob)).collect();
    assert_eq!(touched.len(), Knob::ALL.len());
    let sweep: Vec<_> = history.iter().filter(|(origin, _)| *origin == Origin::Sweep).collect();
    assert!(sweep.len() > 20, "{} moves", sweep.len());
    let part = |past: &TrialRecord| match past.changes[0].knob.path().split_once('.') {
        Some(("kernel", _)) => 1,
        Some(("pipeline", _)) => 2,
        _ => 0,
    };
    let parts: Vec<_> = sweep.iter().map(|(_, past)| part(past)).collect();
    assert!(parts.is_sorted(), "program knobs, then kernels, then the ring: {parts:?}");
}

#[test]
fn what_lost_alone_is_not_asked_for_again() {
    let history = run(120, 3, |_| 0.0);
    let mut single: Vec<Change> = Vec::new();
    for (_, past) in history.iter().filter(|(origin, _)| *origin == Origin::Step) {
        if let [change] = past.changes[..] {
            assert!(!single.contains(&change), "{change:?} twice");
            single.push(change);
        }
    }
    assert!(single.len() > 10);
}

#[test]
fn gains_too_small_alone_are_put_together() {
    // Three values, each half a per cent: no single one is kept.
    let small = |config: &ScheduleConfig| {
        let hits = [
            config.sm_assignment != ScheduleConfig::default().sm_assignment,
            config.tiling.attention.kv_block == 64,
            config.kernel.poll_sleep_ns == 0,
        ];
        0.006 * hits.iter().filter(|&&hit| hit).count() as f64
    };
    let history = run(64, 5, small);
    let kept: Vec<_> = history.iter().filter(|(_, past)| past.kept).collect();
    assert!(!kept.is_empty());
    assert!(kept.iter().any(|(origin, _)| *origin == Origin::Combine), "{kept:?}");
}

#[test]
fn caps_of_the_ring_follow_its_size() {
    let mut config = ScheduleConfig::default();
    config.pipeline.in_flight_bytes = 131_072;
    let stages = [(Knob::PipelineStages, Value::Number(2))];
    let pipeline = edited(&config, &stages).pipeline;
    assert_eq!((pipeline.in_flight_bytes, pipeline.in_flight_before_wait_bytes), (32_768, 32_768));
    let bytes = [(Knob::PipelineStageBytes, Value::Number(32_768))];
    config.pipeline.in_flight_before_wait_bytes = 24_576;
    assert_eq!(edited(&config, &bytes).pipeline.in_flight_before_wait_bytes, 32_768);
}

impl FromIterator<TrialRecord> for TrialRecords {
    fn from_iter<I: IntoIterator<Item = TrialRecord>>(trials: I) -> Self {
        let mut all = Self::default();
        trials.into_iter().for_each(|past| all.push(past));
        all
    }
}
