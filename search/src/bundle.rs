//! A bundle: one file with the result of a schedule, which anybody can verify as far as that is possible without the card.
//!
//! A time cannot be verified elsewhere. What was timed can: the bundle has the schedule, the ids of the program and the
//! kernel that ran, every raw sample, and its own hash. [`Bundle::read`] rejects an edited file and figures that do not
//! follow from the samples; [`Bundle::rebuild`] validates and lowers the schedule again and rejects another program.

use corpus::Conditions;
use ir::program::{Program, Verified};
use ir::schedule::ScheduleConfig;
use ir::{Graph, Target, Valid};
use reference_vm::accuracy::Accuracy;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::assess::INTERVAL_ROUNDS;
use crate::device::{Samples, Side};
use crate::measure::{median, median_interval};
use crate::verdict::GateReport;

/// The schema id of a bundle.
pub const BUNDLE_SCHEMA: &str = "amk.bundle.v2";
/// The previous schema, whose conditions may have `notes` instead of fields. It is read as well.
const OLDER_SCHEMA: &str = "amk.bundle.v1";

/// The error of the device's logits relative to the `f32` evaluation of the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// Positions compared.
    pub positions: usize,
    /// Worst relative error of a position (L2 norms).
    pub rel_err_worst: f64,
    /// Mean of the same.
    pub rel_err_mean: f64,
    /// Mean divergence, in nats.
    pub kl_mean: f64,
    /// Positions with a decided most likely token.
    pub top1_decided: usize,
    /// Those of them with the same token.
    pub top1_equal: usize,
}

impl From<Accuracy> for Proof {
    fn from(accuracy: Accuracy) -> Self {
        Self {
            positions: accuracy.positions,
            rel_err_worst: accuracy.rel_worst,
            rel_err_mean: accuracy.rel_mean,
            kl_mean: accuracy.kl_mean,
            top1_decided: accuracy.decided,
            top1_equal: accuracy.decided_equal,
        }
    }
}

impl Proof {
    fn holds(&self) -> bool {
        (0.0..=Accuracy::REL_MAX).contains(&self.rel_err_worst)
            && (0.0..=self.rel_err_worst).contains(&self.rel_err_mean)
            && (0.0..=Accuracy::KL_MAX).contains(&self.kl_mean)
            && self.top1_equal == self.top1_decided
            && self.top1_decided <= self.positions
            && self.positions > 0
    }
}

/// A schedule with its measured result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bundle {
    /// [`BUNDLE_SCHEMA`].
    pub schema: String,
    /// The model, as `--model` took it.
    pub model: String,
    /// Element type of its weights.
    pub dtype: String,
    /// The target of the schedule.
    pub target: String,
    /// Tokens before the timed ones.
    pub context: u32,
    /// Positions of the key/value cache.
    pub kv_capacity: u32,
    /// Seed of the tokens.
    pub seed: u64,
    /// The schedule.
    pub config: ScheduleConfig,
    /// Hash of the schedule.
    pub schedule_id: String,
    /// Hash of the program that it lowered to.
    pub program_id: String,
    /// Hash of the kernel build: source, options, architecture.
    pub kernel_id: String,
    /// Where it was measured.
    pub conditions: Conditions,
    /// The gates that it passed.
    pub gates: Vec<GateReport>,
    /// How accurate it was.
    pub accuracy: Proof,
    /// Tokens of a timed block.
    pub timed_tokens: u32,
    /// Measured: microseconds per token, the median of the candidate's blocks.
    pub median_us: f64,
    /// 99% interval of the median.
    pub ci_us: [f64; 2],
    /// Every block, four per round: this program against itself; the second and third are the candidate's.
    pub rounds_us: Vec<[f64; 4]>,
    /// The bound: `bytes_per_token` over `bandwidth`, in microseconds.
    pub bound_us: f64,
    /// Bytes that a step reads at the timed positions.
    pub bytes_per_token: u64,
    /// Bytes per second, measured in the same process.
    pub bandwidth: f64,
    /// What else a reader should know.
    pub notes: Vec<String>,
}

/// Why a bundle is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is not a bundle.
    #[error("not a bundle: {0}")]
    Unreadable(String),
    /// The hash does not fit, or figures do not follow from the samples.
    #[error("{0}")]
    Tampered(String),
    /// It does not prove that the schedule was right.
    #[error("{0}")]
    Unproven(String),
    /// The schedule is not legal, or lowers to another program now.
    #[error("{0}")]
    Stale(String),
}

impl Bundle {
    /// Reads a bundle and checks everything that needs no model.
    ///
    /// # Errors
    /// The first problem found.
    pub fn read(text: &str) -> Result<Self, Refusal> {
        let unreadable = |error: serde_json::Error| Refusal::Unreadable(error.to_string());
        let mut fields: Map<String, Value> = serde_json::from_str(text).map_err(unreadable)?;
        let schema = fields.get("schema").and_then(Value::as_str).unwrap_or("none");
        if ![BUNDLE_SCHEMA, OLDER_SCHEMA].contains(&schema) {
            return Err(Refusal::Unreadable(format!("its schema is {schema}")));
        }
        corpus::check_seal(&fields).map_err(Refusal::Tampered)?;
        fields.remove("hash");
        let bundle: Self = serde_json::from_value(fields.into()).map_err(unreadable)?;
        bundle.check()?;
        Ok(bundle)
    }

    /// The text of the file, with its hash.
    #[must_use]
    pub fn to_text(&self) -> String {
        let fields = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) | Err(_) => Map::new(),
        };
        serde_json::to_string_pretty(&corpus::seal(&fields)).unwrap_or_default() + "\n"
    }

    /// Checks the figures that must follow from others in the file.
    fn check(&self) -> Result<(), Refusal> {
        self.times().map_err(Refusal::Tampered)?;
        let tampered = |what: String| Err(Refusal::Tampered(what));
        if self.config.id() != self.schedule_id {
            return tampered(format!(
                "its schedule is {}, not {}",
                self.config.id(),
                self.schedule_id
            ));
        }
        let is_id =
            |id: &str| id.len() == 16 && id.bytes().all(|b| b"0123456789abcdef".contains(&b));
        if !is_id(&self.program_id) || !is_id(&self.kernel_id) {
            return tampered("its program or kernel has no id (16 hexadecimal digits)".to_owned());
        }
        let end = u64::from(self.context) + u64::from(self.timed_tokens);
        if self.timed_tokens == 0 || end > u64::from(self.kv_capacity) {
            return tampered(format!(
                "{} tokens after {} were timed in a cache of {}",
                self.timed_tokens, self.context, self.kv_capacity
            ));
        }
        let unproven = |what: String| Err(Refusal::Unproven(what));
        if let Some(gate) = self.gates.iter().find(|gate| !gate.passed) {
            return unproven(format!("the gate {} failed: {}", gate.gate, gate.detail));
        }
        let has = |name: &&&str| self.gates.iter().any(|gate| gate.gate == **name);
        if let Some(missing) = GATES.iter().find(|name| !has(name)) {
            return unproven(format!("it does not say that the gate {missing} passed"));
        }
        if !self.accuracy.holds() {
            return unproven("its accuracy is out of bounds".to_owned());
        }
        Ok(())
    }

    /// Checks what follows from the samples: the median and its interval; and that the bound follows from bytes and
    /// bandwidth.
    fn times(&self) -> Result<(), String> {
        let plausible = |us: &f64| us.is_finite() && *us > 0.0;
        if !self.rounds_us.iter().flatten().all(plausible) || !plausible(&self.bound_us) {
            return Err("it has samples or a bound that are no times".to_owned());
        }
        let rounds = self.rounds_us.len();
        if rounds < INTERVAL_ROUNDS {
            return Err(format!("it has {rounds} rounds, an interval takes {INTERVAL_ROUNDS}"));
        }
        let samples = Samples { rounds: self.rounds_us.clone(), ..Samples::default() };
        let values = samples.of(Side::Candidate);
        let found = median(&values);
        if found.to_bits() != self.median_us.to_bits() {
            return Err(format!("its median is {} us, its samples have {found}", self.median_us));
        }
        let interval = median_interval(&values, self.seed);
        if self.ci_us != [interval.low, interval.high] {
            return Err(format!(
                "its interval is {} to {} us, its samples and seed have {} to {}",
                self.ci_us[0], self.ci_us[1], interval.low, interval.high
            ));
        }
        let bound = self.bytes_per_token as f64 / self.bandwidth * 1e6;
        if (bound - self.bound_us).abs() > 1e-9 * self.bound_us {
            return Err(format!(
                "its bound is {} us, its bytes and bandwidth have {bound}",
                self.bound_us
            ));
        }
        Ok(())
    }

    /// Validates and lowers the schedule again: it must become the program that was measured.
    ///
    /// # Errors
    /// If it is not legal, cannot be lowered, or becomes another program.
    pub fn rebuild(
        &self,
        graph: &Graph,
        target: &Target,
    ) -> Result<(Valid<ScheduleConfig>, Verified<Program>), Refusal> {
        if graph.dtype.name() != self.dtype {
            return Err(Refusal::Stale(format!(
                "it was measured with {} weights, the model has {}",
                self.dtype,
                graph.dtype.name()
            )));
        }
        let valid = ir::schedule::validate(self.config, graph, target).map_err(|violations| {
            Refusal::Stale(format!("its schedule is illegal: {violations}"))
        })?;
        let options = lower::Options { kv_capacity: self.kv_capacity };
        let program = lower::lower(&valid, graph, target, options)
            .map_err(|error| Refusal::Stale(format!("its schedule cannot be lowered: {error}")))?;
        self.fits(target, &program)?;
        let id = program.id();
        if id != self.program_id {
            return Err(Refusal::Stale(format!(
                "its schedule lowers to program {id} now, and {} was measured: measure it again",
                self.program_id
            )));
        }
        Ok((valid, program))
    }
}

/// The gates that a measured program passes.
const GATES: &[&str] = &["validate", "lower", "verify", "reference", "device", "bound"];

/// Largest plausible bandwidth, relative to the table: cards of one name differ by a per cent or so.
const BANDWIDTH_SLACK: f64 = 1.05;

/// Smallest plausible bandwidth, relative to the table. A smaller one would make a slow program look near its bound.
const BANDWIDTH_LEAST: f64 = 0.5;

/// Tolerance of a bound at the bundle's own bandwidth, which is measured in each process.
const BOUND_SLACK: f64 = 0.98;

impl Bundle {
    /// Checks that the figures are possible for this program on this target: the card, its bandwidth, the bytes of a
    /// step, the bound.
    fn fits(&self, target: &Target, program: &Program) -> Result<(), Refusal> {
        let tampered = |what: String| Err(Refusal::Tampered(what));
        let card = self.conditions.card.to_lowercase().replace(' ', "");
        if !card.contains(target.of_one()) {
            return Err(Refusal::Unproven(format!(
                "it was measured on another card ({}) than its target {}",
                self.conditions.card, target.name
            )));
        }
        let most = target.total_bandwidth() as f64 * BANDWIDTH_SLACK;
        let least = target.total_bandwidth() as f64 * BANDWIDTH_LEAST;
        if !(least..=most).contains(&self.bandwidth) {
            return tampered(format!(
                "its bandwidth of {} is not that of a {}",
                self.bandwidth, target.name
            ));
        }
        let middle = self.context.saturating_add(self.timed_tokens / 2);
        let bytes = program.stream_bytes() + program.kv_bytes(middle);
        if bytes != self.bytes_per_token {
            return tampered(format!(
                "it says that a step reads {} bytes, the program reads {bytes}",
                self.bytes_per_token
            ));
        }
        // Bytes that the cache holds from one step to the next need not be read again.
        let cached = target.l2_bytes * u64::from(target.cards());
        let bound = bytes.saturating_sub(cached) as f64 / self.bandwidth * 1e6 * BOUND_SLACK;
        if self.median_us < bound {
            return tampered(format!(
                "its median of {} us is below the bound of {bound} us",
                self.median_us
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toy() -> (model::Model, Target) {
        (model::preset("toy").expect("a preset"), Target::by_name("h200").expect("a target"))
    }

    fn interval_of(rounds_us: &[[f64; 4]]) -> [f64; 2] {
        let samples = Samples { rounds: rounds_us.to_vec(), ..Samples::default() };
        let interval = median_interval(&samples.of(Side::Candidate), 0);
        [interval.low, interval.high]
    }

    fn bundle() -> Bundle {
        let (model, target) = toy();
        let config = ir::schedule::default_config(&model.graph, &target);
        let valid = ir::schedule::validate(config, &model.graph, &target).expect("legal");
        let options = lower::Options { kv_capacity: 64 };
        let program = lower::lower(&valid, &model.graph, &target, options).expect("it lowers");
        let bytes = program.stream_bytes() + program.kv_bytes(32);
        let gate = |gate: &str| GateReport {
            gate: gate.to_owned(),
            passed: true,
            detail: "as it should".to_owned(),
        };
        let rounds_us = [[9.0, 25.0, 25.2, 9.0], [9.0, 25.1, 25.1, 9.0]].repeat(2);
        let interval = interval_of(&rounds_us);
        Bundle {
            schema: BUNDLE_SCHEMA.to_owned(),
            model: "toy".to_owned(),
            dtype: model.graph.dtype.name().to_owned(),
            target: "h200".to_owned(),
            context: 16,
            kv_capacity: 64,
            seed: 0,
            config,
            schedule_id: config.id(),
            program_id: program.id(),
            kernel_id: "0123456789abcdef".to_owned(),
            conditions: Conditions { card: "NVIDIA H200".to_owned(), ..Conditions::default() },
            gates: GATES.iter().copied().map(gate).collect(),
            accuracy: Proof {
                positions: 48,
                rel_err_worst: 1e-4,
                rel_err_mean: 1e-5,
                kl_mean: 1e-6,
                top1_decided: 40,
                top1_equal: 40,
            },
            timed_tokens: 32,
            median_us: 25.1,
            ci_us: interval,
            rounds_us,
            bound_us: bytes as f64 / 4e12 * 1e6,
            bytes_per_token: bytes,
            bandwidth: 4e12,
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_bundle_survives_its_file_and_is_rebuilt() {
        let (model, target) = toy();
        let read = Bundle::read(&bundle().to_text()).expect("it is whole");
        assert_eq!(read, bundle());
        let (_, program) = read.rebuild(&model.graph, &target).expect("the same program");
        assert_eq!(program.id(), bundle().program_id);
    }

    #[test]
    fn a_bundle_of_the_schema_before_is_read() {
        let older = Bundle { schema: OLDER_SCHEMA.to_owned(), ..bundle() };
        assert_eq!(Bundle::read(&older.to_text()).expect("it is whole"), older);
    }

    #[test]
    fn a_bundle_of_two_gpus_is_rebuilt_on_two() {
        let model = model::preset("smollm2-135m").expect("a preset");
        let target = Target::by_name("h200x2").expect("a target");
        let config = ir::schedule::default_config(&model.graph, &target);
        let valid = ir::schedule::validate(config, &model.graph, &target).expect("legal");
        let options = lower::Options { kv_capacity: 64 };
        let program = lower::lower(&valid, &model.graph, &target, options).expect("it lowers");
        let bytes = program.stream_bytes() + program.kv_bytes(32);
        let of_two = Bundle {
            target: target.name.clone(),
            model: "smollm2-135m".to_owned(),
            config,
            schedule_id: config.id(),
            program_id: program.id(),
            bytes_per_token: bytes,
            bandwidth: 9e12,
            bound_us: bytes as f64 / 9e12 * 1e6,
            ..bundle()
        };
        let read = Bundle::read(&of_two.to_text()).expect("it is whole");
        read.rebuild(&model.graph, &target).expect("the same program");
        let other = Bundle { target: "h100x2".to_owned(), ..of_two };
        let h100 = Target::by_name("h100x2").expect("a target");
        assert!(matches!(other.rebuild(&model.graph, &h100), Err(Refusal::Unproven(_))));
    }

    #[test]
    fn an_edited_file_is_refused() {
        let text = bundle().to_text().replace("25.1", "24.1");
        assert!(
            matches!(Bundle::read(&text), Err(Refusal::Tampered(why)) if why.contains("edited"))
        );
        assert!(matches!(Bundle::read("{}"), Err(Refusal::Unreadable(_))));
        assert!(matches!(Bundle::read("[]"), Err(Refusal::Unreadable(_))));
    }

    #[test]
    fn figures_that_do_not_follow_are_refused_even_with_a_new_hash() {
        type Forge = fn(&mut Bundle);
        let forged: [(&str, Forge); 19] = [
            ("median", |b| b.median_us = 24.0),
            ("interval", |b| b.ci_us = [20.0, 21.0]),
            ("interval", |b| b.ci_us = [b.median_us; 2]),
            ("interval", |b| b.ci_us = [0.0, 1e6]),
            ("rounds", |b| b.rounds_us.truncate(2)),
            ("kernel", |b| b.kernel_id = "any".to_owned()),
            ("program", |b| b.program_id = "0123456789ABCDEF".to_owned()),
            ("were timed", |b| b.timed_tokens = 0),
            ("were timed", |b| b.context = 60),
            ("gate validate", |b| b.gates.retain(|gate| gate.gate == "device")),
            ("gate bound", |b| b.gates.retain(|gate| gate.gate != "bound")),
            ("accuracy", |b| b.accuracy.rel_err_mean = -1.0),
            ("accuracy", |b| b.accuracy.kl_mean = -1e-9),
            ("accuracy", |b| (b.accuracy.top1_decided, b.accuracy.top1_equal) = (49, 49)),
            ("bound", |b| b.bound_us = 20.0),
            ("schedule", |b| b.config.pipeline.stages -= 1),
            ("gate reference", |b| b.gates[3].passed = false),
            ("device", |b| b.gates.truncate(4)),
            ("accuracy", |b| b.accuracy.rel_err_worst = 0.1),
        ];
        for (word, forge) in forged {
            let mut bundle = bundle();
            forge(&mut bundle);
            let refusal = Bundle::read(&bundle.to_text()).expect_err(word);
            assert!(refusal.to_string().contains(word), "{word}: {refusal}");
        }
    }

    #[test]
    fn figures_that_this_program_cannot_have_on_this_card_are_refused() {
        type Forge = fn(&mut Bundle);
        let forged: [(&str, Forge); 6] = [
            ("another card", |b| b.conditions.card = "NVIDIA A100-SXM4-80GB".to_owned()),
            ("bandwidth", |b| (b.bandwidth, b.bound_us) = (1e15, b.bytes_per_token as f64 / 1e9)),
            ("bandwidth", |b| (b.bandwidth, b.bound_us) = (1.0, b.bytes_per_token as f64 * 1e6)),
            ("bandwidth", |b| (b.bandwidth, b.bound_us) = (4e11, b.bytes_per_token as f64 / 4e5)),
            ("bytes", |b| (b.bytes_per_token, b.bound_us) = (4, 4.0 / 4e12 * 1e6)),
            ("no times", |b| (b.rounds_us, b.median_us) = (vec![[0.0; 4]], 0.0)),
        ];
        let (model, target) = toy();
        for (word, forge) in forged {
            let mut bundle = bundle();
            forge(&mut bundle);
            let read = Bundle::read(&bundle.to_text());
            let refusal =
                read.and_then(|bundle| bundle.rebuild(&model.graph, &target)).expect_err(word);
            assert!(refusal.to_string().contains(word), "{word}: {refusal}");
        }
    }

    #[test]
    fn another_program_is_refused() {
        let (model, target) = toy();
        let mut other = bundle();
        other.program_id = "0000000000000000".to_owned();
        let refusal = other.rebuild(&model.graph, &target).expect_err("another program");
        assert!(refusal.to_string().contains("measure it again"), "{refusal}");
        let mut other = bundle();
        other.config.pipeline.stages = 25;
        other.config.pipeline.stage_bytes = 32768;
        let refusal = other.rebuild(&model.graph, &target).expect_err("an illegal schedule");
        assert!(refusal.to_string().contains("illegal"), "{refusal}");
    }
}
