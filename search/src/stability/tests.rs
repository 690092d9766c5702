use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};

use super::*;

const LIMITS: Limits =
    Limits { interval_pct: 1.0, noise_pct: 1.0, spread_pct: 2.0, throttling: false };

fn required() -> Requirements {
    Requirements {
        card: Some("NVIDIA H200".to_owned()),
        alone: true,
        stable_clocks: true,
        driver_min: Some("570.86".to_owned()),
    }
}

/// A process with blocks around `us`; `noise` is the relative distance of the extremes.
fn process(us: f64, noise: f64, seed: u64) -> Process {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut one = || us * (1.0 + noise * (rng.random::<f64>() - 0.5));
    let reading =
        Clocks { sm_mhz: 1980, memory_mhz: 3201, throttled: Vec::new(), ..Clocks::default() };
    Process {
        correct: true,
        rejected_reason: None,
        latency_kind: Some(LatencyKind::MeasuredGpu),
        dtype: "bf16".to_owned(),
        conditions: Some(Conditions {
            card: "NVIDIA H200".to_owned(),
            other_processes: Some(0),
            driver: "580.159.04".to_owned(),
            ..Conditions::default()
        }),
        clocks: vec![reading.clone(), reading],
        samples_us: (0..24).map(|_| [one(), one(), one(), one()]).collect(),
        schedule_id: Some("a".to_owned()),
        program_id: Some("b".to_owned()),
        kernel_id: Some("c".to_owned()),
    }
}

fn row() -> Vec<Process> {
    vec![process(100.0, 0.01, 1), process(100.4, 0.01, 2), process(99.8, 0.01, 3)]
}

fn judged(processes: &[Process]) -> Result<Stable, Vec<String>> {
    Stable::new(&required(), &LIMITS, processes, 7)
}

#[test]
fn a_quiet_row_is_a_result_with_the_figures_of_all_its_samples() {
    let stable = judged(&row()).expect("it is quiet");
    assert!((99.5..100.5).contains(&stable.us), "{stable:?}");
    assert!(stable.ci_us[0] <= stable.us && stable.us <= stable.ci_us[1]);
    assert!(stable.interval_pct > 0.0 && stable.noise_pct > 0.0 && stable.spread_pct > 0.0);
    assert_eq!(judged(&row()), Ok(stable), "the same samples, the same figures");
}

/// Every gate refuses a row that is one edit away from a result, and names only what was edited.
#[test]
fn each_gate_refuses_a_row_that_is_one_edit_from_passing() {
    type Edit = fn(&mut Vec<Process>);
    fn conditions(row: &mut [Process]) -> &mut Conditions {
        row[1].conditions.as_mut().expect("it has some")
    }
    let edits: [(&str, Edit); 14] = [
        ("process 2: its results are wrong: worker 3", |row| {
            (row[1].correct, row[1].rejected_reason) = (false, Some("worker 3".to_owned()));
        }),
        ("process 2: it measured nothing", |row| {
            row[1].latency_kind = Some(LatencyKind::Predicted);
        }),
        ("process 2: it has 3 rounds, an interval takes 4", |row| {
            row[1].samples_us = vec![[100.0; 4]; 3];
        }),
        ("process 2: 1 other processes used the card", |row| {
            conditions(row).other_processes = Some(1);
        }),
        ("process 2: an unknown number of other processes", |row| {
            conditions(row).other_processes = None;
        }),
        ("process 2: the clocks could not be read", |row| row[1].clocks.clear()),
        ("process 2: the SM clock changed: 1755 to 1980 MHz", |row| {
            row[1].clocks[1].sm_mhz = 1755;
        }),
        ("process 2: the card was throttled: power cap", |row| {
            row[1].clocks[0].throttled.push("power cap".to_owned());
        }),
        ("different schedules", |row| row[2].schedule_id = None),
        ("different programs", |row| row[2].program_id = Some("x".to_owned())),
        ("different kernels", |row| row[2].kernel_id = Some("x".to_owned())),
        ("the CUDA version was", |row| conditions(row).cuda = "12.4".to_owned()),
        ("the program against itself (A/A) seems", |row| {
            row[1].samples_us.iter_mut().for_each(|round| {
                round[0] *= 1.015;
                round[3] *= 1.015;
            });
        }),
        ("the medians of the processes are", |row| {
            row[2].samples_us.iter_mut().flatten().for_each(|us| *us *= 1.025);
        }),
    ];
    for (says, edit) in edits {
        let mut row = row();
        edit(&mut row);
        let reasons = judged(&row).expect_err(says);
        assert!(reasons.len() == 1 && reasons[0].contains(says), "{says}: {reasons:?}");
    }
}

#[test]
fn a_required_card_and_driver_are_compared_as_they_are_named() {
    for (card, driver, says) in [
        ("NVIDIA H200", "570.86", None),
        ("NVIDIA H200", "570.86.01", None),
        ("NVIDIA H200", "1000.1", None),
        ("NVIDIA H200", "570.9", Some("the driver is 570.9")),
        ("NVIDIA H200", "unknown", Some("the driver is unknown")),
        ("NVIDIA H100 80GB HBM3", "580.1", Some("the card is NVIDIA H100")),
    ] {
        let mut row = row();
        for process in &mut row {
            let conditions = process.conditions.as_mut().expect("it has some");
            (conditions.card, conditions.driver) = (card.to_owned(), driver.to_owned());
        }
        let reasons = judged(&row).err().unwrap_or_default();
        assert_eq!(reasons.len(), if says.is_some() { 3 } else { 0 }, "{driver}: {reasons:?}");
        assert!(reasons.iter().all(|reason| reason.contains(says.unwrap_or_default())));
    }
}

/// The width of the interval grows with the noise: some rows pass, others do not, and none passes with a wider one.
#[test]
fn a_wide_interval_is_refused_and_a_narrow_one_is_not() {
    for seed in 0..20 {
        let of = |noise: f64| judged(&[process(50.0, noise, seed)]);
        assert!(of(0.005).is_ok(), "seed {seed}");
        let reasons = of(0.2).expect_err("noisy");
        assert!(reasons.iter().any(|why| why.contains("99% interval")), "{reasons:?}");
        for noise in [0.01, 0.02, 0.04, 0.08] {
            if let Ok(stable) = of(noise) {
                let figures = [stable.interval_pct, stable.noise_pct, stable.spread_pct];
                assert!(figures.iter().all(|pct| *pct <= 1.0), "seed {seed}: {stable:?}");
            }
        }
    }
}

/// Gates that are not required do not refuse; every reason is named at once.
#[test]
fn all_reasons_are_given_and_what_is_not_required_is_none() {
    let mut row = row();
    row[0].clocks[1] = Clocks {
        sm_mhz: 900,
        memory_mhz: 1,
        throttled: vec!["heat".to_owned()],
        ..Clocks::default()
    };
    row[0].conditions = None;
    row[2].correct = false;
    assert!(judged(&row).expect_err("much is wrong").len() >= 6);
    row[2].correct = true;
    let limits = Limits { throttling: true, ..LIMITS };
    assert!(Stable::new(&Requirements::default(), &limits, &row, 7).is_ok());
    assert_eq!(judged(&[]).expect_err("empty"), ["no process measured it"]);
}

/// A sample that is no number never passes.
#[test]
fn samples_that_are_no_numbers_are_no_result() {
    for value in [f64::NAN, f64::INFINITY] {
        let mut row = row();
        row[1].samples_us.iter_mut().flatten().for_each(|us| *us = value);
        assert!(judged(&row).is_err(), "{value}");
    }
}
