//! The common input of the commands: a loaded model, its target and the schedule from a file.

use ir::program::{Program, Verified, check_seqs};
use ir::schedule::{KernelConfig, ScheduleConfig};
use ir::{Graph, Rule, Target, Violations};
use model::Model;
use search::{Expected, Gate, KernelId, TIMED_TOKENS};
use vm_device::Variant;

use crate::cli::{DeviceChoice, Gpus, KvArgs, ModelArgs, PlaceArgs};
use crate::config_source::ConfigSource;
use crate::device::probe::live_target;
use crate::failure::Failure;
use crate::memory::{self, Use};
use crate::{models, report};

/// The target when there is no live device and none is named.
const DEFAULT_TARGET: &str = "h200";

/// Tokens of the key/value cache by default.
const DEFAULT_KV_CAPACITY: u32 = 4096;

/// Tokens of context at which latencies are predicted.
const PREDICTED_POSITION: u32 = 128;

/// A model and where it runs.
pub(crate) struct Context {
    pub(crate) model: Model,
    pub(crate) target: Target,
    /// Tokens of the key/value cache.
    pub(crate) kv_capacity: u32,
    /// The model as it was named.
    pub(crate) name: String,
    /// The target, if one was named.
    pub(crate) named_target: Option<String>,
    pub(crate) device: DeviceChoice,
    /// The numbers of the GPUs that run a step.
    pub(crate) cards: Vec<u32>,
    /// Whether the model was given without weights: then they are random.
    pub(crate) shape_only: bool,
    /// Sequences that a step of a search runs at once.
    pub(crate) batch: u32,
}

impl Context {
    pub(crate) fn new(args: &ModelArgs) -> Result<Self, Failure> {
        Self::load(&args.model, &args.place)
    }

    /// The same for a command to which the model's shape is enough: it may be without weights.
    pub(crate) fn of_shape(args: &ModelArgs) -> Result<Self, Failure> {
        let context = Self::of(models::load_shape(&args.model)?, &args.model, &args.place)?;
        context.say_notes();
        Ok(context)
    }

    /// As [`of_shape`](Self::of_shape) where nothing but the CPU runs it, which predicts; else as [`new`](Self::new).
    pub(crate) fn of_shape_on_cpu(args: &ModelArgs) -> Result<Self, Failure> {
        if args.place.device == DeviceChoice::Cpu { Self::of_shape(args) } else { Self::new(args) }
    }

    /// The same; a cache without a given size gets room for `tokens`, limited by the model's positions.
    pub(crate) fn with_room(name: &str, place: &PlaceArgs, tokens: u32) -> Result<Self, Failure> {
        let mut model = if place.device == DeviceChoice::Cpu {
            models::load_shape(name)?
        } else {
            (models::load(name)?, false)
        };
        model.0.reach(place.kv_capacity.unwrap_or(tokens));
        let mut context = Self::of(model, name, place)?;
        context.say_notes();
        if place.kv_capacity.is_none() {
            let needed = tokens.min(context.positions_max());
            context.kv_capacity = context.kv_capacity.max(needed);
        }
        Ok(context)
    }

    /// Opens the model, and says what the user should know about it.
    pub(crate) fn load(name: &str, place: &PlaceArgs) -> Result<Self, Failure> {
        let context = Self::open(name, place)?;
        context.say_notes();
        Ok(context)
    }

    /// The same without a word, for a process whose parent has said it.
    pub(crate) fn open(name: &str, place: &PlaceArgs) -> Result<Self, Failure> {
        Self::of((models::load(name)?, false), name, place)
    }

    fn say_notes(&self) {
        for note in &self.model.notes {
            report::say(&format!("{}: {note}", self.graph().name));
        }
    }

    fn of(
        (mut model, shape_only): (Model, bool),
        name: &str,
        place: &PlaceArgs,
    ) -> Result<Self, Failure> {
        let target = choose_target(place)?;
        tracing::info!(
            model = model.graph.name,
            layers = model.graph.layers.len(),
            weight_bytes = model.graph.weight_bytes(),
            target = target.name,
            "model opened"
        );
        model.reach(place.kv_capacity.unwrap_or(0));
        model.graph.kv_dtype = place.kv.kv_dtype;
        let kv_capacity = kv_capacity(place.kv_capacity, &model.graph)?;
        let (name, named_target) = (name.to_owned(), place.target.clone());
        let device = place.device;
        let cards = place.gpus.map_or_else(|| (0..target.cards()).collect(), Gpus::cards);
        let batch = 1;
        Ok(Self {
            model,
            target,
            kv_capacity,
            name,
            named_target,
            device,
            cards,
            shape_only,
            batch,
        })
    }

    /// The same for steps of several sequences at once, if the model's weights can be shared by them.
    pub(crate) fn for_steps_of(self, batch: u32) -> Result<Self, Failure> {
        if batch > 1 {
            self.check_batch(&self.default_config(), batch)?;
        }
        Ok(Self { batch, ..self })
    }

    /// Refuses a model or schedule whose weights a batch cannot share.
    pub(crate) fn check_batch(&self, config: &ScheduleConfig, batch: u32) -> Result<(), Failure> {
        let program = self.lowered(config)?;
        check_seqs(&program, batch)
            .map_err(|violations| Failure::usage(format!("--batch {batch}: {violations}")))
    }

    pub(crate) fn graph(&self) -> &Graph {
        &self.model.graph
    }

    /// The most tokens that a key/value cache can hold.
    pub(crate) fn positions_max(&self) -> u32 {
        positions_max(self.graph())
    }

    /// Refuses a context after which `timed` tokens do not fit into `most` positions.
    pub(crate) fn check_timed(&self, tokens: u32, timed: u32, most: u32) -> Result<(), Failure> {
        if (1..=most.saturating_sub(timed)).contains(&tokens) {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "--context {tokens} is out of range: legal are 1 to {}, since {timed} tokens of {} are timed after it and there are {most} positions; --kv-capacity makes more",
            most.saturating_sub(timed),
            self.graph().name
        )))
    }

    /// The GPUs of a machine.
    pub(crate) fn gpus(&self) -> Vec<vm_host::Card> {
        self.cards.iter().map(|&card| vm_host::Card::new(card)).collect()
    }

    /// Refuses several GPUs where only one is supported.
    pub(crate) fn one_gpu(&self, what: &str) -> Result<(), Failure> {
        if self.target.devices == 1 {
            return Ok(());
        }
        let target = &self.target.name;
        Err(Failure::missing(format!(
            "{what} works on one GPU so far, not on {target}: leave it out, or use one GPU (without --gpus and --emulate)"
        )))
    }

    /// The flag that chose the element type of keys and values.
    pub(crate) fn kv(&self) -> KvArgs {
        KvArgs { kv_dtype: self.graph().kv_dtype }
    }

    /// The options of lowering.
    pub(crate) fn lower_options(&self) -> lower::Options {
        lower::Options { kv_capacity: self.kv_capacity }
    }

    /// Tokens of context at which a latency is predicted.
    pub(crate) fn predicted_at(&self) -> u32 {
        PREDICTED_POSITION.min(self.kv_capacity - 1)
    }

    /// Lowers a schedule that may still be illegal.
    pub(crate) fn lowered(&self, config: &ScheduleConfig) -> Result<Verified<Program>, Failure> {
        let (graph, target) = (self.graph(), &self.target);
        let valid = ir::schedule::validate(*config, graph, target)
            .map_err(|violations| Failure::refused(violations.to_string()))?;
        Ok(lower::lower(&valid, graph, target, self.lower_options())?)
    }

    /// A gate whose candidates are judged at these contexts, if there are any: predicted there, and timed there on a
    /// device. Evaluates the graph over the longest.
    pub(crate) fn gate_at<'a>(
        &'a self,
        seed: u64,
        positions: Option<usize>,
        kernel_id: KernelId<'a>,
        contexts: &[u32],
    ) -> Result<Gate<'a>, Failure> {
        if contexts.is_empty() {
            return self.gate(seed, positions, kernel_id);
        }
        for &tokens in contexts {
            self.check_timed(tokens, TIMED_TOKENS as u32, self.kv_capacity)?;
        }
        memory::check(&self.model, Use::Gate { on_gpu: positions.is_some() })?;
        let (graph, weights) = (self.graph(), &*self.model.weights);
        let mut expected = self.expected(seed, positions)?;
        if positions.is_some() {
            let timed = expected.timed_after(graph, weights, seed, contexts, TIMED_TOKENS);
            expected = timed.map_err(|error| self.unevaluated(error))?;
        }
        let (target, options) = (&self.target, self.lower_options());
        let gate = Gate::new(graph, weights, target, options, kernel_id, expected);
        Ok(gate.with_contexts(contexts).with_batch(self.batch))
    }

    /// The gate of this model, on this many positions, or on those of the reference VM. Computes the expected values.
    pub(crate) fn gate<'a>(
        &'a self,
        seed: u64,
        positions: Option<usize>,
        kernel_id: KernelId<'a>,
    ) -> Result<Gate<'a>, Failure> {
        memory::check(&self.model, Use::Gate { on_gpu: positions.is_some() })?;
        let (graph, weights) = (self.graph(), &*self.model.weights);
        let expected = self.expected(seed, positions)?;
        let gate =
            Gate::new(graph, weights, &self.target, self.lower_options(), kernel_id, expected);
        Ok(gate.with_contexts(&[self.predicted_at()]).with_batch(self.batch))
    }

    /// The values that a gate compares with.
    fn expected(&self, seed: u64, positions: Option<usize>) -> Result<Expected, Failure> {
        let (graph, weights, on) = (self.graph(), &*self.model.weights, (seed, positions));
        Expected::of_batch(graph, weights, self.kv_capacity, on, self.batch)
            .map_err(|error| self.unevaluated(error))
    }

    /// The error of a graph that cannot be evaluated.
    pub(crate) fn unevaluated(&self, error: impl std::fmt::Display) -> Failure {
        Failure::usage(format!("{} cannot be evaluated: {error}", self.graph().name))
    }

    /// The kernel build of a kernel config: a hash of source, options and architecture.
    pub(crate) fn kernel_id(&self, kernel: &KernelConfig) -> String {
        self.kernel_id_of(kernel, self.batch)
    }

    /// The kernel build with a given batch size.
    pub(crate) fn kernel_id_of(&self, kernel: &KernelConfig, seqs: u32) -> String {
        vm_host::kernel_id(&self.variant(kernel, seqs), &self.target.arch)
    }

    /// The kernel variant of a kernel config with a given batch size.
    pub(crate) fn variant(&self, kernel: &KernelConfig, seqs: u32) -> Variant {
        let devices = self.target.devices;
        Variant { seqs, devices, ..vm_host::variant(kernel, self.graph()) }
    }

    /// The schedule that fills in a config's missing knobs.
    pub(crate) fn default_config(&self) -> ScheduleConfig {
        ir::schedule::default_config(self.graph(), &self.target)
    }

    /// The neutral schedule.
    pub(crate) fn neutral_config(&self) -> ScheduleConfig {
        ir::schedule::neutral_config(self.graph(), &self.target)
    }

    /// The schedule of a config. The inner error is a refusal by a gate; an unreadable file is an outer error.
    pub(crate) fn config(
        &self,
        source: &ConfigSource,
    ) -> Result<Result<ScheduleConfig, Violations>, Failure> {
        let text = source.text()?;
        match ir::schedule::read_config(&text, self.graph(), &self.target) {
            Ok(valid) => Ok(Ok(*valid)),
            Err(violations) if violations.has(Rule::SJson) => Err(Failure::usage(format!(
                "{source}: {violations}; a config is a JSON object such as {{\"pipeline\": {{\"stages\": 8}}}}"
            ))),
            Err(violations) => Ok(Err(violations)),
        }
    }

    /// The schedule of a config, for commands whose document has no place for violations.
    pub(crate) fn valid_config(&self, source: &ConfigSource) -> Result<ScheduleConfig, Failure> {
        self.config(source)?
            .map_err(|violations| Failure::refused(format!("{source}: {violations}")))
    }
}

/// Tokens of the key/value cache: the requested number, if the model has as many positions.
pub(crate) fn kv_capacity(asked: Option<u32>, graph: &Graph) -> Result<u32, Failure> {
    let most = positions_max(graph);
    match asked {
        None => Ok(most.min(DEFAULT_KV_CAPACITY)),
        Some(tokens) if (1..=most).contains(&tokens) => Ok(tokens),
        Some(tokens) => Err(Failure::usage(format!(
            "--kv-capacity {tokens} is out of range: {} takes 1 to {most}",
            graph.name
        ))),
    }
}

fn positions_max(graph: &Graph) -> u32 {
    graph.max_positions.clamp(1, abi::KV_CAPACITY_MAX)
}

fn choose_target(place: &PlaceArgs) -> Result<Target, Failure> {
    let target = choose_one(place)?;
    if let Some(parts) = place.emulate {
        let named = &target.name;
        if target.devices > 1 && !(target.emulated && target.devices == parts) {
            let message = format!("--target {named} and --emulate {parts} differ: drop one");
            return Err(Failure::usage(message));
        }
        if place.device == DeviceChoice::Eval {
            let message = "--emulate is for programs, and --device eval runs none";
            return Err(Failure::usage(message));
        }
        return Ok(if target.emulated { target } else { target.divided(parts) });
    }
    let Some(gpus) = place.gpus.map(Gpus::count) else { return Ok(target) };
    if target.devices > 1 && target.devices != gpus {
        let name = &target.name;
        return Err(Failure::usage(format!("--target {name} and --gpus {gpus} differ: drop one")));
    }
    if gpus > 1 && place.device == DeviceChoice::Eval {
        let message = "--gpus is for programs, and --device eval runs none; use --device cpu";
        return Err(Failure::usage(message));
    }
    Ok(target.times(gpus))
}

fn choose_one(place: &PlaceArgs) -> Result<Target, Failure> {
    if let Some(name) = &place.target {
        let named = Target::by_name(name).map_err(|error| Failure::usage(error.to_string()))?;
        // Cards of one name differ in size: the live card's own data is used.
        let here = (place.device != DeviceChoice::Cpu).then(live_target).flatten();
        let here = here.map(|here| here.like(&named));
        return Ok(here.filter(|here| here.name == named.name).unwrap_or(named));
    }
    if place.device != DeviceChoice::Cpu
        && let Some(target) = live_target()
    {
        return Ok(target);
    }
    Target::by_name(DEFAULT_TARGET).map_err(|error| Failure::usage(error.to_string()))
}
