//! What a caller has a say in: a gate before a trial leads, and a goal.

use search::{Enough, Rejection};

use super::*;

/// What fails the caller's gate does not lead: the search goes on from its incumbent, its row says why, and a search that
/// absorbs the rows ends alike.
#[test]
fn what_fails_the_last_gate_is_a_failed_trial() {
    let bench = Bench::new();
    let mut device = bench.device(1, evict_wins);
    let mut asked = 0;
    let gate = |trial: &Trial| {
        asked += 1;
        assert_eq!((trial.outcome, trial.config.kernel.evict), (Outcome::Kept, Evict::First));
        let what = "planted".to_owned();
        Err(Rejection::Failed(DeviceError::Fault { reason: what }))
    };
    let search = Search::new(bench.gate(), Some(&mut device), bench.settings(16));
    let mut search = search.with_last_gate(Box::new(gate));
    let (_, trials) = all(&mut search);
    assert_eq!(search.champion().map(|champion| champion.trial), Some(0));
    drop(search);
    assert!(asked > 0);
    let failed: Vec<&Trial> = trials.iter().filter(|t| t.outcome == Outcome::Fault).collect();
    assert_eq!(failed.len(), asked, "{:?}", outcomes(&trials));
    for trial in failed {
        assert!(trial.why.starts_with("before it was to lead: ") && trial.gain.is_none());
        assert!(!trial.verdict.correct && trial.verdict.latency_us.is_none());
    }
    let mut device = bench.device(1, evict_wins);
    let mut again = Search::new(bench.gate(), Some(&mut device), bench.settings(16));
    for trial in &trials {
        again.absorb(through_json(trial)).unwrap();
    }
    assert_eq!(all(&mut again), (StoppedBy::Trials, Vec::new()));
}

/// A goal asks for enough, not for the best: what reached it is not raced against the others.
#[test]
fn a_goal_ends_a_search_without_a_race() {
    let bench = Bench::new();
    let run = |enough: Enough| {
        let mut device = bench.device(1, evict_wins);
        let settings = Settings { finalists: 5, ..bench.settings(16) };
        let search = Search::new(bench.gate(), Some(&mut device), settings);
        all(&mut search.until(enough))
    };
    let (stopped_by, trials) = run(Enough { goal: Some(0.2), stop_within: None });
    assert_eq!(stopped_by, StoppedBy::Goal);
    assert_eq!(trials.last().map(|trial| trial.outcome), Some(Outcome::Kept));
    let (_, all) = run(Enough::default());
    assert!(all.iter().any(|trial| trial.origin == Origin::Race) && all.len() > trials.len());
}
