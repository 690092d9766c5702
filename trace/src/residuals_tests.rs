//! Planted causes: found, named first, and charged with what waits for them. Steps without one: no finding.

use ir::program::{Program, Verified};
use ir::schedule::{ScheduleConfig, neutral_config, validate};
use ir::{KernelConfig, Target};

use crate::plant::{Plant, simulated};
use crate::{Cause, Expected, Residuals, Timeline};

const STEPS: u32 = 12;

struct Case {
    program: Verified<Program>,
    kernel: KernelConfig,
    target: Target,
    timeline: Timeline,
    expected: Expected,
}

impl Case {
    fn new(name: &str) -> Self {
        Self::with(name, |_| {})
    }

    fn with(name: &str, edit: impl Fn(&mut ScheduleConfig)) -> Self {
        let model = model::load(name).expect("a preset");
        let target = Target::by_name("h200").expect("it is known");
        let mut config = neutral_config(&model.graph, &target);
        edit(&mut config);
        let config = validate(config, &model.graph, &target).expect("it is legal");
        let options = lower::Options { kv_capacity: 256 };
        let program = lower::lower(&config, &model.graph, &target, options).expect("it lowers");
        let kernel = config.kernel;
        let runs = [1, 2].map(|seed| {
            simulated(&program, &kernel, (&target, 128), &Plant::Nothing, (seed, STEPS))
        });
        let expected = Expected::new(&[&runs[0], &runs[1]]);
        Self { program, kernel, target, timeline: runs[0][0].clone(), expected }
    }

    fn against(&self, plant: &Plant, seed: u64) -> Residuals {
        let at = (&self.target, 128);
        let steps = simulated(&self.program, &self.kernel, at, plant, (seed, STEPS));
        Residuals::new(&self.expected, &steps)
    }
}

#[test]
fn a_planted_cause_is_named_first_and_pays_for_what_it_delays() {
    let case = Case::new("smollm2-135m");
    let timeline = &case.timeline;
    // Rows of two single steps differ by this much where nothing is planted.
    let quiet = |seed| case.against(&Plant::Nothing, seed).causes.into_iter().map(|row| row.ns);
    let quiet = (300..310).flat_map(quiet).max().unwrap_or(0);
    let mut missed = Vec::new();
    for seed in 100..150 {
        let plant = Plant::draw(seed, timeline, Some(case.program.pipeline.in_flight));
        let residuals = case.against(&plant, seed);
        if !plant.is_named(&residuals.findings, timeline) {
            missed.push(format!("{plant}: {:?}", residuals.findings));
            continue;
        }
        // What waits for the planted tasks is charged to them, not to who waits. Fewer bytes in flight do slow hand-offs.
        let (charged, rest) = (residuals.causes[0].ns, &residuals.causes[1..]);
        let tenth = (residuals.growth_ns / 10).max(quiet);
        let pays = charged + tenth >= residuals.growth_ns && rest.iter().all(|row| row.ns <= tenth);
        if !pays && !matches!(plant, Plant::InFlight(_)) {
            missed.push(format!("{plant}: {} ns, {:?}", residuals.growth_ns, residuals.causes));
        }
    }
    assert!(quiet < 5_000, "the noise of a row hides every cause: {quiet} ns");
    assert!(missed.len() <= 2, "{} of 50 missed:\n{}", missed.len(), missed.join("\n"));
}

/// Most splits of a head have no keys at a short context: their tasks are not slowed, and are no reason to name the
/// others one by one.
#[test]
fn a_cause_in_attention_is_named_as_one_where_most_splits_have_no_keys() {
    let case = Case::with("smollm2-135m", |config| {
        config.tiling.attention.kv_block = 512;
        config.tiling.attention.kv_split = 16;
    });
    let tasks = case.timeline.tasks.iter();
    let attention = tasks.filter(|task| case.timeline.names[task.name] == "attention");
    let (idle, busy): (Vec<_>, Vec<_>) = attention.partition(|task| task.idle);
    assert_eq!(idle.len(), 15 * busy.len(), "one split of 16 has keys");
    for plant in ["attention.output=+2us", "*.output@l15=+2.75us"] {
        let plant: Plant = plant.parse().expect("a plant");
        let residuals = case.against(&plant, 100);
        let findings = &residuals.findings;
        assert!(plant.is_named(findings, &case.timeline), "{plant}: {findings:?}");
    }
}

/// Idle tasks are in no group, but what they delay is part of the growth: `Residuals::new` asserts the sum.
#[test]
fn what_idle_tasks_delay_is_in_the_sum() {
    let case = Case::new("smollm2-135m");
    let at = (&case.target, 128);
    let steps = |plant: &Plant, seed| {
        let mut steps = simulated(&case.program, &case.kernel, at, plant, (seed, STEPS));
        for step in &mut steps {
            let attention = step.names.iter().position(|name| name == "attention");
            step.tasks.iter_mut().for_each(|task| task.idle = Some(task.name) == attention);
        }
        steps
    };
    let expected = Expected::new(&[&steps(&Plant::Nothing, 1), &steps(&Plant::Nothing, 2)]);
    let slow: Plant = "attention.output=+2us".parse().expect("a plant");
    let residuals = Residuals::new(&expected, &steps(&slow, 100));
    let output =
        residuals.causes.iter().find(|row| row.finding.is_none() && row.cause == Cause::Output);
    assert!(residuals.growth_ns > 30_000, "attention was slow: {}", residuals.growth_ns);
    assert!(output.is_some_and(|row| row.ns > 30_000), "{:?}", residuals.causes);
}

#[test]
fn steps_without_a_planted_cause_have_no_finding() {
    let case = Case::new("smollm2-135m");
    for seed in 200..250 {
        let residuals = case.against(&Plant::Nothing, seed);
        assert!(residuals.findings.is_empty(), "seed {seed}: {:?}", residuals.findings);
    }
}

#[test]
fn plants_are_written_as_they_are_read() {
    let case = Case::new("smollm2-135m");
    for seed in 0..100 {
        let plant = Plant::draw(seed, &case.timeline, Some(6).filter(|_| seed < 50));
        assert_eq!(plant.to_string().parse(), Ok(plant));
    }
    let read = |text: &str| text.parse::<Plant>();
    let down = Plant::Tasks {
        cause: Cause::Output,
        op: Some("down".into()),
        worker: Some(17),
        layer: None,
        ns: 3000.0,
    };
    assert_eq!(read("down@w17=+3us"), Ok(down));
    for wrong in ["", "down", "down=3", "down@x1=3us", "down.issue=3us", "in_flight=0", "=nanus"] {
        let said = read(wrong).expect_err(wrong);
        assert!(said.contains(wrong) && said.contains("in_flight=STAGES"), "{said}");
    }
}
