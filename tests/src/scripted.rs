//! A scripted device: runs the whole search in tests without a GPU.

use std::sync::Arc;

use ir::program::{Program, Verified};
use ir::schedule::KernelConfig;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use reference_vm::argmax;
use search::{
    Contender, Costs, Device, DeviceError, DeviceInfo, Handle, Plan, ROUND, Ran, Samples, Side,
};

/// The noise of a real card, independent of the program: fractions of the time, correlated between consecutive blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Jitter {
    /// Standard deviation of a block's noise, after the part kept from the block before.
    pub sigma: f64,
    /// The fraction kept: autocorrelation.
    pub keeps: f64,
    /// Drift: the step per block of a random walk.
    pub walk: f64,
    /// Slowdown per block: a card that warms up.
    pub trend: f64,
    /// Fraction of interrupted blocks.
    pub spikes: f64,
    /// Typical length of an interruption; some are many times as long.
    pub spike: f64,
    /// Fraction of blocks at which the clock changes, and by how much.
    pub steps: (f64, f64),
}

/// The state of a card's noise.
#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    kept: f64,
    walked: f64,
    stepped: bool,
}

/// The scripted behaviour of one program.
#[derive(Clone, Debug, PartialEq)]
pub struct Behaviour {
    /// Microseconds per token.
    pub us: f64,
    /// Microseconds more for each position before the first timed one.
    pub us_per_position: f64,
    /// Width of the uniform noise on the time, as a fraction.
    pub noise: f64,
    /// Fails to load.
    pub load_error: Option<DeviceError>,
    /// Fails to run.
    pub run_error: Option<DeviceError>,
    /// Fails while it is timed.
    pub time_error: Option<DeviceError>,
    /// Returns wrong values.
    pub wrong: bool,
    /// Returns wrong values from this position on.
    pub wrong_from: Option<usize>,
    /// Returns wrong values only while it is timed.
    pub wrong_when_timed: bool,
    /// In every second fresh sequence the last bit of this word of this position's logits differs.
    pub unrepeatable: Option<(usize, usize)>,
}

impl Behaviour {
    /// A program that works and takes this long.
    #[must_use]
    pub fn takes(us: f64) -> Self {
        Self {
            us,
            us_per_position: 0.0,
            noise: 0.0,
            load_error: None,
            run_error: None,
            time_error: None,
            wrong: false,
            wrong_from: None,
            wrong_when_timed: false,
            unrepeatable: None,
        }
    }

    /// The same with noise.
    #[must_use]
    pub fn with_noise(self, noise: f64) -> Self {
        Self { noise, ..self }
    }
}

type Script<'a> = Box<dyn Fn(&Program, &KernelConfig) -> Behaviour + 'a>;

/// The device.
pub struct ScriptedDevice<'a> {
    script: Script<'a>,
    expected: Vec<Vec<f32>>,
    loaded: Vec<(String, KernelConfig, Behaviour)>,
    rng: Xoshiro256PlusPlus,
    bandwidth: Option<f64>,
    /// Its name and UUID.
    card: (String, Option<String>),
    jitter: Jitter,
    weather: Weather,
    /// Compiled kernel builds, and the running one.
    compiled: Vec<KernelConfig>,
    running: Option<KernelConfig>,
    costs: Costs,
    /// Positions of the sequence that each program left, by handle.
    sequences: Vec<usize>,
    /// Fresh sequences of each program, by handle.
    fresh: Vec<usize>,
    /// Loaded programs. A program loaded in two allocations is there twice, as on a real device.
    live: Vec<(Arc<Verified<Program>>, KernelConfig)>,
    /// Most programs loaded at the same time.
    pub most_live: usize,
    /// Fresh sequences that were run, for tests that count evaluations.
    pub runs: usize,
    /// Positions that were run untimed.
    pub positions: usize,
    /// Rounds that were timed.
    pub rounds: usize,
    /// Calls of `time`.
    pub timings: usize,
}

impl<'a> ScriptedDevice<'a> {
    /// A device whose programs behave as scripted; right answers are the first rows of `expected`.
    #[must_use]
    pub fn new(
        expected: Vec<Vec<f32>>,
        seed: u64,
        script: impl Fn(&Program, &KernelConfig) -> Behaviour + 'a,
    ) -> Self {
        Self {
            script: Box::new(script),
            expected,
            loaded: Vec::new(),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            bandwidth: Some(1e15),
            card: ("scripted".to_owned(), None),
            jitter: Jitter::default(),
            weather: Weather::default(),
            compiled: Vec::new(),
            running: None,
            costs: Costs::default(),
            sequences: Vec::new(),
            fresh: Vec::new(),
            live: Vec::new(),
            most_live: 0,
            runs: 0,
            positions: 0,
            rounds: 0,
            timings: 0,
        }
    }

    /// The same device with this bandwidth, which sets the bound; `None` if nobody measured it.
    #[must_use]
    pub fn with_bandwidth(self, bandwidth: impl Into<Option<f64>>) -> Self {
        Self { bandwidth: bandwidth.into(), ..self }
    }

    /// The same device as a card with this name and UUID.
    #[must_use]
    pub fn with_card(self, name: &str, uuid: &str) -> Self {
        Self { card: (name.to_owned(), Some(uuid.to_owned())), ..self }
    }

    /// The same device with the noise of a real card.
    #[must_use]
    pub fn with_jitter(self, jitter: Jitter) -> Self {
        Self { jitter, ..self }
    }

    fn behaviour(&self, program: Handle) -> Result<Behaviour, DeviceError> {
        let index = usize::try_from(program.0).unwrap_or(usize::MAX);
        let found = self.loaded.get(index).map(|(_, _, behaviour)| behaviour.clone());
        found.ok_or_else(|| DeviceError::Fault { reason: "no such program is loaded".into() })
    }

    /// Launches the program's kernel, like a device that can have one at a time.
    fn activate(&mut self, program: Handle) {
        let kernel = usize::try_from(program.0).ok().and_then(|i| self.loaded.get(i)).map(|l| l.1);
        if self.running != kernel {
            self.costs.launches += 1;
            self.running = kernel;
        }
    }

    /// Times two programs, whichever process holds the proofs: what [`Device::time`] does, for a scripted device
    /// process.
    ///
    /// # Errors
    /// If it is scripted.
    pub fn time_programs(
        &mut self,
        programs: [Handle; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        self.timings += 1;
        self.rounds += plan.rounds;
        for program in programs {
            self.activate(program);
        }
        let [first, second] = programs.map(|program| self.behaviour(program));
        let sides = [first?, second?];
        if let Some(error) = sides.iter().find_map(|side| side.time_error.clone()) {
            return Err(error);
        }
        let of = |side: Side| match side {
            Side::Incumbent => &sides[0],
            Side::Candidate => &sides[1],
        };
        let rounds =
            (0..plan.rounds).map(|_| ROUND.map(|side| self.sample(of(side), plan.first))).collect();
        let last = &self.expected[plan.tokens.len() - 1];
        let last_logits = sides.each_ref().map(|side| {
            let mut logits = last.clone();
            if side.wrong_when_timed {
                spoil(&mut logits);
            }
            logits
        });
        let last_chosen = last_logits.each_ref().map(|logits| argmax(logits));
        Ok(Samples { rounds, last_logits, last_chosen, ..Samples::default() })
    }

    /// Programs that are loaded.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }

    fn hold(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) {
        let same = |(other, config): &(_, _)| Arc::ptr_eq(other, program) && config == kernel;
        if !self.live.iter().any(same) {
            self.live.push((program.clone(), *kernel));
        }
        self.most_live = self.most_live.max(self.live.len());
    }

    fn sample(&mut self, behaviour: &Behaviour, first: usize) -> f64 {
        let uniform = behaviour.noise * (self.rng.random::<f64>() - 0.5);
        let us = behaviour.us + behaviour.us_per_position * first as f64;
        us * (1.0 + uniform + self.weather())
    }

    /// The slowdown of the next block, independent of the program.
    fn weather(&mut self) -> f64 {
        if self.jitter == Jitter::default() {
            return 0.0;
        }
        let Jitter { sigma, keeps, walk, trend, spikes, spike, steps } = self.jitter;
        // The sum of twelve is close to normal, with a standard deviation of one.
        let mut normal = || (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0;
        self.weather.kept = keeps * self.weather.kept + sigma * normal();
        self.weather.walked += walk * normal() + trend;
        if self.rng.random_bool(steps.0) {
            self.weather.stepped = !self.weather.stepped;
        }
        let hit = self.rng.random_bool(spikes);
        // A Pareto tail: one interruption in thirty is ten times as long.
        let long = self.rng.random::<f64>().max(1e-4).powf(-2.0 / 3.0);
        let step = if self.weather.stepped { steps.1 } else { 0.0 };
        self.weather.kept + self.weather.walked + step + if hit { spike * long } else { 0.0 }
    }
}

fn spoil(logits: &mut [f32]) {
    for value in logits {
        *value = 1.0 - *value;
    }
}

impl Device for ScriptedDevice<'_> {
    fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.card.0.clone(),
            uuid: self.card.1.clone(),
            bandwidth: self.bandwidth,
            cache_bytes: 0,
            ..DeviceInfo::default()
        }
    }

    fn prepare(
        &mut self,
        program: &Arc<Verified<Program>>,
        kernel: &KernelConfig,
    ) -> Result<Handle, DeviceError> {
        let id = program.id();
        let same = |(other, config, _): &(String, KernelConfig, Behaviour)| {
            *other == id && config == kernel
        };
        if let Some(index) = self.loaded.iter().position(same) {
            self.hold(program, kernel);
            return Ok(Handle(index as u64));
        }
        let behaviour = (self.script)(program, kernel);
        if let Some(error) = behaviour.load_error.clone() {
            return Err(error);
        }
        if !self.compiled.contains(kernel) {
            self.compiled.push(*kernel);
            self.costs.compiles += 1;
        }
        self.costs.loads += 1;
        self.loaded.push((id, *kernel, behaviour));
        self.sequences.push(0);
        self.fresh.push(0);
        self.hold(program, kernel);
        Ok(Handle(self.loaded.len() as u64 - 1))
    }

    fn run(&mut self, program: Handle, tokens: &[u32], first: usize) -> Result<Ran, DeviceError> {
        self.activate(program);
        let behaviour = self.behaviour(program)?;
        self.runs += usize::from(first == 0);
        let fresh = &mut self.fresh[program.0 as usize];
        *fresh += usize::from(first == 0);
        let is_second = fresh.is_multiple_of(2);
        self.positions += tokens.len() - first;
        if let Some(error) = behaviour.run_error {
            return Err(error);
        }
        let sequence = &mut self.sequences[program.0 as usize];
        if first > *sequence {
            let reason = format!("the sequence has {sequence} positions, not {first}");
            return Err(DeviceError::Fault { reason });
        }
        *sequence = tokens.len();
        let mut rows = self.expected[first..tokens.len()].to_vec();
        let wrong_from = behaviour.wrong_from.unwrap_or(usize::MAX).max(first) - first;
        rows.iter_mut().skip(wrong_from).for_each(|row| spoil(row));
        if behaviour.wrong {
            rows.iter_mut().for_each(|row| spoil(row));
        }
        if let Some((position, word)) = behaviour.unrepeatable.filter(|_| is_second)
            && let Some(row) = position.checked_sub(first).and_then(|at| rows.get_mut(at))
        {
            row[word] = f32::from_bits(row[word].to_bits() ^ 1);
        }
        let chosen = rows.iter().map(|row| argmax(row)).collect();
        Ok(Ran { logits: rows, chosen, ..Ran::default() })
    }

    fn hand_over(&mut self, from: Handle, to: Handle) -> Result<(), DeviceError> {
        let _ = (self.behaviour(from)?, self.behaviour(to)?);
        let length = std::mem::take(&mut self.sequences[from.0 as usize]);
        self.sequences[to.0 as usize] = length;
        Ok(())
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn time(
        &mut self,
        contenders: [Contender<'_>; 2],
        plan: &Plan<'_>,
    ) -> Result<Samples, DeviceError> {
        self.time_programs(contenders.map(|contender| contender.handle()), plan)
    }

    fn release(&mut self, program: &Arc<Verified<Program>>, kernel: &KernelConfig) {
        self.live.retain(|(other, config)| !Arc::ptr_eq(other, program) || config != kernel);
    }
}
