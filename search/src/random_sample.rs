//! A random sample: random legal schedules, each gated as in a search and timed on its own. A cost model is fitted to
//! it and judged by it.
//!
//! Half of the draws are **wide**: every knob takes any legal value. They show the effect of a knob among bad values of
//! the others. The other half are **near** a schedule that is known to be good (or the neutral one), one to four knobs
//! away: they are typical of the schedules that a search tries.

use corpus::Conditions;
use ir::schedule::{Knob, ScheduleConfig, Value, largest_stages, legal_values, validate};
use ir::{Graph, Target};
use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::propose::{changes, fit_caps};

/// Schema of a row.
pub const OBSERVATION_SCHEMA: &str = "amk.observation.v1";

/// Maximum number of knobs that a near draw changes.
const EDITS_MAX: usize = 4;

/// How a schedule was drawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
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

/// One schedule that agreed and was timed: a row of `corpus/measurements/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// [`OBSERVATION_SCHEMA`].
    pub schema: String,
    /// The model, as `--model` takes it.
    pub model: String,
    /// The target of the schedule.
    pub target: String,
    /// Where it was measured.
    pub conditions: Conditions,
    /// Positions of the key/value cache.
    pub kv_capacity: u32,
    /// Tokens before the timed ones.
    pub context: u32,
    /// Tokens of a timed block.
    pub timed_tokens: u32,
    /// How it was drawn.
    pub drawn: Drawn,
    /// The schedule.
    pub config: ScheduleConfig,
    /// Hash of the program that it lowered to.
    pub program_id: String,
    /// Hash of the kernel build.
    pub kernel_id: String,
    /// Measured median, in microseconds per token.
    pub median_us: f64,
    /// 99% interval of the median.
    pub ci_us: [f64; 2],
    /// The blocks of the median, in the order in which they were timed.
    pub blocks_us: Vec<f64>,
    /// Roofline bound at the bandwidth measured in the same process.
    pub bound_us: f64,
    /// That bandwidth, in bytes per second.
    pub bandwidth: f64,
}

impl Observation {
    /// Position in the middle of the timed ones.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.context + self.timed_tokens / 2
    }
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
