//! Random legal schedules.
//!
//! Half of the draws are **wide**: every knob takes any legal value. They show the effect of a knob among bad values of
//! the others. The other half are **near** a schedule that is known to be good (or the neutral one), one to four knobs
//! away: they are typical of the schedules that a search tries.

use ir::schedule::{Knob, ScheduleConfig, Value, largest_stages, legal_values, validate};
use ir::{Graph, Target};
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use search::{changes, fit_caps};

/// Maximum number of knobs that a near draw changes.
const EDITS_MAX: usize = 4;

/// How a schedule was drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drawn {
    /// Every knob at random.
    Wide,
    /// Some knobs of a known schedule changed.
    Near {
        /// Id of the known schedule.
        of: String,
        /// Knobs that differ from it.
        edits: usize,
    },
}

/// The inputs of a random sample.
#[derive(Clone, Copy, Debug)]
pub struct RandomSample<'a> {
    /// The model.
    pub graph: &'a Graph,
    /// The GPU.
    pub target: &'a Target,
    /// Known schedules, which near draws start from.
    pub known: &'a [ScheduleConfig],
    /// Seed of the draws.
    pub seed: u64,
}

impl<'a> RandomSample<'a> {
    /// An endless sequence of legal schedules, wide and near in turn. They may repeat.
    pub fn draws(self) -> impl Iterator<Item = (Drawn, ScheduleConfig)> + 'a {
        let values = |&knob: &Knob| (knob, legal_values(knob, self.graph, self.target));
        let space: Vec<(Knob, Vec<Value>)> = Knob::ALL.iter().map(values).collect();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(self.seed);
        let mut wide = false;
        std::iter::repeat_with(move || {
            wide = !wide;
            let known = if wide { None } else { self.known.choose(&mut rng) };
            loop {
                let (drawn, config) = match known {
                    Some(known) => self.near(known, &space, &mut rng),
                    None => (Drawn::Wide, self.wide(&space, &mut rng)),
                };
                // An edit that the ring has no room for is cut back, so a near draw may end up without a change.
                let edited = !matches!(drawn, Drawn::Near { edits: 0, .. });
                if edited && validate(config, self.graph, self.target).is_ok() {
                    return (drawn, config);
                }
            }
        })
    }

    /// Sets every knob at random. The ring is drawn from the sizes that fit: independent ring knobs would mostly be
    /// illegal together.
    fn wide(&self, space: &[(Knob, Vec<Value>)], rng: &mut Xoshiro256PlusPlus) -> ScheduleConfig {
        let mut config = ScheduleConfig::default();
        for (knob, values) in space {
            set(&mut config, *knob, values, rng);
        }
        config.pipeline.stages = 1;
        let most = largest_stages(&config, self.graph, self.target).unwrap_or(2);
        let ring = &mut config.pipeline;
        ring.stages = rng.random_range(2..=most.max(2));
        let caps = greatest(space, Knob::PipelineInFlightBytes) / ring.stage_bytes;
        let all = rng.random_range(1..=caps.clamp(1, ring.stages));
        ring.in_flight_bytes = all * ring.stage_bytes;
        ring.in_flight_before_wait_bytes = rng.random_range(1..=all) * ring.stage_bytes;
        config
    }

    /// Sets a few knobs of a known schedule at random, and shrinks the ring to the size that fits.
    fn near(
        &self,
        known: &ScheduleConfig,
        space: &[(Knob, Vec<Value>)],
        rng: &mut Xoshiro256PlusPlus,
    ) -> (Drawn, ScheduleConfig) {
        let mut config = *known;
        let mut knobs: Vec<_> = space.iter().collect();
        knobs.shuffle(rng);
        for (knob, values) in &knobs[..rng.random_range(1..=EDITS_MAX.min(knobs.len()))] {
            let others = values.iter().copied().filter(|&value| value != known.get(*knob));
            set(&mut config, *knob, &others.collect::<Vec<_>>(), rng);
        }
        if let Some(most) = largest_stages(&config, self.graph, self.target) {
            config.pipeline.stages = config.pipeline.stages.min(most);
        }
        fit_caps(&mut config);
        let edits = changes(known, &config).len();
        (Drawn::Near { of: known.id(), edits }, config)
    }
}

/// Sets a knob to one of its values, if there is one.
fn set(config: &mut ScheduleConfig, knob: Knob, values: &[Value], rng: &mut Xoshiro256PlusPlus) {
    if let Some(&value) = values.choose(rng) {
        let outcome = config.set(knob, value);
        debug_assert!(outcome.is_ok(), "{knob} takes every value of its own domain");
    }
}

fn greatest(space: &[(Knob, Vec<Value>)], knob: Knob) -> u32 {
    let of = |value: &Value| match value {
        Value::Number(number) => *number,
        Value::Name(_) => 0,
    };
    let row = space.iter().find(|(other, _)| *other == knob);
    row.and_then(|(_, values)| values.iter().map(of).max()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ir::schedule::neutral_config;

    use super::*;

    #[test]
    fn draws_are_legal_repeatable_and_cover_every_knob() {
        let model = model::preset("llama-3.2-1b").unwrap();
        let target = Target::by_name("h200").unwrap();
        let known = [neutral_config(&model.graph, &target)];
        let sample =
            |seed| RandomSample { graph: &model.graph, target: &target, known: &known, seed };
        let draws: Vec<_> = sample(1).draws().take(200).collect();
        assert_eq!(draws, sample(1).draws().take(200).collect::<Vec<_>>());
        assert_ne!(draws[..10], sample(2).draws().take(10).collect::<Vec<_>>()[..]);
        for (drawn, config) in &draws {
            assert!(validate(*config, &model.graph, &target).is_ok());
            if let Drawn::Near { of, edits } = drawn {
                assert_eq!(*of, known[0].id());
                // The caps of the ring may follow a changed size.
                assert!((1..=6).contains(edits), "{edits} edits");
                assert_eq!(*edits, changes(&known[0], config).len());
            }
        }
        let wide = draws.iter().filter(|(drawn, _)| *drawn == Drawn::Wide);
        assert_eq!(wide.clone().count(), 100);
        for &knob in Knob::ALL {
            let values: BTreeSet<_> = wide.clone().map(|(_, config)| config.get(knob)).collect();
            assert!(values.len() > 1, "{knob} never varies");
        }
    }
}
